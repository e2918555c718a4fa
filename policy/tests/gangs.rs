//! Gangs over several devices: together or not at all, never starved, never standing still.
//!
//! A rank that holds its device while another rank of its gang does not spins: it is charged and gets nowhere.

use policy::{Class, Device, GangId, Gangs, Holder, QuantumBounds, TenantId, TenantView, View};

const QUANTUM: QuantumBounds = QuantumBounds {
    min_us: 2000,
    max_us: 5000,
};
const TICK_NS: u64 = 100_000;

struct Fleet {
    gangs: Gangs,
    tenants: Vec<Vec<TenantView>>,
    holders: Vec<Vec<Holder>>,
    now_ns: u64,
    /// Per device and tenant, in ticks.
    got: Vec<Vec<u64>>,
    /// Ticks in which a rank held its device and another of its gang did not.
    spun: u64,
    idle: u64,
}

impl Fleet {
    /// One list per device: number, gang, weight.
    fn new(devices: &[&[(u64, Option<u64>, u32)]]) -> Self {
        let tenants: Vec<Vec<TenantView>> = (devices.iter())
            .map(|tenants| {
                (tenants.iter())
                    .map(|(id, gang, weight)| TenantView {
                        gang: gang.map(GangId),
                        ..TenantView::new(TenantId(*id), Class::Guaranteed, *weight, true)
                    })
                    .collect()
            })
            .collect();
        Self {
            gangs: Gangs::stride(devices.len()),
            holders: vec![Vec::new(); devices.len()],
            got: tenants
                .iter()
                .map(|tenants| vec![0; tenants.len()])
                .collect(),
            tenants,
            now_ns: 0,
            spun: 0,
            idle: 0,
        }
    }

    fn tick(&mut self) {
        let views: Vec<View<'_>> = (self.tenants.iter().zip(&self.holders))
            .map(|(tenants, holders)| View {
                now_ns: self.now_ns,
                tenants,
                holders,
                quantum: QUANTUM,
                device: Device::EXCLUSIVE,
            })
            .collect();
        let decisions = self.gangs.decide(&views);
        for (holders, decision) in self.holders.iter_mut().zip(&decisions) {
            holders.retain(|holder| !decision.revoke.contains(&holder.id));
            for slice in &decision.grant {
                holders.retain(|holder| holder.id != slice.tenant);
                holders.push(Holder {
                    id: slice.tenant,
                    since_ns: self.now_ns,
                    quantum_us: slice.quantum_us,
                });
            }
            assert!(holders.len() <= 1, "one at a time");
        }
        self.now_ns += TICK_NS;
        for device in 0..self.tenants.len() {
            self.idle += u64::from(self.holders[device].is_empty());
            for holder in self.holders[device].clone() {
                let at = self.tenants[device].iter().position(|t| t.id == holder.id);
                let at = at.expect("a holder is a tenant");
                self.got[device][at] += 1;
                self.gangs.charge(device, holder.id, TICK_NS);
                let gang = self.tenants[device][at].gang;
                let together = (self.tenants.iter().zip(&self.holders)).all(|(ranks, holders)| {
                    (ranks
                        .iter()
                        .filter(|rank| gang.is_some() && rank.gang == gang))
                    .all(|rank| holders.iter().any(|holder| holder.id == rank.id))
                });
                self.spun += u64::from(!together);
            }
        }
    }

    fn parts(&mut self, ticks: u64) -> Vec<Vec<f64>> {
        let before = self.got.clone();
        (0..ticks).for_each(|_| self.tick());
        (self.got.iter().zip(&before))
            .map(|(now, before)| {
                (now.iter().zip(before))
                    .map(|(now, before)| (now - before) as f64 / ticks as f64)
                    .collect()
            })
            .collect()
    }
}

fn near(got: &[Vec<f64>], asked: &[&[f64]]) {
    for (got, asked) in got.iter().flatten().zip(asked.iter().copied().flatten()) {
        assert!((got - asked).abs() < 0.02, "{got} for {asked}");
    }
}

#[test]
fn a_gang_of_two_is_not_starved_by_single_jobs() {
    let mut fleet = Fleet::new(&[
        &[(1, None, 1), (9, Some(1), 1)],
        &[(2, None, 1), (9, Some(1), 1)],
    ]);
    near(&fleet.parts(50_000), &[&[0.5, 0.5], &[0.5, 0.5]]);
    assert_eq!((fleet.spun, fleet.idle), (0, 0));
}

#[test]
fn weights_count_for_gangs_too() {
    let mut fleet = Fleet::new(&[
        &[(1, None, 1), (9, Some(1), 3)],
        &[(2, None, 1), (9, Some(1), 3)],
    ]);
    near(&fleet.parts(50_000), &[&[0.25, 0.75], &[0.25, 0.75]]);
    assert_eq!((fleet.spun, fleet.idle), (0, 0));
}

#[test]
fn a_gang_gets_what_it_is_due_where_that_is_least() {
    let crowded = &[(2, None, 1), (3, None, 1), (4, None, 1), (9, Some(1), 1)];
    let mut fleet = Fleet::new(&[&[(1, None, 1), (9, Some(1), 1)], crowded]);
    let parts = fleet.parts(100_000);
    near(&parts, &[&[0.75, 0.25], &[0.25, 0.25, 0.25, 0.25]]);
    assert_eq!((fleet.spun, fleet.idle), (0, 0));
    // What it was not given on the first device it does not ask back when the second is empty.
    fleet.tenants[1].truncate(4);
    fleet.tenants[1].retain(|tenant| tenant.gang.is_some());
    fleet.holders[1].retain(|holder| holder.id == TenantId(9));
    fleet.got[1] = vec![0];
    near(&fleet.parts(20_000), &[&[0.5, 0.5], &[0.5]]);
}

#[test]
fn gangs_that_overlap_in_a_ring_all_get_on() {
    // Each pair of three devices is one gang's: whoever holds one and waits for the other would stop all three.
    let mut fleet = Fleet::new(&[
        &[(1, Some(1), 1), (3, Some(3), 1)],
        &[(1, Some(1), 1), (2, Some(2), 1)],
        &[(2, Some(2), 1), (3, Some(3), 1)],
    ]);
    let parts = fleet.parts(60_000);
    for part in parts.iter().flatten() {
        assert!((part - 1.0 / 3.0).abs() < 0.05, "{parts:?}");
    }
    assert_eq!(fleet.spun, 0);
}

#[test]
fn a_gang_leaves_everywhere_when_one_rank_is_paused() {
    let mut fleet = Fleet::new(&[
        &[(1, None, 1), (9, Some(1), 1)],
        &[(2, None, 1), (9, Some(1), 1)],
    ]);
    fleet.parts(1000);
    fleet.tenants[1][1].paused = true;
    near(&fleet.parts(1000), &[&[1.0, 0.0], &[1.0, 0.0]]);
    fleet.tenants[1][1].paused = false;
    near(&fleet.parts(20_000), &[&[0.5, 0.5], &[0.5, 0.5]]);
    assert_eq!((fleet.spun, fleet.idle), (0, 0));
}

#[test]
fn a_rank_that_waits_for_another_counts_as_wanting() {
    // Rank 0 stands in a collective and submits nothing more; rank 1 has still to launch.
    let mut fleet = Fleet::new(&[
        &[(1, None, 1), (9, Some(1), 1)],
        &[(2, None, 1), (9, Some(1), 1)],
    ]);
    fleet.tenants[0][1].wants = false;
    near(&fleet.parts(50_000), &[&[0.5, 0.5], &[0.5, 0.5]]);
    assert_eq!(fleet.spun, 0);
}

#[test]
fn gangs_work_under_every_policy() {
    for spec in policy::POLICIES {
        let mut fleet = Fleet::new(&[&[(9, Some(1), 1)], &[(9, Some(1), 1), (2, None, 1)]]);
        fleet.gangs = Gangs::by_name(spec.name, &[], 2).expect("a policy of the list");
        fleet.tenants[1][1].class = Class::Opportunistic;
        let parts = fleet.parts(5000);
        assert_eq!(fleet.spun, 0, "{}", spec.name);
        assert!(
            parts[0][0] > 0.99 && parts[1][0] > 0.99,
            "{}: {parts:?}",
            spec.name
        );
    }
}
