//! Asks the slots and says what to do.
//!
//! One decision is a walk: candidates in the order's sequence take GPUs as gangs until none are
//! left. Candidates are kept in one sorted set for each gang size, so that a size that does not fit
//! is left out of the rest of the walk at once, and a walk costs the number of jobs that run, not
//! of those that wait. Only keys that may have changed ([`Drift`]) are asked for again. If there is
//! a packer and jobs ask for more GPUs than exist, the jobs that got none are then offered to it,
//! in the same sequence, as joiners of jobs with as many GPUs.

mod bound;
mod held;
mod packing;
mod parts;
mod resizing;
#[cfg(test)]
mod tests;
mod turns;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::admission::Promises;
use super::{
    Admission, Admit, ClusterState, Decision, Drift, FreeGpus, GpuId, GpuType, Job, JobId, Key,
    NodeId, Order, Packer, PairTable, Placer, Policies, Profile, Random, Reason, RoundAllocator,
    Sizer, UserId, Verdict,
};
use held::Held;
pub use held::keep_where_nobody_comes;

/// Why jobs wait, as of the last decision.
#[derive(Clone, Debug, Default)]
pub struct Waits {
    /// Jobs that enough GPUs were free for, but not where the placer wants them, or not where their
    /// memory fits. All others wait for their turn.
    pub fragmented: Vec<JobId>,
}

/// The policies of a cluster, and what has to be remembered between decisions.
pub struct Scheduler {
    order: Box<dyn Order>,
    placer: Box<dyn Placer>,
    packer: Option<Box<dyn Packer>>,
    admission: Option<Box<dyn Admission>>,
    sizer: Option<Box<dyn Sizer>>,
    round_allocator: Option<Box<dyn RoundAllocator>>,
    random: Random,
    /// Candidates by gang size and key.
    queues: BTreeMap<u32, BTreeSet<(Key, JobId)>>,
    /// The key under which a job is in `queues`.
    keys: Vec<Option<Key>>,
    noted: Vec<JobId>,
    promises: Promises,
    waits: Waits,
    /// Every key has to be asked for again.
    keys_are_old: bool,
}

/// What has become known since a scheduler was made.
#[derive(Clone, Debug, Default)]
pub struct Learnt {
    /// GPU-seconds of past jobs; `None`: as before.
    pub past_gpu_s: Option<Vec<f64>>,
    /// Speeds of jobs by type of GPU, or those of pairs, are others.
    pub speeds: bool,
    /// All pairs that are known then.
    pub pairs: Option<Arc<PairTable>>,
}

impl std::fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Scheduler({} by {})",
            self.order.name(),
            self.placer.name()
        )
    }
}

impl Scheduler {
    /// Of an order and a placer.
    #[must_use]
    pub fn new(order: Box<dyn Order>, placer: Box<dyn Placer>, seed: u64) -> Self {
        Self::of(Policies::new(order, placer), seed)
    }

    /// Of these policies.
    #[must_use]
    pub fn of(policies: Policies, seed: u64) -> Self {
        let Policies {
            order,
            placer,
            packer,
            admission,
            sizer,
            round_allocator,
        } = policies;
        Self {
            order,
            placer,
            packer,
            admission,
            sizer,
            round_allocator,
            random: Random::new(seed),
            queues: BTreeMap::new(),
            keys: Vec::new(),
            noted: Vec::new(),
            promises: Promises::default(),
            waits: Waits::default(),
            keys_are_old: false,
        }
    }

    /// Reports that a job came, ended, started or stopped. Decisions of this scheduler that were
    /// applied need no report.
    pub fn note(&mut self, job: JobId) {
        self.noted.push(job);
    }

    /// What a job was promised.
    #[must_use]
    pub fn promise(&self, job: JobId) -> Admit {
        self.promises.of(job)
    }

    /// Why jobs wait, as of the last decision.
    #[must_use]
    pub fn waits(&self) -> &Waits {
        &self.waits
    }

    /// It decides anew only when a job comes, ends or is measured: time alone changes nothing.
    #[must_use]
    pub fn only_on_events(&self) -> bool {
        let whole = self.sizer.is_some() || self.round_allocator.is_some();
        let orders = !whole && self.packer.is_none() && !self.order.preemptive();
        orders && self.order.drift() == Drift::Never && self.admission.is_none()
    }

    /// When a job that waits may start although nothing happened since the last decision.
    #[must_use]
    pub fn asks_again_s(&self) -> Option<f64> {
        self.admission.as_ref()?.asks_again_s()
    }

    /// Goes on with what another of the same policies has learnt of users, whose numbers are now
    /// those that `number` says.
    pub fn inherit(&mut self, old: &mut Self, number: &mut dyn FnMut(UserId) -> UserId) {
        let history = old
            .admission
            .as_mut()
            .and_then(|admission| admission.history());
        if let (Some(mut history), Some(admission)) = (history, &mut self.admission) {
            history.renumber(number);
            admission.remember(history);
        }
    }

    /// A sizer says who gets how many GPUs.
    #[must_use]
    pub fn sizes(&self) -> bool {
        self.sizer.is_some()
    }

    /// The sizer counts on jobs that choose their batch size by the GPUs they have.
    #[must_use]
    pub fn tunes_batches(&self) -> bool {
        self.sizer
            .as_ref()
            .is_some_and(|sizer| sizer.tunes_batches())
    }

    /// Reports the measured speeds of a pair, host first, each relative to its solo speed. The
    /// answer takes effect with the next decision.
    pub fn observe(
        &mut self,
        state: &ClusterState,
        host: JobId,
        joiner: JobId,
        measured: [f64; 2],
    ) -> Verdict {
        let Some(packer) = &mut self.packer else {
            return Verdict::Keep;
        };
        let kind = gpu_type(state, host);
        let (host, joiner) = (&state.job(host).profile, &state.job(joiner).profile);
        packer.observe(host, joiner, kind, measured)
    }

    /// Jobs that a packer puts on a GPU at most; 1 without one.
    #[must_use]
    pub fn most_jobs(&self) -> u32 {
        self.packer.as_ref().map_or(1, |packer| packer.most_jobs())
    }

    /// Why this scheduler has no use for a part of a GPU; `None`: it gives such.
    #[must_use]
    pub fn gives_no_parts(&self) -> Option<&'static str> {
        if self.sizer.is_some() {
            return Some("its sizer divides whole GPUs");
        }
        if self.round_allocator.is_some() {
            return Some("its round allocator gives turns on whole GPUs");
        }
        let binds = self.admission.as_ref().is_some_and(|one| one.places());
        binds.then_some("its admission binds jobs to whole GPUs")
    }

    /// Reports what a group of three or more was measured at, the one that came first first, each
    /// relative to its solo speed. The answer takes effect with the next decision.
    pub fn observe_several(
        &mut self,
        state: &ClusterState,
        group: &[JobId],
        measured: &[f64],
    ) -> Verdict {
        let (Some(packer), Some(first)) = (&mut self.packer, group.first()) else {
            return Verdict::Keep;
        };
        let kind = gpu_type(state, *first);
        packer.observe_several(&profiles(state, group), kind, measured)
    }

    /// What follows from such a measurement, of which nothing is remembered.
    #[must_use]
    pub fn judge_several(
        &self,
        state: &ClusterState,
        group: &[JobId],
        measured: &[f64],
    ) -> Option<Reason> {
        let kind = gpu_type(state, *group.first()?);
        self.judge_profiles(&profiles(state, group), kind, measured)
    }

    /// The same of jobs of which no more than this is known.
    #[must_use]
    pub fn judge_profiles(
        &self,
        all: &[&Profile],
        kind: GpuType,
        measured: &[f64],
    ) -> Option<Reason> {
        self.packer.as_ref()?.judge_several(all, kind, measured)
    }

    /// Takes note of such a measurement that was made before this scheduler was.
    pub fn remember_several(&mut self, all: &[&Profile], kind: GpuType, measured: &[f64]) {
        if let Some(packer) = &mut self.packer {
            packer.observe_several(all, kind, measured);
        }
    }

    /// More is known than when this scheduler was made: GPU times of past jobs, speeds of jobs by
    /// type of GPU (which the state has) and of pairs.
    pub fn learn(&mut self, learnt: &Learnt) {
        if let Some(past_gpu_s) = &learnt.past_gpu_s {
            self.order.learn(past_gpu_s);
        }
        if let (true, Some(round_allocator)) = (learnt.speeds, &mut self.round_allocator) {
            round_allocator.learn(learnt.pairs.as_ref());
        }
        self.keys_are_old |= learnt.past_gpu_s.is_some();
    }

    /// What to do now. The caller applies the whole batch or reports the outcome by [`Self::note`].
    pub fn decide(&mut self, state: &ClusterState) -> Vec<Decision> {
        let mut batch = Vec::new();
        self.waits.fragmented.clear();
        let noted = std::mem::take(&mut self.noted);
        self.admit(state, &noted, &mut batch);
        let held = Held::of(state, &*self.placer);
        if self.round_allocator.is_some() {
            self.take_turns(state, &held, &mut batch);
            self.go_on(state, &held, &mut batch);
            return batch;
        }
        if self.sizer.is_some() {
            self.resize(state, &held, &mut batch);
            self.go_on(state, &held, &mut batch);
            return batch;
        }
        self.order.refresh(state);
        if let Some(admission) = &mut self.admission {
            admission.refresh(state, &self.promises);
        }
        self.rekey(state, noted);
        if self.packer.is_some() || state.joiners() > 0 || state.parts() > 0 {
            self.pack(state, &held, &mut batch);
        } else if self.order.preemptive() {
            if self
                .admission
                .as_ref()
                .is_some_and(|admission| admission.places())
            {
                self.preempt_bound(state, &held, &mut batch);
                self.go_on(state, &held, &mut batch);
            } else if held.is_empty() {
                self.preempt(state, &mut batch);
            } else {
                self.preempt_held(state, &held, &mut batch);
            }
        } else {
            self.fill(state, &held, state.free().clone(), &mut batch);
        }
        // These jobs will have another state by the next decision.
        self.noted.extend(batch.iter().map(Decision::job));
        batch
    }

    fn admit(&mut self, state: &ClusterState, noted: &[JobId], batch: &mut Vec<Decision>) {
        let Some(admission) = &mut self.admission else {
            return;
        };
        for id in noted {
            let job = state.job(*id);
            if job.waits() && self.promises.known(*id).is_none() {
                let admit = admission.admit(state, &self.promises, job);
                self.promises.set(*id, admit);
                if admit == Admit::Reject {
                    batch.push(Decision::Reject { job: *id });
                }
            }
        }
    }

    /// The key a job should have in the queues; `None` for one that is no candidate.
    fn key(&self, state: &ClusterState, job: &Job) -> Option<Key> {
        let candidate = match job.run() {
            Some(run) => self.order.preemptive() || run.beside.is_some(),
            None => job.waits() && !self.promises.refused(job.id),
        };
        let held = (self.admission.as_ref()).is_some_and(|admission| admission.holds(job));
        let rank = self
            .admission
            .as_ref()
            .map_or(0, |admission| admission.rank(state, &self.promises, job));
        // Jobs that run already, as joiners, go on before others start.
        let waits = u32::from(!self.order.preemptive() && job.waits());
        (candidate && !held).then(|| self.order.key(state, job).behind(2 * rank + waits))
    }

    fn rekey(&mut self, state: &ClusterState, noted: Vec<JobId>) {
        for id in noted {
            self.requeue(state, id);
        }
        let keys_are_old = std::mem::take(&mut self.keys_are_old);
        let ranks_drift = self
            .admission
            .as_ref()
            .is_some_and(|admission| admission.ranks_drift());
        match self.order.drift() {
            Drift::Always => self.requeue_all(state),
            _ if ranks_drift || keys_are_old => self.requeue_all(state),
            Drift::Running if self.order.preemptive() => {
                for id in state.running() {
                    self.requeue(state, *id);
                }
            }
            Drift::Running | Drift::Never => {}
        }
    }

    fn requeue_all(&mut self, state: &ClusterState) {
        for id in state.waiting().iter().chain(state.running()) {
            self.requeue(state, *id);
        }
    }

    fn requeue(&mut self, state: &ClusterState, id: JobId) {
        let job = state.job(id);
        let new = self.key(state, job);
        let at = id.0 as usize;
        if self.keys.len() <= at {
            self.keys.resize(at + 1, None);
        }
        let old = std::mem::replace(&mut self.keys[at], new);
        if old == new {
            return;
        }
        let queue = self.queues.entry(job.gpus).or_default();
        if let Some(old) = old {
            queue.remove(&(old, id));
        }
        if let Some(new) = new {
            queue.insert((new, id));
        } else if queue.is_empty() {
            self.queues.remove(&job.gpus);
        }
    }

    /// Starts waiting jobs on free GPUs, in order. Running jobs go on.
    fn fill(
        &mut self,
        state: &ClusterState,
        held: &Held,
        mut free: FreeGpus,
        batch: &mut Vec<Decision>,
    ) {
        let (placer, skips) = (&self.placer, self.order.skips());
        let fragmented = &mut self.waits.fragmented;
        walk(&self.queues, |id, gpus| {
            let job = state.job(id);
            if !job.waits() {
                return Step::Next;
            }
            if gpus <= free.total() {
                if let Some(taken) = held.place(&**placer, state, &mut free, (job, gpus)) {
                    batch.push(start(job, taken, 1.0));
                    return if free.total() > 0 {
                        Step::Next
                    } else {
                        Step::Stop
                    };
                }
                fragmented.push(id);
                if held.keeps_out(state, &free, id) || placer.keeps_out(state, job) {
                    // They may do for others, and those who hold the memory are behind it.
                    return Step::Next;
                }
            }
            if skips { Step::Omit } else { Step::Stop }
        });
    }

    /// Choose anew who runs; stop the others, then place.
    fn preempt(&mut self, state: &ClusterState, batch: &mut Vec<Decision>) {
        let skips = self.order.skips();
        let mut left = state.gpus();
        let mut chosen: Vec<JobId> = Vec::new();
        walk(&self.queues, |id, gpus| {
            if gpus <= left {
                left -= gpus;
                chosen.push(id);
                return if left > 0 { Step::Next } else { Step::Stop };
            }
            if skips { Step::Omit } else { Step::Stop }
        });
        let starting: Vec<JobId> = chosen
            .iter()
            .copied()
            .filter(|id| state.job(*id).waits())
            .collect();
        let mut free = state.free().clone();
        if chosen.len() - starting.len() < state.running().len() {
            let chosen: BTreeSet<JobId> = chosen.into_iter().collect();
            for id in state.running() {
                if !chosen.contains(id) {
                    batch.push(Decision::Suspend { job: *id });
                    let gpus = state.job(*id).run().map_or(&[][..], |run| &run.gpus);
                    gpus.iter().for_each(|gpu| {
                        free.give(*gpu);
                    });
                }
            }
        }
        let mut failed = false;
        for id in starting {
            let job = state.job(id);
            match self.placer.place(state, &mut free, job, job.gpus) {
                Some(taken) => batch.push(start(job, taken, 1.0)),
                None => {
                    self.waits.fragmented.push(id);
                    failed = true;
                }
            }
        }
        if failed && free.total() > 0 {
            // What those could not use may do for others.
            let mut decided: BTreeSet<JobId> = batch.iter().map(Decision::job).collect();
            decided.extend(&self.waits.fragmented);
            let placer = &self.placer;
            walk(&self.queues, |id, gpus| {
                let job = state.job(id);
                if !job.waits() || decided.contains(&id) {
                    return Step::Next;
                }
                match placer.place(state, &mut free, job, gpus) {
                    Some(taken) => batch.push(start(job, taken, 1.0)),
                    None if placer.keeps_out(state, job) => return Step::Next,
                    None => return Step::Omit,
                }
                if free.total() > 0 {
                    Step::Next
                } else {
                    Step::Stop
                }
            });
        }
    }
}

/// What follows after a candidate.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Next,
    /// No more of this gang size.
    Omit,
    Stop,
}

/// All candidates in order, over the queues of all gang sizes.
fn walk(queues: &BTreeMap<u32, BTreeSet<(Key, JobId)>>, mut visit: impl FnMut(JobId, u32) -> Step) {
    let mut heads: Vec<_> = queues
        .iter()
        .filter_map(|(gpus, queue)| {
            let mut rest = queue.iter();
            rest.next().map(|head| (*head, *gpus, rest))
        })
        .collect();
    while let Some(first) = (0..heads.len()).min_by(|a, b| heads[*a].0.cmp(&heads[*b].0)) {
        let ((_, id), gpus, rest) = &mut heads[first];
        match visit(*id, *gpus) {
            Step::Stop => return,
            Step::Omit => {
                drop(heads.swap_remove(first));
            }
            Step::Next => match rest.next() {
                Some(next) => heads[first].0 = *next,
                None => {
                    drop(heads.swap_remove(first));
                }
            },
        }
    }
}

/// Begin, or go on.
fn start(job: &Job, gpus: Vec<GpuId>, share: f64) -> Decision {
    let (id, class) = (job.id, job.profile.class);
    if job.starts == 0 {
        Decision::Place {
            job: id,
            gpus,
            class,
            share,
            mem_bytes: None,
        }
    } else {
        Decision::Resume {
            job: id,
            gpus,
            class,
            share,
        }
    }
}

fn profiles<'a>(state: &'a ClusterState, group: &[JobId]) -> Vec<&'a Profile> {
    group.iter().map(|id| &state.job(*id).profile).collect()
}

/// The type of the GPUs that a running job holds.
fn gpu_type(state: &ClusterState, id: JobId) -> GpuType {
    let first = state
        .job(id)
        .run()
        .and_then(|run| run.gpus.first().copied());
    first.map_or(GpuType(0), |gpu| state.type_of(gpu))
}
