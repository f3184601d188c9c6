//! The ranks that share the experts of a layer, and the machine that they run on.

use std::sync::Arc;

use kodkod_core::Result;
use kodkod_cpu::{CpuGroup, CpuOptions};

use crate::Isa;

/// The ranks that share the experts of a layer. Cheap to clone: clones are the same group. Layers of a group share
/// its threads and memory; one pass runs at a time.
///
/// ```
/// use kodkod::{CpuOptions, ExpertGroup};
///
/// let group = ExpertGroup::cpu(4)?; // four virtual ranks on all cores
/// assert_eq!(group.ranks(), 4);
/// let one_thread = ExpertGroup::cpu_with(CpuOptions { ranks: 2, threads: 1, ..CpuOptions::default() })?;
/// assert_eq!(one_thread.threads(), 1);
/// # Ok::<(), kodkod::Error>(())
/// ```
#[derive(Clone)]
pub struct ExpertGroup {
    machine: Arc<CpuGroup>,
}

impl ExpertGroup {
    /// `ranks` virtual ranks in this process, on all cores.
    ///
    /// # Errors
    /// [`kodkod_core::Error::Invalid`] for 0 ranks or too many.
    pub fn cpu(ranks: usize) -> Result<Self> {
        Self::cpu_with(CpuOptions { ranks, ..CpuOptions::default() })
    }

    /// The same with options.
    ///
    /// # Errors
    /// [`kodkod_core::Error::Invalid`] for an option that is out of range, or an instruction set this CPU lacks.
    pub fn cpu_with(options: CpuOptions) -> Result<Self> {
        Ok(ExpertGroup { machine: Arc::new(CpuGroup::new(options)?) })
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.machine.options().ranks
    }

    /// Worker threads.
    pub fn threads(&self) -> usize {
        self.machine.threads()
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.machine.isa()
    }

    /// Bytes of symmetric memory that the group and its contexts hold now, and the most they ever held.
    pub fn memory(&self) -> (usize, usize) {
        self.machine.memory()
    }

    /// Gives memory that waits for reuse back to the system.
    pub fn trim(&self) {
        self.machine.trim();
    }

    pub(crate) fn machine(&self) -> &Arc<CpuGroup> {
        &self.machine
    }
}

impl std::fmt::Debug for ExpertGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExpertGroup").field("cpu", self.machine.options()).finish_non_exhaustive()
    }
}
