//! Floods of registrations: slices and answers to others go on.

use control::{Class, JobSettings, JobSpec};

use crate::bench::{Daemon, Worker, attach, named, refusal, until};

fn low(name: &str) -> JobSpec {
    JobSpec {
        settings: JobSettings {
            class: Some(Class::Opportunistic),
            ..JobSettings::default()
        },
        name: name.into(),
        simulated: true,
        ..JobSpec::default()
    }
}

#[test]
fn registrations_without_end_are_bounded_and_keep_no_share_from_those_who_work() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let working = operator
        .register(named("working", 0.5))
        .expect("registered");
    let worker = Worker::start(attach(&working));
    // 98 guaranteed ones that never come, then opportunistic ones until there is no more.
    for number in 0..98 {
        let job = JobSpec {
            settings: JobSettings {
                share: None,
                ..named(&format!("r{number}"), 0.0).settings
            },
            ..named(&format!("r{number}"), 0.0)
        };
        if operator.register(job).is_err() {
            break;
        }
    }
    let error = until("they are bounded", || {
        let error = operator.register(low("")).err()?;
        Some(refusal(Err::<(), _>(error)))
    });
    assert!(error.to_string().contains("256 jobs"), "{error}");
    assert!(error.to_string().contains("sublet ps"), "{error}");
    assert_eq!(operator.list().expect("list").len(), 256);
    let before = worker.launches();
    until("it goes on", || {
        (worker.launches() > before + 200).then_some(())
    });
    let status = operator.status().expect("served");
    let working = status.jobs.iter().find(|job| job.name == "working");
    assert_eq!(working.expect("listed").share_asked, Some(0.5));
    drop(worker);
}

#[test]
fn a_job_that_registered_long_before_it_comes_has_what_is_left_or_the_reason() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let mut early = Vec::new();
    for number in 0..40 {
        let job = JobSpec {
            settings: JobSettings {
                share: None,
                ..named(&format!("r{number}"), 0.0).settings
            },
            ..named(&format!("r{number}"), 0.0)
        };
        early.push(operator.register(job).expect("registered"));
    }
    // Four of them have their part kept, some more for a minute, and the rest of the device is free
    // for others.
    let job = operator
        .register(named("working", 0.8))
        .expect("what was not kept");
    let worker = Worker::start(attach(&job));
    // The last one comes after all, and there is something left for it.
    let last = early.pop().expect("one");
    let latecomer = Worker::start(attach(&last));
    until("both run", || {
        (worker.launches() > 100 && latecomer.launches() > 10).then_some(())
    });
}
