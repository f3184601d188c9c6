// The forward of one rank.
//
//   GateUp   g, u [128, 128] = x W_gate^T, x W_up^T, h = act(g, u)   one tile of N = 256: 128 columns of each
//   Down     y_k  [128, 256] = h W_down^T, straight to the combine slots of the ranks that hold the tokens
//   Reduce   y = s y_shared + sum over k in order of w_k y_k, s = sigmoid(x . w_output_gate) or 1
#include "pass.cuh"

namespace {

struct Forward {
    static __device__ __forceinline__ void pull(const PassParams& p, const program::Program& q, Shared& s, char* stages, const program::Task& t, u32& uses) {
        Tracer tracer;
        ::pull<false>(p, q, s, stages, t, uses);
        if (threadIdx.x == 0) tracer.end(p, t.kind, 0, t.a, t.b);
    }

    // So many that the first tiles do not wait, so few that memory gives each the rate it has alone.
    static __device__ __forceinline__ u64 first_pulls(const program::Program& q) { return min(program::before(q, program::COMM, min(q.minibatches, 1u)), u64(40) * RANKS); }

    static __device__ __forceinline__ u32 blocks(const program::Program&, const Work& w) {
        u32 width = w.expert >= LOCAL ? SHARED_SIZE : INNER_SIZE;
        return (w.task.kind == program::GATE_UP ? HIDDEN_SIZE : width) / 64;
    }

    static __device__ __forceinline__ u32 extra(const Work&) { return 0; }

    static __device__ __forceinline__ void produce(const PassParams& p, Shared& s, char* stages, gemm::Cursor& at, const Work& w) {
        u32 shared = w.expert >= LOCAL, expert = shared ? 0 : w.expert, tile = w.task.b;
        bool gate_up = w.task.kind == program::GATE_UP;
        u32 row = gate_up ? expert * GATE_ROWS + tile * 128 : expert * HIDDEN_SIZE + tile * 256;
        u32 kept = w.kept, ring = w.ring, blocks = w.blocks;
        for (u32 k = 0; k < blocks; k++) {
            gemm::begin_stage(s.stages, at);
            char* a = stages + at.stage * gemm::STAGE_BYTES;
            char* b = a + gemm::A_BYTES;
            u64* full = &s.stages.full[at.stage];
            if (gate_up) {
                ptx::tile_load(a, &p.x, full, k * 64, kept);
                ptx::tile_load(b, &p.gate[shared], full, k * 64, row);
                ptx::tile_load(b + gemm::B_BYTES / 2, &p.up[shared], full, k * 64, row);
            } else {
                ptx::tile_load(a, &p.h, full, k * 64, ring);
                ptx::tile_load(b, &p.down[shared], full, k * 64, row);
            }
            at.next();
        }
    }

    static __device__ __forceinline__ void consume(const PassParams& p, Shared& s, const char* stages, gemm::Cursor& at, float (&acc)[128], const Work& w, u32 group, char* pieces, u32 row0) {
        Tracer tracer;
        maybe_hang(p, w.task);
        uint2 target = push_target(p, w, row0);
        tracer.load(s.stages, at);
        gemm::consume<0, 0>(acc, s.stages, at, stages, group, w.blocks, true);
        tracer.multiplied();
        if (w.task.kind == program::GATE_UP) store_gate_up<true>(p, pieces, acc, w, row0);
        else push<true>(p, pieces, acc, w, target);
        if (threadIdx.x == 128) tracer.end(p, w.task.kind, 0, w.task.a, w.task.b);
    }

    // All threads of the CTA; each eight columns of a token at a time.
    static __device__ __forceinline__ void reduce(const PassParams& p, u32 rank, u32 chunk) {
        Tracer tracer;
        u32 first = chunk * program::REDUCE_TOKENS, end = min(first + program::REDUCE_TOKENS, p.tokens);
        constexpr u32 VECTORS = HIDDEN_SIZE / 8;
        if (HAS_OUTPUT_GATE) {
            // Kept for the backward.
            for (u32 t = first + threadIdx.x / 32; t < end; t += WARPS) {
                float logit = dot_row(p.x_of[rank] + u64(t) * HIDDEN_SIZE, p.output_gate);
                if (threadIdx.x % 32 == 0) p.output_gates[rank][t] = sigmoid(logit);
            }
            __syncthreads();
        }
        for (u32 i = threadIdx.x; i < (end - first) * VECTORS; i += THREADS) {
            u32 t = first + i / VECTORS, v = i % VECTORS;
            const uint4* slots = reinterpret_cast<const uint4*>(p.combine[rank]) + u64(t) * SLOTS * VECTORS + v;
            float sum[8] = {};
            auto add = [&](uint4 y, float w) {
                u32 pairs[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
                for (u32 c = 0; c < 4; c++) {
                    sum[2 * c] = __fadd_rn(sum[2 * c], __fmul_rn(w, low(pairs[c])));
                    sum[2 * c + 1] = __fadd_rn(sum[2 * c + 1], __fmul_rn(w, high(pairs[c])));
                }
            };
            if (SHARED_SIZE > 0) add(__ldcg(slots + TOP_K * VECTORS), HAS_OUTPUT_GATE ? __ldcg(p.output_gates[rank] + t) : 1.0f);
#pragma unroll
            for (u32 k0 = 0; k0 < TOP_K; k0 += 8) {
                // Loads first, those of slots that no route filled too: many under way at once.
                uint4 y[8];
#pragma unroll
                for (u32 k = 0; k < 8 && k0 + k < TOP_K; k++) y[k] = __ldcg(slots + (k0 + k) * VECTORS);
#pragma unroll
                for (u32 k = 0; k < 8 && k0 + k < TOP_K; k++) {
                    if (is_route(p, t * TOP_K + k0 + k)) add(y[k], p.factors[rank][t * TOP_K + k0 + k]);
                }
            }
            reinterpret_cast<uint4*>(p.out)[u64(t) * VECTORS + v] =
                make_uint4(pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
        }
        if (threadIdx.x == 0) tracer.end(p, program::REDUCE, 0, chunk, 0);
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 1) moe_forward(const __grid_constant__ PassParams p) { run_pass<Forward>(p); }
