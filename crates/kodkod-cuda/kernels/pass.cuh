// What forward and backward share: waiting for counters, arriving at them, moving rows, storing tiles.
#pragma once
#include "gemm/tile.cuh"
#include "params.cuh"

constexpr u32 THREADS = 384;
constexpr u32 WIDTH = INNER_SIZE > SHARED_SIZE ? INNER_SIZE : SHARED_SIZE;
constexpr u32 LOCAL = EXPERTS / RANKS;

// What the scheduler tells the others of one tile.
struct Work {
    program::Task task;
    u32 more;         // 0: there is no other
    u32 rows;         // of the block, padding not counted; 128 where rows are not M
    u32 blocks;       // of K
    u32 extra;        // stages after those, for the epilogue
    u32 kept, ring;   // first rows of its slots
    u32 expert;
};

constexpr u32 WORKS = 4;
struct Shared {
    gemm::Stages stages;
    u64 work_full[WORKS], work_empty[WORKS], work_done[WORKS];
    u64 row_full[48];
    Work work[WORKS];
    program::Program program;
    program::Task comm;
    program::Step steps[2];
};
// A warp's piece of a tile: 16 rows of 128 bytes, in the copy engine's swizzle. Each consumer warp has room for two.
constexpr u32 PIECE_BYTES = 2048, STORE_BYTES = gemm::CONSUMER_WARPS * 2 * PIECE_BYTES;
constexpr u32 SMEM_MOST = 232448;
// The layout is in shared memory where it fits: whoever decodes a ticket searches it.
constexpr u32 LAYOUT_WORDS = 3 * (LOCAL + (SHARED_SIZE > 0)) + 2;
constexpr bool LAYOUT_SHARED = gemm::STAGES * gemm::STAGE_BYTES + STORE_BYTES + sizeof(Shared) + LAYOUT_WORDS * 4 <= SMEM_MOST;

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
// Two values rounded to bf16, ties to even, the first in the low half.
__device__ __forceinline__ u32 pack(float a, float b) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
    return r;
}

// Waits until a counter of this rank reaches a value. False when the pass is given up, here or elsewhere.
__device__ __forceinline__ bool wait_for(const PassParams& p, const program::Program& q, const program::Task& t, const program::Wait& w) {
    if (w.at_least == 0) return true;
    const u32* counter = p.counters + program::place(q, w.counter);
    u32 seen = ptx::load_acquire_sys(counter);
    if (seen >= w.at_least) return true;
    u64 start = ptx::nanoseconds();
    u32 polls = 0;
    while ((seen = ptx::load_acquire_sys(counter)) < w.at_least) {
        if (++polls % 64) continue;
        if (ptx::nanoseconds() - start <= p.limit_ns && !ptx::load_acquire_sys(p.abort[q.rank])) continue;
        // Each rank says what it waited for and how far it has come, so that the one that does not go on stands out.
        u32 pushed = ptx::load_acquire_sys(p.counters + program::place(q, {program::PUSHED, 0}));
        if (atomicCAS(&p.stall->given_up, 0, 1) == 0) {
            p.stall->task = t.kind;
            p.stall->a = t.kind == program::W_GRAD ? t.run.block : t.a;
            p.stall->b = t.b;
            p.stall->counter = w.counter.name;
            p.stall->index = w.counter.index;
            p.stall->seen = seen;
            p.stall->expected = w.at_least;
            p.stall->pushed = pushed;
        }
        for (u32 r = 0; r < RANKS; r++) ptx::add_release_sys(p.abort[r], 1);
        return false;
    }
    return true;
}
__device__ __forceinline__ bool wait_all(const PassParams& p, const program::Program& q, const program::Task& t) {
    return wait_for(p, q, t, t.waits[0]) && wait_for(p, q, t, t.waits[1]);
}

// What the task's threads wrote is passed on: they have arrived at a barrier that this thread waited for.
__device__ __forceinline__ void arrive(const PassParams& p, const program::Program& q, const program::Task& t) {
    for (u32 i = 0; i < 2; i++) {
        const program::Arrive& a = t.arrives[i];
        if (a.what == program::HERE) {
            ptx::add_release(p.counters + program::place(q, a.counter), 1);
        } else if (a.what == program::AT) {
            ptx::add_release_sys(p.peer_counters[a.rank] + program::place(q, a.counter), 1);
        } else if (a.what == program::PUSHES) {
            // The last one passes on what the ones before it wrote.
            if (ptx::add_acq_rel(p.counters + program::place(q, {program::PUSHED, 0}), 1) + 1 == a.rank) {
                __threadfence_system();
                for (u32 r = 0; r < RANKS; r++) ptx::add_release_sys(p.peer_counters[r], 1);
            }
        }
    }
}

// Of 64 bf16 columns of a piece a lane holds, packed, columns 8 j + 2 (lane % 4) and the next, of rows lane / 4 (`[0]`) and
// lane / 4 + 8 (`[1]`), j = 0..7. Here: for j and j + 1.
using Pairs = u32[2][2];
__device__ __forceinline__ u32 matrix_at(const char* piece, u32 j) {
    // Matrices of 8 rows and 8 columns: rows 0-7 and 8-15 of column group j, then of j + 1.
    u32 lane = threadIdx.x % 32, row = lane % 16, group = j + lane / 16;
    return ptx::smem_address(piece) + row * 128 + (group ^ (row % 8)) * 16;
}
__device__ __forceinline__ void write_matrix(u32 at, const Pairs& v) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v[0][0]), "r"(v[0][1]), "r"(v[1][0]),
                 "r"(v[1][1]) : "memory");
}
__device__ __forceinline__ void read_matrix(u32 at, Pairs& v) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0][0]), "=r"(v[0][1]), "=r"(v[1][0]), "=r"(v[1][1]) : "r"(at) : "memory");
}
// A piece to where `address(row)` says, or nowhere where that is null: whole lines of 128 bytes, of four rows at a time. A
// piece that is written next must be another one.
template <typename D> __device__ __forceinline__ void store_piece(const char* piece, const D& address) {
    u32 lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 r = i * 4 + lane / 8, group = lane % 8;
        uint4 row = *reinterpret_cast<const uint4*>(piece + r * 128 + (group ^ (r % 8)) * 16);
        char* to = address(r);
        if (to) *reinterpret_cast<uint4*>(to + group * 16) = row;
    }
}
// Rows of a matrix of `pitch` values, from its row and column on.
template <typename T> __device__ __forceinline__ auto matrix_rows(T* matrix, u32 row, u32 column, u32 pitch) {
    T* first = matrix + u64(row) * pitch + column;
    return [=](u32 r) { return reinterpret_cast<char*>(first + u64(r) * pitch); };
}

// A row of a token of another rank that was pulled for another of the token's experts and still lies in its slot; ~0 where there
// is none. Returns when it is there.
template <bool GRAD> __device__ __forceinline__ u32 row_here(const PassParams& p, const program::Program& q, const program::Task& t, u32 slot) {
    u32 route = slot / SLOTS * TOP_K, best = ~0u;
#pragma unroll 8
    for (u32 k = 0; k < TOP_K; k++) {
        if (static_cast<u32>(__ldg(p.ids_of[t.b] + route + k)) - q.rank * LOCAL >= LOCAL) continue;
        u32 row = __ldg(p.row_of[t.b] + route + k);
        if (program::row_stays(q, GRAD, t.a, row / 128) != program::GONE) best = min(best, row);
    }
    if (best != ~0u && program::row_stays(q, GRAD, t.a, best / 128) == program::PULLED_BEFORE) {
        wait_for(p, q, t, {{GRAD ? program::GRAD_PULLED : program::PULLED, best / 128}, RANKS});
    }
    return best;
}

// Rows of `block` whose tokens `source` holds, copied into its slots: of x, or of dy where GRAD. A token of another rank
// crosses once for all its experts here, as far as its row stays; the others are copied from that. The rank's own task also
// zeroes the padding rows, since a weight gradient sums over them. All threads of the CTA: each warp moves rows of its own, in
// pieces, through DEPTH buffers, so that DEPTH - 1 loads are under way while one piece is stored.
constexpr u32 PIECE = 4096, DEPTH = 4, WARPS = THREADS / 32;
static_assert(WARPS * DEPTH * PIECE <= gemm::STAGES * gemm::STAGE_BYTES && WARPS * DEPTH <= sizeof(Shared::row_full) / 8, "room");
template <bool GRAD> __device__ __forceinline__ void pull(const PassParams& p, const program::Program& q, Shared& s, char* stages, const program::Task& t, u32& uses) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr u32 ROW_BYTES = HIDDEN_SIZE * 2, PIECES = (ROW_BYTES + PIECE - 1) / PIECE;
    auto slot_of = [&](u32 row) {
        u32 first = GRAD ? program::ring_row(q, row / 128) : program::kept_row(q, row / 128);
        return reinterpret_cast<char*>(GRAD ? p.ring_dy : p.kept_x) + u64(first + row % 128) * ROW_BYTES;
    };
    char* slots = slot_of(t.a * 128);
    const uint2* rows = p.sources + t.a * 128;
    // Lane i holds the source of this warp's i-th row.
    u32 mine = warp + lane * WARPS;
    uint2 source = mine < 128 ? rows[mine] : make_uint2(~0u, 0);
    u32 wanted = __ballot_sync(~0u, source.x == t.b && mine < 128);
    u32 padding = __ballot_sync(~0u, source.x == ~0u && mine < 128);
    const char* from = reinterpret_cast<const char*>(GRAD ? p.dy_of[t.b] : p.x_of[t.b]) + u64(source.y / SLOTS) * ROW_BYTES;
    if (RANKS > 1 && t.b != q.rank) {
        if (wanted >> lane & 1) {
            u32 here = source.y % SLOTS < TOP_K ? row_here<GRAD>(p, q, t, source.y) : ~0u;
            if (here != ~0u) from = slot_of(here);
            if (TRACE) atomicAdd(p.stamped + (here == ~0u ? 1 : 2), 1);
        }
        __syncwarp();
        // What other CTAs' copies have left is read by this one's.
        ptx::proxy_fence();
    }
    char* buffers = stages + warp * DEPTH * PIECE;
    u64* full = &s.row_full[warp * DEPTH];
    u32 moved = uses;  // pieces stored
    auto store_oldest = [&](char* at, u32 bytes) {
        ptx::barrier_wait(&full[moved % DEPTH], moved / DEPTH % 2);
        __syncwarp();
        if (lane == 0) {
            ptx::bulk_store(at, buffers + moved % DEPTH * PIECE, bytes);
            ptx::bulk_commit();
        }
        moved++;
    };
    auto bytes_of = [](u32 piece) { return piece + 1 < PIECES ? PIECE : ROW_BYTES - (PIECES - 1) * PIECE; };
    // The piece to store next: its row among this warp's, and its place in the row.
    u32 next_rows = wanted, next_piece = 0;
    auto store_next = [&] {
        u32 r = warp + (__ffs(next_rows) - 1) * WARPS;
        store_oldest(slots + u64(r) * ROW_BYTES + next_piece * PIECE, bytes_of(next_piece));
        if (++next_piece == PIECES) {
            next_piece = 0;
            next_rows &= next_rows - 1;
        }
    };
    for (u32 left = wanted; left; left &= left - 1) {
        const char* row = reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<u64>(from), __ffs(left) - 1));
        for (u32 piece = 0; piece < PIECES; piece++) {
            if (uses - moved == DEPTH - 1) store_next();
            if (lane == 0) {
                // The store from this buffer, DEPTH pieces ago, was committed before the last one: it has read its source.
                ptx::bulk_wait_read<1>();
                ptx::barrier_expect(&full[uses % DEPTH], bytes_of(piece));
                ptx::bulk_load(buffers + uses % DEPTH * PIECE, row + piece * PIECE, bytes_of(piece), &full[uses % DEPTH]);
            }
            uses++;
        }
    }
    while (moved != uses) store_next();
    if (lane == 0) ptx::bulk_wait<0>();
    __syncwarp();
    if (t.b == q.rank) {
        for (; padding; padding &= padding - 1) {
            u32 r = warp + (__ffs(padding) - 1) * WARPS;
            uint4* at = reinterpret_cast<uint4*>(slots + u64(r) * ROW_BYTES);
            for (u32 i = lane; i < ROW_BYTES / 16; i += 32) at[i] = make_uint4(0, 0, 0, 0);
        }
    }
    ptx::proxy_fence();
}

// Of this rank's routes; other ids than experts' are none, as in the schedule.
__device__ __forceinline__ bool is_route(const PassParams& p, u32 route) { return static_cast<u32>(p.ids[route]) < EXPERTS; }

// sum_i row_i weight_i: lane l adds groups of eight columns l, l + 32, ... in order, then lanes are added pairwise.
__device__ __forceinline__ float dot_row(const bf16* row, const float* weight) {
    float sum = 0;
#pragma unroll 1
    for (u32 v = threadIdx.x % 32; v < HIDDEN_SIZE / 8; v += 32) {
        uint4 a = __ldcg(reinterpret_cast<const uint4*>(row) + v);
        float4 b0 = __ldg(reinterpret_cast<const float4*>(weight) + 2 * v), b1 = __ldg(reinterpret_cast<const float4*>(weight) + 2 * v + 1);
        u32 pairs[4] = {a.x, a.y, a.z, a.w};
        float b[8] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
#pragma unroll
        for (u32 c = 0; c < 4; c++) {
            sum = __fadd_rn(sum, __fmul_rn(low(pairs[c]), b[2 * c]));
            sum = __fadd_rn(sum, __fmul_rn(high(pairs[c]), b[2 * c + 1]));
        }
    }
#pragma unroll
    for (u32 d = 16; d; d /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
    return sum;
}

// A test hook: holds one task until its rank has given up, or another rank has for long.
__device__ __forceinline__ void maybe_hang(const PassParams& p, const program::Task& t) {
    if (t.kind != p.hang_kind || t.a != p.hang_a || t.b != p.hang_b) return;
    for (u32 late = 0; late < 100000 && !ptx::load_acquire_sys(&p.stall->given_up); __nanosleep(1000)) late += ptx::load_acquire_sys(p.abort[p.program->rank]) != 0;
}

// Begin and end of a task, by one thread; nothing where TRACE is 0.
struct Tracer {
    u64 begin, loaded = 0, product = 0;
    __device__ __forceinline__ Tracer() : begin(TRACE ? ptx::nanoseconds() : 0) {}
    __device__ __forceinline__ void load(gemm::Stages& s, const gemm::Cursor& at) {
        if (!TRACE) return;
        ptx::barrier_wait(&s.full[at.stage], at.phase);
        loaded = ptx::nanoseconds();
    }
    __device__ __forceinline__ void multiplied() { if (TRACE) product = ptx::nanoseconds(); }
    __device__ __forceinline__ void end(const PassParams& p, u32 kind, u32 weight, u32 a, u32 b) const {
        if (!TRACE) return;
        u64 now = ptx::nanoseconds();
        u32 at = atomicAdd(p.stamped, 1), sm;
        if (at >= p.stamps_most) return;
        asm("mov.u32 %0, %%smid;" : "=r"(sm));
        p.stamps[at] = {begin, loaded, product, now, ptx::cycles(), kind, weight, a, b, sm, blockIdx.x};
    }
};

struct Activated { float h, dg, du; };

__device__ __forceinline__ float clamp_low(float v, float limit) { return LIMIT_ON && v < -limit ? -limit : v; }
__device__ __forceinline__ float clamp_high(float v, float limit) { return LIMIT_ON && v > limit ? limit : v; }

// Stays on its side of the clamp when it is rounded to bf16: plain rounding would move what is just beyond onto the
// limit, and the backward, which knows only the stored value, would let a gradient pass that is zero.
__device__ __forceinline__ float keep_side(float v) {
    float inside = __uint_as_float(__float_as_uint(LIMIT) & 0xffff0000u);
    float beyond = __uint_as_float((__float_as_uint(LIMIT) & 0xffff0000u) + 0x10000u);
    if (v > LIMIT) return v < beyond ? beyond : v;
    return v > inside ? inside : v;
}
__device__ __forceinline__ float keep_gate(float g) { return LIMIT_ON ? keep_side(g) : g; }
__device__ __forceinline__ float keep_up(float u) { return LIMIT_ON ? copysignf(keep_side(fabsf(u)), u) : u; }

__device__ __forceinline__ float sigmoid(float x) { return ptx::reciprocal(__fadd_rn(1.0f, ptx::exp2(__fmul_rn(-1.4426950408889634f, x)))); }

// h = (u + offset) g sigmoid(alpha g), unrounded.
__device__ __forceinline__ float activate(float g, float u) {
    g = clamp_high(g, LIMIT);
    u = clamp_low(clamp_high(u, LIMIT), LIMIT);
    return __fmul_rn(__fadd_rn(u, UP_OFFSET), __fmul_rn(g, sigmoid(__fmul_rn(ALPHA, g))));
}
// The same with dh/dg and dh/du, zero where clamped.
__device__ __forceinline__ Activated activate_backward(float g, float u) {
    float gc = clamp_high(g, LIMIT), uc = clamp_low(clamp_high(u, LIMIT), LIMIT);
    float s = sigmoid(__fmul_rn(ALPHA, gc));
    float glu = __fmul_rn(gc, s), up = __fadd_rn(uc, UP_OFFSET);
    // s + alpha g s (1 - s)
    float slope = __fmaf_rn(__fmul_rn(ALPHA, glu), __fsub_rn(1.0f, s), s);
    Activated a{__fmul_rn(up, glu), __fmul_rn(up, slope), glu};
    if (LIMIT_ON && g > LIMIT) a.dg = 0;
    if (LIMIT_ON && (u > LIMIT || u < -LIMIT)) a.du = 0;
    return a;
}

// g and u of a GateUp tile, and h in a forward. The accumulator's first 128 columns are g, the others u.
template <bool FORWARD>
__device__ __forceinline__ void store_gate_up(const PassParams& p, char* pieces, const float (&acc)[128], const Work& w, u32 row0) {
    u32 lane = threadIdx.x % 32, width = w.expert >= LOCAL ? SHARED_SIZE : INNER_SIZE;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 col0 = w.task.b * 128 + half * 64;
        if (col0 >= width) break;
        Pairs h[4];
        __syncwarp();
#pragma unroll
        for (u32 j = 0; j < 8; j += 2) {
            Pairs g, u;
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    const float* vg = acc + 32 * half + 4 * (j + i) + 2 * r;
                    const float* vu = vg + 64;
                    float g0 = vg[0], g1 = vg[1], u0 = vu[0], u1 = vu[1];
                    if (BIASES && w.expert < LOCAL) {
                        u32 c = w.expert * INNER_SIZE + col0 + 8 * (j + i) + 2 * (lane % 4);
                        float2 bg = __ldg(reinterpret_cast<const float2*>(p.bias_gate + c));
                        float2 bu = __ldg(reinterpret_cast<const float2*>(p.bias_up + c));
                        g0 = __fadd_rn(g0, bg.x), g1 = __fadd_rn(g1, bg.y);
                        u0 = __fadd_rn(u0, bu.x), u1 = __fadd_rn(u1, bu.y);
                    }
                    g[i][r] = pack(keep_gate(g0), keep_gate(g1));
                    u[i][r] = pack(keep_up(u0), keep_up(u1));
                    // From the stored values, so that the backward sees the same.
                    if (FORWARD) h[j / 2][i][r] = pack(activate(low(g[i][r]), low(u[i][r])), activate(high(g[i][r]), high(u[i][r])));
                }
            }
            write_matrix(matrix_at(pieces, j), g);
            write_matrix(matrix_at(pieces + PIECE_BYTES, j), u);
        }
        store_piece(pieces, matrix_rows(p.kept_g, w.kept + row0, col0, WIDTH));
        store_piece(pieces + PIECE_BYTES, matrix_rows(p.kept_u, w.kept + row0, col0, WIDTH));
        if (FORWARD) {
#pragma unroll
            for (u32 j = 0; j < 8; j += 2) write_matrix(matrix_at(pieces, j), h[j / 2]);
            store_piece(pieces, matrix_rows(p.ring_h, w.ring + row0, col0, WIDTH));
        }
    }
}

// y_k or dx_k, rounded, to the slots of the ranks that hold the tokens. Lane r < 16 knows where row r goes.
__device__ __forceinline__ uint2 push_target(const PassParams& p, const Work& w, u32 row0) {
    return __ldg(p.sources + w.task.a * 128 + row0 + threadIdx.x % 16);
}
template <bool BIASED>
__device__ __forceinline__ void push(const PassParams& p, char* pieces, const float (&acc)[128], const Work& w, uint2 target) {
    u32 lane = threadIdx.x % 32;
    bf16* slot = nullptr;
    if (target.x != ~0u) slot = (RANKS == 1 ? p.combine[0] : p.combine[target.x]) + u64(target.y) * HIDDEN_SIZE + w.task.b * 256;
    __syncwarp();
#pragma unroll
    for (u32 quarter = 0; quarter < 4; quarter++) {
        u32 col0 = w.task.b * 256 + quarter * 64;
        if (col0 >= HIDDEN_SIZE) break;
        char* piece = pieces + quarter % 2 * PIECE_BYTES;
#pragma unroll
        for (u32 j = 0; j < 8; j += 2) {
            Pairs v;
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    const float* from = acc + 32 * quarter + 4 * (j + i) + 2 * r;
                    float v0 = from[0], v1 = from[1];
                    if (BIASED && BIASES && w.expert < LOCAL) {
                        u32 c = w.expert * HIDDEN_SIZE + col0 + 8 * (j + i) + 2 * (lane % 4);
                        float2 bias = __ldg(reinterpret_cast<const float2*>(p.bias_down + c));
                        v0 = __fadd_rn(v0, bias.x), v1 = __fadd_rn(v1, bias.y);
                    }
                    v[i][r] = pack(v0, v1);
                }
            }
            write_matrix(matrix_at(piece, j), v);
        }
        store_piece(piece, [&](u32 r) -> char* {
            u64 to = __shfl_sync(~0u, reinterpret_cast<u64>(slot), r);
            return to ? reinterpret_cast<char*>(to) + quarter * 128 : nullptr;
        });
    }
}

// One persistent kernel: all CTAs pull rows at the start, the first go on with that, all run GEMM tiles, all reduce at the end.
//   Ops::pull(task): where a row comes from and goes to      Ops::produce(work): one tile's loads
//   Ops::consume(work): its product and epilogue             Ops::reduce(chunk)
//   Ops::blocks, extra: stages that these take               Ops::first_pulls(program): tickets that all CTAs may pull
template <typename Ops> __device__ __forceinline__ void run_pass(const PassParams& p) {
    extern __shared__ __align__(1024) char smem[];
    char* stages = smem;
    char* store = smem + gemm::STAGES * gemm::STAGE_BYTES;
    Shared& s = *reinterpret_cast<Shared*>(store + STORE_BYTES);
    program::Program& q = s.program;
    u32 group = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        q = *p.program;
        gemm::init(s.stages);
        s.steps[0] = s.steps[1] = program::Step();
        for (u32 i = 0; i < WORKS; i++) {
            ptx::barrier_init(&s.work_full[i], 1);
            ptx::barrier_init(&s.work_empty[i], 2);
            ptx::barrier_init(&s.work_done[i], 256);
        }
        for (u32 i = 0; i < 48; i++) ptx::barrier_init(&s.row_full[i], 1);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if (LAYOUT_SHARED) {
        const u32* from[3] = {p.program->layout.rows, p.program->layout.first_block, p.program->layout.first_run};
        u32 *to = reinterpret_cast<u32*>(&s + 1), n = q.layout.experts + 1;
        for (u32 i = threadIdx.x; i < 3 * n - 1; i += THREADS) to[i] = from[(i + 1) / n][(i + 1) % n - (i < n - 1)];
        if (threadIdx.x == 0) q.layout.rows = to, q.layout.first_block = to + n - 1, q.layout.first_run = to + 2 * n - 1;
        __syncthreads();
    }
    u32 rank = q.rank;
    u64 comm_end = program::before(q, program::COMM, q.minibatches);

    // Takes a communication ticket, waits for it, and tells all threads; false at the end.
    auto next_comm = [&](u64 ticket, u64 end) {
        bool more = threadIdx.x == 0 && ticket < end;
        if (more) {
            program::decode(q, program::COMM, ticket, s.steps[program::COMM], s.comm);
            more = wait_all(p, q, s.comm);
        }
        return __syncthreads_or(more) != 0;
    };
    auto draw = [&](u32 counter) { return threadIdx.x == 0 ? atomicAdd(p.tickets + counter, 1) : 0; };
    // A ticket below `end`, or `end`: of those beyond, none is lost.
    auto draw_below = [&](u32 counter, u32 end) {
        if (threadIdx.x) return end;
        u32 ticket = ptx::load_acquire_sys(p.tickets + counter);
        while (ticket < end) {
            u32 seen = atomicCAS(p.tickets + counter, ticket, ticket + 1);
            if (seen == ticket) break;
            ticket = seen;
        }
        return min(ticket, end);
    };

    bool pulls = blockIdx.x < p.comm_ctas;
    u64 pulls_end = pulls ? comm_end : Ops::first_pulls(q);
    u32 uses = 0;
    while (next_comm(pulls ? draw(0) : draw_below(0, u32(pulls_end)), pulls_end)) {
        Ops::pull(p, q, s, stages, s.comm, uses);
        __syncthreads();
        if (threadIdx.x == 0) arrive(p, q, s.comm);
    }
    __syncthreads();

    // Warpgroup 0 serves: warp 0 draws tickets, decodes them and waits; warp 1 loads tiles; warp 2 arrives when a tile is
    // stored. Warpgroups 1 and 2 compute, and never wait for memory but in the products themselves.
    if (group == 0) {
        ptx::registers_shrink<56>();
        if (threadIdx.x == 0) {
            u64 end = program::tickets(q, program::COMPUTE);
            // Drawn one ahead.
            u64 ticket = atomicAdd(p.tickets + 1, 1);
            for (u32 n = 0;; n++) {
                Work& w = s.work[n % WORKS];
                ptx::barrier_wait(&s.work_empty[n % WORKS], (n / WORKS & 1) ^ 1);
                w.more = ticket < end;
                if (w.more) {
                    program::decode(q, program::COMPUTE, ticket, s.steps[program::COMPUTE], w.task);
                    ticket = atomicAdd(p.tickets + 1, 1);
                    u32 block = w.task.kind == program::W_GRAD ? w.task.run.block : w.task.a;
                    w.expert = w.task.kind == program::W_GRAD ? w.task.run.expert : program::expert_of(q, block);
                    w.kept = program::kept_row(q, block);
                    w.ring = program::ring_row(q, block);
                    w.blocks = Ops::blocks(q, w);
                    w.extra = Ops::extra(w);
                    w.rows = w.task.kind < program::W_GRAD ? program::rows_in(q, block) : 128;
                    w.more = wait_all(p, q, w.task);
                }
                bool more = w.more;
                ptx::barrier_arrive(&s.work_full[n % WORKS]);
                if (!more) break;
            }
        } else if (threadIdx.x == 32) {
            gemm::Cursor at;
            for (u32 n = 0;; n++) {
                ptx::barrier_wait(&s.work_full[n % WORKS], n / WORKS & 1);
                const Work& w = s.work[n % WORKS];
                if (!w.more) break;
                ptx::proxy_fence();
                Ops::produce(p, s, stages, at, w);
                ptx::barrier_arrive(&s.work_empty[n % WORKS]);
            }
        } else if (threadIdx.x == 64) {
            for (u32 n = 0;; n++) {
                ptx::barrier_wait(&s.work_full[n % WORKS], n / WORKS & 1);
                if (!s.work[n % WORKS].more) break;
                ptx::barrier_wait(&s.work_done[n % WORKS], n / WORKS & 1);
                ptx::proxy_fence();
                arrive(p, q, s.work[n % WORKS].task);
                ptx::barrier_arrive(&s.work_empty[n % WORKS]);
            }
        }
        // No warp here may take registers back before all consumers have theirs, which some would wait for for ever: not the warp
        // without work, and none of a CTA that gets no tile.
        __syncwarp();
        ptx::group_sync(1, THREADS);
        ptx::registers_grow<168>();
    } else {
        ptx::registers_grow<224>();
        ptx::group_arrive(1, THREADS);
        gemm::Cursor at;
        float acc[128];
        char* pieces = store + (threadIdx.x / 32 - 4) * 2 * PIECE_BYTES;
        u32 row0 = (group - 1) * 64 + threadIdx.x % 128 / 32 * 16;
        for (u32 n = 0;; n++) {
            ptx::barrier_wait(&s.work_full[n % WORKS], n / WORKS & 1);
            const Work& w = s.work[n % WORKS];
            if (!w.more) break;
            // Padding rows of a forward are never read; a weight gradient reads those of the backward, up to the next 64.
            if ((group - 1) * 64 < w.rows) Ops::consume(p, s, stages, at, acc, w, group - 1, pieces, row0);
            else gemm::skip(s.stages, at, w.blocks + w.extra);
            ptx::barrier_arrive(&s.work_done[n % WORKS]);
        }
        ptx::group_sync(1 + group, 128);
        ptx::registers_shrink<168>();
    }

    u64 all = program::tickets(q, program::COMM);
    while (next_comm(comm_end + draw(2), all)) {
        Ops::reduce(p, rank, s.comm.a);
        __syncthreads();
    }
}
