//! Altruism (Carbyne, OSDI'16): a job gives away what it does not need now, if it would not finish
//! later for that.

/// A job of `work` units that can use at most `width` of the resource at once, from slot `arrival`
/// on.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Fluid {
    /// First slot.
    pub arrival: usize,
    /// Resource x slots.
    pub work: f64,
    /// Most at once.
    pub width: f64,
    /// Not needed before this slot (a barrier, a deadline): an earlier end gains nothing. 0 for
    /// none.
    pub barrier: usize,
}

/// Who got how much in each slot, and in which slot each job was done.
#[derive(Clone, PartialEq, Debug)]
pub struct Schedule {
    /// By job and slot.
    pub given: Vec<Vec<f64>>,
    /// Slots from 0 after which each job is done.
    pub done: Vec<usize>,
}

fn run(jobs: &[Fluid], mut decide: impl FnMut(usize, &[f64]) -> Vec<f64>) -> Schedule {
    let mut left: Vec<f64> = jobs.iter().map(|job| job.work).collect();
    let mut schedule = Schedule {
        given: vec![Vec::new(); jobs.len()],
        done: vec![0; jobs.len()],
    };
    let mut slot = 0;
    while left.iter().any(|left| *left > 1e-9) {
        let shares = decide(slot, &left);
        for (i, share) in shares.into_iter().enumerate() {
            schedule.given[i].push(share);
            if left[i] > 1e-9 {
                left[i] -= share;
                schedule.done[i] = slot + 1;
            }
        }
        slot += 1;
    }
    schedule
}

/// A capacity in equal parts, of which nobody gets more than it wants: what one leaves is for the
/// others (max-min fairness).
#[must_use]
pub fn equal_parts(capacity: f64, wants: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..wants.len()).collect();
    order.sort_by(|a, b| wants[*a].total_cmp(&wants[*b]));
    let (mut free, mut parts) = (capacity, vec![0.0; wants.len()]);
    for (served, i) in order.iter().enumerate() {
        parts[*i] = wants[*i].min(free / (wants.len() - served) as f64);
        free -= parts[*i];
    }
    parts
}

/// Max-min fair in every slot (DRF with one resource), up to each job's width. `capacity` and all
/// widths are above 0.
#[must_use]
pub fn fair_schedule(capacity: f64, jobs: &[Fluid]) -> Schedule {
    run(jobs, |slot, left| {
        let want = |i: usize| {
            if jobs[i].arrival <= slot {
                jobs[i].width.min(left[i].max(0.0))
            } else {
                0.0
            }
        };
        let wants: Vec<f64> = (0..jobs.len()).map(want).collect();
        equal_parts(capacity, &wants)
    })
}

/// The same jobs with altruism, as exchanges in the fair schedule. A job with slack before its
/// barrier lets a job with less remaining work run now. In return it gets a later slot of that job,
/// before the barrier: it gives leftover away and loses nothing. Idle capacity is filled with later
/// work too. Each exchange keeps every slot within the capacity and every job within its width, and
/// moves no job's end beyond its fair end, or beyond its barrier.
#[must_use]
pub fn altruistic(capacity: f64, jobs: &[Fluid]) -> Schedule {
    let Schedule { mut given, done } = fair_schedule(capacity, jobs);
    let due: Vec<usize> = jobs
        .iter()
        .zip(&done)
        .map(|(job, done)| job.barrier.max(*done))
        .collect();
    let slots = due.iter().copied().max().unwrap_or(0);
    for shares in &mut given {
        shares.resize(slots, 0.0);
    }
    for now in 0..slots {
        let left = |given: &[Vec<f64>], i: usize| given[i][now..].iter().sum::<f64>();
        let mut takers: Vec<usize> = (0..jobs.len())
            .filter(|i| jobs[*i].arrival <= now)
            .collect();
        takers.sort_by(|a, b| left(&given, *a).total_cmp(&left(&given, *b)));
        for taker in takers {
            for later in (now + 1..slots).rev() {
                let wants = |given: &[Vec<f64>]| {
                    given[taker][later].min(jobs[taker].width - given[taker][now])
                };
                let used: f64 = given.iter().map(|shares| shares[now]).sum();
                let idle = (capacity - used).min(wants(&given)).max(0.0);
                given[taker][now] += idle;
                given[taker][later] -= idle;
                for giver in 0..jobs.len() {
                    let patient = jobs[giver].barrier > later && left(&given, giver) > 0.0;
                    if giver == taker || !patient || jobs[taker].barrier > now + 1 {
                        continue;
                    }
                    let space = jobs[giver].width - given[giver][later];
                    let swap = wants(&given).min(given[giver][now]).min(space).max(0.0);
                    given[taker][now] += swap;
                    given[taker][later] -= swap;
                    given[giver][now] -= swap;
                    given[giver][later] += swap;
                }
            }
        }
    }
    let end = |shares: &Vec<f64>| {
        shares
            .iter()
            .rposition(|share| *share > 1e-9)
            .map_or(0, |at| at + 1)
    };
    let done = given.iter().map(end).collect();
    Schedule { given, done }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Random;

    #[test]
    fn parts_are_equal_but_for_those_who_want_less() {
        assert_eq!(
            equal_parts(8.0, &[1.0, 8.0, 2.0, 8.0]),
            [1.0, 2.5, 2.0, 2.5]
        );
        assert_eq!(equal_parts(8.0, &[1.0, 2.0]), [1.0, 2.0]);
        assert!(equal_parts(8.0, &[]).is_empty());
    }

    #[test]
    fn nobody_is_later_than_fair_and_the_mean_is_lower() {
        let mut random = Random::new(11);
        let (mut fairly, mut kindly) = (0.0, 0.0);
        for _ in 0..300 {
            let jobs: Vec<Fluid> = (0..2 + random.below(6))
                .map(|_| Fluid {
                    arrival: random.below(5),
                    work: 0.5 + 10.0 * random.unit(),
                    width: 0.2 + 0.8 * random.unit(),
                    barrier: random.below(2) * 60,
                })
                .collect();
            let (fair, kind) = (fair_schedule(1.0, &jobs), altruistic(1.0, &jobs));
            for slot in 0..kind.given[0].len() {
                let all: f64 = kind.given.iter().map(|given| given[slot]).sum();
                assert!(all <= 1.0 + 1e-9);
            }
            for (i, job) in jobs.iter().enumerate() {
                assert!(
                    kind.done[i] <= fair.done[i].max(job.barrier),
                    "{jobs:?}: {i}"
                );
                let work: f64 = kind.given[i].iter().sum();
                assert!((work - job.work).abs() < 1e-6);
                assert!(
                    kind.given[i]
                        .iter()
                        .all(|share| (-1e-9..=job.width + 1e-9).contains(share))
                );
                // A job that waits for a barrier ends at the barrier, as before: the others gain.
                if job.barrier == 0 {
                    fairly += fair.done[i] as f64;
                    kindly += kind.done[i] as f64;
                }
            }
        }
        assert!(kindly < 0.9 * fairly, "{kindly} against {fairly}");
    }
}
