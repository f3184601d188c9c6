//! A fixed pool of worker threads that sleep between jobs. The caller is worker 0.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// What all workers run: the argument is the worker's number.
type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    state: Mutex<State>,
    posted: Condvar,
    finished: Condvar,
}

struct State {
    job: Option<JobPtr>,
    /// Counts jobs, so that a worker runs each once.
    number: u64,
    running: usize,
    panic: Option<Box<dyn Any + Send>>,
    closed: bool,
}

#[derive(Clone, Copy)]
struct JobPtr(Job);
// SAFETY: the pointee is Sync, and `Pool::run` outlives every use of the pointer.
unsafe impl Send for JobPtr {}

/// Threads that run one job at a time, all together.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `workers` in all, the caller among them.
    pub(crate) fn new(workers: usize) -> std::io::Result<Self> {
        let state = State { job: None, number: 0, running: 0, panic: None, closed: false };
        let shared =
            Arc::new(Shared { state: Mutex::new(state), posted: Condvar::new(), finished: Condvar::new() });
        let mut pool = Pool { shared, threads: Vec::new() };
        for worker in 1..workers.max(1) {
            let shared = pool.shared.clone();
            let thread = std::thread::Builder::new().name(format!("kodkod-{worker}"));
            pool.threads.push(thread.spawn(move || serve(&shared, worker))?);
        }
        Ok(pool)
    }

    /// Runs `job(worker)` on every worker and returns when all have returned; a panic's message is the error.
    /// One job at a time: the caller holds the pool exclusively.
    pub(crate) fn run(&mut self, job: &(dyn Fn(usize) + Sync)) -> Result<(), String> {
        // SAFETY: only the lifetime changes; this function does not return before `running` is 0 again, and a
        // worker uses the pointer only while it is counted there.
        let job_ptr = JobPtr(unsafe {
            std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(job)
        });
        {
            let mut state = self.lock();
            state.job = Some(job_ptr);
            state.number += 1;
            state.running = self.threads.len();
            self.shared.posted.notify_all();
        }
        let mine = catch_unwind(AssertUnwindSafe(|| job(0)));
        let mut state = self.lock();
        while state.running > 0 {
            state = self.shared.finished.wait(state).expect("no holder of this lock panics");
        }
        state.job = None;
        match mine.err().or_else(|| state.panic.take()) {
            None => Ok(()),
            Some(panic) => Err(message(&*panic)),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.shared.state.lock().expect("no holder of this lock panics")
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.lock().closed = true;
        self.shared.posted.notify_all();
        for thread in self.threads.drain(..) {
            // A worker catches the panics of jobs, so it has none of its own to report.
            let _ = thread.join();
        }
    }
}

fn serve(shared: &Shared, worker: usize) {
    let mut done = 0;
    loop {
        let job = {
            let mut state = shared.state.lock().expect("no holder of this lock panics");
            loop {
                if state.closed {
                    return;
                }
                match state.job {
                    Some(job) if state.number != done => {
                        done = state.number;
                        break job;
                    }
                    _ => state = shared.posted.wait(state).expect("no holder of this lock panics"),
                }
            }
        };
        // SAFETY: `Pool::run` keeps the job alive until this worker has counted itself out below.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe { (*job.0)(worker) }));
        let mut state = shared.state.lock().expect("no holder of this lock panics");
        if let Err(panic) = result {
            state.panic.get_or_insert(panic);
        }
        state.running -= 1;
        if state.running == 0 {
            shared.finished.notify_one();
        }
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "unknown panic".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_worker_runs_every_job_once_and_panics_are_reported() {
        let mut pool = Pool::new(4).unwrap();
        let count = AtomicUsize::new(0);
        for _ in 0..100 {
            pool.run(&|_| {
                count.fetch_add(1, Ordering::Relaxed);
            })
            .unwrap();
        }
        assert_eq!(count.load(Ordering::Relaxed), 400);
        assert_eq!(pool.run(&|w| assert!(w != 2, "worker two")), Err("worker two".into()));
        assert_eq!(pool.run(&|_| ()), Ok(()));
    }
}
