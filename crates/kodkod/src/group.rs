//! The ranks that share the experts of a layer, and the machine that they run on.

use std::sync::Arc;

use kodkod_core::{Error, Result};
use kodkod_cpu::{CpuGroup, CpuOptions, ProcessGroup};
use kodkod_cuda::driver::Device;
use kodkod_cuda::{CudaIpc, PeerAllocator};

use crate::Isa;
use crate::cuda_layer::CudaGroup;
use crate::cuda_process::{CudaOptions, CudaProcess};

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
    Processes(Arc<ProcessGroup>),
    Cuda(Arc<CudaGroup>),
    CudaProcess(Arc<CudaProcess>),
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

    /// This process as rank `rank` of `ranks` processes of this host, for a [`RankLayer`](crate::RankLayer). All give the same
    /// `name`, chosen by their launcher: a name of its own for every group that meets. They meet in a file in `/dev/shm`, or
    /// the folder for temporary files where there is none; a `name` with a slash is the file's path. It is unlinked as soon
    /// as all have opened it. What ranks address of each other lies in it: `x`, `dy`, ids, router weights, slots.
    ///
    /// `options.ranks` is not read. With `options.threads` 0 a rank takes its share of the cores. `options.wait_limit` is how
    /// long a rank waits for others, here too, and in a call while no rank of the group gets on.
    ///
    /// ```
    /// use kodkod::{CpuOptions, ExpertGroup};
    ///
    /// // A launcher chooses the name. With more ranks, the others are other processes that do the same.
    /// let name = format!("quickstart-{}", std::process::id());
    /// let group = ExpertGroup::cpu_processes(0, 1, &name, CpuOptions::default())?;
    /// assert_eq!((group.rank(), group.ranks()), (Some(0), 1));
    /// # Ok::<(), kodkod::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for an argument that is out of range; [`Error::Machine`] that names the ranks which did not come
    /// within the limit, or that disagree, and on systems other than Unix.
    pub fn cpu_processes(rank: usize, ranks: usize, name: &str, options: CpuOptions) -> Result<Self> {
        let group = ProcessGroup::join(rank, ranks, name, options)?;
        Ok(ExpertGroup { machine: Machine::Processes(Arc::new(group)) })
    }

    /// One rank a GPU, given by their ordinals, in this process: they reach each other's memory, so they need peer access
    /// (NVLink). Layers compute in bf16, with sizes that are multiples of 64.
    ///
    /// # Errors
    /// [`Error::Machine`] where there is no driver, no such GPU, one that the kernels do not run on, or two that do not reach
    /// each other; [`Error::Invalid`] for no device, too many, or one twice.
    pub fn cuda(devices: &[usize]) -> Result<Self> {
        if devices.is_empty() {
            return Err(Error::invalid("devices", "empty", "one GPU is needed"));
        }
        if let Some(twice) = (1..devices.len()).find(|&at| devices[..at].contains(&devices[at])) {
            let allowed = "each GPU once; for several ranks on one GPU there is ExpertGroup::cuda_virtual";
            return Err(Error::invalid("devices", format!("{} twice", devices[twice]), allowed));
        }
        Ok(ExpertGroup { machine: Machine::Cuda(Arc::new(CudaGroup::new(devices, devices.len())?)) })
    }

    /// `ranks` virtual ranks on one GPU, each on its share of the streaming multiprocessors.
    ///
    /// # Errors
    /// [`Error::Machine`] as for [`ExpertGroup::cuda`]; [`Error::Invalid`] for 0 ranks or too many.
    pub fn cuda_virtual(device: usize, ranks: usize) -> Result<Self> {
        Ok(ExpertGroup { machine: Machine::Cuda(Arc::new(CudaGroup::new(&[device], ranks)?)) })
    }

    /// This process as rank `rank` of `ranks` processes of this host, on the GPU `device` (as this process numbers them), for
    /// a [`RankLayer`](crate::RankLayer) or a [`DeviceRankLayer`](crate::DeviceRankLayer). The processes meet as those of
    /// [`ExpertGroup::cpu_processes`] do, `name` means the same; their kernels reach each other's memory by CUDA IPC, so the
    /// GPUs need peer access (NVLink), and containers one IPC namespace.
    ///
    /// Ranks may be on one GPU, to try it: it runs them by turns, each for milliseconds, so that their waits for each other
    /// are long.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an argument that is out of range; [`Error::Machine`] that names the ranks which did not come
    /// within the limit, or that disagree; where one rank's GPU cannot be used, on every rank.
    pub fn cuda_ipc(
        rank: usize,
        ranks: usize,
        name: &str,
        device: usize,
        options: CudaOptions,
    ) -> Result<Self> {
        Self::cuda_processes(rank, ranks, name, device, options, CudaIpc)
    }

    /// The same with memory that ranks reach of each other in another way than by CUDA IPC: one that the caller has
    /// written. All ranks give the same.
    ///
    /// # Errors
    /// As for [`ExpertGroup::cuda_ipc`].
    pub fn cuda_processes(
        rank: usize,
        ranks: usize,
        name: &str,
        device: usize,
        options: CudaOptions,
        memory: impl PeerAllocator + 'static,
    ) -> Result<Self> {
        let group = CudaProcess::join(rank, ranks, name, device, &options, Arc::new(memory))?;
        Ok(ExpertGroup { machine: Machine::CudaProcess(Arc::new(group)) })
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        match &self.machine {
            Machine::Cpu(cpu) => cpu.options().ranks,
            Machine::Processes(group) => group.options().ranks,
            Machine::Cuda(cuda) => cuda.ranks,
            Machine::CudaProcess(group) => group.ranks(),
        }
    }

    /// The rank that this process is, in a group of processes.
    pub fn rank(&self) -> Option<usize> {
        match &self.machine {
            Machine::Processes(group) => Some(group.rank()),
            Machine::CudaProcess(group) => Some(group.rank()),
            Machine::Cpu(_) | Machine::Cuda(_) => None,
        }
    }

    /// The GPU of this rank, in a group of processes with a GPU each.
    pub fn device(&self) -> Option<&Arc<Device>> {
        match &self.machine {
            Machine::CudaProcess(group) => Some(&group.device),
            _ => None,
        }
    }

    /// In a group of processes, in place of a call that this rank cannot make, for a reason that its caller has found: every
    /// rank's call returns an error that gives the reason, and none waits for this one. Returns `why`, or why the group is
    /// broken. In other groups nobody waits, and it returns `why`.
    pub fn refuse(&self, why: Error) -> Error {
        match &self.machine {
            Machine::Processes(group) => group.refuse(why),
            Machine::CudaProcess(group) => group.refuse(why),
            Machine::Cpu(_) | Machine::Cuda(_) => why,
        }
    }

    /// Worker threads; 0 on a GPU.
    pub fn threads(&self) -> usize {
        match &self.machine {
            Machine::Cpu(cpu) => cpu.threads(),
            Machine::Processes(group) => group.threads(),
            Machine::Cuda(_) | Machine::CudaProcess(_) => 0,
        }
    }

    /// The CPU's instruction set in use; none on a GPU.
    pub fn isa(&self) -> Option<Isa> {
        match &self.machine {
            Machine::Cpu(cpu) => Some(cpu.isa()),
            Machine::Processes(group) => Some(group.isa()),
            Machine::Cuda(_) | Machine::CudaProcess(_) => None,
        }
    }

    /// What the ranks run on, in a few words: `avx2 on 2 threads`, or the GPU's name.
    pub fn description(&self) -> String {
        match &self.machine {
            Machine::Cpu(cpu) => format!("{} on {} threads", cpu.isa(), cpu.threads()),
            Machine::Processes(group) => format!("{} on {} threads a rank", group.isa(), group.threads()),
            Machine::Cuda(cuda) => match &cuda.devices[..] {
                [device] => device.name().to_owned(),
                devices => format!("{} GPUs: {}", devices.len(), devices[0].name()),
            },
            Machine::CudaProcess(group) => {
                format!("a process a GPU: {}, {}", group.device.name(), group.source.name())
            }
        }
    }

    /// Bytes of symmetric memory that the group and its contexts hold now, and the most they ever held; in a group of
    /// processes, those of this rank and the shared file, or of its GPU, with what its layers hold there, as the driver's count of
    /// free memory tells. Not counted for other groups on GPUs, where each layer holds its own: 0.
    pub fn memory(&self) -> (usize, usize) {
        match &self.machine {
            Machine::Cpu(cpu) => cpu.memory(),
            Machine::Processes(group) => group.memory(),
            Machine::CudaProcess(group) => group.memory(),
            Machine::Cuda(_) => (0, 0),
        }
    }

    /// Gives memory that waits for reuse back to the system.
    pub fn trim(&self) {
        match &self.machine {
            Machine::Cpu(cpu) => cpu.trim(),
            Machine::Processes(group) => group.trim(),
            Machine::Cuda(_) | Machine::CudaProcess(_) => {}
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
            Machine::Processes(group) => text.field("rank", &group.rank()).field("cpu", group.options()),
            Machine::Cuda(cuda) => text.field("cuda", &cuda.devices).field("ranks", &cuda.ranks),
            Machine::CudaProcess(group) => {
                text.field("rank", &group.rank()).field("ranks", &group.ranks()).field("cuda", &group.device)
            }
        };
        text.finish_non_exhaustive()
    }
}
