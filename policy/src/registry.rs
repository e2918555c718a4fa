//! Policies by name, with parameters that were checked before a policy is built.
//!
//! A policy is constructed in its own file and registered by one [`Registration`] there. One list
//! for each kind of policy names the registrations: [`POLICIES`](crate::POLICIES) for the slice
//! policies, `ORDERS`, `PACKERS`, ... beside the slots of [`crate::cluster`]. What is documented,
//! completed, validated and built comes from these lists.

mod error;

use std::fmt;

use crate::names::nearest;

pub use error::PolicyError;

/// A policy that can be chosen: `B` is how it is built.
#[derive(Clone, Copy, Debug)]
pub struct Registration<B: 'static> {
    /// Its name.
    pub name: &'static str,
    /// What it does, in one line.
    pub summary: &'static str,
    /// Its parameters.
    pub params: &'static [ParamSpec],
    /// Builds it from checked parameters.
    pub build: B,
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
    /// A whole number from `min` to `max`.
    Whole {
        /// The smallest.
        min: u32,
        /// The largest.
        max: u32,
        /// When nothing is said.
        default: u32,
    },
    /// Numbers from `min` to `max`, joined by `+`.
    Numbers {
        /// The smallest.
        min: f64,
        /// The largest.
        max: f64,
        /// When nothing is said.
        default: &'static [f64],
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
    /// Any text, such as the name of a file.
    Text {
        /// When nothing is said.
        default: &'static str,
    },
}

/// What a parameter was given.
#[derive(Clone, PartialEq, Debug)]
pub enum Value {
    /// A number.
    Number(f64),
    /// Several numbers.
    Numbers(Vec<f64>),
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

/// The registration of this name in a list; `what` is the kind of policy, for the message.
///
/// # Errors
///
/// The name is unknown.
pub fn find<B>(
    what: &'static str,
    list: &'static [&'static Registration<B>],
    name: &str,
) -> Result<&'static Registration<B>, PolicyError> {
    let known = || list.iter().map(|entry| entry.name);
    let found = list.iter().find(|entry| entry.name == name);
    found.copied().ok_or_else(|| PolicyError::UnknownPolicy {
        what,
        name: name.to_owned(),
        did_you_mean: nearest(name, known()),
        known: known().collect(),
    })
}

impl<B> Registration<B> {
    /// Checks `params`, and gives them to what builds the policy.
    ///
    /// # Errors
    ///
    /// A parameter is unknown, given twice, or its value is out of bounds.
    pub fn settings<'a>(&self, params: &'a [Param]) -> Result<Settings<'a>, PolicyError> {
        for (at, param) in params.iter().enumerate() {
            self.check(param)?;
            if params[..at].iter().any(|other| other.name == param.name) {
                return Err(PolicyError::TwiceParam {
                    policy: self.name,
                    param: param.name.clone(),
                });
            }
        }
        Ok(Settings {
            policy: self.name,
            known: self.params,
            params,
        })
    }

    /// Parameters as they are written on a command line, `key=value,key=value`: several numbers
    /// for one key are joined by `+`. Values are as their parameters want them; [`Self::settings`]
    /// refuses what does not fit.
    #[must_use]
    pub fn parse(&self, text: &str) -> Vec<Param> {
        let parts = text.split(',').filter(|part| !part.is_empty());
        let param = |part: &str| {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            let known = self.params.iter().find(|known| known.name == name);
            let word = || Value::Word(value.to_owned());
            let value = match known.map(|known| known.kind) {
                Some(Kind::Number { .. } | Kind::Whole { .. }) => {
                    value.parse().map_or_else(|_| word(), Value::Number)
                }
                Some(Kind::Numbers { .. }) => {
                    let numbers: Result<Vec<f64>, _> = value.split('+').map(str::parse).collect();
                    numbers.map_or_else(|_| word(), Value::Numbers)
                }
                Some(Kind::Flag { .. }) => value.parse().map_or_else(|_| word(), Value::Flag),
                Some(Kind::Choice { .. } | Kind::Text { .. }) | None => word(),
            };
            Param::new(name, value)
        };
        parts.map(param).collect()
    }

    fn check(&self, param: &Param) -> Result<(), PolicyError> {
        let params: &'static [ParamSpec] = self.params;
        let Some(known) = params.iter().find(|known| known.name == param.name) else {
            return Err(PolicyError::UnknownParam {
                policy: self.name,
                param: param.name.clone(),
                did_you_mean: nearest(&param.name, self.params.iter().map(|known| known.name)),
                known: self.params.iter().map(|known| known.name).collect(),
            });
        };
        let (fits, did_you_mean) = match (&known.kind, &param.value) {
            (Kind::Number { min, max, .. }, Value::Number(number)) => {
                (number.is_finite() && number >= min && number <= max, None)
            }
            (Kind::Whole { min, max, .. }, Value::Number(number)) => {
                let within = f64::from(*min)..=f64::from(*max);
                (number.fract() == 0.0 && within.contains(number), None)
            }
            (Kind::Numbers { min, max, .. }, Value::Numbers(numbers)) => {
                let fits = |number: &f64| number.is_finite() && number >= min && number <= max;
                (!numbers.is_empty() && numbers.iter().all(fits), None)
            }
            (Kind::Choice { words, .. }, Value::Word(word)) => (
                words.contains(&word.as_str()),
                nearest(word, words.iter().copied()),
            ),
            (Kind::Flag { .. }, Value::Flag(_)) => (true, None),
            (Kind::Text { .. }, Value::Word(text)) => (!text.is_empty(), None),
            _ => (false, None),
        };
        if fits {
            return Ok(());
        }
        Err(PolicyError::BadValue {
            policy: self.name,
            param: param.name.clone(),
            given: param.value.clone(),
            kind: &known.kind,
            did_you_mean,
        })
    }
}

/// Checked parameters, as a policy reads them when it is built. A name that is missing in the
/// policy's list reads as zero, no, or nothing; a test builds every policy and reads all of them.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    policy: &'static str,
    known: &'static [ParamSpec],
    params: &'a [Param],
}

impl Settings<'_> {
    fn given(&self, name: &str) -> (Option<&Value>, Option<Kind>) {
        let given = self.params.iter().find(|param| param.name == name);
        let known = self.known.iter().find(|known| known.name == name);
        debug_assert!(known.is_some(), "{} has no {name} in its list", self.policy);
        (
            given.map(|param| &param.value),
            known.map(|known| known.kind),
        )
    }

    /// The number of this parameter.
    #[must_use]
    pub fn number(&self, name: &str) -> f64 {
        match self.given(name) {
            (Some(Value::Number(number)), _) => *number,
            (_, Some(Kind::Number { default, .. })) => default,
            (_, Some(Kind::Whole { default, .. })) => f64::from(default),
            _ => 0.0,
        }
    }

    /// The number of this parameter, of which 0 stands for "off".
    #[must_use]
    pub fn some(&self, name: &str) -> Option<f64> {
        Some(self.number(name)).filter(|number| *number > 0.0)
    }

    /// The numbers of this parameter.
    #[must_use]
    pub fn numbers(&self, name: &str) -> Vec<f64> {
        match self.given(name) {
            (Some(Value::Numbers(numbers)), _) => numbers.clone(),
            (_, Some(Kind::Numbers { default, .. })) => default.to_vec(),
            _ => Vec::new(),
        }
    }

    /// Whether this parameter is "yes".
    #[must_use]
    pub fn flag(&self, name: &str) -> bool {
        match self.given(name) {
            (Some(Value::Flag(flag)), _) => *flag,
            (_, Some(Kind::Flag { default })) => default,
            _ => false,
        }
    }

    /// The text of this parameter.
    #[must_use]
    pub fn text(&self, name: &str) -> &str {
        match self.given(name) {
            (Some(Value::Word(text)), _) => text,
            (_, Some(Kind::Text { default })) => default,
            _ => "",
        }
    }

    /// Whether this parameter is this word.
    #[must_use]
    pub fn is(&self, name: &str, word: &str) -> bool {
        match self.given(name) {
            (Some(Value::Word(given)), _) => given == word,
            (_, Some(Kind::Choice { default, .. })) => default == word,
            _ => false,
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Numbers(numbers) => join(f, "+", numbers.iter()),
            Self::Word(word) => write!(f, "`{word}`"),
            Self::Flag(flag) => write!(f, "{flag}"),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number { min, max, .. } if *max == f64::INFINITY => {
                write!(f, "one number of at least {min}")
            }
            Self::Number { min, max, .. } => write!(f, "one number from {min} to {max}"),
            Self::Whole { min, max, .. } => write!(f, "a whole number from {min} to {max}"),
            Self::Numbers { min, max, .. } if *max == f64::INFINITY => {
                write!(f, "numbers of at least {min}, joined by `+`")
            }
            Self::Numbers { min, max, .. } => {
                write!(f, "numbers from {min} to {max}, joined by `+`")
            }
            Self::Choice { words, .. } => {
                write!(f, "one of ")?;
                join(f, ", ", words.iter())
            }
            Self::Flag { .. } => write!(f, "true or false"),
            Self::Text { .. } => write!(f, "some text"),
        }
    }
}

fn join<T: fmt::Display>(
    f: &mut fmt::Formatter<'_>,
    between: &str,
    parts: impl Iterator<Item = T>,
) -> fmt::Result {
    for (at, part) in parts.enumerate() {
        write!(f, "{}{part}", if at == 0 { "" } else { between })?;
    }
    Ok(())
}
