//! Symmetric memory: the buffers that every rank can address, plain memory shared by the workers of one process.
//!
//! A buffer has no owner among the tasks. Who may read or write which rows, and when, is the protocol's matter
//! (`kodkod_core::program`); here are only allocation, reuse and the count of bytes.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

const ALIGN: usize = 4096;

/// Hands out buffers, takes them back for reuse, and counts the bytes it holds.
#[derive(Default)]
pub(crate) struct Arena {
    spare: Mutex<Vec<Block>>,
    held: AtomicUsize,
    peak: AtomicUsize,
}

struct Block {
    pointer: NonNull<u8>,
    bytes: usize,
}
// SAFETY: a block is plain memory with one owner.
unsafe impl Send for Block {}
// SAFETY: a shared block is only ever read for its address and size.
unsafe impl Sync for Block {}

impl Arena {
    /// A buffer of at least `len` elements, zeros or what its last user left.
    pub(crate) fn take<T>(self: &Arc<Self>, len: usize) -> Buffer<T> {
        let bytes = (len * size_of::<T>()).max(1).next_multiple_of(ALIGN);
        let mut spare = self.spare.lock().expect("no holder of this lock panics");
        let fits = |b: &Block| b.bytes >= bytes && b.bytes <= bytes * 2;
        let best = (0..spare.len()).filter(|&i| fits(&spare[i])).min_by_key(|&i| spare[i].bytes);
        let block = match best {
            Some(i) => spare.swap_remove(i),
            None => self.allocate(bytes),
        };
        drop(spare);
        Buffer { block: Some(block), arena: self.clone(), _elements: PhantomData }
    }

    /// Bytes held now, and the most there ever were.
    pub(crate) fn bytes(&self) -> (usize, usize) {
        (self.held.load(Ordering::Relaxed), self.peak.load(Ordering::Relaxed))
    }

    /// Frees the buffers that wait for reuse.
    pub(crate) fn trim(&self) {
        for block in self.spare.lock().expect("no holder of this lock panics").drain(..) {
            self.free(&block);
        }
    }

    fn allocate(&self, bytes: usize) -> Block {
        let layout = Layout::from_size_align(bytes, ALIGN).expect("sizes of checked shapes fit");
        // SAFETY: the size is not 0.
        let pointer = unsafe { alloc_zeroed(layout) };
        let Some(pointer) = NonNull::new(pointer) else { std::alloc::handle_alloc_error(layout) };
        let held = self.held.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(held, Ordering::Relaxed);
        Block { pointer, bytes }
    }

    fn free(&self, block: &Block) {
        let layout = Layout::from_size_align(block.bytes, ALIGN).expect("it was allocated with this layout");
        // SAFETY: allocated in `allocate` with this layout, and freed once: the block is gone from the arena.
        unsafe { dealloc(block.pointer.as_ptr(), layout) };
        self.held.fetch_sub(block.bytes, Ordering::Relaxed);
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.trim();
    }
}

/// Elements of symmetric memory; they go back to the arena when dropped.
pub(crate) struct Buffer<T> {
    block: Option<Block>,
    arena: Arc<Arena>,
    _elements: PhantomData<T>,
}

impl<T> Buffer<T> {
    /// The first element.
    pub(crate) fn as_ptr(&self) -> *mut T {
        self.block.as_ref().expect("a buffer has its block until it is dropped").pointer.as_ptr().cast()
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.arena.spare.lock().expect("no holder of this lock panics").push(block);
        }
    }
}
