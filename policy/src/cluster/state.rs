//! The state of a cluster: nodes, GPUs, jobs, and a clock that is a number. The owner of a state
//! (the live hook, the simulator) reports what happened; policies only read it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::wait::WaitMatrix;
use super::{Decision, FreeGpus, Job, JobId, Phase, Run, Speed};

/// A GPU: its place in the list of all GPUs, node by node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GpuId(pub u32);

/// A node: its place in the list of nodes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub u32);

/// A type of GPU.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GpuType(pub u16);

/// A machine.
#[derive(Clone, PartialEq, Debug)]
pub struct Node {
    /// Its first GPU; the others follow.
    pub first: GpuId,
    /// Number of its GPUs, at most 64.
    pub gpus: u32,
    /// Their type.
    pub kind: GpuType,
    /// Memory of each GPU, in bytes.
    pub gpu_bytes: u64,
    /// CPU cores.
    pub cpus: f64,
    /// Memory in bytes.
    pub mem_bytes: u64,
}

/// A batch of decisions that cannot be done; nothing of it was.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refused {
    /// The job at which it failed.
    pub job: JobId,
    /// Why.
    pub why: &'static str,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "decision about job {}: {}", self.job.0, self.why)
    }
}

impl std::error::Error for Refused {}

const NOBODY: u32 = u32::MAX;

/// The cluster as policies see it.
#[derive(Clone, Debug)]
pub struct ClusterState {
    now_s: f64,
    nodes: Vec<Node>,
    node_of: Arc<[NodeId]>,
    residents: Vec<[u32; 2]>,
    free: FreeGpus,
    jobs: Vec<Job>,
    waiting: BTreeSet<JobId>,
    running: BTreeSet<JobId>,
    joiners: usize,
    demand: u64,
    contention_s: f64,
    waits: BTreeMap<GpuId, WaitMatrix>,
    /// Seconds that a job loses each time it is given GPUs again.
    pub restart_s: f64,
    /// Seconds that a job loses when it is given GPUs for the first time.
    pub start_s: f64,
}

impl ClusterState {
    /// An empty cluster of these nodes.
    ///
    /// # Panics
    /// Where a node has no GPU or more than 64.
    #[must_use]
    pub fn new(mut nodes: Vec<Node>) -> Self {
        let mut node_of = Vec::new();
        for (index, node) in nodes.iter_mut().enumerate() {
            assert!((1..=64).contains(&node.gpus), "a node has 1 to 64 GPUs");
            node.first = GpuId(node_of.len() as u32);
            node_of.extend((0..node.gpus).map(|_| NodeId(index as u32)));
        }
        Self {
            now_s: 0.0,
            free: FreeGpus::all(&nodes),
            residents: vec![[NOBODY; 2]; node_of.len()],
            node_of: node_of.into(),
            nodes,
            jobs: Vec::new(),
            waiting: BTreeSet::new(),
            running: BTreeSet::new(),
            joiners: 0,
            demand: 0,
            contention_s: 0.0,
            waits: BTreeMap::new(),
            restart_s: 0.0,
            start_s: 0.0,
        }
    }

    /// `gpus` GPUs of one type, on nodes of `per_node`.
    #[must_use]
    pub fn uniform(gpus: u32, per_node: u32) -> Self {
        let node = |gpus| Node {
            first: GpuId(0),
            gpus,
            kind: GpuType(0),
            gpu_bytes: 16 << 30,
            cpus: 3.0 * f64::from(gpus),
            mem_bytes: (62_500_000_000 / 1000 * 1000) * u64::from(gpus),
        };
        let per_node = per_node.clamp(1, 64);
        let mut nodes: Vec<Node> = (0..gpus / per_node).map(|_| node(per_node)).collect();
        if !gpus.is_multiple_of(per_node) {
            nodes.push(node(gpus % per_node));
        }
        Self::new(nodes)
    }

    /// Now, in seconds.
    #[must_use]
    pub fn now_s(&self) -> f64 {
        self.now_s
    }

    /// All nodes.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The node of a GPU.
    #[must_use]
    pub fn node_of(&self, gpu: GpuId) -> NodeId {
        self.node_of[gpu.0 as usize]
    }

    /// The type of a GPU.
    #[must_use]
    pub fn type_of(&self, gpu: GpuId) -> GpuType {
        self.nodes[self.node_of(gpu).0 as usize].kind
    }

    /// Number of GPUs.
    #[must_use]
    pub fn gpus(&self) -> u32 {
        self.node_of.len() as u32
    }

    /// GPUs that nobody holds.
    #[must_use]
    pub fn free(&self) -> &FreeGpus {
        &self.free
    }

    /// A job, also one that is done.
    #[must_use]
    pub fn job(&self, id: JobId) -> &Job {
        &self.jobs[id.0 as usize]
    }

    /// For what the owner of the state learns about a job: its profile, its deadline, its weight.
    pub fn job_mut(&mut self, id: JobId) -> &mut Job {
        &mut self.jobs[id.0 as usize]
    }

    /// Every job that ever came.
    #[must_use]
    pub fn jobs(&self) -> &[Job] {
        &self.jobs
    }

    /// Jobs that hold no GPU and want some.
    #[must_use]
    pub fn waiting(&self) -> &BTreeSet<JobId> {
        &self.waiting
    }

    /// Jobs that hold GPUs.
    #[must_use]
    pub fn running(&self) -> &BTreeSet<JobId> {
        &self.running
    }

    /// Waiting and running jobs, by number.
    pub fn active(&self) -> impl Iterator<Item = &Job> + '_ {
        let both = self.waiting.iter().chain(&self.running);
        both.map(|id| self.job(*id))
    }

    /// GPUs that all waiting and running jobs ask for.
    #[must_use]
    pub fn demand(&self) -> u64 {
        self.demand
    }

    /// Number of running jobs that came second onto their GPUs.
    #[must_use]
    pub fn joiners(&self) -> usize {
        self.joiners
    }

    /// How many GPUs a run has on each of its nodes, node by node as they stand in its list.
    #[must_use]
    pub fn placement(&self, run: &Run) -> Vec<u32> {
        let mut placement: Vec<(NodeId, u32)> = Vec::new();
        for gpu in &run.gpus {
            let node = self.node_of(*gpu);
            match placement.iter_mut().find(|(known, _)| *known == node) {
                Some((_, count)) => *count += 1,
                None => placement.push((node, 1)),
            }
        }
        placement.into_iter().map(|(_, count)| count).collect()
    }

    /// Who holds a GPU: up to two jobs, the one that came first first.
    pub fn residents(&self, gpu: GpuId) -> impl Iterator<Item = JobId> + '_ {
        let residents = self.residents[gpu.0 as usize];
        residents.into_iter().filter(|id| *id != NOBODY).map(JobId)
    }

    /// How long a request would wait on a GPU, as its node says; `None`: no report, and only the
    /// scheduler's own jobs use it.
    #[must_use]
    pub fn wait_matrix(&self, gpu: GpuId) -> Option<&WaitMatrix> {
        self.waits.get(&gpu)
    }

    /// The job that shares GPUs with this one.
    #[must_use]
    pub fn partner(&self, id: JobId) -> Option<JobId> {
        let gpu = *self.job(id).run()?.gpus.first()?;
        self.residents(gpu).find(|other| *other != id)
    }

    /// Integral over time of max(1, GPUs asked for / GPUs there are): how contended the cluster
    /// was.
    #[must_use]
    pub fn contention_s(&self) -> f64 {
        self.contention_s
    }

    /// Mean contention since a job came, at least 1: how many jobs like it would share an evenly
    /// divided cluster.
    #[must_use]
    pub fn contention(&self, job: &Job) -> f64 {
        let life = self.now_s - job.arrival_s;
        if life > 0.0 {
            ((self.contention_s - job.contention_at_arrival_s) / life).max(1.0)
        } else {
            (self.demand as f64 / f64::from(self.gpus())).max(1.0)
        }
    }

    /// Finish-time fairness of Themis (NSDI'20) if the job ran undisturbed from now on: its time in
    /// the shared cluster over its time in an evenly divided one, which is its duration alone times
    /// the mean contention over its life.
    #[must_use]
    pub fn rho(&self, job: &Job) -> f64 {
        let shared = self.now_s - job.arrival_s + job.left_s(self.now_s);
        shared / (job.duration_s() * self.contention(job))
    }

    // What happens.

    /// A node tells how long a request would wait on one of its GPUs, or that it does not any more.
    pub fn set_wait_matrix(&mut self, gpu: GpuId, matrix: Option<WaitMatrix>) {
        match matrix {
            Some(matrix) => drop(self.waits.insert(gpu, matrix)),
            None => drop(self.waits.remove(&gpu)),
        }
    }

    /// Let time pass. Time does not go backwards.
    pub fn advance(&mut self, now_s: f64) {
        let step = now_s - self.now_s;
        if step > 0.0 {
            self.contention_s += step * (self.demand as f64 / f64::from(self.gpus())).max(1.0);
            self.now_s = now_s;
        }
    }

    /// A job comes, now. The state numbers it.
    pub fn arrive(&mut self, mut job: Job) -> JobId {
        let id = JobId(self.jobs.len() as u32);
        job.id = id;
        job.phase = Phase::Waiting {
            since_s: self.now_s,
        };
        job.profile = job.profile.sane();
        job.contention_at_arrival_s = self.contention_s - (self.now_s - job.arrival_s).max(0.0);
        self.demand += u64::from(job.gpus);
        self.jobs.push(job);
        self.waiting.insert(id);
        id
    }

    /// A job is over, done or not.
    pub fn finish(&mut self, id: JobId) {
        if self.job(id).is_done() {
            return;
        }
        self.release(id);
        let now_s = self.now_s;
        let job = self.job_mut(id);
        job.phase = Phase::Done { at_s: now_s };
        let gpus = u64::from(job.gpus);
        self.demand -= gpus;
        self.waiting.remove(&id);
    }

    /// A running job's speed is another from now on, in units of its work per second.
    pub fn set_rate(&mut self, id: JobId, rate: f64) {
        let now_s = self.now_s;
        let job = self.job_mut(id);
        job.settle(now_s);
        if let Phase::Running(run) = &mut job.phase {
            run.rate = rate;
        }
    }

    /// A job reports anew how fast it is on how many GPUs, and how many it may get at most. Its
    /// progress stays.
    pub fn set_speed(&mut self, id: JobId, speed: Speed, most_gpus: u32) {
        let job = self.job_mut(id);
        (job.speed, job.most_gpus) = (speed, most_gpus.max(1));
    }

    /// Everybody off this job's GPUs of its own; it waits then.
    fn release(&mut self, id: JobId) {
        let now_s = self.now_s;
        let job = &mut self.jobs[id.0 as usize];
        job.settle(now_s);
        let waiting = Phase::Waiting { since_s: now_s };
        if let Phase::Running(run) = std::mem::replace(&mut job.phase, waiting) {
            self.joiners -= usize::from(run.beside.is_some());
            for gpu in run.gpus {
                let residents = &mut self.residents[gpu.0 as usize];
                if residents[0] == id.0 {
                    residents[0] = residents[1];
                }
                residents[1] = NOBODY;
                if residents[0] == NOBODY {
                    self.free.give(gpu);
                }
            }
            self.running.remove(&id);
            self.waiting.insert(id);
        }
    }

    fn claim(&mut self, id: JobId, run: Run) {
        for gpu in &run.gpus {
            let residents = &mut self.residents[gpu.0 as usize];
            if residents[0] == NOBODY {
                residents[0] = id.0;
                self.free.take(*gpu);
            } else {
                residents[1] = id.0;
            }
        }
        self.joiners += usize::from(run.beside.is_some());
        self.waiting.remove(&id);
        self.running.insert(id);
        let job = self.job_mut(id);
        job.starts += 1;
        job.phase = Phase::Running(run);
    }

    /// Applies a batch of decisions as one step: first all releases, then all placements. A job
    /// that runs afterwards has rate 0 until [`Self::set_rate`]: its speed is not decided here.
    ///
    /// # Errors
    /// [`Refused`] if the batch is impossible: a job twice or unknown or over, a GPU twice, more
    /// than two jobs on one, the number of GPUs of a running job changed by a migration. Then
    /// nothing changes.
    pub fn apply(&mut self, batch: &[Decision]) -> Result<(), Refused> {
        self.check(batch)?;
        for decision in batch {
            if !matches!(decision, Decision::Reshare { .. }) {
                self.release(decision.job());
            }
        }
        for decision in batch {
            let (id, gpus) = (decision.job(), decision.gpus());
            let Some(first) = gpus.first() else { continue };
            let (share, class) = match decision {
                Decision::Place { share, class, .. } | Decision::Resume { share, class, .. } => {
                    (*share, *class)
                }
                Decision::Migrate { share, .. } => (*share, self.job(id).profile.class),
                _ => (1.0, self.job(id).profile.class),
            };
            let beside = self.residents(*first).next();
            let cold = if self.job(id).starts > 0 {
                self.restart_s
            } else {
                self.start_s
            };
            let run = Run {
                since_s: self.now_s,
                warm_s: self.now_s + cold,
                rate: 0.0,
                gpus: gpus.to_vec(),
                share,
                class,
                beside,
            };
            self.claim(id, run);
        }
        for decision in batch {
            if let Decision::Reject { job } = decision {
                self.finish(*job);
            }
        }
        // Last, so that a job that is by itself on its GPUs now is no joiner any more.
        for decision in batch {
            if let Decision::Reshare { job, share } = decision {
                let now_first = self.first_resident(*job);
                if let Phase::Running(run) = &mut self.jobs[job.0 as usize].phase {
                    run.share = *share;
                    if now_first && run.beside.take().is_some() {
                        self.joiners -= 1;
                    }
                }
            }
        }
        Ok(())
    }

    /// It stands first on its GPUs.
    fn first_resident(&self, id: JobId) -> bool {
        let gpus = self.job(id).run().map_or(&[][..], |run| &run.gpus);
        gpus.iter()
            .all(|gpu| self.residents[gpu.0 as usize][0] == id.0)
    }

    fn check(&self, batch: &[Decision]) -> Result<(), Refused> {
        let mut seen = BTreeSet::new();
        // How many of the batch will be on each GPU, less those that leave it.
        let mut load: BTreeMap<GpuId, i32> = BTreeMap::new();
        for decision in batch {
            let id = decision.job();
            let refuse = |why| Err(Refused { job: id, why });
            let Some(job) = self.jobs.get(id.0 as usize) else {
                return refuse("there is no such job");
            };
            if !seen.insert(id) {
                return refuse("it is decided about twice in one batch");
            }
            match (&job.phase, decision) {
                (Phase::Done { .. }, _) => return refuse("it is over"),
                (Phase::Running(_), Decision::Place { .. } | Decision::Resume { .. }) => {
                    return refuse("it runs already");
                }
                (
                    Phase::Waiting { .. },
                    Decision::Suspend { .. }
                    | Decision::Migrate { .. }
                    | Decision::Unpack { .. }
                    | Decision::Reshare { .. }
                    | Decision::Resize { .. },
                ) => return refuse("it does not run"),
                _ => {}
            }
            let gpus = decision.gpus();
            if matches!(decision, Decision::Reshare { .. }) {
                continue;
            }
            let stops = matches!(
                decision,
                Decision::Suspend { .. } | Decision::Unpack { .. } | Decision::Reject { .. }
            );
            if gpus.is_empty() != stops {
                return refuse("it is placed on no GPU at all");
            }
            if let (Decision::Migrate { .. }, Some(run)) = (decision, job.run())
                && run.gpus.len() != gpus.len()
            {
                return refuse("it is moved to another number of GPUs");
            }
            for gpu in job.run().iter().flat_map(|run| &run.gpus) {
                *load.entry(*gpu).or_default() -= 1;
            }
            let mut own = BTreeSet::new();
            for gpu in gpus {
                if gpu.0 >= self.gpus() {
                    return refuse("it is placed on a GPU that does not exist");
                }
                if !own.insert(*gpu) {
                    return refuse("it is placed on one GPU twice");
                }
                *load.entry(*gpu).or_default() += 1;
            }
        }
        for decision in batch {
            for gpu in decision.gpus() {
                if self.residents(*gpu).count() as i32 + load[gpu] > 2 {
                    return Err(Refused {
                        job: decision.job(),
                        why: "it would be the third on a GPU",
                    });
                }
            }
        }
        Ok(())
    }
}
