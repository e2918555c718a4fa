//! Every policy, and every combination of policies, that a live hook accepts acts; all others are
//! refused before anything starts, with the reason.
//!
//! Each accepted combination schedules jobs of a live cluster in virtual time: nothing is known of
//! a job but what its owner said, until it runs and is metered. Counters around the policies show
//! that each of them was asked and that its answers had an effect.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cluster::live::adapt::{self, Known, LEAST_PAST_JOBS};
use cluster::live::facts::Shared;
use policy::PolicyError;
use policy::cluster::admission::Promises;
use policy::cluster::catalogue::{self, Slot};
use policy::cluster::{
    Admission, Admit, Choice, Class, ClusterState, Decision, Drift, FreeGpus, GpuId, GpuType, Job,
    JobId, JobType, Key, Order, PackScore, Packer, PairTable, Past, Placer, Policies, Profile,
    Reason, RoundAllocator, Sizer, Speed, Tags, Turn, UserId, Verdict,
};

/// What the policies of one run did.
#[derive(Debug, Default)]
struct Seen {
    keys: AtomicUsize,
    placed: AtomicUsize,
    scores: AtomicUsize,
    promised: AtomicUsize,
    ranked: [AtomicUsize; 2],
    bound: AtomicUsize,
    rejected: AtomicUsize,
    sized: AtomicUsize,
    turns: AtomicUsize,
}

fn count(counter: &AtomicUsize) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn any(counter: &AtomicUsize) -> bool {
    counter.load(Ordering::Relaxed) > 0
}

/// A policy whose answers are counted.
struct Counted<T: ?Sized>(Arc<Seen>, Box<T>);

impl Order for Counted<dyn Order> {
    fn name(&self) -> &'static str {
        self.1.name()
    }
    fn tags(&self) -> Tags {
        self.1.tags()
    }
    fn key(&self, state: &ClusterState, job: &Job) -> Key {
        count(&self.0.keys);
        self.1.key(state, job)
    }
    fn preemptive(&self) -> bool {
        self.1.preemptive()
    }
    fn skips(&self) -> bool {
        self.1.skips()
    }
    fn drift(&self) -> Drift {
        self.1.drift()
    }
    fn refresh(&mut self, state: &ClusterState) {
        self.1.refresh(state);
    }
    fn learn(&mut self, past_gpu_s: &[f64]) {
        self.1.learn(past_gpu_s);
    }
}

impl RoundAllocator for Counted<dyn RoundAllocator> {
    fn name(&self) -> &'static str {
        self.1.name()
    }
    fn tags(&self) -> Tags {
        self.1.tags()
    }
    fn turns(&mut self, state: &ClusterState) -> Vec<Turn> {
        let turns = self.1.turns(state);
        if !turns.is_empty() {
            count(&self.0.turns);
        }
        turns
    }
    fn learn(&mut self, pairs: Option<&Arc<PairTable>>) {
        self.1.learn(pairs);
    }
}

impl Placer for Counted<dyn Placer> {
    fn name(&self) -> &'static str {
        self.1.name()
    }
    fn tags(&self) -> Tags {
        self.1.tags()
    }
    fn place(
        &self,
        state: &ClusterState,
        free: &mut FreeGpus,
        job: &Job,
        gpus: u32,
    ) -> Option<Vec<GpuId>> {
        let found = self.1.place(state, free, job, gpus);
        if found.is_some() {
            count(&self.0.placed);
        }
        found
    }
    fn weighs_waits(&self) -> bool {
        self.1.weighs_waits()
    }
    fn regroup(&self) -> policy::cluster::placer::Regroup {
        self.1.regroup()
    }
}

impl Packer for Counted<dyn Packer> {
    fn name(&self) -> &'static str {
        self.1.name()
    }
    fn tags(&self) -> Tags {
        self.1.tags()
    }
    fn score(&self, host: &Profile, joiner: &Profile, kind: GpuType) -> Option<PackScore> {
        let score = self.1.score(host, joiner, kind);
        if score.is_some() {
            count(&self.0.scores);
        }
        score
    }
    fn observe(
        &mut self,
        host: &Profile,
        joiner: &Profile,
        kind: GpuType,
        measured: [f64; 2],
    ) -> Verdict {
        self.1.observe(host, joiner, kind, measured)
    }
    fn refused(&self, host: &Profile, joiner: &Profile, kind: GpuType) -> Option<Reason> {
        self.1.refused(host, joiner, kind)
    }
    fn keeps_pairs(&self) -> bool {
        self.1.keeps_pairs()
    }
    fn most_jobs(&self) -> u32 {
        self.1.most_jobs()
    }
    fn score_beside(
        &self,
        there: &[&Profile],
        joiner: &Profile,
        kind: GpuType,
    ) -> Option<PackScore> {
        self.1.score_beside(there, joiner, kind)
    }
    fn judge_several(&self, all: &[&Profile], kind: GpuType, measured: &[f64]) -> Option<Reason> {
        self.1.judge_several(all, kind, measured)
    }
    fn observe_several(&mut self, all: &[&Profile], kind: GpuType, measured: &[f64]) -> Verdict {
        self.1.observe_several(all, kind, measured)
    }
    fn refused_several(&self, all: &[&Profile], kind: GpuType) -> Option<Reason> {
        self.1.refused_several(all, kind)
    }
    fn refused_several_at(
        &self,
        state: &ClusterState,
        gpus: &[GpuId],
        all: &[JobId],
    ) -> Option<Reason> {
        self.1.refused_several_at(state, gpus, all)
    }
}

impl Admission for Counted<dyn Admission> {
    fn name(&self) -> &'static str {
        self.1.name()
    }
    fn tags(&self) -> Tags {
        self.1.tags()
    }
    fn admit(&mut self, state: &ClusterState, promises: &Promises, job: &Job) -> Admit {
        let admit = self.1.admit(state, promises, job);
        count(match admit {
            Admit::Reject => &self.0.rejected,
            Admit::Accept | Admit::BestEffort => &self.0.promised,
        });
        admit
    }
    fn refresh(&mut self, state: &ClusterState, promises: &Promises) {
        self.1.refresh(state, promises);
    }
    fn rank(&self, state: &ClusterState, promises: &Promises, job: &Job) -> u32 {
        let rank = self.1.rank(state, promises, job);
        count(&self.0.ranked[usize::from(rank > 0)]);
        rank
    }
    fn ranks_drift(&self) -> bool {
        self.1.ranks_drift()
    }
    fn rejects(&self) -> bool {
        self.1.rejects()
    }
    fn places(&self) -> bool {
        self.1.places()
    }
    fn evicts(&self) -> bool {
        self.1.evicts()
    }
    fn holds(&self, job: &Job) -> bool {
        self.1.holds(job)
    }
    fn asks_again_s(&self) -> Option<f64> {
        self.1.asks_again_s()
    }
    fn gpus(&self, job: JobId) -> Option<&[GpuId]> {
        let gpus = self.1.gpus(job);
        if gpus.is_some() {
            count(&self.0.bound);
        }
        gpus
    }
}

impl Sizer for Counted<dyn Sizer> {
    fn name(&self) -> &'static str {
        self.1.name()
    }
    fn tags(&self) -> Tags {
        self.1.tags()
    }
    fn resize(&mut self, state: &ClusterState, promises: &Promises) -> Vec<(JobId, u32)> {
        let sizes = self.1.resize(state, promises);
        if !sizes.is_empty() {
            count(&self.0.sized);
        }
        sizes
    }
    fn kind(&self, job: JobId) -> Option<GpuType> {
        self.1.kind(job)
    }
    fn tunes_batches(&self) -> bool {
        self.1.tunes_batches()
    }
}

fn counted(policies: Policies, seen: &Arc<Seen>) -> Policies {
    let seen = || Arc::clone(seen);
    Policies {
        order: Box::new(Counted(seen(), policies.order)),
        placer: Box::new(Counted(seen(), policies.placer)),
        packer: policies
            .packer
            .map(|packer| Box::new(Counted(seen(), packer)) as Box<dyn Packer>),
        admission: policies
            .admission
            .map(|admission| Box::new(Counted(seen(), admission)) as Box<dyn Admission>),
        sizer: policies
            .sizer
            .map(|sizer| Box::new(Counted(seen(), sizer)) as Box<dyn Sizer>),
        round_allocator: policies
            .round_allocator
            .map(|rounds| Box::new(Counted(seen(), rounds)) as Box<dyn RoundAllocator>),
    }
}

/// Jobs of both classes and three users, more than the cluster holds; some have a deadline, one a
/// deadline that cannot be kept, some can run on several numbers of GPUs.
fn jobs() -> Vec<(Job, f64)> {
    let mut jobs = Vec::new();
    for index in 0..30 {
        let gpus = [1, 2, 1, 1, 1][index % 5];
        let arrival_s = 5.0 * (index / 3) as f64;
        let length_s = 60.0 + 7.0 * (index % 5) as f64;
        let mut job = Job::rigid(JobType(index as u32 % 3), gpus, arrival_s, length_s);
        job.user = UserId(index as u32 % 3);
        job.profile = Profile::unknown(JobType(index as u32 % 3), gpus, Class::Guaranteed);
        if index % 2 == 1 {
            job.profile.class = Class::Opportunistic;
        }
        if index % 4 == 0 {
            job.most_gpus = 4;
            job.speed = Speed::Curve((1..=4).map(f64::from).collect());
        }
        job.deadline_s = match index % 4 {
            0 => Some(arrival_s + 700.0),
            3 if index == 11 => Some(arrival_s + 1.0),
            _ => None,
        };
        // What metering will show.
        jobs.push((job, 0.4));
    }
    jobs
}

/// Pairs of their kinds that a hook measured earlier.
fn past() -> Vec<Past> {
    let profile = |kind, gpus| {
        let mut profile = Profile::unknown(JobType(kind), gpus, Class::Guaranteed);
        profile.busy = 0.4;
        profile
    };
    let pairs = [(0, 1), (0, 2), (1, 2), (0, 0), (1, 1), (2, 2)];
    let sizes = [1, 2].into_iter();
    let all = sizes.flat_map(|gpus| pairs.map(|(a, b)| (profile(a, gpus), profile(b, gpus))));
    all.map(|(a, b)| (GpuType(0), a, b, [0.99, 0.99])).collect()
}

/// What a hook has measured that ran for a while.
fn known() -> Known {
    Known {
        pairs: past(),
        past_gpu_s: (1..=LEAST_PAST_JOBS).map(|at| 10.0 * at as f64).collect(),
        gpu_bytes: 16 << 30,
    }
}

/// Schedules the jobs to their ends; how many joined another.
fn run(choice: &Choice, policies: Policies) -> usize {
    let shared = Shared::default();
    let mut state = ClusterState::uniform(6, 2);
    let mut scheduler = adapt::scheduler(policies, &shared, 1);
    let mut coming = jobs().into_iter().peekable();
    let (mut joined, mut busy, mut measured) = (0, Vec::new(), Vec::new());
    // As the hook does: what was metered of a kind by itself is known of the next of it.
    let mut seen: Vec<(JobType, u32)> = Vec::new();
    for tick in 0..4000 {
        let now_s = f64::from(tick);
        state.advance(now_s);
        while coming.peek().is_some_and(|(job, _)| job.arrival_s <= now_s) {
            let (job, fraction) = coming.next().unwrap();
            scheduler.note(state.arrive(job));
            busy.push(fraction);
        }
        let running: Vec<JobId> = state.running().iter().copied().collect();
        for id in running {
            // Metered while it runs.
            state.job_mut(id).profile.busy = busy[id.0 as usize];
            let job = state.job(id);
            if state.partner(id).is_none() && !seen.contains(&(job.profile.kind, job.gpus)) {
                seen.push((job.profile.kind, job.gpus));
            }
            if state.job(id).left(now_s) <= 1e-6 {
                state.finish(id);
                scheduler.note(id);
            } else if let Some(host) = state.partner(id)
                && state
                    .job(id)
                    .run()
                    .is_some_and(|run| run.beside == Some(host))
                && !measured.contains(&(host, id))
            {
                measured.push((host, id));
                scheduler.observe(&state, host, id, [0.99, 0.99]);
                scheduler.note(id);
            }
        }
        let waiting: Vec<JobId> = state.waiting().iter().copied().collect();
        for id in waiting {
            let job = state.job_mut(id);
            if seen.contains(&(job.profile.kind, job.gpus)) {
                job.profile.busy = busy[id.0 as usize];
            }
        }
        let batch = scheduler.decide(&state);
        (state.apply(&batch)).unwrap_or_else(|error| panic!("{choice}: {error}: {batch:?}"));
        joined += batch
            .iter()
            .filter(|decision| {
                let starts = matches!(
                    decision,
                    Decision::Place { .. } | Decision::Resume { .. } | Decision::Migrate { .. }
                );
                let run = state.job(decision.job()).run();
                starts && run.is_some_and(|run| run.beside.is_some())
            })
            .count();
        let running: Vec<JobId> = state.running().iter().copied().collect();
        for id in running {
            let job = state.job(id);
            let gpus = job.run().map_or(0, |run| run.gpus.len() as u32);
            let rate = job.rate(gpus);
            state.set_rate(id, rate);
        }
        if coming.peek().is_none() && state.active().next().is_none() {
            return joined;
        }
    }
    let left: Vec<_> = state.active().map(|job| (job.id, &job.phase)).collect();
    panic!("{choice}: not done: {left:?}");
}

fn names(slot: Slot) -> Vec<&'static str> {
    let entries = catalogue::entries().into_iter();
    let of = entries.filter(|entry| entry.slot == slot);
    of.map(|entry| entry.name).collect()
}

/// Runs a combination that is accepted, and looks at what its policies did.
fn acts(choice: &Choice) -> Result<(), PolicyError> {
    let policies = choice.policies(&adapt::context(&known()))?;
    let rounds = policies.round_allocator.is_some();
    let seen = Arc::new(Seen::default());
    let joined = run(choice, counted(policies, &seen));
    assert!(any(&seen.placed), "{choice}: the placer: {seen:?}");
    if choice.sizer.is_some() {
        assert!(any(&seen.sized), "{choice}: the sizer: {seen:?}");
    } else if rounds {
        assert!(any(&seen.turns), "{choice}: the round allocator: {seen:?}");
    } else {
        assert!(any(&seen.keys), "{choice}: the order: {seen:?}");
    }
    if choice.packer.is_some() {
        let packs = any(&seen.scores) && joined > 0;
        assert!(packs, "{choice}: the packer: {joined} {seen:?}");
    }
    if choice.admission.is_some() {
        let ranks = seen.ranked.iter().all(any) && any(&seen.promised);
        let admits = any(&seen.rejected) || any(&seen.bound) || ranks;
        assert!(admits, "{choice}: the admission: {seen:?}");
    }
    Ok(())
}

/// A reason names the policy and says what is missing or what to do.
fn is_reason(error: &PolicyError, what: &str) {
    let text = error.to_string();
    let says = match error {
        PolicyError::Needs { .. } => text.contains(" needs "),
        PolicyError::NoEffect { .. } => {
            text.contains("would have no effect")
                && (text.contains("remove one of the two") || text.contains("choose one that does"))
        }
        _ => false,
    };
    assert!(says, "{what}: {text}");
}

#[test]
fn every_cluster_policy_acts_live_or_is_refused_with_its_reason() {
    let mut refused = Vec::new();
    let mut accepted = 0;
    for entry in catalogue::entries() {
        let mut choice = Choice::new("srtf", "anywhere");
        let name = Some(entry.name.to_owned());
        match entry.slot {
            Slot::Order | Slot::RoundAllocator => choice.order = name,
            Slot::Packer => choice.packer = name,
            Slot::Placer => choice.placer = entry.name.to_owned(),
            Slot::Admission => choice.admission = name,
            Slot::Sizer => (choice.order, choice.sizer) = (None, name),
        }
        match acts(&choice) {
            Ok(()) => accepted += 1,
            Err(error) => {
                is_reason(&error, entry.name);
                refused.push(entry.name);
            }
        }
    }
    refused.sort_unstable();
    // What a live hook does not measure yet.
    let known = ["pollux", "sia", "synergy"];
    assert_eq!(refused, known);
    assert_eq!(accepted + refused.len(), catalogue::entries().len());
}

#[test]
fn packers_that_go_by_measured_pairs_are_refused_where_none_was_measured() {
    for name in ["greedy", "score-tree"] {
        let mut choice = Choice::new("srtf", "anywhere");
        choice.packer = Some(name.to_owned());
        let error = match choice.policies(&adapt::context(&Known::default())) {
            Ok(_) => panic!("{name} could not act"),
            Err(error) => error,
        };
        is_reason(&error, name);
        assert!(error.to_string().contains("--packer trial"), "{error}");
    }
}

#[test]
fn the_gittins_index_is_refused_with_too_few_past_jobs() {
    let choice = Choice::new("gittins", "anywhere");
    let mut known = known();
    known.past_gpu_s.pop();
    let Err(error) = choice.policies(&adapt::context(&known)) else {
        panic!("it could not act");
    };
    is_reason(&error, "gittins");
    let said = error.to_string();
    assert!(
        said.contains(&format!("{LEAST_PAST_JOBS} of them")),
        "{said}"
    );
}

#[test]
fn every_combination_of_cluster_policies_acts_live_or_is_refused_with_its_reason() {
    let or_none = |slot| {
        let named = names(slot).into_iter().map(|name| Some(name.to_owned()));
        [None].into_iter().chain(named).collect::<Vec<_>>()
    };
    let orders = names(Slot::Order)
        .into_iter()
        .chain(names(Slot::RoundAllocator));
    let orders: Vec<_> = [None].into_iter().chain(orders.map(Some)).collect();
    let placers = names(Slot::Placer);
    let (mut accepted, mut refused) = (0, 0);
    for order in orders {
        for packer in or_none(Slot::Packer) {
            for admission in or_none(Slot::Admission) {
                for sizer in or_none(Slot::Sizer) {
                    let choice = Choice {
                        order: order.map(str::to_owned),
                        packer: packer.clone(),
                        // Placers meet all others in turn.
                        placer: placers[(accepted + refused) % placers.len()].to_owned(),
                        admission: admission.clone(),
                        sizer,
                    };
                    match acts(&choice) {
                        Ok(()) => accepted += 1,
                        Err(error) => {
                            is_reason(&error, &format!("{choice:?}"));
                            refused += 1;
                        }
                    }
                }
            }
        }
    }
    println!("now: {accepted} combinations act, {refused} are refused with a reason");
    assert!(accepted > 100 && refused > 1000, "{accepted} {refused}");
}

testbed::starts_clean!();
