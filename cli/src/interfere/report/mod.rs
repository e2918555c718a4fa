//! What an experiment leaves behind: tables, pictures, and one page with all of it.
//!
//! Everything is made from the runs that are in the store, so it can be made again at any time. A
//! file is replaced as a whole, so that a reader never sees half of one.

mod colour;
mod html;
mod png;
mod svg;
pub mod terminal;
pub mod workload;

use std::path::Path;

use anyhow::Context;
use serde_json::{Value, json};

use super::matrix::Matrix;
use super::plan::{Mode, Plan};
use super::store::{FILE, Record};
use crate::whole_file;

/// What a report is made of.
#[derive(Debug)]
pub struct Experiment<'a> {
    pub plan: &'a Plan,
    /// Versions, driver, device.
    pub about: &'a Value,
    /// The plan as it is written.
    pub text: &'a str,
    pub records: &'a [Record],
    /// The store, as it is.
    pub raw: String,
    pub matrix: &'a Matrix,
}

impl Experiment<'_> {
    /// Writes all files.
    ///
    /// # Errors
    /// The first that cannot be written.
    pub fn write(&self, dir: &Path) -> anyhow::Result<()> {
        let (matrix, runs, json) = (self.matrix_csv(), self.runs_csv(), self.json());
        replace(dir, "matrix.csv", &matrix)?;
        replace(dir, "runs.csv", &runs)?;
        replace(dir, "report.json", &json)?;
        for mode in &self.plan.modes {
            let picture = svg::heat_map(self.plan, self.matrix, *mode);
            replace(dir, &format!("heatmap-{mode}.svg"), &picture)?;
            let dots = png::heat_map(self.plan, self.matrix, *mode)?;
            replace(dir, &format!("heatmap-{mode}.png"), dots)?;
            workload::write(self, dir, *mode)?;
        }
        let downloads = [
            ("matrix.csv", "text/csv", &matrix),
            ("runs.csv", "text/csv", &runs),
            (FILE, "application/json", &self.raw),
            ("report.json", "application/json", &json),
        ];
        replace(dir, "report.html", html::page(self, &downloads))
    }

    /// Slowdowns, one a line.
    fn matrix_csv(&self) -> String {
        let mut text = line(&[
            "mode",
            "combination",
            "job",
            "beside",
            "share",
            "slowdown",
            "low95",
            "high95",
            "runs",
            "runs_wanted",
            "busy_sum",
            "memory_busy_sum",
            "copy_bytes_per_s_sum",
            "reason",
        ]);
        for cell in &self.matrix.cells {
            let estimate = cell.estimate.as_ref();
            text += &line(&[
                cell.mode.word(),
                &cell.label,
                &cell.job,
                &cell.beside.join("+"),
                &number(cell.share),
                &number(estimate.map(|one| one.value)),
                &number(estimate.map(|one| one.low)),
                &number(estimate.map(|one| one.high)),
                &cell.done.to_string(),
                &cell.wanted.to_string(),
                &number(cell.busy_sum),
                &number(cell.memory_sum),
                &number(cell.copy_sum),
                cell.reason.as_deref().unwrap_or_default(),
            ]);
        }
        text
    }

    /// Runs by job, one a line; those that failed too.
    fn runs_csv(&self) -> String {
        let mut text = line(&[
            "run",
            "mode",
            "repetition",
            "started_unix_ms",
            "window_s",
            "jobs",
            "job",
            "share",
            "speed",
            "unit",
            "device_busy",
            "memory_busy",
            "held",
            "device_time_ns",
            "wait_time_ns",
            "launches",
            "mem_peak_bytes",
            "copy_bytes_per_s",
            "iteration_p50_ns",
            "iteration_cov",
            "failed",
        ]);
        for record in self.records {
            let begin = [
                record.key.clone(),
                record.mode.to_string(),
                record.repetition.to_string(),
                record.started_unix_ms.to_string(),
                number(Some(record.window_s)),
                record.jobs.join("+"),
            ];
            let share = |at: usize| record.shares.as_ref().and_then(|all| all.get(at).copied());
            let count = |value: Option<u64>| value.map_or(String::new(), |value| value.to_string());
            for (at, job) in record.jobs.iter().enumerate() {
                let mut fields = begin.to_vec();
                fields.extend([job.clone(), number(share(at))]);
                match record.figures.get(at) {
                    Some(one) => fields.extend([
                        number(Some(one.speed)),
                        one.unit.clone(),
                        number(record.device_busy),
                        number(record.memory_busy),
                        number(one.held),
                        count(one.device_time_ns),
                        count(one.wait_time_ns),
                        count(one.launches),
                        count(one.mem_peak_bytes),
                        number(one.copy_bytes_per_s),
                        count(one.iteration_p50_ns),
                        number(one.iteration_cov),
                    ]),
                    None => fields.extend(std::iter::repeat_n(String::new(), 12)),
                }
                fields.push(record.failed.clone().unwrap_or_default());
                let fields: Vec<&str> = fields.iter().map(String::as_str).collect();
                text += &line(&fields);
            }
        }
        text
    }

    fn json(&self) -> String {
        let mut value = self.matrix.json();
        value["experiment"] = self.about.clone();
        value["repeat"] = self.plan.repeat.into();
        value["runs"] = self.records.len().into();
        value["failed"] = self
            .records
            .iter()
            .filter(|record| record.failed.is_some())
            .map(|record| {
                json!({
                    "run": record.key, "reason": record.failed, "last_lines": record.last_lines,
                })
            })
            .collect();
        crate::json::object(value)
    }
}

/// Milliseconds for one unit in parts of the windows of all runs, sorted: in solo runs first, then
/// beside each combination.
pub fn step_times(matrix: &Matrix, mode: Mode, job: &str) -> Vec<(String, Vec<f64>)> {
    let times = |parts: &mut dyn Iterator<Item = f64>| {
        let mut times: Vec<f64> = parts
            .filter(|speed| *speed > 0.0)
            .map(|speed| 1e3 / speed)
            .collect();
        times.sort_by(f64::total_cmp);
        times
    };
    let mut rows = Vec::new();
    if let Some(solo) = matrix.solo(mode, job) {
        let mut parts = solo.samples.iter().flat_map(|one| one.parts.clone());
        rows.push(("solo".to_owned(), times(&mut parts)));
    }
    let cells = matrix.cells.iter();
    for cell in cells.filter(|cell| cell.mode == mode && cell.job == job) {
        let mut parts = cell.samples.iter().flat_map(|one| one.parts.clone());
        let mut name = format!("beside {}", cell.beside.join("+"));
        if let Some(share) = cell.share {
            name += &format!(", share {share}");
        }
        rows.push((name, times(&mut parts)));
    }
    rows.retain(|row| !row.1.is_empty());
    rows
}

/// A line of CSV (RFC 4180, with a plain end of line). What a spreadsheet would take for a formula
/// is text.
fn line(fields: &[&str]) -> String {
    let fields: Vec<String> = fields.iter().map(|text| field(text)).collect();
    fields.join(",") + "\n"
}

fn field(text: &str) -> String {
    let text = match text.starts_with(['=', '@']) {
        true => format!("'{text}"),
        false => text.to_owned(),
    };
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text,
    }
}

fn number(value: Option<f64>) -> String {
    value.map_or(String::new(), |value| value.to_string())
}

/// Writes a file as a whole.
fn replace(dir: &Path, name: &str, content: impl AsRef<[u8]>) -> anyhow::Result<()> {
    let path = dir.join(name);
    whole_file::replace(&path, content.as_ref(), None).with_context(|| {
        format!(
            "cannot write {}: the runs are kept, and the same command makes the report again",
            path.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::plan;
    use super::super::store::tests::record;
    use super::*;

    const PLAN: &str = "[experiment]\nrepeat = 1\n[[job]]\nname = \"a\"\ncommand = [\"x\"]\n\
        [[job]]\nname = \"b\"\ncommand = [\"</script><b>\"]\n";

    fn written() -> tempfile::TempDir {
        let plan = plan::parse(PLAN, "p", Path::new("/"), &|_| Err(String::new())).unwrap();
        let mut failed = record("exclusive b+b #1", &[("b", 1.0), ("b", 1.0)]);
        failed.figures.clear();
        failed.failed = Some("job `b` ended with exit code 3, \"now\"".into());
        failed.last_lines = Some("</script><script>alert(1)</script>".into());
        let records = [
            record("exclusive a #1", &[("a", 100.0)]),
            record("exclusive b #1", &[("b", 40.0)]),
            record("exclusive a+b #1", &[("a", 50.0), ("b", 40.0)]),
            failed,
        ];
        let dir = tempfile::tempdir().unwrap();
        let experiment = Experiment {
            plan: &plan,
            about: &json!({ "gpu": "a <simulated> GPU", "sublet": "0.1.0" }),
            text: PLAN,
            records: &records,
            raw: "{}\n".into(),
            matrix: &Matrix::of(&plan, &records),
        };
        experiment.write(dir.path()).unwrap();
        dir
    }

    #[test]
    fn the_files_have_every_figure_and_every_reason() {
        let dir = written();
        let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        let matrix = read("matrix.csv");
        let lines: Vec<&str> = matrix.lines().collect();
        assert_eq!(lines.len(), 1 + 4, "{matrix}");
        assert!(
            lines[2].starts_with("exclusive,a+b,a,b,,2,2,2,1,1,1,"),
            "{matrix}"
        );
        assert!(
            lines[3].starts_with("exclusive,a+b,b,a,,1,1,1,1,1,1,"),
            "{matrix}"
        );
        assert!(
            lines[4].ends_with(",\"1 of 1 failed: job `b` ended with exit code 3, \"\"now\"\"\""),
            "{matrix}"
        );
        let runs = read("runs.csv");
        assert_eq!(runs.lines().count(), 1 + 1 + 1 + 2 + 2, "{runs}");
        let counts: Vec<usize> = runs.lines().map(field_count).collect();
        assert!(counts.iter().all(|count| *count == 21), "{runs}");
        let report: Value = serde_json::from_str(&read("report.json")).unwrap();
        assert_eq!(report["schema"], 1);
        assert_eq!(report["failed"][0]["run"], "exclusive b+b #1");
        assert_eq!(report["slowdowns"].as_array().unwrap().len(), 4);
        assert!(read("heatmap-exclusive.svg").contains(">2.00</text>"));
        let names = fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(names, 7, "nothing half done is left");
        let trace = fs::read_dir(dir.path().join("trace-exclusive")).unwrap();
        assert_eq!(trace.count(), 3);
    }

    fn field_count(line: &str) -> usize {
        let (mut quoted, mut commas) = (false, 0);
        for c in line.chars() {
            quoted ^= c == '"';
            commas += usize::from(c == ',' && !quoted);
        }
        commas + 1
    }

    #[test]
    fn the_page_needs_nothing_else_and_what_jobs_wrote_stays_text() {
        let dir = written();
        let page = fs::read_to_string(dir.path().join("report.html")).unwrap();
        assert!(!page.contains("<script"), "no job's words become a program");
        assert!(
            page.contains("&lt;/script&gt;&lt;script&gt;alert(1)"),
            "{page}"
        );
        for outside in ["src=\"http", "href=\"http", "url(", "@import"] {
            assert!(!page.contains(outside), "{outside}");
        }
        for word in [
            "<!DOCTYPE html>",
            "lang=\"en\"",
            "<title>",
            "a &lt;simulated&gt; GPU",
            "download=\"runs.jsonl\"",
            "href=\"data:text/csv",
            "role=\"img\"",
            "@media print",
        ] {
            assert!(page.contains(word), "no {word}");
        }
        assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
        assert!(page.matches("<svg").count() >= 4, "heat map, busy, steps");
    }

    #[test]
    fn a_field_keeps_its_commas_and_is_no_formula() {
        assert_eq!(
            line(&["a,b", "c\"d", "=1+1", ""]),
            "\"a,b\",\"c\"\"d\",'=1+1,\n"
        );
    }

    #[test]
    fn a_file_that_cannot_be_replaced_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("matrix.csv")).unwrap();
        let error = replace(dir.path(), "matrix.csv", "x").unwrap_err();
        assert!(error.to_string().contains("matrix.csv"), "{error}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
