//! The slice policies: which tenants hold one device, and for how long.
//!
//! Each has a file here that teaches its theory, constructs it and registers it. A new one touches
//! two files: its own, and this one (`mod` and [`POLICIES`]).

mod altruistic;
mod deadline;
mod fifo;
mod guard;
mod latency;
mod salus;
mod stride;

pub use stride::Stride;

use crate::registry::{Param, PolicyError, Registration, Settings, find};
use crate::slice::SlicePolicy;

/// A slice policy that can be chosen.
pub type SliceRegistration = Registration<fn(&Settings<'_>) -> Box<dyn SlicePolicy>>;

/// Every slice policy. The first is what a device has by default.
pub static POLICIES: &[&SliceRegistration] = &[
    &stride::STRIDE,
    &fifo::FIFO,
    &salus::FAIR,
    &salus::PACK,
    &salus::PREEMPT,
    &salus::SRTF,
    &guard::ANTMAN,
    &deadline::DEADLINE,
    &latency::LATENCY,
    &altruistic::ALTRUISTIC,
];

/// The policy of this name.
///
/// # Errors
///
/// The name is unknown, or a parameter is, or its value is out of bounds.
pub fn by_name(name: &str, params: &[Param]) -> Result<Box<dyn SlicePolicy>, PolicyError> {
    let entry = spec(name)?;
    Ok((entry.build)(&entry.settings(params)?))
}

/// The registration of the policy of this name.
///
/// # Errors
///
/// The name is unknown.
pub fn spec(name: &str) -> Result<&'static SliceRegistration, PolicyError> {
    find("policy", POLICIES, name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::{Kind, Value};

    #[test]
    fn every_policy_is_built_by_its_name_and_knows_it() {
        for entry in POLICIES {
            let built = by_name(entry.name, &[]).expect("built with defaults");
            assert_eq!(built.name(), entry.name);
        }
    }

    #[test]
    fn every_default_is_a_value_that_is_accepted() {
        for entry in POLICIES {
            let defaults: Vec<Param> = entry
                .params
                .iter()
                .map(|param| {
                    let value = match param.kind {
                        Kind::Number { default, .. } => Value::Number(default),
                        Kind::Whole { default, .. } => Value::Number(f64::from(default)),
                        Kind::Numbers { default, .. } => Value::Numbers(default.to_vec()),
                        Kind::Choice { default, .. } => Value::Word(default.to_owned()),
                        Kind::Flag { default } => Value::Flag(default),
                        Kind::Text { default } => Value::Word(default.to_owned()),
                    };
                    Param::new(param.name, value)
                })
                .collect();
            by_name(entry.name, &defaults).expect("defaults are valid");
        }
    }

    #[test]
    fn a_misspelt_name_is_answered_with_the_right_one() {
        let error = by_name("strid", &[]).expect_err("no such policy");
        assert!(
            error.to_string().contains("did you mean `stride`?"),
            "{error}"
        );
        let error = by_name("round-robin-of-kings", &[]).expect_err("no such policy");
        assert!(!error.to_string().contains("did you mean"), "{error}");
        assert!(error.to_string().contains("(known: stride"), "{error}");
        assert_eq!(error.param(), None);
    }

    #[test]
    fn an_unknown_parameter_is_refused_with_its_name() {
        let error = by_name("stride", &[Param::new("tickets", Value::Number(3.0))])
            .expect_err("stride has none");
        assert_eq!(error.param(), Some("tickets"));
        assert!(
            error.to_string().contains("it has no parameters"),
            "{error}"
        );
    }
}
