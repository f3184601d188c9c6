//! The order in which tasks run: counters, claims, waits and arrivals. It knows nothing of rows or GEMMs.

mod engine;
#[cfg(test)]
mod model;
mod sync;

pub use engine::StallHook;
pub(crate) use engine::{Engine, Ring, counters};
