//! `sublet simulate serve`: the instances of a service, and who decides how many are ready.

use anyhow::{Context as _, anyhow};
use cluster::serving::{self, Scaling, Served, Setup};
use cluster::trace::{Request, TokenCost, read_requests};
use policy::standbys::Sla;
use serde_json::{Value, json};

use crate::args::Serve;
use crate::exit::Result;
use crate::json::object;
use crate::table::{Align, Table};

/// A run, and what it is called.
struct Run {
    who: String,
    served: Served,
}

/// What is printed.
///
/// # Errors
/// A file that cannot be read or is wrong; a number out of range.
pub fn serve(args: &Serve) -> Result<String> {
    let cost = TokenCost {
        context_s: token(args.context_token, "--context-token")?,
        generated_s: token(args.generated_token, "--generated-token")?,
    };
    let requests = read_requests(&args.requests, cost)?;
    if requests.iter().all(|request| request.service_s <= 0.0) {
        return Err(anyhow!(
            "{}: no request takes any time: give service_s in the file, or --generated-token",
            args.requests.display()
        )
        .into());
    }
    let setup = setup(args);
    let runs = runs(&requests, &setup)?;
    Ok(match args.json {
        true => as_json(&requests, &runs),
        false => as_text(&runs),
    })
}

fn token(seconds: f64, option: &str) -> Result<f64> {
    if (0.0..=1e6).contains(&seconds) {
        return Ok(seconds);
    }
    Err(anyhow!("{option} {seconds}: 0 to 1000000 seconds are expected").into())
}

fn setup(args: &Serve) -> Setup {
    Setup {
        instances: args.instances,
        frontends: args.frontends,
        sla: Sla {
            within_s: args.within,
            level: args.level,
            burst: args.burst,
        },
        return_s: args.return_s,
        start_s: args.start,
        keep_s: args.keep,
        standby_s: args.standby.unwrap_or(f64::INFINITY),
        warm: args.warm.unwrap_or(args.instances),
        history_s: args.history as usize,
        decide_s: 1.0,
        retry_s: 0.01,
        prune: args.prune,
        seed: args.seed,
    }
}

fn runs(requests: &[Request], setup: &Setup) -> Result<Vec<Run>> {
    let of = |setup: &Setup, scaling: &Scaling| {
        serving::serve(requests, setup, scaling).context("the service cannot be simulated")
    };
    let cold = Setup {
        warm: 0,
        standby_s: 0.0,
        ..setup.clone()
    };
    let predicted = of(setup, &Scaling::Predicted)?;
    let mut runs = vec![Run {
        who: "frontends, instances stand by".to_owned(),
        served: predicted,
    }];
    runs.push(Run {
        who: "frontends, instances end".to_owned(),
        served: of(&cold, &Scaling::Predicted)?,
    });
    // With all of them, what is still missed nobody can meet.
    let all = of(setup, &Scaling::Fixed(setup.instances))?;
    let possible_pct = all.met_pct();
    let least = serving::least_fixed(requests, setup, possible_pct).context("the fixed number")?;
    if let Some(n) = least {
        runs.push(Run {
            who: format!("{n} at all times"),
            served: of(setup, &Scaling::Fixed(n))?,
        });
    }
    let (_, served) = serving::clairvoyant(requests, setup).context("the plan")?;
    runs.push(Run {
        who: "who knows what comes".to_owned(),
        served,
    });
    Ok(runs)
}

fn p99_s(served: &Served) -> f64 {
    let at = served.responses_s.len().saturating_sub(1) * 99 / 100;
    served.responses_s.get(at).copied().unwrap_or(0.0)
}

fn as_json(requests: &[Request], runs: &[Run]) -> String {
    let runs: Vec<Value> = (runs.iter())
        .map(|Run { who, served }| {
            json!({"who": who, "windows_met_pct": served.met_pct(),
                "windows_met_without_bursts_pct": served.met_without_bursts_pct(),
                "windows_missed": served.missed(),
                "in_time_pct": served.in_time_pct(), "response_p99_s": p99_s(served),
                "resident_s": served.resident_s, "standby_s": served.standby_s,
                "returns": served.returns, "starts": served.starts, "dropped": served.dropped})
        })
        .collect();
    object(json!({"requests": requests.len(), "window_s": serving::WINDOW_S, "runs": runs}))
}

fn as_text(runs: &[Run]) -> String {
    let right = |name| (name, Align::Right);
    let mut table = Table::new(&[
        ("DECIDED BY", Align::Left),
        right("windows met"),
        right("less bursts"),
        right("in time"),
        right("p99 s"),
        right("resident h"),
        right("standby h"),
        right("returns"),
        right("starts"),
        right("dropped"),
    ]);
    for Run { who, served } in runs {
        table.row(vec![
            who.clone(),
            format!("{:.1}%", served.met_pct()),
            format!("{:.1}%", served.met_without_bursts_pct()),
            format!("{:.2}%", served.in_time_pct()),
            format!("{:.2}", p99_s(served)),
            format!("{:.2}", served.resident_s / 3600.0),
            format!("{:.2}", served.standby_s / 3600.0),
            served.returns.to_string(),
            served.starts.to_string(),
            served.dropped.to_string(),
        ]);
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::args::{self, Command, SimulateCommand};

    fn served(text: &str, more: &[&str]) -> Result<String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("requests.csv");
        std::fs::write(&file, text).unwrap();
        let words = ["sublet", "simulate", "serve", file.to_str().unwrap()];
        let words = words.iter().chain(more).map(OsString::from);
        match args::parse(words).unwrap().command {
            Command::Simulate(args) => match args.command {
                Some(SimulateCommand::Serve(args)) => serve(&args),
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    }

    fn steady() -> String {
        let rows = (0..600).map(|at| format!("{},0.5\n", f64::from(at) * 0.25));
        format!("arrival_s,service_s\n{}", rows.collect::<String>())
    }

    #[test]
    fn runs_are_compared_as_a_table_and_json() {
        let json = served(&steady(), &["--within", "2", "--instances", "9", "--json"]).unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        let runs = json["runs"].as_array().unwrap();
        assert_eq!(runs.len(), 4, "{json}");
        // Four requests a second of half a second each: two instances are always busy.
        assert_eq!(runs[2]["who"], "2 at all times");
        assert_eq!(runs[2]["windows_met_pct"], 100.0);
        assert_eq!(runs[3]["windows_met_pct"], 100.0);
        let text = served(&steady(), &["--within", "2", "--instances", "9"]).unwrap();
        assert!(
            text.contains("2 at all times") && text.contains("windows met"),
            "{text}"
        );
    }

    #[test]
    fn tokens_become_seconds() {
        let text = "arrival_s,context_tokens,generated_tokens\n0,1000,10\n";
        let costs = ["--context-token", "0.001", "--generated-token", "0.1"];
        let more = ["--within", "2.5", "--json"].iter().chain(&costs);
        let json = served(text, &more.copied().collect::<Vec<_>>()).unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        let p99 = json["runs"][2]["response_p99_s"].as_f64().unwrap();
        assert!((p99 - 2.0).abs() < 1e-9, "{json}");
    }

    #[test]
    fn mistakes_say_what_to_do() {
        let good = "arrival_s,service_s\n0,1\n";
        for (text, more, words) in [
            (good, &["--within", "0"][..], "the time of response is 0"),
            (good, &["--within", "nan"], "the time of response is NaN"),
            (
                good,
                &["--within", "1", "--level", "1"],
                "the part in time is 1",
            ),
            (
                good,
                &["--within", "1", "--instances", "0"],
                "the number of instances is 0",
            ),
            (
                good,
                &["--within", "1", "--history", "1"],
                "the history is 1",
            ),
            (
                good,
                &["--within", "1", "--context-token=-1"],
                "--context-token",
            ),
            ("arrival_s,service_s\n", &["--within", "1"], "no request"),
            ("arrival_s,service_s\n0,-1\n", &["--within", "1"], ":2:3:"),
            (
                "arrival_s,service_s\n1e9,1\n",
                &["--within", "1"],
                "10 days",
            ),
            ("arrival_s\n1\n", &["--within", "1"], "context_tokens"),
            (
                "arrival_s,service_s\n0,0\n",
                &["--within", "1"],
                "takes any time",
            ),
        ] {
            let line = served(text, more).unwrap_err().line();
            assert!(line.contains(words), "{words}: {line}");
        }
    }
}
