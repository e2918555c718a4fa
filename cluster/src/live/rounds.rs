//! Rounds of a live cluster: a round allocator is asked once a round, whatever happens inside it,
//! and types of GPU that nothing is known of are tried.
//!
//! A hook decides whenever something happens. A round allocator counts the rounds that it has
//! given, so between two rounds jobs stay where they are; only GPUs that become free go to jobs
//! that wait, by arrival.
//!
//! How fast a kind of job is on a type of GPU is measured where it runs there by itself, and
//! inferred from other kinds once enough of these ran on both types. Before that no program would
//! ever send a job where nothing is known: so one turn of a round, for each type at most, goes to a
//! job whose kind is not known there. A job that waits for its first start is taken first; of the
//! others only one that may be moved, and that has run for a while.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use policy::cluster::round_allocator::filled;
use policy::cluster::{ClusterState, GpuType, Job, JobId, PairTable, RoundAllocator, Tags, Turn};

use super::facts::{Shared, Unsure};

/// Rounds in which a kind of job is tried on a type where nothing comes of it.
const TRIES: u32 = 5;
/// A job that runs is not moved to be measured before it has run for so long, in seconds: one that
/// soon ends is not worth it.
const RUN_BEFORE_S: f64 = 60.0;

/// A round allocator in a live cluster.
pub struct LiveRounds {
    inner: Box<dyn RoundAllocator>,
    shared: Shared,
    turns: Vec<Turn>,
    tries: BTreeMap<Unsure, u32>,
}

impl LiveRounds {
    /// Around a policy.
    #[must_use]
    pub fn new(inner: Box<dyn RoundAllocator>, shared: Shared) -> Self {
        Self {
            inner,
            shared,
            turns: Vec::new(),
            tries: BTreeMap::new(),
        }
    }

    /// A turn for each type of GPU at most in which a kind is measured there.
    fn with_trials(&mut self, state: &ClusterState, turns: Vec<Turn>) -> Vec<Turn> {
        let unsure = self.shared.facts().unsure.clone();
        self.tries.retain(|what, _| unsure.contains(what));
        let mut trials: Vec<Turn> = Vec::new();
        let kinds: BTreeSet<GpuType> = unsure.iter().map(|(.., kind)| *kind).collect();
        for kind in kinds {
            let open = |job: &&Job| {
                let what = (job.profile.kind, job.gpus, kind);
                let tried = self.tries.get(&what).copied().unwrap_or(0);
                unsure.contains(&what)
                    && tried < TRIES
                    && job.rate_on(job.gpus, kind) > 0.0
                    && !trials.iter().any(|turn| turn.jobs[0] == job.id)
            };
            let Some(job) = state
                .active()
                .filter(open)
                .filter_map(|job| Some((self.trouble(state, job, kind)?, job)))
                .min_by(|(a, job_a), (b, job_b)| {
                    let age = job_a.arrival_s.total_cmp(&job_b.arrival_s);
                    a.cmp(b).then(age).then(job_a.id.cmp(&job_b.id))
                })
                .map(|(_, job)| job)
            else {
                continue;
            };
            let tries = self.tries.entry((job.profile.kind, job.gpus, kind));
            *tries.or_default() += 1;
            let jobs = vec![job.id];
            trials.push(Turn { jobs, kind });
        }
        if trials.is_empty() {
            return turns;
        }
        let tried: BTreeSet<JobId> = trials.iter().map(|turn| turn.jobs[0]).collect();
        trials.extend(turns.into_iter().filter_map(|turn| without(turn, &tried)));
        // What does not fit any more goes where there is space.
        filled(state, trials)
    }

    /// How much trouble it is to measure a job on a type; `None`: more than it is worth.
    fn trouble(&self, state: &ClusterState, job: &Job, kind: GpuType) -> Option<u32> {
        let on = job.run().and_then(|run| run.gpus.first());
        if on.is_some_and(|gpu| state.type_of(*gpu) == kind) {
            return Some(0);
        }
        if job.starts == 0 {
            return Some(1);
        }
        let moves = !self.shared.facts().pinned.contains_key(&job.id);
        (moves && job.held_s(state.now_s()) >= RUN_BEFORE_S).then_some(2)
    }
}

/// A turn without these jobs; `None`: nobody is left.
fn without(mut turn: Turn, jobs: &BTreeSet<JobId>) -> Option<Turn> {
    turn.jobs.retain(|id| !jobs.contains(id));
    (!turn.jobs.is_empty()).then_some(turn)
}

impl RoundAllocator for LiveRounds {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn tags(&self) -> Tags {
        self.inner.tags()
    }

    fn turns(&mut self, state: &ClusterState) -> Vec<Turn> {
        let now_s = state.now_s();
        let (ends_s, round_s) = {
            let facts = self.shared.facts();
            (facts.round_ends_s, facts.round_s)
        };
        let inside = now_s < ends_s && !self.turns.is_empty();
        self.turns = if inside {
            let over: BTreeSet<JobId> = self
                .turns
                .iter()
                .flat_map(|turn| turn.jobs.iter().copied())
                .filter(|id| state.job(*id).is_done())
                .collect();
            let turns = std::mem::take(&mut self.turns).into_iter();
            filled(
                state,
                turns.filter_map(|turn| without(turn, &over)).collect(),
            )
        } else {
            self.shared.facts().round_ends_s = now_s + round_s;
            let turns = self.inner.turns(state);
            self.with_trials(state, turns)
        };
        self.turns.clone()
    }

    fn learn(&mut self, pairs: Option<&Arc<PairTable>>) {
        self.inner.learn(pairs);
    }
}

#[cfg(test)]
mod tests {
    use policy::cluster::{Choice, GpuId, JobType, Node, catalogue};

    use super::*;
    use crate::live::adapt::{self, Known};

    fn cluster() -> ClusterState {
        let node = |kind| Node {
            first: GpuId(0),
            gpus: 1,
            kind: GpuType(kind),
            gpu_bytes: 16 << 30,
            cpus: 4.0,
            mem_bytes: 0,
        };
        ClusterState::new(vec![node(0), node(1)])
    }

    fn rounds(shared: &Shared) -> LiveRounds {
        let inner = catalogue::round_allocator("gavel-max-min", &adapt::context(&Known::default()));
        shared.facts().round_s = 10.0;
        LiveRounds::new(inner.unwrap(), shared.clone())
    }

    #[test]
    fn a_round_is_a_round_however_often_the_hook_decides_and_free_gpus_are_used_at_once() {
        let shared = Shared::default();
        shared.facts().round_s = 10.0;
        let choice = Choice::new("gavel-max-min", "anywhere");
        let policies = choice.policies(&adapt::context(&Known::default())).unwrap();
        let mut scheduler = adapt::scheduler(policies, &shared, 1);
        let mut state = cluster();
        let ids: Vec<JobId> = (0..3)
            .map(|_| state.arrive(Job::rigid(JobType(0), 1, 0.0, 1e6)))
            .collect();
        // Each second, as if something happened all the time.
        for tick in 0..600 {
            state.advance(f64::from(tick));
            let batch = scheduler.decide(&state);
            assert!(tick % 10 == 0 || batch.is_empty(), "{batch:?} at {tick}");
            state.apply(&batch).unwrap();
            assert_eq!(state.running().len(), 2);
        }
        for id in &ids {
            let service = state.job(*id).service_gpu_s(600.0);
            assert!((390.0..=410.0).contains(&service), "{service}");
        }
        // One ends inside a round, and its GPU does not wait for the next.
        state.advance(600.0);
        let batch = scheduler.decide(&state);
        state.apply(&batch).unwrap();
        state.advance(601.0);
        let [first, second] = [0, 1].map(|at| *state.running().iter().nth(at).unwrap());
        state.finish(first);
        let batch = scheduler.decide(&state);
        state.apply(&batch).unwrap();
        assert!(state.running().len() == 2 && state.running().contains(&second));
    }

    #[test]
    fn a_kind_is_tried_where_nothing_is_known_of_it_one_turn_a_round_and_not_for_ever() {
        let shared = Shared::default();
        let mut rounds = rounds(&shared);
        let mut state = cluster();
        let bound = state.arrive(Job::rigid(JobType(0), 1, 0.0, 1e6));
        let free = state.arrive(Job::rigid(JobType(1), 1, 0.0, 1e6));
        shared.facts().pinned.insert(bound, vec![GpuId(0)]);
        for (id, on) in [(bound, 0), (free, 1)] {
            let place = policy::cluster::Decision::Place {
                job: id,
                gpus: vec![GpuId(on)],
                class: policy::Class::Guaranteed,
                share: 1.0,
                mem_bytes: None,
            };
            state.apply(&[place]).unwrap();
        }
        let both = [(JobType(0), 1, GpuType(1)), (JobType(1), 1, GpuType(0))];
        shared.facts().unsure = both.into();
        let mut tried = 0;
        for tick in 0..30 {
            let now_s = 10.0 * f64::from(tick);
            state.advance(now_s);
            let turns = rounds.turns(&state);
            let on = |kind| turns.iter().find(|turn| turn.kind == GpuType(kind));
            let there = on(0).is_some_and(|turn| turn.jobs == [free]);
            // Only the first turn counts as a trial; later the program may say the same.
            let says = rounds.tries.values().sum::<u32>();
            assert!(says <= TRIES);
            if says > tried {
                tried = says;
                assert!(there && now_s >= RUN_BEFORE_S, "{turns:?} at {now_s}");
            }
            assert!(
                !rounds.tries.contains_key(&both[0]),
                "one that cannot be moved"
            );
        }
        assert_eq!(tried, TRIES);
        // Once it is known, nothing is tried any more.
        shared.facts().unsure.clear();
        state.advance(400.0);
        rounds.turns(&state);
        assert!(rounds.tries.is_empty());
    }
}
