//! The router: choice, weights, ties, the balancing bias and the balancing loss.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::VarBuilder;
use kodkod_candle::{Router, RouterConfig, Scoring};

const DEVICE: Device = Device::Cpu;

/// A router whose logits are its input: the weight is the identity.
fn identity(config: RouterConfig) -> Result<(Router, Var)> {
    let n = config.experts;
    let weight = Var::from_tensor(&Tensor::eye(n, DType::F32, &DEVICE)?)?;
    let bias = Tensor::zeros(n, DType::F32, &DEVICE)?;
    let tensors =
        [("weight".to_string(), weight.as_tensor().clone()), ("e_score_correction_bias".to_string(), bias)];
    let vb = VarBuilder::from_tensors(tensors.into_iter().collect(), DType::F32, &DEVICE);
    Ok((Router::new(n, config, vb)?, weight))
}

fn close(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6)
}

#[test]
fn softmax_weights_follow_the_formula() -> Result<()> {
    let logits = [0.5_f32, 2.0, -1.0, 1.0];
    let p: Vec<f32> = {
        let sum: f32 = logits.iter().map(|l| l.exp()).sum();
        logits.iter().map(|l| l.exp() / sum).collect()
    };
    let x = Tensor::new(&[logits], &DEVICE)?;
    for (renormalize, scaling) in [(true, 1.0), (false, 1.0), (true, 2.5), (false, 0.5)] {
        let config = RouterConfig { renormalize, scaling, ..RouterConfig::new(4, 2) };
        let routed = identity(config)?.0.forward(&x)?;
        assert_eq!(routed.ids, [1, 3]);
        assert_eq!(routed.load, [0, 1, 0, 1]);
        let sum = if renormalize { p[1] + p[3] } else { 1.0 };
        let expected = [p[1], p[3]].map(|p| p / sum * scaling as f32);
        let weights = routed.weights.flatten_all()?.to_vec1::<f32>()?;
        assert!(close(&weights, &expected), "{renormalize} {scaling}: {weights:?}, expected {expected:?}");
    }
    Ok(())
}

#[test]
fn ties_go_to_the_lowest_id() -> Result<()> {
    let x = Tensor::new(
        &[[0.0_f32; 6], [1.0, 2.0, 2.0, 1.0, 2.0, 0.0], [-3.0, -3.0, -5.0, -3.0, -3.0, -3.0]],
        &DEVICE,
    )?;
    for scoring in [Scoring::Softmax, Scoring::Sigmoid] {
        let routed = identity(RouterConfig { scoring, ..RouterConfig::new(6, 4) })?.0.forward(&x)?;
        assert_eq!(routed.ids, [0, 1, 2, 3, 1, 2, 4, 0, 0, 1, 3, 4], "{scoring:?}");
    }
    Ok(())
}

#[test]
fn the_bias_moves_the_choice_and_not_the_weight() -> Result<()> {
    let config = RouterConfig { scoring: Scoring::Sigmoid, renormalize: false, ..RouterConfig::new(4, 1) };
    let (router, _) = identity(config)?;
    let x = Tensor::new(&[[0.3_f32, 0.1, 0.0, -0.2]; 8], &DEVICE)?;
    let mut chosen = Vec::new();
    for _ in 0..200 {
        let routed = router.forward(&x)?;
        let sigmoid = 1.0 / (1.0 + (-[0.3_f32, 0.1, 0.0, -0.2][routed.ids[0] as usize]).exp());
        assert!(close(&routed.weights.flatten_all()?.to_vec1::<f32>()?, &[sigmoid; 8]));
        router.update_bias(&routed.load, 0.01)?;
        chosen.push(routed.ids[0]);
    }
    println!("biases after 200 steps: {:?}", router.selection_bias()?);
    for expert in 0..4 {
        let share = chosen[100..].iter().filter(|&&id| id == expert).count();
        assert!((15..=35).contains(&share), "expert {expert} got {share} of 100 steps");
    }
    assert!(router.update_bias(&[1, 2], 0.01).is_err());
    Ok(())
}

#[test]
fn balance_loss_is_one_at_balance_and_pushes_probability_to_the_idle() -> Result<()> {
    let (router, weight) = identity(RouterConfig::new(4, 1))?;
    let even = Tensor::eye(4, DType::F32, &DEVICE)?;
    let balanced = router.forward(&even)?.balance_loss()?.to_scalar::<f32>()?;
    println!("balanced: {balanced}");
    assert!((balanced - 1.0).abs() < 1e-6);

    let one = Tensor::new(&[[9.0_f32, 0.0, 0.0, 0.0]; 3], &DEVICE)?;
    let loss = router.forward(&one)?.balance_loss()?;
    let value = loss.to_scalar::<f32>()?;
    println!("all to one expert: {value}");
    assert!(value > 3.9 && value <= 4.0);
    let gradients = loss.backward()?;
    let column =
        gradients.get(&weight).expect("a gradient").narrow(1, 0, 1)?.flatten_all()?.to_vec1::<f32>()?;
    assert!(column[0] > 0.0 && column[1..].iter().all(|&g| g < 0.0), "{column:?}");
    Ok(())
}

#[test]
fn bad_configurations_are_errors() -> Result<()> {
    for top_k in [0, 5] {
        let message = identity(RouterConfig::new(4, top_k)).expect_err("an error").to_string();
        println!("{message}");
        assert!(message.contains(&format!("top_k is {top_k}")) && message.contains("1 to 4"));
    }
    Ok(())
}
