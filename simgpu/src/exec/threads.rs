//! The threads that carry operations out: one per engine of a device, one for host functions, one
//! that looks at words in memory.

use std::ffi::{CString, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::*;

use shim_ffi::CUresult;

use super::compute::{Compute, RUN_AHEAD_NS};
use super::engine::{Engine, HOST, Op, PER_DEVICE, POLL, State, StreamInfo, fail};
use super::work::{Copy, Direction, Work, write_word};
use crate::clock;
use crate::device_state::{CATCH_UP_NS, CopyEngine};
use crate::lock::MutexGuard;

/// Copies reserve their engine in parts, so that processes share it fairly and a killed one leaves
/// little behind.
const COPY_PART: u64 = 4 << 20;
/// Copy engine set-up time.
const COPY_SETUP_NS: u64 = 1_500;

impl Engine {
    /// Waits for an operation for `thread`; leaves the compute engine first when there is none.
    fn next<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        thread: usize,
        mut compute: Option<&mut Compute>,
    ) -> (MutexGuard<'a, State>, StreamInfo, Op, u64) {
        let mut reported = false;
        let mut lingered = false;
        loop {
            let best = (0..state.ready[thread].len()).min_by_key(|at| {
                (
                    state.ready[thread][*at].priority,
                    state.ready[thread][*at].sequence,
                )
            });
            if let Some(at) = best {
                let stream = state.ready[thread].swap_remove(at).stream;
                let Some(queue) = state.queues.get(&stream) else {
                    continue;
                };
                let Some(head) = queue.ops.front() else {
                    continue;
                };
                let ready_ns = Self::ready(&state, queue, head).unwrap_or(0);
                let info = queue.info.clone();
                if let Some(op) = state
                    .queues
                    .get_mut(&stream)
                    .and_then(|queue| queue.ops.pop_front())
                {
                    return (state, info, op, ready_ns);
                }
                continue;
            }
            if let Some(compute) = &mut compute
                && !reported
            {
                if let Some(time) = compute.lingers(lingered) {
                    // The program is likely to be about to launch more; giving the engine away
                    // costs more than this.
                    lingered = self.wake[thread].wait_for(&mut state, time).timed_out();
                    continue;
                }
                reported = true;
                MutexGuard::unlocked(&mut state, || compute.idle());
                continue;
            }
            self.wake[thread].wait(&mut state);
        }
    }

    /// Books an operation that a thread carried out.
    fn finish<'a>(
        &'a self,
        info: &StreamInfo,
        ended_ns: u64,
        outcome: Result<(), CUresult>,
    ) -> MutexGuard<'a, State> {
        let mut state = self.state.lock();
        if let Some(queue) = state.queues.get_mut(&info.id) {
            queue.dispatched = false;
            if let Err(status) = outcome {
                fail(queue, status);
            }
        }
        self.completed(&mut state, info.id, ended_ns);
        self.pump_all(&mut state);
        state
    }

    pub(super) fn run_compute(&self, device: usize) {
        let thread = device * PER_DEVICE;
        let mut compute = Compute::new(self.device_state.clone(), device);
        let profile = self.device_state.profile().clone();
        let mut state = self.state.lock();
        loop {
            let (guard, info, op, ready_ns) = self.next(state, thread, Some(&mut compute));
            drop(guard);
            let failed = info.failure.load(Acquire) != 0;
            let (ended_ns, outcome) = match &op.work {
                _ if failed => (ready_ns, Ok(())),
                Work::Kernel(launch) => {
                    let model_ns = if launch.endless {
                        u64::MAX / 2
                    } else {
                        self.device_state
                            .scaled(launch.model_ns(&profile, &self.memory, device))
                    };
                    // A host kernel that panics is a kernel that failed; the device goes on.
                    const PANICKED: CUresult = CUresult::CUDA_ERROR_LAUNCH_FAILED;
                    let may_go_on = || {
                        catch_unwind(AssertUnwindSafe(|| launch.may_go_on(&self.memory, device)))
                            .unwrap_or(Err(PANICKED))
                    };
                    let (ready_ns, met) = match launch.waits() {
                        true => compute.spin(ready_ns, may_go_on),
                        false => (ready_ns, Ok(())),
                    };
                    compute.execute(ready_ns, model_ns, 1, || {
                        if met.is_err() {
                            return (met, 0);
                        }
                        let (outcome, linked) =
                            catch_unwind(AssertUnwindSafe(|| launch.run(&self.memory, device)))
                                .unwrap_or((Err(PANICKED), 0));
                        let link_ns = (linked as f64 / profile.copy_pinned_gbps) as u64;
                        (outcome, self.device_state.scaled(link_ns))
                    })
                }
                Work::Fill(fill) => {
                    let rate = if self.memory.is_over_the_link(fill.address) {
                        profile.copy_out_pinned_gbps
                    } else {
                        profile.memory_gbps
                    };
                    let model_ns = profile.launch_ns + (fill.bytes() as f64 / rate) as u64;
                    compute.execute(ready_ns, self.device_state.scaled(model_ns), 0, || {
                        (fill.run(&self.memory), 0)
                    })
                }
                Work::Copy(copy) => {
                    let model_ns = profile.launch_ns
                        + (2.0 * copy.bytes() as f64 / profile.memory_gbps) as u64;
                    let rows = copy.height * copy.depth;
                    compute.execute(ready_ns, self.device_state.scaled(model_ns), 0, || {
                        (copy.run(&self.memory, 0, rows), 0)
                    })
                }
                Work::Write {
                    address,
                    value,
                    wide,
                } => compute.execute(ready_ns, 0, 0, || {
                    (write_word(&self.memory, *address, *value, *wide), 0)
                }),
                _ => (ready_ns, Ok(())),
            };
            state = self.finish(&info, ended_ns, outcome);
        }
    }

    pub(super) fn run_copies(&self, thread: usize) {
        let device = thread / PER_DEVICE;
        let engine = if thread % PER_DEVICE == 1 {
            CopyEngine::In
        } else {
            CopyEngine::Out
        };
        let mut state = self.state.lock();
        loop {
            let (guard, info, op, ready_ns) = self.next(state, thread, None);
            drop(guard);
            let failed = info.failure.load(Acquire) != 0;
            let (ended_ns, outcome) = match &op.work {
                Work::Copy(copy) if !failed => self.copy(device, engine, copy, ready_ns),
                _ => (ready_ns, Ok(())),
            };
            state = self.finish(&info, ended_ns, outcome);
        }
    }

    fn copy(
        &self,
        device: usize,
        engine: CopyEngine,
        copy: &Copy,
        ready_ns: u64,
    ) -> (u64, Result<(), CUresult>) {
        let profile = self.device_state.profile();
        let rate = match copy.direction {
            Direction::Peer => profile.peer_gbps,
            _ if copy.pageable => profile.copy_pageable_gbps,
            Direction::Out => profile.copy_out_pinned_gbps,
            _ => profile.copy_pinned_gbps,
        };
        let rows = copy.height * copy.depth;
        let rows_per_part = (COPY_PART / copy.width.max(1)).max(1);
        let mut ended_ns = ready_ns;
        let mut setup_ns = COPY_SETUP_NS;
        let parts: Vec<(u64, u64)> = if rows == 1 {
            (0..copy.width.div_ceil(COPY_PART))
                .map(|part| (part * COPY_PART, ((part + 1) * COPY_PART).min(copy.width)))
                .collect()
        } else {
            (0..rows.div_ceil(rows_per_part))
                .map(|part| (part * rows_per_part, ((part + 1) * rows_per_part).min(rows)))
                .collect()
        };
        for (from, to) in parts {
            let bytes = if rows == 1 {
                to - from
            } else {
                (to - from) * copy.width
            };
            let began = clock::now_ns();
            let both = profile.copy_duplex_factor < 1.0
                && self
                    .device_state
                    .copies_the_other_way(device, engine, began.max(ended_ns));
            let rate = if both {
                rate * profile.copy_duplex_factor
            } else {
                rate
            };
            let model_ns = self
                .device_state
                .scaled(setup_ns + (bytes as f64 / rate) as u64);
            setup_ns = 0;
            let outcome = if rows == 1 {
                copy.run_part(&self.memory, from, to)
            } else {
                copy.run(&self.memory, from, to)
            };
            // What the host's thread is late for, or takes for a part beyond its time, the engine
            // makes up for, as far as it may.
            let start_ns = ended_ns.max(began.saturating_sub(CATCH_UP_NS));
            ended_ns = self.device_state.copy(device, engine, start_ns, model_ns);
            if outcome.is_err() {
                return (ended_ns, outcome);
            }
            clock::sleep_until(ended_ns.saturating_sub(RUN_AHEAD_NS));
        }
        (ended_ns, Ok(()))
    }

    pub(super) fn run_host(&self) {
        let mut state = self.state.lock();
        loop {
            let (guard, info, op, ready_ns) = self.next(state, HOST, None);
            drop(guard);
            clock::sleep_until(ready_ns);
            match op.work {
                // SAFETY: the program gave the function to be called once, from a thread of the
                // driver, with this pointer.
                Work::Host(Some(function), data) => unsafe { function(data.0) },
                Work::Callback(Some(function), stream, data) => {
                    let status = CUresult(info.failure.load(Acquire));
                    // SAFETY: as above.
                    unsafe { function(stream, status, data.0) };
                }
                _ => {}
            }
            state = self.finish(&info, clock::now_ns(), Ok(()));
        }
    }

    /// Looks at words that streams wait for; rarer, the longer nothing happens.
    pub(super) fn run_poll(&self) {
        let mut pause_ns = 10_000;
        let mut state = self.state.lock();
        loop {
            if !state.polling {
                self.wake[POLL].wait(&mut state);
                pause_ns = 10_000;
                continue;
            }
            MutexGuard::unlocked(&mut state, || {
                clock::sleep_until(clock::now_ns() + pause_ns)
            });
            state.polling = false;
            let before = state.active.len();
            self.pump_all(&mut state);
            pause_ns = if state.active.len() == before {
                (pause_ns * 5 / 4).min(200_000)
            } else {
                10_000
            };
        }
    }
}

/// What a thread of the device is to do.
struct Start {
    name: CString,
    body: Box<dyn FnOnce() + Send>,
}

/// Bytes of stack of a thread of the device; host kernels of kernels keep their data elsewhere.
const STACK: usize = 1 << 20;

/// Starts a thread of the device, by the C library's hand: see [`crate::lock`]. It gets no signals:
/// those are for the program's threads. False where there can be none.
pub(super) fn start_thread(name: String, body: impl FnOnce() + Send + 'static) -> bool {
    extern "C" fn main(start: *mut c_void) -> *mut c_void {
        // SAFETY: made by `Box::into_raw` below, for this thread alone.
        let start = unsafe { Box::from_raw(start.cast::<Start>()) };
        // SAFETY: a NUL-terminated name, of which the kernel reads 15 bytes.
        unsafe { libc::prctl(libc::PR_SET_NAME, start.name.as_ptr()) };
        // A panic here is a defect of the device; the thread ends, and what waits for it shows it.
        let _ = catch_unwind(AssertUnwindSafe(start.body));
        std::ptr::null_mut()
    }
    let start = Box::into_raw(Box::new(Start {
        name: CString::new(name).unwrap_or_default(),
        body: Box::new(body),
    }));
    // SAFETY: all of these are ours; signals are blocked for this thread while the new one inherits
    // its mask, and the mask is restored. `start` goes to the new thread, or is taken back where
    // there is none.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        let mut thread: libc::pthread_t = std::mem::zeroed();
        libc::pthread_attr_init(&mut attributes);
        libc::pthread_attr_setstacksize(&mut attributes, STACK);
        libc::pthread_attr_setdetachstate(&mut attributes, libc::PTHREAD_CREATE_DETACHED);
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let failed = libc::pthread_create(&mut thread, &attributes, main, start.cast());
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        libc::pthread_attr_destroy(&mut attributes);
        if failed != 0 {
            drop(Box::from_raw(start));
        }
        failed == 0
    }
}
