//! `kodkod trace`: every task of one forward and one backward on a GPU, by the GPU's clock.
//!
//! The kernels are compiled to stamp each task, which costs them little: what is seen is the run that `bench` times.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use comfy_table::{CellAlignment, Table, presets};
use kodkod::cuda::trace::{KindTimes, by_kind, chrome_json, span, svg};
use kodkod::cuda::{CudaLayer, STAMPS, Stamp, driver, jit};
use kodkod::schedule::experts_per_rank;
use kodkod::{GradientElement, Knobs, Precision, Routing, bf16};
use serde_json::{Value, json};

use crate::inputs::random_step;
use crate::on_gpus::{self, OnGpus};
use crate::options::{Device, KnobOptions, MachineOptions, check_writable, parse_precision};
use crate::shapes::NamedShape;
use crate::step::Step;

/// Options of `kodkod trace`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
It shows what a pass spends its time on, and so which knob to turn: docs/tuning.md says how. Inputs are those of \
`kodkod bench --device cuda`, from a fixed seed.

Open the trace in https://ui.perfetto.dev or chrome://tracing. A process is a rank, a row is a streaming multiprocessor \
(SM), a slice is a task; within a tile of a product are three: wait (for the first operands), product, epilogue.

Open the timeline in a browser: the same rows at a glance, the forward and, right of it, the backward. White is idle, \
pale is waiting.

Examples:
  kodkod trace
  kodkod trace --shape qwen3-30b-a3b --tokens 4096 --bwd-comm-sms 16 --out out/qwen.json")]
pub(crate) struct Args {
    /// The shape: a published name, or HIDDENxINTERMEDIATExEXPERTSxTOP_K
    #[arg(long, value_name = "SHAPE", default_value = "olmoe-1b-7b")]
    shape: NamedShape,
    /// Tokens of each rank
    #[arg(long, value_name = "TOKENS", default_value_t = 8192)]
    tokens: usize,
    /// Ranks, which share the GPU unless --device gives one to each [default: as many as GPUs]
    #[arg(long, value_name = "RANKS")]
    ranks: Option<usize>,
    /// The GPU, or with as many as ranks one each: cuda, cuda:N or cuda:N,M,...
    #[arg(long, value_name = "DEVICE", default_value = "cuda")]
    device: Device,
    /// What the gradients of weights are stored in: f32 or bf16
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = parse_precision)]
    gradients: Precision,
    /// The trace; a timeline is written beside it, with the extension svg
    #[arg(long, value_name = "FILE.json", default_value = "trace.json")]
    out: PathBuf,
    /// Only compile the kernels that are needed, into the cache; needs no GPU
    #[arg(long)]
    compile_only: bool,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    knobs: KnobOptions,
}

impl Args {
    fn ranks(&self) -> usize {
        self.ranks.or(self.device.several()).unwrap_or(1)
    }
}

/// Runs it.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.device == Device::Cpu {
        bail!(
            "--device {}: cuda, cuda:N and cuda:N,M,... are allowed, the CPU's tasks are not stamped",
            args.device
        );
    }
    let machine = MachineOptions { device: args.device.clone(), ..MachineOptions::default() };
    let (shape, knobs) = (&args.shape.shape, machine.knobs(&args.knobs, &args.shape.shape, args.ranks()));
    knobs.validate()?;
    experts_per_rank(shape, args.ranks()).with_context(|| format!("--ranks, shape {}", args.shape.name))?;
    let most = Routing::MAX_TOKENS / args.ranks();
    ensure!((1..=most).contains(&args.tokens), "--tokens {}: 1 to {most} are allowed", args.tokens);
    let split = vec![args.tokens; args.ranks()];
    if args.compile_only {
        return compile(&args, &knobs, &split);
    }
    let svg_path = svg_beside(&args.out)?;
    args.device.note_unused(args.ranks());
    machine.group(args.ranks())?; // Says what is wrong with the GPU, or the number of ranks on it.
    let gpus = on_gpus::open(args.device.gpus(args.ranks()))?;
    let device = &gpus[0];
    let passes = match args.gradients {
        Precision::F32 => passes::<f32>,
        Precision::Bf16 => passes::<bf16>,
    };
    let (forward, backward, crossings) =
        passes(&gpus, &args, &knobs, &split).with_context(|| format!("--shape {}", args.shape.name))?;
    let stamps = [&forward[..], &backward[..]].concat();
    let write = |path: &Path, text: String| {
        std::fs::write(path, text).with_context(|| format!("--out: {}", path.display()))
    };
    write(&args.out, chrome_json(&stamps))?;
    write(&svg_path, svg(&stamps))?;

    let sms = device.sms() * gpus.len() as u32;
    let passes = [Pass::new("forward", &forward, sms), Pass::new("backward", &backward, sms)];
    if args.json {
        let object = json!({
            "device": args.device.to_string(), "gpu": device.name(), "sms": device.sms(), "shape": args.shape.name,
            "ranks": args.ranks(), "tokens_per_rank": args.tokens, "gradients": args.gradients.to_string(),
            "minibatch_rows": knobs.minibatch_rows, "ring_rows": knobs.ring_rows,
            "saved_rows": (knobs.saved_rows != Knobs::ALL).then_some(knobs.saved_rows),
            "fwd_comm_sms": knobs.fwd_comm_sms, "bwd_comm_sms": knobs.bwd_comm_sms,
            "rows_pulled_from_other_ranks": crossings[0], "rows_copied_from_those": crossings[1],
            "trace": args.out, "timeline": svg_path, "passes": passes.each_ref().map(Pass::json),
        });
        println!("{object}");
    } else {
        println!(
            "{}{}, {} SMs; {}, {} ranks, {} tokens each, gradients in {}",
            if gpus.len() > 1 { format!("{} x ", gpus.len()) } else { String::new() },
            device.name(),
            device.sms(),
            args.shape.name,
            args.ranks(),
            args.tokens,
            args.gradients
        );
        println!("{}", table(&passes));
        for pass in &passes {
            println!(
                "{}: {:.3} ms, the SMs are idle for {:.1} % of it",
                pass.name,
                pass.ms(),
                1e2 * pass.idle()
            );
        }
        if args.ranks() > 1 {
            let [pulled, copied] = crossings;
            println!(
                "rows of other ranks' tokens: {pulled} pulled from them, {copied} copied from one of those"
            );
        }
        println!(
            "{} (for https://ui.perfetto.dev) and {} are written",
            args.out.display(),
            svg_path.display()
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Fills the cache with what [`passes`] needs.
fn compile(args: &Args, knobs: &Knobs, split: &[usize]) -> anyhow::Result<ExitCode> {
    let mut defines = CudaLayer::defines(&args.shape.shape, knobs, split, args.gradients)?;
    defines.push(("TRACE", "1".into())); // As in `CudaLayer::traced`.
    let meets = args.device.gpus(args.ranks()).len() > 1;
    for source in jit::Source::ALL.into_iter().chain(meets.then_some(jit::Source::Meet)) {
        jit::cubin(source, &defines)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The timeline's path, where it and `out` can be written: found out before the run, not after it.
fn svg_beside(out: &Path) -> anyhow::Result<PathBuf> {
    ensure!(
        out.extension().is_some_and(|e| e == "json"),
        "--out {}: a name that ends with .json is needed",
        out.display()
    );
    let timeline = out.with_extension("svg");
    for path in [out, &timeline] {
        check_writable(path)?;
    }
    Ok(timeline)
}

/// The stamps of a forward and of the backward after it, in order of their begin, and how many rows crossed from rank to rank,
/// and did not have to.
fn passes<G: GradientElement>(
    gpus: &[Arc<driver::Device>],
    args: &Args,
    knobs: &Knobs,
    split: &[usize],
) -> anyhow::Result<(Vec<Stamp>, Vec<Stamp>, [u64; 2])> {
    let shape = &args.shape.shape;
    let step: Step<bf16> = random_step(shape, split.iter().sum(), true, 1);
    let on_gpus = OnGpus::<G>::new(gpus, knobs, &step, split, CudaLayer::traced)?;
    let layer = &on_gpus.layer;
    // Two to warm up.
    for _ in 0..2 {
        on_gpus.forward()?;
        on_gpus.backward()?;
        layer.finish()?;
    }
    let (mut from, mut crossings) = (0, [0, 0]);
    let mut stamps = |run: &dyn Fn() -> kodkod::cuda::Result<()>| -> anyhow::Result<Vec<Stamp>> {
        layer.clear_stamps()?;
        run()?;
        layer.finish()?;
        let mut stamps = layer.stamps()?;
        if (0..args.ranks()).any(|rank| stamps.iter().filter(|s| s.rank == rank).count() >= STAMPS) {
            eprintln!(
                "note: only the first {STAMPS} tasks of a rank are in the trace; fewer experts or tokens have fewer"
            );
        }
        for [pulled, copied] in layer.crossings()? {
            crossings = [crossings[0] + u64::from(pulled), crossings[1] + u64::from(copied)];
        }
        align(&mut stamps, gpus.len() > 1, from);
        from = stamps.iter().map(|s| s.end).max().unwrap_or(0) + PAUSE;
        Ok(stamps)
    };
    let forward = stamps(&|| on_gpus.forward())?;
    let backward = stamps(&|| on_gpus.backward())?;
    Ok((forward, backward, crossings))
}

/// Nanoseconds between the forward and the backward in a trace, so that they can be told apart.
const PAUSE: u64 = 20_000;

/// Makes a pass's first task begin at `from`, and sorts by begin. GPUs have clocks of their own: each rank's first task then
/// begins there, since ranks begin together.
fn align(stamps: &mut [Stamp], own_clocks: bool, from: u64) {
    let of = |s: &Stamp| if own_clocks { s.rank } else { 0 };
    let mut first = std::collections::BTreeMap::new();
    for s in stamps.iter() {
        let begin = first.entry(of(s)).or_insert(s.begin);
        *begin = s.begin.min(*begin);
    }
    for s in stamps.iter_mut() {
        let begin = first[&of(s)];
        for time in [&mut s.begin, &mut s.loaded, &mut s.product, &mut s.end] {
            if *time != 0 {
                *time = *time - begin + from;
            }
        }
    }
    stamps.sort_by_key(|s| s.begin);
}

/// One pass in sums.
struct Pass {
    name: &'static str,
    sms: u32,
    /// Nanoseconds.
    span: u64,
    kinds: Vec<KindTimes>,
}

impl Pass {
    fn new(name: &'static str, stamps: &[Stamp], sms: u32) -> Self {
        Pass { name, sms, span: span(stamps), kinds: by_kind(stamps) }
    }

    fn ms(&self) -> f64 {
        self.span as f64 / 1e6
    }

    /// Of the time of all SMs. An SM runs one task at a time.
    fn share(&self, ns: u64) -> f64 {
        ns as f64 / (self.span * u64::from(self.sms)).max(1) as f64
    }

    fn idle(&self) -> f64 {
        1.0 - self.share(self.kinds.iter().map(|k| k.total).sum())
    }

    fn json(&self) -> Value {
        let kind = |k: &KindTimes| {
            let parts = mean_parts(k);
            json!({
                "kind": k.kind, "tasks": k.tasks, "mean_us": mean_us(k, k.total), "total_ms": k.total as f64 / 1e6,
                "share": self.share(k.total), "wait_us": parts.map(|p| p[0]), "product_us": parts.map(|p| p[1]),
                "epilogue_us": parts.map(|p| p[2]),
            })
        };
        let kinds: Vec<_> = self.kinds.iter().map(kind).collect();
        json!({ "pass": self.name, "ms": self.ms(), "idle": self.idle(), "tasks": kinds })
    }
}

fn mean_us(kind: &KindTimes, sum: u64) -> f64 {
    sum as f64 / 1e3 / kind.tasks as f64
}

/// Microseconds a task of waiting, product and epilogue.
fn mean_parts(kind: &KindTimes) -> Option<[f64; 3]> {
    kind.parts.map(|parts| parts.map(|sum| mean_us(kind, sum)))
}

fn table(passes: &[Pass]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header([
        "pass",
        "task",
        "number",
        "us each",
        "wait",
        "product",
        "epilogue",
        "ms in all",
        "of SM time",
    ]);
    for pass in passes {
        for kind in &pass.kinds {
            let [wait, product, epilogue] = match mean_parts(kind) {
                Some(parts) => parts.map(|us| format!("{us:.2}")),
                None => ["-"; 3].map(String::from),
            };
            table.add_row([
                pass.name.into(),
                kind.kind.into(),
                kind.tasks.to_string(),
                format!("{:.2}", mean_us(kind, kind.total)),
                wait,
                product,
                epilogue,
                format!("{:.3}", kind.total as f64 / 1e6),
                format!("{:.1} %", 1e2 * pass.share(kind.total)),
            ]);
        }
    }
    table.column_iter_mut().skip(2).for_each(|c| {
        c.set_cell_alignment(CellAlignment::Right);
    });
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_two_sms_and_a_trace_that_parses() {
        let stamp = |[begin, loaded, product, end]: [u64; 4], kind, sm| Stamp {
            rank: 0,
            begin,
            loaded,
            product,
            end,
            cycles: 0,
            kind,
            place: [0, 0],
            sm,
            cta: sm,
        };
        let stamps = [stamp([1000, 0, 0, 2000], "Pull", 0), stamp([1500, 1600, 2500, 5000], "Down", 1)];
        let pass = Pass::new("forward", &stamps, 2);
        println!("{}\n{}", pass.json(), table(std::slice::from_ref(&pass)));
        // 4000 ns on 2 SMs; 3500 and 1000 of 8000 are used.
        assert_eq!((pass.ms(), pass.idle()), (0.004, 1.0 - 4500.0 / 8000.0));
        let json = pass.json();
        assert_eq!(
            (&json["tasks"][0]["kind"], &json["tasks"][0]["share"]),
            (&"Down".into(), &(0.4375.into()))
        );
        assert_eq!(
            (&json["tasks"][0]["wait_us"], &json["tasks"][1]["wait_us"]),
            (&(0.1.into()), &Value::Null)
        );
        let trace: Value = serde_json::from_str(&chrome_json(&stamps)).expect("JSON");
        let names = trace["traceEvents"].as_array().expect("a list").iter().map(|e| &e["name"]);
        assert_eq!(names.filter(|n| **n == "Down" || **n == "epilogue").count(), 2);
        assert_eq!(Pass::new("backward", &[], 2).idle(), 1.0);
    }
}
