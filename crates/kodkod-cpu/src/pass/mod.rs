//! One forward or backward over all ranks: what every task of a program does with real numbers.
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

/// One rank's symmetric memory; `width` is the larger of the routed and shared intermediate widths.
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
    /// `y_k` in a forward, `dx_k` in a backward: `[local tokens, slots, hidden]`
    pub(crate) combine: Shared<T>,
    /// `[local tokens, slots]`
    pub(crate) d_w: Shared<f32>,
}

/// Everything the tasks of a pass touch.
pub(crate) struct Tasks<'a, T> {
    pub(crate) isa: Isa,
    pub(crate) shape: &'a Shape,
    pub(crate) programs: &'a [Program],
    pub(crate) schedules: &'a [Schedule],
    pub(crate) routing: &'a Routing,
    pub(crate) weights: &'a Weights<'a, T>,
    /// `[tokens, hidden]`, read by the ranks that pull from it.
    pub(crate) x: &'a [T],
    /// `[tokens, hidden]`; empty in a forward.
    pub(crate) dy: &'a [T],
    /// `y` or `dx`: `[tokens, hidden]`
    pub(crate) out: Shared<T>,
    /// `[tokens, top_k]`
    pub(crate) d_topk_weights: Shared<f32>,
    pub(crate) gradients: Option<WeightGradients<Shared<f32>>>,
    pub(crate) accumulate: bool,
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
        let first_token = self.routing.tokens_of(source as usize).start;
        let first_row = block as usize * ROW_BLOCK;
        for row in schedule.rows_from(block, source) {
            let token = first_token + schedule.sources[row].slot as usize / slots;
            let from = &(if grad { self.dy } else { self.x })[token * hidden..][..hidden];
            // SAFETY: the row is this task's alone, and its slot is free.
            unsafe {
                let to = match grad {
                    true => self.memory[rank]
                        .dy
                        .slice_mut(self.ring_row(rank, block, row - first_row) * hidden, hidden),
                    false => {
                        let (part, at) = self.kept_row(rank, block, row - first_row);
                        self.memory[rank].x[part].slice_mut(at * hidden, hidden)
                    }
                };
                to.copy_from_slice(from);
            }
        }
    }

    fn expert(&self, rank: usize, local: usize) -> Expert<'a, T> {
        let (hidden, layout) = (self.shape.hidden, &self.schedules[rank].layout);
        if local == layout.routed {
            let shared = self.weights.shared.expect("checked: the shape has shared experts");
            let width = shared.gate.len() / hidden;
            return Expert { width, gate: shared.gate, up: shared.up, down: shared.down, biases: None };
        }
        let (width, expert) = (self.shape.intermediate, rank * layout.routed + local);
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
        let token = self.routing.tokens_of(source.rank as usize).start + source.slot as usize / slots;
        let k = source.slot as usize % slots;
        if k < top_k { self.routing.weights()[token * top_k + k] } else { self.output_gate(token) }
    }

    /// `sigmoid(x . w_output_gate)`, or 1 where there is no output gate.
    fn output_gate(&self, token: usize) -> f32 {
        let gate = self.weights.shared.and_then(|s| s.output_gate);
        let row = || &self.x[token * self.shape.hidden..][..self.shape.hidden];
        gate.map_or(1.0, |gate| kodkod_core::numerics::sigmoid(rows::dot_row(self.isa, row(), gate)))
    }
}
