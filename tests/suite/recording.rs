//! `sublet record` and `sublet replay`: what a job called comes back, whatever happens to the job,
//! to the file and to the disk; and a replay is a program like any other.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use nix::sys::signal::Signal;
use serde_json::Value;
use tests::{Artefacts, Outcome, Running, Sandbox, programs, wait_until};

fn record(sandbox: &Sandbox, name: &str, flags: &[&str], program: &Path) -> Command {
    let mut command = sandbox.sublet(["record", "--sim", "-o", name]);
    command.current_dir(sandbox.path(""));
    command.args(flags).arg("--").arg(program);
    command
}

fn replay(sandbox: &Sandbox, name: &str, flags: &[&str]) -> Command {
    let mut command = sandbox.sublet(["replay", name]);
    command.current_dir(sandbox.path("")).args(flags);
    command
}

#[track_caller]
fn show(sandbox: &Sandbox, name: &str) -> Value {
    let flags = ["--show", "--json"];
    Outcome::of(&mut replay(sandbox, name, &flags))
        .succeeded()
        .json()
}

fn count(shown: &Value, of: &str) -> u64 {
    shown["recorded"][of].as_u64().expect("a count")
}

/// A block of the file: type and payload.
fn blocks(path: &Path) -> Vec<(u32, Vec<u8>)> {
    let bytes = fs::read(path).expect("a recording");
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let mut at = 24 + word(12) as usize;
    let mut found = Vec::new();
    while at + 16 <= bytes.len() {
        let length = word(at + 8) as usize;
        // The last one may be in the middle of being written.
        let Some(payload) = bytes.get(at + 16..at + 16 + length) else {
            break;
        };
        found.push((word(at + 4), payload.to_vec()));
        at += 16 + length;
    }
    found
}

/// What was launched, in order: kernel, blocks, threads and shared memory, stream; of a graph its
/// nodes. By the page that describes the format, and by nothing of ours.
fn launches(path: &Path) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    let mut shapes = std::collections::BTreeMap::new();
    let mut graphs: std::collections::BTreeMap<u32, String> = std::collections::BTreeMap::new();
    let mut found = Vec::new();
    for (kind, payload) in blocks(path) {
        if kind == 2 {
            let mut rest = payload.as_slice();
            while let [a, b, c, d, low, high, more @ ..] = rest {
                assert_eq!(u32::from_le_bytes([*a, *b, *c, *d]) as usize, names.len());
                let (name, more) = more.split_at(usize::from(u16::from_le_bytes([*low, *high])));
                names.push(String::from_utf8(name.to_vec()).unwrap());
                rest = more;
            }
        }
        for record in payload.chunks(64).filter(|_| kind == 1) {
            let word = |at: usize| u64::from_le_bytes(record[at..at + 8].try_into().unwrap());
            let half = |at: usize| u32::from_le_bytes(record[at..at + 4].try_into().unwrap());
            let (stream, object) = (half(40), half(44));
            match record[0] {
                3 => {
                    let name = &names[stream as usize];
                    let (a, b, block) = (word(48), word(56), word(24));
                    shapes.insert(object, format!("{name} {a:x} {b:x} {block:x}"));
                }
                4 => found.push((word(8), format!("{} in {stream}", shapes[&object]))),
                6 => {
                    let of = match record[3] {
                        0 => shapes[&stream].clone(),
                        other => format!("type {other} {}", word(56)),
                    };
                    let text = graphs.entry(object).or_default();
                    *text += &format!("[{} {of}]", word(48));
                }
                7 => {
                    *graphs.entry(object).or_default() += &format!("[{} to {}]", word(48), word(56))
                }
                9 => found.push((word(8), format!("graph {} in {stream}", graphs[&object]))),
                _ => {}
            }
        }
    }
    found.sort();
    found.into_iter().map(|(_, launch)| launch).collect()
}

/// Records, replays and records the replay: the same launches.
#[track_caller]
fn comes_back(sandbox: &Sandbox, program: &str, words: &[&str], at_least: usize) -> Value {
    let mut command = record(sandbox, "a.slr", &[], &Artefacts::get().program(program));
    Outcome::of(command.args(words)).succeeded();
    let shown = show(sandbox, "a.slr");
    assert_eq!(shown["cut"], Value::Null, "{shown}");
    assert_eq!(shown["end"]["reason"], "command-ended", "{shown}");
    assert_eq!(shown["end"]["lost"], 0, "{shown}");
    let sublet = Artefacts::get().dir().join("sublet");
    let mut again = record(sandbox, "b.slr", &[], &sublet);
    Outcome::of(again.args(["replay", "a.slr"])).succeeded();
    let (first, second) = (
        launches(&sandbox.path("a.slr")),
        launches(&sandbox.path("b.slr")),
    );
    assert!(first.len() >= at_least, "{} launches", first.len());
    assert!(first == second, "{program}: {first:#?} {second:#?}");
    shown
}

#[test]
fn a_replay_launches_what_the_training_did() {
    let sandbox = Sandbox::new();
    let shown = comes_back(&sandbox, "train_mlp", &["--epochs", "1"], 300);
    assert!(count(&shown, "launches") >= 300, "{shown}");
    assert!(
        shown["recorded"]["device_s"].as_f64() > Some(0.0),
        "{shown}"
    );
    assert!(count(&shown, "copies") > 0, "{shown}");
    assert_eq!(shown["provenance"]["command"], "train_mlp");
    assert_eq!(shown["provenance"]["simulated"], true);
    assert!(
        shown["devices"][0]["name"]
            .as_str()
            .unwrap()
            .contains("simulated")
    );
}

#[test]
fn a_replay_makes_the_graphs_that_the_program_captured() {
    let sandbox = Sandbox::new();
    let words = ["--requests", "20", "--nodes", "3", "--pause-us", "0"];
    let shown = comes_back(&sandbox, "graph_loop", &words, 22);
    // What was captured is in the graph, and nowhere else.
    assert_eq!(count(&shown, "launches"), 2, "{shown}");
    assert_eq!(count(&shown, "graph_launches"), 20, "{shown}");
    let device_s = shown["recorded"]["device_s"].as_f64().unwrap();
    assert!(device_s > 20.0 * 3.0 * 0.000_200, "{shown}");
}

#[test]
fn a_replay_serves_the_requests_that_the_server_did() {
    let sandbox = Sandbox::new();
    comes_back(
        &sandbox,
        "infer_loop",
        &["--seconds", "1", "--rate", "50"],
        100,
    );
}

#[test]
fn only_a_program_with_a_fixed_rate_has_calls_at_fixed_times() {
    let recordings = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/recordings");
    for (name, rate) in [
        ("train_mlp", false),
        ("infer_loop", true),
        ("graph_loop", false),
    ] {
        let sandbox = Sandbox::new();
        let file = recordings.join(format!("{name}.slr"));
        let shown = show(&sandbox, file.to_str().expect("a path of this checkout"));
        let found = count(&shown, "at_fixed_times");
        assert_eq!(found > 48, rate, "{name}: {found} calls: {shown}");
    }
}

#[test]
fn a_recording_has_nothing_of_the_programs_data_and_no_paths() {
    let sandbox = Sandbox::new();
    let mut command = record(
        &sandbox,
        "a.slr",
        &["--no-names"],
        &Artefacts::get().program("train_mlp"),
    );
    Outcome::of(command.args(["--epochs", "1", "--name", "a-secret-job"])).succeeded();
    let bytes = fs::read(sandbox.path("a.slr")).unwrap();
    let has = |text: &str| {
        bytes
            .windows(text.len())
            .any(|part| part == text.as_bytes())
    };
    let folder = sandbox.path("");
    for text in [
        "a-secret-job",
        "matmul",
        "--epochs",
        folder.to_str().unwrap(),
    ] {
        assert!(!has(text), "{text} is in the recording");
    }
    let kernels = show(&sandbox, "a.slr")["kernels"].to_string();
    assert!(kernels.contains("kernel_0"), "{kernels}");
}

#[test]
fn a_job_that_is_killed_leaves_what_it_called() {
    let sandbox = Sandbox::new();
    let mut command = record(&sandbox, "a.slr", &[], Path::new("sh"));
    // The shell says who it is and becomes the program.
    command.args(["-c", "echo $$ > pid; exec \"$0\" \"$@\""]);
    command.arg(Artefacts::get().program("spin"));
    command.args(["--seconds", "600", "--kernel-us", "300"]);
    let running = Running::start(&mut command);
    wait_until("some calls are in the file", || {
        (blocks_so_far(&sandbox.path("a.slr")) > 3).then_some(())
    });
    let pid = fs::read_to_string(sandbox.path("pid")).unwrap();
    let pid = nix::unistd::Pid::from_raw(pid.trim().parse().unwrap());
    nix::sys::signal::kill(pid, Signal::SIGKILL).unwrap();
    let outcome = running.wait();
    assert_eq!(outcome.code, Some(128 + 9), "{outcome:?}");
    let shown = show(&sandbox, "a.slr");
    assert_eq!(shown["end"]["exit"], 137, "{shown}");
    assert!(count(&shown, "launches") > 100, "{shown}");
}

fn blocks_so_far(path: &Path) -> usize {
    match fs::metadata(path) {
        Ok(about) if about.len() > 24 => blocks(path).len(),
        _ => 0,
    }
}

#[test]
fn a_recorder_that_is_killed_leaves_whole_blocks_and_the_job_goes_on() {
    let sandbox = Sandbox::new();
    let mut command = record(&sandbox, "a.slr", &[], Path::new("sh"));
    command.args(["-c", "\"$0\" \"$@\"; echo $? > ended"]);
    command.arg(Artefacts::get().program("spin"));
    command.args(["--seconds", "3", "--kernel-us", "300"]);
    let mut running = Running::start(&mut command);
    wait_until("some calls are in the file", || {
        (blocks_so_far(&sandbox.path("a.slr")) > 3).then_some(())
    });
    running.kill();
    let ended = wait_until("the job has ended", || {
        fs::read_to_string(sandbox.path("ended"))
            .ok()
            .filter(|text| !text.is_empty())
    });
    assert_eq!(ended.trim(), "0");
    let shown = show(&sandbox, "a.slr");
    assert!(shown["cut"].as_str().unwrap().contains("no end"), "{shown}");
    let outcome = Outcome::of(&mut replay(&sandbox, "a.slr", &["--sim", "--speed", "100"]));
    assert!(outcome.stderr.contains("ends early"), "{outcome:?}");
    outcome.succeeded();
}

#[test]
fn a_recording_ends_where_it_is_as_large_as_it_may_be() {
    let sandbox = Sandbox::new();
    let mut command = record(
        &sandbox,
        "a.slr",
        &["--max-size", "64KiB"],
        &Artefacts::get().program("spin"),
    );
    command.args(["--seconds", "1", "--kernel-us", "100"]);
    let outcome = Outcome::of(&mut command);
    assert!(outcome.stderr.contains("--max-size"), "{outcome:?}");
    outcome.succeeded();
    assert!(fs::metadata(sandbox.path("a.slr")).unwrap().len() <= 64 << 10);
    let shown = show(&sandbox, "a.slr");
    assert_eq!(shown["end"]["reason"], "size", "{shown}");
    Outcome::of(&mut replay(&sandbox, "a.slr", &["--sim"])).succeeded();
}

#[test]
fn a_full_disk_ends_the_recording_and_not_the_job() {
    let sandbox = Sandbox::new();
    let mut command = record(&sandbox, "a.slr", &[], &Artefacts::get().program("spin"));
    command.args(["--seconds", "3", "--kernel-us", "100"]);
    let running = Running::start(&mut command);
    wait_until("some calls are in the file", || {
        (blocks_so_far(&sandbox.path("a.slr")) > 3).then_some(())
    });
    // The recorder's files may grow no more, which is what a full disk is to it.
    let so_far = fs::metadata(sandbox.path("a.slr")).unwrap().len();
    running.limit_file_size(so_far + 100_000);
    let outcome = running.wait();
    assert_eq!(outcome.code, Some(125), "{outcome:?}");
    for text in ["ends early", "ended with 0", "free some space"] {
        assert!(outcome.stderr.contains(text), "{text}: {outcome:?}");
    }
    let shown = show(&sandbox, "a.slr");
    assert!(count(&shown, "launches") > 10, "{shown}");
}

#[test]
fn each_process_of_a_job_is_one_of_its_replay() {
    let sandbox = Sandbox::new();
    let spin = Artefacts::get().program("spin");
    let mut command = record(&sandbox, "a.slr", &[], Path::new("sh"));
    command.args([
        "-c",
        "\"$0\" --seconds 1 --kernel-us 2000 & \"$0\" --seconds 1 --kernel-us 1000; wait",
    ]);
    Outcome::of(command.arg(spin)).succeeded();
    let shown = show(&sandbox, "a.slr");
    assert_eq!(shown["processes"], 2, "{shown}");
    let outcome = Outcome::of(&mut replay(&sandbox, "a.slr", &["--sim", "--json"]));
    let played = outcome.succeeded().json();
    assert_eq!(played["launches"].as_u64(), Some(count(&shown, "launches")));
}

#[test]
fn a_thousand_threads_are_recorded_and_replayed() {
    let sandbox = Sandbox::new();
    let program = programs::program("streams");
    let mut command = record(&sandbox, "a.slr", &[], Path::new("sh"));
    let kernels = Artefacts::get().root().join("simgpu/kernels");
    let lines = format!("init {}\\nthreads 1000\\n", kernels.display());
    command
        .args(["-c", "printf \"$1\" | \"$0\""])
        .arg(program)
        .arg(lines);
    let outcome = Outcome::of(&mut command).succeeded();
    assert_eq!(outcome.stdout.trim(), "0\n0", "{outcome:?}");
    let shown = show(&sandbox, "a.slr");
    assert!(shown["threads"].as_u64() >= Some(1000), "{shown}");
    let outcome = Outcome::of(&mut replay(&sandbox, "a.slr", &["--sim", "--json"]));
    let played = outcome.succeeded().json();
    assert_eq!(played["launches"].as_u64(), Some(count(&shown, "launches")));
}

#[test]
fn a_command_without_a_call_leaves_an_empty_recording_that_says_so() {
    let sandbox = Sandbox::new();
    let outcome = Outcome::of(&mut record(&sandbox, "a.slr", &[], Path::new("true")));
    assert!(outcome.stderr.contains("has no calls"), "{outcome:?}");
    outcome.succeeded();
    let outcome = Outcome::of(&mut replay(&sandbox, "a.slr", &["--sim"]));
    assert_eq!(outcome.code, Some(125), "{outcome:?}");
    assert!(outcome.stderr.contains("it has no calls"), "{outcome:?}");
}

#[test]
fn a_replay_is_governed_as_any_program_and_may_be_recorded_in_a_job() {
    let sandbox = Sandbox::new();
    let spin = Artefacts::get().program("spin");
    let mut command = record(&sandbox, "a.slr", &[], &spin);
    Outcome::of(command.args(["--seconds", "1", "--mem", "100MiB"])).succeeded();
    let sublet = Artefacts::get().dir().join("sublet");
    let mut small = sandbox.job(&["--mem", "64MiB"], &sublet);
    let outcome = Outcome::of(small.arg("replay").arg(sandbox.path("a.slr")));
    assert_eq!(outcome.code, Some(125), "{outcome:?}");
    assert!(outcome.stderr.contains("OUT_OF_MEMORY"), "{outcome:?}");
    let large = ["--name", "replayed", "--mem", "2GiB"];
    let mut command = sandbox.job(&large, &sublet);
    let well = Outcome::of(command.arg("replay").arg(sandbox.path("a.slr"))).succeeded();
    assert!(well.stdout.contains("spin on"), "{well:?}");
    let job = sandbox.job_status("replayed").expect("a job");
    assert!(job.device_time_ns > 100_000_000, "{job:?}");
    // In a job, the calls of the program are recorded and none of the library's own.
    let mut command = sandbox.job(&["--mem", "2GiB"], &sublet);
    command.args(["record", "-o"]).arg(sandbox.path("b.slr"));
    command
        .arg("--")
        .arg(&spin)
        .args(["--seconds", "1", "--mem", "100MiB"]);
    Outcome::of(&mut command).succeeded();
    let (outside, governed) = (show(&sandbox, "a.slr"), show(&sandbox, "b.slr"));
    assert_eq!(
        outside["recorded"]["most_bytes"],
        governed["recorded"]["most_bytes"]
    );
    assert_eq!(outside["kernels"], governed["kernels"]);
}

/// A device that takes four times as long takes no more of it: who goes by its clock sees no
/// difference.
#[test]
fn a_slower_simulation_takes_longer_and_charges_no_more() {
    const TIMES: u64 = 4;
    let mut sandbox = Sandbox::new();
    let spin = Artefacts::get().program("spin");
    let mut command = record(&sandbox, "a.slr", &[], &spin);
    Outcome::of(command.args(["--seconds", "1", "--mem", "100MiB"])).succeeded();
    let asked_ns = show(&sandbox, "a.slr")["recorded"]["device_s"]
        .as_f64()
        .map(|seconds| (seconds * 1e9).round() as u64)
        .expect("a length");
    sandbox.set("SUBLET_SIM_DILATION", TIMES.to_string());
    let sublet = Artefacts::get().dir().join("sublet");
    let mut command = sandbox.job(&["--name", "slow"], &sublet);
    command
        .args(["replay", "--json"])
        .arg(sandbox.path("a.slr"));
    let began = std::time::Instant::now();
    let said = Outcome::of(&mut command).succeeded().json();
    let took_ns = began.elapsed().as_nanos() as u64;
    let (played_ns, by_its_clock_ns) = (&said["device_ns"], &said["host_ns"]);
    assert_eq!(played_ns.as_u64(), Some(asked_ns));
    let job = sandbox.job_status("slow").expect("a job");
    println!(
        "now: {} ms of the device took {} ms, {} ms by the device's clock; charged {} ms",
        asked_ns / 1_000_000,
        took_ns / 1_000_000,
        by_its_clock_ns.as_u64().unwrap_or(0) / 1_000_000,
        job.device_time_ns / 1_000_000
    );
    assert!(took_ns > asked_ns * (TIMES - 1), "{took_ns} {asked_ns}");
    let by_its_clock_ns = by_its_clock_ns.as_u64().expect("a length");
    assert!(by_its_clock_ns * (TIMES - 1) < took_ns, "{said}");
    // What finding out how kernels behave there takes comes to it.
    let charged_ns = job.device_time_ns;
    assert!(
        charged_ns > asked_ns / 2 && charged_ns < asked_ns * (TIMES - 1),
        "{charged_ns}"
    );
}

#[test]
fn a_device_that_is_as_slow_as_it_is_refuses_to_be_slowed_down() {
    let mut sandbox = Sandbox::new();
    sandbox.set("SUBLET_SIM_DILATION", "4");
    // A driver at a path of its own is none of ours.
    let real = sandbox.path("libcuda.so.1");
    fs::copy(Artefacts::get().simulated_driver(), &real).expect("a copy");
    let driver = real.to_str().expect("a path in UTF-8");
    let mut command = sandbox.sublet(["run", "--driver", driver, "--", "true"]);
    let outcome = Outcome::of(&mut command);
    assert_ne!(outcome.code, Some(0), "{outcome:?}");
    assert!(
        outcome
            .stderr
            .contains("SUBLET_SIM_DILATION=4 is for the simulated GPU alone"),
        "{outcome:?}"
    );
    sandbox.set("SUBLET_SIM_DILATION", "0");
    let outcome = Outcome::of(&mut sandbox.sublet(["run", "--sim", "--", "true"]));
    println!("now: {}", outcome.stderr.trim());
    assert_ne!(outcome.code, Some(0), "{outcome:?}");
    assert!(
        outcome.stderr.contains("SUBLET_SIM_DILATION"),
        "{outcome:?}"
    );
}

#[test]
fn what_is_no_recording_is_refused_in_one_line() {
    let sandbox = Sandbox::new();
    let write = |name: &str, bytes: &[u8]| -> PathBuf {
        let path = sandbox.path(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    write("empty.slr", b"");
    write("text.slr", b"not a recording, however long it may be");
    let mut other = b"sublet\x1aR".to_vec();
    other.extend(99_u32.to_le_bytes());
    other.extend([0; 12]);
    write("version.slr", &other);
    for (name, says) in [
        ("empty.slr", "is empty"),
        ("text.slr", "no recording"),
        ("version.slr", "version 99"),
        ("missing.slr", "No such file"),
        (".", "directory"),
    ] {
        let outcome = Outcome::of(&mut replay(&sandbox, name, &["--sim"]));
        assert_eq!(outcome.code, Some(125), "{name}: {outcome:?}");
        assert!(outcome.stderr.contains(says), "{name}: {outcome:?}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{name}: {outcome:?}");
    }
    for words in [
        ["record", "-o", "/nowhere/a.slr", "--sim", "true"].as_slice(),
        &["record", "-o", ".", "--sim", "true"],
        &["record", "-o", "a.slr", "--max-size", "1KiB", "true"],
        &["replay", "a.slr", "--speed", "0"],
        &["replay", "a.slr", "--speed", "fast"],
    ] {
        let outcome = Outcome::of(sandbox.sublet(words).current_dir(sandbox.path("")));
        assert_eq!(outcome.code, Some(125), "{words:?}: {outcome:?}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{words:?}: {outcome:?}");
    }
    let outcome = Outcome::of(&mut record(
        &sandbox,
        "a.slr",
        &[],
        Path::new("no-such-command"),
    ));
    assert_eq!(outcome.code, Some(127), "{outcome:?}");
    assert!(
        !sandbox.path("a.slr").exists(),
        "a command that is not there leaves no file"
    );
}

#[test]
fn the_recordings_of_the_repository_are_replayed() {
    let sandbox = Sandbox::new();
    let folder = Artefacts::get().root().join("examples/recordings");
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .expect("recordings")
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_file())
        .collect();
    files.sort();
    assert!(files.len() >= 3, "{files:?}");
    for file in files {
        let name = file.to_str().unwrap();
        // Those of a real GPU are of whole trainings.
        let most = if name.contains("pytorch") {
            7 << 20
        } else {
            300 << 10
        };
        assert!(fs::metadata(&file).unwrap().len() < most, "{file:?}");
        let shown = show(&sandbox, name);
        assert_eq!(shown["end"]["reason"], "command-ended", "{name}: {shown}");
        let outcome = Outcome::of(&mut replay(&sandbox, name, &["--sim", "--json"])).succeeded();
        let played = outcome.json();
        let recorded = count(&shown, "launches") + count(&shown, "graph_launches");
        assert_eq!(
            played["launches"].as_u64(),
            Some(recorded),
            "{name}: {played}"
        );
    }
}

/// Signals of a process by `/proc`: the mask, and what it ignores.
fn signals_of(status: &str) -> (u64, u64) {
    let set = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let digits = line.unwrap_or_else(|| panic!("{name} in {status}")).trim();
        u64::from_str_radix(digits, 16).expect("a set")
    };
    (set("SigBlk:"), set("SigIgn:"))
}

/// Has a command begin with these signals blocked and ignored, and no other.
fn with_signals(command: &mut Command, blocked: &'static [Signal], ignored: &'static [Signal]) {
    use std::os::unix::process::CommandExt as _;

    use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, pthread_sigmask, signal};
    // SAFETY: runs in the child before its program; `signal` and `pthread_sigmask` are
    // async-signal-safe, and nothing is allocated.
    unsafe {
        command.pre_exec(move || {
            for one in [
                Signal::SIGPIPE,
                Signal::SIGCHLD,
                Signal::SIGXFSZ,
                Signal::SIGHUP,
            ] {
                let handler = match ignored.contains(&one) {
                    true => SigHandler::SigIgn,
                    false => SigHandler::SigDfl,
                };
                signal(one, handler)?;
            }
            let mask: SigSet = blocked.iter().copied().collect();
            pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&mask), None)?;
            Ok(())
        });
    }
}

#[test]
fn a_command_finds_signals_limits_and_descriptors_as_its_caller_left_them() {
    let sandbox = Sandbox::new();
    let look = "cat /proc/self/status; echo; cat /proc/self/limits; ls /proc/self/fd | wc -l";
    let record = ["record", "--sim", "-o", "a.slr", "--", "sh", "-c", look];
    let run = ["run", "--sim", "--", "sh", "-c", look];
    let cases: [(&[Signal], &[Signal]); 3] = [
        (&[], &[]),
        (&[Signal::SIGUSR1, Signal::SIGTERM], &[Signal::SIGCHLD]),
        (
            &[Signal::SIGINT],
            &[Signal::SIGPIPE, Signal::SIGXFSZ, Signal::SIGHUP],
        ),
    ];
    let mut alike = 0;
    for (blocked, ignored) in cases {
        let seen = |mut command: Command| {
            with_signals(command.current_dir(sandbox.path("")), blocked, ignored);
            let outcome = Outcome::of(&mut command).succeeded();
            let (status, rest) = outcome.stdout.split_once("\n\n").expect("two parts");
            (signals_of(status), rest.to_owned())
        };
        let mut bare = sandbox.command("sh");
        bare.args(["-c", look]);
        let bare = seen(bare);
        for words in [record.as_slice(), run.as_slice()] {
            let under = seen(sandbox.sublet(words));
            assert_eq!(
                under, bare,
                "{words:?} with {blocked:?} blocked, {ignored:?} ignored"
            );
            alike += 1;
        }
    }
    println!("now: {alike} of 6 commands begin as without sublet");
}

#[test]
fn a_signal_ends_a_command_that_is_recorded() {
    for signal in [Signal::SIGTERM, Signal::SIGHUP] {
        let sandbox = Sandbox::new();
        let mut command = record(&sandbox, "a.slr", &[], Path::new("sh"));
        command.args(["-c", "echo > begun; exec sleep 600"]);
        let running = Running::start(&mut command);
        wait_until("the command has begun", || {
            sandbox.path("begun").exists().then_some(())
        });
        running.signal(signal);
        let outcome = running.wait();
        println!("now: {signal} ends it with {:?}", outcome.code);
        assert_eq!(outcome.code, Some(128 + signal as i32), "{outcome:?}");
    }
}

#[test]
fn a_replay_counts_the_device_time_of_every_launch_of_a_graph() {
    /// Of one kernel, in microseconds, and how often it runs: in three nodes of forty launches.
    const KERNEL_US: u32 = 200;
    const KERNELS: u32 = 40 * 3;
    let submitted_s = f64::from(KERNEL_US * KERNELS) / 1e6;
    let sandbox = Sandbox::new();
    let program = Artefacts::get().program("graph_loop");
    let mut command = record(&sandbox, "a.slr", &[], &program);
    command.args(["--requests", "40", "--nodes", "3", "--pause-us", "0"]);
    command.args(["--kernel-us", &KERNEL_US.to_string()]);
    let begun = Instant::now();
    Outcome::of(&mut command).succeeded();
    let took_s = begun.elapsed().as_secs_f64();
    let recorded_s = show(&sandbox, "a.slr")["recorded"]["device_s"].as_f64();
    let recorded_s = recorded_s.expect("a time");
    let played = Outcome::of(&mut replay(&sandbox, "a.slr", &["--sim", "--json"])).succeeded();
    // CAST: nanoseconds of a second or so.
    let played_s = played.json()["device_ns"].as_u64().expect("a time") as f64 / 1e9;
    println!(
        "now: {played_s:.4} s of device time for {submitted_s:.4} s submitted, of which \
         {recorded_s:.4} s were recorded"
    );
    // The recorder measures by the device's clock, which goes on while a busy host keeps the
    // simulated device from its work.
    assert!(
        (submitted_s..took_s).contains(&recorded_s),
        "{recorded_s} of {submitted_s} in {took_s}"
    );
    assert!(
        (1.0..1.06).contains(&(played_s / submitted_s)),
        "{played_s} for {submitted_s}"
    );
}

#[test]
fn a_recording_is_not_written_to_a_pipe() {
    let sandbox = Sandbox::new();
    let mode = nix::sys::stat::Mode::S_IRWXU;
    nix::unistd::mkfifo(&sandbox.path("pipe"), mode).expect("a pipe");
    let outcome = Outcome::of(&mut record(&sandbox, "pipe", &[], Path::new("true")));
    println!(
        "now: exit code {:?}: {}",
        outcome.code,
        outcome.stderr.trim()
    );
    assert_eq!(outcome.code, Some(125), "{outcome:?}");
    assert!(outcome.stderr.contains("regular file"), "{outcome:?}");
}
