//! Which experts a token goes to, and with what weight.
//!
//! For a token's row `x`, with `W_r` `[experts, hidden]`:
//!
//! ```text
//! l = x W_r^T                                 s = softmax(l)  or  sigmoid(l)
//! ids = the k largest of s (+ b, sigmoid)     ties go to the lowest id
//! w = s[ids]                                  optionally divided by its sum, then times the scaling
//! ```
//!
//! The bias `b` moves the choice and not the weight, and follows the load rather than a gradient (DeepSeek-V3,
//! arXiv:2412.19437, equations 12 to 16). The balancing loss is that of the Switch Transformer (arXiv:2101.03961, equations
//! 4 to 6), over all k routes.

use candle_core::{D, DType, Result, Tensor, Var, bail};
use candle_nn::{Init, VarBuilder};

/// How logits become scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scoring {
    /// `softmax(l)` over all experts, then the top-k.
    Softmax,
    /// `sigmoid(l)`, with a selection bias (DeepSeek-V3).
    Sigmoid,
}

/// What a [`Router`] does.
#[derive(Debug, Clone, PartialEq)]
pub struct RouterConfig {
    /// Number of experts.
    pub experts: usize,
    /// Routes per token.
    pub top_k: usize,
    /// How logits become scores.
    pub scoring: Scoring,
    /// Whether a token's weights are divided by their sum.
    pub renormalize: bool,
    /// What the weights are multiplied by, last; 1 for most models, 2.5 in DeepSeek-V3.
    pub scaling: f64,
}

impl RouterConfig {
    /// Softmax, renormalised, not scaled (Mixtral).
    pub fn new(experts: usize, top_k: usize) -> Self {
        RouterConfig { experts, top_k, scoring: Scoring::Softmax, renormalize: true, scaling: 1.0 }
    }
}

/// A linear router.
#[derive(Debug, Clone)]
pub struct Router {
    config: RouterConfig,
    weight: Tensor,
    bias: Option<Var>,
}

/// What a [`Router`] chose for some tokens.
#[derive(Debug, Clone)]
pub struct Routed {
    /// Expert ids, `[tokens, top_k]`, in descending order of score.
    pub ids: Vec<i32>,
    /// Weights of the routes, `[tokens, top_k]`, differentiable, `f32`.
    pub weights: Tensor,
    /// Scores of all experts, `[tokens, experts]`, differentiable, `f32`.
    pub scores: Tensor,
    /// Routes to each expert, `[experts]`.
    pub load: Vec<u32>,
}

impl Router {
    /// A router for rows of width `hidden`. Takes `weight` `[experts, hidden]` from `vb`, and for
    /// [`Scoring::Sigmoid`] `e_score_correction_bias` `[experts]`, the selection bias.
    ///
    /// # Errors
    /// Where `top_k` is not within 1 to `experts`, or a tensor is missing or has another shape.
    pub fn new(hidden: usize, config: RouterConfig, vb: VarBuilder) -> Result<Self> {
        let (experts, top_k) = (config.experts, config.top_k);
        if top_k == 0 || top_k > experts {
            bail!("top_k is {top_k}: a router over {experts} experts can choose 1 to {experts}")
        }
        let init = Init::Randn { mean: 0.0, stdev: (hidden.max(1) as f64).powf(-0.5) };
        let weight = vb.get_with_hints((experts, hidden), "weight", init)?.to_dtype(DType::F32)?;
        let bias = match config.scoring {
            Scoring::Softmax => None,
            Scoring::Sigmoid => {
                let bias = vb.get_with_hints(experts, "e_score_correction_bias", Init::Const(0.0))?;
                Some(Var::from_tensor(&bias.to_dtype(DType::F32)?)?)
            }
        };
        Ok(Router { config, weight, bias })
    }

    /// What this router does.
    pub fn config(&self) -> &RouterConfig {
        &self.config
    }

    /// Routes `x` `[tokens, hidden]`.
    ///
    /// # Errors
    /// Where `x` has another width, or a score is not a number.
    pub fn forward(&self, x: &Tensor) -> Result<Routed> {
        let RouterConfig { experts, top_k, scoring, renormalize, scaling } = self.config;
        let logits = x.to_dtype(DType::F32)?.matmul(&self.weight.t()?)?;
        let scores = match scoring {
            Scoring::Softmax => candle_nn::ops::softmax(&logits, D::Minus1)?,
            Scoring::Sigmoid => (logits.neg()?.exp()? + 1.0)?.recip()?,
        };
        let mut choice = scores.flatten_all()?.to_vec1::<f32>()?;
        if let Some(bias) = self.selection_bias()? {
            choice.iter_mut().zip(bias.iter().cycle()).for_each(|(score, b)| *score += b);
        }
        let tokens = scores.dim(0)?;
        let mut ids = Vec::with_capacity(tokens * top_k);
        let mut load = vec![0; experts];
        for (token, row) in choice.chunks_exact_mut(experts).enumerate() {
            if let Some(e) = row.iter().position(|s| s.is_nan()) {
                bail!(
                    "the router's score of expert {e} for token {token} is not a number: x or the weights have one that is not finite"
                )
            }
            for _ in 0..top_k {
                let best = (1..experts).fold(0, |best, e| if row[e] > row[best] { e } else { best });
                row[best] = f32::NEG_INFINITY;
                load[best] += 1;
                ids.push(best as u32);
            }
        }
        let index = Tensor::from_slice(&ids, (tokens, top_k), scores.device())?;
        let mut weights = scores.gather(&index, D::Minus1)?;
        if renormalize {
            // Sigmoids can all be tiny; the softmax's largest is at least 1 / experts.
            weights = weights.broadcast_div(&(weights.sum_keepdim(D::Minus1)? + 1e-20)?)?;
        }
        if scaling != 1.0 {
            weights = (weights * scaling)?;
        }
        let ids = ids.into_iter().map(|id| id as i32).collect();
        Ok(Routed { ids, weights, scores, load })
    }

    /// The selection bias `[experts]`, where the scoring has one.
    ///
    /// # Errors
    /// Where it cannot be read from its device.
    pub fn selection_bias(&self) -> Result<Option<Vec<f32>>> {
        self.bias.as_ref().map(|bias| bias.to_vec1()).transpose()
    }

    /// Moves the selection bias by `speed` towards balance: up for experts that had less than the mean load, down for
    /// those that had more. DeepSeek-V3 does so once a step, with a speed of 0.001. Without a bias it does nothing.
    ///
    /// # Errors
    /// Where `load` has another length than there are experts.
    pub fn update_bias(&self, load: &[u32], speed: f32) -> Result<()> {
        let experts = self.config.experts;
        if load.len() != experts {
            bail!("load has {} elements: one for each of the {experts} experts is needed", load.len())
        }
        let (Some(var), Some(mut bias)) = (&self.bias, self.selection_bias()?) else {
            return Ok(());
        };
        let total: u64 = load.iter().map(|&n| u64::from(n)).sum();
        for (b, &n) in bias.iter_mut().zip(load) {
            match (u64::from(n) * experts as u64).cmp(&total) {
                std::cmp::Ordering::Less => *b += speed,
                std::cmp::Ordering::Greater => *b -= speed,
                std::cmp::Ordering::Equal => {}
            }
        }
        var.set(&Tensor::from_vec(bias, experts, var.device())?)
    }
}

impl Routed {
    /// The load-balancing loss, a differentiable scalar: `experts * sum over e of f_e * P_e`, where `f_e` is the share of
    /// routes that went to expert e and `P_e` the mean over tokens of its score (divided by the token's sum of
    /// scores, which is 1 for softmax). It is 1 at perfect balance, up to `experts / top_k` where all tokens go to
    /// the same experts; the gradient flows through `P`.
    ///
    /// # Errors
    /// Where candle cannot compute it.
    pub fn balance_loss(&self) -> Result<Tensor> {
        let (tokens, experts) = self.scores.dims2()?;
        let routes = self.ids.len().max(1) as f32;
        let share = self.load.iter().map(|&n| n as f32 / routes * experts as f32 / tokens.max(1) as f32);
        let share = Tensor::from_iter(share, self.scores.device())?;
        let p = self.scores.broadcast_div(&self.scores.sum_keepdim(D::Minus1)?)?;
        p.sum(0)?.mul(&share)?.sum_all()
    }
}
