//! Nodes that fall silent, come back, are somebody else, or say what cannot be.

use super::*;

#[test]
fn a_silent_node_keeps_its_jobs_and_gets_no_new_ones_until_it_is_given_up() {
    let mut world = World::new(&[1, 1], None);
    let (a, b) = (
        world.submit("job 1 30 f", true),
        world.submit("job 1 30", false),
    );
    world.until("both run", 10.0, |w| {
        w.phase(a) == JobPhase::Running && w.phase(b) == JobPhase::Running
    });
    let lost = world
        .nodes
        .iter()
        .position(|node| node.alive().any(|(run, _)| run.job == a))
        .unwrap();
    world.nodes[lost].silent = true;
    let c = world.submit("job 1 5", false);
    for _ in 0..60 {
        world.tick();
    }
    assert_eq!(world.phase(a), JobPhase::Running, "nobody knows better");
    assert_eq!(world.hook().job(a).unwrap().attempts, 1);
    world.until("the others are done", 60.0, |w| {
        w.phase(b) == JobPhase::Done && w.phase(c) == JobPhase::Done
    });
    // Late, it says that the job is done.
    world.nodes[lost].silent = false;
    world.until("it is heard", 5.0, World::over);
    assert_eq!(world.phase(a), JobPhase::Done);

    let d = world.submit("job 1 60 f", true);
    world.until("it runs", 10.0, |w| w.phase(d) == JobPhase::Running);
    let lost = world
        .nodes
        .iter()
        .position(|node| node.alive().any(|(run, _)| run.job == d))
        .unwrap();
    world.nodes[lost].silent = true;
    for _ in 0..30 {
        world.tick();
    }
    let (name, ms) = (world.nodes[lost].name.clone(), world.now());
    // Whatever ran there is dead: that is what giving up says.
    world.nodes[lost].runs.clear();
    world.hook().forget(&name, ms).unwrap();
    world.until("it goes on elsewhere", 120.0, World::over);
    assert_eq!(
        (world.phase(d), world.hook().job(d).unwrap().attempts),
        (JobPhase::Done, 2)
    );
    assert!(
        world
            .hook()
            .forget("nobody", ms)
            .unwrap_err()
            .to_string()
            .contains("n"),
        "known ones are named"
    );
}

#[test]
fn a_node_that_comes_back_after_it_was_given_up_stops_what_it_still_runs() {
    let mut world = World::new(&[1, 1], None);
    let job = world.submit("job 1 40 f", true);
    world.until("it runs", 10.0, |w| w.phase(job) == JobPhase::Running);
    let lost = world
        .nodes
        .iter()
        .position(|node| node.alive().next().is_some())
        .unwrap();
    let (name, ms) = (world.nodes[lost].name.clone(), world.now());
    world.nodes[lost].silent = true;
    world.hook().forget(&name, ms).unwrap();
    // It does run in two places now, by the operator's word; and no longer once the node is back.
    for _ in 0..6 {
        world.s += 0.5;
        let ms = world.now();
        world.hook().step(ms).unwrap();
    }
    world.nodes[lost].silent = false;
    world.nodes[lost].known = false;
    world.until("the old attempt is stopped", 10.0, |w| {
        w.nodes[lost].alive().all(|(run, _)| run.attempt > 1)
    });
    world.until("it is done", 100.0, World::over);
    assert_eq!(world.phase(job), JobPhase::Done);
}

#[test]
fn two_arbiters_of_one_name_are_distinguished_and_a_reboot_is_seen() {
    let mut world = World::new(&[1], None);
    let (keeps, plain) = (
        world.submit("job 1 30 f", true),
        world.submit("job 1 30", false),
    );
    world.until("one runs", 10.0, |w| w.phase(keeps) == JobPhase::Running);
    let ms = world.now();
    let mut other = Fake::new("n0", 1);
    other.instance = "n0-2".into();
    let error = world
        .hook()
        .register("n0", other.registration(), ms)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("n0-1") && error.contains("n0-2") && error.contains("forget"),
        "{error}"
    );
    let report = other.report(world.s);
    let error = world
        .hook()
        .report("n0", report, ms)
        .unwrap_err()
        .to_string();
    assert!(error.contains("another arbiter"), "{error}");
    // The machine was started anew: nothing of before runs, and its directory is another one.
    let node = &mut world.nodes[0];
    (node.boot, node.instance) = ("b2".into(), "n0-3".into());
    node.runs.clear();
    node.acks.clear();
    (node.known, node.applied) = (false, 0);
    world.until("all are over", 100.0, World::over);
    assert_eq!(
        (world.phase(keeps), world.phase(plain)),
        (JobPhase::Done, JobPhase::Done)
    );
    assert_eq!(world.hook().job(keeps).unwrap().attempts, 2);
}

#[test]
fn what_a_node_says_of_itself_is_checked() {
    let mut world = World::new(&[], None);
    let mut say = |change: &dyn Fn(&mut Registration)| {
        let mut said = Fake::new("n", 2).registration();
        change(&mut said);
        world
            .hook()
            .register("n", said, BEGIN_MS)
            .map_err(|error| error.to_string())
    };
    assert!(say(&|said| said.api = 9).unwrap_err().contains('9'));
    assert!(
        say(&|said| said.devices[1].uuid = "GPU-0".into())
            .unwrap_err()
            .contains("UUID")
    );
    assert!(
        say(&|said| said.devices[1].name = "A100".into())
            .unwrap_err()
            .contains("A100")
    );
    assert!(
        say(&|said| said.devices = vec![Device::default(); 65])
            .unwrap_err()
            .contains("65")
    );
    assert!(
        say(&|said| said.cpus = f64::NAN).is_ok(),
        "a number that is none is no number of cores"
    );
    let error = world
        .hook()
        .register("a b", Fake::new("n", 1).registration(), BEGIN_MS)
        .unwrap_err();
    assert!(error.to_string().contains("`a b`"), "{error}");
}

#[test]
fn a_node_that_vanishes_between_an_order_and_its_answer_does_it_once() {
    for heard in [false, true] {
        let mut world = World::new(&[1], None);
        for _ in 0..3 {
            world.tick();
        }
        let job = world.submit("job 1 20", false);
        let ms = world.now();
        world.hook().step(ms).unwrap();
        let (name, report) = (world.nodes[0].name.clone(), world.nodes[0].report(world.s));
        let orders = world.hook().report(&name, report, ms).unwrap();
        assert_eq!(orders.orders.len(), 1, "it is ordered to start it");
        world.hook().commit().unwrap();
        if heard {
            let World { nodes, files, .. } = &mut world;
            nodes[0].obey(orders, files);
        }
        // Nothing is heard of it for a minute, and the hook is another one by then.
        world.nodes[0].silent = true;
        for at in 0..120 {
            world.tick();
            if at == 60 {
                world.kill();
            }
        }
        assert_eq!(
            world.hook().job(job).unwrap().attempts,
            1,
            "it may run there"
        );
        world.nodes[0].silent = false;
        world.until("it is done", 60.0, World::over);
        assert_eq!(world.phase(job), JobPhase::Done);
        assert_eq!(
            world.nodes[0].started,
            [RunId { job, attempt: 1 }],
            "heard: {heard}"
        );
    }
}

#[test]
fn a_node_that_says_what_cannot_be_harms_nobody() {
    let mut world = World::new(&[1, 1], Some("trial"));
    let jobs = [
        world.submit("job 1 30 f", true),
        world.submit("job 1 30", false),
    ];
    world.until("both run", 10.0, |w| {
        jobs.iter().all(|id| w.phase(*id) == JobPhase::Running)
    });
    let before = world.hook().job_views();
    for wait in [Some(-1.0), Some(f64::NAN), Some(1e300), None] {
        let ms = world.now();
        let World { hook, nodes, s, .. } = &mut world;
        let (hook, other) = (hook.as_mut().unwrap(), nodes[1].report(*s).runs);
        let mut report = nodes[0].report(*s);
        // Orders that the hook never gave, attempts of other nodes and unknown ones, their ends,
        // and saves without a request.
        report.acks = vec![
            Ack {
                seq: u64::MAX,
                error: "x".repeat(100_000),
            },
            Ack {
                seq: 0,
                error: String::new(),
            },
        ];
        report.runs.iter_mut().for_each(|run| run.saved = true);
        let ended = Some(Ended {
            code: Some(0),
            ..Ended::default()
        });
        for run in other.iter().map(|run| run.run).chain([
            RunId {
                job: 999,
                attempt: 1,
            },
            RunId {
                job: jobs[0],
                attempt: 77,
            },
        ]) {
            report.runs.push(RunReport {
                run,
                ended: ended.clone(),
                saved: true,
                ..RunReport::default()
            });
        }
        let arbiter = report.arbiter.as_mut().unwrap();
        for job in &mut arbiter.jobs {
            (job.launches, job.share_got_recent) = (u64::MAX, f64::NAN);
        }
        arbiter.uptime_ms = 0;
        report.waits = vec![
            WaitMatrix {
                uuid: "GPU-0".into(),
                free_share: f64::NAN,
                rows_bytes: vec![1, 1],
                columns_share: vec![1.0],
                wait_s: vec![vec![wait]],
                ..WaitMatrix::default()
            };
            1000
        ];
        let name = nodes[0].name.clone();
        hook.report(&name, report, ms).unwrap();
        hook.commit().unwrap();
        hook.step(ms).unwrap();
        world.tick();
    }
    let after = world.hook().job_views();
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(
            (before.phase, &before.node, before.attempts, 0),
            (after.phase, &after.node, after.attempts, after.saved)
        );
    }
    world.until("all are over", 100.0, World::over);
    for id in jobs {
        assert_eq!(world.phase(id), JobPhase::Done);
        assert_eq!(world.hook().job(id).unwrap().attempts, 1);
    }
}

#[test]
fn a_node_that_does_not_listen_is_shown_with_its_reason_and_gets_no_job() {
    let mut world = World::new(&[1], None);
    world.tick();
    let now = world.now();
    let said = |why: &str| Registration {
        api: API_MAJOR,
        refusal: why.into(),
        ..Registration::default()
    };
    let hook = world.hook();
    hook.register("n9", said("two hooks\x1b[2J on copies"), now)
        .unwrap();
    hook.register("n9", said("two hooks\x1b[2J on copies"), now)
        .unwrap();
    let node = hook.status().nodes.pop().unwrap();
    assert_eq!((node.name.as_str(), node.up), ("n9", false));
    assert_eq!(node.refusal, "two hooks [2J on copies", "shown to people");
    let lines = hook.decisions(0);
    let reported = lines.iter().filter(|line| line.text.contains("two hooks"));
    assert_eq!(reported.count(), 1, "once");
    // It takes it back by registering.
    let registration = Fake::new("n9", 1).registration();
    hook.register("n9", registration, now).unwrap();
    assert!(
        hook.status()
            .nodes
            .iter()
            .all(|node| node.refusal.is_empty())
    );
    let mut long = Fake::new("n8", 1).registration();
    long.version = "v".repeat(1 << 20);
    let error = hook.register("n8", long, now).unwrap_err().to_string();
    assert!(error.contains("too long") && error.len() < 400, "{error}");
}

#[test]
fn a_node_with_more_orders_than_one_answer_holds_gets_them_all() {
    let mut world = World::new(&[64], None);
    let blob = "x".repeat(200 << 10);
    let ids: Vec<u64> = (0..40)
        .map(|_| world.submit(&format!("job 1 3 {blob}"), false))
        .collect();
    world.until("all are done", 200.0, |world| {
        let node = world.nodes[0].name.clone();
        let now = world.now();
        let report = world.nodes[0].report(world.s);
        if world.nodes[0].known {
            let orders = world.hook().report(&node, report, now).unwrap();
            let bytes = serde_json::to_vec(&orders).unwrap().len();
            assert!(bytes < crate::live::http::MAX_BODY_BYTES, "{bytes}");
        }
        ids.iter().all(|id| world.phase(*id) == JobPhase::Done)
    });
    let record = &world.hook().jobs[&ids[0]];
    assert!(
        record.submission.command.is_empty(),
        "nothing of it will be started again"
    );
}

#[test]
fn jobs_of_other_engines_are_shown_while_their_node_reports() {
    let mut world = World::new(&[1], None);
    world.until("the node is heard", 10.0, |world| {
        world.hook().status().nodes.iter().any(|node| node.up)
    });
    let job = |name: &str, slowdown, confidence| OtherJob {
        name: name.into(),
        slowdown,
        confidence,
    };
    let good = job("slurm.7", 1.5, 0.9);
    let report = |others: Vec<OtherJob>| Report {
        instance: "n0-1".into(),
        others,
        ..Report::default()
    };
    let now = world.now();
    let said = vec![
        job("slurm.1", f64::NAN, 0.9),
        job("slurm.2", f64::INFINITY, 0.9),
        job("slurm.3", -1.0, 0.9),
        job("slurm.4", 2.0, 1.5),
        job("slurm.5\nJobId=6", 2.0, 0.9),
        good.clone(),
    ];
    world.hook().report("n0", report(said), now).unwrap();
    assert_eq!(world.hook().status().nodes[0].others, [good]);
    let many = (0..10_000).map(|at| job(&format!("slurm.{at}"), 1.0, 1.0));
    world
        .hook()
        .report("n0", report(many.collect()), now)
        .unwrap();
    assert_eq!(world.hook().status().nodes[0].others.len(), 256);
    world.nodes[0].silent = true;
    world.until("the node is silent", 60.0, |world| {
        world.hook().status().nodes.iter().all(|node| !node.up)
    });
    assert_eq!(world.hook().status().nodes[0].others, []);
}

#[test]
fn each_node_hears_of_its_own_jobs_that_are_to_be_off_its_devices() {
    let mut world = World::new(&[1, 1], None);
    world.tick();
    // As it is written: node, then names.
    let away = |jobs: &[&str]| Away {
        nodes: jobs
            .iter()
            .map(|line| {
                let (node, names) = line.split_once(' ').unwrap();
                let names = names.split(' ').map(ToOwned::to_owned).collect();
                (node.to_owned(), names)
            })
            .collect(),
    };
    let wanted_of = |world: &mut World, at: usize| {
        let (name, now) = (world.nodes[at].name.clone(), world.now());
        let report = world.nodes[at].report(1.0);
        world.hook().report(&name, report, now).unwrap().away
    };
    assert_eq!(wanted_of(&mut world, 0), None, "nobody has said anything");

    let first = away(&["n0 slurm.7 slurm.8", "elsewhere slurm.9"]);
    assert_eq!(world.hook().keep_away(first.clone()).unwrap(), first);
    let of_n0 = Some(vec!["slurm.7".to_owned(), "slurm.8".to_owned()]);
    assert_eq!(wanted_of(&mut world, 0), of_n0);
    assert_eq!(wanted_of(&mut world, 1), Some(Vec::new()));

    // What is refused changes nothing.
    let many: Vec<String> = (0..=MAX_OTHERS).map(|at| format!("slurm.{at}")).collect();
    let many = Away {
        nodes: BTreeMap::from([("n0".to_owned(), many)]),
    };
    let crowd = Away {
        nodes: (0..2000).map(|at| (format!("n{at}"), Vec::new())).collect(),
    };
    let bad = ["job-1", "slurm.", "slurm.7\n", "../slurm.7", ""];
    let bad = bad.map(|name| away(&[&format!("n1 slurm.1 {name}")]));
    for refused in bad.into_iter().chain([many, crowd]) {
        let said = world.hook().keep_away(refused.clone());
        assert!(said.is_err(), "{refused:?}");
        assert_eq!(wanted_of(&mut world, 0), of_n0);
    }

    world.hook().keep_away(away(&[])).unwrap();
    assert_eq!(wanted_of(&mut world, 0), Some(Vec::new()), "all come back");

    // Who says it says it again: until then nothing moves.
    world.hook().keep_away(first).unwrap();
    world.kill();
    world.tick();
    assert_eq!(wanted_of(&mut world, 0), None);
}
