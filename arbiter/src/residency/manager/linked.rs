//! A device whose jobs use others as well: what may be done about them is decided over all of those
//! (`dispatch::joint`), and carried out here.

use policy::TenantId;
use policy::residency::{Place, Standing};

use super::{JobView, News, Phase, ResidencyManager, begun};
use channel::Verb;

impl ResidencyManager {
    /// Whether arrivals are decided over several devices from here on.
    pub fn set_linked(&mut self, linked: bool) {
        if self.linked != linked {
            self.linked = linked;
            self.granted.clear();
            self.records
                .values_mut()
                .for_each(|record| record.joint = None);
        }
    }

    /// Whether processes with memory that can be moved have come or gone since this was asked last.
    pub fn take_crew(&mut self) -> bool {
        std::mem::take(&mut self.crew_changed)
    }

    /// Jobs of which something can be moved here.
    pub fn movable(&self) -> impl Iterator<Item = TenantId> {
        self.machines.values().map(|(id, _)| *id)
    }

    /// Whether everybody is in, and nothing moves or is to move.
    pub fn is_calm(&self) -> bool {
        let mut records = self.records.values();
        let mut machines = self.machines.values();
        records.all(|record| record.phase == Phase::Settled && !record.wished)
            && machines.all(|(_, machine)| machine.state().is_usable())
            && self
                .residents
                .iter()
                .all(|one| one.space_bytes == 0 && !one.kept_away)
    }

    /// Everybody is in; whether that is news.
    pub fn all_are_in(&mut self) -> bool {
        self.granted.clear();
        let mut changed = false;
        for record in self.records.values_mut() {
            changed |= record.standing != Standing::In;
            (record.joint, record.standing) = (Some(Standing::In), Standing::In);
        }
        changed
    }

    /// When each job was last used here.
    pub fn uses(&self, now_ns: u64) -> impl Iterator<Item = (TenantId, u64)> {
        self.residents.iter().filter_map(move |one| {
            let record = self.records.get(&one.id)?;
            let used_ns = record.used_ns.max(record.active_ns);
            Some((one.id, if one.wants { now_ns } else { used_ns }))
        })
    }

    /// A job was used then, perhaps on another device.
    pub fn note_use(&mut self, id: TenantId, used_ns: u64) {
        if let Some(record) = self.records.get_mut(&id) {
            record.used_ns = record.used_ns.max(used_ns);
        }
    }

    /// Counts everybody's memory anew, and parks and releases jobs.
    pub fn recount(&mut self, now_ns: u64, jobs: &[JobView<'_>]) {
        self.count(jobs);
        let parked = |this: &Self| -> Vec<bool> {
            let all = jobs.iter();
            all.map(|job| this.arbitration.is_parked(job.id)).collect()
        };
        let before = parked(self);
        let residents = std::mem::take(&mut self.residents);
        self.arbitration.tend(&policy::residency::ResidentJobs {
            now_ns,
            capacity_bytes: self.capacity_bytes,
            all: &residents,
        });
        self.residents = residents;
        for ((job, before), parked) in jobs.iter().zip(before).zip(parked(self)) {
            if before != parked {
                let id = job.id;
                self.news.push(News::Parked { id, parked });
            }
        }
    }

    /// As the decision over several devices sees it.
    pub fn place(&self, now_ns: u64) -> Place<'_> {
        Place {
            residents: self.residents(now_ns),
            arbitration: &self.arbitration,
        }
    }

    /// Those that are to come as soon as they may: slices were granted to them, their operator has
    /// called them, or an allocation waits.
    pub fn take_called(&mut self) -> Vec<TenantId> {
        let mut called = std::mem::take(&mut self.granted);
        let records = self.records.iter().filter(|(_, record)| record.wished);
        called.extend(records.map(|(id, _)| *id));
        let waits = self.residents.iter().filter(|one| one.space_bytes > 0);
        called.extend(waits.map(|one| one.id));
        called
    }

    /// Whether nothing of a job is out or moves here.
    pub fn is_in(&self, id: TenantId) -> bool {
        let mut own = self.residents.iter().filter(|one| one.id == id);
        self.phase_of(id) == Phase::Settled && own.all(|one| !one.out)
    }

    /// Whether others shrink so far that a job has what it waits for.
    pub fn others_shrink_for(&self, now_ns: u64, id: TenantId) -> bool {
        self.shrinks_for(now_ns, id)
    }

    /// Whether something of a job is to leave here where the job leaves as a whole.
    pub fn has_to_leave(&self, id: TenantId) -> bool {
        self.phase_of(id) == Phase::Settled && self.resident_bytes(id) > 0
    }

    /// Promises host memory for all that a job has here. Where the host cannot take it the job is
    /// left alone for a while; false then.
    pub fn promise_departure(&mut self, now_ns: u64, job: &JobView<'_>) -> bool {
        match self.host_has_space(job, Verb::Evict) {
            Ok(()) => true,
            Err(why) => {
                self.refuse(now_ns, job.id, Verb::Evict, why);
                false
            }
        }
    }

    /// A job leaves, if there is something to leave; whether it begins to.
    pub fn depart_whole(&mut self, now_ns: u64, id: TenantId) -> bool {
        let leaves = self.has_to_leave(id);
        if leaves {
            self.depart(now_ns, id, Verb::Evict);
        }
        leaves
    }

    /// A job comes, if something of it is away here. Its space is its own from here on.
    pub fn come(&mut self, now_ns: u64, id: TenantId) {
        let mut own = self.residents.iter().filter(|one| one.id == id);
        if !own.any(|one| one.out) {
            return;
        }
        let record = self.records.entry(id).or_default();
        if record.phase == Phase::Settled {
            record.call(now_ns);
        }
    }

    /// A job has taken a place as one that comes does, and stays as long.
    pub fn begin_term(&mut self, now_ns: u64, id: TenantId) {
        if let Some(record) = self.records.get_mut(&id) {
            record.since_ns = now_ns;
        }
    }

    /// What a job may do; whether that is news.
    pub fn set_standing(&mut self, id: TenantId, standing: Standing) -> bool {
        let begun = self.has_begun(id);
        let Some(record) = self.records.get_mut(&id) else {
            return false;
        };
        record.joint = Some(standing);
        let standing = if begun { Standing::In } else { standing };
        std::mem::replace(&mut record.standing, standing) != standing
    }

    /// Between two decisions: who has begun to move stops, and nobody goes on who is out.
    pub(super) fn stand_jointly(&mut self, jobs: &[JobView<'_>]) {
        self.count(jobs);
        for job in jobs {
            let usable = self.state_of(job).is_usable();
            let begun = begun(&self.machines, job);
            let Some(record) = self.records.get_mut(&job.id) else {
                continue;
            };
            record.standing = match (record.phase, record.joint) {
                (
                    Phase::Ordered {
                        verb: Verb::Restore,
                    },
                    _,
                ) if begun => Standing::In,
                (Phase::Settled, Some(Standing::In)) | (Phase::Settled, None) if !usable => {
                    Standing::Waits(None)
                }
                (Phase::Settled, joint) => joint.unwrap_or_default(),
                _ => Standing::Moving,
            };
        }
    }

    /// Whether a job that comes runs already, with as much as is back.
    fn has_begun(&self, id: TenantId) -> bool {
        let restores = Phase::Ordered {
            verb: Verb::Restore,
        };
        let mut own = self.machines.values().filter(|(tenant, _)| *tenant == id);
        self.phase_of(id) == restores && own.all(|(_, machine)| machine.may_run())
    }
}
