// The backward of one rank.
//
//   DHidden  dh' [128, 256] = dy W_down; from it dg, du, w h and each row's part of d_w
//   DInput   dx_k [128, 256] = dg W_gate + du W_up, one sum, to the slots of the ranks that hold the tokens
//   WGrad    [128, 256] of dW_down = dy^T (w h), dW_gate = dg^T x, dW_up = du^T x, along the rows of a run; with it the
//            biases' gradients, and that of the output gate: sum over rows of dlogit x
//            A sum that is not complete with the run is carried on in f32: in the gradients themselves, or, where those are
//            bf16, beside them
//   GateUp   again, for rows that were not kept
//   Reduce   dx = dx_shared + sum over k in order of dx_k + dlogit w_output_gate
//
// dlogit = (dy . y_shared) s (1 - s), s = sigmoid(x . w_output_gate)
#include "pass.cuh"

namespace {

#if BF16_GRADIENTS
using Gradient = bf16;
#else
using Gradient = float;
#endif
constexpr u32 GRADIENT_COLUMNS = 128 / sizeof(Gradient);

struct Backward {
    static __device__ __forceinline__ void pull(const PassParams& p, const program::Program& q, Shared& s, char* stages, const program::Task& t, u32& uses) {
        Tracer tracer;
        if (t.kind == program::PULL_GRAD) ::pull<true>(p, q, s, stages, t, uses);
        else ::pull<false>(p, q, s, stages, t, uses);
        if (threadIdx.x == 0) tracer.end(p, t.kind, 0, t.a, t.b);
    }

    static __device__ __forceinline__ u32 blocks(const program::Program& q, const Work& w) {
        u32 width = w.expert >= LOCAL ? SHARED_SIZE : INNER_SIZE;
        switch (w.task.kind) {
            case program::GATE_UP:
            case program::D_HIDDEN: return HIDDEN_SIZE / 64;
            case program::D_INPUT: return 2 * width / 64;
            case program::W_GRAD: {
                if (w.task.weight == program::OUTPUT_GATE) return 0;
                u32 last = w.task.run.block + w.task.run.blocks - 1;
                return (w.task.run.blocks - 1) * 2 + (program::rows_in(q, last) + 63) / 64;
            }
            default: return 0;
        }
    }

    // All of the first minibatch: DHidden uses rows up faster than a few CTAs pull them.
    static __device__ __forceinline__ u64 first_pulls(const program::Program& q) { return program::before(q, program::COMM, min(q.minibatches, 1u)); }

    // DHidden's g and u come through stages of their own, 64 columns of both in each.
    static constexpr u32 EXTRA_BYTES = 128 * 128;
    static __device__ __forceinline__ u32 extra(const Work& w) {
        if (w.task.kind != program::D_HIDDEN) return 0;
        u32 width = w.expert >= LOCAL ? SHARED_SIZE : INNER_SIZE;
        return min(4u, (width - w.task.b * 256 + 63) / 64);
    }

    static __device__ __forceinline__ void produce(const PassParams& p, Shared& s, char* stages, gemm::Cursor& at, const Work& w) {
        u32 shared = w.expert >= LOCAL, expert = shared ? 0 : w.expert, width = shared ? SHARED_SIZE : INNER_SIZE;
        u32 kind = w.task.kind, kept = w.kept, ring = w.ring, blocks = w.blocks, extra = w.extra, tile = w.task.b;
        u32 m0 = w.task.tile_m * 128, n0 = w.task.tile_n * 256, weight = w.task.weight;
        for (u32 k = 0; k < blocks; k++) {
            gemm::begin_stage(s.stages, at);
            char* a = stages + at.stage * gemm::STAGE_BYTES;
            char* b = a + gemm::A_BYTES;
            u64* full = &s.stages.full[at.stage];
            if (kind == program::GATE_UP) {
                u32 row = expert * GATE_ROWS + tile * 128;
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
                for (u32 c = 0; c < 4; c++) ptx::tile_load(b + c * 8192, map, full, tile * 256 + c * 64, expert * GATE_ROWS + kk * 64);
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
        for (u32 quarter = 0; quarter < extra; quarter++) {
            gemm::begin_stage(s.stages, at, 2 * EXTRA_BYTES);
            char* g = stages + at.stage * gemm::STAGE_BYTES;
            ptx::tile_load(g, &p.g, &s.stages.full[at.stage], tile * 256 + quarter * 64, kept);
            ptx::tile_load(g + EXTRA_BYTES, &p.u, &s.stages.full[at.stage], tile * 256 + quarter * 64, kept);
            at.next();
        }
    }

    static __device__ __forceinline__ float factor(const PassParams& p, uint2 source) {
        if (source.x == ~0u) return 0.0f;
        u32 k = source.y % SLOTS, token = source.y / SLOTS;
        if (k < TOP_K) return __ldg(p.factors[source.x] + token * TOP_K + k);
        return HAS_OUTPUT_GATE ? __ldg(p.output_gates[source.x] + token) : 1.0f;
    }

    // The gradient of the output gate's logit, from that of the gate.
    static __device__ __forceinline__ float gate_slope(float d_gate, float gate) {
        return __fmul_rn(d_gate, __fmul_rn(gate, __fsub_rn(1.0f, gate)));
    }

    // dh' . h of a row: the sums over tiles, in order.
    static __device__ __forceinline__ float hidden_dot(const PassParams& p, u32 row, u32 width) {
        float sum = 0;
        for (u32 t = 0; t < (width + 255) / 256; t++) sum = __fadd_rn(sum, __ldcg(p.d_w_parts + u64(row) * D_HIDDEN_TILES + t));
        return sum;
    }

    // From dh': dg, du over g, u where those were loaded, w h beside them, each row's part of d_w.
    static __device__ __forceinline__ void store_d_hidden(const PassParams& p, gemm::Stages& s, const char* stages, gemm::Cursor& at, const float (&acc)[128], const Work& w, const float (&weight)[2], u32 row0) {
        u32 lane = threadIdx.x % 32, width = w.expert >= LOCAL ? SHARED_SIZE : INNER_SIZE;
        float sum[2] = {};
#pragma unroll
        for (u32 quarter = 0; quarter < 4; quarter++) {
            u32 col0 = w.task.b * 256 + quarter * 64;
            if (col0 >= width) break;
            ptx::barrier_wait(&s.full[at.stage], at.phase);
            __syncwarp();
            const char* pieces = stages + at.stage * gemm::STAGE_BYTES + row0 * 128;
            u32 g_matrix = matrix_at(pieces, 0);
#pragma unroll
            for (u32 j = 0; j < 8; j += 2) {
                Pairs g, u, wh;
                // Of the swizzle, column group j is bits of its own.
                u32 g_at = g_matrix ^ (j * 16), u_at = g_at + EXTRA_BYTES;
                read_matrix(g_at, g);
                read_matrix(u_at, u);
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
#pragma unroll
                    for (u32 r = 0; r < 2; r++) {
                        const float* d = acc + 32 * quarter + 4 * (j + i) + 2 * r;
                        Activated a = activate_backward(low(g[i][r]), low(u[i][r]));
                        Activated b = activate_backward(high(g[i][r]), high(u[i][r]));
                        u32 h = pack(a.h, b.h);
                        sum[r] = __fmaf_rn(d[0], low(h), sum[r]);
                        sum[r] = __fmaf_rn(d[1], high(h), sum[r]);
                        float s0 = __fmul_rn(weight[r], d[0]), s1 = __fmul_rn(weight[r], d[1]);
                        g[i][r] = pack(__fmul_rn(s0, a.dg), __fmul_rn(s1, b.dg));
                        u[i][r] = pack(__fmul_rn(s0, a.du), __fmul_rn(s1, b.du));
                        wh[i][r] = pack(__fmul_rn(weight[r], low(h)), __fmul_rn(weight[r], high(h)));
                    }
                }
                write_matrix(g_at, g);
                write_matrix(u_at, u);
                write_matrix(u_at + EXTRA_BYTES, wh);
            }
            store_piece(pieces, matrix_rows(p.ring_dg, w.ring + row0, col0, WIDTH));
            store_piece(pieces + EXTRA_BYTES, matrix_rows(p.ring_du, w.ring + row0, col0, WIDTH));
            store_piece(pieces + 2 * EXTRA_BYTES, matrix_rows(p.ring_h, w.ring + row0, col0, WIDTH));
            // Before the copy engine writes here again.
            ptx::proxy_fence();
            __syncwarp();
            if (lane == 0) ptx::barrier_arrive(&s.empty[at.stage]);
            at.next();
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
        uint2 to = lane < 16 ? p.sources[w.task.a * 128 + row0 + lane] : make_uint2(~0u, 0);
        u32 row = w.ring + row0, rows = __popc(__ballot_sync(~0u, to.x != ~0u));
        float sum = lane < rows ? hidden_dot(p, row + lane, width) : 0;
        if (BIASES && w.expert < LOCAL) {
            for (u32 r = 0; r < rows; r++) {
                float dot = dot_row(p.ring_dy + u64(row + r) * HIDDEN_SIZE, p.bias_down + w.expert * HIDDEN_SIZE);
                if (lane == r) sum = __fadd_rn(sum, dot);
            }
        }
        if (lane < rows) p.d_w[to.x][to.y] = sum;
    }

    // The gradient of this tile's 64 biases of one warpgroup: the columns of dy (times w), dg or du summed along the run's
    // rows. Of each block of 128 rows a warp sums 32 in order; the four sums are added pairwise, then to the total.
    // `buffers` are the warpgroup's own.
    static __device__ __forceinline__ void bias_gradient(const PassParams& p, const Work& w, u32 group, char* buffers, bool goes_on) {
        u32 lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, column = w.task.tile_m * 128 + group * 64 + 2 * lane;
        bool down = w.task.weight == program::DOWN_WEIGHT;
        if (w.task.tile_m * 128 + group * 64 >= (down ? HIDDEN_SIZE : INNER_SIZE)) return;
        const bf16* rows = down ? p.ring_dy : w.task.weight == program::GATE ? p.ring_dg : p.ring_du;
        u32 stride = down ? HIDDEN_SIZE : WIDTH;
        float* base = down ? p.d_bias_down : w.task.weight == program::GATE ? p.d_bias_gate : p.d_bias_up;
        float2* to = reinterpret_cast<float2*>(base + w.expert * (down ? HIDDEN_SIZE : INNER_SIZE) + column);
        float2* parts = reinterpret_cast<float2*>(buffers);  // [4 warps, 32 pairs of columns]
        float2 total = goes_on ? __ldcg(to) : make_float2(0, 0);
        // All warps are done with what they left here.
        ptx::group_sync(2 + group, 128);
        for (u32 block = 0; block < w.task.run.blocks; block++) {
            uint2 source = p.sources[(w.task.run.block + block) * 128 + warp * 32 + lane];
            float mine = down ? factor(p, source) : 1.0f;
            u32 n = __popc(__ballot_sync(~0u, source.x != ~0u));
            const bf16* at = rows + u64(w.ring + block * 128 + warp * 32) * stride + column;
            float2 sum = make_float2(0, 0);
#pragma unroll 8
            for (u32 r = 0; r < n; r++) {
                u32 pair = __ldcg(reinterpret_cast<const u32*>(at + u64(r) * stride));
                float scale = __shfl_sync(~0u, mine, r);
                sum.x = __fadd_rn(sum.x, __fmul_rn(scale, low(pair)));
                sum.y = __fadd_rn(sum.y, __fmul_rn(scale, high(pair)));
            }
            parts[warp * 32 + lane] = sum;
            ptx::group_sync(2 + group, 128);
            if (warp == 0) {
                float2 b = parts[32 + lane], c = parts[64 + lane], d = parts[96 + lane];
                total.x = __fadd_rn(total.x, __fadd_rn(__fadd_rn(sum.x, b.x), __fadd_rn(c.x, d.x)));
                total.y = __fadd_rn(total.y, __fadd_rn(__fadd_rn(sum.y, b.y), __fadd_rn(c.y, d.y)));
            }
            ptx::group_sync(2 + group, 128);
        }
        if (warp == 0) __stcg(to, total);
    }

    // The output gate's gradient: along the run's rows in order, each thread eight columns at a time.
    static __device__ __forceinline__ void output_gate_gradient(const PassParams& p, const Work& w, u32 group, char* buffers, bool goes_on) {
        float* slopes = reinterpret_cast<float*>(buffers);  // [128 rows], each warpgroup its own
        for (u32 block = 0; block < w.task.run.blocks; block++) {
            u32 row = threadIdx.x % 128;
            uint2 source = p.sources[(w.task.run.block + block) * 128 + row];
            bool real = source.x != ~0u;
            u32 rows = block + 1 < w.task.run.blocks ? 128 : program::rows_in(*p.program, w.task.run.block + block);
            // The other warps' uses of these buffers are done.
            ptx::group_sync(2 + group, 128);
            slopes[row] = real ? gate_slope(hidden_dot(p, w.ring + block * 128 + row, SHARED_SIZE), factor(p, source)) : 0.0f;
            ptx::group_sync(2 + group, 128);
            for (u32 v = threadIdx.x - 128; v < HIDDEN_SIZE / 8; v += 256) {
                float4* to = reinterpret_cast<float4*>(p.d_output_gate) + 2 * v;
                float4 a = make_float4(0, 0, 0, 0), b = a;
                if (goes_on || block > 0) a = __ldcg(to), b = __ldcg(to + 1);
                const uint4* x = reinterpret_cast<const uint4*>(p.kept_x + u64(w.kept + block * 128) * HIDDEN_SIZE) + v;
#pragma unroll 4
                for (u32 r = 0; r < rows; r++) {
                    uint4 d = __ldcg(x + r * (HIDDEN_SIZE / 8));
                    float s = slopes[r];
                    a.x = __fadd_rn(a.x, __fmul_rn(s, low(d.x))), a.y = __fadd_rn(a.y, __fmul_rn(s, high(d.x)));
                    a.z = __fadd_rn(a.z, __fmul_rn(s, low(d.y))), a.w = __fadd_rn(a.w, __fmul_rn(s, high(d.y)));
                    b.x = __fadd_rn(b.x, __fmul_rn(s, low(d.z))), b.y = __fadd_rn(b.y, __fmul_rn(s, high(d.z)));
                    b.z = __fadd_rn(b.z, __fmul_rn(s, low(d.w))), b.w = __fadd_rn(b.w, __fmul_rn(s, high(d.w)));
                }
                __stcg(to, a), __stcg(to + 1, b);
            }
        }
        ptx::group_sync(2 + group, 128);
    }

    template <typename T> static __device__ __forceinline__ void zero(T* at, u64 n) {
        constexpr u32 PER = 16 / sizeof(T);
        for (u64 i = threadIdx.x - 128; i < n / PER; i += 256) reinterpret_cast<uint4*>(at)[i] = make_uint4(0, 0, 0, 0);
    }

    // A weight's place among three of the same size: gate, up, down.
    template <typename T> static __device__ __forceinline__ T* of_weight(u32 weight, T* gate, T* up, T* down) {
        return weight == program::DOWN_WEIGHT ? down : weight == program::GATE ? gate : up;
    }

    // Values from one routed expert's weight to the next one's.
    static __device__ __forceinline__ u64 first_of(u32 weight) { return u64(weight == program::DOWN_WEIGHT ? INNER_SIZE : GATE_ROWS) * HIDDEN_SIZE; }

    // A lane's pairs of values of an accumulator, and their places in a matrix of `pitch` columns, `columns` of them inside.
    struct Fragment {
        u64 first;
        u32 pitch, columns;
        template <typename F> __device__ __forceinline__ void each(float (&acc)[128], const F& f) const {
#pragma unroll
            for (u32 j = 0; j < 32; j++) {
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    f(acc[4 * j + 2 * r], acc[4 * j + 2 * r + 1], first + u64(8 * r) * pitch + 8 * j, 8 * j < columns);
                }
            }
        }
    };

    // A tile of a weight's gradient: the matrix's size, and the tile's place.
    struct GradientTile {
        u32 weight, shared, rows, columns, row0, column0, expert;
        __device__ __forceinline__ explicit GradientTile(const Work& w) {
            weight = w.task.weight;
            shared = w.expert >= LOCAL;
            u32 width = shared ? SHARED_SIZE : INNER_SIZE;
            rows = weight == program::DOWN_WEIGHT ? HIDDEN_SIZE : width;
            columns = weight == program::DOWN_WEIGHT ? width : HIDDEN_SIZE;
            row0 = w.task.tile_m * 128;
            column0 = w.task.tile_n * 256;
            expert = shared ? 0 : w.expert;
        }
    };

    static __device__ __forceinline__ void weight_gradient(const PassParams& p, gemm::Stages& s, const char* stages, gemm::Cursor& at, float (&acc)[128], const Work& w, u32 group, char* pieces, u32 row0, Tracer& tracer) {
        GradientTile t(w);
        u32 lane = threadIdx.x % 32, r0 = t.row0 + row0, minibatch = w.task.run.minibatch;
        u64 size = u64(t.rows) * t.columns;
        Fragment mine{u64(r0 + lane / 4) * t.columns + t.column0 + 2 * (lane % 4), t.columns, r0 < t.rows ? t.columns - t.column0 : 0};
        auto* gradient = static_cast<Gradient*>(of_weight(t.weight, p.d_gate[t.shared], p.d_up[t.shared], p.d_down[t.shared])) + t.expert * first_of(t.weight);
        // Where a sum that goes on from one minibatch to the next is kept: `minibatch` is the earlier.
        auto carry = [&](u32 minibatch) -> float* {
            if (!BF16_GRADIENTS) return reinterpret_cast<float*>(gradient);
            float* slot = p.carry[t.shared] + (t.shared ? 0 : minibatch % 2 * 3 * size);
            return of_weight(t.weight, slot, slot + size, slot + 2 * size);
        };
        const float* from = !w.task.first ? carry(minibatch - 1) : p.accumulate && !BF16_GRADIENTS ? carry(0) : nullptr;
        bool widened = BF16_GRADIENTS && w.task.first && p.accumulate;
        mine.each(acc, [&](float& a, float& b, u64 place, bool inside) {
            float2 v = make_float2(0, 0);
            if (inside && from) v = __ldcg(reinterpret_cast<const float2*>(from + place));
            if (inside && widened) {
                u32 pair = __ldcg(reinterpret_cast<const u32*>(reinterpret_cast<const bf16*>(gradient) + place));
                v = make_float2(low(pair), high(pair));
            }
            a = v.x, b = v.y;
        });
        tracer.load(s, at);
        gemm::consume<1, 1>(acc, s, at, stages, group, w.blocks, false);
        tracer.multiplied();
        if (BF16_GRADIENTS && !w.task.last) {
            float* to = carry(minibatch);
            mine.each(acc, [&](float& a, float& b, u64 place, bool inside) {
                if (inside) __stcg(reinterpret_cast<float2*>(to + place), make_float2(a, b));
            });
            return;
        }
        __syncwarp();
#pragma unroll
        for (u32 i = 0; i < 256 / GRADIENT_COLUMNS; i++) {
            u32 column = t.column0 + i * GRADIENT_COLUMNS;
            if (r0 >= t.rows || column >= t.columns) break;
            char* piece = pieces + i % 2 * PIECE_BYTES;
#if BF16_GRADIENTS
#pragma unroll
            for (u32 j = 0; j < 8; j += 2) {
                const float* v = acc + 32 * i + 4 * j;
                write_matrix(matrix_at(piece, j), {{pack(v[0], v[1]), pack(v[2], v[3])}, {pack(v[4], v[5]), pack(v[6], v[7])}});
            }
#else
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
#pragma unroll
                for (u32 r = 0; r < 2; r++) {
                    const float* v = acc + 16 * i + 4 * j + 2 * r;
                    u32 row = lane / 4 + 8 * r, chunk = (2 * j + lane % 4 / 2) ^ (row % 8);
                    *reinterpret_cast<float2*>(piece + row * 128 + chunk * 16 + lane % 2 * 8) = make_float2(v[0], v[1]);
                }
            }
#endif
            store_piece(piece, matrix_rows(gradient, r0, column, t.columns));
        }
    }

    static __device__ __forceinline__ void consume(const PassParams& p, Shared& s, const char* stages, gemm::Cursor& at, float (&acc)[128], const Work& w, u32 group, char* pieces, u32 row0) {
        Tracer tracer;
        maybe_hang(p, w.task);
        u32 kind = w.task.kind;
        char* buffers = pieces - threadIdx.x % 128 / 32 * 2 * PIECE_BYTES;  // the warpgroup's
        bool goes_on = p.accumulate || !w.task.first;
        if (kind == program::D_HIDDEN) {
            const uint2* sources = p.sources + w.task.a * 128 + row0 + threadIdx.x % 32 / 4;
            float weight[2] = {factor(p, __ldg(sources)), factor(p, __ldg(sources + 8))};
            tracer.load(s.stages, at);
            gemm::consume<0, 1>(acc, s.stages, at, stages, group, w.blocks, true);
            tracer.multiplied();
            store_d_hidden(p, s.stages, stages, at, acc, w, weight, row0);
        } else if (kind == program::D_INPUT) {
            uint2 target = push_target(p, w, row0);
            tracer.load(s.stages, at);
            gemm::consume<0, 1>(acc, s.stages, at, stages, group, w.blocks, true);
            tracer.multiplied();
            push<false>(p, pieces, acc, w, target);
            if (w.task.b == 0) push_d_w(p, w, row0);
        } else if (kind == program::GATE_UP) {
            tracer.load(s.stages, at);
            gemm::consume<0, 0>(acc, s.stages, at, stages, group, w.blocks, true);
            tracer.multiplied();
            store_gate_up<false>(p, pieces, acc, w, row0);
        } else if (HAS_OUTPUT_GATE && kind == program::W_GRAD && w.task.weight == program::OUTPUT_GATE) {
            output_gate_gradient(p, w, group, buffers, goes_on);
        } else if (kind == program::W_GRAD) {
            weight_gradient(p, s.stages, stages, at, acc, w, group, pieces, row0, tracer);
            if (BIASES && w.task.tile_n == 0 && w.expert < LOCAL) bias_gradient(p, w, group, buffers, goes_on);
        } else if (kind == program::ZERO_GRAD && !p.accumulate) {
            zero_gradients(p, w.task.a);
        }
        if (TRACE && threadIdx.x == 128 && kind != program::SKIP) {
            bool grad = kind == program::W_GRAD;
            tracer.end(p, kind, w.task.weight, grad ? w.task.run.block : w.task.a, grad ? w.task.tile_m << 16 | w.task.tile_n : w.task.b);
        }
    }

    static __device__ __forceinline__ void zero_gradients(const PassParams& p, u32 expert) {
        u32 shared = expert >= LOCAL;
        u64 len = u64(shared ? SHARED_SIZE : INNER_SIZE) * HIDDEN_SIZE, at = shared ? 0 : expert;
        zero(static_cast<Gradient*>(p.d_gate[shared]) + at * first_of(program::GATE), len);
        zero(static_cast<Gradient*>(p.d_up[shared]) + at * first_of(program::UP), len);
        zero(static_cast<Gradient*>(p.d_down[shared]) + at * first_of(program::DOWN_WEIGHT), len);
        if (BIASES && !shared) {
            zero(p.d_bias_gate + expert * INNER_SIZE, INNER_SIZE);
            zero(p.d_bias_up + expert * INNER_SIZE, INNER_SIZE);
            zero(p.d_bias_down + expert * HIDDEN_SIZE, HIDDEN_SIZE);
        }
        if (HAS_OUTPUT_GATE && shared) zero(p.d_output_gate, HIDDEN_SIZE);
    }

    static __device__ __forceinline__ void reduce(const PassParams& p, u32 rank, u32 chunk) {
        Tracer tracer;
        u32 first = chunk * program::REDUCE_TOKENS, end = min(first + program::REDUCE_TOKENS, p.tokens);
        constexpr u32 VECTORS = HIDDEN_SIZE / 8;
        for (u32 i = threadIdx.x; i < (end - first) * VECTORS; i += THREADS) {
            u32 t = first + i / VECTORS, v = i % VECTORS;
            const uint4* slots = reinterpret_cast<const uint4*>(p.combine[rank]) + u64(t) * SLOTS * VECTORS + v;
            float sum[8] = {};
            auto add = [&](uint4 d) {
                u32 pairs[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
                for (u32 c = 0; c < 4; c++) {
                    sum[2 * c] = __fadd_rn(sum[2 * c], low(pairs[c]));
                    sum[2 * c + 1] = __fadd_rn(sum[2 * c + 1], high(pairs[c]));
                }
            };
            if (SHARED_SIZE > 0) add(__ldcg(slots + TOP_K * VECTORS));
#pragma unroll
            for (u32 k0 = 0; k0 < TOP_K; k0 += 8) {
                // Loads first, those of slots that no route filled too: many under way at once.
                uint4 d[8];
#pragma unroll
                for (u32 k = 0; k < 8 && k0 + k < TOP_K; k++) d[k] = __ldcg(slots + (k0 + k) * VECTORS);
#pragma unroll
                for (u32 k = 0; k < 8 && k0 + k < TOP_K; k++) {
                    if (is_route(p, t * TOP_K + k0 + k)) add(d[k]);
                }
            }
            if (HAS_OUTPUT_GATE) {
                float slope = gate_slope(__ldcg(p.d_w[rank] + t * SLOTS + TOP_K), __ldg(p.output_gates[rank] + t));
                const float4* gate = reinterpret_cast<const float4*>(p.output_gate) + 2 * v;
                float4 a = __ldg(gate), b = __ldg(gate + 1);
                float g[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
                for (u32 c = 0; c < 8; c++) sum[c] = __fadd_rn(sum[c], __fmul_rn(slope, g[c]));
            }
            reinterpret_cast<uint4*>(p.out)[u64(t) * VECTORS + v] =
                make_uint4(pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
        }
        for (u32 i = first * TOP_K + threadIdx.x; i < end * TOP_K; i += THREADS) {
            bool routed = is_route(p, i);
            p.d_topk_weights[i] = routed ? __ldcg(p.d_w[rank] + i / TOP_K * SLOTS + i % TOP_K) : 0.0f;
        }
        if (threadIdx.x == 0) tracer.end(p, program::REDUCE_GRAD, 0, chunk, 0);
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_backward(const __grid_constant__ PassParams p) { run_pass<Backward>(p); }
