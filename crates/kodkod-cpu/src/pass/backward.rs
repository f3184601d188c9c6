//! ```text
//! dh' = dy W_down          d_w = sum_i dh'_i h_i (+ dy . b_down)      (dg, du) = act'(g, u) * w dh'
//! dx_k = dg W_gate + du W_up                                          dx = shared + sum_k dx_k
//! dW_gate = dg^T x         dW_up = du^T x         dW_down = dy^T (w h)
//! ```

use kodkod_core::ROW_BLOCK;
use kodkod_core::program::{REDUCE_TOKENS, Run, Weight};
use kodkod_core::schedule::Source;

use super::forward::span;
use super::{Shared, TILES, Tasks, Worker, rows};
use crate::Element;
use crate::gemm::{gemm_nn, gemm_tn};

impl<T: Element> Tasks<'_, T> {
    /// # Safety
    /// The block's dy, `g` and `u` are there; its ring slots are free.
    pub(super) unsafe fn d_hidden(&self, worker: &mut Worker, rank: usize, block: u32, tile: u32) {
        let (hidden, width, memory) = (self.shape.hidden, self.width(), self.memory(rank));
        let layout = &self.schedules[rank].layout;
        let (expert, m) = (self.expert(rank, layout.expert_of(block)), layout.rows_in(block));
        let (n0, n) = span(tile, TILES.d_hidden_n, expert.width);
        let (gemm, acc, _) = worker.accumulators(m * n); // [m, n]
        // SAFETY: dy holds m rows of the block; the weight all rows of hidden, n columns from n0 on.
        unsafe {
            let dy = memory.dy.at(self.ring_row(rank, block, 0) * hidden); // [m, hidden]
            let w = expert.down[n0..].as_ptr(); // [hidden, expert.width]
            gemm_nn(self.isa, gemm, m, n, hidden, dy, hidden, w, expert.width, acc.as_mut_ptr(), n, false);
        }
        let tiles = self.programs[rank].max_d_hidden_tiles();
        let (part, kept) = self.kept_row(rank, block, 0);
        for (row, source) in self.sources(rank, block).iter().enumerate() {
            let kept = (kept + row) * width + n0;
            let ring_row = self.ring_row(rank, block, row);
            let ring = ring_row * width + n0;
            // SAFETY: g and u are there; these columns of the ring's rows are this task's alone.
            unsafe {
                let (g, u) = (memory.g[part].slice(kept, n), memory.u[part].slice(kept, n));
                let (dg, du) = (memory.dg.slice_mut(ring, n), memory.du.slice_mut(ring, n));
                let wh = memory.h.slice_mut(ring, n);
                let d = &mut acc[row * n..][..n];
                let sum =
                    rows::activation_backward(self.isa, &self.act, self.factor(source), d, g, u, dg, du, wh);
                *memory.d_w_parts.at(ring_row * tiles + tile as usize) = sum;
            }
        }
    }

    /// # Safety
    /// The block's `dg`, `du` are there; no one else writes these columns of its rows' slots.
    pub(super) unsafe fn d_input(&self, worker: &mut Worker, rank: usize, block: u32, tile: u32) {
        let (hidden, width, memory) = (self.shape.hidden, self.width(), self.memory(rank));
        let layout = &self.schedules[rank].layout;
        let (expert, m) = (self.expert(rank, layout.expert_of(block)), layout.rows_in(block));
        let (n0, n) = span(tile, TILES.hidden_n, hidden);
        let (gemm, acc, _) = worker.accumulators(m * n); // [m, n]
        // SAFETY: dg and du hold m rows of the block; each weight n columns from n0 on.
        unsafe {
            let row = self.ring_row(rank, block, 0) * width;
            for (d, weight, goes_on) in [(memory.dg, expert.gate, false), (memory.du, expert.up, true)] {
                let w = weight[n0..].as_ptr(); // [expert.width, hidden]
                let k = expert.width;
                gemm_nn(self.isa, gemm, m, n, k, d.at(row), width, w, hidden, acc.as_mut_ptr(), n, goes_on);
            }
        }
        for (row, source) in self.sources(rank, block).iter().enumerate() {
            let owner = &self.symmetric[source.rank as usize];
            // SAFETY: a slot has one writer for each of its columns, and tile 0 writes its d_w.
            unsafe {
                let slot = owner.combine.slice_mut(source.slot as usize * hidden + n0, n);
                rows::store(self.isa, &acc[row * n..][..n], None, slot);
                if tile == 0 {
                    *owner.d_w.at(source.slot as usize) = self.d_w(rank, block, row);
                }
            }
        }
    }

    /// `d_w` of a row: the sums over tiles, in order, and what the bias adds to `y_k`.
    ///
    /// # Safety
    /// All tiles of the block's `DHidden` are done.
    unsafe fn d_w(&self, rank: usize, block: u32, row: usize) -> f32 {
        let hidden = self.shape.hidden;
        let expert = self.expert(rank, self.schedules[rank].layout.expert_of(block));
        let (ring_row, parts) = (self.ring_row(rank, block, row), self.programs[rank].max_d_hidden_tiles());
        let tiles = expert.width.div_ceil(TILES.d_hidden_n as usize);
        // SAFETY: the sums and the dy row are written, and read only from here on.
        unsafe {
            let mut sum = 0.0;
            for part in self.memory(rank).d_w_parts.slice(ring_row * parts, tiles) {
                sum += part;
            }
            if let Some((_, _, down)) = expert.biases {
                sum += rows::dot_row(self.isa, self.memory(rank).dy.slice(ring_row * hidden, hidden), down);
            }
            sum
        }
    }

    /// # Safety
    /// All that the run's rows need is there, and the sum so far is in the gradient.
    pub(super) unsafe fn wgrad(
        &self,
        worker: &mut Worker,
        rank: usize,
        weight: Weight,
        run: &Run,
        tile_m: usize,
        tile_n: usize,
        first: bool,
    ) {
        let (hidden, width, memory) = (self.shape.hidden, self.width(), self.memory(rank));
        let layout = &self.schedules[rank].layout;
        let (local, block) = (run.expert as usize, run.block);
        let expert = self.expert(rank, local);
        let last = layout.rows_in(run.block + run.blocks - 1);
        let rows = (run.blocks as usize - 1) * ROW_BLOCK + last;
        let goes_on = self.accumulate || !first;
        let gradients = self.gradients.as_ref().expect("a backward has gradients");
        let (part, kept) = self.kept_row(rank, block, 0);
        let ring = self.ring_row(rank, block, 0);
        let sources = &self.schedules[rank].sources[block as usize * ROW_BLOCK..][..rows];

        if weight == Weight::OutputGate {
            let Some(total) = gradients.shared.as_ref().and_then(|s| s.output_gate) else {
                return;
            };
            // SAFETY: the whole of this gradient is this task's alone.
            let total = unsafe { total.slice_mut(0, hidden) };
            if !goes_on {
                total.fill(0.0);
            }
            for (row, source) in sources.iter().enumerate() {
                // SAFETY: all of the run's DHidden are done, and its x rows are there.
                unsafe {
                    let d_gate = self.d_w(rank, block + (row / ROW_BLOCK) as u32, row % ROW_BLOCK);
                    let x = memory.x[part].slice((kept + row) * hidden, hidden);
                    rows::add_scaled(self.isa, total, gate_slope(d_gate, self.factor(source)), x);
                }
            }
            return;
        }

        // a^T b: a [rows, lda] from column m0 on, b [rows, ldb] from column n0 on, c [total_m, total_n].
        let (total_m, total_n) = match weight {
            Weight::Down => (hidden, expert.width),
            _ => (expert.width, hidden),
        };
        let (m0, m) = span(tile_m as u32, TILES.wgrad_m, total_m);
        let (n0, n) = span(tile_n as u32, TILES.wgrad_n, total_n);
        // SAFETY: the rows are there, and this tile of the gradient is this task's alone.
        unsafe {
            let x = memory.x[part].at(kept * hidden);
            let (a, lda, b, ldb) = match weight {
                Weight::Down => (memory.dy.at(ring * hidden), hidden, memory.h.at(ring * width), width),
                Weight::Gate => (memory.dg.at(ring * width), width, x, hidden),
                _ => (memory.du.at(ring * width), width, x, hidden),
            };
            let c = self.gradient(gradients, rank, local, weight).at(m0 * total_n + n0);
            gemm_tn(
                self.isa,
                &mut worker.gemm,
                m,
                n,
                rows,
                a.add(m0),
                lda,
                b.add(n0),
                ldb,
                c,
                total_n,
                goes_on,
            );
            if let (Some(biases), 0) = (&gradients.biases, tile_n)
                && local < layout.routed
            {
                let bias = match weight {
                    Weight::Down => biases.down,
                    Weight::Gate => biases.gate,
                    _ => biases.up,
                };
                let sum = bias.slice_mut(self.place_of(rank, local) * total_m + m0, m);
                if !goes_on {
                    sum.fill(0.0);
                }
                for (row, source) in sources.iter().enumerate() {
                    let values = std::slice::from_raw_parts(a.add(row * lda + m0), m);
                    match weight {
                        Weight::Down => rows::add_scaled(self.isa, sum, self.factor(source), values),
                        _ => rows::add(self.isa, sum, values),
                    }
                }
            }
        }
    }

    /// The first element of one expert's gradient.
    ///
    /// # Safety
    /// The gradients have the lengths that the shape asks for.
    unsafe fn gradient(
        &self,
        gradients: &kodkod_core::WeightGradients<Shared<f32>>,
        rank: usize,
        local: usize,
        weight: Weight,
    ) -> Shared<f32> {
        let routed = self.schedules[rank].layout.routed;
        if local == routed {
            let shared = gradients.shared.as_ref().expect("checked: the shape has shared experts");
            return match weight {
                Weight::Down => shared.down,
                Weight::Gate => shared.gate,
                _ => shared.up,
            };
        }
        let all = match weight {
            Weight::Down => gradients.down,
            Weight::Gate => gradients.gate,
            _ => gradients.up,
        };
        // SAFETY: the expert is one of the layer's.
        Shared(unsafe { all.at(self.place_of(rank, local) * self.shape.intermediate * self.shape.hidden) })
    }

    /// # Safety
    /// No one else touches the gradients of this expert, which has no rows.
    pub(super) unsafe fn zero_grad(&self, rank: usize, local: usize) {
        if self.accumulate {
            return;
        }
        let gradients = self.gradients.as_ref().expect("a backward has gradients");
        let (expert, routed) = (self.expert(rank, local), self.schedules[rank].layout.routed);
        let len = expert.width * self.shape.hidden;
        // SAFETY: the caller's contract; the lengths are those of the shape.
        unsafe {
            for weight in [Weight::Gate, Weight::Up, Weight::Down] {
                self.gradient(gradients, rank, local, weight).slice_mut(0, len).fill(0.0);
            }
            match &gradients.biases {
                Some(biases) if local < routed => {
                    let e = self.place_of(rank, local);
                    biases.gate.slice_mut(e * expert.width, expert.width).fill(0.0);
                    biases.up.slice_mut(e * expert.width, expert.width).fill(0.0);
                    biases.down.slice_mut(e * self.shape.hidden, self.shape.hidden).fill(0.0);
                }
                _ => {}
            }
            if let Some(gate) = gradients.shared.as_ref().and_then(|s| s.output_gate)
                && local == routed
            {
                gate.slice_mut(0, self.shape.hidden).fill(0.0);
            }
        }
    }

    /// # Safety
    /// All ranks have pushed.
    pub(super) unsafe fn reduce_grad(&self, worker: &mut Worker, rank: usize, chunk: u32) {
        let (hidden, slots, top_k) = (self.shape.hidden, self.shape.slots(), self.shape.top_k);
        let tokens = self.routing.tokens_of(rank);
        let (memory, symmetric) = (self.memory(rank), &self.symmetric[rank]);
        let first = chunk as usize * REDUCE_TOKENS;
        for local in first..(first + REDUCE_TOKENS).min(tokens.len()) {
            let token = tokens.start + local;
            let sum = worker.row(hidden);
            // SAFETY: all pushes are done, so a slot of a route is written and read only.
            let slot = |k: usize| unsafe { symmetric.combine.slice((local * slots + k) * hidden, hidden) };
            if self.shape.shared.is_some() {
                rows::add(self.isa, sum, slot(top_k));
            }
            for k in 0..top_k {
                let routed = self.routing.ids()[token * top_k + k] >= 0;
                if routed {
                    rows::add(self.isa, sum, slot(k));
                }
                // SAFETY: a route's gradient is this task's alone; d_w of a route is written.
                unsafe {
                    let d_w = if routed { *symmetric.d_w.at(local * slots + k) } else { 0.0 };
                    *memory.d_topk_weights.at(local * top_k + k) = d_w;
                }
            }
            if let Some(gate) = self.weights.shared.and_then(|s| s.output_gate) {
                let source = Source { rank: rank as u32, slot: (local * slots + top_k) as u32 };
                // SAFETY: every token passes the shared experts, so the slot is written.
                let d_gate = unsafe { *symmetric.d_w.at(local * slots + top_k) };
                rows::add_scaled(self.isa, sum, gate_slope(d_gate, self.factor(&source)), gate);
            }
            // SAFETY: a token's gradient is this task's alone.
            let dx = unsafe { memory.out.slice_mut(local * hidden, hidden) };
            rows::store(self.isa, sum, None, dx);
        }
    }
}

/// The gradient of the output gate's logit, from that of the gate `s = sigmoid(logit)`: `d s (1 - s)`.
fn gate_slope(d_gate: f32, gate: f32) -> f32 {
    d_gate * (gate * (1.0 - gate))
}
