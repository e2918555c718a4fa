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

    /// Charges what was kept back, where the holder's marks show whose it is, or its slice is
    /// over.
    pub(super) fn settle_contest(&mut self, now_ns: u64) {
        let Some(holder) = self.contest.holder() else {
            return;
        };
        let holder = self.roster.find(holder).filter(|entity| entity.holds());
        let passed_ns = holder.and_then(|entity| entity.submissions().passed());
        if holder.is_none() || passed_ns.is_some() || self.contest.is_overdue() {
            self.charge_contest(now_ns, passed_ns);
        }
    }

    /// Charges what was kept back by halves: the slice is over, or about to be.
    pub(super) fn end_contest(&mut self, now_ns: u64) {
        self.charge_contest(now_ns, None);
    }

    fn charge_contest(&mut self, now_ns: u64, passed_ns: Option<u64>) {
        let slices = self.slices();
        for (tenant, ns) in self.contest.settle(passed_ns) {
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
