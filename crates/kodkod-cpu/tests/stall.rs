//! A worker that stalls in mid-pass: the call returns an error that names every rank, its task and its counter,
//! within the limit, and the group works again afterwards.

use std::time::{Duration, Instant};

use half::bf16;
use kodkod_core::program::Stream;
use kodkod_core::{Error, Knobs, Routing, Shape, WeightGradients, Weights};
use kodkod_cpu::{CpuGroup, CpuOptions, StallHook};

const TOKENS: usize = 64;

struct Step {
    shape: Shape,
    x: Vec<bf16>,
    weight: Vec<bf16>,
    ids: Vec<i32>,
}

impl Step {
    fn new() -> Self {
        let shape = Shape::new(64, 64, 4, 2);
        let values =
            |n: usize| (0..n).map(|i| bf16::from_f32((i % 13) as f32 * 0.1 - 0.6)).collect::<Vec<_>>();
        let ids = (0..TOKENS * 2).map(|i| (i * 7 % 4) as i32).collect();
        Step { x: values(TOKENS * 64), weight: values(4 * 64 * 64), ids, shape }
    }

    fn run(
        &self,
        ranks: usize,
        threads: usize,
        stall: Option<StallHook>,
        backward: bool,
    ) -> Result<(), Error> {
        let good = CpuGroup::new(CpuOptions { ranks, threads, ..CpuOptions::default() })?;
        let wait_limit = Duration::from_millis(40);
        let stalled =
            CpuGroup::new(CpuOptions { ranks, threads, wait_limit, stall, ..CpuOptions::default() })?;
        let weights = Weights {
            gate: &self.weight[..],
            up: &self.weight,
            down: &self.weight,
            biases: None,
            shared: None,
        };
        let routing =
            Routing::new(&self.shape, &self.ids, &[0.5; TOKENS * 2], &Routing::even_split(TOKENS, ranks))?;
        let knobs = Knobs::for_shape(&self.shape).with_rows(Some(128), Some(128), Some(0));
        let mut gradients = WeightGradients::zeros(&self.shape);
        if backward {
            let (_, saved) = good.forward(&self.shape, &knobs, &self.x, &routing, &weights)?;
            stalled.backward(&saved, &self.x, &self.x, &weights, gradients.as_mut(), false)?;
        } else {
            stalled.forward(&self.shape, &knobs, &self.x, &routing, &weights)?;
        }
        Ok(())
    }
}

#[test]
fn every_rank_is_named_within_the_limit() {
    let step = Step::new();
    for (ranks, threads) in [(1, 1), (1, 2), (2, 2), (4, 2), (4, 5)] {
        for backward in [false, true] {
            for stream in [Stream::Comm, Stream::Compute] {
                for ticket in [0, 1, u64::MAX] {
                    let hook = StallHook { rank: ranks - 1, stream, ticket };
                    let start = Instant::now();
                    let error = step.run(ranks, threads, Some(hook), backward).unwrap_err();
                    let took = start.elapsed();
                    let Error::Stalled(stalls) = &error else { panic!("{error}") };
                    let named: Vec<_> = stalls.iter().map(|s| s.rank).collect();
                    assert_eq!(named, (0..ranks).collect::<Vec<_>>(), "{error}");
                    assert!(
                        stalls.iter().all(|s| !s.task.is_empty() && s.counter.contains("rank")),
                        "{error}"
                    );
                    assert!(took < Duration::from_secs(5), "{took:?}");
                    if ticket == 1 && ranks == 2 {
                        println!("{hook:?}: {took:?}: {error}");
                    }
                }
            }
        }
    }
}

#[test]
fn the_last_ticket_stands_for_those_beyond_it_and_no_hook_means_no_stall() {
    let step = Step::new();
    for backward in [false, true] {
        step.run(2, 3, None, backward).unwrap();
    }
}
