//! A step and a layer on GPUs, for what runs passes without copies between: `bench`, `trace`, and some rows of `check`.

use std::sync::Arc;
use std::time::Duration;

use kodkod::cuda::driver::{Buffer, Device as Gpu};
use kodkod::cuda::{
    CudaLayer, DeviceGradients, DeviceStep, DeviceWeights, Part, Replay, Result, read_gradients,
};
use kodkod::{GradientElement, Knobs, Precision, Routing, bf16};

use crate::step::{Gradients, Outputs, Step};

/// Opens GPUs by their ordinals.
pub(crate) fn open(ordinals: &[usize]) -> Result<Vec<Arc<Gpu>>> {
    ordinals.iter().map(|&ordinal| Gpu::new(ordinal)).collect()
}

pub(crate) struct OnGpus<G> {
    pub(crate) layer: CudaLayer,
    parts: Vec<Part>,
    steps: Vec<DeviceStep>,
    weights: Vec<DeviceWeights>,
    /// None where there is no backward.
    gradients: Vec<DeviceGradients<G>>,
    split: Vec<usize>,
}

/// How a layer is made: `CudaLayer::new` or `CudaLayer::traced`.
type Make = fn(&[Arc<Gpu>], &kodkod::Shape, &Knobs, &[usize], Precision) -> Result<CudaLayer>;

impl<G: GradientElement> OnGpus<G> {
    /// With the first tokens of a step, as many as `split` says.
    pub(crate) fn new(
        gpus: &[Arc<Gpu>],
        knobs: &Knobs,
        step: &Step<bf16>,
        split: &[usize],
        make: Make,
    ) -> Result<Self> {
        let shape = &step.shape;
        let layer = make(gpus, shape, knobs, split, G::PRECISION)?;
        let parts = Part::all(gpus, shape, split);
        let (routing, rows) = (routing(step, split)?, split.iter().sum::<usize>() * shape.hidden);
        let dy = step.dy.as_deref().unwrap_or(&step.x);
        let weights = step.weights.as_ref();
        let on_gpu = |part: &Part| part.step(&step.x[..rows], &dy[..rows], routing.ids(), routing.weights());
        let steps = parts.iter().map(on_gpu).collect::<Result<_>>()?;
        let weights = parts.iter().map(|part| part.weights(&weights)).collect::<Result<_>>()?;
        let with_gradients = parts.iter().filter(|_| step.dy.is_some());
        let gradients = with_gradients.map(Part::new_gradients).collect::<Result<_>>()?;
        gpus[0].make_current()?;
        Ok(OnGpus { layer, parts, steps, weights, gradients, split: split.to_vec() })
    }

    /// Other numbers of the same shape and split.
    pub(crate) fn write(&self, step: &Step<bf16>) -> Result<()> {
        let routing = routing(step, &self.split)?;
        let (h, k, host) = (step.shape.hidden, step.shape.top_k, step.weights.as_ref());
        for ((part, to), weights) in self.parts.iter().zip(&self.steps).zip(&self.weights) {
            part.device().make_current()?;
            to.x.write(part.of_tokens(&step.x, h))?;
            to.dy.write(part.of_tokens(step.dy.as_deref().unwrap_or(&step.x), h))?;
            to.ids.write(part.of_tokens(routing.ids(), k))?;
            to.topk_weights.write(part.of_tokens(routing.weights(), k))?;
            weights.write(&part.of_weights(&host))?;
        }
        self.parts[0].device().make_current()
    }

    pub(crate) fn schedule(&self) -> Result<()> {
        self.layer.schedule_on(&self.steps)
    }

    pub(crate) fn forward(&self) -> Result<()> {
        self.layer.forward_on(&self.steps, &self.weights)
    }

    pub(crate) fn backward(&self) -> Result<()> {
        self.layer.backward_on(&self.steps, &self.weights, &self.gradients, false)
    }

    /// Both passes, to replay.
    pub(crate) fn capture(&self) -> Result<Replay<'_>> {
        self.layer.capture_on(&self.steps, &self.weights, Some(&self.gradients[..]))
    }

    /// Fills all that passes leave with 0xff bytes (NaN).
    pub(crate) fn poison(&self) -> Result<()> {
        self.layer.poison()?;
        let stream = self.layer.stream();
        for (at, step) in self.steps.iter().enumerate() {
            step.y.fill(0xff, stream)?;
            step.dx.fill(0xff, stream)?;
            step.d_topk_weights.fill(0xff, stream)?;
            self.gradients[at].as_ref().try_map(|b| b.fill(0xff, stream), |b| b.fill(0xff, stream))?;
        }
        stream.synchronize()
    }
}

impl OnGpus<f32> {
    /// All that a forward and a backward leave.
    pub(crate) fn outputs(&self) -> Result<Outputs<bf16>> {
        let mut weights = self.gradients.iter().map(read_gradients);
        let mut all = weights.next().expect("there is a backward")?;
        for part in weights {
            let part = part?;
            all.gate.extend(part.gate);
            all.up.extend(part.up);
            all.down.extend(part.down);
            if let (Some(all), Some(part)) = (&mut all.biases, part.biases) {
                all.gate.extend(part.gate);
                all.up.extend(part.up);
                all.down.extend(part.down);
            }
        }
        Ok(Outputs {
            y: read(&self.steps, |step| &step.y)?,
            gradients: Some(Gradients {
                dx: read(&self.steps, |step| &step.dx)?,
                d_topk_weights: read(&self.steps, |step| &step.d_topk_weights)?,
                weights: all,
            }),
            forward: Duration::ZERO,
            backward: Duration::ZERO,
        })
    }
}

/// Of all parts, in the order of their tokens.
fn read<T: Copy + Default>(steps: &[DeviceStep], buffer: fn(&DeviceStep) -> &Buffer<T>) -> Result<Vec<T>> {
    let mut all = Vec::new();
    for step in steps {
        all.extend(buffer(step).read()?);
    }
    Ok(all)
}

fn routing(step: &Step<bf16>, split: &[usize]) -> kodkod::Result<Routing> {
    let routes = split.iter().sum::<usize>() * step.shape.top_k;
    Routing::new(&step.shape, &step.ids[..routes], &step.topk_weights[..routes], split)
}
