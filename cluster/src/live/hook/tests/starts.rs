//! Nodes on which jobs do not start, and jobs that start nowhere.

use super::*;

/// What a node or a job is wrong with.
const WORDS: &str = "/mnt/data: no such directory";

impl World {
    /// Attempts on a node come to nothing, as `ended` says of each.
    fn spoil(&mut self, node: usize, ended: impl Fn(&Attempt) -> Option<Ended>) {
        for attempt in self.nodes[node].runs.values_mut() {
            if attempt.ended.is_none() {
                attempt.ended = ended(attempt);
            }
        }
    }

    fn until_with(
        &mut self,
        what: &str,
        most_s: f64,
        mut each: impl FnMut(&mut Self),
        done: impl Fn(&mut Self) -> bool,
    ) {
        let end = self.s + most_s;
        while !done(self) {
            assert!(self.s < end, "{what}: {:#?}", self.hook().decisions(0));
            each(self);
            self.tick();
        }
    }

    fn submit_many(&mut self, count: usize, command: &str) -> Vec<u64> {
        (0..count).map(|_| self.submit(command, false)).collect()
    }

    fn node(&mut self, node: &str) -> crate::live::wire::NodeView {
        let nodes = self.hook().status().nodes;
        nodes.into_iter().find(|view| view.name == node).unwrap()
    }

    fn is_shut(&mut self, node: &str) -> bool {
        !self.node(node).shut.is_empty()
    }

    fn logged(&mut self, words: &str) -> usize {
        let lines = self.hook().decisions(0);
        let lines = lines.iter();
        lines.filter(|line| line.text.contains(words)).count()
    }
}

fn never() -> Ended {
    Ended {
        never_started: true,
        words: WORDS.into(),
        ..Ended::default()
    }
}

fn code(code: i32) -> Ended {
    Ended {
        code: Some(code),
        words: "CUDA_ERROR_NO_DEVICE".into(),
        ..Ended::default()
    }
}

/// Two nodes of one GPU: the first is broken.
fn broken(ended: fn(&Attempt) -> Option<Ended>) -> (World, impl FnMut(&mut World)) {
    let mut world = World::new(&[1, 1], None);
    world.until("both nodes are heard", 10.0, |world| {
        world
            .hook()
            .status()
            .nodes
            .iter()
            .filter(|one| one.up)
            .count()
            == 2
    });
    (world, move |world: &mut World| world.spoil(0, ended))
}

#[test]
fn a_node_on_which_no_job_starts_does_not_fail_the_queue() {
    for restartable in [false, true] {
        let (mut world, each) = broken(|_| Some(never()));
        let ids: Vec<u64> = (0..12)
            .map(|_| world.submit("job 1 3", restartable))
            .collect();
        world.until_with("all are over", 600.0, each, World::over);
        for id in &ids {
            let job = world.hook().job(*id).unwrap();
            assert_eq!(job.phase, JobPhase::Done, "{job:?}");
        }
        assert!(world.nodes[0].started.len() < ids.len());
        let view = world.node("n0");
        assert!(view.up && view.shut.contains(WORDS), "{view:?}");
        assert!(view.failed_starts >= 3, "{view:?}");
        assert_eq!(world.logged("n0 gets no new jobs"), 1, "once");
        assert!(!world.is_shut("n1"));
    }
}

#[test]
fn a_node_whose_jobs_fail_within_moments_gets_no_more_after_a_few() {
    let (mut world, each) = broken(|_| Some(code(1)));
    let ids: Vec<u64> = (0..12)
        .map(|at| world.submit(&format!("job 1 3 f kind{at}"), false))
        .collect();
    world.until_with("all are over", 600.0, each, World::over);
    // Each might have done something: none is started twice. Three shut the node, and each try
    // costs one.
    let failed = ids
        .iter()
        .filter(|id| world.phase(**id) == JobPhase::Failed);
    let failed = failed.count();
    assert!((3..=5).contains(&failed), "{failed}");
    assert!(world.is_shut("n0") && !world.is_shut("n1"));
    assert!(world.hook().job_views().iter().all(|job| job.attempts == 1));
}

#[test]
fn a_restartable_job_that_fails_within_moments_is_tried_on_one_other_node() {
    let (mut world, each) = broken(|_| Some(code(1)));
    let ids: Vec<u64> = (0..6)
        .map(|at| world.submit(&format!("job 1 3 f kind{at}"), true))
        .collect();
    world.until_with("all are over", 600.0, each, World::over);
    for id in &ids {
        assert_eq!(world.phase(*id), JobPhase::Done);
    }
    // Wherever it fails the same way, it is the job.
    let bad = world.submit("job 1 60 f bad", true);
    let fail = |world: &mut World| {
        for node in 0..2 {
            world.spoil(node, |_| Some(code(1)));
        }
    };
    let now = world.now();
    world.hook().retry("n0", now).unwrap();
    world.until_with("it is given up", 600.0, fail, World::over);
    let job = world.hook().job(bad).unwrap();
    assert_eq!(job.phase, JobPhase::Failed);
    assert!(
        job.attempts <= 2 && job.reason.contains("exit code 1"),
        "{job:?}"
    );
}

#[test]
fn a_missing_program_is_a_start_that_failed_and_not_the_end_of_the_job() {
    let (mut world, each) = broken(|_| {
        Some(Ended {
            code: Some(127),
            words: "sublet: command `job` not found: give its path".into(),
            ..Ended::default()
        })
    });
    let ids: Vec<u64> = (0..6).map(|_| world.submit("job 1 3", false)).collect();
    world.until_with("all are over", 600.0, each, World::over);
    for id in ids {
        let job = world.hook().job(id).unwrap();
        assert_eq!(job.phase, JobPhase::Done, "{job:?}");
    }
    assert!(world.is_shut("n0"));
}

#[test]
fn attempts_that_vanish_at_once_shut_a_node_and_are_bounded() {
    let (mut world, each) = broken(|_| {
        Some(Ended {
            words: "exit.json: no space left on device".into(),
            ..Ended::default()
        })
    });
    let ids: Vec<u64> = (0..6).map(|_| world.submit("job 1 3 f", true)).collect();
    world.until_with("all are over", 600.0, each, World::over);
    for id in ids {
        let job = world.hook().job(id).unwrap();
        assert!(job.phase == JobPhase::Done && job.attempts <= 5, "{job:?}");
    }
}

#[test]
fn a_job_that_failed_to_start_waits_for_another_node_than_that_one() {
    let (mut world, mut each) = broken(|_| Some(never()));
    let first = world.submit("job 1 30", false);
    let second = world.submit("job 1 5", false);
    world.until_with("one runs", 30.0, &mut each, |world| {
        world.nodes[1].alive().next().is_some()
    });
    world.until_with("all are over", 200.0, each, World::over);
    for id in [first, second] {
        let job = world.hook().job(id).unwrap();
        assert!(job.phase == JobPhase::Done && job.attempts <= 2, "{job:?}");
    }
    assert!(!world.is_shut("n0"), "one or two jobs are too few");
}

#[test]
fn a_shut_node_is_tried_with_one_job_after_a_growing_pause_and_comes_back() {
    let mut world = World::new(&[4, 1], None);
    let each = |world: &mut World| world.spoil(0, |_| Some(never()));
    world.until("both nodes are heard", 10.0, |world| {
        world
            .hook()
            .status()
            .nodes
            .iter()
            .filter(|one| one.up)
            .count()
            == 2
    });
    world.submit_many(40, "job 1 1000");
    world.until_with("it is shut", 60.0, each, |world| world.is_shut("n0"));
    let tries = |world: &mut World| world.logged("n0 is tried with it");
    let mut at_s = Vec::new();
    for round in 1..5 {
        world.until_with("it is tried", 200.0, each, |world| tries(world) == round);
        at_s.push(world.s);
        assert!(world.node("n0").jobs.len() <= 1, "with one job");
    }
    let pauses: Vec<f64> = at_s.windows(2).map(|two| two[1] - two[0]).collect();
    assert!(
        pauses.windows(2).all(|two| two[1] > 1.5 * two[0]),
        "{pauses:?}"
    );
    // It is mended while the last one tries it.
    world.until("it gets jobs again", 60.0, |world| !world.is_shut("n0"));
    world.until("all its GPUs are used", 20.0, |world| {
        world.nodes[0].alive().count() == 4
    });
    assert_eq!(world.logged("n0 gets jobs again"), 1);
    let failed = world.hook().job_views();
    assert!(failed.iter().all(|job| job.phase != JobPhase::Failed));
}

#[test]
fn jobs_that_start_nowhere_leave_nodes_in_use_and_clear_them() {
    for ended in [|| never(), || code(1)] {
        let mut world = World::new(&[1, 1, 1, 1], None);
        let each = |world: &mut World| {
            for node in 0..4 {
                let is_bad = |attempt: &Attempt| attempt.name.starts_with("bad");
                world.spoil(node, |attempt| is_bad(attempt).then(ended));
            }
        };
        let submit = |world: &mut World, name: &str, command: &str| {
            let asked = Submission {
                name: name.into(),
                command: command.split(' ').map(str::to_owned).collect(),
                kind: "k".into(),
                ..Submission::default()
            };
            let now = world.now();
            world.hook().submit(asked, now).unwrap().0.id
        };
        let bad: Vec<u64> = (0..12)
            .map(|_| submit(&mut world, "bad", "job 1 3"))
            .collect();
        let good = submit(&mut world, "good", "job 1 3");
        let mut most = 0;
        let each = |world: &mut World| {
            each(world);
            let nodes = world.hook().status().nodes;
            most = most.max(nodes.iter().filter(|view| !view.shut.is_empty()).count());
        };
        world.until_with("all are over", 900.0, each, World::over);
        assert!(most <= 2, "{most} of 4 nodes were out of use at once");
        for id in bad {
            assert_eq!(world.phase(id), JobPhase::Failed);
        }
        assert_eq!(world.phase(good), JobPhase::Done);
        for node in ["n0", "n1", "n2", "n3"] {
            let view = world.node(node);
            assert!(view.shut.is_empty() && view.failed_starts < 3, "{view:?}");
        }
    }
}

#[test]
fn a_job_that_starts_on_no_node_fails_with_the_nodes_and_the_reason() {
    let mut world = World::new(&[1, 1, 1], None);
    let id = world.submit("job 1 5", false);
    let each = |world: &mut World| (0..3).for_each(|node| world.spoil(node, |_| Some(never())));
    world.until_with("it is given up", 120.0, each, World::over);
    let job = world.hook().job(id).unwrap();
    assert_eq!((job.phase, job.attempts), (JobPhase::Failed, 5));
    for words in ["n0", "n1", "n2", WORDS] {
        assert!(job.reason.contains(words), "{job:?}");
    }
    for node in ["n0", "n1", "n2"] {
        assert_eq!(world.node(node).failed_starts, 0, "they are cleared of it");
    }
}

#[test]
fn one_job_that_fails_again_and_again_is_no_reason_to_shut_a_node() {
    let (mut world, _) = broken(|_| None);
    let id = world.submit("job 1 5", false);
    let each = |world: &mut World| (0..2).for_each(|node| world.spoil(node, |_| Some(never())));
    world.until_with("it is given up", 120.0, each, World::over);
    assert_eq!(world.phase(id), JobPhase::Failed);
    assert_eq!(world.logged("gets no new jobs"), 0);
}

#[test]
fn a_shut_node_keeps_what_runs_there() {
    for packer in [None, Some("trial")] {
        let mut world = World::new(&[2, 2], packer);
        world.until("both nodes are heard", 10.0, |world| {
            let nodes = world.hook().status().nodes;
            nodes.iter().filter(|one| one.up).count() == 2
        });
        let long = world.submit("job 0.3 400", false);
        world.until("it runs", 60.0, |world| {
            world.phase(long) == JobPhase::Running
        });
        let on = usize::from(world.nodes[0].alive().next().is_none());
        let node = world.nodes[on].name.clone();
        let each = |world: &mut World| {
            let own = format!(".{long}.");
            world.spoil(on, |attempt| (!attempt.name.contains(&own)).then(never));
        };
        world.submit_many(20, "job 0.3 20");
        world.until_with("it is shut", 200.0, each, |world| world.is_shut(&node));
        let before = world.nodes[on].started.len();
        world.until_with("all are over", 900.0, each, World::over);
        // Beside it nothing starts either.
        let tries = world.logged("is tried with it");
        assert_eq!(world.nodes[on].started.len() - before, tries, "{packer:?}");
        let jobs = world.hook().job_views();
        assert!(
            jobs.iter().all(|job| job.phase == JobPhase::Done),
            "{jobs:?}"
        );
        assert_eq!(world.hook().job(long).unwrap().attempts, 1);
    }
}

#[test]
fn the_hooks_own_stops_and_nodes_given_up_are_no_failed_starts() {
    let mut world = World::new(&[1, 1], None);
    let ids: Vec<u64> = (0..4).map(|_| world.submit("job 1 500 f", true)).collect();
    world.until("two run", 20.0, |world| {
        world.nodes.iter().all(|node| node.alive().next().is_some())
    });
    for id in ids {
        let now = world.now();
        world.hook().cancel(id, now).unwrap();
        (0..6).for_each(|_| world.tick());
    }
    world.until("all are over", 60.0, World::over);
    assert_eq!(
        world.node("n0").failed_starts + world.node("n1").failed_starts,
        0
    );
    let id = world.submit("job 1 500 f", true);
    for boot in 0..6 {
        world.until("it runs", 60.0, |world| {
            world.phase(id) == JobPhase::Running
        });
        let on = usize::from(world.nodes[0].alive().next().is_none());
        let node = &mut world.nodes[on];
        (node.boot, node.instance) = (format!("c{boot}"), format!("{}-c{boot}", node.name));
        node.runs.clear();
        node.acks.clear();
        (node.known, node.applied) = (false, 0);
        world.tick();
    }
    assert_eq!(
        world.node("n0").failed_starts + world.node("n1").failed_starts,
        0
    );
    assert!(!world.phase(id).is_over());
}

#[test]
fn a_shut_node_stays_shut_over_a_restart_of_the_hook_and_is_tried_when_it_registers() {
    let (mut world, mut each) = broken(|_| Some(never()));
    world.submit_many(30, "job 1 1000");
    world.until_with("it is shut", 60.0, &mut each, |world| world.is_shut("n0"));
    let tries = |world: &mut World| world.logged("n0 is tried with it");
    world.until_with("its pause is long", 600.0, &mut each, |world| {
        let left_s = world.node("n0").tried_in_s;
        left_s.is_some_and(|left_s| left_s > 60.0)
    });
    let before = tries(&mut world);
    let left_s = world.node("n0").tried_in_s.unwrap();
    assert!(left_s > 60.0, "{left_s}");
    world.hook = None;
    world.hook = Some(open(world.dir.path(), &world.config, world.s, 0));
    let view = world.node("n0");
    assert!(
        view.shut.contains(WORDS) && view.tried_in_s.is_some(),
        "{view:?}"
    );
    world.nodes[0].known = false;
    let from_s = world.s;
    world.until("it is tried", 60.0, |world| tries(world) > before);
    assert!(world.s - from_s < 20.0, "{}", world.s - from_s);
    world.until("it is back", 60.0, |world| !world.is_shut("n0"));
}

#[test]
fn an_agent_that_registers_again_and_again_gets_no_more_jobs_by_that() {
    let (mut world, mut each) = broken(|_| Some(never()));
    world.submit_many(30, "job 1 1000");
    world.until_with("it is shut", 60.0, &mut each, |world| world.is_shut("n0"));
    let (before, from_s) = (world.nodes[0].started.len(), world.s);
    let anew = |world: &mut World| {
        each(world);
        world.nodes[0].known = false;
    };
    world.until_with("a minute", 100.0, anew, |world| world.s >= from_s + 60.0);
    let more = world.nodes[0].started.len() - before;
    assert!(more <= 6, "{more} starts in a minute");
}

#[test]
fn an_operator_has_a_node_tried_at_once() {
    let (mut world, mut each) = broken(|_| Some(never()));
    world.submit_many(30, "job 1 1000");
    world.until_with("it is shut", 60.0, &mut each, |world| world.is_shut("n0"));
    world.until_with("its pause is long", 600.0, &mut each, |world| {
        world
            .node("n0")
            .tried_in_s
            .is_some_and(|left_s| left_s > 60.0)
    });
    let now = world.now();
    let view = world.hook().retry("n0", now).unwrap();
    assert_eq!(view.tried_in_s, None, "the next job tries it");
    let from_s = world.s;
    world.until("it is back", 60.0, |world| !world.is_shut("n0"));
    assert!(world.s - from_s < 40.0);
    let error = world.hook().retry("nobody", now).unwrap_err().to_string();
    assert!(error.contains("nobody"), "{error}");
}

#[test]
fn a_start_that_works_begins_the_count_anew() {
    let (mut world, _) = broken(|_| None);
    let each = |world: &mut World| {
        for node in 0..2 {
            world.spoil(node, |attempt| attempt.name.starts_with("bad").then(never));
        }
    };
    let submit = |world: &mut World, name: &str| {
        let asked = Submission {
            name: name.into(),
            command: ["job", "1", "2"].map(str::to_owned).to_vec(),
            ..Submission::default()
        };
        let now = world.now();
        world.hook().submit(asked, now).unwrap().0.id
    };
    let counted = |world: &mut World| {
        let nodes = world.hook().status().nodes;
        nodes.iter().map(|node| node.failed_starts).sum::<u64>()
    };
    for round in 0..6 {
        let bad = submit(&mut world, "bad");
        world.until_with("it counts", 60.0, each, |world| counted(world) == 1);
        let now = world.now();
        world.hook().cancel(bad, now).unwrap();
        // One for each node.
        let _ = [0, 1].map(|_| submit(&mut world, "good"));
        world.until_with("they are over", 60.0, each, World::over);
        assert_eq!(counted(&mut world), 0, "round {round}");
    }
    assert_eq!(world.logged("gets no new jobs"), 0);
}

#[test]
fn engines_that_ask_are_not_sent_to_a_node_while_its_pause_lasts() {
    use crate::live::placement::{Candidate, DecideRequest, JobProfile};
    let (mut world, mut each) = broken(|_| Some(never()));
    world.submit_many(30, "job 1 1000");
    world.until_with("it is shut", 60.0, &mut each, |world| world.is_shut("n0"));
    let asked = DecideRequest {
        job: JobProfile {
            id: "slurm.7".into(),
            ..JobProfile::default()
        },
        candidates: vec![Candidate {
            node: "n0".into(),
            uuid: "GPU-0".into(),
            ..Candidate::default()
        }],
    };
    let decided = world.hook().decide_for(&asked).unwrap();
    assert!(
        decided.node.is_empty() && decided.unfit[0].reason.contains(WORDS),
        "{decided:?}"
    );
    // It is not the hook's jobs alone that can show that it was mended.
    let now = world.now();
    world.hook().retry("n0", now).unwrap();
    assert_eq!(world.hook().decide_for(&asked).unwrap().node, "n0");
}
