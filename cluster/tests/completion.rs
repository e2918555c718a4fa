//! What was not measured, inferred from what was: pairs and types of GPU on Gavel's measurements,
//! numbers of GPUs on ElasticFlow's, and batches on Pollux'.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use cluster::trace::{Names, Options, read_isolated, read_pairs};
use policy::cluster::completion::{Completion, Entry, Settings};
use policy::cluster::scaling::{self, Scaling, Step};
use policy::cluster::{GpuType, JobType, PairTable, Random};

const TYPES: [&str; 3] = ["v100", "p100", "k80"];

fn options() -> Options {
    Options {
        gpu_types: TYPES.map(str::to_owned).to_vec(),
        ..Options::default()
    }
}

fn data(file: &str) -> std::path::PathBuf {
    let gavel = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/gavel");
    gavel.join(file)
}

/// Root mean square.
fn rms(errors: &[f64]) -> f64 {
    let squares: f64 = errors.iter().map(|error| error * error).sum();
    (squares / errors.len() as f64).sqrt()
}

/// The error of each hidden pair by completion, by the mean of what is known, and by the mean of
/// its row.
fn hidden_pairs(pairs: &PairTable, known: f64, types: &[u16]) -> [f64; 3] {
    let mut errors: [Vec<f64>; 3] = Default::default();
    for seed in 0..5 {
        let mut all: Vec<_> = pairs
            .iter()
            .filter(|(kind, gpus, a, b, _)| *gpus == 1 && a <= b && types.contains(&kind.0))
            .collect();
        all.sort_by_key(|(kind, _, a, b, _)| (*kind, *a, *b));
        let mut random = Random::new(seed);
        let mut columns: BTreeMap<(GpuType, JobType), usize> = BTreeMap::new();
        let (mut shown, mut hidden) = (Vec::new(), Vec::new());
        for (kind, _, a, b, [first, second]) in all {
            let mut entry = |row: JobType, beside: JobType, value| {
                let next = columns.len();
                let column = *columns.entry((kind, beside)).or_insert(next);
                let row = row.0 as usize;
                Entry { row, column, value }
            };
            let mut both = vec![entry(a, b, first)];
            if a != b {
                both.push(entry(b, a, second));
            }
            if random.unit() < known {
                shown.extend(both);
            } else {
                hidden.extend(both);
            }
        }
        let completion = Completion::of(&shown, &Settings::PAIRS);
        let mean = |of: &[&Entry]| of.iter().map(|e| e.value).sum::<f64>() / of.len() as f64;
        let overall = mean(&shown.iter().collect::<Vec<_>>());
        for entry in hidden {
            let row: Vec<&Entry> = shown.iter().filter(|e| e.row == entry.row).collect();
            let inferred = completion.at(entry.row, entry.column);
            errors[0].push(inferred.map_or(overall, |inferred| inferred.value) - entry.value);
            errors[1].push(overall - entry.value);
            errors[2].push(if row.is_empty() { overall } else { mean(&row) } - entry.value);
        }
    }
    errors.map(|errors| rms(&errors))
}

#[test]
fn hidden_pairs_are_inferred_better_than_by_their_mean() {
    let mut kinds = Names::default();
    let pairs = read_pairs(&data("pair_throughput.csv"), &options(), &mut kinds).unwrap();
    println!("now: rms error of hidden pairs: completed, mean, mean of the row");
    for (name, types) in [
        ("V100", &[0][..]),
        ("P100 (chose the settings)", &[1]),
        ("K80", &[2]),
        ("all three", &[0, 1, 2]),
    ] {
        for known in [0.1, 0.2, 0.4] {
            let [ours, mean, row] = hidden_pairs(&pairs, known, types);
            println!("now: {name}, {known} known: {ours:.3} {mean:.3} {row:.3}");
            let most = if known < 0.2 { 0.9 } else { 0.8 };
            assert!(
                ours < most * mean && ours < row,
                "{name}, {known}: {ours} {mean} {row}"
            );
        }
    }
}

#[test]
fn hidden_speeds_on_a_type_are_inferred_better_than_as_fast_as_on_the_others() {
    let isolated = read_isolated(&data("isolated_throughput.csv"), &options()).unwrap();
    let names: BTreeSet<&String> = isolated.keys().map(|(_, name, _)| name).collect();
    let rows: Vec<&String> = names.into_iter().collect();
    let speed = |row: usize, kind: u16| {
        let found = isolated.get(&(GpuType(kind), rows[row].clone(), 1))?;
        Some(found.steps_per_s.ln())
    };
    let mut errors: [Vec<f64>; 2] = Default::default();
    for seed in 0..10 {
        // Of a third of the kinds one type was never tried.
        let mut random = Random::new(seed);
        let (mut shown, mut hidden) = (Vec::new(), Vec::new());
        for row in 0..rows.len() {
            let left_out = (random.unit() < 1.0 / 3.0).then(|| random.below(3) as u16);
            for kind in 0..3u16 {
                let Some(value) = speed(row, kind) else {
                    continue;
                };
                let column = usize::from(kind);
                let entry = Entry { row, column, value };
                if left_out == Some(kind) {
                    hidden.push(entry);
                } else {
                    shown.push(entry);
                }
            }
        }
        let completion = Completion::of(&shown, &Settings::SPEEDS);
        assert!(completion.explained() > 0.5, "{}", completion.explained());
        for entry in hidden {
            let own: Vec<f64> = shown
                .iter()
                .filter(|other| other.row == entry.row)
                .map(|other| other.value)
                .collect();
            if own.is_empty() {
                continue;
            }
            let inferred = completion.at(entry.row, entry.column).unwrap();
            assert!(
                !inferred.measured && inferred.confidence > 0.3,
                "{inferred:?}"
            );
            errors[0].push(inferred.value - entry.value);
            errors[1].push(own.iter().sum::<f64>() / own.len() as f64 - entry.value);
        }
    }
    let [ours, mean] = errors.map(|errors| rms(&errors));
    println!("now: rms error of the logarithm of hidden speeds: {ours:.3} for {mean:.3}");
    assert!(ours < 0.5 * mean, "{ours} for {mean}");
}

/// Rows of a file without quotes, by the names of some columns.
fn rows<const N: usize>(file: &str, columns: [&str; N]) -> Vec<[String; N]> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("data")
        .join(file);
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = text.lines();
    let head: Vec<&str> = lines.next().unwrap().split(',').collect();
    let at = columns.map(|name| head.iter().position(|column| *column == name).unwrap());
    let cells = lines.map(|line| line.split(',').collect::<Vec<_>>());
    cells
        .map(|cells| at.map(|at| cells[at].to_owned()))
        .collect()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[test]
fn speeds_on_other_numbers_of_gpus_are_inferred_from_those_that_were_measured() {
    // ElasticFlow's: iterations per second on 1 to 64 A100; each number left out in turn.
    let columns = ["model", "global_batch", "num_gpus", "iters_per_s"];
    let mut curves: BTreeMap<(String, String), Vec<(u32, f64)>> = BTreeMap::new();
    for [model, batch, gpus, per_s] in rows("elasticflow-itp/throughput_by_gpus.csv", columns) {
        let (gpus, per_s) = (gpus.parse().unwrap(), per_s.parse::<f64>().unwrap());
        if per_s > 0.0 {
            curves
                .entry((model, batch))
                .or_default()
                .push((gpus, per_s));
        }
    }
    let (mut ours, mut in_proportion) = (Vec::new(), Vec::new());
    for points in curves.values().filter(|points| points.len() >= 5) {
        for (at, (gpus, per_s)) in points.iter().enumerate().skip(1) {
            let mut known = points.clone();
            known.remove(at);
            let curve = scaling::curve(&known, known[0].0, 64).unwrap();
            let inferred = curve[*gpus as usize - 1] * known[0].1;
            ours.push((inferred / per_s - 1.0).abs());
            let linear = known[0].1 * f64::from(*gpus) / f64::from(known[0].0);
            in_proportion.push((linear / per_s - 1.0).abs());
        }
    }
    let (ours, in_proportion) = (mean(&ours), mean(&in_proportion));
    println!(
        "now: speeds on a number left out, mean error {ours:.3}, in proportion {in_proportion:.3}"
    );
    assert!(
        ours < 0.12 && ours < 0.2 * in_proportion,
        "{ours} {in_proportion}"
    );
}

#[test]
fn ten_points_of_a_job_on_one_server_tell_the_rest() {
    // Pollux': seconds of a step by GPUs of a server and samples on each.
    let columns = ["application", "placement", "local_bsz", "step_time"];
    let mut all: BTreeMap<String, Vec<Step>> = BTreeMap::new();
    for [application, placement, local, step_s] in rows("pollux-adaptdl/placements.csv", columns) {
        if let [gpus] = placement.as_bytes() {
            all.entry(application).or_default().push(Step {
                gpus: u32::from(gpus - b'0'),
                local: local.parse().unwrap(),
                step_s: step_s.parse().unwrap(),
            });
        }
    }
    let mut errors = Vec::new();
    for (application, steps) in &all {
        let mut own = Vec::new();
        for seed in 0..5 {
            let mut order: Vec<usize> = (0..steps.len()).collect();
            Random::new(seed).shuffle(&mut order);
            let (known, hidden) = order.split_at(10.min(steps.len() / 2));
            let known: Vec<Step> = known.iter().map(|at| steps[*at]).collect();
            let scaling = Scaling::fit(&known).unwrap();
            own.extend(hidden.iter().map(|at| {
                let step = steps[*at];
                (scaling.step_s(step.gpus, step.local) / step.step_s - 1.0).abs()
            }));
        }
        println!(
            "now: {application}: mean error {:.3} over {}",
            mean(&own),
            own.len()
        );
        errors.push(mean(&own));
    }
    assert_eq!(errors.len(), 6);
    assert!(mean(&errors) < 0.1, "{errors:?}");
}

testbed::starts_clean!();
