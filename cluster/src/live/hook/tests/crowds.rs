//! More than two jobs on a device: under a packer, and by the parts that they ask for.

use super::*;
use crate::live::wire::JobView;

impl World {
    /// A job that asks for a part of a device.
    fn part(&mut self, command: &str, share: f64, gib: u64) -> Result<u64, ControlError> {
        let now = self.now();
        let command: Vec<String> = command.split(' ').map(str::to_owned).collect();
        let asked = Submission {
            kind: command[..2].join(" "),
            command,
            share: Some(share),
            mem_bytes: Some(gib << 30),
            ..Submission::default()
        };
        let taken = self.hook().submit(asked, now);
        self.hook().commit().unwrap();
        taken.map(|(view, _)| view.id)
    }

    /// Jobs that have a process on each device, by the nodes' own word.
    fn on_devices(&self) -> BTreeMap<(String, String), Vec<u64>> {
        let mut all: BTreeMap<(String, String), Vec<u64>> = BTreeMap::new();
        for node in &self.nodes {
            for (run, attempt) in node.alive().filter(|(_, one)| !one.terms.paused) {
                for device in &attempt.devices {
                    let key = (node.name.clone(), device.clone());
                    all.entry(key).or_default().push(run.job);
                }
            }
        }
        all
    }

    fn most_on_a_device(&self) -> usize {
        self.on_devices().values().map(Vec::len).max().unwrap_or(0)
    }

    /// What is promised on a device adds up to no more than it, as its arbiter would have it.
    fn promises_are_kept(&self) {
        for node in &self.nodes {
            let mut promised: BTreeMap<&str, f64> = BTreeMap::new();
            for (_, one) in node.alive().filter(|(_, one)| !one.terms.paused) {
                for device in &one.devices {
                    *promised.entry(device).or_default() += one.terms.share.unwrap_or(0.0);
                }
            }
            for (device, share) in promised {
                // One that leaves has its share until it has ended.
                assert!(share <= 1.51, "{share} of {device} at {} s", self.s);
            }
        }
    }

    fn view(&mut self, id: u64) -> JobView {
        self.hook().job(id).unwrap()
    }

    fn said(&mut self, words: &str) -> usize {
        let log = self.hook().decisions(0);
        log.iter().filter(|line| line.text.contains(words)).count()
    }
}

#[test]
fn three_jobs_share_a_device_once_their_pair_was_measured_and_no_pair_learns_from_them() {
    let mut world = World::new(&[1], Some("trial:jobs=3"));
    let ids: Vec<u64> = (0..5).map(|_| world.submit("job 0.3 90", false)).collect();
    world.until("three run beside each other", 120.0, |world| {
        world.most_on_a_device() == 3
    });
    let pairs = world.hook().status().pairs;
    assert_eq!(pairs.len(), 1, "measured before the third came: {pairs:?}");
    world.until("the three are measured", 60.0, |world| {
        world.said("they stay") == 1
    });
    let view = world.view(ids[0]);
    assert_eq!(view.beside_all, [ids[1], ids[2]]);
    assert_eq!(view.beside, Some(ids[1]));
    assert!((view.share - 1.0 / 3.0).abs() < 1e-9, "{view:?}");
    let rates = world.hook().status().pairs[0].rates;
    assert_eq!(rates, pairs[0].rates, "three are no pair");
    let crowd = world.hook().crowds.values().next().unwrap().clone();
    assert_eq!((crowd.kinds.len(), crowd.rates.len()), (3, 3));
    assert!(crowd.rates.iter().all(|rate| *rate > 0.9), "{crowd:?}");
    world.until("all are over", 600.0, |world| {
        assert!(world.most_on_a_device() <= 3, "{:?}", world.on_devices());
        world.promises_are_kept();
        world.over()
    });
    for id in ids {
        assert_eq!(world.phase(id), JobPhase::Done);
    }
}

#[test]
fn the_one_that_came_last_leaves_on_that_node_alone_and_a_kill_keeps_that() {
    let mut world = World::new(&[1], Some("trial:jobs=3"));
    // Two that ask for 0.9 of the device together, and a third with which they ask for 1.35.
    let ids: Vec<u64> = (0..3)
        .map(|_| world.submit("job 0.45 200 f", true))
        .collect();
    world.until("three run beside each other", 120.0, |world| {
        world.most_on_a_device() == 3
    });
    // As if they got on worse than their pairs say.
    world.nodes[0].lies_of_pairs = 0.6;
    world.until("one leaves", 60.0, |world| {
        world.said("the one that came last leaves") == 1
    });
    world.nodes[0].lies_of_pairs = 1.0;
    world.until("two are left", 20.0, |world| world.most_on_a_device() == 2);
    for _ in 0..20 {
        world.tick();
    }
    let there = world.on_devices();
    assert_eq!(there.values().next().unwrap(), &ids[..2], "{there:?}");
    assert_eq!(world.said("3 together run at"), 1, "why it went");
    let bars = |world: &mut World| world.hook().shared.facts().barred_several.len();
    assert_eq!(bars(&mut world), 1);
    assert!(
        !world.hook().status().pairs[0].refused,
        "the pair is a good one"
    );
    world.kill();
    world.until("the node is back", 10.0, |world| world.nodes[0].known);
    for _ in 0..30 {
        world.tick();
        assert!(
            world.most_on_a_device() <= 2,
            "such three are not tried there again"
        );
    }
    assert_eq!(bars(&mut world), 1);
    // On another node nobody has measured them.
    world.nodes.push(Fake::new("n1", 1));
    let more: Vec<u64> = (0..4)
        .map(|_| world.submit("job 0.45 100 f", true))
        .collect();
    world.until("three on the other node", 200.0, |world| {
        let there = world.on_devices();
        there
            .iter()
            .any(|((node, _), jobs)| node == "n1" && jobs.len() == 3)
    });
    world.until("all are over", 2000.0, World::over);
    assert_eq!(world.phase(more[3]), JobPhase::Done);
}

#[test]
fn hooks_that_are_killed_again_and_again_keep_who_came_first() {
    let mut world = World::new(&[1, 1], Some("util-sum:jobs=4"));
    world.nodes.iter_mut().for_each(|node| node.meters = true);
    let mut ids: Vec<u64> = (0..2).map(|_| world.submit("job 0.2 60", false)).collect();
    world.until("the kind is known", 60.0, |world| {
        !world.hook().solos.is_empty()
    });
    let mut random = Random::new(11);
    ids.extend((0..10).map(|_| world.submit("job 0.2 60", false)));
    let mut crowded = 0;
    let order = |world: &mut World| -> Vec<Vec<u64>> {
        let hook = world.hook();
        let gpus = 0..hook.state.gpus();
        let on = |gpu| hook.state.residents(policy::cluster::GpuId(gpu));
        let number = |at: JobId| hook.numbers[at.0 as usize];
        gpus.map(|gpu| on(gpu).map(number).collect()).collect()
    };
    for _ in 0..600 {
        world.tick();
        world.promises_are_kept();
        assert!(world.most_on_a_device() <= 4, "{:?}", world.on_devices());
        crowded += usize::from(world.most_on_a_device() > 2);
        if random.below(6) == 0 {
            let before = order(&mut world);
            world.kill();
            assert_eq!(order(&mut world), before, "at {} s", world.s);
        }
        if world.over() {
            break;
        }
    }
    assert!(crowded > 20, "{crowded}");
    world.until("all are over", 600.0, World::over);
    for id in ids {
        let view = world.view(id);
        assert_eq!((view.phase, view.attempts), (JobPhase::Done, 1), "{view:?}");
    }
}

#[test]
fn a_lower_bound_after_a_restart_sends_away_those_that_came_last() {
    let mut world = World::new(&[1], Some("util-sum:jobs=4"));
    world.nodes[0].meters = true;
    world.submit("job 0.2 200 f", true);
    world.until("the kind is known", 60.0, |world| {
        !world.hook().solos.is_empty()
    });
    let more: Vec<u64> = (0..3)
        .map(|_| world.submit("job 0.2 100 f", true))
        .collect();
    world.until("four are there", 60.0, |world| {
        world.most_on_a_device() == 4
    });
    world.config.choice.packer = Some("util-sum".into());
    world.kill();
    world.until("two are left", 60.0, |world| world.most_on_a_device() == 2);
    let there = world.on_devices();
    assert_eq!(there.values().next().unwrap()[1], more[0], "{there:?}");
    world.until("all are over", 1000.0, World::over);
}

#[test]
fn records_of_an_earlier_hook_are_read() {
    use crate::live::records::{JobRecord, RunRecord};
    // As it wrote them: no share, no rank.
    let run = r#"{"attempt":1,"node":"n","devices":["GPU-0"],"joiner":true,"suspended":false}"#;
    let run: RunRecord = serde_json::from_str(run).unwrap();
    assert_eq!((run.joiner, run.rank), (true, 0));
    let job = r#"{"id":7,"submission":{"command":["a"],"gpus":1,"mem_bytes":5}}"#;
    let job: JobRecord = serde_json::from_str(job).unwrap();
    assert_eq!(
        (job.submission.share, job.submission.mem_bytes),
        (None, Some(5))
    );
    // And a hook of today on its own: those that joined come after their host, whatever their
    // number.
    let mut world = World::new(&[1], Some("trial"));
    let first = world.submit("job 0.3 100", false);
    let second = world.submit("job 0.3 100", false);
    world.until("both run", 60.0, |world| world.most_on_a_device() == 2);
    for id in [first, second] {
        let run = world
            .hook()
            .jobs
            .get_mut(&id)
            .unwrap()
            .run
            .as_mut()
            .unwrap();
        (run.rank, run.joiner) = (0, id == first);
    }
    world.hook().rebuild();
    let at = world.hook().live[&second];
    let host = world.hook().state.group(at).next();
    assert_eq!(host, Some(at));
}

#[test]
fn parts_fill_a_device_and_are_what_their_jobs_are_promised() {
    let mut world = World::new(&[2], Some("trial:jobs=3"));
    let whole = world.submit("job 0.5 60", false);
    let parts = [(0.5, 4), (0.25, 4), (0.25, 4), (0.5, 4)];
    let ids = parts.map(|(share, gib)| world.part("job 0.9 60", share, gib).unwrap());
    world.until("three share a device", 60.0, |world| {
        world.most_on_a_device() == 3
    });
    for (id, (share, _)) in ids.iter().zip(parts).take(3) {
        let view = world.view(*id);
        assert_eq!((view.share, view.share_asked), (share, Some(share)));
        assert_eq!(view.beside_all.len(), 2, "{view:?}");
    }
    // The last one waits: no part comes beside a whole job.
    for _ in 0..20 {
        world.tick();
        world.promises_are_kept();
    }
    assert_eq!(world.phase(ids[3]), JobPhase::Waiting);
    assert_eq!(world.view(whole).beside, None);
    assert_eq!(
        world.said("of their solo speeds"),
        0,
        "nobody has to find out"
    );
    world.kill();
    world.until("the node is back", 10.0, |world| world.nodes[0].known);
    for _ in 0..4 {
        world.tick();
        assert_eq!(world.most_on_a_device(), 3);
    }
    world.until("all are over", 600.0, |world| {
        world.promises_are_kept();
        world.over()
    });
    for id in ids.into_iter().chain([whole]) {
        let view = world.view(id);
        assert_eq!((view.phase, view.attempts), (JobPhase::Done, 1), "{view:?}");
    }
}

#[test]
fn parts_that_nobody_can_have_are_refused_with_the_reason() {
    let mut world = World::new(&[1], Some("trial"));
    world.until("the node is heard", 10.0, |world| {
        world.hook().state.gpus() == 1
    });
    let mut wrong = |share, gib| {
        world
            .part("job 0.5 10", share, gib)
            .unwrap_err()
            .to_string()
    };
    for share in [0.0, 1.0, -1.0, f64::NAN] {
        assert!(wrong(share, 1).contains("of a GPU is asked for"));
    }
    let large = wrong(0.5, 17);
    assert!(large.contains("17") && large.contains("16"), "{large}");
    let mut world = World::new(&[1], None);
    world.config.choice.order = Some("gavel-max-min".into());
    world.kill();
    let refused = world.part("job 0.5 10", 0.5, 1).unwrap_err().to_string();
    assert!(refused.contains("gives no parts"), "{refused}");
}

#[test]
fn jobs_that_do_not_fit_at_once_share_a_device_where_their_memory_moves() {
    // Three of 10 GiB on one of 16, of which 1 GiB each stays: how many run beside each other.
    let most = |host_gib: u64, evictable: bool| {
        let mut world = World::new(&[1], Some("trial:jobs=3"));
        world.nodes[0].host_bytes = host_gib << 30;
        for _ in 0..3 {
            let now = world.now();
            let asked = Submission {
                command: ["job", "0.3", "60"].map(str::to_owned).into(),
                kind: "k".into(),
                mem_bytes: Some(10 << 30),
                evictable,
                ..Submission::default()
            };
            world.hook().submit(asked, now).unwrap();
        }
        let mut most = 0;
        while !world.over() {
            assert!(world.s < 600.0, "{:?}", world.hook().job_views());
            world.tick();
            most = most.max(world.most_on_a_device());
        }
        most
    };
    assert_eq!(most(40, true), 3);
    assert_eq!(most(40, false), 1, "10 and 10 stay");
    assert_eq!(most(0, true), 1, "an arbiter that moves nothing");
    assert_eq!(most(10, true), 2, "9 GiB of one may be away, not of two");
    assert_eq!(most(8, true), 1);
}
