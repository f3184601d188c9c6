//! What one mixture-of-experts (MoE) layer is, apart from any machine that runs it.
//!
//! 1. [`Shape`] and [`Knobs`] say what is computed and how it is cut into pieces;
//! 2. [`Routing`] says which token goes to which expert, and which rank holds which token;
//! 3. [`Schedule`] turns a routing into the table of rows that a rank pulls and pushes;
//! 4. [`Program`] numbers the tasks of a pass over those rows: a ticket in, a task out;
//! 5. [`reference`](mod@reference) computes the same layer in plain `f64`, sharing no code with any machine.
//!
//! A machine (the CPU engine, a CUDA kernel, a simulator) runs the tickets of a [`Program`] in order.

pub mod error;
pub mod knobs;
pub mod numerics;
pub mod program;
pub mod reference;
pub mod routing;
pub mod schedule;
pub mod shape;
pub mod tensors;

pub use error::{Error, Result, Stall};
pub use knobs::Knobs;
pub use numerics::{Element, Precision};
pub use program::Program;
pub use routing::Routing;
pub use schedule::Schedule;
pub use shape::{Activation, Shape, Shared};
pub use tensors::{Biases, GradientElement, SharedWeights, WeightGradients, Weights};

/// Rows of one row block: the M edge of a GEMM tile. Every expert's rows start at a multiple of it.
pub const ROW_BLOCK: usize = 128;
