//! What a forward leaves for its backward, as a tensor: a DLPack capsule of one int64 whose deleter drops it.
//!
//! The tensor's *address* is the key, and its value is always 0. So a compiler may carry it around as it likes, and equal
//! calls give equal tensors; a copy has another address, is not found, and costs a second forward. An address in the
//! table cannot be anyone else's, since the memory there is freed after its entry.

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use kodkod::{Context, RankContext, bf16};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::gpu::Lease;
use crate::gpu_rank;

/// A context: on the CPU in either precision, or a slot on a GPU.
pub(crate) enum Kept {
    F32(Left<f32>),
    Bf16(Left<bf16>),
    Gpu(Lease),
    GpuRank(gpu_rank::Left),
}

/// What the forward of a whole layer, or of one rank's part of it, left.
pub(crate) enum Left<T> {
    Whole(Context<T>),
    Part(RankContext<T>),
}

static TABLE: LazyLock<Mutex<HashMap<usize, Arc<Kept>>>> = LazyLock::new(Mutex::default);

fn table() -> MutexGuard<'static, HashMap<usize, Arc<Kept>>> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The context of the tensor whose element is at `address`, if it is one.
pub(crate) fn find(address: usize) -> Option<Arc<Kept>> {
    table().get(&address).cloned()
}

// DLPack's structures, version 0: https://dmlc.github.io/dlpack/latest/c_api.html
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    type_code: u8,
    type_bits: u8,
    type_lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct DlManagedTensor {
    tensor: DlTensor,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManagedTensor)>,
}

const CPU: i32 = 1;
const SIGNED: u8 = 0;
const NAME: &CStr = c"dltensor";

/// The managed tensor comes first, so that its address is that of the whole.
#[repr(C)]
struct Owner {
    managed: DlManagedTensor,
    value: i64,
    shape: [i64; 1],
    strides: [i64; 1],
}

/// A capsule that owns `kept` until the tensor made of it is freed.
pub(crate) fn capsule(py: Python<'_>, kept: Kept) -> PyResult<Py<PyAny>> {
    let owner = Box::into_raw(Box::new(Owner {
        managed: DlManagedTensor {
            tensor: DlTensor {
                data: std::ptr::null_mut(),
                device_type: CPU,
                device_id: 0,
                ndim: 1,
                type_code: SIGNED,
                type_bits: 64,
                type_lanes: 1,
                shape: std::ptr::null_mut(),
                strides: std::ptr::null_mut(),
                byte_offset: 0,
            },
            manager: std::ptr::null_mut(),
            deleter: Some(delete),
        },
        value: 0,
        shape: [1],
        strides: [1],
    }));
    // SAFETY: `owner` was just made, and nobody else has it.
    unsafe {
        (*owner).managed.tensor.data = (&raw mut (*owner).value).cast();
        (*owner).managed.tensor.shape = (&raw mut (*owner).shape).cast();
        (*owner).managed.tensor.strides = (&raw mut (*owner).strides).cast();
        table().insert((&raw const (*owner).value).addr(), Arc::new(kept));
    }
    // SAFETY: the interpreter's lock is held; the name is static; the destructor fits what the capsule holds.
    let capsule = unsafe { ffi::PyCapsule_New(owner.cast(), NAME.as_ptr(), Some(abandon)) };
    // SAFETY: null is Python's sign of an error that is set.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }.map(Bound::unbind).inspect_err(|_| {
        // SAFETY: no capsule took `owner`.
        unsafe { delete(owner.cast()) }
    })
}

/// The tensor's memory is freed. Runs on any thread, with or without the interpreter's lock.
///
/// # Safety
/// `managed` is the start of an [`Owner`] from [`capsule`], not deleted before.
unsafe extern "C" fn delete(managed: *mut DlManagedTensor) {
    let owner: *mut Owner = managed.cast();
    // SAFETY: the caller's promise. The address is only taken.
    let address = unsafe { (&raw const (*owner).value).addr() };
    let kept = table().remove(&address);
    // SAFETY: it came from `Box::into_raw` there, and nobody uses it any more.
    drop(unsafe { Box::from_raw(owner) });
    drop(kept); // after the table's lock, as it may free much
}

/// A capsule is gone. One that became a tensor has another name by then, and its tensor owns the memory.
///
/// # Safety
/// Python calls it with a capsule from [`capsule`].
unsafe extern "C" fn abandon(capsule: *mut ffi::PyObject) {
    // SAFETY: it is a capsule, and the lock is held; the pointer is what was put in.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1
            && let Some(owner) = NonNull::new(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()))
        {
            delete(owner.as_ptr().cast());
        }
    }
}
