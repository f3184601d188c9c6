//! The ranks that share the experts of a layer, and the machine that they run on.

use std::sync::Arc;

use kodkod_core::{Error, Result};
use kodkod_cpu::{CpuGroup, CpuOptions};

use crate::Isa;
use crate::cuda_layer::CudaGroup;

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
    machine: Machine,
}

/// Where the ranks run.
#[derive(Clone)]
pub(crate) enum Machine {
    Cpu(Arc<CpuGroup>),
    Cuda(Arc<CudaGroup>),
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
        Ok(ExpertGroup { machine: Machine::Cpu(Arc::new(CpuGroup::new(options)?)) })
    }

    /// One rank a GPU, given by their ordinals. Layers compute in bf16, with sizes that are multiples of 64.
    ///
    /// # Errors
    /// [`Error::Machine`] where there is no driver, no such GPU, or one that the kernels do not run on;
    /// [`Error::Invalid`] for no device, or, in this version, for more than one.
    pub fn cuda(devices: &[usize]) -> Result<Self> {
        match *devices {
            [] => Err(Error::invalid("devices", "empty", "one GPU is needed")),
            [device] => Self::cuda_virtual(device, 1),
            _ => {
                let allowed = "several GPUs are not in this version; for several ranks on one GPU there is \
                               ExpertGroup::cuda_virtual";
                Err(Error::invalid("devices", format!("{devices:?}"), allowed))
            }
        }
    }

    /// `ranks` virtual ranks on one GPU, each on its share of the streaming multiprocessors.
    ///
    /// # Errors
    /// [`Error::Machine`] as for [`ExpertGroup::cuda`]; [`Error::Invalid`] for 0 ranks or too many.
    pub fn cuda_virtual(device: usize, ranks: usize) -> Result<Self> {
        Ok(ExpertGroup { machine: Machine::Cuda(Arc::new(CudaGroup::new(device, ranks)?)) })
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        match &self.machine {
            Machine::Cpu(cpu) => cpu.options().ranks,
            Machine::Cuda(cuda) => cuda.ranks,
        }
    }

    /// Worker threads; 0 on a GPU.
    pub fn threads(&self) -> usize {
        match &self.machine {
            Machine::Cpu(cpu) => cpu.threads(),
            Machine::Cuda(_) => 0,
        }
    }

    /// The CPU's instruction set in use; none on a GPU.
    pub fn isa(&self) -> Option<Isa> {
        match &self.machine {
            Machine::Cpu(cpu) => Some(cpu.isa()),
            Machine::Cuda(_) => None,
        }
    }

    /// What the ranks run on, in a few words: `avx2 on 2 threads`, or the GPU's name.
    pub fn description(&self) -> String {
        match &self.machine {
            Machine::Cpu(cpu) => format!("{} on {} threads", cpu.isa(), cpu.threads()),
            Machine::Cuda(cuda) => cuda.device.name().to_owned(),
        }
    }

    /// Bytes of symmetric memory that the group and its contexts hold now, and the most they ever held. Not counted on
    /// a GPU, where each layer holds its own: 0.
    pub fn memory(&self) -> (usize, usize) {
        match &self.machine {
            Machine::Cpu(cpu) => cpu.memory(),
            Machine::Cuda(_) => (0, 0),
        }
    }

    /// Gives memory that waits for reuse back to the system.
    pub fn trim(&self) {
        if let Machine::Cpu(cpu) = &self.machine {
            cpu.trim();
        }
    }

    pub(crate) fn machine(&self) -> &Machine {
        &self.machine
    }
}

impl std::fmt::Debug for ExpertGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut text = f.debug_struct("ExpertGroup");
        match &self.machine {
            Machine::Cpu(cpu) => text.field("cpu", cpu.options()),
            Machine::Cuda(cuda) => text.field("cuda", &cuda.device).field("ranks", &cuda.ranks),
        };
        text.finish_non_exhaustive()
    }
}
