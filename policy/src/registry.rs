//! Slice policies by name, with parameters that were checked before the policy is built.
//!
//! [`POLICIES`] is the one list: what is documented, completed, validated and built comes from it.

use std::collections::BTreeMap;
use std::fmt;

use crate::altruistic::Altruistic;
use crate::deadline::Deadline;
use crate::fifo::Fifo;
use crate::guard::Guard;
use crate::lanes::{HOLD_BACK_BYTES, LaneTable};
use crate::salus::{self, Salus};
use crate::slice::SlicePolicy;
use crate::stride::Passes;
use crate::turns::{Order, Turns};

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

const SALUS_FAIR: &[ParamSpec] = &[
    ParamSpec {
        name: "measure",
        summary: "what is shared fairly: device time, or device time x bytes held",
        kind: Kind::Choice {
            words: &["device-time", "memory-time"],
            default: "device-time",
        },
    },
    AT_ONCE_ONE,
    PATIENCE,
    HOLD_BACK,
];

const SALUS_PACK: &[ParamSpec] = &[
    ParamSpec {
        name: "measure",
        summary: "what decides between tenants of one lane: device time, or device time x bytes held",
        kind: Kind::Choice {
            words: &["device-time", "memory-time"],
            default: "device-time",
        },
    },
    ParamSpec {
        name: "at_once",
        summary: "lanes that run at once",
        kind: Kind::Number {
            min: 1.0,
            max: 64.0,
            default: 64.0,
        },
    },
    PATIENCE,
    HOLD_BACK,
];

const SALUS_ONE: &[ParamSpec] = &[AT_ONCE_ONE, PATIENCE, HOLD_BACK];

const AT_ONCE_ONE: ParamSpec = ParamSpec {
    name: "at_once",
    summary: "lanes that run at once",
    kind: Kind::Number {
        min: 1.0,
        max: 64.0,
        default: 1.0,
    },
};

const PATIENCE: ParamSpec = ParamSpec {
    name: "patience_ms",
    summary: "how long after its slice a tenant may stay until its iteration ends",
    kind: Kind::Number {
        min: 0.0,
        max: 1000.0,
        default: 50.0,
    },
};

const HOLD_BACK: ParamSpec = ParamSpec {
    name: "hold_back_mib",
    summary: "device memory that no lane gets",
    kind: Kind::Number {
        min: 0.0,
        max: 1_048_576.0,
        default: (HOLD_BACK_BYTES >> 20) as f64,
    },
};

const ANTMAN: &[ParamSpec] = &[
    ParamSpec {
        name: "harm_percent",
        summary: "iterations of a guaranteed tenant this much longer than its baseline are harm",
        kind: Kind::Number {
            min: 0.1,
            max: 100.0,
            default: 2.0,
        },
    },
    ParamSpec {
        name: "breach_percent",
        summary: "one this much longer stops the opportunistic tenants at once",
        kind: Kind::Number {
            min: 1.0,
            max: 1000.0,
            default: 20.0,
        },
    },
    ParamSpec {
        name: "start_percent",
        summary: "part of the time that opportunistic tenants get at first",
        kind: Kind::Number {
            min: 0.0,
            max: 100.0,
            default: 100.0,
        },
    },
    ParamSpec {
        name: "learn_iterations",
        summary: "iterations without opportunistic tenants to learn a baseline that is not told",
        kind: Kind::Number {
            min: 1.0,
            max: 1000.0,
            default: 10.0,
        },
    },
    ParamSpec {
        name: "beside",
        summary: "opportunistic tenants run beside a guaranteed one too, where the device takes several at once",
        kind: Kind::Flag { default: false },
    },
];

const DEADLINE: &[ParamSpec] = &[
    ParamSpec {
        name: "margin_percent",
        summary: "how much more than needed a deadline gets",
        kind: Kind::Number {
            min: 0.0,
            max: 100.0,
            default: 5.0,
        },
    },
    ParamSpec {
        name: "first_queue_ms",
        summary: "attained service up to which a tenant without a deadline is in the first queue",
        kind: Kind::Number {
            min: 1.0,
            max: 86_400_000.0,
            default: 500.0,
        },
    },
    ParamSpec {
        name: "queue_factor",
        summary: "how many times longer each queue is than the one before",
        kind: Kind::Number {
            min: 2.0,
            max: 1000.0,
            default: 4.0,
        },
    },
    ParamSpec {
        name: "promote",
        summary: "who waited so many times as long as it ran starts in the first queue again; 0: never",
        kind: Kind::Number {
            min: 0.0,
            max: 1000.0,
            default: 8.0,
        },
    },
    ParamSpec {
        name: "deadlines_first",
        summary: "tenants with a deadline run as fast as they can, before all others",
        kind: Kind::Flag { default: false },
    },
];

/// Every policy there is. The first is what a device has when nothing is said.
pub static POLICIES: &[PolicySpec] = &[
    PolicySpec {
        name: "stride",
        summary: "device time in proportion to weights, exact to about a slice",
        params: &[],
        build: |_| Box::new(Passes::default()),
    },
    PolicySpec {
        name: "fifo",
        summary: "the first that came, the others in its pauses",
        params: &[],
        build: |_| Box::new(Fifo),
    },
    PolicySpec {
        name: "salus-fair",
        summary: "least device time (or memory x time) since the last arrival, switched between iterations",
        params: SALUS_FAIR,
        build: |settings| salus(settings, salus::Kind::Fair),
    },
    PolicySpec {
        name: "salus-pack",
        summary: "one of each memory lane at once",
        params: SALUS_PACK,
        build: |settings| salus(settings, salus::Kind::Pack),
    },
    PolicySpec {
        name: "salus-preempt",
        summary: "the newest first, from the end of the running iteration on",
        params: SALUS_ONE,
        build: |settings| salus(settings, salus::Kind::Preempt),
    },
    PolicySpec {
        name: "salus-srtf",
        summary: "the shortest remaining time first",
        params: SALUS_ONE,
        build: |settings| salus(settings, salus::Kind::Srtf),
    },
    PolicySpec {
        name: "antman",
        summary: "stride, and opportunistic tenants only as far as iterations of guaranteed ones do not suffer",
        params: ANTMAN,
        build: guard,
    },
    PolicySpec {
        name: "deadline",
        summary: "just enough for deadlines, the rest by least attained service",
        params: DEADLINE,
        build: deadline,
    },
    PolicySpec {
        name: "altruistic",
        summary: "no burst ends later than under fair sharing; what that leaves goes to the shortest",
        params: &[],
        build: |_| Box::new(Altruistic::default()),
    },
];

fn salus(settings: &Settings<'_>, kind: salus::Kind) -> Box<dyn Order> {
    let weighs = matches!(kind, salus::Kind::Fair | salus::Kind::Pack);
    Box::new(Salus {
        kind,
        measure: if weighs && settings.is("measure", "memory-time") {
            salus::Measure::MemoryTime
        } else {
            salus::Measure::DeviceTime
        },
        at_once: settings.number("at_once") as usize,
        patience_ns: (settings.number("patience_ms") * 1e6) as u64,
        lanes: LaneTable::new((settings.number("hold_back_mib") as u64) << 20),
        meters: BTreeMap::new(),
    })
}

fn guard(settings: &Settings<'_>) -> Box<dyn Order> {
    Box::new(Guard {
        passes: Passes::default(),
        part: settings.number("start_percent") / 100.0,
        harm: 1.0 + settings.number("harm_percent") / 100.0,
        breach: 1.0 + settings.number("breach_percent") / 100.0,
        present: 0.0,
        beside: settings.flag("beside"),
        learn_iterations: settings.number("learn_iterations") as u64,
        at_ns: None,
        tokens_ns: 0.0,
        spent: false,
        watched: BTreeMap::new(),
        classes: BTreeMap::new(),
    })
}

fn deadline(settings: &Settings<'_>) -> Box<dyn Order> {
    Box::new(Deadline {
        margin: 1.0 + settings.number("margin_percent") / 100.0,
        first_queue_ns: (settings.number("first_queue_ms") * 1e6) as u64,
        queue_factor: settings.number("queue_factor") as u64,
        promote: settings.number("promote"),
        strict: settings.flag("deadlines_first"),
        at_ns: None,
        members: BTreeMap::new(),
        booked: Vec::new(),
    })
}

/// Why a policy was not built. What to point at in a configuration file: [`PolicyError::param`], or else the name.
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

/// Checked parameters, as a policy reads them when it is built. A name that is not in the policy's list reads as zero,
/// no, or nothing; a test builds every policy and reads all of them.
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
        .map(|known| (distance(&lower, &known.replace('_', "-")), known))
        .filter(|(distance, known)| *distance <= known.len() / 3)
        .min()
        .map(|(_, known)| known)
}

/// Levenshtein's distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let above = row[j + 1];
            row[j + 1] = (diagonal + usize::from(ca != *cb))
                .min(above + 1)
                .min(row[j] + 1);
            diagonal = above;
        }
    }
    row[b.len()]
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

    #[test]
    fn distance_is_levenshteins() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("fifo", "fifo"), 0);
    }
}
