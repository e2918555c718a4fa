//! One job that trains.

use std::collections::HashSet;
use std::sync::Arc;

use policy::cluster::Speed;
use policy::cluster::goodput::{Cut, Goodput, Gradient, Observation, StepModel};

use super::Training;

/// Where a job is, what it has seen, and what it makes of that.
#[derive(Clone, Debug)]
pub struct Session {
    training: Training,
    /// It chooses its batch size.
    tunes: bool,
    epoch: usize,
    cut: Cut,
    seen: Vec<Observation>,
    known: HashSet<(u32, u32, u32)>,
    steps: Option<StepModel>,
    gradient: Option<Gradient>,
    /// Seconds of a step at the user's batch size, by GPUs: what a job of a fixed batch size tells.
    step_s: Arc<[f64]>,
}

impl Session {
    /// The session of a new job; with `tunes` it chooses its batch size, as far as its kind allows.
    #[must_use]
    pub fn new(training: &Training, tunes: bool, gpus: u32, per_node: u32) -> Self {
        let most = training.most_gpus().min(gpus);
        let step_s = |gpus| training.application.step_s(training.batch, gpus, per_node);
        Self {
            training: training.clone(),
            tunes: tunes && !training.fixed,
            epoch: 0,
            cut: Cut::default(),
            seen: Vec::new(),
            known: HashSet::new(),
            steps: None,
            gradient: None,
            step_s: (1..=most).map(step_s).collect(),
        }
    }

    /// It chooses its batch size by the GPUs it has.
    #[must_use]
    pub fn tunes(&self) -> bool {
        self.tunes
    }

    fn goodput(&self) -> Option<Goodput> {
        Some(Goodput {
            steps: self.steps?,
            gradient: self.gradient?,
            batches: self.training.application.batches,
        })
    }

    /// Choose the batch size for GPUs on these nodes.
    pub fn settle(&mut self, placement: &[u32]) {
        let (nodes, gpus) = (placement.len() as u32, placement.iter().sum::<u32>());
        let batches = self.training.application.batches;
        let cut = match self.goodput() {
            Some(goodput) if self.tunes => goodput.best(nodes, gpus).1,
            _ => {
                let least = batches.first.max(batches.local[0] * gpus);
                let batch = if self.tunes {
                    least
                } else {
                    self.training.batch
                };
                batches.cut(f64::from(batch), gpus)
            }
        };
        self.cut = self.training.application.limited(cut, gpus);
    }

    /// Progress per second there, as it truly is.
    #[must_use]
    pub fn rate(&self, placement: &[u32]) -> f64 {
        let application = &self.training.application;
        let batch = self.cut.batch(placement.iter().sum());
        let scale = f64::from(batch) / f64::from(application.batches.first);
        let gradient = application.gradient(batch, self.epoch);
        gradient.gain(scale) / application.seconds(placement, self.cut)
    }

    /// It ran there: what a step took, and how noisy the gradient was.
    pub fn observe(&mut self, placement: &[u32]) {
        let application = &self.training.application;
        let (nodes, gpus) = (placement.len() as u32, placement.iter().sum::<u32>());
        self.gradient = Some(application.gradient(self.cut.batch(gpus), self.epoch));
        if self.tunes && self.known.insert((nodes, gpus, self.cut.local)) {
            let [step_s, sync_s] = application.times(placement, self.cut.local);
            self.seen.push(Observation {
                nodes,
                gpus,
                local: self.cut.local,
                compute_s: step_s - sync_s,
                step_s,
            });
            let fitted = StepModel::fit(&self.seen, self.steps.as_ref());
            self.steps = fitted.or(self.steps);
        }
    }

    /// Progress at which the present epoch ends.
    #[must_use]
    pub fn boundary(&self) -> f64 {
        self.training.application.progress(self.epoch)
    }

    /// The present epoch ends. Whether it was the last.
    pub fn end_epoch(&mut self) -> bool {
        let last = self.epoch + 1 >= self.training.application.epochs();
        self.epoch += usize::from(!last);
        last
    }

    /// What it reports to a sizer: how fast it is on how many GPUs (of nodes with `per_node`), and
    /// how many it can use. `left` is the progress still to be made. A job that chooses its batch
    /// size reports its fitted goodput, and asks for at most twice the GPUs it has tried. Any other
    /// job reports the time of its steps at its batch size, as if its user had measured it, and the
    /// steps left.
    #[must_use]
    pub fn report(&self, left: f64, gpus: u32, per_node: u32) -> (Speed, u32) {
        if !self.tunes {
            let steps = self
                .training
                .application
                .steps_left(self.training.batch, self.epoch)
                .max(1.0);
            let rates = self.step_s.iter().map(|step_s| left / (steps * step_s));
            return (Speed::Curve(rates.collect()), self.step_s.len() as u32);
        }
        let Some(goodput) = self.goodput() else {
            return (Speed::Curve(Arc::from([1.0])), 1);
        };
        let batches = self.training.application.batches;
        let tried = self.seen.iter().map(|seen| seen.gpus).max().unwrap_or(0);
        let most = (2 * tried).clamp(1, gpus.min(batches.most / batches.local[0]).max(1));
        // Parts of a node, then whole ones: what a sizer may choose among.
        let mut curve: Vec<f64> = Vec::with_capacity(gpus as usize);
        for gpus in 1..=gpus {
            let nodes = gpus.div_ceil(per_node);
            let rate = if gpus <= per_node || gpus.is_multiple_of(per_node) {
                goodput.best(nodes, gpus).0
            } else {
                curve.last().copied().unwrap_or(0.0)
            };
            curve.push(rate);
        }
        (Speed::Curve(curve.into()), most)
    }
}
