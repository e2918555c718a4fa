//! `sublet simulate trace`: what a trace holds, and how its jobs waited where they came from.

use cluster::trace::{self, Delays, Iterations, Options, Spread, Trace, TraceError, delays};
use policy::cluster::Class;
use serde_json::json;

use crate::args::TraceSummary;
use crate::exit::Result;
use crate::json::object;
use crate::table::{Align, Table};

/// What is printed.
///
/// # Errors
/// A trace that cannot be read or is wrong.
pub fn summary(args: &TraceSummary) -> Result<String> {
    let options = Options {
        part: args.part.clone(),
        ..Options::default()
    };
    let trace = match trace::read(&args.trace, None, &options) {
        Ok(trace) => trace,
        // Not jobs: times of iterations perhaps. If neither, the first error says more.
        Err(error @ TraceError::Format { .. }) => {
            let Ok(all) = trace::read_iterations(&args.trace) else {
                return Err(error.into());
            };
            return Ok(iterations(&all, args.json));
        }
        Err(error) => return Err(error.into()),
    };
    let found = Found::of(&trace);
    Ok(match args.json {
        true => found.json(&trace),
        false => found.text(&trace),
    })
}

/// Why jobs were left out, in brackets; empty where there is no more to say than how many.
pub fn reasons(trace: &Trace) -> String {
    let each = trace.left_out.iter();
    let each: Vec<String> = each.map(|(why, count)| format!("{count} {why}")).collect();
    match each.is_empty() {
        true => String::new(),
        false => format!(" ({})", each.join(", ")),
    }
}

struct Found {
    opportunistic: usize,
    parts: usize,
    gpus: Spread,
    length_s: Spread,
    between_arrivals_s: Spread,
    waits: Option<Delays>,
    variation: Option<Spread>,
}

impl Found {
    fn of(trace: &Trace) -> Self {
        let jobs = || trace.jobs.iter();
        let opportunistic = |job: &&_| is_opportunistic(job);
        let arrivals: Vec<f64> = jobs().map(|job| job.arrival_s).collect();
        let apart = arrivals.windows(2).map(|pair| pair[1] - pair[0]);
        Self {
            opportunistic: jobs().filter(opportunistic).count(),
            parts: jobs().filter(|job| job.part.is_some()).count(),
            gpus: Spread::of(jobs().map(|job| f64::from(job.gpus)).collect()),
            length_s: Spread::of(jobs().map(policy::cluster::Job::duration_s).collect()),
            between_arrivals_s: Spread::of(apart.collect()),
            waits: (!trace.recorded.is_empty()).then(|| delays(&trace.recorded)),
            variation: (!trace.variation.is_empty()).then(|| Spread::of(trace.variation.clone())),
        }
    }

    fn text(&self, trace: &Trace) -> String {
        let jobs = trace.jobs.len();
        let mut head = format!(
            "{jobs} jobs of {} users or parts, {} opportunistic, {} ask for a part of a GPU",
            trace.users.all().len(),
            self.opportunistic,
            self.parts
        );
        if trace.skipped > 0 {
            head += &format!("\n{} left out{}", trace.skipped, reasons(trace));
        }
        if !trace.unused.is_empty() {
            head += &format!("\ncolumns not used: {}", trace.unused.join(", "));
        }
        let right = |name| (name, Align::Right);
        let columns = [
            ("", Align::Left),
            right("mean"),
            right("p50"),
            right("p90"),
            right("p99"),
        ];
        let mut table = Table::new(&columns);
        let mut row = |name: &str, spread: &Spread, digits: usize| {
            let values = [spread.mean, spread.p50, spread.p90, spread.p99];
            let mut cells = vec![name.to_owned()];
            cells.extend(values.map(|value| format!("{value:.digits$}")));
            table.row(cells);
        };
        row("GPUs", &self.gpus, 1);
        row("length s", &self.length_s, 0);
        row("between arrivals s", &self.between_arrivals_s, 1);
        if let Some(waits) = &self.waits {
            row("recorded wait s", &waits.wait_s, 0);
            row("  by fragmentation", &waits.fragmentation_s, 0);
            row("  for its turn", &waits.fairness_s, 0);
            if waits.starts_again > 0 {
                row("between starts s", &waits.between_s, 0);
            }
        }
        if let Some(variation) = &self.variation {
            row("variation of instances", variation, 3);
        }
        let mut text = format!("{head}\n{}", table.render());
        if let Some(waits) = &self.waits {
            text += &format!(
                "Recorded waits are of {} jobs; at most {:.0} GPUs were held at once, and a wait \
                 while enough of those were free is by fragmentation.\n",
                waits.jobs, waits.gpus
            );
        }
        text
    }

    fn json(&self, trace: &Trace) -> String {
        object(
            json!({"jobs": trace.jobs.len(), "users": trace.users.all().len(),
            "opportunistic": self.opportunistic, "parts": self.parts, "skipped": trace.skipped,
            "left_out": trace.left_out, "unused_columns": trace.unused, "gpus": self.gpus,
            "length_s": self.length_s, "between_arrivals_s": self.between_arrivals_s,
            "recorded": self.waits, "variation": self.variation}),
        )
    }
}

fn is_opportunistic(job: &policy::cluster::Job) -> bool {
    job.profile.class == Class::Opportunistic
}

fn iterations(all: &[Iterations], as_json: bool) -> String {
    if as_json {
        let jobs: Vec<_> = all
            .iter()
            .map(|one| {
                json!({"job": one.job, "gpu_percent": one.gpu_percent, "of_worker": one.of_worker,
                    "between_workers": one.between_workers})
            })
            .collect();
        return object(json!({ "iterations": jobs }));
    }
    let right = |name| (name, Align::Right);
    let mut table = Table::new(&[
        ("JOB", Align::Left),
        right("part of a GPU"),
        right("CoV of a worker p50"),
        right("p90"),
        right("CoV between workers p50"),
        right("p90"),
    ]);
    for one in all {
        let spread = [one.of_worker, one.between_workers];
        let mut cells = vec![one.job.clone(), format!("{:.0}%", one.gpu_percent)];
        cells.extend(
            spread
                .iter()
                .flat_map(|of| [of.p50, of.p90])
                .map(|of| format!("{of:.3}")),
        );
        table.row(cells);
    }
    table.render()
}
