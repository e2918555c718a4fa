//! Who belongs to a job: processes that outlive its launcher, many of them at once, and those that
//! get out of its limits.

use std::os::unix::net::UnixStream;

use control::{JobState, JobStatus};
use nix::sys::signal::Signal;
use tests::{Outcome, ProgramRun, Running, Sandbox, programs, wait_until};

/// A shell that leaves a process behind and ends: that one waits for the file `start`, and then
/// gets the command to use the device by `words`; what it is answered lies in `said` in the end.
fn left_behind(sandbox: &Sandbox, words: &str) -> String {
    std::fs::write(sandbox.path("words"), words).expect("a file");
    format!(
        "(n=0; while [ ! -e start ] && [ $n -lt 2000 ]; do n=$((n+1)); sleep 0.05; done; {} <words >answers 2>&1; mv answers said) \
         </dev/null >/dev/null 2>&1 & exit 0",
        programs::program("memory").display()
    )
}

const BEYOND_AND_WITHIN: &str = "init\nalloc plain 2147483648\nalloc plain 536870912\n";
const REFUSED_AND_GIVEN: &str = "0\n2 -1\n0 0\n";

fn dormant(sandbox: &Sandbox, name: &str) -> JobStatus {
    wait_until("the job is dormant", || {
        sandbox
            .job_status(name)
            .filter(|job| job.state == JobState::Dormant)
    })
}

fn said(sandbox: &Sandbox) -> String {
    wait_until("the process is done", || {
        std::fs::read_to_string(sandbox.path("said")).ok()
    })
}

fn kinds(sandbox: &Sandbox) -> Vec<String> {
    sandbox
        .events()
        .into_iter()
        .map(|event| event.kind)
        .collect()
}

#[test]
fn a_process_that_outlives_its_launcher_has_the_jobs_limits() {
    for flags in [
        &["--name", "left", "--mem", "1GiB"][..],
        &["--name", "left", "--mem", "1GiB", "--strict"],
    ] {
        let sandbox = Sandbox::new();
        let _arbiter = sandbox.arbiter();
        let script = left_behind(&sandbox, BEYOND_AND_WITHIN);
        Outcome::of(sandbox.job(flags, "sh").args(["-c", &script])).succeeded();
        let job = dormant(&sandbox, "left");
        assert!(job.dormant_processes.unwrap_or(0) >= 1, "{job:?}");
        let ps = Outcome::of(&mut sandbox.sublet(["ps"])).succeeded();
        assert!(ps.stdout.contains("left is dormant"), "{ps:?}");
        std::fs::write(sandbox.path("start"), "").expect("a file");
        assert_eq!(said(&sandbox), REFUSED_AND_GIVEN);
        wait_until("nothing of it is left", || {
            sandbox
                .job_status("left")
                .is_none_or(|job| job.state == JobState::Gone)
                .then_some(())
        });
        let kinds = wait_until("its end is reported", || {
            let kinds = kinds(&sandbox);
            kinds.contains(&"ended".into()).then_some(kinds)
        });
        let at = |kind: &str| kinds.iter().position(|one| one == kind);
        assert!(
            at("dormant") < at("woken") && at("woken") < at("ended"),
            "{kinds:?}"
        );
        assert!(at("dormant").is_some(), "{kinds:?}");
    }
}

#[test]
fn a_dormant_job_outlives_its_arbiter() {
    let sandbox = Sandbox::new();
    let mut arbiter = sandbox.arbiter();
    let script = left_behind(&sandbox, BEYOND_AND_WITHIN);
    let flags = ["--name", "left", "--mem", "1GiB"];
    Outcome::of(sandbox.job(&flags, "sh").args(["-c", &script])).succeeded();
    dormant(&sandbox, "left");
    arbiter.kill();
    arbiter.wait();
    let _next = sandbox.arbiter();
    dormant(&sandbox, "left");
    std::fs::write(sandbox.path("start"), "").expect("a file");
    assert_eq!(said(&sandbox), REFUSED_AND_GIVEN);
}

#[test]
fn an_arbiter_does_not_end_while_a_dormant_job_has_living_processes() {
    let sandbox = Sandbox::new();
    let mut arbiter = Running::start(&mut sandbox.sublet(["arbiter", "--idle-exit", "1s"]));
    wait_until("the arbiter answers", || {
        sandbox.control().ok()?.status().ok()
    });
    let script = left_behind(&sandbox, BEYOND_AND_WITHIN);
    let flags = ["--name", "left", "--mem", "1GiB"];
    Outcome::of(sandbox.job(&flags, "sh").args(["-c", &script])).succeeded();
    let since_ms = wait_until("it was dormant for longer than the arbiter is idle", || {
        let uptime_ms = sandbox.control().ok()?.status().ok()?.uptime_ms;
        let event = sandbox
            .events()
            .into_iter()
            .find(|event| event.kind == "dormant")?;
        let started_ms = sandbox.control().ok()?.status().ok()?.started_unix_ms;
        (started_ms + uptime_ms > event.unix_ms + 3000).then_some(event.unix_ms)
    });
    assert!(since_ms > 0 && !arbiter.has_ended());
    std::fs::write(sandbox.path("start"), "").expect("a file");
    assert_eq!(said(&sandbox), REFUSED_AND_GIVEN);
    wait_until("it ends once nothing is left", || {
        arbiter.has_ended().then_some(())
    });
}

#[test]
fn what_a_dormant_job_was_promised_is_free_for_others_until_it_wakes() {
    let sandbox = Sandbox::new();
    let _arbiter = sandbox.arbiter();
    let script = left_behind(&sandbox, "init\n");
    let flags = ["--name", "left", "--share", "0.8"];
    Outcome::of(sandbox.job(&flags, "sh").args(["-c", &script])).succeeded();
    dormant(&sandbox, "left");
    // The same name, and a share that would not fit beside the other one.
    let other = Running::start(sandbox.job(&flags, "sleep").arg("1000"));
    wait_until("the other one has the name", || {
        sandbox
            .job_status("left")
            .filter(|job| job.state == JobState::Starting)
    });
    assert_eq!(dormant(&sandbox, "left-2").share_asked, Some(0.8));
    std::fs::write(sandbox.path("start"), "").expect("a file");
    let refused = wait_until("the sleeper is refused", || {
        sandbox
            .events()
            .into_iter()
            .find(|event| event.kind == "refused")
    });
    assert_eq!(
        (refused.job.as_str(), &refused.fields["outcome"]),
        ("left-2", &"full".into())
    );
    assert!(refused.message.contains("0.8"), "{}", refused.message);
    other.signal(Signal::SIGTERM);
    other.wait();
}

/// A program of the job that has lost the preload library.
fn escaping(sandbox: &Sandbox, flags: &[&str], script: &str) -> ProgramRun {
    let mut command = sandbox.job(flags, "sh");
    command.args(["-c", script]).arg("sh");
    ProgramRun::start(command.arg(programs::program("memory")))
}

const REPLACED: &str = "LD_PRELOAD= exec \"$1\"";
const CLEANED: &str = "env -i LD_LIBRARY_PATH=\"$LD_LIBRARY_PATH\" SUBLET_SIM_STATE=\"$SUBLET_SIM_STATE\" \
     SUBLET_SIM_CAPACITY=8GiB SUBLET_SIM_CONTEXT=0B \"$1\"; exit 0";

#[test]
fn a_process_that_lost_the_library_is_reported_in_ps_the_journal_and_at_the_end_of_run() {
    for script in [REPLACED, CLEANED] {
        let sandbox = Sandbox::new();
        let _arbiter = sandbox.arbiter();
        let mut run = escaping(&sandbox, &["--name", "out", "--mem", "1GiB"], script);
        let pid = run.ask("pid");
        assert_eq!(run.ask("init"), "0");
        assert_eq!(run.ask("alloc plain 2147483648"), "0 0");
        let since = std::time::Instant::now();
        let escaped = wait_until("it is reported", || {
            sandbox.job_status("out")?.escaped.into_iter().next()
        });
        println!("now: reported after {} ms", since.elapsed().as_millis());
        assert_eq!(escaped.pid.to_string(), pid);
        assert_eq!(escaped.devices, [0]);
        assert!(escaped.used_bytes >= 2 << 30, "{escaped:?}");
        assert!(
            escaped.reason.contains("libsublet.so is not loaded"),
            "{escaped:?}"
        );
        let ps = Outcome::of(&mut sandbox.sublet(["ps"])).succeeded();
        let line = format!("escaped: process {pid} (");
        assert!(ps.stdout.contains(&line), "{ps:?}");
        assert!(!ps.stdout.contains("not managed"), "{ps:?}");
        let reported = sandbox
            .events()
            .into_iter()
            .find(|event| event.kind == "escaped");
        assert_eq!(reported.map(|event| event.job).as_deref(), Some("out"));
        let outcome = run.finish().succeeded();
        let line = format!("sublet: warning:  {line}");
        assert!(outcome.stderr.contains(&line), "{outcome:?}");
    }
}

#[test]
fn a_strict_job_is_ended_for_a_process_that_lost_the_library() {
    let sandbox = Sandbox::new();
    let _arbiter = sandbox.arbiter();
    // Another process of the job, which does nothing, ends with it.
    let script = format!("sleep 1000 & echo $! >other; {CLEANED}");
    let mut run = escaping(&sandbox, &["--name", "out", "--strict"], &script);
    let other = wait_until("the other one is there", || {
        let text = std::fs::read_to_string(sandbox.path("other")).ok()?;
        text.trim().parse::<i32>().ok()
    });
    assert_eq!(run.ask("init"), "0");
    let since = std::time::Instant::now();
    wait_until("the job is ended", || run.running.has_ended().then_some(()));
    println!("now: ended after {} ms", since.elapsed().as_millis());
    let gone = || nix::sys::signal::kill(nix::unistd::Pid::from_raw(other), None).is_err();
    wait_until("all of it", || gone().then_some(()));
    let outcome = run.finish();
    assert_eq!(outcome.signal, Some(9), "{outcome:?}");
    assert!(
        outcome
            .stderr
            .contains("the job was ended for it (--strict)"),
        "{outcome:?}"
    );
    let kinds = kinds(&sandbox);
    assert!(
        kinds.contains(&"escaped".into()) && kinds.contains(&"strict".into()),
        "{kinds:?}"
    );
}

#[test]
fn a_strict_job_is_ended_before_anybody_sees_a_process_of_it_end() {
    let sandbox = Sandbox::new();
    let _arbiter = sandbox.arbiter();
    // Each of the two shells would go on, and end well.
    let inner = CLEANED.replace("; exit 0", "; echo inner >>over");
    assert_ne!(inner, CLEANED);
    let script = format!("sh -c 'echo $$ >inner; {inner}' sh \"$1\"; echo outer >>over; exit 0");
    let mut run = escaping(&sandbox, &["--name", "out", "--strict"], &script);
    assert_eq!(run.ask("init"), "0");
    let inner = std::fs::read_to_string(sandbox.path("inner")).expect("it has begun");
    let inner = nix::unistd::Pid::from_raw(inner.trim().parse().expect("a process id"));
    wait_until("the job is ended", || run.running.has_ended().then_some(()));
    let gone = || nix::sys::signal::kill(inner, None).is_err();
    wait_until("all of it", || gone().then_some(()));
    let outcome = run.finish();
    assert_eq!(outcome.signal, Some(9), "{outcome:?}");
    let over = std::fs::read_to_string(sandbox.path("over"));
    assert!(over.is_err(), "went on: {over:?}");
}

#[test]
fn a_strict_job_whose_processes_are_all_inside_is_left_alone() {
    let sandbox = Sandbox::new();
    let _arbiter = sandbox.arbiter();
    let flags = ["--name", "in", "--strict", "--mem", "1GiB"];
    let mut run = ProgramRun::start(&mut sandbox.job(&flags, programs::program("memory")));
    assert_eq!(run.ask("init"), "0");
    assert_eq!(run.ask("alloc plain 1048576"), "0 0");
    // A stranger on the device, so that it can be seen that somebody has looked.
    let mut stranger = ProgramRun::start(&mut sandbox.bare(programs::program("memory")));
    assert_eq!(stranger.ask("init"), "0");
    wait_until("the stranger is seen", || {
        let status = sandbox.control().ok()?.status().ok()?;
        (!status.devices.first()?.unmanaged.is_empty()).then_some(())
    });
    let uptime = || {
        sandbox
            .control()
            .ok()?
            .status()
            .ok()
            .map(|status| status.uptime_ms)
    };
    let since = wait_until("the arbiter answers", uptime);
    wait_until("it was looked at for a while", || {
        (uptime()? > since + 2500).then_some(())
    });
    assert_eq!(
        sandbox.job_status("in").map(|job| job.escaped),
        Some(Vec::new())
    );
    stranger.ended_well();
    run.finish().succeeded();
    assert!(!kinds(&sandbox).contains(&"strict".into()));
}

#[test]
fn a_job_with_limits_has_no_child_that_it_never_had() {
    let sandbox = Sandbox::new();
    let _arbiter = sandbox.arbiter();
    // Nothing but what the shell does itself, which starts no process.
    let script = "read -r children </proc/$$/task/$$/children; echo \"[$children]\"; \
         for fd in 3 4 5 6 7 8 9; do [ -e /proc/$$/fd/$fd ] && echo $fd; done; true";
    let with = |flags: &[&str]| {
        let mut command = sandbox.job(flags, "sh");
        Outcome::of(command.args(["-c", script])).succeeded().stdout
    };
    assert_eq!(with(&["--mem", "1GiB"]), "[]\n");
    assert_eq!(with(&["--strict"]), "[]\n");
}

#[test]
fn processes_beyond_the_bound_are_refused_with_the_reason_and_slots_come_back_after_a_kill() {
    let sandbox = Sandbox::new();
    let file = sandbox.path("sublet.toml");
    std::fs::write(&file, "[limits]\njob_processes = 2\n").expect("a file");
    let mut arbiter = Running::start(sandbox.sublet(["arbiter", "--config"]).arg(&file));
    wait_until("the arbiter answers", || {
        sandbox.control().ok()?.status().ok()
    });
    let script = "for i in 1 2 3 4; do \"$1\" <pipe.$i >said.$i 2>&1 & echo $! >pid.$i; done; wait";
    for at in 1..=4 {
        let fifo = sandbox.path(&format!("pipe.{at}"));
        Outcome::of(sandbox.command("mkfifo").arg(fifo)).succeeded();
    }
    let mut command = sandbox.job(&["--name", "few", "--mem", "1GiB"], "sh");
    command.args(["-c", script]).arg("sh");
    let job = Running::start(command.arg(programs::program("memory")));
    let open =
        |at: u32| std::fs::File::create(sandbox.path(&format!("pipe.{at}"))).expect("a pipe");
    let pipes: Vec<std::fs::File> = (1..=4).map(open).collect();
    let said = |at: u32| {
        wait_until("it answers", || {
            let text = std::fs::read_to_string(sandbox.path(&format!("said.{at}"))).ok()?;
            text.lines().next().map(str::to_owned)
        })
    };
    let tell = |at: u32, words: &str| {
        use std::io::Write;
        let mut pipe = &pipes[at as usize - 1];
        pipe.write_all(words.as_bytes()).expect("it listens");
    };
    for at in 1..=2 {
        tell(at, "init\n");
        assert_eq!(said(at), "0");
    }
    tell(3, "init\n");
    assert_eq!(said(3), "802");
    let refused = wait_until("it is reported", || {
        sandbox
            .events()
            .into_iter()
            .find(|event| event.kind == "refused")
    });
    assert_eq!(
        (refused.job.as_str(), &refused.fields["outcome"]),
        ("few", &"full".into())
    );
    assert!(
        refused.message.contains("job_processes"),
        "{}",
        refused.message
    );
    let pid = std::fs::read_to_string(sandbox.path("pid.1")).expect("its id");
    let pid = nix::unistd::Pid::from_raw(pid.trim().parse().expect("a number"));
    nix::sys::signal::kill(pid, Signal::SIGKILL).expect("it lives");
    wait_until("its slot is back", || {
        (sandbox.job_status("few")?.processes.len() == 1).then_some(())
    });
    tell(4, "init\n");
    assert_eq!(said(4), "0");
    drop(pipes);
    job.wait();
    assert!(!arbiter.has_ended());
}

#[test]
fn ps_says_within_a_second_which_process_does_not_answer_and_why() {
    let sandbox = Sandbox::new();
    let arbiter = sandbox.arbiter();
    arbiter.signal(Signal::SIGSTOP);
    let stopped = Outcome::of(&mut sandbox.sublet(["ps"]));
    arbiter.signal(Signal::SIGCONT);
    assert_eq!(stopped.code, Some(125), "{stopped:?}");
    let pid = arbiter.pid();
    for word in [
        "within 800 ms".to_owned(),
        format!("its process {pid} is stopped"),
        format!("kill -CONT {pid}"),
    ] {
        assert!(stopped.stderr.contains(&word), "{stopped:?}");
    }
    wait_until("it answers again", || {
        (Outcome::of(&mut sandbox.sublet(["ps"])).code == Some(0)).then_some(())
    });
}

#[test]
fn an_arbiter_in_another_pid_namespace_is_listed_and_takes_no_job_with_the_reason() {
    let sandbox = Sandbox::new();
    let sublet = sandbox.sublet(["arbiter"]);
    let mut command = sandbox.command("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
    let mut arbiter = Running::start(command.arg(sublet.get_program()).arg("arbiter"));
    let there = wait_until("the arbiter answers", || {
        if arbiter.has_ended() {
            return Some(false);
        }
        sandbox.control().ok()?.status().ok().map(|_| true)
    });
    if !there {
        return eprintln!("skipped: no PID namespaces: {}", arbiter.take_stderr());
    }
    let ps = Outcome::of(&mut sandbox.sublet(["ps"])).succeeded();
    assert!(ps.stdout.contains("no jobs"), "{ps:?}");
    let run = Outcome::of(sandbox.job(&["--mem", "1GiB"], "true").arg("x"));
    assert_eq!(run.code, Some(125), "{run:?}");
    assert!(run.stderr.contains("another PID namespace"), "{run:?}");
    // For the same reason it obeys nobody there: who asks may be root of any container.
    let stop = Outcome::of(&mut sandbox.sublet(["arbiter", "--stop"]));
    assert_ne!(stop.code, Some(0), "{stop:?}");
    assert!(stop.stderr.contains("another PID namespace"), "{stop:?}");
}

#[test]
fn devices_that_nobody_uses_any_more_give_their_places_to_others() {
    let sandbox = Sandbox::new();
    let _arbiter = sandbox.arbiter();
    let job = |name: &str, sim: &str, devices: &str| {
        std::fs::create_dir_all(sandbox.path(sim)).expect("a directory");
        let mut command = sandbox.job(
            &["--name", name, "--mem", "1GiB"],
            programs::program("memory"),
        );
        command.env("SUBLET_SIM_STATE", sandbox.path(sim));
        if sim != "sim" {
            command.env("SUBLET_SIM_PROFILE", "t4");
        }
        ProgramRun::start(command.env("SUBLET_SIM_DEVICES", devices))
    };
    let mut first = job("first", "sim", "16");
    assert_eq!(first.ask("init"), "0");
    // All places are taken, and used.
    let mut second = job("second", "other", "1");
    second.ask("init");
    let refused = wait_until("it is refused", || {
        sandbox
            .events()
            .into_iter()
            .find(|event| event.kind == "refused")
    });
    assert_eq!(
        (refused.job.as_str(), &refused.fields["outcome"]),
        ("second", &"full".into())
    );
    assert!(
        refused.message.contains("table of 16 devices"),
        "{}",
        refused.message
    );
    second.kill();
    first.finish().succeeded();
    wait_until("the first is gone", || {
        let gone = |job: &JobStatus| job.state == JobState::Gone;
        sandbox.jobs().iter().all(gone).then_some(())
    });
    let mut third = job("third", "other", "1");
    assert_eq!(third.ask("init"), "0");
    assert_eq!(third.ask("alloc plain 2147483648"), "2 -1");
    assert_eq!(third.ask("alloc plain 536870912"), "0 0");
    third.finish().succeeded();
}

#[test]
fn two_jobs_run_beside_an_arbiter_with_40_descriptors_and_those_who_ask_are_answered() {
    let sandbox = Sandbox::new();
    let sublet = sandbox.sublet(["arbiter"]);
    let mut command = sandbox.command("sh");
    command.args(["-c", "ulimit -n 40; exec \"$1\" arbiter", "sh"]);
    let mut arbiter = Running::start(command.arg(sublet.get_program()));
    wait_until("the arbiter answers", || {
        sandbox.control().ok()?.status().ok()
    });
    let doctor = Outcome::of(&mut sandbox.sublet(["doctor", "--sim"]));
    assert!(
        doctor.stdout.contains("may have 40 descriptors"),
        "{doctor:?}"
    );
    let mut jobs = ["one", "other"].map(|name| {
        let flags = ["--name", name, "--mem", "1GiB"];
        let mut job = ProgramRun::start(&mut sandbox.job(&flags, programs::program("memory")));
        assert_eq!(job.ask("init"), "0");
        job
    });
    for job in &mut jobs {
        assert_eq!(job.ask("alloc plain 2147483648"), "2 -1");
    }
    // Who holds connections costs others nothing: the silent ones give way.
    let held: Vec<UnixStream> = (0..20)
        .map(|_| UnixStream::connect(sandbox.path("run/api.sock")).expect("connected"))
        .collect();
    let set = ["device", "set", "all", "--quantum", "9ms"];
    Outcome::of(&mut sandbox.sublet(set)).succeeded();
    drop(held);
    for job in jobs {
        job.finish().succeeded();
    }
    sandbox
        .control()
        .expect("an arbiter")
        .shutdown()
        .expect("it ends");
    let log = arbiter.take_stderr();
    let said = log.matches("there are few descriptors (40)").count();
    assert_eq!(said, 1, "{log}");
}

#[test]
fn an_arbiter_with_few_descriptors_refuses_with_the_reason_and_recovers() {
    let sandbox = Sandbox::new();
    let sublet = sandbox.sublet(["arbiter"]);
    let mut command = sandbox.command("sh");
    command.args(["-c", "ulimit -n 48; exec \"$1\" arbiter", "sh"]);
    let mut arbiter = Running::start(command.arg(sublet.get_program()));
    wait_until("the arbiter answers", || {
        sandbox.control().ok()?.status().ok()
    });
    let job = |at: u32| {
        let name = format!("job-{at}");
        let mut command = sandbox.job(&["--name", &name], programs::program("memory"));
        let mut job = Running::start(command.stdin(std::process::Stdio::piped()));
        let (mut to, from) = job.pipes();
        // It may have been refused and be gone.
        let _ = std::io::Write::write_all(&mut to, b"init\n");
        (job, to, from)
    };
    let mut jobs: Vec<_> = (0..16).map(job).collect();
    let lacking = "has no descriptors left";
    let reason = wait_until("the journal says that there are none left", || {
        let refused = sandbox
            .events()
            .into_iter()
            .find(|event| event.kind == "refused");
        if let Some(refused) = refused {
            return Some(refused.message);
        }
        let (job, ..) = jobs
            .iter_mut()
            .find_map(|all| all.0.has_ended().then_some(all))?;
        Some(job.take_stderr())
    });
    assert!(reason.contains(lacking), "{reason}");
    // Who asks is answered, and gets no nonsense.
    wait_until("who asks is answered", || {
        let ps = Outcome::of(&mut sandbox.sublet(["ps"]));
        (ps.code == Some(0) && ps.stdout.contains("job-")).then_some(())
    });
    drop(jobs);
    wait_until("all are gone", || {
        let gone = |job: &JobStatus| job.state == JobState::Gone;
        let jobs = sandbox.control().ok()?.list().ok()?;
        jobs.iter().all(gone).then_some(())
    });
    let flags = ["--name", "late", "--mem", "1GiB"];
    let mut last = ProgramRun::start(&mut sandbox.job(&flags, programs::program("memory")));
    assert_eq!(last.ask("init"), "0");
    assert_eq!(last.ask("alloc plain 2147483648"), "2 -1");
    last.finish().succeeded();
    assert!(!arbiter.has_ended());
}

#[test]
fn run_with_too_few_descriptors_says_so() {
    let sandbox = Sandbox::new();
    let sublet = sandbox.sublet(["run"]);
    let mut command = sandbox.command("sh");
    command.args(["-c", "ulimit -n 5; exec \"$1\" run --sim -- true", "sh"]);
    let refused = Outcome::of(command.arg(sublet.get_program()));
    assert_eq!(refused.code, Some(125), "{refused:?}");
    assert!(refused.stderr.contains("ulimit -n"), "{refused:?}");
}
