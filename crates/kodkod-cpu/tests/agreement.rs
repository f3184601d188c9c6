//! What processes hear of each other's failures.

use std::env;
use std::process::Command;
use std::time::Duration;

use kodkod_core::{Error, Stall};
use kodkod_cpu::Processes;

const LIMIT: Duration = Duration::from_secs(20);
/// Set in the second process, to the group's name.
const SECOND: &str = "KODKOD_TEST_SECOND";

/// Two ranks that cannot do their part both hear the first one's reason, and the group goes on.
#[test]
fn all_hear_the_first_refusal() {
    let exchange = |rank: usize, name: &str| {
        let mut processes = Processes::join(rank, 2, name, LIMIT).unwrap();
        let own = Error::Machine(format!("reason {rank}"));
        let said = processes.exchange("a try", Err(&own));
        let error = processes.settle(said).unwrap_err().to_string();
        assert_eq!(error, ["reason 0", "the call of rank 0 is refused: reason 0"][rank], "rank {rank}");
        let said = processes.exchange("another", Ok(["zero", "one"][rank]));
        assert_eq!(processes.settle(said).unwrap(), ["zero", "one"], "rank {rank}");
    };
    if let Ok(name) = env::var(SECOND) {
        return exchange(1, &name);
    }
    let name = format!("kodkod-refusal-{}", std::process::id());
    let mut second = Command::new(env::current_exe().unwrap());
    let mut second =
        second.args(["--exact", "all_hear_the_first_refusal"]).env(SECOND, &name).spawn().unwrap();
    exchange(0, &name);
    assert!(second.wait().unwrap().success());
}

/// A CUDA graph may run a pass that was finished again, and give it up then.
#[test]
fn a_pass_that_was_finished_can_be_given_up() {
    let name = format!("kodkod-given-up-{}", std::process::id());
    let mut processes = Processes::join(0, 1, &name, LIMIT).unwrap();
    let agreed = processes.agree("a forward", Ok(3), "", &vec![]);
    processes.settle(agreed).unwrap();
    processes.begin("a forward");
    processes.pass_done();
    let (task, counter) = ("Enter".to_owned(), "ranks that came".to_owned());
    let stall = Stall { rank: 0, task, counter, seen: 1, expected: 2, waited_ms: 70 };
    let given_up = Err(processes.stalled(&stall));
    let error = processes.settle::<()>(given_up).unwrap_err();
    println!("{error}");
    assert_eq!(error, Error::Stalled(vec![stall]));
    assert!(processes.usable().unwrap_err().to_string().contains("is broken"));
}
