//! Jobs that take turns at a device by themselves: by the command, from Python, and by the gRPC
//! interface of llm-d, with memory that does not fit together.

use std::path::Path;
use std::process::Command;
use std::thread::JoinHandle;
use std::time::Duration;

use control::{
    Acquire, Acquired, Client, GiveUp, GroupState, GroupStatus, Residence, ResidenceState, Turn,
};
use kubernetes::grpc;
use kubernetes::proto::timeslice as v1alpha1;
use nix::sys::signal::{Signal, kill};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;
use serde_json::Value;
use testbed::CommandWithin as _;
use tests::{Artefacts, Outcome, PATIENCE, ProgramRun, Running, Sandbox, programs, wait_until};

/// A device on which one of two jobs of 60 % fits.
fn sandbox() -> Sandbox {
    let mut sandbox = Sandbox::exclusive();
    sandbox.set("SUBLET_SIM_CAPACITY", "1GiB");
    sandbox
}

/// A job of 576 MiB with a content of its own, in the group `rl`. It says that it is ready once it
/// has had its turn.
fn tenant(sandbox: &Sandbox, name: &str, flags: &[&str]) -> ProgramRun {
    let mut words = vec![
        "--name",
        name,
        "--evictable",
        "--mem",
        "60%",
        "--group",
        "rl",
    ];
    words.extend(flags);
    let mut command = sandbox.job(&words, Artefacts::get().program("tenant"));
    command.args([
        "--bytes", "576MiB", "--block", "64MiB", "--span", "16MiB", "--stripe", "64KiB",
    ]);
    command.args(["--seed", &name.len().to_string(), "--name", name]);
    let run = ProgramRun::start(&mut command);
    wait_until("the job is there", || sandbox.job_status(name));
    run
}

/// Ends a job, which is to end well.
#[track_caller]
fn well(run: ProgramRun) {
    let outcome = run.finish();
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(0), ""));
}

fn control(sandbox: &Sandbox) -> Client {
    sandbox.control().expect("an arbiter")
}

fn now_ns() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).expect("a clock");
    // CAST: the clock is not negative.
    time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64
}

#[track_caller]
fn acquire(sandbox: &Sandbox, job: &str) -> Acquired {
    let acquire = Acquire {
        timeout_ms: PATIENCE.as_millis() as u64,
        ..Acquire::default()
    };
    let mut control =
        Client::connect(&sandbox.path("run/api.sock"), PATIENCE * 2).expect("connected");
    let acquired = control.acquire(job, &acquire).expect("it may");
    assert!(acquired.acquired, "{job}: {acquired:?}");
    acquired
}

/// A request that waits; its answer, or why there is none.
fn waiting(sandbox: &Sandbox, job: &str) -> JoinHandle<Result<Acquired, String>> {
    let (path, job) = (sandbox.path("run/api.sock"), job.to_owned());
    std::thread::spawn(move || {
        let mut control =
            Client::connect(&path, PATIENCE * 2).map_err(|error| error.to_string())?;
        let acquire = Acquire {
            timeout_ms: PATIENCE.as_millis() as u64,
            ..Acquire::default()
        };
        control
            .acquire(&job, &acquire)
            .map_err(|error| error.to_string())
    })
}

#[track_caller]
fn give_up(sandbox: &Sandbox, job: &str) -> control::Yielded {
    control(sandbox)
        .give_up(job, &GiveUp::default())
        .expect("it has the turn")
}

fn group(sandbox: &Sandbox) -> GroupStatus {
    let groups = control(sandbox).groups().expect("groups");
    groups
        .into_iter()
        .find(|one| one.name == "rl")
        .expect("the group")
}

#[track_caller]
fn wait_in_line(sandbox: &Sandbox, jobs: &[&str]) {
    wait_until("they wait", || {
        (group(sandbox).waiting == jobs).then_some(())
    });
}

#[track_caller]
fn json(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"))
}

#[track_caller]
fn checked(run: &mut ProgramRun) {
    let said = json(&run.ask("check"));
    let wrong = [&said["wrong_by_kernel"], &said["wrong_by_copy"]];
    assert!(wrong.iter().all(|wrong| **wrong == 0), "{said}");
    assert!(said["stripes"].as_u64().expect("a number") > 30, "{said}");
}

/// The group once it is as expected: reports follow what processes do, a step of the arbiter later.
#[track_caller]
fn group_once(sandbox: &Sandbox, what: &str, is_so: impl Fn(&GroupStatus) -> bool) -> GroupStatus {
    wait_until(what, || Some(group(sandbox)).filter(&is_so))
}

/// Where a job's memory is, once nothing of it moves any more and so much of it is on the device.
#[track_caller]
fn settled(sandbox: &Sandbox, job: &str, bytes: u64) -> Box<Residence> {
    let mut last = None;
    wait_until("its memory is where it belongs", || {
        let residence = sandbox.job_status(job)?.residence?;
        if last.as_ref() != Some(&residence) {
            println!("{job}: {residence:?}");
            last = Some(residence.clone());
        }
        let rests = matches!(
            residence.state,
            ResidenceState::Resident | ResidenceState::Evicted
        );
        (rests && residence.resident_bytes == bytes).then_some(residence)
    })
}

#[test]
fn two_jobs_that_do_not_fit_together_take_turns_and_keep_what_they_have() {
    let sandbox = sandbox();
    let _arbiter = sandbox.arbiter();
    let mut left = tenant(&sandbox, "a", &[]);
    let first = acquire(&sandbox, "a");
    assert!(!first.restored && !first.held_before, "{first:?}");
    assert_eq!(json(&left.answer())["ready"], true);
    assert!(acquire(&sandbox, "a").held_before, "acquired twice");

    // Nobody waits: the memory stays, and the work does not go on.
    let yielded = give_up(&sandbox, "a");
    assert!(yielded.stays && yielded.waiting == 0, "{yielded:?}");
    left.send("launch");
    let status = group_once(&sandbox, "what it has is seen", |one| {
        one.state == GroupState::Yielded
    });
    assert_eq!(status.holder, None);
    wait_until("it waits at its gate", || {
        let events = sandbox.events();
        let needed = |one: &control::Event| one.kind == "turn_needed" && one.job == "a";
        events.into_iter().find(needed)
    });
    let residence = sandbox.job_status("a").and_then(|job| job.residence);
    let all = residence.expect("it is evictable").evictable_bytes;
    assert!(all >= 576 << 20, "{all}");
    assert_eq!(settled(&sandbox, "a", all).evictions, 0);
    let before_ns = now_ns();
    assert!(!acquire(&sandbox, "a").restored);
    let done_ns = json(&left.answer())["done_ns"].as_u64().expect("a time");
    assert!(done_ns > before_ns, "it has computed without a turn");

    // One that comes meanwhile waits, and takes nothing away from who has the turn.
    let mut right = tenant(&sandbox, "bb", &[]);
    wait_until("it waits, and has not asked", || {
        let events = sandbox.events();
        let needed = |one: &control::Event| one.kind == "turn_needed" && one.job == "bb";
        events.into_iter().find(needed)
    });
    assert_eq!(json(&left.ask("launch"))["stripes"], 36);
    assert_eq!(settled(&sandbox, "a", all).evictions, 0);

    // It asks: the other one's memory leaves.
    let line = waiting(&sandbox, "bb");
    wait_in_line(&sandbox, &["bb"]);
    give_up(&sandbox, "a");
    assert!(testbed::join(line).expect("it may").acquired);
    assert_eq!(json(&right.answer())["ready"], true);
    let residence = settled(&sandbox, "a", 0);
    assert_eq!(residence.evictions, 1);
    let why = residence.reason;
    assert!(why.contains("another job of its group"), "{why}");

    // Its launch of before waits for its next turn.
    left.send("launch");
    let before_ns = now_ns();
    give_up(&sandbox, "bb");
    assert!(acquire(&sandbox, "a").restored);
    let done_ns = json(&left.answer())["done_ns"].as_u64().expect("a time");
    assert!(done_ns > before_ns, "it has computed without a turn");

    for round in 0..10 {
        for (run, job, other) in [(&mut right, "bb", "a"), (&mut left, "a", "bb")] {
            let line = waiting(&sandbox, job);
            wait_in_line(&sandbox, &[job]);
            let yielded = give_up(&sandbox, other);
            assert!(!yielded.stays && yielded.waiting == 1, "{yielded:?}");
            let acquired = testbed::join(line).expect("it may");
            assert!(
                acquired.acquired && acquired.restored,
                "round {round}: {acquired:?}"
            );
            checked(run);
            let changed = json(&run.ask("change 0.25 0.5"));
            assert!(
                changed["changed"].as_u64().expect("a number") > 0,
                "{changed}"
            );
            checked(run);
        }
    }
    // In each round it has come once and left once.
    let evictions = settled(&sandbox, "bb", 0).evictions;
    assert!(evictions > 10, "{evictions}");
    let text = Outcome::of(&mut sandbox.sublet(["ps"])).succeeded().stdout;
    assert!(
        text.contains("a has the turn, bb has not asked for it"),
        "{text}"
    );
    let text = Outcome::of(&mut sandbox.sublet(["groups"]))
        .succeeded()
        .stdout;
    assert!(text.contains("rl") && text.contains("held"), "{text}");
    for kind in ["turn_begun", "turn_over"] {
        let events = sandbox.events();
        assert!(
            events.iter().any(|one| one.kind == kind && one.job == "a"),
            "{kind}"
        );
    }
    give_up(&sandbox, "a");
    well(left);
    acquire(&sandbox, "bb");
    well(right);
}

#[test]
fn who_dies_frees_the_turn_and_the_place_in_line_at_once() {
    let sandbox = sandbox();
    let _arbiter = sandbox.arbiter();
    let mut first = tenant(&sandbox, "a", &[]);
    let second = tenant(&sandbox, "bb", &[]);
    let mut third = tenant(&sandbox, "ccc", &[]);
    acquire(&sandbox, "a");
    assert_eq!(json(&first.answer())["ready"], true);
    let of_second = waiting(&sandbox, "bb");
    wait_in_line(&sandbox, &["bb"]);
    let of_third = waiting(&sandbox, "ccc");
    wait_in_line(&sandbox, &["bb", "ccc"]);
    // A job that waits dies: nobody waits for it.
    second.kill();
    let error = testbed::join(of_second).expect_err("it has ended");
    assert!(error.contains("`bb` has ended"), "{error}");
    wait_in_line(&sandbox, &["ccc"]);
    // The one that has the turn is killed in the middle of it.
    first.send("launch");
    first.kill();
    let acquired = testbed::join(of_third).expect("it may");
    assert!(acquired.acquired, "{acquired:?}");
    assert_eq!(json(&third.answer())["ready"], true);
    checked(&mut third);
    assert_eq!(group(&sandbox).holder.as_deref(), Some("ccc"));
    wait_until("the others are members no more", || {
        (group(&sandbox).members.len() == 1).then_some(())
    });
    well(third);
    wait_until("the group is gone with its last job", || {
        control(&sandbox).groups().ok()?.is_empty().then_some(())
    });
}

#[test]
fn a_turn_comes_when_the_job_before_it_ends() {
    let sandbox = sandbox();
    let _arbiter = sandbox.arbiter();
    let mut stays = tenant(&sandbox, "bb", &[]);
    acquire(&sandbox, "bb");
    assert_eq!(json(&stays.answer())["ready"], true);
    let mut acquired = Vec::new();
    for (round, gives_up) in [true, false].into_iter().enumerate() {
        let name = format!("a{round}");
        let mut ends = tenant(&sandbox, &name, &[]);
        let line = waiting(&sandbox, &name);
        wait_in_line(&sandbox, &[&name]);
        give_up(&sandbox, "bb");
        assert!(testbed::join(line).expect("it may").acquired);
        assert_eq!(json(&ends.answer())["ready"], true);
        let line = waiting(&sandbox, "bb");
        wait_in_line(&sandbox, &["bb"]);
        if gives_up {
            give_up(&sandbox, &name);
            settled(&sandbox, &name, 0);
        }
        // It gives back all that it has, with its memory here or away.
        well(ends);
        acquired.push(testbed::join(line).map(|one| one.acquired && one.restored));
        checked(&mut stays);
    }
    println!("now: behind a neighbour that ends it has its turn: {acquired:?}");
    assert_eq!(acquired, [const { Ok(true) }; 2]);
    well(stays);
}

#[test]
fn who_waits_in_vain_hears_for_what() {
    let sandbox = sandbox();
    let _arbiter = sandbox.arbiter();
    let mut first = tenant(&sandbox, "a", &[]);
    acquire(&sandbox, "a");
    assert_eq!(json(&first.answer())["ready"], true);
    let mut second = tenant(&sandbox, "bb", &[]);
    let in_vain = || {
        let flags = ["acquire", "bb", "--timeout", "1s"];
        let outcome = Outcome::of(&mut sandbox.sublet(flags));
        assert_eq!(outcome.code, Some(124), "{outcome:?}");
        outcome.stdout
    };
    let said = in_vain();
    assert!(said.contains("job `a` has the turn"), "{said}");
    // Its memory is to leave, and it does nothing.
    let processes = sandbox.job_status("a").expect("a job").processes;
    let pid = Pid::from_raw(i32::try_from(processes[0].pid).expect("a process"));
    kill(pid, Signal::SIGSTOP).expect("it is ours");
    give_up(&sandbox, "a");
    let said = in_vain();
    kill(pid, Signal::SIGCONT).expect("it is ours");
    println!("now: it hears: {}", said.trim_end());
    let expected = format!(
        "the memory of job `a` has not left: its process {pid} is stopped (`kill -CONT {pid}`"
    );
    assert!(said.contains(&expected), "{said}");
    acquire(&sandbox, "bb");
    assert_eq!(json(&second.answer())["ready"], true);
    well(first);
    well(second);
}

#[test]
fn a_request_whose_connection_ends_gives_its_place_up() {
    let sandbox = sandbox();
    let _arbiter = sandbox.arbiter();
    let jobs = ["a", "bb", "ccc"].map(|name| tenant(&sandbox, name, &[]));
    acquire(&sandbox, "a");
    let mut killed = Running::start(&mut sandbox.sublet(["acquire", "bb"]));
    wait_in_line(&sandbox, &["bb"]);
    let of_third = waiting(&sandbox, "ccc");
    wait_in_line(&sandbox, &["bb", "ccc"]);
    killed.kill();
    drop(killed.wait());
    wait_in_line(&sandbox, &["ccc"]);
    give_up(&sandbox, "a");
    assert!(testbed::join(of_third).expect("it may").acquired);
    drop(jobs);
}

#[test]
fn what_makes_no_sense_is_refused_and_says_why() {
    let sandbox = sandbox();
    let _arbiter = sandbox.arbiter();
    let _jobs = ["a", "bb"].map(|name| tenant(&sandbox, name, &[]));
    let outside =
        ProgramRun::start(&mut sandbox.job(&["--name", "out"], programs::program("memory")));
    wait_until("the job is there", || sandbox.job_status("out"));
    let ask = |words: &[&str]| Outcome::of(&mut sandbox.sublet(words));
    let refused = |words: &[&str], text: &str| {
        let outcome = ask(words);
        assert_eq!(outcome.code, Some(125), "{words:?}: {outcome:?}");
        assert!(outcome.stderr.contains(text), "{words:?}: {outcome:?}");
    };
    refused(&["acquire"], "part of no job");
    refused(&["yield"], "part of no job");
    refused(&["acquire", "nobody"], "no job is named `nobody`");
    refused(&["acquire", "a", "--group", "x y"], "`x y`");
    refused(&["acquire", "a", "--group", "other"], "in the group `rl`");
    refused(&["yield", "a"], "no turn to give up: nobody has");
    refused(&["yield", "out"], "in no group");
    refused(
        &["yield", "a", "--group", "nowhere"],
        "no job is in a group `nowhere`",
    );
    assert_eq!(ask(&["acquire", "a"]).code, Some(0));
    refused(&["yield", "bb"], "no turn to give up: `a` has");
    // In time or not at all, and nothing is left of it.
    let missed = ask(&["acquire", "bb", "--timeout", "50ms", "--json"]);
    assert_eq!(missed.code, Some(124), "{missed:?}");
    assert_eq!(json(&missed.stdout)["acquired"], false);
    let status = group(&sandbox);
    assert!(
        status.waiting.is_empty() && status.holder.as_deref() == Some("a"),
        "{status:?}"
    );
    assert!(
        sandbox
            .events()
            .iter()
            .any(|one| one.kind == "turn_missed" && one.job == "bb")
    );
    let yielded = ask(&["yield", "a", "--group", "rl", "--json"]).succeeded();
    assert_eq!(json(&yielded.stdout)["stays"], true);
    refused(&["yield", "a"], "no turn to give up");
    // A job that says its group missed is in it from then on, and no other one's turn is its own.
    assert_eq!(ask(&["acquire", "out", "--group", "rl"]).code, Some(0));
    let status = group(&sandbox);
    assert_eq!(status.holder.as_deref(), Some("out"));
    let turns: Vec<Turn> = status.members.iter().map(|member| member.turn).collect();
    assert_eq!(turns, [Turn::None, Turn::None, Turn::Holds]);
    well(outside);
    wait_until("its turn ends with it", || {
        group(&sandbox).holder.is_none().then_some(())
    });
}

#[test]
fn a_flood_of_requests_is_bounded_and_others_are_served() {
    let sandbox = sandbox();
    let _arbiter = sandbox.arbiter();
    let _jobs = ["a", "bb"].map(|name| tenant(&sandbox, name, &[]));
    acquire(&sandbox, "a");
    let flood: Vec<_> = (0..24).map(|_| waiting(&sandbox, "bb")).collect();
    let refused = wait_until("all but some are refused", || {
        let over: Vec<bool> = flood.iter().map(JoinHandle::is_finished).collect();
        let over = over.iter().filter(|over| **over).count();
        (over >= 16).then_some(over)
    });
    assert_eq!(refused, 16);
    assert_eq!(group(&sandbox).waiting, ["bb"]);
    give_up(&sandbox, "a");
    let answers: Vec<_> = flood.into_iter().map(testbed::join).collect();
    let (had, errors): (Vec<_>, Vec<_>) = answers.into_iter().partition(Result::is_ok);
    assert_eq!((had.len(), errors.len()), (8, 16));
    for error in errors {
        let error = error.expect_err("refused");
        assert!(error.contains("8 requests of this job"), "{error}");
    }
}

#[test]
fn turns_outlive_the_arbiter() {
    let sandbox = sandbox();
    let mut arbiter = sandbox.arbiter();
    let flags = ["--on-arbiter-loss", "freeze"];
    let mut first = tenant(&sandbox, "a", &flags);
    let mut second = tenant(&sandbox, "bb", &flags);
    acquire(&sandbox, "bb");
    assert_eq!(json(&second.answer())["ready"], true);
    give_up(&sandbox, "bb");
    acquire(&sandbox, "a");
    assert_eq!(json(&first.answer())["ready"], true);
    second.send("launch");
    let waits = Running::start(&mut sandbox.sublet(["acquire", "bb", "--json"]));
    wait_in_line(&sandbox, &["bb"]);
    arbiter.kill();
    drop(arbiter.wait());
    // For longer than between two looks for it.
    std::thread::sleep(Duration::from_millis(500));
    let _arbiter = sandbox.arbiter();
    let status = group(&sandbox);
    assert_eq!(
        (status.state, status.holder.as_deref()),
        (GroupState::Held, Some("a"))
    );
    checked(&mut first);
    // Who waited asks again by itself.
    wait_in_line(&sandbox, &["bb"]);
    let before_ns = now_ns();
    give_up(&sandbox, "a");
    let outcome = waits.wait().succeeded();
    let said = json(&outcome.stdout);
    assert!(
        said["acquired"] == true && said["restored"] == true,
        "{said}"
    );
    let done_ns = json(&second.answer())["done_ns"].as_u64().expect("a time");
    assert!(done_ns > before_ns, "it has computed without a turn");
    checked(&mut second);
    drop((first, second));
}

#[test]
fn a_job_that_another_ones_turn_has_sent_away_comes_back_by_its_own_turn_alone() {
    let sandbox = sandbox();
    let _arbiter = sandbox.arbiter();
    let mut first = tenant(&sandbox, "a", &[]);
    let _second = tenant(&sandbox, "bb", &[]);
    acquire(&sandbox, "a");
    assert_eq!(json(&first.answer())["ready"], true);
    give_up(&sandbox, "a");
    acquire(&sandbox, "bb");
    let outcome = Outcome::of(&mut sandbox.sublet(["restore", "a"]));
    assert_eq!(outcome.code, Some(125), "{outcome:?}");
    assert!(outcome.stderr.contains("sublet acquire"), "{outcome:?}");
    // What its operator has evicted does not come for a turn either.
    give_up(&sandbox, "bb");
    Outcome::of(&mut sandbox.sublet(["evict", "a"])).succeeded();
    let missed = Outcome::of(&mut sandbox.sublet(["acquire", "a", "--timeout", "300ms"]));
    assert_eq!(missed.code, Some(124), "{missed:?}");
    assert!(group(&sandbox).holder.is_none());
}

/// A caller of the gRPC interface.
struct Caller {
    runtime: tokio::runtime::Runtime,
    client: grpc::Client,
}

impl Caller {
    fn at(socket: &Path) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let client = wait_until("it can be called", || {
            runtime.block_on(grpc::Client::connect(socket)).ok()
        });
        Self { runtime, client }
    }

    fn ask<Q, A>(
        &mut self,
        path: &'static str,
        question: Q,
        patience: Duration,
    ) -> Result<A, tonic::Status>
    where
        Q: prost::Message + Default + 'static,
        A: prost::Message + Default + 'static,
    {
        let asked = self.client.ask(path, question, patience);
        self.runtime.block_on(asked)
    }
}

fn of(job: &str, group: &str) -> v1alpha1::JobRequest {
    v1alpha1::JobRequest {
        job_id: job.into(),
        group_id: group.into(),
    }
}

const ACQUIRE: &str = "/timeslice_orchestrator.v1alpha1.TimeSliceOrchestratorService/Acquire";
const YIELD: &str = "/timeslice_orchestrator.v1alpha1.TimeSliceOrchestratorService/Yield";
const OLDER_YIELD: &str = "/accelerator_orchestrator.v1alpha1.AcceleratorOrchestratorService/Yield";
const LIST: &str = "/timeslice_orchestrator.v1alpha1.TimeSliceOrchestratorService/ListGroups";
const STATUS: &str = "/timeslice_orchestrator.v1alpha1.TimeSliceOrchestratorService/GetGroupStatus";

/// The status of the group `rl` once it is as expected.
#[track_caller]
fn status_once(
    caller: &mut Caller,
    what: &str,
    is_so: impl Fn(&v1alpha1::GetGroupStatusResponse) -> bool,
) -> v1alpha1::GetGroupStatusResponse {
    let question = || v1alpha1::GetGroupStatusRequest {
        group_id: "rl".into(),
    };
    wait_until(what, || {
        let status = caller.ask(STATUS, question(), PATIENCE).expect("there");
        println!("{status:?}");
        Some(status).filter(&is_so)
    })
}

#[test]
fn programs_for_llm_ds_orchestrator_take_turns_here() {
    let sandbox = sandbox();
    let _arbiter = sandbox.arbiter();
    let mut first_job = tenant(&sandbox, "a", &[]);
    let _server = Running::start(&mut sandbox.sublet(["timeslice"]));
    let socket = sandbox.path("run/timeslice.sock");
    let mut caller = Caller::at(&socket);
    let acquire = |caller: &mut Caller, job: &str| -> Result<v1alpha1::AcquireResponse, _> {
        caller.ask(ACQUIRE, of(job, "rl"), PATIENCE)
    };
    let first = acquire(&mut caller, "a").expect("its turn");
    assert!(first.success && !first.context_restored, "{first:?}");
    assert_eq!(json(&first_job.answer())["ready"], true);
    let yielded: v1alpha1::YieldResponse = caller
        .ask(YIELD, of("a", "rl"), PATIENCE)
        .expect("it has it");
    assert!(yielded.success && yielded.snapshot_deferred, "{yielded:?}");
    assert_eq!(yielded.pending_waiters, 0);
    let status = status_once(&mut caller, "what it has is seen", |status| {
        let group = status.group.as_ref().expect("the group");
        group.group_state() == v1alpha1::GroupState::IdleYielded
    });
    let status = status.group.expect("the group");
    assert_eq!(
        (status.locking_job.as_str(), status.loaded_job.as_str()),
        ("", "a")
    );

    let mut second_job = tenant(&sandbox, "bb", &[]);
    assert!(acquire(&mut caller, "bb").expect("its turn").success);
    assert_eq!(json(&second_job.answer())["ready"], true);
    let status = status_once(&mut caller, "one is saved, one runs", |status| {
        let states: Vec<_> = status
            .agent_job_states
            .iter()
            .map(|one| one.job_state())
            .collect();
        states == [v1alpha1::JobState::Saved, v1alpha1::JobState::Running]
    });
    let status = status.group.expect("the group");
    assert_eq!(
        (status.locking_job.as_str(), status.active_job.as_str()),
        ("bb", "bb")
    );
    let groups: v1alpha1::ListGroupsResponse = caller
        .ask(LIST, v1alpha1::ListGroupsRequest {}, PATIENCE)
        .expect("there");
    assert_eq!(groups.group_ids, ["rl"]);

    // A caller that hangs up waits no more, while calls that wait keep nobody from a yield.
    let mut hangs_up = Caller::at(&socket);
    let missed = hangs_up.ask::<_, v1alpha1::AcquireResponse>(
        ACQUIRE,
        of("a", ""),
        Duration::from_millis(100),
    );
    assert_eq!(
        missed.map_err(|status| status.code()),
        Err(tonic::Code::DeadlineExceeded)
    );
    drop(hangs_up);
    wait_until("its place in line is free", || {
        group(&sandbox).waiting.is_empty().then_some(())
    });
    let line = {
        let socket = socket.clone();
        std::thread::spawn(move || {
            let mut caller = Caller::at(&socket);
            caller.ask::<_, v1alpha1::AcquireResponse>(ACQUIRE, of("a", "rl"), PATIENCE)
        })
    };
    wait_in_line(&sandbox, &["a"]);
    let yielded: v1alpha1::YieldResponse = caller
        .ask(OLDER_YIELD, of("bb", "rl"), PATIENCE)
        .expect("it has it");
    assert_eq!(
        (yielded.pending_waiters, yielded.snapshot_deferred),
        (1, false)
    );
    let restored = testbed::join(line).expect("its turn");
    assert!(
        restored.success && restored.context_restored,
        "{restored:?}"
    );
    checked(&mut first_job);

    for (path, question, code) in [
        (ACQUIRE, of("nobody", "rl"), tonic::Code::NotFound),
        (ACQUIRE, of("a", "other"), tonic::Code::FailedPrecondition),
        (YIELD, of("bb", "rl"), tonic::Code::PermissionDenied),
        (YIELD, of("bb", "nowhere"), tonic::Code::NotFound),
        ("/x.Y/Z", of("a", "rl"), tonic::Code::Unimplemented),
    ] {
        let answer = caller.ask::<_, v1alpha1::YieldResponse>(path, question, PATIENCE);
        assert_eq!(answer.map_err(|status| status.code()), Err(code), "{path}");
    }
    let question = v1alpha1::GetGroupStatusRequest {
        group_id: "nowhere".into(),
    };
    let answer = caller.ask::<_, v1alpha1::GetGroupStatusResponse>(STATUS, question, PATIENCE);
    assert_eq!(
        answer.map_err(|status| status.code()),
        Err(tonic::Code::NotFound)
    );
}

/// gRPC's own library for Python, whose core names a socket in its way.
#[test]
fn programs_in_python_take_turns_by_grpc() {
    let sandbox = Sandbox::exclusive();
    let mut asked = Command::new("python3");
    let asked = asked.args(["-c", "import grpc"]);
    if !programs::exists("python3") || asked.output_within(PATIENCE).status.code() != Some(0) {
        println!("now: skipped, python3 has no grpc here (pip install grpcio)");
        return;
    }
    let _arbiter = sandbox.arbiter();
    let job = ProgramRun::start(&mut sandbox.job(
        &["--name", "book", "--group", "rl"],
        programs::program("memory"),
    ));
    wait_until("the job is there", || sandbox.job_status("book"));
    let _server = Running::start(&mut sandbox.sublet(["timeslice"]));
    let socket = sandbox.path("run/timeslice.sock");
    wait_until("it listens", || socket.exists().then_some(()));
    let script = "import grpc, os, sys\n\
        channel = grpc.insecure_channel('unix:' + sys.argv[1])\n\
        question = b'\\x0a\\x04book\\x12\\x02rl'\n\
        for method in ('Acquire', 'Yield', 'Yield'):\n\
        \x20   call = channel.unary_unary('/timeslice_orchestrator.v1alpha1.TimeSliceOrchestratorService/' + method)\n\
        \x20   try:\n\
        \x20       print(call(question, timeout=50, wait_for_ready=True)[:2].hex(), flush=True)\n\
        \x20   except grpc.RpcError as error:\n\
        \x20       print(error.code().name)\n";
    // It may be installed in a home.
    let mut command = sandbox.command("python3");
    command.env("HOME", std::env::var_os("HOME").unwrap_or_default());
    let outcome = Outcome::of(command.args(["-c", script]).arg(&socket)).succeeded();
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert_eq!(lines, ["0801", "0801", "PERMISSION_DENIED"], "{outcome:#?}");
    well(job);
}

/// A program in Python, in a job with these flags, or in none.
fn python(sandbox: &Sandbox, flags: Option<&[&str]>, script: &str) -> Command {
    let mut command = match flags {
        Some(flags) => sandbox.job(flags, "python3"),
        None => sandbox.command("python3"),
    };
    command
        .env("PYTHONPATH", Artefacts::get().root().join("python"))
        .env("SUBLET_COMMAND", Artefacts::get().program("sublet"))
        .args(["-c", script]);
    command
}

#[test]
fn a_block_of_python_is_a_turn() {
    if !programs::exists("python3") {
        return;
    }
    let sandbox = Sandbox::exclusive();
    let _arbiter = sandbox.arbiter();
    let script = "import sublet\n\
        turn = lambda: sublet.job()['turn']\n\
        print(turn())\n\
        try:\n\
        \x20   with sublet.turn('rl') as said:\n\
        \x20       print(said['acquired'], said['restored'], turn())\n\
        \x20       print(sublet.acquire()['held_before'])\n\
        \x20       raise KeyError\n\
        except KeyError:\n\
        \x20   print(turn())\n\
        try:\n\
        \x20   sublet.yield_()\n\
        except sublet.SubletError as error:\n\
        \x20   print(error)\n\
        sublet.acquire(timeout=5)\n\
        print(sublet.yield_()['stays'])\n\
        import subprocess, os\n\
        subprocess.run([os.environ['SUBLET_COMMAND'], 'acquire', 'other'], check=True, stdout=subprocess.DEVNULL)\n\
        try:\n\
        \x20   sublet.acquire(timeout=0.05)\n\
        except TimeoutError as error:\n\
        \x20   print(type(error).__name__, error)\n";
    let other = ProgramRun::start(&mut sandbox.job(
        &["--name", "other", "--group", "rl"],
        programs::program("memory"),
    ));
    wait_until("the job is there", || sandbox.job_status("other"));
    let flags = ["--name", "book", "--group", "rl"];
    let outcome = Outcome::of(&mut python(&sandbox, Some(&flags), script)).succeeded();
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert_eq!(
        lines[..4],
        ["none", "True False holds", "True", "none"],
        "{outcome:#?}"
    );
    assert!(lines[4].contains("no turn to give up"), "{outcome:#?}");
    assert_eq!(lines[5], "True", "{outcome:#?}");
    let missed = "TurnTimeout job `book` has no turn of the group `rl`";
    assert!(lines[6].starts_with(missed), "{outcome:#?}");
    well(other);

    // Outside of a job there is nobody to take turns with.
    let script = "import sublet\n\
        with sublet.turn('rl') as said: print(said)\n\
        print(sublet.acquire(), sublet.yield_())\n\
        try:\n\
        \x20   sublet.acquire(required=True)\n\
        except sublet.SubletError as error:\n\
        \x20   print(error)\n";
    let outcome = Outcome::of(&mut python(&sandbox, None, script)).succeeded();
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert_eq!(lines[..2], ["None", "None None"], "{outcome:#?}");
    assert!(lines[2].contains("part of no job"), "{outcome:#?}");
    let warnings = outcome.stderr.matches("RuntimeWarning").count();
    assert_eq!(warnings, 1, "{outcome:#?}");
}
