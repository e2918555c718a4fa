//! The daemon over its real sockets, with clients made of the channel's client end.

mod api;
mod attacks;
mod bench;
mod strangers;

use std::process::Child;
use std::time::Duration;

use arbiter::{Arbiter, Error, Options};
use bench::{Daemon, Worker, attach, child, introduction, named, refusal, role_of_ours, until};
use channel::client::{AttachError, ClientEnd, Liveness};
use channel::wire::Outcome;
use channel::{Account, Bypass, Event, NO_LIMIT};
use control::{Change, Class, ErrorCode, JobSettings, JobSpec, JobState, MemLimit, SoloSource};
use testbed::within;

const GIB: u64 = 1 << 30;

#[test]
fn a_lone_job_finds_its_gate_open_its_limit_set_and_itself_listed() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let job = operator
        .register(JobSpec {
            settings: JobSettings {
                mem: Some(MemLimit::Percent(25.0)),
                ..named("", 0.5).settings
            },
            command: vec!["python".into(), "train.py".into()],
            ..named("", 0.5)
        })
        .expect("registered");
    assert_eq!((job.job.as_str(), job.share), ("train", 0.5));
    assert_eq!(operator.list().expect("list")[0].state, JobState::Starting);

    let client = attach(&job);
    assert_eq!(client.device_map[0], Some(0));
    let gate = client.arbiter.device(0).expect("device");
    gate.look().expect("open, without having asked");
    assert_eq!(gate.limit_bytes(), 2 * GIB);
    assert_eq!(gate.physical_total_bytes(), 8 * GIB);
    assert!(client.arbiter.heartbeat_mono_ns() > 0);
    let account = Account::new(client.tenant, client.arbiter.tenant_slot()).expect("slot");
    account.reserve(0, GIB, gate.limit_bytes()).expect("fits");
    client.client.thread(0).count_launch();

    let status = operator.status().expect("status");
    assert_eq!(status.devices.len(), 1);
    assert_eq!(status.devices[0].share_promised, 0.5);
    assert_eq!(status.devices[0].holder.as_deref(), Some("train"));
    let job = &status.jobs[0];
    assert_eq!(
        (job.mem_used_bytes, job.mem_limit_bytes),
        (GIB, Some(2 * GIB))
    );
    assert_eq!((job.launches, job.grants, job.processes.len()), (1, 1, 1));

    let change = Change {
        settings: JobSettings {
            mem: Some(MemLimit::Bytes(512 << 20)),
            ..JobSettings::default()
        },
        ..Change::default()
    };
    operator.set("train", change).expect("changed");
    assert_eq!(gate.limit_bytes(), 512 << 20);
    let over = account
        .reserve(0, 1, gate.limit_bytes())
        .expect_err("above");
    client.client.write_record(
        0,
        Event::OverLimit {
            limit_bytes: over.limit_bytes,
            used_bytes: over.used_bytes,
            requested_bytes: over.requested_bytes,
            charged_bytes: 2 << 20,
        },
    );
    client.client.write_record(
        0,
        Event::Bypassing {
            reason: Bypass::NoMarks,
        },
    );
    until("both events are in the journal", || {
        let events = daemon.operator().events(0, 0).expect("events");
        let oom = events.iter().find(|event| event.kind == "oom")?;
        assert_eq!(oom.job, "train");
        assert_eq!(oom.fields["limit_bytes"], 512 << 20);
        assert_eq!(oom.fields["used_bytes"], GIB);
        assert_eq!(oom.fields["requested_bytes"], 1);
        assert_eq!(oom.fields["charged_bytes"], 2 << 20);
        assert!(
            oom.message.contains("(2MiB on the device)"),
            "{}",
            oom.message
        );
        events
            .iter()
            .find(|event| event.kind == "bypass")
            .map(|_| ())
    });
    assert_eq!(operator.list().expect("list")[0].oom_count, 1);
    until("the file has it as well", || {
        let journal = std::fs::read_to_string(daemon.dir.journal_file()).expect("journal");
        let mut lines = journal.lines();
        lines
            .any(|line| line.contains("\"kind\":\"oom\""))
            .then_some(())
    });
}

#[test]
fn a_job_may_have_many_more_than_64_processes_and_readers_count_for_none() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let job = operator.register(named("many", 0.5)).expect("registered");
    let reader = || {
        ClientEnd::attach_reader(&job.channel_socket, &introduction(&job), bench::PATIENCE)
            .expect("attached")
    };
    let readers: Vec<ClientEnd> = (0..20).map(|_| reader()).collect();
    assert!(
        readers
            .iter()
            .all(|one| one.arbiter.tenant_slot() == channel::NO_SLOT)
    );
    let clients: Vec<ClientEnd> = (0..80).map(|_| attach(&job)).collect();
    for (at, client) in (0..).zip(&clients) {
        assert_eq!(client.arbiter.tenant_slot(), at);
        let account = Account::new(client.tenant, at).expect("slot");
        account.reserve(0, 1 << 20, NO_LIMIT).expect("no limit");
    }
    // Every reader sees what all of them hold.
    let reader = reader();
    assert_eq!(reader.tenant.used_bytes(0), 80 << 20);
    assert_eq!(operator.list().expect("list")[0].mem_used_bytes, 80 << 20);
}

#[test]
fn a_refused_process_finds_the_reason_in_the_journal() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let mut job = operator.register(named("gone", 0.5)).expect("registered");
    job.token = "0".repeat(32);
    let refused = ClientEnd::attach(&job.channel_socket, &introduction(&job), bench::PATIENCE);
    let refused = refused.expect_err("nobody has this token");
    assert!(
        matches!(refused, AttachError::Refused(Outcome::UnknownToken, _)),
        "{refused:?}"
    );
    let events = operator.events(0, 0).expect("events");
    let reported = events.iter().find(|event| event.kind == "refused");
    let reported = reported.expect("reported before the process hears of it");
    assert_eq!(reported.fields["outcome"], "unknown_token");
    assert_eq!(reported.fields["pid"], std::process::id());
}

#[test]
fn two_busy_jobs_get_their_shares() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let jobs = [("large", 0.75), ("small", 0.25)]
        .map(|(name, share)| operator.register(named(name, share)).expect("registered"));
    let _workers = jobs.each_ref().map(|job| Worker::start(attach(job)));
    let shares = until(
        "they have wanted the device at once for two seconds",
        || {
            let jobs = operator.list().expect("list");
            let long = jobs.iter().all(|job| job.contended_ns > 2_000_000_000);
            long.then(|| [0, 1].map(|at: usize| jobs[at].share_got_contended.expect("contended")))
        },
    );
    // Of what either got: a host that has no core for the workers leaves the device to nobody.
    let sum = shares[0] + shares[1];
    let large = shares[0] / sum;
    assert!(sum > 0.5, "{shares:?}");
    assert!((large - 0.75).abs() < 0.03, "{shares:?}");
    let jobs = operator.list().expect("list");
    assert!(
        jobs.iter()
            .all(|job| job.grants > 50 && job.wait_time_ns > 0),
        "{jobs:?}"
    );

    let change = Change {
        settings: JobSettings {
            share: Some(0.25),
            ..JobSettings::default()
        },
        ..Change::default()
    };
    operator.set("large", change).expect("lowered");
    let change = Change {
        settings: JobSettings {
            share: Some(0.75),
            ..JobSettings::default()
        },
        ..Change::default()
    };
    operator.set("small", change).expect("raised");
    until("the new shares hold", || {
        let recent = operator.list().expect("list")[1].share_got_recent;
        ((recent - 0.75).abs() < 0.05).then_some(())
    });
}

#[test]
fn an_idle_job_costs_a_busy_one_nothing_and_an_opportunistic_one_gets_the_rest() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let first = operator.register(named("first", 1.0)).expect("registered");
    let rest = JobSpec {
        settings: JobSettings {
            class: Some(Class::Opportunistic),
            share: None,
            ..named("rest", 1.0).settings
        },
        ..named("rest", 1.0)
    };
    let rest = operator.register(rest).expect("registered");
    let idle = attach(&first);
    idle.arbiter
        .device(0)
        .expect("device")
        .look()
        .expect("open");
    let worker = Worker::start(attach(&rest));
    until("the opportunistic job runs", || {
        (worker.launches() > 100).then_some(())
    });
    // Nothing is ever demanded of the idle one, but when it wants the device it has it.
    let busy = Worker::start(idle);
    until("the guaranteed job runs", || {
        (busy.launches() > 1000).then_some(())
    });
    let shares = until("they have met for a second", || {
        let jobs = operator.list().expect("list");
        let met = jobs.iter().all(|job| job.contended_ns > 1_000_000_000);
        met.then(|| [0, 1].map(|at: usize| jobs[at].share_got_contended.expect("contended")))
    });
    // Of what either got, as above.
    let sum = shares[0] + shares[1];
    assert!(shares[0] > 0.9 * sum && sum > 0.5, "{shares:?}");
}

#[test]
fn the_device_and_memory_of_a_killed_holder_pass_to_the_others() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let holder = operator.register(named("holder", 0.5)).expect("registered");
    let other = operator.register(named("other", 0.5)).expect("registered");
    let mut child = child("hold", &holder.channel_socket, &holder.token);
    let held = until("the child holds memory and the device", || {
        let job = &daemon.operator().list().expect("list")[0];
        (job.holding && job.mem_used_bytes > 0 && job.state == JobState::Running)
            .then_some(job.mem_used_bytes)
    });
    assert_eq!(held, GIB);
    // The child stays inside a blocking call for ever; only the end of its slice makes it give way.
    // So it is killed while it holds: the gate of the other is closed as long as nobody asks.
    let client = attach(&other);
    let gate = client.arbiter.device(0).expect("device");
    gate.look().expect_err("the child holds the device");
    child.kill().expect("killed");
    within::wait(&mut child, "a killed child", testbed::PATIENCE);
    until("its memory is free", || {
        let jobs = daemon.operator().list().expect("list");
        (jobs[0].mem_used_bytes == 0).then_some(())
    });
    let want = client.client.want(0).expect("device");
    want.begin_waiting();
    client.ring();
    until("the gate opens", || gate.look().ok());
    want.end_waiting();
    let events = daemon.operator().events(0, 0).expect("events");
    let gone = events
        .iter()
        .find(|event| event.kind == "detached")
        .expect("reported");
    assert_eq!(gone.fields["held_bytes"], GIB);
}

#[test]
fn a_killed_arbiter_is_followed_by_one_that_knows_its_jobs() {
    let dir = bench::directory();
    let mut first = arbiter_child(&dir);
    let mut operator = until("the first arbiter listens", || bench::operator(&dir.1).ok());
    let job = operator.register(named("steady", 0.5)).expect("registered");
    let client = attach(&job);
    let epoch = client.arbiter.epoch();
    let account = Account::new(client.tenant, client.arbiter.tenant_slot()).expect("slot");
    account.reserve(0, GIB, NO_LIMIT).expect("no limit");
    let stream = client.client.claim_stream(0).expect("slot").1;
    stream.issue();
    first.kill().expect("killed");
    within::wait(&mut first, "a killed child", testbed::PATIENCE);
    assert_eq!(client.arbiter_liveness(), Liveness::Gone);

    let mut second = arbiter_child(&dir);
    let mut operator = until("the second arbiter listens", || {
        bench::operator(&dir.1).ok()
    });
    let jobs = operator.list().expect("list");
    assert_eq!(jobs[0].name, "steady");
    assert_eq!(jobs[0].share_asked, Some(0.5));
    let gap = Duration::from_millis(5);
    let token = introduction(&job);
    let again = ClientEnd::reattach(&job.channel_socket, &token, &client, gap, bench::PATIENCE)
        .expect("re-attached");
    assert!(again.arbiter.epoch() > epoch);
    assert!(
        std::ptr::eq(again.client, client.client),
        "the pages are the same"
    );
    let job = &operator.list().expect("list")[0];
    assert_eq!(
        job.mem_used_bytes, GIB,
        "the ledger is rebuilt from the pages"
    );
    account.release(0, GIB);
    assert_eq!(operator.list().expect("list")[0].mem_used_bytes, 0);
    let events = operator.events(0, 0).expect("events");
    let back = events
        .iter()
        .find(|event| event.kind == "reattached")
        .expect("reported");
    assert_eq!(back.fields["gap_ns"], 5_000_000);
    operator.shutdown().expect("asked to end");
    assert!(within::wait(&mut second, "the arbiter", testbed::PATIENCE).success());
    assert!(!dir.1.api_socket().exists() && !dir.1.channel_socket().exists());
    again
        .arbiter
        .device(0)
        .expect("device")
        .look()
        .expect("left open");
}

#[test]
fn what_cannot_be_is_refused_with_the_value_and_the_remedy() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let job = operator.register(named("a", 0.75)).expect("registered");
    let twice = refusal(operator.register(named("a", 0.1)));
    assert_eq!(twice.code, ErrorCode::Refused);
    assert!(
        twice.message.contains("`a`") && twice.hint.contains("--name"),
        "{twice}"
    );
    let sum = refusal(operator.register(named("b", 0.5)));
    assert!(
        sum.message.contains("1.25") && sum.hint.contains("0.25"),
        "{sum}"
    );
    let zero = refusal(operator.register(named("b", 0.0)));
    assert_eq!(zero.code, ErrorCode::Invalid);
    let name = refusal(operator.register(named("no name", 0.1)));
    assert_eq!(name.code, ErrorCode::Invalid);
    let other = JobSpec {
        pid: 1,
        ..named("b", 0.1)
    };
    assert_eq!(
        refusal(operator.register(other)).code,
        ErrorCode::Permission
    );
    let nobody = refusal(operator.set("zebra", Change::default()));
    assert_eq!(nobody.code, ErrorCode::NoSuchJob);
    assert!(nobody.hint.contains("running: a"), "{nobody}");

    let _client = attach(&job);
    let large = JobSpec {
        settings: JobSettings {
            mem: Some(MemLimit::Bytes(9 * GIB)),
            ..named("b", 0.1).settings
        },
        ..named("b", 0.1)
    };
    let large = refusal(operator.register(large));
    assert!(
        large.message.contains("9GiB") && large.message.contains("8GiB"),
        "{large}"
    );
    let nowhere = JobSpec {
        settings: JobSettings {
            device: Some(vec!["3".parse().expect("index")]),
            ..named("b", 0.1).settings
        },
        ..named("b", 0.1)
    };
    assert_eq!(
        refusal(operator.register(nowhere)).code,
        ErrorCode::NoSuchDevice
    );
    assert_eq!(
        operator.list().expect("list").len(),
        1,
        "nothing was left behind"
    );

    let mut stranger = introduction(&job);
    stranger.token = [b'0'; channel::wire::TOKEN_BYTES];
    let refused = ClientEnd::attach(&job.channel_socket, &stranger, bench::PATIENCE);
    assert!(
        matches!(refused, Err(AttachError::Refused(Outcome::UnknownToken, _))),
        "{refused:?}"
    );
}

#[test]
fn a_directory_has_one_arbiter_and_an_idle_one_ends() {
    let dir = bench::directory();
    let options = || Options {
        host_nvml: false,
        idle_exit: Some(Duration::from_millis(50)),
        ..Options::embedded(dir.1.clone())
    };
    let first = Arbiter::start(options()).expect("started");
    match Arbiter::start(options()) {
        Err(Error::AlreadyRunning { pid, .. }) => assert_eq!(pid, Some(std::process::id())),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("two arbiters in one directory"),
    }
    first.serve().expect("it ends by itself");
    assert!(!dir.1.api_socket().exists());
    // Another test's child holds the lock's file from its fork to its exec.
    until("the directory is free again", || {
        Arbiter::start(options()).ok()
    });
}

#[test]
fn a_terminated_arbiter_opens_every_gate_and_removes_its_sockets() {
    let dir = bench::directory();
    let mut daemon = arbiter_child(&dir);
    let mut operator = until("it listens", || bench::operator(&dir.1).ok());
    let jobs = ["a", "b"].map(|name| operator.register(named(name, 0.5)).expect("registered"));
    let clients = jobs.each_ref().map(attach);
    let gate = |at: usize| clients[at].arbiter.device(0).expect("device");
    gate(0).look().expect("the first one holds the device");
    gate(1).look().expect_err("the second one does not");
    let pid = nix::unistd::Pid::from_raw(i32::try_from(daemon.id()).expect("pid"));
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).expect("sent");
    assert!(within::wait(&mut daemon, "the arbiter", testbed::PATIENCE).success());
    gate(0).look().expect("open");
    gate(1).look().expect("open");
    assert!(!dir.1.api_socket().exists() && !dir.1.channel_socket().exists());
    let state = std::fs::read_to_string(dir.1.state_file()).expect("kept for a successor");
    assert!(state.contains(&jobs[0].token), "{state}");
}

#[test]
fn a_job_outlives_neither_its_processes_nor_its_name() {
    let daemon = Daemon::start();
    let mut child = child("register", &daemon.dir.api_socket(), "brief");
    until("it is listed", || {
        let jobs = daemon.operator().list().expect("list");
        jobs.iter().any(|job| job.name == "brief").then_some(())
    });
    let taken = refusal(daemon.operator().register(named("brief", 0.5)));
    assert!(taken.message.contains("brief"), "{taken}");
    child.kill().expect("killed");
    within::wait(&mut child, "a killed child", testbed::PATIENCE);
    until("it is gone", || {
        let jobs = daemon.operator().list().expect("list");
        jobs.iter()
            .all(|job| job.state == JobState::Gone)
            .then_some(())
    });
    daemon
        .operator()
        .register(named("brief", 1.0))
        .expect("name and share are free again");
}

// --- strangers ---

#[test]
fn the_solo_duration_of_an_iteration_is_known_to_the_next_arbiter() {
    let (_place, dir) = bench::directory();
    let profile = |operator: &mut control::Client, name: &str| {
        let jobs = operator.list().expect("list");
        let job = jobs.into_iter().find(|job| job.name == name);
        job.and_then(|job| job.profile).unwrap_or_default()
    };
    /// Four submissions and a boundary.
    fn iterate(client: &ClientEnd) {
        (0..4).for_each(|_| client.client.thread(0).count_launch());
        client.client.thread(0).all_marked();
        let page = client.signatures.expect("asked for");
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let mono_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        page.steps().note(client.client.launches(), mono_ns, 0);
        std::thread::sleep(Duration::from_millis(2));
    }
    let (reported, job, learnt_ns) = {
        let first = Daemon::start_in(dir.clone());
        let mut operator = first.operator();
        let reported = operator
            .register(named("learner", 0.1))
            .expect("registered");
        let change = Change {
            solo_iteration_us: Some(7000),
            ..Change::default()
        };
        operator.set("learner", change).expect("set");
        let job = operator.register(named("learnt", 0.5)).expect("registered");
        let client = attach(&job);
        let learnt_ns = until("it is learnt", || {
            iterate(&client);
            let profile = profile(&mut operator, "learnt");
            let learnt = profile.solo_source == SoloSource::Learnt;
            profile.solo_iteration_ns.filter(|_| learnt)
        });
        (reported, job, learnt_ns)
    };
    // By the file: what is learnt goes on being refined until the end.
    let state = std::fs::read(dir.state_file()).expect("kept for a successor");
    let state: serde_json::Value = serde_json::from_slice(&state).expect("JSON");
    let baselines = state["baselines"].as_array().expect("a list");
    let kept = baselines.iter().find(|kept| kept["name"] == "learnt");
    let kept_ns = kept.expect("kept")["iteration_ns"]
        .as_f64()
        .expect("a number");
    assert!(
        kept_ns > 2e6 && learnt_ns > 2_000_000,
        "{kept_ns} {learnt_ns}"
    );

    let second = Daemon::start_in(dir);
    let mut operator = second.operator();
    let rival = operator.register(named("rival", 0.4)).expect("registered");
    let client = attach(&job);
    // Never alone, so that nothing is learnt anew.
    client.client.want(0).expect("device").begin_blocking();
    let _rival = Worker::start(attach(&rival));
    let recorded = until("it is known again", || {
        iterate(&client);
        let profile = profile(&mut operator, "learnt");
        let known = profile.solo_source == SoloSource::Recorded;
        profile.solo_iteration_ns.filter(|_| known)
    });
    // CAST: below 2^53 nanoseconds.
    assert!(
        (recorded as f64 - kept_ns).abs() < 2.0,
        "{recorded} {kept_ns}"
    );
    let client = attach(&reported);
    until("what an operator has set is known as well", || {
        iterate(&client);
        let profile = profile(&mut operator, "learner");
        let set = (profile.solo_source, profile.solo_iteration_ns);
        (set == (SoloSource::Set, Some(7_000_000))).then_some(())
    });
}

// --- processes of our own ---

fn arbiter_child(dir: &(tempfile::TempDir, control::paths::RuntimeDir)) -> Child {
    child("arbiter", dir.1.path(), "")
}

/// What the processes started by other tests do; a test like any other where nobody has given it a
/// role.
#[test]
fn role() {
    let Some((role, socket, word)) = role_of_ours() else {
        return;
    };
    match role.as_str() {
        "hold" => {
            let job = control::Registered {
                token: word,
                channel_socket: socket,
                ..control::Registered::default()
            };
            let client = attach(&job);
            let account = Account::new(client.tenant, client.arbiter.tenant_slot()).expect("slot");
            account.reserve(0, GIB, NO_LIMIT).expect("no limit");
            client.client.want(0).expect("device").begin_blocking();
            client.client.thread(0).count_launch();
            loop {
                std::thread::park();
            }
        }
        "register" => {
            let mut operator =
                control::Client::connect(&socket, bench::PATIENCE).expect("connected");
            operator.register(named(&word, 0.5)).expect("registered");
            loop {
                std::thread::park();
            }
        }
        "arbiter" => {
            let dir = control::paths::RuntimeDir::given(socket).expect("absolute");
            let options = Options {
                host_nvml: false,
                devices: vec![bench::exclusive()],
                ..Options::new(dir)
            };
            arbiter::run(options).expect("served");
        }
        other => panic!("no role {other}"),
    }
}

testbed::starts_clean!();
