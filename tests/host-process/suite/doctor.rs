//! `sublet doctor` on programs that stay inside, and on programs that escape.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use host_process::{Artefacts, Host};
use serde_json::Value;
use testbed::CommandWithin;

/// `programs/ways/ways.c`, and the library that it loads.
fn ways() -> (PathBuf, PathBuf) {
    let artefacts = Artefacts::get();
    let program = artefacts.compile("ways_of_doctor", "ways/ways.c", None, &[]);
    let flags = ["-shared", "-fPIC"];
    let helper = artefacts.compile("ways_helper.so", "ways/helper.c", None, &flags);
    (program.unwrap(), helper.unwrap())
}

/// Exit code and report of `sublet doctor --sim --json FLAGS -- WORDS`.
fn doctor(host: &Host, flags: &[&str], words: &[&str]) -> (Option<i32>, Value) {
    let mut command = host.sublet();
    command.args(["doctor", "--sim", "--json"]).args(flags);
    if !words.is_empty() {
        command.arg("--").args(words);
    }
    let output = command
        .env("WAYS_LINGER", "1")
        .output_within(testbed::PATIENCE);
    let stdout = String::from_utf8_lossy(&output.stdout);
    let report = serde_json::from_str(&stdout).unwrap_or_else(|error| {
        panic!(
            "{error}: {stdout:?} {:?}",
            String::from_utf8_lossy(&output.stderr)
        )
    });
    (output.status.code(), report)
}

fn of_way(way: &str, flags: &[&str]) -> (Option<i32>, Value) {
    let (program, helper) = ways();
    let driver = Artefacts::get().driver();
    let host = Host::new::<&str>("/bin/true", &[]);
    let words = [&program, &PathBuf::from(way), &driver, &helper];
    let words: Vec<&str> = words.iter().map(|word| word.to_str().unwrap()).collect();
    doctor(&host, flags, &words)
}

fn escapes(report: &Value) -> Vec<(&str, &str)> {
    let escapes = report["command"]["escapes"].as_array().unwrap();
    let pair = |one| {
        let one: &Value = one;
        (one["kind"].as_str().unwrap(), one["text"].as_str().unwrap())
    };
    escapes.iter().map(pair).collect()
}

#[test]
fn a_program_that_stays_inside_is_complete() {
    for way in ["soname", "absolute", "resolver-v2", "deepbind-absolute"] {
        let (code, report) = of_way(way, &[]);
        assert_eq!(escapes(&report), [], "{report}");
        assert_eq!(code, Some(0), "{report}");
        let command = &report["command"];
        assert_eq!(command["complete"], true);
        assert_eq!(command["calls_seen"], command["calls_received"], "{report}");
        assert!(command["calls_seen"].as_u64() > Some(17), "{report}");
        assert_eq!(command["exit_code"], 0);
    }
}

#[test]
fn a_child_without_ld_preload_is_reported() {
    let (code, report) = of_way("child-without-preload", &[]);
    assert_eq!(code, Some(1), "{report}");
    let escapes = escapes(&report);
    assert_eq!(escapes.len(), 1, "{report}");
    assert_eq!(escapes[0].0, "preload_cleared");
    assert!(escapes[0].1.contains("without LD_PRELOAD"), "{report}");
    assert_eq!(report["command"]["complete"], false);
    let problem = &report["findings"]
        .as_array()
        .unwrap()
        .iter()
        .find(|finding| finding["level"] == "problem");
    assert!(problem.is_some(), "{report}");
}

#[test]
fn a_static_program_is_reported() {
    let program =
        match Artefacts::get().compile("static_program", "static_program.c", None, &["-static"]) {
            Ok(program) => program,
            Err(error) => return eprintln!("skipped: a static program: {error}"),
        };
    let host = Host::new::<&str>("/bin/true", &[]);
    let (code, report) = doctor(&host, &[], &[program.to_str().unwrap()]);
    assert_eq!(code, Some(1), "{report}");
    assert_eq!(escapes(&report)[0].0, "static", "{report}");
    // As a child that uses no GPU it is worth a note.
    let words = format!("{}; exit 3", program.display());
    let (code, report) = doctor(&host, &[], &["/bin/sh", "-c", &words]);
    assert_eq!(
        (code, &report["command"]["exit_code"]),
        (Some(0), &3.into()),
        "{report}"
    );
    let noted = report["command"]["out_of_reach"].as_array().unwrap();
    assert!(noted.iter().any(|one| one["kind"] == "static"), "{report}");
}

#[test]
fn a_link_namespace_is_reported_and_deep_reaches_it() {
    let (code, report) = of_way("dlmopen", &[]);
    assert_eq!(code, Some(1), "{report}");
    assert_eq!(escapes(&report)[0].0, "namespace", "{report}");
    let (code, report) = of_way("dlmopen", &["--deep"]);
    assert_eq!(code, Some(0), "{report}");
    assert_eq!(escapes(&report), [], "{report}");
}

#[test]
fn a_deepbound_library_is_reported_and_deep_reaches_it() {
    let (code, report) = of_way("deepbind-absolute-first", &[]);
    assert_eq!(code, Some(1), "{report}");
    assert_eq!(escapes(&report)[0].0, "past_the_library", "{report}");
    let (code, report) = of_way("deepbind-absolute-first", &["--deep"]);
    assert_eq!(code, Some(0), "{report}");
}

#[test]
fn deep_keeps_a_child_that_clears_ld_preload() {
    let (code, report) = of_way("child-without-preload", &["--deep"]);
    assert_eq!(escapes(&report), [], "{report}");
    assert_eq!(code, Some(0), "{report}");
}

/// A process that holds a context and device memory until it is dropped.
struct Squatter(Child);

impl Squatter {
    fn start(host: &Host) -> Self {
        let script = "import ctypes, sys\ncuda = ctypes.CDLL('libcuda.so.1')\ncuda.cuInit(0)\nc = ctypes.c_void_p()\ncuda.cuDevicePrimaryCtxRetain(ctypes.byref(c), 0)\nprint('here', flush=True)\nsys.stdin.read()";
        let mut command = Command::new("python3");
        command
            .args(["-c", script])
            .env("LD_LIBRARY_PATH", Artefacts::get().dir.join("sim"))
            .env("SUBLET_SIM_STATE", host.at("sim"))
            .env("SUBLET_SIM_CAPACITY", "4GiB")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        let stdout = child.stdout.as_mut().unwrap();
        testbed::read_line(&mut std::io::BufReader::new(stdout), &mut line);
        assert_eq!(line, "here\n");
        Self(child)
    }
}

impl Drop for Squatter {
    fn drop(&mut self) {
        testbed::reap(&mut self.0);
    }
}

#[test]
fn who_uses_the_gpu_outside_of_every_job_is_shown_and_strict_refuses() {
    let host = Host::new::<&str>("/bin/true", &[]);
    let strict = || {
        let mut command = host.sublet();
        command.args(["run", "--sim", "--strict", "--", "/bin/true"]);
        command.output_within(testbed::PATIENCE)
    };
    assert!(strict().status.success(), "{:?}", strict());
    let squatter = Squatter::start(&host);
    let pid = squatter.0.id();

    let (code, report) = doctor(&host, &[], &[]);
    assert_eq!(code, Some(0), "it is nobody's escape: {report}");
    let processes = report["devices"][0]["processes"].as_array().unwrap();
    assert_eq!(processes.len(), 1, "{report}");
    assert_eq!(
        (&processes[0]["pid"], &processes[0]["job"]),
        (&pid.into(), &Value::Null)
    );
    let findings = report["findings"].to_string();
    assert!(findings.contains("part of no job"), "{report}");

    let refused = strict();
    assert_eq!(refused.status.code(), Some(125));
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert!(stderr.contains(&format!("process {pid}")), "{stderr}");

    // A job looks at the device anew, and `ps` shows whom it shares it with.
    let mut job = host.sublet();
    job.args(["run", "--sim", "--", "sleep", "20"])
        .stderr(Stdio::null());
    let mut job = job.spawn().unwrap();
    let found = (0..500).find_map(|_| {
        let status = host.ps();
        let unmanaged = status["devices"][0]["unmanaged"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        std::thread::sleep(std::time::Duration::from_millis(20));
        unmanaged.first().cloned()
    });
    testbed::reap(&mut job);
    let found = found.expect("ps shows the process");
    assert_eq!(found["pid"], pid, "{found}");
    assert!(
        found["command"].as_str().unwrap().contains("python"),
        "{found}"
    );
}

#[test]
fn without_a_command_it_looks_only() {
    let host = Host::new::<&str>("/bin/true", &[]);
    let (code, report) = doctor(&host, &[], &[]);
    assert_eq!(code, Some(0), "{report}");
    assert_eq!(report["driver"]["simulated"], true);
    assert_eq!(report["driver"]["cuda_version"], "13.2");
    assert_eq!(report["arbiter"], Value::Null, "none was started: {report}");
    assert_eq!(report["command"], Value::Null);
    assert_eq!(
        report["devices"].as_array().map(Vec::len),
        Some(1),
        "{report}"
    );
    let text = host
        .sublet()
        .args(["doctor", "--sim"])
        .output_within(testbed::PATIENCE);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    for line in ["driver ", "device ", "arbiter ", "MPS ", "container "] {
        assert!(text.contains(&format!("\n{line}")), "{text}");
    }
}
