//! What a job's environment asks for: our own variables, and, where these say nothing, those that
//! HAMi, Volcano, KAI and MPS set.
//!
//! The foreign ones are read as their own libraries read them: HAMi-core takes whole numbers with
//! one letter (`2027m`), the number of a device behind `_`, and 0 for no limit; MPS takes a list
//! `0=1G,1=512MB` and a percentage. A job has one memory limit for each of its devices: where they
//! name several, the smallest holds.

use std::cmp::Ordering;
use std::ffi::OsString;

use crate::job_settings::JobSettings;
use crate::name::check_name;
use crate::setting::Settings;
use crate::size::{MemLimit, parse_bytes};

/// Names the job.
pub const NAME: &str = "SUBLET_NAME";
/// HAMi-core's memory limit, of each device or of one (`_0`).
const HAMI_MEMORY: &str = "CUDA_DEVICE_MEMORY_LIMIT";
/// HAMi-core's limit of a device's time, in percent; the same.
const HAMI_TIME: &str = "CUDA_DEVICE_SM_LIMIT";
/// MPS's limit of pinned device memory.
const MPS_MEMORY: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
/// MPS's part of the threads.
const MPS_TIME: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
/// Devices that HAMi-core counts.
const HAMI_DEVICES: u32 = 16;

/// The settings that are about a part of the device's time: a foreign variable about it counts only
/// where none of them is set.
const TIME: [&str; 3] = ["share", "share_min", "share_max"];

/// A variable with an invalid value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the environment variable {name}: {message}")]
pub struct BadVariable {
    pub name: String,
    pub message: String,
}

/// A variable that says something about a setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    pub key: &'static str,
    pub variable: String,
    pub value: String,
}

/// What an environment asks for.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Asked {
    /// By our own variables.
    pub own: JobSettings,
    /// By others'.
    pub foreign: JobSettings,
    pub name: Option<String>,
    /// Every variable that says something, the strongest first.
    pub said: Vec<Said>,
}

impl Asked {
    /// These settings, and below them what the environment asks for. Time is one thing: a foreign
    /// limit of it does not contradict a share that was asked for.
    pub fn below(&self, stronger: &JobSettings) -> JobSettings {
        let own = stronger.clone().or(&self.own);
        let says_time = JobSettings::TABLE
            .iter()
            .any(|one| TIME.contains(&one.about.key) && (one.is_set)(&own));
        let counts = |about: &crate::setting::About| !says_time || !TIME.contains(&about.key);
        own.or(&self.foreign.only(counts))
    }

    /// Whether this variable is where a setting comes from, where nothing is stronger.
    pub fn counts(&self, said: &Said) -> bool {
        let group = |key: &str| if TIME.contains(&key) { "time" } else { "own" };
        let is_own = |one: &Said| one.variable.starts_with("SUBLET_");
        let rival = |one: &&Said| {
            one.key == said.key || (group(one.key) == "time" && group(said.key) == "time")
        };
        match self.said.iter().find(rival) {
            Some(first) => first == said || (is_own(first) && is_own(said)),
            None => true,
        }
    }
}

/// The variables that may say something, by name.
pub fn variables() -> Vec<String> {
    let own = JobSettings::TABLE
        .iter()
        .map(|setting| setting.about.variable());
    let mut all: Vec<String> = own.chain([NAME.to_owned()]).collect();
    for hami in [HAMI_MEMORY, HAMI_TIME] {
        all.extend((0..HAMI_DEVICES).map(|at| format!("{hami}_{at}")));
        all.push(hami.to_owned());
    }
    all.extend([MPS_MEMORY.to_owned(), MPS_TIME.to_owned()]);
    all
}

/// What the environment asks for. An empty variable counts as unset.
///
/// # Errors
/// [`BadVariable`] with the name, the value and the remedy.
pub fn asked(var: impl Fn(&str) -> Option<OsString>) -> Result<Asked, BadVariable> {
    let text = |name: &str| -> Result<Option<String>, BadVariable> {
        let value = var(name).filter(|value| !value.is_empty());
        value
            .map(OsString::into_string)
            .transpose()
            .map_err(|value| {
                let shown = value.display();
                bad(
                    name,
                    format!("`{shown}` is no UTF-8 text: set it anew or unset it"),
                )
            })
    };
    let mut asked = Asked::default();
    for setting in JobSettings::TABLE {
        let variable = setting.about.variable();
        if let Some(value) = text(&variable)? {
            let parsed = (setting.parse)(&value).map_err(|message| bad(&variable, message))?;
            asked.own = parsed.or(&asked.own);
            asked.said.push(Said {
                key: setting.about.key,
                variable,
                value,
            });
        }
    }
    asked.name = text(NAME)?;
    if let Some(name) = &asked.name {
        check_name(name).map_err(|error| bad(NAME, error.to_string()))?;
    }
    foreign(&text, &mut asked)?;
    Ok(asked)
}

type Text<'a> = &'a dyn Fn(&str) -> Result<Option<String>, BadVariable>;

/// HAMi's before MPS's: who sets HAMi's variables means this library's place.
fn foreign(text: Text<'_>, asked: &mut Asked) -> Result<(), BadVariable> {
    // The first of them holds; the others are said to count for nothing.
    let mut say = |key, found: Vec<(Said, JobSettings)>| {
        for (said, settings) in found {
            let said = Said { key, ..said };
            asked.said.push(said);
            asked.foreign = asked.foreign.clone().or(&settings);
        }
    };
    let memory = |found: Vec<(String, String, u64)>| {
        let each = found.into_iter().map(|(variable, value, bytes)| {
            let settings = JobSettings {
                mem: Some(MemLimit::Bytes(bytes)),
                ..JobSettings::default()
            };
            (said(variable, value), settings)
        });
        each.collect()
    };
    let time = |found: Vec<(String, String, f64)>| {
        // The whole device is no limit: where that is what holds, nothing is said.
        let limits = found.first().is_some_and(|one| one.2 < 100.0);
        let found = found.into_iter().filter(|_| limits);
        let each = found.map(|(variable, value, percent)| {
            let settings = JobSettings {
                share_max: Some(percent / 100.0),
                ..JobSettings::default()
            };
            (said(variable, value), settings)
        });
        each.collect()
    };
    say("mem", memory(hami(text, HAMI_MEMORY, hami_bytes)?));
    let percent = |value: &str| hami_bytes(value).map(|percent| percent as f64);
    say("share_max", time(hami(text, HAMI_TIME, percent)?));
    let listed = match text(MPS_MEMORY)? {
        Some(value) => {
            let bytes = mps_bytes(&value).ok_or_else(|| {
                bad(
                    MPS_MEMORY,
                    format!("`{value}` is no list such as 0=1G,1=512MB"),
                )
            })?;
            Some((MPS_MEMORY.to_owned(), value, bytes))
        }
        None => None,
    };
    say("mem", memory(listed.into_iter().collect()));
    let threads = match text(MPS_TIME)? {
        Some(value) => {
            let percent = value.trim().parse::<f64>().ok();
            let percent = percent.filter(|percent| *percent > 0.0 && *percent <= 100.0);
            let percent = percent.ok_or_else(|| {
                let message =
                    format!("`{value}` is no percentage: write a number above 0 and at most 100");
                bad(MPS_TIME, message)
            })?;
            Some((MPS_TIME.to_owned(), value, percent))
        }
        None => None,
    };
    say("share_max", time(threads.into_iter().collect()));
    Ok(())
}

fn said(variable: String, value: String) -> Said {
    Said {
        key: "",
        variable,
        value,
    }
}

fn bad(name: &str, message: String) -> BadVariable {
    BadVariable {
        name: name.to_owned(),
        message,
    }
}

/// Those of single devices, the smallest first, and behind them that of each device: the first one
/// holds. 0 is no limit, and is left out.
fn hami<T: PartialOrd + Default>(
    text: Text<'_>,
    name: &str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Vec<(String, String, T)>, BadVariable> {
    let read = |variable: String| -> Result<Option<(String, String, T)>, BadVariable> {
        let Some(value) = text(&variable)? else {
            return Ok(None);
        };
        let limit = parse(&value).ok_or_else(|| {
            let message = format!(
                "`{value}` is no limit: write a whole number, with k, m or g behind it where it is a size"
            );
            bad(&variable, message)
        })?;
        Ok((limit > T::default()).then_some((variable, value, limit)))
    };
    let mut all = Vec::new();
    for at in 0..HAMI_DEVICES {
        all.extend(read(format!("{name}_{at}"))?);
    }
    // Stable: of equal ones that of the first device holds.
    all.sort_by(|a, b| a.2.partial_cmp(&b.2).unwrap_or(Ordering::Equal));
    all.extend(read(name.to_owned())?);
    Ok(all)
}

/// A whole number, and k, m or g.
fn hami_bytes(value: &str) -> Option<u64> {
    let value = value.trim();
    let (digits, shift) = match value.as_bytes().last()? {
        b'k' | b'K' => (&value[..value.len() - 1], 10),
        b'm' | b'M' => (&value[..value.len() - 1], 20),
        b'g' | b'G' => (&value[..value.len() - 1], 30),
        _ => (value, 0),
    };
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let number: u64 = is_number.then(|| digits.parse().ok())??;
    number.checked_mul(1 << shift)
}

/// The smallest of `0=1G,1=512MB`.
fn mps_bytes(value: &str) -> Option<u64> {
    let items = value.split(',').map(|item| {
        let (device, size) = item.split_once('=')?;
        device.trim().parse::<u32>().ok()?;
        parse_bytes(size).ok()
    });
    items
        .collect::<Option<Vec<u64>>>()
        .and_then(|all| all.into_iter().min())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::values::DeviceSelector;

    fn read(vars: &[(&str, &str)]) -> Result<Asked, BadVariable> {
        asked(|name| {
            let var = vars.iter().find(|(key, _)| *key == name);
            var.map(|(_, value)| OsString::from(value))
        })
    }

    fn mib(settings: &JobSettings) -> Option<u64> {
        match settings.mem? {
            MemLimit::Bytes(bytes) => Some(bytes >> 20),
            MemLimit::Percent(_) => None,
        }
    }

    fn in_force(vars: &[(&str, &str)]) -> JobSettings {
        read(vars)
            .expect("variables")
            .below(&JobSettings::default())
    }

    #[test]
    fn hamis_limits_are_read_as_its_library_reads_them() {
        for (vars, memory, time) in [
            (&[("CUDA_DEVICE_MEMORY_LIMIT", "1g")][..], Some(1024), None),
            (&[("CUDA_DEVICE_MEMORY_LIMIT", "1024M")], Some(1024), None),
            (
                &[("CUDA_DEVICE_MEMORY_LIMIT", "1048576k")],
                Some(1024),
                None,
            ),
            (
                &[("CUDA_DEVICE_MEMORY_LIMIT", "1073741824")],
                Some(1024),
                None,
            ),
            (&[("CUDA_DEVICE_MEMORY_LIMIT_0", "2027m")], Some(2027), None),
            // One of a device beats that of all, and the smallest of several holds.
            (
                &[
                    ("CUDA_DEVICE_MEMORY_LIMIT", "1g"),
                    ("CUDA_DEVICE_MEMORY_LIMIT_0", "4g"),
                    ("CUDA_DEVICE_MEMORY_LIMIT_3", "3g"),
                ],
                Some(3072),
                None,
            ),
            // 0 is no limit, for memory and for time; so are 100 percent.
            (
                &[
                    ("CUDA_DEVICE_MEMORY_LIMIT", "0"),
                    ("CUDA_DEVICE_SM_LIMIT", "0"),
                ],
                None,
                None,
            ),
            (&[("CUDA_DEVICE_SM_LIMIT", "100")], None, None),
            (&[("CUDA_DEVICE_SM_LIMIT", "30")], None, Some(0.3)),
            (
                &[
                    ("CUDA_DEVICE_SM_LIMIT", "30"),
                    ("CUDA_DEVICE_SM_LIMIT_1", "50"),
                ],
                None,
                Some(0.5),
            ),
            (
                &[
                    ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=1G, 1=512MB"),
                    ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "12.5"),
                ],
                Some(512),
                Some(0.125),
            ),
        ] {
            let settings = in_force(vars);
            assert_eq!(
                (mib(&settings), settings.share_max),
                (memory, time),
                "{vars:?}"
            );
        }
    }

    #[test]
    fn our_variables_beat_hamis_and_those_beat_mpss() {
        let all = [
            ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10"),
            ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=1G"),
            ("CUDA_DEVICE_SM_LIMIT", "20"),
            ("CUDA_DEVICE_MEMORY_LIMIT_0", "2g"),
            ("SUBLET_MEM", "3GiB"),
            ("SUBLET_SHARE", "0.5"),
        ];
        let settings = in_force(&all);
        assert_eq!(
            (mib(&settings), settings.share, settings.share_max),
            (Some(3072), Some(0.5), None),
            "a share of ours, and no foreign limit that contradicts it"
        );
        let settings = in_force(&all[..4]);
        assert_eq!(
            (mib(&settings), settings.share_max),
            (Some(2048), Some(0.2))
        );
        let settings = in_force(&all[..2]);
        assert_eq!(
            (mib(&settings), settings.share_max),
            (Some(1024), Some(0.1))
        );
        let asked = read(&all).expect("variables");
        let winners: Vec<&str> = asked
            .said
            .iter()
            .filter(|said| asked.counts(said))
            .map(|said| said.variable.as_str())
            .collect();
        assert_eq!(winners, ["SUBLET_MEM", "SUBLET_SHARE"]);
        let flags = JobSettings {
            share: Some(0.9),
            ..JobSettings::default()
        };
        let settings = read(&all[..4]).expect("variables").below(&flags);
        assert_eq!((settings.share, settings.share_max), (Some(0.9), None));
    }

    #[test]
    fn of_several_of_one_library_it_is_known_which_count_for_nothing() {
        let asked = read(&[
            ("CUDA_DEVICE_MEMORY_LIMIT", "1g"),
            ("CUDA_DEVICE_MEMORY_LIMIT_0", "4g"),
            ("CUDA_DEVICE_MEMORY_LIMIT_3", "3g"),
            ("CUDA_DEVICE_SM_LIMIT", "100"),
            ("CUDA_DEVICE_SM_LIMIT_1", "50"),
        ])
        .expect("variables");
        let said: Vec<(&str, bool)> = asked
            .said
            .iter()
            .map(|said| (said.variable.as_str(), asked.counts(said)))
            .collect();
        assert_eq!(
            said,
            [
                ("CUDA_DEVICE_MEMORY_LIMIT_3", true),
                ("CUDA_DEVICE_MEMORY_LIMIT_0", false),
                ("CUDA_DEVICE_MEMORY_LIMIT", false),
                ("CUDA_DEVICE_SM_LIMIT_1", true),
                ("CUDA_DEVICE_SM_LIMIT", false),
            ]
        );
        let settings = asked.below(&JobSettings::default());
        assert_eq!(
            (mib(&settings), settings.share_max),
            (Some(3072), Some(0.5))
        );
        // The whole device is no limit, and then what loses against it is not one either.
        let settings = in_force(&[
            ("CUDA_DEVICE_SM_LIMIT_0", "100"),
            ("CUDA_DEVICE_SM_LIMIT", "30"),
        ]);
        assert_eq!(settings.share_max, None);
    }

    #[test]
    fn foreign_values_that_make_no_sense_are_named() {
        for (name, value) in [
            ("CUDA_DEVICE_MEMORY_LIMIT", "much"),
            ("CUDA_DEVICE_MEMORY_LIMIT_2", "1.5g"),
            ("CUDA_DEVICE_MEMORY_LIMIT", "g"),
            ("CUDA_DEVICE_MEMORY_LIMIT", "99999999999999g"),
            ("CUDA_DEVICE_SM_LIMIT", "half"),
            ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "1G"),
            ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=1G,x=2G"),
            ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "0"),
            ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "101"),
        ] {
            let error = read(&[(name, value)]).expect_err(value).to_string();
            assert!(error.contains(name) && error.contains(value), "{error}");
        }
    }

    #[test]
    fn every_variable_is_listed() {
        let all = variables();
        for name in [
            "SUBLET_MEM",
            "SUBLET_NAME",
            "CUDA_DEVICE_MEMORY_LIMIT_15",
            "CUDA_DEVICE_SM_LIMIT",
            MPS_MEMORY,
        ] {
            assert!(all.iter().any(|one| one == name), "{name}");
        }
    }

    #[test]
    fn every_setting_has_a_variable() {
        for setting in JobSettings::TABLE {
            let text = setting.about.kind.example.replace(['"', '[', ']'], "");
            let asked = read(&[(&setting.about.variable(), &text)]).expect("a variable");
            let (settings, name) = (asked.own, asked.name);
            assert!((setting.is_set)(&settings), "{}", setting.about.key);
            assert_eq!(name, None);
        }
        let Asked {
            own: settings,
            name,
            ..
        } = read(&[
            ("SUBLET_MEM", "50%"),
            ("SUBLET_SHARE", "25%"),
            ("SUBLET_DEVICE", "0, GPU-ff"),
            ("SUBLET_ITERATION_LAUNCHES", " 12 "),
            ("SUBLET_NAME", "train"),
        ])
        .expect("variables");
        assert_eq!(
            settings,
            JobSettings {
                mem: Some(MemLimit::Percent(50.0)),
                share: Some(0.25),
                device: Some(vec![
                    DeviceSelector::Index(0),
                    DeviceSelector::Uuid("GPU-ff".into())
                ]),
                iteration_launches: Some(12),
                ..JobSettings::default()
            }
        );
        assert_eq!(name.as_deref(), Some("train"));
        let empty = read(&[("SUBLET_MEM", "")]).expect("nothing").own;
        assert!(empty.is_empty());
    }

    #[test]
    fn a_bad_variable_is_named_with_its_value() {
        for (name, value) in [
            ("SUBLET_MEM", "20"),
            ("SUBLET_SHARE", "1.01"),
            ("SUBLET_SHARE", "half"),
            ("SUBLET_SHARE_MAX", "2"),
            ("SUBLET_GANG", "maybe"),
            ("SUBLET_DEADLINE", "soon"),
            ("SUBLET_CLASS", "best"),
            ("SUBLET_DEVICE", "0,x"),
            ("SUBLET_ON_ARBITER_LOSS", "die"),
            ("SUBLET_ON_REFUSAL", "freeze"),
            ("SUBLET_NAME", "a b"),
            ("SUBLET_EVICTABLE", "yes"),
            ("SUBLET_OVERFLOW", "disk"),
            ("SUBLET_HOST_MEMORY", "3"),
            ("SUBLET_ITERATION_LAUNCHES", "0"),
        ] {
            let error = read(&[(name, value)]).expect_err(value).to_string();
            let shown = value.rsplit(',').next().expect("an item");
            assert!(error.contains(name) && error.contains(shown), "{error}");
        }
    }
}
