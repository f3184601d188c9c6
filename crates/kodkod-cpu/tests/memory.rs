//! Beyond the slots that routes arrive in, memory grows with `ring_rows + saved_rows`, not with tokens times top-k.

use half::bf16;
use kodkod_core::{Knobs, Routing, Shape, WeightGradients, Weights};
use kodkod_cpu::{CpuGroup, CpuOptions};

/// Peak bytes of a forward and backward, without the combine and input-gradient slots.
fn peak_beyond_slots(tokens: usize, saved: usize) -> usize {
    let shape = Shape::new(128, 64, 4, 4);
    let group = CpuGroup::new(CpuOptions { ranks: 2, threads: 2, ..CpuOptions::default() }).unwrap();
    let x = vec![bf16::ONE; tokens * 128];
    let weight = vec![bf16::from_f32(0.01); 4 * 64 * 128];
    let weights = Weights { gate: &weight[..], up: &weight, down: &weight, biases: None, shared: None };
    let ids: Vec<i32> = (0..tokens * 4).map(|i| (i % 4) as i32).collect();
    let routing =
        Routing::new(&shape, &ids, &vec![0.25; tokens * 4], &Routing::even_split(tokens, 2)).unwrap();
    let knobs = Knobs::for_shape(&shape).with_rows(Some(128), Some(256), Some(saved));
    let (y, saved) = group.forward(&shape, &knobs, &x, &routing, &weights).unwrap();
    let mut gradients = WeightGradients::zeros(&shape);
    group.backward(&saved, &y, &x, &weights, gradients.as_mut(), false).unwrap();
    // One slot a route, and its router gradient; the forward's are used again by the backward.
    group.memory().1 - tokens * 4 * (128 * size_of::<bf16>() + size_of::<f32>())
}

#[test]
fn peak_follows_the_knobs_and_not_the_tokens() {
    let tokens = [512, 1024, 2048, 4096];
    let peaks = tokens.map(|t| peak_beyond_slots(t, 0));
    println!("ring 256, saved 0: peak beyond slots in bytes, for {tokens:?} tokens: {peaks:?}");
    let page = 4096 * 64; // buffers are rounded up to pages
    assert!(peaks.iter().all(|p| p.abs_diff(peaks[0]) <= page), "{peaks:?}");
    let saved = [0, 512, 1024, 2048].map(|s| peak_beyond_slots(4096, s));
    println!("4096 tokens, saved 0, 512, 1024, 2048 rows a rank: {saved:?}");
    // A saved row is x, g and u: 2 bytes for each of 128 + 64 + 64 columns, on two ranks.
    for (rows, peak) in [(512, saved[1]), (1024, saved[2]), (2048, saved[3])] {
        let expected = saved[0] + 2 * rows * 2 * (128 + 64 + 64);
        assert!(peak.abs_diff(expected) <= page, "{rows} rows: {peak} against {expected}");
    }
}
