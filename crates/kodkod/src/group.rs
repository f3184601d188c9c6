//! The ranks that share the experts of a layer, and the machine that they run on.

use std::time::Duration;

use kodkod_core::Result;
use kodkod_cpu::gemm::Isa;

/// How a CPU group runs.
#[derive(Debug, Clone)]
pub struct CpuOptions {
    /// Virtual ranks.
    pub ranks: usize,
    /// Worker threads, any number; 0 means one a core.
    pub threads: usize,
    /// Instruction set of the GEMMs; `None` means the best there is. It changes no bit.
    pub isa: Option<Isa>,
    /// How long a task may wait before the pass is given up.
    pub wait_limit: Duration,
}

impl Default for CpuOptions {
    fn default() -> Self {
        CpuOptions { ranks: 1, threads: 0, isa: None, wait_limit: Duration::from_secs(60) }
    }
}

/// The ranks that share the experts of a layer.
#[derive(Debug, Clone)]
pub struct ExpertGroup {
    options: CpuOptions,
}

impl ExpertGroup {
    /// `ranks` virtual ranks in this process, on all cores.
    pub fn cpu(ranks: usize) -> Result<Self> {
        Self::cpu_with(CpuOptions { ranks, ..CpuOptions::default() })
    }

    /// The same with options.
    pub fn cpu_with(options: CpuOptions) -> Result<Self> {
        Ok(ExpertGroup { options })
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.options.ranks
    }

    /// Worker threads.
    pub fn threads(&self) -> usize {
        self.options.threads
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        Isa::best()
    }

    /// Bytes of symmetric memory held now by the group and contexts, and the most there ever was.
    pub fn memory(&self) -> (usize, usize) {
        (0, 0)
    }
}
