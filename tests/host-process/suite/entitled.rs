//! Processes whose devices the job may not use: they are reported, and where a limit would hold on
//! no device, refused.

use std::io::BufReader;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use host_process::{Artefacts, Host};
use serde_json::Value;
use testbed::{CommandWithin, within};

fn on_device(device: u32) -> Host {
    let program = Artefacts::get()
        .compile("on_device", "on_device.c", None, &[])
        .unwrap();
    Host::new(program, &[device.to_string()])
}

/// A job that has said that it uses its device, and goes on until it is dropped.
struct Started(Child);

impl Started {
    fn new(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let stdout = child.stdout.as_mut().unwrap();
        testbed::read_line(&mut BufReader::new(stdout), &mut line);
        assert!(line.starts_with("used"), "{line:?}");
        Self(child)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        within::wait(&mut self.0, "the job", testbed::PATIENCE);
    }
}

fn ungoverned(host: &Host) -> Vec<Value> {
    let status = host.ps();
    let processes = status["jobs"][0]["processes"].as_array();
    processes
        .and_then(|processes| processes.first())
        .and_then(|process| process["ungoverned"].as_array().cloned())
        .unwrap_or_default()
}

/// Waits until `ps` names a device of the first job's first process.
fn until_reported(host: &Host) -> Vec<Value> {
    let reported = (0..1000).find_map(|_| {
        let reported = ungoverned(host);
        std::thread::sleep(std::time::Duration::from_millis(10));
        (!reported.is_empty()).then_some(reported)
    });
    reported.expect("ps tells of the device")
}

#[test]
fn a_process_on_a_device_that_is_not_the_jobs_is_reported() {
    let host = on_device(0);
    let mut command = host.job(&["--device", "1", "--mem", "64MiB"]);
    command.env("SUBLET_SIM_DEVICES", "2").stderr(Stdio::null());
    let job = Started::new(command);
    let reported = until_reported(&host);
    assert_eq!(reported.len(), 1, "{reported:?}");
    let uuid = reported[0].as_str().unwrap();
    assert!(uuid.starts_with("GPU-"), "{reported:?}");

    let ps = host.sublet().arg("ps").output_within(testbed::PATIENCE);
    let ps = String::from_utf8_lossy(&ps.stdout).into_owned();
    let line = ps.lines().find(|line| line.contains("not governed"));
    assert!(line.is_some_and(|line| line.contains(uuid)), "{ps}");

    let doctor = host
        .sublet()
        .args(["doctor", "--sim"])
        .output_within(testbed::PATIENCE);
    let text = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert_eq!(doctor.status.code(), Some(1), "{text}");
    assert!(text.contains("problem: process"), "{text}");
    let journal = std::fs::read_to_string(host.at("run/journal.jsonl")).unwrap();
    assert!(journal.contains("\"kind\":\"ungoverned\""), "{journal}");
    drop(job);
}

#[test]
fn a_process_on_the_jobs_own_device_is_not() {
    let host = on_device(1);
    let mut command = host.job(&["--device", "1", "--mem", "64MiB"]);
    command.env("SUBLET_SIM_DEVICES", "2").stderr(Stdio::null());
    let job = Started::new(command);
    assert_eq!(ungoverned(&host), Vec::<Value>::new());
    drop(job);
    let journal = std::fs::read_to_string(host.at("run/journal.jsonl")).unwrap();
    assert!(!journal.contains("\"kind\":\"ungoverned\""), "{journal}");
}

/// A copy of the simulated driver that the command takes for a real one, while its NVML says that
/// it is simulated: the two disagree about the device.
fn disagreeing(host: &Host) -> PathBuf {
    let to = host.at("driver");
    std::fs::create_dir_all(&to).unwrap();
    for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
        let from = Artefacts::get().dir.join("sim").join(name);
        std::fs::copy(from, to.join(name)).unwrap();
    }
    to
}

#[test]
fn a_limit_that_would_hold_on_no_device_is_refused() {
    let host = on_device(0);
    let driver = disagreeing(&host);
    let host = host.on(&driver);
    let refused = host.run_job(&["--mem", "64MiB"]);
    assert_eq!(refused.code, Some(125), "{refused:?}");
    assert!(
        refused.stderr.contains("would not be in force"),
        "{refused:?}"
    );
    assert_eq!(refused.stdout, "");
}

#[test]
fn without_a_limit_such_a_job_runs_and_is_reported() {
    let host = on_device(0);
    let driver = disagreeing(&host);
    let host = host.on(&driver);
    let mut command = host.job(&[]);
    command.stderr(Stdio::null());
    let job = Started::new(command);
    assert_eq!(until_reported(&host).len(), 1);
    drop(job);
}

/// As where `CUDA_VISIBLE_DEVICES` leaves a process other devices than its job may use.
fn with_another_device(flags: &[&str]) -> (host_process::Outcome, String) {
    let program = on_device(0);
    let script = format!(
        "SUBLET_SIM_DEVICES=1 SUBLET_SIM_STATE={} exec {} 0",
        program.at("work").display(),
        Artefacts::get()
            .dir
            .join("host-process/on_device")
            .display()
    );
    let host = Host::new("/bin/sh", &["-c", &script]);
    let mut command = host.job(flags);
    command.env("SUBLET_SIM_DEVICES", "2");
    let output = command.output_within(testbed::PATIENCE);
    let journal = until_in_journal(&host);
    let outcome = host_process::Outcome {
        code: output.status.code(),
        signal: None,
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    };
    (outcome, journal)
}

/// The journal, once it says what became of the process; that is written behind the job's back.
fn until_in_journal(host: &Host) -> String {
    let mut journal = String::new();
    for _ in 0..1000 {
        journal = std::fs::read_to_string(host.at("run/journal.jsonl")).unwrap();
        let kinds = ["\"kind\":\"refused\"", "\"kind\":\"ungoverned\""];
        if kinds.iter().any(|kind| journal.contains(kind)) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    journal
}

#[test]
fn a_process_without_a_device_of_its_job_does_not_start_under_a_limit() {
    let (outcome, journal) = with_another_device(&["--device", "1", "--mem", "64MiB"]);
    assert_eq!(outcome.stdout, "cuInit 802\n", "{outcome:?}");
    assert!(journal.contains("\"kind\":\"refused\""), "{journal}");
    assert!(journal.contains("CUDA_VISIBLE_DEVICES"), "{journal}");
}

#[test]
fn a_process_without_a_device_of_its_job_does_not_start_under_strict() {
    let (free, journal) = with_another_device(&["--device", "1"]);
    assert_eq!(free.stdout, "used 0\n", "{free:?}");
    assert!(journal.contains("\"kind\":\"ungoverned\""), "{journal}");
    let (strict, _) = with_another_device(&["--device", "1", "--strict"]);
    assert_eq!(strict.stdout, "cuInit 802\n", "{strict:?}");
}
