//! What can go wrong on the way to a GPU, and what works instead.

/// The result of everything here that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why the GPU was not used, or gave up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No CUDA driver.
    #[error(
        "no CUDA driver (libcuda.so.1) was found: install NVIDIA's driver, or use the CPU (`--device cpu`)"
    )]
    NoDriver,
    /// A driver that lacks functions.
    #[error(
        "the CUDA driver is for CUDA {major}.{minor}: 12.8 or later is needed (driver R570 or later); update it, or use \
         the CPU (`--device cpu`)"
    )]
    OldDriver {
        /// Of the latest CUDA version that it supports.
        major: i32,
        /// Of the same.
        minor: i32,
    },
    /// No such GPU.
    #[error(
        "GPU {ordinal} was asked for, and the driver sees {count}: use a smaller number, or the CPU (`--device cpu`)"
    )]
    NoDevice {
        /// Asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// Not a Hopper GPU.
    #[error(
        "{name} has compute capability {major}.{minor}: the kernels need 9.0 (H100, H200); use the CPU (`--device cpu`)"
    )]
    Capability {
        /// The GPU's name.
        name: String,
        /// Of the compute capability.
        major: i32,
        /// Of the compute capability.
        minor: i32,
    },
    /// Two GPUs that do not reach each other's memory.
    #[error(
        "GPU {from} cannot address the memory of GPU {to}: ranks need GPUs with peer access (NVLink, or PCIe where the \
         system allows it; `nvidia-smi topo -p2p r` shows it); use GPUs that have it, or several ranks on one"
    )]
    NoPeer {
        /// The one that would read.
        from: usize,
        /// The one that has the memory.
        to: usize,
    },
    /// The driver refused.
    #[error("could not {what}: {text}")]
    Driver {
        /// What was tried.
        what: String,
        /// The driver's words.
        text: String,
    },
    /// No NVRTC.
    #[error(
        "no NVRTC 12.3 or later (libnvrtc.so) was found in {tried}: install a CUDA toolkit or `pip install \
         nvidia-cuda-nvrtc`, or set KODKOD_NVRTC to the library's path"
    )]
    NoNvrtc {
        /// Where it was looked for.
        tried: String,
    },
    /// A link between two GPUs, when it was measured.
    #[error("link between GPUs: {0}")]
    Link(String),
    /// A kernel did not compile.
    #[error("a kernel did not compile: {0}")]
    Compile(String),
    /// The layer's own errors.
    #[error(transparent)]
    Layer(#[from] kodkod_core::Error),
    /// The cache could not be read or written.
    #[error("kernel cache: {0}")]
    Cache(#[from] std::io::Error),
}

impl From<Error> for kodkod_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Layer(error) => error,
            other => kodkod_core::Error::Machine(other.to_string()),
        }
    }
}
