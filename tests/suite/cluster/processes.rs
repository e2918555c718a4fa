//! An attempt ends as a whole: what a job leaves behind, and what a killed runner leaves behind.

use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::*;

/// Processes whose numbers stand in a file, one a line, that still run.
fn alive(file: &Path) -> Vec<u32> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let pids = text.lines().filter_map(|line| line.trim().parse().ok());
    pids.filter(|pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // A zombie has ended; only its parent has not asked yet.
        stat.rsplit(')')
            .next()
            .is_some_and(|rest| !rest.is_empty() && !rest.starts_with(" Z"))
    })
    .collect()
}

fn shell(hook: &Hook, restartable: bool, script: &str) {
    let mut words = vec!["submit", "--name", "shell"];
    if restartable {
        words.push("--restartable");
    }
    words.extend(["--", "sh", "-c", script]);
    hook.ask(&words).succeeded();
}

fn phase(hook: &Hook) -> String {
    hook.phases().pop().unwrap_or_default()
}

/// A node whose arbiter finds no control groups, where this host lets us make one.
fn without_groups(hook: &Hook) -> Option<Node> {
    let hidden = "mount -t tmpfs none /sys/fs/cgroup && exec \"$@\"";
    let around = ["unshare", "--mount", "sh", "-c", hidden, "sh"];
    let mut tried = std::process::Command::new(around[0]);
    tried.args(&around[1..]).arg("true");
    if !tests::programs::exists(around[0]) || Outcome::of(&mut tried).code != Some(0) {
        println!("now: skipped without control groups: this user may not hide them");
        return None;
    }
    Some(hook.node_in(Sandbox::new(), "bare", "root", &around))
}

fn leaves_nothing(hook: &Hook, node: &Node) {
    wait_until("the node reports", || hook.is_up(node).then_some(()));
    let left = node.sandbox.path("left");
    // One of its own session whose parent has ended, and a plain one.
    let script = format!(
        "(setsid sh -c 'echo $$ >> {0}; exec sleep 1000' &); sleep 1000 & echo $! >> {0}; while [ $(wc -l < {0}) -lt 2 ]; do sleep 0.05; done",
        left.display()
    );
    shell(hook, false, &script);
    wait_until("it is done", || (phase(hook) == "done").then_some(()));
    assert_eq!(
        std::fs::read_to_string(&left)
            .unwrap_or_default()
            .lines()
            .count(),
        2
    );
    assert_eq!(alive(&left), [0; 0], "it is over, and so is all of it");
}

fn runs_once(hook: &Hook, node: &Node) {
    wait_until("the node reports", || hook.is_up(node).then_some(()));
    let (left, twice) = (node.sandbox.path("left"), node.sandbox.path("twice"));
    let script = format!(
        "for pid in $(cat {0} 2>/dev/null); do case $(sed -n 's/^State:[[:space:]]*//p' /proc/$pid/status 2>/dev/null) in \
         ''|Z*|X*) ;; *) echo $pid >> {1} ;; esac; done; (setsid sh -c 'echo $$ >> {0}; exec sleep 1000' &); sleep 1000 & echo $! >> {0}; wait",
        left.display(),
        twice.display()
    );
    shell(hook, true, &script);
    let lines = || {
        std::fs::read_to_string(&left)
            .unwrap_or_default()
            .lines()
            .count()
    };
    for attempt in 1..=2 {
        wait_until("it runs", || (lines() == 2 * attempt).then_some(()));
        assert_eq!(alive(&left).len(), 2, "those of this attempt, no others");
        let id = hook.jobs().pop().expect("a job")["id"].clone();
        let record = format!("{id}.{attempt}");
        let runs = node.runs();
        let record = runs
            .iter()
            .find(|run| run.ends_with(&record))
            .expect("its record");
        let runner = wait_until("its runner", || attempts::runner(record));
        // CAST: process ids are positive.
        kill(Pid::from_raw(runner as i32), Signal::SIGKILL).expect("our own process");
    }
    wait_until("it runs again", || (lines() == 6).then_some(()));
    assert!(!twice.exists(), "two attempts ran at the same time");
    hook.ask(&["cancel", "1"]).succeeded();
    wait_until("it is over", || (phase(hook) == "cancelled").then_some(()));
    assert_eq!(alive(&left), [0; 0]);
}

#[test]
fn what_a_job_leaves_behind_ends_with_it() {
    let hook = Hook::new();
    let node = hook.node("a");
    leaves_nothing(&hook, &node);
}

#[test]
fn what_a_job_leaves_behind_ends_with_it_without_control_groups() {
    let hook = Hook::new();
    if let Some(node) = without_groups(&hook) {
        leaves_nothing(&hook, &node);
    }
}

#[test]
fn a_killed_runner_leaves_no_orphans_and_no_attempt_runs_beside_the_next() {
    let hook = Hook::new();
    let node = hook.node("a");
    runs_once(&hook, &node);
}

#[test]
fn a_killed_runner_leaves_no_orphans_without_control_groups() {
    let hook = Hook::new();
    if let Some(node) = without_groups(&hook) {
        runs_once(&hook, &node);
    }
}

#[test]
fn an_endless_output_fills_no_disk() {
    let hook = Hook::new();
    let node = hook.node("a");
    wait_until("the node reports", || hook.is_up(&node).then_some(()));
    // 64 MiB on each output.
    shell(
        &hook,
        false,
        "yes | head -c 67108864; yes | head -c 67108864 >&2; echo the end",
    );
    wait_until("it is done", || (phase(&hook) == "done").then_some(()));
    let place = node.places().pop().expect("where it wrote");
    let files = std::fs::read_dir(&place).expect("a directory").flatten();
    let kept: u64 = files
        .filter_map(|file| file.metadata().ok())
        .map(|meta| meta.len())
        .sum();
    println!("now: {} of 128 MiB are kept", kept >> 20);
    assert!(kept < 20 << 20, "{kept}");
    let stdout = std::fs::read_to_string(place.join("stdout")).expect("its output");
    assert!(stdout.ends_with("the end\n"));
}
