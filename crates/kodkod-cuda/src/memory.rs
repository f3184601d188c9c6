//! A rank's memory on its GPU: how much it is, what its passes alone use, and what other ranks reach.

use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use kodkod_core::schedule::experts_per_rank;
use kodkod_core::{Knobs, Precision, ROW_BLOCK, Shape, Stall};

use crate::driver::{Buffer, Device, Event, Stream};
use crate::error::Result;
use crate::layer::KINDS;

/// One thread each, and one more for the shared experts, in `schedule_place`.
const MOST_EXPERTS: usize = crate::layer::SCHEDULE_THREADS as usize - 1;

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
    /// Whether a backward may have to pull rows of x, those that were not saved.
    pub(crate) recomputes: bool,
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
            recomputes: saved < minibatches,
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

/// One rank's memory, on its GPU, that its own passes use.
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
    /// Of all ranks' routes, the rows of those to experts of this rank.
    pub(crate) row_of: Buffer<u32>,
    pub(crate) programs: Buffer<u8>,
    pub(crate) x: Buffer<bf16>,
    pub(crate) g: Buffer<bf16>,
    pub(crate) u: Buffer<bf16>,
    pub(crate) h: Buffer<bf16>,
    pub(crate) dy: Buffer<bf16>,
    pub(crate) dg: Buffer<bf16>,
    pub(crate) du: Buffer<bf16>,
    pub(crate) d_w_parts: Buffer<f32>,
    /// Sums of a routed expert's gradients that go on in the next minibatch; where gradients are bf16.
    pub(crate) carry: Option<Buffer<f32>>,
    pub(crate) routes: Option<Routes>,
    pub(crate) trace: Option<Trace>,
}

/// Of ranks with a GPU each: all ranks' routes, copied here by each forward.
#[derive(Debug)]
pub(crate) struct Routes {
    /// `[tokens of all, top_k]`
    pub(crate) ids: Buffer<i32>,
    /// Router weights, `[tokens of all, top_k]`.
    pub(crate) factors: Buffer<f32>,
}

/// What other ranks reach of a rank, and what stands beside it: where the rank is another process, only addresses there.
#[derive(Debug)]
pub(crate) struct Reached {
    pub(crate) words: Words,
    /// Counters, then three tickets.
    pub(crate) counters: Buffer<u32>,
    /// `[tokens, slots, hidden]`
    pub(crate) combine: Buffer<bf16>,
    /// `[tokens, slots]`
    pub(crate) d_w: Buffer<f32>,
    /// What a forward leaves for its backward: `[tokens]`
    pub(crate) output_gates: Buffer<f32>,
    /// Sums of the shared experts' gradients that go on in the next run or rank; of the first rank, where gradients are
    /// bf16.
    pub(crate) shared_carry: Option<Buffer<f32>>,
    /// Where the rank is a process.
    pub(crate) staged: Option<Staged>,
}

/// Words that outlast a pass.
#[derive(Debug)]
pub(crate) struct Words {
    pub(crate) stall: Buffer<u32>,
    /// Not 0 when a rank has given up.
    pub(crate) abort: Buffer<u32>,
    /// How often each rank has told this one that it is there: `[ranks]`
    pub(crate) met: Buffer<u32>,
    /// How often this one has: one word.
    pub(crate) epoch: Buffer<u32>,
}

/// A caller's rows and routes, copied to where other processes reach them.
#[derive(Debug)]
pub(crate) struct Staged {
    /// `[tokens, hidden]`
    pub(crate) x: Buffer<bf16>,
    /// `[tokens, hidden]`
    pub(crate) dy: Buffer<bf16>,
    /// `[tokens, top_k]`
    pub(crate) ids: Buffer<i32>,
    /// `[tokens, top_k]`
    pub(crate) topk_weights: Buffer<f32>,
    /// Of the first rank, the shared experts' gradients, gate, up and down, of the layer's type, as bytes, and the output
    /// gate's.
    pub(crate) shared: [Buffer<u8>; 3],
    pub(crate) shared_output_gate: Buffer<f32>,
}

/// Where memory comes from.
pub(crate) enum Room {
    /// Allocations, one each.
    Allocated,
    /// Places in one allocation, one after the other.
    Within {
        /// Its address.
        base: u64,
        /// Bytes that are taken.
        used: usize,
    },
}

impl Room {
    fn take<T: Copy>(&mut self, len: usize) -> Result<Buffer<T>> {
        match self {
            Room::Allocated => Buffer::new(len),
            Room::Within { base, used } => {
                let address = *base + *used as u64;
                *used += (len * size_of::<T>()).next_multiple_of(256);
                // SAFETY: whoever made the room keeps it while what was taken is used.
                Ok(unsafe { Buffer::borrowed(address, len) })
            }
        }
    }
}

impl Words {
    pub(crate) fn new(room: &mut Room, ranks: usize) -> Result<Self> {
        Ok(Words {
            stall: room.take(STALL_WORDS)?,
            abort: room.take(1)?,
            met: room.take(ranks)?,
            epoch: room.take(1)?,
        })
    }

    /// Zeros: nobody has met, and no pass was given up.
    pub(crate) fn clear(&self, stream: &Stream) -> Result<()> {
        for words in [&self.stall, &self.abort, &self.met, &self.epoch] {
            words.fill(0, stream)?;
        }
        stream.synchronize()
    }

    /// What this rank waited for when a pass was given up, and how many tiles it had pushed; `None` where none was.
    pub(crate) fn stall(&self, rank: usize, limit: Duration) -> Result<Option<(Stall, u32)>> {
        let s = self.stall.read()?;
        let kind = KINDS[s[1] as usize % KINDS.len()];
        let place = match kind {
            "Enter" | "Leave" => format!("meeting {}, rank {}", s[2], s[3]),
            _ => format!("block {}, {}", s[2], s[3]),
        };
        let stall = || Stall {
            rank,
            task: format!("{kind} ({place})"),
            counter: format!("{}[{}] of rank {rank}", COUNTERS[s[4] as usize % COUNTERS.len()], s[5]),
            seen: s[6],
            expected: s[7],
            waited_ms: limit.as_millis() as u64,
        };
        Ok((s[0] != 0).then(|| (stall(), s[8])))
    }
}

impl Reached {
    /// Of `rank`; `staged`: it is a process, and the caller's rows are copied there.
    pub(crate) fn new(
        room: &mut Room,
        shape: &Shape,
        sizes: &Sizes,
        tokens: &[usize],
        rank: usize,
        gradients: Precision,
        staged: bool,
    ) -> Result<Self> {
        let (rows, routes) = (tokens[rank] * shape.hidden, tokens[rank] * shape.top_k);
        // The shared experts' sums are the first rank's.
        let shared = shape.shared.filter(|_| rank == 0);
        let matrix = shared.map_or(0, |s| s.intermediate * shape.hidden);
        let carried = shared.is_some() && gradients == Precision::Bf16;
        let element = if gradients == Precision::Bf16 { size_of::<bf16>() } else { size_of::<f32>() };
        let gate = if shared.is_some_and(|s| s.output_gate) { shape.hidden } else { 0 };
        let stage = |room: &mut Room| -> Result<_> {
            let mut matrix = || room.take(matrix * element);
            let shared = [matrix()?, matrix()?, matrix()?];
            Ok(Staged {
                x: room.take(rows)?,
                dy: room.take(rows)?,
                ids: room.take(routes)?,
                topk_weights: room.take(routes)?,
                shared,
                shared_output_gate: room.take(gate)?,
            })
        };
        Ok(Reached {
            words: Words::new(room, sizes.ranks)?,
            counters: room.take(sizes.counters + TICKETS)?,
            combine: room.take(tokens[rank] * shape.slots() * shape.hidden)?,
            d_w: room.take(tokens[rank] * shape.slots())?,
            output_gates: room.take(tokens[rank])?,
            shared_carry: carried.then(|| room.take(3 * matrix)).transpose()?,
            staged: staged.then(|| stage(room)).transpose()?,
        })
    }
}

/// Room for the stamps of a rank's tasks, and how many there are.
#[derive(Debug)]
pub(crate) struct Trace {
    pub(crate) stamps: Buffer<u64>,
    /// Then rows pulled from other ranks, and rows taken from one of those.
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
/// Names of `program::Counter`s.
const COUNTERS: [&str; 9] =
    ["done", "pushed", "chain", "pulled", "grad_pulled", "hidden", "grad_hidden", "free", "met"];
/// Words of a `Stall`.
const STALL_WORDS: usize = 9;

impl Rank {
    /// Allocates, on a device that is made current. `meets`: it has a GPU of its own.
    pub(crate) fn new(
        device: &Arc<Device>,
        shape: &Shape,
        sizes: &Sizes,
        tokens: &[usize],
        gradients: Precision,
        [meets, traced]: [bool; 2],
    ) -> Result<Self> {
        device.make_current()?;
        let local = shape.experts / sizes.ranks + usize::from(shape.shared.is_some());
        let width = shape.intermediate.max(shape.shared.map_or(0, |s| s.intermediate));
        let (kept, ring, all) =
            (sizes.kept_rows, sizes.ring_rows, tokens.iter().sum::<usize>() * shape.top_k);
        let routes = || -> Result<_> { Ok(Routes { ids: Buffer::new(all)?, factors: Buffer::new(all)? }) };
        let trace = || -> Result<_> {
            Ok(Trace { stamps: Buffer::new(STAMPS * STAMP_WORDS)?, stamped: Buffer::from_host(&[0; 3])? })
        };
        Ok(Rank {
            device: device.clone(),
            stream: Stream::new()?,
            done: Event::new()?,
            // Each expert's, and for each source rank what each warp of the schedule's places.
            counts: Buffer::new(shape.experts * (1 + sizes.ranks * 32))?,
            rows: Buffer::new(local)?,
            first_block: Buffer::new(local + 1)?,
            first_run: Buffer::new(local + 1)?,
            sources: Buffer::new(sizes.blocks * ROW_BLOCK)?,
            row_of: Buffer::new(if sizes.ranks > 1 { all } else { 0 })?,
            programs: Buffer::new(2 * PROGRAM_BYTES)?,
            x: Buffer::new(kept * shape.hidden)?,
            g: Buffer::new(kept * width)?,
            u: Buffer::new(kept * width)?,
            h: Buffer::new(ring * width)?,
            dy: Buffer::new(ring * shape.hidden)?,
            dg: Buffer::new(ring * width)?,
            du: Buffer::new(ring * width)?,
            d_w_parts: Buffer::new(ring * width.div_ceil(256))?,
            // Two slots of an expert's gate, up and down.
            carry: (gradients == Precision::Bf16)
                .then(|| Buffer::new(2 * 3 * shape.intermediate * shape.hidden))
                .transpose()?,
            routes: meets.then(routes).transpose()?,
            trace: traced.then(trace).transpose()?,
        })
    }
}
