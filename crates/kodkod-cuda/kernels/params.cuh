// What the host hands to the kernels. The shape and knobs are constants of the compilation:
//   HIDDEN_SIZE INNER_SIZE SHARED_SIZE EXPERTS TOP_K SLOTS RANKS PER_MINIBATCH RING SAVED D_HIDDEN_TILES
//   ALPHA UP_OFFSET LIMIT LIMIT_ON BIASES HAS_OUTPUT_GATE
//   BF16_GRADIENTS: of the backward alone
//   TRACE, optional: 1 to stamp each task
//   GATE_ROWS, optional: rows from one expert's gate to the next one's, and of up; more than INNER_SIZE where they lie together
#pragma once
#ifndef TRACE
#define TRACE 0
#endif
#ifndef GATE_ROWS
#define GATE_ROWS INNER_SIZE
#endif
#include "ptx/copy.cuh"
#include "program.cuh"

using bf16 = u16;

struct ScheduleParams {
    const int* ids[RANKS];  // [tokens, top_k] of each rank
    u32 tokens[RANKS];
    u32 rank;
    u32* counts;  // [experts], then of each expert and source rank what each warp of schedule_place places: [experts, ranks, 32]
    u32* rows;
    u32* first_block;
    u32* first_run;
    uint2* sources;  // [rows, padding included]
    u32* row_of;     // of all ranks' routes, those of local experts: the row
    program::Program* programs;  // forward, backward
};

// What a rank's wait was for when it gave up.
struct Stall {
    u32 given_up, task, a, b, counter, index, seen, expected, pushed;
};

struct MeetParams {
    u32 rank, leaving;
    u32* met[RANKS];  // of each rank, [ranks]: how often the others have told it that they are there
    u32* epoch;       // how often this one has
    u32* abort[RANKS];
    Stall* stall;
    u64 limit_ns;
};

struct GatherParams {
    const int* ids[RANKS];        // [tokens, top_k] of each rank
    const float* factors[RANKS];  // router weights, [tokens, top_k]
    u32 tokens[RANKS];
    int* all_ids;
    float* all_factors;
};

// One task of one CTA, in nanoseconds of the GPU's clock. `loaded`: its first operands are there; `product`: its product
// is done, the epilogue begins; both 0 where a task has no product. `cycles`: the SM's count at the end.
struct Stamp {
    u64 begin, loaded, product, end, cycles;
    u32 kind, weight, a, b, sm, cta;
};

// Index 0 of a pair: the routed experts; 1: the shared.
struct PassParams {
    // Boxes of 64 columns: 128 rows of x, g, u, h, dy, dg, du, gate, up; 256 rows of down; `_cols`: 64 rows.
    TensorMap x, h, gate[2], up[2], down[2];
    TensorMap dy, dg, du, gate_cols[2], up_cols[2], down_cols[2], x_cols, dy_cols, dg_cols, du_cols, wh_cols;
    TensorMap g, u;
    const program::Program* program;
    const uint2* sources;
    u32* counters;
    u32* peer_counters[RANKS];
    u32* tickets;  // pulls, compute, reduces
    Stall* stall;
    const bf16* x_of[RANKS];      // x of each rank, [tokens, hidden]
    const bf16* dy_of[RANKS];     // dy
    const float* factors[RANKS];  // router weights of each rank, [tokens, top_k]
    const int* ids;               // this rank's, [tokens, top_k]
    const int* ids_of[RANKS];     // each rank's
    const u32* row_of[RANKS];     // of each rank's routes, those of local experts: the row
    bf16* kept_x;                 // [kept rows, hidden]
    bf16* kept_g;                 // [kept rows, width]
    bf16* kept_u;                 // [kept rows, width]
    bf16* ring_h;                 // [ring rows, width]: h, or w h
    bf16* ring_dy;                // [ring rows, hidden]
    bf16* ring_dg;                // [ring rows, width]
    bf16* ring_du;                // [ring rows, width]
    float* d_w_parts;             // [ring rows, D_HIDDEN_TILES]
    bf16* combine[RANKS];         // of each rank, [tokens, slots, hidden]
    float* d_w[RANKS];            // of each rank, [tokens, slots]
    bf16* out;                    // [tokens, hidden]: y or dx
    float* d_topk_weights;        // [tokens, top_k]
    float* output_gates[RANKS];   // of each rank, [tokens]: sigmoid(x . output_gate), from the forward's Reduce
    const float* bias_gate;       // of this rank's experts, [experts, inner]
    const float* bias_up;         // [experts, inner]
    const float* bias_down;       // [experts, hidden]
    const float* output_gate;     // [hidden]
    float* d_bias_gate;
    float* d_bias_up;
    float* d_bias_down;
    float* d_output_gate;
    void* d_gate[2];  // bf16 where BF16_GRADIENTS, else float
    void* d_up[2];
    void* d_down[2];
    // Where BF16_GRADIENTS: sums that are not complete. Of this rank's routed experts [2 slots][gate, up: inner * hidden,
    // down: hidden * inner], the slot by the parity of the minibatch that leaves it; of the shared, once for all ranks.
    float* carry[2];
    u32 tokens, comm_ctas, accumulate;
    u64 limit_ns;
    u32* abort[RANKS];  // of each rank: not 0 when one has given up
    // A test hook: the compute task of this kind, block (or expert) and tile does not end until all give up. Kind ~0: none.
    u32 hang_kind, hang_a, hang_b;
    Stamp* stamps;  // [stamps_most]; the count of all tasks is in `stamped`
    u32* stamped;  // then rows pulled from other ranks, and rows taken from a row that was
    u32 stamps_most;
};
