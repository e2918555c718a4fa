//! What a figure may be, and what is to be said of it. The checks of systems in
//! `cluster/examples/systems` use it as well.

use std::fmt;

/// What a figure may be.
#[derive(Clone, Copy)]
pub enum Limit {
    /// It is printed, and nothing is asked of it.
    Reported,
    AtMost(f64),
    AtLeast(f64),
}

/// What is to be said of a figure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Nothing is asked of it.
    Reported,
    Holds,
    /// It misses its limit, which is known, and is no worse than it was.
    KnownMiss,
    Missed,
    /// It misses its limit by more than is known.
    Worse,
    /// It is said to miss its limit and does not: the row is to be changed.
    MissGone,
}

impl Limit {
    /// What keeps it; a figure that is no number keeps none.
    fn keeps(self, value: f64) -> bool {
        match self {
            Self::Reported => true,
            Self::AtMost(most) => value <= most,
            Self::AtLeast(least) => value >= least,
        }
    }

    /// The same kind of limit, elsewhere.
    fn moved(self, to: f64) -> Self {
        match self {
            Self::Reported => Self::Reported,
            Self::AtMost(_) => Self::AtMost(to),
            Self::AtLeast(_) => Self::AtLeast(to),
        }
    }

    /// Of a figure. `known`: it is known to miss the limit, and may not be worse than this.
    pub fn verdict(self, known: Option<f64>, value: f64) -> Verdict {
        match (self, known, self.keeps(value)) {
            (Self::Reported, ..) => Verdict::Reported,
            (_, None, true) => Verdict::Holds,
            (_, None, false) => Verdict::Missed,
            (_, Some(_), true) => Verdict::MissGone,
            (_, Some(bound), false) if self.moved(bound).keeps(value) => Verdict::KnownMiss,
            (_, Some(_), false) => Verdict::Worse,
        }
    }

    /// As the last line of a measuring script has it: the budget, and whether it is the least.
    pub fn budget(self) -> (Option<f64>, bool) {
        match self {
            Self::Reported => (None, false),
            Self::AtMost(most) => (Some(most), false),
            Self::AtLeast(least) => (Some(least), true),
        }
    }

    /// A verdict in words.
    pub fn said(self, known: Option<f64>, verdict: Verdict) -> String {
        let bound = known.unwrap_or(f64::NAN);
        match verdict {
            Verdict::Reported => "-".to_owned(),
            Verdict::Holds => self.to_string(),
            Verdict::Missed => format!("NOT {self}"),
            Verdict::KnownMiss => format!("NOT {self}: known up to {bound}"),
            Verdict::Worse => format!("NOT {self}, and WORSE than is known: {bound} at worst"),
            Verdict::MissGone => format!("{self}: the known MISS IS GONE, take it out of the row"),
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reported => f.write_str("-"),
            Self::AtMost(most) => write!(f, "<= {most}"),
            Self::AtLeast(least) => write!(f, ">= {least}"),
        }
    }
}

impl Verdict {
    pub fn fails(self) -> bool {
        matches!(self, Self::Missed | Self::Worse | Self::MissGone)
    }

    /// The word of scripts.
    pub fn word(self) -> &'static str {
        match self {
            Self::Reported => "reported",
            Self::Holds => "holds",
            Self::KnownMiss => "known_miss",
            Self::Missed => "missed",
            Self::Worse => "worse",
            Self::MissGone => "miss_gone",
        }
    }
}
