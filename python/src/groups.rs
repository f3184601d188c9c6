//! The expert groups of this process, each under a number that stays the same for the life of the process.
//!
//! A number, because an operator of a compiled graph can hold one, and its backward may run long after the Python object
//! is gone. Virtual ranks of equal options are one group: its threads and memory are shared, as one pass runs at a time
//! anyway.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kodkod::cuda::caller::CurrentContext;
use kodkod::{CpuOptions, CudaOptions, Error, ExpertGroup, Result};
use pyo3::prelude::*;

use crate::errors::{exception, without_lock};
use crate::symmetric::TorchMemory;

struct Groups {
    process: u32,
    made: Vec<Made>,
}

enum Made {
    /// Virtual ranks; started anew in a fork.
    Cpu { options: CpuOptions, group: Option<ExpertGroup> },
    /// This process as one of several ranks. A fork of it is none of them, and is told so when it makes a call.
    Processes(ExpertGroup),
}

// Locked under the interpreter's lock only, and a fork from Python holds that one: a child never finds this one taken.
static GROUPS: Mutex<Groups> = Mutex::new(Groups { process: 0, made: Vec::new() });

fn groups(_: Python<'_>) -> MutexGuard<'static, Groups> {
    let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    if groups.made.is_empty() {
        // Number 0 is the default, and starts its threads when it is first used.
        groups.made.push(Made::Cpu { options: CpuOptions::default(), group: None });
    }
    let process = std::process::id();
    if groups.process != process {
        // A fork takes no threads along, so a child starts its groups anew. Those of the parent are forgotten: to drop
        // them would wait for threads that are not there.
        for made in &mut groups.made {
            if let Made::Cpu { group, .. } = made {
                std::mem::forget(group.take());
            }
        }
        groups.process = process;
    }
    groups
}

/// The group of a number.
pub(crate) fn group(py: Python<'_>, number: usize) -> PyResult<ExpertGroup> {
    find(py, number).map_err(|e| exception(&e))
}

fn find(py: Python<'_>, number: usize) -> Result<ExpertGroup> {
    let mut groups = groups(py);
    let made = groups
        .made
        .get_mut(number)
        .ok_or_else(|| Error::invalid("group", number, "there is no such group"))?;
    match made {
        Made::Cpu { group: Some(group), .. } | Made::Processes(group) => Ok(group.clone()),
        Made::Cpu { options, group } => Ok(group.insert(ExpertGroup::cpu_with(options.clone())?).clone()),
    }
}

/// The number of the group of these virtual ranks on the CPU; `threads` 0 is one a core.
#[pyfunction]
pub(crate) fn group_cpu(py: Python<'_>, ranks: usize, threads: usize) -> PyResult<usize> {
    let options = CpuOptions { ranks, threads, ..CpuOptions::default() };
    let mut groups = groups(py);
    let equal = |made: &Made| matches!(made, Made::Cpu { options: of_made, .. } if *of_made == options);
    if let Some(number) = groups.made.iter().position(equal) {
        return Ok(number);
    }
    let group = ExpertGroup::cpu_with(options.clone()).map_err(|e| exception(&e))?;
    groups.made.push(Made::Cpu { options, group: Some(group) });
    Ok(groups.made.len() - 1)
}

/// The number of a new group of processes, of which this one is rank `rank`; all give the same new name. `timeout` is in
/// seconds.
#[pyfunction]
pub(crate) fn group_processes(
    py: Python<'_>,
    rank: usize,
    ranks: usize,
    name: &str,
    threads: usize,
    timeout: f64,
) -> PyResult<usize> {
    let group = without_lock(py, || {
        let wait_limit = Duration::try_from_secs_f64(timeout)
            .map_err(|_| Error::invalid("timeout", timeout, "a positive number of seconds is needed"))?;
        let options = CpuOptions { threads, wait_limit, ..CpuOptions::default() };
        ExpertGroup::cpu_processes(rank, ranks, name, options)
    })?;
    let mut groups = groups(py);
    groups.made.push(Made::Processes(group));
    Ok(groups.made.len() - 1)
}

/// The same with the GPU `device` for this rank, and `memory`, a `kodkod._symmetric.SymmetricMemory`, for what the ranks reach
/// of each other; CUDA IPC if `None`.
#[pyfunction]
pub(crate) fn group_cuda(
    py: Python<'_>,
    rank: usize,
    ranks: usize,
    name: &str,
    device: usize,
    timeout: f64,
    memory: Option<Py<PyAny>>,
) -> PyResult<usize> {
    let group = without_lock(py, || {
        let wait_limit = Duration::try_from_secs_f64(timeout)
            .map_err(|_| Error::invalid("timeout", timeout, "a positive number of seconds is needed"))?;
        let _current = CurrentContext::keep();
        let options = CudaOptions { wait_limit };
        match memory.map(TorchMemory::new) {
            Some(memory) => ExpertGroup::cuda_processes(rank, ranks, name, device, options, memory),
            None => ExpertGroup::cuda_ipc(rank, ranks, name, device, options),
        }
    })?;
    let mut groups = groups(py);
    groups.made.push(Made::Processes(group));
    Ok(groups.made.len() - 1)
}

/// Tells the other ranks of a group of processes that this one cannot make its call, and why; in other groups nothing.
#[pyfunction]
pub(crate) fn group_refuse(py: Python<'_>, number: usize, why: String) -> PyResult<()> {
    let group = group(py, number)?;
    without_lock(py, || {
        // The caller raises the reason itself, also where the group is broken.
        let _: Error = group.refuse(Error::Machine(why));
        Ok(())
    })
}

/// The rank that this process is, in a group of processes.
#[pyfunction]
pub(crate) fn group_rank(py: Python<'_>, number: usize) -> PyResult<Option<usize>> {
    Ok(group(py, number)?.rank())
}

/// Ranks, threads, and what they run on in a few words.
#[pyfunction]
pub(crate) fn group_info(py: Python<'_>, number: usize) -> PyResult<(usize, usize, String)> {
    let group = group(py, number)?;
    Ok((group.ranks(), group.threads(), group.description()))
}

/// Bytes of symmetric memory held now, and the most ever.
#[pyfunction]
pub(crate) fn group_memory(py: Python<'_>, number: usize) -> PyResult<(usize, usize)> {
    Ok(group(py, number)?.memory())
}

/// Gives memory that waits for reuse back to the system.
#[pyfunction]
pub(crate) fn group_trim(py: Python<'_>, number: usize) -> PyResult<()> {
    let group = group(py, number)?;
    without_lock(py, || {
        group.trim();
        Ok(())
    })
}
