//! The instruction sets that the kernels are written for, detected at run time.

use std::fmt;
use std::str::FromStr;

/// An instruction set. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// AVX-512 with VDPBF16PS for bf16; f32 as [`Isa::Avx512`].
    Avx512Bf16,
    /// AVX-512 with f32 FMAs, bf16 widened while it is packed.
    Avx512,
    /// AVX2 with FMA.
    Avx2,
    /// Portable code.
    Scalar,
}

impl Isa {
    const ALL: [Isa; 4] = [Isa::Avx512Bf16, Isa::Avx512, Isa::Avx2, Isa::Scalar];

    /// The instruction sets of this CPU, fastest first.
    pub fn available() -> Vec<Isa> {
        let mut list: Vec<Isa> = Isa::ALL.into_iter().filter(|isa| isa.detected()).collect();
        // Intel's cores issue a 512-bit VDPBF16PS (64 flops) every other cycle, but two 512-bit FMAs (64 flops) a cycle.
        if list.starts_with(&[Isa::Avx512Bf16, Isa::Avx512]) && vendor_is_intel() {
            list.swap(0, 1);
        }
        list
    }

    /// The fastest instruction set of this CPU.
    pub fn best() -> Isa {
        Isa::available()[0]
    }

    #[cfg(target_arch = "x86_64")]
    fn detected(self) -> bool {
        let avx512 = || {
            is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq")
        };
        match self {
            Isa::Avx512Bf16 => avx512() && is_x86_feature_detected!("avx512bf16"),
            Isa::Avx512 => avx512(),
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            Isa::Scalar => true,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn detected(self) -> bool {
        self == Isa::Scalar
    }

    fn name(self) -> &'static str {
        match self {
            Isa::Avx512Bf16 => "avx512-bf16",
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Scalar => "scalar",
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn vendor_is_intel() -> bool {
    let id = std::arch::x86_64::__cpuid(0);
    [id.ebx, id.edx, id.ecx] == [*b"Genu", *b"ineI", *b"ntel"].map(u32::from_le_bytes)
}

#[cfg(not(target_arch = "x86_64"))]
fn vendor_is_intel() -> bool {
    false
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no instruction set, or one that this CPU lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseIsaError {
    name: String,
}

impl fmt::Display for ParseIsaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let here: Vec<&str> = Isa::available().into_iter().map(Isa::name).collect();
        write!(f, "no instruction set {:?} on this CPU; it has: {}", self.name, here.join(", "))
    }
}

impl std::error::Error for ParseIsaError {}

impl FromStr for Isa {
    type Err = ParseIsaError;

    /// Only names of [`Isa::available`] parse, so a parsed value is safe to run.
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Isa::available()
            .into_iter()
            .find(|isa| isa.name() == name)
            .ok_or_else(|| ParseIsaError { name: name.to_owned() })
    }
}
