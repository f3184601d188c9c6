// Rates of the link between two GPUs: rows copied as the passes do it, and a flag's way there and back. No constants.
#include "ptx/copy.cuh"

namespace {

// As in `pull`: each warp has DEPTH buffers, so that DEPTH - 1 loads are under way while one piece is stored. Where pieces
// are longer than 4 KB fewer warps copy, so that as many bytes are under way.
constexpr u32 WARPS = 12, DEPTH = 4, ROOM = WARPS * DEPTH * 4096;
// As in `store_piece`: 16 rows of one line.
constexpr u32 LINE = 128, LINES = 16;
constexpr u32 FLAG_ROUNDS = 4096;

struct Copy {
    const char* from;
    char* to;
    u64 bytes;  // a multiple of `piece`, of LINES * pitch where lines are stored
    u32 piece;  // of a load, and of a bulk store
    u32 pitch;  // of the rows that lines are stored to, in bytes
};

// Where line `line` of piece `piece` belongs: pieces lie side by side in groups of LINES rows.
__device__ __forceinline__ u64 line_offset(u32 piece, u32 line, u32 pitch) {
    u32 across = pitch / LINE;
    return u64(piece / across * LINES + line) * pitch + piece % across * LINE;
}

template <bool BULK> __device__ __forceinline__ void copy(const Copy& p) {
    extern __shared__ __align__(128) char room[];
    __shared__ u64 full[WARPS * DEPTH];
    if (threadIdx.x < WARPS * DEPTH) ptx::barrier_init(&full[threadIdx.x], 1);
    ptx::barrier_init_fence();
    __syncthreads();
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 warps = min(blockDim.x / 32, ROOM / (DEPTH * p.piece));
    if (warp >= warps) return;
    char* buffers = room + warp * DEPTH * p.piece;
    u64 pieces = p.bytes / p.piece, step = u64(gridDim.x) * warps;
    u64 load = u64(warp) * gridDim.x + blockIdx.x;
    u32 loads = 0, stores = 0;
    for (u64 piece = load; piece < pieces; piece += step, stores++) {
        for (; load < pieces && loads - stores < DEPTH - 1; load += step, loads++) {
            if (lane == 0) {
                u64* bar = &full[warp * DEPTH + loads % DEPTH];
                // The bulk store from this buffer was committed before the last one: it has read its source.
                if (BULK) ptx::bulk_wait_read<1>();
                ptx::barrier_expect(bar, p.piece);
                ptx::bulk_load(buffers + loads % DEPTH * p.piece, p.from + load * p.piece, p.piece, bar);
            }
        }
        ptx::barrier_wait(&full[warp * DEPTH + stores % DEPTH], stores / DEPTH % 2);
        __syncwarp();
        const char* buffer = buffers + stores % DEPTH * p.piece;
        if (!BULK) {
#pragma unroll
            for (u32 i = 0; i < LINES / 4; i++) {
                u32 line = i * 4 + lane / 8, at = lane % 8 * 16;
                uint4 v = *reinterpret_cast<const uint4*>(buffer + line * LINE + at);
                *reinterpret_cast<uint4*>(p.to + line_offset(u32(piece), line, p.pitch) + at) = v;
            }
            __syncwarp();
        } else if (lane == 0) {
            ptx::bulk_store(p.to + piece * p.piece, buffer, p.piece);
            ptx::bulk_commit();
        }
    }
    if (BULK && lane == 0) ptx::bulk_wait<0>();
}

// Word `i` of a buffer of random bits.
__device__ __forceinline__ u32 random_word(u32 seed, u32 i) {
    u32 x = (i ^ seed) * 0x9e3779b1u;
    x = (x ^ (x >> 15)) * 0x85ebca77u;
    x = (x ^ (x >> 13)) * 0xc2b2ae3du;
    return x ^ (x >> 16);
}

struct Fill {
    u32* words;
    u64 count;
    u32 seed;
};

struct Check {
    const u32* words;
    u32* wrong;  // grows by the number of words that are not what was sent
    u64 count;
    u32 seed, pitch;  // pitch: as lines were stored; 0: in order
};

struct Ping {
    u32* mine;    // on this GPU
    u32* theirs;  // on the other
    u64* clocks;  // rounds done; of all but the first round nanoseconds and cycles
    u32* cycles;  // [rounds]: from sending a flag to seeing the answer
    u64 limit_ns;
    u32 rounds, first;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) links_bulk(const __grid_constant__ Copy p) { copy<true>(p); }
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) links_lines(const __grid_constant__ Copy p) { copy<false>(p); }

extern "C" __global__ void __launch_bounds__(1024, 1) links_fill(const __grid_constant__ Fill p) {
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count; i += u64(gridDim.x) * blockDim.x) p.words[i] = random_word(p.seed, u32(i));
}

extern "C" __global__ void __launch_bounds__(1024, 1) links_check(const __grid_constant__ Check p) {
    u32 wrong = 0;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < p.count; i += u64(gridDim.x) * blockDim.x) {
        u64 sent = i;
        if (p.pitch) {
            constexpr u32 WORDS = LINE / 4;
            u32 pitch = p.pitch / 4, across = pitch / WORDS;
            u64 row = i / pitch, piece = row / LINES * across + i % pitch / WORDS;
            sent = (piece * LINES + row % LINES) * WORDS + i % WORDS;
        }
        wrong += p.words[i] != random_word(p.seed, u32(sent));
    }
    if (wrong) atomicAdd(p.wrong, wrong);
}

// One thread on each side, and no other in the kernel. Only shared memory is written between two flags, so that a release has nothing to wait for.
extern "C" __global__ void __launch_bounds__(1, 1) links_ping(const __grid_constant__ Ping p) {
    __shared__ u32 taken[FLAG_ROUNDS];
    u32 done = 0, rounds = min(p.rounds, FLAG_ROUNDS);
    u64 start = ptx::nanoseconds(), began = start, first_cycle = ptx::cycles(), now = first_cycle;
    bool late = false;
    while (done < rounds && !late) {
        u64 sent = now;
        if (p.first) ptx::add_release_sys(p.theirs, 1);
        for (u32 polls = 0; ptx::load_acquire_sys(p.mine) <= done && !late;) {
            late = ++polls % 64 == 0 && ptx::nanoseconds() - start > p.limit_ns;
        }
        if (late) break;
        if (!p.first) ptx::add_release_sys(p.theirs, 1);
        now = ptx::cycles();
        taken[done++] = u32(now - sent);
        if (done == 1) {
            began = ptx::nanoseconds();
            first_cycle = now;
        }
    }
    p.clocks[0] = done;
    p.clocks[1] = ptx::nanoseconds() - began;
    p.clocks[2] = now - first_cycle;
    for (u32 i = 0; i < done; i++) p.cycles[i] = taken[i];
}
