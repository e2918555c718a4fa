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
}

#[derive(Clone, Copy)]
pub enum Limit {
    /// It is printed, and nothing is asked of it.
    Reported,
    AtMost(f64),
    AtLeast(f64),
}

impl Row {
    pub fn new(name: impl Into<String>, value: f64, unit: &'static str, limit: Limit) -> Self {
        Self {
            name: name.into(),
            value,
            unit,
            limit,
        }
    }

    pub fn holds(&self) -> bool {
        match self.limit {
            Limit::Reported => true,
            Limit::AtMost(most) => self.value <= most,
            Limit::AtLeast(least) => self.value >= least,
        }
    }

    pub fn verdict(&self) -> String {
        match self.limit {
            Limit::Reported => "-".to_owned(),
            Limit::AtMost(most) => format!("{} {most}", if self.holds() { "<=" } else { "NOT <=" }),
            Limit::AtLeast(least) => {
                format!("{} {least}", if self.holds() { ">=" } else { "NOT >=" })
            }
        }
    }
}
