//! A deterministic, fused mixture-of-experts (MoE) training layer with expert parallelism.

mod group;
mod layer;

pub use group::{CpuOptions, ExpertGroup};
pub use half::bf16;
pub use kodkod_core::*;
pub use kodkod_cpu::gemm::Isa;
pub use layer::{Context, MoeLayer};
