//! Live control and tenants that harm the others, over the daemon's real sockets.

#[allow(
    dead_code,
    reason = "shared with the other test program, which uses all of it"
)]
mod bench;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use arbiter::{DeviceRule, Options, Rules};
use bench::{Daemon, Worker, attach, child, lie, named, refusal, role_of_ours, until};
use control::{
    Change, Class, Client, Deadline, DeviceSelector, DeviceSettings, ErrorCode, JobSettings,
    JobState, Misbehaviour, PolicyChoice, SliceMode, Span,
};

/// Journal lines about a job that harmed the others, by what it did.
fn us(us: u64) -> Option<Span> {
    Some(Span::from_micros(us))
}

fn violations(operator: &mut Client, job: &str) -> Vec<String> {
    let events = operator.events(0, 0).expect("events");
    let about = events
        .iter()
        .filter(|event| event.kind == "misbehaviour" && event.job == job);
    about
        .map(|event| {
            event.fields["violation"]
                .as_str()
                .expect("a word")
                .to_owned()
        })
        .collect()
}

#[test]
fn a_device_is_run_anew_at_once_and_what_makes_no_sense_changes_nothing() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let nobody = refusal(operator.set_device(
        None,
        DeviceSettings {
            quantum: us(9000),
            ..DeviceSettings::default()
        },
    ));
    assert_eq!(nobody.code, ErrorCode::NoSuchDevice);
    let a = operator.register(named("a", 0.5)).expect("registered");
    let b = operator.register(named("b", 0.5)).expect("registered");
    let (a, b) = (Worker::start(attach(&a)), Worker::start(attach(&b)));
    until("both run", || {
        (a.launches() > 100 && b.launches() > 100).then_some(())
    });
    let before = operator.status().expect("status").devices;
    for (settings, code, words) in [
        (
            DeviceSettings::default(),
            ErrorCode::Invalid,
            ["nothing to change", "mode"],
        ),
        (
            DeviceSettings {
                quantum: us(100),
                ..DeviceSettings::default()
            },
            ErrorCode::Invalid,
            ["100us", "0.5ms to 1s"],
        ),
        (
            DeviceSettings {
                policy: Some(PolicyChoice::named("strid")),
                ..DeviceSettings::default()
            },
            ErrorCode::Invalid,
            ["strid", "stride"],
        ),
        (
            DeviceSettings {
                quantum_min: us(9000),
                quantum: us(8000),
                ..DeviceSettings::default()
            },
            ErrorCode::Invalid,
            ["9ms", "8ms"],
        ),
    ] {
        let error = refusal(operator.set_device(None, settings));
        assert_eq!(error.code, code);
        for word in words {
            assert!(error.to_string().contains(word), "{error}");
        }
    }
    let missing = refusal(operator.set_device(
        Some(DeviceSelector::Index(7)),
        DeviceSettings {
            mode: Some(SliceMode::Auto),
            ..DeviceSettings::default()
        },
    ));
    assert!(
        missing.message.contains("`7`") && missing.hint.contains("GPU-"),
        "{missing}"
    );
    let now = operator.status().expect("status").devices;
    assert_eq!(
        (now[0].quantum_us, now[0].set_by_hand),
        (before[0].quantum_us, false)
    );

    let changed = operator
        .set_device(
            Some(DeviceSelector::Index(0)),
            DeviceSettings {
                mode: Some(SliceMode::Concurrent),
                quantum: us(9000),
                misbehaviour: Some(Misbehaviour::Report),
                ..DeviceSettings::default()
            },
        )
        .expect("changed");
    assert_eq!(changed.len(), 1);
    assert_eq!(
        (changed[0].mode, changed[0].running, changed[0].quantum_us),
        (SliceMode::Concurrent, SliceMode::Concurrent, 9000)
    );
    assert!(changed[0].set_by_hand && changed[0].policy == "stride");
    let grants = |operator: &mut Client| -> u64 {
        let jobs = operator.list().expect("list");
        jobs.iter().map(|job| job.grants).sum()
    };
    until("both hold it", || {
        let status = operator.status().expect("status");
        (status.devices[0].holders.len() == 2).then_some(())
    });
    let at_once = grants(&mut operator);
    let launches = a.launches();
    until("more was done", || {
        (a.launches() > launches + 200).then_some(())
    });
    assert_eq!(grants(&mut operator), at_once, "no slices");
    operator
        .set_device(
            None,
            DeviceSettings {
                mode: Some(SliceMode::Exclusive),
                ..DeviceSettings::default()
            },
        )
        .expect("changed");
    until("slices are granted again", || {
        (grants(&mut operator) > at_once + 10).then_some(())
    });
    let reported = operator.events(0, 0).expect("events");
    let reported = reported.iter().filter(|event| event.kind == "device");
    assert_eq!(reported.count(), 2);
}

#[test]
fn jobs_are_paused_resumed_and_bounded_while_they_run() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let a = operator.register(named("a", 0.5)).expect("registered");
    let b = operator.register(named("b", 0.5)).expect("registered");
    let (a, b) = (Worker::start(attach(&a)), Worker::start(attach(&b)));
    until("both run", || {
        (a.launches() > 100 && b.launches() > 100).then_some(())
    });
    let change = |change| change;
    let pause = |paused| {
        change(Change {
            paused: Some(paused),
            ..Change::default()
        })
    };
    let status = operator.set("a", pause(true)).expect("paused");
    assert_eq!((status.state, status.paused), (JobState::Paused, true));
    let (stood, grants) = (a.launches(), status.grants);
    let went = b.launches();
    until("the other one goes on", || {
        (b.launches() > went + 200).then_some(())
    });
    // One submission may have been on its way.
    assert!(a.launches() <= stood + 1, "{} {stood}", a.launches());
    let jobs = operator.list().expect("list");
    assert_eq!(jobs[0].grants, grants);
    operator.set("a", pause(false)).expect("resumed");
    until("it goes on", || (a.launches() > stood + 50).then_some(()));

    for (change, words) in [
        (
            Change {
                settings: JobSettings {
                    share_min: Some(0.6),
                    ..JobSettings::default()
                },
                ..Change::default()
            },
            ["0.6", "0.5"],
        ),
        (
            Change {
                settings: JobSettings {
                    share_max: Some(0.4),
                    ..JobSettings::default()
                },
                ..Change::default()
            },
            ["0.4", "0.5"],
        ),
        (
            Change {
                settings: JobSettings {
                    share: Some(0.6),
                    ..JobSettings::default()
                },
                ..Change::default()
            },
            ["0.6", "1.1"],
        ),
        (
            Change {
                settings: JobSettings {
                    deadline: Some(Deadline::AtUnixMs(1)),
                    ..JobSettings::default()
                },
                ..Change::default()
            },
            ["deadline", "--work"],
        ),
    ] {
        let error = refusal(operator.set("a", change)).to_string();
        for word in words {
            assert!(error.contains(word), "{error}");
        }
    }
    let status = operator
        .set(
            "a",
            Change {
                settings: JobSettings {
                    share: Some(0.25),
                    share_min: Some(0.125),
                    share_max: Some(0.25),
                    class: Some(Class::Opportunistic),
                    ..JobSettings::default()
                },
                ..Change::default()
            },
        )
        .expect("changed");
    assert_eq!(
        (status.share_min, status.share_max, status.class),
        (Some(0.125), Some(0.25), Class::Opportunistic)
    );
}

#[test]
fn what_was_changed_outlives_the_arbiter_and_gives_way_to_the_file() {
    static FILE: parking_lot::Mutex<Result<u64, &str>> = parking_lot::Mutex::new(Ok(6000));
    let dir = bench::directory();
    let serve = || {
        let rules = || {
            let quantum_max_us = FILE.lock().map_err(|error| vec![error.to_owned()])?;
            Ok(Rules {
                devices: vec![DeviceRule {
                    settings: DeviceSettings {
                        quantum: us(quantum_max_us),
                        ..bench::exclusive().settings
                    },
                    ..DeviceRule::default()
                }],
                ..Rules::default()
            })
        };
        let runtime = dir.1.clone();
        let (send, started) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let options = Options {
                host_nvml: false,
                devices: rules().map(|rules| rules.devices).unwrap_or_default(),
                reload: Some(Box::new(rules)),
                ..Options::new(runtime)
            };
            let arbiter = arbiter::Arbiter::start(options).expect("started");
            send.send(arbiter.stopper()).expect("somebody waits");
            arbiter.serve().expect("served");
        });
        (
            thread,
            started
                .recv_timeout(testbed::PATIENCE)
                .expect("it has started"),
        )
    };
    let (first, stop) = serve();
    let mut operator = bench::operator(&dir.1).expect("listens");
    let job = operator.register(named("steady", 0.5)).expect("registered");
    let client = attach(&job);
    let quantum = |operator: &mut Client| operator.status().expect("status").devices[0].quantum_us;
    assert_eq!(quantum(&mut operator), 6000);
    operator
        .set_device(
            None,
            DeviceSettings {
                quantum: us(9000),
                ..DeviceSettings::default()
            },
        )
        .expect("changed");
    let floor = Change {
        settings: JobSettings {
            share_min: Some(0.25),
            ..JobSettings::default()
        },
        paused: Some(true),
        ..Change::default()
    };
    operator.set("steady", floor).expect("changed");
    stop.stop();
    testbed::join(first);
    drop(client);

    let (second, stop) = serve();
    let mut operator = bench::operator(&dir.1).expect("listens");
    let job = &operator.list().expect("list")[0];
    assert_eq!((job.share_min, job.paused), (Some(0.25), true));
    let job = operator.register(named("other", 0.5)).expect("registered");
    let _client = attach(&job);
    assert_eq!(quantum(&mut operator), 9000);

    *FILE.lock() = Err("sublet.toml:3:1: unknown key `x`");
    let error = refusal(operator.reload()).to_string();
    assert!(
        error.contains("sublet.toml:3:1") && error.contains("still is"),
        "{error}"
    );
    assert_eq!(quantum(&mut operator), 9000);
    *FILE.lock() = Ok(7000);
    let reloaded = operator.reload().expect("read again");
    assert_eq!(reloaded.device_rules, 1);
    assert_eq!(quantum(&mut operator), 7000);
    assert!(!operator.status().expect("status").devices[0].set_by_hand);
    stop.stop();
    testbed::join(second);
}

#[test]
fn a_client_of_ours_that_rings_without_end_is_no_flood() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let busy = operator.register(named("busy", 0.5)).expect("registered");
    let quiet = operator.register(named("quiet", 0.5)).expect("registered");
    let busy = attach(&busy);
    let worker = Worker::start(attach(&quiet));
    let (storm, rung) = (AtomicBool::new(true), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while storm.load(Relaxed) {
                    busy.ring();
                    rung.fetch_add(1, Relaxed);
                }
            });
        }
        // More than the five periods that make a flood.
        let began = std::time::Instant::now();
        until("it has rung for two seconds", || {
            (began.elapsed().as_secs() >= 2).then_some(())
        });
        let before = worker.launches();
        until("the quiet one goes on", || {
            (worker.launches() > before + 200).then_some(())
        });
        storm.store(false, Relaxed);
    });
    let found = violations(&mut operator, "busy");
    let rung = rung.into_inner();
    println!(
        "now: {rung} rings of three threads, {} violations",
        found.len()
    );
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn a_flood_of_doorbells_is_reported_and_demoted() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let noisy = operator.register(named("noisy", 0.5)).expect("registered");
    let quiet = operator.register(named("quiet", 0.5)).expect("registered");
    let noisy = attach(&noisy);
    let worker = Worker::start(attach(&quiet));
    let storm = AtomicBool::new(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while storm.load(Relaxed) {
                noisy.send_bell();
            }
        });
        until("it is reported", || {
            (violations(&mut operator, "noisy") == ["flood"]).then_some(())
        });
        let job = &operator.list().expect("list")[0];
        assert!(
            job.demoted
                .as_deref()
                .is_some_and(|why| why.contains("floods"))
        );
        let before = worker.launches();
        until("the quiet one goes on", || {
            (worker.launches() > before + 200).then_some(())
        });
        storm.store(false, Relaxed);
    });
    assert!(violations(&mut operator, "quiet").is_empty());
}

#[test]
fn nonsense_in_a_page_and_endless_work_are_reported_and_cost_nobody_else() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let liar = operator.register(named("liar", 0.5)).expect("registered");
    let honest = operator.register(named("honest", 0.5)).expect("registered");
    let liar = attach(&liar);
    lie(&liar, 1000);
    let worker = Worker::start(attach(&honest));
    until("both are reported", || {
        let reported = violations(&mut operator, "liar");
        let has = |word: &str| reported.iter().any(|reported| reported == word);
        (has("nonsense") && has("endless")).then_some(())
    });
    let jobs = operator.list().expect("list");
    assert!(jobs[0].demoted.is_some() && jobs[0].misbehaved_count >= 2);
    assert!(jobs[1].demoted.is_none());
    // Demoted, it is granted nothing any more while the honest one wants the device.
    let before = (jobs[0].grants, worker.launches());
    until("the honest one has the device to itself", || {
        (worker.launches() > before.1 + 500).then_some(())
    });
    assert_eq!(operator.list().expect("list")[0].grants, before.0);
}

#[test]
fn a_process_is_ended_only_where_the_configuration_says_so() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    // A process of its own, which attaches and never comes when it is let in.
    let mut child = child("unresponsive", &daemon.dir.api_socket(), "");
    let job = operator.register(named("other", 0.5)).expect("registered");
    let worker = Worker::start(attach(&job));
    until("it is reported", || {
        (violations(&mut operator, "unresponsive") == ["unresponsive"]).then_some(())
    });
    assert!(child.try_wait().expect("asked").is_none(), "it lives");
    operator
        .set_device(
            None,
            DeviceSettings {
                misbehaviour: Some(Misbehaviour::Kill),
                ..DeviceSettings::default()
            },
        )
        .expect("changed");
    let status = until("it has ended", || child.try_wait().expect("asked"));
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&status),
        Some(9)
    );
    let before = worker.launches();
    until("the other one goes on", || {
        (worker.launches() > before + 100).then_some(())
    });
}

/// What a process started by another test does; a test like any other where nobody has given it a
/// role.
#[test]
fn role() {
    let Some((_, socket, _)) = role_of_ours() else {
        return;
    };
    let mut operator = Client::connect(&socket, bench::PATIENCE).expect("connected");
    let job = operator
        .register(named("unresponsive", 0.5))
        .expect("registered");
    let client = attach(&job);
    client.client.want(0).expect("device").begin_waiting();
    loop {
        client.ring();
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

testbed::starts_clean!();
