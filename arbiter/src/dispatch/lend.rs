//! `lend`: everybody is in, and gates close to who is ahead while somebody who is behind is held up
//! by the device. The rule is [`policy::lend`]; here it is shown what the pages say, and its
//! decisions are carried out.
//!
//! A gate that is shut opens by itself a few milliseconds later unless a look renews it: an arbiter
//! that is late or dead keeps nobody out. Where gates do not do, or what pages say cannot be
//! believed, the device has slices for a while, which need nobody's word; each time that happens
//! again soon, for twice as long.
//!
//! Invariants: while the device lends everybody who may run holds it, and only then is anybody's
//! gate shut here; after slices the rule starts over, and so do the counts that it is shown.

use std::rc::Rc;

use channel::Following;
use channel::arbiter::ClientPages;
use policy::lend::{Constants, Gate, Lend, LendTerms, ProcessId, ProcessLook, SliceReason, Total};
use policy::{Class, TenantId};

use super::DeviceScheduler;
use super::entity::RunEntity;
use crate::weights::{Claimed, Weights};

/// How long slices last that a doubt brings, at first and at most. TIMEOUT: long enough that a
/// page which is believed in vain costs its neighbours little, short enough that a doubt which
/// was none costs the sum of speeds little.
const DOUBT_FIRST_NS: u64 = 5_000_000_000;
const DOUBT_MOST_NS: u64 = 300_000_000_000;
/// After so many times the last slices without a doubt the next one counts as the first.
const DOUBT_FORGOTTEN: u64 = 4;
/// Submissions behind a shut gate that are believed to have been on their way: one of each thread.
const ON_THE_WAY: u64 = 256;
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
    /// Its submissions when its gate was shut; `None`: it is open.
    launches: Option<u64>,
}

#[derive(Debug)]
struct Process {
    client: u64,
    id: ProcessId,
    weights: Weights,
}

/// Slices for a while.
#[derive(Debug)]
struct Doubt {
    reason: String,
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
    /// Why there are slices; empty: the device lends.
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
            reason: String::new(),
            looked_ns: 0,
            splits: false,
        }
    }

    /// Whether it lends.
    pub fn lends(&self) -> bool {
        self.reason.is_empty()
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

    /// Starts over: nothing that was counted holds.
    fn forget(&mut self) {
        self.rule = Lend::new(Constants::MODEL);
        self.members.clear();
        self.splits = false;
    }

    /// Something that a page says cannot be.
    fn doubt(&mut self, now_ns: u64, reason: String) {
        let again = self.doubt.as_ref().filter(|last| {
            let forgotten_ns = last.for_ns.saturating_mul(DOUBT_FORGOTTEN);
            now_ns < last.end_ns().saturating_add(forgotten_ns)
        });
        let for_ns = again.map_or(DOUBT_FIRST_NS, |last| {
            last.for_ns.saturating_mul(2).min(DOUBT_MOST_NS)
        });
        self.doubt = Some(Doubt {
            reason,
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
                launches: None,
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
    fn look(&mut self, now_ns: u64, device: usize, roster: &super::Roster) -> Option<String> {
        self.looks.clear();
        let gone = |tenant: TenantId| roster.find(tenant).is_none();
        for of in self.members.extract_if(.., |of| gone(of.tenant)) {
            self.rule.remove(of.tenant);
        }
        let mut doubted = None;
        for entity in roster.iter() {
            let mut next = self.processes;
            let terms = terms_of(entity, now_ns);
            let of = self.member(entity, terms);
            let clients = entity.clients();
            of.processes
                .retain(|process| clients.iter().any(|(client, _)| *client == process.client));
            let mut looks = Vec::with_capacity(clients.len());
            for (client, pages) in clients {
                let known = of.processes.iter().position(|it| it.client == *client);
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
                let (claimed, doubt) = process.weights.look(&pages.client, now_ns);
                if doubt.is_some() {
                    doubted = Some(entity.tenant);
                }
                looks.push(look_of(entity.tenant, process.id, pages, device, claimed));
            }
            let at_work = |look: &&ProcessLook| look.pending_ns() > 0 || look.at_gate > 0;
            of.active = looks.iter().filter(at_work).count() as u64;
            self.processes = next;
            self.looks.append(&mut looks);
        }
        self.looked_ns = now_ns;
        let decided = self.rule.look(now_ns, &self.looks);
        if doubted.is_some() {
            return Some(words(SliceReason::CounterWentBack).to_owned());
        }
        let slices = decided.slices.filter(|slices| slices.pair.is_none());
        slices.map(|slices| words(slices.reason).to_owned())
    }
}

/// For people.
fn words(reason: SliceReason) -> &'static str {
    match reason {
        SliceReason::BelowFloor => "a job stays below its share beside kernels that last too long",
        SliceReason::CounterWentBack => "a process takes back what it said it had done",
        SliceReason::MoreThanTime => "jobs say that they did more than there was time for",
        SliceReason::HiddenWork => "the device is busy with work that no process accounts for",
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
    tenant: TenantId,
    process: ProcessId,
    pages: &Rc<ClientPages>,
    device: usize,
    claimed: Claimed,
) -> ProcessLook {
    let client = &pages.client;
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
        let doubted = self.lending.doubted(now_ns);
        let end_ns = doubted.map(Doubt::end_ns);
        let reason = doubted.map(|doubt| doubt.reason.clone());
        let before = self.lending.lends();
        if let Some(reason) = self.obstacle(now_ns).or(reason) {
            self.set_reason(now_ns, format!("slices: {reason}"));
            return end_ns;
        }
        if !before {
            self.lending.forget();
        }
        self.set_reason(now_ns, String::new());
        let rivals = self.roster.iter().any(|entity| entity.has_rivals(now_ns));
        self.lending.splits = rivals;
        let every_ns = if rivals {
            Constants::MODEL.look_ns
        } else {
            self.pace.tick_ns
        };
        let due_ns = self.lending.looked_ns.saturating_add(every_ns);
        if now_ns < due_ns && self.lending.looked_ns != 0 && before {
            return Some(due_ns);
        }
        let doubted = self.lending.look(now_ns, self.device, &self.roster);
        let doubted = doubted.or_else(|| self.past_gate());
        if let Some(reason) = doubted {
            self.set_reason(now_ns, format!("slices: {reason}"));
            self.lending.doubt(now_ns, reason);
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

    /// Notes why the device has slices; empty: it lends.
    fn set_reason(&mut self, now_ns: u64, reason: String) {
        if self.lending.reason == reason {
            return;
        }
        let before = self.lending.lends();
        match reason.as_str() {
            "" => tracing::info!("device {}: lends", self.device),
            why => tracing::info!("device {}: {why}", self.device),
        }
        self.lending.reason = reason;
        self.mode.set_lends(self.lending.lends());
        if self.lending.lends() != before {
            self.trace_mode(now_ns);
        }
    }

    /// Why gates do not do here, whatever anybody says.
    fn obstacle(&self, now_ns: u64) -> Option<String> {
        let there = || self.roster.iter().filter(|it| !it.clients().is_empty());
        if there().count() < 2 {
            return None;
        }
        if there().any(|entity| entity.gang) {
            return Some("the ranks of a job that uses several devices run together".to_owned());
        }
        if !LENT_BY.contains(&self.choice.name()) {
            return Some(format!("the policy `{}` gives slices", self.choice.name()));
        }
        let peaks = self.roster.iter().map(RunEntity::peak_bytes);
        let away = there().any(|entity| !entity.standing.is_in() || entity.leaves);
        if away || !self.choice.fits(peaks.fold(0, u64::saturating_add)) {
            return Some("the jobs' memory does not fit at once".to_owned());
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
        if above {
            return Some("a job's floor is above its share".to_owned());
        }
        let pages = || there().flat_map(|entity| entity.clients().iter());
        if pages().any(|(_, pages)| pages.client.following() != Following::Writes) {
            return Some("the driver does not write when work is done".to_owned());
        }
        if pages().any(|(_, pages)| !pages.client.weighs()) {
            return Some("a process of an earlier version does not weigh its work".to_owned());
        }
        None
    }

    /// Whether somebody has gone on submitting while its gate was shut.
    fn past_gate(&self) -> Option<String> {
        let past = self.lending.members.iter().any(|of| {
            let entity = self.roster.find(of.tenant);
            let now = || entity.map_or(0, |entity| entity.sample(self.device).launches);
            of.launches
                .is_some_and(|then| now().saturating_sub(then) > ON_THE_WAY)
        });
        past.then(|| "a job submits although its gate is closed".to_owned())
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
                self.lending.members[at].launches = None;
                continue;
            }
            match decided.gate {
                Gate::Shut { until_ns, .. } if until_ns > now_ns => {
                    self.roster[place].shut(device, until_ns);
                    if self.lending.members[at].launches.is_none() {
                        let launches = self.roster[place].sample(device).launches;
                        self.lending.members[at].launches = Some(launches);
                    }
                }
                _ => {
                    self.lending.members[at].launches = None;
                    self.open_again(now_ns, place);
                }
            }
        }
    }

    /// Opens what is shut.
    fn open_shut(&mut self, now_ns: u64) {
        for of in &mut self.lending.members {
            of.launches = None;
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
