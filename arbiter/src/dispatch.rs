//! The fast loop of one device: looks at its tenants, charges them, asks the policy and moves the gates.
//!
//! Exclusive slices: the gates of one tenant's clients are open, all others closed. What a tenant has queued when its gate
//! closes (its *tail*) is still charged to it while it lasts; the next tenant's gate opens when it has ended. A tail that is
//! too long to wait for overlaps with the next tenant; time in which several are busy is split equally between them.
//!
//! A tenant alone pays nothing: its gate stays open, without a deadline, until another tenant waits. Only then does the lane
//! look at the holder every few hundred microseconds, to pass the device on as soon as it is idle.
//!
//! Takes the time as an argument and pages as they are; owns no clock, no socket and no journal.

use std::rc::Rc;

use channel::Grant;
use channel::arbiter::ClientPages;
use policy::{
    Class, Decision, Device, Holder, QuantumBounds, Slice, SlicePolicy, Stride, TenantId,
    TenantView, View,
};

use crate::peer::{self, Activity};
use crate::usage::{Recent, Usage};

/// How a lane runs; times in nanoseconds unless named otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pace {
    /// Between what a slice may last.
    pub quantum: QuantumBounds,
    /// How long work may stay queued while several tenants want the device.
    pub window_us: u32,
    /// The same for a tenant alone.
    pub lone_window_us: u32,
    /// How often the holder is looked at while somebody waits, and a tail while it lasts.
    pub look_ns: u64,
    /// How often the end of a tail is looked for while the next slice waits for it.
    pub drain_look_ns: u64,
    /// How long the next slice waits for a tail.
    pub drain_ns: u64,
    /// How long a holder without work in flight must have submitted nothing to count as idle, at first.
    pub quiet_ns: u64,
    /// The same for one that was passed over again and again and came back at once (anticipation: S. Iyer, P. Druschel,
    /// "Anticipatory scheduling", SOSP 2001).
    pub quiet_max_ns: u64,
    /// The same where it has submitted work that no mark covers.
    pub unmarked_quiet_ns: u64,
    /// How often a tenant alone is looked at, for the accounts.
    pub tick_ns: u64,
    /// How long before the end of a slice the next tenant is woken, so that its threads are up when their gate opens;
    /// 0: they are woken by the opening.
    pub lead_ns: u64,
}

/// One at a time, or all at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Slices.
    Exclusive,
    /// Every gate is open; only memory is limited.
    Concurrent,
}

/// For how long after a moment of contention the small window stays.
const CROWDED_NS: u64 = 1_000_000_000;
/// A thread that was let in says so within this time; later its waiting is no sign of life. TIMEOUT: the wake-up of a
/// thread on a host with more threads than cores takes a few milliseconds.
const WAKE_NS: u64 = 10_000_000;
/// One that was let in, said nothing for so many whole slices and still waits is a stopped process.
const DEAF_AFTER: u32 = 3;
/// How long after a turn that was told it is confirmed: the threads that turn by the clock have the cores to themselves first.
const CONFIRM_NS: u64 = 50_000;
/// How long it is passed over before it gets another chance: at first, and at most after twice as long each time. A host
/// with more threads than processors lets a thread wait for tens of milliseconds; a stopped process stays away.
const DEAF_NS: u64 = 20_000_000;
const DEAF_MAX_NS: u64 = 1_000_000_000;
/// While nothing happens at all.
const IDLE_TICK_NS: u64 = 100_000_000;

/// One device.
#[derive(Debug)]
pub struct Lane {
    device: usize,
    mode: Mode,
    pace: Pace,
    policy: Stride,
    seats: Vec<Seat>,
    hold: Option<Hold>,
    /// The slice that begins when the tails before it have ended.
    coming: Option<Slice>,
    grants: u64,
    /// When time was charged last.
    charged_ns: u64,
    crowded_until_ns: u64,
    window_us: u32,
    /// Whose gate is about to open; at a time that it and the holder have been told, or when a tail has ended.
    announced: Option<(TenantId, Option<u64>)>,
    busy: Recent,
    /// Scratch of `decide`, kept to allocate nothing.
    view: Vec<TenantView>,
}

/// A tenant of the device.
#[derive(Debug)]
struct Seat {
    tenant: TenantId,
    class: Class,
    weight_ppm: u32,
    /// What is known of its iterations and their memory.
    profile: (policy::Iterations, policy::Memory),
    clients: Vec<(u64, Rc<ClientPages>)>,
    /// Somebody waits at its gate.
    waits: bool,
    /// It is charged for the time from here on.
    busy: bool,
    /// Its gate was closed and its tail has not ended.
    tail: bool,
    /// When its gate was closed last.
    tail_since_ns: u64,
    /// How long its tails are, the recent ones weighing most.
    tail_ns: u64,
    /// How long it may be silent before it counts as idle.
    quiet_ns: u64,
    /// Taken for wanting the device until then although nobody waits: its slice ended while it was at work, or its tail has
    /// not ended. Its threads are inside the driver, or on their way to the gate.
    ready_until_ns: u64,
    /// It lost the device because it was silent, and has not come back since.
    passed_over: bool,
    /// It does not come when it is let in, and is passed over until then.
    deaf_until_ns: u64,
    /// How long it was passed over the last time.
    deaf_ns: u64,
    /// Slices in a row to which it did not come.
    missed: u32,
    /// It has given a sign of life since its gate opened.
    came: bool,
    launches: u64,
    /// When it was last seen to do something; `None`: never, since its gate opened.
    active_ns: Option<u64>,
    usage: Usage,
}

#[derive(Clone, Copy, Debug)]
struct Hold {
    tenant: TenantId,
    /// When its slice began.
    since_ns: u64,
    /// When its gate opened.
    opened_ns: u64,
    /// How long its gate stays open, in microseconds.
    quantum_us: u32,
}

impl Hold {
    fn end_ns(&self) -> u64 {
        self.since_ns + u64::from(self.quantum_us) * 1000
    }
}

impl Lane {
    /// A device without tenants.
    pub fn new(device: usize, mode: Mode, pace: Pace, now_ns: u64) -> Self {
        Self {
            device,
            mode,
            pace,
            policy: Stride::new(),
            seats: Vec::new(),
            hold: None,
            coming: None,
            grants: 0,
            charged_ns: now_ns,
            crowded_until_ns: 0,
            window_us: pace.lone_window_us,
            announced: None,
            busy: Recent::default(),
            view: Vec::new(),
        }
    }

    /// A client of `tenant` comes. Its gate opens at once where its tenant holds the device or nobody does.
    pub fn add(
        &mut self,
        now_ns: u64,
        tenant: TenantId,
        terms: (Class, u32),
        client: u64,
        pages: Rc<ClientPages>,
    ) {
        self.charge(now_ns);
        let at = match self.seats.iter().position(|seat| seat.tenant == tenant) {
            Some(at) => at,
            None => {
                self.seats.push(Seat {
                    tenant,
                    class: terms.0,
                    weight_ppm: terms.1,
                    profile: Default::default(),
                    clients: Vec::new(),
                    waits: false,
                    busy: false,
                    tail: false,
                    tail_since_ns: 0,
                    tail_ns: 0,
                    quiet_ns: self.pace.quiet_ns,
                    ready_until_ns: 0,
                    passed_over: false,
                    deaf_until_ns: 0,
                    deaf_ns: 0,
                    missed: 0,
                    came: true,
                    launches: 0,
                    active_ns: None,
                    usage: Usage {
                        since_ns: now_ns,
                        ..Usage::default()
                    },
                });
                self.seats.len() - 1
            }
        };
        let seat = &mut self.seats[at];
        seat.clients.push((client, Rc::clone(&pages)));
        seat.launches = seat.sample(self.device).launches;
        let open = self.mode == Mode::Concurrent || self.holds(tenant);
        if open {
            pages.arbiter.open(self.device, &self.grant_of(0, 0));
        } else if self.hold.is_none() && self.coming.is_none() {
            self.begin(now_ns, tenant, self.pace.quantum.max_us, false);
        }
    }

    /// A client is gone. What it had in flight is no longer charged.
    pub fn remove(&mut self, now_ns: u64, client: u64) {
        self.charge(now_ns);
        for seat in &mut self.seats {
            let before = seat.clients.len();
            seat.clients.retain(|(id, _)| *id != client);
            if seat.clients.len() == before {
                continue;
            }
            seat.launches = seat.sample(self.device).launches;
            if seat.clients.is_empty() {
                (seat.waits, seat.busy, seat.tail) = (false, false, false);
                seat.ready_until_ns = 0;
                if self.hold.is_some_and(|hold| hold.tenant == seat.tenant) {
                    self.hold = None;
                }
            }
        }
    }

    /// A tenant is gone; what it used.
    pub fn retire(&mut self, now_ns: u64, tenant: TenantId) -> Option<Usage> {
        self.charge(now_ns);
        let at = self.seats.iter().position(|seat| seat.tenant == tenant)?;
        if self.hold.is_some_and(|hold| hold.tenant == tenant) {
            self.hold = None;
        }
        Some(self.seats.swap_remove(at).usage)
    }

    /// New terms of a tenant.
    pub fn set_terms(&mut self, tenant: TenantId, (class, weight_ppm): (Class, u32)) {
        for seat in &mut self.seats {
            if seat.tenant == tenant {
                (seat.class, seat.weight_ppm) = (class, weight_ppm);
            }
        }
    }

    /// What is known of a tenant's iterations by now.
    pub fn set_profile(&mut self, tenant: TenantId, profile: (policy::Iterations, policy::Memory)) {
        for seat in self.seats.iter_mut().filter(|seat| seat.tenant == tenant) {
            seat.profile = profile;
        }
    }

    /// Opens every gate for good: the arbiter leaves.
    pub fn open_all(&mut self) {
        let grant = self.grant_of(0, 0);
        for (_, pages) in self.seats.iter().flat_map(|seat| &seat.clients) {
            pages.arbiter.open(self.device, &grant);
        }
    }

    /// Looks, charges, decides and moves gates. Returns when to do it again at the latest; `None`: nobody is here.
    pub fn step(&mut self, now_ns: u64) -> Option<u64> {
        // A turn that was told beforehand has happened when it was to happen, however late it is confirmed.
        let now_ns = match self.announced {
            Some((_, Some(turn_ns))) if turn_ns <= now_ns => turn_ns.max(self.charged_ns),
            _ => now_ns,
        };
        self.charge(now_ns);
        if self.seats.iter().all(|seat| seat.clients.is_empty()) {
            return None;
        }
        self.look(now_ns);
        if self.mode == Mode::Concurrent {
            return Some(now_ns + self.pace.tick_ns);
        }
        let decision = self.decide(now_ns);
        let again_ns = self.announce(now_ns, &decision);
        self.set_windows(now_ns);
        self.mark_busy(now_ns);

        let contended = self
            .seats
            .iter()
            .any(|seat| seat.wants(now_ns) && !self.holds(seat.tenant));
        let mut next_ns = if contended || self.seats.iter().any(|seat| seat.tail) {
            now_ns + self.pace.look_ns
        } else if self.seats.iter().any(|seat| seat.busy) {
            now_ns + self.pace.tick_ns
        } else {
            now_ns + IDLE_TICK_NS
        };
        if let Some(again_ns) = again_ns {
            next_ns = next_ns.min(again_ns);
        }
        Some(next_ns)
    }

    /// Charges the time since the last look to those that were busy then.
    fn charge(&mut self, now_ns: u64) {
        let dt_ns = now_ns.saturating_sub(self.charged_ns);
        self.charged_ns = now_ns.max(self.charged_ns);
        if dt_ns == 0 {
            return;
        }
        let busy = self.seats.iter().filter(|seat| seat.busy).count() as u64;
        let wanting = self
            .seats
            .iter()
            .filter(|seat| seat.busy || seat.waits)
            .count();
        for seat in &mut self.seats {
            let holds = self.hold.is_some_and(|hold| hold.tenant == seat.tenant);
            let got_ns = if seat.busy { dt_ns / busy.max(1) } else { 0 };
            if got_ns > 0 {
                self.policy.charge(seat.tenant, got_ns);
                seat.usage.device_ns += got_ns;
                seat.usage.recent.add(now_ns, got_ns);
                if !holds && self.mode == Mode::Exclusive {
                    seat.usage.overrun_ns += got_ns;
                }
            }
            if seat.waits && !holds {
                seat.usage.wait_ns += dt_ns;
            }
            if wanting >= 2 && (seat.busy || seat.waits) {
                seat.usage.contended_ns += dt_ns;
                seat.usage.contended_device_ns += got_ns;
            }
        }
        if busy > 0 {
            self.busy.add(now_ns, dt_ns);
        }
    }

    /// Copies out what the clients claim.
    fn look(&mut self, now_ns: u64) {
        let (device, hold, concurrent) = (self.device, self.hold, self.mode == Mode::Concurrent);
        for seat in &mut self.seats {
            let hold = hold.filter(|hold| hold.tenant == seat.tenant);
            if hold.is_none() && !seat.tail && !concurrent {
                let waits = |(_, pages): &(u64, Rc<ClientPages>)| peer::waits(pages, device);
                seat.waits = now_ns >= seat.deaf_until_ns && seat.clients.iter().any(waits);
                seat.learn_quiet(now_ns, &self.pace);
                continue;
            }
            let seen = seat.sample(device);
            seat.waits = seen.waits;
            seat.came |= !seen.waits || seen.launches != seat.launches;
            let woken = hold.is_some_and(|hold| now_ns < hold.opened_ns + WAKE_NS);
            if seen.in_flight
                || seen.blocking
                || seen.launches != seat.launches
                || (seen.waits && woken)
            {
                seat.active_ns = Some(now_ns);
            }
            seat.launches = seen.launches;
            let quiet_ns = if seen.unmarked {
                self.pace.unmarked_quiet_ns.max(seat.quiet_ns)
            } else {
                seat.quiet_ns
            };
            let tail = seat.tail && hold.is_none() && (seen.in_flight || seen.blocking);
            if seat.tail && !tail {
                seat.learn_tail(now_ns);
            }
            seat.tail = tail;
            if seat.tail {
                seat.ready_until_ns = now_ns + seat.quiet_ns;
            }
            seat.busy = if hold.is_some() || concurrent {
                seat.active_ns
                    .is_some_and(|active_ns| now_ns.saturating_sub(active_ns) < quiet_ns)
            } else {
                seat.tail
            };
        }
    }

    fn decide(&mut self, now_ns: u64) -> Decision {
        if let Some(slice) = self.coming {
            // Who has gone in the meantime, or been stopped, does not keep the others waiting.
            let there = |seat: &Seat| seat.tenant == slice.tenant && seat.wants(now_ns);
            if self.seats.iter().any(there) {
                return self.begin_after_tails(now_ns, slice);
            }
            self.coming = None;
        }
        let hold = self.hold;
        self.view.clear();
        self.view.extend(self.seats.iter().map(|seat| {
            let wants = if hold.is_some_and(|hold| hold.tenant == seat.tenant) {
                seat.busy
            } else {
                seat.wants(now_ns)
            };
            TenantView {
                iterations: seat.profile.0,
                memory: seat.profile.1,
                ..TenantView::new(seat.tenant, seat.class, seat.weight_ppm, wants)
            }
        }));
        let wanting = self.view.iter().filter(|tenant| tenant.wants).count();
        if wanting >= 2 {
            self.crowded_until_ns = now_ns + CROWDED_NS;
        }
        let holder = hold.map(|hold| Holder {
            id: hold.tenant,
            since_ns: hold.since_ns,
            quantum_us: hold.quantum_us,
        });
        let decision = self.policy.decide(&View {
            now_ns,
            tenants: &self.view,
            holders: holder.as_slice(),
            quantum: self.pace.quantum,
            device: Device::EXCLUSIVE,
        });
        // One gate closes, the next one opens, and then there is time to look at what was left behind.
        if let Some(hold) = hold {
            for id in &decision.revoke {
                self.end(*id);
                self.begin_tail(now_ns, *id, hold);
            }
        }
        for slice in &decision.grant {
            // One that was told when to come is there already; the tail before it is short.
            let there = self
                .announced
                .is_some_and(|(next, turn_ns)| next == slice.tenant && turn_ns == Some(now_ns));
            if !decision.revoke.is_empty() && !there {
                return self.begin_after_tails(now_ns, *slice);
            }
            self.begin(now_ns, slice.tenant, slice.quantum_us, wanting >= 2);
        }
        let (Some(again_ns), Some(hold)) = (decision.again_ns, self.hold) else {
            return decision;
        };
        // Where a tail is to be waited for there is time to wake the next one after the end of the slice.
        let tail_ns = self
            .seats
            .iter()
            .find(|seat| seat.tenant == hold.tenant)
            .map_or(0, |seat| seat.tail_ns);
        Decision {
            again_ns: Some(again_ns.min(hold.end_ns())),
            next: decision.next.filter(|_| tail_ns < self.pace.lead_ns),
            ..decision
        }
    }

    /// Begins a slice once the tails before it have ended; returns when to look again, and whom to wake.
    ///
    /// Two tenants on the device at once are told apart by nobody: the hardware slices between them as it likes, and their
    /// time can only be split by halves, which is wrong for each by a good part of every tail. So a tail ends first. That
    /// costs nothing but the moment between its end and our look at it, for the device has work until then. A tail that
    /// lasts is not waited for for ever, and a guaranteed tenant waits for an opportunistic one's no longer than the window.
    fn begin_after_tails(&mut self, now_ns: u64, slice: Slice) -> Decision {
        let class = self
            .seats
            .iter()
            .find(|seat| seat.tenant == slice.tenant)
            .map(|seat| seat.class);
        let tails = self.seats.iter().filter(|seat| seat.tail);
        let patience_ns = |seat: &Seat| match (class, seat.class) {
            (Some(Class::Guaranteed), Class::Opportunistic) => {
                u64::from(self.pace.window_us) * 1000
            }
            _ => self.pace.drain_ns,
        };
        let waited_for = tails.filter(|seat| now_ns < seat.tail_since_ns + patience_ns(seat));
        if let Some(ends_ns) = waited_for
            .map(|seat| seat.tail_since_ns + seat.tail_ns)
            .max()
        {
            self.coming = Some(slice);
            let soon = ends_ns <= now_ns + self.pace.lead_ns;
            return Decision {
                again_ns: Some(now_ns + self.pace.drain_look_ns),
                next: soon.then_some(slice.tenant),
                ..Decision::default()
            };
        }
        self.coming = None;
        self.begin(now_ns, slice.tenant, slice.quantum_us, true);
        Decision {
            again_ns: self.hold.map(|hold| hold.end_ns()),
            ..Decision::default()
        }
    }

    /// Shortly before a slice begins: wakes who waits for it. Where it begins at the end of another one the gates of both are
    /// told when to turn over, and their threads go by the clock then, whether the arbiter is given a core at that
    /// moment or not; where it begins at the end of a tail the threads look at their gate. Returns when to decide again, or to do this.
    fn announce(&mut self, now_ns: u64, decision: &Decision) -> Option<u64> {
        let drains = self.coming.is_some();
        let next = decision.next.filter(|_| self.pace.lead_ns > 0);
        let early_ns = decision
            .again_ns
            .filter(|_| next.is_some() && !drains)
            .map(|turn_ns| turn_ns.saturating_sub(self.pace.lead_ns));
        if let Some(early_ns) = early_ns.filter(|early_ns| now_ns < *early_ns) {
            self.tell(None);
            return Some(early_ns);
        }
        let turn_ns = decision.again_ns.filter(|_| !drains);
        self.tell(next.map(|next| (next, turn_ns)));
        match next.and(turn_ns) {
            Some(turn_ns) => Some(turn_ns + CONFIRM_NS),
            None => decision.again_ns,
        }
    }

    /// Tells the gates who comes next, and takes back what they were told before.
    fn tell(&mut self, announced: Option<(TenantId, Option<u64>)>) {
        if announced == self.announced {
            return;
        }
        let before = std::mem::replace(&mut self.announced, announced);
        let (device, hold) = (self.device, self.hold.map(|hold| hold.tenant));
        for seat in &mut self.seats {
            let holds = hold == Some(seat.tenant);
            let told = announced.filter(|(next, _)| holds || *next == seat.tenant);
            let was_told = before.is_some_and(|(next, _)| holds || next == seat.tenant);
            if let Some((_, Some(turn_ns))) = told.filter(|_| !holds) {
                // When the turn is confirmed it no longer waits: it went in by the clock.
                seat.ready_until_ns = seat.ready_until_ns.max(turn_ns + seat.quiet_ns);
            }
            for (_, pages) in &seat.clients {
                match told {
                    Some((_, Some(turn_ns))) if holds => pages.arbiter.expire(device, turn_ns),
                    Some(_) if holds => pages.arbiter.keep(device),
                    Some((_, turn_ns)) => {
                        pages.arbiter.announce(device, turn_ns);
                    }
                    None if was_told && holds => pages.arbiter.keep(device),
                    None if was_told => pages.arbiter.close(device),
                    None => {}
                }
            }
        }
    }

    /// Closes the gates of a tenant.
    fn end(&mut self, tenant: TenantId) {
        if self.holds(tenant) {
            self.hold = None;
        }
        for seat in self.seats.iter().filter(|seat| seat.tenant == tenant) {
            for (_, pages) in &seat.clients {
                pages.arbiter.close(self.device);
            }
        }
    }

    /// What a tenant whose gates were closed has still on the device, and what its slice has taught.
    fn begin_tail(&mut self, now_ns: u64, tenant: TenantId, hold: Hold) {
        let device = self.device;
        for seat in self.seats.iter_mut().filter(|seat| seat.tenant == tenant) {
            let seen = seat.sample(device);
            seat.passed_over = !seat.busy;
            seat.tail = seen.in_flight || seen.blocking;
            seat.tail_since_ns = now_ns;
            if !seat.tail {
                seat.learn_tail(now_ns);
            }
            if seat.busy || seat.tail {
                seat.ready_until_ns = now_ns + seat.quiet_ns;
            }
            seat.busy = seat.tail;
            seat.came |= !seen.waits || seen.launches != seat.launches;
            let whole = now_ns >= hold.since_ns + u64::from(hold.quantum_us) * 1000;
            if seat.came {
                (seat.missed, seat.deaf_ns) = (0, 0);
            } else if whole {
                seat.missed += 1;
            }
            if seat.missed >= DEAF_AFTER {
                seat.deaf_ns = (seat.deaf_ns * 2).clamp(DEAF_NS, DEAF_MAX_NS);
                seat.deaf_until_ns = now_ns + seat.deaf_ns;
            }
            seat.waits = seat.missed < DEAF_AFTER && seen.waits;
        }
    }

    /// Opens the gates of a tenant, or begins its slice anew.
    fn begin(&mut self, now_ns: u64, tenant: TenantId, quantum_us: u32, contended: bool) {
        let anew = self.holds(tenant);
        self.grants += 1;
        let deadline_ns = if contended {
            now_ns + u64::from(quantum_us) * 1000
        } else {
            0
        };
        let grant = self.grant_of(quantum_us, deadline_ns);
        for seat in self.seats.iter_mut().filter(|seat| seat.tenant == tenant) {
            for (_, pages) in &seat.clients {
                pages.arbiter.open(self.device, &grant);
            }
            if !anew {
                seat.usage.grants += 1;
                // One that waits is about to begin; one that was let in unasked may never.
                let wants = seat.wants(now_ns);
                seat.active_ns = wants.then_some(now_ns);
                seat.came = !seat.waits;
                seat.busy = wants;
                seat.tail = false;
            }
        }
        let opened_ns = self
            .hold
            .filter(|_| anew)
            .map_or(now_ns, |hold| hold.opened_ns);
        // Its gate closes so much earlier that the slice ends with the tail, but is open for half of it at least.
        let tail_ns = self.seats.iter().find(|seat| seat.tenant == tenant);
        let tail_us = tail_ns.map_or(0, |seat| seat.tail_ns / 1000);
        let open_us = quantum_us - (quantum_us / 2).min(u32::try_from(tail_us).unwrap_or(u32::MAX));
        self.hold = Some(Hold {
            tenant,
            since_ns: now_ns,
            opened_ns,
            quantum_us: open_us,
        });
    }

    /// A holder is charged for all of its slice while others wait: nobody else could use that time. Alone it is charged
    /// for what it uses.
    fn mark_busy(&mut self, now_ns: u64) {
        let Some(hold) = self.hold else { return };
        let contended = self
            .seats
            .iter()
            .any(|seat| seat.wants(now_ns) && seat.tenant != hold.tenant);
        for seat in self
            .seats
            .iter_mut()
            .filter(|seat| seat.tenant == hold.tenant)
        {
            seat.busy |= contended;
        }
    }

    fn set_windows(&mut self, now_ns: u64) {
        let window_us = if now_ns < self.crowded_until_ns {
            self.pace.window_us
        } else {
            self.pace.lone_window_us
        };
        if window_us == self.window_us {
            return;
        }
        self.window_us = window_us;
        for (_, pages) in self.seats.iter().flat_map(|seat| &seat.clients) {
            pages.arbiter.set_window(self.device, window_us);
        }
    }

    fn grant_of(&self, quantum_us: u32, deadline_mono_ns: u64) -> Grant {
        Grant {
            number: self.grants,
            quantum_us,
            deadline_mono_ns,
            window_us: self.window_us,
        }
    }

    fn holds(&self, tenant: TenantId) -> bool {
        self.hold.is_some_and(|hold| hold.tenant == tenant)
    }

    // --- what is told about it ---

    /// How it runs.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Longest slice in microseconds.
    pub fn quantum_us(&self) -> u32 {
        self.pace.quantum.max_us
    }

    /// Who holds the device.
    pub fn holder(&self) -> Option<TenantId> {
        self.hold.map(|hold| hold.tenant)
    }

    /// Part of the last second in which the device was in use.
    pub fn busy_part(&self, now_ns: u64) -> f64 {
        self.busy.part(now_ns)
    }

    /// What a tenant used.
    pub fn usage(&self, tenant: TenantId) -> Option<&Usage> {
        let seat = self.seats.iter().find(|seat| seat.tenant == tenant)?;
        Some(&seat.usage)
    }

    /// Whether a tenant uses the device, and whether it waits for it.
    pub fn standing(&self, tenant: TenantId) -> (bool, bool) {
        let seat = self.seats.iter().find(|seat| seat.tenant == tenant);
        seat.map_or((false, false), |seat| {
            (seat.busy, seat.waits && !self.holds(tenant))
        })
    }
}

impl Seat {
    /// Its tail has ended.
    fn learn_tail(&mut self, now_ns: u64) {
        let tail_ns = now_ns.saturating_sub(self.tail_since_ns);
        self.tail_ns = self.tail_ns - self.tail_ns / 8 + tail_ns / 8;
    }

    /// One that comes back after a pause that could have been waited for is waited for longer next time.
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

    /// Whether it would use the device if it were let in.
    fn wants(&self, now_ns: u64) -> bool {
        self.waits || now_ns < self.ready_until_ns
    }

    fn sample(&self, device: usize) -> Activity {
        self.clients
            .iter()
            .map(|(_, pages)| peer::activity(pages, device))
            .fold(Activity::default(), Activity::and)
    }
}

#[cfg(test)]
#[path = "dispatch_tests.rs"]
mod tests;
