//! Memory that ranks which are processes reach of each other: one allocation a rank, mapped into all by CUDA IPC.
//!
//! ```text
//! words   what outlasts a pass: who has met, who has given up
//! places  of the layer whose pass runs: counters, slots, rows and routes that are staged, the shared experts' sums
//! ```
//!
//! Layers of a group use it one after the other. How much one needs follows from its shape and all ranks' token counts, so
//! every rank knows without being told.

use std::sync::Arc;
use std::time::Duration;

use kodkod_core::{Knobs, Precision, Shape, Stall};

use crate::driver::{Buffer, Device, IpcHandle, Mapped, Stream};
use crate::error::Result;
use crate::memory::{Reached, Room, Sizes, Words};

/// A rank's own, and what it has mapped of the others'.
#[derive(Debug)]
pub struct SymmetricMemory {
    rank: usize,
    words: Words,
    /// Closed before the own allocation is freed.
    others: Vec<Mapped>,
    /// Of each rank, once all are mapped.
    addresses: Vec<u64>,
    own: Buffer<u8>,
    /// For what must happen while kernels run.
    stream: Stream,
    device: Arc<Device>,
}

/// The driver cuts smaller allocations from one of this size, and exports that as a whole.
const LEAST: usize = 2 << 20;

impl SymmetricMemory {
    /// How many bytes a layer needs of each rank.
    ///
    /// # Errors
    /// For a shape or knob that is not allowed on a GPU.
    pub fn bytes_for(
        shape: &Shape,
        knobs: &Knobs,
        tokens_per_rank: &[usize],
        gradients: Precision,
    ) -> Result<usize> {
        let sizes = Sizes::new(shape, knobs, tokens_per_rank)?;
        let mut most = LEAST;
        for rank in 0..tokens_per_rank.len() {
            let mut room = Room::Within { base: 0, used: 0 };
            Reached::new(&mut room, shape, &sizes, tokens_per_rank, rank, gradients, true)?;
            if let Room::Within { used, .. } = room {
                most = most.max(used);
            }
        }
        Ok(most)
    }

    /// Allocates the memory of `rank` of `ranks`; the others' are not mapped yet.
    pub fn new(device: &Arc<Device>, rank: usize, ranks: usize, bytes: usize) -> Result<Self> {
        device.make_current()?;
        let (own, stream) = (Buffer::new(bytes)?, Stream::new()?);
        let words = Words::new(&mut Room::Within { base: own.address(), used: 0 }, ranks)?;
        words.clear(&stream)?;
        let device = device.clone();
        Ok(SymmetricMemory { rank, words, others: vec![], addresses: vec![], own, stream, device })
    }

    /// The rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Its bytes.
    pub fn bytes(&self) -> usize {
        self.own.len()
    }

    /// What another process needs to map it.
    pub fn export(&self) -> Result<(IpcHandle, u64)> {
        self.device.make_current()?;
        self.own.export()
    }

    /// Maps the others' memory, by what each rank exports; that of this rank is not used.
    ///
    /// # Errors
    /// The rank, with the driver's words.
    pub fn map(&mut self, exported: &[(IpcHandle, u64)]) -> Result<(), (usize, crate::Error)> {
        let mut addresses = Vec::new();
        self.device.make_current().map_err(|e| (self.rank, e))?;
        for (rank, (handle, offset)) in exported.iter().enumerate() {
            if rank == self.rank {
                addresses.push(self.own.address());
                continue;
            }
            let mapped = Mapped::open(handle).map_err(|e| (rank, e))?;
            addresses.push(mapped.address() + offset);
            self.others.push(mapped);
        }
        self.addresses = addresses;
        Ok(())
    }

    /// Closes what is mapped of the others', which they may free then. All passes must have ended.
    pub fn unmap(&mut self) {
        self.addresses.clear();
        self.others.clear();
    }

    /// Makes this rank's kernels that wait give up, within microseconds.
    pub fn abort(&self) -> Result<()> {
        self.device.make_current()?;
        self.stream.write_word(&self.words.abort, 1)
    }

    /// What this rank waited for when a pass was given up; `None` where none was. All passes must have ended.
    pub fn stall(&self, limit: Duration) -> Result<Option<Stall>> {
        self.device.make_current()?;
        Ok(self.words.stall(self.rank, limit)?.map(|s| s.0))
    }

    /// What of each rank lies where in a pass of a layer.
    pub(crate) fn places(
        &self,
        shape: &Shape,
        sizes: &Sizes,
        tokens: &[usize],
        gradients: Precision,
    ) -> Result<Vec<Reached>> {
        let missing = |n| kodkod_core::Error::Internal(format!("symmetric memory of {n} ranks"));
        if self.addresses.len() != tokens.len() {
            return Err(missing(self.addresses.len()).into());
        }
        let place = |(rank, &base): (usize, &u64)| {
            let mut room = Room::Within { base, used: 0 };
            let reached = Reached::new(&mut room, shape, sizes, tokens, rank, gradients, true)?;
            match room {
                Room::Within { used, .. } if used > self.own.len() => {
                    let why = format!("{used} bytes of symmetric memory, and there are {}", self.own.len());
                    Err(kodkod_core::Error::Internal(why).into())
                }
                _ => Ok(reached),
            }
        };
        self.addresses.iter().enumerate().map(place).collect()
    }
}

#[cfg(test)]
mod tests {
    use kodkod_core::Shared;

    use super::*;

    /// What lies where: apart, aligned, within the bytes that are asked for, and the words first.
    #[test]
    fn places_lie_apart_within_the_memory() {
        let plain = Shape::new(64, 128, 8, 3);
        let shared = Shape { shared: Some(Shared { intermediate: 192, output_gate: true }), ..plain.clone() };
        let knobs = Knobs::for_gpu(&plain);
        for (shape, tokens) in [(&plain, vec![5, 0]), (&shared, vec![0, 700]), (&shared, vec![300, 1, 0, 9])]
        {
            for gradients in [Precision::F32, Precision::Bf16] {
                let bytes = SymmetricMemory::bytes_for(shape, &knobs, &tokens, gradients).unwrap();
                let sizes = Sizes::new(shape, &knobs, &tokens).unwrap();
                for rank in 0..tokens.len() {
                    let base = 1 << 40;
                    let mut room = Room::Within { base, used: 0 };
                    let r = Reached::new(&mut room, shape, &sizes, &tokens, rank, gradients, true).unwrap();
                    let staged = r.staged.as_ref().unwrap();
                    fn place<T: Copy>(b: &Buffer<T>) -> (u64, u64) {
                        (b.address(), (b.len() * size_of::<T>()) as u64)
                    }
                    let mut places = vec![place(&r.words.stall), place(&r.words.abort), place(&r.words.met)];
                    places.extend([
                        place(&r.words.epoch),
                        place(&r.counters),
                        place(&r.combine),
                        place(&r.d_w),
                    ]);
                    places.extend([place(&r.output_gates), place(&staged.x), place(&staged.dy)]);
                    places.extend([place(&staged.ids), place(&staged.topk_weights)]);
                    places.extend(r.shared_carry.iter().map(place));
                    places.extend(staged.shared.iter().map(place));
                    places.push(place(&staged.shared_output_gate));
                    assert_eq!(places[0].0, base);
                    places.retain(|place| place.1 > 0);
                    places.sort_unstable();
                    assert!(places.iter().all(|place| place.0 % 256 == 0));
                    assert!(places.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "{places:?}");
                    let end = places.last().map_or(0, |place| place.0 + place.1);
                    assert!(end <= base + bytes as u64, "{end} of {bytes}");
                    // The sums of the shared experts are the first rank's alone.
                    assert_eq!(staged.shared[0].is_empty(), rank > 0 || shape.shared.is_none());
                }
            }
        }
    }
}
