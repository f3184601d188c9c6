//! The AVX2 kernel: a register tile of up to 6 rows by 16 columns, with f32 FMAs.
//!
//! The tile is one `asm!` block for the same reason as the AVX-512 tile: it sets MXCSR and restores it. C passes through
//! a buffer of the tile's full size, so that edges need no masks.
//!
//! Registers: ymm(2r), ymm(2r+1) hold row r of C; ymm12, ymm13 a step of B; ymm14 one slot of A, broadcast.

use std::arch::asm;
use std::arch::x86_64::*;
use std::marker::PhantomData;

use half::bf16;

use super::driver::{KC, Kernel, Order, Tile};
use super::pack::{Single, Slots, Split, portable};

const MR: usize = 6;
const NR: usize = 16;
/// Lanes of a register.
const LANES: usize = 8;
const A_WIDTH: usize = 8;

/// f32 FMAs over [`Single`] or [`Split`] slots.
pub(super) struct Fma<S>(PhantomData<S>);

/// Adds `steps` products to the rows of `acc`. MXCSR is `mxcsr[0]` meanwhile; `mxcsr[1]` holds the caller's.
macro_rules! tile {
    ($name:ident, [$(($r:literal, $lo:literal, $hi:literal)),+]) => {
        #[target_feature(enable = "avx2,fma")]
        unsafe fn $name<const ROW: usize, const SLOT: usize>(
            t: &Tile,
            acc: &mut [[f32; NR]; MR],
            mxcsr: &mut [u32; 2],
        ) {
            // SAFETY: the template reads `steps` slots of A and B, reads and writes rows of `acc`, and restores MXCSR;
            // prefetches of any address are harmless.
            unsafe {
                asm!(
                    "stmxcsr dword ptr [{mxcsr} + 4]",
                    "ldmxcsr dword ptr [{mxcsr}]",
                    $(
                        concat!("vmovups ymm", $lo, ", [{acc} + 64 * ", $r, "]"),
                        concat!("vmovups ymm", $hi, ", [{acc} + 64 * ", $r, " + 32]"),
                    )+
                    "3:",
                    "mov {inner}, {run}",
                    "cmp {steps}, {inner}",
                    "cmovb {inner}, {steps}",
                    "sub {steps}, {inner}",
                    "mov {pf}, {pf_base}",
                    "4:",
                    "vmovups ymm12, [{b}]",
                    "vmovups ymm13, [{b} + 32]",
                    "prefetcht1 [{pf}]",
                    "add {pf}, 32", // half a line a step
                    $(
                        concat!("vbroadcastss ymm14, [{a} + {row} * ", $r, "]"),
                        concat!("vfmadd231ps ymm", $lo, ", ymm12, ymm14"),
                        concat!("vfmadd231ps ymm", $hi, ", ymm13, ymm14"),
                    )+
                    "add {a}, {slot}",
                    "add {b}, 64",
                    "dec {inner}",
                    "jnz 4b",
                    "add {pf_base}, {pf_next}",
                    "test {steps}, {steps}",
                    "jnz 3b",
                    $(
                        concat!("vmovups [{acc} + 64 * ", $r, "], ymm", $lo),
                        concat!("vmovups [{acc} + 64 * ", $r, " + 32], ymm", $hi),
                    )+
                    "ldmxcsr dword ptr [{mxcsr} + 4]",
                    "vzeroupper",
                    mxcsr = in(reg) mxcsr.as_mut_ptr(),
                    acc = in(reg) acc.as_mut_ptr(),
                    a = inout(reg) t.a => _,
                    b = inout(reg) t.b => _,
                    steps = inout(reg) t.steps => _,
                    inner = out(reg) _,
                    pf = out(reg) _,
                    pf_base = inout(reg) t.prefetch.base => _,
                    run = in(reg) 2 * t.prefetch.run,
                    pf_next = in(reg) t.prefetch.next,
                    row = const ROW,
                    slot = const SLOT,
                    out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
                    out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
                    out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
                    out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
                    options(nostack),
                );
            }
        }
    };
}

tile!(fma1, [(0, 0, 1)]);
tile!(fma2, [(0, 0, 1), (1, 2, 3)]);
tile!(fma3, [(0, 0, 1), (1, 2, 3), (2, 4, 5)]);
tile!(fma4, [(0, 0, 1), (1, 2, 3), (2, 4, 5), (3, 6, 7)]);
tile!(fma5, [(0, 0, 1), (1, 2, 3), (2, 4, 5), (3, 6, 7), (4, 8, 9)]);
tile!(fma6, [(0, 0, 1), (1, 2, 3), (2, 4, 5), (3, 6, 7), (4, 8, 9), (5, 10, 11)]);

#[target_feature(enable = "avx2,fma")]
unsafe fn fma<const ROW: usize, const SLOT: usize>(t: &Tile, acc: &mut [[f32; NR]; MR], mxcsr: u32) {
    let mxcsr = &mut [mxcsr, 0];
    // SAFETY: the caller's contract.
    unsafe {
        match t.rows {
            1 => fma1::<ROW, SLOT>(t, acc, mxcsr),
            2 => fma2::<ROW, SLOT>(t, acc, mxcsr),
            3 => fma3::<ROW, SLOT>(t, acc, mxcsr),
            4 => fma4::<ROW, SLOT>(t, acc, mxcsr),
            5 => fma5::<ROW, SLOT>(t, acc, mxcsr),
            6 => fma6::<ROW, SLOT>(t, acc, mxcsr),
            rows => unreachable!("a tile of {rows} rows"),
        }
    }
}

/// Filling slots with AVX2, eight at a time. All functions need the instruction set.
trait Packing: Slots {
    /// Elements of a row that 8 dwords hold.
    const PER_BLOCK: usize;

    /// The slots of 8 dwords of row-major elements: first slots, then (if PER_BLOCK is 16) second slots.
    unsafe fn expand(dwords: __m256i) -> [__m256i; 2];

    /// Slot `s` of the vectors that start at `x[0..8]`; elements of one vector lie `along` apart.
    unsafe fn column(x: *const Self::Elem, along: usize, k: usize, s: usize) -> __m256i;

    /// The slots of 8 consecutive elements.
    unsafe fn row(x: *const Self::Elem) -> __m256i;
}

impl Packing for Single {
    const PER_BLOCK: usize = 8;

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn expand(dwords: __m256i) -> [__m256i; 2] {
        [dwords, dwords]
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn column(x: *const f32, along: usize, _k: usize, s: usize) -> __m256i {
        // SAFETY: 8 elements are readable.
        unsafe { _mm256_loadu_si256(x.add(s * along).cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn row(x: *const f32) -> __m256i {
        // SAFETY: 8 elements are readable.
        unsafe { _mm256_loadu_si256(x.cast()) }
    }
}

impl Packing for Split {
    const PER_BLOCK: usize = 16;

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn expand(dwords: __m256i) -> [__m256i; 2] {
        [_mm256_and_si256(dwords, _mm256_set1_epi32(0xffff_0000_u32 as i32)), _mm256_slli_epi32::<16>(dwords)]
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn column(x: *const bf16, along: usize, k: usize, s: usize) -> __m256i {
        let at = s ^ 1;
        if at >= k {
            return _mm256_setzero_si256();
        }
        // SAFETY: 8 elements are readable.
        let halves = unsafe { _mm_loadu_si128(x.add(at * along).cast()) };
        _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn row(x: *const bf16) -> __m256i {
        // SAFETY: 8 elements are readable.
        let pairs = unsafe { _mm_loadu_si128(x.cast()) };
        // A pair (even, odd) in the low dword of each qword becomes the dwords (odd, even).
        let wide = _mm256_cvtepu32_epi64(pairs);
        _mm256_or_si256(
            _mm256_and_si256(wide, _mm256_set1_epi64x(0xffff_0000)),
            _mm256_slli_epi64::<48>(wide),
        )
    }
}

/// Transposes 8 rows of 8 dwords, `step` bytes apart.
#[inline]
#[target_feature(enable = "avx2,fma")]
unsafe fn transpose(src: *const u8, step: usize) -> [__m256i; 8] {
    // q[j] = dwords 0-3 of rows j and j + 4, or dwords 4-7.
    let half = |j: usize, at: usize| {
        // SAFETY: the caller's rows are readable.
        unsafe {
            let low = _mm_loadu_si128(src.add(j * step + at).cast());
            let high = _mm_loadu_si128(src.add((j + 4) * step + at).cast());
            _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high)
        }
    };
    let mut out = [_mm256_setzero_si256(); 8];
    for part in 0..2 {
        let q = [half(0, part * 16), half(1, part * 16), half(2, part * 16), half(3, part * 16)];
        let (a, b) = (_mm256_unpacklo_epi32(q[0], q[1]), _mm256_unpackhi_epi32(q[0], q[1]));
        let (c, d) = (_mm256_unpacklo_epi32(q[2], q[3]), _mm256_unpackhi_epi32(q[2], q[3]));
        out[4 * part] = _mm256_unpacklo_epi64(a, c);
        out[4 * part + 1] = _mm256_unpackhi_epi64(a, c);
        out[4 * part + 2] = _mm256_unpacklo_epi64(b, d);
        out[4 * part + 3] = _mm256_unpackhi_epi64(b, d);
    }
    out
}

/// Packs NR rows of `k` elements, a multiple of PER_BLOCK, slot s of row i to `dst[s * NR + i]`.
#[target_feature(enable = "avx2,fma")]
unsafe fn pack_rows<S: Packing>(src: *const S::Elem, ld: usize, k: usize, dst: *mut u32) {
    let parts = S::PER_BLOCK / LANES;
    for first in (0..NR).step_by(LANES) {
        for k0 in (0..k).step_by(S::PER_BLOCK) {
            // SAFETY: whole blocks of the rows are readable, their slots writable.
            unsafe {
                let block = transpose(src.add(first * ld + k0).cast(), ld * size_of::<S::Elem>());
                for (i, &dwords) in block.iter().enumerate() {
                    for (part, &slots) in S::expand(dwords).iter().take(parts).enumerate() {
                        let slot = k0 + i * parts + part;
                        _mm256_storeu_si256(dst.add(slot * NR + first).cast(), slots);
                    }
                }
            }
        }
    }
}

/// Packs NR column-major vectors of `k` elements to steps NR slots apart.
#[target_feature(enable = "avx2,fma")]
unsafe fn pack_cols<S: Packing>(src: *const S::Elem, ld: usize, k: usize, dst: *mut u32) {
    for s in 0..S::count(k) {
        for first in (0..NR).step_by(LANES) {
            // SAFETY: NR columns are readable, NR slots writable.
            unsafe {
                let slots = S::column(src.add(first), ld, k, s);
                _mm256_storeu_si256(dst.add(s * NR + first).cast(), slots);
            }
        }
    }
}

/// Packs `m` rows of `k` elements, a multiple of 8, to rows KC slots apart.
#[target_feature(enable = "avx2,fma")]
unsafe fn copy_rows<S: Packing>(src: *const S::Elem, ld: usize, m: usize, k: usize, dst: *mut u32) {
    for i in 0..m {
        for k0 in (0..k).step_by(LANES) {
            // SAFETY: 8 elements of row i are readable, their slots writable.
            unsafe { _mm256_storeu_si256(dst.add(i * KC + k0).cast(), S::row(src.add(i * ld + k0))) }
        }
    }
}

// The functions above take the whole blocks, `portable` the edges.
impl<S: Packing> Kernel for Fma<S> {
    type Slots = S;
    const MR: usize = MR;
    const NR: usize = NR;
    const A_WIDTH: usize = A_WIDTH;
    const STREAMS: bool = false;

    unsafe fn pack_a_rows(a: *const S::Elem, lda: usize, m: usize, k: usize, dst: *mut u32) {
        let whole = k - k % LANES;
        // SAFETY: the caller's contract.
        unsafe {
            copy_rows::<S>(a, lda, m, whole, dst);
            portable::<S>(a.add(whole), lda, 1, m, k - whole, dst.add(whole), 1, KC);
        }
    }

    unsafe fn pack_a_cols(a: *const S::Elem, lda: usize, m: usize, k: usize, dst: *mut u32) {
        // SAFETY: the caller's contract.
        unsafe { portable::<S>(a, 1, lda, m, k, dst, A_WIDTH, 1) }
    }

    unsafe fn pack_b_rows(b: *const S::Elem, ldb: usize, n: usize, k: usize, dst: *mut u32) {
        let whole = if n == NR { k - k % S::PER_BLOCK } else { 0 };
        // SAFETY: the caller's contract. Columns past n hold old slots; their results are dropped.
        unsafe {
            pack_rows::<S>(b, ldb, whole, dst);
            portable::<S>(b.add(whole), ldb, 1, n, k - whole, dst.add(whole * NR), NR, 1);
        }
    }

    unsafe fn pack_b_cols(b: *const S::Elem, ldb: usize, n: usize, k: usize, dst: *mut u32) {
        let whole = n - n % NR;
        // SAFETY: the caller's contract. Columns past n hold old slots; their results are dropped.
        unsafe {
            for j in (0..whole).step_by(NR) {
                pack_cols::<S>(b.add(j), ldb, k, dst.add(j * KC));
            }
            portable::<S>(b.wrapping_add(whole), 1, ldb, n - whole, k, dst.wrapping_add(whole * KC), NR, 1);
        }
    }

    unsafe fn tile(t: &Tile) {
        let mut acc = [[0f32; NR]; MR];
        // SAFETY: the rows and columns of the tile are inside C; the rest is the caller's contract.
        unsafe {
            if t.accumulate {
                for (i, row) in acc.iter_mut().take(t.rows).enumerate() {
                    t.c.add(i * t.ldc).copy_to_nonoverlapping(row.as_mut_ptr(), t.cols);
                }
            }
            match t.a_order {
                Order::RowMajor => fma::<{ 4 * KC }, 4>(t, &mut acc, S::MXCSR),
                Order::ColMajor => fma::<4, { 4 * A_WIDTH }>(t, &mut acc, S::MXCSR),
            }
            for (i, row) in acc.iter().take(t.rows).enumerate() {
                row.as_ptr().copy_to_nonoverlapping(t.c.add(i * t.ldc), t.cols);
            }
        }
    }
}
