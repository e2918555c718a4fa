//! What a job asked for, as far as it was granted.

use std::path::PathBuf;

use control::{Bounds, JobSettings, Layer, Overflow};
use policy::Class;

/// What a job asked for, as far as it was granted.
#[derive(Clone, PartialEq, Debug)]
pub struct Spec {
    /// Unique among living jobs.
    pub name: String,
    /// What is in force, a deadline as a time.
    pub settings: JobSettings,
    /// Where that comes from, and what bounds it.
    pub bounds: Bounds,
    /// What it was given itself, by its owner or by an operator: rules fill in the rest.
    pub own: JobSettings,
    /// What its owner's quota file says that it gets at the most.
    pub own_caps: Vec<Layer>,
    /// Root has given it something: no cap but its owner's holds until rules change.
    pub unbound: bool,
    /// Root's engine registered it for this user, joins it with every step, and has it ended with
    /// the last.
    pub on_behalf_of: Option<u32>,
    /// It gets no device time.
    pub paused: bool,
    /// The process that registered it and became it by `exec`.
    pub pid: u32,
    /// For display, cut short.
    pub command: Vec<String>,
    /// The driver library that it opens.
    pub driver: PathBuf,
    /// That driver simulates.
    pub simulated: bool,
    /// Its operator keeps it away.
    pub evicted: bool,
    /// It is ended where a process of it uses a device outside its limits.
    pub strict: bool,
    /// Its processes may be of any user.
    pub any_user: bool,
}

impl Spec {
    /// Its class.
    pub fn class(&self) -> Class {
        class(self.settings.class.unwrap_or_default())
    }

    /// Its memory may leave its devices.
    pub fn evictable(&self) -> bool {
        self.settings.evictable.unwrap_or_default()
    }

    /// What happens to an allocation above its memory limit.
    pub fn overflow(&self) -> Overflow {
        self.settings.overflow.unwrap_or_default()
    }
}

/// The policy's class.
fn class(class: control::Class) -> Class {
    match class {
        control::Class::Guaranteed => Class::Guaranteed,
        control::Class::Opportunistic => Class::Opportunistic,
    }
}

/// The operator's class.
pub fn wire_class(class: Class) -> control::Class {
    match class {
        Class::Guaranteed => control::Class::Guaranteed,
        Class::Opportunistic => control::Class::Opportunistic,
    }
}
