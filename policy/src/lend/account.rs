//! The account of a job: what it used, what it waited for, and what it is owed.
//!
//! Charged is the device time that passed, by the weights of the marks and the scale that was
//! learnt while the job was alone; a part of the turns between contexts, by how often the job comes
//! with an empty queue; and what nobody used while the others were shut for it. Charges add up to
//! the busy time of the device and the idle time that was held.

use super::constants::Constants;
use super::division::{Claim, divide};
use super::signals::LendTerms;
use crate::slice::{Class, TenantId};

/// What the processes of a job come to at a look. Banned processes have no wishes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct JobLook {
    /// Finished and submitted since the last look, by the marks' weights, in nanoseconds.
    pub raw_ns: f64,
    pub submitted_ns: f64,
    /// In flight, in nanoseconds.
    pub pending_ns: u64,
    pub fresh: u64,
    pub at_gate: bool,
    pub in_wait: bool,
    /// A process of the job is banned.
    pub banned: bool,
    /// The job has processes.
    pub present: bool,
}

impl JobLook {
    pub fn wants(&self) -> bool {
        self.pending_ns > 0 || self.waits()
    }

    /// Its host waits: at the gate, or in a call for work that the device has.
    pub fn waits(&self) -> bool {
        self.at_gate || self.in_wait
    }
}

/// The account of a job. Balances in nanoseconds of device time.
#[derive(Clone, Debug)]
pub(super) struct Account {
    pub tenant: TenantId,
    pub terms: LendTerms,
    pub look: JobLook,
    /// Finished since the last look, in true device time.
    pub passed_ns: f64,
    /// Charged for the last look.
    pub charged_ns: f64,
    /// Charged since it joined.
    pub total_ns: f64,
    /// Means, as parts of time: submitted; host not waiting; charged; finished; host waiting;
    /// finished while the host waited; looks with a fresh visit.
    pub submits: f64,
    pub unbothered: f64,
    pub used: f64,
    finished: f64,
    waits: f64,
    own: f64,
    pub visits: f64,
    /// Since something was finished last: time, and how much of it the host waited.
    since_ns: f64,
    since_waited_ns: f64,
    waited_before: bool,
    /// Part of the time that the host waited for others.
    pub delay: f64,
    /// What it could use, and what it is entitled to, as parts of the device.
    pub want: f64,
    pub entitled: f64,
    /// Entitled less charged; promised less charged; share less charged.
    pub owed_ns: f64,
    pub promise_ns: f64,
    pub slack_ns: f64,
    /// What was left idle for it.
    pub idle_for_ns: f64,
    /// True device time of a nanosecond of weight.
    pub scale: f64,
    alone_ns: f64,
    alone_raw_ns: f64,
    /// Time since the last mark while alone; `None`: no mark was seen since it is alone.
    since_mark_ns: Option<f64>,
    /// How long no other job has used the device.
    undisturbed_ns: f64,
    /// Time that it was seen alone, and device time finished in it.
    pub solo_ns: f64,
    pub solo_passed_ns: f64,
    /// Stretches alone that it was given for that.
    pub solo_stretches: u32,
    /// Part of the time in which it was absent.
    absent: f64,
    /// Behaves like a service, declared or not.
    serves: bool,
    /// What `share_max` still lets it use.
    pub bucket_ns: f64,
    /// How long its promise is missed already.
    pub below_floor_ns: f64,
    pub largest_ns: u64,
    pub wanted_at_ns: Option<u64>,
}

impl Account {
    pub fn new(tenant: TenantId, terms: LendTerms, constants: &Constants) -> Self {
        Self {
            tenant,
            terms,
            look: JobLook::default(),
            passed_ns: 0.0,
            charged_ns: 0.0,
            total_ns: 0.0,
            submits: 0.0,
            unbothered: 1.0,
            used: 0.0,
            finished: 0.0,
            waits: 0.0,
            own: 0.0,
            visits: 0.0,
            since_ns: 0.0,
            since_waited_ns: 0.0,
            waited_before: false,
            delay: 0.0,
            want: 0.0,
            entitled: 0.0,
            owed_ns: 0.0,
            promise_ns: 0.0,
            slack_ns: constants.slack_first_ns as f64,
            idle_for_ns: 0.0,
            scale: 1.0,
            alone_ns: 0.0,
            alone_raw_ns: 0.0,
            since_mark_ns: None,
            undisturbed_ns: 0.0,
            solo_ns: 0.0,
            solo_passed_ns: 0.0,
            solo_stretches: 0,
            absent: 0.0,
            serves: false,
            bucket_ns: 0.0,
            below_floor_ns: 0.0,
            largest_ns: 0,
            wanted_at_ns: None,
        }
    }

    /// What it is owed, and promised.
    pub fn at_risk_ns(&self) -> f64 {
        self.owed_ns.min(self.promise_ns)
    }

    /// Whether its requests go first.
    pub fn priority(&self) -> bool {
        self.guaranteed() && (self.terms.latency || self.serves)
    }

    /// Whether it has used what it may use at most.
    pub fn capped(&self) -> bool {
        self.terms.share_max.is_some() && self.bucket_ns < 0.0
    }

    pub fn guaranteed(&self) -> bool {
        self.terms.class == Class::Guaranteed
    }

    fn active(&self) -> bool {
        self.used > 0.001 || self.look.wants()
    }

    /// Means of a look of `dt` nanoseconds that moves them by `step` of the way.
    fn average(&mut self, dt: f64, step: f64) {
        let toward = |mean: &mut f64, value: f64| *mean += (value - *mean) * step;
        let waits = self.look.waits();
        self.passed_ns = self.look.raw_ns * self.scale;
        toward(&mut self.submits, self.look.submitted_ns * self.scale / dt);
        toward(&mut self.unbothered, f64::from(!waits));
        toward(&mut self.finished, self.passed_ns / dt);
        toward(&mut self.waits, f64::from(waits));
        // Work that is finished between two marks was done evenly over the time between them.
        self.since_ns += dt;
        self.since_waited_ns += dt * f64::midpoint(f64::from(waits), f64::from(self.waited_before));
        let mut own = 0.0;
        if self.passed_ns > 0.0 {
            own = self.passed_ns * self.since_waited_ns / self.since_ns;
            self.since_ns = 0.0;
            self.since_waited_ns = 0.0;
        }
        toward(&mut self.own, own / dt);
        self.waited_before = waits;
        self.delay = (self.waits - self.own).clamp(0.0, 0.98);
    }

    /// Learns what a nanosecond of weight is in true device time, where the job had the device to
    /// itself with a queue that never emptied.
    ///
    /// Counted from mark to mark: what a long kernel did before the first one is not known.
    fn learn(&mut self, dt: f64, undisturbed: bool, constants: &Constants) {
        let full = self.look.pending_ns as f64 > constants.look_ns as f64 * 1.5;
        if !(undisturbed && full && self.look.fresh == 0) {
            self.since_mark_ns = None;
        } else if self.look.raw_ns > 0.0 {
            if let Some(since_ns) = self.since_mark_ns {
                self.alone_ns += since_ns + dt;
                self.alone_raw_ns += self.look.raw_ns;
            }
            self.since_mark_ns = Some(0.0);
        } else if let Some(since_ns) = &mut self.since_mark_ns {
            *since_ns += dt;
        }
        if self.alone_ns > constants.learn_ns as f64 {
            let speed = self.alone_raw_ns / self.alone_ns;
            if speed > 0.5 && speed < 2.0 {
                let scale = self.scale + (1.0 / speed - self.scale) * 0.2;
                self.scale = scale.clamp(0.5, 2.0);
            }
            self.alone_ns *= 0.5;
            self.alone_raw_ns *= 0.5;
        }
    }
}

impl Account {
    /// Finds services by their gaps: absent for a good part of the time, and far below their share.
    fn watch_service(&mut self, now_ns: u64, dt: f64, share: f64, constants: &Constants) {
        let gap = self
            .wanted_at_ns
            .is_none_or(|at| now_ns.saturating_sub(at) > constants.service_gap_ns);
        let absent = gap && !self.look.banned;
        let step = (dt / constants.service_mean_ns as f64).min(1.0);
        self.absent += (f64::from(absent) - self.absent) * step;
        self.serves =
            self.absent > constants.service_absent && self.used < constants.service_uses * share;
    }

    /// Counts time in which no other job uses the device, after the first of it.
    fn watch_solo(&mut self, dt: f64, undisturbed: bool, constants: &Constants) {
        if !undisturbed {
            self.undisturbed_ns = 0.0;
            return;
        }
        if self.undisturbed_ns > constants.look_ns as f64 * 2.0 {
            self.solo_ns += dt;
            self.solo_passed_ns += self.passed_ns;
        }
        self.undisturbed_ns += dt;
    }
}

/// Means of the device.
#[derive(Clone, Debug, Default)]
pub(super) struct DeviceMeans {
    /// Time with work of several jobs in which nothing was finished (turns), not charged yet, in
    /// nanoseconds.
    lost_ns: f64,
    /// Time with pending work in which less was finished than [`Constants::least`] of it, less what
    /// was finished; and finished work beyond the time that passed.
    pub hidden_ns: f64,
    pub excess_ns: f64,
    /// What one mark may say at once, and the allowance.
    pub believed_ns: f64,
    /// Idle time held for somebody that was charged, in nanoseconds.
    pub held_idle_ns: f64,
    /// Kept for its memory.
    claims: Vec<Claim>,
}

impl DeviceMeans {
    /// Forgets what the pages of jobs that are gone have said.
    pub fn forget(&mut self) {
        (self.lost_ns, self.hidden_ns, self.excess_ns) = (0.0, 0.0, 0.0);
    }
}

/// Takes in a look: charges, entitlements, balances. `held_for`: the job for which others are shut,
/// and whether nobody open beside it wants the device.
pub(super) fn account(
    now_ns: u64,
    accounts: &mut [Account],
    means: &mut DeviceMeans,
    dt: f64,
    held_for: Option<(usize, bool)>,
    constants: &Constants,
) {
    let step = (dt / constants.mean_ns as f64).min(1.0);
    for of in accounts.iter_mut() {
        of.average(dt, step);
    }
    charge(accounts, means, dt, step, held_for, constants);
    let passed: f64 = accounts.iter().map(|of| of.passed_ns).sum();
    let largest = accounts.iter().map(|of| of.largest_ns).max().unwrap_or(0);
    // A mark says at once what a long kernel did over a long time.
    let at_once = largest.min(constants.excess_kernel_ns) * 2 + constants.excess_ns;
    let excess = means.excess_ns + passed - dt * constants.excess;
    // Bounded, so that a doubt ends some time after its cause.
    means.excess_ns = excess.clamp(-(at_once as f64), 2.0 * constants.excess_ns as f64);
    let has_work = accounts.iter().any(|of| of.look.pending_ns > 0);
    if accounts.len() > 1 && has_work {
        means.hidden_ns += dt * constants.least;
    }
    means.hidden_ns = (means.hidden_ns - passed).clamp(0.0, 2.0 * at_once as f64);
    means.believed_ns = at_once as f64;
    entitle(accounts, &mut means.claims);
    balance(accounts, dt, step, constants);
    let busy = |of: &Account| of.look.pending_ns > 0;
    let busy_ones = accounts.iter().filter(|of| busy(of)).count();
    for of in accounts.iter_mut() {
        let undisturbed = busy(of) && busy_ones == 1;
        of.learn(dt, undisturbed, constants);
    }
    // Those at a shut gate disturb nobody.
    let uses = |of: &Account| of.look.pending_ns > 0 || of.passed_ns > 0.0;
    let using = accounts.iter().filter(|of| uses(of)).count();
    let shares: f64 = accounts
        .iter()
        .filter(|of| of.guaranteed())
        .map(|of| of.terms.share)
        .sum();
    for of in accounts.iter_mut() {
        of.watch_service(now_ns, dt, of.terms.share / shares, constants);
        let mine = usize::from(uses(of));
        let undisturbed = of.look.present && !of.look.at_gate && using == mine;
        of.watch_solo(dt, undisturbed, constants);
    }
}

fn charge(
    accounts: &mut [Account],
    means: &mut DeviceMeans,
    dt: f64,
    step: f64,
    held_for: Option<(usize, bool)>,
    constants: &Constants,
) {
    let has_work = |of: &Account| of.look.pending_ns > 0 || of.passed_ns > 0.0;
    let working = accounts.iter().filter(|of| has_work(of)).count();
    let passed: f64 = accounts.iter().map(|of| of.passed_ns).sum();
    // The device turns where two have work; what passes without work for one alone is its own gap.
    // Paid out over the time of a mean, so that a long kernel, which is seen when it ends, weighs
    // nothing in the end.
    if working > 1 {
        // A page may claim the work of years, and a stall of minutes costs no turns.
        let bound = constants.lost_ns as f64 + means.believed_ns;
        means.lost_ns = (means.lost_ns + dt - passed).clamp(-bound, bound);
    }
    let turns = if working > 0 {
        (means.lost_ns * step).clamp(0.0, 0.3 * dt)
    } else {
        0.0
    };
    means.lost_ns -= turns;
    for of in accounts.iter_mut() {
        let visits = of.look.fresh > 0 && working > 1;
        of.visits += (f64::from(visits) - of.visits) * step;
    }
    let visits: f64 = accounts.iter().map(|of| of.visits).sum();
    for of in accounts.iter_mut() {
        let part = if visits > 0.02 {
            of.visits / visits
        } else if has_work(of) {
            1.0 / working as f64
        } else {
            0.0
        };
        of.charged_ns = of.passed_ns + turns * part;
    }
    if let Some((at, nobody_else)) = held_for {
        // What nobody used while others were shut for a job was used by it.
        let charged: f64 = accounts.iter().map(|of| of.charged_ns).sum();
        let of = &mut accounts[at];
        if nobody_else {
            of.idle_for_ns = (of.idle_for_ns + dt - charged).max(-(constants.expiry_ns as f64));
        }
        let idle = of.idle_for_ns.clamp(0.0, dt);
        of.charged_ns += idle;
        of.idle_for_ns -= idle;
        means.held_idle_ns += idle;
    }
    for of in accounts.iter_mut() {
        of.total_ns += of.charged_ns;
        of.used += (of.charged_ns / dt - of.used) * step;
    }
}

fn entitle(accounts: &mut [Account], claims: &mut Vec<Claim>) {
    for of in accounts.iter_mut() {
        of.want = of.used.max(0.002) / (1.0 - of.delay);
        if of.look.banned && !of.look.wants() {
            of.want = of.used;
        }
        of.want = of.want.min(of.terms.share_max.unwrap_or(f64::INFINITY));
        of.entitled = 0.0;
    }
    let total: f64 = accounts
        .iter()
        .filter(|of| of.active())
        .map(|of| of.used)
        .sum();
    let mut left = total;
    for class in [Class::Guaranteed, Class::Opportunistic] {
        let of_class = |of: &&mut Account| of.active() && of.terms.class == class;
        claims.clear();
        claims.extend(accounts.iter_mut().filter(of_class).map(|of| Claim {
            share: of.terms.share,
            want: of.want,
            gets: 0.0,
        }));
        left = divide(left, claims);
        for (of, claim) in accounts.iter_mut().filter(of_class).zip(claims.iter()) {
            of.entitled = claim.gets;
        }
    }
}

fn balance(accounts: &mut [Account], dt: f64, step: f64, constants: &Constants) {
    let largest = accounts.iter().map(|of| of.largest_ns).max().unwrap_or(0);
    let more = largest.saturating_mul(2).min(constants.bound_kernel_ns);
    let bound = (constants.bound_ns + more) as f64;
    let shares = |all: bool| -> f64 {
        let counts = |of: &&Account| all || of.active();
        let guaranteed = accounts.iter().filter(counts).filter(|of| of.guaranteed());
        guaranteed.map(|of| of.terms.share).sum()
    };
    let (active, all) = (shares(false), shares(true));
    let many = accounts.iter().filter(|of| of.active()).count().max(1);
    let tolerance = constants
        .tolerance
        .min(constants.tolerance_all / many as f64);
    for of in accounts.iter_mut() {
        let unhindered = of.delay < constants.unhindered;
        let share = if of.guaranteed() { of.terms.share } else { 0.0 };
        let part = |sum: f64| {
            if sum > 0.0 { share / sum } else { 0.0 }
        };
        if of.active() {
            // Progress is work done: turns and idle time are none, whichever job causes them.
            let want = of.finished / (1.0 - of.delay);
            let want = want.min(of.terms.share_max.unwrap_or(1.0));
            let promised = part(active) * want.min(1.0) * dt - of.passed_ns;
            of.promise_ns = (of.promise_ns + promised).clamp(-bound, bound);
            if unhindered && of.promise_ns > 0.0 {
                of.promise_ns *= 1.0 - step;
            } else if of.promise_ns < 0.0 {
                of.promise_ns *= 1.0 - step * 0.5;
            }
            let tolerance = if of.want > of.entitled * 0.5 {
                tolerance
            } else {
                0.0
            };
            of.owed_ns += (of.entitled - tolerance) * dt - of.charged_ns;
            if unhindered && of.owed_ns > 0.0 {
                of.owed_ns *= 1.0 - step;
            } else if of.owed_ns < 0.0 {
                of.owed_ns *= 1.0 - step * 0.5;
            }
        } else {
            of.owed_ns *= 1.0 - step;
        }
        of.owed_ns = of.owed_ns.clamp(-bound, bound);
        if let Some(most) = of.terms.share_max {
            let saved = constants.bucket_ns as f64 * most;
            of.bucket_ns = (of.bucket_ns + most * dt - of.charged_ns).clamp(-bound, saved);
        }
        let missed = of.promise_ns > constants.promise_ns as f64;
        of.below_floor_ns = if missed { of.below_floor_ns + dt } else { 0.0 };
        let saved = constants.slack_ns as f64 * of.terms.share / all.max(of.terms.share);
        of.slack_ns = (of.slack_ns + part(all) * dt - of.charged_ns).clamp(-bound, saved);
    }
}
