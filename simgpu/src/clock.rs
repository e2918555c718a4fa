//! Time as the simulated device sees it: CLOCK_MONOTONIC nanoseconds, the same for all processes of
//! the host, divided by the dilation that they agreed on.
//!
//! A device with a dilation of 4 does in four seconds what it would do in one. Nothing but this
//! clock knows of that: all that is measured and waited for is of the clock's time.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// What the host's time is divided by.
static DILATION: AtomicU32 = AtomicU32::new(1);

/// Sets it, before anybody looks at the clock.
pub fn dilate(dilation: u32) {
    DILATION.store(dilation.max(1), Relaxed);
}

/// What the host's time is divided by.
pub fn dilation() -> u32 {
    DILATION.load(Relaxed)
}

/// How long the host takes for that.
fn of_the_host(ns: u64) -> u64 {
    ns.saturating_mul(u64::from(dilation()))
}

/// The same, for those that wait by a duration.
pub fn host_duration(ns: u64) -> Duration {
    Duration::from_nanos(of_the_host(ns))
}

/// Now, in ns of CLOCK_MONOTONIC over the dilation.
pub fn now_ns() -> u64 {
    match dilation() {
        1 => host_now_ns(),
        dilation => host_now_ns() / u64::from(dilation),
    }
}

/// Now, in ns of CLOCK_MONOTONIC.
fn host_now_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes one timespec of ours.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The host's sleeping is not finer than this; what remains is spun.
const SPIN_NS: u64 = 30_000;

/// Returns at `until_ns`, not before; spins only the last tens of microseconds.
pub fn wait_until(until_ns: u64) {
    host_sleep_until(of_the_host(until_ns).saturating_sub(SPIN_NS));
    while now_ns() < until_ns {
        std::hint::spin_loop();
    }
}

/// A thread that sleeps for a few microseconds on a busy host is let on hundreds later: shorter
/// waits are spun whole.
const WORTH_SLEEPING_NS: u64 = 100_000;

/// Returns at `until_ns`, where the thread itself is at work until then: it keeps its core for a
/// short while.
pub fn work_until(until_ns: u64) {
    if of_the_host(until_ns.saturating_sub(now_ns())) > WORTH_SLEEPING_NS {
        wait_until(until_ns);
    }
    while now_ns() < until_ns {
        // Mostly pauses: the processor's other thread may be computing.
        (0..8).for_each(|_| std::hint::spin_loop());
    }
}

/// Sleeps until about `until_ns`; at once when that has passed.
pub fn sleep_until(until_ns: u64) {
    host_sleep_until(of_the_host(until_ns));
}

fn host_sleep_until(until_ns: u64) {
    while host_now_ns() < until_ns {
        let time = libc::timespec {
            tv_sec: (until_ns / 1_000_000_000) as i64,
            tv_nsec: (until_ns % 1_000_000_000) as i64,
        };
        // SAFETY: reads one timespec of ours; interrupted sleeps are taken up again by the loop.
        unsafe {
            libc::clock_nanosleep(
                libc::CLOCK_MONOTONIC,
                libc::TIMER_ABSTIME,
                &time,
                std::ptr::null_mut(),
            );
        }
    }
}

/// Makes the calling thread's sleeps as fine as the kernel can.
pub fn fine_sleeps() {
    // SAFETY: changes this thread's timer slack only.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000_u64) };
}
