//! How long a submission waits where more is in flight in its stream than the window holds.
//!
//! What it waits for may itself wait for what the very thread will do later: a kernel that spins on
//! a word, another rank of a collective, a graph with a host function that takes a lock. Only the
//! time for which nothing of the stream has passed distinguishes that from work that takes long. So
//! one submission is let by each time that this has grown by a step. The first steps are as long as
//! kernels are that a bounded queue is meant for, and twice and four times as long beside others,
//! in whose slices the stream does not move. Then comes one of half the first, and each after that
//! is half as long as the one before it: a thread that has a hundred submissions to make before it
//! lets its work go on needs little more time than the first few take.
//!
//! Where the stream stands at a graph with a node that waits for the host, for what is not of the
//! device, that is likely, and the steps are short.

/// TIMEOUT: 50 ms is longer than any kernel that a bounded queue is meant for; a longer one lets a
/// submission more pass.
const FIRST_NS: u64 = 50_000_000;
/// How often the step is doubled first, beside others.
const DOUBLED: u32 = 2;
/// How often it is halved then.
const HALVED: u32 = 10;
/// The same at what is likely to wait for the host. TIMEOUT: a graph whose kernels take longer lets
/// a submission more pass.
const FIRST_AT_WAIT_NS: u64 = 10_000_000;
const DOUBLED_AT_WAIT: u32 = 1;
/// Streams that move together take turns, and each stands still for as many times as long; no more
/// than that is waited for on their account. Of those that stand still as well none has a turn.
const MOST_CROWD: u64 = 4;

/// What a stream stands at, and beside whom.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stand {
    /// Other streams of the process of which something has passed since.
    pub(crate) movers: u32,
    /// Others use the device as well.
    pub(crate) contended: bool,
    /// It may be a wait for the host.
    pub(crate) may_wait: bool,
}

/// For how long one waits from now on, in nanoseconds, behind a stream of which nothing has passed
/// for `stood_ns`.
pub(crate) fn left_ns(stood_ns: u64, stand: Stand) -> u64 {
    let crowd = u64::from(stand.movers).saturating_add(1).min(MOST_CROWD);
    let stood_ns = stood_ns / crowd;
    let (first_ns, doubled) = match stand.may_wait {
        true => (FIRST_AT_WAIT_NS, DOUBLED_AT_WAIT),
        false => (FIRST_NS, DOUBLED),
    };
    let doubled = if stand.contended { doubled } else { 0 };
    let (mut until_ns, mut step_ns) = (0, 0);
    for step in 0..=doubled + HALVED {
        step_ns = match step.checked_sub(doubled) {
            Some(halved @ 1..) => first_ns >> halved,
            _ => first_ns << step,
        };
        until_ns += step_ns;
        if until_ns > stood_ns {
            return (until_ns - stood_ns) * crowd;
        }
    }
    step_ns
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn stand(movers: u32, contended: bool) -> Stand {
        Stand {
            movers,
            contended,
            may_wait: false,
        }
    }

    /// How many submissions are let by within so long, and the time of the last.
    fn passed(within_ns: u64, movers: u32, contended: bool) -> (u32, u64) {
        let (mut count, mut now_ns) = (0, 0);
        loop {
            let next_ns = now_ns + left_ns(now_ns, stand(movers, contended));
            assert!(next_ns > now_ns, "a wait has a length");
            if next_ns > within_ns {
                return (count, now_ns);
            }
            (count, now_ns) = (count + 1, next_ns);
        }
    }

    #[test]
    fn few_pass_long_kernels_and_a_hundred_pass_what_does_not_move() {
        assert_eq!(passed(49 * MS, 0, false).0, 0);
        assert_eq!(passed(149 * MS, 0, true), (1, 50 * MS));
        assert_eq!(passed(349 * MS, 0, true), (2, 150 * MS));
        let time_of = |number, movers, contended| {
            let mut now_ns = 0;
            for _ in 0..number {
                now_ns += left_ns(now_ns, stand(movers, contended));
            }
            now_ns / MS
        };
        let needed = [
            time_of(100, 0, false),
            time_of(100, 0, true),
            time_of(100, 1, true),
        ];
        println!("now: 100 submissions behind what does not move take {needed:?} ms");
        assert!(
            needed[0] < 150 && needed[1] < 450 && needed[2] < 900,
            "{needed:?}"
        );
    }

    #[test]
    fn a_hundred_pass_soon_where_the_host_is_waited_for() {
        for (contended, most_ns) in [(false, 30 * MS), (true, 50 * MS)] {
            let at_wait = Stand {
                may_wait: true,
                ..stand(0, contended)
            };
            let mut now_ns = 0;
            for _ in 0..100 {
                now_ns += left_ns(now_ns, at_wait);
            }
            println!(
                "now: 100 submissions at a wait for the host take {} us",
                now_ns / 1000
            );
            assert!(now_ns < most_ns, "{now_ns}");
            assert!(
                left_ns(0, at_wait) > left_ns(now_ns, at_wait),
                "steps get shorter"
            );
        }
    }

    #[test]
    fn it_begins_anew_when_the_stream_moves_and_has_no_end() {
        for stood_ns in [0, 1, 50 * MS, 3_600_000 * MS, u64::MAX] {
            for movers in [0, 1, 7, u32::MAX] {
                let left_ns = left_ns(stood_ns, stand(movers, true));
                assert!((1..=FIRST_NS * 4 * MOST_CROWD).contains(&left_ns));
            }
        }
        assert_eq!(left_ns(0, stand(0, true)), FIRST_NS);
    }
}
