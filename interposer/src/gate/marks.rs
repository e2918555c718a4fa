//! Completion marks: after a batch of submissions, the device itself writes a number into our
//! shared page.
//!
//! The arbiter sees what has finished without a call into this process, and we bound what is in
//! flight *in time*: a submitting call waits while more is queued than the grant's window holds,
//! exactly as it would wait for a full launch queue.
//!
//! A submission weighs what it takes on the device, as far as that is known ([`cost`]). Two things
//! are learnt from the marks as they pass. A mark that covers one submission tells what that takes;
//! the first of its class has one of its own, so has whatever takes long, and now and then one of
//! the others. All marks of a stream together tell its *pace*: how long work takes that weighs a
//! second, a mean of sums over the recent past, in which the errors of the single weights come out.
//! Of what nobody has seen yet four at a time are in flight.
//!
//! A *batch* is what a thread submits between two marks, to however many streams: each of them is
//! marked when the batch is due, and turning from one to another of them costs a few loads. Where
//! what is in flight is bounded each of several streams is marked by itself, when it has had its
//! part, and a mark that has passed on one tells how far the device is with the others. The row
//! of a stream's marks is a slot of the page ([`slots`]). A stream is marked while its slot is
//! held, and one that is about to be destroyed is marked for the last time and taken off its slots
//! before the driver hears of it: its handle may be another stream's the moment after.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use channel::{Following, Holding, StreamSlot, ThreadSlot};
use shim_ffi::*;

use crate::attachment::client::{self, Attached};
use crate::driver::real;
use crate::gate::cost::SoloSample;
use crate::gate::failure::{after_error, is_final};
use crate::gate::lookers::Lookers;
use crate::gate::pace::{RING, StreamRate};
use crate::gate::patience::{self, Stand};
use crate::gate::signature::Seen;
use crate::gate::slots::{self, Slot};
use crate::gate::streams::{LEGACY, PER_THREAD};
use crate::gate::{capture, cost, follow, registration, throughput, weighing};
use crate::ground::clock::{now_ns, pause};
use crate::ground::process;
use crate::ground::stretch::{Of, here};
use crate::ground::thread::{MOST_CREDIT, RECENT, SET, Thread, thread};

/// Most submissions per mark.
const LARGEST_BATCH: u64 = 1024;
/// Device time of the first mark of a thread, and of the first ones after it was let in.
pub(crate) const FIRST_BUDGET_NS: u64 = 20_000;
/// Least device time that is worth a mark.
const LEAST_BUDGET_NS: u64 = 2_000;
/// Device time between two marks of a stream, where the thread uses several and what is in flight
/// is bounded: some dozen of the shortest kernels.
const SPREAD_NS: u64 = 200_000;
/// Phases in which such streams are marked.
const PHASES: u64 = 16;
/// One batch in so many is followed by a mark of a single submission.
const MARKS_PER_SAMPLE: u32 = 8;
/// So many batches, at least, come before the next submission that has one because the device's
/// clock is to say what its class takes.
const MARKS_PER_TRY: u32 = 2;
/// Time per mark where nothing bounds what is in flight.
const UNBOUND_NS: u64 = 1_000_000;
/// How often that is doubled, at most, where the device is behind.
const MOST_DOUBLED: u64 = 5;
/// TIMEOUT: as long as for a stream of which nothing passes, see [`patience`].
const TAKE_NS: u64 = 50_000_000;
/// How often that is halved, at most, while it runs out.
const TAKE_HALVED: u32 = 8;
/// TIMEOUT: how long who destroys a stream waits for who marks it: that call may wait for space in
/// the stream.
const DETACH_NS: u64 = 1_000_000_000;
/// How often a thread that waits for a slot looks for one.
const TAKE_EVERY: Duration = Duration::from_micros(20);
/// Threads that may look whether the device has got on without looking more seldom for each other's
/// sake.
const LOOKERS: u64 = 4;

static NEXT_THREAD: AtomicUsize = AtomicUsize::new(0);
/// Threads that wait for a slot.
static TAKERS: Lookers = Lookers::new();
/// Threads that wait for the device to get on with their own streams.
static WAITERS: AtomicU32 = AtomicU32::new(0);

/// What a submission weighs in its stream.
pub(crate) struct Weight {
    pub(crate) ns: u64,
    /// It has a mark of its own.
    pub(crate) solo: Option<SoloSample>,
    /// So has this: the device does nothing for it, its stream waits for the host.
    pub(crate) host_wait: bool,
    /// The device may stand still at it, for the host.
    pub(crate) may_wait: bool,
    /// Its measurement, see [`weighing`]; 0: none.
    pub(crate) timed: u32,
}

/// Properties of a submission that matter after the driver call.
#[derive(Clone, Copy, Default)]
pub(crate) struct After {
    solo: Option<SoloSample>,
    host_wait: bool,
    may_wait: bool,
    timed: u32,
}

impl Weight {
    pub(crate) fn after(&self) -> After {
        After {
            solo: self.solo,
            host_wait: self.host_wait,
            may_wait: self.may_wait,
            timed: self.timed,
        }
    }
}

/// A line of the client's half for a thread that submits for the first time.
pub(crate) fn next_thread_slot() -> usize {
    NEXT_THREAD.fetch_add(1, Ordering::Relaxed) % channel::THREAD_SLOTS
}

/// In a forked child.
pub(crate) fn forget() {
    registration::forget();
    slots::forget();
    follow::forget();
    weighing::forget();
    capture::forget();
    NEXT_THREAD.store(0, Ordering::Relaxed);
    WAITERS.store(0, Ordering::Relaxed);
    TAKERS.forget();
}

// ----------------------------------------------------------------------------------------------
// The streams of a batch
// ----------------------------------------------------------------------------------------------

/// The slot of the thread's current stream, while it is that.
fn own(thread: &Thread) -> Option<usize> {
    let index = slots::index_of(thread.stream_place.get())?;
    let stream = thread.stream.get();
    slots::is(index, thread.who.get(), stream, thread.context.get()).then_some(index)
}

fn current<'a>(thread: &Thread, attached: &'a Attached) -> Option<(usize, &'a StreamSlot)> {
    let index = own(thread)?;
    Some((index, attached.end.client.stream(index)?))
}

/// Books what was submitted to the current stream since the thread turned to it.
fn book(thread: &Thread) {
    let spent_ns = thread.spent_ns();
    if let Some(index) = own(thread) {
        let here = &slots::at(index).spent_ns;
        let since_ns = spent_ns.saturating_sub(thread.entered_ns.get());
        here.store(
            here.load(Ordering::Relaxed).saturating_add(since_ns),
            Ordering::Relaxed,
        );
        thread.entered_ns.set(spent_ns);
    }
}

/// What it takes to turn to another stream of the batch.
pub(crate) struct Turn {
    stream: usize,
    place: u32,
    before: &'static Slot,
    spent_ns: u64,
    /// Credit for it, in nanoseconds; none, or below, where it is to be marked first.
    pub(crate) left_ns: i64,
}

/// How a thread turns to a stream.
pub(crate) enum Way {
    /// So.
    Found(Turn),
    /// It is not the one that the thread turned to from here the last time.
    Elsewhere,
    /// By the slow path.
    Slow,
}

/// On the launch path: how the thread turns to `stream`, if that is in the batch. The same as
/// [`switch_stream`], with less to look at. `BELOW`: credit is counted below zero. `SEEK`: wherever
/// the stream's slot is.
#[inline(always)]
pub(crate) fn turn_to<const BELOW: bool, const SEEK: bool>(thread: &Thread, stream: usize) -> Way {
    let credit = match BELOW {
        true => -thread.credit.get(),
        false => thread.credit.get(),
    };
    if credit <= 0 {
        return Way::Slow;
    }
    let before = slots::placed(thread.stream_place.get());
    let mut place = before.next.load(Ordering::Relaxed);
    if SEEK {
        let found = slots::find(thread.who.get(), stream, thread.context.get());
        place = found.map_or(0, slots::place);
        before.next.store(place, Ordering::Relaxed);
    }
    let slot = slots::placed(place);
    if !slot.is_in(thread.turn.get(), stream) {
        return if SEEK { Way::Slow } else { Way::Elsewhere };
    }
    // CAST: the credit is above 0; and sums of nanoseconds that are left fit.
    let spent_ns = (thread.spent_with_credit_ns.get()).wrapping_sub(credit as u64);
    let of_all = thread.limit_ns.get().wrapping_sub(spent_ns) as i64;
    let of_one = (slot.allowance_ns.load(Ordering::Relaxed))
        .wrapping_sub(slot.spent_ns.load(Ordering::Relaxed)) as i64;
    Way::Found(Turn {
        stream,
        place,
        before,
        spent_ns,
        left_ns: of_all.min(of_one),
    })
}

impl Turn {
    /// Turns to it, and books what went to the stream before. `used_ns` of the credit is used at
    /// once.
    #[inline(always)]
    pub(crate) fn make<const BELOW: bool>(self, thread: &Thread, used_ns: i64) {
        let spent_ns = self.spent_ns;
        // CAST: at most `MOST_CREDIT`, as the allowance is; and not negative.
        let (left, all_ns) = ((self.left_ns - used_ns) as i32, self.left_ns as u64);
        thread.credit.set(if BELOW { -left } else { left });
        thread
            .spent_with_credit_ns
            .set(spent_ns.wrapping_add(all_ns));
        // What is another's by now is not marked by us any more.
        if self.before.turn.load(Ordering::Relaxed) == thread.turn.get() {
            let here_ns = spent_ns.wrapping_sub(thread.entered_ns.get());
            let before_ns = self.before.spent_ns.load(Ordering::Relaxed);
            self.before
                .spent_ns
                .store(before_ns.wrapping_add(here_ns), Ordering::Relaxed);
        }
        thread.entered_ns.set(spent_ns);
        thread.stream.set(self.stream);
        thread.stream_place.set(self.place);
    }
}

/// Before a submission to it: makes `stream` the thread's current one, and one of the batch.
pub(crate) fn switch_stream(
    thread: &Thread,
    attached: &'static Attached,
    stream: usize,
    device: usize,
) {
    thread.destroyed.set(slots::destroyed());
    let same = thread.stream.get() == stream;
    if same && let Some(index) = own(thread) {
        if !in_turn(thread, index) {
            enter(thread, attached, index);
        }
        return;
    }
    book(thread);
    if !same {
        thread.entered_ns.set(thread.spent_ns());
    }
    thread.stream.set(stream);
    thread.stream_place.set(0);
    let index = slots::find(thread.who.get(), stream, thread.context.get())
        .or_else(|| take(thread, attached, device));
    if let Some(index) = index {
        enter(thread, attached, index);
    }
}

/// Whether slot `index` is of the thread's batch, and the launch path knows.
fn in_turn(thread: &Thread, index: usize) -> bool {
    slots::at(index).turn.load(Ordering::Relaxed) == thread.turn.get()
}

/// Makes slot `index` that of the current stream, and one of the batch.
fn enter(thread: &Thread, attached: &'static Attached, index: usize) {
    let slot = slots::at(index);
    if slot.batch.load(Ordering::Relaxed) != thread.batch.get() {
        let Some(mut holding) = slots::hold(index, thread.who.get()) else {
            return;
        };
        holding.set_open(true);
        slot.batch.store(thread.batch.get(), Ordering::Relaxed);
        slot.spent_ns.store(0, Ordering::Relaxed);
        allow(thread, attached, index, phase(thread, attached, index));
        slots::rate(index)
            .let_in_ns
            .fetch_max(thread.let_in_ns.get(), Ordering::Relaxed);
        slot.turn.store(thread.turn.get(), Ordering::Relaxed);
        drop(holding);
        put(thread, index);
    } else if !in_turn(thread, index) {
        // Held, for nobody else may have it when that is said.
        let Some(holding) = slots::hold(index, thread.who.get()) else {
            return;
        };
        slot.turn.store(thread.turn.get(), Ordering::Relaxed);
        drop(holding);
    }
    thread.stream_place.set(slots::place(index));
}

/// Sets the weight that may go to a stream between two of its marks, or so many [`PHASES`] of it.
/// Little where marks are to bound what is in flight and nobody knows yet how fast it gets on.
fn allow(thread: &Thread, attached: &Attached, index: usize, phases: u64) {
    let rate = slots::rate(index);
    let ns = match window_us(thread, attached) {
        1.. if !rate.is_known() => FIRST_BUDGET_NS,
        _ => rate.weight_of(aim_ns(thread, attached, index)) / PHASES * phases,
    };
    let most_ns = MOST_CREDIT as u64; // CAST: not negative.
    let ns = ns.clamp(LEAST_BUDGET_NS, most_ns);
    slots::at(index).allowance_ns.store(ns, Ordering::Relaxed);
}

/// After which part of its allowance a stream is marked first. A program that goes round many
/// streams has all of them come to the end of theirs together: then nothing is known of any for
/// long, and all is to be marked at once.
fn phase(thread: &Thread, attached: &Attached, index: usize) -> u64 {
    match is_spread(thread, attached) {
        // Neighbours far from each other.
        true => (index as u64 * 7) % PHASES + 1,
        false => PHASES,
    }
}

/// Streams of the thread in this batch, or the last one.
fn own_streams(thread: &Thread) -> u64 {
    u64::from(thread.streams.get().max(thread.last_streams.get()).max(1))
}

/// Whether what is in flight is bounded, and the thread has several streams. Then each is marked
/// when it has had its part, and not all of them together: what is known of one says how far the
/// device is with the others, see [`ahead_ns`].
fn is_spread(thread: &Thread, attached: &Attached) -> bool {
    own_streams(thread) > 1 && window_us(thread, attached) != 0
}

fn put(thread: &Thread, index: usize) {
    if let Some(bits) = thread.touched.get(index / 64)
        && bits.get() & 1 << (index % 64) == 0
    {
        bits.set(bits.get() | 1 << (index % 64));
        thread.streams.set(thread.streams.get() + 1);
    }
}

/// The slots of the batch, as they are now.
fn batch(thread: &Thread) -> impl Iterator<Item = usize> + Clone + use<> {
    // PANIC: of that length.
    let words: [u64; SET] = std::array::from_fn(|at| thread.touched[at].get());
    words.into_iter().enumerate().flat_map(|(word, bits)| {
        let rest = |bits: &u64| Some(bits & bits.wrapping_sub(1));
        std::iter::successors(Some(bits), rest)
            .take_while(|bits| *bits != 0)
            .map(move |bits| word * 64 + bits.trailing_zeros() as usize)
    })
}

/// A slot for the thread's stream. Where marks are outstanding in all of them, that is as many
/// streams as can be followed: a submission to one more waits until the device has got on with one,
/// as for a full launch queue.
fn take(thread: &Thread, attached: &'static Attached, device: usize) -> Option<usize> {
    let begun_ns = now_ns();
    let patience_ns = TAKE_NS >> thread.impatience.get().min(TAKE_HALVED);
    let mut looker = TAKERS.looker();
    loop {
        if let Some(index) = take_now(thread, attached, device) {
            thread.impatience.set(0);
            return Some(index);
        }
        let governed = client::current().is_some_and(|now| std::ptr::eq(now, attached));
        if !governed || process::exiting() || window_us(thread, attached) == 0 {
            return None;
        }
        if now_ns().saturating_sub(begun_ns) > patience_ns {
            thread.impatience.set(thread.impatience.get() + 1);
            return None;
        }
        looker.wait(TAKE_EVERY);
        if attached.is_lost() {
            return None;
        }
    }
}

fn take_now(thread: &Thread, attached: &'static Attached, device: usize) -> Option<usize> {
    let what = (
        thread.who.get(),
        thread.stream.get(),
        thread.context.get(),
        device as u32, // CAST: a device of the pages.
    );
    let adopt = |index, word| adopt(attached, index, word);
    let begun = |index| {
        follow::begin(index);
        weighing::begin_slot(index);
    };
    slots::take(attached.end.client, what, now_ns(), adopt, begun)
}

/// Sleeps, one of those that wait for the device to get on. The more threads wait, the more seldom
/// each of them looks: together they look as often as a few.
fn nap(ns: u64) {
    let waiters = u64::from(WAITERS.load(Ordering::Relaxed));
    pause(Duration::from_nanos(ns * (waiters / LOOKERS).clamp(1, 256)));
}

// ----------------------------------------------------------------------------------------------
// Marks
// ----------------------------------------------------------------------------------------------

fn line<'a>(thread: &Thread, attached: &'a Attached) -> &'a ThreadSlot {
    let slot = thread.slot_plus_one.get() as usize;
    attached.end.client.thread(slot.saturating_sub(1))
}

/// Marks what the thread has submitted since the last marks, if anything. The program may be doing
/// anything with the streams but using them: it is not a call of that thread to them.
pub(crate) fn flush(thread: &Thread, attached: &'static Attached) {
    if thread.slot_plus_one.get() == 0 {
        return;
    }
    book(thread);
    if thread.spent_ns() == 0 {
        return;
    }
    thread.give_credit(0);
    take_again(thread, attached);
    for index in batch(thread) {
        mark(thread, attached, index, Covers::Work(None), false);
        slots::at(index).flushed.store(true, Ordering::Relaxed);
    }
    end_batch(thread, attached, false);
    // A program that waits after every few launches has no other marks.
    if is_shared(thread) {
        let marks = thread.marks_since_apart.get();
        thread.marks_since_apart.set(marks.saturating_add(1));
    }
}

/// The thread's slot was taken over before what it submitted was marked: takes another, unless the
/// stream may have been destroyed.
fn take_again(thread: &Thread, attached: &'static Attached) {
    let unmarked = thread.spent_ns() > thread.entered_ns.get();
    let Some(device) = (thread.device_plus_one.get() as usize).checked_sub(1) else {
        return;
    };
    if !unmarked || thread.stream.get() == 0 || own(thread).is_some() {
        return;
    }
    let Some(index) = take_now(thread, attached, device) else {
        return;
    };
    if slots::destroyed() == thread.destroyed.get() {
        enter(thread, attached, index);
        book(thread);
    } else if let Some(holding) = slots::hold(index, thread.who.get()) {
        slots::retire(index, holding);
    }
}

/// Before a submission: what it weighs. What was submitted before one that is to have a mark of its
/// own is marked now.
pub(crate) fn weigh(thread: &Thread, attached: &'static Attached, seen: Seen) -> Weight {
    let known = cost::of(seen);
    let ns = known.map_or_else(|| guess_ns(thread, attached), u64::from);
    let most_ns = own(thread).map_or(0, |at| slots::at(at).allowance_ns.load(Ordering::Relaxed));
    let shared = is_shared(thread);
    let telling = known.is_none()
        || ns > thread.budget_ns.get().min(most_ns) / 2
        || thread.marks_since_apart.get() >= MARKS_PER_SAMPLE
        || shared && is_to_be_tried(thread, seen.class);
    if !telling || behind(thread, attached) >= RING / 2 {
        return Weight {
            ns,
            solo: None,
            host_wait: false,
            may_wait: false,
            timed: 0,
        };
    }
    book(thread);
    if let Some(index) = own(thread) {
        mark(thread, attached, index, Covers::Work(None), false);
    }
    let sample = SoloSample {
        signature: seen.signature,
        class: seen.class,
        guessed: known.is_none(),
    };
    let begin = |index| weighing::begin(thread, index, sample);
    Weight {
        ns,
        solo: Some(sample),
        host_wait: false,
        may_wait: false,
        timed: own(thread).filter(|_| shared).map_or(0, begin),
    }
}

/// Whether other jobs' work is on the thread's device at the same time.
fn is_shared(thread: &Thread) -> bool {
    let device = (thread.device_plus_one.get() as usize).checked_sub(1);
    device.is_some_and(|device| throughput::of(device).is_shared())
}

fn is_to_be_tried(thread: &Thread, class: u32) -> bool {
    thread.marks_since_apart.get() >= MARKS_PER_TRY
        && own(thread).is_some_and(|index| weighing::is_to_be_tried(index, class))
}

/// The same before a call after which the stream waits for the host, which takes none of the
/// device's time.
pub(crate) fn weigh_host_wait(thread: &Thread, attached: &'static Attached) -> Weight {
    book(thread);
    if let Some(index) = own(thread) {
        mark(thread, attached, index, Covers::Work(None), true);
    }
    Weight {
        ns: 1,
        solo: None,
        host_wait: true,
        may_wait: false,
        timed: 0,
    }
}

/// Weight of what is not known: so that the window holds four of it.
fn guess_ns(thread: &Thread, attached: &Attached) -> u64 {
    match u64::from(window_us(thread, attached)) * 250 {
        0 => thread.budget_ns.get() / 16,
        quarter_ns => quarter_ns,
    }
}

/// Marks of the thread's stream that have not passed; as many as are remembered where its
/// completion cannot be followed.
fn behind(thread: &Thread, attached: &Attached) -> usize {
    match current(thread, attached) {
        // CAST: cut off below.
        Some((_, slot)) => slot.issued().saturating_sub(slot.done()).min(RING as u64) as usize,
        None => RING,
    }
}

fn unmarked(thread: &Thread, line: &ThreadSlot) -> u64 {
    line.launches().wrapping_sub(thread.marked.get())
}

/// Whether what is unmarked is worth its marks.
fn due(thread: &Thread, line: &ThreadSlot) -> bool {
    thread.give_credit(0);
    let spent_ns = thread.spent_ns();
    let most = LARGEST_BATCH * u64::from(thread.streams.get().max(1));
    spent_ns != 0 && (spent_ns >= thread.budget_ns.get() || unmarked(thread, line) >= most)
}

/// For how much the fast path is open now: what is left until the next marks, and half of what is
/// left of a slice.
pub(crate) fn credit_ns(thread: &Thread, attached: &Attached) -> i32 {
    let most = LARGEST_BATCH * u64::from(thread.streams.get().max(1));
    if own(thread).is_none()
        || thread.marks_since_apart.get() >= MARKS_PER_SAMPLE
        || unmarked(thread, line(thread, attached)) >= most
    {
        return 0;
    }
    let left_ns = thread
        .budget_ns
        .get()
        .saturating_sub(thread.spent_ns())
        .min(until_turn(thread, attached))
        .min(MOST_CREDIT as u64); // CAST: not negative.
    thread.limit_ns.set(thread.spent_ns() + left_ns);
    // CAST: at most `MOST_CREDIT`.
    left_ns.min(allowance_ns(thread)) as i32
}

/// Weight that may still go to the thread's stream before it is marked.
fn allowance_ns(thread: &Thread) -> u64 {
    let here_ns = (thread.spent_ns()).saturating_sub(thread.entered_ns.get());
    own(thread).map_or(0, |index| {
        let slot = slots::at(index);
        let spent_ns = slot
            .spent_ns
            .load(Ordering::Relaxed)
            .saturating_add(here_ns);
        (slot.allowance_ns.load(Ordering::Relaxed)).saturating_sub(spent_ns)
    })
}

/// After a wait at the gate: the first marks come soon, so that the device's pace is learnt anew.
pub(crate) fn begin_slice(thread: &Thread, attached: &Attached) {
    let first_ns = FIRST_BUDGET_NS * own_streams(thread);
    let budget_ns = thread.budget_ns.get().min(first_ns);
    thread.budget_ns.set(budget_ns);
    let now_ns = now_ns();
    thread.let_in_ns.set(now_ns);
    if thread.slot_plus_one.get() != 0 {
        line(thread, attached).note_let_in(now_ns);
    }
    if let Some(index) = own(thread) {
        slots::rate(index)
            .let_in_ns
            .store(now_ns, Ordering::Relaxed);
    }
}

/// After a submission: marks what is due, and waits while more is in flight than the window holds.
pub(crate) fn settle(thread: &Thread, attached: &'static Attached, after: After) {
    let After {
        solo,
        host_wait,
        may_wait,
        timed,
    } = after;
    if timed != 0
        && let Some(index) = own(thread)
    {
        weighing::finish(thread, index, timed);
    }
    // It has a mark of its own.
    let apart = solo.is_some() || host_wait;
    if may_wait
        && let Some(index) = own(thread)
        && let Some(word) = attached.end.client.stream(index)
    {
        slots::rate(index).waits_at(word.issued().wrapping_add(1));
    }
    // A batch may have ended while it waited at the gate.
    if let Some(index) = own(thread)
        && !in_turn(thread, index)
    {
        enter(thread, attached, index);
    }
    let all = due(thread, line(thread, attached)) && !apart;
    // A program that asks for its events between its submissions has them marked each time, so that
    // nothing is ever due.
    let flushed = |index: &usize| {
        let flushed = &slots::at(*index).flushed;
        flushed.load(Ordering::Relaxed) && flushed.swap(false, Ordering::Relaxed)
    };
    let flushed = own(thread).filter(flushed);
    if !all && !apart && (own(thread).is_none() || allowance_ns(thread) != 0) {
        if let Some(index) = flushed {
            bound(thread, attached, [index].into_iter());
        }
        return;
    }
    book(thread);
    thread.give_credit(0);
    if all {
        for index in batch(thread) {
            mark(thread, attached, index, Covers::Work(None), true);
        }
        adapt(thread, attached);
        bound(thread, attached, batch(thread));
        end_batch(thread, attached, true);
    } else if let Some(index) = own(thread) {
        let covers = match host_wait {
            true => Covers::HostWait,
            false => Covers::Work(solo),
        };
        mark(thread, attached, index, covers, solo.is_none());
        adapt(thread, attached);
        bound(thread, attached, [index].into_iter());
        // It may be known by now how fast the stream gets on.
        if own(thread) == Some(index)
            && (window_us(thread, attached) == 0
                || is_spread(thread, attached)
                || slots::at(index).allowance_ns.load(Ordering::Relaxed) == FIRST_BUDGET_NS)
        {
            allow(thread, attached, index, PHASES);
        }
    }
    thread.marks_since_apart.set(match solo {
        Some(_) => 0,
        None => thread.marks_since_apart.get() + 1,
    });
    if let Some(index) = own(thread)
        && !in_turn(thread, index)
    {
        enter(thread, attached, index);
    }
}

/// The batch is over; what could not be marked belongs to the next one. `keep`: also what went to
/// the current stream while it had no slot. What went to a slot that is gone was marked by a thread
/// that took it.
fn end_batch(thread: &Thread, attached: &Attached, keep: bool) {
    let before = batch(thread);
    thread.last_streams.set(thread.streams.get());
    thread.begin_batch();
    let mut left_ns = 0;
    for index in before {
        let slot = slots::at(index);
        let spent_ns = slot.spent_ns.load(Ordering::Relaxed);
        if slot.owner.is(thread.who.get()) && spent_ns != 0 {
            slot.batch.store(thread.batch.get(), Ordering::Relaxed);
            put(thread, index);
            left_ns += spent_ns;
        }
    }
    let here_ns = thread.spent_ns().saturating_sub(thread.entered_ns.get());
    thread.entered_ns.set(left_ns);
    thread.settle_to(if keep { left_ns + here_ns } else { left_ns });
    if thread.spent_ns() == 0 {
        all_marked(thread, attached);
    }
}

fn all_marked(thread: &Thread, attached: &Attached) {
    let line = line(thread, attached);
    line.all_marked();
    thread.marked.set(line.launches());
}

/// What a mark covers.
#[derive(Clone, Copy)]
enum Covers {
    /// Work; if it is one submission, which.
    Work(Option<SoloSample>),
    /// A wait of the stream for the host. What came before has a mark of its own, if there was
    /// space for it.
    HostWait,
}

/// Marks what the batch has put into the stream of slot `index`, and learns from the marks before.
/// `space`: only where one more mark can be remembered
/// until it has passed.
fn mark(thread: &Thread, attached: &Attached, index: usize, covers: Covers, space: bool) -> bool {
    let who = thread.who.get();
    let (Some(mut holding), Some(word)) =
        (slots::hold(index, who), attached.end.client.stream(index))
    else {
        return false;
    };
    let (slot, now) = (slots::at(index), now_ns());
    follow::look(attached, index, word, &holding, false);
    follow::note(word);
    weighing::look(index, &holding);
    look_back(thread, attached, now);
    slots::rate(index).observe(word, thread.reached_ns.get(), now, false);
    let weight_ns = slot.spent_ns.load(Ordering::Relaxed);
    let behind = word.issued().wrapping_sub(word.done());
    if weight_ns == 0 || space && behind >= follow::space() {
        return false;
    }
    note_fresh(thread, attached, index, word);
    // Together with work it would be taken for work that takes no time.
    let solo = match covers {
        Covers::Work(solo) => solo,
        Covers::HostWait => None,
    };
    let host_wait = matches!(covers, Covers::HostWait) && weight_ns == 1;
    let work_ns = if host_wait { 0 } else { weight_ns };
    let (made, result) = make(attached, index, word, (work_ns, host_wait), &holding);
    let Some(mark) = made else {
        drop(holding);
        after_error(result);
        return false;
    };
    let upto_ns = thread.submitted_ns();
    slots::rate(index).issued(mark, weight_ns, solo, upto_ns, now);
    note_recent(thread, index);
    if let Some(sample) = solo
        && let Some(device) = (thread.device_plus_one.get() as usize).checked_sub(1)
    {
        throughput::of(device).sample(sample, weight_ns);
    }
    if host_wait && let Some(device) = (thread.device_plus_one.get() as usize).checked_sub(1) {
        throughput::of(device).note_idle();
    }
    slot.spent_ns.store(0, Ordering::Relaxed);
    holding.set_open(own(thread) == Some(index));
    drop(holding);
    let spent_ns = thread.spent_ns().saturating_sub(weight_ns);
    thread.settle_to(spent_ns);
    thread
        .entered_ns
        .set(thread.entered_ns.get().saturating_sub(weight_ns));
    if spent_ns == 0 {
        all_marked(thread, attached);
    }
    true
}

/// Before a mark of work: counts where that found its stream without any. Who had waited at the
/// gate found it so because of that.
fn note_fresh(thread: &Thread, attached: &Attached, index: usize, word: &StreamSlot) {
    let waited = || thread.let_in_ns.get() > slots::rate(index).last_issued_ns(word);
    if word.is_idle()
        && !waited()
        && let Some(device) = (thread.device_plus_one.get() as usize).checked_sub(1)
        && let Some(side) = attached.end.client.host_side(device)
    {
        side.count_fresh();
    }
}

/// Makes the next mark of a slot that is held: it has passed when the device has done what is in
/// the stream, `weight_ns` since the last mark. `None`: there is none, and what the driver says.
fn make(
    attached: &Attached,
    index: usize,
    word: &StreamSlot,
    (weight_ns, host_wait): (u64, bool),
    held: &Holding<'_>,
) -> (Option<u64>, CUresult) {
    // No own call on a capturing stream, nor on the legacy stream while another is captured.
    let (stream, captures) = (slots::key(index), capture::any());
    if process::exiting() || captures && (stream == LEGACY || capture::is_capturing(stream)) {
        return (None, CUresult::CUDA_SUCCESS);
    }
    loop {
        let way = follow::way();
        // Before the mark is counted; a mark that is not accepted leaves no trace of it.
        attached.end.client.weigh_next(index, weight_ns);
        let made = match way {
            Following::Writes => write(attached, stream, word, captures, host_wait),
            Following::Events => follow::record(attached, index, (weight_ns, host_wait), held),
            Following::Queries => Ok(Some(follow::issue(word, host_wait))),
        };
        match made {
            Ok(Some(mark)) => {
                follow::accepted();
                return (Some(mark), CUresult::CUDA_SUCCESS);
            }
            Ok(None) if way == follow::way() => return (None, CUresult::CUDA_SUCCESS),
            Ok(None) => {}
            Err(status) if is_final(status) => return (None, status),
            Err(status) => {
                follow::refused(attached, way, status);
                if way == follow::way() {
                    return (None, status);
                }
            }
        }
    }
}

/// Lets the device write the next number of a slot; `None`: our page is not there for it now.
fn write(
    attached: &Attached,
    stream: usize,
    word: &StreamSlot,
    captures: bool,
    host_wait: bool,
) -> Result<Option<u64>, CUresult> {
    let mark = follow::issue(word, host_wait);
    // Asked once the mark is counted: who is about to take the registration away waits for it from
    // then on.
    let Some(offset) = registration::offset(attached) else {
        word.withdraw(mark);
        return Ok(None);
    };
    let address = CUdeviceptr((word.done_address() as u64).wrapping_add(offset));
    let stream = CUstream(std::ptr::without_provenance_mut(stream));
    // SAFETY: the address is the device's view of a word in our page, which stays mapped; the
    // stream has not been destroyed, for its slot is held by the caller, and it is not being
    // captured.
    let write = || unsafe {
        if real::exported(Symbol::cuStreamWriteValue64_v2) {
            real::cuStreamWriteValue64_v2(stream, address, mark, 0)
        } else {
            real::cuStreamWriteValue64(stream, address, mark, 0)
        }
    };
    let result = thread().own(|| match captures {
        true => capture::relaxed(write),
        false => write(),
    });
    if result.is_ok() {
        return Ok(Some(mark));
    }
    word.withdraw(mark);
    Err(result)
}

/// Takes a slot from its owner, which may have submitted to its stream what no mark covers: that is
/// marked first, as far as another thread can.
fn give_up(attached: &Attached, index: usize, word: &StreamSlot, holding: Holding<'static>) {
    let stream = slots::key(index);
    // What the default streams are depends on who asks.
    if holding.is_open() && stream > PER_THREAD {
        let (made, result) = make(attached, index, word, (0, false), &holding);
        if let Some(mark) = made {
            let rate = slots::rate(index);
            rate.issued(mark, 0, None, 0, now_ns());
        }
        slots::retire(index, holding);
        after_error(result);
    } else {
        slots::retire(index, holding);
    }
}

/// Another thread's slot that is to be taken over.
fn adopt(attached: &Attached, index: usize, word: &'static StreamSlot) {
    if let Some(holding) = slots::hold_any(index, || false)
        && slots::key(index) != 0
        && word.is_idle()
    {
        give_up(attached, index, word, holding);
    }
}

/// Sets the weight of a batch: what its streams do together in the time that is aimed at. A single
/// one is marked earlier, when it has its part of that (`allowance_ns` of its slot).
///
/// Where what is in flight is bounded, budgets grow only while the device keeps up: looks are rare
/// where they are large, and a kernel may take what its grid does not tell.
fn adapt(thread: &Thread, attached: &Attached) {
    let Some((index, slot)) = current(thread, attached) else {
        return;
    };
    // Whether the device has passed every mark before the last one: it keeps up with the program.
    let keeps_up = slot.issued().wrapping_sub(slot.done()) <= 1;
    let grows = keeps_up || window_us(thread, attached) == 0;
    let aim_ns = aim_ns(thread, attached, index);
    // Twice what its streams are allowed one by one: so that those are marked, too, that the
    // program has turned away from.
    if is_spread(thread, attached) {
        let rate = slots::rate(index);
        let one_ns = match rate.is_known() {
            true => rate.weight_of(aim_ns).max(LEAST_BUDGET_NS),
            false => FIRST_BUDGET_NS,
        };
        let all_ns = 2 * own_streams(thread) * one_ns.min(UNBOUND_NS * 1024);
        thread.budget_ns.set(all_ns);
        return;
    }
    let others = batch(thread).filter(|other| *other != index);
    let streams = others.chain([index]).map(|at| slots::rate(at));
    let weight_ns = StreamRate::weight_together(streams, aim_ns);
    let before_ns = thread.budget_ns.get().max(LEAST_BUDGET_NS);
    let most_ns = if grows { before_ns * 2 } else { before_ns };
    thread
        .budget_ns
        .set(weight_ns.clamp(LEAST_BUDGET_NS, most_ns.min(UNBOUND_NS * 1024)));
}

/// Time between two marks of a stream: an eighth of the window, few enough to cost nothing, often
/// enough to bound what is in flight. Where many streams have work in flight the threads share the
/// window.
///
/// Where there is none the marks of many streams are as many as those of eight, and the next mark
/// of a stream comes twice as late for each that the device has yet to pass. Otherwise a device
/// that is busy with marks stays so: what one of many streams does looks the longer, the more of
/// them are in flight, and what looks long is marked more often.
fn aim_ns(thread: &Thread, attached: &Attached, index: usize) -> u64 {
    match u64::from(window_us(thread, attached)) * 125 {
        0 => {
            let streams = thread.streams.get().max(thread.last_streams.get());
            let word = attached.end.client.stream(index);
            let behind = word.map_or(0, |word| word.issued().saturating_sub(word.done()));
            let doubled = behind.saturating_sub(1).min(MOST_DOUBLED);
            (UNBOUND_NS * u64::from(streams / 8).max(1)) << doubled
        }
        eighth_ns => {
            let own = own_streams(thread);
            let others = u64::from(thread.crowd.get()).saturating_sub(own);
            let ns = if own > 1 {
                SPREAD_NS.min(eighth_ns * 2)
            } else {
                eighth_ns
            };
            ns / (others / 8).max(1)
        }
    }
}

fn grant<'a>(thread: &Thread, attached: &'a Attached) -> Option<&'a channel::DeviceGrant> {
    let device = (thread.device_plus_one.get() as usize).checked_sub(1)?;
    attached.end.arbiter.device(device)
}

/// What may be in flight at the end of a slice.
fn window_us(thread: &Thread, attached: &Attached) -> u32 {
    grant(thread, attached).map_or(0, channel::DeviceGrant::window_us)
}

/// The whole bound of what may be in flight.
fn window(thread: &Thread, attached: &Attached) -> channel::Window {
    grant(thread, attached).map_or_else(channel::Window::default, channel::DeviceGrant::window)
}

/// What may be in flight now.
fn window_now_us(thread: &Thread, attached: &Attached, now_ns: u64) -> u32 {
    grant(thread, attached).map_or(0, |grant| {
        grant.window().now_us(now_ns, grant.end_mono_ns())
    })
}

/// What fits into what is left of a slice, by weight; anything where it has no end, or is past it
/// and nobody has come.
fn until_turn(thread: &Thread, attached: &Attached) -> u64 {
    let Some(grant) = grant(thread, attached) else {
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
    let Some(index) = own(thread) else {
        return u64::MAX;
    };
    // Half of it, and half of the rest next time: what work takes is a guess.
    slots::rate(index).weight_of(left_ns / 2)
}

/// After a call that has waited for the device: the one look that a program gives us that submits a
/// burst and sleeps until it is done.
pub(crate) fn learn(thread: &Thread, attached: &Attached) {
    if let Some((index, word)) = current(thread, attached)
        && let Some(holding) = slots::hold(index, thread.who.get())
    {
        follow::look(attached, index, word, &holding, false);
        weighing::look(index, &holding);
        // The program has just waited, for this stream most likely.
        if !word.is_idle()
            && now_ns().saturating_sub(thread.asked_ns.get()) > follow::ask_every_ns()
        {
            thread.asked_ns.set(now_ns());
            settle_if_over(attached, index, word, &holding);
        }
        slots::rate(index).observe(word, thread.reached_ns.get(), now_ns(), true);
    }
}

/// What of the process is in flight on a device, in nanoseconds of it.
fn in_flight_ns(attached: &Attached, device: usize) -> u64 {
    let client = attached.end.client;
    let words = (0..client.streams_used()).filter_map(|index| Some((index, client.stream(index)?)));
    words
        .filter(|(_, word)| !word.is_idle() && word.is_on(device))
        .map(|(index, word)| slots::rate(index).queued_ns(word))
        .fold(0, u64::saturating_add)
}

/// Whether the thread has submitted more than `most_ns` by weight since the youngest of its marks
/// that have passed. A device begins what it is given in that order, on whichever streams; what is
/// left of it on others is no more than they may have between two of their own marks.
fn is_ahead(thread: &Thread, attached: &Attached, most_ns: u64) -> bool {
    let ahead = || {
        thread
            .submitted_ns()
            .saturating_sub(thread.reached_ns.get())
            > most_ns
    };
    ahead() && {
        look_back(thread, attached, now_ns());
        ahead()
    }
}

/// Looks which of the thread's last marks has passed, the youngest first, and counts what the
/// device has done by then. A mark on whichever stream tells it of all that was submitted before:
/// what is not over of that is not much.
fn look_back(thread: &Thread, attached: &Attached, now_ns: u64) {
    let on = thread.device_plus_one.get();
    let Some(device) = (on as usize).checked_sub(1) else {
        return;
    };
    let submitted_ns = thread.submitted_ns();
    let counted_ns = thread.counted_ns.replace(submitted_ns);
    if thread.reached_on.replace(on) != on {
        // What went to another device has nothing to do with this one.
        thread.reached_ns.set(submitted_ns);
        return;
    }
    let together = throughput::of(device);
    together.set_shared(window(thread, attached).is_beside());
    together.submit(submitted_ns.saturating_sub(counted_ns));
    let reached_ns = thread.reached_ns.get();
    let (mut youngest_ns, mut then_ns, mut idle) = (reached_ns, 0, true);
    let newest = thread.recent_marks.get() as usize;
    for step in 1..=RECENT {
        // PANIC: the modulus is the length.
        let recent = thread.recent[newest.wrapping_sub(step) % RECENT].get();
        let Some(index) = usize::from(recent).checked_sub(1) else {
            break;
        };
        if let Some(word) = attached.end.client.stream(index)
            && slots::at(index).owner.is(thread.who.get())
            && word.is_on(device)
        {
            if let Some((upto_ns, issued_ns)) = slots::rate(index).reached(word)
                && upto_ns > youngest_ns
            {
                (youngest_ns, then_ns) = (upto_ns, issued_ns);
            }
            if word.is_idle() {
                break;
            }
            idle = false;
        }
    }
    thread.reached_ns.set(youngest_ns);
    let passed_ns = youngest_ns - reached_ns;
    // What was marked before the last look had not passed by then.
    let then_ns = then_ns.max(thread.looked_ns.replace(now_ns));
    together.pass(passed_ns, idle, thread.let_in_ns.get(), (then_ns, now_ns));
}

/// A mark of slot `index` is the thread's youngest.
fn note_recent(thread: &Thread, index: usize) {
    let marks = thread.recent_marks.get();
    // PANIC: the modulus is the length. CAST: below the number of slots.
    thread.recent[marks as usize % RECENT].set(index as u16 + 1);
    thread.recent_marks.set(marks.wrapping_add(1));
}

/// Waits while more is in flight on these streams of the thread's than the window holds, which is
/// the wider the more is left of the slice: what is over by then is in nobody's way. Several
/// streams in flight share it: each may have its part, or what the others leave of the whole.
///
/// What we wait for may itself wait for what this very thread will do later. Nobody waits behind a
/// stream that is known to wait for the host: the device has nothing of it to do. For others (a
/// kernel that spins, another rank of a collective, a graph with host functions) the wait has a
/// deadline, see [`patience`].
fn bound(
    thread: &Thread,
    attached: &'static Attached,
    streams: impl Iterator<Item = usize> + Clone,
) {
    let client = attached.end.client;
    let is_idle = |index| client.stream(index).is_none_or(StreamSlot::is_idle);
    // All slots are looked at only where there is something to wait for.
    if streams.clone().all(is_idle) {
        for index in streams {
            if let (Some(_holding), Some(word)) =
                (slots::hold(index, thread.who.get()), client.stream(index))
            {
                slots::rate(index).observe(word, thread.reached_ns.get(), now_ns(), false);
            }
        }
        thread.crowd.set(thread.crowd.get() / 2);
        return;
    }
    let window_us = window_us(thread, attached);
    let Some(device) = (thread.device_plus_one.get() as usize).checked_sub(1) else {
        return;
    };
    if window_us == 0 || attached.is_lost() {
        return;
    }
    let in_flight = client.in_flight(device);
    let crowd = (in_flight.streams - in_flight.waiting_streams).max(1);
    thread.crowd.set(crowd);
    let nap_ns = u64::from(window_us) * 1000 / u64::from(crowd) / 16;
    let begun = now_ns();
    let contended = grant(thread, attached)
        .is_some_and(|grant| grant.turn_mono_ns() != 0 || grant.deadline_mono_ns() != 0);
    let mut waiting = None;
    let spread = is_spread(thread, attached);
    for index in streams {
        let Some(word) = attached.end.client.stream(index) else {
            continue;
        };
        let rate = slots::rate(index);
        let (mut done, mut until) = (word.done(), None);
        let mut asked = begun;
        // Nobody takes it over while anything is outstanding; but its stream may go.
        while let Some(holding) = slots::hold(index, thread.who.get()) {
            follow::look(attached, index, word, &holding, false);
            let now = now_ns();
            rate.observe(word, thread.reached_ns.get(), now, false);
            if word.done() != done {
                (done, until) = (word.done(), None);
            }
            if word.waits_for_host() {
                break;
            }
            // What nobody knows may take any time: of that there is never more than fits the end
            // of a slice.
            let window_us = match rate.guesses(word) {
                true => window_us,
                false => window_now_us(thread, attached, now),
            };
            let window_ns = u64::from(window_us) * 1000;
            let fits = rate.fits(word, window_ns / u64::from(crowd), now)
                || crowd > 1
                    && rate.fits(word, window_ns, now)
                    && in_flight_ns(attached, device) <= window_ns;
            if fits
                && !(spread
                    && !word.is_idle()
                    && is_ahead(thread, attached, rate.weight_of(window_ns)))
            {
                break;
            }
            let left_ns = || {
                let stand = Stand {
                    movers: slots::movers_beside(client, device, index),
                    contended,
                    may_wait: rate.may_wait(word),
                };
                patience::left_ns(rate.stood_ns(now), stand)
            };
            if now >= *until.get_or_insert_with(|| now + left_ns()) {
                return;
            }
            if now - asked > follow::ask_every_ns() {
                asked = now;
                if settle_if_over(attached, index, word, &holding) {
                    break;
                }
                drop(holding);
                if attached.look_after(now) {
                    return;
                }
                continue;
            }
            drop(holding);
            // While nothing is known yet the wait is for one short mark: look often.
            let nap_ns = if rate.guesses(word) {
                10_000
            } else {
                nap_ns.clamp(10_000, 100_000)
            };
            if waiting.is_none() {
                let of = match client.host_side(device) {
                    Some(side) => Of::Numbers(&WAITERS, side.at_window()),
                    None => Of::Number(&WAITERS),
                };
                waiting = Some(thread.counts.begin(of, here()));
            }
            nap(nap_ns);
        }
    }
}

// ----------------------------------------------------------------------------------------------
// Ends
// ----------------------------------------------------------------------------------------------

/// Before the driver is asked to destroy a stream: what was submitted to it is marked, whichever
/// thread did, and nobody marks it any more.
pub(crate) fn stream_goes(stream: usize) {
    let Some(attached) = client::current().filter(|_| stream > PER_THREAD) else {
        return;
    };
    let thread = thread();
    let ours = thread.generation.get() == client::generation() && thread.slot_plus_one.get() != 0;
    if ours {
        book(thread);
        let of_stream = |index: &usize| slots::key(*index) == stream;
        for index in batch(thread).filter(of_stream) {
            mark(thread, attached, index, Covers::Work(None), false);
        }
    }
    for index in slots::of_stream(attached.end.client, stream) {
        detach(thread, attached, index, |key| key == stream);
    }
    if ours && thread.stream.get() == stream {
        thread.give_credit(0);
        thread.stream.set(0);
        thread.stream_place.set(0);
    }
}

/// Before the driver is asked to destroy a context, or (`None`) one of which nothing is known: the
/// same for its streams.
pub(crate) fn context_goes(context: Option<usize>) {
    let Some(attached) = client::current() else {
        return;
    };
    let thread = thread();
    for index in slots::of_context(attached.end.client, context) {
        detach(thread, attached, index, |_| true);
    }
    if thread.generation.get() == client::generation() {
        thread.give_credit(0);
        thread.stream.set(0);
        thread.stream_place.set(0);
    }
}

/// Takes a slot from its owner before its stream goes. The calling thread has marked its own.
fn detach(thread: &Thread, attached: &Attached, index: usize, is_it: impl Fn(usize) -> bool) {
    let begun_ns = now_ns();
    let holding = slots::hold_any(index, || {
        pause(Duration::from_micros(20));
        now_ns().saturating_sub(begun_ns) < DETACH_NS
    });
    let (Some(mut holding), Some(word)) = (holding, attached.end.client.stream(index)) else {
        return;
    };
    if holding.owner() != 0 && is_it(slots::key(index)) {
        if holding.owner() == thread.who.get() {
            holding.set_open(false);
        }
        give_up(attached, index, word, holding);
    }
}

/// A context has gone, and all that was to be done in it.
pub(crate) fn context_gone(context: usize) {
    weighing::context_gone(context);
    let Some(attached) = client::current() else {
        return;
    };
    for index in slots::left_by(attached.end.client, context) {
        if let (Some(holding), Some(word)) = (
            slots::hold_any(index, || false),
            attached.end.client.stream(index),
        ) && holding.owner() == 0
        {
            word.settle();
        }
    }
    follow::context_gone(context);
}

/// While the thread waits at the gate: where its context has failed its marks are never passed, and
/// as long as they are outstanding its job is taken to have work on the device that does not end,
/// and is not let in to find out.
pub(crate) fn look_while_waiting(thread: &Thread, attached: &Attached) {
    if thread.stream.get() == 0 || capture::any() {
        return;
    }
    if let Some((index, word)) = current(thread, attached)
        && !word.is_idle()
        && let Some(holding) = slots::hold(index, thread.who.get())
    {
        follow::look(attached, index, word, &holding, false);
        settle_if_over(attached, index, word, &holding);
    }
}

/// How the stream of a slot is that is held.
fn query(index: usize, _held: &Holding<'_>) -> CUresult {
    let stream = CUstream(std::ptr::without_provenance_mut(slots::key(index)));
    // SAFETY: a stream that the program has used on this thread, and that has not been destroyed,
    // for its slot is held.
    thread().own(|| unsafe { real::cuStreamQuery(stream) })
}

/// Asks the driver about the stream of a slot that is held; true where it has nothing to do. After
/// an error no mark will ever be written again, and one that is missing when the stream is idle is
/// lost.
fn settle_if_over(
    attached: &Attached,
    index: usize,
    word: &StreamSlot,
    held: &Holding<'_>,
) -> bool {
    if capture::any() {
        return false;
    }
    let issued = word.issued();
    match query(index, held) {
        CUresult::CUDA_ERROR_NOT_READY => false,
        CUresult::CUDA_SUCCESS => {
            follow::is_idle(attached, word, issued, held);
            true
        }
        result => {
            word.settle();
            after_error(result);
            true
        }
    }
}
