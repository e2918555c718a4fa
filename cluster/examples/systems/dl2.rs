//! DL2 (TPDS 2021): a network that imitates dominant resource fairness, then learns from what its
//! own decisions yield, against its teacher.
//!
//! *Traces.* Ten, each of 100 consecutive jobs of ElasticFlow's cluster03 with the gaps between
//! them, stretched to a load of 1 to 2; speeds are those measured on A100. The network was trained
//! on the first 900 jobs of that cluster and has never seen the last 600, of which these traces
//! are. 4 servers of 8 GPUs, DL2's slots of 1,200 s, 10 s lost when a job's GPUs change. Load and
//! number of jobs were chosen so that the teacher has about 20 to 40 jobs at its peak, as many as
//! DL2's networks see.
//!
//! *Against the paper.* Its jobs have workers and parameter servers, and most of what a fair
//! division loses there is in the ratio of the two. Here there are only GPUs, and a fair division
//! of them is harder to beat: `afs`, which knows all speeds and lengths, is reported beside it.

use std::path::Path;
use std::sync::Arc;

use cluster::dl2::{World, agreement};
use cluster::trace::Trace;
use policy::cluster::sizer::dl2::weights::Weights;
use policy::cluster::sizer::{Afs, Dl2, Marginal, MaxMin};
use policy::cluster::{Random, Sizer};

use super::Limit::{AtLeast, AtMost, Reported};
use super::{System, mean, row};

/// Traces.
const TRACES: usize = 10;
/// Which jobs and which load: the first seed that there is.
const SEED: u64 = 1;

pub const SYSTEM: System = System {
    name: "dl2",
    rows: &[
        row(
            "dl2_teacher_agreement_pct",
            "%",
            AtLeast(95.0),
            "as good as its teacher after supervised learning",
        ),
        row(
            "dl2_jct_over_drf",
            "ratio",
            AtMost(0.9),
            "mean completion 44.1 % lower than DRF",
        )
        .missed(
            0.909,
            0.912,
            "without parameter servers a fair division is harder to beat",
        ),
        row(
            "dl2_warm_jct_over_drf",
            "ratio",
            Reported,
            "as good as its teacher after supervised learning",
        ),
        row("dl2_traces_better_than_drf", "of 10", Reported, "-"),
        row("dl2_drf_jct_mean_s", "s", Reported, "-"),
        row("dl2_warm_jct_mean_s", "s", Reported, "-"),
        row("dl2_jct_mean_s", "s", Reported, "-"),
        row(
            "dl2_jct_over_optimus",
            "ratio",
            Reported,
            "mean completion 17.5 % lower than Optimus",
        ),
        row("dl2_jct_over_afs", "ratio", Reported, "-"),
        row("dl2_refining_jct_over_drf", "ratio", Reported, "-"),
    ],
    quick: false,
    run: figures,
};

fn figures(data: &Path) -> Vec<f64> {
    let world = World::itp(data).expect("a trace of the repository");
    let mut random = Random::new(SEED);
    let traces: Vec<Trace> = (0..TRACES)
        .map(|_| world.draw(&world.held_out(), &mut random))
        .collect();
    let text = std::fs::read_to_string(data.join("dl2/warm.txt")).expect("weights");
    let warm = Arc::new(Weights::read(&text).expect("weights"));
    let each = |sizer: &dyn Fn() -> Box<dyn Sizer>| -> Vec<f64> {
        let jct_s = |trace| world.jct_s(trace, sizer()).expect("the run");
        traces.iter().map(jct_s).collect()
    };
    let drf = each(&|| Box::new(MaxMin));
    let warm_s = each(&|| Box::new(Dl2::new(Arc::clone(&warm))));
    let dl2 = each(&|| Box::new(Dl2::new(Dl2::trained())));
    let refining = each(&|| Box::new(Dl2::new(Dl2::trained()).refining(32)));
    let optimus = each(&|| Box::new(Marginal::default()));
    let afs = each(&|| Box::new(Afs));
    let agree = traces
        .iter()
        .map(|trace| agreement(&world, trace, &warm).expect("the run"));
    let (same, all) = agree.fold((0, 0), |sum, [same, all]| (sum.0 + same, sum.1 + all));
    // A ratio for each trace, and their mean.
    let over = |a: &[f64], b: &[f64]| mean(a.iter().zip(b).map(|(a, b)| a / b));
    let better = dl2.iter().zip(&drf).filter(|(dl2, drf)| dl2 < drf).count();
    vec![
        100.0 * same as f64 / all.max(1) as f64,
        over(&dl2, &drf),
        over(&warm_s, &drf),
        better as f64,
        mean(drf.iter().copied()),
        mean(warm_s),
        mean(dl2.iter().copied()),
        over(&dl2, &optimus),
        over(&dl2, &afs),
        over(&refining, &drf),
    ]
}
