//! With the real arbiter, started by `sublet run` or by hand. Jobs here touch no device: what the
//! two say to each other over the API's socket is the matter.

use std::fs;
use std::io::BufReader;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use testbed::{CommandWithin, within};

use crate::fixture::{Fixture, Outcome};

/// Far beyond what anything here takes; only a failure waits for it.
const DEADLINE: Duration = Duration::from_secs(60);

#[track_caller]
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < DEADLINE, "in vain: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A fixture whose arbiter ends with it.
pub struct Host(pub Fixture);

impl Host {
    pub fn new() -> Self {
        Self(Fixture::without_arbiter())
    }

    pub fn ps(&self) -> Value {
        let outcome = self.0.run(&["ps", "--json"]);
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
        serde_json::from_str(&outcome.stdout).unwrap()
    }

    pub fn arbiter_pid(&self) -> Option<Pid> {
        let pid = self.ps()["arbiter"]["pid"].as_i64()?;
        Some(Pid::from_raw(i32::try_from(pid).unwrap()))
    }

    /// A job that runs until the file `name.end` is there or the test has gone, and has begun.
    pub fn job(&self, name: &str, flags: &[&str]) -> Child {
        let (begun, end) = (
            self.0.at(&format!("{name}.begun")),
            self.0.at(&format!("{name}.end")),
        );
        let script = format!(
            "touch {0}; until [ -e {1} ] || [ ! -e {0} ]; do sleep 0.01; done",
            begun.display(),
            end.display()
        );
        let mut args = vec!["run", "--sim", "--name", name];
        args.extend(flags);
        args.extend(["sh", "-c", &script]);
        let child = self.0.sublet(args).stderr(Stdio::null()).spawn().unwrap();
        wait_until("the job begins", || begun.exists());
        child
    }

    pub fn end(&self, name: &str, mut job: Child) {
        self.0.write(&format!("{name}.end"), "");
        assert!(within::wait(&mut job, name, testbed::PATIENCE).success());
    }

    /// `sublet arbiter` in the foreground, once it listens.
    pub fn arbiter(&self, flags: &[&str]) -> Child {
        let mut args = vec!["arbiter"];
        args.extend(flags);
        let child = self.0.sublet(args).stderr(Stdio::null()).spawn().unwrap();
        wait_until("the arbiter listens", || self.arbiter_pid().is_some());
        child
    }

    pub fn arbiter_lives(&self) -> bool {
        self.arbiter_pid().is_some()
    }

    /// Kills the arbiter and starts another one.
    pub fn restart(&self) {
        let pid = self.arbiter_pid().expect("an arbiter");
        kill(pid, Signal::SIGKILL).unwrap();
        wait_until("it has ended", || !is_alive(pid));
        let again = self.0.run(&["run", "--sim", "true"]);
        assert_eq!(again.code, Some(0), "{again:?}");
    }

    /// The job of that name in `sublet ps`.
    pub fn shown(&self, name: &str) -> Value {
        let ps = self.ps();
        let job = ps["jobs"]
            .as_array()
            .unwrap()
            .iter()
            .find(|job| job["name"] == name);
        job.unwrap_or_else(|| panic!("no {name} in {ps}")).clone()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self
            .0
            .sublet(["arbiter", "--stop"])
            .stderr(Stdio::null())
            .status_within(testbed::PATIENCE);
    }
}

fn is_alive(pid: Pid) -> bool {
    Path::new(&format!("/proc/{pid}/stat")).exists()
}

#[test]
fn run_starts_an_arbiter_and_registers_the_job() {
    let host = Host::new();
    let job = host.job("train", &["--share", "0.75", "--mem", "8GiB"]);
    let shown = host.shown("train");
    assert_eq!(shown["share_asked"], 0.75, "{shown}");
    // A limit is one on a device, and no device is known here: that it arrived is in the journal.
    let journal = fs::read_to_string(host.0.at("run/journal.jsonl")).unwrap();
    assert!(journal.contains("8GiB"), "{journal}");
    assert_eq!(shown["class"], "guaranteed");
    assert_eq!(shown["command"][0], "sh");
    let ps = host.ps();
    assert_eq!(ps["arbiter"]["embedded"], true);
    assert_eq!(ps["arbiter"]["version"], env!("CARGO_PKG_VERSION"));

    let outcome = host.0.run(&[
        "set",
        "train",
        "--share",
        "0.5",
        "--mem",
        "4GiB",
        "--class",
        "opportunistic",
    ]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert!(
        outcome
            .stdout
            .starts_with("train: opportunistic, share 0.5, "),
        "{outcome:?}"
    );
    assert_eq!(host.shown("train")["share_asked"], 0.5);
    host.end("train", job);
    wait_until("the job is seen to have ended", || {
        host.shown("train")["state"] == "gone"
    });
}

#[test]
fn a_name_that_is_taken_is_refused_and_one_that_is_made_is_free() {
    let host = Host::new();
    let first = host.job("sh", &["--share", "0.3"]);
    let script = ["sh", "-c", "echo $SUBLET_JOB"];
    let outcome = host
        .0
        .run(&[&["run", "--sim", "--name", "sh"][..], &script].concat());
    outcome.is_error(125, &["refused", "`sh`", "--name"]);
    let outcome = host.0.run(&[&["run", "--sim"][..], &script].concat());
    assert_eq!(outcome.stdout, "sh-2\n", "{outcome:?}");
    host.end("sh", first);
}

#[test]
fn many_at_once_share_one_arbiter() {
    let host = Host::new();
    let children: Vec<Child> = (0..8)
        .map(|_| {
            let mut command = host
                .0
                .sublet(["run", "--sim", "--class", "opportunistic", "true"]);
            command.stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for child in children {
        let outcome = Outcome::from(within::output(child, "sublet run", testbed::PATIENCE));
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
    }
    assert_eq!(
        host.ps()["jobs"].as_array().unwrap().len(),
        8,
        "all with the same one"
    );
}

#[test]
fn shares_above_one_are_refused() {
    let host = Host::new();
    let job = host.job("first", &["--share", "0.75"]);
    let mark = host.0.at("started");
    let touch = ["touch", mark.to_str().unwrap()];
    let outcome = host
        .0
        .run(&[&["run", "--sim", "--share", "0.5"][..], &touch].concat());
    outcome.is_error(125, &["refused", "0.5", "0.25"]);
    let outcome = host.0.run(&["set", "nobody", "--share", "0.5"]);
    outcome.is_error(125, &["refused", "nobody"]);
    assert!(!mark.exists());
    assert_eq!(
        host.ps()["jobs"].as_array().unwrap().len(),
        1,
        "and not registered"
    );
    host.end("first", job);
}

#[test]
fn an_arbiter_that_was_killed_is_replaced() {
    let host = Host::new();
    assert_eq!(host.0.run(&["run", "--sim", "true"]).code, Some(0));
    let killed = host.arbiter_pid().unwrap();
    kill(killed, Signal::SIGKILL).unwrap();
    wait_until("it is gone", || host.ps()["arbiter"].is_null());
    assert_eq!(host.0.run(&["run", "--sim", "true"]).code, Some(0));
    assert_ne!(host.arbiter_pid().unwrap(), killed);
}

#[test]
fn events_are_there_without_the_arbiter_and_are_followed_into_the_next_one() {
    let host = Host::new();
    let run = |name: &str| host.0.run(&["run", "--sim", "--name", name, "true"]);
    assert_eq!(run("train").code, Some(0));
    let of = |job: &str| host.0.run(&["events", "--job", job]);
    wait_until("the end of the job is an event", || {
        of("train").stdout.contains("  job ended  ")
    });
    kill(host.arbiter_pid().unwrap(), Signal::SIGKILL).unwrap();
    wait_until("it is gone", || host.ps()["arbiter"].is_null());

    let all = host.0.run(&["events"]);
    assert_eq!((all.code, all.stderr.as_str()), (Some(0), ""), "{all:?}");
    for line in ["arbiter started     -  ", "job registered      train  "] {
        assert!(all.stdout.contains(line), "{all:?}");
    }
    let json = host
        .0
        .run(&["events", "--json", "--job", "train", "-n", "1"]);
    let last: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(last["kind"], "ended", "{last}");
    let id = last["job_id"].as_u64().unwrap();
    assert_eq!(of(&id.to_string()).stdout, of("train").stdout);

    let mut command = host.0.sublet(["events", "-f", "--job", "next"]);
    let mut follower = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(follower.stdout.take().unwrap());
    assert_eq!(run("next").code, Some(0));
    let mut line = String::new();
    testbed::read_line(&mut lines, &mut line);
    assert!(line.contains("  job registered      next  "), "{line}");
    testbed::reap(&mut follower);
}

#[test]
fn one_at_a_time_and_it_ends_when_asked() {
    let host = Host::new();
    let mut arbiter = host.arbiter(&[]);
    assert_eq!(host.ps()["arbiter"]["embedded"], false);
    let pid = arbiter.id().to_string();
    // What is said of the other's process is for people; that it is refused is the point.
    host.0
        .run(&["arbiter"])
        .is_error(125, &["already", &pid, "--stop"]);
    assert_eq!(host.0.run(&["arbiter", "--stop"]).code, Some(0));
    assert!(within::wait(&mut arbiter, "the arbiter", testbed::PATIENCE).success());
    assert!(host.ps()["arbiter"].is_null());
}

#[test]
fn it_ends_by_itself_when_idle() {
    let host = Host::new();
    let mut arbiter = host.arbiter(&["--embedded", "--idle-exit", "1s"]);
    assert!(within::wait(&mut arbiter, "the arbiter", testbed::PATIENCE).success());
    assert!(host.ps()["arbiter"].is_null());
}

#[test]
fn what_is_started_outlives_the_job_that_started_it() {
    let host = Host::new();
    let script = "kill -KILL $$";
    assert_eq!(
        host.0.run(&["run", "--sim", "sh", "-c", script]).signal,
        Some(9)
    );
    let pid = host.arbiter_pid().unwrap();
    assert!(is_alive(pid));
    // Its terminal, its streams and its place are not the job's.
    let fds = Path::new("/proc").join(pid.to_string()).join("fd");
    for fd in ["1", "2"] {
        assert_eq!(
            fs::read_link(fds.join(fd)).unwrap(),
            host.0.at("run/arbiter.log")
        );
    }
}

#[test]
fn the_file_of_the_first_run_rules_the_arbiter_it_starts() {
    let host = Host::new();
    host.0
        .write("sublet.toml", "[[user]]\nuser = \"*\"\nshare_max = 0.2\n");
    let outcome = host.0.run(&["run", "--sim", "--share", "0.5", "true"]);
    outcome.is_error(125, &["refused", "0.2"]);
    assert_eq!(
        host.0.run(&["run", "--sim", "--share", "0.1", "true"]).code,
        Some(0)
    );
}

#[test]
fn a_bad_file_is_reported_by_the_run_that_finds_it() {
    let host = Host::new();
    let mut command: Command = host.0.sublet(["arbiter"]);
    host.0
        .write("bad.toml", "[[device]]\ndevice = 0\nquatnum = \"5ms\"\n");
    command.env("SUBLET_CONFIG", host.0.at("bad.toml"));
    Outcome::of(&mut command).is_error(
        125,
        &["bad.toml:3:1:", "`quatnum`", "did you mean `quantum`?"],
    );
    let mut command: Command = host.0.sublet(["arbiter"]);
    command.env("SUBLET_LOG", "lots=of=it");
    Outcome::of(&mut command).is_error(125, &["SUBLET_LOG", "`lots=of=it`"]);
    assert!(host.ps()["arbiter"].is_null());
}

#[test]
fn a_quota_file_is_read_again_on_request_and_on_sighup_and_a_bad_one_is_not() {
    let host = Host::new();
    let write = |share: &str| {
        let text = format!("[[user]]\nuser = \"*\"\nshare_max = {share}\n");
        host.0.write("sublet.toml", &text);
    };
    write("0.2");
    let first = ["run", "--sim", "--share", "0.5", "true"];
    host.0.run(&first).is_error(125, &["refused", "0.2"]);
    // Jobs have a file of their own from here on: a bad one is bad for them as well.
    host.0.write("job.toml", "");
    let run = |share: &str| {
        let args = ["run", "--sim", "--config", "job.toml", "--share", share];
        host.0.run(&[&args[..], &["true"]].concat())
    };
    run("0.5").is_error(125, &["refused", "0.2"]);
    write("0.6");
    let outcome = host.0.run(&["reload"]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert!(
        outcome.stdout.contains("sublet.toml is in force"),
        "{outcome:?}"
    );
    assert!(outcome.stdout.contains("1 user"), "{outcome:?}");
    assert_eq!(run("0.5").code, Some(0));

    host.0.write(
        "sublet.toml",
        "[[device]]\ndevice = 0\npolicy = \"strid\"\n",
    );
    host.0.run(&["reload"]).is_error(
        125,
        &["sublet.toml:3:10:", "strid", "did you mean", "still is"],
    );
    assert_eq!(run("0.5").code, Some(0));
    run("0.7").is_error(125, &["0.6"]);

    write("0.9");
    wait_until("the change is noticed", || run("0.7").code == Some(0));
    // The same files once more: only a signal has them taken over again.
    let taken_over = || host.ps()["arbiter"]["config"]["loaded_unix_ms"].clone();
    let before = taken_over();
    let pid = host.arbiter_pid().unwrap();
    kill(pid, Signal::SIGHUP).unwrap();
    wait_until("SIGHUP is heard", || taken_over() != before);
}
