//! Which calls of a thread come at fixed times, whatever the device does: a service that answers so
//! many requests a second, a camera's frames.
//!
//! A thread that pauses *for* a time is later for good when the device is slower; one that pauses
//! *until* a time is not. A recording has the pauses of both. They are distinguished by how
//! lateness adds up. Let each wake-up be delayed by some microseconds, independently. Of pauses for
//! a time, the distance of wake-ups that are `m` periods apart varies by `sqrt(m)` times as much as
//! that of neighbours: it is a random walk. Of pauses until a time it varies as much, at any
//! distance. (The variance-time test of Leland et al., On the Self-Similar Nature of Ethernet
//! Traffic, 1994, for the two ends of its scale.) Requests that come at random cannot be
//! distinguished from pauses for a time.

/// Wake-ups so far apart are compared with neighbours.
const APART: [usize; 4] = [4, 8, 16, 24];
/// Fewer wake-ups say nothing.
const FEWEST: usize = 48;
/// By how much more the distance of wake-ups that far apart may vary: by 1 where the times are
/// fixed, and by 2 to 5 on a random walk.
const WIDER: f64 = 1.6;
/// A pause at least this long may be one until the next request, nanoseconds. What thinks between
/// two calls of a request pauses as well: the first that separates the two is taken.
const PAUSES_NS: [u64; 4] = [100_000, 1_000_000, 10_000_000, 100_000_000];

/// When a call began, and how long after its thread's last one had ended.
#[derive(Debug, Clone, Copy)]
pub struct Began {
    pub at_ns: u64,
    pub gap_ns: u64,
}

/// For each call of a thread when it is due, in nanoseconds after the first that is; `None` where
/// it only comes after the thread's last one.
pub fn due(calls: &[Began]) -> Vec<Option<u64>> {
    let mut due = vec![None; calls.len()];
    for pause_ns in PAUSES_NS {
        let woken: Vec<usize> = (0..calls.len())
            .filter(|at| calls[*at].gap_ns >= pause_ns)
            .collect();
        let times: Vec<u64> = woken.iter().map(|at| calls[*at].at_ns).collect();
        if let Some(grid) = grid(&times) {
            for (at, due_ns) in woken.into_iter().zip(grid) {
                due[at] = Some(due_ns);
            }
            break;
        }
    }
    due
}

/// The fixed times that these wake-ups belong to, after the first, where they belong to such.
fn grid(times: &[u64]) -> Option<Vec<u64>> {
    if times.len() < FEWEST || times.windows(2).any(|pair| pair[1] <= pair[0]) {
        return None;
    }
    // CAST: differences of a recording's times, far below 2^53 ns.
    let after: Vec<f64> = times.iter().map(|at| (at - times[0]) as f64).collect();
    let usual = median(after.windows(2).map(|pair| pair[1] - pair[0]).collect());
    // Which period each is in: one that was slept through has none.
    let mut periods = vec![0.0];
    for pair in after.windows(2) {
        let passed = ((pair[1] - pair[0]) / usual).round().max(1.0);
        periods.push(periods[periods.len() - 1] + passed);
    }
    let period = slope(&periods, &after);
    let lateness: Vec<f64> = (after.iter().zip(&periods))
        .map(|(at, number)| at - number * period)
        .collect();
    // From their own usual distance, so that no error of the period is in it.
    let varies = |apart: usize| {
        let apart: Vec<f64> = (lateness.iter().zip(&lateness[apart..]))
            .map(|(one, other)| other - one)
            .collect();
        let usual = median(apart.clone());
        median(apart.iter().map(|each| (each - usual).abs()).collect())
    };
    let near = varies(1);
    // A clock without any lateness is none that we have seen, and says nothing.
    if near <= 0.0 || near > period / 4.0 || APART.iter().any(|far| varies(*far) > WIDER * near) {
        return None;
    }
    // Nobody wakes up early.
    let first = sorted(lateness)[times.len() / 20];
    let due = |number: &f64| (number * period + first).max(0.0);
    let zero = due(&0.0);
    // CAST: not negative, and below 2^53.
    Some(periods.iter().map(|n| (due(n) - zero) as u64).collect())
}

/// The usual slope between points that are half of them apart (after Theil and Sen): a host that
/// stood still a few times does not change it.
fn slope(xs: &[f64], ys: &[f64]) -> f64 {
    let half = xs.len() / 2;
    let far = xs.iter().zip(ys).skip(half);
    let slopes = (xs.iter().zip(ys).zip(far)).map(|((x, y), (far_x, far_y))| {
        // Periods count up, so this is no division by zero.
        (far_y - y) / (far_x - x)
    });
    median(slopes.collect())
}

fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

/// Of at least one value.
fn median(values: Vec<f64>) -> f64 {
    let at = values.len() / 2;
    sorted(values)[at]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that repeat: splitmix64.
    struct Draw(u64);

    impl Draw {
        fn below(&mut self, most: u64) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut word = self.0;
            word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (word ^ (word >> 31)) % most
        }
    }

    const PERIOD_NS: u64 = 16_666_667;
    const WORK_NS: u64 = 1_500_000;

    /// A thread that makes three calls whenever it has woken up; with `until` it sleeps until its
    /// times, without it for the rest of the period.
    fn thread(until: bool, periods: u64, late_ns: u64, seed: u64) -> Vec<Began> {
        let mut draw = Draw(seed);
        let (mut calls, mut now, mut ended) = (Vec::new(), 1_000_000, 0);
        for number in 0..periods {
            let wanted = match until {
                true => 1_000_000 + number * PERIOD_NS,
                false => now + PERIOD_NS - WORK_NS,
            };
            now = wanted.max(now) + draw.below(late_ns);
            // A host that stands still now and then.
            if draw.below(40) == 0 {
                now += 5_000_000;
            }
            for _ in 0..3 {
                calls.push(Began {
                    at_ns: now,
                    gap_ns: now - ended,
                });
                ended = now + WORK_NS / 3 - 2_000;
                now = ended + 2_000;
            }
        }
        calls
    }

    fn count(calls: &[Began]) -> usize {
        due(calls).into_iter().flatten().count()
    }

    #[test]
    fn pauses_until_fixed_times_are_distinguished_from_pauses_for_a_time() {
        for seed in 0..500 {
            for late_ns in [3_000, 80_000, 900_000] {
                assert_eq!(count(&thread(true, 180, late_ns, seed)), 180, "{seed}");
                assert_eq!(count(&thread(false, 180, late_ns, seed)), 0, "{seed}");
            }
        }
    }

    #[test]
    fn a_call_is_due_at_its_time_however_late_it_was() {
        let calls = thread(true, 180, 80_000, 7);
        let due: Vec<u64> = due(&calls).into_iter().flatten().collect();
        assert_eq!(due[0], 0);
        for (number, due) in (0..).zip(due) {
            assert!(due.abs_diff(number * PERIOD_NS) < 80_000, "{number}: {due}");
        }
    }

    #[test]
    fn a_period_without_a_pause_shifts_none_of_the_others() {
        let mut calls = thread(true, 180, 80_000, 3);
        calls.drain(90..102);
        let due = due(&calls);
        assert_eq!(due.iter().flatten().count(), 176);
        let after = due[90].expect("it comes after a pause");
        assert!(after.abs_diff(34 * PERIOD_NS) < 80_000, "{after}");
    }

    #[test]
    fn few_calls_equal_times_and_times_that_go_back_are_no_rhythm() {
        assert!(due(&[]).is_empty());
        assert_eq!(count(&thread(true, 20, 80_000, 1)), 0);
        let same = Began {
            at_ns: 5,
            gap_ns: 1_000_000,
        };
        assert_eq!(count(&[same; 100]), 0);
        let back: Vec<Began> = (0..100)
            .map(|number| Began {
                at_ns: u64::MAX - number * 7_000_000,
                gap_ns: u64::MAX,
            })
            .collect();
        assert_eq!(count(&back), 0);
    }
}
