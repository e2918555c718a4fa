//! Memory that can leave the device and come back to the same address.
//!
//! An *evictable* tenant's `cuMemAlloc` memory lies in [`arena`]s: reserved addresses, backed by
//! few physical handles. Each handle is a [`chunk`]: the unit that moves. On the arbiter's order
//! the [`agent`], a thread of ours, waits until the device has nothing left to do for this process,
//! keeps the program's threads out of the driver ([`quiesce`]), and lets the [`engine`] copy chunks
//! to host memory ([`host_copy`]), unmap and release them; later create, map and copy back.
//! Streams, events, graphs and pointers in the device's memory stay valid, for every address is
//! what it was.
//!
//! It is all or nothing. Which buffers a kernel touches is not known to anybody outside of it
//! (pointers lie in device memory), and one that touches an address with nothing behind it ends the
//! context. Only a program that says itself which memory its parts need ([`groups`]) goes on before
//! all of it is back ([`early`]). See `docs/explanation/residency.md`.
//!
//! This is the one place where we keep a thread in the tenant and where a call of the program waits
//! for a lock that is held over driver calls: the quiesce gate. Both exist in evictable tenants
//! only.

mod agent;
mod ahead;
mod arena;
mod beginnings;
mod cap;
mod chunk;
mod copy_streams;
mod digest;
mod early;
mod endings;
mod engine;
mod extent;
mod fit;
mod groups;
mod host;
mod host_copy;
mod last_use;
mod moments;
mod news;
mod operands;
mod owned;
mod parameters;
mod permit;
mod quiesce;
mod ranges;
mod report;
mod space;
mod spans;
mod tuning;

use std::sync::atomic::Ordering;

use crate::attachment::client::Attached;

pub(crate) use agent::stop;
pub(crate) use arena::{allocate, capture_ended, context_died, free, owns, spare_bytes};
pub(crate) use beginnings::before_capture;
pub(crate) use cap::{create_on_host, holds as is_capped, is_reached as cap_is_reached};
pub(crate) use copy_streams::{green_goes, green_stays, of_green, peers};
pub(crate) use endings::{Going, Leaving, await_going, give_back, leaving};
pub(crate) use last_use::iteration_ended;
pub(crate) use operands::used;
pub(crate) use owned::{
    adopt, is_kept_away, is_owned, noted, release, retain, stay, translated, unmap,
};
pub(crate) use quiesce::{ACTIVE, Pass, active, pass, pass_submission, pass_to_end};
pub(crate) use report::{
    address_range, attribute, attributes, is_mapped, keep_number, set_attribute,
};
pub(crate) use space::{Needs, Short, SpaceWait, waits, with_space, with_space_on};

/// Before the first attachment: finds what [`begin`] asks the driver for, which may take the
/// dynamic linker's lock.
pub(crate) fn prepare() {
    let _ = copy_streams::driver_can();
}

/// After the first attachment: what was allocated before stays where it is, so this is said once.
pub(crate) fn begin(attached: &Attached) {
    if attached.end.arbiter.residency().evictable && copy_streams::driver_can() {
        tuning::read();
        ACTIVE.store(true, Ordering::Release);
    }
}

/// In a forked child: it has no device, no agent and nothing to move.
pub(crate) fn forget() {
    ACTIVE.store(false, Ordering::Relaxed);
    quiesce::forget();
    beginnings::forget();
    permit::forget();
    endings::forget();
    early::forget();
    last_use::forget();
    agent::forget();
}

/// What the program says about its parts: see [`early`].
pub(crate) mod pipeline {
    pub(crate) use super::early::{add, begin, clear};
}
