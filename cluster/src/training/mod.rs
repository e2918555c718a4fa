//! Jobs whose speed is known down to the placement and the batch size, and whose progress changes
//! from epoch to epoch.
//!
//! A trace of rigid jobs says how long each takes. Pollux' data (OSDI'21) say more: seconds of a
//! step by placement and samples on each GPU, and per epoch and batch size how noisy the gradient
//! was and how many steps the epoch took. An [`Application`] holds those true figures; a
//! [`Session`] is one job that trains with them in the simulator: it runs at some batch size,
//! measures the time of a step and the noise of the gradient, fits its goodput from these, and
//! reports it to a sizer.

mod session;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use policy::cluster::goodput::{Batches, Cut, Gradient};

pub use session::Session;

/// Samples on each GPU; seconds of a step and of the reduction in it.
pub type Point = (u32, [f64; 2]);

/// Seconds of a step and of the reduction in it, by samples on each GPU.
#[derive(Clone, Debug, Default)]
pub struct Curve(Vec<(f64, [f64; 2])>);

impl Curve {
    /// Of measurements; those at the same number of samples are averaged.
    #[must_use]
    pub fn new(points: impl IntoIterator<Item = Point>) -> Self {
        let mut sums: BTreeMap<u32, (f64, [f64; 2])> = BTreeMap::new();
        for (local, [step_s, sync_s]) in points {
            let (count, sum) = sums.entry(local).or_default();
            *count += 1.0;
            sum[0] += step_s;
            sum[1] += sync_s;
        }
        let mean = |(local, (count, sum)): (u32, (f64, [f64; 2]))| {
            (f64::from(local), sum.map(|sum| sum / count))
        };
        Self(sums.into_iter().map(mean).collect())
    }

    /// Linear between measurements, flat beyond them.
    fn at(&self, local: f64) -> [f64; 2] {
        let above = self.0.partition_point(|(x, _)| *x < local);
        match (above.checked_sub(1).map(|i| self.0[i]), self.0.get(above)) {
            (Some((x0, y0)), Some((x1, y1))) => mix(y0, *y1, (local - x0) / (x1 - x0)),
            (Some((_, only)), None) => only,
            (None, Some((_, only))) => *only,
            (None, None) => [f64::NAN; 2],
        }
    }
}

fn mix(a: [f64; 2], b: [f64; 2], part: f64) -> [f64; 2] {
    [0, 1].map(|i| a[i] + part * (b[i] - a[i]))
}

/// One row for each epoch at one batch size.
#[derive(Clone, Debug, Default)]
pub struct Epochs {
    /// Progress by the end of it, in steps of the first batch size.
    pub progress: Vec<f64>,
    /// Steps by the end of it.
    pub steps: Vec<f64>,
    /// The gradient in it.
    pub gradients: Vec<Gradient>,
}

/// What is measured of one application.
#[derive(Clone, Debug)]
pub struct Application {
    /// Its name.
    pub name: String,
    /// Batch sizes it may use.
    pub batches: Batches,
    by_batch: BTreeMap<u32, Epochs>,
    /// By GPUs on each node, the smallest rotation.
    placements: HashMap<Vec<u32>, Curve>,
    /// By nodes and GPUs.
    sizes: BTreeMap<u32, BTreeMap<u32, Curve>>,
}

impl Application {
    /// From measurements by batch size, by placement, and by nodes and GPUs. `None` if something is
    /// missing.
    #[must_use]
    pub fn new(
        name: String,
        most_local: Option<u32>,
        by_batch: BTreeMap<u32, Epochs>,
        placements: HashMap<Vec<u32>, Vec<Point>>,
        mut sizes: BTreeMap<u32, BTreeMap<u32, Vec<Point>>>,
    ) -> Option<Self> {
        let locals = || placements.values().flatten().map(|(local, _)| *local);
        let batches = Batches {
            first: *by_batch.keys().next()?,
            most: *by_batch.keys().next_back()?,
            local: [locals().min()?, most_local.or(locals().max())?],
        };
        if by_batch.values().any(|epochs| epochs.progress.is_empty()) {
            return None;
        }
        for (placement, points) in &placements {
            let (nodes, gpus) = (placement.len() as u32, placement.iter().sum());
            let at = sizes.entry(nodes).or_default().entry(gpus).or_default();
            at.extend(points);
        }
        let curves = |by_gpus: BTreeMap<u32, Vec<_>>| {
            let curve = |(gpus, points)| (gpus, Curve::new(points));
            by_gpus.into_iter().map(curve).collect()
        };
        Some(Self {
            name,
            batches,
            by_batch,
            placements: placements
                .into_iter()
                .map(|(placement, points)| (placement, Curve::new(points)))
                .collect(),
            sizes: sizes
                .into_iter()
                .map(|(nodes, by_gpus)| (nodes, curves(by_gpus)))
                .collect(),
        })
    }

    /// Number of epochs until it is trained.
    #[must_use]
    pub fn epochs(&self) -> usize {
        let lengths = self.by_batch.values().map(|epochs| epochs.progress.len());
        lengths.min().unwrap_or(0)
    }

    /// Progress by the end of an epoch: the least over batch sizes.
    #[must_use]
    pub fn progress(&self, epoch: usize) -> f64 {
        let ends = self.by_batch.values().map(|epochs| epochs.progress[epoch]);
        ends.fold(f64::INFINITY, f64::min)
    }

    /// The two measured batch sizes around one, and how far it is between them.
    fn around(&self, batch: u32) -> (&Epochs, &Epochs, f64) {
        let batch = batch.clamp(self.batches.first, self.batches.most);
        let below = self.by_batch.range(..=batch).next_back();
        let above = self.by_batch.range(batch..).next();
        match (below, above) {
            (Some((b0, below)), Some((b1, above))) if b1 > b0 => {
                let part = f64::from(batch - b0) / f64::from(b1 - b0);
                (below, above, part)
            }
            (Some((_, only)), _) | (None, Some((_, only))) => (only, only, 0.0),
            (None, None) => unreachable!("an application has a batch size"),
        }
    }

    /// The gradient in an epoch.
    #[must_use]
    pub fn gradient(&self, batch: u32, epoch: usize) -> Gradient {
        let (below, above, part) = self.around(batch);
        let (a, b) = (below.gradients[epoch], above.gradients[epoch]);
        let [square, variance] = mix([a.square, a.variance], [b.square, b.variance], part);
        Gradient { square, variance }
    }

    /// Steps from the end of an epoch to the end of the last, at a batch size.
    #[must_use]
    pub fn steps_left(&self, batch: u32, epoch: usize) -> f64 {
        let (below, above, part) = self.around(batch);
        let last = self.epochs() - 1;
        let left = |epochs: &Epochs| epochs.steps[last] - epochs.steps[epoch.min(last)];
        left(below) * (1.0 - part) + left(above) * part
    }

    /// Seconds of a step and of the reduction in it, by GPUs on each node.
    #[must_use]
    pub fn times(&self, placement: &[u32], local: u32) -> [f64; 2] {
        let local = f64::from(local);
        let rotations = (0..placement.len()).map(|i| {
            let (rest, head) = (&placement[i..], &placement[..i]);
            [rest, head].concat()
        });
        let smallest = rotations.min().unwrap_or_default();
        if let Some(curve) = self.placements.get(&smallest) {
            return curve.at(local);
        }
        // Not measured: between the nearest numbers of nodes, with as many GPUs on each.
        let (nodes, gpus) = (placement.len() as u32, placement.iter().sum::<u32>());
        let below = self.sizes.range(..=nodes).next_back();
        let above = self.sizes.range(nodes..).next();
        let at = |(there, by_gpus): (&u32, &BTreeMap<u32, Curve>)| {
            let gpus = f64::from(gpus) * f64::from(*there) / f64::from(nodes);
            between(by_gpus, gpus, local)
        };
        match (below, above) {
            (Some(a), Some(b)) if b.0 > a.0 => {
                let part = f64::from(nodes - a.0) / f64::from(b.0 - a.0);
                mix(at(a), at(b), part)
            }
            (Some(only), _) | (None, Some(only)) => at(only),
            (None, None) => unreachable!("an application has a placement"),
        }
    }

    /// Seconds of a step at a fixed batch size, on as few nodes as hold the GPUs.
    #[must_use]
    pub fn step_s(&self, batch: u32, gpus: u32, per_node: u32) -> f64 {
        let cut = self.limited(self.batches.cut(f64::from(batch), gpus), gpus);
        self.seconds(&consolidated(gpus, per_node), cut)
    }

    /// Seconds of a step that is cut so.
    #[must_use]
    pub fn seconds(&self, placement: &[u32], cut: Cut) -> f64 {
        let [step_s, sync_s] = self.times(placement, cut.local);
        step_s + f64::from(cut.more) * (step_s - sync_s)
    }

    /// Not beyond the greatest batch.
    #[must_use]
    pub fn limited(&self, cut: Cut, gpus: u32) -> Cut {
        let passes = gpus * (cut.more + 1);
        Cut {
            local: cut.local.min(self.batches.most / passes).max(1),
            ..cut
        }
    }
}

fn between(by_gpus: &BTreeMap<u32, Curve>, gpus: f64, local: f64) -> [f64; 2] {
    let below = by_gpus.range(..=gpus.floor() as u32).next_back();
    let above = by_gpus.range(gpus.ceil() as u32..).next();
    match (below, above) {
        (Some((g0, a)), Some((g1, b))) if g1 > g0 => {
            let part = (gpus - f64::from(*g0)) / f64::from(g1 - g0);
            mix(a.at(local), b.at(local), part)
        }
        (Some((_, only)), _) | (None, Some((_, only))) => only.at(local),
        (None, None) => [f64::NAN; 2],
    }
}

/// Whole nodes, and a part of one.
#[must_use]
pub fn consolidated(gpus: u32, per_node: u32) -> Vec<u32> {
    let mut placement = vec![per_node; (gpus / per_node) as usize];
    if !gpus.is_multiple_of(per_node) {
        placement.push(gpus % per_node);
    }
    placement
}

/// What a kind of job trains.
#[derive(Clone, Debug)]
pub struct Training {
    /// The application.
    pub application: Arc<Application>,
    /// The batch size its user chose.
    pub batch: u32,
    /// That one is kept whatever happens, on one GPU.
    pub fixed: bool,
}

impl Training {
    /// Most GPUs at the batch size its user chose.
    #[must_use]
    pub fn most_gpus(&self) -> u32 {
        if self.fixed {
            return 1;
        }
        (self.batch / self.application.batches.local[0]).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn application() -> Application {
        let epochs = |steps: f64| Epochs {
            progress: vec![100.0, 200.0],
            steps: vec![steps, 2.0 * steps],
            gradients: vec![
                Gradient {
                    square: 1.0,
                    variance: steps,
                };
                2
            ],
        };
        let point = |local: u32, step_s: f64| (local, [step_s, 0.1]);
        Application::new(
            "toy".into(),
            None,
            BTreeMap::from([(8, epochs(100.0)), (24, epochs(50.0))]),
            HashMap::from([
                (vec![1], vec![point(4, 1.0), point(8, 2.0)]),
                (vec![1, 2], vec![point(4, 3.0)]),
            ]),
            BTreeMap::from([(5, BTreeMap::from([(5, vec![point(4, 5.0)])]))]),
        )
        .unwrap()
    }

    #[test]
    fn what_was_not_measured_lies_between_what_was() {
        let toy = application();
        assert_eq!(toy.times(&[1], 6), [1.5, 0.1]);
        assert_eq!(toy.times(&[1], 100), [2.0, 0.1], "flat beyond the last");
        assert_eq!(toy.times(&[2, 1], 4), [3.0, 0.1], "a rotation");
        // Three nodes: two thirds of the way from the pair of nodes to the five.
        let [three, _] = toy.times(&[1, 1, 1], 4);
        assert!((three - (3.0 + 2.0 / 3.0)).abs() < 1e-12, "{three}");
        assert_eq!(toy.gradient(16, 0).variance, 75.0);
        assert_eq!(toy.steps_left(24, 0), 50.0);
        assert_eq!(toy.steps_left(24, 1), 0.0);
        assert_eq!((toy.epochs(), toy.progress(1)), (2, 200.0));
    }

    #[test]
    fn gangs_fill_nodes() {
        assert_eq!(consolidated(9, 4), [4, 4, 1]);
        assert_eq!(consolidated(8, 4), [4, 4]);
        assert_eq!(consolidated(3, 4), [3]);
    }
}
