//! The inputs that a layer is held to: known hard cases, and random ones. Nothing here knows what runs them.
//!
//! Rows and output gradients are normal with variance 1, weights with variance 1 / fan-in, so that no output is lost
//! in the rounding of another. Every case has enough tokens for its sums to mean something.

use std::collections::BTreeSet;

use kodkod::{Activation, Biases, Shape, Shared, SharedWeights};

use crate::step::{OwnedWeights, Step};

/// SplitMix64.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed)
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// 0 to `n` - 1.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.bits()) * n as u128) >> 64) as usize
    }

    /// 0 to 1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 24) as f32
    }

    pub(crate) fn chance(&mut self, probability: f32) -> bool {
        self.unit() < probability
    }

    pub(crate) fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())].clone()
    }

    /// The sum of four uniform numbers, scaled: close to normal, and cheap.
    fn normal(&mut self, deviation: f32) -> f32 {
        let bits = self.bits();
        let sum: u32 = (0..4).map(|i| (bits >> (16 * i)) as u16).map(u32::from).sum();
        (sum as f32 / 65536.0 - 2.0) * 3_f32.sqrt() * deviation
    }

    fn normals(&mut self, n: usize, variance: f32) -> Vec<f32> {
        let deviation = variance.sqrt();
        (0..n).map(|_| self.normal(deviation)).collect()
    }

    pub(crate) fn shuffle<T>(&mut self, list: &mut [T]) {
        for i in (1..list.len()).rev() {
            list.swap(i, self.below(i + 1));
        }
    }

    /// `top_k` experts for each token, distinct while there are enough, as a router gives them.
    fn routes(&mut self, tokens: usize, experts: usize, top_k: usize) -> Vec<i64> {
        let mut all: Vec<i64> = (0..experts as i64).collect();
        let mut ids = Vec::with_capacity(tokens * top_k);
        for _ in 0..tokens {
            self.shuffle(&mut all);
            ids.extend(all.iter().cycle().take(top_k));
        }
        ids
    }
}

/// What else must hold of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Also {
    Nothing,
    /// Each expert gives the same bits when all other experts' routes are taken away.
    ExpertsApart,
    /// Tokens other than these keep their bits when these are made finite.
    OthersUnmoved(&'static [usize]),
}

/// One input, and how its tokens may be split over ranks beside evenly.
pub(crate) struct Case {
    pub(crate) step: Step<f32>,
    pub(crate) splits: Vec<Vec<usize>>,
    pub(crate) also: Also,
}

impl Case {
    fn new(step: Step<f32>) -> Self {
        Case { step, splits: Vec::new(), also: Also::Nothing }
    }

    fn split(mut self, tokens_per_rank: &[usize]) -> Self {
        assert_eq!(tokens_per_rank.iter().sum::<usize>(), self.step.tokens(), "a split covers all tokens");
        self.splits.push(tokens_per_rank.to_vec());
        self
    }

    fn also(mut self, also: Also) -> Self {
        self.also = also;
        self
    }
}

/// A case that is made when it is needed.
pub(crate) struct Named {
    pub(crate) name: String,
    pub(crate) build: Box<dyn Fn() -> Case>,
}

fn named(name: &str, build: impl Fn() -> Case + 'static) -> Named {
    Named { name: name.to_owned(), build: Box::new(build) }
}

/// A step of random numbers for given routes.
pub(crate) fn step(mut shape: Shape, ids: Vec<i64>, random: &mut Random) -> Step<f32> {
    if super::on_gpu() {
        let width = |n: usize| n.next_multiple_of(64);
        (shape.hidden, shape.intermediate) = (width(shape.hidden), width(shape.intermediate));
        shape.shared = shape.shared.map(|s| Shared { intermediate: width(s.intermediate), ..s });
    }
    let (h, i, e) = (shape.hidden, shape.intermediate, shape.experts);
    let tokens = ids.len() / shape.top_k;
    let (over_h, over_i) = (1.0 / h as f32, 1.0 / i as f32);
    let weights = OwnedWeights {
        gate: random.normals(e * i * h, over_h),
        up: random.normals(e * i * h, over_h),
        down: random.normals(e * i * h, over_i),
        biases: shape.biases.then(|| Biases {
            gate: random.normals(e * i, 0.25),
            up: random.normals(e * i, 0.25),
            down: random.normals(e * h, 0.25),
        }),
        shared: shape.shared.map(|s| SharedWeights {
            gate: random.normals(s.intermediate * h, over_h),
            up: random.normals(s.intermediate * h, over_h),
            down: random.normals(s.intermediate * h, 1.0 / s.intermediate as f32),
            output_gate: s.output_gate.then(|| random.normals(h, over_h)),
        }),
    };
    Step {
        x: random.normals(tokens * h, 1.0),
        dy: Some(random.normals(tokens * h, 1.0)),
        topk_weights: ids.iter().map(|_| 0.1 + 0.9 * random.unit()).collect(),
        ids,
        weights,
        shape,
    }
}

/// The activation of gpt-oss, with a clamp that many values are beyond.
const OAI: Activation = Activation::SwiGluOai { alpha: 1.702, limit: Some(1.0) };

fn shared(intermediate: usize, output_gate: bool) -> Option<Shared> {
    Some(Shared { intermediate, output_gate })
}

/// Everything that a shape can have.
fn everything(experts: usize, top_k: usize) -> Shape {
    Shape {
        shared: shared(80, true),
        activation: Activation::SwiGluOai { alpha: 1.702, limit: Some(1.5) },
        biases: true,
        ..Shape::new(64, 48, experts, top_k)
    }
}

/// Experts with these numbers of rows, one route a token, in random order.
fn grouped(rows: &[usize], random: &mut Random) -> Vec<i64> {
    let mut ids: Vec<i64> = rows.iter().enumerate().flat_map(|(e, &n)| vec![e as i64; n]).collect();
    random.shuffle(&mut ids);
    ids
}

/// The hard cases by number. `quick` makes the widest ones smaller.
pub(crate) fn hard(quick: bool) -> Vec<Named> {
    let mut all = vec![
        named("case-01 rows 162,0,2577,446,0,83", || {
            let mut r = Random::new(1);
            let ids = grouped(&[162, 0, 2577, 446, 0, 83], &mut r);
            Case::new(step(Shape::new(64, 48, 6, 1), ids, &mut r)).split(&[1000, 0, 2268])
        }),
        named("case-01 the same with biases", || {
            let mut r = Random::new(101);
            let ids = grouped(&[162, 0, 2577, 446, 0, 83], &mut r);
            let shape = Shape { biases: true, activation: OAI, ..Shape::new(40, 32, 6, 1) };
            Case::new(step(shape, ids, &mut r))
        }),
        named("case-03 all rows in one expert", || {
            let mut r = Random::new(3);
            Case::new(step(Shape::new(64, 48, 8, 1), vec![5; 700], &mut r)).split(&[0, 0, 0, 0, 0, 700, 0, 0])
        }),
        named("case-03 all routes in one expert, twice", || {
            let mut r = Random::new(103);
            Case::new(step(everything(4, 2), vec![0; 2 * 300], &mut r)).split(&[1, 0, 299, 0])
        }),
        named("case-04 a rank that receives no row", || {
            let mut r = Random::new(4);
            let ids = r.routes(200, 6, 2).into_iter().map(|e| if e < 2 { e } else { e + 2 }).collect();
            Case::new(step(Shape::new(64, 48, 8, 2), ids, &mut r)).split(&[50, 50, 50, 50])
        }),
        named("case-04 a rank without tokens", || {
            let mut r = Random::new(104);
            let ids = r.routes(200, 8, 2);
            Case::new(step(everything(8, 2), ids, &mut r)).split(&[120, 0, 1, 79]).split(&[0, 200])
        }),
        named("case-04 a rank without tokens and without rows", || {
            let mut r = Random::new(204);
            let ids = r.routes(200, 6, 2).into_iter().map(|e| if e < 2 { e } else { e + 2 }).collect();
            Case::new(step(Shape::new(64, 48, 8, 2), ids, &mut r))
                .split(&[100, 0, 60, 40])
                .split(&[200, 0, 0, 0, 0, 0, 0, 0])
        }),
        named("case-05 tokens per rank 0,12,12,12", || {
            let mut r = Random::new(5);
            let ids = r.routes(36, 4, 2);
            Case::new(step(everything(4, 2), ids, &mut r)).split(&[0, 12, 12, 12])
        }),
        named("case-05 4095 tokens in odd parts", || {
            let mut r = Random::new(105);
            let ids = r.routes(4095, 8, 2);
            let shape = Shape { shared: shared(24, false), ..Shape::new(32, 32, 8, 2) };
            Case::new(step(shape, ids, &mut r)).split(&[1023, 1, 2047, 1024]).split(&[127, 129, 0, 3839])
        }),
        named("case-06 expert 3 twice in a token", || {
            let mut r = Random::new(6);
            let mut ids = r.routes(60, 4, 2);
            ids[..40].fill(3);
            let mut step = step(Shape::new(64, 48, 4, 2), ids, &mut r);
            for pair in step.topk_weights[..40].chunks_exact_mut(2) {
                pair.copy_from_slice(&[0.4, 0.6]);
            }
            Case::new(step)
        }),
        named("case-07 id -1 in some routes", || {
            let mut r = Random::new(7);
            let mut ids = r.routes(200, 8, 3);
            ids.iter_mut().for_each(|id| *id = if r.chance(0.3) { -1 } else { *id });
            Case::new(step(everything(8, 3), ids, &mut r)).split(&[60, 70, 0, 70])
        }),
        named("case-07 id -1 in all routes of some tokens", || {
            let mut r = Random::new(107);
            let mut ids = r.routes(200, 8, 3);
            for token in ids.chunks_exact_mut(3).step_by(3) {
                token.fill(-1);
            }
            Case::new(step(Shape::new(64, 48, 8, 3), ids, &mut r))
        }),
        named("case-07 id -1 everywhere", || {
            Case::new(step(Shape::new(64, 48, 4, 2), vec![-1; 100], &mut Random::new(207)))
        }),
        named("case-07 id -1 everywhere, shared experts remain", || {
            Case::new(step(everything(4, 2), vec![-1; 200], &mut Random::new(307)))
        }),
        named("case-09 router weights 0, negative, subnormal", || {
            let mut r = Random::new(9);
            let ids = r.routes(120, 4, 3);
            let mut step = step(Shape { biases: true, ..Shape::new(64, 48, 4, 3) }, ids, &mut r);
            for w in &mut step.topk_weights {
                *w = r.pick(&[0.0, -0.0, -0.7, 1e-40, -1e-45, 0.5, 1.5]);
            }
            Case::new(step)
        }),
        named("case-11 group sizes 128,130,65,1", || {
            let mut r = Random::new(11);
            let ids = grouped(&[128, 130, 65, 1], &mut r);
            Case::new(step(Shape { biases: true, ..Shape::new(64, 48, 4, 1) }, ids, &mut r))
                .also(Also::ExpertsApart)
        }),
        named("case-12 NaN and inf in two tokens", || {
            let mut r = Random::new(12);
            let ids = r.routes(150, 8, 2);
            let mut step = step(Shape { shared: shared(40, true), ..Shape::new(64, 48, 8, 2) }, ids, &mut r);
            (step.x[17 * 64 + 3], step.x[140 * 64]) = (f32::NAN, f32::INFINITY);
            Case::new(step).also(Also::OthersUnmoved(&[17, 140]))
        }),
        named("case-12 -inf in a token, clamped", || {
            let mut r = Random::new(112);
            let ids = r.routes(150, 4, 2);
            let mut step = step(everything(4, 2), ids, &mut r);
            step.x[99 * 64 + 7] = f32::NEG_INFINITY;
            Case::new(step).also(Also::OthersUnmoved(&[99]))
        }),
        named("case-16 swiglu, many values beyond the limit", || {
            let mut r = Random::new(16);
            let ids = r.routes(150, 4, 2);
            let shape =
                Shape { activation: Activation::SwiGlu { limit: Some(0.8) }, ..Shape::new(64, 48, 4, 2) };
            Case::new(step(Shape { shared: shared(40, false), ..shape }, ids, &mut r))
        }),
        named("case-16 gpt-oss, many values beyond the limit", || {
            let mut r = Random::new(116);
            let ids = r.routes(150, 4, 2);
            Case::new(step(Shape { activation: OAI, biases: true, ..Shape::new(64, 48, 4, 2) }, ids, &mut r))
        }),
        named("no tokens", || Case::new(step(everything(4, 2), Vec::new(), &mut Random::new(50)))),
        named("top-32", || {
            let mut r = Random::new(51);
            let ids = r.routes(50, 64, 32);
            Case::new(step(Shape::new(32, 24, 64, 32), ids, &mut r))
        }),
        named("alpha without a limit", || {
            let mut r = Random::new(52);
            let ids = r.routes(150, 4, 2);
            let activation = Activation::SwiGluOai { alpha: 1.702, limit: None };
            Case::new(step(Shape { activation, ..Shape::new(64, 48, 4, 2) }, ids, &mut r))
        }),
    ];
    // Published widths, few tokens: (hidden, intermediate), the model they are from.
    let widths: &[(usize, usize)] = match quick {
        true => &[(2880, 768), (2688, 1408), (136, 1856)],
        false => &[(2880, 2880), (2688, 1856), (2048, 1408), (2048, 768)],
    };
    for &(hidden, intermediate) in widths {
        all.push(named(&format!("case-10 hidden {hidden}, intermediate {intermediate}"), move || {
            let mut r = Random::new(10 + hidden as u64);
            let oai = hidden == 2880;
            let mut shape = Shape { biases: oai, ..Shape::new(hidden, intermediate, 2, 1) };
            if oai {
                shape.activation = Activation::SwiGluOai { alpha: 1.702, limit: Some(7.0) };
            } else {
                shape.shared = shared(136, false);
            }
            let ids = r.routes(24, 2, 1);
            Case::new(step(shape, ids, &mut r))
        }));
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

/// A random case: any option, any routing, one split among many. On a GPU four in a row share a shape, and with it the
/// kernels.
pub(crate) fn random(seed: u64) -> Case {
    let on_gpu = super::on_gpu();
    let mut r = Random::new(if on_gpu { seed / 4 } else { seed });
    let experts = r.pick(&[1, 2, 4, 6, 8, 16]);
    let top_k = 1 + r.below(experts.min(6));
    let mut shape = Shape::new(8 * (4 + r.below(17)), 8 * (4 + r.below(17)), experts, top_k);
    let limit = r.chance(0.5).then(|| 0.5 + 2.0 * r.unit());
    shape.activation = match r.chance(0.4) {
        true => Activation::SwiGluOai { alpha: r.pick(&[1.702, 1.0, 0.5]), limit },
        false => Activation::SwiGlu { limit },
    };
    shape.biases = r.chance(0.4);
    if r.chance(0.5) {
        shape.shared = shared(8 * (4 + r.below(17)), r.chance(0.5));
    }
    let mut ranks = vec![2, 3, 4, 8];
    ranks.retain(|&n| experts.is_multiple_of(n) && n <= super::most_ranks());
    if on_gpu {
        ranks = ranks.get(r.below(ranks.len().max(1))).copied().into_iter().collect();
        r = Random::new(!seed);
    }
    let tokens = 64 + r.below(400);
    // Some experts are far more popular than others.
    let skew = r.chance(0.5);
    let mut ids = r.routes(tokens, experts, top_k);
    let (missing, repeated) = (r.pick(&[0.0, 0.0, 0.2, 0.5]), r.pick(&[0.0, 0.0, 0.3]));
    for route in 0..ids.len() {
        if skew && r.chance(0.7) {
            ids[route] = (experts / 2) as i64;
        }
        if repeated > 0.0 && !route.is_multiple_of(top_k) && r.chance(repeated) {
            ids[route] = ids[route - 1];
        }
        if r.chance(missing) {
            ids[route] = -1;
        }
    }
    let mut step = step(shape, ids, &mut r);
    if r.chance(0.3) {
        step.topk_weights.iter_mut().for_each(|w| *w = 2.0 * r.unit() - 1.0);
    }
    let splits = ranks.into_iter().map(|n| ragged(tokens, n, &mut r)).collect();
    Case { step, splits, also: Also::Nothing }
}

/// A random split, ranks without tokens among them.
fn ragged(tokens: usize, ranks: usize, random: &mut Random) -> Vec<usize> {
    let mut cuts: Vec<_> = (1..ranks).map(|_| random.below(tokens + 1)).collect();
    cuts.extend([0, tokens]);
    if ranks > 2 && random.chance(0.5) {
        cuts[0] = cuts[1];
    }
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

/// The inputs on which every knob is turned: several row blocks an expert, several minibatches a rank.
pub(crate) fn contract() -> Vec<Named> {
    vec![
        named("plain", || {
            let mut r = Random::new(60);
            let ids = r.routes(500, 8, 4);
            Case::new(step(Shape::new(64, 48, 8, 4), ids, &mut r))
                .split(&[0, 12, 488, 0])
                .split(&[333, 1, 0, 5, 127, 2, 32, 0])
                .split(&[499, 1])
        }),
        named("everything", || {
            let mut r = Random::new(61);
            let mut ids = r.routes(401, 8, 3);
            for route in 0..ids.len() {
                match r.below(12) {
                    0 => ids[route] = -1,
                    1 => ids[route] = ids[route / 3 * 3],
                    _ => {}
                }
            }
            Case::new(step(everything(8, 3), ids, &mut r))
                .split(&[0, 127, 129, 145])
                .split(&[1, 0, 199, 201])
                .split(&[50, 51, 49, 53, 0, 47, 1, 150])
        }),
        named("skewed", || {
            let mut r = Random::new(62);
            let ids = (0..900).map(|_| if r.chance(0.8) { 6 } else { r.below(8) as i64 }).collect();
            let shape = Shape { shared: shared(24, false), ..Shape::new(72, 40, 8, 1) };
            Case::new(step(shape, ids, &mut r)).split(&[0, 0, 900, 0]).split(&[257, 643])
        }),
    ]
}

/// Experts that no route names.
pub(crate) fn idle_experts<T>(step: &Step<T>) -> Vec<usize> {
    let busy: BTreeSet<_> = step.ids.iter().copied().collect();
    (0..step.shape.experts).filter(|&e| !busy.contains(&(e as i64))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_variance_asked_for() {
        let list = Random::new(1).normals(100_000, 0.25);
        let mean = list.iter().sum::<f32>() / list.len() as f32;
        let variance = list.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / list.len() as f32;
        println!("mean {mean}, variance {variance}");
        assert!(mean.abs() < 0.01 && (variance - 0.25).abs() < 0.005);
    }

    #[test]
    fn cases_have_the_rows_that_their_names_promise() {
        let cases = hard(true);
        let case = cases.iter().find(|c| c.name.starts_with("case-01 rows 162,0,2577,446,0,83"));
        let first = (case.expect("the case is in the list").build)();
        let rows = |e| first.step.ids.iter().filter(|&&id| id == e).count();
        assert_eq!((0..6).map(rows).collect::<Vec<_>>(), [162, 0, 2577, 446, 0, 83]);
        assert_eq!(idle_experts(&first.step), [1, 4]);
    }

    #[test]
    fn a_random_case_is_the_same_for_the_same_seed() {
        for seed in 0..200 {
            let (a, b) = (random(seed), random(seed));
            a.step.shape.validate().expect("an allowed shape");
            assert_eq!((a.step.ids, a.step.x, &a.splits), (b.step.ids, b.step.x, &b.splits));
            let tokens = b.step.topk_weights.len() / b.step.shape.top_k;
            assert!(a.splits.iter().all(|s| s.iter().sum::<usize>() == tokens));
        }
    }
}
