//! The portable kernel: the chains in plain Rust.

use std::marker::PhantomData;

use super::driver::{KC, Kernel, Order, Tile};
use super::pack::{Single, Slots, Split, portable};

pub(super) struct Scalar<S>(PhantomData<S>);

/// One link of a chain.
pub(super) trait Link: Slots {
    fn fma(a: f32, b: f32, c: f32) -> f32;
}

impl Link for Single {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

impl Link for Split {
    /// FMA in the arithmetic of VDPBF16PS, `a` and `b` being bf16 values.
    ///
    /// The product of two 8-bit significands is exact in f64. The sum is exact too, or so far from any midpoint of f32
    /// that rounding it twice is rounding it once. Flushing looks at the result rounded to 24 bits with an unbounded
    /// exponent: from 2^-126 - 2^-151 on, that is a normal number.
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        const TINY: f64 = f64::from_bits((1023 - 126) << 52) - f64::from_bits((1023 - 151) << 52);
        let daz = |x: f32| {
            if x.abs() < f32::MIN_POSITIVE { 0f32.copysign(x) } else { x }
        };
        let sum = f64::from(daz(a)) * f64::from(daz(b)) + f64::from(daz(c));
        if sum.abs() < TINY { 0f32.copysign(sum as f32) } else { sum as f32 }
    }
}

impl<S: Link> Kernel for Scalar<S> {
    type Slots = S;
    const MR: usize = 4;
    const NR: usize = 8;
    const A_WIDTH: usize = 4;
    const STREAMS: bool = false;

    unsafe fn pack_a_rows(a: *const S::Elem, lda: usize, m: usize, k: usize, dst: *mut u32) {
        // SAFETY: the caller's contract.
        unsafe { portable::<S>(a, lda, 1, m, k, dst, 1, KC) }
    }

    unsafe fn pack_a_cols(a: *const S::Elem, lda: usize, m: usize, k: usize, dst: *mut u32) {
        // SAFETY: the caller's contract.
        unsafe { portable::<S>(a, 1, lda, m, k, dst, Self::A_WIDTH, 1) }
    }

    unsafe fn pack_b_rows(b: *const S::Elem, ldb: usize, n: usize, k: usize, dst: *mut u32) {
        // SAFETY: the caller's contract. Columns past n are never read.
        unsafe { portable::<S>(b, ldb, 1, n, k, dst, Self::NR, 1) }
    }

    unsafe fn pack_b_cols(b: *const S::Elem, ldb: usize, n: usize, k: usize, dst: *mut u32) {
        for j in (0..n).step_by(Self::NR) {
            let cols = Self::NR.min(n - j);
            // SAFETY: the caller's contract. Columns past n are never read.
            unsafe { portable::<S>(b.add(j), 1, ldb, cols, k, dst.add(j * KC), Self::NR, 1) }
        }
    }

    unsafe fn tile(t: &Tile) {
        let (row_step, slot_step) = match t.a_order {
            Order::RowMajor => (KC, 1),
            Order::ColMajor => (1, Self::A_WIDTH),
        };
        for i in 0..t.rows {
            // SAFETY: row i of the tile is inside C; the packed operands hold `steps` slots.
            unsafe {
                let c = t.c.add(i * t.ldc);
                let mut acc = [0f32; 8];
                if t.accumulate {
                    c.copy_to_nonoverlapping(acc.as_mut_ptr(), t.cols);
                }
                for s in 0..t.steps {
                    let a = f32::from_bits(*t.a.add(i * row_step + s * slot_step));
                    for (j, acc) in acc[..t.cols].iter_mut().enumerate() {
                        *acc = S::fma(a, f32::from_bits(*t.b.add(s * Self::NR + j)), *acc);
                    }
                }
                acc.as_ptr().copy_to_nonoverlapping(c, t.cols);
            }
        }
    }
}
