//! The dynamic linker's lock: its holder may use the driver, and nobody waits for somebody who
//! waits for it.

use tests::{Artefacts, Outcome, Running, Sandbox, programs, wait_until};

/// The outcome of a program that hung before, and is ended where it still does.
#[track_caller]
fn ends(command: &mut std::process::Command) -> Outcome {
    let mut running = Running::start(command);
    wait_until("it ends", || running.has_ended().then_some(()));
    running.wait().succeeded()
}

#[test]
fn a_constructor_uses_the_driver_while_another_thread_begins_to() {
    let (program, library) = (
        programs::program("opens"),
        programs::library("in_constructor"),
    );
    for way in ["call", "look-up"] {
        let sandbox = Sandbox::new();
        let mut lonely = sandbox.preloaded(&program);
        let mut job = sandbox.job(&["--mem", "1GiB"], &program);
        for command in [&mut lonely, &mut job] {
            let outcome = ends(command.arg(&library).env("IN_CONSTRUCTOR", way));
            let mut lines: Vec<&str> = outcome.stdout.lines().collect();
            lines.sort_unstable();
            assert_eq!(lines, ["constructor 0", "thread 0"], "{way}: {outcome:?}");
        }
    }
}

#[test]
fn a_drivers_constructor_finds_the_drivers_own_functions() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.preloaded(programs::program("init_once"));
    command
        .env("SUBLET_DRIVER", programs::library("looking_driver"))
        .env("LOOKING_DRIVER_REAL", Artefacts::get().simulated_driver());
    assert_eq!(ends(&mut command).quiet(), "0\n");
}

#[test]
fn a_driver_that_takes_long_to_load_is_waited_for() {
    let library = programs::library("in_constructor");
    let sandbox = Sandbox::new();
    let mut command = sandbox.job(&["--mem", "1GiB"], programs::program("opens"));
    let began = std::time::Instant::now();
    let outcome = ends(
        command
            .arg(&library)
            .env("IN_CONSTRUCTOR", "call")
            .env("SUBLET_SIM_LOAD_US", "200000"),
    );
    assert!(began.elapsed() >= std::time::Duration::from_millis(200));
    let mut lines: Vec<&str> = outcome.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["constructor 0", "thread 0"], "{outcome:?}");

    let mut wrong = sandbox.preloaded(programs::program("init_once"));
    let outcome = ends(wrong.env("SUBLET_SIM_LOAD_US", "long"));
    assert_eq!(outcome.stdout, "100\n", "no device: {outcome:?}");
    assert!(outcome.stderr.contains("SUBLET_SIM_LOAD_US=long"));
}
