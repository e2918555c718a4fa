//! How fast a data-parallel job learns, by GPUs and batch size: Pollux' goodput (OSDI'21).
//!
//! Goodput = throughput x statistical efficiency. A step takes T = (T_comp^g + T_net^g)^(1/g),
//! where T_comp = a_c + b_c m for m samples on each GPU, and T_net = a + b (r - 2) for r > 1 GPUs,
//! with one pair (a, b) inside a node and another between nodes; g between 1 (no overlap) and 10
//! (nearly all of it hidden). Larger batches can be had without more memory by accumulation: s more
//! passes without a reduction take s T_comp. With phi the gradient noise scale (variance of the
//! gradient over its square, in units of the first batch size M0), a batch of M samples is worth
//! E(M) = (phi + M0) / (phi + M) as much a sample as one of M0. A job measures T wherever it runs
//! and phi as it trains, fits the seven numbers, and reports its goodput at the best batch size for
//! any number of GPUs. Progress is counted in steps of the first batch size, so that it means the
//! same at any batch.
//!
//! The fit is of the logarithms, by root mean square, with Pollux' two small penalties (on g, and
//! on b against a), by a simplex search over the logarithms of the parameters. What was never
//! measured counts as free: one GPU shows nothing about the network, so more GPUs look linear until
//! they are tried. Therefore a job should not be given more than twice what it has tried.

/// A step measured alone.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Observation {
    /// Nodes in use.
    pub nodes: u32,
    /// GPUs in use.
    pub gpus: u32,
    /// Samples on each GPU in one pass.
    pub local: u32,
    /// Seconds of a pass without reduction.
    pub compute_s: f64,
    /// Seconds of a whole step.
    pub step_s: f64,
}

/// The fitted parameters: seconds, and the exponent.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepModel {
    /// `a_c`, `b_c`: constant and per sample.
    pub compute: [f64; 2],
    /// `a`, `b` between nodes.
    pub network: [f64; 2],
    /// `a`, `b` inside a node.
    pub bus: [f64; 2],
    /// `g`.
    pub overlap: f64,
}

/// Below this a time is taken as nothing.
const TINY: f64 = 1e-8;
/// Greatest exponent: a hundredth off the maximum of the two at most.
const OVERLAP_MOST: f64 = 10.0;

impl StepModel {
    /// Seconds of a pass over `local` samples on each GPU.
    #[must_use]
    pub fn compute_s(&self, local: u32) -> f64 {
        self.compute[0] + self.compute[1] * f64::from(local)
    }

    fn network_s(&self, nodes: u32, gpus: u32) -> f64 {
        let [constant, more] = match (nodes, gpus) {
            (2.., _) => self.network,
            (_, 2..) => self.bus,
            _ => return TINY,
        };
        constant + more * (f64::from(gpus) - 2.0).max(TINY)
    }

    /// Seconds of a step with one reduction.
    #[must_use]
    pub fn step_s(&self, nodes: u32, gpus: u32, local: u32) -> f64 {
        let (compute, network) = (self.compute_s(local), self.network_s(nodes, gpus));
        let (long, short) = (compute.max(network), compute.min(network));
        // The norm, without overflow of the powers.
        long * (1.0 + (short / long).powf(self.overlap)).powf(1.0 / self.overlap)
    }

    /// Fits the measurements, starting from an earlier fit if there is one. `None` without usable
    /// measurements.
    #[must_use]
    pub fn fit(observations: &[Observation], earlier: Option<&Self>) -> Option<Self> {
        let usable = |seen: &&Observation| {
            let time = |s: f64| s.is_finite() && s > 0.0;
            time(seen.compute_s) && time(seen.step_s) && seen.gpus > 0 && seen.local > 0
        };
        let seen: Vec<Observation> = observations.iter().filter(usable).copied().collect();
        let first = seen.first()?;
        let one_size = seen.iter().all(|s| s.local == first.local);
        let between = seen.iter().any(|s| s.nodes > 1);
        let inside = seen.iter().any(|s| s.nodes == 1 && s.gpus > 1);
        let many = seen.iter().any(|s| s.gpus > 2);
        // Which of compute, network and bus are free to move: the rest stays at nothing.
        let free = [
            !one_size,
            true,
            between,
            between && many,
            inside,
            inside && many,
            between || inside,
        ];
        let mean = seen.iter().map(|s| s.compute_s).sum::<f64>() / seen.len() as f64;
        let mut start = [0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001];
        if let Some(earlier) = earlier {
            start = earlier.numbers();
        }
        if one_size {
            start[0] = mean / 2.0;
        }
        for (at, free) in free.iter().enumerate().skip(2).take(4) {
            if !free {
                start[at] = TINY;
            } else if start[at] <= 10.0 * TINY {
                start[at] = if at % 2 == 0 { 0.1 * mean } else { 0.01 * mean };
            }
        }
        let cost = |numbers: &[f64; 7]| Self::of(numbers).error(&seen);
        let mut best = simplex(&start, &free, &cost);
        // Once more from where it stopped: a simplex may collapse too early.
        best = simplex(&best, &free, &cost);
        let mut model = Self::of(&best);
        if !between {
            // The network is no better than the bus.
            for (network, bus) in model.network.iter_mut().zip(model.bus) {
                *network = network.max(1.1 * bus);
            }
        }
        Some(model)
    }

    fn numbers(&self) -> [f64; 7] {
        let [a, b] = self.compute;
        let [c, d] = self.network;
        let [e, f] = self.bus;
        [a, b, c, d, e, f, self.overlap]
    }

    fn of(numbers: &[f64; 7]) -> Self {
        let [a, b, c, d, e, f, overlap] = numbers.map(|number| number.max(TINY));
        Self {
            compute: [a, b],
            network: [c, d],
            bus: [e, f],
            overlap: overlap.clamp(1.0, OVERLAP_MOST),
        }
    }

    fn error(&self, seen: &[Observation]) -> f64 {
        let (mut compute, mut step) = (0.0, 0.0);
        for s in seen {
            compute += (self.compute_s(s.local) / s.compute_s).ln().powi(2);
            step += (self.step_s(s.nodes, s.gpus, s.local) / s.step_s)
                .ln()
                .powi(2);
        }
        let count = seen.len() as f64;
        let ratio = |[constant, more]: [f64; 2]| (more / constant).powi(2);
        (compute / count).sqrt()
            + (step / count).sqrt()
            + 1e-3 * (self.overlap - 1.0).powi(2)
            + 1e-2 * (ratio(self.network) + ratio(self.bus))
    }
}

/// The simplex search of Nelder and Mead (1965) over the logarithms of the numbers that are free.
fn simplex(start: &[f64; 7], free: &[bool; 7], cost: &dyn Fn(&[f64; 7]) -> f64) -> [f64; 7] {
    let moving: Vec<usize> = (0..7).filter(|at| free[*at]).collect();
    let at = |point: &[f64]| {
        let mut numbers = *start;
        for (value, at) in point.iter().zip(&moving) {
            numbers[*at] = value.clamp(-25.0, 12.0).exp();
        }
        numbers
    };
    let value = |point: &[f64]| {
        let cost = cost(&at(point));
        if cost.is_finite() { cost } else { f64::MAX }
    };
    let first: Vec<f64> = moving.iter().map(|at| start[*at].max(TINY).ln()).collect();
    let size = first.len();
    let mut points: Vec<(f64, Vec<f64>)> = vec![(value(&first), first.clone())];
    for axis in 0..size {
        let mut point = first.clone();
        point[axis] += 0.7;
        points.push((value(&point), point));
    }
    for _ in 0..120 * size {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (best, worst) = (points[0].0, points[size].0);
        if worst - best < 1e-7 * (1e-3 + best.abs()) {
            break;
        }
        let centre: Vec<f64> = (0..size)
            .map(|axis| points[..size].iter().map(|p| p.1[axis]).sum::<f64>() / size as f64)
            .collect();
        let along = |by: f64| {
            let point: Vec<f64> = centre
                .iter()
                .zip(&points[size].1)
                .map(|(c, w)| c + by * (c - w))
                .collect();
            (value(&point), point)
        };
        let mirrored = along(1.0);
        let next = if mirrored.0 < best {
            let further = along(2.0);
            if further.0 < mirrored.0 {
                further
            } else {
                mirrored
            }
        } else if mirrored.0 < points[size - 1].0 {
            mirrored
        } else if mirrored.0 < worst {
            along(0.5)
        } else {
            along(-0.5)
        };
        if next.0 < worst {
            points[size] = next;
            continue;
        }
        let centre = points[0].1.clone();
        for point in &mut points[1..] {
            for (x, c) in point.1.iter_mut().zip(&centre) {
                *x = c + 0.5 * (*x - c);
            }
            point.0 = value(&point.1);
        }
    }
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    at(&points[0].1)
}

/// Mean square and variance of the gradient, at the first batch size.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Gradient {
    /// Square of its mean.
    pub square: f64,
    /// Its variance.
    pub variance: f64,
}

impl Gradient {
    /// Progress of one step of `scale` times the first batch size, in steps of the first batch
    /// size.
    #[must_use]
    pub fn gain(&self, scale: f64) -> f64 {
        let below = self.variance / scale + self.square;
        if below > 0.0 {
            (self.variance + self.square) / below
        } else {
            1.0
        }
    }
}

/// Which batch sizes a job may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Batches {
    /// The first batch size, whose steps count as progress.
    pub first: u32,
    /// The greatest.
    pub most: u32,
    /// Least and greatest number of samples on one GPU in one pass.
    pub local: [u32; 2],
}

/// How a batch is split: samples on each GPU in a pass, and passes without a reduction before the
/// pass with one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cut {
    /// Samples on each GPU in one pass.
    pub local: u32,
    /// Passes before the last of a step.
    pub more: u32,
}

impl Cut {
    /// Samples of a step.
    #[must_use]
    pub fn batch(&self, gpus: u32) -> u32 {
        gpus * self.local * (self.more + 1)
    }
}

/// How many candidates between the least and the greatest batch are looked at.
const CANDIDATES: u32 = 50;

impl Batches {
    /// How a batch of this many samples is split for so many GPUs. On one GPU a batch larger than
    /// the first takes two passes, because one pass does not show the noise of the gradient.
    #[must_use]
    pub fn cut(&self, batch: f64, gpus: u32) -> Cut {
        const SLACK: f64 = 1e-8;
        let each = batch / f64::from(gpus.max(1));
        let mut more = ((each / f64::from(self.local[1].max(1)) - SLACK).ceil() - 1.0).max(0.0);
        if gpus == 1 && batch > f64::from(self.first) + SLACK {
            more = more.max(1.0);
        }
        let local = (each / (more + 1.0) - SLACK).ceil().max(1.0);
        Cut {
            local: local as u32,
            more: more as u32,
        }
    }
}

/// Everything about one job: where it should run, and how large its batch should be.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Goodput {
    /// How long a step takes.
    pub steps: StepModel,
    /// What it is worth.
    pub gradient: Gradient,
    /// What it may be.
    pub batches: Batches,
}

impl Goodput {
    /// Progress per second, in steps of the first batch size.
    #[must_use]
    pub fn at(&self, nodes: u32, gpus: u32, cut: Cut) -> f64 {
        let seconds = self.steps.step_s(nodes, gpus, cut.local)
            + f64::from(cut.more) * self.steps.compute_s(cut.local);
        let scale = f64::from(cut.batch(gpus)) / f64::from(self.batches.first);
        self.gradient.gain(scale) / seconds
    }

    /// The best batch for so many GPUs, and the goodput with it; 0 where no batch is possible.
    #[must_use]
    pub fn best(&self, nodes: u32, gpus: u32) -> (f64, Cut) {
        let [least, most] = self.batches.local;
        let low = f64::from(self.batches.first.max(least * gpus));
        let high = f64::from(self.batches.most);
        let mut best = (
            0.0,
            Cut {
                local: least,
                more: 0,
            },
        );
        for candidate in 0..CANDIDATES {
            let part = f64::from(candidate) / f64::from(CANDIDATES - 1);
            let cut = self.batches.cut(low * (high / low).powf(part), gpus);
            if !(least..=most).contains(&cut.local) {
                continue;
            }
            let goodput = self.at(nodes, gpus, cut);
            if goodput > best.0 {
                best = (goodput, cut);
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> StepModel {
        StepModel {
            compute: [0.05, 0.002],
            network: [0.09, 0.004],
            bus: [0.02, 0.003],
            overlap: 1.6,
        }
    }

    fn seen(model: &StepModel, nodes: u32, gpus: u32, local: u32) -> Observation {
        Observation {
            nodes,
            gpus,
            local,
            compute_s: model.compute_s(local),
            step_s: model.step_s(nodes, gpus, local),
        }
    }

    #[test]
    fn ten_points_tell_the_rest_within_a_tenth() {
        let truth = model();
        let points = [
            (1, 1, 16),
            (1, 1, 128),
            (1, 2, 32),
            (1, 4, 64),
            (2, 2, 16),
            (2, 8, 32),
            (3, 12, 16),
            (4, 16, 64),
            (1, 3, 16),
            (2, 6, 128),
        ];
        let all: Vec<_> = points
            .iter()
            .map(|(nodes, gpus, local)| seen(&truth, *nodes, *gpus, *local))
            .collect();
        let fit = StepModel::fit(&all, None).unwrap();
        for (nodes, gpus, local) in [(1, 4, 16), (2, 4, 64), (4, 12, 128), (6, 24, 32)] {
            let ratio = fit.step_s(nodes, gpus, local) / truth.step_s(nodes, gpus, local);
            assert!((ratio - 1.0).abs() < 0.1, "{nodes} {gpus} {local}: {ratio}");
        }
    }

    #[test]
    fn what_was_never_tried_looks_free() {
        let one = seen(&model(), 1, 1, 64);
        let fit = StepModel::fit(&[one], None).unwrap();
        let (solo, four) = (fit.step_s(1, 1, 64), fit.step_s(1, 4, 64));
        assert!((solo / one.step_s - 1.0).abs() < 0.01, "{solo}");
        assert!(four < 1.01 * solo);
        let wrong = Observation {
            step_s: f64::NAN,
            ..one
        };
        assert_eq!(StepModel::fit(&[wrong], None), None);
    }

    #[test]
    fn a_noisy_gradient_makes_large_batches_worth_their_time() {
        let with = |variance: f64| Goodput {
            steps: model(),
            gradient: Gradient {
                square: 1.0,
                variance,
            },
            batches: Batches {
                first: 64,
                most: 4096,
                local: [8, 256],
            },
        };
        let (calm, noisy) = (with(0.1).best(2, 8), with(100.0).best(2, 8));
        assert!(noisy.1.batch(8) > 2 * calm.1.batch(8), "{calm:?} {noisy:?}");
        // Twice the batch is worth (1 + v) / (v / 2 + 1) steps.
        let gain = with(3.0).gradient.gain(2.0);
        assert!((gain - 4.0 / 2.5).abs() < 1e-12);
        // Never better than linear, and the best of the candidates is at least the first batch.
        let job = with(100.0);
        assert!(job.best(1, 4).0 <= 4.001 * job.best(1, 1).0);
        assert!(job.best(1, 1).0 >= job.at(1, 1, job.batches.cut(64.0, 1)));
    }

    #[test]
    fn a_batch_is_cut_into_passes_that_fit() {
        let batches = Batches {
            first: 64,
            most: 4096,
            local: [8, 256],
        };
        assert_eq!(batches.cut(64.0, 1), Cut { local: 64, more: 0 });
        assert_eq!(batches.cut(65.0, 1), Cut { local: 33, more: 1 });
        assert_eq!(
            batches.cut(4096.0, 4),
            Cut {
                local: 256,
                more: 3
            }
        );
        assert_eq!(batches.cut(4096.0, 4).batch(4), 4096);
    }
}
