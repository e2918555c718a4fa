//! Bounds of what jobs may ask for, and why one is refused.

use control::MemLimit;

/// The least that a guaranteed job without a share of its own is let in for.
pub const LEAST_SHARE: f64 = 0.01;

/// Shares are decimal fractions of people; sums are compared with this much air.
pub const AIR: f64 = 1e-9;

/// What the jobs of one user may have together.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Ceiling {
    /// Sum of their shares on a device.
    pub share_max: Option<f64>,
    /// Sum of their memory limits on a device.
    pub mem_max: Option<MemLimit>,
    /// Jobs at the same time.
    pub jobs_max: Option<usize>,
    /// Where that is said.
    pub from: String,
}

/// Why a job or a change is refused.
#[derive(Clone, PartialEq, Debug)]
pub enum Refusal {
    /// Not a name.
    BadName(String),
    /// A living job has it.
    NameTaken(String),
    /// Not in (0, 1].
    ShareRange(f64),
    /// No size: what is limited, and the limit.
    MemRange(&'static str, MemLimit),
    /// More of something than a job can need: what, how much, and the most there may be.
    TooLong(&'static str, usize, usize),
    /// A deadline without the device time that the work takes.
    DeadlineWithoutWork,
    /// They exclude each other.
    Bounds {
        min: Option<f64>,
        share: Option<f64>,
        max: Option<f64>,
    },
    /// The sum would be above 1.
    ShareSum { asked: f64, promised: f64 },
    /// Nothing is left for those who named no share.
    NothingLeft { promised: f64, waiting: usize },
    /// Above what the device has for quotas.
    MemAboveDevice {
        asked: u64,
        device: usize,
        usable: u64,
    },
    /// No device answers.
    NoDevice { selector: String, known: usize },
    /// Above what the user may have.
    UserShare { user: String, asked: f64, max: f64 },
    /// Above what the user may have.
    UserMem { user: String, asked: u64, max: u64 },
    /// A user with a ceiling for memory has to name a limit.
    UserMemUnnamed { user: String, max: u64 },
    /// Above what all jobs together may have.
    HostMemory { asked: u64, available: u64 },
    /// Said of a job that is not evictable.
    NotEvictable(&'static str),
    /// There are as many as there can be, of this user's (`None`: of all).
    TooManyJobs { user: Option<String>, most: usize },
    /// What the job has beyond its new limit would not fit into host memory.
    Overflow {
        used: u64,
        limit: u64,
        needed: u64,
        available: u64,
    },
}
