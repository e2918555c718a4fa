//! Stream capture.

use shim_ffi::CUresult;

use crate::driver::Driver;

/// Refuses a call that a capture in progress does not allow.
///
/// # Errors
/// `STREAM_CAPTURE_UNSUPPORTED`.
pub fn forbid_unsafe(_driver: &Driver) -> Result<(), CUresult> {
    Ok(())
}
