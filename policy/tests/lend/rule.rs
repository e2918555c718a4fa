//! The rule's answers to single looks and to jobs that cheat, one behaviour a test.

use std::cell::RefCell;
use std::num::NonZeroU32;
use std::rc::Rc;

use policy::lend::{
    Constants, Gate, JobGate, Lend, LendTerms, ProcessId, ProcessLook, ShutReason, SliceReason,
    Total,
};
use policy::{Class, TenantId};

use crate::device::{MS, SECOND, Sim};
use crate::governor::{Governor, Rule};
use crate::measure::{run, solo_runs};
use crate::programs::{filler, gpt_h100, hog, stream, waits_each_step};
use crate::scenarios::{Mix, MixJob};

const LOOK: u64 = Constants::MODEL.look_ns;

fn two_jobs() -> Lend {
    let mut lend = Lend::new(Constants::MODEL);
    for tenant in [0, 1] {
        lend.set_terms(TenantId(tenant), LendTerms::default());
    }
    lend
}

/// A process with this much done and submitted, which waits at the gate.
fn process(tenant: u64, passed: u64, submitted: u64) -> ProcessLook {
    ProcessLook {
        tenant: TenantId(tenant),
        process: ProcessId(tenant),
        passed_ns: Total(passed),
        submitted_ns: Total(submitted),
        at_gate: 1,
        largest_ns: 100_000,
        ..ProcessLook::default()
    }
}

/// Looks for `spans` times, with what each of the two jobs has finished of each look's time.
fn play(lend: &mut Lend, looks: u64, parts: [f64; 2]) -> Option<SliceReason> {
    for look in 0..looks {
        let of = |tenant: usize| {
            let passed = (look as f64 * LOOK as f64 * parts[tenant]) as u64;
            process(tenant as u64, passed, passed + MS)
        };
        lend.look(look * LOOK, &[of(0), of(1)]);
        if let Some(slices) = lend.slices() {
            return Some(slices.reason);
        }
    }
    None
}

#[test]
fn a_counter_that_goes_back_leads_to_slices_for_a_while() {
    let mut lend = two_jobs();
    lend.look(LOOK, &[process(0, 5 * MS, 6 * MS), process(1, 0, MS)]);
    let decisions = lend.look(2 * LOOK, &[process(0, 4 * MS, 6 * MS), process(1, 0, MS)]);
    let slices = decisions.slices.expect("slices");
    assert_eq!(slices.reason, SliceReason::CounterWentBack);
    assert_eq!(slices.pair, None);
    assert!(decisions.gates.iter().all(|gate| gate.gate == Gate::Open));
    let later = 2 * LOOK + Constants::MODEL.doubt_ns + LOOK;
    let decisions = lend.look(later, &[process(0, 4 * MS, 6 * MS), process(1, 0, MS)]);
    assert_eq!(decisions.slices, None, "doubts end");
}

#[test]
fn more_work_than_time_and_hidden_work_lead_to_slices() {
    let seconds = 5 * SECOND / LOOK;
    let of = |parts| play(&mut two_jobs(), seconds, parts);
    assert_eq!(of([0.9, 0.9]), Some(SliceReason::MoreThanTime));
    assert_eq!(of([0.05, 0.05]), Some(SliceReason::HiddenWork));
    assert_eq!(of([0.45, 0.45]), None);
}

#[test]
fn unknown_jobs_are_passed_over_and_a_removed_one_is_forgotten() {
    let mut lend = two_jobs();
    lend.look(LOOK, &[process(7, 0, MS), process(0, 0, MS)]);
    assert_eq!(lend.gates().len(), 2);
    lend.remove(TenantId(0));
    let decisions = lend.look(2 * LOOK, &[process(0, 0, MS)]);
    assert!(decisions.of(TenantId(0)).is_none());
    assert!(decisions.of(TenantId(1)).is_some());
}

#[test]
fn time_that_stands_still_or_goes_back_changes_no_balance() {
    let mut lend = two_jobs();
    for now in [10 * LOOK, 10 * LOOK, 5 * LOOK, u64::MAX] {
        lend.look(now, &[process(0, 0, MS), process(1, 0, u64::MAX)]);
        for tenant in [0, 1] {
            let of = lend.standing(TenantId(tenant)).expect("a job");
            assert!(of.owed_ns.is_finite() && of.want.is_finite(), "{of:?}");
        }
    }
}

#[test]
fn a_share_that_is_no_number_poisons_no_balance() {
    let mut lend = two_jobs();
    for share in [f64::NAN, 0.0, -1.0, f64::INFINITY] {
        let terms = LendTerms {
            share,
            ..LendTerms::default()
        };
        lend.set_terms(TenantId(0), terms);
        play(&mut lend, 1000, [0.45, 0.45]);
        for tenant in [0, 1] {
            let of = lend.standing(TenantId(tenant)).expect("a job");
            assert!(of.owed_ns.is_finite() && of.entitled.is_finite(), "{of:?}");
        }
    }
}

#[test]
fn a_limit_that_is_no_number_panics_nowhere() {
    let mut lend = two_jobs();
    for most in [f64::NAN, -3.0, 0.0, f64::INFINITY] {
        let terms = LendTerms {
            share: f64::MAX,
            share_max: Some(most),
            ..LendTerms::default()
        };
        lend.set_terms(TenantId(0), terms);
        play(&mut lend, 1000, [0.45, 0.45]);
        let of = lend.standing(TenantId(1)).expect("a job");
        assert!(of.owed_ns.is_finite() && of.slack_ns.is_finite(), "{of:?}");
    }
}

#[test]
fn counters_that_jump_to_their_ends_panic_nowhere() {
    let mut lend = two_jobs();
    let jumps = |process: u64, by: u64| ProcessLook {
        process: ProcessId(process),
        fresh: Total(by),
        rings: Total(by),
        largest_ns: by,
        ..self::process(0, by, by)
    };
    for (now, by) in [(LOOK, 0), (2 * LOOK, u64::MAX), (3 * LOOK, u64::MAX)] {
        lend.look(now, &[jumps(0, by), jumps(5, by), process(1, 0, MS)]);
    }
    let of = lend.standing(TenantId(0)).expect("a job");
    assert!(of.charged_ns.is_finite() && of.used.is_finite(), "{of:?}");
}

#[test]
fn a_page_that_says_that_years_have_passed_has_slices_for_a_while_and_not_for_good() {
    let mut lend = two_jobs();
    lend.look(LOOK, &[process(0, 0, MS), process(1, 0, MS)]);
    let years = 1 << 63;
    lend.look(
        2 * LOOK,
        &[process(0, years, years + MS), process(1, 0, MS)],
    );
    let slices = lend.slices().expect("slices");
    assert_eq!(slices.reason, SliceReason::MoreThanTime);
    // From there on both get on as others do.
    let looks = (Constants::MODEL.doubt_ns + 2 * SECOND) / LOOK;
    for look in 3..looks {
        let passed = (look as f64 * LOOK as f64 * 0.45) as u64;
        let of = [
            process(0, years + passed, years + passed + MS),
            process(1, passed, passed + MS),
        ];
        lend.look(look * LOOK, &of);
    }
    assert_eq!(lend.slices(), None, "it is long over");
    let charged = |tenant| lend.standing(TenantId(tenant)).expect("a job").used;
    let (liar, other) = (charged(0), charged(1));
    println!("now: {liar:.3} and {other:.3} of the device are charged after the jump");
    assert!((0.4..0.6).contains(&other) && (0.4..0.6).contains(&liar));
}

#[test]
fn what_nobody_finished_for_minutes_is_not_charged_as_turns_for_longer() {
    let mut lend = two_jobs();
    // Both have work that waits for something else, and a device that is idle meanwhile.
    let minutes = 120 * SECOND / LOOK;
    for look in 0..minutes {
        lend.look(look * LOOK, &[process(0, 0, MS), process(1, 0, MS)]);
    }
    let before = lend.standing(TenantId(0)).expect("a job").charged_ns
        + lend.standing(TenantId(1)).expect("a job").charged_ns;
    let then = 10 * SECOND / LOOK;
    for look in 0..then {
        let passed = look * LOOK / 2;
        let of = |tenant| process(tenant, passed, passed + MS);
        lend.look((minutes + look) * LOOK, &[of(0), of(1)]);
    }
    let after = lend.standing(TenantId(0)).expect("a job").charged_ns
        + lend.standing(TenantId(1)).expect("a job").charged_ns;
    let parts = (after - before) / (10 * SECOND) as f64;
    println!("now: {parts:.3} of the time is charged after two minutes of standstill");
    assert!(parts < 1.05, "{parts}");
}

#[test]
fn each_of_several_that_fill_the_device_is_measured_alone() {
    let mut lend = two_jobs();
    let (mut done, mut submitted) = ([0_u64; 2], [0_u64; 2]);
    for look in 0..40 * SECOND / LOOK {
        let gate = |job: usize| lend.gates().get(job).map(|gate| gate.gate);
        let open = [0, 1].map(|job| gate(job).is_none_or(|gate| gate == Gate::Open));
        for job in [0, 1] {
            if open[job] {
                submitted[job] = done[job] + MS;
            }
        }
        let runs = [0, 1].map(|job| submitted[job] > done[job]);
        let each = LOOK / runs.iter().filter(|runs| **runs).count().max(1) as u64;
        for job in [0, 1] {
            done[job] = submitted[job].min(done[job] + each);
        }
        let looks = [0, 1].map(|job| ProcessLook {
            at_gate: u32::from(!open[job]),
            ..process(job as u64, done[job], submitted[job])
        });
        lend.look(look * LOOK, &looks);
    }
    let solo = [0, 1].map(|tenant| lend.standing(TenantId(tenant)).expect("a job").solo_ns);
    println!("now: seen alone for {solo:?} ns");
    let enough = Constants::MODEL.solo_enough_ns as f64;
    assert!(solo.iter().all(|ns| *ns >= enough), "{solo:?}");
}

/// What every look of a mix showed and answered.
fn recorded(mix: &Mix) -> Vec<(u64, Vec<ProcessLook>, Vec<JobGate>)> {
    let seen = Rc::new(RefCell::new(Vec::new()));
    let mut governor = Governor::rule();
    if let Governor::Rule(rule) = &mut governor {
        let seen = seen.clone();
        rule.witness = Some(Box::new(move |sim: &Sim, _, looks, gates| {
            seen.borrow_mut()
                .push((sim.now, looks.to_vec(), gates.to_vec()));
        }));
    }
    let mut sim = Sim::new(mix.plans(), &mut governor, mix.hardware, 1);
    sim.run(SECOND, &mut governor);
    seen.take()
}

#[test]
fn the_dilated_rule_decides_the_same_four_times_slower() {
    let jobs = vec![
        MixJob::new(0.7, waits_each_step),
        MixJob::new(0.2, hog),
        MixJob::new(0.1, filler),
    ];
    let looks = recorded(&Mix::new(jobs));
    let mut slow = Lend::new(Constants::MODEL.dilated(NonZeroU32::new(4).expect("four")));
    for (tenant, share) in [(0, 0.7), (1, 0.2), (2, 0.1)] {
        let terms = LendTerms {
            share,
            ..LendTerms::default()
        };
        slow.set_terms(TenantId(tenant), terms);
    }
    let mut shut = 0;
    for (now, seen, gates) in looks {
        let seen: Vec<ProcessLook> = seen
            .iter()
            .map(|look| ProcessLook {
                passed_ns: Total(look.passed_ns.0 * 4),
                submitted_ns: Total(look.submitted_ns.0 * 4),
                largest_ns: look.largest_ns * 4,
                ..*look
            })
            .collect();
        let decided = slow.look(now * 4, &seen);
        for (quick, slow) in gates.iter().zip(decided.gates) {
            assert_eq!(quick.cap_ns * 4, slow.cap_ns, "at {now}");
            match (quick.gate, slow.gate) {
                (Gate::Open, Gate::Open) => {}
                (Gate::Shut { until_ns: a, .. }, Gate::Shut { until_ns: b, .. }) => {
                    assert_eq!(a * 4, b, "at {now}");
                    shut += 1;
                }
                (quick, slow) => panic!("at {now}: {quick:?} and {slow:?}"),
            }
        }
    }
    assert!(shut > 0, "something was shut");
}

fn speeds(jobs: Vec<MixJob>) -> Vec<f64> {
    let mix = Mix::new(jobs);
    let solo = solo_runs(&mix, 2);
    run(&mix, &mut Governor::rule(), &solo, 2).speed
}

#[test]
fn share_max_bounds_what_a_job_uses_and_holds_up_nobody() {
    let capped = MixJob {
        share_max: Some(0.3),
        ..MixJob::new(0.5, hog)
    };
    let of = speeds(vec![MixJob::new(0.5, gpt_h100), capped]);
    assert!(of[0] > 0.95, "{of:?}");
    assert!(of[1] > 0.25 && of[1] < 0.32, "{of:?}");
}

#[test]
fn an_opportunistic_job_gets_what_a_guaranteed_one_leaves() {
    let opportunistic = || MixJob {
        class: Class::Opportunistic,
        ..MixJob::new(0.9, hog)
    };
    let beside_filler = speeds(vec![MixJob::new(0.1, filler), opportunistic()]);
    assert!(beside_filler[0] > 0.93, "{beside_filler:?}");
    let beside_gpt = speeds(vec![MixJob::new(0.1, gpt_h100), opportunistic()]);
    assert!(beside_gpt[0] > 0.95, "{beside_gpt:?}");
    assert!(beside_gpt[1] > 0.2, "{beside_gpt:?}");
}

#[test]
fn kernels_too_long_for_a_gate_get_slices_with_the_job_below_its_floor() {
    let mut mix = Mix::new(vec![
        MixJob::new(0.5, |_| stream(50 * MS, 300_000)),
        MixJob::new(0.5, gpt_h100),
    ]);
    mix.hardware.chunk_ns = None;
    let pairs = Rc::new(RefCell::new(Vec::new()));
    let mut rule = Rule::new(Constants::MODEL);
    let seen = pairs.clone();
    rule.witness = Some(Box::new(move |_, lend, _, gates| {
        if let Some(slices) = lend.slices() {
            let turn = gates.iter().any(
                |gate| matches!(gate.gate, Gate::Shut { reason, .. } if reason == ShutReason::Turn),
            );
            seen.borrow_mut().push((slices, turn));
        }
    }));
    let solo = solo_runs(&mix, 3);
    let of = run(&mix, &mut Governor::Rule(Box::new(rule)), &solo, 3);
    let pairs = pairs.borrow();
    let (first, _) = pairs.first().expect("slices");
    assert_eq!(first.reason, SliceReason::BelowFloor);
    assert_eq!(first.pair, Some([TenantId(1), TenantId(0)]));
    assert!(pairs.iter().any(|(_, turn)| *turn), "the rule plays them");
    let open = run(&mix, &mut Governor::Open { cap: None }, &solo, 3);
    assert!(
        open.speed[1] < 0.2,
        "the hardware gives it little: {open:?}"
    );
    assert!(of.speed[1] > 0.35, "{of:?}");
}
