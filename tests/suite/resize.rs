//! Jobs that are asked to change their size save at the end of an iteration, and lose no step.

use control::{Change, Resize};
use nix::sys::signal::Signal;
use serde_json::Value;
use tests::{Artefacts, Outcome, Running, Sandbox, programs, wait_until};

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
    let sandbox = Sandbox::exclusive();
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
    let sandbox = Sandbox::exclusive();
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
    let sandbox = Sandbox::exclusive();
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

/// The rows of a kind on the stdout of `examples/elastic/train.py`.
fn rows(text: &str, kind: &str) -> Vec<Value> {
    let all = text
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    all.filter_map(|row| row.get(kind).cloned()).collect()
}

/// One more is asked for, joins at the end of an iteration, makes every step from there on, and
/// goes when it is asked to. Both have the state of a training alone.
#[test]
fn a_worker_joins_a_training_without_a_restart_and_leaves_it_again() {
    if !programs::exists("python3") {
        return;
    }
    let python = Artefacts::get().root().join("python");
    let program = Artefacts::get().root().join("examples/elastic/train.py");
    let train = |mut command: std::process::Command| {
        command.env("PYTHONPATH", &python).arg(&program);
        command.args(["--steps", "1500", "--mib", "16", "--step-ms", "2"]);
        command
    };
    let sandbox = Sandbox::exclusive();
    let mut bare = sandbox.bare("python3");
    let bare = bare
        .env("PYTHONPATH", &python)
        .arg(python.join("test_elastic.py"));
    assert_eq!(Outcome::of(bare).succeeded().stdout, "well\n");
    let mut solo = train(sandbox.bare("python3"));
    let solo = Outcome::of(solo.arg("--no-elastic")).succeeded();
    let expected = rows(&solo.stdout, "ended")[0]["digest"].clone();

    let _arbiter = sandbox.arbiter();
    let job = Running::start(&mut train(sandbox.job(&["--name", "a"], "python3")));
    let processes = |count: usize| {
        let job = sandbox.job_status("a")?;
        (job.processes.len() == count).then_some(())
    };
    wait_until("it trains, and looks for requests", || {
        sandbox.job_status("a")?.listens_for_resize.then_some(())
    });
    ask(&sandbox, "a", Resize::To(2));
    wait_until("the newcomer has its GPU", || processes(2));
    ask(&sandbox, "a", Resize::To(1));
    wait_until("it has gone again", || processes(1));
    ask(&sandbox, "a", Resize::To(2));
    let outcome = job.wait().succeeded();
    let changes = rows(&outcome.stdout, "change");
    let joined: Vec<u64> = changes
        .iter()
        .filter_map(|one| one["joined"].as_u64())
        .collect();
    assert_eq!(joined.iter().sum::<u64>(), 2, "{changes:?}");
    let ended = rows(&outcome.stdout, "ended");
    assert_eq!(ended.len(), 3, "{outcome:?}");
    let last: Vec<&Value> = ended.iter().filter(|one| one["step"] == 1499).collect();
    assert_eq!(last.len(), 2, "{ended:?}");
    for one in last {
        assert_eq!(one["digest"], expected, "{ended:?}");
    }
}
