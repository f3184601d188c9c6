//! Options that several subcommands share: the group and the knobs.

use kodkod::{CpuOptions, ExpertGroup, Isa, Knobs, Shape};

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
    /// Workers that look for communication first in a forward [default: 1]
    #[arg(long, value_name = "N")]
    pub(crate) fwd_comm_sms: Option<usize>,
    /// Workers that look for communication first in a backward [default: 1]
    #[arg(long, value_name = "N")]
    pub(crate) bwd_comm_sms: Option<usize>,
}

impl KnobOptions {
    /// The knobs for a shape.
    pub(crate) fn knobs(&self, shape: &Shape) -> Knobs {
        let mut knobs =
            Knobs::for_shape(shape).with_rows(self.minibatch_rows, self.ring_rows, self.saved_rows);
        knobs.fwd_comm_sms = self.fwd_comm_sms.unwrap_or(knobs.fwd_comm_sms);
        knobs.bwd_comm_sms = self.bwd_comm_sms.unwrap_or(knobs.bwd_comm_sms);
        knobs
    }
}

/// How the ranks run on the CPU.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct CpuRunOptions {
    /// Worker threads [default: one a core]
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<usize>,
    /// Instruction set of the GEMMs: avx512-bf16, avx2 or scalar [default: the best here]
    #[arg(long, value_name = "LEVEL")]
    pub(crate) isa: Option<Isa>,
}

impl CpuRunOptions {
    /// A group of `ranks` virtual ranks.
    pub(crate) fn group(&self, ranks: usize) -> kodkod::Result<ExpertGroup> {
        ExpertGroup::cpu_with(CpuOptions {
            ranks,
            threads: self.threads.unwrap_or(0),
            isa: self.isa,
            ..CpuOptions::default()
        })
    }
}
