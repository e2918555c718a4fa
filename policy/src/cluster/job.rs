//! A job as policies see it: what it asks for, what is known of it, how far it is.

use std::sync::Arc;

use super::fair::Sensitivity;
use super::{GpuId, GpuType};
pub use crate::Class;

/// A job, as its state numbers it: an index that is never used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct JobId(pub u32);

/// Whose job.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct UserId(pub u32);

/// What kind of job (model and batch size): what pair measurements are remembered by.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct JobType(pub u32);

/// How fast a job runs on how many GPUs, in units of its work per second.
#[derive(Clone, Debug)]
pub enum Speed {
    /// On as many GPUs as it asks for, one unit per second; on fewer, not at all. Its work is
    /// seconds.
    Rigid,
    /// `curve[n - 1]` on `n` GPUs. Beyond the end it stays what it is at the end.
    Curve(Arc<[f64]>),
}

/// What the interposer meters of a process. Fractions are of one device.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Profile {
    /// Kind of job.
    pub kind: JobType,
    /// How firmly it was promised its share.
    pub class: Class,
    /// GPUs of the job.
    pub gpus: u32,
    /// Part of the time in which the device works for it.
    pub busy: f64,
    /// Part of the memory bandwidth in use.
    pub mem_busy: f64,
    /// Bytes that outlive an iteration.
    pub persistent_bytes: u64,
    /// Peak bytes beyond those within an iteration.
    pub ephemeral_bytes: u64,
    /// Of its peak, what can be in its server's memory while others have the device.
    pub movable_bytes: u64,
    /// Time of one iteration alone, in seconds; 0 where it is not known.
    pub iteration_s: f64,
    /// Coefficient of variation of the iteration time.
    pub iteration_cov: f64,
    /// Launches in one iteration.
    pub launches: f64,
    /// Bytes copied to the device in one iteration.
    pub h2d_bytes: u64,
    /// Between 0 (guessed) and 1: how far the iteration boundary is to be trusted.
    pub confidence: f64,
}

impl Profile {
    /// Of a job about which nothing is known yet.
    #[must_use]
    pub fn unknown(kind: JobType, gpus: u32, class: Class) -> Self {
        Self {
            kind,
            class,
            gpus,
            busy: 1.0,
            mem_busy: 0.0,
            persistent_bytes: 0,
            ephemeral_bytes: 0,
            movable_bytes: 0,
            iteration_s: 0.0,
            iteration_cov: 0.0,
            launches: 0.0,
            h2d_bytes: 0,
            confidence: 0.0,
        }
    }

    /// Bytes it may hold at once.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        self.persistent_bytes.saturating_add(self.ephemeral_bytes)
    }

    /// Bytes that stay on the device, and bytes that can leave it.
    #[must_use]
    pub fn fixed_and_movable_bytes(&self) -> [u64; 2] {
        let (peak, movable) = (self.peak_bytes(), self.movable_bytes);
        [peak.saturating_sub(movable), movable.min(peak)]
    }

    /// The same profile with impossible values replaced by careful guesses: a NaN or negative
    /// fraction becomes 1.
    #[must_use]
    pub fn sane(mut self) -> Self {
        let fraction = |x: f64| if x >= 0.0 { x.min(1.0) } else { 1.0 };
        self.busy = fraction(self.busy);
        self.mem_busy = fraction(self.mem_busy);
        let positive = |x: f64| if x.is_finite() && x > 0.0 { x } else { 0.0 };
        self.iteration_s = positive(self.iteration_s);
        self.iteration_cov = positive(self.iteration_cov);
        self.launches = positive(self.launches);
        self.confidence = positive(self.confidence).min(1.0);
        self
    }
}

/// A running job's present stretch.
#[derive(Clone, PartialEq, Debug)]
pub struct Run {
    /// Since when it holds its GPUs, or since its rate last changed.
    pub since_s: f64,
    /// From when on it makes progress: later than `since_s` by what a restart costs.
    pub warm_s: f64,
    /// Units of work per second once warm.
    pub rate: f64,
    /// Its GPUs.
    pub gpus: Vec<GpuId>,
    /// Which part of each GPU's time it was given.
    pub share: f64,
    /// How firmly.
    pub class: Class,
    /// It came second onto these GPUs, beside this job.
    pub beside: Option<JobId>,
}

/// A part of one GPU that a job asks for, which its node enforces.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Part {
    /// Of the GPU's time, above 0 and below 1.
    pub share: f64,
    /// Of its memory.
    pub bytes: u64,
}

/// What a job is doing.
#[derive(Clone, PartialEq, Debug)]
pub enum Phase {
    /// It holds no GPU.
    Waiting {
        /// Since when.
        since_s: f64,
    },
    /// It holds GPUs.
    Running(Run),
    /// It is done, or gone.
    Done {
        /// Since when.
        at_s: f64,
    },
}

/// One job. Times are seconds of the state's clock.
#[derive(Clone, Debug)]
pub struct Job {
    /// Which one.
    pub id: JobId,
    /// Whose.
    pub user: UserId,
    /// GPUs it asks for, all at once.
    pub gpus: u32,
    /// It asks for a part of one GPU, and shares it with such jobs only.
    pub part: Option<Part>,
    /// Most that a sizer may give it.
    pub most_gpus: u32,
    /// When it came.
    pub arrival_s: f64,
    /// Its work as far as policies know it, in units of its [`Speed`].
    pub work: f64,
    /// How fast it does its work.
    pub speed: Speed,
    /// Speed on each GPU type relative to `speed`, by [`GpuType`]; a missing one is 1.
    pub by_type: Arc<[f64]>,
    /// How its speed depends on the cores and memory that it has for each GPU; `None`: not known.
    pub host: Option<Arc<Sensitivity>>,
    /// When it must be done.
    pub deadline_s: Option<f64>,
    /// Weight among jobs, above 0.
    pub weight: f64,
    /// What is known of how it uses a device.
    pub profile: Profile,
    /// What it is doing.
    pub phase: Phase,
    /// Work done when the present stretch began.
    pub settled_work: f64,
    /// GPU-seconds held when the present stretch began.
    pub settled_gpu_s: f64,
    /// Seconds for which it has held GPUs when the present stretch began.
    pub settled_s: f64,
    /// How often it was given GPUs.
    pub starts: u32,
    /// [`ClusterState::contention_s`](super::ClusterState::contention_s) when it came.
    pub contention_at_arrival_s: f64,
}

impl Job {
    /// A rigid job of `duration_s` on `gpus` GPUs.
    #[must_use]
    pub fn rigid(kind: JobType, gpus: u32, arrival_s: f64, duration_s: f64) -> Self {
        Self {
            id: JobId(u32::MAX),
            user: UserId(0),
            gpus,
            part: None,
            most_gpus: u32::MAX,
            arrival_s,
            work: duration_s,
            speed: Speed::Rigid,
            by_type: Arc::from([]),
            host: None,
            deadline_s: None,
            weight: 1.0,
            profile: Profile::unknown(kind, gpus, Class::Guaranteed),
            phase: Phase::Waiting { since_s: arrival_s },
            settled_work: 0.0,
            settled_gpu_s: 0.0,
            settled_s: 0.0,
            starts: 0,
            contention_at_arrival_s: 0.0,
        }
    }

    /// Its present stretch, where it runs.
    #[must_use]
    pub fn run(&self) -> Option<&Run> {
        match &self.phase {
            Phase::Running(run) => Some(run),
            _ => None,
        }
    }

    /// It holds no GPU and wants some.
    #[must_use]
    pub fn waits(&self) -> bool {
        matches!(self.phase, Phase::Waiting { .. })
    }

    /// It is over.
    #[must_use]
    pub fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Done { .. })
    }

    /// Units of work per second on `gpus` GPUs of the reference type.
    #[must_use]
    pub fn rate(&self, gpus: u32) -> f64 {
        match &self.speed {
            Speed::Rigid => f64::from(u8::from(gpus >= self.gpus)),
            Speed::Curve(curve) => match (gpus as usize).min(curve.len()) {
                0 => 0.0,
                n => curve[n - 1],
            },
        }
    }

    /// The same on GPUs of one type.
    #[must_use]
    pub fn rate_on(&self, gpus: u32, kind: GpuType) -> f64 {
        self.rate(gpus)
            * self
                .by_type
                .get(usize::from(kind.0))
                .copied()
                .unwrap_or(1.0)
    }

    /// Work done.
    #[must_use]
    pub fn done(&self, now_s: f64) -> f64 {
        self.settled_work
            + self
                .run()
                .map_or(0.0, |run| (now_s - run.warm_s).max(0.0) * run.rate)
    }

    /// Work left, by what policies know: never negative, also where the estimate was too low.
    #[must_use]
    pub fn left(&self, now_s: f64) -> f64 {
        (self.work - self.done(now_s)).max(0.0)
    }

    /// Seconds it would still take on the GPUs it asks for, alone.
    #[must_use]
    pub fn left_s(&self, now_s: f64) -> f64 {
        self.left(now_s) / self.rate(self.gpus)
    }

    /// Seconds it takes on the GPUs it asks for, alone, from start to end.
    #[must_use]
    pub fn duration_s(&self) -> f64 {
        self.work / self.rate(self.gpus)
    }

    /// GPU-seconds it has held: the attained service of Tiresias.
    #[must_use]
    pub fn service_gpu_s(&self, now_s: f64) -> f64 {
        self.settled_gpu_s
            + self
                .run()
                .map_or(0.0, |run| (now_s - run.since_s) * run.gpus.len() as f64)
    }

    /// Seconds for which it has held GPUs.
    #[must_use]
    pub fn held_s(&self, now_s: f64) -> f64 {
        self.settled_s + self.run().map_or(0.0, |run| now_s - run.since_s)
    }

    /// Write the present stretch down up to now, and go on.
    pub(crate) fn settle(&mut self, now_s: f64) {
        let (work, service, held) = (
            self.done(now_s),
            self.service_gpu_s(now_s),
            self.held_s(now_s),
        );
        (self.settled_work, self.settled_gpu_s, self.settled_s) = (work, service, held);
        if let Phase::Running(run) = &mut self.phase {
            run.since_s = now_s;
            run.warm_s = run.warm_s.max(now_s);
        }
    }
}
