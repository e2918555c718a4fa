//! What a job gets when several say what it gets: the job itself, rules one over the other, and
//! caps that nobody goes above. Arithmetic only; whose rules count is decided elsewhere.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::job_settings::JobSettings;
use crate::setting::{About, Settings};
use crate::size::MemLimit;
use crate::values::Class;

/// Settings, and where they stand.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Layer {
    /// `file:line:column`, or words.
    pub from: String,
    pub settings: JobSettings,
}

/// A setting that was asked for, or left to be as large as can be, and is less.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Capped {
    pub key: String,
    /// `None`: nothing was asked for.
    pub asked: Option<String>,
    pub given: String,
    /// Where the cap stands.
    pub from: String,
}

impl fmt::Display for Capped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.key)?;
        if let Some(asked) = &self.asked {
            write!(f, "{asked} was asked for, and ")?;
        }
        write!(f, "{} is the most ({})", self.given, self.from)
    }
}

/// What is in force for a job.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct InForce {
    pub settings: JobSettings,
    pub bounds: Bounds,
}

/// Where settings come from, and what bounds them.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Bounds {
    /// Where each setting comes from, by its key.
    pub from: Vec<(String, String)>,
    /// Most memory on a device; each of them holds, as a part of a device or in bytes.
    pub mem: Vec<MemLimit>,
    /// The same of host memory.
    pub host_memory: Vec<MemLimit>,
    /// Most that a job gets that names no share.
    pub share: Option<f64>,
    pub capped: Vec<Capped>,
}

/// What the job itself was given.
const ITSELF: &str = "the job";

/// Puts together what a job itself was given, what `set` says where it says nothing (the strongest
/// first), and what it gets at the most. A setting that contradicts a stronger one is left out.
/// `totals` has the memory of the job's devices in bytes, as far as they are known; a deadline
/// counts from `start_unix_ms`.
#[must_use]
pub fn in_force(
    own: &JobSettings,
    set: &[Layer],
    caps: &[Layer],
    totals: &[u64],
    start_unix_ms: u64,
) -> InForce {
    let mut it = InForce {
        settings: own.clone(),
        ..InForce::default()
    };
    it.note_from(ITSELF);
    for layer in set {
        let mut weaker = layer.settings.clone();
        weaker.anchor(start_unix_ms);
        it.take(&weaker);
        it.note_from(&layer.from);
    }
    for cap in caps {
        it.cap(cap, totals);
    }
    it.note_from("a cap");
    it
}

impl Bounds {
    /// Whether less is given than was asked for.
    pub fn is_capped(&self, key: &str) -> bool {
        self.capped.iter().any(|capped| capped.key == key)
    }
}

impl InForce {
    fn take(&mut self, weaker: &JobSettings) {
        let all = self.settings.clone().or(weaker);
        if all.check().is_ok() {
            self.settings = all;
            return;
        }
        // Some settings need others: those come in the second turn.
        for _ in 0..2 {
            for setting in JobSettings::TABLE {
                let one = self.settings.clone().or(&(setting.only)(weaker));
                if one.check().is_ok() {
                    self.settings = one;
                }
            }
        }
    }

    /// Whatever is set and of which nothing is known comes from there.
    fn note_from(&mut self, from: &str) {
        for setting in JobSettings::TABLE {
            let key = setting.about.key;
            if (setting.is_set)(&self.settings)
                && !self.bounds.from.iter().any(|(known, _)| known == key)
            {
                self.bounds.from.push((key.to_owned(), from.to_owned()));
            }
        }
    }

    fn cap(&mut self, layer: &Layer, totals: &[u64]) {
        let cap = &layer.settings;
        let before = self.settings.clone();
        if cap.class == Some(Class::Opportunistic)
            && self.settings.class.unwrap_or_default() == Class::Guaranteed
        {
            self.settings.class = cap.class;
            self.note("class", &before, "opportunistic", layer);
        }
        if let Some(most) = cap.share_max
            && self.settings.share_max.is_none_or(|max| max > most)
        {
            self.settings.share_max = Some(most);
            self.note("share_max", &before, most, layer);
        }
        let least = |a: Option<f64>, b: Option<f64>| match (a, b) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        self.bounds.share = least(self.bounds.share, cap.share);
        let most = least(cap.share, self.settings.share_max);
        if let (Some(share), Some(most)) = (self.settings.share, most)
            && share > most
        {
            self.settings.share = Some(most);
            self.note("share", &before, most, layer);
        }
        let mut most = least(
            least(cap.share_min, self.bounds.share),
            self.settings.share_max,
        );
        if self.settings.class.unwrap_or_default() == Class::Guaranteed {
            most = least(most, self.settings.share);
        }
        if let (Some(min), Some(most)) = (self.settings.share_min, most)
            && min > most
        {
            self.settings.share_min = Some(most);
            self.note("share_min", &before, most, layer);
        }
        if let Some(most) = cap.mem {
            self.bounds.mem.push(most);
            let (settled, lower) = lowered(self.settings.mem, most, totals);
            self.settings.mem = Some(settled);
            if lower {
                self.note("mem", &before, most, layer);
            }
        }
        if let Some(most) = cap.host_memory
            && self.settings.evictable == Some(true)
        {
            self.bounds.host_memory.push(most);
            let (settled, lower) = lowered(self.settings.host_memory, most, &[]);
            self.settings.host_memory = Some(settled);
            if lower {
                self.note("host_memory", &before, most, layer);
            }
        }
    }

    fn note(&mut self, key: &str, before: &JobSettings, given: impl fmt::Display, layer: &Layer) {
        let (given, from) = (given.to_string(), layer.from.clone());
        if let Some(known) = self
            .bounds
            .capped
            .iter_mut()
            .find(|capped| capped.key == key)
        {
            (known.given, known.from) = (given, from);
            return;
        }
        self.bounds.capped.push(Capped {
            key: key.to_owned(),
            asked: text_of(before, key),
            given,
            from,
        });
    }
}

/// The limit to go on with, and whether the cap is below what was asked for somewhere. A part and a
/// size stay what they are: both hold.
fn lowered(asked: Option<MemLimit>, most: MemLimit, totals: &[u64]) -> (MemLimit, bool) {
    match (asked, most) {
        (None, most) => (most, true),
        (Some(MemLimit::Bytes(asked)), MemLimit::Bytes(most)) => {
            (MemLimit::Bytes(asked.min(most)), most < asked)
        }
        (Some(MemLimit::Percent(asked)), MemLimit::Percent(most)) => {
            (MemLimit::Percent(asked.min(most)), most < asked)
        }
        (Some(asked), most) => {
            let lower = |total: &u64| most.resolve(*total) < asked.resolve(*total);
            (asked, totals.is_empty() || totals.iter().any(lower))
        }
    }
}

/// A setting as people write it; `None`: it is not set.
pub fn text_of(settings: &JobSettings, key: &str) -> Option<String> {
    let one = settings.only(|about: &About| about.key == key);
    if one.is_empty() {
        return None;
    }
    match serde_json::to_value(one).ok()?.get(key)? {
        serde_json::Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn layer(from: &str, settings: JobSettings) -> Layer {
        Layer {
            from: from.into(),
            settings,
        }
    }

    fn mem(limit: MemLimit) -> JobSettings {
        JobSettings {
            mem: Some(limit),
            ..JobSettings::default()
        }
    }

    fn shares(min: Option<f64>, share: Option<f64>, max: Option<f64>) -> JobSettings {
        JobSettings {
            share_min: min,
            share,
            share_max: max,
            ..JobSettings::default()
        }
    }

    #[test]
    fn the_job_beats_the_rules_and_the_stronger_rule_the_weaker() {
        let own = shares(None, Some(0.5), None);
        let rules = [
            layer("b", mem(MemLimit::Bytes(2 * GIB))),
            layer(
                "a",
                mem(MemLimit::Bytes(GIB)).or(&shares(None, Some(0.1), Some(0.75))),
            ),
        ];
        let it = in_force(&own, &rules, &[], &[], 0);
        assert_eq!(it.settings.mem, Some(MemLimit::Bytes(2 * GIB)));
        assert_eq!(
            (it.settings.share, it.settings.share_max),
            (Some(0.5), Some(0.75))
        );
        let from = |key: &str| {
            let found = it.bounds.from.iter().find(|(known, _)| known == key);
            found.map(|(_, from)| from.as_str())
        };
        assert_eq!(
            [from("share"), from("mem"), from("share_max"), from("class")],
            [Some("the job"), Some("b"), Some("a"), None]
        );
        assert!(it.bounds.capped.is_empty());
    }

    #[test]
    fn a_rule_that_contradicts_the_job_gives_way_and_the_rest_of_it_holds() {
        let own = shares(None, Some(0.2), None);
        let mut rule = shares(Some(0.5), None, None).or(&mem(MemLimit::Bytes(GIB)));
        rule.evictable = Some(true);
        rule.host_memory = Some(MemLimit::Bytes(GIB));
        let it = in_force(&own, &[layer("a", rule)], &[], &[], 0);
        assert_eq!(
            (it.settings.share_min, it.settings.share),
            (None, Some(0.2))
        );
        assert_eq!(it.settings.mem, Some(MemLimit::Bytes(GIB)));
        assert_eq!(it.settings.host_memory, Some(MemLimit::Bytes(GIB)));
        assert_eq!(it.settings.check(), Ok(()));
    }

    #[test]
    fn nobody_gets_more_than_the_cap_and_it_is_said() {
        let own = shares(Some(0.4), Some(0.5), None).or(&mem(MemLimit::Bytes(8 * GIB)));
        let caps = [
            layer("x", mem(MemLimit::Bytes(4 * GIB))),
            layer(
                "y",
                shares(None, None, Some(0.3)).or(&mem(MemLimit::Percent(50.0))),
            ),
            layer("z", mem(MemLimit::Bytes(6 * GIB))),
        ];
        let it = in_force(&own, &[], &caps, &[16 * GIB], 0);
        assert_eq!(it.settings, {
            let shares = shares(Some(0.3), Some(0.3), Some(0.3));
            shares.or(&mem(MemLimit::Bytes(4 * GIB)))
        });
        let said: Vec<String> = it.bounds.capped.iter().map(ToString::to_string).collect();
        assert_eq!(
            said,
            [
                "mem: 8GiB was asked for, and 4GiB is the most (x)",
                "share_max: 0.3 is the most (y)",
                "share: 0.5 was asked for, and 0.3 is the most (y)",
                "share_min: 0.4 was asked for, and 0.3 is the most (y)",
            ]
        );
        assert_eq!(it.bounds.mem.len(), 3, "a part of a device holds as well");
        let small = in_force(&own, &[], &caps[1..2], &[4 * GIB], 0);
        assert!(
            small.bounds.is_capped("mem"),
            "half of it is less than was asked for"
        );
        assert_eq!(it.settings.check(), Ok(()));
    }

    #[test]
    fn a_job_that_asks_for_nothing_is_below_the_cap_too() {
        let mut cap = mem(MemLimit::Percent(25.0)).or(&shares(None, Some(0.25), None));
        cap.class = Some(Class::Opportunistic);
        cap.host_memory = Some(MemLimit::Bytes(GIB));
        let it = in_force(
            &JobSettings::default(),
            &[],
            &[layer("x", cap.clone())],
            &[],
            0,
        );
        assert_eq!(it.settings.mem, Some(MemLimit::Percent(25.0)));
        assert_eq!((it.settings.share, it.bounds.share), (None, Some(0.25)));
        assert_eq!(it.settings.class, Some(Class::Opportunistic));
        assert_eq!(it.settings.host_memory, None, "it stays on its devices");
        assert_eq!(it.settings.check(), Ok(()));
        let evictable = JobSettings {
            evictable: Some(true),
            ..JobSettings::default()
        };
        let it = in_force(&evictable, &[], &[layer("x", cap)], &[], 0);
        assert_eq!(it.settings.host_memory, Some(MemLimit::Bytes(GIB)));
    }
}
