//! The policies' view, made from the records: whenever nodes come or go, and after a crash in the
//! same way.

use std::collections::BTreeSet;

use policy::cluster::{
    ClusterState, Decision, GpuId, GpuType, Job, JobId, JobType, MOST_JOBS_ON_GPU, Node, Part,
    Profile, Speed, UserId,
};

use super::claims::number_kinds;
use super::past::{as_metered, past};
use super::starts::Door;
use super::{Hook, UNKNOWN_WORK_S, policy_class, scheduler_of};
use crate::live::adapt::Known;
use crate::live::facts::Facts;
use crate::live::records::{Metered, solo_key};

impl Hook {
    /// Into the policies' view, as a waiting job.
    pub(super) fn enter(&mut self, id: u64) {
        let Some(record) = self.jobs.get(&id) else {
            return;
        };
        let asked = &record.submission;
        let kind = JobType(self.kinds.number(&asked.kind));
        let gpus = asked.gpus.max(1);
        let mut job = Job::rigid(
            kind,
            gpus,
            record.arrival_s,
            asked.work_s.unwrap_or(UNKNOWN_WORK_S),
        );
        if let Some(most) = asked.max_gpus.filter(|most| *most > gpus) {
            // As fast as it has GPUs: nobody has measured anything else.
            job.most_gpus = most;
            job.speed = Speed::Curve((1..=most).map(|n| f64::from(n) / f64::from(gpus)).collect());
        }
        job.part = asked.share.map(|share| Part {
            share,
            bytes: asked.mem_bytes.unwrap_or(0),
        });
        job.user = UserId(self.users.number(&asked.user));
        job.deadline_s = asked.deadline_s.map(|after| record.arrival_s + after);
        job.weight = asked.weight.unwrap_or(1.0);
        let class = policy_class(asked.class);
        job.profile = Profile::unknown(kind, gpus, class);
        job.profile.persistent_bytes = asked.mem_bytes.unwrap_or(0);
        // Until its node says what of it stays.
        job.profile.movable_bytes = match asked.evictable {
            true => job.profile.persistent_bytes,
            false => 0,
        };
        if let Some(profile) = self.watches.get(&id).and_then(|watch| watch.profile) {
            job.profile = Profile {
                kind,
                gpus,
                class,
                ..profile
            }
            .sane();
        } else if let Some(metered) = self.metered(&asked.kind, gpus) {
            job.profile = as_metered(job.profile, &metered);
        }
        (job.settled_work, job.settled_gpu_s, job.settled_s) =
            (record.done_s, record.gpu_s, record.held_s);
        job.starts = record.attempts;
        let at = self.state.arrive(job);
        self.numbers.push(id);
        self.live.insert(id, at);
        self.scheduler.note(at);
        self.changed = true;
        // Its kind may be one that nobody has asked about.
        self.unlearnt.speeds = true;
        self.pin(id);
    }

    /// What was metered of a kind of job by itself, on any type of GPU.
    pub(super) fn metered(&self, kind: &str, gpus: u32) -> Option<Metered> {
        let types = self.gpu_types.0.iter();
        let mut keys = types.map(|gpu| solo_key(gpu, gpus, kind));
        keys.find_map(|key| self.solos.get(&key)?.metered)
    }

    /// Jobs of this kind that wait are as busy as the one that was seen.
    pub(super) fn tell_kind(&mut self, kind: &str, gpus: u32, metered: &Metered) {
        let kind = JobType(self.kinds.number(kind));
        let waiting: Vec<JobId> = self.state.waiting().iter().copied().collect();
        for at in waiting {
            let job = self.state.job_mut(at);
            if job.profile.kind == kind && job.gpus == gpus && job.starts == 0 {
                job.profile = as_metered(job.profile, metered);
                self.changed = true;
            }
        }
    }

    /// Tell the placer where a job has to stay, or that it may go anywhere.
    pub(super) fn pin(&self, id: u64) {
        let (Some(record), Some(at)) = (self.jobs.get(&id), self.live.get(&id)) else {
            return;
        };
        let avoided = self.avoided(id);
        let mut facts = self.shared.facts();
        facts.avoided.remove(at);
        if let Some(avoided) = avoided {
            facts.avoided.insert(*at, avoided);
        }
        facts.pinned.remove(at);
        let own = record
            .run
            .as_ref()
            .filter(|run| !run.stopping && !record.submission.restartable);
        if let Some(run) = own {
            let gpus = run
                .devices
                .iter()
                .filter_map(|device| self.gpu(&run.node, device))
                .collect();
            facts.pinned.insert(*at, gpus);
        }
    }

    /// GPUs that a job has, or asks for where it has none.
    pub(super) fn held(&self, at: JobId) -> u32 {
        let job = self.state.job(at);
        // CAST: a node has at most 64.
        job.run().map_or(job.gpus, |run| run.gpus.len() as u32)
    }

    pub(super) fn gpu(&self, node: &str, device: &str) -> Option<GpuId> {
        let at = self
            .places
            .iter()
            .position(|(n, d)| n == node && d == device)?;
        u32::try_from(at).ok().map(GpuId)
    }

    /// Make the policies' view from the records: nodes that take jobs or have some, jobs that are
    /// not over, each where its node has it.
    pub(super) fn rebuild(&mut self) {
        self.keep_progress();
        (self.kinds, self.gpu_types) = Default::default();
        let users = std::mem::take(&mut self.users);
        for key in self.solos.keys() {
            self.gpu_types.number(key.split('\n').next().unwrap_or(key));
        }
        let holding: BTreeSet<&str> = self
            .jobs
            .values()
            .filter_map(|job| Some(job.run.as_ref()?.node.as_str()))
            .collect();
        let mut nodes = Vec::new();
        let mut facts = Facts::default();
        self.places.clear();
        for (name, entry) in &mut self.nodes {
            let record = &entry.record;
            entry.door = record.starts.door(self.now_s);
            let usable = entry.up && entry.door != Door::Shut;
            let holds = holding.contains(name.as_str());
            entry.in_view = !record.devices.is_empty() && (usable || holds);
            if !entry.in_view {
                continue;
            }
            // CAST: a registration has at most 64 devices.
            let first = GpuId(self.places.len() as u32);
            let kind = GpuType(self.gpu_types.number(&record.devices[0].name) as u16);
            let least = record.devices.iter().map(|device| device.total_bytes).min();
            facts.gpu_bytes.insert(kind, least.unwrap_or(0));
            nodes.push(Node {
                first,
                gpus: record.devices.len() as u32,
                kind,
                gpu_bytes: least.unwrap_or(0),
                cpus: record.cpus,
                mem_bytes: record.mem_bytes,
            });
            for device in &record.devices {
                // CAST: as above.
                let gpu = GpuId(self.places.len() as u32);
                if !entry.up {
                    facts.down.insert(gpu);
                }
                match entry.door {
                    Door::Open => {}
                    Door::Trying => drop(facts.trying.insert(gpu)),
                    Door::Shut => drop(facts.shut.insert(gpu)),
                }
                self.places.push((name.clone(), device.uuid.clone()));
            }
        }
        facts.round_s = self.config.round_s;
        *self.shared.facts() = facts;
        self.forget_services();
        self.weigh_claims();
        number_kinds(&mut self.kinds, &self.pairs);
        let known = self.all_known();
        // What was accepted at the start is still there.
        if let Ok(mut scheduler) = scheduler_of(&self.config, &self.shared, &known) {
            // What it knows of users it knows by their numbers.
            let number = &mut |user: UserId| {
                let name = users.0.get(user.0 as usize);
                UserId(self.users.number(name.map_or("", String::as_str)))
            };
            scheduler.inherit(&mut self.scheduler, number);
            self.scheduler = scheduler;
        }
        self.state = ClusterState::new(nodes);
        // Parts may be many; of others the packer says how many there are.
        self.state.set_most_on_gpu(MOST_JOBS_ON_GPU);
        self.bar_all();
        self.bar_all_several();
        self.note_waits();
        self.live.clear();
        self.numbers.clear();
        self.changed = true;
        if self.state.gpus() == 0 {
            return;
        }
        self.state.advance(self.now_s);
        let inside: Vec<u64> = self
            .jobs
            .values()
            .filter(|job| job.over.is_none() && !job.cancelled)
            .filter(|job| job.run.is_some() || job.not_before_s <= self.now_s)
            .map(|job| job.id)
            .collect();
        inside.iter().for_each(|id| self.enter(*id));
        // Who came first onto a GPU first.
        let mut by_rank: Vec<(bool, u32, u64)> = inside
            .iter()
            .filter_map(|id| {
                let run = self.jobs.get(id)?.run.as_ref()?;
                Some((run.joiner, run.rank, *id))
            })
            .collect();
        by_rank.sort_unstable();
        for (.., id) in by_rank {
            self.resettle(id);
        }
        self.learn_anew(true);
    }

    /// A running job back onto the GPUs that it has.
    fn resettle(&mut self, id: u64) {
        let (Some(record), Some(at)) = (self.jobs.get(&id), self.live.get(&id).copied()) else {
            return;
        };
        let Some(run) = record.run.clone() else {
            return;
        };
        if run.stopping || run.suspended {
            return;
        }
        let gpus: Vec<GpuId> = run
            .devices
            .iter()
            .filter_map(|device| self.gpu(&run.node, device))
            .collect();
        let attempts = record.attempts;
        let place = Decision::Place {
            job: at,
            gpus,
            class: self.state.job(at).profile.class,
            share: run.sent.share.unwrap_or(1.0),
            mem_bytes: None,
        };
        // If that is impossible, the job counts as waiting, and its node is ordered to stop it.
        if self.state.apply(&[place]).is_ok() {
            self.state.job_mut(at).starts = attempts;
            self.pace(at);
        }
    }

    /// Progress from the state into the records.
    pub(super) fn keep_progress(&mut self) {
        for (id, at) in &self.live {
            let job = self.state.job(*at);
            if let Some(record) = self.jobs.get_mut(id) {
                record.done_s = job.done(self.now_s);
                record.gpu_s = job.service_gpu_s(self.now_s);
                record.held_s = job.held_s(self.now_s);
                record.counted_s = self.now_s;
            }
        }
    }

    /// What was measured, as policies take it.
    pub(super) fn all_known(&mut self) -> Known {
        let sizes = self.places.iter().filter_map(|(node, uuid)| {
            let devices = &self.nodes.get(node)?.record.devices;
            let device = devices.iter().find(|device| device.uuid == *uuid)?;
            Some(device.total_bytes)
        });
        let gpu_bytes = sizes.max().unwrap_or(0);
        let types = &mut self.gpu_types;
        // CAST: as many as there are types of GPU, of nodes and of what is kept.
        let number = |name: &str| [GpuType(types.number(name) as u16)];
        Known {
            pairs: past(&self.pairs, &self.solos, &mut self.kinds, number),
            past_gpu_s: self.past_gpu_s(),
            gpu_bytes,
        }
    }

    /// Which GPUs strangers are on, how much of a job's memory may be away from them, and how long
    /// a request would wait there, for the placer.
    pub(super) fn note_waits(&mut self) {
        let mut facts = self.shared.facts();
        facts.busy.clear();
        facts.away_bytes.clear();
        for (at, (node, device)) in self.places.iter().enumerate() {
            let waits = self
                .nodes
                .get(node)
                .and_then(|node| node.waits.iter().find(|w| w.uuid == *device));
            // CAST: a place in the list of GPUs.
            let gpu = GpuId(at as u32);
            let moves = self.nodes.get(node).filter(|one| one.record.moves_memory);
            if let Some(one) = moves {
                let away = one.host_limit_bytes / one.record.devices.len().max(1) as u64;
                facts.away_bytes.insert(self.state.node_of(gpu), away);
            }
            if waits.is_some_and(|waits| waits.strangers > 0) {
                facts.busy.insert(gpu);
            }
            self.state
                .set_wait_matrix(gpu, waits.and_then(crate::live::waits::as_reported));
        }
    }
}
