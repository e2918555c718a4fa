//! Back: chunks are created where they were and copied from their host copies; and what becomes of
//! a restore that stops half-way.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use channel::Reason;
use shim_ffi::*;

use super::out::evict_all;
use super::{Move, Outcome, in_place, look};
use crate::driver::real;
use crate::gate::capture;
use crate::ground::clock::now_ns;
use crate::ground::process;
use crate::residency::chunk::{self, Mapping, Place};
use crate::residency::copy_streams::{Flight, Step, Stopped, done, enter, settle};
use crate::residency::early::{self, Watch};
use crate::residency::{news, quiesce, tuning};

/// Everything that has left `device` comes back. Memory that is not there yet is asked for until
/// `deadline_ns`; what has come back by then leaves again, its host copy still holds it.
pub(in crate::residency) fn restore(
    device: usize,
    deadline_ns: u64,
    given_up: &dyn Fn() -> bool,
) -> Outcome {
    let mut ids = in_place(device, Place::Out);
    ids.reverse();
    bring_back(device, &ids, &Watch::nobody(), (deadline_ns, given_up))
}

/// The same, where the program may begin before the end: `begun` is called when a thread of it
/// does.
pub(in crate::residency) fn restore_early(
    device: usize,
    deadline_ns: u64,
    given_up: &dyn Fn() -> bool,
    begun: &dyn Fn(),
) -> Outcome {
    let mut ids = in_place(device, Place::Out);
    ids.reverse();
    let watch = Watch::over(&mut ids, begun);
    bring_back(device, &ids, &watch, (deadline_ns, given_up))
}

fn bring_back(
    device: usize,
    ids: &[u64],
    watch: &Watch<'_>,
    (deadline_ns, given_up): (u64, &dyn Fn() -> bool),
) -> Outcome {
    let moved = capture::relaxed(|| copy_back(ids, watch, deadline_ns, given_up));
    let outcome = match moved {
        Ok(()) => Outcome::Done,
        Err(stopped) => {
            let undone = undo(device, ids, watch);
            match undone {
                Ok(()) if stopped.reason != Reason::Driver => Outcome::Refused(stopped.reason),
                _ => Outcome::Failed(stopped.reason, stopped.status),
            }
        }
    };
    chunk::with(|chunks| chunks.publish(device));
    outcome
}

/// After a restore that stopped half-way: what has come back leaves again. It goes without a copy,
/// for its host copy still holds it, unless the program has worked with it meanwhile; then it is
/// waited for and copied. What the device does not finish with in time is left there, for
/// [`retreat`].
fn undo(device: usize, ids: &[u64], watch: &Watch<'_>) -> Step<()> {
    let used = if watch.is_on() {
        early::settle(early::settle_by_ns(), &|| false)
    } else {
        Ok(false)
    };
    let (kept, dropped): (Vec<u64>, Vec<u64>) = chunk::with(|chunks| {
        ids.iter().partition(|id| {
            let arrived = chunks.all.get(id).map(|chunk| chunk.place) == Some(Place::Resident);
            arrived && used != Ok(false)
        })
    });
    capture::relaxed(|| {
        dropped.iter().try_for_each(|id| {
            let back = look(*id)?;
            if back.handle == 0 {
                return Ok(());
            }
            chunk::dismiss(back.handle, back.bytes, &back.mappings).map_err(Stopped::by)?;
            chunk::with(|chunks| {
                if let Some(chunk) = chunks.all.get_mut(id) {
                    chunk.place = Place::Out;
                    chunk.handle = 0;
                }
            });
            Ok(())
        })
    })?;
    if used.is_err() && !kept.is_empty() {
        LEFT.fetch_or(1 << device, Ordering::Relaxed);
        return Ok(());
    }
    evict_all(&kept)
}

/// Devices, as bits, on which something was left that is to go: nobody may use it, and others may
/// want its space.
static LEFT: AtomicU64 = AtomicU64::new(0);
const _: () = assert!(channel::MAX_DEVICES <= 64);

/// Whether [`retreat`] has anything to do.
pub(in crate::residency) fn anything_left() -> bool {
    LEFT.load(Ordering::Relaxed) != 0
}

/// Nothing is to go any more: it may be used, or has gone.
pub(in crate::residency) fn nothing_left(device: usize) {
    LEFT.fetch_and(!(1 << device), Ordering::Relaxed);
}

/// Calls of the program go on.
pub(in crate::residency) fn all_is_back() {
    LEFT.store(0, Ordering::Relaxed);
    quiesce::open();
}

/// With the quiesce gate closed: what a restore that stopped had to leave on a device goes, if the
/// device is done with it.
pub(in crate::residency) fn retreat(deadline_ns: u64) {
    if early::settle(deadline_ns, &|| false).is_err() {
        return;
    }
    for device in (0..channel::MAX_DEVICES).filter(|at| LEFT.load(Ordering::Relaxed) >> at & 1 != 0)
    {
        if evict_all(&in_place(device, Place::Resident)).is_ok() {
            nothing_left(device);
        }
        chunk::with(|chunks| chunks.publish(device));
    }
}

fn copy_back(
    ids: &[u64],
    watch: &Watch<'_>,
    deadline_ns: u64,
    given_up: &dyn Fn() -> bool,
) -> Step<()> {
    // What the agent waits for it may wait for long; a thread that was let go meanwhile is
    // reported.
    let given_up = || {
        watch.look();
        given_up()
    };
    let mut flights: VecDeque<Flight> = VecDeque::new();
    let arrive = |flight: Option<Flight>| {
        flight.map_or(Ok(()), |flight| {
            arrive(&flight, watch)?;
            watch.arrived(flight.id);
            Ok(())
        })
    };
    let mut last = CUstream::NULL;
    let mut copies = || {
        for id in ids {
            let from = look(*id)?;
            let copy_streams = enter(from.context)?;
            last = copy_streams.back;
            // Where somebody may wait for just this chunk, it is looked for while space for the
            // next one is.
            let handle = bring(&from, deadline_ns, &given_up, &mut || {
                while watch.is_on() && flights.front().is_some_and(Flight::has_landed) {
                    arrive(flights.pop_front())?;
                }
                Ok(())
            })?;
            chunk::with(|chunks| {
                if let Some(chunk) = chunks.all.get_mut(id) {
                    chunk.handle = handle;
                    chunk.place = Place::CopyingIn;
                    let device = chunk.device;
                    chunks.publish(device);
                }
            });
            // SAFETY: mapped just now, for its device; the host copy holds as many bytes and lives
            // on.
            done(unsafe {
                real::cuMemcpyHtoDAsync_v2(
                    CUdeviceptr(from.address),
                    from.host,
                    from.bytes as usize,
                    copy_streams.back,
                )
            })?;
            flights.push_back(Flight::begin(*id, from.bytes, copy_streams.back)?);
            while flights.len() >= tuning::depth()
                || (watch.is_on() && flights.front().is_some_and(Flight::has_landed))
            {
                arrive(flights.pop_front())?;
            }
        }
        while !flights.is_empty() {
            arrive(flights.pop_front())?;
        }
        Ok(())
    };
    let outcome = copies();
    if outcome.is_err() && !last.is_null() {
        let _ = settle(last, 0);
    }
    outcome
}

/// Creates and maps; where the device has no memory yet, again when there may be some.
fn bring(
    of: &Move,
    deadline_ns: u64,
    given_up: &dyn Fn() -> bool,
    meanwhile: &mut dyn FnMut() -> Step<()>,
) -> Step<u64> {
    let mut wait = news::Wait::begin(Duration::from_micros(500));
    loop {
        match chunk::bring(of.bytes, &of.properties, &of.mappings) {
            Ok(handle) => {
                of.tell_again();
                return Ok(handle);
            }
            Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
                if now_ns() < deadline_ns && !process::exiting() && !given_up() =>
            {
                // Memory comes when somebody has left, which the arbiter says.
                wait.for_news(|| {
                    meanwhile()?;
                    Ok(now_ns() >= deadline_ns || process::exiting() || given_up())
                })?;
            }
            Err(status) => return Err(Stopped::by(status)),
        }
    }
}

fn arrive(flight: &Flight, watch: &Watch<'_>) -> Step<()> {
    flight.land_while(&|| {
        watch.look();
        false
    })?;
    chunk::with(|chunks| {
        let Some(chunk) = chunks.all.get_mut(&flight.id) else {
            return;
        };
        chunk.place = Place::Resident;
        let device = chunk.device;
        if let Some(moved) = chunks.moved_in_bytes.get_mut(device) {
            *moved += flight.bytes;
        }
        chunks.publish(device);
    });
    Ok(())
}

/// Host memory that the device reaches, mapped at `mappings`.
pub(in crate::residency) fn bring_on_host(
    ordinal: i32,
    bytes: u64,
    mappings: &[Mapping],
) -> Result<u64, CUresult> {
    const HOST_NUMA_ID: CUdevice_attribute = CUdevice_attribute(134);
    let mut node = -1;
    // SAFETY: valid pointer to a local.
    let asked =
        unsafe { real::cuDeviceGetAttribute(&raw mut node, HOST_NUMA_ID, CUdevice(ordinal)) };
    let of = |location| CUmemAllocationProp {
        location,
        ..chunk::on_device(ordinal)
    };
    let near = CUmemLocation {
        r#type: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA,
        id: node,
    };
    let any = CUmemLocation {
        r#type: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST,
        id: 0,
    };
    if asked.is_ok() && node >= 0 {
        match chunk::bring(bytes, &of(near), mappings) {
            Ok(handle) => return Ok(handle),
            Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
            }
            Err(_) => {}
        }
    }
    chunk::bring(bytes, &of(any), mappings)
}
