//! Times on a GPU, by its own clock: rows, routes, weights and gradients are there before, and a forward's time has the
//! schedule in it.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context;
use kodkod::cuda::driver::{Device as Gpu, Event};
use kodkod::cuda::{CudaLayer, jit};
use kodkod::{GradientElement, Knobs, bf16};

use super::{Args, Row, Storage, Timed, median, progress, table};
use crate::inputs::random_step;
use crate::on_gpus::{self, OnGpus};
use crate::shapes::NamedShape;
use crate::step::Step;

/// Milliseconds of each repeat.
#[derive(Default)]
struct Times {
    schedule: Vec<f64>,
    forward: Vec<f64>,
    backward: Vec<f64>,
}

/// Fills the cache with what [`measure_all`] needs.
pub(super) fn compile(args: &Args) -> anyhow::Result<ExitCode> {
    for named in &args.shape {
        for (&tokens, &ranks) in args.tokens.iter().flat_map(|t| args.ranks.iter().map(move |r| (t, r))) {
            let knobs = args.machine.knobs(&args.knobs, &named.shape, ranks);
            let defines =
                CudaLayer::defines(&named.shape, &knobs, &vec![tokens; ranks], args.gradients.precision())?;
            let meets = args.machine.device.gpus(ranks).len() > 1;
            for source in jit::Source::ALL.into_iter().chain(meets.then_some(jit::Source::Meet)) {
                jit::cubin(source, &defines)?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn measure_all(args: &Args) -> anyhow::Result<ExitCode> {
    let open = |&ranks: &usize| on_gpus::open(args.machine.device.gpus(ranks));
    let gpus = args.ranks.iter().map(open).collect::<kodkod::cuda::Result<Vec<_>>>()?;
    let bar = progress(args.shape.len() * args.tokens.len() * args.ranks.len());
    let mut rows = Vec::new();
    for named in &args.shape {
        bar.set_message(format!("{}: making weights", named.name));
        let most = |list: &[usize]| list.iter().max().copied().unwrap_or(0);
        let step: Step<bf16> =
            random_step(&named.shape, most(&args.tokens) * most(&args.ranks), args.backward(), 1);
        for &tokens in &args.tokens {
            for (&ranks, gpus) in args.ranks.iter().zip(&gpus) {
                bar.set_message(format!("{}, {tokens} tokens on each of {ranks} ranks", named.name));
                let knobs = args.machine.knobs(&args.knobs, &named.shape, ranks);
                let measure = match args.gradients {
                    Storage::Bf16 => measure::<bf16>,
                    Storage::F32 => measure::<f32>,
                };
                let (times, routes) =
                    measure(args, gpus, &knobs, &step, &vec![tokens; ranks]).with_context(|| {
                        format!("--shape {}, {tokens} tokens on each of {ranks} ranks", named.name)
                    })?;
                for &pass in &args.pass {
                    let row = row(args, &knobs, named, ranks, tokens, routes, pass, &times);
                    if args.json {
                        let line = serde_json::to_string(&row)?;
                        bar.suspend(|| println!("{line}"));
                    }
                    rows.push(row);
                }
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    if !args.json {
        println!(
            "{}, {} SMs, bf16, gradients in {}; medians of {} repeats",
            gpus[0][0].name(),
            gpus[0][0].sms(),
            args.gradients.precision(),
            args.repeat()
        );
        println!("{}", table(&rows));
    }
    Ok(ExitCode::SUCCESS)
}

/// Times, and routes that are not -1.
fn measure<G: GradientElement>(
    args: &Args,
    gpus: &[Arc<Gpu>],
    knobs: &Knobs,
    step: &Step<bf16>,
    tokens_per_rank: &[usize],
) -> anyhow::Result<(Times, usize)> {
    let on_gpus = OnGpus::<G>::new(gpus, knobs, step, tokens_per_rank, CudaLayer::new)?;
    let stream = on_gpus.layer.stream();
    let mut times = Times::default();
    let events = (0..4).map(|_| Event::new()).collect::<kodkod::cuda::Result<Vec<_>>>()?;
    for repeat in 0..args.warmup() + args.repeat() {
        events[0].record(stream)?;
        on_gpus.schedule()?;
        events[1].record(stream)?;
        let schedule = events[0].milliseconds_to(&events[1])?;
        events[1].record(stream)?;
        on_gpus.forward()?;
        events[2].record(stream)?;
        if args.backward() {
            on_gpus.backward()?;
        }
        events[3].record(stream)?;
        let backward = events[2].milliseconds_to(&events[3])?;
        let forward = events[1].milliseconds_to(&events[2])?;
        on_gpus.layer.finish()?;
        if repeat >= args.warmup() {
            times.schedule.push(f64::from(schedule));
            times.forward.push(f64::from(forward));
            times.backward.push(f64::from(backward));
        }
    }
    let ids = &step.ids[..tokens_per_rank.iter().sum::<usize>() * step.shape.top_k];
    Ok((times, ids.iter().filter(|&&id| id >= 0).count()))
}

fn row(
    args: &Args,
    knobs: &Knobs,
    named: &NamedShape,
    ranks: usize,
    tokens_per_rank: usize,
    routes: usize,
    pass: Timed,
    times: &Times,
) -> Row {
    let forward_flops = named.shape.forward_flops(tokens_per_rank * ranks, routes);
    let (ms, passes) = match pass {
        Timed::Fwd => (median(times.forward.clone()), 1.0),
        Timed::Bwd => (median(times.backward.clone()), 2.0),
        Timed::Both => (median(times.forward.iter().zip(&times.backward).map(|(f, b)| f + b).collect()), 3.0),
    };
    let tflops = passes * forward_flops / ms / 1e9;
    Row {
        device: args.machine.device.to_string(),
        ranks,
        shape: named.name.clone(),
        tokens_per_rank,
        pass,
        ms,
        tflops,
        dense_tflops: args.dense_tflops,
        fraction_of_dense: args.dense_tflops.map(|dense| tflops / dense),
        precision: args.precision,
        gradients: args.gradients,
        isa: None,
        threads: 0,
        repeat: args.repeat(),
        minibatch_rows: knobs.minibatch_rows,
        ring_rows: knobs.ring_rows,
        saved_rows: Some(knobs.saved_rows).filter(|&rows| rows != Knobs::ALL),
        peak_memory_bytes: None,
        schedule_ms: Some(median(times.schedule.clone())),
    }
}
