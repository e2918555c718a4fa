//! Pages that are overwritten with everything that a process can put there. The daemon runs with
//! overflow checks here: a sum that a client can make overflow ends it, and the test with it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use channel::Page;
use channel::client::ClientEnd;
use control::{JobSettings, JobSpec};

use crate::bench::{Daemon, Worker, attach, named, until};

/// What follows the header of a page, as words. A test that names fields would miss those that come
/// later.
fn words<T: Page>(page: &'static T) -> &'static [AtomicU64] {
    const HEADER: usize = 8;
    let words = std::ptr::from_ref(page).cast::<AtomicU64>();
    // SAFETY: a page is mapped for good, writable but for the arbiter's half, which is not given
    // here, aligned to 64 bytes and made of atomics and reserved integers only.
    let all = unsafe { std::slice::from_raw_parts(words, size_of::<T>() / 8) };
    &all[HEADER..]
}

fn nonsense(client: &ClientEnd) -> Vec<&'static [AtomicU64]> {
    let mut pages = vec![words(client.tenant), words(client.client)];
    pages.extend(client.signatures.map(words));
    pages
}

/// xorshift: any numbers, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

fn violations(daemon: &Daemon, job: &str) -> Vec<String> {
    let events = daemon.operator().events(0, 0).expect("events");
    events
        .into_iter()
        .filter(|event| event.kind == "misbehaviour" && event.job == job)
        .filter_map(|event| Some(event.fields["violation"].as_str()?.to_owned()))
        .collect()
}

fn goes_on(daemon: &Daemon, worker: &Worker) {
    let before = worker.launches();
    until("the honest one goes on", || {
        (worker.launches() > before + 100).then_some(())
    });
    assert!(daemon.operator().list().expect("served").len() >= 2);
}

#[test]
fn a_tenants_page_of_impossible_counts_holds_nobody_up_and_is_reported() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let [evil, honest] = ["evil", "honest"].map(|name| {
        let job = operator.register(named(name, 0.5)).expect("registered");
        attach(&job)
    });
    let worker = Worker::start(honest);
    goes_on(&daemon, &worker);
    // Slots without end, lists as long as a number can say, additions that are never over.
    for word in words(evil.tenant) {
        word.store(u64::MAX, Relaxed);
    }
    goes_on(&daemon, &worker);
    until("it is reported", || {
        violations(&daemon, "evil")
            .contains(&"nonsense".to_owned())
            .then_some(())
    });
    goes_on(&daemon, &worker);
    assert!(violations(&daemon, "honest").is_empty());
}

#[test]
fn pages_that_are_overwritten_all_the_time_end_neither_the_daemon_nor_anybodys_turns() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let evil = operator.register(JobSpec {
        settings: JobSettings {
            evictable: Some(true),
            ..named("evil", 0.5).settings
        },
        ..named("evil", 0.5)
    });
    let evil = attach(&evil.expect("registered"));
    let honest = operator.register(named("honest", 0.5)).expect("registered");
    let worker = Worker::start(attach(&honest));
    let (over, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut numbers = Numbers(0x0005_deec_e66d);
            for round in 0.. {
                // Long enough that every reader comes by.
                let kind = round / 32 % 8;
                let shift = numbers.next() % 64;
                rounds.store(round, Relaxed);
                if over.load(Relaxed) {
                    break;
                }
                for page in nonsense(&evil) {
                    for word in page {
                        let any = numbers.next();
                        word.store(
                            match kind {
                                0 => u64::MAX,
                                1 => 1 << shift,
                                2 => 1 << 63 | any >> shift,
                                3 => any & 0x1_0000_0001,
                                4 => any % 300,
                                _ => any,
                            },
                            Relaxed,
                        );
                    }
                }
                evil.ring();
                std::thread::sleep(std::time::Duration::from_millis(numbers.next() % 8));
            }
        });
        while rounds.load(Relaxed) < 16 * 32 {
            goes_on(&daemon, &worker);
            assert!(!operator.status().expect("served").jobs.is_empty());
        }
        over.store(true, Relaxed);
    });
    drop(evil);
    goes_on(&daemon, &worker);
}
