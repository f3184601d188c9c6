//! Memory that ranks which are processes reach of each other: one allocation a rank, mapped into all, by CUDA IPC or in a way of
//! the caller's.
//!
//! ```text
//! words   what outlasts a pass: who has met, who has given up
//! places  of the layer whose pass runs: counters, slots, rows and routes that are staged, the shared experts' sums
//! ```
//!
//! Layers of a group use it one after the other. How much one needs follows from its shape and all ranks' token counts, so
//! every rank knows without being told.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use kodkod_core::{Knobs, Precision, Shape, Stall};

use crate::driver::{Buffer, Device, IpcHandle, Mapped, Stream};
use crate::error::{Error, Result};
use crate::memory::{Reached, Room, Sizes, Words};

/// Where the memory comes from that ranks which are processes reach of each other.
pub trait PeerAllocator: Debug + Send + Sync {
    /// In a few words, the same on all ranks of a group: `CUDA IPC`.
    fn name(&self) -> &str;

    /// `bytes` for this rank, which the others do not reach yet. All ranks ask for as many, and each of them may fail.
    ///
    /// # Errors
    /// Why there are none. [`Error::Driver`] whose text is `out of memory` where memory that is given back would help.
    fn allocate(&self, device: &Arc<Device>, bytes: usize) -> Result<Box<dyn PeerAllocation>>;
}

/// One rank's memory, freed when it is dropped.
///
/// # Safety
/// From [`PeerAllocation::address`] on there are the bytes that were asked for, on the device that they were asked for, and
/// from each address of [`PeerAllocation::map`] on those of that rank, as this rank's GPU reaches them: until
/// [`PeerAllocation::unmap`], or this is dropped. Kernels may read and write all of them, and so may atomic operations on another GPU.
pub unsafe trait PeerAllocation: Debug + Send {
    /// The GPU's address of the first byte, a multiple of 128.
    fn address(&self) -> u64;

    /// What the other ranks' `map` needs of this one, without tabs and newlines.
    ///
    /// # Errors
    /// Why the memory cannot be shared.
    fn export(&self) -> Result<String>;

    /// Makes the others' memory reachable, by what each rank exports, this one too, and gives each rank's address. All ranks
    /// call it together, each for an allocation of the same size.
    ///
    /// # Errors
    /// The rank whose memory is out of reach, where one is to blame, and why.
    fn map(&mut self, rank: usize, exported: &[String]) -> Result<Vec<u64>, (Option<usize>, Error)>;

    /// The others may free theirs.
    fn unmap(&mut self);
}

/// A plain allocation of the driver, which CUDA IPC maps into other processes of the host.
#[derive(Debug, Clone, Copy, Default)]
pub struct CudaIpc;

#[derive(Debug)]
struct IpcAllocation {
    /// Closed before the own allocation is freed.
    others: Vec<Mapped>,
    own: Buffer<u8>,
    device: Arc<Device>,
}

impl PeerAllocator for CudaIpc {
    fn name(&self) -> &str {
        "CUDA IPC"
    }

    fn allocate(&self, device: &Arc<Device>, bytes: usize) -> Result<Box<dyn PeerAllocation>> {
        device.make_current()?;
        Ok(Box::new(IpcAllocation { others: vec![], own: Buffer::new(bytes)?, device: device.clone() }))
    }
}

// SAFETY: `own` has as many bytes on `device`, and the driver aligns it to 256 bytes; it and what is opened of the others' live
// as long as the driver's handles in `own` and `others`.
unsafe impl PeerAllocation for IpcAllocation {
    fn address(&self) -> u64 {
        self.own.address()
    }

    fn export(&self) -> Result<String> {
        self.device.make_current()?;
        let (handle, offset) = self.own.export()?;
        Ok(text(&handle, offset))
    }

    fn map(&mut self, rank: usize, exported: &[String]) -> Result<Vec<u64>, (Option<usize>, Error)> {
        self.device.make_current().map_err(|e| (None, e))?;
        let mut addresses = Vec::new();
        for (other, exported) in exported.iter().enumerate() {
            if other == rank {
                addresses.push(self.own.address());
                continue;
            }
            let no_handle =
                || Error::from(kodkod_core::Error::Internal(format!("{exported:?} is no handle")));
            let (handle, offset) = parse(exported).ok_or_else(|| (Some(other), no_handle()))?;
            let mapped = Mapped::open(&handle).map_err(|e| (Some(other), e))?;
            addresses.push(mapped.address() + offset);
            self.others.push(mapped);
        }
        Ok(addresses)
    }

    fn unmap(&mut self) {
        self.others.clear();
    }
}

fn text(IpcHandle(handle): &IpcHandle, offset: u64) -> String {
    let handle: String = handle.iter().map(|b| format!("{b:02x}")).collect();
    format!("{handle} {offset}")
}

fn parse(text: &str) -> Option<(IpcHandle, u64)> {
    let (handle, offset) = text.split_once(' ')?;
    let mut bytes = [0; 64];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(handle.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some((IpcHandle(bytes), offset.parse().ok()?))
}

/// A rank's own, and what it has mapped of the others'.
#[derive(Debug)]
pub struct SymmetricMemory {
    rank: usize,
    words: Words,
    /// Of each rank, once all are mapped.
    addresses: Vec<u64>,
    own: Box<dyn PeerAllocation>,
    bytes: usize,
    /// For what must happen while kernels run.
    stream: Stream,
    device: Arc<Device>,
}

/// The driver cuts smaller allocations from one of this size, and exports that as a whole.
const LEAST: usize = 2 << 20;
/// What addresses are a multiple of: a line of the L2 cache.
const ALIGNMENT: u64 = 128;

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
    pub fn new(
        memory: &dyn PeerAllocator,
        device: &Arc<Device>,
        rank: usize,
        ranks: usize,
        bytes: usize,
    ) -> Result<Self> {
        let own = memory.allocate(device, bytes)?;
        check_own(own.address())?;
        // The caller's code may have made another context current, and may fill the memory in a stream of its own.
        device.make_current()?;
        device.synchronize()?;
        let words = Words::new(&mut Room::Within { base: own.address(), used: 0 }, ranks)?;
        let stream = Stream::new()?;
        words.clear(&stream)?;
        Ok(SymmetricMemory { rank, words, addresses: vec![], own, bytes, stream, device: device.clone() })
    }

    /// The rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Its bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// What another process needs to map it.
    ///
    /// # Errors
    /// As for [`PeerAllocation::export`].
    pub fn export(&self) -> Result<String> {
        self.own.export()
    }

    /// Maps the others' memory, by what each rank exports. All ranks call it together.
    ///
    /// # Errors
    /// As for [`PeerAllocation::map`].
    pub fn map(&mut self, exported: &[String]) -> Result<(), (Option<usize>, Error)> {
        let addresses = self.own.map(self.rank, exported)?;
        check_all(&addresses, self.rank, exported.len(), self.own.address()).map_err(|e| (None, e))?;
        self.device.make_current().map_err(|e| (None, e))?;
        self.addresses = addresses;
        Ok(())
    }

    /// Closes what is mapped of the others', which they may free then, and leaves what is freed when it is dropped, once the
    /// others have closed it. All passes must have ended.
    pub fn unmap(mut self) -> Box<dyn PeerAllocation> {
        self.own.unmap();
        self.own
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
                Room::Within { used, .. } if used > self.bytes => {
                    let why = format!("{used} bytes of symmetric memory, and there are {}", self.bytes);
                    Err(kodkod_core::Error::Internal(why).into())
                }
                _ => Ok(reached),
            }
        };
        self.addresses.iter().enumerate().map(place).collect()
    }
}

fn check_own(address: u64) -> Result<()> {
    match address.is_multiple_of(ALIGNMENT) && address > 0 {
        true => Ok(()),
        false => {
            let why = format!("symmetric memory at {address:#x}: a multiple of {ALIGNMENT} is needed");
            Err(kodkod_core::Error::Internal(why).into())
        }
    }
}

/// What a map of `ranks` ranks gave.
fn check_all(addresses: &[u64], rank: usize, ranks: usize, own: u64) -> Result<()> {
    if addresses.len() != ranks || addresses[rank] != own {
        let why =
            format!("symmetric memory of {ranks} ranks, rank {rank} at {own:#x}, mapped at {addresses:x?}");
        return Err(kodkod_core::Error::Internal(why).into());
    }
    addresses.iter().try_for_each(|&address| check_own(address))
}

#[cfg(test)]
mod tests {
    use kodkod_core::Shared;

    use super::*;

    #[test]
    fn handles_come_back_from_their_text() {
        let handle = IpcHandle(std::array::from_fn(|at| (at * 37) as u8));
        let text = text(&handle, 4096);
        assert_eq!(parse(&text), Some((handle, 4096)));
        for wrong in ["", "00 1", &text[..40], &text.replace(' ', ""), &text.replacen("00", "0g", 1)] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    /// What a caller's memory may not say.
    #[test]
    fn addresses_that_cannot_be_are_refused() {
        let (own, other) = (7 << 20, 9 << 20);
        assert!(check_all(&[other, own], 1, 2, own).is_ok());
        let wrong: [&[u64]; 5] = [&[], &[own], &[own, other], &[0, own], &[other + 64, own]];
        for addresses in wrong {
            let error = check_all(addresses, 1, 2, own).unwrap_err();
            println!("{error}");
            assert!(error.to_string().contains("symmetric memory"), "{addresses:x?}: {error}");
        }
    }

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
