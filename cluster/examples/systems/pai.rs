//! Alibaba's clusters that share GPUs (PAI): parts of GPUs, and what is left of them.
//!
//! *Pods.* openb's, drawn by chance, again and again, until they have asked for 90 % of 200 servers
//! of 8 GPUs, and for 130 % (`full`: what nobody has then is of no use to who came last); three
//! seeds. Any number may be on a GPU as long as their parts add up to one, or two at most, as for
//! the simulator's packers. Nobody leaves.
//!
//! *Iterations.* Of PAI's workers with 20 to 25 % of a GPU and with half of one: the median
//! coefficient of variation, of a worker by itself and between the workers of a job.
//!
//! *Against the paper.* FGD (ATC 2023) is by the authors of the trace. It also looks at CPUs,
//! memory of the host and types of GPU, which the trace here does not have: fewer places are
//! closed.

use std::path::Path;

use cluster::fractions::{Filled, Place, Servers, fill, pods};
use cluster::trace::{Iterations, Options, read_iterations};

use super::Limit::{AtLeast, AtMost, Reported};
use super::{System, load, mean, row};

const LOAD: f64 = 0.9;
const FULL: f64 = 1.3;
const SERVERS: Servers = Servers {
    servers: 200,
    gpus: 8,
    gpu_bytes: 16 << 30,
    most: 64,
};

pub const SYSTEM: System = System {
    name: "pai",
    rows: &[
        row("pai_fragmented_first_fit_pct", "%", Reported, "-"),
        row("pai_fragmented_best_fit_pct", "%", Reported, "-"),
        row("pai_fragmented_worst_fit_pct", "%", Reported, "-"),
        row("pai_fragmented_fgd_pct", "%", Reported, "-"),
        row(
            "pai_fgd_fragmented_over_worst_fit",
            "ratio",
            AtMost(1.0),
            "-",
        ),
        row("pai_fgd_fragmented_over_best_fit", "ratio", Reported, "-"),
        row("pai_free_fgd_pct", "%", Reported, "-"),
        row("pai_refused_fgd_pct", "%", AtMost(0.0), "-"),
        row("pai_most_pods_of_a_gpu", "pods", AtLeast(3.0), "-"),
        row("pai_gpus_with_three_pods_pct", "%", Reported, "-"),
        row("pai_full_free_first_fit_pct", "%", Reported, "-"),
        row("pai_full_free_best_fit_pct", "%", Reported, "-"),
        row("pai_full_free_worst_fit_pct", "%", Reported, "-"),
        row("pai_full_free_fgd_pct", "%", Reported, "-"),
        row(
            "pai_full_free_fgd_over_best_fit",
            "ratio",
            AtMost(0.51),
            "up to 49 % fewer GPUs that nobody has than under packing",
        )
        .missed(
            1.0,
            1.001,
            "CPUs and types of GPU, by which FGD gains, are not in the trace here",
        ),
        row("pai_full_free_two_at_most_pct", "%", Reported, "-"),
        row(
            "pai_iteration_cov_of_worker_up_to_25_pct",
            "%",
            Reported,
            "-",
        ),
        row("pai_iteration_cov_of_worker_at_50_pct", "%", Reported, "-"),
        row(
            "pai_iteration_cov_between_workers_up_to_25_pct",
            "%",
            Reported,
            "-",
        ),
        row(
            "pai_iteration_cov_between_workers_at_50_pct",
            "%",
            Reported,
            "-",
        ),
    ],
    quick: true,
    run: figures,
};

fn figures(data: &Path) -> Vec<f64> {
    let (trace, _) = load(data, "openb/pods.csv", "8", Options::default());
    let pods = pods(&trace);
    let of = |place: Place, most: usize, load: f64| -> Vec<Filled> {
        let servers = Servers { most, ..SERVERS };
        (1..=3)
            .map(|seed| fill(&pods, &servers, place, load, seed))
            .collect()
    };
    let part = |all: &[Filled], of: fn(&Filled) -> f64| 100.0 * mean(all.iter().map(of));
    let fragmented = |all: &[Filled]| part(all, |one| one.fragmented);
    let refused = |all: &[Filled]| part(all, |one| one.refused as f64 / one.pods as f64);
    let free = |all: &[Filled]| part(all, |one| one.free);
    let every = |load: f64| {
        let all = [Place::First, Place::Best, Place::Worst, Place::Fragments];
        all.map(|place| of(place, 64, load))
    };
    let [first, best, worst, fgd] = every(LOAD);
    let mut out = vec![
        fragmented(&first),
        fragmented(&best),
        fragmented(&worst),
        fragmented(&fgd),
        fragmented(&fgd) / fragmented(&worst),
        fragmented(&fgd) / fragmented(&best),
        free(&fgd),
        refused(&fgd),
        fgd.iter().map(|one| one.most).max().unwrap_or(0) as f64,
        part(&fgd, |one| one.crowded),
    ];
    let [first, best, worst, fgd] = every(FULL);
    out.extend([&first, &best, &worst, &fgd].map(|all| free(all)));
    out.push(free(&fgd) / free(&best));
    out.push(free(&of(Place::Fragments, 2, FULL)));
    let all = read_iterations(&data.join("pai-2020/iterations.csv"));
    let all = all.expect("iterations of the repository");
    for of in [
        |one: &Iterations| one.of_worker.p50,
        |one: &Iterations| one.between_workers.p50,
    ] {
        for half in [false, true] {
            let some = all.iter().filter(|one| (one.gpu_percent > 25.0) == half);
            out.push(100.0 * mean(some.map(of)));
        }
    }
    out
}
