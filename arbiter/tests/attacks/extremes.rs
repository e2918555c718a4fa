//! Values that nobody means, in what jobs and operators ask for: each is refused with the reason or
//! taken for what it says, and the arbiter goes on.

use std::time::Duration;

use control::{
    Change, Client, Deadline, DeviceSelector, DeviceSettings, JobSettings, JobSpec, MemLimit,
    Moves, PolicyChoice, Resize, Span,
};

use crate::bench::{Daemon, Worker, attach, named, refusal, until};

const NUMBERS: [f64; 9] = [
    0.0,
    -0.0,
    -1.0,
    f64::MIN_POSITIVE,
    1.0 + f64::EPSILON,
    1e300,
    f64::NAN,
    f64::INFINITY,
    f64::NEG_INFINITY,
];
const WORDS: [u64; 4] = [0, 1, 1 << 63, u64::MAX];

fn changes() -> Vec<Change> {
    let none = Change::default();
    let mut changes = Vec::new();
    for number in NUMBERS {
        changes.extend([
            Change {
                settings: JobSettings {
                    share: Some(number),
                    ..JobSettings::default()
                },
                ..none.clone()
            },
            Change {
                settings: JobSettings {
                    share_min: Some(number),
                    ..JobSettings::default()
                },
                ..none.clone()
            },
            Change {
                settings: JobSettings {
                    share_max: Some(number),
                    ..JobSettings::default()
                },
                ..none.clone()
            },
            Change {
                settings: JobSettings {
                    mem: Some(MemLimit::Percent(number)),
                    ..JobSettings::default()
                },
                ..none.clone()
            },
            Change {
                settings: JobSettings {
                    host_memory: Some(MemLimit::Percent(number)),
                    ..JobSettings::default()
                },
                ..none.clone()
            },
        ]);
    }
    for word in WORDS {
        changes.extend([
            Change {
                settings: JobSettings {
                    mem: Some(MemLimit::Bytes(word)),
                    ..JobSettings::default()
                },
                ..none.clone()
            },
            Change {
                settings: JobSettings {
                    host_memory: Some(MemLimit::Bytes(word)),
                    ..JobSettings::default()
                },
                ..none.clone()
            },
            Change {
                solo_iteration_us: Some(word),
                ..none.clone()
            },
            Change {
                settings: JobSettings {
                    work: Some(Span(Duration::from_nanos(word))),
                    ..JobSettings::default()
                },
                ..none.clone()
            },
            Change {
                settings: JobSettings {
                    deadline: Some(Deadline::AtUnixMs(word)),
                    work: Some(Span(Duration::from_nanos(word))),
                    ..JobSettings::default()
                },
                ..none.clone()
            },
        ]);
    }
    changes.push(Change {
        resize: Some(Resize::To(u16::MAX)),
        ..none
    });
    changes
}

/// Whether its numbers are in their ranges.
fn may_be_taken(change: &Change) -> bool {
    let shares = [
        change.settings.share,
        change.settings.share_min,
        change.settings.share_max,
    ];
    let sizes = [change.settings.mem, change.settings.host_memory];
    shares
        .into_iter()
        .flatten()
        .all(|share| share > 0.0 && share <= 1.0)
        && sizes.into_iter().flatten().all(|size| match size {
            MemLimit::Bytes(bytes) => bytes > 0,
            MemLimit::Percent(percent) => percent > 0.0 && percent <= 100.0,
        })
}

/// Not one check of the arbiter's own has failed.
fn unhurt(operator: &mut Client) {
    let events = operator.events(0, 0).expect("served");
    let failures: Vec<_> = events
        .iter()
        .filter(|event| event.kind == "failure")
        .collect();
    assert!(failures.is_empty(), "{failures:?}");
}

#[test]
fn extreme_terms_of_a_job_are_refused_or_taken_and_nothing_stands_still() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let jobs = ["a", "b"].map(|name| operator.register(named(name, 0.25)).expect("registered"));
    let workers = jobs.each_ref().map(|job| Worker::start(attach(job)));
    let goes_on = || {
        let before = workers.each_ref().map(Worker::launches);
        until("both go on", || {
            let now = workers.each_ref().map(Worker::launches);
            (now[0] > before[0] && now[1] > before[1]).then_some(())
        });
    };
    let (mut taken, mut refused) = (0, 0);
    for change in changes() {
        // What is no number on the wire is nothing that was asked for.
        match operator.set("a", change.clone()) {
            Ok(_) => {
                taken += 1;
                assert!(may_be_taken(&change), "{change:?}");
            }
            Err(error) => {
                refused += 1;
                let error = error.to_string();
                assert!(
                    error.len() < 1000 && !error.is_empty(),
                    "{change:?}: {error}"
                );
            }
        }
        operator.status().expect("served");
        unhurt(&mut operator);
    }
    // A cap of a millionth is one that can be meant; here it is not.
    let usual = Change {
        settings: JobSettings {
            share_max: Some(1.0),
            share: Some(0.25),
            share_min: Some(0.1),
            ..JobSettings::default()
        },
        ..Change::default()
    };
    operator.set("a", usual).expect("as before");
    println!("now: {taken} extreme changes taken, {refused} refused, 0 failures");
    goes_on();
    let settings = WORDS.into_iter().flat_map(|word| {
        let none = DeviceSettings::default();
        [
            DeviceSettings {
                quantum_min: Some(Span::from_micros(word)),
                ..none.clone()
            },
            DeviceSettings {
                quantum: Some(Span::from_micros(word)),
                ..none.clone()
            },
            DeviceSettings {
                holders: Some(word),
                ..none.clone()
            },
            DeviceSettings {
                policy: Some(PolicyChoice::named("x".repeat(1 << 18))),
                ..none.clone()
            },
        ]
    });
    for settings in settings {
        if let Err(error) = operator.set_device(None, settings.clone()) {
            assert!(
                error.to_string().len() < 2000,
                "{} bytes",
                error.to_string().len()
            );
        }
        unhurt(&mut operator);
    }
    goes_on();
    // Whatever the terms, each policy can live with them.
    let extreme = Change {
        settings: JobSettings {
            deadline: Some(Deadline::AtUnixMs(u64::MAX)),
            work: Some(Span(Duration::from_nanos(u64::MAX))),
            ..JobSettings::default()
        },
        solo_iteration_us: Some(u64::MAX),
        ..Change::default()
    };
    operator.set("a", extreme).expect("far away, and no lie");
    for policy in policy::POLICIES {
        let settings = DeviceSettings {
            policy: Some(PolicyChoice::named(policy.name)),
            ..DeviceSettings::default()
        };
        operator.set_device(None, settings).expect("a policy");
        let before = workers.each_ref().map(Worker::launches);
        until("one of them goes on", || {
            let now = workers.each_ref().map(Worker::launches);
            (now[0] + now[1] > before[0] + before[1] + 20).then_some(())
        });
        unhurt(&mut operator);
    }
}

#[test]
fn what_a_job_says_of_itself_is_bounded() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let long = "x".repeat(100 << 10);
    let uuid = DeviceSelector::Uuid(format!("GPU-{long}"));
    let none = || named("job", 0.1);
    let specs = [
        JobSpec {
            name: long.clone(),
            ..none()
        },
        JobSpec {
            driver: format!("/{long}").into(),
            ..none()
        },
        JobSpec {
            settings: JobSettings {
                device: Some(vec![uuid]),
                ..none().settings
            },
            ..none()
        },
        JobSpec {
            settings: JobSettings {
                device: Some(vec![DeviceSelector::Index(u32::MAX); 10_000]),
                ..none().settings
            },
            ..none()
        },
        JobSpec {
            settings: JobSettings {
                mem: Some(MemLimit::Bytes(0)),
                ..none().settings
            },
            ..none()
        },
        JobSpec {
            settings: JobSettings {
                mem: Some(MemLimit::Percent(-5.0)),
                ..none().settings
            },
            ..none()
        },
        JobSpec {
            settings: JobSettings {
                deadline: Some(Deadline::AtUnixMs(u64::MAX)),
                ..none().settings
            },
            ..none()
        },
        JobSpec {
            pid: u32::MAX,
            ..none()
        },
        JobSpec {
            settings: JobSettings {
                share: Some(f64::MAX),
                ..none().settings
            },
            ..none()
        },
    ];
    for (at, spec) in specs.into_iter().enumerate() {
        let error = refusal(operator.register(spec)).to_string();
        assert!(error.len() < 1000, "{at}: {} bytes", error.len());
        assert!(operator.list().expect("served").is_empty(), "{at}: {error}");
    }
    let words = JobSpec {
        command: vec![long.clone(); 3],
        ..none()
    };
    operator
        .register(words)
        .expect("what is shown of it is cut");
    let shown: usize = operator.list().expect("served")[0]
        .command
        .iter()
        .map(String::len)
        .sum();
    assert!(shown < 10_000, "{shown}");
    let error = refusal(operator.set(
        &long,
        Change {
            paused: Some(true),
            ..Change::default()
        },
    ));
    assert!(error.to_string().len() < 2000);
    let moves = Moves {
        evict: vec![long; 3],
        deadline_ms: u64::MAX,
        ..Moves::default()
    };
    assert!(refusal(operator.move_jobs(&moves)).to_string().len() < 2000);
    unhurt(&mut operator);
}
