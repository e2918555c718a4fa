//! Lucid (ASPLOS 2023): whether its sharing score tells which pairs of jobs are good, for jobs of
//! models that it has not seen.
//!
//! *Pairs.* Those that Gavel measured on one V100, P100 and K80: 26 kinds of job, of seven models.
//! Lucid's own table may not be passed on. Of a kind by itself two things are known: the time of an
//! iteration, and, for the busy fraction that the table does not have, what a job beside it loses
//! in the mean, beside every third kind (its *reference kinds*, as in `Trace::tell_pressure`).
//!
//! *Held out.* One model at a time, with all its batch sizes: the tree is grown from the pairs of
//! all other models and asked about each pair with a kind of that model. Pairs with a reference
//! kind are not asked about, because busy fractions come from them. All of it three times, beside
//! each third of the kinds; there is no chance in it. A pair is good if both jobs keep 0.85.
//!
//! *Against Lucid.* Where its score accepts a pair, by the table of 1,388 pairs on an RTX 3090, 89
//! % keep 0.9 in the mean; it accepts 74 % of all pairs, and 92 % of the good ones. Jobs there
//! leave much of the GPU free. Here one kind of 26 is not a jumbo (the pairs of the others keep
//! less than 0.85 in the mean), so nearly nothing may be paired: in doubt, don't.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use cluster::trace::{Names, Options, read_isolated, read_pairs};
use policy::cluster::packer::{ScoreTree, Sharing};
use policy::cluster::{Class, GpuType, JobType, Packer, Profile};

use super::Limit::{AtLeast, Reported};
use super::{System, row};

const KEPT: &str = "89 % of the accepted pairs keep 0.9 in the mean (RTX 3090)";
const FOUND: &str = "92 % of the pairs that keep 0.9 in the mean are accepted (RTX 3090)";
const JUMBOS: &str =
    "25 of 26 kinds of Gavel's table are jumbos by Lucid's rule, so next to no pair is accepted";

pub const SYSTEM: System = System {
    name: "lucid",
    rows: &[
        row("lucid_unseen_accepted_good_pct", "%", AtLeast(88.0), KEPT).missed(33.3, 33.0, JUMBOS),
        row("lucid_unseen_good_accepted_pct", "%", AtLeast(92.0), FOUND).missed(1.2, 1.2, JUMBOS),
        row(
            "lucid_unseen_accepted_pairs",
            "pairs",
            Reported,
            "74 % of all pairs (RTX 3090)",
        ),
        row("lucid_unseen_asked_pairs", "pairs", Reported, "-"),
        row("lucid_unseen_good_pct", "%", Reported, "-"),
        row("lucid_unseen_scores_right_pct", "%", Reported, "-"),
        row("lucid_jumbos_pct", "%", Reported, "-"),
        row("lucid_util_sum_good_pct", "%", Reported, "-"),
        row("lucid_p100_unseen_good_pct", "%", Reported, "-"),
        row("lucid_p100_unseen_accepted_pairs", "pairs", Reported, "-"),
        row("lucid_k80_unseen_good_pct", "%", Reported, "-"),
        row("lucid_k80_unseen_accepted_pairs", "pairs", Reported, "-"),
    ],
    quick: true,
    run: figures,
};

const TYPES: [&str; 3] = ["v100", "p100", "k80"];
const GPU_BYTES: u64 = 16 << 30;
/// Both jobs of a good pair keep so much.
const GOOD: f64 = 0.85;

/// Speeds of a pair, the one named first first.
type Pairs = BTreeMap<(JobType, JobType), [f64; 2]>;

#[derive(Default)]
struct Found {
    asked: usize,
    good: usize,
    accepted: usize,
    accepted_good: usize,
    /// By the sum of the busy fractions, at most one.
    util: usize,
    util_good: usize,
    scores: usize,
    scores_right: usize,
    jumbos: usize,
}

fn pct(part: usize, whole: usize) -> f64 {
    100.0 * part as f64 / whole.max(1) as f64
}

/// What is known of each kind by itself.
fn profiles(
    pairs: &Pairs,
    iterations_s: &BTreeMap<JobType, f64>,
    reference: &BTreeSet<JobType>,
) -> BTreeMap<JobType, Profile> {
    let mut lost: BTreeMap<JobType, (f64, f64)> = BTreeMap::new();
    for ((a, b), [_, speed_b]) in pairs {
        if reference.contains(b) {
            let sum = lost.entry(*a).or_default();
            *sum = (sum.0 + (1.0 - speed_b).clamp(0.0, 1.0), sum.1 + 1.0);
        }
    }
    let profile = |(kind, (sum, count)): (JobType, (f64, f64))| {
        let mut profile = Profile::unknown(kind, 1, Class::Guaranteed);
        profile.busy = sum / count;
        profile.iteration_s = *iterations_s.get(&kind)?;
        Some((kind, profile))
    };
    lost.into_iter().filter_map(profile).collect()
}

fn ask(
    pairs: &Pairs,
    profiles: &BTreeMap<JobType, Profile>,
    reference: &BTreeSet<JobType>,
    model_of: impl Fn(JobType) -> String,
    found: &mut Found,
) {
    let models: BTreeSet<String> = profiles.keys().map(|kind| model_of(*kind)).collect();
    for model in models {
        let held_out = |kind: JobType| model_of(kind) == model;
        let seen = |(a, b): &(JobType, JobType)| a <= b && !held_out(*a) && !held_out(*b);
        let mut tree = ScoreTree::new(GPU_BYTES);
        tree.train(pairs.iter().filter_map(|(kinds, speeds)| {
            let both = (profiles.get(&kinds.0)?, profiles.get(&kinds.1)?);
            seen(kinds).then_some((both.0, both.1, *speeds))
        }));
        for (kind, profile) in profiles.iter().filter(|(kind, _)| held_out(**kind)) {
            let own = pairs.iter().filter(|((a, _), _)| a == kind);
            let speeds: Vec<f64> = own.map(|(_, [a, b])| f64::midpoint(*a, *b)).collect();
            let mean = speeds.iter().sum::<f64>() / speeds.len() as f64;
            let sharing = Sharing::of_mean_speed(mean);
            found.scores += 1;
            found.scores_right += usize::from(tree.sharing(profile) == sharing);
            found.jumbos += usize::from(sharing == Sharing::Jumbo);
        }
        for ((a, b), speeds) in pairs {
            let asked = a <= b && (held_out(*a) || held_out(*b));
            if !asked || reference.contains(a) || reference.contains(b) {
                continue;
            }
            let (Some(host), Some(joiner)) = (profiles.get(a), profiles.get(b)) else {
                continue;
            };
            let good = speeds.iter().all(|speed| *speed >= GOOD);
            found.asked += 1;
            found.good += usize::from(good);
            if tree.score(host, joiner, GpuType(0)).is_some() {
                found.accepted += 1;
                found.accepted_good += usize::from(good);
            }
            if host.busy + joiner.busy <= 1.0 {
                found.util += 1;
                found.util_good += usize::from(good);
            }
        }
    }
}

fn figures(data: &Path) -> Vec<f64> {
    let options = Options {
        gpu_types: TYPES.map(str::to_owned).to_vec(),
        ..Options::default()
    };
    let mut kinds = Names::default();
    let file = data.join("gavel/pair_throughput.csv");
    let table = read_pairs(&file, &options, &mut kinds).expect("pairs of the repository");
    let file = data.join("gavel/isolated_throughput.csv");
    let by_itself = read_isolated(&file, &options).expect("speeds of the repository");
    let found = [0, 1, 2].map(|number| {
        let gpu = GpuType(number);
        // Without those that do not fit into memory together: that shows without a score.
        let pairs: Pairs = table
            .iter()
            .filter(|(kind, gpus, .., speeds)| {
                *kind == gpu && *gpus == 1 && speeds.iter().all(|speed| *speed > 0.0)
            })
            .map(|(_, _, a, b, speeds)| ((a, b), speeds))
            .collect();
        let of_gpu = by_itself
            .iter()
            .filter(|((kind, _, gpus), _)| *kind == gpu && *gpus == 1);
        let iterations_s: BTreeMap<JobType, f64> = of_gpu
            .filter_map(|((_, name, _), solo)| {
                Some((JobType(kinds.get(name)?), 1.0 / solo.steps_per_s))
            })
            .collect();
        // Kinds in the order of the table.
        let all: BTreeSet<JobType> = pairs.keys().map(|(a, _)| *a).collect();
        let mut found = Found::default();
        for third in 0..3 {
            let reference = all.iter().copied().skip(third).step_by(3).collect();
            let profiles = profiles(&pairs, &iterations_s, &reference);
            let model_of = |kind: JobType| {
                let name = kinds.name(kind.0);
                name.split(" (").next().unwrap_or(name).to_owned()
            };
            ask(&pairs, &profiles, &reference, model_of, &mut found);
        }
        found
    });
    let [v100, p100, k80] = &found;
    vec![
        pct(v100.accepted_good, v100.accepted),
        pct(v100.accepted_good, v100.good),
        v100.accepted as f64,
        v100.asked as f64,
        pct(v100.good, v100.asked),
        pct(v100.scores_right, v100.scores),
        pct(v100.jumbos, v100.scores),
        pct(v100.util_good, v100.util),
        pct(p100.good, p100.asked),
        p100.accepted as f64,
        pct(k80.good, k80.asked),
        k80.accepted as f64,
    ]
}
