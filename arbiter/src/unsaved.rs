//! Registrations that are not in the state file yet, and whose launchers wait for that.
//!
//! A launcher that is answered may count on it that every arbiter knows its job, however soon this
//! one is killed: the program that it becomes brings a token and nothing else. The file is written
//! beside the loop. A disk that takes longer than [`PATIENCE_NS`] keeps nobody from starting.

use control::{ControlError, Registered, Reply};
use policy::TenantId;

use crate::serve::Arbiter;

/// How long an answer waits for the state file. TIMEOUT: a disk under load syncs within tenths of
/// a second; who starts a job waits for it.
const PATIENCE_NS: u64 = 1_000_000_000;

/// Those that wait; no more than there are connections of operators.
#[derive(Debug, Default)]
pub(crate) struct Unsaved(Vec<Waiting>);

#[derive(Debug)]
struct Waiting {
    connection: u64,
    job: TenantId,
    registered: Registered,
    until_ns: u64,
}

impl Unsaved {
    /// A launcher waits.
    fn add(&mut self, connection: u64, registered: Registered, now_ns: u64) {
        self.0.push(Waiting {
            connection,
            job: TenantId(registered.id),
            registered,
            until_ns: now_ns.saturating_add(PATIENCE_NS),
        });
    }

    /// Those that wait no longer, for `is_saved` says so of their job, or it has taken too long.
    fn take(&mut self, now_ns: u64, is_saved: impl Fn(TenantId) -> bool) -> Vec<Waiting> {
        let over = |one: &mut Waiting| is_saved(one.job) || now_ns >= one.until_ns;
        self.0.extract_if(.., over).collect()
    }
}

impl Arbiter {
    /// Answers a registration: at once where it was refused, else when a successor would know the
    /// job.
    pub(crate) fn answer_registration(
        &mut self,
        connection: u64,
        registered: Result<Registered, ControlError>,
        now_ns: u64,
    ) {
        match registered {
            Ok(registered) => self.unsaved.add(connection, registered, now_ns),
            Err(error) => {
                self.control
                    .reply(connection, &Err(error), now_ns, &self.poller);
            }
        }
    }

    /// Answers those whose jobs are in the file, or have waited for too long for that.
    pub(crate) fn answer_saved(&mut self, now_ns: u64) {
        // One that is gone needs no successor.
        let (ledger, persistence) = (&self.ledger, &self.persistence);
        let is_saved = |job| {
            let tenant = ledger.get(job);
            tenant.is_none_or(|tenant| persistence.has(tenant.saved_as))
        };
        let waiting = self.unsaved.take(now_ns, is_saved);
        let overdue = waiting.iter().map(|one| one.job);
        let overdue: Vec<TenantId> = overdue.filter(|job| !is_saved(*job)).collect();
        for waiting in waiting {
            if overdue.contains(&waiting.job) {
                self.tell_unsaved(waiting.job, now_ns);
            }
            let reply = Ok(Reply::Registered(waiting.registered));
            self.control
                .reply(waiting.connection, &reply, now_ns, &self.poller);
        }
    }

    /// A job starts although no successor of ours would know of it.
    fn tell_unsaved(&mut self, job: TenantId, now_ns: u64) {
        let file = self.rulebook.options().dir.state_file();
        let Some(tenant) = self.ledger.get_mut(job) else {
            return;
        };
        if tenant.allowance.spend(now_ns).is_some() {
            let name = tenant.spec.name.clone();
            let message = format!(
                "job `{name}` starts before it is in {}: the disk has not taken it for {} ms, and an arbiter after this one may not know it",
                file.display(),
                PATIENCE_NS / 1_000_000
            );
            self.journal.write("unsaved", &name, message, &[]);
        }
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
        let connections = |waiting: Vec<Waiting>| -> Vec<u64> {
            waiting.iter().map(|one| one.connection).collect()
        };
        assert_eq!(connections(unsaved.take(6, |_| false)), [0u64; 0]);
        assert_eq!(connections(unsaved.take(6, |job| job.0 == 2)), [12]);
        let late_ns = 5 + PATIENCE_NS;
        assert_eq!(connections(unsaved.take(late_ns - 1, |_| false)), [0u64; 0]);
        assert_eq!(connections(unsaved.take(late_ns, |_| false)), [11, 13]);
        assert_eq!(connections(unsaved.take(late_ns, |_| true)), [0u64; 0]);
    }
}
