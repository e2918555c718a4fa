//! Who asks: a process, its user, and where it runs.
//!
//! All three are the kernel's word, or a token's where it came over TCP ([`Bearer`]). A user counts
//! only on this host: a container's users have the
//! numbers of the host's, root's above all, and none of their rights; and one who may be in a
//! container has none either.

use std::io;
use std::os::fd::AsFd;

use std::sync::Arc;

use control::{ControlError, ErrorCode, Request};

use crate::bearer::{Bearer, Role};
use crate::container::Origin;
use crate::descriptors::Descriptors;
use crate::peer;

/// No user has this number: the kernel means "none" by it.
const NOBODY: u32 = u32::MAX;

/// Somebody at the other end of a socket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Process id; 0: it is in a PID namespace that ours does not see, or asks over TCP.
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
            origin: origin.unwrap_or(Origin::NotLookedAt),
        })
    }

    /// Whether it is root of this host.
    pub fn is_root(&self) -> bool {
        self.uid == 0 && self.origin == Origin::Here
    }

    /// Whether it may speak for the whole arbiter: its own user, or root.
    pub fn governs(&self) -> bool {
        let ours = rustix::process::geteuid().as_raw();
        match &self.origin {
            Origin::Here => self.uid == 0 || self.uid == ours,
            Origin::Remote(bearer) => bearer.role == Role::Operator,
            Origin::Container(_) | Origin::Unknown | Origin::NotLookedAt => false,
        }
    }

    /// Somebody who has shown nothing yet.
    pub fn nobody() -> Self {
        Self {
            pid: 0,
            uid: NOBODY,
            origin: Origin::Unknown,
        }
    }

    /// The holder of a token.
    pub fn remote(bearer: Arc<Bearer>) -> Self {
        let uid = match bearer.role {
            Role::ReadOnly => NOBODY,
            Role::User(uid) => uid,
            Role::Operator => rustix::process::geteuid().as_raw(),
        };
        Self {
            pid: 0,
            uid,
            origin: Origin::Remote(bearer),
        }
    }

    /// Whether it may ask at all: it was looked at, and a token's role, where it is one that asks,
    /// covers such a request.
    ///
    /// # Errors
    /// There were no descriptors to look with, the role does not cover it, or it takes a process of
    /// this host.
    pub fn may_ask(&self, request: &Request) -> Result<(), ControlError> {
        let bearer = match &self.origin {
            Origin::Remote(bearer) => bearer,
            // As one who may be in any container it would see half of everything, and not why.
            Origin::NotLookedAt => {
                return Err(ControlError::new(ErrorCode::Internal, Descriptors::lack()));
            }
            Origin::Here | Origin::Container(_) | Origin::Unknown => return Ok(()),
        };
        let is_read_only = bearer.role == Role::ReadOnly;
        let refused = |message: String, hint: &str| {
            Err(ControlError::new(ErrorCode::Permission, message).with_hint(hint))
        };
        match request {
            Request::Register(_) => refused(
                "a job is the process that registers itself, and over TCP there is none that the kernel vouches for".into(),
                "ask over api.sock on the arbiter's host, or start the job there with `sublet run`",
            ),
            Request::Config { .. } if is_read_only => refused(
                format!("the token `{}` stands for no user, and a configuration is a user's", bearer.name),
                "use a token with a `uid`, or one whose role is `operator`",
            ),
            _ if is_read_only && !is_reading(request) => refused(
                format!("the token `{}` may read, and change nothing", bearer.name),
                "use a token with a `uid`, or one whose role is `operator`",
            ),
            _ => Ok(()),
        }
    }

    /// Whether it is a user of this host, and of no container.
    ///
    /// # Errors
    /// Why not, for that user.
    pub fn must_be_of_this_host(&self) -> Result<(), ControlError> {
        let (message, hint) = match self.origin {
            Origin::Here | Origin::Remote(_) => return Ok(()),
            Origin::Container(_) => (
                "you are in a container, whose root is not the host's".to_owned(),
                "ask on the host",
            ),
            Origin::Unknown | Origin::NotLookedAt => self.not_seen(),
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

/// Whether a request leaves everything as it is.
pub fn is_reading(request: &Request) -> bool {
    match request {
        Request::Status
        | Request::List
        | Request::Job { .. }
        | Request::Devices
        | Request::Groups
        | Request::Events { .. }
        | Request::Timeline { .. }
        | Request::Config { .. } => true,
        Request::Register(_)
        | Request::Set { .. }
        | Request::SetDevice { .. }
        | Request::Move(_)
        | Request::Acquire { .. }
        | Request::Yield { .. }
        | Request::Reload
        | Request::Shutdown
        | Request::HookRefused { .. } => false,
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

    #[test]
    fn one_who_could_not_be_looked_at_is_given_that_reason_whatever_it_asks() {
        let peer = Peer {
            origin: Origin::NotLookedAt,
            ..Peer::here(7, rustix::process::geteuid().as_raw())
        };
        assert!(!peer.governs() && !peer.is_root() && peer.must_be_of_this_host().is_err());
        for request in Request::one_of_each() {
            let error = peer.may_ask(&request).expect_err("refused");
            assert!(error.message.contains("ulimit -n"), "{request:?}: {error}");
        }
    }

    #[test]
    fn a_token_governs_by_its_role_and_never_by_its_number() {
        let ours = rustix::process::geteuid().as_raw();
        let remote = |role| {
            let name = "a".into();
            Peer::remote(Arc::new(Bearer { name, role }))
        };
        let all = [
            (Role::ReadOnly, false),
            (Role::User(0), false),
            (Role::User(ours), false),
            (Role::User(ours + 1), false),
            (Role::Operator, true),
        ];
        for (role, governs) in all {
            let peer = remote(role);
            assert_eq!(peer.governs(), governs, "{role:?}");
            assert!(!peer.is_root(), "{role:?}");
            for request in Request::one_of_each() {
                let is_config = matches!(request, Request::Config { .. });
                let is_register = matches!(request, Request::Register(_));
                let wanted = match role {
                    Role::ReadOnly => is_reading(&request) && !is_config,
                    _ => !is_register,
                };
                let may = peer.may_ask(&request);
                assert_eq!(may.is_ok(), wanted, "{role:?}: {request:?}: {may:?}");
                assert!(Peer::here(1, ours).may_ask(&request).is_ok());
            }
        }
    }
}
