//! The quota file: TOML text to domain types, and which section a job gets.
//!
//! It knows nothing of flags or the environment (`settings` merges those), nor of who enforces
//! what: job sections and defaults are used by `sublet run`, device and tenant sections by the
//! arbiter.

mod error;
mod kinds;
pub mod markdown;
mod parse;
mod pattern;
pub mod schema;
pub mod sections;

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use control::{DeviceSelector, DeviceSettings, JobSettings, Settings};

pub use error::{ConfigError, Source};
pub use parse::scalar;
pub use pattern::Pattern;
pub use sections::{ClusterRule, JobMatch, Limits, ResidencyRule, TenantCeilings};

/// A quota file, checked.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Config {
    /// Where it was read from; `None` for no file at all.
    pub path: Option<PathBuf>,
    pub defaults: JobSettings,
    pub devices: Vec<DeviceRule>,
    pub residency: ResidencyRule,
    pub limits: Limits,
    pub cluster: ClusterRule,
    pub tenants: Vec<TenantRule>,
    pub jobs: Vec<JobRule>,
}

/// `[[job]]`: settings for the jobs that match all its patterns.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct JobRule {
    pub matches: JobMatch,
    pub settings: JobSettings,
}

/// `[[device]]`: how the arbiter runs a device.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DeviceRule {
    /// `None`: every device.
    pub device: Option<DeviceSelector>,
    pub settings: DeviceSettings,
}

/// `[[tenant]]`: what one user's jobs may have together.
#[derive(Debug, Clone, PartialEq)]
pub struct TenantRule {
    pub user: Pattern,
    pub ceilings: TenantCeilings,
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
        fits(&self.matches.name, subject.name)
            && fits(&self.matches.user, subject.user)
            && forms
                .into_iter()
                .any(|form| fits(&self.matches.command, form))
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
    use control::MemLimit;

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
                matches: JobMatch {
                    command: Some(Pattern::new(pattern)),
                    ..JobMatch::default()
                },
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
