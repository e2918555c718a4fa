//! What past jobs were given, and the order that goes by it.

use super::*;
use crate::live::adapt::LEAST_PAST_JOBS;
use crate::live::records::Service;

/// Jobs that were done earlier, of one user, with these GPU times.
fn done(world: &mut World, user: &str, times: impl Iterator<Item = f64>) {
    for gpu_s in times {
        let hook = world.hook.as_mut().unwrap();
        let id = hook.store.meta.next_job;
        hook.store.meta.next_job += 1;
        let mut record = JobRecord {
            id,
            gpu_s,
            ..JobRecord::default()
        };
        record.submission.user = user.into();
        hook.jobs.insert(id, record);
        hook.over(id, JobPhase::Done, Some(0), String::new());
    }
    world.hook().commit().unwrap();
}

fn of(world: &World, user: &str) -> usize {
    let all = world.hook.as_ref().unwrap().services.values();
    all.filter(|service| service.user == user).count()
}

fn reopen(world: &mut World, order: &str) -> Result<Hook, OpenError> {
    world.hook = None;
    world.config.choice.order = Some(order.into());
    world.config.choice.packer = None;
    let boottime_ms = (world.s * 1000.0) as u64;
    let reading = Reading {
        unix_ms: BEGIN_MS + boottime_ms,
        boottime_ms,
        boot: "b".into(),
    };
    Hook::open(world.dir.path(), world.config.clone(), reading)
}

#[test]
fn the_gittins_order_is_refused_without_past_jobs_and_goes_by_those_that_ended_here() {
    let mut world = World::new(&[1], None);
    let why = reopen(&mut world, "gittins").unwrap_err().to_string();
    for words in ["`gittins` needs", "20 of them", "2d-las", "--state"] {
        assert!(why.contains(words), "{words}: {why}");
    }
    // Half take 5 s, half take 60 s, in the simulated cluster.
    world.config.choice.order = Some("fifo-backfill".into());
    world.kill();
    let ids: Vec<u64> = (0..LEAST_PAST_JOBS)
        .map(|at| world.submit(&format!("job 1 {}", [5, 60][at % 2]), false))
        .collect();
    world.until("nearly all are done", 2000.0, |world| {
        world.hook().status().past_jobs == LEAST_PAST_JOBS as u64 - 1
    });
    assert!(reopen(&mut world, "gittins").is_err(), "one is missing");
    world.config.choice.order = Some("fifo-backfill".into());
    world.kill();
    world.until("all are done", 2000.0, World::over);
    assert_eq!(ids.len() as u64, world.hook().status().past_jobs);
    for (order, first_stops) in [("2d-las", false), ("gittins", true)] {
        world.hook = Some(reopen(&mut world, order).unwrap());
        world.nodes.iter_mut().for_each(|node| node.known = false);
        let first = world.submit("job 1 60 f", true);
        world.until("it has had more than the short ones take", 60.0, |world| {
            let files = world.files.get(&first).copied();
            files.is_some_and(|left| left < 48.0)
        });
        // Of a new one half end within 5 s; the old one will take 60 in all.
        let second = world.submit("job 1 5 f", true);
        world.until("one is done", 200.0, |world| {
            world.phase(first).is_over() || world.phase(second).is_over()
        });
        assert_eq!(world.phase(second).is_over(), first_stops, "{order}");
        world.until("both are done", 200.0, World::over);
    }
    // Those two ended as well, and count now: for hooks to come, too.
    assert_eq!(world.hook().status().past_jobs, LEAST_PAST_JOBS as u64 + 4);
    world.kill();
    assert_eq!(world.hook().status().past_jobs, LEAST_PAST_JOBS as u64 + 4);
}

#[test]
fn one_user_s_many_jobs_push_out_nobody_else_s() {
    let mut world = World::new(&[1], None);
    done(&mut world, "a", (0..100).map(|at| 1000.0 + f64::from(at)));
    done(&mut world, "flood", (0..3000).map(|_| 0.1));
    assert_eq!((of(&world, "a"), of(&world, "flood")), (100, 924));
    world.kill();
    assert_eq!((of(&world, "a"), of(&world, "flood")), (100, 924));
    // Jobs that failed or were taken back say nothing about how long jobs take, nor do clocks that
    // were wrong.
    done(
        &mut world,
        "a",
        [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300].into_iter(),
    );
    assert_eq!(of(&world, "a"), 100);
    let id = world.submit("job 1 1000", false);
    let now = world.now();
    world.hook().cancel(id, now).unwrap();
    assert_eq!(world.hook().services.len(), 1024);
}

#[test]
fn old_ones_are_forgotten_but_never_so_many_that_nothing_is_known() {
    let mut world = World::new(&[1], None);
    done(&mut world, "a", (0..30).map(|_| 10.0));
    world.s += 100.0 * 86_400.0;
    world.tick();
    done(&mut world, "a", (0..5).map(|_| 20.0));
    world.s += 100.0 * 86_400.0;
    world.tick();
    done(&mut world, "a", [30.0].into_iter());
    let services: Vec<Service> = world.hook().services.values().cloned().collect();
    assert_eq!(services.len(), LEAST_PAST_JOBS, "{services:?}");
    let with = |gpu_s: f64| services.iter().filter(|one| one.gpu_s == gpu_s).count();
    assert_eq!([with(10.0), with(20.0), with(30.0)], [14, 5, 1]);
    world.kill();
    assert_eq!(world.hook().services.len(), LEAST_PAST_JOBS);
}

#[test]
fn what_a_job_was_given_while_no_hook_was_there_counts() {
    let mut world = World::new(&[1], None);
    let id = world.submit("job 1 1e6", false);
    world.until("it runs", 20.0, |world| {
        world.phase(id) == JobPhase::Running
    });
    for _ in 0..200 {
        world.tick();
    }
    world.hook = None;
    world.s += 1000.0;
    world.kill();
    world.tick();
    let hook = world.hook();
    let at = hook.live[&id];
    let service = hook.state.job(at).service_gpu_s(hook.now_s);
    assert!((1095.0..1105.0).contains(&service), "{service}");
}
