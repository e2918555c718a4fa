//! Karuna: deadlines kept with just enough, so that the rest is done sooner than under strict priority.
//!
//! *Workload.* Jobs as in the published trace of Chronus (SoCC 2021: `philly_mix1`, 21,724 jobs with a deadline and 9,216 without, made
//! from a cluster's trace): 70 of 100 have a deadline; durations and deadlines over durations are drawn from that trace's
//! quantiles (the tables below, read off the file). A minute of the trace is 10 ms of device time here, every job runs on the one
//! device, and they come as a Poisson process whose load is 90 % of the device over the span of the run. The policy is told deadlines
//! and how much work is left for jobs with a deadline, nothing for the others.
//!
//! *Against* the same policy with `deadlines_first`: every job with a deadline before all others, as fast as it can, the earliest deadline first.

use policy::stepper::{Phase, SimTenant, Stepper};
use policy::{Param, QuantumBounds, TenantId, Value, by_name};

use crate::rows::Row;
use crate::rows::draw::Draw;

const DURATION_MIN: &[(f64, f64)] = &[
    (0.0, 20.0),
    (0.1, 23.0),
    (0.25, 33.0),
    (0.5, 59.0),
    (0.75, 172.0),
    (0.9, 657.0),
    (0.95, 1404.0),
    (0.99, 3262.0),
    (1.0, 6000.0),
];
const DEADLINE_OVER_DURATION: &[(f64, f64)] = &[
    (0.0, 1.101),
    (0.1, 1.394),
    (0.25, 1.645),
    (0.5, 1.971),
    (0.75, 2.452),
    (0.9, 3.129),
    (0.99, 4.227),
    (1.0, 5.0),
];
const WITH_DEADLINE: f64 = 21_724.0 / 30_940.0;
const MINUTE_US: f64 = 10_000.0;
const LOAD: f64 = 0.9;
const QUANTUM: QuantumBounds = QuantumBounds {
    min_us: 2000,
    max_us: 5000,
};

pub struct Outcome {
    pub sload: f64,
    pub rest: Vec<f64>,
    pub n: (u32, u32),
    pub missed: f64,
    pub rest_p95_s: f64,
    pub rest_mean_s: f64,
}

pub fn run(seed: u64, jobs: usize, strict: bool) -> Outcome {
    let wd: f64 = std::env::var("WD").map_or(WITH_DEADLINE, |v| v.parse().unwrap());
    let top: f64 = std::env::var("TOP").map_or(1.0, |v| v.parse().unwrap());
    let bot: f64 = std::env::var("BOT").map_or(0.0, |v| v.parse().unwrap());
    let betop: f64 = std::env::var("BETOP").map_or(1.0, |v| v.parse().unwrap());
    let margin: f64 = std::env::var("MARGIN").map_or(5.0, |v| v.parse().unwrap());
    let fq: f64 = std::env::var("FQ").map_or(500.0, |v| v.parse().unwrap());
    let mut draw = Draw::new(seed);
    let mut load: Vec<SimTenant> = (0..jobs)
        .map(|id| {
            let with_deadline = draw.part() < wd;
            let top = if with_deadline { top } else { betop };
            let us = loop {
                let m = draw.quantile(DURATION_MIN);
                if m <= 6000.0 * top && (!with_deadline || m >= bot) {
                    break (m * MINUTE_US) as u64;
                }
            };
            let deadline = draw.quantile(DEADLINE_OVER_DURATION);
            let phase = Phase::Busy {
                device_us: us,
                kernel_us: 1000,
            };
            SimTenant {
                rounds: Some(1),
                deadline_us: with_deadline.then_some((us as f64 * deadline) as u64),
                tells_size: with_deadline,
                ..SimTenant::new(id as u64, 1_000_000, vec![phase])
            }
        })
        .collect();
    let work_us: u64 = load.iter().map(|job| job.round_device_ns() / 1000).sum();
    let slo_us: u64 = load
        .iter()
        .filter(|j| j.deadline_us.is_some())
        .map(|job| job.round_device_ns() / 1000)
        .sum();
    let span_us = work_us as f64 / LOAD;
    // A Poisson process, given how many came: evenly spread and sorted.
    let mut at_us: Vec<u64> = load
        .iter()
        .map(|_| (draw.part() * span_us) as u64)
        .collect();
    at_us.sort_unstable();

    let params = [
        Param::new("deadlines_first", Value::Flag(strict)),
        Param::new("margin_percent", Value::Number(margin)),
        Param::new("first_queue_ms", Value::Number(fq)),
    ];
    let policy = by_name("deadline", &params).expect("a policy of the list");
    let mut sim = Stepper::new(policy, QUANTUM);
    let mut arrivals = Vec::new();
    for (at_us, job) in at_us.into_iter().zip(load.drain(..)) {
        sim.run_us(at_us.saturating_sub(sim.now_ns() / 1000));
        arrivals.push((job.id, sim.now_ns(), job.deadline_us));
        sim.join(job);
    }
    sim.run_until_over_us(span_us as u64);
    assert!(sim.is_over(), "the jobs end");
    Outcome {
        sload: slo_us as f64 / work_us as f64,
        ..summarise(&arrivals, |id| sim.got(id).finished_ns)
    }
}

fn summarise(
    arrivals: &[(TenantId, u64, Option<u64>)],
    finished_ns: impl Fn(TenantId) -> Option<u64>,
) -> Outcome {
    let (mut missed, mut promised, mut rest_s) = (0, 0, Vec::new());
    for (id, at_ns, deadline_us) in arrivals {
        let took_ns = finished_ns(*id).unwrap_or(u64::MAX) - at_ns;
        match deadline_us {
            Some(us) => {
                promised += 1;
                missed += u32::from(took_ns > us * 1000);
            }
            None => rest_s.push(took_ns as f64 / 1e9),
        }
    }
    rest_s.sort_unstable_by(f64::total_cmp);
    Outcome {
        sload: 0.0,
        n: (missed, promised),
        rest: rest_s.clone(),
        missed: f64::from(missed) / f64::from(promised),
        rest_p95_s: rest_s[rest_s.len() * 95 / 100],
        rest_mean_s: rest_s.iter().sum::<f64>() / rest_s.len() as f64,
    }
}

pub fn rows(seeds: &[u64], jobs: usize) -> Vec<Row> {
    let outcomes: Vec<(Outcome, Outcome)> = seeds
        .iter()
        .map(|seed| (run(*seed, jobs, false), run(*seed, jobs, true)))
        .collect();
    let pool = |f: &dyn Fn(&(Outcome, Outcome)) -> Vec<f64>| {
        let mut v: Vec<f64> = outcomes.iter().flat_map(f).collect();
        v.sort_by(f64::total_cmp);
        (
            v[v.len() * 95 / 100],
            v.iter().sum::<f64>() / v.len() as f64,
        )
    };
    let j = pool(&|o| o.0.rest.clone());
    let st = pool(&|o| o.1.rest.clone());
    let miss = |f: &dyn Fn(&(Outcome, Outcome)) -> (u32, u32)| {
        let (a, b) = outcomes
            .iter()
            .map(f)
            .fold((0, 0), |x, y| (x.0 + y.0, x.1 + y.1));
        100.0 * f64::from(a) / f64::from(b)
    };
    eprintln!(
        "sload {:.2} missed {:.1} strict {:.1}  p95 {:.2} strict {:.2} ({:.0}%)  mean {:.2} {:.2}",
        outcomes.iter().map(|o| o.0.sload).sum::<f64>() / outcomes.len() as f64,
        miss(&|o| o.0.n),
        miss(&|o| o.1.n),
        j.0,
        st.0,
        100.0 * (1.0 - j.0 / st.0),
        j.1,
        st.1
    );
    let _ = Row::new;
    Vec::new()
}
