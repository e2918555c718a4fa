//! The ban for lack of progress: a process whose work waits while the device is idle holds up
//! nobody.
//!
//! A stream that waits for a host function, for a copy or for a peer has work pending, and looks
//! as if the device kept it waiting. Shutting others for it idles the device for as long as that
//! takes. So a process that got nothing done while the device had nothing else to do is left out of
//! its job's wishes for a time, each time for longer. Its first progress ends the ban; only the
//! memory of it stays, so that a stall that comes back in every step costs one wait a step.
//!
//! Per process, not per job: beside a stalled process the others of its job go on.

use super::constants::Constants;
use super::signals::{ProcessLook, Total, WentBack};

/// What is known of a process.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProcessState {
    /// What its page said last.
    pub last: ProcessLook,
    /// Seen at this look.
    pub present: bool,
    /// What it got done at this look, by its weights, in nanoseconds.
    pub done_ns: u64,
    /// Idle time of the device since it last got something done, in nanoseconds.
    stuck_ns: f64,
    banned_until_ns: u64,
    next_ban_ns: f64,
}

/// What a process did since the last look.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Difference {
    pub passed_ns: u64,
    pub submitted_ns: u64,
    pub fresh: u64,
}

impl ProcessState {
    pub fn new(first: ProcessLook, constants: &Constants) -> Self {
        Self {
            last: first,
            present: true,
            done_ns: 0,
            stuck_ns: 0.0,
            banned_until_ns: 0,
            next_ban_ns: constants.ban_first_ns as f64,
        }
    }

    /// Takes in what its page says now.
    pub fn advance(&mut self, look: &ProcessLook) -> Result<Difference, WentBack> {
        let before = std::mem::replace(&mut self.last, *look);
        let since = |now: Total, then: Total| now.since(then);
        Ok(Difference {
            passed_ns: since(look.passed_ns, before.passed_ns)?,
            submitted_ns: since(look.submitted_ns, before.submitted_ns)?,
            fresh: since(look.fresh, before.fresh)?,
        })
    }

    /// Whether its wishes count.
    pub fn counts(&self, now_ns: u64) -> bool {
        now_ns >= self.banned_until_ns
    }

    /// What it may have running: the largest kernel of a process with work on the device whose
    /// wishes count, in nanoseconds.
    pub fn may_run_ns(&self, now_ns: u64) -> u64 {
        if self.last.pending_ns() > 0 && self.counts(now_ns) {
            self.last.largest_ns
        } else {
            0
        }
    }

    /// Nothing was finished for `idle_ns` since the last look; the device may be busy with a kernel
    /// of `running_ns` that nobody sees before it ends.
    pub fn judge(&mut self, now_ns: u64, idle_ns: f64, running_ns: u64, constants: &Constants) {
        let passed_ns = std::mem::take(&mut self.done_ns);
        if passed_ns > 0 {
            self.stuck_ns = 0.0;
            self.banned_until_ns = 0;
            let forgotten = (passed_ns as f64 / constants.ban_forget_ns as f64).min(1.0);
            self.next_ban_ns =
                (self.next_ban_ns * (1.0 - forgotten)).max(constants.ban_first_ns as f64);
            return;
        }
        // Work in the driver's hands, or a call that waits: at a shut gate nothing could be done.
        if self.last.pending_ns() == 0 && self.last.in_wait == 0 {
            self.stuck_ns = 0.0;
            return;
        }
        self.stuck_ns = (self.stuck_ns + idle_ns).max(0.0);
        let running = running_ns.max(self.last.largest_ns);
        let running = running.min(constants.stall_kernel_ns);
        // With a process that stalls again and again, patience gets shorter.
        let again = constants.ban_first_ns as f64 / self.next_ban_ns;
        let patience = constants.stall_ns as f64 * again + 2.0 * running as f64;
        if self.counts(now_ns) && self.stuck_ns > patience {
            self.banned_until_ns = now_ns.saturating_add(self.next_ban_ns as u64);
            self.next_ban_ns = (self.next_ban_ns * 2.0).min(constants.ban_most_ns as f64);
            self.stuck_ns = 0.0;
        }
    }
}
