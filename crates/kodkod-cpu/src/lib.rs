//! The CPU machine: runs the programs of R virtual ranks in one process, or of one rank a process, with real pulls, pushes
//! and a real ring.
//!
//! 1. [`CpuGroup`] owns the worker threads, the symmetric memory and the ring; [`ProcessGroup`] shares memory with other
//!    processes;
//! 2. a call turns routing into schedules and programs (`kodkod-core`);
//! 3. `protocol` runs their tickets in order on the workers;
//! 4. `pass` does what a task says, with real numbers;
//! 5. [`gemm`] holds the micro-kernels, with the same bits on every instruction set.

pub mod gemm;
mod group;
mod machine;
mod memory;
mod pass;
mod pool;
mod process;
mod protocol;

pub use group::{CpuGroup, CpuOptions, Saved};
pub use process::{Facts, Fault, ProcessGroup, Processes, RankSaved, facts};
pub use protocol::StallHook;

/// A storage type that the CPU can compute with: `bf16` or `f32`.
pub trait Element: kodkod_core::Element + gemm::Element {}
impl<T: kodkod_core::Element + gemm::Element> Element for T {}
