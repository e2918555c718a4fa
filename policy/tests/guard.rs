//! AntMan's guard and Salus' preemption, in virtual time.

use policy::stepper::{Phase, SimTenant, Stepper};
use policy::{Class, Param, QuantumBounds, SlicePolicy, TenantId, Value, by_name};

const QUANTUM: QuantumBounds = QuantumBounds {
    min_us: 2000,
    max_us: 5000,
};

fn training(id: u64, device_us: u64, sleep_us: u64) -> SimTenant {
    let phases = vec![
        Phase::Busy {
            device_us,
            kernel_us: 200,
        },
        Phase::Sleep { us: sleep_us },
    ];
    SimTenant {
        tells_iterations: true,
        ..SimTenant::new(id, 1_000_000, phases)
    }
}

fn opportunistic(id: u64, kernel_us: u64) -> SimTenant {
    let phase = Phase::Busy {
        device_us: 3_600_000_000,
        kernel_us,
    };
    SimTenant {
        class: Class::Opportunistic,
        ..SimTenant::new(id, 1_000_000, vec![phase])
    }
}

fn antman(params: &[Param]) -> Box<dyn SlicePolicy> {
    by_name("antman", params).expect("a policy of the list")
}

/// The guaranteed tenant's rate over its solo rate, and the opportunistic tenant's part of the
/// rest.
fn outcome(kernel_us: u64, params: &[Param]) -> (f64, f64) {
    let (device_us, sleep_us) = (40_000, 60_000);
    let mut sim = Stepper::new(antman(params), QUANTUM);
    sim.join(training(1, device_us, sleep_us));
    sim.join(opportunistic(2, kernel_us));
    sim.run_us(5_000_000);
    let before = [1, 2].map(|id| sim.got(TenantId(id)));
    let span_us = 60_000_000;
    sim.run_us(span_us);
    let rounds = (sim.got(TenantId(1)).rounds - before[0].rounds) as f64;
    let solo = span_us as f64 / (device_us + sleep_us) as f64;
    let used_us = (sim.got(TenantId(2)).device_ns - before[1].device_ns) as f64 / 1e3;
    let left_us = span_us as f64 - rounds * device_us as f64;
    (rounds / solo, used_us / left_us)
}

#[test]
fn short_kernels_fill_the_gaps_and_are_not_felt() {
    let (guaranteed, leftover) = outcome(200, &[]);
    assert!(guaranteed > 0.98, "{guaranteed} of its rate alone");
    assert!(leftover > 0.8, "{leftover} of what is left");
}

#[test]
fn kernels_that_are_felt_are_cut_back() {
    // Up to 37 ms of somebody else's kernel in every iteration of 100 ms.
    let (guaranteed, leftover) = outcome(37_000, &[]);
    let (unguarded, all) = {
        let params = [
            Param::new("harm_percent", Value::Number(100.0)),
            Param::new("breach_percent", Value::Number(1000.0)),
        ];
        outcome(37_000, &params)
    };
    assert!(unguarded < 0.95, "the harm is real: {unguarded}");
    assert!(guaranteed > 0.97, "{guaranteed} of its rate alone");
    assert!(
        leftover < all,
        "and is paid for by the other: {leftover}, {all}"
    );
}

#[test]
fn a_baseline_that_nobody_tells_is_learnt_first() {
    let mut sim = Stepper::new(antman(&[]), QUANTUM);
    // Two guaranteed tenants: the solo times that they tell are not what they reach together.
    sim.join(training(1, 40_000, 60_000));
    sim.join(training(2, 30_000, 70_000));
    sim.join(opportunistic(3, 200));
    sim.run_us(700_000);
    assert_eq!(
        sim.got(TenantId(3)).device_ns,
        0,
        "it is kept out while they are watched"
    );
    sim.run_us(10_000_000);
    assert!(
        sim.got(TenantId(3)).device_ns > 1_000_000_000,
        "and let in then"
    );
}

/// Guaranteed tenants that are there and do something else: there is nothing to be learnt from
/// them, and nobody to be protected.
#[test]
fn guaranteed_tenants_that_are_idle_keep_nobody_out() {
    let mut sim = Stepper::new(antman(&[]), QUANTUM);
    sim.join(training(1, 40_000, 3_600_000_000));
    sim.join(training(2, 30_000, 3_600_000_000));
    sim.join(opportunistic(3, 200));
    sim.run_us(900_000);
    assert_eq!(sim.got(TenantId(3)).device_ns, 0, "they may go on yet");
    sim.run_us(4_000_000);
    let got_ns = sim.got(TenantId(3)).device_ns;
    assert!(got_ns > 3_500_000_000, "{got_ns}");
}

/// One iteration that is twenty per cent too long stops the others at once; what keeps them out is
/// the job that was harmed, and not its memory.
#[test]
fn harm_that_was_done_to_a_job_that_has_stopped_keeps_nobody_out() {
    let mut sim = Stepper::new(antman(&[]), QUANTUM);
    sim.join(training(1, 40_000, 60_000));
    sim.join(opportunistic(2, 90_000));
    sim.run_us(5_000_000);
    let before_ns = sim.got(TenantId(2)).device_ns;
    sim.run_us(5_000_000);
    let guarded_ns = sim.got(TenantId(2)).device_ns - before_ns;
    assert!(
        guarded_ns < 1_000_000_000,
        "the guard is at work: {guarded_ns}"
    );
    sim.remove(TenantId(1));
    let before_ns = sim.got(TenantId(2)).device_ns;
    sim.run_us(2_000_000);
    let got_ns = sim.got(TenantId(2)).device_ns - before_ns;
    assert!(got_ns > 1_500_000_000, "{got_ns}");
}

#[test]
fn the_newest_gets_the_device_at_the_end_of_the_iteration() {
    let policy = by_name("salus-preempt", &[]).expect("a policy of the list");
    let mut sim = Stepper::new(policy, QUANTUM);
    let job = |id| SimTenant {
        tells_iterations: true,
        ..SimTenant::new(
            id,
            1_000_000,
            vec![Phase::Busy {
                device_us: 30_000,
                kernel_us: 100,
            }],
        )
    };
    for id in 0..6 {
        sim.run_us(41_000 + 7_000 * id);
        sim.join(job(id));
        let asked_ns = sim.now_ns();
        while sim.holder() != Some(TenantId(id)) {
            sim.step_us(1000);
            assert!(
                sim.now_ns() - asked_ns <= 31_000_000,
                "an iteration and a millisecond"
            );
        }
        if let Some(before) = id.checked_sub(1) {
            let got = sim.got(TenantId(before));
            assert_eq!(
                got.device_ns,
                got.rounds * 30_000_000,
                "no iteration is cut in two"
            );
        }
    }
}
