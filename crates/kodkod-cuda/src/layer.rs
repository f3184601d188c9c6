//! A layer's kernels and its launches, for ranks that share a GPU or have one each.

use std::marker::PhantomData;
use std::ops::Range;
use std::slice::from_ref;
use std::sync::Arc;
use std::time::Duration;

use kodkod_core::{GradientElement, Knobs, Precision, Shape, Stall};

use crate::driver::{Buffer, Device, Event, Graph, GraphWork, Kernel, Module, Stream};
use crate::error::{Error, Result};
use crate::jit::{self, Source};
use crate::memory::{Rank, STAMP_WORDS, STAMPS, Sizes};
use crate::parameters::{Call, MatricesAt, StepAt};
use crate::tensors::{DeviceGradients, DeviceStep, DeviceWeights};

/// Threads of a CTA, and its dynamic shared memory: `THREADS` and `SMEM_MOST` of `pass.cuh`.
const THREADS: u32 = 384;
const SHARED_BYTES: u32 = 232_448;
/// As in `schedule.cu`.
const COUNT_THREADS: u32 = 512;
pub(crate) const PLACE_THREADS: u32 = 1024;
/// As in `meet.cu`.
const MEET_THREADS: u32 = 32;
const GATHER_THREADS: u32 = 256;
const GATHER_CTAS: u32 = 64;

/// A layer on one GPU, whose ranks share it, or on several with a rank each: compiled for its shape, its knobs and its
/// number of ranks, with buffers for its tokens.
#[derive(Debug)]
pub struct CudaLayer {
    pub(crate) shape: Shape,
    pub(crate) knobs: Knobs,
    pub(crate) tokens: Vec<usize>,
    /// What the kernels store weight gradients in.
    gradients: Precision,
    seats: Vec<Seat>,
    pub(crate) ranks: Vec<Rank>,
    /// On the first seat's GPU.
    stream: Stream,
    scheduled: Event,
    pub(crate) limit: Duration,
    /// Sums of the shared experts' gradients that go on in the next run or rank; where gradients are bf16. On the first
    /// seat's GPU.
    pub(crate) shared_carry: Option<Buffer<f32>>,
    pub(crate) hang: Option<Hang>,
}

/// A GPU, or a part of one, with the ranks that are on it, and the kernels as it has loaded them.
#[derive(Debug)]
struct Seat {
    device: Arc<Device>,
    ranks: Range<usize>,
    /// CTAs of each rank's passes.
    ctas: u32,
    count: Kernel,
    place: Kernel,
    passes: [Kernel; 2],
    /// `meet` and `gather`, where each rank has a seat of its own.
    meeting: Option<[Kernel; 2]>,
    /// Kept after the kernels that come from them.
    _modules: Vec<Module>,
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

impl CudaLayer {
    /// Compiles the kernels, or takes them from the cache, and allocates. With one device, all ranks share it, one a token
    /// count. With several, each rank has its own, `devices[rank]`, and they must reach each other's memory; of all that
    /// the calls take there is one a rank then, its [`Part`](crate::Part). A GPU that stands there twice is shared by
    /// those ranks. `gradients`: what the gradients of gate, up and down are stored in.
    ///
    /// # Errors
    /// [`Error::Layer`] for a shape or knob that is not allowed, [`Error::NoPeer`] for GPUs that do not reach each other,
    /// else the driver's or the compiler's words.
    pub fn new(
        devices: &[Arc<Device>],
        shape: &Shape,
        knobs: &Knobs,
        tokens_per_rank: &[usize],
        gradients: Precision,
    ) -> Result<Self> {
        Self::build(devices, shape, knobs, tokens_per_rank, gradients, false)
    }

    /// The same, with kernels that stamp the begin and end of every task: see [`CudaLayer::stamps`].
    pub fn traced(
        devices: &[Arc<Device>],
        shape: &Shape,
        knobs: &Knobs,
        tokens_per_rank: &[usize],
        gradients: Precision,
    ) -> Result<Self> {
        Self::build(devices, shape, knobs, tokens_per_rank, gradients, true)
    }

    fn build(
        devices: &[Arc<Device>],
        shape: &Shape,
        knobs: &Knobs,
        tokens_per_rank: &[usize],
        gradients: Precision,
        traced: bool,
    ) -> Result<Self> {
        let sizes = Sizes::new(shape, knobs, tokens_per_rank)?;
        let ranks = tokens_per_rank.len();
        let meets = devices.len() > 1;
        let [first, ..] = devices else {
            return Err(kodkod_core::Error::invalid("devices", "none", "one GPU is needed").into());
        };
        if meets && devices.len() != ranks {
            let allowed = format!("one, or one a rank, and there are {ranks} token counts");
            return Err(kodkod_core::Error::invalid("number of devices", devices.len(), allowed).into());
        }
        let ranks_of = |at: usize| if meets { at..at + 1 } else { 0..ranks };
        let mut defines = sizes.defines(shape, gradients);
        if traced {
            defines.push(("TRACE", "1".into()));
        }
        let files = Source::ALL.into_iter().chain(meets.then_some(Source::Meet));
        let code = files.map(|source| jit::cubin(source, &defines)).collect::<Result<Vec<_>>>()?;
        let seat = |(at, device): (usize, &Arc<Device>)| -> Result<Seat> {
            devices.iter().try_for_each(|other| device.enable_peer(other))?;
            device.make_current()?;
            let modules = code.iter().map(|c| Module::load(&c.code)).collect::<Result<Vec<_>>>()?;
            let here = devices.iter().filter(|d| d.ordinal() == device.ordinal()).count();
            let sharing = if meets { here } else { ranks };
            Ok(Seat {
                device: device.clone(),
                ranks: ranks_of(at),
                ctas: device.sms() / sharing as u32,
                count: modules[0].kernel("schedule_count", 0)?,
                place: modules[0].kernel("schedule_place", 0)?,
                passes: [
                    modules[1].kernel("moe_forward", SHARED_BYTES)?,
                    modules[2].kernel("moe_backward", SHARED_BYTES)?,
                ],
                meeting: match modules.get(3) {
                    Some(module) => Some([module.kernel("meet", 0)?, module.kernel("gather", 0)?]),
                    None => None,
                },
                _modules: modules,
            })
        };
        let seats = devices.iter().enumerate().map(seat).collect::<Result<Vec<_>>>()?;
        let mut memory = Vec::new();
        for seat in &seats {
            for rank in seat.ranks.clone() {
                let device = &seat.device;
                memory.push(Rank::new(
                    device,
                    shape,
                    &sizes,
                    tokens_per_rank,
                    rank,
                    gradients,
                    [meets, traced],
                )?);
            }
        }
        first.make_current()?;
        let shared = shape.shared.filter(|_| gradients == Precision::Bf16);
        let layer = CudaLayer {
            shape: shape.clone(),
            knobs: *knobs,
            tokens: tokens_per_rank.to_vec(),
            gradients,
            seats,
            ranks: memory,
            stream: Stream::new()?,
            scheduled: Event::new()?,
            limit: Duration::from_secs(10),
            shared_carry: shared.map(|s| Buffer::new(3 * s.intermediate * shape.hidden)).transpose()?,
            hang: None,
        };
        for rank in 0..ranks {
            let bytes: Vec<u8> = [0, 1].iter().flat_map(|&pass| layer.program(pass, rank, &sizes)).collect();
            layer.ranks[rank].device.make_current()?;
            layer.ranks[rank].programs.write(&bytes)?;
        }
        for seat in &layer.seats {
            seat.device.make_current()?;
            seat.device.synchronize()?;
        }
        first.make_current()?;
        Ok(layer)
    }

    /// What the gradients of gate, up and down are stored in.
    pub fn gradients(&self) -> Precision {
        self.gradients
    }

    /// The stream that a pass begins and ends in, on the first rank's GPU.
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

    /// Builds the schedule: what every forward starts with.
    pub fn schedule(&self, step: &DeviceStep) -> Result<()> {
        self.schedule_on(from_ref(step))
    }

    /// The same for ranks with a GPU each.
    pub fn schedule_on(&self, steps: &[DeviceStep]) -> Result<()> {
        let steps = self.steps_at(steps);
        if !self.meets() {
            return (0..self.ranks.len())
                .try_for_each(|rank| self.launch_schedule(rank, &steps, &self.stream));
        }
        self.apart(|rank| {
            self.meet(rank, false)?;
            self.launch_schedule(rank, &steps, &self.ranks[rank].stream)?;
            self.meet(rank, true)
        })
    }

    fn launch_schedule(&self, rank: usize, steps: &[StepAt], stream: &Stream) -> Result<()> {
        let seat = self.seat(rank);
        let local = self.shape.experts / self.ranks.len() + usize::from(self.shape.shared.is_some());
        let p = self.schedule_parameter(rank, steps);
        // SAFETY: the parameters are laid out as `GatherParams` and `ScheduleParams`, and the buffers live as long as
        // `self` and the steps.
        unsafe {
            if let Some([_, gather]) = &seat.meeting {
                gather.launch(GATHER_CTAS, GATHER_THREADS, stream, &self.gather_parameter(rank, steps))?;
            }
            seat.count.launch(self.shape.experts as u32, COUNT_THREADS, stream, &p)?;
            seat.place.launch(local as u32, PLACE_THREADS, stream, &p)
        }
    }

    /// Schedule and forward: `step.y`. Asynchronous in [`CudaLayer::stream`].
    pub fn forward(&self, step: &DeviceStep, weights: &DeviceWeights) -> Result<()> {
        self.forward_on(from_ref(step), from_ref(weights))
    }

    /// The same for ranks with a GPU each.
    pub fn forward_on(&self, steps: &[DeviceStep], weights: &[DeviceWeights]) -> Result<()> {
        self.check::<f32>(steps, weights, None)?;
        let call = Call {
            steps: self.steps_at(steps),
            weights: self.weights_at(weights),
            gradients: vec![MatricesAt::default(); self.ranks.len()],
            accumulate: false,
        };
        self.pass(0, &call)
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
        self.backward_on(from_ref(step), from_ref(weights), from_ref(gradients), accumulate)
    }

    /// The same for ranks with a GPU each. The shared experts' gradients, which are sums over all ranks' tokens, are the
    /// first rank's; the others' are not used.
    pub fn backward_on<T: GradientElement>(
        &self,
        steps: &[DeviceStep],
        weights: &[DeviceWeights],
        gradients: &[DeviceGradients<T>],
        accumulate: bool,
    ) -> Result<()> {
        self.check(steps, weights, Some(gradients))?;
        let at = |(seat, experts): (usize, usize)| {
            MatricesAt::of_gradients(&gradients[seat], &gradients[0], experts, &self.shape)
        };
        let call = Call {
            steps: self.steps_at(steps),
            weights: self.weights_at(weights),
            gradients: self.places(self.shape.experts / self.ranks.len()).map(at).collect(),
            accumulate,
        };
        self.pass(1, &call)
    }

    /// Waits for the passes, and says where one gave up. The next pass starts afresh.
    ///
    /// # Errors
    /// [`kodkod_core::Error::Stalled`] with what each rank waited for, and which ranks had not pushed all their rows.
    pub fn finish(&self) -> Result<()> {
        self.stream.synchronize()?;
        let (mut stalls, mut pushed) = (Vec::new(), Vec::new());
        for (rank, memory) in self.ranks.iter().enumerate() {
            memory.device.make_current()?;
            memory.stream.synchronize()?;
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
            return self.seats[0].device.make_current();
        }
        let mut late = Vec::new();
        for (rank, memory) in self.ranks.iter().enumerate() {
            memory.device.make_current()?;
            let blocks = memory.first_block.read()?.last().copied().unwrap_or(0);
            let all = blocks * self.shape.hidden.div_ceil(256) as u32;
            let pushed = pushed[rank].map_or_else(|| memory.counters.read().map(|c| c[1]), Ok)?;
            if pushed < all {
                late.push(format!("rank {rank} has pushed {pushed} of {all} tiles"));
            }
            memory.forget_stall()?;
        }
        for stall in &mut stalls {
            stall.counter += &format!(" ({})", late.join(", "));
        }
        self.seats[0].device.make_current()?;
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
        self.capture_on(from_ref(step), from_ref(weights), gradients.map(from_ref))
    }

    /// The same for ranks with a GPU each.
    pub fn capture_on<'a, T: GradientElement>(
        &'a self,
        steps: &'a [DeviceStep],
        weights: &'a [DeviceWeights],
        gradients: Option<&'a [DeviceGradients<T>]>,
    ) -> Result<Replay<'a>> {
        self.stream.begin_capture()?;
        let recorded = self.forward_on(steps, weights).and_then(|()| match gradients {
            Some(g) => self.backward_on(steps, weights, g, false),
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
            m.device.make_current()?;
            for rows in [&m.x, &m.g, &m.u, &m.h, &m.dy, &m.dg, &m.du, &m.combine] {
                rows.fill(0xff, &m.stream)?;
            }
            for values in [&m.d_w_parts, &m.d_w, &m.output_gates].into_iter().chain(&m.carry) {
                values.fill(0xff, &m.stream)?;
            }
            if let Some(meeting) = &m.meeting {
                meeting.ids.fill(0xff, &m.stream)?;
                meeting.factors.fill(0xff, &m.stream)?;
            }
            m.stream.synchronize()?;
        }
        self.seats[0].device.make_current()?;
        if let Some(carry) = &self.shared_carry {
            carry.fill(0xff, &self.stream)?;
        }
        Ok(())
    }

    /// Forgets the stamps of the passes so far.
    pub fn clear_stamps(&self) -> Result<()> {
        self.stream.synchronize()?;
        for memory in &self.ranks {
            if let Some(trace) = &memory.trace {
                memory.device.make_current()?;
                trace.stamped.fill(0, &memory.stream)?;
                memory.stream.synchronize()?;
            }
        }
        self.seats[0].device.make_current()
    }

    /// The stamps of the passes since [`CudaLayer::clear_stamps`]; none unless the layer is traced.
    pub fn stamps(&self) -> Result<Vec<Stamp>> {
        self.stream.synchronize()?;
        let mut all = Vec::new();
        for (rank, memory) in self.ranks.iter().enumerate() {
            let Some(trace) = &memory.trace else { continue };
            memory.device.make_current()?;
            let (words, count) = (trace.stamps.read()?, trace.stamped.read()?[0]);
            for w in words.chunks_exact(STAMP_WORDS).take((count as usize).min(STAMPS)) {
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
        self.seats[0].device.make_current()?;
        Ok(all)
    }

    /// Whether each rank has a seat of its own: they meet before and after a pass.
    fn meets(&self) -> bool {
        self.seats.len() > 1
    }

    /// Of each rank: its seat, and how many ranks before it are on that, times `each`.
    fn places(&self, each: usize) -> impl Iterator<Item = (usize, usize)> {
        let ranks = move |(seat, s): (usize, &Seat)| (0..s.ranks.len()).map(move |r| (seat, r * each));
        self.seats.iter().enumerate().flat_map(ranks)
    }

    fn seat(&self, rank: usize) -> &Seat {
        &self.seats[if self.meets() { rank } else { 0 }]
    }

    fn steps_at(&self, steps: &[DeviceStep]) -> Vec<StepAt> {
        let first = |rank: usize| self.tokens[self.seat(rank).ranks.start..rank].iter().sum();
        let places = self.places(0).enumerate();
        places.map(|(rank, (seat, _))| StepAt::new(&steps[seat], first(rank), &self.shape)).collect()
    }

    fn weights_at(&self, weights: &[DeviceWeights]) -> Vec<MatricesAt> {
        let at =
            |(seat, experts): (usize, usize)| MatricesAt::of_weights(&weights[seat], experts, &self.shape);
        self.places(self.shape.experts / self.ranks.len()).map(at).collect()
    }

    fn check<T: GradientElement>(
        &self,
        steps: &[DeviceStep],
        weights: &[DeviceWeights],
        gradients: Option<&[DeviceGradients<T>]>,
    ) -> Result<()> {
        let seats = self.seats.len();
        let given = [
            ("steps", steps.len()),
            ("weights", weights.len()),
            ("gradients", gradients.map_or(seats, <[_]>::len)),
        ];
        for (name, n) in given {
            if n != seats {
                let allowed = format!("one for each of {seats} GPUs is needed");
                return Err(kodkod_core::Error::invalid(name, n, allowed).into());
            }
        }
        if gradients.is_some() && T::PRECISION != self.gradients {
            let allowed = format!("the layer was compiled for gradients in {}", self.gradients);
            return Err(kodkod_core::Error::invalid("gradients", T::PRECISION, allowed).into());
        }
        for (at, seat) in self.seats.iter().enumerate() {
            self.check_seat(seat, &steps[at], &weights[at], gradients.map(|g| &g[at]))?;
        }
        Ok(())
    }

    /// An error that names what has another length than the shape, and the tokens and experts of a seat, ask for.
    fn check_seat<T: GradientElement>(
        &self,
        seat: &Seat,
        step: &DeviceStep,
        weights: &DeviceWeights,
        gradients: Option<&DeviceGradients<T>>,
    ) -> Result<()> {
        let (h, i) = (("hidden", self.shape.hidden), ("intermediate", self.shape.intermediate));
        let experts = self.shape.experts / self.ranks.len() * seat.ranks.len();
        let (e, k) = (("experts", experts), ("top_k", self.shape.top_k));
        let t = ("tokens", self.tokens[seat.ranks.clone()].iter().sum());
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
    fn pass(&self, pass: usize, call: &Call) -> Result<()> {
        let parameters = (0..self.ranks.len())
            .map(|rank| self.pass_parameter(pass, rank, call))
            .collect::<Result<Vec<_>>>()?;
        let launch = |rank: usize| {
            let (seat, p) = (self.seat(rank), &parameters[rank]);
            // SAFETY: the parameter is laid out as `PassParams`, and the buffers live as long as `self` and the arguments.
            unsafe { seat.passes[pass].launch(seat.ctas, THREADS, &self.ranks[rank].stream, p) }
        };
        if self.meets() {
            return self.apart(|rank| {
                let memory = &self.ranks[rank];
                memory.counters.fill(0, &memory.stream)?;
                self.meet(rank, false)?;
                if pass == 0 {
                    self.launch_schedule(rank, &call.steps, &memory.stream)?;
                }
                launch(rank)?;
                self.meet(rank, true)
            });
        }
        if pass == 0 {
            (0..self.ranks.len())
                .try_for_each(|rank| self.launch_schedule(rank, &call.steps, &self.stream))?;
        }
        for memory in &self.ranks {
            memory.counters.fill(0, &self.stream)?;
        }
        self.apart(launch)
    }

    /// Work of each rank, in its own stream and on its own GPU, after what is in the layer's stream; what follows there
    /// comes after the work of all.
    fn apart(&self, work: impl Fn(usize) -> Result<()>) -> Result<()> {
        self.scheduled.record(&self.stream)?;
        for (rank, memory) in self.ranks.iter().enumerate() {
            memory.device.make_current()?;
            memory.stream.wait(&self.scheduled)?;
            work(rank)?;
            memory.done.record(&memory.stream)?;
        }
        self.seats[0].device.make_current()?;
        self.ranks.iter().try_for_each(|memory| self.stream.wait(&memory.done))
    }

    /// Waits in a rank's stream until all ranks' streams have come as far.
    fn meet(&self, rank: usize, leaving: bool) -> Result<()> {
        let Some([meet, _]) = &self.seat(rank).meeting else { return Ok(()) };
        let p = self.meet_parameter(rank, leaving);
        // SAFETY: the parameter is laid out as `MeetParams`, and the buffers live as long as `self`.
        unsafe { meet.launch(1, MEET_THREADS, &self.ranks[rank].stream, &p) }
    }
}

const KINDS: [&str; 13] = [
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
    "Enter",
    "Leave",
];
const WEIGHTS: [&str; 4] = ["WGradGate", "WGradUp", "WGradDown", "WGradOutputGate"];
const COUNTERS: [&str; 9] =
    ["done", "pushed", "chain", "pulled", "grad_pulled", "hidden", "grad_hidden", "free", "met"];
