// The schedule: expert ids of all ranks -> this rank's layout, table of rows, and programs. Two small kernels, no host.
//
// An expert's rows stand in ascending (token, k) order; each is placed by one CTA that looks at all ids in order.
#include "params.cuh"

namespace {

constexpr u32 THREADS = 1024, WARPS = THREADS / 32;
constexpr u32 LOCAL = EXPERTS / RANKS, ALL = LOCAL + (SHARED_SIZE > 0);
static_assert(ALL <= THREADS, "one thread an expert");

// Four ids from `i` on; -2, which is no expert's, beyond the end.
__device__ __forceinline__ int4 four_ids(const int* ids, u32 i, u32 n, bool aligned) {
    if (aligned && i + 4 <= n) return __ldg(reinterpret_cast<const int4*>(ids + i));
    auto id = [&](u32 at) { return at < n ? __ldg(ids + at) : -2; };
    return make_int4(id(i), id(i + 1), id(i + 2), id(i + 3));
}
__device__ __forceinline__ bool is_aligned(const int* ids) { return reinterpret_cast<u64>(ids) % 16 == 0; }

// The sum of the threads' values before this one's, and of all. `scratch` has a word a warp.
__device__ u32 sum_before(u32 value, u32* scratch, u32& total) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = value;
    for (u32 d = 1; d < 32; d *= 2) {
        u32 other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
    }
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    u32 before = 0;
    total = 0;
    for (u32 w = 0; w < blockDim.x / 32; w++) {
        u32 n = scratch[w];
        before += w < warp ? n : 0;
        total += n;
    }
    __syncthreads();
    return before + sum - value;
}

// The shared experts' rows of each rank: the global blocks of tokens whose first it holds.
struct SharedRows {
    u32 first[RANKS], rows[RANKS];
    __device__ __forceinline__ explicit SharedRows(const ScheduleParams& p) {
        u32 first_token = 0, tokens = 0;
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) tokens += p.tokens[r];
#pragma unroll
        for (u32 r = 0; r < RANKS; r++) {
            u32 end = first_token + p.tokens[r], from = (first_token + 127) / 128 * 128, to = (end + 127) / 128 * 128;
            first[r] = from;
            rows[r] = SHARED_SIZE > 0 && from < end ? min(to, tokens) - from : 0;
            first_token = end;
        }
    }
};

// What a warp of schedule_place looks at of a rank's ids: a contiguous part of them, lane l's fours from `from` on, by 128.
struct Part {
    u32 from, until;
    __device__ __forceinline__ explicit Part(u32 routes) {
        u32 each = (routes + THREADS * 4 - 1) / (THREADS * 4) * 128, warp = threadIdx.x / 32;
        from = warp * each + threadIdx.x % 32 * 4, until = min((warp + 1) * each, routes);
    }
};

}  // namespace

// Grid: one CTA an expert, all ranks'. counts[expert] = rows, and each warp's.
extern "C" __global__ void __launch_bounds__(THREADS) schedule_count(const __grid_constant__ ScheduleParams p) {
    __shared__ u32 sums[WARPS];
    int expert = static_cast<int>(blockIdx.x);
    u32 all = 0, warp = threadIdx.x / 32;
    for (u32 r = 0; r < RANKS; r++) {
        u32 routes = p.tokens[r] * TOP_K, n = 0;
        bool aligned = is_aligned(p.ids[r]);
        Part part(routes);
#pragma unroll 8
        for (u32 i = part.from; i < part.until; i += 128) {
            int4 id = four_ids(p.ids[r], i, routes, aligned);
            n += (id.x == expert) + (id.y == expert) + (id.z == expert) + (id.w == expert);
        }
        n = __reduce_add_sync(~0u, n);
        all += n;
        if (threadIdx.x % 32 == 0) p.counts[EXPERTS + (expert * RANKS + r) * WARPS + warp] = n;
    }
    if (threadIdx.x % 32 == 0) sums[warp] = all;
    __syncthreads();
    if (warp == 0) {
        all = __reduce_add_sync(~0u, sums[threadIdx.x]);
        if (threadIdx.x == 0) p.counts[expert] = all;
    }
}

// Grid: one CTA a local expert, and one for the shared experts. sources[row] = {rank, slot}; padding is {~0, 0}. The first
// CTA also writes the layout, and what the programs take from it.
extern "C" __global__ void __launch_bounds__(THREADS) schedule_place(const __grid_constant__ ScheduleParams p) {
    __shared__ u32 scratch[THREADS / 32], mine[3], busy[RANKS];
    u32 t = threadIdx.x, e = blockIdx.x, blocks, runs;
    SharedRows shared(p);
    u32 rows_here = t < LOCAL ? p.counts[p.rank * LOCAL + t] : t < ALL ? shared.rows[p.rank] : 0;
    u32 blocks_here = (rows_here + 127) / 128;
    u32 first_block = sum_before(blocks_here, scratch, blocks);
    if (t == e) mine[0] = rows_here, mine[1] = first_block * 128, mine[2] = (first_block + blocks_here) * 128;
    if (e == 0) {
        u32 runs_here = blocks_here ? (first_block + blocks_here - 1) / PER_MINIBATCH - first_block / PER_MINIBATCH + 1 : 0;
        u32 first_run = sum_before(runs_here, scratch, runs);
        if (t < ALL) p.rows[t] = rows_here, p.first_block[t] = first_block, p.first_run[t] = first_run;
        if (t == 0) p.first_block[ALL] = blocks, p.first_run[ALL] = runs;
        if (t < RANKS) busy[t] = shared.rows[t] > 0;
        __syncthreads();
        if (t < EXPERTS && p.counts[t] > 0) busy[t / LOCAL] = 1;
        __syncthreads();
        if (t < 2) {
            u32 pushing = 0, before = 0, next = RANKS, any = 0;
            for (u32 r = 0; r < RANKS; r++) {
                pushing += busy[r];
                if (shared.rows[r] == 0) continue;
                any = 1;
                if (r < p.rank) before = 1;
                if (r > p.rank && next == RANKS) next = r;
            }
            u32 minibatches = (blocks + PER_MINIBATCH - 1) / PER_MINIBATCH;
            program::Program& q = p.programs[t];
            q.minibatches = minibatches;
            q.ring = min(max(minibatches, 1u), static_cast<u32>(RING));
            q.saved = q.kept = min(minibatches, static_cast<u32>(SAVED));
            q.pushing = pushing;
            q.chain_after = before;
            q.chain_next = next;
            q.zero_shared = p.rank == 0 && !any;
        }
    }
    __syncthreads();
    u32 rows = mine[0], base = mine[1], end = mine[2], lane = t % 32, warp = t / 32;
    if (e < LOCAL) {
        int expert = static_cast<int>(p.rank * LOCAL + e);
        u32 placed = 0, first_route = 0;
        for (u32 r = 0; r < RANKS && placed < rows; r++) {
            const int* ids = p.ids[r];
            bool aligned = is_aligned(ids);
            u32 routes = p.tokens[r] * TOP_K;
            Part part(routes);
            u32 n = p.counts[EXPERTS + (expert * RANKS + r) * WARPS + lane];
            u32 at = base + placed + __reduce_add_sync(~0u, lane < warp ? n : 0);
            placed += __reduce_add_sync(~0u, n);
            // All lanes stay for the votes.
#pragma unroll 4
            for (u32 i = part.from; i - lane * 4 < part.until; i += 128) {
                int4 id = four_ids(ids, i, routes, aligned);
                bool here[4] = {id.x == expert, id.y == expert, id.z == expert, id.w == expert};
                if (!__any_sync(~0u, here[0] || here[1] || here[2] || here[3])) continue;
                u32 to = at;
#pragma unroll
                for (u32 c = 0; c < 4; c++) {
                    u32 votes = __ballot_sync(~0u, here[c]);
                    to += __popc(votes & ((1u << lane) - 1));
                    at += __popc(votes);
                }
#pragma unroll
                for (u32 c = 0; c < 4; c++) {
                    if (!here[c]) continue;
                    if (RANKS > 1) p.row_of[first_route + i + c] = to;
                    p.sources[to++] = make_uint2(r, (i + c) / TOP_K * SLOTS + (i + c) % TOP_K);
                }
            }
            first_route += routes;
        }
    } else {
        u32 first_token = 0, from = shared.first[p.rank];
        for (u32 r = 0; r < RANKS; r++) {
            for (u32 i = t; i < p.tokens[r]; i += THREADS) {
                u32 token = first_token + i;
                if (token >= from && token < from + rows) p.sources[base + token - from] = make_uint2(r, i * SLOTS + TOP_K);
            }
            first_token += p.tokens[r];
        }
    }
    for (u32 i = base + rows + t; i < end; i += THREADS) p.sources[i] = make_uint2(~0u, 0);
}
