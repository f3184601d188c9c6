//! Options that several subcommands share: the machine, the knobs, and where a file is written.

use std::fmt;
use std::fs::{self, File};
use std::path::Path;
use std::str::FromStr;
use std::sync::Once;

use anyhow::{Context, ensure};
use kodkod::{CpuOptions, ExpertGroup, Isa, Knobs, Precision, Shape};

/// The five knobs; what is not given follows the shape.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Knobs (none changes a bit of the result)")]
pub(crate) struct KnobOptions {
    /// Rows whose communication and arithmetic overlap as a unit: a multiple of 128
    #[arg(long, value_name = "ROWS")]
    pub(crate) minibatch_rows: Option<usize>,
    /// Rows of the ring that all rows pass through: a multiple of --minibatch-rows
    #[arg(long, value_name = "ROWS")]
    pub(crate) ring_rows: Option<usize>,
    /// Rows of a rank kept for the backward, the others are computed again [default: all]
    #[arg(long, value_name = "ROWS")]
    pub(crate) saved_rows: Option<usize>,
    /// Workers that look for communication first in a forward [default: 1; 4 to 10 on a
    /// GPU, by width; 8 to 16 with a GPU each]
    #[arg(long, value_name = "N")]
    pub(crate) fwd_comm_sms: Option<usize>,
    /// Workers that look for communication first in a backward [default: 1; half of the
    /// forward's on a GPU, 5/8 with a GPU each]
    #[arg(long, value_name = "N")]
    pub(crate) bwd_comm_sms: Option<usize>,
}

impl KnobOptions {
    /// The defaults, where the options do not say otherwise.
    fn over(&self, defaults: Knobs) -> Knobs {
        let mut knobs = defaults.with_rows(self.minibatch_rows, self.ring_rows, self.saved_rows);
        knobs.fwd_comm_sms = self.fwd_comm_sms.unwrap_or(knobs.fwd_comm_sms);
        knobs.bwd_comm_sms = self.bwd_comm_sms.unwrap_or(knobs.bwd_comm_sms);
        knobs
    }
}

/// Where the ranks run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Device {
    #[default]
    Cpu,
    /// GPUs by their ordinals, at least one.
    Cuda(Vec<usize>),
}

impl Device {
    /// How many GPUs are named, where there are several: the number of ranks that have one each.
    pub(crate) fn several(&self) -> Option<usize> {
        match self {
            Device::Cuda(all) if all.len() > 1 => Some(all.len()),
            _ => None,
        }
    }

    /// Says on stderr, once, which GPUs are named and not used by so many ranks.
    pub(crate) fn note_unused(&self, ranks: usize) {
        static NOTE: Once = Once::new();
        if let Device::Cuda(all) = self
            && self.gpus(ranks).len() < all.len()
        {
            NOTE.call_once(|| eprintln!("{}", unused(all, ranks)));
        }
    }

    /// Of GPUs, those of a group of ranks: one each where there are as many, else the first, which they share.
    pub(crate) fn gpus(&self, ranks: usize) -> &[usize] {
        match self {
            Device::Cpu => &[],
            Device::Cuda(all) if all.len() == ranks => all,
            Device::Cuda(all) => &all[..1],
        }
    }
}

fn unused(gpus: &[usize], ranks: usize) -> String {
    let rest = gpus[1..].iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let shared = match ranks {
        1 => "1 rank is on".to_owned(),
        _ => format!("{ranks} ranks share"),
    };
    let unused = if gpus.len() == 2 { format!("GPU {rest} is") } else { format!("GPUs {rest} are") };
    format!("note: {shared} GPU {}; {unused} not used: as many ranks as GPUs have one each", gpus[0])
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let allowed = || "cpu, cuda, cuda:N and cuda:N,M,... with each GPU once are allowed".to_owned();
        match text.split_once(':') {
            None if text == "cpu" => Ok(Device::Cpu),
            None if text == "cuda" => Ok(Device::Cuda(vec![0])),
            Some(("cuda", ordinals)) => {
                let ordinal = |n: &str| n.parse::<u16>().map(usize::from).map_err(|_| allowed());
                let all = ordinals.split(',').map(ordinal).collect::<Result<Vec<_>, _>>()?;
                let twice = (1..all.len()).any(|at| all[..at].contains(&all[at]));
                if twice { Err(allowed()) } else { Ok(Device::Cuda(all)) }
            }
            _ => Err(allowed()),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(all) => {
                let ordinals = all.iter().map(ToString::to_string).collect::<Vec<_>>();
                write!(f, "cuda:{}", ordinals.join(","))
            }
        }
    }
}

/// The machine that the ranks run on.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct MachineOptions {
    /// Where the ranks run: cpu, cuda, cuda:N or cuda:N,M,...; as many ranks as GPUs have one each, any other number
    /// shares the first. GPUs compute in bf16
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub(crate) device: Device,
    /// Worker threads of the CPU; 0 is one a core [default: 0]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Instruction set of the CPU's GEMMs: avx512, avx512-bf16, avx2 or scalar [default: the fastest
    /// here]
    #[arg(long, value_name = "LEVEL")]
    pub(crate) isa: Option<Isa>,
}

impl MachineOptions {
    /// A group of `ranks` virtual ranks.
    pub(crate) fn group(&self, ranks: usize) -> kodkod::Result<ExpertGroup> {
        let gpus = match &self.device {
            Device::Cpu => {
                return ExpertGroup::cpu_with(CpuOptions {
                    ranks,
                    threads: self.threads.unwrap_or(0),
                    isa: self.isa,
                    ..CpuOptions::default()
                });
            }
            device => device.gpus(ranks),
        };
        if self.threads.is_some() || self.isa.is_some() {
            let allowed = "--threads and --isa are for --device cpu";
            return Err(kodkod::Error::invalid("--device", &self.device, allowed));
        }
        match gpus {
            [gpu] => ExpertGroup::cuda_virtual(*gpu, ranks),
            _ => ExpertGroup::cuda(gpus),
        }
    }

    /// The knobs of the options for a shape and so many ranks; what is not given follows the shape and the device.
    pub(crate) fn knobs(&self, given: &KnobOptions, shape: &Shape, ranks: usize) -> Knobs {
        given.over(match self.device.gpus(ranks).len() {
            0 => Knobs::for_shape(shape),
            gpus => Knobs::for_gpus(shape, gpus),
        })
    }
}

/// Whether a file can be written to `out`: found out before a long run, not after it. What is there stays as it is.
pub(crate) fn check_writable(out: &Path) -> anyhow::Result<()> {
    let needed =
        || format!("--out {}: a file in a folder that exists and can be written to is needed", out.display());
    let path = std::path::absolute(out).with_context(needed)?;
    ensure!(!path.is_dir(), needed());
    let mut probe = path.into_os_string();
    probe.push(format!(".{}.part", std::process::id()));
    File::create_new(&probe).with_context(needed)?;
    fs::remove_file(&probe).with_context(needed)
}

/// For options that choose a storage type.
pub(crate) fn parse_precision(text: &str) -> Result<Precision, String> {
    match text {
        "bf16" => Ok(Precision::Bf16),
        "f32" => Ok(Precision::F32),
        _ => Err("bf16 and f32 are allowed".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_that_are_not_used_are_named() {
        assert_eq!(
            unused(&[0, 1], 4),
            "note: 4 ranks share GPU 0; GPU 1 is not used: as many ranks as GPUs have one each"
        );
        assert_eq!(
            unused(&[2, 0, 1], 1),
            "note: 1 rank is on GPU 2; GPUs 0, 1 are not used: as many ranks as GPUs have one each"
        );
        let several = |text: &str| text.parse::<Device>().unwrap().several();
        assert_eq!(["cpu", "cuda", "cuda:3", "cuda:1,0,2"].map(several), [None, None, None, Some(3)]);
    }
}
