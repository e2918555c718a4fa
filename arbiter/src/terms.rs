//! What a job gets of one device, as its scheduler reads it.

use policy::Class;

use crate::residency::ResidencyTerms;

/// Of one job on one device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Terms {
    /// Its class.
    pub class: Class,
    /// Its weight in millionths.
    pub weight_ppm: u32,
    /// Never less than this part of the device while it wants it, in millionths; 0: no floor.
    pub min_ppm: u32,
    /// Never more, in millionths; `None`: no cap.
    pub max_ppm: Option<u32>,
    /// It gets nothing.
    pub paused: bool,
    /// All of its devices at once or none, where it uses several.
    pub gang: bool,
    /// By when its work should be done, in nanoseconds of the schedulers' clock.
    pub deadline_ns: Option<u64>,
    /// Device time that its work takes in all, in nanoseconds.
    pub work_ns: Option<u64>,
    /// How soon each burst of its work should be done, in nanoseconds.
    pub latency_target_ns: Option<u64>,
    /// Where its memory may be.
    pub residency: ResidencyTerms,
}

impl Terms {
    /// Those of a job that asks for nothing but a class and a weight.
    pub fn plain(class: Class, weight_ppm: u32) -> Self {
        Self {
            class,
            weight_ppm,
            min_ppm: 0,
            max_ppm: None,
            paused: false,
            gang: false,
            deadline_ns: None,
            work_ns: None,
            latency_target_ns: None,
            residency: ResidencyTerms::default(),
        }
    }
}
