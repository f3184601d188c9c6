//! The layer against the plain f64 reference: `sum |error| <= tolerance * sum |reference|` on every output.

mod common;

use common::{Step, shapes};
use kodkod::{Shape, bf16};

fn hold<T: kodkod::Element>(name: &str, step: &Step<T>, tolerance: f64) {
    let (ours, reference) = (step.run_alone(), step.reference());
    assert_eq!(ours.len(), reference.named().len());
    for ((output, values), (expected_name, expected)) in ours.iter().zip(reference.named()) {
        assert_eq!((*output, values.len()), (expected_name, expected.len()));
        let (mut error, mut sum, mut worst, mut at) = (0.0, 0.0, 0.0, 0);
        for (i, (v, r)) in values.iter().zip(expected).enumerate() {
            let off = (f64::from(*v) - r).abs();
            error += off;
            sum += r.abs();
            if off > worst {
                (worst, at) = (off, i);
            }
        }
        let relative = if error == 0.0 { 0.0 } else { error / sum };
        println!(
            "{name} {output}: {relative:.2e} of {tolerance:e}; worst {worst:.2e} at {at} of {}",
            expected.len()
        );
        assert!(
            relative <= tolerance,
            "{name} {output}: {relative:e} is beyond {tolerance:e}, worst at {at}"
        );
    }
}

#[test]
fn f32_agrees_in_every_option() {
    for (name, shape) in shapes() {
        hold::<f32>(name, &Step::random(shape, 150, 1), 1e-5);
    }
}

#[test]
fn bf16_agrees_in_every_option() {
    for (name, shape) in shapes() {
        hold::<bf16>(name, &Step::random(shape, 150, 2), 0.01);
    }
}

#[test]
fn widths_that_no_tile_divides_agree() {
    for (hidden, intermediate) in [(8, 1000), (2680, 8), (136, 264), (520, 72)] {
        let name = format!("hidden {hidden}, intermediate {intermediate}");
        let step = Step::random(Shape::new(hidden, intermediate, 2, 2), 70, 3);
        hold::<f32>(&name, &step, 1e-5);
        hold::<bf16>(&name, &Step::random(step.shape.clone(), 70, 3), 0.01);
    }
}

#[test]
fn one_token_and_no_token_agree() {
    for (name, shape) in shapes() {
        for tokens in [0, 1] {
            hold::<f32>(&format!("{name}, {tokens} tokens"), &Step::random(shape.clone(), tokens, 4), 1e-5);
        }
    }
}

#[test]
fn a_token_that_is_not_finite_spoils_its_own_rows_alone() {
    for (name, shape) in shapes() {
        let clean = Step::<bf16>::random(shape, 60, 5);
        let mut step = Step::<bf16>::random(clean.shape.clone(), 60, 5);
        step.x[20 * 64 + 5] = bf16::NAN;
        step.x[41 * 64] = bf16::INFINITY;
        for ((output, a), (_, b)) in step.run_alone().iter().zip(clean.run_alone()).take(3) {
            let width = a.len() / 60;
            for (i, (a, b)) in a.iter().zip(b).enumerate().filter(|(i, _)| ![20, 41].contains(&(i / width))) {
                assert_eq!(a.to_bits(), b.to_bits(), "{name} {output} of token {}", i / width);
            }
        }
    }
}
