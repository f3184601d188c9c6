//! One MoE layer over a group.

use kodkod_core::{Element, Knobs, Result, Routing, Shape, WeightGradients, Weights};

use crate::group::ExpertGroup;

/// A layer of a shape, run by a group, in storage type `T` (`bf16` or `f32`).
#[derive(Debug, Clone)]
pub struct MoeLayer<T> {
    shape: Shape,
    _t: std::marker::PhantomData<T>,
}

/// What a forward keeps for its backward.
#[derive(Debug)]
pub struct Context<T> {
    _t: std::marker::PhantomData<T>,
}

impl<T: Element> MoeLayer<T> {
    /// A layer.
    ///
    /// # Errors
    /// Where a size or knob is not allowed, or the ranks do not divide the experts.
    pub fn new(_group: &ExpertGroup, shape: Shape, _knobs: Knobs) -> Result<Self> {
        Ok(MoeLayer { shape, _t: Default::default() })
    }

    /// The layer's shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// `y` `[tokens, hidden]` for `x` `[tokens, hidden]`, over all ranks' tokens in rank order.
    pub fn forward(&self, _x: &[T], _routing: &Routing, _weights: &Weights<T>) -> Result<(Vec<T>, Context<T>)> {
        unimplemented!()
    }

    /// `dx` `[tokens, hidden]` and `d_topk_weights` `[tokens, top_k]`; weight gradients go to `gradients`,
    /// added to what is there where `accumulate` is set, else overwriting it.
    pub fn backward(
        &self,
        _context: &Context<T>,
        _dy: &[T],
        _x: &[T],
        _routing: &Routing,
        _weights: &Weights<T>,
        _gradients: WeightGradients<&mut [f32]>,
        _accumulate: bool,
    ) -> Result<(Vec<T>, Vec<f32>)> {
        unimplemented!()
    }
}
