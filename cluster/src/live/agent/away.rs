//! Jobs of other engines whose memory the hook wants off the device, while their engine has them
//! suspended: moved out before, and back afterwards.
//!
//! The hook says each time which jobs these are; where it does not know, as just after its start,
//! all stays as it is. What was moved is written down before it is, so that an agent that is
//! started again brings it back. A turn moves one job each way: reports go on meanwhile.

use std::collections::BTreeSet;

use control::{
    Client as ControlClient, ClientError as ControlFailure, JobMoved, MoveOutcome, Moves,
};

use super::Agent;
use crate::live::wire::{AwayJob, MAX_OTHERS, is_slurms};

/// TIMEOUT: below what the arbiter's answers are waited for. A job that takes longer moves on, and
/// is asked about again in the next turn.
const MOVE_MS: u64 = 1000;

impl Agent {
    /// Moves what the hook wants moved. `true`: something is still on its way.
    pub(super) fn move_others(&mut self, wanted: Option<Vec<String>>) -> bool {
        let Some(wanted) = wanted else {
            return false;
        };
        let wanted: BTreeSet<String> = wanted
            .into_iter()
            .filter(|name| is_slurms(name))
            .take(MAX_OTHERS)
            .collect();
        self.away.retain(|name, _| wanted.contains(name));
        let is_settled = |one: &AwayJob| one.evicted || !one.reason.is_empty();
        let next = wanted
            .iter()
            .find(|name| !self.away.get(*name).is_some_and(is_settled));
        if let Some(name) = next.cloned() {
            if !self.note_move(&name) {
                // Not now; in the next turn.
                return false;
            }
            let one = self.evict(&name);
            if !one.reason.is_empty() && self.memory.moved.remove(&name) {
                self.remember();
            }
            self.away.insert(name, one);
        }
        let back = self.memory.moved.difference(&wanted).next().cloned();
        if let Some(name) = &back
            && self.restore(name)
        {
            self.memory.moved.remove(name);
            self.remember();
        }
        let open = |name: &String| !self.away.get(name).is_some_and(is_settled);
        wanted.iter().any(open) || self.memory.moved.difference(&wanted).next().is_some()
    }

    /// Writes down that a job is to be moved. `false`: it must stay, for the next agent would not
    /// bring it back.
    fn note_move(&mut self, name: &str) -> bool {
        if !self.memory.moved.insert(name.to_owned()) {
            return self.unsaved.is_none();
        }
        let written = self.remember();
        if !written {
            self.memory.moved.remove(name);
        }
        written
    }

    fn move_one(&mut self, name: &str, evict: bool) -> Result<Option<JobMoved>, ControlFailure> {
        let list = |is: bool| {
            if is {
                vec![name.to_owned()]
            } else {
                Vec::new()
            }
        };
        let moves = Moves {
            evict: list(evict),
            restore: list(!evict),
            deadline_ms: MOVE_MS,
            ..Moves::default()
        };
        let moved = self.with_arbiter(|arbiter: &mut ControlClient| arbiter.move_jobs(&moves))?;
        Ok(moved.jobs.into_iter().next())
    }

    fn evict(&mut self, name: &str) -> AwayJob {
        let mut one = AwayJob {
            name: name.to_owned(),
            ..AwayJob::default()
        };
        match self.move_one(name, true) {
            Ok(Some(moved)) => match moved.outcome {
                MoveOutcome::Done => one.evicted = true,
                MoveOutcome::Refused | MoveOutcome::Failed => {
                    one.reason = match moved.reason.as_str() {
                        "" => "its memory cannot leave".into(),
                        reason => reason.to_owned(),
                    };
                }
                // On its way.
                _ => {}
            },
            Err(ControlFailure::Refused(refusal)) => one.reason = refusal.to_string(),
            // The arbiter is asked again.
            Ok(None) | Err(_) => {}
        }
        one
    }

    /// Whether nothing more is to be done about it.
    fn restore(&mut self, name: &str) -> bool {
        match self.move_one(name, false) {
            // One that waits for space, or is on its way, comes by itself.
            Ok(_) | Err(ControlFailure::Refused(_)) => true,
            Err(_) => false,
        }
    }
}
