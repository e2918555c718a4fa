//! The values that settings, requests and reports have in common: words of closed sets, devices,
//! policies, deadlines. They know nothing of what they are said in.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::span::Span;

/// A word that is not one of a closed set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{word}` is not known: write {choices}")]
pub struct UnknownWord {
    pub word: String,
    pub choices: &'static str,
}

/// All that follows from the words of a closed set: the list of its values, how they are written,
/// and how a word is read. `choices` is the advice for somebody who writes another word. A value
/// after `else` is shown and never read: it stands for a word of a newer version.
macro_rules! closed_set {
    ($set:ident, $choices:literal: $($value:ident = $word:literal,)+ $(; else $other:ident = $shown:literal,)?) => {
        impl $set {
            pub const ALL: &[Self] = &[$(Self::$value),+];

            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$value => $word,)+
                    $(Self::$other => $shown,)?
                }
            }
        }

        impl fmt::Display for $set {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl FromStr for $set {
            type Err = UnknownWord;

            fn from_str(word: &str) -> Result<Self, UnknownWord> {
                match word {
                    $($word => Ok(Self::$value),)+
                    _ => Err(UnknownWord {
                        word: word.to_owned(),
                        choices: $choices,
                    }),
                }
            }
        }
    };
}

/// How firmly a share is promised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Gets its share whenever it wants it.
    #[default]
    Guaranteed,
    /// Runs in what guaranteed jobs leave.
    Opportunistic,
}

closed_set! {
    Class, "guaranteed or opportunistic":
    Guaranteed = "guaranteed",
    Opportunistic = "opportunistic",
}

/// What a job does when its arbiter is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FailMode {
    /// Goes on without slices; its memory quota stays.
    #[default]
    Open,
    /// Waits for an arbiter to come back.
    Freeze,
    /// Its device calls fail.
    Closed,
}

closed_set! {
    FailMode, "open, freeze or closed":
    Open = "open",
    Freeze = "freeze",
    Closed = "closed",
}

/// What becomes of a process of a job that cannot be governed from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnRefusal {
    /// It runs without limits.
    Open,
    /// It does not start: its `cuInit`, and every later call of the driver, fails.
    Closed,
}

closed_set! {
    OnRefusal, "open or closed":
    Open = "open",
    Closed = "closed",
}

/// What happens to an allocation that the job's quota has no space for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Overflow {
    /// It fails.
    #[default]
    Fail,
    /// It lives in host memory.
    Host,
}

closed_set! {
    Overflow, "host or fail":
    Fail = "fail",
    Host = "host",
}

/// How the jobs of a device share its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SliceMode {
    /// One job at a time, in slices.
    #[default]
    Exclusive,
    /// All at once; only memory is limited.
    Concurrent,
    /// The arbiter decides between the two.
    Auto,
    /// All at once; a job that is ahead of its share waits while it holds up one that is behind.
    Lend,
    /// A mode of a newer arbiter.
    #[serde(other)]
    Unknown,
}

closed_set! {
    SliceMode, "exclusive, concurrent, auto or lend":
    Exclusive = "exclusive",
    Concurrent = "concurrent",
    Auto = "auto",
    Lend = "lend",
    ; else Unknown = "unknown",
}

/// What happens to a job that harms the others: one that keeps the device beyond all bounds, never
/// runs when it is granted the device, or floods the arbiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, ToSchema)]
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

closed_set! {
    Misbehaviour, "report, demote or kill":
    Report = "report",
    Demote = "demote",
    Kill = "kill",
}

/// Which device: its index on this host, or its UUID as `nvidia-smi -L` prints it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeviceSelector {
    Index(u32),
    Uuid(String),
}

impl fmt::Display for DeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => write!(f, "{index}"),
            Self::Uuid(uuid) => f.write_str(uuid),
        }
    }
}

impl FromStr for DeviceSelector {
    type Err = BadDevice;

    fn from_str(text: &str) -> Result<Self, BadDevice> {
        if let Ok(index) = text.parse() {
            return Ok(Self::Index(index));
        }
        let uuid = ["GPU-", "MIG-"]
            .iter()
            .find_map(|prefix| text.strip_prefix(prefix));
        match uuid {
            Some(rest)
                if !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-') =>
            {
                Ok(Self::Uuid(text.to_owned()))
            }
            _ => Err(BadDevice(text.to_owned())),
        }
    }
}

/// Neither an index nor a UUID.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no device: write an index such as 0, or a UUID such as GPU-5a1c... from `nvidia-smi -L`"
)]
pub struct BadDevice(pub String);

/// A slice policy by name, with the parameters that differ from their defaults. Written `name` or
/// `name:key=value,key=value`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct PolicyChoice {
    pub name: String,
    /// By name; which there are is the policy's own affair.
    pub parameters: BTreeMap<String, Parameter>,
}

/// What a parameter of a policy is given.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
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

/// By when a job's work should be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Deadline {
    /// So long after it is asked for.
    In(#[schema(inline)] Span),
    /// At a time.
    AtUnixMs(u64),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_parse_back_and_others_are_named() {
        macro_rules! read_back {
            ($($set:ident),+) => {
                $(for one in $set::ALL {
                    assert_eq!(one.to_string().parse(), Ok(*one));
                })+
            };
        }
        read_back!(
            Class,
            FailMode,
            Misbehaviour,
            OnRefusal,
            Overflow,
            SliceMode
        );
        assert_eq!("lend".parse(), Ok(SliceMode::Lend));
        let lend = serde_json::to_string(&SliceMode::Lend).unwrap();
        assert_eq!(lend, "\"lend\"");
        assert_eq!(
            serde_json::from_str::<SliceMode>(&lend).unwrap(),
            SliceMode::Lend
        );
        assert_eq!(SliceMode::default(), SliceMode::Exclusive);
        assert_eq!(SliceMode::Unknown.to_string(), "unknown");
        assert!("unknown".parse::<SliceMode>().is_err());
        let error = "besteffort".parse::<Class>().unwrap_err().to_string();
        assert!(
            error.contains("`besteffort`") && error.contains("opportunistic"),
            "{error}"
        );
        let error = "shoot".parse::<Misbehaviour>().unwrap_err().to_string();
        assert!(error.contains("`shoot`") && error.contains("demote"));
    }

    #[test]
    fn what_overflow_may_be_is_said() {
        let error = "disk".parse::<Overflow>().unwrap_err().to_string();
        assert!(
            error.contains("`disk`") && error.contains("host or fail"),
            "{error}"
        );
    }

    #[test]
    fn devices_are_an_index_or_a_uuid() {
        assert_eq!("3".parse(), Ok(DeviceSelector::Index(3)));
        let uuid = "GPU-5a1c0000-0000-0000-0000-000000000001";
        assert_eq!(uuid.parse(), Ok(DeviceSelector::Uuid(uuid.into())));
        for bad in ["", "gpu0", "-1", "GPU-", "GPU-xyz", "4294967296"] {
            assert_eq!(
                bad.parse::<DeviceSelector>(),
                Err(BadDevice(bad.into())),
                "{bad}"
            );
        }
    }

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
}
