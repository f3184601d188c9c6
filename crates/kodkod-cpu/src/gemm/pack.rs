//! What a packed operand looks like: 32-bit slots, in the order in which a chain consumes them.
//!
//! A micro-kernel takes one slot of A and one of B a step. Three ways to fill slots:
//!
//! ```text
//! Single   f32    slot s = x[s]
//! Split    bf16   slots 2j, 2j+1 = x[2j+1], x[2j], each widened to f32      (odd element first)
//! Pairs    bf16   slot j = x[2j] | x[2j+1] << 16                            (what VDPBF16PS reads)
//! ```
//!
//! Elements past an odd k are +0.

use half::bf16;

use super::Element;

/// MXCSR at its default: all exceptions masked, round to nearest even.
const IEEE: u32 = 0x1f80;
/// The default with denormals-are-zero (bit 6) and flush-to-zero (bit 15): the arithmetic of VDPBF16PS.
const FLUSH: u32 = IEEE | 1 << 6 | 1 << 15;

/// A way to fill slots from elements.
pub(super) trait Slots {
    type Elem: Element;
    /// Value of MXCSR under which f32 FMAs over the slots give the chain.
    const MXCSR: u32;

    /// Number of slots that `k` elements fill.
    fn count(k: usize) -> usize;

    /// Slot `s` of the `k` elements that start at `x`, `stride` apart.
    ///
    /// # Safety
    /// The `k` elements must be readable.
    unsafe fn get(x: *const Self::Elem, stride: usize, k: usize, s: usize) -> u32;
}

/// f32 elements.
pub(super) struct Single;
/// bf16 elements widened to f32, odd before even.
pub(super) struct Split;
/// bf16 elements two by two.
pub(super) struct Pairs;

impl Slots for Single {
    type Elem = f32;
    const MXCSR: u32 = IEEE;

    fn count(k: usize) -> usize {
        k
    }

    #[inline(always)]
    unsafe fn get(x: *const f32, stride: usize, _k: usize, s: usize) -> u32 {
        // SAFETY: s < count(k) = k.
        unsafe { (*x.add(s * stride)).to_bits() }
    }
}

impl Slots for Split {
    type Elem = bf16;
    const MXCSR: u32 = FLUSH;

    fn count(k: usize) -> usize {
        k.next_multiple_of(2)
    }

    #[inline(always)]
    unsafe fn get(x: *const bf16, stride: usize, k: usize, s: usize) -> u32 {
        let at = s ^ 1;
        if at >= k {
            return 0;
        }
        // SAFETY: at < k.
        u32::from(unsafe { *x.add(at * stride) }.to_bits()) << 16
    }
}

impl Slots for Pairs {
    type Elem = bf16;
    const MXCSR: u32 = FLUSH;

    fn count(k: usize) -> usize {
        k.div_ceil(2)
    }

    #[inline(always)]
    unsafe fn get(x: *const bf16, stride: usize, k: usize, s: usize) -> u32 {
        // SAFETY: the slots of `Split` have the same bounds.
        unsafe { Split::get(x, stride, k, 2 * s) | Split::get(x, stride, k, 2 * s + 1) >> 16 }
    }
}

/// Packs `width` vectors of `k` elements so that slot s of vector i goes to `dst[s * slot_step + i * vector_step]`.
/// Vector i starts at `src + i * between`, its elements lie `along` apart.
///
/// # Safety
/// All elements must be readable, all slots writable.
pub(super) unsafe fn portable<S: Slots>(
    src: *const S::Elem,
    between: usize,
    along: usize,
    width: usize,
    k: usize,
    dst: *mut u32,
    slot_step: usize,
    vector_step: usize,
) {
    for s in 0..S::count(k) {
        for i in 0..width {
            // SAFETY: the caller's contract.
            unsafe {
                *dst.add(s * slot_step + i * vector_step) = S::get(src.add(i * between), along, k, s);
            }
        }
    }
}
