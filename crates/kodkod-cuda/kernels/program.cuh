// The device's decoder of tickets: plain integer arithmetic, the twin of kodkod-core's `Program::task`. It compiles for
// the host too, where a test holds the two against each other.
#pragma once

#ifndef __CUDACC__
#define __host__
#define __device__
#endif

namespace program {

using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 ROW_BLOCK = 128;
constexpr u32 REDUCE_TOKENS = 32;
constexpr u32 GROUP = 8;  // blocks, at most

enum Pass : u32 { FORWARD, BACKWARD };
enum Stream : u32 { COMM, COMPUTE };
enum Kind : u32 { PULL, PULL_GRAD, GATE_UP, DOWN, D_HIDDEN, D_INPUT, W_GRAD, ZERO_GRAD, SKIP, REDUCE, REDUCE_GRAD, ENTER, LEAVE };
enum Weight : u32 { GATE, UP, DOWN_WEIGHT, OUTPUT_GATE };
// In the order of their places among a rank's counters.
enum CounterName : u32 { DONE, PUSHED, CHAIN, PULLED, GRAD_PULLED, HIDDEN, GRAD_HIDDEN, FREE, MET };
enum ArriveName : u32 { NOTHING, HERE, AT, PUSHES };

struct Counter { u32 name, index; };
struct Wait { Counter counter; u32 at_least; };  // at_least 0: no wait
struct Arrive { u32 what, rank; Counter counter; };  // PUSHES: rank is the total
struct Run { u32 index, expert, minibatch, block, blocks; };

struct Task {
    u32 kind;
    u32 a, b;  // block and source, block and tile, expert, or chunk
    u32 weight, tile_m, tile_n, first, last;
    Run run;
    Wait waits[2];
    Arrive arrives[2];
};

// One rank's rows by local expert, the shared experts last: built by the schedule.
struct Layout {
    const u32* rows;         // [experts]
    const u32* first_block;  // [experts + 1]
    const u32* first_run;    // [experts + 1]
    u32 experts, routed;
};

struct Grid { u32 m, n; };

struct Program {
    u32 pass, rank, ranks;
    Layout layout;
    u32 per_minibatch, minibatches, ring, saved, kept;
    u32 gate_up_tiles[2], d_hidden_tiles[2], hidden_tiles;
    Grid gate_grid[2], down_grid[2];
    u32 output_gate, chunks, pushing;
    u32 chain_after, chain_next, zero_shared;  // chain_next: the rank, or ranks where there is none
};

__host__ __device__ inline u32 min_(u32 a, u32 b) { return a < b ? a : b; }
__host__ __device__ inline u32 max_(u32 a, u32 b) { return a > b ? a : b; }

__host__ __device__ inline u32 blocks(const Program& p) { return p.layout.first_block[p.layout.experts]; }
__host__ __device__ inline u32 routed_blocks(const Program& p) { return p.layout.first_block[p.layout.routed]; }
__host__ __device__ inline u32 runs(const Program& p) { return p.layout.first_run[p.layout.experts]; }

// A quotient that fits 32 bits; long division is slow on a GPU, and rarely needed.
__host__ __device__ inline u32 divide(u64 a, u32 b) { return a >> 32 ? u32(a / b) : u32(a) / b; }

// The last entry of `first` that is not beyond `value`.
__host__ __device__ inline u32 last_at_most(const u32* first, u32 n, u32 value) {
    u32 low = 0, high = n + 1;
    while (high - low > 1) {
        u32 middle = low + (high - low) / 2;
        if (first[middle] <= value) low = middle; else high = middle;
    }
    return low;
}

__host__ __device__ inline u32 expert_of(const Program& p, u32 block) { return last_at_most(p.layout.first_block, p.layout.experts, block); }
__host__ __device__ inline u32 rows_in(const Program& p, u32 block) {
    u32 e = expert_of(p, block);
    return min_(p.layout.rows[e] - (block - p.layout.first_block[e]) * ROW_BLOCK, ROW_BLOCK);
}

__host__ __device__ inline u32 wgrad_tiles(const Program& p, u32 shared) {
    return 2 * p.gate_grid[shared].m * p.gate_grid[shared].n + p.down_grid[shared].m * p.down_grid[shared].n + (shared && p.output_gate);
}

__host__ __device__ inline u32 place(const Program& p, Counter c) {
    u32 chain = 2 + wgrad_tiles(p, 1), n = blocks(p);
    switch (c.name) {
        case DONE: return 0;
        case PUSHED: return 1;
        case CHAIN: return 2 + c.index;
        case PULLED: return chain + c.index;
        case GRAD_PULLED: return chain + n + c.index;
        case HIDDEN: return chain + 2 * n + c.index;
        case GRAD_HIDDEN: return chain + 3 * n + c.index;
        default: return chain + 3 * n + runs(p) + c.index;
    }
}

__host__ __device__ inline Run run_at(const Program& p, u32 index) {
    u32 e = last_at_most(p.layout.first_run, p.layout.experts, index);
    u32 start = p.layout.first_block[e], end = p.layout.first_block[e + 1];
    u32 minibatch = start / p.per_minibatch + (index - p.layout.first_run[e]);
    u32 block = max_(start, minibatch * p.per_minibatch);
    return {index, e, minibatch, block, min_(end, (minibatch + 1) * p.per_minibatch) - block};
}
__host__ __device__ inline Run run_of(const Program& p, u32 block) {
    u32 e = expert_of(p, block);
    return run_at(p, p.layout.first_run[e] + block / p.per_minibatch - p.layout.first_block[e] / p.per_minibatch);
}
__host__ __device__ inline u32 runs_before(const Program& p, u32 minibatch) {
    u32 block = minibatch * p.per_minibatch;
    return block >= blocks(p) ? runs(p) : run_of(p, block).index;
}
__host__ __device__ inline u64 wgrad_before(const Program& p, u32 minibatch) {
    u32 n = runs_before(p, minibatch), routed = min_(n, p.layout.first_run[p.layout.routed]);
    return u64(routed) * wgrad_tiles(p, 0) + u64(n - routed) * wgrad_tiles(p, 1);
}
__host__ __device__ inline u32 block_after(const Program& p, u32 minibatch) { return min_((minibatch + 1) * p.per_minibatch, blocks(p)); }
__host__ __device__ inline u32 of_block(const Program& p, const u32 (&tiles)[2], u32 block) { return tiles[block >= routed_blocks(p)]; }
__host__ __device__ inline u64 tiles_before(const Program& p, const u32 (&tiles)[2], u32 block) {
    u32 routed = min_(block, routed_blocks(p));
    return u64(routed) * tiles[0] + u64(block - routed) * tiles[1];
}
// An expert's blocks between `first` and `after`, in groups as even as they can be, which are visited tile by tile: the tiles
// under way share weights as well as rows.
__host__ __device__ inline void grouped(const Program& p, u32 first, u32 after, u32 tiles, u64 local, u32& block, u32& tile) {
    u32 e = expert_of(p, first + divide(local, tiles));
    u32 start = max_(p.layout.first_block[e], first), blocks = min_(p.layout.first_block[e + 1], after) - start;
    u32 groups = (blocks + GROUP - 1) / GROUP, group = (blocks + groups - 1) / groups;
    u32 within = u32(local - u64(start - first) * tiles), before = within / (group * tiles) * group;
    within -= before * tiles;
    group = min_(group, blocks - before);
    block = start + before + within % group;
    tile = within / group;
}
// The tile at a position among those of the blocks from `first` to before `after`: routed blocks, then shared ones.
__host__ __device__ inline void tile_at(const Program& p, const u32 (&tiles)[2], u32 first, u32 after, u64 local, u32& block, u32& tile) {
    u32 shared = min_(max_(routed_blocks(p), first), after);
    u64 routed = tiles_before(p, tiles, shared) - tiles_before(p, tiles, first);
    if (local < routed) grouped(p, first, shared, tiles[0], local, block, tile);
    else grouped(p, shared, after, tiles[1], local - routed, block, tile);
}

__host__ __device__ inline u32 free_total(const Program& p, u32 minibatch) {
    u32 n = block_after(p, minibatch) - minibatch * p.per_minibatch;
    u32 wgrad = p.pass == FORWARD ? 0 : u32(wgrad_before(p, minibatch + 1) - wgrad_before(p, minibatch));
    return n * p.hidden_tiles + wgrad;
}

// Tickets of a stream in the steps before `step`.
__host__ __device__ inline u64 before(const Program& p, u32 stream, u32 step) {
    u32 n = blocks(p);
    bool forward = p.pass == FORWARD;
    u32 from = forward ? min_((p.minibatches - step) * p.per_minibatch, n) : 0;
    u32 to = forward ? n : min_(step * p.per_minibatch, n);
    u64 visited = to - from;
    u32 replayed_from = min_(min_(p.kept * p.per_minibatch, n), to);
    if (stream == COMM) return u64(p.ranks) * (visited + (forward ? 0 : to - replayed_from));
    u64 outer = visited * p.hidden_tiles;
    if (forward) return tiles_before(p, p.gate_up_tiles, to) - tiles_before(p, p.gate_up_tiles, from) + outer;
    u64 replay = tiles_before(p, p.gate_up_tiles, to) - tiles_before(p, p.gate_up_tiles, replayed_from);
    return replay + tiles_before(p, p.d_hidden_tiles, to) + outer + wgrad_before(p, step);
}
__host__ __device__ inline u64 tickets(const Program& p, u32 stream) {
    return before(p, stream, p.minibatches) + (stream == COMM ? p.chunks : p.pass == BACKWARD ? p.layout.experts : 0);
}

__host__ __device__ inline Arrive here(u32 name, u32 index) { return {HERE, 0, {name, index}}; }
__host__ __device__ inline Wait grad_hidden(const Program& p, const Run& run) {
    return {{GRAD_HIDDEN, run.index}, run.blocks * of_block(p, p.d_hidden_tiles, run.block)};
}

__host__ __device__ inline void comm_task(const Program& p, u32 minibatch, u32 local, Task& t) {
    u32 first = minibatch * p.per_minibatch, n = block_after(p, minibatch) - first;
    u32 round = local / (p.ranks * n);
    local %= p.ranks * n;
    t.a = first + local / p.ranks;
    t.b = (p.rank + local % p.ranks) % p.ranks;
    bool forward = p.pass == FORWARD, grad = !forward && (round == 1 || minibatch < p.kept);
    t.kind = grad ? PULL_GRAD : PULL;
    t.arrives[0] = here(grad ? GRAD_PULLED : PULLED, t.a);
    bool reused = forward ? minibatch + p.ring < p.minibatches : minibatch >= p.ring;
    if (reused) {
        u32 user = forward ? minibatch + p.ring : minibatch - p.ring;
        t.waits[0] = {{FREE, user}, free_total(p, user)};
    }
}

__host__ __device__ inline void wgrad_task(const Program& p, u32 minibatch, u32 first_run, u64 local, Task& t) {
    u32 routed_runs = p.layout.first_run[p.layout.routed];
    u64 here_ = routed_runs > first_run ? routed_runs - first_run : 0;
    u32 tiles = wgrad_tiles(p, 0);
    u32 shared = local >= here_ * tiles;
    u32 in_run = shared ? u32(here_) : divide(local, tiles);
    u32 tile = u32(local - u64(in_run) * tiles);
    t.run = run_at(p, first_run + in_run);
    Grid gate = p.gate_grid[shared], down = p.down_grid[shared];
    u32 gates = gate.m * gate.n, downs = down.m * down.n, in = tile;
    Grid grid = gate;
    if (tile < downs) { t.weight = DOWN_WEIGHT; grid = down; }
    else if (tile < downs + gates) { t.weight = GATE; in = tile - downs; }
    else if (tile < downs + 2 * gates) { t.weight = UP; in = tile - downs - gates; }
    else { t.weight = OUTPUT_GATE; in = 0; }
    t.kind = W_GRAD;
    t.tile_m = in / grid.n;
    t.tile_n = in % grid.n;
    bool starts = t.run.index == p.layout.first_run[t.run.expert], ends = t.run.index + 1 == p.layout.first_run[t.run.expert + 1];
    t.waits[0] = grad_hidden(p, t.run);
    // A sum that begins here and goes on takes the place of one that the minibatch before goes on from.
    if (!starts || (!shared && !ends && minibatch > 0)) t.waits[1] = {{FREE, minibatch - 1}, free_total(p, minibatch - 1)};
    else if (shared && p.chain_after) t.waits[1] = {{CHAIN, tile}, 1};
    t.first = starts && !(shared && p.chain_after);
    t.last = ends && !(shared && p.chain_next < p.ranks);
    t.arrives[0] = here(FREE, minibatch);
    if (shared && ends && !t.last) t.arrives[1] = {AT, p.chain_next, {CHAIN, tile}};
}

__host__ __device__ inline void compute_task(const Program& p, u32 minibatch, u32 first_run, u64 local, Task& t) {
    u32 first = minibatch * p.per_minibatch, after = block_after(p, minibatch);
    bool replayed = p.pass == BACKWARD && minibatch >= p.kept;
    Arrive pushes = {PUSHES, blocks(p) * p.hidden_tiles, {DONE, 0}};
    if (p.pass == FORWARD || replayed) {
        u64 n = tiles_before(p, p.gate_up_tiles, after) - tiles_before(p, p.gate_up_tiles, first);
        if (local < n) {
            tile_at(p, p.gate_up_tiles, first, after, local, t.a, t.b);
            t.kind = GATE_UP;
            t.waits[0] = {{PULLED, t.a}, p.ranks};
            t.arrives[0] = here(HIDDEN, t.a);
            return;
        }
        local -= n;
    }
    u64 outer = u64(after - first) * p.hidden_tiles;
    if (p.pass == FORWARD) {
        t.kind = DOWN;
        grouped(p, first, after, p.hidden_tiles, local, t.a, t.b);
        t.waits[0] = {{HIDDEN, t.a}, of_block(p, p.gate_up_tiles, t.a)};
        t.arrives[0] = here(FREE, minibatch);
        t.arrives[1] = pushes;
        return;
    }
    u64 inner = tiles_before(p, p.d_hidden_tiles, after) - tiles_before(p, p.d_hidden_tiles, first);
    if (local < inner) {
        tile_at(p, p.d_hidden_tiles, first, after, local, t.a, t.b);
        t.kind = D_HIDDEN;
        t.waits[0] = {{GRAD_PULLED, t.a}, p.ranks};
        if (replayed) t.waits[1] = {{HIDDEN, t.a}, of_block(p, p.gate_up_tiles, t.a)};
        t.arrives[0] = here(GRAD_HIDDEN, run_of(p, t.a).index);
        return;
    }
    local -= inner;
    if (local < outer) {
        t.kind = D_INPUT;
        grouped(p, first, after, p.hidden_tiles, local, t.a, t.b);
        t.waits[0] = grad_hidden(p, run_of(p, t.a));
        t.arrives[0] = here(FREE, minibatch);
        t.arrives[1] = pushes;
        return;
    }
    wgrad_task(p, minibatch, first_run, local - outer, t);
}

// A minibatch's place among the tickets of a stream. Who draws tickets in ascending order keeps it from one to the next:
// most are of the same minibatch.
struct Step {
    u64 begin = 0, end = 0, past = ~u64(0);  // of this minibatch; of all
    u32 minibatch = 0, first_run = 0;
};

__host__ __device__ inline void enter(const Program& p, u32 stream, u64 ticket, Step& at) {
    u32 step = 0, end = p.minibatches;
    while (end - step > 1) {
        u32 middle = step + (end - step) / 2;
        if (before(p, stream, middle) <= ticket) step = middle; else end = middle;
    }
    at.begin = before(p, stream, step);
    at.end = before(p, stream, step + 1);
    at.minibatch = p.pass == FORWARD ? p.minibatches - 1 - step : step;
    at.first_run = p.pass == BACKWARD && stream == COMPUTE ? runs_before(p, at.minibatch) : 0;
}

__host__ __device__ inline void decode(const Program& p, u32 stream, u64 ticket, Step& at, Task& t) {
    t = {};
    if (at.past == ~u64(0)) at.past = before(p, stream, p.minibatches);
    if (ticket >= at.past) {
        t.a = u32(ticket - at.past);
        if (stream == COMM) {
            t.kind = p.pass == FORWARD ? REDUCE : REDUCE_GRAD;
            t.waits[0] = {{DONE, 0}, p.pushing};
        } else {
            bool empty = p.layout.rows[t.a] == 0 && (t.a != p.layout.routed || p.zero_shared);
            t.kind = empty ? ZERO_GRAD : SKIP;
        }
        return;
    }
    if (ticket < at.begin || ticket >= at.end) enter(p, stream, ticket, at);
    if (stream == COMM) comm_task(p, at.minibatch, u32(ticket - at.begin), t);
    else compute_task(p, at.minibatch, at.first_run, ticket - at.begin, t);
}

// Where a block's rows lie: in the slots that keep x, g, u, and in the ring.
__host__ __device__ inline u32 row_in(const Program& p, u32 slot, u32 block) { return (slot * p.per_minibatch + block % p.per_minibatch) * ROW_BLOCK; }
__host__ __device__ inline u32 kept_row(const Program& p, u32 block) {
    u32 minibatch = block / p.per_minibatch;
    return row_in(p, minibatch < p.saved ? minibatch : p.saved + (minibatch - p.saved) % p.ring, block);
}
__host__ __device__ inline u32 ring_row(const Program& p, u32 block) { return row_in(p, block / p.per_minibatch % p.ring, block); }

// Whether a row of block `other`, of x or of dy where `grad`, lies in its slot while `block` is pulled, so that a token's second
// row can be copied from it.
enum Here : u32 { GONE, PULLED_BEFORE, OF_FORWARD };  // PULLED_BEFORE: once all of its pulls, whose tickets are earlier, are done
__host__ __device__ inline u32 row_stays(const Program& p, bool grad, u32 block, u32 other) {
    u32 minibatch = block / p.per_minibatch, its = other / p.per_minibatch;
    // Its slot is used again when the minibatch's products are done, this block's among them.
    if (its == minibatch) return other < block ? PULLED_BEFORE : GONE;
    // The ring is used again, by this minibatch perhaps. What is saved has slots of its own.
    if (grad || its >= p.saved) return GONE;
    if (p.pass == BACKWARD) return OF_FORWARD;
    return its > minibatch ? PULLED_BEFORE : GONE;
}

}  // namespace program
