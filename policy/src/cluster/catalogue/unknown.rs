//! Errors about names and parameters of policies.

use std::fmt;

use super::Slot;

/// Why there is no such policy.
#[derive(Clone, PartialEq, Debug)]
pub enum Unknown {
    /// No policy of this slot has this name.
    Name {
        /// Which slot.
        slot: Slot,
        /// The name.
        name: String,
        /// Those there are.
        known: Vec<&'static str>,
    },
    /// The policy has no such parameter.
    Key {
        /// The policy.
        name: &'static str,
        /// The parameter.
        key: String,
        /// Those it has.
        known: Vec<&'static str>,
    },
    /// A value is no number, or out of bounds.
    Value {
        /// The parameter.
        key: String,
        /// Its value.
        value: String,
        /// What is expected.
        expected: String,
    },
    /// The policy needs what is not there.
    Needs {
        /// The policy.
        name: &'static str,
        /// What is missing.
        what: &'static str,
    },
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name { slot, name, known } => {
                let (slot, known) = (slot.word(), known.join(", "));
                write!(f, "there is no {slot} `{name}`; known are {known}")
            }
            Self::Key { name, key, known } if known.is_empty() => {
                write!(f, "`{name}` has no parameters, so `{key}` is none of them")
            }
            Self::Key { name, key, known } => {
                let known = known.join(", ");
                write!(f, "`{name}` has no parameter `{key}`; it has {known}")
            }
            Self::Value {
                key,
                value,
                expected,
            } => write!(f, "`{key}={value}`: {expected}"),
            Self::Needs { name, what } => write!(f, "`{name}` needs {what}"),
        }
    }
}

impl std::error::Error for Unknown {}
