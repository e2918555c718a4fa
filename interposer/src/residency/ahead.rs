//! Host copies made ready before they are needed.
//!
//! To lock the host's pages takes longer than to copy to them (some 4 GB/s against a link's 10 to
//! 55), so an eviction that has to do so first takes ten times its copies. Where the memories of a
//! device's jobs do not fit together, and the host has space for all of them, the arbiter says so,
//! and the agent makes host copies while the job computes: one chunk at a time, the one that would
//! leave first, within the host budget, with pauses, and none while a stream is being captured.
//!
//! The quiesce gate is open meanwhile, so nothing of the program's may depend on us but one thing:
//! a context is not destroyed while pages are being locked in it ([`endings`]). A thread that is
//! about to destroy one waits for the chunk that is under way, milliseconds.

use std::time::Duration;

use super::chunk::{self, Place};
use super::copy_streams::enter;
use super::host_copy::HostCopy;
use super::permit::Permits;
use super::{endings, host, last_use, tuning};
use crate::attachment::client::Attached;
use crate::gate::{capture, quiesce};
use crate::ground::process;

/// TIMEOUT: how long a copy that is made ready waits for its turn, with a context's end waiting for
/// it.
const PATIENCE: Duration = Duration::from_millis(100);
/// Host memory is left alone where there would be less of it after a chunk, in chunks.
const SPARE_CHUNKS: u64 = 8;

/// Makes one host copy; false where there is none to be made.
pub(super) fn step(attached: &Attached) -> bool {
    if !attached.end.arbiter.residency().prepare || !tuning::pins() || process::exiting() {
        return false;
    }
    let Some(_held) = endings::try_hold_off() else {
        return false;
    };
    let free = !quiesce::is_closed() && !capture::any();
    free && make_one(attached.end.arbiter.host_budget_bytes())
}

fn make_one(budget: u64) -> bool {
    last_use::settle();
    let (next, held) = chunk::with(|chunks| {
        let without = chunks.all.iter().filter(|(_, chunk)| {
            chunk.place == Place::Resident && chunk.moves() && chunk.host_copy.is_none()
        });
        let next = without
            .min_by_key(|(_, chunk)| chunk.used)
            .map(|(id, chunk)| (*id, chunk.bytes, chunk.context));
        (next, chunks.host_bytes())
    });
    let Some((id, bytes, context)) = next else {
        return false;
    };
    let short = host::space().free_bytes / (SPARE_CHUNKS + 1) < bytes;
    if held.saturating_add(bytes) > budget || short {
        return false;
    }
    let Some(mut host_copy) = HostCopy::take(bytes) else {
        return false;
    };
    // Another time, where it is somebody else's turn.
    let permits = Permits::within(PATIENCE);
    if !permits.have() || host_copy.take_pages().is_err() {
        return false;
    }
    let locked = capture::relaxed(|| enter(context).map(|_| host_copy.pin()));
    let mut host_copy = Some(host_copy).filter(|host_copy| locked.is_ok() && host_copy.is_pinned());
    let made = host_copy.is_some();
    chunk::with(|chunks| {
        let Some(chunk) = chunks.all.get_mut(&id) else {
            return;
        };
        if chunk.host_copy.is_none() && chunk.place == Place::Resident {
            chunk.host_copy = host_copy.take();
            let device = chunk.device;
            chunks.publish(device);
        }
    });
    // One whose chunk was freed meanwhile goes with the driver's call for it, not under the lock.
    drop(host_copy);
    made
}
