//! Three jobs or more together: what nodes measured of them.
//!
//! A pair is measured as a pair. What several are measured at together is kept of all their kinds
//! as one, and says nothing of any two of them. Where it brings jobs together it counts everywhere,
//! because wherever they come together they are measured. Where it keeps them apart it counts on
//! the node that measured it and on no other, so that a node that lies keeps nobody apart
//! elsewhere. The one that leaves is the one that came last.

use policy::cluster::{GpuId, GpuType, JobId, JobType, NodeId, Profile, Reason};

use super::speeds::KEPT_S;
use super::{Hook, MEASURED_KEPT};
use crate::live::records::{CrowdRecord, crowd_key};

impl Hook {
    /// What a group was measured at, by the rates of its jobs in the order in which they came: why
    /// the last one has to go.
    pub(super) fn claim_several(&mut self, group: &[JobId], rates: &[f64]) -> Option<Reason> {
        let why = self.scheduler.judge_several(&self.state, group, rates);
        if why.is_none() {
            self.scheduler.observe_several(&self.state, group, rates);
        }
        let first = *group.first()?;
        let ids = group.iter().map(|at| self.numbers.get(at.0 as usize));
        let kinds = ids.map(|id| Some(self.jobs.get(id?)?.submission.kind.clone()));
        let Some(kinds) = kinds.collect::<Option<Vec<String>>>() else {
            return why;
        };
        let gpu = self.state.job(first).run()?.gpus.first().copied()?;
        let crowd = CrowdRecord {
            node: self.places[gpu.0 as usize].0.clone(),
            gpu: self.gpu_name(first),
            gpus: self.held(first),
            kinds,
            // JSON has no NaN: a job of which nothing is known is one that does nothing.
            rates: rates.iter().map(|rate| rate.max(0.0)).collect(),
            at_s: self.now_s,
            unix_ms: self.unix_ms(),
        };
        let numbers = group.iter().map(|at| self.state.job(*at).profile.kind);
        self.bar_several(self.state.node_of(gpu), crowd.gpus, numbers.collect(), why);
        self.changes.crowds.push(crowd.clone());
        self.crowds.insert(crowd_key(&crowd), crowd);
        self.forget_crowds();
        why
    }

    fn bar_several(&self, node: NodeId, gpus: u32, mut kinds: Vec<JobType>, why: Option<Reason>) {
        kinds.sort_unstable();
        let mut facts = self.shared.facts();
        match why {
            Some(why) => facts.barred_several.insert((node, gpus, kinds), why),
            None => facts.barred_several.remove(&(node, gpus, kinds)),
        };
    }

    /// Which groups are not made where, for the nodes and kinds of the present state.
    pub(super) fn bar_all_several(&mut self) {
        // Small ones first: what larger ones are measured against.
        let mut crowds: Vec<&CrowdRecord> = self.crowds.values().collect();
        crowds.sort_by_key(|crowd| crowd.kinds.len());
        for crowd in crowds {
            let place = self.places.iter().position(|(name, _)| *name == crowd.node);
            let gpu = self.gpu_types.1.get(&crowd.gpu);
            let (Some(place), Some(gpu)) = (place, gpu) else {
                continue;
            };
            let number = |kind: &String| JobType(self.kinds.number(kind));
            let kinds: Vec<JobType> = crowd.kinds.iter().map(number).collect();
            let profile =
                |kind: &JobType| Profile::unknown(*kind, crowd.gpus, policy::Class::Guaranteed);
            let profiles: Vec<Profile> = kinds.iter().map(profile).collect();
            let all: Vec<&Profile> = profiles.iter().collect();
            // CAST: as many as there are types of GPU, and of GPUs.
            let (kind, gpu) = (GpuType(*gpu as u16), GpuId(place as u32));
            match self.scheduler.judge_profiles(&all, kind, &crowd.rates) {
                Some(why) => {
                    let mut kinds = kinds;
                    kinds.sort_unstable();
                    let key = (self.state.node_of(gpu), crowd.gpus, kinds);
                    self.shared.facts().barred_several.insert(key, why);
                }
                None => self.scheduler.remember_several(&all, kind, &crowd.rates),
            }
        }
    }

    /// Those that were measured longest ago make way.
    fn forget_crowds(&mut self) {
        let now_s = self.now_s;
        let old = |crowd: &&CrowdRecord| now_s - crowd.at_s > KEPT_S;
        let mut gone: Vec<String> = self.crowds.values().filter(old).map(crowd_key).collect();
        if self.crowds.len() > gone.len() + MEASURED_KEPT {
            let oldest = self.crowds.values().min_by_key(|crowd| crowd.unix_ms);
            gone.extend(oldest.map(crowd_key));
        }
        for key in gone {
            self.crowds.remove(&key);
            self.changes.crowds.retain(|crowd| crowd_key(crowd) != key);
            self.changes.dropped_crowds.push(key);
        }
    }
}
