//! `g = x W_gate^T`, `u = x W_up^T`, `h = act(g, u)`, `y_k = h W_down^T`, `y = shared + sum_k w_k y_k`.

use kodkod_core::program::{Pass, REDUCE_TOKENS};

use super::{TILES, Tasks, Worker, rows};
use crate::Element;
use crate::gemm::gemm_nt;

impl<T: Element> Tasks<'_, T> {
    /// # Safety
    /// The block's x rows are there, and its slots of `g`, `u`, `h` are free.
    pub(super) unsafe fn gate_up(&self, worker: &mut Worker, rank: usize, block: u32, tile: u32) {
        let (hidden, width, memory) = (self.shape.hidden, self.width(), self.memory(rank));
        let layout = &self.schedules[rank].layout;
        let (expert, m) = (self.expert(rank, layout.expert_of(block)), layout.rows_in(block));
        let (n0, n) = span(tile, TILES.gate_up_n, expert.width);
        let (part, row0) = self.kept_row(rank, block, 0);
        let (gemm, acc_g, acc_u) = worker.accumulators(m * n); // [m, n]
        // SAFETY: x holds m rows from row0 on; each weight n rows from n0 on; the accumulators are m x n.
        unsafe {
            let x = memory.x[part].at(row0 * hidden); // [m, hidden]
            for (weight, acc) in [(expert.gate, &mut *acc_g), (expert.up, &mut *acc_u)] {
                let w = weight[n0 * hidden..].as_ptr(); // [n, hidden]
                gemm_nt(self.isa, gemm, m, n, hidden, x, hidden, w, hidden, acc.as_mut_ptr(), n, false);
            }
        }
        let bias = expert.biases.map(|(gate, up, _)| (&gate[n0..n0 + n], &up[n0..n0 + n]));
        for row in 0..m {
            let (acc_g, acc_u) = (&acc_g[row * n..][..n], &acc_u[row * n..][..n]);
            let at = (row0 + row) * width + n0;
            // SAFETY: these columns of the row's slots are this task's alone.
            unsafe {
                let (g, u) = (memory.g[part].slice_mut(at, n), memory.u[part].slice_mut(at, n));
                rows::store_gate_up(self.isa, &self.act, acc_g, acc_u, bias, g, u);
                if self.programs[rank].pass() == Pass::Forward {
                    let h = memory.h.slice_mut(self.ring_row(rank, block, row) * width + n0, n);
                    rows::activate(self.isa, &self.act, g, u, h);
                }
            }
        }
    }

    /// # Safety
    /// The block's `h` is there; no one else writes these columns of its rows' combine slots.
    pub(super) unsafe fn down(&self, worker: &mut Worker, rank: usize, block: u32, tile: u32) {
        let (hidden, width) = (self.shape.hidden, self.width());
        let layout = &self.schedules[rank].layout;
        let (expert, m) = (self.expert(rank, layout.expert_of(block)), layout.rows_in(block));
        let (n0, n) = span(tile, TILES.hidden_n, hidden);
        let (gemm, acc, _) = worker.accumulators(m * n); // [m, n]
        // SAFETY: h holds m rows of the block; the weight n rows from n0 on; the accumulator is m x n.
        unsafe {
            let h = self.memory(rank).h.at(self.ring_row(rank, block, 0) * width); // [m, width]
            let w = expert.down[n0 * expert.width..].as_ptr(); // [n, expert.width]
            let k = expert.width;
            gemm_nt(self.isa, gemm, m, n, k, h, width, w, k, acc.as_mut_ptr(), n, false);
        }
        let bias = expert.biases.map(|(_, _, down)| &down[n0..n0 + n]);
        for (row, source) in self.sources(rank, block).iter().enumerate() {
            // SAFETY: a slot has one writer for each of its columns.
            let slot = unsafe {
                self.symmetric[source.rank as usize].combine.slice_mut(source.slot as usize * hidden + n0, n)
            };
            rows::store(self.isa, &acc[row * n..][..n], bias, slot);
        }
    }

    /// # Safety
    /// All ranks have pushed.
    pub(super) unsafe fn reduce(&self, worker: &mut Worker, rank: usize, chunk: u32) {
        let (hidden, slots, top_k) = (self.shape.hidden, self.shape.slots(), self.shape.top_k);
        let tokens = self.routing.tokens_of(rank);
        let first = chunk as usize * REDUCE_TOKENS;
        for local in first..(first + REDUCE_TOKENS).min(tokens.len()) {
            let token = tokens.start + local;
            let sum = worker.row(hidden);
            // SAFETY: all pushes are done, so a slot of a route is written and read only.
            let slot = |k: usize| unsafe {
                self.symmetric[rank].combine.slice((local * slots + k) * hidden, hidden)
            };
            if self.shape.shared.is_some() {
                rows::add_scaled(self.isa, sum, self.output_gate(rank, local), slot(top_k));
            }
            for k in 0..top_k {
                if self.routing.ids()[token * top_k + k] >= 0 {
                    rows::add_scaled(self.isa, sum, self.routing.weights()[token * top_k + k], slot(k));
                }
            }
            // SAFETY: a token's output is this task's alone.
            let y = unsafe { self.memory(rank).out.slice_mut(local * hidden, hidden) };
            rows::store(self.isa, sum, None, y);
        }
    }
}

/// First column and number of columns of a tile.
pub(super) fn span(tile: u32, by: u32, width: usize) -> (usize, usize) {
    let start = tile as usize * by as usize;
    (start, (width - start).min(by as usize))
}
