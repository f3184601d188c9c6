//! Ranks that are processes with a GPU each. On the host they meet, agree and fail together in a shared file, as the CPU's do
//! (`kodkod_cpu::Processes`); on the GPUs their kernels reach each other's memory, which CUDA IPC maps, or the caller's code
//! (`PeerAllocator`).
//!
//! ```text
//! agree      each rank says what its call is, and which buffers it has; all see the same
//! make room  where a rank has none of that size: allocate, compile, map
//! launch     the ranks' kernels meet each other; the host goes on
//! finish     waits, and looks whether the others live
//! ```

use std::any::Any;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use half::bf16;
use kodkod_core::schedule::experts_per_rank;
use kodkod_core::{
    Error, GradientElement, Knobs, Precision, Result, Routing, Shape, WeightGradients, Weights,
};
use kodkod_cpu::{Facts, Fault, Processes, facts};
use kodkod_cuda::caller::free_and_total;
use kodkod_cuda::driver::{Device, Event, Stream};
use kodkod_cuda::{
    CudaLayer, DeviceGradients, DeviceStep, DeviceWeights, MOST_RANKS, PeerAllocator, SymmetricMemory,
    check_part, new_gradients,
};

use crate::cuda_layer::{MOST_HELD, lock};
use crate::group::{ExpertGroup, Machine};

/// How a group of processes with a GPU each runs.
#[derive(Debug, Clone, PartialEq)]
pub struct CudaOptions {
    /// How long a rank waits for others: when they meet, to begin a call, and for a counter in a pass.
    pub wait_limit: Duration,
}

impl Default for CudaOptions {
    fn default() -> Self {
        CudaOptions { wait_limit: Duration::from_secs(60) }
    }
}

/// How often a rank that waits for its GPU looks whether the others live.
const TICK: Duration = Duration::from_millis(20);
/// How long a process may take to die, or kernels to notice that they are to give up.
const GRACE: Duration = Duration::from_secs(3);
/// When the ranks meet that have mapped each other's memory.
const MAPPING: &str = "the mapping of symmetric memory";
/// Symmetric memory grows by so many bytes.
const STEP: usize = 32 << 20;

/// One rank of a group of processes, and its GPU.
pub(crate) struct CudaProcess {
    state: Mutex<State>,
    rank: usize,
    ranks: usize,
    /// How many of the ranks are on this GPU.
    sharing: usize,
    wait_limit: Duration,
    pub(crate) device: Arc<Device>,
    /// Where symmetric memory comes from.
    pub(crate) source: Arc<dyn PeerAllocator>,
    /// Bytes of this GPU that the group holds, and the most it held.
    bytes: [AtomicUsize; 2],
}

struct State {
    processes: Processes,
    /// Mapped by all.
    memory: Option<SymmetricMemory>,
    /// Passes of CUDA graphs use it.
    captured: bool,
    /// The capture that had the last captured pass.
    capture: u64,
    /// What became too small, and graphs use.
    outgrown: Vec<SymmetricMemory>,
    /// What a caller's stream had before the last pass.
    before: Event,
    /// The last pass.
    last: Event,
    /// The last pass that was captured: what waits for it is in that capture too.
    last_captured: Event,
}

impl CudaProcess {
    pub(crate) fn join(
        rank: usize,
        ranks: usize,
        name: &str,
        device: usize,
        options: &CudaOptions,
        source: Arc<dyn PeerAllocator>,
    ) -> Result<Self> {
        if ranks == 0 || ranks > MOST_RANKS {
            return Err(Error::invalid("ranks", ranks, format!("1 to {MOST_RANKS} are allowed on GPUs")));
        }
        let mut processes = Processes::join(rank, ranks, name, options.wait_limit)?;
        // Only now, so that the others hear of it.
        let open = || -> kodkod_cuda::Result<_> {
            let device = Device::new(device)?;
            let uuid = device.uuid()?;
            Ok((device, uuid, [Event::new()?, Event::new()?, Event::new()?]))
        };
        let opened = open().map_err(Error::from);
        let (own, uuid) = (opened.as_ref().map(|_| 0), opened.as_ref().map_or("", |o| &o.1[..]));
        let facts = vec![("memory", source.name().to_owned())];
        let said = processes.agree("the choice of GPUs", own, uuid, &facts);
        let (_, said) = processes.settle(said)?;
        let (device, uuid, [before, last, last_captured]) = opened?;
        let sharing = said.iter().filter(|&other| *other == uuid).count();
        let (memory, outgrown) = (None, Vec::new());
        let (captured, capture) = (false, 0);
        let state = State { processes, memory, captured, capture, outgrown, before, last, last_captured };
        let state = Mutex::new(state);
        let (wait_limit, bytes) = (options.wait_limit, Default::default());
        Ok(CudaProcess { state, rank, ranks, sharing, wait_limit, device, source, bytes })
    }

    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn ranks(&self) -> usize {
        self.ranks
    }

    pub(crate) fn memory(&self) -> (usize, usize) {
        let [now, most] = &self.bytes;
        (now.load(Ordering::Relaxed), most.load(Ordering::Relaxed))
    }

    fn count(&self, bytes: usize) {
        let [now, most] = &self.bytes;
        most.fetch_max(now.fetch_add(bytes, Ordering::Relaxed) + bytes, Ordering::Relaxed);
    }

    pub(crate) fn refuse(&self, why: Error) -> Error {
        lock(&self.state).processes.refuse(why)
    }

    /// One call of the group, unless it is broken.
    fn call<R>(&self, call: impl FnOnce(&mut State) -> Result<R, Fault>) -> Result<R> {
        let mut state = lock(&self.state);
        state.processes.usable()?;
        let outcome = call(&mut state);
        if matches!(outcome, Err(Fault::Broken(_))) {
            state.give_up();
        }
        state.processes.settle(outcome)
    }

    fn finish(&self) -> Result<()> {
        self.call(|state| {
            self.wait(state)?;
            let graphs = state.captured || !state.outgrown.is_empty();
            if graphs {
                // They may have run in any stream.
                state.processes.sound()?;
                self.device.synchronize().map_err(|e| self.lost(state, &e))?;
            }
            for memory in state.memories() {
                let stall = memory.stall(self.wait_limit).map_err(|e| self.lost(state, &e))?;
                if let Some(stall) = stall {
                    // That a rank is dead explains why another waited for it. No rank counts the passes of graphs.
                    let sound = match graphs {
                        true => state.processes.all_live("a pass of a CUDA graph was done"),
                        false => state.processes.sound(),
                    };
                    return sound.and(Err(state.processes.stalled(&stall)));
                }
            }
            state.processes.pass_done();
            Ok(())
        })
    }

    /// Waits for the last pass, and looks whether the others live.
    fn wait(&self, state: &State) -> Result<(), Fault> {
        let start = Instant::now();
        let mut looked = start;
        self.device.make_current().map_err(|e| self.lost(state, &e))?;
        while !state.last.is_done().map_err(|e| self.lost(state, &e))? {
            if looked.elapsed() >= TICK {
                looked = Instant::now();
                state.processes.sound()?;
            }
            match start.elapsed() < Duration::from_micros(200) {
                true => std::hint::spin_loop(),
                false => std::thread::sleep(Duration::from_micros(20)),
            }
        }
        Ok(())
    }

    /// The driver failed. Where a rank has died, with the memory that this one's kernels reach, that is why.
    fn lost(&self, state: &State, error: &kodkod_cuda::Error) -> Fault {
        match self.within_grace(|| state.processes.sound()) {
            Err(fault) => fault,
            Ok(()) => state.processes.fail(&format!("rank {}: {error}", self.rank)),
        }
    }

    /// The others' memory was not mapped, or that of the rank `other`: as above.
    fn unreached(&self, state: &State, other: Option<usize>, error: &kodkod_cuda::Error) -> Fault {
        match self.within_grace(|| state.processes.all_live(MAPPING)) {
            Err(fault) => fault,
            Ok(()) => state.processes.fail(&unreached(self.rank, other, error)),
        }
    }

    /// Looks for as long as a process may take to die.
    fn within_grace(&self, sound: impl Fn() -> Result<(), Fault>) -> Result<(), Fault> {
        let end = Instant::now() + GRACE;
        while Instant::now() < end && self.ranks > 1 {
            sound()?;
            std::thread::sleep(TICK);
        }
        Ok(())
    }
}

fn unreached(rank: usize, other: Option<usize>, why: &kodkod_cuda::Error) -> String {
    let other = other.map_or("the other ranks".into(), |other| format!("rank {other}"));
    format!(
        "rank {rank} cannot reach the memory of {other}: {why} (their GPUs need peer access, NVLink; containers, the same \
         namespaces of IPC and PIDs, and the same folder for temporary files)"
    )
}

impl State {
    fn memories(&self) -> impl Iterator<Item = &SymmetricMemory> {
        self.memory.iter().chain(&self.outgrown)
    }

    /// Stops the kernels of this rank that wait, so that the GPU is idle.
    fn give_up(&self) {
        // Where even this fails there is nothing to stop.
        let stopped = self.memories().filter(|memory| memory.abort().is_ok()).count() > 0;
        let end = Instant::now() + GRACE;
        while stopped && matches!(self.last.is_done(), Ok(false)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for CudaProcess {
    fn drop(&mut self) {
        // The others need this rank until its passes have ended. What went wrong, a call has told or nobody asks.
        let _ = self.finish();
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let memories = state.memory.take().into_iter().chain(state.outgrown.drain(..));
        let own: Vec<_> = memories.map(SymmetricMemory::unmap).collect();
        if !own.is_empty() {
            // Nobody's memory is freed while another has it mapped, unless that one takes too long.
            state.processes.leave(GRACE);
            drop(own);
        }
    }
}

/// One rank's part of a layer in a group of processes with a GPU each ([`ExpertGroup::cuda_ipc`]), for rows, weights and
/// gradients that are on its GPU already; else as [`RankLayer`](crate::RankLayer). Its calls return when the work is
/// queued. They run one after the other, whichever streams they are called with.
///
/// All ranks make the same calls in the same order; a call waits on the host until all ranks have made it.
///
/// **CUDA graphs.** Where the stream is captured, so is the pass, on all ranks alike, with the sizes of a pass that ran before: nothing
/// is allocated then. From then on the layer takes forwards of that capture alone. All ranks launch their graphs in the same order as
/// their other passes, and in one stream, or streams that wait for each other; the kernels wait for those of the other ranks,
/// for `wait_limit` at most, and [`DeviceRankLayer::finish`] tells of it.
pub struct DeviceRankLayer {
    /// The last used first.
    held: Mutex<Vec<Held>>,
    group: Arc<CudaProcess>,
    shape: Shape,
    knobs: Knobs,
    own_experts: Shape,
    fused: bool,
    /// The capture whose forwards alone it takes; 0: of none yet.
    captured: AtomicU64,
}

/// Kernels and buffers for one split of tokens.
struct Held {
    tokens: Vec<usize>,
    layer: CudaLayer,
    /// The forward whose rows are in the buffers.
    forward: Option<u64>,
    /// As the driver's count of free memory told.
    bytes: usize,
    group: Arc<CudaProcess>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.group.bytes[0].fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Which forward a backward belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceContext {
    forward: u64,
    tokens: usize,
}

impl DeviceContext {
    /// Tokens of this rank.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

impl DeviceRankLayer {
    /// This rank's part of a layer of `shape`, which counts the experts of all ranks.
    ///
    /// # Errors
    /// [`Error::Invalid`] where a size or a knob is not allowed on a GPU, the ranks do not divide the experts, or the group is
    /// not one of [`ExpertGroup::cuda_ipc`] or [`ExpertGroup::cuda_processes`]; [`Error::Machine`] where it is broken.
    pub fn new(group: &ExpertGroup, shape: Shape, knobs: Knobs) -> Result<Self> {
        Self::build(group, shape, knobs, false)
    }

    /// The same, where an expert's gate and up lie together in this rank's weights and in their gradients, as in
    /// [`CudaLayer::fused`]. The ranks need not have that alike.
    ///
    /// # Errors
    /// As for [`DeviceRankLayer::new`].
    pub fn fused(group: &ExpertGroup, shape: Shape, knobs: Knobs) -> Result<Self> {
        Self::build(group, shape, knobs, true)
    }

    fn build(group: &ExpertGroup, shape: Shape, knobs: Knobs, fused: bool) -> Result<Self> {
        let Machine::CudaProcess(group) = group.machine() else {
            let allowed = "one of ExpertGroup::cuda_ipc is needed";
            return Err(Error::invalid("group", "of another kind", allowed));
        };
        lock(&group.state).processes.usable()?;
        CudaLayer::defines(&shape, &knobs, &vec![0; group.ranks], Precision::F32)?;
        let own_experts = Shape { experts: experts_per_rank(&shape, group.ranks)?, ..shape.clone() };
        let (held, captured, group) = (Mutex::default(), AtomicU64::new(0), group.clone());
        Ok(DeviceRankLayer { held, group, shape, knobs, own_experts, fused, captured })
    }

    /// The shape with this rank's experts alone: that of its weights and their gradients.
    pub fn own_experts(&self) -> &Shape {
        &self.own_experts
    }

    /// The GPU.
    pub fn device(&self) -> &Arc<Device> {
        &self.group.device
    }

    /// The number of the CUDA graph's capture that it belongs to, if it does ([`Stream::capture`]).
    pub fn captured(&self) -> Option<u64> {
        Some(self.captured.load(Ordering::Acquire)).filter(|&id| id != 0)
    }

    /// `step.y` for this rank's `step.x`, ids and router weights, after what is in `stream`, which goes on when it is done.
    /// `gradients`: what the backward will store gradients in; where it stores them in another type, the forward runs again.
    /// The step's buffers are all there, also those that a forward does not touch.
    ///
    /// # Errors
    /// As for [`RankLayer::forward`](crate::RankLayer::forward), but that ids are not looked at. What goes wrong on the GPUs
    /// is an error of [`DeviceRankLayer::finish`], or of a later call.
    pub fn forward(
        &self,
        step: &DeviceStep,
        weights: &DeviceWeights,
        gradients: Precision,
        stream: &Stream,
    ) -> Result<DeviceContext> {
        let own = self.check::<f32>(step, weights, None).and_then(|tokens| {
            let capture = self.capture_of(stream)?;
            match self.captured() {
                Some(other) if other != capture => {
                    let allowed = "the buffers are a CUDA graph's, and only forwards of its capture are";
                    Err(Error::invalid("layer", "captured", allowed))
                }
                _ => Ok((tokens, capture)),
            }
        });
        let facts = self.facts("forward".into(), gradients, &own);
        self.group.call(|state| {
            let mut all = lock(&self.held);
            let ready = self.ready(state, &mut all, "a forward", own.as_ref().copied(), &facts, gradients)?;
            let (held, forward) = (ready.held, ready.call);
            let (tokens, capture) = own.map_err(Fault::Refused)?;
            held.forward = None;
            self.launch(state, held, stream, capture, "a forward", |held, memory| {
                held.layer.forward_in(memory, step, weights)
            })?;
            held.forward = Some(forward);
            Ok(DeviceContext { forward, tokens })
        })
    }

    /// `step.dx`, `step.d_topk_weights` and `gradients`, those of this rank's experts and the shared experts', for the
    /// `step.dy` of a forward's step and weights. Where another forward of this layer came between, the forward runs again
    /// first, and writes `step.y` again, with the same bits.
    ///
    /// The shared experts' gradients come out whole on every rank: see [`RankLayer::backward`](crate::RankLayer::backward).
    ///
    /// # Errors
    /// As for [`DeviceRankLayer::forward`].
    pub fn backward<G: GradientElement>(
        &self,
        context: &DeviceContext,
        step: &DeviceStep,
        weights: &DeviceWeights,
        gradients: &DeviceGradients<G>,
        accumulate: bool,
        stream: &Stream,
    ) -> Result<()> {
        let own =
            self.check(step, weights, Some(gradients)).and_then(|tokens| match tokens == context.tokens {
                true => Ok((tokens, self.capture_of(stream)?)),
                false => {
                    let allowed = format!("the forward had {}", context.tokens);
                    Err(Error::invalid("tokens", tokens, allowed))
                }
            });
        let mut facts = self.facts(format!("backward of call {}", context.forward), G::PRECISION, &own);
        facts.push(("accumulate", accumulate.to_string()));
        self.group.call(|state| {
            let mut all = lock(&self.held);
            let ready =
                self.ready(state, &mut all, "a backward", own.as_ref().copied(), &facts, G::PRECISION)?;
            let (held, again) = (ready.held, ready.forwards.iter().any(|f| *f != Some(context.forward)));
            let (_, capture) = own.map_err(Fault::Refused)?;
            held.forward = None;
            self.launch(state, held, stream, capture, "a backward", |held, memory| {
                if again {
                    held.layer.forward_in(memory, step, weights)?;
                }
                held.layer.backward_in(memory, step, weights, gradients, accumulate)
            })?;
            held.forward = Some(context.forward);
            Ok(())
        })
    }

    /// Waits until the group's passes are done on this GPU, those of other layers too, and the GPU's graphs.
    ///
    /// # Errors
    /// [`Error::Machine`] that names a rank which died or left, or why a GPU failed; [`Error::Stalled`] where a rank waited
    /// for longer than the limit. The group is broken then, on all ranks.
    pub fn finish(&self) -> Result<()> {
        self.group.finish()
    }

    fn check<G: GradientElement>(
        &self,
        step: &DeviceStep,
        weights: &DeviceWeights,
        gradients: Option<&DeviceGradients<G>>,
    ) -> Result<usize> {
        let tokens = step.ids.len() / self.shape.top_k;
        check_part(&self.own_experts, tokens, self.fused, step, weights, gradients)?;
        Ok(tokens)
    }

    /// The capture that a stream records into, or 0.
    fn capture_of(&self, stream: &Stream) -> Result<u64> {
        self.group.device.make_current()?;
        Ok(stream.capture()?.unwrap_or(0))
    }

    fn facts(&self, pass: String, gradients: Precision, own: &Result<(usize, u64)>) -> Facts {
        let mut facts = facts("CUDA", pass, Precision::Bf16, &self.shape, &self.knobs);
        facts.push(("gradients", gradients.to_string()));
        facts.push(("capture in a CUDA graph", own.as_ref().is_ok_and(|own| own.1 != 0).to_string()));
        facts
    }

    /// Agrees on a call, and sees that every rank has kernels and buffers for it.
    fn ready<'a>(
        &self,
        state: &mut State,
        all: &'a mut Vec<Held>,
        what: &str,
        own: Result<(usize, u64), &Error>,
        facts: &Facts,
        gradients: Precision,
    ) -> Result<Ready<'a>, Fault> {
        let split = |tokens: &[usize]| format!("{tokens:?}");
        // Which splits this rank has buffers for, and which forward is in them.
        let of_type = |held: &&Held| held.layer.gradients() == gradients;
        let name = |held: &Held| format!("{}:{}", split(&held.tokens), held.forward.unwrap_or(0));
        let has = all.iter().filter(of_type).map(name).collect::<Vec<_>>().join(";");
        let (tokens, have) = state.processes.agree(what, own.map(|own| own.0), &has, facts)?;
        let call = state.processes.calls();
        let wanted = split(&tokens);
        let forwards: Vec<_> = have
            .iter()
            .map(|has| {
                let mut pairs = has.split(';').filter_map(|pair| pair.split_once(':'));
                pairs.find(|(split, _)| *split == wanted).and_then(|(_, forward)| forward.parse::<u64>().ok())
            })
            .collect();
        let bytes = SymmetricMemory::bytes_for(&self.shape, &self.knobs, &tokens, gradients);
        let bytes = bytes.map_err(|e| Fault::Refused(e.into()))?;
        // All ranks are in a capture, or none is.
        let captured = own.is_ok_and(|own| own.1 != 0);
        if forwards.iter().any(Option::is_none) || state.memory.as_ref().is_none_or(|m| m.bytes() < bytes) {
            if captured {
                return Err(Fault::Refused(Error::Machine(
                    "a CUDA graph is captured, and memory cannot be allocated for a pass of this size: run the same passes once \
                     before the capture, on all ranks"
                        .into(),
                )));
            }
            self.make_room(state, all, &tokens, gradients, bytes)?;
        }
        state.captured |= captured;
        match all.iter().position(|held| held.tokens == tokens && of_type(&held)) {
            Some(at) => all[..=at].rotate_right(1),
            None => return Err(state.processes.fail("internal error: no buffers for a call")),
        }
        Ok(Ready { held: &mut all[0], call, forwards })
    }

    /// Allocates and compiles what this rank lacks, and maps the others' memory anew where it has become too small. What
    /// fails on one rank refuses the call on all.
    fn make_room(
        &self,
        state: &mut State,
        all: &mut Vec<Held>,
        tokens: &[usize],
        gradients: Precision,
        bytes: usize,
    ) -> Result<(), Fault> {
        let group = &*self.group;
        group.wait(state)?;
        group.device.synchronize().map_err(|e| group.lost(state, &e))?;
        let grows = state.memory.as_ref().is_none_or(|memory| memory.bytes() < bytes);
        if grows && state.captured {
            state.captured = false;
            state.outgrown.extend(state.memory.take());
        } else if grows {
            let old = state.memory.take().map(|old| (old.bytes(), old.unmap()));
            // Before any rank frees what others had mapped.
            state.processes.meet(1, "the growth of symmetric memory")?;
            let freed = old.map_or(0, |old| old.0);
            group.bytes[0].fetch_sub(freed, Ordering::Relaxed);
        }
        let made = self.make(all, tokens, gradients, grows.then_some(bytes));
        let text = made.as_ref().map(|made| made.1.as_str());
        let said = state.processes.exchange("the growth of symmetric memory", text);
        if said.is_err() && state.memory.is_none() {
            // What graphs use is still there.
            state.memory = state.outgrown.pop();
            state.captured = state.memory.is_some();
        }
        let said = said?;
        let (memory, _) = made.map_err(Fault::Refused)?;
        let Some(mut memory) = memory else { return Ok(()) };
        if let Err((other, why)) = memory.map(&said) {
            return Err(group.unreached(state, other, &why));
        }
        state.processes.meet(1, MAPPING)?;
        group.count(memory.bytes());
        state.memory = Some(memory);
        Ok(())
    }

    /// Symmetric memory, if so many bytes are asked for, and what it takes to map it.
    fn make(
        &self,
        all: &mut Vec<Held>,
        tokens: &[usize],
        gradients: Precision,
        bytes: Option<usize>,
    ) -> Result<(Option<SymmetricMemory>, String)> {
        let group = &*self.group;
        if !all.iter().any(|held| held.tokens == tokens && held.layer.gradients() == gradients) {
            if self.captured().is_some() {
                let allowed = "its buffers are a CUDA graph's, and no others can take their place";
                return Err(Error::invalid("layer", "captured", allowed));
            }
            // Of a split of tokens only one is held.
            all.retain(|held| held.tokens != tokens);
            all.truncate(MOST_HELD - 1);
            let place = [group.rank, group.sharing];
            let (device, shape, knobs) = (&group.device, &self.shape, &self.knobs);
            device.make_current()?;
            let (free, _) = free_and_total()?;
            let mut layer =
                CudaLayer::of_process(device, place, shape, knobs, tokens, gradients, self.fused)?;
            layer.set_wait_limit(group.wait_limit);
            let bytes = free.saturating_sub(free_and_total()?.0);
            group.count(bytes);
            let group = self.group.clone();
            all.insert(0, Held { tokens: tokens.to_vec(), layer, forward: None, bytes, group });
        }
        let Some(bytes) = bytes else { return Ok((None, String::new())) };
        let bytes = bytes.next_multiple_of(STEP);
        let memory = SymmetricMemory::new(&*group.source, &group.device, group.rank, group.ranks, bytes)?;
        let exported = memory.export()?;
        Ok((Some(memory), exported))
    }

    /// Queues a pass after what is in a stream, and after the pass before it. In a `capture`, which is 0 where there is none, that is
    /// the one before it in the capture.
    fn launch(
        &self,
        state: &mut State,
        held: &mut Held,
        stream: &Stream,
        capture: u64,
        name: &'static str,
        work: impl FnOnce(&mut Held, &SymmetricMemory) -> kodkod_cuda::Result<()>,
    ) -> Result<(), Fault> {
        state.processes.begin(name);
        let Some(memory) = &state.memory else {
            return Err(state.processes.fail("internal error: no symmetric memory"));
        };
        let queue = || {
            self.group.device.make_current()?;
            state.before.record(stream)?;
            held.layer.stream().wait(&state.before)?;
            let end = match capture {
                0 => {
                    held.layer.stream().wait(&state.last)?;
                    &state.last
                }
                _ => {
                    if state.capture == capture {
                        held.layer.stream().wait(&state.last_captured)?;
                    }
                    let _ = self.captured.compare_exchange(0, capture, Ordering::AcqRel, Ordering::Relaxed);
                    &state.last_captured
                }
            };
            let outcome = work(held, memory);
            // Also after an error: a capture must end in the stream that it began in.
            outcome.and(end.record(held.layer.stream()).and_then(|()| stream.wait(end)))
        };
        queue().map_err(|e: kodkod_cuda::Error| self.group.lost(state, &e))?;
        if capture != 0 {
            state.capture = capture;
        }
        Ok(())
    }
}

/// What a call uses.
struct Ready<'a> {
    held: &'a mut Held,
    /// The call's number.
    call: u64,
    /// Of each rank, the forward in its buffers.
    forwards: Vec<Option<u64>>,
}

impl std::fmt::Debug for DeviceRankLayer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceRankLayer")
            .field("rank", &self.group.rank)
            .field("shape", &self.shape)
            .field("knobs", &self.knobs)
            .finish_non_exhaustive()
    }
}

/// The same for rows and weights that the caller has in the host's memory.
pub(crate) struct RankOnGpu {
    host: Mutex<Host>,
    layer: DeviceRankLayer,
}

/// Copies on the GPU.
#[derive(Default)]
struct Host {
    stream: Option<Stream>,
    step: Option<DeviceStep>,
    weights: Option<DeviceWeights>,
    /// [`DeviceGradients`] of the type below.
    gradients: Option<Box<dyn Any + Send>>,
    /// What the last backward stored gradients in.
    precision: Option<Precision>,
    /// The forward whose rows, routes and weights these are.
    forward: Option<u64>,
}

/// What a backward needs of its forward.
pub(crate) struct RankSavedOnGpu {
    context: DeviceContext,
    pub(crate) shape: Shape,
    /// Of one rank, this one.
    pub(crate) routing: Routing,
}

impl RankOnGpu {
    pub(crate) fn new(group: &ExpertGroup, shape: &Shape, knobs: &Knobs) -> Result<Self> {
        let layer = DeviceRankLayer::new(group, shape.clone(), *knobs)?;
        Ok(RankOnGpu { host: Mutex::default(), layer })
    }

    pub(crate) fn rank(&self) -> usize {
        self.layer.group.rank
    }

    pub(crate) fn refuse(&self, why: Error) -> Error {
        self.layer.group.refuse(why)
    }

    pub(crate) fn forward<I: Copy + Into<i64>>(
        &self,
        x: &[bf16],
        ids: &[I],
        topk_weights: &[f32],
        weights: &Weights<bf16>,
    ) -> Result<(Vec<bf16>, RankSavedOnGpu)> {
        let (layer, mut host) = (&self.layer, lock(&self.host));
        let shape = &layer.shape;
        let put = |host: &mut Host| -> Result<Routing> {
            let tokens = ids.len() / shape.top_k;
            let routing = Routing::new(shape, ids, topk_weights, &[tokens])?;
            Error::check_len("x", x.len(), &[("tokens", tokens), ("hidden", shape.hidden)])?;
            weights.validate(&layer.own_experts)?;
            host.put(layer, x, &routing, weights)?;
            Ok(routing)
        };
        let routing = put(&mut host).map_err(|e| self.refuse(e))?;
        let (step, on_gpu, stream) = host.parts()?;
        let precision = host.precision.unwrap_or(Precision::F32);
        let context = layer.forward(step, on_gpu, precision, stream)?;
        layer.finish()?;
        let y = step.y.read()?;
        host.forward = Some(context.forward);
        Ok((y, RankSavedOnGpu { context, shape: shape.clone(), routing }))
    }

    pub(crate) fn backward<G: GradientElement>(
        &self,
        saved: &RankSavedOnGpu,
        dy: &[bf16],
        x: &[bf16],
        weights: &Weights<bf16>,
        gradients: WeightGradients<&mut [G], &mut [f32]>,
        accumulate: bool,
    ) -> Result<(Vec<bf16>, Vec<f32>)> {
        let (layer, mut host) = (&self.layer, lock(&self.host));
        let put = |host: &mut Host| -> Result<()> {
            let dims = [("tokens", saved.context.tokens), ("hidden", layer.shape.hidden)];
            Error::check_len("x", x.len(), &dims)?;
            Error::check_len("dy", dy.len(), &dims)?;
            weights.validate(&layer.own_experts)?;
            gradients.validate(&layer.own_experts)?;
            if host.forward != Some(saved.context.forward) {
                host.put(layer, x, &saved.routing, weights)?;
            }
            layer.device().make_current()?;
            host.parts()?.0.dy.write(dy)?;
            if !host.gradients.as_ref().is_some_and(|g| g.is::<DeviceGradients<G>>()) {
                host.gradients = Some(Box::new(new_gradients::<G>(&layer.own_experts)?));
            }
            Ok(())
        };
        put(&mut host).map_err(|e| self.refuse(e))?;
        let on_gpu = host.gradients.as_ref().and_then(|g| g.downcast_ref::<DeviceGradients<G>>());
        let on_gpu = on_gpu.expect("made of this type");
        let (matrices, rest) = gradients.into_parts();
        let (matrices_there, rest_there) = on_gpu.as_ref().into_parts();
        let mut matrices: Vec<_> = matrices_there.into_iter().zip(matrices).collect();
        let mut rest: Vec<_> = rest_there.into_iter().zip(rest).collect();
        if accumulate {
            let written = matrices.iter().try_for_each(|(buffer, host)| buffer.write(host));
            let written =
                written.and_then(|()| rest.iter().try_for_each(|(buffer, host)| buffer.write(host)));
            written.map_err(|e| self.refuse(e.into()))?;
        }
        let (step, on_gpu_weights, stream) = host.parts()?;
        layer.backward(&saved.context, step, on_gpu_weights, on_gpu, accumulate, stream)?;
        layer.finish()?;
        matrices.iter_mut().try_for_each(|(buffer, host)| buffer.read_into(host))?;
        rest.iter_mut().try_for_each(|(buffer, host)| buffer.read_into(host))?;
        let outputs = (step.dx.read()?, step.d_topk_weights.read()?);
        (host.precision, host.forward) = (Some(G::PRECISION), Some(saved.context.forward));
        Ok(outputs)
    }
}

impl Host {
    /// Copies a step and weights there.
    fn put(
        &mut self,
        layer: &DeviceRankLayer,
        x: &[bf16],
        routing: &Routing,
        weights: &Weights<bf16>,
    ) -> Result<()> {
        self.forward = None;
        layer.device().make_current()?;
        if self.stream.is_none() {
            self.stream = Some(Stream::new()?);
        }
        match &self.step {
            Some(step) if step.x.len() == x.len() => {
                step.x.write(x)?;
                step.ids.write(routing.ids())?;
                step.topk_weights.write(routing.weights())?;
            }
            // A dy comes with the backward.
            _ => {
                let (ids, topk_weights) = (routing.ids(), routing.weights());
                self.step = Some(DeviceStep::new(&layer.own_experts, x, x, ids, topk_weights)?);
            }
        }
        match &self.weights {
            Some(on_gpu) => Ok(on_gpu.write(weights)?),
            None => {
                self.weights = Some(DeviceWeights::from_host(weights)?);
                Ok(())
            }
        }
    }

    fn parts(&self) -> Result<(&DeviceStep, &DeviceWeights, &Stream)> {
        match (&self.step, &self.weights, &self.stream) {
            (Some(step), Some(weights), Some(stream)) => Ok((step, weights, stream)),
            _ => Err(Error::Internal("nothing was copied to the GPU".into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_out_of_reach_names_the_ranks() {
        let refused = kodkod_cuda::Error::Driver { what: "map memory".into(), text: "invalid".into() };
        for (other, named) in [(Some(2), "rank 2"), (None, "the other ranks")] {
            let text = unreached(1, other, &refused);
            println!("{text}");
            let begin = format!("rank 1 cannot reach the memory of {named}: could not map memory: invalid (");
            assert!(text.starts_with(&begin), "{text}");
        }
    }

    /// Before any GPU is looked for.
    #[test]
    fn arguments_out_of_range_are_named() {
        let join = |rank, ranks, name: &str, wait_limit| {
            let group = ExpertGroup::cuda_ipc(rank, ranks, name, 0, CudaOptions { wait_limit });
            let error = group.map(drop).unwrap_err().to_string();
            println!("{error}");
            error
        };
        let second = Duration::from_secs(1);
        assert_eq!(join(0, 0, "a", second), "ranks is 0: 1 to 8 are allowed on GPUs");
        assert_eq!(join(0, 9, "a", second), "ranks is 9: 1 to 8 are allowed on GPUs");
        assert_eq!(join(2, 2, "a", second), "rank is 2: 0 to 1 are allowed");
        assert_eq!(join(0, 2, "", second), "name is \"\": 1 to 200 bytes without NUL are needed");
        assert_eq!(join(0, 2, "a", Duration::ZERO), "wait_limit is 0: a positive time is needed");
    }
}
