//! What stopped jobs hold.
//!
//! A job that cannot be started anew stays where it is when it is stopped: its process waits, and
//! so does its memory. It comes back to those GPUs and to no other ones, and who comes there
//! meanwhile has what it leaves. [`Held`] says where that is; all ways of placing go by it. Jobs
//! that nobody binds hold nothing once they are stopped.
//!
//! [`Giving`] gives jobs whole GPUs where some of them are bound. To count GPUs is not enough
//! then: a job that counts on one where its memory does not fit would have another one stopped, and
//! come nowhere. So each has its place before the next one is looked at.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Admit, ClusterState, Decision, FreeGpus, GpuId, Job, JobId, NodeId, Placer, Scheduler, Step,
    start, walk,
};
use crate::cluster::packer::together_bytes;
use crate::cluster::{JobType, Profile};

/// Jobs that are bound to GPUs, whether they run or not.
#[derive(Clone, Debug, Default)]
pub(super) struct Held {
    bound: BTreeMap<JobId, Vec<GpuId>>,
    on: BTreeMap<GpuId, Vec<JobId>>,
    /// How much of the memory of the jobs of a GPU may be in its server's memory.
    away_bytes: BTreeMap<NodeId, u64>,
}

impl Held {
    pub(super) fn of(state: &ClusterState, placer: &dyn Placer) -> Self {
        let mut held = Self::default();
        for (id, gpus) in placer.all_bound() {
            let known = state.jobs().get(id.0 as usize);
            if known.is_none_or(Job::is_done) || gpus.iter().any(|gpu| gpu.0 >= state.gpus()) {
                continue;
            }
            for gpu in &gpus {
                held.on.entry(*gpu).or_default().push(id);
                let node = state.node_of(*gpu);
                let away = || placer.away_bytes(state, node);
                held.away_bytes.entry(node).or_insert_with(away);
            }
            held.bound.insert(id, gpus);
        }
        held
    }

    /// Nobody is bound.
    pub(super) fn is_empty(&self) -> bool {
        self.bound.is_empty()
    }

    /// Each with its GPUs.
    pub(super) fn all(&self) -> &BTreeMap<JobId, Vec<GpuId>> {
        &self.bound
    }

    fn is_bound_to(&self, id: JobId, gpu: GpuId) -> bool {
        self.bound.get(&id).is_some_and(|own| own.contains(&gpu))
    }

    /// The memory of these jobs fits on a GPU beside what all others hold there. What is there
    /// already fits.
    pub(super) fn fits(&self, state: &ClusterState, gpu: GpuId, ids: &[JobId]) -> bool {
        let on_it = self.on.get(&gpu).map_or(&[][..], Vec::as_slice);
        let others = || on_it.iter().filter(|id| !ids.contains(id));
        let by_itself = ids.len() < 2 && others().next().is_none();
        if by_itself || ids.iter().all(|id| self.is_bound_to(*id, gpu)) {
            return true;
        }
        let node = state.node_of(gpu);
        let there = state.nodes()[node.0 as usize].gpu_bytes;
        let all: Vec<Profile> = ids
            .iter()
            .chain(others())
            .map(|id| memory_of(state.job(*id)))
            .collect();
        let [needed, away] = together_bytes(all.iter());
        let most_away = self.away_bytes.get(&node).copied().unwrap_or(0);
        let at_once = needed.saturating_add(away) <= there;
        there == 0 || at_once || (needed <= there && away <= most_away)
    }

    /// On each of these.
    pub(super) fn fit_on(&self, state: &ClusterState, gpus: &[GpuId], ids: &[JobId]) -> bool {
        gpus.iter().all(|gpu| self.fits(state, *gpu, ids))
    }

    /// The free GPUs on which there is memory for a job.
    fn roomy(&self, state: &ClusterState, free: &FreeGpus, id: JobId) -> FreeGpus {
        let mut some = free.clone();
        for gpu in self.on.keys().filter(|gpu| free.contains(**gpu)) {
            if !self.fits(state, *gpu, &[id]) {
                some.take(*gpu);
            }
        }
        some
    }

    /// What a placer takes of the free GPUs on which there is memory for the job.
    pub(super) fn place(
        &self,
        placer: &dyn Placer,
        state: &ClusterState,
        free: &mut FreeGpus,
        (job, gpus): (&Job, u32),
    ) -> Option<Vec<GpuId>> {
        if self.is_empty() {
            return placer.place(state, free, job, gpus);
        }
        let taken = placer.place(state, &mut self.roomy(state, free, job.id), job, gpus)?;
        take(free, &taken);
        Some(taken)
    }

    /// Free GPUs are none for this job: it is bound to others, or its memory does not fit there.
    pub(super) fn keeps_out(&self, state: &ClusterState, free: &FreeGpus, id: JobId) -> bool {
        self.bound.contains_key(&id) || self.roomy(state, free, id).total() < free.total()
    }

    /// Bytes that all others hold on a GPU, as far as they stay there.
    pub(super) fn bytes(
        &self,
        state: &ClusterState,
        gpu: GpuId,
        but: impl Fn(JobId) -> bool,
    ) -> u64 {
        let on_it = self.on.get(&gpu).into_iter().flatten();
        let others = on_it.filter(|id| !but(**id));
        let moves = self
            .away_bytes
            .get(&state.node_of(gpu))
            .is_some_and(|most| *most > 0);
        let bytes = others.map(|id| {
            let profile = memory_of(state.job(*id));
            if moves {
                profile.fixed_and_movable_bytes()[0]
            } else {
                profile.peak_bytes()
            }
        });
        bytes.fold(0, u64::saturating_add)
    }
}

/// A job's profile, with what it asked for where that is a part: such quotas add up.
fn memory_of(job: &Job) -> Profile {
    let mut profile = job.profile;
    if let Some(part) = &job.part {
        let missing = part.bytes.saturating_sub(profile.peak_bytes());
        profile.persistent_bytes += missing;
        profile.movable_bytes = 0;
    }
    profile
}

/// Who has which GPUs.
pub(super) type Places = BTreeMap<JobId, Vec<GpuId>>;

/// Gives whole GPUs to jobs, one after the other in their order.
pub(super) struct Giving<'a> {
    state: &'a ClusterState,
    held: &'a Held,
    placer: &'a dyn Placer,
    /// The place of each running job in the order.
    runs_at: BTreeMap<JobId, usize>,
    /// Nobody has been given these.
    free: FreeGpus,
    places: Places,
    /// Such jobs come nowhere: what is free only becomes less.
    hopeless: BTreeSet<(JobType, u32, [u64; 3])>,
}

impl<'a> Giving<'a> {
    pub(super) fn new(
        state: &'a ClusterState,
        held: &'a Held,
        placer: &'a dyn Placer,
        order: &[JobId],
    ) -> Self {
        let numbered = order.iter().enumerate();
        let run = numbered.filter(|(_, id)| state.job(**id).run().is_some());
        Self {
            state,
            held,
            placer,
            runs_at: run.map(|(at, id)| (*id, at)).collect(),
            free: FreeGpus::all(state.nodes()),
            places: Places::new(),
            hopeless: BTreeSet::new(),
        }
    }

    pub(super) fn into_places(self) -> Places {
        self.places
    }

    /// How many GPUs nobody has been given.
    pub(super) fn left(&self) -> u32 {
        self.free.total()
    }

    /// These are somebody's.
    pub(super) fn set(&mut self, id: JobId, gpus: &[GpuId]) {
        take(&mut self.free, gpus);
        self.places.insert(id, gpus.to_vec());
    }

    /// These are divided.
    pub(super) fn reserve(&mut self, gpus: &[GpuId]) {
        take(&mut self.free, gpus);
        self.places.retain(|_, own| own != gpus);
    }

    /// A running job keeps its GPUs, unless one before it has some of them.
    pub(super) fn keep(&mut self, job: &Job) -> bool {
        let own = job.run().map(|run| &run.gpus);
        let own = own.filter(|own| own.iter().all(|gpu| self.free.contains(*gpu)));
        if let Some(own) = own {
            self.set(job.id, own);
        }
        own.is_some()
    }

    /// GPUs for the job at this place in the order, none of them `closed`: its own, else such as
    /// nobody runs on, else with those of as few jobs behind it as will do, the last ones first.
    pub(super) fn give(
        &mut self,
        (at, job): (usize, &Job),
        closed: &BTreeSet<GpuId>,
    ) -> Option<Vec<GpuId>> {
        if job.part.is_none() && self.keep(job) {
            return self.places.get(&job.id).cloned();
        }
        let profile = &job.profile;
        let [fixed, movable] = profile.fixed_and_movable_bytes();
        let part = job.part.map_or(0, |part| part.bytes);
        let such = (profile.kind, job.gpus, [fixed, movable, part]);
        let bound = self.held.bound.contains_key(&job.id);
        if self.free.total() < job.gpus || (!bound && self.hopeless.contains(&such)) {
            return None;
        }
        let found = self.search(at, job, closed);
        match &found {
            Some(gpus) => self.set(job.id, gpus),
            None if !bound => drop(self.hopeless.insert(such)),
            None => {}
        }
        found
    }

    fn search(&self, at: usize, job: &Job, closed: &BTreeSet<GpuId>) -> Option<Vec<GpuId>> {
        let state = self.state;
        let (mut idle, mut behind) = (self.free.clone(), Vec::new());
        for gpu in closed {
            idle.take(*gpu);
        }
        for gpu in (0..state.gpus())
            .map(GpuId)
            .filter(|gpu| idle.contains(*gpu))
        {
            // Who is before this job is not there any more: nobody has been given the GPU.
            let others = state.residents(gpu).filter_map(|id| self.runs_at.get(&id));
            if let Some(first) = others.copied().filter(|other| *other > at).min() {
                behind.push((first, gpu));
            }
        }
        for (_, gpu) in &behind {
            idle.take(*gpu);
        }
        behind.sort_unstable_by(|a, b| b.cmp(a));
        let steps: Vec<&[(usize, GpuId)]> = behind.chunk_by(|a, b| a.0 == b.0).collect();
        let with = |most: usize| {
            let mut some = idle.clone();
            for (_, gpu) in steps[..most].iter().copied().flatten() {
                some.give(*gpu);
            }
            self.held
                .place(self.placer, state, &mut some, (job, job.gpus))
        };
        if let Some(gpus) = with(0) {
            return Some(gpus);
        }
        let (mut few, mut enough, mut found) = (0, steps.len(), with(steps.len())?);
        while few + 1 < enough {
            let middle = few.midpoint(enough);
            match with(middle) {
                Some(gpus) => (enough, found) = (middle, gpus),
                None => few = middle,
            }
        }
        Some(found)
    }
}

impl Scheduler {
    /// Chooses anew who runs where jobs are bound to GPUs.
    pub(super) fn preempt_held(
        &mut self,
        state: &ClusterState,
        held: &Held,
        batch: &mut Vec<Decision>,
    ) {
        let skips = self.order.skips();
        let order = self.in_order();
        let mut giving = Giving::new(state, held, &*self.placer, &order);
        let mut blocked = false;
        for (at, id) in order.iter().enumerate() {
            let job = state.job(*id);
            if giving.left() == 0 {
                break;
            }
            if blocked {
                giving.keep(job);
            } else if job.gpus > giving.left() {
                blocked = !skips;
            } else if giving.give((at, job), &BTreeSet::new()).is_none() {
                self.waits.fragmented.push(*id);
            }
        }
        run_there(state, giving.into_places(), batch);
    }

    /// All candidates.
    pub(super) fn in_order(&self) -> Vec<JobId> {
        let mut order = Vec::new();
        walk(&self.queues, |id, _| {
            order.push(id);
            Step::Next
        });
        order
    }

    /// What follows where jobs are bound to GPUs and somebody else has said who runs: none of them
    /// is stopped for nobody, and none is kept from GPUs that nobody has.
    pub(super) fn go_on(&self, state: &ClusterState, held: &Held, batch: &mut Vec<Decision>) {
        if !held.is_empty() {
            keep_where_nobody_comes(state, batch);
            self.bring_back(state, held, batch);
        }
    }

    /// Jobs that are stopped on GPUs that nobody has go on there, although it is not their turn:
    /// nobody else can use what they hold.
    fn bring_back(&self, state: &ClusterState, held: &Held, batch: &mut Vec<Decision>) {
        let mut used = used_after(state, batch);
        let decided: BTreeSet<JobId> = batch.iter().map(Decision::job).collect();
        for (id, gpus) in &held.bound {
            let job = state.job(*id);
            let out = self.promises.known(*id) == Some(Admit::Reject);
            let waits = job.waits() && !out && !decided.contains(id);
            if waits && gpus.iter().all(|gpu| !used.contains(gpu)) {
                let mut free = FreeGpus::all(state.nodes());
                // Their own node may be silent.
                // CAST: a node has at most 64.
                let own = self.placer.place(state, &mut free, job, gpus.len() as u32);
                if own.as_ref() == Some(gpus) {
                    used.extend(gpus);
                    batch.push(start(job, gpus.clone(), 1.0));
                }
            }
        }
    }
}

/// Has these jobs run on all of their GPUs, and no others run.
pub(super) fn run_there(state: &ClusterState, places: Places, batch: &mut Vec<Decision>) {
    for id in state.running() {
        if !places.contains_key(id) {
            batch.push(Decision::Suspend { job: *id });
        }
    }
    for (id, gpus) in places {
        let job = state.job(id);
        match job.run() {
            Some(run) if run.gpus == gpus => {}
            Some(_) => batch.push(Decision::Migrate {
                job: id,
                gpus,
                share: 1.0,
            }),
            None => batch.push(start(job, gpus, 1.0)),
        }
    }
}

/// GPUs that somebody has once a batch is done.
fn used_after(state: &ClusterState, batch: &[Decision]) -> BTreeSet<GpuId> {
    let goes = |decision: &&Decision| !matches!(decision, Decision::Reshare { .. });
    let leaving: BTreeSet<JobId> = batch.iter().filter(goes).map(Decision::job).collect();
    let stay = state.running().difference(&leaving);
    let there = stay.filter_map(|id| Some(&state.job(*id).run()?.gpus));
    let coming = batch.iter().flat_map(Decision::gpus);
    there.flatten().chain(coming).copied().collect()
}

/// Drops the stops of jobs whose GPUs nobody would have then.
pub fn keep_where_nobody_comes(state: &ClusterState, batch: &mut Vec<Decision>) {
    let used = used_after(state, batch);
    batch.retain(|decision| {
        let Decision::Suspend { job } = decision else {
            return true;
        };
        let own = state.job(*job).run().map_or(&[][..], |run| &run.gpus);
        own.iter().any(|gpu| used.contains(gpu))
    });
}

pub(super) fn take(free: &mut FreeGpus, gpus: &[GpuId]) {
    for gpu in gpus {
        free.take(*gpu);
    }
}
