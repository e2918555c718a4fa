//! `accounting`: whether a quota's account is exact. See `scripts/accounting`.
//!
//! Exit status: 0 exact, 1 not, 125 wrong use.

use std::path::PathBuf;
use std::process::ExitCode;

use transparency::accounting::{self, Options};

const USAGE: &str = "usage: accounting [--threads N] [--processes N] [--ops N] [--rounds N] [--seed S] [--quota-mib N] \
                     [--families LETTERS] [--sublet PATH] [--commit TEXT] [--json]";

fn main() -> ExitCode {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    if words.first().is_some_and(|word| word == "worker") {
        return end(accounting::worker(&words[1..]).map(|()| true));
    }
    let crew = words.first().is_some_and(|word| word == "crew");
    if crew {
        words.remove(0);
    }
    match parse(&words) {
        Err(error) => {
            eprintln!("accounting: {error}\n{USAGE}");
            ExitCode::from(125)
        }
        Ok(options) if crew => end(accounting::crew(&options)),
        Ok(options) => end(accounting::supervise(&options).map(|status| status == 0)),
    }
}

fn end(outcome: std::io::Result<bool>) -> ExitCode {
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("accounting: {error}");
            ExitCode::FAILURE
        }
    }
}

fn parse(words: &[String]) -> Result<Options, String> {
    let here = std::env::current_exe()
        .ok()
        .and_then(|path| path.parent().map(PathBuf::from))
        .unwrap_or_default();
    let mut options = Options {
        threads: 4,
        processes: 4,
        ops: 200_000,
        rounds: 12,
        seed: 1,
        quota_mib: 1024,
        families: String::new(),
        sublet: here.join("sublet"),
        commit: "unknown".to_owned(),
        json: false,
    };
    let mut rest = words.iter();
    while let Some(word) = rest.next() {
        let mut value = || rest.next().ok_or(format!("{word} needs a value"));
        let number = |text: &String| {
            text.parse::<u64>()
                .map_err(|_| format!("{word} {text}: this is no number"))
        };
        match word.as_str() {
            "--threads" => options.threads = number(value()?)?.clamp(1, 4096) as usize,
            "--processes" => options.processes = number(value()?)?.clamp(1, 64) as usize,
            "--ops" => options.ops = number(value()?)?,
            "--rounds" => options.rounds = number(value()?)?.clamp(1, 100_000) as usize,
            "--seed" => options.seed = number(value()?)?,
            "--quota-mib" => options.quota_mib = number(value()?)?.max(1),
            "--families" => options.families = value()?.clone(),
            "--sublet" => options.sublet = value()?.into(),
            "--commit" => options.commit = value()?.clone(),
            "--json" => options.json = true,
            _ => return Err(format!("{word}: there is no such option")),
        }
    }
    Ok(options)
}
