//! Jobs on two devices whose memories do not fit together, in virtual time, on real pages.

use channel::{Answer, Footprint, OrderState, Reason, ResidencyMode, Verb};
use policy::Class;

use super::tests::{MS, US, setup};
use super::*;
use crate::residency::{HostBooks, ResidencyTerms, State};

const S: u64 = 1000 * MS;
const UNIT: u64 = 32 << 20;
const STEP_NS: u64 = 200 * US;
/// What an agent moves in a step: some 40 GB/s.
const CHUNK: u64 = 8 << 20;

/// One process with memory on both devices; its agent carries one order out after the other.
struct Job {
    pages: Rc<ClientPages>,
    claimed: [Footprint; 2],
    done: [u64; 2],
    /// The device that it works on, or waits for.
    at: usize,
    in_ns: u64,
    away_ns: u64,
    longest_ns: u64,
}

impl Job {
    fn is_in(&self) -> bool {
        let whole = |one: &Footprint| one.resident_bytes == one.evictable_bytes;
        self.claimed.iter().all(whole)
    }

    fn tell(&self) {
        for (device, claimed) in self.claimed.iter().enumerate() {
            let want = self.pages.client.want(device).expect("device");
            want.set_footprint(claimed);
        }
    }

    fn carry_out(&mut self, free: &mut [u64; 2]) -> bool {
        for (device, free) in free.iter_mut().enumerate() {
            let order = self.pages.arbiter.device(device).and_then(|it| it.order());
            let Some(order) = order.filter(|order| order.number != self.done[device]) else {
                continue;
            };
            let claimed = &mut self.claimed[device];
            let state = if order.verb == Verb::Evict {
                let bytes = CHUNK.min(claimed.resident_bytes);
                claimed.resident_bytes -= bytes;
                *free += bytes;
                (claimed.resident_bytes == 0).then_some(OrderState::Evicted)
            } else {
                let bytes = CHUNK.min(claimed.evictable_bytes - claimed.resident_bytes);
                if bytes <= *free {
                    claimed.resident_bytes += bytes;
                    *free -= bytes;
                }
                let whole = claimed.resident_bytes == claimed.evictable_bytes;
                whole.then_some(OrderState::Resident)
            };
            claimed.host_bytes = claimed.evictable_bytes - claimed.resident_bytes;
            self.tell();
            if let Some(state) = state {
                self.done[device] = order.number;
                let want = self.pages.client.want(device).expect("device");
                want.answer(Answer {
                    number: order.number,
                    state,
                    reason: Reason::None,
                });
                return true;
            }
            // The next order waits until this one is carried out.
            return false;
        }
        false
    }
}

/// Two devices of eight units each.
struct Hall {
    books: Rc<std::cell::RefCell<HostBooks>>,
    schedulers: Vec<DeviceScheduler>,
    links: joint::Links,
    gangs: GangScheduler,
    jobs: Vec<Job>,
    free: [u64; 2],
    now_ns: u64,
}

impl Hall {
    fn new(units: &[u64], gang: bool) -> Self {
        let books = Rc::new(std::cell::RefCell::new(HostBooks::default()));
        books.borrow_mut().set_limit(1000 * UNIT);
        let mut schedulers: Vec<DeviceScheduler> = (0..2)
            .map(|device| DeviceScheduler::new(device, setup(Mode::Exclusive), 0))
            .collect();
        for scheduler in &mut schedulers {
            scheduler.set_up_residency(10.0, &books, 8 * UNIT);
        }
        let mut new = Self {
            books,
            schedulers,
            links: joint::Links::default(),
            gangs: GangScheduler::default(),
            jobs: Vec::new(),
            free: [8 * UNIT; 2],
            now_ns: 0,
        };
        for (at, units) in (0..).zip(units) {
            let pages = Rc::new(ClientPages::create().expect("pages"));
            let mode = ResidencyMode {
                evictable: true,
                ..ResidencyMode::default()
            };
            pages.arbiter.set_residency(mode, None);
            let there = new.free[0] >= units * UNIT;
            let claimed = Footprint {
                evictable_bytes: units * UNIT,
                resident_bytes: if there { units * UNIT } else { 0 },
                host_bytes: if there { 0 } else { units * UNIT },
                ..Footprint::default()
            };
            let job = Job {
                pages,
                claimed: [claimed; 2],
                done: [u64::from(!there); 2],
                at: 0,
                in_ns: 0,
                away_ns: 0,
                longest_ns: 0,
            };
            job.tell();
            for device in 0..2 {
                new.free[device] -= claimed.resident_bytes;
                if !there {
                    let want = job.pages.client.want(device).expect("device");
                    want.answer(Answer {
                        number: 1,
                        state: OrderState::Evicted,
                        reason: Reason::None,
                    });
                }
            }
            for scheduler in &mut new.schedulers {
                let terms = Self::terms(gang, false);
                scheduler.add(0, TenantId(at), terms, at, Rc::clone(&job.pages));
                scheduler.note_memory(TenantId(at), (units * UNIT, units * UNIT), None);
            }
            new.jobs.push(job);
        }
        new
    }

    fn terms(gang: bool, kept_away: bool) -> Terms {
        Terms {
            gang,
            residency: ResidencyTerms {
                evictable: true,
                kept_away,
                ..ResidencyTerms::default()
            },
            ..Terms::plain(Class::Guaranteed, 500_000)
        }
    }

    fn step(&mut self) {
        for scheduler in &mut self.schedulers {
            scheduler.step(self.now_ns);
        }
        let (mut touched, _) = self.gangs.step(self.now_ns, &mut self.schedulers);
        for round in 0..2 {
            for (at, scheduler) in self.schedulers.iter_mut().enumerate() {
                if touched & (1 << at) != 0 {
                    scheduler.step(self.now_ns);
                }
            }
            if round == 0 {
                touched = joint::step(self.now_ns, &mut self.links, 0b11, &mut self.schedulers);
            }
        }
    }

    /// Every job works on one device after the other, a step each; one that is not in waits.
    fn run(&mut self, ns: u64, waits_at: impl Fn(usize) -> Option<usize>) {
        let end_ns = self.now_ns + ns;
        while self.now_ns < end_ns {
            self.now_ns += STEP_NS;
            for (number, job) in self.jobs.iter_mut().enumerate() {
                let open = job.pages.arbiter.is_open(job.at);
                let works = job.is_in() && open;
                for device in 0..2 {
                    let want = job.pages.client.want(device).expect("device");
                    let at = if job.is_in() {
                        Some(job.at)
                    } else {
                        waits_at(number)
                    };
                    let waits = !works && at.unwrap_or(job.at) == device;
                    let before = job.pages.client.waiting(device) > 0;
                    if waits && !before {
                        want.begin_waiting();
                    } else if !waits && before {
                        want.end_waiting();
                    }
                }
                if works {
                    let thread = job.pages.client.thread(0);
                    thread.set_device(job.at as u32);
                    thread.count_launch();
                    thread.all_marked();
                    job.at = 1 - job.at;
                    job.in_ns += STEP_NS;
                    job.away_ns = 0;
                } else {
                    job.away_ns += STEP_NS;
                    job.longest_ns = job.longest_ns.max(job.away_ns);
                }
                job.carry_out(&mut self.free);
            }
            if self.now_ns.is_multiple_of(MS) {
                self.gangs.form(&mut self.schedulers);
            }
            self.step();
        }
    }

    fn keep_away(&mut self, job: usize, gang: bool, away: bool) {
        for scheduler in &mut self.schedulers {
            scheduler.set_terms(TenantId(job as u64), Self::terms(gang, away));
            scheduler.call(self.now_ns, TenantId(job as u64), !away);
        }
    }

    fn states(&self, job: u64) -> Vec<State> {
        let all = self.schedulers.iter();
        all.map(|it| it.residency_status(TenantId(job)).expect("evictable").state)
            .collect()
    }

    fn moves(&self, job: u64) -> u64 {
        let all = self.schedulers.iter();
        let figures = all.map(|it| {
            it.residency_status(TenantId(job))
                .expect("evictable")
                .figures
        });
        figures.map(|one| one.evictions + one.restores).sum()
    }
}

#[test]
fn two_jobs_that_fill_two_devices_take_turns_on_both() {
    for gang in [true, false] {
        let mut hall = Hall::new(&[5, 5], gang);
        hall.run(20 * S, |_| None);
        let longest_ns = hall.jobs.iter().map(|job| job.longest_ns).max();
        let least_ns = hall.jobs.iter().map(|job| job.in_ns).min();
        println!(
            "now: gang {gang}: the longest wait was {} ms, and each ran for {} ms of 20000 at least",
            longest_ns.unwrap_or(0) / MS,
            least_ns.unwrap_or(0) / MS
        );
        for job in &hall.jobs {
            assert!(
                job.in_ns > 5 * S,
                "gang {gang}: it ran for {} ms",
                job.in_ns / MS
            );
            assert!(
                job.longest_ns < 3 * S,
                "gang {gang}: out for {} ms",
                job.longest_ns / MS
            );
        }
    }
}

#[test]
fn a_job_stays_on_both_devices_where_the_host_cannot_take_all_of_it() {
    let mut hall = Hall::new(&[5, 5], true);
    // What is out has ten of these; one device's part of the other job would fit as well.
    hall.books.borrow_mut().set_limit(16 * UNIT);
    hall.run(5 * S, |_| None);
    println!(
        "now: {} moves of a job whose memory the host cannot take, it ran for {} ms of 5000",
        hall.moves(0),
        hall.jobs[0].in_ns / MS
    );
    assert_eq!(hall.moves(0), 0, "half of it was moved");
    assert!(hall.jobs[0].in_ns > 2 * S, "{} ms", hall.jobs[0].in_ns / MS);
    // With space for it they take turns.
    hall.books.borrow_mut().set_limit(1000 * UNIT);
    hall.jobs[1].longest_ns = 0;
    hall.run(40 * S, |_| None);
    assert!(hall.jobs[1].in_ns > 5 * S, "{} ms", hall.jobs[1].in_ns / MS);
}

#[test]
fn nobody_moves_for_a_job_for_which_another_cannot() {
    // The third fits where both others leave, and the host can take either but not both.
    let mut hall = Hall::new(&[3, 4, 7], true);
    hall.books.borrow_mut().set_limit(24 * UNIT);
    hall.run(5 * S, |_| None);
    println!(
        "now: {} and {} moves for a job that cannot come",
        hall.moves(0),
        hall.moves(1)
    );
    assert_eq!((hall.moves(0), hall.moves(1)), (0, 0), "in vain");
    hall.books.borrow_mut().set_limit(1000 * UNIT);
    hall.run(40 * S, |_| None);
    for job in &hall.jobs {
        assert!(job.in_ns > 2 * S, "it ran for {} ms", job.in_ns / MS);
    }
}

#[test]
fn three_jobs_of_which_two_fit_have_their_turns_wherever_their_threads_wait() {
    let mut hall = Hall::new(&[4, 4, 4], true);
    hall.run(20 * S, |_| Some(0));
    for job in &hall.jobs {
        assert!(job.in_ns > 2 * S, "it ran for {} ms", job.in_ns / MS);
        assert!(job.longest_ns < 5 * S, "out for {} ms", job.longest_ns / MS);
    }
}

#[test]
fn a_job_on_two_devices_is_evicted_and_restored_by_hand_any_number_of_times() {
    for gang in [true, false] {
        let mut hall = Hall::new(&[2], gang);
        hall.run(S / 10, |_| None);
        for round in 1..=6 {
            hall.keep_away(0, gang, true);
            hall.run(S / 2, |_| None);
            assert_eq!(
                hall.states(0),
                [State::Evicted; 2],
                "gang {gang}, round {round}"
            );
            hall.keep_away(0, gang, false);
            hall.run(S / 2, |_| None);
            assert_eq!(
                hall.states(0),
                [State::Resident; 2],
                "gang {gang}, round {round}"
            );
            assert_eq!(
                hall.moves(0),
                round * 4,
                "gang {gang}: once each way on each device"
            );
        }
        println!(
            "now: gang {gang}: {} moves for 6 evictions and 6 restores",
            hall.moves(0)
        );
    }
}
