//! One forward or backward: what every task of a program does with real numbers.
//!
//! [`Tasks`] holds the addresses of everything a task may touch. Its methods are called by many workers at once and
//! write through raw pointers: which task may touch what, and when, is settled by the program's counters, which the
//! model checker has looked at (`protocol/model.rs`).

mod backward;
mod forward;
mod rows;

use kodkod_core::numerics::Act;
use kodkod_core::program::{Kind, Program};
use kodkod_core::schedule::Source;
use kodkod_core::{ROW_BLOCK, Routing, Schedule, Shape, WeightGradients, Weights};

use crate::Element;
use crate::gemm::{Isa, Scratch};

/// Columns of a GEMM tile whose columns are intermediate or hidden, and the tile of a weight gradient.
pub(crate) const TILES: kodkod_core::program::Tiles = kodkod_core::program::Tiles {
    gate_up_n: 256,
    d_hidden_n: 256,
    hidden_n: 256,
    wgrad_m: 256,
    wgrad_n: 1024,
};

/// A pointer that workers share.
pub(crate) struct Shared<T>(pub(crate) *mut T);
// SAFETY: a pointer is an address; every use of it is unsafe and gives its own reason.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}
impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<T> {}

impl<T> Shared<T> {
    /// The address of element `index`.
    ///
    /// # Safety
    /// `index` lies within the buffer.
    unsafe fn at(self, index: usize) -> *mut T {
        // SAFETY: the caller's contract.
        unsafe { self.0.add(index) }
    }

    /// `len` elements from `index` on.
    ///
    /// # Safety
    /// They lie within the buffer, are initialised, and no one writes them while the slice lives.
    unsafe fn slice<'a>(self, index: usize, len: usize) -> &'a [T] {
        // SAFETY: the caller's contract.
        unsafe { std::slice::from_raw_parts(self.0.add(index), len) }
    }

    /// `len` elements from `index` on, to write.
    ///
    /// # Safety
    /// They lie within the buffer, are initialised, and no one else touches them while the slice lives.
    unsafe fn slice_mut<'a>(self, index: usize, len: usize) -> &'a mut [T] {
        // SAFETY: the caller's contract.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(index), len) }
    }
}

/// What other ranks read and write of a rank.
pub(crate) struct Symmetric<T> {
    /// `[local tokens, hidden]`, only read.
    pub(crate) x: Shared<T>,
    /// `[local tokens, hidden]`, only read, and only in a backward.
    pub(crate) dy: Shared<T>,
    /// `y_k` in a forward, `dx_k` in a backward: `[local tokens, slots, hidden]`
    pub(crate) combine: Shared<T>,
    /// `[local tokens, slots]`, only in a backward.
    pub(crate) d_w: Shared<f32>,
}

/// What only a rank's own tasks touch; `width` is the larger of the routed and shared intermediate widths.
pub(crate) struct RankMemory<T> {
    /// `[saved slot rows, hidden]`, and the ring's part of it.
    pub(crate) x: [Shared<T>; 2],
    /// `[saved slot rows, width]`, and the ring's part of it.
    pub(crate) g: [Shared<T>; 2],
    /// Like `g`.
    pub(crate) u: [Shared<T>; 2],
    /// Forward: `h`; backward: `w h`. `[ring slot rows, width]`
    pub(crate) h: Shared<T>,
    /// `[ring slot rows, hidden]`
    pub(crate) dy: Shared<T>,
    /// `[ring slot rows, width]`
    pub(crate) dg: Shared<T>,
    /// `[ring slot rows, width]`
    pub(crate) du: Shared<T>,
    /// Sums of `dh' h` over each tile: `[ring slot rows, most inner tiles]`
    pub(crate) d_w_parts: Shared<f32>,
    /// `y` or `dx`: `[local tokens, hidden]`
    pub(crate) out: Shared<T>,
    /// `[local tokens, top_k]`, only in a backward.
    pub(crate) d_topk_weights: Shared<f32>,
}

/// Everything the tasks of a pass touch.
pub(crate) struct Tasks<'a, T> {
    pub(crate) isa: Isa,
    pub(crate) shape: &'a Shape,
    pub(crate) programs: &'a [Program],
    pub(crate) schedules: &'a [Schedule],
    pub(crate) routing: &'a Routing,
    /// Of the experts of the local ranks.
    pub(crate) weights: &'a Weights<'a, T>,
    /// Of the experts of the local ranks.
    pub(crate) gradients: Option<WeightGradients<Shared<f32>>>,
    pub(crate) accumulate: bool,
    /// Of every rank.
    pub(crate) symmetric: Vec<Symmetric<T>>,
    /// The first rank whose tasks run here.
    pub(crate) first_local: usize,
    /// Of the local ranks.
    pub(crate) memory: Vec<RankMemory<T>>,
    pub(crate) act: Act,
}

/// A worker's own buffers.
pub(crate) struct Worker {
    gemm: Scratch,
    /// Accumulators of a tile, `[ROW_BLOCK, 256]`, two of them, and a row of `hidden`.
    acc: [Vec<f32>; 3],
}

impl Worker {
    pub(crate) fn new() -> Self {
        Worker { gemm: Scratch::new(), acc: [vec![], vec![], vec![]] }
    }

    fn accumulators(&mut self, n: usize) -> (&mut Scratch, &mut [f32], &mut [f32]) {
        let [a, b, _] = &mut self.acc;
        for acc in [&mut *a, &mut *b] {
            acc.resize(acc.len().max(n), 0.0);
        }
        (&mut self.gemm, &mut a[..n], &mut b[..n])
    }

    fn row(&mut self, n: usize) -> &mut [f32] {
        let row = &mut self.acc[2];
        row.resize(row.len().max(n), 0.0);
        row[..n].fill(0.0);
        &mut row[..n]
    }
}

/// The weights of one local expert.
struct Expert<'a, T> {
    /// Intermediate columns.
    width: usize,
    /// `[width, hidden]`, `[width, hidden]`, `[hidden, width]`
    gate: &'a [T],
    up: &'a [T],
    down: &'a [T],
    /// `[width]`, `[width]`, `[hidden]`
    biases: Option<(&'a [f32], &'a [f32], &'a [f32])>,
}

impl<'a, T: Element> Tasks<'a, T> {
    /// Runs one task.
    pub(crate) fn run(&self, worker: &mut Worker, rank: usize, kind: &Kind) {
        // SAFETY: the engine runs a task when its waits hold, so what it reads is written and what it writes is free;
        // the buffers have the sizes that the program asks for.
        unsafe {
            match *kind {
                Kind::Pull { block, source } => self.pull(rank, block, source, false),
                Kind::PullGrad { block, source } => self.pull(rank, block, source, true),
                Kind::GateUp { block, tile } => self.gate_up(worker, rank, block, tile),
                Kind::Down { block, tile } => self.down(worker, rank, block, tile),
                Kind::DHidden { block, tile } => self.d_hidden(worker, rank, block, tile),
                Kind::DInput { block, tile } => self.d_input(worker, rank, block, tile),
                Kind::WGrad { weight, run, tile_m, tile_n, first, .. } => {
                    self.wgrad(worker, rank, weight, &run, tile_m as usize, tile_n as usize, first);
                }
                Kind::ZeroGrad { expert } => self.zero_grad(rank, expert as usize),
                Kind::Skip => {}
                Kind::Reduce { chunk } => self.reduce(worker, rank, chunk),
                Kind::ReduceGrad { chunk } => self.reduce_grad(worker, rank, chunk),
            }
        }
    }

    /// Copies the rows of a block whose tokens `source` holds: rows of x, or of dy.
    ///
    /// # Safety
    /// The block's slots are free.
    unsafe fn pull(&self, rank: usize, block: u32, source: u32, grad: bool) {
        let (hidden, slots) = (self.shape.hidden, self.shape.slots());
        let schedule = &self.schedules[rank];
        let from = &self.symmetric[source as usize];
        let from = if grad { from.dy } else { from.x };
        let memory = self.memory(rank);
        let first_row = block as usize * ROW_BLOCK;
        for row in schedule.rows_from(block, source) {
            let token = schedule.sources[row].slot as usize / slots;
            // SAFETY: the row is this task's alone, and its slot is free; nobody writes x or dy during a pass.
            unsafe {
                let to = match grad {
                    true => memory.dy.slice_mut(self.ring_row(rank, block, row - first_row) * hidden, hidden),
                    false => {
                        let (part, at) = self.kept_row(rank, block, row - first_row);
                        memory.x[part].slice_mut(at * hidden, hidden)
                    }
                };
                to.copy_from_slice(from.slice(token * hidden, hidden));
            }
        }
    }

    fn memory(&self, rank: usize) -> &RankMemory<T> {
        &self.memory[rank - self.first_local]
    }

    /// Where a local expert stands among those whose weights are here.
    fn place_of(&self, rank: usize, local: usize) -> usize {
        (rank - self.first_local) * self.schedules[rank].layout.routed + local
    }

    fn expert(&self, rank: usize, local: usize) -> Expert<'a, T> {
        let (hidden, layout) = (self.shape.hidden, &self.schedules[rank].layout);
        if local == layout.routed {
            let shared = self.weights.shared.expect("checked: the shape has shared experts");
            let width = shared.gate.len() / hidden;
            return Expert { width, gate: shared.gate, up: shared.up, down: shared.down, biases: None };
        }
        let (width, expert) = (self.shape.intermediate, self.place_of(rank, local));
        let part = |all: &'a [T]| &all[expert * width * hidden..][..width * hidden];
        let weights = self.weights;
        let biases = weights.biases.map(|b| {
            (
                &b.gate[expert * width..][..width],
                &b.up[expert * width..][..width],
                &b.down[expert * hidden..][..hidden],
            )
        });
        Expert { width, gate: part(weights.gate), up: part(weights.up), down: part(weights.down), biases }
    }

    /// Width of a row of `g`, `u` and their like in memory.
    fn width(&self) -> usize {
        self.shape.intermediate.max(self.shape.shared.map_or(0, |s| s.intermediate))
    }

    /// Saved (0) or ring (1), and the row there, of a row of a block.
    fn kept_row(&self, rank: usize, block: u32, row: usize) -> (usize, usize) {
        let (at, saved) = (self.programs[rank].kept_row(block) + row, self.programs[rank].saved_slot_rows());
        if at < saved { (0, at) } else { (1, at - saved) }
    }

    fn ring_row(&self, rank: usize, block: u32, row: usize) -> usize {
        self.programs[rank].ring_row(block) + row
    }

    /// Where the rows of a block came from: rank and slot.
    fn sources(&self, rank: usize, block: u32) -> &[Source] {
        let schedule = &self.schedules[rank];
        &schedule.sources[block as usize * ROW_BLOCK..][..schedule.layout.rows_in(block)]
    }

    /// The factor of a row's output: its router weight, or the shared experts' output gate of its token.
    fn factor(&self, source: &Source) -> f32 {
        let (slots, top_k) = (self.shape.slots(), self.shape.top_k);
        let (token, k) = (source.slot as usize / slots, source.slot as usize % slots);
        let rank = source.rank as usize;
        match k < top_k {
            true => self.routing.weights()[(self.routing.tokens_of(rank).start + token) * top_k + k],
            false => self.output_gate(rank, token),
        }
    }

    /// `sigmoid(x . w_output_gate)` of a token of a rank, or 1 where there is no output gate.
    fn output_gate(&self, rank: usize, token: usize) -> f32 {
        let Some(gate) = self.weights.shared.and_then(|s| s.output_gate) else { return 1.0 };
        let hidden = self.shape.hidden;
        // SAFETY: the token is one of the rank's, and nobody writes x during a pass.
        let row = unsafe { self.symmetric[rank].x.slice(token * hidden, hidden) };
        kodkod_core::numerics::sigmoid(rows::dot_row(self.isa, row, gate))
    }
}
