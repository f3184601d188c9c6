//! Ops of the transformer that candle lacks a backward for, or computes in many passes over memory.
//!
//! Each says its formula and its gradient. Rows are independent, so threads share them and no bit depends on how.

use std::sync::OnceLock;

use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Storage, Tensor, WithDType, bail,
};
use kodkod::numerics::{dot, exp};

/// `y = x / sqrt(mean(x^2) + 1e-6) * gain` along rows, `x` `[rows, width]`, `gain` `[width]` (Zhang and Sennrich 2019).
pub(crate) fn rms_norm(x: &Tensor, gain: &Tensor) -> Result<Tensor> {
    x.apply_op2(gain, RmsNorm)
}

/// `softmax(scale * s)` over the columns `j <= i` of every `[n, n]` matrix, and 0 beyond.
pub(crate) fn causal_softmax(s: &Tensor, scale: f32) -> Result<Tensor> {
    s.apply_op1(CausalSoftmax { scale })
}

/// `[batch, n, heads * width]` to `[batch, heads, n, width]`, and with `rotary` each pair `(a, b)` of columns `i` and
/// `i + width / 2` turned by the angle `position * 10000^(-2 i / width)` (Su et al. 2021).
pub(crate) fn split_heads(x: &Tensor, heads: usize, rotary: bool) -> Result<Tensor> {
    x.apply_op1(SplitHeads { heads, rotary })
}

/// `y[t] = x[t] + mix * x[t - 1]` within each of the `batch` sequences, with `x[-1] = 0`: `x` `[batch, n, width]`, `mix` `[width]`.
pub(crate) fn token_shift(x: &Tensor, mix: &Tensor) -> Result<Tensor> {
    x.apply_op2(mix, TokenShift)
}

/// Mean over rows of `-ln softmax(logits)[target]`, `logits` `[rows, classes]`.
pub(crate) fn cross_entropy(logits: &Tensor, targets: &[u32]) -> Result<Tensor> {
    logits.apply_op1(CrossEntropy { targets: targets.to_vec() })
}

/// `-ln softmax(logits)[target]` of every row.
pub(crate) fn row_losses(logits: &Tensor, targets: &[u32]) -> Result<Vec<f32>> {
    with_f32(logits, |values, dims| {
        let classes = dims[dims.len() - 1];
        Ok(values
            .chunks_exact(classes)
            .zip(targets)
            .map(|(row, &t)| log_sum_exp(row) - row[t as usize])
            .collect())
    })
}

/// Calls `f` with a contiguous CPU tensor's elements and sizes.
pub(crate) fn with_f32<R>(tensor: &Tensor, f: impl FnOnce(&[f32], &[usize]) -> Result<R>) -> Result<R> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => f(elements(storage, layout)?, layout.dims()),
        _ => bail!("the model runs on the CPU"),
    }
}

fn elements<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&f32::cpu_storage_as_slice(storage)?[start..end]),
        None => bail!("a contiguous tensor is needed"),
    }
}

/// Elements below which a second thread costs more than it saves.
pub(crate) const WORTH_A_THREAD: usize = 1 << 16;

/// Cores of this machine; asking the system reads files, so once.
pub(crate) fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, |n| n.get()))
}

/// Runs `f(first_row, rows)` over pieces of `out`, whole rows of `width` each, on all cores.
pub(crate) fn in_rows(out: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    let threads = cores().min(out.len() / WORTH_A_THREAD).max(1);
    let rows = (out.len() / width).div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        let mut pieces = out.chunks_mut(rows * width).enumerate();
        let first = pieces.next();
        for (i, piece) in pieces {
            let f = &f;
            scope.spawn(move || f(i * rows, piece));
        }
        if let Some((_, piece)) = first {
            f(0, piece);
        }
    });
}

fn storage(values: Vec<f32>, shape: &Shape) -> Result<(CpuStorage, Shape)> {
    Ok((CpuStorage::F32(values), shape.clone()))
}

fn like(values: Vec<f32>, tensor: &Tensor) -> Result<Tensor> {
    Tensor::from_vec(values, tensor.shape(), tensor.device())
}

fn log_sum_exp(row: &[f32]) -> f32 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    max + dot(row.len(), |i| exp(row[i] - max)).ln()
}

struct RmsNorm;

/// `1 / sqrt(mean(x^2) + 1e-6)`
fn inverse_rms(row: &[f32]) -> f32 {
    (dot(row.len(), |i| row[i] * row[i]) / row.len() as f32 + 1e-6).sqrt().recip()
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        gain: &CpuStorage,
        lg: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, gain) = (elements(x, lx)?, elements(gain, lg)?);
        let width = gain.len();
        let mut y = vec![0.0; x.len()];
        in_rows(&mut y, width, |first, rows| {
            for (y, x) in rows.chunks_exact_mut(width).zip(x[first * width..].chunks_exact(width)) {
                let r = inverse_rms(x);
                (0..width).for_each(|i| y[i] = x[i] * r * gain[i]);
            }
        });
        storage(y, lx.shape())
    }

    /// With `r` the inverse RMS and `a = dy * gain`: `dx = r a - x r^3 mean(a x)`, `dgain = sum over rows of dy x r`.
    fn bwd(
        &self,
        x: &Tensor,
        gain: &Tensor,
        _: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (dx, dgain) = with_f32(x, |x, _| {
            with_f32(gain, |gain, _| {
                with_f32(dy, |dy, _| {
                    let width = gain.len();
                    let mut dx = vec![0.0; x.len()];
                    in_rows(&mut dx, width, |first, rows| {
                        let inputs = x[first * width..]
                            .chunks_exact(width)
                            .zip(dy[first * width..].chunks_exact(width));
                        for (dx, (x, dy)) in rows.chunks_exact_mut(width).zip(inputs) {
                            let r = inverse_rms(x);
                            let slope = dot(width, |i| dy[i] * gain[i] * x[i]) * r * r * r / width as f32;
                            (0..width).for_each(|i| dx[i] = dy[i] * gain[i] * r - x[i] * slope);
                        }
                    });
                    let mut dgain = vec![0.0; width];
                    for (x, dy) in x.chunks_exact(width).zip(dy.chunks_exact(width)) {
                        let r = inverse_rms(x);
                        (0..width).for_each(|i| dgain[i] += dy[i] * x[i] * r);
                    }
                    Ok((dx, dgain))
                })
            })
        })?;
        Ok((Some(like(dx, x)?), Some(like(dgain, gain)?)))
    }
}

struct CausalSoftmax {
    scale: f32,
}

impl CustomOp1 for CausalSoftmax {
    fn name(&self) -> &'static str {
        "causal-softmax"
    }

    fn cpu_fwd(&self, s: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (s, n) = (elements(s, layout)?, layout.dims()[layout.dims().len() - 1]);
        let mut p = vec![0.0; s.len()];
        in_rows(&mut p, n, |first, rows| {
            for (row, p) in rows.chunks_exact_mut(n).enumerate() {
                let (row, seen) = (first + row, (first + row) % n + 1);
                let (s, p) = (&s[row * n..][..seen], &mut p[..seen]);
                let max = s.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                (0..seen).for_each(|j| p[j] = exp(self.scale * (s[j] - max)));
                let inverse = dot(seen, |j| p[j]).recip();
                p.iter_mut().for_each(|p| *p *= inverse);
            }
        });
        storage(p, layout.shape())
    }

    /// `ds = scale * p * (dp - sum(p dp))`
    fn bwd(&self, s: &Tensor, p: &Tensor, dp: &Tensor) -> Result<Option<Tensor>> {
        let ds = with_f32(p, |p, dims| {
            with_f32(dp, |dp, _| {
                let n = dims[dims.len() - 1];
                let mut ds = vec![0.0; p.len()];
                in_rows(&mut ds, n, |first, rows| {
                    for (row, ds) in rows.chunks_exact_mut(n).enumerate() {
                        let (row, seen) = (first + row, (first + row) % n + 1);
                        let (p, dp) = (&p[row * n..][..seen], &dp[row * n..][..seen]);
                        let mean = dot(seen, |j| p[j] * dp[j]);
                        (0..seen).for_each(|j| ds[j] = self.scale * p[j] * (dp[j] - mean));
                    }
                });
                Ok(ds)
            })
        })?;
        Ok(Some(like(ds, s)?))
    }
}

struct SplitHeads {
    heads: usize,
    rotary: bool,
}

impl SplitHeads {
    /// `(cos, sin)` of the angle of every position and pair, `[n, width / 2]`, or `(1, 0)` where nothing turns.
    fn angles(&self, n: usize, width: usize) -> Vec<(f32, f32)> {
        let pairs = width / 2;
        let angle = |position: usize, i: usize| {
            let frequency = 10_000_f32.powf(-2.0 * i as f32 / width as f32);
            let angle = if self.rotary { position as f32 * frequency } else { 0.0 };
            (angle.cos(), angle.sin())
        };
        (0..n * pairs).map(|at| angle(at / pairs, at % pairs)).collect()
    }
}

impl CustomOp1 for SplitHeads {
    fn name(&self) -> &'static str {
        "split-heads"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (x, (batch, n, hidden)) = (elements(x, layout)?, layout.shape().dims3()?);
        let (width, pairs) = (hidden / self.heads, hidden / self.heads / 2);
        let angles = self.angles(n, width);
        let mut y = vec![0.0; x.len()];
        in_rows(&mut y, width, |first, rows| {
            for (row, y) in rows.chunks_exact_mut(width).enumerate() {
                let (row, at) = (first + row, (first + row) % n);
                let (sequence, head) = (row / (self.heads * n), row / n % self.heads);
                let x = &x[(sequence * n + at) * hidden + head * width..][..width];
                for i in 0..pairs {
                    let (a, b, (cos, sin)) = (x[i], x[i + pairs], angles[at * pairs + i]);
                    (y[i], y[i + pairs]) = (a * cos - b * sin, a * sin + b * cos);
                }
            }
        });
        storage(y, &(batch, self.heads, n, width).into())
    }

    /// A rotation's transpose is the rotation back.
    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let dx = with_f32(dy, |dy, dims| {
            let (n, width) = (dims[2], dims[3]);
            let (hidden, pairs) = (self.heads * width, width / 2);
            let angles = self.angles(n, width);
            let mut dx = vec![0.0; dy.len()];
            in_rows(&mut dx, width, |first, rows| {
                for (row, dx) in rows.chunks_exact_mut(width).enumerate() {
                    let at = (first + row) * width;
                    let (token, head) = (at / hidden, at % hidden / width);
                    let (sequence, position) = (token / n, token % n);
                    let dy = &dy[((sequence * self.heads + head) * n + position) * width..][..width];
                    for i in 0..pairs {
                        let (a, b, (cos, sin)) = (dy[i], dy[i + pairs], angles[position * pairs + i]);
                        (dx[i], dx[i + pairs]) = (a * cos + b * sin, b * cos - a * sin);
                    }
                }
            });
            Ok(dx)
        })?;
        Ok(Some(like(dx, x)?))
    }
}

struct TokenShift;

impl CustomOp2 for TokenShift {
    fn name(&self) -> &'static str {
        "token-shift"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        mix: &CpuStorage,
        lm: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, mix, (_, n, width)) = (elements(x, lx)?, elements(mix, lm)?, lx.shape().dims3()?);
        let mut y = x.to_vec();
        in_rows(&mut y, width, |first, rows| {
            for (row, y) in rows.chunks_exact_mut(width).enumerate() {
                if (first + row) % n > 0 {
                    let before = &x[(first + row - 1) * width..][..width];
                    (0..width).for_each(|i| y[i] += mix[i] * before[i]);
                }
            }
        });
        storage(y, lx.shape())
    }

    /// `dx[t] = dy[t] + mix * dy[t + 1]`, `dmix = sum over t of dy[t] x[t - 1]`
    fn bwd(
        &self,
        x: &Tensor,
        mix: &Tensor,
        _: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (dx, dmix) = with_f32(x, |x, dims| {
            with_f32(mix, |mix, _| {
                with_f32(dy, |dy, _| {
                    let (n, width) = (dims[1], dims[2]);
                    let mut dx = dy.to_vec();
                    in_rows(&mut dx, width, |first, rows| {
                        for (row, dx) in rows.chunks_exact_mut(width).enumerate() {
                            if (first + row + 1) % n > 0 {
                                let after = &dy[(first + row + 1) * width..][..width];
                                (0..width).for_each(|i| dx[i] += mix[i] * after[i]);
                            }
                        }
                    });
                    let mut dmix = vec![0.0; width];
                    for (row, dy) in dy.chunks_exact(width).enumerate().filter(|(row, _)| row % n > 0) {
                        let before = &x[(row - 1) * width..][..width];
                        (0..width).for_each(|i| dmix[i] += dy[i] * before[i]);
                    }
                    Ok((dx, dmix))
                })
            })
        })?;
        Ok((Some(like(dx, x)?), Some(like(dmix, mix)?)))
    }
}

struct CrossEntropy {
    targets: Vec<u32>,
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross-entropy"
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (logits, (rows, classes)) = (elements(logits, layout)?, layout.shape().dims2()?);
        if self.targets.len() != rows || self.targets.iter().any(|&t| t as usize >= classes) {
            bail!("{rows} targets below {classes} are needed")
        }
        let mut losses = vec![0.0; rows];
        in_rows(&mut losses, 1, |first, losses| {
            for (loss, row) in losses.iter_mut().zip(first..) {
                let logits = &logits[row * classes..][..classes];
                *loss = log_sum_exp(logits) - logits[self.targets[row] as usize];
            }
        });
        storage(vec![dot(rows, |i| losses[i]) / rows as f32], &().into())
    }

    /// `dlogits = (softmax(logits) - onehot(target)) / rows`
    fn bwd(&self, logits: &Tensor, _: &Tensor, dloss: &Tensor) -> Result<Option<Tensor>> {
        let slope = dloss.to_scalar::<f32>()? / self.targets.len() as f32;
        let gradient = with_f32(logits, |logits, dims| {
            let classes = dims[1];
            let mut gradient = vec![0.0; logits.len()];
            in_rows(&mut gradient, classes, |first, rows| {
                for (row, g) in rows.chunks_exact_mut(classes).enumerate() {
                    let logits = &logits[(first + row) * classes..][..classes];
                    let shift = log_sum_exp(logits);
                    (0..classes).for_each(|c| g[c] = slope * exp(logits[c] - shift));
                    g[self.targets[first + row] as usize] -= slope;
                }
            });
            Ok(gradient)
        })?;
        Ok(Some(like(gradient, logits)?))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    fn noise(n: usize, seed: u64) -> Vec<f32> {
        (0..n as u64)
            .map(|i| (super::super::data::mix(seed << 32 | i) >> 40) as f32 / (1 << 23) as f32 - 1.0)
            .collect()
    }

    /// Holds the gradients of `sum(f(inputs) * noise)` against central differences.
    fn check(name: &str, shapes: &[&[usize]], f: impl Fn(&[Var]) -> Result<Tensor>) -> Result<()> {
        let vars = shapes
            .iter()
            .enumerate()
            .map(|(i, &dims)| Var::from_vec(noise(dims.iter().product(), i as u64 + 1), dims, &Device::Cpu));
        let vars = vars.collect::<Result<Vec<_>>>()?;
        let loss = |vars: &[Var]| {
            let y = f(vars)?;
            let weights = Tensor::from_vec(noise(y.elem_count(), 99), y.shape(), &Device::Cpu)?;
            y.mul(&weights)?.sum_all()
        };
        let gradients = loss(&vars)?.backward()?;
        for (v, var) in vars.iter().enumerate() {
            let gradient = gradients.get(var).expect("a gradient").flatten_all()?.to_vec1::<f32>()?;
            let values = var.flatten_all()?.to_vec1::<f32>()?;
            let mut worst = (0.0, 0);
            for i in 0..values.len() {
                let at = |step: f32| {
                    let mut values = values.clone();
                    values[i] += step;
                    var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu)?)?;
                    loss(&vars)?.to_scalar::<f32>()
                };
                let difference = (at(1e-2)? - at(-1e-2)?) / 2e-2;
                worst = if (difference - gradient[i]).abs() > worst.0 {
                    ((difference - gradient[i]).abs(), i)
                } else {
                    worst
                };
            }
            var.set(&Tensor::from_vec(values, var.shape(), &Device::Cpu)?)?;
            println!("{name}, input {v}: largest error {:.1e} at {} (tolerance 2e-3)", worst.0, worst.1);
            assert!(worst.0 < 2e-3, "{name}, input {v}");
        }
        Ok(())
    }

    #[test]
    fn gradients_match_differences() -> Result<()> {
        check("rms_norm", &[&[3, 20], &[20]], |v| rms_norm(&v[0], &v[1]))?;
        check("causal_softmax", &[&[2, 5, 5]], |v| causal_softmax(&v[0], 0.7))?;
        check("split_heads", &[&[2, 3, 8]], |v| split_heads(&v[0], 2, true))?;
        check("token_shift", &[&[2, 3, 4], &[4]], |v| token_shift(&v[0], &v[1]))?;
        check("cross_entropy", &[&[3, 6]], |v| cross_entropy(&v[0], &[5, 0, 2]))
    }

    #[test]
    fn attention_sees_no_future_and_rotary_keeps_lengths() -> Result<()> {
        let s = Tensor::from_vec(noise(2 * 16, 7), (2, 4, 4), &Device::Cpu)?;
        for matrix in causal_softmax(&s, 1.0)?.to_vec3::<f32>()? {
            for (i, row) in matrix.iter().enumerate() {
                assert!(row[i + 1..].iter().all(|&p| p == 0.0));
                assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-6);
            }
        }
        let x = Tensor::from_vec(noise(2 * 5 * 8, 8), (2, 5, 8), &Device::Cpu)?;
        let (turned, plain) = (split_heads(&x, 2, true)?, split_heads(&x, 2, false)?);
        let expected = x.reshape((2, 5, 2, 4))?.transpose(1, 2)?.contiguous()?;
        assert_eq!(plain.flatten_all()?.to_vec1::<f32>()?, expected.flatten_all()?.to_vec1::<f32>()?);
        let lengths = |t: &Tensor| t.sqr()?.sum(3)?.flatten_all()?.to_vec1::<f32>();
        for (a, b) in lengths(&turned)?.iter().zip(lengths(&plain)?) {
            assert!((a - b).abs() < 1e-5);
        }
        Ok(())
    }
}
