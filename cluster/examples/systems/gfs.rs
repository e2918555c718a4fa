//! GFS (ASPLOS 2026): spot jobs within a quota by forecast, against a fixed quota and none.
//!
//! *Jobs.* Chronus' mix of the Philly trace: its jobs with a deadline are guaranteed here, its
//! best-effort ones are spot jobs; users are virtual clusters. GPUs so that all jobs together ask
//! for as many as there are (load 1), and so that they ask for 0.8 of them. Rounds of 300 s, which
//! is the step of the forecast; a job that gets GPUs again loses 40 s, as in the authors' simulator
//! up to 8 GPUs. The order among jobs of a class is `srtf`.
//!
//! *Compared.* `spot-quota` as it is by default; a fixed quota, as large as what guaranteed jobs
//! leave in the mean; and no quota: a spot job starts wherever GPUs are free. All three stop spot
//! jobs for guaranteed ones. A stop counts against the runs of spot jobs.
//!
//! *Against the paper.* Its trace is not here, nor are its checkpoints: a job that is stopped there
//! loses what it did since the last, and the choice whom to stop goes by that. Its forecaster is a
//! network that was trained on months. Its figures are against the scheduler that the cluster had.

use std::path::Path;

use cluster::sim::{Config, Outcome};
use cluster::trace::{Options, Trace};
use policy::cluster::{Choice, Class};

use super::Limit::{AtMost, Reported};
use super::{System, load, mean, outcome, rounds, row, scheduler};

const FILE: &str = "chronus-philly/philly_mix1.csv";
const LOADS: [f64; 2] = [1.0, 0.8];

pub const SYSTEM: System = System {
    name: "gfs",
    rows: &[
        row(
            "gfs_stops_over_no_quota",
            "ratio",
            AtMost(1.0),
            "evictions of spot jobs: 33.0 % fewer than before",
        ),
        row("gfs_stops_over_fixed_quota", "ratio", Reported, "-"),
        row(
            "gfs_spot_wait_over_fixed_quota",
            "ratio",
            Reported,
            "queueing of spot jobs: 44.1 % shorter than before",
        ),
        row("gfs_spot_wait_over_no_quota", "ratio", Reported, "-"),
        row(
            "gfs_utilisation_over_fixed_quota",
            "ratio",
            Reported,
            "GPUs in use: up to 22.8 % more than before",
        ),
        row("gfs_guaranteed_wait_over_no_quota", "ratio", Reported, "-"),
        row("gfs_stops_pct", "%", Reported, "-"),
        row("gfs_fixed_quota_stops_pct", "%", Reported, "-"),
        row("gfs_no_quota_stops_pct", "%", Reported, "-"),
        row("gfs_spot_wait_s", "s", Reported, "-"),
        row("gfs_fixed_quota_spot_wait_s", "s", Reported, "-"),
        row("gfs_no_quota_spot_wait_s", "s", Reported, "-"),
        row("gfs_load_0_8_stops_over_no_quota", "ratio", Reported, "-"),
        row(
            "gfs_load_0_8_stops_over_fixed_quota",
            "ratio",
            Reported,
            "-",
        ),
        row(
            "gfs_load_0_8_spot_wait_over_fixed_quota",
            "ratio",
            Reported,
            "-",
        ),
        row(
            "gfs_load_0_8_spot_wait_over_no_quota",
            "ratio",
            Reported,
            "-",
        ),
    ],
    quick: false,
    run: figures,
};

/// What one run was like.
struct Seen {
    /// Of the runs of spot jobs, the part that was stopped.
    stops: f64,
    spot_wait_s: f64,
    guaranteed_wait_s: f64,
    utilisation: f64,
}

fn seen(trace: &Trace, outcome: &Outcome) -> Seen {
    let wait_s = |class: Class| {
        let both = trace.jobs.iter().zip(&outcome.fates);
        let some = both.filter(|(job, _)| job.profile.class == class);
        mean(some.map(|(_, fate)| fate.waited_s))
    };
    let spot = trace.jobs.iter();
    let spot = spot.filter(|job| job.profile.class == Class::Opportunistic);
    let (stopped, runs) = (outcome.preemptions as f64, spot.count() as f64);
    Seen {
        // Guaranteed jobs are never stopped, and who was stopped runs once more.
        stops: stopped / (runs + stopped),
        spot_wait_s: wait_s(Class::Opportunistic),
        guaranteed_wait_s: wait_s(Class::Guaranteed),
        utilisation: outcome.held_gpu_s / (f64::from(outcome.gpus) * outcome.makespan_s),
    }
}

fn compared(data: &Path, offered: f64) -> [Seen; 3] {
    let (trace, _) = load(data, FILE, "8", Options::default());
    let gpus = (trace.offered_load(1) / offered).round() as u32;
    let mut guaranteed = trace.clone();
    guaranteed
        .jobs
        .retain(|job| job.profile.class == Class::Guaranteed);
    let left = (1.0 - guaranteed.offered_load(gpus)).clamp(0.01, 1.0);
    let (trace, spec) = load(data, FILE, &gpus.to_string(), Options::default());
    let config = Config {
        restart_s: 40.0,
        ..rounds(300.0)
    };
    let fixed = format!("spot-quota:fixed={left:.3}");
    ["spot-quota", &fixed, "spot-quota:fixed=1"].map(|admission| {
        let mut choice = Choice::new("srtf", "anywhere");
        choice.admission = Some(admission.to_owned());
        let scheduler = scheduler(&trace, &spec, &config, &choice);
        seen(&trace, &outcome(&trace, &spec, &config, scheduler))
    })
}

fn figures(data: &Path) -> Vec<f64> {
    let [full, less] = LOADS.map(|offered| compared(data, offered));
    let over = |all: &[Seen; 3], other: usize, of: fn(&Seen) -> f64| of(&all[0]) / of(&all[other]);
    let stops = |one: &Seen| one.stops;
    let wait_s = |one: &Seen| one.spot_wait_s;
    let mut out = vec![
        over(&full, 2, stops),
        over(&full, 1, stops),
        over(&full, 1, wait_s),
        over(&full, 2, wait_s),
        over(&full, 1, |one| one.utilisation),
        over(&full, 2, |one| one.guaranteed_wait_s),
    ];
    out.extend(full.iter().map(|one| 100.0 * one.stops));
    out.extend(full.iter().map(wait_s));
    out.extend([
        over(&less, 2, stops),
        over(&less, 1, stops),
        over(&less, 1, wait_s),
        over(&less, 2, wait_s),
    ]);
    out
}
