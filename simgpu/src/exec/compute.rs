//! The compute engine's timeline, as one process sees it.
//!
//! Work takes its modelled time on a timeline that all processes of the host share. The thread that
//! carries work out may be late, for the host's scheduler is not the device's: what follows starts
//! where the timeline stands, not where the thread woke up. It may also be early by up to
//! [`RUN_AHEAD_NS`], so that kernels of a few microseconds need no sleep each; a thread that looks
//! from the host compares with the clock.

use std::sync::Arc;

use shim_ffi::CUresult;

use super::aside::Aside;
use crate::clock;
use crate::device_state::{CATCH_UP_NS, DeviceState};

/// How far the timeline may be ahead of the clock before the thread sleeps.
pub const RUN_AHEAD_NS: u64 = 50_000;

/// What the host may take for work beyond the device's time without getting out of the program's
/// way for the next: about what that takes.
const HOST_BOUND_NS: u64 = 50_000;

/// How often a kernel that spins looks for what it waits for.
const SPIN_LOOK_NS: u64 = 20_000;

/// This process's hold on one device's compute engine.
pub struct Compute {
    device_state: Arc<DeviceState>,
    device: usize,
    holding: bool,
    cursor_ns: u64,
    slice_end_ns: u64,
    /// Work has taken the host longer than the device since the engine was last idle.
    host_bound: bool,
    aside: Aside,
}

impl Compute {
    /// Not holding the engine.
    pub fn new(device_state: Arc<DeviceState>, device: usize) -> Self {
        Self {
            device_state,
            device,
            holding: false,
            cursor_ns: 0,
            slice_end_ns: 0,
            host_bound: false,
            aside: Aside::default(),
        }
    }

    /// Carries `run` out on the engine; it takes `model_ns` there and what `run` says that it takes
    /// besides, or as long as it really took. Returns when it ended on the timeline, and what came
    /// of `run`.
    pub fn execute(
        &mut self,
        ready_ns: u64,
        model_ns: u64,
        launches: u64,
        run: impl FnOnce() -> (Result<(), CUresult>, u64),
    ) -> (u64, Result<(), CUresult>) {
        let slice_ns = self
            .device_state
            .scaled(self.device_state.profile().timeslice_ns)
            .max(1_000);
        if !self.holding {
            self.acquire(slice_ns);
        }
        let mut at = self.start(ready_ns);
        if at >= self.slice_end_ns {
            self.next_slice(at, slice_ns);
            at = self.start(ready_ns);
        }
        if self.host_bound {
            self.aside.step();
        }
        let began = clock::now_ns();
        let (outcome, more_ns) = run();
        let model_ns = model_ns.saturating_add(more_ns);
        let real_ns = clock::now_ns() - began;
        self.host_bound |= real_ns > model_ns.saturating_add(HOST_BOUND_NS);
        if real_ns >= model_ns {
            // Host code in a kernel's place cannot be stopped half way: what it took beyond the
            // slice is owed.
            at += real_ns;
            self.device_state.computed(self.device, real_ns, launches);
            if at > self.slice_end_ns && self.device_state.turn_wanted(self.device) {
                self.device_state
                    .overran(self.device, at - self.slice_end_ns);
            }
        } else {
            let mut left = model_ns;
            let mut launches = launches;
            loop {
                let part = left.min(self.slice_end_ns.saturating_sub(at));
                at += part;
                left -= part;
                self.device_state.computed(self.device, part, launches);
                launches = 0;
                if left == 0 {
                    break;
                }
                self.cursor_ns = at;
                self.next_slice(at, slice_ns);
                at = self.cursor_ns.max(at);
            }
        }
        self.cursor_ns = at;
        clock::sleep_until(at.saturating_sub(RUN_AHEAD_NS));
        (at, outcome)
    }

    /// Spins until `over` says so or fails: the engine is busy with it, in slices like with any
    /// kernel. Returns when it ended on the timeline, and what came of it.
    pub fn spin(
        &mut self,
        ready_ns: u64,
        mut over: impl FnMut() -> Result<bool, CUresult>,
    ) -> (u64, Result<(), CUresult>) {
        let slice_ns = self
            .device_state
            .scaled(self.device_state.profile().timeslice_ns)
            .max(1_000);
        if !self.holding {
            self.acquire(slice_ns);
        }
        let mut at = self.start(ready_ns);
        loop {
            if at >= self.slice_end_ns {
                self.cursor_ns = at;
                self.next_slice(at, slice_ns);
                at = self.start(ready_ns);
            }
            match over() {
                Ok(false) => {}
                Ok(true) => return (at, Ok(())),
                Err(status) => return (at, Err(status)),
            }
            let part = SPIN_LOOK_NS.min(self.slice_end_ns.saturating_sub(at));
            at += part;
            self.device_state.computed(self.device, part, 0);
            self.cursor_ns = at;
            clock::sleep_until(at);
        }
    }

    fn start(&self, ready_ns: u64) -> u64 {
        self.cursor_ns
            .max(ready_ns)
            .max(clock::now_ns().saturating_sub(CATCH_UP_NS))
    }

    fn acquire(&mut self, slice_ns: u64) {
        let from = self.device_state.take_turn(self.device);
        self.holding = true;
        self.cursor_ns = self
            .cursor_ns
            .max(from)
            .max(clock::now_ns().saturating_sub(CATCH_UP_NS));
        self.slice_end_ns = self.cursor_ns + slice_ns;
    }

    /// At the end of a slice: on with the next one, after the others' turns if anybody waits.
    fn next_slice(&mut self, at: u64, slice_ns: u64) {
        clock::sleep_until(at);
        if self.device_state.turn_wanted(self.device) || !self.device_state.has_turn(self.device) {
            self.device_state.give_turn(self.device, at);
            self.acquire(slice_ns);
        } else {
            self.slice_end_ns = at + slice_ns;
        }
    }

    /// True while it is held and another process waits for it.
    pub fn is_wanted(&self) -> bool {
        self.holding && self.device_state.turn_wanted(self.device)
    }

    /// Leaves the engine to others, since there is nothing to do.
    pub fn idle(&mut self) {
        if self.holding {
            self.holding = false;
            self.device_state.give_turn(self.device, self.cursor_ns);
        }
        self.host_bound = false;
        self.aside.back();
    }
}
