//! What only a GPU is checked for: a task that stalls there, and passes replayed from a CUDA graph.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kodkod::cuda::driver::Device as Gpu;
use kodkod::cuda::{CudaLayer, Hang};
use kodkod::{Error, Routing, bf16};

use super::cases::{self, Case, Random};
use super::{Config, DEVICE, Row};
use crate::on_gpus::{self, OnGpus};

/// The run's GPUs for so many ranks.
fn gpus(ranks: usize) -> kodkod::cuda::Result<Vec<Arc<Gpu>>> {
    on_gpus::open(DEVICE.get().map_or(&[], |device| device.gpus(ranks)))
}

/// A tile of one rank never ends: the call returns within the limit and names a rank, its task and its counter; the
/// next call on the same layer has the right bits.
pub(super) fn stalled(mut row: Row, wait_limit: Duration) -> Row {
    let case = (cases::contract().swap_remove(0).build)();
    for ranks in [1, 2, 4] {
        for (pass, kind) in [(0, 2), (0, 3), (1, 4), (1, 5)] {
            row.runs += 1;
            let what = format!("{ranks} ranks, task kind {kind} of pass {pass}");
            if let Err(error) = stall(&mut row, &case, ranks, pass, kind, wait_limit, &what) {
                row.miss(format!("{what}: {error}"));
            }
        }
    }
    row
}

fn stall(
    row: &mut Row,
    case: &Case,
    ranks: usize,
    pass: usize,
    kind: u32,
    wait_limit: Duration,
    what: &str,
) -> kodkod::cuda::Result<()> {
    let step = case.step.convert::<bf16>();
    let split = Routing::even_split(step.tokens(), ranks);
    let knobs = Config::even(step.tokens(), ranks).rows(128, 128, 0).knobs(&step.shape);
    let mut on_gpus = OnGpus::<f32>::new(&gpus(ranks)?, &knobs, &step, &split, CudaLayer::new)?;
    let call = |on_gpus: &OnGpus<f32>| {
        on_gpus.forward()?;
        on_gpus.layer.finish()?;
        on_gpus.backward()?;
        on_gpus.layer.finish()
    };
    call(&on_gpus)?;
    let right = on_gpus.outputs()?;
    on_gpus.layer.set_wait_limit(wait_limit);
    on_gpus.layer.set_hang(Some(Hang { pass, rank: ranks - 1, kind, block: 0, tile: 0 }));
    let start = Instant::now();
    match call(&on_gpus) {
        Ok(()) => row.miss(format!("{what}: it came to an end")),
        Err(kodkod::cuda::Error::Layer(Error::Stalled(stalls))) => {
            let named = stalls.iter().any(|s| s.rank < ranks && !s.task.is_empty() && s.seen < s.expected);
            if !named || start.elapsed() > wait_limit + Duration::from_secs(5) {
                row.miss(format!("{what}: {}", Error::Stalled(stalls)));
            }
        }
        Err(error) => return Err(error),
    }
    on_gpus.layer.set_hang(None);
    on_gpus.layer.set_wait_limit(Duration::from_secs(10));
    call(&on_gpus)?;
    row.same_bits(&format!("{what}, the call after"), &right, &on_gpus.outputs()?);
    Ok(())
}

/// Passes are captured once, then replayed with other rows, routes and weights: the bits of direct calls.
pub(super) fn graphs(mut row: Row) -> Row {
    let case = (cases::contract().swap_remove(1).build)();
    for ranks in [1, 2, 4] {
        if let Err(error) = graph(&mut row, &case, ranks) {
            row.miss(format!("{ranks} ranks: {error}"));
        }
    }
    row
}

fn graph(row: &mut Row, case: &Case, ranks: usize) -> kodkod::cuda::Result<()> {
    let step = case.step.convert::<bf16>();
    let shape = &step.shape;
    let split = Routing::even_split(step.tokens(), ranks);
    let knobs = Config::even(step.tokens(), ranks).rows(128, 256, 128).knobs(shape);
    let on_gpus = OnGpus::<f32>::new(&gpus(ranks)?, &knobs, &step, &split, CudaLayer::new)?;
    // All that a run leaves, in buffers that hold NaN before.
    let outcome = |run: &dyn Fn() -> kodkod::cuda::Result<()>| {
        on_gpus.poison()?;
        run()?;
        on_gpus.layer.finish()?;
        on_gpus.outputs()
    };
    let captured = on_gpus.capture()?;
    let (tokens, k, experts) = (step.tokens(), shape.top_k, shape.experts as i64);
    let mut random = Random::new(63);
    let mut id = |other: &str| match other {
        "no route" => -1,
        "one expert" => 3,
        _ => random.below(experts as usize + 1) as i64 - 1,
    };
    for (seed, other) in
        ["its own", "other routes", "one expert", "no route", "other routes"].into_iter().enumerate()
    {
        if seed > 0 {
            let ids = (0..tokens * k).map(|_| id(other)).collect();
            let step = cases::step(shape.clone(), ids, &mut Random::new(seed as u64)).convert::<bf16>();
            on_gpus.write(&step)?;
        }
        let what = format!("{ranks} ranks, replay {seed} ({other})");
        let direct = outcome(&|| {
            on_gpus.forward()?;
            on_gpus.backward()
        })?;
        let replayed = outcome(&|| captured.launch())?;
        row.runs += 2;
        row.same_bits(&what, &direct, &replayed);
        if direct.named().iter().any(|(_, values)| values.iter().any(|v| !v.is_finite())) {
            row.miss(format!("{what}: an output is not finite"));
        }
    }
    Ok(())
}
