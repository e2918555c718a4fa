//! What hand-overs cost, what follows from that, and who is pre-woken: device schedulers in virtual
//! time, on real pages.

use policy::quantum::Lengths;

use super::tests::{Bench, MS, US, greedy, setup};
use super::*;

/// Clients whose threads come so long after their gate has opened; what each of them used after
/// that.
struct SlowThreads {
    stall_ns: Vec<u64>,
    now_ns: u64,
    opened_ns: Vec<Option<u64>>,
    used_ns: Vec<u64>,
}

impl SlowThreads {
    fn new(bench: &Bench, stall_ns: u64) -> Self {
        Self {
            stall_ns: vec![stall_ns; bench.pages.len()],
            now_ns: bench.now_ns,
            opened_ns: vec![None; bench.pages.len()],
            used_ns: vec![0; bench.pages.len()],
        }
    }

    fn live(&mut self, pages: &[Rc<ClientPages>]) {
        self.now_ns += 50 * US;
        for (at, pages) in pages.iter().enumerate() {
            let want = pages.client.want(0).expect("device");
            if !pages.arbiter.is_open(0) {
                self.opened_ns[at] = None;
                if pages.client.waiting(0) == 0 {
                    want.begin_waiting();
                }
                continue;
            }
            let opened_ns = *self.opened_ns[at].get_or_insert(self.now_ns - 50 * US);
            if self.now_ns < opened_ns + self.stall_ns[at] {
                continue;
            }
            if pages.client.waiting(0) > 0 {
                want.end_waiting();
                pages.client.thread(0).note_let_in(self.now_ns);
            } else {
                self.used_ns[at] += 50 * US;
            }
            pages.client.thread(0).count_launch();
            pages.client.thread(0).all_marked();
        }
    }

    fn run(&mut self, bench: &mut Bench, ns: u64) {
        bench.run(ns, |pages| self.live(pages));
    }
}

fn lasting(min_us: u32, max_us: u32) -> Setup {
    let mut setup = setup(Mode::Exclusive);
    setup.pace.quantum = Lengths::between(QuantumBounds { min_us, max_us });
    setup
}

#[test]
fn what_a_hand_over_costs_is_learnt_and_makes_slices_longer_within_their_bounds() {
    for (min_us, max_us, slice_us) in [(2000, 5000, 5000), (2000, 50_000, 9600), (2000, 2000, 2000)]
    {
        let mut bench = Bench::new(&[125_000; 8]);
        let mut longer = lasting(min_us, max_us);
        longer.pace.quantum.promised_us = max_us.min(5000);
        bench.scheduler.run_as(0, longer);
        bench.run(200 * MS, |pages| pages.iter().for_each(greedy));
        assert_eq!(bench.scheduler.slice(), (2000, 0), "nothing costs anything");
        let mut stall = SlowThreads::new(&bench, 100 * US);
        stall.run(&mut bench, 4000 * MS);
        let (now_us, cost_ns) = bench.scheduler.slice();
        assert!(cost_ns.abs_diff(100 * US) <= 5 * US, "{cost_ns}");
        assert!(
            now_us.abs_diff(slice_us) <= slice_us / 20,
            "{now_us} {slice_us}"
        );
        let grants = |bench: &Bench| -> u64 { (0..8).map(|at| bench.usage(at).grants).sum() };
        let before = grants(&bench);
        stall.run(&mut bench, 1000 * MS);
        let turns = grants(&bench) - before;
        let expected = 1_000_000 / u64::from(slice_us);
        assert!(
            turns.abs_diff(expected) <= expected / 10 + 2,
            "{turns} {expected}"
        );
    }
}

#[test]
fn the_time_of_a_hand_over_is_charged_to_nobody() {
    // The heavy one has three slices in a row, and one hand-over for them.
    let mut bench = Bench::new(&[750_000, 250_000]);
    bench.scheduler.run_as(0, lasting(2000, 2000));
    let mut stall = SlowThreads::new(&bench, 100 * US);
    stall.run(&mut bench, 1000 * MS);
    stall.used_ns = vec![0; 2];
    stall.run(&mut bench, 20_000 * MS);
    let part = stall.used_ns[1] as f64 / stall.used_ns.iter().sum::<u64>() as f64;
    assert!((part / 0.25 - 1.0).abs() < 0.01, "{part}");
}

#[test]
fn who_comes_at_once_is_let_off_nothing() {
    let mut bench = Bench::new(&[125_000; 8]);
    bench.scheduler.run_as(0, lasting(5000, 5000));
    let mut stall = SlowThreads::new(&bench, 100 * US);
    stall.stall_ns[3] = 0;
    stall.run(&mut bench, 2000 * MS);
    stall.used_ns = vec![0; 8];
    stall.run(&mut bench, 40_000 * MS);
    let part = stall.used_ns[3] as f64 / stall.used_ns.iter().sum::<u64>() as f64;
    assert!((part / 0.125 - 1.0).abs() < 0.005, "{part}");
}

#[test]
fn one_that_says_it_comes_late_makes_nobody_elses_slices_longer() {
    let mut figures = Vec::new();
    for liars in [0, 1] {
        let mut bench = Bench::new(&[500_000, 500_000]);
        let mut any = lasting(2000, 50_000);
        any.pace.quantum.promised_us = 5000;
        bench.scheduler.run_as(0, any);
        let mut threads = SlowThreads::new(&bench, 50 * US);
        if liars > 0 {
            // Each time a millisecond after its gate has opened.
            threads.stall_ns[1] = MS;
        }
        threads.run(&mut bench, 4000 * MS);
        figures.push(bench.scheduler.slice());
    }
    let [(honest_us, honest_ns), (lied_us, lied_ns)] = figures[..] else {
        panic!("two runs");
    };
    println!(
        "now: slices of {honest_us} us, beside one that comes 1 ms after its turn {lied_us} us; a hand-over \
         is taken to cost {honest_ns} and {lied_ns} ns"
    );
    assert!(
        lied_us <= honest_us + honest_us / 10,
        "{lied_us} {honest_us}"
    );
    assert!(lied_ns <= honest_ns + 10 * US, "{lied_ns} {honest_ns}");
}

#[test]
fn a_claim_to_be_slow_gains_no_more_than_hand_overs_cost() {
    let mut bench = Bench::new(&[500_000, 500_000]);
    let mut used_ns = [0; 2];
    let mut now_ns = 0;
    bench.run(10_000 * MS, |pages| {
        now_ns += 50 * US;
        for (at, pages) in pages.iter().enumerate() {
            let open = pages.arbiter.is_open(0);
            used_ns[at] += if open { 50 * US } else { 0 };
            greedy(pages);
            if at == 0 && open {
                // Let in this very moment, again and again.
                pages.client.thread(0).note_let_in(now_ns);
            }
        }
    });
    let part = used_ns[0] as f64 / (used_ns[0] + used_ns[1]) as f64;
    assert!(part < 0.51, "{part}");
}

#[test]
fn only_opportunistic_tenants_have_long_slices_and_a_guaranteed_one_ends_them() {
    let mut bench = Bench::new(&[500_000, 500_000, 500_000]);
    let mut any = lasting(2000, 50_000);
    any.pace.quantum.promised_us = 5000;
    bench.scheduler.run_as(0, any);
    for at in [0, 1] {
        let terms = Terms::plain(policy::Class::Opportunistic, 500_000);
        bench.scheduler.set_terms(TenantId(at), terms);
    }
    bench.run(1000 * MS, |pages| pages[..2].iter().for_each(greedy));
    let grants = bench.usage(0).grants + bench.usage(1).grants;
    assert!((18..=24).contains(&grants), "{grants}");
    assert_eq!(bench.scheduler.slice().0, 50_000);
    bench.wait(2);
    assert!(bench.open(2), "at once");
    // Guaranteed now, all of them.
    for at in [0, 1] {
        let terms = Terms::plain(policy::Class::Guaranteed, 500_000);
        bench.scheduler.set_terms(TenantId(at), terms);
    }
    bench.run(100 * MS, |pages| pages.iter().for_each(greedy));
    let before: u64 = (0..3).map(|at| bench.usage(at).grants).sum();
    bench.run(1000 * MS, |pages| pages.iter().for_each(greedy));
    let grants = (0..3).map(|at| bench.usage(at).grants).sum::<u64>() - before;
    assert!((290..=310).contains(&grants), "slices of 3.3 ms: {grants}");
}

#[test]
fn who_waits_for_a_silent_holder_is_pre_woken_and_taken_back_when_that_resumes() {
    let coming = |bench: &Bench, at: usize| {
        let gate = bench.pages[at].arbiter.device(0).expect("device").look();
        gate.is_err_and(|word| word & channel::COMING != 0)
    };
    let mut bench = Bench::new(&[500_000, 500_000]);
    bench.scheduler.pace.lead_ns = 100 * US;
    // In the first half of a slice, with the other one waiting.
    bench.run(MS, |pages| greedy(&pages[0]));
    bench.wait(1);
    assert!(bench.open(0));
    let mut reported = 0;
    for _ in 0..40 {
        // Silent for less than it takes to count as idle, and back.
        bench.run(250 * US, |_| ());
        reported += u32::from(coming(&bench, 1));
        assert!(bench.open(0) || reported > 0);
        if !bench.open(0) {
            break;
        }
        bench.run(100 * US, |pages| greedy(&pages[0]));
    }
    assert!(reported > 0);
    // Silent for good.
    let mut bench = Bench::new(&[500_000, 500_000]);
    bench.scheduler.pace.lead_ns = 100 * US;
    bench.run(MS, |pages| greedy(&pages[0]));
    bench.wait(1);
    let mut before = false;
    for _ in 0..20 {
        let was = coming(&bench, 1);
        bench.run(50 * US, |_| ());
        if bench.open(1) {
            before = was;
            break;
        }
    }
    assert!(bench.open(1) && !bench.open(0));
    assert!(before, "it was looking at its gate already");
    // With pre-wakes off nobody is woken early.
    let mut bench = Bench::new(&[500_000, 500_000]);
    bench.run(MS, |pages| greedy(&pages[0]));
    bench.wait(1);
    for _ in 0..20 {
        bench.run(50 * US, |_| ());
        assert!(!coming(&bench, 1));
    }
    assert!(bench.open(1));
}

#[test]
fn the_end_of_a_drain_is_found_soon_and_half_a_look_is_part_of_the_cost() {
    let mut bench = Bench::new(&[500_000, 500_000]);
    let pages = Rc::clone(&bench.pages[0]);
    let stream = pages.client.claim_stream(0).expect("slot").1;
    let mut seen = Vec::new();
    // Drains of 320 us, looked for in steps of 10 us.
    let mut opened: Option<u64> = None;
    let mut until_ns = 0;
    stream.issue();
    for step in 0..200_000u64 {
        bench.now_ns += 10 * US;
        let [first, second] = [0, 1].map(|at| bench.open(at));
        if first {
            greedy(&bench.pages[0]);
            until_ns = 0;
            if stream.done() == stream.issued() {
                stream.issue();
            }
        } else {
            greedy(&bench.pages[0]);
            if until_ns == 0 {
                until_ns = bench.now_ns + 320 * US;
            }
            if bench.now_ns >= until_ns && stream.done() != stream.issued() {
                stream.settle();
                opened = Some(bench.now_ns);
            }
        }
        greedy(&bench.pages[1]);
        if second && let Some(ended_ns) = opened.take() {
            seen.push(bench.now_ns - ended_ns);
        }
        let due = bench.next_ns.is_some_and(|next_ns| next_ns <= bench.now_ns);
        if due || step == 0 {
            bench.step();
        }
    }
    assert!(seen.len() > 100, "{}", seen.len());
    let stall = seen.iter().skip(20).sum::<u64>() / (seen.len() - 20) as u64;
    assert!(
        stall <= 25 * US,
        "{stall}: looks of 15 us, and a step of this test"
    );
}

/// Two tenants take turns; the first one's drains take `drain_us(round)`. By how much the second
/// could be at work before the end of each of them, in microseconds; below zero: after it.
fn entries(lead_ns: u64, drain_us: impl Fn(u64) -> u64) -> Vec<i64> {
    let mut bench = Bench::new(&[500_000, 500_000]);
    bench.scheduler.pace.lead_ns = lead_ns;
    let pages = Rc::clone(&bench.pages[0]);
    let stream = pages.client.claim_stream(0).expect("slot").1;
    stream.issue();
    let (mut round, mut ends_ns, mut entered_ns) = (0, 0, None);
    let mut found = Vec::new();
    for _ in 0..300_000u64 {
        bench.now_ns += 10 * US;
        let now_ns = bench.now_ns;
        let passes = |at: usize| {
            let gate = bench.pages[at].arbiter.device(0).expect("device");
            gate.pass(now_ns).is_ok()
        };
        let (first, second) = (passes(0), passes(1));
        assert!(!(first && second));
        for (at, passes) in [first, second].into_iter().enumerate() {
            let want = bench.pages[at].client.want(0).expect("device");
            let waits = bench.pages[at].client.waiting(0) > 0;
            if passes {
                if waits {
                    want.end_waiting();
                    bench.pages[at].client.thread(0).note_let_in(now_ns);
                }
                bench.pages[at].client.thread(0).count_launch();
                bench.pages[at].client.thread(0).all_marked();
            } else if !waits {
                want.begin_waiting();
            }
        }
        if first {
            if stream.done() == stream.issued() {
                stream.issue();
            }
            (ends_ns, entered_ns) = (0, None);
        } else {
            if ends_ns == 0 {
                round += 1;
                ends_ns = now_ns + drain_us(round) * US;
            }
            if second {
                entered_ns.get_or_insert(now_ns);
            }
            if now_ns >= ends_ns && stream.done() != stream.issued() {
                stream.settle();
            }
            if let Some(at_ns) =
                entered_ns.filter(|_| now_ns == ends_ns.max(entered_ns.unwrap_or(0)))
            {
                found.push((ends_ns as i64 - at_ns as i64) / 1000);
            }
        }
        if bench.next_ns.is_some_and(|next_ns| next_ns <= now_ns) {
            bench.step();
        }
    }
    found
}

#[test]
fn the_next_one_enters_shortly_before_the_end_of_a_predictable_drain() {
    for lead_ns in [0, 80 * US] {
        let found = entries(lead_ns, |_| 500);
        assert!(found.len() > 100, "{}", found.len());
        for before_us in &found[60..] {
            assert!((10..=100).contains(before_us), "{lead_ns} {before_us}");
        }
        // Off by 20 us now and then, which is allowed for.
        let found = entries(lead_ns, |round| 500 + round * 7 % 5 * 10);
        let stall = found[40..].iter().filter(|us| **us < 0).count();
        assert!(stall * 4 <= found.len(), "{stall} of {}", found.len());
        assert!(found[40..].iter().all(|us| *us <= 160), "{found:?}");
    }
}

#[test]
fn nobody_enters_before_the_end_of_a_drain_that_is_not_predictable() {
    for lead_ns in [0, 80 * US] {
        let found = entries(lead_ns, |round| 200 + round * 7919 % 13 * 100);
        assert!(found.len() > 100, "{}", found.len());
        let early = found[20..].iter().filter(|us| **us > 0).count();
        assert_eq!(early, 0, "{found:?}");
    }
}

#[test]
fn what_is_queued_behind_a_short_drain_is_charged_from_its_end_on() {
    let mut bench = Bench::new(&[500_000, 500_000]);
    bench.run(100 * MS, |pages| pages.iter().for_each(greedy));
    while !bench.open(0) {
        bench.run(50 * US, |pages| pages.iter().for_each(greedy));
    }
    let now_ns = bench.now_ns;
    let works = |at: usize| {
        let want = bench.pages[at].client.want(0).expect("device");
        want.begin_blocking();
    };
    // Drains of the first one take 300 us.
    for _ in 0..200 {
        bench.scheduler.roster[0].begin_drain(now_ns);
        // Found at 600, never looked at before: half way.
        bench.scheduler.roster[0].end_drain(now_ns + 600 * US);
    }
    works(0);
    bench.scheduler.take(now_ns, 0);
    assert!(bench.scheduler.roster[0].drains());
    // The second one goes in 100 us before its end, and is at work at once.
    bench.scheduler.roster[0].begin_drain(now_ns);
    let (_, drain) = bench.scheduler.roster[0].drain().expect("a drain");
    let ends_ns = drain.ends_ns(now_ns);
    assert!(ends_ns.abs_diff(now_ns + 300 * US) < 20 * US);
    let entry_ns = ends_ns - 100 * US;
    bench.scheduler.charge(entry_ns);
    bench.scheduler.begin(entry_ns, 1, 5000, true);
    works(1);
    let before = [0, 1].map(|at| bench.usage(at).device_ns);
    let got = |scheduler: &mut DeviceScheduler, at_ns: u64| {
        scheduler.charge(at_ns);
        [0, 1].map(|at| {
            scheduler.usage(TenantId(at)).expect("entity").device_ns - before[at as usize]
        })
    };
    let at_end = got(&mut bench.scheduler, ends_ns - 10 * US);
    assert_eq!(at_end, [90 * US, 0]);
    // It has not ended when it was to: nobody knows whose the device is.
    let after = got(&mut bench.scheduler, ends_ns + 200 * US);
    assert_eq!(after, [90 * US, 105 * US], "half is kept back");
    bench.scheduler.take(ends_ns + 200 * US, 1);
    let after = got(&mut bench.scheduler, ends_ns + 200 * US);
    assert_eq!(after, [(90 + 105) * US, 105 * US]);
}

/// A drain that was to last 300 us ends so many milliseconds late, and what is charged to both for
/// the time beyond. `passes`: whether the new holder's marks of 500 us do in a millisecond.
fn charged_for_a_late_end(late_ms: u64, passes: impl Fn(u64) -> bool) -> [u64; 2] {
    let mut bench = Bench::new(&[500_000, 500_000]);
    let marks = [0, 1].map(|at: usize| Rc::clone(&bench.pages[at]));
    let marks = [0, 1].map(|at: usize| marks[at].client.claim_stream(0).expect("slot").1);
    // A mark takes 500 us.
    let mut now_us = 0;
    bench.run(400 * MS, |pages| {
        now_us += 50;
        for (pages, mark) in pages.iter().zip(&marks) {
            greedy(pages);
            if now_us % 500 == 0 && pages.arbiter.is_open(0) {
                mark.issue();
                mark.settle();
            }
        }
    });
    while !bench.open(0) {
        bench.run(50 * US, |pages| pages.iter().for_each(greedy));
    }
    let now_ns = bench.now_ns;
    for _ in 0..200 {
        bench.scheduler.roster[0].begin_drain(now_ns);
        bench.scheduler.roster[0].end_drain(now_ns + 600 * US);
    }
    marks[0].issue();
    bench.scheduler.look(now_ns);
    bench.scheduler.take(now_ns, 0);
    let (_, drain) = bench.scheduler.roster[0].drain().expect("a drain");
    let ends_ns = drain.ends_ns(now_ns);
    bench.scheduler.charge(ends_ns - 100 * US);
    bench.scheduler.begin(ends_ns - 100 * US, 1, 5000, true);
    bench.scheduler.charge(ends_ns);
    marks[1].issue();
    let before = [0, 1].map(|at| bench.usage(at).device_ns);
    for look in 1..=late_ms * 20 {
        let at_ns = ends_ns + look * 50 * US;
        bench.scheduler.charge(at_ns);
        if look % 10 == 0 && passes((look - 1) / 20) {
            marks[1].settle();
            marks[1].issue();
        }
        if look == late_ms * 20 {
            marks[0].settle();
        }
        bench.scheduler.look(at_ns);
    }
    bench.scheduler.take(ends_ns + late_ms * MS, 1);
    [0, 1].map(|at| bench.usage(at).device_ns - before[at as usize])
}

#[test]
fn the_time_of_a_late_drain_is_its_whose_marks_pass_in_it() {
    let [drained_ns, held_ns] = charged_for_a_late_end(2, |_| true);
    assert_eq!(drained_ns + held_ns, 2000 * US);
    assert!(drained_ns < 300 * US, "{drained_ns}: four marks of 500 us");
    let halves = charged_for_a_late_end(2, |_| false);
    assert!(halves[0].abs_diff(halves[1]) <= 50 * US, "{halves:?}");
}

#[test]
fn a_long_drain_beside_which_the_device_turns_to_and_fro_is_charged_by_halves() {
    // 2 ms each.
    let [drained_ns, held_ns] = charged_for_a_late_end(40, |ms| ms / 2 % 2 == 0);
    assert_eq!(drained_ns + held_ns, 40 * MS);
    assert!(
        drained_ns.abs_diff(held_ns) <= 2 * MS,
        "{drained_ns} {held_ns}"
    );
}

#[test]
fn a_drain_that_ends_between_two_looks_is_charged_to_the_middle() {
    let mut bench = Bench::new(&[500_000, 500_000]);
    let mark = Rc::clone(&bench.pages[0]);
    let mark = mark.client.claim_stream(0).expect("slot").1;
    bench.run(100 * MS, |pages| pages.iter().for_each(greedy));
    while !bench.open(0) {
        bench.run(50 * US, |pages| pages.iter().for_each(greedy));
    }
    let now_ns = bench.now_ns;
    for _ in 0..200 {
        bench.scheduler.roster[0].begin_drain(now_ns);
        bench.scheduler.roster[0].end_drain(now_ns + 600 * US);
    }
    mark.issue();
    bench.scheduler.take(now_ns, 0);
    bench.scheduler.charge(now_ns + 100 * US);
    bench.scheduler.begin(now_ns + 100 * US, 1, 5000, true);
    let before = [0, 1].map(|at| bench.usage(at).device_ns);
    mark.settle();
    bench.scheduler.charge(now_ns + 200 * US);
    let got = [0, 1].map(|at| bench.usage(at).device_ns - before[at as usize]);
    assert_eq!(got, [50 * US, 50 * US]);
}

#[test]
fn what_is_contested_with_a_holder_that_went_away_stays_in_halves() {
    let mut bench = Bench::new(&[500_000, 500_000, 500_000]);
    let marks = [0, 1].map(|at: usize| Rc::clone(&bench.pages[at]));
    let marks = [0, 1].map(|at: usize| marks[at].client.claim_stream(0).expect("slot").1);
    bench.run(100 * MS, |pages| pages[..2].iter().for_each(greedy));
    while !bench.open(0) {
        bench.run(50 * US, |pages| pages[..2].iter().for_each(greedy));
    }
    let now_ns = bench.now_ns;
    for mark in &marks {
        mark.issue();
    }
    bench.scheduler.take(now_ns, 0);
    bench.scheduler.begin(now_ns, 1, 5000, true);
    let before = [0, 1].map(|at| bench.usage(at).device_ns);
    // The prediction is over by then.
    bench.scheduler.charge(now_ns + 600 * US);
    let at_first = [0, 1].map(|at| bench.usage(at).device_ns - before[at as usize]);
    bench.scheduler.charge(now_ns + 1600 * US);
    bench.scheduler.remove(now_ns + 1600 * US, 1);
    let pages = Rc::new(ClientPages::create().expect("pages"));
    let terms = Terms::plain(Class::Guaranteed, 500_000);
    bench
        .scheduler
        .add(now_ns + 1600 * US, TenantId(3), terms, 3, pages);
    bench.scheduler.step(now_ns + 1700 * US);
    let got = [0, 1].map(|at| bench.usage(at).device_ns - before[at as usize]);
    assert!(
        got[0] >= 800 * US,
        "{got:?} {at_first:?}: half, and what came after"
    );
    assert!(got[1] >= 500 * US, "{got:?} {at_first:?}");
}
