//! Jobs that stay where they are stopped keep their memory there.

use super::*;

const GIB: u64 = 1 << 30;
/// Seconds in which orders reach a node and are carried out.
const CARRIED_OUT_S: f64 = 5.0;

fn world(nodes: &[usize], order: &str) -> World {
    let mut world = World::new(nodes, None);
    world.config.choice.order = Some(order.into());
    world.kill();
    world.until("the nodes are heard", 10.0, |world| {
        world.hook().state.gpus() > 0
    });
    world
}

/// What is random of a job.
struct Asked {
    gpus: u32,
    gib: u64,
    s: f64,
    restartable: bool,
}

impl World {
    fn with_memory(&mut self, asked: &Asked, user: &str) -> u64 {
        let now = self.now();
        let command = ["job", "1", &asked.s.to_string(), "f"].map(str::to_owned);
        let submission = Submission {
            command: command.to_vec(),
            kind: format!("{} GiB", asked.gib),
            user: user.into(),
            gpus: asked.gpus,
            mem_bytes: Some(asked.gib * GIB),
            work_s: Some(asked.s),
            deadline_s: Some(3.0 * asked.s),
            restartable: asked.restartable,
            ..Submission::default()
        };
        let id = self.hook().submit(submission, now).unwrap().0.id;
        self.hook().commit().unwrap();
        id
    }

    /// One that stays where it is.
    fn staying(&mut self, gib: u64, s: f64) -> u64 {
        let asked = Asked {
            gpus: 1,
            gib,
            s,
            restartable: false,
        };
        self.with_memory(&asked, "u")
    }

    /// Bytes on each device, by the nodes' own word: of jobs that are paused as well.
    fn memory(&self) -> BTreeMap<(String, String), u64> {
        let mut all = BTreeMap::new();
        for node in &self.nodes {
            for (_, attempt) in node.alive() {
                for device in &attempt.devices {
                    let key = (node.name.clone(), device.clone());
                    *all.entry(key).or_default() += attempt.terms.mem_bytes.unwrap_or(0);
                }
            }
        }
        all
    }

    /// Jobs that are paused on devices that nobody uses.
    fn paused_for_nobody(&self) -> Vec<u64> {
        let mut all = Vec::new();
        for node in &self.nodes {
            for (run, attempt) in node.alive().filter(|(_, one)| one.terms.paused) {
                let used = node.alive().any(|(_, other)| {
                    let mut devices = other.devices.iter();
                    !other.terms.paused && devices.any(|one| attempt.devices.contains(one))
                });
                if !used {
                    all.push(run.job);
                }
            }
        }
        all
    }
}

#[test]
fn a_job_comes_beside_a_stopped_one_only_where_its_memory_fits_and_others_go_first() {
    let mut world = world(&[1], "srtf");
    let long = world.staying(10, 500.0);
    world.until("it runs", 20.0, |world| {
        world.phase(long) == JobPhase::Running
    });
    let large = world.staying(7, 5.0);
    for _ in 0..20 {
        world.tick();
        assert_eq!(world.phase(large), JobPhase::Waiting, "17 GiB of 16");
        assert_eq!(world.phase(long), JobPhase::Running, "stopped for nobody");
    }
    let small = world.staying(6, 10.0);
    world.until("the small one runs", 20.0, |world| {
        world.phase(small) == JobPhase::Running && world.phase(long) == JobPhase::Paused
    });
    assert_eq!(world.memory().values().copied().max(), Some(16 * GIB));
    // What a kill leaves is known again.
    world.kill();
    for _ in 0..6 {
        world.tick();
        assert_eq!(world.phase(large), JobPhase::Waiting);
    }
    world.until("all are over", 900.0, World::over);
}

#[test]
fn a_stopped_job_goes_on_where_its_memory_is_and_others_have_the_gpus_that_it_cannot_use() {
    let mut world = world(&[1, 1], "srtf");
    let first = world.staying(4, 300.0);
    let other = world.staying(12, 400.0);
    world.until("both run", 20.0, |world| {
        [first, other].map(|id| world.phase(id)) == [JobPhase::Running; 2]
    });
    let place = world.hook().job(first).unwrap().node;
    // The longest of all would have to go, and there 10 GiB do not fit.
    let short = world.staying(10, 60.0);
    world.until("the short one runs", 20.0, |world| {
        world.phase(short) == JobPhase::Running
    });
    assert_eq!(world.phase(first), JobPhase::Paused);
    assert_eq!(world.phase(other), JobPhase::Running);
    assert_eq!(world.hook().job(short).unwrap().node, place);
    world.until("it goes on", 200.0, |world| {
        world.phase(first) == JobPhase::Running
    });
    assert_eq!(world.hook().job(first).unwrap().node, place);
    world.until("all are over", 900.0, World::over);
}

/// As in the scheduler's own test, with nodes that carry it out and a hook that is killed.
#[test]
fn memory_of_live_jobs_is_never_promised_twice() {
    let orders = [
        "fifo-backfill",
        "srtf",
        "srsf",
        "2d-las:at=60",
        "edf",
        "worst-rho",
    ];
    let mut paused = 0;
    for (seed, order) in orders.into_iter().cycle().take(12).enumerate() {
        let mut random = Random::new(seed as u64);
        let mut world = world([&[4][..], &[2, 2], &[1, 1, 1, 1]][seed % 3], order);
        world.step_s = 1.0;
        let (mut come, mut for_nobody) = (0, BTreeMap::<u64, f64>::new());
        while come < 40 || !world.over() {
            assert!(world.s < 20_000.0, "{order}, seed {seed}: they do not end");
            if come < 40 && random.below(4) == 0 {
                come += 1;
                let asked = Asked {
                    gpus: if seed % 3 < 2 && random.below(8) == 0 {
                        2
                    } else {
                        1
                    },
                    gib: 1 + random.below(16) as u64,
                    s: 2.0 + random.below(40) as f64,
                    restartable: random.below(5) == 0,
                };
                world.with_memory(&asked, ["a", "b"][random.below(2)]);
            }
            if random.below(200) == 0 {
                world.kill();
            }
            world.tick();
            for (device, bytes) in world.memory() {
                let gib = bytes / GIB;
                assert!(
                    gib <= 16,
                    "{order}, seed {seed}, {} s: {gib} GiB on {device:?}",
                    world.s
                );
            }
            let now = world.paused_for_nobody();
            for_nobody.retain(|id, _| now.contains(id));
            for id in now {
                let since_s = *for_nobody.entry(id).or_insert(world.s);
                let waits = world.s - since_s <= CARRIED_OUT_S;
                assert!(
                    waits,
                    "{order}, seed {seed}, {} s: {id} for nobody",
                    world.s
                );
            }
        }
        let kinds = world.kinds();
        paused += kinds.iter().filter(|kind| *kind == "suspend").count();
    }
    assert!(paused > 40, "{paused} stops say little");
}
