//! Random inputs of a layer, the same for the same seed on every machine.
//!
//! Rows are about normal with variance 1, weights with variance 1 / fan-in; the router chooses `top_k` different
//! experts a token, uniformly, with a softmax over normal logits as weights.

use std::cell::Cell;

use kodkod::{Biases, Element, Shape, SharedWeights};

use crate::step::{OwnedWeights, Step};

/// Elements that one thread fills at a time, from a state of their own.
const CHUNK: usize = 1 << 20;

/// One step of `tokens` tokens; `dy` only where a backward is wanted.
pub(crate) fn random_step<T: Element>(shape: &Shape, tokens: usize, backward: bool, seed: u64) -> Step<T> {
    let (h, i, e, k) = (shape.hidden, shape.intermediate, shape.experts, shape.top_k);
    let stream = Cell::new(seed << 8);
    let next_stream = || {
        stream.set(stream.get() + 1);
        stream.get()
    };
    let normal = |len: usize, scale: f32| fill(len, scale, next_stream(), T::from_f32);
    let normal_f32 = |len: usize, scale: f32| fill(len, scale, next_stream(), |v| v);
    let fan_in = |n: usize| (n as f32).powf(-0.5);
    let x = normal(tokens * h, 1.0);
    let dy = backward.then(|| normal(tokens * h, 1.0));
    let (gate, up) = (normal(e * i * h, fan_in(h)), normal(e * i * h, fan_in(h)));
    let down = normal(e * h * i, fan_in(i));
    let bias = |len: usize| normal_f32(len, 0.1);
    let biases = shape.biases.then(|| Biases { gate: bias(e * i), up: bias(e * i), down: bias(e * h) });
    let shared = shape.shared.map(|s| SharedWeights {
        gate: normal(s.intermediate * h, fan_in(h)),
        up: normal(s.intermediate * h, fan_in(h)),
        down: normal(h * s.intermediate, fan_in(s.intermediate)),
        output_gate: s.output_gate.then(|| normal_f32(h, fan_in(h))),
    });
    let (ids, topk_weights) = route(tokens, e, k, seed);
    let weights = OwnedWeights { gate, up, down, biases, shared };
    Step { shape: shape.clone(), x, dy, ids, topk_weights, weights }
}

/// Different experts for each token while there are any, and the softmax of `k` logits.
fn route(tokens: usize, experts: usize, k: usize, seed: u64) -> (Vec<i64>, Vec<f32>) {
    let mut state = mix(seed);
    let (mut ids, mut weights) = (Vec::with_capacity(tokens * k), Vec::with_capacity(tokens * k));
    for _ in 0..tokens {
        let first = ids.len();
        for slot in 0..k {
            loop {
                let id = (next(&mut state) >> 32) as i64 % experts as i64;
                if slot >= experts || !ids[first..].contains(&id) {
                    ids.push(id);
                    break;
                }
            }
        }
        let exp: Vec<_> = (0..k).map(|_| gaussian(&mut state).exp()).collect();
        let sum: f32 = exp.iter().sum();
        weights.extend(exp.iter().map(|v| v / sum));
    }
    (ids, weights)
}

fn fill<T: Copy + Default + Send>(
    len: usize,
    scale: f32,
    stream: u64,
    from: impl Fn(f32) -> T + Sync,
) -> Vec<T> {
    let mut values = vec![T::default(); len];
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let per_thread = len.div_ceil(threads).next_multiple_of(CHUNK).max(1);
    std::thread::scope(|scope| {
        for (thread, part) in values.chunks_mut(per_thread).enumerate() {
            let from = &from;
            scope.spawn(move || {
                for (chunk, part) in part.chunks_mut(CHUNK).enumerate() {
                    let number = (thread * (per_thread / CHUNK) + chunk) as u64;
                    let mut state = mix(stream << 32 | number);
                    part.iter_mut().for_each(|v| *v = from(scale * gaussian(&mut state)));
                }
            });
        }
    });
    values
}

/// The sum of four uniform 16-bit numbers, centred, variance 1.
fn gaussian(state: &mut u64) -> f32 {
    let bits = next(state);
    let sum: i64 = (0..4).map(|i| (bits >> (16 * i) & 0xffff) as i64).sum();
    // Each has variance 65536^2 / 12, four of them 65536^2 / 3.
    (sum - 2 * 0xffff) as f32 * (3.0_f32.sqrt() / 65536.0)
}

/// SplitMix64's finaliser: any number to a good start.
fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// SplitMix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mix(*state)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_about_normal_and_routes_about_uniform() {
        let shape = Shape::new(64, 32, 8, 3);
        let step: Step<f32> = random_step(&shape, 4000, true, 1);
        let n = step.x.len() as f64;
        let mean = step.x.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let variance = step.x.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / n;
        let mut counts = [0; 8];
        step.ids.iter().for_each(|&id| counts[id as usize] += 1);
        println!("mean {mean:.4}, variance {variance:.4}, rows of experts {counts:?}");
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02);
        assert!(counts.iter().all(|n| (1300..1700).contains(n)));
        for (ids, weights) in step.ids.chunks(3).zip(step.topk_weights.chunks(3)) {
            assert!(ids[0] != ids[1] && ids[0] != ids[2] && ids[1] != ids[2]);
            assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        }
        assert_eq!(step.x, random_step::<f32>(&shape, 4000, false, 1).x);
    }
}
