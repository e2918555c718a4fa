//! Carbyne: nobody is done later than under plain fair sharing, and on average everybody is done
//! sooner.
//!
//! *Workload.* Barrier-heavy: each of n = 3 to 6 jobs computes for some 40 to 160 ms on the device
//! and then waits at a barrier (for the slowest rank, for the host, for an exchange) about n - 1
//! times as long, again and again, 30 to 60 times: a packer puts as many jobs on a device as have
//! busy fractions that add up to one. Some begin together, some up to half a second later. Two
//! mixes:
//!
//! * `Search`: a search over hyper-parameters, the same network n times; bursts and pauses differ
//!   by up to 10 %.
//! * `Varied`: every job draws its burst from the whole range, its pause is 20 % more or less.
//!
//! The policy knows the iterations, as the interposer finds them by their period.
//!
//! *Against* stride on the same jobs, twice. "Nobody is done later than under fair sharing" is a
//! promise against perfectly fair sharing, so the latest job is compared with stride in slices of
//! 0.5 ms. The mean is compared with stride in the same slices as the policy has; there the latest
//! job is reported too: with slices of milliseconds a job can be ahead of its fair share by a
//! burst.

use policy::stepper::{Phase, SimTenant, Stepper};
use policy::{QuantumBounds, by_name};

use crate::rows::draw::Draw;
use crate::rows::{Limit, Row};

const QUANTUM: QuantumBounds = QuantumBounds {
    min_us: 2000,
    max_us: 5000,
};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mix {
    Search,
    Varied,
}

const FINE: QuantumBounds = QuantumBounds {
    min_us: 500,
    max_us: 500,
};

/// When each job began and was done, in seconds.
pub fn run(seed: u64, mix: Mix, policy: &str, quantum: QuantumBounds) -> Vec<(f64, f64)> {
    let mut draw = Draw::new(seed);
    let count = draw.between(3, 6);
    let common_us = draw.between(44_000, 145_000) as f64;
    let jobs: Vec<(u64, SimTenant)> = (0..count)
        .map(|id| {
            let about = |draw: &mut Draw, spread: f64| 1.0 - spread + 2.0 * spread * draw.part();
            let device_us = match mix {
                Mix::Search => (common_us * about(&mut draw, 0.1)) as u64,
                Mix::Varied => draw.between(40_000, 160_000),
            };
            let spread = if mix == Mix::Search { 0.1 } else { 0.2 };
            let pause_us = device_us as f64 * (count - 1) as f64 * about(&mut draw, spread);
            let phases = vec![
                Phase::Busy {
                    device_us,
                    kernel_us: draw.between(100, 500),
                },
                Phase::Sleep {
                    us: pause_us as u64,
                },
            ];
            let job = SimTenant {
                rounds: Some(draw.between(30, 60)),
                tells_iterations: true,
                ..SimTenant::new(id, 1_000_000, phases)
            };
            let arrival_us = if draw.part() < 0.5 {
                0
            } else {
                draw.between(0, 500_000)
            };
            (arrival_us, job)
        })
        .collect();
    let mut order: Vec<usize> = (0..jobs.len()).collect();
    order.sort_by_key(|at| jobs[*at].0);
    let policy = by_name(policy, &[]).expect("a policy of the list");
    let mut sim = Stepper::new(policy, quantum);
    for at in order {
        sim.run_us(jobs[at].0.saturating_sub(sim.now_ns() / 1000));
        sim.join(jobs[at].1.clone());
    }
    sim.run_until_over_us(600_000_000);
    jobs.iter()
        .map(|(arrival_us, job)| {
            let done_ns = sim.got(job.id).finished_ns.expect("the jobs end");
            (*arrival_us as f64 / 1e6, done_ns as f64 / 1e9)
        })
        .collect()
}

struct Comparison {
    /// How much later the unluckiest is done than under perfectly fair sharing, as a part.
    later_than_fair: f64,
    later_than_stride: f64,
    /// How much sooner they are done on average than under stride, as a part.
    sooner: f64,
}

fn compare(seed: u64, mix: Mix) -> Comparison {
    let altruistic = run(seed, mix, "altruistic", QUANTUM);
    let stride = run(seed, mix, "stride", QUANTUM);
    let fair = run(seed, mix, "stride", FINE);
    let took = |(began, done): &(f64, f64)| done - began;
    let later = |than: &[(f64, f64)]| {
        (than.iter().zip(&altruistic))
            .map(|(than, altruistic)| took(altruistic) / took(than) - 1.0)
            .fold(f64::NEG_INFINITY, f64::max)
    };
    let sum = |jobs: &[(f64, f64)]| jobs.iter().map(took).sum::<f64>();
    Comparison {
        later_than_fair: later(&fair),
        later_than_stride: later(&stride),
        sooner: 1.0 - sum(&altruistic) / sum(&stride),
    }
}

pub fn rows(seeds: &[u64]) -> Vec<Row> {
    let all = |mix| -> Vec<Comparison> { seeds.iter().map(|seed| compare(*seed, mix)).collect() };
    let (search, varied) = (all(Mix::Search), all(Mix::Varied));
    let worst = |all: &[Comparison], of: fn(&Comparison) -> f64| {
        100.0 * all.iter().map(of).fold(f64::MIN, f64::max)
    };
    let mean = |all: &[Comparison]| {
        100.0 * all.iter().map(|one| one.sooner).sum::<f64>() / all.len() as f64
    };
    let both = || [&search[..], &varied[..]];
    let worst_of_both = |of: fn(&Comparison) -> f64| {
        both()
            .iter()
            .map(|all| worst(all, of))
            .fold(f64::MIN, f64::max)
    };
    vec![
        Row::new(
            "carbyne_latest_job_later_pct",
            worst_of_both(|one| one.later_than_fair),
            "% of its time under perfectly fair sharing, the worst job of all mixes and seeds",
            Limit::AtMost(0.0),
        ),
        Row::new(
            "carbyne_latest_job_later_than_stride_pct",
            worst_of_both(|one| one.later_than_stride),
            "% of its time under stride with the same slices, the worst job of all mixes and seeds",
            Limit::Reported,
        ),
        Row::new(
            "carbyne_mean_sooner_pct",
            mean(&search),
            "% of the mean completion under stride, barriers, equal jobs",
            Limit::AtLeast(10.0),
        ),
        Row::new(
            "carbyne_varied_mean_sooner_pct",
            mean(&varied),
            "% of the mean completion under stride, barriers, varied jobs",
            Limit::Reported,
        ),
    ]
}
