//! `sublet simulate what-if`: the reward of each policy under a curve, by slack.

use anyhow::anyhow;
use cluster::report::Report;
use serde_json::{Value, json};

use super::{choices, input, run_all};
use crate::args::WhatIf;
use crate::exit::Result;
use crate::json::object;
use crate::table::{Align, Table};

/// What is printed.
///
/// # Errors
/// As [`super::sim`]; a slack that is not above 0.
pub fn what_if(args: &WhatIf) -> Result<String> {
    if let Some(slack) = args.slack.iter().find(|s| !(s.is_finite() && **s > 0.0)) {
        return Err(anyhow!("--slack {slack}: a slack is a number above 0").into());
    }
    let choices = choices(&args.run);
    // By policy, then by slack: a column of slacks reads as one curve.
    let mut rows: Vec<Vec<(f64, f64, f64, Report)>> = vec![Vec::new(); choices.len()];
    let original = input(&args.run)?;
    for slack in &args.slack {
        let mut input = input(&args.run)?;
        args.sla.set_deadlines(&mut input.trace, *slack);
        let outcomes = run_all(&input, &choices, args.run.json)?;
        for (row, outcome) in rows.iter_mut().zip(&outcomes) {
            let (kept, all) = args.sla.kept(&original.trace, outcome, *slack);
            row.push((*slack, kept, all, Report::of(outcome)));
        }
    }
    let runs = choices.iter().zip(&rows);
    let runs = runs.flat_map(|(choice, row)| row.iter().map(move |row| (choice, row)));
    let percent = |kept: f64, all: f64| 100.0 * kept / all.max(1e-12);
    if args.run.json {
        let runs: Vec<Value> = runs
            .map(|(choice, (slack, kept, all, report))| {
                json!({"policies": choice.to_string(), "slack": slack, "reward": kept, "reward_most": all,
                    "kept_pct": percent(*kept, *all), "report": report})
            })
            .collect();
        let all = json!({"trace": args.run.trace, "cluster": args.run.cluster, "sla": args.sla.to_string(), "runs": runs});
        return Ok(object(all));
    }
    let right = |name| (name, Align::Right);
    let mut table = Table::new(&[
        ("POLICIES", Align::Left),
        right("slack"),
        right("reward"),
        right("of"),
        right("kept"),
        right("JCT mean s"),
    ]);
    for (choice, (slack, kept, all, report)) in runs {
        table.row(vec![
            choice.to_string(),
            slack.to_string(),
            format!("{kept:.1}"),
            format!("{all:.1}"),
            format!("{:.1}%", percent(*kept, *all)),
            format!("{:.0}", report.jct_mean_s),
        ]);
    }
    Ok(table.render())
}
