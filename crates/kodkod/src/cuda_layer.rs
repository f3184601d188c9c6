//! A layer on GPUs, for rows and weights that the caller has in the host's memory: copied there, computed, copied back.
//!
//! A layer keeps its kernels and buffers on the GPU for the token counts that it saw last, and leaves them to the group
//! when it goes, so a step like the one before allocates nothing. A backward finds what its forward left there; where
//! another forward came between, it runs its own forward again, which gives the same bits.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use half::bf16;
use kodkod_core::{
    Error, GradientElement, Knobs, Precision, Result, Routing, Shape, WeightGradients, Weights,
};
use kodkod_cuda::driver::{Buffer, Device};
use kodkod_cuda::{CudaLayer, DeviceGradients, DeviceStep, DeviceWeights, MOST_RANKS, Part};

/// Splits of tokens that a layer keeps buffers for; as many are kept of layers that are gone.
pub(crate) const MOST_HELD: usize = 2;

/// Ranks that share one GPU, or have one each.
pub(crate) struct CudaGroup {
    /// Of layers that are gone, the last first.
    spare: Mutex<Vec<Held>>,
    /// One, or one a rank.
    pub(crate) devices: Vec<Arc<Device>>,
    pub(crate) ranks: usize,
}

impl CudaGroup {
    pub(crate) fn new(devices: &[usize], ranks: usize) -> Result<Self> {
        if ranks == 0 || ranks > MOST_RANKS {
            return Err(Error::invalid("ranks", ranks, format!("1 to {MOST_RANKS} are allowed on GPUs")));
        }
        let devices = devices.iter().map(|&d| Device::new(d)).collect::<kodkod_cuda::Result<Vec<_>>>()?;
        for a in &devices {
            devices.iter().try_for_each(|b| a.enable_peer(b))?;
        }
        Ok(CudaGroup { spare: Mutex::default(), devices, ranks })
    }
}

/// Passes on GPUs in this process, one at a time: the kernels of a pass wait for each other, so they must all be on the
/// GPU together.
static PASS: Mutex<()> = Mutex::new(());
/// Numbers the forwards of this process.
static CALLS: AtomicU64 = AtomicU64::new(0);

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A layer's memory on the GPUs, for one split of tokens.
struct Held {
    shape: Shape,
    knobs: Knobs,
    tokens: Vec<usize>,
    layer: CudaLayer,
    parts: Vec<Part>,
    /// Of each part.
    steps: Vec<DeviceStep>,
    /// Of each part.
    weights: Vec<DeviceWeights>,
    /// A vector of each part's [`DeviceGradients`], of the type that the layer was compiled for.
    gradients: Option<Box<dyn Any + Send>>,
    /// The forward whose rows are in the buffers.
    call: Option<u64>,
}

/// A layer of a shape on the ranks of a group.
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
        let y = held.read(x.len(), self.shape.hidden, |step| &step.y)?;
        Ok((y, SavedOnGpu { call, shape: self.shape.clone(), routing: routing.clone() }))
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
        let held = self.fit(all, x, routing, weights, gradients)?;
        held.call = None;
        let (h, k) = (self.shape.hidden, self.shape.top_k);
        for ((part, step), to) in held.parts.iter().zip(&held.steps).zip(&held.weights) {
            part.device().make_current()?;
            step.x.write(part.of_tokens(x, h))?;
            step.ids.write(part.of_tokens(routing.ids(), k))?;
            step.topk_weights.write(part.of_tokens(routing.weights(), k))?;
            to.write(&part.of_weights(weights))?;
        }
        let _alone = lock(&PASS);
        let launched = held.layer.forward_on(&held.steps, &held.weights);
        held.finish(launched)?;
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
        for (part, step) in held.parts.iter().zip(&held.steps) {
            part.device().make_current()?;
            step.dy.write(part.of_tokens(dy, self.shape.hidden))?;
        }
        if held.gradients.is_none() {
            let new =
                held.parts.iter().map(Part::new_gradients::<G>).collect::<kodkod_cuda::Result<Vec<_>>>()?;
            held.gradients = Some(Box::new(new));
        }
        let on_gpu = held.gradients.as_ref().and_then(|g| g.downcast_ref::<Vec<DeviceGradients<G>>>());
        let on_gpu = on_gpu.expect("made of the layer's type");
        let (weights, rest) = gradients.into_parts();
        let (of_weights, of_rest): (Vec<_>, Vec<_>) = on_gpu.iter().map(|g| g.as_ref().into_parts()).unzip();
        // The routed experts' come first.
        let mut weights = pair(&of_weights, weights, 3);
        let mut rest = pair(&of_rest, rest, if self.shape.biases { 3 } else { 0 });
        if accumulate {
            weights.iter().try_for_each(|(buffer, host)| buffer.write(host))?;
            rest.iter().try_for_each(|(buffer, host)| buffer.write(host))?;
        }
        let _alone = lock(&PASS);
        let launched = held.layer.backward_on(&held.steps, &held.weights, on_gpu, accumulate);
        held.finish(launched)?;
        weights.iter_mut().try_for_each(|(buffer, host)| buffer.read_into(host))?;
        rest.iter_mut().try_for_each(|(buffer, host)| buffer.read_into(host))?;
        let dx = held.read(dy.len(), self.shape.hidden, |step| &step.dx)?;
        let routes = saved.routing.tokens() * self.shape.top_k;
        Ok((dx, held.read(routes, self.shape.top_k, |step| &step.d_topk_weights)?))
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
                let (devices, gradients) = (&self.group.devices, gradients.unwrap_or(before));
                let parts = Part::all(devices, &self.shape, &tokens);
                let layer = CudaLayer::new(devices, &self.shape, &self.knobs, &tokens, gradients)?;
                // A dy comes with the backward.
                let step = |part: &Part| part.step(x, x, routing.ids(), routing.weights());
                let steps = parts.iter().map(step).collect::<kodkod_cuda::Result<Vec<_>>>()?;
                let on_gpu = parts.iter().map(|part| part.weights(weights));
                let weights = on_gpu.collect::<kodkod_cuda::Result<Vec<_>>>()?;
                let (shape, knobs) = (self.shape.clone(), self.knobs);
                let (gradients, call) = (None, None);
                let held = Held { shape, knobs, tokens, layer, parts, steps, weights, gradients, call };
                all.insert(0, held);
            }
        }
        Ok(&mut all[0])
    }
}

impl Drop for OnGpu {
    fn drop(&mut self) {
        let mut spare = lock(&self.group.spare);
        spare.splice(0..0, lock(&self.held).drain(..));
        spare.truncate(MOST_HELD);
    }
}

impl Held {
    /// Waits for a pass, also where only some ranks were launched: those give up then, and the next pass starts afresh. The
    /// first error counts.
    fn finish(&self, launched: kodkod_cuda::Result<()>) -> Result<()> {
        let finished = self.layer.finish();
        Ok(launched.and(finished)?)
    }

    /// `len` values of all tokens, `each` a token, from the buffers of all parts.
    fn read<T: Copy + Default>(
        &self,
        len: usize,
        each: usize,
        buffer: impl Fn(&DeviceStep) -> &Buffer<T>,
    ) -> Result<Vec<T>> {
        let mut all = vec![T::default(); len];
        for (part, step) in self.parts.iter().zip(&self.steps) {
            part.device().make_current()?;
            buffer(step).read_into(part.of_tokens_mut(&mut all, each))?;
        }
        Ok(all)
    }
}

/// Each part's buffers with what the caller has of them: of the first `split` slices every part has its share, the others
/// are the first part's.
fn pair<'a, 'b, T: Copy>(
    buffers: &[Vec<&'a Buffer<T>>],
    host: Vec<&'b mut [T]>,
    split: usize,
) -> Vec<(&'a Buffer<T>, &'b mut [T])> {
    let mut pairs = Vec::new();
    for (at, slice) in host.into_iter().enumerate() {
        let each = if at < split { slice.len() / buffers.len() } else { slice.len() };
        pairs
            .extend(buffers.iter().zip(slice.chunks_mut(each.max(1))).map(|(part, chunk)| (part[at], chunk)));
    }
    pairs
}
