//! Prints what the rule makes of all mixes: `LEND_ONLY` filters by name, `LEND_SECONDS` says how
//! long.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use policy::lend::Gate;

use crate::governor::Governor;
use crate::measure::{Outcome, run, solo_runs};
use crate::scenarios::{Mix, all, holds};

fn seconds() -> u64 {
    let said = std::env::var("LEND_SECONDS").ok();
    said.and_then(|text| text.parse().ok()).unwrap_or(3)
}

fn list(of: &[f64], digits: usize) -> String {
    let texts: Vec<String> = of.iter().map(|of| format!("{of:.digits$}")).collect();
    texts.join(" ")
}

fn line(name: &str, mix: &Mix) -> (Outcome, Outcome) {
    let solo = solo_runs(mix, 3);
    let mut open = Governor::Open { cap: None };
    let none = run(mix, &mut open, &solo, seconds());
    let shut = Rc::new(RefCell::new(BTreeMap::<String, u64>::new()));
    let mut governor = Governor::rule();
    if let Governor::Rule(rule) = &mut governor {
        let shut = shut.clone();
        rule.witness = Some(Box::new(move |sim, lend, _, gates| {
            let mut shut = shut.borrow_mut();
            if sim.now % 500_000_000 < 200_000 && std::env::var("LEND_STANDING").is_ok() {
                for gate in gates {
                    let of = lend.standing(gate.tenant).expect("a job");
                    println!(
                        "{} {:?} {:?} used {:.3} want {:.3} entitled {:.3} delay {:.3} owed {:.2} \
                         promise {:.2} scale {:.3}",
                        sim.now,
                        gate.tenant,
                        gate.gate,
                        of.used,
                        of.want,
                        of.entitled,
                        of.delay,
                        of.owed_ns / 1e6,
                        of.promise_ns / 1e6,
                        of.scale,
                    );
                }
            }
            let mut count = |what: String| *shut.entry(what).or_default() += 1;
            count("looks".to_owned());
            for gate in gates {
                if let Gate::Shut { reason, .. } = gate.gate {
                    count(format!("{}:{reason:?}", gate.tenant.0));
                }
                let standing = lend.standing(gate.tenant).expect("a job");
                if standing.takes_turns {
                    count(format!("{}:turns", gate.tenant.0));
                }
                if standing.is_service {
                    count(format!("{}:service", gate.tenant.0));
                }
            }
            if let Some(slices) = lend.slices() {
                count(format!("slices {:?}", slices.reason));
            }
        }));
    }
    let of = run(mix, &mut governor, &solo, seconds());
    let shut = shut.borrow();
    let parts: Vec<String> = shut
        .iter()
        .map(|(what, count)| format!("{what} {:.2}", *count as f64 / shut["looks"] as f64))
        .collect();
    println!("      {}", parts.join(", "));
    let p99 = |of: &Outcome| -> Vec<f64> { of.p99.iter().flatten().copied().collect() };
    println!(
        "{name:34} sum {:.3} open {:.3} | speed {} ({}) margin {} short {} turn {:.3} idle {:.3} \
         p99 {} ({})",
        of.sum,
        none.sum,
        list(&of.speed, 3),
        list(&none.speed, 2),
        list(&of.margin, 1),
        list(&of.short, 1),
        of.turn,
        of.idle,
        list(&p99(&of), 2),
        list(&p99(&none), 2),
    );
    (of, none)
}

#[test]
#[ignore = "a table"]
fn table_of_all_mixes() {
    let only = std::env::var("LEND_ONLY").unwrap_or_default();
    for scenario in all() {
        if !scenario.name.contains(&only) {
            continue;
        }
        let (of, none) = line(&scenario.name, &scenario.mix);
        for (invariant, held_before) in &scenario.invariants {
            let (here, figure) = holds(invariant, &of, none.sum);
            if !here || !held_before {
                println!("    {invariant}: {figure:.2} holds {here}, reference {held_before}");
            }
        }
    }
    for (name, mix) in crate::attacks::all() {
        if name.contains(&only) {
            line(name, &mix);
        }
    }
}
