//! The hook itself: killed at any moment, and asked for policies that there are not.

use super::*;

#[test]
fn a_hook_that_is_killed_at_any_moment_loses_no_job_and_starts_none_twice() {
    for seed in 0..3 {
        let mut random = Random::new(seed);
        let mut world = World::new(&[1, 2], Some("trial"));
        let mut ids = Vec::new();
        for at in 0..14 {
            let busy = ["1", "0.3"][random.below(2)];
            ids.push(world.submit(
                &format!("job {busy} {} f", 3 + random.below(12)),
                at % 2 == 0,
            ));
            for _ in 0..random.below(4) {
                world.tick();
            }
            if random.below(3) == 0 {
                world.kill();
            }
        }
        for _ in 0..120 {
            if random.below(6) == 0 {
                world.kill();
            }
            world.tick();
        }
        world.until("all are over", 400.0, World::over);
        for id in ids {
            assert_eq!(world.phase(id), JobPhase::Done, "seed {seed}, job {id}");
        }
        for node in &world.nodes {
            let mut attempts = node.started.clone();
            attempts.sort_unstable();
            attempts.dedup();
            assert_eq!(attempts.len(), node.started.len(), "seed {seed}");
        }
    }
}

#[test]
fn unknown_policies_are_refused_with_what_was_meant() {
    let dir = tempfile::tempdir().unwrap();
    let with = |change: &dyn Fn(&mut Choice)| {
        let mut config = Config::default();
        change(&mut config.choice);
        Hook::open(dir.path(), config, 1).unwrap_err().to_string()
    };
    assert!(
        with(&|choice| choice.order = Some("fifo-backfil".into()))
            .contains("did you mean `fifo-backfill`")
    );
    assert!(with(&|choice| choice.packer = Some("tral".into())).contains("did you mean `trial`"));
    assert!(
        with(&|choice| choice.packer = Some("trial:margn=1".into()))
            .contains("did you mean `margin`")
    );
    assert!(
        !dir.path().join("hook.redb").exists(),
        "nothing was made for it"
    );
}

#[test]
fn a_wall_clock_that_is_set_back_holds_nobody_up_over_a_restart_either() {
    let mut world = World::new(&[1], None);
    let first = world.submit("job 1 5", false);
    world.until("the first runs", 10.0, |world| {
        world.phase(first) == JobPhase::Running
    });
    for restart in [false, true] {
        world.set_back_ms += BEGIN_MS / 4;
        if restart {
            world.kill();
        }
        let id = world.submit("job 1 3", false);
        world.until("it is done", 30.0, |world| {
            world.phase(id) == JobPhase::Done
        });
        let job = world.hook().job(id).unwrap();
        let (came, ended) = (job.submitted_unix_ms, job.ended_unix_ms.unwrap());
        let now = world.now();
        assert!(
            came < ended && ended <= now.unix_ms,
            "{came} {ended} {now:?}"
        );
        // A node that falls silent is seen to.
        world.nodes[0].silent = true;
        world.until("it is silent", 30.0, |world| {
            !world.hook().status().nodes[0].up
        });
        world.nodes[0].silent = false;
        world.until("it is back", 30.0, |world| {
            world.hook().status().nodes[0].up
        });
    }
}
