//! `sublet demo`: what a stranger runs first.

use std::fs;
use std::path::Path;
use std::process::Command;

use nix::sys::signal::Signal;
use tests::{Outcome, Running, Sandbox, wait_until};

/// Its folder for temporary files, in which it is to leave nothing.
fn demo(sandbox: &Sandbox, flags: &[&str]) -> Command {
    let place = sandbox.path("tmp");
    fs::create_dir_all(&place).unwrap();
    let mut words = vec!["demo"];
    words.extend(flags);
    let mut command = sandbox.sublet(words);
    command.env("TMPDIR", place);
    command
}

/// Processes whose environment names a place in this folder: the demonstration's jobs and arbiter.
fn processes_of(place: &Path) -> Vec<u32> {
    let place = place.to_str().unwrap().as_bytes();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse() else {
            continue;
        };
        let names = |file: &str| {
            fs::read(entry.path().join(file))
                .is_ok_and(|text| text.windows(place.len()).any(|part| part == place))
        };
        if pid != std::process::id() && (names("environ") || names("cmdline")) {
            found.push(pid);
        }
    }
    found
}

#[test]
fn two_jobs_train_and_a_third_is_refused_memory_and_nothing_is_left() {
    let sandbox = Sandbox::new();
    let outcome = Outcome::of(&mut demo(&sandbox, &["--json", "--seconds", "5"]));
    // On a host that is busy the shares may be off, which the command says; all else holds.
    let report = outcome.json();
    let broken = report["broken"].as_array().unwrap();
    for line in broken {
        assert!(
            line.as_str().unwrap().contains("asked for a share"),
            "{outcome:#?}"
        );
    }
    let code = i32::from(!broken.is_empty());
    assert_eq!(outcome.code, Some(code), "{outcome:#?}");
    assert_eq!(
        (&report["schema"], &report["simulated"]),
        (&1.into(), &true.into())
    );
    let jobs = report["jobs"].as_array().unwrap();
    let exits: Vec<_> = jobs
        .iter()
        .map(|job| (job["name"].as_str().unwrap(), job["exit"].as_i64().unwrap()))
        .collect();
    assert_eq!(
        exits,
        [("steady", 0), ("modest", 0), ("greedy", 2)],
        "{report:#}"
    );
    assert!(
        jobs[2]["said"]
            .as_str()
            .unwrap()
            .contains("out of device memory"),
        "{report:#}"
    );
    assert_eq!(jobs[0]["loss"], jobs[1]["loss"], "{report:#}");
    assert!(
        jobs[0]["got"].as_f64() > jobs[1]["got"].as_f64(),
        "{report:#}"
    );
    let left: Vec<_> = fs::read_dir(sandbox.path("tmp")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    // The arbiter's files go a moment before its process does.
    wait_until("everything has ended", || {
        processes_of(&sandbox.path("tmp")).is_empty().then_some(())
    });
}

/// The demonstration once both of its jobs and their arbiter run.
fn begun(sandbox: &Sandbox) -> Running {
    let running = Running::start(&mut demo(sandbox, &["--seconds", "3600"]));
    wait_until("jobs and arbiter run", || {
        // The command itself has the folder in its environment, too.
        (processes_of(&sandbox.path("tmp")).len() >= 4).then_some(())
    });
    running
}

#[test]
fn ctrl_c_ends_the_jobs_and_leaves_nothing() {
    let sandbox = Sandbox::new();
    let running = begun(&sandbox);
    running.signal(Signal::SIGINT);
    let outcome = running.wait();
    assert_eq!(outcome.code, Some(130), "{outcome:#?}");
    assert!(
        outcome
            .stderr
            .ends_with("sublet: interrupted; the jobs were ended\n"),
        "{outcome:#?}"
    );
    let left: Vec<_> = fs::read_dir(sandbox.path("tmp")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    wait_until("everything has ended", || {
        processes_of(&sandbox.path("tmp")).is_empty().then_some(())
    });
}

#[test]
fn jobs_end_with_a_demonstration_that_is_killed() {
    let sandbox = Sandbox::new();
    let mut running = begun(&sandbox);
    running.kill();
    running.wait();
    wait_until("jobs and arbiter end", || {
        processes_of(&sandbox.path("tmp")).is_empty().then_some(())
    });
}

#[test]
fn wrong_words_and_places_are_named() {
    let sandbox = Sandbox::new();
    let outcome = Outcome::of(&mut demo(&sandbox, &["--seconds", "1"]));
    assert_eq!(outcome.code, Some(125));
    assert!(
        outcome
            .stderr
            .contains("`1` is no number of seconds from 5 to 3600"),
        "{outcome:#?}"
    );
    let outcome = Outcome::of(demo(&sandbox, &[]).env("TMPDIR", "/nowhere/at/all"));
    assert_eq!(outcome.code, Some(125));
    assert!(
        outcome
            .stderr
            .contains("cannot make a folder for temporary files"),
        "{outcome:#?}"
    );
    assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:#?}");
}
