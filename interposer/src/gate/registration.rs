//! Our page as the device sees it, so that streams can write marks to it.
//!
//! It is registered with the driver as pinned memory, portable and mapped: good in every context of
//! the process, but only as long as the context lives in which it was registered. Before that one
//! goes, nothing may be on its way to the page any more in any *other* context, or the write fails
//! there and takes that context with it: no new marks are made from here on, and those that are
//! under way are waited for. A thread that marks next registers anew, in a context that lives.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::time::Duration;

use shim_ffi::{CUcontext, CUdeviceptr, CUresult};

use crate::attachment::client::{self, Attached};
use crate::driver::real;
use crate::gate::{capture, follow};
use crate::ground::clock::{self, now_ns};
use crate::ground::process;
use crate::ground::thread::thread;

// States: never tried, somebody is at it, done, the driver will not, its context is about to go.
const NEVER: u32 = 0;
const BUSY: u32 = 1;
const DONE: u32 = 2;
const REFUSED: u32 = 3;
const LEAVING: u32 = 4;

static STATE: AtomicU32 = AtomicU32::new(NEVER);
/// Distance from a host address in our page to its device address.
static DEVICE_OFFSET: AtomicU64 = AtomicU64::new(0);
/// The thread for whose context it was withdrawn, by the kernel's number.
static WITHDRAWER: AtomicU32 = AtomicU32::new(0);
/// When it is looked next whether that is there.
static LOOK_AT_NS: AtomicU64 = AtomicU64::new(0);
/// The context that was current when it was registered; 0: not known.
static OWNER: AtomicUsize = AtomicUsize::new(0);

/// TIMEOUT: how long marks are waited for. What is in flight is bounded to tens of milliseconds; a
/// context that has failed never passes its own.
const WITHDRAW_NS: u64 = 1_000_000_000;
/// How often that is looked at.
const LOOK: Duration = Duration::from_micros(50);

/// In a forked child.
pub(crate) fn forget() {
    STATE.store(NEVER, Ordering::Relaxed);
}

/// `context` is about to go, or one of which nothing is known. Returns once nothing is on its way
/// to the page. `at`: where the stack is in the entry.
pub(crate) fn withdraw(context: Option<usize>, at: usize) {
    let owner = OWNER.load(Ordering::Relaxed);
    if owner != 0 && context.is_some_and(|context| context != owner) {
        return;
    }
    let left = STATE.compare_exchange(DONE, LEAVING, Ordering::AcqRel, Ordering::Relaxed);
    if left.is_err() {
        return;
    }
    WITHDRAWER.store(process::own_tid(), Ordering::Relaxed);
    LOOK_AT_NS.store(now_ns() + WITHDRAW_NS, Ordering::Relaxed);
    thread().withdrew.set(at);
    let Some(attached) = client::current() else {
        return;
    };
    // SYNC(leave): pairs with the fence in `offset`: either its mark is seen here, or it sees that
    // we leave.
    fence(Ordering::SeqCst);
    let begun_ns = now_ns();
    let devices = attached.end.device_map.iter().flatten();
    let is_idle = |device: u8| attached.end.client.in_flight(usize::from(device)).marks == 0;
    while !devices.clone().all(|device| is_idle(*device)) {
        if now_ns().saturating_sub(begun_ns) > WITHDRAW_NS {
            return;
        }
        clock::pause(LOOK);
    }
}

/// Around a call that takes contexts away, also where it is left by an exception.
#[derive(Debug)]
pub(crate) struct Withdrawn;

impl Drop for Withdrawn {
    fn drop(&mut self) {
        left();
    }
}

/// The context has gone, or stays. Until then nobody registers the page again, whatever becomes of
/// other threads' contexts: it would be registered already, and no more a moment later.
pub(crate) fn left() {
    if thread().withdrew.take() == 0 {
        return;
    }
    // The driver answers that the page is registered already where it stays.
    let _ = STATE.compare_exchange(LEAVING, NEVER, Ordering::AcqRel, Ordering::Relaxed);
}

/// While it is withdrawn, now and then: where the thread has ended that would have said that its
/// context is gone, the page may be registered again.
fn look_after() {
    let (now, due_ns) = (now_ns(), LOOK_AT_NS.load(Ordering::Relaxed));
    let claim = |next_ns| {
        LOOK_AT_NS
            .compare_exchange(due_ns, next_ns, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    };
    if now >= due_ns
        && claim(now.saturating_add(WITHDRAW_NS))
        && process::has_ended(WITHDRAWER.load(Ordering::Relaxed))
    {
        let _ = STATE.compare_exchange(LEAVING, NEVER, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Distance to the device's view of our page, once the driver has taken it for pinned memory. To be
/// asked when the mark is counted that is to be written there.
pub(crate) fn offset(attached: &Attached) -> Option<u64> {
    // SYNC(leave): see there.
    fence(Ordering::SeqCst);
    loop {
        match STATE.load(Ordering::Acquire) {
            DONE => return Some(DEVICE_OFFSET.load(Ordering::Relaxed)),
            NEVER => {
                if STATE
                    .compare_exchange(NEVER, BUSY, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
                {
                    let outcome = capture::relaxed(|| register(attached));
                    DEVICE_OFFSET.store(outcome.unwrap_or(0), Ordering::Relaxed);
                    let state = if outcome.is_ok() { DONE } else { REFUSED };
                    STATE.store(state, Ordering::Release);
                    if let Err(status) = outcome {
                        follow::page_refused(attached, status);
                    }
                }
            }
            BUSY => {
                client::current()?;
                // In a call of the driver, which may take what this thread holds: no core is kept
                // busy for it.
                clock::pause(LOOK);
            }
            LEAVING => {
                look_after();
                return None;
            }
            _ => return None,
        }
    }
}

fn register(attached: &Attached) -> Result<u64, CUresult> {
    let page: *const channel::ClientHalf = attached.end.client;
    // What the device writes lies in the part that pages of all versions have.
    let bytes = <channel::ClientHalf as channel::Page>::LEAST_BYTES.next_multiple_of(4096);
    // Portable and mapped: good in every context of this process.
    const FLAGS: u32 = 1 | 2;
    let _inside = thread().enter();
    // SAFETY: a page-aligned mapping of our own, of that many whole pages, that is never unmapped.
    let result = unsafe { real::cuMemHostRegister_v2(page.cast_mut().cast(), bytes, FLAGS) };
    match result {
        CUresult::CUDA_SUCCESS => {
            let mut context = CUcontext(std::ptr::null_mut());
            // SAFETY: valid pointer to a local.
            let known = unsafe { real::cuCtxGetCurrent(&raw mut context) };
            let owner = if known.is_ok() { context.0.addr() } else { 0 };
            OWNER.store(owner, Ordering::Relaxed);
        }
        // By the context that it was registered in before.
        CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED => {}
        refused => return Err(refused),
    }
    let mut device = CUdeviceptr::default();
    // SAFETY: valid pointer to a local; the page is registered.
    let result =
        unsafe { real::cuMemHostGetDevicePointer_v2(&raw mut device, page.cast_mut().cast(), 0) };
    match result {
        CUresult::CUDA_SUCCESS => Ok(device.0.wrapping_sub(page as u64)),
        refused => Err(refused),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_was_withdrawn_by_a_thread_that_has_ended_is_registered_again() {
        let withdraw = || {
            STATE.store(LEAVING, Ordering::Relaxed);
            WITHDRAWER.store(process::own_tid(), Ordering::Relaxed);
            thread().withdrew.set(1);
        };
        let looked = || {
            LOOK_AT_NS.store(0, Ordering::Relaxed);
            look_after();
            STATE.load(Ordering::Relaxed)
        };
        // The same thread, which has jumped, at its next call.
        withdraw();
        assert_eq!(looked(), LEAVING);
        left();
        assert_eq!(looked(), NEVER);
        // By a thread that has ended.
        std::thread::spawn(withdraw).join().expect("it ends");
        let begun_ns = now_ns();
        while looked() == LEAVING {
            assert!(now_ns() - begun_ns < 30_000_000_000, "nobody sees its end");
            std::thread::yield_now();
        }
        // Not before it is due.
        STATE.store(LEAVING, Ordering::Relaxed);
        LOOK_AT_NS.store(u64::MAX, Ordering::Relaxed);
        look_after();
        assert_eq!(STATE.swap(NEVER, Ordering::Relaxed), LEAVING);
    }
}
