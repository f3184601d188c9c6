//! The kernels that checking a GPU takes, compiled for all inputs before the first row, on all cores.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use kodkod::Precision;
use kodkod::cuda::CudaLayer;
use kodkod::cuda::jit::{self, Source};

use super::cases::{self, Case};
use super::{Args, Config, contract, hostile, most_ranks};

/// Files of machine code by their names in the cache: what each is made of.
type Files = BTreeMap<String, (Source, Vec<(&'static str, String)>)>;

/// How often a log hears how far it is.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Compiles what this run needs that the cache does not have, in as many processes as there are cores: NVRTC runs one
/// compilation at a time in each.
pub(super) fn compile_all(args: &Args) -> anyhow::Result<()> {
    let (start, files) = (Instant::now(), files(args));
    let mut missing: Vec<_> =
        files.iter().filter(|(name, _)| !jit::cache_dir().join(name).exists()).collect();
    // What takes longest goes first, so that no core is left with it at the end.
    missing.sort_by_key(|(_, (source, _))| match source {
        Source::Backward => 0,
        Source::Forward => 1,
        _ => 2,
    });
    let cores = std::thread::available_parallelism().map_or(1, usize::from).min(missing.len());
    let (all, needed) = (files.len(), missing.len());
    eprintln!("kernels: {all} files, {needed} of them to compile on {cores} cores");
    let (queue, done) = (Mutex::new(missing.into_iter().map(|(name, _)| name.as_str())), AtomicUsize::new(0));
    let next = || queue.lock().ok()?.next();
    let bar = ProgressBar::new(needed as u64);
    bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} compiling kernels")?);
    let (no_terminal, mut said) = (!std::io::stderr().is_terminal(), start);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(|| compile_next(next, &done))).collect();
        while threads.iter().any(|thread| !thread.is_finished()) {
            std::thread::sleep(Duration::from_millis(100));
            bar.set_position(done.load(Ordering::Relaxed) as u64);
            if no_terminal && said.elapsed() > LINE_EVERY {
                said = Instant::now();
                let (done, seconds) = (done.load(Ordering::Relaxed), start.elapsed().as_secs_f64());
                eprintln!("kernels: {done} of {needed} compiled, {seconds:.0} s");
            }
        }
        bar.finish_and_clear();
        let outcome = |thread: std::thread::ScopedJoinHandle<_>| thread.join().expect("it does not panic");
        threads.into_iter().try_for_each(outcome)
    })?;
    if needed > 0 {
        eprintln!("kernels: {needed} compiled in {:.1} s", start.elapsed().as_secs_f64());
    }
    Ok(())
}

/// Gives one process a file after the other.
fn compile_next<'a>(next: impl Fn() -> Option<&'a str>, done: &AtomicUsize) -> anyhow::Result<()> {
    let program = std::env::current_exe().context("the path of this program")?;
    let mut command = Command::new(&program);
    command.args(std::env::args_os().skip(1)).arg("--compile-named");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().context("a process to compile in")?;
    let (to, from) = (process.stdin.take(), process.stdout.take());
    if let (Some(mut to), Some(from)) = (to, from) {
        let mut answers = BufReader::new(from).lines();
        while let Some(name) = next() {
            // A process that is gone says why below.
            if writeln!(to, "{name}").is_err() || !matches!(answers.next(), Some(Ok(_))) {
                break;
            }
            done.fetch_add(1, Ordering::Relaxed);
        }
    }
    let output = process.wait_with_output()?;
    let words = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}", words.trim().trim_start_matches("error: "));
    Ok(())
}

/// The other side: compiles the files that are named on standard input, and names each when it is in the cache.
pub(super) fn compile_named(args: &Args) -> anyhow::Result<ExitCode> {
    let files = files(args);
    for name in std::io::stdin().lines() {
        let name = name?;
        let (source, defines) = files.get(&name).with_context(|| format!("no kernel file is {name}"))?;
        jit::cubin(*source, defines)?;
        println!("{name}");
    }
    Ok(ExitCode::SUCCESS)
}

/// All that the rows of this run need.
fn files(args: &Args) -> Files {
    let wanted = |name: &str| args.filter.as_ref().is_none_or(|text| name.contains(text.as_str()));
    let mut files = BTreeMap::new();
    let mut add = |case: &Case, configs: Vec<Config>, gradients: Precision| {
        let shape = &case.step.shape;
        for config in configs.into_iter().filter(|c| c.tokens_per_rank.len() <= most_ranks()) {
            // A shape that is not allowed: the row itself will say why.
            let Ok(defines) =
                CudaLayer::defines(shape, &config.knobs(shape), &config.tokens_per_rank, gradients)
            else {
                continue;
            };
            let meets = args.device.gpus(config.tokens_per_rank.len()).len() > 1;
            for source in Source::ALL.into_iter().chain(meets.then_some(Source::Meet)) {
                files.entry(jit::file_name(source, &defines)).or_insert_with(|| (source, defines.clone()));
            }
        }
    };
    let alone = |case: &Case| Config::even(case.step.tokens(), 1);
    let count = args.cases.unwrap_or(if args.quick { 10 } else { 40 }) as u64;
    for named in cases::hard(args.quick).into_iter().filter(|named| wanted(&named.name)) {
        let case = (named.build)();
        add(&case, hostile(&case).into_iter().chain([alone(&case)]).collect(), Precision::F32);
    }
    for seed in args.seed..args.seed.saturating_add(count) {
        if wanted(&format!("random, seed {seed}")) {
            let case = cases::random(seed);
            add(&case, hostile(&case).into_iter().chain([alone(&case)]).collect(), Precision::F32);
        }
    }
    // Rows of the contract share their inputs.
    let contract = contract::jobs(args.quick).iter().any(|job| wanted(&job.name));
    for named in cases::contract().into_iter().filter(|_| contract) {
        let case = (named.build)();
        add(&case, contract::configs(&case).into_iter().chain([alone(&case)]).collect(), Precision::F32);
        if wanted(contract::BF16_GRADIENTS) {
            add(&case, contract::bf16_configs(&case), Precision::Bf16);
        }
    }
    files
}
