//! The decision of a scheduler with a packer.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{
    ClusterState, Decision, FreeGpus, GpuId, JobId, Packer, Placer, Random, Scheduler, Step,
    gpu_type, start, walk,
};
use crate::Class;
use crate::cluster::{GpuType, JobType};

/// Hosts of one gang size that a packer cannot tell apart.
type Bucket = (JobType, bool, GpuType);

impl Scheduler {
    /// Chooses jobs with GPUs of their own, then pairs, then moves every job to its place.
    pub(super) fn pack(&mut self, state: &ClusterState, batch: &mut Vec<Decision>) {
        let (owners, rest) = self.choose(state);
        let joiners = self.pair(state, &owners, &rest);
        self.settle(state, &owners, &joiners, batch);
    }

    /// Owners and the others, both in order.
    fn choose(&self, state: &ClusterState) -> (Vec<JobId>, Vec<JobId>) {
        let skips = self.order.skips();
        let mut owners: Vec<JobId> = Vec::new();
        let mut left = state.gpus();
        // GPUs that owners have: a job that has to stay on one of them gets none of its own.
        let mut taken: BTreeSet<GpuId> = BTreeSet::new();
        if !self.order.preemptive() {
            for id in state.running() {
                let job = state.job(*id);
                if let Some(run) = job.run().filter(|run| run.beside.is_none()) {
                    owners.push(*id);
                    left -= job.gpus.min(left);
                    taken.extend(&run.gpus);
                }
            }
        }
        let (mut rest, mut blocked) = (Vec::new(), false);
        walk(&self.queues, |id, gpus| {
            let bound = self.placer.bound(id);
            let stuck = |own: &Vec<GpuId>| own.iter().any(|gpu| taken.contains(gpu));
            if bound.as_ref().is_some_and(stuck) {
                rest.push(id);
            } else if gpus <= left && !blocked {
                left -= gpus;
                owners.push(id);
                let here = state.job(id).run().filter(|run| run.beside.is_none());
                taken.extend(here.iter().flat_map(|run| &run.gpus));
                taken.extend(bound.iter().flatten());
            } else {
                blocked |= !skips;
                rest.push(id);
            }
            Step::Next
        });
        (owners, rest)
    }

    /// Joiners with their hosts.
    fn pair(
        &mut self,
        state: &ClusterState,
        owners: &[JobId],
        rest: &[JobId],
    ) -> Vec<(JobId, JobId)> {
        let Some(packer) = self.packer.as_deref() else {
            return Vec::new();
        };
        if state.demand() <= u64::from(state.gpus()) {
            return Vec::new();
        }
        let mut hosts: BTreeSet<JobId> = owners.iter().copied().collect();
        let mut joiners = Vec::new();
        let mut open: Vec<JobId> = Vec::new();
        for id in rest {
            let job = state.job(*id);
            let host = job.run().and_then(|run| run.beside);
            match host {
                Some(host)
                    if packer.keeps_pairs()
                        && state.partner(*id) == Some(host)
                        && hosts.contains(&host)
                        && refusal(packer, state, host, *id).is_none() =>
                {
                    hosts.remove(&host);
                    joiners.push((*id, host));
                }
                _ => open.push(*id),
            }
        }
        let mut free_hosts: HashMap<u32, BTreeMap<Bucket, Vec<JobId>>> = HashMap::new();
        // Backwards, so that popping takes the first.
        for id in owners.iter().rev().filter(|id| hosts.contains(id)) {
            let profile = &state.job(*id).profile;
            let guaranteed = profile.class == Class::Guaranteed;
            let bucket = (profile.kind, guaranteed, gpu_type(state, *id));
            let by_size = free_hosts.entry(state.job(*id).gpus).or_default();
            by_size.entry(bucket).or_default().push(*id);
        }
        for id in open {
            let job = state.job(id);
            let Some(buckets) = free_hosts.get_mut(&job.gpus) else {
                continue;
            };
            if let Some(host) = best_host(
                (packer, &*self.placer),
                state,
                buckets,
                id,
                &mut self.random,
            ) {
                joiners.push((id, host));
                if buckets.is_empty() {
                    free_hosts.remove(&job.gpus);
                }
            }
        }
        joiners
    }

    /// From who is where to who shall be where.
    fn settle(
        &mut self,
        state: &ClusterState,
        owners: &[JobId],
        joiners: &[(JobId, JobId)],
        batch: &mut Vec<Decision>,
    ) {
        let mut free = FreeGpus::all(state.nodes());
        let mut at: HashMap<JobId, Vec<GpuId>> = HashMap::new();
        let with_joiner: BTreeSet<JobId> = joiners.iter().map(|(_, host)| *host).collect();
        let share_of = |id: JobId| if with_joiner.contains(&id) { 0.5 } else { 1.0 };
        // A running job keeps its GPUs, unless a job before it in the order is on them.
        let mut homeless = Vec::new();
        for id in owners {
            match state.job(*id).run() {
                Some(run) if run.gpus.iter().all(|gpu| free.contains(*gpu)) => {
                    for gpu in &run.gpus {
                        free.take(*gpu);
                    }
                    if run.beside.is_some() || run.share != share_of(*id) {
                        let share = share_of(*id);
                        batch.push(Decision::Reshare { job: *id, share });
                    }
                    at.insert(*id, run.gpus.clone());
                }
                _ => homeless.push(*id),
            }
        }
        let mut running: BTreeSet<JobId> = at.keys().copied().collect();
        for id in homeless {
            let job = state.job(id);
            let Some(gpus) = self.placer.place(state, &mut free, job, job.gpus) else {
                self.waits.fragmented.push(id);
                continue;
            };
            at.insert(id, gpus.clone());
            running.insert(id);
            let share = share_of(id);
            batch.push(if job.run().is_some() {
                Decision::Migrate {
                    job: id,
                    gpus,
                    share,
                }
            } else {
                start(job, gpus, share)
            });
        }
        for (joiner, host) in joiners {
            let Some(gpus) = at.get(host).cloned() else {
                continue;
            };
            let packer = self.packer.as_deref();
            if packer.is_some_and(|p| p.refused_at(state, &gpus, *host, *joiner).is_some()) {
                // Its host is by itself, after all.
                let own = state.job(*host).run().map(|run| run.share);
                batch.retain_mut(|decision| match decision {
                    Decision::Reshare { job, share } if job == host => {
                        *share = 1.0;
                        own != Some(1.0)
                    }
                    Decision::Place { job, share, .. } | Decision::Migrate { job, share, .. }
                        if job == host =>
                    {
                        *share = 1.0;
                        true
                    }
                    _ => true,
                });
                continue;
            }
            running.insert(*joiner);
            let job = state.job(*joiner);
            match job.run() {
                // Who of the two came first does not matter to them.
                Some(run) if run.gpus == gpus && state.partner(*joiner) == Some(*host) => {}
                Some(_) => batch.push(Decision::Migrate {
                    job: *joiner,
                    gpus,
                    share: 0.5,
                }),
                None => batch.push(start(job, gpus, 0.5)),
            }
        }
        for id in state.running() {
            if running.contains(id) {
                continue;
            }
            let host = state.job(*id).run().and_then(|run| run.beside);
            let reason = host.and_then(|host| refusal(self.packer.as_deref()?, state, host, *id));
            batch.push(match reason {
                Some(reason) => Decision::Unpack { job: *id, reason },
                None => Decision::Suspend { job: *id },
            });
        }
    }
}

fn refusal(
    packer: &dyn Packer,
    state: &ClusterState,
    host: JobId,
    joiner: JobId,
) -> Option<crate::cluster::Reason> {
    let kind = gpu_type(state, joiner);
    packer
        .refused(&state.job(host).profile, &state.job(joiner).profile, kind)
        .or_else(|| {
            let run = state.job(host).run()?;
            packer.refused_at(state, &run.gpus, host, joiner)
        })
}

/// Take the best host out of the buckets.
fn best_host(
    (packer, placer): (&dyn Packer, &dyn Placer),
    state: &ClusterState,
    buckets: &mut BTreeMap<Bucket, Vec<JobId>>,
    joiner: JobId,
    random: &mut Random,
) -> Option<JobId> {
    let mut best = f64::NEG_INFINITY;
    let mut tied: Vec<Bucket> = Vec::new();
    // Where a host is not known yet, it is looked at again once it has a place.
    let refused = |host: JobId| {
        let here = state.job(host).run().map(|run| run.gpus.clone());
        let here = here.or_else(|| placer.bound(host)).unwrap_or_default();
        packer.refused_at(state, &here, host, joiner)
    };
    // The last host of a bucket that may have this joiner where it runs.
    let last = |hosts: &[JobId]| hosts.iter().rposition(|host| refused(*host).is_none());
    let profile = &state.job(joiner).profile;
    for (bucket, hosts) in buckets.iter() {
        let Some(at) = last(hosts) else {
            continue;
        };
        let host = &state.job(hosts[at]).profile;
        let Some(score) = packer.score(host, profile, bucket.2) else {
            continue;
        };
        if score.0 > best {
            best = score.0;
            tied.clear();
        }
        if score.0 == best {
            tied.push(*bucket);
        }
    }
    let (bucket, at) = match tied[..] {
        [] => return None,
        [only] => (only, last(&buckets[&only])?),
        _ => {
            let all: usize = tied.iter().map(|bucket| buckets[bucket].len()).sum();
            let mut at = random.below(all);
            let mut bucket = tied[0];
            for candidate in tied {
                bucket = candidate;
                let len = buckets[&candidate].len();
                if at < len {
                    break;
                }
                at -= len;
            }
            (bucket, at)
        }
    };
    let hosts = buckets.get_mut(&bucket)?;
    let at = match refused(hosts[at]) {
        None => at,
        Some(_) => last(hosts)?,
    };
    let host = hosts.remove(at);
    if hosts.is_empty() {
        buckets.remove(&bucket);
    }
    Some(host)
}
