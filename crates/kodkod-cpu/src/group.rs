//! Virtual ranks on this machine's cores, and a call of a layer over them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use kodkod_core::numerics::Act;
use kodkod_core::program::{Pass, Program};
use kodkod_core::schedule::experts_per_rank;
use kodkod_core::{
    Error, GradientElement, Knobs, Result, Routing, Schedule, Shape, WeightGradients, Weights,
};

use crate::Element;
use crate::gemm::Isa;
use crate::memory::{Arena, Buffer};
use crate::pass::{RankMemory, Shared, TILES, Tasks, Worker};
use crate::pool::Pool;
use crate::protocol::{Engine, StallHook};

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

struct Machine {
    pool: Pool,
    workers: Vec<Mutex<Worker>>,
    /// The ring's `x`, `g`, `u` of each rank, as bytes, and the call that left its rows there.
    ring: Vec<[Buffer<u8>; 3]>,
    ring_rows: Vec<[usize; 3]>,
    ring_holder: Option<u64>,
}

/// What a forward leaves for its backward: the schedules, and `x`, `g`, `u` of the saved rows.
pub struct Saved<T> {
    call: u64,
    shape: Shape,
    knobs: Knobs,
    routing: Routing,
    schedules: Vec<Schedule>,
    rows: Vec<[Buffer<T>; 3]>,
}

/// Numbers the calls of this process.
static CALLS: AtomicU64 = AtomicU64::new(0);

impl CpuGroup {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an option that is out of range, or an instruction set that this CPU lacks.
    pub fn new(options: CpuOptions) -> Result<Self> {
        if options.ranks == 0 || options.ranks > MOST {
            return Err(Error::invalid("ranks", options.ranks, format!("1 to {MOST} are allowed")));
        }
        if options.threads > MOST {
            return Err(Error::invalid("threads", options.threads, format!("at most {MOST} are allowed")));
        }
        if options.wait_limit.is_zero() {
            return Err(Error::invalid("wait_limit", "0", "a positive time is needed"));
        }
        let available = Isa::available();
        let isa = options.isa.unwrap_or_else(Isa::best);
        if !available.contains(&isa) {
            let names = available.iter().map(Isa::to_string).collect::<Vec<_>>().join(", ");
            return Err(Error::invalid("isa", isa, format!("this CPU has {names}")));
        }
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if options.threads == 0 { cores().min(MOST) } else { options.threads };
        let pool = Pool::new(threads).map_err(|error| {
            Error::invalid("threads", threads, format!("the system refused one: {error}"))
        })?;
        let workers = (0..pool.workers()).map(|_| Mutex::new(Worker::new())).collect();
        let machine = Machine { pool, workers, ring: vec![], ring_rows: vec![], ring_holder: None };
        Ok(CpuGroup { isa, threads, options, arena: Arc::default(), machine: Mutex::new(machine) })
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
        let widths = row_widths(shape);
        let rows =
            programs.iter().map(|p| widths.map(|w| self.arena.take(p.saved_slot_rows() * w))).collect();
        let call = CALLS.fetch_add(1, Ordering::Relaxed);
        let saved =
            Saved { call, shape: shape.clone(), knobs: *knobs, routing: routing.clone(), schedules, rows };
        let mut y = vec![T::default(); x.len()];
        let mut machine = self.lock();
        // From here on the ring is not what an earlier forward left, also where this one fails.
        machine.ring_holder = None;
        self.run(&mut machine, &saved, &programs, x, &[], weights, &mut y, &mut [], None, false)?;
        machine.ring_holder = Some(call);
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
        let mut sums: Vec<(Vec<f32>, &mut [G])> = Vec::new();
        let sum_of = |gradient| match G::as_f32(gradient) {
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
        };
        let gradients = Some(gradients.map(sum_of, |rest: &mut [f32]| Shared(rest.as_mut_ptr())));
        // Rows that are computed again take the place of those that the forward left.
        machine.ring_holder = None;
        self.run(&mut machine, saved, &programs, x, dy, weights, &mut dx, &mut d_w, gradients, accumulate)?;
        for (sum, gradient) in sums {
            gradient.iter_mut().zip(sum).for_each(|(to, sum)| *to = G::from_f32(sum));
        }
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
        let shape = &saved.shape;
        let backward = gradients.is_some();
        machine.fit_ring::<T>(&self.arena, programs, row_widths(shape));
        let pass: Vec<_> = programs
            .iter()
            .enumerate()
            .map(|(rank, p)| {
                PassBuffers::new(&self.arena, shape, p, saved.routing.tokens_of(rank).len(), backward)
            })
            .collect();
        let memory = (0..programs.len()).map(|r| pass[r].memory(&saved.rows[r], &machine.ring[r])).collect();
        let tasks = Tasks {
            isa: self.isa,
            shape,
            programs,
            schedules: &saved.schedules,
            routing: &saved.routing,
            weights,
            x,
            dy,
            out: Shared(out.as_mut_ptr()),
            d_topk_weights: Shared(d_topk_weights.as_mut_ptr()),
            gradients,
            accumulate,
            memory,
            act: Act::from(shape.activation),
        };
        let comm_workers = if backward { saved.knobs.bwd_comm_sms } else { saved.knobs.fwd_comm_sms };
        let engine =
            Engine::new(programs, self.threads, comm_workers, self.options.wait_limit, self.options.stall);
        let workers = &machine.workers;
        let outcome = machine.pool.run(&|worker| {
            let mut own = workers[worker].lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            let give_up = GiveUp(&engine);
            engine.work(worker, |rank, kind| tasks.run(&mut own, rank, kind));
            std::mem::forget(give_up);
        });
        outcome.map_err(Error::Internal)?;
        engine.into_stalls().map_or(Ok(()), |stalls| Err(Error::Stalled(stalls)))
    }
}

/// Gives the pass up when a task panics, so that no other worker waits for it.
struct GiveUp<'a, 'b>(&'a Engine<'b>);

impl Drop for GiveUp<'_, '_> {
    fn drop(&mut self) {
        self.0.give_up(vec![]);
    }
}

impl Machine {
    /// Makes the ring large enough for `programs`; where it has to grow, what it held is gone.
    fn fit_ring<T>(&mut self, arena: &Arc<Arena>, programs: &[Program], widths: [usize; 3]) {
        let needed: Vec<_> = programs
            .iter()
            .map(|p| widths.map(|w| (p.kept_slot_rows() - p.saved_slot_rows()) * w * size_of::<T>()))
            .collect();
        let fits = self.ring_rows.len() >= needed.len()
            && needed.iter().zip(&self.ring_rows).all(|(n, have)| n.iter().zip(have).all(|(n, h)| n <= h));
        if !fits {
            self.ring.clear();
            self.ring = needed.iter().map(|n| n.map(|bytes| arena.take(bytes))).collect();
            self.ring_rows = needed;
        }
    }
}

/// What one rank needs in one pass only.
struct PassBuffers<T> {
    h: Buffer<T>,
    dy: Buffer<T>,
    dg: Buffer<T>,
    du: Buffer<T>,
    d_w_parts: Buffer<f32>,
    combine: Buffer<T>,
    d_w: Buffer<f32>,
}

impl<T: Element> PassBuffers<T> {
    fn new(arena: &Arc<Arena>, shape: &Shape, program: &Program, tokens: usize, backward: bool) -> Self {
        let [hidden, width, _] = row_widths(shape);
        let ring = program.ring_slot_rows();
        let if_backward = |len: usize| if backward { len } else { 0 };
        PassBuffers {
            h: arena.take(ring * width),
            dy: arena.take(if_backward(ring * hidden)),
            dg: arena.take(if_backward(ring * width)),
            du: arena.take(if_backward(ring * width)),
            d_w_parts: arena.take(if_backward(ring * program.max_d_hidden_tiles())),
            combine: arena.take(tokens * shape.slots() * hidden),
            d_w: arena.take(if_backward(tokens * shape.slots())),
        }
    }

    fn memory(&self, saved: &[Buffer<T>; 3], ring: &[Buffer<u8>; 3]) -> RankMemory<T> {
        let both = |i: usize| [Shared(saved[i].as_ptr()), Shared(ring[i].as_ptr().cast())];
        RankMemory {
            x: both(0),
            g: both(1),
            u: both(2),
            h: Shared(self.h.as_ptr()),
            dy: Shared(self.dy.as_ptr()),
            dg: Shared(self.dg.as_ptr()),
            du: Shared(self.du.as_ptr()),
            d_w_parts: Shared(self.d_w_parts.as_ptr()),
            combine: Shared(self.combine.as_ptr()),
            d_w: Shared(self.d_w.as_ptr()),
        }
    }
}

/// Elements of a row of `x`, `g`, `u` in memory.
fn row_widths(shape: &Shape) -> [usize; 3] {
    let width = shape.intermediate.max(shape.shared.map_or(0, |s| s.intermediate));
    [shape.hidden, width, width]
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
