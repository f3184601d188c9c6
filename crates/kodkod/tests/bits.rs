//! The contract of bits: nothing but the inputs moves a bit.

mod common;

use common::{Outputs, Random, Step, hold_bf16_gradients, shapes};
use kodkod::{CpuOptions, ExpertGroup, Isa, Knobs, MoeLayer, Routing, Shape, WeightGradients, bf16};

#[track_caller]
fn assert_same_bits(what: &str, a: &Outputs, b: &Outputs) {
    assert_eq!(a.len(), b.len());
    for ((name, a), (_, b)) in a.iter().zip(b) {
        assert_eq!(a.len(), b.len(), "{what}: {name}");
        let differ = |i: &usize| a[*i].to_bits() != b[*i].to_bits();
        if let Some(i) = (0..a.len()).find(differ) {
            let count = (0..a.len()).filter(differ).count();
            panic!("{what}: {name}[{i}] is {:e} and {:e}; {count} of {} differ", a[i], b[i], a.len());
        }
    }
}

fn knobs(shape: &Shape, minibatch: usize, ring: usize, saved: usize) -> Knobs {
    Knobs::for_shape(shape).with_rows(Some(minibatch), Some(ring), Some(saved))
}

fn every_way<T: kodkod::Element>() {
    for (name, shape) in shapes() {
        let step = Step::<T>::random(shape, 333, 11);
        let one_thread = CpuOptions { threads: 1, ..CpuOptions::default() };
        let first = step.run(one_thread, Knobs::for_shape(&step.shape), &[333]);
        for ranks in [1, 2, 4, 8] {
            let split = Routing::even_split(333, ranks);
            for (minibatch, ring, saved) in [(128, 128, 0), (128, 384, 256), (512, 1024, Knobs::ALL)] {
                for threads in [1, 3] {
                    let options = CpuOptions { threads, ..CpuOptions::default() };
                    let what =
                        format!("{name}: {ranks} ranks, {minibatch}, {ring}, {saved}, {threads} threads");
                    let other = step.run(options, knobs(&step.shape, minibatch, ring, saved), &split);
                    assert_same_bits(&what, &first, &other);
                }
            }
        }
        for split in [&[0, 12, 12, 309][..], &[333, 0], &[127, 1, 0, 0, 129, 75, 0, 1]] {
            let other = step.run(CpuOptions::default(), knobs(&step.shape, 128, 256, 128), split);
            assert_same_bits(&format!("{name}: split {split:?}"), &first, &other);
        }
    }
}

#[test]
fn ranks_splits_knobs_and_threads_move_no_bit_in_bf16() {
    every_way::<bf16>();
}

#[test]
fn ranks_splits_knobs_and_threads_move_no_bit_in_f32() {
    every_way::<f32>();
}

#[test]
fn instruction_sets_move_no_bit() {
    for (name, shape) in shapes() {
        let half = Step::<bf16>::random(shape.clone(), 100, 12);
        let single = Step::<f32>::random(shape, 100, 12);
        let (first_half, first_single) = (half.run_alone(), single.run_alone());
        for isa in Isa::available() {
            let options = || CpuOptions { isa: Some(isa), ..CpuOptions::default() };
            let knobs = Knobs::for_shape(&half.shape);
            assert_same_bits(
                &format!("{name}, bf16, {isa}"),
                &first_half,
                &half.run(options(), knobs, &[60, 40]),
            );
            assert_same_bits(
                &format!("{name}, f32, {isa}"),
                &first_single,
                &single.run(options(), knobs, &[60, 40]),
            );
        }
    }
}

#[test]
fn subnormal_inputs_move_no_bit_between_instruction_sets() {
    let mut step = Step::<bf16>::random(Shape::new(64, 48, 4, 2), 100, 13);
    let mut r = Random(14);
    let mut tiny = |values: &mut [bf16]| {
        for v in values.iter_mut().step_by(3) {
            *v = bf16::from_bits((r.bits() as u16) & 0x80ff); // up to 2^-125, subnormals among them
        }
    };
    tiny(&mut step.x);
    tiny(&mut step.gate);
    tiny(&mut step.down);
    let first = step.run_alone();
    for isa in Isa::available() {
        let options = CpuOptions { isa: Some(isa), ..CpuOptions::default() };
        assert_same_bits(&isa.to_string(), &first, &step.run(options, Knobs::for_shape(&step.shape), &[100]));
    }
}

#[test]
fn repeats_on_one_group_and_what_was_there_before_move_no_bit() {
    for (name, shape) in shapes() {
        let step = Step::<bf16>::random(shape, 200, 15);
        let group = ExpertGroup::cpu(4).unwrap();
        let layer =
            MoeLayer::<bf16>::new(&group, step.shape.clone(), knobs(&step.shape, 128, 128, 128)).unwrap();
        let (routing, weights) = (step.routing(&[50; 4]).unwrap(), step.weights());
        let mut first = None;
        for call in 0..20 {
            if call == 10 {
                let nan = vec![bf16::NAN; step.x.len()];
                layer.forward(&nan, &routing, &weights).unwrap();
            }
            let (y, context) = layer.forward(&step.x, &routing, &weights).unwrap();
            let mut g = WeightGradients::zeros(&step.shape);
            g.up.fill(f32::NAN);
            g.down.fill(f32::INFINITY);
            let (dx, dw) =
                layer.backward(&context, &step.dy, &step.x, &routing, &weights, g.as_mut(), false).unwrap();
            let bits = (y, dx, dw, g);
            assert!(*first.get_or_insert_with(|| bits.clone()) == bits, "{name}: call {call}");
        }
    }
}

#[test]
fn accumulating_into_zeros_is_overwriting_and_two_calls_add_up() {
    for (name, shape) in shapes() {
        let step = Step::<f32>::random(shape, 200, 16);
        let group = ExpertGroup::cpu(2).unwrap();
        let layer = MoeLayer::<f32>::new(&group, step.shape.clone(), Knobs::for_shape(&step.shape)).unwrap();
        let (routing, weights) = (step.routing(&[150, 50]).unwrap(), step.weights());
        let (_, context) = layer.forward(&step.x, &routing, &weights).unwrap();
        let add = |g: &mut WeightGradients, accumulate| {
            layer.backward(&context, &step.dy, &step.x, &routing, &weights, g.as_mut(), accumulate).unwrap();
        };
        let (mut once, mut twice) =
            (WeightGradients::zeros(&step.shape), WeightGradients::zeros(&step.shape));
        add(&mut once, false);
        add(&mut twice, true);
        assert!(once == twice, "{name}: accumulating into zeros");
        add(&mut twice, true);
        for ((output, one), (_, two)) in once.named().into_iter().zip(twice.named()) {
            let (mut error, mut sum) = (0.0, 0.0);
            for (one, two) in one.iter().zip(two) {
                error += f64::from((two - 2.0 * one).abs());
                sum += f64::from(2.0 * one.abs());
            }
            assert!(error <= 1e-5 * sum, "{name} {output}: {:e}", error / sum);
        }
        add(&mut twice, false);
        assert!(once == twice, "{name}: overwriting what was accumulated");
    }
}

#[test]
fn bf16_gradients_are_the_f32_sums_rounded_once() {
    for (name, shape) in shapes() {
        hold_bf16_gradients::<bf16>(name, |ranks| ExpertGroup::cpu(ranks).unwrap(), shape.clone(), 333);
        hold_bf16_gradients::<f32>(name, |ranks| ExpertGroup::cpu(ranks).unwrap(), shape, 150);
    }
}
