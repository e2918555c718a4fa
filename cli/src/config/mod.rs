//! The quota file: TOML text to domain types, and which section a job gets.
//!
//! It knows nothing of flags or the environment (`settings` merges those), nor of who enforces
//! what: job sections and defaults are used by `sublet run`, device and tenant sections by the
//! arbiter.

mod error;
pub mod keys;
mod parse;
mod pattern;
pub mod schema;
mod value;

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use control::{Class, DeviceSelector, DeviceSettings, FailMode, MemLimit, OnRefusal, Overflow};

pub use error::ConfigError;
pub use pattern::Pattern;

/// A quota file, checked.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Config {
    /// Where it was read from; `None` for no file at all.
    pub path: Option<PathBuf>,
    pub defaults: JobSettings,
    pub devices: Vec<DeviceRule>,
    pub residency: ResidencyRule,
    /// `[limits]`: processes of one job that use a device at the same time.
    pub job_processes: Option<u32>,
    pub cluster: ClusterRule,
    pub tenants: Vec<TenantRule>,
    pub jobs: Vec<JobRule>,
}

/// What a job gets where neither flag nor environment says otherwise.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct JobSettings {
    pub mem: Option<MemLimit>,
    pub share: Option<f64>,
    pub share_min: Option<f64>,
    pub share_max: Option<f64>,
    pub class: Option<Class>,
    pub devices: Option<Vec<DeviceSelector>>,
    pub gang: Option<bool>,
    /// From the start of the job.
    pub deadline: Option<Duration>,
    /// Device time that its work takes in all.
    pub work: Option<Duration>,
    pub on_arbiter_loss: Option<FailMode>,
    pub on_refusal: Option<OnRefusal>,
    /// Its memory may leave the device.
    pub evictable: Option<bool>,
    pub overflow: Option<Overflow>,
    pub host_memory: Option<MemLimit>,
}

impl JobSettings {
    /// These, with `other`'s where these say nothing.
    #[must_use]
    pub fn or(self, other: &Self) -> Self {
        Self {
            mem: self.mem.or(other.mem),
            share: self.share.or(other.share),
            share_min: self.share_min.or(other.share_min),
            share_max: self.share_max.or(other.share_max),
            class: self.class.or(other.class),
            devices: self.devices.or_else(|| other.devices.clone()),
            gang: self.gang.or(other.gang),
            deadline: self.deadline.or(other.deadline),
            work: self.work.or(other.work),
            on_arbiter_loss: self.on_arbiter_loss.or(other.on_arbiter_loss),
            on_refusal: self.on_refusal.or(other.on_refusal),
            evictable: self.evictable.or(other.evictable),
            overflow: self.overflow.or(other.overflow),
            host_memory: self.host_memory.or(other.host_memory),
        }
    }
}

/// What is wrong with settings in the light of each other: which one, and a sentence that goes on
/// from its value.
pub type Contradiction = (&'static str, String);

impl JobSettings {
    /// What becomes of a process that cannot be governed: a limit that was asked for is in force,
    /// or the process does not start.
    pub fn on_refusal(&self, strict: bool) -> OnRefusal {
        let is_limited = self.mem.is_some() || self.share_max.is_some() || strict;
        self.on_refusal.unwrap_or(if is_limited {
            OnRefusal::Closed
        } else {
            OnRefusal::Open
        })
    }

    /// # Errors
    /// [`Contradiction`]: bounds that the share does not fit, a deadline that cannot be held, host
    /// memory for a job that stays on its devices.
    pub fn check(&self) -> Result<(), Contradiction> {
        if let (Some(min), Some(share)) = (self.share_min, self.share)
            && min > share
        {
            let message = format!("more than the share of {share}: write {share} or less");
            return Err(("share_min", message));
        }
        for (name, least) in [("share", self.share), ("share_min", self.share_min)] {
            if let (Some(max), Some(least)) = (self.share_max, least)
                && max < least
            {
                let message = format!("less than the {name} of {least}: write {least} or more");
                return Err(("share_max", message));
            }
        }
        if self.evictable != Some(true) {
            let without = |what: &str| {
                format!("no use without `evictable`: only an evictable job's memory {what}")
            };
            if self.overflow == Some(Overflow::Host) {
                return Err(("overflow", without("can live in host memory")));
            }
            if self.host_memory.is_some() {
                return Err(("host_memory", without("leaves the device")));
            }
        }
        match (self.deadline, self.work) {
            (Some(_), None) => {
                let message = "no use without `work`, the device time that the job takes: add it, or leave the deadline out";
                Err(("deadline", message.into()))
            }
            (Some(deadline), Some(work)) if work > deadline => {
                let message = format!(
                    "shorter than the work of {0}: write {0} or more",
                    control::short_span(work)
                );
                Err(("deadline", message))
            }
            _ => Ok(()),
        }
    }
}

/// `[[job]]`: settings for the jobs that match all its patterns.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct JobRule {
    pub name: Option<Pattern>,
    pub command: Option<Pattern>,
    pub user: Option<Pattern>,
    pub settings: JobSettings,
}

/// `[[device]]`: how the arbiter runs a device.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DeviceRule {
    /// `None`: every device.
    pub device: Option<DeviceSelector>,
    pub settings: DeviceSettings,
    /// Kept from every quota.
    pub mem_reserve: Option<MemLimit>,
}

/// `[residency]`: what the host gives for memory that is not on its devices.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ResidencyRule {
    /// Of all jobs together.
    pub host_memory: Option<MemLimit>,
    /// How many times longer than the switch before it a job stays at the least.
    pub slice_over_switch: Option<f64>,
}

/// `[cluster]`: the hook that the arbiter reports to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClusterRule {
    /// Its address; `None`: there is none.
    pub url: Option<String>,
    pub token_file: Option<PathBuf>,
    /// What this node is called there.
    pub node: Option<String>,
    /// As whom its jobs run.
    pub user: Option<String>,
    /// Where they write.
    pub dir: Option<PathBuf>,
    /// Variables of the arbiter's environment that they get.
    pub env: Vec<String>,
    /// Offer the simulated GPU.
    pub sim: Option<bool>,
}

/// `[[tenant]]`: what one user's jobs may have together.
#[derive(Debug, Clone, PartialEq)]
pub struct TenantRule {
    pub user: Pattern,
    pub share_max: Option<f64>,
    pub mem_max: Option<MemLimit>,
}

/// What job sections are matched against.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    pub name: &'a str,
    /// As typed, words joined by one space.
    pub command_line: &'a str,
    pub user: &'a str,
}

impl Config {
    /// The settings of the first job section that matches, filled up from `[defaults]`.
    pub fn settings_for(&self, subject: Subject<'_>) -> JobSettings {
        let rule = self.jobs.iter().find(|rule| rule.matches(subject));
        rule.map(|rule| rule.settings.clone())
            .unwrap_or_default()
            .or(&self.defaults)
    }

    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`ConfigError`]: unreadable, no TOML, or with a key or value that makes no sense.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path).map_err(|error| ConfigError::Unreadable {
            path: path.to_owned(),
            error,
        })?;
        let config = parse::parse(&text, &path.display().to_string())?;
        Ok(Self {
            path: Some(path.to_owned()),
            ..config
        })
    }

    /// The file named by `--config` or `$SUBLET_CONFIG`, which must exist; else the first that
    /// exists of `./sublet.toml`, `$XDG_CONFIG_HOME/sublet/sublet.toml` and
    /// `/etc/sublet/sublet.toml`; else the empty one.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn find(flag: Option<&Path>, places: &Places) -> Result<Self, ConfigError> {
        let named = flag.or(places.variable.as_deref());
        if let Some(path) = named {
            return Self::load(path);
        }
        for path in &places.searched {
            match Self::load(path) {
                Err(ConfigError::Unreadable { error, .. })
                    if matches!(
                        error.kind(),
                        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                    ) => {}
                found => return found,
            }
        }
        Ok(Self::default())
    }
}

impl JobRule {
    fn matches(&self, subject: Subject<'_>) -> bool {
        let fits = |pattern: &Option<Pattern>, text: &str| {
            pattern.as_ref().is_none_or(|pattern| pattern.matches(text))
        };
        // The line and the program in it, with and without the program's directory.
        let line = subject.command_line;
        let program_bytes = line.find(' ').unwrap_or(line.len());
        let base_at = line[..program_bytes].rfind('/').map_or(0, |at| at + 1);
        let forms = [
            line,
            &line[base_at..],
            &line[..program_bytes],
            &line[base_at..program_bytes],
        ];
        fits(&self.name, subject.name)
            && fits(&self.user, subject.user)
            && forms.into_iter().any(|form| fits(&self.command, form))
    }
}

/// Where files are looked for.
#[derive(Debug, Clone, Default)]
pub struct Places {
    /// `$SUBLET_CONFIG`
    pub variable: Option<PathBuf>,
    pub searched: Vec<PathBuf>,
}

impl Places {
    /// For `sublet run`, which also looks into the working directory.
    pub fn of_a_user() -> Self {
        let mut places = Self::of_the_host();
        places.searched.insert(0, "sublet.toml".into());
        places
    }

    /// For the arbiter, which serves more than one directory.
    pub fn of_the_host() -> Self {
        let var = |name: &str| std::env::var_os(name).filter(|value: &OsString| !value.is_empty());
        let home = var("XDG_CONFIG_HOME")
            .map(PathBuf::from)
            .filter(|dir| dir.is_absolute())
            .or_else(|| Some(PathBuf::from(var("HOME")?).join(".config")));
        Self {
            variable: var("SUBLET_CONFIG").map(PathBuf::from),
            searched: home
                .into_iter()
                .map(|dir| dir.join("sublet/sublet.toml"))
                .chain(["/etc/sublet/sublet.toml".into()])
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        parse::parse(text, "sublet.toml").unwrap()
    }

    fn share(config: &Config, name: &str, command_line: &str, user: &str) -> Option<f64> {
        let subject = Subject {
            name,
            command_line,
            user,
        };
        config.settings_for(subject).share
    }

    #[test]
    fn the_first_job_section_that_matches_wins_whole() {
        let config = config(
            r#"
            [defaults]
            mem = "1GiB"
            share = 0.1
            [[job]]
            name = "train*"
            user = "alice"
            share = 0.2
            [[job]]
            name = "train-big"
            share = 0.3
            mem = "2GiB"
            "#,
        );
        assert_eq!(share(&config, "train-big", "x", "alice"), Some(0.2));
        assert_eq!(share(&config, "train-big", "x", "bob"), Some(0.3));
        assert_eq!(share(&config, "eval", "x", "bob"), Some(0.1));
        let subject = Subject {
            name: "train-big",
            command_line: "x",
            user: "alice",
        };
        assert_eq!(
            config.settings_for(subject).mem,
            Some(MemLimit::Bytes(1 << 30)),
            "defaults fill up, later sections do not"
        );
    }

    #[test]
    fn a_command_pattern_fits_the_line_the_program_or_its_base_name() {
        for (pattern, line, fits) in [
            ("python*train.py*", "/usr/bin/python train.py --x", true),
            ("*train.py*", "/usr/bin/python train.py --x", true),
            ("python", "/usr/bin/python train.py", true),
            ("/usr/bin/python", "/usr/bin/python train.py", true),
            ("train.py", "/usr/bin/python train.py", false),
            ("pytho?", "python", true),
        ] {
            let rule = JobRule {
                command: Some(Pattern::new(pattern)),
                ..JobRule::default()
            };
            let subject = Subject {
                name: "n",
                command_line: line,
                user: "u",
            };
            assert_eq!(rule.matches(subject), fits, "{pattern} {line}");
        }
    }

    #[test]
    fn files_are_searched_in_order_and_a_named_one_must_exist() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let mut places = Places {
            variable: None,
            searched: vec![at("1.toml"), at("2.toml")],
        };
        assert_eq!(Config::find(None, &places).unwrap(), Config::default());
        fs::write(at("2.toml"), "[defaults]\nshare = 0.2\n").unwrap();
        let found = Config::find(None, &places).unwrap();
        assert_eq!(
            (found.path, found.defaults.share),
            (Some(at("2.toml")), Some(0.2))
        );
        fs::write(at("1.toml"), "[defaults]\nshare = 0.1\n").unwrap();
        assert_eq!(
            Config::find(None, &places).unwrap().defaults.share,
            Some(0.1)
        );
        assert_eq!(
            Config::find(Some(&at("2.toml")), &places)
                .unwrap()
                .defaults
                .share,
            Some(0.2)
        );
        places.variable = Some(at("3.toml"));
        let error = Config::find(None, &places).unwrap_err().to_string();
        assert!(error.contains("3.toml"), "{error}");
    }

    #[test]
    fn the_example_is_a_good_file() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/sublet.toml");
        let config = Config::load(Path::new(path)).unwrap();
        assert!(!config.devices.is_empty() && !config.tenants.is_empty());
        assert!(!config.jobs.is_empty() && config.defaults != JobSettings::default());
    }
}
