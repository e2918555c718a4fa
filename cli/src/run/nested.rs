//! `sublet run` inside of a job: what it starts stays in that job.
//!
//! A job of its own beside the outer one would have memory and time of its own, so a script in a
//! job of 1 GiB could start ten of 1 GiB each. So where the outer job has limits, the command is a
//! part of it: its memory counts in the same quota, its work in the same share, under the outer
//! job's name. What the inner one asks for in addition cannot be had, and that is said; with
//! `--strict` it is an error. Where the outer job has no limits, or has ended, or uses other
//! devices (simulated ones, and this one does not), there is nothing to stay within.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::bail;
use control::paths::RuntimeDir;
use control::{Client, FailMode, JobSettings, JobStatus, Registered};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

use super::driver::Driver;
use crate::connect as arbiter;

/// Set by `sublet run` where the job has limits; for a `sublet run` inside of it.
pub const LIMITED: &str = "SUBLET_LIMITED";

/// The job that this process is of.
pub struct Outer {
    pub name: String,
    token: String,
    socket: PathBuf,
    on_arbiter_loss: FailMode,
    is_strict: bool,
}

/// Whether a job with these settings has something that a job inside of it must not exceed.
pub fn is_limited(settings: &JobSettings, strict: bool) -> bool {
    let JobSettings {
        mem,
        share,
        share_min,
        share_max,
        device,
        ..
    } = settings;
    strict
        || mem.is_some()
        || share.is_some()
        || share_min.is_some()
        || share_max.is_some()
        || device.is_some()
}

/// The job to stay in; `None`: this is none, or one without limits.
pub fn outer(
    dir: &RuntimeDir,
    driver: &Driver,
    var: impl Fn(&str) -> Option<OsString>,
) -> Option<Outer> {
    let text = |name: &str| {
        let value = var(name)?.into_string().ok()?;
        (!value.is_empty()).then_some(value)
    };
    let (name, token) = (text("SUBLET_JOB")?, text("SUBLET_TOKEN")?);
    let socket = PathBuf::from(var("SUBLET_SOCKET")?);
    let said = text(LIMITED).is_some();
    let stays = if socket == dir.channel_socket() {
        let list = arbiter::ask(|| arbiter::existing(dir), Client::list).ok()?;
        let job = list.into_iter().find(|job| job.name == name)?;
        job.simulated == driver.simulated.is_some() && (said || has_limits(&job))
    } else {
        // Another arbiter's, which need not be ours to ask: as in a pod.
        listens(&socket)
    };
    stays.then(|| Outer {
        on_arbiter_loss: match text("SUBLET_ON_ARBITER_LOSS").as_deref() {
            Some("freeze") => FailMode::Freeze,
            Some("closed") => FailMode::Closed,
            _ => FailMode::Open,
        },
        is_strict: text("SUBLET_STRICT").is_some(),
        name,
        token,
        socket,
    })
}

fn has_limits(job: &JobStatus) -> bool {
    job.mem_limit_bytes.is_some()
        || job.share_asked.is_some()
        || job.share_min.is_some()
        || job.share_max.is_some()
}

fn listens(path: &Path) -> bool {
    let found = socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        None,
    );
    let (Ok(ours), Ok(address)) = (found, UnixAddr::new(path)) else {
        return false;
    };
    use std::os::fd::AsRawFd;
    connect(ours.as_raw_fd(), &address).is_ok()
}

impl Outer {
    /// As if it had been registered just now.
    pub fn registered(&self) -> Registered {
        Registered {
            job: self.name.clone(),
            token: self.token.clone(),
            channel_socket: self.socket.clone(),
            ..Registered::default()
        }
    }

    pub fn on_arbiter_loss(&self) -> FailMode {
        self.on_arbiter_loss
    }

    /// What is said of it: that what is `asked` for besides has no effect.
    ///
    /// # Errors
    /// With `strict`, where something that was asked for would not be in force.
    pub fn line(&self, asked: &[String], strict: bool) -> anyhow::Result<String> {
        let name = &self.name;
        if strict && !self.is_strict {
            bail!(
                "--strict: this is inside job `{name}`, which is not strict: start that one with --strict"
            );
        }
        let rest = asked.join(", ");
        if strict && !asked.is_empty() {
            bail!(
                "--strict: this is inside job `{name}`, and what a job inside of a job asks for cannot be enforced: leave out {rest}, or start it outside"
            );
        }
        let more = match asked.is_empty() {
            true => String::new(),
            false => format!("; without effect: {rest}"),
        };
        Ok(format!(
            "inside job `{name}`: the command is a part of it, within its limits{more}"
        ))
    }
}

/// Whether `sublet run` sets the variable of that key for every job.
pub fn is_of_every_job(key: &str) -> bool {
    matches!(key, "on_arbiter_loss" | "on_refusal")
}

/// The keys of what is set.
pub fn keys(settings: &JobSettings) -> Vec<String> {
    let value = serde_json::to_value(settings).unwrap_or_default();
    let all = value.as_object().into_iter().flatten();
    let set = all.filter(|(_, value)| !value.is_null());
    set.map(|(key, _)| key.clone()).collect()
}

#[cfg(test)]
mod tests {
    use control::MemLimit;

    use super::*;

    fn outer(is_strict: bool) -> Outer {
        Outer {
            name: "night".into(),
            token: "t".into(),
            socket: "/run/x/channel.sock".into(),
            on_arbiter_loss: FailMode::Open,
            is_strict,
        }
    }

    #[test]
    fn what_has_no_effect_is_said_and_refused_where_it_must_hold() {
        let asked = JobSettings {
            mem: Some(MemLimit::Bytes(1 << 30)),
            ..JobSettings::default()
        };
        let keys = keys(&asked);
        assert_eq!(keys, ["mem"]);
        let line = outer(false).line(&keys, false).unwrap();
        assert!(line.contains("`night`") && line.contains("without effect: mem"));
        let line = outer(true).line(&[], true).unwrap();
        assert!(!line.contains("effect"), "{line}");
        for (is_strict, keys) in [(true, &keys[..]), (false, &[])] {
            let error = outer(is_strict).line(keys, true).unwrap_err();
            assert!(error.to_string().contains("--strict"), "{error}");
        }
    }

    #[test]
    fn only_what_somebody_could_exceed_is_a_limit() {
        let mut settings = JobSettings::default();
        assert!(!is_limited(&settings, false) && is_limited(&settings, true));
        settings.evictable = Some(true);
        assert!(!is_limited(&settings, false));
        settings.device = Some(Vec::new());
        assert!(is_limited(&settings, false));
    }
}
