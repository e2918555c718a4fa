//! Reports about a device's residency.

use std::rc::Rc;

use channel::Verb;
use channel::arbiter::ClientPages;
use policy::coordinator::Cause;
use policy::residency::{Arbitration, ResidentJob, Standing};
use policy::{Class, TenantId};

use super::{Phase, ResidencyManager};
use crate::residency::client_state::{ClientStateMachine, State};
use crate::residency::job_view::{JobView, ResidencyTerms};

/// What is reported about a tenant.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Figures {
    pub evictions: u64,
    pub restores: u64,
    pub moving_ns: u64,
    /// Why the last thing asked of it was not done.
    pub reason: String,
    /// Of the last move: when it was asked for, when its work had ended, when it was over; 0: not
    /// yet.
    pub asked_ns: u64,
    pub drained_ns: u64,
    pub ended_ns: u64,
    /// Copied by the last move, both ways.
    pub copied_bytes: u64,
    /// The last thing asked of it was not done.
    pub failed: bool,
}

/// Where a tenant is, for reports.
#[derive(Clone, PartialEq, Debug)]
pub struct ResidencyStatus {
    pub state: State,
    pub evictable_bytes: u64,
    pub resident_bytes: u64,
    pub fixed_bytes: u64,
    /// Kinds of memory among them, by the order of [`channel::STAYING`].
    pub staying: u8,
    pub host_bytes: u64,
    pub moved_out_bytes: u64,
    pub moved_in_bytes: u64,
    pub standing: Standing,
    pub parked: bool,
    /// It shrinks for others, and is not evicted for them.
    pub shrinks: bool,
    /// Less of it may be on the device than it has, and why: so many bytes of what can be moved.
    pub shrunk_to: Option<(u64, Cause)>,
    /// Nothing is under way.
    pub settled: bool,
    pub figures: Figures,
}

/// What the jobs of a device have together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Crowd {
    /// What can be moved, wherever it is.
    pub evictable_bytes: u64,
    /// They do not fit on the device together.
    pub is_crowded: bool,
}

/// Something that people want to know of.
#[derive(Clone, PartialEq, Debug)]
pub enum News {
    /// It could not be moved.
    NotMoved {
        id: TenantId,
        verb: Verb,
        why: String,
    },
    /// It has more or less of its memory on the device, so that all have their part.
    Fitted {
        id: TenantId,
        from_bytes: u64,
        to_bytes: u64,
        cause: Cause,
    },
    /// It is left aside, or no longer.
    Parked { id: TenantId, parked: bool },
}

impl ResidencyManager {
    /// What has happened since the last time.
    pub fn take_news(&mut self) -> Vec<News> {
        std::mem::take(&mut self.news)
    }

    /// What the jobs have together, as last counted.
    pub fn crowd(&self) -> Crowd {
        let sum = |of: fn(&ResidentJob) -> u64| {
            self.residents.iter().map(of).fold(0, u64::saturating_add)
        };
        let evictable_bytes = sum(|one| one.evictable_bytes);
        let wanted = sum(|one| one.fixed_bytes.saturating_add(one.space_bytes))
            .saturating_add(evictable_bytes);
        Crowd {
            evictable_bytes,
            is_crowded: self.capacity_bytes > 0 && wanted > self.capacity_bytes,
        }
    }

    /// How much of the time goes into switches, and how fast memory moves.
    pub fn arbitration(&self) -> &Arbitration {
        &self.arbitration
    }

    /// Where a tenant's memory is; `None`: none of it can be moved.
    pub fn residency_status(
        &self,
        id: TenantId,
        clients: &[(u64, Rc<ClientPages>)],
    ) -> Option<ResidencyStatus> {
        let machines: Vec<&ClientStateMachine> = clients
            .iter()
            .filter_map(|(client, _)| Some(&self.machines.get(client)?.1))
            .collect();
        if machines.is_empty() {
            return None;
        }
        let job = JobView {
            id,
            class: Class::default(),
            weight_ppm: 0,
            arrived_ns: 0,
            wants: false,
            active: false,
            drained: false,
            terms: ResidencyTerms::default(),
            clients,
        };
        let sum = |of: fn(&channel::Footprint) -> u64| {
            machines
                .iter()
                .map(|machine| of(&machine.footprint()))
                .fold(0, u64::saturating_add)
        };
        let record = self.records.get(&id).cloned().unwrap_or_default();
        Some(ResidencyStatus {
            state: match (record.phase, self.state_of(&job)) {
                (Phase::Draining { .. }, State::Resident) => State::Evicting,
                (Phase::Called, _) => State::Restoring,
                (_, state) => state,
            },
            evictable_bytes: sum(|f| f.evictable_bytes),
            resident_bytes: sum(|f| f.resident_bytes),
            fixed_bytes: record.fixed_bytes,
            staying: clients.iter().fold(0, |kinds, (_, pages)| {
                kinds | pages.client.staying(self.device)
            }),
            host_bytes: sum(|f| f.host_bytes),
            moved_out_bytes: sum(|f| f.moved_out_bytes),
            moved_in_bytes: sum(|f| f.moved_in_bytes),
            standing: record.standing,
            parked: self.arbitration.is_parked(id),
            shrinks: self.cap(id).is_some(),
            shrunk_to: self.cap(id).and_then(|cap| {
                let movable = sum(|f| f.evictable_bytes);
                let bytes = cap.bytes.filter(|bytes| *bytes < movable)?;
                Some((bytes, cap.cause))
            }),
            settled: record.phase == Phase::Settled,
            figures: record.figures,
        })
    }
}
