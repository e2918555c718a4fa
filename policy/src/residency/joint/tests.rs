//! Jobs on several devices that take turns in their memories, in virtual time.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::super::{Link, MOST_TERMS};
use super::*;

const MS: u64 = 1_000_000;
const S: u64 = 1000 * MS;
const MIB: u64 = 1 << 20;
const STEP_NS: u64 = 10 * MS;
const K: f64 = 10.0;

/// A job on some devices.
#[derive(Clone, Debug)]
struct Job {
    /// By device; `None`: it has nothing to do there.
    parts: Vec<Option<ResidentJob>>,
    busy_ns: u64,
    silent_ns: u64,
    /// It waits at this device's gate when its memory is away, whether it has any there or not.
    waits_at: usize,
    /// Its move under way ends then.
    move_ends_ns: Option<u64>,
    came_ns: u64,
    away_since_ns: u64,
    away_ns: u64,
    in_ns: u64,
    /// It left before the one that came for its space could have gained by it.
    undone: u32,
}

impl Job {
    fn first(&self) -> &ResidentJob {
        self.parts.iter().flatten().next().expect("a device")
    }

    fn set(&mut self, change: impl Fn(&mut ResidentJob)) {
        self.parts.iter_mut().flatten().for_each(change);
    }
}

struct World {
    now_ns: u64,
    capacities: Vec<u64>,
    arbitrations: Vec<Arbitration>,
    jobs: Vec<Job>,
    moves: Vec<u64>,
    dice: u64,
}

impl World {
    fn new(capacities_mib: &[u64], jobs: Vec<Job>) -> Self {
        let arbitrations = capacities_mib
            .iter()
            .map(|_| {
                let mut arbitration = Arbitration::new(K);
                arbitration.link = Link {
                    out: 20_000,
                    back: 20_000,
                };
                arbitration
            })
            .collect();
        Self {
            now_ns: S,
            capacities: capacities_mib.iter().map(|mib| mib * MIB).collect(),
            arbitrations,
            jobs,
            moves: Vec::new(),
            dice: 1,
        }
    }

    fn roll(&mut self) -> u64 {
        self.dice = self
            .dice
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        self.dice >> 33
    }

    fn on(&self, at: usize) -> Vec<ResidentJob> {
        self.jobs.iter().filter_map(|job| job.parts[at]).collect()
    }

    /// What a look at everything answers.
    fn look<T>(&self, ask: impl FnOnce(&Joint<'_>) -> T) -> T {
        let all: Vec<Vec<ResidentJob>> = (0..self.capacities.len()).map(|at| self.on(at)).collect();
        let places: Vec<Place<'_>> = all
            .iter()
            .enumerate()
            .map(|(at, all)| Place {
                residents: ResidentJobs {
                    now_ns: self.now_ns,
                    capacity_bytes: self.capacities[at],
                    all,
                },
                arbitration: &self.arbitrations[at],
            })
            .collect();
        ask(&Joint::new(&places))
    }

    fn job(&mut self, id: TenantId) -> &mut Job {
        let mut jobs = self.jobs.iter_mut();
        jobs.find(|job| job.first().id == id).expect("a job")
    }

    fn switch_ns(&self, job: &Job) -> u64 {
        let parts = job.parts.iter().zip(&self.arbitrations);
        parts
            .filter_map(|(part, arbitration)| {
                let bytes = part.as_ref()?.evictable_bytes;
                (bytes > 0).then(|| arbitration.link.switch_ns(bytes, bytes))
            })
            .sum()
    }

    /// Those of which memory is on the device, or is about to be, fit.
    fn check(&self) {
        for (at, capacity) in self.capacities.iter().enumerate() {
            let spoken_for: u64 = self.on(at).iter().map(ResidentJob::footprint_bytes).sum();
            assert!(spoken_for <= *capacity, "device {at}: promised twice");
            let there: u64 = self.on(at).iter().map(|one| one.resident_bytes).sum();
            assert!(there <= *capacity, "device {at}: more than there is");
        }
    }

    fn begin(&mut self, id: TenantId) {
        let now_ns = self.now_ns;
        let Some(space) = self.look(|joint| joint.space_for(id)) else {
            return;
        };
        if space.from_ns > now_ns {
            return;
        }
        let by = self.job(id).first().class;
        let mut gone_ns = now_ns;
        for victim in space.victims {
            let job = self.job(victim).clone();
            let takes_ns = self.switch_ns(&job);
            let preempted = job.first().class == Class::Opportunistic && by == Class::Guaranteed;
            let job = self.job(victim);
            if !preempted && now_ns - job.came_ns < takes_ns {
                job.undone += 1;
            }
            job.set(|part| part.leaving = true);
            job.move_ends_ns = Some(now_ns + takes_ns);
            gone_ns = gone_ns.max(now_ns + takes_ns);
            self.moves.push(now_ns);
        }
        let leaving = self.jobs.iter().filter(|job| job.first().leaving);
        let gone_ns = leaving
            .filter_map(|job| job.move_ends_ns)
            .fold(gone_ns, u64::max);
        let own = self.job(id).clone();
        let takes_ns = self.switch_ns(&own);
        let job = self.job(id);
        job.set(|part| part.coming = true);
        job.move_ends_ns = Some(gone_ns + takes_ns);
        self.moves.push(now_ns);
        self.check();
    }

    fn arrive(&mut self) {
        let now_ns = self.now_ns;
        for job in &mut self.jobs {
            if job.move_ends_ns.is_none_or(|ends_ns| ends_ns > now_ns) {
                continue;
            }
            job.move_ends_ns = None;
            let comes = job.first().coming;
            job.set(|part| {
                part.resident_bytes = if comes { part.evictable_bytes } else { 0 };
                part.out = !comes && part.evictable_bytes > 0;
                (part.coming, part.leaving, part.since_ns) = (false, false, now_ns);
            });
            if comes {
                job.came_ns = now_ns;
            }
        }
        self.check();
    }

    fn step(&mut self) {
        self.now_ns += STEP_NS;
        let now_ns = self.now_ns;
        self.arrive();
        for job in &mut self.jobs {
            let round_ns = job.busy_ns + job.silent_ns;
            let busy = job.silent_ns == 0 || now_ns % round_ns < job.busy_ns;
            let out = job
                .parts
                .iter()
                .flatten()
                .any(|part| part.out || part.is_moving());
            let at = job.waits_at;
            for (device, part) in job.parts.iter_mut().enumerate() {
                let Some(part) = part else { continue };
                // It works on one device after the other, and waits at one.
                part.wants = busy && (!out || device == at);
                if busy && !out && device == at {
                    part.active_ns = now_ns;
                }
            }
            if !out && busy {
                job.in_ns += STEP_NS;
                let count = job.parts.len();
                job.waits_at = (1..=count)
                    .map(|more| (at + more) % count)
                    .find(|device| job.parts[*device].is_some())
                    .unwrap_or(at);
            }
            if out && busy {
                job.away_ns = job.away_ns.max(now_ns - job.away_since_ns);
            } else {
                job.away_since_ns = now_ns;
            }
        }
        let (standings, _) = self.look(|joint| joint.standings());
        for (id, standing) in standings {
            // The devices' policies let them have it sooner or later.
            if standing == Standing::MayCome && self.roll().is_multiple_of(2) {
                self.begin(id);
            }
        }
    }

    fn run(&mut self, ns: u64) {
        let end_ns = self.now_ns + ns;
        while self.now_ns < end_ns {
            self.step();
        }
    }

    fn moves_in_a_second(&self) -> usize {
        let within = |from: &u64| {
            let until = from + S;
            self.moves
                .iter()
                .filter(|at| (*from..until).contains(at))
                .count()
        };
        self.moves.iter().map(within).max().unwrap_or(0)
    }
}

/// Of `id`, with so many MiB on each device; `None`: it has nothing to do with that one.
fn job(id: u64, mib: &[Option<u64>], weight_ppm: u32) -> Job {
    let part = |mib: &u64| ResidentJob {
        id: TenantId(id),
        weight_ppm,
        arrived_ns: id,
        evictable_bytes: mib * MIB,
        out: *mib > 0,
        wants: true,
        ..ResidentJob::default()
    };
    Job {
        parts: mib.iter().map(|mib| mib.as_ref().map(part)).collect(),
        busy_ns: S,
        silent_ns: 0,
        waits_at: mib.iter().position(Option::is_some).unwrap_or(0),
        move_ends_ns: None,
        came_ns: 0,
        away_since_ns: S,
        away_ns: 0,
        in_ns: 0,
        undone: 0,
    }
}

#[test]
fn two_jobs_on_two_devices_of_one_take_turns() {
    let both = [Some(160), Some(160)];
    let mut world = World::new(&[256, 256], vec![job(1, &both, 500), job(2, &both, 500)]);
    world.run(60 * S);
    for job in &world.jobs {
        assert!(job.in_ns > 20 * S && job.away_ns < S, "{job:?}");
    }
}

#[test]
fn a_job_that_is_away_on_a_device_comes_when_it_waits_at_the_gate_of_another_one() {
    let mut away = job(1, &[Some(0), Some(200)], 500);
    away.waits_at = 0;
    let mut world = World::new(&[256, 256], vec![away]);
    let (standings, _) = world.look(|joint| joint.standings());
    assert_eq!(standings, [(TenantId(1), Standing::MayCome)]);
    world.run(S);
    assert!(world.jobs[0].in_ns > 0);
}

/// A chain: each has what the next one waits for.
#[test]
fn jobs_in_a_circle_of_devices_all_have_their_turns() {
    let circle = [
        job(1, &[Some(200), Some(200), None], 500),
        job(2, &[None, Some(200), Some(200)], 500),
        job(3, &[Some(200), None, Some(200)], 500),
    ];
    let mut world = World::new(&[256, 256, 256], circle.to_vec());
    world.run(60 * S);
    for job in &world.jobs {
        assert!(job.in_ns > 10 * S, "{job:?}");
    }
}

#[test]
fn small_jobs_do_not_pass_a_large_one_for_ever() {
    let mut jobs = vec![job(1, &[Some(250), Some(250)], 500)];
    for id in 2..8 {
        let small = [(id % 2 == 0).then_some(100), (id % 2 == 1).then_some(100)];
        let mut small = job(id, &small, 500);
        (small.busy_ns, small.silent_ns) = (300 * MS + id * 10 * MS, 200 * MS);
        jobs.push(small);
    }
    let mut world = World::new(&[256, 256], jobs);
    world.run(60 * S);
    let large = &world.jobs[0];
    assert!(large.in_ns > 5 * S && large.away_ns < 5 * S, "{large:?}");
}

#[test]
fn what_an_out_job_has_on_a_device_keeps_nobody_away() {
    let half = |id: u64, there: usize| {
        let mut job = job(id, &[Some(200), Some(200)], 500);
        let part = job.parts[there].as_mut().expect("a part");
        (part.out, part.resident_bytes) = (false, 200 * MIB);
        job
    };
    // Each has one device and waits for the other one.
    let mut world = World::new(&[256, 256], vec![half(1, 0), half(2, 1)]);
    world.run(20 * S);
    for job in &world.jobs {
        assert!(job.in_ns > 5 * S, "{job:?}");
    }
}

#[test]
fn who_leaves_one_device_leaves_all_of_them() {
    let mut torn = job(1, &[Some(100), Some(100)], 500);
    torn.set(|part| (part.out, part.resident_bytes) = (false, 100 * MIB));
    let world = World::new(&[256, 256], vec![torn.clone()]);
    assert_eq!(world.look(|joint| joint.torn()), []);
    torn.parts[0].as_mut().expect("a part").leaving = true;
    let world = World::new(&[256, 256], vec![torn]);
    assert_eq!(world.look(|joint| joint.torn()), [TenantId(1)]);
}

#[test]
fn what_could_not_leave_one_device_keeps_nothing_out_on_another_one() {
    let mut torn = job(1, &[Some(100), Some(100)], 500);
    let [Some(out), Some(stays)] = &mut torn.parts[..] else {
        unreachable!("two parts");
    };
    out.leaving = true;
    (stays.out, stays.resident_bytes, stays.stuck_until_ns) = (false, 100 * MIB, 31 * S);
    let world = World::new(&[256, 256], vec![torn.clone()]);
    assert_eq!(
        world.look(|joint| joint.torn()),
        [],
        "it is asked again and again"
    );
    torn.set(|part| part.leaving = false);
    let world = World::new(&[256, 256], vec![torn.clone()]);
    let (standings, _) = world.look(|joint| joint.standings());
    assert_eq!(standings, [(TenantId(1), Standing::MayCome)]);
    // One that could not come back is left alone.
    torn.set(|part| part.stuck_until_ns = 31 * S);
    let world = World::new(&[256, 256], vec![torn]);
    let (standings, again_ns) = world.look(|joint| joint.standings());
    assert_eq!(standings, [(TenantId(1), Standing::Waits(Some(31 * S)))]);
    assert_eq!(again_ns, Some(31 * S));
}

#[test]
fn a_job_that_was_sent_away_is_not_called_back() {
    let mut away = job(1, &[Some(100), Some(100)], 500);
    away.set(|part| part.kept_away = true);
    let world = World::new(&[256, 256], vec![away]);
    let (standings, _) = world.look(|joint| joint.standings());
    assert_eq!(standings, [(TenantId(1), Standing::KeptAway)]);
}

#[derive(Clone, Debug)]
struct Draw {
    /// By device: a part of its capacity in percent; `None`: nothing to do with it.
    percent: Vec<Option<u64>>,
    weight: u32,
    low: bool,
    busy_ms: u64,
    silent_ms: u64,
    fixed_percent: u64,
}

fn draws() -> impl Strategy<Value = (Vec<u64>, Vec<Draw>)> {
    let capacities = proptest::collection::vec(256u64..2048, 2..=8);
    capacities.prop_flat_map(|capacities| {
        let devices = capacities.len();
        let percent = prop_oneof![
            2 => Just(None),
            1 => Just(Some(0u64)),
            4 => (20u64..=90).prop_map(Some),
        ];
        let draw = (
            proptest::collection::vec(percent, devices),
            1u32..4,
            prop_oneof![3 => Just(false), 1 => Just(true)],
            5u64..3000,
            prop_oneof![2 => Just(0u64), 1 => 1u64..2000],
            0u64..2,
        );
        let draw = draw.prop_map(
            |(percent, weight, low, busy_ms, silent_ms, fixed_percent)| Draw {
                percent,
                weight: weight * 1000,
                low,
                busy_ms,
                silent_ms,
                fixed_percent,
            },
        );
        (Just(capacities), proptest::collection::vec(draw, 2..=8))
    })
}

fn scene(capacities: &[u64], draws: &[Draw], dice: u64) -> World {
    let mut jobs = Vec::new();
    for (id, draw) in (1..).zip(draws) {
        let mib: Vec<Option<u64>> = (draw.percent.iter().zip(capacities))
            .map(|(percent, mib)| percent.map(|percent| percent * mib / 100))
            .collect();
        if mib.iter().flatten().sum::<u64>() == 0 {
            continue;
        }
        let mut job = job(id, &mib, draw.weight);
        for (part, mib) in job.parts.iter_mut().zip(capacities) {
            if let Some(part) = part {
                part.fixed_bytes = draw.fixed_percent * mib * MIB / 100;
                if draw.low {
                    part.class = Class::Opportunistic;
                }
            }
        }
        (job.busy_ns, job.silent_ns) = (draw.busy_ms * MS, draw.silent_ms * MS);
        jobs.push(job);
    }
    let mut world = World::new(capacities, jobs);
    world.dice = dice;
    world
}

/// Random scenes of 2 to 8 devices and as many jobs. What is on a device and what was promised fits
/// at any time (the world asserts it); nobody of the highest class is out for longer than the terms
/// of all others; no move is undone by the next one; and moves are no more often than their own
/// time allows.
#[test]
fn in_random_scenes_nobody_starves_and_moves_are_bounded() {
    const RUN_NS: u64 = 60 * S;
    let mut runner = TestRunner::new(Config {
        cases: 48,
        failure_persistence: None,
        ..Config::default()
    });
    let most_moves = std::cell::Cell::new(0);
    let longest_away = std::cell::Cell::new(0);
    let scenes = std::cell::Cell::new(0);
    let outcome = runner.run(&(draws(), any::<u64>()), |((capacities, draws), dice)| {
        let mut world = scene(&capacities, &draws, dice);
        world.run(RUN_NS);
        scenes.set(scenes.get() + 1);
        most_moves.set(most_moves.get().max(world.moves_in_a_second()));
        let least_ns = world.jobs.iter().map(|job| world.switch_ns(job)).min();
        let bound = least_ns.map_or(0, |ns| world.jobs.len() as u64 * (2 + 2 * S / ns));
        prop_assert!(world.moves_in_a_second() as u64 <= bound);
        let highest = world
            .jobs
            .iter()
            .map(|job| job.first().class)
            .max_by_key(|class| *class == Class::Guaranteed);
        for job in &world.jobs {
            prop_assert_eq!(job.undone, 0, "a move was undone: {:?}", job);
            if Some(job.first().class) != highest {
                continue;
            }
            let own_ns = world.switch_ns(job);
            let others = world
                .jobs
                .iter()
                .filter(|one| one.first().id != job.first().id);
            let terms_ns: u64 = others
                .map(|one| {
                    let switch_ns = world.switch_ns(one) + own_ns;
                    (switch_ns as f64 * (K * 4.0_f64.min(MOST_TERMS) + 2.0)) as u64 + STEP_NS
                })
                .sum();
            // From its first turn in the line on everybody else may have one term before it.
            let bound_ns = terms_ns + own_ns + 100 * STEP_NS;
            prop_assert!(
                job.away_ns <= bound_ns,
                "{} of {bound_ns}: {job:?}",
                job.away_ns
            );
            if job.silent_ns == 0 && bound_ns < RUN_NS {
                prop_assert!(job.in_ns > 0, "starved: {job:?}");
            }
            longest_away.set(longest_away.get().max(job.away_ns));
        }
        Ok(())
    });
    println!("moves_per_second_max: {}", most_moves.get());
    println!(
        "now: {} random scenes, {} moves in a second at most, nobody out for longer than {} ms",
        scenes.get(),
        most_moves.get(),
        longest_away.get() / MS
    );
    if let Err(error) = outcome {
        panic!("{error}");
    }
}
