//! The experts' op and the layer: gradients against differences and against candle's autograd over a per-expert loop.

use candle_core::{D, DType, Device, Error, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use kodkod_candle::{
    Activation, ExpertGroup, ExpertWeights, Knobs, MoeConfig, MoeExperts, MoeLayer, Precision, Routed,
    Scoring, Shape, Shared,
};

const DEVICE: Device = Device::Cpu;

/// Numbers in -1..1 that depend on the seed and the position alone.
fn noise(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(next).collect()
}

fn var(dims: &[usize], scale: f32, seed: u32) -> Result<Var> {
    let values = noise(dims.iter().product(), seed).into_iter().map(|v| v * scale).collect();
    Var::from_vec::<_, f32>(values, dims, &DEVICE)
}

fn group(ranks: usize) -> Result<ExpertGroup> {
    ExpertGroup::cpu(ranks).map_err(Error::wrap)
}

/// Everything a layer can have: shared experts with an output gate, biases, a clamp.
fn full_shape() -> Shape {
    Shape {
        shared: Some(Shared { intermediate: 16, output_gate: true }),
        activation: Activation::SwiGluOai { alpha: 1.702, limit: Some(0.9) },
        biases: true,
        ..Shape::new(16, 24, 4, 2)
    }
}

/// All variables of the experts of a shape, by name, and a builder that hands them out.
fn experts(shape: &Shape, scale: f32) -> Result<(Vec<(String, Var)>, VarBuilder<'static>)> {
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F32, &DEVICE);
    ExpertWeights::new(shape, vb.clone())?;
    let mut named: Vec<_> = map.data().lock().expect("no panic holds it").clone().into_iter().collect();
    named.sort_by(|a, b| a.0.cmp(&b.0));
    for (i, (_, v)) in named.iter().enumerate() {
        let values = noise(v.elem_count(), 100 + i as u32).into_iter().map(|x| x * scale).collect();
        v.set(&Tensor::from_vec::<_, f32>(values, v.shape(), &DEVICE)?)?;
    }
    Ok((named, vb))
}

fn values(t: &Tensor) -> Result<Vec<f32>> {
    t.flatten_all()?.to_vec1()
}

fn largest(a: &Tensor, b: &Tensor) -> Result<f32> {
    a.sub(b)?.abs()?.flatten_all()?.max(0)?.to_scalar()
}

fn activation(shape: &Shape, g: &Tensor, u: &Tensor) -> Result<Tensor> {
    let (g, u) = match shape.activation.limit() {
        Some(limit) => (g.minimum(f64::from(limit))?, u.clamp(-limit, limit)?),
        None => (g.clone(), u.clone()),
    };
    let slope = ((&g * f64::from(-shape.activation.alpha()))?.exp()? + 1.0)?.recip()?;
    (u + f64::from(shape.activation.up_offset()))?.mul(&(g * slope)?)
}

/// The layer by a loop over experts, every token through every expert, in plain candle.
fn plain(shape: &Shape, w: &ExpertWeights, x: &Tensor, ids: &[i32], weights: &Tensor) -> Result<Tensor> {
    let (tokens, k) = weights.dims2()?;
    let mut y = x.zeros_like()?;
    for e in 0..shape.experts {
        let mask = ids.iter().map(|&id| f32::from(u8::from(id == e as i32))).collect::<Vec<_>>();
        let share = weights.mul(&Tensor::from_vec(mask, (tokens, k), &DEVICE)?)?.sum_keepdim(D::Minus1)?;
        let mut g = x.matmul(&w.gate.get(e)?.t()?)?;
        let mut u = x.matmul(&w.up.get(e)?.t()?)?;
        if let Some(b) = &w.biases {
            (g, u) = (g.broadcast_add(&b.gate.get(e)?)?, u.broadcast_add(&b.up.get(e)?)?);
        }
        let mut out = activation(shape, &g, &u)?.matmul(&w.down.get(e)?.t()?)?;
        if let Some(b) = &w.biases {
            out = out.broadcast_add(&b.down.get(e)?)?;
        }
        y = (y + out.broadcast_mul(&share)?)?;
    }
    if let Some(s) = &w.shared {
        let h = activation(shape, &x.matmul(&s.gate.t()?)?, &x.matmul(&s.up.t()?)?)?;
        let mut out = h.matmul(&s.down.t()?)?;
        if let Some(gate) = &s.output_gate {
            let open = (x.matmul(&gate.t()?)?.neg()?.exp()? + 1.0)?.recip()?;
            out = out.broadcast_mul(&open)?;
        }
        y = (y + out)?;
    }
    Ok(y)
}

/// `sum(y * fixed noise)`, so that every output counts differently.
fn weighed(y: &Tensor) -> Result<Tensor> {
    y.mul(&Tensor::from_vec(noise(y.elem_count(), 77), y.shape(), &DEVICE)?)?.sum_all()
}

#[test]
fn output_and_every_gradient_agree_with_candles_autograd() -> Result<()> {
    for (name, shape) in [("plain", Shape::new(16, 24, 4, 2)), ("full", full_shape())] {
        let (named, vb) = experts(&shape, 0.4)?;
        let x = var(&[11, shape.hidden], 1.0, 1)?;
        let weights = var(&[11, 2], 1.0, 2)?;
        // Some tokens have one route or none, one goes twice to the same expert.
        let ids = [0, 1, 2, 3, 3, 0, 1, -1, -1, -1, 2, 2, 0, 3, 1, 2, 3, 1, 0, 2, 1, 0];
        let own = ExpertWeights::new(&shape, vb)?;
        let layer = MoeExperts::new(
            &group(2)?,
            shape.clone(),
            Knobs::for_shape(&shape),
            Precision::F32,
            own.clone(),
        )?;
        let ours = layer.forward(&x, &ids, &weights)?;
        let theirs = plain(&shape, &own, &x, &ids, &weights)?;
        let error = largest(&ours, &theirs)?;
        println!("{name}: y differs by at most {error:.1e} (tolerance 1e-5)");
        assert!(error < 1e-5);

        let (ours, theirs) = (weighed(&ours)?.backward()?, weighed(&theirs)?.backward()?);
        let inputs = [("x".to_string(), x.clone()), ("topk_weights".to_string(), weights.clone())];
        for (what, v) in inputs.iter().chain(&named) {
            let (a, b) = (ours.get(v).expect("a gradient"), theirs.get(v).expect("a gradient"));
            let (error, size) = (largest(a, b)?, largest(b, &b.zeros_like()?)?);
            println!(
                "{name}: d {what} differs by at most {error:.1e} of {size:.1e} (tolerance 2e-5 + 1e-5 of it)"
            );
            assert!(error < 2e-5 + 1e-5 * size, "{name}: {what}");
        }
    }
    Ok(())
}

#[test]
fn gradients_match_differences_through_router_experts_and_balance() -> Result<()> {
    let shape =
        Shape { shared: Some(Shared { intermediate: 8, output_gate: true }), ..Shape::new(8, 8, 3, 2) };
    for scoring in [Scoring::Softmax, Scoring::Sigmoid] {
        let map = VarMap::new();
        let vb = VarBuilder::from_varmap(&map, DType::F32, &DEVICE);
        let mut config = MoeConfig::new(shape.clone());
        (config.precision, config.router.scoring, config.router.scaling) = (Precision::F32, scoring, 1.5);
        let layer = MoeLayer::new(&group(1)?, &config, vb)?;
        let mut named: Vec<_> = map.data().lock().expect("no panic holds it").clone().into_iter().collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        named.retain(|(name, _)| !name.contains("correction_bias"));
        for (i, (_, v)) in named.iter().enumerate() {
            v.set(var(v.dims(), 0.6, 50 + i as u32)?.as_tensor())?;
        }
        let x = var(&[2, 3, 8], 1.0, 4)?;
        named.push(("x".into(), x.clone()));

        let loss = || -> Result<(Tensor, Vec<i32>)> {
            let out = layer.forward_train(&x)?;
            Ok(((weighed(&out.y)? + (out.routed.balance_loss()? * 0.5)?)?, out.routed.ids))
        };
        let (start, ids) = loss()?;
        let gradients = start.backward()?;
        let (mut checked, step) = (0, 4e-3);
        for (name, v) in &named {
            let gradient = values(gradients.get(v).expect("a gradient"))?;
            let original = values(v)?;
            let mut worst = (0.0_f32, 0);
            for i in 0..original.len() {
                let at = |delta: f32| {
                    let mut moved = original.clone();
                    moved[i] += delta;
                    v.set(&Tensor::from_vec(moved, v.shape(), &DEVICE)?)?;
                    let (loss, moved) = loss()?;
                    // A step across a change of route is no derivative.
                    Ok::<_, Error>((moved == ids).then_some(loss.to_scalar::<f32>()?))
                };
                if let (Some(up), Some(down)) = (at(step)?, at(-step)?) {
                    let error = ((up - down) / (2.0 * step) - gradient[i]).abs();
                    worst = if error > worst.0 { (error, i) } else { worst };
                    checked += 1;
                }
            }
            v.set(&Tensor::from_vec(original, v.shape(), &DEVICE)?)?;
            println!("{scoring:?}, {name}: largest error {:.1e} at {} (tolerance 5e-4)", worst.0, worst.1);
            assert!(worst.0 < 5e-4, "{scoring:?}: {name}");
        }
        assert!(checked > 500, "only {checked} differences stayed on their routes");
    }
    Ok(())
}

/// The bits of y and of every gradient, in a fixed order.
fn bits(ranks: usize, split: Option<&[usize]>, precision: Precision) -> Result<Vec<u32>> {
    let shape = Shape {
        shared: Some(Shared { intermediate: 16, output_gate: true }),
        biases: true,
        ..Shape::new(32, 48, 8, 2)
    };
    let (named, vb) = experts(&shape, 0.3)?;
    let x = var(&[37, 32], 1.0, 9)?;
    let weights = var(&[37, 2], 1.0, 10)?;
    let ids: Vec<i32> = noise(74, 11).iter().map(|v| ((v + 1.0) * 4.0) as i32).collect();
    let own = ExpertWeights::new(&shape, vb)?;
    let layer = MoeExperts::new(&group(ranks)?, shape.clone(), Knobs::for_shape(&shape), precision, own)?;
    let y = match split {
        Some(split) => layer.forward_split(&x, &ids, &weights, split)?,
        None => layer.forward(&x, &ids, &weights)?,
    };
    let gradients = weighed(&y)?.backward()?;
    let mut all = values(&y)?;
    for v in [x, weights].iter().chain(named.iter().map(|(_, v)| v)) {
        all.extend(values(gradients.get(v).expect("a gradient"))?);
    }
    Ok(all.into_iter().map(f32::to_bits).collect())
}

#[test]
fn ranks_and_splits_change_no_bit() -> Result<()> {
    for precision in [Precision::Bf16, Precision::F32] {
        let one = bits(1, None, precision)?;
        assert_eq!(one, bits(1, None, precision)?, "two runs differ");
        for ranks in [2, 4, 8] {
            assert!(
                one == bits(ranks, None, precision)?,
                "{precision:?}: {ranks} ranks give other bits than 1"
            );
        }
        assert!(
            one == bits(4, Some(&[0, 30, 7, 0]), precision)?,
            "{precision:?}: a ragged split gives other bits"
        );
        println!(
            "{precision:?}: {} values with the same bits for 1, 2, 4, 8 ranks and a ragged split",
            one.len()
        );
    }
    Ok(())
}

#[test]
fn bf16_stays_near_f32() -> Result<()> {
    let (a, b) = (bits(2, None, Precision::Bf16)?, bits(2, None, Precision::F32)?);
    let pairs = a.iter().zip(&b).map(|(&a, &b)| (f32::from_bits(a), f32::from_bits(b)));
    let (error, size) = pairs
        .fold((0.0_f64, 0.0_f64), |(e, s), (a, b)| (e + f64::from((a - b).abs()), s + f64::from(b.abs())));
    println!("sum |bf16 - f32| / sum |f32| = {:.1e} (tolerance 1e-2)", error / size);
    assert!(error / size < 1e-2 && error > 0.0);
    Ok(())
}

#[test]
fn layers_and_forwards_may_interleave_and_a_graph_can_be_walked_twice() -> Result<()> {
    let shape = Shape::new(16, 16, 4, 2);
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F32, &DEVICE);
    let group = group(2)?;
    let config = MoeConfig { precision: Precision::F32, ..MoeConfig::new(shape) };
    let (first, second) =
        (MoeLayer::new(&group, &config, vb.pp("a"))?, MoeLayer::new(&group, &config, vb.pp("b"))?);
    let inputs = [var(&[5, 16], 1.0, 1)?, var(&[9, 16], 1.0, 2)?];
    let forward = |x: &Tensor| weighed(&second.forward_train(&first.forward_train(x)?.y)?.y);
    let alone = |x: &Var| -> Result<Vec<Vec<f32>>> {
        let gradients = forward(x)?.backward()?;
        map.all_vars().iter().chain([x]).map(|v| values(gradients.get(v).expect("a gradient"))).collect()
    };
    let expected = [alone(&inputs[0])?, alone(&inputs[1])?];

    let losses = [forward(&inputs[0])?, forward(&inputs[1])?];
    for walk in 0..2 {
        for (i, loss) in losses.iter().enumerate() {
            let gradients = loss.backward()?;
            for (v, expected) in map.all_vars().iter().chain([&inputs[i]]).zip(&expected[i]) {
                assert_eq!(
                    &values(gradients.get(v).expect("a gradient"))?,
                    expected,
                    "input {i}, walk {walk}"
                );
            }
        }
    }
    // Both at once: gradients add up.
    let gradients = (&losses[0] + &losses[1])?.backward()?;
    for (v, (a, b)) in map.all_vars().iter().zip(expected[0].iter().zip(&expected[1])) {
        let sum = values(gradients.get(v).expect("a gradient"))?;
        assert!(sum.iter().zip(a.iter().zip(b)).all(|(s, (a, b))| (s - (a + b)).abs() < 1e-5));
    }
    Ok(())
}

#[test]
fn constants_get_no_gradient_and_bf16_tensors_are_taken() -> Result<()> {
    let shape = full_shape();
    let (named, vb) = experts(&shape, 0.4)?;
    let own = ExpertWeights::new(&shape, vb)?;
    let frozen = ExpertWeights { gate: own.gate.detach(), ..own };
    let layer =
        MoeExperts::new(&group(1)?, shape.clone(), Knobs::for_shape(&shape), Precision::Bf16, frozen)?;
    let x = Tensor::from_vec(noise(3 * 16, 1), (3, 16), &DEVICE)?.to_dtype(DType::BF16)?;
    let weights = Tensor::full(0.5_f32, (3, 2), &DEVICE)?;
    let y = layer.forward(&x, &[0, 1, 2, 3, 0, 3], &weights)?;
    assert_eq!(y.dtype(), DType::BF16);
    let gradients = weighed(&y.to_dtype(DType::F32)?)?.backward()?;
    for (name, v) in &named {
        assert_eq!(gradients.get(v).is_some(), name != "w_gate", "{name}");
    }
    Ok(())
}

#[test]
fn bad_input_is_an_error_that_says_what_is_allowed() -> Result<()> {
    let shape = Shape::new(16, 16, 4, 2);
    let (_, vb) = experts(&shape, 0.4)?;
    let own = ExpertWeights::new(&shape, vb.clone())?;
    let new = |ranks| {
        let group = group(ranks)?;
        MoeExperts::new(&group, shape.clone(), Knobs::for_shape(&shape), Precision::Bf16, own.clone())
    };
    let layer = new(2)?;
    let x = |width: usize| Tensor::zeros((3, width), DType::F32, &DEVICE);
    let weights = Tensor::zeros((3, 2), DType::F32, &DEVICE)?;
    let said = |result: Result<Tensor>, words: &str| {
        let message = result.expect_err("an error").to_string();
        println!("{message}");
        assert!(message.contains(words), "{message:?} does not say {words:?}");
    };
    said(layer.forward(&x(8)?, &[0; 6], &weights), "width 16");
    said(layer.forward(&x(16)?, &[0; 5], &weights), "topk_ids has 5 elements");
    said(layer.forward(&x(16)?, &[0, 1, 2, 4, 0, 0], &weights), "topk_ids[1, 1] is 4");
    said(layer.forward(&x(16)?, &[0; 6], &weights.t()?), "topk_weights is [2, 3]");
    said(layer.forward_split(&x(16)?, &[0; 6], &weights, &[1, 1]), "expected 4");
    said(new(3).map(|_| weights.clone()), "3");

    let mut config = MoeConfig::new(shape.clone());
    config.router.top_k = 3;
    assert!(MoeLayer::new(&group(2)?, &config, vb.clone()).is_err());
    config.router.top_k = 2;
    let layer = MoeLayer::new(&group(2)?, &config, vb.pp("layer"))?;
    said(layer.forward_train(&Tensor::full(f32::NAN, (1, 16), &DEVICE)?).map(|o| o.y), "not a number");
    assert!(layer.forward_train(&Tensor::zeros(16, DType::F32, &DEVICE)?).is_err());
    let none = Tensor::zeros((0, 16), DType::F32, &DEVICE)?;
    let y = layer.experts().forward(&none, &[], &Tensor::zeros((0, 2), DType::F32, &DEVICE)?)?;
    assert_eq!(y.dims(), [0, 16], "no tokens are no error");
    let Routed { load, .. } = layer.router().forward(&x(16)?)?;
    assert_eq!(load.iter().sum::<u32>(), 6);
    Ok(())
}
