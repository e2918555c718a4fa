//! `sublet simulate cells`: tenants with reserved cells, against private clusters and quotas.

use anyhow::anyhow;
use cluster::cells::{Ask, Happened, Reservations, Sharing, asks, play};
use cluster::trace::{self, Options};
use policy::cluster::admission::cells::{UNITS_PER_GPU, equal_reservations};
use serde_json::{Value, json};

use crate::args::Cells;
use crate::exit::Result;
use crate::json::object;
use crate::table::{Align, Table};

/// Most servers, and most tenants.
const MOST: u32 = 4096;

/// What is printed.
///
/// # Errors
/// A trace that cannot be read or is wrong; a number out of range.
pub fn cells(args: &Cells) -> Result<String> {
    for (option, value) in [("--nodes", args.nodes), ("--tenants", args.tenants)] {
        if !(1..=MOST).contains(&value) {
            return Err(anyhow!("{option} {value}: 1 to {MOST} are expected").into());
        }
    }
    let gpus = args.gpus_per_node;
    if !(gpus.is_power_of_two() && gpus <= 64) {
        let expected = "cells are halved down to a quarter GPU: give a power of two up to 64";
        return Err(anyhow!("--gpus-per-node {gpus}: {expected}").into());
    }
    let options = Options {
        part: args.part.clone(),
        limit: args.limit,
        ..Options::default()
    };
    let trace = trace::read(&args.trace, None, &options)?;
    let tenants = args.tenants as usize;
    let asks = asks(&trace, tenants);
    let node_level = (gpus as usize * UNITS_PER_GPU).ilog2() as usize;
    let reservations = Reservations {
        nodes: args.nodes as usize,
        node_level,
        reserved: equal_reservations(args.nodes as usize, node_level, tenants),
    };
    let of = |sharing| {
        play(&asks, &reservations, sharing)
            .map_err(|no| anyhow!("the cells of tenant {} do not fit", no.tenant + 1))
    };
    let runs = [
        of(Sharing::Cells)?,
        of(Sharing::Private)?,
        of(Sharing::Quota)?,
    ];
    Ok(match args.json {
        true => as_json(&asks, &runs, tenants),
        false => as_text(&asks, &runs, tenants),
    })
}

const NAMES: [&str; 3] = ["cells", "private clusters", "quota"];

/// Of one way to share and one tenant: guaranteed requests, their mean and longest wait, and how
/// many waited longer than in the private cluster.
struct Row {
    requests: usize,
    never: usize,
    mean_s: f64,
    most_s: f64,
    later: usize,
}

fn row(asks: &[Ask], [of, private]: [&[Happened]; 2], tenant: usize) -> Row {
    let mine = || {
        let all = asks.iter().zip(of).zip(private);
        all.filter(|((ask, one), _)| ask.tenant == tenant && one.guaranteed)
    };
    let waits: Vec<f64> = mine().filter_map(|((_, one), _)| one.waited_s).collect();
    let wait_s = |one: &Happened| one.waited_s.unwrap_or(f64::INFINITY);
    let later = mine().filter(|((_, one), own)| wait_s(one) > wait_s(own) + 1e-9);
    Row {
        requests: mine().count(),
        never: mine().count() - waits.len(),
        // An empty sum is minus zero.
        mean_s: (0.0 + waits.iter().sum::<f64>()) / waits.len().max(1) as f64,
        most_s: waits.iter().copied().fold(0.0, f64::max),
        later: later.count(),
    }
}

fn opportunistic(of: &[Happened]) -> (usize, usize, u32) {
    let some = || of.iter().filter(|one| !one.guaranteed);
    let started = some().filter(|one| one.waited_s.is_some()).count();
    (
        some().count(),
        started,
        some().map(|one| one.displaced).sum(),
    )
}

fn as_json(asks: &[Ask], runs: &[Vec<Happened>; 3], tenants: usize) -> String {
    let runs: Vec<Value> = NAMES
        .iter()
        .zip(runs)
        .map(|(name, of)| {
            let rows: Vec<Value> = (0..tenants)
                .map(|tenant| {
                    let row = row(asks, [of, &runs[1]], tenant);
                    json!({"tenant": tenant + 1, "requests": row.requests, "never": row.never,
                        "wait_mean_s": row.mean_s, "wait_most_s": row.most_s,
                        "later_than_private": row.later})
                })
                .collect();
            let (all, started, displaced) = opportunistic(of);
            json!({"sharing": name, "tenants": rows, "opportunistic": all,
                "opportunistic_started": started, "displaced": displaced})
        })
        .collect();
    object(json!({"requests": asks.len(), "runs": runs}))
}

fn as_text(asks: &[Ask], runs: &[Vec<Happened>; 3], tenants: usize) -> String {
    let right = |name| (name, Align::Right);
    let mut table = Table::new(&[
        ("SHARING", Align::Left),
        right("tenant"),
        right("requests"),
        right("wait s"),
        right("longest"),
        right("later than alone"),
    ]);
    let mut rest = Table::new(&[
        ("SHARING", Align::Left),
        right("opportunistic"),
        right("started"),
        right("displaced"),
    ]);
    for (name, of) in NAMES.iter().zip(runs) {
        for tenant in 0..tenants {
            let row = row(asks, [of, &runs[1]], tenant);
            table.row(vec![
                (*name).to_owned(),
                (tenant + 1).to_string(),
                row.requests.to_string(),
                format!("{:.0}", row.mean_s),
                format!("{:.0}", row.most_s),
                row.later.to_string(),
            ]);
        }
        let (all, started, displaced) = opportunistic(of);
        let counts = [all, started, displaced as usize].map(|count| count.to_string());
        rest.row([(*name).to_owned()].into_iter().chain(counts).collect());
    }
    format!("{}\n{}", table.render(), rest.render())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::args::{self, Command, SimulateCommand};

    /// Two tenants' halves of a GPU, and one that borrows a whole one.
    const PODS: &str = "num_gpu,gpu_milli,qos,creation_time,deletion_time
1,500,LS,0,10
1,250,LS,1,11
1,1000,BE,20,30
1,500,LS,25,26
";

    fn shared(text: &str, more: &[&str]) -> Result<String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pods.csv");
        std::fs::write(&file, text).unwrap();
        let words = [
            "sublet",
            "simulate",
            "cells",
            "--trace",
            file.to_str().unwrap(),
        ];
        let words = words.iter().chain(more).map(OsString::from);
        match args::parse(words).unwrap().command {
            Command::Simulate(args) => match args.command {
                Some(SimulateCommand::Cells(args)) => cells(&args),
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    }

    const ONE: [&str; 6] = ["--nodes", "1", "--gpus-per-node", "1", "--tenants", "2"];

    #[test]
    fn parts_of_a_gpu_are_shared_as_reserved() {
        let json = shared(PODS, &[&ONE[..], &["--json"]].concat()).unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        let cells = &json["runs"][0];
        assert_eq!(cells["sharing"], "cells");
        for (tenant, requests) in [(0, 1), (1, 2)] {
            let row = &cells["tenants"][tenant];
            assert_eq!(row["requests"], requests, "{json}");
            assert_eq!(row["wait_most_s"], 0.0);
            assert_eq!(row["later_than_private"], 0);
        }
        // The whole GPU is lent, and taken back; alone, no tenant has one to lend.
        assert_eq!(
            (&cells["opportunistic_started"], &cells["displaced"]),
            (&json!(1), &json!(1))
        );
        assert_eq!(json["runs"][1]["opportunistic_started"], 0);
        let text = shared(PODS, &ONE).unwrap();
        assert!(
            text.contains("private clusters") && text.contains("later than alone"),
            "{text}"
        );
    }

    #[test]
    fn mistakes_say_what_to_do() {
        for (more, words) in [
            (["--nodes", "0", "--tenants", "2"], "--nodes 0"),
            (["--nodes", "5000", "--tenants", "2"], "1 to 4096"),
            (["--nodes", "1", "--tenants", "0"], "--tenants 0"),
            (["--nodes", "1", "--gpus-per-node", "6"], "power of two"),
            (["--nodes", "1", "--gpus-per-node", "128"], "power of two"),
        ] {
            let line = shared(PODS, &more).unwrap_err().line();
            assert!(line.contains(words), "{words}: {line}");
        }
    }
}
