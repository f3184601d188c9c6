//! The synchronisation primitives of the engine. The model checker's test compiles the engine with its own.

pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
pub(super) use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// Waits for a notification; false where `limit` passed without one.
pub(super) fn wait_for<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    limit: Duration,
) -> (MutexGuard<'a, T>, bool) {
    let (guard, timeout) = condvar.wait_timeout(guard, limit).expect("no holder of this lock panics");
    (guard, !timeout.timed_out())
}
