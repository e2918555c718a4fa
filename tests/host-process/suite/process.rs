//! Processes: what they keep, how they multiply, how they end.

use host_process::Host;

fn same(source: &str) -> host_process::Outcome {
    Host::c(source).is_the_same_everywhere()
}

#[test]
fn state_of_the_process_is_left_alone() {
    let outcome = same("leaves_state_alone.c");
    assert_eq!(outcome.code, Some(0));
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    // The program's own errno, after calls that opened files and waited: neither the simulated
    // driver nor we leave a trace in it.
    assert!(lines[1].starts_with("attached: errno 34 "), "{outcome:?}");
    assert!(lines[3].starts_with("worked: errno 18 "), "{outcome:?}");
    // Apart from its name and its errno, a line of state says the same before and after.
    let state = |line: &str| line.split_once(" umask").map(|(_, rest)| rest.to_owned());
    assert_eq!(state(lines[0]), state(lines[1]));
    assert_eq!(state(lines[0]), state(lines[3]));
    assert!(lines[0].contains("umask 27"), "{outcome:?}");
}

#[test]
fn fork_before_the_driver_is_used() {
    let outcome = same("fork_before_init.c");
    assert_eq!(outcome.stdout, "parent 0 child 0\n");
}

#[test]
fn fork_after_the_driver_was_used() {
    let outcome = same("fork_after_init.c");
    assert_eq!(outcome.code, Some(0));
    assert!(outcome.stdout.ends_with("parent 0\n"), "{outcome:?}");
    assert_eq!(outcome.stdout.matches("ended").count(), 3, "{outcome:?}");
    assert_eq!(
        outcome.stdout.matches("child init").count(),
        3,
        "{outcome:?}"
    );
}

#[test]
fn fork_while_other_threads_are_in_the_driver() {
    assert_eq!(same("fork_storm.c").stdout, "bad 0\n");
}

#[test]
fn vfork_and_exec() {
    assert_eq!(
        same("vfork_and_exec.c").stdout,
        "parent 0\nchild 7\nparent 0\n"
    );
}

#[test]
fn posix_spawn_of_itself() {
    let outcome = same("posix_spawn_itself.c");
    assert_eq!(outcome.stdout.matches("child 0").count(), 3, "{outcome:?}");
    assert_eq!(outcome.stdout.matches("ended 3").count(), 3, "{outcome:?}");
}

#[test]
fn exec_in_place() {
    let outcome = same("exec_in_place.c");
    assert_eq!(outcome.stdout.lines().count(), 4, "{outcome:?}");
    assert_eq!(
        outcome.stdout.matches(": 0 work 0").count(),
        4,
        "{outcome:?}"
    );
}

#[test]
fn daemons() {
    assert_eq!(same("daemon.c").stdout, "daemon 4 0\n");
}

#[test]
fn exit_handlers_that_call_the_driver() {
    let outcome = same("calls_at_exit.c");
    assert_eq!(outcome.code, Some(6));
    for when in ["registered before", "registered after", "destructor"] {
        assert!(outcome.stdout.contains(when), "{outcome:?}");
    }
}

#[test]
fn static_destructors_that_call_the_driver() {
    let outcome = same("static_destructor.cpp");
    assert_eq!(outcome.code, Some(3));
    assert_eq!(outcome.stdout.matches(" free ").count(), 2, "{outcome:?}");
}

#[test]
fn closed_standard_descriptors() {
    let outcome = same("closed_stdio.c");
    assert!(outcome.stdout.starts_with("init 0 work 0"), "{outcome:?}");
}

#[test]
fn numbers_of_descriptors() {
    assert_eq!(same("closes_descriptors.c").code, Some(0));
}

#[test]
fn programs_that_never_use_cuda() {
    assert_eq!(same("never_uses_cuda.c").code, Some(0));
}
