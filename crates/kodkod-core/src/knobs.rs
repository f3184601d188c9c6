//! The five knobs: each trades one thing for another, none changes a bit of the result.

use crate::ROW_BLOCK;
use crate::error::{Error, Result};
use crate::shape::Shape;

/// How a pass is cut into pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Knobs {
    /// Workers of a rank that look for communication first in a forward: rows moved sooner against arithmetic.
    /// SMs on a GPU, threads on the CPU.
    pub fwd_comm_sms: usize,
    /// The same in a backward.
    pub bwd_comm_sms: usize,
    /// Rows whose communication and arithmetic overlap as a unit: a multiple of [`ROW_BLOCK`].
    pub minibatch_rows: usize,
    /// Rows of the ring that all rows pass through: a multiple of `minibatch_rows`. Memory against overlap.
    pub ring_rows: usize,
    /// Rows of a rank that keep `x`, `g`, `u` for the backward; the others are computed again. Counted in whole
    /// minibatches, rounded down. [`Knobs::ALL`] keeps every row. Memory against recomputation.
    pub saved_rows: usize,
}

/// The most rows of a minibatch or of the ring.
const MOST_ROWS: usize = 1 << 30;

impl Knobs {
    /// As many rows as there are.
    pub const ALL: usize = usize::MAX;

    /// Defaults for a shape: a minibatch of about two waves of gate-up tiles on a 132-SM GPU, a ring of two
    /// minibatches, everything saved.
    pub fn for_shape(shape: &Shape) -> Self {
        let tiles_per_block = shape.intermediate.div_ceil(ROW_BLOCK).max(1);
        let blocks = (2 * 132_usize / tiles_per_block).clamp(2, 32);
        let minibatch_rows = (1 << blocks.ilog2()) * ROW_BLOCK;
        Knobs {
            fwd_comm_sms: 1,
            bwd_comm_sms: 1,
            minibatch_rows,
            ring_rows: 2 * minibatch_rows,
            saved_rows: Self::ALL,
        }
    }

    /// Defaults where all ranks share one Hopper GPU: [`Knobs::for_gpus`] of one.
    pub fn for_gpu(shape: &Shape) -> Self {
        Self::for_gpus(shape, 1)
    }

    /// Defaults on `gpus` Hopper GPUs with a rank each, from measurement on one H200 and on two with NVLink
    /// (`docs/lab-notes.md`): a minibatch long enough that most experts' rows lie in one, since a weight gradient is
    /// summed a minibatch at a time, and SMs enough to pull rows ahead of the products: the fewer FLOPs a row needs, the
    /// more, and more over a link than from the GPU's own memory; fewer in a backward, which takes twice as long.
    pub fn for_gpus(shape: &Shape, gpus: usize) -> Self {
        let by_width = |n: usize| n / shape.intermediate.max(1);
        let (fwd_comm_sms, bwd_comm_sms) = match gpus {
            0 | 1 => {
                let fwd = by_width(12288).clamp(4, 10);
                (fwd, fwd / 2)
            }
            _ => {
                let fwd = by_width(16384).clamp(8, 16);
                (fwd, fwd * 5 / 8)
            }
        };
        Knobs { fwd_comm_sms, bwd_comm_sms, ..Self::for_shape(shape).with_rows(Some(16384), None, None) }
    }

    /// The defaults, with the rows that the caller gave; what was not given follows what was.
    pub fn with_rows(mut self, minibatch: Option<usize>, ring: Option<usize>, saved: Option<usize>) -> Self {
        match (minibatch, ring) {
            (Some(m), Some(r)) => (self.minibatch_rows, self.ring_rows) = (m, r),
            (Some(m), None) => {
                (self.minibatch_rows, self.ring_rows) = (m, if m > MOST_ROWS / 2 { m } else { 2 * m })
            }
            (None, Some(r)) => {
                // The largest minibatch that is no larger than the default and divides the ring.
                let fits = |m: &usize| r.is_multiple_of(*m);
                self.minibatch_rows = (1..=self.minibatch_rows / ROW_BLOCK)
                    .rev()
                    .map(|blocks| blocks * ROW_BLOCK)
                    .find(fits)
                    .unwrap_or(ROW_BLOCK);
                self.ring_rows = r;
            }
            (None, None) => {}
        }
        if let Some(saved) = saved {
            self.saved_rows = saved;
        }
        self
    }

    /// `Ok` where every knob is allowed.
    ///
    /// # Errors
    /// [`Error::Invalid`] that names the first knob which is not.
    pub fn validate(&self) -> Result<()> {
        for (name, sms) in [("fwd_comm_sms", self.fwd_comm_sms), ("bwd_comm_sms", self.bwd_comm_sms)] {
            if sms == 0 || sms > 1024 {
                return Err(Error::invalid(name, sms, "1 to 1024 are allowed"));
            }
        }
        let (m, r) = (self.minibatch_rows, self.ring_rows);
        if m == 0 || !m.is_multiple_of(ROW_BLOCK) || m > MOST_ROWS {
            return Err(Error::invalid(
                "minibatch_rows",
                m,
                format!("a positive multiple of {ROW_BLOCK} up to {MOST_ROWS} is needed"),
            ));
        }
        if r == 0 || !r.is_multiple_of(m) || r > MOST_ROWS {
            return Err(Error::invalid(
                "ring_rows",
                r,
                format!("a positive multiple of minibatch_rows ({m}) up to {MOST_ROWS} is needed"),
            ));
        }
        Ok(())
    }
}
