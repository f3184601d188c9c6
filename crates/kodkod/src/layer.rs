//! One MoE layer over a group: `y = shared(x) + sum over k in order of w_k expert_k(x)`, and its gradients.

use std::any::{Any, TypeId};
use std::sync::Arc;

use half::bf16;
use kodkod_core::schedule::experts_per_rank;
use kodkod_core::{
    Error, GradientElement, Knobs, Precision, Result, Routing, Shape, SharedWeights, WeightGradients, Weights,
};
use kodkod_cpu::{CpuGroup, Element, Saved};

use crate::cuda_layer::{OnGpu, SavedOnGpu};
use crate::group::{ExpertGroup, Machine};

/// A layer of a shape, run by a group, in storage type `T` (`bf16` or `f32`). It holds no weights: they are the
/// caller's, and may change from call to call.
///
/// ```
/// use kodkod::{ExpertGroup, Knobs, MoeLayer, Routing, Shape, WeightGradients, Weights};
///
/// let (tokens, shape) = (5, Shape::new(64, 32, 4, 2)); // hidden 64, intermediate 32, 4 experts, top-2
/// let group = ExpertGroup::cpu(2)?;
/// let layer = MoeLayer::<f32>::new(&group, shape.clone(), Knobs::for_shape(&shape))?;
///
/// let weight = vec![0.01_f32; 4 * 32 * 64];
/// let weights = Weights { gate: &weight, up: &weight, down: &weight, biases: None, shared: None };
/// // Rank 0 holds two tokens, rank 1 three; the last token has one route only.
/// let ids = [0, 1, 2, 3, 1, 1, 3, 0, 2, -1];
/// let routing = Routing::new(&shape, &ids, &[0.5; 10], &[2, 3])?;
///
/// let x = vec![1.0; tokens * 64];
/// let (y, context) = layer.forward(&x, &routing, &weights)?;
/// assert_eq!(y.len(), tokens * 64);
///
/// let mut gradients = WeightGradients::zeros(&shape);
/// let (dx, d_topk_weights) =
///     layer.backward(&context, &y, &x, &routing, &weights, gradients.as_mut(), false)?;
/// assert_eq!((dx.len(), d_topk_weights.len()), (tokens * 64, 10));
/// assert_eq!(d_topk_weights[9], 0.0); // no route, no gradient
/// # Ok::<(), kodkod::Error>(())
/// ```
#[derive(Clone)]
pub struct MoeLayer<T> {
    machine: LayerMachine,
    shape: Shape,
    knobs: Knobs,
    _elements: std::marker::PhantomData<T>,
}

#[derive(Clone)]
enum LayerMachine {
    Cpu(Arc<CpuGroup>),
    Cuda(Arc<OnGpu>),
}

/// What a forward keeps for its backward.
pub struct Context<T> {
    saved: SavedOn<T>,
}

enum SavedOn<T> {
    Cpu(Saved<T>),
    Cuda(SavedOnGpu),
}

impl<T> Context<T> {
    fn shape(&self) -> &Shape {
        match &self.saved {
            SavedOn::Cpu(saved) => saved.shape(),
            SavedOn::Cuda(saved) => &saved.shape,
        }
    }

    fn routing(&self) -> &Routing {
        match &self.saved {
            SavedOn::Cpu(saved) => saved.routing(),
            SavedOn::Cuda(saved) => &saved.routing,
        }
    }
}

impl<T: Element> MoeLayer<T> {
    /// A layer of `shape` on the ranks of `group`.
    ///
    /// # Errors
    /// [`Error::Invalid`] where a size or a knob is not allowed, or the ranks do not divide the experts; on a GPU also
    /// where `T` is `f32`, or a width is no multiple of 64.
    pub fn new(group: &ExpertGroup, shape: Shape, knobs: Knobs) -> Result<Self> {
        shape.validate()?;
        knobs.validate()?;
        experts_per_rank(&shape, group.ranks())?;
        let machine = match group.machine() {
            Machine::Cpu(cpu) => LayerMachine::Cpu(cpu.clone()),
            Machine::Processes(_) | Machine::CudaProcess(_) => {
                let allowed = "a layer over all ranks needs them in one process; for a group of processes there is RankLayer";
                return Err(Error::invalid("group", "of processes", allowed));
            }
            Machine::Cuda(_) if T::PRECISION == Precision::F32 => {
                let allowed = "a GPU computes in bf16; for f32 there is ExpertGroup::cpu";
                return Err(Error::invalid("precision", "f32", allowed));
            }
            Machine::Cuda(cuda) => LayerMachine::Cuda(Arc::new(OnGpu::new(cuda, &shape, &knobs)?)),
        };
        Ok(MoeLayer { machine, shape, knobs, _elements: std::marker::PhantomData })
    }

    /// The layer's shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The layer's knobs.
    pub fn knobs(&self) -> &Knobs {
        &self.knobs
    }

    /// `y` `[tokens, hidden]` for `x` `[tokens, hidden]`: all ranks' tokens, in rank order, as `routing` splits them.
    ///
    /// # Errors
    /// [`Error::Length`] or [`Error::Invalid`] for an argument that does not fit the shape or the group; nothing is
    /// computed then. [`Error::Stalled`] where a task waited too long; [`Error::Machine`] in a GPU's own words.
    pub fn forward(&self, x: &[T], routing: &Routing, weights: &Weights<T>) -> Result<(Vec<T>, Context<T>)> {
        self.check("x", x, routing, weights)?;
        let (y, saved) = match &self.machine {
            LayerMachine::Cpu(cpu) => {
                let (y, saved) = cpu.forward(&self.shape, &self.knobs, x, routing, weights)?;
                (y, SavedOn::Cpu(saved))
            }
            LayerMachine::Cuda(gpu) => {
                let (y, saved) = gpu.forward(as_bf16(x), routing, &weights_as_bf16(weights))?;
                (from_bf16(y), SavedOn::Cuda(saved))
            }
        };
        Ok((y, Context { saved }))
    }

    /// `dx` `[tokens, hidden]` and `d_topk_weights` `[tokens, top_k]` for `dy` `[tokens, hidden]`, with the `x`,
    /// routing and weights of the forward. Weight gradients go to `gradients`: added to what is there where
    /// `accumulate` is set, else overwriting it, also for experts without rows.
    ///
    /// Those of gate, up and down are stored in `G`, `f32` or `bf16`. The sum over an expert's rows runs in `f32` in
    /// both, and starts from what is there where it accumulates; in bf16 it is rounded once, at its end. For bf16 the
    /// CPU takes an `f32` buffer as large as the gradients during the call. A GPU keeps kernels and buffers for one of
    /// the types: where a layer's calls change it, the forward runs again.
    ///
    /// # Errors
    /// As for [`MoeLayer::forward`]; [`Error::Invalid`] where the routing is not the forward's.
    pub fn backward<G: GradientElement>(
        &self,
        context: &Context<T>,
        dy: &[T],
        x: &[T],
        routing: &Routing,
        weights: &Weights<T>,
        gradients: WeightGradients<&mut [G], &mut [f32]>,
        accumulate: bool,
    ) -> Result<(Vec<T>, Vec<f32>)> {
        self.check("x", x, routing, weights)?;
        self.check("dy", dy, routing, weights)?;
        gradients.validate(&self.shape)?;
        if *context.shape() != self.shape {
            return Err(Error::invalid(
                "context",
                "of another shape",
                "the context of this layer's forward is needed",
            ));
        }
        if context.routing() != routing {
            return Err(Error::invalid(
                "routing",
                "another than the forward's",
                "the same routing is needed",
            ));
        }
        match (&self.machine, &context.saved) {
            (LayerMachine::Cpu(cpu), SavedOn::Cpu(saved)) => {
                cpu.backward(saved, dy, x, weights, gradients, accumulate)
            }
            (LayerMachine::Cuda(gpu), SavedOn::Cuda(saved)) => {
                let weights = weights_as_bf16(weights);
                let (dx, d_topk_weights) =
                    gpu.backward(saved, as_bf16(dy), as_bf16(x), &weights, gradients, accumulate)?;
                Ok((from_bf16(dx), d_topk_weights))
            }
            _ => Err(Error::invalid(
                "context",
                "of another machine",
                "the context of this layer's forward is needed",
            )),
        }
    }

    fn check(&self, name: &str, rows: &[T], routing: &Routing, weights: &Weights<T>) -> Result<()> {
        let ranks = match &self.machine {
            LayerMachine::Cpu(cpu) => cpu.options().ranks,
            LayerMachine::Cuda(gpu) => gpu.ranks(),
        };
        if routing.ranks() != ranks {
            let allowed = format!("the group has {ranks} ranks, one count each is needed");
            return Err(Error::invalid("ranks of the routing", routing.ranks(), allowed));
        }
        if routing.top_k() != self.shape.top_k {
            let allowed = format!("the layer's top_k is {}", self.shape.top_k);
            return Err(Error::invalid("top_k of the routing", routing.top_k(), allowed));
        }
        if let Some(id) = routing.ids().iter().find(|&&id| id >= self.shape.experts as i32) {
            return Err(Error::invalid(
                "expert of the routing",
                id,
                format!("the layer has {}", self.shape.experts),
            ));
        }
        Error::check_len(name, rows.len(), &[("tokens", routing.tokens()), ("hidden", self.shape.hidden)])?;
        weights.validate(&self.shape)
    }
}

/// Elements of a layer that is known to be in bf16, as such.
pub(crate) fn as_bf16<T: Element>(elements: &[T]) -> &[bf16] {
    assert_eq!(TypeId::of::<T>(), TypeId::of::<bf16>(), "a GPU's layer is in bf16");
    // SAFETY: the two types are the same.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), elements.len()) }
}

pub(crate) fn weights_as_bf16<'a, T: Element>(w: &Weights<'a, T>) -> Weights<'a, bf16> {
    Weights {
        gate: as_bf16(w.gate),
        up: as_bf16(w.up),
        down: as_bf16(w.down),
        biases: w.biases,
        shared: w.shared.map(|s| SharedWeights {
            gate: as_bf16(s.gate),
            up: as_bf16(s.up),
            down: as_bf16(s.down),
            output_gate: s.output_gate,
        }),
    }
}

pub(crate) fn from_bf16<T: Element>(elements: Vec<bf16>) -> Vec<T> {
    let any: Box<dyn Any> = Box::new(elements);
    *any.downcast().expect("a GPU's layer is in bf16")
}

impl<T> std::fmt::Debug for MoeLayer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MoeLayer")
            .field("shape", &self.shape)
            .field("knobs", &self.knobs)
            .finish_non_exhaustive()
    }
}

impl<T> std::fmt::Debug for Context<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("shape", self.shape()).finish_non_exhaustive()
    }
}
