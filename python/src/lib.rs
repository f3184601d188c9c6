//! The compiled half of the Python package: the layer over plain integers.
//!
//! 1. Python hands over addresses, and lengths once; [`memory`] makes slices of them;
//! 2. [`groups`] keeps the expert groups of the process, each under a number;
//! 3. [`pass`] runs a forward or a backward on the CPU, without the interpreter's lock, [`gpu`] puts it in a stream of a GPU,
//!    [`gpu_rank`] one rank's part of it;
//! 4. [`symmetric`] lets a Python object give the memory that GPUs reach of each other;
//! 5. [`context`] wraps what a forward leaves for its backward in a DLPack capsule, so that a tensor's life is its own;
//! 6. [`errors`] turns every error and panic into a Python exception.
//!
//! Nothing here knows of torch.

mod context;
mod errors;
mod gpu;
mod gpu_rank;
mod groups;
mod memory;
mod pass;
mod symmetric;

use pyo3::prelude::*;

/// `kodkod._kodkod`: see `_kodkod.pyi`.
#[pymodule]
mod _kodkod {
    #[pymodule_export]
    use super::errors::StalledError;
    #[pymodule_export]
    use super::gpu::{cuda_backward, cuda_check, cuda_forward, cuda_limit, cuda_memory, cuda_trim};
    #[pymodule_export]
    use super::gpu_rank::{cuda_rank_backward, cuda_rank_forward};
    #[pymodule_export]
    use super::groups::{
        group_cpu, group_cuda, group_info, group_memory, group_processes, group_rank, group_refuse,
        group_trim,
    };
    #[pymodule_export]
    use super::pass::{Config, backward, forward};
}
