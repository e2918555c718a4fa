//! Dominant resource fairness (Ghodsi et al., NSDI'11) by progressive filling.

/// Tasks for each user: the next task always goes to the user with the smallest dominant share
/// `max_r(use_r / capacity_r)` that one more task fits for; equal ones by number.
/// `demands[user][resource]` is one task's.
#[must_use]
pub fn drf(capacities: &[f64], demands: &[Vec<f64>]) -> Vec<u32> {
    let mut left = capacities.to_vec();
    let mut tasks = vec![0_u32; demands.len()];
    let share = |user: usize, tasks: u32| {
        let used = demands[user].iter().zip(capacities);
        used.map(|(one, all)| f64::from(tasks) * one / all)
            .fold(0.0, f64::max)
    };
    loop {
        let fits = |user: &usize| {
            let need = &demands[*user];
            let some = need.iter().any(|one| *one > 0.0);
            some && need
                .iter()
                .zip(&left)
                .all(|(one, left)| *one <= left + 1e-9)
        };
        let next = (0..demands.len())
            .filter(fits)
            .min_by(|a, b| share(*a, tasks[*a]).total_cmp(&share(*b, tasks[*b])));
        let Some(user) = next else { return tasks };
        tasks[user] += 1;
        for (left, one) in left.iter_mut().zip(&demands[user]) {
            *left -= one;
        }
    }
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
