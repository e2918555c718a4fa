use std::io::{BufRead, BufReader};

use super::*;
use crate::live::process::Process;
use crate::live::runner::Claim;

const RUN: RunId = RunId { job: 1, attempt: 1 };

/// An engine whose runners never come to their attempts.
fn engine(dir: &Path) -> (LocalEngine, PathBuf) {
    let mut engine = LocalEngine::new(LocalConfig {
        records: dir.join("runs"),
        places: dir.join("jobs"),
        executable: "/bin/true".into(),
        ..LocalConfig::default()
    });
    engine.join("c").unwrap();
    let record = engine.path(RUN);
    (engine, record)
}

/// What is said of the only attempt.
fn look(engine: &mut LocalEngine) -> Option<Ended> {
    let mut all = engine.list().unwrap();
    assert_eq!(all.len(), 1, "{all:?}");
    all.pop().unwrap().ended
}

fn claimed_by(record: &Path, runner: Process) {
    let claim = Claim {
        runner,
        stopped: false,
    };
    fs::write(record.join("started"), serde_json::to_vec(&claim).unwrap()).unwrap();
}

fn well() -> Ended {
    Ended {
        code: Some(0),
        ..Ended::default()
    }
}

#[test]
fn an_outcome_outlives_a_runner_that_was_killed_before_it_published_it() {
    let dir = tempfile::tempdir().unwrap();
    let (mut engine, record) = engine(dir.path());
    engine.start(RUN, &StartRun::default()).unwrap();
    claimed_by(&record, Process::default());
    let noted = serde_json::to_string(&well()).unwrap() + "   ";
    fs::write(record.join("exit.new"), noted).unwrap();
    for _ in 0..2 {
        assert_eq!(look(&mut engine), Some(well()));
    }
    assert!(record.join("exit.json").exists(), "and is published");
}

#[test]
fn an_outcome_that_cannot_be_read_is_not_replaced_by_another_one() {
    let dir = tempfile::tempdir().unwrap();
    let (mut engine, record) = engine(dir.path());
    engine.start(RUN, &StartRun::default()).unwrap();
    claimed_by(&record, Process::default());
    let exit = record.join("exit.json");
    fs::create_dir(&exit).unwrap();
    assert_eq!(look(&mut engine), None, "whether it is over is not known");
    fs::remove_dir(&exit).unwrap();
    fs::write(&exit, serde_json::to_vec(&well()).unwrap()).unwrap();
    assert_eq!(look(&mut engine), Some(well()));
}

#[test]
fn an_attempt_that_is_stopped_before_it_begins_never_started_on_a_full_disk_too() {
    let dir = tempfile::tempdir().unwrap();
    let (mut engine, record) = engine(dir.path());
    engine.start(RUN, &StartRun::default()).unwrap();
    // Nothing can be written in the place of a directory.
    let space = record.join("exit.new");
    let _ = fs::remove_file(&space);
    fs::create_dir(&space).unwrap();
    engine.stop(RUN, false).unwrap();
    engine.stop(RUN, true).unwrap();
    let ended = look(&mut engine).expect("no runner can begin it");
    assert!(ended.never_started, "{ended:?}");
    let claim = runner::read_started(&record).unwrap().unwrap();
    assert!(!claim.runner.lives(), "no process is killed for it");
}

#[test]
fn a_repeated_start_that_fails_is_refused_once_no_runner_can_come() {
    let dir = tempfile::tempdir().unwrap();
    let (mut engine, record) = engine(dir.path());
    engine.start(RUN, &StartRun::default()).unwrap();
    // The runner of that start is on its way. Nothing is written over a directory.
    fs::create_dir(record.join("spec.new")).unwrap();
    assert!(engine.start(RUN, &StartRun::default()).is_err());
    assert!(!runner::mark_stopped(&record).unwrap(), "it is claimed");
    assert!(look(&mut engine).expect("it is over").never_started);

    fs::remove_file(record.join("started")).unwrap();
    let _ = fs::remove_file(record.join("exit.json"));
    let own = record.join(format!("started.{}", std::process::id()));
    fs::create_dir(&own).unwrap();
    engine
        .start(RUN, &StartRun::default())
        .expect("it cannot be claimed, so a runner may come");
    assert_eq!(look(&mut engine), None);
}

#[test]
fn a_start_that_is_refused_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (mut engine, record) = engine(dir.path());
    engine.config.executable = dir.path().join("missing");
    assert!(engine.start(RUN, &StartRun::default()).is_err());
    assert!(!record.exists());
    assert_eq!(engine.list().unwrap(), []);
}

#[test]
fn a_runner_that_writes_the_outcome_down_is_not_killed() {
    let dir = tempfile::tempdir().unwrap();
    let (mut engine, record) = engine(dir.path());
    engine.start(RUN, &StartRun::default()).unwrap();
    let mut runner = Command::new("cat")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let process = Process::of(runner.id()).unwrap();
    claimed_by(&record, process);
    fs::write(record.join("traces.json"), "").unwrap();
    let long_ago = Instant::now().checked_sub(2 * HEAR).unwrap();
    engine.killed.insert(RUN, long_ago);
    assert_eq!(look(&mut engine), None);
    let (mut to, from) = (runner.stdin.take().unwrap(), runner.stdout.take().unwrap());
    to.write_all(b"well\n").unwrap();
    let mut answer = String::new();
    BufReader::new(from).read_line(&mut answer).unwrap();
    // Where it is asked: its job runs.
    fs::write(record.join("asked"), "").unwrap();
    assert_eq!(look(&mut engine), None);
    // One that was not killed ends here.
    drop(to);
    let killed = runner.wait().unwrap();
    assert_eq!(answer, "well\n", "it knows how the job ended");
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&killed),
        Some(9)
    );
}

#[test]
fn an_attempt_whose_runner_was_killed_before_the_start_never_started() {
    let dir = tempfile::tempdir().unwrap();
    let (mut engine, record) = engine(dir.path());
    engine.start(RUN, &StartRun::default()).unwrap();
    claimed_by(&record, Process::default());
    let ended = look(&mut engine).expect("it is over");
    assert!(ended.never_started, "{ended:?}");

    let later = RunId { attempt: 2, ..RUN };
    engine.forget(RUN).unwrap();
    engine.start(later, &StartRun::default()).unwrap();
    let record = engine.path(later);
    claimed_by(&record, Process::default());
    fs::write(record.join("traces.json"), "").unwrap();
    let ended = look(&mut engine).expect("it is over");
    assert!(
        !ended.never_started,
        "what it came to is not known: {ended:?}"
    );
}

#[test]
fn an_attempt_is_over_when_no_process_of_its_can_be_there_any_more() {
    let dir = tempfile::tempdir().unwrap();
    let (mut engine, record) = engine(dir.path());
    engine.start(RUN, &StartRun::default()).unwrap();
    claimed_by(&record, Process::default());
    let word = format!("t{}", std::process::id());
    let traces = serde_json::json!({
        "variable": format!("SUBLET_TEST_ORPHAN={word}"),
        "uid": rustix::process::geteuid().as_raw(),
    });
    fs::write(record.join("traces.json"), traces.to_string()).unwrap();
    // Its environment is not to be seen at first, in most runs; that of the other one never is.
    let mut orphan = Command::new("sleep");
    orphan.arg("600").env("SUBLET_TEST_ORPHAN", &word);
    let mut orphan = orphan.spawn().unwrap();
    let mut bare = Command::new("sleep");
    let mut bare = bare.arg("600").env_clear().spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut looks = 0;
    while look(&mut engine).is_none() {
        assert!(Instant::now() < deadline, "in vain");
        looks += 1;
        std::thread::sleep(Duration::from_millis(1));
    }
    let ended = orphan.try_wait().unwrap();
    bare.kill().unwrap();
    bare.wait().unwrap();
    orphan.kill().unwrap();
    orphan.wait().unwrap();
    println!("now: over after {looks} looks");
    assert!(ended.is_some(), "it was called over beside its own process");
    assert!(looks > 1, "it is not known at the first look");
    assert!(engine.quiet.is_empty());
}
