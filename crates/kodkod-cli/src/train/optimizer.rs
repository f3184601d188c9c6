//! AdamW (Loshchilov and Hutter 2019) whose state can be saved, with clipping by the global norm.
//!
//! ```text
//! g = g * min(1, clip / |g|)          over all gradients together
//! m = b1 m + (1 - b1) g               v = b2 v + (1 - b2) g^2
//! p = p - lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay * p)
//! ```

use std::cell::RefCell;
use std::f64::consts::PI;

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Var, bail};
use kodkod::numerics::dot;

use super::ops::{WORTH_A_THREAD, cores, with_f32};

const BETA1: f32 = 0.9;
const BETA2: f32 = 0.99;
const EPSILON: f32 = 1e-8;
const DECAY: f32 = 0.1;
const CLIP: f32 = 1.0;

/// The learning rate at a step of so many: a linear rise over the first steps, then a cosine down to a twentieth.
pub(crate) fn learning_rate(peak: f64, step: usize, steps: usize) -> f64 {
    let warm_up = (steps / 20).clamp(1, 100);
    if step < warm_up {
        return peak * (step + 1) as f64 / warm_up as f64;
    }
    let done = (step - warm_up) as f64 / (steps - warm_up).max(1) as f64;
    peak * (0.05 + 0.95 * 0.5 * (1.0 + (PI * done).cos()))
}

/// One variable with its moments.
pub(crate) struct Slot {
    pub(crate) name: String,
    pub(crate) var: Var,
    pub(crate) m: Vec<f32>,
    pub(crate) v: Vec<f32>,
}

/// The optimizer: variables with their moments, by name in order.
pub(crate) struct AdamW {
    pub(crate) slots: Vec<Slot>,
}

impl AdamW {
    /// Moments of zero.
    pub(crate) fn new(vars: Vec<(String, Var)>) -> Self {
        let slots = vars.into_iter().map(|(name, var)| {
            let n = var.elem_count();
            Slot { name, var, m: vec![0.0; n], v: vec![0.0; n] }
        });
        AdamW { slots: slots.collect() }
    }

    /// Moves the variables by their gradients, at `step` (from 0). Returns the norm of all gradients, before clipping.
    pub(crate) fn step(&mut self, gradients: &GradStore, rate: f64, step: usize) -> Result<f32> {
        let mut squares = 0.0_f64;
        for slot in &self.slots {
            if let Some(g) = gradients.get(&slot.var) {
                squares += with_f32(g, |g, _| Ok(f64::from(dot(g.len(), |i| g[i] * g[i]))))?;
            }
        }
        let norm = squares.sqrt() as f32;
        if !norm.is_finite() {
            bail!("the gradients' norm is {norm} at step {}: the training diverged", step + 1)
        }
        let t = step as i32 + 1;
        let update = Update {
            clip: if norm > CLIP { CLIP / norm } else { 1.0 },
            rate: rate as f32,
            m_scale: (1.0 / (1.0 - f64::from(BETA1).powi(t))) as f32,
            v_scale: (1.0 / (1.0 - f64::from(BETA2).powi(t))) as f32,
        };
        for Slot { var, m, v, .. } in &mut self.slots {
            let Some(g) = gradients.get(var) else { continue };
            // Gains and mixes are not weights of a sum: decay would only pull them from where they work.
            let decay = if var.rank() > 1 { DECAY } else { 0.0 };
            with_f32(g, |g, _| {
                var.inplace_op1(&Apply { update: &update, decay, g, moments: RefCell::new((m, v)) })
            })?;
        }
        Ok(norm)
    }
}

struct Update {
    clip: f32,
    rate: f32,
    m_scale: f32,
    v_scale: f32,
}

/// The update of one variable, in place: one pass over it, its gradient and its moments.
struct Apply<'a> {
    update: &'a Update,
    decay: f32,
    g: &'a [f32],
    moments: RefCell<(&'a mut Vec<f32>, &'a mut Vec<f32>)>,
}

impl InplaceOp1 for Apply<'_> {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let (CpuStorage::F32(p), Some((start, end))) = (storage, layout.contiguous_offsets()) else {
            bail!("a variable is not contiguous f32")
        };
        let mut moments = self.moments.borrow_mut();
        let (m, v) = &mut *moments;
        let (update, decay) = (self.update, self.decay);
        let piece = (end - start).div_ceil(cores()).max(WORTH_A_THREAD);
        let pieces = p[start..end].chunks_mut(piece).zip(self.g.chunks(piece));
        let mut pieces = pieces.zip(m.chunks_mut(piece).zip(v.chunks_mut(piece)));
        std::thread::scope(|scope| {
            let first = pieces.next();
            for ((p, g), (m, v)) in pieces {
                scope.spawn(move || update.piece(decay, p, g, m, v));
            }
            if let Some(((p, g), (m, v))) = first {
                update.piece(decay, p, g, m, v);
            }
        });
        Ok(())
    }
}

impl Update {
    fn piece(&self, decay: f32, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
        for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            let g = g * self.clip;
            *m = BETA1 * *m + (1.0 - BETA1) * g;
            *v = BETA2 * *v + (1.0 - BETA2) * g * g;
            let direction = *m * self.m_scale / ((*v * self.v_scale).sqrt() + EPSILON);
            *p -= self.rate * (direction + decay * *p);
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::*;

    #[test]
    fn agrees_with_candles_adamw() -> Result<()> {
        use candle_nn::{Optimizer, ParamsAdamW};
        let start = Tensor::from_vec(vec![0.5_f32, -1.0, 2.0, 0.01], (2, 2), &Device::Cpu)?;
        let (ours, theirs) = (Var::from_tensor(&start)?, Var::from_tensor(&start)?);
        let params = ParamsAdamW { lr: 0.01, beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
        let mut reference = candle_nn::AdamW::new(vec![theirs.clone()], params)?;
        let mut adam = AdamW::new(vec![("w".into(), ours.clone())]);
        // A loss whose gradient stays below the clip.
        let loss = |w: &Var| (w.as_tensor() * 0.1)?.sqr()?.sum_all();
        for step in 0..50 {
            reference.backward_step(&loss(&theirs)?)?;
            adam.step(&loss(&ours)?.backward()?, 0.01, step)?;
        }
        let difference = ours.sub(&theirs)?.abs()?.max_all()?.to_scalar::<f32>()?;
        println!("largest difference after 50 steps: {difference:.1e}");
        assert!(difference < 1e-5);
        Ok(())
    }

    #[test]
    fn the_rate_rises_and_falls() {
        let rates: Vec<f64> = (0..1000).map(|step| learning_rate(1.0, step, 1000)).collect();
        assert!(rates[0] > 0.0 && rates[49] == 1.0 && rates[999] < 0.06 && rates[999] >= 0.05);
        assert!(rates[49..].windows(2).all(|w| w[1] <= w[0]));
        assert!(learning_rate(1.0, 0, 1) > 0.0);
    }
}
