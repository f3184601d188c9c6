//! The table row -> (source rank, source slot) of one rank: it serves all four transfers.
//!
//! An expert's rows stand in ascending (global token, k) order and start at a row-block edge, so their order
//! depends on no rank count. The shared experts are one more expert, the last: a global block of [`ROW_BLOCK`]
//! tokens belongs to the rank that holds its first token, so that this order depends on no rank count either.

use crate::ROW_BLOCK;
use crate::error::{Error, Result};
use crate::routing::Routing;
use crate::shape::Shape;

/// Where a row comes from and where its results go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// The rank that holds the token; [`Source::PADDING`] in a padding row.
    pub rank: u32,
    /// The row's slot there: local token * slots per token + k; k = top_k stands for the shared experts.
    pub slot: u32,
}

impl Source {
    /// The rank of a padding row.
    pub const PADDING: u32 = u32::MAX;
}

/// Rows of one rank by expert: how many, and at which row block they start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Rows of each local expert, padding not counted; the shared experts last, if there are any.
    pub rows: Vec<u32>,
    /// First row block of each local expert, and one past the last.
    pub first_block: Vec<u32>,
    /// Local routed experts: `rows.len()`, less one where there are shared experts.
    pub routed: usize,
}

impl Layout {
    fn new(rows: Vec<u32>, routed: usize) -> Self {
        let mut first_block = vec![0];
        for &n in &rows {
            first_block.push(first_block[first_block.len() - 1] + n.div_ceil(ROW_BLOCK as u32));
        }
        Layout { rows, first_block, routed }
    }

    /// Row blocks of all local experts.
    pub fn blocks(&self) -> u32 {
        self.first_block[self.rows.len()]
    }

    /// The local expert whose rows a block holds.
    pub fn expert_of(&self, block: u32) -> usize {
        self.first_block.partition_point(|&first| first <= block) - 1
    }

    /// Rows in a block that are not padding.
    pub fn rows_in(&self, block: u32) -> usize {
        let expert = self.expert_of(block);
        let before = (block - self.first_block[expert]) as usize * ROW_BLOCK;
        (self.rows[expert] as usize - before).min(ROW_BLOCK)
    }
}

/// One rank's table of rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// Rows by expert.
    pub layout: Layout,
    /// One entry a row, padding included: `layout.blocks() * ROW_BLOCK`.
    pub sources: Vec<Source>,
}

impl Schedule {
    /// The table of `rank`, from what all ranks chose.
    pub fn new(shape: &Shape, routing: &Routing, rank: usize) -> Self {
        let experts = experts_per_rank(shape, routing.ranks()).expect("ranks divide experts");
        let (first, slots) = ((rank * experts) as i32, shape.slots());
        let local =
            |id: i32| Some((id - first) as usize).filter(|_| id >= first && id < first + experts as i32);
        let mut rows = vec![0_u32; experts];
        routing.ids().iter().filter_map(|&id| local(id)).for_each(|e| rows[e] += 1);
        let tokens = routing.tokens();
        // Global blocks whose first token is here.
        let mine = routing.tokens_of(rank);
        let shared = mine.start.next_multiple_of(ROW_BLOCK)..mine.end.next_multiple_of(ROW_BLOCK).min(tokens);
        let shared = if mine.is_empty() || shared.start >= mine.end { 0..0 } else { shared };
        if shape.shared.is_some() {
            rows.push(shared.len() as u32);
        }
        let layout = Layout::new(rows, experts);
        let mut sources =
            vec![Source { rank: Source::PADDING, slot: 0 }; layout.blocks() as usize * ROW_BLOCK];
        let mut next: Vec<_> = layout.first_block.iter().map(|&b| b as usize * ROW_BLOCK).collect();
        for source in 0..routing.ranks() {
            for (t, token) in routing.tokens_of(source).enumerate() {
                for k in 0..shape.top_k {
                    if let Some(e) = local(routing.ids()[token * shape.top_k + k]) {
                        sources[next[e]] = Source { rank: source as u32, slot: (t * slots + k) as u32 };
                        next[e] += 1;
                    }
                }
                if shape.shared.is_some() && shared.contains(&token) {
                    let slot = (t * slots + shape.top_k) as u32;
                    sources[next[experts]] = Source { rank: source as u32, slot };
                    next[experts] += 1;
                }
            }
        }
        Schedule { layout, sources }
    }

    /// Rows of `block` that come from `source`: they stand together, since rows ascend by token.
    pub fn rows_from(&self, block: u32, source: u32) -> std::ops::Range<usize> {
        let first = block as usize * ROW_BLOCK;
        let rows = &self.sources[first..first + ROW_BLOCK];
        let start = rows.partition_point(|s| s.rank < source);
        let end = rows.partition_point(|s| s.rank <= source);
        first + start..first + end
    }
}

/// Experts of one rank.
///
/// # Errors
/// [`Error::Invalid`] where the ranks do not divide the experts.
pub fn experts_per_rank(shape: &Shape, ranks: usize) -> Result<usize> {
    if ranks == 0 {
        return Err(Error::invalid("ranks", ranks, "at least 1 is needed"));
    }
    if !shape.experts.is_multiple_of(ranks) {
        let allowed = format!("it must divide the number of experts ({})", shape.experts);
        return Err(Error::invalid("ranks", ranks, allowed));
    }
    Ok(shape.experts / ranks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::Shared;
    use proptest::prelude::*;

    /// Rows of all ranks as (expert, global token, k), in the order of experts.
    fn global_rows(shape: &Shape, routing: &Routing) -> Vec<Vec<(usize, usize)>> {
        let mut all = vec![Vec::new(); shape.experts + 1];
        let per_rank = shape.experts / routing.ranks();
        for rank in 0..routing.ranks() {
            let schedule = Schedule::new(shape, routing, rank);
            for (row, s) in schedule.sources.iter().enumerate() {
                if s.rank == Source::PADDING {
                    continue;
                }
                let local = schedule.layout.expert_of((row / ROW_BLOCK) as u32);
                let expert = if local == per_rank { shape.experts } else { rank * per_rank + local };
                let (t, k) = (s.slot as usize / shape.slots(), s.slot as usize % shape.slots());
                all[expert].push((routing.tokens_of(s.rank as usize).start + t, k));
            }
        }
        all
    }

    proptest! {
        #[test]
        fn order_of_rows_depends_on_no_split(
            ids in proptest::collection::vec(-1_i32..8, 0..600),
            cuts in proptest::collection::vec(0_usize..300, 3),
        ) {
            let mut shape = Shape::new(8, 8, 8, 2);
            shape.shared = Some(Shared { intermediate: 8, output_gate: false });
            let ids = &ids[..ids.len() / 2 * 2];
            let (tokens, weights) = (ids.len() / 2, vec![1.0; ids.len()]);
            let mut cuts: Vec<_> = cuts.iter().map(|c| c % (tokens + 1)).collect();
            cuts.sort_unstable();
            let ragged = [cuts[0], cuts[1] - cuts[0], cuts[2] - cuts[1], tokens - cuts[2]];
            let one = global_rows(&shape, &Routing::new(&shape, ids, &weights, &[tokens]).unwrap());
            let four = global_rows(&shape, &Routing::new(&shape, ids, &weights, &ragged).unwrap());
            prop_assert_eq!(&one, &four);
            for (expert, rows) in one.iter().enumerate() {
                prop_assert!(rows.is_sorted());
                let expected = if expert == 8 { tokens } else { ids.iter().filter(|&&i| i == expert as i32).count() };
                prop_assert_eq!(rows.len(), expected);
            }
        }

        #[test]
        fn rows_from_a_source_stand_together(ids in proptest::collection::vec(-1_i32..4, 400)) {
            let shape = Shape::new(8, 8, 4, 1);
            let routing = Routing::new(&shape, &ids, &[1.0; 400], &[100, 0, 250, 50]).unwrap();
            for rank in 0..4 {
                let schedule = Schedule::new(&shape, &routing, rank);
                let mut seen = 0;
                for block in 0..schedule.layout.blocks() {
                    for source in 0..4 {
                        for row in schedule.rows_from(block, source) {
                            prop_assert_eq!(schedule.sources[row].rank, source);
                            seen += 1;
                        }
                    }
                }
                prop_assert_eq!(seen, schedule.layout.rows.iter().sum::<u32>());
            }
        }
    }
}
