//! A layer's kernels and its launches, for ranks that share a GPU or have one each.

use std::cell::OnceCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::slice::from_ref;
use std::sync::Arc;
use std::time::Duration;

use kodkod_core::{GradientElement, Knobs, Precision, Shape};

use crate::driver::{self, Buffer, Device, Event, Graph, GraphWork, Kernel, Module, Stream};
use crate::error::{Error, Result};
use crate::jit::{self, Source};
use crate::memory::{Rank, Reached, Room, STAMP_WORDS, STAMPS, Sizes, Staged};
use crate::parameters::{Call, Copied, Copies, MatricesAt, StepAt};
use crate::symmetric::SymmetricMemory;
use crate::tensors::{DeviceGradients, DeviceStep, DeviceWeights, check_part};

/// Threads of a CTA, and its dynamic shared memory: `THREADS` and `SMEM_MOST` of `pass.cuh`.
const THREADS: u32 = 384;
const SHARED_BYTES: u32 = 232_448;
/// As in `schedule.cu`.
pub(crate) const SCHEDULE_THREADS: u32 = 1024;
/// As in `meet.cu`.
const MEET_THREADS: u32 = 32;
const GATHER_THREADS: u32 = 256;
const GATHER_CTAS: u32 = 64;

/// The most ranks of a layer.
pub const MOST_RANKS: usize = 8;

/// A layer on one GPU, whose ranks share it, or on several with a rank each, in this process or one of them in this
/// process: compiled for its shape, its knobs and its number of ranks, with buffers for its tokens.
#[derive(Debug)]
pub struct CudaLayer {
    pub(crate) shape: Shape,
    pub(crate) knobs: Knobs,
    pub(crate) tokens: Vec<usize>,
    /// What the kernels store weight gradients in.
    gradients: Precision,
    /// From one expert's gate to the next one's, and of up.
    pub(crate) gate_rows: usize,
    pub(crate) sizes: Sizes,
    seats: Vec<Seat>,
    /// The ranks that are here: all, or this process's.
    pub(crate) ranks: Vec<Rank>,
    /// The first of them.
    pub(crate) first: usize,
    /// Of all ranks; of processes none before the first pass.
    pub(crate) reached: Vec<Reached>,
    /// Where the other ranks are processes: what a forward leaves of `Reached::output_gates`, which other layers use too.
    own_gates: Option<Buffer<f32>>,
    /// On the first seat's GPU.
    stream: Stream,
    scheduled: Event,
    pub(crate) limit: Duration,
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

/// A layer's rank whose others are processes.
struct Process {
    rank: usize,
    /// How many of the ranks are on its GPU.
    sharing: usize,
}

/// What a layer is made for, beside the usual.
#[derive(Default)]
struct Options {
    traced: bool,
    fused: bool,
    process: Option<Process>,
}

/// Passes recorded by [`CudaLayer::capture_on`].
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
    /// [`Error::Layer`] for a shape, a knob or a number of ranks that is not allowed, [`Error::NoPeer`] for GPUs that do not
    /// reach each other, else the driver's or the compiler's words.
    pub fn new(
        devices: &[Arc<Device>],
        shape: &Shape,
        knobs: &Knobs,
        tokens_per_rank: &[usize],
        gradients: Precision,
    ) -> Result<Self> {
        Self::build(devices, shape, knobs, tokens_per_rank, gradients, Options::default())
    }

    /// The same, where an expert's gate and up lie together, in the weights and in their gradients: `gate` is
    /// `[experts, 2, intermediate, hidden]`, and `up` is borrowed, `gate` from its first expert's up on.
    pub fn fused(
        devices: &[Arc<Device>],
        shape: &Shape,
        knobs: &Knobs,
        tokens_per_rank: &[usize],
        gradients: Precision,
    ) -> Result<Self> {
        let options = Options { fused: true, ..Options::default() };
        Self::build(devices, shape, knobs, tokens_per_rank, gradients, options)
    }

    /// The same, with kernels that stamp the begin and end of every task: see [`CudaLayer::stamps`].
    pub fn traced(
        devices: &[Arc<Device>],
        shape: &Shape,
        knobs: &Knobs,
        tokens_per_rank: &[usize],
        gradients: Precision,
    ) -> Result<Self> {
        let options = Options { traced: true, ..Options::default() };
        Self::build(devices, shape, knobs, tokens_per_rank, gradients, options)
    }

    /// One rank of a layer whose others are processes, with a token count for each: `rank` on `device`, which `sharing` of
    /// them share, 1 unless for a try. Its passes are [`CudaLayer::forward_in`] and [`CudaLayer::backward_in`]: of all that
    /// they take there is this rank's, its own experts' and its own tokens'. `fused`: as [`CudaLayer::fused`], which the ranks
    /// need not have alike.
    ///
    /// # Errors
    /// As for [`CudaLayer::new`].
    pub fn of_process(
        device: &Arc<Device>,
        [rank, sharing]: [usize; 2],
        shape: &Shape,
        knobs: &Knobs,
        tokens_per_rank: &[usize],
        gradients: Precision,
        fused: bool,
    ) -> Result<Self> {
        let options = Options { process: Some(Process { rank, sharing }), fused, ..Options::default() };
        Self::build(from_ref(device), shape, knobs, tokens_per_rank, gradients, options)
    }

    fn build(
        devices: &[Arc<Device>],
        shape: &Shape,
        knobs: &Knobs,
        tokens_per_rank: &[usize],
        gradients: Precision,
        Options { traced, fused, process }: Options,
    ) -> Result<Self> {
        let ranks = tokens_per_rank.len();
        if ranks > MOST_RANKS {
            let allowed = format!("1 to {MOST_RANKS} are allowed on GPUs");
            return Err(kodkod_core::Error::invalid("ranks", ranks, allowed).into());
        }
        let sizes = Sizes::new(shape, knobs, tokens_per_rank)?;
        let meets = devices.len() > 1 || process.is_some();
        let [first, ..] = devices else {
            return Err(kodkod_core::Error::invalid("devices", "none", "one GPU is needed").into());
        };
        if devices.len() > 1 && devices.len() != ranks {
            let allowed = format!("one, or one a rank, and there are {ranks} token counts");
            return Err(kodkod_core::Error::invalid("number of devices", devices.len(), allowed).into());
        }
        let ranks_of = |at: usize| match &process {
            Some(p) => p.rank..p.rank + 1,
            None if meets => at..at + 1,
            None => 0..ranks,
        };
        let mut defines = sizes.defines(shape, gradients);
        if traced {
            defines.push(("TRACE", "1".into()));
        }
        let gate_rows = if fused { 2 } else { 1 } * shape.intermediate;
        if fused {
            defines.push(("GATE_ROWS", gate_rows.to_string()));
        }
        let files = Source::ALL.into_iter().chain(meets.then_some(Source::Meet));
        let code = files.map(|source| jit::cubin(source, &defines)).collect::<Result<Vec<_>>>()?;
        let seat = |(at, device): (usize, &Arc<Device>)| -> Result<Seat> {
            devices.iter().try_for_each(|other| device.enable_peer(other))?;
            device.make_current()?;
            let modules = code.iter().map(|c| Module::load(&c.code)).collect::<Result<Vec<_>>>()?;
            let here = devices.iter().filter(|d| d.ordinal() == device.ordinal()).count();
            let sharing = match &process {
                Some(p) => p.sharing,
                None if meets => here,
                None => ranks,
            };
            let ctas = device.sms() / sharing as u32;
            if ctas < 2 {
                let allowed = format!("up to {}, half of its SMs", device.sms() / 2);
                let what = format!("ranks on GPU {}", device.ordinal());
                return Err(kodkod_core::Error::invalid(&what, sharing, allowed).into());
            }
            Ok(Seat {
                device: device.clone(),
                ranks: ranks_of(at),
                ctas,
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
        let (mut memory, mut reached) = (Vec::new(), Vec::new());
        for seat in &seats {
            for rank in seat.ranks.clone() {
                let (device, tokens) = (&seat.device, tokens_per_rank);
                let own = Rank::new(device, shape, &sizes, tokens, gradients, [meets, traced])?;
                if process.is_none() {
                    let room = &mut Room::Allocated;
                    let new = Reached::new(room, shape, &sizes, tokens, rank, gradients, false)?;
                    new.words.clear(&own.stream)?;
                    reached.push(new);
                }
                memory.push(own);
            }
        }
        first.make_current()?;
        let gates = process.as_ref().filter(|_| shape.shared.is_some_and(|s| s.output_gate));
        let layer = CudaLayer {
            shape: shape.clone(),
            knobs: *knobs,
            tokens: tokens_per_rank.to_vec(),
            gradients,
            gate_rows,
            first: process.as_ref().map_or(0, |p| p.rank),
            own_gates: gates.map(|p| Buffer::new(tokens_per_rank[p.rank])).transpose()?,
            sizes,
            seats,
            ranks: memory,
            reached,
            stream: Stream::new()?,
            scheduled: Event::new()?,
            limit: Duration::from_secs(10),
            hang: None,
        };
        for rank in layer.here() {
            let bytes: Vec<u8> = [0, 1].iter().flat_map(|&pass| layer.program(pass, rank)).collect();
            layer.memory(rank).device.make_current()?;
            layer.memory(rank).programs.write(&bytes)?;
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

    /// Builds the schedule: what every forward starts with. One step a GPU.
    pub fn schedule_on(&self, steps: &[DeviceStep]) -> Result<()> {
        self.check_whole()?;
        let steps = self.steps_at(steps);
        if !self.meets() {
            return self.here().try_for_each(|rank| self.launch_schedule(rank, &steps, &self.stream));
        }
        self.apart(&[&|rank| {
            self.meet(rank, false)?;
            self.launch_schedule(rank, &steps, &self.memory(rank).stream)?;
            self.meet(rank, true)
        }])
    }

    fn launch_schedule(&self, rank: usize, steps: &[StepAt], stream: &Stream) -> Result<()> {
        let seat = self.seat(rank);
        let local = self.experts() + usize::from(self.shape.shared.is_some());
        let p = self.schedule_parameter(rank, steps);
        // SAFETY: the parameters are laid out as `GatherParams` and `ScheduleParams`, and the buffers live as long as
        // `self` and the steps.
        unsafe {
            if let Some([_, gather]) = &seat.meeting {
                gather.launch(GATHER_CTAS, GATHER_THREADS, stream, &self.gather_parameter(rank, steps))?;
            }
            seat.count.launch(self.shape.experts as u32, SCHEDULE_THREADS, stream, &p)?;
            seat.place.launch(local as u32, SCHEDULE_THREADS, stream, &p)
        }
    }

    /// Schedule and forward: `step.y`. Asynchronous in [`CudaLayer::stream`].
    pub fn forward(&self, step: &DeviceStep, weights: &DeviceWeights) -> Result<()> {
        self.forward_on(from_ref(step), from_ref(weights))
    }

    /// The same for ranks with a GPU each.
    pub fn forward_on(&self, steps: &[DeviceStep], weights: &[DeviceWeights]) -> Result<()> {
        self.check_whole()?;
        self.check::<f32>(steps, weights, None)?;
        self.forward_with(steps, weights, Copies::default())
    }

    /// The forward of a rank whose others are processes: all make the same passes in the same order, one after the other, and
    /// each in its symmetric memory. See [`CudaLayer::of_process`].
    pub fn forward_in(
        &mut self,
        memory: &SymmetricMemory,
        step: &DeviceStep,
        weights: &DeviceWeights,
    ) -> Result<()> {
        self.reach(memory)?;
        let (steps, weights) = (from_ref(step), from_ref(weights));
        self.check::<f32>(steps, weights, None)?;
        let (mut copies, staged) = (Copies::default(), self.staged(self.first)?);
        copies.before.extend([
            copied(&staged.x, &step.x),
            copied(&staged.ids, &step.ids),
            copied(&staged.topk_weights, &step.topk_weights),
        ]);
        copies.after.extend(self.own_gates.as_ref().map(|own| copied(own, self.gates())));
        self.forward_with(steps, weights, copies)
    }

    fn forward_with(&self, steps: &[DeviceStep], weights: &[DeviceWeights], copies: Copies) -> Result<()> {
        let call = Call {
            steps: self.steps_at(steps),
            weights: self.weights_at(weights),
            gradients: vec![MatricesAt::default(); self.ranks.len()],
            accumulate: false,
            copies,
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
        self.check_whole()?;
        self.check(steps, weights, Some(gradients))?;
        let at = |(seat, experts): (usize, usize)| {
            MatricesAt::of_gradients(&gradients[seat], &gradients[0], experts, &self.shape, self.gate_rows)
        };
        let call = Call {
            steps: self.steps_at(steps),
            weights: self.weights_at(weights),
            gradients: self.places(self.experts()).map(at).collect(),
            accumulate,
            copies: Copies::default(),
        };
        self.pass(1, &call)
    }

    /// The backward of [`CudaLayer::forward_in`], of the last one of this layer. The shared experts' gradients come out on
    /// every rank, with the same bits: where they accumulate, the sum starts from the first rank's.
    pub fn backward_in<T: GradientElement>(
        &mut self,
        memory: &SymmetricMemory,
        step: &DeviceStep,
        weights: &DeviceWeights,
        gradients: &DeviceGradients<T>,
        accumulate: bool,
    ) -> Result<()> {
        self.reach(memory)?;
        self.check(from_ref(step), from_ref(weights), Some(from_ref(gradients)))?;
        let (mut copies, staged) = (Copies::default(), self.staged(self.first)?);
        copies.before.push(copied(&staged.dy, &step.dy));
        if self.sizes.recomputes {
            copies.before.push(copied(&staged.x, &step.x));
        }
        copies.before.extend(self.own_gates.as_ref().map(|own| copied(self.gates(), own)));
        let mut at = MatricesAt::of_gradients(gradients, gradients, 0, &self.shape, self.gate_rows);
        if let (Some(own), Some(shape)) = (&gradients.shared, self.shape.shared) {
            let sums = self.staged(0)?;
            at.share(sums);
            let matrices = [&own.gate, &own.up, &own.down].into_iter().zip(&sums.shared);
            let mut pairs: Vec<_> = matrices.map(|(own, sum)| copied(own, sum)).collect();
            let gate = own.output_gate.as_ref().filter(|_| shape.output_gate);
            pairs.extend(gate.map(|own| copied(own, &sums.shared_output_gate)));
            if accumulate && self.first == 0 {
                let back = |c: &Copied| Copied { to: c.from, from: c.to, bytes: c.bytes };
                copies.before.extend(pairs.iter().map(back));
            }
            copies.after = pairs;
            copies.meet = true;
        }
        let call = Call {
            steps: self.steps_at(from_ref(step)),
            weights: self.weights_at(from_ref(weights)),
            gradients: vec![at],
            accumulate,
            copies,
        };
        self.pass(1, &call)
    }

    /// Waits for the passes, and says where one gave up. The next pass starts afresh. Of a rank whose others are processes
    /// that is said by [`SymmetricMemory::stall`] instead, and no pass may follow.
    ///
    /// # Errors
    /// [`kodkod_core::Error::Stalled`] with what each rank waited for, and which ranks had not pushed all their rows.
    pub fn finish(&self) -> Result<()> {
        self.seats[0].device.make_current()?;
        self.stream.synchronize()?;
        if self.is_process() {
            return Ok(());
        }
        let (mut stalls, mut pushed) = (Vec::new(), Vec::new());
        for rank in self.here() {
            let memory = self.memory(rank);
            memory.device.make_current()?;
            memory.stream.synchronize()?;
            let stall = self.reached[rank].words.stall(rank, self.limit)?;
            // What it was when the rank gave up, or is now.
            pushed.push(stall.as_ref().map(|s| s.1));
            stalls.extend(stall.map(|s| s.0));
        }
        if stalls.is_empty() {
            return self.seats[0].device.make_current();
        }
        let mut late = Vec::new();
        for rank in self.here() {
            let (memory, reached) = (self.memory(rank), &self.reached[rank]);
            memory.device.make_current()?;
            let blocks = memory.first_block.read()?.last().copied().unwrap_or(0);
            let all = blocks * self.shape.hidden.div_ceil(256) as u32;
            let pushed = pushed[rank].map_or_else(|| reached.counters.read().map(|c| c[1]), Ok)?;
            if pushed < all {
                late.push(format!("rank {rank} has pushed {pushed} of {all} tiles"));
            }
            reached.words.clear(&memory.stream)?;
        }
        if !late.is_empty() {
            let late = format!(" ({})", late.join(", "));
            stalls.iter_mut().for_each(|stall| stall.counter += &late);
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

    /// Records a forward, and a backward where there are gradients, to run many times with what the steps' buffers then hold.
    /// One of each a GPU.
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
        self.check_whole()?;
        for rank in self.here() {
            let (m, reached) = (self.memory(rank), &self.reached[rank]);
            m.device.make_current()?;
            for rows in [&m.x, &m.g, &m.u, &m.h, &m.dy, &m.dg, &m.du, &reached.combine] {
                rows.fill(0xff, &m.stream)?;
            }
            let values = [&m.d_w_parts, &reached.d_w, &reached.output_gates].into_iter();
            for values in values.chain(&m.carry).chain(&reached.shared_carry) {
                values.fill(0xff, &m.stream)?;
            }
            if let Some(routes) = &m.routes {
                routes.ids.fill(0xff, &m.stream)?;
                routes.factors.fill(0xff, &m.stream)?;
            }
            m.stream.synchronize()?;
        }
        self.seats[0].device.make_current()
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
        for rank in self.here() {
            let memory = self.memory(rank);
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

    /// Of each rank, in the passes since [`CudaLayer::clear_stamps`]: rows that it pulled from other ranks, and rows of theirs
    /// that it took from one that was here. Zeros unless the layer is traced.
    pub fn crossings(&self) -> Result<Vec<[u32; 2]>> {
        self.stream.synchronize()?;
        let of_rank = |memory: &Rank| match &memory.trace {
            Some(trace) => trace.stamped.read().map(|words| [words[1], words[2]]),
            None => Ok([0, 0]),
        };
        self.ranks.iter().map(of_rank).collect()
    }

    /// CTAs of a rank's passes.
    pub(crate) fn ctas(&self, rank: usize) -> usize {
        self.seat(rank).ctas as usize
    }

    /// Whether each rank has a seat of its own: they meet before and after a pass.
    fn meets(&self) -> bool {
        self.seats[0].meeting.is_some()
    }

    /// Whether the other ranks are processes.
    fn is_process(&self) -> bool {
        self.reached.first().is_none_or(|r| r.staged.is_some())
    }

    /// The ranks that are here.
    fn here(&self) -> Range<usize> {
        self.first..self.first + self.ranks.len()
    }

    /// Of a rank that is here.
    pub(crate) fn memory(&self, rank: usize) -> &Rank {
        &self.ranks[rank - self.first]
    }

    /// Experts of a rank.
    fn experts(&self) -> usize {
        self.shape.experts / self.tokens.len()
    }

    fn gates(&self) -> &Buffer<f32> {
        &self.reached[self.first].output_gates
    }

    /// Looks up what of each rank lies where in their symmetric memory.
    fn reach(&mut self, memory: &SymmetricMemory) -> Result<()> {
        if !self.is_process() || memory.rank() != self.first {
            let allowed = "it must be the rank of CudaLayer::of_process";
            return Err(kodkod_core::Error::invalid("rank of the memory", memory.rank(), allowed).into());
        }
        self.reached = memory.places(&self.shape, &self.sizes, &self.tokens, self.gradients)?;
        Ok(())
    }

    /// What a rank has staged.
    fn staged(&self, rank: usize) -> Result<&Staged> {
        let missing = || kodkod_core::Error::Internal(format!("nothing is staged for rank {rank}"));
        Ok(self.reached[rank].staged.as_ref().ok_or_else(missing)?)
    }

    /// Refuses a layer whose other ranks are processes: its passes need their memory.
    fn check_whole(&self) -> Result<()> {
        if self.is_process() {
            let allowed = "its passes are forward_in and backward_in, which take symmetric memory";
            return Err(kodkod_core::Error::invalid("layer", "a process's", allowed).into());
        }
        Ok(())
    }

    /// Of each rank: its seat, and how many ranks before it are on that, times `each`.
    fn places(&self, each: usize) -> impl Iterator<Item = (usize, usize)> {
        let ranks = move |(seat, s): (usize, &Seat)| (0..s.ranks.len()).map(move |r| (seat, r * each));
        self.seats.iter().enumerate().flat_map(ranks)
    }

    fn seat(&self, rank: usize) -> &Seat {
        &self.seats[if self.meets() { rank - self.first } else { 0 }]
    }

    fn steps_at(&self, steps: &[DeviceStep]) -> Vec<StepAt> {
        let first = |rank: usize| self.tokens[self.seat(rank).ranks.start..rank].iter().sum();
        let own = self.here().zip(self.places(0));
        let own = own.map(|(rank, (seat, _))| StepAt::new(&steps[seat], first(rank), &self.shape));
        // Of other processes, what they have staged.
        let mut all: Vec<_> =
            self.reached.iter().filter_map(|r| r.staged.as_ref()).map(StepAt::staged).collect();
        if all.is_empty() {
            return own.collect();
        }
        own.zip(&mut all[self.here()]).for_each(|(own, place)| *place = own);
        all
    }

    fn weights_at(&self, weights: &[DeviceWeights]) -> Vec<MatricesAt> {
        let at = |(seat, experts): (usize, usize)| {
            MatricesAt::of_weights(&weights[seat], experts, &self.shape, self.gate_rows)
        };
        self.places(self.experts()).map(at).collect()
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
            let experts = self.experts() * seat.ranks.len();
            let own = Shape { experts, ..self.shape.clone() };
            let tokens = self.tokens[seat.ranks.clone()].iter().sum();
            let fused = self.gate_rows != own.intermediate;
            check_part(&own, tokens, fused, &steps[at], &weights[at], gradients.map(|g| &g[at]))?;
        }
        Ok(())
    }

    fn pass(&self, pass: usize, call: &Call) -> Result<()> {
        // All are made before the first launch, so that no rank waits for one that failed, while the GPUs do what comes before.
        let parameters = OnceCell::new();
        let launch = |rank: usize| {
            let all = match parameters.get() {
                Some(all) => all,
                None => {
                    let made = self.here().map(|rank| self.pass_parameter(pass, rank, call));
                    let made = made.collect::<Result<Vec<_>>>()?;
                    parameters.get_or_init(|| made)
                }
            };
            let (seat, stream) = (self.seat(rank), &self.memory(rank).stream);
            // SAFETY: the parameter is laid out as `PassParams`, and the buffers live as long as `self` and the arguments.
            unsafe { seat.passes[pass].launch(seat.ctas, THREADS, stream, &all[rank - self.first]) }
        };
        if self.meets() {
            let before = |rank: usize| {
                let stream = &self.memory(rank).stream;
                self.reached[rank].counters.fill(0, stream)?;
                copy_all(&call.copies.before, stream)?;
                self.meet(rank, false)?;
                if pass == 0 { self.launch_schedule(rank, &call.steps, stream) } else { Ok(()) }
            };
            let after = |rank: usize| {
                launch(rank)?;
                self.meet(rank, true)?;
                copy_all(&call.copies.after, &self.memory(rank).stream)?;
                if call.copies.meet { self.meet(rank, true) } else { Ok(()) }
            };
            return self.apart(&[&before, &after]);
        }
        if pass == 0 {
            self.here().try_for_each(|rank| self.launch_schedule(rank, &call.steps, &self.stream))?;
        }
        for reached in &self.reached {
            reached.counters.fill(0, &self.stream)?;
        }
        self.apart(&[&launch])
    }

    /// Work of each rank, in its own stream and on its own GPU, after what is in the layer's stream; what follows there
    /// comes after the work of all. Of several works, the first is queued for all ranks before the next is: ranks wait for
    /// each other.
    fn apart(&self, works: &[&dyn Fn(usize) -> Result<()>]) -> Result<()> {
        self.scheduled.record(&self.stream)?;
        for rank in self.here() {
            let memory = self.memory(rank);
            memory.device.make_current()?;
            memory.stream.wait(&self.scheduled)?;
        }
        for work in works {
            for rank in self.here() {
                self.memory(rank).device.make_current()?;
                work(rank)?;
            }
        }
        for rank in self.here() {
            let memory = self.memory(rank);
            memory.device.make_current()?;
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
        unsafe { meet.launch(1, MEET_THREADS, &self.memory(rank).stream, &p) }
    }
}

/// All of a buffer to another, of the same bytes.
fn copied<A: Copy, B: Copy>(to: &Buffer<A>, from: &Buffer<B>) -> Copied {
    let bytes = from.len() * size_of::<B>();
    assert_eq!(bytes, to.len() * size_of::<A>(), "buffers of the same size");
    Copied { to: to.address(), from: from.address(), bytes }
}

fn copy_all(copies: &[Copied], stream: &Stream) -> Result<()> {
    copies.iter().try_for_each(|c| {
        // SAFETY: both are buffers of so many bytes, which live as long as the layer and the arguments of its passes.
        unsafe { driver::copy(c.to, c.from, c.bytes, stream) }
    })
}

pub(crate) const KINDS: [&str; 13] = [
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
