//! `kodkod bench`: milliseconds and TFLOP/s of the layer, beside the rate of one dense GEMM in the same run.
//!
//! FLOPs: 6 * hidden * intermediate a route in a forward (padding not counted), twice as many in a backward; a dense
//! GEMM of size N takes 2 N^3. On a GPU everything is there before the clock, the GPU's own, runs: see [`cuda`]. Each
//! repeat times the dense GEMM, the forward and the backward in turn, so that a machine whose speed drifts slows all of
//! them; medians are reported.

mod cuda;
mod links;
mod memory;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::bail;
use clap::ValueEnum;
use comfy_table::{CellAlignment, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use kodkod::schedule::experts_per_rank;
use kodkod::{
    Element, ExpertGroup, GradientElement, Isa, Knobs, MoeLayer, Precision, Routing, Shape, WeightGradients,
    bf16, gemm,
};
use serde::Serialize;

use crate::inputs::random_step;
use crate::options::{Device, KnobOptions, MachineOptions};
use crate::shapes::NamedShape;
use crate::step::Step;

/// Options of `kodkod bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Shapes: published names, or HIDDENxINTERMEDIATExEXPERTSxTOP_K [default: 1024x512x32x4,olmoe-1b-7b;
    /// on a GPU olmoe-1b-7b, qwen3-30b-a3b, qwen3-235b-a22b, kimi-slice, deepseek-v3-slice, mixtral-8x7b]
    #[arg(long, value_name = "SHAPES", value_delimiter = ',')]
    shape: Vec<NamedShape>,
    /// Tokens of each rank [default: 512; 8192 on a GPU]
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    tokens: Vec<usize>,
    /// Numbers of ranks [default: 1,2,4; 1 on a GPU; of several GPUs, one each]
    #[arg(long, value_name = "RANKS", value_delimiter = ',')]
    ranks: Vec<usize>,
    /// What to report
    #[arg(long, value_name = "PASSES", value_delimiter = ',', default_value = "fwd,bwd,fwd+bwd")]
    pass: Vec<Timed>,
    /// What rows and weights are stored in
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    precision: Storage,
    /// What the gradients of weights are stored in
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    gradients: Storage,
    /// Timed repeats of each measurement; the median counts [default: 5; 20 on a GPU]
    #[arg(long, value_name = "N")]
    repeat: Option<usize>,
    /// Repeats before the timed ones [default: 1; 3 on a GPU]
    #[arg(long, value_name = "N")]
    warmup: Option<usize>,
    /// The dense rate to compare with, on a GPU: kodkod has no dense GEMM there
    #[arg(long, value_name = "TFLOPS")]
    dense_tflops: Option<f64>,
    /// Rows, columns and depth of the CPU's dense GEMM
    #[arg(long, value_name = "N", default_value_t = 2048)]
    dense_size: usize,
    /// Measure no time but the peak of symmetric memory over growing token counts
    /// [then the defaults are: --shape 512x256x8x4 --tokens 256,512,1024,2048 --ranks 2 --minibatch-rows 128
    /// --saved-rows 0 and all]
    #[arg(long)]
    memory: bool,
    /// Measure no layer but the link between two GPUs: pulls and pushes by number of SMs and bytes of a copy, one way and
    /// both ways, and the round trip of a flag
    #[arg(long, conflicts_with = "memory")]
    links: bool,
    /// GPUs of --links, by their ordinals; one GPU for both ends measures copies within it [default: 0,1]
    #[arg(long, value_name = "GPUS", value_delimiter = ',', requires = "links")]
    devices: Vec<usize>,
    /// With --device cuda or --links: only compile the kernels that are needed, into the cache; needs no GPU
    #[arg(long)]
    compile_only: bool,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    machine: MachineOptions,
    #[command(flatten)]
    knobs: KnobOptions,
}

/// A pass to report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
enum Timed {
    /// The forward
    #[serde(rename = "fwd")]
    Fwd,
    /// The backward into existing gradients, overwriting them
    #[serde(rename = "bwd")]
    Bwd,
    /// One after the other
    #[value(name = "fwd+bwd", alias = "both")]
    #[serde(rename = "fwd+bwd")]
    Both,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Storage {
    /// 16-bit brain floating point
    Bf16,
    /// 32-bit
    F32,
}

/// One measurement, as it is printed.
#[derive(Debug, Serialize)]
struct Row {
    device: String,
    ranks: usize,
    shape: String,
    tokens_per_rank: usize,
    pass: Timed,
    /// Median of the repeats.
    ms: f64,
    tflops: f64,
    /// None on a GPU, unless it was given.
    dense_tflops: Option<f64>,
    fraction_of_dense: Option<f64>,
    precision: Storage,
    gradients: Storage,
    /// None on a GPU.
    isa: Option<String>,
    threads: usize,
    repeat: usize,
    minibatch_rows: usize,
    ring_rows: usize,
    /// None: all.
    saved_rows: Option<usize>,
    /// Most symmetric memory held at once, over all ranks; None on a GPU.
    peak_memory_bytes: Option<usize>,
    /// Of the forward's time, the schedule alone; None on the CPU.
    schedule_ms: Option<f64>,
}

/// What is timed on a GPU.
const GPU_SHAPES: &str =
    "olmoe-1b-7b,qwen3-30b-a3b,qwen3-235b-a22b,kimi-slice,deepseek-v3-slice,mixtral-8x7b";

/// Runs it.
pub(crate) fn run(mut args: Args) -> anyhow::Result<ExitCode> {
    if args.links {
        if args.machine.device != Device::default() {
            bail!("--links --device {}: the GPUs of --links are chosen with --devices", args.machine.device);
        }
        return links::measure(&args);
    }
    let default = |list: &mut Vec<usize>, values: &[usize]| {
        if list.is_empty() {
            list.extend(values);
        }
    };
    let on_gpu = args.machine.device != Device::Cpu;
    let one_each = [args.machine.device.several().unwrap_or(1)];
    let (shapes, tokens, ranks): (_, &[usize], &[usize]) = match (args.memory, on_gpu) {
        (true, _) => ("512x256x8x4", &[256, 512, 1024, 2048], &[2]),
        (false, false) => ("1024x512x32x4,olmoe-1b-7b", &[512], &[1, 2, 4]),
        (false, true) => (GPU_SHAPES, &[8192], &one_each),
    };
    default(&mut args.tokens, tokens);
    default(&mut args.ranks, ranks);
    if args.shape.is_empty() {
        args.shape.extend(
            shapes.split(',').map(|name| name.parse::<NamedShape>().expect("the defaults are valid")),
        );
    }
    if args.memory {
        args.knobs.minibatch_rows = args.knobs.minibatch_rows.or(Some(kodkod::ROW_BLOCK));
    }
    if args.compile_only {
        if !on_gpu {
            bail!("--compile-only is for --device cuda");
        }
        return cuda::compile(&args);
    }
    args.check()?;
    if on_gpu {
        return cuda::measure_all(&args);
    }
    match (args.memory, args.precision) {
        (true, Storage::Bf16) => memory::measure::<bf16>(&args),
        (true, Storage::F32) => memory::measure::<f32>(&args),
        (false, Storage::Bf16) => measure_all::<bf16>(&args),
        (false, Storage::F32) => measure_all::<f32>(&args),
    }
}

impl Args {
    /// Everything that can be wrong, before anything is measured.
    fn check(&self) -> anyhow::Result<()> {
        for (name, value) in [("--repeat", self.repeat()), ("--dense-size", self.dense_size)] {
            if value == 0 || value > 1 << 14 {
                bail!("{name} {value}: 1 to {} are allowed", 1 << 14);
            }
        }
        match (&self.machine.device, self.dense_tflops) {
            (Device::Cpu, Some(_)) => bail!("--dense-tflops is for a GPU: the CPU's rate is measured"),
            (Device::Cuda(_), _) if self.memory => bail!("--memory is for --device cpu"),
            _ if self.memory && self.gradients != Storage::F32 => {
                bail!("--gradients {}: gradients are no symmetric memory", self.gradients.precision())
            }
            (Device::Cuda(_), _) if self.precision == Storage::F32 => {
                bail!("--precision f32: a GPU computes in bf16; for f32 there is --device cpu")
            }
            (_, Some(rate)) if rate.is_nan() || rate <= 0.0 => {
                bail!("--dense-tflops {rate}: a positive number is needed")
            }
            _ => {}
        }
        let most_ranks = self.ranks.iter().max().copied().unwrap_or(1);
        for &tokens in &self.tokens {
            if tokens == 0 || tokens.saturating_mul(most_ranks) > Routing::MAX_TOKENS {
                bail!(
                    "--tokens {tokens}: 1 to {} are allowed with {most_ranks} ranks",
                    Routing::MAX_TOKENS / most_ranks.max(1)
                );
            }
        }
        for &ranks in &self.ranks {
            self.machine.device.note_unused(ranks);
            self.machine.group(ranks)?;
            for named in &self.shape {
                experts_per_rank(&named.shape, ranks)
                    .map_err(|e| anyhow::anyhow!("--ranks, shape {}: {e}", named.name))?;
            }
        }
        for named in &self.shape {
            self.machine.knobs(&self.knobs, &named.shape, 1).validate()?;
            let needed = self.bytes(&named.shape);
            if let Some(available) = crate::doctor::available_memory()
                && needed > available
            {
                bail!(
                    "--shape {}: about {:.1} GB are needed, {:.1} GB are available; a smaller shape or, without \
                     gradients, --pass fwd needs less",
                    named.name,
                    needed as f64 / 1e9,
                    available as f64 / 1e9
                );
            }
        }
        Ok(())
    }

    fn repeat(&self) -> usize {
        self.repeat.unwrap_or(if self.machine.device == Device::Cpu { 5 } else { 20 })
    }

    fn warmup(&self) -> usize {
        self.warmup.unwrap_or(if self.machine.device == Device::Cpu { 1 } else { 3 })
    }

    fn backward(&self) -> bool {
        self.memory || self.pass.iter().any(|&pass| pass != Timed::Fwd)
    }

    /// About what a shape needs at its largest: weights, gradients, rows, and slots.
    fn bytes(&self, shape: &Shape) -> u64 {
        let largest = |list: &[usize]| list.iter().max().copied().unwrap_or(0) as u64;
        let size = if self.precision == Storage::Bf16 { 2 } else { 4 };
        let (h, i) = (shape.hidden as u64, shape.intermediate as u64);
        let weights = 3 * h * (shape.experts as u64 * i + shape.shared.map_or(0, |s| s.intermediate as u64));
        // The CPU sums those in bf16 in f32 beside them.
        let gradients = match (self.gradients, &self.machine.device) {
            _ if !self.backward() => 0,
            (Storage::F32, _) => 4,
            (Storage::Bf16, Device::Cpu) => 6,
            (Storage::Bf16, _) => 2,
        };
        let routes = largest(&self.tokens) * largest(&self.ranks) * shape.slots() as u64;
        weights * (size + gradients) + routes * size * (2 * h + 4 * i)
    }
}

fn measure_all<T: Element>(args: &Args) -> anyhow::Result<ExitCode> {
    match args.gradients {
        Storage::Bf16 => measure_into::<T, bf16>(args),
        Storage::F32 => measure_into::<T, f32>(args),
    }
}

/// With gradients in `G`.
fn measure_into<T: Element, G: GradientElement>(args: &Args) -> anyhow::Result<ExitCode> {
    let bar = progress(args.shape.len() * args.tokens.len() * args.ranks.len());
    let mut rows = Vec::new();
    for named in &args.shape {
        let knobs = args.machine.knobs(&args.knobs, &named.shape, 1);
        bar.set_message(format!("{}: making weights", named.name));
        let most = |list: &[usize]| list.iter().max().copied().unwrap_or(0);
        let step: Step<T> =
            random_step(&named.shape, most(&args.tokens) * most(&args.ranks), args.backward(), 1);
        let mut gradients = args.backward().then(|| WeightGradients::zeros_in::<G>(&named.shape));
        for &tokens in &args.tokens {
            for &ranks in &args.ranks {
                bar.set_message(format!("{}, {tokens} tokens on each of {ranks} ranks", named.name));
                let group = args.machine.group(ranks)?;
                let times = measure(args, &group, knobs, &step, tokens, gradients.as_mut())?;
                for &pass in &args.pass {
                    let row = row(args, &group, &knobs, named, tokens, pass, &times);
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
        let group = args.machine.group(1)?;
        println!(
            "cpu, {} threads, {}, {}, gradients in {}; medians of {} repeats; dense: {n} x {n} x {n}",
            group.threads(),
            group.isa().map_or_else(String::new, |isa| isa.to_string()),
            args.precision.precision(),
            args.gradients.precision(),
            args.repeat(),
            n = args.dense_size
        );
        println!("{}", table(&rows));
    }
    Ok(ExitCode::SUCCESS)
}

/// Seconds of each repeat.
struct Times {
    dense: Vec<f64>,
    forward: Vec<f64>,
    backward: Vec<f64>,
    /// Routes of the step.
    routes: usize,
}

fn measure<T: Element, G: GradientElement>(
    args: &Args,
    group: &ExpertGroup,
    knobs: Knobs,
    step: &Step<T>,
    tokens_per_rank: usize,
    mut gradients: Option<&mut WeightGradients<Vec<G>, Vec<f32>>>,
) -> anyhow::Result<Times> {
    let (shape, tokens) = (&step.shape, tokens_per_rank * group.ranks());
    let layer = MoeLayer::<T>::new(group, shape.clone(), knobs)?;
    let (ids, topk_weights) = (&step.ids[..tokens * shape.top_k], &step.topk_weights[..tokens * shape.top_k]);
    let routing = Routing::new(shape, ids, topk_weights, &vec![tokens_per_rank; group.ranks()])?;
    let weights = step.weights.as_ref();
    let x = &step.x[..tokens * shape.hidden];
    let mut dense = Dense::<T>::new(group.isa().unwrap_or_else(Isa::best), group.threads(), args.dense_size);
    let mut times = Times { dense: vec![], forward: vec![], backward: vec![], routes: routing.routes() };
    for repeat in 0..args.warmup() + args.repeat() {
        let dense_time = dense.seconds();
        let start = Instant::now();
        let (_, context) = layer.forward(x, &routing, &weights)?;
        let forward_time = start.elapsed().as_secs_f64();
        let start = Instant::now();
        if let (Some(gradients), Some(dy)) = (gradients.as_deref_mut(), &step.dy) {
            let dy = &dy[..tokens * shape.hidden];
            layer.backward(&context, dy, x, &routing, &weights, gradients.as_mut(), false)?;
        }
        let backward_time = start.elapsed().as_secs_f64();
        if repeat >= args.warmup() {
            times.dense.push(dense_time);
            times.forward.push(forward_time);
            times.backward.push(backward_time);
        }
    }
    Ok(times)
}

fn row(
    args: &Args,
    group: &ExpertGroup,
    knobs: &Knobs,
    named: &NamedShape,
    tokens_per_rank: usize,
    pass: Timed,
    times: &Times,
) -> Row {
    let forward_flops = named.shape.forward_flops(tokens_per_rank * group.ranks(), times.routes);
    let (seconds, passes) = match pass {
        Timed::Fwd => (median(times.forward.clone()), 1.0),
        Timed::Bwd => (median(times.backward.clone()), 2.0),
        Timed::Both => (median(times.forward.iter().zip(&times.backward).map(|(f, b)| f + b).collect()), 3.0),
    };
    let tflops = passes * forward_flops / seconds / 1e12;
    let dense_tflops = 2.0 * (args.dense_size as f64).powi(3) / median(times.dense.clone()) / 1e12;
    Row {
        device: args.machine.device.to_string(),
        ranks: group.ranks(),
        shape: named.name.clone(),
        tokens_per_rank,
        pass,
        ms: seconds * 1e3,
        tflops,
        dense_tflops: Some(dense_tflops),
        fraction_of_dense: Some(tflops / dense_tflops),
        precision: args.precision,
        gradients: args.gradients,
        isa: group.isa().map(|isa| isa.to_string()),
        threads: group.threads(),
        repeat: args.repeat(),
        minibatch_rows: knobs.minibatch_rows,
        ring_rows: knobs.ring_rows,
        saved_rows: Some(knobs.saved_rows).filter(|&rows| rows != Knobs::ALL),
        peak_memory_bytes: Some(group.memory().1),
        schedule_ms: None,
    }
}

/// A dense product `C = A B^T` of a size, and where it runs.
pub(crate) struct Dense<T> {
    isa: Isa,
    threads: usize,
    n: usize,
    a: Vec<T>,
    b: Vec<T>,
    c: Vec<f32>,
}

impl<T: Element> Dense<T> {
    pub(crate) fn new(isa: Isa, threads: usize, n: usize) -> Self {
        let operand = |offset: usize| {
            (0..n * n).map(|i| T::from_f32(((i * 31 + offset) % 61) as f32 / 61.0 - 0.5)).collect()
        };
        Dense { isa, threads, n, a: operand(0), b: operand(17), c: vec![0.0; n * n] }
    }

    /// Seconds of one product.
    pub(crate) fn seconds(&mut self) -> f64 {
        let (n, start) = (self.n, Instant::now());
        gemm::dense(self.isa, self.threads, n, n, n, &self.a, &self.b, &mut self.c);
        start.elapsed().as_secs_f64()
    }
}

/// The middle of the sorted values; of an even number, the mean of the two.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    (values[(n - 1) / 2] + values[n / 2]) / 2.0
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header([
        "shape",
        "ranks",
        "tokens/rank",
        "pass",
        "ms",
        "TFLOP/s",
        "dense TFLOP/s",
        "of dense",
        "peak memory MB",
    ]);
    let or_dash = |value: Option<f64>, digits: usize| value.map_or("-".into(), |v| format!("{v:.digits$}"));
    for r in rows {
        table.add_row([
            r.shape.clone(),
            r.ranks.to_string(),
            r.tokens_per_rank.to_string(),
            r.pass.name(),
            format!("{:.2}", r.ms),
            format!("{:.4}", r.tflops),
            or_dash(r.dense_tflops, 4),
            or_dash(r.fraction_of_dense, 2),
            or_dash(r.peak_memory_bytes.map(|bytes| bytes as f64 / 1e6), 1),
        ]);
    }
    right_align(&mut table, 1);
    table
}

/// Sets columns from `first` on to the right, as numbers stand.
fn right_align(table: &mut Table, first: usize) {
    table.column_iter_mut().skip(first).for_each(|c| {
        c.set_cell_alignment(CellAlignment::Right);
    });
}

impl Timed {
    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |v| v.get_name().into())
    }
}

impl Storage {
    fn precision(self) -> Precision {
        match self {
            Storage::Bf16 => Precision::Bf16,
            Storage::F32 => Precision::F32,
        }
    }
}

/// A bar on the terminal; nothing where there is none.
fn progress(steps: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}").expect("the template is valid");
    ProgressBar::new(steps as u64).with_style(style)
}
