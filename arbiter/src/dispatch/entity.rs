//! A tenant's run entity on a device: its gates, what its clients claim, what it used.

use std::rc::Rc;

use channel::Grant;
use channel::arbiter::ClientPages;
use policy::residency::Standing;
use policy::{Class, Holder, Iterations, Memory, TenantId, TenantView};

use super::bounds::{Bounds, Slices};
use super::co_ranks::CoRanks;
use super::drain::Drain;
use super::host_stall::Rate;
use super::pace::{Answer, Pace};
use super::progress::Progress;
use super::unfinished::{Moved, Unfinished};
use super::violation::{Violation, ViolationRecord};
use crate::peer::{self, Activity};
use crate::terms::Terms;
use crate::usage::Usage;

/// A thread that was let in says so within this time; later its waiting is no sign of life.
/// TIMEOUT: the wake-up of a thread on a host with more threads than cores takes a few
/// milliseconds.
const WAKE_NS: u64 = 10_000_000;
/// A tenant that was let in, said nothing for so many whole slices (or for as long as it is waited
/// for) and still waits is a stopped process.
const UNRESPONSIVE_AFTER: u32 = 3;
/// How long it is passed over before it gets another chance: at first, and at most after twice as
/// long each time. A host with more threads than processors lets a thread wait for tens of
/// milliseconds; a stopped process stays away.
const UNRESPONSIVE_NS: u64 = 20_000_000;
const UNRESPONSIVE_MAX_NS: u64 = 1_000_000_000;
/// From here on that is reported. TIMEOUT: it was given a dozen slices in vain by then.
const UNRESPONSIVE_REPORT_NS: u64 = 300_000_000;
/// A tenant that takes longer than this to come after it was let in is slow: the host has more
/// threads than cores, and a slice may be shorter than the time after which its thread gets one.
const SLOW_START_NS: u64 = 1_000_000;
/// For so long the slice of a tenant that was slow, or missed its last slice, waits for it to
/// begin. It is charged for that time like for the slice.
const GRACE_NS: u64 = WAKE_NS;
/// In-flight work that lasts so long is not the rest of a slice any more. TIMEOUT: kernels of tens
/// of milliseconds are common, of a second rare.
const ENDLESS_NS: u64 = 1_000_000_000;
/// So many submissions past a closed gate between two inspections are no race with its closing.
const UNGATED: u64 = 256;
/// Its gate was closed for at least so long, so that what was on its way has arrived.
const SETTLED_NS: u64 = 50_000_000;

/// A tenant of the device.
#[derive(Debug)]
pub(super) struct RunEntity {
    pub tenant: TenantId,
    pub terms: Terms,
    /// Whether its memory is where it can be used.
    pub standing: Standing,
    pub clients: Vec<(u64, Rc<ClientPages>)>,
    pub hold: Option<Hold>,
    /// It is granted together with its run entities on other devices or not at all, by the gang
    /// scheduler.
    pub gang: bool,
    /// Somebody waits at its gate.
    pub waits: bool,
    /// It is charged for the time from here on.
    pub busy: bool,
    /// When its gate was closed, where its in-flight work has not ended.
    pub drain_since_ns: Option<u64>,
    /// How long its drains are, and when this one ends.
    pub drain: Drain,
    /// Of the slice that has begun, what is not charged to it.
    pub forgiven_ns: u64,
    /// Its slice began before the end of the drain before it, which is expected then: until one of
    /// the two happens the device works for the other tenant.
    pub behind_until_ns: u64,
    /// What its slices have left on the device.
    unfinished: Unfinished,
    /// It was found to have endless work, beside which other work of it gets on. That other work
    /// need not wait for the end of the endless one.
    endless_in_part: bool,
    /// Number of marks that had passed when it was looked at last.
    passed: u64,
    /// It was passed over for so long that its process must be stopped, unless the host is.
    pub suspected_unresponsive: bool,
    /// How long it may be silent before it counts as idle.
    pub quiet_ns: u64,
    /// It holds the device and had nothing on it when it was looked at last: it counts as idle
    /// then, unless it does something.
    pub idle_ns: Option<u64>,
    /// It counts as wanting the device until then although nobody waits: its slice ended while it
    /// was at work, or its in-flight work has not ended. Its threads are inside the driver, or on
    /// their way to the gate.
    pub ready_until_ns: u64,
    /// It lost the device because it was silent, and has not come back since.
    passed_over: bool,
    /// It does not come when it is let in, and is passed over until then.
    unresponsive_until_ns: u64,
    /// How long it was passed over the last time.
    unresponsive_ns: u64,
    /// Slices in a row to which it did not come.
    missed: u32,
    /// It has given a sign of life since its gate opened.
    came: bool,
    /// It took long to come the last time.
    slow: bool,
    pub launches: u64,
    /// What they take.
    pub rate: Rate,
    /// When it was last seen to do something; `None`: never, since its gate opened.
    active_ns: Option<u64>,
    pub usage: Usage,
    pub bounds: Bounds,
    pub record: ViolationRecord,
    /// When its gate closed last, and its submissions as they were counted at the last inspection
    /// since.
    pub closed: (u64, Option<u64>),
    /// The co-ranks that its in-flight work waits for.
    pub co_ranks: CoRanks,
    /// In-flight bound that its clients were given.
    pub window_us: u32,
    /// What is known of its memory and its iterations.
    pub memory: Memory,
    pub iterations: Iterations,
    /// Where it is between their boundaries.
    pub progress: Progress,
}

/// A slice that has begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Hold {
    /// When it began, or begins at the latest where its holder is waited for.
    pub since_ns: u64,
    /// When the gate opened.
    pub opened_ns: u64,
    /// How long its gate stays open, in microseconds.
    pub quantum_us: u32,
}

impl Hold {
    pub fn due_ns(&self) -> u64 {
        self.since_ns
            .saturating_add(u64::from(self.quantum_us) * 1000)
    }
}

impl RunEntity {
    pub fn new(now_ns: u64, tenant: TenantId, terms: Terms, pace: &Pace) -> Self {
        let mut bounds = Bounds::default();
        bounds.set(terms.min_ppm, terms.max_ppm);
        Self {
            tenant,
            terms,
            standing: Standing::In,
            clients: Vec::new(),
            hold: None,
            gang: false,
            waits: false,
            busy: false,
            drain_since_ns: None,
            drain: Drain::default(),
            forgiven_ns: 0,
            behind_until_ns: 0,
            unfinished: Unfinished::default(),
            endless_in_part: false,
            passed: 0,
            suspected_unresponsive: false,
            quiet_ns: pace.quiet_ns,
            idle_ns: None,
            ready_until_ns: 0,
            passed_over: false,
            unresponsive_until_ns: 0,
            unresponsive_ns: 0,
            missed: 0,
            came: true,
            slow: false,
            launches: 0,
            rate: Rate::default(),
            active_ns: None,
            usage: Usage {
                since_ns: now_ns,
                ..Usage::default()
            },
            bounds,
            record: ViolationRecord::default(),
            closed: (now_ns, None),
            co_ranks: CoRanks::default(),
            window_us: pace.lone_window_us,
            memory: Memory::default(),
            iterations: Iterations::default(),
            progress: Progress::default(),
        }
    }

    /// Whether it may run at all: neither its owner, nor its cap, nor the place of its memory holds
    /// it back.
    pub fn may_run(&self) -> bool {
        !self.terms.paused && !self.bounds.is_barred() && self.standing.may_run()
    }

    /// Whether it would use the device if it were let in.
    pub fn wants(&self, now_ns: u64) -> bool {
        self.waits || now_ns < self.ready_until_ns
    }

    /// Whether it is to be let in: it wants the device, or has it and uses it, and may.
    pub fn competes(&self, now_ns: u64) -> bool {
        self.may_run()
            && if self.hold.is_some() {
                self.busy
            } else {
                self.wants(now_ns) && !self.is_stuck(now_ns)
            }
    }

    /// Whether it is demoted for endless work that is still on the device, where more of its work
    /// would only come behind that. Streams that get on beside it do not: the endless one may even
    /// wait for what they do.
    fn is_stuck(&self, now_ns: u64) -> bool {
        let endless = matches!(
            self.record.demoted(now_ns),
            Some(super::Violation::Endless { .. })
        );
        endless && self.drain_since_ns.is_some() && !self.endless_in_part
    }

    /// Its class as it is treated.
    pub fn class(&self, now_ns: u64) -> Class {
        if self.record.demoted(now_ns).is_some() {
            Class::Opportunistic
        } else {
            self.terms.class
        }
    }

    /// As a policy sees it.
    pub fn view(&self, now_ns: u64) -> TenantView {
        let weight_ppm = if self.record.demoted(now_ns).is_some() {
            1
        } else {
            self.terms.weight_ppm
        };
        let wants = !self.gang && self.competes(now_ns);
        TenantView {
            min_share_ppm: self.terms.min_ppm,
            max_share_ppm: self.terms.max_ppm,
            paused: !self.may_run(),
            arrived_ns: self.usage.since_ns,
            memory: self.memory,
            attained_ns: self.usage.device_ns,
            remaining_ns: self
                .terms
                .work_ns
                .map(|work_ns| work_ns.saturating_sub(self.usage.device_ns)),
            deadline_ns: self.terms.deadline_ns,
            iterations: Iterations {
                done_ns: self.progress.done_ns(self.usage.device_ns),
                at_boundary: self.progress.at_boundary(),
                ..self.iterations
            },
            ..TenantView::new(self.tenant, self.class(now_ns), weight_ppm, wants)
        }
    }

    pub fn holder(&self) -> Option<Holder> {
        self.hold.map(|hold| Holder {
            id: self.tenant,
            since_ns: hold.since_ns,
            quantum_us: hold.quantum_us,
        })
    }

    pub fn sample(&self, device: usize) -> Activity {
        self.clients
            .iter()
            .map(|(_, pages)| peer::activity(pages, device))
            .fold(Activity::default(), Activity::and)
    }

    /// Copies out what the clients claim. `gap`: only opportunistic tenants wait for it to fall
    /// silent. Giving way to them too early costs no more than their window, so less silence will
    /// do. Returns when its in-flight work has ended, where that was found now.
    pub fn look(&mut self, now_ns: u64, device: usize, pace: &Pace, gap: bool) -> Option<u64> {
        if self.hold.is_none() && self.drain_since_ns.is_none() {
            let waits = |(_, pages): &(u64, Rc<ClientPages>)| peer::waits(pages, device);
            self.waits = now_ns >= self.unresponsive_until_ns && self.clients.iter().any(waits);
            self.learn_quiet(now_ns, pace);
            self.progress
                .look(&self.clients, self.usage.device_ns, true);
            return None;
        }
        let seen = self.sample(device);
        self.waits = seen.waits;
        self.note_coming(now_ns, seen);
        let moved = Moved {
            submitted: seen.launches != self.launches,
            passed: seen.passed != self.passed,
        };
        self.unfinished
            .look(&self.clients, device, self.hold.is_some(), moved);
        self.passed = seen.passed;
        let woken = self
            .hold
            .is_some_and(|hold| now_ns < hold.opened_ns + WAKE_NS);
        if seen.in_flight()
            || seen.blocking
            || seen.launches != self.launches
            || (seen.waits && woken)
        {
            self.active_ns = Some(now_ns);
        }
        let more = seen.launches.wrapping_sub(self.launches);
        if more < u64::MAX / 2 {
            self.rate.launch(more);
        }
        self.launches = seen.launches;
        let idle = !(seen.in_flight() || seen.blocking);
        self.progress
            .look(&self.clients, self.usage.device_ns, idle);
        let quiet_ns = if gap {
            (self.quiet_ns / 3 * 2).min(pace.gap_quiet_max_ns)
        } else {
            self.quiet_ns
        };
        let quiet_ns = if seen.unmarked {
            pace.unmarked_quiet_ns.max(quiet_ns)
        } else {
            quiet_ns
        };
        let mut drained_ns = None;
        if self.hold.is_some() {
            self.drain_since_ns = None;
        } else if !(seen.in_flight() || seen.blocking)
            && let Some(since_ns) = self.drain_since_ns.take()
        {
            drained_ns = Some(self.drain.end(since_ns, now_ns));
        }
        if self.drain_since_ns.is_some() {
            self.drain.look(now_ns, seen.marks);
            self.ready_until_ns = now_ns + self.quiet_ns;
        }
        let silent = !(seen.in_flight() || seen.blocking || seen.waits);
        let idle_ns = self.active_ns.map(|active_ns| active_ns + quiet_ns);
        self.idle_ns = idle_ns.filter(|_| self.hold.is_some() && silent);
        self.busy = if self.hold.is_some() {
            idle_ns.is_some_and(|idle_ns| now_ns < idle_ns)
        } else {
            self.drain_since_ns.is_some()
        };
        drained_ns
    }

    /// The slice of one that is waited for begins when it comes.
    fn note_coming(&mut self, now_ns: u64, seen: Activity) {
        if self.came || seen.waits && seen.launches == self.launches {
            return;
        }
        self.came = true;
        if let Some(hold) = &mut self.hold {
            self.slow = now_ns > hold.opened_ns + SLOW_START_NS;
            hold.since_ns = hold.since_ns.min(now_ns);
        }
    }

    /// For how long its next slice waits for it to come.
    pub fn grace_ns(&self) -> u64 {
        if self.slow && self.waits { GRACE_NS } else { 0 }
    }

    /// Whether it holds the device by a gate that was opened then.
    pub fn opened_at(&self, opened_ns: u64) -> bool {
        self.hold.is_some_and(|hold| hold.opened_ns == opened_ns)
    }

    /// What remains of a charge once what is nobody's was taken off.
    pub fn forgive(&mut self, got_ns: u64) -> u64 {
        if self.hold.is_none() {
            return got_ns;
        }
        let forgiven_ns = got_ns.min(self.forgiven_ns);
        self.forgiven_ns -= forgiven_ns;
        got_ns - forgiven_ns
    }

    /// A tenant that comes back after a pause that was short enough to wait for is waited for
    /// longer next time.
    fn learn_quiet(&mut self, now_ns: u64, pace: &Pace) {
        if !self.waits || !std::mem::take(&mut self.passed_over) {
            return;
        }
        let pause_ns = now_ns.saturating_sub(self.active_ns.unwrap_or(0));
        let changed_ns = if pause_ns < pace.quiet_max_ns {
            self.quiet_ns * 2
        } else {
            self.quiet_ns / 2
        };
        self.quiet_ns = changed_ns.clamp(pace.quiet_ns, pace.quiet_max_ns);
    }

    /// Opens its gates, or begins its slice anew. True where threads were woken.
    pub fn begin(&mut self, now_ns: u64, device: usize, grant: &Grant) -> bool {
        let mut woken = false;
        for (_, pages) in &self.clients {
            woken |= pages.arbiter.open(device, grant) > 0;
        }
        self.window_us = grant.window_us;
        let opened_ns = match self.hold {
            Some(hold) => {
                // It keeps the device at the end of a slice: its work in flight counts as where the
                // device passes on.
                let seen = self.sample(device);
                if seen.in_flight() || seen.blocking {
                    self.unfinished.note(now_ns, &self.clients, device);
                }
                hold.opened_ns
            }
            None => {
                self.usage.grants += 1;
                // One that waits is about to begin; one that was let in unasked may never.
                let wants = self.wants(now_ns);
                self.active_ns = wants.then_some(now_ns);
                self.came = !self.waits;
                self.slow &= !self.came;
                self.busy = wants;
                self.drain_since_ns = None;
                (self.forgiven_ns, self.behind_until_ns) = (0, 0);
                now_ns
            }
        };
        // Its gate closes so much earlier that the slice ends with the drain, but is open for half
        // of it at least.
        let drain_us = u32::try_from(self.drain.mean_ns() / 1000).unwrap_or(u32::MAX);
        let grace_ns = if self.came { 0 } else { self.grace_ns() };
        self.hold = Some(Hold {
            since_ns: now_ns + grace_ns,
            opened_ns,
            quantum_us: grant.quantum_us - (grant.quantum_us / 2).min(drain_us),
        });
        woken
    }

    /// Closes its gates. [`begin_drain`](Self::begin_drain) looks at its in-flight work, once
    /// others are served.
    pub fn end(&mut self, now_ns: u64, device: usize) -> Option<Hold> {
        for (_, pages) in &self.clients {
            pages.arbiter.close(device);
        }
        self.closed = (now_ns, None);
        self.idle_ns = None;
        self.hold.take()
    }

    /// What a tenant whose gates were closed has still on the device, and what its slice has
    /// taught. True where the tenant has turned out to be unresponsive for good.
    pub fn begin_drain(&mut self, now_ns: u64, device: usize, hold: Hold) -> bool {
        let seen = self.sample(device);
        self.passed_over = !self.busy;
        self.drain_since_ns = (seen.in_flight() || seen.blocking).then_some(now_ns);
        if self.drain_since_ns.is_none() {
            self.drain.none();
            self.unfinished.clear();
        } else {
            self.drain.begin(now_ns, seen.marks);
            self.unfinished.note(now_ns, &self.clients, device);
        }
        if self.busy || self.drain_since_ns.is_some() {
            self.ready_until_ns = now_ns + self.quiet_ns;
        }
        self.busy = self.drain_since_ns.is_some();
        self.came |= !seen.waits || seen.launches != self.launches;
        self.slow |= !self.came;
        let whole = now_ns >= hold.due_ns().min(hold.opened_ns + WAKE_NS);
        if self.came {
            (self.missed, self.unresponsive_ns) = (0, 0);
        } else if whole {
            self.missed += 1;
        }
        let unresponsive = self.missed >= UNRESPONSIVE_AFTER;
        if unresponsive {
            self.unresponsive_ns =
                (self.unresponsive_ns * 2).clamp(UNRESPONSIVE_NS, UNRESPONSIVE_MAX_NS);
            self.unresponsive_until_ns = now_ns + self.unresponsive_ns;
        }
        self.waits = !unresponsive && seen.waits;
        unresponsive && self.unresponsive_ns >= UNRESPONSIVE_REPORT_NS
    }

    /// It was given so much of the device, of which `stall_ns` was a time in which nobody looked.
    pub fn stand(&mut self, got_ns: u64, stall_ns: u64) {
        self.unfinished.pass(got_ns.saturating_sub(stall_ns));
    }

    /// All of its clients are gone.
    pub fn empty(&mut self) {
        (self.waits, self.busy) = (false, false);
        self.drain_since_ns = None;
        self.unfinished.clear();
        self.ready_until_ns = 0;
        self.idle_ns = None;
        self.hold = None;
    }

    /// Takes `dt_ns` to its account, of which it used `got_ns`.
    pub fn charge(
        &mut self,
        now_ns: u64,
        dt_ns: u64,
        got_ns: u64,
        contended: bool,
        slices: Slices,
    ) {
        let wants = self.busy || self.waits;
        self.bounds.pass(dt_ns, got_ns, wants, slices);
        if wants {
            self.usage.at_work_ns = now_ns;
        }
        if got_ns > 0 {
            self.rate.charge(got_ns);
            self.usage.device_ns += got_ns;
            self.usage.recent.add(now_ns, got_ns);
            if self.hold.is_none() {
                self.usage.overrun_ns += got_ns;
            }
        }
        if self.waits && self.hold.is_none() {
            self.usage.wait_ns += dt_ns;
        }
        if contended && wants {
            self.usage.contended_ns += dt_ns;
            self.usage.contended_device_ns += got_ns;
        }
    }

    /// How it behaves, looked at a few times a second.
    pub fn inspect(&mut self, now_ns: u64, device: usize) -> Option<Violation> {
        if let Some(endless) = self.unfinished.endless(ENDLESS_NS) {
            self.endless_in_part = endless.in_part;
            let ns = now_ns.saturating_sub(endless.since_ns);
            return Some(Violation::Endless { ms: ns / 1_000_000 });
        }
        if std::mem::take(&mut self.suspected_unresponsive) {
            return Some(Violation::Unresponsive);
        }
        let opened = self.hold.is_some() || self.co_ranks.is_here();
        if opened || now_ns < self.closed.0 + SETTLED_NS {
            self.closed.1 = None;
            return None;
        }
        let launches = self.sample(device).launches;
        let before = self.closed.1.replace(launches)?;
        let more = launches.wrapping_sub(before);
        // A process that has ended takes its count along.
        ((UNGATED..u64::MAX / 2).contains(&more)).then_some(Violation::Ungated { launches: more })
    }

    /// A violation was found. True where that is to be reported.
    pub fn find(&mut self, now_ns: u64, violation: Violation, answer: Answer) -> bool {
        self.record.find(now_ns, violation, answer)
    }
}
