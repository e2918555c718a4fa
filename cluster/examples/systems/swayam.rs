//! Swayam (Middleware 2017): how many instances of a service its frontends keep ready, and whether
//! it answers in time.
//!
//! *Requests.* An hour of two services in Azure that answer with language models (2023): `conv`,
//! of slowly changing load, and `code`, which comes in bursts (minutes without any request, then
//! hundreds in one). Swayam's own 15 services are not public. A request takes 95 ms for 1,500
//! tokens of the question and 31 ms for each of the answer (Llama-2-70B on 8 H100, after Splitwise,
//! from memory), and an instance answers one at a time.
//!
//! *Agreement.* 99 % within five times the mean time of service, as in the paper (from memory), but
//! at least twice the 99th percentile of the service itself: of `code`, where few requests take
//! many times the mean, no number of instances would answer 99 % within five times the mean.
//!
//! *Times.* 140 GB of parameters on 8 GPUs return in 0.7 s at 25 GB/s each; a cold start loads them
//! in 84 s (ServerlessLLM, OSDI 2024, from memory). All other numbers are defaults of `sublet
//! simulate serve`, none chosen by the figures; the rows with another history, burst or number of
//! frontends show what each does.
//!
//! *Against* the least fixed number that keeps every window that can be kept, and one who knows
//! all requests. Some windows of `code` have few requests and one among them that takes longer by
//! itself than is agreed.

use std::path::Path;

use cluster::serving::{Scaling, Served, Setup, clairvoyant, least_fixed, serve};
use cluster::trace::{Request, TokenCost, read_requests};
use policy::standbys::Sla;

use super::Limit::{AtLeast, Reported};
use super::{System, mean, row};

const MET: &str = "over 96 % of the time, of 3 h, 15 services";
const SAVED: &str = "up to 27 % below a clairvoyant that always keeps the agreement";
const STEADY: &str =
    "the load hardly changes, and four frontends see a request a second each: they keep spare ones";
const BURSTS: &str =
    "bursts begin within a second, and a request takes as long as many instances return";

pub const SYSTEM: System = System {
    name: "swayam",
    rows: &[
        row("swayam_conv_windows_met_pct", "%", AtLeast(96.0), MET),
        row("swayam_conv_in_time_pct", "%", Reported, "-"),
        row(
            "swayam_conv_below_clairvoyant_pct",
            "%",
            AtLeast(27.0),
            SAVED,
        )
        .missed(-38.6, -39.5, STEADY),
        row("swayam_conv_below_fixed_pct", "%", AtLeast(20.0), "-").missed(-15.5, -16.0, STEADY),
        row(
            "swayam_conv_clairvoyant_below_fixed_pct",
            "%",
            Reported,
            "-",
        ),
        row("swayam_conv_cold_windows_met_pct", "%", Reported, "-"),
        row("swayam_conv_cold_over_standby", "ratio", Reported, "-"),
        row("swayam_conv_burst_1_5_windows_met_pct", "%", Reported, MET),
        row("swayam_conv_burst_1_5_below_fixed_pct", "%", Reported, "-"),
        row("swayam_conv_history_30_windows_met_pct", "%", Reported, MET),
        row(
            "swayam_conv_history_120_windows_met_pct",
            "%",
            Reported,
            MET,
        ),
        row(
            "swayam_conv_history_120_below_fixed_pct",
            "%",
            Reported,
            "-",
        ),
        row(
            "swayam_conv_one_frontend_windows_met_pct",
            "%",
            Reported,
            MET,
        ),
        row(
            "swayam_conv_one_frontend_below_fixed_pct",
            "%",
            Reported,
            "-",
        ),
        row("swayam_code_windows_met_pct", "%", AtLeast(96.0), MET).missed(60.9, 60.0, BURSTS),
        row(
            "swayam_code_windows_less_bursts_met_pct",
            "%",
            Reported,
            MET,
        ),
        row("swayam_code_windows_possible_pct", "%", Reported, "-"),
        row("swayam_code_in_time_pct", "%", Reported, "-"),
        row(
            "swayam_code_below_clairvoyant_pct",
            "%",
            AtLeast(27.0),
            SAVED,
        )
        .missed(-282.3, -284.0, BURSTS),
        row("swayam_code_below_fixed_pct", "%", AtLeast(20.0), "-").missed(-23.1, -24.0, BURSTS),
        row(
            "swayam_code_clairvoyant_below_fixed_pct",
            "%",
            Reported,
            "-",
        ),
        row("swayam_code_cold_windows_met_pct", "%", Reported, "-"),
        row("swayam_code_cold_over_standby", "ratio", Reported, "-"),
        row("swayam_code_burst_1_5_windows_met_pct", "%", Reported, MET),
        row("swayam_code_burst_1_5_below_fixed_pct", "%", Reported, "-"),
        row("swayam_code_history_30_windows_met_pct", "%", Reported, MET),
        row(
            "swayam_code_history_120_windows_met_pct",
            "%",
            Reported,
            MET,
        ),
        row(
            "swayam_code_history_120_below_fixed_pct",
            "%",
            Reported,
            "-",
        ),
        row(
            "swayam_code_one_frontend_windows_met_pct",
            "%",
            Reported,
            MET,
        ),
        row(
            "swayam_code_one_frontend_below_fixed_pct",
            "%",
            Reported,
            "-",
        ),
    ],
    quick: false,
    run: figures,
};

const COST: TokenCost = TokenCost {
    context_s: 0.095 / 1500.0,
    generated_s: 0.031,
};

fn setup(requests: &[Request]) -> Setup {
    let mut services_s: Vec<f64> = requests.iter().map(|one| one.service_s).collect();
    services_s.sort_by(f64::total_cmp);
    let p99_s = services_s[services_s.len() * 99 / 100];
    Setup {
        instances: 200,
        frontends: 4,
        sla: Sla {
            within_s: f64::max(5.0 * mean(services_s), 2.0 * p99_s),
            level: 0.99,
            burst: 1.0,
        },
        return_s: 0.7,
        start_s: 84.0,
        keep_s: 10.0,
        standby_s: f64::INFINITY,
        warm: 200,
        history_s: 60,
        decide_s: 1.0,
        retry_s: 0.01,
        prune: false,
        seed: 1,
    }
}

fn service(data: &Path, name: &str) -> Vec<f64> {
    let file = data.join(format!("azure-llm/{name}.csv"));
    let requests = read_requests(&file, COST).expect("requests of the repository");
    let base = setup(&requests);
    let of = |setup: &Setup, scaling: &Scaling| {
        serve(&requests, setup, scaling).expect("a setup in range")
    };
    let predicted = |setup: &Setup| of(setup, &Scaling::Predicted);
    let possible_pct = of(&base, &Scaling::Fixed(base.instances)).met_pct();
    let fixed = least_fixed(&requests, &base, possible_pct).expect("a setup in range");
    let fixed = of(&base, &Scaling::Fixed(fixed.expect("enough instances")));
    let (_, known) = clairvoyant(&requests, &base).expect("a setup in range");
    let below = |one: &Served, other: &Served| 100.0 * (1.0 - one.resident_s / other.resident_s);

    let standby = predicted(&base);
    let cold = predicted(&Setup {
        warm: 0,
        standby_s: 0.0,
        ..base.clone()
    });
    let burst = predicted(&Setup {
        sla: Sla {
            burst: 1.5,
            ..base.sla
        },
        ..base.clone()
    });
    let history = |history_s| {
        predicted(&Setup {
            history_s,
            ..base.clone()
        })
    };
    let one = predicted(&Setup {
        frontends: 1,
        ..base.clone()
    });
    let (short, long) = (history(30), history(120));
    let mut rows = vec![standby.met_pct()];
    if name == "code" {
        rows.extend([standby.met_without_bursts_pct(), possible_pct]);
    }
    rows.extend([
        standby.in_time_pct(),
        below(&standby, &known),
        below(&standby, &fixed),
        below(&known, &fixed),
        cold.met_pct(),
        cold.resident_s / standby.resident_s,
        burst.met_pct(),
        below(&burst, &fixed),
        short.met_pct(),
        long.met_pct(),
        below(&long, &fixed),
        one.met_pct(),
        below(&one, &fixed),
    ]);
    rows
}

fn figures(data: &Path) -> Vec<f64> {
    [service(data, "conv"), service(data, "code")].concat()
}
