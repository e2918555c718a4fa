//! A limit that was asked for is enforced, or the process gets no device; and somebody learns of
//! it.

use std::fs;

use nix::sys::signal::Signal;
use testbed::CommandWithin as _;
use tests::{Outcome, ProgramRun, Sandbox, programs, wait_until};

/// `socket`, on x86-64.
const SOCKET: &str = "41";
/// `ppoll`, on x86-64.
const PPOLL: &str = "271";
/// `CUDA_ERROR_SYSTEM_NOT_READY`
const NOT_READY: &str = "802";

/// What `refused.c` says about each way, in order.
fn ways(stdout: &str) -> Vec<(&str, &str)> {
    let lines = stdout.lines().filter_map(|line| line.split_once(' '));
    lines.collect()
}

/// Every way to a device is closed; texts and look-ups are not.
#[track_caller]
fn nothing_works(stdout: &str) {
    let ways = ways(stdout);
    assert!(ways.len() > 12, "{stdout}");
    for (way, status) in ways {
        let expected = match way {
            "look-up" | "text" | "version" => "0",
            _ => NOT_READY,
        };
        assert_eq!(status, expected, "{way}: {stdout}");
    }
}

fn refused(sandbox: &Sandbox, flags: &[&str], words: &[&str]) -> Outcome {
    let mut job = sandbox.job(flags, programs::program("refused"));
    Outcome::of(job.args(words)).succeeded()
}

/// What was said besides that the GPU is simulated.
fn said(outcome: &Outcome) -> Vec<&str> {
    let lines = outcome.stderr.lines();
    lines.filter(|line| !line.contains("simulated")).collect()
}

#[test]
fn a_refused_process_is_refused_in_every_call() {
    let sandbox = Sandbox::new();
    let outcome = refused(
        &sandbox,
        &["--mem", "1GiB", "--name", "shut"],
        &["look", "deny", SOCKET, "init", "use"],
    );
    nothing_works(&outcome.stdout);
    assert!(outcome.stdout.contains("early 802"), "{outcome:?}");
    let [line] = said(&outcome)[..] else {
        panic!("not one line: {outcome:?}");
    };
    for words in [
        "`shut` is refused",
        "Operation not permitted",
        "--on-refusal open",
    ] {
        assert!(line.contains(words), "{words}: {line}");
    }
}

#[test]
fn the_children_of_a_refused_process_are_refused() {
    let sandbox = Sandbox::new();
    let words = ["deny", SOCKET, "init", "fork", "init", "use"];
    let outcome = refused(&sandbox, &["--mem", "1GiB"], &words);
    nothing_works(&outcome.stdout);
    assert_eq!(said(&outcome).len(), 1, "{outcome:?}");
}

#[test]
fn a_limit_on_share_or_strictness_refuses_too() {
    for flags in [&["--share-max", "0.5"][..], &["--strict"]] {
        let sandbox = Sandbox::new();
        let outcome = refused(&sandbox, flags, &["deny", SOCKET, "init"]);
        assert_eq!(outcome.stdout, "init 802\n", "{flags:?}: {outcome:?}");
    }
}

#[test]
fn on_refusal_open_runs_without_limits_and_says_so() {
    for flags in [
        &["--mem", "1GiB", "--on-refusal", "open"][..],
        &["--share", "0.5"],
    ] {
        let sandbox = Sandbox::new();
        let outcome = refused(&sandbox, flags, &["deny", SOCKET, "init", "use"]);
        let ways = ways(&outcome.stdout);
        assert!(ways.contains(&("alloc", "0")), "{flags:?}: {outcome:?}");
        let [line] = said(&outcome)[..] else {
            panic!("not one line: {outcome:?}");
        };
        assert!(line.contains("without limits"), "{line}");
    }
}

#[test]
fn a_token_that_no_job_has_is_refused() {
    let sandbox = Sandbox::new();
    let mut job = sandbox.job(&["--mem", "1GiB"], "env");
    job.arg("SUBLET_TOKEN=0123456789abcdef0123456789abcdef")
        .arg(programs::program("refused"))
        .args(["init", "use"]);
    let outcome = Outcome::of(&mut job).succeeded();
    nothing_works(&outcome.stdout);
    assert_eq!(said(&outcome).len(), 1, "{outcome:?}");
}

#[test]
fn an_environment_without_socket_or_token_is_refused() {
    for lost in ["SUBLET_TOKEN", "SUBLET_SOCKET"] {
        let sandbox = Sandbox::new();
        let mut job = sandbox.job(&["--mem", "1GiB"], "env");
        job.args(["-u", lost])
            .arg(programs::program("refused"))
            .args(["init", "use"]);
        let outcome = Outcome::of(&mut job).succeeded();
        nothing_works(&outcome.stdout);
        assert_eq!(said(&outcome).len(), 1, "{lost}: {outcome:?}");
    }
}

#[test]
fn few_descriptors_are_enough_or_the_process_is_refused() {
    let limits = ["4", "5", "6", "7", "8", "9", "10", "12", "16", "32"];
    let (mut governed, mut journaled) = (0, 0);
    for limit in limits {
        let sandbox = Sandbox::new();
        let words = ["descriptors", limit, "init", "use"];
        let outcome = refused(&sandbox, &["--mem", "1GiB"], &words);
        let ways = ways(&outcome.stdout);
        let init = ways[0].1;
        match init {
            "0" => {
                assert!(ways.contains(&("alloc", "2")), "{limit}: {outcome:?}");
                governed += 1;
            }
            NOT_READY => {
                nothing_works(&outcome.stdout);
                let [line] = said(&outcome)[..] else {
                    panic!("{limit}: not one line: {outcome:?}");
                };
                assert!(line.contains("ulimit -n"), "{limit}: {line}");
                // Where the arbiter could be reached at all, it knows.
                if line.contains("could be taken") {
                    wait_until("the journal says so", || {
                        let reported = |event: &control::Event| event.kind == "refused";
                        sandbox.events().iter().any(reported).then_some(())
                    });
                    journaled += 1;
                }
            }
            // The driver itself needs some.
            _ => assert!(!ways.contains(&("alloc", "0")), "{limit}: {outcome:?}"),
        }
    }
    println!("now: {journaled} refusals in the journal");
    println!("now: governed with {governed} of the limits {limits:?}");
    assert!(governed >= 2, "{governed} of {limits:?}");
}

#[test]
fn a_process_that_may_not_wait_for_descriptors_is_governed() {
    let sandbox = Sandbox::new();
    let outcome = refused(
        &sandbox,
        &["--mem", "1GiB"],
        &["deny", PPOLL, "init", "use"],
    );
    let ways = ways(&outcome.stdout);
    assert!(ways.contains(&("init", "0")), "{outcome:?}");
    assert!(ways.contains(&("alloc", "2")), "{outcome:?}");
    // What `sublet run` says of its limit, and nothing else.
    let [line] = said(&outcome)[..] else {
        panic!("not one line: {outcome:?}");
    };
    assert!(
        line.contains("was refused memory 2 times by its limit of 1GiB"),
        "{outcome:?}"
    );
}

#[test]
fn an_arbiter_that_is_being_restarted_is_waited_for() {
    let sandbox = Sandbox::new();
    let mut first = sandbox.arbiter();
    let flags = ["--mem", "1GiB", "--name", "patient"];
    let mut run = ProgramRun::start(&mut sandbox.job(&flags, programs::program("memory")));
    // It has started, and has yet to attach.
    run.ask("pid");
    first.kill();
    assert_eq!(first.wait().signal, Some(9));
    run.send("init");
    std::thread::sleep(std::time::Duration::from_millis(300));
    let second = sandbox.arbiter();
    let answer = run.answer();
    assert_eq!(answer, "0", "{:?}", run.finish());
    wait_until("it is one of the job's processes", || {
        sandbox
            .job_status("patient")
            .filter(|job| job.processes.len() == 1)
    });
    assert_eq!(run.ask(&format!("alloc plain {}", 2u64 << 30)), "2 -1");
    run.finish().succeeded();
    drop(second);
}

#[test]
fn a_file_of_the_programs_own_is_never_written_to() {
    let sandbox = Sandbox::new();
    let file = sandbox.path("mine");
    let name = file.to_str().expect("a path");
    let words = ["stderr", name, "deny", SOCKET, "init", "use"];
    let outcome = refused(&sandbox, &["--mem", "1GiB"], &words);
    nothing_works(&outcome.stdout);
    assert_eq!(fs::read_to_string(&file).expect("the file"), "");
    assert!(said(&outcome).is_empty(), "{outcome:?}");
}

/// Whether a mount namespace of one's own can be made here.
fn mounts() -> bool {
    let script = "unshare --user --map-root-user --mount sh -c 'mount -t tmpfs none /tmp'";
    let mut command = std::process::Command::new("sh");
    let done = command
        .args(["-c", script])
        .output_within(testbed::PATIENCE);
    done.status.success()
}

#[test]
fn a_runtime_directory_under_another_file_system_refuses_the_process() {
    if !mounts() {
        return println!("now: skipped, no mount namespace can be made here");
    }
    for (flags, alloc) in [
        (&["--mem", "1GiB"][..], None),
        (&["--mem", "1GiB", "--on-refusal", "open"], Some("0")),
    ] {
        let sandbox = Sandbox::new();
        let run = sandbox.path("run");
        let script = format!(
            "mount -t tmpfs none '{}' && exec '{}' init use",
            run.display(),
            programs::program("refused").display()
        );
        let mut job = sandbox.job(flags, "unshare");
        job.args(["--user", "--map-root-user", "--mount", "sh", "-c", &script]);
        let outcome = Outcome::of(&mut job).succeeded();
        let [line] = said(&outcome)[..] else {
            panic!("{flags:?}: not one line: {outcome:?}");
        };
        assert!(line.contains("no arbiter answers"), "{line}");
        match alloc {
            None => nothing_works(&outcome.stdout),
            Some(alloc) => {
                assert!(line.contains("without limits"), "{line}");
                let ways = ways(&outcome.stdout);
                assert!(ways.contains(&("alloc", alloc)), "{outcome:?}");
            }
        }
    }
}

#[test]
fn an_arbiter_that_stands_still_longer_than_a_handshake_governs_or_refuses() {
    let sandbox = Sandbox::new();
    let arbiter = sandbox.arbiter();
    let start = |flags: &[&str]| {
        let mut run = ProgramRun::start(&mut sandbox.job(flags, programs::program("memory")));
        run.ask("pid");
        run
    };
    let mut governed = start(&["--name", "governed", "--mem", "1GiB"]);
    let mut refused = start(&["--name", "refused", "--mem", "1GiB"]);
    let mut open = start(&["--name", "open", "--mem", "1GiB", "--on-refusal", "open"]);
    arbiter.signal(Signal::SIGSTOP);
    refused.send("init");
    open.send("init");
    // Longer than one handshake takes at most.
    assert_eq!(open.answer(), "0");
    assert_eq!(open.ask(&format!("alloc plain {}", 2u64 << 30)), "0 0");
    // And longer than an arbiter is waited for at all.
    std::thread::sleep(std::time::Duration::from_secs(8));
    governed.send("init");
    assert_eq!(refused.answer(), NOT_READY);
    arbiter.signal(Signal::SIGCONT);
    assert_eq!(governed.answer(), "0");
    assert_eq!(governed.ask(&format!("alloc plain {}", 2u64 << 30)), "2 -1");
    wait_until("it is one process, and those that gave up are none", || {
        let processes = |name| sandbox.job_status(name).map(|job| job.processes.len());
        (processes("governed") == Some(1)
            && processes("refused") == Some(0)
            && processes("open") == Some(0))
        .then_some(())
    });
    let events = sandbox.events();
    assert!(
        events.iter().any(|event| event.kind == "stalled"),
        "{events:?}"
    );
    for name in ["refused", "open"] {
        let reported = |event: &&control::Event| event.kind == "refused" && event.job == name;
        let event = events.iter().find(reported);
        let event = event.unwrap_or_else(|| panic!("{name}: {events:?}"));
        assert!(event.message.contains("hung up"), "{event:?}");
    }
    assert_eq!(refused.ask("init"), NOT_READY, "it stays refused");
    for (run, word) in [(refused, "is refused"), (open, "without limits")] {
        let outcome = run.finish();
        let [line] = said(&outcome)[..] else {
            panic!("not one line: {outcome:?}");
        };
        assert!(line.contains(word) && line.contains("in time"), "{line}");
    }
    governed.finish().succeeded();
}

#[test]
fn an_engine_s_own_command_takes_the_place_of_one_that_is_refused() {
    let sandbox = Sandbox::new();
    let instead = [
        "--refused=/bin/sh",
        "--refused=-c",
        "--refused=echo \"$SUBLET_REFUSED|$*|$LD_PRELOAD|$$\"; exit 3",
        "--refused=sh",
    ];
    let run = |flags: &[&str]| {
        let mut job = sandbox.job(&[&instead[..], flags].concat(), "echo");
        Outcome::of(job.args(["governed", "more words"]))
    };
    // Without an arbiter none is started for it.
    let outcome = run(&["--mem", "1GiB"]);
    assert_eq!(outcome.code, Some(3), "{outcome:#?}");
    assert!(
        outcome.stdout.starts_with("this node has no arbiter: "),
        "{outcome:#?}"
    );
    assert!(
        outcome.stdout.contains("|echo governed more words||"),
        "it is preloaded, or has other words: {outcome:#?}"
    );
    assert!(sandbox.control().is_err(), "an arbiter was started");

    let _arbiter = sandbox.arbiter();
    assert_eq!(
        run(&["--mem", "1GiB"]).succeeded().stdout,
        "governed more words\n"
    );
    for (flags, reason) in [
        (["--mem", "9999GiB"], "the arbiter refused the job: "),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
    ] {
        let outcome = run(&flags);
        assert_eq!(outcome.code, Some(3), "{outcome:#?}");
        assert!(outcome.stdout.contains(reason), "{outcome:#?}");
        assert_eq!(outcome.stdout.lines().count(), 1, "{outcome:#?}");
    }
    // A command that is not there is a reason like others.
    let mut job = sandbox.job(&instead, "no-such-program");
    let outcome = Outcome::of(&mut job);
    assert!(outcome.stdout.contains("no-such-program"), "{outcome:#?}");
    let mut job = sandbox.job(&["--refused=/nowhere/sh", "--mem", "9999GiB"], "echo");
    let outcome = Outcome::of(&mut job);
    assert_eq!(outcome.code, Some(127), "{outcome:#?}");
    assert!(outcome.stderr.contains("/nowhere/sh"), "{outcome:#?}");
}
