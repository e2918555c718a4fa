//! Jobs that take turns in a device's memory, in virtual time.

use proptest::prelude::*;

use super::*;

const MS: u64 = 1_000_000;
const S: u64 = 1000 * MS;
const GIB: u64 = 1 << 30;
const STEP_NS: u64 = 5 * MS;

/// A job and what became of it.
#[derive(Clone, Debug)]
struct Job {
    resident: ResidentJob,
    /// At work for so long, then silent for so long; 0: never silent.
    busy_ns: u64,
    silent_ns: u64,
    /// While it was in and wanted the device, in nanoseconds.
    in_ns: u64,
    /// Longest time that it wanted the device and was away.
    away_ns: u64,
    away_since_ns: u64,
    /// Terms that were ended while it wanted to go on.
    cut: Vec<Cut>,
}

/// The end of a term.
#[derive(Clone, Copy, Debug)]
struct Cut {
    term_ns: u64,
    /// What the switch that ended it took.
    switch_ns: u64,
    /// Whose space was needed.
    by: Class,
    /// Who is parked has no term.
    parked: bool,
}

impl Job {
    fn new(id: u64, gib: u64, weight_ppm: u32) -> Self {
        Self {
            resident: ResidentJob {
                id: TenantId(id),
                weight_ppm,
                arrived_ns: id,
                evictable_bytes: gib * GIB,
                out: true,
                wants: true,
                ..ResidentJob::default()
            },
            busy_ns: S,
            silent_ns: 0,
            in_ns: 0,
            away_ns: 0,
            away_since_ns: S,
            cut: Vec::new(),
        }
    }
}

/// A switch that is under way.
struct Switch {
    who: TenantId,
    victims: Vec<TenantId>,
    began_ns: u64,
    ends_ns: u64,
}

struct World {
    now_ns: u64,
    capacity_bytes: u64,
    arbitration: Arbitration,
    jobs: Vec<Job>,
    switch: Option<Switch>,
    switching_ns: u64,
}

impl World {
    fn new(gib: u64, jobs: Vec<Job>) -> Self {
        let mut arbitration = Arbitration::new(10.0);
        arbitration.link = Link {
            out: 20_000,
            back: 20_000,
        };
        Self {
            now_ns: S,
            capacity_bytes: gib * GIB,
            arbitration,
            jobs,
            switch: None,
            switching_ns: 0,
        }
    }

    fn job(&mut self, id: TenantId) -> &mut Job {
        self.jobs
            .iter_mut()
            .find(|job| job.resident.id == id)
            .expect("a job")
    }

    fn run(&mut self, ns: u64) {
        let end_ns = self.now_ns + ns;
        while self.now_ns < end_ns {
            self.step();
        }
    }

    fn step(&mut self) {
        self.now_ns += STEP_NS;
        let now_ns = self.now_ns;
        self.arrive();
        for job in &mut self.jobs {
            let round_ns = job.busy_ns + job.silent_ns;
            let resident = &mut job.resident;
            resident.wants = job.silent_ns == 0 || now_ns % round_ns < job.busy_ns;
            if !resident.out && !resident.leaving && resident.wants {
                resident.active_ns = now_ns;
                job.in_ns += STEP_NS;
            }
            if resident.out && resident.wants {
                job.away_ns = job.away_ns.max(now_ns - job.away_since_ns);
            } else {
                job.away_since_ns = now_ns;
            }
        }
        let all: Vec<ResidentJob> = self.jobs.iter().map(|job| job.resident).collect();
        let residents = ResidentJobs {
            now_ns,
            capacity_bytes: self.capacity_bytes,
            all: &all,
        };
        let (standings, _) = self.arbitration.standings(&residents);
        if self.switch.is_some() {
            return;
        }
        let comes = all
            .iter()
            .zip(standings)
            .find(|(one, standing)| *standing == Standing::MayCome && one.wants);
        if let Some((one, _)) = comes {
            let space = self
                .arbitration
                .space_for(&residents, one.id)
                .expect("one that may come finds space");
            assert!(space.from_ns <= now_ns);
            self.begin(one.id, space.victims);
        }
    }

    fn begin(&mut self, who: TenantId, victims: Vec<TenantId>) {
        let now_ns = self.now_ns;
        let comes = self.job(who).resident;
        let mut out_bytes = 0;
        for victim in &victims {
            out_bytes += self.job(*victim).resident.resident_bytes;
        }
        let switch_ns = self
            .arbitration
            .link
            .switch_ns(out_bytes, comes.missing_bytes());
        for victim in &victims {
            let parked = self.arbitration.is_parked(*victim);
            let job = self.job(*victim);
            let resident = &mut job.resident;
            (resident.leaving, resident.out) = (true, true);
            if resident.wants {
                job.cut.push(Cut {
                    term_ns: now_ns - job.resident.since_ns,
                    switch_ns,
                    by: comes.class,
                    parked,
                });
            }
        }
        self.job(who).resident.coming = true;
        self.switch = Some(Switch {
            who,
            victims,
            began_ns: now_ns,
            ends_ns: now_ns + switch_ns,
        });
    }

    fn arrive(&mut self) {
        let now_ns = self.now_ns;
        let Some(switch) = self.switch.take_if(|switch| switch.ends_ns <= now_ns) else {
            return;
        };
        for victim in switch.victims {
            let resident = &mut self.job(victim).resident;
            (resident.leaving, resident.resident_bytes) = (false, 0);
            resident.since_ns = now_ns;
        }
        let resident = &mut self.job(switch.who).resident;
        (resident.coming, resident.out) = (false, false);
        resident.resident_bytes = resident.evictable_bytes;
        resident.since_ns = now_ns;
        let ns = now_ns - switch.began_ns;
        self.switching_ns += ns;
        self.arbitration.switched(now_ns, ns);
        let taken: u64 = self
            .jobs
            .iter()
            .map(|job| job.resident.resident_bytes + job.resident.fixed_bytes)
            .sum();
        assert!(taken <= self.capacity_bytes, "{taken}");
    }
}

fn residents(all: &[ResidentJob], capacity_bytes: u64, now_ns: u64) -> ResidentJobs<'_> {
    ResidentJobs {
        now_ns,
        capacity_bytes,
        all,
    }
}

#[test]
fn while_the_sum_fits_everybody_stays() {
    let mut world = World::new(
        16,
        vec![Job::new(1, 5, 1), Job::new(2, 5, 1), Job::new(3, 6, 1)],
    );
    world.run(60 * S);
    assert!(world.jobs.iter().all(|job| job.cut.is_empty()));
    assert_eq!(world.arbitration.pressure().totals().0, 3);
}

#[test]
fn two_that_do_not_fit_take_terms_ten_times_as_long_as_their_switch() {
    let mut world = World::new(16, vec![Job::new(1, 10, 500_000), Job::new(2, 10, 500_000)]);
    world.run(300 * S);
    let [a, b] = &world.jobs[..] else { panic!() };
    for job in [a, b] {
        assert!(job.cut.len() > 10, "{}", job.cut.len());
        for Cut {
            term_ns, switch_ns, ..
        } in &job.cut
        {
            assert!(*term_ns >= 10 * switch_ns, "{term_ns} {switch_ns}");
            assert!(*term_ns <= 11 * switch_ns + S, "{term_ns} {switch_ns}");
        }
    }
    let part = a.in_ns as f64 / (a.in_ns + b.in_ns) as f64;
    assert!((part - 0.5).abs() < 0.05, "{part}");
    let lost = world.switching_ns as f64 / (300 * S) as f64;
    assert!(lost < 0.1, "{lost}");
}

#[test]
fn terms_are_in_the_proportion_of_the_weights() {
    let weights = [500_000, 300_000, 200_000];
    let jobs = (1..).zip(weights).map(|(id, w)| Job::new(id, 10, w));
    let mut world = World::new(16, jobs.collect());
    world.run(1000 * S);
    let all: u64 = world.jobs.iter().map(|job| job.in_ns).sum();
    for (job, weight) in world.jobs.iter().zip(weights) {
        let part = job.in_ns as f64 / all as f64;
        assert!(
            (part - f64::from(weight) / 1e6).abs() < 0.05,
            "{part} {weight}"
        );
    }
}

#[test]
fn a_pause_shorter_than_a_switch_costs_no_switch() {
    let mut jobs = vec![Job::new(1, 10, 500_000), Job::new(2, 10, 1)];
    // Data is loaded for 100 ms in every 300; the switch takes half a second.
    (jobs[0].busy_ns, jobs[0].silent_ns) = (200 * MS, 100 * MS);
    let mut world = World::new(16, jobs);
    world.run(3 * S);
    assert!(!world.jobs[0].resident.out);
    let switches = world.arbitration.pressure().totals().0;
    assert_eq!(switches, 1, "only its own arrival");
    // A job that falls silent for good is evicted after the time of a switch, long before its term
    // is over.
    world.jobs[0].silent_ns = 1000 * S;
    world.run(3 * S);
    assert!(world.jobs[0].resident.out && !world.jobs[1].resident.out);
}

#[test]
fn a_guaranteed_job_comes_at_once_and_is_never_put_out_by_an_opportunistic_one() {
    let mut jobs = vec![Job::new(1, 10, 1), Job::new(2, 10, 1)];
    jobs[0].resident.class = Class::Opportunistic;
    (jobs[1].busy_ns, jobs[1].silent_ns) = (20 * S, 20 * S);
    let mut world = World::new(16, jobs);
    world.run(200 * S);
    let [low, high] = &world.jobs[..] else {
        panic!()
    };
    assert!(high.cut.is_empty(), "{:?}", high.cut);
    assert!(high.away_ns < 2 * S, "{}", high.away_ns);
    assert!(!low.cut.is_empty() && low.in_ns > 50 * S, "{}", low.in_ns);
}

#[test]
fn whose_use_is_furthest_away_goes_and_nobody_beyond_what_is_needed() {
    let resident = |id, gib: u64, active_s: u64, wants| ResidentJob {
        id: TenantId(id),
        weight_ppm: 1,
        evictable_bytes: gib * GIB,
        resident_bytes: gib * GIB,
        active_ns: active_s * S,
        since_ns: 1,
        wants,
        ..ResidentJob::default()
    };
    let comes = ResidentJob {
        id: TenantId(9),
        weight_ppm: 1,
        evictable_bytes: 6 * GIB,
        out: true,
        wants: true,
        ..ResidentJob::default()
    };
    let all = [
        resident(1, 4, 100, true),
        resident(2, 2, 60, false),
        resident(3, 5, 30, false),
        resident(4, 5, 80, false),
        comes,
    ];
    let mut arbitration = Arbitration::new(10.0);
    let space = |arbitration: &Arbitration, capacity| {
        let residents = residents(&all, capacity, 100 * S);
        arbitration
            .space_for(&residents, TenantId(9))
            .map(|space| space.victims)
    };
    // All of 16 are taken: the longest idle job is evicted, and the next, whose two would not have
    // been enough, is not.
    assert_eq!(
        space(&arbitration, 16 * GIB),
        Some(vec![TenantId(3), TenantId(2)])
    );
    assert_eq!(space(&arbitration, 17 * GIB), Some(vec![TenantId(3)]));
    assert_eq!(space(&arbitration, 22 * GIB), Some(vec![]));
    // More than all of them have cannot be found.
    assert_eq!(space(&arbitration, 5 * GIB), None);
    let residents = residents(&all, 5 * GIB, 100 * S);
    let (standings, _) = arbitration.standings(&residents);
    assert_eq!(
        standings[4],
        Standing::TooLarge {
            needed_bytes: 6 * GIB,
            available_bytes: 5 * GIB
        }
    );
}

#[test]
fn an_allocation_that_waits_takes_space_at_once_but_not_that_of_its_betters() {
    let of = |id, class, wants| ResidentJob {
        id: TenantId(id),
        class,
        weight_ppm: 1,
        evictable_bytes: 6 * GIB,
        resident_bytes: 6 * GIB,
        active_ns: 99 * S,
        since_ns: 97 * S,
        wants,
        ..ResidentJob::default()
    };
    let (high, low) = (Class::Guaranteed, Class::Opportunistic);
    let arbitration = Arbitration::new(10.0);
    let victims = |all: &[ResidentJob], id| {
        let mut all = all.to_vec();
        let waits = all.iter_mut().find(|one| one.id == TenantId(id));
        waits.expect("one of them").space_bytes = GIB;
        let residents = residents(&all, 12 * GIB, 100 * S);
        arbitration
            .more_space_for(&residents, TenantId(id))
            .map(|space| space.victims)
    };
    let all = [of(1, high, true), of(2, high, true)];
    assert_eq!(victims(&all, 1), Some(vec![TenantId(2)]));
    let all = [of(1, high, true), of(2, low, true)];
    assert_eq!(victims(&all, 1), Some(vec![TenantId(2)]));
    assert_eq!(victims(&all, 2), None);
    // A job that has just come keeps its place for a moment; if both wait, one of them gives way at
    // once.
    let mut new = [of(1, high, true), of(2, high, true)];
    new[1].since_ns = 99 * S;
    assert_eq!(victims(&new, 1), None);
    new[1].space_bytes = GIB;
    assert_eq!(victims(&new, 1), Some(vec![TenantId(2)]));
    let mut stuck = all;
    stuck[1].stuck_until_ns = 101 * S;
    assert_eq!(victims(&stuck, 1), None);
}

#[test]
fn thrashing_is_seen_answered_and_over_in_the_end() {
    let mut jobs: Vec<Job> = (1..=3).map(|id| Job::new(id, 10, 1)).collect();
    jobs[2].resident.class = Class::Opportunistic;
    let mut world = World::new(16, jobs);
    // Switches that take forty times as long as the link lets expect.
    let mut seen = (false, false);
    for _ in 0..400 {
        world.run(S);
        world.arbitration.switched(world.now_ns, 600 * MS);
        let level = world.arbitration.pressure().level();
        seen.0 |= level == Level::Pressed;
        seen.1 |= level == Level::Thrashing;
    }
    assert_eq!(seen, (true, true));
    assert!(world.arbitration.pressure().stretch() > 1);
    assert!(
        world.arbitration.is_parked(TenantId(3)),
        "the lowest class first"
    );
    assert!(
        !world.arbitration.is_parked(TenantId(1)),
        "never the last one"
    );
    world.run(600 * S);
    assert_eq!(world.arbitration.pressure().level(), Level::Calm);
    assert_eq!(world.arbitration.pressure().stretch(), 1);
    assert!((1..=3).all(|id| !world.arbitration.is_parked(TenantId(id))));
}

#[derive(Clone, Debug)]
struct Draw {
    gib: u64,
    weight: u32,
    low: bool,
    busy_ms: u64,
    silent_ms: u64,
    fixed_mib: u64,
}

fn draw() -> impl Strategy<Value = Draw> {
    (
        1u64..14,
        1u32..1000,
        any::<bool>(),
        5u64..5000,
        prop_oneof![Just(0u64), 1u64..5000],
        0u64..300,
    )
        .prop_map(|(gib, weight, low, busy_ms, silent_ms, fixed_mib)| Draw {
            gib,
            weight: weight * 1000,
            low,
            busy_ms,
            silent_ms,
            fixed_mib,
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever comes: the sum fits at any time (the world asserts it), terms last, nobody of the
    /// highest class starves, and the time lost is bounded.
    #[test]
    fn terms_last_and_nobody_starves(draws in proptest::collection::vec(draw(), 1..6)) {
        let jobs: Vec<Job> = (1..).zip(&draws).map(|(id, draw)| {
            let mut job = Job::new(id, draw.gib, draw.weight);
            if draw.low {
                job.resident.class = Class::Opportunistic;
            }
            job.resident.fixed_bytes = draw.fixed_mib << 20;
            (job.busy_ns, job.silent_ns) = (draw.busy_ms * MS, draw.silent_ms * MS);
            job
        }).collect();
        let mut world = World::new(16, jobs);
        world.run(400 * S);
        for job in &world.jobs {
            for cut in &job.cut {
                let own = job.resident.class;
                let preempted = (own, cut.by) == (Class::Opportunistic, Class::Guaranteed);
                prop_assert!(cut.by == own || preempted, "{:?}", cut);
                // A job that has been idle for as long as its switch takes is evicted before its
                // term is over, and a parked job has no term. A switch of several victims is longer
                // than what each of them was weighed by.
                let early = preempted || cut.parked || job.silent_ns > 0;
                prop_assert!(early || cut.term_ns >= 10 * cut.switch_ns / draws.len() as u64, "{:?}", cut);
            }
            let fixed: u64 = world.jobs.iter().map(|job| job.resident.fixed_bytes).sum();
            let could = job.resident.evictable_bytes + fixed <= 16 * GIB;
            if job.resident.class == Class::Guaranteed && could && job.silent_ns == 0 {
                prop_assert!(job.in_ns > 0, "starved");
            }
        }
        if draws.iter().all(|draw| draw.silent_ms == 0 && draw.low == draws[0].low) {
            let lost = world.switching_ns as f64 / (400 * S) as f64;
            prop_assert!(lost < 0.25, "{lost}");
        }
    }
}

fn mixed() -> impl Strategy<Value = Vec<ResidentJob>> {
    let one = (0..6u64, 0..4u64, any::<bool>());
    prop::collection::vec(one, 1..6).prop_map(|all| {
        let job = |(id, (movable, fixed, out)): (u64, (u64, u64, bool))| ResidentJob {
            id: TenantId(id),
            weight_ppm: 1,
            evictable_bytes: movable * GIB,
            resident_bytes: if out { 0 } else { movable * GIB },
            fixed_bytes: fixed * GIB,
            out: out && movable > 0,
            ..ResidentJob::default()
        };
        (0..).zip(all).map(job).collect()
    })
}

proptest! {
    /// What a job hears that it can have is there when all others have left, and no more.
    #[test]
    fn what_can_be_had_is_what_is_there_when_all_have_left(all in mixed(), capacity in 1..20u64) {
        let id = all[0].id;
        let known = ResidentJobs {
            now_ns: S,
            capacity_bytes: capacity * GIB,
            all: &all,
        };
        let most = known.attainable_bytes(id, false);
        let mut gone = all.clone();
        for one in &mut gone {
            one.resident_bytes = if one.id == id { one.evictable_bytes } else { 0 };
            one.out = one.id != id;
        }
        let lacks = |space_bytes| {
            let mut gone = gone.clone();
            gone[0].space_bytes = space_bytes;
            let residents = ResidentJobs { all: &gone, ..known };
            residents.lacking_bytes(0)
        };
        let own_bytes = gone[0].evictable_bytes;
        let all_bytes = known.attainable_bytes(id, true);
        prop_assert_eq!(all_bytes.saturating_sub(own_bytes), most);
        if most > 0 {
            prop_assert_eq!(lacks(most), 0);
        }
        prop_assert!(lacks(most + 1) > 0);
    }
}
