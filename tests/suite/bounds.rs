//! What is in flight is bounded in time: by what each kernel takes, and not by what most of them
//! take.

use tests::{Artefacts, Outcome, Running, Sandbox, programs, wait_until};

#[test]
fn long_kernels_after_thousands_of_short_ones_are_held_back_at_once() {
    let sandbox = Sandbox::exclusive();
    let mut other = sandbox.job(
        &["--name", "other", "--share", "0.5"],
        Artefacts::get().program("spin"),
    );
    let other = Running::start(other.args(["--kernel-us", "200", "--seconds", "600"]));
    wait_until("the other is at work", || {
        (sandbox.job_status("other")?.launches > 200).then_some(())
    });
    let in_flight = |round: u32| -> [u32; 3] {
        let mut phases = sandbox.job(
            &["--name", &format!("phases{round}"), "--share", "0.5"],
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
        most.try_into().expect("three phases")
    };
    // By a mean over the stream all twelve are in flight, each time. The first phase meets the long
    // ones for the first time, and where the machine is so busy that a wait of 50 ms runs out one
    // more passes: then it is asked again.
    let mut seen = Vec::new();
    let held = (0..3).any(|round| {
        let [first, second, graphs] = in_flight(round);
        seen.push([first, second, graphs]);
        first < 12 && second <= 4 && graphs <= 4
    });
    assert!(
        held,
        "of twelve long kernels so many were in flight: {seen:?}"
    );
    drop(other);
}
