//! The text: a training part, the held-out rest, and the windows that are read from both.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, ensure};

/// The text that is trained on where none is given.
const SAMPLE: &[u8] = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/austen.txt"));

/// One byte in this many is held out, at the end of the text.
const HELD_OUT_SHARE: usize = 20;

/// A text, split into a training part and a held-out part that follows it.
pub(crate) struct Text {
    bytes: Vec<u8>,
    train: usize,
    /// Where the text came from, for people.
    pub(crate) name: String,
}

impl Text {
    /// Reads `path`, or takes the sample that the command carries; `context` is the model's.
    pub(crate) fn load(path: Option<&Path>, context: usize) -> Result<Self> {
        let (bytes, name) = match path {
            Some(path) => {
                let bytes = std::fs::read(path)
                    .with_context(|| format!("--text {}: cannot read it", path.display()))?;
                (bytes, path.display().to_string())
            }
            None => (SAMPLE.to_vec(), "five novels by Jane Austen (data/austen.txt)".into()),
        };
        let train = bytes.len() - bytes.len() / HELD_OUT_SHARE;
        let least = HELD_OUT_SHARE * (context + 1);
        ensure!(
            bytes.len() >= least,
            "--text {name} has {} bytes: at least {least} are needed, for --context {context} in the {} % held out",
            bytes.len(),
            100 / HELD_OUT_SHARE
        );
        Ok(Text { bytes, train, name })
    }

    /// The bytes that are trained on.
    pub(crate) fn train(&self) -> &[u8] {
        &self.bytes[..self.train]
    }

    /// The bytes that are not.
    pub(crate) fn held_out(&self) -> &[u8] {
        &self.bytes[self.train..]
    }

    /// FNV-1a of all bytes, to tell texts apart.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.bytes
            .iter()
            .fold(0xcbf2_9ce4_8422_2325, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
    }

    /// The batch of a step: `rows` windows of the training part, `(inputs, targets)`, each `rows * context` bytes. It
    /// depends on the seed and the step alone, so a run can start at any step.
    pub(crate) fn batch(&self, seed: u64, step: usize, rows: usize, context: usize) -> (Vec<u32>, Vec<u32>) {
        let starts = (0..rows).map(|row| {
            let draw = mix(mix(mix(seed) ^ step as u64) ^ row as u64);
            (draw % (self.train - context) as u64) as usize
        });
        windows(&self.bytes, starts, context)
    }

    /// The held-out part in pieces, each scored in a window of `context` that ends with it: every byte is predicted from
    /// at least a quarter of a context, the first ones from the end of the training part. Gives window starts, and how
    /// many of a window's last targets are scored.
    pub(crate) fn held_out_windows(&self, context: usize) -> Vec<(usize, usize)> {
        let Range { start, end } = self.train..self.bytes.len();
        let piece = (context * 3).div_ceil(4);
        (start..end)
            .step_by(piece)
            .map(|from| {
                // The last target of the window that starts at s is byte s + context.
                let to = (from + piece).min(end);
                (to - 1 - context, to - from)
            })
            .collect()
    }

    /// Inputs and targets of windows with these starts.
    pub(crate) fn windows(
        &self,
        starts: impl Iterator<Item = usize>,
        context: usize,
    ) -> (Vec<u32>, Vec<u32>) {
        windows(&self.bytes, starts, context)
    }
}

fn windows(bytes: &[u8], starts: impl Iterator<Item = usize>, context: usize) -> (Vec<u32>, Vec<u32>) {
    let (mut inputs, mut targets) = (Vec::new(), Vec::new());
    for start in starts {
        inputs.extend(bytes[start..start + context].iter().map(|&b| u32::from(b)));
        targets.extend(bytes[start + 1..start + context + 1].iter().map(|&b| u32::from(b)));
    }
    (inputs, targets)
}

/// One step of SplitMix64: spreads neighbouring numbers over all 64 bits.
pub(crate) fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_out_windows_score_every_byte_once() {
        let text = Text { bytes: (0..200).collect(), train: 150, name: String::new() };
        for context in [1, 7, 8, 31] {
            let mut scored = Vec::new();
            for (start, last) in text.held_out_windows(context) {
                let (_, targets) = text.windows([start].into_iter(), context);
                scored.extend_from_slice(&targets[context - last..]);
            }
            assert_eq!(scored, (150..200).collect::<Vec<u32>>(), "context {context}");
        }
    }

    #[test]
    fn a_batch_depends_on_seed_and_step_and_stays_in_the_training_part() {
        let text = Text { bytes: (0..=255).cycle().take(1000).collect(), train: 950, name: String::new() };
        let batch = |seed, step| text.batch(seed, step, 64, 16);
        assert_eq!(batch(1, 2), batch(1, 2));
        assert_ne!(batch(1, 2), batch(1, 3));
        assert_ne!(batch(1, 2), batch(2, 2));
        let (inputs, targets) = batch(5, 5);
        assert!(inputs.iter().zip(&targets).all(|(i, t)| (i + 1) % 256 == *t));
    }
}
