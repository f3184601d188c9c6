//! The AVX2 kernel: a register tile of up to 6 rows by 16 columns, with f32 FMAs.
//!
//! The tile is one `asm!` block for the same reason as the AVX-512 tile: it sets MXCSR and restores it. C passes through
//! a buffer of the tile's full size, so that edges need no masks.
//!
//! Registers: ymm(2r), ymm(2r+1) hold row r of C; ymm12, ymm13 a step of B; ymm14 one slot of A, broadcast.

use std::arch::asm;
use std::marker::PhantomData;

use super::driver::{KC, Kernel, Order, Tile};
use super::pack::{Slots, portable, portable_panels};

const MR: usize = 6;
const NR: usize = 16;
const A_WIDTH: usize = 8;

/// f32 FMAs over [`Single`](super::pack::Single) or [`Split`](super::pack::Split) slots.
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
tile!(
    fma6,
    [(0, 0, 1), (1, 2, 3), (2, 4, 5), (3, 6, 7), (4, 8, 9), (5, 10, 11)]
);

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

impl<S: Slots> Kernel for Fma<S> {
    type Slots = S;
    const MR: usize = MR;
    const NR: usize = NR;
    const A_WIDTH: usize = A_WIDTH;
    const STREAMS: bool = false;

    unsafe fn pack_a_rows(a: *const S::Elem, lda: usize, m: usize, k: usize, dst: *mut u32) {
        // SAFETY: the caller's contract.
        unsafe { portable::<S>(a, lda, 1, m, k, dst, 1, KC) }
    }

    unsafe fn pack_a_cols(a: *const S::Elem, lda: usize, m: usize, k: usize, dst: *mut u32) {
        // SAFETY: the caller's contract.
        unsafe { portable::<S>(a, 1, lda, m, k, dst, A_WIDTH, 1) }
    }

    unsafe fn pack_b_rows(b: *const S::Elem, ldb: usize, n: usize, k: usize, dst: *mut u32) {
        // SAFETY: the caller's contract. Columns past n hold old slots; their results are dropped.
        unsafe { portable::<S>(b, ldb, 1, n, k, dst, NR, 1) }
    }

    unsafe fn pack_b_cols(b: *const S::Elem, ldb: usize, n: usize, k: usize, dst: *mut u32) {
        // SAFETY: the caller's contract. Columns past n hold old slots; their results are dropped.
        unsafe { portable_panels::<S>(b, ldb, n, k, dst, NR, KC * NR) }
    }

    unsafe fn tile(t: &Tile) {
        let mut acc = [[0f32; NR]; MR];
        // SAFETY: the rows and columns of the tile are inside C; the rest is the caller's contract.
        unsafe {
            if t.accumulate {
                for (i, row) in acc.iter_mut().take(t.rows).enumerate() {
                    t.c.add(i * t.ldc)
                        .copy_to_nonoverlapping(row.as_mut_ptr(), t.cols);
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
