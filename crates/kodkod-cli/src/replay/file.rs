//! A step's file: read with every tensor checked, written whole or not at all.

use std::borrow::Cow;
use std::fs::File;
use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use kodkod::{Activation, Biases, Element, Error, Routing, Shape, Shared, SharedWeights, bf16};
use memmap2::Mmap;
use safetensors::tensor::{TensorView, View};
use safetensors::{Dtype, SafeTensors};

use crate::step::{OwnedWeights, Step, Values};

const REQUIRED: [&str; 6] = ["x", "topk_ids", "topk_weights", "w_gate", "w_up", "w_down"];
const BIASES: [&str; 3] = ["b_gate", "b_up", "b_down"];
const SHARED: [&str; 3] = ["shared_gate", "shared_up", "shared_down"];
const OUTPUT_GATE: &str = "shared_output_gate";
const METADATA: [&str; 3] = ["activation", "limit", "alpha"];
const FLOATS: &[Dtype] = &[Dtype::BF16, Dtype::F32];

/// An open file whose names, types and shapes are right.
pub(super) struct StepFile {
    map: Mmap,
    shape: Shape,
    x_dtype: Dtype,
}

impl StepFile {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let context = || path.display().to_string();
        let file = File::open(path).with_context(context)?;
        // SAFETY: the map is only read, and each tensor is copied once. As with every mapped file, it must not be
        // shortened by another process meanwhile.
        let map = unsafe { Mmap::map(&file) }.with_context(context)?;
        let (shape, x_dtype) = Self::check(&map).with_context(context)?;
        Ok(StepFile { map, shape, x_dtype })
    }

    pub(super) fn x_dtype(&self) -> Dtype {
        self.x_dtype
    }

    fn check(map: &[u8]) -> Result<(Shape, Dtype)> {
        let (_, header) = SafeTensors::read_metadata(map)
            .map_err(|e| anyhow::anyhow!("this is not a whole safetensors file: {e}"))?;
        let tensors = SafeTensors::deserialize(map)?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let has = |name: &str| tensors.tensor(name).is_ok();
        let known = || REQUIRED.into_iter().chain(["dy"]).chain(BIASES).chain(SHARED).chain([OUTPUT_GATE]);
        let mut unknown: Vec<_> = tensors.names().into_iter().filter(|n| !known().any(|k| k == *n)).collect();
        unknown.sort_unstable();
        if let Some(name) = unknown.first() {
            bail!("unknown tensor {name:?}: known are {}", known().collect::<Vec<_>>().join(", "));
        }
        for name in REQUIRED {
            ensure!(has(name), "tensor {name} is missing: needed are {}", REQUIRED.join(", "));
        }
        for set in [BIASES, SHARED] {
            let given: Vec<_> = set.into_iter().filter(|n| has(n)).collect();
            if let (Some(there), Some(missing)) = (given.first(), set.iter().find(|n| !has(n))) {
                bail!("tensor {missing} is missing: {there} is given, and {} go together", set.join(", "));
            }
        }
        ensure!(
            !has(OUTPUT_GATE) || has(SHARED[0]),
            "tensor {} is missing: {OUTPUT_GATE} is given, and needs {}",
            SHARED[0],
            SHARED.join(", ")
        );

        let x = view(&tensors, "x", FLOATS)?;
        let [n, h] = dims("x", &x, ["N", "H"])?;
        let [ids_n, k] =
            dims("topk_ids", &view(&tensors, "topk_ids", &[Dtype::I32, Dtype::I64])?, ["N", "K"])?;
        let [e, i, gate_h] = dims("w_gate", &view(&tensors, "w_gate", FLOATS)?, ["E", "I", "H"])?;
        let (n, h, k, e, i) = (("N", n), ("H", h), ("K", k), ("E", e), ("I", i));
        expect("topk_ids", &[ids_n, k.1], &[n, k], "x")?;
        expect("w_gate", &[e.1, i.1, gate_h], &[e, i, h], "x")?;
        let same = |name: &str, dtypes: &[Dtype], wanted: &[(&str, usize)], from: &str| {
            expect(name, view(&tensors, name, dtypes)?.shape(), wanted, from)
        };
        same("topk_weights", &[Dtype::F32], &[n, k], "topk_ids")?;
        same("w_up", FLOATS, &[e, i, h], "w_gate")?;
        same("w_down", FLOATS, &[e, h, i], "w_gate")?;
        if has("dy") {
            same("dy", FLOATS, &[n, h], "x")?;
        }
        if has(BIASES[0]) {
            for (name, wanted) in BIASES.into_iter().zip([i, i, h]) {
                same(name, FLOATS, &[e, wanted], "w_gate")?;
            }
        }
        let mut shared = None;
        if has(SHARED[0]) {
            let [width, _] = dims(SHARED[0], &view(&tensors, SHARED[0], FLOATS)?, ["S", "H"])?;
            let s = ("S", width);
            same(SHARED[0], FLOATS, &[s, h], "x")?;
            same(SHARED[1], FLOATS, &[s, h], SHARED[0])?;
            same(SHARED[2], FLOATS, &[h, s], SHARED[0])?;
            if has(OUTPUT_GATE) {
                same(OUTPUT_GATE, FLOATS, &[("1", 1), h], "x")?;
            }
            shared = Some(Shared { intermediate: width, output_gate: has(OUTPUT_GATE) });
        }
        let get = |key: &str| metadata.get(key).map(String::as_str);
        let shape = Shape {
            hidden: h.1,
            intermediate: i.1,
            experts: e.1,
            top_k: k.1,
            shared,
            activation: activation(get("activation"), get("limit"), get("alpha"))?,
            biases: has(BIASES[0]),
        };
        shape.validate().map_err(|error| match &error {
            Error::Invalid { argument, .. } => {
                let source = match argument.as_str() {
                    "hidden" => "the width H of x",
                    "intermediate" => "I of w_gate [E, I, H]",
                    "experts" => "E of w_gate [E, I, H]",
                    "top_k" => "K of topk_ids [N, K]",
                    "shared intermediate" => "S of shared_gate [S, H]",
                    _ => "metadata",
                };
                anyhow::anyhow!("{source}: {error}")
            }
            _ => error.into(),
        })?;
        let mut unused: Vec<_> = metadata.keys().filter(|k| !METADATA.contains(&k.as_str())).collect();
        unused.retain(|k| *k != "format"); // written by every PyTorch exporter
        unused.sort_unstable();
        for key in unused {
            eprintln!("note: metadata {key:?} is not used; used are {}", METADATA.join(", "));
        }
        Ok((shape, x.dtype()))
    }

    /// The step in storage type `T`.
    pub(super) fn step<T: Element>(&self) -> Result<Step<T>> {
        let tensors = SafeTensors::deserialize(&self.map)?;
        let shape = self.shape.clone();
        fn read<T: Element>(tensors: &SafeTensors, name: &str) -> Result<Vec<T>> {
            Ok(floats(&tensors.tensor(name)?))
        }
        let ids = integers(&tensors.tensor("topk_ids")?);
        let topk_weights = read::<f32>(&tensors, "topk_weights")?;
        Routing::new(&shape, &ids, &topk_weights, &[ids.len() / shape.top_k])?;
        let dy = match tensors.tensor("dy") {
            Ok(dy) => Some(floats(&dy)),
            Err(_) => None,
        };
        let biases = match shape.biases {
            true => Some(Biases {
                gate: read(&tensors, BIASES[0])?,
                up: read(&tensors, BIASES[1])?,
                down: read(&tensors, BIASES[2])?,
            }),
            false => None,
        };
        let shared = match shape.shared {
            Some(s) => Some(SharedWeights {
                gate: read(&tensors, SHARED[0])?,
                up: read(&tensors, SHARED[1])?,
                down: read(&tensors, SHARED[2])?,
                output_gate: if s.output_gate { Some(read(&tensors, OUTPUT_GATE)?) } else { None },
            }),
            None => None,
        };
        let weights = OwnedWeights {
            gate: read(&tensors, "w_gate")?,
            up: read(&tensors, "w_up")?,
            down: read(&tensors, "w_down")?,
            biases,
            shared,
        };
        Ok(Step { x: read(&tensors, "x")?, dy, ids, topk_weights, weights, shape })
    }
}

fn view<'a>(tensors: &SafeTensors<'a>, name: &str, dtypes: &[Dtype]) -> Result<TensorView<'a>> {
    let view = tensors.tensor(name)?;
    let allowed: Vec<_> = dtypes.iter().map(|d| format!("{d:?}")).collect();
    ensure!(
        dtypes.contains(&view.dtype()),
        "{name} is {:?}: it must be {}",
        view.dtype(),
        allowed.join(" or ")
    );
    Ok(view)
}

/// The sizes of a tensor that sets them.
fn dims<const R: usize>(name: &str, view: &TensorView, names: [&str; R]) -> Result<[usize; R]> {
    let got = view.shape();
    <[usize; R]>::try_from(got)
        .map_err(|_| anyhow::anyhow!("{name} has shape {got:?}: expected [{}]", names.join(", ")))
}

/// A tensor's sizes against those that `from` has set.
fn expect(name: &str, got: &[usize], wanted: &[(&str, usize)], from: &str) -> Result<()> {
    let (names, sizes): (Vec<_>, Vec<_>) = wanted.iter().copied().unzip();
    ensure!(
        got == sizes,
        "{name} has shape {got:?}: expected [{}] = {sizes:?}, after the shape of {from}",
        names.join(", ")
    );
    Ok(())
}

fn activation(name: Option<&str>, limit: Option<&str>, alpha: Option<&str>) -> Result<Activation> {
    fn number(key: &str, text: &str) -> Result<f32> {
        f32::from_str(text.trim())
            .map_err(|_| anyhow::anyhow!("metadata {key} is {text:?}: a number is needed"))
    }
    let limit = limit.map(|text| number("limit", text)).transpose()?;
    let alpha = alpha.map(|text| number("alpha", text)).transpose()?;
    match name.unwrap_or("swiglu") {
        "swiglu" => {
            let alpha = alpha.unwrap_or(1.0);
            ensure!(alpha == 1.0, "metadata alpha is {alpha}: activation swiglu has none, swiglu_oai does");
            Ok(Activation::SwiGlu { limit })
        }
        "swiglu_oai" => Ok(Activation::SwiGluOai { alpha: alpha.unwrap_or(1.702), limit }),
        other => bail!("metadata activation is {other:?}: swiglu and swiglu_oai are known"),
    }
}

/// The file promises no alignment, so elements are read byte by byte.
fn floats<T: Element>(view: &TensorView) -> Vec<T> {
    let (pairs, _) = view.data().as_chunks::<2>();
    let (fours, _) = view.data().as_chunks::<4>();
    match view.dtype() {
        Dtype::BF16 => pairs.iter().map(|b| T::from_f32(bf16::from_le_bytes(*b).to_f32())).collect(),
        _ => fours.iter().map(|b| T::from_f32(f32::from_le_bytes(*b))).collect(),
    }
}

fn integers(view: &TensorView) -> Vec<i64> {
    let (fours, _) = view.data().as_chunks::<4>();
    let (eights, _) = view.data().as_chunks::<8>();
    match view.dtype() {
        Dtype::I32 => fours.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
        _ => eights.iter().map(|b| i64::from_le_bytes(*b)).collect(),
    }
}

/// An output on its way to a file.
pub(super) struct Tensor<'a, T> {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) values: Values<'a, T>,
}

impl<T: Element> Tensor<'_, T> {
    fn bytes(&self) -> impl Iterator<Item = u8> {
        let half = self.dtype == Dtype::BF16;
        (0..self.values.len()).flat_map(move |i| {
            let value = self.values.get(i);
            let (bytes, used) = match half {
                true => {
                    let [a, b] = bf16::from_f32(value).to_le_bytes();
                    ([a, b, 0, 0], 2)
                }
                false => (value.to_le_bytes(), 4),
            };
            bytes.into_iter().take(used)
        })
    }

    /// 64 bits of all elements' bits, as a file has them, and of their order. A step an element, in chains that a core
    /// runs side by side.
    pub(super) fn hash(&self) -> u64 {
        const CHAINS: usize = 8;
        // An odd number without a pattern. The rotation brings high bits, as of a sign, to where they reach all others.
        let step = |hash: u64, word: u64| (hash.rotate_left(29) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let half = self.dtype == Dtype::BF16;
        let word = |value: f32| match half {
            true => u64::from(bf16::from_f32(value).to_bits()),
            false => u64::from(value.to_bits()),
        };
        let mut chains = [0; CHAINS];
        let whole = self.values.len() / CHAINS * CHAINS;
        for first in (0..whole).step_by(CHAINS) {
            for (i, chain) in chains.iter_mut().enumerate() {
                *chain = step(*chain, word(self.values.get(first + i)));
            }
        }
        let rest = (whole..self.values.len()).map(|i| word(self.values.get(i)));
        let hash = chains.into_iter().chain(rest).fold(self.values.len() as u64, step);
        hash ^ (hash >> 32)
    }

    /// The largest magnitude and the Euclidean norm of what is finite, and how many elements are not.
    pub(super) fn size(&self) -> (f64, f64, usize) {
        let (mut max, mut squares, mut non_finite) = (0.0_f64, 0.0, 0);
        for value in (0..self.values.len()).map(|i| f64::from(self.values.get(i))) {
            if value.is_finite() {
                max = max.max(value.abs());
                squares += value * value;
            } else {
                non_finite += 1;
            }
        }
        (max, squares.sqrt(), non_finite)
    }
}

impl<T: Element> View for &Tensor<'_, T> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.bytes().collect()
    }

    fn data_len(&self) -> usize {
        self.values.len() * self.dtype.bitsize() / 8
    }
}

/// Writes a file beside `path`, then renames it: there is never half a file.
pub(super) fn write<T: Element>(path: &Path, tensors: &[(&'static str, Tensor<T>)]) -> Result<()> {
    let absolute = std::path::absolute(path)?;
    safetensors::serialize_to_file(tensors.iter().map(|(name, tensor)| (*name, tensor)), None, &absolute)
        .map_err(|e| anyhow::anyhow!("--out {}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_sees_every_bit_and_the_order() {
        let values: Vec<f32> = (0..1003).map(|i| i as f32 * 0.37 - 100.0).collect();
        let hash = |values: &[f32]| {
            let shape = vec![values.len()];
            Tensor::<f32> { dtype: Dtype::F32, shape, values: Values::F32(values) }.hash()
        };
        let mut seen = std::collections::BTreeSet::from([hash(&values)]);
        for at in [0, 7, 8, 500, 999, 1000, 1002] {
            for bit in 0..32 {
                let mut other = values.clone();
                other[at] = f32::from_bits(other[at].to_bits() ^ 1 << bit);
                assert!(seen.insert(hash(&other)), "bit {bit} of element {at}");
            }
        }
        // What multiplications alone would lose: two signs, in one chain and in two; two elements in each other's place.
        for (a, b) in [(0, 8), (0, 1), (3, 1001), (999, 1002)] {
            let (mut signs, mut places) = (values.clone(), values.clone());
            (signs[a], signs[b]) = (-signs[a], -signs[b]);
            places.swap(a, b);
            assert!(seen.insert(hash(&signs)) && seen.insert(hash(&places)), "elements {a} and {b}");
        }
        assert!(seen.insert(hash(&values[..1002])) && seen.insert(hash(&[])) && seen.insert(hash(&[0.0])));
        println!("{} hashes, all different", seen.len());
    }
}
