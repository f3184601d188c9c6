// What forward and backward share: waiting for counters, arriving at them, moving rows, storing tiles.
#pragma once
#include "gemm/tile.cuh"
#include "params.cuh"

constexpr u32 THREADS = 384;
constexpr u32 WIDTH = INNER_SIZE > SHARED_SIZE ? INNER_SIZE : SHARED_SIZE;
constexpr u32 LOCAL = EXPERTS / RANKS;

// What the producer tells the consumers of one tile.
struct Work {
    program::Task task;
    u32 more;        // 0: there is no other
    u32 rows;        // of the block, padding not counted; 128 where rows are not M
    u32 blocks;      // of K
    u32 extra;       // stages after those, for the epilogue
    u32 kept, ring;  // first rows of its slots
    u32 expert;
};

struct Shared {
    gemm::Stages stages;
    u64 work_full[2], work_empty[2], work_done[2];
    u64 row_full[48];
    Work work[2];
    program::Task comm;
    program::Step steps[2];
    u32 more;
};
constexpr u32 STORE_BYTES = 8 * 4096;  // of each consumer warp, 16 rows of 64 columns, twice
constexpr u32 SMEM_BYTES = gemm::STAGES * gemm::STAGE_BYTES + STORE_BYTES + sizeof(Shared);

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
        if (ptx::nanoseconds() - start <= p.limit_ns && !ptx::load_acquire_sys(p.abort)) continue;
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
        ptx::add_release_sys(p.abort, 1);
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

// A warp's piece of an accumulator: 16 rows of 64 columns. A lane holds, packed, columns 8 j + 2 (lane % 4) and the next,
// of rows lane / 4 (`[j][0]`) and lane / 4 + 8 (`[j][1]`), j = 0..7. `buffer` has 2048 bytes, a row 128, swizzled.
using Piece = u32[8][2];

__device__ __forceinline__ u32 matrix_at(char* buffer, u32 j) {
    // Matrices of 8 rows and 8 columns: rows 0-7 and 8-15 of column group j, then of j + 1.
    u32 lane = threadIdx.x % 32, row = lane % 16, group = j + lane / 16;
    return ptx::smem_address(buffer) + row * 128 + (group ^ (row % 8)) * 16;
}

// `address(row)` is where the row's columns go, or null. A row is written in whole 16-byte pieces; those beyond
// `columns` are left out.
template <typename D>
__device__ __forceinline__ void store_piece(char* buffer, const Piece& v, u32 columns, const D& address) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 j = 0; j < 8; j += 2) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(matrix_at(buffer, j)), "r"(v[j][0]),
                     "r"(v[j][1]), "r"(v[j + 1][0]), "r"(v[j + 1][1]) : "memory");
    }
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 r = i * 4 + lane / 8, group = lane % 8;
        uint4 row = *reinterpret_cast<uint4*>(buffer + r * 128 + (group ^ (r % 8)) * 16);
        bf16* to = address(r);
        if (to && group * 8 < columns) *reinterpret_cast<uint4*>(to + group * 8) = row;
    }
    __syncwarp();
}

// The reverse, from rows that the copy engine has left in shared memory in the same swizzle.
__device__ __forceinline__ void read_piece(char* rows, Piece& v) {
#pragma unroll
    for (u32 j = 0; j < 8; j += 2) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v[j][0]), "=r"(v[j][1]), "=r"(v[j + 1][0]), "=r"(v[j + 1][1]) : "r"(matrix_at(rows, j)) : "memory");
    }
}

// Rows of `block` whose tokens `source` holds, copied into its slots; the rank's own task also zeroes the padding rows,
// since a weight gradient sums over them. All threads of the CTA: each warp moves rows of its own, in pieces, through
// DEPTH buffers, so that DEPTH - 1 loads are under way while one piece is stored.
constexpr u32 PIECE = 4096, DEPTH = 4, WARPS = THREADS / 32;
static_assert(WARPS * DEPTH * PIECE <= gemm::STAGES * gemm::STAGE_BYTES && WARPS * DEPTH <= sizeof(Shared::row_full) / 8, "room");
__device__ __forceinline__ void pull(const PassParams& p, Shared& s, char* stages, const program::Task& t, u32 rank, const bf16* input, bf16* slots, u32& uses) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr u32 ROW_BYTES = HIDDEN_SIZE * 2, PIECES = (ROW_BYTES + PIECE - 1) / PIECE;
    const uint2* rows = p.sources + t.a * 128;
    // Lane i holds the source of this warp's i-th row.
    u32 mine = warp + lane * WARPS;
    uint2 source = mine < 128 ? rows[mine] : make_uint2(~0u, 0);
    u32 wanted = __ballot_sync(~0u, source.x == t.b && mine < 128);
    u32 padding = __ballot_sync(~0u, source.x == ~0u && mine < 128);
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
        store_oldest(reinterpret_cast<char*>(slots) + u64(r) * ROW_BYTES + next_piece * PIECE, bytes_of(next_piece));
        if (++next_piece == PIECES) {
            next_piece = 0;
            next_rows &= next_rows - 1;
        }
    };
    for (u32 left = wanted; left; left &= left - 1) {
        u32 slot = __shfl_sync(~0u, source.y, __ffs(left) - 1);
        const char* row = reinterpret_cast<const char*>(input) + u64(slot / SLOTS) * ROW_BYTES;
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
    if (t.b == rank) {
        for (; padding; padding &= padding - 1) {
            u32 r = warp + (__ffs(padding) - 1) * WARPS;
            uint4* at = reinterpret_cast<uint4*>(slots + u64(r) * HIDDEN_SIZE);
            for (u32 i = lane; i < ROW_BYTES / 16; i += 32) at[i] = make_uint4(0, 0, 0, 0);
        }
    }
    ptx::proxy_fence();
}

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
    for (u32 late = 0; late < 100000 && !ptx::load_acquire_sys(&p.stall->given_up); __nanosleep(1000)) late += ptx::load_acquire_sys(p.abort) != 0;
}

// Begin and end of a task, by one thread; nothing where TRACE is 0.
struct Tracer {
    u64 begin;
    __device__ __forceinline__ Tracer() : begin(TRACE ? ptx::nanoseconds() : 0) {}
    __device__ __forceinline__ void end(const PassParams& p, u32 kind, u32 weight, u32 a, u32 b) const {
        if (!TRACE) return;
        u32 at = atomicAdd(p.stamped, 1), sm;
        if (at >= p.stamps_most) return;
        asm("mov.u32 %0, %%smid;" : "=r"(sm));
        p.stamps[at] = {begin, ptx::nanoseconds(), kind, weight, a, b, sm, blockIdx.x};
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

// h = (u + offset) g sigmoid(alpha g), unrounded.
__device__ __forceinline__ float activate(float g, float u) {
    g = clamp_high(g, LIMIT);
    u = clamp_low(clamp_high(u, LIMIT), LIMIT);
    float sigmoid = __fdividef(1.0f, 1.0f + __expf(-ALPHA * g));
    return __fmul_rn(__fadd_rn(u, UP_OFFSET), __fmul_rn(g, sigmoid));
}
// The same with dh/dg and dh/du, zero where clamped.
__device__ __forceinline__ Activated activate_backward(float g, float u) {
    float gc = clamp_high(g, LIMIT), uc = clamp_low(clamp_high(u, LIMIT), LIMIT);
    float s = __fdividef(1.0f, 1.0f + __expf(-ALPHA * gc));
    float glu = __fmul_rn(gc, s), up = __fadd_rn(uc, UP_OFFSET);
    float slope = __fmul_rn(s, __fadd_rn(1.0f, __fmul_rn(__fmul_rn(ALPHA, gc), __fsub_rn(1.0f, s))));
    Activated a{__fmul_rn(up, glu), __fmul_rn(up, slope), glu};
    if (LIMIT_ON && g > LIMIT) a.dg = 0;
    if (LIMIT_ON && (u > LIMIT || u < -LIMIT)) a.du = 0;
    return a;
}

// g and u of a GateUp tile, and h in a forward. The accumulator's first 128 columns are g, the others u.
template <bool FORWARD>
__device__ __forceinline__ void store_gate_up(const PassParams& p, char* buffer, const float (&acc)[128], const Work& w, u32 row0) {
    u32 lane = threadIdx.x % 32, width = w.expert >= LOCAL ? SHARED_SIZE : INNER_SIZE;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 col0 = w.task.b * 128 + half * 64;
        if (col0 >= width) break;
        u32 columns = min(64u, width - col0);
        Piece g, u, h;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                const float* vg = acc + 32 * half + 4 * j + 2 * r;
                const float* vu = vg + 64;
                float g0 = vg[0], g1 = vg[1], u0 = vu[0], u1 = vu[1];
                if (BIASES && w.expert < LOCAL) {
                    u32 c = w.expert * INNER_SIZE + col0 + 8 * j + 2 * (lane % 4);
                    float2 bg = __ldg(reinterpret_cast<const float2*>(p.bias_gate + c));
                    float2 bu = __ldg(reinterpret_cast<const float2*>(p.bias_up + c));
                    g0 = __fadd_rn(g0, bg.x), g1 = __fadd_rn(g1, bg.y);
                    u0 = __fadd_rn(u0, bu.x), u1 = __fadd_rn(u1, bu.y);
                }
                g[j][r] = pack(keep_gate(g0), keep_gate(g1));
                u[j][r] = pack(keep_up(u0), keep_up(u1));
                // From the stored values, so that the backward sees the same.
                if (FORWARD) h[j][r] = pack(activate(low(g[j][r]), low(u[j][r])), activate(high(g[j][r]), high(u[j][r])));
            }
        }
        auto rows = [&](bf16* base, u32 first) {
            bf16* at = base + u64(first + row0) * WIDTH + col0;
            return [=](u32 r) { return at + u64(r) * WIDTH; };
        };
        store_piece(buffer, g, columns, rows(p.kept_g, w.kept));
        store_piece(buffer, u, columns, rows(p.kept_u, w.kept));
        if (FORWARD) store_piece(buffer, h, columns, rows(p.ring_h, w.ring));
    }
}

// y_k or dx_k, rounded, to the slots of the ranks that hold the tokens.
template <bool BIASED>
__device__ __forceinline__ void push(const PassParams& p, char* buffer, const float (&acc)[128], const Work& w, u32 row0) {
    u32 lane = threadIdx.x % 32;
    const uint2* sources = p.sources + w.task.a * 128 + row0;
#pragma unroll
    for (u32 quarter = 0; quarter < 4; quarter++) {
        u32 col0 = w.task.b * 256 + quarter * 64;
        if (col0 >= HIDDEN_SIZE) break;
        Piece v;
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
#pragma unroll
            for (u32 r = 0; r < 2; r++) {
                float v0 = acc[32 * quarter + 4 * j + 2 * r], v1 = acc[32 * quarter + 4 * j + 2 * r + 1];
                if (BIASED && BIASES && w.expert < LOCAL) {
                    u32 c = w.expert * HIDDEN_SIZE + col0 + 8 * j + 2 * (lane % 4);
                    float2 bias = __ldg(reinterpret_cast<const float2*>(p.bias_down + c));
                    v0 = __fadd_rn(v0, bias.x), v1 = __fadd_rn(v1, bias.y);
                }
                v[j][r] = pack(v0, v1);
            }
        }
        store_piece(buffer, v, 64, [&](u32 r) -> bf16* {
            uint2 to = sources[r];
            return to.x == ~0u ? nullptr : p.combine[to.x] + u64(to.y) * HIDDEN_SIZE + col0;
        });
    }
}

// One persistent kernel: the first CTAs pull rows, all run GEMM tiles, all reduce at the end.
//   Ops::pull(task): where a row comes from and goes to      Ops::produce(work): one tile's loads
//   Ops::consume(work): its product and epilogue             Ops::reduce(chunk)
template <typename Ops> __device__ __forceinline__ void run_pass(const PassParams& p) {
    extern __shared__ __align__(1024) char smem[];
    char* stages = smem;
    char* store = smem + gemm::STAGES * gemm::STAGE_BYTES;
    Shared& s = *reinterpret_cast<Shared*>(store + STORE_BYTES);
    const program::Program& q = *p.program;
    u32 rank = q.rank, group = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        gemm::init(s.stages);
        s.steps[0] = s.steps[1] = program::Step();
        for (u32 i = 0; i < 2; i++) {
            ptx::barrier_init(&s.work_full[i], 1);
            ptx::barrier_init(&s.work_empty[i], 1);
            ptx::barrier_init(&s.work_done[i], 256);
        }
        for (u32 i = 0; i < 48; i++) ptx::barrier_init(&s.row_full[i], 1);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    u64 comm_end = program::before(q, program::COMM, q.minibatches);

    // Draws the next communication ticket, waits for it, and tells all threads; false at the end.
    auto next_comm = [&](u32 counter, u64 first, u64 end) {
        __syncthreads();
        if (threadIdx.x == 0) {
            u64 ticket = first + atomicAdd(p.tickets + counter, 1);
            s.more = ticket < end;
            if (s.more) {
                program::decode(q, program::COMM, ticket, s.steps[program::COMM], s.comm);
                s.more = wait_all(p, q, s.comm);
            }
        }
        __syncthreads();
        return s.more;
    };

    if (blockIdx.x < p.comm_ctas) {
        u32 uses = 0;
        while (next_comm(0, 0, comm_end)) {
            Ops::pull(p, q, s, stages, s.comm, rank, uses);
            __syncthreads();
            if (threadIdx.x == 0) arrive(p, q, s.comm);
        }
        __syncthreads();
    }

    // Warpgroup 0 serves: warp 0 draws tickets, decodes them and waits; warp 1 loads tiles; warp 2 arrives when a tile is
    // stored. Warpgroups 1 and 2 compute, and never wait for memory but in the products themselves.
    if (group == 0) {
        ptx::registers_shrink<56>();
        if (threadIdx.x == 0) {
            u64 end = program::tickets(q, program::COMPUTE);
            for (u32 n = 0;; n++) {
                Work& w = s.work[n % 2];
                ptx::barrier_wait(&s.work_empty[n % 2], (n / 2 & 1) ^ 1);
                u64 ticket = atomicAdd(p.tickets + 1, 1);
                w.more = ticket < end;
                if (w.more) {
                    program::decode(q, program::COMPUTE, ticket, s.steps[program::COMPUTE], w.task);
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
                ptx::barrier_arrive(&s.work_full[n % 2]);
                if (!more) break;
            }
        } else if (threadIdx.x == 32) {
            gemm::Cursor at;
            for (u32 n = 0;; n++) {
                ptx::barrier_wait(&s.work_full[n % 2], n / 2 & 1);
                const Work& w = s.work[n % 2];
                if (!w.more) break;
                ptx::proxy_fence();
                Ops::produce(p, s, stages, at, w);
            }
        } else if (threadIdx.x == 64) {
            for (u32 n = 0;; n++) {
                ptx::barrier_wait(&s.work_full[n % 2], n / 2 & 1);
                if (!s.work[n % 2].more) break;
                ptx::barrier_wait(&s.work_done[n % 2], n / 2 & 1);
                ptx::proxy_fence();
                arrive(p, q, s.work[n % 2].task);
                ptx::barrier_arrive(&s.work_empty[n % 2]);
            }
        }
        __syncwarp();
        ptx::registers_grow<168>();
    } else {
        ptx::registers_grow<224>();
        gemm::Cursor at;
        float acc[128];
        char* buffer = store + (threadIdx.x / 32 - 4) * 4096;
        u32 row0 = (group - 1) * 64 + threadIdx.x % 128 / 32 * 16;
        for (u32 n = 0;; n++) {
            ptx::barrier_wait(&s.work_full[n % 2], n / 2 & 1);
            const Work& w = s.work[n % 2];
            if (!w.more) break;
            // Padding rows of a forward are never read; a weight gradient reads those of the backward, up to the next 64.
            if ((group - 1) * 64 < w.rows) Ops::consume(p, s, stages, at, acc, w, group - 1, buffer, row0);
            else gemm::skip(s.stages, at, w.blocks + w.extra);
            ptx::barrier_arrive(&s.work_done[n % 2]);
        }
        ptx::registers_shrink<168>();
    }

    u64 all = program::tickets(q, program::COMM);
    while (next_comm(2, comm_end, all)) Ops::reduce(p, rank, s.comm.a);
}
