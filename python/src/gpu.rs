//! Passes over memory of a GPU, one rank, in the order of the caller's stream. Nothing here waits for the GPU, but where
//! memory is allocated and where the caller asks for it.
//!
//! A *slot* is a [`CudaLayer`]: kernels for a shape, and the memory of one pass. A forward leaves its rows in a slot, so
//! it holds a [`Lease`] of the slot until its backward is done or given up. So there are as many slots as there are
//! forwards before their backward, up to a limit; beyond it a forward takes the slot of the oldest, whose backward then
//! runs its forward again, with the same bits.
//!
//! A pass that is captured into a CUDA graph runs again whenever the graph does, and writes its slot. So such a slot is
//! used by passes of that capture alone from then on.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kodkod::cuda::caller::{self, CurrentContext};
use kodkod::cuda::driver::{Buffer, Device, Event, Stream};
use kodkod::cuda::{self, CudaLayer, DeviceGradients, DeviceStep, DeviceWeights};
use kodkod::{
    Biases, Error, GradientElement, Knobs, Precision, Result, Shape, SharedWeights, WeightGradients, bf16,
};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

use crate::context::{self, Kept};
use crate::errors::{exception, without_lock};
use crate::gpu_rank;
use crate::memory::Span;
use crate::pass::{Config, Inputs, Parts, given};

/// Sizes of calls, besides the one that needs memory, whose unused slots are not freed for it.
const MOST_SIZES: usize = 3;
/// The copy engine needs addresses that are a multiple of it.
const ALIGNMENT: usize = 16;
/// No capture, no owner.
const NONE: u64 = 0;

static GPUS: Mutex<BTreeMap<usize, Arc<Gpu>>> = Mutex::new(BTreeMap::new());
/// Numbers the forwards of this process, from 1.
static CALLS: AtomicU64 = AtomicU64::new(1);

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What passes on a GPU share.
struct Gpu {
    device: Arc<Device>,
    pool: Mutex<Pool>,
    /// Forwards that ran again for their backward.
    again: AtomicUsize,
}

#[derive(Default)]
struct Pool {
    slots: Vec<Arc<Slot>>,
    /// Most bytes of all slots; `None`: what the GPU has.
    limit: Option<usize>,
    /// Numbers the leases.
    leases: u64,
}

/// What a slot was made for.
#[derive(PartialEq)]
struct Size {
    shape: Shape,
    knobs: Knobs,
    tokens: usize,
    /// Elements of an expert's gate, where its up lies behind it.
    fused: Option<usize>,
}

struct Slot {
    size: Size,
    gradients: Precision,
    bytes: usize,
    /// The forward that holds it, or `NONE`.
    owner: AtomicU64,
    /// The only capture that may use it, or `NONE` where it is used outside of captures.
    capture: AtomicU64,
    /// When it was leased last.
    leased: AtomicU64,
    work: Mutex<Work>,
}

/// One pass at a time.
struct Work {
    layer: CudaLayer,
    begin: Event,
    end: Event,
    /// The forward whose rows are in the slot, or `NONE`.
    call: u64,
    /// A pass has run since errors were looked for.
    unchecked: bool,
}

/// A slot, for as long as a forward's rows are needed.
pub(crate) struct Lease {
    slot: Arc<Slot>,
    call: u64,
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Where another forward has taken the slot, it is not ours to free. No lock: a tensor may be freed anywhere.
        let _ = self.slot.owner.compare_exchange(self.call, NONE, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Why there is no slot.
pub(crate) enum Refused {
    /// The GPU's memory is used up; the caller may have some to give back.
    Memory(Error),
    Other(Error),
}

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        Refused::Other(error)
    }
}

impl From<cuda::Error> for Refused {
    fn from(error: cuda::Error) -> Self {
        let memory = matches!(&error, cuda::Error::Driver { text, .. } if text.contains("out of memory"));
        let error = error.into();
        if memory { Refused::Memory(error) } else { Refused::Other(error) }
    }
}

fn gpu(ordinal: usize) -> Result<Arc<Gpu>> {
    let mut gpus = lock(&GPUS);
    if let Some(gpu) = gpus.get(&ordinal) {
        return Ok(gpu.clone());
    }
    let device = Device::new(ordinal)?;
    let gpu = Arc::new(Gpu { device, pool: Mutex::default(), again: AtomicUsize::new(0) });
    gpus.insert(ordinal, gpu.clone());
    Ok(gpu)
}

impl Slot {
    fn idle(&self) -> bool {
        self.owner.load(Ordering::Acquire) == NONE
    }

    fn capture(&self) -> u64 {
        self.capture.load(Ordering::Acquire)
    }

    /// Whether nobody misses it when it is freed.
    fn spare(&self) -> bool {
        self.idle() && self.capture() == NONE
    }

    fn leased(&self) -> u64 {
        self.leased.load(Ordering::Relaxed)
    }
}

impl Pool {
    fn bytes(&self) -> usize {
        self.slots.iter().map(|slot| slot.bytes).sum()
    }

    fn lease(&mut self, slot: &Arc<Slot>, capture: u64) -> Lease {
        self.leases += 1;
        let call = CALLS.fetch_add(1, Ordering::Relaxed);
        slot.owner.store(call, Ordering::Release);
        slot.leased.store(self.leases, Ordering::Relaxed);
        if capture != NONE {
            slot.capture.store(capture, Ordering::Release);
        }
        Lease { slot: slot.clone(), call }
    }

    /// Frees unused slots of sizes that were not used of late, and of others while a new one would be beyond the limit.
    fn make_room(&mut self, size: &Size, bytes: usize) {
        self.slots.sort_by_key(|slot| std::cmp::Reverse(slot.leased()));
        let mut late: Vec<Arc<Slot>> = Vec::new();
        for slot in &self.slots {
            let known = slot.size == *size || late.iter().any(|other| other.size == slot.size);
            if !known && late.len() < MOST_SIZES {
                late.push(slot.clone());
            }
        }
        self.slots.retain(|slot| {
            let of_late = slot.size == *size || late.iter().any(|other| other.size == slot.size);
            of_late || !slot.spare()
        });
        drop(late);
        while self.limit.is_some_and(|limit| self.bytes() + bytes > limit) {
            match self.slots.iter().rposition(|slot| slot.spare()) {
                Some(oldest) => drop(self.slots.remove(oldest)),
                None => return,
            }
        }
    }
}

/// One call.
struct Call {
    gpu: Arc<Gpu>,
    size: Size,
    gradients: Precision,
    stream: Stream,
    capture: u64,
    /// Wait for the pass, and look for errors.
    checked: bool,
    inputs: Inputs,
}

/// Python's view of where a call runs: the GPU's number, the stream's handle, whether to wait for the pass and look for
/// errors, and whether the caller has no memory left to give back.
pub(crate) type Place = (usize, u64, bool, bool);

impl Call {
    fn new(place: &Place, config: &Config, addresses: &[usize], f32_gradients: bool) -> Result<Self> {
        let gpu = gpu(place.0)?;
        gpu.device.make_current()?;
        if config.f32() {
            return Err(Error::invalid("precision", "f32", "a GPU computes in bf16"));
        }
        let shape = config.shape(None)?;
        let knobs = config.knobs(Knobs::for_gpu(&shape));
        let inputs = config.inputs(addresses)?;
        let tokens = inputs.0.1 / shape.hidden.max(1);
        // SAFETY: Python gives the handle of the stream that is current there, which its caller holds until the call returns; the
        // driver keeps what is queued in a stream, also where it is destroyed.
        let stream = unsafe { Stream::borrowed(place.1) };
        let capture = stream.capture()?.unwrap_or(NONE);
        Ok(Call {
            gpu,
            size: Size { shape, knobs, tokens, fused: config.fused() },
            gradients: precision(f32_gradients),
            stream,
            capture,
            checked: place.2,
            inputs,
        })
    }

    /// A slot of this size. `strict`: compiled for this type of gradients. `last`: the caller has no memory to give back.
    fn acquire(&self, strict: bool, last: bool) -> Result<Lease, Refused> {
        let mut pool = lock(&self.gpu.pool);
        let capture = self.capture;
        let fits = |slot: &Arc<Slot>| {
            slot.size == self.size
                && (slot.gradients == self.gradients || !strict)
                && [NONE, capture].contains(&slot.capture())
        };
        let idle = pool.slots.iter().filter(|slot| fits(slot) && slot.idle());
        if let Some(slot) =
            idle.max_by_key(|slot| (slot.capture(), slot.gradients == self.gradients)).cloned()
        {
            return Ok(pool.lease(&slot, capture));
        }
        let oldest = |pool: &Pool| {
            let held = pool.slots.iter().filter(|slot| fits(slot));
            held.min_by_key(|slot| slot.owner.load(Ordering::Acquire)).cloned()
        };
        if capture != NONE {
            let slot = oldest(&pool).ok_or_else(|| {
                Error::Machine(
                    "a CUDA graph is captured, and memory cannot be allocated for a pass of this size: run the same passes \
                     once before the capture"
                        .into(),
                )
            })?;
            return Ok(pool.lease(&slot, capture));
        }
        let bytes = pool.slots.iter().filter(|s| s.size == self.size).map(|s| s.bytes).max().unwrap_or(0);
        pool.make_room(&self.size, bytes);
        if pool.limit.is_some_and(|limit| pool.bytes() + bytes > limit)
            && let Some(slot) = oldest(&pool)
        {
            return Ok(pool.lease(&slot, capture));
        }
        let made = match self.make() {
            Err(Refused::Memory(_)) => {
                pool.slots.retain(|slot| !slot.spare());
                self.make()
            }
            made => made,
        };
        let slot = match made {
            Ok(slot) => {
                pool.slots.push(slot.clone());
                slot
            }
            Err(Refused::Memory(error)) if last => {
                let slot = oldest(&pool).ok_or(Refused::Memory(error))?;
                // Not to try again at every step.
                pool.limit = Some(pool.bytes());
                slot
            }
            Err(refused) => return Err(refused),
        };
        Ok(pool.lease(&slot, capture))
    }

    fn make(&self) -> Result<Arc<Slot>, Refused> {
        let (free, _) = caller::free_and_total()?;
        let Size { shape, knobs, tokens, fused } = &self.size;
        let new = if fused.is_some() { CudaLayer::fused } else { CudaLayer::new };
        let layer = new(std::slice::from_ref(&self.gpu.device), shape, knobs, &[*tokens], self.gradients)?;
        // The driver counts in steps of some MiB: a small slot may show none, and the limit counts slots all the same.
        let bytes = free.saturating_sub(caller::free_and_total()?.0).max(1);
        let work = Work { layer, begin: Event::new()?, end: Event::new()?, call: NONE, unchecked: false };
        let size = Size { shape: shape.clone(), ..self.size };
        Ok(Arc::new(Slot {
            size,
            gradients: self.gradients,
            bytes,
            owner: AtomicU64::new(NONE),
            capture: AtomicU64::new(NONE),
            leased: AtomicU64::new(0),
            work: Mutex::new(work),
        }))
    }

    /// Runs `passes` after what is in the caller's stream, and lets that wait for them.
    fn run(&self, work: &mut Work, passes: impl FnOnce(&CudaLayer) -> cuda::Result<()>) -> Result<()> {
        let stream = work.layer.stream();
        work.begin.record(&self.stream)?;
        stream.wait(&work.begin)?;
        let outcome = passes(&work.layer);
        // Also after an error: a capture must end in the stream that it began in.
        let joined = work.end.record(stream).and_then(|()| self.stream.wait(&work.end));
        work.unchecked = true;
        outcome.and(joined)?;
        if self.checked && self.capture == NONE {
            work.unchecked = false;
            work.layer.finish()?;
        }
        Ok(())
    }

    /// # Safety
    /// As for [`buffer`], for all inputs and outputs.
    unsafe fn forward(&self, lease: &Lease, work: &mut Work, y: Span) -> Result<()> {
        work.call = NONE;
        // SAFETY: the caller's promise.
        let (step, weights) =
            unsafe { (step(&self.inputs, [(0, y.1), y, y], 0)?, weights(&self.inputs, self.size.fused)?) };
        self.run(work, |layer| layer.forward(&step, &weights))?;
        work.call = lease.call;
        Ok(())
    }

    /// # Safety
    /// As for [`buffer`], for all inputs and outputs.
    unsafe fn backward<G: GradientElement>(
        &self,
        work: &mut Work,
        [dy, dx, d_topk_weights]: [Span; 3],
        parts: Parts,
        accumulate: bool,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        let (step, weights, gradients) = unsafe {
            (
                step(&self.inputs, [dy, (0, dx.1), dx], d_topk_weights.0)?,
                weights(&self.inputs, self.size.fused)?,
                gradients::<G>(parts, self.size.fused)?,
            )
        };
        self.run(work, |layer| layer.backward(&step, &weights, &gradients, accumulate))
    }
}

/// `rows`: dy, y, dx; what a pass does not touch may have address 0.
///
/// # Safety
/// As for [`buffer`].
pub(crate) unsafe fn step(
    inputs: &Inputs,
    [dy, y, dx]: [Span; 3],
    d_topk_weights: usize,
) -> Result<DeviceStep> {
    let &(x, ids, wide, topk_weights, _) = inputs;
    if wide {
        return Err(Error::invalid("topk_ids", "int64", "int32 is needed on a GPU"));
    }
    // SAFETY: the caller's promise.
    unsafe {
        Ok(DeviceStep {
            x: buffer("x", x)?,
            dy: buffer("dy", dy)?,
            ids: buffer("topk_ids", ids)?,
            topk_weights: buffer("topk_weights", topk_weights)?,
            y: buffer("y", y)?,
            dx: buffer("dx", dx)?,
            d_topk_weights: buffer("d_topk_weights", (d_topk_weights, ids.1))?,
        })
    }
}

/// `fused`: elements of an expert's gate, where its up lies behind it.
///
/// # Safety
/// As for [`buffer`].
pub(crate) unsafe fn weights(inputs: &Inputs, fused: Option<usize>) -> Result<DeviceWeights> {
    let [gate, up, down, b_gate, b_up, b_down, s_gate, s_up, s_down, s_output_gate] = inputs.4;
    let gate = given("w_gate", gate)?;
    let up = up_of::<bf16>("w_up", gate, up, fused)?;
    // SAFETY: the caller's promise.
    unsafe {
        Ok(DeviceWeights {
            gate: buffer("w_gate", gate)?,
            up: buffer("w_up", up)?,
            down: buffer("w_down", given("w_down", down)?)?,
            biases: match b_gate {
                None => None,
                Some(b_gate) => Some(Biases {
                    gate: buffer("b_gate", b_gate)?,
                    up: buffer("b_up", given("b_up", b_up)?)?,
                    down: buffer("b_down", given("b_down", b_down)?)?,
                }),
            },
            shared: match s_gate {
                None => None,
                Some(s_gate) => Some(SharedWeights {
                    gate: buffer("shared_gate", s_gate)?,
                    up: buffer("shared_up", given("shared_up", s_up)?)?,
                    down: buffer("shared_down", given("shared_down", s_down)?)?,
                    output_gate: s_output_gate.map(|g| buffer("shared_output_gate", g)).transpose()?,
                }),
            },
        })
    }
}

/// Elements of a GPU.
///
/// # Safety
/// They are there, on the GPU of the call, until what follows the call in the caller's stream; nobody else writes them, nor
/// reads them where they are written, but in the order of that stream.
pub(crate) unsafe fn buffer<T: Copy>(name: &str, (address, len): Span) -> Result<Buffer<T>> {
    if !address.is_multiple_of(ALIGNMENT) {
        let allowed = format!("a multiple of {ALIGNMENT} is needed");
        return Err(Error::invalid(format!("address of {name}"), format!("{address:#x}"), allowed));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { Buffer::borrowed(address as u64, len) })
}

/// Where up is: for `fused` as for [`weights`], from that of the first expert on.
fn up_of<T>(name: &str, gate: Span, up: Option<Span>, fused: Option<usize>) -> Result<Span> {
    let Some(half) = fused.map(|half| half.min(gate.1)) else { return given(name, up) };
    Ok((gate.0 + half * size_of::<T>(), gate.1 - half))
}

/// `fused` as for [`weights`].
///
/// # Safety
/// As for [`buffer`], for all parts.
pub(crate) unsafe fn gradients<G: GradientElement>(
    parts: Parts,
    fused: Option<usize>,
) -> Result<DeviceGradients<G>> {
    let [gate, up, down, b_gate, b_up, b_down, s_gate, s_up, s_down, s_output_gate] = parts;
    let gate = given("dw_gate", gate)?;
    let up = up_of::<G>("dw_up", gate, up, fused)?;
    // SAFETY: the caller's promise.
    unsafe {
        Ok(WeightGradients {
            gate: buffer("dw_gate", gate)?,
            up: buffer("dw_up", up)?,
            down: buffer("dw_down", given("dw_down", down)?)?,
            biases: match b_gate {
                None => None,
                Some(b_gate) => Some(Biases {
                    gate: buffer("db_gate", b_gate)?,
                    up: buffer("db_up", given("db_up", b_up)?)?,
                    down: buffer("db_down", given("db_down", b_down)?)?,
                }),
            },
            shared: match s_gate {
                None => None,
                Some(s_gate) => Some(SharedWeights {
                    gate: buffer("d_shared_gate", s_gate)?,
                    up: buffer("d_shared_up", given("d_shared_up", s_up)?)?,
                    down: buffer("d_shared_down", given("d_shared_down", s_down)?)?,
                    output_gate: s_output_gate.map(|g| buffer("d_shared_output_gate", g)).transpose()?,
                }),
            },
        })
    }
}

pub(crate) fn precision(f32: bool) -> Precision {
    if f32 { Precision::F32 } else { Precision::Bf16 }
}

/// Runs `work` without the interpreter's lock; memory that is used up is a `MemoryError`.
pub(crate) fn run<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T, Refused> + Send) -> PyResult<T> {
    without_lock(py, || match work() {
        Ok(value) => Ok(Ok(value)),
        Err(Refused::Memory(error)) => Ok(Err(error)),
        Err(Refused::Other(error)) => Err(error),
    })?
    .map_err(|error| PyMemoryError::new_err(exception(&error).to_string()))
}

/// Writes `y` in the order of the stream; with `keep` it returns the DLPack capsule of what the backward needs.
#[pyfunction]
pub(crate) fn cuda_forward(
    py: Python<'_>,
    place: Place,
    config: &Config,
    inputs: Vec<usize>,
    y: usize,
    keep: bool,
    f32_gradients: bool,
) -> PyResult<Option<Py<PyAny>>> {
    let lease = run(py, || {
        let call = Call::new(&place, config, &inputs, f32_gradients)?;
        let lease = call.acquire(keep, place.3)?;
        let mut work = lock(&lease.slot.work);
        // SAFETY: the addresses are of tensors of these types: `kodkod._ops` keeps them until the pass is in the stream, whose
        // order is that of torch's allocator; `y` is new.
        unsafe { call.forward(&lease, &mut work, config.rows(y))? };
        drop(work);
        Ok(keep.then_some(lease))
    })?;
    lease.map(|lease| context::capsule(py, Kept::Gpu(lease))).transpose()
}

/// Writes or, with `accumulate`, adds all gradients, in the order of the stream. Where what its forward left is gone, that
/// runs again.
#[pyfunction]
pub(crate) fn cuda_backward(
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
    run(py, || {
        let call = Call::new(&place, config, &inputs, f32_gradients)?;
        let (dy, dx, d_topk_weights) = (config.rows(dy), config.rows(dx), config.routes(d_topk_weights));
        let (rows, parts) = ([dy, dx, d_topk_weights], config.parts(&weight_gradients)?);
        // SAFETY: as in `cuda_forward`; what is written is new, or accumulators that the caller gave for that.
        let backward = |work: &mut Work| unsafe {
            match f32_gradients {
                true => call.backward::<f32>(work, rows, parts, accumulate),
                false => call.backward::<bf16>(work, rows, parts, accumulate),
            }
        };
        if let Some(Kept::Gpu(lease)) = kept.as_deref()
            && lease.slot.size == call.size
            && lease.slot.gradients == call.gradients
        {
            let mut work = lock(&lease.slot.work);
            if work.call == lease.call {
                if call.capture != NONE {
                    let slot = &lease.slot.capture;
                    let _ = slot.compare_exchange(NONE, call.capture, Ordering::AcqRel, Ordering::Relaxed);
                }
                return Ok(backward(&mut work)?);
            }
        }
        call.gpu.again.fetch_add(1, Ordering::Relaxed);
        let lease = call.acquire(true, place.3)?;
        let mut work = lock(&lease.slot.work);
        // SAFETY: as above; `dx` holds `y` until the backward writes it.
        unsafe { call.forward(&lease, &mut work, dx)? };
        Ok(backward(&mut work)?)
    })
}

/// Waits for all passes on a GPU, and raises where one was given up.
#[pyfunction]
pub(crate) fn cuda_check(py: Python<'_>) -> PyResult<()> {
    without_lock(py, || {
        let _current = CurrentContext::keep();
        let gpus: Vec<_> = lock(&GPUS).values().cloned().collect();
        let mut outcome = Ok(());
        for gpu in gpus {
            gpu.device.make_current()?;
            let slots = lock(&gpu.pool).slots.clone();
            for slot in slots {
                let mut work = lock(&slot.work);
                // A graph runs the passes that it captured without a word.
                if work.unchecked || slot.capture() != NONE {
                    work.unchecked = false;
                    outcome = outcome.and(work.layer.finish().map_err(Error::from));
                }
            }
        }
        outcome.and(gpu_rank::finish())
    })
}

/// Of a GPU: slots; those that a forward holds; those that belong to a graph; bytes of all; the most bytes; forwards that
/// ran again. Those of groups of processes are not counted: `group_memory` does that.
#[pyfunction]
pub(crate) fn cuda_memory(device: usize) -> (usize, usize, usize, usize, Option<usize>, usize) {
    let Some(gpu) = lock(&GPUS).get(&device).cloned() else { return (0, 0, 0, 0, None, 0) };
    let pool = lock(&gpu.pool);
    let count = |of: fn(&Slot) -> bool| pool.slots.iter().filter(|slot| of(slot)).count();
    let (held, captured) = (count(|slot| !slot.idle()), count(|slot| slot.capture() != NONE));
    (pool.slots.len(), held, captured, pool.bytes(), pool.limit, gpu.again.load(Ordering::Relaxed))
}

/// Sets the most bytes of slots of a GPU.
#[pyfunction]
pub(crate) fn cuda_limit(py: Python<'_>, device: usize, limit: Option<usize>) -> PyResult<()> {
    without_lock(py, || {
        let _current = CurrentContext::keep();
        lock(&gpu(device)?.pool).limit = limit;
        Ok(())
    })
}

/// Frees the slots of a GPU that no forward holds; with `captured` also those of CUDA graphs, which must not run again.
#[pyfunction]
pub(crate) fn cuda_trim(py: Python<'_>, device: usize, captured: bool) -> PyResult<()> {
    without_lock(py, || {
        let _current = CurrentContext::keep();
        gpu_rank::trim(device, captured)?;
        let Some(gpu) = lock(&GPUS).get(&device).cloned() else { return Ok(()) };
        gpu.device.make_current()?;
        lock(&gpu.pool).slots.retain(|slot| !(slot.idle() && (captured || slot.capture() == NONE)));
        Ok(())
    })
}
