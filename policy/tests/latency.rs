//! The slice policy `latency`: bursts within their target, the rest by share. In virtual time.

use policy::stepper::{Phase, SimTenant, Stepper};
use policy::{
    Device, Holder, LatencyReport, Param, QuantumBounds, SlicePolicy, TenantId, TenantView, Unmet,
    Value, View, by_name,
};

const QUANTUM: QuantumBounds = QuantumBounds {
    min_us: 2000,
    max_us: 5000,
};
const MS: u64 = 1_000_000;
const SERVICE: TenantId = TenantId(1);

fn build(name: &str) -> Box<dyn SlicePolicy> {
    by_name(name, &[]).expect("a policy of the list")
}

/// A training that never stops.
fn train(id: u64, kernel_us: u64) -> SimTenant {
    let phases = vec![Phase::Busy {
        device_us: 1_000_000,
        kernel_us,
    }];
    SimTenant::new(id, 333_333, phases)
}

/// Bursts of 3 ms, with pauses of `pause_us` in the mean, as they fall in an open system.
fn service(pause_us: f64, target_us: u64) -> SimTenant {
    let mut seed = 7u64;
    let mut pause = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let uniform = ((seed >> 33) as f64 + 1.0) / (1u64 << 31) as f64;
        (-pause_us * uniform.ln()) as u64 + 1
    };
    let phases = (0..500).flat_map(|_| {
        let burst = Phase::Busy {
            device_us: 3000,
            kernel_us: 250,
        };
        [Phase::Sleep { us: pause() }, burst]
    });
    SimTenant {
        latency_target_us: Some(target_us),
        ..SimTenant::new(1, 333_333, phases.collect())
    }
}

/// How long each burst of the service takes in `us`, in nanoseconds and in order of length; the
/// first few, from which the policy learns, are left out.
fn bursts(sim: &mut Stepper<Box<dyn SlicePolicy>>, us: u64) -> Vec<u64> {
    let end_ns = sim.now_ns() + us * 1000;
    let (mut since_ns, mut took) = (None, Vec::new());
    while sim.now_ns() < end_ns {
        sim.step_us(1000);
        match (sim.wants(SERVICE), since_ns) {
            (true, None) => since_ns = Some(sim.now_ns()),
            (false, Some(began_ns)) => {
                took.push(sim.now_ns() - began_ns);
                since_ns = None;
            }
            _ => {}
        }
    }
    took.drain(..took.len().min(5));
    took.sort_unstable();
    took
}

fn p99(took: &[u64]) -> u64 {
    took[(took.len() * 99).div_ceil(100) - 1]
}

fn report(sim: &Stepper<Box<dyn SlicePolicy>>) -> LatencyReport {
    sim.policy().latency(SERVICE).expect("it has a target")
}

#[test]
fn bursts_are_done_within_the_target_and_the_rest_is_left() {
    // 5, 15 and 25 % of the device, where a third is promised.
    for pause_us in [57_000.0, 17_000.0, 9_000.0] {
        let run = |name: &str| {
            let mut sim = Stepper::new(build(name), QUANTUM);
            sim.join(service(pause_us, 6000));
            sim.join(train(2, 500));
            sim.join(train(3, 500));
            let took = bursts(&mut sim, 20_000_000);
            (p99(&took), sim)
        };
        let (stride_ns, _) = run("stride");
        assert!(stride_ns > 6 * MS, "stride does it, too: {stride_ns}");
        let (took_ns, sim) = run("latency");
        assert!(took_ns <= 6 * MS, "pauses of {pause_us} us: {took_ns} ns");
        let report = report(&sim);
        assert_eq!(report.unmet, None, "{report:?}");
        assert!(report.bursts > 200 && report.missed * 100 <= report.bursts);
        // All that is left is theirs, in equal parts.
        assert_eq!(sim.idle_ns(), 0);
        let [b, c] = [2, 3].map(|id| sim.got(TenantId(id)).device_ns);
        assert!(b.abs_diff(c) < 50 * MS, "{b} and {c}");
    }
}

#[test]
fn without_targets_it_decides_as_stride_does() {
    let run = |name: &str| {
        let mut sim = Stepper::new(build(name), QUANTUM);
        sim.join(SimTenant {
            latency_target_us: None,
            ..service(9_000.0, 1)
        });
        sim.join(train(2, 500));
        sim.join(SimTenant {
            weight_ppm: 700_000,
            ..train(3, 1700)
        });
        sim.run_us(3_000_000);
        [1, 2, 3].map(|id| sim.got(TenantId(id)))
    };
    assert_eq!(run("latency"), run("stride"));
}

/// One that always has a burst, and says that each is urgent, has its share.
#[test]
fn one_that_always_has_a_burst_gets_no_more_than_its_share() {
    let always = |sleep_us: u64| {
        let burst = Phase::Busy {
            device_us: 40_000,
            kernel_us: 250,
        };
        let phases = vec![burst, Phase::Sleep { us: sleep_us }];
        SimTenant {
            latency_target_us: Some(1000),
            ..SimTenant::new(1, 333_333, phases)
        }
    };
    // Without an end; with ends, after each of which its deadline is a new one.
    for sleep_us in [1, 50, 3000] {
        let mut sim = Stepper::new(build("latency"), QUANTUM);
        sim.join(always(sleep_us));
        sim.join(train(2, 500));
        sim.join(train(3, 500));
        let mut before = [0; 2];
        for second in 1..=20 {
            sim.run_us(1_000_000);
            let got = [2, 3].map(|id| sim.got(TenantId(id)).device_ns);
            // What a burst may be saved up for is half a second of the share, once.
            let least_ns = if second == 1 { 230 } else { 320 };
            for (now_ns, before_ns) in got.iter().zip(before) {
                let got_ns = now_ns - before_ns;
                assert!(got_ns > least_ns * MS, "second {second}: {got_ns} ns");
            }
            before = got;
        }
        let report = report(&sim);
        assert!(report.unmet.is_some(), "nobody is reported: {report:?}");
    }
}

#[test]
fn a_service_within_its_share_is_not_in_debt_for_having_been_served_at_once() {
    let mut sim = Stepper::new(build("latency"), QUANTUM);
    sim.join(service(9_000.0, 6000));
    sim.join(train(2, 500));
    sim.join(train(3, 500));
    sim.run_us(20_000_000);
    let debt_ns = sim.policy().debt_ns(SERVICE).expect("it keeps an account");
    assert!(debt_ns < 10 * MS as i64, "{debt_ns} ns");
}

#[test]
fn what_cannot_be_met_is_reported_with_what_is_in_the_way() {
    let run = |kernel_us, target_us| {
        let mut sim = Stepper::new(build("latency"), QUANTUM);
        sim.join(service(57_000.0, target_us));
        sim.join(train(2, 500));
        sim.join(train(3, kernel_us));
        sim.run_us(5_000_000);
        report(&sim)
    };
    assert_eq!(run(500, 6000).unmet, None);
    let behind = run(8000, 6000);
    let Some(Unmet::TooShort {
        needs_ns,
        behind: Some(behind),
        wait_ns,
        service_ns,
    }) = behind.unmet
    else {
        panic!("kernels of 8 ms beside a target of 6: {behind:?}");
    };
    assert_eq!(behind, TenantId(3));
    assert!(wait_ns > 6 * MS && needs_ns == wait_ns + service_ns);
    // It takes longer by itself.
    let by_itself = run(100, 2500);
    let Some(Unmet::TooShort { service_ns, .. }) = by_itself.unmet else {
        panic!("bursts of 3 ms, a target of 2.5: {by_itself:?}");
    };
    assert_eq!(service_ns, 3 * MS);
    assert!(by_itself.missed > 0 && by_itself.p99_ns > Some(2_500_000));
}

/// A device at a moment: who wants it, with which target, and who holds it since when.
struct Moment(Vec<(u64, Option<u64>)>, Option<(u64, u64)>);

fn decide(policy: &mut dyn SlicePolicy, at_ms: u64, moment: &Moment) -> (Vec<u64>, Option<u32>) {
    let Moment(wants, holds) = moment;
    let tenants: Vec<TenantView> = [(1, Some(20)), (2, Some(10)), (3, None)]
        .map(|(id, target_ms)| TenantView {
            latency_target_ns: target_ms.map(|ms: u64| ms * MS),
            wants: wants.iter().any(|(other, _)| *other == id),
            ..TenantView::new(TenantId(id), policy::Class::Guaranteed, 333_333, false)
        })
        .into();
    let holder = holds.map(|(id, since_ms)| Holder {
        id: TenantId(id),
        since_ns: since_ms * MS,
        quantum_us: 20_000,
    });
    let decision = policy.decide(&View {
        now_ns: at_ms * MS,
        tenants: &tenants,
        holders: holder.as_slice(),
        quantum: QuantumBounds {
            min_us: 1000,
            max_us: 20_000,
        },
        device: Device::EXCLUSIVE,
    });
    let granted = decision.grant.iter().map(|slice| slice.tenant.0).collect();
    (
        granted,
        decision.grant.first().map(|slice| slice.quantum_us),
    )
}

/// By hand, with targets of 20 (the first) and 10 ms (the second) beside one without.
#[test]
fn the_earliest_deadline_goes_first() {
    let mut policy = build("latency");
    let wants = |ids: &[u64]| ids.iter().map(|id| (*id, None)).collect::<Vec<_>>();
    let at = |policy: &mut Box<dyn SlicePolicy>, ms, ids: &[u64], holds| {
        decide(policy.as_mut(), ms, &Moment(wants(ids), holds))
    };
    assert_eq!(at(&mut policy, 0, &[3], None).0, [3]);
    // Nothing is known of its bursts: it goes at once, by 21.
    assert_eq!(at(&mut policy, 1, &[1, 3], Some((3, 0))).0, [1]);
    policy.charge(TenantId(1), MS);
    // By 12: before the first one.
    assert_eq!(at(&mut policy, 2, &[1, 2, 3], Some((1, 1))).0, [2]);
    policy.charge(TenantId(2), 3 * MS);
    assert_eq!(at(&mut policy, 5, &[1, 3], Some((2, 2))).0, [1]);
    policy.charge(TenantId(1), 3 * MS);
    // Both are done: what the third has now is as long as a burst of the second that comes then
    // can wait, which takes 3 of its 10 ms, with 2 to spare.
    let (granted, quantum_us) = at(&mut policy, 8, &[3], Some((1, 5)));
    assert_eq!((granted, quantum_us), (vec![3], Some(5000)));
    // Queued beside them is a quarter of what the tightest can spare.
    assert_eq!(policy.in_flight_us(TenantId(3)), Some(1250));
    assert_eq!(policy.in_flight_us(TenantId(2)), Some(3000));
    // A burst of the second one that is late already gives way to one that can be met.
    assert_eq!(
        at(&mut policy, 50, &[2, 3], Some((3, 47))).0,
        Vec::<u64>::new()
    );
    let (granted, _) = at(&mut policy, 62, &[1, 2, 3], Some((3, 61)));
    assert_eq!(granted, [2], "it is late, and nobody else waits");
    policy.charge(TenantId(2), MS);
    let (granted, _) = at(&mut policy, 75, &[1, 2, 3], Some((2, 62)));
    assert_eq!(granted, [1], "its slack is used up, by 82");
}

/// The policy with so much saved up at most.
fn with_window(ms: u64) -> Box<dyn SlicePolicy> {
    let window = Param::new("window_ms", Value::Number(ms as f64)); // CAST: some hundreds.
    by_name("latency", &[window]).expect("a policy of the list")
}

/// How long a job without a target goes without the device at most, in milliseconds.
fn longest_wait_ms(sim: &mut Stepper<Box<dyn SlicePolicy>>, id: TenantId, us: u64) -> u64 {
    let end_ns = sim.now_ns() + us * 1000;
    let (mut had_ns, mut at_ns, mut longest_ns) = (sim.got(id).device_ns, sim.now_ns(), 0);
    while sim.now_ns() < end_ns {
        sim.step_us(500);
        let now_ns = sim.got(id).device_ns;
        if now_ns != had_ns {
            (had_ns, at_ns) = (now_ns, sim.now_ns());
        }
        longest_ns = longest_ns.max(sim.now_ns() - at_ns);
    }
    longest_ns / MS
}

/// What a window costs others and what it is worth: a service with a third of the device, its
/// bursts of so many microseconds with pauses of `pause_us` in the mean, and a target of twice
/// that. How long others wait at most in milliseconds, and how many of its bursts are late.
fn bargain(window_ms: u64, burst_us: u64, pause_us: f64) -> (u64, u64, u64) {
    let mut sim = Stepper::new(with_window(window_ms), QUANTUM);
    let mut one = service(pause_us, 2 * burst_us);
    for phase in &mut one.phases {
        if let Phase::Busy { device_us, .. } = phase {
            *device_us = burst_us;
        }
    }
    sim.join(one);
    sim.join(train(2, 500));
    sim.join(train(3, 500));
    let waits_ms = longest_wait_ms(&mut sim, TenantId(2), 20_000_000);
    let report = report(&sim);
    (waits_ms, report.missed, report.bursts)
}

/// A third of the device that saves up `window` has the device for half of that at a time: it
/// grows while it is used. A burst that is shorter ends earlier.
#[test]
fn others_wait_for_a_burst_or_for_what_is_saved_up_and_no_longer() {
    for (burst_us, pause_us) in [(12_000, 30_000.0), (100_000, 300_000.0), (600_000, 2e6)] {
        let found = [100, 500].map(|window_ms| {
            let (waits_ms, missed, bursts) = bargain(window_ms, burst_us, pause_us);
            println!(
                "now: bursts of {} ms, window {window_ms} ms: others wait {waits_ms} ms at most, {missed} of {bursts} late",
                burst_us / 1000
            );
            // Slices and kernels that have begun come on top.
            let most_ms = (burst_us / 1000).min(window_ms / 2) + 4 * 5;
            assert!(waits_ms <= most_ms, "{waits_ms} ms, {most_ms} at most");
            missed * 100 / bursts
        });
        assert!(
            found[1] <= found[0],
            "saving up is worth nothing: {found:?}"
        );
    }
}
