//! Carbyne (OSDI 2016) as a cluster order: how much sooner jobs end than in the fair cluster that
//! none of them may end later than.
//!
//! *Fair.* Every job has an equal part of the GPUs, at most what it asks for, at every instant:
//! GPUs in parts of any size, which no real cluster gives. *Traces.* Both virtual clusters of
//! Gavel's Philly trace, in rounds of 300 s, and `drf` there, which stops nobody.

use std::path::Path;

use cluster::sim::Fate;
use cluster::trace::{Options, Trace};
use policy::cluster::fair::equal_parts;

use super::Limit::{AtMost, Reported};
use super::{System, fates, load, mean, rounds, row};

pub const SYSTEM: System = System {
    name: "carbyne",
    rows: &[
        row(
            "carbyne_jct_over_fair",
            "ratio",
            AtMost(0.9),
            "mean completion 1.59x lower than DRF",
        ),
        row(
            "carbyne_later_than_fair_pct",
            "%",
            AtMost(0.0),
            "isolation nearly that of DRF",
        )
        .missed(
            1.597,
            1.62,
            "gangs cannot have the parts of GPUs that the fair cluster gives them",
        ),
        row(
            "carbyne_later_than_fair_by_two_rounds_pct",
            "%",
            Reported,
            "-",
        ),
        row("carbyne_6c71a0_jct_over_fair", "ratio", Reported, "-"),
        row("carbyne_ee9e8c_jct_over_fair", "ratio", Reported, "-"),
        row("carbyne_drf_jct_over_fair", "ratio", Reported, "-"),
        row("carbyne_drf_later_than_fair_pct", "%", Reported, "-"),
        row("carbyne_srtf_jct_over_fair", "ratio", Reported, "-"),
        row("carbyne_srtf_later_than_fair_pct", "%", Reported, "-"),
    ],
    quick: true,
    run: figures,
};

const ROUND_S: f64 = 300.0;

/// When each job would be done in the fair cluster.
fn fair_ends_s(trace: &Trace, gpus: f64) -> Vec<f64> {
    let jobs = &trace.jobs;
    let mut ends = vec![0.0; jobs.len()];
    let mut running: Vec<(usize, f64)> = Vec::new();
    let (mut now_s, mut next) = (0.0, 0);
    loop {
        let wants: Vec<f64> = running
            .iter()
            .map(|(at, _)| f64::from(jobs[*at].gpus))
            .collect();
        let parts = equal_parts(gpus, &wants);
        let rates: Vec<f64> = parts
            .iter()
            .zip(&wants)
            .map(|(part, all)| part / all)
            .collect();
        let end_s = running
            .iter()
            .zip(&rates)
            .map(|((_, left), rate)| left / rate);
        let end_s = now_s + end_s.fold(f64::INFINITY, f64::min);
        let arrival_s = jobs.get(next).map_or(f64::INFINITY, |job| job.arrival_s);
        let to_s = end_s.min(arrival_s);
        if to_s.is_infinite() {
            return ends;
        }
        for ((_, left), rate) in running.iter_mut().zip(&rates) {
            *left -= rate * (to_s - now_s);
        }
        now_s = to_s;
        running.retain(|(at, left)| {
            if *left <= 1e-6 {
                ends[*at] = now_s;
            }
            *left > 1e-6
        });
        if arrival_s <= now_s {
            running.push((next, jobs[next].duration_s()));
            next += 1;
        }
    }
}

/// Mean completion over that of the fair cluster, and the part of the jobs that end later than
/// there, by a round that they may have waited for to begin with, and by two more.
fn against(fates: &[Fate], fair_s: &[f64]) -> [f64; 3] {
    let done = || {
        fates
            .iter()
            .zip(fair_s)
            .filter_map(|(fate, fair)| Some((fate, fate.end_s?, fair)))
    };
    let took = mean(done().map(|(fate, end_s, _)| end_s - fate.arrival_s));
    let fair = mean(done().map(|(fate, _, fair)| fair - fate.arrival_s));
    let later = |by_s: f64| {
        100.0 * mean(done().map(|(_, end, fair)| f64::from(u8::from(end > fair + by_s))))
    };
    [took / fair, later(ROUND_S), later(3.0 * ROUND_S)]
}

fn figures(data: &Path) -> Vec<f64> {
    let of = |(part, cluster): (&str, &str)| -> Vec<[f64; 3]> {
        let options = Options {
            part: Some(part.to_owned()),
            ..Options::default()
        };
        let (trace, spec) = load(data, "gavel/philly_trace_seed0.csv", cluster, options);
        let fair_s = fair_ends_s(&trace, f64::from(spec.gpus()));
        let config = rounds(ROUND_S);
        let orders = ["carbyne", "drf", "srtf"];
        let one = |order: &&str| against(&fates(&trace, &spec, &config, order), &fair_s);
        orders.iter().map(one).collect()
    };
    let (a, b) = (of(("6c71a0", "96xV100")), of(("ee9e8c", "80xV100")));
    let both = |order: usize, what: usize| mean([a[order][what], b[order][what]]);
    vec![
        both(0, 0),
        both(0, 1),
        both(0, 2),
        a[0][0],
        b[0][0],
        both(1, 0),
        both(1, 1),
        both(2, 0),
        both(2, 1),
    ]
}
