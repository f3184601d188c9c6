//! The blocking of a product, shared by all instruction sets.
//!
//! ```text
//! for MC rows of C, for KC of k:  pack A                       (L2)
//!     for NC or NR columns of C:  pack B                       (L2 or L1)
//!         for NR columns of C, for MR rows of C:
//!             a register tile C[MR, NR] over KC steps, which prefetches the B to be packed next
//! ```
//!
//! Between k blocks the chains rest in C as f32, so the edges of blocks change no bits.

use super::pack::Slots;

/// Slots of k in one block. The packed panel of B, KC x NR slots, stays in L1 while the rows of A pass by.
pub(super) const KC: usize = 256;
/// Rows of A in one block. The packed block, MC x KC slots, stays in L2.
const MC: usize = 256;
/// Columns of a column-major B that are packed together: long enough runs of each of its rows in memory. A row-major B is
/// packed panel by panel, into L1.
const NC: usize = 256;

/// How an operand `[outer, k]` lies in memory, outer being m or n.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Element (i, k) is at `i * ld + k`.
    RowMajor,
    /// Element (i, k) is at `k * ld + i`.
    ColMajor,
}

/// One product.
pub struct Call<T> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: *const T,
    pub lda: usize,
    pub a_order: Order,
    pub b: *const T,
    pub ldb: usize,
    pub b_order: Order,
    pub c: *mut f32,
    pub ldc: usize,
    pub accumulate: bool,
}

/// Cache lines that a micro-kernel asks for while it computes, one every other step: `run` consecutive lines, then as many
/// that start `next` bytes after the first of those, and so on. Whole runs keep the lines of a page together.
#[derive(Clone, Copy)]
pub(super) struct Prefetch {
    pub base: *const u8,
    pub run: usize,
    pub next: usize,
}

/// One register tile: `C[rows, cols] (+)= A B` over `steps` slots.
pub(super) struct Tile {
    /// Packed A. Row-major blocks: slot s of row i is at `i * KC + s`; column-major: at `s * A_WIDTH + i`.
    pub a: *const u32,
    pub a_order: Order,
    /// Packed B: slot s of column j is at `s * NR + j`; columns from `cols` on hold zeros.
    pub b: *const u32,
    pub steps: usize,
    pub c: *mut f32,
    pub ldc: usize,
    pub rows: usize,
    pub cols: usize,
    /// Start from C, or from +0.
    pub accumulate: bool,
    /// Write C past the caches.
    pub stream: bool,
    pub prefetch: Prefetch,
}

/// An instruction set's packing and register tile.
pub(super) trait Kernel {
    type Slots: Slots;
    /// Rows of the register tile.
    const MR: usize;
    /// Columns of the register tile.
    const NR: usize;
    /// Slots between two steps of a packed column-major A, at least MR.
    const A_WIDTH: usize;
    /// Whether the tile honours [`Tile::stream`], which needs C aligned to 64 bytes.
    const STREAMS: bool;

    /// Packs `[m, k]` of row-major A, `k <= KC` slots, to rows KC slots apart.
    ///
    /// # Safety
    /// The CPU has the instruction set; source readable, destination writable.
    unsafe fn pack_a_rows(a: *const Elem<Self>, lda: usize, m: usize, k: usize, dst: *mut u32);
    /// Packs `[m, k]` of column-major A, `m <= MR`, to steps A_WIDTH slots apart.
    ///
    /// # Safety
    /// As `pack_a_rows`.
    unsafe fn pack_a_cols(a: *const Elem<Self>, lda: usize, m: usize, k: usize, dst: *mut u32);
    /// Packs `[n, k]` of row-major B, `n <= NR`, to steps NR slots apart, and fills up with zeros.
    ///
    /// # Safety
    /// As `pack_a_rows`.
    unsafe fn pack_b_rows(b: *const Elem<Self>, ldb: usize, n: usize, k: usize, dst: *mut u32);
    /// Packs `[n, k]` of column-major B, any n: panels of NR columns, each like that, KC x NR slots apart.
    ///
    /// # Safety
    /// As `pack_a_rows`.
    unsafe fn pack_b_cols(b: *const Elem<Self>, ldb: usize, n: usize, k: usize, dst: *mut u32);
    /// Computes one tile, `1 <= rows <= MR`, `1 <= cols <= NR`, `steps >= 1`.
    ///
    /// # Safety
    /// The CPU has the instruction set; the pointers hold what [`Tile`] says.
    unsafe fn tile(tile: &Tile);
    /// Orders the streamed stores before what follows.
    fn fence() {}
}

type Elem<K> = <<K as Kernel>::Slots as Slots>::Elem;

/// A cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[allow(dead_code, reason = "read through pointers")] [u32; 16]);

/// Packing buffers of one thread. They grow at the first calls and are kept.
#[derive(Default)]
pub struct Scratch {
    a: Vec<Line>,
    b: Vec<Line>,
}

impl Scratch {
    /// Empty buffers.
    pub fn new() -> Self {
        Self::default()
    }
}

/// Room for `slots` slots, aligned to a cache line.
fn reserve(buffer: &mut Vec<Line>, slots: usize) -> *mut u32 {
    let lines = slots.div_ceil(16);
    if buffer.len() < lines {
        buffer.resize(lines, Line([0; 16]));
    }
    buffer.as_mut_ptr().cast()
}

/// Runs one product on kernel `K`.
///
/// # Safety
/// The CPU has `K`'s instruction set; the operands of `call` are valid for its shape.
pub(super) unsafe fn run<K: Kernel>(scratch: &mut Scratch, call: &Call<Elem<K>>) {
    let &Call { m, n, k, a, lda, a_order, b, ldb, b_order, c, ldc, accumulate } = call;
    if m == 0 || n == 0 {
        return;
    }
    debug_assert!(ldc >= n || m == 1, "rows of C overlap");
    if k == 0 {
        if !accumulate {
            for i in 0..m {
                // SAFETY: C is writable over [m, n].
                unsafe { std::slice::from_raw_parts_mut(c.add(i * ldc), n).fill(0.0) };
            }
        }
        return;
    }

    let size = size_of::<Elem<K>>();
    // Elements of k in one block: an even number, so that pairs stay whole.
    let kc_max = 2 * KC / K::Slots::count(2);
    let nc_max = match b_order {
        Order::RowMajor => K::NR,
        Order::ColMajor => NC.next_multiple_of(K::NR),
    };
    let groups_max = MC.min(m).div_ceil(K::MR);
    let a_slots = match a_order {
        Order::RowMajor => MC.min(m) * KC,
        Order::ColMajor => groups_max * KC * K::A_WIDTH,
    };
    let pa = reserve(&mut scratch.a, a_slots);
    let pb = reserve(&mut scratch.b, KC * nc_max);
    // A weight gradient is written once and read much later: past the caches, its lines need not be fetched first.
    let streams = K::STREAMS
        && a_order == Order::ColMajor
        && b_order == Order::ColMajor
        && !accumulate
        && k <= kc_max
        && c.addr().is_multiple_of(size_of::<f32>())
        && ldc.is_multiple_of(16);
    let head = c.addr().wrapping_neg() % 64 / size_of::<f32>();
    if streams && 0 < head && head < n {
        // The columns before the first whole cache line apart, so that the others stream: allocators rarely align to 64.
        // SAFETY: the two calls share out the columns of this one.
        return unsafe {
            run::<K>(scratch, &Call { n: head, ..*call });
            run::<K>(scratch, &Call { n: n - head, b: b.add(head), c: c.add(head), ..*call });
        };
    }
    let stream = streams && head == 0;

    // Offset in elements of (outer i, k) in an operand.
    let at = |order: Order, ld: usize, i: usize, k: usize| match order {
        Order::RowMajor => i * ld + k,
        Order::ColMajor => k * ld + i,
    };
    for m0 in (0..m).step_by(MC) {
        let mc = MC.min(m - m0);
        let groups = mc.div_ceil(K::MR);
        // Groups of rows as even as can be: no tile is much smaller than the others.
        let group = |g: usize| g * mc / groups..(g + 1) * mc / groups;
        for k0 in (0..k).step_by(kc_max) {
            let kc = kc_max.min(k - k0);
            // SAFETY: the block lies inside [m, k] of A and is packed into room for MC rows or groups_max groups.
            unsafe {
                match a_order {
                    Order::RowMajor => K::pack_a_rows(a.add(at(a_order, lda, m0, k0)), lda, mc, kc, pa),
                    Order::ColMajor => {
                        for g in 0..groups {
                            let rows = group(g);
                            let dst = pa.add(g * KC * K::A_WIDTH);
                            let src = a.add(at(a_order, lda, m0 + rows.start, k0));
                            K::pack_a_cols(src, lda, rows.len(), kc, dst);
                        }
                    }
                }
            }
            for n0 in (0..n).step_by(nc_max) {
                let nc = nc_max.min(n - n0);
                // SAFETY: the block lies inside [n, k] of B and is packed into room for nc_max columns.
                unsafe {
                    let src = b.add(at(b_order, ldb, n0, k0));
                    match b_order {
                        Order::RowMajor => K::pack_b_rows(src, ldb, nc, kc, pb),
                        Order::ColMajor => K::pack_b_cols(src, ldb, nc, kc, pb),
                    }
                }
                // The block to be packed next, cut into runs of lines that the tiles share out. It has this one's size,
                // or is a bit smaller.
                let (next_n, next_k) = if n0 + nc_max < n { (n0 + nc_max, k0) } else { (0, k0 + kc) };
                let (runs, run) = match b_order {
                    Order::RowMajor => (nc, kc),
                    Order::ColMajor => (kc, nc),
                };
                let tiles = nc.div_ceil(K::NR) * groups;
                let prefetch = |tile: usize| {
                    let first = runs * tile / tiles;
                    let at = at(b_order, ldb, next_n, next_k) + first * ldb;
                    let (base, next) = if next_k < k {
                        (b.cast::<u8>().wrapping_add(at * size), ldb * size)
                    } else {
                        (pb.cast_const().cast(), 0)
                    };
                    Prefetch { base, run: (run * size).div_ceil(64), next }
                };
                // A weight gradient that is added to comes from memory: the C of the next tile.
                let prefetch_c = |j: usize, g: usize| {
                    let (row, j) = if g + 1 < groups { (group(g + 1).start, j) } else { (0, j + K::NR) };
                    Prefetch {
                        base: c.wrapping_add((m0 + row) * ldc + n0 + j).cast_const().cast(),
                        run: K::NR * size_of::<f32>() / 64,
                        next: ldc * size_of::<f32>(),
                    }
                };
                for j in (0..nc).step_by(K::NR) {
                    let cols = K::NR.min(nc - j);
                    for g in 0..groups {
                        let rows = group(g);
                        // SAFETY: the packed operands hold group g and panel j; the tile lies inside C.
                        unsafe {
                            K::tile(&Tile {
                                a: match a_order {
                                    Order::RowMajor => pa.add(rows.start * KC),
                                    Order::ColMajor => pa.add(g * KC * K::A_WIDTH),
                                },
                                a_order,
                                b: pb.add(j * KC),
                                steps: K::Slots::count(kc),
                                c: c.add((m0 + rows.start) * ldc + n0 + j),
                                ldc,
                                rows: rows.len(),
                                cols,
                                accumulate: accumulate || k0 > 0,
                                stream: stream && cols == K::NR,
                                prefetch: if accumulate && a_order == Order::ColMajor {
                                    prefetch_c(j, g)
                                } else {
                                    prefetch(j / K::NR * groups + g)
                                },
                            });
                        }
                    }
                }
            }
        }
    }
    if stream {
        K::fence();
    }
}
