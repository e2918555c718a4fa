//! Descriptors that are kept in a program: never written to unless they are ours, and no more of
//! them than there were.

use std::fs;
use std::process::Command;

use tests::fake::{Listening, TOKEN};
use tests::{Artefacts, ProgramRun, Running, Sandbox, programs, wait_until};

fn kernels() -> String {
    let kernels = Artefacts::get().root().join("simgpu/kernels");
    kernels.display().to_string()
}

#[test]
fn a_file_under_the_number_of_a_doorbell_is_left_alone() {
    let sandbox = Sandbox::exclusive();
    let listening = Listening::at(&sandbox.path("channel.sock"));
    let mut command = sandbox.preloaded(programs::program("lease"));
    command
        .env("SUBLET_SOCKET", listening.path())
        .env("SUBLET_TOKEN", TOKEN);
    let mut run = ProgramRun::start(&mut command);
    run.send(&format!("init {}", kernels()));
    let mut attached = listening.welcome();
    assert_eq!(run.answer(), "0");
    assert_eq!(run.ask("queue 10"), "0");
    let file = sandbox.path("mine");
    assert_eq!(run.ask(&format!("replace {}", file.display())), "0");
    for _ in 0..5 {
        attached.close();
        run.send("queue 3000");
        attached.wait_for_a_waiter();
        attached.open();
        assert_eq!(run.answer(), "0");
    }
    assert_eq!(run.ask("sync"), "0");
    // Also where the arbiter is gone and the next one is looked for.
    drop(attached);
    assert_eq!(run.ask("queue 3000"), "0");
    let written = fs::metadata(&file).expect("the file").len();
    println!("now: {written} bytes of the program's file overwritten");
    assert_eq!(written, 0);
}

#[test]
fn a_program_that_has_closed_our_descriptors_still_has_its_turns() {
    let sandbox = Sandbox::exclusive();
    let mut honest = sandbox.job(
        &["--name", "honest", "--share", "0.5"],
        Artefacts::get().program("spin"),
    );
    let honest = Running::start(honest.args(["--kernel-us", "200", "--seconds", "600"]));
    let flags = ["--name", "closer", "--share", "0.5"];
    let mut run = ProgramRun::start(&mut sandbox.job(&flags, programs::program("lease")));
    assert_eq!(run.ask(&format!("init {}", kernels())), "0");
    assert_eq!(
        run.ask(&format!("replace {}", sandbox.path("mine").display())),
        "0"
    );
    for _ in 0..20 {
        assert_eq!(run.ask("queue 20"), "0");
        assert_eq!(run.ask("sync"), "0");
    }
    let job = sandbox.job_status("closer").expect("the job");
    assert_eq!(job.processes.len(), 1, "{job:?}");
    assert!(job.launches >= 400 && job.grants > 0, "{job:?}");
    assert_eq!(
        fs::metadata(sandbox.path("mine")).expect("the file").len(),
        0
    );
    drop(honest);
}

#[test]
fn arbiters_come_and_go_and_a_program_has_as_many_descriptors_as_before() {
    let sandbox = Sandbox::exclusive();
    let mut arbiter = sandbox.arbiter();
    let mut spin = sandbox.job(&["--name", "spin"], Artefacts::get().program("spin"));
    let spin = Running::start(spin.args(["--kernel-us", "200", "--seconds", "600"]));
    let at_work = |sandbox: &Sandbox| {
        let before = sandbox.job_status("spin").map_or(0, |job| job.launches);
        wait_until("it works under the arbiter", || {
            sandbox
                .job_status("spin")
                .filter(|job| job.processes.len() == 1 && job.launches > before + 100)
        });
    };
    let descriptors = |running: &Running| {
        let list = fs::read_dir(format!("/proc/{}/fd", running.pid())).expect("its descriptors");
        list.count()
    };
    at_work(&sandbox);
    let before = descriptors(&spin);
    for _ in 0..4 {
        arbiter.kill();
        assert_eq!(arbiter.wait().signal, Some(9));
        arbiter = sandbox.arbiter();
        at_work(&sandbox);
    }
    // On a loaded host it may be about to connect once more.
    wait_until("it has as many as before", || {
        (descriptors(&spin) == before).then_some(())
    });
    drop(arbiter);
}

/// A descriptor that another thread's child still holds keeps a new program from starting: those
/// that tests write start all the same.
#[test]
fn a_program_that_is_still_open_for_writing_starts_once_it_is_closed() {
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;

    let sandbox = Sandbox::exclusive();
    let path = sandbox.path("program");
    let mut options = std::fs::OpenOptions::new();
    options.create_new(true).write(true).mode(0o755);
    let mut file = options.open(&path).expect("a file");
    file.write_all(b"#!/bin/sh\nexit 7\n").expect("written");
    let busy = Command::new(&path).spawn().map(|_| ());
    let kind = busy.expect_err("it is open").kind();
    assert_eq!(kind, std::io::ErrorKind::ExecutableFileBusy);
    let holder = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(50));
        drop(file);
    });
    let running = Running::start(&mut Command::new(&path));
    assert_eq!(running.wait().code, Some(7));
    testbed::join(holder);
}
