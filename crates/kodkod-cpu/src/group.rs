//! Virtual ranks on this machine's cores, and a call of a layer over them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use kodkod_core::program::{Pass, Program};
use kodkod_core::schedule::experts_per_rank;
use kodkod_core::{
    Error, GradientElement, Knobs, Result, Routing, Schedule, Shape, WeightGradients, Weights,
};

use crate::Element;
use crate::gemm::Isa;
use crate::machine::{Call, Machine, Output, row_widths};
use crate::memory::{Arena, Buffer};
use crate::pass::{Shared, Symmetric, TILES};
use crate::protocol::{StallHook, counters};

/// How a CPU group runs.
#[derive(Debug, Clone, PartialEq)]
pub struct CpuOptions {
    /// Virtual ranks, at least 1.
    pub ranks: usize,
    /// Worker threads, more or fewer than ranks; 0 means one a core.
    pub threads: usize,
    /// Instruction set of the GEMMs; `None` means the best there is. It changes no bit.
    pub isa: Option<Isa>,
    /// How long a rank may wait without any task finishing before the pass is given up.
    pub wait_limit: Duration,
    /// A test hook: a worker that takes a task and never finishes it.
    pub stall: Option<StallHook>,
}

impl Default for CpuOptions {
    fn default() -> Self {
        CpuOptions { ranks: 1, threads: 0, isa: None, wait_limit: Duration::from_secs(60), stall: None }
    }
}

/// The most virtual ranks, and the most worker threads.
const MOST: usize = 1024;

/// Virtual ranks, the threads that run them, and their symmetric memory. One pass runs at a time.
pub struct CpuGroup {
    options: CpuOptions,
    isa: Isa,
    threads: usize,
    arena: Arc<Arena>,
    machine: Mutex<Machine>,
}

/// What a forward leaves for its backward: the schedules, and `x`, `g`, `u` of the saved rows.
pub struct Saved<T> {
    pub(crate) call: u64,
    pub(crate) shape: Shape,
    pub(crate) knobs: Knobs,
    pub(crate) routing: Routing,
    /// Of every rank; those of ranks that are other processes without their table.
    pub(crate) schedules: Vec<Schedule>,
    /// Of the ranks of this process.
    pub(crate) rows: Vec<[Buffer<T>; 3]>,
}

/// Numbers the forwards of this process.
static CALLS: AtomicU64 = AtomicU64::new(0);

impl<T: Element> Saved<T> {
    /// Room for the saved rows of a forward, by the programs of the ranks of this process.
    pub(crate) fn new(
        arena: &Arc<Arena>,
        shape: &Shape,
        knobs: &Knobs,
        routing: Routing,
        schedules: Vec<Schedule>,
        local: &[Program],
    ) -> Self {
        let widths = row_widths(shape);
        let rows = local.iter().map(|p| widths.map(|w| arena.take(p.saved_slot_rows() * w))).collect();
        let call = CALLS.fetch_add(1, Ordering::Relaxed);
        Saved { call, shape: shape.clone(), knobs: *knobs, routing, schedules, rows }
    }
}

impl CpuOptions {
    /// The instruction set and the number of threads that these options stand for.
    pub(crate) fn resolve(&self) -> Result<(Isa, usize)> {
        if self.ranks == 0 || self.ranks > MOST {
            return Err(Error::invalid("ranks", self.ranks, format!("1 to {MOST} are allowed")));
        }
        if self.threads > MOST {
            return Err(Error::invalid("threads", self.threads, format!("at most {MOST} are allowed")));
        }
        if self.wait_limit.is_zero() {
            return Err(Error::invalid("wait_limit", "0", "a positive time is needed"));
        }
        let available = Isa::available();
        let isa = self.isa.unwrap_or_else(Isa::best);
        if !available.contains(&isa) {
            let names = available.iter().map(Isa::to_string).collect::<Vec<_>>().join(", ");
            return Err(Error::invalid("isa", isa, format!("this CPU has {names}")));
        }
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        Ok((isa, if self.threads == 0 { cores().min(MOST) } else { self.threads }))
    }
}

impl CpuGroup {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an option that is out of range, or an instruction set that this CPU lacks.
    pub fn new(options: CpuOptions) -> Result<Self> {
        let (isa, threads) = options.resolve()?;
        let arena = Arc::<Arena>::default();
        let machine = Mutex::new(Machine::new(isa, threads, false, arena.clone())?);
        Ok(CpuGroup { isa, threads, options, arena, machine })
    }

    /// How the group runs.
    pub fn options(&self) -> &CpuOptions {
        &self.options
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Worker threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Bytes of symmetric memory that the group and its contexts hold now, and the most they ever held.
    pub fn memory(&self) -> (usize, usize) {
        self.arena.bytes()
    }

    /// Gives memory that waits for reuse back to the system.
    pub fn trim(&self) {
        self.arena.trim();
    }

    /// `y` `[tokens, hidden]`, and what the backward needs. The arguments are checked: see
    /// [`kodkod_core::Weights::validate`]; `x` is `[tokens, hidden]`, and the routing is of this shape and group.
    ///
    /// # Errors
    /// [`Error::Stalled`] where a task waited too long, [`Error::Invalid`] where the ranks do not divide the experts.
    pub fn forward<T: Element>(
        &self,
        shape: &Shape,
        knobs: &Knobs,
        x: &[T],
        routing: &Routing,
        weights: &Weights<T>,
    ) -> Result<(Vec<T>, Saved<T>)> {
        experts_per_rank(shape, routing.ranks())?;
        let schedules: Vec<_> =
            (0..routing.ranks()).map(|rank| Schedule::new(shape, routing, rank)).collect();
        let programs = Program::all(Pass::Forward, shape, knobs, &TILES, routing, &schedules, false);
        let saved = Saved::new(&self.arena, shape, knobs, routing.clone(), schedules, &programs);
        let mut y = vec![T::default(); x.len()];
        let mut machine = self.lock();
        // From here on the ring is not what an earlier forward left, also where this one fails.
        machine.ring_holder = None;
        self.run(&mut machine, &saved, &programs, x, &[], weights, &mut y, &mut [], None, false)?;
        machine.ring_holder = Some(saved.call);
        Ok((y, saved))
    }

    /// `dx` `[tokens, hidden]` and `d_topk_weights` `[tokens, top_k]`, for the `x` and weights of the forward that
    /// `saved` is from. The arguments are checked, as for the forward.
    ///
    /// Gradients in `f32` are summed in place. Those in bf16 are summed in an `f32` buffer that lives as long as this
    /// call, as large as the gradient, and rounded from it at the end.
    ///
    /// # Errors
    /// [`Error::Stalled`] where a task waited too long.
    pub fn backward<T: Element, G: GradientElement>(
        &self,
        saved: &Saved<T>,
        dy: &[T],
        x: &[T],
        weights: &Weights<T>,
        gradients: WeightGradients<&mut [G], &mut [f32]>,
        accumulate: bool,
    ) -> Result<(Vec<T>, Vec<f32>)> {
        let mut machine = self.lock();
        let ring_holds = machine.ring_holder == Some(saved.call);
        let (shape, routing) = (&saved.shape, &saved.routing);
        let programs =
            Program::all(Pass::Backward, shape, &saved.knobs, &TILES, routing, &saved.schedules, ring_holds);
        let mut dx = vec![T::default(); x.len()];
        let mut d_w = vec![0.0; routing.weights().len()];
        let mut sums = Vec::new();
        let sum_of = |gradient| sum_in_f32(gradient, accumulate, &mut sums);
        let gradients = Some(gradients.map(sum_of, |rest: &mut [f32]| Shared(rest.as_mut_ptr())));
        // Rows that are computed again take the place of those that the forward left.
        machine.ring_holder = None;
        self.run(&mut machine, saved, &programs, x, dy, weights, &mut dx, &mut d_w, gradients, accumulate)?;
        sums.into_iter().for_each(|(sum, gradient)| round_into(gradient, &sum));
        Ok((dx, d_w))
    }

    fn lock(&self) -> MutexGuard<'_, Machine> {
        // A panic in a task is caught by the pool, so the machine is whole even if one was passed on.
        self.machine.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn run<T: Element>(
        &self,
        machine: &mut Machine,
        saved: &Saved<T>,
        programs: &[Program],
        x: &[T],
        dy: &[T],
        weights: &Weights<T>,
        out: &mut [T],
        d_topk_weights: &mut [f32],
        gradients: Option<WeightGradients<Shared<f32>>>,
        accumulate: bool,
    ) -> Result<()> {
        let (shape, routing) = (&saved.shape, &saved.routing);
        let backward = gradients.is_some();
        let slots: Vec<_> = (0..programs.len())
            .map(|rank| {
                let slots = routing.tokens_of(rank).len() * shape.slots();
                let d_w = self.arena.take::<f32>(if backward { slots } else { 0 });
                (self.arena.take::<T>(slots * shape.hidden), d_w)
            })
            .collect();
        let rows_of = |rank: usize, all: &[T]| {
            let first = routing.tokens_of(rank).start * shape.hidden;
            Shared(all.get(first..).map_or(std::ptr::null(), <[T]>::as_ptr).cast_mut())
        };
        let symmetric = |rank: usize| Symmetric {
            x: rows_of(rank, x),
            dy: rows_of(rank, dy),
            combine: Shared(slots[rank].0.as_ptr()),
            d_w: Shared(slots[rank].1.as_ptr()),
        };
        // Within the buffers or one past their end: those of a forward have no router gradients.
        let (out, d_topk_weights) = (out.as_mut_ptr(), d_topk_weights.as_mut_ptr());
        let output = |rank: usize| {
            let first = routing.tokens_of(rank).start;
            Output {
                rows: Shared(out.wrapping_add(first * shape.hidden)),
                d_topk_weights: Shared(d_topk_weights.wrapping_add(first * shape.top_k)),
            }
        };
        let zeros: Vec<_> = programs.iter().map(counters).collect();
        let call = Call {
            options: &self.options,
            saved,
            programs,
            local: 0..programs.len(),
            symmetric: (0..programs.len()).map(symmetric).collect(),
            outputs: (0..programs.len()).map(output).collect(),
            weights,
            gradients,
            accumulate,
            counters: zeros.iter().map(Vec::as_slice).collect(),
        };
        machine.run(call, None)
    }
}

/// Where a gradient is summed: in place where it is `f32`, else in a buffer that is put into `sums` beside it.
pub(crate) fn sum_in_f32<'a, G: GradientElement>(
    gradient: &'a mut [G],
    accumulate: bool,
    sums: &mut Vec<(Vec<f32>, &'a mut [G])>,
) -> Shared<f32> {
    match G::as_f32(gradient) {
        Ok(sum) => Shared(sum.as_mut_ptr()),
        Err(gradient) => {
            let mut sum = match accumulate {
                true => gradient.iter().map(|v| v.to_f32()).collect(),
                false => vec![0.0; gradient.len()],
            };
            let address = Shared(sum.as_mut_ptr());
            sums.push((sum, gradient));
            address
        }
    }
}

pub(crate) fn round_into<G: GradientElement>(gradient: &mut [G], sum: &[f32]) {
    gradient.iter_mut().zip(sum).for_each(|(to, &sum)| *to = G::from_f32(sum));
}

impl<T> Saved<T> {
    /// The routing of the forward.
    pub fn routing(&self) -> &Routing {
        &self.routing
    }

    /// The shape of the forward.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use kodkod_core::program::Stream;

    use super::*;

    /// A forward that is given up has used the ring: the backward of the one before it must not take its rows for
    /// its own.
    #[test]
    fn a_backward_after_another_forward_failed_computes_its_rows_again() {
        const TOKENS: usize = 64;
        let shape = Shape::new(64, 64, 4, 2);
        let rows = |scale: f32| {
            (0..TOKENS * 64)
                .map(|i| bf16::from_f32(scale * ((i % 13) as f32 * 0.1 - 0.6)))
                .collect::<Vec<_>>()
        };
        let (x, other, weight) = (rows(1.0), rows(-3.0), vec![bf16::from_f32(0.03); 4 * 64 * 64]);
        let weights = Weights { gate: &weight[..], up: &weight, down: &weight, biases: None, shared: None };
        let ids: Vec<i32> = (0..TOKENS * 2).map(|i| (i * 7 % 4) as i32).collect();
        let routing = Routing::new(&shape, &ids, &[0.5; TOKENS * 2], &[32, 32]).unwrap();
        let knobs = Knobs::for_shape(&shape).with_rows(Some(128), Some(256), Some(0));
        let backward = |spoilt: bool| {
            let wait_limit = Duration::from_millis(40);
            let options = CpuOptions { ranks: 2, threads: 2, wait_limit, ..CpuOptions::default() };
            let mut group = CpuGroup::new(options).unwrap();
            let (_, saved) = group.forward(&shape, &knobs, &x, &routing, &weights).unwrap();
            if spoilt {
                group.options.stall = Some(StallHook { rank: 1, stream: Stream::Compute, ticket: u64::MAX });
                let error = group.forward(&shape, &knobs, &other, &routing, &weights).err();
                assert!(matches!(error, Some(Error::Stalled(_))), "{error:?}");
                group.options.stall = None;
            }
            let mut gradients = WeightGradients::zeros(&shape);
            let (dx, d_w) = group.backward(&saved, &x, &x, &weights, gradients.as_mut(), false).unwrap();
            (dx, d_w, gradients)
        };
        assert!(backward(false) == backward(true), "the ring held the rows of the forward that failed");
    }
}
