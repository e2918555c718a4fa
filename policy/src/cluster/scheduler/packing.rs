//! The decision of a scheduler with a packer, or with jobs that ask for parts of GPUs.
//!
//! Jobs with GPUs of their own are chosen first, and jobs that asked for parts of GPUs beside each
//! other ([`parts`](super::parts)). What is left is offered to the packer. Jobs on the same GPUs
//! are a group; the one that came first is its host. Those that are there are asked about in the
//! order in which they came, so that the one that came last leaves where one is too many.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::held::{Giving, Held, Places};
use super::parts::Parts;
use super::{
    ClusterState, Decision, FreeGpus, GpuId, JobId, Packer, Placer, Random, Scheduler, Step,
    gpu_type, start, walk,
};
use crate::Class;
use crate::cluster::packer::together_bytes;
use crate::cluster::{GpuType, JobType, Node, Profile, Reason};

/// Groups of one gang size that a packer cannot tell apart: the host, and those that joined it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Bucket {
    host: (JobType, bool, GpuType),
    joined: Vec<(JobType, bool)>,
}

/// Those that joined each host, the one that came first first.
type Groups = BTreeMap<JobId, Vec<JobId>>;

fn joined(groups: &Groups, host: JobId) -> &[JobId] {
    groups.get(&host).map_or(&[], Vec::as_slice)
}

/// Who gets GPUs.
struct Chosen {
    /// Jobs with GPUs of their own, in order.
    owners: Vec<JobId>,
    /// Jobs that a packer may put beside others, in order.
    rest: Vec<JobId>,
    /// Jobs with a part of a GPU, beside which other one.
    parts: Vec<(JobId, JobId)>,
    /// GPUs that no other part may come to.
    closed: BTreeSet<GpuId>,
    /// GPUs of the owners, where it was looked at what stopped jobs hold.
    places: Option<Places>,
    /// Those that no GPU has place for, and that would have been owners.
    fragmented: Vec<JobId>,
}

impl Scheduler {
    /// Chooses jobs with GPUs of their own, then pairs, then moves every job to its place.
    pub(super) fn pack(&mut self, state: &ClusterState, held: &Held, batch: &mut Vec<Decision>) {
        let Chosen {
            owners,
            rest,
            parts,
            closed,
            places,
            fragmented,
        } = self.choose(state, held);
        self.waits.fragmented = fragmented;
        let mut joiners = self.pair(state, held, (&owners, places.as_ref()), &rest);
        joiners.extend(parts);
        self.settle(state, held, (&owners, &joiners, places), &closed, batch);
    }

    fn choose(&self, state: &ClusterState, held: &Held) -> Chosen {
        let (skips, preemptive) = (self.order.skips(), self.order.preemptive());
        let mut left = state.gpus();
        let mut parts = Parts::new(state, &*self.placer, held);
        // Owners: whole jobs, and GPUs that are divided into parts.
        let mut owners: Vec<Owner> = Vec::new();
        // GPUs that owners have: a job that has to stay on one of them gets none of its own.
        let mut taken: BTreeSet<GpuId> = BTreeSet::new();
        let mut giving =
            (!held.is_empty()).then(|| Giving::new(state, held, &*self.placer, &self.in_order()));
        if !preemptive {
            for id in state.running() {
                let job = state.job(*id);
                if let (Some(_), Some(run)) = (job.part, job.run()) {
                    if let Some(opened) = parts.stays(job, run) {
                        owners.push(Owner::Divided(opened));
                        left -= left.min(1);
                        taken.extend(&run.gpus);
                        if let Some(giving) = &mut giving {
                            giving.reserve(&run.gpus);
                        }
                    }
                } else if let Some(run) = job.run().filter(|run| {
                    // Of several the one that stands first has taken the place of a host that
                    // ended.
                    run.beside.is_none() || leads(state, *id)
                }) {
                    owners.push(Owner::Whole(*id));
                    left -= job.gpus.min(left);
                    taken.extend(&run.gpus);
                    if let Some(giving) = &mut giving {
                        giving.set(*id, &run.gpus);
                    }
                }
            }
        }
        let (mut rest, mut blocked, mut next) = (Vec::new(), false, 0);
        let mut fragmented = Vec::new();
        walk(&self.queues, |id, gpus| {
            let job = state.job(id);
            let at = next;
            next += 1;
            if job.part.is_some() {
                let has_place = !preemptive && job.run().is_some();
                if !has_place && !blocked {
                    match parts.give(job, left, &taken) {
                        Some(Some(opened)) => {
                            if let Some(giving) = &mut giving {
                                let known = parts.gpu(opened);
                                let gpu = known.or_else(|| {
                                    let own = giving.give((at, job), &parts.closed())?;
                                    own.first().copied()
                                });
                                let Some(gpu) = gpu else {
                                    parts.close(id);
                                    return Step::Next;
                                };
                                parts.locate(opened, gpu);
                                giving.reserve(&[gpu]);
                                taken.insert(gpu);
                            }
                            left -= left.min(1);
                            owners.push(Owner::Divided(opened));
                        }
                        Some(None) => {}
                        None => blocked |= !skips,
                    }
                }
                return Step::Next;
            }
            if !preemptive && leads(state, id) {
                return Step::Next;
            }
            let bound = self.placer.bound(id);
            let divided = |gpu: &GpuId| parts.has(*gpu);
            let stuck = |own: &Vec<GpuId>| {
                let mut own = own.iter();
                own.any(|gpu| taken.contains(gpu) || divided(gpu))
            };
            if bound.as_ref().is_some_and(stuck) {
                rest.push(id);
            } else if let Some(giving) = &mut giving {
                let fits = gpus <= left && !blocked;
                let own = if fits {
                    giving.give((at, job), &BTreeSet::new())
                } else {
                    giving
                        .keep(job)
                        .then(|| job.run().map_or_else(Vec::new, |run| run.gpus.clone()))
                };
                if !fits {
                    blocked |= !skips;
                } else if own.is_none() {
                    fragmented.push(id);
                }
                match own {
                    None => rest.push(id),
                    Some(own) => {
                        left = giving.left();
                        owners.push(Owner::Whole(id));
                        taken.extend(own);
                    }
                }
            } else if gpus <= left && !blocked {
                left -= gpus;
                owners.push(Owner::Whole(id));
                let here = job.run().filter(|run| run.beside.is_none());
                taken.extend(here.iter().flat_map(|run| &run.gpus));
                taken.extend(bound.iter().flatten());
            } else {
                blocked |= !skips;
                rest.push(id);
            }
            Step::Next
        });
        let first = |owner: Owner| match owner {
            Owner::Whole(id) => Some(id),
            Owner::Divided(at) => parts.host(at),
        };
        Chosen {
            owners: owners.into_iter().filter_map(first).collect(),
            rest,
            parts: parts.joiners(),
            closed: parts.closed(),
            places: giving.map(|giving| {
                let mut places = giving.into_places();
                places.extend(
                    parts
                        .places()
                        .into_iter()
                        .map(|(gpu, host)| (host, vec![gpu])),
                );
                places
            }),
            fragmented,
        }
    }

    /// Joiners with their hosts, those of one host in the order in which they come.
    fn pair(
        &mut self,
        state: &ClusterState,
        held: &Held,
        (owners, places): (&[JobId], Option<&Places>),
        rest: &[JobId],
    ) -> Vec<(JobId, JobId)> {
        let Some(packer) = self.packer.as_deref() else {
            return Vec::new();
        };
        // Where there are GPUs for all, only those share that can have no other ones.
        let enough = state.demand() <= u64::from(state.gpus());
        if enough && held.is_empty() {
            return Vec::new();
        }
        let shares = |id: &&JobId| !enough || held.all().contains_key(*id);
        let most = packer.most_jobs().min(state.most_on_gpu()) as usize;
        let whole = |id: &&JobId| state.job(**id).part.is_none();
        let hosts: BTreeSet<JobId> = owners.iter().filter(whole).copied().collect();
        let rest = || rest.iter().filter(whole).filter(shares);
        let mut stay: Vec<(usize, JobId, JobId)> = Vec::new();
        if packer.keeps_pairs() {
            let here = |id: &JobId| Some((*id, host_of(state, &hosts, *id, most)?));
            stay.extend(rest().filter_map(here).map(|(id, host)| {
                let place = state.group(id).position(|other| other == id);
                (place.unwrap_or(0), id, host)
            }));
            stay.sort_by_key(|(place, ..)| *place);
        }
        let mut groups = Groups::new();
        let mut joiners = Vec::new();
        let mut kept: BTreeSet<JobId> = BTreeSet::new();
        for (_, id, host) in stay {
            let there = joined(&groups, host);
            // It stays beside a host that moves only where it can move with it.
            let place = places.and_then(|places| places.get(&host));
            let apart = |gpus| refusal_at(packer, (state, held), gpus, (host, there), id).is_some();
            let apart = place.is_some_and(|gpus| apart(gpus));
            if there.len() + 1 < most
                && !apart
                && refusal(packer, (state, held), (host, there), id).is_none()
            {
                groups.entry(host).or_default().push(id);
                kept.insert(id);
                joiners.push((id, host));
            }
        }
        let bucket = |host: JobId, groups: &Groups| {
            let profile = &state.job(host).profile;
            let class = |profile: &Profile| profile.class == Class::Guaranteed;
            let kinds = joined(groups, host).iter().map(|id| {
                let profile = &state.job(*id).profile;
                (profile.kind, class(profile))
            });
            let mut kinds: Vec<(JobType, bool)> = kinds.collect();
            kinds.sort_unstable();
            Bucket {
                host: (profile.kind, class(profile), gpu_type(state, host)),
                joined: kinds,
            }
        };
        let has_space = |host: JobId, groups: &Groups| joined(groups, host).len() + 1 < most;
        let mut free_hosts: HashMap<u32, BTreeMap<Bucket, Vec<JobId>>> = HashMap::new();
        // Backwards, so that popping takes the first.
        for id in owners.iter().rev() {
            if hosts.contains(id) && has_space(*id, &groups) {
                let by_size = free_hosts.entry(state.job(*id).gpus).or_default();
                by_size.entry(bucket(*id, &groups)).or_default().push(*id);
            }
        }
        for id in rest().filter(|id| !kept.contains(id)) {
            let job = state.job(*id);
            let Some(buckets) = free_hosts.get_mut(&job.gpus) else {
                continue;
            };
            let found = best_host(
                (packer, &*self.placer),
                (state, held, places),
                (buckets, &groups),
                *id,
                &mut self.random,
            );
            if let Some(host) = found {
                joiners.push((*id, host));
                groups.entry(host).or_default().push(*id);
                if has_space(host, &groups) {
                    let with_it = buckets.entry(bucket(host, &groups)).or_default();
                    with_it.push(host);
                }
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
        held: &Held,
        (owners, joiners, places): (&[JobId], &[(JobId, JobId)], Option<Places>),
        closed: &BTreeSet<GpuId>,
        batch: &mut Vec<Decision>,
    ) {
        let mut free = FreeGpus::all(state.nodes());
        let mut at: HashMap<JobId, Vec<GpuId>> = HashMap::new();
        // A running job keeps its GPUs, unless a job before it in the order is on them.
        let (mut stay, mut homeless) = (Vec::new(), Vec::new());
        for id in owners.iter().filter(|_| places.is_none()) {
            match state.job(*id).run() {
                Some(run) if run.gpus.iter().all(|gpu| free.contains(*gpu)) => {
                    for gpu in &run.gpus {
                        free.take(*gpu);
                    }
                    at.insert(*id, run.gpus.clone());
                    stay.push(*id);
                }
                _ => homeless.push(*id),
            }
        }
        homeless.retain(|id| {
            let job = state.job(*id);
            let gpus = match &job.part {
                None => self.placer.place(state, &mut free, job, job.gpus),
                Some(part) => {
                    let has = |node: usize| state.nodes()[node].gpu_bytes;
                    let mut some = free.only(|node| has(node) == 0 || part.bytes <= has(node));
                    for gpu in closed {
                        some.take(*gpu);
                    }
                    let gpus = self.placer.place(state, &mut some, job, job.gpus);
                    gpus.iter().flatten().for_each(|gpu| {
                        free.take(*gpu);
                    });
                    gpus
                }
            };
            let Some(gpus) = gpus else {
                self.waits.fragmented.push(*id);
                return false;
            };
            at.insert(*id, gpus);
            true
        });
        for (id, gpus) in places.into_iter().flatten() {
            let run = state.job(id).run();
            let here = run.is_some_and(|run| run.gpus == gpus);
            if here { &mut stay } else { &mut homeless }.push(id);
            at.insert(id, gpus);
        }
        let mut running: BTreeSet<JobId> = at.keys().copied().collect();
        // Where a host has a place now, its joiners are looked at again.
        let mut groups = Groups::new();
        for (joiner, host) in joiners {
            let Some(gpus) = at.get(host) else {
                continue;
            };
            let there = joined(&groups, *host);
            if self.may_be_at((state, held), gpus, (*host, there), *joiner) {
                groups.entry(*host).or_default().push(*joiner);
            }
        }
        let share_of = |id: JobId, host: JobId| match &state.job(id).part {
            Some(part) => part.share,
            // CAST: at most 64.
            None => 1.0 / (1 + joined(&groups, host).len()) as f64,
        };
        for id in &stay {
            let share = share_of(*id, *id);
            let run = state.job(*id).run();
            if run.is_some_and(|run| run.beside.is_some() || run.share != share) {
                batch.push(Decision::Reshare { job: *id, share });
            }
        }
        for id in homeless {
            let (job, gpus) = (state.job(id), at[&id].clone());
            let share = share_of(id, id);
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
            if !joined(&groups, *host).contains(joiner) {
                continue;
            }
            running.insert(*joiner);
            let (job, gpus) = (state.job(*joiner), at[host].clone());
            let share = share_of(*joiner, *host);
            match job.run() {
                // Who of them came first does not matter to them.
                Some(run) if run.gpus == gpus && state.are_together(*joiner, *host) => {
                    if run.share != share {
                        batch.push(Decision::Reshare {
                            job: *joiner,
                            share,
                        });
                    }
                }
                Some(_) => batch.push(Decision::Migrate {
                    job: *joiner,
                    gpus,
                    share,
                }),
                None => batch.push(start(job, gpus, share)),
            }
        }
        for id in state.running() {
            if running.contains(id) {
                continue;
            }
            batch.push(match self.why_apart((state, held), *id) {
                Some(reason) => Decision::Unpack { job: *id, reason },
                None => Decision::Suspend { job: *id },
            });
        }
    }

    /// A joiner may be beside these on the GPUs that they have now.
    fn may_be_at(
        &self,
        (state, held): (&ClusterState, &Held),
        gpus: &[GpuId],
        (host, there): (JobId, &[JobId]),
        joiner: JobId,
    ) -> bool {
        if state.job(joiner).part.is_some() {
            let beside_held = held.fit_on(state, gpus, &all(host, there, joiner));
            return beside_held && fit(state, gpus, (host, there), joiner);
        }
        let Some(packer) = self.packer.as_deref() else {
            return true;
        };
        refusal_at(packer, (state, held), gpus, (host, there), joiner).is_none()
    }

    /// Why a job may not stay beside those with which it was.
    fn why_apart(&self, (state, held): (&ClusterState, &Held), id: JobId) -> Option<Reason> {
        let packer = self.packer.as_deref()?;
        let before: Vec<JobId> = state.group(id).take_while(|other| *other != id).collect();
        match &before[..] {
            [host, there @ ..] if !there.is_empty() => {
                refusal(packer, (state, held), (*host, there), id)
            }
            _ => {
                let host = state.job(id).run()?.beside?;
                refusal(packer, (state, held), (host, &[]), id)
            }
        }
    }
}

/// It came first of all that are on its GPUs, and there are others.
fn leads(state: &ClusterState, id: JobId) -> bool {
    let mut group = state.group(id);
    group.next() == Some(id) && group.next().is_some()
}

/// Who has a GPU of its own.
#[derive(Clone, Copy, Debug)]
enum Owner {
    Whole(JobId),
    /// A GPU that is divided into parts.
    Divided(usize),
}

/// The host of a job that is beside others, where that one keeps GPUs of its own.
fn host_of(state: &ClusterState, hosts: &BTreeSet<JobId>, id: JobId, most: usize) -> Option<JobId> {
    let run = state.job(id).run()?;
    let own = run.beside.filter(|host| state.are_together(id, *host));
    if let Some(host) = own.filter(|host| hosts.contains(host)) {
        return Some(host);
    }
    // Its host has to go, or came after it, and another one of them stays.
    let mut others = state.others(id).filter(|_| most > 2);
    others.find(|other| hosts.contains(other))
}

/// All of them, the joiner last.
fn all(host: JobId, there: &[JobId], joiner: JobId) -> Vec<JobId> {
    let mut all = Vec::with_capacity(there.len() + 2);
    all.push(host);
    all.extend(there);
    all.push(joiner);
    all
}

/// So much of the memory of jobs on one GPU may be in the server's memory: of the half of it that
/// arbiters take for that, what is for each GPU. Where all of it fits nothing leaves.
fn may_be_away(node: &Node, needed: u64, away: u64) -> bool {
    needed.saturating_add(away) <= node.gpu_bytes || away <= node.away_bytes()
}

/// What these jobs hold at once fits into the memory of each of these GPUs.
fn fit(
    state: &ClusterState,
    gpus: &[GpuId],
    (host, there): (JobId, &[JobId]),
    joiner: JobId,
) -> bool {
    let all = all(host, there, joiner);
    // The parts of a GPU's memory are quotas, which add up.
    let parts = all.iter().filter_map(|id| Some(state.job(*id).part?.bytes));
    let parts = parts.fold(0, u64::saturating_add);
    let [needed, away] = together_bytes(all.iter().map(|id| &state.job(*id).profile));
    let needed = needed.max(parts);
    gpus.iter().all(|gpu| {
        let node = &state.nodes()[state.node_of(*gpu).0 as usize];
        node.gpu_bytes == 0 || (needed <= node.gpu_bytes && may_be_away(node, needed, away))
    })
}

/// Why one may not be beside these because of where they are.
fn refusal_at(
    packer: &dyn Packer,
    (state, held): (&ClusterState, &Held),
    gpus: &[GpuId],
    (host, there): (JobId, &[JobId]),
    joiner: JobId,
) -> Option<Reason> {
    let away = |own: &Vec<GpuId>| !gpus.iter().all(|gpu| own.contains(gpu));
    if held.all().get(&joiner).is_some_and(away) {
        return Some(Reason::Bound);
    }
    if !held.is_empty() && !held.fit_on(state, gpus, &all(host, there, joiner)) {
        return Some(Reason::Memory);
    }
    let two = |other: JobId| packer.refused_at(state, gpus, other, joiner);
    if there.is_empty() {
        return two(host);
    }
    let mut others = [host].into_iter().chain(there.iter().copied());
    others.find_map(two).or_else(|| {
        if !fit(state, gpus, (host, there), joiner) {
            return Some(Reason::Memory);
        }
        packer.refused_several_at(state, gpus, &all(host, there, joiner))
    })
}

/// Why one may not stay beside these, where it is already.
fn refusal(
    packer: &dyn Packer,
    (state, held): (&ClusterState, &Held),
    (host, there): (JobId, &[JobId]),
    joiner: JobId,
) -> Option<Reason> {
    let kind = gpu_type(state, joiner);
    let profile = |id: JobId| &state.job(id).profile;
    let two = |other: JobId| packer.refused(profile(other), profile(joiner), kind);
    let by_kind = match there {
        [] => two(host),
        _ => {
            let mut others = [host].into_iter().chain(there.iter().copied());
            others.find_map(two).or_else(|| {
                let all = all(host, there, joiner);
                let all: Vec<&Profile> = all.into_iter().map(profile).collect();
                packer.refused_several(&all, kind)
            })
        }
    };
    by_kind.or_else(|| {
        let run = state.job(host).run()?;
        refusal_at(packer, (state, held), &run.gpus, (host, there), joiner)
    })
}

/// Take the best host out of the buckets.
fn best_host(
    (packer, placer): (&dyn Packer, &dyn Placer),
    (state, held, places): (&ClusterState, &Held, Option<&Places>),
    (buckets, groups): (&mut BTreeMap<Bucket, Vec<JobId>>, &Groups),
    joiner: JobId,
    random: &mut Random,
) -> Option<JobId> {
    let mut best = f64::NEG_INFINITY;
    let mut tied: Vec<Bucket> = Vec::new();
    // Where a host is not known yet, it is looked at again once it has a place.
    let refused = |host: JobId| {
        let place = places.and_then(|places| places.get(&host)).cloned();
        let here = place.or_else(|| state.job(host).run().map(|run| run.gpus.clone()));
        let here = here.or_else(|| placer.bound(host)).unwrap_or_default();
        let there = (host, joined(groups, host));
        refusal_at(packer, (state, held), &here, there, joiner)
    };
    // The last host of a bucket that may have this joiner where it runs.
    let last = |hosts: &[JobId]| hosts.iter().rposition(|host| refused(*host).is_none());
    let profile = &state.job(joiner).profile;
    let score = |host: JobId, kind: GpuType| {
        let own = &state.job(host).profile;
        let others = joined(groups, host);
        if others.is_empty() {
            return packer.score(own, profile, kind);
        }
        let others = others.iter().map(|id| &state.job(*id).profile);
        let there: Vec<&Profile> = [own].into_iter().chain(others).collect();
        packer.score_beside(&there, profile, kind)
    };
    for (bucket, hosts) in buckets.iter() {
        let Some(at) = last(hosts) else {
            continue;
        };
        let Some(score) = score(hosts[at], bucket.host.2) else {
            continue;
        };
        if score.0 > best {
            best = score.0;
            tied.clear();
        }
        if score.0 == best {
            tied.push(bucket.clone());
        }
    }
    let (bucket, at) = match &tied[..] {
        [] => return None,
        [only] => (only.clone(), last(&buckets[only])?),
        _ => {
            let all: usize = tied.iter().map(|bucket| buckets[bucket].len()).sum();
            let mut at = random.below(all);
            let mut bucket = &tied[0];
            for candidate in &tied {
                bucket = candidate;
                let len = buckets[candidate].len();
                if at < len {
                    break;
                }
                at -= len;
            }
            (bucket.clone(), at)
        }
    };
    let hosts = buckets.get_mut(&bucket)?;
    // Jobs of a kind may have quotas of their own: the last one was asked about.
    let fits = refused(hosts[at]).is_none() && score(hosts[at], bucket.host.2).is_some();
    let at = if fits { at } else { last(hosts)? };
    let host = hosts.remove(at);
    if hosts.is_empty() {
        buckets.remove(&bucket);
    }
    Some(host)
}
