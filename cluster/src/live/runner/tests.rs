use super::*;

#[test]
fn an_attempt_is_claimed_once() {
    let dir = tempfile::tempdir().unwrap();
    let own = Claim {
        runner: Process::own(),
        stopped: false,
    };
    claim(dir.path(), &own).unwrap();
    assert_eq!(
        claim(dir.path(), &own).unwrap_err().kind(),
        io::ErrorKind::AlreadyExists
    );
    let started = || read_started(dir.path()).unwrap().unwrap();
    assert!(started().runner.lives());
    assert!(!mark_stopped(dir.path()).unwrap(), "somebody runs it");
    assert_eq!(started(), own);
    fs::write(dir.path().join("started"), "").unwrap();
    assert!(!started().runner.lives(), "made and never written");
}

#[test]
fn a_runner_that_is_not_there_is_not_asked() {
    let dir = tempfile::tempdir().unwrap();
    assert!(!ask(dir.path(), Ask::Kill).unwrap(), "not yet");
    let mut asked = listen(dir.path()).unwrap();
    assert!(ask(dir.path(), Ask::End).unwrap() && ask(dir.path(), Ask::Kill).unwrap());
    let mut bytes = [0; 8];
    assert_eq!(asked.read(&mut bytes).unwrap(), 2);
    assert_eq!(&bytes[..2], b"ek");
    drop(asked);
    assert!(!ask(dir.path(), Ask::Kill).unwrap(), "not any more");
}

#[test]
fn a_job_gets_no_variable_of_the_arbiter_that_is_not_meant_for_it() {
    let spec = SpecFile {
        sublet: "/bin/sublet".into(),
        start: StartRun {
            env: [("OWN".to_owned(), "1".to_owned())].into(),
            ..StartRun::default()
        },
        pass: vec!["CARGO_MANIFEST_DIR".into()],
        ..SpecFile::default()
    };
    let user = User {
        uid: 7,
        gid: 7,
        name: "somebody".into(),
        home: "/home/somebody".into(),
        shell: "/bin/sh".into(),
        become_it: Box::new(|| Ok(())),
    };
    let command = command(&spec, &user, "w");
    let vars: std::collections::BTreeMap<String, String> = command
        .get_envs()
        .map(|(name, value)| {
            let text = |text: &std::ffi::OsStr| text.to_string_lossy().into_owned();
            (text(name), value.map(text).unwrap_or_default())
        })
        .collect();
    assert!(std::env::var_os("CARGO_PKG_NAME").is_some(), "one of ours");
    for name in vars.keys() {
        let known = NODE_VARIABLES.contains(&name.as_str())
            || name.starts_with("LC_")
            || name.starts_with("SUBLET_")
            || ["HOME", "USER", "LOGNAME", "SHELL", "CUDA_VISIBLE_DEVICES"]
                .contains(&name.as_str())
            || ["OWN", "CARGO_MANIFEST_DIR"].contains(&name.as_str());
        assert!(known, "{name}");
    }
    assert_eq!(vars["HOME"], "/home/somebody");
    assert_eq!(
        (vars["OWN"].as_str(), vars["USER"].as_str()),
        ("1", "somebody")
    );
    assert!(vars.contains_key("CARGO_MANIFEST_DIR"), "it was passed on");
    assert!(!vars.contains_key("CARGO_PKG_NAME"));
}

/// Where a test that runs by itself has its files.
const APART: &str = "SUBLET_TEST_APART";
const PATIENCE: Duration = Duration::from_secs(60);

/// A runner adopts and ends all children of its process, so it gets one of its own: this test,
/// started again by itself, with the words of a shell `before` it. `Some` there, with a directory
/// of its own.
fn apart(test: &str, before: &str) -> Option<PathBuf> {
    if let Some(dir) = std::env::var_os(APART) {
        return Some(dir.into());
    }
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new("sh")
        .args(["-c", &format!("{before} \"$@\""), "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &format!("live::runner::tests::{test}")])
        .args(["--nocapture", "--test-threads=1"])
        .env(APART, dir.path())
        .current_dir(dir.path())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    None
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A runner on a thread, with its records in a directory.
struct Trial {
    records: PathBuf,
    runner: std::thread::JoinHandle<io::Result<()>>,
}

impl Trial {
    /// A shell runs the script in the place of a job; `$AT` is the test's directory.
    fn of(at: &Path, records: PathBuf, script: &str) -> Self {
        let sublet = at.join("sublet");
        let stand_in = "#!/bin/sh\nwhile [ \"$1\" != -- ]; do shift; done; shift\nexec \"$@\"\n";
        fs::write(&sublet, stand_in).unwrap();
        fs::set_permissions(&sublet, fs::Permissions::from_mode(0o700)).unwrap();
        let spec = SpecFile {
            cluster: format!("t{}", std::process::id()),
            sublet,
            place: at.join("place"),
            start: StartRun {
                command: ["/bin/sh", "-c", script].map(str::to_owned).into(),
                env: [("AT".to_owned(), at.display().to_string())].into(),
                ..StartRun::default()
            },
            ..SpecFile::default()
        };
        write_spec(&records, &spec).unwrap();
        let dir = records.clone();
        let user = |_: Option<&str>| {
            Ok(User {
                uid: rustix::process::geteuid().as_raw(),
                gid: rustix::process::getegid().as_raw(),
                name: "tester".into(),
                home: "/".into(),
                shell: "/bin/sh".into(),
                become_it: Box::new(|| Ok(())),
            })
        };
        let runner = std::thread::spawn(move || run(&dir, user));
        Self { records, runner }
    }

    /// What is written down of its end, once the runner has ended.
    fn outcome(self) -> Ended {
        until("the runner ends", || {
            self.runner.is_finished().then_some(())
        });
        self.runner.join().unwrap().unwrap();
        serde_json::from_slice(&fs::read(self.records.join("exit.json")).unwrap()).unwrap()
    }

    /// Processes of the job, which carry its word.
    fn processes(&self) -> Vec<Process> {
        let traces = read::<Traces>(&self.records.join("traces.json"));
        traces.map_or_else(Vec::new, |traces| {
            carriers(&traces.variable, traces.uid).found
        })
    }
}

fn exists(path: &Path) -> Option<()> {
    path.exists().then_some(())
}

/// A disk of 256 KiB at `disk`, in a mount namespace of its own; else the test is passed over.
const SMALL_DISK: &str = "mkdir disk && exec unshare --mount sh -c \
     'mount -t tmpfs -o size=256k,mode=700 none disk && exec \"$@\"' sh";

fn may_mount() -> bool {
    let script = "mount -t tmpfs none /mnt";
    let tried = Command::new("unshare")
        .args(["--mount", "sh", "-c", script])
        .output();
    let may = tried.is_ok_and(|output| output.status.success());
    if !may {
        println!("now: skipped, this user may not mount a disk of its own");
    }
    may
}

/// Takes all that is left of a disk.
fn fill(disk: &Path) {
    let mut filler = File::create(disk.join("filler")).unwrap();
    let error = loop {
        if let Err(error) = filler.write_all(&[b'x'; 4096]) {
            break error;
        }
    };
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    assert!(fs::write(disk.join("more"), "more").is_err(), "it is full");
}

#[test]
fn a_disk_that_is_full_at_the_end_of_a_job_forgets_no_outcome() {
    if std::env::var_os(APART).is_none() && !may_mount() {
        return;
    }
    let name = "a_disk_that_is_full_at_the_end_of_a_job_forgets_no_outcome";
    let Some(at) = apart(name, SMALL_DISK) else {
        return;
    };
    let disk = at.join("disk");
    let records = disk.join("1.1");
    fs::create_dir(&records).unwrap();
    let script = "until [ -e \"$AT/enough\" ]; do sleep 0.01; done; echo well >> \"$AT/ran\"";
    let trial = Trial::of(&at, records, script);
    until("it runs", || exists(&trial.records.join("job.json")));
    fill(&disk);
    fs::write(at.join("enough"), "").unwrap();
    let ended = trial.outcome();
    assert!(ended.well(), "{ended:?}");
    assert_eq!(fs::read_to_string(at.join("ran")).unwrap(), "well\n");
    assert!(fs::write(disk.join("more"), "more").is_err(), "it is full");
}

#[test]
fn a_runner_stays_until_the_outcome_is_on_the_disk() {
    let Some(at) = apart("a_runner_stays_until_the_outcome_is_on_the_disk", "exec") else {
        return;
    };
    let records = at.join("1.1");
    // No file takes the place of a directory.
    let obstacle = records.join("exit.json");
    fs::create_dir_all(&obstacle).unwrap();
    let trial = Trial::of(&at, records, "exit 0");
    until("it is over", || is_over(&trial.records).then_some(()));
    let noted = until("the outcome is noted", || read_noted(&trial.records));
    assert!(noted.well(), "{noted:?}");
    assert!(!trial.runner.is_finished(), "it tries again");
    fs::remove_dir(obstacle).unwrap();
    let ended = trial.outcome();
    assert!(ended.well(), "{ended:?}");
}

#[test]
fn a_runner_whose_directory_is_gone_ends() {
    let Some(at) = apart("a_runner_whose_directory_is_gone_ends", "exec") else {
        return;
    };
    let records = at.join("1.1");
    fs::create_dir_all(records.join("exit.json")).unwrap();
    let trial = Trial::of(&at, records, "exit 0");
    until("the outcome is noted", || read_noted(&trial.records));
    fs::rename(&trial.records, at.join("elsewhere")).unwrap();
    until("it ends", || trial.runner.is_finished().then_some(()));
    assert!(trial.runner.join().unwrap().is_err());
}

/// The runner waits in the middle of writing its job down, and fails once somebody reads there.
fn a_pipe_in_the_place_of_the_record(records: &Path) -> impl FnOnce() + use<> {
    fs::create_dir(records).unwrap();
    let pipe = records.join("job.new");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, Mode::from_raw_mode(0o600)).unwrap();
    // A pipe cannot be synced.
    move || drop(fs::read(pipe).unwrap())
}

#[test]
fn a_job_that_cannot_be_written_down_is_ended_with_all_of_it_and_counts_as_lost() {
    let name = "a_job_that_cannot_be_written_down_is_ended_with_all_of_it_and_counts_as_lost";
    let Some(at) = apart(name, "exec") else {
        return;
    };
    let records = at.join("1.1");
    let fail = a_pipe_in_the_place_of_the_record(&records);
    // One of its own session whose parent has ended, one below it, and the job.
    let script = "(setsid sh -c 'sleep 1000 & echo >> \"$AT/begun\"; wait' &); \
                  until [ -e \"$AT/begun\" ]; do sleep 0.01; done; echo > \"$AT/runs\"; exec sleep 1000";
    let trial = Trial::of(&at, records, script);
    until("all of it runs", || exists(&at.join("runs")));
    let all = trial.processes();
    assert!(all.len() >= 3, "{all:?}");
    fail();
    until("the runner ends", || {
        trial.runner.is_finished().then_some(())
    });
    assert_eq!(trial.processes(), [], "nothing of it is left");
    let ended = trial.outcome();
    assert!(!ended.never_started, "it ran: {ended:?}");
    assert_eq!((ended.code, ended.signal), (None, None));
    assert!(
        ended.words.contains("could not be written down"),
        "{ended:?}"
    );
}

#[test]
fn a_job_that_ends_well_before_it_is_written_down_has_ended_well() {
    let name = "a_job_that_ends_well_before_it_is_written_down_has_ended_well";
    let Some(at) = apart(name, "exec") else {
        return;
    };
    let records = at.join("1.1");
    let fail = a_pipe_in_the_place_of_the_record(&records);
    let trial = Trial::of(&at, records, "echo > \"$AT/ran\"");
    until("it has run", || exists(&at.join("ran")));
    until("it has ended", || {
        trial.processes().is_empty().then_some(())
    });
    fail();
    let ended = trial.outcome();
    assert!(ended.well(), "{ended:?}");
}

#[test]
fn traces_that_cannot_be_read_do_not_mean_that_nothing_is_left() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(end_orphans(dir.path()), Orphans::None, "none was started");
    fs::create_dir(dir.path().join("traces.json")).unwrap();
    assert_eq!(end_orphans(dir.path()), Orphans::Some, "it is not known");
}

#[test]
fn an_outcome_fits_into_its_space_whatever_the_last_words_are() {
    let ended = Ended {
        code: Some(1),
        words: "\u{1}".repeat(10_000),
        ..Ended::default()
    };
    let bytes = outcome(&ended).unwrap();
    assert!(bytes.len() <= reserved::SPACE);
    let read: Ended = serde_json::from_slice(&bytes).unwrap();
    assert_eq!(read.code, Some(1));
    assert!(!read.words.is_empty());
}

#[test]
fn a_process_that_cannot_be_looked_at_now_has_not_ended() {
    let name = "a_process_that_cannot_be_looked_at_now_has_not_ended";
    if apart(name, "ulimit -n 64 && exec").is_none() {
        return;
    }
    // With no hold on this test's own output, should it fail.
    let mut child = Command::new("sleep")
        .arg("1000")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let process = Process::of(child.id()).unwrap();
    let mut all = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        all.push(file);
    }
    let (lives, has_ended) = (process.lives(), process.has_ended());
    drop(all);
    assert!(!lives && !has_ended, "it is not known");
    assert!(process.lives() && !process.has_ended());
    child.kill().unwrap();
    until("it ends", || process.has_ended().then_some(()));
    child.wait().unwrap();
    assert!(process.has_ended() && Process::default().has_ended());
}
