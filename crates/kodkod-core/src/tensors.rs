//! The layer's weights and their gradients, as the caller's slices. All are row-major.

use std::convert::Infallible;
use std::ops::Range;

use half::bf16;

use crate::error::{Error, Result};
use crate::numerics::Element;
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

impl Biases<Vec<f32>> {
    /// Slices of these buffers, for [`Weights`].
    pub fn as_slices(&self) -> Biases<&[f32]> {
        Biases { gate: &self.gate, up: &self.up, down: &self.down }
    }
}

impl<T> SharedWeights<Vec<T>, Vec<f32>> {
    /// Slices of these buffers, for [`Weights`].
    pub fn as_slices(&self) -> SharedWeights<&[T], &[f32]> {
        let output_gate = self.output_gate.as_deref();
        SharedWeights { gate: &self.gate, up: &self.up, down: &self.down, output_gate }
    }
}

/// Gradients of all weights: `S` holds those of gate, up and down, in `f32` or [`bf16`]; `G` the others, in
/// `f32` always. For example `Vec<bf16>` and `Vec<f32>`, or `&mut [f32]` both.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightGradients<S = Vec<f32>, G = S> {
    /// `[experts, intermediate, hidden]`
    pub gate: S,
    /// `[experts, intermediate, hidden]`
    pub up: S,
    /// `[experts, hidden, intermediate]`
    pub down: S,
    /// Present where [`Shape::biases`] is set.
    pub biases: Option<Biases<G>>,
    /// Present where [`Shape::shared`] is.
    pub shared: Option<SharedWeights<S, G>>,
}

/// What the gradients of gate, up and down are stored in: `f32` or [`bf16`]. The sum over an expert's rows
/// runs in `f32` in both, from the first row to the last; [`bf16`] holds it rounded once, at its end.
pub trait GradientElement: Element {
    /// The same slice, if this type is `f32`.
    fn as_f32(values: &mut [Self]) -> Result<&mut [f32], &mut [Self]>;
}

impl GradientElement for f32 {
    fn as_f32(values: &mut [f32]) -> Result<&mut [f32], &mut [f32]> {
        Ok(values)
    }
}

impl GradientElement for bf16 {
    fn as_f32(values: &mut [bf16]) -> Result<&mut [f32], &mut [bf16]> {
        Err(values)
    }
}

impl<'a, T> Weights<'a, T> {
    /// Those of a part of the shape's experts, and the shared experts'.
    ///
    /// # Panics
    /// For experts beyond the shape's.
    pub fn of_experts(&self, shape: &Shape, experts: Range<usize>) -> Weights<'a, T> {
        Weights {
            gate: part(self.gate, shape, &experts),
            up: part(self.up, shape, &experts),
            down: part(self.down, shape, &experts),
            biases: self.biases.map(|b| Biases {
                gate: part(b.gate, shape, &experts),
                up: part(b.up, shape, &experts),
                down: part(b.down, shape, &experts),
            }),
            shared: self.shared,
        }
    }

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

/// Some of the shape's experts' elements.
fn part<'a, T>(all: &'a [T], shape: &Shape, experts: &Range<usize>) -> &'a [T] {
    let each = all.len() / shape.experts;
    &all[experts.start * each..experts.end * each]
}

fn present(name: &str, given: bool, wanted: bool) -> Result<()> {
    match (given, wanted) {
        (true, false) => Err(Error::invalid(name, "given", "the shape has none")),
        (false, true) => Err(Error::invalid(name, "missing", "the shape has them")),
        _ => Ok(()),
    }
}

impl WeightGradients<usize> {
    /// Elements of each gradient.
    pub fn lens(shape: &Shape) -> Self {
        let (e, h, i) = (shape.experts, shape.hidden, shape.intermediate);
        WeightGradients {
            gate: e * i * h,
            up: e * i * h,
            down: e * h * i,
            biases: shape.biases.then_some(Biases { gate: e * i, up: e * i, down: e * h }),
            shared: shape.shared.map(|s| {
                let len = s.intermediate * h;
                SharedWeights { gate: len, up: len, down: len, output_gate: s.output_gate.then_some(h) }
            }),
        }
    }
}

impl<S, G> WeightGradients<S, G> {
    /// References to the parts.
    pub fn as_ref(&self) -> WeightGradients<&S, &G> {
        WeightGradients {
            gate: &self.gate,
            up: &self.up,
            down: &self.down,
            biases: self.biases.as_ref().map(|b| Biases { gate: &b.gate, up: &b.up, down: &b.down }),
            shared: self.shared.as_ref().map(|s| SharedWeights {
                gate: &s.gate,
                up: &s.up,
                down: &s.down,
                output_gate: s.output_gate.as_ref(),
            }),
        }
    }

    /// The parts in a fixed order: gate, up and down, of the routed experts, then of the shared; and the others.
    pub fn into_parts(self) -> (Vec<S>, Vec<G>) {
        let (mut weights, mut rest) = (Vec::new(), Vec::new());
        self.map(|s| weights.push(s), |g| rest.push(g));
        (weights, rest)
    }

    /// Every part through a function: gate, up and down through `weight`, the others through `rest`.
    pub fn map<S2, G2>(
        self,
        mut weight: impl FnMut(S) -> S2,
        mut rest: impl FnMut(G) -> G2,
    ) -> WeightGradients<S2, G2> {
        let done: Result<_, Infallible> = self.try_map(|s| Ok(weight(s)), |g| Ok(rest(g)));
        done.unwrap_or_else(|never| match never {})
    }

    /// [`WeightGradients::map`] with functions that can fail.
    ///
    /// # Errors
    /// The first error of a function.
    pub fn try_map<S2, G2, E>(
        self,
        mut weight: impl FnMut(S) -> Result<S2, E>,
        mut rest: impl FnMut(G) -> Result<G2, E>,
    ) -> Result<WeightGradients<S2, G2>, E> {
        let (gate, up, down) = (weight(self.gate)?, weight(self.up)?, weight(self.down)?);
        let biases = match self.biases {
            Some(b) => Some(Biases { gate: rest(b.gate)?, up: rest(b.up)?, down: rest(b.down)? }),
            None => None,
        };
        let shared = match self.shared {
            Some(s) => Some(SharedWeights {
                gate: weight(s.gate)?,
                up: weight(s.up)?,
                down: weight(s.down)?,
                output_gate: s.output_gate.map(rest).transpose()?,
            }),
            None => None,
        };
        Ok(WeightGradients { gate, up, down, biases, shared })
    }
}

impl WeightGradients {
    /// Zeros, of a shape, in `f32`.
    pub fn zeros(shape: &Shape) -> Self {
        Self::zeros_in::<f32>(shape)
    }

    /// Zeros, of a shape, those of gate, up and down in `T`.
    pub fn zeros_in<T: GradientElement>(shape: &Shape) -> WeightGradients<Vec<T>, Vec<f32>> {
        WeightGradients::lens(shape).map(|n| vec![T::default(); n], |n| vec![0.0; n])
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

impl<T: GradientElement> WeightGradients<Vec<T>, Vec<f32>> {
    /// Slices of these buffers, to hand to a backward.
    pub fn as_mut(&mut self) -> WeightGradients<&mut [T], &mut [f32]> {
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

    /// All rounded to `U`: exact from [`bf16`] to `f32`.
    pub fn convert<U: GradientElement>(&self) -> WeightGradients<Vec<U>, Vec<f32>> {
        let converted = |values: &Vec<T>| values.iter().map(|v| U::from_f32(v.to_f32())).collect();
        self.as_ref().map(converted, Vec::clone)
    }
}

impl<T> WeightGradients<&mut [T], &mut [f32]> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::Shared;

    #[test]
    fn parts_keep_their_order_and_bf16_is_rounded_once() {
        let mut shape = Shape::new(16, 8, 2, 1);
        shape.biases = true;
        shape.shared = Some(Shared { intermediate: 24, output_gate: true });
        let mut next = 0;
        let mut fill = |n: usize| {
            next += 1;
            (0..n).map(|i| next as f32 + i as f32 / 256.0).collect::<Vec<_>>()
        };
        let (weights, rest) = WeightGradients::lens(&shape).into_parts();
        assert_eq!((weights, rest), (vec![256, 256, 256, 384, 384, 384], vec![16, 16, 32, 16]));
        let (gate, up, down) = (fill(256), fill(256), fill(256));
        let mut g = WeightGradients { gate, up, down, ..WeightGradients::zeros(&shape) };
        g.as_mut().validate(&shape).unwrap();
        let mut rounded = g.convert::<bf16>();
        rounded.as_mut().validate(&shape).unwrap();
        // Between 1 and 2 a bf16 has 7 bits: 1 + 3/256 lies between 1 + 2/256 and 1 + 4/256, and the tie is to even.
        assert_eq!(
            (rounded.gate[2].to_f32(), rounded.gate[3].to_f32()),
            (1.0 + 2.0 / 256.0, 1.0 + 4.0 / 256.0)
        );
        assert_eq!((&rounded.biases, &rounded.convert::<bf16>()), (&g.biases, &rounded));
        let widened = rounded.convert::<f32>();
        assert!(widened.named().iter().map(|part| part.0).eq(g.named().iter().map(|part| part.0)));
        assert!(widened.up.iter().zip(&g.up).all(|(a, b)| (a - b).abs() <= b / 256.0) && widened.up != g.up);
        assert!(f32::as_f32(&mut g.gate).is_ok() && bf16::as_f32(&mut rounded.gate).is_err());
    }
}
