//! CPU cores and memory of a server between the jobs on its GPUs.
//!
//! Jobs are differently sensitive to both: with three times the cores an image model whose loader
//! is the bottleneck is up to three times as fast, a language model is no faster at all. Synergy
//! (OSDI'22) profiles the speed over cores x memory, guarantees every job the speed of its
//! GPU-proportional part, and gives what insensitive jobs do not need to jobs that gain
//! (Synergy-Tune).

/// Speed of a kind of job relative to its speed with the GPU-proportional part, at measured points.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Sensitivity {
    /// Cores for each GPU, bytes for each GPU, speed.
    points: Vec<(f64, f64, f64)>,
}

/// What one job gets, in all.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Given {
    /// Cores.
    pub cpus: f64,
    /// Bytes.
    pub bytes: f64,
    /// Speed relative to the proportional part.
    pub speed: f64,
}

impl Sensitivity {
    /// Add a measurement, for each GPU; what is not a number or negative is not taken: `false`.
    pub fn insert(&mut self, cpus: f64, bytes: f64, speed: f64) -> bool {
        let good = [cpus, bytes, speed]
            .iter()
            .all(|x| x.is_finite() && *x >= 0.0);
        if good {
            self.points.push((cpus, bytes, speed));
        }
        good
    }

    /// Speed with at most so much for each GPU: that of the best point within. 0 where none is.
    #[must_use]
    pub fn speed(&self, cpus: f64, bytes: f64) -> f64 {
        let within = self
            .points
            .iter()
            .filter(|point| point.0 <= cpus + 1e-9 && point.1 <= bytes * (1.0 + 1e-9));
        within.map(|point| point.2).fold(0.0, f64::max)
    }
}

/// Divide `cpus` and `bytes` of a server with `gpus` GPUs between jobs (GPUs held, sensitivity),
/// which hold no more GPUs than there are. First every job gets the cheapest point that is as fast
/// as its proportional part, or that part itself; then always the point that gains most speed for
/// the part of the server it costs, until nothing fits. No job is slower than with its proportional
/// part.
#[must_use]
pub fn tune(gpus: u32, cpus: f64, bytes: f64, jobs: &[(u32, &Sensitivity)]) -> Vec<Given> {
    let part = [cpus / f64::from(gpus), bytes / f64::from(gpus)];
    let cost = |more: [f64; 2]| more[0] / cpus + more[1] / bytes;
    let mut left = [cpus, bytes];
    let mut given: Vec<Given> = jobs
        .iter()
        .map(|(held, job)| {
            let held = f64::from(*held);
            let own = job.speed(part[0], part[1]);
            let as_fast = job.points.iter().filter(|point| {
                point.2 >= own && point.0 <= part[0] + 1e-9 && point.1 <= part[1] * (1.0 + 1e-9)
            });
            let cheapest = as_fast.min_by(|a, b| cost([a.0, a.1]).total_cmp(&cost([b.0, b.1])));
            let (cpus, bytes) = cheapest.map_or((part[0], part[1]), |point| (point.0, point.1));
            left[0] -= held * cpus;
            left[1] -= held * bytes;
            Given {
                cpus: held * cpus,
                bytes: held * bytes,
                speed: own,
            }
        })
        .collect();
    loop {
        let mut best: Option<(f64, usize, Given)> = None;
        for (at, ((held, job), has)) in jobs.iter().zip(&given).enumerate() {
            let held = f64::from(*held);
            for (cpus, bytes, speed) in &job.points {
                let next = Given {
                    cpus: (held * cpus).max(has.cpus),
                    bytes: (held * bytes).max(has.bytes),
                    speed: *speed,
                };
                let more = [next.cpus - has.cpus, next.bytes - has.bytes];
                let fits = more[0] <= left[0] + 1e-9 && more[1] <= left[1] * (1.0 + 1e-12);
                let gain = (speed - has.speed) * held / cost(more).max(1e-12);
                if fits && gain > 0.0 && best.is_none_or(|(most, ..)| gain > most) {
                    best = Some((gain, at, next));
                }
            }
        }
        let Some((_, at, next)) = best else {
            return given;
        };
        left[0] -= next.cpus - given[at].cpus;
        left[1] -= next.bytes - given[at].bytes;
        given[at] = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_given_where_they_make_a_difference() {
        let (mut image, mut text) = (Sensitivity::default(), Sensitivity::default());
        for cpus in 1..=6 {
            image.insert(f64::from(cpus), 1.0, f64::from(cpus) / 3.0);
            text.insert(f64::from(cpus), 1.0, 1.0);
        }
        let given = tune(2, 6.0, 2.0, &[(1, &image), (1, &text)]);
        assert_eq!((given[0].cpus, given[1].cpus), (5.0, 1.0));
        assert!((given[0].speed - 5.0 / 3.0).abs() < 1e-12 && given[1].speed == 1.0);
        assert!(!image.insert(f64::NAN, 1.0, 1.0));
    }
}
