//! What one layer computes: sizes, activation, shared experts.

use crate::error::{Error, Result};

/// Sizes of one MoE layer, and what its experts compute.
///
/// For a token's row `x` and expert `e`, with `W_gate`, `W_up` `[intermediate, hidden]` and `W_down`
/// `[hidden, intermediate]`:
///
/// ```text
/// g = x W_gate[e]^T (+ b_gate[e])    u = x W_up[e]^T (+ b_up[e])
/// h = act(g, u)                      y_k = h W_down[e]^T (+ b_down[e])
/// y = shared(x) + sum over k in order of w_k y_k
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// Width of a token's row: a multiple of [`Shape::MULTIPLE`].
    pub hidden: usize,
    /// Width inside a routed expert: a multiple of [`Shape::MULTIPLE`].
    pub intermediate: usize,
    /// Number of routed experts, over all ranks.
    pub experts: usize,
    /// Routes per token, 1 to [`Shape::MAX_TOP_K`].
    pub top_k: usize,
    /// The shared experts, taken together, if there are any.
    pub shared: Option<Shared>,
    /// The activation of routed and shared experts.
    pub activation: Activation,
    /// Whether the routed experts have biases (gpt-oss).
    pub biases: bool,
}

/// Shared experts: every token passes through them. Several are one of their total width, since a sum over
/// experts is a sum over their columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shared {
    /// Total intermediate width of the shared experts: a multiple of [`Shape::MULTIPLE`].
    pub intermediate: usize,
    /// Whether their output is multiplied by `sigmoid(x . w_output_gate)` (Qwen).
    pub output_gate: bool,
}

/// `act(g, u) = (u + up_offset) * g * sigmoid(alpha * g)`, after clamping `g <= limit` and `|u| <= limit`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// `silu(g) * u`, optionally clamped.
    SwiGlu {
        /// Clamp, if any; the gradient is zero beyond it.
        limit: Option<f32>,
    },
    /// gpt-oss: `(u + 1) * g * sigmoid(alpha * g)`, optionally clamped.
    SwiGluOai {
        /// Slope inside the sigmoid; 1.702 in gpt-oss.
        alpha: f32,
        /// Clamp, if any; 7 in gpt-oss. The gradient is zero beyond it.
        limit: Option<f32>,
    },
}

impl Activation {
    /// Slope inside the sigmoid.
    pub fn alpha(&self) -> f32 {
        match *self {
            Activation::SwiGlu { .. } => 1.0,
            Activation::SwiGluOai { alpha, .. } => alpha,
        }
    }

    /// What is added to `u` before the product.
    pub fn up_offset(&self) -> f32 {
        match self {
            Activation::SwiGlu { .. } => 0.0,
            Activation::SwiGluOai { .. } => 1.0,
        }
    }

    /// The clamp, if any.
    pub fn limit(&self) -> Option<f32> {
        match *self {
            Activation::SwiGlu { limit } | Activation::SwiGluOai { limit, .. } => limit,
        }
    }
}

impl Shape {
    /// `hidden`, `intermediate` and the shared width are multiples of this.
    pub const MULTIPLE: usize = 8;
    /// The largest top-k.
    pub const MAX_TOP_K: usize = 32;
    /// The largest number of routed experts.
    pub const MAX_EXPERTS: usize = 4096;

    /// A SwiGLU layer without shared experts, biases or clamp; change the fields for more.
    pub fn new(hidden: usize, intermediate: usize, experts: usize, top_k: usize) -> Self {
        let activation = Activation::SwiGlu { limit: None };
        Shape { hidden, intermediate, experts, top_k, shared: None, activation, biases: false }
    }

    /// Slots per token in the combine buffer: one a route, and one for the shared experts.
    pub fn slots(&self) -> usize {
        self.top_k + usize::from(self.shared.is_some())
    }

    /// Floating-point operations of a forward that computes `routes` routes of `tokens` tokens, padding not
    /// counted: 6 * hidden * intermediate a route. A backward takes twice as many.
    pub fn forward_flops(&self, tokens: usize, routes: usize) -> f64 {
        let shared = self.shared.map_or(0, |s| s.intermediate);
        6.0 * self.hidden as f64 * (routes as f64 * self.intermediate as f64 + tokens as f64 * shared as f64)
    }

    /// `Ok` where every size is allowed.
    ///
    /// # Errors
    /// [`Error::Invalid`] that names the first size which is not.
    pub fn validate(&self) -> Result<()> {
        let width = |name: &str, value: usize| match value {
            0 => Err(Error::invalid(
                name,
                value,
                format!("a positive multiple of {} is needed", Self::MULTIPLE),
            )),
            v if v % Self::MULTIPLE != 0 => {
                Err(Error::invalid(name, value, format!("it must be a multiple of {}", Self::MULTIPLE)))
            }
            v if v > 1 << 20 => Err(Error::invalid(name, value, "at most 1048576 is allowed")),
            _ => Ok(()),
        };
        width("hidden", self.hidden)?;
        width("intermediate", self.intermediate)?;
        if let Some(shared) = self.shared {
            width("shared intermediate", shared.intermediate)?;
        }
        if self.experts == 0 || self.experts > Self::MAX_EXPERTS {
            return Err(Error::invalid(
                "experts",
                self.experts,
                format!("1 to {} are allowed", Self::MAX_EXPERTS),
            ));
        }
        if self.top_k == 0 || self.top_k > Self::MAX_TOP_K {
            return Err(Error::invalid("top_k", self.top_k, format!("1 to {} are allowed", Self::MAX_TOP_K)));
        }
        if let Some(limit) = self.activation.limit()
            && (limit.is_nan() || limit <= 0.0)
        {
            return Err(Error::invalid("limit", limit, "a positive number is needed"));
        }
        if !self.activation.alpha().is_finite() {
            return Err(Error::invalid("alpha", self.activation.alpha(), "a finite number is needed"));
        }
        Ok(())
    }
}
