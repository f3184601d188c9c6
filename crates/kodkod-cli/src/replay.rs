//! `kodkod replay`: one MoE step from a safetensors file, so that anyone can hand over a failing case.
//!
//! N tokens, H hidden, E experts, I intermediate, K top-k, S shared intermediate (several shared experts are one of
//! their total width). FLOAT is bf16 or f32, whatever the file has; it is converted to the precision of the run.
//!
//! ```text
//! x [N, H] FLOAT         topk_ids [N, K] i32, i64     topk_weights [N, K] f32    dy [N, H] FLOAT, optional
//! w_gate, w_up [E, I, H] w_down [E, H, I] FLOAT       b_gate, b_up [E, I]        b_down [E, H] FLOAT, optional
//! shared_gate, shared_up [S, H]                       shared_down [H, S]         FLOAT, optional
//! shared_output_gate [1, H]                           FLOAT, optional
//! metadata: activation (swiglu, swiglu_oai), limit, alpha (of swiglu_oai; 1.702 where not given)
//! ```

mod file;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use comfy_table::{Table, presets};
use kodkod::{Element, ExpertGroup, Precision, Routing, bf16, schedule};
use safetensors::Dtype;
use serde_json::json;

use crate::options::{Device, KnobOptions, MachineOptions, check_writable, parse_precision};
use crate::step::{Comparison, Outputs, Step, tolerance};
use file::{StepFile, Tensor};

/// Options of `kodkod replay`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The step: x, topk_ids, topk_weights, w_gate, w_up, w_down and, optionally, dy, biases and shared experts
    #[arg(value_name = "STEP.safetensors")]
    file: PathBuf,
    /// Write y and, where dy is given, all gradients here
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Ranks, among which the tokens are dealt evenly
    #[arg(long, value_name = "R", default_value_t = 1, conflicts_with = "tokens_per_rank")]
    ranks: usize,
    /// Tokens of each rank, in rank order
    #[arg(long, value_name = "A,B,C", value_delimiter = ',')]
    tokens_per_rank: Option<Vec<usize>>,
    /// What rows and weights are stored in: bf16 or f32 [default: as x is; bf16 on a GPU]
    #[arg(long, value_name = "TYPE", value_parser = parse_precision)]
    precision: Option<Precision>,
    /// Hold every output against the f64 reference; exit status 1 where one is off
    #[arg(long)]
    check: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    machine: MachineOptions,
    #[command(flatten)]
    knobs: KnobOptions,
}

/// Runs it.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    if let Some(out) = &args.out {
        if let (Ok(a), Ok(b)) = (out.canonicalize(), args.file.canonicalize()) {
            ensure!(a != b, "--out {}: this is the input, another file is needed", out.display());
        }
        check_writable(out)?;
    }
    let file = StepFile::open(&args.file)?;
    let rows = file.x_dtype();
    let on_cpu = args.machine.device == Device::Cpu;
    let as_x_is = if rows == Dtype::F32 && on_cpu { Precision::F32 } else { Precision::Bf16 };
    let precision = args.precision.unwrap_or(as_x_is);
    match precision {
        Precision::Bf16 => replay::<bf16>(&args, file.step()?, rows),
        Precision::F32 => replay::<f32>(&args, file.step()?, rows),
    }
}

fn replay<T: Element>(args: &Args, step: Step<T>, rows: Dtype) -> anyhow::Result<ExitCode> {
    let tokens_per_rank = split(args, &step)?;
    args.machine.device.note_unused(tokens_per_rank.len());
    let group = args.machine.group(tokens_per_rank.len())?;
    let knobs = args.machine.knobs(&args.knobs, &step.shape, tokens_per_rank.len());
    let outputs = step.run(&group, knobs, &tokens_per_rank)?;
    let reference = if args.check { Some(step.reference()?) } else { None };
    let comparisons = reference.as_ref().map(|reference| outputs.compare(reference));
    let missed = comparisons.iter().flatten().any(|c| c.miss.is_some());

    let tensors = tensors(&step, &outputs, rows);
    if let Some(out) = &args.out {
        file::write(out, &tensors)?;
    }
    let report = Report { args, step: &step, tokens_per_rank, group: &group };
    let comparisons = comparisons.as_deref();
    match args.json {
        true => println!("{}", report.json(&outputs, &tensors, comparisons)),
        false => println!("{}", report.table(&outputs, &tensors, comparisons)),
    }
    for miss in comparisons.iter().copied().flatten().filter_map(|c| c.miss.as_ref()) {
        eprintln!("miss: {miss}");
    }
    if let Some(margin) = reference.map(|r| r.clamp_margin).filter(|margin| missed && *margin < 4e-6) {
        eprintln!(
            "note: a g or u is within {margin:.1e} of the limit, where the derivative jumps: either side is right"
        );
    }
    Ok(ExitCode::from(u8::from(missed)))
}

/// Tokens of each rank, as the options say.
fn split<T: Element>(args: &Args, step: &Step<T>) -> anyhow::Result<Vec<usize>> {
    let tokens = step.tokens();
    let Some(counts) = &args.tokens_per_rank else {
        schedule::experts_per_rank(&step.shape, args.ranks).context("--ranks")?;
        return Ok(Routing::even_split(tokens, args.ranks));
    };
    schedule::experts_per_rank(&step.shape, counts.len()).context("--tokens-per-rank")?;
    let sum = counts.iter().try_fold(0_usize, |sum, &n| sum.checked_add(n));
    if sum != Some(tokens) {
        let sum = sum.map_or("too large".into(), |n| n.to_string());
        bail!("--tokens-per-rank {counts:?}: the sum is {sum}, x has {tokens} tokens");
    }
    Ok(counts.clone())
}

/// Outputs with the shapes and types that the file shall have.
fn tensors<'a, T: Element>(
    step: &Step<T>,
    outputs: &'a Outputs<T>,
    rows: Dtype,
) -> Vec<(&'static str, Tensor<'a, T>)> {
    let (s, n) = (&step.shape, step.tokens());
    let (h, i, e) = (s.hidden, s.intermediate, s.experts);
    let width = s.shared.map_or(0, |shared| shared.intermediate);
    let with_shape = |(name, values)| {
        let shape = match name {
            "y" | "dx" => vec![n, h],
            "d_topk_weights" => vec![n, s.top_k],
            "dw_gate" | "dw_up" => vec![e, i, h],
            "dw_down" => vec![e, h, i],
            "db_gate" | "db_up" => vec![e, i],
            "db_down" => vec![e, h],
            "d_shared_gate" | "d_shared_up" => vec![width, h],
            "d_shared_down" => vec![h, width],
            "d_shared_output_gate" => vec![1, h],
            other => unreachable!("an output named {other}"),
        };
        let dtype = if matches!(name, "y" | "dx") { rows } else { Dtype::F32 };
        (name, Tensor { dtype, shape, values })
    };
    outputs.named().into_iter().map(with_shape).collect()
}

/// What is printed.
struct Report<'a, T> {
    args: &'a Args,
    step: &'a Step<T>,
    tokens_per_rank: Vec<usize>,
    group: &'a ExpertGroup,
}

impl<T: Element> Report<'_, T> {
    fn precision(&self) -> &'static str {
        match T::PRECISION {
            Precision::Bf16 => "bf16",
            Precision::F32 => "f32",
        }
    }

    fn json(
        &self,
        outputs: &Outputs<T>,
        tensors: &[(&str, Tensor<T>)],
        comparisons: Option<&[Comparison]>,
    ) -> serde_json::Value {
        let shape = &self.step.shape;
        let knobs = self.args.machine.knobs(&self.args.knobs, shape, self.tokens_per_rank.len());
        let output = |(at, (name, tensor)): (usize, &(&str, Tensor<T>))| {
            let (max, norm, non_finite) = tensor.size();
            let mut object = json!({
                "name": name, "dtype": format!("{:?}", tensor.dtype).to_lowercase(), "shape": tensor.shape,
                "max_abs": max, "norm": norm, "non_finite": non_finite, "hash": format!("{:016x}", tensor.hash()),
            });
            if let Some(c) = comparisons.map(|c| &c[at]) {
                object["error"] = json!(c.error);
                object["miss"] = json!(c.miss);
            }
            object
        };
        let milliseconds = |d: std::time::Duration| d.as_secs_f64() * 1e3;
        json!({
            "file": self.args.file, "tokens": self.step.tokens(), "hidden": shape.hidden,
            "intermediate": shape.intermediate, "experts": shape.experts, "top_k": shape.top_k,
            "shared_intermediate": shape.shared.map(|s| s.intermediate),
            "ranks": self.tokens_per_rank.len(), "tokens_per_rank": self.tokens_per_rank,
            "precision": self.precision(), "device": self.args.machine.device.to_string(),
            "isa": self.group.isa().map(|isa| isa.to_string()), "threads": self.group.threads(),
            "minibatch_rows": knobs.minibatch_rows, "ring_rows": knobs.ring_rows,
            "saved_rows": (knobs.saved_rows != kodkod::Knobs::ALL).then_some(knobs.saved_rows),
            "forward_ms": milliseconds(outputs.forward),
            "backward_ms": outputs.gradients.as_ref().map(|_| milliseconds(outputs.backward)),
            "outputs": tensors.iter().enumerate().map(output).collect::<Vec<_>>(),
            "tolerance": comparisons.map(|_| tolerance(T::PRECISION)),
            "passed": comparisons.map(|c| c.iter().all(|c| c.miss.is_none())),
        })
    }

    fn table(
        &self,
        outputs: &Outputs<T>,
        tensors: &[(&str, Tensor<T>)],
        comparisons: Option<&[Comparison]>,
    ) -> String {
        let s = &self.step.shape;
        let shared = s.shared.map_or(String::new(), |s| format!(", shared {}", s.intermediate));
        let mut text = format!(
            "{} tokens, hidden {}, intermediate {}, {} experts, top-{}{shared}; {}, {}\n\
             tokens per rank {:?}; forward {:.3} ms",
            self.step.tokens(),
            s.hidden,
            s.intermediate,
            s.experts,
            s.top_k,
            self.precision(),
            self.group.description(),
            self.tokens_per_rank,
            outputs.forward.as_secs_f64() * 1e3,
        );
        if outputs.gradients.is_some() {
            text += &format!(", backward {:.3} ms", outputs.backward.as_secs_f64() * 1e3);
        }
        let mut table = Table::new();
        table.load_style(presets::UTF8_BORDERS_ONLY);
        let mut header = vec!["output", "shape", "type", "largest", "norm", "not finite", "hash of bits"];
        if comparisons.is_some() {
            header.extend(["error", ""]);
        }
        table.set_header(header);
        for (at, (name, tensor)) in tensors.iter().enumerate() {
            let (max, norm, non_finite) = tensor.size();
            let mut row = vec![
                name.to_string(),
                format!("{:?}", tensor.shape),
                format!("{:?}", tensor.dtype).to_lowercase(),
                format!("{max:.4e}"),
                format!("{norm:.4e}"),
                non_finite.to_string(),
                format!("{:016x}", tensor.hash()),
            ];
            if let Some(c) = comparisons.map(|c| &c[at]) {
                row.push(format!("{:.2e}", c.error));
                row.push(if c.miss.is_some() { "MISS" } else { "ok" }.into());
            }
            table.add_row(row);
        }
        text + "\n" + &table.to_string()
    }
}
