//! The threads and private buffers of the ranks of this process, and how a pass runs on them.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kodkod_core::numerics::Act;
use kodkod_core::program::{Pass, Program};
use kodkod_core::{Error, Result, Shape, WeightGradients, Weights};

use crate::gemm::Isa;
use crate::group::Saved;
use crate::memory::{Arena, Buffer};
use crate::pass::{RankMemory, Shared, Symmetric, Tasks, Worker};
use crate::pool::Pool;
use crate::process::Link;
use crate::protocol::{Engine, Ring};
use crate::{CpuOptions, Element};

pub(crate) struct Machine {
    isa: Isa,
    threads: usize,
    arena: Arc<Arena>,
    pool: Pool,
    workers: Vec<Mutex<Worker>>,
    /// The ring's `x`, `g`, `u` of each local rank, as bytes.
    ring: Vec<[Buffer<u8>; 3]>,
    ring_bytes: Vec<[usize; 3]>,
    /// The call that left its rows in the ring.
    pub(crate) ring_holder: Option<u64>,
}

/// Where a local rank's results go.
pub(crate) struct Output<T> {
    /// `y` or `dx`: `[local tokens, hidden]`
    pub(crate) rows: Shared<T>,
    /// `[local tokens, top_k]`, only in a backward.
    pub(crate) d_topk_weights: Shared<f32>,
}

/// One pass of the local ranks. What others address is given; private buffers are taken here.
pub(crate) struct Call<'a, T> {
    pub(crate) options: &'a CpuOptions,
    pub(crate) saved: &'a Saved<T>,
    /// Of every rank.
    pub(crate) programs: &'a [Program],
    /// The ranks of this process.
    pub(crate) local: Range<usize>,
    /// Of every rank.
    pub(crate) symmetric: Vec<Symmetric<T>>,
    /// Of the local ranks.
    pub(crate) outputs: Vec<Output<T>>,
    pub(crate) weights: &'a Weights<'a, T>,
    pub(crate) gradients: Option<WeightGradients<Shared<f32>>>,
    pub(crate) accumulate: bool,
    /// Of every rank, zero at the start.
    pub(crate) counters: Vec<&'a [AtomicU32]>,
}

impl Machine {
    /// With a thread more where somebody has to listen to other processes.
    pub(crate) fn new(isa: Isa, threads: usize, listens: bool, arena: Arc<Arena>) -> Result<Self> {
        let pool = Pool::new(threads + usize::from(listens)).map_err(|error| {
            Error::invalid("threads", threads, format!("the system refused one: {error}"))
        })?;
        let workers = (0..threads).map(|_| Mutex::new(Worker::new())).collect();
        Ok(Machine {
            isa,
            threads,
            arena,
            pool,
            workers,
            ring: vec![],
            ring_bytes: vec![],
            ring_holder: None,
        })
    }

    /// Runs a pass to its end; ranks of other processes are at the other end of `link`.
    ///
    /// # Errors
    /// [`Error::Stalled`] where a task waited too long, or, with no entry, where the link gave the pass up;
    /// [`Error::Internal`] where a task panicked.
    pub(crate) fn run<T: Element>(&mut self, call: Call<T>, link: Option<&Link>) -> Result<()> {
        let (saved, programs) = (call.saved, call.programs);
        let (shape, local) = (&saved.shape, &programs[call.local.clone()]);
        self.fit_ring::<T>(local, row_widths(shape));
        let backward = call.gradients.is_some();
        let buffers: Vec<_> = local.iter().map(|p| PassBuffers::new(&self.arena, shape, p)).collect();
        let memory = (0..local.len())
            .map(|i| buffers[i].memory(&saved.rows[i], &self.ring[i], &call.outputs[i]))
            .collect();
        let tasks = Tasks {
            isa: self.isa,
            shape,
            programs,
            schedules: &saved.schedules,
            routing: &saved.routing,
            weights: call.weights,
            gradients: call.gradients,
            accumulate: call.accumulate,
            symmetric: call.symmetric,
            first_local: call.local.start,
            memory,
            act: Act::from(shape.activation),
        };
        let comm_workers = if backward { saved.knobs.bwd_comm_sms } else { saved.knobs.fwd_comm_sms };
        let (limit, stall) = (call.options.wait_limit, call.options.stall);
        let ring = link.map(|link| |rank| link.ring(rank));
        let ring = ring.as_ref().map(|ring| ring as Ring);
        let (threads, local) = (self.threads, call.local);
        let engine = Engine::new(programs, local, call.counters, ring, threads, comm_workers, limit, stall);
        let workers = &self.workers;
        let working = AtomicUsize::new(self.threads);
        let outcome = self.pool.run(&|worker| {
            if worker == self.threads {
                return link.into_iter().for_each(|link| link.attend(&engine, &working));
            }
            let _leave = Leave { working: &working, link };
            let mut own = workers[worker].lock().unwrap_or_else(PoisonError::into_inner);
            let give_up = GiveUp(&engine);
            engine.work(worker, |rank, kind| tasks.run(&mut own, rank, kind));
            std::mem::forget(give_up);
        });
        outcome.map_err(Error::Internal)?;
        engine.into_stalls().map_or(Ok(()), |stalls| Err(Error::Stalled(stalls)))
    }

    /// Makes the ring large enough for the local `programs`; where it has to grow, what it held is gone.
    fn fit_ring<T>(&mut self, programs: &[Program], widths: [usize; 3]) {
        let needed: Vec<_> = programs
            .iter()
            .map(|p| widths.map(|w| (p.kept_slot_rows() - p.saved_slot_rows()) * w * size_of::<T>()))
            .collect();
        let fits = self.ring_bytes.len() >= needed.len()
            && needed.iter().zip(&self.ring_bytes).all(|(n, have)| n.iter().zip(have).all(|(n, h)| n <= h));
        if !fits {
            self.ring.clear();
            self.ring = needed.iter().map(|n| n.map(|bytes| self.arena.take(bytes))).collect();
            self.ring_bytes = needed;
        }
    }
}

/// Gives the pass up when a task panics, so that no other worker waits for it.
struct GiveUp<'a, 'b>(&'a Engine<'b>);

impl Drop for GiveUp<'_, '_> {
    fn drop(&mut self) {
        self.0.give_up(vec![]);
    }
}

/// Tells who listens when the last worker leaves, also where it panics.
struct Leave<'a> {
    working: &'a AtomicUsize,
    link: Option<&'a Link>,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        if self.working.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(link) = self.link
        {
            link.ring_here();
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
}

impl<T: Element> PassBuffers<T> {
    fn new(arena: &Arc<Arena>, shape: &Shape, program: &Program) -> Self {
        let [hidden, width, _] = row_widths(shape);
        let ring = program.ring_slot_rows();
        let if_backward = |len: usize| if program.pass() == Pass::Backward { len } else { 0 };
        PassBuffers {
            h: arena.take(ring * width),
            dy: arena.take(if_backward(ring * hidden)),
            dg: arena.take(if_backward(ring * width)),
            du: arena.take(if_backward(ring * width)),
            d_w_parts: arena.take(if_backward(ring * program.max_d_hidden_tiles())),
        }
    }

    fn memory(&self, saved: &[Buffer<T>; 3], ring: &[Buffer<u8>; 3], output: &Output<T>) -> RankMemory<T> {
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
            out: output.rows,
            d_topk_weights: output.d_topk_weights,
        }
    }
}

/// Elements of a row of `x`, `g`, `u` in memory.
pub(crate) fn row_widths(shape: &Shape) -> [usize; 3] {
    let width = shape.intermediate.max(shape.shared.map_or(0, |s| s.intermediate));
    [shape.hidden, width, width]
}
