//! Children that never touch CUDA: they cost next to nothing and nobody hears of them.

use std::io::BufReader;
use std::process::Stdio;
use std::time::{Duration, Instant};

use host_process::{Artefacts, Host, Way};
use testbed::{CommandWithin, within};

#[test]
fn workers_that_never_touch_cuda_register_nowhere() {
    let Some(python) = host_process::python() else {
        return eprintln!("skipped: there is no python3 here");
    };
    let script = Artefacts::get().source("python_loader.py");
    let host = Host::new(python, &[script.to_str().unwrap(), "watch"]);
    let mut child = host
        .command(Way::Job)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap());
    let watched = loop {
        let mut line = String::new();
        assert_ne!(testbed::read_line(&mut said, &mut line), 0, "it has ended");
        if let Some(pid) = line.trim_end().strip_prefix("watch ") {
            break pid.parse::<u64>().unwrap();
        }
    };
    let status = host.ps();
    let processes: Vec<u64> = status["jobs"]
        .as_array()
        .into_iter()
        .flatten()
        .flat_map(|job| job["processes"].as_array().cloned().unwrap_or_default())
        .filter_map(|process| process["pid"].as_u64())
        .collect();
    assert_eq!(processes, [watched], "{status}");
    // The end of its input is the word to go on.
    drop(child.stdin.take());
    within::read_to_end(&mut said, &mut String::new());
    assert!(within::wait(&mut child, "the program", testbed::PATIENCE).success());
}

/// What it costs to start a program that has nothing to do with CUDA. Reported, not judged: a busy
/// machine may do anything.
#[test]
fn cost_of_a_child_that_never_touches_cuda() {
    let host = Host::new::<&str>("/bin/true", &[]);
    let start = |way| {
        let mut times: Vec<Duration> = (0..40)
            .map(|_| {
                let begun = Instant::now();
                assert!(host.command(way).status_within(testbed::PATIENCE).success());
                begun.elapsed()
            })
            .collect();
        times.sort();
        times[times.len() / 2]
    };
    let (bare, preloaded) = (start(Way::Bare), start(Way::Preloaded));
    println!(
        "a program's start: {} us bare, {} us with the preload library (budget: 1000 us more)",
        bare.as_micros(),
        preloaded.as_micros()
    );
}
