//! A profile of every job: looks at what clients submit and hold, finds their iterations, and keeps
//! what was learnt about a job's name for the next one.
//!
//! Three ways in which boundaries are known, best first: the program notes them (`sublet_step`),
//! the operator has given a number of launches, or the sequence of launches has a period
//! ([`learn`]). In the last case the client is given one signature of the period, its *anchor*, and
//! notes the time whenever it submits that; iterations that are too short for this are timed in
//! blocks.
//!
//! A slow loop beside the schedulers' fast one: it never touches a gate.

use std::collections::BTreeMap;
use std::rc::Rc;

use channel::arbiter::ClientPages;
use control::{IterationSource, Profile};
use policy::TenantId;
use policy::iterations::Found;

use crate::clients::Clients;
use crate::clock::Clock;
use crate::dispatch::Boundaries;
use crate::ledger::Ledger;
use crate::schedulers::Schedulers;
use crate::state::SavedBaseline;
use crate::tally::{Tally, growth};
use crate::tenant::Tenant;

mod learn;
mod meter;

use learn::{Detector, Learner};
use meter::{Baseline, Counters, Meter};

/// Between two looks: while launches are collected, at least and at most; while iterations are only
/// counted; while nothing moves.
const COLLECT_MIN_NS: u64 = 2_000_000;
const COLLECT_NS: u64 = 10_000_000;
const COUNT_NS: u64 = 50_000_000;
const IDLE_NS: u64 = 100_000_000;
/// Launches in a look above which the next one comes sooner, so that the ring is not overrun.
const MANY: u64 = channel::SIGNATURE_SLOTS as u64 / 3;
/// Iterations from this length on are timed one by one, down to the second.
const SINGLE_NS: u64 = 1_000_000;
const SINGLE_UNTIL_NS: u64 = 250_000;
/// A period that fits less of the launches than this is given up.
const FIT: f64 = 0.6;
/// Least confidence with which a period is used.
const CONFIDENT: f64 = 0.5;
/// Baselines that are kept, by name; the oldest goes first.
const KEPT: usize = 256;
/// A baseline that has changed less is not written anew.
const CHANGED: f64 = 0.02;

/// All jobs' profiles.
#[derive(Debug)]
pub struct Profiles {
    detector: Detector,
    learners: BTreeMap<u64, Learner>,
    jobs: BTreeMap<TenantId, Job>,
    baselines: BTreeMap<String, Kept>,
    next_ns: u64,
    every_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Kept {
    baseline: Baseline,
    unix_ms: u64,
}

/// What is measured of one job.
#[derive(Debug, Default)]
struct Job {
    meter: Meter,
    source: Source,
    confidence: f64,
    /// What its sequence of launches says, whatever is used: `Some(false)`: no period.
    periodic: Option<bool>,
    copy_bytes_per_us: u64,
    /// Next boundary to read.
    next_boundary: u64,
    /// Iterations by which the anchor was chosen.
    anchor_repeats: usize,
    /// Part of the launches that the period explains.
    coverage: f64,
    counted: Counted,
}

/// What a job's processes have submitted and copied, those that have ended included.
#[derive(Debug, Default)]
struct Counted {
    /// Launches and copied bytes of those that are there.
    of: BTreeMap<u64, [Tally; 2]>,
    gone: [u64; 2],
}

impl Counted {
    fn look(&mut self, watched: &[Watched]) {
        self.of.retain(|id, tallies| {
            let there = watched.iter().any(|client| client.id == *id);
            for (gone, tally) in self.gone.iter_mut().zip(tallies) {
                *gone = gone.saturating_add(if there { 0 } else { tally.total() });
            }
            there
        });
        for client in watched {
            let half = &client.pages.client;
            let [launches, copied] = self.of.entry(client.id).or_default();
            launches.look(half.launches());
            copied.look(half.copied_bytes());
        }
    }

    /// Launches and copied bytes of all of them together.
    fn all(&self) -> [u64; 2] {
        let mut sums = self.gone;
        for tallies in self.of.values() {
            for (sum, tally) in sums.iter_mut().zip(tallies) {
                *sum = sum.saturating_add(tally.total());
            }
        }
        sums
    }

    /// Launches of one of them.
    fn launches_of(&self, client: u64) -> u64 {
        self.of
            .get(&client)
            .map_or(0, |[launches, _]| launches.total())
    }
}

/// Where boundaries are from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Source {
    #[default]
    None,
    /// Noted by the program in this client.
    Steps { client: u64 },
    /// So many launches of all clients together.
    Fixed { launches: u64 },
    /// Found in a thread of this client; the anchor, once there is one.
    Found {
        client: u64,
        slot: usize,
        launches: u64,
        anchor: Option<u32>,
    },
}

/// Launches from one iteration to the next on the average: those of the period, and the share of
/// those that it leaves unexplained.
fn per_iteration(launches: u64, coverage: f64) -> f64 {
    launches as f64 / coverage.clamp(0.5, 1.0) // CAST: far below 2^53.
}

impl Source {
    fn wire(self) -> IterationSource {
        match self {
            Self::None => IterationSource::None,
            Self::Steps { .. } => IterationSource::Hinted,
            Self::Fixed { .. } => IterationSource::Fixed,
            Self::Found { .. } => IterationSource::Detected,
        }
    }

    /// Whether what was measured between the boundaries of `other` goes on to mean the same.
    fn continues(self, other: Self) -> bool {
        match (self, other) {
            (
                Self::Found {
                    client,
                    slot,
                    launches,
                    ..
                },
                Self::Found {
                    client: other_client,
                    slot: other_slot,
                    launches: other_launches,
                    ..
                },
            ) => (client, slot, launches) == (other_client, other_slot, other_launches),
            (one, other) => one == other,
        }
    }
}

impl Profiles {
    /// Of no job yet; with what an earlier arbiter has learnt.
    ///
    /// # Errors
    /// Where no thread can be started.
    pub fn new(saved: Vec<SavedBaseline>) -> std::io::Result<Self> {
        let usable = saved
            .into_iter()
            .filter(|saved| saved.iteration_ns.is_finite() && saved.iteration_ns > 0.0);
        Ok(Self {
            detector: Detector::start()?,
            learners: BTreeMap::new(),
            jobs: BTreeMap::new(),
            baselines: usable
                .map(|saved| {
                    let baseline = Baseline {
                        iteration_ns: saved.iteration_ns,
                        launches: saved.launches,
                        set: saved.set,
                    };
                    let unix_ms = saved.unix_ms;
                    (saved.name, Kept { baseline, unix_ms })
                })
                .collect(),
            next_ns: 0,
            every_ns: COLLECT_NS,
        })
    }

    /// For the file of the state.
    pub fn saved(&self) -> Vec<SavedBaseline> {
        let kept = self.baselines.iter();
        kept.map(|(name, kept)| SavedBaseline {
            name: name.clone(),
            iteration_ns: kept.baseline.iteration_ns,
            launches: kept.baseline.launches,
            set: kept.baseline.set,
            unix_ms: kept.unix_ms,
        })
        .collect()
    }

    /// Sets the time of an iteration without others, by a job's name; `None` forgets it.
    pub fn set_baseline(&mut self, name: &str, iteration_ns: Option<f64>, unix_ms: u64) {
        let Some(iteration_ns) = iteration_ns else {
            self.baselines.remove(name);
            return;
        };
        let baseline = Baseline {
            iteration_ns,
            launches: 0.0,
            set: true,
        };
        self.keep(name, baseline, unix_ms);
    }

    fn keep(&mut self, name: &str, baseline: Baseline, unix_ms: u64) {
        self.baselines
            .insert(name.to_owned(), Kept { baseline, unix_ms });
        if self.baselines.len() > KEPT {
            let oldest = self.baselines.iter().min_by_key(|(_, kept)| kept.unix_ms);
            if let Some(name) = oldest.map(|(name, _)| name.clone()) {
                self.baselines.remove(&name);
            }
        }
    }

    /// A job's profile.
    pub fn of(&self, id: TenantId, name: &str) -> Profile {
        let kept = self.baselines.get(name).map(|kept| &kept.baseline);
        let Some(job) = self.jobs.get(&id) else {
            return Profile::default();
        };
        let known = job.source != Source::None;
        Profile {
            found: job.source.wire(),
            periodic: if known { Some(true) } else { job.periodic },
            confidence: job.confidence,
            period_launches: match job.source {
                Source::Fixed { launches } | Source::Found { launches, .. } => Some(launches),
                _ => None,
            },
            ..job.meter.profile(kept, job.copy_bytes_per_us)
        }
    }

    /// Where its boundaries are noted, for those who cannot wait for the next look.
    pub fn boundaries(&self, id: TenantId) -> Option<Boundaries> {
        match self.jobs.get(&id)?.source {
            Source::Steps { client } => Some(Boundaries { client, slot: None }),
            Source::Found {
                client,
                slot,
                anchor: Some(_),
                ..
            } => Some(Boundaries {
                client,
                slot: Some(slot),
            }),
            _ => None,
        }
    }

    /// The part of it that slice policies look at; zeros and `None` where nothing is known.
    pub fn view(&self, id: TenantId, name: &str) -> (policy::Iterations, policy::Memory) {
        let Some(job) = self.jobs.get(&id).filter(|job| job.source != Source::None) else {
            return Default::default();
        };
        let kept = self.baselines.get(name).map(|kept| &kept.baseline);
        let iterations = policy::Iterations {
            ended: job.meter.iterations(),
            last_ns: job.meter.last_iteration_ns().unwrap_or(0),
            solo_ns: job.meter.solo_ns(kept),
            device_ns: job.meter.device_ns(),
            // CAST: at most a million.
            confidence_ppm: (job.confidence * 1e6) as u32,
            ..policy::Iterations::default()
        };
        let memory = job
            .meter
            .memory_bytes()
            .map(|(persistent, ephemeral)| policy::Memory {
                persistent_bytes: persistent,
                ephemeral_bytes: ephemeral,
            });
        (iterations, memory.unwrap_or_default())
    }
}

/// A job's client as it is looked at.
struct Watched {
    id: u64,
    pages: Rc<ClientPages>,
}

/// The other parts of the arbiter, as a look at the profiles reads them.
#[derive(Clone, Copy)]
pub(crate) struct Parts<'a> {
    /// The jobs.
    pub ledger: &'a Ledger,
    /// Their processes.
    pub clients: &'a Clients,
    /// What they got.
    pub schedulers: &'a Schedulers,
}

/// What came of a look.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Look {
    /// When to look again; `None`: nobody is there.
    pub next_ns: Option<u64>,
    /// Something was looked at: what is known may have changed.
    pub looked: bool,
    /// Something was learnt that is to be kept for the next run.
    pub learnt: bool,
}

impl Profiles {
    /// Looks at every job, where that is due.
    pub(crate) fn look(&mut self, now_ns: u64, parts: Parts<'_>, clock: &Clock) -> Look {
        let Parts {
            ledger, clients, ..
        } = parts;
        if clients.is_empty() && ledger.is_empty() {
            self.learners.clear();
            self.jobs.clear();
            return Look::default();
        }
        if now_ns < self.next_ns {
            return Look {
                next_ns: Some(self.next_ns),
                ..Look::default()
            };
        }
        self.learners.retain(|id, _| clients.get(*id).is_some());
        self.jobs.retain(|id, _| ledger.get(*id).is_some());
        let (mut moves, mut collects, mut most) = (false, false, 0);
        for (id, client) in clients.iter() {
            let learner = self
                .learners
                .entry(id)
                .or_insert_with(|| Learner::new(&client.pages));
            let seen = learner.look(id, &client.pages, now_ns, &self.detector);
            moves |= seen.moves;
            collects |= seen.collects;
            most = most.max(if seen.collects { seen.launches } else { 0 });
        }
        for answer in self.detector.answers() {
            if let Some(learner) = self.learners.get_mut(&answer.client) {
                learner.learn(&answer, now_ns);
            }
        }
        let mut learnt = false;
        for tenant in ledger.iter() {
            learnt |= self.look_at_job(tenant, now_ns, parts, clock);
        }
        self.every_ns = match (moves, collects) {
            (false, _) => IDLE_NS,
            (_, false) => COUNT_NS,
            _ if most > MANY => (self.every_ns / 2).clamp(COLLECT_MIN_NS, COLLECT_NS),
            _ => COLLECT_NS,
        };
        self.next_ns = now_ns + self.every_ns;
        Look {
            next_ns: Some(self.next_ns),
            looked: true,
            learnt,
        }
    }

    /// Looks at one job. Whether something was learnt that is worth keeping.
    fn look_at_job(
        &mut self,
        tenant: &Tenant,
        now_ns: u64,
        parts: Parts<'_>,
        clock: &Clock,
    ) -> bool {
        let watched: Vec<Watched> = tenant
            .clients
            .iter()
            .filter_map(|id| {
                let pages = Rc::clone(&parts.clients.get(*id)?.pages);
                Some(Watched { id: *id, pages })
            })
            .collect();
        let counters = self.counters_of(tenant, &watched, parts.schedulers);
        let (name, fixed) = (
            &tenant.spec.name,
            tenant
                .spec
                .settings
                .iteration_launches
                .filter(|launches| *launches > 0),
        );
        let Self { learners, jobs, .. } = self;
        let job = jobs.entry(tenant.id).or_default();
        job.choose(&watched, learners, fixed);
        job.copy_bytes_per_us = watched
            .iter()
            .map(|client| client.pages.client.copy_bytes_per_us())
            .max()
            .unwrap_or(0);
        job.count(&watched, learners, now_ns, &counters);
        // What was learnt is kept for the next run.
        let Some(learnt) = job.meter.learnt() else {
            return false;
        };
        let old = self.baselines.get(name).map(|kept| kept.baseline);
        let worth = old.is_none_or(|old| {
            let off = |new: f64, old: f64| (new - old).abs() > CHANGED * old;
            !old.set
                && (off(learnt.iteration_ns, old.iteration_ns)
                    || off(learnt.launches, old.launches))
        });
        let is_kept = worth && learnt.launches > 0.0;
        if is_kept {
            self.keep(name, learnt, clock.unix_ms());
        }
        is_kept
    }

    fn counters_of(
        &mut self,
        tenant: &Tenant,
        watched: &[Watched],
        schedulers: &Schedulers,
    ) -> Counters {
        let mut counters = Counters::default();
        for (index, scheduler) in schedulers.iter().enumerate() {
            if let Some(usage) = scheduler.usage(tenant.id) {
                counters.device_ns += usage.device_ns;
                counters.contended_ns += usage.contended_ns;
            }
            counters.held_bytes = counters.held_bytes.saturating_add(tenant.used_bytes(index));
            counters.peak_bytes = counters.peak_bytes.saturating_add(tenant.peak_bytes(index));
        }
        let job = self.jobs.entry(tenant.id).or_default();
        job.counted.look(watched);
        [counters.launches, counters.copied_bytes] = job.counted.all();
        if let Source::Steps { client } | Source::Found { client, .. } = job.source {
            counters.launches = job.counted.launches_of(client);
        }
        counters
    }
}

impl Job {
    /// Chooses where boundaries are from.
    fn choose(
        &mut self,
        watched: &[Watched],
        learners: &BTreeMap<u64, Learner>,
        fixed: Option<u64>,
    ) {
        let learners = |client: &Watched| learners.get(&client.id);
        let steps = watched
            .iter()
            .map(|client| {
                (
                    client
                        .pages
                        .signatures()
                        .map_or(0, |page| page.steps().count()),
                    client.id,
                )
            })
            .max()
            .filter(|(count, _)| *count >= 2);
        let leads = watched.iter().filter_map(|client| {
            let (slot, found) = learners(client)?.lead(&client.pages)?;
            Some((client, slot, found))
        });
        // The one that was chosen before stays while it is as good.
        let lead = leads
            .filter(|(.., found)| found.confidence >= CONFIDENT)
            .max_by(|one, other| {
                let rank = |(client, _, found): &(&Watched, usize, Found)| {
                    let chosen =
                        matches!(self.source, Source::Found { client: id, .. } if id == client.id);
                    found.confidence + if chosen { 0.1 } else { 0.0 }
                };
                rank(one).total_cmp(&rank(other))
            });
        let irregular = !watched.is_empty()
            && watched.iter().all(|client| {
                learners(client).is_some_and(|learner| learner.irregular(&client.pages))
            });
        self.periodic = match (&lead, irregular) {
            (Some(_), _) => Some(true),
            (None, true) => Some(false),
            _ => None,
        };
        let (source, confidence) = match (steps, fixed, lead) {
            (Some((_, client)), ..) => (Source::Steps { client }, 1.0),
            (_, Some(launches), _) => (Source::Fixed { launches }, 1.0),
            (.., Some((client, slot, found))) => {
                let launches = found.launches as u64; // CAST: at most the history.
                let anchor = self.anchor(launches, &found);
                self.coverage = found.coverage;
                let source = Source::Found {
                    client: client.id,
                    slot,
                    launches,
                    anchor,
                };
                (source, found.confidence)
            }
            _ => (Source::None, 0.0),
        };
        self.confidence = confidence;
        if source == self.source {
            return;
        }
        if source.continues(self.source) {
            self.meter.change_over();
        } else if source != Source::None || watched.is_empty() {
            self.meter.restart();
        }
        self.source = source;
        self.anchor_repeats = lead.map_or(0, |(.., found)| found.repeats);
        self.next_boundary = 0;
        for client in watched {
            let anchor = match source {
                Source::Found {
                    client: id,
                    slot,
                    anchor: Some(signature),
                    ..
                } if id == client.id => u32::try_from(slot).ok().map(|slot| (slot, signature)),
                _ => None,
            };
            client.pages.arbiter.set_anchor(anchor);
            let ring = client.pages.signatures().map(|page| match source {
                Source::Found { slot, .. } => {
                    page.ring(slot).map_or(0, |ring| ring.boundaries().count())
                }
                _ => 0,
            });
            if Some(client.id) == source.client() {
                self.next_boundary = ring.unwrap_or(0);
            }
        }
    }

    /// The anchor to use, where iterations are long enough to be timed one by one.
    fn anchor(&self, launches: u64, found: &Found) -> Option<u32> {
        let Source::Found {
            launches: before,
            anchor,
            ..
        } = self.source
        else {
            return None;
        };
        if before != launches {
            return None;
        }
        let mean_ns = self.meter.mean_iteration_ns()?;
        let floor_ns = if anchor.is_some() {
            SINGLE_UNTIL_NS
        } else {
            SINGLE_NS
        };
        if mean_ns < floor_ns {
            return None;
        }
        // The one in use stays where another would be as good; one that was chosen by a few
        // iterations gives way.
        let better = found.repeats > 2 * self.anchor_repeats;
        match (anchor, found.anchor) {
            (Some(anchor), _) if !better => Some(anchor),
            (_, found) => found.map(|found| found.signature),
        }
    }

    /// Reads boundaries, and takes note of the counters.
    fn count(
        &mut self,
        watched: &[Watched],
        learners: &mut BTreeMap<u64, Learner>,
        now_ns: u64,
        counters: &Counters,
    ) {
        let solo = watched.len() == 1;
        let find = |id: u64| watched.iter().find(|client| client.id == id);
        match self.source {
            Source::None => {}
            Source::Steps { client } => {
                if let Some(page) = find(client).and_then(|client| client.pages.signatures()) {
                    for noted in page.steps().since(self.next_boundary) {
                        // WRAPPING: the number after it, of a count that a client writes.
                        self.next_boundary = noted.number.wrapping_add(1);
                        self.meter.boundary(noted, None, solo);
                    }
                }
            }
            Source::Fixed { launches } => {
                self.meter
                    .progress(now_ns, counters.launches, launches as f64); // CAST: far below 2^53.
            }
            Source::Found {
                client,
                slot,
                launches,
                anchor: None,
            } => {
                if let Some(client) = find(client) {
                    let now = client.pages.client.launches_of(slot);
                    self.meter
                        .progress(now_ns, now, per_iteration(launches, self.coverage));
                }
            }
            Source::Found {
                client: id,
                slot,
                launches,
                anchor: Some(_),
            } => {
                let Some(client) = find(id) else { return };
                let ring = client.pages.signatures().and_then(|page| page.ring(slot));
                if let Some(ring) = ring {
                    for noted in ring.boundaries().since(self.next_boundary) {
                        // WRAPPING: the number after it, of a count that a client writes.
                        self.next_boundary = noted.number.wrapping_add(1);
                        self.meter.boundary(noted, Some(launches), solo);
                    }
                }
                let since = self.meter.last_launches().map_or(0, |last| {
                    growth(last, client.pages.client.launches_of(slot)).unwrap_or(0)
                });
                let fit = self.meter.fit(launches);
                if fit.is_some_and(|fit| fit < FIT) || since > launches.saturating_mul(64) {
                    if let Some(learner) = learners.get_mut(&id) {
                        learner.doubt(slot);
                    }
                    self.meter.forget_fit();
                } else if fit.is_some() && self.meter.fit_is_old(launches) {
                    self.meter.forget_fit();
                }
            }
        }
        self.meter.look(now_ns, counters);
    }
}

impl Source {
    fn client(self) -> Option<u64> {
        match self {
            Self::Steps { client } | Self::Found { client, .. } => Some(client),
            _ => None,
        }
    }
}
