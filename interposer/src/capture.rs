//! Streams that are being captured into graphs. What is captured is not work yet: it is neither gated nor marked; other streams'
//! work is, also meanwhile.

use std::sync::atomic::{AtomicU32, Ordering};

use shim_ffi::*;

use crate::real;

/// Captures in progress in this process. Not 0: submissions take the slow path and ask.
static ACTIVE: AtomicU32 = AtomicU32::new(0);

/// Whether any stream of this process is being captured.
#[inline(always)]
pub(crate) fn any() -> bool {
    ACTIVE.load(Ordering::Relaxed) != 0
}

/// Before a call that begins a capture: from here on whoever marks a stream asks first.
pub(crate) fn before_begin() {
    ACTIVE.fetch_add(1, Ordering::SeqCst);
}

/// After a call that begins a capture.
pub(crate) fn after_begin(result: CUresult) {
    if !result.is_ok() {
        ended();
    }
}

/// After a call that ends a capture. A capture that was invalidated ends with an error, but it ends.
pub(crate) fn after_end(result: CUresult) {
    let ended_anyway = result.is_ok()
        || matches!(
            result,
            CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                | CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED
        );
    if ended_anyway {
        ended();
    }
}

fn ended() {
    // A program may end a capture that we did not see begin.
    let _ = ACTIVE.fetch_update(Ordering::SeqCst, Ordering::Relaxed, |count| {
        count.checked_sub(1)
    });
}

/// Whether `stream` (1 and 2 for the default streams) is being captured. Asked only while some capture is in progress.
pub(crate) fn is_capturing(stream: usize) -> bool {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let handle = CUstream(std::ptr::without_provenance_mut(stream));
    // SAFETY: valid pointer to a local; the query is allowed during captures and invalidates none.
    let result = unsafe { real::cuStreamIsCapturing(handle, &raw mut status) };
    // The legacy stream cannot be asked while a blocking stream is captured: treat it like a captured one.
    !result.is_ok() || status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
}

/// Runs own driver calls so that they cannot invalidate a capture that this or another thread has in progress.
pub(crate) fn relaxed<T>(calls: impl FnOnce() -> T) -> T {
    let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: valid pointer to a local; swaps this thread's mode.
    let swapped = unsafe { real::cuThreadExchangeStreamCaptureMode(&raw mut mode) }.is_ok();
    let result = calls();
    if swapped {
        // SAFETY: as above; puts back what was there.
        let _ = unsafe { real::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    }
    result
}
