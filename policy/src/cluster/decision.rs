//! What a scheduler may decide.

use std::fmt;

use super::{Class, GpuId, JobId};

/// One decision. A batch is one step: what it releases is free for what it places.
#[derive(Clone, PartialEq, Debug)]
pub enum Decision {
    /// Start a job for the first time.
    Place {
        /// Which job.
        job: JobId,
        /// On which GPUs.
        gpus: Vec<GpuId>,
        /// How firmly.
        class: Class,
        /// Which part of each GPU's time.
        share: f64,
        /// Its memory quota on each GPU, in bytes; `None` is the whole device.
        mem_bytes: Option<u64>,
    },
    /// Stop a job; its progress is kept.
    Suspend {
        /// Which job.
        job: JobId,
    },
    /// Go on with a suspended job.
    Resume {
        /// Which job.
        job: JobId,
        /// On which GPUs.
        gpus: Vec<GpuId>,
        /// How firmly.
        class: Class,
        /// Which part of each GPU's time.
        share: f64,
    },
    /// Move a running job to as many other GPUs.
    Migrate {
        /// Which job.
        job: JobId,
        /// To which GPUs.
        gpus: Vec<GpuId>,
        /// Which part of each GPU's time.
        share: f64,
    },
    /// Stop a job that shared its GPUs, because that did not pay.
    Unpack {
        /// Which job: the one that goes.
        job: JobId,
        /// Why.
        reason: Reason,
    },
    /// Another part of its GPUs' time for a job that stays where it is: a second job joined it, or
    /// ended.
    Reshare {
        /// Which job.
        job: JobId,
        /// Which part of each GPU's time.
        share: f64,
    },
    /// Refuse a job: its deadline cannot be kept, and it wants nothing less.
    Reject {
        /// Which job.
        job: JobId,
    },
    /// Change the number of GPUs of a running job.
    Resize {
        /// Which job.
        job: JobId,
        /// To which GPUs.
        gpus: Vec<GpuId>,
    },
}

impl Decision {
    /// Whom it is about.
    #[must_use]
    pub fn job(&self) -> JobId {
        match self {
            Self::Place { job, .. }
            | Self::Suspend { job }
            | Self::Resume { job, .. }
            | Self::Migrate { job, .. }
            | Self::Unpack { job, .. }
            | Self::Reshare { job, .. }
            | Self::Reject { job }
            | Self::Resize { job, .. } => *job,
        }
    }

    /// Where the job is placed; empty where it is stopped or stays.
    #[must_use]
    pub fn gpus(&self) -> &[GpuId] {
        match self {
            Self::Place { gpus, .. }
            | Self::Resume { gpus, .. }
            | Self::Migrate { gpus, .. }
            | Self::Resize { gpus, .. } => gpus,
            Self::Suspend { .. }
            | Self::Unpack { .. }
            | Self::Reshare { .. }
            | Self::Reject { .. } => &[],
        }
    }
}

/// Why a pair was refused or split.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Reason {
    /// The sum of both normalised rates is below what the packer asks for.
    Sum {
        /// Measured.
        sum: f64,
        /// Asked for.
        least: f64,
    },
    /// The one that came last of several adds too little: the sum of the rates of all is below what
    /// they did without it, and what it has to add.
    Several {
        /// How many.
        jobs: u32,
        /// Measured.
        sum: f64,
        /// Asked for.
        least: f64,
    },
    /// One of them fell below its floor.
    Floor {
        /// Measured normalised rate of the slowest one.
        rate: f64,
        /// Its floor.
        floor: f64,
    },
    /// They do not fit into the device's memory together.
    Memory,
    /// The host's own progress is promised and was not kept.
    Host {
        /// Measured normalised rate of the host.
        rate: f64,
    },
    /// The joiner has to stay on other GPUs.
    Bound,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sum { sum, least } => {
                write!(
                    f,
                    "both together run at {sum:.2} of one solo job, below {least:.2}"
                )
            }
            Self::Several { jobs, sum, least } => {
                write!(
                    f,
                    "{jobs} together run at {sum:.2} of one solo job, below {least:.2}"
                )
            }
            Self::Floor { rate, floor } => {
                write!(
                    f,
                    "one runs at {rate:.2} of its solo speed, below its floor {floor:.2}"
                )
            }
            Self::Memory => write!(f, "they do not fit into the device's memory together"),
            Self::Host { rate } => {
                write!(f, "the guaranteed job runs at {rate:.2} of its solo speed")
            }
            Self::Bound => write!(f, "it has to stay on its own GPUs"),
        }
    }
}
