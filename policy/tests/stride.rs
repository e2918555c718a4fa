//! The promises of the stride policy, in virtual time.

use policy::stepper::{Phase, SimTenant, Stepper};
use policy::{Class, QuantumBounds, Stride, TenantId};
use proptest::prelude::*;

const QUANTUM: QuantumBounds = QuantumBounds {
    min_us: 2000,
    max_us: 5000,
};
const SECOND_US: u64 = 1_000_000;

fn stepper() -> Stepper<Stride> {
    Stepper::new(Stride::new(), QUANTUM)
}

fn tenant(id: u64, share: f64, phases: Vec<Phase>) -> SimTenant {
    SimTenant::new(id, (share * 1e6) as u32, phases)
}

fn busy(id: u64, share: f64, kernel_us: u64) -> SimTenant {
    let phase = Phase::Busy {
        device_us: 3600 * SECOND_US,
        kernel_us,
    };
    tenant(id, share, vec![phase])
}

fn opportunistic(tenant: SimTenant) -> SimTenant {
    SimTenant {
        class: Class::Opportunistic,
        ..tenant
    }
}

fn share(stepper: &Stepper<Stride>, id: u64, before_ns: u64, over_us: u64) -> f64 {
    (stepper.got(TenantId(id)).device_ns - before_ns) as f64 / (over_us * 1000) as f64
}

#[test]
fn three_quarters_and_one_quarter_hold_in_every_second() {
    let mut sim = stepper();
    sim.join(busy(1, 0.75, 150));
    sim.join(busy(2, 0.25, 400));
    for second in 0..20 {
        let before = [1, 2].map(|id| sim.got(TenantId(id)).device_ns);
        sim.run_us(SECOND_US);
        let a = share(&sim, 1, before[0], SECOND_US);
        let b = share(&sim, 2, before[1], SECOND_US);
        assert!(
            (a - 0.75).abs() < 0.01 && (b - 0.25).abs() < 0.01,
            "second {second}: {a} {b}"
        );
    }
    assert_eq!(sim.idle_ns(), 0);
}

#[test]
fn eight_to_one_holds_in_every_second() {
    let mut sim = stepper();
    sim.join(busy(1, 8.0 / 9.0, 100));
    sim.join(busy(2, 1.0 / 9.0, 100));
    for _ in 0..20 {
        let before = sim.got(TenantId(1)).device_ns;
        sim.run_us(SECOND_US);
        let got = share(&sim, 1, before, SECOND_US);
        assert!((got - 8.0 / 9.0).abs() < 0.01, "{got}");
    }
}

#[test]
fn overrun_is_repaid() {
    // Kernels of 40 ms in slices of 5 ms against kernels of 0.1 ms: every slice of the first is
    // overrun eightfold.
    let mut sim = stepper();
    sim.join(busy(1, 0.5, 40_000));
    sim.join(busy(2, 0.5, 100));
    sim.run_us(30 * SECOND_US);
    let got = share(&sim, 1, 0, 30 * SECOND_US);
    assert!((got - 0.5).abs() < 0.01, "{got}");
    assert!(sim.got(TenantId(1)).overrun_ns > 0);
}

#[test]
fn one_that_sleeps_neither_earns_nor_costs() {
    let mut sim = stepper();
    sim.join(busy(1, 0.5, 100));
    let nap = vec![
        Phase::Sleep { us: 10 * SECOND_US },
        Phase::Busy {
            device_us: 3600 * SECOND_US,
            kernel_us: 100,
        },
    ];
    sim.join(tenant(2, 0.5, nap));
    sim.run_us(10 * SECOND_US);
    assert!(
        share(&sim, 1, 0, 10 * SECOND_US) > 0.999,
        "the sleeper costs nothing"
    );
    let before = sim.got(TenantId(2)).device_ns;
    sim.run_us(SECOND_US);
    let got = share(&sim, 2, before, SECOND_US);
    assert!(
        (got - 0.5).abs() < 0.01,
        "it woke to its half, not to ten seconds of arrears: {got}"
    );
}

#[test]
fn an_opportunistic_tenant_gets_what_is_left_and_only_that() {
    let mut sim = stepper();
    let training = vec![
        Phase::Busy {
            device_us: 60_000,
            kernel_us: 200,
        },
        Phase::Sleep { us: 40_000 },
    ];
    sim.join(tenant(1, 1.0, training));
    sim.join(opportunistic(busy(2, 0.5, 200)));
    sim.run_us(10 * SECOND_US);
    let (a, b) = (
        share(&sim, 1, 0, 10 * SECOND_US),
        share(&sim, 2, 0, 10 * SECOND_US),
    );
    assert!((a - 0.6).abs() < 0.01, "as if it were alone: {a}");
    assert!((b - 0.4).abs() < 0.01, "{b}");
    assert!(
        sim.got(TenantId(1)).longest_wait_ns <= 200_000,
        "one kernel of the other at most"
    );
    sim.join(busy(3, 1.0, 200));
    let before = sim.got(TenantId(2)).device_ns;
    sim.run_us(SECOND_US);
    assert!(
        share(&sim, 2, before, SECOND_US) < 0.001,
        "guaranteed tenants want all of it"
    );
}

#[test]
fn a_new_weight_holds_from_the_next_second_on() {
    let mut sim = stepper();
    sim.join(busy(1, 0.5, 100));
    sim.join(busy(2, 0.5, 100));
    sim.run_us(5 * SECOND_US);
    sim.set_weight(TenantId(1), 900_000);
    sim.set_weight(TenantId(2), 100_000);
    let before = sim.got(TenantId(1)).device_ns;
    sim.run_us(SECOND_US);
    let got = share(&sim, 1, before, SECOND_US);
    assert!((got - 0.9).abs() < 0.011, "{got}");
}

#[test]
fn the_holders_death_hands_the_device_on_at_once() {
    let mut sim = stepper();
    sim.join(busy(1, 0.5, 100));
    sim.join(busy(2, 0.5, 100));
    sim.run_us(SECOND_US);
    let holder = sim.holder().expect("somebody holds it");
    sim.remove(holder);
    let other = sim.holder().expect("somebody else holds it");
    assert_ne!(holder, other);
    let before = sim.got(other).device_ns;
    sim.run_us(SECOND_US);
    assert_eq!(sim.got(other).device_ns - before, SECOND_US * 1000);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Busy tenants with any weights and kernels: each gets its weight's part, the device is never
    /// idle, none starves.
    #[test]
    fn busy_tenants_get_their_weights(
        weights in proptest::collection::vec(1u32..100, 2..6),
        kernels in proptest::collection::vec(50u64..3000, 6),
    ) {
        let sum: u32 = weights.iter().sum();
        let mut sim = stepper();
        for (id, weight) in weights.iter().enumerate() {
            sim.join(busy(id as u64, f64::from(*weight) / f64::from(sum), kernels[id]));
        }
        let span = 30 * SECOND_US;
        sim.run_us(span);
        prop_assert_eq!(sim.idle_ns(), 0);
        for (id, weight) in weights.iter().enumerate() {
            let (asked, got) = (f64::from(*weight) / f64::from(sum), share(&sim, id as u64, 0, span));
            prop_assert!((asked - got).abs() < 0.01, "{} of {:?}: asked {}, got {}", id, weights, asked, got);
        }
    }

    /// Tenants that come and go in their own rhythm: the device never idles while one of them wants
    /// it, and each that wants less than its share gets all that it wants.
    #[test]
    fn bursts_are_served_and_no_time_is_lost(
        bursts in proptest::collection::vec((200u64..20_000, 200u64..20_000, 50u64..500), 2..6),
        classes in proptest::collection::vec(any::<bool>(), 6),
    ) {
        let mut sim = stepper();
        let part = 1.0 / bursts.len() as f64;
        for (id, (device_us, us, kernel_us)) in bursts.iter().enumerate() {
            let phases = vec![
                Phase::Busy { device_us: *device_us, kernel_us: *kernel_us },
                Phase::Sleep { us: *us },
            ];
            let one = tenant(id as u64, part, phases);
            sim.join(if classes[id] { opportunistic(one) } else { one });
        }
        let span = 10 * SECOND_US;
        sim.run_us(span);
        prop_assert_eq!(sim.idle_ns(), 0);
        let guaranteed: Vec<usize> = (0..bursts.len()).filter(|id| !classes[*id]).collect();
        for id in &guaranteed {
            let got = sim.got(TenantId(*id as u64));
            prop_assert!(got.device_ns > 0, "{} starves", id);
            // A round of all tenants' quanta, and one kernel in flight for every tenant.
            let round_ns = 2 * 5_000_000 * bursts.len() as u64 * bursts.len() as u64;
            prop_assert!(got.longest_wait_ns < round_ns, "{} waited {} ns", id, got.longest_wait_ns);
        }
    }
}
