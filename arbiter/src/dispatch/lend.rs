//! `lend`: everybody is in, and gates close to who is ahead while somebody who is behind is held up
//! by the device. The rule is [`policy::lend`]; here it is shown what the pages say, and its
//! decisions are carried out.
//!
//! A gate that is shut opens by itself a few milliseconds later unless a look renews it: an arbiter
//! that stalls or dies keeps nobody out. Where gates do not do, or what pages say cannot be
//! believed, the device has slices for a while, which need nobody's word; each time that happens
//! again soon, for twice as long.
//!
//! Invariants: while the device lends everybody who may run holds it, and only then is anybody's
//! gate shut here. What the rule is shown is counted anew after slices. After a doubt the rule
//! itself starts over as well; slices for another reason leave it what it knows. Whatever a page
//! can bring about is a doubt, so that nobody changes the mode at will.

use std::fmt;

use channel::{ClientHalf, Following};
use policy::lend::{Constants, Gate, Lend, LendTerms, ProcessId, ProcessLook, SliceReason, Total};
use policy::{Class, TenantId};

use super::DeviceScheduler;
use super::entity::RunEntity;
use super::roster::Roster;
use crate::weights::{Claimed, Weights};

/// How long slices last that a doubt brings, at first and at most. TIMEOUT: long enough that a page
/// that lies again costs its neighbours little, short enough that a doubt without a cause costs the
/// sum of speeds little.
const DOUBT_FIRST_NS: u64 = 5_000_000_000;
const DOUBT_MOST_NS: u64 = 300_000_000_000;
/// After so many times the last slices without a doubt the next one counts as the first.
const DOUBT_FORGOTTEN: u64 = 4;
/// Submissions behind a shut gate that are believed to have been on their way: one of each thread.
const ON_THE_WAY: u64 = 256;
/// Processes that are looked at without looking less often for their number.
const LOOKED_AT_ONCE: usize = 16;
/// The smallest in-flight bound of one process, in microseconds.
const LEAST_US: u64 = 100;
/// Policies whose promise is a share: gates keep it as slices do.
const LENT_BY: [&str; 2] = ["stride", "latency"];

/// One job, as the rule sees it.
#[derive(Debug)]
struct Member {
    tenant: TenantId,
    terms: LendTerms,
    processes: Vec<Process>,
    /// Charged by the rule up to the last look, and what of it is in no account yet, in
    /// nanoseconds.
    charged_ns: f64,
    due_ns: f64,
    /// What its processes together may have in flight, and how many of them have work.
    cap_ns: u64,
    active: u64,
    /// Its gate is shut.
    shut: Option<Shut>,
}

/// A gate that is shut without a break.
#[derive(Clone, Copy, Debug)]
struct Shut {
    /// Submissions when it was shut first.
    launches: u64,
    /// When it opens by itself.
    until_ns: u64,
}

#[derive(Debug)]
struct Process {
    client: u64,
    id: ProcessId,
    weights: Weights,
}

/// Why the device has slices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Why {
    /// A job runs on several devices at once.
    Gang,
    /// The policy of this name deals in slices.
    Policy(&'static str),
    /// Memory is out, or about to be.
    Memory,
    /// A floor is above what its job's share comes to.
    Floor,
    /// Completion cannot be followed.
    Unfollowed,
    /// Marks are not weighed.
    Unweighed,
    /// A sum in a page has fallen.
    WentBack,
    /// Work went past a gate that was shut.
    PastGate,
    /// The rule asks for them.
    Rule(SliceReason),
}

impl Why {
    /// Whether a page has brought it about.
    fn is_doubt(self) -> bool {
        match self {
            Self::Gang | Self::Policy(_) | Self::Memory | Self::Floor => false,
            Self::Unfollowed
            | Self::Unweighed
            | Self::WentBack
            | Self::PastGate
            | Self::Rule(_) => true,
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = match self {
            Self::Policy(name) => return write!(f, "slices: the policy `{name}` deals in them"),
            Self::Gang => "the ranks of a job on several devices run together",
            Self::Memory => "the jobs' memory does not fit at once",
            Self::Floor => "a job's floor is above its share",
            Self::Unfollowed => "the driver does not write when work is done",
            Self::Unweighed => "a process of an earlier version does not weigh its work",
            Self::WentBack | Self::Rule(SliceReason::CounterWentBack) => {
                "a process takes back what it said it had done"
            }
            Self::PastGate => "a job submits although its gate is closed",
            // Of two jobs: the rule deals with them itself.
            Self::Rule(SliceReason::BelowFloor) => "kernels last too long for gates",
            Self::Rule(SliceReason::MoreThanTime) => {
                "jobs say that they did more than there was time for"
            }
            Self::Rule(SliceReason::HiddenWork) => {
                "the device is busy with work that no process accounts for"
            }
        };
        write!(f, "slices: {words}")
    }
}

/// Slices for a while.
#[derive(Debug)]
struct Doubt {
    why: Why,
    since_ns: u64,
    for_ns: u64,
}

impl Doubt {
    fn end_ns(&self) -> u64 {
        self.since_ns.saturating_add(self.for_ns)
    }
}

/// The lending of one device.
#[derive(Debug)]
pub(super) struct Lending {
    rule: Lend,
    members: Vec<Member>,
    looks: Vec<ProcessLook>,
    processes: u64,
    /// The last doubt, which may be over.
    doubt: Option<Doubt>,
    /// Why there are slices; `None`: the device lends.
    why: Option<Why>,
    /// The same in words.
    reason: String,
    looked_ns: u64,
    /// More than one job was at work at the last look.
    splits: bool,
}

impl Lending {
    pub fn new() -> Self {
        Self {
            rule: Lend::new(Constants::MODEL),
            members: Vec::new(),
            looks: Vec::new(),
            processes: 0,
            doubt: None,
            why: None,
            reason: String::new(),
            looked_ns: 0,
            splits: false,
        }
    }

    /// Whether it lends.
    pub fn lends(&self) -> bool {
        self.why.is_none()
    }

    /// Why it does not; empty: it does.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// Whether jobs are charged by what their marks weigh.
    pub fn splits(&self) -> bool {
        self.lends() && self.splits
    }

    /// What a tenant is to be charged for a stretch of time, in nanoseconds, and no more than that:
    /// the rest later.
    pub fn take_charge(&mut self, tenant: TenantId, dt_ns: u64) -> u64 {
        let Some(of) = self.members.iter_mut().find(|of| of.tenant == tenant) else {
            return 0;
        };
        // CAST: whole nanoseconds, between 0 and that.
        let ns = of.due_ns.clamp(0.0, dt_ns as f64) as u64;
        of.due_ns -= ns as f64;
        ns
    }

    /// The in-flight bound of each process of a tenant, in microseconds; `None`: it is not here.
    pub fn cap_us(&self, tenant: TenantId) -> Option<u32> {
        let of = self.members.iter().find(|of| of.tenant == tenant)?;
        let us = (of.cap_ns / 1000 / of.active.max(1)).max(LEAST_US);
        Some(u32::try_from(us).unwrap_or(u32::MAX))
    }

    /// Goes on after slices: nothing that was counted before holds.
    fn resume(&mut self) {
        if matches!(self.why, Some(why) if why.is_doubt()) {
            self.rule = Lend::new(Constants::MODEL);
            self.members.clear();
        } else {
            self.rule.interrupt();
            self.members.iter_mut().for_each(|of| of.processes.clear());
        }
        self.splits = false;
    }

    /// How long from one look to the next, while jobs want the device at the same time: the more
    /// there is to look at, the longer, so that the arbiter has time for its other devices.
    fn every_ns(&self) -> u64 {
        let Constants {
            look_ns, expiry_ns, ..
        } = Constants::MODEL;
        let longer = (self.looks.len() / LOOKED_AT_ONCE).max(1) as u64;
        look_ns.saturating_mul(longer).min(expiry_ns / 3)
    }

    /// Something that a page says cannot be.
    fn doubt(&mut self, now_ns: u64, why: Why) {
        let again = self.doubt.as_ref().filter(|last| {
            let forgotten_ns = last.for_ns.saturating_mul(DOUBT_FORGOTTEN);
            now_ns < last.end_ns().saturating_add(forgotten_ns)
        });
        let for_ns = again.map_or(DOUBT_FIRST_NS, |last| {
            last.for_ns.saturating_mul(2).min(DOUBT_MOST_NS)
        });
        self.doubt = Some(Doubt {
            why,
            since_ns: now_ns,
            for_ns,
        });
    }

    /// The doubt for which there are slices now.
    fn doubted(&self, now_ns: u64) -> Option<&Doubt> {
        self.doubt.as_ref().filter(|doubt| now_ns < doubt.end_ns())
    }

    fn member(&mut self, entity: &RunEntity, terms: LendTerms) -> &mut Member {
        let tenant = entity.tenant;
        let at = self.members.iter().position(|of| of.tenant == tenant);
        let at = at.unwrap_or_else(|| {
            self.members.push(Member {
                tenant,
                terms,
                processes: Vec::new(),
                charged_ns: 0.0,
                due_ns: 0.0,
                cap_ns: Constants::MODEL.cap_ns,
                active: 1,
                shut: None,
            });
            self.rule.set_terms(tenant, terms);
            self.members.len() - 1
        });
        let of = &mut self.members[at];
        if of.terms != terms {
            of.terms = terms;
            self.rule.set_terms(tenant, terms);
        }
        of
    }

    /// Shows the rule what all pages say. Returns what cannot be believed.
    fn look(&mut self, now_ns: u64, device: usize, roster: &Roster) -> Option<Why> {
        let mut looks = std::mem::take(&mut self.looks);
        looks.clear();
        let gone = |tenant: TenantId| roster.find(tenant).is_none();
        for of in self.members.extract_if(.., |of| gone(of.tenant)) {
            self.rule.remove(of.tenant);
        }
        let mut went_back = false;
        for entity in roster.iter() {
            let mut next = self.processes;
            let terms = terms_of(entity, now_ns);
            let of = self.member(entity, terms);
            let clients = entity.clients();
            let in_order = clients.iter().map(|(client, _)| *client);
            if !(of.processes.iter().map(|it| it.client)).eq(in_order) {
                let there = |process: &Process| clients.iter().any(|it| it.0 == process.client);
                of.processes.retain(there);
            }
            let first = looks.len();
            for (at, (client, pages)) in clients.iter().enumerate() {
                let is_it = |process: &Process| process.client == *client;
                let known = match of.processes.get(at) {
                    Some(process) if is_it(process) => Some(at),
                    _ => of.processes.iter().position(is_it),
                };
                let known = known.unwrap_or_else(|| {
                    next += 1;
                    of.processes.push(Process {
                        client: *client,
                        id: ProcessId(next),
                        weights: Weights::new(device, &pages.client, now_ns),
                    });
                    of.processes.len() - 1
                });
                let process = &mut of.processes[known];
                let claimed = process.weights.look(&pages.client, now_ns);
                went_back |= claimed.went_back;
                let who = (entity.tenant, process.id);
                looks.push(look_of(who, &pages.client, device, claimed));
            }
            let at_work = |look: &&ProcessLook| look.pending_ns() > 0 || look.at_gate > 0;
            of.active = looks.iter().skip(first).filter(at_work).count() as u64;
            self.processes = next;
        }
        self.looks = looks;
        self.looked_ns = now_ns;
        let decided = self.rule.look(now_ns, &self.looks);
        if went_back {
            return Some(Why::WentBack);
        }
        let slices = decided.slices.filter(|slices| slices.pair.is_none());
        slices.map(|slices| Why::Rule(slices.reason))
    }
}

fn terms_of(entity: &RunEntity, now_ns: u64) -> LendTerms {
    LendTerms {
        share: f64::from(entity.weight_ppm(now_ns).max(1)),
        class: entity.class(now_ns),
        // The scheduler keeps it, as in slices.
        share_max: None,
        latency: entity.terms().latency_target_ns.is_some(),
    }
}

fn look_of(
    (tenant, process): (TenantId, ProcessId),
    client: &ClientHalf,
    device: usize,
    claimed: Claimed,
) -> ProcessLook {
    ProcessLook {
        tenant,
        process,
        passed_ns: Total(claimed.passed_ns),
        submitted_ns: Total(claimed.submitted_ns),
        fresh: Total(client.fresh(device)),
        rings: Total(0),
        at_gate: client.held_up(device),
        in_wait: client.in_wait(device),
        largest_ns: claimed.largest_ns,
    }
}

impl DeviceScheduler {
    /// Looks whether the device lends, and who is to be kept out. Returns when to look again.
    pub(super) fn lend(&mut self, now_ns: u64) -> Option<u64> {
        if !self.mode.is_lend() {
            return None;
        }
        if self.lending.doubted(now_ns).is_none()
            && let Some(why) = self.cannot_be_read()
        {
            self.lending.doubt(now_ns, why);
        }
        let doubted = self.lending.doubted(now_ns);
        let end_ns = doubted.map(Doubt::end_ns);
        let why = doubted.map(|doubt| doubt.why);
        let before = self.lending.lends();
        if let Some(why) = why.or_else(|| self.obstacle(now_ns)) {
            self.set_why(now_ns, Some(why));
            return end_ns;
        }
        if !before {
            self.lending.resume();
        }
        self.set_why(now_ns, None);
        let rivals = self.roster.iter().any(|entity| entity.has_rivals(now_ns));
        self.lending.splits = rivals;
        let every_ns = if rivals {
            self.lending.every_ns()
        } else {
            self.pace.tick_ns
        };
        let due_ns = self.lending.looked_ns.saturating_add(every_ns);
        if now_ns < due_ns && self.lending.looked_ns != 0 && before {
            return Some(due_ns);
        }
        let doubted = self.lending.look(now_ns, self.device, &self.roster);
        let doubted = doubted.or_else(|| self.past_gate(now_ns));
        if let Some(why) = doubted {
            self.set_why(now_ns, Some(why));
            self.lending.doubt(now_ns, why);
            return self.lending.doubted(now_ns).map(Doubt::end_ns);
        }
        for of in &mut self.lending.members {
            let standing = self.lending.rule.standing(of.tenant);
            let charged_ns = standing.map_or(of.charged_ns, |standing| standing.charged_ns);
            of.due_ns += charged_ns - of.charged_ns;
            if !self.lending.splits {
                of.due_ns = 0.0;
            }
            of.charged_ns = charged_ns;
        }
        Some(now_ns + every_ns)
    }

    /// Notes why the device has slices; `None`: it lends.
    fn set_why(&mut self, now_ns: u64, why: Option<Why>) {
        if self.lending.why == why {
            return;
        }
        let before = self.lending.lends();
        let reason = why.map_or_else(String::new, |why| why.to_string());
        match why {
            None => tracing::info!("device {}: lends", self.device),
            Some(_) => tracing::info!("device {}: {reason}", self.device),
        }
        (self.lending.why, self.lending.reason) = (why, reason);
        self.mode.set_lends(self.lending.lends());
        if self.lending.lends() != before {
            self.trace_mode(now_ns);
        }
    }

    /// Why gates do not do here, whatever anybody says.
    fn obstacle(&self, now_ns: u64) -> Option<Why> {
        let there = || self.roster.iter().filter(|it| !it.clients().is_empty());
        if there().any(|entity| entity.gang) {
            return Some(Why::Gang);
        }
        if there().count() < 2 {
            return None;
        }
        if !LENT_BY.contains(&self.choice.name()) {
            return Some(Why::Policy(self.choice.name()));
        }
        let peaks = self.roster.iter().map(RunEntity::peak_bytes);
        let away = there().any(|entity| !entity.standing.is_in() || entity.leaves);
        if away || !self.choice.fits(peaks.fold(0, u64::saturating_add)) {
            return Some(Why::Memory);
        }
        let guaranteed = || {
            there().filter(|entity| {
                entity.class(now_ns) == Class::Guaranteed && !entity.terms().paused
            })
        };
        let weights: u64 = guaranteed()
            .map(|entity| u64::from(entity.weight_ppm(now_ns)))
            .sum();
        let above = guaranteed().any(|entity| {
            // By cross-multiplication: floor / 1e6 > weight / weights.
            u64::from(entity.terms().min_ppm).saturating_mul(weights)
                > u64::from(entity.weight_ppm(now_ns)).saturating_mul(1_000_000)
        });
        above.then_some(Why::Floor)
    }

    /// Why nothing is known of somebody's work. A process that has not submitted anything may yet
    /// be about to say that it weighs its work.
    fn cannot_be_read(&self) -> Option<Why> {
        let there = self.roster.iter().filter(|it| !it.clients().is_empty());
        if there.clone().count() < 2 {
            return None;
        }
        let clients = there.flat_map(|entity| entity.clients());
        let mut at_work = clients
            .map(|(_, pages)| &pages.client)
            .filter(|client| client.streams_used() != 0);
        at_work.find_map(|client| {
            if client.following() != Following::Writes {
                Some(Why::Unfollowed)
            } else {
                (!client.weighs()).then_some(Why::Unweighed)
            }
        })
    }

    /// Whether somebody has gone on submitting while its gate was shut. A gate that has opened by
    /// itself since the last look was not.
    fn past_gate(&mut self, now_ns: u64) -> Option<Why> {
        let mut past = false;
        for of in &mut self.lending.members {
            of.shut = of.shut.filter(|shut| now_ns < shut.until_ns);
            if let Some(shut) = of.shut
                && let Some(entity) = self.roster.find(of.tenant)
            {
                let launches = entity.sample(self.device).launches;
                past |= launches.saturating_sub(shut.launches) > ON_THE_WAY;
            }
        }
        past.then_some(Why::PastGate)
    }

    /// Everybody is in: carries out what the rule has decided.
    pub(super) fn move_gates(&mut self, now_ns: u64) {
        if !self.mode.is_lend() || !self.lending.splits() {
            return self.open_shut(now_ns);
        }
        let device = self.device;
        for at in 0..self.lending.members.len() {
            let tenant = self.lending.members[at].tenant;
            let decided = self.lending.rule.gates().iter();
            let Some(decided) = decided.copied().find(|it| it.tenant == tenant) else {
                continue;
            };
            self.lending.members[at].cap_ns = decided.cap_ns;
            let Some(place) = self.roster.position(tenant) else {
                continue;
            };
            if !self.roster[place].holds() {
                self.lending.members[at].shut = None;
                continue;
            }
            match decided.gate {
                Gate::Shut { until_ns, .. } if until_ns > now_ns => {
                    self.roster[place].shut(device, until_ns);
                    let launches = match self.lending.members[at].shut {
                        Some(shut) => shut.launches,
                        None => self.roster[place].sample(device).launches,
                    };
                    self.lending.members[at].shut = Some(Shut { launches, until_ns });
                }
                _ => {
                    self.lending.members[at].shut = None;
                    self.open_again(now_ns, place);
                }
            }
        }
    }

    /// Opens what is shut.
    fn open_shut(&mut self, now_ns: u64) {
        for of in &mut self.lending.members {
            of.shut = None;
        }
        (0..self.roster.len()).for_each(|at| self.open_again(now_ns, at));
    }

    fn open_again(&mut self, now_ns: u64, at: usize) {
        if self.roster[at].is_shut() {
            let grant = self.grant_of(&self.roster[at], now_ns, self.pace.quantum.promised_us, 0);
            self.woken |= self.roster[at].open_again(self.device, &grant);
        }
    }
}
