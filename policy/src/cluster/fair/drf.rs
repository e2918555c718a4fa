//! Dominant resource fairness (Ghodsi et al., NSDI'11) by progressive filling.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Progressive filling: the next task always goes to the user that has the smallest part of what it
/// may have, `max_r(use_r / may_r)`; equal ones by number. Where `may[user]` is the cluster's
/// capacity for everybody, that part is the dominant share. `used[user][resource]` is what each
/// holds already. `next(user)` hands its next task out and says what that needs, or `None` where it
/// has no more that could be had: it is not asked again.
///
/// A resource of which a user may have nothing does not count: no demand of it was named.
pub fn fill(
    may: &[Vec<f64>],
    mut used: Vec<Vec<f64>>,
    mut next: impl FnMut(usize) -> Option<Vec<f64>>,
) {
    let part = |user: usize, used: &[f64]| {
        let parts = used.iter().zip(&may[user]).filter(|(_, may)| **may > 0.0);
        let largest = parts.map(|(one, may)| one / may).fold(0.0, f64::max);
        // Parts are not negative, and such numbers stand in the order of their bits.
        largest.to_bits()
    };
    let places = used.iter().enumerate();
    let mut users: BinaryHeap<Reverse<(u64, usize)>> = places
        .map(|(user, used)| Reverse((part(user, used), user)))
        .collect();
    while let Some(Reverse((_, user))) = users.pop() {
        let Some(need) = next(user) else { continue };
        for (used, need) in used[user].iter_mut().zip(need) {
            *used += need.max(0.0);
        }
        users.push(Reverse((part(user, &used[user]), user)));
    }
}

/// Tasks for each user, of whom each has endless equal ones: [`fill`] until none fits.
/// `demands[user][resource]` is one task's.
#[must_use]
pub fn drf(capacities: &[f64], demands: &[Vec<f64>]) -> Vec<u32> {
    let mut left = capacities.to_vec();
    let mut tasks = vec![0_u32; demands.len()];
    let nothing = vec![vec![0.0; capacities.len()]; demands.len()];
    let may = vec![capacities.to_vec(); demands.len()];
    fill(&may, nothing, |user| {
        let need = &demands[user];
        let some = need.iter().any(|one| *one > 0.0);
        let mut each = need.iter().zip(&left);
        if !some || each.any(|(one, left)| *one > left + 1e-9) {
            return None;
        }
        tasks[user] += 1;
        for (left, one) in left.iter_mut().zip(need) {
            *left -= one;
        }
        Some(need.clone())
    });
    tasks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Random;

    #[test]
    fn the_example_of_the_paper() {
        let tasks = drf(&[9.0, 18.0], &[vec![1.0, 4.0], vec![3.0, 1.0]]);
        assert_eq!(tasks, [3, 2]);
        assert_eq!(
            3.0 * 4.0 / 18.0,
            2.0 * 3.0 / 9.0,
            "both dominant shares are 2/3"
        );
    }

    #[test]
    fn who_has_the_smaller_part_of_its_own_is_next() {
        // As in the figure of HUG: one may have (1/3, 2/3), the other (2/3, 1/3).
        let used = || vec![vec![0.3, 0.3], vec![0.4, 0.1]];
        let first = |may: &[Vec<f64>]| {
            let mut first = None;
            fill(may, used(), |user| {
                first.get_or_insert(user);
                None
            });
            first
        };
        assert_eq!(first(&vec![vec![1.0; 2]; 2]), Some(0), "by dominant share");
        let own = [vec![1.0 / 3.0, 2.0 / 3.0], vec![2.0 / 3.0, 1.0 / 3.0]];
        assert_eq!(first(&own), Some(1), "0.6 of its part in place of 0.9");
        // Of a resource that it named no demand of, it may have any.
        assert_eq!(first(&[vec![0.0, 2.0 / 3.0], own[1].clone()]), Some(0));
    }

    #[test]
    fn nobody_is_below_an_equal_part_by_more_than_a_task_and_lying_does_not_pay() {
        let mut random = Random::new(5);
        for _ in 0..200 {
            let capacities = [100.0, 100.0];
            let mut demands: Vec<Vec<f64>> = (0..3)
                .map(|_| (0..2).map(|_| 0.2 + 2.0 * random.unit()).collect())
                .collect();
            let tasks = drf(&capacities, &demands);
            for (need, count) in demands.iter().zip(&tasks) {
                let dominant = need.iter().copied().fold(0.0, f64::max);
                let solo = (100.0 / 3.0 / dominant).floor();
                assert!(f64::from(*count) + 1.0 >= solo, "sharing incentive");
            }
            // Asking for twice as much of one resource never gives more useful tasks.
            demands[0][random.below(2)] *= 2.0;
            assert!(
                drf(&capacities, &demands)[0] <= tasks[0] + 1,
                "strategy-proof"
            );
        }
    }
}
