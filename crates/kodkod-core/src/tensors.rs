//! The layer's weights and their gradients, as the caller's slices. All are row-major.

use crate::error::{Error, Result};
use crate::shape::Shape;

/// Weights of all experts, in their storage type; biases and the output gate are `f32`.
#[derive(Debug, Clone, Copy)]
pub struct Weights<'a, T> {
    /// `[experts, intermediate, hidden]`
    pub gate: &'a [T],
    /// `[experts, intermediate, hidden]`
    pub up: &'a [T],
    /// `[experts, hidden, intermediate]`
    pub down: &'a [T],
    /// Given where [`Shape::biases`] is set.
    pub biases: Option<Biases<&'a [f32]>>,
    /// Given where [`Shape::shared`] is.
    pub shared: Option<SharedWeights<&'a [T], &'a [f32]>>,
}

/// Biases of the routed experts, or their gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Biases<S> {
    /// `[experts, intermediate]`
    pub gate: S,
    /// `[experts, intermediate]`
    pub up: S,
    /// `[experts, hidden]`
    pub down: S,
}

/// Weights of the shared experts, taken together as one of their total width, or their gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SharedWeights<S, G> {
    /// `[shared intermediate, hidden]`
    pub gate: S,
    /// `[shared intermediate, hidden]`
    pub up: S,
    /// `[hidden, shared intermediate]`
    pub down: S,
    /// `[1, hidden]`, given where the shape has an output gate.
    pub output_gate: Option<G>,
}

/// Gradients of all weights, in `f32`; `S` is `Vec<f32>` or `&mut [f32]`.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightGradients<S = Vec<f32>> {
    /// `[experts, intermediate, hidden]`
    pub gate: S,
    /// `[experts, intermediate, hidden]`
    pub up: S,
    /// `[experts, hidden, intermediate]`
    pub down: S,
    /// Present where [`Shape::biases`] is set.
    pub biases: Option<Biases<S>>,
    /// Present where [`Shape::shared`] is.
    pub shared: Option<SharedWeights<S, S>>,
}

/// Elements of one expert's gate, up or down weight.
fn expert_len(shape: &Shape) -> usize {
    shape.hidden * shape.intermediate
}

impl<T> Weights<'_, T> {
    /// `Ok` where every slice has the length that the shape asks for, and the optional ones are there if and only
    /// if the shape has them.
    ///
    /// # Errors
    /// [`Error::Length`] or [`Error::Invalid`] that names the weight.
    pub fn validate(&self, shape: &Shape) -> Result<()> {
        let (e, h, i) =
            (("experts", shape.experts), ("hidden", shape.hidden), ("intermediate", shape.intermediate));
        Error::check_len("w_gate", self.gate.len(), &[e, i, h])?;
        Error::check_len("w_up", self.up.len(), &[e, i, h])?;
        Error::check_len("w_down", self.down.len(), &[e, h, i])?;
        present("biases", self.biases.is_some(), shape.biases)?;
        if let Some(b) = &self.biases {
            Error::check_len("b_gate", b.gate.len(), &[e, i])?;
            Error::check_len("b_up", b.up.len(), &[e, i])?;
            Error::check_len("b_down", b.down.len(), &[e, h])?;
        }
        present("shared weights", self.shared.is_some(), shape.shared.is_some())?;
        if let (Some(w), Some(s)) = (&self.shared, shape.shared) {
            let s_dim = ("shared intermediate", s.intermediate);
            Error::check_len("shared_gate", w.gate.len(), &[s_dim, h])?;
            Error::check_len("shared_up", w.up.len(), &[s_dim, h])?;
            Error::check_len("shared_down", w.down.len(), &[h, s_dim])?;
            present("shared_output_gate", w.output_gate.is_some(), s.output_gate)?;
            if let Some(g) = w.output_gate {
                Error::check_len("shared_output_gate", g.len(), &[("rows", 1), h])?;
            }
        }
        Ok(())
    }
}

fn present(name: &str, given: bool, wanted: bool) -> Result<()> {
    match (given, wanted) {
        (true, false) => Err(Error::invalid(name, "given", "the shape has none")),
        (false, true) => Err(Error::invalid(name, "missing", "the shape has them")),
        _ => Ok(()),
    }
}

impl WeightGradients<Vec<f32>> {
    /// Zeros, of a shape.
    pub fn zeros(shape: &Shape) -> Self {
        let zeros = |n: usize| vec![0.0; n];
        let per_expert = |n: usize| zeros(shape.experts * n);
        WeightGradients {
            gate: per_expert(expert_len(shape)),
            up: per_expert(expert_len(shape)),
            down: per_expert(expert_len(shape)),
            biases: shape.biases.then(|| Biases {
                gate: per_expert(shape.intermediate),
                up: per_expert(shape.intermediate),
                down: per_expert(shape.hidden),
            }),
            shared: shape.shared.map(|s| SharedWeights {
                gate: zeros(s.intermediate * shape.hidden),
                up: zeros(s.intermediate * shape.hidden),
                down: zeros(s.intermediate * shape.hidden),
                output_gate: s.output_gate.then(|| zeros(shape.hidden)),
            }),
        }
    }

    /// Slices of these buffers, to hand to a backward.
    pub fn as_mut(&mut self) -> WeightGradients<&mut [f32]> {
        WeightGradients {
            gate: &mut self.gate,
            up: &mut self.up,
            down: &mut self.down,
            biases: self.biases.as_mut().map(|b| Biases {
                gate: &mut b.gate[..],
                up: &mut b.up,
                down: &mut b.down,
            }),
            shared: self.shared.as_mut().map(|s| SharedWeights {
                gate: &mut s.gate[..],
                up: &mut s.up,
                down: &mut s.down,
                output_gate: s.output_gate.as_deref_mut(),
            }),
        }
    }

    /// Every gradient with its name, in a fixed order.
    pub fn named(&self) -> Vec<(&'static str, &[f32])> {
        let mut all = vec![("dw_gate", &self.gate[..]), ("dw_up", &self.up), ("dw_down", &self.down)];
        if let Some(b) = &self.biases {
            all.extend([("db_gate", &b.gate[..]), ("db_up", &b.up), ("db_down", &b.down)]);
        }
        if let Some(s) = &self.shared {
            all.extend([("d_shared_gate", &s.gate[..]), ("d_shared_up", &s.up), ("d_shared_down", &s.down)]);
            if let Some(g) = &s.output_gate {
                all.push(("d_shared_output_gate", g));
            }
        }
        all
    }
}

impl WeightGradients<&mut [f32]> {
    /// `Ok` where every buffer has the length that the shape asks for, and is there if the shape has it.
    ///
    /// # Errors
    /// [`Error::Length`] or [`Error::Invalid`] that names the gradient.
    pub fn validate(&self, shape: &Shape) -> Result<()> {
        let (e, h, i) =
            (("experts", shape.experts), ("hidden", shape.hidden), ("intermediate", shape.intermediate));
        Error::check_len("dw_gate", self.gate.len(), &[e, i, h])?;
        Error::check_len("dw_up", self.up.len(), &[e, i, h])?;
        Error::check_len("dw_down", self.down.len(), &[e, h, i])?;
        present("bias gradients", self.biases.is_some(), shape.biases)?;
        if let Some(b) = &self.biases {
            Error::check_len("db_gate", b.gate.len(), &[e, i])?;
            Error::check_len("db_up", b.up.len(), &[e, i])?;
            Error::check_len("db_down", b.down.len(), &[e, h])?;
        }
        present("shared gradients", self.shared.is_some(), shape.shared.is_some())?;
        if let (Some(g), Some(s)) = (&self.shared, shape.shared) {
            let s_dim = ("shared intermediate", s.intermediate);
            Error::check_len("d_shared_gate", g.gate.len(), &[s_dim, h])?;
            Error::check_len("d_shared_up", g.up.len(), &[s_dim, h])?;
            Error::check_len("d_shared_down", g.down.len(), &[h, s_dim])?;
            present("d_shared_output_gate", g.output_gate.is_some(), s.output_gate)?;
            if let Some(g) = &g.output_gate {
                Error::check_len("d_shared_output_gate", g.len(), &[("rows", 1), h])?;
            }
        }
        Ok(())
    }
}
