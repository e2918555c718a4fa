//! `sublet arbiter`: where it lives and by which rules, handed to the arbiter crate. The only place
//! that knows both the quota file's types and the arbiter's.

use std::env;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::anyhow;
use arbiter::{Ceiling, Handed, Layers, Options, Reload, Rules, Sections, Writer};
use control::Client;
use control::paths::{RuntimeDir, Surroundings};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::args::Arbiter;
use crate::config::{Config, ConfigErrors, DeviceRule, ResidencyRule, Sources, Subject};
use crate::connect;
use crate::dilation;
use crate::exit::Result;

/// Runs until the arbiter ends.
///
/// # Errors
/// A directory, file or variable that is wrong; another arbiter in the same place; the arbiter's
/// own failure.
pub fn run(args: Arbiter) -> Result<()> {
    let embedded = args.embedded;
    let served = start(args);
    if embedded && let Err(error) = &served {
        // The process that started this one waits for the socket; the log may be on a full disk.
        let words = format!("\n{}", error.line());
        let _ = nix::unistd::write(io::stdin(), words.as_bytes());
    }
    served
}

fn start(args: Arbiter) -> Result<()> {
    // Before anything is opened. What is handed over to a service is not for an arbiter that one of
    // its programs starts.
    let handed = if args.embedded || args.stop {
        Handed::default()
    } else {
        Handed::of_this_process()
    };
    let around = Surroundings::of_this_process();
    let dir = match &args.runtime_dir {
        Some(path) => RuntimeDir::given(path.clone())?,
        None if args.embedded || args.stop => RuntimeDir::find(&around)?,
        None => RuntimeDir::find_for_daemon(&around)?,
    };
    if args.stop {
        connect::ask(|| connect::existing(&dir), Client::shutdown)?;
        return Ok(());
    }
    arbiter::hold_signals()?;
    arbiter::dilate(dilation::asked()?);
    let sources = Sources::of_arbiter(args.config.as_deref(), args.config_dir.as_deref());
    let config = sources.load()?;
    dir.ensure(around.uid)?;
    // Before any thread is there: the others begin with what the first one has.
    let inherited = if args.embedded {
        arbiter::put_back_inherited()
    } else {
        Vec::new()
    };
    let log = LogFile {
        // What `sublet run` has opened for us; any other log is its owner's to keep small.
        path: args.embedded.then(|| dir.log_file()),
    };
    log_to_stderr(
        env::var("SUBLET_LOG")
            .ok()
            .filter(|filter| !filter.is_empty()),
        log,
    )?;
    for line in inherited {
        tracing::warn!("{line}");
    }
    let served = serve(&args, sources, config, dir, handed);
    if let Some(log) = LOG.get() {
        log.settle(LAST_LINES);
    }
    served
}

fn serve(
    args: &Arbiter,
    sources: Sources,
    config: Config,
    dir: RuntimeDir,
    handed: Handed,
) -> Result<()> {
    // One that `sublet run` has started is a user's own and ends with its jobs: the file's hook is
    // not for it.
    let mut flags = args.cluster.clone();
    if !args.embedded {
        flags = flags.or(&config.cluster);
    }
    crate::cluster_command::node::start(&flags, &dir)?;
    let mut api = args.api.clone();
    if !args.embedded {
        api = api.or(&config.api);
    }
    let api = api.listener()?;
    let watched = sources.clone();
    arbiter::run(Options {
        reload: Some(reload(sources)),
        watched: Some(Box::new(move || watched.watched())),
        handed,
        api,
        ..options(dir, args, config)
    })?;
    Ok(())
}

fn options(dir: RuntimeDir, args: &Arbiter, config: Config) -> Options {
    let defaults = if args.embedded {
        Options::embedded(dir)
    } else {
        Options::new(dir)
    };
    let idle_exit = match args.idle_exit {
        None => defaults.idle_exit,
        Some(Duration::ZERO) => None,
        after => after,
    };
    let rules = rules(config);
    Options {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        idle_exit,
        devices: rules.devices,
        residency: rules.residency,
        ceilings: rules.ceilings,
        jobs: rules.jobs,
        sections: rules.sections,
        job_processes: rules.job_processes,
        ..defaults
    }
}

/// What the files say to the daemon.
fn rules(mut config: Config) -> Rules {
    let devices = std::mem::take(&mut config.devices);
    let config = Arc::new(config);
    let of_users = Arc::clone(&config);
    Rules {
        sections: Sections {
            files: config.paths.clone(),
            fingerprint: config.fingerprint,
            users: config.users.len(),
            jobs: config.rules.len(),
            by_name: config.by_name(),
        },
        // CAST: 4096 at most.
        job_processes: config
            .limits
            .job_processes
            .map_or(arbiter::JOB_PROCESSES, |most| most as u32),
        devices: devices.into_iter().map(device_rule).collect(),
        residency: residency_rule(config.residency.clone()),
        ceilings: Box::new(move |uid, user| ceiling(&of_users, uid, user)),
        jobs: Box::new(move |subject| {
            let (set, caps) = config.layers_for(Subject {
                name: subject.name,
                command_line: subject.command,
                user: &user_text(subject.uid, subject.user),
                identity: subject.identity,
            });
            Layers { set, caps }
        }),
    }
}

fn residency_rule(rule: ResidencyRule) -> arbiter::ResidencyRule {
    let defaults = arbiter::ResidencyRule::default();
    arbiter::ResidencyRule {
        host_memory: rule.host_memory.or(defaults.host_memory),
        slice_over_switch: rule.slice_over_switch.unwrap_or(defaults.slice_over_switch),
    }
}

/// Looks for the files again as they were looked for at the start.
fn reload(sources: Sources) -> Reload {
    Box::new(move || {
        let wrong = |errors: ConfigErrors| errors.0.iter().map(ToString::to_string).collect();
        sources.load().map(rules).map_err(wrong)
    })
}

fn device_rule(rule: DeviceRule) -> arbiter::DeviceRule {
    arbiter::DeviceRule {
        device: rule.device,
        settings: rule.settings,
    }
}

/// Of the first section that fits the login name, or the number where the host has no name for it.
fn ceiling(config: &Config, uid: u32, user: &str) -> Ceiling {
    let rule = config.user(&user_text(uid, user));
    rule.map_or_else(Ceiling::default, |rule| Ceiling {
        share_max: rule.ceilings.share_max,
        mem_max: rule.ceilings.mem_max,
        // CAST: some hundreds at most.
        jobs_max: rule.ceilings.jobs_max.map(|most| most as usize),
        from: rule.from.clone(),
    })
}

fn user_text(uid: u32, user: &str) -> String {
    if user.is_empty() {
        uid.to_string()
    } else {
        user.to_owned()
    }
}

/// What is logged, on its way to standard error.
static LOG: OnceLock<Writer> = OnceLock::new();
/// TIMEOUT: what was logged last is worth so much waiting for a slow disk.
const LAST_LINES: Duration = Duration::from_secs(1);
/// Size at which the log of an arbiter that `sublet run` has started is put aside as
/// `arbiter.log.1`.
const ROTATE_BYTES: u64 = 8 << 20;

/// Standard error, and the file that it is, where that is ours.
struct LogFile {
    path: Option<PathBuf>,
}

impl LogFile {
    fn write(&mut self, line: &[u8]) -> io::Result<()> {
        if let Some(path) = &self.path
            && fs::metadata(path).is_ok_and(|found| found.len() > ROTATE_BYTES)
            && let Err(error) = rotate(path)
        {
            // Once is enough: it goes on as it is.
            self.path = None;
            writeln!(io::stderr(), "the log cannot be put aside: {error}")?;
        }
        io::stderr().write_all(line)
    }
}

/// Puts the log aside and goes on in a new one.
fn rotate(path: &Path) -> io::Result<()> {
    let mut aside = path.as_os_str().to_owned();
    aside.push(".1");
    fs::rename(path, aside)?;
    let new = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(path)?;
    nix::unistd::dup2_stdout(&new)?;
    nix::unistd::dup2_stderr(&new)?;
    Ok(())
}

/// One line of the log.
struct LogLine;

impl Write for LogLine {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if let Some(log) = LOG.get() {
            if let Some(lost) = log.take_lost() {
                let why = lost.why.map_or_else(String::new, |why| format!(": {why}"));
                log.push(format!("{} lines of this log are lost{why}\n", lost.lines).into_bytes());
            }
            log.push(line.to_vec());
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Life cycle and trouble by default; `SUBLET_LOG` is a level, or levels by module: `debug`,
/// `info,arbiter::dispatch=trace`.
fn log_to_stderr(filter: Option<String>, mut file: LogFile) -> anyhow::Result<()> {
    let filter = match filter {
        None => Targets::new().with_default(LevelFilter::INFO),
        Some(text) => text.parse().map_err(|error| {
            anyhow!("the environment variable SUBLET_LOG: `{text}` is no filter ({error}): write a level such as debug, or unset it")
        })?,
    };
    let sink = Box::new(move |line: &[u8]| file.write(line));
    // The loop says what it does and does not wait for a disk that takes it.
    let writer = Writer::start("log", sink)?;
    let _ = LOG.set(writer);
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(|| LogLine)
        .with_ansi(false);
    tracing_subscriber::registry()
        .with(lines)
        .with(filter)
        .try_init()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use control::{DeviceSelector, DeviceSettings, MemLimit, SliceMode, Span};

    use super::*;
    use crate::config::{Pattern, UserCeilings, UserRule};

    fn args(embedded: bool, idle_exit: Option<Duration>) -> Arbiter {
        Arbiter {
            embedded,
            idle_exit,
            runtime_dir: None,
            stop: false,
            config: None,
            config_dir: None,
            cluster: Default::default(),
            api: Default::default(),
        }
    }

    fn dir() -> RuntimeDir {
        RuntimeDir::given("/somewhere".into()).unwrap()
    }

    #[test]
    fn only_an_embedded_one_ends_by_itself_unless_asked() {
        let idle_exit = |embedded, seconds: Option<u64>| {
            let after = seconds.map(Duration::from_secs);
            options(dir(), &args(embedded, after), Config::default()).idle_exit
        };
        assert_eq!(idle_exit(false, None), None);
        assert_eq!(
            idle_exit(true, None),
            Some(Duration::from_secs(10)),
            "as the help says"
        );
        assert_eq!(idle_exit(true, Some(0)), None);
        assert_eq!(idle_exit(false, Some(7)), Some(Duration::from_secs(7)));
    }

    #[test]
    fn the_file_s_rules_reach_the_arbiter() {
        let user = |name: &str, share_max| UserRule {
            user: vec![Pattern::new(name)],
            ceilings: UserCeilings {
                share_max: Some(share_max),
                mem_max: Some(MemLimit::Percent(50.0)),
                jobs_max: Some(3),
            },
            from: "f:1:1".into(),
        };
        let settings = DeviceSettings {
            mode: Some(SliceMode::Concurrent),
            quantum: Some(Span::from_micros(2500)),
            mem_reserve: Some(MemLimit::Bytes(7)),
            ..DeviceSettings::default()
        };
        let config = Config {
            devices: vec![DeviceRule {
                device: Some(DeviceSelector::Index(1)),
                settings: settings.clone(),
            }],
            users: vec![user("al*", 0.7), user("1234", 0.2)],
            ..Config::default()
        };
        let options = options(dir(), &args(false, None), config);
        let rule = arbiter::DeviceRule {
            device: Some(DeviceSelector::Index(1)),
            settings,
        };
        assert_eq!(options.devices, [rule]);
        let share_max = |uid, user| (options.ceilings)(uid, user).share_max;
        assert_eq!(share_max(1, "alice"), Some(0.7));
        assert_eq!(share_max(1, "bob"), None);
        assert_eq!(
            share_max(1234, ""),
            Some(0.2),
            "by number where there is no name"
        );
        assert_eq!(
            (options.ceilings)(1, "alice").mem_max,
            Some(MemLimit::Percent(50.0))
        );
    }

    #[test]
    fn a_bad_filter_is_reported() {
        let error = log_to_stderr(Some("lots=of=it".into()), LogFile { path: None })
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("`lots=of=it`") && error.contains("SUBLET_LOG"),
            "{error}"
        );
    }
}
