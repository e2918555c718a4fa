//! What users will ask for, as a distribution.
//!
//! For each user, each step of the horizon and each hour of the day: by how much its demand changed
//! over that many steps, as a running mean and variance that forget. The demand to come is what
//! there is now and the mean change; users add up as if they were independent, and a quantile of
//! the normal distribution with that mean and variance says what will do with a certain
//! probability. GFS (ASPLOS'26) has the same outputs from OrgLinear, a linear network over a trend
//! and cycles of each organisation that is trained anew each day.

use std::collections::{BTreeMap, VecDeque};

use crate::cluster::UserId;

/// Steps of the horizon.
pub(super) const STEPS: usize = 12;
const HOURS: usize = 24;
/// Changes at an hour of the day that make it known: those of one day.
const KNOWN: f64 = 12.0;
/// A running mean is over about so many changes: a week of one hour.
const REMEMBERED: f64 = 84.0;
/// Steps without a decision that are filled in at most: a week.
const FILLED: f64 = 2016.0;

/// Mean and variance that forget.
#[derive(Clone, Copy, Debug, Default)]
struct Change {
    seen: f64,
    mean: f64,
    variance: f64,
}

impl Change {
    fn add(&mut self, value: f64) {
        self.seen = (self.seen + 1.0).min(REMEMBERED);
        let part = 1.0 / self.seen;
        let off = value - self.mean;
        self.mean += part * off;
        self.variance = (1.0 - part) * (self.variance + part * off * off);
    }
}

/// So many users are known. The one that has asked for nothing for longest goes first.
const USERS: usize = 1024;

/// Of one user.
#[derive(Clone, Debug)]
struct Of {
    /// When it asked for something last.
    asked_s: f64,
    /// The latest demands, one a step, the newest last.
    latest: VecDeque<f64>,
    /// By step of the horizon: at each hour of the day, and at any.
    changes: Vec<([Change; HOURS], Change)>,
}

impl Of {
    fn new() -> Self {
        Self {
            asked_s: f64::NEG_INFINITY,
            latest: VecDeque::with_capacity(STEPS + 1),
            changes: vec![Default::default(); STEPS],
        }
    }

    fn add(&mut self, demand: f64, at_s: f64, step_s: f64) {
        for (ahead, (by_hour, any)) in self.changes.iter_mut().enumerate() {
            let Some(at) = self.latest.len().checked_sub(ahead + 1) else {
                break;
            };
            let change = demand - self.latest[at];
            by_hour[hour(at_s - (ahead + 1) as f64 * step_s)].add(change);
            any.add(change);
        }
        if self.latest.len() == STEPS {
            self.latest.pop_front();
        }
        self.latest.push_back(demand);
    }

    /// Mean and variance so many steps ahead.
    fn ahead(&self, step: usize, at_s: f64) -> (f64, f64) {
        let now = self.latest.back().copied().unwrap_or(0.0);
        let (by_hour, any) = &self.changes[step];
        let known = Some(by_hour[hour(at_s)]).filter(|change| change.seen >= KNOWN);
        let change = known.unwrap_or(*any);
        ((now + change.mean).max(0.0), change.variance)
    }
}

fn hour(at_s: f64) -> usize {
    // CAST: 0 to 23.
    (at_s.rem_euclid(86_400.0) / 3600.0) as usize % HOURS
}

/// The demand of all users, sampled once a step.
#[derive(Clone, Debug)]
pub struct Demand {
    step_s: f64,
    users: BTreeMap<UserId, Of>,
    next_s: Option<f64>,
}

impl Demand {
    pub(super) fn new(step_s: f64) -> Self {
        Self {
            step_s,
            users: BTreeMap::new(),
            next_s: None,
        }
    }

    /// Length of a step.
    pub(super) fn step_s(&self) -> f64 {
        self.step_s
    }

    /// When the next sample is due; `None` before the first.
    pub(super) fn next_s(&self) -> Option<f64> {
        self.next_s
    }

    /// Users have other numbers from now on.
    pub(super) fn renumber(&mut self, number: &mut dyn FnMut(UserId) -> UserId) {
        let users = std::mem::take(&mut self.users);
        let renumbered = users.into_iter().map(|(user, of)| (number(user), of));
        self.users = renumbered.collect();
    }

    /// Takes note of what each user asks for now, if a sample is due. Steps that passed without a
    /// decision had the demand of before.
    pub(super) fn sample(&mut self, now_s: f64, demand: &BTreeMap<UserId, f64>) -> bool {
        let due_s = *self.next_s.get_or_insert(now_s);
        if now_s < due_s {
            return false;
        }
        let passed = ((now_s - due_s) / self.step_s).floor();
        for user in demand.keys() {
            self.users.entry(*user).or_insert_with(Of::new);
        }
        let filled = passed.min(FILLED);
        for (user, of) in &mut self.users {
            let before = of.latest.back().copied().unwrap_or(0.0);
            // CAST: at most `FILLED`.
            for step in 0..filled as u32 {
                let at_s = due_s + (passed - filled + f64::from(step)) * self.step_s;
                of.add(before, at_s, self.step_s);
            }
            let now = demand.get(user).copied().unwrap_or(0.0);
            if now > 0.0 {
                of.asked_s = now_s;
            }
            of.add(now, due_s + passed * self.step_s, self.step_s);
        }
        self.forget(now_s);
        self.next_s = Some(due_s + (passed + 1.0) * self.step_s);
        true
    }

    /// Forgets users beyond [`USERS`], of those that ask for nothing now.
    fn forget(&mut self, now_s: f64) {
        let beyond = self.users.len().saturating_sub(USERS);
        if beyond == 0 {
            return;
        }
        let idle = self.users.iter().filter(|(_, of)| of.asked_s < now_s);
        let mut idle: Vec<(f64, UserId)> = idle.map(|(user, of)| (of.asked_s, *user)).collect();
        idle.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        for (_, user) in idle.into_iter().take(beyond) {
            self.users.remove(&user);
        }
    }

    /// The most of the steps to come that does with this probability.
    pub(super) fn quantile(&self, probability: f64, now_s: f64) -> f64 {
        let z = normal_quantile(probability);
        let at = |step: usize| {
            let all = self.users.values().map(|of| of.ahead(step, now_s));
            let (mean, variance) = all.fold((0.0, 0.0), |(m, v), (mean, variance)| {
                (m + mean, v + variance)
            });
            mean + z * variance.sqrt()
        };
        (0..STEPS).map(at).fold(0.0, f64::max)
    }
}

/// The quantile of the standard normal distribution (Abramowitz and Stegun, 26.2.23: to 4.5e-4).
fn normal_quantile(probability: f64) -> f64 {
    let beyond = probability.min(1.0 - probability).max(1e-12);
    let t = (-2.0 * beyond.ln()).sqrt();
    let above = 2.515_517 + t * (0.802_853 + t * 0.010_328);
    let below = 1.0 + t * (1.432_788 + t * (0.189_269 + t * 0.001_308));
    let z = t - above / below;
    if probability < 0.5 { -z } else { z }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(gpus: f64) -> BTreeMap<UserId, f64> {
        BTreeMap::from([(UserId(0), gpus)])
    }

    #[test]
    fn quantiles_are_those_of_tables() {
        for (probability, z) in [(0.5, 0.0), (0.9, 1.28155), (0.99, 2.32635), (0.1, -1.28155)] {
            let found = normal_quantile(probability);
            assert!((found - z).abs() < 1e-3, "{probability}: {found}");
        }
    }

    #[test]
    fn a_rise_at_the_same_hour_of_each_day_is_seen_before_it_comes() {
        // 10 GPUs, 50 from 9 to 17 o'clock.
        let at = |seconds: f64| {
            let hour = seconds.rem_euclid(86_400.0) / 3600.0;
            if (9.0..17.0).contains(&hour) {
                50.0
            } else {
                10.0
            }
        };
        let mut demand = Demand::new(300.0);
        let mut seen = BTreeMap::new();
        for step in 0..5 * 288 {
            let now_s = f64::from(step) * 300.0;
            assert!(demand.sample(now_s, &asked(at(now_s))));
            if step >= 4 * 288 {
                seen.insert(step % 288, demand.quantile(0.9, now_s));
            }
        }
        // At 8:30 the rise is within the hour, at 5:00 it is not, and at 16:30 the fall is.
        let at = |hour: f64| seen[&((hour * 12.0) as i32)];
        assert!(at(8.5) > 45.0, "{}", at(8.5));
        assert!((at(5.0) - 10.0).abs() < 1.0, "{}", at(5.0));
        assert!((at(12.0) - 50.0).abs() < 1.0, "{}", at(12.0));
    }

    #[test]
    fn what_varies_more_needs_more_and_users_add_up_as_independent() {
        let mut random = crate::cluster::Random::new(5);
        let (mut calm, mut wild, mut two) =
            (Demand::new(300.0), Demand::new(300.0), Demand::new(300.0));
        for step in 0..2000 {
            let now_s = f64::from(step) * 300.0;
            let off = [random.unit() - 0.5, random.unit() - 0.5];
            calm.sample(now_s, &asked(20.0 + 2.0 * off[0]));
            wild.sample(now_s, &asked(20.0 + 20.0 * off[0]));
            let halves = off.map(|off| 10.0 + 10.0 * off);
            let users = (0..).map(UserId).zip(halves);
            two.sample(now_s, &users.collect());
        }
        let now_s = 2000.0 * 300.0;
        let of = |demand: &Demand| demand.quantile(0.95, now_s) - demand.quantile(0.5, now_s);
        let (calm, wild, two) = (of(&calm), of(&wild), of(&two));
        assert!(wild > 8.0 * calm, "{calm} {wild}");
        // Two halves that vary by themselves vary less than one whole.
        assert!(two < 0.85 * wild && two > 0.5 * wild, "{two} {wild}");
    }

    #[test]
    fn users_beyond_the_bound_are_forgotten_the_longest_idle_first() {
        let mut demand = Demand::new(300.0);
        let many = USERS as u32 + 76;
        for user in 0..many {
            let one = BTreeMap::from([(UserId(0), 1.0), (UserId(user), 1.0)]);
            demand.sample(f64::from(user) * 300.0, &one);
        }
        assert_eq!(demand.users.len(), USERS);
        let there = |user: u32| demand.users.contains_key(&UserId(user));
        assert!(there(0) && there(many - 1) && !there(1) && !there(76) && there(77));
    }

    #[test]
    fn steps_without_a_decision_had_the_demand_of_before() {
        let (mut often, mut seldom) = (Demand::new(300.0), Demand::new(300.0));
        for step in 0..100 {
            let now_s = f64::from(step) * 300.0;
            let gpus = f64::from(step / 10);
            often.sample(now_s, &asked(gpus));
            if step % 10 == 0 {
                assert!(seldom.sample(now_s, &asked(gpus)));
                assert!(!seldom.sample(now_s + 1.0, &asked(gpus)));
            }
        }
        let now_s = 99.0 * 300.0;
        seldom.sample(now_s, &asked(9.0));
        assert_eq!(often.quantile(0.9, now_s), seldom.quantile(0.9, now_s));
        // A clock that jumps is no reason to count for ever.
        assert!(seldom.sample(1e12, &asked(1.0)));
        assert!(seldom.quantile(0.9, 1e12).is_finite());
    }
}
