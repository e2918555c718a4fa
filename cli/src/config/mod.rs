//! The quota files: TOML text to domain types, which files there are, and which rules a job gets.
//!
//! It knows nothing of flags or the environment (`settings` merges those), nor of who enforces
//! what: `sublet run` reads its user's own file, the arbiter reads those of the host.

mod error;
mod files;
mod kinds;
pub mod markdown;
mod parse;
mod pattern;
pub mod schema;
pub mod sections;

use std::path::{Path, PathBuf};

use control::place::Identity;
use control::{DeviceSelector, DeviceSettings, JobSettings, Layer, Settings};

pub use error::{ConfigError, ConfigErrors, Source};
pub(crate) use files::read_text;
pub use files::{Places, Sources};
pub use parse::scalar;
pub use pattern::Pattern;
pub use sections::{ApiRule, ClusterRule, JobMatch, Limits, ResidencyRule, UserCeilings};

/// One quota file or several, checked.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Config {
    /// Where it was read from; empty for no file at all.
    pub paths: Vec<PathBuf>,
    /// Of what was read: differs where a text does.
    pub fingerprint: u64,
    /// A line each for a place that could not be looked at, and was not named.
    pub passed_over: Vec<String>,
    pub defaults: Vec<JobRule>,
    pub devices: Vec<DeviceRule>,
    pub residency: ResidencyRule,
    pub limits: Limits,
    pub cluster: ClusterRule,
    pub api: ApiRule,
    pub users: Vec<UserRule>,
    pub rules: Vec<JobRule>,
}

/// `[[rule]]`, and `[defaults]`, which are for every job.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct JobRule {
    pub matches: JobMatch,
    /// What a job gets that says nothing else.
    pub set: JobSettings,
    /// What a job gets at the most.
    pub cap: JobSettings,
    /// `file:line:column`
    pub from: String,
}

/// `[[device]]`: how the arbiter runs a device.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DeviceRule {
    /// `None`: every device.
    pub device: Option<DeviceSelector>,
    pub settings: DeviceSettings,
}

/// `[[user]]`: what one user's jobs may have together.
#[derive(Debug, Clone, PartialEq)]
pub struct UserRule {
    pub user: Vec<Pattern>,
    pub ceilings: UserCeilings,
    /// `file:line:column`
    pub from: String,
}

/// What rules are matched against.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    pub name: &'a str,
    /// As typed, words joined by one space.
    pub command_line: &'a str,
    /// The number of a user without a login name.
    pub user: &'a str,
    pub identity: &'a Identity,
}

/// How far a rule is for a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Match {
    No,
    /// By what the job says of itself: it gets less by that, and never more.
    Claimed,
    Yes,
}

impl Config {
    /// What the rules that match a job set, the strongest first, and their caps.
    pub fn layers_for(&self, subject: Subject<'_>) -> (Vec<Layer>, Vec<Layer>) {
        let (mut set, mut caps) = (Vec::new(), Vec::new());
        for rule in self.defaults.iter().chain(&self.rules) {
            let matched = rule.matches(subject);
            let layer = |settings: &JobSettings| Layer {
                from: rule.from.clone(),
                settings: settings.clone(),
            };
            if matched == Match::Yes && !rule.set.is_empty() {
                set.insert(0, layer(&rule.set));
            }
            if matched != Match::No && !rule.cap.is_empty() {
                caps.push(layer(&rule.cap));
            }
        }
        (set, caps)
    }

    /// The section for a user.
    pub fn user(&self, user: &str) -> Option<&UserRule> {
        self.users.iter().find(|rule| any(&rule.user, user))
    }

    /// Sections that go by login names.
    pub fn by_name(&self) -> usize {
        let rules = self.rules.iter().filter(|rule| rule.matches.user.is_some());
        self.users.len() + rules.count()
    }

    /// The files of one folder, this one and a later one: the later one has the last word.
    fn then(self, later: Self) -> Self {
        Self {
            paths: [self.paths, later.paths].concat(),
            fingerprint: later.fingerprint,
            passed_over: [self.passed_over, later.passed_over].concat(),
            defaults: [self.defaults, later.defaults].concat(),
            // Of these the first that matches counts.
            devices: [later.devices, self.devices].concat(),
            users: [later.users, self.users].concat(),
            residency: later.residency.or(&self.residency),
            limits: later.limits.or(&self.limits),
            cluster: later.cluster.or(&self.cluster),
            api: later.api.or(&self.api),
            rules: [self.rules, later.rules].concat(),
        }
    }

    /// The host's files, and one of a user of it: what that says of jobs comes last, and of
    /// anything else only where the host says nothing.
    fn and_own(self, own: Self) -> Self {
        Self {
            paths: [self.paths, own.paths].concat(),
            fingerprint: own.fingerprint,
            passed_over: [self.passed_over, own.passed_over].concat(),
            defaults: self.defaults,
            devices: [self.devices, own.devices].concat(),
            users: [self.users, own.users].concat(),
            residency: self.residency.or(&own.residency),
            limits: self.limits.or(&own.limits),
            cluster: self.cluster.or(&own.cluster),
            api: self.api.or(&own.api),
            rules: [self.rules, own.defaults, own.rules].concat(),
        }
    }

    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`ConfigErrors`]: unreadable, no TOML, or with a key or value that makes no sense.
    pub fn load(path: &Path) -> Result<Self, ConfigErrors> {
        files::load(path, None)
    }

    /// The file named by `--config` or `$SUBLET_CONFIG`, which must exist; else the first that
    /// exists of `./sublet.toml` and `$XDG_CONFIG_HOME/sublet/config.toml`; else the empty one.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn find(flag: Option<&Path>, places: &Places) -> Result<Self, ConfigErrors> {
        let named = flag.or(places.variable.as_deref());
        if let Some(path) = named {
            return Self::load(path);
        }
        files::first_of(&places.searched, None)
    }
}

fn any(patterns: &[Pattern], text: &str) -> bool {
    patterns.iter().any(|pattern| pattern.matches(text))
}

impl JobRule {
    fn matches(&self, subject: Subject<'_>) -> Match {
        let fits = |patterns: &Option<Vec<Pattern>>, texts: &[&str]| {
            patterns
                .as_ref()
                .is_none_or(|patterns| texts.iter().any(|text| any(patterns, text)))
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
        let Identity {
            gids,
            cgroups,
            place,
            slurm_account,
            claimed_account,
        } = subject.identity;
        let cgroups: Vec<&str> = cgroups.iter().map(String::as_str).collect();
        // "*" is for a container that there is.
        let container: &[&str] = match place.container.as_str() {
            "" => &[],
            container => &[container],
        };
        let wanted = &self.matches;
        let fits_all = fits(&wanted.name, &[subject.name])
            && fits(&wanted.user, &[subject.user])
            && fits(&wanted.command, &forms)
            && fits(&wanted.cgroup, &cgroups)
            && fits(&wanted.container, container)
            && wanted
                .group
                .as_ref()
                .is_none_or(|groups| groups.iter().any(|gid| gids.contains(gid)));
        if !fits_all {
            return Match::No;
        }
        if wanted.slurm_account.is_none() {
            return Match::Yes;
        }
        for (account, matched) in [
            (slurm_account, Match::Yes),
            (claimed_account, Match::Claimed),
        ] {
            if !account.is_empty() {
                let fits = fits(&wanted.slurm_account, &[account]);
                return if fits { matched } else { Match::No };
            }
        }
        Match::No
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use control::MemLimit;

    use super::*;

    fn config(text: &str) -> Config {
        parse::parse(text, "sublet.toml").unwrap()
    }

    /// What a job of this user gets that asks for nothing.
    fn given(config: &Config, subject: Subject<'_>) -> JobSettings {
        let (set, caps) = config.layers_for(subject);
        control::in_force(&JobSettings::default(), &set, &caps, &[], 0).settings
    }

    fn subject<'a>(name: &'a str, user: &'a str, identity: &'a Identity) -> Subject<'a> {
        Subject {
            name,
            command_line: "x",
            user,
            identity,
        }
    }

    #[test]
    fn every_rule_that_matches_counts_and_a_later_one_beats_an_earlier_one() {
        let config = config(
            r#"
            [defaults]
            mem = "1GiB"
            share = 0.1
            [[rule]]
            match = { name = "train*", user = ["alice", "a?"] }
            set.share = 0.2
            [[rule]]
            match.name = "train-big"
            set = { share = 0.3, mem = "2GiB" }
            [[rule]]
            match.user = "visitor*"
            cap.mem = "1MiB"
            "#,
        );
        let nobody = Identity::default();
        let of = |name, user| {
            let given = given(&config, subject(name, user, &nobody));
            (given.share, given.mem.map(|mem| mem.to_string()))
        };
        let is = |share, mem: &str| (Some(share), Some(mem.to_owned()));
        assert_eq!(of("train-x", "alice"), is(0.2, "1GiB"));
        assert_eq!(of("train-big", "ab"), is(0.3, "2GiB"));
        assert_eq!(of("eval", "alice"), is(0.1, "1GiB"));
        assert_eq!(of("train-big", "visitor-7"), is(0.3, "1MiB"));
        let (set, caps) = config.layers_for(subject("train-big", "visitor", &nobody));
        let from: Vec<&str> = set
            .iter()
            .chain(&caps)
            .map(|one| one.from.as_str())
            .collect();
        assert_eq!(
            from,
            ["sublet.toml:8:13", "sublet.toml:2:13", "sublet.toml:11:13"]
        );
    }

    #[test]
    fn a_rule_goes_by_groups_control_groups_containers_and_accounts() {
        let id = "0123456789abcdef".repeat(4);
        let text = format!(
            "[[rule]]\nmatch.group = [7, 8]\nset.mem = \"1GiB\"\n\
             [[rule]]\nmatch.cgroup = \"/user.slice/*\"\nset.mem = \"2GiB\"\n\
             [[rule]]\nmatch.container = \"*\"\nset.mem = \"3GiB\"\n\
             [[rule]]\nmatch.container = \"{id}\"\nset.mem = \"4GiB\"\n\
             [[rule]]\nmatch.slurm_account = \"phys*\"\nset.mem = \"5GiB\"\n\
             [[rule]]\nmatch.slurm_account = \"student\"\nset.mem = \"8GiB\"\ncap.mem = \"6GiB\"\n"
        );
        let config = config(&text);
        let mem = |change: fn(&mut Identity, &str)| {
            let mut identity = Identity::default();
            change(&mut identity, &id);
            given(&config, subject("a", "u", &identity)).mem
        };
        let gib = |count: u64| Some(MemLimit::Bytes(count << 30));
        assert_eq!(mem(|_, _| ()), None);
        assert_eq!(mem(|who, _| who.gids = vec![3, 8]), gib(1));
        assert_eq!(
            mem(|who, _| who.cgroups = vec!["/".into(), "/user.slice/x".into()]),
            gib(2)
        );
        assert_eq!(mem(|who, _| who.place.container = "ab".repeat(32)), gib(3));
        assert_eq!(mem(|who, id| who.place.container = id.into()), gib(4));
        assert_eq!(mem(|who, _| who.slurm_account = "physics".into()), gib(5));
        assert_eq!(mem(|who, _| who.claimed_account = "physics".into()), None);
        assert_eq!(mem(|who, _| who.slurm_account = "student".into()), gib(6));
        let claimed = mem(|who, _| who.claimed_account = "student".into());
        assert_eq!(claimed, gib(6), "a claim is good for less");
        let both = mem(|who, _| {
            who.slurm_account = "physics".into();
            who.claimed_account = "student".into();
        });
        assert_eq!(both, gib(5), "what is known needs no claim");
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
                    command: Some(vec![Pattern::new(pattern)]),
                    ..JobMatch::default()
                },
                ..JobRule::default()
            };
            let nobody = Identity::default();
            let subject = Subject {
                command_line: line,
                ..subject("n", "u", &nobody)
            };
            let matched = rule.matches(subject) == Match::Yes;
            assert_eq!(matched, fits, "{pattern} {line}");
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
            (found.paths, found.defaults[0].set.share),
            (vec![at("2.toml")], Some(0.2))
        );
        fs::write(at("1.toml"), "[defaults]\nshare = 0.1\n").unwrap();
        assert_eq!(
            Config::find(None, &places).unwrap().defaults[0].set.share,
            Some(0.1)
        );
        assert_eq!(
            Config::find(Some(&at("2.toml")), &places).unwrap().defaults[0]
                .set
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
        assert!(!config.devices.is_empty() && !config.users.is_empty());
        assert!(!config.rules.is_empty() && !config.defaults.is_empty());
    }
}
