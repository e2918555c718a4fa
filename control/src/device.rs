//! How a device is run, as the quota file or an operator says it.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::kinds::{Count, Flag, Policy, Quantum, Size, Word};
use crate::report::SliceMode;
use crate::request::UnknownWord;

crate::settings! {
    /// How a device is run. `sublet device set` beats the quota file, until it is read again.
    #[derive(Serialize, Deserialize)]
    #[serde(default)]
    pub struct DeviceSettings {
        /// exclusive: one job at a time, in slices; concurrent: all at once, only memory is
        /// limited; auto: all at once while that serves every guaranteed job as well as slices
        /// would, else slices.
        mode: Word<SliceMode>, unset "`exclusive`", live;
        /// Who runs next: the name of a slice policy, with its parameters where they differ from
        /// their defaults.
        policy: Policy, unset "`stride`", live;
        /// How many jobs may hold the device at once in slices, where the policy makes use of it.
        holders: Count<1, 64>, unset "1", live;
        /// Longest slice ("5ms"), and the slice of two jobs while one of them is guaranteed.
        quantum: Quantum, unset "50 ms, and 5 ms for those two", live;
        /// Shortest slice ("2ms").
        quantum_min: Quantum, unset "2 ms", live;
        /// true: the next job is woken shortly before its turn and polls, so that a hand-over costs
        /// no scheduler's wake-up.
        early_wake: Flag, unset "`true`", live;
        /// What happens to a job that harms the others. report: it is reported; demote: it also
        /// runs after all others until it behaves; kill: its processes are ended.
        misbehaviour: Word<Misbehaviour>, unset "`demote`", live;
        /// Memory kept from every quota, for what is not a job's.
        mem_reserve: Size, unset "none";
    }
}

/// A slice policy by name, with the parameters that differ from their defaults. Written `name` or
/// `name:key=value,key=value`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicyChoice {
    pub name: String,
    /// By name; which there are is the policy's own affair.
    pub parameters: BTreeMap<String, Parameter>,
}

/// What a parameter of a policy is given.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Parameter {
    Flag(bool),
    Number(f64),
    Word(String),
}

impl fmt::Display for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(flag) => write!(f, "{flag}"),
            Self::Number(number) => write!(f, "{number}"),
            Self::Word(word) => f.write_str(word),
        }
    }
}

impl PolicyChoice {
    /// One with its default parameters.
    pub fn named(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            parameters: BTreeMap::new(),
        }
    }
}

impl fmt::Display for PolicyChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        for (at, (key, value)) in self.parameters.iter().enumerate() {
            write!(f, "{}{key}={value}", if at == 0 { ':' } else { ',' })?;
        }
        Ok(())
    }
}

impl FromStr for PolicyChoice {
    type Err = BadPolicyText;

    fn from_str(text: &str) -> Result<Self, BadPolicyText> {
        let bad = || BadPolicyText(text.to_owned());
        let (name, rest) = text.split_once(':').unwrap_or((text, ""));
        let word = |word: &str| {
            !word.is_empty()
                && word
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'))
        };
        if !word(name) || (rest.is_empty() && text.contains(':')) {
            return Err(bad());
        }
        let mut parameters = BTreeMap::new();
        for pair in rest.split(',').filter(|_| !rest.is_empty()) {
            let (key, value) = pair.split_once('=').ok_or_else(bad)?;
            let (key, value) = (key.trim(), value.trim());
            let value = match (value.parse::<bool>(), value.parse::<f64>()) {
                (Ok(flag), _) => Parameter::Flag(flag),
                (_, Ok(number)) if number.is_finite() => Parameter::Number(number),
                (_, Err(_)) if word(value) => Parameter::Word(value.to_owned()),
                _ => return Err(bad()),
            };
            if !word(key) {
                return Err(bad());
            }
            if parameters.insert(key.to_owned(), value).is_some() {
                return Err(bad());
            }
        }
        Ok(Self {
            name: name.to_owned(),
            parameters,
        })
    }
}

/// Not a policy with its parameters.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no policy: write its name, or its name and parameters as in name:key=2,other=true"
)]
pub struct BadPolicyText(pub String);

/// What happens to a job that harms the others: one that keeps the device beyond all bounds, never
/// runs when it is granted the device, or floods the arbiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Misbehaviour {
    /// It is reported, in the journal and in `ps`.
    Report,
    /// Also, it runs after all others until it behaves.
    #[default]
    Demote,
    /// Also, its processes are ended.
    Kill,
}

impl Misbehaviour {
    pub const ALL: [Self; 3] = [Self::Report, Self::Demote, Self::Kill];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Report => "report",
            Self::Demote => "demote",
            Self::Kill => "kill",
        }
    }
}

impl fmt::Display for Misbehaviour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Misbehaviour {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        Self::ALL
            .into_iter()
            .find(|answer| answer.as_str() == word)
            .ok_or_else(|| UnknownWord {
                word: word.to_owned(),
                choices: "report, demote or kill",
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting::Settings;
    use crate::span::Span;

    #[test]
    fn policies_parse_back() {
        for text in [
            "stride",
            "guard:gain=0.5,limit=2",
            "salus:kind=fair,partitions=3,strict=true",
        ] {
            let choice: PolicyChoice = text.parse().unwrap();
            assert_eq!(choice.to_string(), text);
            let wire = serde_json::to_string(&choice).unwrap();
            assert_eq!(serde_json::from_str::<PolicyChoice>(&wire).unwrap(), choice);
        }
        for bad in [
            "",
            ":",
            "stride:",
            "a b",
            "x:y",
            "x:y=",
            "x:=1",
            "x:y=1,y=2",
            "x:y=inf",
            "x:y=nan",
            "x:y=1,",
        ] {
            let error = bad.parse::<PolicyChoice>().unwrap_err();
            assert!(error.to_string().contains(&format!("`{bad}`")), "{error}");
        }
    }

    #[test]
    fn words_parse_back_and_others_are_named() {
        for answer in Misbehaviour::ALL {
            assert_eq!(answer.to_string().parse(), Ok(answer));
        }
        let error = "shoot".parse::<Misbehaviour>().unwrap_err().to_string();
        assert!(error.contains("`shoot`") && error.contains("demote"));
    }

    #[test]
    fn what_is_not_said_is_taken_from_the_other() {
        let file = DeviceSettings {
            mode: Some(SliceMode::Auto),
            quantum: Some(Span::from_micros(5000)),
            ..DeviceSettings::default()
        };
        let live = DeviceSettings {
            quantum: Some(Span::from_micros(9000)),
            ..DeviceSettings::default()
        };
        assert!(!live.is_empty() && DeviceSettings::default().is_empty());
        let both = live.or(&file);
        assert_eq!(both.mode, Some(SliceMode::Auto));
        assert_eq!(both.quantum, Some(Span::from_micros(9000)));
    }
}
