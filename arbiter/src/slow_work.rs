//! When the slow things are seen to: housekeeping, and a look at the profiles.
//!
//! Owns their due times. They are not in the way of a hand-over: while one is under way or near
//! they are put off, and no longer than [`PUT_OFF_NS`]; the core is left to the threads that were
//! just woken, and to the turn that is near.

/// How often the slow things are seen to: deadlines of strangers, journals, the file of the state.
pub const HOUSEKEEPING_NS: u64 = 100_000_000;
/// How long they are put off at most while a hand-over is under way or near.
const PUT_OFF_NS: u64 = 20_000_000;

/// One of the slow things.
#[derive(Debug, Default)]
struct Task {
    /// `None`: there is nothing to do.
    due_ns: Option<u64>,
    /// It is due and put off until then.
    put_off_ns: Option<u64>,
}

impl Task {
    /// Whether it may be seen to now.
    fn look(&mut self, now_ns: u64, until_ns: u64) -> bool {
        let waits = |due_ns| now_ns >= due_ns && now_ns < until_ns && now_ns < due_ns + PUT_OFF_NS;
        self.put_off_ns = self.due_ns.is_some_and(waits).then_some(until_ns);
        self.put_off_ns.is_none()
    }

    /// When to look again.
    fn next_ns(&self) -> Option<u64> {
        self.put_off_ns.or(self.due_ns)
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct SlowWork {
    housekeeping: Task,
    profiles: Task,
}

impl SlowWork {
    /// Housekeeping is due at once.
    pub fn new(now_ns: u64) -> Self {
        Self {
            housekeeping: Task {
                due_ns: Some(now_ns),
                put_off_ns: None,
            },
            profiles: Task::default(),
        }
    }

    /// A hand-over is under way or near until `until_ns` (0: none is): whether housekeeping is to
    /// be done now, and whether profiles may be looked at.
    pub fn look(&mut self, now_ns: u64, until_ns: u64) -> (bool, bool) {
        let is_due = self.housekeeping.due_ns.is_some_and(|ns| ns <= now_ns);
        let may_keep = self.housekeeping.look(now_ns, until_ns);
        (is_due && may_keep, self.profiles.look(now_ns, until_ns))
    }

    /// By how much housekeeping is behind.
    pub fn late_ns(&self, now_ns: u64) -> u64 {
        now_ns.saturating_sub(self.housekeeping.due_ns.unwrap_or(now_ns))
    }

    /// Housekeeping was done.
    pub fn note_housekeeping(&mut self, now_ns: u64) {
        self.housekeeping.due_ns = Some(now_ns + HOUSEKEEPING_NS);
    }

    /// Profiles were looked at, and are to be again at that time.
    pub fn note_profiles(&mut self, due_ns: Option<u64>) {
        self.profiles.due_ns = due_ns;
    }

    /// When to come back for housekeeping.
    pub fn housekeeping_ns(&self) -> Option<u64> {
        self.housekeeping.next_ns()
    }

    /// When to come back for the profiles.
    pub fn profiles_ns(&self) -> Option<u64> {
        self.profiles.next_ns()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_due_is_put_off_for_a_hand_over_and_not_for_long() {
        let mut slow = SlowWork::new(100);
        slow.note_profiles(Some(100));
        assert_eq!(slow.look(99, 0), (false, true), "it is not due");
        assert_eq!(slow.look(100, 150), (false, false));
        assert_eq!(slow.housekeeping_ns(), Some(150));
        assert_eq!(slow.profiles_ns(), Some(150));
        let later_ns = 100 + PUT_OFF_NS;
        assert_eq!(slow.look(later_ns, later_ns + 50), (true, true));
        assert_eq!(slow.late_ns(later_ns), PUT_OFF_NS);
        slow.note_housekeeping(later_ns);
        slow.note_profiles(None);
        assert_eq!(slow.housekeeping_ns(), Some(later_ns + HOUSEKEEPING_NS));
        assert_eq!(slow.profiles_ns(), None);
        assert_eq!(slow.look(later_ns, later_ns + 50), (false, true));
    }
}
