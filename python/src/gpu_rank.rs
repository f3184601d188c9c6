//! One rank's part of passes, in a group of processes with a GPU each.
//!
//! As in [`gpu`](crate::gpu) a forward leaves its rows in a slot, here a [`DeviceRankLayer`], and leases it until its backward is
//! done or given up. Each rank chooses among its own slots: the ranks agree on which forward a backward belongs to, and
//! not on slots. All ranks allocate together, so there is no limit of memory that one could set alone.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use kodkod::cuda::driver::Stream;
use kodkod::{
    DeviceContext, DeviceRankLayer, Error, ExpertGroup, GradientElement, Knobs, Precision, Result, Shape,
    bf16,
};
use pyo3::prelude::*;

use crate::context::{self, Kept};
use crate::gpu::{Place, Refused, gradients, lock, precision, run, step, weights};
use crate::groups::group;
use crate::memory::Span;
use crate::pass::{Config, Inputs, Parts};

static SLOTS: Mutex<Vec<Arc<Slot>>> = Mutex::new(Vec::new());

struct Slot {
    size: Size,
    layer: DeviceRankLayer,
    leased: AtomicBool,
    /// The caller knows that its group is broken.
    told: AtomicBool,
}

/// What a slot was made for.
#[derive(PartialEq)]
struct Size {
    group: usize,
    shape: Shape,
    knobs: Knobs,
    fused: bool,
}

/// A slot, for as long as a forward's rows are needed.
struct Lease(Arc<Slot>);

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.leased.store(false, Ordering::Release);
    }
}

/// What a forward left.
pub(crate) struct Left {
    context: DeviceContext,
    lease: Lease,
}

struct Call {
    slot: Arc<Slot>,
    /// Unless the slot is that of a backward's forward, which holds it.
    lease: Option<Lease>,
    inputs: Inputs,
    stream: Stream,
    /// As for `gpu::weights`.
    fused: Option<usize>,
    /// Wait for the pass, and look for errors.
    checked: bool,
}

impl Call {
    /// `left`: what the call's forward left, if it is a backward.
    fn new(
        group: &ExpertGroup,
        place: Place,
        config: &Config,
        addresses: &[usize],
        left: Option<&Left>,
    ) -> Result<Self> {
        let device = group.device().ok_or(Error::Internal("a group without a GPU".into()))?;
        if device.ordinal() != place.0 {
            let allowed = format!("cuda:{} is needed, where this rank of the group is", device.ordinal());
            return Err(Error::invalid("device of x", format!("cuda:{}", place.0), allowed));
        }
        device.make_current()?;
        if config.f32() {
            return Err(Error::invalid("precision", "f32", "a GPU computes in bf16"));
        }
        if place.3 {
            trim(place.0, false)?;
        }
        let shape = config.shape(Some(config.experts().saturating_mul(group.ranks())))?;
        let knobs = config.knobs(Knobs::for_gpus(&shape, group.ranks()));
        let inputs = config.inputs(addresses)?;
        // SAFETY: as in `gpu::Call::new`.
        let stream = unsafe { Stream::borrowed(place.1) };
        let capture = stream.capture()?;
        let (slot, lease) = match left {
            Some(left) => (left.lease.0.clone(), None),
            None => {
                let size = Size { group: config.group(), shape, knobs, fused: config.fused().is_some() };
                let lease = acquire(size, group, capture)?;
                (lease.0.clone(), Some(lease))
            }
        };
        let checked = place.2 && capture.is_none();
        Ok(Call { slot, lease, inputs, stream, fused: config.fused(), checked })
    }

    /// # Safety
    /// As for [`buffer`](crate::gpu::buffer), for all inputs and outputs.
    unsafe fn forward(&self, y: Span, gradients: Precision) -> Result<DeviceContext> {
        // SAFETY: the caller's promise.
        let (step, weights) =
            unsafe { (step(&self.inputs, [(0, y.1), y, y], 0)?, weights(&self.inputs, self.fused)?) };
        self.slot.layer.forward(&step, &weights, gradients, &self.stream)
    }

    /// # Safety
    /// As for [`buffer`](crate::gpu::buffer), for all inputs and outputs.
    unsafe fn backward<G: GradientElement>(
        &self,
        context: &DeviceContext,
        [dy, dx, d_topk_weights]: [Span; 3],
        parts: Parts,
        accumulate: bool,
    ) -> Result<()> {
        // Where the forward runs again, `dx` holds its `y` until the backward writes it.
        // SAFETY: the caller's promise.
        let (step, weights, gradients) = unsafe {
            (
                step(&self.inputs, [dy, dx, dx], d_topk_weights.0)?,
                weights(&self.inputs, self.fused)?,
                gradients::<G>(parts, self.fused)?,
            )
        };
        let layer = &self.slot.layer;
        layer.backward(context, &step, &weights, &gradients, accumulate, &self.stream)
    }

    fn done(&self) -> Result<()> {
        if self.checked { self.slot.layer.finish() } else { Ok(()) }
    }
}

/// Where a rank has no memory for a call, all ranks see the driver's words, in their own error or in that rank's. So all of
/// them make the call again, with what their callers can give back.
fn refused(error: Error) -> Refused {
    let memory = error.to_string().ends_with(": out of memory");
    if memory { Refused::Memory(error) } else { Refused::Other(error) }
}

/// A slot that no forward holds, and no graph but that of this `capture`.
fn acquire(size: Size, group: &ExpertGroup, capture: Option<u64>) -> Result<Lease> {
    let mut slots = lock(&SLOTS);
    let fits = |of: Option<u64>| {
        let fits = |slot: &&Arc<Slot>| slot.size == size && slot.layer.captured() == of;
        slots.iter().filter(fits).find(|slot| !slot.leased.swap(true, Ordering::AcqRel))
    };
    if let Some(slot) = fits(capture).or_else(|| fits(None)) {
        return Ok(Lease(slot.clone()));
    }
    let new = if size.fused { DeviceRankLayer::fused } else { DeviceRankLayer::new };
    let layer = new(group, size.shape.clone(), size.knobs)?;
    let slot = Arc::new(Slot { size, layer, leased: AtomicBool::new(true), told: AtomicBool::new(false) });
    slots.push(slot.clone());
    Ok(Lease(slot))
}

/// As `cuda_forward`, in a group of processes.
#[pyfunction]
pub(crate) fn cuda_rank_forward(
    py: Python<'_>,
    place: Place,
    config: &Config,
    inputs: Vec<usize>,
    y: usize,
    keep: bool,
    f32_gradients: bool,
) -> PyResult<Option<Py<PyAny>>> {
    let group = group(py, config.group())?;
    let work = || {
        // The layer's errors reach every rank; one before its call would leave them waiting.
        let mut call =
            Call::new(&group, place, config, &inputs, None).map_err(|error| group.refuse(error))?;
        // SAFETY: as in `cuda_forward`.
        let context = unsafe { call.forward(config.rows(y), precision(f32_gradients))? };
        call.done()?;
        Ok(call.lease.take().filter(|_| keep).map(|lease| Left { context, lease }))
    };
    let left = run(py, || work().map_err(refused))?;
    left.map(|left| context::capsule(py, Kept::GpuRank(left))).transpose()
}

/// As `cuda_backward`, in a group of processes.
#[pyfunction]
pub(crate) fn cuda_rank_backward(
    py: Python<'_>,
    place: Place,
    config: &Config,
    inputs: Vec<usize>,
    context: usize,
    dy: usize,
    dx: usize,
    d_topk_weights: usize,
    weight_gradients: Vec<usize>,
    f32_gradients: bool,
    accumulate: bool,
) -> PyResult<()> {
    let kept = context::find(context);
    let group = group(py, config.group())?;
    let work = || {
        let left = match kept.as_deref() {
            Some(Kept::GpuRank(left)) if left.lease.0.size.group == config.group() => Some(left),
            _ => None,
        };
        let prepared =
            || Ok((Call::new(&group, place, config, &inputs, left)?, config.parts(&weight_gradients)?));
        let (call, parts) = prepared().map_err(|error: Error| group.refuse(error))?;
        let rows = [config.rows(dy), config.rows(dx), config.routes(d_topk_weights)];
        // SAFETY: as in `cuda_backward`.
        unsafe {
            let context = match left {
                Some(left) => left.context,
                None => call.forward(rows[1], precision(f32_gradients))?,
            };
            match f32_gradients {
                true => call.backward::<f32>(&context, rows, parts, accumulate)?,
                false => call.backward::<bf16>(&context, rows, parts, accumulate)?,
            }
        }
        call.done()
    };
    run(py, || work().map_err(refused))
}

/// Waits for all passes of groups of processes, and says which failed first. What failed is told once: no call can use the
/// slots of a broken group.
pub(crate) fn finish() -> Result<()> {
    let slots = lock(&SLOTS).clone();
    let mut outcome = Ok(());
    for slot in slots.iter().filter(|slot| !slot.told.load(Ordering::Acquire)) {
        let finished = slot.layer.finish();
        slot.told.store(finished.is_err(), Ordering::Release);
        outcome = outcome.and(finished);
    }
    outcome
}

/// Frees the slots on a GPU that no forward holds; with `captured` also those of CUDA graphs.
pub(crate) fn trim(device: usize, captured: bool) -> Result<()> {
    let mut slots = lock(&SLOTS);
    let spare = |slot: &mut Arc<Slot>| {
        slot.layer.device().ordinal() == device
            && !slot.leased.load(Ordering::Acquire)
            && (captured || slot.layer.captured().is_none())
    };
    for slot in slots.extract_if(.., spare) {
        // Of a group that is broken the kernels have been stopped; its next call says why.
        let _ = slot.layer.finish();
        slot.layer.device().make_current()?;
    }
    Ok(())
}
