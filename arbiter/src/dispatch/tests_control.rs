//! Live control, bounds, classes, violations and several holders: device schedulers in virtual
//! time, on real pages.

use policy::quantum::Lengths;
use policy::{Class, Decision, Few, Slice, SlicePolicy, View};

use super::tests::{Bench, MS, US, greedy, setup};
use super::*;

fn terms(class: Class, weight_ppm: u32) -> Terms {
    Terms::plain(class, weight_ppm)
}

fn both_greedy(bench: &mut Bench, ns: u64) -> [u64; 2] {
    let before = [0, 1].map(|at| bench.usage(at).device_ns);
    bench.run(ns, |pages| pages.iter().for_each(greedy));
    bench.step();
    [0, 1].map(|at| bench.usage(at as u64).device_ns - before[at])
}

#[test]
fn a_paused_tenant_loses_the_device_at_once_and_gets_it_back() {
    let mut bench = Bench::new(&[500_000, 500_000]);
    both_greedy(&mut bench, 100 * MS);
    let paused = Terms {
        paused: true,
        ..terms(Class::Guaranteed, 500_000)
    };
    while !bench.open(0) {
        both_greedy(&mut bench, 50 * US);
    }
    bench.scheduler.set_terms(TenantId(0), paused);
    bench.step();
    assert!(!bench.open(0) && bench.open(1), "in the same step");
    let got = both_greedy(&mut bench, 1000 * MS);
    assert!(got[0] == 0 && got[1] > 990 * MS, "{got:?}");
    bench
        .scheduler
        .set_terms(TenantId(0), terms(Class::Guaranteed, 500_000));
    bench.step();
    let got = both_greedy(&mut bench, 1000 * MS);
    assert!(got[0].abs_diff(got[1]) < 20 * MS, "{got:?}");

    let mut solo = Bench::new(&[1_000_000]);
    solo.run(10 * MS, |pages| greedy(&pages[0]));
    solo.scheduler.set_terms(TenantId(0), paused);
    solo.step();
    assert!(!solo.open(0), "also with nobody else there");
}

#[test]
fn a_cap_holds_solo_beside_others_and_at_once() {
    let capped = Terms {
        max_ppm: Some(300_000),
        ..terms(Class::Guaranteed, 500_000)
    };
    let mut solo = Bench::new(&[1_000_000]);
    solo.scheduler.set_terms(TenantId(0), capped);
    solo.run(5000 * MS, |pages| greedy(&pages[0]));
    let part = solo.usage(0).share_total(solo.now_ns);
    assert!((part - 0.3).abs() < 0.01, "{part}");

    let mut bench = Bench::new(&[500_000, 500_000]);
    bench.scheduler.set_terms(TenantId(0), capped);
    both_greedy(&mut bench, 100 * MS);
    let got = both_greedy(&mut bench, 5000 * MS);
    assert!((1450 * MS..1550 * MS).contains(&got[0]), "{got:?}");
    assert!(got[1] > 3400 * MS, "the rest is the other's: {got:?}");

    bench
        .scheduler
        .run_as(bench.now_ns, setup(Mode::Concurrent));
    bench.step();
    let got = both_greedy(&mut bench, 5000 * MS);
    assert!(got[0] < 1700 * MS, "{got:?}");
}

#[test]
fn a_floor_reaches_an_opportunistic_tenant_beside_a_guaranteed_one() {
    let mut bench = Bench::new(&[1_000_000, 1_000_000]);
    bench
        .scheduler
        .set_terms(TenantId(1), terms(Class::Opportunistic, 1_000_000));
    both_greedy(&mut bench, 100 * MS);
    let got = both_greedy(&mut bench, 2000 * MS);
    assert_eq!(got[1], 0, "without a floor it starves");
    let floor = Terms {
        min_ppm: 100_000,
        ..terms(Class::Opportunistic, 1_000_000)
    };
    bench.scheduler.set_terms(TenantId(1), floor);
    both_greedy(&mut bench, 500 * MS);
    let got = both_greedy(&mut bench, 5000 * MS);
    assert!((450 * MS..560 * MS).contains(&got[1]), "{got:?}");
    assert!(got[0] > 4400 * MS, "{got:?}");
}

#[test]
fn an_opportunistic_tenant_lives_in_the_gaps_of_a_guaranteed_one() {
    let mut bench = Bench::new(&[1_000_000, 1_000_000]);
    bench
        .scheduler
        .set_terms(TenantId(1), terms(Class::Opportunistic, 1_000_000));
    // The guaranteed one works for 6 ms and pauses for 4, by its own clock: time at a closed gate
    // delays it.
    let (mut worked, mut rested, mut rounds) = (0u64, 0u64, 0u64);
    let second = 1_000 * MS;
    bench.run(10 * second, |pages| {
        let resting = worked >= 6 * MS;
        if resting {
            rested += 50 * US;
            if rested >= 4 * MS {
                (worked, rested) = (0, 0);
                rounds += 1;
            }
        } else {
            greedy(&pages[0]);
            if pages[0].arbiter.is_open(0) {
                worked += 50 * US;
            }
        }
        greedy(&pages[1]);
    });
    assert!(rounds >= 980, "{rounds} of 1000 rounds alone");
    let window = |at: usize| {
        let device = bench.pages[at].arbiter.device(0).expect("device");
        device.window_us()
    };
    assert_eq!((window(0), window(1)), (2000, 500));
    let got = bench.usage(1).device_ns;
    let left = 10 * second - rounds * 6 * MS;
    assert!(got * 10 > left * 8, "{got} of {left}");
}

#[test]
fn new_quanta_modes_and_policies_take_effect_within_a_slice() {
    let mut bench = Bench::new(&[500_000, 500_000]);
    both_greedy(&mut bench, 1000 * MS);
    let grants = |bench: &Bench| bench.usage(0).grants + bench.usage(1).grants;
    let count = |bench: &mut Bench| {
        let before = grants(bench);
        both_greedy(bench, 1000 * MS);
        grants(bench) - before
    };
    let before = count(&mut bench);
    assert!((180..=210).contains(&before), "{before}");
    let mut longer = setup(Mode::Exclusive);
    longer.pace.quantum = Lengths::between(QuantumBounds {
        min_us: 20_000,
        max_us: 50_000,
    });
    bench.scheduler.run_as(bench.now_ns, longer);
    bench.step();
    let after = count(&mut bench);
    assert!((15..=22).contains(&after), "{after}");
    bench.scheduler.run_as(bench.now_ns, setup(Mode::Exclusive));
    bench.step();
    let back = count(&mut bench);
    assert!((180..=210).contains(&back), "{back}");

    bench
        .scheduler
        .run_as(bench.now_ns, setup(Mode::Concurrent));
    bench.step();
    assert!(bench.open(0) && bench.open(1));
    assert!(bench.scheduler.running().0);
    bench.scheduler.run_as(bench.now_ns, setup(Mode::Exclusive));
    both_greedy(&mut bench, 20 * MS);
    assert!(bench.open(0) != bench.open(1));
    let got = both_greedy(&mut bench, 1000 * MS);
    assert!(got[0].abs_diff(got[1]) < 20 * MS, "{got:?}");
}

/// Every tenant that wants to may hold the device, as many as there is space for, in the order of
/// their numbers, for a slice each.
#[derive(Debug)]
struct FirstComers;

impl SlicePolicy for FirstComers {
    fn name(&self) -> &'static str {
        "first-comers"
    }

    fn charge(&mut self, _: TenantId, _: u64) {}

    fn decide(&mut self, view: &View<'_>) -> Decision {
        let over = |id| {
            let due = view
                .held(id)
                .is_some_and(|held| held.due_ns() <= view.now_ns);
            due || !view.tenant(id).is_some_and(policy::TenantView::is_ready)
        };
        let mut decision = Decision::default();
        let mut held = 0;
        for holder in view.holders {
            if over(holder.id) {
                decision.revoke.push(holder.id);
            } else {
                held += 1;
            }
        }
        let waiting = view
            .tenants
            .iter()
            .filter(|tenant| tenant.is_ready() && view.held(tenant.id).is_none());
        let grant: Few<Slice> = waiting
            .take(view.device.holders.max(1) - held)
            .map(|tenant| Slice {
                tenant: tenant.id,
                quantum_us: view.quantum.max_us,
            })
            .collect();
        decision.grant = grant;
        decision
    }
}

#[test]
fn a_device_for_two_holders_has_two_and_splits_their_time() {
    let mut bench = Bench::new(&[300_000, 300_000, 300_000]);
    let several = Setup {
        holders: 2,
        policy: Some(Box::new(FirstComers)),
        ..setup(Mode::Exclusive)
    };
    bench.scheduler.run_as(bench.now_ns, several);
    bench.run(50 * MS, |pages| pages.iter().for_each(greedy));
    let before: Vec<u64> = (0..3).map(|at| bench.usage(at).device_ns).collect();
    for _ in 0..4000 {
        bench.run(50 * US, |pages| pages.iter().for_each(greedy));
        let open = (0..3).filter(|at| bench.open(*at)).count();
        assert!((1..=2).contains(&open), "{open}");
    }
    bench.step();
    let used: Vec<u64> = (0..3)
        .map(|at| bench.usage(at).device_ns - before[at as usize])
        .collect();
    let sum: u64 = used.iter().sum();
    assert!((195 * MS..=201 * MS).contains(&sum), "{used:?}");
    assert!(used.iter().all(|used| *used > 30 * MS), "{used:?}");
}

#[test]
fn auto_runs_jobs_that_idle_the_device_all_at_once() {
    let mut bench = Bench::new(&[500_000, 500_000]);
    bench.scheduler.run_as(0, setup(Mode::Auto));
    assert!(!bench.scheduler.running().0);
    // Both submit every 2 ms when they may, and each waits for the other in slices.
    let mut round = 0u64;
    bench.run(20_000 * MS, |pages| {
        round += 1;
        if round.is_multiple_of(40) {
            pages.iter().for_each(greedy);
        }
    });
    assert!(
        bench.scheduler.running().0,
        "{}",
        bench.scheduler.running().1
    );
    assert!(bench.open(0) && bench.open(1));
    assert!(bench.scheduler.running().1.starts_with("concurrent"));
}

/// The window of a tenant, as its page says.
fn window(bench: &Bench, at: usize) -> Window {
    let device = bench.pages[at].arbiter.device(0).expect("device");
    device.window()
}

#[test]
fn where_all_are_in_nobody_has_a_narrow_window_from_the_first_moment_on() {
    let mut bench = Bench::new(&[500_000, 500_000]);
    bench.scheduler.run_as(0, setup(Mode::Auto));
    let mut round = 0u64;
    let mut live = |pages: &[Rc<ClientPages>]| {
        round += 1;
        if round.is_multiple_of(40) {
            pages.iter().for_each(greedy);
        }
    };
    while !bench.scheduler.running().0 {
        bench.run(50 * US, &mut live);
        assert!(bench.now_ns < 10_000 * MS, "never tried");
    }
    let begun_ns = bench.now_ns;
    let mut narrow_ns = 0;
    while bench.now_ns < begun_ns + 2000 * MS {
        bench.run(10 * MS, &mut live);
        let wide = |at| window(&bench, at) == Window::beside(20_000);
        narrow_ns += if wide(0) && wide(1) { 0 } else { 10 * MS };
    }
    println!("now: {} ms of 2000 in a narrow window", narrow_ns / MS);
    assert_eq!(narrow_ns, 0);
}

#[test]
fn alone_in_the_mode_concurrent_the_clock_says_what_work_takes() {
    let mut bench = Bench::new(&[500_000, 500_000]);
    bench
        .scheduler
        .set_terms(TenantId(1), Terms::plain(Class::Opportunistic, 500_000));
    bench.scheduler.run_as(0, setup(Mode::Concurrent));
    bench.run(100 * MS, |pages| pages.iter().for_each(greedy));
    let windows = [0, 1].map(|at| window(&bench, at));
    assert_eq!(windows, [Window::beside(20_000), Window::beside(500)]);
    bench.scheduler.remove(bench.now_ns, 1);
    bench.run(100 * MS, |pages| greedy(&pages[0]));
    assert_eq!(window(&bench, 0), Window::always(20_000));
    println!("now: {windows:?} beside each other");
}

#[test]
fn work_that_never_ends_costs_the_others_its_own_time_and_its_place() {
    let mut bench = Bench::new(&[500_000, 500_000]);
    let client = Rc::clone(&bench.pages[0]);
    let stream = client.client.claim_stream(0).expect("slot").1;
    stream.issue();
    bench.run(2 * MS, |pages| greedy(&pages[0]));
    bench.wait(1);
    for _ in 0..30 {
        bench.run(100 * MS, |pages| greedy(&pages[1]));
        bench.scheduler.inspect(bench.now_ns, &mut |_| false);
    }
    let (demoted, count) = bench.scheduler.record(TenantId(0), bench.now_ns);
    assert!(
        matches!(demoted, Some(Violation::Endless { .. })),
        "{demoted:?}"
    );
    assert_eq!(count, 1, "reported once");
    let reported = bench.scheduler.take_violations();
    assert!(matches!(
        reported[..],
        [(TenantId(0), Violation::Endless { .. })]
    ));
    assert!(bench.open(1) && !bench.open(0));
    // It never gets in again while the other wants the device, though it waits and its kernel goes
    // on.
    let grants = bench.usage(0).grants;
    bench.run(1000 * MS, |pages| pages.iter().for_each(greedy));
    assert_eq!(bench.usage(0).grants, grants);
    // Its work ends, its penalty passes, and it has its place back.
    stream.settle();
    let mut forgiven = Vec::new();
    for _ in 0..120 {
        bench.run(100 * MS, |pages| pages.iter().for_each(greedy));
        forgiven.extend(bench.scheduler.inspect(bench.now_ns, &mut |_| false));
    }
    assert_eq!(forgiven, [TenantId(0)]);
    assert_eq!(bench.scheduler.record(TenantId(0), bench.now_ns).0, None);
    both_greedy(&mut bench, 4000 * MS);
    let got = both_greedy(&mut bench, 1000 * MS);
    assert!(got[0] > 450 * MS, "{got:?}");
}

/// A tenant with a kernel that loops on one stream, or with kernels of 0.3 s there, and short work
/// on another stream, of which it submits more whenever it is let in. What is reported of it in 6
/// s, and how often it was let in.
fn beside_a_loop(gets_on: bool) -> (Vec<(TenantId, Violation)>, u64) {
    let mut bench = Bench::new(&[800_000, 200_000]);
    let client = Rc::clone(&bench.pages[0]);
    let claim = || client.client.claim_stream(0).expect("slot").1;
    let (stuck, other) = (claim(), claim());
    stuck.issue();
    let mut looks = 0u64;
    for _ in 0..60 {
        bench.run(100 * MS, |pages| {
            looks += 1;
            if gets_on && looks.is_multiple_of(6000) {
                stuck.passed(stuck.issue() - 1);
            }
            greedy(&pages[0]);
            if pages[0].arbiter.is_open(0) {
                other.passed(other.issue() - 1);
            } else {
                other.settle();
            }
            greedy(&pages[1]);
        });
        bench.scheduler.inspect(bench.now_ns, &mut |_| false);
    }
    (bench.scheduler.take_violations(), bench.usage(0).grants)
}

#[test]
fn a_loop_on_one_stream_is_found_out_beside_one_that_gets_on() {
    let (violations, grants) = beside_a_loop(false);
    println!("now: a loop beside a stream that gets on: {violations:?} after {grants} slices");
    assert!(
        matches!(violations[..], [(TenantId(0), Violation::Endless { .. })]),
        "{violations:?}"
    );
    let (violations, grants) = beside_a_loop(true);
    assert_eq!(violations, [], "a stream that gets on is not without end");
    assert!(grants > 20, "{grants}");
}

#[test]
fn work_that_never_ends_is_found_out_where_nobody_else_is_let_in() {
    // The first to come keeps the device under this policy: a tenant that waits behind a kernel
    // that spins waits for good.
    let mut bench = Bench::new(&[500_000, 500_000]);
    let fifo = Setup {
        policy: policy::by_name("fifo", &[]).ok(),
        ..setup(Mode::Exclusive)
    };
    bench.scheduler.run_as(0, fifo);
    let client = Rc::clone(&bench.pages[0]);
    client.client.claim_stream(0).expect("slot").1.issue();
    bench.run(2 * MS, |pages| greedy(&pages[0]));
    bench.wait(1);
    let live = |bench: &mut Bench, ns| {
        for _ in 0..ns / (100 * MS) {
            bench.run(100 * MS, |pages| greedy(&pages[1]));
            bench.scheduler.inspect(bench.now_ns, &mut |_| false);
        }
    };
    live(&mut bench, 900 * MS);
    assert!(
        bench.open(0) && !bench.open(1),
        "kernels of a second are rare, not wrong"
    );
    live(&mut bench, 300 * MS);
    assert!(bench.open(1) && !bench.open(0));
    let reported = bench.scheduler.take_violations();
    assert!(matches!(
        reported[..],
        [(TenantId(0), Violation::Endless { .. })]
    ));
}

/// The first of two has 2000 marks on the device, of which one passes whenever `passes` says so;
/// the device passes on to the other one meanwhile. Returns the violations found.
fn violations_of_long_work(mut passes: impl FnMut(u64) -> bool, host: bool) -> Vec<Violation> {
    let mut bench = Bench::new(&[500_000, 500_000]);
    let client = Rc::clone(&bench.pages[0]);
    let stream = client.client.claim_stream(0).expect("slot").1;
    for _ in 0..2000 {
        stream.issue();
    }
    bench.run(2 * MS, |pages| greedy(&pages[0]));
    bench.wait(1);
    let mut done = 0;
    let address = stream.done_address();
    for at in 0..60 {
        bench.run(100 * MS, |pages| greedy(&pages[1]));
        if passes(at) {
            done += 1;
            // SAFETY: the page is mapped for as long as `client` lives; the word is an atomic that
            // the device writes.
            unsafe { std::sync::atomic::AtomicU64::from_ptr(address) }
                .store(done, std::sync::atomic::Ordering::Relaxed);
        }
        bench.scheduler.inspect(bench.now_ns, &mut |_| host);
    }
    let reported = bench.scheduler.take_violations();
    reported
        .into_iter()
        .map(|(_, violation)| violation)
        .collect()
}

#[test]
fn work_that_gets_on_however_slowly_is_not_without_end() {
    let reported = violations_of_long_work(|at| at % 5 == 0, false);
    assert!(reported.is_empty(), "{reported:?}");
    let reported = violations_of_long_work(|_| false, false);
    assert!(
        matches!(reported[..], [Violation::Endless { .. }]),
        "{reported:?}"
    );
}

#[test]
fn a_host_stall_is_no_violation_of_a_tenant() {
    let reported = violations_of_long_work(|_| false, true);
    assert!(reported.is_empty(), "{reported:?}");
    // Nobody looked for five seconds, the arbiter itself had no core.
    let mut bench = Bench::new(&[500_000, 500_000]);
    let client = Rc::clone(&bench.pages[0]);
    client.client.claim_stream(0).expect("slot").1.issue();
    bench.run(2 * MS, |pages| greedy(&pages[0]));
    bench.wait(1);
    bench.run(300 * MS, |pages| greedy(&pages[1]));
    bench.now_ns += 5000 * MS;
    bench.scheduler.charge(bench.now_ns);
    bench.scheduler.inspect(bench.now_ns, &mut |_| false);
    assert!(bench.scheduler.take_violations().is_empty());
}

#[test]
fn one_that_never_comes_is_reported_once_and_demoted() {
    let mut bench = Bench::new(&[500_000, 500_000]);
    bench.wait(0);
    bench.run(5000 * MS, |pages| greedy(&pages[1]));
    bench.scheduler.inspect(bench.now_ns, &mut |_| false);
    assert_eq!(
        bench.scheduler.take_violations(),
        [(TenantId(0), Violation::Unresponsive)]
    );
    assert!(bench.usage(0).grants < 60, "{}", bench.usage(0).grants);
}

#[test]
fn submissions_past_a_closed_gate_are_seen() {
    let mut bench = Bench::new(&[500_000, 500_000]);
    bench.run(10 * MS, |pages| greedy(&pages[1]));
    bench.run(10 * MS, |pages| greedy(&pages[1]));
    assert!(bench.open(1) && !bench.open(0));
    for _ in 0..5 {
        // Whatever its gate says, the first one submits.
        bench.run(100 * MS, |pages| {
            greedy(&pages[1]);
            pages[0].client.thread(0).count_launch();
        });
        bench.scheduler.inspect(bench.now_ns, &mut |_| false);
    }
    let reported = bench.scheduler.take_violations();
    assert!(
        matches!(reported[..], [(TenantId(0), Violation::Ungated { launches })] if launches > 1000),
        "{reported:?}"
    );
    assert!(bench.open(1) && !bench.open(0));
}

#[test]
fn a_tenant_that_is_only_reported_keeps_its_class() {
    let mut bench = Bench::new(&[500_000, 500_000]);
    let report = Setup {
        answer: Answer::Report,
        ..setup(Mode::Exclusive)
    };
    bench.scheduler.run_as(0, report);
    bench.scheduler.find(MS, TenantId(0), Violation::Flood);
    assert_eq!(bench.scheduler.take_violations().len(), 1);
    assert_eq!(bench.scheduler.record(TenantId(0), MS), (None, 1));
    let got = both_greedy(&mut bench, 1000 * MS);
    assert!(got[0] > 450 * MS, "{got:?}");
}

/// The longest time in which a tenant that always wants the device did not have it, beside one that
/// does as `other` says; and how much of the time that other one was charged for.
fn longest_wait_ns(
    bench: &mut Bench,
    ns: u64,
    mut other: impl FnMut(u64, &Rc<ClientPages>),
) -> u64 {
    let (mut now_ns, mut had_ns, mut longest_ns) = (bench.now_ns, bench.now_ns, 0);
    bench.run(ns, |pages| {
        now_ns += 50 * US;
        other(now_ns, &pages[0]);
        greedy(&pages[1]);
        if pages[1].arbiter.is_open(0) {
            had_ns = now_ns;
        }
        longest_ns = longest_ns.max(now_ns - had_ns);
    });
    longest_ns
}

#[test]
fn one_that_was_stopped_costs_the_others_a_slice_at_a_time() {
    // Stopped while it waits, and stopped while it holds the device with work on it that ends.
    for in_flight in [false, true] {
        let mut bench = Bench::new(&[500_000, 500_000]);
        bench.run(20 * MS, |pages| pages.iter().for_each(greedy));
        while bench.open(0) != in_flight {
            bench.run(50 * US, |pages| pages.iter().for_each(greedy));
        }
        let client = Rc::clone(&bench.pages[0]);
        let stream = client.client.claim_stream(0).expect("slot").1;
        let ends_ns = bench.now_ns + 7 * MS;
        if in_flight {
            stream.issue();
        }
        let longest_ns = longest_wait_ns(&mut bench, 10_000 * MS, |now_ns, _| {
            if now_ns >= ends_ns {
                stream.settle();
            }
        });
        // Its slice, and its kernel or the time for which it is waited for; and what the looks are
        // apart.
        assert!(longest_ns < 16 * MS, "in flight {in_flight}: {longest_ns}");
        let got_ns = bench.usage(0).device_ns;
        assert!(got_ns < 300 * MS, "in flight {in_flight}: {got_ns}");
    }
}

#[test]
fn one_whose_thread_gets_a_core_after_its_slice_would_be_over_has_its_share_all_the_same() {
    // Eight milliseconds from the opening of the gate until the thread runs: more than a slice of
    // five.
    let mut bench = Bench::new(&[500_000, 500_000]);
    let mut opened_ns = None;
    let mut slow = |now_ns: u64, pages: &Rc<ClientPages>| {
        let open = pages.arbiter.is_open(0);
        let runs = open && now_ns >= *opened_ns.get_or_insert(now_ns) + 8 * MS;
        if pages.client.waiting(0) == 0 || runs {
            greedy(pages);
        }
        if !open {
            opened_ns = None;
        }
    };
    longest_wait_ns(&mut bench, 200 * MS, &mut slow);
    let before = [0, 1].map(|at| (bench.usage(at).device_ns, bench.usage(at).grants));
    let longest_ns = longest_wait_ns(&mut bench, 10_000 * MS, &mut slow);
    let after = [0, 1].map(|at| (bench.usage(at).device_ns, bench.usage(at).grants));
    let got_ns = [0, 1].map(|at| after[at].0 - before[at].0);
    assert!(got_ns[0] > 4_500 * MS, "{got_ns:?}");
    // It pays for its own lateness: the other one has as much, and the device idles in its part
    // only.
    assert!(
        got_ns[1] > 4_500 * MS && longest_ns < 16 * MS,
        "{got_ns:?}, {longest_ns}"
    );
    assert!(after[0].1 - before[0].1 > 300, "{after:?}");
    assert_eq!(bench.scheduler.take_violations(), []);
    assert_eq!(bench.scheduler.record(TenantId(0), bench.now_ns), (None, 0));
}
