//! The arbiter as a service: what its manager hears and hands over, and restarts that no job
//! notices.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use control::JobStatus;
use nix::sys::signal::Signal;
use tests::{Artefacts, Manager, Outcome, ProgramRun, Running, Sandbox, programs, wait_until};

const MIB: u64 = 1 << 20;
/// TIMEOUT: what a busy machine may keep a loop waiting, in tests that are about something else.
const LONG: Duration = Duration::from_secs(600);

/// A training job of some seconds.
fn training(sandbox: &Sandbox, name: &str, share: &str) -> Running {
    let mut command = sandbox.job(
        &["--name", name, "--share", share, "--mem", "1GiB"],
        Artefacts::get().program("train_mlp"),
    );
    Running::start(command.args(STEPS))
}

const STEPS: [&str; 7] = [
    "--steps",
    "4000",
    "--extra-us",
    "1000",
    "--progress-every",
    "0",
    "--json",
];

fn at_work(sandbox: &Sandbox, name: &str, beyond: u64) -> JobStatus {
    wait_until("the job is governed and works", || {
        sandbox
            .job_status(name)
            .filter(|job| job.processes.len() == 1 && job.grants > 0 && job.launches > beyond)
    })
}

#[test]
fn a_manager_hears_of_start_work_reload_and_end() {
    let sandbox = Sandbox::new();
    std::fs::write(sandbox.path("sublet.toml"), "").expect("a file");
    let mut manager = Manager::of(&sandbox, LONG);
    // A client that comes before it runs waits in the socket's queue.
    let early = UnixStream::connect(sandbox.path("run/api.sock"));
    manager.start(&sandbox);
    drop(early);
    manager.waits_for("STATUS=jobs: 0, attached processes: 0, devices: 0");
    let mut run = ProgramRun::start(&mut sandbox.job(
        &["--name", "one", "--mem", "1GiB"],
        programs::program("memory"),
    ));
    assert_eq!(run.ask("init"), "0");
    manager.waits_for("STATUS=jobs: 1, attached processes: 1, devices: 1");
    assert_eq!(manager.kept().len(), 1, "the job's page");
    Outcome::of(&mut sandbox.sublet(["reload"])).succeeded();
    manager.waits_for("RELOADING=1");
    let between = manager.waits_for("READY=1");
    assert!(between[0].starts_with("MONOTONIC_USEC="), "{between:?}");
    manager.service().signal(Signal::SIGHUP);
    manager.waits_for("RELOADING=1");
    manager.waits_for("READY=1");
    run.finish().succeeded();
    wait_until("the page of a job that has ended is given up", || {
        manager.kept().is_empty().then_some(())
    });
    manager.service().signal(Signal::SIGTERM);
    manager.waits_for("STOPPING=1");
    manager.take_service().wait().succeeded();
    for name in ["channel.sock", "api.sock"] {
        let there = sandbox.path("run").join(name).exists();
        assert!(there, "{name} is the manager's");
    }
}

/// The values of a key in a unit, in order.
fn values<'a>(unit: &'a str, key: &str) -> Vec<&'a str> {
    let pairs = unit.lines().filter_map(|line| line.split_once('='));
    let of_key = pairs.filter(|(name, _)| *name == key);
    of_key.map(|(_, value)| value).collect()
}

#[test]
fn the_units_of_the_package_say_what_the_arbiter_relies_on() {
    let folder = Artefacts::get().root().join("packaging/systemd");
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).expect("a unit");
    let (service, socket) = (read("sublet.service"), read("sublet.socket"));
    for (key, value) in [
        ("Type", "notify"),
        ("KillMode", "process"),
        ("RuntimeDirectory", "sublet"),
        ("RuntimeDirectoryPreserve", "yes"),
        ("Requires", "sublet.socket"),
        ("ExecStart", "/usr/bin/sublet arbiter"),
    ] {
        assert_eq!(values(&service, key), [value], "{key}");
    }
    // Jobs of all users together, each with a page.
    let kept: usize = values(&service, "FileDescriptorStoreMax")[0]
        .parse()
        .expect("a number");
    assert!(kept >= 1024);
    assert!(!values(&service, "WatchdogSec").is_empty());
    assert_eq!(values(&socket, "ListenStream"), ["/run/sublet/api.sock"]);
    assert_eq!(
        values(&socket, "ListenSequentialPacket"),
        ["/run/sublet/channel.sock"]
    );
    // What closes /dev/nvidia*, or hides the processes of jobs.
    for key in [
        "PrivateDevices",
        "DevicePolicy",
        "DeviceAllow",
        "ProtectClock",
        "ProtectProc",
        "PrivateUsers",
        "PrivateTmp",
    ] {
        assert!(values(&service, key).is_empty(), "{key}");
    }
    if !programs::exists("systemd-analyze") {
        return;
    }
    let sandbox = Sandbox::new();
    let command = Artefacts::get().program("sublet");
    let service = service.replace("/usr/bin/sublet", &command.display().to_string());
    std::fs::write(sandbox.path("sublet.service"), service).expect("a file");
    std::fs::write(sandbox.path("sublet.socket"), socket).expect("a file");
    let mut verify = sandbox.command("systemd-analyze");
    verify.args([
        "verify",
        "--man=no",
        "--recursive-errors=no",
        "sublet.service",
        "sublet.socket",
    ]);
    let said = Outcome::of(&mut verify);
    let ours: Vec<_> = said
        .stderr
        .lines()
        .filter(|line| line.contains("sublet.s"))
        .collect();
    assert!(ours.is_empty(), "{ours:?}");
}

#[test]
fn an_upgrade_under_load_fails_no_job() {
    let expected = {
        let sandbox = Sandbox::new();
        let mut command = sandbox.bare(Artefacts::get().program("train_mlp"));
        Outcome::of(command.args(STEPS)).succeeded().json()["loss_bits"].clone()
    };
    let sandbox = Sandbox::new();
    let mut manager = Manager::of(&sandbox, LONG);
    manager.start(&sandbox);
    let jobs = [("a", "0.6"), ("b", "0.3")];
    let runs = jobs.map(|(name, share)| training(&sandbox, name, share));
    let mut launches = [100; 2];
    let mut newcomers = Vec::new();
    let signals = [Signal::SIGTERM, Signal::SIGKILL];
    for (round, signal) in signals.into_iter().cycle().take(5).enumerate() {
        for ((name, share), launches) in jobs.iter().zip(&mut launches) {
            let job = at_work(&sandbox, name, *launches);
            *launches = job.launches;
            assert_eq!(job.mem_limit_bytes, Some(1024 * MIB), "{name}");
            let asked = job.share_asked.map(|share| share.to_string());
            assert_eq!(asked.as_deref(), Some(*share), "{name}");
            assert!(job.mem_used_bytes > 0, "{name}");
        }
        manager.service().signal(signal);
        let ended = manager.take_service().wait();
        match signal {
            Signal::SIGKILL => assert_eq!(ended.signal, Some(9)),
            _ => drop(ended.succeeded()),
        }
        // It is started while there is no arbiter, and waits.
        let name = format!("newcomer{round}");
        let mut command = sandbox.job(
            &["--name", &name, "--mem", "64MiB"],
            programs::program("memory"),
        );
        newcomers.push((ProgramRun::start(&mut command), name));
        manager.start(&sandbox);
        let (newcomer, name) = newcomers.last_mut().expect("one");
        assert_eq!(newcomer.ask("init"), "0", "{name}");
        let refused = format!("alloc plain {}", 128 * MIB);
        assert_eq!(newcomer.ask(&refused), "2 -1", "{name} has its limit");
    }
    for ((name, _), run) in jobs.iter().zip(runs) {
        let outcome = run.wait().succeeded();
        assert_eq!(outcome.json()["loss_bits"], expected, "{name}");
    }
    for (mut newcomer, name) in newcomers {
        let more = format!("alloc plain {}", 128 * MIB);
        assert_eq!(newcomer.ask(&more), "2 -1", "{name} still has its limit");
        newcomer.finish().succeeded();
    }
}

#[test]
fn a_process_that_does_nothing_keeps_its_place_in_the_quota_over_a_restart() {
    let sandbox = Sandbox::new();
    let mut manager = Manager::of(&sandbox, LONG);
    manager.start(&sandbox);
    let mut idle = ProgramRun::start(&mut sandbox.job(
        &["--name", "two", "--mem", "1GiB"],
        programs::program("memory"),
    ));
    let pid: u32 = idle.ask("pid").parse().expect("a process id");
    assert_eq!(idle.ask("init"), "0");
    assert_eq!(idle.ask(&format!("alloc plain {}", 768 * MIB)), "0 0");
    wait_until("its page is kept, and who it is", || {
        let state = std::fs::read(sandbox.path("run/state.json")).ok()?;
        let state: serde_json::Value = serde_json::from_slice(&state).ok()?;
        let known = state["tenants"][0]["clients"][0]["pid"] == pid;
        (known && manager.kept().len() == 1).then_some(())
    });
    manager.service().kill();
    manager.take_service().wait();
    manager.start(&sandbox);
    let job = wait_until("the account is there", || {
        let job = sandbox.job_status("two")?;
        (job.mem_used_bytes > 0).then_some(job)
    });
    assert_eq!(job.mem_used_bytes, 768 * MIB);
    assert!(job.processes.is_empty(), "it has not come back: {job:?}");
    // Another process of the job, which comes while the first one does nothing.
    let environment = std::fs::read(format!("/proc/{pid}/environ")).expect("its environment");
    let mut command = sandbox.command(programs::program("memory"));
    for pair in environment.split(|byte| *byte == 0) {
        let pair = String::from_utf8_lossy(pair);
        if let Some((name, value)) = pair.split_once('=') {
            command.env(name, value);
        }
    }
    let mut other = ProgramRun::start(&mut command);
    assert_eq!(other.ask("init"), "0");
    assert_eq!(other.ask(&format!("alloc plain {}", 512 * MIB)), "2 -1");
    assert_eq!(other.ask(&format!("alloc plain {}", 256 * MIB)), "0 0");
    // And the first one is taken back when it does something.
    assert_eq!(idle.ask("free 0"), "0");
    assert_eq!(other.ask(&format!("alloc plain {}", 512 * MIB)), "0 1");
    other.finish().succeeded();
    idle.finish().succeeded();
}

#[test]
fn a_loop_that_is_stuck_is_missed_by_the_watchdog_and_replaced() {
    let sandbox = Sandbox::new();
    let mut manager = Manager::of(&sandbox, Duration::from_secs(3));
    manager.start(&sandbox);
    let mut job = ProgramRun::start(&mut sandbox.job(
        &["--name", "job", "--mem", "1GiB"],
        programs::program("memory"),
    ));
    assert_eq!(job.ask("init"), "0");
    manager.service().signal(Signal::SIGSTOP);
    wait_until("a sign of life is missed", || {
        manager.misses_a_sign().then_some(())
    });
    manager.service().kill();
    manager.take_service().wait();
    manager.start(&sandbox);
    assert_eq!(job.ask(&format!("alloc plain {}", 512 * MIB)), "0 0");
    assert_eq!(job.ask(&format!("alloc plain {}", 768 * MIB)), "2 -1");
    job.finish().succeeded();
    // Without a job, too: an idle loop gives signs.
    wait_until("a sign that is not the first", || {
        (!manager.misses_a_sign()).then_some(())
    });
}
