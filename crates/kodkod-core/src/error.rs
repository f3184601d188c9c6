//! The errors of the layer: each names the argument, the value that was given and what is allowed.

use std::fmt;

/// The result of everything here that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call was refused or given up. Nothing was computed, or what was computed must not be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// One argument has a value that is not allowed.
    #[error("{argument} is {value}: {allowed}")]
    Invalid {
        /// The argument's name, as the caller knows it.
        argument: String,
        /// The value that was given.
        value: String,
        /// What is allowed, as a sentence.
        allowed: String,
    },
    /// A buffer has another number of elements than its shape asks for.
    #[error("{argument} has {got} elements: expected {expected}, for shape {shape}")]
    Length {
        /// The buffer's name.
        argument: String,
        /// Elements that were given.
        got: usize,
        /// Elements that the shape asks for.
        expected: usize,
        /// The shape, written out, e.g. `[tokens 12, hidden 64]`.
        shape: String,
    },
    /// An expert id is neither -1 nor an expert.
    #[error("topk_ids[{token}, {slot}] is {id}: allowed are 0 to {last} and -1 (no route)", last = experts - 1)]
    ExpertId {
        /// Global index of the token.
        token: usize,
        /// Position among the token's top-k.
        slot: usize,
        /// The id that was given.
        id: i64,
        /// Number of experts.
        experts: usize,
    },
    /// A wait outlasted its limit: one entry for every rank that was still waiting.
    #[error("the pass was given up: {}", list(.0))]
    Stalled(Vec<Stall>),
    /// A machine cannot be used, in its own words: what is missing, and what works instead.
    #[error("{0}")]
    Machine(String),
    /// A defect in kodkod: please report it with the step (`kodkod replay` reads one from a file).
    #[error("internal error: {0}")]
    Internal(String),
}

impl Error {
    /// An [`Error::Invalid`] from displayable parts.
    pub fn invalid(argument: impl Into<String>, value: impl ToString, allowed: impl Into<String>) -> Self {
        Error::Invalid { argument: argument.into(), value: value.to_string(), allowed: allowed.into() }
    }

    /// `Ok` where `got` elements are `dims` multiplied, else an [`Error::Length`] that names each dimension.
    pub fn check_len(argument: &str, got: usize, dims: &[(&str, usize)]) -> Result<()> {
        let expected = dims.iter().map(|d| d.1).product();
        if got == expected {
            return Ok(());
        }
        let shape = dims.iter().map(|(name, n)| format!("{name} {n}")).collect::<Vec<_>>().join(", ");
        Err(Error::Length { argument: argument.into(), got, expected, shape: format!("[{shape}]") })
    }
}

/// What one rank was waiting for when a pass was given up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stall {
    /// The rank whose task waited.
    pub rank: usize,
    /// The task, e.g. `GateUp(block 3, tile 1)`.
    pub task: String,
    /// The counter, e.g. `pulled[3] of rank 0`.
    pub counter: String,
    /// The value that was seen.
    pub seen: u32,
    /// The value that would have released the task.
    pub expected: u32,
    /// How long the rank had waited, in milliseconds.
    pub waited_ms: u64,
}

impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rank {} waited {} ms in {} for {}: saw {}, expected {}",
            self.rank, self.waited_ms, self.task, self.counter, self.seen, self.expected
        )
    }
}

fn list(stalls: &[Stall]) -> String {
    stalls.iter().map(Stall::to_string).collect::<Vec<_>>().join("; ")
}
