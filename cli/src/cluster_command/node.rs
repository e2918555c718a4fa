//! The node's side: the agent thread of `sublet arbiter --cluster`, and the companion of each of
//! its jobs.

use std::io;
use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use cluster::live::agent::{Agent, Config};
use cluster::live::engine::{LocalConfig, LocalEngine, own_directory};
use cluster::live::runner;
use cluster::live::service;
use cluster::live::wire::Device;
use control::paths::{RuntimeDir, Source};
use nix::sys::signal::{SigHandler, Signal, signal};
use nix::unistd::{Uid, User};

use super::client_files;
use crate::config::ClusterRule;
use crate::run::driver::{self, Wish};
use crate::run::install::Install;

/// Where the jobs of the host's arbiter write.
const JOBS_DIR: &str = "/var/lib/sublet/jobs";

/// Flags of `sublet arbiter`.
#[derive(Debug, Clone, PartialEq, Eq, Args, Default)]
pub struct ClusterFlags {
    /// Report to the hook at this address, and carry its decisions out
    #[arg(long = "cluster", value_name = "URL")]
    pub url: Option<String>,
    /// File with the hook's token, or this node's (`sublet cluster node-token`)
    #[arg(long = "cluster-token-file", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Certificate of the authority that vouches for a hook with TLS
    #[arg(long = "cluster-ca", value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// Certificate of this node, for a hook that demands one
    #[arg(long = "cluster-cert", value_name = "FILE")]
    pub cert_file: Option<PathBuf>,
    /// Its key
    #[arg(long = "cluster-key", value_name = "FILE")]
    pub key_file: Option<PathBuf>,
    /// What this node is called there [default: the host's name]
    #[arg(long = "cluster-node", value_name = "NAME")]
    pub node: Option<String>,
    /// As whom the hook's jobs run; needed where the arbiter is root's
    #[arg(long = "cluster-user", value_name = "USER")]
    pub user: Option<String>,
    /// Where the hook's jobs write: their output and, by default, their working directory [default:
    /// /var/lib/sublet/jobs for the host's arbiter, else in the runtime directory]
    #[arg(long = "cluster-dir", value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// A variable of the arbiter's environment that the hook's jobs get as well; may be given
    /// several times
    #[arg(long = "cluster-env", value_name = "NAME")]
    pub env: Vec<String>,
    /// Offer the simulated GPU, also where there is a real one
    #[arg(long = "cluster-sim")]
    pub sim: bool,
}

impl ClusterFlags {
    /// These, with the file's where these say nothing.
    #[must_use]
    pub fn or(self, file: &ClusterRule) -> Self {
        let or = |flag: Option<String>, file: &Option<String>| flag.or_else(|| file.clone());
        Self {
            url: or(self.url, &file.url),
            token_file: self.token_file.or_else(|| file.token_file.clone()),
            ca_file: self.ca_file.or_else(|| file.ca_file.clone()),
            cert_file: self.cert_file.or_else(|| file.cert_file.clone()),
            key_file: self.key_file.or_else(|| file.key_file.clone()),
            node: or(self.node, &file.node),
            user: or(self.user, &file.user),
            dir: self.dir.or_else(|| file.dir.clone()),
            env: if self.env.is_empty() {
                file.env.clone().unwrap_or_default()
            } else {
                self.env
            },
            sim: self.sim || file.sim.unwrap_or(false),
        }
    }

    /// What was said of a hook though there is none.
    fn without_a_hook(&self) -> Option<&'static str> {
        let said = [
            (self.token_file.is_some(), "--cluster-token-file"),
            (self.ca_file.is_some(), "--cluster-ca"),
            (self.cert_file.is_some(), "--cluster-cert"),
            (self.key_file.is_some(), "--cluster-key"),
            (self.node.is_some(), "--cluster-node"),
            (self.user.is_some(), "--cluster-user"),
            (self.dir.is_some(), "--cluster-dir"),
            (!self.env.is_empty(), "--cluster-env"),
            (self.sim, "--cluster-sim"),
        ];
        said.into_iter()
            .find(|(said, _)| *said)
            .map(|(_, flag)| flag)
    }
}

/// Starts the agent on a thread of this process, if the flags name a hook. It has no effect while
/// the arbiter does not listen.
///
/// # Errors
/// A flag or file is wrong.
pub fn start(flags: &ClusterFlags, dir: &RuntimeDir) -> anyhow::Result<()> {
    let Some(url) = flags.url.clone() else {
        if let Some(flag) = flags.without_a_hook() {
            bail!(
                "{flag} is no use without a hook: give --cluster https://HOST:PORT, or `url` in [cluster] of the quota file"
            );
        }
        return Ok(());
    };
    let root = nix::unistd::geteuid().is_root();
    match &flags.user {
        None if root => {
            bail!(
                "the hook's jobs would run as root: say as whom with --cluster-user, or `user` in [cluster] of the quota file (`root` where that is meant)"
            )
        }
        Some(_) if !root => {
            bail!(
                "only root can run the hook's jobs as somebody else: omit --cluster-user and `user` in [cluster]"
            )
        }
        Some(user) => drop(user_named(user)?),
        None => {}
    }
    let node = match &flags.node {
        Some(node) => node.clone(),
        None => std::fs::read_to_string("/proc/sys/kernel/hostname")
            .context("the host has no name")?
            .trim()
            .to_owned(),
    };
    control::check_name(&node)
        .map_err(|_| anyhow!("`{node}` is no name of a node: give --cluster-node NAME"))?;
    let Some(token_file) = &flags.token_file else {
        bail!(
            "a node obeys a hook that knows the token, and no other: give --cluster-token-file FILE, or `token_file` in [cluster] of the quota file, with the hook's own"
        );
    };
    let token = service::read_token(token_file)?;
    let files = (
        flags.ca_file.clone(),
        flags.cert_file.clone(),
        flags.key_file.clone(),
    );
    let tls = client_files(files.0, files.1, files.2)?;
    if let Some(host) = url.strip_prefix("http://").filter(|host| !stays_here(host)) {
        tracing::warn!(
            "reports and orders travel unencrypted to {host}: others can read them on the way, where no tunnel keeps them from it; https:// encrypts"
        );
    }
    let executable = std::env::current_exe().context("cannot tell where `sublet` itself lies")?;
    let install = Install::find(&executable, |name| std::env::var_os(name))?;
    let place = dir.path().join("cluster");
    let places = match (&flags.dir, dir.source()) {
        (Some(given), _) if !given.is_absolute() => bail!(
            "--cluster-dir is `{}`: write an absolute path",
            given.display()
        ),
        (Some(given), _) => given.clone(),
        // The runtime directory of the host's arbiter lies in memory, and everybody needs it.
        (None, Source::System) => PathBuf::from(JOBS_DIR),
        (None, _) => place.join("jobs"),
    };
    // Made here, so that mistakes are reported at once.
    if let Some(above) = places.parent().filter(|above| !above.exists()) {
        let made = std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(above);
        made.with_context(|| format!("cannot make {}", above.display()))?;
    }
    for (dir, mode) in [(&place, 0o711), (&places, 0o711)] {
        own_directory(dir, mode)
            .with_context(|| format!("{} cannot be used for the hook's jobs", dir.display()))?;
    }
    let engine = LocalEngine::new(LocalConfig {
        records: place.join("runs"),
        places,
        executable,
        runtime_dir: dir.path().to_owned(),
        user: flags.user.clone(),
        pass: flags.env.clone(),
    });
    let sim = flags.sim;
    let config = Config {
        url,
        token,
        tls,
        node,
        api_socket: dir.api_socket(),
        dir: place,
        version: env!("CARGO_PKG_VERSION").into(),
        devices: Box::new(move || devices(sim, &install)),
        say: Arc::new(|line| tracing::warn!("{line}")),
    };
    let agent = Agent::new(config, Box::new(engine)).map_err(|why| anyhow!(why))?;
    std::thread::Builder::new()
        .name("cluster".into())
        .spawn(move || agent.run())
        .context("cannot start a thread")?;
    Ok(())
}

/// Whether what is sent to `HOST:PORT` stays on this host.
fn stays_here(host: &str) -> bool {
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    let name = name.trim_start_matches('[').trim_end_matches(']');
    let address = name.parse::<IpAddr>();
    name == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

/// What jobs would find here.
fn devices(sim: bool, install: &Install) -> Result<Vec<Device>, String> {
    let wish = if sim { Wish::Simulated } else { Wish::Any };
    let driver = driver::find(
        wish,
        install,
        std::env::var_os("LD_LIBRARY_PATH").as_deref(),
    )
    .map_err(|error| error.to_string())?;
    let simulated = driver.simulated.is_some();
    let found = arbiter::nvml::look(simulated.then_some(driver.path.as_path()))?;
    let device = |found: &arbiter::nvml::Found| Device {
        uuid: found.uuid_text(),
        name: found.name.clone(),
        total_bytes: found.total_bytes,
        simulated,
    };
    Ok(found.iter().map(device).collect())
}

fn user_named(name: &str) -> anyhow::Result<User> {
    let by_number = name.parse().ok().map(Uid::from_raw);
    let found = match by_number {
        Some(uid) => User::from_uid(uid),
        None => User::from_name(name),
    };
    found
        .context("the users of this host cannot be read")?
        .ok_or_else(|| anyhow!("there is no user `{name}`"))
}

/// `sublet cluster run-job DIR`.
///
/// # Errors
/// The directory is not an engine's.
pub fn run_job(dir: &Path) -> anyhow::Result<String> {
    // A service manager signals all processes of a service. The job gets the signal too, and this
    // process waits for its end and records it.
    for asked in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        // SAFETY: SIG_IGN installs no code of ours.
        unsafe { signal(asked, SigHandler::SigIgn) }?;
    }
    // The arbiter that has started this one keeps signals from its threads; jobs get theirs.
    nix::sys::signal::SigSet::empty().thread_set_mask()?;
    runner::run(dir, look_up)
        .with_context(|| format!("the job in {} cannot be run", dir.display()))?;
    Ok(String::new())
}

/// A user by name or number; without one this process's own.
fn look_up(name: Option<&str>) -> io::Result<runner::User> {
    let own = nix::unistd::geteuid();
    let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let user = match name {
        Some(name) => user_named(name).map_err(io::Error::other)?,
        None => match User::from_uid(own)? {
            Some(mut user) => {
                // Its own environment says where its home is.
                if let Some(home) = var("HOME") {
                    user.dir = home.into();
                }
                user
            }
            // In a container a number may have no name.
            None => User {
                name: own.to_string(),
                passwd: Default::default(),
                uid: own,
                gid: nix::unistd::getegid(),
                gecos: Default::default(),
                dir: var("HOME").map_or_else(|| PathBuf::from("/"), PathBuf::from),
                shell: "/bin/sh".into(),
            },
        },
    };
    let (uid, gid) = (user.uid, user.gid);
    let login = std::ffi::CString::new(user.name.clone()).map_err(io::Error::other)?;
    let groups = if uid == own {
        None
    } else {
        Some(nix::unistd::getgrouplist(&login, gid)?)
    };
    let become_it = move || {
        if let Some(groups) = &groups {
            nix::unistd::setgroups(groups)?;
            nix::unistd::setgid(gid)?;
            nix::unistd::setuid(uid)?;
        }
        default_signals();
        close_at_exec();
        Ok(())
    };
    Ok(runner::User {
        uid: uid.as_raw(),
        gid: gid.as_raw(),
        name: user.name,
        home: user.dir,
        shell: user.shell,
        become_it: Box::new(become_it),
    })
}

/// Every signal as after a login: the job does not inherit what the arbiter or this process
/// ignores.
fn default_signals() {
    for number in 1..=64 {
        // SAFETY: SIG_DFL installs no code of ours. Numbers that cannot be set (SIGKILL, SIGSTOP,
        // those of the C library) are refused.
        unsafe { nix::libc::signal(number, nix::libc::SIG_DFL) };
    }
}

/// Every descriptor above standard error ends with the next exec: what the arbiter was started with
/// may be root's, and is not the job's.
fn close_at_exec() {
    let (first, last): (nix::libc::c_uint, nix::libc::c_uint) = (3, nix::libc::c_uint::MAX);
    let flag = nix::libc::CLOSE_RANGE_CLOEXEC;
    // SAFETY: it sets a flag on descriptors and closes none that is in use before exec.
    let done = unsafe { nix::libc::syscall(nix::libc::SYS_close_range, first, last, flag) };
    if done == 0 {
        return;
    }
    // Before Linux 5.11. A limit that was lowered leaves higher numbers open: those of Linux end at
    // 2^20 unless a system is set up otherwise.
    for fd in 3..1 << 20 {
        // SAFETY: as above; a number that is no descriptor is refused.
        unsafe { nix::libc::fcntl(fd, nix::libc::F_SETFD, nix::libc::FD_CLOEXEC) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stays_on_this_host_is_known() {
        for host in [
            "127.0.0.1:7070",
            "127.9.0.1:1/",
            "[::1]:7070",
            "localhost:7070",
        ] {
            assert!(stays_here(host), "{host}");
        }
        for host in [
            "10.0.0.1:7070",
            "head:7070",
            "[2001:db8::1]:7070",
            "0.0.0.0:1",
        ] {
            assert!(!stays_here(host), "{host}");
        }
    }

    #[test]
    fn flags_win_one_by_one_and_the_file_fills_up() {
        let file = ClusterRule {
            url: Some("http://file:1".into()),
            token_file: Some("/file".into()),
            ca_file: Some("/file/ca".into()),
            cert_file: None,
            key_file: Some("/file/key".into()),
            node: Some("file".into()),
            user: None,
            dir: Some("/file/jobs".into()),
            env: Some(vec!["A".into()]),
            sim: Some(true),
        };
        let flags = ClusterFlags {
            node: Some("flag".into()),
            key_file: Some("/flag/key".into()),
            user: Some("me".into()),
            ..ClusterFlags::default()
        };
        assert_eq!(flags.without_a_hook(), Some("--cluster-key"));
        let all = flags.or(&file);
        assert_eq!(
            all,
            ClusterFlags {
                url: Some("http://file:1".into()),
                token_file: Some("/file".into()),
                ca_file: Some("/file/ca".into()),
                cert_file: None,
                key_file: Some("/flag/key".into()),
                node: Some("flag".into()),
                user: Some("me".into()),
                dir: Some("/file/jobs".into()),
                env: vec!["A".into()],
                sim: true,
            }
        );
        assert_eq!(
            ClusterFlags::default().or(&ClusterRule::default()),
            ClusterFlags::default()
        );
        assert_eq!(ClusterFlags::default().without_a_hook(), None);
    }
}
