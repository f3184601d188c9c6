//! The contract of bits, one thing at a time: ranks, splits, knobs, threads, instruction sets, repeats, what was in
//! memory before, accumulation, and the type of gradients.

use std::time::{Duration, Instant};

use kodkod::program::Stream;
use kodkod::{
    CpuOptions, Error, ExpertGroup, GradientElement, Isa, Knobs, MoeLayer, Precision, Shape, StallHook, bf16,
};

use super::cases::{self, Case, Random};
use super::{Config, Job, Row, gpu, gpus, most_ranks, on_gpu, precisions};
use crate::step::{Gradients, Outputs, Step, Values, filled};

/// One thing that is turned, and all the ways to set it.
type Dimension = (&'static str, fn(&Case) -> Vec<Config>);

const DIMENSIONS: [Dimension; 9] = [
    ("bits: ranks 1, 2, 4, 8", |case| [2, 4, 8].map(|ranks| even(case, ranks)).to_vec()),
    ("bits: ragged splits", |case| case.splits.iter().map(|split| Config::split(split)).collect()),
    ("bits: minibatch_rows", |case| {
        let config = |rows| Config { minibatch_rows: Some(rows), ..even(case, 2) };
        [128, 256, 384, 1024, 8192].map(config).to_vec()
    }),
    ("bits: ring_rows, down to one minibatch", |case| {
        let rings = [(128, 128), (128, 256), (128, 384), (256, 256), (256, 2560)];
        let config = |(minibatch, ring)| {
            let rows = |config: Config| config.rows(minibatch, ring, 0);
            [rows(even(case, 1)), rows(even(case, 2))]
        };
        rings.into_iter().flat_map(config).collect()
    }),
    ("bits: saved_rows, from 0 to all", |case| {
        let config = |saved| [even(case, 1).rows(128, 256, saved), even(case, 4).rows(128, 128, saved)];
        [0, 127, 128, 300, 640, Knobs::ALL].into_iter().flat_map(config).collect()
    }),
    ("bits: fwd_comm_sms, bwd_comm_sms", |case| {
        let config = |comm_sms| Config { comm_sms, ..even(case, 2).threads(2) };
        [(1, 2), (2, 1), (7, 3), (1024, 1024)].map(config).to_vec()
    }),
    ("bits: threads 1 to 4", |case| {
        (1..=4).flat_map(|threads| [1, 2, 8].map(|ranks| even(case, ranks).threads(threads))).collect()
    }),
    ("bits: every instruction set", |case| {
        Isa::available().into_iter().map(|isa| Config { isa: Some(isa), ..even(case, 2) }).collect()
    }),
    ("bits: all of these together", |case| {
        let mut r = Random::new(70);
        let splits: Vec<_> = case.splits.iter().map(|split| Config::split(split)).collect();
        let config = |_| {
            let minibatch = r.pick(&[128, 256, 384]);
            let config = match r.chance(0.5) {
                true => r.pick(&splits),
                false => even(case, r.pick(&[1, 2, 4, 8])),
            };
            let config = Config { isa: Some(r.pick(&Isa::available())), ..config };
            let config = Config { comm_sms: (1 + r.below(3), 1 + r.below(3)), ..config };
            config.threads(1 + r.below(4)).rows(minibatch, minibatch * (1 + r.below(3)), 128 * r.below(12))
        };
        (0..12).map(config).collect()
    }),
];

/// All of them; on a GPU without those of the CPU alone.
fn dimensions() -> impl Iterator<Item = Dimension> {
    let cpu_alone = ["bits: threads 1 to 4", "bits: every instruction set"];
    DIMENSIONS.into_iter().filter(move |(name, _)| !on_gpu() || !cpu_alone.contains(name))
}

/// Every way that the inputs are run, for the kernels to be compiled before.
pub(super) fn configs(case: &Case) -> Vec<Config> {
    let rows = [1, 2, 4, 8].into_iter().flat_map(|ranks| {
        let rows = |ring, saved| even(case, ranks).rows(128, ring, saved);
        [even(case, ranks), rows(128, 0), rows(256, 128), rows(256, 256)]
    });
    dimensions().flat_map(|(_, configs)| configs(case)).chain(rows).collect()
}

/// The row that runs backwards with gradients in bf16.
pub(super) const BF16_GRADIENTS: &str = "gradients in bf16: those in f32, rounded once";

/// The ways that it runs them: with ranks and knobs of [`configs`].
pub(super) fn bf16_configs(case: &Case) -> Vec<Config> {
    let knobs = [1, 2, 4].into_iter().flat_map(|ranks| {
        let config = even(case, ranks);
        [config.clone(), config.clone().rows(128, 128, 0), config.rows(128, 256, 128)]
    });
    let ragged = case.splits.iter().filter(|split| split.len() <= 4).map(|split| Config::split(split));
    knobs.chain(ragged.map(|config| config.rows(128, 128, 0))).collect()
}

fn even(case: &Case, ranks: usize) -> Config {
    Config::even(case.step.tokens(), ranks)
}

/// A check of one input in one precision.
type Check<T> = fn(&mut Row, &Case, &Step<T>);

/// A row for both precisions.
fn both(jobs: &mut Vec<Job>, name: &str, half: Check<bf16>, single: Check<f32>) {
    jobs.push(Job::new(name, Some(Precision::Bf16), move |row| over_inputs(row, half)));
    if !on_gpu() {
        jobs.push(Job::new(name, Some(Precision::F32), move |row| over_inputs(row, single)));
    }
}

fn over_inputs<T: kodkod::Element>(mut row: Row, check: Check<T>) -> Row {
    for named in cases::contract() {
        let case = (named.build)();
        let before = row.misses.len();
        check(&mut row, &case, &case.step.convert::<T>());
        row.misses[before..].iter_mut().for_each(|miss| *miss = format!("input {:?}, {miss}", named.name));
    }
    row
}

pub(super) fn jobs(quick: bool) -> Vec<Job> {
    let mut jobs = Vec::new();
    for (name, configs) in dimensions() {
        for &precision in precisions() {
            jobs.push(Job::new(name, Some(precision), move |mut row| {
                for named in cases::contract() {
                    let case = (named.build)();
                    let mut configs = configs(&case);
                    configs.retain(|config| config.tokens_per_rank.len() <= most_ranks());
                    match precision {
                        Precision::Bf16 => {
                            turn(&mut row, &named.name, &case.step.convert::<bf16>(), &configs)
                        }
                        Precision::F32 => turn(&mut row, &named.name, &case.step, &configs),
                    }
                }
                row
            }));
        }
    }
    both(&mut jobs, "bits: 20 repeats", repeats, repeats);
    both(&mut jobs, "case-02 gradient buffers full of NaN", poisoned_gradients, poisoned_gradients);
    both(&mut jobs, "case-02 memory full of an earlier call's NaN", poisoned_memory, poisoned_memory);
    both(&mut jobs, "accumulate into zeros", accumulate_zeros, accumulate_zeros);
    both(&mut jobs, "accumulate into a caller's numbers", accumulate, accumulate);
    both(&mut jobs, BF16_GRADIENTS, bf16_gradients, bf16_gradients);
    let identical = match gpus() {
        0 | 1 => "case-14 identical call 100 times",
        _ => "case-14 identical call 100 times, and 500 between GPUs",
    };
    jobs.push(Job::new(identical, Some(Precision::Bf16), hundred));
    if on_gpu() {
        jobs.push(Job::new("bits: replays of a CUDA graph", Some(Precision::Bf16), gpu::graphs));
    }
    let limit = Duration::from_millis(if quick { 50 } else { 200 });
    jobs.push(Job::new("case-18 a worker that stalls", Some(Precision::Bf16), move |row| {
        if on_gpu() { gpu::stalled(row, limit) } else { stalled(row, limit) }
    }));
    jobs
}

fn turn<T: kodkod::Element>(row: &mut Row, input: &str, step: &Step<T>, configs: &[Config]) {
    let alone = Config::even(step.tokens(), 1).threads(1);
    let Some(first) = row.run(&alone, alone.run(step)) else {
        return;
    };
    for config in configs {
        if let Some(outputs) = row.run(config, config.run(step)) {
            row.same_bits(&format!("input {input:?}, {config}"), &first, &outputs);
        }
    }
}

fn repeat<T: kodkod::Element>(row: &mut Row, step: &Step<T>, config: &Config, times: usize) {
    let group = match config.group() {
        Ok(group) => group,
        Err(error) => return row.miss(error.to_string()),
    };
    let run = || step.run(&group, config.knobs(&step.shape), &config.tokens_per_rank);
    let Some(first) = row.run(config, run()) else {
        return;
    };
    for time in 1..times {
        if let Some(outputs) = row.run(config, run()) {
            row.same_bits(&format!("{config}, call {time}"), &first, &outputs);
        }
    }
}

fn repeats<T: kodkod::Element>(row: &mut Row, case: &Case, step: &Step<T>) {
    repeat(row, step, &even(case, 4).threads(4).rows(128, 256, 128), 20);
}

fn hundred(mut row: Row) -> Row {
    if on_gpu() {
        // An input that has kernels.
        let case = (cases::contract().swap_remove(1).build)();
        let step = case.step.convert::<bf16>();
        repeat(&mut row, &step, &even(&case, 4).rows(128, 128, 0), 100);
        // Between GPUs there is more that could come in another order.
        if gpus() > 1 {
            repeat(&mut row, &step, &even(&case, gpus()).rows(128, 256, 128), 500);
        }
        return row;
    }
    let mut r = Random::new(14);
    let ids = (0..400).map(|_| r.below(4) as i64).collect();
    let step = cases::step(Shape::new(32, 32, 4, 2), ids, &mut r).convert::<bf16>();
    repeat(&mut row, &step, &Config::even(200, 2).threads(3).rows(128, 128, 0), 100);
    row
}

/// Overwriting gives the same whether the buffers held NaN or zeros.
fn poisoned_gradients<T: kodkod::Element>(row: &mut Row, case: &Case, step: &Step<T>) {
    let config = even(case, 4).rows(128, 128, 0);
    let Some(first) = row.run(&config, config.run(step)) else {
        return;
    };
    for (name, values) in first.named() {
        if let Some(at) = values.iter().position(|v| !v.is_finite()) {
            row.miss(format!("{name}[{at}] is {}", values.get(at)));
        }
    }
    let into = |value| {
        let buffers = filled(&step.shape, value);
        step.run_into(&config.group()?, config.knobs(&step.shape), &config.tokens_per_rank, buffers, false)
    };
    for value in [0.0, 1e30, f32::INFINITY] {
        if let Some(outputs) = row.run(&config, into(value)) {
            row.same_bits(&format!("{config}, gradients full of {value:e}"), &first, &outputs);
        }
    }
}

/// A call whose every number is NaN leaves nothing behind for the next one on the same group.
fn poisoned_memory<T: kodkod::Element>(row: &mut Row, case: &Case, step: &Step<T>) {
    for config in [even(case, 1), even(case, 4).rows(128, 128, 0), even(case, 2).rows(128, 256, 256)] {
        let Some(first) = row.run(&config, config.run(step)) else {
            continue;
        };
        let Some(group) = config.group().map_err(|e| row.miss(e.to_string())).ok() else {
            continue;
        };
        let run = |step: &Step<T>| step.run(&group, config.knobs(&step.shape), &config.tokens_per_rank);
        let mut nan = step.clone();
        nan.x.fill(T::from_f32(f32::NAN));
        row.run(&config, run(&nan));
        if let Some(outputs) = row.run(&config, run(step)) {
            row.same_bits(&format!("{config}, after NaN"), &first, &outputs);
        }
    }
}

fn accumulate_zeros<T: kodkod::Element>(row: &mut Row, case: &Case, step: &Step<T>) {
    for config in [even(case, 1), even(case, 2).rows(128, 256, 128), even(case, 8).rows(128, 128, 0)] {
        let Some(first) = row.run(&config, config.run(step)) else {
            continue;
        };
        let into_zeros = || {
            let buffers = filled(&step.shape, 0.0);
            step.run_into(&config.group()?, config.knobs(&step.shape), &config.tokens_per_rank, buffers, true)
        };
        if let Some(outputs) = row.run(&config, into_zeros()) {
            row.same_bits(&format!("{config}, into zeros"), &first, &outputs);
        }
    }
}

/// `buffer + gradient`, within the tolerance of f32 sums, with the same bits for any ranks and knobs; an expert
/// without rows leaves its part of the buffer alone.
fn accumulate<T: kodkod::Element>(row: &mut Row, case: &Case, step: &Step<T>) {
    let step = &without_expert_3(step);
    const START: f32 = 0.75;
    let run = |config: &Config, accumulate| {
        let buffers = filled(&step.shape, START);
        step.run_into(
            &config.group()?,
            config.knobs(&step.shape),
            &config.tokens_per_rank,
            buffers,
            accumulate,
        )
    };
    let alone = even(case, 1);
    let Some(plain) = row.run(&alone, run(&alone, false)) else {
        return;
    };
    let Some(first) = row.run(&alone, run(&alone, true)) else {
        return;
    };
    for ((name, added), (_, overwritten)) in first.named().into_iter().zip(plain.named()) {
        let Values::F32(_) = added else { continue };
        let start = if name.starts_with("d_topk") { 0.0 } else { f64::from(START) };
        let (mut error, mut sum) = (0.0, 0.0);
        for (a, b) in added.iter().zip(overwritten.iter()).map(|(a, b)| (f64::from(a), f64::from(b))) {
            error += (a - (start + b)).abs();
            sum += (start + b).abs();
        }
        if error.is_nan() || error > 1e-5 * sum {
            row.miss(format!("{name} is off by {:.2e} of buffer + gradient", error / sum));
        }
    }
    if let Some(g) = &first.gradients {
        let len = step.shape.hidden * step.shape.intermediate;
        let idle = [&g.weights.gate, &g.weights.up, &g.weights.down].map(|w| &w[3 * len..4 * len]);
        if let Some(v) = idle.into_iter().flatten().find(|v| v.to_bits() != START.to_bits()) {
            row.miss(format!("a gradient of idle expert 3 was {START} and is {v:e}"));
        }
    }
    for config in
        [even(case, 2).rows(128, 256, 128), even(case, 4).threads(3), even(case, 8).rows(128, 128, 0)]
    {
        if let Some(outputs) = row.run(&config, run(&config, true)) {
            row.same_bits(&format!("{config}, accumulating"), &first, &outputs);
        }
    }
}

/// The step with an expert that has no rows.
fn without_expert_3<T: kodkod::Element>(step: &Step<T>) -> Step<T> {
    let mut idle = step.clone();
    idle.ids.iter_mut().filter(|id| **id == 3).for_each(|id| *id = 1);
    idle
}

/// Gradients in bf16 are those in f32 from the same start, rounded once, for any ranks and knobs: overwriting, adding to
/// what that left, and adding again.
fn bf16_gradients<T: kodkod::Element>(row: &mut Row, case: &Case, step: &Step<T>) {
    let step = &without_expert_3(step);
    let alone = even(case, 1);
    let mut expected = match backwards::<T, f32>(step, &alone) {
        Ok(sums) => sums,
        Err(error) => return row.miss(format!("{alone}, in f32: {error}")),
    };
    row.runs += expected.len();
    for weights in expected.iter_mut().filter_map(|o| o.gradients.as_mut()).map(|g| &mut g.weights) {
        let rounded = weights.convert::<bf16>().convert::<f32>();
        let moved =
            weights.gate.iter().zip(&rounded.gate).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        if moved <= weights.gate.len() / 2 {
            row.miss(format!("{moved} of {} sums have more bits than bf16: too few", weights.gate.len()));
        }
        *weights = rounded;
    }
    for config in bf16_configs(case) {
        match backwards::<T, bf16>(step, &config) {
            Ok(all) => {
                row.runs += all.len();
                for (time, (first, ours)) in expected.iter().zip(&all).enumerate() {
                    row.same_bits(&format!("{config}, backward {time}"), first, ours);
                }
            }
            Err(error) => row.miss(format!("{config}: {error}")),
        }
    }
}

/// Three backwards of one forward, with gradients of gate, up and down in `G`: the first overwrites NaN, the others add to
/// what the one before left, rounded to bf16.
fn backwards<T: kodkod::Element, G: GradientElement>(
    step: &Step<T>,
    config: &Config,
) -> kodkod::Result<Vec<Outputs<T>>> {
    let layer = MoeLayer::<T>::new(&config.group()?, step.shape.clone(), config.knobs(&step.shape))?;
    let (routing, weights) = (step.routing(&config.tokens_per_rank)?, step.weights.as_ref());
    let dy = step.dy.as_deref().unwrap_or_default();
    let (y, context) = layer.forward(&step.x, &routing, &weights)?;
    let mut before = filled(&step.shape, f32::NAN).convert::<bf16>();
    let mut all = Vec::new();
    for accumulate in [false, true, true] {
        let mut gradients = before.convert::<G>();
        let g = gradients.as_mut();
        let (dx, d_topk_weights) =
            layer.backward(&context, dy, &step.x, &routing, &weights, g, accumulate)?;
        before = gradients.convert();
        all.push(Outputs {
            y: y.clone(),
            gradients: Some(Gradients { dx, d_topk_weights, weights: gradients.convert() }),
            forward: Duration::ZERO,
            backward: Duration::ZERO,
        });
    }
    Ok(all)
}

/// A worker takes a task and never finishes it: the call returns within the limit, and names rank, task and counter.
fn stalled(mut row: Row, wait_limit: Duration) -> Row {
    let case = (cases::contract().swap_remove(0).build)();
    let step = case.step.convert::<bf16>();
    for (ranks, threads) in [(1, 1), (2, 2), (4, 3), (8, 2)] {
        let config = even(&case, ranks).threads(threads).rows(128, 128, 0);
        let group =
            |stall| ExpertGroup::cpu_with(CpuOptions { ranks, threads, isa: None, wait_limit, stall });
        for (stream, ticket) in [(Stream::Comm, 0), (Stream::Compute, 5), (Stream::Compute, u64::MAX)] {
            let stall = Some(StallHook { rank: ranks - 1, stream, ticket });
            for backward in [false, true] {
                let call = || -> kodkod::Result<Duration> {
                    let routing = step.routing(&config.tokens_per_rank)?;
                    let weights = step.weights.as_ref();
                    let layer =
                        |group| MoeLayer::<bf16>::new(&group, step.shape.clone(), config.knobs(&step.shape));
                    let stuck = layer(group(stall)?)?;
                    let start = Instant::now();
                    if !backward {
                        stuck.forward(&step.x, &routing, &weights)?;
                        return Ok(start.elapsed());
                    }
                    let (_, context) = layer(group(None)?)?.forward(&step.x, &routing, &weights)?;
                    let dy = step.dy.as_deref().unwrap_or_default();
                    let mut g = filled(&step.shape, 0.0);
                    stuck.backward(&context, dy, &step.x, &routing, &weights, g.as_mut(), false)?;
                    Ok(start.elapsed())
                };
                row.runs += 1;
                let what = format!(
                    "{config}, {stream:?} ticket {ticket} of a {} pass",
                    ["forward", "backward"][usize::from(backward)]
                );
                let start = Instant::now();
                match call() {
                    Ok(_) => row.miss(format!("{what}: it came to an end")),
                    Err(Error::Stalled(stalls)) => {
                        let late = start.elapsed() > wait_limit + Duration::from_secs(5);
                        let named = stalls
                            .iter()
                            .any(|s| s.rank == ranks - 1 && !s.task.is_empty() && s.seen < s.expected);
                        if late || !named {
                            row.miss(format!("{what}: {}", Error::Stalled(stalls)));
                        }
                    }
                    Err(error) => row.miss(format!("{what}: {error}")),
                }
            }
        }
    }
    row
}

/// Case 13: rows times hidden beyond 2^31 elements. A token's y does not depend on other tokens, so the last tokens
/// alone must have the same bits.
pub(super) fn large(run: bool) -> Vec<Job> {
    vec![Job::new("case-13 x of more than 2^31 elements", Some(Precision::Bf16), move |mut row| {
        if !run {
            row.note = Some("not run: --large");
            return row;
        }
        const TOKENS: usize = 2050;
        const LAST: usize = 3;
        // 64: the least on a GPU.
        let shape = Shape::new(1 << 20, if on_gpu() { 64 } else { 8 }, 2, 1);
        let mut r = Random::new(13);
        let small = cases::step(shape, (0..LAST).map(|t| t as i64 % 2).collect(), &mut r).convert::<bf16>();
        let small = Step { dy: None, ..small };
        let mut big = small.clone();
        let h = big.shape.hidden;
        big.x = vec![bf16::ZERO; (TOKENS - LAST) * h];
        big.x.extend_from_slice(&small.x);
        big.ids = vec![0; TOKENS - LAST];
        big.ids.extend(&small.ids);
        big.topk_weights = vec![1.0; TOKENS - LAST];
        big.topk_weights.extend(&small.topk_weights);
        let config = |tokens| Config::even(tokens, 1).rows(128, 128, 0);
        let (few, many) = (config(LAST), config(TOKENS));
        let Some(expected) = row.run(&few, few.run(&small)) else {
            return row;
        };
        let Some(outputs) = row.run(&many, many.run(&big)) else {
            return row;
        };
        let (zeros, last) = outputs.y.split_at((TOKENS - LAST) * h);
        if last.iter().zip(&expected.y).any(|(a, b)| a.to_bits() != b.to_bits()) {
            row.bit_mismatches += 1;
            row.miss("y of the last tokens has other bits than alone");
        }
        if zeros.iter().any(|v| *v != bf16::ZERO) {
            row.miss("y of a row of zeros is not 0");
        }
        row
    })]
}
