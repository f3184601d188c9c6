//! Which token goes to which experts, with what weight, and which rank holds which token.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::shape::Shape;

/// The router's choice for all tokens of all ranks, checked: ids are -1 or experts, lengths agree.
#[derive(Debug, Clone)]
pub struct Routing {
    top_k: usize,
    ids: Vec<i32>,
    weights: Vec<f32>,
    first_token: Vec<usize>,
}

/// Weights are equal where their bits are, so that a NaN equals itself.
impl PartialEq for Routing {
    fn eq(&self, other: &Self) -> bool {
        let bits = |r: &Routing| r.weights.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
        self.top_k == other.top_k
            && self.first_token == other.first_token
            && self.ids == other.ids
            && bits(self) == bits(other)
    }
}

impl Routing {
    /// `ids` and `weights` are `[tokens, top_k]` over all ranks, in rank order; `tokens_per_rank` says how many
    /// tokens each rank holds, 0 included. Id -1 means no route.
    ///
    /// # Errors
    /// [`Error::ExpertId`] for an id that is neither -1 nor an expert, [`Error::Length`] where lengths disagree,
    /// [`Error::Invalid`] where there are no ranks or too many tokens.
    pub fn new<I: Copy + Into<i64>>(
        shape: &Shape,
        ids: &[I],
        weights: &[f32],
        tokens_per_rank: &[usize],
    ) -> Result<Self> {
        if tokens_per_rank.is_empty() {
            return Err(Error::invalid("tokens_per_rank", "empty", "one count a rank is needed"));
        }
        let mut first_token = vec![0_usize];
        for &tokens in tokens_per_rank {
            let sum =
                first_token[first_token.len() - 1].checked_add(tokens).filter(|&n| n <= Self::MAX_TOKENS);
            first_token.push(sum.ok_or_else(|| {
                let allowed = format!("at most {} tokens in all are allowed", Self::MAX_TOKENS);
                Error::invalid("tokens_per_rank", tokens, allowed)
            })?);
        }
        let tokens = first_token[tokens_per_rank.len()];
        let dims = [("tokens", tokens), ("top_k", shape.top_k)];
        Error::check_len("topk_ids", ids.len(), &dims)?;
        Error::check_len("topk_weights", weights.len(), &dims)?;
        let checked = |(i, &id): (usize, &I)| {
            let id: i64 = id.into();
            if id < -1 || id >= shape.experts as i64 {
                let (token, slot) = (i / shape.top_k, i % shape.top_k);
                return Err(Error::ExpertId { token, slot, id, experts: shape.experts });
            }
            Ok(id as i32)
        };
        let ids = ids.iter().enumerate().map(checked).collect::<Result<Vec<_>>>()?;
        Ok(Routing { top_k: shape.top_k, ids, weights: weights.to_vec(), first_token })
    }

    /// Tokens of all ranks: a route's position must fit 32 bits beside its slot.
    pub const MAX_TOKENS: usize = 1 << 26;

    /// `tokens` dealt to `ranks` as evenly as can be, the first ranks taking one more.
    pub fn even_split(tokens: usize, ranks: usize) -> Vec<usize> {
        (0..ranks).map(|r| tokens / ranks + usize::from(r < tokens % ranks)).collect()
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.first_token.len() - 1
    }

    /// Tokens of all ranks.
    pub fn tokens(&self) -> usize {
        self.first_token[self.ranks()]
    }

    /// Routes per token.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Global indices of the tokens that a rank holds.
    pub fn tokens_of(&self, rank: usize) -> Range<usize> {
        self.first_token[rank]..self.first_token[rank + 1]
    }

    /// The rank that holds a token, and the token's index there.
    pub fn locate(&self, token: usize) -> (usize, usize) {
        let rank = self.first_token.partition_point(|&first| first <= token) - 1;
        (rank, token - self.first_token[rank])
    }

    /// Expert ids `[tokens, top_k]`, global token order.
    pub fn ids(&self) -> &[i32] {
        &self.ids
    }

    /// Router weights `[tokens, top_k]`, global token order.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// Routes that are not -1.
    pub fn routes(&self) -> usize {
        self.ids.iter().filter(|&&id| id >= 0).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_token_slot_and_value_of_a_bad_id() {
        let shape = Shape::new(64, 64, 4, 2);
        for (bad, place) in [(4_i64, 5), (-2, 0), (1 << 40, 3)] {
            let mut ids = vec![0_i64; 6];
            ids[place] = bad;
            let error = Routing::new(&shape, &ids, &[1.0; 6], &[1, 2]).unwrap_err();
            println!("{error}");
            assert_eq!(error, Error::ExpertId { token: place / 2, slot: place % 2, id: bad, experts: 4 });
        }
    }

    #[test]
    fn locates_tokens_among_empty_ranks() {
        let routing = Routing::new(&Shape::new(8, 8, 1, 1), &[0; 5], &[1.0; 5], &[0, 2, 0, 3, 0]).unwrap();
        let places: Vec<_> = (0..5).map(|t| routing.locate(t)).collect();
        assert_eq!(places, [(1, 0), (1, 1), (3, 0), (3, 1), (3, 2)]);
        assert_eq!(Routing::even_split(10, 4), [3, 3, 2, 2]);
    }
}
