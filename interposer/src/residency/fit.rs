//! Fitting a job into fewer bytes of its device (AntMan, OSDI 2020): chunks change between device
//! and host memory, at the same address.
//!
//! A chunk is copied to new memory that is mapped at an address of ours for the moment; when all of
//! it is there the two change places. Until then nothing is lost: whatever goes wrong, the chunk is
//! where it was. Who is asked to go is what was used least recently; that is a guess about cost and
//! never about need, since what lies in host memory can be used all the same, only slower.

use channel::Reason;
use shim_ffi::*;

use super::chunk::{self, Mapping, Place};
use super::copy_streams::{self, Step, Stopped};
use super::engine::{self, Outcome};
use crate::attachment::client;
use crate::driver::real;
use crate::gate::capture;
use crate::ground::clock::now_ns;

/// Brings `device` to `target_bytes` of what can be moved. What was used least recently goes to
/// host memory, what was used most recently comes back first; what stays where it is is not
/// exchanged for it.
pub(super) fn fit(
    device: usize,
    target_bytes: u64,
    deadline_ns: u64,
    given_up: &dyn Fn() -> bool,
) -> Outcome {
    // What has left altogether comes back first: it is used from here on.
    if engine::out_bytes(device) != 0 {
        let outcome = engine::restore(device, deadline_ns, given_up);
        if outcome != Outcome::Done {
            return outcome;
        }
    }
    let moved = capture::relaxed(|| {
        shrink(device, target_bytes, deadline_ns, given_up)?;
        grow(device, target_bytes, deadline_ns, given_up)
    });
    chunk::with(|chunks| chunks.publish(device));
    match moved {
        Ok(()) => Outcome::Done,
        // Everything is usable where it is: that is never a failure of the job.
        Err(stopped) => Outcome::Refused(stopped.reason),
    }
}

pub(super) fn resident_bytes(device: usize) -> u64 {
    chunk::with(|chunks| {
        let on = chunks
            .all
            .values()
            .filter(|chunk| chunk.device == device && chunk.on_device() && chunk.moves());
        on.map(|chunk| chunk.bytes).sum()
    })
}

fn stopped(reason: Reason) -> Stopped {
    Stopped {
        reason,
        status: CUresult::CUDA_ERROR_OUT_OF_MEMORY,
    }
}

fn shrink(
    device: usize,
    target_bytes: u64,
    deadline_ns: u64,
    given_up: &dyn Fn() -> bool,
) -> Step<()> {
    let budget = client::current().map_or(0, |attached| attached.end.arbiter.host_budget_bytes());
    let mut resident = resident_bytes(device);
    let chosen: Vec<u64> = engine::in_place(device, Place::Resident)
        .into_iter()
        .take_while(|id| {
            let moves = resident > target_bytes;
            let bytes = chunk::with(|chunks| chunks.all.get(id).map_or(0, |chunk| chunk.bytes));
            resident = resident.saturating_sub(if moves { bytes } else { 0 });
            moves
        })
        .collect();
    // Before anything moves: whether the host has space for all of it. Its host copies are space
    // that it has already.
    let (needed, held) = chunk::with(|chunks| {
        let of = |id: &u64| {
            chunks
                .all
                .get(id)
                .filter(|chunk| chunk.host_copy.is_none())
                .map_or(0, |chunk| chunk.bytes)
        };
        (chosen.iter().map(of).sum::<u64>(), chunks.host_bytes())
    });
    if held.saturating_add(needed) > budget {
        return Err(stopped(Reason::HostBudget));
    }
    if let Err(short) = super::host::check(needed) {
        if let Some(attached) = client::current() {
            short.tell(attached, device);
        }
        return Err(stopped(short.reason()));
    }
    for id in chosen {
        if now_ns() > deadline_ns || given_up() {
            return Err(stopped(Reason::NotDrained));
        }
        let host_copy = chunk::with(|chunks| chunks.all.get_mut(&id)?.host_copy.take());
        drop(host_copy);
        relocate(id, Place::Host).map_err(|stop| match stop.reason {
            Reason::DeviceMemory => stopped(Reason::HostMemory),
            _ => stop,
        })?;
    }
    Ok(())
}

fn grow(
    device: usize,
    target_bytes: u64,
    deadline_ns: u64,
    given_up: &dyn Fn() -> bool,
) -> Step<()> {
    let mut resident = resident_bytes(device);
    for id in engine::in_place(device, Place::Host).into_iter().rev() {
        let bytes = chunk::with(|chunks| chunks.all.get(&id).map_or(0, |chunk| chunk.bytes));
        if resident.saturating_add(bytes) > target_bytes {
            continue;
        }
        if now_ns() > deadline_ns || given_up() {
            return Err(stopped(Reason::NotDrained));
        }
        relocate(id, Place::Resident)?;
        resident += bytes;
    }
    Ok(())
}

/// Moves one chunk between device and host memory.
fn relocate(id: u64, to: Place) -> Step<()> {
    let of = engine::look_at(id)?;
    let copy_streams = copy_streams::enter(of.context)?;
    let mut aside = CUdeviceptr::default();
    // SAFETY: valid pointer to a local; addresses alone.
    copy_streams::done(unsafe {
        real::cuMemAddressReserve(&raw mut aside, of.bytes as usize, 0, CUdeviceptr(0), 0)
    })?;
    let meanwhile = Mapping {
        address: aside.0,
        access: of
            .mappings
            .first()
            .map_or_else(Vec::new, |mapping| mapping.access.clone()),
        buffer_id: 0,
    };
    let outcome = exchange(&of, id, to, &meanwhile, copy_streams);
    // SAFETY: reserved above, and nothing is mapped there any more.
    let _ = unsafe { real::cuMemAddressFree(aside, of.bytes as usize) };
    outcome
}

fn exchange(
    of: &engine::Move,
    id: u64,
    to: Place,
    meanwhile: &Mapping,
    copy_streams: copy_streams::CopyStreams,
) -> Step<()> {
    let aside = std::slice::from_ref(meanwhile);
    let handle = match to {
        Place::Host => engine::bring_on_host(of.ordinal, of.bytes, aside),
        _ => chunk::bring(of.bytes, &of.properties, aside),
    }
    .map_err(Stopped::by)?;
    // SAFETY: both are mapped for the device, whose work is done, and do not overlap.
    let copied = copy_streams::done(unsafe {
        real::cuMemcpyDtoDAsync_v2(
            CUdeviceptr(meanwhile.address),
            CUdeviceptr(of.address),
            of.bytes as usize,
            copy_streams.out,
        )
    })
    .and_then(|()| copy_streams::settle(copy_streams.out, of.bytes));
    if let Err(stop) = copied {
        let _ = chunk::dismiss(handle, of.bytes, aside);
        return Err(stop);
    }
    // From here on the contents are in both.
    if let Err(status) = chunk::unmap(meanwhile.address, of.bytes) {
        let _ = chunk::release(handle);
        return Err(Stopped::by(status));
    }
    for (at, mapping) in of.mappings.iter().enumerate() {
        let mapped = chunk::unmap(mapping.address, of.bytes).and_then(|()| {
            chunk::map(handle, of.bytes, mapping).inspect_err(|_| {
                let _ = chunk::map(of.handle, of.bytes, mapping);
            })
        });
        if let Err(status) = mapped {
            for done in of.mappings.iter().take(at) {
                let _ = chunk::unmap(done.address, of.bytes);
                let _ = chunk::map(of.handle, of.bytes, done);
            }
            let _ = chunk::release(handle);
            return Err(Stopped::by(status));
        }
    }
    let _ = chunk::release(of.handle);
    of.tell_again();
    chunk::with(|chunks| {
        let Some(chunk) = chunks.all.get_mut(&id) else {
            return;
        };
        (chunk.handle, chunk.place) = (handle, to);
        let device = chunk.device;
        let moved = match to {
            Place::Host => &mut chunks.moved_out_bytes,
            _ => &mut chunks.moved_in_bytes,
        };
        if let Some(moved) = moved.get_mut(device) {
            *moved += of.bytes;
        }
        chunks.publish(device);
    });
    Ok(())
}
