//! Who is on the device beside whom, and the account of the time in which that is contested
//! ([`contest`](super::contest)).

use policy::TenantId;

use super::DeviceScheduler;
use super::entity::{RunEntity, Stretch};

/// Who is on the device beside whom in a stretch of time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Beside {
    /// The holder, where there is one and it is known what is its own work.
    pub holder: Option<TenantId>,
    /// A drain has ended in the stretch.
    pub ended: bool,
}

impl DeviceScheduler {
    /// Looks who is on the device, and whether drains beside a holder have ended since the last
    /// look.
    pub(super) fn beside(&mut self) -> Beside {
        let by_itself = self.roster.iter().all(RunEntity::is_by_itself) && !self.at_once();
        let mut holders = self.roster.iter().filter(|entity| entity.holds());
        let holder = match (holders.next(), holders.next()) {
            (Some(one), None) if by_itself => Some(one.tenant),
            _ => None,
        };
        let mut ended = false;
        for entity in self.roster.iter_mut() {
            ended |= entity.peek(self.device, holder.is_some());
        }
        Beside { holder, ended }
    }

    /// Takes in what the holder's marks show, and charges what was kept back where that is known or
    /// will not be.
    pub(super) fn settle_contest(&mut self, now_ns: u64) {
        // A holder that has the device to itself shows what its marks take.
        let beside = self.roster.is_draining() || self.contest.is_open();
        for entity in self.roster.iter_mut() {
            entity.learn_marks(beside);
        }
        let Some(holder) = self.contest.holder() else {
            return;
        };
        let holder = self.roster.find(holder).filter(|entity| entity.holds());
        let passed_ns = holder.and_then(|entity| entity.submissions().passed_ns());
        self.contest.pass(passed_ns.unwrap_or(0));
        let mut entities = self.roster.iter();
        let drains = entities.any(|entity| entity.drains() && self.contest.has(entity.tenant));
        if holder.is_none() || self.contest.is_known() && !drains {
            self.end_contest(now_ns);
        } else if self.contest.is_overdue() {
            let charges = self.contest.give_up();
            self.charge_contest(now_ns, charges);
        }
    }

    /// Charges what was kept back by what is known: the slice is over, or about to be.
    pub(super) fn end_contest(&mut self, now_ns: u64) {
        let charges = self.contest.settle();
        self.charge_contest(now_ns, charges);
    }

    fn charge_contest(&mut self, now_ns: u64, charges: Vec<(TenantId, u64)>) {
        let slices = self.slices();
        for (tenant, ns) in charges {
            let Some(entity) = self.roster.find_mut(tenant) else {
                continue;
            };
            self.choice.charge(tenant, ns);
            let stretch = Stretch {
                now_ns,
                dt_ns: 0,
                contended: true,
                slices,
            };
            entity.charge(stretch, ns);
        }
    }
}
