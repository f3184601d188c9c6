//! One step of a layer with random numbers, and what came out of it.
#![allow(dead_code, reason = "each test file uses a part")]

use kodkod::{
    Activation, Biases, CpuOptions, Element, ExpertGroup, GradientElement, Knobs, MoeLayer, Result, Routing,
    Shape, Shared, SharedWeights, WeightGradients, Weights, bf16, reference,
};

/// xorshift64*, as numbers in -1..1.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 33) as usize % n
    }

    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(crate) fn list<T: Element>(&mut self, n: usize, scale: f32) -> Vec<T> {
        (0..n).map(|_| T::from_f32(scale * self.unit())).collect()
    }
}

pub(crate) struct Step<T> {
    pub(crate) shape: Shape,
    pub(crate) ids: Vec<i32>,
    pub(crate) topk_weights: Vec<f32>,
    pub(crate) x: Vec<T>,
    pub(crate) dy: Vec<T>,
    pub(crate) gate: Vec<T>,
    pub(crate) up: Vec<T>,
    pub(crate) down: Vec<T>,
    pub(crate) biases: Option<Biases<Vec<f32>>>,
    pub(crate) shared: Option<SharedWeights<Vec<T>, Vec<f32>>>,
}

impl<T: Element> Step<T> {
    /// `tokens` tokens; about one route in eight is -1, about one repeats the expert before it.
    pub(crate) fn random(shape: Shape, tokens: usize, seed: u64) -> Self {
        let mut r = Random(seed);
        let (h, i, e, k) = (shape.hidden, shape.intermediate, shape.experts, shape.top_k);
        let mut ids: Vec<i32> = Vec::new();
        for route in 0..tokens * k {
            ids.push(match r.below(8) {
                0 => -1,
                1 if !route.is_multiple_of(k) => ids[route - 1],
                _ => r.below(e) as i32,
            });
        }
        Step {
            topk_weights: r.list(tokens * k, 1.0),
            x: r.list(tokens * h, 1.7),
            dy: r.list(tokens * h, 1.7),
            gate: r.list(e * i * h, 1.7 / (h as f32).sqrt()),
            up: r.list(e * i * h, 1.7 / (h as f32).sqrt()),
            down: r.list(e * i * h, 1.7 / (i as f32).sqrt()),
            biases: shape.biases.then(|| Biases {
                gate: r.list(e * i, 0.5),
                up: r.list(e * i, 0.5),
                down: r.list(e * h, 0.5),
            }),
            shared: shape.shared.map(|s| SharedWeights {
                gate: r.list(s.intermediate * h, 1.7 / (h as f32).sqrt()),
                up: r.list(s.intermediate * h, 1.7 / (h as f32).sqrt()),
                down: r.list(s.intermediate * h, 1.7 / (s.intermediate as f32).sqrt()),
                output_gate: s.output_gate.then(|| r.list(h, 1.7 / (h as f32).sqrt())),
            }),
            shape,
            ids,
        }
    }

    pub(crate) fn tokens(&self) -> usize {
        self.ids.len() / self.shape.top_k
    }

    pub(crate) fn routing(&self, tokens_per_rank: &[usize]) -> Result<Routing> {
        Routing::new(&self.shape, &self.ids, &self.topk_weights, tokens_per_rank)
    }

    pub(crate) fn weights(&self) -> Weights<'_, T> {
        Weights {
            gate: &self.gate,
            up: &self.up,
            down: &self.down,
            biases: self.biases.as_ref().map(Biases::as_slices),
            shared: self.shared.as_ref().map(SharedWeights::as_slices),
        }
    }

    pub(crate) fn reference(&self) -> reference::Outputs {
        let routing = self.routing(&[self.tokens()]).expect("right inputs");
        reference::layer(&self.shape, &self.x, Some(&self.dy), &routing, &self.weights())
            .expect("right inputs")
    }
}

/// All outputs, in the order of [`reference::Outputs::named`], as f32: exact for bf16 too.
pub(crate) type Outputs = Vec<(&'static str, Vec<f32>)>;

impl<T: kodkod::Element> Step<T> {
    pub(crate) fn run(&self, options: CpuOptions, knobs: Knobs, tokens_per_rank: &[usize]) -> Outputs {
        self.try_run(options, knobs, tokens_per_rank).expect("right inputs")
    }

    pub(crate) fn try_run(
        &self,
        options: CpuOptions,
        knobs: Knobs,
        tokens_per_rank: &[usize],
    ) -> Result<Outputs> {
        let group = ExpertGroup::cpu_with(CpuOptions { ranks: tokens_per_rank.len(), ..options })?;
        let mut g = WeightGradients::zeros(&self.shape);
        g.gate.fill(f32::NAN); // overwritten, or it shows
        let (y, dx, d_topk_weights) = self.run_into(&group, knobs, tokens_per_rank, &mut g, false)?;
        let widen = |values: Vec<T>| values.into_iter().map(|v| v.to_f32()).collect();
        let mut all = vec![("y", widen(y)), ("dx", widen(dx)), ("d_topk_weights", d_topk_weights)];
        all.extend(g.named().into_iter().map(|(name, values)| (name, values.to_vec())));
        Ok(all)
    }

    /// y, dx and d_topk_weights; the weight gradients go to `g`.
    pub(crate) fn run_into<G: GradientElement>(
        &self,
        group: &ExpertGroup,
        knobs: Knobs,
        tokens_per_rank: &[usize],
        g: &mut WeightGradients<Vec<G>, Vec<f32>>,
        accumulate: bool,
    ) -> Result<(Vec<T>, Vec<T>, Vec<f32>)> {
        let layer = MoeLayer::<T>::new(group, self.shape.clone(), knobs)?;
        let (routing, weights) = (self.routing(tokens_per_rank)?, self.weights());
        let (y, context) = layer.forward(&self.x, &routing, &weights)?;
        let (dx, d_topk_weights) =
            layer.backward(&context, &self.dy, &self.x, &routing, &weights, g.as_mut(), accumulate)?;
        Ok((y, dx, d_topk_weights))
    }

    /// On one rank, with the knobs left alone.
    pub(crate) fn run_alone(&self) -> Outputs {
        self.run(CpuOptions::default(), Knobs::for_shape(&self.shape), &[self.tokens()])
    }
}

/// Shapes with each option alone, and with all.
pub(crate) fn shapes() -> Vec<(&'static str, Shape)> {
    let plain = Shape::new(64, 48, 8, 3);
    let oai = Activation::SwiGluOai { alpha: 1.702, limit: Some(1.2) };
    let shared = |intermediate, output_gate| Some(Shared { intermediate, output_gate });
    vec![
        ("plain", plain.clone()),
        ("clamp", Shape { activation: Activation::SwiGlu { limit: Some(0.9) }, ..plain.clone() }),
        ("gpt-oss", Shape { activation: oai, biases: true, ..plain.clone() }),
        ("shared", Shape { shared: shared(96, false), ..plain.clone() }),
        ("output gate", Shape { shared: shared(40, true), ..plain.clone() }),
        ("all", Shape { activation: oai, biases: true, shared: shared(72, true), ..plain }),
    ]
}

/// Weight gradients in bf16 are those in f32, summed from the same start and rounded once, whatever the ranks and knobs.
pub(crate) fn hold_bf16_gradients<T: kodkod::Element>(
    name: &str,
    group: impl Fn(usize) -> ExpertGroup,
    shape: Shape,
    tokens: usize,
) {
    let mut step = Step::<T>::random(shape, tokens, 17);
    // An expert without rows, whose gradient is zeroed or left alone.
    let empty = step.shape.experts as i32 - 1;
    step.ids.iter_mut().filter(|id| **id == empty).for_each(|id| *id = -1);
    let knobs = |minibatch, ring, saved| {
        Knobs::for_shape(&step.shape).with_rows(Some(minibatch), Some(ring), Some(saved))
    };
    let mut r = Random(18);
    let start = WeightGradients::lens(&step.shape).map(|n| r.list::<bf16>(n, 3.0), |n| vec![0.5; n]);
    for accumulate in [false, true] {
        let mut before = start.clone();
        if !accumulate {
            before.up.fill(bf16::NAN); // overwritten, or it shows
        }
        let mut sums = before.convert::<f32>();
        step.run_into(&group(1), knobs(1024, 1024, Knobs::ALL), &[tokens], &mut sums, accumulate).unwrap();
        let expected = sums.convert::<bf16>().convert::<f32>();
        let rounded = sums.gate.iter().zip(&expected.gate).filter(|(a, b)| a != b).count();
        println!("{name}, accumulate {accumulate}: {rounded} of {} of gate are rounded", sums.gate.len());
        assert!(rounded > sums.gate.len() / 2, "the f32 sums have no more bits than bf16: nothing is tested");
        for ranks in [1, 2, 4] {
            let group = group(ranks);
            for (minibatch, ring, saved) in [(128, 128, 0), (128, 384, 256), (512, 1024, Knobs::ALL)] {
                let mut ours = before.clone();
                let split = Routing::even_split(tokens, ranks);
                step.run_into(&group, knobs(minibatch, ring, saved), &split, &mut ours, accumulate).unwrap();
                let ours = ours.convert::<f32>();
                for ((part, a), (_, b)) in ours.named().into_iter().zip(expected.named()) {
                    let differ = a.iter().zip(b).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                    assert_eq!(
                        differ, 0,
                        "{name}, accumulate {accumulate}, {ranks} ranks, {minibatch}, {ring}, {saved}: elements of {part} \
                         that are not the f32 sum rounded once"
                    );
                }
            }
        }
    }
}
