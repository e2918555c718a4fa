//! Jobs on several devices: each is in or out on all of them.

use control::{JobStatus, Residence, ResidenceState};
use tests::{Outcome, ProgramRun, Sandbox, programs, wait_until};

/// So many MiB does each of two devices have.
const CAPACITY_MIB: u32 = 96;

fn two_devices() -> Sandbox {
    let mut sandbox = Sandbox::exclusive();
    sandbox.set("SUBLET_SIM_DEVICES", "2");
    sandbox.set("SUBLET_SIM_CAPACITY", format!("{CAPACITY_MIB}MiB"));
    sandbox.set("SUBLET_SIM_CONTEXT", "0B");
    sandbox
}

/// A job with so many MiB on each of both devices.
fn on_both(sandbox: &Sandbox, name: &str, mib: u32, flags: &[&str]) -> ProgramRun {
    let limit = format!("{}MiB", mib + 8);
    let mut words = vec![
        "--evictable",
        "--name",
        name,
        "--mem",
        &limit,
        "--device",
        "0,1",
    ];
    words.extend(flags);
    let mut run = ProgramRun::start(&mut sandbox.job(&words, programs::program("on_devices")));
    assert_eq!(run.ask(&format!("init 2 {mib}")), "0");
    run
}

fn residence(sandbox: &Sandbox, name: &str) -> Option<Box<Residence>> {
    let JobStatus { residence, .. } = sandbox.job_status(name)?;
    residence
}

/// `jobs` of so many MiB each work on both devices, which do not hold all of them, until each has
/// been sent away and has come back several times.
#[track_caller]
fn take_turns(jobs: &[&str], mib: u32, flags: &[&str]) {
    let sandbox = two_devices();
    let _arbiter = sandbox.arbiter();
    let mut runs = Vec::new();
    for name in jobs {
        let mut run = on_both(&sandbox, name, mib, flags);
        run.send("run");
        runs.push(run);
    }
    let moves = wait_until("each has come back on both devices, and again", || {
        let moves = jobs.iter().map(|name| {
            let residence = residence(&sandbox, name)?;
            Some(residence.evictions.min(residence.restores))
        });
        let moves: Vec<u64> = moves.collect::<Option<_>>()?;
        moves.iter().all(|count| *count >= 4).then_some(moves)
    });
    let mut longest_ms = 0;
    let mut fewest = u32::MAX;
    for run in &mut runs {
        run.send("stop");
    }
    // Each ends its round when it is in the next time.
    for mut run in runs {
        let answer = run.answer();
        let words: Vec<u32> = answer
            .split(' ')
            .filter_map(|one| one.parse().ok())
            .collect();
        let [0, rounds, ms] = words[..] else {
            panic!("{answer}");
        };
        (longest_ms, fewest) = (ms.max(longest_ms), rounds.min(fewest));
        assert!(rounds > 0, "{answer}");
        let outcome = run.finish();
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
    }
    println!(
        "now: {} jobs came back {moves:?} times, each did {fewest} rounds or more, the longest took \
         {longest_ms} ms",
        jobs.len()
    );
}

#[test]
fn two_jobs_on_two_devices_that_hold_one_of_them_take_turns() {
    take_turns(&["a", "b"], 60, &[]);
}

#[test]
fn so_do_those_whose_devices_are_shared_each_by_itself() {
    take_turns(&["a", "b"], 60, &["--gang=false"]);
}

#[test]
fn three_jobs_of_which_two_devices_hold_two_all_get_on() {
    take_turns(&["a", "b", "c"], 40, &[]);
}

#[test]
fn a_job_on_two_devices_is_evicted_and_restored_by_hand_once_each_time() {
    let sandbox = two_devices();
    let _arbiter = sandbox.arbiter();
    let mut run = on_both(&sandbox, "a", 8, &[]);
    let by_hand = |verb: &str| {
        Outcome::of(&mut sandbox.sublet([verb, "a", "--timeout", "60s"])).succeeded();
    };
    let mut evictions = 0;
    let is = |state: ResidenceState| {
        wait_until("all of it is there", || {
            residence(&sandbox, "a").filter(|one| one.state == state)
        })
    };
    for round in 1..=5 {
        assert_eq!(run.ask("round"), "0", "round {round}");
        by_hand("evict");
        let away = is(ResidenceState::Evicted);
        by_hand("restore");
        let here = is(ResidenceState::Resident);
        evictions = away.evictions.max(here.restores);
        assert!(evictions <= 2 * round, "round {round}: {here:?}");
    }
    println!("now: {evictions} moves of each kind on two devices for 5 evictions and restores");
    let outcome = run.finish();
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
}
