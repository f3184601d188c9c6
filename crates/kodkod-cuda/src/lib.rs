//! The CUDA machine: the whole layer in a schedule and two persistent kernels on Hopper GPUs, with no host in between.
//!
//! 1. [`driver`] wraps the CUDA driver, [`jit`] compiles the kernels with the shape as constants;
//! 2. [`CudaLayer`] holds a layer's kernels and buffers, for ranks that share a GPU or have one each, in one
//!    process or as processes with [`SymmetricMemory`];
//! 3. a call launches the schedule, then one persistent kernel a rank.

pub mod caller;
pub mod driver;
pub mod error;
pub mod jit;
mod layer;
pub mod links;
mod memory;
mod parameters;
mod symmetric;
mod tensors;
pub mod trace;

pub use error::{Error, Result};
pub use layer::{CudaLayer, Hang, MOST_RANKS, Replay, Stamp};
pub use memory::STAMPS;
pub use symmetric::{CudaIpc, PeerAllocation, PeerAllocator, SymmetricMemory};
pub use tensors::{
    DeviceGradients, DeviceStep, DeviceWeights, Part, check_part, new_gradients, read_gradients,
};
