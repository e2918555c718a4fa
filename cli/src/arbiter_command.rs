//! `sublet arbiter`: where it lives and by which rules, handed to the arbiter crate. The only place that knows both the
//! quota file's types and the arbiter's.

use std::env;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::anyhow;
use arbiter::{Ceiling, Options, Reload, Rules};
use control::Client;
use control::paths::{RuntimeDir, Surroundings};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::args::Arbiter;
use crate::config::{Config, DeviceRule, Places, ResidencyRule, TenantRule};
use crate::connect;
use crate::exit::Result;

/// Runs until the arbiter ends.
///
/// # Errors
/// A directory, file or variable that is wrong; another arbiter in the same place; the arbiter's own failure.
pub fn run(args: Arbiter) -> Result<()> {
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
    let config = Config::find(args.config.as_deref(), &Places::of_the_host())?;
    log_to_stderr(
        env::var("SUBLET_LOG")
            .ok()
            .filter(|filter| !filter.is_empty()),
    )?;
    dir.ensure(around.uid)?;
    // One that `sublet run` has started is a user's own and ends with its jobs: the file's hook is not for it.
    let mut flags = args.cluster.clone();
    if !args.embedded {
        flags = flags.or(&config.cluster);
    }
    crate::cluster_command::node::start(&flags, &dir)?;
    arbiter::run(Options {
        reload: Some(reload(args.config.clone())),
        ..options(dir, &args, config)
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
        Some(0) => None,
        Some(seconds) => Some(Duration::from_secs(seconds)),
    };
    let rules = rules(config);
    Options {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        idle_exit,
        devices: rules.devices,
        residency: rules.residency,
        ceilings: rules.ceilings,
        ..defaults
    }
}

/// What the file says to the daemon.
fn rules(config: Config) -> Rules {
    Rules {
        file: config.path,
        tenant_rules: config.tenants.len(),
        devices: config.devices.into_iter().map(device_rule).collect(),
        residency: residency_rule(config.residency),
        ceilings: Box::new(move |uid, user| ceiling(&config.tenants, uid, user)),
    }
}

fn residency_rule(rule: ResidencyRule) -> arbiter::ResidencyRule {
    let defaults = arbiter::ResidencyRule::default();
    arbiter::ResidencyRule {
        host_memory: rule.host_memory.or(defaults.host_memory),
        slice_over_switch: rule.slice_over_switch.unwrap_or(defaults.slice_over_switch),
    }
}

/// Looks for the file again as it was looked for at the start.
fn reload(named: Option<PathBuf>) -> Reload {
    // The daemon's working directory may not be the one that a relative path was meant in.
    let named = named.map(|path| std::path::absolute(&path).unwrap_or(path));
    Box::new(move || {
        Config::find(named.as_deref(), &Places::of_the_host())
            .map(rules)
            .map_err(|error| error.to_string())
    })
}

fn device_rule(rule: DeviceRule) -> arbiter::DeviceRule {
    arbiter::DeviceRule {
        device: rule.device,
        settings: rule.settings,
        mem_reserve: rule.mem_reserve,
    }
}

/// Of the first section that fits the login name, or the number where the host has no name for it.
fn ceiling(tenants: &[TenantRule], uid: u32, user: &str) -> Ceiling {
    let user = if user.is_empty() {
        &uid.to_string()
    } else {
        user
    };
    let rule = tenants.iter().find(|rule| rule.user.matches(user));
    rule.map_or_else(Ceiling::default, |rule| Ceiling {
        share_max: rule.share_max,
        mem_max: rule.mem_max,
    })
}

/// Life cycle and trouble by default; `SUBLET_LOG` is a level, or levels by module: `debug`, `info,arbiter::dispatch=trace`.
fn log_to_stderr(filter: Option<String>) -> anyhow::Result<()> {
    let filter = match filter {
        None => Targets::new().with_default(LevelFilter::INFO),
        Some(text) => text.parse().map_err(|error| {
            anyhow!("the environment variable SUBLET_LOG: `{text}` is no filter ({error}): write a level such as debug, or unset it")
        })?,
    };
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(false);
    tracing_subscriber::registry()
        .with(lines)
        .with(filter)
        .try_init()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use control::{DeviceSelector, DeviceSettings, MemLimit, SliceMode};

    use super::*;
    use crate::config::Pattern;

    fn args(embedded: bool, idle_exit: Option<u64>) -> Arbiter {
        Arbiter {
            embedded,
            idle_exit,
            runtime_dir: None,
            stop: false,
            config: None,
            cluster: Default::default(),
        }
    }

    fn dir() -> RuntimeDir {
        RuntimeDir::given("/somewhere".into()).unwrap()
    }

    #[test]
    fn only_an_embedded_one_ends_by_itself_unless_told() {
        let idle_exit = |embedded, seconds| {
            options(dir(), &args(embedded, seconds), Config::default()).idle_exit
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
        let tenant = |user: &str, share_max| TenantRule {
            user: Pattern::new(user),
            share_max: Some(share_max),
            mem_max: Some(MemLimit::Percent(50.0)),
        };
        let settings = DeviceSettings {
            mode: Some(SliceMode::Concurrent),
            quantum_max_us: Some(2500),
            ..DeviceSettings::default()
        };
        let config = Config {
            devices: vec![DeviceRule {
                device: Some(DeviceSelector::Index(1)),
                settings: settings.clone(),
                mem_reserve: Some(MemLimit::Bytes(7)),
            }],
            tenants: vec![tenant("al*", 0.7), tenant("1234", 0.2)],
            ..Config::default()
        };
        let options = options(dir(), &args(false, None), config);
        let rule = arbiter::DeviceRule {
            device: Some(DeviceSelector::Index(1)),
            settings,
            mem_reserve: Some(MemLimit::Bytes(7)),
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
    fn a_bad_filter_is_told() {
        let error = log_to_stderr(Some("lots=of=it".into()))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("`lots=of=it`") && error.contains("SUBLET_LOG"),
            "{error}"
        );
    }
}
