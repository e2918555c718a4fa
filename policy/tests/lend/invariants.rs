//! What must hold in every mix, checked at every look.

use std::cell::RefCell;
use std::rc::Rc;

use policy::TenantId;
use policy::lend::{Constants, Gate, ShutReason, Total};

use crate::device::{SECOND, Sim};
use crate::governor::Governor;
use crate::measure::solo_runs;
use crate::scenarios::{Mix, all, holds};

/// Invariants of scenarios that the reference kept and this rule does not, or that it does not keep
/// either: known gaps, printed with their figures.
const GAPS: [(&str, &str); 2] = [
    (".05 SYN + .95 HOG", "margin>=-3"),
    ("CNN+GPT 1/4:3/4", "short<=2.5"),
];

#[test]
fn the_scenarios_keep_their_invariants_but_for_known_gaps() {
    let (mut checked, mut held, mut broken) = (0, 0, Vec::new());
    for scenario in all() {
        let solo = solo_runs(&scenario.mix, 3);
        let mut open = Governor::Open { cap: None };
        let none = crate::measure::run(&scenario.mix, &mut open, &solo, 3);
        let of = crate::measure::run(&scenario.mix, &mut Governor::rule(), &solo, 3);
        for (invariant, _) in &scenario.invariants {
            checked += 1;
            let (here, figure) = holds(invariant, &of, none.sum);
            held += usize::from(here);
            let gap = GAPS.contains(&(scenario.name.as_str(), invariant.as_str()));
            if gap {
                println!("known gap: {}: {invariant}: {figure:.2}", scenario.name);
            } else if !here {
                broken.push(format!("{}: {invariant}: {figure:.2}", scenario.name));
            }
        }
    }
    println!("now: {held} of {checked} invariants hold",);
    assert!(broken.is_empty(), "{broken:#?}");
}

/// What a run looked like from inside.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    looks: u64,
    /// Pairs of jobs that were each shut for the other at one look.
    mutual: u64,
    /// The largest balance, and what it may be.
    largest_balance: f64,
    bound: f64,
    /// Looks with a job for which others are shut, although it has not asked for the device for
    /// longer than any gap that is held.
    shut_for_nobody: u64,
    /// Gates that do not open by themselves in time.
    endless: u64,
    charged: f64,
    held_idle: f64,
}

/// Runs a mix and watches every decision.
pub fn watch(mix: &Mix, seconds: u64) -> (Sim, Seen) {
    let seen = Rc::new(RefCell::new(Seen::default()));
    let constants = Constants::MODEL;
    let mut governor = Governor::rule();
    if let Governor::Rule(rule) = &mut governor {
        rule.jitter = mix.jitter;
        let seen = seen.clone();
        let mut asked = vec![(0, Total(0)); mix.jobs.len()];
        rule.witness = Some(Box::new(move |sim, lend, looks, gates| {
            let mut seen = seen.borrow_mut();
            seen.looks += 1;
            let largest = looks.iter().map(|look| look.largest_ns).max().unwrap_or(0);
            seen.bound = (constants.bound_ns + constants.bound_kernel_ns.min(2 * largest)) as f64;
            for look in looks {
                let (asked_ns, passed) = &mut asked[look.tenant.0 as usize];
                let waits = look.pending_ns() > 0 || look.at_gate > 0 || look.in_wait > 0;
                if waits || look.passed_ns != *passed {
                    *asked_ns = sim.now;
                }
                *passed = look.passed_ns;
            }
            let mut pairs: Vec<(TenantId, TenantId)> = Vec::new();
            seen.charged = 0.0;
            seen.held_idle = lend.held_idle_ns();
            for gate in gates {
                let standing = lend.standing(gate.tenant).expect("a job");
                seen.charged += standing.charged_ns;
                for balance in [standing.owed_ns, standing.promise_ns] {
                    seen.largest_balance = seen.largest_balance.max(balance.abs());
                }
                let Gate::Shut {
                    until_ns,
                    beside,
                    reason,
                } = gate.gate
                else {
                    continue;
                };
                if until_ns <= sim.now || until_ns > sim.now + constants.expiry_ns {
                    seen.endless += 1;
                }
                let Some(beside) = beside else {
                    continue;
                };
                if pairs.contains(&(beside, gate.tenant)) {
                    seen.mutual += 1;
                }
                pairs.push((gate.tenant, beside));
                let idle = sim.now - asked[beside.0 as usize].0;
                let most = constants.through_gap_ns + constants.look_ns;
                if reason != ShutReason::Solo && idle > most {
                    seen.shut_for_nobody += 1;
                }
            }
        }));
    }
    let mut sim = Sim::new(mix.plans(), &mut governor, mix.hardware, 1);
    sim.run(seconds * SECOND, &mut governor);
    let seen = seen.borrow().clone();
    (sim, seen)
}

/// Part of the time by which charges may be off. Where a context keeps an idle device, and where
/// long kernels end at once, nobody can know what to charge.
pub const CHARGE_ERROR: f64 = 0.15;

/// Checks what was seen.
pub fn check(name: &str, sim: &Sim, seen: &Seen) {
    assert!(seen.looks > 0, "{name}");
    assert_eq!(seen.mutual, 0, "{name}: two jobs shut for each other");
    assert_eq!(
        seen.endless, 0,
        "{name}: a gate that does not open by itself"
    );
    assert_eq!(seen.shut_for_nobody, 0, "{name}: shut for an absent job");
    assert!(
        seen.largest_balance <= seen.bound,
        "{name}: {} of {}",
        seen.largest_balance,
        seen.bound
    );
    let error = charge_error(sim, seen);
    assert!(
        error.abs() < CHARGE_ERROR,
        "{name}: charges are off by {error}"
    );
}

/// Charges less held idle time and the device's own account, as a part of time.
pub fn charge_error(sim: &Sim, seen: &Seen) -> f64 {
    let busy = (sim.kernel_time + sim.turn_time) as f64;
    (seen.charged - seen.held_idle - busy) / sim.now as f64
}

#[test]
fn decisions_are_bounded_and_never_mutual_in_every_mix() {
    let mut worst: f64 = 0.0;
    let mut count = 0;
    let scenarios = all().into_iter().map(|of| (of.name, of.mix));
    let attacks = crate::attacks::all().into_iter();
    for (name, mix) in scenarios.chain(attacks.map(|(name, mix)| (name.to_owned(), mix))) {
        let (sim, seen) = watch(&mix, 2);
        let error = charge_error(&sim, &seen);
        println!("{name}: charges are off by {:.1} %", error * 100.0);
        worst = worst.max(error.abs());
        check(&name, &sim, &seen);
        count += 1;
    }
    println!(
        "now: {count} mixes, charges off by at most {:.1} %",
        worst * 100.0
    );
}
