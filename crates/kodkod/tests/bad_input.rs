//! What does not fit is refused before anything is computed, with the argument, its value and what is allowed.

mod common;

use common::Step;
use kodkod::{
    Activation, CpuOptions, Error, ExpertGroup, Knobs, MoeLayer, Result, Routing, Shape, Shared,
    SharedWeights, WeightGradients, bf16,
};

#[track_caller]
fn refused<V>(result: Result<V>, words: &[&str]) {
    let error = result.err().expect("this must be refused").to_string();
    println!("{error}");
    for word in words {
        assert!(error.contains(word), "{error:?} does not say {word:?}");
    }
}

fn shape() -> Shape {
    Shape::new(64, 48, 4, 2)
}

fn layer(shape: Shape) -> Result<MoeLayer<bf16>> {
    let knobs = Knobs::for_shape(&shape);
    MoeLayer::new(&ExpertGroup::cpu(1)?, shape, knobs)
}

#[test]
fn sizes() {
    refused(layer(Shape { hidden: 60, ..shape() }), &["hidden is 60", "multiple of 8"]);
    refused(layer(Shape { intermediate: 1409, ..shape() }), &["intermediate is 1409", "multiple of 8"]);
    refused(layer(Shape { hidden: 0, ..shape() }), &["hidden is 0"]);
    refused(layer(Shape { experts: 0, ..shape() }), &["experts is 0"]);
    refused(layer(Shape { experts: 5000, ..shape() }), &["experts is 5000", "4096"]);
    refused(layer(Shape { top_k: 0, ..shape() }), &["top_k is 0", "1 to 32"]);
    refused(layer(Shape { top_k: 33, ..shape() }), &["top_k is 33", "1 to 32"]);
    let shared = Some(Shared { intermediate: 20, output_gate: false });
    refused(layer(Shape { shared, ..shape() }), &["shared intermediate is 20", "multiple of 8"]);
    for limit in [0.0, -1.0, f32::NAN] {
        let activation = Activation::SwiGlu { limit: Some(limit) };
        refused(layer(Shape { activation, ..shape() }), &["limit is", "positive"]);
    }
    let activation = Activation::SwiGluOai { alpha: f32::NAN, limit: None };
    refused(layer(Shape { activation, ..shape() }), &["alpha is NaN", "finite"]);
}

#[test]
fn gpus() {
    refused(ExpertGroup::cuda(&[]), &["devices is empty", "one GPU"]);
    refused(ExpertGroup::cuda(&[0, 1, 0]), &["devices is 0 twice", "each GPU once", "cuda_virtual"]);
    refused(ExpertGroup::cuda(&(0..9).collect::<Vec<_>>()), &["ranks is 9", "1 to 8"]);
    refused(ExpertGroup::cuda_virtual(0, 0), &["ranks is 0", "1 to 8"]);
    refused(ExpertGroup::cuda_virtual(0, 9), &["ranks is 9", "1 to 8"]);
    // No machine has so many, and some have no driver: either way it says what works instead.
    refused(ExpertGroup::cuda(&[1000]), &["--device cpu"]);
    if let Ok(group) = ExpertGroup::cuda(&[0]) {
        let knobs = Knobs::for_shape(&shape());
        refused(MoeLayer::<f32>::new(&group, shape(), knobs), &["precision is f32", "bf16"]);
        refused(MoeLayer::<bf16>::new(&group, shape(), knobs), &["intermediate is 48", "multiple of 64"]);
    } else {
        println!("no GPU here: its layers' refusals were not tried");
    }
}

#[test]
fn groups_and_knobs() {
    refused(ExpertGroup::cpu(0), &["ranks", "0"]);
    refused(ExpertGroup::cpu(usize::MAX), &["ranks"]);
    refused(ExpertGroup::cpu_with(CpuOptions { threads: usize::MAX, ..CpuOptions::default() }), &["threads"]);
    let with = |ranks: usize, change: fn(&mut Knobs)| {
        let mut knobs = Knobs::for_shape(&shape());
        change(&mut knobs);
        MoeLayer::<f32>::new(&ExpertGroup::cpu(ranks)?, shape(), knobs)
    };
    refused(with(3, |_| ()), &["ranks is 3", "divide", "4"]);
    refused(with(8, |_| ()), &["ranks is 8", "divide", "4"]);
    refused(with(1, |k| k.minibatch_rows = 0), &["minibatch_rows is 0", "128"]);
    refused(with(1, |k| k.minibatch_rows = 64), &["minibatch_rows is 64", "128"]);
    refused(with(1, |k| (k.minibatch_rows, k.ring_rows) = (256, 384)), &["ring_rows is 384", "256"]);
    refused(with(1, |k| k.ring_rows = usize::MAX), &["ring_rows"]);
    refused(with(1, |k| k.fwd_comm_sms = 0), &["fwd_comm_sms is 0"]);
    refused(with(1, |k| k.bwd_comm_sms = 1025), &["bwd_comm_sms is 1025"]);
}

#[test]
fn routing() {
    let new = |ids: &[i64], weights: usize, split: &[usize]| {
        Routing::new(&shape(), ids, &vec![0.5; weights], split)
    };
    refused(new(&[0, 1, 2, 4], 4, &[2]), &["topk_ids[1, 1] is 4", "0 to 3", "-1"]);
    refused(new(&[0, -2, 2, 3], 4, &[1, 1]), &["topk_ids[0, 1] is -2"]);
    refused(new(&[0, 1, i64::MAX, 3], 4, &[2]), &["topk_ids[1, 0] is 9223372036854775807"]);
    refused(new(&[0, 1, 2], 4, &[2]), &["topk_ids has 3", "expected 4", "tokens 2", "top_k 2"]);
    refused(new(&[0, 1, 2, 3], 3, &[2]), &["topk_weights has 3", "expected 4"]);
    refused(new(&[0, 1, 2, 3], 4, &[1, 2]), &["topk_ids has 4", "expected 6"]);
    refused(new(&[], 0, &[]), &["tokens_per_rank"]);
    refused(new(&[], 0, &[usize::MAX, 1]), &["tokens_per_rank"]);
}

#[test]
fn arguments_of_a_pass() {
    let right = Step::<bf16>::random(Shape { biases: true, ..shape() }, 6, 1);
    let group = ExpertGroup::cpu(2).unwrap();
    let layer = MoeLayer::<bf16>::new(&group, right.shape.clone(), Knobs::for_shape(&right.shape)).unwrap();
    let routing = right.routing(&[3, 3]).unwrap();
    let forward =
        |x: &[bf16], routing: &Routing, step: &Step<bf16>| layer.forward(x, routing, &step.weights());

    refused(
        forward(&right.x[1..], &routing, &right),
        &["x has 383", "expected 384", "tokens 6", "hidden 64"],
    );
    refused(forward(&right.x, &right.routing(&[6]).unwrap(), &right), &["rank", "1", "2"]);
    let changed = |change: fn(&mut Step<bf16>)| {
        let mut step = Step::<bf16>::random(right.shape.clone(), 6, 1);
        change(&mut step);
        step
    };
    let wrong = |change| forward(&right.x, &routing, &changed(change));
    refused(wrong(|s| s.gate.truncate(12287)), &["w_gate has 12287", "expected 12288", "experts 4"]);
    refused(wrong(|s| s.up.clear()), &["w_up has 0"]);
    refused(wrong(|s| s.down.truncate(64 * 48)), &["w_down has 3072"]);
    refused(wrong(|s| s.biases = None), &["biases", "missing"]);
    refused(wrong(|s| s.biases.as_mut().unwrap().down.truncate(48)), &["b_down has 48", "expected 256"]);

    let mut other = Step::<bf16>::random(Shape { top_k: 3, ..right.shape.clone() }, 6, 1);
    refused(forward(&right.x, &other.routing(&[3, 3]).unwrap(), &right), &["top_k", "3"]);
    other.shape = Shape { experts: 8, ..right.shape.clone() };
    other.ids = vec![7; 12];
    other.topk_weights = vec![1.0; 12];
    refused(forward(&right.x, &other.routing(&[3, 3]).unwrap(), &right), &["expert", "7", "4"]);

    let (_, context) = forward(&right.x, &routing, &right).unwrap();
    let backward = |dy: &[bf16], routing: &Routing, mut g: WeightGradients| {
        layer.backward(&context, dy, &right.x, routing, &right.weights(), g.as_mut(), false)
    };
    let zeros = || WeightGradients::zeros(&right.shape);
    refused(backward(&right.dy[..64], &routing, zeros()), &["dy has 64", "expected 384"]);
    refused(backward(&right.dy, &right.routing(&[4, 2]).unwrap(), zeros()), &["routing"]);
    refused(
        backward(&right.dy, &routing, WeightGradients { biases: None, ..zeros() }),
        &["bias gradients", "missing"],
    );
    refused(backward(&right.dy, &routing, WeightGradients { up: vec![0.0], ..zeros() }), &["dw_up has 1"]);
    let into_bf16 = |change: fn(&mut WeightGradients<Vec<bf16>, Vec<f32>>)| {
        let mut g = WeightGradients::zeros_in::<bf16>(&right.shape);
        change(&mut g);
        layer.backward(&context, &right.dy, &right.x, &routing, &right.weights(), g.as_mut(), false)
    };
    refused(into_bf16(|g| g.down.truncate(7)), &["dw_down has 7", "expected 12288"]);
    refused(into_bf16(|g| g.biases = None), &["bias gradients", "missing"]);
    let shared = |g: &mut WeightGradients<Vec<bf16>, Vec<f32>>| {
        let part = || vec![bf16::ZERO; 64];
        g.shared = Some(SharedWeights { gate: part(), up: part(), down: part(), output_gate: None });
    };
    refused(into_bf16(shared), &["shared gradients", "given"]);
    // After all of that, the layer still works.
    into_bf16(|_| ()).unwrap();
    backward(&right.dy, &routing, zeros()).unwrap();
}

#[test]
fn a_stalled_worker_is_an_error_that_names_rank_task_and_counter() {
    use kodkod::program::Stream;
    use std::time::{Duration, Instant};
    let step = Step::<bf16>::random(Shape::new(64, 48, 4, 2), 300, 2);
    for ranks in [1, 2, 4] {
        let stall = Some(kodkod::StallHook { rank: ranks - 1, stream: Stream::Compute, ticket: 3 });
        let wait_limit = Duration::from_millis(100);
        let options = CpuOptions { threads: 2, wait_limit, stall, ..CpuOptions::default() };
        let start = Instant::now();
        let result = step.try_run(options, Knobs::for_shape(&step.shape), &Routing::even_split(300, ranks));
        println!("{ranks} ranks, {:?}: {}", start.elapsed(), result.as_ref().unwrap_err());
        assert!(start.elapsed() < Duration::from_secs(10));
        let Err(Error::Stalled(stalls)) = result else { panic!("another error, or none") };
        let stall = stalls.iter().find(|s| s.rank == ranks - 1).expect("the stalled rank is named");
        assert!(!stall.task.is_empty() && !stall.counter.is_empty() && stall.expected > stall.seen);
        assert_eq!(stalls.len(), ranks, "every rank says what it waits for");
    }
}
