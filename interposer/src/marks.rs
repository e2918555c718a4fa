//! Completion marks: after a batch of submissions to a stream, the device itself writes a number into our shared page.
//!
//! The arbiter sees what has finished without a call into this process, and we bound what is in flight *in time*: what one
//! submission takes is learnt from the marks as they pass, and a submitting call waits while more is queued than the
//! grant's window holds, exactly as it would wait for a full launch queue. Until the first mark has passed nothing is
//! known, and one mark at a time is in flight.

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

/// What is known of a slot's marks. Touched by the slot's owning thread.
struct Private {
    /// When each of the last marks was issued.
    issued_ns: [AtomicU64; RING],
    /// Submissions to the stream up to each of the last marks.
    upto: [AtomicU64; RING],
    /// Submissions to the stream up to the last mark.
    total: AtomicU64,
    /// Last mark that was seen passed, and when.
    seen: AtomicU64,
    seen_ns: AtomicU64,
    /// When it was last looked for.
    looked_ns: AtomicU64,
    /// When the gate last let the thread in after a wait: what waits there is not the device's time.
    let_in_ns: AtomicU64,
    /// Device time of one submission, as learnt; 0: not yet.
    each_ns: AtomicU64,
    /// What it was learnt from, the recent past weighing most: device time and submissions. A mean of the two sums, and not
    /// of the samples' ratios, because programs mix kernels of microseconds with kernels of milliseconds.
    sum_ns: AtomicU64,
    sum_submissions: AtomicU64,
    /// Thread that the slot belongs to.
    owner: AtomicU32,
}

/// Submissions are summed in this fraction, so that their decay does not round to nothing.
const SCALE: u64 = 1024;

/// A sum in which what came before weighs fifteen sixteenths.
fn decayed(sum: u64, new: u64) -> u64 {
    (sum - sum / 16).saturating_add(new)
}

impl Private {
    const fn new() -> Self {
        Self {
            issued_ns: [const { AtomicU64::new(0) }; RING],
            upto: [const { AtomicU64::new(0) }; RING],
            total: AtomicU64::new(0),
            seen: AtomicU64::new(0),
            seen_ns: AtomicU64::new(0),
            looked_ns: AtomicU64::new(0),
            let_in_ns: AtomicU64::new(0),
            each_ns: AtomicU64::new(0),
            sum_ns: AtomicU64::new(0),
            sum_submissions: AtomicU64::new(0),
            owner: AtomicU32::new(0),
        }
    }

    /// A new owner knows nothing of what the last one learnt.
    fn reset(&self, slot: &StreamSlot, owner: u32) {
        self.total.store(0, Ordering::Relaxed);
        self.seen.store(slot.done(), Ordering::Relaxed);
        self.upto[slot.done() as usize % RING].store(0, Ordering::Relaxed); // PANIC: the modulus is the length.
        self.each_ns.store(0, Ordering::Relaxed);
        self.sum_ns.store(0, Ordering::Relaxed);
        self.sum_submissions.store(0, Ordering::Relaxed);
        self.owner.store(owner, Ordering::Relaxed);
    }

    /// Notes a mark that covers `submissions` more.
    fn issued(&self, mark: u64, submissions: u64, now_ns: u64) {
        let total = self.total.load(Ordering::Relaxed) + submissions;
        self.total.store(total, Ordering::Relaxed);
        self.upto[mark as usize % RING].store(total, Ordering::Relaxed); // PANIC: the modulus is the length.
        self.issued_ns[mark as usize % RING].store(now_ns, Ordering::Relaxed); // PANIC: as above.
    }

    /// Looks which marks have passed, and learns from them what a submission takes. `just_now`: the program was asleep until
    /// they had passed.
    fn observe(&self, slot: &StreamSlot, now_ns: u64, just_now: bool) {
        let (done, seen) = (slot.done(), self.seen.load(Ordering::Relaxed));
        let looked_ns = self.looked_ns.swap(now_ns, Ordering::Relaxed);
        let passed = done.wrapping_sub(seen);
        if passed == 0 || passed > u64::MAX / 2 {
            return;
        }
        self.seen.store(done, Ordering::Relaxed);
        let seen_ns = self.seen_ns.swap(now_ns, Ordering::Relaxed);
        if slot.issued().wrapping_sub(seen) >= RING as u64 {
            return; // older than what is remembered
        }
        // PANIC: the modulus is the length, in all three.
        let submissions = self.upto[done as usize % RING]
            .load(Ordering::Relaxed)
            .wrapping_sub(self.upto[seen as usize % RING].load(Ordering::Relaxed))
            .max(1);
        // The work of a mark begins after the mark before it was issued, at the earliest, and after that had passed. Where
        // the program pauses in between this is too early, and the estimate too high: then marks come more often, and tell
        // better. The other way round an estimate that is too low would never be put right.
        let begun_ns = seen_ns
            .max(self.issued_ns[seen as usize % RING].load(Ordering::Relaxed))
            .max(self.let_in_ns.load(Ordering::Relaxed));
        let took_ns = now_ns.saturating_sub(begun_ns);
        let sample_ns = (took_ns / submissions).max(1);
        let each_ns = self.each_ns.load(Ordering::Relaxed);
        // Where something is still in flight the device was busy all the time. Otherwise the marks passed somewhere between the
        // last look and this one; where the looks are far apart the sample says only "at most".
        let busy = slot.issued() != done;
        let tight =
            just_now || busy || now_ns.saturating_sub(looked_ns) <= (took_ns / 2).max(200_000);
        if tight || (each_ns != 0 && sample_ns < each_ns) {
            let ns = decayed(self.sum_ns.load(Ordering::Relaxed), took_ns);
            let count = decayed(
                self.sum_submissions.load(Ordering::Relaxed),
                submissions.saturating_mul(SCALE),
            );
            self.sum_ns.store(ns, Ordering::Relaxed);
            self.sum_submissions.store(count, Ordering::Relaxed);
            let mean_ns = ns.saturating_mul(SCALE) / count.max(1);
            self.each_ns.store(mean_ns.max(1), Ordering::Relaxed);
        }
    }

    /// Whether what is in flight fits `window_ns`.
    fn fits(&self, slot: &StreamSlot, window_ns: u64, now_ns: u64) -> bool {
        let behind = slot.issued().wrapping_sub(slot.done());
        if behind == 0 || behind > u64::MAX / 2 {
            return true;
        }
        if behind as usize >= RING - 2 {
            return false;
        }
        // A stream is a queue: what was issued longer ago than the window and has not passed makes it at least that long,
        // whatever was learnt.
        let oldest_ns =
            self.issued_ns[slot.done().wrapping_add(1) as usize % RING].load(Ordering::Relaxed); // PANIC: as below.
        let each_ns = self.each_ns.load(Ordering::Relaxed);
        if each_ns == 0 || now_ns.saturating_sub(oldest_ns) > window_ns {
            return false;
        }
        let upto = self.upto[slot.done() as usize % RING].load(Ordering::Relaxed); // PANIC: the modulus is the length.
        let queued = self.total.load(Ordering::Relaxed).wrapping_sub(upto);
        queued.saturating_mul(each_ns) <= window_ns
    }
}

static PRIVATE: [Private; STREAM_SLOTS] = [const { Private::new() }; STREAM_SLOTS];

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
    PRIVATE[index].reset(attached.end.client.stream(index)?, owner); // PANIC: the pages and `PRIVATE` are of one length.
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

/// After a wait at the gate: the first marks come soon, so that the device's pace is learnt anew.
pub(crate) fn begin_slice(thread: &Thread, attached: &Attached) {
    thread.batch.set(thread.batch.get().min(FIRST_BATCH));
    let now_ns = now_ns();
    if let Some(slot) = (thread.slot_plus_one.get() as usize).checked_sub(1) {
        attached.end.client.thread(slot).note_let_in(now_ns);
    }
    if let Some((index, _)) = current(thread, attached) {
        // PANIC: the pages and `PRIVATE` are of one length.
        PRIVATE[index].let_in_ns.store(now_ns, Ordering::Relaxed);
    }
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
    let (now, private) = (now_ns(), &PRIVATE[index]); // PANIC: the pages and `PRIVATE` are of one length.
    private.observe(slot, now, false);
    let mark = slot.issue();
    private.issued(mark, line.unmarked(), now);
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
    adapt(thread, attached, private, keeps_up);
}

/// One mark per eighth of the window: few enough to cost nothing, often enough to bound what is in flight.
/// Batches grow only while the device keeps up: looks are rare where batches are large, and what was learnt of small kernels
/// must not let a program queue many large ones before the next look.
fn adapt(thread: &Thread, attached: &Attached, private: &Private, keeps_up: bool) {
    let window_us = window_us(thread, attached);
    let aim_ns = if window_us == 0 {
        1_000_000
    } else {
        u64::from(window_us) * 125
    };
    let each_ns = private.each_ns.load(Ordering::Relaxed);
    let batch = aim_ns.checked_div(each_ns).unwrap_or(1);
    let before = thread.batch.get().max(1);
    let most = if keeps_up { before * 2 } else { before };
    // CAST: clamped. Growth by doubling: a first sample may have been a lucky one.
    let batch = (batch as u32).clamp(1, LARGEST_BATCH.min(most));
    thread.batch.set(batch);
}

fn window_us(thread: &Thread, attached: &Attached) -> u32 {
    let device = thread.device_plus_one.get() as usize;
    device
        .checked_sub(1)
        .and_then(|device| attached.end.arbiter.device(device))
        .map_or(0, channel::DeviceGrant::window_us)
}

/// How many submissions fit into what is left of a slice, by what one takes; any number where it has no end, or is past it and
/// nobody has come.
pub(crate) fn until_turn(thread: &Thread, attached: &Attached) -> u64 {
    let Some(grant) = (thread.device_plus_one.get() as usize)
        .checked_sub(1)
        .and_then(|device| attached.end.arbiter.device(device))
    else {
        return u64::MAX;
    };
    let (turn_ns, deadline_ns) = (grant.turn_mono_ns(), grant.deadline_mono_ns());
    if turn_ns == 0 && deadline_ns == 0 {
        return u64::MAX;
    }
    let now_ns = now_ns();
    let left_ns = match turn_ns {
        0 if deadline_ns <= now_ns => return u64::MAX,
        0 => deadline_ns - now_ns,
        _ => turn_ns.saturating_sub(now_ns),
    };
    let Some((index, _)) = current(thread, attached) else {
        return u64::MAX;
    };
    // PANIC: the pages and `PRIVATE` are of one length.
    let each_ns = PRIVATE[index].each_ns.load(Ordering::Relaxed);
    // Half of it, and half of the rest next time: what one takes is a guess.
    left_ns / 2 / each_ns.max(1)
}

/// After a call that has waited for the device: the one look that a program gives us that submits a burst and sleeps until it
/// is done.
pub(crate) fn learn(thread: &Thread, attached: &Attached) {
    if let Some((index, slot)) = current(thread, attached) {
        PRIVATE[index].observe(slot, now_ns(), true); // PANIC: the pages and `PRIVATE` are of one length.
    }
}

/// Waits while more is in flight on the thread's stream than the window holds.
///
/// The wait has a deadline that doubles each time it runs out and nothing has moved: what we wait for may itself wait for
/// something that this very thread will submit later (a collective's other rank, a stream's wait for a host flag).
pub(crate) fn bound(thread: &Thread, attached: &'static Attached) {
    let window_us = window_us(thread, attached);
    if window_us == 0 || attached.is_lost() {
        return;
    }
    let Some((index, slot)) = current(thread, attached) else {
        return;
    };
    let private = &PRIVATE[index]; // PANIC: the pages and `PRIVATE` are of one length.
    // Several streams in flight share the window.
    let device = thread.device_plus_one.get() as usize;
    let streams = attached
        .end
        .client
        .in_flight(device.saturating_sub(1))
        .streams;
    let window_ns = u64::from(window_us) * 1000 / u64::from(streams.max(1));
    let begun = now_ns();
    let done_at_first = slot.done();
    // TIMEOUT: 50 ms is longer than any kernel that a bounded queue is meant for; a longer one lets a submission more pass.
    let patience_ns = 50_000_000u64 << thread.impatience.get().min(6);
    let mut asked = begun;
    loop {
        let now = now_ns();
        private.observe(slot, now, false);
        if slot.done() != done_at_first {
            thread.impatience.set(0);
        }
        if private.fits(slot, window_ns, now) {
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
        // While nothing is known yet the wait is for one short mark: look often.
        let nap_ns = if private.each_ns.load(Ordering::Relaxed) == 0 {
            10_000
        } else {
            (window_ns / 16).clamp(10_000, 100_000)
        };
        pause(Duration::from_nanos(nap_ns));
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
