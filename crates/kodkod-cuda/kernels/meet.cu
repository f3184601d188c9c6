// Ranks on GPUs of their own: they meet before and after a pass, and each copies all ranks' routes to itself.
#include "params.cuh"

// One warp, lane r for rank r. Each rank tells all of its epoch, and waits until all have told theirs: what the ranks'
// streams did before is visible after. A rank that does not come within the limit is named, and the pass given up.
extern "C" __global__ void meet(const __grid_constant__ MeetParams p) {
    u32 r = threadIdx.x, epoch = *p.epoch + 1;
    bool met = true;
    __syncwarp();
    if (r < RANKS) {
        __threadfence_system();
        ptx::store_release_sys(p.met[r] + p.rank, epoch);
        const u32* theirs = p.met[p.rank] + r;
        u64 start = ptx::nanoseconds();
        u32 seen, polls = 0;
        while (met && static_cast<int>((seen = ptx::load_acquire_sys(theirs)) - epoch) < 0) {
            if (++polls % 64 == 0) met = ptx::nanoseconds() - start <= p.limit_ns && !ptx::load_acquire_sys(p.abort[p.rank]);
        }
        if (!met && atomicCAS(&p.stall->given_up, 0, 1) == 0) {
            *p.stall = {1, p.leaving ? program::LEAVE : program::ENTER, epoch, r, program::MET, r, seen, epoch, 0};
        }
    }
    if (!__all_sync(~0u, met) && r < RANKS) ptx::add_release_sys(p.abort[r], 1);
    if (r == 0) *p.epoch = epoch;
}

// ids and router weights of all ranks, one after the other.
extern "C" __global__ void __launch_bounds__(256) gather(const __grid_constant__ GatherParams p) {
    u32 first = blockIdx.x * 256 + threadIdx.x, step = gridDim.x * 256;
    u64 at = 0;
    for (u32 r = 0; r < RANKS; r++) {
        u32 routes = p.tokens[r] * TOP_K;
        for (u32 i = first; i < routes; i += step) {
            p.all_ids[at + i] = p.ids[r][i];
            p.all_factors[at + i] = p.factors[r][i];
        }
        at += routes;
    }
}
