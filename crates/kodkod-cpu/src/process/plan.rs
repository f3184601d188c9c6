//! Where in the shared file the data of a call lies: the same on every rank, from the shape and the token counts.

use kodkod_core::program::{Pass, Program};
use kodkod_core::schedule::Layout;
use kodkod_core::{Knobs, ROW_BLOCK, Shape, WeightGradients};

use crate::pass::TILES;

/// Offsets in bytes of one rank's part. It is written by its rank alone, before the pass, but for `combine`, `d_w` and
/// the counters during it.
pub(super) struct RankPlan {
    /// `[tokens, hidden]`
    pub(super) x: usize,
    /// `[tokens, hidden]`, in a backward.
    pub(super) dy: usize,
    /// `[tokens, top_k]`, in a forward.
    pub(super) ids: usize,
    /// `[tokens, top_k]`, in a forward.
    pub(super) topk_weights: usize,
    /// `[tokens, slots, hidden]`
    pub(super) combine: usize,
    /// `[tokens, slots]`, in a backward.
    pub(super) d_w: usize,
    /// At most `max_counters`.
    pub(super) counters: usize,
}

pub(super) struct Plan {
    pub(super) ranks: Vec<RankPlan>,
    pub(super) max_counters: usize,
    /// Gradients of the shared experts, gate, up, down and output gate, in a backward: in `f32`, handed on from rank to
    /// rank.
    pub(super) shared: Option<[usize; 4]>,
    pub(super) len: usize,
}

impl Plan {
    /// `element` is the size of the storage type.
    pub(super) fn new(pass: Pass, shape: &Shape, element: usize, tokens: &[usize]) -> Plan {
        let mut len = 0;
        // Apart by cache lines, and aligned for any element.
        let mut take = |n: usize, size: usize| {
            let start = len;
            len += (n * size).next_multiple_of(128);
            start
        };
        let (hidden, slots) = (shape.hidden, shape.slots());
        let (forward, backward) = (usize::from(pass == Pass::Forward), usize::from(pass == Pass::Backward));
        let max_counters = max_counters(shape, tokens);
        let ranks = tokens
            .iter()
            .map(|&n| RankPlan {
                x: take(n * hidden, element),
                dy: take(backward * n * hidden, element),
                ids: take(forward * n * shape.top_k, size_of::<i32>()),
                topk_weights: take(forward * n * shape.top_k, size_of::<f32>()),
                combine: take(n * slots * hidden, element),
                d_w: take(backward * n * slots, size_of::<f32>()),
                counters: take(max_counters, size_of::<u32>()),
            })
            .collect();
        let shared = WeightGradients::lens(shape).shared.filter(|_| pass == Pass::Backward);
        let shared = shared
            .map(|s| [s.gate, s.up, s.down, s.output_gate.unwrap_or(0)].map(|n| take(n, size_of::<f32>())));
        Plan { ranks, max_counters, shared, len }
    }
}

/// Enough for any routing of so many tokens: five a row block, and those that other ranks arrive at.
fn max_counters(shape: &Shape, tokens: &[usize]) -> usize {
    let experts = shape.experts / tokens.len();
    let local = experts + usize::from(shape.shared.is_some());
    let empty = Layout { rows: vec![0; local], first_block: vec![0; local + 1], routed: experts };
    let knobs = Knobs::for_shape(shape);
    let alone = Program::new(Pass::Backward, shape, &knobs, &TILES, &[&empty], &[0], 0, false);
    let all: usize = tokens.iter().sum();
    let blocks = (all * shape.slots()).div_ceil(ROW_BLOCK) + local;
    alone.counters() + 5 * blocks
}
