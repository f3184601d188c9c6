//! A layer on a GPU, for rows and weights that the caller has in the host's memory: copied there, computed, copied back.
//!
//! A layer keeps its kernels and buffers on the GPU for the token counts that it saw last, and leaves them to the group
//! when it goes, so a step like the one before allocates nothing. A backward finds what its forward left there; where another forward came between, it runs its own
//! forward again, which gives the same bits.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use half::bf16;
use kodkod_core::{
    Error, GradientElement, Knobs, Precision, Result, Routing, Shape, WeightGradients, Weights,
};
use kodkod_cuda::driver::Device;
use kodkod_cuda::{CudaLayer, DeviceGradients, DeviceStep, DeviceWeights, new_gradients};

/// Most virtual ranks of one GPU.
const MOST_RANKS: usize = 8;
/// Splits of tokens that a layer keeps buffers for; as many are kept of layers that are gone.
const MOST_HELD: usize = 2;

/// Ranks that share one GPU.
pub(crate) struct CudaGroup {
    /// Of layers that are gone, the last first. Dropped before the device, and with it the GPU's context.
    spare: Mutex<Vec<Held>>,
    pub(crate) device: Arc<Device>,
    pub(crate) ranks: usize,
}

impl Drop for CudaGroup {
    fn drop(&mut self) {
        // Buffers are freed in the context that is current. A failure has nobody to tell.
        let _ = self.device.make_current();
    }
}

impl CudaGroup {
    pub(crate) fn new(device: usize, ranks: usize) -> Result<Self> {
        if ranks == 0 || ranks > MOST_RANKS {
            return Err(Error::invalid("ranks", ranks, format!("1 to {MOST_RANKS} are allowed on a GPU")));
        }
        Ok(CudaGroup { spare: Mutex::default(), device: Device::new(device)?, ranks })
    }
}

/// Passes on GPUs in this process, one at a time: the kernels of a pass wait for each other, so they must all be on the
/// GPU together.
static PASS: Mutex<()> = Mutex::new(());
/// Numbers the forwards of this process.
static CALLS: AtomicU64 = AtomicU64::new(0);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A layer's memory on the GPU, for one split of tokens.
struct Held {
    shape: Shape,
    knobs: Knobs,
    tokens: Vec<usize>,
    layer: CudaLayer,
    step: DeviceStep,
    weights: DeviceWeights,
    /// [`DeviceGradients`] of the type that the layer was compiled for.
    gradients: Option<Box<dyn Any + Send>>,
    /// The forward whose rows are in the buffers.
    call: Option<u64>,
}

/// A layer of a shape on the ranks of a GPU.
pub(crate) struct OnGpu {
    /// The last used first.
    held: Mutex<Vec<Held>>,
    group: Arc<CudaGroup>,
    shape: Shape,
    knobs: Knobs,
}

/// What a backward needs of its forward.
pub(crate) struct SavedOnGpu {
    call: u64,
    pub(crate) shape: Shape,
    pub(crate) routing: Routing,
}

impl OnGpu {
    pub(crate) fn new(group: &Arc<CudaGroup>, shape: &Shape, knobs: &Knobs) -> Result<Self> {
        CudaLayer::defines(shape, knobs, &vec![0; group.ranks], Precision::F32)?;
        Ok(OnGpu { group: group.clone(), shape: shape.clone(), knobs: *knobs, held: Mutex::default() })
    }

    pub(crate) fn ranks(&self) -> usize {
        self.group.ranks
    }

    pub(crate) fn forward(
        &self,
        x: &[bf16],
        routing: &Routing,
        weights: &Weights<bf16>,
    ) -> Result<(Vec<bf16>, SavedOnGpu)> {
        let call = CALLS.fetch_add(1, Ordering::Relaxed);
        let mut all = lock(&self.held);
        let held = self.forward_as(call, &mut all, x, routing, weights, None)?;
        Ok((held.step.y.read()?, SavedOnGpu { call, shape: self.shape.clone(), routing: routing.clone() }))
    }

    fn forward_as<'a>(
        &self,
        call: u64,
        all: &'a mut Vec<Held>,
        x: &[bf16],
        routing: &Routing,
        weights: &Weights<bf16>,
        gradients: Option<Precision>,
    ) -> Result<&'a mut Held> {
        self.group.device.make_current()?;
        let held = self.fit(all, x, routing, weights, gradients)?;
        held.call = None;
        held.step.x.write(x)?;
        held.step.ids.write(routing.ids())?;
        held.step.topk_weights.write(routing.weights())?;
        write_weights(&held.weights, weights)?;
        let _alone = lock(&PASS);
        held.layer.forward(&held.step, &held.weights)?;
        held.layer.finish()?;
        held.call = Some(call);
        Ok(held)
    }

    pub(crate) fn backward<G: GradientElement>(
        &self,
        saved: &SavedOnGpu,
        dy: &[bf16],
        x: &[bf16],
        weights: &Weights<bf16>,
        gradients: WeightGradients<&mut [G], &mut [f32]>,
        accumulate: bool,
    ) -> Result<(Vec<bf16>, Vec<f32>)> {
        self.group.device.make_current()?;
        let mut all = lock(&self.held);
        let ready = |held: &Held| held.call == Some(saved.call) && held.layer.gradients() == G::PRECISION;
        match all.iter().position(ready) {
            Some(at) => all[..=at].rotate_right(1),
            None => {
                let gradients = Some(G::PRECISION);
                self.forward_as(saved.call, &mut all, x, &saved.routing, weights, gradients)?;
            }
        }
        let held = &mut all[0];
        held.step.dy.write(dy)?;
        if held.gradients.is_none() {
            held.gradients = Some(Box::new(new_gradients::<G>(&self.shape)?));
        }
        let on_gpu = held.gradients.as_ref().and_then(|g| g.downcast_ref::<DeviceGradients<G>>());
        let on_gpu = on_gpu.expect("made of the layer's type");
        let ((of_weights, of_rest), (weights, rest)) = (on_gpu.as_ref().into_parts(), gradients.into_parts());
        let mut of_weights: Vec<_> = of_weights.into_iter().zip(weights).collect();
        let mut of_rest: Vec<_> = of_rest.into_iter().zip(rest).collect();
        if accumulate {
            of_weights.iter().try_for_each(|(buffer, host)| buffer.write(host))?;
            of_rest.iter().try_for_each(|(buffer, host)| buffer.write(host))?;
        }
        let _alone = lock(&PASS);
        held.layer.backward(&held.step, &held.weights, on_gpu, accumulate)?;
        held.layer.finish()?;
        of_weights.iter_mut().try_for_each(|(buffer, host)| buffer.read_into(host))?;
        of_rest.iter_mut().try_for_each(|(buffer, host)| buffer.read_into(host))?;
        Ok((held.step.dx.read()?, held.step.d_topk_weights.read()?))
    }

    /// Buffers for a step, first in the list. `gradients`: what its backward stores gradients in, where it is known; a
    /// forward takes what is there, or the type of the step before.
    fn fit<'a>(
        &self,
        all: &'a mut Vec<Held>,
        x: &[bf16],
        routing: &Routing,
        weights: &Weights<bf16>,
        gradients: Option<Precision>,
    ) -> Result<&'a mut Held> {
        let tokens: Vec<_> = (0..routing.ranks()).map(|rank| routing.tokens_of(rank).len()).collect();
        let of_type = |held: &Held| gradients.is_none_or(|g| g == held.layer.gradients());
        match all.iter().position(|held| held.tokens == tokens && of_type(held)) {
            Some(at) => all[..=at].rotate_right(1),
            None => {
                let before = all.first().map_or(Precision::F32, |held| held.layer.gradients());
                // Of a split of tokens only one is held.
                all.retain(|held| held.tokens != tokens);
                all.truncate(MOST_HELD - 1);
                let mut spare = lock(&self.group.spare);
                let fits = |held: &Held| {
                    held.tokens == tokens
                        && held.shape == self.shape
                        && held.knobs == self.knobs
                        && of_type(held)
                };
                if let Some(at) = spare.iter().position(fits) {
                    all.insert(0, spare.remove(at));
                    return Ok(&mut all[0]);
                }
                // What nobody uses makes room.
                spare.clear();
                let (device, gradients) = (&self.group.device, gradients.unwrap_or(before));
                let held = Held {
                    shape: self.shape.clone(),
                    knobs: self.knobs,
                    layer: CudaLayer::new(device, &self.shape, &self.knobs, &tokens, gradients)?,
                    // A dy comes with the backward.
                    step: DeviceStep::new(&self.shape, x, x, routing.ids(), routing.weights())?,
                    weights: DeviceWeights::from_host(weights)?,
                    gradients: None,
                    call: None,
                    tokens,
                };
                all.insert(0, held);
            }
        }
        Ok(&mut all[0])
    }
}

impl Drop for OnGpu {
    fn drop(&mut self) {
        // Buffers are freed in the context that is current. A failure has nobody to tell.
        let _ = self.group.device.make_current();
        let mut spare = lock(&self.group.spare);
        spare.splice(0..0, lock(&self.held).drain(..));
        spare.truncate(MOST_HELD);
    }
}

fn write_weights(on_gpu: &DeviceWeights, w: &Weights<bf16>) -> Result<()> {
    on_gpu.gate.write(w.gate)?;
    on_gpu.up.write(w.up)?;
    on_gpu.down.write(w.down)?;
    if let (Some(to), Some(from)) = (&on_gpu.biases, &w.biases) {
        to.gate.write(from.gate)?;
        to.up.write(from.up)?;
        to.down.write(from.down)?;
    }
    if let (Some(to), Some(from)) = (&on_gpu.shared, &w.shared) {
        to.gate.write(from.gate)?;
        to.up.write(from.up)?;
        to.down.write(from.down)?;
        if let (Some(to), Some(from)) = (&to.output_gate, from.output_gate) {
            to.write(from)?;
        }
    }
    Ok(())
}
