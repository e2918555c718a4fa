//! Time as the simulated device sees it: CLOCK_MONOTONIC nanoseconds, the same for all processes of
//! the host.

/// Now, in ns of CLOCK_MONOTONIC.
pub fn now_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes one timespec of ours.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Sleeping is not finer than this; what remains is spun.
const SPIN_NS: u64 = 30_000;

/// Returns at `until_ns`, not before; spins only the last tens of microseconds.
pub fn wait_until(until_ns: u64) {
    sleep_until(until_ns.saturating_sub(SPIN_NS));
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
    if until_ns.saturating_sub(now_ns()) > WORTH_SLEEPING_NS {
        wait_until(until_ns);
    }
    while now_ns() < until_ns {
        // Mostly pauses: the processor's other thread may be computing.
        (0..8).for_each(|_| std::hint::spin_loop());
    }
}

/// Sleeps until about `until_ns`; at once when that has passed.
pub fn sleep_until(until_ns: u64) {
    while now_ns() < until_ns {
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
