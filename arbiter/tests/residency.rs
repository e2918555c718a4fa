//! Jobs whose memory leaves the device and comes back, over the daemon's real sockets, with agents
//! that count bytes.

mod agent;
#[allow(
    dead_code,
    reason = "shared with the other test programs, which use all of it"
)]
mod bench;

use agent::{Agent, FakeMemory};
use bench::{Daemon, PATIENCE, Worker, introduction, until};
use channel::client::{ClientEnd, Introduction};
use channel::{Footprint, NO_LIMIT, Reason};
use control::{
    Change, Client, ClientError, ControlError, ErrorCode, JobSettings, JobSpec, MemLimit,
    MoveOutcome, Moves, Overflow, Registered, ResidenceState,
};

/// The device has eight of these, and the host space for more.
const UNIT: u64 = 128 << 20;

/// Attaches to a device of eight units.
fn attach(job: &Registered) -> ClientEnd {
    let mut introduction: Introduction = introduction(job);
    introduction.devices[0].total_bytes = 8 * UNIT;
    ClientEnd::attach(&job.channel_socket, &introduction, PATIENCE).expect("attached")
}

fn evictable(name: &str) -> JobSpec {
    JobSpec {
        settings: JobSettings {
            evictable: Some(true),
            ..JobSettings::default()
        },
        name: name.into(),
        simulated: true,
        ..JobSpec::default()
    }
}

fn refusal(result: Result<impl std::fmt::Debug, ClientError>) -> ControlError {
    match result {
        Err(ClientError::Refused(error)) => error,
        other => panic!("{other:?}"),
    }
}

fn evict(names: &[&str]) -> Moves {
    Moves {
        evict: names.iter().map(ToString::to_string).collect(),
        ..Moves::default()
    }
}

fn restore(names: &[&str]) -> Moves {
    Moves {
        restore: names.iter().map(ToString::to_string).collect(),
        ..Moves::default()
    }
}

fn state(operator: &mut Client, at: usize) -> ResidenceState {
    let job = &operator.list().expect("list")[at];
    job.residence.as_ref().expect("evictable").state
}

#[test]
fn an_operator_sends_a_job_away_and_calls_it_back() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let job = operator.register(evictable("a")).expect("registered");
    let client = attach(&job);
    let memory = FakeMemory::new(8 * UNIT);
    let _agent = Agent::start(&client, &memory, 3 * UNIT);
    let gate = client.arbiter;
    let worker = Worker::start(client);
    until("it runs", || (worker.launches() > 50).then_some(()));

    let moved = operator.move_jobs(&evict(&["a"])).expect("moved");
    assert!(moved.is_done() && moved.simulated, "{moved:?}");
    let reported = &moved.jobs[0];
    assert_eq!((reported.job.as_str(), reported.evicted), ("a", true));
    assert_eq!(reported.copied_bytes, 3 * UNIT);
    assert!(
        reported.moving_ns > 0 && reported.elapsed_ns >= reported.moving_ns,
        "{reported:?}"
    );
    assert_eq!(memory.free_bytes(), 8 * UNIT);
    assert!(!gate.is_open(0));
    let stood = worker.launches();
    let job = &operator.list().expect("list")[0];
    let residence = job.residence.clone().expect("evictable");
    assert!(job.evicted);
    assert_eq!(residence.state, ResidenceState::Evicted);
    assert_eq!((residence.resident_bytes, residence.evictions), (0, 1));
    assert!(residence.reason.contains("sublet restore"), "{residence:?}");
    // Asked again there is nothing to do.
    assert!(operator.move_jobs(&evict(&["a"])).expect("moved").is_done());
    assert!(worker.launches() <= stood + 1);

    let moved = operator.move_jobs(&restore(&["a"])).expect("moved");
    assert!(moved.is_done(), "{moved:?}");
    assert_eq!(moved.jobs[0].copied_bytes, 3 * UNIT);
    assert_eq!(memory.free_bytes(), 5 * UNIT);
    until("it goes on", || {
        (worker.launches() > stood + 50).then_some(())
    });
    assert_eq!(state(&mut operator, 0), ResidenceState::Resident);
    let events = operator.events(0, 0).expect("events");
    let reported = events.iter().filter(|event| event.kind == "evicted");
    assert_eq!(reported.count(), 2);
}

#[test]
fn what_cannot_be_moved_is_refused_with_the_reason() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let fixed = JobSpec {
        name: "fixed".into(),
        simulated: true,
        ..JobSpec::default()
    };
    operator.register(fixed).expect("registered");
    let job = operator.register(evictable("a")).expect("registered");
    for (moves, code, words) in [
        (
            evict(&["fixed"]),
            ErrorCode::Refused,
            ["`fixed`", "--evictable"],
        ),
        (
            evict(&["zebra"]),
            ErrorCode::NoSuchJob,
            ["`zebra`", "running: "],
        ),
        (evict(&["a", "a"]), ErrorCode::Invalid, ["`a`", "twice"]),
        (evict(&[]), ErrorCode::Invalid, ["no job", "name"]),
    ] {
        let error = refusal(operator.move_jobs(&moves));
        assert_eq!(error.code, code);
        for word in words {
            assert!(error.to_string().contains(word), "{error}");
        }
    }
    for (spec, words) in [
        (
            JobSpec {
                settings: JobSettings {
                    evictable: Some(false),
                    overflow: Some(Overflow::Host),
                    ..evictable("b").settings
                },
                ..evictable("b")
            },
            ["overflow", "--evictable"],
        ),
        (
            JobSpec {
                settings: JobSettings {
                    host_memory: Some(MemLimit::Bytes(1 << 50)),
                    ..evictable("b").settings
                },
                ..evictable("b")
            },
            ["1024TiB", "[residency]"],
        ),
    ] {
        let error = refusal(operator.register(spec));
        for word in words {
            assert!(error.to_string().contains(word), "{error}");
        }
    }

    let client = attach(&job);
    let memory = FakeMemory::new(8 * UNIT);
    let agent = Agent::start(&client, &memory, UNIT);
    let worker = Worker::start(client);
    *agent.refuses.lock() = Reason::Capturing;
    let moved = operator.move_jobs(&evict(&["a"])).expect("answered");
    assert_eq!(moved.jobs[0].outcome, MoveOutcome::Refused);
    assert!(moved.jobs[0].reason.contains("captured"), "{moved:?}");
    let before = worker.launches();
    until("it goes on", || {
        (worker.launches() > before + 50).then_some(())
    });
    assert!(!operator.list().expect("list")[1].evicted);
    *agent.refuses.lock() = Reason::None;
    assert!(operator.move_jobs(&evict(&["a"])).expect("moved").is_done());

    // Host memory is asked before anything moves.
    assert!(
        operator
            .move_jobs(&restore(&["a"]))
            .expect("moved")
            .is_done()
    );
    let change = Change {
        settings: JobSettings {
            host_memory: Some(MemLimit::Bytes(UNIT / 4)),
            ..JobSettings::default()
        },
        ..Change::default()
    };
    operator.set("a", change).expect("changed");
    let moved = operator.move_jobs(&evict(&["a"])).expect("answered");
    assert_eq!(moved.jobs[0].outcome, MoveOutcome::Refused);
    let reason = &moved.jobs[0].reason;
    assert!(
        reason.contains("128MiB") && reason.contains("32MiB"),
        "{reason}"
    );
    assert_eq!(memory.free_bytes(), 7 * UNIT);
    let events = operator.events(0, 0).expect("events");
    assert!(events.iter().any(|event| event.kind == "not_evicted"));
}

#[test]
fn one_is_evicted_while_another_comes() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let [a, b] = ["a", "b"].map(|name| operator.register(evictable(name)).expect("registered"));
    let memory = FakeMemory::new(8 * UNIT);
    let b = attach(&b);
    let _b = Agent::start(&b, &memory, 6 * UNIT);
    let b = Worker::start(b);
    assert!(operator.move_jobs(&evict(&["b"])).expect("moved").is_done());
    let a = attach(&a);
    let _a = Agent::start(&a, &memory, 6 * UNIT);
    let a = Worker::start(a);
    until("the first one runs", || (a.launches() > 50).then_some(()));
    let moves = Moves {
        evict: vec!["a".into()],
        restore: vec!["b".into()],
        deadline_ms: 0,
        ..Moves::default()
    };
    let moved = operator.move_jobs(&moves).expect("moved");
    assert!(moved.is_done(), "{moved:?}");
    // The one comes while the other goes: together they take less than one after the other.
    let serial: u64 = moved.jobs.iter().map(|job| job.moving_ns).sum();
    assert!(moved.elapsed_ns < serial, "{moved:?}");
    let before = (a.launches(), b.launches());
    until("the second one runs", || {
        (b.launches() > before.1 + 50).then_some(())
    });
    assert!(a.launches() <= before.0 + 1);
    assert_eq!(memory.free_bytes(), 2 * UNIT);
}

#[test]
fn one_whose_space_is_not_given_returns_and_says_so() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let [a, b] = ["a", "b"].map(|name| operator.register(evictable(name)).expect("registered"));
    let memory = FakeMemory::new(8 * UNIT);
    let b = attach(&b);
    let _b = Agent::start(&b, &memory, 6 * UNIT);
    assert!(operator.move_jobs(&evict(&["b"])).expect("moved").is_done());
    let a = attach(&a);
    let agent = Agent::start(&a, &memory, 6 * UNIT);
    *agent.refuses.lock() = Reason::Driver;
    let a = Worker::start(a);
    let moves = Moves {
        evict: vec!["a".into()],
        restore: vec!["b".into()],
        deadline_ms: 0,
        ..Moves::default()
    };
    let moved = operator.move_jobs(&moves).expect("answered");
    assert!(moved.jobs[0].reason.contains("driver"), "{moved:?}");
    assert_eq!(moved.jobs[1].outcome, MoveOutcome::Refused);
    assert!(moved.jobs[1].reason.contains("cannot leave"), "{moved:?}");
    until("nothing of the second one is left", || {
        (memory.free_bytes() == 2 * UNIT).then_some(())
    });
    let before = a.launches();
    until("the first one goes on", || {
        (a.launches() > before + 50).then_some(())
    });
}

#[test]
fn two_that_do_not_fit_take_turns_and_never_hold_more_than_there_is() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let memory = FakeMemory::new(8 * UNIT);
    let mut all = Vec::new();
    for name in ["a", "b"] {
        let job = operator.register(evictable(name)).expect("registered");
        let client = attach(&job);
        if let Some((_, _)) = all.first() {
            // The second one finds no space for what it allocates, and waits for it as an
            // allocation does.
            let want = client.client.want(0).expect("device");
            want.begin_waiting_for_space(5 * UNIT);
            client.ring();
            until("the first one has left", || {
                (memory.free_bytes() >= 5 * UNIT).then_some(())
            });
            want.end_waiting_for_space(5 * UNIT);
        }
        let agent = Agent::start(&client, &memory, 5 * UNIT);
        all.push((agent, Worker::start(client)));
    }
    let mut before = [0, 0];
    for _ in 0..3 {
        for at in [0, 1] {
            until("each of them has its term", || {
                (all[at].1.launches() > before[at] + 50).then_some(())
            });
            before[at] = all[at].1.launches();
        }
    }
    until("they have taken turns", || {
        let status = operator.status().expect("status");
        (status.devices[0].pressure.switches >= 4).then_some(())
    });
    let status = operator.status().expect("status");
    let pressure = &status.devices[0].pressure;
    assert!(pressure.out_bytes_per_s > 0 && pressure.in_bytes_per_s > 0);
    assert!(status.host_memory_used_bytes >= 5 * UNIT);
    assert!(status.host_memory_used_bytes <= status.host_memory_limit_bytes);
    let evictions: Vec<u64> = status
        .jobs
        .iter()
        .map(|job| job.residence.as_ref().expect("evictable").evictions)
        .collect();
    assert!(
        evictions.iter().all(|evictions| *evictions > 0),
        "{evictions:?}"
    );
}

fn wake(names: &[&str]) -> Moves {
    Moves {
        wake: names.iter().map(ToString::to_string).collect(),
        ..Moves::default()
    }
}

#[test]
fn an_idle_job_leaves_by_itself_and_returns_when_it_is_woken_or_runs() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let mut spec = evictable("a");
    spec.settings.evict_after = Some(control::Span::from_micros(500_000));
    let job = operator.register(spec).expect("registered");
    let client = attach(&job);
    let memory = FakeMemory::new(8 * UNIT);
    let _agent = Agent::start(&client, &memory, 3 * UNIT);
    until("it has left", || {
        (memory.free_bytes() == 8 * UNIT && state(&mut operator, 0) == ResidenceState::Evicted)
            .then_some(())
    });
    let job = &operator.list().expect("list")[0];
    let reason = &job.residence.as_ref().expect("evictable").reason;
    assert!(reason.contains("500ms"), "{reason}");
    assert_eq!(job.evict_after_ns, Some(500_000_000));
    assert!(!job.evicted, "by hand it was not");

    // A name that nobody has, twice the same, one that stays: each for itself.
    let fixed = JobSpec {
        name: "fixed".into(),
        simulated: true,
        ..JobSpec::default()
    };
    operator.register(fixed).expect("registered");
    let moved = operator.move_jobs(&wake(&["zebra", "a", "fixed", "a"]));
    let moved = moved.expect("answered").jobs;
    let outcomes: Vec<MoveOutcome> = moved.iter().map(|job| job.outcome).collect();
    use MoveOutcome::{Done, Failed, Waiting};
    assert_eq!(outcomes, [Failed, Waiting, Done, Waiting], "{moved:?}");
    assert!(moved[0].reason.contains("`zebra`"), "{moved:?}");
    until("it is back", || {
        let moved = operator.move_jobs(&wake(&["a"])).expect("answered");
        (moved.is_done() && memory.free_bytes() == 5 * UNIT).then_some(())
    });
    until("it has left again", || {
        (memory.free_bytes() == 8 * UNIT).then_some(())
    });
    let worker = Worker::start(client);
    until("it runs", || (worker.launches() > 50).then_some(()));
    assert_eq!(memory.free_bytes(), 5 * UNIT);

    // By hand it is away until it is restored by hand.
    assert!(operator.move_jobs(&evict(&["a"])).expect("moved").is_done());
    let moved = operator.move_jobs(&wake(&["a"])).expect("answered").jobs;
    assert_eq!(moved[0].outcome, MoveOutcome::Refused);
    assert!(moved[0].reason.contains("sublet restore"), "{moved:?}");
    assert_eq!(memory.free_bytes(), 8 * UNIT);
    let events = operator.events(0, 0).expect("events");
    let by_hand = events.iter().filter(|event| event.kind == "evicted");
    assert_eq!(by_hand.count(), 1);
    assert!(events.iter().all(|event| event.kind != "restored_bytes"));

    let both = Moves {
        evict: vec!["a".into()],
        ..wake(&["a"])
    };
    let many = vec!["a"; 257];
    for (moves, word) in [(both, "`wake`"), (wake(&many), "256")] {
        let error = refusal(operator.move_jobs(&moves));
        assert_eq!(error.code, ErrorCode::Invalid);
        assert!(error.to_string().contains(word), "{error}");
    }
    let fixed = JobSpec {
        settings: JobSettings {
            evict_after: Some(control::Span::from_micros(500_000)),
            ..JobSettings::default()
        },
        name: "other".into(),
        simulated: true,
        ..JobSpec::default()
    };
    let error = refusal(operator.register(fixed));
    assert!(error.to_string().contains("--evictable"), "{error}");
}

#[test]
fn a_job_that_dies_in_a_move_costs_the_others_no_turns() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let [a, b] = ["a", "b"].map(|name| operator.register(evictable(name)).expect("registered"));
    let memory = FakeMemory::new(8 * UNIT);
    let a = attach(&a);
    let agent = Agent::start(&a, &memory, 6 * UNIT);
    assert!(operator.move_jobs(&evict(&["a"])).expect("moved").is_done());
    let b = attach(&b);
    let _b = Agent::start(&b, &memory, 6 * UNIT);
    let b = Worker::start(b);
    // It never answers: its agent is gone. The request ends at its deadline, and says so.
    drop(agent);
    let moves = Moves {
        evict: Vec::new(),
        restore: vec!["a".into()],
        deadline_ms: 300,
        ..Moves::default()
    };
    let moved = operator.move_jobs(&moves).expect("answered");
    let outcome = moved.jobs[0].outcome;
    assert!(
        matches!(outcome, MoveOutcome::Waiting | MoveOutcome::TimedOut),
        "{moved:?}"
    );
    let before = b.launches();
    until("the other one runs", || {
        (b.launches() > before + 100).then_some(())
    });
}

#[test]
fn a_job_that_claims_what_it_cannot_have_keeps_nobody_from_leaving_and_coming_back() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let evil = operator.register(evictable("evil")).expect("registered");
    let evil = attach(&evil);
    let account = channel::Account::new(evil.tenant, evil.arbiter.tenant_slot()).expect("slot");
    account.reserve(0, UNIT, NO_LIMIT).expect("no limit");
    let good = operator.register(evictable("good")).expect("registered");
    let good = attach(&good);
    let memory = FakeMemory::new(8 * UNIT);
    let _agent = Agent::start(&good, &memory, 3 * UNIT);
    let worker = Worker::start(good);
    for bytes in [1 << 63, u64::MAX, 1 << 40] {
        let claimed = Footprint {
            evictable_bytes: bytes,
            resident_bytes: bytes,
            host_bytes: bytes,
            moved_out_bytes: bytes,
            moved_in_bytes: bytes,
        };
        let want = evil.client.want(0).expect("device");
        want.set_footprint(&claimed);
        want.begin_waiting_for_space(bytes);
        until("it is seen", || {
            let job = &operator.list().expect("list")[0];
            let residence = job.residence.as_ref()?;
            (residence.evictable_bytes > 0).then_some(())
        });
        for moves in [evict(&["good"]), restore(&["good"])] {
            let moved = operator.move_jobs(&moves).expect("moved");
            assert!(moved.is_done(), "{moved:?}");
        }
        let reported = operator.list().expect("list")[0].residence.clone();
        let reported = reported.expect("evictable");
        let most = UNIT;
        for bytes in [
            reported.evictable_bytes,
            reported.resident_bytes,
            reported.host_bytes,
        ] {
            assert!(bytes <= most, "{reported:?}");
        }
        want.end_waiting_for_space(bytes);
    }
    let before = worker.launches();
    until("the other one runs", || {
        (worker.launches() > before + 50).then_some(())
    });
}

#[test]
fn a_quota_below_use_moves_the_rest_to_the_host_and_a_higher_one_brings_it_back() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let job = operator
        .register(JobSpec {
            settings: JobSettings {
                overflow: Some(Overflow::Host),
                mem: Some(MemLimit::Bytes(4 * UNIT)),
                ..evictable("a").settings
            },
            ..evictable("a")
        })
        .expect("registered");
    let client = attach(&job);
    let memory = FakeMemory::new(8 * UNIT);
    let _agent = Agent::start(&client, &memory, 4 * UNIT);
    let worker = Worker::start(client);
    let limit = |bytes| Change {
        settings: JobSettings {
            mem: Some(MemLimit::Bytes(bytes)),
            ..JobSettings::default()
        },
        ..Change::default()
    };
    let tight = Change {
        settings: JobSettings {
            host_memory: Some(MemLimit::Bytes(UNIT / 2)),
            ..JobSettings::default()
        },
        ..Change::default()
    };
    operator.set("a", tight).expect("changed");
    until("its charge was seen", || {
        let job = &operator.list().expect("list")[0];
        (job.residence.as_ref()?.resident_bytes == 4 * UNIT).then_some(())
    });
    let error = refusal(operator.set("a", limit(3 * UNIT)));
    for word in ["512MiB", "128MiB", "64MiB", "--host-memory"] {
        assert!(error.to_string().contains(word), "{error}");
    }
    assert_eq!(memory.free_bytes(), 4 * UNIT, "nothing has moved");
    let wide = Change {
        settings: JobSettings {
            host_memory: Some(MemLimit::Bytes(2 * UNIT)),
            ..JobSettings::default()
        },
        ..Change::default()
    };
    operator.set("a", wide).expect("changed");
    operator.set("a", limit(3 * UNIT)).expect("changed");
    until("a quarter is in host memory", || {
        (memory.free_bytes() == 5 * UNIT).then_some(())
    });
    until("it is reported", || {
        (state(&mut operator, 0) == ResidenceState::Partly).then_some(())
    });
    let before = worker.launches();
    until("it goes on", || {
        (worker.launches() > before + 50).then_some(())
    });
    operator.set("a", limit(4 * UNIT)).expect("changed");
    until("it is back", || {
        (memory.free_bytes() == 4 * UNIT && state(&mut operator, 0) == ResidenceState::Resident)
            .then_some(())
    });
    let before = worker.launches();
    until("it goes on", || {
        (worker.launches() > before + 50).then_some(())
    });
}

testbed::starts_clean!();
