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
#[path = "limits.rs"]
mod limits;
#[path = "salus.rs"]
pub mod salus;

pub use limits::Limit;
use limits::Verdict;

/// A figure and what it has to be.
pub struct Row {
    pub name: String,
    pub value: f64,
    pub unit: &'static str,
    pub limit: Limit,
    /// It misses its limit, and may not be worse than this.
    pub known_miss: Option<f64>,
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

    fn judged(&self) -> Verdict {
        self.limit.verdict(self.known_miss, self.value)
    }

    /// The limit is kept; or it is known to be missed, still is, and by no more than is known.
    pub fn holds(&self) -> bool {
        !self.judged().fails()
    }

    /// In words.
    pub fn verdict(&self) -> String {
        self.limit.said(self.known_miss, self.judged())
    }

    /// One word for scripts.
    pub fn word(&self) -> &'static str {
        self.judged().word()
    }
}
