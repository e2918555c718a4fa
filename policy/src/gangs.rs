//! Gangs: jobs on several devices that run on all of them at once or on none.
//!
//! The ranks of a collective operation wait for each other *on the device*: a kernel of one spins
//! until those of the others have begun. If the devices were granted one by one, one rank would
//! spin through its slice on one device while the next rank waits for its turn on another, and two
//! such jobs could block each other for most of their time. (They would not deadlock: slices end by
//! the clock, a kernel that has begun keeps spinning beside the next tenant's work, and sooner or
//! later all have begun. The time is lost.)
//!
//! Devices that are linked by gangs form a *group* ([`link`]), and time in a group is divided into
//! *turns* ([`Group`]): for one gang, or for all tenants with one device (the *singles*, each
//! device by its own policy). Stride scheduling on measured device time assigns the turns; a gang's
//! weight is its own, that of the singles the largest sum of weights on one device. A gang is
//! charged its use of the device that it used most. In a gang's turn the gates on all its devices
//! open together; devices of the group that it does not use belong to the singles, and to other
//! gangs that fit beside it. (Gang scheduling: J. Ousterhout, "Scheduling Techniques for Concurrent
//! Systems", ICDCS 1982; by stride: S. Chaudhary et al., "Balancing Efficiency and Fairness in
//! Heterogeneous GPU Clusters for Deep Learning" (Gandiva-fair), EuroSys 2020.)

use crate::slice::{Device, Holder, QuantumBounds, SlicePolicy, TenantId, TenantView, View};
use crate::slices::Stride;

/// The tenants with one device, as one tenant of a group.
pub const SINGLES: TenantId = TenantId(u64::MAX);

/// A gang: who, and its devices as bits.
pub type Gang = (TenantId, u32);

/// Groups of gangs that share devices, directly or through other gangs: the devices of each group
/// as bits, and its gangs by number.
pub fn link(gangs: &[Gang]) -> Vec<(u32, Vec<Gang>)> {
    let mut groups: Vec<(u32, Vec<Gang>)> = Vec::new();
    for gang in gangs {
        let (touched, rest): (Vec<_>, Vec<_>) = groups
            .into_iter()
            .partition(|(devices, _)| devices & gang.1 != 0);
        groups = rest;
        let mut group = (gang.1, vec![*gang]);
        for (devices, gangs) in touched {
            group.0 |= devices;
            group.1.extend(gangs);
        }
        group.1.sort_unstable();
        groups.push(group);
    }
    groups
}

/// What is to be done about the turns of a group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Deal {
    /// The turns that are under way go on.
    Stay,
    /// All turns end, and nobody's begins: nobody wants any.
    End,
    /// All turns end, and these begin, each on the devices of its gang; an empty list is the
    /// singles' turn.
    Begin {
        /// Whose: the one whose turn it is, and those that fit beside it.
        gangs: Vec<Gang>,
        /// How long, in microseconds.
        quantum_us: u32,
        /// Others wait for the end.
        contended: bool,
    },
}

/// Deals the turns of one group.
#[derive(Debug)]
pub struct Group {
    gangs: Vec<Gang>,
    policy: Stride,
    held: Option<Holder>,
    /// What each gang, and the singles, had used when they were charged last, in nanoseconds.
    used_ns: Vec<(TenantId, u64)>,
}

impl Group {
    /// Of these gangs; nobody has had anything.
    pub fn new(gangs: Vec<Gang>) -> Self {
        Self {
            gangs,
            policy: Stride::new(),
            held: None,
            used_ns: Vec::new(),
        }
    }

    /// Its gangs.
    pub fn gangs(&self) -> &[Gang] {
        &self.gangs
    }

    /// Other gangs on the same devices; what was charged stays charged.
    pub fn set_gangs(&mut self, gangs: Vec<Gang>) {
        self.gangs = gangs;
    }

    /// What each gang and the singles have used so far, in nanoseconds of the device that they used
    /// most. The singles are charged for their own turns only: beside a gang they use time that
    /// nobody else wants.
    pub fn charge(&mut self, used_ns: Vec<(TenantId, u64)>) {
        let singles_turn = self.held.is_some_and(|held| held.id == SINGLES);
        for (id, now_ns) in &used_ns {
            let before = self.used_ns.iter().find(|(before, _)| before == id);
            let more_ns = now_ns.saturating_sub(before.map_or(*now_ns, |(_, ns)| *ns));
            if more_ns > 0 && (*id != SINGLES || singles_turn) {
                self.policy.charge(*id, more_ns);
            }
        }
        self.used_ns = used_ns;
    }

    /// Whose turn it is, given all gangs and the singles as tenants; and when to ask again.
    pub fn decide(
        &mut self,
        now_ns: u64,
        tenants: &[TenantView],
        quantum: QuantumBounds,
    ) -> (Deal, Option<u64>) {
        let decision = self.policy.decide(&View {
            now_ns,
            tenants,
            holders: self.held.as_slice(),
            quantum,
            device: Device::EXCLUSIVE,
        });
        let Some(slice) = decision.grant.first() else {
            let over = !decision.revoke.is_empty();
            if over {
                self.held = None;
            }
            let deal = if over { Deal::End } else { Deal::Stay };
            return (deal, decision.again_ns);
        };
        let anew = self.held.is_some_and(|held| held.id == slice.tenant);
        self.held = Some(Holder {
            id: slice.tenant,
            since_ns: now_ns,
            quantum_us: slice.quantum_us,
        });
        if anew {
            return (Deal::Stay, decision.again_ns);
        }
        let deal = Deal::Begin {
            gangs: self.fitting(slice.tenant, tenants),
            quantum_us: slice.quantum_us,
            contended: tenants.iter().filter(|tenant| tenant.wants).count() > 1,
        };
        (deal, decision.again_ns)
    }

    /// The gang whose turn it is, and others that want and use none of the devices that are taken.
    fn fitting(&self, whose: TenantId, tenants: &[TenantView]) -> Vec<Gang> {
        if whose == SINGLES {
            return Vec::new();
        }
        let first = self.gangs.iter().filter(|(id, _)| *id == whose);
        let rest = self.gangs.iter().filter(|(id, _)| *id != whose);
        let mut taken = 0;
        let mut fitting = Vec::new();
        for (id, devices) in first.chain(rest) {
            let wants = tenants
                .iter()
                .any(|tenant| tenant.id == *id && tenant.wants);
            if wants && taken & devices == 0 {
                taken |= devices;
                fitting.push((*id, *devices));
            }
        }
        fitting
    }
}
