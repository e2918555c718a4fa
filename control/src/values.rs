//! The values that settings, requests and reports have in common: words of closed sets, devices,
//! policies, deadlines. They know nothing of what they are said in.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::span::Span;

/// A word that is not one of a closed set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{word}` is not known: write {choices}")]
pub struct UnknownWord {
    pub word: String,
    pub choices: &'static str,
}

/// How firmly a share is promised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Gets its share whenever it wants it.
    #[default]
    Guaranteed,
    /// Runs in what guaranteed jobs leave.
    Opportunistic,
}

impl Class {
    pub const ALL: [Self; 2] = [Self::Guaranteed, Self::Opportunistic];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Guaranteed => "guaranteed",
            Self::Opportunistic => "opportunistic",
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Class {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        Self::ALL
            .into_iter()
            .find(|class| class.as_str() == word)
            .ok_or_else(|| UnknownWord {
                word: word.to_owned(),
                choices: "guaranteed or opportunistic",
            })
    }
}

/// What a job does when its arbiter is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
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

impl FailMode {
    pub const ALL: [Self; 3] = [Self::Open, Self::Freeze, Self::Closed];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Freeze => "freeze",
            Self::Closed => "closed",
        }
    }
}

impl fmt::Display for FailMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for FailMode {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        Self::ALL
            .into_iter()
            .find(|mode| mode.as_str() == word)
            .ok_or_else(|| UnknownWord {
                word: word.to_owned(),
                choices: "open, freeze or closed",
            })
    }
}

/// What becomes of a process of a job that cannot be governed from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnRefusal {
    /// It runs without limits.
    Open,
    /// It does not start: its `cuInit`, and every later call of the driver, fails.
    Closed,
}

impl OnRefusal {
    pub const ALL: [Self; 2] = [Self::Open, Self::Closed];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Closed => "closed",
        }
    }
}

impl fmt::Display for OnRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for OnRefusal {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        Self::ALL
            .into_iter()
            .find(|one| one.as_str() == word)
            .ok_or_else(|| UnknownWord {
                word: word.to_owned(),
                choices: "open or closed",
            })
    }
}

/// What happens to an allocation that the job's quota has no space for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overflow {
    /// It fails.
    #[default]
    Fail,
    /// It lives in host memory.
    Host,
}

impl Overflow {
    pub const ALL: [Self; 2] = [Self::Fail, Self::Host];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fail => "fail",
            Self::Host => "host",
        }
    }
}

impl fmt::Display for Overflow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Overflow {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        Self::ALL
            .into_iter()
            .find(|overflow| overflow.as_str() == word)
            .ok_or_else(|| UnknownWord {
                word: word.to_owned(),
                choices: "host or fail",
            })
    }
}

/// How the jobs of a device share its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SliceMode {
    /// One job at a time, in slices.
    #[default]
    Exclusive,
    /// All at once; only memory is limited.
    Concurrent,
    /// The arbiter decides between the two.
    Auto,
    /// A mode of a newer arbiter.
    #[serde(other)]
    Unknown,
}

impl FromStr for SliceMode {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        [Self::Exclusive, Self::Concurrent, Self::Auto]
            .into_iter()
            .find(|mode| mode.as_str() == word)
            .ok_or_else(|| UnknownWord {
                word: word.to_owned(),
                choices: "exclusive, concurrent or auto",
            })
    }
}

impl fmt::Display for SliceMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl SliceMode {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Exclusive => "exclusive",
            Self::Concurrent => "concurrent",
            Self::Auto => "auto",
            Self::Unknown => "unknown",
        }
    }
}

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

/// Which device: its index on this host, or its UUID as `nvidia-smi -L` prints it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
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

/// By when a job's work should be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Deadline {
    /// So long after it is asked for.
    In(Span),
    /// At a time.
    AtUnixMs(u64),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_parse_back_and_others_are_named() {
        for class in Class::ALL {
            assert_eq!(class.to_string().parse(), Ok(class));
        }
        for mode in FailMode::ALL {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        for answer in Misbehaviour::ALL {
            assert_eq!(answer.to_string().parse(), Ok(answer));
        }
        for one in OnRefusal::ALL {
            assert_eq!(one.to_string().parse(), Ok(one));
        }
        let error = "besteffort".parse::<Class>().unwrap_err().to_string();
        assert!(
            error.contains("`besteffort`") && error.contains("opportunistic"),
            "{error}"
        );
        let error = "shoot".parse::<Misbehaviour>().unwrap_err().to_string();
        assert!(error.contains("`shoot`") && error.contains("demote"));
    }

    #[test]
    fn overflow_is_host_or_fail() {
        for overflow in Overflow::ALL {
            assert_eq!(overflow.to_string().parse(), Ok(overflow));
        }
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
