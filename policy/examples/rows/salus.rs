//! Salus: equal jobs get equal parts, and the shortest first halves the mean completion.
//!
//! *Two equal jobs*: iterations of 3 to 40 ms without pauses, the same for both, kernels of 50 us
//! to 1 ms, one of the two up to a second later; their parts of the device over the 10 s from then
//! on, under `salus-fair`.
//!
//! *Long, medium, short*: the 90th, 50th and 10th percentile of a cluster's jobs (Philly: median
//! 1,144 s, 90th percentile 11,266 s; the 10th is 116 s if their logarithms are normal), at a
//! thousandth of their length, each 20 % longer or shorter, one of each, 1 ms apart in this order,
//! in iterations of 5 to 30 ms. Under `fifo` a job keeps the device until it is done.

use policy::stepper::{Phase, SimTenant, Stepper};
use policy::{QuantumBounds, TenantId, by_name};

use crate::rows::draw::Draw;
use crate::rows::{Limit, Row};

const QUANTUM: QuantumBounds = QuantumBounds {
    min_us: 2000,
    max_us: 5000,
};
const LENGTHS_US: [u64; 3] = [11_266_000, 1_144_000, 116_000];

fn iterations(id: u64, device_us: u64, kernel_us: u64) -> SimTenant {
    let phase = Phase::Busy {
        device_us,
        kernel_us,
    };
    SimTenant {
        tells_iterations: true,
        tells_size: true,
        ..SimTenant::new(id, 1_000_000, vec![phase])
    }
}

/// The first one's part of what two equal jobs got, in percent.
pub fn equal_part(seed: u64) -> f64 {
    let mut draw = Draw::new(seed);
    let (device_us, kernel_us) = (draw.between(3000, 40_000), draw.between(50, 1000));
    let policy = by_name("salus-fair", &[]).expect("a policy of the list");
    let mut sim = Stepper::new(policy, QUANTUM);
    sim.join(iterations(1, device_us, kernel_us));
    sim.run_us(draw.between(0, 1_000_000));
    sim.join(iterations(2, device_us, kernel_us));
    let before = sim.got(TenantId(1)).device_ns;
    sim.run_us(10_000_000);
    let one = (sim.got(TenantId(1)).device_ns - before) as f64;
    let two = sim.got(TenantId(2)).device_ns as f64;
    100.0 * one / (one + two)
}

/// Mean completion of a long, a medium and a short job, in seconds.
pub fn mean_completion_s(seed: u64, policy: &str) -> f64 {
    let mut draw = Draw::new(seed);
    let policy = by_name(policy, &[]).expect("a policy of the list");
    let mut sim = Stepper::new(policy, QUANTUM);
    let mut came_ns = Vec::new();
    for (id, length_us) in LENGTHS_US.iter().enumerate() {
        let iteration_us = draw.between(5000, 30_000);
        let length_us = *length_us as f64 * (0.8 + 0.4 * draw.part());
        sim.join(SimTenant {
            rounds: Some((length_us / iteration_us as f64).ceil() as u64),
            ..iterations(id as u64, iteration_us, draw.between(50, 1000))
        });
        came_ns.push(sim.now_ns());
        sim.run_us(1000);
    }
    sim.run_until_over_us(60_000_000);
    let took = came_ns.iter().enumerate().map(|(id, came_ns)| {
        let done_ns = sim.got(TenantId(id as u64)).finished_ns;
        (done_ns.expect("the jobs end") - came_ns) as f64 / 1e9
    });
    took.sum::<f64>() / came_ns.len() as f64
}

pub fn rows(seeds: &[u64]) -> Vec<Row> {
    let furthest = (seeds.iter())
        .map(|seed| (equal_part(*seed) - 50.0).abs())
        .fold(0.0, f64::max);
    let worst = (seeds.iter())
        .map(|seed| mean_completion_s(*seed, "salus-srtf") / mean_completion_s(*seed, "fifo"))
        .fold(0.0, f64::max);
    vec![
        Row::new(
            "salus_equal_jobs_error_points",
            furthest,
            "points from 50 %, the worst seed",
            Limit::AtMost(1.0),
        ),
        Row::new(
            "salus_srtf_over_fifo",
            worst,
            "mean completion over first come first served, the worst seed",
            Limit::AtMost(0.5),
        ),
    ]
}
