//! The figures that the policies have to show, computed in virtual time. Used by the example and by
//! the tests.

#[path = "carbyne.rs"]
pub mod carbyne;
#[path = "draw.rs"]
pub mod draw;
#[path = "fairness.rs"]
pub mod fairness;
#[path = "karuna.rs"]
pub mod karuna;
#[path = "salus.rs"]
pub mod salus;

/// A figure and what it has to be.
pub struct Row {
    pub name: String,
    pub value: f64,
    pub unit: &'static str,
    pub limit: Limit,
    /// It misses its limit, and may not be worse than this.
    pub known_miss: Option<f64>,
}

#[derive(Clone, Copy)]
pub enum Limit {
    /// It is printed, and nothing is asked of it.
    Reported,
    AtMost(f64),
    AtLeast(f64),
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

    fn moved(self, to: f64) -> Self {
        match self {
            Self::Reported => Self::Reported,
            Self::AtMost(_) => Self::AtMost(to),
            Self::AtLeast(_) => Self::AtLeast(to),
        }
    }
}

impl Row {
    pub fn new(name: impl Into<String>, value: f64, unit: &'static str, limit: Limit) -> Self {
        Self {
            name: name.into(),
            value,
            unit,
            limit,
            known_miss: None,
        }
    }

    /// The same row, whose limit is known to be missed: by no more than up to `bound`.
    pub fn missed(self, bound: f64) -> Self {
        let known_miss = Some(bound);
        Self { known_miss, ..self }
    }

    /// The limit is kept; or it is known to be missed, still is, and by no more than is known.
    pub fn holds(&self) -> bool {
        let kept = self.limit.keeps(self.value);
        match self.known_miss {
            None => kept,
            Some(bound) => !kept && self.limit.moved(bound).keeps(self.value),
        }
    }

    pub fn verdict(&self) -> String {
        let limit = match self.limit {
            Limit::Reported => return "-".to_owned(),
            Limit::AtMost(most) => format!("<= {most}"),
            Limit::AtLeast(least) => format!(">= {least}"),
        };
        let kept = self.limit.keeps(self.value);
        match self.known_miss {
            None if kept => limit,
            None => format!("NOT {limit}"),
            Some(_) if kept => format!("{limit}: MISS IS GONE"),
            Some(bound) if self.holds() => format!("NOT {limit}: known up to {bound}"),
            Some(bound) => format!("NOT {limit}: WORSE than {bound}"),
        }
    }
}
