//! The numbers that rows are made of, and the functions every machine must agree on.
//!
//! Everything here is plain IEEE multiply, add, divide and integer arithmetic, with no fused operation: a compiler
//! may widen a loop over it, and no bit moves.

use half::bf16;

use crate::shape::Activation;

/// What rows and weights, or weight gradients, are stored in. Accumulation is `f32` in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// 16-bit brain floating point.
    Bf16,
    /// 32-bit; for debugging and gradient checks, on the CPU.
    F32,
}

impl std::fmt::Display for Precision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Precision::Bf16 => "bf16",
            Precision::F32 => "f32",
        })
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for half::bf16 {}
    impl Sealed for f32 {}
}

/// A storage type of rows and weights: [`bf16`] or `f32`.
pub trait Element:
    sealed::Sealed + Copy + Send + Sync + Default + PartialEq + std::fmt::Debug + 'static
{
    /// The precision that this type stands for.
    const PRECISION: Precision;
    /// Exact.
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even; every NaN becomes one NaN.
    fn from_f32(value: f32) -> Self;
}

impl Element for bf16 {
    const PRECISION: Precision = Precision::Bf16;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        // Adding just under half an ulp, and one more where the kept part is odd, carries ties to even.
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        bf16::from_bits(if value.is_nan() { 0x7fc0 } else { rounded as u16 })
    }
}

impl Element for f32 {
    const PRECISION: Precision = Precision::F32;

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

/// `e^x`, within 3e-7 of its value for `|x| <= 88`; arguments beyond are taken as ±88; NaN stays NaN.
///
/// Range reduction by `x = n ln 2 + r`, `|r| <= ln 2 / 2`, then the Taylor polynomial of degree 7 in Horner form,
/// whose remainder is below `r^8 / 8! < 6e-9`.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const LN2_HI: f32 = 355.0 / 512.0;
    const LN2_LO: f32 = -2.121_944_4e-4;
    let x = if x > 88.0 { 88.0 } else { x };
    let x = if x < -88.0 { -88.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HI) - n * LN2_LO;
    let mut p = 1.0 / 5040.0_f32;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0_f32] {
        p = p * r + c;
    }
    // n is within -127..=127; two factors keep 2^-127 from leaving the normal range before the product does.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    let scale = |e: i32| f32::from_bits((e.wrapping_add(127) as u32) << 23);
    p * scale(half) * scale(n.wrapping_sub(half))
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The constants of an [`Activation`], ready for a loop: no clamp is a clamp at infinity.
#[derive(Debug, Clone, Copy)]
pub struct Act {
    alpha: f32,
    up_offset: f32,
    limit: f32,
}

impl From<Activation> for Act {
    fn from(a: Activation) -> Self {
        Act { alpha: a.alpha(), up_offset: a.up_offset(), limit: a.limit().unwrap_or(f32::INFINITY) }
    }
}

impl Act {
    /// `h = (u + up_offset) * g * sigmoid(alpha g)` of the clamped `g`, `u`; unrounded.
    #[inline(always)]
    pub fn forward(&self, g: f32, u: f32) -> f32 {
        let (g, u) = self.clamp(g, u);
        (u + self.up_offset) * (g * sigmoid(self.alpha * g))
    }

    /// `(h, dh/dg, dh/du)` at `g`, `u`; a derivative is zero where its argument was clamped.
    #[inline(always)]
    pub fn backward(&self, g: f32, u: f32) -> (f32, f32, f32) {
        let (gc, uc) = self.clamp(g, u);
        let s = sigmoid(self.alpha * gc);
        let glu = gc * s;
        let up = uc + self.up_offset;
        let slope = s * (1.0 + (self.alpha * gc) * (1.0 - s));
        let dg = if g > self.limit { 0.0 } else { up * slope };
        let du = if u > self.limit || u < -self.limit { 0.0 } else { glu };
        (up * glu, dg, du)
    }

    #[inline(always)]
    fn clamp(&self, g: f32, u: f32) -> (f32, f32) {
        let g = if g > self.limit { self.limit } else { g };
        let u = if u > self.limit { self.limit } else { u };
        (g, if u < -self.limit { -self.limit } else { u })
    }
}

/// Rounds `g` and `u` for storage so that each stays on its side of the clamp. Plain rounding would move what is just
/// beyond the limit onto it, and the backward, which knows only the stored value, would let a gradient pass that is zero.
#[derive(Debug, Clone, Copy)]
pub struct ClampRounding {
    limit: f32,
    inside: f32,
    beyond: f32,
}

impl ClampRounding {
    /// For rows of `T`; `None` where nothing is clamped.
    pub fn new<T: Element>(act: &Act) -> Option<Self> {
        let dropped_bits = match T::PRECISION {
            Precision::Bf16 => 16,
            Precision::F32 => 0,
        };
        let limit = act.limit;
        let inside = limit.to_bits() >> dropped_bits;
        let value = |kept: u32| f32::from_bits(kept << dropped_bits);
        limit.is_finite().then(|| ClampRounding { limit, inside: value(inside), beyond: value(inside + 1) })
    }

    /// Rounds `g`, whose clamp is one-sided.
    #[inline(always)]
    pub fn gate<T: Element>(&self, g: f32) -> T {
        T::from_f32(self.keep_side(g, T::from_f32(g).to_f32()))
    }

    /// Rounds `u`, whose clamp is two-sided.
    #[inline(always)]
    pub fn up<T: Element>(&self, u: f32) -> T {
        T::from_f32(self.keep_side(u.abs(), T::from_f32(u).to_f32().abs()).copysign(u))
    }

    #[inline(always)]
    fn keep_side(&self, exact: f32, rounded: f32) -> f32 {
        let not_inside = if rounded < self.beyond { self.beyond } else { rounded };
        let not_beyond = if rounded > self.inside { self.inside } else { rounded };
        if exact > self.limit { not_inside } else { not_beyond }
    }
}

/// Lanes of a [`dot`]: sixteen partial sums, then a fixed tree.
const LANES: usize = 16;

/// `sum_i a_i b_i` in `f32`, in an order that depends on the length alone: lane `i mod 16` adds its products in
/// ascending order, then lanes are added pairwise (8, 4, 2, 1 apart).
#[inline(always)]
pub fn dot(len: usize, term: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let whole = len / LANES * LANES;
    for base in (0..whole).step_by(LANES) {
        for lane in 0..LANES {
            lanes[lane] += term(base + lane);
        }
    }
    for i in whole..len {
        lanes[i - whole] += term(i);
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_as_half_does() {
        let mut state = 1_u32;
        for _ in 0..200_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = f32::from_bits(state);
            let (ours, theirs) = (<bf16 as Element>::from_f32(value), bf16::from_f32(value));
            assert!(ours.to_bits() == theirs.to_bits() || (value.is_nan() && ours.is_nan()), "{value:e}");
        }
    }

    #[test]
    fn exp_and_sigmoid_are_close_to_f64() {
        let (mut worst, mut at) = (0.0_f64, 0.0);
        for i in -880_000..=880_000 {
            let x = i as f32 * 1e-4;
            let error = (f64::from(exp(x)) / f64::from(x).exp() - 1.0).abs();
            if error > worst {
                (worst, at) = (error, x);
            }
        }
        println!("exp: largest relative error {worst:.2e} at {at}");
        assert!(worst < 3e-7, "{worst:e} at {at}");
        assert!(exp(f32::NAN).is_nan() && sigmoid(f32::NAN).is_nan());
        assert_eq!(sigmoid(200.0), 1.0);
        assert!(sigmoid(-200.0) >= 0.0 && sigmoid(-200.0) < 1e-37);
    }

    #[test]
    fn rounding_keeps_the_side_of_the_clamp() {
        for limit in [7.0_f32, 0.8, 1e-3, 3.3e38] {
            let act = Act::from(Activation::SwiGlu { limit: Some(limit) });
            let bf16s = ClampRounding::new::<bf16>(&act).unwrap();
            let f32s = ClampRounding::new::<f32>(&act).unwrap();
            for ulps in -70_000..=70_000_i32 {
                let v = f32::from_bits(limit.to_bits().wrapping_add_signed(ulps));
                let (g, u) = (bf16s.gate::<bf16>(v).to_f32(), bf16s.up::<bf16>(-v).to_f32());
                assert_eq!((g > limit, u < -limit), (v > limit, v > limit), "{v} of limit {limit}: {g}, {u}");
                assert!(v > f32::MAX / 2.0 || (g - v).abs() <= v / 128.0, "{v} of limit {limit}: {g}");
                assert_eq!((f32s.gate::<f32>(v), f32s.up::<f32>(-v)), (v, -v));
            }
            for v in [-limit * 2.0, -limit, 0.3 * limit, 2.5 * limit, f32::NEG_INFINITY, f32::INFINITY] {
                let plain = <bf16 as Element>::from_f32(v);
                let far = v.abs() != limit;
                assert!(!far || bf16s.gate::<bf16>(v) == plain, "{v} of limit {limit}");
                assert!(!far || bf16s.up::<bf16>(v) == plain, "{v} of limit {limit}");
            }
            assert!(bf16s.gate::<bf16>(f32::NAN).is_nan() && bf16s.up::<bf16>(f32::NAN).is_nan());
        }
        assert!(ClampRounding::new::<bf16>(&Act::from(Activation::SwiGlu { limit: None })).is_none());
    }

    #[test]
    fn activation_gradient_matches_differences() {
        for act in [
            Activation::SwiGlu { limit: None },
            Activation::SwiGlu { limit: Some(2.0) },
            Activation::SwiGluOai { alpha: 1.702, limit: Some(2.0) },
        ] {
            let a = Act::from(act);
            for (g, u) in [(0.3, -0.7), (-1.5, 1.9), (2.5, 0.5), (0.1, -2.5), (-3.0, 2.25)] {
                let (h, dg, du) = a.backward(g, u);
                assert_eq!(h.to_bits(), a.forward(g, u).to_bits());
                let e = 1e-2;
                let ng = (a.forward(g + e, u) - a.forward(g - e, u)) / (2.0 * e);
                let nu = (a.forward(g, u + e) - a.forward(g, u - e)) / (2.0 * e);
                assert!(
                    (ng - dg).abs() < 1e-3 && (nu - du).abs() < 1e-3,
                    "{act:?} {g} {u}: {ng} {dg}, {nu} {du}"
                );
            }
        }
    }
}
