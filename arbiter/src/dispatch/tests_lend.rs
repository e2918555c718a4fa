//! Lending in virtual time, on real pages: programs that launch kernels, and a device that runs one
//! context at a time.

use std::collections::VecDeque;

use channel::Following;
use policy::Class;

use super::tests::{Bench, MS, US, setup};
use super::*;

/// How far the model's time goes on at once.
const STEP_NS: u64 = 10 * US;
/// What the hardware gives a context before it turns to the next one, and what a turn takes.
const HARDWARE_SLICE_NS: u64 = 2 * MS;
const TURN_NS: u64 = 140 * US;

/// A program: a kernel of `kernel_ns` after each `host_ns` of its host; after `wait_after` of them,
/// if that is not 0, it waits until all are over.
struct Program {
    kernel_ns: u64,
    host_ns: u64,
    wait_after: u64,
    /// What it says of its kernels, over their length.
    says: f64,
    /// It goes on whatever its gate says.
    unruly: bool,

    ready_ns: u64,
    launched: u64,
    queue: VecDeque<u64>,
    at_gate: bool,
    in_wait: bool,
    /// Device time that it got.
    got_ns: u64,
}

impl Program {
    fn new(kernel_ns: u64, host_ns: u64, wait_after: u64) -> Self {
        Self {
            kernel_ns,
            host_ns,
            wait_after,
            says: 1.0,
            unruly: false,
            ready_ns: 0,
            launched: 0,
            queue: VecDeque::new(),
            at_gate: false,
            in_wait: false,
            got_ns: 0,
        }
    }

    /// Never idle: launches take a tenth of its kernels' time.
    fn fills(kernel_ns: u64) -> Self {
        Self::new(kernel_ns, kernel_ns / 10, 0)
    }

    fn host(&mut self, now_ns: u64, pages: &ClientPages) {
        let client = &pages.client;
        let side = client.host_side(0).expect("a page of ours");
        let in_wait = self.wait_after != 0
            && self.launched.is_multiple_of(self.wait_after)
            && !self.queue.is_empty();
        if in_wait != self.in_wait {
            self.in_wait = in_wait;
            match in_wait {
                true => side
                    .in_wait()
                    .fetch_add(1, std::sync::atomic::Ordering::Relaxed),
                false => side
                    .in_wait()
                    .fetch_sub(1, std::sync::atomic::Ordering::Relaxed),
            };
            self.ready_ns = self.ready_ns.max(now_ns + self.host_ns);
        }
        if in_wait || now_ns < self.ready_ns {
            return;
        }
        let gate = pages.arbiter.device(0).expect("device");
        let pending_ns = self.queue.iter().sum::<u64>();
        let window_ns = u64::from(gate.window_us()) * 1000;
        let fits = window_ns == 0 || pending_ns == 0 || pending_ns + self.kernel_ns <= window_ns;
        let may = self.unruly || gate.pass(now_ns).is_ok() && fits;
        let want = client.want(0).expect("device");
        if may == self.at_gate {
            self.at_gate = !may;
            match may {
                true => want.end_waiting(),
                false => want.begin_waiting(),
            }
        }
        if !may || self.queue.len() >= 30 {
            return;
        }
        if self.queue.is_empty() {
            side.count_fresh();
        }
        let stream = client.stream(0).expect("slot");
        client.weigh_next(0, (self.kernel_ns as f64 * self.says) as u64);
        stream.issue();
        client.thread(0).count_launch();
        client.thread(0).all_marked();
        self.queue.push_back(self.kernel_ns);
        self.launched += 1;
        self.ready_ns = now_ns + self.host_ns;
    }
}

struct World {
    bench: Bench,
    programs: Vec<Program>,
    on: usize,
    since_ns: u64,
    turn_until_ns: u64,
    busy_ns: u64,
}

impl World {
    fn new(shares: &[u32], programs: Vec<Program>) -> Self {
        let mut bench = Bench::new(shares);
        for pages in &bench.pages {
            pages.client.set_weighs();
            pages.client.claim_stream(0).expect("slot");
        }
        bench.scheduler.run_as(0, setup(Mode::Lend));
        Self {
            bench,
            programs,
            on: 0,
            since_ns: 0,
            turn_until_ns: 0,
            busy_ns: 0,
        }
    }

    /// The device for a step: the context that it is on, or the next one.
    fn device(&mut self, now_ns: u64) {
        let count = self.programs.len();
        let others = (1..count).any(|by| !self.programs[(self.on + by) % count].queue.is_empty());
        let over = now_ns >= self.since_ns + HARDWARE_SLICE_NS && others;
        if self.programs[self.on].queue.is_empty() || over {
            let next = (1..count)
                .map(|by| (self.on + by) % count)
                .find(|at| !self.programs[*at].queue.is_empty());
            if let Some(next) = next {
                (self.on, self.since_ns) = (next, now_ns + TURN_NS);
                self.turn_until_ns = now_ns + TURN_NS;
            }
        }
        if now_ns < self.turn_until_ns {
            return;
        }
        let program = &mut self.programs[self.on];
        let mut left_ns = STEP_NS;
        while left_ns > 0
            && let Some(kernel_ns) = program.queue.front_mut()
        {
            let ns = left_ns.min(*kernel_ns);
            *kernel_ns -= ns;
            left_ns -= ns;
            program.got_ns += ns;
            self.busy_ns += ns;
            if *kernel_ns == 0 {
                program.queue.pop_front();
                let stream = self.bench.pages[self.on].client.stream(0).expect("slot");
                stream.passed(stream.done() + 1);
            }
        }
    }

    /// Lets time pass; `looks`: the arbiter is there.
    fn run_beside(&mut self, ns: u64, looks: bool) {
        let end_ns = self.bench.now_ns + ns;
        while self.bench.now_ns < end_ns {
            self.bench.now_ns += STEP_NS;
            let now_ns = self.bench.now_ns;
            let waiting = |world: &Self| world.programs.iter().filter(|it| it.at_gate).count();
            let before = waiting(self);
            for (program, pages) in self.programs.iter_mut().zip(&self.bench.pages) {
                program.host(now_ns, pages);
            }
            self.device(now_ns);
            let rang = waiting(self) > before;
            if looks && (rang || self.bench.next_ns.is_some_and(|next_ns| next_ns <= now_ns)) {
                self.bench.step();
            }
        }
    }

    fn run(&mut self, ns: u64) {
        self.run_beside(ns, true);
    }

    /// What each got from here on, over the time.
    fn parts(&mut self, ns: u64) -> Vec<f64> {
        let got = |world: &Self| -> Vec<u64> {
            let programs = world.programs.iter();
            programs.map(|program| program.got_ns).collect()
        };
        let before = got(self);
        self.run(ns);
        let got = got(self);
        let more = got.iter().zip(before).map(|(after, before)| after - before);
        more.map(|more_ns| more_ns as f64 / ns as f64).collect()
    }

    fn why(&self) -> (bool, String) {
        let (at_once, why) = self.bench.scheduler.running();
        (at_once, why.to_owned())
    }
}

#[test]
fn two_that_fill_the_device_get_their_shares_and_use_all_of_it() {
    for (shares, most) in [([3, 1], 0.75), ([1, 1], 0.5), ([1, 9], 0.1)] {
        let programs = vec![Program::fills(200 * US), Program::fills(100 * US)];
        let mut world = World::new(&shares, programs);
        world.run(500 * MS);
        let parts = world.parts(2000 * MS);
        let sum: f64 = parts.iter().sum();
        println!("{shares:?}: {parts:?}, {:?}", world.why());
        assert!(sum > 0.93, "{shares:?}: {parts:?}");
        assert!(
            (parts[0] / sum - most).abs() < 0.03,
            "{shares:?}: {parts:?}"
        );
        assert_eq!(world.why(), (true, String::new()));
    }
}

#[test]
fn what_one_leaves_idle_is_the_others() {
    // Half of the device at most, and pauses of a millisecond.
    let programs = vec![Program::new(MS, MS, 1), Program::fills(200 * US)];
    let mut world = World::new(&[1, 1], programs);
    world.run(500 * MS);
    let parts = world.parts(2000 * MS);
    println!("{parts:?}");
    assert!(parts.iter().sum::<f64>() > 0.8, "{parts:?}");
    assert!(parts[0] > 0.25, "half of what it has alone: {parts:?}");
}

#[test]
fn two_with_gaps_keep_their_speed() {
    let gaps = || Program::new(50 * US, 200 * US, 0);
    let mut by_itself = World::new(&[1], vec![gaps()]);
    let by_itself = by_itself.parts(1000 * MS)[0];
    let mut world = World::new(&[1, 1], vec![gaps(), gaps()]);
    world.run(500 * MS);
    let parts = world.parts(1000 * MS);
    println!("{by_itself}: {parts:?}");
    assert!(parts.iter().all(|part| part / by_itself > 0.9), "{parts:?}");
}

#[test]
fn what_marks_weigh_is_charged_and_comes_to_the_devices_own_account() {
    let programs = vec![Program::fills(200 * US), Program::fills(100 * US)];
    let mut world = World::new(&[3, 1], programs);
    world.run(2000 * MS);
    let charged = |at: u64| world.bench.usage(at).device_ns as f64;
    let got = |at: usize| world.programs[at].got_ns as f64;
    for at in [0, 1] {
        let over = charged(at) / got(at as usize);
        println!("{at}: {over}");
        // Turns are part of it.
        assert!((0.97..1.1).contains(&over), "{at}: {over}");
    }
}

#[test]
fn an_arbiter_that_stops_keeps_nobody_out() {
    let programs = vec![Program::fills(200 * US), Program::fills(100 * US)];
    let mut world = World::new(&[3, 1], programs);
    world.run(500 * MS);
    world.busy_ns = 0;
    world.run_beside(500 * MS, false);
    assert!(world.busy_ns > 400 * MS, "{} ns", world.busy_ns);
}

#[test]
fn what_is_submitted_after_a_gate_opened_by_itself_is_not_past_it() {
    let programs = vec![Program::fills(200 * US), Program::fills(20 * US)];
    let mut world = World::new(&[9, 1], programs);
    world.run(500 * MS);
    let mut longest = 0;
    for _ in 0..20 {
        let before = world.programs[1].launched;
        world.run_beside(100 * MS, false);
        longest = longest.max(world.programs[1].launched - before);
        world.run(MS);
        assert_eq!(world.why(), (true, String::new()));
    }
    assert!(longest > 1000, "it has submitted {longest} times");
}

#[test]
fn who_was_shut_is_open_when_the_other_one_has_gone() {
    let programs = vec![Program::fills(200 * US), Program::fills(100 * US)];
    let mut world = World::new(&[9, 1], programs);
    world.run(500 * MS);
    world.bench.scheduler.remove(world.bench.now_ns, 0);
    world
        .bench
        .scheduler
        .retire(world.bench.now_ns, TenantId(0));
    world.programs[0].ready_ns = u64::MAX;
    world.run(100 * MS);
    let parts = world.parts(200 * MS);
    assert!(parts[1] > 0.95, "{parts:?}");
    assert!(world.bench.open(1));
}

#[test]
fn another_mode_takes_the_device_from_all_but_one() {
    let programs = vec![Program::fills(200 * US), Program::fills(100 * US)];
    let mut world = World::new(&[3, 1], programs);
    world.run(200 * MS);
    world
        .bench
        .scheduler
        .run_as(world.bench.now_ns, setup(Mode::Exclusive));
    world.run(20 * MS);
    for _ in 0..50 {
        world.run(MS);
        assert!(!(world.bench.open(0) && world.bench.open(1)));
    }
    world
        .bench
        .scheduler
        .run_as(world.bench.now_ns, setup(Mode::Lend));
    world.run(200 * MS);
    let parts = world.parts(1000 * MS);
    assert!((parts[0] - 0.73).abs() < 0.04, "{parts:?}");
}

#[test]
fn what_one_had_while_all_were_in_is_no_debt_in_slices() {
    for before in [Mode::Lend, Mode::Concurrent] {
        let gaps = Program::new(20 * US, 400 * US, 0);
        let mut world = World::new(&[1, 1], vec![Program::fills(200 * US), gaps]);
        let now_ns = world.bench.now_ns;
        world.bench.scheduler.run_as(now_ns, setup(before));
        world.run(3000 * MS);
        // It wants more from here on.
        (world.programs[1].kernel_ns, world.programs[1].host_ns) = (200 * US, 20 * US);
        let now_ns = world.bench.now_ns;
        world.bench.scheduler.run_as(now_ns, setup(Mode::Exclusive));
        world.run(20 * MS);
        let parts = world.parts(500 * MS);
        let even = (parts[0] - parts[1]).abs() < 0.1;
        assert!(even, "after {before:?}: {parts:?}");
    }
}

#[test]
fn a_process_that_does_not_weigh_or_is_not_followed_brings_slices() {
    let programs = || vec![Program::fills(200 * US), Program::fills(100 * US)];
    let mut world = World::new(&[1, 1], programs());
    world.bench.pages[1].client.set_following(Following::Events);
    world.run(10 * MS);
    assert_eq!(
        world.why(),
        (
            false,
            "slices: the driver does not write when work is done".to_owned()
        )
    );
    // Who changes that changes the mode after some time only.
    world.bench.pages[1].client.set_following(Following::Writes);
    world.run(4900 * MS);
    assert!(!world.why().0);
    world.run(200 * MS);
    assert!(world.why().0);
    // One of an earlier version, once it has a stream.
    let mut bench = Bench::new(&[1, 1]);
    bench.scheduler.run_as(0, setup(Mode::Lend));
    bench.step();
    assert!(bench.scheduler.running().0, "it has done nothing yet");
    bench.pages[0].client.claim_stream(0).expect("slot");
    bench.step();
    let (at_once, why) = bench.scheduler.running();
    assert!(!at_once && why.contains("earlier version"), "{why}");
}

#[test]
fn a_floor_above_the_share_brings_slices() {
    let programs = vec![Program::fills(200 * US), Program::fills(100 * US)];
    let mut world = World::new(&[500_000, 500_000], programs);
    let mut terms = Terms::plain(Class::Guaranteed, 500_000);
    terms.min_ppm = 500_000;
    world.bench.scheduler.set_terms(TenantId(0), terms);
    world.run(10 * MS);
    assert!(world.why().0, "that is its share");
    terms.min_ppm = 600_000;
    world.bench.scheduler.set_terms(TenantId(0), terms);
    world.run(10 * MS);
    assert_eq!(
        world.why(),
        (false, "slices: a job's floor is above its share".to_owned())
    );
}

#[test]
fn a_sum_that_falls_brings_slices_for_a_while() {
    let programs = || vec![Program::fills(200 * US), Program::fills(200 * US)];
    let mut world = World::new(&[1, 1], programs());
    world.run(50 * MS);
    let lie = |world: &mut World| {
        let stream = world.bench.pages[1].client.stream(0).expect("slot");
        let done = stream.done();
        stream.passed(done - 3);
        world.run(MS);
        world.bench.pages[1]
            .client
            .stream(0)
            .expect("slot")
            .passed(done);
    };
    let lasts_ms = |world: &mut World| {
        let mut ms = 0;
        while !world.why().0 && ms < 30_000 {
            world.run(10 * MS);
            ms += 10;
        }
        ms
    };
    lie(&mut world);
    assert!(world.why().1.contains("takes back"), "{:?}", world.why());
    let first_ms = lasts_ms(&mut world);
    assert!((4_900..=5_100).contains(&first_ms), "{first_ms}");
    world.run(50 * MS);
    lie(&mut world);
    let second_ms = lasts_ms(&mut world);
    assert!((9_900..=10_100).contains(&second_ms), "{second_ms}");
}

#[test]
fn who_submits_past_its_gate_brings_slices() {
    let mut unruly = Program::fills(50 * US);
    unruly.unruly = true;
    let mut world = World::new(&[3, 1], vec![Program::fills(200 * US), unruly]);
    world.run(1000 * MS);
    assert!(
        world.why().1.contains("its gate is closed"),
        "{:?}",
        world.why()
    );
}

#[test]
fn who_says_a_tenth_of_the_truth_takes_little_from_the_other() {
    let mut liar = Program::fills(200 * US);
    liar.says = 0.1;
    let mut world = World::new(&[1, 1], vec![Program::fills(200 * US), liar]);
    world.run(1000 * MS);
    let parts = world.parts(3000 * MS);
    println!("{parts:?} {:?}", world.why());
    assert!(parts[0] > 0.4, "{parts:?}");
}
