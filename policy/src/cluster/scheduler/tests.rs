//! Several jobs on a GPU, solved by hand: under packers, and by the parts that they ask for.

use std::sync::Arc;

use crate::Class;
use crate::cluster::catalogue::{self, Busy, Context};
use crate::cluster::{
    Choice, ClusterState, Decision, GpuId, GpuType, Job, JobId, JobType, MOST_JOBS_ON_GPU,
    PairTable, Part, Reason, Scheduler, Verdict,
};

const GIB: u64 = 1 << 30;

/// Kinds 0 and 1 keep 0.8 beside each other and themselves.
fn context() -> Context {
    let mut pairs = PairTable::default();
    for (a, b) in [(0, 0), (0, 1), (1, 1)] {
        pairs.insert(GpuType(0), 1, (JobType(a), JobType(b)), [0.8, 0.8]);
    }
    Context {
        pairs: Some(Arc::new(pairs)),
        busy: Busy::FromArrival,
        gpu_bytes: 16 * GIB,
        opportunistic: true,
        ..Context::default()
    }
}

struct Cluster {
    state: ClusterState,
    scheduler: Scheduler,
}

impl Cluster {
    fn new(gpus: u32, order: &str, packer: Option<&str>) -> Self {
        let choice = Choice {
            packer: packer.map(Into::into),
            ..Choice::new(order, "anywhere")
        };
        let mut state = ClusterState::uniform(gpus, 8);
        state.set_most_on_gpu(MOST_JOBS_ON_GPU);
        Self {
            state,
            scheduler: choice.scheduler(&context(), 1).unwrap(),
        }
    }

    fn job(&mut self, kind: u32, change: impl FnOnce(&mut Job)) -> JobId {
        let mut job = Job::rigid(JobType(kind), 1, self.state.now_s(), 1000.0);
        change(&mut job);
        let id = self.state.arrive(job);
        self.scheduler.note(id);
        id
    }

    fn part(&mut self, share: f64, gib: u64) -> JobId {
        self.job(0, |job| {
            let bytes = gib * GIB;
            job.part = Some(Part { share, bytes });
        })
    }

    fn decide(&mut self) -> Vec<Decision> {
        let batch = self.scheduler.decide(&self.state);
        self.state.apply(&batch).unwrap();
        batch
    }

    fn end(&mut self, id: JobId) {
        let others: Vec<JobId> = self.state.others(id).collect();
        self.state.finish(id);
        for one in [id].into_iter().chain(others) {
            self.scheduler.note(one);
        }
    }

    fn on(&self, gpu: u32) -> Vec<u32> {
        let all = self.state.residents(GpuId(gpu));
        all.map(|id| id.0).collect()
    }

    fn shares(&self, gpu: u32) -> Vec<f64> {
        let share = |id| self.state.job(id).run().unwrap().share;
        self.state.residents(GpuId(gpu)).map(share).collect()
    }
}

#[test]
fn as_many_come_as_the_bound_says_and_share_evenly() {
    for (packer, most) in [("greedy", 2), ("greedy:jobs=3", 3), ("greedy:jobs=4", 4)] {
        let mut cluster = Cluster::new(1, "fifo-backfill", Some(packer));
        let ids: Vec<JobId> = (0..6).map(|_| cluster.job(0, |_| ())).collect();
        cluster.decide();
        let there: Vec<u32> = (0..most).collect();
        assert_eq!(cluster.on(0), there, "{packer}");
        let part = 1.0 / f64::from(most);
        assert_eq!(cluster.shares(0), vec![part; most as usize], "{packer}");
        assert!(cluster.decide().is_empty(), "{packer}: nothing to do");
        // One ends, and the next one comes in its place.
        cluster.end(ids[1]);
        cluster.decide();
        assert_eq!(cluster.on(0).len(), most as usize, "{packer}");
        assert!(cluster.on(0).contains(&most), "{packer}");
    }
}

#[test]
fn memory_of_all_of_them_has_to_fit() {
    for (gib, fit) in [(5, 3), (6, 2), (8, 2)] {
        let mut cluster = Cluster::new(1, "fifo-backfill", Some("greedy:jobs=4"));
        for _ in 0..4 {
            cluster.job(0, |job| job.profile.persistent_bytes = gib * GIB);
        }
        cluster.decide();
        assert_eq!(cluster.on(0).len(), fit, "{gib} GiB each, 16 in all");
    }
    // One that grows while it is there is one too many: the last one leaves.
    let mut cluster = Cluster::new(1, "fifo-backfill", Some("trial:jobs=3"));
    let ids: Vec<JobId> = (0..3).map(|_| cluster.job(0, |_| ())).collect();
    cluster.decide();
    cluster
        .scheduler
        .observe(&cluster.state, ids[0], ids[1], [0.8, 0.8]);
    cluster.decide();
    assert_eq!(cluster.on(0), [0, 1, 2]);
    for (id, gib) in ids.iter().zip([4, 4, 9]) {
        cluster.state.job_mut(*id).profile.persistent_bytes = gib * GIB;
    }
    let batch = cluster.decide();
    let memory = Decision::Unpack {
        job: ids[2],
        reason: Reason::Memory,
    };
    assert!(batch.contains(&memory), "{batch:?}");
    assert_eq!(cluster.on(0), [0, 1]);
}

#[test]
fn where_memory_moves_the_largest_has_to_fit_beside_what_stays_and_the_rest_on_the_server() {
    // 16 GiB, and a server with 62.5 GB for each GPU: 31 of them for memory that is away.
    let there = |jobs: &[(u64, u64)]| {
        let mut cluster = Cluster::new(1, "fifo-backfill", Some("greedy:jobs=64"));
        for (peak, movable) in jobs {
            cluster.job(0, |job| {
                job.profile.persistent_bytes = peak * GIB;
                job.profile.movable_bytes = movable * GIB;
            });
        }
        cluster.decide();
        cluster.on(0).len()
    };
    // The second one is the packer's affair (see `LivePacker`); from the third on it is counted.
    assert_eq!(there(&[(8, 8), (8, 8), (8, 8)]), 3);
    assert_eq!(
        there(&[(8, 0), (8, 8), (8, 8)]),
        3,
        "8 stay, and 8 at a time"
    );
    assert_eq!(there(&[(8, 0), (8, 8), (8, 7)]), 2, "9 stay");
    assert_eq!(there(&[(8, 0), (8, 0), (1, 1)]), 2);
    assert_eq!(there(&[(16, 16), (1, 1), (1, 0)]), 2, "1 stays beside 16");
    // 15 GiB are there, and 15 and 14 away, and no more than 29 may be.
    assert_eq!(there(&[(15, 15), (15, 15), (14, 14), (1, 1)]), 3);
    // A claim of more than there is counts as all.
    assert_eq!(there(&[(8, u64::MAX / GIB), (8, 8), (8, 8)]), 3);
}

#[test]
fn a_trial_grows_by_one_out_of_pairs_that_were_measured_and_the_last_one_leaves() {
    let mut cluster = Cluster::new(1, "fifo-backfill", Some("trial:jobs=4"));
    let ids: Vec<JobId> = (0..5).map(|at| cluster.job(at % 2, |_| ())).collect();
    cluster.decide();
    assert_eq!(cluster.on(0), [0, 1], "nothing is known: one, and see");
    let observe = |cluster: &mut Cluster, a: usize, b: usize| {
        let Cluster { state, scheduler } = cluster;
        scheduler.observe(state, ids[a], ids[b], [0.8, 0.8])
    };
    assert_eq!(observe(&mut cluster, 0, 1), Verdict::Keep);
    cluster.decide();
    assert_eq!(cluster.on(0), [0, 1], "two of kind 0 were never together");
    observe(&mut cluster, 0, 2);
    let batch = cluster.decide();
    assert_eq!(cluster.on(0), [0, 1, 2], "one more at a time");
    let third = 1.0 / 3.0;
    assert_eq!(cluster.shares(0), [third; 3], "{batch:?}");
    // The three do less than the first two: the one that came last leaves, even if it is better.
    let all = [ids[0], ids[1], ids[2]];
    let Cluster { state, scheduler } = &mut cluster;
    let verdict = scheduler.observe_several(state, &all, &[0.6, 0.5, 0.5]);
    let Verdict::Unpack(Reason::Several {
        jobs: 3,
        sum,
        least,
    }) = verdict
    else {
        panic!("{verdict:?}");
    };
    assert!((sum - 1.6).abs() < 1e-9 && (least - 1.65).abs() < 1e-9);
    let batch = cluster.decide();
    assert!(
        matches!(batch[..], [.., Decision::Unpack { job, .. }] if job == ids[2]),
        "{batch:?}"
    );
    assert_eq!(
        (cluster.on(0), cluster.shares(0)),
        (vec![0, 1], vec![0.5; 2])
    );
    // Such three are not put together again, and others are: nobody has measured these.
    assert!(cluster.decide().is_empty());
    observe(&mut cluster, 1, 3);
    cluster.decide();
    assert_eq!(cluster.on(0), [0, 1, 3], "0, 1 and 1 are other kinds");
}

#[test]
fn where_the_first_one_ends_the_others_stay_and_nobody_moves() {
    let mut cluster = Cluster::new(2, "fifo-backfill", Some("util-sum:jobs=3"));
    let ids: Vec<JobId> = (0..6)
        .map(|_| cluster.job(0, |job| job.profile.busy = 0.3))
        .collect();
    cluster.decide();
    for host in [0, 1] {
        let gpu = cluster.state.job(ids[host]).run().unwrap().gpus[0].0;
        let before = cluster.on(gpu);
        assert_eq!((before.len(), before[0]), (3, ids[host].0));
        cluster.end(ids[host]);
        let batch = cluster.decide();
        let moves = |decision: &&Decision| !matches!(decision, Decision::Reshare { .. });
        assert_eq!(batch.iter().find(moves), None);
        assert_eq!(cluster.on(gpu), before[1..]);
        assert_eq!(cluster.shares(gpu), [0.5; 2]);
        let [first, second] = [1, 2].map(|at| JobId(before[at]));
        let beside = |id| cluster.state.job(id).run().unwrap().beside;
        assert_eq!((beside(first), beside(second)), (None, Some(first)));
    }
}

#[test]
fn a_protected_host_takes_more_opportunistic_jobs_only_while_it_keeps_its_speed() {
    let mut cluster = Cluster::new(1, "fifo-backfill", Some("opportunistic:jobs=4"));
    let host = cluster.job(0, |job| job.profile.busy = 0.3);
    let others: Vec<JobId> = (0..3)
        .map(|_| cluster.job(1, |job| job.profile.class = Class::Opportunistic))
        .collect();
    cluster.decide();
    assert_eq!(cluster.on(0), [0, 1], "one, until the host was measured");
    let Cluster { state, scheduler } = &mut cluster;
    scheduler.observe(state, host, others[0], [0.995, 0.4]);
    cluster.decide();
    // By what they cost: 0.990 beside two of them, 0.985 beside three.
    assert_eq!(cluster.on(0), [0, 1, 2, 3]);
    let all: Vec<JobId> = cluster.state.residents(GpuId(0)).collect();
    let Cluster { state, scheduler } = &mut cluster;
    let verdict = scheduler.observe_several(state, &all, &[0.9, 0.3, 0.3, 0.3]);
    assert_eq!(verdict, Verdict::Unpack(Reason::Host { rate: 0.9 }));
    cluster.decide();
    assert_eq!(cluster.on(0), [0, 1, 2]);
}

#[test]
fn parts_of_a_gpu_fill_it_and_are_what_their_jobs_get() {
    for order in ["fifo-backfill", "srtf"] {
        let mut cluster = Cluster::new(2, order, None);
        for _ in 0..4 {
            cluster.part(0.25, 1);
        }
        cluster.part(0.5, 1);
        cluster.decide();
        assert_eq!(cluster.on(0), [0, 1, 2, 3], "{order}");
        assert_eq!(cluster.shares(0), [0.25; 4], "{order}");
        assert_eq!((cluster.on(1), cluster.shares(1)), (vec![4], vec![0.5]));
        // No whole job beside them, and no part beside a whole job.
        let whole = cluster.job(0, |_| ());
        assert!(cluster.decide().is_empty(), "{order}");
        cluster.part(0.75, 1);
        assert!(cluster.decide().is_empty(), "{order}: 0.5 are left");
        cluster.part(0.5, 1);
        cluster.decide();
        assert_eq!(cluster.on(1), [4, 7], "{order}");
        for id in [4, 7] {
            cluster.end(JobId(id));
        }
        cluster.decide();
        assert_eq!(cluster.on(1), [whole.0], "{order}");
        // The first part ends: the next one is the host, and the others stay.
        cluster.end(JobId(0));
        cluster.decide();
        assert_eq!(cluster.on(0), [1, 2, 3], "{order}");
        cluster.part(0.25, 1);
        cluster.decide();
        assert_eq!(cluster.on(0), [1, 2, 3, 8], "{order}");
    }
}

#[test]
fn parts_go_where_least_is_left_and_memory_counts() {
    let mut cluster = Cluster::new(2, "fifo-backfill", None);
    cluster.part(0.6, 2);
    cluster.part(0.7, 2);
    cluster.decide();
    cluster.part(0.3, 2);
    cluster.decide();
    assert_eq!((cluster.on(0), cluster.on(1)), (vec![0], vec![1, 2]));
    // 0.4 of the time is left, and 14 GiB.
    cluster.part(0.2, 15);
    assert!(cluster.decide().is_empty());
    cluster.part(0.2, 14);
    cluster.decide();
    assert_eq!(cluster.on(0), [0, 4]);
    // More than any GPU has: it waits, and is in nobody's way.
    cluster.part(0.1, 17);
    cluster.end(JobId(0));
    cluster.end(JobId(4));
    cluster.decide();
    assert_eq!(cluster.on(0), [3], "0.2 with 15 GiB");
}

#[test]
fn a_short_part_comes_beside_those_that_run_and_a_long_one_makes_space() {
    let mut cluster = Cluster::new(1, "srtf", None);
    let long = cluster.part(0.5, 1);
    let longer = cluster.part(0.5, 1);
    cluster.state.job_mut(longer).work = 2000.0;
    cluster.scheduler.note(longer);
    cluster.decide();
    assert_eq!(cluster.on(0), [0, 1]);
    let short = cluster.part(0.5, 1);
    cluster.state.job_mut(short).work = 10.0;
    cluster.scheduler.note(short);
    let batch = cluster.decide();
    let stays = |decision: &Decision| decision.job() != long;
    assert!(batch.iter().all(stays), "{batch:?}");
    assert_eq!(cluster.on(0), [long.0, short.0]);
    // A whole job that is shorter takes the GPU, and gives it back.
    let whole = cluster.job(0, |job| job.work = 1.0);
    cluster.decide();
    assert_eq!(cluster.on(0), [whole.0]);
    cluster.end(whole);
    cluster.decide();
    assert_eq!(cluster.on(0).len(), 2);
    // Where a GPU is to spare, a short one displaces nobody.
    let mut cluster = Cluster::new(2, "srtf", None);
    cluster.part(0.5, 1);
    cluster.part(0.5, 1);
    cluster.decide();
    let short = cluster.part(0.7, 1);
    cluster.state.job_mut(short).work = 10.0;
    cluster.scheduler.note(short);
    let batch = cluster.decide();
    assert_eq!((batch.len(), cluster.on(0).len()), (1, 2), "{batch:?}");
}

/// Jobs that have started stay where they are, as those of a live cluster that cannot be restarted.
struct Bound(Own);

/// Where each of them is.
type Own = Arc<std::sync::Mutex<std::collections::BTreeMap<JobId, Vec<GpuId>>>>;

impl crate::cluster::Placer for Bound {
    fn name(&self) -> &'static str {
        "bound"
    }
    fn tags(&self) -> crate::cluster::Tags {
        catalogue::placer("anywhere", &Context::default())
            .unwrap()
            .tags()
    }
    fn place(
        &self,
        state: &ClusterState,
        free: &mut crate::cluster::FreeGpus,
        job: &Job,
        gpus: u32,
    ) -> Option<Vec<GpuId>> {
        if let Some(own) = self.bound(job.id) {
            let all = own.iter().all(|gpu| free.contains(*gpu));
            return all.then(|| {
                own.iter().for_each(|gpu| assert!(free.take(*gpu)));
                own
            });
        }
        let anywhere = catalogue::placer("anywhere", &Context::default()).unwrap();
        anywhere.place(state, free, job, gpus)
    }
    fn bound(&self, job: JobId) -> Option<Vec<GpuId>> {
        self.0.lock().unwrap().get(&job).cloned()
    }
    fn all_bound(&self) -> Vec<(JobId, Vec<GpuId>)> {
        let own = self.0.lock().unwrap();
        own.iter().map(|(id, gpus)| (*id, gpus.clone())).collect()
    }
    fn away_bytes(&self, _: &ClusterState, _: crate::cluster::NodeId) -> u64 {
        0
    }
}

#[test]
fn a_part_that_was_stopped_where_it_is_still_holds_its_memory() {
    let mut cluster = Cluster::new(1, "srtf", None);
    let own = Arc::new(std::sync::Mutex::default());
    let order = catalogue::order("srtf", &Context::default()).unwrap();
    cluster.scheduler = Scheduler::new(order, Box::new(Bound(Arc::clone(&own))), 1);
    let long = cluster.part(0.6, 10);
    cluster.decide();
    own.lock().unwrap().insert(long, vec![GpuId(0)]);
    // A shorter one would displace it, and 10 GiB stay.
    let mut short = |gib| {
        let id = cluster.part(0.6, gib);
        cluster.state.job_mut(id).work = 10.0;
        cluster.scheduler.note(id);
        cluster.decide();
        let there = cluster.on(0);
        if there == [id.0] {
            cluster.end(id);
            cluster.decide();
        }
        there
    };
    assert_eq!(short(7), [long.0], "17 GiB of 16");
    assert_eq!(short(6), [2], "it makes space for a time");
    assert_eq!(cluster.on(0), [long.0]);
}

#[test]
fn a_packer_leaves_parts_alone() {
    let mut cluster = Cluster::new(2, "fifo-backfill", Some("trial:jobs=4"));
    cluster.part(0.3, 1);
    cluster.part(0.3, 1);
    for _ in 0..3 {
        cluster.job(1, |_| ());
    }
    cluster.decide();
    assert_eq!((cluster.on(0), cluster.on(1)), (vec![0, 1], vec![2, 3]));
}

#[test]
fn a_state_refuses_what_no_gpu_can_hold() {
    let mut cluster = Cluster::new(1, "fifo-backfill", None);
    cluster.state = ClusterState::uniform(1, 1);
    let whole = |job: JobId| Decision::Place {
        job,
        gpus: vec![GpuId(0)],
        class: Class::Guaranteed,
        share: 0.1,
        mem_bytes: None,
    };
    let ids: Vec<JobId> = (0..3).map(|_| cluster.job(0, |_| ())).collect();
    let batch: Vec<Decision> = ids.iter().map(|id| whole(*id)).collect();
    let refused = cluster.state.apply(&batch).unwrap_err();
    assert!(refused.why.contains("one more on a GPU"), "{refused}");
    cluster.state.apply(&batch[..2]).unwrap();
    cluster.state.set_most_on_gpu(3);
    cluster.state.apply(&batch[2..]).unwrap();
    cluster.state.set_most_on_gpu(2);
    assert_eq!(cluster.state.most_on_gpu(), 3, "never fewer than are there");
    let part = cluster.part(0.5, 1);
    cluster.state.set_most_on_gpu(64);
    let refused = cluster.state.apply(&[whole(part)]).unwrap_err();
    assert!(refused.why.contains("parts and whole jobs"), "{refused}");
    ids.iter().for_each(|id| cluster.state.finish(*id));
    let (half, large) = (cluster.part(0.6, 1), cluster.part(0.1, 16));
    cluster.state.apply(&[whole(part)]).unwrap();
    let refused = cluster.state.apply(&[whole(half)]).unwrap_err();
    assert!(
        refused.why.contains("parts of a GPU would exceed"),
        "{refused}"
    );
    let refused = cluster.state.apply(&[whole(large)]).unwrap_err();
    assert!(refused.why.contains("memory of the parts"), "{refused}");
}

#[test]
fn a_bound_that_is_none_is_refused_with_its_value() {
    let complete = Context::complete();
    for packer in ["trial", "greedy", "util-sum", "score-tree", "opportunistic"] {
        for bound in [
            "0", "1", "65", "-3", "2.5", "nan", "inf", "1e300", "many", "",
        ] {
            let text = format!("{packer}:jobs={bound}");
            let Err(error) = catalogue::packer(&text, &complete) else {
                panic!("{text} was taken");
            };
            let error = error.to_string();
            assert!(error.contains("a whole number from 2 to 64"), "{error}");
        }
        for bound in [2, 3, 64] {
            let text = format!("{packer}:jobs={bound}");
            let built = catalogue::packer(&text, &complete).unwrap();
            assert_eq!(built.most_jobs(), bound, "{text}");
        }
        let plain = catalogue::packer(packer, &complete).unwrap();
        assert_eq!(plain.most_jobs(), 2);
    }
}

/// A cluster whose jobs are bound where they start, but for those that move.
struct Staying {
    cluster: Cluster,
    own: Own,
    /// Jobs that can be started anew.
    moves: Vec<JobId>,
}

impl Staying {
    fn new(gpus: u32, per_node: u32, choice: &Choice, context: &Context) -> Self {
        let own = Own::default();
        let mut policies = choice.policies(context).unwrap();
        policies.placer = Box::new(Bound(Arc::clone(&own)));
        let mut state = ClusterState::uniform(gpus, per_node);
        state.set_most_on_gpu(MOST_JOBS_ON_GPU);
        let scheduler = Scheduler::of(policies, 1);
        Self {
            cluster: Cluster { state, scheduler },
            own,
            moves: Vec::new(),
        }
    }

    fn job(&mut self, gib: u64, work_s: f64) -> JobId {
        self.cluster.job(0, |job| {
            job.profile.persistent_bytes = gib * GIB;
            job.work = work_s;
        })
    }

    /// Decides; who came is bound then.
    fn decide(&mut self) -> Vec<Decision> {
        let batch = self.cluster.decide();
        let mut own = self.own.lock().unwrap();
        for id in self.cluster.state.running() {
            let run = self.cluster.state.job(*id).run().unwrap();
            if !self.moves.contains(id) {
                let gpus = own.entry(*id).or_insert_with(|| run.gpus.clone());
                let sorted = |gpus: &[GpuId]| {
                    gpus.iter()
                        .copied()
                        .collect::<std::collections::BTreeSet<_>>()
                };
                assert_eq!(sorted(gpus), sorted(&run.gpus), "{id:?} was moved");
            }
        }
        batch
    }

    fn end(&mut self, id: JobId) {
        self.own.lock().unwrap().remove(&id);
        self.cluster.end(id);
    }

    /// Bytes on a GPU: of jobs that are bound there, and of those that run.
    fn bytes(&self, gpu: GpuId) -> u64 {
        let own = self.own.lock().unwrap();
        let state = &self.cluster.state;
        let there = state.active().filter(|job| {
            let runs = job.run().is_some_and(|run| run.gpus.contains(&gpu));
            runs || own.get(&job.id).is_some_and(|gpus| gpus.contains(&gpu))
        });
        there.map(|job| job.profile.peak_bytes()).sum()
    }
}

#[test]
fn a_whole_job_comes_beside_a_stopped_one_only_where_its_memory_fits() {
    // A job that one of 2 s sends away, and one of 1 s that does not fit beside it.
    let mut staying = Staying::new(1, 1, &Choice::new("srtf", "anywhere"), &Context::default());
    let long = staying.job(10, 1000.0);
    staying.decide();
    let large = staying.job(7, 1.0);
    let batch = staying.decide();
    assert!(batch.is_empty(), "17 GiB of 16: {batch:?}");
    assert_eq!(staying.cluster.on(0), [long.0]);
    // One that does goes before it, and the one that was stopped comes back.
    let small = staying.job(6, 2.0);
    staying.decide();
    assert_eq!(staying.cluster.on(0), [small.0]);
    assert_eq!(staying.bytes(GpuId(0)), 16 * GIB);
    staying.end(small);
    staying.decide();
    assert_eq!(staying.cluster.on(0), [long.0]);
    staying.end(long);
    staying.decide();
    assert_eq!(staying.cluster.on(0), [large.0]);
}

#[test]
fn a_job_that_one_gpu_has_no_memory_for_displaces_another_one() {
    // The longer one of two would have to go. Only beside the other one is there memory.
    let mut staying = Staying::new(2, 2, &Choice::new("srtf", "anywhere"), &Context::default());
    let shorter = staying.job(4, 500.0);
    let longer = staying.job(12, 1000.0);
    staying.decide();
    let first = staying.job(10, 1.0);
    let batch = staying.decide();
    assert_eq!(batch.len(), 2, "one goes and one comes: {batch:?}");
    assert_eq!(staying.cluster.on(0), [first.0]);
    assert_eq!(staying.cluster.on(1), [longer.0], "stopped for nobody");
    staying.end(first);
    staying.decide();
    assert_eq!(staying.cluster.on(0), [shorter.0]);
    // One that may be anywhere makes space.
    let anywhere = staying.job(1, 400.0);
    staying.moves.push(anywhere);
    staying.decide();
    assert_eq!(
        (staying.cluster.on(0), staying.cluster.on(1)),
        (vec![shorter.0], vec![anywhere.0])
    );
}

#[test]
fn a_packer_counts_what_stopped_jobs_hold() {
    let choice = Choice {
        packer: Some("greedy:jobs=3".into()),
        ..Choice::new("srtf", "anywhere")
    };
    let mut staying = Staying::new(1, 1, &choice, &context());
    let long = staying.job(6, 1000.0);
    staying.decide();
    // Two short ones have the GPU, and 6 GiB of it are not theirs.
    let (first, second) = (staying.job(5, 10.0), staying.job(6, 20.0));
    staying.decide();
    assert_eq!(staying.bytes(GpuId(0)), 11 * GIB);
    assert!(staying.cluster.on(0).contains(&first.0));
    assert!(!staying.cluster.on(0).contains(&second.0), "17 GiB of 16");
    let third = staying.job(5, 30.0);
    staying.decide();
    assert!(
        staying.cluster.on(0).contains(&third.0),
        "{:?}",
        staying.cluster.on(0)
    );
    assert_eq!(staying.bytes(GpuId(0)), 16 * GIB);
    for id in [first, third, long, second] {
        staying.end(id);
        staying.decide();
    }
}

/// Random histories of jobs of 1 to 16 GiB, most of which stay where they are stopped: memory is
/// promised once, nobody is stopped where nobody comes, and all of them end.
#[test]
fn memory_is_never_promised_twice_by_jobs_that_stay() {
    let orders = [
        "fifo",
        "fifo-backfill",
        "srtf",
        "srsf",
        "las",
        "2d-las:at=200",
        "worst-rho",
        "edf",
        "mlf",
        "drf",
        "tickets",
        "sjf",
    ];
    let mut stopped = 0;
    for seed in 0..240u64 {
        let order = orders[seed as usize % orders.len()];
        let packer =
            [None, None, Some("util-sum"), Some("util-sum:jobs=3")][seed as usize / 12 % 4];
        let choice = Choice {
            packer: packer.map(str::to_owned),
            ..Choice::new(order, "anywhere")
        };
        stopped += random_history(seed, &choice);
    }
    assert!(stopped > 500, "{stopped} stops say little");
}

/// How many were stopped.
fn random_history(seed: u64, choice: &Choice) -> usize {
    let mut random = crate::cluster::Random::new(seed);
    let per_node = [1, 2, 4][random.below(3)];
    let mut staying = Staying::new(4, per_node, choice, &context());
    let said = |staying: &Staying| {
        format!(
            "seed {seed}, {choice}, at {} s",
            staying.cluster.state.now_s()
        )
    };
    let (mut come, mut stopped, mut now_s) = (0, 0, 0.0);
    while come < 60 || staying.cluster.state.active().next().is_some() {
        now_s += 1.0 + random.below(20) as f64;
        assert!(now_s < 1e5, "{}: not all of them end", said(&staying));
        staying.cluster.state.advance(now_s);
        while come < 60 && random.below(3) > 0 {
            come += 1;
            let (gib, work_s) = (1 + random.below(16) as u64, 1.0 + random.below(200) as f64);
            let gpus = if random.below(8) == 0 { per_node } else { 1 };
            let part = random.below(12) == 0 && gpus == 1;
            let moves = random.below(4) == 0;
            let id = staying.cluster.job(random.below(2) as u32, |job| {
                job.gpus = gpus;
                job.profile.gpus = gpus;
                job.work = work_s;
                job.user = crate::cluster::UserId(random.below(3) as u32);
                job.deadline_s = Some(now_s + random.below(900) as f64);
                job.profile.busy = 0.3;
                job.profile.persistent_bytes = gib * GIB;
                job.part = part.then_some(Part {
                    share: 0.4,
                    bytes: gib * GIB,
                });
            });
            if moves {
                staying.moves.push(id);
            }
        }
        for id in staying.cluster.state.running().clone() {
            let job = staying.cluster.state.job(id);
            if job.left(now_s) <= 1e-6 {
                staying.end(id);
            }
        }
        let before = staying.cluster.state.clone();
        let batch = staying.decide();
        let running: Vec<JobId> = staying.cluster.state.running().iter().copied().collect();
        for id in running {
            let rate = 1.0 / staying.cluster.state.group(id).count() as f64;
            staying.cluster.state.set_rate(id, rate);
        }
        for gpu in (0..4).map(GpuId) {
            let bytes = staying.bytes(gpu);
            let there: Vec<_> = staying.cluster.state.residents(gpu).collect();
            let own = staying.own.lock().unwrap();
            assert!(
                bytes <= 16 * GIB,
                "{}: {} GiB on {gpu:?}, {there:?} of {own:?} after {batch:?}",
                said(&staying),
                bytes / GIB
            );
        }
        for decision in &batch {
            if let Decision::Suspend { job } = decision {
                stopped += 1;
                let gpus = &before.job(*job).run().unwrap().gpus;
                let came = batch
                    .iter()
                    .any(|other| other.gpus().iter().any(|gpu| gpus.contains(gpu)));
                assert!(
                    came,
                    "{}: {job:?} was stopped for nobody: {batch:?}",
                    said(&staying)
                );
            }
        }
    }
    stopped
}

#[test]
fn a_job_that_an_admission_refuses_gets_no_turn_in_the_same_batch() {
    let entries = catalogue::entries().into_iter();
    let allocators = entries.filter(|entry| entry.slot == catalogue::Slot::RoundAllocator);
    let mut seen = 0;
    for allocator in allocators.map(|entry| entry.name) {
        let mut choice = Choice::new(allocator, "anywhere");
        choice.admission = Some("minimum-share".into());
        let Ok(scheduler) = choice.scheduler(&Context::complete(), 1) else {
            continue;
        };
        let state = ClusterState::uniform(4, 4);
        let mut cluster = Cluster { state, scheduler };
        let hopeless = cluster.job(0, |job| job.deadline_s = Some(1.0));
        let other = cluster.job(0, |_| ());
        let batch = cluster.scheduler.decide(&cluster.state);
        let about = |id| batch.iter().filter(move |one| one.job() == id);
        let decided: Vec<_> = about(hopeless).collect();
        assert_eq!(
            decided,
            [&Decision::Reject { job: hopeless }],
            "{allocator}: space is free for it"
        );
        assert!(about(other).next().is_some(), "{allocator}: {batch:?}");
        cluster.state.apply(&batch).unwrap();
        seen += 1;
    }
    assert!(seen > 1, "{seen}");
}
