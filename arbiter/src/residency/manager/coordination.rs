//! Opportunistic jobs that shrink for guaranteed ones, where the device's policy divides its memory
//! (AntMan, OSDI 2020): who is counted how, what each process may have, and who is notified.
//!
//! Decides nothing: [`policy::coordinator`] does, and moves go as those for a limit do.

use policy::coordinator::{Cap, Cause, Coordinated, Coordinator, Occupancy};
use policy::residency::ResidentJob;
use policy::{Class, CoordinatorTerms, TenantId};

use super::{JobView, News, ResidencyManager};
use crate::residency::client_state::State;

impl ResidencyManager {
    /// Memory is divided by these terms from here on; `None`: it is not, and who was shrunk comes
    /// back as there is space.
    pub fn coordinate(&mut self, terms: Option<CoordinatorTerms>) {
        if self.coordinator.as_ref().map(Coordinator::terms) != terms {
            self.coordinator = terms.map(Coordinator::new);
        }
    }

    /// Whether somebody can be shrunk.
    pub fn gives_space(&self) -> bool {
        let can = |one: &ResidentJob| one.resident_bytes > 0 && self.cap(one.id).is_some();
        self.coordinator.is_some() && self.residents.iter().any(can)
    }

    /// How much of a job may be on the device; `None`: that is not divided.
    pub(super) fn cap(&self, id: TenantId) -> Option<Cap> {
        self.coordinator.as_ref()?.cap(id)
    }

    /// What can be moved of a job and is on the device, in bytes.
    pub(super) fn resident_bytes(&self, id: TenantId) -> u64 {
        let own = self.machines.values().filter(|(tenant, _)| *tenant == id);
        own.map(|(_, machine)| machine.footprint().resident_bytes)
            .fold(0, u64::saturating_add)
    }

    /// Looks who has how much, decides, and says to every process how much may be on the device.
    pub(super) fn divide(&mut self, now_ns: u64, jobs: &[JobView<'_>]) {
        if let Some(mut coordinator) = self.coordinator.take() {
            let coordinated: Vec<Coordinated> = self
                .residents
                .iter()
                .zip(jobs)
                .filter(|(_, job)| self.is_coordinated(job))
                .map(|(one, job)| Coordinated {
                    id: one.id,
                    weight_ppm: one.weight_ppm,
                    movable_bytes: self.evictable_bytes(job),
                    resident_bytes: one.resident_bytes,
                    fixed_bytes: one.fixed_bytes,
                    waits_bytes: one.space_bytes,
                    stuck: one.stuck_until_ns > now_ns,
                })
                .collect();
            let guaranteed = |one: &&ResidentJob| one.class == Class::Guaranteed;
            let (mut others_bytes, mut waiting, mut left) = (0u64, None, None);
            for (one, job) in self.residents.iter().zip(jobs) {
                if coordinated.iter().any(|shrinks| shrinks.id == one.id) {
                    continue;
                }
                others_bytes = others_bytes.saturating_add(one.footprint_bytes());
                if !guaranteed(&one) || job.clients.is_empty() || one.kept_away {
                    continue;
                }
                if one.out && one.wants && !one.coming && !one.leaving {
                    others_bytes = others_bytes.saturating_add(one.missing_bytes());
                }
                if one.space_bytes > 0 || (one.out && one.wants) {
                    waiting = waiting.or(Some(one.id));
                }
                let may = job.terms.limit_bytes.unwrap_or(u64::MAX);
                let own = may.saturating_sub(job.terms.used_bytes);
                left = Some(left.unwrap_or(0u64).saturating_add(own));
            }
            coordinator.step(&Occupancy {
                now_ns,
                capacity_bytes: self.capacity_bytes,
                others_bytes,
                waiting,
                guaranteed_left_bytes: left,
                jobs: &coordinated,
            });
            self.coordinator = Some(coordinator);
        }
        for job in jobs {
            self.publish_cap(job);
        }
    }

    /// An opportunistic job whose memory can be moved, and that has it where it can use it.
    pub(super) fn is_coordinated(&self, job: &JobView<'_>) -> bool {
        let known = |(client, _): &(u64, _)| self.machines.contains_key(client);
        job.class == Class::Opportunistic
            && !job.terms.kept_away
            && job.clients.iter().any(known)
            && matches!(self.state_of(job), State::Resident | State::Partly)
    }

    /// Each process has its part of what the job may have, as in an order to fit.
    fn publish_cap(&self, job: &JobView<'_>) {
        let cap = self.cap(job.id);
        let all = self.evictable_bytes(job);
        let own = job.clients.iter().filter_map(|(client, pages)| {
            Some((
                self.machines.get(client)?.1.footprint().evictable_bytes,
                pages,
            ))
        });
        let count = own.clone().count().max(1) as u64; // CAST: processes of a job.
        for (movable, pages) in own {
            let bytes = cap.map(|cap| match cap.bytes {
                None => channel::NO_LIMIT,
                Some(bytes) if all == 0 => bytes / count,
                Some(bytes) => {
                    let own = u128::from(bytes) * u128::from(movable) / u128::from(all);
                    u64::try_from(own).unwrap_or(u64::MAX - 1)
                }
            });
            pages.arbiter.set_resident_cap(self.device, bytes);
        }
    }

    /// Whether others shrink so far that `id` has what it waits for: nobody need leave then.
    pub(super) fn shrinks_for(&self, now_ns: u64, id: TenantId) -> bool {
        let Some(one) = self.residents.iter().find(|one| one.id == id) else {
            return false;
        };
        if self.coordinator.is_none()
            || (one.class == Class::Opportunistic && self.cap(id).is_none())
        {
            return false;
        }
        let missing = if one.out { one.missing_bytes() } else { 0 };
        let lacking = self.residents(now_ns).lacking_bytes(missing);
        let can_give = self
            .residents
            .iter()
            .filter(|other| self.cap(other.id).is_some() && other.stuck_until_ns <= now_ns);
        let there = can_give
            .map(|other| other.resident_bytes)
            .fold(0, u64::saturating_add);
        lacking > 0 && there >= lacking
    }

    /// A job was fitted: people want to know why, where that was not its own limit.
    pub(super) fn tell_of_fit(&mut self, id: TenantId) {
        let to_bytes = self.resident_bytes(id);
        let Some(record) = self.records.get(&id) else {
            return;
        };
        let from_bytes = record.before_bytes;
        let Some(cap) = self.cap(id) else {
            return;
        };
        if record.figures.failed || from_bytes == to_bytes {
            return;
        }
        let cause = match cap.cause {
            // It has come up to a cap that was lower before.
            Cause::Waits(_) | Cause::Low if to_bytes > from_bytes => Cause::Calm,
            cause => cause,
        };
        self.news.push(News::Fitted {
            id,
            from_bytes,
            to_bytes,
            cause,
        });
    }
}
