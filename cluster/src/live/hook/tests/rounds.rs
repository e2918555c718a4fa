//! Round allocators on two types of GPU: speeds are measured, inferred, doubted, and acted upon.

use policy::cluster::fair::{
    Combination, Trader, by_tickets, finish_time_fairness, max_min, trade,
};

use super::*;
use crate::live::wire::{FedPair, Feed, SpeedView};

const FAST: &str = "V100";
const SLOW: &str = "K80";

/// A node's type of GPU and its devices, and how fast kinds are there.
type Typed<'a> = (&'a str, usize, &'a [(&'a str, f64)]);

fn world(order: &str, nodes: &[Typed<'_>]) -> World {
    let devices: Vec<usize> = nodes.iter().map(|(_, devices, _)| *devices).collect();
    let mut world = World::new(&devices, None);
    for (node, (gpu, _, speeds)) in world.nodes.iter_mut().zip(nodes) {
        node.gpu = (*gpu).to_owned();
        let speeds = speeds
            .iter()
            .map(|(kind, speed)| ((*kind).to_owned(), *speed));
        node.speeds = speeds.collect();
    }
    world.config.choice.order = Some(order.into());
    world.config.round_s = 20.0;
    world.step_s = 1.0;
    world.kill();
    world
}

fn submit(world: &mut World, kind: &str, user: &str, work_s: f64, restartable: bool) -> u64 {
    let now = world.now();
    let command = ["job", "1", "1e9", "f", kind].map(str::to_owned).to_vec();
    let asked = Submission {
        command,
        kind: kind.into(),
        user: user.into(),
        work_s: Some(work_s),
        restartable,
        ..Submission::default()
    };
    let id = world.hook().submit(asked, now).unwrap().0.id;
    world.hook().commit().unwrap();
    id
}

fn speeds(world: &mut World) -> Vec<SpeedView> {
    world.hook().status().speeds
}

fn speed(world: &mut World, kind: &str, gpu: &str) -> Option<SpeedView> {
    let mut all = speeds(world).into_iter();
    all.find(|view| view.kind == kind && view.gpu == gpu)
}

fn measured(world: &mut World) -> usize {
    speeds(world).iter().filter(|view| view.measured).count()
}

fn number_of(world: &mut World, gpu: &str) -> usize {
    let types = &world.hook().gpu_types.0;
    types.iter().position(|name| name == gpu).unwrap()
}

/// Which part of the time each job has spent on each type, over so many rounds.
fn time_on(world: &mut World, ids: &[u64], rounds: usize) -> Vec<[f64; 2]> {
    let types = [FAST, SLOW].map(|gpu| number_of(world, gpu));
    let mut time = vec![[0.0; 2]; ids.len()];
    let ticks = rounds * 20;
    for _ in 0..ticks {
        world.tick();
        let hook = world.hook();
        for (time, id) in time.iter_mut().zip(ids) {
            // After a kill nothing is there until the nodes are heard.
            let run = hook.live.get(id).and_then(|at| hook.state.job(*at).run());
            let Some(gpu) = run.and_then(|run| run.gpus.first()) else {
                continue;
            };
            let kind = usize::from(hook.state.type_of(*gpu).0);
            let which = types.iter().position(|known| *known == kind).unwrap();
            time[which] += 1.0 / ticks as f64;
        }
    }
    time
}

#[test]
fn each_program_of_gavel_gets_what_it_says_for_the_speeds_that_were_measured() {
    let kinds: [(&str, f64); 3] = [("a", 4.0), ("b", 3.0), ("c", 2.0)];
    for order in ["gavel-max-min", "gavel-finish-time", "gavel-makespan"] {
        let slow = kinds.map(|(kind, _)| (kind, 1.0));
        let mut world = world(order, &[(FAST, 1, &kinds), (SLOW, 1, &slow)]);
        let work = [1e6, 2e6, 3e6];
        let ids: Vec<u64> = kinds
            .iter()
            .zip(work)
            .map(|((kind, _), work_s)| submit(&mut world, kind, "u", work_s, true))
            .collect();
        // Nobody says how fast they are: each is tried where nothing is known of it.
        world.until("all are measured", 4000.0, |world| measured(world) == 6);
        for (kind, fast) in kinds {
            let slow = speed(&mut world, kind, SLOW).unwrap();
            assert!((slow.relative * fast - 1.0).abs() < 0.1, "{slow:?}");
        }
        // The next hook knows it from the state, and solves its program by it.
        world.kill();
        world.until("it decides", 60.0, |world| {
            !world.hook().state.running().is_empty()
        });
        let (relative, jobs): (Vec<[f64; 2]>, Vec<_>) = {
            let types = [FAST, SLOW].map(|gpu| number_of(&mut world, gpu));
            let hook = world.hook();
            let now_s = hook.state.now_s();
            let of = |id: &u64| {
                let job = hook.state.job(hook.live[id]);
                let relative = types.map(|kind| job.by_type[kind]);
                let even = (relative[0] + relative[1]) / 2.0;
                let isolated = job.work / even * hook.state.contention(job);
                (relative, (now_s - job.arrival_s, job.left(now_s), isolated))
            };
            ids.iter().map(of).unzip()
        };
        let solo = |(job, speeds): (usize, &[f64; 2])| Combination {
            jobs: vec![(job, speeds.to_vec())],
            gpus: 1.0,
        };
        let combinations: Vec<Combination> = relative.iter().enumerate().map(solo).collect();
        let even: Vec<f64> = relative.iter().map(|[a, b]| (a + b) / 2.0).collect();
        let left: Vec<f64> = jobs.iter().map(|(_, left, _)| *left).collect();
        let gpus = [1.0, 1.0];
        let says = match order {
            "gavel-max-min" => max_min(&combinations, &gpus, &even).unwrap(),
            "gavel-makespan" => max_min(&combinations, &gpus, &left).unwrap(),
            _ => finish_time_fairness(&combinations, &gpus, &jobs).unwrap().0,
        };
        let time = time_on(&mut world, &ids, 150);
        for (at, (time, says)) in time.iter().zip(&says.time).enumerate() {
            for (has, says) in time.iter().zip(says) {
                assert!(
                    (has - says).abs() < 0.04,
                    "{order}, job {at}: {time:?} for {says:?}"
                );
            }
        }
        if order == "gavel-max-min" {
            // The worked example: 12/11 of an even division for each.
            for (time, ([a, b], even)) in time.iter().zip(relative.iter().zip(&even)) {
                let gets = (time[0] * a + time[1] * b) / (even * 2.0 / 3.0);
                assert!((gets - 12.0 / 11.0).abs() < 0.08, "{gets}: {time:?}");
            }
        }
    }
}

#[test]
fn users_trade_by_the_speeds_that_were_measured() {
    let fast = [("little", 1.2), ("much", 4.0)];
    let mut world = world("trades", &[(FAST, 2, &fast), (SLOW, 4, &[])]);
    let mut ids = Vec::new();
    for (kind, _) in fast {
        ids.extend((0..6).map(|_| submit(&mut world, kind, kind, 1e6, true)));
    }
    world.until("all are measured", 4000.0, |world| measured(world) == 4);
    world.kill();
    let time = time_on(&mut world, &ids, 100);
    let traders = fast.map(|(_, speedup)| Trader {
        tickets: 1.0,
        speedup,
    });
    let (before, after) = (by_tickets(2.0, 4.0, &traders), trade(2.0, 4.0, &traders));
    for (user, trader) in traders.iter().enumerate() {
        let own = &time[6 * user..6 * user + 6];
        let has = [0, 1].map(|kind| own.iter().map(|time| time[kind]).sum::<f64>());
        let holds = [after[user].fast, after[user].slow];
        for (has, holds) in has.iter().zip(holds) {
            assert!(
                (has - holds).abs() < 0.15,
                "user {user}: {own:?} for {holds:?}"
            );
        }
        let worth = has[0] * trader.speedup + has[1];
        assert!(
            worth > 1.1 * before[user].worth(trader),
            "user {user}: {worth}"
        );
    }
}

#[test]
fn a_new_kind_is_inferred_from_others_that_ran_on_both_types_and_not_tried() {
    let kinds = ["a", "b", "c", "d", "e", "f"];
    let fast = [2.0, 2.1, 3.9, 4.1, 2.0, 4.0];
    let fast: Vec<(&str, f64)> = kinds.iter().copied().zip(fast).collect();
    let mut world = world("gavel-max-min", &[(FAST, 2, &fast), (SLOW, 2, &[])]);
    let ids: Vec<u64> = kinds
        .iter()
        .map(|kind| submit(&mut world, kind, "u", 1e6, true))
        .collect();
    world.until("all are measured", 6000.0, |world| measured(world) == 12);
    for id in ids {
        let now = world.now();
        world.hook().cancel(id, now).unwrap();
    }
    world.until("all are over", 60.0, World::over);
    // This one is bound to the GPU where it starts.
    let id = submit(&mut world, "new", "u", 1e6, false);
    world.until("it is measured", 200.0, |world| {
        speeds(world)
            .iter()
            .any(|view| view.kind == "new" && view.measured)
    });
    let both = [FAST, SLOW].map(|gpu| speed(&mut world, "new", gpu).unwrap());
    let inferred = both.iter().find(|view| !view.measured).unwrap();
    let seen = both.iter().find(|view| view.measured).unwrap();
    assert_eq!((seen.confidence, seen.nodes), (1.0, 1));
    assert!(
        inferred.confidence > 0.3 && inferred.confidence <= 0.8,
        "{inferred:?}"
    );
    let speedup = both[0].per_s / both[1].per_s;
    assert!(
        (1.9..4.2).contains(&speedup),
        "between what others have: {both:?}"
    );
    let unsure = world.hook().shared.facts().unsure.clone();
    assert!(unsure.is_empty(), "{unsure:?}");
    // What is measured counts in place of what was inferred, also to the next hook.
    world.kill();
    world.tick();
    let again = speed(&mut world, "new", &seen.gpu).unwrap();
    assert!(again.measured && again.per_s == seen.per_s);
    assert!(world.hook().jobs[&id].run.is_some());
}

#[test]
fn a_node_that_overstates_speeds_is_outvoted_or_refused_and_harms_no_other_kind() {
    for lies in [
        [50.0, 1.0],
        [1e9, 1.0],
        [0.01, 1.0],
        [1.0, 0.02],
        [1.0, 40.0],
    ] {
        let fast = [("a", 2.0), ("b", 3.0)];
        let node = (FAST, 1, &fast[..]);
        let mut world = world("gavel-max-min", &[node, node, node, (SLOW, 2, &[])]);
        world.nodes[0].lies = lies;
        for _ in 0..4 {
            submit(&mut world, "a", "u", 1e6, true);
            submit(&mut world, "b", "u", 1e6, true);
        }
        // All honest nodes have measured both.
        world.until("they are measured", 20_000.0, |world| {
            let nodes = |kind: &str, gpu: &str| {
                let key = solo_key(gpu, 1, kind);
                let record = world.hook.as_ref().unwrap().speeds.get(&key);
                record.map_or(0, |one| {
                    let honest = one.witnesses.iter().filter(|w| w.node != "n0");
                    honest.count()
                })
            };
            ["a", "b"]
                .iter()
                .all(|kind| nodes(kind, FAST) == 2 && nodes(kind, SLOW) == 1)
        });
        for (kind, fast) in fast {
            let view = speed(&mut world, kind, FAST).unwrap();
            let slow = speed(&mut world, kind, SLOW).unwrap();
            assert!((slow.per_s - 100.0).abs() < 12.0, "{lies:?}: {slow:?}");
            assert!(
                (view.per_s - 100.0 * fast).abs() < 30.0,
                "{lies:?}: {view:?}"
            );
        }
        let log = world.hook().decisions(0);
        let doubts = log.iter().filter(|line| line.text.contains("cannot be"));
        let doubts = doubts.filter(|line| line.text.contains("n0")).count();
        // By a clock that is too slow no measurement ends before the round does.
        let obvious = lies[0] > 1e6 || lies[1] > 1.0;
        assert_eq!(doubts > 0, obvious, "{lies:?}");
        // Once in ten minutes, and not each time.
        assert!(
            doubts as f64 <= 1.0 + world.s / 600.0,
            "{doubts} in {} s",
            world.s
        );
    }
}

#[test]
fn pairs_that_were_measured_share_a_gpu_and_the_others_are_inferred() {
    // Twelve kinds; how hard one presses and how much it feels, on one type.
    let rate = |a: usize, b: usize| 1.0 - (0.05 + 0.03 * b as f64) * (0.4 + 0.05 * a as f64);
    let name = |at: usize| format!("k{at}");
    let mut world = world("gavel-max-min:partners=4", &[(FAST, 1, &[])]);
    let mut pairs = Vec::new();
    for a in 0..12 {
        for b in a..12 {
            if (a + 2 * b) % 3 != 0 {
                pairs.push(FedPair {
                    gpu: FAST.into(),
                    gpus: 1,
                    kinds: [name(a), name(b)],
                    rates: [rate(a, b), rate(b, a)],
                });
            }
        }
    }
    let now = world.now();
    world.hook().feed(Feed { pairs }, now).unwrap();
    world.hook().commit().unwrap();
    // 1 and 4: inferred, 1 + 2 * 4 = 9.
    for kind in [1, 4] {
        submit(&mut world, &name(kind), "u", 1e6, true);
    }
    for killed in [false, true] {
        if killed {
            world.kill();
        }
        world.until("they share it", 120.0, |world| {
            let jobs = world.hook().job_views();
            jobs.iter().any(|job| job.beside.is_some())
        });
        let pairs = world.hook().status().pairs;
        let inferred: Vec<_> = pairs.iter().filter(|pair| pair.estimated).collect();
        if !killed {
            assert!(!inferred.is_empty());
        }
        for pair in inferred {
            assert!(pair.confidence > 0.2 && pair.confidence <= 0.8, "{pair:?}");
            let at = |kind: &str| kind[1..].parse::<usize>().unwrap();
            let [a, b] = [at(&pair.kinds[0]), at(&pair.kinds[1])];
            for (inferred, is) in pair.rates.iter().zip([rate(a, b), rate(b, a)]) {
                assert!((inferred - is).abs() < 0.1, "{pair:?}");
            }
        }
        assert!(
            pairs
                .iter()
                .filter(|pair| !pair.estimated)
                .all(|pair| pair.confidence == 1.0)
        );
    }
    // Together they are measured, and that counts from then on.
    world.until("it is measured", 300.0, |world| {
        let pairs = world.hook().status().pairs;
        let both = |kinds: &[String; 2]| kinds.contains(&name(1)) && kinds.contains(&name(4));
        pairs
            .iter()
            .any(|pair| !pair.estimated && both(&pair.kinds))
            && !pairs.iter().any(|pair| pair.estimated && both(&pair.kinds))
    });
}

#[test]
fn pairs_that_do_not_fit_into_the_memory_of_a_gpu_are_never_made() {
    let mut world = world("gavel-max-min", &[(FAST, 1, &[])]);
    let now = world.now();
    let pairs = vec![FedPair {
        gpu: FAST.into(),
        gpus: 1,
        kinds: ["x".into(), "y".into()],
        rates: [0.95, 0.95],
    }];
    world.hook().feed(Feed { pairs }, now).unwrap();
    for (kind, gib) in [("x", 8u64), ("y", 9)] {
        let asked = Submission {
            command: ["job", "1", "200", "f", kind].map(str::to_owned).to_vec(),
            kind: kind.into(),
            mem_bytes: Some(gib << 30),
            restartable: true,
            ..Submission::default()
        };
        world.hook().submit(asked, now).unwrap();
    }
    world.until("all are over", 2000.0, |world| {
        assert!(
            world
                .hook()
                .job_views()
                .iter()
                .all(|job| job.beside.is_none())
        );
        World::over(world)
    });
}

#[test]
fn jobs_that_cannot_be_moved_stay_and_all_jobs_end_under_every_round_allocator() {
    for order in [
        "gavel-max-min",
        "gavel-finish-time",
        "gavel-makespan",
        "trades",
    ] {
        let mut random = Random::new(11);
        let fast = [("a", 2.0), ("b", 3.0)];
        let mut world = world(order, &[(FAST, 2, &fast), (SLOW, 2, &[])]);
        let mut bound = Vec::new();
        for at in 0..12 {
            let restartable = random.below(2) == 0;
            let now = world.now();
            let kind = ["a", "b"][random.below(2)];
            let length = (40 + random.below(100)).to_string();
            let asked = Submission {
                command: ["job", "1", &length, "f", kind].map(str::to_owned).to_vec(),
                kind: kind.into(),
                user: ["x", "y"][random.below(2)].into(),
                gpus: if at % 4 == 3 { 2 } else { 1 },
                restartable,
                ..Submission::default()
            };
            let id = world.hook().submit(asked, now).unwrap().0.id;
            bound.extend((!restartable).then_some(id));
            for _ in 0..random.below(12) {
                world.tick();
            }
            if at == 6 {
                world.kill();
            }
        }
        world.until("all are over", 6000.0, World::over);
        for job in world.hook().job_views() {
            assert_eq!(job.phase, JobPhase::Done, "{order}: {job:?}");
            assert!(
                !bound.contains(&job.id) || job.attempts == 1,
                "{order}: {job:?}"
            );
        }
    }
}

#[test]
fn another_engine_s_question_is_answered_by_the_speeds_that_are_known() {
    let kinds = [("a", 4.0)];
    let mut world = world("gavel-max-min", &[(FAST, 1, &kinds), (SLOW, 1, &[])]);
    let id = submit(&mut world, "a", "u", 1e6, true);
    world.until("it is measured", 2000.0, |world| measured(world) == 2);
    let now = world.now();
    world.hook().cancel(id, now).unwrap();
    world.until("it is over", 60.0, World::over);
    let candidate = |node: &str, gpu: &str, busy: bool| crate::live::placement::Candidate {
        node: node.into(),
        uuid: "GPU-9".into(),
        name: gpu.into(),
        total_bytes: 16 << 30,
        residents: busy
            .then(|| crate::live::placement::JobProfile {
                id: "there".into(),
                ..Default::default()
            })
            .into_iter()
            .collect(),
        ..Default::default()
    };
    let ask = |fast_busy: bool| crate::live::placement::DecideRequest {
        job: crate::live::placement::JobProfile {
            id: "x".into(),
            kind: "a".into(),
            ..Default::default()
        },
        candidates: vec![candidate("s", SLOW, false), candidate("f", FAST, fast_busy)],
    };
    let answer = world.hook().decide_for(&ask(false)).unwrap();
    assert_eq!(answer.node, "f", "{answer:?}");
    let answer = world.hook().decide_for(&ask(true)).unwrap();
    assert_eq!(answer.node, "s", "nobody is moved for it: {answer:?}");
}
