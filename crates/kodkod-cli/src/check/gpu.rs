//! What only a GPU is checked for: a task that stalls there, and passes replayed from a CUDA graph.

use std::time::{Duration, Instant};

use kodkod::cuda::driver::Device as Gpu;
use kodkod::cuda::{CudaLayer, DeviceStep, DeviceWeights, Hang, new_gradients, read_gradients};
use kodkod::{Error, Precision, Routing, bf16};

use super::cases::{self, Case, Random};
use super::{Config, DEVICE, Row};
use crate::options::Device;
use crate::step::{Gradients, Outputs};

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
    let Some(&Device::Cuda(ordinal)) = DEVICE.get() else { return Ok(()) };
    let (gpu, step) = (Gpu::new(ordinal)?, case.step.convert::<bf16>());
    let shape = &step.shape;
    let split = Routing::even_split(step.tokens(), ranks);
    let routing = step.routing(&split)?;
    let knobs = Config::even(step.tokens(), ranks).rows(128, 128, 0).knobs(shape);
    let mut layer = CudaLayer::new(&gpu, shape, &knobs, &split, Precision::F32)?;
    let dy = step.dy.as_deref().unwrap_or_default();
    let on_gpu = DeviceStep::new(shape, &step.x, dy, routing.ids(), routing.weights())?;
    let weights = DeviceWeights::from_host(&step.weights.as_ref())?;
    let gradients = new_gradients::<f32>(shape)?;
    let call = |layer: &CudaLayer| {
        layer.forward(&on_gpu, &weights)?;
        layer.finish()?;
        layer.backward(&on_gpu, &weights, &gradients, false)?;
        layer.finish()
    };
    call(&layer)?;
    let right = (on_gpu.y.read()?, on_gpu.dx.read()?, gradients.down.read()?);
    layer.set_wait_limit(wait_limit);
    layer.set_hang(Some(Hang { pass, rank: ranks - 1, kind, block: 0, tile: 0 }));
    let start = Instant::now();
    match call(&layer) {
        Ok(()) => row.miss(format!("{what}: it came to an end")),
        Err(kodkod::cuda::Error::Layer(Error::Stalled(stalls))) => {
            let named = stalls.iter().any(|s| s.rank < ranks && !s.task.is_empty() && s.seen < s.expected);
            if !named || start.elapsed() > wait_limit + Duration::from_secs(5) {
                row.miss(format!("{what}: {}", Error::Stalled(stalls)));
            }
        }
        Err(error) => return Err(error),
    }
    layer.set_hang(None);
    layer.set_wait_limit(Duration::from_secs(10));
    call(&layer)?;
    let bits = |v: &[bf16]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let same = bits(&on_gpu.y.read()?) == bits(&right.0)
        && bits(&on_gpu.dx.read()?) == bits(&right.1)
        && gradients.down.read()?.iter().zip(&right.2).all(|(a, b)| a.to_bits() == b.to_bits());
    if !same {
        row.bit_mismatches += 1;
        row.miss(format!("{what}: other bits in the call after"));
    }
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
    let Some(&Device::Cuda(ordinal)) = DEVICE.get() else { return Ok(()) };
    let (gpu, step) = (Gpu::new(ordinal)?, case.step.convert::<bf16>());
    let shape = &step.shape;
    let split = Routing::even_split(step.tokens(), ranks);
    let routing = step.routing(&split)?;
    let knobs = Config::even(step.tokens(), ranks).rows(128, 256, 128).knobs(shape);
    let layer = CudaLayer::new(&gpu, shape, &knobs, &split, Precision::F32)?;
    let dy = step.dy.as_deref().unwrap_or_default();
    let on_gpu = DeviceStep::new(shape, &step.x, dy, routing.ids(), routing.weights())?;
    let (weights, gradients) =
        (DeviceWeights::from_host(&step.weights.as_ref())?, new_gradients::<f32>(shape)?);
    let stream = layer.stream();
    // All that a run leaves, in buffers that hold NaN before.
    let outcome = |run: &dyn Fn() -> kodkod::cuda::Result<()>| {
        layer.poison()?;
        for rows in [&on_gpu.y, &on_gpu.dx] {
            rows.fill(0xff, stream)?;
        }
        on_gpu.d_topk_weights.fill(0xff, stream)?;
        gradients.as_ref().try_map(|b| b.fill(0xff, stream), |b| b.fill(0xff, stream))?;
        run()?;
        layer.finish()?;
        Ok::<_, kodkod::cuda::Error>(Outputs {
            y: on_gpu.y.read()?,
            gradients: Some(Gradients {
                dx: on_gpu.dx.read()?,
                d_topk_weights: on_gpu.d_topk_weights.read()?,
                weights: read_gradients(&gradients)?,
            }),
            forward: Duration::ZERO,
            backward: Duration::ZERO,
        })
    };
    let captured = layer.capture(&on_gpu, &weights, Some(&gradients))?;
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
            let routing = step.routing(&split)?;
            on_gpu.x.write(&step.x)?;
            on_gpu.dy.write(step.dy.as_deref().unwrap_or_default())?;
            on_gpu.ids.write(routing.ids())?;
            on_gpu.topk_weights.write(routing.weights())?;
            weights.gate.write(&step.weights.gate)?;
            weights.up.write(&step.weights.up)?;
            weights.down.write(&step.weights.down)?;
        }
        let what = format!("{ranks} ranks, replay {seed} ({other})");
        let direct = outcome(&|| {
            layer.forward(&on_gpu, &weights)?;
            layer.backward(&on_gpu, &weights, &gradients, false)
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
