//! The kodkod mixture-of-experts (MoE) layer for candle, with a router and a true backward.
//!
//! 1. [`Router`] scores the experts for every token, picks the top-k and weighs them; it also gives the
//!    load-balancing loss, or balances by a bias;
//! 2. [`MoeExperts`] sends each token to its experts and sums what comes back: one candle op, computed by
//!    [`kodkod::MoeLayer`] on the ranks of an [`ExpertGroup`], with gradients to the tokens, the router's weights and
//!    every expert's weight;
//! 3. [`MoeLayer`] is the two together, in place of a transformer's feed-forward block.
//!
//! Master weights are `f32`, whatever the [`Precision`] of the experts' arithmetic. Results and gradients have
//! the same bits for any number of ranks, threads and any [`Knobs`].
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! use kodkod_candle::{ExpertGroup, MoeConfig, MoeLayer, Shape};
//!
//! # fn main() -> candle_core::Result<()> {
//! let group = ExpertGroup::cpu(2).map_err(candle_core::Error::wrap)?;
//! let varmap = VarMap::new();
//! let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
//! // 8 experts of width 32 for rows of width 16, 2 experts a token.
//! let moe = MoeLayer::new(&group, &MoeConfig::new(Shape::new(16, 32, 8, 2)), vb.pp("moe"))?;
//!
//! let x = Tensor::randn(0_f32, 1.0, (3, 5, 16), &Device::Cpu)?;
//! let out = moe.forward_train(&x)?;
//! assert_eq!(out.y.dims(), [3, 5, 16]);
//! let loss = (out.y.sqr()?.mean_all()? + (out.routed.balance_loss()? * 0.01)?)?;
//! let gradients = loss.backward()?;
//! assert!(varmap.all_vars().iter().all(|var| gradients.get(var).is_some()));
//! # Ok(())
//! # }
//! ```

mod experts;
mod layer;
mod router;

pub use experts::{ExpertWeights, MoeExperts};
pub use kodkod::{Activation, ExpertGroup, Knobs, Precision, Shape, Shared};
pub use layer::{MoeConfig, MoeLayer, MoeOutput};
pub use router::{Routed, Router, RouterConfig, Scoring};
