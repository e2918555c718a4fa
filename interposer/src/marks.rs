//! Completion marks: after a batch of submissions to a stream, the device itself writes a number into our shared page.
//!
//! The arbiter sees what has finished without a call into this process, and we bound what is in flight *in time*: a submitting
//! call waits while more is queued than the grant's window holds, exactly as it would wait for a full launch queue.
//!
//! A submission weighs what it takes on the device, as far as that is known ([`cost`]). Two things are learnt from the marks as
//! they pass. A mark that covers one submission tells what that takes; the first of its class has one of its own, so has
//! whatever takes long, and now and then one of the others. All marks of a stream together tell its *pace*: how long work takes
//! that weighs a second, a mean of sums over the recent past, in which the errors of the single weights come out. Of what nobody
//! has seen yet four at a time are in flight.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use channel::{STREAM_SLOTS, StreamSlot, ThreadSlot};
use shim_ffi::*;

use crate::client::{self, Attached, now_ns, pause};
use crate::gate::LEGACY;
use crate::pace::{Alone, Private, RING};
use crate::signature::Seen;
use crate::thread::{MOST_CREDIT, StreamEntry, Thread};
use crate::{capture, cost, process, real, registration};

/// Most submissions per mark.
const LARGEST_BATCH: u64 = 1024;
/// Device time of the first mark of a thread, and of the first ones after it was let in.
pub(crate) const FIRST_BUDGET_NS: u64 = 20_000;
/// Least device time that is worth a mark.
const LEAST_BUDGET_NS: u64 = 2_000;
/// One mark in so many is followed by one of a single submission.
const MARKS_PER_SAMPLE: u32 = 8;
/// Time per mark where nothing bounds what is in flight.
const UNBOUND_NS: u64 = 1_000_000;
static NEXT_THREAD: AtomicUsize = AtomicUsize::new(0);

/// What a submission weighs in its stream.
pub(crate) struct Weight {
    pub(crate) ns: u64,
    /// It has a mark of its own.
    pub(crate) alone: Option<Alone>,
}

static PRIVATE: [Private; STREAM_SLOTS] = [const { Private::new() }; STREAM_SLOTS];

/// A line of the client's half for a thread that submits for the first time.
pub(crate) fn next_thread_slot() -> usize {
    NEXT_THREAD.fetch_add(1, Ordering::Relaxed) % channel::THREAD_SLOTS
}

/// In a forked child.
pub(crate) fn forget() {
    registration::forget();
    NEXT_THREAD.store(0, Ordering::Relaxed);
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
    PRIVATE[index].reset(attached.end.client.stream(index)?, owner, now_ns()); // PANIC: the pages and `PRIVATE` are of one length.
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
        issue(thread, attached, None);
    }
}

/// Before a submission: what it weighs. What was submitted before one that is to have a mark of its own is marked now.
pub(crate) fn weigh(thread: &Thread, attached: &Attached, seen: Seen) -> Weight {
    let known = cost::of(seen);
    let ns = known.map_or_else(|| guess_ns(thread, attached), u64::from);
    let telling = known.is_none()
        || ns > thread.budget_ns.get() / 2
        || thread.marks_since_apart.get() >= MARKS_PER_SAMPLE;
    if !telling || behind(thread, attached) >= RING / 2 {
        return Weight { ns, alone: None };
    }
    flush(thread, attached);
    let alone = Some(Alone {
        signature: seen.signature,
        class: seen.class,
        guessed: known.is_none(),
    });
    Weight { ns, alone }
}

/// Weight of what is not known: so that the window holds four of it.
fn guess_ns(thread: &Thread, attached: &Attached) -> u64 {
    match u64::from(window_us(thread, attached)) * 250 {
        0 => thread.budget_ns.get() / 16,
        quarter_ns => quarter_ns,
    }
}

/// Marks of the thread's stream that have not passed; as many as are remembered where its completion cannot be followed.
fn behind(thread: &Thread, attached: &Attached) -> usize {
    match current(thread, attached) {
        // CAST: cut off below.
        Some((_, slot)) => slot.issued().saturating_sub(slot.done()).min(RING as u64) as usize,
        None => RING,
    }
}

/// Whether one more mark could be remembered until it has passed.
pub(crate) fn room(thread: &Thread, attached: &Attached) -> bool {
    behind(thread, attached) < RING - 2
}

/// Whether what is unmarked is worth a mark.
pub(crate) fn due(thread: &Thread, line: &ThreadSlot) -> bool {
    thread.give_credit(0);
    let spent_ns = thread.spent_ns.get();
    let unmarked = line.unmarked();
    unmarked != 0 && (spent_ns >= thread.budget_ns.get() || unmarked >= LARGEST_BATCH)
}

/// For how much the fast path is open now: what is left until the next mark, and half of what is left of a slice.
pub(crate) fn credit_ns(thread: &Thread, attached: &Attached) -> i32 {
    let line = attached
        .end
        .client
        .thread(thread.slot_plus_one.get() as usize - 1);
    if thread.stream_slot_plus_one.get() == 0
        || thread.marks_since_apart.get() >= MARKS_PER_SAMPLE
        || line.unmarked() >= LARGEST_BATCH
    {
        return 0;
    }
    let left_ns = thread
        .budget_ns
        .get()
        .saturating_sub(thread.spent_ns.get())
        .min(until_turn(thread, attached));
    i32::try_from(left_ns).map_or(MOST_CREDIT, |ns| ns.min(MOST_CREDIT))
}

/// After a wait at the gate: the first marks come soon, so that the device's pace is learnt anew.
pub(crate) fn begin_slice(thread: &Thread, attached: &Attached) {
    let budget_ns = thread.budget_ns.get().min(FIRST_BUDGET_NS);
    thread.budget_ns.set(budget_ns);
    let now_ns = now_ns();
    if let Some(slot) = (thread.slot_plus_one.get() as usize).checked_sub(1) {
        attached.end.client.thread(slot).note_let_in(now_ns);
    }
    if let Some((index, _)) = current(thread, attached) {
        // PANIC: the pages and `PRIVATE` are of one length.
        PRIVATE[index].let_in_ns.store(now_ns, Ordering::Relaxed);
    }
}

/// Issues a mark on the thread's current stream and adapts the budget. `alone`: the one submission that it covers.
pub(crate) fn issue(thread: &Thread, attached: &Attached, alone: Option<Alone>) {
    thread.give_credit(0);
    let key = thread.stream.get();
    // No own call on a capturing stream, nor on the legacy stream while another is captured.
    let captures = capture::any();
    if process::exiting() || captures && (key == LEGACY || capture::is_capturing(key)) {
        return;
    }
    let line = attached
        .end
        .client
        .thread(thread.slot_plus_one.get() as usize - 1);
    let Some((index, slot)) = current(thread, attached) else {
        return;
    };
    let (now, private) = (now_ns(), &PRIVATE[index]); // PANIC: the pages and `PRIVATE` are of one length.
    private.observe(slot, now, false);
    let mark = slot.issue();
    // Asked once the mark is counted: who is about to take the registration away waits for it from then on.
    let Some(offset) = registration::offset(attached) else {
        slot.withdraw(mark);
        return;
    };
    let weight_ns = thread.spent_ns.take();
    private.issued(mark, weight_ns, alone, now);
    thread.marks_since_apart.set(match alone {
        Some(_) => 0,
        None => thread.marks_since_apart.get() + 1,
    });
    let address = CUdeviceptr((slot.done_address() as u64).wrapping_add(offset));
    let stream = CUstream(std::ptr::without_provenance_mut(key));
    // SAFETY: the address is the device's view of a word in our page, which stays mapped; the stream is the one that the
    // program has just used on this thread, and it is not being captured.
    let write = || unsafe {
        if real::exported(Symbol::cuStreamWriteValue64_v2) {
            real::cuStreamWriteValue64_v2(stream, address, mark, 0)
        } else {
            real::cuStreamWriteValue64(stream, address, mark, 0)
        }
    };
    let result = if captures {
        capture::relaxed(write)
    } else {
        write()
    };
    if !result.is_ok() {
        slot.withdraw(mark);
        after_error(result);
        return;
    }
    line.all_marked();
    // Whether the device has passed every mark before this one: it keeps up with the program.
    let keeps_up = mark.wrapping_sub(slot.done()) <= 1;
    adapt(thread, attached, private, keeps_up);
}

/// One mark per eighth of the window: few enough to cost nothing, often enough to bound what is in flight.
/// Budgets grow only while the device keeps up: looks are rare where they are large, and a kernel may take what its grid does not
/// tell.
fn adapt(thread: &Thread, attached: &Attached, private: &Private, keeps_up: bool) {
    let aim_ns = match u64::from(window_us(thread, attached)) * 125 {
        0 => UNBOUND_NS,
        eighth_ns => eighth_ns,
    };
    let before_ns = thread.budget_ns.get().max(LEAST_BUDGET_NS);
    let most_ns = if keeps_up { before_ns * 2 } else { before_ns };
    let budget_ns = private
        .weight_of(aim_ns)
        .clamp(LEAST_BUDGET_NS, most_ns.min(UNBOUND_NS * 1024));
    thread.budget_ns.set(budget_ns);
}

fn window_us(thread: &Thread, attached: &Attached) -> u32 {
    let device = thread.device_plus_one.get() as usize;
    device
        .checked_sub(1)
        .and_then(|device| attached.end.arbiter.device(device))
        .map_or(0, channel::DeviceGrant::window_us)
}

/// What fits into what is left of a slice, by weight; anything where it has no end, or is past it and nobody has come.
fn until_turn(thread: &Thread, attached: &Attached) -> u64 {
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
    // Half of it, and half of the rest next time: what work takes is a guess. PANIC: the pages and `PRIVATE` are of one length.
    PRIVATE[index].weight_of(left_ns / 2)
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
        let nap_ns = if private.guesses(slot) {
            10_000
        } else {
            (window_ns / 16).clamp(10_000, 100_000)
        };
        pause(Duration::from_nanos(nap_ns));
    }
}

/// What is left of a process's work after an error that "leaves the process in an inconsistent state" (CUresult in the driver's
/// reference: all further work returns it, only a new process gets on): nothing. No mark is ever written again, and what waits
/// for one, the arbiter among others, need not.
pub(crate) fn after_error(result: CUresult) {
    let is_final = matches!(
        result,
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
    );
    if !is_final {
        return;
    }
    let Some(attached) = client::current() else {
        return;
    };
    let slots = (0..STREAM_SLOTS).filter_map(|at| attached.end.client.stream(at));
    slots.for_each(StreamSlot::settle);
}

/// While the thread waits at the gate: where its context has failed its marks are never passed, and as long as they are outstanding its
/// job is taken to have work on the device that does not end, and is not let in to find out.
pub(crate) fn look_while_waiting(thread: &Thread, attached: &Attached) {
    if thread.stream.get() == 0 || capture::any() {
        return;
    }
    if let Some((_, slot)) = current(thread, attached)
        && slot.done() != slot.issued()
    {
        after_error(query(thread));
    }
}

/// How the thread's stream is.
fn query(thread: &Thread) -> CUresult {
    let stream = CUstream(std::ptr::without_provenance_mut(thread.stream.get()));
    // SAFETY: the stream that the program has just used on this thread.
    unsafe { real::cuStreamQuery(stream) }
}

/// Asks the driver about the thread's stream: after an error no mark will ever be written again.
fn settle_if_over(thread: &Thread, slot: &StreamSlot) -> bool {
    if capture::any() {
        return false;
    }
    let over = query(thread) != CUresult::CUDA_ERROR_NOT_READY;
    if over {
        slot.settle();
    }
    over
}
