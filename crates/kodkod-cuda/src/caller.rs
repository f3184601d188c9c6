//! What a library that runs passes in a caller's streams asks the driver.

use std::ptr;

use cudarc::driver::sys::{self, CUresult};

use crate::driver::check;
use crate::error::Result;

/// The context that is current on this thread, or none: it is current again when this is dropped. For calls that may be about
/// another GPU than the caller's current one.
#[derive(Debug)]
pub struct CurrentContext(Option<sys::CUcontext>);

impl CurrentContext {
    /// Where there is no driver, or nobody has used it yet, there is nothing to bring back.
    pub fn keep() -> Self {
        let mut context = ptr::null_mut();
        // SAFETY: the driver is called only where it is there, and writes a local.
        let result = unsafe { sys::is_culib_present().then(|| sys::cuCtxGetCurrent(&mut context)) };
        CurrentContext((result == Some(CUresult::CUDA_SUCCESS)).then_some(context))
    }
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        if let Some(context) = self.0 {
            // SAFETY: it was current when this was made, on this thread, as a raw pointer keeps it there; null is none. Nothing
            // here destroys a context.
            let _ = unsafe { sys::cuCtxSetCurrent(context) };
        }
    }
}

/// Bytes of the current context's GPU that nobody has, and all of its bytes.
pub fn free_and_total() -> Result<(usize, usize)> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: both are locals.
    check(unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) }, "ask for free memory")?;
    Ok((free, total))
}
