//! Asking the arbiter: whichever is there at that time.

use std::time::Duration;

use control::paths::{RuntimeDir, Surroundings};
use control::{ArbiterStatus, Client, Event};

use crate::connect::{self, Unreachable};

/// TIMEOUT: an arbiter answers within milliseconds; one that does not may be waited for a while,
/// since the view shows how old its figures are.
const ANSWER: Duration = Duration::from_secs(5);
/// Of its events, so many are asked for at once: an answer has a bounded length.
const EVENTS: u32 = 50;

/// What came of one look.
#[derive(Debug)]
pub struct Look {
    pub status: ArbiterStatus,
    /// Those since the look before.
    pub events: Vec<Event>,
}

#[derive(Debug, Default)]
pub struct Asker {
    /// The last event that is known, and of which arbiter: its process and when it began.
    last: (u64, (u32, u64)),
}

#[derive(Debug, thiserror::Error)]
pub enum NoAnswer {
    #[error(transparent)]
    Place(#[from] control::paths::PathError),
    #[error(transparent)]
    Unreachable(#[from] Unreachable),
}

/// Where the arbiter is, or would be.
///
/// # Errors
/// A place that is none.
pub fn place() -> Result<RuntimeDir, control::paths::PathError> {
    RuntimeDir::find(&Surroundings::of_this_process())
}

/// How things stand.
///
/// # Errors
/// Why that is not known.
pub fn status() -> Result<ArbiterStatus, NoAnswer> {
    let dir = place()?;
    Ok(connect::ask(
        || connect::within(&dir, ANSWER),
        Client::status,
    )?)
}

impl Asker {
    /// How things stand, and what happened since the look before.
    ///
    /// # Errors
    /// As [`status`].
    pub fn look(&mut self) -> Result<Look, NoAnswer> {
        let dir = place()?;
        let status = connect::ask(|| connect::within(&dir, ANSWER), Client::status)?;
        let arbiter = (status.pid, status.started_unix_ms);
        if self.last.1 != arbiter {
            self.last = (0, arbiter);
        }
        let mut events = Vec::new();
        // An arbiter that does not tell of events is one that can be looked at all the same.
        while let Ok(some) = connect::ask(
            || connect::within(&dir, ANSWER),
            |client: &mut Client| client.events(self.last.0, EVENTS),
        ) {
            let Some(last) = some.last() else {
                break;
            };
            // One that gives no greater number would be asked for ever.
            if last.seq <= self.last.0 {
                break;
            }
            self.last.0 = last.seq;
            let is_all = some.len() < EVENTS as usize;
            events.extend(some);
            if is_all {
                break;
            }
        }
        Ok(Look { status, events })
    }
}
