//! A run's state in one safetensors file: variables, AdamW's moments, the losses so far, and in the metadata the
//! configuration and the step. A step's batch follows from seed and step, so nothing else is needed to go on.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor};
use safetensors::{SafeTensors, tensor::TensorView};

use super::Config;
use super::ops::with_f32;
use super::optimizer::AdamW;

/// What the loop has measured so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct History {
    /// Training loss of every step, nats per byte.
    pub(crate) losses: Vec<f32>,
    /// `(steps done, bits per byte)` on the same few held-out windows.
    pub(crate) held_out: Vec<(u32, f32)>,
}

/// Writes a checkpoint beside its place, then moves it there: the file is always a whole one.
pub(crate) fn write(path: &Path, config: &Config, adam: &AdamW, history: &History) -> Result<()> {
    let bytes = |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|v| v.to_le_bytes()).collect() };
    let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    for slot in &adam.slots {
        let dims = slot.var.dims().to_vec();
        let weights = with_f32(&slot.var, |w, _| Ok(bytes(w)))?;
        tensors.push((format!("model.{}", slot.name), dims.clone(), weights));
        tensors.push((format!("adam.m.{}", slot.name), dims.clone(), bytes(&slot.m)));
        tensors.push((format!("adam.v.{}", slot.name), dims, bytes(&slot.v)));
    }
    tensors.push(("history.losses".into(), vec![history.losses.len()], bytes(&history.losses)));
    // Steps are below 2^24, so f32 holds them.
    let held_out: Vec<f32> = history.held_out.iter().flat_map(|&(step, bits)| [step as f32, bits]).collect();
    tensors.push(("history.held_out".into(), vec![history.held_out.len(), 2], bytes(&held_out)));

    let metadata = HashMap::from([
        ("format".to_string(), "kodkod-train-1".to_string()),
        ("step".to_string(), history.losses.len().to_string()),
        ("config".to_string(), serde_json::to_string(config)?),
    ]);
    let views = tensors.iter().map(|(name, dims, bytes)| {
        Ok((name.as_str(), TensorView::new(safetensors::Dtype::F32, dims.clone(), bytes)?))
    });
    let views = views.collect::<Result<Vec<_>>>()?;
    let part = path.with_extension("safetensors.part");
    safetensors::serialize_to_file(views, Some(metadata), &part)
        .map_err(anyhow::Error::from)
        .and_then(|()| Ok(std::fs::rename(&part, path)?))
        .with_context(|| format!("--out: cannot write {}", path.display()))
}

/// A checkpoint's file in memory.
pub(crate) struct Checkpoint {
    bytes: Vec<u8>,
    name: String,
    /// The configuration it was trained with.
    pub(crate) config: Config,
}

impl Checkpoint {
    /// Reads and checks the file and its metadata.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let name = format!("--resume {}", path.display());
        let bytes = std::fs::read(path).with_context(|| format!("{name}: cannot read it"))?;
        let (_, metadata) =
            SafeTensors::read_metadata(&bytes).with_context(|| format!("{name}: not a safetensors file"))?;
        let metadata = metadata.metadata().clone().unwrap_or_default();
        let format = metadata.get("format").map_or("none", String::as_str);
        ensure!(
            format == "kodkod-train-1",
            "{name}: its format is {format}, not a checkpoint of this command (kodkod-train-1)"
        );
        let config = metadata.get("config").map(String::as_str).unwrap_or_default();
        let config =
            serde_json::from_str(config).with_context(|| format!("{name}: its configuration is damaged"))?;
        Ok(Checkpoint { bytes, name, config })
    }

    /// Puts the state back; variables and moments must have the checkpoint's names and sizes.
    pub(crate) fn restore(&self, adam: &mut AdamW) -> Result<History> {
        let file =
            SafeTensors::deserialize(&self.bytes).with_context(|| format!("{}: damaged", self.name))?;
        let values = |name: &str, dims: Option<&[usize]>| -> Result<Vec<f32>> {
            let view = file.tensor(name).with_context(|| format!("{}: {name} is missing", self.name))?;
            ensure!(
                view.dtype() == safetensors::Dtype::F32 && dims.is_none_or(|dims| dims == view.shape()),
                "{}: {name} is {:?} {:?}, not F32 {dims:?}",
                self.name,
                view.dtype(),
                view.shape()
            );
            let number = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            Ok(view.data().chunks_exact(4).map(number).collect())
        };
        for slot in &mut adam.slots {
            let dims = slot.var.dims().to_vec();
            let weights = values(&format!("model.{}", slot.name), Some(&dims))?;
            slot.m = values(&format!("adam.m.{}", slot.name), Some(&dims))?;
            slot.v = values(&format!("adam.v.{}", slot.name), Some(&dims))?;
            slot.var.set(&Tensor::from_vec(weights, dims, &Device::Cpu)?)?;
        }
        let held_out = values("history.held_out", None)?;
        Ok(History {
            losses: values("history.losses", None)?,
            held_out: held_out.chunks_exact(2).map(|pair| (pair[0] as u32, pair[1])).collect(),
        })
    }
}
