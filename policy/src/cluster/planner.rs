//! Where the layers of a model go on different GPUs, after HeteroG (CoNEXT'20).
//!
//! The paper's network chooses for every operation of a graph a device or a replication, how
//! gradients are summed, and an order of execution. Here a model is a chain of groups of layers
//! with measured times, and for each group is chosen
//!
//! * on how many GPUs of each type it is replicated,
//! * which part of the batch each replica has: by its measured speed, which is best for a group by
//!   itself,
//! * how its gradients are summed: in a ring, or by way of one of the GPUs.
//!
//! *Cost* of an iteration: for each group the slowest replica's time and that of its gradients, and
//! between two groups the part of the activations that changes its GPU. Nothing overlaps. With this
//! cost a group depends on its neighbours alone, so the best plan over all these choices is found
//! exactly, group by group along the chain; the paper's search is a heuristic because its graphs
//! are not chains.
//!
//! *What a runtime for jobs that share a GPU can use of it*: the answer to "what would this job
//! gain from GPUs of several types, and with which batch on each". It cannot split a program's
//! layers: the program has to do that itself.

use std::fmt;

/// Layers that are placed together.
#[derive(Clone, PartialEq, Debug)]
pub struct Group {
    /// Time of a whole batch on one GPU, in seconds, by type of GPU.
    pub seconds: Vec<f64>,
    /// Bytes of its parameters, and so of its gradients.
    pub parameter_bytes: f64,
    /// Bytes that it hands to the next group, for the whole batch.
    pub activation_bytes: f64,
}

/// GPUs that a plan may use.
#[derive(Clone, PartialEq, Debug)]
pub struct Pool {
    /// How many of each type.
    pub gpus: Vec<u32>,
    /// Of the link of each GPU.
    pub bytes_per_s: f64,
    /// Of a message, in seconds.
    pub latency_s: f64,
}

/// How gradients are summed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sum {
    /// Each to its neighbour, around.
    Ring,
    /// All to one, and back.
    Server,
}

/// Most ways to place a group that are tried: every one is looked at beside every one of the next
/// group.
pub const MOST_WAYS: u64 = 1000;
/// Most groups of a model.
pub const MOST_GROUPS: usize = 100;

/// Why there is no plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoPlan {
    /// Nothing to place anything on.
    NoGpu,
    /// Nothing to place.
    NoGroup,
    /// The link's numbers.
    Link,
    /// The numbers of this group; the first is 0.
    Group(usize),
    /// More ways to place a group than are tried.
    Ways(u64),
    /// More groups than are planned.
    Groups(usize),
    /// Numbers so large that their sum is none.
    Endless,
}

impl fmt::Display for NoPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoGpu => {
                f.write_str("there is no GPU to plan for: give at least one type a count above 0")
            }
            Self::NoGroup => f.write_str("the model has no group of layers: give at least one"),
            Self::Link => f.write_str(
                "the link needs bytes per second above 0 and a latency of at least 0 seconds",
            ),
            Self::Group(at) => write!(
                f,
                "group {} needs a time above 0 for each type of GPU, and sizes of at least 0 bytes",
                at + 1
            ),
            Self::Ways(ways) => write!(
                f,
                "a group could be on {ways} choices of GPUs; at most {MOST_WAYS} are tried: count \
                 servers instead of GPUs, or drop a type"
            ),
            Self::Groups(groups) => write!(
                f,
                "the model has {groups} groups of layers; at most {MOST_GROUPS} are planned: join \
                 some"
            ),
            Self::Endless => f.write_str(
                "an iteration would take longer than can be counted: look for a time or a size \
                 that is far too large",
            ),
        }
    }
}

impl std::error::Error for NoPlan {}

/// What is chosen for a group.
#[derive(Clone, PartialEq, Debug)]
pub struct Place {
    /// GPUs of each type.
    pub gpus: Vec<u32>,
    /// The part of the batch on each GPU of a type.
    pub parts: Vec<f64>,
    /// How gradients are summed.
    pub sum: Sum,
}

/// A place for each group.
#[derive(Clone, PartialEq, Debug)]
pub struct Plan {
    /// By group.
    pub places: Vec<Place>,
    /// Of an iteration.
    pub seconds: f64,
}

/// The places of a group, and of each the time until its end and the place before.
type Link = (Vec<Place>, Vec<(f64, usize)>);

impl Group {
    /// Whether every time and size is one.
    fn is_sane(&self, types: usize) -> bool {
        let time = |s: &f64| s.is_finite() && *s > 0.0;
        let size = |bytes: f64| bytes.is_finite() && bytes >= 0.0;
        let sizes = size(self.parameter_bytes) && size(self.activation_bytes);
        self.seconds.len() == types && self.seconds.iter().all(time) && sizes
    }
}

impl Pool {
    /// Every number of GPUs of each type, but none of all.
    fn choices(&self) -> Vec<Vec<u32>> {
        let mut all = vec![Vec::new()];
        for there in &self.gpus {
            all = (all.iter())
                .flat_map(|some| (0..=*there).map(|n| [some.as_slice(), &[n]].concat()))
                .collect();
        }
        all.retain(|gpus| gpus.iter().any(|n| *n > 0));
        all
    }

    /// A group on these GPUs, each with a part of the batch by its speed.
    fn by_speed(&self, group: &Group, gpus: &[u32]) -> Place {
        let speed: f64 = (gpus.iter().zip(&group.seconds))
            .map(|(n, seconds)| f64::from(*n) / seconds)
            .sum();
        let part = |(n, seconds): (&u32, &f64)| if *n > 0 { 1.0 / seconds / speed } else { 0.0 };
        self.place(
            group,
            gpus.to_vec(),
            gpus.iter().zip(&group.seconds).map(part).collect(),
        )
    }

    /// A group on all GPUs, each with the same part of the batch: what a program does by itself.
    fn even(&self, group: &Group) -> Place {
        let part = 1.0 / f64::from(self.gpus.iter().sum::<u32>());
        let parts = self.gpus.iter().map(|n| if *n > 0 { part } else { 0.0 });
        self.place(group, self.gpus.clone(), parts.collect())
    }

    fn place(&self, group: &Group, gpus: Vec<u32>, parts: Vec<f64>) -> Place {
        let ring = self.sum_s(group, &gpus, Sum::Ring);
        let server = self.sum_s(group, &gpus, Sum::Server);
        let sum = if ring <= server {
            Sum::Ring
        } else {
            Sum::Server
        };
        Place { gpus, parts, sum }
    }

    fn sum_s(&self, group: &Group, gpus: &[u32], sum: Sum) -> f64 {
        let n = f64::from(gpus.iter().sum::<u32>());
        let all_s = group.parameter_bytes / self.bytes_per_s;
        match sum {
            Sum::Ring => 2.0 * (n - 1.0) * (self.latency_s + all_s / n),
            Sum::Server if n > 1.0 => 2.0 * (self.latency_s + (n - 1.0) * all_s),
            Sum::Server => 0.0,
        }
    }

    /// Time of a group by itself, in seconds: the slowest replica, and then the gradients.
    #[must_use]
    pub fn group_s(&self, group: &Group, place: &Place) -> f64 {
        let times = place
            .parts
            .iter()
            .zip(&group.seconds)
            .map(|(part, s)| part * s);
        times.fold(0.0, f64::max) + self.sum_s(group, &place.gpus, place.sum)
    }

    /// Activations that leave their GPU between two groups, forth and their gradients back. GPUs of
    /// a type are taken in the same order by all groups.
    fn move_s(&self, from: &Group, a: &Place, b: &Place) -> f64 {
        let mut kept = 0.0;
        let mut least = u32::MAX;
        for kind in 0..self.gpus.len() {
            kept += f64::from(a.gpus[kind].min(b.gpus[kind])) * a.parts[kind].min(b.parts[kind]);
        }
        for place in [a, b] {
            least = least.min(place.gpus.iter().sum());
        }
        let moved = (1.0 - kept).max(0.0);
        if moved < 1e-9 {
            return 0.0;
        }
        // As many links as the smaller side has work at once.
        let links = f64::from(least.max(1));
        2.0 * (self.latency_s + moved * from.activation_bytes / (self.bytes_per_s * links))
    }

    /// What an iteration takes.
    #[must_use]
    pub fn seconds(&self, groups: &[Group], places: &[Place]) -> f64 {
        let own_s = groups
            .iter()
            .zip(places)
            .map(|(group, place)| self.group_s(group, place));
        let between = groups.iter().zip(places.windows(2));
        let between = between.map(|(from, pair)| self.move_s(from, &pair[0], &pair[1]));
        own_s.sum::<f64>() + between.sum::<f64>()
    }

    /// Every group on all GPUs, each with the same part of the batch.
    #[must_use]
    pub fn evenly(&self, groups: &[Group]) -> Plan {
        let places: Vec<Place> = groups.iter().map(|group| self.even(group)).collect();
        Plan {
            seconds: self.seconds(groups, &places),
            places,
        }
    }

    /// Every group on all GPUs, each with a part by its speed.
    #[must_use]
    pub fn proportionally(&self, groups: &[Group]) -> Plan {
        let places = groups.iter().map(|group| self.by_speed(group, &self.gpus));
        let places: Vec<Place> = places.collect();
        Plan {
            seconds: self.seconds(groups, &places),
            places,
        }
    }

    /// The best plan with the GPUs of one type alone.
    ///
    /// # Errors
    /// As [`Self::plan`].
    pub fn on_type(&self, kind: usize, groups: &[Group]) -> Result<Plan, NoPlan> {
        let own = |(at, n): (usize, &u32)| if at == kind { *n } else { 0 };
        let gpus = self.gpus.iter().enumerate().map(own).collect();
        Self {
            gpus,
            ..self.clone()
        }
        .plan(groups)
    }

    /// The best plan.
    ///
    /// # Errors
    /// [`NoPlan`]: a number that cannot be, or more ways to place a group than are tried.
    pub fn plan(&self, groups: &[Group]) -> Result<Plan, NoPlan> {
        let types = self.gpus.len();
        if self.gpus.iter().all(|n| *n == 0) {
            return Err(NoPlan::NoGpu);
        }
        let positive = |x: f64| x.is_finite() && x > 0.0;
        if !(positive(self.bytes_per_s) && self.latency_s.is_finite() && self.latency_s >= 0.0) {
            return Err(NoPlan::Link);
        }
        if let Some(at) = groups.iter().position(|group| !group.is_sane(types)) {
            return Err(NoPlan::Group(at));
        }
        let ways = self.ways();
        if ways > MOST_WAYS {
            return Err(NoPlan::Ways(ways));
        }
        if groups.len() > MOST_GROUPS {
            return Err(NoPlan::Groups(groups.len()));
        }
        let choices = self.choices();
        let places = |group: &Group| -> Vec<Place> {
            let of = choices.iter().map(|gpus| self.by_speed(group, gpus));
            // Even parts may be worth it where the next group has them.
            of.chain([self.even(group)]).collect()
        };
        // Of each group: its places, the least time of a chain that ends in each, and which place
        // of the group before is in that chain.
        let mut chain: Vec<Link> = Vec::new();
        for (at, group) in groups.iter().enumerate() {
            let here = places(group);
            let step = |place: &Place| {
                let own_s = self.group_s(group, place);
                let Some((before, best)) = chain.last() else {
                    return (own_s, 0);
                };
                let ways = before.iter().zip(best).map(|(other, (seconds, _))| {
                    seconds + self.move_s(&groups[at - 1], other, place)
                });
                let least = ways.enumerate().min_by(|a, b| a.1.total_cmp(&b.1));
                least.map_or((own_s, 0), |(from, seconds)| (seconds + own_s, from))
            };
            let best = here.iter().map(step).collect();
            chain.push((here, best));
        }
        let (_, ends) = chain.last().ok_or(NoPlan::NoGroup)?;
        let least = ends
            .iter()
            .enumerate()
            .min_by(|a, b| a.1.0.total_cmp(&b.1.0));
        let (mut index, (seconds, _)) = least.ok_or(NoPlan::NoGpu)?;
        let seconds = *seconds;
        let mut places: Vec<Place> = Vec::new();
        for (here, best) in chain.iter().rev() {
            places.push(here[index].clone());
            index = best[index].1;
        }
        places.reverse();
        if !seconds.is_finite() {
            return Err(NoPlan::Endless);
        }
        Ok(Plan { places, seconds })
    }

    /// Numbers of GPUs of each type that a group can be on.
    fn ways(&self) -> u64 {
        let ways = self.gpus.iter().map(|n| u64::from(*n) + 1);
        ways.fold(1, u64::saturating_mul) - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Random;

    fn pool(gpus: &[u32]) -> Pool {
        Pool {
            gpus: gpus.to_vec(),
            bytes_per_s: 1.25e9,
            latency_s: 50e-6,
        }
    }

    fn draw(random: &mut Random, groups: usize) -> Vec<Group> {
        let mut one = || Group {
            seconds: [1.0, 2.0, 4.0]
                .map(|by| by * (0.02 + 0.2 * random.unit()))
                .to_vec(),
            parameter_bytes: 1e8 * random.exponential(1.0),
            activation_bytes: 1e8 * random.exponential(1.0),
        };
        (0..groups).map(|_| one()).collect()
    }

    /// All plans there are.
    fn brute(pool: &Pool, groups: &[Group]) -> f64 {
        let of = |group: &Group| -> Vec<Place> {
            let by_speed = pool
                .choices()
                .into_iter()
                .map(|gpus| pool.by_speed(group, &gpus));
            by_speed.chain([pool.even(group)]).collect()
        };
        let mut plans: Vec<Vec<Place>> = vec![Vec::new()];
        for group in groups {
            let here = of(group);
            plans = (plans.iter())
                .flat_map(|plan| {
                    here.iter()
                        .map(|one| [plan.as_slice(), std::slice::from_ref(one)].concat())
                })
                .collect();
        }
        let seconds = plans.iter().map(|places| pool.seconds(groups, places));
        seconds.fold(f64::INFINITY, f64::min)
    }

    #[test]
    fn no_plan_is_better_than_the_one_that_is_found() {
        let mut random = Random::new(7);
        for case in 0..40 {
            let pool = pool(&[1 + case % 2, 1, 1]);
            let groups = draw(&mut random, 1 + case as usize % 4);
            let plan = pool.plan(&groups).unwrap();
            let least = brute(&pool, &groups);
            assert!(
                (plan.seconds / least - 1.0).abs() < 1e-9,
                "{case}: {} {least}",
                plan.seconds
            );
            assert!((pool.seconds(&groups, &plan.places) - plan.seconds).abs() < 1e-9);
        }
    }

    #[test]
    fn parts_by_speed_are_never_slower_than_even_ones_and_a_plan_never_slower_than_both() {
        let mut random = Random::new(8);
        for _ in 0..200 {
            let groups = draw(&mut random, 1);
            let pool = pool(&[2, 2, 2]);
            let (even, parts) = (pool.evenly(&groups), pool.proportionally(&groups));
            assert!(parts.seconds <= even.seconds + 1e-12);
            let plan = pool.plan(&groups).unwrap();
            assert!(plan.seconds <= parts.seconds + 1e-12);
            for place in &plan.places {
                let all: f64 = (place.parts.iter().zip(&place.gpus))
                    .map(|(part, n)| part * f64::from(*n))
                    .sum();
                assert!((all - 1.0).abs() < 1e-9, "the whole batch: {place:?}");
            }
        }
    }

    #[test]
    fn large_parameters_stay_on_one_gpu_and_small_ones_go_to_all() {
        let convolutions = Group {
            seconds: vec![0.4, 0.8, 1.6],
            parameter_bytes: 1e6,
            activation_bytes: 1e6,
        };
        let classifier = Group {
            seconds: vec![0.002, 0.004, 0.008],
            parameter_bytes: 5e8,
            activation_bytes: 1e5,
        };
        let plan = pool(&[2, 2, 2]).plan(&[convolutions, classifier]).unwrap();
        let gpus = |place: &Place| place.gpus.iter().sum::<u32>();
        assert_eq!([gpus(&plan.places[0]), gpus(&plan.places[1])], [6, 1]);
    }

    #[test]
    fn an_absurd_model_has_no_plan() {
        let good = draw(&mut Random::new(1), 2);
        assert!(pool(&[2, 2, 2]).plan(&good).is_ok());
        assert_eq!(pool(&[0, 0, 0]).plan(&good), Err(NoPlan::NoGpu));
        assert_eq!(pool(&[]).plan(&good), Err(NoPlan::NoGpu));
        assert_eq!(pool(&[2, 2]).plan(&good), Err(NoPlan::Group(0)));
        assert_eq!(pool(&[2, 2, 2]).plan(&[]), Err(NoPlan::NoGroup));
        assert_eq!(
            pool(&[u32::MAX; 3]).plan(&good),
            Err(NoPlan::Ways(u64::MAX - 1))
        );
        assert_eq!(pool(&[9, 9, 9]).plan(&good).map(|_| ()), Ok(()));
        assert_eq!(pool(&[9, 9, 10]).plan(&good), Err(NoPlan::Ways(1099)));
        let many = vec![good[0].clone(); MOST_GROUPS + 1];
        assert_eq!(pool(&[1, 0, 0]).plan(&many), Err(NoPlan::Groups(101)));
        for (bytes_per_s, latency_s) in [
            (0.0, 0.0),
            (-1.0, 0.0),
            (f64::NAN, 0.0),
            (f64::INFINITY, 0.0),
            (1.0, -1.0),
            (1.0, f64::INFINITY),
        ] {
            let pool = Pool {
                bytes_per_s,
                latency_s,
                ..pool(&[2, 2, 2])
            };
            assert_eq!(pool.plan(&good), Err(NoPlan::Link));
        }
        let mut huge = good.clone();
        huge[0].seconds = vec![f64::MAX; 3];
        huge[1].seconds = vec![f64::MAX; 3];
        assert_eq!(pool(&[1, 0, 0]).plan(&huge), Err(NoPlan::Endless));
        for bad in [f64::NAN, -1.0, 0.0, f64::INFINITY] {
            let mut groups = good.clone();
            groups[1].seconds[2] = bad;
            assert_eq!(pool(&[2, 2, 2]).plan(&groups), Err(NoPlan::Group(1)));
        }
    }
}
