//! The expert groups of this process, each under a number that stays the same for the life of the process.
//!
//! A number, because an operator of a compiled graph can hold one, and its backward may run long after the Python object
//! is gone. Equal options are one group: its threads and memory are shared, as one pass runs at a time anyway.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kodkod::{CpuOptions, Error, ExpertGroup, Result};
use pyo3::prelude::*;

use crate::errors::{exception, without_lock};

struct Groups {
    process: u32,
    made: Vec<Made>,
}

struct Made {
    options: CpuOptions,
    group: Option<ExpertGroup>,
}

// Locked under the interpreter's lock only, and a fork from Python holds that one: a child never finds this one taken.
static GROUPS: Mutex<Groups> = Mutex::new(Groups { process: 0, made: Vec::new() });

fn groups(_: Python<'_>) -> MutexGuard<'static, Groups> {
    let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    if groups.made.is_empty() {
        // Number 0 is the default, and starts its threads when it is first used.
        groups.made.push(Made { options: CpuOptions::default(), group: None });
    }
    let process = std::process::id();
    if groups.process != process {
        // A fork takes no threads along, so a child starts its groups anew. Those of the parent are forgotten: to drop
        // them would wait for threads that are not there.
        for made in &mut groups.made {
            std::mem::forget(made.group.take());
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
    match &made.group {
        Some(group) => Ok(group.clone()),
        None => Ok(made.group.insert(ExpertGroup::cpu_with(made.options.clone())?).clone()),
    }
}

/// The number of the group of these virtual ranks on the CPU; `threads` 0 is one a core.
#[pyfunction]
pub(crate) fn group_cpu(py: Python<'_>, ranks: usize, threads: usize) -> PyResult<usize> {
    let options = CpuOptions { ranks, threads, ..CpuOptions::default() };
    let mut groups = groups(py);
    if let Some(number) = groups.made.iter().position(|made| made.options == options) {
        return Ok(number);
    }
    let group = ExpertGroup::cpu_with(options.clone()).map_err(|e| exception(&e))?;
    groups.made.push(Made { options, group: Some(group) });
    Ok(groups.made.len() - 1)
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
