//! A layer's kernels, its buffers, and its launches, for R virtual ranks on one GPU.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use kodkod_core::program::REDUCE_TOKENS;
use kodkod_core::schedule::experts_per_rank;
use kodkod_core::{Biases, GradientElement, Knobs, Precision, ROW_BLOCK, Shape, Stall};

use crate::driver::{Buffer, Device, Event, Graph, GraphWork, Kernel, Module, Parameter, Stream, TensorMap};
use crate::error::{Error, Result};
use crate::jit::{self, Source};
use crate::tensors::{DeviceGradients, DeviceStep, DeviceWeights};

/// Threads of a CTA, and its dynamic shared memory: `THREADS` and `SMEM_MOST` of `pass.cuh`.
const THREADS: u32 = 384;
const SHARED_BYTES: u32 = 232_448;
/// As in `schedule.cu`.
const COUNT_THREADS: u32 = 512;
const PLACE_THREADS: u32 = 1024;
/// One thread each, and one more for the shared experts, in `schedule_place`.
const MOST_EXPERTS: usize = PLACE_THREADS as usize - 1;

/// A layer on one GPU: compiled for its shape, its knobs and its number of ranks, with buffers for its tokens.
#[derive(Debug)]
pub struct CudaLayer {
    device: Arc<Device>,
    shape: Shape,
    knobs: Knobs,
    tokens: Vec<usize>,
    /// What the kernels store weight gradients in.
    gradients: Precision,
    kernels: [Kernel; 4],
    /// Kept after the kernels that come from them.
    _modules: Vec<Module>,
    ranks: Vec<Rank>,
    stream: Stream,
    scheduled: Event,
    limit: Duration,
    /// One word for all ranks: not 0 when one has given up.
    abort: Buffer<u32>,
    /// Sums of the shared experts' gradients that go on in the next run or rank; where gradients are bf16.
    shared_carry: Option<Buffer<f32>>,
    hang: Option<Hang>,
    trace: Option<Trace>,
}

/// Passes recorded by [`CudaLayer::capture`].
#[derive(Debug)]
pub struct Replay<'a> {
    graph: Graph,
    layer: &'a CudaLayer,
    _buffers: PhantomData<&'a DeviceStep>,
}

impl Replay<'_> {
    /// What the passes do: kernels and fills, and nothing else.
    pub fn work(&self) -> GraphWork {
        self.graph.work()
    }

    /// Runs them, in the layer's stream.
    pub fn launch(&self) -> Result<()> {
        // SAFETY: the layer and the buffers are borrowed for as long as `self` lives.
        unsafe { self.graph.launch(&self.layer.stream) }
    }
}

/// A test hook: a compute task of one rank that does not end before the pass is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hang {
    /// 0: forward, 1: backward.
    pub pass: usize,
    /// The rank.
    pub rank: usize,
    /// Of the task: 2 GateUp, 3 Down, 4 DHidden, 5 DInput.
    pub kind: u32,
    /// Row block.
    pub block: u32,
    /// Tile of columns.
    pub tile: u32,
}

/// Room for the stamps of a pass's tasks, and how many there are, of each rank.
#[derive(Debug)]
struct Trace {
    stamps: Buffer<u64>,
    stamped: Buffer<u32>,
}

/// One task of one CTA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Rank.
    pub rank: usize,
    /// Begin by the GPU's clock, in nanoseconds.
    pub begin: u64,
    /// The first operands are there; 0 where the task has no product.
    pub loaded: u64,
    /// The product is done, the epilogue begins; 0 where the task has no product.
    pub product: u64,
    /// End.
    pub end: u64,
    /// The SM's count of cycles at the end.
    pub cycles: u64,
    /// Name of the task.
    pub kind: &'static str,
    /// Block and tile, block and source, or chunk; of a weight gradient: its run's block, and tile of rows and of columns.
    pub place: [u32; 2],
    /// Streaming multiprocessor.
    pub sm: u32,
    /// CTA.
    pub cta: u32,
}

/// Most stamps that a rank has room for, those of all passes since [`CudaLayer::clear_stamps`]; later tasks leave none.
pub const STAMPS: usize = 1 << 18;
/// 64-bit words of a stamp.
const STAMP_WORDS: usize = 8;

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
    /// What a forward leaves for its backward: `[tokens]`
    output_gates: Buffer<f32>,
    /// Sums of a routed expert's gradients that go on in the next minibatch; where gradients are bf16.
    carry: Option<Buffer<f32>>,
}

/// Bytes of a `program::Program`.
const PROGRAM_BYTES: usize = 144;

impl CudaLayer {
    /// Compiles the kernels, or takes them from the cache, and allocates. `gradients`: what the gradients of gate, up and
    /// down are stored in.
    ///
    /// # Errors
    /// [`Error::Layer`] for a shape or knob that is not allowed, else the driver's or the compiler's words.
    pub fn new(
        device: &Arc<Device>,
        shape: &Shape,
        knobs: &Knobs,
        tokens_per_rank: &[usize],
        gradients: Precision,
    ) -> Result<Self> {
        Self::build(device, shape, knobs, tokens_per_rank, gradients, false)
    }

    /// The same, with kernels that stamp the begin and end of every task: see [`CudaLayer::stamps`].
    pub fn traced(
        device: &Arc<Device>,
        shape: &Shape,
        knobs: &Knobs,
        tokens_per_rank: &[usize],
        gradients: Precision,
    ) -> Result<Self> {
        Self::build(device, shape, knobs, tokens_per_rank, gradients, true)
    }

    fn build(
        device: &Arc<Device>,
        shape: &Shape,
        knobs: &Knobs,
        tokens_per_rank: &[usize],
        gradients: Precision,
        traced: bool,
    ) -> Result<Self> {
        device.make_current()?;
        let sizes = Sizes::new(shape, knobs, tokens_per_rank)?;
        let mut defines = sizes.defines(shape, gradients);
        if traced {
            defines.push(("TRACE", "1".into()));
        }
        let trace = || -> Result<Trace> {
            let ranks = tokens_per_rank.len();
            Ok(Trace {
                stamps: Buffer::new(ranks * STAMPS * STAMP_WORDS)?,
                stamped: Buffer::from_host(&vec![0; ranks])?,
            })
        };
        let code = Source::ALL.map(|source| jit::cubin(source, &defines));
        let mut modules = Vec::new();
        for cubin in code {
            modules.push(Module::load(&cubin?.code)?);
        }
        let kernels = [
            modules[0].kernel("schedule_count", 0)?,
            modules[0].kernel("schedule_place", 0)?,
            modules[1].kernel("moe_forward", SHARED_BYTES)?,
            modules[2].kernel("moe_backward", SHARED_BYTES)?,
        ];
        let ranks = tokens_per_rank
            .iter()
            .map(|&t| Rank::new(shape, &sizes, t, gradients))
            .collect::<Result<Vec<_>>>()?;
        let shared = shape.shared.filter(|_| gradients == Precision::Bf16);
        let layer = CudaLayer {
            device: device.clone(),
            shape: shape.clone(),
            knobs: *knobs,
            tokens: tokens_per_rank.to_vec(),
            gradients,
            kernels,
            _modules: modules,
            ranks,
            stream: Stream::new()?,
            scheduled: Event::new()?,
            limit: Duration::from_secs(10),
            abort: Buffer::from_host(&[0])?,
            shared_carry: shared.map(|s| Buffer::new(3 * s.intermediate * shape.hidden)).transpose()?,
            hang: None,
            trace: traced.then(trace).transpose()?,
        };
        for rank in 0..layer.ranks.len() {
            let bytes: Vec<u8> = [0, 1].iter().flat_map(|&pass| layer.program(pass, rank, &sizes)).collect();
            layer.ranks[rank].programs.write(&bytes)?;
            layer.ranks[rank].stall.fill(0, &layer.stream)?;
        }
        device.synchronize()?;
        Ok(layer)
    }

    /// What the gradients of gate, up and down are stored in.
    pub fn gradients(&self) -> Precision {
        self.gradients
    }

    /// The stream that a pass begins and ends in.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Names and values of the constants that a shape, knobs, ranks and the gradients' type compile to.
    pub fn defines(
        shape: &Shape,
        knobs: &Knobs,
        tokens_per_rank: &[usize],
        gradients: Precision,
    ) -> Result<Vec<(&'static str, String)>> {
        Ok(Sizes::new(shape, knobs, tokens_per_rank)?.defines(shape, gradients))
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
                self.kernels[0].launch(experts, COUNT_THREADS, &self.stream, &p)?;
                self.kernels[1].launch(local, PLACE_THREADS, &self.stream, &p)?;
            }
        }
        Ok(())
    }

    /// Schedule and forward: `step.y`. Asynchronous in [`CudaLayer::stream`].
    pub fn forward(&self, step: &DeviceStep, weights: &DeviceWeights) -> Result<()> {
        self.check::<f32>(step, weights, None)?;
        self.schedule(step)?;
        self.pass::<f32>(0, step, weights, None, false)
    }

    /// Backward of the forward before it: `step.dx`, `step.d_topk_weights` and `gradients`.
    ///
    /// # Errors
    /// Also where `T` is not the type that the layer was compiled for.
    pub fn backward<T: GradientElement>(
        &self,
        step: &DeviceStep,
        weights: &DeviceWeights,
        gradients: &DeviceGradients<T>,
        accumulate: bool,
    ) -> Result<()> {
        self.check(step, weights, Some(gradients))?;
        self.pass(1, step, weights, Some(gradients), accumulate)
    }

    /// Waits for the passes, and says where one gave up. The next pass starts afresh.
    ///
    /// # Errors
    /// [`kodkod_core::Error::Stalled`] with what each rank waited for, and which ranks had not pushed all their rows.
    pub fn finish(&self) -> Result<()> {
        self.stream.synchronize()?;
        let (mut stalls, mut pushed) = (Vec::new(), Vec::new());
        for (rank, memory) in self.ranks.iter().enumerate() {
            let s = memory.stall.read()?;
            // What it was when the rank gave up, or is now.
            pushed.push((s[0] != 0).then_some(s[8]));
            if s[0] != 0 {
                stalls.push(Stall {
                    rank,
                    task: format!("{} (block {}, {})", KINDS[s[1] as usize % KINDS.len()], s[2], s[3]),
                    counter: format!("{}[{}] of rank {rank}", COUNTERS[s[4] as usize % COUNTERS.len()], s[5]),
                    seen: s[6],
                    expected: s[7],
                    waited_ms: self.limit.as_millis() as u64,
                });
            }
        }
        if stalls.is_empty() {
            return Ok(());
        }
        let mut late = Vec::new();
        for (rank, memory) in self.ranks.iter().enumerate() {
            let blocks = memory.first_block.read()?.last().copied().unwrap_or(0);
            let all = blocks * self.shape.hidden.div_ceil(256) as u32;
            let pushed = pushed[rank].map_or_else(|| memory.counters.read().map(|c| c[1]), Ok)?;
            if pushed < all {
                late.push(format!("rank {rank} has pushed {pushed} of {all} tiles"));
            }
            memory.stall.fill(0, &self.stream)?;
        }
        for stall in &mut stalls {
            stall.counter += &format!(" ({})", late.join(", "));
        }
        self.abort.fill(0, &self.stream)?;
        self.stream.synchronize()?;
        Err(Error::Layer(kodkod_core::Error::Stalled(stalls)))
    }

    /// How long a rank may wait for a counter before the pass is given up.
    pub fn set_wait_limit(&mut self, limit: Duration) {
        self.limit = limit;
    }

    /// A test hook: a task that does not end, in passes from now on.
    pub fn set_hang(&mut self, hang: Option<Hang>) {
        self.hang = hang;
    }

    /// Records a forward, and a backward where there are gradients, to run many times with what the step's buffers then hold.
    pub fn capture<'a, T: GradientElement>(
        &'a self,
        step: &'a DeviceStep,
        weights: &'a DeviceWeights,
        gradients: Option<&'a DeviceGradients<T>>,
    ) -> Result<Replay<'a>> {
        self.stream.begin_capture()?;
        let recorded = self.forward(step, weights).and_then(|()| match gradients {
            Some(g) => self.backward(step, weights, g, false),
            None => Ok(()),
        });
        // A capture that failed must be ended too.
        let graph = self.stream.end_capture();
        recorded?;
        Ok(Replay { graph: graph?, layer: self, _buffers: PhantomData })
    }

    /// A test hook: fills all that passes leave in the layer's buffers with 0xff bytes (NaN).
    pub fn poison(&self) -> Result<()> {
        for m in &self.ranks {
            for rows in [&m.x, &m.g, &m.u, &m.h, &m.dy, &m.dg, &m.du, &m.combine] {
                rows.fill(0xff, &self.stream)?;
            }
            for values in [&m.d_w_parts, &m.d_w, &m.output_gates].into_iter().chain(&m.carry) {
                values.fill(0xff, &self.stream)?;
            }
        }
        if let Some(carry) = &self.shared_carry {
            carry.fill(0xff, &self.stream)?;
        }
        Ok(())
    }

    /// Forgets the stamps of the passes so far.
    pub fn clear_stamps(&self) -> Result<()> {
        match &self.trace {
            Some(trace) => trace.stamped.fill(0, &self.stream),
            None => Ok(()),
        }
    }

    /// The stamps of the passes since [`CudaLayer::clear_stamps`]; none unless the layer is traced.
    pub fn stamps(&self) -> Result<Vec<Stamp>> {
        let Some(trace) = &self.trace else { return Ok(vec![]) };
        self.stream.synchronize()?;
        let (words, counts) = (trace.stamps.read()?, trace.stamped.read()?);
        let mut all = Vec::new();
        for (rank, &count) in counts.iter().enumerate() {
            let mine = &words[rank * STAMPS * STAMP_WORDS..];
            for w in mine.chunks_exact(STAMP_WORDS).take((count as usize).min(STAMPS)) {
                let pair = |w: u64| [w as u32, (w >> 32) as u32];
                let ([kind, weight], place, [sm, cta]) = (pair(w[5]), pair(w[6]), pair(w[7]));
                let kind = match KINDS[kind as usize % KINDS.len()] {
                    "WGrad" => WEIGHTS[weight as usize % WEIGHTS.len()],
                    kind => kind,
                };
                all.push(Stamp {
                    rank,
                    begin: w[0],
                    loaded: w[1],
                    product: w[2],
                    end: w[3],
                    cycles: w[4],
                    kind,
                    place,
                    sm,
                    cta,
                });
            }
        }
        Ok(all)
    }

    /// Tokens of all ranks, or an error that names what has another length than the shape asks for.
    fn check<T: GradientElement>(
        &self,
        step: &DeviceStep,
        weights: &DeviceWeights,
        gradients: Option<&DeviceGradients<T>>,
    ) -> Result<()> {
        let (h, i) = (("hidden", self.shape.hidden), ("intermediate", self.shape.intermediate));
        let (e, k) = (("experts", self.shape.experts), ("top_k", self.shape.top_k));
        let t = ("tokens", self.tokens.iter().sum());
        let len = kodkod_core::Error::check_len;
        for (name, rows) in [("x", &step.x), ("dy", &step.dy), ("y", &step.y), ("dx", &step.dx)] {
            len(name, rows.len(), &[t, h])?;
        }
        len("topk_ids", step.ids.len(), &[t, k])?;
        len("topk_weights", step.topk_weights.len(), &[t, k])?;
        len("d_topk_weights", step.d_topk_weights.len(), &[t, k])?;
        len("w_gate", weights.gate.len(), &[e, i, h])?;
        len("w_up", weights.up.len(), &[e, i, h])?;
        len("w_down", weights.down.len(), &[e, h, i])?;
        if self.shape.biases {
            let b = weights.biases.as_ref();
            len("b_gate", b.map_or(0, |b| b.gate.len()), &[e, i])?;
            len("b_up", b.map_or(0, |b| b.up.len()), &[e, i])?;
            len("b_down", b.map_or(0, |b| b.down.len()), &[e, h])?;
        }
        if let Some(shared) = self.shape.shared {
            let (s, w) = (("shared intermediate", shared.intermediate), weights.shared.as_ref());
            len("shared_gate", w.map_or(0, |w| w.gate.len()), &[s, h])?;
            len("shared_up", w.map_or(0, |w| w.up.len()), &[s, h])?;
            len("shared_down", w.map_or(0, |w| w.down.len()), &[h, s])?;
            if shared.output_gate {
                let gate = w.and_then(|w| w.output_gate.as_ref());
                len("shared_output_gate", gate.map_or(0, Buffer::len), &[h])?;
            }
        }
        let Some(g) = gradients else { return Ok(()) };
        if T::PRECISION != self.gradients {
            let allowed = format!("the layer was compiled for gradients in {}", self.gradients);
            return Err(kodkod_core::Error::invalid("gradients", T::PRECISION, allowed).into());
        }
        len("dw_gate", g.gate.len(), &[e, i, h])?;
        len("dw_up", g.up.len(), &[e, i, h])?;
        len("dw_down", g.down.len(), &[e, h, i])?;
        if self.shape.biases {
            let b = g.biases.as_ref();
            len("db_gate", b.map_or(0, |b| b.gate.len()), &[e, i])?;
            len("db_up", b.map_or(0, |b| b.up.len()), &[e, i])?;
            len("db_down", b.map_or(0, |b| b.down.len()), &[e, h])?;
        }
        if let Some(shared) = self.shape.shared {
            let (s, w) = (("shared intermediate", shared.intermediate), g.shared.as_ref());
            len("d_shared_gate", w.map_or(0, |w| w.gate.len()), &[s, h])?;
            len("d_shared_up", w.map_or(0, |w| w.up.len()), &[s, h])?;
            len("d_shared_down", w.map_or(0, |w| w.down.len()), &[h, s])?;
            if shared.output_gate {
                let gate = w.and_then(|w| w.output_gate.as_ref());
                len("d_shared_output_gate", gate.map_or(0, Buffer::len), &[h])?;
            }
        }
        Ok(())
    }

    fn pass<T: GradientElement>(
        &self,
        pass: usize,
        step: &DeviceStep,
        weights: &DeviceWeights,
        gradients: Option<&DeviceGradients<T>>,
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
            unsafe { self.kernels[2 + pass].launch(ctas, THREADS, &memory.stream, &p)? };
            memory.done.record(&memory.stream)?;
            self.stream.wait(&memory.done)?;
        }
        Ok(())
    }

    fn pass_parameter<T: GradientElement>(
        &self,
        pass: usize,
        rank: usize,
        step: &DeviceStep,
        weights: &DeviceWeights,
        gradients: Option<&DeviceGradients<T>>,
        accumulate: bool,
    ) -> Result<Parameter> {
        let (h, i) = (self.shape.hidden as u64, self.shape.intermediate as u64);
        let local = (self.shape.experts / self.ranks.len()) as u64;
        let memory = &self.ranks[rank];
        let shared_width = self.shape.shared.map_or(0, |s| s.intermediate as u64);
        let shared = weights.shared.as_ref();
        // Of this rank's experts and of the shared: gate or up, and down.
        let (inner, outer) = ([[local * i, h], [shared_width, h]], [[local * h, i], [h, shared_width]]);
        let width = i.max(shared_width);
        let mut p = Parameter::new();
        rows_map(&mut p, &memory.x, h, 128)?;
        rows_map(&mut p, &memory.h, width, 128)?;
        weight_maps(&mut p, &weights.gate, shared.map(|s| &s.gate), rank, inner, 128)?;
        weight_maps(&mut p, &weights.up, shared.map(|s| &s.up), rank, inner, 128)?;
        weight_maps(&mut p, &weights.down, shared.map(|s| &s.down), rank, outer, 256)?;
        rows_map(&mut p, &memory.dy, h, 128)?;
        rows_map(&mut p, &memory.dg, width, 128)?;
        rows_map(&mut p, &memory.du, width, 128)?;
        weight_maps(&mut p, &weights.gate, shared.map(|s| &s.gate), rank, inner, 64)?;
        weight_maps(&mut p, &weights.up, shared.map(|s| &s.up), rank, inner, 64)?;
        weight_maps(&mut p, &weights.down, shared.map(|s| &s.down), rank, outer, 64)?;
        rows_map(&mut p, &memory.x, h, 64)?;
        rows_map(&mut p, &memory.dy, h, 64)?;
        rows_map(&mut p, &memory.dg, width, 64)?;
        rows_map(&mut p, &memory.du, width, 64)?;
        rows_map(&mut p, &memory.h, width, 64)?;
        rows_map(&mut p, &memory.g, width, 128)?;
        rows_map(&mut p, &memory.u, width, 128)?;

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
        ranks.clone().for_each(|r| {
            p.u64(self.ranks[r].d_w.address());
        });
        let out = if pass == 0 { &step.y } else { &step.dx };
        p.u64(at(out.address(), rank, self.shape.hidden * 2));
        p.u64(at(step.d_topk_weights.address(), rank, self.shape.top_k * 4));
        ranks.for_each(|r| {
            p.u64(self.ranks[r].output_gates.address());
        });
        // This rank's part of what all experts have `n` of, and the whole of what is shared; null where there is none.
        let first = rank as u64 * local;
        let part = |b: Option<&Buffer<f32>>, n: u64| b.map_or(0, |b| b.address() + first * n * 4);
        let whole = |b: Option<&Buffer<f32>>| b.map_or(0, Buffer::address);
        let biases = |p: &mut Parameter, b: Option<&Biases<Buffer<f32>>>| {
            p.u64(part(b.map(|b| &b.gate), i))
                .u64(part(b.map(|b| &b.up), i))
                .u64(part(b.map(|b| &b.down), h));
        };
        biases(&mut p, weights.biases.as_ref());
        p.u64(whole(weights.shared.as_ref().and_then(|s| s.output_gate.as_ref())));
        let shared = gradients.and_then(|g| g.shared.as_ref());
        biases(&mut p, gradients.and_then(|g| g.biases.as_ref()));
        p.u64(whole(shared.and_then(|s| s.output_gate.as_ref())));
        let mut pair = |routed: Option<&Buffer<T>>, shared: Option<&Buffer<T>>| {
            let bytes = first * h * i * size_of::<T>() as u64;
            p.u64(routed.map_or(0, |b| b.address() + bytes)).u64(shared.map_or(0, Buffer::address));
        };
        pair(gradients.map(|g| &g.gate), shared.map(|s| &s.gate));
        pair(gradients.map(|g| &g.up), shared.map(|s| &s.up));
        pair(gradients.map(|g| &g.down), shared.map(|s| &s.down));
        p.u64(whole(memory.carry.as_ref())).u64(whole(self.shared_carry.as_ref()));
        let comm = [self.knobs.fwd_comm_sms, self.knobs.bwd_comm_sms][pass];
        p.u32(self.tokens[rank] as u32).u32(comm as u32).u32(u32::from(accumulate));
        p.u64(self.limit.as_nanos() as u64).u64(self.abort.address());
        let hang = self.hang.filter(|h| h.pass == pass && h.rank == rank);
        let [kind, a, b] = hang.map_or([u32::MAX, 0, 0], |h| [h.kind, h.block, h.tile]);
        p.u32(kind).u32(a).u32(b);
        match &self.trace {
            Some(t) => p.u64(t.stamps.address() + (rank * STAMPS * STAMP_WORDS * 8) as u64),
            None => p.u64(0),
        };
        p.u64(self.trace.as_ref().map_or(0, |t| t.stamped.address() + rank as u64 * 4)).u32(STAMPS as u32);
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

/// Maps a buffer of rows of `columns`.
fn rows_map(p: &mut Parameter, rows: &Buffer<bf16>, columns: u64, box_rows: u32) -> Result<()> {
    p.map(&TensorMap::new(rows.address(), rows.len() as u64 / columns, columns, box_rows)?);
    Ok(())
}

/// Maps a rank's part of the routed experts' matrices, and the shared experts': `[rows, columns]` of both.
fn weight_maps(
    p: &mut Parameter,
    routed: &Buffer<bf16>,
    shared: Option<&Buffer<bf16>>,
    rank: usize,
    [[rows, columns], [shared_rows, shared_columns]]: [[u64; 2]; 2],
    box_rows: u32,
) -> Result<()> {
    let first = rank as u64 * rows * columns * size_of::<bf16>() as u64;
    p.map(&TensorMap::new(routed.address() + first, rows, columns, box_rows)?);
    p.map(&match shared {
        Some(b) => TensorMap::new(b.address(), shared_rows, shared_columns, box_rows)?,
        None => TensorMap::NONE,
    });
    Ok(())
}

const TICKETS: usize = 4;
/// Words of a `Stall`.
const STALL_WORDS: usize = 9;
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
const WEIGHTS: [&str; 4] = ["WGradGate", "WGradUp", "WGradDown", "WGradOutputGate"];
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

    fn defines(&self, shape: &Shape, gradients: Precision) -> Vec<(&'static str, String)> {
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

impl Rank {
    fn new(shape: &Shape, sizes: &Sizes, tokens: usize, gradients: Precision) -> Result<Self> {
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
            stall: Buffer::new(STALL_WORDS)?,
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
            output_gates: Buffer::new(tokens)?,
            // Two slots of an expert's gate, up and down.
            carry: (gradients == Precision::Bf16)
                .then(|| Buffer::new(2 * 3 * shape.intermediate * shape.hidden))
                .transpose()?,
        })
    }
}
