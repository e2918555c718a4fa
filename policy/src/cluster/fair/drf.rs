//! Dominant resource fairness (Ghodsi et al., NSDI'11) by progressive filling.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Progressive filling: the next task always goes to the user with the smallest dominant share
/// `max_r(use_r / capacity_r)`; equal ones by number. `used[user][resource]` is what each holds
/// already. `next(user)` hands its next task out and says what that needs, or `None` where it has
/// no more that could be had: it is not asked again.
pub fn fill(
    capacities: &[f64],
    mut used: Vec<Vec<f64>>,
    mut next: impl FnMut(usize) -> Option<Vec<f64>>,
) {
    let share = |used: &[f64]| {
        let parts = used.iter().zip(capacities).filter(|(_, all)| **all > 0.0);
        let dominant = parts.map(|(one, all)| one / all).fold(0.0, f64::max);
        // Shares are not negative, and such numbers stand in the order of their bits.
        dominant.to_bits()
    };
    let places = used.iter().enumerate();
    let mut users: BinaryHeap<Reverse<(u64, usize)>> = places
        .map(|(user, used)| Reverse((share(used), user)))
        .collect();
    while let Some(Reverse((_, user))) = users.pop() {
        let Some(need) = next(user) else { continue };
        for (used, need) in used[user].iter_mut().zip(need) {
            *used += need.max(0.0);
        }
        users.push(Reverse((share(&used[user]), user)));
    }
}

/// Tasks for each user, of whom each has endless equal ones: [`fill`] until none fits.
/// `demands[user][resource]` is one task's.
#[must_use]
pub fn drf(capacities: &[f64], demands: &[Vec<f64>]) -> Vec<u32> {
    let mut left = capacities.to_vec();
    let mut tasks = vec![0_u32; demands.len()];
    let nothing = vec![vec![0.0; capacities.len()]; demands.len()];
    fill(capacities, nothing, |user| {
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
