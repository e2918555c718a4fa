//! What a job calls, for `sublet record`: each call that succeeds is one record in a ring that the
//! recorder reads ([`shim_ffi::recording`]).
//!
//! While nobody records, nothing of this is on any path: calls go where
//! [`addresses::SLOTS`](crate::driver::addresses) says, which is the driver. [`begin`] puts the
//! thunks of [`calls`] there. What our own hooks call is not recorded, nor what is captured into a
//! graph: the graph's nodes are, when it is instantiated.

mod calls;
mod graph;
mod timing;

use std::ffi::{CStr, CString, c_char};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags};
use shim_ffi::recording::{Kind, Raw, Ring, TEXT_BYTES, VARIABLE, WORDS, stopped};
use shim_ffi::*;

use crate::driver::real;
use crate::ground::clock::now_ns;
use crate::ground::environment::variable;
use crate::ground::errno::Preserve;
use crate::ground::process;
use crate::ground::thread::thread;

static RING: AtomicPtr<Ring> = AtomicPtr::new(std::ptr::null_mut());
/// This process's number in the ring, and the [`process::forks`] that it is of in the upper half.
static PROCESS: AtomicU64 = AtomicU64::new(0);

fn ring() -> Option<&'static Ring> {
    // SAFETY: null, or mapped whole and never unmapped.
    unsafe { RING.load(Ordering::Acquire).as_ref() }
}

/// After a successful `cuInit`: records from here on, if that is asked for.
pub(crate) fn begin() {
    if ring().is_some() {
        return;
    }
    let _errno = Preserve::new();
    let path = variable(VARIABLE).and_then(|path| CString::new(path).ok());
    let Some(mapped) = path.and_then(|path| map(&path)) else {
        return;
    };
    // Of threads that come at the same time one installs, and what the others have mapped stays.
    if RING
        .compare_exchange(
            std::ptr::null_mut(),
            mapped,
            Ordering::AcqRel,
            Ordering::Acquire,
        )
        .is_ok()
    {
        process::watch();
        calls::install();
        let _ours = thread().enter();
        devices();
    }
}

fn map(path: &CStr) -> Option<*mut Ring> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    let size = rustix::fs::fstat(&file).ok()?.st_size;
    if usize::try_from(size) != Ok(Ring::BYTES) {
        return None;
    }
    // SAFETY: the mapping has the size that the file was found to have, and a ring's memory is
    // sealed against shrinking.
    unsafe {
        let at = libc::mmap(
            std::ptr::null_mut(),
            Ring::BYTES,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        );
        if at == libc::MAP_FAILED {
            return None;
        }
        let at = at.cast::<Ring>();
        if (*at).is_ready() {
            Some(at)
        } else {
            libc::munmap(at.cast(), Ring::BYTES);
            None
        }
    }
}

/// This process's number; a forked child takes one of its own when it first records.
fn process_number(ring: &Ring) -> Option<u16> {
    let forks = u64::from(process::forks()) << 32;
    let known = PROCESS.load(Ordering::Relaxed);
    // CAST: the lower half has 16 bits that are used.
    if known & !0xffff_ffff == forks && known as u16 != 0 {
        return Some(known as u16);
    }
    let number = ring.next_process()?;
    let mine = forks | u64::from(number);
    match PROCESS.compare_exchange(known, mine, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            let mut raw = Raw {
                kind: Kind::Process.0,
                process: number,
                order: ring.next_order(),
                at_ns: now_ns(),
                ..Raw::default()
            };
            raw.words[0] = u64::from(std::process::id());
            put(ring, &raw);
            Some(number)
        }
        // Another thread was faster; the number that this one took stays unused.
        Err(theirs) => Some(theirs as u16),
    }
}

/// The calling thread's number.
fn thread_number(ring: &Ring) -> Option<u32> {
    let thread = thread();
    let known = thread.recorded_as.get();
    if known != 0 {
        return Some(known);
    }
    let number = ring.next_thread()?;
    thread.recorded_as.set(number);
    Some(number)
}

/// A recorder that does not keep up is waited for this long, in all: what it writes to may be slow
/// for a moment.
const PATIENCE_NS: u64 = 1_000_000_000;

/// Writes a record, or ends the recording where there is no place for it.
fn put(ring: &Ring, raw: &Raw) {
    if ring.write(raw) {
        return;
    }
    let began_ns = now_ns();
    while ring.stopped() == stopped::NOT && now_ns().saturating_sub(began_ns) < PATIENCE_NS {
        crate::ground::clock::pause(std::time::Duration::from_millis(1));
        if ring.write(raw) {
            return;
        }
    }
    ring.stop(stopped::OVERRUN);
    ring.lose();
}

/// A record of no call of its own, beside those that are.
fn note(kind: Kind, order: u64, words: [u64; WORDS]) {
    let Some(ring) = ring() else { return };
    if ring.stopped() != stopped::NOT {
        return;
    }
    if let (Some(process), Some(thread)) = (process_number(ring), thread_number(ring)) {
        let raw = Raw {
            kind: kind.0,
            process,
            thread,
            order,
            at_ns: now_ns(),
            words,
            ..Raw::default()
        };
        put(ring, &raw);
    }
}

/// Text of what `of` says.
fn text(of: u64, bytes: &[u8]) {
    for (number, part) in bytes.chunks(TEXT_BYTES).enumerate() {
        let mut words = [of, (number * TEXT_BYTES) as u64, 0, 0, 0, 0, 0, 0];
        for (word, eight) in words[2..].iter_mut().zip(part.chunks(8)) {
            let mut bytes = [0; 8];
            bytes[..eight.len()].copy_from_slice(eight);
            *word = u64::from_le_bytes(bytes);
        }
        note(Kind::Text, 0, words);
    }
}

/// Most devices that are named.
const DEVICES_MOST: i32 = 64;

fn devices() {
    let (mut count, mut version) = (0, 0);
    // SAFETY: valid pointers to locals.
    unsafe {
        let _ = real::cuDeviceGetCount(&raw mut count);
        let _ = real::cuDriverGetVersion(&raw mut version);
    }
    for ordinal in 0..count.min(DEVICES_MOST) {
        let mut name = [0_u8; 256];
        // SAFETY: a buffer of the length that is given.
        let found = unsafe {
            let device = CUdevice(ordinal);
            real::cuDeviceGetName(name.as_mut_ptr().cast::<c_char>(), 256, device)
        };
        if found.is_ok() {
            let end = name.iter().position(|byte| *byte == 0).unwrap_or(0);
            // CAST: not negative.
            text(ordinal as u64, &name[..end]);
            let about = [ordinal as u64, version as u64, end as u64, 0, 0, 0, 0, 0];
            note(Kind::Device, 0, about);
        }
    }
}

/// The program says that an iteration has ended.
pub(crate) fn step() {
    let Some(ring) = ring() else { return };
    let thread = thread();
    let at_ns = now_ns();
    let raw = Raw {
        kind: Kind::Step.0,
        order: ring.next_order(),
        at_ns,
        gap_ns: gap(at_ns),
        ..Raw::default()
    };
    finish(ring, raw);
    thread.recorded_ns.set(now_ns());
}

/// Time since the calling thread's last recorded call ended.
fn gap(at_ns: u64) -> u64 {
    match thread().recorded_ns.get() {
        0 => 0,
        last => at_ns.saturating_sub(last),
    }
}

/// Writes a record of the calling thread.
fn finish(ring: &Ring, raw: Raw) {
    if ring.stopped() != stopped::NOT {
        return;
    }
    match (process_number(ring), thread_number(ring)) {
        (Some(process), Some(thread)) => put(
            ring,
            &Raw {
                process,
                thread,
                ..raw
            },
        ),
        _ => ring.lose(),
    }
}

/// Ordinal of the current context's device plus one; 0: none, or one beyond counting.
fn device_plus_one() -> u8 {
    let mut device = CUdevice(-1);
    // SAFETY: a valid pointer to a local.
    match unsafe { real::cuCtxGetDevice(&raw mut device) }.is_ok() {
        true => u8::try_from(device.0 + 1).unwrap_or(0),
        false => 0,
    }
}

/// A flag, where it is so.
fn flag(is: bool, flag: u8) -> u8 {
    if is { flag } else { 0 }
}
