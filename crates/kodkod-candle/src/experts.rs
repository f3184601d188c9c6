//! The experts as one candle op.
//!
//! ```text
//! y[t] = shared(x[t]) + sum over k = 0..top_k of w[t, k] * expert_{ids[t, k]}(x[t])
//! ```
//!
//! candle's ops take at most three inputs, and this one has up to twelve. Copying all weights into one tensor, in
//! every forward and again in every backward, would cost more than some layers. So the weights enter the graph by
//! *links*: a link is an op of up to three weights with a one-element result, and the sum of the links is the third
//! input of the layer's op. Its backward leaves the weights' gradients in cells, hands one zero to the links, and
//! each link's backward, which candle runs later, takes its gradients out of its cells.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{
    CpuStorage, CustomOp1, CustomOp3, DType, Error, Layout, Result, Storage, Tensor, WithDType, bail,
};
use candle_nn::{Init, VarBuilder};
use half::bf16;
use kodkod::{Biases, Context, Element, ExpertGroup, Knobs, Precision, Routing, Shape, SharedWeights};
use kodkod::{WeightGradients, Weights};

/// Master weights of all experts, in `f32`; gradients flow to those that are variables.
#[derive(Debug, Clone)]
pub struct ExpertWeights {
    /// `[experts, intermediate, hidden]`
    pub gate: Tensor,
    /// `[experts, intermediate, hidden]`
    pub up: Tensor,
    /// `[experts, hidden, intermediate]`
    pub down: Tensor,
    /// Given where [`Shape::biases`] is set.
    pub biases: Option<Biases<Tensor>>,
    /// Given where [`Shape::shared`] is.
    pub shared: Option<SharedWeights<Tensor, Tensor>>,
}

impl ExpertWeights {
    /// Takes `w_gate`, `w_up`, `w_down`, and where the shape has them `b_gate`, `b_up`, `b_down`, `shared_gate`, `shared_up`,
    /// `shared_down` and `shared_output_gate` `[1, hidden]` from `vb`.
    ///
    /// # Errors
    /// Where a tensor is missing or has another shape.
    pub fn new(shape: &Shape, vb: VarBuilder) -> Result<Self> {
        let (e, h, i) = (shape.experts, shape.hidden, shape.intermediate);
        let weight = |name: &str, dims: &[usize]| {
            let stdev = (dims[dims.len() - 1].max(1) as f64).powf(-0.5);
            vb.get_with_hints(dims, name, Init::Randn { mean: 0.0, stdev })?.to_dtype(DType::F32)
        };
        let bias = |name: &str, dims: &[usize]| {
            vb.get_with_hints(dims, name, Init::Const(0.0))?.to_dtype(DType::F32)
        };
        let biases = match shape.biases {
            true => Some(Biases {
                gate: bias("b_gate", &[e, i])?,
                up: bias("b_up", &[e, i])?,
                down: bias("b_down", &[e, h])?,
            }),
            false => None,
        };
        let shared = |s: kodkod::Shared| -> Result<_> {
            let gate = if s.output_gate { Some(weight("shared_output_gate", &[1, h])?) } else { None };
            Ok(SharedWeights {
                gate: weight("shared_gate", &[s.intermediate, h])?,
                up: weight("shared_up", &[s.intermediate, h])?,
                down: weight("shared_down", &[h, s.intermediate])?,
                output_gate: gate,
            })
        };
        Ok(ExpertWeights {
            gate: weight("w_gate", &[e, i, h])?,
            up: weight("w_up", &[e, i, h])?,
            down: weight("w_down", &[e, h, i])?,
            biases,
            shared: shape.shared.map(shared).transpose()?,
        })
    }

    /// The weights by links: each is up to three tensors, in the order of [`WeightGradients::named`].
    fn links(&self) -> Vec<Vec<&Tensor>> {
        let mut links = vec![vec![&self.gate, &self.up, &self.down]];
        links.extend(self.biases.as_ref().map(|b| vec![&b.gate, &b.up, &b.down]));
        if let Some(s) = &self.shared {
            links.push(vec![&s.gate, &s.up, &s.down]);
            links.extend(s.output_gate.as_ref().map(|g| vec![g]));
        }
        links
    }
}

/// All experts of a layer, routed and shared.
#[derive(Debug, Clone)]
pub struct MoeExperts {
    weights: ExpertWeights,
    ranks: usize,
    engine: Engine,
}

#[derive(Debug, Clone)]
enum Engine {
    Bf16(Arc<kodkod::MoeLayer<bf16>>),
    F32(Arc<kodkod::MoeLayer<f32>>),
}

impl MoeExperts {
    /// Experts of a shape, run by a group. In bf16, rows and weights are rounded inside the op; `knobs` change no bit.
    ///
    /// # Errors
    /// Where a size or knob is not allowed, or the group's ranks do not divide the experts.
    pub fn new(
        group: &ExpertGroup,
        shape: Shape,
        knobs: Knobs,
        precision: Precision,
        weights: ExpertWeights,
    ) -> Result<Self> {
        let engine = match precision {
            Precision::Bf16 => {
                Engine::Bf16(Arc::new(kodkod::MoeLayer::new(group, shape, knobs).map_err(Error::wrap)?))
            }
            Precision::F32 => {
                Engine::F32(Arc::new(kodkod::MoeLayer::new(group, shape, knobs).map_err(Error::wrap)?))
            }
        };
        Ok(MoeExperts { weights, ranks: group.ranks(), engine })
    }

    /// The weights.
    pub fn weights(&self) -> &ExpertWeights {
        &self.weights
    }

    /// The layer's shape.
    pub fn shape(&self) -> &Shape {
        match &self.engine {
            Engine::Bf16(layer) => layer.shape(),
            Engine::F32(layer) => layer.shape(),
        }
    }

    /// `y` `[tokens, hidden]` for `x` `[tokens, hidden]`, expert ids and their weights `[tokens, top_k]`; id -1 means no
    /// route. The tokens are dealt to the ranks as evenly as can be.
    ///
    /// # Errors
    /// Where shapes disagree, an id is not an expert, or a pass was given up.
    pub fn forward(&self, x: &Tensor, ids: &[i32], weights: &Tensor) -> Result<Tensor> {
        let tokens = x.dims2()?.0;
        self.forward_split(x, ids, weights, &Routing::even_split(tokens, self.ranks))
    }

    /// The same, where rank r holds the next `tokens_per_rank[r]` tokens. The split changes no bit.
    ///
    /// # Errors
    /// As [`MoeExperts::forward`], and where the split does not add up.
    pub fn forward_split(
        &self,
        x: &Tensor,
        ids: &[i32],
        weights: &Tensor,
        tokens_per_rank: &[usize],
    ) -> Result<Tensor> {
        match &self.engine {
            Engine::Bf16(layer) => self.apply(layer, x, ids, weights, tokens_per_rank),
            Engine::F32(layer) => self.apply(layer, x, ids, weights, tokens_per_rank),
        }
    }

    fn apply<T: Element>(
        &self,
        layer: &Arc<kodkod::MoeLayer<T>>,
        x: &Tensor,
        ids: &[i32],
        topk_weights: &Tensor,
        tokens_per_rank: &[usize],
    ) -> Result<Tensor> {
        let shape = layer.shape();
        let (tokens, hidden) = x.dims2()?;
        if hidden != shape.hidden {
            bail!("x is {:?}: the layer needs rows of width {}", x.dims(), shape.hidden)
        }
        if topk_weights.dims() != [tokens, shape.top_k] {
            bail!("topk_weights is {:?}: [{tokens}, {}] is needed", topk_weights.dims(), shape.top_k)
        }
        let mut links: Option<Tensor> = None;
        let mut cells = Vec::new();
        for tensors in self.weights.links() {
            let own: Vec<Cell> = tensors.iter().map(|_| Cell::default()).collect();
            cells.extend(own.iter().cloned());
            let link = match tensors[..] {
                [a, b, c] => a.apply_op3(b, c, Link(own))?,
                _ => tensors[0].apply_op1(Link(own))?,
            };
            links = Some(match links {
                Some(sum) => (sum + link)?,
                None => link,
            });
        }
        let Some(links) = links else { bail!("a layer has weights") };
        let op = ExpertsOp {
            layer: layer.clone(),
            weights: self.weights.clone(),
            ids: ids.to_vec(),
            tokens_per_rank: tokens_per_rank.to_vec(),
            saved: Mutex::default(),
            cells,
        };
        let f32 = |t: &Tensor| t.to_dtype(DType::F32)?.contiguous();
        f32(x)?.apply_op3(&f32(topk_weights)?, &links, op)?.to_dtype(x.dtype())
    }
}

/// Where a gradient waits between the backward of the layer and that of a link.
type Cell = Arc<Mutex<Option<Tensor>>>;

/// A lock whose holder cannot leave half a value behind, so a panic elsewhere does not spoil it.
fn lock<V>(mutex: &Mutex<V>) -> MutexGuard<'_, V> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Up to three weights in, one zero out; see the top of the file.
struct Link(Vec<Cell>);

impl Link {
    fn result(&self) -> Result<(CpuStorage, candle_core::Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), 1.into()))
    }

    /// The gradient in a cell, which must be there: candle runs a link's backward after that of the layer.
    fn take(&self, i: usize) -> Result<Option<Tensor>> {
        match lock(&self.0[i]).take() {
            Some(gradient) => Ok(Some(gradient)),
            None => bail!("the backward of a weight of an MoE layer ran before that of the layer"),
        }
    }
}

impl CustomOp1 for Link {
    fn name(&self) -> &'static str {
        "kodkod-moe-weight"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, candle_core::Shape)> {
        self.result()
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        self.take(0)
    }
}

impl CustomOp3 for Link {
    fn name(&self) -> &'static str {
        "kodkod-moe-weights"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, candle_core::Shape)> {
        self.result()
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Ok((self.take(0)?, self.take(1)?, self.take(2)?))
    }
}

/// The layer's op: `x` `[tokens, hidden]`, `topk_weights` `[tokens, top_k]` and the links in, `y` `[tokens, hidden]` out.
struct ExpertsOp<T> {
    layer: Arc<kodkod::MoeLayer<T>>,
    weights: ExpertWeights,
    ids: Vec<i32>,
    tokens_per_rank: Vec<usize>,
    /// What the forward leaves for the backward. It stays, so that a graph can be walked more than once.
    saved: Mutex<Option<Saved<T>>>,
    /// One a weight, in the order of [`WeightGradients::named`].
    cells: Vec<Cell>,
}

/// A forward's inputs as the layer saw them, and its context.
struct Saved<T> {
    x: Vec<T>,
    routing: Routing,
    weights: Owned<T>,
    context: Context<T>,
}

/// [`Weights`] that own what they point to: rounded, or for biases and the output gate copied.
struct Owned<T> {
    gate: Vec<T>,
    up: Vec<T>,
    down: Vec<T>,
    biases: Option<Biases<Vec<f32>>>,
    shared: Option<SharedWeights<Vec<T>, Vec<f32>>>,
}

impl<T: Element> Owned<T> {
    fn of(w: &ExpertWeights) -> Result<Self> {
        let biases = w.biases.as_ref().map(|b| -> Result<_> {
            Ok(Biases { gate: rounded(&b.gate)?, up: rounded(&b.up)?, down: rounded(&b.down)? })
        });
        let shared = w.shared.as_ref().map(|s| -> Result<_> {
            let output_gate = s.output_gate.as_ref().map(rounded).transpose()?;
            Ok(SharedWeights {
                gate: rounded(&s.gate)?,
                up: rounded(&s.up)?,
                down: rounded(&s.down)?,
                output_gate,
            })
        });
        Ok(Owned {
            gate: rounded(&w.gate)?,
            up: rounded(&w.up)?,
            down: rounded(&w.down)?,
            biases: biases.transpose()?,
            shared: shared.transpose()?,
        })
    }

    fn view(&self) -> Weights<'_, T> {
        Weights {
            gate: &self.gate,
            up: &self.up,
            down: &self.down,
            biases: self.biases.as_ref().map(Biases::as_slices),
            shared: self.shared.as_ref().map(SharedWeights::as_slices),
        }
    }
}

/// A tensor's `f32` elements, row-major, rounded to `T`.
fn rounded<T: Element>(tensor: &Tensor) -> Result<Vec<T>> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => Ok(slice(storage, layout)?.iter().map(|&v| T::from_f32(v)).collect()),
        _ => bail!("a tensor of an MoE layer is on {:?}: this layer runs on the CPU", tensor.device()),
    }
}

fn slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&f32::cpu_storage_as_slice(storage)?[start..end]),
        None => bail!("an MoE layer needs contiguous inputs"),
    }
}

fn widened<T: Element>(values: &[T]) -> Vec<f32> {
    values.iter().map(|v| v.to_f32()).collect()
}

impl<T: Element> CustomOp3 for ExpertsOp<T> {
    fn name(&self) -> &'static str {
        "kodkod-moe"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        topk_weights: &CpuStorage,
        topk_layout: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, candle_core::Shape)> {
        let x: Vec<T> = slice(x, x_layout)?.iter().map(|&v| T::from_f32(v)).collect();
        let topk_weights = slice(topk_weights, topk_layout)?;
        let routing = Routing::new(self.layer.shape(), &self.ids, topk_weights, &self.tokens_per_rank);
        let routing = routing.map_err(Error::wrap)?;
        let weights = Owned::of(&self.weights)?;
        let (y, context) = self.layer.forward(&x, &routing, &weights.view()).map_err(Error::wrap)?;
        *lock(&self.saved) = Some(Saved { x, routing, weights, context });
        Ok((CpuStorage::F32(widened(&y)), x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        topk_weights: &Tensor,
        links: &Tensor,
        _: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let saved = lock(&self.saved);
        let Some(Saved { x: rows, routing, weights, context }) = &*saved else {
            bail!("the backward of an MoE layer ran before its forward")
        };
        let mut gradients = WeightGradients::zeros(self.layer.shape());
        let dy = rounded(dy)?;
        let (dx, d_topk_weights) = self
            .layer
            .backward(context, &dy, rows, routing, &weights.view(), gradients.as_mut(), false)
            .map_err(Error::wrap)?;
        let tensors = self.weights.links().concat();
        for ((cell, tensor), gradient) in self.cells.iter().zip(tensors).zip(in_order(gradients)) {
            *lock(cell) = Some(Tensor::from_vec(gradient, tensor.shape(), tensor.device())?);
        }
        Ok((
            Some(Tensor::from_vec(widened(&dx), x.shape(), x.device())?),
            Some(Tensor::from_vec(d_topk_weights, topk_weights.shape(), x.device())?),
            Some(links.zeros_like()?),
        ))
    }
}

/// The gradients in the order of [`WeightGradients::named`], without copies.
fn in_order(g: WeightGradients) -> Vec<Vec<f32>> {
    let mut all = vec![g.gate, g.up, g.down];
    all.extend(g.biases.into_iter().flat_map(|b| [b.gate, b.up, b.down]));
    if let Some(s) = g.shared {
        all.extend([s.gate, s.up, s.down]);
        all.extend(s.output_gate);
    }
    all
}
