//! `kodkod check`: the layer against the f64 reference, and against its contract of bits.
//!
//! Three kinds of rows:
//! - an input, run on one rank and on others with hostile knobs: every output within
//!   `sum |error| <= tolerance * sum |reference|` (0.01 for bf16, 1e-5 for f32), and the same bits from all runs;
//! - one thing that must change no bit, turned over all of its values on three inputs;
//! - inputs that must be refused.
//!
//! On a GPU the same inputs run in bf16 on up to 4 ranks, with widths rounded up to multiples of 64. A backward's kernels
//! take seconds to compile for each shape and number of ranks, so that each input runs on few numbers of ranks, and
//! random inputs share shapes.

mod cases;
mod contract;
mod gpu;
mod kernels;
mod refused;

use std::fmt;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use comfy_table::{Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use kodkod::{Element, ExpertGroup, Isa, Knobs, Precision, Routing, Shape, bf16, reference};
use serde_json::json;

use crate::options::{Device, MachineOptions};
use crate::step::{Comparison, Outputs, Step, tolerance};
use cases::{Also, Case};

/// Options of `kodkod check`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Random cases [default: 40; 10 with --quick]
    #[arg(long, value_name = "N")]
    cases: Option<usize>,
    /// Seed of the first random case; each next one has the next seed
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
    /// Smaller and fewer cases: for continuous integration
    #[arg(long)]
    quick: bool,
    /// Also the case with more than 2^31 elements in x: 13 GiB of memory, about a minute
    #[arg(long)]
    large: bool,
    /// Only rows whose name contains this text
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Print one JSON object a row instead of a table
    #[arg(long)]
    json: bool,
    /// Where the layer runs: cpu, cuda, cuda:N or cuda:N,M,...; as many ranks as GPUs have one each
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: Device,
    /// With --device cuda: only compile the kernels that are needed, into the cache; needs no GPU
    #[arg(long)]
    compile_only: bool,
    /// Of those, the files that are named on standard input
    #[arg(long, hide = true)]
    compile_named: bool,
}

/// Where the layer runs; set once, before any case is made.
static DEVICE: OnceLock<Device> = OnceLock::new();

/// How many; 0 on the CPU.
fn gpus() -> usize {
    match DEVICE.get() {
        Some(Device::Cuda(gpus)) => gpus.len(),
        _ => 0,
    }
}

fn on_gpu() -> bool {
    gpus() > 0
}

/// Most ranks of a run.
fn most_ranks() -> usize {
    if on_gpu() { 4 } else { usize::MAX }
}

/// One line of the result.
#[derive(Debug)]
struct Row {
    name: String,
    precision: Option<Precision>,
    /// Passes of the layer.
    runs: usize,
    /// The largest error and its output, where a reference was asked.
    worst: Option<(f64, &'static str)>,
    /// Runs whose bits were not those of the first.
    bit_mismatches: usize,
    misses: Vec<String>,
    note: Option<&'static str>,
    time: Duration,
}

impl Row {
    fn new(name: &str, precision: Option<Precision>) -> Self {
        Row {
            name: name.to_owned(),
            precision,
            runs: 0,
            worst: None,
            bit_mismatches: 0,
            misses: Vec::new(),
            note: None,
            time: Duration::ZERO,
        }
    }

    fn passed(&self) -> bool {
        self.misses.is_empty()
    }

    fn result(&self) -> &'static str {
        if self.passed() { self.note.unwrap_or("ok") } else { "MISS" }
    }

    fn miss(&mut self, text: impl Into<String>) {
        self.misses.push(text.into());
    }

    /// The outputs of a run, or a miss.
    fn run<T>(&mut self, config: &Config, outputs: kodkod::Result<Outputs<T>>) -> Option<Outputs<T>> {
        self.runs += 1;
        outputs.map_err(|error| self.miss(format!("{config}: {error}"))).ok()
    }

    fn hold_against(&mut self, comparisons: Vec<Comparison>) {
        for c in comparisons {
            if self.worst.is_none_or(|(worst, _)| c.error > worst) {
                self.worst = Some((c.error, c.name));
            }
            self.misses.extend(c.miss);
        }
    }

    fn same_bits<T: Element>(&mut self, what: &dyn fmt::Display, first: &Outputs<T>, outputs: &Outputs<T>) {
        if let Some(difference) = outputs.first_difference(first) {
            self.bit_mismatches += 1;
            self.miss(format!("{what}: other bits, {difference}"));
        }
    }
}

/// How a step is run. None of it may change a bit.
#[derive(Debug, Clone)]
struct Config {
    tokens_per_rank: Vec<usize>,
    threads: usize,
    isa: Option<Isa>,
    minibatch_rows: Option<usize>,
    ring_rows: Option<usize>,
    saved_rows: Option<usize>,
    comm_sms: (usize, usize),
}

impl Config {
    fn split(tokens_per_rank: &[usize]) -> Self {
        Config {
            tokens_per_rank: tokens_per_rank.to_vec(),
            threads: 0,
            isa: None,
            minibatch_rows: None,
            ring_rows: None,
            saved_rows: None,
            comm_sms: (1, 1),
        }
    }

    fn even(tokens: usize, ranks: usize) -> Self {
        Self::split(&Routing::even_split(tokens, ranks.min(most_ranks())))
    }

    fn rows(self, minibatch: usize, ring: usize, saved: usize) -> Self {
        Config { minibatch_rows: Some(minibatch), ring_rows: Some(ring), saved_rows: Some(saved), ..self }
    }

    fn threads(self, threads: usize) -> Self {
        Config { threads, ..self }
    }

    fn group(&self) -> kodkod::Result<ExpertGroup> {
        let machine = match DEVICE.get().cloned().unwrap_or_default() {
            Device::Cpu => {
                let threads = (self.threads > 0).then_some(self.threads);
                MachineOptions { device: Device::Cpu, threads, isa: self.isa }
            }
            device => MachineOptions { device, ..MachineOptions::default() },
        };
        machine.group(self.tokens_per_rank.len())
    }

    fn knobs(&self, shape: &Shape) -> Knobs {
        let knobs = Knobs::for_shape(shape).with_rows(self.minibatch_rows, self.ring_rows, self.saved_rows);
        Knobs { fwd_comm_sms: self.comm_sms.0, bwd_comm_sms: self.comm_sms.1, ..knobs }
    }

    fn run<T: kodkod::Element>(&self, step: &Step<T>) -> kodkod::Result<Outputs<T>> {
        step.run(&self.group()?, self.knobs(&step.shape), &self.tokens_per_rank)
    }
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list: Vec<_> = self.tokens_per_rank.iter().map(usize::to_string).collect();
        write!(f, "--tokens-per-rank {}", list.join(","))?;
        if self.threads > 0 {
            write!(f, " --threads {}", self.threads)?;
        }
        if let Some(isa) = self.isa {
            write!(f, " --isa {isa}")?;
        }
        let rows = [
            ("minibatch", self.minibatch_rows),
            ("ring", self.ring_rows),
            ("saved", self.saved_rows.filter(|n| *n != Knobs::ALL)),
        ];
        for (name, rows) in rows {
            if let Some(rows) = rows {
                write!(f, " --{name}-rows {rows}")?;
            }
        }
        if self.comm_sms != (1, 1) {
            write!(f, " --fwd-comm-sms {} --bwd-comm-sms {}", self.comm_sms.0, self.comm_sms.1)?;
        }
        Ok(())
    }
}

/// Something to check, made when its turn comes.
struct Job {
    name: String,
    run: Box<dyn Fn(Row) -> Row>,
    precision: Option<Precision>,
}

impl Job {
    fn new(name: &str, precision: Option<Precision>, run: impl Fn(Row) -> Row + 'static) -> Self {
        Job { name: name.to_owned(), run: Box::new(run), precision }
    }

    fn run(&self) -> Row {
        let start = Instant::now();
        let mut row = (self.run)(Row::new(&self.name, self.precision));
        row.time = start.elapsed();
        row
    }
}

/// Runs it.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    DEVICE.get_or_init(|| args.device.clone());
    anyhow::ensure!(on_gpu() || !args.compile_only, "--compile-only is for --device cuda");
    if args.compile_named {
        return kernels::compile_named(&args);
    }
    if let Some(n) = args.device.several()
        && ![2, 4].contains(&n)
    {
        eprintln!(
            "note: most rows run with 1, 2 or 4 ranks, which share GPU {} where {n} GPUs are named",
            args.device.gpus(1)[0]
        );
    }
    if on_gpu() {
        // What is missing is said once and at once, not in every row.
        if !args.compile_only {
            Config::even(1, 1).group()?;
        }
        kernels::compile_all(&args)?;
        if args.compile_only {
            return Ok(ExitCode::SUCCESS);
        }
    }
    let mut jobs = jobs(&args);
    if let Some(text) = &args.filter {
        jobs.retain(|job| job.name.contains(text.as_str()));
        anyhow::ensure!(!jobs.is_empty(), "--filter {text:?}: no row's name contains it");
    }
    let no_terminal = !std::io::stderr().is_terminal();
    let bar = ProgressBar::new(jobs.len() as u64);
    bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {wide_msg}")?);
    // A log names a row before it runs: one that hangs is found.
    let log = |text: String| {
        if no_terminal {
            eprintln!("{text}");
        }
    };
    let mut rows = Vec::new();
    for (at, job) in jobs.iter().enumerate() {
        bar.set_message(job.name.clone());
        let name = format!("[{}/{}] {} ({})", at + 1, jobs.len(), job.name, precision_name(job.precision));
        log(name.clone());
        let row = job.run();
        if args.json {
            bar.suspend(|| println!("{}", json(&row)));
        }
        for miss in &row.misses {
            bar.suspend(|| eprintln!("miss: {} ({}): {miss}", row.name, precision_name(row.precision)));
        }
        log(format!("{name}: {}, {} runs, {:.2} s", row.result(), row.runs, row.time.as_secs_f64()));
        rows.push(row);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let missed = rows.iter().filter(|row| !row.passed()).count();
    if !args.json {
        println!("{}", table(&rows));
        println!(
            "{} of {} rows right, {} runs of the layer, {:.1} s",
            rows.len() - missed,
            rows.len(),
            rows.iter().map(|row| row.runs).sum::<usize>(),
            start.elapsed().as_secs_f64()
        );
    }
    Ok(ExitCode::from(u8::from(missed > 0)))
}

fn jobs(args: &Args) -> Vec<Job> {
    let mut jobs = Vec::new();
    for &precision in precisions() {
        // Each closure makes its case itself, so that only one is in memory.
        for (index, named) in cases::hard(args.quick).into_iter().enumerate() {
            let quick = args.quick;
            let build = move || (cases::hard(quick).swap_remove(index).build)();
            jobs.push(Job::new(&named.name, Some(precision), move |row| match precision {
                Precision::Bf16 => check_case::<bf16>(row, &build()),
                Precision::F32 => check_case::<f32>(row, &build()),
            }));
        }
        let count = args.cases.unwrap_or(if args.quick { 10 } else { 40 }) as u64;
        for seed in args.seed..args.seed.saturating_add(count) {
            jobs.push(Job::new(
                &format!("random, seed {seed}"),
                Some(precision),
                move |row| match precision {
                    Precision::Bf16 => check_case::<bf16>(row, &cases::random(seed)),
                    Precision::F32 => check_case::<f32>(row, &cases::random(seed)),
                },
            ));
        }
    }
    jobs.extend(contract::jobs(args.quick));
    if !on_gpu() {
        jobs.extend(refused::jobs());
    }
    jobs.extend(contract::large(args.large));
    jobs
}

/// What rows and weights are stored in.
fn precisions() -> &'static [Precision] {
    if on_gpu() { &[Precision::Bf16] } else { &[Precision::Bf16, Precision::F32] }
}

/// An input against the reference, on one rank and on others.
fn check_case<T: kodkod::Element>(mut row: Row, case: &Case) -> Row {
    let (step, reference) = match off_the_clamp(case.step.convert::<T>()) {
        Ok(both) => both,
        Err(error) => {
            row.miss(format!("the reference: {error}"));
            return row;
        }
    };
    let alone = Config::even(step.tokens(), 1);
    let Some(first) = row.run(&alone, alone.run(&step)) else { return row };
    row.hold_against(first.compare(&reference));
    exact_zeros(&mut row, &step, &first);
    for config in hostile(case) {
        if let Some(outputs) = row.run(&config, config.run(&step)) {
            row.same_bits(&config, &first, &outputs);
        }
    }
    match case.also {
        Also::Nothing => {}
        Also::ExpertsApart => experts_apart(&mut row, &step, &first),
        Also::OthersUnmoved(tokens) => others_unmoved(&mut row, &step, &first, tokens),
    }
    row
}

/// The step, or with its rows' elements in other places where a value lies on the limit but for f32's rounding errors: the
/// derivative jumps there, and either side is right. The limit itself stays: it is compiled into a GPU's kernels.
fn off_the_clamp<T: kodkod::Element>(mut step: Step<T>) -> kodkod::Result<(Step<T>, reference::Outputs)> {
    const MARGIN: f64 = 4e-6;
    let mut random = cases::Random::new(0);
    loop {
        let outputs = step.reference()?;
        if outputs.clamp_margin > MARGIN {
            return Ok((step, outputs));
        }
        step.x.chunks_exact_mut(step.shape.hidden).for_each(|row| random.shuffle(row));
    }
}

/// Other splits, each with other knobs and threads: from one minibatch in the ring and nothing saved upwards.
fn hostile(case: &Case) -> Vec<Config> {
    let (tokens, experts) = (case.step.tokens(), case.step.shape.experts);
    let even = if on_gpu() { few_ranks(case) } else { vec![1, 2, 4, 8] };
    let even = even.into_iter();
    let even = even.filter(|&ranks| experts.is_multiple_of(ranks));
    let even = even.map(|ranks| Config::even(tokens, ranks));
    let turn = |(i, config): (usize, Config)| {
        let config = config.threads(1 + i % 4);
        match i % 3 {
            0 => config.rows(128, 128, 0),
            1 => config.rows(128, 256, 128),
            _ => config.rows(256, 512, Knobs::ALL),
        }
    };
    let splits = case.splits.iter().filter(|split| split.len() <= most_ranks());
    even.chain(splits.map(|split| Config::split(split))).enumerate().map(turn).collect()
}

/// On a GPU: one rank, and twice, for two settings of the knobs, as many as an uneven split of the case has; where there
/// is none, the most that it can have.
fn few_ranks(case: &Case) -> Vec<usize> {
    let of_split = case.splits.iter().map(Vec::len).find(|&ranks| ranks <= most_ranks());
    let most = [4, 2].into_iter().find(|&ranks| case.step.shape.experts.is_multiple_of(ranks));
    let ranks = of_split.or(most).unwrap_or(1);
    vec![1, ranks, ranks]
}

/// What no route touches is 0, exactly: gradients of idle experts, of routes -1, rows of tokens without routes.
fn exact_zeros<T: kodkod::Element>(row: &mut Row, step: &Step<T>, outputs: &Outputs<T>) {
    let (shape, Some(g)) = (&step.shape, &outputs.gradients) else {
        return;
    };
    let mut zero = |what: String, mut values: Box<dyn Iterator<Item = f32> + '_>| {
        if let Some(value) = values.find(|v| *v != 0.0) {
            row.misses.push(format!("{what} has {value:e}, not 0"));
        }
    };
    for e in cases::idle_experts(step) {
        for (name, values) in g.weights.named().into_iter().filter(|(name, _)| !name.starts_with("d_shared"))
        {
            let len = values.len() / shape.experts;
            zero(
                format!("{name} of idle expert {e}"),
                Box::new(values[e * len..(e + 1) * len].iter().copied()),
            );
        }
    }
    for (route, _) in step.ids.iter().enumerate().filter(|(_, id)| **id == -1) {
        zero(format!("d_topk_weights[{route}], id -1"), Box::new(std::iter::once(g.d_topk_weights[route])));
    }
    if shape.shared.is_none() {
        for (t, _) in
            step.ids.chunks_exact(shape.top_k).enumerate().filter(|(_, r)| r.iter().all(|id| *id == -1))
        {
            let elements = t * shape.hidden..(t + 1) * shape.hidden;
            for (name, values) in [("y", &outputs.y), ("dx", &g.dx)] {
                let values = values[elements.clone()].iter().map(|v| v.to_f32());
                zero(format!("{name} of token {t}, without routes"), Box::new(values));
            }
        }
    }
}

/// An expert's gradients do not depend on what other experts do.
fn experts_apart<T: kodkod::Element>(row: &mut Row, step: &Step<T>, all: &Outputs<T>) {
    for e in 0..step.shape.experts {
        let mut apart = step.clone();
        apart.ids.iter_mut().for_each(|id| *id = if *id == e as i64 { *id } else { -1 });
        let config = Config::even(step.tokens(), 1);
        let Some(outputs) = row.run(&config, config.run(&apart)) else {
            continue;
        };
        let (Some(ours), Some(theirs)) = (&all.gradients, &outputs.gradients) else {
            continue;
        };
        for ((name, a), (_, b)) in ours.weights.named().into_iter().zip(theirs.weights.named()) {
            let len = a.len() / step.shape.experts;
            let mut pairs = a[e * len..(e + 1) * len].iter().zip(&b[e * len..(e + 1) * len]);
            if pairs.any(|(a, b)| a.to_bits() != b.to_bits()) {
                row.bit_mismatches += 1;
                row.miss(format!("{name} of expert {e} has other bits when the others have no rows"));
            }
        }
    }
}

/// What is not finite in some tokens' x reaches no other token's y, dx or router gradient.
fn others_unmoved<T: kodkod::Element>(row: &mut Row, step: &Step<T>, moved: &Outputs<T>, tokens: &[usize]) {
    let mut clean = step.clone();
    clean.x.iter_mut().filter(|v| !v.to_f32().is_finite()).for_each(|v| *v = T::from_f32(0.5));
    let config = Config::even(step.tokens(), 1);
    let Some(outputs) = row.run(&config, config.run(&clean)) else {
        return;
    };
    for ((name, a), (_, b)) in moved.named().into_iter().zip(outputs.named()).take(3) {
        let width = a.len() / step.tokens();
        let same = |i: &usize| a.get(*i).to_bits() == b.get(*i).to_bits();
        if let Some(i) = (0..a.len()).filter(|i| !tokens.contains(&(i / width))).find(|i| !same(i)) {
            row.bit_mismatches += 1;
            row.miss(format!("{name} of token {} is moved by tokens {tokens:?}", i / width));
        }
    }
}

fn precision_name(precision: Option<Precision>) -> &'static str {
    match precision {
        Some(Precision::Bf16) => "bf16",
        Some(Precision::F32) => "f32",
        None => "-",
    }
}

fn json(row: &Row) -> serde_json::Value {
    json!({
        "name": row.name, "precision": row.precision.map(|p| precision_name(Some(p))), "runs": row.runs,
        "worst_error": row.worst.map(|w| w.0), "worst_output": row.worst.map(|w| w.1),
        "tolerance": row.worst.and(row.precision).map(tolerance),
        "bit_mismatches": row.bit_mismatches, "misses": row.misses, "note": row.note,
        "seconds": row.time.as_secs_f64(), "passed": row.passed(),
    })
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_BORDERS_ONLY);
    table.set_header(["what", "type", "runs", "worst error", "of", "bits", "result", "seconds"]);
    for row in rows {
        let (error, output) = row.worst.map_or((String::new(), ""), |(e, name)| (format!("{e:.2e}"), name));
        let bits = match (row.runs, row.bit_mismatches) {
            (0 | 1, 0) => String::new(),
            (_, 0) => "same".to_owned(),
            (_, n) => format!("{n} OTHER"),
        };
        table.add_row([
            row.name.clone(),
            precision_name(row.precision).to_owned(),
            row.runs.to_string(),
            error,
            output.to_owned(),
            bits,
            row.result().to_owned(),
            format!("{:.2}", row.time.as_secs_f64()),
        ]);
    }
    table
}
