//! The hook's state machine: reports of nodes come in, the [`Scheduler`] decides, orders come out.
//!
//! Its clock is an argument, and it has no sockets or threads: the server calls it under a lock,
//! tests in virtual time.
//!
//! * *Records* ([`JobRecord`], orders, pairs) are the truth and are committed before anything is
//!   sent.
//! * The [`ClusterState`] that policies read is made from the records whenever nodes come or go
//!   ([`Hook::rebuild`]), and after a crash in the same way.
//! * Decisions change only the state. [`Hook::reconcile`] compares each job's place in it with the
//!   attempt that was ordered from its node, and orders the difference: so a decision that could
//!   not be carried out yet is not lost, and none is carried out twice.
//! * A job has one attempt at a time. The next one is ordered only after the end of the last is
//!   committed; a silent node keeps its jobs until it reports again or an operator gives it up. So
//!   no job is ever in two places.

mod claims;
mod crowds;
mod decide;
mod jobs;
mod learned;
mod nodes;
mod pairs;
mod past;
mod place;
mod rebuild;
mod services;
mod sizes;
mod speeds;
mod starts;
#[cfg(test)]
mod tests;
mod trial;
mod views;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::path::Path;

use control::{Class, ControlError, ErrorCode};
use policy::PolicyError;
use policy::cluster::{Choice, ClusterState, JobId, Scheduler};

use super::adapt::{self, Known};
use super::clock::{Clock, Now, Reading};
use super::facts::Shared;
use super::records::{
    Changes, CrowdRecord, JobRecord, Kept, NodeRecord, Service, SpeedRecord, crowd_key, solo_key,
};
use super::store::{Store, StoreError};
use super::wire::{AwayJob, DecisionView, HookId, Order, OtherJob, RunId, WaitMatrix, What};
use learned::Learned;
use past::{Pairs, Solos};
use place::Resident;
use speeds::{ShownPairs, Unlearnt};
use trial::{Trial, Watch};

/// The assumed solo duration of a job whose owner gives none, in seconds: only orders by remaining
/// work use it.
const UNKNOWN_WORK_S: f64 = 3600.0;
/// Jobs that are over and still listed.
const OVER_KEPT: usize = 10_000;
/// Kinds of job, and pairs of them, of which measurements are kept; the oldest make way.
const MEASURED_KEPT: usize = 4096;
/// Jobs that are over and still in the policies' view, before that is made anew.
const PAST_IN_VIEW: usize = 20_000;
/// Lines of the decision log in memory.
const LOG_KEPT: usize = 4096;

/// Longest patience with a job that is to save, in seconds: a request at a node's arbiter does not
/// live much longer.
pub const MOST_SIGNAL_S: f64 = 60.0;

/// How a pair is judged.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TrialConfig {
    /// Shortest window in seconds.
    pub window_s: f64,
    /// Iterations of the slower one that it has to hold.
    pub iterations: f64,
    /// How long a job's solo speed is measured.
    pub solo_s: f64,
}

impl Default for TrialConfig {
    /// max(20 iterations, 30 s), as [`policy::cluster::packer::Trial::window_s`] says.
    fn default() -> Self {
        Self {
            window_s: 30.0,
            iterations: 20.0,
            solo_s: 5.0,
        }
    }
}

/// How a hook is to run.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its policies.
    pub choice: Choice,
    /// Seed of the policies' choices among equals.
    pub seed: u64,
    /// Decide at least so often, in seconds, also where nothing happened.
    pub round_s: f64,
    /// How pairs are judged.
    pub trial: TrialConfig,
    /// A node that has said nothing for so long gets nothing new, in seconds.
    pub silent_s: f64,
    /// How often agents report, in milliseconds.
    pub report_ms: u64,
    /// Patience with a job that is to stop, in seconds.
    pub grace_s: f64,
    /// Patience before that with a job that is to end its iteration and save, in seconds; below
    /// [`MOST_SIGNAL_S`].
    pub signal_s: f64,
    /// Of the binary.
    pub version: String,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            choice: Choice {
                order: Some("fifo-backfill".into()),
                packer: Some("trial".into()),
                placer: "consolidate-relaxed".into(),
                admission: None,
                sizer: None,
            },
            seed: 0,
            round_s: 10.0,
            trial: TrialConfig::default(),
            silent_s: 10.0,
            report_ms: 1000,
            grace_s: 10.0,
            signal_s: 30.0,
            version: env!("CARGO_PKG_VERSION").into(),
        }
    }
}

/// Why there is no hook.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A policy is unknown or could not act.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// No state.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A node beyond its record.
#[derive(Clone, Debug, Default)]
struct NodeEntry {
    record: NodeRecord,
    /// Last report, on the cluster's clock, since this hook started.
    heard_s: Option<f64>,
    /// As last reported to the policies.
    up: bool,
    /// Whether it takes starts, as last reported to the policies.
    door: starts::Door,
    /// It is in the policies' view.
    in_view: bool,
    waits: Vec<WaitMatrix>,
    /// What its arbiter has of the machine's memory for what is not on the devices, as last
    /// reported.
    host_limit_bytes: u64,
    /// Jobs of other engines, as last reported.
    others: Vec<OtherJob>,
    /// Those that are to be off its devices, as last reported.
    away: Vec<AwayJob>,
    /// Jobs of each device, as last reported.
    residents: BTreeMap<String, Vec<Resident>>,
}

/// The hook.
pub struct Hook {
    config: Config,
    store: Store,
    id: HookId,
    now_s: f64,
    state: ClusterState,
    scheduler: Scheduler,
    shared: Shared,
    nodes: BTreeMap<String, NodeEntry>,
    /// Nodes that do nothing that this hook says, and why.
    refusals: BTreeMap<String, String>,
    jobs: BTreeMap<u64, JobRecord>,
    /// Where jobs are in the state.
    live: BTreeMap<u64, JobId>,
    /// Number of each job of the state.
    numbers: Vec<u64>,
    /// Node and device of each GPU of the state.
    places: Vec<(String, String)>,
    kinds: Names,
    gpu_types: Names,
    users: Names,
    /// Orders that are not acknowledged, by node.
    orders: BTreeMap<String, BTreeMap<u64, Order>>,
    pairs: Pairs,
    /// Three jobs or more together, by [`crowd_key`].
    crowds: BTreeMap<String, CrowdRecord>,
    solos: Solos,
    /// Solo speeds by node, by [`solo_key`].
    speeds: BTreeMap<String, SpeedRecord>,
    /// What past jobs were given, by job.
    services: BTreeMap<u64, Service>,
    /// Speeds by type of GPU, as policies are shown them.
    learned: Learned,
    /// Pairs, as policies are shown them.
    shown_pairs: ShownPairs,
    unlearnt: Unlearnt,
    next_learn_s: f64,
    /// When a word was last said about what a node reports.
    doubted_s: BTreeMap<(String, &'static str), f64>,
    watches: BTreeMap<u64, Watch>,
    /// Jobs on the same devices that are measured, the one that came first first.
    trials: BTreeMap<Vec<u64>, Trial>,
    /// Held back for a moment, so that a job beside it can be measured solo.
    probed: BTreeSet<u64>,
    /// Jobs of other engines that are to be off the devices, by node; `None`: nobody has said since
    /// this hook started.
    away: Option<BTreeMap<String, Vec<String>>>,
    /// Terms that were refused are not sent again before this.
    retry_s: BTreeMap<u64, f64>,
    log: VecDeque<DecisionView>,
    changes: Changes,
    dirty: BTreeSet<u64>,
    changed: bool,
    next_round_s: f64,
    started_unix_ms: u64,
    /// When this hook began, on the cluster's clock.
    opened_s: f64,
    /// What the host's clocks said then.
    opened: Reading,
    /// By the wall clock, as of the last step.
    shown_unix_ms: u64,
}

impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Hook({:?}, {} jobs, {} nodes)",
            self.id,
            self.jobs.len(),
            self.nodes.len()
        )
    }
}

/// Names by number.
#[derive(Clone, Debug, Default)]
struct Names(Vec<String>, HashMap<String, u32>);

impl Names {
    fn number(&mut self, name: &str) -> u32 {
        if let Some(number) = self.1.get(name) {
            return *number;
        }
        // CAST: as many as there are kinds of job.
        let number = self.0.len() as u32;
        self.0.push(name.to_owned());
        self.1.insert(name.to_owned(), number);
        number
    }
}

/// By what was measured; where that is too little for a policy, as if pairs had been, for then they
/// will be.
fn scheduler_of(config: &Config, shared: &Shared, known: &Known) -> Result<Scheduler, PolicyError> {
    let measured = config.choice.policies(&adapt::context(known));
    let mut policies = measured.or_else(|_| config.choice.policies(&adapt::context_to_be()))?;
    if let Some(packer) = &mut policies.packer {
        packer.remember(&known.pairs);
    }
    Ok(adapt::scheduler(policies, shared, config.seed))
}

impl Hook {
    /// On the state in a directory.
    ///
    /// # Errors
    /// [`OpenError`]: policies are looked up first, so that a typing error takes no lock.
    pub fn open(dir: &Path, config: Config, now: impl Into<Reading>) -> Result<Self, OpenError> {
        let opened = now.into();
        let unix_ms = opened.unix_ms;
        let shared = Shared::default();
        let scheduler =
            scheduler_of(&config, &shared, &Known::default()).map_err(OpenError::Policy)?;
        let (store, kept, id) = Store::open(dir, unix_ms)?;
        let Kept {
            nodes,
            jobs,
            orders,
            pairs,
            crowds,
            solos,
            speeds,
            services,
            log,
        } = kept;
        let mut hook = Self {
            now_s: 0.0,
            state: ClusterState::new(Vec::new()),
            scheduler,
            shared,
            nodes: nodes
                .into_iter()
                .map(|record| {
                    (
                        record.name.clone(),
                        NodeEntry {
                            record,
                            ..NodeEntry::default()
                        },
                    )
                })
                .collect(),
            jobs: jobs.into_iter().map(|job| (job.id, job)).collect(),
            refusals: BTreeMap::new(),
            live: BTreeMap::new(),
            numbers: Vec::new(),
            places: Vec::new(),
            kinds: Names::default(),
            gpu_types: Names::default(),
            users: Names::default(),
            orders: BTreeMap::new(),
            pairs: pairs
                .into_iter()
                .map(|pair| ((pair.gpu.clone(), pair.gpus, pair.kinds.clone()), pair))
                .collect(),
            crowds: crowds
                .into_iter()
                .map(|crowd| (crowd_key(&crowd), crowd))
                .collect(),
            solos: solos.into_iter().collect(),
            speeds: speeds
                .into_iter()
                .map(|speed| (solo_key(&speed.gpu, speed.gpus, &speed.kind), speed))
                .collect(),
            services: services.into_iter().map(|one| (one.job, one)).collect(),
            learned: Learned::default(),
            shown_pairs: ShownPairs::new(),
            unlearnt: Unlearnt::default(),
            next_learn_s: 0.0,
            doubted_s: BTreeMap::new(),
            watches: BTreeMap::new(),
            trials: BTreeMap::new(),
            probed: BTreeSet::new(),
            away: None,
            retry_s: BTreeMap::new(),
            log: log.into_iter().collect(),
            changes: Changes::default(),
            dirty: BTreeSet::new(),
            changed: true,
            next_round_s: 0.0,
            started_unix_ms: unix_ms,
            opened_s: 0.0,
            opened,
            shown_unix_ms: unix_ms,
            config,
            store,
            id,
        };
        for (node, order) in orders {
            hook.orders
                .entry(node)
                .or_default()
                .insert(order.seq, order);
        }
        let begun_ms = hook.opened.resume(&hook.store.meta);
        hook.opened_s = hook.clock_s(begun_ms);
        hook.now_s = hook.opened_s;
        hook.count_gap();
        // Now that it is known what was measured.
        let known = hook.all_known();
        hook.config.choice.policies(&adapt::context(&known))?;
        hook.rebuild();
        hook.commit()?;
        Ok(hook)
    }

    /// Jobs went on while no hook was there, and since what was last written of each.
    fn count_gap(&mut self) {
        for record in self.jobs.values_mut() {
            let Some(run) = record.run.as_ref().filter(|_| record.over.is_none()) else {
                continue;
            };
            if record.counted_s > 0.0 && !run.stopping && !run.suspended {
                let gap_s = (self.now_s - record.counted_s).max(0.0);
                // CAST: a node has at most 64.
                record.gpu_s += gap_s * run.devices.len() as f64;
                record.held_s += gap_s;
                record.done_s += gap_s * record.rate.unwrap_or(1.0).clamp(0.0, 1.0);
            }
            record.counted_s = self.now_s;
        }
    }

    /// Which hook this is.
    #[must_use]
    pub fn id(&self) -> &HookId {
        &self.id
    }

    /// Its settings.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The deciding clock, to be gone on with from what the host's clocks said at the opening.
    #[must_use]
    pub fn clock(&self) -> Clock {
        Clock::new(self.now_ms(), &self.opened)
    }

    /// The cluster's clock: seconds since its state was made.
    fn clock_s(&self, ms: u64) -> f64 {
        // CAST: milliseconds of some decades are below 2^53.
        ms.saturating_sub(self.store.meta.origin_unix_ms) as f64 / 1000.0
    }

    fn now_ms(&self) -> u64 {
        // CAST: as above.
        self.store.meta.origin_unix_ms + (self.now_s * 1000.0) as u64
    }

    /// For people.
    fn unix_ms(&self) -> u64 {
        self.shown_unix_ms
    }

    /// Let time pass.
    fn advance(&mut self, now: impl Into<Now>) {
        let now = now.into();
        self.shown_unix_ms = now.unix_ms;
        self.now_s = self.now_s.max(self.clock_s(now.ms));
        if self.state.gpus() > 0 {
            self.state.advance(self.now_s);
        }
    }

    /// Look around and decide where there is reason to.
    ///
    /// # Errors
    /// The state cannot be written: end and start anew.
    pub fn step(&mut self, now: impl Into<Now>) -> Result<(), StoreError> {
        self.advance(now);
        self.watch_nodes();
        self.watch_starts();
        if self.state.jobs().len() > PAST_IN_VIEW + 2 * self.live.len() {
            // It numbers jobs, kinds and users for as long as it lives.
            self.rebuild();
        }
        self.let_in();
        self.try_groups();
        self.learn_anew(false);
        if self.state.gpus() > 0
            && self.knows_enough()
            && (self.changed || self.now_s >= self.next_round_s)
        {
            self.changed = false;
            self.next_round_s = self.now_s + self.config.round_s;
            self.decide();
            let ends_s = self.shared.facts().round_ends_s;
            if ends_s > self.now_s {
                self.next_round_s = self.next_round_s.min(ends_s);
            }
        }
        self.reconcile();
        self.commit()
    }

    /// Right after a start nodes are silent only because they have not had the time to speak.
    fn knows_enough(&self) -> bool {
        self.now_s - self.opened_s > self.config.silent_s
            || self.nodes.values().all(|node| node.heard_s.is_some())
    }

    /// Jobs whose time to wait after a failure is over.
    fn let_in(&mut self) {
        if self.state.gpus() == 0 {
            return;
        }
        let due: Vec<u64> = self
            .jobs
            .values()
            .filter(|job| job.over.is_none() && !job.cancelled && !self.live.contains_key(&job.id))
            .filter(|job| job.not_before_s <= self.now_s)
            .map(|job| job.id)
            .collect();
        for id in due {
            self.enter(id);
        }
    }

    /// An order for a node. It is written down with the rest of the step.
    fn order(&mut self, node: &str, run: RunId, what: What) -> u64 {
        let seq = self.store.meta.next_order;
        self.store.meta.next_order += 1;
        let order = Order {
            epoch: self.id.epoch,
            seq,
            run,
            what,
        };
        self.changes.orders.push((node.to_owned(), order.clone()));
        self.orders
            .entry(node.to_owned())
            .or_default()
            .insert(seq, order);
        seq
    }

    fn drop_order(&mut self, node: &str, seq: u64) -> Option<Order> {
        let order = self.orders.get_mut(node)?.remove(&seq)?;
        self.changes.orders.retain(|(_, order)| order.seq != seq);
        self.changes.dropped_orders.push((node.to_owned(), seq));
        Some(order)
    }

    /// A line of the decision log.
    fn say(&mut self, kind: &str, job: u64, beside: Option<u64>, text: String) {
        let seq = self.store.meta.next_line;
        self.store.meta.next_line += 1;
        let line = DecisionView {
            seq,
            unix_ms: self.unix_ms(),
            kind: kind.into(),
            job,
            beside,
            text,
        };
        self.changes.log.push(line.clone());
        self.log.push_back(line);
        if self.log.len() > LOG_KEPT {
            self.log.pop_front();
        }
    }

    /// Commits what has changed. Clients that are answered after this may rely on it.
    ///
    /// # Errors
    /// [`StoreError`]: memory is then ahead of the disk, and the process has to end.
    pub fn commit(&mut self) -> Result<(), StoreError> {
        if self.dirty.is_empty() && self.changes.is_empty() {
            return Ok(());
        }
        self.forget_old();
        let dirty = std::mem::take(&mut self.dirty);
        if !dirty.is_empty() {
            self.keep_progress();
        }
        self.changes
            .jobs
            .extend(dirty.iter().filter_map(|id| self.jobs.get(id).cloned()));
        let changes = std::mem::take(&mut self.changes);
        let now_ms = self.now_ms();
        let meta = &mut self.store.meta;
        meta.last_ms = now_ms;
        meta.last_unix_ms = self.shown_unix_ms;
        meta.boot.clone_from(&self.opened.boot);
        // CAST: a span of some decades.
        let since_ms = ((self.now_s - self.opened_s) * 1000.0) as u64;
        meta.last_boottime_ms = self.opened.boottime_ms + since_ms;
        self.store.commit(&changes, true)
    }

    /// Jobs that were over long ago.
    fn forget_old(&mut self) {
        let over = self.jobs.values().filter(|job| job.over.is_some()).count();
        if over <= OVER_KEPT {
            return;
        }
        let old: Vec<u64> = self
            .jobs
            .values()
            .filter(|job| job.over.is_some())
            .take(over - OVER_KEPT)
            .map(|job| job.id)
            .collect();
        for id in old {
            self.jobs.remove(&id);
            self.dirty.remove(&id);
            self.changes.dropped_jobs.push(id);
        }
    }
}

fn policy_class(class: Class) -> policy::Class {
    match class {
        Class::Guaranteed => policy::Class::Guaranteed,
        Class::Opportunistic => policy::Class::Opportunistic,
    }
}

fn wire_class(class: policy::Class) -> Class {
    match class {
        policy::Class::Guaranteed => Class::Guaranteed,
        policy::Class::Opportunistic => Class::Opportunistic,
    }
}

fn refuse(message: impl Into<String>, hint: &str) -> ControlError {
    ControlError::new(ErrorCode::Refused, message).with_hint(hint)
}

fn invalid(message: impl Into<String>, hint: &str) -> ControlError {
    ControlError::new(ErrorCode::Invalid, message).with_hint(hint)
}
