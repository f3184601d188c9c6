//! What a caller has on the GPU: weights, gradients, and a step's rows and routes.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use kodkod_core::{Biases, GradientElement, Shape, SharedWeights, WeightGradients, Weights};

use crate::driver::{Buffer, Device, Stream};
use crate::error::Result;

/// What a GPU has of a step and of the weights: all of it where it is the only one, else one rank's.
#[derive(Debug, Clone)]
pub struct Part {
    device: Arc<Device>,
    all: Shape,
    /// The shape, with the experts that are here.
    own: Shape,
    tokens: Range<usize>,
    experts: Range<usize>,
}

impl Part {
    /// Those of each of the devices, for [`CudaLayer::new`](crate::CudaLayer::new) with the same.
    ///
    /// # Panics
    /// Without a device, or where several have not a token count each.
    pub fn all(devices: &[Arc<Device>], shape: &Shape, tokens_per_rank: &[usize]) -> Vec<Part> {
        let experts = shape.experts / devices.len();
        let mut first = 0;
        let part = |(at, device): (usize, &Arc<Device>)| {
            let ranks = if devices.len() == 1 { tokens_per_rank } else { &tokens_per_rank[at..at + 1] };
            let from = first;
            first += ranks.iter().sum::<usize>();
            Part {
                device: device.clone(),
                all: shape.clone(),
                own: Shape { experts, ..shape.clone() },
                tokens: from..first,
                experts: at * experts..(at + 1) * experts,
            }
        };
        devices.iter().enumerate().map(part).collect()
    }

    /// The GPU.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The shape, with the experts that are here.
    pub fn own(&self) -> &Shape {
        &self.own
    }

    /// Of values of all tokens, `each` a token, those that are here.
    pub fn of_tokens<'a, T>(&self, all: &'a [T], each: usize) -> &'a [T] {
        &all[self.tokens.start * each..self.tokens.end * each]
    }

    /// The same, to write to.
    pub fn of_tokens_mut<'a, T>(&self, all: &'a mut [T], each: usize) -> &'a mut [T] {
        &mut all[self.tokens.start * each..self.tokens.end * each]
    }

    /// Of the weights, those that are here.
    pub fn of_weights<'a>(&self, w: &Weights<'a, bf16>) -> Weights<'a, bf16> {
        w.of_experts(&self.all, self.experts.clone())
    }

    /// Its rows and routes, of those of all tokens; makes the GPU current.
    pub fn step(&self, x: &[bf16], dy: &[bf16], ids: &[i32], topk_weights: &[f32]) -> Result<DeviceStep> {
        self.device.make_current()?;
        let (h, k) = (self.own.hidden, self.own.top_k);
        let (x, dy) = (self.of_tokens(x, h), self.of_tokens(dy, h));
        DeviceStep::new(&self.own, x, dy, self.of_tokens(ids, k), self.of_tokens(topk_weights, k))
    }

    /// Its weights, of those of all experts; makes the GPU current.
    pub fn weights(&self, w: &Weights<'_, bf16>) -> Result<DeviceWeights> {
        self.device.make_current()?;
        DeviceWeights::from_host(&self.of_weights(w))
    }

    /// Gradients of its weights, not initialised; makes the GPU current.
    pub fn new_gradients<T: GradientElement>(&self) -> Result<DeviceGradients<T>> {
        self.device.make_current()?;
        new_gradients(&self.own)
    }
}

/// Weights on the GPU, as `kodkod_core::Weights`.
#[derive(Debug)]
pub struct DeviceWeights {
    /// `[experts, intermediate, hidden]`
    pub gate: Buffer<bf16>,
    /// `[experts, intermediate, hidden]`
    pub up: Buffer<bf16>,
    /// `[experts, hidden, intermediate]`
    pub down: Buffer<bf16>,
    /// Of the routed experts, where the shape has them.
    pub biases: Option<Biases<Buffer<f32>>>,
    /// Where the shape has shared experts.
    pub shared: Option<SharedWeights<Buffer<bf16>, Buffer<f32>>>,
}

impl DeviceWeights {
    /// Overwrites them with others of the same shape.
    ///
    /// # Errors
    /// The driver's words.
    ///
    /// # Panics
    /// Where the host's are longer.
    pub fn write(&self, w: &Weights<'_, bf16>) -> Result<()> {
        self.gate.write(w.gate)?;
        self.up.write(w.up)?;
        self.down.write(w.down)?;
        if let (Some(to), Some(from)) = (&self.biases, &w.biases) {
            to.gate.write(from.gate)?;
            to.up.write(from.up)?;
            to.down.write(from.down)?;
        }
        if let (Some(to), Some(from)) = (&self.shared, &w.shared) {
            to.gate.write(from.gate)?;
            to.up.write(from.up)?;
            to.down.write(from.down)?;
            if let (Some(to), Some(from)) = (&to.output_gate, from.output_gate) {
                to.write(from)?;
            }
        }
        Ok(())
    }

    /// A copy of the host's.
    pub fn from_host(w: &Weights<'_, bf16>) -> Result<Self> {
        let biases = |b: &Biases<&[f32]>| -> Result<_> {
            Ok(Biases {
                gate: Buffer::from_host(b.gate)?,
                up: Buffer::from_host(b.up)?,
                down: Buffer::from_host(b.down)?,
            })
        };
        let shared = |s: &SharedWeights<&[bf16], &[f32]>| -> Result<_> {
            Ok(SharedWeights {
                gate: Buffer::from_host(s.gate)?,
                up: Buffer::from_host(s.up)?,
                down: Buffer::from_host(s.down)?,
                output_gate: s.output_gate.map(Buffer::from_host).transpose()?,
            })
        };
        Ok(DeviceWeights {
            gate: Buffer::from_host(w.gate)?,
            up: Buffer::from_host(w.up)?,
            down: Buffer::from_host(w.down)?,
            biases: w.biases.as_ref().map(biases).transpose()?,
            shared: w.shared.as_ref().map(shared).transpose()?,
        })
    }
}

/// Weight gradients on the GPU: those of gate, up and down in `T`, the others in `f32`.
pub type DeviceGradients<T = f32> = WeightGradients<Buffer<T>, Buffer<f32>>;

/// Gradients for a shape, not initialised.
pub fn new_gradients<T: GradientElement>(shape: &Shape) -> Result<DeviceGradients<T>> {
    WeightGradients::lens(shape).try_map(Buffer::new, Buffer::new)
}

/// Copies of the gradients on the host.
pub fn read_gradients<T: GradientElement>(
    g: &DeviceGradients<T>,
) -> Result<WeightGradients<Vec<T>, Vec<f32>>> {
    g.as_ref().try_map(Buffer::read, Buffer::read)
}

/// A step's rows and routes on the GPU, all ranks' in rank order, and what comes out.
#[derive(Debug)]
pub struct DeviceStep {
    /// `[tokens, hidden]`
    pub x: Buffer<bf16>,
    /// `[tokens, hidden]`
    pub dy: Buffer<bf16>,
    /// `[tokens, top_k]`; what is no expert's index, -1 for one, is no route. `Routing::new` refuses others than -1 on the
    /// host; nothing is refused on the GPU.
    pub ids: Buffer<i32>,
    /// `[tokens, top_k]`
    pub topk_weights: Buffer<f32>,
    /// `[tokens, hidden]`
    pub y: Buffer<bf16>,
    /// `[tokens, hidden]`
    pub dx: Buffer<bf16>,
    /// `[tokens, top_k]`
    pub d_topk_weights: Buffer<f32>,
}

impl DeviceStep {
    /// Copies the inputs; the outputs hold 0xff bytes (NaN) until a pass writes them.
    pub fn new(shape: &Shape, x: &[bf16], dy: &[bf16], ids: &[i32], topk_weights: &[f32]) -> Result<Self> {
        let stream = Stream::new()?;
        let tokens = x.len() / shape.hidden;
        let poisoned = |len| Buffer::new(len).and_then(|b: Buffer<bf16>| b.fill(0xff, &stream).map(|()| b));
        let step = DeviceStep {
            x: Buffer::from_host(x)?,
            dy: Buffer::from_host(dy)?,
            ids: Buffer::from_host(ids)?,
            topk_weights: Buffer::from_host(topk_weights)?,
            y: poisoned(x.len())?,
            dx: poisoned(x.len())?,
            d_topk_weights: Buffer::new(tokens * shape.top_k)?,
        };
        step.d_topk_weights.fill(0xff, &stream)?;
        stream.synchronize()?;
        Ok(step)
    }
}

/// `Ok` where all that is on a GPU of a step, weights and gradients fits `own`, the shape with the experts that are there, and
/// `tokens`. `fused`: an expert's gate and up lie together, as [`CudaLayer::fused`](crate::CudaLayer::fused) says.
///
/// # Errors
/// [`kodkod_core::Error::Length`] that names the argument.
pub fn check_part<T: GradientElement>(
    own: &Shape,
    tokens: usize,
    fused: bool,
    step: &DeviceStep,
    weights: &DeviceWeights,
    gradients: Option<&DeviceGradients<T>>,
) -> kodkod_core::Result<()> {
    let (h, i) = (("hidden", own.hidden), ("intermediate", own.intermediate));
    let (e, k, t) = (("experts", own.experts), ("top_k", own.top_k), ("tokens", tokens));
    let len = kodkod_core::Error::check_len;
    for (name, rows) in [("x", &step.x), ("dy", &step.dy), ("y", &step.y), ("dx", &step.dx)] {
        len(name, rows.len(), &[t, h])?;
    }
    len("topk_ids", step.ids.len(), &[t, k])?;
    len("topk_weights", step.topk_weights.len(), &[t, k])?;
    len("d_topk_weights", step.d_topk_weights.len(), &[t, k])?;
    gate_and_up(["w_gate", "w_up"], &weights.gate, &weights.up, own, fused)?;
    len("w_down", weights.down.len(), &[e, h, i])?;
    if own.biases {
        let b = weights.biases.as_ref();
        len("b_gate", b.map_or(0, |b| b.gate.len()), &[e, i])?;
        len("b_up", b.map_or(0, |b| b.up.len()), &[e, i])?;
        len("b_down", b.map_or(0, |b| b.down.len()), &[e, h])?;
    }
    if let Some(shared) = own.shared {
        let (s, w) = (("shared intermediate", shared.intermediate), weights.shared.as_ref());
        len("shared_gate", w.map_or(0, |w| w.gate.len()), &[s, h])?;
        len("shared_up", w.map_or(0, |w| w.up.len()), &[s, h])?;
        len("shared_down", w.map_or(0, |w| w.down.len()), &[h, s])?;
        if shared.output_gate {
            let gate = w.and_then(|w| w.output_gate.as_ref());
            len("shared_output_gate", gate.map_or(0, Buffer::len), &[h])?;
        }
    }
    let Some(g) = gradients else { return Ok(()) };
    gate_and_up(["dw_gate", "dw_up"], &g.gate, &g.up, own, fused)?;
    len("dw_down", g.down.len(), &[e, h, i])?;
    if own.biases {
        let b = g.biases.as_ref();
        len("db_gate", b.map_or(0, |b| b.gate.len()), &[e, i])?;
        len("db_up", b.map_or(0, |b| b.up.len()), &[e, i])?;
        len("db_down", b.map_or(0, |b| b.down.len()), &[e, h])?;
    }
    if let Some(shared) = own.shared {
        let (s, w) = (("shared intermediate", shared.intermediate), g.shared.as_ref());
        len("d_shared_gate", w.map_or(0, |w| w.gate.len()), &[s, h])?;
        len("d_shared_up", w.map_or(0, |w| w.up.len()), &[s, h])?;
        len("d_shared_down", w.map_or(0, |w| w.down.len()), &[h, s])?;
        if shared.output_gate {
            let gate = w.and_then(|w| w.output_gate.as_ref());
            len("d_shared_output_gate", gate.map_or(0, Buffer::len), &[h])?;
        }
    }
    Ok(())
}

fn gate_and_up<T: Copy>(
    [gate_name, up_name]: [&str; 2],
    gate: &Buffer<T>,
    up: &Buffer<T>,
    own: &Shape,
    fused: bool,
) -> kodkod_core::Result<()> {
    let len = kodkod_core::Error::check_len;
    let (e, i, h) = (("experts", own.experts), ("intermediate", own.intermediate), ("hidden", own.hidden));
    if !fused {
        len(gate_name, gate.len(), &[e, i, h])?;
        return len(up_name, up.len(), &[e, i, h]);
    }
    len(gate_name, gate.len(), &[e, ("gate and up", 2), i, h])?;
    let half = own.intermediate * own.hidden;
    let (at, wanted) = (up.address(), gate.address() + (half * size_of::<T>()) as u64);
    if at != wanted || up.len() + half != gate.len() {
        let allowed =
            format!("{gate_name} from element {half} on is needed, where an expert's two lie together");
        return Err(kodkod_core::Error::invalid(
            up_name,
            format!("{} elements elsewhere", up.len()),
            allowed,
        ));
    }
    Ok(())
}
