//! Which container a process runs in, as the kernel says: by its control group, whose path has the
//! container's id, and where that says nothing by its PID namespace.
//!
//! Nothing here goes by what a process says of itself. The files read are `/proc/PID/cgroup`,
//! `stat` and `ns/pid`, which no process can make slow.

use std::path::PathBuf;

use control::place::{Identity, container_group};
use serde::{Deserialize, Serialize};

use crate::peer;

/// Ancestors followed. TIMEOUT: a bound of work, not of time.
const MAX_DEPTH: u32 = 64;

/// Where a process is that nobody has registered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Container {
    /// The same for all processes of the container, and for no other's.
    pub key: String,
    /// The topmost process of the container that is known: its end is the container's, where it is
    /// the container's first one.
    pub top: u32,
    /// Who that is.
    pub identity: Identity,
}

/// A container that is a job.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct InContainer {
    /// The same for all of its processes.
    pub key: String,
    /// What its engine calls it; empty: not known.
    pub name: String,
}

impl Container {
    /// The container of a process of this PID namespace; `None`: it has ended, or is in none but
    /// the arbiter's own.
    pub fn of(pid: u32) -> Option<Self> {
        let identity = Identity::of_process(pid);
        let (key, identity) = key_of(pid, identity)?;
        if own_key().as_ref() == Some(&key) {
            return None;
        }
        Some(Self {
            top: top_of(pid, &key),
            key,
            identity,
        })
    }

    /// Whether it is known by its PID namespace alone, whose number the kernel uses again.
    pub fn is_nameless(key: &str) -> bool {
        key.starts_with("pid:")
    }
}

/// What a process's container is known by, where it is another one than the arbiter's.
pub fn foreign(pid: u32) -> Option<String> {
    let key = key_of(pid, Identity::of_process(pid))?.0;
    (own_key().as_ref() != Some(&key)).then_some(key)
}

fn own_key() -> Option<String> {
    let ours = std::process::id();
    key_of(ours, Identity::of_process(ours)).map(|(key, _)| key)
}

fn key_of(pid: u32, mut identity: Identity) -> Option<(String, Identity)> {
    if let Some(group) = container_group(&identity.cgroups) {
        return Some((group, identity));
    }
    let namespace = pid_namespace(pid)?;
    let ours = pid_namespace(std::process::id())?;
    (namespace != ours).then(|| {
        let key = namespace.to_string_lossy().into_owned();
        // So that rules about containers hold for this one as well.
        identity.place.container = format!("pidns-{}", digits(&key));
        (key, identity)
    })
}

/// `pid:[4026531836]`
fn pid_namespace(pid: u32) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{pid}/ns/pid")).ok()
}

fn digits(text: &str) -> String {
    text.chars().filter(char::is_ascii_digit).collect()
}

fn top_of(pid: u32, key: &str) -> u32 {
    let mut top = pid;
    for _ in 0..MAX_DEPTH {
        let Some(parent) = peer::parent_of(top).filter(|parent| *parent > 1) else {
            break;
        };
        match key_of(parent, Identity::of_process(parent)) {
            Some((of_parent, _)) if of_parent == key => top = parent,
            _ => break,
        }
    }
    top
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_like_ours_is_in_no_other_container() {
        assert_eq!(foreign(std::process::id()), None);
        assert_eq!(Container::of(u32::MAX), None);
        assert!(Container::is_nameless("pid:[4026531836]"));
        assert!(!Container::is_nameless("/docker/0123"));
    }

    #[test]
    fn a_pid_namespace_is_a_container_and_its_first_process_the_topmost() {
        // `unshare` waits for the shell, which waits for `sleep`.
        let mut command = std::process::Command::new("unshare");
        command.args(["--user", "--map-root-user", "--pid", "--fork"]);
        command.args(["--kill-child", "sh", "-c", "sleep 1000 & wait"]);
        let Ok(mut outer) = command.stdin(std::process::Stdio::null()).spawn() else {
            return eprintln!("skipped: there is no unshare here");
        };
        let child = |pid: u32| -> Option<u32> {
            let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).ok()?;
            text.split_ascii_whitespace().next()?.parse().ok()
        };
        let deadline = std::time::Instant::now() + testbed::PATIENCE;
        let found = loop {
            assert!(std::time::Instant::now() < deadline);
            if let Ok(Some(status)) = outer.try_wait() {
                return eprintln!("skipped: no PID namespaces here: {status}");
            }
            let first = child(outer.id()).filter(|first| foreign(*first).is_some());
            if let Some((first, second)) = first.and_then(|first| Some((first, child(first)?))) {
                break (first, Container::of(second).expect("it lives"));
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        };
        let (first, container) = found;
        assert_eq!(container.top, first);
        assert!(Container::is_nameless(&container.key), "{container:?}");
        assert!(container.identity.place.container.starts_with("pidns-4"));
        outer.kill().expect("kill");
        testbed::within::wait(&mut outer, "unshare", testbed::PATIENCE);
    }
}
