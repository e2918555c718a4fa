//! Deaths: of the arbiter, of the job that holds the device, of forked children.

use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use control::JobState;
use serde_json::Value;
use tests::{Artefacts, Outcome, ProgramRun, Running, Sandbox, programs, wait_until};

const MIB: u64 = 1 << 20;

/// A training job that ends by itself after a few seconds of work, with the same loss whenever it
/// is run.
fn training(sandbox: &Sandbox, name: &str, share: &str) -> Running {
    let mut command = sandbox.job(
        &["--name", name, "--share", share, "--mem", "1GiB"],
        Artefacts::get().program("train_mlp"),
    );
    Running::start(command.args(STEPS))
}

const STEPS: [&str; 7] = [
    "--steps",
    "1500",
    "--extra-us",
    "1000",
    "--progress-every",
    "0",
    "--json",
];

fn loss_bits(report: &Value) -> &str {
    report["loss_bits"].as_str().expect("the loss")
}

/// What training ends with on the simulated device without sublet.
fn bare_loss(sandbox: &Sandbox) -> String {
    let mut command = sandbox.bare(Artefacts::get().program("train_mlp"));
    let report = Outcome::of(command.args(STEPS)).succeeded().json();
    loss_bits(&report).to_owned()
}

fn launches(sandbox: &Sandbox, name: &str) -> u64 {
    sandbox.job_status(name).map_or(0, |job| job.launches)
}

fn both_at_work(sandbox: &Sandbox) {
    wait_until("both train", || {
        (launches(sandbox, "a") > 500 && launches(sandbox, "b") > 500).then_some(())
    });
}

#[test]
fn jobs_survive_the_loss_of_their_arbiter() {
    let sandbox = Sandbox::exclusive();
    let expected = bare_loss(&Sandbox::exclusive());
    let mut arbiter = sandbox.arbiter();
    let (a, b) = (
        training(&sandbox, "a", "0.5"),
        training(&sandbox, "b", "0.5"),
    );
    both_at_work(&sandbox);
    arbiter.kill();
    assert_eq!(arbiter.wait().signal, Some(9));
    for (name, job) in [("a", a), ("b", b)] {
        let outcome = job.wait().succeeded();
        assert_eq!(loss_bits(&outcome.json()), expected, "{name}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
    }
}

#[test]
fn jobs_attach_to_the_next_arbiter() {
    let sandbox = Sandbox::exclusive();
    let expected = bare_loss(&Sandbox::exclusive());
    let mut first = sandbox.arbiter();
    let (a, b) = (
        training(&sandbox, "a", "0.5"),
        training(&sandbox, "b", "0.5"),
    );
    both_at_work(&sandbox);
    let held = sandbox.job_status("a").expect("a").mem_used_bytes;
    assert!(held > 0);
    first.kill();
    assert_eq!(first.wait().signal, Some(9));

    let second = sandbox.arbiter();
    wait_until("both have attached again", || {
        ["a", "b"]
            .iter()
            .all(|name| {
                sandbox
                    .job_status(name)
                    .is_some_and(|job| job.processes.len() == 1 && job.mem_used_bytes == held)
            })
            .then_some(())
    });
    // It governs them, not only lists them.
    let before = [launches(&sandbox, "a"), launches(&sandbox, "b")];
    wait_until("both go on under it", || {
        let job = |name| sandbox.job_status(name).filter(|job| job.grants > 0);
        (launches(&sandbox, "a") > before[0]
            && launches(&sandbox, "b") > before[1]
            && job("a").is_some()
            && job("b").is_some())
        .then_some(())
    });
    for (name, job) in [("a", a), ("b", b)] {
        let outcome = job.wait().succeeded();
        assert_eq!(loss_bits(&outcome.json()), expected, "{name}");
    }
    drop(second);
}

#[test]
fn the_death_of_the_holder_frees_the_device_and_its_memory() {
    let sandbox = Sandbox::exclusive();
    let hog = || {
        let mut command = sandbox.job(
            &["--name", "hog", "--share", "0.5", "--mem", "6GiB"],
            Artefacts::get().program("spin"),
        );
        command.args(["--kernel-us", "1000", "--seconds", "600", "--mem", "6GiB"]);
        Running::start(&mut command)
    };
    let expected = bare_loss(&Sandbox::exclusive());
    let mut dying = hog();
    let survivor = training(&sandbox, "survivor", "0.5");
    wait_until("both are at work and the hog holds the device", || {
        let job = sandbox.job_status("hog")?;
        (launches(&sandbox, "survivor") > 500 && job.holding).then_some(())
    });
    dying.kill();
    assert_eq!(dying.wait().signal, Some(9));
    let before = launches(&sandbox, "survivor");
    wait_until("the other one goes on", || {
        (launches(&sandbox, "survivor") > before + 100).then_some(())
    });
    wait_until("the dead one's memory is free", || {
        sandbox
            .job_status("hog")
            .is_none_or(|job| job.mem_used_bytes == 0 && job.state == JobState::Gone)
            .then_some(())
    });
    // Physically too: the same amount can be had again.
    let again = hog();
    wait_until("its successor has the memory", || {
        sandbox
            .jobs()
            .iter()
            .any(|job| job.state != JobState::Gone && job.mem_used_bytes >= 6144 * MIB)
            .then_some(())
    });
    let outcome = survivor.wait().succeeded();
    assert_eq!(loss_bits(&outcome.json()), expected);
    drop(again);
}

#[test]
fn a_fork_before_the_first_call_is_a_process_of_the_job() {
    let sandbox = Sandbox::exclusive();
    let mut run = ProgramRun::start(&mut sandbox.job(
        &["--name", "early", "--mem", "1GiB"],
        programs::program("memory"),
    ));
    let child: u32 = run.ask("fork").parse().expect("a process id");
    assert_eq!(run.ask("init"), "0");
    assert_eq!(run.ask(&format!("alloc plain {}", 2048 * MIB)), "2 -1");
    assert_eq!(run.ask(&format!("alloc plain {}", 512 * MIB)), "0 0");
    let job = sandbox.job_status("early").expect("the job");
    let pids: Vec<u32> = job.processes.iter().map(|process| process.pid).collect();
    assert_eq!(pids, [child], "the parent has touched nothing");
    assert_eq!(job.mem_used_bytes, 512 * MIB);
    run.finish().succeeded();
}

#[test]
fn a_fork_after_initialisation_holds_nothing_and_ends_quietly() {
    let sandbox = Sandbox::exclusive();
    let mut run = ProgramRun::start(&mut sandbox.job(
        &["--name", "late", "--mem", "1GiB"],
        programs::program("memory"),
    ));
    let parent: u32 = run.ask("pid").parse().expect("a process id");
    assert_eq!(run.ask("init"), "0");
    assert_eq!(run.ask(&format!("alloc plain {}", 512 * MIB)), "0 0");
    let child: u32 = run.ask("fork").parse().expect("a process id");
    assert_ne!(child, parent);
    // The child has the driver's state of before the fork, which is of no use; that it runs on and
    // exits is what counts.
    assert_eq!(run.ask("pid"), child.to_string());
    let job = sandbox.job_status("late").expect("the job");
    let pids: Vec<u32> = job.processes.iter().map(|process| process.pid).collect();
    assert_eq!(pids, [parent]);
    assert_eq!(job.mem_used_bytes, 512 * MIB);
    run.finish().succeeded();
}

/// The runtime directory of a sandbox is removed and made again, as by a logout and a login.
fn logout_and_login(sandbox: &Sandbox) {
    use std::os::unix::fs::DirBuilderExt;
    let path = sandbox.path("run");
    remove(&path);
    let made = std::fs::DirBuilder::new().mode(0o700).create(&path);
    made.expect("made again");
}

fn arbiters_pid(sandbox: &Sandbox) -> Option<u32> {
    Some(sandbox.control().ok()?.status().ok()?.pid)
}

#[test]
fn an_arbiter_that_ends_leaves_its_successors_sockets_alone() {
    use nix::sys::signal::Signal;
    let sandbox = Sandbox::exclusive();
    let first = sandbox.arbiter();
    first.signal(Signal::SIGSTOP);
    logout_and_login(&sandbox);
    let second = sandbox.arbiter();
    first.signal(Signal::SIGTERM);
    first.signal(Signal::SIGCONT);
    let ended = first.wait();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let names = ["arbiter.lock", "api.sock", "channel.sock"];
    let there = names.map(|name| sandbox.path("run").join(name).exists());
    let answers = arbiters_pid(&sandbox);
    println!(
        "now: of {names:?} {there:?} are there after the first one's end, process {answers:?} of {} answers",
        second.pid()
    );
    assert_eq!((there, answers), ([true; 3], Some(second.pid())));
}

/// Removes a directory in which an arbiter may be making a file: its name goes at once.
fn remove(path: &std::path::Path) {
    let aside = path.with_extension("removed");
    std::fs::rename(path, &aside).expect("renamed");
    wait_until("nothing is made there any more", || {
        std::fs::remove_dir_all(&aside).ok()
    });
}

#[test]
fn a_directory_that_is_removed_while_a_job_runs_is_made_again_by_its_arbiter() {
    let sandbox = Sandbox::exclusive();
    let memory = programs::program("memory");
    let start = |name: &str| {
        let mut command = sandbox.job(&["--name", name, "--mem", "1GiB"], &memory);
        let mut run = ProgramRun::start(&mut command);
        assert_eq!(run.ask("init"), "0");
        run
    };
    let before = start("before");
    let arbiter = arbiters_pid(&sandbox).expect("it serves a job");
    let mut pids = vec![arbiter];
    for removed in [
        "run",
        "run/api.sock",
        "run/channel.sock",
        "run/arbiter.lock",
    ] {
        let path = sandbox.path(removed);
        if removed == "run" {
            logout_and_login(&sandbox);
        } else {
            std::fs::remove_file(&path).expect("removed");
        }
        wait_until("the names are there again", || {
            let names = ["run/arbiter.lock", "run/api.sock", "run/channel.sock"];
            let all = names.iter().all(|name| sandbox.path(name).exists());
            (all && arbiters_pid(&sandbox).is_some()).then_some(())
        });
        pids.extend(arbiters_pid(&sandbox));
    }
    let after = start("after");
    let jobs: Vec<String> = sandbox.jobs().into_iter().map(|job| job.name).collect();
    pids.extend(arbiters_pid(&sandbox));
    pids.dedup();
    println!(
        "now: arbiters {pids:?} serve {jobs:?} after the directory and each name in it was removed"
    );
    assert_eq!((pids, jobs.len()), (vec![arbiter], 2));
    let kinds = sandbox.events().into_iter().map(|event| event.kind);
    assert!(kinds.filter(|kind| kind == "directory").count() >= 1);
    let state = sandbox.path("run/state.json");
    wait_until("its state is there", || state.exists().then_some(()));
    for run in [before, after] {
        assert_eq!(run.finish().code, Some(0));
    }
}

/// As `$XDG_RUNTIME_DIR` goes at a logout, with the directory of sublet in it.
#[test]
fn a_directory_that_is_removed_with_its_parent_is_made_again_by_its_arbiter() {
    let mut sandbox = Sandbox::new();
    let parent = sandbox.path("user");
    let name = sandbox.path("run");
    std::fs::remove_dir(&name).expect("removed");
    std::fs::create_dir(&parent).expect("a directory");
    std::os::unix::fs::symlink(parent.join("sublet"), &name).expect("a link");
    sandbox.set("SUBLET_RUNTIME_DIR", parent.join("sublet"));
    let memory = programs::program("memory");
    let mut run = ProgramRun::start(&mut sandbox.job(&["--name", "nohup"], &memory));
    // An arbiter answers before it has the job, and who finds none then starts another one.
    wait_until("the arbiter has the job", || sandbox.job_status("nohup"));
    let arbiter = arbiters_pid(&sandbox).expect("it serves a job");
    let mut pids = vec![arbiter];
    for _ in 0..2 {
        remove(&parent);
        pids.push(wait_until("the names are there again", || {
            arbiters_pid(&sandbox)
        }));
    }
    let made = pids.len() - 1;
    // A worker that the job starts after that finds its arbiter.
    assert_ne!(run.ask("fork"), "");
    let worker = run.ask("init");
    let processes = sandbox
        .job_status("nohup")
        .map_or(0, |job| job.processes.len());
    pids.dedup();
    println!(
        "now: made again {made} times with its parent, arbiters {pids:?}; a new worker: {worker}, {processes} processes attached"
    );
    assert_eq!((worker.as_str(), pids.len(), processes), ("0", 1, 1));
    drop(run);
}

#[test]
fn a_second_arbiter_of_a_user_refuses_jobs_on_devices_that_the_first_one_has() {
    let sandbox = Sandbox::exclusive();
    let memory = programs::program("memory");
    let dirs = [sandbox.path("run"), sandbox.path("cron")];
    std::fs::DirBuilder::new()
        .mode(0o700)
        .create(&dirs[1])
        .expect("a directory");
    let job = |name: &str, dir: &Path| {
        let mut command = sandbox.job(&["--name", name, "--mem", "1GiB"], &memory);
        command.env("SUBLET_RUNTIME_DIR", dir);
        command
    };
    let stop = |dir: &Path| {
        let mut command = sandbox.sublet(["arbiter", "--stop"]);
        Outcome::of(command.env("SUBLET_RUNTIME_DIR", dir)).succeeded();
    };
    let mut over_ssh = ProgramRun::start(&mut job("ssh", &dirs[0]));
    assert_eq!(over_ssh.ask("init"), "0");
    let refused = Outcome::of(&mut job("cron", &dirs[1]));
    let ways_out: Vec<bool> = [
        format!("serves {}", dirs[0].display()),
        format!("SUBLET_RUNTIME_DIR={}", dirs[0].display()),
    ]
    .iter()
    .map(|text| refused.stderr.contains(text))
    .collect();
    println!(
        "now: the job under the second arbiter ended with {:?}, reason and way out {ways_out:?}",
        refused.code
    );
    assert_ne!(refused.code, Some(0), "{refused:?}");
    assert_eq!(ways_out, [true, true], "{refused:?}");
    // The way out that it names.
    Outcome::of(&mut job("cron", &dirs[0])).succeeded();
    assert_eq!(over_ssh.finish().code, Some(0));
    // Its arbiter is there still, and has no job that needs a device.
    wait_until("the second one has the devices", || {
        (Outcome::of(&mut job("cron", &dirs[1])).code == Some(0)).then_some(())
    });
    Outcome::of(&mut job("ssh", &dirs[0])).succeeded();
    stop(&dirs[0]);
    Outcome::of(&mut job("cron", &dirs[1])).succeeded();
    stop(&dirs[1]);
}

/// What a shell is given to change for itself and for what it starts, and the command after it.
const CHANGED: &str = r#"
ulimit -S -t 3000; ulimit -S -s 1024; umask 0007
echo 300 > /proc/self/oom_score_adj
exec nice -n 5 taskset -c "$0" "$@"
"#;

/// What a process has of it: the table of `inheritance`, as the kernel shows it.
fn inherited(pid: u32) -> Vec<(&'static str, String)> {
    let read =
        |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let after = |text: &str, name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_default().trim().to_owned()
    };
    let (limits, status, stat) = (read("limits"), read("status"), read("stat"));
    // Fields after the name, which may have spaces: the nice value is the seventeenth of them.
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields);
    let soft = |name: &str| {
        let line = after(&limits, name);
        line.split_whitespace()
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    vec![
        ("processor time", soft("Max cpu time")),
        ("stack", soft("Max stack size")),
        ("mask of modes", after(&status, "Umask:")),
        ("processors", after(&status, "Cpus_allowed_list:")),
        (
            "nice",
            fields.split(' ').nth(16).unwrap_or_default().to_owned(),
        ),
        ("oom_score_adj", read("oom_score_adj").trim().to_owned()),
    ]
}

#[test]
fn an_arbiter_that_a_job_starts_has_nothing_that_the_job_has_changed_for_itself() {
    let sandbox = Sandbox::exclusive();
    let job = sandbox.job(&["--name", "first"], programs::program("memory"));
    let own = inherited(std::process::id());
    let (_, processors) = &own[3];
    let first: String = processors
        .chars()
        .take_while(char::is_ascii_digit)
        .collect();
    let mut command = sandbox.command("sh");
    command.args(["-c", CHANGED, &first]);
    command.arg(job.get_program()).args(job.get_args());
    let mut run = ProgramRun::start(&mut command);
    assert_eq!(run.ask("init"), "0");
    let arbiter = arbiters_pid(&sandbox).expect("it serves a job");
    let [job, arbiter] = [run.running.pid(), arbiter].map(inherited);
    let is_root = nix::unistd::geteuid().is_root();
    // Only root takes back niceness and a preference for being ended.
    let rows = if is_root { 6 } else { 4 };
    let kept: Vec<&str> = (0..rows)
        .filter(|at| arbiter[*at] == job[*at] && own[*at] != job[*at])
        .map(|at| arbiter[at].0)
        .collect();
    println!(
        "now: of {rows} things that the job has changed the arbiter has {}: {kept:?}",
        kept.len()
    );
    assert_eq!(kept.len(), 0, "{arbiter:?} of {job:?}");
    // The job has them still.
    assert_eq!(
        (job[0].1.as_str(), job[3].1.as_str()),
        ("3000", first.as_str())
    );
    assert_eq!(run.finish().code, Some(0));
}
