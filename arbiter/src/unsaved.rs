//! Registrations that are not in the state file yet, and whose launchers wait for that.
//!
//! A launcher that is answered may count on it that every arbiter knows its job, however soon this
//! one is killed: the program that it becomes brings a token and nothing else. The file is written
//! beside the loop. A disk that takes longer than [`PATIENCE_NS`] keeps nobody from starting.

use control::Registered;
use policy::TenantId;

/// How long an answer waits for the state file. TIMEOUT: a disk under load syncs within tenths of
/// a second; who starts a job waits for it.
pub const PATIENCE_NS: u64 = 1_000_000_000;

/// Those that wait; no more than there are connections of operators.
#[derive(Debug, Default)]
pub(crate) struct Unsaved(Vec<Waiting>);

/// A launcher that waits.
#[derive(Debug)]
pub(crate) struct Waiting {
    /// Its request.
    pub number: u64,
    /// Its job.
    pub job: TenantId,
    /// The answer.
    pub registered: Registered,
    until_ns: u64,
}

impl Unsaved {
    /// A launcher waits.
    pub fn add(&mut self, number: u64, registered: Registered, now_ns: u64) {
        self.0.push(Waiting {
            number,
            job: TenantId(registered.id),
            registered,
            until_ns: now_ns.saturating_add(PATIENCE_NS),
        });
    }

    /// Those that wait no longer, for `is_saved` says so of their job, or it has taken too long.
    pub fn take(&mut self, now_ns: u64, is_saved: impl Fn(TenantId) -> bool) -> Vec<Waiting> {
        let over = |one: &mut Waiting| is_saved(one.job) || now_ns >= one.until_ns;
        self.0.extract_if(.., over).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registered(id: u64) -> Registered {
        Registered {
            id,
            ..Registered::default()
        }
    }

    #[test]
    fn each_waits_for_its_own_job_and_not_for_ever() {
        let mut unsaved = Unsaved::default();
        for id in 1..=3 {
            unsaved.add(10 + id, registered(id), 5);
        }
        let numbers =
            |waiting: Vec<Waiting>| -> Vec<u64> { waiting.iter().map(|one| one.number).collect() };
        assert_eq!(numbers(unsaved.take(6, |_| false)), [0u64; 0]);
        assert_eq!(numbers(unsaved.take(6, |job| job.0 == 2)), [12]);
        let late_ns = 5 + PATIENCE_NS;
        assert_eq!(numbers(unsaved.take(late_ns - 1, |_| false)), [0u64; 0]);
        assert_eq!(numbers(unsaved.take(late_ns, |_| false)), [11, 13]);
        assert_eq!(numbers(unsaved.take(late_ns, |_| true)), [0u64; 0]);
    }
}
