//! Altruistic sharing: no job ends later than under fair sharing, and the leftover time shortens
//! the others.
//!
//! Source: R. Grandl, M. Chowdhury, A. Akella, G. Ananthanarayanan, "Altruistic Scheduling in
//! Multi-Resource Clusters" (Carbyne), OSDI 2016: a job keeps only what it needs to end no later
//! than under fair sharing; the leftover goes to the shortest.
//!
//! A *burst* is what a tenant submits until it stops at a barrier (the end of its iteration, a
//! collective, an answer to wait for). The policy keeps a *reference schedule*: a device shared in
//! perfect proportion by the same bursts. In the reference each burst is released as long after the
//! end of the burst before as it was in reality. The reference says when each burst would be done
//! under fair sharing. Then:
//!
//! 1. bursts that are released in the reference: the burst that ends first there runs first;
//! 2. bursts that are not (their tenants are ahead of the reference) take what is left, the
//!    shortest remaining first.
//!
//! *Nobody is done later.* Take "done in the reference" as a deadline and "released in the
//! reference" as a release. The reference itself is a schedule of one device that meets these
//! deadlines, and the earliest deadline first meets whatever can be met (M. Dertouzos, "Control
//! robotics: the procedural control of physical processes", IFIP 1974). A burst that is done early
//! is released early, which takes nothing from the others: it waits in the second group until its
//! release in the reference. Order inside the reference needs no foresight: of two bursts in it the
//! one with less left over weight ends first, whatever arrives later. What this does not cover: a
//! kernel that cannot be interrupted and the slice of a switch (both add to the end, once), and a
//! burst whose length was estimated wrong (the estimate is corrected as the burst runs, and until
//! then it may be in the wrong place of 1).
//!
//! *Numbers.* Four jobs, each 100 ms of device work and then 300 ms at a barrier, begin together.
//! Fair: all bursts end at 400 ms, the device idles up to 700 ms, an iteration takes 700 ms. Here:
//! the bursts end at 100, 200, 300 and 400 ms, the first is back at 400 ms, an iteration takes 400
//! ms and the device never idles.
//!
//! The length of a burst is what the iteration has left (if iterations are known), else a slice,
//! and one more when that is used up: without knowledge this is plain fair sharing.

use std::collections::{BTreeMap, VecDeque};

use super::SliceRegistration;
use super::salus::knows_iterations;
use crate::registry::Registration;
use crate::slice::{Class, TenantId, TenantView, View};
use crate::turns::Turns;
use crate::turns::{Order, Rank};

/// How it is chosen.
pub(super) static ALTRUISTIC: SliceRegistration = Registration {
    name: "altruistic",
    summary: "no burst ends later than under fair sharing; leftover time goes to the shortest",
    params: &[],
    build: |_| Box::new(Turns::new(Altruistic::default())),
};

/// Most bursts that a tenant may be ahead of the reference; beyond that the reference skips the
/// oldest.
const AHEAD_MOST: usize = 4096;

/// See the module's documentation.
#[derive(Debug, Default)]
struct Altruistic {
    at_ns: Option<u64>,
    members: BTreeMap<TenantId, Member>,
}

#[derive(Debug)]
struct Member {
    class: Class,
    weight: f64,
    /// The burst that is running in reality, or that ended last.
    number: u64,
    running: bool,
    /// Device time used in it, in nanoseconds.
    done_ns: f64,
    /// How long it is thought to be, in nanoseconds.
    length_ns: f64,
    ended_ns: u64,
    reference: Reference,
    /// Bursts released in reality and not yet in the reference, the oldest first.
    ahead: VecDeque<Burst>,
}

#[derive(Clone, Copy, Debug)]
struct Burst {
    number: u64,
    /// Between the end of the one before and this one, in nanoseconds.
    pause_ns: f64,
    length_ns: f64,
}

#[derive(Clone, Copy, Debug)]
enum Reference {
    /// This burst runs and has so much left, in nanoseconds of the device.
    Running { number: u64, left_ns: f64 },
    /// The burst before ended at this time; the next one starts after its pause, or is not known
    /// yet.
    Paused { number: u64, ended_ns: f64 },
}

impl Altruistic {
    /// Lets the reference run up to `now_ns`.
    fn advance(&mut self, now_ns: u64) {
        let mut at = self.at_ns.unwrap_or(now_ns) as f64;
        let end = now_ns as f64;
        self.at_ns = Some(now_ns);
        loop {
            self.members
                .values_mut()
                .for_each(|member| member.release(at));
            if at >= end {
                return;
            }
            let running = |member: &Member| matches!(member.reference, Reference::Running { .. });
            let class = if (self.members.values())
                .any(|member| running(member) && member.class == Class::Guaranteed)
            {
                Class::Guaranteed
            } else {
                Class::Opportunistic
            };
            let weights: f64 = (self.members.values())
                .filter(|member| running(member) && member.class == class)
                .map(|member| member.weight)
                .sum();
            let mut until = end;
            for member in self.members.values() {
                match member.reference {
                    Reference::Running { left_ns, .. } if member.class == class => {
                        until = until.min(at + left_ns * weights / member.weight);
                    }
                    Reference::Paused { ended_ns, .. } => {
                        if let Some(burst) = member.ahead.front() {
                            until = until.min((ended_ns + burst.pause_ns).max(at));
                        }
                    }
                    Reference::Running { .. } => {}
                }
            }
            let dt = (until - at).max(0.0);
            at = until;
            for member in self
                .members
                .values_mut()
                .filter(|member| member.class == class)
            {
                if let Reference::Running { number, left_ns } = &mut member.reference {
                    *left_ns -= dt * member.weight / weights;
                    // A nanosecond: rounding.
                    if *left_ns <= 1.0 {
                        member.reference = Reference::Paused {
                            number: *number,
                            ended_ns: at,
                        };
                    }
                }
            }
        }
    }
}

impl Member {
    fn release(&mut self, at: f64) {
        if let Reference::Paused { ended_ns, .. } = self.reference
            && let Some(burst) = self.ahead.front().copied()
            && ended_ns + burst.pause_ns <= at
        {
            self.ahead.pop_front();
            self.reference = Reference::Running {
                number: burst.number,
                left_ns: burst.length_ns.max(1.0),
            };
        }
    }

    /// The burst that runs in truth turns out to be so much longer (or shorter).
    fn correct(&mut self, by_ns: f64) {
        self.length_ns += by_ns;
        if let Reference::Running { number, left_ns } = &mut self.reference
            && *number == self.number
        {
            *left_ns = (*left_ns + by_ns).max(1.0);
        } else if let Some(burst) = self.ahead.iter_mut().find(|b| b.number == self.number) {
            burst.length_ns = (burst.length_ns + by_ns).max(1.0);
        } else if let Reference::Paused { number, .. } = self.reference
            && number == self.number
            && by_ns > 0.0
        {
            // It was over in the reference and is not: it goes on there.
            self.reference = Reference::Running {
                number,
                left_ns: by_ns,
            };
        }
    }

    fn begin(&mut self, now_ns: u64, length_ns: f64) {
        let pause_ns = now_ns.saturating_sub(self.ended_ns) as f64;
        self.number += 1;
        (self.running, self.done_ns, self.length_ns) = (true, 0.0, length_ns);
        self.ahead.push_back(Burst {
            number: self.number,
            pause_ns,
            length_ns,
        });
        if self.ahead.len() > AHEAD_MOST {
            self.ahead.pop_front();
        }
    }

    fn end(&mut self, now_ns: u64) {
        self.correct(self.done_ns - self.length_ns);
        self.running = false;
        self.ended_ns = now_ns;
    }

    fn left_ns(&self) -> f64 {
        (self.length_ns - self.done_ns).max(0.0)
    }
}

fn expected_ns(tenant: &TenantView, view: &View<'_>) -> f64 {
    let slice_ns = f64::from(view.quantum.max_us) * 1000.0;
    match tenant.iterations.device_ns {
        Some(device_ns) if knows_iterations(tenant) => {
            let left_ns = device_ns.saturating_sub(tenant.iterations.done_ns);
            if left_ns == 0 {
                slice_ns
            } else {
                left_ns as f64
            }
        }
        _ => slice_ns,
    }
}

impl Order for Altruistic {
    fn name(&self) -> &'static str {
        "altruistic"
    }

    fn charge(&mut self, id: TenantId, device_ns: u64) {
        if let Some(member) = self.members.get_mut(&id) {
            member.done_ns += device_ns as f64;
        }
    }

    fn follow(&mut self, view: &View<'_>) {
        self.advance(view.now_ns);
        self.members.retain(|id, _| view.tenant(*id).is_some());
        for tenant in view.tenants {
            let weight = f64::from(tenant.weight_ppm.max(1));
            let member = self.members.entry(tenant.id).or_insert(Member {
                class: tenant.class,
                weight,
                number: 0,
                running: false,
                done_ns: 0.0,
                length_ns: 0.0,
                ended_ns: view.now_ns,
                reference: Reference::Paused {
                    number: 0,
                    ended_ns: view.now_ns as f64,
                },
                ahead: VecDeque::new(),
            });
            (member.class, member.weight) = (tenant.class, weight);
            match (member.running, tenant.is_ready()) {
                (false, true) => member.begin(view.now_ns, expected_ns(tenant, view)),
                (true, false) => member.end(view.now_ns),
                (true, true) if member.left_ns() <= 0.0 => {
                    // Longer than was thought.
                    let by_ns = member.done_ns - member.length_ns + expected_ns(tenant, view);
                    member.correct(by_ns);
                }
                _ => {}
            }
        }
        self.members
            .values_mut()
            .for_each(|member| member.release(view.now_ns as f64));
    }

    fn rank(&self, tenant: &TenantView, _view: &View<'_>, ahead_ns: u64) -> Option<Rank> {
        let member = self.members.get(&tenant.id)?;
        let scaled = |ns: f64| (ns * 1e6 / member.weight * 1e3) as i128;
        Some(match member.reference {
            Reference::Running { number, left_ns } if number == member.number => {
                Rank::new(1, scaled(left_ns))
            }
            // Behind the reference: by how much it still has to do.
            Reference::Running { number, .. } | Reference::Paused { number, .. }
                if number >= member.number =>
            {
                Rank::new(0, scaled(member.left_ns()))
            }
            _ => Rank::new(2, scaled((member.left_ns() - ahead_ns as f64).max(0.0))),
        })
    }

    fn goes_for(&self, _holder: &TenantView, _better: &TenantView, _view: &View<'_>) -> bool {
        true
    }

    fn debt_ns(&self, id: TenantId) -> Option<i64> {
        let member = self.members.get(&id)?;
        let reference_ns = match member.reference {
            Reference::Running { number, left_ns } if number == member.number => left_ns,
            Reference::Running { left_ns, .. } => left_ns + member.done_ns + queued(member),
            Reference::Paused { number, .. } if number < member.number => queued(member),
            Reference::Paused { .. } => 0.0,
        };
        Some((reference_ns - member.left_ns()) as i64)
    }
}

/// Work released in reality and not yet in the reference, in nanoseconds.
fn queued(member: &Member) -> f64 {
    member.ahead.iter().map(|burst| burst.length_ns).sum()
}
