//! What a caller has on the GPU: weights, gradients, and a step's rows and routes.

use half::bf16;
use kodkod_core::{Biases, GradientElement, Shape, SharedWeights, WeightGradients, Weights};

use crate::driver::{Buffer, Stream};
use crate::error::Result;

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
