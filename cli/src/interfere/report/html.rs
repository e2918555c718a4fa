//! One page with everything: it needs no network and no program, and may go into an appendix.

use std::fmt::Write as _;

use serde_json::Value;

use super::super::matrix::{Cell, Matrix};
use super::super::plan::Mode;
use super::Experiment;
use super::svg::{against, escape, figure, heat_map, steps};

const STYLE: &str = "\
:root{color-scheme:light}
body{font:16px/1.5 sans-serif;color:#222;background:#fff;max-width:62rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;margin-bottom:.2rem}h2{font-size:1.25rem;margin-top:2.2rem;border-bottom:1px solid #ccc}
h3{font-size:1.05rem}
table{border-collapse:collapse;margin:.6rem 0;font-size:.9rem}
th,td{border:1px solid #ccc;padding:.25rem .55rem;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}
thead th{background:#f2f2f2}
figure{margin:1rem 0;overflow-x:auto}
svg{max-width:100%;height:auto}
pre{background:#f6f6f6;padding:.6rem;overflow-x:auto;font-size:.85rem;white-space:pre-wrap}
a{color:#0c5a9e}
a:focus,summary:focus{outline:3px solid #0c5a9e}
.wide{overflow-x:auto}
@media print{body{max-width:none;margin:0;font-size:11pt}nav,.downloads{display:none}\
h2,h3{break-after:avoid}figure,table{break-inside:avoid}}
";

/// The page; `downloads` are files that it holds itself: name, kind and content.
pub fn page(experiment: &Experiment<'_>, downloads: &[(&str, &str, &String)]) -> String {
    let about = experiment.about;
    let text_of = |key: &str| match &about[key] {
        Value::String(text) => text.clone(),
        Value::Null => "not known".to_owned(),
        other => other.to_string(),
    };
    let mut body = String::new();
    let _ = write!(
        body,
        "<header><h1>Interference of {} jobs on {}</h1>\n<p>{} runs, {} of them failed. Made by \
         <code>sublet interfere</code> {}. {}</p></header>\n<main>\n",
        experiment.plan.jobs.len(),
        escape(&text_of("gpu")),
        experiment.records.len(),
        experiment
            .records
            .iter()
            .filter(|record| record.failed.is_some())
            .count(),
        escape(&text_of("sublet")),
        match about["simulated"] == true {
            true =>
                "<strong>The GPU is simulated: every figure is of a model, not measured on \
                     hardware.</strong>",
            false => "",
        }
    );
    for mode in &experiment.plan.modes {
        body += &of_mode(experiment, *mode);
    }
    body += &failures(experiment);
    body += "<h2>What it ran on</h2>\n<table><tbody>\n";
    for (name, key) in [
        ("Device", "gpu"),
        ("Driver (CUDA)", "driver"),
        ("Driver version", "driver_version"),
        ("Clocks (most, set)", "clocks"),
        ("sublet", "sublet"),
        ("Settings", "settings"),
    ] {
        let _ = writeln!(
            body,
            "<tr><th scope=\"row\">{name}</th><td>{}</td></tr>",
            escape(&text_of(key))
        );
    }
    let _ = writeln!(
        body,
        "<tr><th scope=\"row\">Seed</th><td>{}</td></tr>\n\
         <tr><th scope=\"row\">Repetitions</th><td>{}</td></tr></tbody></table>",
        experiment.plan.seed, experiment.plan.repeat
    );
    let _ = write!(
        body,
        "<h2>The plan</h2>\n<pre>{}</pre>\n",
        escape(experiment.text)
    );
    body += "<h2>How to read it</h2>\n<p>The slowdown of a job is its mean speed in its solo runs \
             over its mean speed beside others. Warm-up does not count, and all jobs of a run are \
             measured in the same window. Intervals are of 95 % confidence, by a bootstrap of runs \
             and of parts of their windows, drawn by the seed, with Student's quantile. With one \
             repetition they say nothing of what differs from run to run.</p>\n";
    body += &runs(experiment);
    body += "<h2>Every raw figure</h2>\n<p class=\"downloads\">These files are inside this page: ";
    for (at, (name, kind, content)) in downloads.iter().enumerate() {
        let _ = write!(
            body,
            "{}<a download=\"{name}\" href=\"data:{kind};charset=utf-8,{}\">{name}</a> ({} bytes)",
            if at > 0 { ", " } else { "" },
            percent(content),
            content.len()
        );
    }
    body += ".</p>\n</main>\n";
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <link rel=\"icon\" href=\"data:,\">\n\
         <title>Interference of {} jobs</title>\n<style>\n{STYLE}</style>\n</head>\n\
         <body>\n{body}</body>\n</html>\n",
        experiment.plan.jobs.len()
    )
}

fn of_mode(experiment: &Experiment<'_>, mode: Mode) -> String {
    let (plan, matrix) = (experiment.plan, experiment.matrix);
    let mut html = format!("<h2>Mode {mode}</h2>\n");
    let _ = writeln!(html, "<figure>{}</figure>", heat_map(plan, matrix, mode));
    html += &table(matrix, mode);
    html += "<h3>Solo runs</h3>\n<table><thead><tr><th scope=\"col\">Job</th>\
             <th scope=\"col\">Speed</th><th scope=\"col\">Device busy</th>\
             <th scope=\"col\">Its memory</th><th scope=\"col\">Copied a second</th><th scope=\"col\">Runs</th></tr></thead><tbody>\n";
    for solo in matrix.solos.iter().filter(|solo| solo.mode == mode) {
        let known = |value: Option<f64>, unit: &str| {
            value.map_or("not known".to_owned(), |value| {
                format!("{}{unit}", figure(value))
            })
        };
        let _ = writeln!(
            html,
            "<tr><th scope=\"row\">{}</th><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
            escape(&solo.job),
            escape(&known(solo.speed, &format!(" {}/s", solo.unit))),
            known(solo.busy.map(|busy| 100.0 * busy), " %"),
            known(solo.memory_busy.map(|busy| 100.0 * busy), " %"),
            known(solo.copy_bytes_per_s, "B"),
            solo.samples.len()
        );
    }
    html += "</tbody></table>\n";
    let pictures = [
        against(
            matrix,
            mode,
            (
                "busy",
                "Slowdown against the sum of what the jobs are busy",
                "sum of the busy fractions in solo runs",
            ),
            |cell| cell.busy_sum,
        ),
        against(
            matrix,
            mode,
            (
                "memory",
                "Slowdown against the sum of what the device's memory is busy",
                "sum of the memory's busy fractions in solo runs",
            ),
            |cell| cell.memory_sum,
        ),
        against(
            matrix,
            mode,
            (
                "copies",
                "Slowdown against the sum of what the jobs copy",
                "bytes a second between host and device, sum of the solo runs",
            ),
            |cell| cell.copy_sum,
        ),
    ];
    for picture in pictures.into_iter().flatten() {
        let _ = writeln!(html, "<figure>{picture}</figure>");
    }
    html += "<h3>How long a step takes</h3>\n";
    for job in &plan.jobs {
        if let Some(picture) = steps(matrix, mode, &job.name) {
            let _ = writeln!(html, "<figure>{picture}</figure>");
        }
    }
    html
}

/// The same figures as words.
fn table(matrix: &Matrix, mode: Mode) -> String {
    let mut html = String::from(
        "<table><caption>Slowdowns</caption><thead><tr><th scope=\"col\">Job</th>\
         <th scope=\"col\">Beside</th><th scope=\"col\">Share</th><th scope=\"col\">Slowdown</th>\
         <th scope=\"col\">95 % interval</th><th scope=\"col\">Runs</th>\
         <th scope=\"col\">Note</th></tr></thead><tbody>\n",
    );
    for cell in matrix.cells.iter().filter(|cell| cell.mode == mode) {
        html += &row(cell);
    }
    html + "</tbody></table>\n"
}

fn row(cell: &Cell) -> String {
    let (value, interval) = match &cell.estimate {
        Some(one) => (
            format!("{:.3}", one.value),
            format!("{:.3} to {:.3}", one.low, one.high),
        ),
        None => ("none".to_owned(), String::new()),
    };
    format!(
        "<tr><th scope=\"row\">{}</th><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{value}</td>\
         <td class=\"n\">{interval}</td><td class=\"n\">{} of {}</td><td>{}</td></tr>\n",
        escape(&cell.job),
        escape(&cell.beside.join(", ")),
        cell.share.map_or(String::new(), |share| share.to_string()),
        cell.done,
        cell.wanted,
        escape(cell.reason.as_deref().unwrap_or_default())
    )
}

fn failures(experiment: &Experiment<'_>) -> String {
    let failed: Vec<_> = experiment
        .records
        .iter()
        .filter_map(|record| Some((record, record.failed.as_deref()?)))
        .collect();
    if failed.is_empty() {
        return String::new();
    }
    let mut html = String::from("<h2>Runs that failed</h2>\n");
    for (record, why) in failed {
        let _ = writeln!(
            html,
            "<p><strong>{}</strong>: {}</p>",
            escape(&record.key),
            escape(why)
        );
        if let Some(lines) = record
            .last_lines
            .as_deref()
            .filter(|lines| !lines.is_empty())
        {
            let _ = writeln!(html, "<pre>{}</pre>", escape(lines));
        }
    }
    html
}

/// Every run, as a table that can be folded.
fn runs(experiment: &Experiment<'_>) -> String {
    let mut html = String::from(
        "<h2>Runs</h2>\n<details open><summary>Speeds of every run</summary>\n<div class=\"wide\">\
         <table><thead><tr><th scope=\"col\">Run</th><th scope=\"col\">Window</th>\
         <th scope=\"col\">Job</th><th scope=\"col\">Speed</th><th scope=\"col\">Held</th>\
         </tr></thead><tbody>\n",
    );
    for record in experiment.records {
        for one in &record.figures {
            let _ = writeln!(
                html,
                "<tr><td>{}</td><td class=\"n\">{:.2} s</td><td>{}</td><td class=\"n\">{} {}/s</td>\
                 <td class=\"n\">{}</td></tr>",
                escape(&record.key),
                record.window_s,
                escape(&one.job),
                figure(one.speed),
                escape(&one.unit),
                one.held
                    .map_or(String::new(), |held| format!("{:.1} %", 100.0 * held))
            );
        }
    }
    html + "</tbody></table></div></details>\n"
}

/// As it stands in a `data:` address.
fn percent(text: &str) -> String {
    let mut out = String::with_capacity(text.len() * 2);
    for b in text.bytes() {
        if b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b'~' | b',' | b':') {
            out.push(char::from(b));
        } else {
            let _ = write!(out, "%{b:02X}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_inside_the_page_is_the_same_byte_by_byte() {
        assert_eq!(percent("a,b\n\"é\"#%"), "a,b%0A%22%C3%A9%22%23%25");
    }
}
