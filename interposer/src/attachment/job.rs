//! The job that this process is of, as its environment says, or in a container that of the first
//! process.
//!
//! Found out once per process: a monitor that reads NVML asks again and again, in whatever thread,
//! and the environment is the program's to change.

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::Duration;

use channel::wire::TOKEN_BYTES;

use crate::attachment::asked::{self, Asked};
use crate::ground::environment::{self, variable};
use crate::ground::process;

/// How long a job that freezes without its arbiter waits for one to begin with. TIMEOUT: time
/// enough for one to be restarted by hand.
const FREEZE: Duration = Duration::from_secs(60);
/// How long a process that is refused otherwise waits for an arbiter that is being restarted, or
/// that hangs. TIMEOUT: a restart takes milliseconds, on a host that is overloaded some seconds.
const RESTART: Duration = Duration::from_secs(30);
/// The same, where it goes on without limits in the end. TIMEOUT: what nobody has asked to be
/// enforced may not cost more than this.
const RESTART_OPEN: Duration = Duration::from_secs(2);

/// What a job does without its arbiter.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnLoss {
    /// Goes on, ungoverned in time; its memory quota still holds.
    Open,
    /// Waits for the next arbiter.
    Freeze,
    /// Submissions fail.
    Closed,
}

/// What becomes of a process that cannot be governed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnRefusal {
    /// It goes on without limits.
    Open,
    /// It does not start: every driver call fails.
    Closed,
}

/// Where the arbiter is, and what makes this process one of a job.
pub(super) struct Membership {
    socket: Box<Path>,
    pass: Pass,
}

/// What makes this process one of its job.
enum Pass {
    /// The capability that `sublet run` has handed out.
    Token {
        token: [u8; TOKEN_BYTES],
        /// The environment that it is from, where that is not this process's own.
        first: Vec<u8>,
    },
    /// The container that it is in, and what it asks for there.
    Container(Asked),
}

impl Membership {
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    pub(super) fn is_of_container(&self) -> bool {
        matches!(self.pass, Pass::Container(_))
    }

    /// Why it is not known what a container asks for.
    pub(super) fn unknown(&self) -> Option<&'static str> {
        match &self.pass {
            Pass::Token { .. } => None,
            Pass::Container(asked) => asked.unknown,
        }
    }

    /// The token, and what is asked for without one.
    pub(super) fn credentials(&self) -> ([u8; TOKEN_BYTES], Option<String>) {
        match &self.pass {
            Pass::Token { token, .. } => (*token, None),
            Pass::Container(asked) => ([0; TOKEN_BYTES], Some(asked.lines.clone())),
        }
    }

    /// A variable of the job.
    pub(super) fn value(&self, name: &CStr) -> Option<&[u8]> {
        match &self.pass {
            Pass::Token { first, .. } => {
                variable(name).or_else(|| environment::of(first, name.to_bytes()))
            }
            Pass::Container(asked) => asked.value(name),
        }
    }

    fn limited(&self) -> bool {
        matches!(&self.pass, Pass::Container(asked) if asked.limited)
    }
}

/// What was found; leaked, for threads may be looking at it. Null: nobody has asked yet.
static FOUND: AtomicPtr<Option<Membership>> = AtomicPtr::new(std::ptr::null_mut());

/// `None`: this process is in no job, or on its way out.
pub(super) fn membership() -> Option<&'static Membership> {
    if process::exiting() {
        return None;
    }
    let mut at = FOUND.load(Ordering::Acquire);
    if at.is_null() {
        let new = Box::into_raw(Box::new(find()));
        let first = FOUND.compare_exchange(at, new, Ordering::AcqRel, Ordering::Acquire);
        at = match first {
            Ok(_) => new,
            Err(others) => {
                // SAFETY: made above, and nobody else has seen it.
                drop(unsafe { Box::from_raw(new) });
                others
            }
        };
    }
    // SAFETY: leaked above, and never freed.
    unsafe { at.as_ref() }?.as_ref()
}

/// In a forked child: its environment may become another one.
pub(crate) fn forget() {
    FOUND.store(std::ptr::null_mut(), Ordering::Release);
}

fn find() -> Option<Membership> {
    let socket = variable(c"SUBLET_SOCKET").map(|path| Path::new(OsStr::from_bytes(path)));
    if let Some(token) = variable(c"SUBLET_TOKEN") {
        return Some(Membership {
            socket: socket?.into(),
            pass: Pass::Token {
                token: token.try_into().ok()?,
                first: Vec::new(),
            },
        });
    }
    if let Some(first) = asked::first_with_token() {
        return by_first(first);
    }
    let asked = asked::asked()?;
    Some(Membership {
        socket: socket.unwrap_or(Path::new(asked::SOCKET)).into(),
        pass: Pass::Container(asked),
    })
}

/// By the environment of a container's first process. What a pod's program starts with an emptied
/// environment is of the pod's job all the same.
fn by_first(first: Vec<u8>) -> Option<Membership> {
    let socket =
        environment::of(&first, b"SUBLET_SOCKET").map_or(asked::SOCKET.as_bytes(), |path| path);
    let token = environment::of(&first, b"SUBLET_TOKEN")?;
    Some(Membership {
        socket: Path::new(OsStr::from_bytes(socket)).into(),
        pass: Pass::Token {
            token: token.try_into().ok()?,
            first,
        },
    })
}

/// A variable of the job; where there is none, of this process.
pub(super) fn value(name: &CStr) -> Option<&'static [u8]> {
    match membership() {
        Some(membership) => membership.value(name),
        None => variable(name),
    }
}

/// What the job says about a process that cannot be governed; `None`: nothing, as a rule because
/// it was not started by `sublet run`.
pub(super) fn said() -> Option<OnRefusal> {
    match value(c"SUBLET_ON_REFUSAL")? {
        b"open" => Some(OnRefusal::Open),
        // Whatever it means, it was set by somebody who asked for something.
        _ => Some(OnRefusal::Closed),
    }
}

/// What a job's processes do at their start.
pub(super) struct Job {
    pub(super) membership: &'static Membership,
    pub(super) on_loss: OnLoss,
    pub(super) on_refusal: OnRefusal,
    /// How long an arbiter is waited for that is not there.
    pub(super) patience: Duration,
    pub(super) strict: bool,
}

impl Job {
    /// `None`: this process is in none, or on its way out.
    pub(super) fn of_this_process() -> Option<Self> {
        let membership = membership()?;
        let on_loss = match membership.value(c"SUBLET_ON_ARBITER_LOSS") {
            Some(b"freeze") => OnLoss::Freeze,
            Some(b"closed") => OnLoss::Closed,
            _ => OnLoss::Open,
        };
        let said = said();
        let on_refusal = match said {
            Some(said) => said,
            None if membership.limited() => OnRefusal::Closed,
            None if on_loss == OnLoss::Open => OnRefusal::Open,
            None => OnRefusal::Closed,
        };
        let patience = match (on_loss, said.is_some() || membership.is_of_container()) {
            (OnLoss::Freeze, _) => FREEZE,
            (_, false) => Duration::ZERO,
            (_, true) => match on_refusal {
                OnRefusal::Closed => RESTART,
                OnRefusal::Open => RESTART_OPEN,
            },
        };
        Some(Self {
            membership,
            on_loss,
            on_refusal,
            patience,
            strict: membership.value(c"SUBLET_STRICT").is_some(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_has_lost_its_environment_is_of_its_containers_job() {
        let token = "0123456789abcdef0123456789abcdef";
        let first = format!(
            "PATH=/bin\0SUBLET_SOCKET=/s\0SUBLET_TOKEN={token}\0SUBLET_ON_REFUSAL=closed\0"
        );
        let found = by_first(first.into_bytes()).expect("a job");
        assert_eq!(found.socket(), Path::new("/s"));
        let (shown, asks) = found.credentials();
        assert_eq!((&shown[..], asks), (token.as_bytes(), None));
        assert_eq!(found.value(c"SUBLET_ON_REFUSAL"), Some(&b"closed"[..]));
        assert!(by_first(b"PATH=/bin\0".to_vec()).is_none());
    }
}
