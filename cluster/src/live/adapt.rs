//! What a live cluster adds to the policies: silent nodes, jobs that cannot move, and foreign work
//! on a device.
//!
//! Policies are pure and know none of this. [`LivePlacer`] and [`LivePacker`] wrap them and show
//! them only what is possible: the answer is still the policy's, over fewer choices. [`LiveRounds`]
//! keeps the time of a round allocator.

use std::sync::Arc;

use policy::cluster::catalogue::{Busy, Context};
use policy::cluster::packer::together_bytes;
use policy::cluster::{
    ClusterState, FreeGpus, GpuId, GpuType, Job, JobId, NodeId, PackScore, Packer, PairTable, Past,
    Placer, Policies, Profile, Reason, RoundAllocator, Scheduler, Tags, Verdict,
};

use super::facts::Shared;
use super::rounds::LiveRounds;

/// What a hook has measured so far.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Pairs.
    pub pairs: Vec<Past>,
    /// GPU-seconds of jobs that are done.
    pub past_gpu_s: Vec<f64>,
    /// Memory of the largest GPU; 0: there is none yet.
    pub gpu_bytes: u64,
}

/// Past jobs that the Gittins index needs at least.
pub const LEAST_PAST_JOBS: usize = 20;

/// What policies can count on in a live cluster: what it meters and has measured, and no more.
#[must_use]
pub fn context(known: &Known) -> Context {
    let past = &known.pairs;
    let mut pairs = PairTable::default();
    for (kind, host, joiner, rates) in past {
        pairs.insert(*kind, host.gpus, (host.kind, joiner.kind), *rates);
    }
    // A job of which nothing was metered counts as busy all the time.
    let metered = |profile: &Profile| profile.busy < 1.0 || profile.iteration_s > 0.0;
    let sharing = past
        .iter()
        .filter(|(_, host, joiner, _)| metered(host) && metered(joiner));
    Context {
        sharing: sharing.map(|(_, a, b, rates)| (*a, *b, *rates)).collect(),
        pairs: (!pairs.is_empty()).then(|| Arc::new(pairs)),
        // What is learnt from memory is relative to it. [`LivePacker`] and the scheduler look at
        // the memory of the very GPU, and ask no packer about jobs that do not fit.
        gpu_bytes: match known.gpu_bytes {
            0 => u64::MAX,
            bytes => bytes,
        },
        busy: Busy::OnceSeen,
        past_gpu_s: if known.past_gpu_s.len() >= LEAST_PAST_JOBS {
            known.past_gpu_s.clone()
        } else {
            Vec::new()
        },
        // What is not known yet is tried ([`LiveRounds`]).
        speeds_by_type: true,
        opportunistic: true,
        files: Some(crate::sweep::read_file),
        ..Context::default()
    }
}

/// The same before the state is read: as if pairs had been measured, and jobs had ended.
#[must_use]
pub fn context_to_be() -> Context {
    let complete = Context::complete();
    Context {
        pairs: complete.pairs,
        sharing: complete.sharing,
        past_gpu_s: complete.past_gpu_s,
        ..context(&Known::default())
    }
}

/// A scheduler of these policies, which sees only what is possible in a live cluster.
#[must_use]
pub fn scheduler(mut policies: Policies, shared: &Shared, seed: u64) -> Scheduler {
    policies.placer = Box::new(LivePlacer::new(policies.placer, shared.clone()));
    policies.packer = policies
        .packer
        .map(|packer| Box::new(LivePacker::new(packer, shared.clone())) as Box<dyn Packer>);
    policies.round_allocator = policies
        .round_allocator
        .map(|rounds| Box::new(LiveRounds::new(rounds, shared.clone())) as Box<dyn RoundAllocator>);
    Scheduler::of(policies, seed)
}

/// A placer that sees only usable GPUs: those of nodes that report, first the ones without foreign
/// work, and for a job that cannot be moved its own. A job's GPUs are all on one node, because an
/// engine starts it as one process there.
pub struct LivePlacer {
    inner: Box<dyn Placer>,
    shared: Shared,
}

impl LivePlacer {
    /// Around a policy.
    #[must_use]
    pub fn new(inner: Box<dyn Placer>, shared: Shared) -> Self {
        Self { inner, shared }
    }
}

impl Placer for LivePlacer {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn tags(&self) -> Tags {
        self.inner.tags()
    }

    fn place(
        &self,
        state: &ClusterState,
        free: &mut FreeGpus,
        job: &Job,
        gpus: u32,
    ) -> Option<Vec<GpuId>> {
        let facts = self.shared.facts();
        if let Some(own) = facts.pinned.get(&job.id) {
            let can = own
                .iter()
                .all(|gpu| free.contains(*gpu) && !facts.down.contains(gpu));
            return (can && own.len() == gpus as usize).then(|| take(free, own));
        }
        let without = |hidden: &mut dyn Iterator<Item = &GpuId>| {
            let mut left = free.clone();
            for gpu in hidden {
                left.take(*gpu);
            }
            left
        };
        let avoided = facts.avoids(state, job);
        let closed = || facts.down.iter().chain(&facts.shut).chain(&avoided);
        let trusted = || closed().chain(&facts.trying);
        let one_node = |gpus: &Vec<GpuId>| {
            gpus.windows(2)
                .all(|two| state.node_of(two[0]) == state.node_of(two[1]))
        };
        // A placer that weighs waits sees all of them at once.
        let idle_first = !self.inner.weighs_waits();
        let idle = idle_first.then(|| without(&mut trusted().chain(&facts.busy)));
        let mut all = vec![without(&mut trusted())];
        if !facts.trying.is_empty() {
            // Where nothing else is free.
            all.push(without(&mut closed()));
        }
        for left in idle.into_iter().chain(all) {
            let try_in = |left: &FreeGpus| {
                self.inner
                    .place(state, &mut left.clone(), job, gpus)
                    .filter(one_node)
            };
            if left.total() < gpus {
                continue;
            }
            let found = try_in(&left).or_else(|| {
                let mut nodes = (0..left.nodes()).filter(|node| left.on(*node) >= gpus);
                nodes.find_map(|node| try_in(&left.only(|other| other == node)))
            });
            if let Some(found) = found {
                return Some(take(free, &found));
            }
        }
        None
    }

    fn bound(&self, job: JobId) -> Option<Vec<GpuId>> {
        self.shared.facts().pinned.get(&job).cloned()
    }

    fn keeps_out(&self, state: &ClusterState, job: &Job) -> bool {
        !self.shared.facts().avoids(state, job).is_empty()
    }

    fn all_bound(&self) -> Vec<(JobId, Vec<GpuId>)> {
        let facts = self.shared.facts();
        let pinned = facts.pinned.iter();
        pinned.map(|(job, gpus)| (*job, gpus.clone())).collect()
    }

    fn away_bytes(&self, _state: &ClusterState, node: NodeId) -> u64 {
        let facts = self.shared.facts();
        facts.away_bytes.get(&node).copied().unwrap_or(0)
    }
}

fn take(free: &mut FreeGpus, gpus: &[GpuId]) -> Vec<GpuId> {
    gpus.iter().for_each(|gpu| {
        free.take(*gpu);
    });
    gpus.to_vec()
}

/// A packer that is not asked about pairs whose metered memory does not fit on a device.
pub struct LivePacker {
    inner: Box<dyn Packer>,
    shared: Shared,
}

impl LivePacker {
    /// Around a policy.
    #[must_use]
    pub fn new(inner: Box<dyn Packer>, shared: Shared) -> Self {
        Self { inner, shared }
    }

    /// These jobs fit only where memory moves, and the node has no space for what would be away.
    fn is_too_far<'a>(
        &self,
        state: &ClusterState,
        node: NodeId,
        all: impl Iterator<Item = &'a Profile>,
    ) -> bool {
        let [needed, away] = together_bytes(all);
        let there = state.nodes()[node.0 as usize].gpu_bytes;
        let moves = away > 0 && there > 0 && needed.saturating_add(away) > there;
        let facts = self.shared.facts();
        moves && facts.away_bytes.get(&node).is_none_or(|most| away > *most)
    }
}

impl Packer for LivePacker {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn tags(&self) -> Tags {
        self.inner.tags()
    }

    fn score(&self, host: &Profile, joiner: &Profile, kind: GpuType) -> Option<PackScore> {
        let there = self.shared.facts().gpu_bytes.get(&kind).copied();
        let [needed, _] = together_bytes([host, joiner].into_iter());
        if there.is_some_and(|there| there > 0 && needed > there) {
            return None;
        }
        self.inner.score(host, joiner, kind)
    }

    fn observe(
        &mut self,
        host: &Profile,
        joiner: &Profile,
        kind: GpuType,
        measured: [f64; 2],
    ) -> Verdict {
        self.inner.observe(host, joiner, kind, measured)
    }

    fn remember(&mut self, pairs: &[Past]) {
        self.inner.remember(pairs);
    }

    fn refused(&self, host: &Profile, joiner: &Profile, kind: GpuType) -> Option<Reason> {
        self.inner.refused(host, joiner, kind)
    }

    fn refused_at(
        &self,
        state: &ClusterState,
        gpus: &[GpuId],
        host: JobId,
        joiner: JobId,
    ) -> Option<Reason> {
        let node = state.node_of(*gpus.first()?);
        let (host, joiner) = (state.job(host), state.job(joiner));
        let other = |own: &Vec<GpuId>| !own.iter().all(|gpu| gpus.contains(gpu));
        let pinned = self
            .shared
            .facts()
            .pinned
            .get(&joiner.id)
            .is_some_and(other);
        if pinned || self.shared.facts().keeps_out(state, gpus, joiner) {
            return Some(Reason::Bound);
        }
        if self.is_too_far(state, node, [&host.profile, &joiner.profile].into_iter()) {
            return Some(Reason::Memory);
        }
        let kinds = [host.profile.kind, joiner.profile.kind];
        let facts = self.shared.facts();
        facts.barred.get(&(node, host.gpus, kinds)).copied()
    }

    fn keeps_pairs(&self) -> bool {
        self.inner.keeps_pairs()
    }

    fn most_jobs(&self) -> u32 {
        self.inner.most_jobs()
    }

    fn score_beside(
        &self,
        there: &[&Profile],
        joiner: &Profile,
        kind: GpuType,
    ) -> Option<PackScore> {
        // The scheduler has added up what they hold, by the memory of the very GPUs.
        self.inner.score_beside(there, joiner, kind)
    }

    fn judge_several(&self, all: &[&Profile], kind: GpuType, measured: &[f64]) -> Option<Reason> {
        self.inner.judge_several(all, kind, measured)
    }

    fn observe_several(&mut self, all: &[&Profile], kind: GpuType, measured: &[f64]) -> Verdict {
        self.inner.observe_several(all, kind, measured)
    }

    fn refused_several(&self, all: &[&Profile], kind: GpuType) -> Option<Reason> {
        self.inner.refused_several(all, kind)
    }

    fn refused_several_at(
        &self,
        state: &ClusterState,
        gpus: &[GpuId],
        all: &[JobId],
    ) -> Option<Reason> {
        let node = state.node_of(*gpus.first()?);
        let shared = self.shared.facts();
        if all
            .iter()
            .any(|id| shared.keeps_out(state, gpus, state.job(*id)))
        {
            return Some(Reason::Bound);
        }
        drop(shared);
        let profiles = all.iter().map(|id| &state.job(*id).profile);
        if self.is_too_far(state, node, profiles) {
            return Some(Reason::Memory);
        }
        let facts = self.shared.facts();
        if facts.barred_several.is_empty() {
            return None;
        }
        let mut kinds: Vec<_> = all.iter().map(|id| state.job(*id).profile.kind).collect();
        kinds.sort_unstable();
        let gpus = state.job(*all.first()?).gpus;
        facts.barred_several.get(&(node, gpus, kinds)).copied()
    }
}

#[cfg(test)]
mod tests {
    use policy::Class;
    use policy::cluster::JobType;
    use policy::cluster::catalogue::{self, Context};

    use super::*;

    fn placer(shared: &Shared) -> LivePlacer {
        LivePlacer::new(
            catalogue::placer("anywhere", &Context::default()).unwrap(),
            shared.clone(),
        )
    }

    #[test]
    fn only_gpus_that_can_be_had_are_shown() {
        let shared = Shared::default();
        let state = ClusterState::uniform(4, 2);
        let placer = placer(&shared);
        let job = Job::rigid(JobType(0), 1, 0.0, 10.0);
        let place = |gpus| placer.place(&state, &mut state.free().clone(), &job, gpus);
        assert_eq!(place(2), Some(vec![GpuId(0), GpuId(1)]));
        assert_eq!(place(3), None, "never over two nodes");
        shared.facts().busy.insert(GpuId(0));
        assert_eq!(place(1), Some(vec![GpuId(1)]), "idle ones first");
        assert_eq!(place(2), Some(vec![GpuId(2), GpuId(3)]));
        shared.facts().down.extend([GpuId(2), GpuId(3)]);
        assert_eq!(
            place(2),
            Some(vec![GpuId(0), GpuId(1)]),
            "busy ones where nothing else is left"
        );
        shared.facts().down.extend([GpuId(0), GpuId(1)]);
        assert_eq!(place(1), None);
    }

    #[test]
    fn a_placer_that_weighs_waits_is_shown_busy_gpus_too() {
        let shared = Shared::default();
        let mut state = ClusterState::uniform(2, 1);
        let job = Job::rigid(JobType(0), 1, 0.0, 10.0);
        shared.facts().busy.extend([GpuId(0), GpuId(1)]);
        let reported = |wait_s| {
            policy::cluster::wait::WaitMatrix::reported(
                &[1.0],
                &[1 << 34],
                vec![vec![Some(wait_s)]],
            )
        };
        state.set_wait_matrix(GpuId(0), reported(30.0));
        state.set_wait_matrix(GpuId(1), reported(5.0));
        let context = Context::default();
        let place = |name| {
            let inner = catalogue::placer(name, &context).unwrap();
            LivePlacer::new(inner, shared.clone()).place(&state, &mut state.free().clone(), &job, 1)
        };
        assert_eq!(place("wait-time"), Some(vec![GpuId(1)]));
        assert_eq!(
            place("anywhere"),
            Some(vec![GpuId(0)]),
            "strangers on both, and no idea of the waits"
        );
        shared.facts().busy.remove(&GpuId(0));
        assert_eq!(place("anywhere"), Some(vec![GpuId(0)]));
        // It believes the node, whatever runs on it.
        assert_eq!(place("wait-time"), Some(vec![GpuId(1)]));
        shared.facts().down.insert(GpuId(1));
        assert_eq!(place("wait-time"), Some(vec![GpuId(0)]));
    }

    #[test]
    fn a_job_that_cannot_move_gets_its_own_gpu_or_none() {
        let shared = Shared::default();
        let mut state = ClusterState::uniform(2, 1);
        let id = state.arrive(Job::rigid(JobType(0), 1, 0.0, 10.0));
        shared.facts().pinned.insert(id, vec![GpuId(1)]);
        let mut free = state.free().clone();
        let placer = placer(&shared);
        let job = state.job(id).clone();
        assert_eq!(
            placer.place(&state, &mut free, &job, 1),
            Some(vec![GpuId(1)])
        );
        assert_eq!(placer.place(&state, &mut free, &job, 1), None);
        assert_eq!(
            free.total(),
            1,
            "nothing was taken for the one that got nothing"
        );
    }

    #[test]
    fn pairs_that_do_not_fit_into_memory_are_not_tried() {
        let shared = Shared::default();
        shared.facts().gpu_bytes.insert(GpuType(0), 10);
        let packer = LivePacker::new(
            catalogue::packer("trial", &Context::default()).unwrap(),
            shared,
        );
        let mut a = Profile::unknown(JobType(0), 1, Class::Guaranteed);
        a.persistent_bytes = 5;
        let mut b = a;
        assert!(packer.score(&a, &b, GpuType(0)).is_some());
        b.ephemeral_bytes = 1;
        assert!(packer.score(&a, &b, GpuType(0)).is_none());
        b.persistent_bytes = u64::MAX;
        assert!(packer.score(&a, &b, GpuType(0)).is_none());
    }

    #[test]
    fn pairs_that_do_not_fit_at_once_are_tried_where_their_memory_moves_and_the_host_holds_it() {
        const GIB: u64 = 1 << 30;
        let shared = Shared::default();
        shared.facts().gpu_bytes.insert(GpuType(0), 16 * GIB);
        let packer = LivePacker::new(
            catalogue::packer("trial", &Context::default()).unwrap(),
            shared.clone(),
        );
        let tried = |host: [u64; 2], joiner: [u64; 2]| {
            let mut state = ClusterState::uniform(1, 1);
            let [host, joiner] = [host, joiner].map(|[peak, movable]| {
                let mut job = Job::rigid(JobType(0), 1, 0.0, 1.0);
                job.profile.persistent_bytes = peak * GIB;
                job.profile.movable_bytes = movable * GIB;
                state.arrive(job)
            });
            let profile = |id| &state.job(id).profile;
            let scored = packer.score(profile(host), profile(joiner), GpuType(0));
            let there = packer.refused_at(&state, &[GpuId(0)], host, joiner);
            assert!(there.is_none_or(|why| why == Reason::Memory));
            scored.is_some() && there.is_none()
        };
        assert!(!tried([12, 12], [12, 12]), "this node moves nothing");
        assert!(tried([4, 4], [12, 12]), "they fit as they are");
        shared.facts().away_bytes.insert(NodeId(0), 12 * GIB);
        assert!(tried([12, 12], [12, 12]));
        assert!(!tried([12, 0], [12, 12]), "12 stay, and 12 come");
        assert!(tried([12, 12], [4, 0]));
        assert!(!tried([15, 13], [15, 12]), "2 and 3 stay, 13 come, of 16");
        assert!(!tried([14, 14], [14, 14]), "14 would be away, of 12");
    }
}
