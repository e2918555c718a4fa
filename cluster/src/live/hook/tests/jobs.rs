//! Jobs and pairs: which run where, which make space, which are split.

use super::*;

#[test]
fn jobs_run_one_after_the_other_where_nothing_is_packed() {
    let mut world = World::new(&[1, 1], None);
    let ids: Vec<u64> = (0..5).map(|_| world.submit("job 1 10", false)).collect();
    world.until("all run", 60.0, World::over);
    for id in ids {
        assert_eq!(world.phase(id), JobPhase::Done);
    }
    // Three rounds of two GPUs for five jobs, and some seconds of reports in between.
    assert!((30.0..40.0).contains(&world.s), "{}", world.s);
}

#[test]
fn a_good_pair_stays_and_a_bad_one_is_split_within_two_windows_and_remembered() {
    let mut world = World::new(&[1], Some("trial:margin=0.05"));
    let (light, heavy) = (
        world.submit("job 0.4 60", false),
        world.submit("job 0.5 60", false),
    );
    world.until("the pair is measured", 30.0, |w| {
        w.kinds().contains(&"measured".into())
    });
    let pair = world.hook().status().pairs[0].clone();
    assert!(
        !pair.refused && pair.rates.iter().sum::<f64>() > 1.8,
        "{pair:?}"
    );
    assert_eq!(world.hook().job(heavy).unwrap().beside, Some(light));
    world.until("both run to their ends", 60.0, World::over);

    let (first, second) = (
        world.submit("job 1 40", false),
        world.submit("job 1 40 f", true),
    );
    world.until("they are together", 10.0, |w| {
        w.hook().job(second).unwrap().beside == Some(first)
    });
    let together_s = world.s;
    world.until("they are split", 60.0, |w| {
        w.kinds().contains(&"unpack".into())
    });
    // Neither kind was seen solo: a moment by itself for each, then one window of 5 s.
    assert!(
        world.s - together_s < 2.0 * 5.0 + 2.0 * 2.5 + 3.0,
        "{} s",
        world.s - together_s
    );
    let refused = world
        .hook()
        .status()
        .pairs
        .into_iter()
        .find(|pair| pair.refused)
        .unwrap();
    assert!(
        refused.rates.iter().all(|rate| (0.4..0.6).contains(rate)),
        "{refused:?}"
    );
    world.until("both run to their ends", 200.0, World::over);
    assert_eq!(world.hook().status().unpacks, 1);
    let third = world.submit("job 1 20", false);
    let fourth = world.submit("job 1 20", false);
    world.kill();
    world.until("they run", 200.0, World::over);
    assert_eq!(
        world.hook().status().unpacks,
        1,
        "kinds {third} and {fourth} were known, also to the next hook"
    );
}

#[test]
fn a_job_that_cannot_move_is_paused_and_goes_on_where_it_was() {
    let mut world = World::new(&[1], None);
    world.config.choice.order = Some("sjf".into());
    world.config.choice.order = Some("srtf".into());
    world.kill();
    let ms = world.now();
    let asked = |work_s, command: &str| Submission {
        command: command.split(' ').map(str::to_owned).collect(),
        work_s: Some(work_s),
        ..Submission::default()
    };
    let long = world
        .hook()
        .submit(asked(100.0, "job 1 30"), ms)
        .unwrap()
        .0
        .id;
    world.until("the long one runs", 10.0, |w| {
        w.phase(long) == JobPhase::Running
    });
    let ms = world.now();
    let short = world.hook().submit(asked(5.0, "job 1 5"), ms).unwrap().0.id;
    world.until("it gives way", 10.0, |w| w.phase(long) == JobPhase::Paused);
    world.until("the short one is done", 20.0, |w| {
        w.phase(short) == JobPhase::Done
    });
    world.until("the long one is done", 60.0, World::over);
    assert_eq!(
        world.hook().job(long).unwrap().attempts,
        1,
        "it was never started again"
    );
}

#[test]
fn a_job_that_saves_and_gives_way_is_not_done_by_that() {
    let mut world = World::new(&[1], None);
    world.nodes[0].listens = true;
    world.config.choice.order = Some("srtf".into());
    world.kill();
    let ms = world.now();
    let asked = |work_s, command: &str| Submission {
        command: command.split(' ').map(str::to_owned).collect(),
        work_s: Some(work_s),
        restartable: true,
        ..Submission::default()
    };
    let long = asked(100.0, "job 1 30 f");
    let long = world.hook().submit(long, ms).unwrap().0.id;
    world.until("the long one runs", 10.0, |w| {
        w.phase(long) == JobPhase::Running
    });
    let ms = world.now();
    let short = asked(5.0, "job 1 5");
    let short = world.hook().submit(short, ms).unwrap().0.id;
    world.until("the short one is done", 20.0, |w| {
        w.phase(short) == JobPhase::Done
    });
    assert!(
        !world.phase(long).is_over(),
        "exit code 0 after it was asked to make space"
    );
    world.until("the long one is done", 60.0, World::over);
    let view = world.hook().job(long).unwrap();
    assert_eq!(
        (view.phase, view.attempts, view.saved),
        (JobPhase::Done, 2, 1),
        "{view:?}"
    );
    assert_eq!(
        world.nodes[0].signals,
        [(
            RunId {
                job: long,
                attempt: 1
            },
            0
        )]
    );
    assert!(world.kinds().contains(&"saved".into()));
    assert_eq!(world.hook().job(short).unwrap().saved, 0);
}

#[test]
fn an_elastic_job_is_asked_to_save_and_goes_on_in_its_new_size() {
    let mut world = World::new(&[4], None);
    world.nodes[0].listens = true;
    world.config.choice.sizer = Some("max-min".into());
    world.config.choice.order = None;
    world.kill();
    let submit = |world: &mut World, max_gpus| {
        let ms = world.now();
        let asked = Submission {
            command: ["job", "1", "40", "f"].map(str::to_owned).to_vec(),
            work_s: Some(40.0),
            restartable: true,
            max_gpus,
            ..Submission::default()
        };
        world.hook().submit(asked, ms).unwrap().0.id
    };
    let first = submit(&mut world, Some(4));
    world.until("it has all GPUs", 10.0, |w| {
        w.hook().job(first).unwrap().devices.len() == 4 && w.phase(first) == JobPhase::Running
    });
    let second = submit(&mut world, Some(4));
    world.until("they have half each", 20.0, |w| {
        let devices = |id| w.hook().job(id).unwrap().devices.len();
        let both = [first, second].map(devices);
        both == [2, 2] && w.phase(first) == JobPhase::Running
    });
    assert_eq!(
        world.nodes[0].signals,
        [(
            RunId {
                job: first,
                attempt: 1
            },
            2
        )]
    );
    assert!(world.kinds().contains(&"resize".into()));
    // Rigid jobs are what they were: nobody gives them another size.
    let third = submit(&mut world, None);
    world.until("all are over", 200.0, World::over);
    for id in [first, second, third] {
        assert_eq!(world.phase(id), JobPhase::Done);
    }
    let saved = world.hook().job(first).unwrap().saved;
    assert!(saved >= 1, "{saved}");
}

#[test]
fn how_elastic_jobs_scale_is_measured_and_gpus_go_to_the_one_that_gains() {
    let mut world = World::new(&[4], None);
    (world.nodes[0].listens, world.nodes[0].iterates) = (true, true);
    world.config.choice.sizer = Some("optimus".into());
    world.config.choice.order = None;
    world.kill();
    let submit = |world: &mut World, kind: &str| {
        let now = world.now();
        let asked = Submission {
            command: ["job", "1", "1e9", "f", kind].map(str::to_owned).to_vec(),
            kind: kind.into(),
            work_s: Some(1e5),
            restartable: true,
            max_gpus: Some(4),
            ..Submission::default()
        };
        world.hook().submit(asked, now).unwrap().0.id
    };
    let devices = |world: &mut World, id: u64| world.hook().job(id).unwrap().devices.len();
    // By itself it has all GPUs; nothing is known of what they are worth to it.
    let constant = submit(&mut world, "constant");
    world.until("it is measured on four", 60.0, |world| {
        let speeds = world.hook().status().speeds;
        speeds.iter().any(|view| view.gpus == 4 && view.iterations)
    });
    let parts = submit(&mut world, "parts");
    world.until("who scales has the others", 200.0, |world| {
        [constant, parts].map(|id| devices(world, id)) == [1, 3]
    });
    for _ in 0..40 {
        world.tick();
    }
    assert_eq!([constant, parts].map(|id| devices(&mut world, id)), [1, 3]);
    // What it was not measured on is inferred, and what it was stays, also to the next hook.
    world.kill();
    world.until("the nodes are heard", 20.0, |world| {
        world.hook().state.gpus() == 4
    });
    let hook = world.hook();
    let job = hook.state.job(hook.live[&constant]);
    for gpus in 1..=4 {
        let truth = 1.0 / (0.9 + 0.1 / f64::from(gpus));
        let ratio = job.rate(gpus) / truth;
        assert!((ratio - 1.0).abs() < 0.05, "{gpus}: {ratio}");
    }
}

#[test]
fn a_job_that_cannot_be_started_is_tried_again_and_given_up_in_the_end() {
    let mut world = World::new(&[1], None);
    let id = world.submit("job 1 5", false);
    world.until("it is given up", 120.0, |w| {
        for node in &mut w.nodes {
            for attempt in node.runs.values_mut() {
                attempt.ended = Some(Ended {
                    code: Some(125),
                    words: "no such file".into(),
                    ..Ended::default()
                });
            }
        }
        w.over()
    });
    let job = world.hook().job(id).unwrap();
    assert_eq!((job.phase, job.attempts), (JobPhase::Failed, 5));
    assert!(job.reason.contains("no such file"), "{job:?}");
}

#[test]
fn a_job_is_taken_back_wherever_it_is() {
    let mut world = World::new(&[1], Some("trial"));
    let ids: Vec<u64> = (0..4).map(|_| world.submit("job 1 60", false)).collect();
    world.until("two run", 20.0, |w| w.phase(ids[1]) == JobPhase::Running);
    for id in &ids {
        let ms = world.now();
        world.hook().cancel(*id, ms).unwrap();
        world.hook().commit().unwrap();
        world.kill();
    }
    world.until("all are over", 30.0, World::over);
    for id in &ids {
        assert_eq!(world.phase(*id), JobPhase::Cancelled);
    }
    assert!(world.nodes[0].alive().next().is_none());
    let ms = world.now();
    assert_eq!(
        world.hook().cancel(ids[0], ms).unwrap().phase,
        JobPhase::Cancelled,
        "twice is once"
    );
    assert!(world.hook().cancel(99, ms).is_err());
}

#[test]
fn a_job_that_cannot_be_moved_is_never_asked_to() {
    for seed in 5..9 {
        let mut random = Random::new(seed);
        let mut world = World::new(&[1, 1, 1], Some("trial"));
        let mut pinned = Vec::new();
        for at in 0..12 {
            let busy = ["0.3", "0.5", "1"][random.below(3)];
            let restartable = random.below(3) == 0;
            let keeps = if restartable { " f" } else { "" };
            let id = world.submit(
                &format!("job {busy} {}{keeps}", 5 + random.below(20)),
                restartable,
            );
            pinned.extend((!restartable).then_some(id));
            for _ in 0..if at < 3 { 6 } else { random.below(2) } {
                world.tick();
            }
        }
        world.until("all are over", 400.0, World::over);
        let lines = world.hook().decisions(0);
        let moved = lines.iter().filter(|line| line.kind == "migrate");
        let moved: Vec<_> = moved.filter(|line| pinned.contains(&line.job)).collect();
        assert!(moved.is_empty(), "seed {seed}: {moved:?}");
    }
}
