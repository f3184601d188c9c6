//! The model's variables by name, first filled from a seed, so that a run can be repeated.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Result, Shape, Tensor, Var, bail};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};

use super::data::mix;

/// Variables by name. A [`VarBuilder`] over it makes what is asked for and not there yet.
#[derive(Clone)]
pub(crate) struct Params {
    vars: Arc<Mutex<BTreeMap<String, Var>>>,
    seed: u64,
}

impl Params {
    /// None yet.
    pub(crate) fn new(seed: u64) -> Self {
        Params { vars: Arc::default(), seed }
    }

    /// A builder over these variables.
    pub(crate) fn builder(&self) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), DType::F32, Device::Cpu)
    }

    /// All variables, by name in order.
    pub(crate) fn all(&self) -> Vec<(String, Var)> {
        let vars = self.vars.lock().unwrap_or_else(PoisonError::into_inner);
        vars.iter().map(|(name, var)| (name.clone(), var.clone())).collect()
    }
}

impl SimpleBackend for Params {
    fn get(&self, shape: Shape, name: &str, init: Init, _: DType, device: &Device) -> Result<Tensor> {
        let mut vars = self.vars.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(var) = vars.get(name) {
            if *var.shape() != shape {
                bail!("{name} is {:?}: {shape:?} is asked for", var.shape())
            }
            return Ok(var.as_tensor().clone());
        }
        // The numbers depend on the seed and the name, not on the order in which a model asks.
        let stream = name.bytes().fold(mix(self.seed), |h, b| mix(h ^ u64::from(b)));
        let values: Vec<f32> = match init {
            Init::Const(value) => vec![value as f32; shape.elem_count()],
            Init::Randn { mean, stdev } => {
                (0..shape.elem_count() as u64).map(|i| (mean + stdev * normal(stream, i)) as f32).collect()
            }
            other => bail!("{name}: initial values by {other:?} are not offered"),
        };
        let var = Var::from_vec(values, shape, device)?;
        vars.insert(name.into(), var.clone());
        Ok(var.as_tensor().clone())
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        let vars = self.vars.lock().unwrap_or_else(PoisonError::into_inner);
        match vars.get(name) {
            Some(var) => Ok(var.as_tensor().clone()),
            None => bail!("{name} is not among the parameters"),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.vars.lock().unwrap_or_else(PoisonError::into_inner).contains_key(name)
    }
}

/// The i-th number of a stream from the standard normal distribution (Irwin-Hall: twelve uniforms, less six), which
/// needs no function whose last bit differs from machine to machine.
fn normal(stream: u64, i: u64) -> f64 {
    let first = mix(stream ^ mix(i));
    let words = [first, mix(first), mix(first ^ 1)];
    let uniforms = words.iter().flat_map(|w| (0..4).map(move |part| (w >> (16 * part)) & 0xffff));
    uniforms.map(|u| (u as f64 + 0.5) / 65536.0).sum::<f64>() - 6.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_have_mean_zero_and_variance_one() {
        let n = 100_000;
        let (sum, squares) = (0..n).map(|i| normal(7, i)).fold((0.0, 0.0), |(s, q), x| (s + x, q + x * x));
        let (mean, variance) = (sum / n as f64, squares / n as f64);
        println!("mean {mean:.4}, variance {variance:.4}");
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02);
    }
}
