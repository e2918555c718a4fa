//! Who asks: a process, its user, and where it runs.
//!
//! All three are the kernel's word. A user counts only on this host: a container's users have the
//! numbers of the host's, root's above all, and none of their rights; and one who may be in a
//! container has none either.

use std::io;
use std::os::fd::AsFd;

use control::{ControlError, ErrorCode};

use crate::container::Origin;
use crate::peer;

/// Somebody at the other end of a socket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Process id; 0: it is in a PID namespace that ours does not see, or on another host.
    pub pid: u32,
    /// User id.
    pub uid: u32,
    /// Where it runs. Known from the moment at which it was taken in: later its number may be
    /// another process's.
    pub origin: Origin,
}

impl Peer {
    /// Who has connected. `more` gives up descriptors that were kept back; false: there are none.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn of(socket: impl AsFd, mut more: impl FnMut() -> bool) -> io::Result<Self> {
        let (pid, uid) = peer::credentials(&socket)?;
        let mut origin = Origin::of_peer(&socket, pid);
        if origin.is_err() && more() {
            origin = Origin::of_peer(&socket, pid);
        }
        Ok(Self {
            pid,
            uid,
            origin: origin.unwrap_or(Origin::Unknown),
        })
    }

    /// Whether it is root of this host.
    pub fn is_root(&self) -> bool {
        self.uid == 0 && self.origin == Origin::Here
    }

    /// Whether it may speak for the whole arbiter: its own user, or root.
    pub fn governs(&self) -> bool {
        let ours = rustix::process::geteuid().as_raw();
        (self.uid == 0 || self.uid == ours) && self.origin == Origin::Here
    }

    /// Whether it is a user of this host, and of no container.
    ///
    /// # Errors
    /// Why not, for that user.
    pub fn must_be_of_this_host(&self) -> Result<(), ControlError> {
        let (message, hint) = match self.origin {
            Origin::Here => return Ok(()),
            Origin::Container(_) => (
                "you are in a container, whose root is not the host's".to_owned(),
                "ask on the host",
            ),
            Origin::Unknown => self.not_seen(),
        };
        Err(ControlError::new(ErrorCode::Permission, message).with_hint(hint))
    }

    /// What is said, and what is to be done, where it is not known where it runs.
    pub fn not_seen(&self) -> (String, &'static str) {
        let message = match self.pid {
            0 => "the arbiter runs in another PID namespace, which does not see your process: you may be in any container".to_owned(),
            pid => format!("process {pid}, which has connected, has ended or cannot be seen: it may have been in any container"),
        };
        (
            message,
            "ask where the arbiter runs, and wait for the answer",
        )
    }

    /// One of the arbiter's own place, for tests.
    #[cfg(test)]
    pub fn here(pid: u32, uid: u32) -> Self {
        Self {
            pid,
            uid,
            origin: Origin::Here,
        }
    }

    /// The same user, in a container of this key.
    #[cfg(test)]
    pub fn inside(mut self, key: &str) -> Self {
        self.origin = Origin::Container(key.into());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_containers_root_and_one_who_is_not_seen_govern_nothing() {
        let ours = rustix::process::geteuid().as_raw();
        for uid in [0, ours] {
            let host = Peer::here(7, uid);
            assert!(host.governs() && host.must_be_of_this_host().is_ok());
            let inside = host.clone().inside("/docker/0");
            let unseen = Peer {
                origin: Origin::Unknown,
                ..host
            };
            for peer in [inside, unseen] {
                assert!(!peer.governs() && !peer.is_root(), "{peer:?}");
                let error = peer.must_be_of_this_host().expect_err("refused");
                assert_eq!(error.code, ErrorCode::Permission);
                assert!(error.message.contains("container"), "{error}");
            }
        }
        assert!(!Peer::here(7, ours + 1).governs());
    }
}
