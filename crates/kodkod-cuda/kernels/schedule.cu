// The schedule: expert ids of all ranks -> this rank's layout, table of rows, and programs. Three small kernels, no host.
//
// An expert's rows stand in ascending (token, k) order; each is placed by one CTA that walks all ids in order.
#include "params.cuh"

namespace {

constexpr u32 THREADS = 512;

// How many of `flag` are set in the threads before this one, and in all.
__device__ u32 count_before(bool flag, u32* scratch, u32& total) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 votes = __ballot_sync(~0u, flag);
    if (lane == 0) scratch[warp] = __popc(votes);
    __syncthreads();
    u32 before = 0;
    total = 0;
    for (u32 w = 0; w < THREADS / 32; w++) {
        u32 n = scratch[w];
        before += w < warp ? n : 0;
        total += n;
    }
    __syncthreads();
    return before + __popc(votes & ((1u << lane) - 1));
}

}  // namespace

// Grid: one CTA an expert, all ranks'. counts[expert] = rows.
extern "C" __global__ void __launch_bounds__(THREADS) schedule_count(ScheduleParams p) {
    __shared__ u32 sums[THREADS / 32];
    u32 n = 0;
    for (u32 r = 0; r < RANKS; r++) {
        const int* ids = p.ids[r];
        u32 routes = p.tokens[r] * TOP_K;
        for (u32 i = threadIdx.x; i < routes; i += THREADS) n += ids[i] == static_cast<int>(blockIdx.x);
    }
    for (u32 d = 16; d; d /= 2) n += __shfl_down_sync(~0u, n, d);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = n;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 w = 1; w < THREADS / 32; w++) n += sums[w];
        p.counts[blockIdx.x] = n;
    }
}

// One CTA: the layout, and what the programs take from it.
extern "C" __global__ void __launch_bounds__(THREADS) schedule_layout(ScheduleParams p) {
    __shared__ u32 pushing, shared_before, shared_next, shared_any;
    __shared__ u32 counts[EXPERTS];
    u32 t = threadIdx.x;
    for (u32 e = t; e < EXPERTS; e += THREADS) counts[e] = p.counts[e];
    __syncthreads();
    constexpr u32 LOCAL = EXPERTS / RANKS, ALL = LOCAL + (SHARED_SIZE > 0);
    if (t == 0) {
        pushing = 0;
        shared_before = 0;
        shared_any = 0;
        shared_next = RANKS;
        u32 first_token = 0, tokens = 0;
        for (u32 r = 0; r < RANKS; r++) tokens += p.tokens[r];
        u32 mine = 0;
        for (u32 r = 0; r < RANKS; r++) {
            u32 end = first_token + p.tokens[r];
            // Global blocks whose first token this rank holds.
            u32 from = (first_token + 127) / 128 * 128, to = (end + 127) / 128 * 128;
            u32 rows = SHARED_SIZE > 0 && from < end ? (to < tokens ? to : tokens) - from : 0;
            u32 blocks = (rows + 127) / 128;
            for (u32 e = 0; e < LOCAL; e++) blocks += (counts[r * LOCAL + e] + 127) / 128;
            pushing += blocks > 0;
            if (rows) {
                shared_any = 1;
                if (r < p.rank) shared_before = 1;
                if (r > p.rank && shared_next == RANKS) shared_next = r;
            }
            if (r == p.rank) mine = rows;
            first_token = end;
        }
        u32 block = 0, run = 0;
        for (u32 e = 0; e < ALL; e++) {
            u32 rows = e < LOCAL ? counts[p.rank * LOCAL + e] : mine;
            u32 blocks = (rows + 127) / 128;
            p.rows[e] = rows;
            p.first_block[e] = block;
            p.first_run[e] = run;
            if (blocks) run += (block + blocks - 1) / PER_MINIBATCH - block / PER_MINIBATCH + 1;
            block += blocks;
        }
        p.first_block[ALL] = block;
        p.first_run[ALL] = run;
        u32 minibatches = (block + PER_MINIBATCH - 1) / PER_MINIBATCH;
        u32 ring = minibatches < RING ? (minibatches ? minibatches : 1) : RING;
        u32 saved = minibatches <= SAVED ? minibatches : SAVED;
        for (u32 pass = 0; pass < 2; pass++) {
            program::Program& q = p.programs[pass];
            q.minibatches = minibatches;
            q.ring = ring;
            q.saved = saved;
            q.kept = saved;
            q.pushing = pushing;
            q.chain_after = shared_before;
            q.chain_next = shared_next;
            q.zero_shared = p.rank == 0 && !shared_any;
        }
    }
}

// Grid: one CTA a local expert, and one for the shared experts. sources[row] = {rank, slot}; padding is {~0, 0}.
extern "C" __global__ void __launch_bounds__(THREADS) schedule_place(ScheduleParams p) {
    __shared__ u32 scratch[THREADS / 32];
    constexpr u32 LOCAL = EXPERTS / RANKS;
    u32 e = blockIdx.x, rows = p.rows[e];
    u32 base = p.first_block[e] * 128, end = p.first_block[e + 1] * 128, placed = 0;
    int expert = static_cast<int>(p.rank * LOCAL + e);
    if (e < LOCAL) {
        for (u32 r = 0; r < RANKS; r++) {
            const int* ids = p.ids[r];
            u32 routes = p.tokens[r] * TOP_K;
            for (u32 first = 0; first < routes && placed < rows; first += THREADS) {
                u32 i = first + threadIdx.x, total;
                bool here = i < routes && ids[i] == expert;
                u32 before = count_before(here, scratch, total);
                if (here) p.sources[base + placed + before] = make_uint2(r, i / TOP_K * SLOTS + i % TOP_K);
                placed += total;
            }
        }
    } else {
        u32 first_token = 0, from = 0;
        for (u32 r = 0; r < p.rank; r++) from += p.tokens[r];
        from = (from + 127) / 128 * 128;
        for (u32 r = 0; r < RANKS; r++) {
            for (u32 t = threadIdx.x; t < p.tokens[r]; t += THREADS) {
                u32 token = first_token + t;
                if (token >= from && token < from + rows) p.sources[base + token - from] = make_uint2(r, t * SLOTS + TOP_K);
            }
            first_token += p.tokens[r];
        }
    }
    for (u32 i = base + rows + threadIdx.x; i < end; i += THREADS) p.sources[i] = make_uint2(~0u, 0);
}
