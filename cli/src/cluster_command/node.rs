//! The node's side: the agent thread of `sublet arbiter --cluster`, and the companion of each of its jobs.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use cluster::live::agent::{Agent, Config};
use cluster::live::engine::LocalEngine;
use cluster::live::runner;
use cluster::live::service;
use cluster::live::wire::Device;
use control::paths::RuntimeDir;
use nix::unistd::{Uid, User};

use crate::config::ClusterRule;
use crate::run::driver::{self, Wish};
use crate::run::install::Install;

/// Flags of `sublet arbiter`.
#[derive(Debug, Clone, PartialEq, Eq, Args, Default)]
pub struct ClusterFlags {
    /// Report to the hook at this address, and carry its decisions out
    #[arg(long = "cluster", value_name = "URL")]
    pub url: Option<String>,
    /// File with the hook's token
    #[arg(long = "cluster-token-file", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// What this node is called there [default: the host's name]
    #[arg(long = "cluster-node", value_name = "NAME")]
    pub node: Option<String>,
    /// As whom the hook's jobs run; needed where the arbiter is root's
    #[arg(long = "cluster-user", value_name = "USER")]
    pub user: Option<String>,
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
            node: or(self.node, &file.node),
            user: or(self.user, &file.user),
            sim: self.sim || file.sim.unwrap_or(false),
        }
    }

    /// What was said of a hook though there is none.
    fn without_a_hook(&self) -> Option<&'static str> {
        let said = [
            (self.token_file.is_some(), "--cluster-token-file"),
            (self.node.is_some(), "--cluster-node"),
            (self.user.is_some(), "--cluster-user"),
            (self.sim, "--cluster-sim"),
        ];
        said.into_iter()
            .find(|(said, _)| *said)
            .map(|(_, flag)| flag)
    }
}

/// Starts the agent on a thread of this process, where a hook is named. It comes to nothing while the arbiter does not listen.
///
/// # Errors
/// A flag or file that is wrong.
pub fn start(flags: &ClusterFlags, dir: &RuntimeDir) -> anyhow::Result<()> {
    let Some(url) = flags.url.clone() else {
        if let Some(flag) = flags.without_a_hook() {
            bail!(
                "{flag} is no use without a hook: give --cluster http://HOST:PORT, or `url` in [cluster] of the quota file"
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
                "only root can run the hook's jobs as somebody else: leave --cluster-user, or `user` in [cluster], out"
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
    let token = flags
        .token_file
        .as_ref()
        .map(|file| service::read_token(file))
        .transpose()?;
    let executable = std::env::current_exe().context("cannot tell where `sublet` itself lies")?;
    let install = Install::find(&executable, |name| std::env::var_os(name))?;
    let place = dir.path().join("cluster");
    let user = flags.user.clone();
    // Made here, so that what is wrong with it is told at once.
    dir_of(&place)?;
    let engine = LocalEngine::new(place.join("runs"), executable, dir.path().to_owned(), user);
    let sim = flags.sim;
    let config = Config {
        url,
        token,
        node,
        control_socket: dir.control_socket(),
        dir: place,
        version: env!("CARGO_PKG_VERSION").into(),
        devices: Box::new(move || devices(sim, &install)),
        say: Box::new(|line| tracing::warn!("{line}")),
    };
    let agent = Agent::new(config, Box::new(engine)).map_err(|why| anyhow!(why))?;
    std::thread::Builder::new()
        .name("cluster".into())
        .spawn(move || agent.run())
        .context("cannot start a thread")?;
    Ok(())
}

fn dir_of(place: &Path) -> anyhow::Result<()> {
    let made = std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(place);
    made.with_context(|| format!("cannot make {}", place.display()))
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
    runner::run(dir, as_user)
        .with_context(|| format!("the job in {} cannot be run", dir.display()))?;
    Ok(String::new())
}

fn as_user(command: &mut Command, name: &str) -> io::Result<(u32, u32)> {
    let user = user_named(name).map_err(io::Error::other)?;
    let name = std::ffi::CString::new(user.name.clone()).map_err(io::Error::other)?;
    let (uid, gid) = (user.uid, user.gid);
    command
        .env("HOME", &user.dir)
        .env("USER", &user.name)
        .env("LOGNAME", &user.name);
    if uid != nix::unistd::geteuid() {
        let groups = nix::unistd::getgrouplist(&name, gid)?;
        // SAFETY: between fork and exec this makes three system calls and allocates nothing: the groups were read before.
        unsafe {
            command.pre_exec(move || {
                nix::unistd::setgroups(&groups)?;
                nix::unistd::setgid(gid)?;
                nix::unistd::setuid(uid)?;
                Ok(())
            });
        }
    }
    Ok((uid.as_raw(), gid.as_raw()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_win_one_by_one_and_the_file_fills_up() {
        let file = ClusterRule {
            url: Some("http://file:1".into()),
            token_file: Some("/file".into()),
            node: Some("file".into()),
            user: None,
            sim: Some(true),
        };
        let flags = ClusterFlags {
            node: Some("flag".into()),
            user: Some("me".into()),
            ..ClusterFlags::default()
        };
        assert_eq!(flags.without_a_hook(), Some("--cluster-node"));
        let all = flags.or(&file);
        assert_eq!(
            all,
            ClusterFlags {
                url: Some("http://file:1".into()),
                token_file: Some("/file".into()),
                node: Some("flag".into()),
                user: Some("me".into()),
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
