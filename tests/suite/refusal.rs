//! A limit that was asked for is enforced, or the process gets no device; and somebody learns of
//! it.

use std::fs;

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
    assert!(said(&outcome).is_empty(), "{outcome:?}");
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
    assert_eq!(run.answer(), "0");
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
