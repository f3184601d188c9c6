//! A byte-level MoE transformer.
//!
//! ```text
//! x = embedding[byte]
//! for every block:   x = x + attention(norm(x))      causal, rotary positions
//!                    x = x + experts(norm(x))        kodkod
//! logits = norm(x) W_head^T
//! ```
//!
//! Norms are RMSNorm. The input of each attention is mixed with that of the byte before (a *token shift*), so that a
//! head need not spend itself on looking one byte back.

use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_nn::{Init, VarBuilder};
use kodkod::{ExpertGroup, Knobs, Precision, Shape};
use kodkod_candle::{MoeConfig, MoeLayer};
use serde::{Deserialize, Serialize};

use super::ops;

/// Byte values.
pub(crate) const VOCABULARY: usize = 256;

/// The model's sizes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sizes {
    /// Width of a token's row.
    pub(crate) hidden: usize,
    /// Blocks of attention and experts.
    pub(crate) layers: usize,
    /// Attention heads.
    pub(crate) heads: usize,
    /// Experts of a block.
    pub(crate) experts: usize,
    /// Experts that a token goes to.
    pub(crate) top_k: usize,
    /// Width inside an expert.
    pub(crate) intermediate: usize,
}

impl Sizes {
    /// The shape of every block's MoE layer.
    pub(crate) fn moe(&self) -> Shape {
        Shape::new(self.hidden, self.intermediate, self.experts, self.top_k)
    }
}

/// The transformer.
pub(crate) struct Model {
    embedding: Tensor,
    blocks: Vec<Block>,
    norm: Tensor,
    head: Tensor,
}

struct Block {
    heads: usize,
    attention_norm: Tensor,
    shift: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    moe_norm: Tensor,
    moe: MoeLayer,
}

/// What a forward gives beside the logits, for every block.
pub(crate) struct Balance {
    /// Routes to each expert.
    pub(crate) load: Vec<u32>,
    /// The load-balancing loss.
    pub(crate) loss: Tensor,
}

impl Model {
    /// A model whose experts run on `group`.
    pub(crate) fn new(
        sizes: &Sizes,
        group: &ExpertGroup,
        precision: Precision,
        knobs: Knobs,
        vb: VarBuilder,
    ) -> Result<Self> {
        let d = sizes.hidden;
        let blocks =
            (0..sizes.layers).map(|i| Block::new(sizes, group, precision, knobs, vb.pp(format!("block{i}"))));
        Ok(Model {
            embedding: vb.get_with_hints(
                (VOCABULARY, d),
                "embedding",
                Init::Randn { mean: 0.0, stdev: 0.5 },
            )?,
            blocks: blocks.collect::<Result<_>>()?,
            norm: vb.get_with_hints(d, "norm", Init::Const(1.0))?,
            head: matrix(&vb, "head", VOCABULARY, d, 0.1)?,
        })
    }

    /// Logits `[batch * n, 256]` for `batch` sequences of `n` bytes, one after the other in `bytes`.
    pub(crate) fn forward(&self, bytes: &[u32], batch: usize) -> Result<(Tensor, Vec<Balance>)> {
        let ids = Tensor::from_slice(bytes, bytes.len(), &Device::Cpu)?;
        let mut x = self.embedding.index_select(&ids, 0)?;
        let mut balances = Vec::with_capacity(self.blocks.len());
        for block in &self.blocks {
            let (y, balance) = block.forward(&x, batch)?;
            (x, _) = (y, balances.push(balance));
        }
        Ok((ops::rms_norm(&x, &self.norm)?.matmul(&self.head.t()?)?, balances))
    }
}

impl Block {
    fn new(
        sizes: &Sizes,
        group: &ExpertGroup,
        precision: Precision,
        knobs: Knobs,
        vb: VarBuilder,
    ) -> Result<Self> {
        let d = sizes.hidden;
        let mut moe = MoeConfig::new(sizes.moe());
        (moe.precision, moe.knobs) = (precision, knobs);
        // Residual branches start small, so that a deep sum of them is no larger than a shallow one.
        let small = (2.0 * sizes.layers as f64).powf(-0.5);
        Ok(Block {
            heads: sizes.heads,
            attention_norm: vb.get_with_hints(d, "attention_norm", Init::Const(1.0))?,
            shift: vb.get_with_hints(d, "shift", Init::Const(0.5))?,
            query: matrix(&vb, "query", d, d, 1.0)?,
            key: matrix(&vb, "key", d, d, 1.0)?,
            value: matrix(&vb, "value", d, d, 1.0)?,
            output: matrix(&vb, "output", d, d, small)?,
            moe_norm: vb.get_with_hints(d, "moe_norm", Init::Const(1.0))?,
            moe: MoeLayer::new(group, &moe, vb.pp("moe"))?,
        })
    }

    /// `x` `[batch * n, hidden]`
    fn forward(&self, x: &Tensor, batch: usize) -> Result<(Tensor, Balance)> {
        let (rows, d) = x.dims2()?;
        let n = rows / batch;
        let shifted = ops::rms_norm(x, &self.attention_norm)?.reshape((batch, n, d))?;
        let shifted = ops::token_shift(&shifted, &self.shift)?.reshape((rows, d))?;
        let heads = |weight: &Tensor, rotary| -> Result<Tensor> {
            Ok(ops::split_heads(&shifted.matmul(&weight.t()?)?.reshape((batch, n, d))?, self.heads, rotary)?)
        };
        let (query, key, value) =
            (heads(&self.query, true)?, heads(&self.key, true)?, heads(&self.value, false)?);
        let scale = ((d / self.heads) as f32).powf(-0.5);
        let attention = ops::causal_softmax(&query.matmul(&key.t()?)?, scale)?.matmul(&value)?;
        let attention = attention.transpose(1, 2)?.reshape((rows, d))?;
        let x = (x + attention.matmul(&self.output.t()?)?)?;

        let out = self.moe.forward_train(&ops::rms_norm(&x, &self.moe_norm)?)?;
        Ok(((&x + out.y)?, Balance { loss: out.routed.balance_loss()?, load: out.routed.load }))
    }
}

/// A weight `[rows, columns]` whose product with a unit row has the standard deviation `scale`.
fn matrix(vb: &VarBuilder, name: &str, rows: usize, columns: usize, scale: f64) -> Result<Tensor> {
    let stdev = scale * (columns as f64).powf(-0.5);
    Ok(vb.get_with_hints((rows, columns), name, Init::Randn { mean: 0.0, stdev })?)
}
