//! A group in which each process of one host is a rank, with its own tokens and its own experts' weights.
//!
//! A call runs the same program and tasks as virtual ranks do, those of one rank. What others address lies in a file
//! that all map ([`link`]): rows of x and dy, copied there from the caller's; the slots that results are pushed to;
//! counters; expert ids and router weights; the shared experts' gradients. Weights and all else are private.
//!
//! ```text
//! announce   each rank says what its call is, and all see whether they agree
//! fill       each copies its rows, ids and weights to the file, and zeroes its counters
//! meet
//! pass       pulls, GEMMs, pushes: ranks wait for each other's counters alone
//! meet       only where shared experts have gradients: then each reads the sum
//! ```
//!
//! A rank writes to its part of the file only after all have announced the next call: by then none reads it any more.

mod agreement;
mod link;
mod os;
mod plan;

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kodkod_core::program::{Pass, Program};
use kodkod_core::schedule::experts_per_rank;
use kodkod_core::{
    Error, GradientElement, Knobs, Result, Routing, Schedule, Shape, SharedWeights, WeightGradients, Weights,
};

pub use self::agreement::{Facts, Fault, Processes, facts};
use self::link::Broken;
pub(crate) use self::link::Link;
use self::plan::Plan;
use crate::gemm::Isa;
use crate::group::{Saved, round_into, sum_in_f32};
use crate::machine::{Call, Machine, Output};
use crate::memory::Arena;
use crate::pass::{Shared, Symmetric, TILES};
use crate::{CpuOptions, Element};

/// One rank of a group of processes, its threads, and the memory that it shares with the others.
pub struct ProcessGroup {
    rank: usize,
    options: CpuOptions,
    isa: Isa,
    threads: usize,
    arena: Arc<Arena>,
    /// Length of the file's data.
    file: AtomicUsize,
    state: Mutex<State>,
}

struct State {
    machine: Machine,
    processes: Processes,
}

/// What a forward of one rank leaves for its backward.
pub struct RankSaved<T> {
    saved: Saved<T>,
    rank: usize,
    /// The group's number of the forward.
    forward: u64,
}

impl<T> RankSaved<T> {
    /// The shape of the forward.
    pub fn shape(&self) -> &Shape {
        self.saved.shape()
    }

    /// Tokens of this rank.
    pub fn tokens(&self) -> usize {
        self.saved.routing().tokens_of(self.rank).len()
    }
}

impl ProcessGroup {
    /// Meets the other ranks, within `options.wait_limit`. `options.ranks` is not read; 0 threads are this rank's share of the
    /// cores.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an argument that is out of range; [`Error::Machine`] that names the ranks which did not come,
    /// or what they disagree in.
    pub fn join(rank: usize, ranks: usize, name: &str, options: CpuOptions) -> Result<Self> {
        let mut options = CpuOptions { ranks, ..options };
        let (isa, cores) = options.resolve()?;
        if options.threads == 0 {
            options.threads = (cores / ranks).max(1);
        }
        let threads = options.threads;
        let processes = Processes::join(rank, ranks, name, options.wait_limit)?;
        let arena = Arc::<Arena>::default();
        let machine = Machine::new(isa, threads, true, arena.clone())?;
        let state = Mutex::new(State { machine, processes });
        Ok(ProcessGroup { rank, options, isa, threads, arena, file: AtomicUsize::new(0), state })
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How this rank runs.
    pub fn options(&self) -> &CpuOptions {
        &self.options
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Worker threads of this rank.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Bytes of buffers that this rank and its contexts hold now, and the most they ever held; the shared file is
    /// counted in both, as a whole.
    pub fn memory(&self) -> (usize, usize) {
        let file = self.file.load(Ordering::Relaxed);
        let (now, most) = self.arena.bytes();
        (now + file, most + file)
    }

    /// Gives private memory that waits for reuse back to the system.
    pub fn trim(&self) {
        self.arena.trim();
    }

    /// `y` `[tokens, hidden]` of this rank's `x` `[tokens, hidden]`, `ids` and `topk_weights` `[tokens, top_k]`; `weights` are
    /// those of its own experts, `experts / ranks` of them, and the shared experts', which are the same on every rank.
    /// Shape and knobs are checked: see [`Shape::validate`]; all else is checked here.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::ExpertId`] or [`Error::Invalid`] for an argument that does not fit, here or on another
    /// rank, or ranks that disagree: on every rank, and the next call may be right. [`Error::Machine`] or
    /// [`Error::Stalled`] where a rank died, left or waited too long: so is every later call.
    pub fn forward<T: Element, I: Copy + Into<i64>>(
        &self,
        shape: &Shape,
        knobs: &Knobs,
        x: &[T],
        ids: &[I],
        topk_weights: &[f32],
        weights: &Weights<T>,
    ) -> Result<(Vec<T>, RankSaved<T>)> {
        let own = self.check_forward(shape, x, ids, topk_weights, weights);
        self.call(|state| {
            let facts = facts("CPU", "forward".into(), T::PRECISION, shape, knobs);
            let own_tokens = own.as_ref().map(Routing::tokens);
            let (tokens, _) = state.processes.agree("a forward", own_tokens, "", &facts)?;
            let own = own.map_err(Fault::Refused)?;
            let plan = Plan::new(Pass::Forward, shape, size_of::<T>(), &tokens);
            self.reserve(state, &plan)?;
            let place = &plan.ranks[self.rank];
            // SAFETY: this rank's part of the plan, which no other rank reads or writes before the meeting.
            unsafe {
                state.fill(place.x, x);
                state.fill(place.ids, own.ids());
                state.fill(place.topk_weights, own.weights());
                state.zero_counters(&plan, self.rank);
            }
            state.processes.meet(1, "the start of a forward")?;
            // SAFETY: every rank has filled its part, and none changes it during the pass.
            let (ids, topk_weights) = unsafe {
                let all = |at: fn(&plan::RankPlan) -> usize| {
                    tokens.iter().zip(&plan.ranks).map(move |(n, place)| (at(place), n * shape.top_k))
                };
                let ids: Vec<i32> =
                    all(|p| p.ids).flat_map(|(at, n)| state.read::<i32>(at, n).iter().copied()).collect();
                let topk_weights: Vec<f32> =
                    all(|p| p.topk_weights).flat_map(|(at, n)| state.read(at, n).iter().copied()).collect();
                (ids, topk_weights)
            };
            let routing = Routing::new(shape, &ids, &topk_weights, &tokens).map_err(Fault::Refused)?;
            let schedules: Vec<_> = (0..tokens.len())
                .map(|rank| {
                    let schedule = Schedule::new(shape, &routing, rank);
                    let sources = if rank == self.rank { schedule.sources } else { vec![] };
                    Schedule { sources, ..schedule }
                })
                .collect();
            let programs = Program::all(Pass::Forward, shape, knobs, &TILES, &routing, &schedules, false);
            let local = &programs[self.rank..=self.rank];
            let saved = Saved::new(&self.arena, shape, knobs, routing, schedules, local);
            let mut y = vec![T::default(); x.len()];
            state.machine.ring_holder = None;
            self.run(state, &saved, &programs, &plan, weights, &mut y, &mut [], None, false)?;
            state.machine.ring_holder = Some(saved.call);
            Ok((y, RankSaved { saved, rank: self.rank, forward: state.processes.calls() }))
        })
    }

    /// `dx` `[tokens, hidden]` and `d_topk_weights` `[tokens, top_k]` of this rank's tokens, for the `x` and weights of the
    /// forward that `saved` is from. `gradients` are those of this rank's own experts, and the shared experts'.
    ///
    /// The shared experts' gradients come out the same on every rank: the sum over all ranks' tokens, which is not to be
    /// reduced again. Where it accumulates, the sum starts from what rank 0 has there; the others' should be the same.
    ///
    /// # Errors
    /// As for [`ProcessGroup::forward`].
    pub fn backward<T: Element, G: GradientElement>(
        &self,
        saved: &RankSaved<T>,
        dy: &[T],
        x: &[T],
        weights: &Weights<T>,
        gradients: WeightGradients<&mut [G], &mut [f32]>,
        accumulate: bool,
    ) -> Result<(Vec<T>, Vec<f32>)> {
        let RankSaved { saved, forward, .. } = saved;
        let (shape, knobs, routing) = (&saved.shape, &saved.knobs, &saved.routing);
        let own = self.check_backward(saved, dy, x, weights, &gradients);
        self.call(|state| {
            let pass = format!("backward of call {forward}");
            let mut facts = facts("CPU", pass, T::PRECISION, shape, knobs);
            facts.push(("accumulate", accumulate.to_string()));
            let (tokens, _) = state.processes.agree("a backward", own.as_ref().copied(), "", &facts)?;
            own.map_err(Fault::Refused)?;
            let plan = Plan::new(Pass::Backward, shape, size_of::<T>(), &tokens);
            self.reserve(state, &plan)?;
            let place = &plan.ranks[self.rank];
            // SAFETY: this rank's part of the plan, which no other rank reads or writes before the meeting.
            unsafe {
                state.fill(place.x, x);
                state.fill(place.dy, dy);
                state.zero_counters(&plan, self.rank);
            }
            let WeightGradients { gate, up, down, biases, shared } = gradients;
            let mut shared = shared.zip(plan.shared).map(|(shared, places)| SharedSums { shared, places });
            if let Some(shared) = shared.as_mut().filter(|_| accumulate && self.rank == 0) {
                // SAFETY: rank 0 alone writes them before the meeting.
                unsafe { shared.put(state) };
            }
            state.processes.meet(1, "the start of a backward")?;
            let ring_holds = state.machine.ring_holder == Some(saved.call);
            let (pass, schedules) = (Pass::Backward, &saved.schedules);
            let programs = Program::all(pass, shape, knobs, &TILES, routing, schedules, ring_holds);
            let mut sums = Vec::new();
            let own_gradients = WeightGradients { gate, up, down, biases, shared: None };
            let mut sums_of = own_gradients.map(
                |gradient| sum_in_f32(gradient, accumulate, &mut sums),
                |rest: &mut [f32]| Shared(rest.as_mut_ptr()),
            );
            sums_of.shared = shared.as_ref().map(|shared| shared.addresses(state));
            let (mut dx, mut d_w) = (vec![T::default(); x.len()], vec![0.0; own_len(routing, self.rank)]);
            // Rows that are computed again take the place of those that the forward left.
            state.machine.ring_holder = None;
            let gradients = Some(sums_of);
            self.run(state, saved, &programs, &plan, weights, &mut dx, &mut d_w, gradients, accumulate)?;
            sums.into_iter().for_each(|(sum, gradient)| round_into(gradient, &sum));
            if let Some(shared) = shared {
                state.processes.meet(2, "the end of a backward")?;
                // SAFETY: all ranks are done with the sums, and none writes them before it has met the others again.
                unsafe { shared.get(state) };
            }
            Ok((dx, d_w))
        })
    }

    /// This rank's routing, of one rank.
    fn check_forward<T: Element, I: Copy + Into<i64>>(
        &self,
        shape: &Shape,
        x: &[T],
        ids: &[I],
        topk_weights: &[f32],
        weights: &Weights<T>,
    ) -> Result<Routing> {
        let experts = experts_per_rank(shape, self.options.ranks)?;
        let tokens = ids.len() / shape.top_k;
        let routing = Routing::new(shape, ids, topk_weights, &[tokens])?;
        Error::check_len("x", x.len(), &[("tokens", tokens), ("hidden", shape.hidden)])?;
        weights.validate(&Shape { experts, ..shape.clone() })?;
        Ok(routing)
    }

    /// This rank's tokens.
    fn check_backward<T: Element, G: GradientElement>(
        &self,
        saved: &Saved<T>,
        dy: &[T],
        x: &[T],
        weights: &Weights<T>,
        gradients: &WeightGradients<&mut [G], &mut [f32]>,
    ) -> Result<usize> {
        let (shape, ranks) = (&saved.shape, self.options.ranks);
        if saved.routing.ranks() != ranks {
            let allowed = format!("one of this group's forwards is needed, which has {ranks}");
            return Err(Error::invalid("ranks of the context", saved.routing.ranks(), allowed));
        }
        let tokens = saved.routing.tokens_of(self.rank).len();
        let dims = [("tokens", tokens), ("hidden", shape.hidden)];
        Error::check_len("x", x.len(), &dims)?;
        Error::check_len("dy", dy.len(), &dims)?;
        let own_experts = Shape { experts: experts_per_rank(shape, ranks)?, ..shape.clone() };
        weights.validate(&own_experts)?;
        gradients.validate(&own_experts)?;
        Ok(tokens)
    }

    /// This rank's call cannot be made, for a reason that its caller has found: takes the place of the call, so that every
    /// rank returns an error that gives the reason, and none waits for this one.
    pub fn refuse(&self, why: Error) -> Error {
        self.lock().processes.refuse(why)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic in a task is caught by the pool, so the state is whole even if one was passed on.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One call of the group, unless it is broken.
    fn call<R>(&self, call: impl FnOnce(&mut State) -> Result<R, Fault>) -> Result<R> {
        let mut state = self.lock();
        state.processes.usable()?;
        let outcome = call(&mut state);
        state.processes.settle(outcome)
    }

    fn reserve(&self, state: &mut State, plan: &Plan) -> Result<(), Broken> {
        state.processes.link.reserve(plan.len)?;
        self.file.store(state.processes.link.data_len(), Ordering::Relaxed);
        Ok(())
    }

    fn run<T: Element>(
        &self,
        state: &mut State,
        saved: &Saved<T>,
        programs: &[Program],
        plan: &Plan,
        weights: &Weights<T>,
        out: &mut [T],
        d_topk_weights: &mut [f32],
        gradients: Option<WeightGradients<Shared<f32>>>,
        accumulate: bool,
    ) -> Result<(), Fault> {
        let most = programs.iter().map(Program::counters).max().unwrap_or(0);
        if most > plan.max_counters {
            let why = format!("internal error: {most} counters, and room for {}", plan.max_counters);
            return Err(state.processes.fail(&why));
        }
        state.processes.begin(if gradients.is_some() { "a backward" } else { "a forward" });
        let data = state.processes.link.data();
        // The offsets lie within the data, or at its end where the part is empty.
        let at = |offset: usize| data.wrapping_add(offset);
        let symmetric = |place: &plan::RankPlan| Symmetric {
            x: Shared(at(place.x).cast()),
            dy: Shared(at(place.dy).cast()),
            combine: Shared(at(place.combine).cast()),
            d_w: Shared(at(place.d_w).cast()),
        };
        let counters = plan.ranks.iter().zip(programs).map(|(place, program)| {
            // SAFETY: the counters lie within the data, aligned, and are only ever used as atomics until the next call.
            unsafe { std::slice::from_raw_parts(at(place.counters).cast::<AtomicU32>(), program.counters()) }
        });
        let call = Call {
            options: &self.options,
            saved,
            programs,
            local: self.rank..self.rank + 1,
            symmetric: plan.ranks.iter().map(symmetric).collect(),
            outputs: vec![Output {
                rows: Shared(out.as_mut_ptr()),
                d_topk_weights: Shared(d_topk_weights.as_mut_ptr()),
            }],
            weights,
            gradients,
            accumulate,
            counters: counters.collect(),
        };
        match state.machine.run(call, Some(&state.processes.link)) {
            Ok(()) => {
                state.processes.pass_done();
                Ok(())
            }
            Err(Error::Stalled(stalls)) => Err(match stalls.first() {
                Some(stall) => state.processes.stalled(stall),
                // Given up because the group has failed.
                None => state.processes.fail(&format!("rank {} gave the pass up", self.rank)),
            }),
            Err(error) => {
                state.processes.fail(&format!("rank {}: {error}", self.rank));
                Err(Fault::Broken(error))
            }
        }
    }
}

/// Router weights of a rank.
fn own_len(routing: &Routing, rank: usize) -> usize {
    routing.tokens_of(rank).len() * routing.top_k()
}

/// The shared experts' gradients: a caller's buffers, and where in the data they are summed.
struct SharedSums<'a, G> {
    shared: SharedWeights<&'a mut [G], &'a mut [f32]>,
    places: [usize; 4],
}

impl<G: GradientElement> SharedSums<'_, G> {
    fn addresses(&self, state: &State) -> SharedWeights<Shared<f32>, Shared<f32>> {
        let [gate, up, down, output_gate] =
            self.places.map(|place| Shared(state.processes.link.data().wrapping_add(place).cast::<f32>()));
        let output_gate = self.shared.output_gate.as_ref().map(|_| output_gate);
        SharedWeights { gate, up, down, output_gate }
    }

    /// The caller's to the data.
    ///
    /// # Safety
    /// As for [`State::fill`].
    unsafe fn put(&self, state: &State) {
        let parts = [&self.shared.gate, &self.shared.up, &self.shared.down];
        for (part, place) in parts.into_iter().zip(self.places) {
            let widened: Vec<f32> = part.iter().map(|v| v.to_f32()).collect();
            // SAFETY: the caller's contract.
            unsafe { state.fill(place, &widened) };
        }
        if let Some(gate) = &self.shared.output_gate {
            // SAFETY: the caller's contract.
            unsafe { state.fill(self.places[3], gate) };
        }
    }

    /// The data to the caller's.
    ///
    /// # Safety
    /// As for [`State::read`].
    unsafe fn get(self, state: &State) {
        let parts = [self.shared.gate, self.shared.up, self.shared.down];
        for (part, place) in parts.into_iter().zip(self.places) {
            // SAFETY: the caller's contract.
            round_into(part, unsafe { state.read(place, part.len()) });
        }
        if let Some(gate) = self.shared.output_gate {
            // SAFETY: the caller's contract.
            gate.copy_from_slice(unsafe { state.read(self.places[3], gate.len()) });
        }
    }
}

impl State {
    /// Copies values to an offset of the data.
    ///
    /// # Safety
    /// The plan that was reserved has room for them there, and no other rank touches that room meanwhile.
    unsafe fn fill<V: Copy>(&self, offset: usize, values: &[V]) {
        // SAFETY: the caller's contract; what is the caller's is not in the data.
        unsafe {
            std::ptr::copy_nonoverlapping(
                values.as_ptr(),
                self.processes.link.data().add(offset).cast(),
                values.len(),
            )
        };
    }

    /// Values at an offset of the data.
    ///
    /// # Safety
    /// The plan has them there, every bit pattern is a value, and no rank writes them while the slice lives.
    unsafe fn read<V: Copy>(&self, offset: usize, len: usize) -> &[V] {
        // SAFETY: the caller's contract.
        unsafe { std::slice::from_raw_parts(self.processes.link.data().add(offset).cast(), len) }
    }

    /// # Safety
    /// As for [`State::fill`].
    unsafe fn zero_counters(&self, plan: &Plan, rank: usize) {
        // SAFETY: the caller's contract.
        unsafe {
            let counters = self.processes.link.data().add(plan.ranks[rank].counters).cast::<u32>();
            counters.write_bytes(0, plan.max_counters);
        }
    }
}
