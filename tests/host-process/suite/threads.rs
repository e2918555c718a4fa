//! Threads, signals, stacks and non-local jumps.

use host_process::{Artefacts, Host, Way};

fn same(source: &str) -> host_process::Outcome {
    Host::c(source).is_the_same_everywhere()
}

#[test]
fn exit_from_a_thread() {
    let outcome = same("exit_in_thread.c");
    assert_eq!(
        (outcome.code, outcome.stdout.as_str()),
        (Some(7), "init 0\n")
    );
}

#[test]
fn threads_that_end() {
    assert_eq!(same("thread_exit.c").stdout, "init 0\nbad 0 work 0\n");
}

#[test]
fn a_first_thread_that_leaves() {
    let outcome = same("main_thread_leaves.c");
    assert_eq!(outcome.stdout, "init 0\nafter main: 0 0\n");
}

#[test]
fn threads_that_are_cancelled() {
    assert_eq!(
        same("cancelled_thread.c").stdout,
        "init 0\ncleaned 10 work 0\n"
    );
}

#[test]
fn small_stacks() {
    assert_eq!(same("small_stack.c").code, Some(0));
}

#[test]
fn jumps_out_of_handlers() {
    assert_eq!(
        same("longjmp_over_calls.c").stdout,
        "init 0\njumps 200 version 1 work 0\n"
    );
}

#[test]
fn a_storm_of_signals() {
    let outcome = same("signal_storm.c");
    assert!(
        outcome.stdout.starts_with("init 0 bad 0 some 1\n"),
        "{outcome:?}"
    );
}

#[test]
fn handlers_on_an_alternative_stack() {
    assert_eq!(same("calls_on_altstack.c").code, Some(0));
}

#[test]
fn a_rust_host_with_threads_and_panics() {
    let program = env!("CARGO_BIN_EXE_threads_and_panics");
    let outcome = Host::new::<&str>(program, &[]).is_the_same_everywhere();
    assert!(
        outcome.stdout.contains("ended by a panic true"),
        "{outcome:?}"
    );
}

#[test]
fn exceptions_of_cxx_and_cancellation_pass_through_us() {
    let artefacts = Artefacts::get();
    let dir = artefacts.dir.join("host-process/throwing");
    std::fs::create_dir_all(&dir).unwrap();
    let flags = [
        "-shared",
        "-fPIC",
        "-Wl,-Bsymbolic",
        "-Wl,-soname,libcuda.so.1",
    ];
    let driver = artefacts
        .compile("throwing/libcuda.so.1", "throwing_driver.cpp", None, &flags)
        .unwrap_or_else(|error| panic!("{error}"));
    let host = Host::c("exceptions_through.cpp").on(driver.parent().unwrap());
    let bare = host.run(Way::Bare);
    assert_eq!(bare.code, Some(0), "{bare:?}");
    assert_eq!(bare.stdout.matches(" threw ").count(), 6, "{bare:?}");
    assert!(bare.stdout.ends_with("cancelled 1\n"), "{bare:?}");
    assert_eq!(host.run(Way::Preloaded), bare);
}
