//! Rust's errors and panics as Python exceptions.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use kodkod::{Error, Result};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

pyo3::create_exception!(
    kodkod,
    StalledError,
    PyRuntimeError,
    "A pass waited too long for a task and was given up. The message names ranks, tasks and counters."
);

/// An error as the exception that says whose fault it is: `ValueError` for an argument, else `RuntimeError`.
pub(crate) fn exception(error: &Error) -> PyErr {
    // The command's option is not Python's, and the largest number stands for no limit.
    let text = error.to_string().replace(" (`--device cpu`)", "").replace(&usize::MAX.to_string(), "all");
    match error {
        Error::Invalid { .. } | Error::Length { .. } | Error::ExpertId { .. } => PyValueError::new_err(text),
        Error::Stalled(_) => StalledError::new_err(text),
        _ => PyRuntimeError::new_err(text),
    }
}

/// Runs `work` without the interpreter's lock. A panic is an internal error, so that Python sees an `Exception` and not
/// one that `except Exception` lets through.
pub(crate) fn without_lock<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    let outcome = py.detach(|| catch_unwind(AssertUnwindSafe(work)));
    outcome.unwrap_or_else(|panic| Err(Error::Internal(message(&*panic)))).map_err(|e| exception(&e))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "unknown panic".into())
}
