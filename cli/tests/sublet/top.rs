//! `sublet top` on a terminal, and where there is none.

use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use control::{
    ArbiterStatus, Change, ControlError, DeviceStatus, ErrorCode, Event, JobDevice, JobState,
    JobStatus, Reply, Request,
};
use nix::sys::signal::{Signal, kill};
use serde_json::Value;
use testbed::terminal::Terminal;
use testbed::within;

use crate::fixture::{Fixture, Outcome};
use crate::with_arbiter::{Host, wait_until};

/// `sublet top` with these flags, for a terminal.
fn top(fixture: &Fixture, flags: &[&str]) -> Command {
    let mut command = fixture.sublet(["top", "--interval", "100ms"]);
    command.args(flags).env("TERM", "xterm-256color");
    command.env("LANG", "C.UTF-8");
    command
}

fn on_terminal(fixture: &Fixture, flags: &[&str]) -> Terminal {
    let terminal = Terminal::start(&mut top(fixture, flags), 24, 80);
    terminal.is_taken();
    terminal
}

/// Three jobs; each look finds another second of device time for `b`, which may not be changed.
fn with_jobs() -> Fixture {
    let looks = AtomicU64::new(0);
    Fixture::answering(move |request| match request {
        Request::Status => {
            let look = looks.fetch_add(1, Ordering::Relaxed);
            let job = |(id, name): (u64, &str)| JobStatus {
                id,
                name: name.into(),
                state: JobState::Running,
                device_time_ns: if name == "b" {
                    look * 3_600_000_000_000
                } else {
                    0
                },
                mem_used_bytes: id << 30,
                devices: vec![JobDevice::default()],
                ..JobStatus::default()
            };
            Ok(Reply::Status(ArbiterStatus {
                pid: 7,
                devices: vec![DeviceStatus {
                    name: "A device".into(),
                    ..DeviceStatus::default()
                }],
                jobs: [(1, "a"), (2, "b"), (3, "c")].map(job).into(),
                ..ArbiterStatus::default()
            }))
        }
        Request::Events { since_seq: 0, .. } => Ok(Reply::Events(vec![Event {
            seq: 1,
            job_id: 1,
            kind: "oom".into(),
            message: "there was\x1b[2J too little".into(),
            ..Event::default()
        }])),
        Request::Events { .. } => Ok(Reply::Events(Vec::new())),
        Request::Set { job, .. } if job == "b" => Err(ControlError::new(
            ErrorCode::Permission,
            "`b` is another user's",
        )),
        Request::Set { job, .. } => Ok(Reply::Changed(Box::new(JobStatus {
            name: job,
            ..JobStatus::default()
        }))),
        Request::Move(_) => Err(ControlError::new(ErrorCode::Refused, "it stays")),
        other => panic!("not expected here: {other:?}"),
    })
}

/// What was asked to be changed.
fn changes(fixture: &Fixture) -> Vec<(String, Change)> {
    let heard = fixture.heard().into_iter();
    heard
        .filter_map(|heard| match heard.request {
            Request::Set { job, change } => Some((job, change)),
            _ => None,
        })
        .collect()
}

#[test]
fn a_job_appears_is_paused_after_a_question_and_the_terminal_is_given_back() {
    let host = Host::new();
    let mut arbiter = host.arbiter(&[]);
    let mut terminal = on_terminal(&host.0, &[]);
    terminal.shows("no jobs");
    let job = host.job("train", &["--share", "0.5"]);
    terminal.shows("train");
    terminal.shows("job registered");
    terminal.press("p");
    terminal.shows("pause train (job ");
    terminal.press("x\r");
    terminal.press("n");
    terminal.shows("train stays as it is");
    assert_eq!(host.shown("train")["paused"], false);
    terminal.press("py");
    wait_until("it is paused", || host.shown("train")["paused"] == true);
    terminal.shows("train: guaranteed, paused");
    terminal.press("s2\r");
    terminal.shows("at most 1");
    terminal.press("\x7f0.25\r");
    terminal.shows("to 0.25 (now 0.5)? y/n");
    terminal.press("y");
    wait_until("its share is set", || {
        host.shown("train")["share_asked"] == 0.25
    });
    terminal.press("ry");
    wait_until("it goes on", || host.shown("train")["paused"] == false);
    terminal.press("q");
    assert!(terminal.end().success());
    terminal.is_given_back();
    host.end("train", job);
    testbed::reap(&mut arbiter);
}

#[test]
fn keys_and_clicks_choose_sort_and_filter() {
    let fixture = with_jobs();
    let mut terminal = on_terminal(&fixture, &[]);
    terminal.shows("1.00");
    // Of the first job there is an event, and nothing of it reaches the terminal.
    terminal.shows("out of memory: there was\\u{1b}[2J too little");
    terminal.press("?");
    terminal.shows("set its memory limit");
    terminal.press("?");
    terminal.shows_no("set its memory limit");
    // Title, device, columns; then the jobs.
    terminal.press("\x1b[<0;3;6M\x1b[<0;3;6m");
    terminal.shows(" c (job 3) ");
    terminal.press("\x1b[<64;3;6M");
    terminal.shows(" a (job 1) ");
    terminal.press("/b\r");
    terminal.shows("filter b: 1 of 3");
    terminal.press("py");
    terminal.shows("`b` is another user's");
    let asked = changes(&fixture);
    assert_eq!(asked.len(), 1, "{asked:?}");
    assert_eq!((asked[0].0.as_str(), asked[0].1.paused), ("b", Some(true)));
    terminal.press("ey");
    terminal.shows("it stays");
    // Ctrl-C, while something is written.
    terminal.press("/\x03");
    assert!(terminal.end().success());
    terminal.is_given_back();
}

#[test]
fn readonly_asks_for_no_change() {
    let fixture = with_jobs();
    let mut terminal = on_terminal(&fixture, &["--readonly"]);
    terminal.shows("nothing is changed");
    for key in ["py", "ry", "ey", "by", "s0.5\ry", "m1GiB\ry"] {
        terminal.press(key);
    }
    terminal.press("?");
    terminal.shows("this help");
    assert!(
        !terminal.text().contains("pause the job"),
        "{}",
        terminal.text()
    );
    terminal.press("qq");
    assert!(terminal.end().success());
    let only_looks = |heard: &crate::fixture::Heard| {
        matches!(heard.request, Request::Status | Request::Events { .. })
    };
    assert!(fixture.heard().iter().all(only_looks));
}

#[test]
fn signals_end_it_as_they_end_any_program_and_the_terminal_is_given_back() {
    let fixture = with_jobs();
    for signal in [
        Signal::SIGTERM,
        Signal::SIGINT,
        Signal::SIGHUP,
        Signal::SIGQUIT,
    ] {
        let mut terminal = on_terminal(&fixture, &[]);
        terminal.shows("GPU 0");
        terminal.signal(signal as i32);
        assert_eq!(terminal.end().signal(), Some(signal as i32), "{signal}");
        terminal.is_given_back();
    }
}

#[test]
fn it_stops_and_goes_on_with_the_terminal_as_it_should_be() {
    let fixture = with_jobs();
    let mut terminal = on_terminal(&fixture, &[]);
    terminal.shows("GPU 0");
    terminal.signal(Signal::SIGTSTP as i32);
    terminal.is_stopped();
    terminal.is_given_back();
    terminal.signal(Signal::SIGCONT as i32);
    terminal.is_taken();
    terminal.shows("GPU 0");
    // By key, and what is typed afterwards arrives.
    terminal.press("\x1a");
    terminal.is_stopped();
    terminal.is_given_back();
    terminal.signal(Signal::SIGCONT as i32);
    terminal.is_taken();
    terminal.press("?");
    terminal.shows("this help");
    terminal.press("?q");
    assert!(terminal.end().success());
    terminal.is_given_back();
}

#[test]
fn it_follows_the_size_of_the_terminal() {
    let fixture = with_jobs();
    let mut terminal = on_terminal(&fixture, &[]);
    terminal.shows("GPU 0");
    terminal.resize(5, 20);
    terminal.shows("NAME▲       STATE");
    terminal.shows_no("GPU 0");
    terminal.resize(60, 200);
    terminal.shows("LAUNCH/S");
    terminal.resize(1, 1);
    terminal.resize(24, 80);
    terminal.shows("GPU 0");
    terminal.press("q");
    assert!(terminal.end().success());
}

#[test]
fn an_arbiter_that_goes_is_named_and_the_next_one_is_shown() {
    let host = Host::new();
    let mut terminal = on_terminal(&host.0, &[]);
    terminal.shows("waiting: no arbiter runs at ");
    let mut first = host.arbiter(&[]);
    terminal.shows(&format!("arbiter {}", first.id()));
    kill(host.arbiter_pid().unwrap(), Signal::SIGKILL).unwrap();
    within::wait(&mut first, "the arbiter", testbed::PATIENCE);
    terminal.shows("figures of ");
    terminal.press("?");
    terminal.shows("this help");
    terminal.press("?");
    let mut second = host.arbiter(&[]);
    terminal.shows(&format!("arbiter {}", second.id()));
    terminal.shows_no("figures of ");
    terminal.press("q");
    assert!(terminal.end().success());
    terminal.is_given_back();
    testbed::reap(&mut second);
}

#[test]
fn without_a_terminal_it_names_what_needs_none() {
    let fixture = with_jobs();
    Outcome::of(&mut top(&fixture, &[])).is_error(125, &["terminal", "--once", "--json"]);
    let mut dumb = top(&fixture, &[]);
    let mut terminal = Terminal::start(dumb.env("TERM", "dumb"), 24, 80);
    assert_eq!(terminal.end().code(), Some(125));
    terminal.shows("`dumb`");
    terminal.is_given_back();
}

#[test]
fn a_frame_and_an_object_need_no_terminal() {
    let fixture = with_jobs();
    let outcome = Outcome::of(&mut top(&fixture, &["--once"]));
    assert_eq!(
        (outcome.code, outcome.stderr.as_str()),
        (Some(0), ""),
        "{outcome:?}"
    );
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert_eq!(lines.len(), 6, "{outcome:?}");
    assert!(
        lines[0].starts_with("sublet top  3 jobs  arbiter 7"),
        "{outcome:?}"
    );
    assert!(
        lines[4].contains(" b ") && lines[4].contains(" 1.00 "),
        "{outcome:?}"
    );
    assert!(!outcome.stdout.contains('\x1b'));

    let outcome = Outcome::of(&mut top(&fixture, &["--once", "--json"]));
    let object: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(object["schema"], 1);
    assert_eq!(object["jobs"][1]["share_got"], 1.0, "{object}");
    assert_eq!(object["jobs"][0]["share_got"], 0.0, "{object}");
    assert!(object["interval_s"].as_f64().unwrap() > 0.0);
}

#[test]
fn without_an_arbiter_it_says_so() {
    let fixture = Fixture::without_arbiter();
    let outcome = Outcome::of(&mut top(&fixture, &["--once"]));
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert!(
        outcome.stdout.starts_with("no arbiter runs at "),
        "{outcome:?}"
    );
    let outcome = Outcome::of(&mut top(&fixture, &["--once", "--json"]));
    let object: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert!(object["arbiter"].is_null(), "{object}");
    assert!(
        object["no_answer"].as_str().unwrap().contains("no arbiter"),
        "{object}"
    );
    let mut relative = top(&fixture, &["--once"]);
    relative.env("SUBLET_RUNTIME_DIR", "not/absolute");
    Outcome::of(&mut relative).is_error(125, &["not/absolute"]);
}

#[test]
fn objects_come_until_nobody_reads_them() {
    let fixture = with_jobs();
    let mut command = top(&fixture, &["--json"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    for _ in 0..3 {
        let mut line = String::new();
        testbed::read_line(&mut lines, &mut line);
        let object: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(object["jobs"].as_array().unwrap().len(), 3);
    }
    drop(lines);
    assert!(within::wait(&mut child, "sublet top", testbed::PATIENCE).success());
}

#[test]
fn an_output_that_takes_nothing_is_an_error() {
    let fixture = with_jobs();
    for flags in [&["--once"][..], &["--json"]] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut command = top(&fixture, flags);
        let mut child = command.stdout(full).stderr(Stdio::piped()).spawn().unwrap();
        let code = within::wait(&mut child, "sublet top", testbed::PATIENCE).code();
        let mut said = String::new();
        child.stderr.unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(code, Some(125), "{said}");
        assert!(said.contains("cannot write to stdout"), "{said}");
    }
}
