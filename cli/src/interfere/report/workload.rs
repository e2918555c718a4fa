//! A trace for the simulator (`sublet simulate`), with what was measured: speeds alone and of
//! pairs, how busy each job keeps the device and its memory, and how much memory it takes.
//!
//! When jobs come and how long they are no experiment knows: that part is an example, drawn by the
//! experiment's seed, to be replaced by the reader's own.

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use policy::cluster::Random;

use super::{Experiment, line, number, replace};
use crate::interfere::plan::Mode;

/// Jobs of each kind in the example.
const EACH: usize = 8;
/// How long each takes by itself, in seconds.
const ALONE_S: f64 = 3600.0;
/// The example keeps so many GPUs just busy.
const GPUS: f64 = 4.0;

/// The type of a GPU as the simulator writes it: letters, digits and dashes.
pub fn gpu_type(name: &str) -> String {
    let name = name.to_lowercase();
    let words = name.split(|c: char| !c.is_ascii_alphanumeric());
    let words: Vec<&str> = words
        .filter(|word| !word.is_empty() && *word != "nvidia")
        .collect();
    match words.is_empty() {
        true => "gpu".to_owned(),
        false => words.join("-"),
    }
}

/// Writes the trace of one mode, where there is a solo run of it.
///
/// # Errors
/// A file that cannot be written.
pub fn write(experiment: &Experiment<'_>, dir: &Path, mode: Mode) -> anyhow::Result<()> {
    let gpu = gpu_type(experiment.about["gpu"].as_str().unwrap_or_default());
    let solos: Vec<(&str, f64)> = (experiment.matrix.solos.iter())
        .filter(|solo| solo.mode == mode)
        .filter_map(|solo| Some((solo.job.as_str(), solo.speed.filter(|speed| *speed > 0.0)?)))
        .collect();
    if solos.is_empty() {
        return Ok(());
    }
    let dir = dir.join(format!("trace-{mode}"));
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    replace(
        &dir,
        "isolated_throughput.csv",
        speeds(experiment, mode, &gpu),
    )?;
    replace(&dir, "pair_throughput.csv", pairs(experiment, mode, &gpu))?;
    replace(&dir, "jobs.csv", jobs(experiment, &solos))
}

fn speeds(experiment: &Experiment<'_>, mode: Mode, gpu: &str) -> String {
    let mut text = line(&[
        "gpu",
        "job_type",
        "num_gpus",
        "steps_per_s",
        "busy",
        "mem_busy",
        "mem_bytes",
    ]);
    let solos = experiment.matrix.solos.iter();
    for solo in solos.filter(|solo| solo.mode == mode) {
        let mem = solo.mem_peak_bytes.map(|bytes| bytes.to_string());
        text += &line(&[
            gpu,
            &solo.job,
            "1",
            &number(solo.speed),
            &number(solo.busy),
            &number(solo.memory_busy),
            &mem.unwrap_or_default(),
        ]);
    }
    text
}

fn pairs(experiment: &Experiment<'_>, mode: Mode, gpu: &str) -> String {
    let mut text = line(&["gpu", "job_a", "job_b", "num_gpus", "norm_a", "norm_b"]);
    for ([a, b], slowdowns) in experiment.matrix.pairs(experiment.plan, mode) {
        let [of_a, of_b] = slowdowns.map(|slowdown| number(Some(1.0 / slowdown)));
        text += &line(&[gpu, &a.name, &b.name, "1", &of_a, &of_b]);
    }
    text
}

fn jobs(experiment: &Experiment<'_>, solos: &[(&str, f64)]) -> String {
    let mut text = line(&["job_type", "total_steps", "arrival_s", "num_gpus"]);
    let mut random = Random::new(experiment.plan.seed);
    let mut order: Vec<usize> = (0..solos.len() * EACH).map(|at| at % solos.len()).collect();
    for last in (1..order.len()).rev() {
        order.swap(last, random.below(last + 1));
    }
    let mut arrival_s = 0.0;
    for solo in order {
        let (job, speed) = solos[solo];
        let steps = format!("{:.0}", (speed * ALONE_S).max(1.0));
        text += &line(&[job, &steps, &format!("{arrival_s:.0}"), "1"]);
        // Time between two arrivals of a Poisson process.
        arrival_s += random.exponential(ALONE_S / GPUS);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_has_a_name_that_the_simulator_takes() {
        for (name, taken) in [
            ("NVIDIA H200 (simulated)", "h200-simulated"),
            ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
            ("", "gpu"),
        ] {
            assert_eq!(gpu_type(name), taken);
            let spec = format!("4x{taken}")
                .parse::<cluster::spec::ClusterSpec>()
                .unwrap();
            assert_eq!((spec.gpus(), &spec.gpu_types[0][..]), (4, taken));
        }
    }

    #[test]
    fn the_simulator_takes_it_with_busy_memory_and_pairs() {
        use cluster::trace::{Options, read};
        use serde_json::json;

        use crate::interfere::matrix::Matrix;
        use crate::interfere::plan;
        use crate::interfere::store::tests::record;

        let text = "[experiment]\nrepeat = 1\n[[job]]\nname = \"a\"\ncommand = [\"x\"]\n\
            [[job]]\nname = \"b\"\ncommand = [\"x\"]\n";
        let plan = plan::parse(text, "p", Path::new("/"), &|_| Err(String::new())).unwrap();
        let mut records = [
            record("exclusive a #1", &[("a", 100.0)]),
            record("exclusive b #1", &[("b", 40.0)]),
            record("exclusive a+b #1", &[("a", 50.0), ("b", 40.0)]),
        ];
        records[0].memory_busy = Some(0.25);
        records[1].figures[0].mem_peak_bytes = Some(3 << 30);
        let experiment = Experiment {
            plan: &plan,
            about: &json!({ "gpu": "NVIDIA H200 (simulated)" }),
            text,
            records: &records,
            raw: String::new(),
            matrix: &Matrix::of(&plan, &records),
        };
        let dir = tempfile::tempdir().unwrap();
        write(&experiment, dir.path(), Mode::Exclusive).unwrap();
        let options = Options {
            gpu_types: vec!["h200-simulated".into()],
            ..Options::default()
        };
        let trace = read(&dir.path().join("trace-exclusive/jobs.csv"), None, &options).unwrap();
        assert_eq!((trace.jobs.len(), trace.skipped), (2 * EACH, 0));
        let of = |name: &str| {
            let kind = trace.kinds.get(name).unwrap();
            trace
                .jobs
                .iter()
                .find(|job| job.profile.kind.0 == kind)
                .unwrap()
        };
        let (a, b) = (of("a"), of("b"));
        assert!((a.duration_s() - ALONE_S).abs() < 1.0, "{a:?}");
        assert_eq!((a.profile.busy, a.profile.mem_busy), (0.5, 0.25));
        assert_eq!(b.profile.persistent_bytes, 3 << 30);
        let pairs = trace.pairs.as_ref().unwrap();
        let pair = pairs
            .iter()
            .find(|pair| (pair.2, pair.3) == (a.profile.kind, b.profile.kind))
            .unwrap();
        assert!(
            (pair.4[0] - 0.5).abs() < 1e-9 && (pair.4[1] - 1.0).abs() < 1e-9,
            "{pair:?}"
        );
        let spec = "4xh200-simulated"
            .parse::<cluster::spec::ClusterSpec>()
            .unwrap();
        let config = cluster::sim::Config::default();
        let context = cluster::sweep::context(&trace, &spec, &[], &config);
        assert!(context.pairs.is_some());
        assert_eq!(context.busy, policy::cluster::catalogue::Busy::FromArrival);
    }
}
