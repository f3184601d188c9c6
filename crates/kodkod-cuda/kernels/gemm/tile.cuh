// One CTA's matrix product: a producer thread fills a ring of stages through the copy engine, two warpgroups consume it.
//
//   D[128, 256] = A[128, K] B[K, 256], each warpgroup 64 rows of D, K in blocks of 64
//
// An operand's tile lies in shared memory as the copy engine writes it with the 128-byte swizzle:
//   contiguous along K:        rows of M or N, 64 of K each                      A (128, 64)   B (256, 64)
//   contiguous along M or N:   chunks of 64 of M or N, 64 rows of K in each      A (2, 64, 64) B (4, 64, 64)
#pragma once
#include "ptx/copy.cuh"
#include "ptx/mma.cuh"

namespace gemm {

constexpr u32 TILE_M = 128, TILE_N = 256, TILE_K = 64;
constexpr u32 A_BYTES = TILE_M * TILE_K * 2, B_BYTES = TILE_N * TILE_K * 2;
constexpr u32 STAGE_BYTES = A_BYTES + B_BYTES;
constexpr u32 STAGES = 4;
constexpr u32 CONSUMER_WARPS = 8;  // each gives a stage back by itself: warps of a group may run apart

struct Stages {
    u64 full[STAGES];
    u64 empty[STAGES];
};

// A stage's place and phase, kept apart by the producer and by each consumer.
struct Cursor {
    u32 stage = 0, phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) { stage = 0; phase ^= 1; }
    }
};

__device__ __forceinline__ void init(Stages& s) {
    for (u32 i = 0; i < STAGES; i++) {
        ptx::barrier_init(&s.full[i], 1);
        ptx::barrier_init(&s.empty[i], CONSUMER_WARPS);
    }
}

// acc[64, 256] += A B over `blocks` of K; `start` says that acc counts as zero. TA, TB: contiguous along M or N.
template <int TA, int TB>
__device__ __forceinline__ void consume(float (&acc)[128], Stages& s, Cursor& at, const char* stages, u32 group, u32 blocks, bool start) {
    bool leader = threadIdx.x % 32 == 0;
    int add = start ? 0 : 1;
    u32 before = STAGES;
    for (u32 block = 0; block < blocks; block++) {
        ptx::barrier_wait(&s.full[at.stage], at.phase);
        const char* a = stages + at.stage * STAGE_BYTES + group * (A_BYTES / 2);
        const char* b = stages + at.stage * STAGE_BYTES + A_BYTES;
        u64 a_desc = ptx::descriptor(a, 8192, 1024), b_desc = ptx::descriptor(b, 8192, 1024);
        ptx::mma_fence();
#pragma unroll
        for (u32 k = 0; k < TILE_K / 16; k++) {
            // 16 of K: 32 bytes along a row, or 16 rows of 128 bytes.
            ptx::mma_64x256x16<TA, TB>(acc, a_desc + k * (TA ? 2048 : 32) / 16, b_desc + k * (TB ? 2048 : 32) / 16, add);
            add = 1;
        }
        ptx::mma_commit();
        // The products of the stage before are done when only this one's are open.
        ptx::mma_wait<1>();
        if (before < STAGES && leader) ptx::barrier_arrive(&s.empty[before]);
        before = at.stage;
        at.next();
    }
    ptx::mma_wait<0>();
    if (before < STAGES && leader) ptx::barrier_arrive(&s.empty[before]);
}

// A warpgroup whose rows are all padding lets the stages pass.
__device__ __forceinline__ void skip(Stages& s, Cursor& at, u32 blocks) {
    for (u32 block = 0; block < blocks; block++) {
        ptx::barrier_wait(&s.full[at.stage], at.phase);
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::barrier_arrive(&s.empty[at.stage]);
        at.next();
    }
}

// The producer's turn at a stage: waits until it is empty and announces its bytes.
__device__ __forceinline__ void begin_stage(Stages& s, const Cursor& at, u32 bytes = STAGE_BYTES) {
    ptx::barrier_wait(&s.empty[at.stage], at.phase ^ 1);
    ptx::barrier_expect(&s.full[at.stage], bytes);
}

}  // namespace gemm
