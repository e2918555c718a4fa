//! Captures that are about to begin, and calls of ours that would invalidate one.
//!
//! To wait for a whole context the driver is asked to record an event behind everything in it
//! (`cuCtxRecordEvent`), which invalidates every capture there, whatever the thread's mode. While
//! the quiesce gate is closed none can begin. While it is open a look at whether one is in progress
//! is not enough: one may begin between the look and the call. So for the length of the call,
//! microseconds, beginnings wait: one side counts its capture and then looks here, the other says
//! that it is about to and then looks at the count.

use std::sync::atomic::{AtomicU32, Ordering, fence};

use rustix::thread::futex;

use crate::gate::capture;
use crate::ground::clock::now_ns;
use crate::ground::process;
use crate::ground::stretch::{Of, here};
use crate::ground::thread::thread;

/// Calls under way that no capture survives.
static RECORDING: AtomicU32 = AtomicU32::new(0);
/// TIMEOUT: how long a capture waits for such a call, which does not wait for the device.
const PATIENCE_NS: u64 = 10_000_000_000;

/// In a forked child: a thread that was recording is not there.
pub(super) fn forget() {
    RECORDING.store(0, Ordering::Relaxed);
}

/// Makes `calls`, which do not wait for the device, while no capture is in progress and none
/// begins; `None`: one is in progress.
pub(super) fn held_off<T>(calls: impl FnOnce() -> T) -> Option<T> {
    let thread = thread();
    thread.counts.give_back();
    // SYNC(recording): count, then look at the captures; pairs with `before_capture`, which counts
    // one and then looks here. Of the two one sees the other.
    let recording = thread.counts.begin(Of::Number(&RECORDING), here());
    fence(Ordering::SeqCst);
    let made = (!capture::any()).then(calls);
    // SYNC(recording): the calls end before a capture may begin.
    fence(Ordering::SeqCst);
    drop(recording);
    let _ = futex::wake(&RECORDING, futex::Flags::PRIVATE, i32::MAX as u32);
    made
}

/// Before a call of the program's that begins a capture, which is counted already.
pub(crate) fn before_capture() {
    if !super::active() {
        return;
    }
    // SYNC(recording): see `held_off`.
    fence(Ordering::SeqCst);
    let until_ns = now_ns() + PATIENCE_NS;
    loop {
        let seen = RECORDING.load(Ordering::SeqCst);
        if seen == 0 || now_ns() >= until_ns || process::exiting() {
            return;
        }
        let step = rustix::time::Timespec {
            tv_sec: 0,
            tv_nsec: 50_000_000,
        };
        let _ = futex::wait(&RECORDING, futex::Flags::PRIVATE, seen, Some(&step));
    }
}
