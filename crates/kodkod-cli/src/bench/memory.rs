//! Peak symmetric memory of a forward and a backward over growing token counts.
//!
//! The slots that rows are pushed to, `[tokens, slots, hidden]`, grow with the tokens, and so do the `f32` slots of the
//! router gradients, `[tokens, slots]`. What is left of the peak holds rows in flight and rows saved: it follows
//! `ring_rows + saved_rows`.

use std::process::ExitCode;

use comfy_table::{Table, presets};
use kodkod::{Element, Knobs, Routing, Schedule, WeightGradients};
use serde::Serialize;

use super::{Args, right_align};
use crate::inputs::random_step;
use crate::step::Step;

/// One measurement, as it is printed.
#[derive(Debug, Serialize)]
struct Row {
    device: &'static str,
    ranks: usize,
    shape: String,
    tokens_per_rank: usize,
    /// Rows of the fullest rank, padding included.
    rows: usize,
    ring_rows: usize,
    /// None: all.
    saved_rows: Option<usize>,
    /// Most symmetric memory held at once, over all ranks.
    peak_bytes: usize,
    /// The combine slots and those of the router gradients.
    slot_bytes: usize,
    /// The peak less the slots.
    rest_bytes: usize,
}

pub(super) fn measure<T: Element>(args: &Args) -> anyhow::Result<ExitCode> {
    let mut rows = Vec::new();
    for named in &args.shape {
        let shape = &named.shape;
        let saved_rows = args.knobs.saved_rows.map_or(vec![0, Knobs::ALL], |rows| vec![rows]);
        for (&ranks, &saved_rows) in args.ranks.iter().flat_map(|r| saved_rows.iter().map(move |s| (r, s))) {
            for &tokens in &args.tokens {
                let knobs = Knobs { saved_rows, ..args.machine.knobs(&args.knobs, shape, ranks) };
                let group = args.machine.group(ranks)?;
                let step: Step<T> = random_step(shape, tokens * ranks, true, 1);
                let routing = step.routing(&vec![tokens; ranks])?;
                let layer = kodkod::MoeLayer::<T>::new(&group, shape.clone(), knobs)?;
                let weights = step.weights.as_ref();
                let (y, context) = layer.forward(&step.x, &routing, &weights)?;
                let mut gradients = WeightGradients::zeros(shape);
                layer.backward(&context, &y, &step.x, &routing, &weights, gradients.as_mut(), false)?;
                let slot_bytes = ranks * tokens * shape.slots() * (shape.hidden * size_of::<T>() + 4);
                let peak_bytes = group.memory().1;
                rows.push(Row {
                    device: "cpu",
                    ranks,
                    shape: named.name.clone(),
                    tokens_per_rank: tokens,
                    rows: most_rows(shape, &routing),
                    ring_rows: knobs.ring_rows,
                    saved_rows: Some(saved_rows).filter(|&rows| rows != Knobs::ALL),
                    peak_bytes,
                    slot_bytes,
                    rest_bytes: peak_bytes.saturating_sub(slot_bytes),
                });
            }
        }
    }
    if args.json {
        for row in &rows {
            println!("{}", serde_json::to_string(row)?);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header([
        "shape",
        "ranks",
        "tokens/rank",
        "rows of a rank",
        "ring rows",
        "saved rows",
        "peak MB",
        "slots MB",
        "rest MB",
    ]);
    let mb = |bytes: usize| format!("{:.2}", bytes as f64 / 1e6);
    for r in &rows {
        table.add_row([
            r.shape.clone(),
            r.ranks.to_string(),
            r.tokens_per_rank.to_string(),
            r.rows.to_string(),
            r.ring_rows.to_string(),
            r.saved_rows.map_or("all".into(), |n| n.to_string()),
            mb(r.peak_bytes),
            mb(r.slot_bytes),
            mb(r.rest_bytes),
        ]);
    }
    right_align(&mut table, 1);
    println!("Peak of symmetric memory over all ranks, forward and backward, in MB (10^6 bytes)");
    println!("{table}");
    Ok(ExitCode::SUCCESS)
}

fn most_rows(shape: &kodkod::Shape, routing: &Routing) -> usize {
    (0..routing.ranks()).map(|rank| Schedule::new(shape, routing, rank).sources.len()).max().unwrap_or(0)
}
