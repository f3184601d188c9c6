//! The ring under a model checker: loom runs two ranks on two workers, with a ring of one minibatch, through every
//! interleaving with one preemption, then through those with up to three for as long as [`DEEPER`] allows
//! (`KODKOD_MODEL_SECONDS` sets another time), and looks for deadlocks, data races, and rows lost, read early or
//! overwritten.
//!
//! `engine.rs` is compiled here a second time, with loom's atomics and locks. In place of rows there are cells that
//! hold the number of the block whose rows they stand for: loom reports any two accesses to a cell of which one is a
//! write and neither happens before the other.

use std::time::Duration;

use kodkod_core::program::{Counter, Kind, Pass, Program, Tiles, Wait};
use kodkod_core::{Knobs, ROW_BLOCK, Routing, Schedule, Shape};
use loom::cell::UnsafeCell;

/// The primitives of `engine.rs`, loom's.
mod sync {
    use std::time::Duration;

    pub(super) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    pub(super) use loom::sync::{Condvar, Mutex, MutexGuard};

    /// Under the model no time passes: a sleep that nobody ends is a deadlock, which loom reports.
    pub(super) fn wait_for<'a, T>(
        condvar: &Condvar,
        guard: MutexGuard<'a, T>,
        _limit: Duration,
    ) -> (MutexGuard<'a, T>, bool) {
        (condvar.wait(guard).unwrap(), true)
    }
}

#[path = "engine.rs"]
#[allow(clippy::duplicate_mod, reason = "compiled a second time on purpose, with other primitives")]
mod engine;

use engine::{Engine, counters};

/// A value that tasks write and read: the block whose rows it stands for.
struct Cell(UnsafeCell<Option<u32>>);
// SAFETY: loom checks every access for races; that is what the test is for.
unsafe impl Sync for Cell {}

impl Cell {
    fn set(&self, block: u32) {
        // SAFETY: loom panics where another thread may be at it.
        self.0.with_mut(|cell| unsafe { *cell = Some(block) });
    }

    fn get(&self) -> Option<u32> {
        // SAFETY: loom panics where another thread may write it.
        self.0.with(|cell| unsafe { *cell })
    }

    fn expect(&self, block: u32, what: &str) {
        assert_eq!(self.get(), Some(block), "{what}: read early, lost or overwritten");
    }
}

fn cells(n: usize) -> Vec<Cell> {
    (0..n).map(|_| Cell(UnsafeCell::new(None))).collect()
}

/// Stand-ins for one rank's memory; slots are row blocks.
struct Memory {
    /// Slot and source.
    x: Vec<Vec<Cell>>,
    g: Vec<Cell>,
    h: Vec<Cell>,
    dy: Vec<Vec<Cell>>,
    dg: Vec<Cell>,
    /// What each rank's block pushed here: `[rank][block]`
    pushed: Vec<Vec<Cell>>,
    /// The last block summed, for each expert and weight.
    gradient: Vec<[Cell; 3]>,
}

const RANKS: usize = 2;

struct Layer {
    shape: Shape,
    knobs: Knobs,
    routing: Routing,
    schedules: Vec<Schedule>,
    memory: Vec<Memory>,
}

impl Layer {
    /// One expert a rank; enough tokens that rank 0 has two blocks and rank 1 two: with a ring of one minibatch of
    /// one block, every slot is used twice in each pass.
    fn new() -> Self {
        let shape = Shape::new(8, 8, RANKS, 1);
        let knobs = Knobs {
            minibatch_rows: ROW_BLOCK,
            ring_rows: ROW_BLOCK,
            saved_rows: 0,
            ..Knobs::for_shape(&shape)
        };
        let tokens = 2 * (ROW_BLOCK + 8);
        let ids: Vec<i32> = (0..tokens).map(|t| (t % RANKS) as i32).collect();
        let routing = Routing::new(&shape, &ids, &vec![1.0; tokens], &[tokens - 20, 20]).unwrap();
        let schedules: Vec<_> = (0..RANKS).map(|r| Schedule::new(&shape, &routing, r)).collect();
        let memory = (0..RANKS)
            .map(|_| Memory {
                x: (0..2).map(|_| cells(RANKS)).collect(),
                g: cells(2),
                h: cells(2),
                dy: (0..2).map(|_| cells(RANKS)).collect(),
                dg: cells(2),
                pushed: (0..RANKS).map(|_| cells(2)).collect(),
                gradient: (0..1).map(|_| [(); 3].map(|()| Cell(UnsafeCell::new(None)))).collect(),
            })
            .collect();
        Layer { shape, knobs, routing, schedules, memory }
    }

    fn programs(&self, pass: Pass, ring_holds: bool) -> Vec<Program> {
        let tiles = Tiles { gate_up_n: 8, d_hidden_n: 8, hidden_n: 8, wgrad_m: 8, wgrad_n: 8 };
        Program::all(pass, &self.shape, &self.knobs, &tiles, &self.routing, &self.schedules, ring_holds)
    }

    /// What a task does, in stand-ins.
    fn run(&self, programs: &[Program], rank: usize, kind: &Kind) {
        let (program, memory) = (&programs[rank], &self.memory[rank]);
        let kept = |block: u32| program.kept_row(block) / ROW_BLOCK;
        let ring = |block: u32| program.ring_row(block) / ROW_BLOCK;
        let all = |cells: &[Cell], block: u32, what: &str| cells.iter().for_each(|c| c.expect(block, what));
        match *kind {
            Kind::Pull { block, source } => memory.x[kept(block)][source as usize].set(block),
            Kind::PullGrad { block, source } => memory.dy[ring(block)][source as usize].set(block),
            Kind::GateUp { block, .. } => {
                all(&memory.x[kept(block)], block, "x");
                memory.g[kept(block)].set(block);
                if program.pass() == Pass::Forward {
                    memory.h[ring(block)].set(block);
                }
            }
            Kind::Down { block, .. } => {
                memory.h[ring(block)].expect(block, "h");
                self.push(rank, block);
            }
            Kind::DHidden { block, .. } => {
                all(&memory.dy[ring(block)], block, "dy");
                memory.g[kept(block)].expect(block, "g");
                memory.dg[ring(block)].set(block);
            }
            Kind::DInput { block, .. } => {
                memory.dg[ring(block)].expect(block, "dg");
                self.push(rank, block);
            }
            Kind::WGrad { weight, run, first, last, .. } => {
                let sum = &memory.gradient[run.expert as usize][weight as usize];
                assert_eq!((first, last), (run.block == 0, run.block == 1));
                assert_eq!(sum.get(), run.block.checked_sub(1), "a gradient's rows out of order");
                for block in run.block..run.block + run.blocks {
                    all(&memory.x[kept(block)], block, "x");
                    all(&memory.dy[ring(block)], block, "dy");
                    memory.dg[ring(block)].expect(block, "dg");
                    sum.set(block);
                }
            }
            Kind::Reduce { .. } | Kind::ReduceGrad { .. } => {
                for (from, blocks) in memory.pushed.iter().enumerate() {
                    for block in 0..self.schedules[from].layout.blocks() {
                        blocks[block as usize].expect(block, "a pushed row");
                    }
                }
            }
            Kind::ZeroGrad { .. } | Kind::Skip => {}
        }
    }

    fn push(&self, rank: usize, block: u32) {
        for peer in &self.memory {
            let slot = &peer.pushed[rank][block as usize];
            assert_eq!(slot.get(), None, "a slot has one writer");
            slot.set(block);
        }
    }

    fn forget_pushes(&self) {
        let slots = self.memory.iter().flat_map(|m| m.pushed.iter().flatten());
        // SAFETY: no other thread runs.
        slots.for_each(|cell| cell.0.with_mut(|cell| unsafe { *cell = None }));
    }
}

/// Time for the deeper of the two searches.
const DEEPER: Duration = Duration::from_secs(10);

fn deeper_time() -> Duration {
    let seconds = std::env::var("KODKOD_MODEL_SECONDS").ok().and_then(|s| s.parse().ok());
    seconds.map_or(DEEPER, Duration::from_secs)
}

/// The deeper search of a pass.
fn deeper(pass: Pass, ring_holds: bool) {
    search(pass, ring_holds, 3, Some(deeper_time()), None);
}

fn explorer(preemptions: usize, time: Option<Duration>) -> loom::model::Builder {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.max_duration = time;
    model.max_branches = 20_000;
    model
}

/// Runs `pass` on two workers through the interleavings with at most `preemptions` of them, all or as many as `time`
/// allows; a backward follows a forward by one worker. `ignored` switches waits off.
fn search(
    pass: Pass,
    ring_holds: bool,
    preemptions: usize,
    time: Option<Duration>,
    ignored: Option<fn(&Wait) -> bool>,
) {
    let model = explorer(preemptions, time);
    let explored = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = explored.clone();
    model.check(move || {
        count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let layer = Layer::new();
        assert!(layer.schedules.iter().all(|s| s.layout.blocks() == 2));
        let alone = |pass| {
            let programs = layer.programs(pass, false);
            let zeros: Vec<_> = programs.iter().map(counters).collect();
            let zeros = zeros.iter().map(Vec::as_slice).collect();
            let engine = Engine::new(&programs, 0..RANKS, zeros, None, 1, 0, Duration::from_secs(1), None);
            engine.work(0, |rank, kind| layer.run(&programs, rank, kind));
            layer.forget_pushes();
        };
        if pass == Pass::Backward {
            alone(Pass::Forward);
        }
        // Leaked for good: loom's cells panic when dropped while a failed execution unwinds.
        let layer: &'static Layer = Box::leak(Box::new(layer));
        let programs: &'static [Program] = Box::leak(layer.programs(pass, ring_holds).into_boxed_slice());
        let zeros = programs.iter().map(|p| &*counters(p).leak()).collect();
        let mut engine = Engine::new(programs, 0..RANKS, zeros, None, 2, 1, Duration::from_secs(1), None);
        engine.ignored_waits = ignored;
        let engine: &'static Engine<'static> = Box::leak(Box::new(engine));
        let work = |worker: usize| engine.work(worker, |rank, kind| layer.run(programs, rank, kind));
        let other = loom::thread::spawn(move || work(1));
        work(0);
        other.join().unwrap();
        for (rank, memory) in layer.memory.iter().enumerate() {
            let pushed = memory.pushed.iter().flatten().filter(|c| c.get().is_some()).count();
            assert_eq!(pushed, 2 * RANKS, "rows lost on their way to rank {rank}");
        }
    });
    let all = if time.is_none() { "all" } else { "some" };
    println!(
        "{pass:?}: {all} interleavings with up to {preemptions} preemptions, {} of them",
        explored.load(std::sync::atomic::Ordering::Relaxed)
    );
}

#[test]
fn forward_holds_in_every_interleaving() {
    search(Pass::Forward, false, 1, None, None);
    deeper(Pass::Forward, false);
}

#[test]
fn backward_holds_in_every_interleaving() {
    search(Pass::Backward, false, 1, None, None);
}

/// Apart from the search through all, so that the two run side by side.
#[test]
fn backward_holds_with_more_preemptions() {
    deeper(Pass::Backward, false);
    deeper(Pass::Backward, true);
}

/// The checker sees what it is there for: without the wait for a free slot, rows are overwritten.
#[test]
#[should_panic(expected = "x: read early, lost or overwritten")]
fn a_ring_without_its_wait_is_caught() {
    search(Pass::Forward, false, 1, None, Some(|wait| matches!(wait.counter, Counter::Free(_))));
}

/// And so is a reader that does not wait for its rows.
#[test]
#[should_panic(expected = "Causality violation")]
fn a_read_without_its_wait_is_caught() {
    search(Pass::Backward, false, 1, None, Some(|wait| matches!(wait.counter, Counter::GradPulled(_))));
}

/// Each rank in an engine of its own, as ranks that are processes have: what one does at another's counters is heard there
/// if `heard`.
fn apart(pass: Pass, preemptions: usize, time: Option<Duration>, heard: bool) {
    let model = explorer(preemptions, time);
    let explored = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = explored.clone();
    model.check(move || {
        count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let layer: &'static Layer = Box::leak(Box::new(Layer::new()));
        if pass == Pass::Backward {
            let programs = layer.programs(Pass::Forward, false);
            let zeros: Vec<_> = programs.iter().map(counters).collect();
            let zeros = zeros.iter().map(Vec::as_slice).collect();
            let engine = Engine::new(&programs, 0..RANKS, zeros, None, 1, 0, Duration::from_secs(1), None);
            engine.work(0, |rank, kind| layer.run(&programs, rank, kind));
            layer.forget_pushes();
        }
        let programs: &'static [Program] = Box::leak(layer.programs(pass, false).into_boxed_slice());
        let zeros: Vec<_> = programs.iter().map(|p| &*counters(p).leak()).collect();
        // Set before there is another thread, so outside the model.
        type Engines = [std::sync::OnceLock<Engine<'static>>; RANKS];
        let engines: &'static Engines = Box::leak(Box::default());
        let ring: &'static (dyn Fn(usize) + Sync) = Box::leak(Box::new(move |rank: usize| {
            if heard {
                engines[rank].get().expect("set").heard();
            }
        }));
        for (rank, engine) in engines.iter().enumerate() {
            let (local, limit) = (rank..rank + 1, Duration::from_secs(1));
            let new = Engine::new(programs, local, zeros.clone(), Some(ring), 1, 1, limit, None);
            assert!(engine.set(new).is_ok());
        }
        let work = |rank: usize| {
            engines[rank].get().expect("set").work(0, |rank, kind| layer.run(programs, rank, kind));
        };
        let other = loom::thread::spawn(move || work(1));
        work(0);
        other.join().unwrap();
        for memory in &layer.memory {
            let pushed = memory.pushed.iter().flatten().filter(|c| c.get().is_some()).count();
            assert_eq!(pushed, 2 * RANKS, "rows lost");
        }
    });
    let explored = explored.load(std::sync::atomic::Ordering::Relaxed);
    println!("{pass:?}, ranks apart: {explored} interleavings with up to {preemptions} preemptions");
}

#[test]
fn ranks_apart_hear_each_other_in_every_interleaving() {
    for pass in [Pass::Forward, Pass::Backward] {
        apart(pass, 1, None, true);
        apart(pass, 3, Some(deeper_time() / 2), true);
    }
}

/// Who is not told sleeps for good.
#[test]
#[should_panic(expected = "deadlock")]
fn ranks_apart_that_do_not_hear_are_caught() {
    apart(Pass::Forward, 1, None, false);
}
