//! What a program may do in the middle of its slice: whatever it is, the others go on, and have the device when it wants it no more.

use control::JobStatus;
use tests::{Artefacts, Room, Running, Talk, programs, wait_until};

/// A job that always wants the device.
fn honest(room: &Room) -> Running {
    let mut command = room.job(
        &["--name", "honest", "--share", "0.5"],
        Artefacts::get().program("spin"),
    );
    let running = Running::start(command.args(["--kernel-us", "200", "--seconds", "600"]));
    goes_on(room, "honest");
    running
}

/// One that does what it is told, ready to work.
fn told(room: &Room) -> Talk {
    let flags = ["--name", "told", "--share", "0.5", "--mem", "1GiB"];
    let mut talk = Talk::start(&mut room.job(&flags, programs::program("lease")));
    init(&mut talk);
    talk
}

fn init(talk: &mut Talk) {
    let kernels = Artefacts::get().root().join("simgpu/kernels");
    assert_eq!(talk.ask(&format!("init {}", kernels.display())), "0");
}

fn job(room: &Room, name: &str) -> JobStatus {
    room.job_status(name).unwrap_or_default()
}

#[track_caller]
fn goes_on(room: &Room, name: &str) {
    let before = job(room, name).launches;
    wait_until(&format!("{name} goes on"), || {
        (job(room, name).launches > before + 200).then_some(())
    });
}

/// Nobody else uses any of the device, by the arbiter's account, nor did anything wrong.
#[track_caller]
fn has_it_alone(room: &Room) {
    goes_on(room, "honest");
    wait_until("the honest one has the device to itself", || {
        (job(room, "honest").share_got_recent > 0.9).then_some(())
    });
    // One that is gone is forgotten some time.
    let charged = || job(room, "told").device_time_ns;
    let before = charged();
    goes_on(room, "honest");
    assert!(charged() <= before, "it is charged for what it does not do");
    let wrong = |event: &control::Event| event.kind == "misbehaviour";
    let events: Vec<_> = room.events().into_iter().filter(wrong).collect();
    assert!(events.is_empty(), "{events:?}");
}

#[test]
fn a_capture_that_never_ends_bounds_what_is_in_flight_as_ever() {
    let room = Room::new();
    let _honest = honest(&room);
    let mut talk = told(&room);
    // What such a kernel takes is learnt first.
    assert_eq!(
        (talk.ask("queue 32"), talk.ask("sync")),
        ("0".into(), "0".into())
    );
    assert_eq!(talk.ask("capture"), "0");
    let answer = talk.ask("most 100");
    let most = answer
        .strip_prefix("0 ")
        .and_then(|most| most.parse::<u32>().ok());
    // Two milliseconds of them are ten. On a busy machine a wait of 50 ms that ran out lets one more pass.
    assert!(most.is_some_and(|most| most < 50), "{answer}");
    assert_eq!(talk.ask("sync"), "0");
    has_it_alone(&room);
    drop(talk);
}

#[test]
fn a_process_that_dies_in_a_capture_leaves_nothing_behind() {
    let room = Room::new();
    let _honest = honest(&room);
    let mut talk = told(&room);
    assert_eq!(
        (talk.ask("run"), talk.ask("capture")),
        ("0".into(), "0".into())
    );
    goes_on(&room, "told");
    goes_on(&room, "honest");
    wait_until("it holds the device", || {
        job(&room, "told").holding.then_some(())
    });
    assert_eq!(talk.kill().signal, Some(9));
    has_it_alone(&room);
}

#[test]
fn a_process_whose_context_is_lost_and_that_stays_wants_nothing_more() {
    for (what, status) in [("bad", "700"), ("trap", "719")] {
        let room = Room::new();
        let _honest = honest(&room);
        let mut talk = told(&room);
        assert_eq!(talk.ask("run"), "0");
        goes_on(&room, "told");
        // Work before the error and behind it, of this thread and of the other one.
        assert_eq!(talk.ask("queue 20"), "0");
        talk.ask(what);
        talk.ask("queue 20");
        assert_eq!(talk.ask("sync"), status, "{what}");
        // The thread may have seen its end coming before the error.
        let thread = talk.ask("rest");
        assert!(thread == status || thread == "0", "{what}: {thread}");
        has_it_alone(&room);
        assert_eq!(talk.ask("queue 1"), status, "{what}");
        talk.finish().succeeded();
    }
}

#[test]
fn a_child_that_exits_ends_nothing_of_its_parents() {
    let room = Room::new();
    let _honest = honest(&room);
    let mut talk = told(&room);
    assert_eq!(talk.ask("run"), "0");
    goes_on(&room, "told");
    for _ in 0..5 {
        assert_eq!(talk.ask("child"), "7");
    }
    goes_on(&room, "told");
    goes_on(&room, "honest");
    assert_eq!(talk.ask("rest"), "0");
    has_it_alone(&room);
    talk.finish().succeeded();
}

#[test]
fn a_parent_that_exits_takes_its_work_along() {
    let room = Room::new();
    let _honest = honest(&room);
    let mut talk = told(&room);
    assert_eq!(talk.ask("run"), "0");
    goes_on(&room, "told");
    wait_until("it holds the device", || {
        job(&room, "told").holding.then_some(())
    });
    let child = talk.ask("parent");
    assert_ne!(child, talk.running.pid().to_string());
    has_it_alone(&room);
    // The child lives, and is nobody to the arbiter: it never used the device.
    assert_eq!(talk.ask("pid"), child);
    talk.finish().succeeded();
}

#[test]
fn a_thread_that_ends_with_work_in_flight_leaves_the_device_when_that_is_done() {
    let room = Room::new();
    let _honest = honest(&room);
    let mut talk = told(&room);
    for _ in 0..20 {
        assert_eq!(talk.ask("thread 12"), "0");
    }
    has_it_alone(&room);
    assert_eq!(talk.ask("sync"), "0");
    talk.finish().succeeded();
}

#[test]
fn a_process_that_executes_another_program_begins_anew() {
    let room = Room::new();
    let _honest = honest(&room);
    let mut talk = told(&room);
    assert_eq!(talk.ask("run"), "0");
    goes_on(&room, "told");
    wait_until("it holds the device", || {
        job(&room, "told").holding.then_some(())
    });
    let pid = talk.ask("pid");
    talk.send("exec");
    assert_eq!(talk.ask("pid"), pid);
    has_it_alone(&room);
    init(&mut talk);
    assert_eq!(talk.ask("run"), "0");
    goes_on(&room, "told");
    goes_on(&room, "honest");
    assert_eq!(talk.ask("rest"), "0");
    talk.finish().succeeded();
}
