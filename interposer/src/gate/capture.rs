//! Streams that are being captured into graphs. What is captured is not work yet: it is neither
//! gated nor marked; other streams' work is, also meanwhile.

//!
//! A capture is known by the stream in which it began. It ends with `cuStreamEndCapture` of that
//! stream, whatever that answers, if the driver says so; or with the stream, or with its context.
//! Streams that joined it may come and go.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use shim_ffi::*;

use crate::driver::real;
use crate::gate::streams::PER_THREAD;
use crate::ground::thread::thread;

/// Captures in progress in this process, and such that are about to begin. Not 0: submissions take
/// the slow path and ask.
static ACTIVE: AtomicU32 = AtomicU32::new(0);

/// A stream in which a capture began.
struct Origin {
    /// 0: none.
    stream: AtomicUsize,
    /// Of which context.
    context: AtomicUsize,
    /// Where it is a thread's default stream: which thread's.
    thread: AtomicUsize,
}

/// Captures at once that are known by their streams. Of more than that the ends are only counted.
const ORIGINS: usize = 64;
static STARTED: [Origin; ORIGINS] = [const {
    Origin {
        stream: AtomicUsize::new(0),
        context: AtomicUsize::new(0),
        thread: AtomicUsize::new(0),
    }
}; ORIGINS];
/// In place of a stream while the rest of an entry is written.
const WRITING: usize = usize::MAX;
/// Captures that found no place.
static UNKNOWN: AtomicU32 = AtomicU32::new(0);

/// In a forked child: the parent's captures are not ours.
pub(crate) fn forget() {
    ACTIVE.store(0, Ordering::Relaxed);
    UNKNOWN.store(0, Ordering::Relaxed);
    for origin in &STARTED {
        origin.stream.store(0, Ordering::Relaxed);
    }
}

/// Whether any stream of this process is being captured.
#[inline(always)]
pub(crate) fn any() -> bool {
    ACTIVE.load(Ordering::Relaxed) != 0
}

/// Before a call that begins a capture: from here on a thread that marks a stream asks first.
pub(crate) fn before_begin() {
    ACTIVE.fetch_add(1, Ordering::SeqCst);
}

/// After a call that begins a capture in `stream` of `context`.
pub(crate) fn after_begin(stream: usize, context: usize, result: CUresult) {
    if !result.is_ok() {
        ended();
        return;
    }
    for origin in &STARTED {
        if origin
            .stream
            .compare_exchange(0, WRITING, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
        {
            origin.context.store(context, Ordering::Relaxed);
            origin.thread.store(whose(stream), Ordering::Relaxed);
            origin.stream.store(stream, Ordering::Release);
            return;
        }
    }
    UNKNOWN.fetch_add(1, Ordering::Relaxed);
}

/// Which thread's a stream is, as a number; 0: of no one thread.
fn whose(stream: usize) -> usize {
    match stream {
        PER_THREAD => std::ptr::from_ref(thread()).addr(),
        _ => 0,
    }
}

/// After a call that ends the capture of `stream`. It may end with an error, and it may go on with
/// one.
pub(crate) fn after_end(stream: usize, result: CUresult) {
    let whose = whose(stream);
    let found = STARTED.iter().find(|origin| {
        origin.stream.load(Ordering::Acquire) == stream
            && origin.thread.load(Ordering::Relaxed) == whose
    });
    match found {
        Some(origin) if result.is_ok() || !is_capturing(stream) => end(origin, stream),
        // One that was never known, or whose stream has joined the capture of another.
        None if result.is_ok() => forget_unknown(),
        _ => {}
    }
}

/// A stream has been destroyed.
pub(crate) fn stream_gone(stream: usize) {
    if any() {
        end_where(|origin| origin.stream.load(Ordering::Acquire) == stream);
    }
}

/// A context has been destroyed.
pub(crate) fn context_gone(context: usize) {
    if any() {
        end_where(|origin| origin.context.load(Ordering::Relaxed) == context);
    }
}

fn end_where(is_it: impl Fn(&Origin) -> bool) {
    for origin in &STARTED {
        let stream = origin.stream.load(Ordering::Acquire);
        if !matches!(stream, 0 | WRITING) && is_it(origin) {
            end(origin, stream);
        }
    }
}

fn end(origin: &Origin, stream: usize) {
    if origin
        .stream
        .compare_exchange(stream, 0, Ordering::AcqRel, Ordering::Relaxed)
        .is_ok()
    {
        ended();
    }
}

fn forget_unknown() {
    let one_less = |count: u32| count.checked_sub(1);
    // A program may end a capture that we did not see begin.
    if UNKNOWN
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less)
        .is_ok()
    {
        ended();
    }
}

fn ended() {
    let _ = ACTIVE.fetch_update(Ordering::SeqCst, Ordering::Relaxed, |count| {
        count.checked_sub(1)
    });
}

/// Whether `stream` (1 and 2 for the default streams) is being captured. Asked only while some
/// capture is in progress.
pub(crate) fn is_capturing(stream: usize) -> bool {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let handle = CUstream(std::ptr::without_provenance_mut(stream));
    // SAFETY: valid pointer to a local; the query is allowed during captures and invalidates none.
    let result = thread().own(|| unsafe { real::cuStreamIsCapturing(handle, &raw mut status) });
    // The legacy stream cannot be asked while a blocking stream is captured: treat it like a
    // captured one.
    !result.is_ok() || status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
}

/// Runs own driver calls so that they cannot invalidate a capture that this or another thread has
/// in progress.
pub(crate) fn relaxed<T>(calls: impl FnOnce() -> T) -> T {
    let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    let _inside = thread().enter();
    // SAFETY: valid pointer to a local; swaps this thread's mode.
    let swapped = unsafe { real::cuThreadExchangeStreamCaptureMode(&raw mut mode) }.is_ok();
    let result = calls();
    if swapped {
        // SAFETY: as above; puts back what was there.
        let _ = unsafe { real::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test: the captures are the process's.
    #[test]
    fn a_capture_is_over_with_its_stream_its_context_or_the_process() {
        const OK: CUresult = CUresult::CUDA_SUCCESS;
        let begin = |stream, result| {
            before_begin();
            after_begin(stream, 0xc0, result);
        };
        begin(0x100, CUresult::CUDA_ERROR_ILLEGAL_STATE);
        assert!(!any(), "it did not begin");
        begin(0x100, OK);
        begin(0x200, OK);
        stream_gone(0x300);
        context_gone(0xc1);
        stream_gone(0x100);
        assert!(any(), "one goes on");
        after_end(0x100, OK);
        assert!(any(), "it was over before");
        after_end(0x200, OK);
        assert!(!any());
        begin(0x100, OK);
        begin(PER_THREAD, OK);
        context_gone(0xc0);
        assert!(!any());
        // More than have a place.
        for stream in 0..ORIGINS + 3 {
            begin(0x1000 + stream, OK);
        }
        for stream in 0..ORIGINS + 3 {
            assert!(any());
            after_end(0x1000 + stream, OK);
        }
        assert!(!any());
        begin(0x100, OK);
        forget();
        assert!(!any(), "a forked child has none");
        begin(0x100, OK);
        stream_gone(0x100);
        assert!(!any());
    }
}
