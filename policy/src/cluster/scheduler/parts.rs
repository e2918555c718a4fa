//! Jobs that ask for a part of a GPU: several are on one, as far as their parts and their memory
//! add up to no more than it has. Nobody guesses how they get on: their nodes enforce what each of
//! them asked for.
//!
//! A GPU carries parts, or whole jobs with those that a packer puts beside them, and never both. A
//! job that runs keeps its GPU. One that comes goes where least is left over (best fit), and opens
//! another GPU only where none that is open takes it.

use std::collections::{BTreeMap, BTreeSet};

use super::held::Held;
use super::{ClusterState, GpuId, Job, JobId, Placer};
use crate::cluster::job::Run;
use crate::cluster::{PART_TOLERANCE, Part};

/// A GPU that is divided.
#[derive(Clone, Debug)]
struct Divided {
    /// Which one; `None`: the placer will say.
    gpu: Option<GpuId>,
    share: f64,
    bytes: u64,
    /// The first one is its host.
    jobs: Vec<JobId>,
}

/// All GPUs that are divided.
pub(super) struct Parts<'a> {
    state: &'a ClusterState,
    placer: &'a dyn Placer,
    open: Vec<Divided>,
    by_gpu: BTreeMap<GpuId, usize>,
    /// Memory of jobs that stay where they are, and hold it when they are stopped, too.
    held: &'a Held,
    /// Those that have been given a part.
    given: BTreeSet<JobId>,
    /// GPUs on which such jobs are, with what those that run asked for, and nobody has been given a
    /// part yet.
    later: BTreeMap<GpuId, f64>,
}

impl<'a> Parts<'a> {
    pub(super) fn new(state: &'a ClusterState, placer: &'a dyn Placer, held: &'a Held) -> Self {
        let mut later = BTreeMap::new();
        if state.parts() > 0 {
            for (id, gpus) in held.all() {
                for gpu in gpus.iter().filter(|_| state.job(*id).part.is_some()) {
                    later.entry(*gpu).or_default();
                }
            }
            for id in state.running() {
                let job = state.job(*id);
                if let (Some(part), Some(run)) = (&job.part, job.run()) {
                    for gpu in &run.gpus {
                        *later.entry(*gpu).or_default() += part.share;
                    }
                }
            }
        }
        Self {
            state,
            placer,
            open: Vec::new(),
            by_gpu: BTreeMap::new(),
            held,
            given: BTreeSet::new(),
            later,
        }
    }

    /// A running job stays where it is. `Some`: that GPU has just been opened.
    pub(super) fn stays(&mut self, job: &Job, run: &Run) -> Option<usize> {
        let (Some(part), Some(gpu)) = (&job.part, run.gpus.first()) else {
            return None;
        };
        match self.by_gpu.get(gpu) {
            Some(at) => {
                self.put(*at, job.id, part);
                None
            }
            None => Some(self.open(Some(*gpu), job.id, part)),
        }
    }

    /// A part for a job. `None`: there is none; `Some(Some(_))`: another GPU was opened for it, of
    /// the `left` ones that nobody has been given.
    pub(super) fn give(
        &mut self,
        job: &Job,
        left: u32,
        taken: &BTreeSet<GpuId>,
    ) -> Option<Option<usize>> {
        let part = job.part.as_ref()?;
        let bound = self.placer.bound(job.id);
        let own = bound.as_ref().and_then(|gpus| gpus.first().copied());
        let here = job.run().and_then(|run| run.gpus.first().copied());
        if let Some(gpu) = own.or(here) {
            match self.by_gpu.get(&gpu) {
                Some(at) if self.takes(*at, part, job.id) => {
                    self.put(*at, job.id, part);
                    return Some(None);
                }
                None if left > 0 && !taken.contains(&gpu) => {
                    return Some(Some(self.open(Some(gpu), job.id, part)));
                }
                _ if own.is_some() => return None,
                _ => {}
            }
        }
        let rest = |at: &usize| 1.0 - self.open[*at].share;
        let best = (0..self.open.len())
            .filter(|at| self.takes(*at, part, job.id))
            .min_by(|a, b| rest(a).total_cmp(&rest(b)).then(a.cmp(b)));
        if let Some(at) = best {
            self.put(at, job.id, part);
            return Some(None);
        }
        if left == 0 {
            return None;
        }
        // Where it may be beside those that run there; else on a GPU that nobody runs on, if one is
        // to spare; else where fewest have to make space.
        let here = self.later.iter();
        let here =
            here.filter(|(gpu, _)| self.holds(**gpu, part.bytes, job.id) && !taken.contains(gpu));
        let (mut beside, mut others) = (Vec::new(), Vec::new());
        for (gpu, share) in here {
            let fits = *share + part.share <= 1.0 + PART_TOLERANCE;
            if fits { &mut beside } else { &mut others }.push((*share, *gpu));
        }
        let by_share = |(a, _): &(f64, GpuId), (b, _): &(f64, GpuId)| a.total_cmp(b);
        let to_spare = left as usize > self.later.len();
        let gpu = beside.into_iter().max_by(by_share).or_else(|| {
            let others = others.into_iter().filter(|_| !to_spare);
            others.min_by(by_share)
        });
        let gpu = gpu.map(|(_, gpu)| gpu);
        if gpu.is_none() && !to_spare {
            return None;
        }
        Some(Some(self.open(gpu, job.id, part)))
    }

    fn holds(&self, gpu: GpuId, bytes: u64, id: JobId) -> bool {
        let has = self.state.nodes()[self.state.node_of(gpu).0 as usize].gpu_bytes;
        let here = |other: JobId| other == id || self.given.contains(&other);
        let held = self.held.bytes(self.state, gpu, here);
        has == 0 || bytes.saturating_add(held) <= has
    }

    fn takes(&self, at: usize, part: &Part, id: JobId) -> bool {
        let one = &self.open[at];
        let bytes = one.bytes.saturating_add(part.bytes);
        // One without a place is looked at again once it has one.
        one.share + part.share <= 1.0 + PART_TOLERANCE
            && one.gpu.is_none_or(|gpu| self.holds(gpu, bytes, id))
            && one.jobs.len() < self.state.most_on_gpu() as usize
    }

    fn open(&mut self, gpu: Option<GpuId>, id: JobId, part: &Part) -> usize {
        let at = self.open.len();
        self.open.push(Divided {
            gpu,
            share: part.share,
            bytes: part.bytes,
            jobs: vec![id],
        });
        self.given.insert(id);
        if let Some(gpu) = gpu {
            self.by_gpu.insert(gpu, at);
            self.later.remove(&gpu);
        }
        at
    }

    fn put(&mut self, at: usize, id: JobId, part: &Part) {
        let runs_on = |id: JobId| self.state.job(id).run().and_then(|run| run.gpus.first());
        self.given.insert(id);
        let one = &mut self.open[at];
        one.share += part.share;
        one.bytes = one.bytes.saturating_add(part.bytes);
        one.jobs.push(id);
        // The host is one that is there already, so that nobody moves.
        let gpu = one.gpu.as_ref();
        if gpu.is_some() && runs_on(one.jobs[0]) != gpu && runs_on(id) == gpu {
            let last = one.jobs.len() - 1;
            one.jobs.swap(0, last);
        }
    }

    /// GPUs on which such jobs are, and that nobody was given a part of.
    pub(super) fn closed(&self) -> BTreeSet<GpuId> {
        self.later.keys().copied().collect()
    }

    /// Where a divided GPU is; `None`: nobody has said.
    pub(super) fn gpu(&self, at: usize) -> Option<GpuId> {
        self.open.get(at)?.gpu
    }

    /// It is this one.
    pub(super) fn locate(&mut self, at: usize, gpu: GpuId) {
        self.open[at].gpu = Some(gpu);
        self.by_gpu.insert(gpu, at);
        self.later.remove(&gpu);
    }

    /// The one that was opened last, for this job, is no GPU.
    pub(super) fn close(&mut self, id: JobId) {
        self.open.pop();
        self.given.remove(&id);
    }

    /// Divided GPUs that are known, each with the job that has it of its own.
    pub(super) fn places(&self) -> Vec<(GpuId, JobId)> {
        let own = self.by_gpu.iter();
        own.filter_map(|(gpu, at)| Some((*gpu, self.host(*at)?)))
            .collect()
    }

    /// This GPU is divided.
    pub(super) fn has(&self, gpu: GpuId) -> bool {
        self.by_gpu.contains_key(&gpu)
    }

    /// The job that has a divided GPU of its own.
    pub(super) fn host(&self, at: usize) -> Option<JobId> {
        self.open.get(at)?.jobs.first().copied()
    }

    /// All others, each with that one.
    pub(super) fn joiners(&self) -> Vec<(JobId, JobId)> {
        let of_one = |one: &Divided| {
            let host = one.jobs.first().copied();
            let others = one.jobs.iter().skip(1).copied();
            let pairs: Vec<_> = others.zip(std::iter::repeat(host)).collect();
            pairs
        };
        let all = self.open.iter().flat_map(of_one);
        all.filter_map(|(id, host)| Some((id, host?))).collect()
    }
}
