//! What the runs come to: how fast each job is in its solo runs, and how much slower beside others.

use serde_json::{Value, json};

use super::plan::{Combination, Job, Mode, Plan};
use super::statistics::{Estimate, Sample, mean, seed_of, slowdown};
use super::store::{Figures, Record};

/// A job's solo runs in one mode.
#[derive(Debug, Clone, PartialEq)]
pub struct Solo {
    pub mode: Mode,
    pub job: String,
    pub unit: String,
    pub samples: Vec<Sample>,
    pub speed: Option<f64>,
    /// Parts of the time in which it had the device compute, and the device's memory at work.
    pub busy: Option<f64>,
    pub memory_busy: Option<f64>,
    pub copy_bytes_per_s: Option<f64>,
    /// The most that it held in one of the runs.
    pub mem_peak_bytes: Option<u64>,
    pub reason: Option<String>,
}

/// A job beside others.
#[derive(Debug, Clone, PartialEq)]
pub struct Cell {
    pub mode: Mode,
    /// The combination, as in the plan.
    pub label: String,
    pub job: String,
    pub share: Option<f64>,
    pub beside: Vec<String>,
    pub samples: Vec<Sample>,
    pub estimate: Option<Estimate>,
    /// Sums over the jobs' solo runs: busy fractions, the memory's, bytes copied in a second.
    pub busy_sum: Option<f64>,
    pub memory_sum: Option<f64>,
    pub copy_sum: Option<f64>,
    /// Runs of the plan, and those that have figures.
    pub wanted: usize,
    pub done: usize,
    /// Why there is no estimate, or one of fewer runs than the plan has.
    pub reason: Option<String>,
}

/// All of it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Matrix {
    pub solos: Vec<Solo>,
    pub cells: Vec<Cell>,
}

impl Matrix {
    pub fn of(plan: &Plan, records: &[Record]) -> Self {
        let mut matrix = Self::default();
        for mode in &plan.modes {
            for (number, job) in plan.jobs.iter().enumerate() {
                let runs = Runs::of(plan, records, *mode, &solo(number));
                let figures = || runs.figures(&job.name, None);
                let mean_of = |of: fn(&Figures) -> Option<f64>| mean(figures().filter_map(of));
                let samples = runs.samples(&job.name, None);
                matrix.solos.push(Solo {
                    mode: *mode,
                    job: job.name.clone(),
                    unit: job.progress.unit().to_owned(),
                    speed: mean(samples.iter().map(|sample| sample.speed)),
                    busy: mean(runs.done().filter_map(|record| record.device_busy)),
                    memory_busy: mean(runs.done().filter_map(|record| record.memory_busy)),
                    copy_bytes_per_s: mean_of(|figures| figures.copy_bytes_per_s),
                    mem_peak_bytes: figures().filter_map(|one| one.mem_peak_bytes).max(),
                    reason: runs.reason(plan),
                    samples,
                });
            }
            for combination in plan.combinations.iter().filter(|one| one.jobs.len() > 1) {
                matrix.add(plan, records, *mode, combination);
            }
        }
        matrix
    }

    fn add(&mut self, plan: &Plan, records: &[Record], mode: Mode, combination: &Combination) {
        let runs = Runs::of(plan, records, mode, combination);
        let label = plan.label(combination);
        let name = |job: usize| plan.jobs[job].name.clone();
        let share = |at: usize| combination.shares.as_ref().map(|shares| shares[at]);
        let mut seen: Vec<(usize, Option<f64>)> = Vec::new();
        for (at, job) in combination.jobs.iter().enumerate() {
            // Two of the same job are alike, unless their shares differ.
            if seen.contains(&(*job, share(at))) {
                continue;
            }
            seen.push((*job, share(at)));
            let others = combination.jobs.iter().enumerate();
            let others = others.filter(|(other, _)| *other != at);
            let beside: Vec<String> = others.map(|(_, other)| name(*other)).collect();
            let solo = self.solo(mode, &name(*job)).cloned();
            let solo_samples = solo.as_ref().map_or(&[][..], |solo| &solo.samples);
            let samples = runs.samples(&name(*job), share(at));
            let seed = seed_of(plan.seed, &format!("{mode} {label} {at}"));
            let estimate = slowdown(solo_samples, &samples, seed);
            let sum = |of: fn(&Solo) -> Option<f64>| {
                let jobs = combination.jobs.iter();
                jobs.map(|job| self.solo(mode, &name(*job)).and_then(of))
                    .sum::<Option<f64>>()
            };
            let of_solo = solo.and_then(|solo| solo.reason);
            let of_solo = of_solo.map(|reason| format!("solo: {reason}"));
            let cell = Cell {
                mode,
                label: label.clone(),
                job: name(*job),
                share: share(at),
                beside,
                estimate,
                busy_sum: sum(|solo| solo.busy),
                memory_sum: sum(|solo| solo.memory_busy),
                copy_sum: sum(|solo| solo.copy_bytes_per_s),
                wanted: plan.repeat as usize,
                done: samples.len(),
                reason: runs.reason(plan).or(of_solo),
                samples,
            };
            self.cells.push(cell);
        }
    }

    pub fn solo(&self, mode: Mode, job: &str) -> Option<&Solo> {
        let mut solos = self.solos.iter();
        solos.find(|solo| solo.mode == mode && solo.job == job)
    }

    /// The cell of a pair with the jobs' own shares.
    pub fn pair(&self, mode: Mode, job: &str, beside: &str) -> Option<&Cell> {
        let of = |cell: &&Cell| {
            cell.mode == mode && cell.job == job && cell.beside == [beside] && cell.share.is_none()
        };
        self.cells.iter().find(of)
    }

    /// Every pair of the plan's jobs, each with itself included, of which both slowdowns were
    /// measured with the jobs' own shares: that of the first beside the second, and the other one.
    pub fn pairs<'a>(
        &'a self,
        plan: &'a Plan,
        mode: Mode,
    ) -> impl Iterator<Item = ([&'a Job; 2], [f64; 2])> {
        let jobs = plan.jobs.iter().enumerate();
        let both = jobs.flat_map(|(at, a)| plan.jobs[at..].iter().map(move |b| [a, b]));
        both.filter_map(move |[a, b]| {
            let slowdown = |job: &str, beside: &str| {
                let cell = self.pair(mode, job, beside)?;
                cell.estimate.map(|one| one.value)
            };
            let slowdowns = [slowdown(&a.name, &b.name)?, slowdown(&b.name, &a.name)?];
            Some(([a, b], slowdowns))
        })
    }

    /// Those that are no pair with the jobs' own shares.
    pub fn others(&self, mode: Mode) -> impl Iterator<Item = &Cell> {
        let of = move |cell: &&Cell| {
            cell.mode == mode && (cell.beside.len() != 1 || cell.share.is_some())
        };
        self.cells.iter().filter(of)
    }

    pub fn json(&self) -> Value {
        let solos = self.solos.iter().map(|solo| {
            json!({
                "mode": solo.mode, "job": solo.job, "unit": solo.unit, "speed": solo.speed,
                "runs": solo.samples.len(), "busy": solo.busy,
                "memory_busy": solo.memory_busy,
                "copy_bytes_per_s": solo.copy_bytes_per_s, "mem_peak_bytes": solo.mem_peak_bytes,
                "reason": solo.reason,
            })
        });
        let cells = self.cells.iter().map(|cell| {
            let estimate = cell.estimate.as_ref();
            json!({
                "mode": cell.mode, "combination": cell.label, "job": cell.job,
                "beside": cell.beside, "share": cell.share,
                "slowdown": estimate.map(|one| one.value),
                "low": estimate.map(|one| one.low), "high": estimate.map(|one| one.high),
                "runs": cell.done, "runs_wanted": cell.wanted, "reason": cell.reason,
                "busy_sum": cell.busy_sum,
                "memory_busy_sum": cell.memory_sum, "copy_bytes_per_s_sum": cell.copy_sum,
            })
        });
        json!({ "solo": solos.collect::<Vec<_>>(), "slowdowns": cells.collect::<Vec<_>>() })
    }
}

fn solo(job: usize) -> Combination {
    Combination {
        jobs: vec![job],
        shares: None,
    }
}

/// The runs of one combination in one mode.
struct Runs<'a> {
    records: Vec<&'a Record>,
}

impl<'a> Runs<'a> {
    fn of(plan: &Plan, records: &'a [Record], mode: Mode, combination: &Combination) -> Self {
        let begin = format!("{mode} {} #", plan.label(combination));
        let of = |record: &&Record| {
            record.key.starts_with(&begin) && (1..=plan.repeat).contains(&record.repetition)
        };
        Self {
            records: records.iter().filter(of).collect(),
        }
    }

    fn done(&self) -> impl Iterator<Item = &'a Record> {
        let records = self.records.iter().copied();
        records.filter(|record| record.failed.is_none())
    }

    fn figures(&self, job: &str, share: Option<f64>) -> impl Iterator<Item = &'a Figures> {
        self.done()
            .flat_map(move |record| of_job(record, job, share))
    }

    /// One for each run: of two of the same job their mean.
    fn samples(&self, job: &str, share: Option<f64>) -> Vec<Sample> {
        let sample = |record: &Record| {
            let figures: Vec<&Figures> = of_job(record, job, share);
            let parts = figures.iter().flat_map(|one| one.part_speeds.clone());
            Some(Sample {
                speed: mean(figures.iter().map(|one| one.speed))?,
                parts: parts.collect(),
            })
        };
        self.done().filter_map(sample).collect()
    }

    /// Why there are fewer than the plan has.
    fn reason(&self, plan: &Plan) -> Option<String> {
        let failed = self.records.iter().rev();
        let failed: Vec<&str> = failed
            .filter_map(|record| record.failed.as_deref())
            .collect();
        let missing = (plan.repeat as usize).saturating_sub(self.records.len());
        match (failed.first(), missing) {
            (Some(why), _) => Some(format!("{} of {} failed: {why}", failed.len(), plan.repeat)),
            (None, 0) => None,
            (None, missing) => Some(format!("{missing} of {} not measured yet", plan.repeat)),
        }
    }
}

fn of_job<'a>(record: &'a Record, job: &str, share: Option<f64>) -> Vec<&'a Figures> {
    let shares = record.shares.as_ref();
    let figures = record.figures.iter().enumerate();
    figures
        .filter(|(at, one)| one.job == job && shares.map(|shares| shares[*at]) == share)
        .map(|(_, one)| one)
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::plan;
    use super::super::store::tests::record;
    use super::*;

    const PLAN: &str = "[experiment]\nrepeat = 2\n[[job]]\nname = \"a\"\ncommand = [\"x\"]\n\
        [[job]]\nname = \"b\"\ncommand = [\"x\"]\n\
        [[combination]]\njobs = [\"a\", \"a\"]\nshares = [0.75, 0.25]\n";

    fn repetition(key: &str, number: u32, speeds: &[(&str, f64)]) -> Record {
        Record {
            repetition: number,
            ..record(&format!("exclusive {key} #{number}"), speeds)
        }
    }

    #[test]
    fn each_job_has_its_slowdown_beside_each_other() {
        let plan = plan::parse(PLAN, "p", Path::new("/"), &|_| Err(String::new())).unwrap();
        let mut records = Vec::new();
        for number in [1, 2] {
            records.push(repetition("a", number, &[("a", 100.0)]));
            records.push(repetition("b", number, &[("b", 30.0)]));
            records.push(repetition("a+a", number, &[("a", 40.0), ("a", 60.0)]));
            // Started the other way round the second time.
            let mut pair = [("a", 80.0), ("b", 10.0)];
            let mut shared = [("a", 75.0), ("a", 25.0)];
            let mut shares = vec![0.75, 0.25];
            if number == 2 {
                pair.reverse();
                shared.reverse();
                shares.reverse();
            }
            records.push(repetition("a+b", number, &pair));
            records.push(Record {
                shares: Some(shares),
                ..repetition("a+a@0.75,0.25", number, &shared)
            });
        }
        let matrix = Matrix::of(&plan, &records);
        let value = |cell: &Cell| cell.estimate.unwrap().value;
        let pair = |job, beside| value(matrix.pair(Mode::Exclusive, job, beside).unwrap());
        assert!((pair("a", "b") - 1.25).abs() < 1e-9);
        assert!((pair("b", "a") - 3.0).abs() < 1e-9);
        assert!((pair("a", "a") - 2.0).abs() < 1e-9);
        let others: Vec<f64> = matrix.others(Mode::Exclusive).map(value).collect();
        assert!((others[0] - 100.0 / 75.0).abs() < 1e-9 && (others[1] - 4.0).abs() < 1e-9);
        let cell = matrix.pair(Mode::Exclusive, "a", "b").unwrap();
        assert_eq!(cell.busy_sum, Some(1.0));
        assert_eq!((cell.done, cell.wanted, &cell.reason), (2, 2, &None));
        // Nothing is measured of it.
        let cell = matrix.pair(Mode::Exclusive, "b", "b").unwrap();
        assert_eq!(cell.estimate, None);
        assert_eq!(cell.reason.as_deref(), Some("2 of 2 not measured yet"));
    }

    #[test]
    fn a_run_that_failed_leaves_its_reason() {
        let plan = plan::parse(PLAN, "p", Path::new("/"), &|_| Err(String::new())).unwrap();
        let mut failed = repetition("b", 1, &[("b", 1.0)]);
        failed.failed = Some("job `b` ended with exit code 3".into());
        failed.figures.clear();
        let records = [
            repetition("a", 1, &[("a", 100.0)]),
            repetition("a", 2, &[("a", 100.0)]),
            failed,
            repetition("a+b", 1, &[("a", 50.0), ("b", 1.0)]),
            repetition("a+b", 2, &[("b", 1.0), ("a", 50.0)]),
        ];
        let matrix = Matrix::of(&plan, &records);
        let cell = matrix.pair(Mode::Exclusive, "b", "a").unwrap();
        assert_eq!(cell.estimate, None);
        let reason = cell.reason.as_deref().unwrap();
        assert_eq!(
            reason,
            "solo: 1 of 2 failed: job `b` ended with exit code 3"
        );
        let cell = matrix.pair(Mode::Exclusive, "a", "b").unwrap();
        assert!((cell.estimate.unwrap().value - 2.0).abs() < 1e-9);
        let json = matrix.json();
        assert_eq!(json["slowdowns"][1]["slowdown"], 2.0, "{json}");
    }
}
