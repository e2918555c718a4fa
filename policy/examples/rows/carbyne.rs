//! Carbyne: nobody is done later than under plain fair sharing, and on average everybody is done sooner.
//!
//! *Workload.* Barrier-heavy: each of n = 3 to 6 jobs computes for 40 to 160 ms on the device and then waits at a barrier (for the slowest
//! rank, for the host, for an exchange) n - 1 times as long, 20 % more or less, again and again, 30 to 60 times: a packer puts
//! as many jobs on a device as have busy fractions that add up to one. Some begin together, some up to half a second later. The policy is told of iterations, as the interposer finds them by their period.
//!
//! *Against* stride on the same jobs, with the same slices. What is compared is when each job is done.

use policy::stepper::{Phase, SimTenant, Stepper};
use policy::{QuantumBounds, by_name};

use crate::rows::draw::Draw;
use crate::rows::{Limit, Row};

const QUANTUM: QuantumBounds = QuantumBounds {
    min_us: 2000,
    max_us: 5000,
};

/// When each job began and was done, in seconds.
pub fn run(seed: u64, policy: &str) -> Vec<(f64, f64)> {
    let mut draw = Draw::new(seed);
    let count = draw.between(3, 6);
    let jobs: Vec<(u64, SimTenant)> = (0..count)
        .map(|id| {
            let device_us = draw.between(40_000, 160_000);
            let phases = vec![
                Phase::Busy {
                    device_us,
                    kernel_us: draw.between(100, 500),
                },
                Phase::Sleep {
                    us: (device_us as f64 * (count - 1) as f64 * (0.8 + 0.4 * draw.part())) as u64,
                },
            ];
            let job = SimTenant {
                rounds: Some(draw.between(30, 60)),
                tells_iterations: true,
                ..SimTenant::new(id, 1_000_000, phases)
            };
            let late_us = if draw.part() < 0.5 {
                0
            } else {
                draw.between(0, 500_000)
            };
            (late_us, job)
        })
        .collect();
    let mut order: Vec<usize> = (0..jobs.len()).collect();
    order.sort_by_key(|at| jobs[*at].0);
    let policy = by_name(policy, &[]).expect("a policy of the list");
    let mut sim = Stepper::new(policy, QUANTUM);
    for at in order {
        sim.run_us(jobs[at].0.saturating_sub(sim.now_ns() / 1000));
        sim.join(jobs[at].1.clone());
    }
    sim.run_until_over_us(600_000_000);
    jobs.iter()
        .map(|(late_us, job)| {
            let done_ns = sim.got(job.id).finished_ns.expect("the jobs end");
            (*late_us as f64 / 1e6, done_ns as f64 / 1e9)
        })
        .collect()
}

/// Of a set of jobs: how much later the unluckiest is done, and how much sooner they are on average, as parts.
pub fn compare(seed: u64) -> (f64, f64) {
    let (fair, altruistic) = (run(seed, "stride"), run(seed, "altruistic"));
    let took = |(began, done): &(f64, f64)| done - began;
    let later = fair
        .iter()
        .zip(&altruistic)
        .map(|(fair, altruistic)| took(altruistic) / took(fair) - 1.0)
        .fold(f64::NEG_INFINITY, f64::max);
    let sum = |jobs: &[(f64, f64)]| jobs.iter().map(took).sum::<f64>();
    (later, 1.0 - sum(&altruistic) / sum(&fair))
}

pub fn rows(seeds: &[u64]) -> Vec<Row> {
    let outcomes: Vec<(f64, f64)> = seeds.iter().map(|seed| compare(*seed)).collect();
    let latest = outcomes
        .iter()
        .map(|(later, _)| *later)
        .fold(f64::MIN, f64::max);
    let least = outcomes
        .iter()
        .map(|(_, sooner)| *sooner)
        .fold(f64::MAX, f64::min);
    let mean = outcomes.iter().map(|(_, sooner)| sooner).sum::<f64>() / outcomes.len() as f64;
    vec![
        Row::new(
            "carbyne_latest_job_later_pct",
            latest * 100.0,
            "% of its time under stride, the worst of all jobs and seeds",
            Limit::AtMost(0.0),
        ),
        Row::new(
            "carbyne_mean_sooner_pct",
            mean * 100.0,
            "% of the mean completion under stride",
            Limit::AtLeast(10.0),
        ),
        Row::new(
            "carbyne_mean_sooner_worst_seed_pct",
            least * 100.0,
            "% of the mean completion under stride, the worst seed",
            Limit::AtLeast(0.0),
        ),
    ]
}
