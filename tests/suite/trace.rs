//! `sublet trace` beside real jobs: the file is what viewers take, its slices have the device time
//! that the arbiter charged, and nothing that is missing is kept quiet.

use std::collections::BTreeMap;
use std::path::Path;

use nix::sys::signal::Signal;
use serde_json::Value;
use tests::{Artefacts, Outcome, Running, Sandbox, wait_until};

fn read(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).expect("the trace");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text:.400}"))
}

fn events(trace: &Value) -> &[Value] {
    trace["traceEvents"].as_array().expect("events")
}

fn number(value: &Value) -> f64 {
    value
        .as_f64()
        .unwrap_or_else(|| panic!("{value} is no number"))
}

/// Every event has what viewers need; on a track nothing overlaps, and everything is in order.
#[track_caller]
fn is_well_formed(trace: &Value) {
    assert!(trace["baseTimeNanoseconds"].as_u64().is_some(), "no base");
    assert!(trace["otherData"]["lost_spans"].as_u64().is_some());
    let mut named = BTreeMap::new();
    let mut ends: BTreeMap<(u64, u64), f64> = BTreeMap::new();
    for event in events(trace) {
        let word = |name: &str| {
            event[name]
                .as_str()
                .unwrap_or_else(|| panic!("{name}: {event}"))
        };
        let whole = |name: &str| {
            event[name]
                .as_u64()
                .unwrap_or_else(|| panic!("{name}: {event}"))
        };
        let track = (whole("pid"), whole("tid"));
        let (from, lasts) = (number(&event["ts"]), number(&event["dur"]));
        assert!(from >= 0.0 && lasts >= 0.0, "{event}");
        assert!(
            event["args"].is_object() && !word("name").is_empty(),
            "{event}"
        );
        match word("ph") {
            "M" => {
                assert!(
                    matches!(word("name"), "process_name" | "thread_name"),
                    "{event}"
                );
                assert!(event["args"]["name"].is_string(), "{event}");
                named.entry(track).or_insert(0);
            }
            "X" => {
                assert!(named.contains_key(&track), "its track has no name: {event}");
                let end = ends.entry(track).or_default();
                // A nanosecond, for what a double makes of it.
                assert!(from >= *end - 0.002, "{event} begins before {end}");
                *end = from + lasts;
            }
            "i" => assert!(named.contains_key(&track), "its track has no name: {event}"),
            other => panic!("{other}: {event}"),
        }
    }
}

fn spin(sandbox: &Sandbox, name: &str, share: &str, more: &[&str]) -> Running {
    let flags = [&["--name", name, "--share", share], more].concat();
    let mut command = sandbox.job(&flags, Artefacts::get().program("spin"));
    // Longer than any test waits; the test ends it.
    command.args(["--kernel-us", "200", "--seconds", "600", "--mem", "64MiB"]);
    Running::start(&mut command)
}

fn wait_for_work(sandbox: &Sandbox, names: &[&str]) {
    for name in names {
        wait_until("it is at work", || {
            let job = sandbox.job_status(name)?;
            (job.device_time_ns > 50_000_000).then_some(())
        });
    }
}

/// What is written so far, under the name that the file has until it ends.
fn so_far(sandbox: &Sandbox) -> Option<String> {
    let mut entries = std::fs::read_dir(sandbox.path("")).ok()?.flatten();
    let is_it = |entry: &std::fs::DirEntry| {
        let name = entry.file_name();
        name.as_encoded_bytes().starts_with(b".t.json")
    };
    std::fs::read_to_string(entries.find(is_it)?.path()).ok()
}

/// Waits until a trace runs: what happens from here on is in it.
fn wait_for_trace(sandbox: &Sandbox, job: &str) {
    wait_until("a change of the job is in the trace", || {
        let set = ["set", job, "--share", "0.4"];
        Outcome::of(&mut sandbox.sublet(set)).succeeded();
        so_far(sandbox)?.contains("\"job changed\"").then_some(())
    });
}

fn device_us(sandbox: &Sandbox, name: &str) -> f64 {
    let job = sandbox.job_status(name).expect("a job");
    // CAST: below 2^53.
    job.device_time_ns as f64 / 1e3
}

/// Device time of a job in the spans of these kinds.
fn in_spans(trace: &Value, job: &str, kinds: &[&str]) -> f64 {
    let of = events(trace).iter().filter(|event| {
        event["args"]["job"] == job && kinds.iter().any(|kind| event["name"] == *kind)
    });
    of.map(|event| number(&event["args"]["device_us"])).sum()
}

#[test]
fn two_jobs_have_their_slices_with_the_device_time_that_was_charged() {
    let sandbox = Sandbox::exclusive();
    let _arbiter = sandbox.arbiter();
    let _a = spin(&sandbox, "a", "0.75", &[]);
    let _b = spin(&sandbox, "b", "0.25", &[]);
    wait_for_work(&sandbox, &["a", "b"]);
    let before = ["a", "b"].map(|name| device_us(&sandbox, name));
    let mut command = sandbox.sublet(["trace", "-o", "t.json", "--for", "2s"]);
    let outcome = Outcome::of(&mut command).succeeded();
    assert!(outcome.stdout.starts_with("t.json: "), "{outcome:?}");
    assert_eq!(outcome.stderr, "", "{outcome:?}");
    let after = ["a", "b"].map(|name| device_us(&sandbox, name));
    let trace = read(&sandbox.path("t.json"));
    is_well_formed(&trace);

    let accounts = trace["otherData"]["accounts"].as_array().expect("accounts");
    let mut shares = Vec::new();
    for (at, job) in ["a", "b"].iter().enumerate() {
        let account = accounts
            .iter()
            .find(|one| one["job"] == *job)
            .expect("its account");
        let charged = number(&account["charged_us"]);
        let spans = in_spans(&trace, job, &["slice", "drain"]);
        // By the account of the same run, to the rounding of the file.
        assert!(
            (spans - number(&account["in_spans_us"])).abs() < 1.0,
            "{job}: {spans}, {account}"
        );
        assert!(
            (spans - charged).abs() <= 0.03 * charged + 1.0,
            "{job}: {spans}, {account}"
        );
        assert!(
            charged > 0.0 && charged <= after[at] - before[at] + 1.0,
            "{job}: {account}"
        );
        let waits = events(&trace).iter().filter(|event| {
            event["name"] == "wait" && event["args"]["job"] == *job && number(&event["dur"]) > 0.0
        });
        assert!(waits.count() > 0, "{job} has waited for the other");
        shares.push(spans);
    }
    println!(
        "now: shares 0.75 and 0.25 are {:.3} to 1 in the trace",
        shares[0] / shares[1]
    );
    // Nothing is missing although many polls were made.
    assert_eq!(trace["otherData"]["lost_spans"], 0);
    let names = |what: &str| {
        let all = events(&trace).iter().filter(|event| event["name"] == what);
        all.filter_map(|event| event["args"]["name"].as_str())
            .collect::<Vec<_>>()
    };
    assert!(
        names("process_name")
            .iter()
            .any(|name| name.starts_with("GPU 0 GPU-"))
    );
    assert!(names("thread_name").contains(&"a: device"));
}

#[test]
fn an_eviction_and_a_restore_are_one_span_each_and_a_job_can_be_had_by_itself() {
    let sandbox = Sandbox::exclusive();
    let _arbiter = sandbox.arbiter();
    let flags = ["--mem", "1GiB", "--evictable", "--host-memory", "1GiB"];
    let _a = spin(&sandbox, "a", "0.5", &flags);
    let _b = spin(&sandbox, "b", "0.5", &flags);
    wait_for_work(&sandbox, &["a", "b"]);
    let words = [
        "trace", "--output", "t.json", "--for", "10m", "--job", "b", "--device", "0",
    ];
    let tracing = Running::start(&mut sandbox.sublet(words));
    wait_for_trace(&sandbox, "b");
    let busy = |name: &str| sandbox.job_status(name).map_or(0, |job| job.device_time_ns);
    let then = busy("b");
    wait_until("it has run meanwhile", || {
        (busy("b") > then + 100_000_000).then_some(())
    });
    Outcome::of(&mut sandbox.sublet(["evict", "b"])).succeeded();
    Outcome::of(&mut sandbox.sublet(["restore", "b"])).succeeded();
    tracing.signal(Signal::SIGINT);
    let outcome = tracing.wait().succeeded();
    assert!(outcome.stdout.contains("t.json: "), "{outcome:?}");
    let trace = read(&sandbox.path("t.json"));
    is_well_formed(&trace);
    let of = |name: &str| -> Vec<&Value> {
        let all = events(&trace).iter().filter(|event| event["ph"] == "X");
        all.filter(|event| event["name"] == name).collect()
    };
    let (evictions, restores) = (of("evict"), of("restore"));
    assert_eq!(
        (evictions.len(), restores.len()),
        (1, 1),
        "{evictions:?} {restores:?}"
    );
    assert!(
        number(&evictions[0]["args"]["copied_bytes"]) > 0.0,
        "{evictions:?}"
    );
    let end = number(&evictions[0]["ts"]) + number(&evictions[0]["dur"]);
    assert!(number(&restores[0]["ts"]) >= end - 0.002);
    assert!(!of("slice").is_empty());
    for event in events(&trace)
        .iter()
        .filter(|event| event["args"]["job"].is_string())
    {
        assert_eq!(event["args"]["job"], "b", "{event}");
    }
    let is_said = events(&trace)
        .iter()
        .any(|event| event["ph"] == "i" && event["name"] == "evicted");
    assert!(is_said, "the journal's line is beside it");
    assert!(
        std::fs::read_dir(sandbox.path(""))
            .expect("a directory")
            .flatten()
            .all(|entry| { !entry.file_name().as_encoded_bytes().starts_with(b".t.json") }),
        "nothing is left beside it"
    );
}

#[test]
fn an_arbiter_that_dies_and_is_replaced_leaves_a_gap_that_is_said() {
    let sandbox = Sandbox::exclusive();
    let mut arbiter = sandbox.arbiter();
    let _a = spin(&sandbox, "a", "0.5", &[]);
    wait_for_work(&sandbox, &["a"]);
    let mut tracing =
        Running::start(&mut sandbox.sublet(["trace", "-o", "t.json", "--for", "10m"]));
    wait_for_trace(&sandbox, "a");
    arbiter.kill();
    arbiter.wait();
    let _next = sandbox.arbiter();
    wait_for_work(&sandbox, &["a"]);
    wait_until("the other timeline is noticed", || {
        so_far(&sandbox)?
            .contains("another timeline begins")
            .then_some(())
    });
    assert!(!tracing.has_ended());
    tracing.signal(Signal::SIGTERM);
    let outcome = tracing.wait().succeeded();
    assert!(
        outcome.stderr.contains("another timeline began"),
        "{outcome:?}"
    );
    let trace = read(&sandbox.path("t.json"));
    is_well_formed(&trace);
    let has = |name: &str| events(&trace).iter().any(|event| event["name"] == name);
    assert!(has("another timeline begins"), "{trace}");
}

#[test]
fn what_cannot_be_traced_is_said_before_anything_is_written() {
    let sandbox = Sandbox::exclusive();
    let error = |args: &[&str], words: &[&str]| {
        let outcome = Outcome::of(&mut sandbox.sublet([&["trace"], args].concat()));
        assert_eq!(outcome.code, Some(125), "{outcome:?}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
        for word in words {
            assert!(outcome.stderr.contains(word), "{word}: {outcome:?}");
        }
    };
    error(&["-o", "t.json"], &["nothing to trace", "no arbiter"]);
    let _arbiter = sandbox.arbiter();
    error(&["-o", "t.json"], &["no device"]);
    let _a = spin(&sandbox, "a", "0.5", &[]);
    wait_for_work(&sandbox, &["a"]);
    error(&["-o", "t.json", "--job", "c"], &["`c`", "running: a"]);
    error(&["-o", "t.json", "--device", "7"], &["`7`", "1 are known"]);
    error(&["-o", "no/such/t.json"], &["no/such/t.json"]);
    error(&["-o", "run"], &["run", "name of a file"]);
    let left = std::fs::read_dir(sandbox.path(""))
        .expect("a directory")
        .flatten();
    let mut left = left.map(|entry| entry.file_name());
    assert!(left.all(|name| !name.to_string_lossy().contains("t.json")));
}

/// A limit on the size of files stands for a full disk.
#[test]
fn a_full_disk_is_said_and_leaves_the_part_that_fitted() {
    let sandbox = Sandbox::exclusive();
    let _arbiter = sandbox.arbiter();
    let _a = spin(&sandbox, "a", "0.75", &[]);
    let _b = spin(&sandbox, "b", "0.25", &[]);
    wait_for_work(&sandbox, &["a", "b"]);
    // In blocks of 1024 bytes; a write beyond it is an error and no signal.
    let script = "trap '' XFSZ; ulimit -f 40; exec \"$0\" trace -o t.json --for 10m";
    let mut command = sandbox.command("bash");
    command
        .args(["-c", script])
        .arg(Artefacts::get().program("sublet"));
    let outcome = Outcome::of(&mut command);
    assert_eq!(outcome.code, Some(125), "{outcome:?}");
    assert!(outcome.stderr.contains("t.json ends early"), "{outcome:?}");
    let trace = read(&sandbox.path("t.json"));
    is_well_formed(&trace);
    assert_eq!(trace["otherData"]["cut_off"], true);
    assert!(events(&trace).len() > 10, "{}", events(&trace).len());
}
