//! Fairness of stride: 2 to 8 tenants, weights up to 8 : 1, kernels of 10 us to 50 ms, phases that
//! come and go.
//!
//! *Due* is the fluid ideal: at every moment the weight's part among those that want the device.
//! What can be promised against it follows from start-time fair queueing (P. Goyal, H. Vin, H.
//! Cheng, SIGCOMM 1996, theorem 1), of which stride is the case where the pass is the start tag:
//! between two tenants that want the device throughout,
//!
//! ```text
//! | W_i / w_i - W_j / w_j |  <=  l_i / w_i + l_j / w_j    W: time got, w: weight, l: longest turn
//! ```
//!
//! and so, with parts f = w / sum(w), over any span
//!
//! ```text
//! | W_i - due_i |  <=  l_i (1 - f_i) + f_i x (sum of l_j over the others)  =: bound_i
//! stall_i          <=  l_i / f_i - l_i + (sum of l_j over the others)      <=  2 turns
//! turn_i            =  max(l_i / f_i, sum of all l)
//! ```
//!
//! A turn is a slice, the kernel that runs over its end, and one that was still running when the
//! turn began (a kernel is charged as it runs, so its owner may come again before it has been
//! charged for all of it). Eight tenants with slices of 2 ms are bound to 3.5 ms, a third of a
//! point in a second. One with kernels of 50 ms is bound to tens of milliseconds: what cannot be
//! interrupted cannot be shared more finely, and no order of turns changes it. So the promise of
//! one point in windows of a second is for kernels up to 2 ms; for longer ones the row says what is
//! left over the bound, and over a longer time the error stays what it is and its part vanishes.
//! Windows in which a tenant comes back or goes are counted too; who comes back brings up to a
//! slice of credit, so there the bound has another l.

use policy::stepper::{Phase, SimTenant, Stepper};
use policy::{QuantumBounds, Stride, TenantId};

use crate::rows::draw::Draw;
use crate::rows::{Limit, Row};

const QUANTUM: QuantumBounds = QuantumBounds {
    min_us: 2000,
    max_us: 5000,
};
const WINDOW_US: u64 = 1_000_000;
/// Windows begin so often.
const STEP_US: u64 = 100_000;

pub struct Mix {
    tenants: Vec<SimTenant>,
    kernels_us: Vec<u64>,
    comes_and_goes: bool,
}

/// Tenants with kernels up to so long; every second mix has phases.
pub fn mix(seed: u64, longest_kernel_us: f64) -> Mix {
    let mut draw = Draw::new(seed);
    let comes_and_goes = seed.is_multiple_of(2);
    let count = draw.between(2, 8);
    let kernels_us: Vec<u64> = (0..count)
        .map(|_| draw.log_between(10.0, longest_kernel_us) as u64)
        .collect();
    let tenants = (kernels_us.iter().enumerate())
        .map(|(id, kernel_us)| {
            let weight = draw.between(1, 8) as u32 * 100_000;
            let device_us = if comes_and_goes {
                draw.log_between(50_000.0, 2_000_000.0) as u64
            } else {
                3_600_000_000
            };
            let mut phases = vec![Phase::Busy {
                device_us,
                kernel_us: *kernel_us,
            }];
            if comes_and_goes {
                let us = draw.log_between(20_000.0, 1_000_000.0) as u64;
                phases.push(Phase::Sleep { us });
            }
            SimTenant::new(id as u64, weight, phases)
        })
        .collect();
    Mix {
        tenants,
        kernels_us,
        comes_and_goes,
    }
}

impl Mix {
    /// The longest turn of each, in nanoseconds.
    fn turns_ns(&self) -> Vec<f64> {
        let competing = self.tenants.len().max(2) as u32;
        let slice_us = (QUANTUM.max_us / competing * 2).clamp(QUANTUM.min_us, QUANTUM.max_us);
        // With phases fewer may compete and slices be longer.
        let slice_us = if self.comes_and_goes {
            QUANTUM.max_us
        } else {
            slice_us
        };
        (self.kernels_us.iter())
            .map(|kernel_us| (f64::from(slice_us) + 2.0 * *kernel_us as f64) * 1e3)
            .collect()
    }

    fn parts(&self) -> Vec<f64> {
        let sum: f64 = (self.tenants.iter()).map(|t| f64::from(t.weight_ppm)).sum();
        (self.tenants.iter())
            .map(|tenant| f64::from(tenant.weight_ppm) / sum)
            .collect()
    }

    fn stepper(&self) -> Stepper<Stride> {
        let mut sim = Stepper::new(Stride::new(), QUANTUM);
        (self.tenants.iter()).for_each(|tenant| sim.join(tenant.clone()));
        sim
    }
}

pub struct Windows {
    /// The worst window of the worst tenant, in points.
    pub error_points: f64,
    /// The same beyond the bound; below zero: inside.
    pub over_bound_points: f64,
    /// Longest wait over the tenant's turn.
    pub stall_turns: f64,
    pub idle_part: f64,
}

pub fn windows(mix: &Mix, seconds: u64) -> Windows {
    let mut sim = mix.stepper();
    let (turns_ns, parts) = (mix.turns_ns(), mix.parts());
    let all_ns: f64 = turns_ns.iter().sum();
    let count = mix.tenants.len();
    let mut ahead_ns: Vec<Vec<f64>> = Vec::new();
    for _ in 0..=seconds * WINDOW_US / STEP_US {
        let ahead = |id: usize| {
            let got = sim.got(TenantId(id as u64));
            got.device_ns as f64 - got.due_ns
        };
        ahead_ns.push((0..count).map(ahead).collect());
        sim.run_us(STEP_US);
    }
    let window_ns = WINDOW_US as f64 * 1e3;
    let mut seen = Windows {
        error_points: 0.0,
        over_bound_points: f64::NEG_INFINITY,
        stall_turns: 0.0,
        idle_part: sim.idle_ns() as f64 / sim.now_ns() as f64,
    };
    for id in 0..count {
        let others_ns = all_ns - turns_ns[id];
        let part = parts[id];
        let credit_ns = if mix.comes_and_goes {
            turns_ns[id] + others_ns
        } else {
            0.0
        };
        let bound_ns = turns_ns[id] * (1.0 - part) + part * others_ns + credit_ns;
        let steps = (WINDOW_US / STEP_US) as usize;
        for (from, to) in ahead_ns.iter().zip(ahead_ns.iter().skip(steps)) {
            let error_ns = (to[id] - from[id]).abs();
            seen.error_points = seen.error_points.max(100.0 * error_ns / window_ns);
            let over = 100.0 * (error_ns - bound_ns) / window_ns;
            seen.over_bound_points = seen.over_bound_points.max(over);
        }
        let stall_ns = sim.got(TenantId(id as u64)).longest_wait_ns as f64;
        let turn_ns = (turns_ns[id] / part).max(all_ns);
        seen.stall_turns = seen.stall_turns.max(stall_ns / turn_ns);
    }
    seen
}

/// After 1,000 turns of each: how far the furthest is from its tickets, as a part of them. Only for
/// tenants without pauses.
pub fn ticket_error(mix: &Mix) -> f64 {
    let mut sim = mix.stepper();
    let ids = || (0..mix.tenants.len()).map(|id| TenantId(id as u64));
    while ids().any(|id| sim.got(id).slices < 1000) {
        sim.run_us(1_000_000);
    }
    ids()
        .map(|id| sim.got(id))
        .map(|got| (got.device_ns as f64 / got.due_ns - 1.0).abs())
        .fold(0.0, f64::max)
}

pub fn rows(seeds: &[u64]) -> Vec<Row> {
    let short: Vec<Windows> = (seeds.iter())
        .map(|seed| windows(&mix(*seed, 2000.0), 12))
        .collect();
    let long: Vec<Windows> = (seeds.iter())
        .map(|seed| windows(&mix(*seed, 50_000.0), 12))
        .collect();
    let tickets = (seeds.iter())
        .map(|seed| mix(*seed, 50_000.0))
        .filter(|mix| !mix.comes_and_goes)
        .map(|mix| ticket_error(&mix))
        .fold(0.0, f64::max);
    let both = || short.iter().chain(&long);
    let most = |of: fn(&Windows) -> f64, all: &mut dyn Iterator<Item = &Windows>| {
        all.map(of).fold(f64::NEG_INFINITY, f64::max)
    };
    vec![
        Row::new(
            "share_error_points",
            most(|w| w.error_points, &mut short.iter()),
            "points in the worst second, kernels of 10 us to 2 ms",
            Limit::AtMost(1.0),
        ),
        Row::new(
            "share_error_50ms_points",
            most(|w| w.error_points, &mut long.iter()),
            "points in the worst second, kernels of 10 us to 50 ms",
            Limit::Reported,
        ),
        Row::new(
            "share_error_over_bound_points",
            most(|w| w.over_bound_points, &mut both()),
            "points beyond what turns of that length allow, all kernels",
            Limit::AtMost(0.0),
        ),
        Row::new(
            "ticket_error_pct",
            100.0 * tickets,
            "% of the tickets after 1,000 turns of each, kernels of 10 us to 50 ms",
            Limit::AtMost(2.0),
        ),
        Row::new(
            "stall_turns",
            most(|w| w.stall_turns, &mut both()),
            "turns, all kernels",
            Limit::AtMost(2.0),
        ),
        Row::new(
            "idle_while_wanted_pct",
            100.0 * most(|w| w.idle_part, &mut both()),
            "% of the time",
            Limit::AtMost(2.0),
        ),
    ]
}
