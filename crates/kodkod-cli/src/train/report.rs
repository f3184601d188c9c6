//! What a run says at its end: tables for people, `metrics.json` for programs.

use std::path::Path;

use anyhow::{Context, Result};
use comfy_table::{Cell, CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use serde::Serialize;

use super::{Config, ngram};

/// Everything that `metrics.json` holds.
#[derive(Serialize)]
pub(crate) struct Metrics<'a> {
    /// The configuration, as in the checkpoint.
    pub(crate) config: &'a Config,
    /// Where the text came from.
    pub(crate) text: &'a str,
    /// Bytes trained on and held out.
    pub(crate) train_bytes: usize,
    pub(crate) held_out_bytes: usize,
    pub(crate) parameters: usize,
    /// What this run ran on; nothing below but speed and time depends on it.
    pub(crate) ranks: usize,
    pub(crate) threads: usize,
    /// None on a GPU.
    pub(crate) isa: Option<String>,
    /// Steps done, in this run and before.
    pub(crate) steps_done: usize,
    /// Training loss of every step, nats per byte, and its bits.
    pub(crate) losses: &'a [f32],
    pub(crate) losses_hex: Vec<String>,
    /// `[steps done, bits per byte]` on a sample of the held-out text.
    pub(crate) held_out_curve: &'a [(u32, f32)],
    /// On all of the held-out text.
    pub(crate) bits_per_byte: BitsPerByte,
    /// Routes to each expert of each layer, over the held-out text.
    pub(crate) expert_load: &'a [Vec<u64>],
    pub(crate) tokens_per_second: f64,
    /// Of the training steps alone, and of everything.
    pub(crate) train_seconds: f64,
    pub(crate) wall_seconds: f64,
}

/// Bits per byte on the held-out text.
#[derive(Serialize, Clone, Copy)]
pub(crate) struct BitsPerByte {
    pub(crate) model: f64,
    pub(crate) bigram: f64,
    pub(crate) trigram: f64,
}

/// The bits of each number, e.g. `3f800000` for 1.
pub(crate) fn hex(values: &[f32]) -> Vec<String> {
    values.iter().map(|v| format!("{:08x}", v.to_bits())).collect()
}

impl Metrics<'_> {
    /// Writes `metrics.json`.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let part = path.with_extension("json.part");
        std::fs::write(&part, serde_json::to_string_pretty(self)? + "\n")
            .and_then(|()| std::fs::rename(&part, path))
            .with_context(|| format!("--out: cannot write {}", path.display()))
    }

    /// The tables.
    pub(crate) fn print(&self) {
        let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
        let bits = self.bits_per_byte;
        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED).set_header([
            "held-out text",
            "bits per byte",
            "against the bigram",
        ]);
        for (name, value) in
            [("this model", bits.model), ("byte trigram", bits.trigram), ("byte bigram", bits.bigram)]
        {
            let against = format!("{:+.1} %", 100.0 * (value / bits.bigram - 1.0));
            table.add_row([Cell::new(name), right(format!("{value:.4}")), right(against)]);
        }
        println!("{table}");
        println!("n-grams: {}, of the same training text\n", ngram::SMOOTHING);

        let mut table = Table::new();
        table.load_style(UTF8_FULL_CONDENSED).set_header([
            "layer",
            "share of routes by expert, in %",
            "",
            "most / mean",
        ]);
        for (layer, load) in self.expert_load.iter().enumerate() {
            let total = load.iter().sum::<u64>().max(1) as f64;
            let most = load.iter().copied().max().unwrap_or(0);
            let shares = load
                .iter()
                .map(|&n| format!("{:4.1}", 100.0 * n as f64 / total))
                .collect::<Vec<_>>()
                .join(" ");
            let peak = format!("{:.2}", most as f64 * load.len() as f64 / total);
            table.add_row([Cell::new(layer), Cell::new(shares), Cell::new(bars(load, most)), right(peak)]);
        }
        println!("{table}");
    }
}

/// One bar an expert, the tallest for the largest load.
fn bars(load: &[u64], most: u64) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    load.iter().map(|&n| BARS[(n * 8).div_ceil(most.max(1)).clamp(1, 8) as usize - 1]).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn bars_rise_with_the_load() {
        assert_eq!(super::bars(&[0, 1, 4, 8], 8), "▁▁▄█");
        assert_eq!(super::bars(&[0, 0], 0), "▁▁");
        assert_eq!(super::hex(&[1.0, -0.0]), ["3f800000", "80000000"]);
    }
}
