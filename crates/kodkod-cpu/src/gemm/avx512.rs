//! The AVX-512 kernels: packing, and a register tile of up to 14 rows by 32 columns.
//!
//! The tile is one `asm!` block because the bf16 chain needs denormals flushed, and Rust code must not run with a
//! changed MXCSR: the block saves it, sets its own, and restores it before it ends. It also sets the default for f32, so
//! that a host that flushes denormals on its threads does not move bits.
//!
//! Odd rows broadcast their slot of A inside the FMA, even rows with an instruction of its own: the first costs a load
//! port more, the second an issue slot more, and half of each stays clear of both limits.
//!
//! Registers: zmm(2r), zmm(2r+1) hold row r of C; zmm28, zmm29 a step of B; zmm30 one slot of A, broadcast.

use std::arch::asm;
use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::driver::{KC, Kernel, Order, Tile};
use super::pack::{Pairs, Single, Slots, Split};

const MR: usize = 14;
const NR: usize = 32;
/// Lanes of a register.
const LANES: usize = 16;
const A_WIDTH: usize = 16;

/// f32 FMAs over [`Single`] or [`Split`] slots.
pub(super) struct Fma<S>(PhantomData<S>);
/// VDPBF16PS over [`Pairs`].
pub(super) struct Dot;

/// What the asm block reads and writes through one pointer, at the offsets that its template names.
#[repr(C)]
struct Context {
    /// +0: MXCSR inside the block.
    mxcsr: u32,
    /// +4: MXCSR of the caller.
    saved: u32,
    /// +8: start from C.
    accumulate: u32,
    /// +12: streaming stores; needs full, aligned lines.
    stream: u32,
}

/// Defines `$name::<ROW, SLOT>(tile, context)` for the rows listed: `$r` is the row, `$lo` and `$hi` its accumulators.
/// ROW and SLOT are the byte distances of rows and slots in packed A.
macro_rules! tile {
    ($name:ident, $op:literal, [$(($r:literal, $lo:literal, $hi:literal)),+]) => {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
        unsafe fn $name<const ROW: usize, const SLOT: usize>(t: &Tile, context: &mut Context) {
            let lanes = if t.cols == NR { u32::MAX } else { (1u32 << t.cols) - 1 };
            // SAFETY: the template reads `steps` slots of A and B, reads and writes rows of C under the masks, and
            // restores MXCSR; prefetches of any address are harmless.
            unsafe {
                asm!(
                    "stmxcsr dword ptr [{ctx} + 4]",
                    "ldmxcsr dword ptr [{ctx}]",
                    "cmp dword ptr [{ctx} + 8], 0",
                    "jne 2f",
                    $(
                        concat!("vpxord zmm", $lo, ", zmm", $lo, ", zmm", $lo),
                        concat!("vpxord zmm", $hi, ", zmm", $hi, ", zmm", $hi),
                    )+
                    "jmp 3f",
                    "2:",
                    "mov {tmp}, {c}",
                    $(
                        concat!("vmovups zmm", $lo, "{{{k0}}}{{z}}, [{tmp}]"),
                        concat!("vmovups zmm", $hi, "{{{k1}}}{{z}}, [{tmp} + 64]"),
                        "add {tmp}, {ldc}",
                    )+
                    // A run of prefetches.
                    "3:",
                    "mov {tmp}, {run}",
                    "cmp {steps}, {tmp}",
                    "cmovb {tmp}, {steps}",
                    "sub {steps}, {tmp}",
                    "mov {pf}, {pf_base}",
                    // Steps by twos, after an odd one.
                    "test {tmp:e}, 1",
                    "jz 4f",
                    "vmovups zmm28, [{b}]",
                    "vmovups zmm29, [{b} + 64]",
                    $(
                        concat!(".if ", $r, " & 1"),
                        concat!($op, " zmm", $lo, ", zmm28, dword ptr [{a} + {row} * ", $r, "]{{1to16}}"),
                        concat!($op, " zmm", $hi, ", zmm29, dword ptr [{a} + {row} * ", $r, "]{{1to16}}"),
                        ".else",
                        concat!("vbroadcastss zmm30, [{a} + {row} * ", $r, "]"),
                        concat!($op, " zmm", $lo, ", zmm28, zmm30"),
                        concat!($op, " zmm", $hi, ", zmm29, zmm30"),
                        ".endif",
                    )+
                    "add {a}, {slot}",
                    "add {b}, 128",
                    "dec {tmp}",
                    "jz 7f",
                    "4:",
                    "vmovups zmm28, [{b}]",
                    "vmovups zmm29, [{b} + 64]",
                    "prefetcht1 [{pf}]",
                    $(
                        concat!(".if ", $r, " & 1"),
                        concat!($op, " zmm", $lo, ", zmm28, dword ptr [{a} + {row} * ", $r, "]{{1to16}}"),
                        concat!($op, " zmm", $hi, ", zmm29, dword ptr [{a} + {row} * ", $r, "]{{1to16}}"),
                        ".else",
                        concat!("vbroadcastss zmm30, [{a} + {row} * ", $r, "]"),
                        concat!($op, " zmm", $lo, ", zmm28, zmm30"),
                        concat!($op, " zmm", $hi, ", zmm29, zmm30"),
                        ".endif",
                    )+
                    "vmovups zmm28, [{b} + 128]",
                    "vmovups zmm29, [{b} + 192]",
                    $(
                        concat!(".if ", $r, " & 1"),
                        concat!($op, " zmm", $lo, ", zmm28, dword ptr [{a} + {row} * ", $r, " + {slot}]{{1to16}}"),
                        concat!($op, " zmm", $hi, ", zmm29, dword ptr [{a} + {row} * ", $r, " + {slot}]{{1to16}}"),
                        ".else",
                        concat!("vbroadcastss zmm30, [{a} + {row} * ", $r, " + {slot}]"),
                        concat!($op, " zmm", $lo, ", zmm28, zmm30"),
                        concat!($op, " zmm", $hi, ", zmm29, zmm30"),
                        ".endif",
                    )+
                    "add {pf}, 64",
                    "add {a}, 2 * {slot}",
                    "add {b}, 256",
                    "sub {tmp}, 2",
                    "jnz 4b",
                    "7:",
                    "add {pf_base}, {pf_next}",
                    "test {steps}, {steps}",
                    "jnz 3b",
                    "cmp dword ptr [{ctx} + 12], 0",
                    "jne 5f",
                    $(
                        concat!("vmovups [{c}]{{{k0}}}, zmm", $lo),
                        concat!("vmovups [{c} + 64]{{{k1}}}, zmm", $hi),
                        "add {c}, {ldc}",
                    )+
                    "jmp 6f",
                    "5:",
                    $(
                        concat!("vmovntps [{c}], zmm", $lo),
                        concat!("vmovntps [{c} + 64], zmm", $hi),
                        "add {c}, {ldc}",
                    )+
                    "6:",
                    "ldmxcsr dword ptr [{ctx} + 4]",
                    "vzeroupper",
                    ctx = in(reg) context as *mut Context,
                    a = inout(reg) t.a => _,
                    b = inout(reg) t.b => _,
                    c = inout(reg) t.c => _,
                    ldc = in(reg) t.ldc * 4,
                    steps = inout(reg) t.steps => _,
                    tmp = out(reg) _,
                    pf = out(reg) _,
                    pf_base = inout(reg) t.prefetch.base => _,
                    run = in(reg) 2 * t.prefetch.run,
                    pf_next = in(reg) t.prefetch.next,
                    k0 = in(kreg) lanes as u16,
                    k1 = in(kreg) (lanes >> 16) as u16,
                    row = const ROW,
                    slot = const SLOT,
                    out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _,
                    out("zmm4") _, out("zmm5") _, out("zmm6") _, out("zmm7") _,
                    out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
                    out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _,
                    out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm19") _,
                    out("zmm20") _, out("zmm21") _, out("zmm22") _, out("zmm23") _,
                    out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _,
                    out("zmm28") _, out("zmm29") _, out("zmm30") _,
                    options(nostack),
                );
            }
        }
    };
}

/// Defines the tiles of 1 to 14 rows with instruction `$op`, and `$pick`, which calls the one for `t.rows`.
macro_rules! tiles {
    ($pick:ident, $op:literal, $($rows:literal $name:ident,)+) => {
        tiles!(@define $op, [], [
            (0, 0, 1), (1, 2, 3), (2, 4, 5), (3, 6, 7), (4, 8, 9), (5, 10, 11), (6, 12, 13), (7, 14, 15),
            (8, 16, 17), (9, 18, 19), (10, 20, 21), (11, 22, 23), (12, 24, 25), (13, 26, 27)
        ], $($name,)+);

        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
        unsafe fn $pick<const ROW: usize, const SLOT: usize>(t: &Tile, context: &mut Context) {
            // SAFETY: the caller's contract.
            unsafe {
                match t.rows {
                    $($rows => $name::<ROW, SLOT>(t, context),)+
                    rows => unreachable!("a tile of {rows} rows"),
                }
            }
        }
    };
    (@define $op:literal, [$($done:tt),*], [$next:tt $(, $rest:tt)*], $name:ident, $($names:ident,)*) => {
        tile!($name, $op, [$($done,)* $next]);
        tiles!(@define $op, [$($done,)* $next], [$($rest),*], $($names,)*);
    };
    (@define $op:literal, [$($done:tt),*], [],) => {};
}

tiles!(fma, "vfmadd231ps", 1 fma1, 2 fma2, 3 fma3, 4 fma4, 5 fma5, 6 fma6, 7 fma7, 8 fma8, 9 fma9, 10 fma10,
    11 fma11, 12 fma12, 13 fma13, 14 fma14,);
tiles!(dot, "vdpbf16ps", 1 dot1, 2 dot2, 3 dot3, 4 dot4, 5 dot5, 6 dot6, 7 dot7, 8 dot8, 9 dot9, 10 dot10,
    11 dot11, 12 dot12, 13 dot13, 14 dot14,);

fn context<S: Slots>(t: &Tile) -> Context {
    Context { mxcsr: S::MXCSR, saved: 0, accumulate: t.accumulate.into(), stream: t.stream.into() }
}

/// Filling slots with AVX-512. All functions need the instruction set.
trait Packing: Slots {
    /// Slots that one dword of row-major elements fills.
    const PER_DWORD: usize;

    /// The slots of 16 dwords of row-major elements: first slots, then (if PER_DWORD is 2) second slots.
    unsafe fn expand(dwords: __m512i) -> [__m512i; 2];

    /// Slot `s` of the vectors that start at `x[0..16]`, as `mask` says; elements of one vector lie `along` apart.
    unsafe fn column(x: *const Self::Elem, along: usize, k: usize, s: usize, mask: __mmask16) -> __m512i;

    /// The slots of `k` consecutive elements.
    unsafe fn row(x: *const Self::Elem, k: usize, dst: *mut u32);
}

impl Packing for Single {
    const PER_DWORD: usize = 1;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn expand(dwords: __m512i) -> [__m512i; 2] {
        [dwords, dwords]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn column(x: *const f32, along: usize, _k: usize, s: usize, mask: __mmask16) -> __m512i {
        // SAFETY: the lanes under the mask are readable.
        unsafe { _mm512_maskz_loadu_epi32(mask, x.add(s * along).cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn row(x: *const f32, k: usize, dst: *mut u32) {
        // SAFETY: k elements are readable, k slots writable.
        unsafe { x.cast::<u32>().copy_to_nonoverlapping(dst, k) }
    }
}

impl Packing for Split {
    const PER_DWORD: usize = 2;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn expand(dwords: __m512i) -> [__m512i; 2] {
        [_mm512_and_si512(dwords, _mm512_set1_epi32(0xffff_0000_u32 as i32)), _mm512_slli_epi32::<16>(dwords)]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn column(x: *const Self::Elem, along: usize, k: usize, s: usize, mask: __mmask16) -> __m512i {
        let at = s ^ 1;
        if at >= k {
            return _mm512_setzero_si512();
        }
        // SAFETY: the lanes under the mask are readable.
        let halves = unsafe { _mm256_maskz_loadu_epi16(mask, x.add(at * along).cast()) };
        _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn row(x: *const Self::Elem, k: usize, dst: *mut u32) {
        let odd = _mm512_set1_epi64(0xffff_0000);
        for k0 in (0..k).step_by(LANES) {
            let left = LANES.min(k - k0);
            let mask = ((1u32 << left) - 1) as __mmask16;
            // SAFETY: `left` elements are readable; count(left) slots are writable.
            unsafe {
                let pairs = _mm256_maskz_loadu_epi16(mask, x.add(k0).cast());
                // A pair (even, odd) in the low dword of each qword becomes the dwords (odd, even).
                let wide = _mm512_cvtepu32_epi64(pairs);
                let slots = _mm512_or_si512(_mm512_and_si512(wide, odd), _mm512_slli_epi64::<48>(wide));
                let mask = ((1u32 << Self::count(left)) - 1) as __mmask16;
                _mm512_mask_storeu_epi32(dst.add(k0).cast(), mask, slots);
            }
        }
    }
}

impl Packing for Pairs {
    const PER_DWORD: usize = 1;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn expand(dwords: __m512i) -> [__m512i; 2] {
        [dwords, dwords]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn column(x: *const Self::Elem, along: usize, k: usize, s: usize, mask: __mmask16) -> __m512i {
        // SAFETY: the slots of `Split` have the same bounds.
        unsafe {
            let odd = Split::column(x, along, k, 2 * s, mask);
            let even = Split::column(x, along, k, 2 * s + 1, mask);
            _mm512_or_si512(odd, _mm512_srli_epi32::<16>(even))
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    unsafe fn row(x: *const Self::Elem, k: usize, dst: *mut u32) {
        // SAFETY: k elements are readable, count(k) slots writable; the last slot is zero before half of it is written.
        unsafe {
            *dst.add(Self::count(k) - 1) = 0;
            x.copy_to_nonoverlapping(dst.cast(), k);
        }
    }
}

/// Packs `rows <= NR` rows of `k` elements, slot s of row i to `dst[s * NR + i]`; zeros where no row is.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn pack_rows<S: Packing>(src: *const S::Elem, ld: usize, rows: usize, k: usize, dst: *mut u32) {
    let size = size_of::<S::Elem>();
    /// Bytes of a row in one 16 x 16 block of dwords.
    const BLOCK: usize = 64;
    let bytes = k * size;
    let slots = S::count(k);
    for half in 0..2 {
        let first = half * LANES;
        let here = rows.saturating_sub(first).min(LANES);
        for at in (0..bytes).step_by(BLOCK) {
            let left = BLOCK.min(bytes - at);
            let slot0 = at / 4 * S::PER_DWORD;
            // SAFETY: a whole block is read in place; at the edges, what is there is staged among zeros. Slots below
            // count(k) are written.
            unsafe {
                let block = if here == LANES && left == BLOCK {
                    transpose(src.add(first * ld).cast::<u8>().add(at), ld * size)
                } else {
                    let mut stage = [[0u8; BLOCK]; LANES];
                    for (i, row) in stage.iter_mut().take(here).enumerate() {
                        let from = src.add((first + i) * ld).cast::<u8>().add(at);
                        from.copy_to_nonoverlapping(row.as_mut_ptr(), left);
                    }
                    transpose(stage.as_ptr().cast(), BLOCK)
                };
                for (i, &dwords) in block.iter().enumerate().take((slots - slot0).div_ceil(S::PER_DWORD)) {
                    let expanded = S::expand(dwords);
                    for (part, &x) in expanded.iter().take(S::PER_DWORD).enumerate() {
                        let slot = slot0 + i * S::PER_DWORD + part;
                        _mm512_storeu_si512(dst.add(slot * NR + first).cast(), x);
                    }
                }
            }
        }
    }
}

/// Transposes 16 rows of 16 dwords, `step` bytes apart.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn transpose(src: *const u8, step: usize) -> [__m512i; 16] {
    let zero = _mm512_setzero_si512();
    let mut out = [zero; 16];
    for half in 0..2 {
        // q[i] = dwords 8*half .. 8*half+8 of row i (low 256 bits) and of row i + 8 (high).
        let mut q = [zero; 8];
        for (i, q) in q.iter_mut().enumerate() {
            // SAFETY: the caller's rows are readable.
            unsafe {
                let low = _mm256_loadu_si256(src.add(i * step + half * 32).cast());
                let high = _mm256_loadu_si256(src.add((i + 8) * step + half * 32).cast());
                *q = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
            }
        }
        // In each 128-bit lane, 4 x 4 transposes of rows 0..4 and rows 4..8.
        let mut t = [zero; 8];
        for i in 0..2 {
            let q = &q[4 * i..];
            let (a, b) = (_mm512_unpacklo_epi32(q[0], q[1]), _mm512_unpackhi_epi32(q[0], q[1]));
            let (c, d) = (_mm512_unpacklo_epi32(q[2], q[3]), _mm512_unpackhi_epi32(q[2], q[3]));
            t[4 * i] = _mm512_unpacklo_epi64(a, c);
            t[4 * i + 1] = _mm512_unpackhi_epi64(a, c);
            t[4 * i + 2] = _mm512_unpacklo_epi64(b, d);
            t[4 * i + 3] = _mm512_unpackhi_epi64(b, d);
        }
        // t[j] has lanes (column j, rows 0-3), (column j+4, rows 0-3), (j, rows 8-11), (j+4, rows 8-11);
        // t[4+j] the same of rows 4-7 and 12-15.
        let low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
        let high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
        for j in 0..4 {
            out[8 * half + j] = _mm512_permutex2var_epi64(t[j], low, t[4 + j]);
            out[8 * half + 4 + j] = _mm512_permutex2var_epi64(t[j], high, t[4 + j]);
        }
    }
    out
}

/// Packs `[width, k]` of a column-major operand to panels of HALVES x 16 columns, KC steps apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn pack_cols<S: Packing, const HALVES: usize>(
    src: *const S::Elem,
    ld: usize,
    width: usize,
    k: usize,
    dst: *mut u32,
) {
    let registers = width.div_ceil(HALVES * LANES) * HALVES;
    let whole = width / LANES;
    let tail = ((1u32 << (width % LANES)) - 1) as __mmask16;
    for s in 0..S::count(k) {
        let put = |register: usize, mask: __mmask16| {
            let (panel, half) = (register / HALVES, register % HALVES);
            // SAFETY: the mask covers existing columns only.
            unsafe {
                let slots = S::column(src.wrapping_add(register * LANES), ld, k, s, mask);
                let at = (panel * KC + s) * HALVES + half;
                _mm512_storeu_si512(dst.add(at * LANES).cast(), slots);
            }
        };
        for register in 0..whole {
            put(register, !0);
        }
        if whole < registers {
            put(whole, tail);
        }
        for register in whole + 1..registers {
            put(register, 0);
        }
    }
}

/// Packs `m` rows of `k` elements to rows KC slots apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn copy_rows<S: Packing>(src: *const S::Elem, ld: usize, m: usize, k: usize, dst: *mut u32) {
    for i in 0..m {
        // SAFETY: row i is inside the operand; its slots are inside the destination.
        unsafe { S::row(src.add(i * ld), k, dst.add(i * KC)) }
    }
}

macro_rules! kernel {
    ([$($generics:tt)*] $name:ty, $slots:ty, $pick:ident) => {
        impl<$($generics)*> Kernel for $name {
            type Slots = $slots;
            const MR: usize = MR;
            const NR: usize = NR;
            const A_WIDTH: usize = A_WIDTH;
            const STREAMS: bool = true;

            unsafe fn pack_a_rows(a: *const Elem<$slots>, lda: usize, m: usize, k: usize, dst: *mut u32) {
                // SAFETY: the caller's contract.
                unsafe { copy_rows::<$slots>(a, lda, m, k, dst) }
            }

            unsafe fn pack_a_cols(a: *const Elem<$slots>, lda: usize, m: usize, k: usize, dst: *mut u32) {
                // SAFETY: the caller's contract.
                unsafe { pack_cols::<$slots, 1>(a, lda, m, k, dst) }
            }

            unsafe fn pack_b_rows(b: *const Elem<$slots>, ldb: usize, n: usize, k: usize, dst: *mut u32) {
                // SAFETY: the caller's contract.
                unsafe { pack_rows::<$slots>(b, ldb, n, k, dst) }
            }

            unsafe fn pack_b_cols(b: *const Elem<$slots>, ldb: usize, n: usize, k: usize, dst: *mut u32) {
                // SAFETY: the caller's contract.
                unsafe { pack_cols::<$slots, 2>(b, ldb, n, k, dst) }
            }

            unsafe fn tile(t: &Tile) {
                let mut context = context::<$slots>(t);
                // SAFETY: the caller's contract.
                unsafe {
                    match t.a_order {
                        Order::RowMajor => $pick::<{ 4 * KC }, 4>(t, &mut context),
                        Order::ColMajor => $pick::<4, { 4 * A_WIDTH }>(t, &mut context),
                    }
                }
            }

            fn fence() {
                // SAFETY: SFENCE is part of SSE, which x86-64 has.
                unsafe { _mm_sfence() }
            }
        }
    };
}

type Elem<S> = <S as Slots>::Elem;

kernel!([S: Packing] Fma<S>, S, fma);
kernel!([] Dot, Pairs, dot);
