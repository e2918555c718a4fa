//! How much of a device's time goes into moving memory, and what is done about it.

/// Time over which it is averaged.
const OVER_NS: f64 = 30e9;
/// Between two steps of an answer: what was done last has to show first.
const STEP_NS: u64 = 15_000_000_000;
/// Longest stretch of a term.
const MOST: u32 = 8;
/// So many times what is meant: pressed.
const PRESSED: f64 = 1.5;
/// Below so much of what is meant: calm again.
const CALM: f64 = 0.7;
/// From this part of the time on, and from three times what is meant, it is thrashing.
const THRASHING: f64 = 0.3;

/// How bad it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Level {
    /// As meant.
    #[default]
    Calm,
    /// More than meant: terms are stretched.
    Pressed,
    /// Stretching has not helped: somebody is parked.
    Thrashing,
}

/// The part of the time that went into switches, with an exponential memory of half a minute.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Pressure {
    /// Nanoseconds of switches, fading.
    sum_ns: f64,
    at_ns: u64,
    level: Level,
    /// Doublings of the term.
    doublings: u32,
    stepped_ns: u64,
    parked_ns: u64,
    /// Below what is meant since then.
    calm_since_ns: Option<u64>,
    switches: u64,
    total_ns: u64,
}

impl Pressure {
    pub(super) fn add(&mut self, now_ns: u64, ns: u64) {
        self.fade(now_ns);
        // CAST: precise enough for an average.
        self.sum_ns += ns as f64;
        self.switches += 1;
        self.total_ns = self.total_ns.saturating_add(ns);
    }

    fn fade(&mut self, now_ns: u64) {
        // CAST: as above.
        let passed_ns = now_ns.saturating_sub(self.at_ns) as f64;
        self.sum_ns *= (-passed_ns / OVER_NS).exp();
        self.at_ns = self.at_ns.max(now_ns);
    }

    /// `target`: the part of the time that is meant to go into switches.
    pub(super) fn step(&mut self, now_ns: u64, target: f64) {
        self.fade(now_ns);
        let fraction = self.fraction();
        let may_step = now_ns.saturating_sub(self.stepped_ns) >= STEP_NS || self.stepped_ns == 0;
        if fraction < target {
            self.calm_since_ns.get_or_insert(now_ns);
        } else {
            self.calm_since_ns = None;
        }
        self.level = if fraction >= THRASHING.max(3.0 * target) && self.doublings > 0 {
            Level::Thrashing
        } else if fraction > PRESSED * target || (self.doublings > 0 && fraction > CALM * target) {
            Level::Pressed
        } else {
            Level::Calm
        };
        if !may_step {
            return;
        }
        if fraction > PRESSED * target && 1 << self.doublings < MOST {
            self.doublings += 1;
            self.stepped_ns = now_ns.max(1);
        } else if fraction < CALM * target && self.doublings > 0 {
            self.doublings -= 1;
            self.stepped_ns = now_ns.max(1);
        }
    }

    /// Whether somebody is to be parked now; not again for a while then.
    pub(super) fn takes_parking(&mut self, now_ns: u64) -> bool {
        let due = self.level == Level::Thrashing
            && self.stretch() >= MOST / 2
            && (self.parked_ns == 0 || now_ns.saturating_sub(self.parked_ns) >= 2 * STEP_NS);
        if due {
            self.parked_ns = now_ns.max(1);
        }
        due
    }

    /// Whether it has been calm for so long that one who was parked may try again.
    pub(super) fn takes_release(&mut self, now_ns: u64) -> bool {
        let due = self
            .calm_since_ns
            .is_some_and(|since_ns| now_ns.saturating_sub(since_ns) >= 2 * STEP_NS);
        if due {
            self.calm_since_ns = Some(now_ns);
        }
        due
    }

    /// Part of the time that went into switches lately.
    pub fn fraction(&self) -> f64 {
        (self.sum_ns / OVER_NS).min(1.0)
    }

    /// How bad it is.
    pub fn level(&self) -> Level {
        self.level
    }

    /// How many times longer than meant terms are.
    pub fn stretch(&self) -> u32 {
        1 << self.doublings
    }

    /// Switches so far, and what they took in nanoseconds.
    pub fn totals(&self) -> (u64, u64) {
        (self.switches, self.total_ns)
    }
}
