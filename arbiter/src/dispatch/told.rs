//! What is told about a lane: who harms the others, how it runs, who holds it and what each one used.

use policy::quantum::Lengths;
use policy::{QuantumBounds, TenantId};

use super::Lane;
use super::conduct::Offence;
use super::pace::{Answer, Mode};
use super::seat::Seat;
use crate::usage::Usage;

impl Lane {
    /// Looks how tenants behave, a few times a second. Returns those whose penance is over. `excused`: whether it is the host that
    /// stands still, and not what the tenant has on the device or its process.
    pub fn inspect(
        &mut self,
        now_ns: u64,
        excused: &mut dyn FnMut(TenantId) -> bool,
    ) -> Vec<TenantId> {
        let slices = !self.at_once();
        for at in 0..self.seats.len() {
            let offence = self.seats[at].inspect(now_ns, self.device);
            if let Some(offence) = offence.filter(|_| slices) {
                let tenant = self.seats[at].tenant;
                let by_host = matches!(offence, Offence::Deaf | Offence::Endless { .. });
                if !(by_host && excused(tenant)) {
                    self.find(now_ns, tenant, offence);
                }
            }
        }
        let seats = self.seats.iter_mut();
        seats
            .filter_map(|seat| seat.conduct.forgive(now_ns).then_some(seat.tenant))
            .collect()
    }

    /// A tenant was found to harm the others.
    pub fn find(&mut self, now_ns: u64, tenant: TenantId, offence: Offence) {
        let answer = self.answer;
        if let Some(seat) = self.seat_mut(tenant)
            && seat.find(now_ns, offence, answer)
        {
            self.offences.push((tenant, offence));
        }
    }

    /// What is to be told, once.
    pub fn take_offences(&mut self) -> Vec<(TenantId, Offence)> {
        std::mem::take(&mut self.offences)
    }

    /// What becomes of a tenant that harms the others.
    pub fn answer(&self) -> Answer {
        self.answer
    }

    /// Why a tenant runs after all others, and how often it was found out.
    pub fn conduct(&self, tenant: TenantId, now_ns: u64) -> (Option<Offence>, u64) {
        let seat = self.seat(tenant);
        seat.map_or((None, 0), |seat| {
            (seat.conduct.demoted(now_ns), seat.conduct.count)
        })
    }

    // --- what is told about it ---

    /// Whether it runs all at once now, and why, where that is left to us.
    pub fn running(&self) -> (bool, &str) {
        let reason = match self.mode {
            Mode::Auto => self.auto.reason(),
            _ => "",
        };
        (self.at_once(), reason)
    }

    /// Between what a slice lasts now.
    pub fn quantum(&self) -> QuantumBounds {
        self.quantum
    }

    /// What a slice may last.
    pub fn lengths(&self) -> Lengths {
        self.pace.quantum
    }

    /// What the last slice was given in microseconds, and what a hand-over costs in nanoseconds; 0: not known.
    pub fn slice(&self) -> (u32, u64) {
        (self.slice_us, self.cost.ns())
    }

    /// Who holds the device. All at once, those who use it.
    pub fn holding(&self) -> impl Iterator<Item = TenantId> {
        let at_once = self.at_once();
        let holds = move |seat: &&Seat| seat.hold.is_some() && (!at_once || seat.busy);
        self.seats.iter().filter(holds).map(|seat| seat.tenant)
    }

    /// Part of the last second in which the device was in use.
    pub fn busy_part(&self, now_ns: u64) -> f64 {
        self.busy.part(now_ns)
    }

    /// What a tenant used.
    pub fn usage(&self, tenant: TenantId) -> Option<&Usage> {
        Some(&self.seat(tenant)?.usage)
    }

    /// Whether a tenant uses the device, and whether it waits for it.
    pub fn standing(&self, tenant: TenantId) -> (bool, bool) {
        let seat = self.seat(tenant);
        seat.map_or((false, false), |seat| {
            (seat.busy, seat.waits && seat.hold.is_none())
        })
    }
}
