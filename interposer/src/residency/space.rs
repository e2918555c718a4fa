//! Waiting for device memory that the quota allows and the device does not have now: another
//! tenant's may be about to leave.

use std::cell::Cell;

use shim_ffi::CUresult;

use super::news::Wait;
use super::tuning;
use crate::attachment::client;
use crate::gate::quiesce;
use crate::ground::clock::now_ns;
use crate::ground::process;
use crate::metering::{Meter, granules};

/// Whether a call of this process that finds no memory on the device waits for some: its own can be
/// moved, or the arbiter has others shrink for it.
pub(crate) fn waits() -> bool {
    super::active() || others_leave()
}

fn others_leave() -> bool {
    client::current().is_some_and(|attached| attached.end.arbiter.residency().waits)
}

/// Whether the driver has had no memory for a call.
#[derive(Debug, Default)]
pub(crate) struct Short(Cell<bool>);

impl Short {
    /// Takes note of what the driver says, and passes it on.
    #[inline]
    pub(crate) fn note(&self, result: CUresult) -> CUresult {
        if result == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            self.0.set(true);
        }
        result
    }
}

/// Makes a call that takes `bytes` of the current device's memory, with its metering: again and
/// again while the quota allows them, the device has none, and others shrink for this job. In
/// processes whose own memory stays: there the arena waits, outside of the quiesce gate.
#[inline]
pub(crate) fn with_space(bytes: u64, attempt: impl Fn(&Short) -> CUresult) -> CUresult {
    let short = Short::default();
    let result = attempt(&short);
    if !short.0.get() {
        return result;
    }
    insist(bytes, &short, result, attempt)
}

#[cold]
#[inline(never)]
fn insist(
    bytes: u64,
    short: &Short,
    first: CUresult,
    attempt: impl Fn(&Short) -> CUresult,
) -> CUresult {
    let meter = match Meter::here() {
        Ok(meter) if !super::active() && others_leave() => meter,
        _ => return first,
    };
    let mut space = SpaceWait::begin(&meter, granules(bytes));
    let mut result = first;
    while result == CUresult::CUDA_ERROR_OUT_OF_MEMORY && short.0.replace(false) && space.wait() {
        result = attempt(short);
    }
    result
}

/// Makes a call of the program's that takes `bytes` of a device's memory, which the quota allows,
/// again and again while the device has none: another tenant's may be about to leave.
pub(crate) fn patiently(meter: &Meter, bytes: u64, call: impl Fn() -> CUresult) -> CUresult {
    let mut space: Option<SpaceWait<'_>> = None;
    loop {
        let result = call();
        if result != CUresult::CUDA_ERROR_OUT_OF_MEMORY || !waits() {
            return result;
        }
        if !space
            .get_or_insert_with(|| SpaceWait::begin(meter, bytes))
            .wait()
        {
            return result;
        }
    }
}

// CAST: half a minute.
const SPACE_NS: u64 = tuning::SPACE.as_nanos() as u64;
/// TIMEOUT: a wait that begins again with each return of the job's memory ends after so many times
/// its length.
const MOST: u64 = 10;

/// A thread that waits for device memory, as the arbiter sees it.
pub(super) struct SpaceWait<'a> {
    meter: &'a Meter,
    bytes: u64,
    until_ns: u64,
    /// Not even when it begins again.
    at_most_ns: u64,
    /// What the quiesce gate has been through when the wait began.
    quiesce: u32,
    news: Wait,
}

impl<'a> SpaceWait<'a> {
    pub(super) fn begin(meter: &'a Meter, bytes: u64) -> Self {
        let end = &meter.attached().end;
        if let Some(want) = end.client.want(meter.device()) {
            want.begin_waiting_for_space(bytes);
            end.ring();
        }
        let now = now_ns();
        Self {
            meter,
            bytes,
            until_ns: now + SPACE_NS,
            at_most_ns: now + MOST * SPACE_NS,
            quiesce: quiesce::changes(),
            news: Wait::begin(std::time::Duration::from_millis(20)),
        }
    }

    /// Pauses before the next try; false where there is to be none.
    pub(super) fn wait(&mut self) -> bool {
        let now = now_ns();
        // Its own memory was away meanwhile: the time that it spent before the quiesce gate was not
        // spent waiting for space.
        if self.quiesce != quiesce::changes() {
            self.quiesce = quiesce::changes();
            self.until_ns = (now + SPACE_NS).min(self.at_most_ns);
        }
        let same = client::current().is_some_and(|now| std::ptr::eq(now, self.meter.attached()));
        if !waits()
            || now > self.until_ns
            || process::exiting()
            || !same
            || self.meter.attached().is_lost()
        {
            return false;
        }
        let _ = self.news.for_news(|| Ok(process::exiting()));
        true
    }
}

impl Drop for SpaceWait<'_> {
    fn drop(&mut self) {
        if let Some(want) = self.meter.attached().end.client.want(self.meter.device()) {
            want.end_waiting_for_space(self.bytes);
        }
    }
}
