//! One MoE layer over a group: `y = shared(x) + sum over k in order of w_k expert_k(x)`, and its gradients.

use std::sync::Arc;

use kodkod_core::schedule::experts_per_rank;
use kodkod_core::{Error, Knobs, Result, Routing, Shape, WeightGradients, Weights};
use kodkod_cpu::{CpuGroup, Element, Saved};

use crate::group::ExpertGroup;

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
    machine: Arc<CpuGroup>,
    shape: Shape,
    knobs: Knobs,
    _elements: std::marker::PhantomData<T>,
}

/// What a forward keeps for its backward.
pub struct Context<T> {
    saved: Saved<T>,
}

impl<T: Element> MoeLayer<T> {
    /// A layer of `shape` on the ranks of `group`.
    ///
    /// # Errors
    /// [`Error::Invalid`] where a size or a knob is not allowed, or the ranks do not divide the experts.
    pub fn new(group: &ExpertGroup, shape: Shape, knobs: Knobs) -> Result<Self> {
        shape.validate()?;
        knobs.validate()?;
        experts_per_rank(&shape, group.ranks())?;
        Ok(MoeLayer { machine: group.machine().clone(), shape, knobs, _elements: std::marker::PhantomData })
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
    /// computed then. [`Error::Stalled`] where a task waited too long.
    pub fn forward(&self, x: &[T], routing: &Routing, weights: &Weights<T>) -> Result<(Vec<T>, Context<T>)> {
        self.check("x", x, routing, weights)?;
        let (y, saved) = self.machine.forward(&self.shape, &self.knobs, x, routing, weights)?;
        Ok((y, Context { saved }))
    }

    /// `dx` `[tokens, hidden]` and `d_topk_weights` `[tokens, top_k]` for `dy` `[tokens, hidden]`, with the `x`,
    /// routing and weights of the forward. Weight gradients go to `gradients`: added to what is there where
    /// `accumulate` is set, else overwriting it, also for experts without rows.
    ///
    /// # Errors
    /// As for [`MoeLayer::forward`]; [`Error::Invalid`] where the routing is not the forward's.
    pub fn backward(
        &self,
        context: &Context<T>,
        dy: &[T],
        x: &[T],
        routing: &Routing,
        weights: &Weights<T>,
        gradients: WeightGradients<&mut [f32]>,
        accumulate: bool,
    ) -> Result<(Vec<T>, Vec<f32>)> {
        self.check("x", x, routing, weights)?;
        self.check("dy", dy, routing, weights)?;
        gradients.validate(&self.shape)?;
        if *context.saved.shape() != self.shape {
            return Err(Error::invalid(
                "context",
                "of another shape",
                "the context of this layer's forward is needed",
            ));
        }
        if context.saved.routing() != routing {
            return Err(Error::invalid(
                "routing",
                "another than the forward's",
                "the same routing is needed",
            ));
        }
        self.machine.backward(&context.saved, dy, x, weights, gradients, accumulate)
    }

    fn check(&self, name: &str, rows: &[T], routing: &Routing, weights: &Weights<T>) -> Result<()> {
        let ranks = self.machine.options().ranks;
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
        f.debug_struct("Context").field("shape", self.saved.shape()).finish_non_exhaustive()
    }
}
