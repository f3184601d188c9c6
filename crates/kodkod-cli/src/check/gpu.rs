//! What checking a GPU takes beside the inputs: its kernels, compiled for all of them before, on all cores; and a task
//! that stalls there.

use std::collections::BTreeMap;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use kodkod::cuda::driver::Device as Gpu;
use kodkod::cuda::jit::{self, Source};
use kodkod::cuda::{CudaLayer, DeviceStep, DeviceWeights, Hang, new_gradients};
use kodkod::{Error, Precision, Routing, bf16};

use super::cases::{self, Case};
use super::{Args, Config, DEVICE, Row, contract, hostile, most_ranks};
use crate::options::Device;

pub(super) fn parse_part(text: &str) -> Result<(usize, usize), String> {
    let parts = text.split_once('/').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    parts.filter(|(part, of)| part < of).ok_or_else(|| "PART/N, PART less than N".into())
}

/// Compiles what this run needs that the cache does not have, in as many processes as there are cores: NVRTC runs one
/// compilation at a time in each.
pub(super) fn compile_all() -> anyhow::Result<()> {
    let (start, cores) = (Instant::now(), std::thread::available_parallelism().map_or(1, usize::from));
    let program = std::env::current_exe().context("the path of this program")?;
    let parts = (0..cores)
        .map(|part| {
            let mut command = Command::new(&program);
            command.args(std::env::args_os().skip(1)).arg("--compile-part").arg(format!("{part}/{cores}"));
            command.stderr(Stdio::piped()).spawn().context("a process to compile in")
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    // All are waited for, so that none is left behind.
    let outputs: Vec<_> = parts.into_iter().map(|part| part.wait_with_output()).collect();
    for output in outputs {
        let output = output?;
        let words = String::from_utf8_lossy(&output.stderr);
        anyhow::ensure!(output.status.success(), "{}", words.trim().trim_start_matches("error: "));
    }
    eprintln!("kernels compiled, or found in the cache, in {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// One part of the files: every `of`-th in the sorted list of all that are needed, which is the same in every process.
pub(super) fn compile_part(args: &Args, part: usize, of: usize) -> anyhow::Result<ExitCode> {
    let wanted = |name: &str| args.filter.as_ref().is_none_or(|text| name.contains(text.as_str()));
    let mut files = BTreeMap::new();
    let mut add = |case: &Case, configs: Vec<Config>| -> anyhow::Result<()> {
        let shape = &case.step.shape;
        for config in configs.into_iter().filter(|c| c.tokens_per_rank.len() <= most_ranks()) {
            let Ok(defines) = CudaLayer::defines(shape, &config.knobs(shape), &config.tokens_per_rank, Precision::F32) else {
                continue; // The row itself will say why.
            };
            for source in Source::ALL {
                files.entry(jit::file_name(source, &defines)).or_insert_with(|| (source, defines.clone()));
            }
        }
        Ok(())
    };
    let alone = |case: &Case| Config::even(case.step.tokens(), 1);
    let count = args.cases.unwrap_or(if args.quick { 10 } else { 40 }) as u64;
    for named in cases::hard(args.quick).into_iter().filter(|named| wanted(&named.name)) {
        let case = (named.build)();
        add(&case, hostile(&case).into_iter().chain([alone(&case)]).collect())?;
    }
    for seed in args.seed..args.seed.saturating_add(count) {
        if wanted(&format!("random, seed {seed}")) {
            let case = cases::random(seed);
            add(&case, hostile(&case).into_iter().chain([alone(&case)]).collect())?;
        }
    }
    // Rows of the contract share their inputs.
    let contract = contract::jobs(args.quick).iter().any(|job| wanted(&job.name));
    for named in cases::contract().into_iter().filter(|_| contract) {
        let case = (named.build)();
        add(&case, contract::configs(&case).into_iter().chain([alone(&case)]).collect())?;
    }
    for (index, (_, (source, defines))) in files.into_iter().enumerate() {
        if index % of == part {
            jit::cubin(source, &defines)?;
        }
    }
    Ok(ExitCode::SUCCESS)
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
