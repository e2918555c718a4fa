//! The gate in front of every submission.
//!
//! While the lease holds: five loads, a subtraction and a store on this thread's own line, then the
//! driver. Everything else (which device, which stream, waiting for a grant, completion marks) is
//! the slow path, due when the device time that was credited is used up, and for whatever nobody
//! knows yet how long it takes. The call blocks here and nowhere later: nothing is queued behind
//! the program's back.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use channel::{COMING, DeviceGrant, OPEN};
use shim_ffi::CUresult;

use crate::attachment::client::{self, Attached};
use crate::attachment::job::OnLoss;
use crate::attachment::verdict::{self, Reason};
use crate::gate::marks::{self, Way, Weight};
use crate::gate::quiesce::{self, Pass};
use crate::gate::signature::{self, Seen};
use crate::gate::{capture, context, cost};
use crate::ground::clock::{self, now_ns};
use crate::ground::process;
use crate::ground::stretch::{Counted, Of, here};
use crate::ground::thread::{Thread, thread};

/// The gate of a thread that nobody governs.
static ALWAYS_OPEN: AtomicU32 = AtomicU32::new(OPEN);
/// How long one step of a wait lasts. TIMEOUT: how late a dead arbiter is noticed by a waiting
/// thread, at most.
const STEP: Duration = Duration::from_millis(50);
/// How often a thread that never waits looks after the arbiter, in nanoseconds.
const CHECK_EVERY_NS: u64 = 100_000_000;

/// For how long a thread looks again and again at a gate that is about to open, at most; for one
/// that opens later it sleeps.
/// TIMEOUT: twice the time by which an opening is published in advance.
const POLL_NS: u64 = 200_000;
/// Waiting threads that look at the clock without looking less often for each other's sake.
const LOOKERS: u32 = 4;
/// Looks between two offers of the core to others, about a microsecond.
const LOOKS: u32 = 16;
/// Until when a thread of this process polls; one is enough to be first, and the others leave it a
/// core.
static POLLED_UNTIL_NS: AtomicU64 = AtomicU64::new(0);

/// What is to be done after the driver call.
pub(crate) enum Ticket {
    /// Nothing, for this reason.
    Pass(Reason),
    /// Count it and mark it when due.
    Count(Weight),
    /// The call blocked until its work was done.
    Blocked(Blocking),
    /// The call must not be made.
    Deny,
}

impl Ticket {
    /// Of a submission that is likely to wait for the host.
    pub(crate) fn may_wait(mut self) -> Self {
        if let Self::Count(weight) = &mut self {
            weight.may_wait = true;
        }
        self
    }

    /// The driver has answered: of what it refused the device's clock says nothing.
    pub(crate) fn answered(mut self, result: CUresult) -> Self {
        if let Self::Count(weight) = &mut self
            && !result.is_ok()
        {
            weight.timed = 0;
        }
        self
    }
}

/// A thread inside a driver call that blocks until its work is done, until dropped.
pub(crate) struct Blocking {
    /// Until this is dropped.
    _counted: Option<Counted>,
    /// When it began; 0 where that tells nothing of the device's copies: too small, or behind other
    /// work.
    begun_ns: u64,
}

/// Why a submission may not go to the driver right now.
pub(crate) enum NotOpen {
    /// Its stream is to be looked for.
    Elsewhere,
    /// It is a matter for the slow path.
    Slow,
}

/// The fast path: the driver's function, by `function`, where a submission to `stream` may go to it
/// right now; it is counted. A thread that goes from stream to stream turns to another one of the
/// batch. `SEEK`: also to one that it did not turn to from here the last time.
#[inline(always)]
pub(crate) fn open<const SEEK: bool>(
    stream: usize,
    seen: Seen,
    function: impl Fn() -> *mut c_void,
) -> Result<*mut c_void, NotOpen> {
    let thread = thread();
    let cost = cost::quickly(seen.signature, thread.unknown_ns.get());
    if thread.stream.get() == stream {
        // Below zero also where the credit is, see `open_quiesced`.
        let left = thread.credit.get() - cost;
        if left < 0 || !is_open(thread, seen) {
            return Err(NotOpen::Slow);
        }
        let function = function();
        if function.is_null() {
            return Err(NotOpen::Slow);
        }
        thread.credit.set(left);
        count(thread, seen);
        return Ok(function);
    }
    let turn = match marks::turn_to::<false, SEEK>(thread, stream) {
        Way::Found(turn) => turn,
        Way::Elsewhere => return Err(NotOpen::Elsewhere),
        Way::Slow => return Err(NotOpen::Slow),
    };
    if turn.left_ns < i64::from(cost) || !is_open(thread, seen) {
        return Err(NotOpen::Slow);
    }
    let function = function();
    if function.is_null() {
        return Err(NotOpen::Slow);
    }
    turn.make::<false>(thread, i64::from(cost));
    count(thread, seen);
    Ok(function)
}

/// Turns to another stream that the thread has submitted to lately, where memory may be moved.
pub(crate) fn turn_to(stream: usize) {
    let thread = thread();
    if thread.stream.get() != stream
        && let Way::Found(turn) = marks::turn_to::<true, true>(thread, stream)
        && turn.left_ns > 0
    {
        turn.make::<true>(thread, 0);
    }
}

/// The same where memory may be moved: the call passes the quiesce gate as well. There credit is
/// counted below zero, so that the way above is closed to it.
#[inline]
pub(crate) fn open_quiesced(stream: usize, seen: Seen) -> Option<Pass> {
    let thread = thread();
    let credit = thread.credit.get();
    // Below zero the one, not negative the other.
    let left = -credit - cost::quickly(seen.signature, thread.unknown_ns.get());
    if credit >= 0 || left < 0 || thread.stream.get() != stream {
        return None;
    }
    let pass = quiesce::try_pass()?;
    is_open(thread, seen).then(|| {
        thread.credit.set(-left);
        count(thread, seen);
        pass
    })
}

/// Whether the gate of a thread with credit is open for a submission that is not the one which the
/// slow path waits for, and nothing is captured.
#[inline(always)]
fn is_open(thread: &Thread, seen: Seen) -> bool {
    // SAFETY: with credit the pointer is set; it is to a word that is never unmapped.
    let gate = unsafe { &*thread.gate.get() };
    !capture::any()
        && gate.load(Ordering::Relaxed) & OPEN != 0
        && seen.signature != thread.anchor.get()
}

/// Counts a submission of a thread with credit.
#[inline(always)]
fn count(thread: &Thread, seen: Seen) {
    // SAFETY: with credit the first pointer is set, the other may be; both are to memory that is
    // never unmapped.
    let (line, ring) = unsafe { (&*thread.launches.get(), thread.ring.get().as_ref()) };
    if let Some(ring) = ring {
        ring.record(line.launches(), seen.signature);
    }
    line.count_launch();
    if seen.copies != 0 {
        line.count_copied(seen.copies);
    }
}

/// The slow path, before the driver call.
#[inline(always)]
pub(crate) fn admit(stream: usize, blocking: bool, seen: Seen) -> Ticket {
    // Where the ticket is kept.
    admit_at(here(), stream, blocking, seen)
}

#[cold]
#[inline(never)]
fn admit_at(at: usize, stream: usize, blocking: bool, seen: Seen) -> Ticket {
    let thread = thread();
    thread.counts.give_back();
    let ticket = match client::current() {
        _ if thread.is_inside() => Ticket::Pass(Reason::Own),
        _ if capture::any() && capture::is_capturing(stream) => Ticket::Pass(Reason::Captured),
        None => ungoverned(thread, stream, Reason::Ungoverned),
        Some(attached) => admit_attached(thread, attached, (at, blocking), stream, seen),
    };
    if let Ticket::Pass(reason) = ticket {
        verdict::passed(reason);
    }
    ticket
}

fn admit_attached(
    thread: &Thread,
    attached: &'static Attached,
    (at, blocking): (usize, bool),
    stream: usize,
    seen: Seen,
) -> Ticket {
    let (device, grant) = loop {
        context::refresh(thread, attached);
        let Some(device) = (thread.device_plus_one.get() as usize).checked_sub(1) else {
            return ungoverned(thread, stream, Reason::OtherDevice);
        };
        marks::switch_stream(thread, attached, stream, device);
        let Some(grant) = attached.end.arbiter.device(device) else {
            return Ticket::Pass(Reason::OtherDevice);
        };
        let now = now_ns();
        if now.saturating_sub(thread.last_check_ns.get()) > CHECK_EVERY_NS {
            thread.last_check_ns.set(now);
            attached.look_after(now);
        }
        let unheard = attached.on_loss != OnLoss::Open && attached.is_overdue(0, now);
        if grant.pass(now).is_ok() && !attached.is_lost() && !unheard {
            break (device, grant);
        }
        match wait_for_grant(thread, attached, device) {
            Waited::Granted => marks::begin_slice(thread, attached),
            Waited::Bypass => return ungoverned(thread, stream, Reason::WithoutArbiter),
            Waited::Denied => return Ticket::Deny,
        }
        // A signal handler may have submitted something else meanwhile, or left its context.
        if thread.stream.get() == stream && context::is_known(thread) {
            break (device, grant);
        }
    };
    // A new attachment may have come while we waited; the next submission will see it.
    thread.gate.set(grant.gate_word());
    if blocking {
        let client = attached.end.client;
        let count = |want| thread.counts.begin(Of::Blocking(want), at);
        let mut blocking = Blocking {
            _counted: client.want(device).map(count),
            begun_ns: 0,
        };
        // Every slot is looked at for this: only where the answer is wanted.
        let idle = signature::tells_rate(seen)
            && !client.unmarked(device)
            && client.in_flight(device).marks == 0;
        if idle {
            blocking.begun_ns = now_ns();
        }
        return Ticket::Blocked(blocking);
    }
    Ticket::Count(marks::weigh(thread, attached, seen))
}

/// Before a call after which its stream waits for the host: what was submitted to the stream before
/// is marked, so that the wait has a mark of its own.
#[cold]
#[inline(never)]
pub(crate) fn before_host_wait(ticket: Ticket) -> Ticket {
    let (Ticket::Count(_), Some(attached)) = (&ticket, client::current()) else {
        return ticket;
    };
    Ticket::Count(marks::weigh_host_wait(thread(), attached))
}

/// The slow path, after the driver call. Whether an iteration of the program has ended with it.
#[cold]
#[inline(never)]
#[must_use]
pub(crate) fn settle(ticket: Ticket, seen: Seen) -> bool {
    let thread = thread();
    let Some(attached) = client::current() else {
        return false;
    };
    if thread.generation.get() != client::generation() || thread.slot_plus_one.get() == 0 {
        return false;
    }
    let line = attached
        .end
        .client
        .thread(thread.slot_plus_one.get() as usize - 1);
    let mut iteration_ended = false;
    if matches!(ticket, Ticket::Count(_) | Ticket::Blocked(_)) {
        iteration_ended = signature::record(thread, attached, line.launches(), seen);
        line.count_copied(seen.copies);
    }
    let mut after = marks::After::default();
    match ticket {
        Ticket::Pass(_) | Ticket::Deny => return false,
        Ticket::Count(weight) => {
            line.count_launch();
            thread.set_spent_ns(thread.spent_ns() + weight.ns);
            after = weight.after();
        }
        Ticket::Blocked(blocking) => {
            if blocking.begun_ns != 0 {
                signature::learn_rate(line, seen, blocking.begun_ns);
            }
            line.count_launch();
            // It is over; what it took is not queued.
            thread.set_spent_ns(thread.spent_ns() + thread.budget_ns.get() / 8);
            drop(blocking);
            marks::learn(thread, attached);
        }
    }
    marks::settle(thread, attached, after);
    thread.give_credit(credit(marks::credit_ns(thread, attached)));
    iteration_ended
}

/// Credit as the thread's fast path reads it: see [`open_quiesced`].
fn credit(ns: i32) -> i32 {
    if quiesce::active() { -ns } else { ns }
}

/// Lets the thread pass without being governed, still by the fast path.
fn ungoverned(thread: &Thread, stream: usize, reason: Reason) -> Ticket {
    thread.gate.set(&raw const ALWAYS_OPEN);
    thread.launches.set(&raw const thread.unmanaged);
    thread.ring.set(std::ptr::null());
    thread.anchor.set(0);
    thread.stream.set(stream);
    thread.detach_all();
    // Look again now and then: an attachment may have come. A tenth of a second of the device's
    // time, or 1000 submissions.
    thread.unknown_ns.set(100_000);
    thread.give_credit(credit(100_000_000));
    thread.set_spent_ns(0);
    thread.context_known.set(false);
    Ticket::Pass(reason)
}

enum Waited {
    Granted,
    Bypass,
    Denied,
}

fn wait_for_grant(thread: &Thread, attached: &'static Attached, device: usize) -> Waited {
    // The first who waited for a stuck arbiter has waited for all.
    if attached.is_silent() {
        match attached.on_loss {
            OnLoss::Open => return Waited::Bypass,
            OnLoss::Closed => return Waited::Denied,
            OnLoss::Freeze => {}
        }
    }
    // What we have in flight is to be seen finishing while we wait.
    marks::flush(thread, attached);
    let Some(want) = attached.end.client.want(device) else {
        return Waited::Bypass;
    };
    let _waiting = thread.counts.begin(Of::Waiting(want), here());
    let attended = attached.end.arbiter.device(device);
    if !attended.is_some_and(DeviceGrant::is_attended) {
        attached.end.ring();
    }
    wait_at_gate(attached, device)
}

fn wait_at_gate(attached: &'static Attached, device: usize) -> Waited {
    let Some(grant) = attached.end.arbiter.device(device) else {
        return Waited::Bypass;
    };
    let begun = now_ns();
    loop {
        // The generation changes when we attach again, fork or exit.
        match client::current() {
            Some(current) if std::ptr::eq(current, attached) => {}
            _ => return Waited::Bypass,
        }
        if process::exiting() {
            return Waited::Bypass;
        }
        // By a signal handler in a call that memory waits for which is to leave, and the gate for
        // the memory.
        if quiesce::is_closed() && quiesce::holds(thread()) {
            return Waited::Granted;
        }
        let now = now_ns();
        // A gate that somebody has left open, who may never close it again.
        let unheard = attached.on_loss != OnLoss::Open && attached.is_overdue(0, now);
        let seen = match grant.pass(now) {
            Ok(()) if !attached.is_lost() && !unheard => return Waited::Granted,
            Ok(()) => None,
            Err(seen) => Some(seen),
        };
        if attached.is_lost() {
            match attached.on_loss {
                OnLoss::Open => {
                    attached.look_after(now_ns());
                    return Waited::Bypass;
                }
                OnLoss::Closed => {
                    if attached.look_after(now_ns()) {
                        return Waited::Denied;
                    }
                    continue;
                }
                OnLoss::Freeze => {
                    attached.look_after(now_ns());
                    clock::pause(STEP);
                    continue;
                }
            }
        }
        let now = match seen {
            Some(seen) => {
                if poll(grant, seen) {
                    continue;
                }
                let waiting = attached.end.client.waiting(device);
                grant.wait(seen, step(grant, seen, waiting, now));
                let now = now_ns();
                // Open, or about to: nothing is late.
                if grant.pass(now) != Err(seen) && !unheard {
                    continue;
                }
                marks::look_while_waiting(thread(), attached);
                now
            }
            None => {
                clock::pause(STEP);
                now_ns()
            }
        };
        if attached.look_after(now) {
            continue;
        }
        // It lives, but does it work? Its heartbeat may be older than our wait.
        if attached.is_overdue(begun, now) {
            attached.fall_silent(device);
            match attached.on_loss {
                OnLoss::Open => return Waited::Bypass,
                OnLoss::Closed => return Waited::Denied,
                OnLoss::Freeze => {}
            }
        }
    }
}

/// How long a thread sleeps that found the gate closed, of `waiting` ones: until the gate opens by
/// itself, where that is known. Mostly the arbiter opens it before, or keeps it closed for longer.
/// So many threads look for that less often, each of them, and together as often as a few.
fn step(grant: &DeviceGrant, seen: u32, waiting: u32, now_ns: u64) -> Duration {
    match grant.turn_mono_ns() {
        turn_ns if seen & COMING != 0 && turn_ns > now_ns => {
            let left = clock::real(Duration::from_nanos(turn_ns - now_ns));
            left.saturating_mul((waiting / LOOKERS).max(1)).min(STEP)
        }
        _ => STEP,
    }
}

/// Looks at a gate that is about to open, and at the clock, until it opens or its time has come;
/// true where one may be let in. The core is offered to others between looks: the holder may need
/// it to get there.
fn poll(grant: &DeviceGrant, seen: u32) -> bool {
    if seen & COMING == 0 {
        return false;
    }
    let begun_ns = now_ns();
    let until_ns = match grant.turn_mono_ns() {
        0 => begun_ns + POLL_NS,
        turn_ns => turn_ns,
    };
    if until_ns < begun_ns || until_ns - begun_ns > POLL_NS {
        return false;
    }
    let polled_ns = POLLED_UNTIL_NS.load(Ordering::Relaxed);
    let claim = |from, to| {
        POLLED_UNTIL_NS
            .compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    };
    if begun_ns < polled_ns || !claim(polled_ns, until_ns) {
        return false;
    }
    let changed = 'polling: loop {
        for _ in 0..LOOKS {
            let now_ns = now_ns();
            if grant.pass(now_ns) != Err(seen) {
                break 'polling true;
            }
            if now_ns > until_ns {
                break 'polling false;
            }
            std::hint::spin_loop();
        }
        rustix::thread::sched_yield();
    };
    // One that is gone by a jump out of a signal handler never comes here; its claim ends by
    // itself.
    claim(until_ns, 0);
    changed
}

/// A thread in a call that waits for the device, until dropped. `at`: where the stack is in the
/// function that makes the call.
#[inline]
pub(crate) fn wait_for_device(at: usize) -> Option<Counted> {
    let thread = thread();
    if thread.slot_plus_one.get() == 0
        || thread.is_inside()
        || thread.generation.get() != client::generation()
    {
        return None;
    }
    let device = (thread.device_plus_one.get() as usize).checked_sub(1)?;
    let side = client::current()?.end.client.host_side(device)?;
    Some(thread.counts.begin(Of::Number(side.in_wait()), at))
}

/// After a call that has waited for the device.
#[inline]
pub(crate) fn after_sync() {
    let thread = thread();
    if thread.slot_plus_one.get() == 0
        || thread.is_inside()
        || thread.generation.get() != client::generation()
    {
        return;
    }
    if let Some(attached) = client::current() {
        marks::learn(thread, attached);
    }
}

/// Before a call that waits for the device or asks whether it is done: what it waits for must be
/// marked, so that the arbiter sees the device fall idle while the program sleeps.
#[inline]
pub(crate) fn before_sync() {
    let thread = thread();
    if thread.slot_plus_one.get() == 0
        || thread.is_inside()
        || thread.generation.get() != client::generation()
    {
        return;
    }
    if let Some(attached) = client::current() {
        marks::flush(thread, attached);
    }
}
