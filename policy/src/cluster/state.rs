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

impl Node {
    /// How much of the memory of the jobs of one GPU may be in the server's memory: the half of it
    /// that an arbiter takes for all of its devices, divided among them.
    #[must_use]
    pub fn away_bytes(&self) -> u64 {
        self.mem_bytes / 2 / u64::from(self.gpus.max(1))
    }
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

/// Jobs on one GPU at most, where nothing else is said.
pub const JOBS_ON_GPU: u32 = 2;
/// The most that may be said.
pub const MOST_JOBS_ON_GPU: u32 = 64;
/// Parts of a GPU are compared with this tolerance: they are sums of fractions.
pub const PART_TOLERANCE: f64 = 1e-6;

/// The cluster as policies see it.
#[derive(Clone, Debug)]
pub struct ClusterState {
    now_s: f64,
    nodes: Vec<Node>,
    node_of: Arc<[NodeId]>,
    /// `most_on_gpu` for each GPU, the one that came first first, the free ones last.
    residents: Vec<u32>,
    most_on_gpu: usize,
    free: FreeGpus,
    jobs: Vec<Job>,
    waiting: BTreeSet<JobId>,
    running: BTreeSet<JobId>,
    joiners: usize,
    parts: usize,
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
            residents: vec![NOBODY; node_of.len() * JOBS_ON_GPU as usize],
            most_on_gpu: JOBS_ON_GPU as usize,
            node_of: node_of.into(),
            nodes,
            jobs: Vec::new(),
            waiting: BTreeSet::new(),
            running: BTreeSet::new(),
            joiners: 0,
            parts: 0,
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

    /// Jobs on one GPU at most: [`Self::apply`] refuses more.
    #[must_use]
    pub fn most_on_gpu(&self) -> u32 {
        // CAST: at most 64.
        self.most_on_gpu as u32
    }

    /// Allows so many jobs on a GPU, from 2 to [`MOST_JOBS_ON_GPU`]; never fewer than are on one.
    pub fn set_most_on_gpu(&mut self, most: u32) {
        let old = self.most_on_gpu;
        let fullest = self.residents.chunks(old).map(|on_it| {
            // CAST: at most 64.
            on_it.iter().filter(|id| **id != NOBODY).count() as u32
        });
        let least = fullest.max().unwrap_or(0).max(JOBS_ON_GPU);
        let most = most.clamp(least, MOST_JOBS_ON_GPU) as usize;
        if most == old {
            return;
        }
        let mut residents = Vec::with_capacity(self.node_of.len() * most);
        for on_it in self.residents.chunks(old) {
            residents.extend((0..most).map(|at| on_it.get(at).copied().unwrap_or(NOBODY)));
        }
        (self.residents, self.most_on_gpu) = (residents, most);
    }

    fn on_gpu(&self, gpu: GpuId) -> &[u32] {
        let first = gpu.0 as usize * self.most_on_gpu;
        &self.residents[first..first + self.most_on_gpu]
    }

    /// Who holds a GPU, the one that came first first: [`Self::most_on_gpu`] jobs at most.
    pub fn residents(&self, gpu: GpuId) -> impl Iterator<Item = JobId> + '_ {
        let on_it = self.on_gpu(gpu).iter();
        on_it.take_while(|id| **id != NOBODY).map(|id| JobId(*id))
    }

    /// All jobs on the GPUs of one that runs, itself included, the one that came first first.
    pub fn group(&self, id: JobId) -> impl Iterator<Item = JobId> + '_ {
        let first = self.job(id).run().and_then(|run| run.gpus.first());
        first.into_iter().flat_map(|gpu| self.residents(*gpu))
    }

    /// The jobs that share GPUs with this one, the one that came first first.
    pub fn others(&self, id: JobId) -> impl Iterator<Item = JobId> + '_ {
        self.group(id).filter(move |other| *other != id)
    }

    /// Two jobs share GPUs.
    #[must_use]
    pub fn are_together(&self, a: JobId, b: JobId) -> bool {
        self.others(a).any(|other| other == b)
    }

    /// Jobs that asked for a part of a GPU, and are not over.
    #[must_use]
    pub fn parts(&self) -> usize {
        self.parts
    }

    /// How long a request would wait on a GPU, as its node says; `None`: no report, and only the
    /// scheduler's own jobs use it.
    #[must_use]
    pub fn wait_matrix(&self, gpu: GpuId) -> Option<&WaitMatrix> {
        self.waits.get(&gpu)
    }

    /// The job that shares GPUs with this one; of several the one that came first.
    #[must_use]
    pub fn partner(&self, id: JobId) -> Option<JobId> {
        self.others(id).next()
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
        self.parts += usize::from(job.part.is_some());
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
        let (gpus, part) = (u64::from(job.gpus), job.part.is_some());
        self.demand -= gpus;
        self.parts -= usize::from(part);
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
            let was_first = run
                .gpus
                .first()
                .is_some_and(|gpu| self.on_gpu(*gpu)[0] == id.0);
            for gpu in &run.gpus {
                let first = gpu.0 as usize * self.most_on_gpu;
                let on_it = &mut self.residents[first..first + self.most_on_gpu];
                if let Some(at) = on_it.iter().position(|other| *other == id.0) {
                    on_it.copy_within(at + 1.., at);
                    on_it[self.most_on_gpu - 1] = NOBODY;
                }
                if on_it[0] == NOBODY {
                    self.free.give(*gpu);
                }
            }
            if was_first && let Some(gpu) = run.gpus.first() {
                self.follow_first(*gpu);
            }
            self.running.remove(&id);
            self.waiting.insert(id);
        }
    }

    /// The one that came next is the host of the others now.
    fn follow_first(&mut self, gpu: GpuId) {
        if self.on_gpu(gpu)[1] == NOBODY {
            return;
        }
        let mut all: Vec<JobId> = self.residents(gpu).collect();
        let first = all.remove(0);
        for id in all {
            if let Phase::Running(run) = &mut self.jobs[id.0 as usize].phase
                && let Some(beside) = &mut run.beside
            {
                *beside = first;
            }
        }
    }

    fn claim(&mut self, id: JobId, run: Run) {
        for gpu in &run.gpus {
            let first = gpu.0 as usize * self.most_on_gpu;
            let on_it = &mut self.residents[first..first + self.most_on_gpu];
            // `check` has found space.
            if let Some(at) = on_it.iter().position(|other| *other == NOBODY) {
                on_it[at] = id.0;
                if at == 0 {
                    self.free.take(*gpu);
                }
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
    /// jobs on one than [`Self::most_on_gpu`], parts of one that exceed it, the number of GPUs of a
    /// running job changed by a migration. Then nothing changes.
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
        gpus.iter().all(|gpu| self.on_gpu(*gpu)[0] == id.0)
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
        // CAST: at most 64.
        let most = self.most_on_gpu as i32;
        for decision in batch {
            for gpu in decision.gpus() {
                if self.residents(*gpu).count() as i32 + load[gpu] > most {
                    return Err(Refused {
                        job: decision.job(),
                        why: "it would be one more on a GPU than may be there",
                    });
                }
            }
        }
        self.check_parts(batch)
    }

    /// What the jobs on a GPU asked for of it adds up to one GPU at most, in time and in memory.
    fn check_parts(&self, batch: &[Decision]) -> Result<(), Refused> {
        if self.parts == 0 {
            return Ok(());
        }
        let mut coming: BTreeMap<GpuId, Vec<JobId>> = BTreeMap::new();
        let mut leaving: BTreeSet<JobId> = BTreeSet::new();
        for decision in batch {
            for gpu in decision.gpus() {
                coming.entry(*gpu).or_default().push(decision.job());
            }
            if !matches!(decision, Decision::Reshare { .. }) {
                leaving.insert(decision.job());
            }
        }
        for decision in batch {
            for gpu in decision.gpus() {
                let stay = self.residents(*gpu).filter(|id| !leaving.contains(id));
                let (mut share, mut bytes, mut others) = (0.0, 0u64, false);
                for id in stay.chain(coming[gpu].iter().copied()) {
                    match &self.job(id).part {
                        Some(part) => {
                            share += part.share;
                            bytes = bytes.saturating_add(part.bytes);
                        }
                        None => others = true,
                    }
                }
                let there = self.nodes[self.node_of(*gpu).0 as usize].gpu_bytes;
                let refuse = |why| {
                    Err(Refused {
                        job: decision.job(),
                        why,
                    })
                };
                if share > 0.0 && others {
                    return refuse("parts and whole jobs would be on one GPU");
                }
                if share > 1.0 + PART_TOLERANCE {
                    return refuse("the parts of a GPU would exceed it");
                }
                if share > 0.0 && there > 0 && bytes > there {
                    return refuse("the memory of the parts of a GPU would exceed it");
                }
            }
        }
        Ok(())
    }
}
