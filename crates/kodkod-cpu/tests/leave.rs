//! How processes part: each waits for the others, but not for ever.

use std::env;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use kodkod_cpu::Processes;

/// Set in the second process, to the group's name.
const SECOND: &str = "KODKOD_TEST_SECOND";

fn join(rank: usize, name: &str) -> Processes {
    Processes::join(rank, 2, name, Duration::from_secs(20)).unwrap()
}

/// How long this process, of two, takes to leave within `limit`, where the other leaves `late` or dies then.
fn first_leaves(test: &str, late: Duration, limit: Duration, dies: bool) -> Duration {
    if let Ok(name) = env::var(SECOND) {
        let second = join(1, &name);
        sleep(late);
        if dies {
            // Nothing is dropped.
            std::process::exit(0);
        }
        second.leave(limit);
        return Duration::ZERO;
    }
    let name = format!("kodkod-{test}-{}", std::process::id());
    let mut second =
        Command::new(env::current_exe().unwrap()).args(["--exact", test]).env(SECOND, &name).spawn().unwrap();
    let first = join(0, &name);
    let start = Instant::now();
    first.leave(limit);
    let took = start.elapsed();
    println!("{test}: left after {took:?}");
    drop(first);
    assert!(second.wait().unwrap().success());
    took
}

fn is_second() -> bool {
    env::var_os(SECOND).is_some()
}

#[test]
fn a_rank_leaves_when_all_do() {
    let (late, limit) = (Duration::from_millis(300), Duration::from_secs(20));
    let took = first_leaves("a_rank_leaves_when_all_do", late, limit, false);
    assert!(is_second() || (200..10_000).contains(&took.as_millis()), "{took:?}");
}

#[test]
fn a_rank_leaves_when_the_others_die() {
    let (late, limit) = (Duration::from_millis(300), Duration::from_secs(20));
    let took = first_leaves("a_rank_leaves_when_the_others_die", late, limit, true);
    assert!(is_second() || (200..10_000).contains(&took.as_millis()), "{took:?}");
}

#[test]
fn a_rank_does_not_wait_for_one_that_stays() {
    let (late, limit) = (Duration::from_secs(2), Duration::from_millis(200));
    let took = first_leaves("a_rank_does_not_wait_for_one_that_stays", late, limit, false);
    assert!(is_second() || (200..1900).contains(&took.as_millis()), "{took:?}");
}
