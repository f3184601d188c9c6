//! The layer on a GPU against the layer on the CPU, and a backward whose forward is not the last one. Where there is no
//! GPU the tests say so and pass; `kodkod check --device cuda` goes much further.

mod common;

use common::{Step, hold_bf16_gradients};
use kodkod::cuda::{CudaLayer, DeviceStep, DeviceWeights, driver::Device, new_gradients};
use kodkod::{
    Activation, ExpertGroup, Knobs, MoeLayer, Precision, Result, Shape, Shared, WeightGradients, bf16,
};

fn gpu(ranks: usize) -> Option<ExpertGroup> {
    ExpertGroup::cuda_virtual(0, ranks).map_err(|error| println!("NOT RUN: {error}")).ok()
}

fn shape() -> Shape {
    Shape {
        shared: Some(Shared { intermediate: 64, output_gate: true }),
        activation: Activation::SwiGluOai { alpha: 1.702, limit: Some(1.2) },
        biases: true,
        ..Shape::new(128, 64, 4, 2)
    }
}

/// y, dx, d_topk_weights and all weight gradients, as f32.
type Outputs = Vec<(&'static str, Vec<f32>)>;

/// The forward of each step, then the backward of each in the reverse order.
fn run(layer: &MoeLayer<bf16>, steps: &[Step<bf16>], split: &[usize]) -> Result<Vec<Outputs>> {
    let mut forwards = Vec::new();
    for step in steps {
        let routing = step.routing(split)?;
        let (y, context) = layer.forward(&step.x, &routing, &step.weights())?;
        forwards.push((step, routing, y, context));
    }
    let mut all = Vec::new();
    for (step, routing, y, context) in forwards.into_iter().rev() {
        let mut g = WeightGradients::zeros(&step.shape);
        g.gate.fill(f32::NAN); // overwritten, or it shows
        let (dx, d_w) =
            layer.backward(&context, &step.dy, &step.x, &routing, &step.weights(), g.as_mut(), false)?;
        let widen = |values: Vec<bf16>| values.into_iter().map(bf16::to_f32).collect();
        let mut outputs = vec![("y", widen(y)), ("dx", widen(dx)), ("d_topk_weights", d_w)];
        outputs.extend(g.named().into_iter().map(|(name, values)| (name, values.to_vec())));
        all.push(outputs);
    }
    all.reverse();
    Ok(all)
}

#[test]
fn the_cpu_s_numbers_and_a_forward_between() {
    let Some(group) = gpu(2) else { return };
    let (shape, split) = (shape(), [120, 80]);
    let steps = [1, 2].map(|seed| Step::<bf16>::random(shape.clone(), 200, seed));
    let knobs = Knobs::for_shape(&shape).with_rows(Some(128), Some(256), Some(128));
    let layer = MoeLayer::<bf16>::new(&group, shape.clone(), knobs).unwrap();
    let on_gpu = run(&layer, &steps, &split).unwrap();
    let cpu = MoeLayer::<bf16>::new(&ExpertGroup::cpu(2).unwrap(), shape, knobs).unwrap();
    let on_cpu = run(&cpu, &steps, &split).unwrap();
    for (ours, theirs) in on_gpu.iter().zip(&on_cpu) {
        for ((name, a), (_, b)) in ours.iter().zip(theirs) {
            let error: f64 = a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())).sum();
            let size: f64 = b.iter().map(|b| f64::from(b.abs())).sum();
            println!("{name}: off by {:.1e} of its sum", error / size);
            assert!(error <= 0.01 * size, "{name} is off by {error:e} of {size:e}");
        }
    }
    // Alone, each gives the bits that it gave with the other forward before or after.
    for (step, expected) in steps.iter().zip(&on_gpu) {
        let alone = run(&layer, std::slice::from_ref(step), &split).unwrap();
        for ((name, a), (_, b)) in alone[0].iter().zip(expected) {
            let same = a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{name} has other bits alone than beside another forward");
        }
    }
}

#[test]
fn bf16_gradients_are_the_f32_sums_rounded_once() {
    if gpu(1).is_none() {
        return;
    }
    hold_bf16_gradients::<bf16>("all", |ranks| gpu(ranks).unwrap(), shape(), 700);
    let plain = Shape::new(192, 320, 4, 3);
    hold_bf16_gradients::<bf16>("plain", |ranks| gpu(ranks).unwrap(), plain, 500);
}

/// One layer, one gradient type after the other: each gives the bits that it gives alone.
#[test]
fn a_layer_takes_either_type_of_gradient() {
    let Some(group) = gpu(2) else { return };
    let step = Step::<bf16>::random(shape(), 200, 3);
    let layer = MoeLayer::<bf16>::new(&group, step.shape.clone(), Knobs::for_shape(&step.shape)).unwrap();
    let (routing, weights) = (step.routing(&[120, 80]).unwrap(), step.weights());
    let (_, context) = layer.forward(&step.x, &routing, &weights).unwrap();
    let mut expected = None;
    for _ in 0..2 {
        let mut sums = WeightGradients::zeros(&step.shape);
        layer.backward(&context, &step.dy, &step.x, &routing, &weights, sums.as_mut(), false).unwrap();
        let mut rounded = WeightGradients::zeros_in::<bf16>(&step.shape);
        layer.backward(&context, &step.dy, &step.x, &routing, &weights, rounded.as_mut(), false).unwrap();
        assert!(sums.convert::<bf16>() == rounded, "the gradients in bf16 are those in f32, rounded");
        assert!(*expected.get_or_insert_with(|| sums.clone()) == sums, "other bits after the other type");
    }
}

/// The kernels of one type refuse buffers of the other.
#[test]
fn gradients_of_another_type_are_refused() {
    if gpu(1).is_none() {
        return;
    }
    let step = Step::<bf16>::random(shape(), 60, 4);
    let device = Device::new(0).unwrap();
    let knobs = Knobs::for_shape(&step.shape);
    let on_gpu = DeviceStep::new(&step.shape, &step.x, &step.dy, &step.ids, &step.topk_weights).unwrap();
    let weights = DeviceWeights::from_host(&step.weights()).unwrap();
    let singles = new_gradients::<f32>(&step.shape).unwrap();
    let halves = new_gradients::<bf16>(&step.shape).unwrap();
    for precision in [Precision::F32, Precision::Bf16] {
        let layer =
            CudaLayer::new(std::slice::from_ref(&device), &step.shape, &knobs, &[60], precision).unwrap();
        layer.forward(&on_gpu, &weights).unwrap();
        let (single, half) = (
            layer.backward(&on_gpu, &weights, &singles, false),
            layer.backward(&on_gpu, &weights, &halves, false),
        );
        let (taken, refused) = if precision == Precision::F32 { (single, half) } else { (half, single) };
        taken.unwrap();
        layer.finish().unwrap();
        let error = refused.unwrap_err().to_string();
        println!("{error}");
        assert!(
            error.contains("gradients") && error.contains(&format!("compiled for gradients in {precision}"))
        );
    }
}
