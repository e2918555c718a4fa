//! Properties of every policy, whatever its order, in virtual time. The stepper checks each
//! decision: no absent or paused tenant is granted the device, and there are never more holders
//! than allowed.

use policy::stepper::{Phase, SimTenant, Stepper};
use policy::{
    Class, Device, Memory, POLICIES, Param, QuantumBounds, SlicePolicy, TenantId, Value, by_name,
};
use proptest::prelude::*;

const QUANTUM: QuantumBounds = QuantumBounds {
    min_us: 2000,
    max_us: 5000,
};
const SECOND_US: u64 = 1_000_000;
const GIB: u64 = 1 << 30;

fn busy(id: u64, weight: u32, kernel_us: u64) -> SimTenant {
    let phase = Phase::Busy {
        device_us: 3600 * SECOND_US,
        kernel_us,
    };
    SimTenant::new(id, weight, vec![phase])
}

fn build(name: &str) -> Box<dyn SlicePolicy> {
    by_name(name, &[]).expect("a policy of the list")
}

fn names() -> impl Iterator<Item = &'static str> {
    POLICIES.iter().map(|spec| spec.name)
}

#[derive(Clone, Debug)]
struct Draw {
    device_us: u64,
    sleep_us: u64,
    kernel_us: u64,
    weight: u32,
    opportunistic: bool,
    tells: bool,
    deadline: bool,
    memory: (u64, u64),
}

fn draws(most: usize) -> impl Strategy<Value = Vec<Draw>> {
    let one = (
        200u64..40_000,
        0u64..20_000,
        10u64..3000,
        1u32..9,
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
        (0u64..4, 0u64..6),
    );
    let one = one.prop_map(
        |(device_us, sleep_us, kernel_us, weight, opportunistic, tells, deadline, memory)| Draw {
            device_us,
            sleep_us,
            kernel_us,
            weight,
            opportunistic,
            tells,
            deadline,
            memory,
        },
    );
    proptest::collection::vec(one, 1..most)
}

impl Draw {
    fn tenant(&self, id: u64) -> SimTenant {
        let mut phases = vec![Phase::Busy {
            device_us: self.device_us,
            kernel_us: self.kernel_us,
        }];
        if self.sleep_us > 0 {
            phases.push(Phase::Sleep { us: self.sleep_us });
        }
        SimTenant {
            class: if self.opportunistic {
                Class::Opportunistic
            } else {
                Class::Guaranteed
            },
            rounds: self.deadline.then_some(40),
            deadline_us: self.deadline.then_some(4 * SECOND_US),
            tells_size: self.tells,
            tells_iterations: self.tells,
            memory: Memory {
                persistent_bytes: self.memory.0 * GIB,
                ephemeral_bytes: self.memory.1 * GIB,
            },
            ..SimTenant::new(id, self.weight * 100_000, phases)
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// No time is lost while a tenant may run, an opportunistic tenant costs a guaranteed one at
    /// most a kernel, and a paused one gets nothing.
    #[test]
    fn every_policy_keeps_the_common_promises(draws in draws(6), holders in 1usize..4, pick in 0usize..100) {
        let name = POLICIES[pick % POLICIES.len()].name;
        let device = Device { holders, ..Device::EXCLUSIVE };
        let mut sim = Stepper::with_device(build(name), QUANTUM, device);
        for (id, draw) in draws.iter().enumerate() {
            sim.join(draw.tenant(id as u64));
        }
        let paused = TenantId(99);
        sim.join(SimTenant { paused: true, ..busy(99, 800_000, 100) });
        let mut left = 400_000;
        while left > 0 && sim.now_ns() < 2_000_000_000 {
            left -= 1;
            sim.step_us(5000);
            let wants = |class| {
                draws.iter().enumerate().any(|(id, draw)| {
                    sim.wants(TenantId(id as u64)) && draw.opportunistic == (class == Class::Opportunistic)
                })
            };
            if wants(Class::Guaranteed) {
                for (id, _) in draws.iter().enumerate().filter(|(_, draw)| draw.opportunistic) {
                    prop_assert!(
                        !sim.holders().any(|holder| holder == TenantId(id as u64)),
                        "{} lets {} hold the device while a guaranteed tenant wants it", name, id
                    );
                }
            }
        }
        prop_assert_eq!(sim.got(paused).device_ns, 0);
        if name != "antman" {
            prop_assert_eq!(sim.idle_ns(), 0, "{} loses time", name);
        }
    }

    /// With places for all, all run; with one, one.
    #[test]
    fn no_more_hold_the_device_than_may(count in 1u64..9, holders in 1usize..5, pick in 0usize..100) {
        let name = POLICIES[pick % POLICIES.len()].name;
        let device = Device { holders, ..Device::EXCLUSIVE };
        let mut sim = Stepper::with_device(build(name), QUANTUM, device);
        for id in 0..count {
            sim.join(busy(id, 100_000, 100));
        }
        sim.run_us(100_000);
        let one_at_a_time = name.starts_with("salus") && name != "salus-pack";
        let most = if one_at_a_time { 1 } else { holders.min(count as usize) };
        prop_assert_eq!(sim.most_holders(), most, "{}", name);
    }
}

#[test]
fn a_pause_takes_the_device_and_its_end_gives_it_back() {
    for name in names() {
        let mut sim = Stepper::new(build(name), QUANTUM);
        sim.join(busy(1, 500_000, 100));
        sim.run_us(20_000);
        assert_eq!(sim.holder(), Some(TenantId(1)), "{name}");
        sim.change(TenantId(1), |tenant| tenant.paused = true);
        assert_eq!(sim.holder(), None, "{name}: paused, alone");
        sim.join(busy(2, 500_000, 100));
        sim.run_us(20_000);
        assert_eq!(sim.holder(), Some(TenantId(2)), "{name}");
        let before = sim.got(TenantId(1)).device_ns;
        assert!(before <= 20_100_000, "{name}: its last kernel and no more");
        sim.remove(TenantId(2));
        sim.change(TenantId(1), |tenant| tenant.paused = false);
        assert_eq!(sim.holder(), Some(TenantId(1)), "{name}");
    }
}

#[test]
fn a_floor_holds_under_every_policy() {
    for name in names() {
        let mut sim = Stepper::new(build(name), QUANTUM);
        // None of the policies would give the second that much by itself: it is the later, bigger
        // and lighter one.
        sim.join(SimTenant {
            rounds: Some(1),
            tells_size: true,
            ..busy(1, 900_000, 100)
        });
        sim.run_us(1000);
        sim.join(SimTenant {
            min_share_ppm: 300_000,
            rounds: Some(9),
            tells_size: true,
            ..busy(2, 50_000, 100)
        });
        sim.run_us(5 * SECOND_US);
        let got = sim.got(TenantId(2)).device_ns as f64 / 5e9;
        assert!(got > 0.295, "{name}: {got} of the device, 0.3 promised");
        let other = sim.got(TenantId(1)).device_ns;
        if name != "salus-preempt" {
            assert!(
                got < 0.55 && other > 0,
                "{name}: {got}: a floor is no more than a floor"
            );
        }
    }
}

#[test]
fn a_cap_holds_under_every_policy_without_competitors() {
    for name in names() {
        let mut sim = Stepper::new(build(name), QUANTUM);
        sim.join(SimTenant {
            max_share_ppm: Some(250_000),
            ..busy(1, 900_000, 100)
        });
        sim.run_us(4 * SECOND_US);
        let got = sim.got(TenantId(1)).device_ns as f64 / 4e9;
        assert!((got - 0.25).abs() < 0.005, "{name}: alone {got}");
        sim.join(busy(2, 100_000, 100));
        let before = [1, 2].map(|id| sim.got(TenantId(id)).device_ns);
        sim.run_us(4 * SECOND_US);
        let part =
            |id: u64| (sim.got(TenantId(id)).device_ns - before[id as usize - 1]) as f64 / 4e9;
        assert!(part(1) < 0.255, "{name}: beside another {}", part(1));
        assert!(
            part(1) + part(2) > 0.999,
            "{name}: what one may not have the other has"
        );
    }
}

#[test]
fn the_predicted_successor_is_mostly_right() {
    for name in names() {
        let mut sim = Stepper::new(build(name), QUANTUM);
        for id in 0..4 {
            sim.join(busy(id, 100_000 * (id as u32 + 1), 100));
        }
        let (mut said, mut right) = (0, 0);
        for _ in 0..40_000 {
            let (holder, next) = (sim.holder(), sim.next());
            sim.step_us(1000);
            if sim.holder() != holder && next.is_some() {
                said += 1;
                right += u32::from(sim.holder() == next);
            }
        }
        assert!(said == right, "{name}: {right} of {said} were right");
        assert!(said > 1000 || name != "stride", "{said}");
    }
}

#[test]
fn numbers_and_words_are_checked_against_the_list() {
    let param = |name: &str, value: Value| [Param::new(name, value)];
    let error = by_name("deadline", &param("margin_percent", Value::Number(-1.0)));
    let text = error.expect_err("below the least").to_string();
    assert_eq!(
        text,
        "parameter `margin_percent` of `deadline` is -1, and must be one number from 0 to 100"
    );
    let error = by_name(
        "salus-fair",
        &param("measure", Value::Word("device_time".into())),
    );
    let text = error.expect_err("no such word").to_string();
    assert!(text.ends_with("did you mean `device-time`?"), "{text}");
    let error = by_name("deadline", &param("queu_factor", Value::Number(3.0)));
    let text = error.expect_err("no such parameter").to_string();
    assert!(text.contains("did you mean `queue_factor`?"), "{text}");
    let nan = by_name("antman", &param("harm_percent", Value::Number(f64::NAN)));
    nan.expect_err("not a number");
    let twice = [
        Param::new("promote", Value::Number(1.0)),
        Param::new("promote", Value::Number(2.0)),
    ];
    let text = by_name("deadline", &twice).expect_err("twice").to_string();
    assert!(text.contains("given twice"), "{text}");
    for (wrong, right) in [
        ("salus_fair", "salus-fair"),
        ("Stride", "stride"),
        ("deadlines", "deadline"),
        ("altruist", "altruistic"),
        ("ant-man", "antman"),
        ("latancy", "latency"),
    ] {
        let text = by_name(wrong, &[]).expect_err("misspelt").to_string();
        assert!(text.contains(&format!("did you mean `{right}`?")), "{text}");
    }
}
