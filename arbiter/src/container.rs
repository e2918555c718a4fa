//! Which container a process runs in, as the kernel says: by its control group, whose path has the
//! container's id, and where that says nothing by its PID namespace.
//!
//! Nothing here goes by what a process says of itself. The files read are `/proc/PID/cgroup`,
//! `stat`, `status` and `ns/pid`, which no process can make slow. All of them go by a number that
//! the kernel uses again: who asks about somebody at the other end of a socket looks afterwards
//! whether that process still lives ([`Origin::of_peer`]). What cannot be read is never taken for
//! "in no container".

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};

use control::place::{Identity, container_group, group_of_process};
use serde::{Deserialize, Serialize};

use crate::bearer::Bearer;
use crate::descriptors::Descriptors;
use crate::peer;

/// Ancestors followed. TIMEOUT: a bound of work, not of time.
const MAX_DEPTH: u32 = 64;

/// Where somebody runs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Origin {
    /// Where the arbiter does.
    Here,
    /// In another container, which is known by this.
    Container(Arc<str>),
    /// The kernel does not say: the process has ended, or is not seen from here.
    Unknown,
    /// There were no descriptors left to look with. It is answered nothing else
    /// ([`Peer::may_ask`](crate::who::Peer::may_ask)).
    NotLookedAt,
    /// Anywhere: it holds a token, and asks over TCP.
    Remote(Arc<Bearer>),
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

impl Origin {
    /// Of the process that connected this socket; `pid` is its number.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn of_peer(socket: impl AsFd, pid: u32) -> io::Result<Self> {
        let Some(process) = peer::process_of(socket, pid)? else {
            return Ok(Self::Unknown);
        };
        let origin = Self::of(pid)?;
        // Looked at after the files were read: if it lives, they were its.
        Ok(if peer::has_ended(process) {
            Self::Unknown
        } else {
            origin
        })
    }

    /// Of the process that has this number now.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn of(pid: u32) -> io::Result<Self> {
        let known = own().and_then(|own| {
            let key = key_of(pid, own)?;
            // The kernel moves a main thread that has ended to the topmost control group.
            Ok(peer::started_ticks(pid)?.map(|_| key))
        });
        match known {
            Ok(Some(Some(key))) => Ok(Self::Container(key.into())),
            Ok(Some(None)) => Ok(Self::Here),
            Ok(None) => Ok(Self::Unknown),
            Err(error) if Descriptors::are_lacking(&error) => Err(error),
            Err(_) => Ok(Self::Unknown),
        }
    }
}

/// Whether a container is known by its PID namespace alone, whose number the kernel uses again.
pub fn is_nameless(key: &str) -> bool {
    key.starts_with("pid:")
}

/// Who a process of a container is. Rules about containers hold for one without a name as well.
pub fn identity_of(pid: u32, key: &str) -> Identity {
    let mut identity = Identity::of_process(pid);
    if is_nameless(key) {
        let digits: String = key.chars().filter(char::is_ascii_digit).collect();
        identity.place.container = format!("pidns-{digits}");
    }
    identity
}

/// Whether what was read of somebody is of a process of this container.
pub fn is_in(identity: &Identity, key: &str) -> bool {
    match container_group(&identity.cgroups) {
        Some(group) => group == key,
        None => is_nameless(key) && !identity.cgroups.is_empty(),
    }
}

/// The topmost process of a container above this one: its end is the container's, where it is the
/// container's first one.
pub fn top_of(pid: u32, key: &str) -> u32 {
    let mut top = pid;
    for _ in 0..MAX_DEPTH {
        let Some(parent) = peer::parent_of(top).filter(|parent| *parent > 1) else {
            break;
        };
        match Origin::of(parent) {
            Ok(Origin::Container(of_parent)) if *of_parent == *key => top = parent,
            _ => break,
        }
    }
    top
}

/// What the arbiter itself is in.
#[derive(Debug)]
struct Own {
    group: Option<String>,
    namespace: String,
}

/// Read once: a process does not change its PID namespace, nor its container.
fn own() -> io::Result<&'static Own> {
    static OWN: OnceLock<Own> = OnceLock::new();
    if let Some(own) = OWN.get() {
        return Ok(own);
    }
    let own = std::process::id();
    let own = Own {
        group: group_of_process(own)?,
        namespace: pid_namespace(own)?,
    };
    Ok(OWN.get_or_init(|| own))
}

/// What the container of a process is known by; `None`: it is the arbiter's.
fn key_of(pid: u32, own: &Own) -> io::Result<Option<String>> {
    if let Some(group) = group_of_process(pid)? {
        return Ok((own.group.as_ref() != Some(&group)).then_some(group));
    }
    match pid_namespace(pid) {
        Ok(namespace) => Ok((namespace != own.namespace).then_some(namespace)),
        // That link is for root and the process's own user; how deep it is, is for everybody.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
            if is_outermost(&status) {
                Ok(None)
            } else {
                Err(error)
            }
        }
        Err(error) => Err(error),
    }
}

/// `pid:[4026531836]`
fn pid_namespace(pid: u32) -> io::Result<String> {
    let link = std::fs::read_link(format!("/proc/{pid}/ns/pid"))?;
    Ok(link.to_string_lossy().into_owned())
}

/// Whether a `status` file is of a process in the PID namespace of this `/proc` and in none below:
/// it has one number then.
fn is_outermost(status: &str) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    line.is_some_and(|numbers| numbers.split_ascii_whitespace().count() == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_like_ours_is_in_no_other_container() {
        let own = Origin::of(std::process::id()).expect("descriptors");
        assert_eq!(own, Origin::Here);
        assert!(is_nameless("pid:[4026531836]") && !is_nameless("/docker/0123"));
    }

    #[test]
    fn a_process_that_is_not_seen_may_be_in_any_container() {
        for nobody in [0, u32::MAX] {
            let origin = Origin::of(nobody).expect("descriptors");
            assert_eq!(origin, Origin::Unknown);
        }
        assert!(is_outermost("Name:\tx\nNSpid:\t7\n"));
        for status in ["NSpid:\t7\t1\n", "NSpid:\t\n", "Name:\tx\n", ""] {
            assert!(!is_outermost(status), "{status}");
        }
    }

    #[test]
    fn who_has_connected_and_ended_is_unknown_although_its_socket_lives() {
        use std::io::{Read, Write};
        let place = tempfile::tempdir().expect("a folder");
        let path = place.path().join("s");
        let listener = std::os::unix::net::UnixListener::bind(&path).expect("bound");
        // The first one connects and ends; its child has the socket and says so.
        let script = "import os, socket, sys\n\
             s = socket.socket(socket.AF_UNIX)\n\
             s.connect(sys.argv[1])\n\
             if os.fork(): sys.stdin.read(1); os._exit(0)\n\
             s.sendall(b'x')\n\
             s.recv(1)\n";
        let mut command = std::process::Command::new("python3");
        command.args(["-c", script]).arg(&path);
        let command = command.stdin(std::process::Stdio::piped());
        let mut first = command.spawn().expect("python3 starts");
        let (mut accepted, _) = listener.accept().expect("accepted");
        let (pid, _) = peer::credentials(&accepted).expect("known");
        assert_eq!(pid, first.id());
        let here = Origin::of_peer(&accepted, pid).expect("descriptors");
        assert_eq!(here, Origin::Here);
        drop(first.stdin.take());
        testbed::within::wait(&mut first, "the first", testbed::PATIENCE);
        accepted.read_exact(&mut [0]).expect("its child lives");
        let gone = Origin::of_peer(&accepted, pid).expect("descriptors");
        assert_eq!(gone, Origin::Unknown);
        accepted.write_all(b"x").expect("it may end");
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
            let key = |pid| match Origin::of(pid) {
                Ok(Origin::Container(key)) => Some(key),
                _ => None,
            };
            let first = child(outer.id()).filter(|first| key(*first).is_some());
            if let Some((first, second)) = first.and_then(|first| Some((first, child(first)?))) {
                break (first, second, key(second).expect("it lives"));
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        };
        let (first, second, key) = found;
        assert_eq!(top_of(second, &key), first);
        assert!(is_nameless(&key), "{key}");
        let identity = identity_of(second, &key);
        let container = &identity.place.container;
        assert!(container.starts_with("pidns-4"), "{container}");
        assert!(is_in(&identity, &key) && !is_in(&Identity::default(), &key));
        outer.kill().expect("kill");
        testbed::within::wait(&mut outer, "unshare", testbed::PATIENCE);
    }
}
