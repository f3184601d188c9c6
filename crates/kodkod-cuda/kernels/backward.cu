// The backward of one rank.
//
//   DHidden  dh' [128, 256] = dy W_down; from it dg, du, w h and each row's part of d_w
//   DInput   dx_k [128, 256] = dg W_gate + du W_up, one sum, to the slots of the ranks that hold the tokens
//   WGrad    [128, 256] of dW_down = dy^T (w h), dW_gate = dg^T x, dW_up = du^T x, along the rows of a run
//   GateUp   again, for rows that were not kept
#include "pass.cuh"

namespace {

struct Backward {
    static __device__ __forceinline__ void pull(const PassParams& p, const program::Program& q, Shared& s, char* stages, const program::Task& t, u32 rank, u32& uses) {
        bool grad = t.kind == program::PULL_GRAD;
        bf16* to = grad ? p.ring_dy + u64(program::ring_row(q, t.a)) * HIDDEN_SIZE : p.kept_x + u64(program::kept_row(q, t.a)) * HIDDEN_SIZE;
        ::pull(p, s, stages, t, rank, grad ? p.dy_of[t.b] : p.x_of[t.b], to, uses);
    }

    static __device__ __forceinline__ u32 blocks(const program::Program& q, const Work& w) {
        u32 width = w.expert >= LOCAL ? SHARED_SIZE : INNER_SIZE;
        switch (w.task.kind) {
            case program::GATE_UP:
            case program::D_HIDDEN: return HIDDEN_SIZE / 64;
            case program::D_INPUT: return 2 * width / 64;
            case program::W_GRAD: {
                u32 last = w.task.run.block + w.task.run.blocks - 1;
                return (w.task.run.blocks - 1) * 2 + (program::rows_in(q, last) + 63) / 64;
            }
            default: return 0;
        }
    }

    static __device__ __forceinline__ void produce(const PassParams& p, Shared& s, char* stages, gemm::Cursor& at, const Work& w) {
        u32 shared = w.expert >= LOCAL, expert = shared ? 0 : w.expert, width = shared ? SHARED_SIZE : INNER_SIZE;
        u32 kind = w.task.kind, kept = w.kept, ring = w.ring, blocks = w.blocks, tile = w.task.b;
        u32 m0 = w.task.tile_m * 128, n0 = w.task.tile_n * 256, weight = w.task.weight;
        for (u32 k = 0; k < blocks; k++) {
            gemm::begin_stage(s.stages, at);
            char* a = stages + at.stage * gemm::STAGE_BYTES;
            char* b = a + gemm::A_BYTES;
            u64* full = &s.stages.full[at.stage];
            if (kind == program::GATE_UP) {
                u32 row = expert * width + tile * 128;
                ptx::tile_load(a, &p.x, full, k * 64, kept);
                ptx::tile_load(b, &p.gate[shared], full, k * 64, row);
                ptx::tile_load(b + gemm::B_BYTES / 2, &p.up[shared], full, k * 64, row);
            } else if (kind == program::D_HIDDEN) {
                ptx::tile_load(a, &p.dy, full, k * 64, ring);
                for (u32 c = 0; c < 4; c++) ptx::tile_load(b + c * 8192, &p.down_cols[shared], full, tile * 256 + c * 64, expert * HIDDEN_SIZE + k * 64);
            } else if (kind == program::D_INPUT) {
                bool up = k >= blocks / 2;
                u32 kk = up ? k - blocks / 2 : k;
                ptx::tile_load(a, up ? &p.du : &p.dg, full, kk * 64, ring);
                const TensorMap* map = up ? &p.up_cols[shared] : &p.gate_cols[shared];
                for (u32 c = 0; c < 4; c++) ptx::tile_load(b + c * 8192, map, full, tile * 256 + c * 64, expert * width + kk * 64);
            } else {
                bool down = weight == program::DOWN_WEIGHT;
                const TensorMap* ma = down ? &p.dy_cols : weight == program::GATE ? &p.dg_cols : &p.du_cols;
                const TensorMap* mb = down ? &p.wh_cols : &p.x_cols;
                u32 row_b = (down ? ring : kept) + k * 64;
                for (u32 c = 0; c < 2; c++) ptx::tile_load(a + c * 8192, ma, full, m0 + c * 64, ring + k * 64);
                for (u32 c = 0; c < 4; c++) ptx::tile_load(b + c * 8192, mb, full, n0 + c * 64, row_b);
            }
            at.next();
        }
    }

    static __device__ __forceinline__ float factor(const PassParams& p, uint2 source) {
        if (source.x == ~0u) return 0.0f;
        u32 k = source.y % SLOTS;
        return k < TOP_K ? p.factors[source.x][source.y / SLOTS * TOP_K + k] : 1.0f;
    }

    static __device__ __forceinline__ void store_d_hidden(const PassParams& p, char* buffer, const float (&acc)[128], const Work& w, u32 row0) {
        u32 lane = threadIdx.x % 32, width = w.expert >= LOCAL ? SHARED_SIZE : INNER_SIZE;
        const uint2* sources = p.sources + w.task.a * 128 + row0 + lane / 4;
        float weight[2] = {factor(p, sources[0]), factor(p, sources[8])}, sum[2] = {};
#pragma unroll
        for (u32 quarter = 0; quarter < 4; quarter++) {
            u32 col0 = w.task.b * 256 + quarter * 64;
            if (col0 >= width) break;
            u32 columns = min(64u, width - col0);
            auto rows = [&](bf16* base, u32 first) {
                bf16* at = base + u64(first + row0) * WIDTH + col0;
                return [=](u32 r) { return at + u64(r) * WIDTH; };
            };
            Piece g, u, wh;
            load_piece(buffer, g, columns, rows(p.kept_g, w.kept));
            load_piece(buffer + 2048, u, columns, rows(p.kept_u, w.kept));
#pragma unroll
            for (u32 j = 0; j < 8; j++) {
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    float d0 = acc[32 * quarter + 4 * j + 2 * r], d1 = acc[32 * quarter + 4 * j + 2 * r + 1];
                    Activated a = activate_backward(low(g[j][r]), low(u[j][r]));
                    Activated b = activate_backward(high(g[j][r]), high(u[j][r]));
                    u32 h = pack(a.h, b.h);
                    sum[r] = __fadd_rn(sum[r], __fmul_rn(d0, low(h)));
                    sum[r] = __fadd_rn(sum[r], __fmul_rn(d1, high(h)));
                    float s0 = __fmul_rn(weight[r], d0), s1 = __fmul_rn(weight[r], d1);
                    g[j][r] = pack(__fmul_rn(s0, a.dg), __fmul_rn(s1, b.dg));
                    u[j][r] = pack(__fmul_rn(s0, a.du), __fmul_rn(s1, b.du));
                    wh[j][r] = pack(__fmul_rn(weight[r], low(h)), __fmul_rn(weight[r], high(h)));
                }
            }
            store_piece(buffer, g, columns, rows(p.ring_dg, w.ring));
            store_piece(buffer + 2048, u, columns, rows(p.ring_du, w.ring));
            store_piece(buffer, wh, columns, rows(p.ring_h, w.ring));
        }
#pragma unroll
        for (u32 r = 0; r < 2; r++) {
            // Four lanes hold a row: added pairwise, the same way always.
            sum[r] = __fadd_rn(sum[r], __shfl_xor_sync(~0u, sum[r], 1));
            sum[r] = __fadd_rn(sum[r], __shfl_xor_sync(~0u, sum[r], 2));
            if (lane % 4 == 0) p.d_w_parts[u64(w.ring + row0 + lane / 4 + 8 * r) * D_HIDDEN_TILES + w.task.b] = sum[r];
        }
    }

    static __device__ __forceinline__ void push_d_w(const PassParams& p, const Work& w, u32 row0) {
        u32 lane = threadIdx.x % 32, width = w.expert >= LOCAL ? SHARED_SIZE : INNER_SIZE;
        if (lane >= 16) return;
        uint2 to = p.sources[w.task.a * 128 + row0 + lane];
        if (to.x == ~0u) return;
        u32 row = w.ring + row0 + lane;
        float sum = 0;
        for (u32 t = 0; t < (width + 255) / 256; t++) sum = __fadd_rn(sum, __ldcg(p.d_w_parts + u64(row) * D_HIDDEN_TILES + t));
        if (BIASES && w.expert < LOCAL) {
            // In the order of columns, one row a lane.
            float dot = 0;
            for (u32 c = 0; c < HIDDEN_SIZE; c++) dot = __fadd_rn(dot, __fmul_rn(to_f32(p.ring_dy[u64(row) * HIDDEN_SIZE + c]), p.bias_down[w.expert * HIDDEN_SIZE + c]));
            sum = __fadd_rn(sum, dot);
        }
        p.d_w[to.x][to.y] = sum;
    }

    static __device__ __forceinline__ float* gradient(const PassParams& p, const Work& w, u32& m, u32& n) {
        u32 shared = w.expert >= LOCAL, width = shared ? SHARED_SIZE : INNER_SIZE;
        bool down = w.task.weight == program::DOWN_WEIGHT;
        m = down ? HIDDEN_SIZE : width;
        n = down ? width : HIDDEN_SIZE;
        float* base = down ? p.d_down[shared] : w.task.weight == program::GATE ? p.d_gate[shared] : p.d_up[shared];
        return base + (shared ? 0 : u64(w.expert) * INNER_SIZE * HIDDEN_SIZE);
    }

    static __device__ __forceinline__ void consume(const PassParams& p, Shared& s, const char* stages, gemm::Cursor& at, float (&acc)[128], const Work& w, u32 group, char* buffer, u32 row0) {
        if (w.task.kind == program::D_HIDDEN) {
            gemm::consume<0, 1>(acc, s.stages, at, stages, group, w.blocks, true);
            store_d_hidden(p, buffer, acc, w, row0);
        } else if (w.task.kind == program::D_INPUT) {
            gemm::consume<0, 1>(acc, s.stages, at, stages, group, w.blocks, true);
            push<false>(p, buffer, acc, w, row0);
            if (w.task.b == 0) push_d_w(p, w, row0);
        } else if (w.task.kind == program::GATE_UP) {
            gemm::consume<0, 0>(acc, s.stages, at, stages, group, w.blocks, true);
            store_gate_up<false>(p, buffer, acc, w, row0);
        } else if (w.task.kind == program::W_GRAD) {
            u32 m, n, lane = threadIdx.x % 32;
            float* base = gradient(p, w, m, n);
            u32 r0 = w.task.tile_m * 128 + row0 + lane / 4, c0 = w.task.tile_n * 256 + 2 * (lane % 4);
            bool goes_on = p.accumulate || !w.task.first;
            float* d = base + u64(r0) * n + c0;
            {
#pragma unroll
                for (u32 j = 0; j < 32; j++) {
#pragma unroll
                    for (u32 r = 0; r < 2; r++) {
                        float2 v = make_float2(0, 0);
                        if (goes_on && r0 + 8 * r < m && c0 + 8 * j < n) v = __ldcg(reinterpret_cast<const float2*>(d + u64(8 * r) * n + 8 * j));
                        acc[4 * j + 2 * r] = v.x;
                        acc[4 * j + 2 * r + 1] = v.y;
                    }
                }
            }
            gemm::consume<1, 1>(acc, s.stages, at, stages, group, w.blocks, false);
#pragma unroll
            for (u32 j = 0; j < 32; j++) {
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    if (r0 + 8 * r < m && c0 + 8 * j < n) __stcs(reinterpret_cast<float2*>(d + u64(8 * r) * n + 8 * j), make_float2(acc[4 * j + 2 * r], acc[4 * j + 2 * r + 1]));
                }
            }
        } else if (w.task.kind == program::ZERO_GRAD && !p.accumulate) {
            u32 shared = w.task.a >= LOCAL;
            u64 len = u64(shared ? SHARED_SIZE : INNER_SIZE) * HIDDEN_SIZE, first = shared ? 0 : w.task.a * len;
            for (u64 i = threadIdx.x - 128; i < len / 4; i += 256) {
                float4 zero = make_float4(0, 0, 0, 0);
                reinterpret_cast<float4*>(p.d_gate[shared] + first)[i] = zero;
                reinterpret_cast<float4*>(p.d_up[shared] + first)[i] = zero;
                reinterpret_cast<float4*>(p.d_down[shared] + first)[i] = zero;
            }
        }
    }

    static __device__ __forceinline__ void reduce(const PassParams& p, u32 rank, u32 chunk) {
        u32 first = chunk * program::REDUCE_TOKENS, end = min(first + program::REDUCE_TOKENS, p.tokens);
        constexpr u32 VECTORS = HIDDEN_SIZE / 8;
        for (u32 i = threadIdx.x; i < (end - first) * VECTORS; i += THREADS) {
            u32 t = first + i / VECTORS, v = i % VECTORS;
            const uint4* slots = reinterpret_cast<const uint4*>(p.combine[rank]) + u64(t) * SLOTS * VECTORS + v;
            float sum[8] = {};
#pragma unroll
            for (u32 k = 0; k < TOP_K; k++) {
                if (p.ids[t * TOP_K + k] < 0) continue;
                uint4 d = __ldcg(slots + k * VECTORS);
                u32 pairs[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
                for (u32 c = 0; c < 4; c++) {
                    sum[2 * c] = __fadd_rn(sum[2 * c], low(pairs[c]));
                    sum[2 * c + 1] = __fadd_rn(sum[2 * c + 1], high(pairs[c]));
                }
            }
            reinterpret_cast<uint4*>(p.out)[u64(t) * VECTORS + v] =
                make_uint4(pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
        }
        for (u32 i = first * TOP_K + threadIdx.x; i < end * TOP_K; i += THREADS) {
            bool routed = p.ids[i] >= 0;
            p.d_topk_weights[i] = routed ? __ldcg(p.d_w[rank] + i / TOP_K * SLOTS + i % TOP_K) : 0.0f;
        }
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_backward(const __grid_constant__ PassParams p) { run_pass<Backward>(p); }
