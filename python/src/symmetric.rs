//! Memory that a Python object allocates and makes reachable: torch's symmetric memory, by `kodkod._symmetric`.
//!
//! Passes run without the interpreter's lock, so each call of Python takes it, and so does the end of what it returned.

use std::sync::Arc;

use kodkod::cuda::driver::Device;
use kodkod::cuda::{self, PeerAllocation, PeerAllocator};
use pyo3::prelude::*;

/// An object of Python's that is left where the interpreter is gone, or about to be.
#[derive(Debug)]
struct Object(Option<Py<PyAny>>);

impl Drop for Object {
    fn drop(&mut self) {
        let mut object = self.0.take();
        Python::try_attach(|_| drop(object.take()));
        std::mem::forget(object);
    }
}

/// `kodkod._symmetric.SymmetricMemory`, or what has the same methods.
#[derive(Debug)]
pub(crate) struct TorchMemory(Arc<Object>);

impl TorchMemory {
    pub(crate) fn new(memory: Py<PyAny>) -> Self {
        TorchMemory(Arc::new(Object(Some(memory))))
    }
}

#[derive(Debug)]
struct TorchAllocation {
    memory: Arc<Object>,
    address: u64,
    /// What keeps the others' memory mapped, with the tensor.
    handle: Option<Object>,
    tensor: Object,
}

/// Calls Python, with the exception as the error.
fn call<T>(
    what: &str,
    memory: &Object,
    work: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>,
) -> cuda::Result<T> {
    let called = Python::try_attach(|py| match &memory.0 {
        Some(memory) => work(memory.bind(py)).map_err(|error| text(&error)),
        None => Err("it is gone".into()),
    });
    let outcome = called.unwrap_or_else(|| Err("the interpreter shuts down".into()));
    outcome.map_err(|text| cuda::Error::Driver { what: what.into(), text })
}

/// An exception's first line, since torch may append where it was raised. Memory that is used up gets the driver's words: they
/// say that it helps to give some back.
fn text(error: &PyErr) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default().trim_end();
    if line.contains("out of memory") { "out of memory".into() } else { line.into() }
}

impl PeerAllocator for TorchMemory {
    fn name(&self) -> &str {
        "torch's symmetric memory"
    }

    fn allocate(&self, _: &Arc<Device>, bytes: usize) -> cuda::Result<Box<dyn PeerAllocation>> {
        let what = format!("allocate {bytes} bytes of torch's symmetric memory");
        let (tensor, address) = call(&what, &self.0, |memory| {
            memory.call_method1("allocate", (bytes,))?.extract::<(Py<PyAny>, u64)>()
        })?;
        let tensor = Object(Some(tensor));
        Ok(Box::new(TorchAllocation { memory: self.0.clone(), address, handle: None, tensor }))
    }
}

// SAFETY: `kodkod._symmetric` allocates so many bytes on the group's GPU, which is the device; they live as long as the tensor,
// the others' as long as the handle and the tensor, and torch maps them for loads, stores and atomics of that GPU.
unsafe impl PeerAllocation for TorchAllocation {
    fn address(&self) -> u64 {
        self.address
    }

    /// Torch's ranks tell each other.
    fn export(&self) -> cuda::Result<String> {
        Ok(String::new())
    }

    fn map(&mut self, _: usize, _: &[String]) -> Result<Vec<u64>, (Option<usize>, cuda::Error)> {
        let (handle, addresses) = call("map torch's symmetric memory", &self.memory, |memory| {
            let tensor = self.tensor.0.as_ref().map(|tensor| tensor.bind(memory.py()));
            memory.call_method1("rendezvous", (tensor,))?.extract::<(Py<PyAny>, Vec<u64>)>()
        })
        .map_err(|e| (None, e))?;
        self.handle = Some(Object(Some(handle)));
        Ok(addresses)
    }

    /// Torch keeps a rank's memory until all have let go of it, so the own one, which holds what is mapped of the others', goes
    /// too: when all ranks have unmapped, all of it is free.
    fn unmap(&mut self) {
        self.handle = None;
        self.tensor = Object(None);
    }
}
