//! Programs that an engine starts in a container later, without the variables of the device.

use tests::{Outcome, Running, Sandbox, wait_until};

use super::LOAD;
use super::engine::Engine;

const TENANT: [&str; 3] = ["/prog/tenant", "--bytes", "2MiB"];

/// Whether the arbiter has refused a process of a container whose settings nobody knows.
fn was_refused(engine: &Engine) -> bool {
    let events = engine.sandbox.events();
    let mut refused = events.iter().filter(|one| one.kind == "refused");
    refused.any(|one| one.message.contains("SUBLET_NAME"))
}

#[test]
fn a_first_process_of_another_user_keeps_its_limits_from_nobody() {
    let engine = engine!(Sandbox::new());
    let _arbiter = engine.sandbox.arbiter();
    engine.generate(&["--device", "half:mem=1GiB"]).succeeded();
    engine.start("other", &["--user=1000:1000"], &["half"], &["sleep", "600"]);
    // Root in a container may not look at processes of others.
    let exec = |flags: &[&str], command: &[&str]| {
        let flags = [&["--user=0:0"], flags].concat();
        Outcome::of(&mut engine.exec("other", &flags, command))
    };
    let looked = exec(&[], &["cat", "/proc/1/environ"]);
    if looked.code == Some(0) {
        return eprintln!("skipped: root in a container may look at all processes here");
    }
    let refused = exec(&[], &TENANT);
    assert_ne!(refused.code, Some(0), "{refused:?}");
    assert!(was_refused(&engine), "{refused:?}");
    assert!(engine.job("other").is_none());
    // Who says that it needs no limits has none.
    exec(&["--env=SUBLET_ON_REFUSAL=open"], &TENANT).succeeded();

    // A container that is known has its limits, for processes of all users.
    let device = [
        "--env=SUBLET_CONTAINER=half",
        "--env=SUBLET_MEM=1GiB",
        "--env=SUBLET_SIM=1",
    ];
    let flags = [&["--user=0:0"][..], &device].concat();
    let first = Running::start(&mut engine.exec("other", &flags, &LOAD));
    wait_until("it is there", || engine.job("other"));
    exec(&[], &TENANT).succeeded();
    let over = exec(&[], &["/prog/tenant", "--bytes", "2GiB"]);
    assert_eq!(over.code, Some(2), "{over:?}");
    drop(first);
}

#[test]
fn a_first_process_that_cleared_its_environment_leaves_nobody_without_limits() {
    let engine = engine!(Sandbox::new());
    let _arbiter = engine.sandbox.arbiter();
    engine.generate(&["--device", "half:mem=1GiB"]).succeeded();
    engine.start("bare", &[], &["half"], &["env", "-i", "sleep", "600"]);
    wait_until("its environment is empty", || {
        let looked = engine.podman(&["exec", "bare", "cat", "/proc/1/environ"]);
        (looked.code == Some(0) && looked.stdout.is_empty()).then_some(())
    });
    let refused = Outcome::of(&mut engine.exec("bare", &[], &TENANT));
    assert_ne!(refused.code, Some(0), "{refused:?}");
    assert!(was_refused(&engine), "{refused:?}");
    assert!(engine.job("bare").is_none());
}

#[test]
fn a_program_that_is_started_later_obeys_what_the_device_says() {
    let engine = engine!(Sandbox::new());
    let mut arbiter = engine.sandbox.arbiter();
    engine
        .generate(&["--device", "half:mem=1GiB,on_arbiter_loss=closed"])
        .succeeded();
    engine.start("strict", &[], &["half"], &["sleep", "600"]);
    let more = ["--env=SUBLET_MEM=7GiB"];
    let load = Running::start(&mut engine.exec("strict", &more, &LOAD));
    let job = wait_until("it works", || {
        engine.job("strict").filter(|job| job.launches > 0)
    });
    assert_eq!(job.mem_limit_bytes, Some(1 << 30), "the device's");
    arbiter.kill();
    drop(arbiter.wait());
    // With `open` it would go on for minutes.
    let ended = load.wait();
    assert_ne!(ended.code, Some(0), "{ended:?}");
}
