//! Why a call goes to the driver without what its hook would have done, and what becomes of a hook
//! that fails.
//!
//! A panic ends where it happens: the call goes on, the thread is looked up again at its next
//! submission, and the arbiter hears of it once for each symbol. What must not be left out is tried
//! once more.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use shim_ffi::counts::Note;
use shim_ffi::*;

use crate::attachment::client;
use crate::driver::trace;
use crate::ground::fault;
use crate::ground::thread::thread;

/// Why a call goes to the driver as it was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reason {
    /// It is a call of our own.
    Own,
    /// It is recorded into a graph, and so is no work yet.
    Captured,
    /// No arbiter governs this process.
    Ungoverned,
    /// The device is not one of the job's.
    OtherDevice,
    /// The arbiter is gone or hangs, and the job may go on without it.
    WithoutArbiter,
    /// The hook failed.
    Failed,
}

impl Reason {
    const fn note(self) -> Note {
        match self {
            Self::Own => Note::PassedOwn,
            Self::Captured => Note::PassedCaptured,
            Self::Ungoverned => Note::PassedUngoverned,
            Self::OtherDevice => Note::PassedOtherDevice,
            Self::WithoutArbiter => Note::PassedWithoutArbiter,
            Self::Failed => Note::PassedFailed,
        }
    }
}

/// Notes, for a diagnosis, why a call passes.
#[inline]
pub(crate) fn passed(reason: Reason) {
    trace::note(reason.note());
}

/// Runs a part of a hook that makes no call of the program's. A panic ends here.
#[inline(always)]
pub(crate) fn ours<T>(symbol: Symbol, part: impl FnOnce() -> T) -> Result<T, Reason> {
    let part = || {
        fault::point(symbol);
        part()
    };
    caught(symbol as usize, part)
}

/// As [`ours`], for what must not be left out.
#[inline(always)]
pub(crate) fn insist<T>(symbol: Symbol, part: impl Fn() -> T) -> Result<T, Reason> {
    ours(symbol, &part).or_else(|_| ours(symbol, &part))
}

/// Runs `part`; a panic ends here, and is reported under the number of a row of the table.
#[inline(always)]
pub(crate) fn caught<T>(row: usize, part: impl FnOnce() -> T) -> Result<T, Reason> {
    catch_unwind(AssertUnwindSafe(part)).map_err(|_| {
        failed(row);
        Reason::Failed
    })
}

/// Runs a hook that makes the program's call itself. One that fails before the driver was called is
/// tried once more, and left out when it fails again; what the driver has answered stands.
#[inline(always)]
pub(crate) fn hooked(
    symbol: Symbol,
    hook: impl Fn() -> CUresult,
    driver: impl FnOnce() -> CUresult,
) -> CUresult {
    let thread = thread();
    // CAST: fewer symbols than that.
    let outer = thread.begin_hook(symbol as u32);
    let mut failures = 0;
    let result = loop {
        let outcome = ours(symbol, || {
            let result = hook();
            fault::point(symbol);
            result
        });
        if let Ok(result) = outcome {
            break Some(result);
        }
        failures += 1;
        match thread.answer() {
            None if failures < TRIES => {}
            None => break None,
            Some(status) => break Some(CUresult(status)),
        }
    };
    thread.end_hook(outer);
    result.unwrap_or_else(driver)
}

/// How often a hook is tried that fails before the driver was called.
const TRIES: u32 = 2;

/// The number that stands for all reports of NVML, beside those of the table's rows.
pub(crate) const NVML: usize = COUNT;

/// Hooks whose failure was reported, a bit for each.
static REPORTED: [AtomicU64; COUNT / 64 + 1] = [const { AtomicU64::new(0) }; COUNT / 64 + 1];

/// A hook has failed: what the thread knows may be wrong, and the arbiter is to know.
#[cold]
#[inline(never)]
fn failed(row: usize) {
    let _ = catch_unwind(|| {
        let thread = thread();
        thread.give_credit(0);
        thread.context_known.set(false);
        passed(Reason::Failed);
        let Some(attached) = client::current() else {
            return;
        };
        let bit = 1 << (row % 64);
        let before = REPORTED
            .get(row / 64)
            .map(|word| word.fetch_or(bit, Relaxed));
        if before.is_some_and(|before| before & bit == 0) {
            // CAST: fewer rows than that.
            attached.tell_failed_hook(row as u32);
        }
    });
}

/// In a forked child: nothing was reported to its arbiter.
pub(crate) fn forget() {
    for word in &REPORTED {
        word.store(0, Relaxed);
    }
}
