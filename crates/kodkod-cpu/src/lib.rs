//! Placeholder.
pub mod gemm;
