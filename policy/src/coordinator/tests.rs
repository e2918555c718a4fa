use super::*;

const MIB: u64 = 1 << 20;
const S: u64 = 1_000_000_000;
const CAPACITY: u64 = 1000 * MIB;
const G: TenantId = TenantId(9);

fn terms() -> CoordinatorTerms {
    CoordinatorTerms {
        keep_ppm: 50_000,
        band_ppm: 50_000,
        calm_ns: 2 * S,
    }
}

fn job(id: u64, movable: u64) -> Coordinated {
    Coordinated {
        id: TenantId(id),
        weight_ppm: 1,
        movable_bytes: movable * MIB,
        resident_bytes: movable * MIB,
        ..Coordinated::default()
    }
}

/// A device on which jobs follow their caps at once, as far as there is space.
struct World {
    coordinator: Coordinator,
    now_ns: u64,
    jobs: Vec<Coordinated>,
    /// What a guaranteed job has and may have; `None`: there is none.
    guaranteed: Option<(u64, u64)>,
    waits: u64,
    moved: u64,
}

impl World {
    fn new(jobs: &[Coordinated]) -> Self {
        Self {
            coordinator: Coordinator::new(terms()),
            now_ns: 0,
            jobs: jobs.to_vec(),
            guaranteed: None,
            waits: 0,
            moved: 0,
        }
    }

    fn others(&self) -> u64 {
        self.guaranteed.map_or(0, |(has, _)| has) + self.waits
    }

    fn free(&self) -> i128 {
        let has: u64 = self.jobs.iter().map(Coordinated::has_bytes).sum();
        i128::from(CAPACITY) - i128::from(self.others()) - i128::from(has)
    }

    fn step(&mut self) {
        self.now_ns += S / 10;
        self.coordinator.step(&Occupancy {
            now_ns: self.now_ns,
            capacity_bytes: CAPACITY,
            others_bytes: self.others(),
            waiting: (self.waits > 0).then_some(G),
            guaranteed_left_bytes: self.guaranteed.map(|(has, limit)| limit - has),
            jobs: &self.jobs,
        });
        for at in 0..self.jobs.len() {
            let cap = self.coordinator.cap(self.jobs[at].id).expect("coordinated");
            let job = self.jobs[at];
            let to = cap.bytes.unwrap_or(u64::MAX).min(job.movable_bytes);
            let space = u64::try_from(self.free()).unwrap_or(0);
            let to = to.min(job.resident_bytes + space);
            if !job.stuck && to != job.resident_bytes {
                self.moved += 1;
                self.jobs[at].resident_bytes = to;
            }
        }
    }

    fn run(&mut self, seconds: u64) {
        self.run_ms(seconds * 1000);
    }

    fn run_ms(&mut self, ms: u64) {
        for _ in 0..ms / 100 {
            self.step();
        }
    }

    fn resident(&self) -> Vec<u64> {
        self.jobs
            .iter()
            .map(|job| job.resident_bytes / MIB)
            .collect()
    }

    fn cause(&self, at: usize) -> Cause {
        self.coordinator.cap(self.jobs[at].id).expect("there").cause
    }
}

#[test]
fn what_a_guaranteed_job_waits_for_is_given_at_once_and_comes_back_when_it_is_gone() {
    let mut world = World::new(&[job(1, 900)]);
    world.run(10);
    assert_eq!((world.resident(), world.moved), (vec![900], 0));
    (world.guaranteed, world.waits) = (Some((0, 600 * MIB)), 500 * MIB);
    world.step();
    assert!(world.free() >= 0, "{}", world.free());
    assert_eq!(world.cause(0), Cause::Waits(G));
    assert!(world.coordinator.cap(TenantId(1)).unwrap().urgent);
    (world.guaranteed, world.waits) = (Some((500 * MIB, 600 * MIB)), 0);
    world.run(10);
    // 1000 - 500 - keep 50 - half a band of 25
    assert_eq!(world.resident(), [425]);
    world.guaranteed = None;
    world.run(1);
    assert_eq!(world.resident(), [425], "not before it is calm");
    world.run(3);
    assert_eq!((world.resident(), world.cause(0)), (vec![900], Cause::Calm));
}

#[test]
fn a_guaranteed_job_that_goes_up_and_down_within_the_band_moves_nobody() {
    let mut world = World::new(&[job(1, 900)]);
    world.guaranteed = Some((400 * MIB, 900 * MIB));
    world.run(5);
    let before = world.moved;
    for at in 0..200 {
        world.guaranteed = Some(((390 + at % 2 * 20) * MIB, 900 * MIB));
        world.run(1);
    }
    assert_eq!(world.moved, before);
    // Peaks that come sooner than it is calm are given space once.
    for at in 0..100 {
        world.waits = if at % 10 == 0 { 200 * MIB } else { 0 };
        world.step();
    }
    assert_eq!(world.moved, before + 1);
    // One that is over before anybody could look twice moves nobody.
    world.guaranteed = Some((800 * MIB, 900 * MIB));
    world.run_ms(300);
    world.guaranteed = Some((400 * MIB, 900 * MIB));
    world.run_ms(300);
    assert_eq!(world.moved, before + 1);
}

#[test]
fn opportunistic_jobs_divide_what_is_left_by_weight_and_each_by_its_use() {
    let mut heavy = job(2, 600);
    heavy.weight_ppm = 3;
    let mut world = World::new(&[job(1, 100), heavy, job(3, 300)]);
    world.guaranteed = Some((400 * MIB, 400 * MIB));
    world.run(10);
    // 575 are left: 3 parts to 1, of which the first has use for 100 of 115.
    let resident = world.resident();
    assert_eq!(resident[0], 100);
    assert!((355..=357).contains(&resident[1]), "{resident:?}");
    assert!((117..=119).contains(&resident[2]), "{resident:?}");
}

#[test]
fn one_that_comes_later_gets_its_part_of_what_the_first_has() {
    let mut second = job(2, 700);
    second.resident_bytes = 0;
    let mut world = World::new(&[job(1, 900)]);
    world.guaranteed = Some((50 * MIB, 50 * MIB));
    world.run(5);
    world.jobs.push(second);
    world.run(1);
    assert!(world.jobs[0].resident_bytes > 800 * MIB, "not at once");
    world.run(8);
    let resident = world.resident();
    assert!(resident[0].abs_diff(resident[1]) <= 1, "{resident:?}");
    assert_eq!(world.cause(0), Cause::Fair);
    let moved = world.moved;
    world.run(30);
    assert_eq!(world.moved, moved, "and that is where it stays");
}

#[test]
fn one_that_cannot_be_moved_is_left_and_the_other_gives_its_part() {
    let mut stuck = job(1, 500);
    stuck.stuck = true;
    let mut world = World::new(&[stuck, job(2, 400)]);
    (world.guaranteed, world.waits) = (Some((0, 400 * MIB)), 400 * MIB);
    world.step();
    assert!(world.free() >= 0, "{}", world.free());
    assert_eq!(world.resident()[0], 500);
}

#[test]
fn nothing_is_kept_for_guaranteed_jobs_that_may_take_no_more_or_are_not_there() {
    for guaranteed in [None, Some((0, 0))] {
        let mut world = World::new(&[job(1, 960)]);
        world.guaranteed = guaranteed;
        world.run(10);
        assert_eq!((world.resident(), world.moved), (vec![960], 0));
    }
    let mut world = World::new(&[job(1, 960)]);
    world.guaranteed = Some((0, 500 * MIB));
    world.run(1);
    assert_eq!((world.resident(), world.cause(0)), (vec![925], Cause::Low));
}

#[test]
fn without_a_capacity_nothing_is_done_and_absurd_figures_do_no_harm() {
    let mut coordinator = Coordinator::new(terms());
    let absurd = Coordinated {
        movable_bytes: u64::MAX,
        resident_bytes: u64::MAX,
        fixed_bytes: u64::MAX,
        waits_bytes: u64::MAX,
        weight_ppm: u32::MAX,
        ..job(1, 1)
    };
    for (now_ns, capacity_bytes, capped) in [
        (1, 0, false),
        (2, CAPACITY, true),
        (u64::MAX, u64::MAX, true),
    ] {
        coordinator.step(&Occupancy {
            now_ns,
            capacity_bytes,
            others_bytes: u64::MAX,
            waiting: None,
            guaranteed_left_bytes: Some(u64::MAX),
            jobs: &[absurd],
        });
        let cap = coordinator.cap(TenantId(1)).expect("it is known");
        assert_eq!(cap.bytes.is_some(), capped, "{cap:?}");
    }
    assert_eq!(coordinator.cap(TenantId(2)), None);
}

/// Whatever jobs there are: where what can be moved suffices, a waiting guaranteed job has its
/// memory after one look; nobody is capped below what the others' use leaves it; and what follows
/// settles.
#[test]
fn a_waiting_job_is_served_wherever_that_is_possible_and_all_settles() {
    let mut seed = 1u64;
    let mut random = |most: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) % (most + 1)
    };
    for _ in 0..2000 {
        let count = 1 + random(3);
        let mut jobs = Vec::new();
        let mut free = 1000;
        for id in 0..count {
            let fixed = random(free / 4);
            let resident = random(free - fixed);
            free -= fixed + resident;
            jobs.push(Coordinated {
                id: TenantId(id),
                weight_ppm: 1 + random(5) as u32,
                movable_bytes: (resident + random(400)) * MIB,
                resident_bytes: resident * MIB,
                fixed_bytes: fixed * MIB,
                ..Coordinated::default()
            });
        }
        let fixed: u64 = jobs.iter().map(|job| job.fixed_bytes).sum();
        let asks = random(1000);
        let mut world = World::new(&jobs);
        (world.guaranteed, world.waits) = (Some((0, 1000 * MIB)), asks * MIB);
        world.step();
        if asks * MIB + fixed <= CAPACITY {
            assert!(
                world.free() >= 0,
                "{asks} of {jobs:?}: {:?}",
                world.resident()
            );
        }
        world.run(20);
        let moved = world.moved;
        world.run(20);
        assert_eq!(world.moved, moved, "{jobs:?}");
    }
}
