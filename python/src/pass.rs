//! A forward or a backward of the layer over the caller's memory.

use std::sync::Arc;

use kodkod::{
    Activation, Biases, Element, Error, ExpertGroup, GradientElement, Knobs, MoeLayer, RankContext,
    RankLayer, Result, Routing, Shape, Shared, SharedWeights, WeightGradients, Weights, bf16,
};
use pyo3::prelude::*;

use crate::context::{self, Kept, Left};
use crate::errors::{exception, without_lock};
use crate::groups::group;
use crate::memory::{Span, elements, elements_mut};

/// Hidden, intermediate, experts with weights here, top-k, shared intermediate (0: none), output gate, biases.
type Sizes = (usize, usize, usize, usize, usize, bool, bool);
/// Name, limit, alpha.
type Act = (String, Option<f32>, f32);
/// The fields of [`Knobs`] in their order; `None` is the default.
type KnobValues = [Option<usize>; 5];
/// Gate, up, down; their biases; the shared gate, up, down and output gate.
pub(crate) type Parts = [Option<Span>; 10];

/// What calls of the same shapes and options share: all but the tensors.
#[pyclass(frozen, module = "kodkod._kodkod")]
pub(crate) struct Config {
    group: usize,
    sizes: Sizes,
    activation: Act,
    knobs: KnobValues,
    f32: bool,
    wide: bool,
    fused: bool,
    counts: Vec<usize>,
}

#[pymethods]
impl Config {
    /// `f32`: rows and weights are, else `bf16`. `wide`: ids are 64-bit, else 32. `fused`: gate and up are one tensor, in gate's
    /// place. `counts`: elements of x, ids, router weights and each weight that there is, in the order of [`Parts`].
    #[new]
    fn new(
        group: usize,
        sizes: Sizes,
        activation: Act,
        knobs: KnobValues,
        f32: bool,
        wide: bool,
        fused: bool,
        counts: Vec<usize>,
    ) -> PyResult<Self> {
        let config = Config { group, sizes, activation, knobs, f32, wide, fused, counts };
        let needed = 3 + config.present().into_iter().filter(|&present| present).count();
        Error::check_len("counts", config.counts.len(), &[("tensors", needed)]).map_err(|e| exception(&e))?;
        Ok(config)
    }
}

impl Config {
    /// The layer's shape, with the experts of all ranks where those are not the ones with weights here.
    pub(crate) fn shape(&self, experts: Option<usize>) -> Result<Shape> {
        let (hidden, intermediate, with_weights, top_k, shared, output_gate, biases) = self.sizes;
        let (name, limit, alpha) = &self.activation;
        let (limit, alpha) = (*limit, *alpha);
        let activation = match name.as_str() {
            "swiglu" => Activation::SwiGlu { limit },
            "swiglu_oai" => Activation::SwiGluOai { alpha, limit },
            _ => {
                let allowed = "swiglu and swiglu_oai are allowed";
                return Err(Error::invalid("activation", format!("{name:?}"), allowed));
            }
        };
        let shared = (shared > 0).then_some(Shared { intermediate: shared, output_gate });
        let experts = experts.unwrap_or(with_weights);
        Ok(Shape { hidden, intermediate, experts, top_k, shared, activation, biases })
    }

    /// The defaults with what the caller gave.
    pub(crate) fn knobs(&self, default: Knobs) -> Knobs {
        let [fwd_comm_sms, bwd_comm_sms, minibatch, ring, saved] = self.knobs;
        let mut knobs = default.with_rows(minibatch, ring, saved);
        knobs.fwd_comm_sms = fwd_comm_sms.unwrap_or(knobs.fwd_comm_sms);
        knobs.bwd_comm_sms = bwd_comm_sms.unwrap_or(knobs.bwd_comm_sms);
        knobs
    }

    /// Whether rows and weights are `f32`, else `bf16`.
    pub(crate) fn f32(&self) -> bool {
        self.f32
    }

    pub(crate) fn group(&self) -> usize {
        self.group
    }

    /// Elements of an expert's gate, where its up lies behind it.
    pub(crate) fn fused(&self) -> Option<usize> {
        self.fused.then(|| self.sizes.0.saturating_mul(self.sizes.1))
    }

    /// With weights here.
    pub(crate) fn experts(&self) -> usize {
        self.sizes.2
    }

    /// Which of a layer's weights there are.
    fn present(&self) -> [bool; 10] {
        let (.., shared, output_gate, biases) = self.sizes;
        let shared = shared > 0;
        [true, !self.fused, true, biases, biases, biases, shared, shared, shared, output_gate]
    }

    /// Tensors of these addresses: x, ids, router weights, weights.
    pub(crate) fn inputs(&self, addresses: &[usize]) -> Result<Inputs> {
        let [x, ids, topk_weights, weights @ ..] = addresses else {
            return Err(Error::invalid("addresses", addresses.len(), "those of all tensors are needed"));
        };
        let (x, ids, topk_weights) = (self.rows(*x), self.routes(*ids), self.routes(*topk_weights));
        Ok((x, ids, self.wide, topk_weights, self.parts(weights)?))
    }

    /// Rows as those of x.
    pub(crate) fn rows(&self, address: usize) -> Span {
        (address, self.counts[0])
    }

    /// A number a route.
    pub(crate) fn routes(&self, address: usize) -> Span {
        (address, self.counts[1])
    }

    /// Weights, or gradients of their shapes.
    pub(crate) fn parts(&self, addresses: &[usize]) -> Result<Parts> {
        let counts = &self.counts[3..];
        Error::check_len("addresses", addresses.len(), &[("weights", counts.len())])?;
        let mut spans = addresses.iter().copied().zip(counts.iter().copied());
        Ok(self.present().map(|present| if present { spans.next() } else { None }))
    }
}

/// A call's inputs: x, ids, whether those are 64-bit, router weights, weights.
pub(crate) type Inputs = (Span, Span, bool, Span, Parts);

struct Call {
    group: ExpertGroup,
    shape: Shape,
    knobs: Knobs,
    f32: bool,
    inputs: Inputs,
}

impl Call {
    fn new(py: Python<'_>, config: &Config, addresses: &[usize]) -> PyResult<Self> {
        let group = group(py, config.group)?;
        // A process has the weights of its own experts alone.
        let all = group.rank().map(|_| config.sizes.2.saturating_mul(group.ranks()));
        let shape = match config.shape(all) {
            Ok(shape) => shape,
            Err(error) => return without_lock(py, || Err(group.refuse(error))),
        };
        let knobs = config.knobs(Knobs::for_shape(&shape));
        let inputs = config.inputs(addresses).map_err(|e| exception(&e))?;
        Ok(Call { group, shape, knobs, f32: config.f32(), inputs })
    }

    fn layer<T: Element>(&self) -> Result<MoeLayer<T>> {
        MoeLayer::new(&self.group, self.shape.clone(), self.knobs)
    }

    fn rank_layer<T: Element>(&self) -> Result<RankLayer<T>> {
        RankLayer::new(&self.group, self.shape.clone(), self.knobs)
    }

    /// `y`, and what the backward needs.
    ///
    /// # Safety
    /// As for [`elements`], for all inputs.
    unsafe fn forward<T: Element>(&self) -> Result<(Vec<T>, Left<T>)> {
        // SAFETY: the caller's promise.
        unsafe {
            if self.group.rank().is_some() {
                let (y, context) = self.rank_forward()?;
                return Ok((y, Left::Part(context)));
            }
            let (y, context) = self.layer::<T>()?.forward(self.x()?, &self.routing()?, &self.weights()?)?;
            Ok((y, Left::Whole(context)))
        }
    }

    /// # Safety
    /// As for [`elements`], for all inputs.
    unsafe fn rank_forward<T: Element>(&self) -> Result<(Vec<T>, RankContext<T>)> {
        // SAFETY: the caller's promise.
        unsafe {
            match self.inputs.2 {
                true => self.rank_forward_of::<T, i64>(),
                false => self.rank_forward_of::<T, i32>(),
            }
        }
    }

    /// # Safety
    /// As for [`elements`], for all inputs; ids are of type `I`.
    unsafe fn rank_forward_of<T: Element, I: Copy + Into<i64>>(&self) -> Result<(Vec<T>, RankContext<T>)> {
        // SAFETY: the caller's promise.
        let inputs = || unsafe {
            let (_, ids, _, topk_weights, _) = self.inputs;
            let ids = elements::<I>("topk_ids", ids)?;
            let topk_weights = elements("topk_weights", topk_weights)?;
            Ok((self.rank_layer()?, self.x()?, ids, topk_weights, self.weights()?))
        };
        // The layer's errors reach every rank; one before its call would leave them waiting.
        let (layer, x, ids, topk_weights, weights) = inputs().map_err(|e| self.group.refuse(e))?;
        layer.forward(x, ids, topk_weights, &weights)
    }

    /// `dx` and `d_topk_weights`. Where `left` is none, or of another kind of group, the forward runs again.
    ///
    /// # Safety
    /// As for [`elements`], for all inputs and `dy`; as for [`elements_mut`], for all gradients.
    unsafe fn backward<T: Element, G: GradientElement>(
        &self,
        left: Option<&Left<T>>,
        dy: Span,
        parts: Parts,
        accumulate: bool,
    ) -> Result<(Vec<T>, Vec<f32>)> {
        // SAFETY: the caller's promise.
        unsafe {
            if self.group.rank().is_some() {
                let again;
                let context = match left {
                    Some(Left::Part(context)) => context,
                    _ => {
                        again = self.rank_forward()?.1;
                        &again
                    }
                };
                let inputs = || {
                    let (layer, x, weights) = (self.rank_layer()?, self.x()?, self.weights()?);
                    Ok((layer, elements("dy", dy)?, x, weights, gradients::<G>(parts)?))
                };
                let (layer, dy, x, weights, gradients) = inputs().map_err(|e| self.group.refuse(e))?;
                return layer.backward(context, dy, x, &weights, gradients, accumulate);
            }
            let (layer, x, routing, weights) =
                (self.layer::<T>()?, self.x()?, self.routing()?, self.weights()?);
            let again;
            let context = match left {
                Some(Left::Whole(context)) => context,
                _ => {
                    again = layer.forward(x, &routing, &weights)?.1;
                    &again
                }
            };
            let (dy, gradients) = (elements("dy", dy)?, gradients::<G>(parts)?);
            layer.backward(context, dy, x, &routing, &weights, gradients, accumulate)
        }
    }

    /// # Safety
    /// As for [`elements`], for all inputs.
    unsafe fn routing(&self) -> Result<Routing> {
        let (_, ids, wide, topk_weights, _) = self.inputs;
        let ranks = self.group.ranks();
        let split = Routing::even_split(ids.1 / self.shape.top_k.max(1), ranks);
        // SAFETY: the caller's promise.
        unsafe {
            let weights = elements("topk_weights", topk_weights)?;
            match wide {
                true => Routing::new(&self.shape, elements::<i64>("topk_ids", ids)?, weights, &split),
                false => Routing::new(&self.shape, elements::<i32>("topk_ids", ids)?, weights, &split),
            }
        }
    }

    /// # Safety
    /// As for [`elements`], for all inputs.
    unsafe fn weights<'a, T>(&self) -> Result<Weights<'a, T>> {
        let [gate, up, down, b_gate, b_up, b_down, s_gate, s_up, s_down, s_output_gate] = self.inputs.4;
        // SAFETY: the caller's promise.
        unsafe {
            Ok(Weights {
                gate: elements("w_gate", given("w_gate", gate)?)?,
                up: elements("w_up", given("w_up", up)?)?,
                down: elements("w_down", given("w_down", down)?)?,
                biases: match b_gate {
                    None => None,
                    Some(b_gate) => Some(Biases {
                        gate: elements("b_gate", b_gate)?,
                        up: elements("b_up", given("b_up", b_up)?)?,
                        down: elements("b_down", given("b_down", b_down)?)?,
                    }),
                },
                shared: match s_gate {
                    None => None,
                    Some(s_gate) => Some(SharedWeights {
                        gate: elements("shared_gate", s_gate)?,
                        up: elements("shared_up", given("shared_up", s_up)?)?,
                        down: elements("shared_down", given("shared_down", s_down)?)?,
                        output_gate: s_output_gate.map(|g| elements("shared_output_gate", g)).transpose()?,
                    }),
                },
            })
        }
    }

    /// # Safety
    /// As for [`elements`], for all inputs.
    unsafe fn x<'a, T>(&self) -> Result<&'a [T]> {
        // SAFETY: the caller's promise.
        unsafe { elements("x", self.inputs.0) }
    }
}

pub(crate) fn given(name: &str, span: Option<Span>) -> Result<Span> {
    span.ok_or_else(|| Error::invalid(name, "missing", "it goes with the others of its kind"))
}

/// # Safety
/// As for [`elements_mut`], for all parts.
unsafe fn gradients<'a, G>(parts: Parts) -> Result<WeightGradients<&'a mut [G], &'a mut [f32]>> {
    let [gate, up, down, b_gate, b_up, b_down, s_gate, s_up, s_down, s_output_gate] = parts;
    // SAFETY: the caller's promise.
    unsafe {
        Ok(WeightGradients {
            gate: elements_mut("dw_gate", given("dw_gate", gate)?)?,
            up: elements_mut("dw_up", given("dw_up", up)?)?,
            down: elements_mut("dw_down", given("dw_down", down)?)?,
            biases: match b_gate {
                None => None,
                Some(b_gate) => Some(Biases {
                    gate: elements_mut("db_gate", b_gate)?,
                    up: elements_mut("db_up", given("db_up", b_up)?)?,
                    down: elements_mut("db_down", given("db_down", b_down)?)?,
                }),
            },
            shared: match s_gate {
                None => None,
                Some(s_gate) => Some(SharedWeights {
                    gate: elements_mut("d_shared_gate", s_gate)?,
                    up: elements_mut("d_shared_up", given("d_shared_up", s_up)?)?,
                    down: elements_mut("d_shared_down", given("d_shared_down", s_down)?)?,
                    output_gate: s_output_gate
                        .map(|g| elements_mut("d_shared_output_gate", g))
                        .transpose()?,
                }),
            },
        })
    }
}

/// Copies a result to where the caller wants it.
///
/// # Safety
/// As for [`elements_mut`].
unsafe fn write<T: Copy>(name: &str, values: &[T], to: Span) -> Result<()> {
    Error::check_len(name, to.1, &[("elements", values.len())])?;
    // SAFETY: the caller's promise.
    unsafe { elements_mut(name, to)? }.copy_from_slice(values);
    Ok(())
}

/// Writes `y`; with `keep` it returns the DLPack capsule of the context. The addresses are the caller's memory, which nobody
/// may write during the call.
#[pyfunction]
pub(crate) fn forward(
    py: Python<'_>,
    config: &Config,
    inputs: Vec<usize>,
    y: usize,
    keep: bool,
) -> PyResult<Option<Py<PyAny>>> {
    fn run<T: Element>(call: &Call, y: Span) -> Result<Left<T>> {
        // SAFETY: the addresses are of live tensors of these types: `kodkod._ops` holds them for the call, and `y` is new.
        unsafe {
            let (out, left) = call.forward()?;
            write("y", &out, y)?;
            Ok(left)
        }
    }
    let call = Call::new(py, config, &inputs)?;
    let y = config.rows(y);
    let kept = without_lock(py, || {
        let kept = match call.f32 {
            true => Kept::F32(run(&call, y)?),
            false => Kept::Bf16(run(&call, y)?),
        };
        Ok(keep.then_some(kept))
    })?;
    kept.map(|kept| context::capsule(py, kept)).transpose()
}

/// Writes or, with `accumulate`, adds all gradients; those of gate, up and down are `f32` if `f32_gradients`, else `bf16`. Where
/// the context at `context` is gone, the forward runs again.
#[pyfunction]
pub(crate) fn backward(
    py: Python<'_>,
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
    fn run<T: Element, G: GradientElement>(
        call: &Call,
        left: Option<&Left<T>>,
        dy: Span,
        dx: Span,
        d_topk_weights: Span,
        parts: Parts,
        accumulate: bool,
    ) -> Result<()> {
        // SAFETY: the addresses are of live tensors of these types: `kodkod._ops` holds them for the call, and those that are
        // written are new, or accumulators that the caller gave for that.
        unsafe {
            let (out, d_w) = call.backward::<T, G>(left, dy, parts, accumulate)?;
            write("dx", &out, dx)?;
            write("d_topk_weights", &d_w, d_topk_weights)
        }
    }
    let call = Call::new(py, config, &inputs)?;
    let kept = context::find(context);
    let (dy, dx, d_w) = (config.rows(dy), config.rows(dx), config.routes(d_topk_weights));
    let parts = config.parts(&weight_gradients).map_err(|e| exception(&e))?;
    without_lock(py, || {
        let (kept_f32, kept_bf16): (Option<&Left<f32>>, Option<&Left<bf16>>) =
            match kept.as_ref().map(Arc::as_ref) {
                Some(Kept::F32(left)) => (Some(left), None),
                Some(Kept::Bf16(left)) => (None, Some(left)),
                Some(Kept::Gpu(_) | Kept::GpuRank(_)) | None => (None, None),
            };
        match (call.f32, f32_gradients) {
            (true, true) => run::<f32, f32>(&call, kept_f32, dy, dx, d_w, parts, accumulate),
            (true, false) => run::<f32, bf16>(&call, kept_f32, dy, dx, d_w, parts, accumulate),
            (false, true) => run::<bf16, f32>(&call, kept_bf16, dy, dx, d_w, parts, accumulate),
            (false, false) => run::<bf16, bf16>(&call, kept_bf16, dy, dx, d_w, parts, accumulate),
        }
    })
}
