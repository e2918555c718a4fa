//! What a container asks for by annotations of its pod, and what a resize makes of it.
//!
//! `sublet.dev/NAME.CONTAINER` is for one container, `sublet.dev/NAME` for each container that has
//! none of its own. A pod's author writes them, so a wrong one is refused with its reason, and
//! never taken for none.

use std::collections::HashMap;

use control::kinds;
use control::setting::Kind as _;
use serde::{Deserialize, Serialize};

use crate::proto::nri::LinuxResources;
use crate::quantity::Quantity;
use crate::{DEVICE_ANNOTATION, MEMORY_ANNOTATION, RESIZE_ANNOTATION, SHARE_ANNOTATION};

/// Longest value that is read.
const LONGEST: usize = 253;

/// What a container asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct Want {
    pub memory_bytes: u64,
    /// Part of the device's time; 0: none is promised.
    pub share: f64,
    /// UUID; `None`: the only one there is.
    pub device: Option<String>,
    pub follows: Follows,
}

/// Which resources of the container a resize is to count for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Follows {
    /// The share goes with the processor time.
    pub cpu: bool,
    /// The quota goes with the host's memory.
    pub memory: bool,
}

/// What a container had when it was made: what a resize is measured by.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Basis {
    pub follows: Follows,
    pub memory_bytes: u64,
    pub share: f64,
    pub had: Resources,
}

/// Limits of a container on the host; 0: none, or not said.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Resources {
    pub cpu_shares: u64,
    pub cpu_quota: i64,
    pub cpu_period: u64,
    pub memory_bytes: i64,
}

/// An annotation that cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WantError {
    #[error("{0}: {1}")]
    Value(String, String),
    #[error(
        "{0} is there without {MEMORY_ANNOTATION}, which says how much GPU memory the container gets: add it"
    )]
    NoMemory(String),
}

impl Want {
    /// What the annotations say of a container; `None`: nothing.
    ///
    /// # Errors
    /// [`WantError`]
    pub fn read(
        annotations: &HashMap<String, String>,
        container: &str,
    ) -> Result<Option<Self>, WantError> {
        let find = |name: &str| {
            let own = format!("{name}.{container}");
            let found = annotations.get_key_value(&own);
            found.or_else(|| annotations.get_key_value(name))
        };
        let Some((key, text)) = find(MEMORY_ANNOTATION) else {
            // One for the pod may be the device plugin's to follow, or another container's.
            let others = [SHARE_ANNOTATION, DEVICE_ANNOTATION, RESIZE_ANNOTATION];
            let mut own = others.iter().map(|name| format!("{name}.{container}"));
            return match own.find(|name| annotations.contains_key(name)) {
                Some(name) => Err(WantError::NoMemory(name)),
                None => Ok(None),
            };
        };
        let memory_bytes = parse(key, text, |text| {
            let amount = Quantity::parse(text).map_err(|error| error.to_string())?;
            let bytes = amount.bytes();
            bytes.ok_or_else(|| format!("`{text}` is more than 64 bits hold"))
        })?;
        if memory_bytes == 0 {
            return Ok(None);
        }
        let share = match find(SHARE_ANNOTATION) {
            Some((key, text)) => parse(key, text, share)?,
            None => 0.0,
        };
        let device = match find(DEVICE_ANNOTATION) {
            Some((key, text)) => Some(parse(key, text, |text| Ok(text.to_owned()))?),
            None => None,
        };
        let follows = match find(RESIZE_ANNOTATION) {
            Some((key, text)) => parse(key, text, follows)?,
            None => Follows::default(),
        };
        Ok(Some(Self {
            memory_bytes,
            share,
            device,
            follows,
        }))
    }
}

fn parse<T>(
    key: &str,
    text: &str,
    read: impl FnOnce(&str) -> Result<T, String>,
) -> Result<T, WantError> {
    let wrong = |why: String| WantError::Value(key.to_owned(), why);
    if text.len() > LONGEST {
        let bytes = text.len();
        return Err(wrong(format!("{bytes} bytes: at most {LONGEST} are read")));
    }
    read(text).map_err(wrong)
}

fn share(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text);
    if number.parse() == Ok(0.0) {
        return Ok(0.0);
    }
    kinds::Share::parse(text)
}

fn follows(text: &str) -> Result<Follows, String> {
    let mut follows = Follows::default();
    for word in text.split(',').map(str::trim) {
        match word {
            "cpu" => follows.cpu = true,
            "memory" => follows.memory = true,
            _ => return Err(format!("`{text}`: write cpu, memory, or both by a comma")),
        }
    }
    Ok(follows)
}

impl Resources {
    pub fn read(of: &LinuxResources) -> Self {
        let cpu = of.cpu.clone().unwrap_or_default();
        let memory = of.memory.clone().unwrap_or_default();
        Self {
            cpu_shares: cpu.shares.unwrap_or_default().value,
            cpu_quota: cpu.quota.unwrap_or_default().value,
            cpu_period: cpu.period.unwrap_or_default().value,
            memory_bytes: memory.limit.unwrap_or_default().value,
        }
    }

    /// Processors that it may use; `None`: without limit, or not said.
    fn processors(&self) -> Option<f64> {
        let limited = self.cpu_quota > 0 && self.cpu_period > 0;
        // CAST: the nearest number is good enough for a share.
        limited.then(|| self.cpu_quota as f64 / self.cpu_period as f64)
    }
}

impl Basis {
    /// Quota and share for a container that has these resources now; `None`: as they are, since
    /// nothing is said of what they follow.
    pub fn resized(&self, now: &Resources) -> (Option<u64>, Option<f64>) {
        let had = &self.had;
        let by_limit = had
            .processors()
            .zip(now.processors())
            .map(|(h, n)| ratio(h, n));
        let cpu = match had.processors() {
            Some(_) => by_limit,
            // CAST: at most 2^18.
            None if had.cpu_shares > 0 && now.cpu_shares > 0 => {
                Some(ratio(had.cpu_shares as f64, now.cpu_shares as f64))
            }
            None => None,
        };
        let memory = (had.memory_bytes > 0 && now.memory_bytes > 0).then(|| {
            let product = i128::from(self.memory_bytes) * i128::from(now.memory_bytes);
            u64::try_from(product / i128::from(had.memory_bytes)).unwrap_or(u64::MAX)
        });
        (
            memory.filter(|_| self.follows.memory),
            cpu.filter(|_| self.follows.cpu).map(|cpu| self.share * cpu),
        )
    }
}

/// In steps of a thousandth: a kernel's figures are rounded themselves.
fn ratio(had: f64, now: f64) -> f64 {
    (now / had * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotations(of: &[(&str, &str)]) -> HashMap<String, String> {
        let pairs = of
            .iter()
            .map(|(name, value)| (format!("sublet.dev/{name}"), (*value).to_owned()));
        pairs.collect()
    }

    fn read(of: &[(&str, &str)], container: &str) -> Result<Option<Want>, String> {
        Want::read(&annotations(of), container).map_err(|error| error.to_string())
    }

    #[test]
    fn a_containers_own_annotation_counts_before_the_pods() {
        let all = [
            ("gpu-mem", "2Gi"),
            ("gpu-mem.train", "512Mi"),
            ("gpu-mem.side", "0"),
            ("share", "0.25"),
            ("share.train", "50%"),
            ("gpu.train", "GPU-1"),
            ("resize.train", "cpu, memory"),
            ("decision", "not ours to read"),
        ];
        let train = read(&all, "train").unwrap().unwrap();
        assert_eq!((train.memory_bytes, train.share), (512 << 20, 0.5));
        assert_eq!(train.device.as_deref(), Some("GPU-1"));
        assert!(train.follows.cpu && train.follows.memory);
        let other = read(&all, "other").unwrap().unwrap();
        assert_eq!((other.memory_bytes, other.share), (2 << 30, 0.25));
        assert_eq!((other.device, other.follows), (None, Follows::default()));
        assert_eq!(read(&all, "side"), Ok(None));
        // The share of a pod that the device plugin follows.
        assert_eq!(read(&[("share", "0.5")], "train"), Ok(None));
        assert_eq!(read(&[], "train"), Ok(None));
        let none = read(&[("gpu-mem", "1Gi"), ("share", "0")], "c");
        assert_eq!(none.unwrap().unwrap().share, 0.0);
    }

    #[test]
    fn a_wrong_one_is_refused_with_its_name_and_never_taken_for_none() {
        let long = "9".repeat(300);
        for (of, words) in [
            (&[("gpu-mem", "much")][..], "sublet.dev/gpu-mem: `much`"),
            (&[("gpu-mem", "-1Gi")], "sublet.dev/gpu-mem: `-1Gi`"),
            (&[("gpu-mem", "")], "sublet.dev/gpu-mem: ``"),
            (&[("gpu-mem", &long)], "300 bytes"),
            (&[("gpu-mem", "99999999999999Ei")], "more than 64 bits"),
            (
                &[("gpu-mem", "1Gi"), ("share", "1.5")],
                "sublet.dev/share: `1.5`",
            ),
            (
                &[("gpu-mem", "1Gi"), ("share.c", "NaN")],
                "sublet.dev/share.c",
            ),
            (
                &[("gpu-mem", "1Gi"), ("resize", "disk")],
                "sublet.dev/resize: `disk`",
            ),
            (&[("share.c", "0.5")], "without sublet.dev/gpu-mem"),
            (&[("resize.c", "cpu")], "without sublet.dev/gpu-mem"),
        ] {
            let error = read(of, "c").unwrap_err();
            assert!(error.contains(words), "{of:?}: {error}");
        }
    }

    fn basis(had: Resources) -> Basis {
        Basis {
            follows: Follows {
                cpu: true,
                memory: true,
            },
            memory_bytes: 4 << 30,
            share: 0.5,
            had,
        }
    }

    fn cpu(quota: i64, shares: u64) -> Resources {
        Resources {
            cpu_quota: quota,
            cpu_period: 100_000,
            cpu_shares: shares,
            memory_bytes: 0,
        }
    }

    #[test]
    fn a_share_goes_with_the_limit_and_without_one_with_the_request() {
        let limited = basis(cpu(200_000, 1024));
        assert_eq!(limited.resized(&cpu(100_000, 1024)).1, Some(0.25));
        assert_eq!(limited.resized(&cpu(300_000, 1024)).1, Some(0.75));
        assert_eq!(limited.resized(&cpu(0, 512)).1, None, "no limit is said");
        assert_eq!(limited.resized(&cpu(-1, 512)).1, None);
        let requested = basis(cpu(0, 1024));
        assert_eq!(requested.resized(&cpu(100_000, 512)).1, Some(0.25));
        assert_eq!(requested.resized(&cpu(0, 0)).1, None);
        let own = Basis {
            follows: Follows::default(),
            ..limited
        };
        assert_eq!(own.resized(&cpu(100_000, 1024)), (None, None));
    }

    #[test]
    fn a_quota_goes_with_the_memory() {
        let memory = |bytes: i64| Resources {
            memory_bytes: bytes,
            ..Resources::default()
        };
        let basis = basis(memory(8 << 30));
        assert_eq!(basis.resized(&memory(4 << 30)), (Some(2 << 30), None));
        assert_eq!(basis.resized(&memory(i64::MAX)).0, Some((1 << 62) - 1));
        assert_eq!(basis.resized(&memory(-1)).0, None);
        assert_eq!(basis.resized(&memory(0)), (None, None));
    }
}
