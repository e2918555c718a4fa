//! Why a policy was not built, in words that say what to do.

use std::fmt;

use super::{Kind, POLICIES, Value, list, spec};

/// Why a policy was not built. [`PolicyError::param`], or else the name, is the place to point at
/// in a configuration file.
#[derive(Clone, PartialEq, Debug)]
pub enum PolicyError {
    /// There is no policy of this name.
    UnknownPolicy {
        /// The name asked for.
        name: String,
        /// The nearest there is.
        did_you_mean: Option<&'static str>,
    },
    /// The policy has no such parameter.
    UnknownParam {
        /// The policy.
        policy: &'static str,
        /// The parameter asked for.
        param: String,
        /// The nearest there is.
        did_you_mean: Option<&'static str>,
    },
    /// The parameter is named twice.
    TwiceParam {
        /// The policy.
        policy: &'static str,
        /// The parameter.
        param: String,
    },
    /// The value makes no sense.
    BadValue {
        /// The policy.
        policy: &'static str,
        /// The parameter.
        param: String,
        /// What it was given.
        given: Value,
        /// What it may be.
        kind: Kind,
        /// The nearest word there is.
        did_you_mean: Option<&'static str>,
    },
}

impl PolicyError {
    /// The parameter that is wrong; `None`: the policy's name is.
    pub fn param(&self) -> Option<&str> {
        match self {
            Self::UnknownPolicy { .. } => None,
            Self::UnknownParam { param, .. }
            | Self::TwiceParam { param, .. }
            | Self::BadValue { param, .. } => Some(param),
        }
    }
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hint = |f: &mut fmt::Formatter<'_>, did_you_mean: &Option<&str>| match did_you_mean {
            Some(name) => write!(f, "; did you mean {name:?}?"),
            None => Ok(()),
        };
        match self {
            Self::UnknownPolicy { name, did_you_mean } => {
                write!(f, "there is no policy {name:?}")?;
                hint(f, did_you_mean)?;
                write!(f, " (known: ")?;
                list(f, POLICIES.iter().map(|spec| spec.name))?;
                write!(f, ")")
            }
            Self::UnknownParam {
                policy,
                param,
                did_you_mean,
            } => {
                write!(f, "policy {policy:?} has no parameter {param:?}")?;
                hint(f, did_you_mean)?;
                match spec(policy) {
                    Ok(spec) if !spec.params.is_empty() => {
                        write!(f, " (known: ")?;
                        list(f, spec.params.iter().map(|param| param.name))?;
                        write!(f, ")")
                    }
                    _ => write!(f, "; it has none: remove it"),
                }
            }
            Self::TwiceParam { policy, param } => {
                write!(
                    f,
                    "parameter {param:?} of policy {policy:?} is given twice: remove one"
                )
            }
            Self::BadValue {
                policy,
                param,
                given,
                kind,
                did_you_mean,
            } => {
                write!(
                    f,
                    "parameter {param:?} of policy {policy:?} is {given}, and must be {kind}"
                )?;
                hint(f, did_you_mean)
            }
        }
    }
}

impl std::error::Error for PolicyError {}
