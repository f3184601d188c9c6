//! GEMM micro-kernels: `C = A Bᵀ`, `C = A B` and `C = Aᵀ B` over row-major matrices, one thread a call.
//!
//! **Every element of C is one `f32` chain over ascending k**, so its bits depend neither on the instruction set, nor on
//! how a product is cut into tiles, nor on the other rows and columns of the call:
//!
//! ```text
//! f32   c = fma(a[k], b[k], c)                                               IEEE 754, denormals kept
//! bf16  c = fma(a[2j], b[2j], fma(a[2j+1], b[2j+1], c))                      odd element first
//! ```
//!
//! The bf16 chain is that of VDPBF16PS (Intel SDM, volume 2): denormal inputs (`a`, `b` and `c`) count as zero, every
//! tiny result becomes a zero of its sign, rounding is to nearest even. An odd k gets a partner of +0.
//!
//! - `isa`: the instruction sets, detected at run time;
//! - `pack`: what a packed operand looks like;
//! - `driver`: the blocking, shared by all instruction sets;
//! - `avx512`, `avx2`, `scalar`: packing and the register tile of each.

// Portable code neither prefetches nor sets MXCSR.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod driver;
mod isa;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod pack;
mod scalar;
#[cfg(test)]
mod tests;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use half::bf16;

pub use driver::Scratch;
use driver::{Call, Order, run};
pub use isa::{Isa, ParseIsaError};

mod sealed {
    use super::{Call, Isa, Scratch};

    pub trait Sealed: Sized {
        /// Runs `call` on `isa`, which the CPU must have.
        ///
        /// # Safety
        /// The pointers of `call` must be valid for its shape.
        unsafe fn run(isa: Isa, scratch: &mut Scratch, call: &Call<Self>);
    }
}

/// An element type of the operands: [`bf16`] or [`f32`]. C is always `f32`.
pub trait Element: Copy + Send + Sync + 'static + sealed::Sealed {}

impl Element for bf16 {}
impl Element for f32 {}

impl sealed::Sealed for bf16 {
    unsafe fn run(isa: Isa, scratch: &mut Scratch, call: &Call<Self>) {
        // SAFETY: the caller vouches for the pointers and for the instruction set.
        unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Bf16 => run::<avx512::Dot>(scratch, call),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => run::<avx512::Fma<pack::Split>>(scratch, call),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => run::<avx2::Fma<pack::Split>>(scratch, call),
                _ => run::<scalar::Scalar<pack::Split>>(scratch, call),
            }
        }
    }
}

impl sealed::Sealed for f32 {
    unsafe fn run(isa: Isa, scratch: &mut Scratch, call: &Call<Self>) {
        // SAFETY: the caller vouches for the pointers and for the instruction set.
        unsafe {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512Bf16 | Isa::Avx512 => run::<avx512::Fma<pack::Single>>(scratch, call),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => run::<avx2::Fma<pack::Single>>(scratch, call),
                _ => run::<scalar::Scalar<pack::Single>>(scratch, call),
            }
        }
    }
}

macro_rules! gemm {
    ($(#[$doc:meta])* $name:ident, $a_order:expr, $b_order:expr) => {
        $(#[$doc])*
        ///
        /// Leading dimensions count elements. With `accumulate` the chains start from C; without, from +0.0, and C is
        /// never read. `k == 0` leaves C, or writes zeros.
        ///
        /// # Safety
        /// - `isa` is one of [`Isa::available`];
        /// - A and B are readable and C is writable over the whole of the shape above, C also readable with
        ///   `accumulate`;
        /// - while the call runs, no one else writes the elements of A and B or touches those of C.
        #[allow(clippy::missing_safety_doc, reason = "the section is there, after the macro's argument")]
        pub unsafe fn $name<T: Element>(
            isa: Isa,
            scratch: &mut Scratch,
            m: usize,
            n: usize,
            k: usize,
            a: *const T,
            lda: usize,
            b: *const T,
            ldb: usize,
            c: *mut f32,
            ldc: usize,
            accumulate: bool,
        ) {
            let call =
                Call { m, n, k, a, lda, a_order: $a_order, b, ldb, b_order: $b_order, c, ldc, accumulate };
            // SAFETY: the caller's contract is that of `run`.
            unsafe { T::run(isa, scratch, &call) }
        }
    };
}

gemm! {
    /// `C = A Bᵀ`: A `[m, k]`, B `[n, k]`, C `[m, n]`.
    gemm_nt, Order::RowMajor, Order::RowMajor
}
gemm! {
    /// `C = A B`: A `[m, k]`, B `[k, n]`, C `[m, n]`.
    gemm_nn, Order::RowMajor, Order::ColMajor
}
gemm! {
    /// `C = Aᵀ B`: A `[k, m]`, B `[k, n]`, C `[m, n]`.
    gemm_tn, Order::ColMajor, Order::ColMajor
}

/// `C = A Bᵀ` on `threads` threads: A `[m, k]`, B `[n, k]`, C `[m, n]`, all dense. The dense rate that the grouped
/// GEMMs are measured against.
///
/// # Panics
/// If a slice is shorter than its shape, or if the CPU lacks `isa`.
pub fn dense<T: Element>(
    isa: Isa,
    threads: usize,
    m: usize,
    n: usize,
    k: usize,
    a: &[T],
    b: &[T],
    c: &mut [f32],
) {
    /// Columns of C that one thread owns start at multiples of this: whole cache lines.
    const EDGE: usize = 32;
    #[derive(Clone, Copy)]
    struct Out(*mut f32);
    // SAFETY: each thread writes its own columns only.
    unsafe impl Send for Out {}

    assert!(a.len() >= m * k && b.len() >= n * k && c.len() >= m * n, "a slice is shorter than its shape");
    assert!(Isa::available().contains(&isa), "this CPU has no {isa}");
    let width = n.div_ceil(threads.max(1)).next_multiple_of(EDGE);
    let out = Out(c.as_mut_ptr());
    std::thread::scope(|scope| {
        for n0 in (0..n).step_by(width) {
            scope.spawn(move || {
                let Out(c) = { out };
                // SAFETY: the asserts above bound every access, and column ranges are disjoint.
                unsafe {
                    let (b, c) = (b.as_ptr().add(n0 * k), c.add(n0));
                    gemm_nt(
                        isa,
                        &mut Scratch::new(),
                        m,
                        width.min(n - n0),
                        k,
                        a.as_ptr(),
                        k,
                        b,
                        k,
                        c,
                        n,
                        false,
                    );
                }
            });
        }
    });
}
