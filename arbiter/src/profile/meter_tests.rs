use super::*;

const MS: u64 = 1_000_000;

/// A job with iterations of `ns` and 20 launches, looked at every 10 ms; counters by time.
fn run(meter: &mut Meter, from_ns: u64, count: u64, ns: u64, contended: bool) -> u64 {
    let (mut next_look_ns, mut now_ns) = (from_ns, from_ns);
    let base = meter.last.map_or(0, |last| last.number + 1);
    let (mut contended_ns, start) = (
        meter.contended_ns,
        meter.last.map_or(0, |last| last.launches),
    );
    for number in 0..count {
        while next_look_ns <= now_ns {
            contended_ns += u64::from(contended) * 10 * MS;
            meter.look(
                next_look_ns,
                &Counters {
                    device_ns: next_look_ns / 2,
                    contended_ns,
                    copied_bytes: next_look_ns / 1000,
                    launches: (next_look_ns - from_ns) / (ns / 20),
                    held_bytes: 100 + (next_look_ns / (10 * MS)) % 3 * 50,
                    peak_bytes: 200,
                },
            );
            next_look_ns += 10 * MS;
        }
        let noted = Noted {
            number: base + number,
            launches: start + (number + u64::from(base > 0)) * 20,
            mono_ns: now_ns,
            held_bytes: 90,
        };
        meter.boundary(noted, Some(20), true);
        now_ns += ns;
    }
    now_ns
}

#[test]
fn a_steady_lone_job_has_a_period_a_baseline_and_no_slowdown() {
    let mut meter = Meter::default();
    run(&mut meter, 1_000 * MS, 500, 7 * MS, false);
    let profile = meter.profile(None, 2);
    assert_eq!(profile.iteration_ns, Some(7 * MS));
    assert_eq!(profile.iteration_p50_ns, Some(7 * MS));
    assert_eq!(profile.iteration_cov, Some(0.0));
    assert_eq!(profile.iterations, 499);
    assert_eq!(
        (profile.solo_iteration_ns, profile.solo_source),
        (Some(7 * MS), SoloSource::Learnt)
    );
    assert_eq!(profile.slowdown, Some(1.0));
    assert_eq!(
        (profile.persistent_bytes, profile.ephemeral_bytes),
        (Some(90), Some(110))
    );
    assert!((profile.busy_fraction - 0.5).abs() < 1e-6);
    // A byte per microsecond, of which the fastest copy makes two.
    assert!((profile.copy_fraction.unwrap() - 0.5).abs() < 1e-6);
    let device_ms = profile.device_ns_per_iteration.unwrap() as f64 / 1e6;
    assert!((device_ms - 3.5).abs() < 0.1, "{device_ms}");
    let launches = profile.launches_per_iteration.unwrap();
    assert!((launches - 20.0).abs() < 0.6, "{launches}");
    assert_eq!(meter.fit(20), Some(1.0));
}

#[test]
fn iterations_among_others_do_not_make_a_baseline_and_show_as_slowdown() {
    let mut meter = Meter::default();
    let now_ns = run(&mut meter, 1_000 * MS, 300, 10 * MS, false);
    run(&mut meter, now_ns, 400, 25 * MS, true);
    let profile = meter.profile(None, 0);
    assert_eq!(profile.solo_iteration_ns, Some(10 * MS));
    assert!((profile.slowdown.unwrap() - 2.5).abs() < 0.01);
    assert_eq!(profile.copy_fraction, None);
    assert_eq!(meter.last_iteration_ns(), Some(25 * MS));
}

#[test]
fn a_baseline_is_taken_from_the_operator_or_from_the_record_of_the_same_program() {
    let mut meter = Meter::default();
    run(&mut meter, 1_000 * MS, 200, 10 * MS, true);
    assert_eq!(meter.profile(None, 0).solo_source, SoloSource::None);
    let kept = |launches: f64, set: bool| Baseline {
        iteration_ns: 4e6,
        launches,
        set,
    };
    let same = meter.profile(Some(&kept(20.5, false)), 0);
    assert_eq!(
        (same.solo_source, same.slowdown),
        (SoloSource::Recorded, Some(2.5))
    );
    let other = meter.profile(Some(&kept(300.0, false)), 0);
    assert_eq!(
        (other.solo_source, other.slowdown),
        (SoloSource::None, None)
    );
    let set = meter.profile(Some(&kept(0.0, true)), 0);
    assert_eq!(
        (set.solo_source, set.slowdown),
        (SoloSource::Set, Some(2.5))
    );
    assert_eq!(meter.solo_ns(Some(&kept(0.0, true))), Some(4 * MS));
}

#[test]
fn early_boundaries_are_none_and_lost_ones_are_counted() {
    let mut meter = Meter::default();
    let at = |number, launches, ms: u64| Noted {
        number,
        launches,
        mono_ns: ms * MS,
        held_bytes: 0,
    };
    for noted in [
        at(0, 0, 0),
        at(1, 7, 3),
        at(2, 20, 10),
        at(3, 27, 13),
        at(4, 40, 20),
    ] {
        meter.boundary(noted, Some(20), false);
    }
    assert_eq!(meter.profile(None, 0).iteration_ns, Some(10 * MS));
    // A hundred later, of which the ring has kept the last.
    meter.boundary(at(204, 40 + 2000, 1020), Some(20), false);
    let profile = meter.profile(None, 0);
    assert_eq!(
        (profile.iterations, profile.iteration_ns),
        (102, Some(10 * MS))
    );
    assert_eq!(profile.iteration_cov, None);
}

#[test]
fn a_period_that_does_not_fit_is_seen() {
    let mut meter = Meter::default();
    for number in 0..100u64 {
        let noted = Noted {
            number,
            launches: number * 35 + number % 2 * 10,
            mono_ns: number * MS + 1,
            held_bytes: 0,
        };
        meter.boundary(noted, Some(20), false);
    }
    assert!(meter.fit(20).is_some_and(|fit| fit < 0.5));
    meter.forget_fit();
    assert_eq!(meter.fit(20), None);
}

#[test]
fn what_a_liar_notes_hurts_nobody() {
    let mut meter = Meter::default();
    let odd = [0, 1, 20, u64::MAX / 2, u64::MAX - 1, u64::MAX];
    for number in odd {
        for launches in odd {
            for mono_ns in odd {
                let noted = Noted {
                    number,
                    launches,
                    mono_ns,
                    held_bytes: u64::MAX,
                };
                meter.boundary(noted, Some(20), true);
                meter.boundary(noted, None, true);
                meter.progress(mono_ns, launches, 20.0);
                let counters = Counters {
                    copied_bytes: launches,
                    launches: number,
                    held_bytes: u64::MAX,
                    peak_bytes: launches,
                    ..Counters::default()
                };
                meter.look(mono_ns, &counters);
                let profile = meter.profile(None, launches);
                assert!(profile.iteration_ns.is_none_or(|ns| ns <= ABSURD));
            }
        }
    }
}

#[test]
fn short_iterations_are_timed_in_blocks() {
    let mut meter = Meter::default();
    for look in 0..500u64 {
        // 1000 launches in 10 ms, 4 to an iteration of 40 us.
        meter.progress(look * 10 * MS, look * 1000, 4.0);
    }
    let profile = meter.profile(None, 0);
    assert_eq!(profile.iteration_ns, Some(40_000));
    assert_eq!(profile.iteration_cov, None);
    assert_eq!(meter.intervals.len(), 19);
}

#[test]
fn memory_that_was_freed_is_forgotten_after_a_while() {
    let mut meter = Meter::default();
    meter.look(
        1,
        &Counters {
            held_bytes: 5000,
            peak_bytes: 9000,
            ..Counters::default()
        },
    );
    run(&mut meter, 1_000 * MS, 400, 10 * MS, false);
    let profile = meter.profile(None, 0);
    assert_eq!(
        (profile.persistent_bytes, profile.ephemeral_bytes),
        (Some(90), Some(110))
    );
    meter.restart();
    assert_eq!(meter.profile(None, 0), Profile::default());
}
