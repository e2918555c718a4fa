//! Jobs that are asked to change their size save at the end of an iteration, and lose no step.

use control::{Change, Resize};
use nix::sys::signal::Signal;
use serde_json::Value;
use tests::{Artefacts, Outcome, Running, Sandbox, wait_until};

const STEPS: [&str; 7] = [
    "--steps",
    "1500",
    "--extra-us",
    "1000",
    "--progress-every",
    "0",
    "--json",
];

/// A checkpoint is written at the end, and otherwise only where somebody asks for it.
fn training(sandbox: &Sandbox, name: &str) -> Running {
    let mut command = sandbox.job(
        &["--name", name, "--share", "0.5"],
        Artefacts::get().program("train_mlp"),
    );
    command.args(STEPS).args(["--checkpoint-every", "1000000"]);
    command.arg("--resume").arg("--checkpoint");
    Running::start(command.arg(sandbox.path("train.ckpt")))
}

fn bare_report() -> Value {
    let sandbox = Sandbox::new();
    let mut command = sandbox.bare(Artefacts::get().program("train_mlp"));
    Outcome::of(command.args(STEPS)).succeeded().json()
}

/// The number behind these words.
fn number_after(text: &str, words: &str) -> u64 {
    let rest = text
        .split(words)
        .nth(1)
        .unwrap_or_else(|| panic!("no `{words}` in {text}"));
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits
        .parse()
        .unwrap_or_else(|_| panic!("no number after `{words}` in {text}"))
}

fn ask(sandbox: &Sandbox, name: &str, resize: Resize) {
    let change = Change {
        resize: Some(resize),
        ..Change::default()
    };
    sandbox
        .control()
        .expect("the arbiter")
        .set(name, change)
        .expect("it is taken");
}

fn ready(sandbox: &Sandbox, name: &str, gpus: u16) -> Option<()> {
    let asked = sandbox.job_status(name)?.resize?;
    (asked.gpus == gpus && asked.ready).then_some(())
}

#[test]
fn a_job_saves_at_the_end_of_an_iteration_and_goes_on_without_losing_a_step() {
    let expected = bare_report();
    let sandbox = Sandbox::new();
    let _arbiter = sandbox.arbiter();
    let first = training(&sandbox, "a");
    wait_until("it looks for requests", || {
        sandbox.job_status("a")?.listens_for_resize.then_some(())
    });
    assert_eq!(sandbox.job_status("a").expect("it runs").resize, None);

    // Taken back: it goes on as if nothing had been.
    ask(&sandbox, "a", Resize::To(4));
    wait_until("it is ready for four", || ready(&sandbox, "a", 4));
    let launches = |sandbox: &Sandbox| sandbox.job_status("a").map_or(0, |job| job.launches);
    let then = launches(&sandbox);
    Outcome::of(&mut sandbox.sublet(["set", "a", "--resize", "stay"])).succeeded();
    wait_until("it goes on", || (launches(&sandbox) > then).then_some(()));

    ask(&sandbox, "a", Resize::To(2));
    // Asked twice is asked once, and an older answer counts for nothing.
    ask(&sandbox, "a", Resize::To(2));
    wait_until("it is ready for two", || ready(&sandbox, "a", 2));
    let then = launches(&sandbox);
    first.signal(Signal::SIGTERM);
    let stopped = first.wait();
    assert_eq!(stopped.signal, Some(15), "{stopped:?}");
    assert!(
        launches(&sandbox) <= then,
        "it did nothing more once it was ready"
    );
    let saved = stopped
        .stdout
        .rsplit("saved at step ")
        .next()
        .unwrap_or_default();
    let saved = number_after(&format!("saved at step {saved}"), "saved at step ");
    assert!(saved > 0 && saved < 1500, "{stopped:?}");

    let second = training(&sandbox, "b").wait().succeeded();
    assert_eq!(
        number_after(&second.stdout, "at step "),
        saved,
        "{second:?}"
    );
    let report = second.json();
    assert_eq!(
        report["steps"].as_u64(),
        Some(1500 - saved),
        "each step was done once"
    );
    assert_eq!(report["loss_bits"], expected["loss_bits"]);
}

#[test]
fn who_is_asked_before_it_comes_is_asked_then_and_nonsense_is_refused() {
    let sandbox = Sandbox::new();
    let _arbiter = sandbox.arbiter();
    let nobody = Outcome::of(&mut sandbox.sublet(["set", "nobody", "--resize", "2"]));
    assert!(nobody.stderr.contains("nobody"), "{nobody:?}");
    let wrong = Outcome::of(&mut sandbox.sublet(["set", "a", "--resize", "-3"]));
    assert!(
        wrong.code != Some(0) && wrong.stderr.contains("stay"),
        "{wrong:?}"
    );

    // A process that comes later finds what was asked of its job.
    let shell = sandbox.job(&["--name", "late"], "/bin/sh");
    let mut shell = shell;
    let mut train = format!(
        "while [ ! -e {} ]; do sleep 0.05; done; exec {}",
        sandbox.path("go").display(),
        Artefacts::get().program("train_mlp").display()
    );
    for word in STEPS {
        train += &format!(" {word}");
    }
    train += &format!(" --checkpoint {}", sandbox.path("late.ckpt").display());
    let job = Running::start(shell.args(["-c", &train]));
    wait_until("the job is registered", || sandbox.job_status("late"));
    ask(&sandbox, "late", Resize::To(0));
    assert!(
        !sandbox
            .job_status("late")
            .expect("it is there")
            .listens_for_resize
    );
    std::fs::write(sandbox.path("go"), "").expect("a file");
    wait_until("it is ready", || ready(&sandbox, "late", 0));
    job.signal(Signal::SIGKILL);
    let ended = job.wait();
    assert_eq!(
        number_after(&ended.stdout, "saved at step "),
        1,
        "after the first step: {ended:?}"
    );
}
