//! `sublet run`: settings, driver, arbiter, registration, environment, and then the command in this
//! very process.
//!
//! The order is the promise: whatever can be wrong is found out before the arbiter hears of the
//! job, and the arbiter has agreed before the command starts. The job's process is ours (`exec`),
//! so its exit code, its signals and its terminal need no forwarding.

pub mod command;
pub mod driver;
pub mod elf;
pub mod environment;
pub mod exec;
pub mod install;
mod ld_cache;
mod nested;
mod watch;

use std::collections::BTreeMap;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, anyhow, bail};
use control::environment::asked as environment_asks;
use control::paths::{RuntimeDir, Surroundings};
use control::place::Identity;
use control::{Client, ClientError, JobSpec, OwnFile, Registered};

use crate::args::Run;
use crate::config::{Config, Places, Subject};
use crate::exit::{Failure, NOT_EXECUTABLE, NOT_FOUND, Result};
use crate::{connect, dilation, unmanaged};
use command::CommandError;
use driver::{Driver, Wish};
use install::Install;

/// Returns only where the command was not started.
pub fn run(args: Run) -> Failure {
    let instead = [&args.refused[..], &args.command[..]].concat();
    let refused = !args.refused.is_empty();
    let failure = start(args);
    if refused {
        become_refused(&instead, &failure)
    } else {
        failure
    }
}

fn start(args: Run) -> Failure {
    match prepare(args) {
        Ok(ready) => {
            say_what_is_weaker(&ready);
            if let Some((dir, job, strict)) = &ready.limited {
                watch::stay_behind(dir, *job, *strict);
            }
            exec::replace_this_process(&ready.program, &ready.words, &ready.environment)
        }
        Err(failure) => failure,
    }
}

/// Becomes the command of `--refused`, which tells its engine why. Returns only where that cannot
/// be done.
fn become_refused(words: &[OsString], failure: &Failure) -> Failure {
    let Some(program) = words.first() else {
        return anyhow!("--refused has no words").into();
    };
    let line = failure.line();
    let reason = line.strip_prefix("sublet: ").unwrap_or(&line);
    let mut environment: BTreeMap<OsString, OsString> = env::vars_os().collect();
    // A reason may quote what was given, and no variable holds a zero byte.
    environment.insert("SUBLET_REFUSED".into(), reason.replace('\0', "").into());
    exec::replace_this_process(Path::new(program), words, &environment)
}

/// A line each on stderr; where that is gone there is nobody to tell.
fn say_what_is_weaker(ready: &Ready) {
    let mut stderr = io::stderr().lock();
    if let Some(simulated) = ready.driver.simulated {
        let _ = writeln!(stderr, "sublet: simulated GPU ({})", simulated.reason());
    }
    for line in &ready.said {
        let _ = writeln!(stderr, "sublet: {line}");
    }
    if let Some(reason) = command::out_of_reach(&ready.program) {
        let _ = writeln!(
            stderr,
            "sublet: warning: {reason}, so it is outside quota and share; programs that it starts may be inside"
        );
    }
}

/// Everything that exec needs, with the job registered.
struct Ready {
    driver: Driver,
    program: PathBuf,
    words: Vec<OsString>,
    environment: BTreeMap<OsString, OsString>,
    /// A line each for what the user is to know.
    said: Vec<String>,
    /// The job has limits: where its arbiter is, its number, and whether it is strict.
    limited: Option<(RuntimeDir, u64, bool)>,
}

/// What is opened at a time before the command starts, in the worst case but that of an arbiter to
/// be started.
const DESCRIPTORS: usize = 3;

/// An error where there are too few descriptors: whatever could not be opened would be reported as
/// missing or broken.
fn enough_descriptors() -> anyhow::Result<()> {
    let opened: io::Result<Vec<File>> = (0..DESCRIPTORS).map(|_| File::open("/dev/null")).collect();
    match opened {
        Err(error) if error.raw_os_error() == Some(nix::libc::EMFILE) => bail!(
            "fewer than {DESCRIPTORS} descriptors are left of the limit in force: raise it with `ulimit -n`, or close some"
        ),
        _ => Ok(()),
    }
}

fn prepare(args: Run) -> Result<Ready> {
    enough_descriptors()?;
    let shown: Vec<String> = args
        .command
        .iter()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let asked = environment_asks(|name| env::var_os(name))?;
    // Left empty where nobody gave one: the arbiter then makes one that is free, and refuses no job
    // for its name.
    let name = args.name.clone().or(asked.name.clone()).unwrap_or_default();
    let known_as = if name.is_empty() {
        control::name_from_command(&shown)
    } else {
        name.clone()
    };
    // The user's own file. What the host's say of the job is the arbiter's to know.
    let config = Config::find(args.config.as_deref(), &Places::of_a_user())?;
    let account = env::var("SLURM_JOB_ACCOUNT").unwrap_or_default();
    let identity = Identity {
        slurm_account: account.clone(),
        ..Identity::of_process(std::process::id())
    };
    let (set, caps) = config.layers_for(Subject {
        name: &known_as,
        command_line: &shown.join(" "),
        user: &user_name(),
        identity: &identity,
    });
    let given = asked.below(&args.settings.0);
    let settings = control::in_force(&given, &set, &[], &[], now_unix_ms()).settings;
    settings
        .check()
        .map_err(|(name, message)| anyhow!("the job's {name} is {message}"))?;

    let program = find_command(&args)?;
    let executable = env::current_exe().context("cannot tell where `sublet` itself lies")?;
    let install = Install::find(&executable, |name| env::var_os(name))?;
    let step_hook = match &args.step_hook {
        Some(_) => Some(install.step_hook()?),
        None => None,
    };
    let wish = match &args.driver {
        Some(path) => Wish::This(path),
        None if args.sim => Wish::Simulated,
        None => Wish::Any,
    };
    let driver = driver::find(wish, &install, env::var_os("LD_LIBRARY_PATH").as_deref())?;
    let dilation = dilation::asked()?;
    if driver.simulated.is_none() {
        dilation::must_be(dilation, None)?;
    }

    let dir = RuntimeDir::find(&Surroundings::of_this_process())?;
    let outer = nested::outer(&dir, &driver, |name| env::var_os(name));
    if let Some(outer) = outer.filter(|_| args.refused.is_empty()) {
        // What the outer one has put into the environment is nobody's wish.
        let flags = nested::keys(&args.settings.0);
        let mut asked = nested::keys(&given);
        asked.retain(|key| flags.contains(key) || !nested::is_of_every_job(key));
        asked.extend(args.name.as_ref().map(|_| "name".to_owned()));
        let line = outer.line(&asked, args.strict)?;
        let registered = outer.registered();
        let on_arbiter_loss = outer.on_arbiter_loss();
        let environment = environment(
            &args,
            &registered,
            &driver,
            &install,
            on_arbiter_loss,
            step_hook.as_deref(),
            &program,
        );
        return Ok(Ready {
            limited: None,
            driver,
            program,
            words: args.command,
            environment,
            said: [vec![line], config.passed_over].concat(),
        });
    }

    let own_file = config.paths.first().map(|path| {
        Box::new(OwnFile {
            path: std::path::absolute(path).unwrap_or_else(|_| path.clone()),
            given,
            caps,
        })
    });
    let spec = JobSpec {
        name,
        settings,
        own_file,
        slurm_account: account,
        on_behalf_of: None,
        paused: false,
        pid: std::process::id(),
        command: shown,
        driver: driver.path.clone(),
        simulated: driver.simulated.is_some(),
        evicted: false,
        strict: args.strict,
        any_user: false,
    };
    if args.strict {
        nobody_else(&dir, &driver, &spec)?;
    }
    let registered = connect::ask(
        || {
            if args.refused.is_empty() {
                let config = config.paths.first().map(PathBuf::as_path);
                connect::or_start(&dir, &executable, config)
            } else {
                // An engine's jobs are the node's arbiter's, and nobody else's.
                connect::existing(&dir).map_err(|error| {
                    let down = error.is_absence();
                    let error = anyhow!(error);
                    if down {
                        error.context("this node has no arbiter")
                    } else {
                        error
                    }
                })
            }
        },
        |arbiter| arbiter.register(spec.clone()),
    )
    .map_err(|error| match error.downcast() {
        Ok(ClientError::Refused(refusal)) => anyhow!("the arbiter refused the job: {refusal}"),
        Ok(error) => error.into(),
        Err(error) => error,
    })?;

    limited_somewhere(&dir, &driver, &spec, &registered)?;
    let in_force = registered.settings.clone().unwrap_or(spec.settings.clone());
    if args.strict && in_force.devices() != spec.settings.devices() {
        let spec = JobSpec {
            settings: in_force.clone(),
            ..spec.clone()
        };
        nobody_else(&dir, &driver, &spec)?;
    }
    let on_arbiter_loss = in_force.on_arbiter_loss.unwrap_or_default();
    let on_refusal = in_force.on_refusal(args.strict);

    let mut environment = environment(
        &args,
        &registered,
        &driver,
        &install,
        on_arbiter_loss,
        step_hook.as_deref(),
        &program,
    );
    environment.insert("SUBLET_ON_REFUSAL".into(), on_refusal.as_str().into());
    environment.remove(OsStr::new(nested::LIMITED));
    if nested::is_limited(&in_force, args.strict) {
        environment.insert(nested::LIMITED.into(), "1".into());
    }
    let limited = in_force.mem.is_some() || in_force.share_max.is_some() || spec.strict;
    Ok(Ready {
        limited: limited.then_some((dir, registered.id, spec.strict)),
        driver,
        program,
        words: args.command,
        environment,
        said: registered
            .capped
            .iter()
            .map(ToString::to_string)
            .chain(registered.notices)
            .chain(config.passed_over)
            .collect(),
    })
}

/// The command's environment.
fn environment(
    args: &Run,
    registered: &Registered,
    driver: &Driver,
    install: &Install,
    on_arbiter_loss: control::FailMode,
    step_hook: Option<&Path>,
    program: &Path,
) -> BTreeMap<OsString, OsString> {
    let mut environment: BTreeMap<OsString, OsString> = env::vars_os().collect();
    let ours = environment::of_job(registered, driver, install, on_arbiter_loss, |name| {
        env::var_os(name)
    });
    environment.extend(ours.into_iter().map(|(name, value)| (name.into(), value)));
    environment.remove(OsStr::new("SUBLET_STDERR"));
    environment.extend(
        environment::of_stderr(io::stderr().as_fd()).map(|value| ("SUBLET_STDERR".into(), value)),
    );
    if args.strict {
        environment.insert("SUBLET_STRICT".into(), "1".into());
    }
    if args.deep {
        let deeper = environment::of_deep_job(install, |name| env::var_os(name));
        environment.extend(deeper.into_iter().map(|(name, value)| (name.into(), value)));
    }
    if let Some(folder) = step_hook {
        let path = environment::of_step_hook(folder, |name| env::var_os(name));
        environment.insert("PYTHONPATH".into(), path);
    }
    if command::must_be_without(program) {
        environment.remove(OsStr::new("LD_PRELOAD"));
        environment.remove(OsStr::new("LD_AUDIT"));
    }
    environment
}

/// An error where the job's memory limit would hold on no device, because the arbiter takes the
/// devices of the job's driver for those of another. Where it knows none of them yet, it learns
/// them from the job's processes, and the limit holds.
fn limited_somewhere(
    dir: &RuntimeDir,
    driver: &Driver,
    spec: &JobSpec,
    registered: &Registered,
) -> anyhow::Result<()> {
    if spec.settings.mem.is_none() || !registered.mem_limit_bytes.is_empty() {
        return Ok(());
    }
    let (Ok(status), Ok(found)) = (
        connect::ask(|| connect::existing(dir), Client::status),
        arbiter::nvml::look(Some(&driver.path)),
    ) else {
        return Ok(());
    };
    for device in found {
        let uuid = device.uuid_text();
        let known = status.devices.iter().find(|known| known.uuid == uuid);
        if let Some(known) = known
            && known.simulated != spec.simulated
        {
            let kind = |simulated| if simulated { "simulated" } else { "real" };
            bail!(
                "the memory limit would not be in force: the arbiter takes {uuid} for a {} device, and the job's driver ({}) is {}; \
                 start the arbiter without the other driver's libnvidia-ml.so.1 in its LD_LIBRARY_PATH",
                kind(known.simulated),
                driver.path.display(),
                kind(spec.simulated)
            );
        }
    }
    Ok(())
}

/// For `--strict`: an error where somebody uses the job's devices outside of every job, or where
/// that cannot be known.
fn nobody_else(dir: &RuntimeDir, driver: &Driver, spec: &JobSpec) -> anyhow::Result<()> {
    let status = match connect::ask(|| connect::existing(dir), Client::status) {
        Ok(status) => Some(status),
        Err(error) if error.is_absence() => None,
        Err(error) => return Err(error.into()),
    };
    let simulated = driver.simulated.map(|_| driver.path.as_path());
    let found = arbiter::nvml::look(simulated).map_err(|reason| {
        anyhow!("--strict: who uses the GPU is not known, because NVML does not answer: {reason}")
    })?;
    let others = unmanaged::on(&found, status.as_ref(), spec.settings.devices());
    let Some(first) = others.first() else {
        return Ok(());
    };
    let more = match others.len() {
        1 => String::new(),
        all => format!(", and {} more", all - 1),
    };
    bail!(
        "--strict: GPU {} is used by process {} ({}), which is part of no job{more}: end it, or start it by `sublet run`",
        first.device,
        first.pid,
        unmanaged::command_line(first.pid)
    );
}

fn find_command(args: &Run) -> Result<PathBuf> {
    command::find(&args.command[0], env::var_os("PATH").as_deref()).map_err(|error| {
        let code = match &error {
            CommandError::NotFound(_) => NOT_FOUND,
            CommandError::NotExecutable { .. } => NOT_EXECUTABLE,
        };
        Failure::with_code(code, error)
    })
}

fn now_unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}

/// The login name, or the number where the host has no name for it.
pub fn user_name() -> String {
    let uid = nix::unistd::geteuid();
    match nix::unistd::User::from_uid(uid) {
        Ok(Some(user)) => user.name,
        _ => uid.to_string(),
    }
}
