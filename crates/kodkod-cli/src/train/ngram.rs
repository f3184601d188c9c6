//! Byte n-gram models to compare with, by interpolated absolute discounting:
//!
//! ```text
//! P(c | h) = max(n(h c) - D, 0) / n(h)  +  D * kinds(h) / n(h) * P(c | h without its first byte)
//! ```
//!
//! with `n` counts in the training text, `kinds(h)` the number of different bytes seen after h, `D = n1 / (n1 + 2 n2)` from
//! the numbers of n-grams seen once and twice (Ney, Essen and Kneser 1994), and `P = 1/256` below the unigrams. It is a
//! better smoothing than adding one, so a harder mark.

/// The smoothing's name, for tables.
pub(crate) const SMOOTHING: &str = "interpolated absolute discounting";

/// Bits per byte of `text[from..]` under an n-gram model of `order` bytes (2: bigram) of `text[..from]`.
pub(crate) fn bits_per_byte(text: &[u8], from: usize, order: usize) -> f64 {
    let levels: Vec<Level> = (1..=order).map(|n| Level::count(&text[..from], n)).collect();
    let bits: f64 = (from..text.len())
        .map(|at| {
            let p =
                levels.iter().enumerate().filter(|(n, _)| *n <= at).fold(1.0 / 256.0, |lower, (n, level)| {
                    level.probability(index(&text[at - n..at]), text[at], lower)
                });
            -p.log2()
        })
        .sum();
    bits / (text.len() - from) as f64
}

/// Counts of all n-grams of one length: `[256^(n-1) histories, 256]`.
struct Level {
    counts: Vec<u32>,
    totals: Vec<(u32, u32)>,
    discount: f64,
}

impl Level {
    fn count(text: &[u8], n: usize) -> Self {
        let mut counts = vec![0_u32; 256_usize.pow(n as u32)];
        text.windows(n).for_each(|gram| counts[index(gram)] += 1);
        let seen = |times| counts.iter().filter(|&&c| c == times).count() as f64;
        let (once, twice) = (seen(1), seen(2));
        // Without n-grams seen once there is nothing to estimate it from: keep a little for the unseen.
        let discount = if once > 0.0 { once / (once + 2.0 * twice) } else { 0.5 };
        let totals = |row: &[u32]| (row.iter().sum(), row.iter().filter(|&&c| c > 0).count() as u32);
        let totals = counts.chunks_exact(256).map(totals).collect();
        Level { counts, totals, discount: discount.min(0.99) }
    }

    fn probability(&self, history: usize, byte: u8, lower: f64) -> f64 {
        let (total, kinds) = self.totals[history];
        if total == 0 {
            return lower;
        }
        let count = f64::from(self.counts[history * 256 + usize::from(byte)]);
        ((count - self.discount).max(0.0) + self.discount * f64::from(kinds) * lower) / f64::from(total)
    }
}

fn index(gram: &[u8]) -> usize {
    gram.iter().fold(0, |i, &b| i * 256 + usize::from(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_sum_to_one() {
        let text = b"the cat sat on the mat and the rat ate the oat";
        let levels: Vec<Level> = (1..=3).map(|n| Level::count(text, n)).collect();
        for history in [&b"th"[..], b"at", b"zz", b" z"] {
            let sum: f64 = (0..=255_u8)
                .map(|c| {
                    levels.iter().enumerate().fold(1.0 / 256.0, |lower, (n, level)| {
                        level.probability(index(&history[2 - n..]), c, lower)
                    })
                })
                .sum();
            assert!((sum - 1.0).abs() < 1e-12, "{history:?}: {sum}");
        }
    }

    #[test]
    fn a_longer_history_predicts_a_cycle() {
        // After "a" comes "b" or "c", but after "xa" always "b" and after "ya" always "c".
        let text = b"xabyac".repeat(200);
        let bits = [1, 2, 3].map(|order| bits_per_byte(&text, 900, order));
        println!("bits per byte by order: {bits:?}");
        assert!(bits[0] > 2.0 && bits[1] > 0.3 && bits[1] < 0.4 && bits[2] < 0.05);
    }
}
