//! Completion marks: after a batch of submissions to a stream, the device itself writes a number into our shared page.
//!
//! The arbiter sees what has finished without a call into this process, and we bound what is in flight *in time*: if the
//! oldest mark that the device has not passed is older than the grant's window, the submitting call waits, exactly as it
//! would wait for a full launch queue. No duration is estimated; the age of the oldest mark is the queue's length.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use channel::{STREAM_SLOTS, StreamSlot};
use shim_ffi::*;

use crate::client::{self, Attached, now_ns, pause};
use crate::thread::{StreamEntry, Thread};
use crate::{capture, process, real};

/// Issue times kept per slot. Marks in flight never exceed it while a window is set.
const RING: usize = 32;
/// Most submissions per mark.
const LARGEST_BATCH: u32 = 512;
// States of the registration of our page: never tried, somebody is at it, done, the driver will not.
const NEVER: u32 = 0;
const BUSY: u32 = 1;
const DONE: u32 = 2;
const REFUSED: u32 = 3;

static REGISTRATION: AtomicU32 = AtomicU32::new(NEVER);
/// Distance from a host address in our page to its device address.
static DEVICE_OFFSET: AtomicU64 = AtomicU64::new(0);
static NEXT_THREAD: AtomicUsize = AtomicUsize::new(0);

/// When each of a slot's last marks was issued, and by which thread the slot is used.
struct Private {
    issued_ns: [AtomicU64; RING],
    owner: AtomicU32,
}

static PRIVATE: [Private; STREAM_SLOTS] = [const {
    Private {
        issued_ns: [const { AtomicU64::new(0) }; RING],
        owner: AtomicU32::new(0),
    }
}; STREAM_SLOTS];

/// A line of the client's half for a thread that submits for the first time.
pub(crate) fn next_thread_slot() -> usize {
    NEXT_THREAD.fetch_add(1, Ordering::Relaxed) % channel::THREAD_SLOTS
}

/// In a forked child.
pub(crate) fn forget() {
    REGISTRATION.store(NEVER, Ordering::Relaxed);
    NEXT_THREAD.store(0, Ordering::Relaxed);
}

/// The context that registered our page may be going.
pub(crate) fn unregister() {
    let _ = REGISTRATION.compare_exchange(DONE, NEVER, Ordering::AcqRel, Ordering::Relaxed);
}

/// Makes `stream` the thread's current one; marks what is unmarked on the one before.
pub(crate) fn switch_stream(thread: &Thread, attached: &Attached, stream: usize, device: usize) {
    let same = thread.stream.get() == stream && thread.stream_slot_plus_one.get() != 0;
    if same && current(thread, attached).is_some() {
        return;
    }
    flush(thread, attached);
    thread.stream.set(stream);
    thread
        .stream_slot_plus_one
        .set(slot_of(thread, attached, stream, device as u32).map_or(0, |slot| slot as u32 + 1));
}

fn current<'a>(thread: &Thread, attached: &'a Attached) -> Option<(usize, &'a StreamSlot)> {
    let index = (thread.stream_slot_plus_one.get() as usize).checked_sub(1)?;
    Some((index, attached.end.client.stream(index)?))
}

fn slot_of(thread: &Thread, attached: &Attached, stream: usize, device: u32) -> Option<usize> {
    for entry in &thread.streams {
        let entry = entry.get();
        if entry.key == stream && entry.device == device && entry.slot_plus_one != 0 {
            return Some(entry.slot_plus_one as usize - 1);
        }
    }
    let at = thread.next_stream.get() as usize % thread.streams.len();
    thread.next_stream.set(at as u32 + 1);
    let evicted = thread.streams[at].get(); // PANIC: the modulus is the length.
    if let Some(slot) = (evicted.slot_plus_one as usize)
        .checked_sub(1)
        .and_then(|at| attached.end.client.stream(at))
    {
        // A slot with marks still in flight is left to `reclaim`.
        if slot.done() == slot.issued() {
            slot.give_back();
        }
    }
    let index = attached
        .end
        .client
        .claim_stream(device)
        .map(|(index, _)| index)
        .or_else(|| reclaim(attached, device))?;
    // CAST: thread ids are positive.
    let owner = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    PRIVATE[index].owner.store(owner, Ordering::Relaxed); // PANIC: the pages and `PRIVATE` have the same length.
    thread.streams[at].set(StreamEntry {
        key: stream,
        device,
        slot_plus_one: index as u32 + 1,
    });
    Some(index)
}

/// Takes over a slot whose thread has ended and whose marks have all been passed.
fn reclaim(attached: &Attached, device: u32) -> Option<usize> {
    let _errno = crate::errno::Preserve::new();
    for (index, private) in PRIVATE.iter().enumerate() {
        let slot = attached.end.client.stream(index)?;
        let owner = private.owner.load(Ordering::Relaxed);
        if owner == 0 || slot.done() != slot.issued() {
            continue;
        }
        // SAFETY: signal 0 only asks whether the thread exists.
        let gone = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), owner, 0) } != 0;
        if gone
            && private
                .owner
                .compare_exchange(owner, 0, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        {
            slot.give_back();
            return attached
                .end
                .client
                .claim_stream(device)
                .map(|(index, _)| index);
        }
    }
    None
}

/// Marks what the thread has submitted to its current stream since the last mark, if anything.
pub(crate) fn flush(thread: &Thread, attached: &Attached) {
    if thread.slot_plus_one.get() == 0 || thread.stream.get() == 0 {
        return;
    }
    let line = attached
        .end
        .client
        .thread(thread.slot_plus_one.get() as usize - 1);
    if line.unmarked() != 0 {
        issue(thread, attached);
    }
}

/// Largest batch of a thread that has just been let in.
const FIRST_BATCH: u32 = 8;

/// After a wait at the gate: nothing is known of the device's pace, so the first marks come soon.
pub(crate) fn begin_slice(thread: &Thread) {
    thread.batch.set(thread.batch.get().min(FIRST_BATCH));
}

/// Issues a mark on the thread's current stream and adapts the batch.
pub(crate) fn issue(thread: &Thread, attached: &Attached) {
    thread.credit.set(0);
    // No own call on a capturing stream, nor on the default stream while another is captured.
    if capture::any() || process::exiting() {
        return;
    }
    let line = attached
        .end
        .client
        .thread(thread.slot_plus_one.get() as usize - 1);
    let Some((index, slot)) = current(thread, attached) else {
        return;
    };
    let Some(offset) = registered(attached) else {
        return;
    };
    let now = now_ns();
    let mark = slot.issue();
    PRIVATE[index].issued_ns[mark as usize % RING].store(now, Ordering::Relaxed); // PANIC: indices are below the lengths.
    let address = CUdeviceptr((slot.done_address() as u64).wrapping_add(offset));
    let stream = CUstream(std::ptr::without_provenance_mut(thread.stream.get()));
    // SAFETY: the address is the device's view of a word in our page, which stays mapped; the stream is the one that the
    // program has just used on this thread, and it is not being captured.
    let result = unsafe {
        if real::exported(Symbol::cuStreamWriteValue64_v2) {
            real::cuStreamWriteValue64_v2(stream, address, mark, 0)
        } else {
            real::cuStreamWriteValue64(stream, address, mark, 0)
        }
    };
    if !result.is_ok() {
        slot.withdraw(mark);
        return;
    }
    line.all_marked();
    // Whether the device has passed every mark before this one: it keeps up with the program.
    let keeps_up = mark.wrapping_sub(slot.done()) <= 1;
    adapt(thread, attached, now, keeps_up);
}

/// One mark per eighth of the window, or so: few enough to cost nothing, often enough to bound what is in flight.
///
/// Batches grow only while the device keeps up: a program that submits faster than the device works would otherwise queue a
/// largest batch, many windows long, before the first mark tells how far behind the device is.
fn adapt(thread: &Thread, attached: &Attached, now: u64, keeps_up: bool) {
    let window_us = window_us(thread, attached);
    let aim_ns = if window_us == 0 {
        1_000_000
    } else {
        (u64::from(window_us) * 125).clamp(100_000, 1_000_000)
    };
    let took = now.saturating_sub(thread.last_mark_ns.get());
    thread.last_mark_ns.set(now);
    let batch = thread.batch.get();
    if took < aim_ns / 2 && keeps_up {
        thread.batch.set((batch * 2).clamp(1, LARGEST_BATCH));
    } else if took > aim_ns * 2 {
        thread.batch.set((batch / 2).max(1));
    }
}

fn window_us(thread: &Thread, attached: &Attached) -> u32 {
    let device = thread.device_plus_one.get() as usize;
    device
        .checked_sub(1)
        .and_then(|device| attached.end.arbiter.device(device))
        .map_or(0, channel::DeviceGrant::window_us)
}

/// Waits while the oldest unfinished mark of the thread's stream is older than the window.
///
/// The wait has a deadline that doubles each time it runs out and nothing has moved: what we wait for may itself wait for
/// something that this very thread will submit later (a collective's other rank, a stream's wait for a host flag).
pub(crate) fn bound(thread: &Thread, attached: &Attached) {
    let window_us = window_us(thread, attached);
    if window_us == 0 || attached.is_lost() {
        return;
    }
    let Some((index, slot)) = current(thread, attached) else {
        return;
    };
    let window_ns = u64::from(window_us) * 1000;
    let begun = now_ns();
    let done_at_first = slot.done();
    // TIMEOUT: 50 ms is longer than any kernel that a bounded queue is meant for; a longer one lets a submission more pass.
    let patience_ns = 50_000_000u64 << thread.impatience.get().min(6);
    let mut asked = begun;
    loop {
        let (done, issued) = (slot.done(), slot.issued());
        if done != done_at_first {
            thread.impatience.set(0);
        }
        let behind = issued.wrapping_sub(done);
        if behind == 0 || behind > u64::MAX / 2 {
            return;
        }
        let now = now_ns();
        let oldest =
            PRIVATE[index].issued_ns[done.wrapping_add(1) as usize % RING].load(Ordering::Relaxed);
        if behind < RING as u64 && now.saturating_sub(oldest) <= window_ns {
            return;
        }
        if now - begun > patience_ns {
            thread.impatience.set(thread.impatience.get() + 1);
            return;
        }
        if now - asked > 20_000_000 {
            asked = now;
            if settle_if_over(thread, slot) || attached.look_after(now) {
                return;
            }
        }
        pause(Duration::from_nanos(
            (window_ns / 16).clamp(10_000, 100_000),
        ));
    }
}

/// Asks the driver about the thread's stream: after an error no mark will ever be written again.
fn settle_if_over(thread: &Thread, slot: &StreamSlot) -> bool {
    if capture::any() {
        return false;
    }
    let stream = CUstream(std::ptr::without_provenance_mut(thread.stream.get()));
    // SAFETY: the stream that the program has just used on this thread.
    let over = unsafe { real::cuStreamQuery(stream) } != CUresult::CUDA_ERROR_NOT_READY;
    if over {
        slot.settle();
    }
    over
}

/// Distance to the device's view of our page, once the driver has taken it for pinned memory.
fn registered(attached: &Attached) -> Option<u64> {
    loop {
        match REGISTRATION.load(Ordering::Acquire) {
            DONE => return Some(DEVICE_OFFSET.load(Ordering::Relaxed)),
            NEVER => {
                if REGISTRATION
                    .compare_exchange(NEVER, BUSY, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
                {
                    let offset = capture::relaxed(|| register(attached));
                    DEVICE_OFFSET.store(offset.unwrap_or(0), Ordering::Relaxed);
                    REGISTRATION.store(
                        if offset.is_some() { DONE } else { REFUSED },
                        Ordering::Release,
                    );
                    if offset.is_none() {
                        let reason = channel::Bypass::NoMarks;
                        attached
                            .end
                            .client
                            .write_record(0, channel::Event::Bypassing { reason });
                    }
                }
            }
            BUSY => {
                client::current()?;
                rustix::thread::sched_yield();
            }
            _ => return None,
        }
    }
}

fn register(attached: &Attached) -> Option<u64> {
    let page: *const channel::ClientHalf = attached.end.client;
    let bytes = size_of::<channel::ClientHalf>().next_multiple_of(4096);
    // Portable and mapped: good in every context of this process.
    const FLAGS: u32 = 1 | 2;
    // SAFETY: a page-aligned mapping of our own, of that many whole pages, that is never unmapped.
    let result = unsafe { real::cuMemHostRegister_v2(page.cast_mut().cast(), bytes, FLAGS) };
    if !result.is_ok() && result != CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED {
        return None;
    }
    let mut device = CUdeviceptr::default();
    // SAFETY: valid pointer to a local; the page is registered.
    let result =
        unsafe { real::cuMemHostGetDevicePointer_v2(&raw mut device, page.cast_mut().cast(), 0) };
    result.is_ok().then(|| device.0.wrapping_sub(page as u64))
}
