//! Python's ways to more than one process.

use host_process::{Artefacts, Host, Outcome};

/// `None` where there is no Python, which is said by name.
fn python(script: &str, args: &[&str]) -> Option<Outcome> {
    let Some(program) = host_process::python() else {
        eprintln!("skipped: {script}: there is no python3 here");
        return None;
    };
    let script = Artefacts::get().source(script);
    let mut words = vec![script.to_str().unwrap()];
    words.extend(args);
    // The interpreter itself: a launcher script in between would be one more program.
    Some(Host::new(program, &words).is_the_same_everywhere())
}

#[test]
fn multiprocessing_by_fork() {
    let Some(outcome) = python("python_multiprocessing.py", &["fork"]) else {
        return;
    };
    assert!(
        outcome.stdout.contains("plain [0, 1, 4, 9, 16, 25]"),
        "{outcome:?}"
    );
    // CUDA cannot be used in a forked child of a process that has used it:
    // CUDA_ERROR_NOT_INITIALIZED.
    assert!(outcome.stdout.contains("(0, 3)"), "{outcome:?}");
    assert!(outcome.stdout.ends_with("parent 0\n"), "{outcome:?}");
}

#[test]
fn multiprocessing_by_spawn() {
    let Some(outcome) = python("python_multiprocessing.py", &["spawn"]) else {
        return;
    };
    assert!(outcome.stdout.contains("(5, 0)"), "{outcome:?}");
}

#[test]
fn multiprocessing_by_forkserver() {
    let Some(outcome) = python("python_multiprocessing.py", &["forkserver"]) else {
        return;
    };
    assert!(outcome.stdout.contains("(5, 0)"), "{outcome:?}");
}

#[test]
fn workers_of_a_data_loader() {
    let Some(outcome) = python("python_loader.py", &[]) else {
        return;
    };
    assert!(
        outcome.stdout.contains("batches 80 exits [0, 0, 0, 0]"),
        "{outcome:?}"
    );
}

#[test]
fn subprocesses() {
    let Some(outcome) = python("python_subprocess.py", &[]) else {
        return;
    };
    assert_eq!(
        outcome.stdout.matches("3 ['out'] ['err']").count(),
        4,
        "{outcome:?}"
    );
    assert!(outcome.stdout.contains("child 0 ['0'] []"), "{outcome:?}");
}
