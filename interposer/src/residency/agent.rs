//! The agent: our thread in an evictable tenant. It waits for the arbiter's orders and carries them
//! out, with no lock held and every signal blocked.
//!
//! An eviction in order: no capture may be under way; what the program has submitted is waited for,
//! with the program's threads free to go on (a signal, a free, whatever the device may be waiting
//! for); then the quiesce gate closes, and what was submitted meanwhile is waited for; only then
//! does memory move. At the order's deadline the quiesce gate opens again and the order is refused.
//!
//! Between orders it makes host copies ready where the arbiter says that they will be needed
//! ([`ahead`]), and asks what is used ([`last_use`]).
//!
//! Where the arbiter is lost while memory is out, and the job is to go on without it, the agent
//! brings it back by itself.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use channel::{Answer, MAX_DEVICES, Order, OrderState, Reason, Verb};
use shim_ffi::CUresult;

use super::engine::{self, Outcome};
use super::{ahead, chunk, copy_streams, early, endings, fit, last_use, quiesce, tuning};
use crate::attachment::client::{self, Attached};
use crate::attachment::job::OnLoss;
use crate::driver::spawn;
use crate::gate::{self, capture};
use crate::ground::clock::{self, now_ns};
use crate::ground::errno::Preserve;
use crate::ground::process;
use crate::ground::thread::thread;

/// How long the agent sleeps without an order. TIMEOUT: how late it notices that the arbiter is
/// gone, at most.
const STEP: Duration = Duration::from_millis(250);
/// How often the agent says what kinds of memory stay where they are.
const TELL_NS: u64 = 1_000_000_000;
/// TIMEOUT: silence after which memory comes back without an arbiter that lives. Longer than at the
/// gate, for it takes space on the device that the arbiter may have given to others.
const SILENCE_NS: u64 = 5_000_000_000;
/// TIMEOUT: how long the next arbiter has to come before the client helps itself.
const GRACE_NS: u64 = 2_000_000_000;

/// 0: not started, 1: it runs.
static STARTED: AtomicU32 = AtomicU32::new(0);
/// Whether it is making driver calls.
static BUSY: AtomicBool = AtomicBool::new(false);

/// In a forked child: threads do not come along.
pub(super) fn forget() {
    STARTED.store(0, Ordering::Relaxed);
    BUSY.store(false, Ordering::Relaxed);
}

/// At exit: the driver is about to go. Waits a moment for a call of ours that is under way.
pub(crate) fn stop() {
    if !super::active() {
        return;
    }
    // TIMEOUT: the agent looks between any two calls; one lasts milliseconds.
    for _ in 0..200 {
        if !BUSY.load(Ordering::Acquire) {
            return;
        }
        clock::pause(Duration::from_millis(1));
    }
}

/// Starts the agent, once.
pub(super) fn start() {
    if STARTED
        .compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed)
        .is_err()
    {
        return;
    }
    let _errno = Preserve::new();
    if !spawn::spawn(main) {
        STARTED.store(0, Ordering::Release);
    }
}

extern "C" fn main(_: *mut c_void) -> *mut c_void {
    // The kernel may let a nap last 50 us longer than asked for, which is as long as a handle
    // takes; not for this thread.
    const SLACK_NS: libc::c_ulong = 1;
    // SAFETY: a NUL-terminated name of less than 16 bytes; both change this thread alone.
    unsafe {
        libc::syscall(libc::SYS_prctl, libc::PR_SET_NAME, c"sublet-agent".as_ptr());
        libc::syscall(libc::SYS_prctl, libc::PR_SET_TIMERSLACK, SLACK_NS);
    }
    short_turns();
    thread().is_ours();
    let _ = std::panic::catch_unwind(run);
    std::ptr::null_mut()
}

/// Asks for turns of a tenth of a millisecond instead of the usual three. It is no larger a part of
/// the processor, but who wakes with less to do than the thread that runs is let on at once, and
/// does not wait for the end of a turn of the job's own threads: a handle's time many times over.
/// Linux 6.12 was the first to heed it (`sched_setattr(2)`, `sched_runtime` of ordinary threads);
/// earlier ones ignore it.
fn short_turns() {
    const TURN_NS: u64 = 100_000;
    // SAFETY: numbers.
    let mut of: libc::sched_attr = unsafe { std::mem::zeroed() };
    let size = size_of_val(&of) as u32; // CAST: some tens of bytes.
    // SAFETY: as many bytes as are said, of this thread (0).
    let known = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut of, size, 0) } == 0;
    // 0: ordinary threads. What somebody has chosen for this process otherwise stays.
    if known && of.sched_policy == 0 {
        of.size = size;
        of.sched_runtime = TURN_NS;
        // SAFETY: as above; changes this thread alone.
        unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const of, 0) };
    }
}

fn run() {
    let mut host_copies_idle_since_ns = now_ns();
    let mut reported_ns = 0;
    let mut looks = last_use::Looks::default();
    let mut before: Option<&'static Attached> = None;
    while !process::exiting() {
        let Some(attached) = client::current() else {
            gate::quiesce::rest(|| clock::pause(STEP));
            continue;
        };
        if before.is_some_and(|before| !std::ptr::eq(before, attached)) {
            stand(attached);
        }
        before = Some(attached);
        let seen = attached.end.arbiter.orders();
        if now_ns().saturating_sub(reported_ns) > TELL_NS {
            let mut kinds = crate::metering::kinds(attached);
            chunk::with(|chunks| chunks.staying(&mut kinds));
            attached.end.client.set_staying(&kinds);
            reported_ns = now_ns();
        }
        looks.tend(attached);
        let mut worked = false;
        for device in 0..MAX_DEVICES {
            if let Some(order) = due(attached, device) {
                BUSY.store(true, Ordering::Release);
                if !process::exiting() {
                    carry_out(attached, device, &order);
                }
                BUSY.store(false, Ordering::Release);
                worked = true;
            }
        }
        if worked {
            looks.again();
            host_copies_idle_since_ns = now_ns();
            continue;
        }
        if quiesce::is_closed() {
            look_after(attached);
            if quiesce::is_closed() && engine::anything_left() {
                BUSY.store(true, Ordering::Release);
                engine::retreat(now_ns() + STEP.as_nanos() as u64); // CAST: a quarter of a second.
                BUSY.store(false, Ordering::Release);
            }
        } else if let Some(took) = make_ready(attached) {
            // The driver may keep the program's calls waiting meanwhile; it is let go on in
            // between.
            attached.end.arbiter.wait_for_orders(seen, took / 4);
            host_copies_idle_since_ns = now_ns();
            continue;
        } else if attached.end.arbiter.residency().prepare {
            keep_budget(attached);
            host_copies_idle_since_ns = now_ns();
        } else if now_ns().saturating_sub(host_copies_idle_since_ns) > tuning::KEEP_HOST_COPIES_NS {
            give_host_copies_back(u64::MAX);
            host_copies_idle_since_ns = now_ns();
        } else {
            keep_budget(attached);
        }
        gate::quiesce::rest(|| attached.end.arbiter.wait_for_orders(seen, STEP));
    }
}

/// Makes one host copy ready where the arbiter asks for it; how long that took.
fn make_ready(attached: &Attached) -> Option<Duration> {
    if !attached.end.arbiter.residency().prepare {
        return None;
    }
    let begun_ns = now_ns();
    BUSY.store(true, Ordering::Release);
    let made = ahead::step(attached);
    BUSY.store(false, Ordering::Release);
    made.then(|| Duration::from_nanos(now_ns().saturating_sub(begun_ns)))
}

/// An order about `device` that has not been answered.
fn due(attached: &Attached, device: usize) -> Option<Order> {
    let order = attached.end.arbiter.device(device)?.order()?;
    let answer = attached.end.client.answer(device).unwrap_or_default();
    let open = answer.number != order.number
        || matches!(
            answer.state,
            OrderState::None | OrderState::Working | OrderState::Begun
        );
    open.then_some(order)
}

fn say(attached: &Attached, device: usize, number: u64, state: OrderState, reason: Reason) {
    if let Some(want) = attached.end.client.want(device) {
        want.answer(Answer {
            number,
            state,
            reason,
        });
        if state != OrderState::Working {
            attached.end.ring();
        }
    }
}

/// To an arbiter that has taken over from another one: what that one ordered last is under way no
/// more. Where all is usable that is said, for the new one knows neither the order nor its end.
fn stand(attached: &Attached) {
    if engine::anything_out() {
        return;
    }
    for device in 0..MAX_DEVICES {
        let answer = attached.end.client.answer(device).unwrap_or_default();
        let open = matches!(
            answer.state,
            OrderState::Working | OrderState::Begun | OrderState::Refused
        );
        if open {
            let state = if engine::anything_on_host(device) {
                OrderState::Partly
            } else {
                OrderState::Resident
            };
            say(attached, device, answer.number, state, Reason::None);
        }
    }
}

fn carry_out(attached: &'static Attached, device: usize, order: &Order) {
    let number = order.number;
    say(attached, device, number, OrderState::Working, Reason::None);
    let not_drained = || {
        say(
            attached,
            device,
            number,
            OrderState::Refused,
            Reason::NotDrained,
        );
    };
    // Calls that give back memory which is away end first.
    if !gate::quiesce::nobody_inside(order.deadline_mono_ns) {
        if !process::exiting() {
            not_drained();
        }
        return;
    }
    // Where memory could not be brought back, threads that end a context do not wait for us at the
    // quiesce gate: none does while this order is carried out, and it is given up for one that
    // waits.
    let ends_by_itself = gate::quiesce::has_failed();
    // A later order replaces this one, and so does another arbiter.
    let replaced = || {
        attached
            .end
            .arbiter
            .device(device)
            .and_then(channel::DeviceGrant::order)
            .is_some_and(|now| now.number != number)
            || !client::current().is_some_and(|now| std::ptr::eq(now, attached))
    };
    let mut held = None;
    while ends_by_itself && held.is_none() {
        held = endings::hold_off();
        let over = replaced() || now_ns() > order.deadline_mono_ns || process::exiting();
        if held.is_none() && over {
            not_drained();
            return;
        }
    }
    let given_up = || ends_by_itself && endings::is_awaited() || replaced();
    gate::quiesce::set_away(device, true);
    let outcome = match order.verb {
        Verb::Evict => quiet(order.deadline_mono_ns, &given_up)
            .map_or_else(Outcome::Refused, |()| {
                engine::evict(device, order.deadline_mono_ns, &given_up)
            }),
        Verb::Restore => {
            let begun = || say(attached, device, number, OrderState::Begun, Reason::None);
            engine::restore_early(device, order.deadline_mono_ns, &given_up, &begun)
        }
        Verb::Fit => quiet(order.deadline_mono_ns, &given_up).map_or_else(Outcome::Refused, |()| {
            fit::fit(
                device,
                order.resident_target_bytes,
                order.deadline_mono_ns,
                &given_up,
            )
        }),
    };
    let out = engine::anything_out();
    gate::quiesce::set_away(device, engine::out_bytes(device) != 0);
    if outcome == Outcome::Done {
        engine::nothing_left(device);
    }
    if out {
        early::revoke();
    } else {
        engine::all_is_back();
    }
    // What a process has not done that ends is over with it, and the arbiter sees its end: to
    // refuse would say that its memory stays.
    if process::exiting() && outcome != Outcome::Done {
        return;
    }
    let (state, reason) = match outcome {
        Outcome::Done if order.verb == Verb::Evict => (OrderState::Evicted, Reason::None),
        Outcome::Done if engine::anything_on_host(device) => (OrderState::Partly, Reason::None),
        Outcome::Done => (OrderState::Resident, Reason::None),
        Outcome::Refused(reason) => (OrderState::Refused, reason),
        Outcome::Failed(reason, status) => {
            if out {
                quiesce::fail(status);
            }
            (OrderState::Failed, reason)
        }
    };
    say(attached, device, number, state, reason);
}

/// Nothing is under way on the devices, and no thread of the program is in a call that could change
/// that. On an error the quiesce gate is as it was before.
fn quiet(deadline_ns: u64, given_up: &dyn Fn() -> bool) -> Result<(), Reason> {
    if quiesce::is_closed() {
        // A thread that was let go early may have work on the devices.
        return early::settle(deadline_ns, given_up).map(|_| ());
    }
    if capture::any() {
        return Err(Reason::Capturing);
    }
    copy_streams::drain_beside_captures(deadline_ns, given_up)?;
    if !quiesce::close(deadline_ns) {
        return Err(Reason::NotDrained);
    }
    let quiet = if capture::any() {
        Err(Reason::Capturing)
    } else {
        copy_streams::drain(deadline_ns, given_up)
    };
    quiet.inspect_err(|_| quiesce::open())
}

/// With memory out: whether there still is somebody who will have it brought back.
fn look_after(attached: &'static Attached) {
    let now = now_ns();
    let lost = attached.look_after(now);
    if !client::current().is_some_and(|now| std::ptr::eq(now, attached)) {
        return; // a new arbiter
    }
    let silent = now.saturating_sub(attached.end.arbiter.heartbeat_mono_ns()) > SILENCE_NS;
    if !lost && !silent {
        return;
    }
    match attached.on_loss {
        OnLoss::Freeze => {}
        OnLoss::Closed if lost => quiesce::fail(CUresult::CUDA_ERROR_SYSTEM_NOT_READY),
        OnLoss::Closed => {}
        OnLoss::Open if lost && now.saturating_sub(attached.lost_at_ns()) < GRACE_NS => {}
        OnLoss::Open => unsupervised(attached),
    }
}

/// How a restore has ended; where all is back nothing of it is to go any more.
fn brought(device: usize, outcome: Outcome) -> Outcome {
    if outcome == Outcome::Done {
        engine::nothing_left(device);
    }
    outcome
}

/// Brings everything back without an order.
fn unsupervised(attached: &'static Attached) {
    // As in `carry_out`; asked for again at the next look.
    let by_ns = now_ns() + STEP.as_nanos() as u64; // CAST: a quarter of a second.
    if !gate::quiesce::nobody_inside(by_ns) {
        return;
    }
    let ends_by_itself = gate::quiesce::has_failed();
    let held = ends_by_itself.then(endings::hold_off);
    if matches!(held, Some(None)) {
        return;
    }
    BUSY.store(true, Ordering::Release);
    let until_ns = now_ns() + tuning::UNSUPERVISED.as_nanos() as u64; // CAST: half a minute.
    // An arbiter that has come meanwhile is to decide.
    let given_up = || {
        let now = now_ns();
        attached.look_after(now);
        ends_by_itself && endings::is_awaited()
            || !client::current().is_some_and(|now| std::ptr::eq(now, attached))
    };
    for device in 0..MAX_DEVICES {
        if let Outcome::Refused(Reason::DeviceMemory) | Outcome::Failed(..) =
            brought(device, engine::restore(device, until_ns, &given_up))
            && !given_up()
        {
            // Asked for again at the next look; until then nobody waits for what may not come.
            quiesce::fail(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
    }
    if !engine::anything_out() {
        engine::all_is_back();
    }
    BUSY.store(false, Ordering::Release);
}

/// Host copies beyond the budget go.
fn keep_budget(attached: &Attached) {
    let budget = attached.end.arbiter.host_budget_bytes();
    let held = chunk::with(|chunks| chunks.host_bytes());
    if held > budget {
        give_host_copies_back(held - budget);
    }
}

/// Gives host copies of what is on its device back, until `bytes` are: first of what leaves last.
pub(super) fn give_host_copies_back(bytes: u64) {
    let mut left = bytes;
    let gone: Vec<_> = chunk::with(|chunks| {
        let mut gone = Vec::new();
        let mut there: Vec<&mut chunk::Chunk> = chunks
            .all
            .values_mut()
            .filter(|chunk| chunk.place != chunk::Place::Out)
            .collect();
        there.sort_unstable_by_key(|chunk| std::cmp::Reverse(chunk.used));
        for chunk in there {
            if left == 0 {
                break;
            }
            if let Some(host_copy) = chunk.host_copy.take() {
                left = left.saturating_sub(chunk.bytes);
                gone.push(host_copy);
            }
        }
        if !gone.is_empty() {
            for device in 0..MAX_DEVICES {
                chunks.publish(device);
            }
        }
        gone
    });
    // The driver's calls for it, not under the lock.
    drop(gone);
}
