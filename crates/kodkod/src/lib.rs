//! A deterministic, fused mixture-of-experts (MoE) training layer with expert parallelism.

/// The GPU's side, for callers whose rows are there already.
pub use kodkod_cuda as cuda;

mod cuda_layer;
mod cuda_process;
mod group;
mod layer;
mod rank_layer;

pub use cuda_process::{CudaOptions, DeviceContext, DeviceRankLayer};
pub use group::ExpertGroup;
pub use half::bf16;
pub use kodkod_core::*;
pub use kodkod_cpu::gemm::{self, Isa};
pub use kodkod_cpu::{CpuOptions, Element, StallHook};
pub use layer::{Context, MoeLayer};
pub use rank_layer::{RankContext, RankLayer};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
