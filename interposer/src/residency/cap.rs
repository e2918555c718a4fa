//! How much of what can be moved may be on a device, where the arbiter divides its memory (AntMan,
//! OSDI 2020): what is allocated beyond that lies in host memory, at an address like any other.
//!
//! The quota is another matter: it is charged wherever the bytes lie. Nothing is refused for the
//! cap's sake; where the host has no space either, the device is asked.

use channel::NO_LIMIT;

use super::arena::host_has_space;
use super::{chunk, engine, fit};
use crate::attachment::client;

/// Whether the memory of a device is divided.
pub(crate) fn holds(device: usize) -> bool {
    of(device).is_some()
}

fn of(device: usize) -> Option<u64> {
    client::current()?
        .end
        .arbiter
        .device(device)?
        .resident_cap()
}

/// Whether `bytes` more on a device would be too many.
pub(crate) fn is_reached(device: usize, bytes: u64) -> bool {
    of(device).is_some_and(|cap| {
        cap != NO_LIMIT && fit::resident_bytes(device).saturating_add(bytes) > cap
    })
}

/// `cuMemCreate` of a program whose memory can be moved. Beyond the cap, and where the device is
/// full, the memory is made on the host: the handle, for [`adopt`](super::adopt). `None`: the
/// program's own call is to be made.
pub(crate) fn create_on_host(ordinal: i32, bytes: u64) -> Option<u64> {
    if !host_has_space(bytes) {
        return None;
    }
    chunk::quietly(|| engine::bring_on_host(ordinal, bytes, &[])).ok()
}
