//! Router and experts together, in place of a transformer's feed-forward block.

use candle_core::{Module, Result, Tensor, bail};
use candle_nn::VarBuilder;
use kodkod::{ExpertGroup, Knobs, Precision, Shape};

use crate::experts::{ExpertWeights, MoeExperts};
use crate::router::{Routed, Router, RouterConfig};

/// What a [`MoeLayer`] computes and how.
#[derive(Debug, Clone)]
pub struct MoeConfig {
    /// Sizes and activation.
    pub shape: Shape,
    /// The router; its `experts` and `top_k` are the shape's.
    pub router: RouterConfig,
    /// What rows and weights are rounded to inside the experts.
    pub precision: Precision,
    /// How a pass is cut into pieces; no bit depends on it.
    pub knobs: Knobs,
}

impl MoeConfig {
    /// Softmax router with renormalised weights, bf16, the shape's default knobs; change the fields for more.
    pub fn new(shape: Shape) -> Self {
        let router = RouterConfig::new(shape.experts, shape.top_k);
        MoeConfig { knobs: Knobs::for_shape(&shape), router, precision: Precision::Bf16, shape }
    }
}

/// An MoE layer: [`Router`] and [`MoeExperts`].
#[derive(Debug, Clone)]
pub struct MoeLayer {
    router: Router,
    experts: MoeExperts,
}

/// What [`MoeLayer::forward_train`] gives.
#[derive(Debug, Clone)]
pub struct MoeOutput {
    /// The layer's output, in the shape and type of `x`.
    pub y: Tensor,
    /// The router's choice, with the load and the balancing loss.
    pub routed: Routed,
}

impl MoeLayer {
    /// A layer. The router's tensors come from `vb.pp("router")` (see [`Router::new`]), the experts' from
    /// `vb.pp("experts")` (see [`ExpertWeights::new`]).
    ///
    /// # Errors
    /// Where a size or knob is not allowed, router and shape disagree, the group's ranks do not divide the
    /// experts, or a tensor is missing or has another shape.
    pub fn new(group: &ExpertGroup, config: &MoeConfig, vb: VarBuilder) -> Result<Self> {
        let MoeConfig { shape, router, precision, knobs } = config;
        if (router.experts, router.top_k) != (shape.experts, shape.top_k) {
            bail!(
                "the router chooses {} of {} experts: the shape says {} of {}",
                router.top_k,
                router.experts,
                shape.top_k,
                shape.experts
            )
        }
        shape.validate().map_err(candle_core::Error::wrap)?;
        let weights = ExpertWeights::new(shape, vb.pp("experts"))?;
        Ok(MoeLayer {
            router: Router::new(shape.hidden, router.clone(), vb.pp("router"))?,
            experts: MoeExperts::new(group, shape.clone(), *knobs, *precision, weights)?,
        })
    }

    /// The router.
    pub fn router(&self) -> &Router {
        &self.router
    }

    /// The experts.
    pub fn experts(&self) -> &MoeExperts {
        &self.experts
    }

    /// `y` for `x` `[..., hidden]`, with the router's choice for all rows of `x` in order.
    ///
    /// # Errors
    /// As [`Router::forward`] and [`MoeExperts::forward`].
    pub fn forward_train(&self, x: &Tensor) -> Result<MoeOutput> {
        let rows = x.flatten_to(x.rank().saturating_sub(2))?;
        let routed = self.router.forward(&rows)?;
        let y = self.experts.forward(&rows, &routed.ids, &routed.weights)?.reshape(x.shape())?;
        Ok(MoeOutput { y, routed })
    }
}

impl Module for MoeLayer {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(self.forward_train(x)?.y)
    }
}
