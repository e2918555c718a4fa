//! Discrete events in virtual time: jobs come and end, pairs are measured, and the scheduler
//! decides, either at every event or in rounds.
//!
//! The simulator keeps a [`ClusterState`] as the live hook keeps its own, reports events to the
//! [`Scheduler`], and applies its decisions. It adds how fast jobs really run: solo jobs as the
//! trace says, pairs as the table of pairs says, several by what each of the others costs
//! ([`beside_others`]), and no job during a restart. Policies may know less: with `noise` their
//! figures for a job's work and for a pair are off by a factor.

mod learning;

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeSet, BinaryHeap};
use std::sync::Arc;

use policy::cluster::host::{self, HostDivision};
use policy::cluster::packer::Trial;
use policy::cluster::{
    ClusterState, Decision, GpuId, GpuType, JobId, MOST_JOBS_ON_GPU, NodeId, PairTable, Random,
    Refused, Scheduler, Throughputs, Verdict, beside_others,
};

use crate::trace::Trace;
use crate::training::Session;

/// How to simulate.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// Decide every so many seconds; `None`: at every event.
    pub round_s: Option<f64>,
    /// What a job loses each time it gets GPUs again, in seconds.
    pub restart_s: f64,
    /// What it loses the first time.
    pub start_s: f64,
    /// Deviation of the estimates that policies see, as the exponent of e: 0.1 is about 10 %.
    pub noise: f64,
    /// Seed of the noise.
    pub seed: u64,
    /// How cores and memory of servers are divided between jobs with a known need; `None`: not
    /// modelled.
    pub host: Option<HostDivision>,
    /// Decide in rounds, but measure pairs only when this many seconds have passed; `None`:
    /// [`Trial::window_s`].
    pub pair_window_s: Option<f64>,
}

/// What became of one job.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Fate {
    /// When it came.
    pub arrival_s: f64,
    /// When it was over; `None` where it was rejected.
    pub end_s: Option<f64>,
    /// How long it takes alone.
    pub solo_s: f64,
    /// GPUs it asked for.
    pub gpus: u32,
    /// Time it waited because the free GPUs were not where the placer wants them.
    pub fragmented_s: f64,
    /// Time it waited in all.
    pub waited_s: f64,
    /// Finish-time fairness.
    pub rho: f64,
    /// Its deadline.
    pub deadline_s: Option<f64>,
    /// GPU-seconds it held.
    pub service_gpu_s: f64,
    /// It is best effort by the trace.
    pub best_effort: bool,
}

/// What a run was like.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Every job, in the order of the trace.
    pub fates: Vec<Fate>,
    /// GPUs of the cluster.
    pub gpus: u32,
    /// Seconds from the first arrival to the last end.
    pub makespan_s: f64,
    /// GPU-seconds in which a GPU was held, by one job or by several.
    pub held_gpu_s: f64,
    /// Running jobs stopped in favour of others.
    pub preemptions: u64,
    /// Times a job went on after it was stopped.
    pub resumes: u64,
    /// Running jobs moved.
    pub migrations: u64,
    /// Running jobs whose number of GPUs was changed.
    pub resizes: u64,
    /// Jobs put beside others.
    pub packs: u64,
    /// Jobs sent away from others because that did not pay.
    pub unpacks: u64,
    /// Most jobs that were on one GPU at once.
    pub most_on_gpu: u32,
    /// Decisions taken.
    pub decisions: u64,
}

/// Why a run came to nothing.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// A job that no cluster state will ever fit.
    #[error(
        "job {index} of the trace asks for {gpus} GPUs, the cluster has {there}: omit it (--max-gpus {there}) or enlarge the cluster"
    )]
    TooLarge {
        /// Place in the trace, from 0.
        index: usize,
        /// GPUs asked for.
        gpus: u32,
        /// GPUs there are.
        there: u32,
    },
    /// The scheduler said something impossible.
    #[error("the scheduler is wrong at {at_s} s: {refused}")]
    Refused {
        /// When.
        at_s: f64,
        /// What.
        refused: Refused,
    },
    /// Jobs wait, nothing runs, and nothing will change.
    #[error(
        "at {at_s} s {waiting} jobs wait for GPUs that they will never get (job {job} asks for {gpus}): the placer cannot place them on this cluster"
    )]
    Stuck {
        /// When.
        at_s: f64,
        /// How many.
        waiting: usize,
        /// One of them.
        job: u32,
        /// What it asks for.
        gpus: u32,
    },
    /// A job asks for a part of a GPU, and nobody gives such.
    #[error(
        "job {index} of the trace asks for a part of a GPU, and this scheduler gives none: {why}; choose another, or leave out the column `share`"
    )]
    NoParts {
        /// Place in the trace, from 0.
        index: usize,
        /// Why not.
        why: &'static str,
    },
    /// A parameter makes no sense.
    #[error("{what} is {value}: {expected}")]
    Parameter {
        /// Which.
        what: &'static str,
        /// Its value.
        value: f64,
        /// What is expected.
        expected: &'static str,
    },
}

#[derive(Clone, Copy, PartialEq, Debug)]
struct At(f64);

impl Eq for At {}

impl Ord for At {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for At {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Something that will happen unless the job's epoch has moved on by then.
type Due = Reverse<(At, JobId, u32)>;

/// One run.
#[derive(Debug)]
pub struct Simulation<'a> {
    trace: &'a Trace,
    config: Config,
    state: ClusterState,
    scheduler: Scheduler,
    pairs: Option<Arc<PairTable>>,
    random: Random,
    /// True work of each job; the state has what policies take for it.
    work: Vec<f64>,
    epochs: Vec<u32>,
    /// What trains, of jobs of which that is known.
    sessions: Vec<Option<Session>>,
    ends: BinaryHeap<Due>,
    measures: BinaryHeap<Due>,
    fragmented: BTreeSet<JobId>,
    decided_s: f64,
    next_arrival: usize,
    /// Jobs that are over.
    ended: usize,
    outcome: Outcome,
}

impl<'a> Simulation<'a> {
    /// Of a trace on a cluster.
    ///
    /// # Errors
    /// [`SimError`] where a job can never fit, or a parameter makes no sense.
    pub fn new(
        trace: &'a Trace,
        mut state: ClusterState,
        scheduler: Scheduler,
        config: Config,
    ) -> Result<Self, SimError> {
        for (what, value, least) in [
            ("the round", config.round_s.unwrap_or(1.0), 1e-3),
            ("the restart cost", config.restart_s, 0.0),
            ("the start cost", config.start_s, 0.0),
            ("the noise", config.noise, 0.0),
        ] {
            if !(value.is_finite() && value >= least) {
                let expected =
                    "a finite number above 0 (0 means none for cost and noise) is expected";
                return Err(SimError::Parameter {
                    what,
                    value,
                    expected,
                });
            }
        }
        let there = state.gpus();
        for (index, job) in trace.jobs.iter().enumerate() {
            if job.gpus > there {
                let gpus = job.gpus;
                return Err(SimError::TooLarge { index, gpus, there });
            }
        }
        let asks = trace.jobs.iter().position(|job| job.part.is_some());
        if let (Some(index), Some(why)) = (asks, scheduler.gives_no_parts()) {
            return Err(SimError::NoParts { index, why });
        }
        // Of parts as many as add up to a GPU.
        let most = asks.map_or(scheduler.most_jobs(), |_| MOST_JOBS_ON_GPU);
        state.set_most_on_gpu(most);
        (state.restart_s, state.start_s) = (config.restart_s, config.start_s);
        let random = Random::new(config.seed ^ 0x6e6f_6973);
        let outcome = Outcome {
            gpus: there,
            ..Outcome::default()
        };
        Ok(Self {
            trace,
            config,
            state,
            scheduler,
            pairs: trace.pairs.clone(),
            random,
            work: Vec::with_capacity(trace.jobs.len()),
            epochs: Vec::with_capacity(trace.jobs.len()),
            sessions: Vec::new(),
            ends: BinaryHeap::new(),
            measures: BinaryHeap::new(),
            fragmented: BTreeSet::new(),
            decided_s: 0.0,
            next_arrival: 0,
            ended: 0,
            outcome,
        })
    }

    /// Runs until every job is over. `progress` gets the number of jobs that are over, from time to
    /// time.
    ///
    /// # Errors
    /// [`SimError`].
    pub fn run(mut self, mut progress: impl FnMut(usize)) -> Result<Outcome, SimError> {
        let mut changed = false;
        while self.next_arrival < self.trace.jobs.len()
            || !self.state.running().is_empty()
            || !self.state.waiting().is_empty()
        {
            let Some(until_s) = self.next_decision(changed) else {
                return Err(self.stuck());
            };
            changed = self.happen(until_s);
            if changed || !self.scheduler.only_on_events() {
                changed = self.decide()?;
            }
            if self.outcome.decisions.is_multiple_of(1024) {
                progress(self.ended);
            }
        }
        let first = self
            .outcome
            .fates
            .first()
            .map_or(0.0, |fate| fate.arrival_s);
        let ends = self.outcome.fates.iter().filter_map(|fate| fate.end_s);
        self.outcome.makespan_s = ends.fold(first, f64::max) - first;
        Ok(self.outcome)
    }

    fn stuck(&self) -> SimError {
        let first = self.state.waiting().first();
        let gpus = first.map_or(0, |id| self.state.job(*id).gpus);
        SimError::Stuck {
            at_s: self.state.now_s(),
            waiting: self.state.waiting().len(),
            job: first.map_or(0, |id| id.0),
            gpus,
        }
    }

    /// When the scheduler is asked next. `None` where nothing will ever happen again.
    fn next_decision(&mut self, changed: bool) -> Option<f64> {
        while let Some(Reverse((_, id, epoch))) = self.ends.peek() {
            if self.epochs[id.0 as usize] == *epoch {
                break;
            }
            self.ends.pop();
        }
        let arrival = self
            .trace
            .jobs
            .get(self.next_arrival)
            .map(|job| job.arrival_s);
        let end = self.ends.peek().map(|due| due.0.0.0);
        let measure = self.measures.peek().map(|due| due.0.0.0);
        let again = self.scheduler.asks_again_s();
        let again = again.map(|at_s| at_s.max(self.state.now_s()));
        let event = [arrival, end, measure, again]
            .into_iter()
            .flatten()
            .min_by(f64::total_cmp);
        let Some(round_s) = self.config.round_s else {
            return event;
        };
        let after = |at_s: f64| (at_s / round_s).ceil() * round_s;
        let idle = self.state.running().is_empty() && self.state.waiting().is_empty();
        let quiet = !changed && self.scheduler.only_on_events();
        let next = after(self.state.now_s() + round_s * 1e-9);
        if idle || quiet {
            let event = event?;
            return Some(after(event).max(event));
        }
        // A round in which nothing can change any more is not waited for.
        (event.is_some() || changed || !self.state.running().is_empty()).then_some(next)
    }

    /// Let everything up to a time happen. Whether anything did.
    fn happen(&mut self, until_s: f64) -> bool {
        let mut any = false;
        loop {
            let arrival = self
                .trace
                .jobs
                .get(self.next_arrival)
                .map_or(f64::INFINITY, |job| job.arrival_s);
            let end = self.ends.peek().map_or(f64::INFINITY, |due| due.0.0.0);
            let measure = self.measures.peek().map_or(f64::INFINITY, |due| due.0.0.0);
            let first = arrival.min(end).min(measure);
            if first > until_s || first == f64::INFINITY {
                break;
            }
            self.advance(first);
            if end <= first {
                any |= self.end();
            } else if arrival <= first {
                self.arrive();
                any = true;
            } else {
                any |= self.measure();
            }
        }
        self.advance(until_s);
        any
    }

    fn advance(&mut self, to_s: f64) {
        let held = self.state.gpus() - self.state.free().total();
        self.outcome.held_gpu_s += f64::from(held) * (to_s - self.state.now_s()).max(0.0);
        self.state.advance(to_s);
    }

    fn arrive(&mut self) {
        let mut job = self.trace.jobs[self.next_arrival].clone();
        self.next_arrival += 1;
        self.work.push(job.work);
        self.epochs.push(0);
        if self.config.noise > 0.0 {
            job.work *= (self.config.noise * self.random.normal()).exp();
        }
        self.outcome.fates.push(Fate {
            arrival_s: job.arrival_s,
            end_s: None,
            solo_s: self.trace.jobs[self.next_arrival - 1].duration_s(),
            gpus: job.gpus,
            fragmented_s: 0.0,
            waited_s: 0.0,
            rho: 0.0,
            deadline_s: job.deadline_s,
            service_gpu_s: 0.0,
            best_effort: job.deadline_s.is_none(),
        });
        let training = self.trace.training.get(&job.profile.kind);
        self.sessions.push(training.map(|training| {
            let (gpus, per_node) = (self.state.gpus(), self.per_node());
            Session::new(training, self.scheduler.tunes_batches(), gpus, per_node)
        }));
        let id = self.state.arrive(job);
        self.scheduler.note(id);
    }

    fn end(&mut self) -> bool {
        let Some(Reverse((At(now_s), id, epoch))) = self.ends.pop() else {
            return false;
        };
        if self.epochs[id.0 as usize] != epoch {
            return false;
        }
        if self.ends_epoch(id) {
            return false;
        }
        let others: Vec<JobId> = self.state.others(id).collect();
        let neighbours = self.neighbours(&[id].into());
        self.state.finish(id);
        self.scheduler.note(id);
        self.epochs[id.0 as usize] += 1;
        let job = self.state.job(id);
        let fate = &mut self.outcome.fates[id.0 as usize];
        fate.end_s = Some(now_s);
        self.ended += 1;
        fate.service_gpu_s = job.service_gpu_s(now_s);
        fate.waited_s = (now_s - fate.arrival_s - job.held_s(now_s)).max(0.0);
        let fair_s = fate.solo_s.max(1e-9) * self.state.contention(job);
        fate.rho = (now_s - fate.arrival_s) / fair_s;
        for other in others {
            self.scheduler.note(other);
            self.pace(other);
        }
        for other in neighbours.into_iter().filter(|other| *other != id) {
            self.pace(other);
        }
        true
    }

    /// Jobs on the same GPUs have run for their window: tell the packer.
    fn measure(&mut self) -> bool {
        let Some(Reverse((_, joiner, epoch))) = self.measures.pop() else {
            return false;
        };
        if self.epochs[joiner.0 as usize] != epoch {
            return false;
        }
        // Parts of a GPU are enforced: what their jobs get says nothing of pairs.
        if self.state.job(joiner).part.is_some() {
            return false;
        }
        let Some(host) = self.state.partner(joiner) else {
            return false;
        };
        if self.state.others(joiner).count() > 1 {
            return self.measure_several(joiner);
        }
        let noise = self.config.noise;
        let mut measured = [host, joiner].map(|id| self.relative(id));
        for speed in &mut measured {
            *speed *= (noise * self.random.normal()).exp();
        }
        let verdict = self.scheduler.observe(&self.state, host, joiner, measured);
        verdict != Verdict::Keep
    }

    /// What several are measured at together says nothing of any two of them. The window is that of
    /// the one that came last.
    fn measure_several(&mut self, joiner: JobId) -> bool {
        let group: Vec<JobId> = self.state.group(joiner).collect();
        if group.last() != Some(&joiner) {
            return false;
        }
        let noise = self.config.noise;
        let mut measured: Vec<f64> = group.iter().map(|id| self.relative(*id)).collect();
        for speed in &mut measured {
            *speed *= (noise * self.random.normal()).exp();
        }
        let verdict = self
            .scheduler
            .observe_several(&self.state, &group, &measured);
        verdict != Verdict::Keep
    }

    /// Speed relative to being alone on the same GPUs.
    fn relative(&self, id: JobId) -> f64 {
        if self.state.partner(id).is_none() {
            return 1.0;
        }
        let (job, kind) = (self.state.job(id), self.kind(id));
        let mut busy = job.profile.busy;
        // Without a measurement: all slow down by what they ask for beyond one device.
        let speeds = self.state.others(id).map(|other| {
            let other = &self.state.job(other).profile;
            busy += other.busy;
            let pairs = self.pairs.as_ref()?;
            let pair = pairs.pair(job.profile.kind, other.kind, kind, job.gpus);
            pair.map(|[speed, _]| speed)
        });
        let speeds: Vec<Option<f64>> = speeds.collect();
        let beside = beside_others(speeds, busy);
        match &job.part {
            None => beside,
            // What it was promised it gets, whatever the others do.
            Some(part) => beside.max((part.share / job.profile.busy.max(part.share)).min(1.0)),
        }
    }

    fn kind(&self, id: JobId) -> GpuType {
        let run = self.state.job(id).run();
        let slowest = run.and_then(|run| run.gpus.iter().map(|gpu| self.state.type_of(*gpu)).max());
        slowest.unwrap_or(GpuType(0))
    }

    /// Set how fast a job runs from now on, and when it will end.
    fn pace(&mut self, id: JobId) {
        let now_s = self.state.now_s();
        let job = self.state.job(id);
        let Some(run) = job.run() else { return };
        let base = match self.sessions[id.0 as usize].as_mut() {
            Some(session) => {
                let placement = self.state.placement(run);
                session.settle(&placement);
                session.rate(&placement)
            }
            None => job.rate_on(run.gpus.len() as u32, self.kind(id)),
        };
        let host = self
            .config
            .host
            .map_or(1.0, |how| host::speed(&self.state, id, how));
        let rate = base * self.relative(id) * host;
        self.state.set_rate(id, rate);
        let job = self.state.job(id);
        let epoch = &mut self.epochs[id.0 as usize];
        *epoch += 1;
        // A job that trains has another speed in its next epoch.
        let session = self.sessions[id.0 as usize].as_ref();
        let until = session.map_or(self.work[id.0 as usize], Session::boundary);
        let left = until - job.done(now_s);
        if let Some(run) = job.run()
            && rate > 0.0
        {
            let end_s = run.warm_s + left.max(0.0) / rate;
            self.ends.push(Reverse((At(end_s), id, *epoch)));
        }
        if job.run().is_some_and(|run| run.beside.is_some()) && self.state.partner(id).is_some() {
            let window_s = self.config.pair_window_s.unwrap_or(Trial::window_s(0.0));
            self.measures
                .push(Reverse((At(now_s + window_s), id, *epoch)));
        }
    }

    /// Ask the scheduler and do what it says. Whether it said anything.
    fn decide(&mut self) -> Result<bool, SimError> {
        let now_s = self.state.now_s();
        self.tell();
        let batch = self.scheduler.decide(&self.state);
        self.outcome.decisions += 1;
        let since_s = std::mem::replace(&mut self.decided_s, now_s);
        for id in std::mem::take(&mut self.fragmented) {
            self.outcome.fates[id.0 as usize].fragmented_s += now_s - since_s;
        }
        self.fragmented.extend(
            self.scheduler
                .waits()
                .fragmented
                .iter()
                .filter(|id| self.state.job(**id).waits()),
        );
        // Jobs that run at another speed afterwards: those with a decision, and those beside them
        // before and after it.
        let mut touched: BTreeSet<JobId> = batch.iter().map(Decision::job).collect();
        let others: Vec<JobId> = touched
            .iter()
            .flat_map(|id| self.state.others(*id))
            .collect();
        touched.extend(others);
        touched.extend(self.neighbours(&touched));
        self.state
            .apply(&batch)
            .map_err(|refused| SimError::Refused {
                at_s: now_s,
                refused,
            })?;
        let others: Vec<JobId> = touched
            .iter()
            .flat_map(|id| self.state.others(*id))
            .collect();
        touched.extend(others);
        touched.extend(self.neighbours(&touched));
        for decision in &batch {
            self.count(decision);
            for gpu in decision.gpus() {
                // CAST: at most 64.
                let on_it = self.state.residents(*gpu).count() as u32;
                self.outcome.most_on_gpu = self.outcome.most_on_gpu.max(on_it);
            }
        }
        if self.scheduler.tunes_batches() {
            let tunes = |id: &&JobId| {
                let session = self.sessions[id.0 as usize].as_ref();
                session.is_some_and(Session::tunes)
            };
            touched.extend(self.state.running().iter().filter(tunes));
        }
        for id in touched {
            self.epochs[id.0 as usize] += 1;
            self.pace(id);
        }
        Ok(!batch.is_empty())
    }

    /// Jobs on the nodes of these, where what they have of a node depends on who else is there.
    fn neighbours(&self, of: &BTreeSet<JobId>) -> BTreeSet<JobId> {
        if self.config.host.is_none() {
            return BTreeSet::new();
        }
        let runs = of.iter().filter_map(|id| self.state.job(*id).run());
        let nodes: BTreeSet<NodeId> = runs
            .flat_map(|run| &run.gpus)
            .map(|gpu| self.state.node_of(*gpu))
            .collect();
        let gpus = nodes.into_iter().flat_map(|node| {
            let node = &self.state.nodes()[node.0 as usize];
            (node.first.0..node.first.0 + node.gpus).map(GpuId)
        });
        gpus.flat_map(|gpu| self.state.residents(gpu)).collect()
    }

    fn count(&mut self, decision: &Decision) {
        let outcome = &mut self.outcome;
        match decision {
            Decision::Place { job, .. } | Decision::Resume { job, .. } => {
                outcome.resumes += u64::from(matches!(decision, Decision::Resume { .. }));
                let run = self.state.job(*job).run();
                outcome.packs += u64::from(run.is_some_and(|run| run.beside.is_some()));
            }
            Decision::Suspend { .. } => outcome.preemptions += 1,
            Decision::Migrate { .. } => outcome.migrations += 1,
            Decision::Unpack { .. } => outcome.unpacks += 1,
            Decision::Resize { .. } => outcome.resizes += 1,
            Decision::Reject { .. } | Decision::Reshare { .. } => {}
        }
    }
}
