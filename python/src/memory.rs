//! The caller's memory, as addresses and lengths.

use kodkod::{Error, Result};

/// Where elements begin, and how many there are.
pub(crate) type Span = (usize, usize);

fn check<T>(name: &str, (address, len): Span) -> Result<*mut T> {
    let pointer = std::ptr::with_exposed_provenance_mut::<T>(address);
    if len == 0 {
        return Ok(std::ptr::dangling_mut());
    }
    if pointer.is_null() || !pointer.is_aligned() || len > isize::MAX as usize / size_of::<T>() {
        let allowed = format!("an aligned address of {len} elements is needed");
        return Err(Error::invalid(format!("address of {name}"), format!("{address:#x}"), allowed));
    }
    Ok(pointer)
}

/// Elements to read.
///
/// # Safety
/// They are there, initialised, and nobody writes them for the life of the slice.
pub(crate) unsafe fn elements<'a, T>(name: &str, span: Span) -> Result<&'a [T]> {
    let pointer = check::<T>(name, span)?;
    // SAFETY: the caller's promise; null and unaligned addresses were refused.
    Ok(unsafe { std::slice::from_raw_parts(pointer, span.1) })
}

/// Elements to write.
///
/// # Safety
/// They are there, and nobody else reads or writes them for the life of the slice.
pub(crate) unsafe fn elements_mut<'a, T>(name: &str, span: Span) -> Result<&'a mut [T]> {
    let pointer = check::<T>(name, span)?;
    // SAFETY: the caller's promise; null and unaligned addresses were refused.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer, span.1) })
}
