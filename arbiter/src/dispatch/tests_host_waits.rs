//! Work in flight that waits for the host, or for its own process: in virtual time.

use channel::StreamSlot;

use super::tests::{Bench, MS, US, greedy};
use super::*;

/// Two tenants. Runs until the first one's gate is open, where it issues marks as `issue` says.
fn with_work(issue: impl Fn(&StreamSlot)) -> Bench {
    let mut bench = Bench::new(&[500_000, 500_000]);
    let both = |pages: &[Rc<ClientPages>]| pages.iter().for_each(greedy);
    bench.run(100 * MS, both);
    while !bench.open(0) {
        bench.run(50 * US, both);
    }
    // It comes, and waits at its gate no more.
    bench.run(50 * US, both);
    issue(bench.pages[0].client.claim_stream(0).expect("slot").1);
    bench
}

fn stream(bench: &Bench) -> &StreamSlot {
    bench.pages[0].client.stream(0).expect("a stream")
}

/// Both for so long, looked at as often as offenders are. How long the first one's gate was open,
/// and how long it was closed at a stretch at most, in microseconds.
fn live(bench: &mut Bench, ms: u64, who: &dyn Fn(&[Rc<ClientPages>])) -> (u64, u64) {
    let (mut open_us, mut closed_us, mut longest_us) = (0, 0, 0);
    for step in 0..ms * 20 {
        bench.run(50 * US, who);
        if step % 2000 == 0 {
            let now_ns = bench.now_ns;
            bench.scheduler.inspect(now_ns, &mut |_| false);
        }
        if bench.open(0) {
            (open_us, closed_us) = (open_us + 50, 0);
        } else {
            closed_us += 50;
            longest_us = longest_us.max(closed_us);
        }
    }
    (open_us, longest_us)
}

#[test]
fn work_that_waits_for_the_host_is_no_device_time_and_keeps_nobody_out() {
    let mut bench = with_work(|stream| {
        stream.issue_host_wait();
        stream.issue();
    });
    let both = |pages: &[Rc<ClientPages>]| pages.iter().for_each(greedy);
    let before = [0, 1].map(|at| bench.usage(at).device_ns);
    let (_, longest_us) = live(&mut bench, 3000, &both);
    let got = [0, 1].map(|at| bench.usage(at).device_ns - before[at as usize]);
    let part = got[0] as f64 / (got[0] + got[1]) as f64;
    let (demoted, found) = bench.scheduler.record(TenantId(0), bench.now_ns);
    println!(
        "now: its share is {part:.3}, it waited {longest_us} us at most, demoted {found} times"
    );
    assert_eq!((demoted, found), (None, 0));
    assert!((part - 0.5).abs() < 0.01, "{got:?}");
    assert!(longest_us < 20_000, "{longest_us}");
    assert!(got[0] + got[1] > 2_950 * MS, "no time is lost: {got:?}");
}

#[test]
fn what_goes_on_when_the_host_has_come_is_charged_from_then_on() {
    let mut bench = with_work(|stream| {
        stream.issue_host_wait();
        stream.issue();
    });
    let other = |pages: &[Rc<ClientPages>]| greedy(&pages[1]);
    bench.run(100 * MS, other);
    assert!(bench.open(1) && !bench.open(0));
    let before_ns = bench.usage(0).device_ns;
    bench.run(100 * MS, other);
    assert_eq!(bench.usage(0).device_ns, before_ns, "it uses nothing");
    stream(&bench).passed(1);
    bench.run(20 * MS, other);
    stream(&bench).settle();
    bench.run(10 * MS, other);
    let got_ns = bench.usage(0).device_ns - before_ns;
    println!("now: charged {got_ns} ns of 20 ms beside another one");
    assert!((9 * MS..11 * MS).contains(&got_ns), "{got_ns}");
}

#[test]
fn one_whose_work_waits_for_its_own_thread_is_let_in_beside_it() {
    let mut bench = with_work(|stream| {
        stream.issue();
    });
    let both = |pages: &[Rc<ClientPages>]| pages.iter().for_each(greedy);
    let mut waited_us = Vec::new();
    for _ in 0..20 {
        while bench.open(0) {
            bench.run(50 * US, both);
        }
        let mut us = 0;
        while !bench.open(0) {
            bench.run(50 * US, both);
            us += 50;
        }
        waited_us.push(us);
        // It has come through, and what waited for it goes on; the next time the same.
        stream(&bench).settle();
        bench.run(200 * US, both);
        while !bench.open(0) {
            bench.run(50 * US, both);
        }
        stream(&bench).issue();
    }
    let most_us = waited_us.iter().max().copied().unwrap_or(0);
    println!("now: let in after {most_us} us at most, 20 times");
    assert!(most_us <= 8000, "{waited_us:?}");
    assert_eq!(bench.scheduler.record(TenantId(0), bench.now_ns).1, 0);
}

#[test]
fn one_whose_work_never_ends_gains_little_by_waiting_at_its_gate() {
    let mut bench = with_work(|stream| {
        stream.issue();
    });
    let both = |pages: &[Rc<ClientPages>]| pages.iter().for_each(greedy);
    live(&mut bench, 5000, &both);
    let (demoted, _) = bench.scheduler.record(TenantId(0), bench.now_ns);
    assert!(matches!(demoted, Some(Violation::Endless { .. })));
    let (open_us, longest_us) = live(&mut bench, 4000, &both);
    println!("now: its gate is open for {open_us} us of 4 s, and closed for {longest_us} at most");
    assert!(open_us <= 60_000, "{open_us}");
    assert!(longest_us <= 400_000, "it is never kept out: {longest_us}");
}

#[test]
fn one_that_runs_after_all_others_runs_while_there_are_none() {
    let mut bench = with_work(|stream| {
        stream.issue();
    });
    let both = |pages: &[Rc<ClientPages>]| pages.iter().for_each(greedy);
    live(&mut bench, 5000, &both);
    while !bench.open(1) {
        bench.run(50 * US, both);
    }
    assert!(
        bench
            .scheduler
            .record(TenantId(0), bench.now_ns)
            .0
            .is_some()
    );
    // The other one falls silent.
    let only = |pages: &[Rc<ClientPages>]| greedy(&pages[0]);
    let (open_us, longest_us) = live(&mut bench, 1000, &only);
    println!(
        "now: with nobody else its gate is open for {open_us} us of 1 s, let in after {longest_us} us"
    );
    assert!(longest_us <= 50_000, "{longest_us}");
    assert!(open_us >= 950_000, "{open_us}");
}
