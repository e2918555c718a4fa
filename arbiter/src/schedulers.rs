//! The schedulers of all devices, when each is due, and the gangs that tie some of them together.
//!
//! Invariants: a device has one scheduler, one due time and one chosen policy, all at its index. A
//! device that is *dirty* is stepped with the next [`step`](Schedulers::step), whatever its due
//! time; the gangs are dealt after the devices that they use have been stepped.

use std::ops::{Index, IndexMut};

use control::PolicyChoice;

use crate::clock::Clock;
use crate::dispatch::joint::{self, Links};
use crate::dispatch::{DeviceScheduler, GangScheduler};

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Schedulers {
    all: Vec<DeviceScheduler>,
    due_ns: Vec<Option<u64>>,
    /// The slice policy of each device, as it was chosen.
    policies: Vec<PolicyChoice>,
    gangs: GangScheduler,
    gangs_due_ns: Option<u64>,
    links: Links,
    /// Devices to be stepped at any time, as bits.
    dirty: u32,
    /// Threads of a client were woken since that was asked last.
    woke: bool,
}

impl Schedulers {
    /// How many devices there are.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// The scheduler of a device.
    pub fn get(&self, index: usize) -> Option<&DeviceScheduler> {
        self.all.get(index)
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, index: usize) -> Option<&mut DeviceScheduler> {
        self.all.get_mut(index)
    }

    /// All of them, by their devices' indices.
    pub fn iter(&self) -> std::slice::Iter<'_, DeviceScheduler> {
        self.all.iter()
    }

    /// The same, to be changed.
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, DeviceScheduler> {
        self.all.iter_mut()
    }

    /// The scheduler of the next device.
    pub fn push(&mut self, scheduler: DeviceScheduler, policy: PolicyChoice) {
        self.all.push(scheduler);
        self.policies.push(policy);
        self.due_ns.push(None);
    }

    /// Another device has the place of one that is gone.
    pub fn replace(&mut self, index: usize, scheduler: DeviceScheduler, policy: PolicyChoice) {
        self.all[index] = scheduler;
        self.policies[index] = policy;
        self.due_ns[index] = None;
    }

    /// Takes note of the policy that a device is to have. False where it has that already.
    pub fn choose(&mut self, index: usize, policy: PolicyChoice) -> bool {
        match self.policies.get_mut(index) {
            Some(before) if *before == policy => false,
            Some(before) => {
                *before = policy;
                true
            }
            None => true,
        }
    }

    /// Something has changed on these devices, as bits.
    pub fn mark(&mut self, devices: u32) {
        self.dirty |= devices;
    }

    /// Finds the gangs anew.
    pub fn form_gangs(&mut self) {
        self.gangs.form(&mut self.all);
    }

    /// Marks the devices that are due.
    pub fn mark_due(&mut self, now_ns: u64) {
        let is_due = |due_ns: &Option<u64>| due_ns.is_some_and(|due_ns| due_ns <= now_ns);
        let due = self.due_ns.iter().enumerate();
        let due = due.filter(|(_, due_ns)| is_due(due_ns));
        self.dirty |= due.fold(0, |bits, (at, _)| bits | 1 << at);
        if is_due(&self.gangs_due_ns) {
            self.dirty |= self.gangs.schedulers();
        }
    }

    /// Steps the devices in which something has changed or that are due, then deals the turns of
    /// gangs. The time is asked anew for each of them: a step may take long.
    pub fn step(&mut self, clock: &Clock) {
        let dirty = std::mem::take(&mut self.dirty);
        if dirty == 0 {
            return;
        }
        self.step_these(dirty, clock);
        let mut stepped = dirty;
        if self.gangs.is_idle() {
            self.gangs_due_ns = None;
        } else if dirty & self.gangs.schedulers() != 0 {
            let (touched, again_ns) = self.gangs.step(clock.mono_ns(), &mut self.all);
            self.gangs_due_ns = again_ns;
            self.step_these(touched, clock);
            stepped |= touched;
        }
        let touched = joint::step(clock.mono_ns(), &mut self.links, stepped, &mut self.all);
        self.step_these(touched, clock);
    }

    fn step_these(&mut self, devices: u32, clock: &Clock) {
        let all = self.all.iter_mut().zip(&mut self.due_ns).enumerate();
        for (_, (scheduler, due_ns)) in all.filter(|(at, _)| devices & (1 << at) != 0) {
            *due_ns = scheduler.step(clock.mono_ns());
            self.woke |= scheduler.take_woken();
        }
    }

    /// When one of them is due.
    pub fn due_ns(&self) -> Option<u64> {
        let due = self.due_ns.iter().copied().chain([self.gangs_due_ns]);
        due.flatten().min()
    }

    /// Whether threads were woken since this was asked last.
    pub fn take_woke(&mut self) -> bool {
        std::mem::take(&mut self.woke)
    }

    /// When a gate opens in front of threads that sleep until then, as far as that is known.
    pub fn wakes_at(&self) -> Option<u64> {
        self.iter().filter_map(DeviceScheduler::wakes_at).min()
    }

    /// Until when a hand-over is under way or near, where one is.
    pub fn hands_over_until(&self, now_ns: u64) -> Option<u64> {
        let until = self
            .iter()
            .filter_map(|scheduler| scheduler.hands_over_until(now_ns));
        until.max()
    }

    /// Opens every gate for good: the arbiter ends.
    pub fn open_all(&mut self) {
        self.iter_mut().for_each(DeviceScheduler::open_all);
    }
}

impl Index<usize> for Schedulers {
    type Output = DeviceScheduler;

    fn index(&self, index: usize) -> &DeviceScheduler {
        &self.all[index]
    }
}

impl IndexMut<usize> for Schedulers {
    fn index_mut(&mut self, index: usize) -> &mut DeviceScheduler {
        &mut self.all[index]
    }
}
