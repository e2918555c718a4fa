//! Jobs that are asked to change their size save at the end of an iteration, and lose no step.

use control::{Change, Resize};
use nix::sys::signal::Signal;
use serde_json::Value;
use tests::{Artefacts, Outcome, Room, Running, wait_until};

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
fn training(room: &Room, name: &str) -> Running {
    let mut command = room.job(
        &["--name", name, "--share", "0.5"],
        Artefacts::get().program("train_mlp"),
    );
    command.args(STEPS).args(["--checkpoint-every", "1000000"]);
    command.arg("--resume").arg("--checkpoint");
    Running::start(command.arg(room.path("train.ckpt")))
}

fn bare_report() -> Value {
    let room = Room::new();
    let mut command = room.bare(Artefacts::get().program("train_mlp"));
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

fn ask(room: &Room, name: &str, resize: Resize) {
    let change = Change {
        resize: Some(resize),
        ..Change::default()
    };
    room.control()
        .expect("the arbiter")
        .set(name, change)
        .expect("it is taken");
}

fn ready(room: &Room, name: &str, gpus: u16) -> Option<()> {
    let asked = room.job_status(name)?.resize?;
    (asked.gpus == gpus && asked.ready).then_some(())
}

#[test]
fn a_job_saves_at_the_end_of_an_iteration_and_goes_on_without_losing_a_step() {
    let expected = bare_report();
    let room = Room::new();
    let _arbiter = room.arbiter();
    let first = training(&room, "a");
    wait_until("it looks for requests", || {
        room.job_status("a")?.listens_for_resize.then_some(())
    });
    assert_eq!(room.job_status("a").expect("it runs").resize, None);

    // Taken back: it goes on as if nothing had been.
    ask(&room, "a", Resize::To(4));
    wait_until("it is ready for four", || ready(&room, "a", 4));
    let launches = |room: &Room| room.job_status("a").map_or(0, |job| job.launches);
    let then = launches(&room);
    Outcome::of(&mut room.sublet(["set", "a", "--resize", "stay"])).succeeded();
    wait_until("it goes on", || (launches(&room) > then).then_some(()));

    ask(&room, "a", Resize::To(2));
    // Asked twice is asked once, and an older answer counts for nothing.
    ask(&room, "a", Resize::To(2));
    wait_until("it is ready for two", || ready(&room, "a", 2));
    let then = launches(&room);
    first.signal(Signal::SIGTERM);
    let stopped = first.wait();
    assert_eq!(stopped.signal, Some(15), "{stopped:?}");
    assert!(
        launches(&room) <= then,
        "it did nothing more once it was ready"
    );
    let saved = stopped
        .stdout
        .rsplit("saved at step ")
        .next()
        .unwrap_or_default();
    let saved = number_after(&format!("saved at step {saved}"), "saved at step ");
    assert!(saved > 0 && saved < 1500, "{stopped:?}");

    let second = training(&room, "b").wait().succeeded();
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
fn who_is_asked_before_it_comes_is_told_and_nonsense_is_refused() {
    let room = Room::new();
    let _arbiter = room.arbiter();
    let nobody = Outcome::of(&mut room.sublet(["set", "nobody", "--resize", "2"]));
    assert!(nobody.stderr.contains("nobody"), "{nobody:?}");
    let wrong = Outcome::of(&mut room.sublet(["set", "a", "--resize", "-3"]));
    assert!(
        wrong.code != Some(0) && wrong.stderr.contains("stay"),
        "{wrong:?}"
    );

    // A process that comes later finds what was asked of its job.
    let shell = room.job(&["--name", "late"], "/bin/sh");
    let mut shell = shell;
    let mut train = format!(
        "while [ ! -e {} ]; do sleep 0.05; done; exec {}",
        room.path("go").display(),
        Artefacts::get().program("train_mlp").display()
    );
    for word in STEPS {
        train += &format!(" {word}");
    }
    train += &format!(" --checkpoint {}", room.path("late.ckpt").display());
    let job = Running::start(shell.args(["-c", &train]));
    wait_until("the job is registered", || room.job_status("late"));
    ask(&room, "late", Resize::To(0));
    assert!(
        !room
            .job_status("late")
            .expect("it is there")
            .listens_for_resize
    );
    std::fs::write(room.path("go"), "").expect("a file");
    wait_until("it is ready", || ready(&room, "late", 0));
    job.signal(Signal::SIGKILL);
    let ended = job.wait();
    assert_eq!(
        number_after(&ended.stdout, "saved at step "),
        1,
        "after the first step: {ended:?}"
    );
}
