//! The compute engine's timeline, as one process sees it.
//!
//! Work takes its modelled time on a timeline that all processes of the host share. The thread that
//! carries work out may be late, for the host's scheduler is not the device's: what follows starts
//! where the timeline stands, not where the thread woke up. It may also be early by up to
//! [`RUN_AHEAD_NS`], so that kernels of a few microseconds need no sleep each; a thread that looks
//! from the host compares with the clock.

use std::sync::Arc;
use std::time::Duration;

use shim_ffi::CUresult;

use super::aside::Aside;
use crate::clock;
use crate::device_state::{CATCH_UP_NS, DeviceState};

/// How far the timeline may be ahead of the clock before the thread sleeps.
pub const RUN_AHEAD_NS: u64 = 50_000;

/// What the host may take for work beyond the device's time without getting out of the program's
/// way for the next: about what that takes.
const HOST_BOUND_NS: u64 = 50_000;

/// How long a process keeps the compute engine without work while others wait for it: two launches
/// of a busy program are not further apart.
const LINGER_NS: u64 = 20_000;

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
        self.come_in(ready_ns, slice_ns);
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
        self.come_in(ready_ns, slice_ns);
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

    /// Takes the engine, where it is not held. It has not been held since its queue was empty,
    /// where the engine is such a one and another process wanted it: however late the thread is to
    /// find that.
    fn come_in(&mut self, ready_ns: u64, slice_ns: u64) {
        if self.holding
            && self.device_state.profile().leaves_when_empty
            && ready_ns > self.cursor_ns
            && self.device_state.turn_wanted(self.device)
        {
            self.hand_on();
        }
        if !self.holding {
            self.acquire(ready_ns, slice_ns);
        }
    }

    fn hand_on(&mut self) {
        self.holding = false;
        self.device_state.give_turn(self.device, self.cursor_ns);
    }

    fn acquire(&mut self, ready_ns: u64, slice_ns: u64) {
        let from = self.device_state.take_turn(self.device, ready_ns);
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
            self.acquire(at, slice_ns);
        } else {
            self.slice_end_ns = at + slice_ns;
        }
    }

    /// How long the thread is to look for more work before it leaves the engine, which has nothing
    /// to do; `None`: it may leave.
    pub fn lingers(&self, lingered: bool) -> Option<Duration> {
        if !self.device_state.profile().leaves_when_empty {
            return (!lingered && self.is_wanted()).then(|| clock::host_duration(LINGER_NS));
        }
        // The thread is ahead of the engine, whose queue is not empty before that.
        let left_ns = self.cursor_ns.saturating_sub(clock::now_ns());
        (self.holding && left_ns > 0).then(|| clock::host_duration(left_ns))
    }

    /// True while it is held and another process waits for it.
    fn is_wanted(&self) -> bool {
        self.holding && self.device_state.turn_wanted(self.device)
    }

    /// Leaves the engine to others, since there is nothing to do.
    pub fn idle(&mut self) {
        if self.holding {
            self.hand_on();
        }
        self.host_bound = false;
        self.aside.back();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Profile;

    const KERNEL_NS: u64 = 100_000;

    /// Two processes on an engine with these keys, each a copy of the library with a slot.
    struct Two {
        dir: std::path::PathBuf,
        states: [Arc<DeviceState>; 2],
    }

    impl Two {
        fn with(name: &str, keys: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("simgpu-{name}-{}", std::process::id()));
            let set = |key: &str| match key {
                "SUBLET_SIM_PROFILE" => Some("h200-measured".to_owned()),
                "SUBLET_SIM_SET" => Some(keys.to_owned()),
                _ => None,
            };
            let config = Profile::text_from_env(set).expect("a profile");
            let states = [(); 2].map(|()| {
                let state = DeviceState::open(&dir, &config).expect("a device");
                state.claim().expect("a slot");
                Arc::new(state)
            });
            Self { dir, states }
        }
    }

    impl Drop for Two {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }

    fn kernel(compute: &mut Compute, ready_ns: u64) -> u64 {
        compute.execute(ready_ns, KERNEL_NS, 1, || (Ok(()), 0)).0
    }

    /// When the second kernel of the one ends that has nothing to do for a while, and when the
    /// other's, who waits meanwhile.
    fn ends_after_a_pause(name: &str, keys: &str) -> (u64, u64) {
        let two = Two::with(name, keys);
        let [one, other] = two.states.clone();
        let mut first = Compute::new(Arc::clone(&one), 0);
        let ended_ns = kernel(&mut first, clock::now_ns());
        let waits = std::thread::spawn(move || {
            let mut second = Compute::new(other, 0);
            let ended_ns = kernel(&mut second, 0);
            second.idle();
            ended_ns
        });
        let limit = std::time::Instant::now() + Duration::from_secs(60);
        while !one.turn_wanted(0) {
            assert!(std::time::Instant::now() < limit, "nobody waits");
            std::thread::sleep(Duration::from_micros(100));
        }
        // Its thread has not seen the pause: all that tells of it is when the work was there.
        let again_ns = kernel(&mut first, ended_ns + KERNEL_NS / 2);
        first.idle();
        (again_ns, testbed::join(waits))
    }

    #[test]
    fn a_process_leaves_the_engine_when_its_queue_is_empty_by_the_engines_own_time() {
        let (own_ns, other_ns) = ends_after_a_pause("leaves", "timeslice_us=1000000");
        assert!(other_ns < own_ns, "{other_ns} {own_ns}");
        let turn_ns = 140_000;
        assert!(
            own_ns >= other_ns + turn_ns + KERNEL_NS,
            "{other_ns} {own_ns}"
        );
        println!(
            "now: back {} us after the other's kernel",
            (own_ns - other_ns) / 1000
        );
        let keys = "timeslice_us=1000000;leaves_when_empty=0";
        let (own_ns, other_ns) = ends_after_a_pause("stays", keys);
        assert!(
            own_ns < other_ns,
            "it keeps the engine: {own_ns} {other_ns}"
        );
    }

    #[test]
    fn a_turn_after_idleness_is_free_or_not_as_the_profile_says() {
        let switch = |name: &str, keys: &str| {
            let two = Two::with(name, keys);
            let [one, other] = &two.states;
            one.take_turn(0, 0);
            one.give_turn(0, 1);
            let ready_ns = clock::now_ns() + 1_000_000_000;
            let from_ns = other.take_turn(0, ready_ns);
            other.give_turn(0, 1);
            (from_ns, ready_ns)
        };
        let (from_ns, ready_ns) = switch("paid-turn", "");
        assert_eq!(from_ns, ready_ns + 140_000);
        let (from_ns, ready_ns) = switch("free-turn", "idle_turn_free=1");
        assert!(from_ns < ready_ns, "{from_ns} {ready_ns}");
    }
}
