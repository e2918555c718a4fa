//! Why a policy was not built, in words that say what to do.

use std::fmt;

use super::{Kind, Value, join};

/// Why a policy, or a scheduler of several, was not built. [`PolicyError::param`], or else the
/// name, is the place to point at in a configuration file.
#[derive(Clone, PartialEq, Debug)]
pub enum PolicyError {
    /// There is no policy of this name.
    UnknownPolicy {
        /// The kind of policy: `policy`, `order`, ...
        what: &'static str,
        /// The name asked for.
        name: String,
        /// The nearest there is.
        did_you_mean: Option<&'static str>,
        /// All there are.
        known: Vec<&'static str>,
    },
    /// The policy has no such parameter.
    UnknownParam {
        /// The policy.
        policy: &'static str,
        /// The parameter asked for.
        param: String,
        /// The nearest there is.
        did_you_mean: Option<&'static str>,
        /// All there are.
        known: Vec<&'static str>,
    },
    /// The parameter is named twice.
    TwiceParam {
        /// The policy.
        policy: &'static str,
        /// The parameter.
        param: String,
    },
    /// The value is out of bounds or of another kind.
    BadValue {
        /// The policy.
        policy: &'static str,
        /// The parameter.
        param: String,
        /// What it was given.
        given: Value,
        /// What it may be.
        kind: &'static Kind,
        /// The nearest word there is.
        did_you_mean: Option<&'static str>,
    },
    /// A file that a parameter names cannot be used.
    BadFile {
        /// The policy.
        policy: &'static str,
        /// The parameter.
        param: &'static str,
        /// The file.
        file: String,
        /// Why.
        why: String,
    },
    /// The policy needs what this cluster or trace does not have: it could not act.
    Needs {
        /// The policy.
        policy: &'static str,
        /// What is missing, and where it could come from.
        what: &'static str,
    },
    /// The policy would have no effect beside another one.
    NoEffect {
        /// The policy.
        policy: String,
        /// Why, and what to do.
        why: String,
    },
}

impl PolicyError {
    /// The parameter that is wrong; `None`: the policy's name is.
    pub fn param(&self) -> Option<&str> {
        match self {
            Self::UnknownPolicy { .. } | Self::Needs { .. } | Self::NoEffect { .. } => None,
            Self::UnknownParam { param, .. }
            | Self::TwiceParam { param, .. }
            | Self::BadValue { param, .. } => Some(param),
            Self::BadFile { param, .. } => Some(param),
        }
    }
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hint = |f: &mut fmt::Formatter<'_>, did_you_mean: &Option<&str>| match did_you_mean {
            Some(name) => write!(f, "; did you mean `{name}`?"),
            None => Ok(()),
        };
        let choices = |f: &mut fmt::Formatter<'_>, known: &[&str]| {
            write!(f, " (known: ")?;
            join(f, ", ", known.iter())?;
            write!(f, ")")
        };
        match self {
            Self::UnknownPolicy {
                what,
                name,
                did_you_mean,
                known,
            } => {
                write!(f, "there is no {what} `{name}`")?;
                hint(f, did_you_mean)?;
                choices(f, known)
            }
            Self::UnknownParam {
                policy,
                param,
                did_you_mean,
                known,
            } => {
                write!(f, "`{policy}` has no parameter `{param}`")?;
                hint(f, did_you_mean)?;
                if known.is_empty() {
                    write!(f, "; it has no parameters: remove it")
                } else {
                    choices(f, known)
                }
            }
            Self::TwiceParam { policy, param } => {
                write!(
                    f,
                    "parameter `{param}` of `{policy}` is given twice: remove one"
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
                    "parameter `{param}` of `{policy}` is {given}, and must be {kind}"
                )?;
                hint(f, did_you_mean)
            }
            Self::BadFile {
                policy,
                param,
                file,
                why,
            } => write!(
                f,
                "`{file}`, parameter `{param}` of `{policy}`, cannot be used: {why}"
            ),
            Self::Needs { policy, what } => write!(f, "`{policy}` needs {what}"),
            Self::NoEffect { policy, why } => write!(f, "`{policy}` would have no effect: {why}"),
        }
    }
}

impl std::error::Error for PolicyError {}
