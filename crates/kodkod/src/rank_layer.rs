//! One rank's part of a MoE layer whose ranks are processes.

use std::sync::Arc;

use kodkod_core::schedule::experts_per_rank;
use kodkod_core::{Error, GradientElement, Knobs, Precision, Result, Shape, WeightGradients, Weights};
use kodkod_cpu::{Element, ProcessGroup, RankSaved};

use crate::cuda_process::{RankOnGpu, RankSavedOnGpu};
use crate::group::{ExpertGroup, Machine};
use crate::layer::{as_bf16, from_bf16, weights_as_bf16};

/// One rank's part of a layer, in a group of processes ([`ExpertGroup::cpu_processes`], [`ExpertGroup::cuda_ipc`]): it
/// takes this rank's tokens and the weights of its own experts, and gives their results, with the same bits as a
/// [`MoeLayer`](crate::MoeLayer) over all tokens and weights. Rank r of R holds experts r E/R to (r + 1) E/R - 1; token counts may differ, and be 0.
///
/// All ranks make the same calls in the same order, with the same shape, knobs, precision and `accumulate`; one that cannot
/// tells the others by [`ExpertGroup::refuse`]. Rows and ids are
/// copied to the shared memory first, those of `x` in a backward again.
///
/// ```
/// use kodkod::{CpuOptions, ExpertGroup, Knobs, RankLayer, Shape, WeightGradients, Weights};
///
/// let (rank, ranks, name) = (0, 1, format!("rank-layer-{}", std::process::id())); // as the launcher says
/// let group = ExpertGroup::cpu_processes(rank, ranks, &name, CpuOptions::default())?;
/// let shape = Shape::new(64, 32, 4, 2); // four experts in all
/// let layer = RankLayer::<f32>::new(&group, shape.clone(), Knobs::for_shape(&shape))?;
///
/// let own = layer.own_experts(); // the shape, with 4 / ranks experts
/// let weight = vec![0.01_f32; own.experts * 32 * 64];
/// let weights = Weights { gate: &weight, up: &weight, down: &weight, biases: None, shared: None };
/// let (x, ids, topk_weights) = (vec![1.0; 3 * 64], [0, 1, 2, 3, 3, -1], [0.5; 6]); // three tokens
/// let (y, context) = layer.forward(&x, &ids, &topk_weights, &weights)?;
///
/// let mut gradients = WeightGradients::zeros(own);
/// let (dx, d_topk_weights) = layer.backward(&context, &y, &x, &weights, gradients.as_mut(), false)?;
/// assert_eq!((dx.len(), d_topk_weights.len()), (3 * 64, 6));
/// # Ok::<(), kodkod::Error>(())
/// ```
#[derive(Clone)]
pub struct RankLayer<T> {
    machine: RankMachine,
    shape: Shape,
    knobs: Knobs,
    own_experts: Shape,
    _elements: std::marker::PhantomData<T>,
}

#[derive(Clone)]
enum RankMachine {
    Cpu(Arc<ProcessGroup>),
    Cuda(Arc<RankOnGpu>),
}

/// What a rank's forward keeps for its backward.
pub struct RankContext<T> {
    saved: SavedOn<T>,
}

enum SavedOn<T> {
    Cpu(RankSaved<T>),
    Cuda(RankSavedOnGpu),
}

impl<T> RankContext<T> {
    fn shape(&self) -> &Shape {
        match &self.saved {
            SavedOn::Cpu(saved) => saved.shape(),
            SavedOn::Cuda(saved) => &saved.shape,
        }
    }

    fn tokens(&self) -> usize {
        match &self.saved {
            SavedOn::Cpu(saved) => saved.tokens(),
            SavedOn::Cuda(saved) => saved.routing.tokens(),
        }
    }
}

impl<T: Element> RankLayer<T> {
    /// This rank's part of a layer of `shape`, which counts the experts of all ranks.
    ///
    /// # Errors
    /// [`Error::Invalid`] where a size or a knob is not allowed, the ranks do not divide the experts, or the group is not one
    /// of processes; on GPUs also where `T` is `f32`, or a width is no multiple of 64.
    pub fn new(group: &ExpertGroup, shape: Shape, knobs: Knobs) -> Result<Self> {
        shape.validate()?;
        knobs.validate()?;
        let experts = experts_per_rank(&shape, group.ranks())?;
        let machine = match group.machine() {
            Machine::Processes(group) => RankMachine::Cpu(group.clone()),
            Machine::CudaProcess(_) if T::PRECISION == Precision::F32 => {
                let allowed = "a GPU computes in bf16; for f32 there is ExpertGroup::cpu_processes";
                return Err(Error::invalid("precision", "f32", allowed));
            }
            Machine::CudaProcess(_) => RankMachine::Cuda(Arc::new(RankOnGpu::new(group, &shape, &knobs)?)),
            Machine::Cpu(_) | Machine::Cuda(_) => {
                let allowed = "a rank's layer needs ExpertGroup::cpu_processes or cuda_ipc; for other groups there is \
                               MoeLayer";
                return Err(Error::invalid("group", "in one process", allowed));
            }
        };
        let own_experts = Shape { experts, ..shape.clone() };
        Ok(RankLayer { machine, shape, knobs, own_experts, _elements: std::marker::PhantomData })
    }

    /// The layer's shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The shape with this rank's experts alone: that of its weights and their gradients.
    pub fn own_experts(&self) -> &Shape {
        &self.own_experts
    }

    /// The layer's knobs.
    pub fn knobs(&self) -> &Knobs {
        &self.knobs
    }

    /// `y` `[tokens, hidden]` for this rank's `x` `[tokens, hidden]`, and its tokens' expert ids, 0 to E - 1 or -1, and router
    /// weights, both `[tokens, top_k]`. `weights` are of [`RankLayer::own_experts`]; the shared experts' must be the same on
    /// every rank.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::ExpertId`] or [`Error::Invalid`] for an argument that does not fit, or where ranks disagree:
    /// on every rank, with that rank and the value named; nothing is computed, and the next call may be right.
    /// [`Error::Machine`] or [`Error::Stalled`] where a rank died, left, or no rank got on for the wait limit: the group is
    /// broken, and every later call says so. A rank whose own part was done may have returned without an error; it hears of
    /// it in its next call.
    pub fn forward<I: Copy + Into<i64>>(
        &self,
        x: &[T],
        ids: &[I],
        topk_weights: &[f32],
        weights: &Weights<T>,
    ) -> Result<(Vec<T>, RankContext<T>)> {
        let (y, saved) = match &self.machine {
            RankMachine::Cpu(group) => {
                let (y, saved) = group.forward(&self.shape, &self.knobs, x, ids, topk_weights, weights)?;
                (y, SavedOn::Cpu(saved))
            }
            RankMachine::Cuda(gpu) => {
                let (y, saved) = gpu.forward(as_bf16(x), ids, topk_weights, &weights_as_bf16(weights))?;
                (from_bf16(y), SavedOn::Cuda(saved))
            }
        };
        Ok((y, RankContext { saved }))
    }

    /// `dx` `[tokens, hidden]` and `d_topk_weights` `[tokens, top_k]` for this rank's `dy` `[tokens, hidden]`, with the `x` and
    /// weights of the forward. Gradients of [`RankLayer::own_experts`] go to `gradients`: added to what is there where
    /// `accumulate` is set, else overwriting it; see [`MoeLayer::backward`](crate::MoeLayer::backward) about their types.
    ///
    /// The shared experts' gradients are the whole sum over the tokens of all ranks, with the same bits on every rank: they
    /// need no reduction, and a mean over ranks leaves them as they are. Where they accumulate, the sum starts from what
    /// rank 0 has there, so all ranks should have the same.
    ///
    /// # Errors
    /// As for [`RankLayer::forward`].
    pub fn backward<G: GradientElement>(
        &self,
        context: &RankContext<T>,
        dy: &[T],
        x: &[T],
        weights: &Weights<T>,
        gradients: WeightGradients<&mut [G], &mut [f32]>,
        accumulate: bool,
    ) -> Result<(Vec<T>, Vec<f32>)> {
        let allowed = "the context of this layer's forward is needed";
        if *context.shape() != self.shape {
            return Err(self.refuse(Error::invalid("context", "of another shape", allowed)));
        }
        match (&self.machine, &context.saved) {
            (RankMachine::Cpu(group), SavedOn::Cpu(saved)) => {
                group.backward(saved, dy, x, weights, gradients, accumulate)
            }
            (RankMachine::Cuda(gpu), SavedOn::Cuda(saved)) => {
                let weights = weights_as_bf16(weights);
                let (dx, d_topk_weights) =
                    gpu.backward(saved, as_bf16(dy), as_bf16(x), &weights, gradients, accumulate)?;
                Ok((from_bf16(dx), d_topk_weights))
            }
            _ => Err(self.refuse(Error::invalid("context", "of another machine", allowed))),
        }
    }

    fn refuse(&self, why: Error) -> Error {
        match &self.machine {
            RankMachine::Cpu(group) => group.refuse(why),
            RankMachine::Cuda(gpu) => gpu.refuse(why),
        }
    }
}

impl<T> std::fmt::Debug for RankLayer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rank = match &self.machine {
            RankMachine::Cpu(group) => group.rank(),
            RankMachine::Cuda(gpu) => gpu.rank(),
        };
        f.debug_struct("RankLayer")
            .field("rank", &rank)
            .field("shape", &self.shape)
            .field("knobs", &self.knobs)
            .finish_non_exhaustive()
    }
}

impl<T> std::fmt::Debug for RankContext<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RankContext")
            .field("shape", self.shape())
            .field("tokens", &self.tokens())
            .finish_non_exhaustive()
    }
}
