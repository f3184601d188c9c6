//! One step of a layer with all its inputs; what comes out of it, and how far that is from the reference.

use std::time::{Duration, Instant};

use kodkod::{
    Biases, Element, ExpertGroup, Knobs, MoeLayer, Precision, Result, Routing, Shape, SharedWeights,
    WeightGradients, Weights, reference,
};

/// Weights that a step owns.
#[derive(Debug, Clone)]
pub(crate) struct OwnedWeights<T> {
    pub(crate) gate: Vec<T>, // [experts, intermediate, hidden]
    pub(crate) up: Vec<T>,   // [experts, intermediate, hidden]
    pub(crate) down: Vec<T>, // [experts, hidden, intermediate]
    pub(crate) biases: Option<Biases<Vec<f32>>>,
    pub(crate) shared: Option<SharedWeights<Vec<T>, Vec<f32>>>,
}

impl<T> OwnedWeights<T> {
    pub(crate) fn as_ref(&self) -> Weights<'_, T> {
        Weights {
            gate: &self.gate,
            up: &self.up,
            down: &self.down,
            biases: self.biases.as_ref().map(Biases::as_slices),
            shared: self.shared.as_ref().map(SharedWeights::as_slices),
        }
    }
}

/// The inputs of one step, over the tokens of all ranks.
#[derive(Debug, Clone)]
pub(crate) struct Step<T> {
    pub(crate) shape: Shape,
    pub(crate) x: Vec<T>,              // [tokens, hidden]
    pub(crate) dy: Option<Vec<T>>,     // [tokens, hidden]
    pub(crate) ids: Vec<i64>,          // [tokens, top_k]
    pub(crate) topk_weights: Vec<f32>, // [tokens, top_k]
    pub(crate) weights: OwnedWeights<T>,
}

impl<T: Element> Step<T> {
    pub(crate) fn tokens(&self) -> usize {
        self.ids.len() / self.shape.top_k
    }

    pub(crate) fn routing(&self, tokens_per_rank: &[usize]) -> Result<Routing> {
        Routing::new(&self.shape, &self.ids, &self.topk_weights, tokens_per_rank)
    }

    /// The same step in another storage type.
    pub(crate) fn convert<U: Element>(&self) -> Step<U> {
        let all = |values: &Vec<T>| values.iter().map(|v| U::from_f32(v.to_f32())).collect::<Vec<_>>();
        let w = &self.weights;
        Step {
            shape: self.shape.clone(),
            x: all(&self.x),
            dy: self.dy.as_ref().map(all),
            ids: self.ids.clone(),
            topk_weights: self.topk_weights.clone(),
            weights: OwnedWeights {
                gate: all(&w.gate),
                up: all(&w.up),
                down: all(&w.down),
                biases: w.biases.clone(),
                shared: w.shared.as_ref().map(|s| SharedWeights {
                    gate: all(&s.gate),
                    up: all(&s.up),
                    down: all(&s.down),
                    output_gate: s.output_gate.clone(),
                }),
            },
        }
    }

    /// Runs the forward and, where there is a `dy`, the backward, into gradients full of NaN: what the backward fails
    /// to write shows.
    pub(crate) fn run(
        &self,
        group: &ExpertGroup,
        knobs: Knobs,
        tokens_per_rank: &[usize],
    ) -> Result<Outputs<T>> {
        self.run_into(group, knobs, tokens_per_rank, filled(&self.shape, f32::NAN), false)
    }

    /// The same into given gradients, which are added to where `accumulate` is set.
    pub(crate) fn run_into(
        &self,
        group: &ExpertGroup,
        knobs: Knobs,
        tokens_per_rank: &[usize],
        mut gradients: WeightGradients,
        accumulate: bool,
    ) -> Result<Outputs<T>> {
        let routing = self.routing(tokens_per_rank)?;
        let layer = MoeLayer::<T>::new(group, self.shape.clone(), knobs)?;
        let weights = self.weights.as_ref();
        let start = Instant::now();
        let (y, context) = layer.forward(&self.x, &routing, &weights)?;
        let mut outputs = Outputs { y, gradients: None, forward: start.elapsed(), backward: Duration::ZERO };
        if let Some(dy) = &self.dy {
            let start = Instant::now();
            let (dx, d_topk_weights) =
                layer.backward(&context, dy, &self.x, &routing, &weights, gradients.as_mut(), accumulate)?;
            outputs.backward = start.elapsed();
            outputs.gradients = Some(Gradients { dx, d_topk_weights, weights: gradients });
        }
        Ok(outputs)
    }

    /// What the reference makes of the same inputs.
    pub(crate) fn reference(&self) -> Result<reference::Outputs> {
        let routing = self.routing(&[self.tokens()])?;
        reference::layer(&self.shape, &self.x, self.dy.as_deref(), &routing, &self.weights.as_ref())
    }
}

/// Gradient buffers of a shape, full of one value.
pub(crate) fn filled(shape: &Shape, value: f32) -> WeightGradients {
    let mut gradients = WeightGradients::zeros(shape);
    let all = gradients.as_mut();
    let biases = all.biases.into_iter().flat_map(|b| [b.gate, b.up, b.down]);
    let shared = all.shared.into_iter().flat_map(|s| [s.gate, s.up, s.down].into_iter().chain(s.output_gate));
    [all.gate, all.up, all.down].into_iter().chain(biases).chain(shared).for_each(|b| b.fill(value));
    gradients
}

/// What a step gives.
#[derive(Debug, Clone)]
pub(crate) struct Outputs<T> {
    pub(crate) y: Vec<T>, // [tokens, hidden]
    pub(crate) gradients: Option<Gradients<T>>,
    pub(crate) forward: Duration,
    pub(crate) backward: Duration,
}

/// What a backward gives.
#[derive(Debug, Clone)]
pub(crate) struct Gradients<T> {
    pub(crate) dx: Vec<T>,               // [tokens, hidden]
    pub(crate) d_topk_weights: Vec<f32>, // [tokens, top_k]
    pub(crate) weights: WeightGradients,
}

/// The elements of one output.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Values<'a, T> {
    Rows(&'a [T]),
    F32(&'a [f32]),
}

impl<T: Element> Values<'_, T> {
    pub(crate) fn iter(&self) -> impl Iterator<Item = f32> {
        (0..self.len()).map(|i| self.get(i))
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Values::Rows(v) => v.len(),
            Values::F32(v) => v.len(),
        }
    }

    pub(crate) fn get(&self, i: usize) -> f32 {
        match self {
            Values::Rows(v) => v[i].to_f32(),
            Values::F32(v) => v[i],
        }
    }
}

impl<T: Element> Outputs<T> {
    /// Every output with its name, in the order of [`reference::Outputs::named`].
    pub(crate) fn named(&self) -> Vec<(&'static str, Values<'_, T>)> {
        let mut all = vec![("y", Values::Rows(&self.y[..]))];
        if let Some(g) = &self.gradients {
            all.extend([("dx", Values::Rows(&g.dx[..])), ("d_topk_weights", Values::F32(&g.d_topk_weights))]);
            all.extend(g.weights.named().into_iter().map(|(name, values)| (name, Values::F32(values))));
        }
        all
    }

    /// The first element whose bits differ from another run's, with its output's name.
    pub(crate) fn first_difference(&self, other: &Outputs<T>) -> Option<String> {
        let (ours, theirs) = (self.named(), other.named());
        if ours.len() != theirs.len() {
            return Some(format!("{} outputs and {}", ours.len(), theirs.len()));
        }
        for ((name, a), (_, b)) in ours.iter().zip(&theirs) {
            if a.len() != b.len() {
                return Some(format!("{name}: {} elements and {}", a.len(), b.len()));
            }
            if let Some(i) = (0..a.len()).find(|&i| a.get(i).to_bits() != b.get(i).to_bits()) {
                let (a, b) = (a.get(i), b.get(i));
                return Some(format!(
                    "{name}[{i}]: {a:e} ({:08x}) and {b:e} ({:08x})",
                    a.to_bits(),
                    b.to_bits()
                ));
            }
        }
        None
    }

    /// Holds every output against the reference.
    pub(crate) fn compare(&self, reference: &reference::Outputs) -> Vec<Comparison> {
        let tolerance = tolerance(T::PRECISION);
        let (ours, theirs) = (self.named(), reference.named());
        assert_eq!(ours.len(), theirs.len(), "both have the outputs of the same shape");
        ours.into_iter()
            .zip(theirs)
            .map(|((name, a), (_, b))| Comparison::new(name, a, b, tolerance))
            .collect()
    }
}

/// The largest `sum |error| / sum |reference|` of an output.
pub(crate) fn tolerance(precision: Precision) -> f64 {
    match precision {
        Precision::Bf16 => 0.01,
        Precision::F32 => 1e-5,
    }
}

/// How far one output is from the reference.
#[derive(Debug, Clone)]
pub(crate) struct Comparison {
    pub(crate) name: &'static str,
    /// `sum |error| / sum |reference|` over the elements that are finite in the reference.
    pub(crate) error: f64,
    /// What is wrong, if anything is.
    pub(crate) miss: Option<String>,
}

impl Comparison {
    fn new<T: Element>(name: &'static str, ours: Values<T>, reference: &[f64], tolerance: f64) -> Self {
        let miss =
            |text: String| Comparison { name, error: f64::INFINITY, miss: Some(format!("{name}{text}")) };
        if ours.len() != reference.len() {
            return miss(format!(" has {} elements, expected {}", ours.len(), reference.len()));
        }
        let (mut sum_error, mut sum_reference) = (0.0, 0.0);
        let (mut worst, mut at) = (0.0, 0);
        for (i, &r) in reference.iter().enumerate() {
            let v = ours.get(i);
            // Beyond the range of f32 (and bf16) the reference counts as infinite.
            let finite = r.abs() <= f64::from(f32::MAX);
            if finite != v.is_finite() {
                return miss(format!("[{i}] is {v:e}, expected {r:e}"));
            }
            if finite {
                let error = (f64::from(v) - r).abs();
                sum_error += error;
                sum_reference += r.abs();
                if error > worst {
                    (worst, at) = (error, i);
                }
            }
        }
        let error = if sum_error == 0.0 { 0.0 } else { sum_error / sum_reference };
        let miss = (error > tolerance).then(|| {
            format!(
                "{name} is off by {error:.3e} of its sum (allowed {tolerance:e}); worst at [{at}]: {:e}, expected {:e}",
                ours.get(at),
                reference[at]
            )
        });
        Comparison { name, error, miss }
    }
}
