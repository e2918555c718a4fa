//! The candidates of a question as a small cluster, which the policies decide about.

use std::collections::{BTreeMap, BTreeSet};

use control::Class;
use policy::PolicyError;
use policy::cluster::{
    ClusterState, Decision, GpuId, GpuType, Job, JobId, JobType, Node, NodeId, Profile, Scheduler,
};

use super::Remembered;
use super::judge::{kind_of, load};
use crate::live::adapt::Known;
use crate::live::facts::{Facts, Shared};
use crate::live::hook::claims::{Judge, bars};
use crate::live::hook::past::past;
use crate::live::hook::{Config, Names, UNKNOWN_WORK_S, policy_class, scheduler_of};
use crate::live::placement::{Candidate, JobProfile};
use crate::live::records::PairRecord;

/// The candidates as a cluster of their own.
pub(super) struct Model {
    state: ClusterState,
    scheduler: Scheduler,
    job: JobId,
    /// The candidate behind each GPU.
    pub(super) places: Vec<Candidate>,
}

impl Model {
    pub(super) fn of(
        config: &Config,
        remembered: &Remembered<'_>,
        asked: &JobProfile,
        candidates: Vec<Candidate>,
    ) -> Result<Self, PolicyError> {
        let (mut kinds, mut types) = (Names::default(), Types::default());
        // A node with several types of device counts as several nodes.
        let mut order: Vec<(GpuType, Vec<Candidate>)> = Vec::new();
        let mut groups: BTreeMap<(String, u16), usize> = BTreeMap::new();
        for candidate in candidates {
            let kind = types.number(&candidate);
            let at = *groups
                .entry((candidate.node.clone(), kind.0))
                .or_insert(order.len());
            match order.get_mut(at) {
                Some((_, group)) => group.push(candidate),
                None => order.push((kind, vec![candidate])),
            }
        }
        let shared = Shared::default();
        let mut facts = Facts::default();
        let mut nodes = Vec::with_capacity(order.len());
        let mut places = Vec::new();
        for (kind, group) in order {
            let gpu_bytes = group.iter().map(|one| one.total_bytes).min().unwrap_or(0);
            facts.gpu_bytes.insert(kind, gpu_bytes);
            nodes.push(Node {
                first: GpuId(0),
                // CAST: checked to be at most 64.
                gpus: group.len() as u32,
                kind,
                gpu_bytes,
                cpus: 0.0,
                mem_bytes: 0,
            });
            places.extend(group);
        }
        *shared.facts() = facts;
        let Remembered { pairs, solos, .. } = remembered;
        let known = Known {
            pairs: past(pairs, solos, &mut kinds, |name| types.named(name)),
            past_gpu_s: remembered.past_gpu_s.clone(),
            gpu_bytes: places
                .iter()
                .map(|one: &Candidate| one.total_bytes)
                .max()
                .unwrap_or(0),
        };
        let mut scheduler = scheduler_of(config, &shared, &known)?;
        let mut state = ClusterState::new(nodes);
        let mut batch = Vec::new();
        for (at, candidate) in places.iter().enumerate() {
            if candidate.residents.is_empty() {
                continue;
            }
            let mut host = Job::rigid(JobType(0), 1, 0.0, UNKNOWN_WORK_S);
            host.most_gpus = 1;
            host.profile = together(&candidate.residents, &mut kinds);
            // Nobody moves it for the new job.
            let own = types.number(candidate);
            let here = |kind: u16| f64::from(u8::from(GpuType(kind) == own));
            host.by_type = (0..types.count()).map(here).collect();
            let id = state.arrive(host);
            scheduler.note(id);
            batch.push(Decision::Place {
                job: id,
                // CAST: as many as there are candidates.
                gpus: vec![GpuId(at as u32)],
                class: state.job(id).profile.class,
                share: 1.0,
                mem_bytes: None,
            });
        }
        // Each host has a GPU of its own, so nothing can be refused.
        let _ = state.apply(&batch);
        let gpus = asked.gpus.max(1);
        let kind = JobType(kinds.number(&asked.kind));
        let work_s = asked.work_s.unwrap_or(UNKNOWN_WORK_S);
        let mut new = Job::rigid(kind, gpus, 0.0, work_s);
        new.most_gpus = gpus;
        new.deadline_s = asked.deadline_s;
        new.weight = asked.weight.unwrap_or(1.0);
        new.profile = profile(asked, kind, gpus);
        let relative = |name: &str| remembered.learned.relative(&asked.kind, gpus, name);
        new.by_type = types.names().into_iter().map(relative).collect();
        let job = state.arrive(new);
        scheduler.note(job);
        // What was bad on a node is not made there again, whatever others say.
        let about = |pair: &&PairRecord| {
            pair.kinds.contains(&asked.kind) && pair.claims.iter().any(|c| !c.node.is_empty())
        };
        let pairs: Vec<&PairRecord> = remembered.pairs.values().filter(about).collect();
        let packer = config.choice.packer.as_ref().filter(|_| !pairs.is_empty());
        let mut judge = Judge::new(packer);
        for pair in pairs {
            for claim in &pair.claims {
                let node = (claim.node.clone(), types.named(&pair.gpu));
                let here = node.1.iter().filter_map(|kind| {
                    let group = groups.get(&(node.0.clone(), kind.0))?;
                    // CAST: as many as there are candidates.
                    Some(NodeId(*group as u32))
                });
                let number = |kind: &str| kinds.1.get(kind).copied();
                let bars = bars(pair, claim.rates, &mut judge, number);
                let bad: Vec<_> = (bars.into_iter())
                    .filter_map(|(kinds, why)| Some((kinds, why?)))
                    .collect();
                for at in here {
                    let all = bad
                        .iter()
                        .map(|(kinds, why)| ((at, pair.gpus, *kinds), *why));
                    shared.facts().barred.extend(all);
                }
            }
        }
        Ok(Self {
            state,
            scheduler,
            job,
            places,
        })
    }

    /// GPUs and share of the new job. `None`: it waits, or a job that runs would have to go.
    pub(super) fn decide(&mut self) -> Option<(Vec<GpuId>, f64)> {
        let batch = self.scheduler.decide(&self.state);
        let (taken, share) = batch.iter().find_map(|decision| match decision {
            Decision::Place {
                job, gpus, share, ..
            } if *job == self.job => Some((gpus.clone(), *share)),
            _ => None,
        })?;
        let goes = batch.iter().any(|decision| {
            let stays = matches!(decision, Decision::Reshare { .. } | Decision::Place { .. });
            let here = self
                .state
                .job(decision.job())
                .run()
                .map_or(&[][..], |run| &run.gpus);
            !stays && here.iter().any(|gpu| taken.contains(gpu))
        });
        let here: BTreeSet<_> = taken.iter().map(|gpu| self.state.node_of(*gpu)).collect();
        (!goes && here.len() == 1).then_some((taken, share))
    }

    pub(super) fn why_not(&self, config: &Config, gpus: u32) -> String {
        let free = self.state.free().total();
        let busy = self.state.gpus() - free;
        let packer = match &config.choice.packer {
            None => "there is no packer".to_owned(),
            Some(packer) if gpus > 1 => {
                format!("packer `{packer}` puts only jobs of one device beside others here")
            }
            Some(packer) => format!("packer `{packer}` takes none of the pairs"),
        };
        format!(
            "{}: the job waits: {free} of the devices that could take it carry no job, {gpus} of one node are asked for; {busy} carry jobs, and {packer}",
            config.choice
        )
    }
}

/// Types of GPU: devices of one name and one size.
#[derive(Default)]
struct Types(BTreeMap<(String, u64), GpuType>);

impl Types {
    fn number(&mut self, candidate: &Candidate) -> GpuType {
        // CAST: at most 65536 candidates.
        let next = GpuType(self.0.len() as u16);
        let key = (candidate.name.clone(), candidate.total_bytes);
        *self.0.entry(key).or_insert(next)
    }

    fn count(&self) -> u16 {
        // CAST: as above.
        self.0.len() as u16
    }

    /// The name of each, by its number.
    fn names(&self) -> Vec<&str> {
        let mut all: Vec<(GpuType, &str)> = self
            .0
            .iter()
            .map(|((name, _), kind)| (*kind, name.as_str()))
            .collect();
        all.sort_unstable();
        all.into_iter().map(|(_, name)| name).collect()
    }

    fn named(&self, name: &str) -> Vec<GpuType> {
        let sizes = self
            .0
            .range((name.to_owned(), 0)..=(name.to_owned(), u64::MAX));
        sizes.map(|(_, kind)| *kind).collect()
    }
}

fn profile(job: &JobProfile, kind: JobType, gpus: u32) -> Profile {
    let mut profile = Profile::unknown(kind, gpus, policy_class(job.class));
    profile.persistent_bytes = job.mem_bytes.unwrap_or(0);
    profile.busy = job.busy.unwrap_or(1.0);
    profile.confidence = job.confidence.unwrap_or(0.0);
    profile
}

/// The jobs of one device as one.
fn together(residents: &[JobProfile], kinds: &mut Names) -> Profile {
    let kind = JobType(kinds.number(&kind_of(residents)));
    let guaranteed = residents.iter().any(|job| job.class == Class::Guaranteed);
    let class = if guaranteed {
        Class::Guaranteed
    } else {
        Class::Opportunistic
    };
    let mut all = Profile::unknown(kind, 1, policy_class(class));
    (all.busy, all.confidence) = load(residents.iter());
    all.busy = all.busy.min(1.0);
    all.persistent_bytes = residents
        .iter()
        .fold(0, |sum, job| sum.saturating_add(job.mem_bytes.unwrap_or(0)));
    all
}
