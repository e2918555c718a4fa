//! Operators that wait for jobs to be moved.
//!
//! Owns their requests: which jobs, since when and until when, and what has become of each so far.
//! So many of them wait at a time; each is answered once, when all of its jobs have arrived or
//! cannot, or when its time is up.

use control::{JobMoved, MoveOutcome};
use policy::TenantId;

/// How long a move may take where the operator does not say.
const PATIENCE_NS: u64 = 120_000_000_000;
/// Requests that wait at a time; the sockets' own bound is near.
pub const MAX_MOVE_REQUESTS: usize = 32;

/// A request that waits for its jobs.
#[derive(Debug)]
pub struct MoveRequest {
    number: u64,
    began_ns: u64,
    deadline_ns: u64,
    /// The answer in the end: one for each job.
    moved: Vec<(TenantId, JobMoved)>,
}

impl MoveRequest {
    /// Of an operator, to move these jobs: `true` for one that is to leave its devices.
    /// `deadline_ms` is the time that it may take; 0: as long as is usual.
    pub fn new(
        number: u64,
        jobs: impl Iterator<Item = (TenantId, String, bool)>,
        now_ns: u64,
        deadline_ms: u64,
    ) -> Self {
        let patience_ns = match deadline_ms {
            0 => PATIENCE_NS,
            ms => ms.saturating_mul(1_000_000),
        };
        let moved = jobs.map(|(id, job, evicted)| {
            let reported = JobMoved {
                job,
                evicted,
                ..JobMoved::default()
            };
            (id, reported)
        });
        Self {
            number,
            began_ns: now_ns,
            deadline_ns: now_ns.saturating_add(patience_ns),
            moved: moved.collect(),
        }
    }

    /// Who is to be answered.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// When it was made.
    pub fn began_ns(&self) -> u64 {
        self.began_ns
    }

    /// When it is answered at the latest.
    pub fn deadline_ns(&self) -> u64 {
        self.deadline_ns
    }

    /// Whether its time is up.
    pub fn is_over(&self, now_ns: u64) -> bool {
        now_ns >= self.deadline_ns
    }

    /// The jobs, with what has become of them.
    pub fn moved(&self) -> &[(TenantId, JobMoved)] {
        &self.moved
    }

    /// The answer.
    pub fn into_answer(self) -> Vec<JobMoved> {
        self.moved.into_iter().map(|(_, job)| job).collect()
    }

    /// Lets `see_to` find out what has become of the jobs of which that is not known yet. Whether
    /// it is known of all of them now.
    pub fn look(&mut self, mut see_to: impl FnMut(TenantId, &mut JobMoved)) -> bool {
        let is_open = |job: &JobMoved| job.outcome == MoveOutcome::Unknown;
        for (id, job) in &mut self.moved {
            if is_open(job) {
                see_to(*id, job);
            }
        }
        !self.moved.iter().any(|(_, job)| is_open(job))
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct MoveQueue {
    requests: Vec<MoveRequest>,
}

impl MoveQueue {
    /// Whether no more can wait.
    pub fn is_full(&self) -> bool {
        self.requests.len() >= MAX_MOVE_REQUESTS
    }

    /// One waits from here on, or goes on waiting.
    pub fn wait(&mut self, request: MoveRequest) {
        self.requests.push(request);
    }

    /// Takes all of them, to be looked at; those that are not answered [wait](Self::wait) on.
    pub fn take(&mut self) -> Vec<MoveRequest> {
        std::mem::take(&mut self.requests)
    }

    /// When the time of the next one is up.
    pub fn due_ns(&self) -> Option<u64> {
        self.requests.iter().map(MoveRequest::deadline_ns).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(number: u64, deadline_ms: u64) -> MoveRequest {
        let jobs = [
            (TenantId(1), "a".to_owned(), true),
            (TenantId(2), "b".to_owned(), false),
        ];
        MoveRequest::new(number, jobs.into_iter(), 5, deadline_ms)
    }

    #[test]
    fn a_request_is_over_when_all_of_its_jobs_are_or_its_time_is_up() {
        let mut request = request(7, 0);
        let mut asked = Vec::new();
        let over = request.look(|id, job| {
            asked.push(id);
            if id == TenantId(2) {
                job.outcome = MoveOutcome::Done;
            }
        });
        assert!(!over && asked == [TenantId(1), TenantId(2)]);
        assert!(request.look(|id, job| {
            assert_eq!(id, TenantId(1), "the other one is known");
            job.outcome = MoveOutcome::Failed;
        }));
        assert!(!request.is_over(4 + PATIENCE_NS) && request.is_over(5 + PATIENCE_NS));
        let answer = request.into_answer();
        assert_eq!((answer[0].job.as_str(), answer[0].evicted), ("a", true));
        assert_eq!(answer[1].outcome, MoveOutcome::Done);
    }

    #[test]
    fn so_many_wait_and_the_first_deadline_is_due() {
        let mut queue = MoveQueue::default();
        assert_eq!(queue.due_ns(), None);
        for at in 0..MAX_MOVE_REQUESTS as u64 {
            assert!(!queue.is_full());
            queue.wait(request(at, 100 - at));
        }
        assert!(queue.is_full());
        let first_ns = 5 + (101 - MAX_MOVE_REQUESTS as u64) * 1_000_000;
        assert_eq!(queue.due_ns(), Some(first_ns));
        assert_eq!(queue.take().len(), MAX_MOVE_REQUESTS);
        assert!(!queue.is_full());
    }
}
