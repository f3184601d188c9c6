//! Runs the programs of this process's ranks, all of them or one, on any number of workers.
//!
//! A worker looks at the next ticket of each rank's streams, takes the first whose waits hold, runs it, adds to the
//! counters that it arrives at, and wakes whoever sleeps. A worker that finds none sleeps. Nothing spins.
//!
//! Where ranks are processes, counters lie in memory that they share. An arrival at a rank of another process rings
//! there, and whoever listens in that process calls [`Engine::heard`].
//!
//! Ordering: an arrival is a read-modify-write with release, a wait is a load with acquire, so what a task wrote is
//! seen by every task that waited for it. Claims carry no data and are relaxed.

use std::ops::Range;
use std::sync::Mutex as StdMutex;
use std::time::{Duration, Instant};

use kodkod_core::error::Stall;
use kodkod_core::program::{Arrive, Counter, Kind, Program, Stream, Task, Wait};

use super::sync::{AtomicU32, AtomicU64, Condvar, Mutex, Ordering, wait_for};

/// A test hook: the worker that takes this ticket never finishes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(test, allow(unreachable_pub, reason = "the model checker compiles this file in a private module"))]
pub struct StallHook {
    /// Rank whose task stalls.
    pub rank: usize,
    /// Its stream.
    pub stream: Stream,
    /// Its ticket; beyond the last one stands for the last.
    pub ticket: u64,
}

/// Tells the process of another rank that one of its counters has changed.
pub(crate) type Ring<'a> = &'a (dyn Fn(usize) + Sync);

/// The counters of a program, all zero.
pub(crate) fn counters(program: &Program) -> Vec<AtomicU32> {
    (0..program.counters()).map(|_| AtomicU32::new(0)).collect()
}

/// One pass in progress.
pub(crate) struct Engine<'a> {
    programs: &'a [Program],
    /// The ranks whose tasks run here.
    local: Range<usize>,
    /// Of every rank; of those that are not local, the counters that other ranks arrive at are enough.
    counters: Vec<&'a [AtomicU32]>,
    ring: Option<Ring<'a>>,
    next: Vec<[AtomicU64; 2]>,
    state: Mutex<State>,
    wake: Condvar,
    limit: Duration,
    /// Workers below this number look for communication first.
    comm_workers: usize,
    stall: Option<StallHook>,
    /// What each worker is at, for the report of a stall only.
    running: StdMutex<Vec<Option<(usize, Task)>>>,
    /// Waits that the model checker's test switches off, to see that it notices.
    #[cfg(test)]
    #[allow(dead_code, reason = "used where the model checker compiles this file")]
    pub(super) ignored_waits: Option<fn(&Wait) -> bool>,
}

struct State {
    /// Tasks finished and rings heard: a worker that saw it before it looked, and sees it again, has missed nothing.
    events: u64,
    /// Tasks finished.
    finished: u64,
    sleepers: usize,
    given_up: Option<Vec<Stall>>,
}

enum Claim {
    Task(usize, Task),
    Stall,
    Blocked,
    Finished,
}

impl<'a> Engine<'a> {
    pub(crate) fn new(
        programs: &'a [Program],
        local: Range<usize>,
        counters: Vec<&'a [AtomicU32]>,
        ring: Option<Ring<'a>>,
        workers: usize,
        comm_workers: usize,
        limit: Duration,
        stall: Option<StallHook>,
    ) -> Self {
        let last = |s: &StallHook| programs.get(s.rank).map_or(0, |p| p.tickets(s.stream).saturating_sub(1));
        Engine {
            programs,
            local,
            counters,
            ring,
            next: programs.iter().map(|_| [AtomicU64::new(0), AtomicU64::new(0)]).collect(),
            state: Mutex::new(State { events: 0, finished: 0, sleepers: 0, given_up: None }),
            wake: Condvar::new(),
            limit,
            comm_workers,
            stall: stall.map(|s| StallHook { ticket: s.ticket.min(last(&s)), ..s }),
            running: StdMutex::new(vec![None; workers]),
            #[cfg(test)]
            ignored_waits: None,
        }
    }

    /// Takes and runs tasks until there are none left to take, or the pass is given up.
    pub(crate) fn work(&self, worker: usize, mut execute: impl FnMut(usize, &Kind)) {
        loop {
            let seen = {
                let state = self.state.lock().expect("no holder of this lock panics");
                if state.given_up.is_some() {
                    return;
                }
                state.events
            };
            match self.claim(worker) {
                Claim::Task(rank, task) => {
                    self.note_running(worker, Some((rank, task)));
                    execute(rank, &task.kind);
                    task.arrives.iter().flatten().for_each(|arrive| self.arrive(rank, arrive));
                    self.note_running(worker, None);
                    self.tell(1);
                }
                Claim::Finished => return,
                Claim::Blocked => self.sleep(seen),
                Claim::Stall => self.sleep_until_given_up(),
            }
        }
    }

    /// Another process has done something that a task here may wait for.
    pub(crate) fn heard(&self) {
        self.tell(0);
    }

    /// Tasks finished so far.
    #[cfg_attr(test, allow(dead_code, reason = "the model checker has no use for it"))]
    pub(crate) fn finished(&self) -> u64 {
        self.state.lock().expect("no holder of this lock panics").finished
    }

    fn tell(&self, finished: u64) {
        let mut state = self.state.lock().expect("no holder of this lock panics");
        state.finished += finished;
        state.events += 1;
        if state.sleepers > 0 {
            self.wake.notify_all();
        }
    }

    /// Ends the pass early: workers stop before their next task.
    pub(crate) fn give_up(&self, stalls: Vec<Stall>) {
        let mut state = self.state.lock().expect("no holder of this lock panics");
        state.given_up.get_or_insert(stalls);
        self.wake.notify_all();
    }

    /// What the ranks were waiting for, if the pass was given up.
    #[cfg_attr(test, allow(dead_code, reason = "the model checker has no use for it"))]
    pub(crate) fn into_stalls(self) -> Option<Vec<Stall>> {
        self.state.into_inner().expect("no holder of this lock panics").given_up
    }

    fn claim(&self, worker: usize) -> Claim {
        let streams = match worker < self.comm_workers {
            true => [Stream::Comm, Stream::Compute],
            false => [Stream::Compute, Stream::Comm],
        };
        let mut left = false;
        for stream in streams {
            for i in 0..self.local.len() {
                let rank = self.local.start + (worker + i) % self.local.len();
                let (program, next) = (&self.programs[rank], &self.next[rank][stream as usize]);
                loop {
                    let ticket = next.load(Ordering::Relaxed);
                    if ticket >= program.tickets(stream) {
                        break;
                    }
                    left = true;
                    let task = program.task(stream, ticket);
                    if self.unmet(rank, &task).is_some() {
                        break;
                    }
                    let order = Ordering::Relaxed;
                    if next.compare_exchange(ticket, ticket + 1, order, order).is_err() {
                        continue;
                    }
                    if self.stall == Some(StallHook { rank, stream, ticket }) {
                        self.note_running(worker, Some((rank, task)));
                        return Claim::Stall;
                    }
                    return Claim::Task(rank, task);
                }
            }
        }
        if left { Claim::Blocked } else { Claim::Finished }
    }

    /// The first wait of a task that does not hold, and the value seen.
    fn unmet(&self, rank: usize, task: &Task) -> Option<(Wait, u32)> {
        task.waits.iter().flatten().find_map(|wait| {
            #[cfg(test)]
            if self.ignored_waits.is_some_and(|ignored| ignored(wait)) {
                return None;
            }
            let seen = self.counter(rank, wait.counter).load(Ordering::Acquire);
            (seen < wait.at_least).then_some((*wait, seen))
        })
    }

    fn arrive(&self, rank: usize, arrive: &Arrive) {
        match *arrive {
            Arrive::Here(counter) => {
                self.counter(rank, counter).fetch_add(1, Ordering::Release);
            }
            Arrive::At { rank, counter } => self.arrive_at(rank as usize, counter),
            Arrive::Pushed { total } => {
                // Acquire too: the last arrival passes on what the ones before it wrote.
                if self.counter(rank, Counter::Pushed).fetch_add(1, Ordering::AcqRel) + 1 == total {
                    (0..self.programs.len()).for_each(|peer| self.arrive_at(peer, Counter::Done));
                }
            }
        }
    }

    fn arrive_at(&self, rank: usize, counter: Counter) {
        self.counter(rank, counter).fetch_add(1, Ordering::Release);
        if let Some(ring) = self.ring
            && !self.local.contains(&rank)
        {
            ring(rank);
        }
    }

    fn counter(&self, rank: usize, counter: Counter) -> &AtomicU32 {
        &self.counters[rank][self.programs[rank].place(counter)]
    }

    /// Sleeps until something has happened since `seen`; gives the pass up where nothing does within the limit.
    fn sleep(&self, seen: u64) {
        let asleep = Instant::now();
        let mut state = self.state.lock().expect("no holder of this lock panics");
        while state.events == seen && state.given_up.is_none() {
            state.sleepers += 1;
            let (guard, notified) = wait_for(&self.wake, state, self.limit);
            state = guard;
            state.sleepers -= 1;
            if !notified && state.events == seen && asleep.elapsed() >= self.limit {
                drop(state);
                return self.give_up(self.stalls(asleep.elapsed()));
            }
        }
    }

    fn sleep_until_given_up(&self) {
        let asleep = Instant::now();
        let mut state = self.state.lock().expect("no holder of this lock panics");
        while state.given_up.is_none() {
            // With every other worker gone there is nobody else to notice.
            (state, _) = wait_for(&self.wake, state, self.limit);
            if asleep.elapsed() >= 2 * self.limit && state.given_up.is_none() {
                drop(state);
                return self.give_up(self.stalls(asleep.elapsed()));
            }
        }
    }

    /// One entry a local rank: a task that it has taken and not finished, else the first that it cannot start, else its end.
    pub(crate) fn stalls(&self, waited: Duration) -> Vec<Stall> {
        let running = self.running.lock().expect("no holder of this lock panics").clone();
        let entry = |rank: usize| {
            let program = &self.programs[rank];
            let stall = |task: String, counter: Counter, seen: u32, expected: u32| Stall {
                rank,
                task,
                counter: format!("{counter} of rank {rank}"),
                seen,
                expected,
                waited_ms: waited.as_millis() as u64,
            };
            let blocked = [Stream::Compute, Stream::Comm].into_iter().find_map(|stream| {
                let ticket = self.next[rank][stream as usize].load(Ordering::Relaxed);
                let task = (ticket < program.tickets(stream)).then(|| program.task(stream, ticket))?;
                let (wait, seen) = self.unmet(rank, &task)?;
                Some(stall(task.kind.to_string(), wait.counter, seen, wait.at_least))
            });
            let unfinished = || {
                let (_, task) = running.iter().flatten().find(|(at, _)| *at == rank)?;
                let (counter, seen) = match task.arrives[0] {
                    Some(Arrive::Here(counter)) => {
                        (counter, self.counter(rank, counter).load(Ordering::Acquire))
                    }
                    _ => (Counter::Done, self.counter(rank, Counter::Done).load(Ordering::Acquire)),
                };
                Some(stall(format!("{} (taken, not finished)", task.kind), counter, seen, seen + 1))
            };
            let end = || {
                let seen = self.counter(rank, Counter::Done).load(Ordering::Acquire);
                stall("the end of the pass".into(), Counter::Done, seen, self.programs.len() as u32)
            };
            unfinished().or(blocked).unwrap_or_else(end)
        };
        self.local.clone().map(entry).collect()
    }

    fn note_running(&self, worker: usize, task: Option<(usize, Task)>) {
        self.running.lock().expect("no holder of this lock panics")[worker] = task;
    }
}
