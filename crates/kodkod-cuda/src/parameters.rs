//! What the kernels take: the structs of `params.cuh` and `program.cuh`, filled in.

use std::time::Duration;

use half::bf16;
use kodkod_core::program::REDUCE_TOKENS;
use kodkod_core::{Biases, GradientElement, Shape};

use crate::driver::{Buffer, Parameter, TensorMap};
use crate::error::Result;
use crate::layer::CudaLayer;
use crate::memory::{PROGRAM_BYTES, Rank, Reached, STAMPS, Staged, TICKETS};
use crate::tensors::{DeviceGradients, DeviceStep, DeviceWeights};

/// Addresses of a rank's rows, routes and results.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepAt {
    pub(crate) x: u64,
    pub(crate) dy: u64,
    pub(crate) ids: u64,
    pub(crate) topk_weights: u64,
    y: u64,
    dx: u64,
    d_topk_weights: u64,
}

impl StepAt {
    /// Of a rank whose tokens begin at `first`.
    pub(crate) fn new(step: &DeviceStep, first: usize, shape: &Shape) -> Self {
        let (rows, routes) = ((first * shape.hidden * 2) as u64, (first * shape.top_k * 4) as u64);
        StepAt {
            x: step.x.address() + rows,
            dy: step.dy.address() + rows,
            ids: step.ids.address() + routes,
            topk_weights: step.topk_weights.address() + routes,
            y: step.y.address() + rows,
            dx: step.dx.address() + rows,
            d_topk_weights: step.d_topk_weights.address() + routes,
        }
    }

    /// What other processes reach of a rank's; its results are not among that.
    pub(crate) fn staged(staged: &Staged) -> Self {
        StepAt {
            x: staged.x.address(),
            dy: staged.dy.address(),
            ids: staged.ids.address(),
            topk_weights: staged.topk_weights.address(),
            y: 0,
            dx: 0,
            d_topk_weights: 0,
        }
    }
}

/// Addresses of a rank's experts' matrices and of the shared experts', or of their gradients; 0 where there is none.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MatricesAt {
    gate: [u64; 2],
    up: [u64; 2],
    down: [u64; 2],
    biases: [u64; 3],
    output_gate: u64,
}

impl MatricesAt {
    /// Of a rank whose experts begin at `first`; from one's gate to the next one's, and of up, there are `gate_rows` rows.
    pub(crate) fn of_weights(w: &DeviceWeights, first: usize, shape: &Shape, gate_rows: usize) -> Self {
        let part = |b: &Buffer<bf16>, rows: usize| b.address() + (first * shape.hidden * rows * 2) as u64;
        let whole = |b: Option<&Buffer<bf16>>| b.map_or(0, Buffer::address);
        let shared = w.shared.as_ref();
        MatricesAt {
            gate: [part(&w.gate, gate_rows), whole(shared.map(|s| &s.gate))],
            up: [part(&w.up, gate_rows), whole(shared.map(|s| &s.up))],
            down: [part(&w.down, shape.intermediate), whole(shared.map(|s| &s.down))],
            biases: biases_at(w.biases.as_ref(), first, shape),
            output_gate: shared.and_then(|s| s.output_gate.as_ref()).map_or(0, Buffer::address),
        }
    }

    /// Of a rank whose experts begin at `first` in `own`; the shared experts' are `all`'s.
    pub(crate) fn of_gradients<T: GradientElement>(
        own: &DeviceGradients<T>,
        all: &DeviceGradients<T>,
        first: usize,
        shape: &Shape,
        gate_rows: usize,
    ) -> Self {
        let bytes = |rows: usize| (first * shape.hidden * rows * size_of::<T>()) as u64;
        let whole = |b: Option<&Buffer<T>>| b.map_or(0, Buffer::address);
        let shared = all.shared.as_ref();
        MatricesAt {
            gate: [own.gate.address() + bytes(gate_rows), whole(shared.map(|s| &s.gate))],
            up: [own.up.address() + bytes(gate_rows), whole(shared.map(|s| &s.up))],
            down: [own.down.address() + bytes(shape.intermediate), whole(shared.map(|s| &s.down))],
            biases: biases_at(own.biases.as_ref(), first, shape),
            output_gate: shared.and_then(|s| s.output_gate.as_ref()).map_or(0, Buffer::address),
        }
    }

    /// The shared experts', where processes sum them.
    pub(crate) fn share(&mut self, first_rank: &Staged) {
        let [gate, up, down] = first_rank.shared.each_ref().map(Buffer::address);
        (self.gate[1], self.up[1], self.down[1]) = (gate, up, down);
        self.output_gate = first_rank.shared_output_gate.address();
    }
}

fn biases_at(b: Option<&Biases<Buffer<f32>>>, first: usize, shape: &Shape) -> [u64; 3] {
    let at = |b: &Buffer<f32>, n: usize| b.address() + (first * n * 4) as u64;
    let (h, i) = (shape.hidden, shape.intermediate);
    b.map_or([0; 3], |b| [at(&b.gate, i), at(&b.up, i), at(&b.down, h)])
}

/// Addresses of one call of a pass.
#[derive(Debug)]
pub(crate) struct Call {
    /// Of each rank.
    pub(crate) steps: Vec<StepAt>,
    /// Of each rank that is here.
    pub(crate) weights: Vec<MatricesAt>,
    /// Of each rank that is here; zeros in a forward.
    pub(crate) gradients: Vec<MatricesAt>,
    pub(crate) accumulate: bool,
    /// Where the rank is a process.
    pub(crate) copies: Copies,
}

/// What a process copies before it meets the others and when it has.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    pub(crate) before: Vec<Copied>,
    pub(crate) after: Vec<Copied>,
    /// Whether the others' memory is read after the pass, so that they must meet once more.
    pub(crate) meet: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Copied {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) bytes: usize,
}

/// Maps a buffer of rows of `columns`.
fn rows_map(p: &mut Parameter, rows: &Buffer<bf16>, columns: u64, box_rows: u32) -> Result<()> {
    p.map(&TensorMap::new(rows.address(), rows.len() as u64 / columns, columns, box_rows)?);
    Ok(())
}

/// Maps a rank's routed experts' matrices and the shared experts': `[rows, columns]` of both.
fn weight_maps(p: &mut Parameter, at: [u64; 2], sizes: [[u64; 2]; 2], box_rows: u32) -> Result<()> {
    for (address, [rows, columns]) in at.into_iter().zip(sizes) {
        p.map(&match address {
            0 => TensorMap::NONE,
            _ => TensorMap::new(address, rows, columns, box_rows)?,
        });
    }
    Ok(())
}

/// As the GPU counts them: 584 years at most.
fn nanoseconds(limit: Duration) -> u64 {
    limit.as_nanos().try_into().unwrap_or(u64::MAX)
}

impl CudaLayer {
    /// `PassParams` of a rank.
    pub(crate) fn pass_parameter(&self, pass: usize, rank: usize, call: &Call) -> Result<Parameter> {
        let (h, i) = (self.shape.hidden as u64, self.shape.intermediate as u64);
        let local = (self.shape.experts / self.tokens.len()) as u64;
        let (memory, own, here) = (self.memory(rank), &self.reached[rank], rank - self.first);
        let (weights, gradients, step) = (&call.weights[here], &call.gradients[here], &call.steps[rank]);
        let shared = self.shape.shared.map_or(0, |s| s.intermediate as u64);
        // Of this rank's experts and of the shared: gate or up, and down.
        let gate = (local - 1) * self.gate_rows as u64 + i;
        let (inner, outer) = ([[gate, h], [shared, h]], [[local * h, i], [h, shared]]);
        let width = i.max(shared);
        let mut p = Parameter::new();
        rows_map(&mut p, &memory.x, h, 128)?;
        rows_map(&mut p, &memory.h, width, 128)?;
        weight_maps(&mut p, weights.gate, inner, 128)?;
        weight_maps(&mut p, weights.up, inner, 128)?;
        weight_maps(&mut p, weights.down, outer, 256)?;
        rows_map(&mut p, &memory.dy, h, 128)?;
        rows_map(&mut p, &memory.dg, width, 128)?;
        rows_map(&mut p, &memory.du, width, 128)?;
        weight_maps(&mut p, weights.gate, inner, 64)?;
        weight_maps(&mut p, weights.up, inner, 64)?;
        weight_maps(&mut p, weights.down, outer, 64)?;
        rows_map(&mut p, &memory.x, h, 64)?;
        rows_map(&mut p, &memory.dy, h, 64)?;
        rows_map(&mut p, &memory.dg, width, 64)?;
        rows_map(&mut p, &memory.du, width, 64)?;
        rows_map(&mut p, &memory.h, width, 64)?;
        rows_map(&mut p, &memory.g, width, 128)?;
        rows_map(&mut p, &memory.u, width, 128)?;

        p.u64(memory.programs.address() + (pass * PROGRAM_BYTES) as u64).u64(memory.sources.address());
        p.u64(own.counters.address());
        self.of_all(&mut p, |m| m.counters.address());
        p.u64(own.counters.address() + ((own.counters.len() - TICKETS) * 4) as u64);
        p.u64(own.words.stall.address());
        call.steps.iter().for_each(|s| {
            p.u64(s.x);
        });
        call.steps.iter().for_each(|s| {
            p.u64(s.dy);
        });
        (0..self.tokens.len()).for_each(|r| {
            p.u64(match &memory.routes {
                Some(m) => m.factors.address() + self.first_route(r) * 4,
                None => call.steps[r].topk_weights,
            });
        });
        p.u64(step.ids);
        self.routes_of(&mut p, memory, &call.steps);
        (0..self.tokens.len()).for_each(|r| {
            p.u64(memory.row_of.address() + self.first_route(r) * 4);
        });
        for buffer in [&memory.x, &memory.g, &memory.u, &memory.h, &memory.dy, &memory.dg, &memory.du] {
            p.u64(buffer.address());
        }
        p.u64(memory.d_w_parts.address());
        self.of_all(&mut p, |m| m.combine.address());
        self.of_all(&mut p, |m| m.d_w.address());
        p.u64(if pass == 0 { step.y } else { step.dx });
        p.u64(step.d_topk_weights);
        self.of_all(&mut p, |m| m.output_gates.address());
        let mut vectors = |m: &MatricesAt| {
            m.biases.iter().for_each(|&b| {
                p.u64(b);
            });
            p.u64(m.output_gate);
        };
        vectors(weights);
        vectors(gradients);
        for [routed, shared] in [gradients.gate, gradients.up, gradients.down] {
            p.u64(routed).u64(shared);
        }
        let whole = |b: Option<&Buffer<f32>>| b.map_or(0, Buffer::address);
        p.u64(whole(memory.carry.as_ref())).u64(whole(self.reached[0].shared_carry.as_ref()));
        // One CTA at least is left for tiles: minibatches wait for their products where the ring is used again.
        let comm = [self.knobs.fwd_comm_sms, self.knobs.bwd_comm_sms][pass].min(self.ctas(rank) - 1);
        p.u32(self.tokens[rank] as u32).u32(comm as u32).u32(u32::from(call.accumulate));
        p.u64(nanoseconds(self.limit));
        self.of_all(&mut p, |m| m.words.abort.address());
        let hang = self.hang.filter(|h| h.pass == pass && h.rank == rank);
        let [kind, a, b] = hang.map_or([u32::MAX, 0, 0], |h| [h.kind, h.block, h.tile]);
        p.u32(kind).u32(a).u32(b);
        let trace = memory.trace.as_ref();
        p.u64(trace.map_or(0, |t| t.stamps.address())).u64(trace.map_or(0, |t| t.stamped.address()));
        p.u32(STAMPS as u32);
        Ok(p)
    }

    /// `ScheduleParams` of a rank.
    pub(crate) fn schedule_parameter(&self, rank: usize, steps: &[StepAt]) -> Parameter {
        let memory = self.memory(rank);
        let mut p = Parameter::new();
        self.routes_of(&mut p, memory, steps);
        self.counts(&mut p);
        p.u32(rank as u32).u64(memory.counts.address()).u64(memory.rows.address());
        p.u64(memory.first_block.address()).u64(memory.first_run.address()).u64(memory.sources.address());
        p.u64(memory.row_of.address()).u64(memory.programs.address());
        p
    }

    /// `MeetParams` of a rank whose ranks meet.
    pub(crate) fn meet_parameter(&self, rank: usize, leaving: bool) -> Parameter {
        let words = &self.reached[rank].words;
        let mut p = Parameter::new();
        p.u32(rank as u32).u32(u32::from(leaving));
        self.of_all(&mut p, |m| m.words.met.address());
        p.u64(words.epoch.address());
        self.of_all(&mut p, |m| m.words.abort.address());
        p.u64(words.stall.address()).u64(nanoseconds(self.limit));
        p
    }

    /// `GatherParams` of a rank whose ranks meet.
    pub(crate) fn gather_parameter(&self, rank: usize, steps: &[StepAt]) -> Parameter {
        let mut p = Parameter::new();
        steps.iter().for_each(|s| {
            p.u64(s.ids);
        });
        steps.iter().for_each(|s| {
            p.u64(s.topk_weights);
        });
        self.counts(&mut p);
        let routes = self.memory(rank).routes.as_ref();
        p.u64(routes.map_or(0, |r| r.ids.address())).u64(routes.map_or(0, |r| r.factors.address()));
        p
    }

    /// Expert ids of each rank, as a rank reads them.
    fn routes_of(&self, p: &mut Parameter, memory: &Rank, steps: &[StepAt]) {
        for (r, step) in steps.iter().enumerate() {
            p.u64(match &memory.routes {
                Some(m) => m.ids.address() + self.first_route(r) * 4,
                None => step.ids,
            });
        }
    }

    fn of_all(&self, p: &mut Parameter, address: impl Fn(&Reached) -> u64) {
        self.reached.iter().for_each(|rank| {
            p.u64(address(rank));
        });
    }

    /// Tokens of each rank.
    fn counts(&self, p: &mut Parameter) {
        self.tokens.iter().for_each(|&t| {
            p.u32(t as u32);
        });
    }

    /// Routes of the ranks before this one.
    fn first_route(&self, rank: usize) -> u64 {
        (self.tokens[..rank].iter().sum::<usize>() * self.shape.top_k) as u64
    }

    /// A `program::Program` as far as the host knows it; the schedule fills in the rest.
    pub(crate) fn program(&self, pass: u32, rank: usize) -> Vec<u8> {
        let memory = self.memory(rank);
        let shape = &self.shape;
        let widths = [shape.intermediate, shape.shared.map_or(0, |s| s.intermediate)];
        let cut = |n: usize, by: usize| n.div_ceil(by) as u32;
        let mut p = Parameter::new();
        p.u32(pass).u32(rank as u32).u32(self.tokens.len() as u32);
        p.u64(memory.rows.address()).u64(memory.first_block.address()).u64(memory.first_run.address());
        p.u32((memory.rows.len()) as u32).u32((shape.experts / self.tokens.len()) as u32);
        p.u32(self.sizes.per_minibatch).u32(0).u32(0).u32(0).u32(0);
        widths.iter().for_each(|&w| {
            p.u32(cut(w, 128));
        });
        widths.iter().for_each(|&w| {
            p.u32(cut(w, 256));
        });
        p.u32(cut(shape.hidden, 256));
        widths.iter().for_each(|&w| {
            p.u32(cut(w, 128)).u32(cut(shape.hidden, 256));
        });
        widths.iter().for_each(|&w| {
            p.u32(cut(shape.hidden, 128)).u32(cut(w, 256));
        });
        p.u32(u32::from(shape.shared.is_some_and(|s| s.output_gate)));
        p.u32(self.tokens[rank].div_ceil(REDUCE_TOKENS) as u32).u32(0).u32(0).u32(0).u32(0);
        let bytes = p.bytes().to_vec();
        assert_eq!(bytes.len(), PROGRAM_BYTES, "the layout of program::Program");
        bytes
    }
}
