//! What is in flight is bounded in time: by what each kernel takes, and not by what most of them take.

use tests::{Artefacts, Outcome, Room, Running, programs, wait_until};

#[test]
fn long_kernels_after_thousands_of_short_ones_are_held_back_at_once() {
    let room = Room::new();
    let mut other = room.job(
        &["--name", "other", "--share", "0.5"],
        Artefacts::get().program("spin"),
    );
    let other = Running::start(other.args(["--kernel-us", "200", "--seconds", "600"]));
    wait_until("the other is at work", || {
        (room.job_status("other")?.launches > 200).then_some(())
    });
    let mut phases = room.job(
        &["--name", "phases", "--share", "0.5"],
        programs::program("phases"),
    );
    phases
        .arg(Artefacts::get().root().join("simgpu/kernels/busy.ptx"))
        .arg("20000");
    let phases = Outcome::of(&mut phases).succeeded();
    let most: Vec<u32> = phases
        .stdout
        .lines()
        .map(|line| line.parse().expect("a number"))
        .collect();
    // By a mean over the stream all twelve are in flight. The first phase meets the long ones for the first time, and on a busy machine a
    // wait of 50 ms that ran out lets one more pass.
    let [first, second, graphs] = most[..] else {
        panic!("three phases: {phases:?}");
    };
    assert!(
        first < 12 && second <= 4 && graphs <= 4,
        "of twelve long kernels so many were in flight: {most:?}"
    );
    drop(other);
}
