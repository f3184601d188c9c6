//! The ordered tasks of one rank's forward or backward, with the counters that they wait for and arrive at.
//!
//! A rank has two streams of tickets: communication and compute. A worker takes a stream's next ticket, decodes it
//! with [`Program::task`] (integer arithmetic, no allocation), waits, works, arrives. Workers take tickets in order,
//! so a wait only ever looks at earlier tickets of the rank, or at other ranks' progress along the same order:
//! there is always a task that can run.
//!
//! ```text
//! forward, minibatches last to first       backward, minibatches first to last
//!   comm     Pull                            comm     Pull (rows not kept), PullGrad
//!   compute  GateUp, Down (pushes y)         compute  GateUp (rows not kept), DHidden,
//!                                                     DInput (pushes dx), WGrad
//!   comm     Reduce, when all have pushed    comm     ReduceGrad, when all have pushed
//! ```
//!
//! A minibatch's rows live in slots: `x`, `g`, `u` of saved minibatches in slots of their own and of the others in
//! the ring; what only a pass needs (`h`; `dy`, `dg`, `du`, `w h`) in the ring always. A slot is filled again when
//! the minibatch that used it before is free: all its `Down` (forward) or `DInput` and `WGrad` (backward) are done.
//! The forward ends with the ring's first minibatches in place, and the backward starts there.

use std::fmt;

use crate::ROW_BLOCK;
use crate::knobs::Knobs;
use crate::routing::Routing;
use crate::schedule::{Layout, Schedule};
use crate::shape::Shape;

/// Tokens that one reduce task sums.
pub const REDUCE_TOKENS: usize = 32;

/// Forward or backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// x to y.
    Forward,
    /// dy to gradients.
    Backward,
}

/// One of a rank's two orders of tickets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Rows moved and reduced.
    Comm = 0,
    /// GEMMs.
    Compute = 1,
}

/// How a machine cuts the outputs of GEMMs into tiles. M is a row block where rows are M.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiles {
    /// Intermediate columns of a `GateUp` tile.
    pub gate_up_n: u32,
    /// Intermediate columns of a `DHidden` tile.
    pub d_hidden_n: u32,
    /// Hidden columns of a `Down` or `DInput` tile.
    pub hidden_n: u32,
    /// Rows of a weight-gradient tile.
    pub wgrad_m: u32,
    /// Columns of a weight-gradient tile.
    pub wgrad_n: u32,
}

/// A counter of a rank: an integer that tasks add one to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counter {
    /// Ranks that have pushed all their rows.
    Done,
    /// Shared experts' weight gradients: a tile that the rank before has finished with.
    Chain(u32),
    /// Tasks here that have pushed.
    Pushed,
    /// Sources whose x rows of a block have arrived.
    Pulled(u32),
    /// Sources whose dy rows of a block have arrived.
    GradPulled(u32),
    /// `GateUp` tiles of a block that are done.
    Hidden(u32),
    /// `DHidden` tiles of a run that are done.
    GradHidden(u32),
    /// Tasks of a minibatch after which its slots are free.
    Free(u32),
}

/// A counter of the task's own rank and the value that it must have reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// The counter.
    pub counter: Counter,
    /// The value that releases the task.
    pub at_least: u32,
}

/// What a task adds one to when it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrive {
    /// A counter of its own rank.
    Here(Counter),
    /// A counter of another rank.
    At {
        /// The other rank.
        rank: u32,
        /// Its counter.
        counter: Counter,
    },
    /// [`Counter::Pushed`] here; the arrival that makes it `total` also adds one to [`Counter::Done`] of every rank.
    Pushed {
        /// Tasks of this rank that push.
        total: u32,
    },
}

/// Which weight a [`Kind::WGrad`] is the gradient of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// `[intermediate, hidden]`
    Gate,
    /// `[intermediate, hidden]`
    Up,
    /// `[hidden, intermediate]`
    Down,
    /// The shared experts' output gate, `[1, hidden]`.
    OutputGate,
}

/// One expert's row blocks inside one minibatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Position among the rank's runs.
    pub index: u32,
    /// Local expert; the shared experts are the last.
    pub expert: u32,
    /// The minibatch.
    pub minibatch: u32,
    /// First row block.
    pub block: u32,
    /// Row blocks.
    pub blocks: u32,
}

/// What a task does. Tiles count from 0 along the output's columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Copies the x rows of `block` whose tokens `source` holds from there.
    Pull {
        /// Row block.
        block: u32,
        /// The rank that holds the tokens.
        source: u32,
    },
    /// The same for rows of dy.
    PullGrad {
        /// Row block.
        block: u32,
        /// The rank that holds the tokens.
        source: u32,
    },
    /// `g`, `u` and, in a forward, `h` of a block and a tile of the intermediate columns.
    GateUp {
        /// Row block.
        block: u32,
        /// Tile of intermediate columns.
        tile: u32,
    },
    /// `y_k` of a block and a tile of hidden columns, written to the combine slots of the ranks that hold the tokens.
    Down {
        /// Row block.
        block: u32,
        /// Tile of hidden columns.
        tile: u32,
    },
    /// `dh'`, from it `dg`, `du`, `w h` and a partial sum of `d_w`.
    DHidden {
        /// Row block.
        block: u32,
        /// Tile of intermediate columns.
        tile: u32,
    },
    /// `dx_k`, written to the slots of the ranks that hold the tokens; tile 0 also pushes `d_w`.
    DInput {
        /// Row block.
        block: u32,
        /// Tile of hidden columns.
        tile: u32,
    },
    /// A tile of a weight gradient, continued along the rows of a run.
    WGrad {
        /// Which weight.
        weight: Weight,
        /// The rows.
        run: Run,
        /// Tile of the gradient's rows.
        tile_m: u32,
        /// Tile of the gradient's columns.
        tile_n: u32,
        /// Whether no row of this expert, on any rank, came before: the sum starts here.
        first: bool,
        /// Whether no row of this expert, on any rank, comes after: the sum is complete. Else it is carried: where a
        /// machine keeps a routed expert's sum apart from its gradient, two places are enough, taken in turn by the
        /// minibatch, since one routed expert at most goes on into the next.
        last: bool,
    },
    /// Writes zeros to the weight gradients of an expert without rows.
    ZeroGrad {
        /// Local expert.
        expert: u32,
    },
    /// Nothing: the expert has rows.
    Skip,
    /// `y` of [`REDUCE_TOKENS`] local tokens.
    Reduce {
        /// Chunk of local tokens.
        chunk: u32,
    },
    /// `dx` and `d_w` of [`REDUCE_TOKENS`] local tokens.
    ReduceGrad {
        /// Chunk of local tokens.
        chunk: u32,
    },
}

/// A decoded ticket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Task {
    /// What it does.
    pub kind: Kind,
    /// All must hold before it starts.
    pub waits: [Option<Wait>; 2],
    /// Done when it ends.
    pub arrives: [Option<Arrive>; 2],
}

/// The tasks of one rank and one pass.
#[derive(Debug, Clone)]
pub struct Program {
    pass: Pass,
    rank: u32,
    ranks: u32,
    layout: Layout,
    /// Runs of the experts before each local expert, and of all.
    first_run: Vec<u32>,
    /// Row blocks of a minibatch.
    per_minibatch: u32,
    minibatches: u32,
    /// Minibatches of the ring; of saved slots; that the backward finds in place.
    ring: u32,
    saved: u32,
    kept: u32,
    /// Tiles of intermediate columns in a `GateUp` and in a `DHidden`: routed, shared.
    gate_up_tiles: [u32; 2],
    d_hidden_tiles: [u32; 2],
    hidden_tiles: u32,
    /// Weight-gradient tiles of gate (and up) and of down, as (m, n): routed, shared.
    gate_grid: [(u32, u32); 2],
    down_grid: [(u32, u32); 2],
    output_gate: bool,
    chunks: u32,
    /// Ranks that push at all.
    pushing: u32,
    shared: SharedChain,
}

/// Where this rank stands in the order of ranks that hold shared rows.
#[derive(Debug, Clone, Copy, Default)]
struct SharedChain {
    /// A rank before this one has shared rows.
    after_another: bool,
    /// The next rank that has.
    next: Option<u32>,
    /// This rank zeroes the shared gradients, since no rank has shared rows.
    zero_here: bool,
}

impl Program {
    /// The programs of all ranks. `ring_holds` says whether the ring still holds what the forward left there
    /// (backward only).
    pub fn all(
        pass: Pass,
        shape: &Shape,
        knobs: &Knobs,
        tiles: &Tiles,
        routing: &Routing,
        schedules: &[Schedule],
        ring_holds: bool,
    ) -> Vec<Program> {
        let layouts: Vec<_> = schedules.iter().map(|s| &s.layout).collect();
        let tokens: Vec<_> = (0..routing.ranks()).map(|r| routing.tokens_of(r).len()).collect();
        (0..routing.ranks())
            .map(|rank| Program::new(pass, shape, knobs, tiles, &layouts, &tokens, rank, ring_holds))
            .collect()
    }

    /// The program of one rank, from the row layouts and token counts of all.
    pub fn new(
        pass: Pass,
        shape: &Shape,
        knobs: &Knobs,
        tiles: &Tiles,
        layouts: &[&Layout],
        tokens: &[usize],
        rank: usize,
        ring_holds: bool,
    ) -> Program {
        let layout = layouts[rank].clone();
        let per_minibatch = (knobs.minibatch_rows / ROW_BLOCK) as u32;
        let mut first_run = vec![0];
        for e in 0..layout.rows.len() {
            let (start, end) = (layout.first_block[e], layout.first_block[e + 1]);
            let runs = if start == end { 0 } else { (end - 1) / per_minibatch - start / per_minibatch + 1 };
            first_run.push(first_run[e] + runs);
        }
        let minibatches = layout.blocks().div_ceil(per_minibatch);
        let ring = ((knobs.ring_rows / knobs.minibatch_rows) as u32).min(minibatches.max(1));
        let all_saved = knobs.saved_rows >= layout.blocks() as usize * ROW_BLOCK;
        let saved = match all_saved {
            true => minibatches,
            false => (knobs.saved_rows / knobs.minibatch_rows) as u32,
        };
        let kept = if ring_holds { (saved + ring).min(minibatches) } else { saved };
        let widths = [shape.intermediate, shape.shared.map_or(0, |s| s.intermediate)];
        let cut = |n: usize, by: u32| (n as u32).div_ceil(by);
        let shared_rows = |r: usize| shape.shared.is_some() && layouts[r].rows.last().is_some_and(|&n| n > 0);
        let ranks = layouts.len();
        let shared = SharedChain {
            after_another: (0..rank).any(shared_rows),
            next: (rank + 1..ranks).find(|&r| shared_rows(r)).map(|r| r as u32),
            zero_here: rank == 0 && !(0..ranks).any(shared_rows),
        };
        Program {
            pass,
            rank: rank as u32,
            ranks: ranks as u32,
            first_run,
            per_minibatch,
            minibatches,
            ring,
            saved,
            kept,
            gate_up_tiles: widths.map(|w| cut(w, tiles.gate_up_n)),
            d_hidden_tiles: widths.map(|w| cut(w, tiles.d_hidden_n)),
            hidden_tiles: cut(shape.hidden, tiles.hidden_n),
            gate_grid: widths.map(|w| (cut(w, tiles.wgrad_m), cut(shape.hidden, tiles.wgrad_n))),
            down_grid: widths.map(|w| (cut(shape.hidden, tiles.wgrad_m), cut(w, tiles.wgrad_n))),
            output_gate: shape.shared.is_some_and(|s| s.output_gate),
            chunks: tokens[rank].div_ceil(REDUCE_TOKENS) as u32,
            pushing: layouts.iter().filter(|l| l.blocks() > 0).count() as u32,
            shared,
            layout,
        }
    }

    /// Forward or backward.
    pub fn pass(&self) -> Pass {
        self.pass
    }

    /// Rows of the slots that keep `x`, `g`, `u`: saved minibatches, then the ring.
    pub fn kept_slot_rows(&self) -> usize {
        let slots = (self.saved + self.ring).min(self.minibatches);
        self.slot_rows(slots)
    }

    /// Rows of the ring slots that a pass alone needs.
    pub fn ring_slot_rows(&self) -> usize {
        self.slot_rows(self.ring)
    }

    /// Rows of saved minibatches: the first of [`Program::kept_slot_rows`].
    pub fn saved_slot_rows(&self) -> usize {
        self.slot_rows(self.saved)
    }

    /// A block never lies further back in the slots than among the blocks, so no more rows than those are needed.
    fn slot_rows(&self, slots: u32) -> usize {
        (slots as usize * self.per_minibatch as usize).min(self.layout.blocks() as usize) * ROW_BLOCK
    }

    /// First row of a block in the slots that keep `x`, `g`, `u`.
    pub fn kept_row(&self, block: u32) -> usize {
        let minibatch = block / self.per_minibatch;
        let slot = match minibatch.checked_sub(self.saved) {
            Some(past) => self.saved + past % self.ring,
            None => minibatch,
        };
        self.row_in(slot, block)
    }

    /// First row of a block in the ring slots.
    pub fn ring_row(&self, block: u32) -> usize {
        self.row_in(block / self.per_minibatch % self.ring, block)
    }

    fn row_in(&self, slot: u32, block: u32) -> usize {
        (slot as usize * self.per_minibatch as usize + (block % self.per_minibatch) as usize) * ROW_BLOCK
    }

    /// Most `DHidden` tiles that any local expert has: the partial sums of `d_w` a row needs.
    pub fn max_d_hidden_tiles(&self) -> usize {
        self.d_hidden_tiles[0].max(self.d_hidden_tiles[1]) as usize
    }

    /// Counters of this rank.
    pub fn counters(&self) -> usize {
        self.place(Counter::Free(self.minibatches))
    }

    /// A counter's place among its rank's counters. [`Counter::Done`] and [`Counter::Chain`] have the same place on
    /// every rank, since other ranks arrive there.
    pub fn place(&self, counter: Counter) -> usize {
        let blocks = self.layout.blocks();
        let chain = 2 + self.wgrad_tiles(1);
        (match counter {
            Counter::Done => 0,
            Counter::Pushed => 1,
            Counter::Chain(tile) => 2 + tile,
            Counter::Pulled(block) => chain + block,
            Counter::GradPulled(block) => chain + blocks + block,
            Counter::Hidden(block) => chain + 2 * blocks + block,
            Counter::GradHidden(run) => chain + 3 * blocks + run,
            Counter::Free(minibatch) => chain + 3 * blocks + self.runs() + minibatch,
        }) as usize
    }

    /// Number of tickets in a stream.
    pub fn tickets(&self, stream: Stream) -> u64 {
        let end = self.before(stream, self.minibatches);
        match (stream, self.pass) {
            (Stream::Comm, _) => end + u64::from(self.chunks),
            (Stream::Compute, Pass::Forward) => end,
            (Stream::Compute, Pass::Backward) => end + self.layout.rows.len() as u64,
        }
    }

    /// Decodes a ticket, `ticket < self.tickets(stream)`.
    pub fn task(&self, stream: Stream, ticket: u64) -> Task {
        // The last step whose first ticket is not beyond this one.
        let (mut step, mut end) = (0, self.minibatches);
        while end - step > 1 {
            let middle = step + (end - step) / 2;
            if self.before(stream, middle) <= ticket {
                step = middle;
            } else {
                end = middle;
            }
        }
        let past = self.before(stream, self.minibatches);
        if ticket >= past {
            return self.tail_task(stream, (ticket - past) as u32);
        }
        let local = ticket - self.before(stream, step);
        let minibatch = match self.pass {
            Pass::Forward => self.minibatches - 1 - step,
            Pass::Backward => step,
        };
        match stream {
            Stream::Comm => self.comm_task(minibatch, local as u32),
            Stream::Compute => self.compute_task(minibatch, local),
        }
    }

    fn comm_task(&self, minibatch: u32, local: u32) -> Task {
        let first = minibatch * self.per_minibatch;
        let blocks = self.first_after(minibatch) - first;
        let (round, local) = (local / (self.ranks * blocks), local % (self.ranks * blocks));
        // A block's visits start at the rank itself and rotate, so that not all ranks read the same one. A block is whole
        // before the next is begun.
        let source = (self.rank + local % self.ranks) % self.ranks;
        let block = first + local / self.ranks;
        let grad = self.pass == Pass::Backward && (round == 1 || minibatch < self.kept);
        let (kind, counter) = match grad {
            true => (Kind::PullGrad { block, source }, Counter::GradPulled(block)),
            false => (Kind::Pull { block, source }, Counter::Pulled(block)),
        };
        let user_before = match self.pass {
            Pass::Forward => Some(minibatch + self.ring).filter(|&m| m < self.minibatches),
            Pass::Backward => minibatch.checked_sub(self.ring),
        };
        let free = user_before.map(|m| Wait { counter: Counter::Free(m), at_least: self.free_total(m) });
        Task { kind, waits: [free, None], arrives: [Some(Arrive::Here(counter)), None] }
    }

    fn compute_task(&self, minibatch: u32, mut local: u64) -> Task {
        let first = minibatch * self.per_minibatch;
        let after = self.first_after(minibatch);
        let blocks = after - first;
        let outer = u64::from(blocks) * u64::from(self.hidden_tiles);
        let replayed = self.pass == Pass::Backward && minibatch >= self.kept;
        let hidden = |block| Wait {
            counter: Counter::Hidden(block),
            at_least: self.of_block(&self.gate_up_tiles, block),
        };
        let here = |counter| Some(Arrive::Here(counter));
        let pushed = Some(Arrive::Pushed { total: self.layout.blocks() * self.hidden_tiles });
        if self.pass == Pass::Forward || replayed {
            let inner = self.tiles_in(&self.gate_up_tiles, first, after);
            if local < inner {
                let (block, tile) = self.tile_at(&self.gate_up_tiles, first, after, local);
                let pulled = Wait { counter: Counter::Pulled(block), at_least: self.ranks };
                let arrives = [here(Counter::Hidden(block)), None];
                return Task { kind: Kind::GateUp { block, tile }, waits: [Some(pulled), None], arrives };
            }
            local -= inner;
        }
        if self.pass == Pass::Forward {
            let (block, tile) = self.grouped(first, after, self.hidden_tiles, local);
            let arrives = [here(Counter::Free(minibatch)), pushed];
            return Task { kind: Kind::Down { block, tile }, waits: [Some(hidden(block)), None], arrives };
        }
        let inner = self.tiles_in(&self.d_hidden_tiles, first, after);
        if local < inner {
            let (block, tile) = self.tile_at(&self.d_hidden_tiles, first, after, local);
            let pulled = Wait { counter: Counter::GradPulled(block), at_least: self.ranks };
            let waits = [Some(pulled), replayed.then(|| hidden(block))];
            let run = self.run_of(block);
            let arrives = [here(Counter::GradHidden(run.index)), None];
            return Task { kind: Kind::DHidden { block, tile }, waits, arrives };
        }
        local -= inner;
        if local < outer {
            let (block, tile) = self.grouped(first, after, self.hidden_tiles, local);
            let waits = [Some(self.grad_hidden(&self.run_of(block))), None];
            let arrives = [here(Counter::Free(minibatch)), pushed];
            return Task { kind: Kind::DInput { block, tile }, waits, arrives };
        }
        self.wgrad_task(minibatch, local - outer)
    }

    fn wgrad_task(&self, minibatch: u32, local: u64) -> Task {
        // Runs of routed experts come first, all with as many tiles; at most one run is of the shared experts.
        let routed_runs = self.first_run[self.layout.routed];
        let first_run = self.runs_before(minibatch);
        let routed_here = u64::from(routed_runs.saturating_sub(first_run));
        let tiles = u64::from(self.wgrad_tiles(0));
        let (run, tile, class) = match local < routed_here * tiles {
            true => (first_run + (local / tiles) as u32, (local % tiles) as u32, 0),
            false => (first_run + routed_here as u32, (local - routed_here * tiles) as u32, 1),
        };
        let run = self.run(run);
        let (gate, down) = (self.gate_grid[class], self.down_grid[class]);
        let (gate_tiles, down_tiles) = (gate.0 * gate.1, down.0 * down.1);
        let split = |tile: u32, grid: (u32, u32)| (tile / grid.1, tile % grid.1);
        let (weight, (tile_m, tile_n)) = match tile {
            t if t < down_tiles => (Weight::Down, split(t, down)),
            t if t < down_tiles + gate_tiles => (Weight::Gate, split(t - down_tiles, gate)),
            t if t < down_tiles + 2 * gate_tiles => (Weight::Up, split(t - down_tiles - gate_tiles, gate)),
            _ => (Weight::OutputGate, (0, 0)),
        };
        let starts = run.index == self.first_run[run.expert as usize];
        let ends = run.index + 1 == self.first_run[run.expert as usize + 1];
        let shared = class == 1;
        // Where the expert has rows in the minibatch before, their sums come first. A sum that begins here and goes on
        // takes the place of one that the minibatch before goes on from.
        let after_minibatch = !starts || (!shared && !ends && minibatch > 0);
        let order = match after_minibatch {
            true => Some((Counter::Free(minibatch - 1), self.free_total(minibatch - 1))),
            false if shared && self.shared.after_another => Some((Counter::Chain(tile), 1)),
            false => None,
        };
        let order = order.map(|(counter, at_least)| Wait { counter, at_least });
        let hand_on = self.shared.next.filter(|_| shared && ends);
        let hand_on = hand_on.map(|rank| Arrive::At { rank, counter: Counter::Chain(tile) });
        let first = starts && !(shared && self.shared.after_another);
        let last = ends && !(shared && self.shared.next.is_some());
        Task {
            kind: Kind::WGrad { weight, run, tile_m, tile_n, first, last },
            waits: [Some(self.grad_hidden(&run)), order],
            arrives: [Some(Arrive::Here(Counter::Free(minibatch))), hand_on],
        }
    }

    fn tail_task(&self, stream: Stream, index: u32) -> Task {
        let done = Wait { counter: Counter::Done, at_least: self.pushing };
        match (stream, self.pass) {
            (Stream::Comm, Pass::Forward) => {
                Task { kind: Kind::Reduce { chunk: index }, waits: [Some(done), None], arrives: [None; 2] }
            }
            (Stream::Comm, Pass::Backward) => Task {
                kind: Kind::ReduceGrad { chunk: index },
                waits: [Some(done), None],
                arrives: [None; 2],
            },
            (Stream::Compute, _) => {
                let shared = index as usize == self.layout.routed;
                let empty = self.layout.rows[index as usize] == 0 && (!shared || self.shared.zero_here);
                let kind = if empty { Kind::ZeroGrad { expert: index } } else { Kind::Skip };
                Task { kind, waits: [None; 2], arrives: [None; 2] }
            }
        }
    }

    /// Tickets of a stream in the steps before `step`.
    fn before(&self, stream: Stream, step: u32) -> u64 {
        let blocks = self.layout.blocks();
        let end = |minibatch: u32| (minibatch * self.per_minibatch).min(blocks);
        // Blocks visited so far, as a range of block numbers.
        let (from, to) = match self.pass {
            Pass::Forward => (end(self.minibatches - step), blocks),
            Pass::Backward => (0, end(step)),
        };
        let visited = u64::from(to - from);
        let replayed_from = end(self.kept).min(to);
        match (stream, self.pass) {
            (Stream::Comm, Pass::Forward) => u64::from(self.ranks) * visited,
            (Stream::Comm, Pass::Backward) => {
                u64::from(self.ranks) * (visited + u64::from(to - replayed_from))
            }
            (Stream::Compute, Pass::Forward) => {
                self.tiles_in(&self.gate_up_tiles, from, to) + visited * u64::from(self.hidden_tiles)
            }
            (Stream::Compute, Pass::Backward) => {
                let replay = self.tiles_in(&self.gate_up_tiles, replayed_from, to);
                let data =
                    self.tiles_in(&self.d_hidden_tiles, 0, to) + visited * u64::from(self.hidden_tiles);
                replay + data + self.wgrad_before(step)
            }
        }
    }

    /// One past the last block of a minibatch.
    fn first_after(&self, minibatch: u32) -> u32 {
        ((minibatch + 1) * self.per_minibatch).min(self.layout.blocks())
    }

    /// Tiles of the blocks from `first` to before `after`, `tiles` a block: routed, shared.
    fn tiles_in(&self, tiles: &[u32; 2], first: u32, after: u32) -> u64 {
        let before = |block: u32| {
            let routed = block.min(self.layout.first_block[self.layout.routed]);
            u64::from(routed) * u64::from(tiles[0]) + u64::from(block - routed) * u64::from(tiles[1])
        };
        before(after) - before(first)
    }

    fn of_block(&self, tiles: &[u32; 2], block: u32) -> u32 {
        tiles[usize::from(block >= self.layout.first_block[self.layout.routed])]
    }

    /// The block and tile at a position among the tiles of the blocks from `first` to before `after`: routed blocks,
    /// then shared ones.
    fn tile_at(&self, tiles: &[u32; 2], first: u32, after: u32, local: u64) -> (u32, u32) {
        let shared = self.layout.first_block[self.layout.routed].clamp(first, after);
        let routed = self.tiles_in(tiles, first, shared);
        match local < routed {
            true => self.grouped(first, shared, tiles[0], local),
            false => self.grouped(shared, after, tiles[1], local - routed),
        }
    }

    /// The block and tile at a position among the blocks from `first` to before `after`, `tiles` a block. An expert's blocks
    /// there are in groups of up to [`GROUP`], as even as they can be; in each the first tile of all its blocks comes first,
    /// then the second, and so on.
    fn grouped(&self, first: u32, after: u32, tiles: u32, local: u64) -> (u32, u32) {
        let expert = self.layout.expert_of(first + (local / u64::from(tiles)) as u32);
        let start = self.layout.first_block[expert].max(first);
        let blocks = self.layout.first_block[expert + 1].min(after) - start;
        let group = blocks.div_ceil(blocks.div_ceil(GROUP));
        let within = (local - u64::from(start - first) * u64::from(tiles)) as u32;
        let before = within / (group * tiles) * group;
        let (within, group) = (within - before * tiles, group.min(blocks - before));
        (start + before + within % group, within / group)
    }

    fn runs(&self) -> u32 {
        self.first_run[self.layout.rows.len()]
    }

    /// Runs in the minibatches before one.
    fn runs_before(&self, minibatch: u32) -> u32 {
        let block = minibatch * self.per_minibatch;
        if block >= self.layout.blocks() {
            return self.runs();
        }
        self.run_of(block).index
    }

    fn run_of(&self, block: u32) -> Run {
        let expert = self.layout.expert_of(block);
        let passed = block / self.per_minibatch - self.layout.first_block[expert] / self.per_minibatch;
        self.run(self.first_run[expert] + passed)
    }

    fn run(&self, index: u32) -> Run {
        let expert = self.first_run.partition_point(|&first| first <= index) - 1;
        let (start, end) = (self.layout.first_block[expert], self.layout.first_block[expert + 1]);
        let minibatch = start / self.per_minibatch + (index - self.first_run[expert]);
        let block = start.max(minibatch * self.per_minibatch);
        let blocks = end.min((minibatch + 1) * self.per_minibatch) - block;
        Run { index, expert: expert as u32, minibatch, block, blocks }
    }

    fn grad_hidden(&self, run: &Run) -> Wait {
        let tiles = self.of_block(&self.d_hidden_tiles, run.block);
        Wait { counter: Counter::GradHidden(run.index), at_least: run.blocks * tiles }
    }

    /// Weight-gradient tiles of a run: routed (0) or shared (1).
    fn wgrad_tiles(&self, class: usize) -> u32 {
        let (gate, down) = (self.gate_grid[class], self.down_grid[class]);
        2 * gate.0 * gate.1 + down.0 * down.1 + u32::from(class == 1 && self.output_gate)
    }

    fn wgrad_before(&self, minibatch: u32) -> u64 {
        let runs = self.runs_before(minibatch);
        let routed = runs.min(self.first_run[self.layout.routed]);
        u64::from(routed) * u64::from(self.wgrad_tiles(0))
            + u64::from(runs - routed) * u64::from(self.wgrad_tiles(1))
    }

    /// Arrivals after which a minibatch's slots are free.
    fn free_total(&self, minibatch: u32) -> u32 {
        let blocks = self.first_after(minibatch) - minibatch * self.per_minibatch;
        let wgrad = match self.pass {
            Pass::Forward => 0,
            Pass::Backward => self.wgrad_before(minibatch + 1) - self.wgrad_before(minibatch),
        };
        blocks * self.hidden_tiles + wgrad as u32
    }
}

/// The most blocks that are visited together, tile by tile: the tiles under way share weights as well as rows.
const GROUP: u32 = 8;

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Pull { block, source } => write!(f, "Pull(block {block}, source {source})"),
            Kind::PullGrad { block, source } => write!(f, "PullGrad(block {block}, source {source})"),
            Kind::GateUp { block, tile } => write!(f, "GateUp(block {block}, tile {tile})"),
            Kind::Down { block, tile } => write!(f, "Down(block {block}, tile {tile})"),
            Kind::DHidden { block, tile } => write!(f, "DHidden(block {block}, tile {tile})"),
            Kind::DInput { block, tile } => write!(f, "DInput(block {block}, tile {tile})"),
            Kind::WGrad { weight, run, tile_m, tile_n, .. } => {
                write!(
                    f,
                    "WGrad{weight:?}(expert {}, block {}, tile {tile_m},{tile_n})",
                    run.expert, run.block
                )
            }
            Kind::ZeroGrad { expert } => write!(f, "ZeroGrad(expert {expert})"),
            Kind::Skip => write!(f, "Skip"),
            Kind::Reduce { chunk } => write!(f, "Reduce(chunk {chunk})"),
            Kind::ReduceGrad { chunk } => write!(f, "ReduceGrad(chunk {chunk})"),
        }
    }
}

impl fmt::Display for Counter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Counter::Done => write!(f, "done"),
            Counter::Chain(tile) => write!(f, "chain[{tile}]"),
            Counter::Pushed => write!(f, "pushed"),
            Counter::Pulled(block) => write!(f, "pulled[{block}]"),
            Counter::GradPulled(block) => write!(f, "grad_pulled[{block}]"),
            Counter::Hidden(block) => write!(f, "hidden[{block}]"),
            Counter::GradHidden(run) => write!(f, "grad_hidden[{run}]"),
            Counter::Free(minibatch) => write!(f, "free[{minibatch}]"),
        }
    }
}

#[cfg(test)]
mod tests;
