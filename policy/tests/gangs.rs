//! Turns of gangs: who is dealt one, with whom beside it, and what everybody gets in the end.

use policy::gangs::{Deal, Gang, Group, SINGLES, link};
use policy::{Class, QuantumBounds, TenantId, TenantView};

const QUANTUM: QuantumBounds = QuantumBounds {
    min_us: 2000,
    max_us: 5000,
};
const MS: u64 = 1_000_000;

fn gang(id: u64, devices: u32) -> Gang {
    (TenantId(id), devices)
}

#[test]
fn gangs_that_touch_by_whatever_chain_are_one_group() {
    let gangs = [
        gang(1, 0b00011),
        gang(2, 0b11000),
        gang(3, 0b00110),
        gang(4, 0b110_0000),
    ];
    let mut groups = link(&gangs);
    groups.sort_unstable();
    let first = (0b00111, vec![gangs[0], gangs[2]]);
    assert_eq!(
        groups,
        [
            first,
            (0b11000, vec![gangs[1]]),
            (0b110_0000, vec![gangs[3]])
        ]
    );
    // One that comes last links two that were apart.
    let linked = link(&[gangs[0], gangs[1], gang(9, 0b01010)]);
    assert_eq!(linked.len(), 1);
    assert_eq!(linked[0].0, 0b11011);
    assert!(link(&[]).is_empty());
}

/// A group in virtual time: a gang uses all of its turn, and the singles also use what gangs do not
/// need.
struct Hall {
    group: Group,
    tenants: Vec<TenantView>,
    used_ns: Vec<(TenantId, u64)>,
    on: Vec<TenantId>,
    singles_on: bool,
    now_ns: u64,
}

impl Hall {
    fn new(gangs: &[Gang], weights: &[(u64, u32)], singles: u32) -> Self {
        let mut tenants: Vec<TenantView> = weights
            .iter()
            .map(|(id, weight)| TenantView::new(TenantId(*id), Class::Guaranteed, *weight, true))
            .collect();
        tenants.push(TenantView::new(
            SINGLES,
            Class::Guaranteed,
            singles,
            singles > 0,
        ));
        Self {
            group: Group::new(gangs.to_vec()),
            used_ns: tenants.iter().map(|tenant| (tenant.id, 0)).collect(),
            tenants,
            on: Vec::new(),
            singles_on: false,
            now_ns: 0,
        }
    }

    fn run(&mut self, ms: u64) {
        for _ in 0..ms * 10 {
            self.group.charge(self.used_ns.clone());
            let (deal, _) = self.group.decide(self.now_ns, &self.tenants, QUANTUM);
            match deal {
                Deal::Stay => {}
                Deal::End => (self.on, self.singles_on) = (Vec::new(), false),
                Deal::Begin {
                    gangs, contended, ..
                } => {
                    assert!(contended || self.tenants.iter().filter(|t| t.wants).count() == 1);
                    let devices = gangs.iter().map(|(_, devices)| devices.count_ones());
                    let all = gangs.iter().fold(0, |all, (_, devices)| all | devices);
                    assert_eq!(devices.sum::<u32>(), all.count_ones(), "no device twice");
                    self.singles_on = gangs.is_empty();
                    self.on = gangs.into_iter().map(|(id, _)| id).collect();
                }
            }
            self.now_ns += MS / 10;
            for (id, used_ns) in &mut self.used_ns {
                // The singles use something all the time: devices that no gang has.
                if self.on.contains(id) || *id == SINGLES {
                    *used_ns += MS / 10;
                }
            }
        }
    }

    fn used_ms(&self, id: TenantId) -> u64 {
        let used = self.used_ns.iter().find(|(of, _)| *of == id);
        used.map_or(0, |(_, ns)| ns / MS)
    }
}

#[test]
fn turns_are_dealt_by_weight_between_gangs_and_singles() {
    let gangs = [gang(1, 0b11), gang(2, 0b11)];
    let mut hall = Hall::new(&gangs, &[(1, 500_000), (2, 250_000)], 250_000);
    hall.run(10_000);
    let got = [1, 2].map(|id| hall.used_ms(TenantId(id)));
    assert!(
        got[0].abs_diff(5000) <= 20 && got[1].abs_diff(2500) <= 20,
        "{got:?}"
    );
}

#[test]
fn what_singles_use_beside_a_gang_is_not_charged_to_their_turns() {
    let mut hall = Hall::new(&[gang(1, 0b11)], &[(1, 500_000)], 500_000);
    hall.run(10_000);
    let got = hall.used_ms(TenantId(1));
    assert!(got.abs_diff(5000) <= 20, "{got}");
}

#[test]
fn gangs_that_fit_run_beside_each_other() {
    let gangs = [gang(1, 0b0011), gang(2, 0b1100), gang(3, 0b0110)];
    let mut hall = Hall::new(&gangs, &[(1, 300_000), (2, 300_000), (3, 300_000)], 0);
    hall.run(9_000);
    let got = [1, 2, 3].map(|id| hall.used_ms(TenantId(id)));
    // The first two together, the third by itself: a half each.
    assert!(got.iter().all(|got| got.abs_diff(4500) <= 100), "{got:?}");
}

#[test]
fn nobody_is_dealt_a_turn_that_nobody_wants() {
    let mut hall = Hall::new(&[gang(1, 0b11)], &[(1, 500_000)], 0);
    hall.run(100);
    assert_eq!(hall.on, [TenantId(1)]);
    let used_ms = hall.used_ms(TenantId(1));
    hall.tenants[0].wants = false;
    hall.tenants[1] = TenantView::new(SINGLES, Class::Guaranteed, 500_000, true);
    hall.run(100);
    assert!(hall.on.is_empty() && hall.singles_on);
    assert!(hall.used_ms(TenantId(1)) <= used_ms + 1);
}
