//! More than two jobs of the hook's own on one GPU, with real processes.

use control::JobState;
use serde_json::Value;
use tests::{Artefacts, Outcome, Sandbox, wait_until};

use super::{Hook, Node, submit};
use crate::quota;

/// A little of a device, again and again, for long enough to be measured.
const LOAD: [&str; 9] = [
    "load",
    "--kernel-us",
    "2000",
    "--burst",
    "3",
    "--pause-us",
    "60000",
    "--for-ms",
    "45000",
];

/// Jobs that the hook has on the node, by its word.
fn running(hook: &Hook) -> Vec<Value> {
    let mut jobs = hook.jobs();
    jobs.retain(|job| job["phase"] == "running");
    jobs
}

/// What the arbiter has promised of its device, to how many jobs that have processes.
fn promised(node: &Node) -> (usize, f64) {
    let jobs = node.sandbox.jobs();
    let there = jobs.iter().filter(|job| {
        !job.processes.is_empty() && !matches!(job.state, JobState::Gone | JobState::Dormant)
    });
    let shares: Vec<f64> = there.filter_map(|job| job.share_asked).collect();
    (shares.len(), shares.iter().sum())
}

#[test]
fn three_processes_share_a_gpu_once_their_pair_was_measured_and_a_killed_hook_keeps_them() {
    // Whatever the host's noise does to their speeds, they stay.
    let mut hook = Hook::with(&["--packer", "trial:jobs=3,margin=-1"]);
    let node = hook.node("a");
    wait_until("the node reports", || hook.is_up(&node).then_some(()));
    for at in 0..4 {
        submit(&hook, &format!("load-{at}"), false, &LOAD);
    }
    let three = |hook: &Hook| {
        let there = running(hook);
        (there.len() == 3 && promised(&node).0 == 3).then_some(there)
    };
    let there = wait_until("three run beside each other", || three(&hook));
    let status = hook.json(&["status", "--json"]);
    let pairs = status["pairs"].as_array().cloned().unwrap_or_default();
    assert_eq!(pairs.len(), 1, "measured before the third came: {status}");
    for job in &there {
        let beside = job["beside_all"].as_array().cloned().unwrap_or_default();
        assert_eq!(beside.len(), 2, "{job}");
    }
    wait_until("each has a third", || {
        let shares = running(&hook);
        let near = |job: &Value| {
            let share = job["share"].as_f64().unwrap_or_default();
            (share - 1.0 / 3.0).abs() < 1e-6
        };
        (shares.len() == 3 && shares.iter().all(near)).then_some(())
    });
    wait_until("and the arbiter knows it", || {
        let (jobs, shares) = promised(&node);
        (jobs == 3 && shares <= 1.0 + 1e-6).then_some(())
    });
    hook.kill();
    hook.start();
    wait_until("the node reports again", || hook.is_up(&node).then_some(()));
    let again = running(&hook);
    let ids = |jobs: &[Value]| -> Vec<Value> { jobs.iter().map(|job| job["id"].clone()).collect() };
    assert_eq!(ids(&again), ids(&there));
    let waiting = hook
        .jobs()
        .into_iter()
        .find(|job| job["phase"] == "waiting");
    let waiting = waiting.expect("three are the most");
    let cancelled = hook.ask(&["cancel", &waiting["id"].to_string()]);
    cancelled.succeeded();
    wait_until("all others are done", || {
        let over = |job: &Value| job["phase"] == "done" || job["id"] == waiting["id"];
        hook.jobs().iter().all(over).then_some(())
    });
    for job in hook.jobs().iter().filter(|job| job["id"] != waiting["id"]) {
        assert_eq!(job["attempts"], 1, "{job}");
    }
}

#[test]
fn parts_of_a_gpu_are_promised_at_once_and_their_quotas_hold() {
    let mut hook = Hook::new();
    let node = hook.node("a");
    wait_until("the node reports", || hook.is_up(&node).then_some(()));
    let program = quota::memory();
    let program = program.to_str().expect("UTF-8");
    // Within its quota, and then beyond it; then it stays until its directory has a file.
    let open = hook.sandbox.path("go");
    let script = format!(
        "(printf 'init\\nalloc plain 268435456\\nalloc plain 1073741824\\n'; \
         while [ ! -e {} ]; do sleep 0.2; done) | {program}",
        open.display()
    );
    let part = |name: &str, share: &str| {
        let words = [
            "submit", "--name", name, "--share", share, "--mem", "1GiB", "--",
        ];
        let words = [&words[..], &["sh", "-c", &script]].concat();
        hook.ask(&words)
    };
    for (name, share) in [("a", "0.25"), ("b", "0.25"), ("c", "0.4"), ("d", "0.2")] {
        part(name, share).succeeded();
    }
    let there = wait_until("three have their parts", || {
        let there = running(&hook);
        (there.len() == 3 && promised(&node).0 == 3).then_some(there)
    });
    let (_, shares) = promised(&node);
    assert!((shares - 0.9).abs() < 1e-6, "{shares}");
    for (job, share) in there.iter().zip([0.25, 0.25, 0.4]) {
        assert_eq!(
            (&job["share"], &job["share_asked"]),
            (&share.into(), &share.into())
        );
    }
    for job in node.sandbox.jobs() {
        let limits: Vec<_> = job
            .devices
            .iter()
            .map(|device| device.mem_limit_bytes)
            .collect();
        assert_eq!(limits, [Some(1 << 30)], "{}", job.name);
    }
    for (share, mem, words) in [
        ("1", Some("1GiB"), "1 of a GPU"),
        ("0.5", None, "--mem"),
        ("0", Some("1GiB"), "above 0"),
        ("nan", Some("1GiB"), "nan"),
        ("0.5", Some("1TiB"), "largest has"),
    ] {
        let mut asked = vec!["submit", "--share", share];
        asked.extend(mem.iter().flat_map(|mem| ["--mem", mem]));
        asked.extend(["--", "true"]);
        let refused: Outcome = hook.ask(&asked);
        assert!(refused.code != Some(0), "{refused:?}");
        assert!(refused.stderr.contains(words), "{words}: {refused:?}");
    }
    hook.kill();
    hook.start();
    wait_until("the node reports again", || hook.is_up(&node).then_some(()));
    assert_eq!(promised(&node).0, 3, "nobody was stopped");
    std::fs::write(&open, "").expect("a file");
    wait_until("all are done", || {
        let done = |job: &Value| job["phase"] == "done";
        hook.jobs().iter().all(done).then_some(())
    });
    let said: Vec<String> = node
        .places()
        .iter()
        .map(|place| std::fs::read_to_string(place.join("stdout")).unwrap_or_default())
        .collect();
    assert_eq!(said.len(), 4, "{said:?}");
    for said in said {
        let answers: Vec<&str> = said.lines().collect();
        assert!(
            answers.iter().any(|answer| answer.starts_with("0 ")),
            "{said}"
        );
        assert!(answers.contains(&quota::OUT_OF_MEMORY), "{said}");
    }
}

#[test]
fn a_bound_that_is_none_is_refused_before_anything_starts() {
    let hook = Hook::new();
    let other = hook.sandbox.path("other");
    for bound in ["0", "1", "65", "-2", "nan", "2.5", "lots"] {
        let mut command = hook.sandbox.sublet(["cluster", "serve", "--state"]);
        command
            .arg(&other)
            .args(["--packer", &format!("trial:jobs={bound}")]);
        let refused = Outcome::of(&mut command);
        assert_eq!(refused.code, Some(125), "{bound}: {refused:?}");
        let words = "a whole number from 2 to 64";
        assert!(refused.stderr.contains(words), "{bound}: {refused:?}");
    }
    assert!(!other.join("hook.redb").exists());
}

#[test]
fn three_processes_share_a_gpu_in_turns_where_their_memory_does_not_fit_at_once() {
    let hook = Hook::with(&["--packer", "trial:jobs=3,margin=-1"]);
    let mut sandbox = Sandbox::new();
    sandbox.set("SUBLET_SIM_CAPACITY", "2GiB");
    let node = hook.node_in(sandbox, "a", "root", &[]);
    wait_until("the node reports", || hook.is_up(&node).then_some(()));
    let program = Artefacts::get().program("train_mlp");
    let program = program.to_str().expect("UTF-8");
    for name in ["a", "b", "c"] {
        let job = [
            "submit",
            "--name",
            name,
            "--kind",
            "train",
            "--mem",
            "1200MiB",
            "--evictable",
        ];
        // It trains the same again and again, and fails where one loss is another than the first.
        let trains = ["--", program, "--ballast", "900MiB", "--min-seconds", "30"];
        let quiet = ["--progress-every", "0"];
        hook.ask(&[&job[..], &trains, &quiet].concat()).succeeded();
    }
    wait_until("three run, of 2 GiB with 2.6", || {
        (running(&hook).len() == 3 && promised(&node).0 == 3).then_some(())
    });
    let jobs = node.sandbox.jobs();
    assert!(jobs.iter().all(|job| job.evictable), "{jobs:?}");
    wait_until("the memory of one has left", || {
        let jobs = node.sandbox.jobs();
        let mut places = jobs.iter().filter_map(|job| job.residence.as_ref());
        places.any(|at| at.moved_out_bytes > 0).then_some(())
    });
    wait_until("all are done", || {
        let over = |job: &Value| job["phase"] == "done";
        hook.jobs().iter().all(over).then_some(())
    });
    for job in hook.jobs() {
        assert_eq!(
            (&job["attempts"], &job["exit_code"]),
            (&1.into(), &0.into()),
            "{job}"
        );
    }
}
