//! Themis (NSDI 2020): the worst finish-time fairness, and what decides it.
//!
//! *Traces.* Both virtual clusters of Gavel's Philly trace, under `worst-rho`, in rounds of 300 s
//! as everything else there, in rounds of a minute, and at every event. In rounds of 300 s the
//! greatest rho is that of a job of 21 s which waits for its round: it has all that it asks for as
//! soon as anything is decided, so that it is the same under every order that starts it then.

use std::path::Path;

use cluster::sim::{Config, Fate};
use cluster::trace::Options;

use super::Limit::{AtMost, Reported};
use super::{System, load, row};

const MAX: &str = "worst finish-time fairness 2.25x lower than of other schedulers";

pub const SYSTEM: System = System {
    name: "themis",
    rows: &[
        row("themis_6c71a0_rho_max", "ratio", AtMost(10.0), MAX).missed(
            11.112,
            11.2,
            "a job of 21 s waits for its round of 300 s, under every order",
        ),
        row(
            "themis_6c71a0_rho_max_of_a_round_and_longer",
            "ratio",
            AtMost(10.0),
            MAX,
        ),
        row("themis_6c71a0_srtf_rho_max", "ratio", Reported, "-"),
        row("themis_6c71a0_fifo_rho_max", "ratio", Reported, "-"),
        row(
            "themis_6c71a0_rho_max_rounds_of_60_s",
            "ratio",
            AtMost(10.0),
            MAX,
        ),
        row(
            "themis_6c71a0_rho_max_at_events",
            "ratio",
            AtMost(10.0),
            MAX,
        ),
        row(
            "themis_6c71a0_filter_0_8_rho_max_at_events",
            "ratio",
            AtMost(10.0),
            MAX,
        ),
        row("themis_ee9e8c_rho_max", "ratio", AtMost(10.0), MAX),
        row("themis_ee9e8c_fifo_rho_max", "ratio", Reported, "-"),
    ],
    quick: true,
    run: figures,
};

const ROUND_S: f64 = 300.0;

fn fates(
    data: &Path,
    (part, cluster): (&str, &str),
    order: &str,
    round_s: Option<f64>,
) -> Vec<Fate> {
    let options = Options {
        part: Some(part.to_owned()),
        ..Options::default()
    };
    let (trace, spec) = load(data, "gavel/philly_trace_seed0.csv", cluster, options);
    let config = Config {
        round_s,
        seed: 1,
        ..Config::default()
    };
    super::fates(&trace, &spec, &config, order)
}

fn greatest(fates: &[Fate], least_s: f64) -> f64 {
    let some = fates.iter().filter(|fate| fate.solo_s >= least_s);
    some.map(|fate| fate.rho).fold(0.0, f64::max)
}

fn figures(data: &Path) -> Vec<f64> {
    let (a, b) = (("6c71a0", "96xV100"), ("ee9e8c", "80xV100"));
    let of = |trace, order, round_s| greatest(&fates(data, trace, order, round_s), 0.0);
    let rounds = fates(data, a, "worst-rho", Some(ROUND_S));
    vec![
        greatest(&rounds, 0.0),
        greatest(&rounds, ROUND_S),
        of(a, "srtf", Some(ROUND_S)),
        of(a, "fifo", Some(ROUND_S)),
        of(a, "worst-rho", Some(60.0)),
        of(a, "worst-rho", None),
        of(a, "worst-rho:filter=0.8", None),
        of(b, "worst-rho", Some(ROUND_S)),
        of(b, "fifo", Some(ROUND_S)),
    ]
}
