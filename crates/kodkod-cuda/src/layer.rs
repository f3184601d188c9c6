//! A layer's kernels, its buffers, and its launches, for R virtual ranks on one GPU.

use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use kodkod_core::program::REDUCE_TOKENS;
use kodkod_core::schedule::experts_per_rank;
use kodkod_core::{Knobs, ROW_BLOCK, Shape, Stall};

use crate::driver::{Buffer, Device, Event, Kernel, Module, Parameter, Stream, TensorMap};
use crate::error::{Error, Result};
use crate::jit::{self, Source};

/// Threads of a CTA, and its dynamic shared memory: `THREADS` and `SMEM_BYTES` of `pass.cuh`, rounded up.
const THREADS: u32 = 384;
const SHARED_BYTES: u32 = 232_448;
const SCHEDULE_THREADS: u32 = 512;

/// Weights on the GPU, as `kodkod_core::Weights`.
#[derive(Debug)]
pub struct DeviceWeights {
    /// `[experts, intermediate, hidden]`
    pub gate: Buffer<bf16>,
    /// `[experts, intermediate, hidden]`
    pub up: Buffer<bf16>,
    /// `[experts, hidden, intermediate]`
    pub down: Buffer<bf16>,
}

/// Weight gradients on the GPU, in `f32`.
#[derive(Debug)]
pub struct DeviceGradients {
    /// `[experts, intermediate, hidden]`
    pub gate: Buffer<f32>,
    /// `[experts, intermediate, hidden]`
    pub up: Buffer<f32>,
    /// `[experts, hidden, intermediate]`
    pub down: Buffer<f32>,
}

/// A step's rows and routes on the GPU, all ranks' in rank order, and what comes out.
#[derive(Debug)]
pub struct DeviceStep {
    /// `[tokens, hidden]`
    pub x: Buffer<bf16>,
    /// `[tokens, hidden]`
    pub dy: Buffer<bf16>,
    /// `[tokens, top_k]`
    pub ids: Buffer<i32>,
    /// `[tokens, top_k]`
    pub topk_weights: Buffer<f32>,
    /// `[tokens, hidden]`
    pub y: Buffer<bf16>,
    /// `[tokens, hidden]`
    pub dx: Buffer<bf16>,
    /// `[tokens, top_k]`
    pub d_topk_weights: Buffer<f32>,
}

impl DeviceStep {
    /// Copies the inputs; the outputs hold 0xff bytes (NaN) until a pass writes them.
    pub fn new(shape: &Shape, x: &[bf16], dy: &[bf16], ids: &[i32], topk_weights: &[f32]) -> Result<Self> {
        let stream = Stream::new()?;
        let tokens = x.len() / shape.hidden;
        let poisoned = |len| Buffer::new(len).and_then(|b: Buffer<bf16>| b.fill(0xff, &stream).map(|()| b));
        let step = DeviceStep {
            x: Buffer::from_host(x)?,
            dy: Buffer::from_host(dy)?,
            ids: Buffer::from_host(ids)?,
            topk_weights: Buffer::from_host(topk_weights)?,
            y: poisoned(x.len())?,
            dx: poisoned(x.len())?,
            d_topk_weights: Buffer::new(tokens * shape.top_k)?,
        };
        step.d_topk_weights.fill(0xff, &stream)?;
        stream.synchronize()?;
        Ok(step)
    }
}

/// A layer on one GPU: compiled for its shape, its knobs and its number of ranks, with buffers for its tokens.
#[derive(Debug)]
pub struct CudaLayer {
    device: Arc<Device>,
    shape: Shape,
    knobs: Knobs,
    tokens: Vec<usize>,
    kernels: [Kernel; 5],
    /// Kept after the kernels that come from them.
    _modules: Vec<Module>,
    ranks: Vec<Rank>,
    stream: Stream,
    scheduled: Event,
    limit: Duration,
}

/// One rank's memory on the GPU.
#[derive(Debug)]
struct Rank {
    stream: Stream,
    done: Event,
    counts: Buffer<u32>,
    rows: Buffer<u32>,
    first_block: Buffer<u32>,
    first_run: Buffer<u32>,
    sources: Buffer<u64>,
    /// Counters, then three tickets.
    counters: Buffer<u32>,
    programs: Buffer<u8>,
    stall: Buffer<u32>,
    x: Buffer<bf16>,
    g: Buffer<bf16>,
    u: Buffer<bf16>,
    h: Buffer<bf16>,
    dy: Buffer<bf16>,
    dg: Buffer<bf16>,
    du: Buffer<bf16>,
    d_w_parts: Buffer<f32>,
    combine: Buffer<bf16>,
    d_w: Buffer<f32>,
}

/// Bytes of a `program::Program`.
const PROGRAM_BYTES: usize = 144;

impl CudaLayer {
    /// Compiles the kernels, or takes them from the cache, and allocates.
    ///
    /// # Errors
    /// [`Error::Layer`] for a shape or knob that is not allowed, else the driver's or the compiler's words.
    pub fn new(
        device: &Arc<Device>,
        shape: &Shape,
        knobs: &Knobs,
        tokens_per_rank: &[usize],
    ) -> Result<Self> {
        device.make_current()?;
        let sizes = Sizes::new(shape, knobs, tokens_per_rank)?;
        let defines = sizes.defines(shape);
        let code = Source::ALL.map(|source| jit::cubin(source, &defines));
        let mut modules = Vec::new();
        for cubin in code {
            modules.push(Module::load(&cubin?.code)?);
        }
        let kernels = [
            modules[0].kernel("schedule_count", 0)?,
            modules[0].kernel("schedule_layout", 0)?,
            modules[0].kernel("schedule_place", 0)?,
            modules[1].kernel("moe_forward", SHARED_BYTES)?,
            modules[2].kernel("moe_backward", SHARED_BYTES)?,
        ];
        let ranks =
            tokens_per_rank.iter().map(|&t| Rank::new(shape, &sizes, t)).collect::<Result<Vec<_>>>()?;
        let layer = CudaLayer {
            device: device.clone(),
            shape: shape.clone(),
            knobs: *knobs,
            tokens: tokens_per_rank.to_vec(),
            kernels,
            _modules: modules,
            ranks,
            stream: Stream::new()?,
            scheduled: Event::new()?,
            limit: Duration::from_secs(10),
        };
        for rank in 0..layer.ranks.len() {
            let bytes: Vec<u8> = [0, 1].iter().flat_map(|&pass| layer.program(pass, rank, &sizes)).collect();
            layer.ranks[rank].programs.write(&bytes)?;
            layer.ranks[rank].stall.fill(0, &layer.stream)?;
        }
        device.synchronize()?;
        Ok(layer)
    }

    /// The stream that a pass begins and ends in.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Names and values of the constants that a shape, knobs and ranks compile to.
    pub fn defines(
        shape: &Shape,
        knobs: &Knobs,
        tokens_per_rank: &[usize],
    ) -> Result<Vec<(&'static str, String)>> {
        Ok(Sizes::new(shape, knobs, tokens_per_rank)?.defines(shape))
    }

    /// Builds the schedule: what every pass starts with.
    pub fn schedule(&self, step: &DeviceStep) -> Result<()> {
        let experts = self.shape.experts as u32;
        let local = experts / self.ranks.len() as u32 + u32::from(self.shape.shared.is_some());
        for (rank, memory) in self.ranks.iter().enumerate() {
            let mut p = Parameter::new();
            self.token_starts().iter().for_each(|&t| {
                p.u64(step.ids.address() + (t * self.shape.top_k * 4) as u64);
            });
            self.tokens.iter().for_each(|&t| {
                p.u32(t as u32);
            });
            p.u32(rank as u32).u64(memory.counts.address()).u64(memory.rows.address());
            p.u64(memory.first_block.address()).u64(memory.first_run.address()).u64(memory.sources.address());
            p.u64(memory.programs.address());
            // SAFETY: the parameter is laid out as `ScheduleParams`, and the buffers live as long as `self` and `step`.
            unsafe {
                self.kernels[0].launch(experts, SCHEDULE_THREADS, &self.stream, &p)?;
                self.kernels[1].launch(1, SCHEDULE_THREADS, &self.stream, &p)?;
                self.kernels[2].launch(local, SCHEDULE_THREADS, &self.stream, &p)?;
            }
        }
        Ok(())
    }

    /// Schedule and forward: `step.y`. Asynchronous in [`CudaLayer::stream`].
    pub fn forward(&self, step: &DeviceStep, weights: &DeviceWeights) -> Result<()> {
        self.schedule(step)?;
        self.pass(0, step, weights, None, false)
    }

    /// Backward of the forward before it: `step.dx`, `step.d_topk_weights` and `gradients`.
    pub fn backward(
        &self,
        step: &DeviceStep,
        weights: &DeviceWeights,
        gradients: &DeviceGradients,
        accumulate: bool,
    ) -> Result<()> {
        self.pass(1, step, weights, Some(gradients), accumulate)
    }

    /// Waits for the passes, and says where one gave up.
    pub fn finish(&self) -> Result<()> {
        self.stream.synchronize()?;
        let mut stalls = Vec::new();
        for (rank, memory) in self.ranks.iter().enumerate() {
            let s = memory.stall.read()?;
            if s[0] != 0 {
                stalls.push(Stall {
                    rank,
                    task: format!("{} (block {}, {})", KINDS[s[1] as usize % KINDS.len()], s[2], s[3]),
                    counter: format!("{}[{}] of rank {rank}", COUNTERS[s[4] as usize % COUNTERS.len()], s[5]),
                    seen: s[6],
                    expected: s[7],
                    waited_ms: self.limit.as_millis() as u64,
                });
                memory.stall.fill(0, &self.stream)?;
            }
        }
        if stalls.is_empty() { Ok(()) } else { Err(Error::Layer(kodkod_core::Error::Stalled(stalls))) }
    }

    fn pass(
        &self,
        pass: usize,
        step: &DeviceStep,
        weights: &DeviceWeights,
        gradients: Option<&DeviceGradients>,
        accumulate: bool,
    ) -> Result<()> {
        for memory in &self.ranks {
            memory.counters.fill(0, &self.stream)?;
        }
        self.scheduled.record(&self.stream)?;
        let ctas = self.device.sms() / self.ranks.len() as u32;
        for (rank, memory) in self.ranks.iter().enumerate() {
            memory.stream.wait(&self.scheduled)?;
            let p = self.pass_parameter(pass, rank, step, weights, gradients, accumulate)?;
            // SAFETY: the parameter is laid out as `PassParams`, and the buffers live as long as `self` and the arguments.
            unsafe { self.kernels[3 + pass].launch(ctas, THREADS, &memory.stream, &p)? };
            memory.done.record(&memory.stream)?;
            self.stream.wait(&memory.done)?;
        }
        Ok(())
    }

    fn pass_parameter(
        &self,
        pass: usize,
        rank: usize,
        step: &DeviceStep,
        weights: &DeviceWeights,
        gradients: Option<&DeviceGradients>,
        accumulate: bool,
    ) -> Result<Parameter> {
        let (h, i) = (self.shape.hidden as u64, self.shape.intermediate as u64);
        let local = (self.shape.experts / self.ranks.len()) as u64;
        let memory = &self.ranks[rank];
        let map = |address: u64, rows: u64, columns: u64, box_rows: u32| {
            TensorMap::new(address, rows, columns, columns, box_rows)
        };
        let rows = |b: &Buffer<bf16>, columns: u64| b.len() as u64 / columns;
        // This rank's experts.
        let weight = |b: &Buffer<bf16>| b.address() + rank as u64 * local * h * i * 2;
        let pair = |p: &mut Parameter, routed: TensorMap| {
            p.map(&routed).map(&TensorMap::NONE);
        };
        let width = i;
        let mut p = Parameter::new();
        p.map(&map(memory.x.address(), rows(&memory.x, h), h, 128)?);
        p.map(&map(memory.h.address(), rows(&memory.h, width), width, 128)?);
        pair(&mut p, map(weight(&weights.gate), local * i, h, 128)?);
        pair(&mut p, map(weight(&weights.up), local * i, h, 128)?);
        pair(&mut p, map(weight(&weights.down), local * h, i, 256)?);
        p.map(&map(memory.dy.address(), rows(&memory.dy, h), h, 128)?);
        p.map(&map(memory.dg.address(), rows(&memory.dg, width), width, 128)?);
        p.map(&map(memory.du.address(), rows(&memory.du, width), width, 128)?);
        pair(&mut p, map(weight(&weights.gate), local * i, h, 64)?);
        pair(&mut p, map(weight(&weights.up), local * i, h, 64)?);
        pair(&mut p, map(weight(&weights.down), local * h, i, 64)?);
        p.map(&map(memory.x.address(), rows(&memory.x, h), h, 64)?);
        p.map(&map(memory.dy.address(), rows(&memory.dy, h), h, 64)?);
        p.map(&map(memory.dg.address(), rows(&memory.dg, width), width, 64)?);
        p.map(&map(memory.du.address(), rows(&memory.du, width), width, 64)?);
        p.map(&map(memory.h.address(), rows(&memory.h, width), width, 64)?);

        let starts = self.token_starts();
        let at = |base: u64, rank: usize, bytes: usize| base + (starts[rank] * bytes) as u64;
        let ranks = 0..self.ranks.len();
        p.u64(memory.programs.address() + (pass * PROGRAM_BYTES) as u64).u64(memory.sources.address());
        p.u64(memory.counters.address());
        ranks.clone().for_each(|r| {
            p.u64(self.ranks[r].counters.address());
        });
        p.u64(memory.counters.address() + ((memory.counters.len() - TICKETS) * 4) as u64);
        p.u64(memory.stall.address());
        ranks.clone().for_each(|r| {
            p.u64(at(step.x.address(), r, self.shape.hidden * 2));
        });
        ranks.clone().for_each(|r| {
            p.u64(at(step.dy.address(), r, self.shape.hidden * 2));
        });
        ranks.clone().for_each(|r| {
            p.u64(at(step.topk_weights.address(), r, self.shape.top_k * 4));
        });
        p.u64(at(step.ids.address(), rank, self.shape.top_k * 4));
        for buffer in [&memory.x, &memory.g, &memory.u, &memory.h, &memory.dy, &memory.dg, &memory.du] {
            p.u64(buffer.address());
        }
        p.u64(memory.d_w_parts.address());
        ranks.clone().for_each(|r| {
            p.u64(self.ranks[r].combine.address());
        });
        ranks.for_each(|r| {
            p.u64(self.ranks[r].d_w.address());
        });
        let out = if pass == 0 { &step.y } else { &step.dx };
        p.u64(at(out.address(), rank, self.shape.hidden * 2));
        p.u64(at(step.d_topk_weights.address(), rank, self.shape.top_k * 4));
        p.u64(0).u64(0).u64(0);
        for which in 0..3 {
            let gradient = gradients.map(|g| [&g.gate, &g.up, &g.down][which]);
            p.u64(gradient.map_or(0, |g| g.address() + rank as u64 * local * h * i * 4)).u64(0);
        }
        let comm = [self.knobs.fwd_comm_sms, self.knobs.bwd_comm_sms][pass];
        p.u32(self.tokens[rank] as u32).u32(comm as u32).u32(u32::from(accumulate));
        p.u64(self.limit.as_nanos() as u64);
        Ok(p)
    }

    /// A `program::Program` as far as the host knows it; the schedule fills in the rest.
    fn program(&self, pass: u32, rank: usize, sizes: &Sizes) -> Vec<u8> {
        let memory = &self.ranks[rank];
        let shape = &self.shape;
        let widths = [shape.intermediate, shape.shared.map_or(0, |s| s.intermediate)];
        let cut = |n: usize, by: usize| n.div_ceil(by) as u32;
        let mut p = Parameter::new();
        p.u32(pass).u32(rank as u32).u32(self.ranks.len() as u32);
        p.u64(memory.rows.address()).u64(memory.first_block.address()).u64(memory.first_run.address());
        p.u32((memory.rows.len()) as u32).u32((shape.experts / self.ranks.len()) as u32);
        p.u32(sizes.per_minibatch).u32(0).u32(0).u32(0).u32(0);
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

    fn token_starts(&self) -> Vec<usize> {
        self.tokens.iter().scan(0, |sum, &t| Some(std::mem::replace(sum, *sum + t))).collect()
    }
}

const TICKETS: usize = 4;
const KINDS: [&str; 11] = [
    "Pull",
    "PullGrad",
    "GateUp",
    "Down",
    "DHidden",
    "DInput",
    "WGrad",
    "ZeroGrad",
    "Skip",
    "Reduce",
    "ReduceGrad",
];
const COUNTERS: [&str; 8] =
    ["done", "pushed", "chain", "pulled", "grad_pulled", "hidden", "grad_hidden", "free"];

/// The most rows, blocks and counters a rank can need, whatever the routing.
#[derive(Debug)]
struct Sizes {
    ranks: usize,
    blocks: usize,
    per_minibatch: u32,
    ring: u32,
    saved: u32,
    kept_rows: usize,
    ring_rows: usize,
    counters: usize,
}

impl Sizes {
    fn new(shape: &Shape, knobs: &Knobs, tokens: &[usize]) -> Result<Self> {
        shape.validate()?;
        knobs.validate()?;
        for (name, size) in [("hidden", shape.hidden), ("intermediate", shape.intermediate)] {
            if size % 64 != 0 {
                let allowed = "it must be a multiple of 64 on a GPU";
                return Err(kodkod_core::Error::invalid(name, size, allowed).into());
            }
        }
        let local = experts_per_rank(shape, tokens.len())?;
        let routes = tokens.iter().sum::<usize>() * shape.top_k.min(local);
        let blocks = routes / ROW_BLOCK + local;
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
            // Blocks, runs and minibatches: `program::place`; shared tiles are few.
            counters: 2 + 4 * blocks + 2 * (blocks + local) + 8192,
        })
    }

    fn defines(&self, shape: &Shape) -> Vec<(&'static str, String)> {
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
            ("D_HIDDEN_TILES", shape.intermediate.max(shared).div_ceil(256).to_string()),
        ]
    }
}

impl Rank {
    fn new(shape: &Shape, sizes: &Sizes, tokens: usize) -> Result<Self> {
        let local = shape.experts / sizes.ranks + usize::from(shape.shared.is_some());
        let width = shape.intermediate.max(shape.shared.map_or(0, |s| s.intermediate));
        let (kept, ring) = (sizes.kept_rows, sizes.ring_rows);
        Ok(Rank {
            stream: Stream::new()?,
            done: Event::new()?,
            counts: Buffer::new(shape.experts)?,
            rows: Buffer::new(local)?,
            first_block: Buffer::new(local + 1)?,
            first_run: Buffer::new(local + 1)?,
            sources: Buffer::new(sizes.blocks * ROW_BLOCK)?,
            counters: Buffer::new(sizes.counters + TICKETS)?,
            programs: Buffer::new(2 * PROGRAM_BYTES)?,
            stall: Buffer::new(8)?,
            x: Buffer::new(kept * shape.hidden)?,
            g: Buffer::new(kept * width)?,
            u: Buffer::new(kept * width)?,
            h: Buffer::new(ring * width)?,
            dy: Buffer::new(ring * shape.hidden)?,
            dg: Buffer::new(ring * width)?,
            du: Buffer::new(ring * width)?,
            d_w_parts: Buffer::new(ring * width.div_ceil(256))?,
            combine: Buffer::new(tokens * shape.slots() * shape.hidden)?,
            d_w: Buffer::new(tokens * shape.slots())?,
        })
    }
}
