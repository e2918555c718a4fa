//! `sublet events`: what it prints of a journal that is written here by hand, and what it says of
//! one that is missing, damaged, huge, moved, or not ours to read.

use std::fs::{self, File, OpenOptions};
use std::io::{BufReader, BufWriter, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use control::{Event, Reply, Request};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use testbed::within;

use crate::fixture::{Fixture, Outcome};

/// 2026-11-23T20:35:00Z
const BEGUN: u64 = 1_795_466_100_000;

/// A line as the arbiter writes it: event `seq` comes `seq` seconds after [`BEGUN`].
fn line(seq: u64, kind: &str, (job, id): (&str, u64), fields: Value) -> String {
    let event = json!({
        "seq": seq, "unix_ms": BEGUN + seq * 1000, "kind": kind, "job": job, "job_id": id,
        "message": format!("message {seq}"), "fields": fields,
    });
    format!("{event}\n")
}

const NONE: [u64; 0] = [];

fn plain(seq: u64) -> String {
    line(seq, "attached", ("train", 3), json!({}))
}

fn journal(fixture: &Fixture) -> PathBuf {
    fixture.at("run/journal.jsonl")
}

fn append(fixture: &Fixture, text: &str) {
    let mut options = OpenOptions::new();
    let file = options.create(true).append(true).open(journal(fixture));
    file.unwrap().write_all(text.as_bytes()).unwrap();
}

fn rotate(fixture: &Fixture) {
    fs::rename(journal(fixture), fixture.at("run/journal.jsonl.1")).unwrap();
}

/// A journal in two files: jobs `train` (3) and `7` (4), and the arbiter's own.
fn with_journal() -> Fixture {
    let fixture = Fixture::without_arbiter();
    append(&fixture, &line(1, "start", ("", 0), json!({"pid": 9})));
    append(&fixture, &line(2, "registered", ("train", 3), json!({})));
    rotate(&fixture);
    let oom = json!({"device": 1, "uuid": "GPU-1f", "limit_bytes": 7});
    append(&fixture, &line(3, "oom", ("train", 3), oom));
    append(&fixture, &line(4, "registered", ("7", 4), json!({})));
    let escaped = json!({"devices": [0, 1], "uuids": ["GPU-0a", "GPU-1f"]});
    append(&fixture, &line(5, "escaped", ("7", 4), escaped));
    fixture
}

/// The numbers of the events that were printed.
fn numbers(outcome: &Outcome) -> Vec<u64> {
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    let of = |line: &str| line.rsplit("message ").next().unwrap().parse().unwrap();
    outcome.stdout.lines().map(of).collect()
}

/// `sublet events --follow` with these flags.
struct Follower {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Follower {
    fn new(fixture: &Fixture, flags: &[&str]) -> Self {
        let mut command = fixture.sublet(["events", "--follow"]);
        command.args(flags).stdout(Stdio::piped());
        let stderr = File::create(fixture.at("stderr")).unwrap();
        let mut child = command.stderr(stderr).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    #[track_caller]
    fn line(&mut self) -> String {
        let mut line = String::new();
        testbed::read_line(&mut self.lines, &mut line);
        line
    }

    /// Whether there is something to read within `limit`.
    fn has_line(&self, limit: Duration) -> bool {
        let mut ends = [PollFd::new(self.lines.get_ref().as_fd(), PollFlags::POLLIN)];
        let limit = PollTimeout::try_from(limit).unwrap();
        !self.lines.buffer().is_empty() || poll(&mut ends, limit).unwrap() > 0
    }

    #[track_caller]
    fn shows(&mut self, seq: u64) {
        let line = self.line();
        assert!(
            line.ends_with(&format!(" message {seq}\n")),
            "{seq}: {line:?}"
        );
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).unwrap())
    }

    /// A line of `/proc/PID/status`, in its unit.
    fn status(&self, name: &str) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let mut words = line.unwrap().trim_start_matches(':').split_whitespace();
        words.next().unwrap().parse().unwrap()
    }

    /// Processor time that it has used, in clock ticks.
    fn ticks(&self) -> u64 {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
        let fields: Vec<&str> = stat
            .rsplit_once(')')
            .unwrap()
            .1
            .split_whitespace()
            .collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        testbed::reap(&mut self.child);
    }
}

#[test]
fn events_are_lines_of_time_kind_job_and_message_oldest_first() {
    let fixture = with_journal();
    let outcome = fixture.run(&["events"]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    assert_eq!(
        outcome.stdout,
        "\
2026-11-23T20:35:01.000Z  arbiter started     -             message 1
2026-11-23T20:35:02.000Z  job registered      train         message 2
2026-11-23T20:35:03.000Z  out of memory       train         message 3
2026-11-23T20:35:04.000Z  job registered      7             message 4
2026-11-23T20:35:05.000Z  process escaped     7             message 5
"
    );
}

#[test]
fn json_is_one_object_for_each_event_with_names_that_stay() {
    let fixture = with_journal();
    let outcome = fixture.run(&["events", "--json"]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    let lines = outcome.stdout.lines();
    let events: Vec<Value> = lines
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(events.len(), 5);
    assert_eq!(
        events[2],
        json!({
            "schema": 1, "seq": 3, "time": "2026-11-23T20:35:03.000Z", "unix_ms": BEGUN + 3000,
            "kind": "oom", "job": "train", "job_id": 3, "message": "message 3",
            "fields": {"device": 1, "uuid": "GPU-1f", "limit_bytes": 7},
        })
    );
    assert_eq!(
        (&events[0]["job"], &events[0]["job_id"]),
        (&Value::Null, &Value::Null)
    );
}

#[test]
fn events_are_chosen_by_job_device_and_time_and_the_last_of_them_are_kept() {
    let fixture = with_journal();
    let shown: [(&[&str], &[u64]); 15] = [
        (&["--job", "train"], &[2, 3]),
        (&["--job", "3"], &[2, 3]),
        (&["--job", "4"], &[4, 5]),
        // A name before a number: nothing has the number 7.
        (&["--job", "7"], &[4, 5]),
        (&["--device", "1"], &[3, 5]),
        (&["--device", "0"], &[5]),
        (&["--device", "GPU-1F"], &[3, 5]),
        (&["--since", "2026-11-23T20:35:03Z"], &[3, 4, 5]),
        (&["--since", "2026-11-23T21:35:04+01:00"], &[4, 5]),
        (&["--since", "3000d"], &[1, 2, 3, 4, 5]),
        (&["-n", "2"], &[4, 5]),
        (&["-n", "4"], &[2, 3, 4, 5]),
        (&["-n", "99"], &[1, 2, 3, 4, 5]),
        (&["-n", "1", "--device", "1", "--job", "train"], &[3]),
        (&["-n", "1", "--since", "2026-11-23T20:35:03Z"], &[5]),
    ];
    for (flags, shown) in shown {
        let outcome = fixture.run(&[&["events"][..], flags].concat());
        assert_eq!(numbers(&outcome), shown, "{flags:?}");
        assert_eq!(outcome.stderr, "", "{flags:?}");
    }
    for (flags, words) in [
        (&["--job", "trian"][..], "no event of job `trian` in "),
        (&["--device", "5"], "no event on device 5 in "),
        (&["-n", "0"], "no event in "),
        (
            &["--since", "2099-01-01T00:00:00Z"],
            "no event since 2099-01-01T00:00:00.000Z in ",
        ),
    ] {
        let outcome = fixture.run(&[&["events"][..], flags].concat());
        assert_eq!(numbers(&outcome), NONE, "{flags:?}");
        assert!(outcome.stderr.contains(words), "{outcome:?}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
    }
}

#[test]
fn without_a_journal_it_says_where_it_looked() {
    let fixture = Fixture::without_arbiter();
    for flags in [&["events"][..], &["events", "--json"]] {
        let outcome = fixture.run(flags);
        assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(0), ""));
        let expected = format!(
            "sublet: no journal at {}: no arbiter has run there\n",
            journal(&fixture).display()
        );
        assert_eq!(outcome.stderr, expected);
    }
    // By the rule of all commands, and where the host's arbiter would have left one.
    fs::create_dir(fixture.at("xdg")).unwrap();
    let mut command = fixture.sublet(["events", "-n", "0"]);
    command.env_remove("SUBLET_RUNTIME_DIR");
    command.env("XDG_RUNTIME_DIR", fixture.at("xdg"));
    if !PathBuf::from("/run/sublet").exists() {
        let outcome = Outcome::of(&mut command);
        let expected = format!(
            "sublet: no journal at {} or /run/sublet/journal.jsonl: no arbiter has run there\n",
            fixture.at("xdg/sublet/journal.jsonl").display()
        );
        assert_eq!((outcome.code, outcome.stderr), (Some(0), expected));
    }
}

#[test]
fn a_place_that_others_could_have_prepared_is_refused() {
    let fixture = with_journal();
    fs::set_permissions(fixture.at("run"), fs::Permissions::from_mode(0o777)).unwrap();
    fixture.run(&["events"]).is_error(125, &["0777", "chmod"]);
}

#[test]
fn what_is_no_event_is_left_out_and_counted_and_half_a_line_is_not_there_yet() {
    let fixture = Fixture::without_arbiter();
    append(&fixture, &plain(1));
    append(&fixture, "no JSON\n{}\n\0\0\0\n\"text\"\n\u{fe}\n");
    append(&fixture, &plain(2));
    // An older arbiter was killed in the middle of a line: its successor has ended that.
    append(&fixture, "{\"seq\":3,\"unix_\n");
    append(&fixture, &plain(4));
    let half = plain(5);
    append(&fixture, &half[..half.len() - 1]);
    let outcome = fixture.run(&["events"]);
    assert_eq!(numbers(&outcome), [1, 2, 4]);
    let expected = format!(
        "sublet: warning: 6 lines that are no events were left out of {}\n",
        journal(&fixture).display()
    );
    assert_eq!(outcome.stderr, expected);
    append(&fixture, "\n");
    assert_eq!(numbers(&fixture.run(&["events"])), [1, 2, 4, 5]);
}

#[test]
fn an_event_of_a_newer_arbiter_is_shown_by_its_own_words() {
    let fixture = Fixture::without_arbiter();
    append(
        &fixture,
        "{\"seq\":1,\"unix_ms\":1795466100000,\"kind\":\"went_to_bed\",\"message\":\"m\",\"where\":[1]}\n",
    );
    let outcome = fixture.run(&["events"]);
    assert_eq!(
        outcome.stdout,
        "2026-11-23T20:35:00.000Z  went to bed         -             m\n"
    );
    let outcome = fixture.run(&["events", "--json"]);
    let value: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(value["kind"], "went_to_bed");
    assert_eq!(outcome.stderr, "");
}

#[test]
fn words_of_others_do_not_reach_the_terminal() {
    let fixture = Fixture::without_arbiter();
    append(
        &fixture,
        &plain(1).replace("message 1", "process 1 (\\u001b[2J\\nsh) is in"),
    );
    let outcome = fixture.run(&["events"]);
    assert!(
        outcome
            .stdout
            .ends_with("process 1 (\\u{1b}[2J\\nsh) is in\n"),
        "{outcome:?}"
    );
    assert_eq!(outcome.stdout.lines().count(), 1);
}

#[test]
fn it_follows_over_half_lines_rotation_and_another_arbiter_until_ctrl_c() {
    let fixture = Fixture::without_arbiter();
    (1..=12).for_each(|seq| append(&fixture, &plain(seq)));
    let mut follower = Follower::new(&fixture, &[]);
    (3..=12).for_each(|seq| follower.shows(seq));
    // In two halves.
    let text = plain(13);
    let (first, second) = text.split_at(20);
    append(&fixture, first);
    append(&fixture, second);
    follower.shows(13);
    // Put aside, with a line that was written just before.
    append(&fixture, &plain(14));
    rotate(&fixture);
    append(&fixture, &plain(15));
    follower.shows(14);
    follower.shows(15);
    append(&fixture, &plain(16));
    rotate(&fixture);
    follower.shows(16);
    append(&fixture, &plain(17));
    follower.shows(17);
    // The next arbiter goes on in the same file, after half a line of the one before.
    append(&fixture, "{\"seq\":18,\n");
    append(&fixture, &plain(19));
    follower.shows(19);
    // The directory is made anew.
    fs::remove_dir_all(fixture.at("run")).unwrap();
    fs::create_dir(fixture.at("run")).unwrap();
    append(&fixture, &plain(1));
    follower.shows(1);
    kill(follower.pid(), Signal::SIGINT).unwrap();
    let status = within::wait(&mut follower.child, "sublet events", testbed::PATIENCE);
    assert_eq!(status.signal(), Some(2), "as every command");
    let stderr = fs::read_to_string(fixture.at("stderr")).unwrap();
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(
        stderr.contains("a line that is no event was left out"),
        "{stderr}"
    );
}

#[test]
fn it_follows_only_what_is_asked_for() {
    let fixture = with_journal();
    let flags = ["--job", "train", "-n", "1", "--json"];
    let mut follower = Follower::new(&fixture, &flags);
    let seq = |line: String| serde_json::from_str::<Value>(&line).unwrap()["seq"].as_u64();
    assert_eq!(seq(follower.line()), Some(3));
    append(&fixture, &line(6, "oom", ("other", 9), json!({})));
    append(&fixture, &line(7, "oom", ("train", 9), json!({})));
    assert_eq!(seq(follower.line()), Some(7));
    let mut none = Follower::new(&fixture, &["-n", "0"]);
    let mut since = Follower::new(&fixture, &["--since", "2026-11-23T20:35:05Z"]);
    since.shows(5);
    since.shows(6);
    since.shows(7);
    append(&fixture, &plain(8));
    since.shows(8);
    // Nobody sees when it has found the journal's end; then it shows the next line.
    let deadline = std::time::Instant::now() + testbed::PATIENCE;
    let mut next = 9;
    while !none.has_line(Duration::from_millis(50)) {
        assert!(std::time::Instant::now() < deadline, "nothing to read");
        append(&fixture, &plain(next));
        next += 1;
    }
    let line = none.line();
    let shown = (8..next).any(|seq| line.ends_with(&format!(" message {seq}\n")));
    assert!(shown, "{line}");
}

#[test]
fn a_journal_that_is_not_there_yet_is_waited_for() {
    let fixture = Fixture::without_arbiter();
    fs::remove_dir(fixture.at("run")).unwrap();
    let mut follower = Follower::new(&fixture, &[]);
    let said = || fs::read_to_string(fixture.at("stderr")).unwrap_or_default();
    let deadline = std::time::Instant::now() + testbed::PATIENCE;
    while !said().contains("waiting for one") {
        assert!(std::time::Instant::now() < deadline, "{:?}", said());
        std::thread::sleep(Duration::from_millis(5));
    }
    fs::create_dir(fixture.at("run")).unwrap();
    append(&fixture, &plain(1));
    follower.shows(1);
    assert_eq!(said().lines().count(), 1, "{}", said());
}

#[test]
fn it_ends_when_nobody_reads_any_more_and_uses_no_processor_while_nothing_happens() {
    let fixture = Fixture::without_arbiter();
    append(&fixture, &plain(1));
    let mut follower = Follower::new(&fixture, &[]);
    follower.shows(1);
    let before = follower.ticks();
    // Not to wait for anything: what it takes in this time is measured.
    std::thread::sleep(Duration::from_secs(2));
    let used = follower.ticks() - before;
    assert!(used < 20, "{used} ticks in two seconds");
    let (unread, _kept) = std::io::pipe().unwrap();
    drop(std::mem::replace(
        &mut follower.lines,
        BufReader::new(ChildStdout::from(std::os::fd::OwnedFd::from(unread))),
    ));
    let status = within::wait(&mut follower.child, "sublet events", testbed::PATIENCE);
    assert_eq!(
        status.code(),
        Some(0),
        "nothing was written, and it is over"
    );
}

#[test]
fn a_disk_that_takes_nothing_is_reported_and_a_reader_that_has_enough_is_not() {
    let fixture = with_journal();
    let mut command = fixture.sublet(["events"]);
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    command.stdout(full).stderr(Stdio::piped());
    let outcome: Outcome =
        within::output(command.spawn().unwrap(), "events", testbed::PATIENCE).into();
    outcome.is_error(125, &["cannot write to stdout", "No space left"]);

    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = fixture.sublet(["events"]);
    command.stdout(writer).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    drop(command);
    let outcome: Outcome = within::output(child, "events", testbed::PATIENCE).into();
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
}

#[test]
fn a_journal_of_100_megabytes_is_read_in_little_memory() {
    let fixture = Fixture::without_arbiter();
    let mut file = BufWriter::new(File::create(journal(&fixture)).unwrap());
    let mut write = |text: &str| file.write_all(text.as_bytes()).unwrap();
    write(&line(1, "oom", ("needle", 5), json!({})));
    let long = "x".repeat(2000);
    let many = plain(2).replace("message 2", &format!("message 2 {long}"));
    let block = many.repeat(100);
    (0..500).for_each(|_| write(&block));
    write(&line(3, "oom", ("needle", 5), json!({})));
    file.flush().unwrap();
    drop(file);
    assert!(journal(&fixture).metadata().unwrap().len() > 100_000_000);
    let mut follower = Follower::new(&fixture, &["--job", "needle"]);
    follower.shows(1);
    follower.shows(3);
    let peak_kib = follower.status("VmHWM");
    assert!(peak_kib < 48 << 10, "{peak_kib} KiB");
}

/// A fixture whose journal is not ours to read, and the command as somebody who may not: root may
/// read everything.
fn denied(fixture: &Fixture) -> Command {
    let root = fixture.at("run").parent().unwrap().to_owned();
    for (path, mode) in [
        (root, 0o755),
        (fixture.at("run"), 0o755),
        (journal(fixture), 0),
    ] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let mut command = fixture.sublet(["events"]);
    if nix::unistd::geteuid().is_root() {
        let program = fixture.at("sublet");
        if !program.exists() {
            fs::copy(env!("CARGO_BIN_EXE_sublet"), &program).unwrap();
        }
        let environment: Vec<_> = command
            .get_envs()
            .filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned())))
            .collect();
        command = Command::new(program);
        command.arg("events").env_clear().envs(environment);
        command
            .current_dir("/")
            .stdin(Stdio::null())
            .uid(65_534)
            .gid(65_534);
    }
    command
}

#[test]
fn a_journal_that_is_not_ours_to_read_and_no_arbiter_to_ask_are_one_error() {
    let fixture = with_journal();
    let outcome = Outcome::of(&mut denied(&fixture));
    let owner = format!("user {}'s", nix::unistd::geteuid());
    outcome.is_error(
        125,
        &["cannot read", "journal.jsonl", &owner, "no arbiter runs"],
    );
}

#[test]
fn of_a_journal_that_is_not_ours_to_read_the_arbiter_tells_what_it_keeps() {
    let fixture = Fixture::answering(|request| match request {
        Request::Events { since_seq, limit } => {
            let event = |seq: u64| Event {
                seq,
                unix_ms: BEGUN + seq * 1000,
                kind: "attached".into(),
                job: if seq.is_multiple_of(2) { "even" } else { "odd" }.into(),
                job_id: 1 + seq % 2,
                message: format!("message {seq}"),
                ..Event::default()
            };
            let above = (21..=120).filter(|seq| *seq > since_seq);
            Ok(Reply::Events(
                above
                    .take(usize::try_from(limit).unwrap())
                    .map(event)
                    .collect(),
            ))
        }
        other => panic!("not expected here: {other:?}"),
    });
    fs::write(journal(&fixture), plain(1)).unwrap();
    fs::set_permissions(
        fixture.at("run/api.sock"),
        fs::Permissions::from_mode(0o777),
    )
    .unwrap();
    let outcome = Outcome::of(&mut denied(&fixture));
    assert_eq!(numbers(&outcome), (21..=120).collect::<Vec<u64>>());
    assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
    for word in ["cannot read", "journal.jsonl", "the arbiter is asked"] {
        assert!(outcome.stderr.contains(word), "{outcome:?}");
    }
    let outcome = Outcome::of(denied(&fixture).args(["--job", "even", "-n", "2"]));
    assert_eq!(numbers(&outcome), [118, 120]);
    let outcome = Outcome::of(denied(&fixture).args(["--job", "nobody"]));
    assert_eq!(numbers(&outcome), NONE);
    assert!(
        outcome.stderr.contains("no event of job `nobody`"),
        "{outcome:?}"
    );
}
