//! A rank's memory on its GPU: how much it is, and what of it other ranks reach.

use std::sync::Arc;

use half::bf16;
use kodkod_core::schedule::experts_per_rank;
use kodkod_core::{Knobs, Precision, ROW_BLOCK, Shape};

use crate::driver::{Buffer, Device, Event, Stream};
use crate::error::Result;

/// One thread each, and one more for the shared experts, in `schedule_place`.
const MOST_EXPERTS: usize = crate::layer::PLACE_THREADS as usize - 1;

/// The most rows, blocks and counters a rank can need, whatever the routing.
#[derive(Debug)]
pub(crate) struct Sizes {
    pub(crate) ranks: usize,
    pub(crate) blocks: usize,
    pub(crate) per_minibatch: u32,
    pub(crate) ring: u32,
    pub(crate) saved: u32,
    pub(crate) kept_rows: usize,
    pub(crate) ring_rows: usize,
    pub(crate) counters: usize,
}

impl Sizes {
    pub(crate) fn new(shape: &Shape, knobs: &Knobs, tokens: &[usize]) -> Result<Self> {
        shape.validate()?;
        knobs.validate()?;
        let shared = shape.shared.map_or(0, |s| s.intermediate);
        let widths =
            [("hidden", shape.hidden), ("intermediate", shape.intermediate), ("shared intermediate", shared)];
        for (name, size) in widths {
            if size % 64 != 0 {
                let allowed = "it must be a multiple of 64 on a GPU";
                return Err(kodkod_core::Error::invalid(name, size, allowed).into());
            }
        }
        if shape.experts > MOST_EXPERTS {
            let allowed = format!("up to {MOST_EXPERTS} on a GPU");
            return Err(kodkod_core::Error::invalid("experts", shape.experts, allowed).into());
        }
        let local = experts_per_rank(shape, tokens.len())?;
        // Every route of every token may go to this rank, since an expert may stand twice in a token.
        let routes = tokens.iter().sum::<usize>() * shape.top_k;
        let most = tokens.iter().copied().max().unwrap_or(0);
        let shared_blocks = if shared > 0 { most.div_ceil(ROW_BLOCK) } else { 0 };
        let blocks = routes / ROW_BLOCK + local + shared_blocks;
        let (m, n) = (|w: usize| w.div_ceil(128), |w: usize| w.div_ceil(256));
        let shared_tiles = 2 * m(shared) * n(shape.hidden) + m(shape.hidden) * n(shared) + 1;
        let per_minibatch = (knobs.minibatch_rows / ROW_BLOCK) as u32;
        let minibatches = (blocks as u32).div_ceil(per_minibatch);
        let ring = ((knobs.ring_rows / knobs.minibatch_rows) as u32).min(minibatches);
        let saved =
            ((knobs.saved_rows / knobs.minibatch_rows).min(u32::MAX as usize) as u32).min(minibatches);
        let rows = |m: u32| (m as usize * per_minibatch as usize).min(blocks) * ROW_BLOCK;
        Ok(Sizes {
            ranks: tokens.len(),
            blocks,
            per_minibatch,
            ring,
            saved,
            kept_rows: rows(saved.saturating_add(ring).min(minibatches)),
            ring_rows: rows(ring),
            // `program::place`: two, the chain, four a block and run, minibatches.
            counters: 2 + shared_tiles + 4 * blocks + 2 * (blocks + local + 2),
        })
    }

    pub(crate) fn defines(&self, shape: &Shape, gradients: Precision) -> Vec<(&'static str, String)> {
        let float = |v: f32| format!("{v:e}f");
        let shared = shape.shared.map_or(0, |s| s.intermediate);
        let limit = shape.activation.limit();
        vec![
            ("HIDDEN_SIZE", shape.hidden.to_string()),
            ("INNER_SIZE", shape.intermediate.to_string()),
            ("SHARED_SIZE", shared.to_string()),
            ("EXPERTS", shape.experts.to_string()),
            ("TOP_K", shape.top_k.to_string()),
            ("SLOTS", shape.slots().to_string()),
            ("RANKS", self.ranks.to_string()),
            ("PER_MINIBATCH", self.per_minibatch.to_string()),
            ("RING", self.ring.to_string()),
            ("SAVED", self.saved.to_string()),
            ("ALPHA", float(shape.activation.alpha())),
            ("UP_OFFSET", float(shape.activation.up_offset())),
            ("LIMIT", float(limit.unwrap_or(0.0))),
            ("LIMIT_ON", u32::from(limit.is_some()).to_string()),
            ("BIASES", u32::from(shape.biases).to_string()),
            ("HAS_OUTPUT_GATE", u32::from(shape.shared.is_some_and(|s| s.output_gate)).to_string()),
            ("BF16_GRADIENTS", u32::from(gradients == Precision::Bf16).to_string()),
            ("D_HIDDEN_TILES", shape.intermediate.max(shared).div_ceil(256).to_string()),
        ]
    }
}

/// One rank's memory, on its GPU.
#[derive(Debug)]
pub(crate) struct Rank {
    pub(crate) device: Arc<Device>,
    pub(crate) stream: Stream,
    pub(crate) done: Event,
    pub(crate) counts: Buffer<u32>,
    pub(crate) rows: Buffer<u32>,
    pub(crate) first_block: Buffer<u32>,
    pub(crate) first_run: Buffer<u32>,
    pub(crate) sources: Buffer<u64>,
    /// Counters, then three tickets.
    pub(crate) counters: Buffer<u32>,
    pub(crate) programs: Buffer<u8>,
    pub(crate) stall: Buffer<u32>,
    /// Not 0 when a rank has given up.
    pub(crate) abort: Buffer<u32>,
    pub(crate) x: Buffer<bf16>,
    pub(crate) g: Buffer<bf16>,
    pub(crate) u: Buffer<bf16>,
    pub(crate) h: Buffer<bf16>,
    pub(crate) dy: Buffer<bf16>,
    pub(crate) dg: Buffer<bf16>,
    pub(crate) du: Buffer<bf16>,
    pub(crate) d_w_parts: Buffer<f32>,
    pub(crate) combine: Buffer<bf16>,
    pub(crate) d_w: Buffer<f32>,
    /// What a forward leaves for its backward: `[tokens]`
    pub(crate) output_gates: Buffer<f32>,
    /// Sums of a routed expert's gradients that go on in the next minibatch; where gradients are bf16.
    pub(crate) carry: Option<Buffer<f32>>,
    pub(crate) meeting: Option<Meeting>,
    pub(crate) trace: Option<Trace>,
}

/// Of ranks with a GPU each.
#[derive(Debug)]
pub(crate) struct Meeting {
    /// How often each rank has told this one that it is there: `[ranks]`
    pub(crate) met: Buffer<u32>,
    /// How often this one has: one word.
    pub(crate) epoch: Buffer<u32>,
    /// All ranks' routes, copied here by each forward: `[tokens of all, top_k]`
    pub(crate) ids: Buffer<i32>,
    /// Their router weights.
    pub(crate) factors: Buffer<f32>,
}

/// Room for the stamps of a rank's tasks, and how many there are.
#[derive(Debug)]
pub(crate) struct Trace {
    pub(crate) stamps: Buffer<u64>,
    pub(crate) stamped: Buffer<u32>,
}

/// Most stamps that a rank has room for, those of all passes since [`CudaLayer::clear_stamps`]; later tasks leave none.
///
/// [`CudaLayer::clear_stamps`]: crate::CudaLayer::clear_stamps
pub const STAMPS: usize = 1 << 18;
/// 64-bit words of a stamp.
pub(crate) const STAMP_WORDS: usize = 8;
/// Bytes of a `program::Program`.
pub(crate) const PROGRAM_BYTES: usize = 144;
/// Tickets behind the counters, of which three are used.
pub(crate) const TICKETS: usize = 4;
/// Words of a `Stall`.
const STALL_WORDS: usize = 9;

impl Rank {
    /// Allocates for `tokens[rank]` tokens, on a device that is made current. `meets`: it has a GPU of its own.
    pub(crate) fn new(
        device: &Arc<Device>,
        shape: &Shape,
        sizes: &Sizes,
        tokens: &[usize],
        rank: usize,
        gradients: Precision,
        [meets, traced]: [bool; 2],
    ) -> Result<Self> {
        device.make_current()?;
        let local = shape.experts / sizes.ranks + usize::from(shape.shared.is_some());
        let width = shape.intermediate.max(shape.shared.map_or(0, |s| s.intermediate));
        let (kept, ring, routes) =
            (sizes.kept_rows, sizes.ring_rows, tokens.iter().sum::<usize>() * shape.top_k);
        let meeting = || -> Result<_> {
            Ok(Meeting {
                met: Buffer::from_host(&vec![0; sizes.ranks])?,
                epoch: Buffer::from_host(&[0])?,
                ids: Buffer::new(routes)?,
                factors: Buffer::new(routes)?,
            })
        };
        let trace = || -> Result<_> {
            Ok(Trace { stamps: Buffer::new(STAMPS * STAMP_WORDS)?, stamped: Buffer::from_host(&[0])? })
        };
        Ok(Rank {
            device: device.clone(),
            stream: Stream::new()?,
            done: Event::new()?,
            counts: Buffer::new(shape.experts)?,
            rows: Buffer::new(local)?,
            first_block: Buffer::new(local + 1)?,
            first_run: Buffer::new(local + 1)?,
            sources: Buffer::new(sizes.blocks * ROW_BLOCK)?,
            counters: Buffer::new(sizes.counters + TICKETS)?,
            programs: Buffer::new(2 * PROGRAM_BYTES)?,
            stall: Buffer::from_host(&[0; STALL_WORDS])?,
            abort: Buffer::from_host(&[0])?,
            x: Buffer::new(kept * shape.hidden)?,
            g: Buffer::new(kept * width)?,
            u: Buffer::new(kept * width)?,
            h: Buffer::new(ring * width)?,
            dy: Buffer::new(ring * shape.hidden)?,
            dg: Buffer::new(ring * width)?,
            du: Buffer::new(ring * width)?,
            d_w_parts: Buffer::new(ring * width.div_ceil(256))?,
            combine: Buffer::new(tokens[rank] * shape.slots() * shape.hidden)?,
            d_w: Buffer::new(tokens[rank] * shape.slots())?,
            output_gates: Buffer::new(tokens[rank])?,
            // Two slots of an expert's gate, up and down.
            carry: (gradients == Precision::Bf16)
                .then(|| Buffer::new(2 * 3 * shape.intermediate * shape.hidden))
                .transpose()?,
            meeting: meets.then(meeting).transpose()?,
            trace: traced.then(trace).transpose()?,
        })
    }

    /// Forgets that a pass was given up.
    pub(crate) fn forget_stall(&self) -> Result<()> {
        self.device.make_current()?;
        self.stall.fill(0, &self.stream)?;
        self.abort.fill(0, &self.stream)?;
        if let Some(m) = &self.meeting {
            m.met.fill(0, &self.stream)?;
            m.epoch.fill(0, &self.stream)?;
        }
        self.stream.synchronize()
    }
}
