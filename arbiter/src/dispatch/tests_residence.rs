//! Tenants whose memories do not fit together, in virtual time, on real pages.

use channel::{Answer, Footprint, Order, OrderState, Reason, ResidencyMode, Verb};
use policy::Class;

use super::tests::{MS, US, greedy, setup};
use super::*;
use crate::residency::{HostBooks, ResidencyTerms, State};

const S: u64 = 1000 * MS;
/// The device has eight of these.
const UNIT: u64 = 128 << 20;
const STEP_NS: u64 = 200 * US;
/// What an agent moves in a step: some 40 GB/s.
const CHUNK: u64 = 8 << 20;

/// The client's side: carries out orders a chunk at a time.
struct Agent {
    pages: Rc<ClientPages>,
    claimed: Footprint,
    /// Number of the order that was answered.
    done: u64,
    refuses: Reason,
    silent: bool,
    /// It runs once so much is back.
    begins_at_bytes: u64,
}

impl Agent {
    fn new(units: u64) -> Self {
        let pages = Rc::new(ClientPages::create().expect("pages"));
        let mode = ResidencyMode {
            evictable: true,
            ..ResidencyMode::default()
        };
        pages.arbiter.set_residency(mode, None);
        let claimed = Footprint {
            evictable_bytes: units * UNIT,
            resident_bytes: units * UNIT,
            ..Footprint::default()
        };
        let new = Self {
            pages,
            claimed,
            done: 0,
            refuses: Reason::None,
            silent: false,
            begins_at_bytes: u64::MAX,
        };
        new.tell();
        new
    }

    fn tell(&self) {
        let want = self.pages.client.want(0).expect("device");
        want.set_footprint(&self.claimed);
    }

    fn answer(&self, order: &Order, state: OrderState, reason: Reason) {
        let want = self.pages.client.want(0).expect("device");
        want.answer(Answer {
            number: order.number,
            state,
            reason,
        });
    }

    fn step(&mut self, now_ns: u64, free_bytes: &mut u64) {
        let order = self
            .pages
            .arbiter
            .device(0)
            .and_then(|device| device.order());
        let Some(order) = order.filter(|order| order.number != self.done && !self.silent) else {
            return;
        };
        assert!(
            order.verb == Verb::Restore || !self.pages.arbiter.is_open(0),
            "memory leaves under an open gate"
        );
        let claimed = &mut self.claimed;
        match order.verb {
            Verb::Evict if self.refuses != Reason::None => {
                self.answer(&order, OrderState::Refused, self.refuses);
                self.done = order.number;
            }
            Verb::Evict => {
                let bytes = CHUNK.min(claimed.resident_bytes);
                claimed.resident_bytes -= bytes;
                claimed.moved_out_bytes += bytes;
                claimed.host_bytes = claimed
                    .host_bytes
                    .max(claimed.evictable_bytes - claimed.resident_bytes);
                *free_bytes += bytes;
                if claimed.resident_bytes == 0 {
                    self.done = order.number;
                    self.tell();
                    self.answer(&order, OrderState::Evicted, Reason::None);
                }
            }
            _ => {
                let bytes = CHUNK.min(claimed.evictable_bytes - claimed.resident_bytes);
                if bytes <= *free_bytes {
                    claimed.resident_bytes += bytes;
                    claimed.moved_in_bytes += bytes;
                    *free_bytes -= bytes;
                }
                if claimed.resident_bytes == claimed.evictable_bytes {
                    self.done = order.number;
                    self.tell();
                    self.answer(&order, OrderState::Resident, Reason::None);
                } else if now_ns > order.deadline_mono_ns {
                    *free_bytes += claimed.resident_bytes;
                    claimed.resident_bytes = 0;
                    self.done = order.number;
                    self.tell();
                    self.answer(&order, OrderState::Refused, Reason::DeviceMemory);
                } else if claimed.resident_bytes >= self.begins_at_bytes {
                    self.answer(&order, OrderState::Begun, Reason::None);
                }
            }
        }
        self.tell();
    }
}

/// A device of eight units, with tenants of so many units and so much weight each. The first one
/// has come, the others have been away from the start as far as they do not fit.
struct World {
    scheduler: DeviceScheduler,
    now_ns: u64,
    next_ns: Option<u64>,
    agents: Vec<Agent>,
    free_bytes: u64,
    /// Steps in which each tenant's gate was open.
    open: Vec<u64>,
    /// Of these, steps in which not all of its memory was there.
    early: Vec<u64>,
    /// Steps in which nobody's was.
    idle: u64,
}

impl World {
    fn new(tenants: &[(u64, u32, Class)], host_units: u64) -> Self {
        let mut scheduler = DeviceScheduler::new(0, setup(Mode::Exclusive), 0);
        let books = Rc::new(std::cell::RefCell::new(HostBooks::default()));
        books.borrow_mut().set_limit(host_units * UNIT);
        scheduler.set_up_residency(10.0, &books, 8 * UNIT);
        let mut free_bytes = 8 * UNIT;
        let mut agents = Vec::new();
        for (at, (units, weight, class)) in tenants.iter().enumerate() {
            let mut agent = Agent::new(*units);
            if let Some(left) = free_bytes.checked_sub(units * UNIT) {
                free_bytes = left;
            } else {
                agent.claimed.resident_bytes = 0;
                agent.tell();
                agent.answer(
                    &Order {
                        number: 1,
                        verb: Verb::Evict,
                        resident_target_bytes: 0,
                        deadline_mono_ns: 0,
                    },
                    OrderState::Evicted,
                    Reason::None,
                );
                agent.done = 1;
            }
            let terms = Terms {
                residency: ResidencyTerms {
                    evictable: true,
                    ..ResidencyTerms::default()
                },
                ..Terms::plain(*class, *weight)
            };
            let at = at as u64;
            scheduler.add(0, TenantId(at), terms, at, Rc::clone(&agent.pages));
            scheduler.note_memory(TenantId(at), (units * UNIT, units * UNIT), None);
            agents.push(agent);
        }
        let count = agents.len();
        Self {
            scheduler,
            now_ns: 0,
            next_ns: Some(0),
            agents,
            free_bytes,
            open: vec![0; count],
            early: vec![0; count],
            idle: 0,
        }
    }

    fn two(host_units: u64) -> Self {
        let one = (6, 500_000, Class::Guaranteed);
        Self::new(&[one, one], host_units)
    }

    fn run(&mut self, ns: u64, busy: impl Fn(usize, u64) -> bool) {
        let end_ns = self.now_ns + ns;
        while self.now_ns < end_ns {
            self.now_ns += STEP_NS;
            let waiting = |agents: &[Agent]| -> u32 {
                agents.iter().map(|one| one.pages.client.waiting(0)).sum()
            };
            let before = waiting(&self.agents);
            for (at, agent) in self.agents.iter().enumerate() {
                if busy(at, self.now_ns) {
                    greedy(&agent.pages);
                } else {
                    silent(&agent.pages);
                }
            }
            let mut rang = waiting(&self.agents) > before;
            for agent in &mut self.agents {
                let done = agent.done;
                agent.step(self.now_ns, &mut self.free_bytes);
                // A failure is reported at once.
                rang |= agent.done != done && agent.claimed.resident_bytes == 0;
            }
            if rang || self.next_ns.is_none_or(|next_ns| next_ns <= self.now_ns) {
                self.next_ns = self.scheduler.step(self.now_ns);
            }
            let mut idle = true;
            for (at, agent) in self.agents.iter().enumerate() {
                if agent.pages.arbiter.is_open(0) {
                    let there = agent.claimed.resident_bytes == agent.claimed.evictable_bytes;
                    let enough = agent.claimed.resident_bytes >= agent.begins_at_bytes;
                    assert!(there || enough, "tenant {at} runs without its memory");
                    self.early[at] += u64::from(!there);
                    self.open[at] += 1;
                    idle = false;
                }
            }
            self.idle += u64::from(idle);
        }
    }

    fn part(&self, at: usize) -> f64 {
        self.open[at] as f64 / self.open.iter().sum::<u64>() as f64
    }

    fn state(&self, at: u64) -> State {
        let residency_status = self.scheduler.residency_status(TenantId(at));
        residency_status.expect("it is evictable").state
    }
}

fn silent(pages: &Rc<ClientPages>) {
    let want = pages.client.want(0).expect("device");
    while pages.client.waiting(0) > 0 {
        want.end_waiting();
    }
}

#[test]
fn two_that_do_not_fit_take_turns_and_the_device_is_busy_nine_tenths_of_the_time() {
    let mut world = World::two(100);
    world.run(S, |_, _| true);
    (world.open, world.idle) = (vec![0; 2], 0);
    world.run(20 * S, |_, _| true);
    assert!((world.part(0) - 0.5).abs() < 0.05, "{:?}", world.open);
    let steps = (20 * S / STEP_NS) as f64;
    let idle = world.idle as f64 / steps;
    assert!(idle < 0.12, "{idle}");
    let (switches, _) = world.scheduler.arbitration().pressure().totals();
    assert!((20..200).contains(&switches), "{switches}");
    let evictions = world
        .scheduler
        .residency_status(TenantId(0))
        .expect("one")
        .figures
        .evictions;
    assert!(evictions > 5, "{evictions}");
    let used = world
        .scheduler
        .usage(TenantId(0))
        .expect("entity")
        .device_ns;
    assert!(used > 8 * S, "{used}");
}

#[test]
fn a_job_that_says_what_it_touches_runs_before_all_is_back_and_only_in_its_own_turn() {
    let mut world = World::two(100);
    world.agents[1].begins_at_bytes = UNIT;
    world.run(20 * S, |_, _| true);
    assert_eq!(world.early[0], 0);
    // Five of six units of every return, some milliseconds each.
    let restores = world
        .scheduler
        .residency_status(TenantId(1))
        .expect("evictable")
        .figures
        .restores;
    assert!(restores > 5, "{restores}");
    assert!(
        world.early[1] > restores * 5 * (UNIT / CHUNK) / 2,
        "{} of {restores}",
        world.early[1]
    );
    assert!((world.part(0) - 0.5).abs() < 0.06, "{:?}", world.open);
}

#[test]
fn one_that_runs_early_and_does_not_get_the_rest_stops_and_is_tried_again() {
    let mut world = World::two(100);
    world.agents[1].begins_at_bytes = UNIT;
    // Until it runs on a part; then the rest of its space is gone for a while.
    for _ in 0..100_000 {
        world.run(STEP_NS, |_, _| true);
        if world.early[1] > 2 {
            break;
        }
    }
    assert_eq!(world.state(1), State::Restoring);
    let lost = std::mem::take(&mut world.free_bytes);
    world.agents[0].silent = true;
    let mut stopped = 0;
    for _ in 0..10_000 {
        world.run(4 * MS, |at, _| at == 1);
        if world.state(1) == State::Evicted {
            stopped += 1;
            assert!(!world.agents[1].pages.arbiter.is_open(0));
        }
    }
    assert!(stopped > 50, "{stopped}: it was left alone for a while");
    world.agents[0].silent = false;
    world.free_bytes += lost;
    world.run(60 * S, |at, _| at == 1);
    assert_eq!(world.state(1), State::Resident);
}

#[test]
fn shares_hold_over_terms() {
    let world = |weights: [u32; 2]| {
        let all = weights.map(|weight| (6, weight, Class::Guaranteed));
        let mut world = World::new(&all, 100);
        world.run(S, |_, _| true);
        world.open = vec![0; 2];
        world.run(30 * S, |_, _| true);
        world.part(0)
    };
    let part = world([750_000, 250_000]);
    assert!((part - 0.75).abs() < 0.05, "{part}");
}

#[test]
fn one_that_stays_runs_while_others_are_switched() {
    let (small, large) = (
        (1, 200_000, Class::Guaranteed),
        (6, 400_000, Class::Guaranteed),
    );
    let mut world = World::new(&[small, large, large], 100);
    world.run(S, |_, _| true);
    world.idle = 0;
    world.run(10 * S, |_, _| true);
    let idle = world.idle as f64 / (10 * S / STEP_NS) as f64;
    assert!(idle < 0.03, "{idle}");
    assert!(
        world.open.iter().all(|open| *open > 500),
        "{:?}",
        world.open
    );
    assert_eq!(world.state(0), State::Resident);
}

#[test]
fn a_guaranteed_tenant_is_back_at_once_and_an_opportunistic_one_has_its_pauses() {
    let all = [
        (6, 500_000, Class::Guaranteed),
        (6, 500_000, Class::Opportunistic),
    ];
    let mut world = World::new(&all, 100);
    // Two seconds of work, two of silence.
    let busy = |at: usize, now_ns: u64| at == 1 || now_ns % (4 * S) < 2 * S;
    world.run(40 * S, busy);
    let steps = (40 * S / STEP_NS) as f64;
    let [high, low] = [0, 1].map(|at| world.open[at] as f64 / steps);
    assert!(high > 0.45, "{high}");
    assert!(low > 0.35, "{low}");
}

#[test]
fn short_pauses_cost_no_switch() {
    let mut world = World::two(100);
    world.run(S, |at, _| at == 0);
    let switches = |world: &World| world.scheduler.arbitration().pressure().totals().0;
    let before = switches(&world);
    // 4 ms of silence in every 20: less than any switch. The other one waits for the end of the
    // term.
    world.run(100 * MS, |at, now_ns| {
        at == 1 || now_ns % (20 * MS) > 4 * MS
    });
    assert!(switches(&world) <= before + 1);
}

#[test]
fn what_the_host_cannot_hold_stays_and_runs_on() {
    let mut world = World::two(3);
    world.run(5 * S, |_, _| true);
    assert_eq!(
        (world.state(0), world.state(1)),
        (State::Resident, State::Evicted)
    );
    assert!(world.part(0) > 0.999, "{:?}", world.open);
    let idle = world.idle as f64 / (5 * S / STEP_NS) as f64;
    assert!(idle < 0.05, "{idle}");
    let residency_status = world
        .scheduler
        .residency_status(TenantId(0))
        .expect("evictable");
    assert!(
        residency_status.figures.reason.contains("768MiB"),
        "{residency_status:?}"
    );
    assert!(!world.scheduler.take_residency_news().is_empty());
    assert_eq!(
        world.agents[0].claimed.moved_out_bytes, 0,
        "nothing has moved"
    );
}

#[test]
fn one_that_refuses_keeps_its_place_and_the_other_is_called_off() {
    let mut world = World::two(100);
    world.agents[0].refuses = Reason::Capturing;
    world.run(5 * S, |_, _| true);
    assert_eq!(world.state(1), State::Evicted);
    assert!(world.part(0) > 0.999, "{:?}", world.open);
    let idle = world.idle as f64 / (5 * S / STEP_NS) as f64;
    assert!(idle < 0.05, "{idle}");
    world.agents[0].refuses = Reason::None;
    world.run(40 * S, |_, _| true);
    assert!(world.part(1) > 0.2, "{:?}", world.open);
}

#[test]
fn a_process_that_says_nothing_holds_nobody_up_for_ever() {
    let mut world = World::two(100);
    world.run(S, |at, _| at == 0);
    world.agents[0].silent = true;
    // It is ordered to leave, says nothing, and its space is not given: the other one goes back in
    // the end, and is tried again.
    // When it is tried again is not of interest here: that it was given up at all is.
    let gives_up = (0..60).any(|_| {
        world.run(S, |_, _| true);
        let residency_status = world.scheduler.residency_status(TenantId(0));
        residency_status.expect("evictable").figures.failed
    });
    assert!(gives_up, "it is waited for without end");
    // It is killed, and what it had is free.
    world.free_bytes += world.agents[0].claimed.resident_bytes;
    world.scheduler.remove(world.now_ns, 0);
    world.scheduler.retire(world.now_ns, TenantId(0));
    world.agents.remove(0);
    world.open = vec![0; 1];
    world.run(40 * S, |_, _| true);
    assert_eq!(world.state(1), State::Resident);
    assert!(world.open[0] > 0);
}

#[test]
fn the_space_of_a_job_that_dies_on_its_way_out_is_free() {
    let mut world = World::two(100);
    world.run(S, |at, _| at == 0);
    // Until its eviction is under way.
    for _ in 0..100_000 {
        world.run(STEP_NS, |_, _| true);
        let part = world.agents[0].claimed;
        if part.resident_bytes < part.evictable_bytes && part.resident_bytes > 0 {
            break;
        }
    }
    assert_eq!(world.state(0), State::Evicting);
    world.free_bytes += world.agents[0].claimed.resident_bytes;
    world.scheduler.remove(world.now_ns, 0);
    world.scheduler.retire(world.now_ns, TenantId(0));
    world.agents.remove(0);
    world.open = vec![0; 1];
    world.run(S, |_, _| true);
    assert_eq!(world.state(1), State::Resident);
    assert!(world.open[0] > 1000, "{:?}", world.open);
}

#[test]
fn one_that_comes_from_an_earlier_arbiter_without_its_memory_does_not_run() {
    let mut world = World::two(100);
    // The other one is gone, and the device is free: no gate may be open before the memory is back.
    world.free_bytes += world.agents[0].claimed.resident_bytes;
    world.scheduler.remove(world.now_ns, 0);
    world.scheduler.retire(world.now_ns, TenantId(0));
    world.agents.remove(0);
    world.scheduler.remove(world.now_ns, 1);
    let terms = Terms {
        residency: ResidencyTerms {
            evictable: true,
            ..ResidencyTerms::default()
        },
        ..Terms::plain(Class::Guaranteed, 500_000)
    };
    let pages = Rc::clone(&world.agents[0].pages);
    world
        .scheduler
        .add(world.now_ns, TenantId(1), terms, 7, Rc::clone(&pages));
    assert!(!pages.arbiter.is_open(0));
    world.open = vec![0; 1];
    world.run(S, |_, _| true);
    assert_eq!(world.state(1), State::Resident);
    assert!(world.open[0] > 1000, "{:?}", world.open);
}

#[test]
fn a_tenant_that_is_sent_away_stays_away_until_it_is_called() {
    let mut world = World::two(100);
    world.run(500 * MS, |_, _| true);
    let mut terms = Terms {
        residency: ResidencyTerms {
            evictable: true,
            kept_away: true,
            ..ResidencyTerms::default()
        },
        ..Terms::plain(Class::Guaranteed, 500_000)
    };
    world.scheduler.call(world.now_ns, TenantId(0), false);
    world.scheduler.set_terms(TenantId(0), terms);
    world.next_ns = None;
    world.run(2 * S, |_, _| true);
    assert_eq!(
        (world.state(0), world.state(1)),
        (State::Evicted, State::Resident)
    );
    world.open = vec![0; 2];
    world.run(2 * S, |_, _| true);
    assert_eq!(world.open[0], 0);
    // The other one is silent and in the way; the one that was called comes without wanting the
    // device.
    terms.residency.kept_away = false;
    world.scheduler.set_terms(TenantId(0), terms);
    world.scheduler.call(world.now_ns, TenantId(0), true);
    world.next_ns = None;
    world.run(5 * S, |_, _| false);
    assert_eq!(
        (world.state(0), world.state(1)),
        (State::Resident, State::Evicted)
    );
}

/// How long it takes until a tenant that was called back is there, where its neighbour takes
/// `more_bytes` while it is on its way.
fn comes_back_after_ns(more_bytes: u64, neighbour_stays_busy: bool) -> u64 {
    let one = (4, 500_000, Class::Guaranteed);
    let mut world = World::new(&[one, one], 100);
    let mut terms = Terms {
        residency: ResidencyTerms {
            evictable: true,
            kept_away: true,
            ..ResidencyTerms::default()
        },
        ..Terms::plain(Class::Guaranteed, 500_000)
    };
    world.run(500 * MS, |_, _| true);
    world.scheduler.set_terms(TenantId(0), terms);
    world.scheduler.call(world.now_ns, TenantId(0), false);
    world.next_ns = None;
    world.run(S, |_, _| true);
    assert_eq!(world.state(0), State::Evicted);
    terms.residency.kept_away = false;
    world.scheduler.set_terms(TenantId(0), terms);
    world.scheduler.call(world.now_ns, TenantId(0), true);
    world.next_ns = None;
    let called_ns = world.now_ns;
    while world.agents[0].claimed.resident_bytes == 0 {
        world.run(STEP_NS, |_, _| true);
    }
    // An allocator that grows by a block; the device has given it already.
    let neighbour = &mut world.agents[1];
    neighbour.claimed.evictable_bytes += more_bytes;
    neighbour.claimed.resident_bytes += more_bytes;
    neighbour.tell();
    world.free_bytes -= more_bytes;
    let used_bytes = world.agents[1].claimed.evictable_bytes;
    world
        .scheduler
        .note_memory(TenantId(1), (used_bytes, used_bytes), None);
    while world.state(0) != State::Resident && world.now_ns < called_ns + 60 * S {
        world.run(MS, |at, _| at == 0 || neighbour_stays_busy);
    }
    let status = world
        .scheduler
        .residency_status(TenantId(0))
        .expect("evictable");
    assert!(!status.figures.failed, "{}", status.figures.reason);
    world.now_ns - called_ns
}

#[test]
fn an_arrival_that_is_overtaken_by_a_block_does_not_wait_for_its_deadline() {
    for more_bytes in [2 << 20, 32 << 20, 64 << 20, 96 << 20] {
        for busy in [true, false] {
            let ns = comes_back_after_ns(more_bytes, busy);
            let mib = more_bytes >> 20;
            println!(
                "now: {mib} MiB lacking, neighbour busy {busy}: back after {} ms",
                ns / MS
            );
            assert!(ns < 5 * S, "{mib} MiB, busy {busy}: {} ms", ns / MS);
        }
    }
}

#[test]
fn an_arrival_outlasts_the_account_of_a_neighbour_that_ends() {
    let mut world = World::two(100);
    world.run(S, |at, _| at == 0);
    world.scheduler.call(world.now_ns, TenantId(1), true);
    // Until its eviction is under way.
    while world.agents[0].claimed.resident_bytes == 6 * UNIT {
        world.run(STEP_NS, |_, _| true);
    }
    // Its process has ended; what it had is in the ledger until that is read again.
    world.free_bytes += world.agents[0].claimed.resident_bytes;
    let claimed = &mut world.agents[0].claimed;
    (claimed.evictable_bytes, claimed.resident_bytes) = (0, 0);
    world.agents[0].tell();
    world.agents[0].silent = true;
    world
        .scheduler
        .note_memory(TenantId(0), (6 * UNIT, 6 * UNIT), None);
    world.scheduler.remove(world.now_ns, 0);
    world.next_ns = None;
    world.run(100 * MS, |at, _| at == 1);
    let status = world
        .scheduler
        .residency_status(TenantId(1))
        .expect("evictable");
    assert!(!status.figures.failed, "{}", status.figures.reason);
    world.scheduler.note_memory(TenantId(0), (0, 0), None);
    let ended_ns = world.now_ns;
    while world.state(1) != State::Resident && world.now_ns < ended_ns + 60 * S {
        world.run(MS, |at, _| at == 1);
    }
    let ms = (world.now_ns - ended_ns) / MS;
    println!("now: back {ms} ms after the account of the one that ended was read");
    assert_eq!(world.state(1), State::Resident);
    let status = world
        .scheduler
        .residency_status(TenantId(1))
        .expect("evictable");
    assert!(!status.figures.failed, "{}", status.figures.reason);
}

/// One tenant that leaves after two seconds without work, on a device that it has for itself.
fn one_that_leaves_idle(after_ns: u64) -> World {
    let mut world = World::new(&[(6, 500_000, Class::Guaranteed)], 100);
    let terms = Terms {
        residency: ResidencyTerms {
            evictable: true,
            evict_after_ns: Some(after_ns),
            ..ResidencyTerms::default()
        },
        ..Terms::plain(Class::Guaranteed, 500_000)
    };
    world.scheduler.set_terms(TenantId(0), terms);
    world
}

#[test]
fn a_tenant_leaves_after_its_time_without_work_and_returns_with_work() {
    let mut world = one_that_leaves_idle(2 * S);
    // Pauses of a second and a half are no reason.
    world.run(12 * S, |_, now_ns| now_ns % (2 * S) < 500 * MS);
    assert_eq!(world.state(0), State::Resident);
    assert_eq!(world.agents[0].claimed.moved_out_bytes, 0);
    world.run(1500 * MS, |_, _| false);
    assert_eq!(world.state(0), State::Resident);
    world.run(1500 * MS, |_, _| false);
    assert_eq!(world.state(0), State::Evicted);
    assert_eq!(world.free_bytes, 8 * UNIT, "nobody needed it");
    world.run(20 * S, |_, _| false);
    assert_eq!(world.agents[0].claimed.moved_out_bytes, 6 * UNIT, "once");
    world.open = vec![0; 1];
    world.run(S, |_, _| true);
    assert_eq!(world.state(0), State::Resident);
    assert!(world.open[0] > 1000, "{:?}", world.open);
}

#[test]
fn submissions_that_nobody_sees_under_way_count_as_work() {
    let mut world = one_that_leaves_idle(2 * S);
    for _ in 0..8 {
        world.run(1500 * MS, |_, _| false);
        let pages = Rc::clone(&world.agents[0].pages);
        pages.client.thread(0).count_launch();
    }
    assert_eq!(world.state(0), State::Resident);
    world.run(3 * S, |_, _| false);
    assert_eq!(world.state(0), State::Evicted);
}

#[test]
fn one_that_is_woken_comes_without_work_and_stays_for_its_time() {
    let mut world = one_that_leaves_idle(2 * S);
    world.run(4 * S, |_, _| false);
    assert_eq!(world.state(0), State::Evicted);
    world.scheduler.wake(world.now_ns, TenantId(0));
    world.run(S, |_, _| false);
    assert_eq!(world.state(0), State::Resident);
    for _ in 0..5 {
        world.run(S, |_, _| false);
        world.scheduler.wake(world.now_ns, TenantId(0));
    }
    assert_eq!(world.state(0), State::Resident);
    assert_eq!(world.agents[0].claimed.moved_out_bytes, 6 * UNIT);
    // No wish of then brings it back once it has left.
    world.run(10 * S, |_, _| false);
    assert_eq!(world.state(0), State::Evicted);
    assert_eq!(world.agents[0].claimed.moved_out_bytes, 12 * UNIT);
    world.scheduler.wake(world.now_ns, TenantId(7));
}

#[test]
fn however_short_the_time_it_stays_for_as_long_as_its_way_takes() {
    let mut world = one_that_leaves_idle(1);
    // 768 MiB at the rate that is taken for the link take 80 ms.
    world.run(10 * S, |_, now_ns| now_ns % (100 * MS) < 60 * MS);
    assert_eq!(world.agents[0].claimed.moved_out_bytes, 0);
    world.run(S, |_, _| false);
    assert_eq!(world.state(0), State::Evicted);
}

#[test]
fn one_that_cannot_leave_is_tried_less_and_less() {
    let mut world = one_that_leaves_idle(S);
    world.agents[0].refuses = Reason::Capturing;
    world.run(100 * S, |_, _| false);
    assert_eq!(world.state(0), State::Resident);
    let news = world.scheduler.take_residency_news();
    assert!((2..12).contains(&news.len()), "{news:?}");
    world.agents[0].refuses = Reason::None;
    world.run(40 * S, |_, _| false);
    assert_eq!(world.state(0), State::Evicted);
}

#[test]
fn an_allocation_that_waits_for_space_gets_it() {
    let all = [
        (6, 500_000, Class::Guaranteed),
        (1, 500_000, Class::Guaranteed),
    ];
    let mut world = World::new(&all, 100);
    world.run(3 * S, |_, _| true);
    let want = |world: &World| {
        let pages = Rc::clone(&world.agents[1].pages);
        move |begin: bool| {
            let want = pages.client.want(0).expect("device");
            if begin {
                want.begin_waiting_for_space(4 * UNIT);
            } else {
                want.end_waiting_for_space(4 * UNIT);
            }
        }
    };
    let space = want(&world);
    space(true);
    for _ in 0..100_000 {
        if world.free_bytes >= 4 * UNIT {
            break;
        }
        world.run(STEP_NS, |at, _| at == 0);
    }
    assert!(world.free_bytes >= 4 * UNIT);
    assert_ne!(world.state(0), State::Resident);
    // It has it, and its place for a term.
    space(false);
    world.free_bytes -= 4 * UNIT;
    let claimed = &mut world.agents[1].claimed;
    claimed.evictable_bytes += 4 * UNIT;
    claimed.resident_bytes += 4 * UNIT;
    world.agents[1].tell();
    world.run(10 * S, |_, _| true);
    assert!(
        world.open.iter().all(|open| *open > 1000),
        "{:?}",
        world.open
    );
}

#[test]
fn what_can_never_be_had_makes_nobody_leave() {
    let one = (1, 500_000, Class::Guaranteed);
    let mut world = World::new(&[(6, 500_000, Class::Guaranteed), one], 100);
    world.run(S, |_, _| true);
    // Seven units are all that there is beside its own one.
    let pages = Rc::clone(&world.agents[1].pages);
    let want = pages.client.want(0).expect("device");
    for units in [8, 100, u64::MAX / UNIT] {
        want.begin_waiting_for_space(units * UNIT);
        world.run(5 * S, |at, _| at == 0);
        want.end_waiting_for_space(units * UNIT);
    }
    let left = world.agents[0].claimed.moved_out_bytes;
    println!("now: {left} bytes have left for what can never be had");
    assert_eq!(left, 0);
    want.begin_waiting_for_space(7 * UNIT);
    world.run(5 * S, |at, _| at == 0);
    assert!(world.agents[0].claimed.moved_out_bytes >= 6 * UNIT);
}

#[test]
fn who_asks_hears_what_it_can_come_to_have() {
    let one = (1, 500_000, Class::Guaranteed);
    let mut world = World::new(&[(6, 500_000, Class::Guaranteed), one], 100);
    world.run(S, |_, _| true);
    let pages = Rc::clone(&world.agents[1].pages);
    let said = || pages.arbiter.device(0).expect("device").space();
    assert!(!said().answers(1), "nobody has asked");
    // A stranger has two units, by figures that are old.
    world.scheduler.set_ceiling(8 * UNIT, 0);
    let books = Rc::new(std::cell::RefCell::new(HostBooks::default()));
    books.borrow_mut().set_limit(100 * UNIT);
    world.scheduler.set_up_residency(10.0, &books, 6 * UNIT);
    let number = pages.client.ask_for_space();
    world.scheduler.hear(world.now_ns, 1, number, 0);
    world.run(50 * MS, |_, _| false);
    let answer = said();
    assert!(answer.answers(number) && !answer.confirms(number));
    assert_eq!(
        (answer.most_bytes, answer.ceiling_bytes),
        (5 * UNIT, 7 * UNIT)
    );
    world.scheduler.set_ceiling(8 * UNIT, world.now_ns);
    world.run(50 * MS, |_, _| false);
    assert!(said().confirms(number));
    assert!(!said().is_met(number), "nobody waits");
    // What a thread waits for is there once the other one has left.
    let want = pages.client.want(0).expect("device");
    want.begin_waiting_for_space(5 * UNIT);
    let number = pages.client.ask_for_space();
    world.scheduler.hear(world.now_ns, 1, number, 0);
    assert!(!said().is_met(number));
    world.run(5 * S, |_, _| false);
    assert!(said().is_met(number));
}

#[test]
fn who_arrives_is_woken_when_others_are_evicted() {
    let mut world = World::two(100);
    world.run(5 * S, |_, _| true);
    // Each order is one word to the agent; more words say that there is space.
    for agent in &world.agents {
        let order = agent.pages.arbiter.device(0).and_then(|one| one.order());
        let orders = order.expect("an order").number;
        let claimed = u64::from(agent.pages.arbiter.orders());
        assert!(claimed > orders, "{claimed} words for {orders} orders");
    }
    // Nobody leaves, nobody is woken.
    world.run(S, |_, _| false);
    let claimed: Vec<u32> = world
        .agents
        .iter()
        .map(|one| one.pages.arbiter.orders())
        .collect();
    world.run(5 * S, |_, _| false);
    for (agent, claimed) in world.agents.iter().zip(claimed) {
        assert_eq!(agent.pages.arbiter.orders(), claimed);
    }
}

#[test]
fn one_of_two_evicted_jobs_locks_host_memory_at_a_time() {
    let mut world = World::two(100);
    world.run(10 * MS, |_, _| false);
    for agent in &world.agents {
        agent.pages.client.want_to_pin(3);
    }
    world.run(100 * MS, |_, _| false);
    let has = |world: &World, at: usize, number: u16| {
        let arbiter = &world.agents[at].pages.arbiter;
        arbiter.pinning_permitted_until(number).is_some()
    };
    assert!(has(&world, 0, 3) && !has(&world, 1, 3));
    world.agents[0].pages.client.want_to_pin(0);
    world.run(100 * MS, |_, _| false);
    assert!(has(&world, 1, 3));
    // The other one keeps it, and loses it when its term is over.
    world.agents[0].pages.client.want_to_pin(4);
    world.run(100 * MS, |_, _| false);
    assert!(!has(&world, 0, 4));
    world.run(S, |_, _| false);
    assert!(has(&world, 0, 4));
}

#[test]
fn who_waits_here_is_let_in_where_what_has_to_end_elsewhere_before_a_departure_may_wait_for_it() {
    let mut world = World::new(
        &[
            (2, 500_000, Class::Guaranteed),
            (2, 500_000, Class::Guaranteed),
        ],
        100,
    );
    world.run(S, |_, _| true);
    // Its work on another device does not end, so that its process carries no order out.
    world.agents[0].silent = true;
    let terms = Terms {
        residency: ResidencyTerms {
            evictable: true,
            kept_away: true,
            ..ResidencyTerms::default()
        },
        ..Terms::plain(Class::Guaranteed, 500_000)
    };
    world.scheduler.call(world.now_ns, TenantId(0), false);
    world.scheduler.set_terms(TenantId(0), terms);
    world.next_ns = None;
    world.run(20 * MS, |_, _| true);
    let open = |world: &World| world.open[0] * STEP_NS / US;
    let (before_us, mut waited_ms) = (open(&world), 20);
    while open(&world) == before_us {
        world.run(MS, |_, _| true);
        waited_ms += 1;
        assert!(waited_ms < 200, "it is let in within a bounded time");
    }
    world.run(5 * S, |_, _| true);
    let open_us = open(&world) - before_us;
    println!("now: let in after {waited_ms} ms, for {open_us} us of 5 s");
    assert!(
        open_us <= 150_000,
        "{open_us}: no more than a drain is waited for, and now and then"
    );
    world.agents[0].silent = false;
    world.run(S, |_, _| true);
    assert!(matches!(world.state(0), State::Evicted));
    assert!(!world.agents[0].pages.arbiter.is_open(0));
}

#[test]
fn a_process_that_has_left_comes_back_where_the_work_of_another_may_wait_for_it() {
    let mut world = World::new(
        &[
            (2, 500_000, Class::Guaranteed),
            (2, 500_000, Class::Guaranteed),
        ],
        100,
    );
    // A second process of the first job, whose work does not end.
    let mut second = Agent::new(1);
    second.silent = true;
    let evictable = |kept_away| Terms {
        residency: ResidencyTerms {
            evictable: true,
            kept_away,
            ..ResidencyTerms::default()
        },
        ..Terms::plain(Class::Guaranteed, 500_000)
    };
    let pages = Rc::clone(&second.pages);
    (world.scheduler).add(0, TenantId(0), evictable(false), 2, pages);
    world.free_bytes -= UNIT;
    world.agents.push(second);
    world.open.push(0);
    world.early.push(0);
    world.run(S, |_, _| true);
    world.scheduler.call(world.now_ns, TenantId(0), false);
    world.scheduler.set_terms(TenantId(0), evictable(true));
    world.next_ns = None;
    let here = |world: &World| world.agents[0].claimed.resident_bytes;
    let mut ms = 0;
    while here(&world) > 0 {
        world.run(MS, |_, _| true);
        ms += 1;
        assert!(ms < 2000, "it leaves");
    }
    ms = 0;
    while here(&world) == 0 {
        world.run(MS, |_, _| true);
        ms += 1;
        assert!(
            ms < 5000,
            "it is called back before the deadline of its order"
        );
    }
    println!("now: it is called back after {ms} ms");
    // What it waited for has ended.
    world.agents[2].silent = false;
    world.run(5 * S, |_, _| true);
    assert_eq!(world.state(0), State::Evicted);
}
