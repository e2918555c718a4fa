//! Slice policies by name, with parameters that were checked before the policy is built.
//!
//! [`POLICIES`] is the one list: what is documented, completed, validated and built comes from it.

mod error;
mod list;

use std::fmt;

use crate::slice::SlicePolicy;
use crate::turns::{Order, Turns};

pub use error::PolicyError;
pub use list::POLICIES;

/// A slice policy that can be chosen.
#[derive(Clone, Copy, Debug)]
pub struct PolicySpec {
    /// Its name.
    pub name: &'static str,
    /// What it does, in one line.
    pub summary: &'static str,
    /// Its parameters.
    pub params: &'static [ParamSpec],
    build: fn(&Settings<'_>) -> Box<dyn Order>,
}

/// A parameter of a policy.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ParamSpec {
    /// Its name; the unit is part of it.
    pub name: &'static str,
    /// What it means, in one line.
    pub summary: &'static str,
    /// What it may be, and what it is when nothing is said.
    pub kind: Kind,
}

/// What a parameter may be.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Kind {
    /// A number from `min` to `max`.
    Number {
        /// The smallest.
        min: f64,
        /// The largest.
        max: f64,
        /// When nothing is said.
        default: f64,
    },
    /// One of a few words.
    Choice {
        /// The words.
        words: &'static [&'static str],
        /// When nothing is said.
        default: &'static str,
    },
    /// Yes or no.
    Flag {
        /// When nothing is said.
        default: bool,
    },
}

/// What a parameter was given.
#[derive(Clone, PartialEq, Debug)]
pub enum Value {
    /// A number.
    Number(f64),
    /// A word.
    Word(String),
    /// Yes or no.
    Flag(bool),
}

/// A parameter and what it was given.
#[derive(Clone, PartialEq, Debug)]
pub struct Param {
    /// Its name.
    pub name: String,
    /// Its value.
    pub value: Value,
}

impl Param {
    /// A parameter and its value.
    pub fn new(name: impl Into<String>, value: Value) -> Self {
        Self {
            name: name.into(),
            value,
        }
    }
}

/// The policy of this name.
///
/// # Errors
///
/// The name is unknown, or a parameter is, or its value makes no sense.
pub fn by_name(name: &str, params: &[Param]) -> Result<Box<dyn SlicePolicy>, PolicyError> {
    Ok(Box::new(Turns::new(order(name, params)?)))
}

/// The order that the policy of this name is made of.
pub(crate) fn order(name: &str, params: &[Param]) -> Result<Box<dyn Order>, PolicyError> {
    let spec = spec(name)?;
    for (at, param) in params.iter().enumerate() {
        spec.check(param)?;
        if params[..at].iter().any(|other| other.name == param.name) {
            return Err(PolicyError::TwiceParam {
                policy: spec.name,
                param: param.name.clone(),
            });
        }
    }
    Ok((spec.build)(&Settings { spec, params }))
}

/// What is known of the policy of this name.
///
/// # Errors
///
/// The name is unknown.
pub fn spec(name: &str) -> Result<&'static PolicySpec, PolicyError> {
    POLICIES
        .iter()
        .find(|spec| spec.name == name)
        .ok_or_else(|| PolicyError::UnknownPolicy {
            name: name.to_owned(),
            did_you_mean: nearest(name, POLICIES.iter().map(|spec| spec.name)),
        })
}

impl PolicySpec {
    fn check(&self, param: &Param) -> Result<(), PolicyError> {
        let Some(known) = self.params.iter().find(|known| known.name == param.name) else {
            return Err(PolicyError::UnknownParam {
                policy: self.name,
                param: param.name.clone(),
                did_you_mean: nearest(&param.name, self.params.iter().map(|known| known.name)),
            });
        };
        let (fits, did_you_mean) = match (&known.kind, &param.value) {
            (Kind::Number { min, max, .. }, Value::Number(number)) => {
                (number.is_finite() && number >= min && number <= max, None)
            }
            (Kind::Choice { words, .. }, Value::Word(word)) => (
                words.contains(&word.as_str()),
                nearest(word, words.iter().copied()),
            ),
            (Kind::Flag { .. }, Value::Flag(_)) => (true, None),
            _ => (false, None),
        };
        if fits {
            return Ok(());
        }
        Err(PolicyError::BadValue {
            policy: self.name,
            param: param.name.clone(),
            given: param.value.clone(),
            kind: known.kind,
            did_you_mean,
        })
    }
}

/// Checked parameters, as a policy reads them when it is built. A name that is missing in the
/// policy's list reads as zero, no, or nothing; a test builds every policy and reads all of them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings<'a> {
    spec: &'static PolicySpec,
    params: &'a [Param],
}

impl Settings<'_> {
    fn given(&self, name: &str) -> (Option<&Value>, Option<Kind>) {
        let given = self.params.iter().find(|param| param.name == name);
        let known = self.spec.params.iter().find(|known| known.name == name);
        debug_assert!(
            known.is_some(),
            "{name} is not in the list of {}",
            self.spec.name
        );
        (
            given.map(|param| &param.value),
            known.map(|known| known.kind),
        )
    }

    pub(crate) fn number(&self, name: &str) -> f64 {
        match self.given(name) {
            (Some(Value::Number(number)), _) => *number,
            (_, Some(Kind::Number { default, .. })) => default,
            _ => 0.0,
        }
    }

    pub(crate) fn flag(&self, name: &str) -> bool {
        match self.given(name) {
            (Some(Value::Flag(flag)), _) => *flag,
            (_, Some(Kind::Flag { default })) => default,
            _ => false,
        }
    }

    pub(crate) fn is(&self, name: &str, word: &str) -> bool {
        match self.given(name) {
            (Some(Value::Word(given)), _) => given == word,
            (_, Some(Kind::Choice { default, .. })) => default == word,
            _ => false,
        }
    }
}

/// The nearest of `names` by edit distance, if it is near enough to have been meant.
fn nearest(name: &str, names: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    let lower = name.to_lowercase().replace('_', "-");
    names
        .map(|known| (strsim::levenshtein(&lower, &known.replace('_', "-")), known))
        .filter(|(distance, known)| *distance <= known.len() / 3)
        .min()
        .map(|(_, known)| known)
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Word(word) => write!(f, "{word:?}"),
            Self::Flag(flag) => write!(f, "{flag}"),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number { min, max, .. } => write!(f, "a number from {min} to {max}"),
            Self::Choice { words, .. } => {
                write!(f, "one of ")?;
                list(f, words.iter().copied())
            }
            Self::Flag { .. } => write!(f, "true or false"),
        }
    }
}

fn list(f: &mut fmt::Formatter<'_>, names: impl Iterator<Item = &'static str>) -> fmt::Result {
    for (at, name) in names.enumerate() {
        write!(f, "{}{name}", if at == 0 { "" } else { ", " })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_is_built_by_its_name_and_knows_it() {
        for spec in POLICIES {
            let built = by_name(spec.name, &[]).expect("built with defaults");
            assert_eq!(built.name(), spec.name);
        }
    }

    #[test]
    fn every_default_is_a_value_that_is_accepted() {
        for spec in POLICIES {
            let defaults: Vec<Param> = spec
                .params
                .iter()
                .map(|param| {
                    let value = match param.kind {
                        Kind::Number { default, .. } => Value::Number(default),
                        Kind::Choice { default, .. } => Value::Word(default.to_owned()),
                        Kind::Flag { default } => Value::Flag(default),
                    };
                    Param::new(param.name, value)
                })
                .collect();
            by_name(spec.name, &defaults).expect("defaults are valid");
        }
    }

    #[test]
    fn a_misspelt_name_is_answered_with_the_right_one() {
        let error = by_name("strid", &[]).expect_err("no such policy");
        assert!(
            error.to_string().contains("did you mean \"stride\"?"),
            "{error}"
        );
        let error = by_name("round-robin-of-kings", &[]).expect_err("no such policy");
        assert!(!error.to_string().contains("did you mean"), "{error}");
        assert!(error.to_string().contains("(known: stride"), "{error}");
        assert_eq!(error.param(), None);
    }

    #[test]
    fn a_parameter_that_makes_no_sense_is_refused_with_its_name() {
        let error = by_name("stride", &[Param::new("tickets", Value::Number(3.0))])
            .expect_err("stride has none");
        assert_eq!(error.param(), Some("tickets"));
        assert!(error.to_string().contains("it has none"), "{error}");
    }
}
