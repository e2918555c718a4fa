//! What a job can come to have on the device for allocations that find no space: what its processes
//! ask, what they are answered, and how much of what they say they wait for counts.
//!
//! A process that finds no space asks first, and waits if the answer allows it: so a request that
//! cannot be met is refused at once, and nobody leaves for it. What is waited for and cannot be had
//! after all (things have changed, or a client does not ask) counts as nothing.
//!
//! An answer is as good as the figures behind it. What jobs hold is read after a question was
//! heard. What else is on the device (contexts, code, strangers) is known from NVML, a little late;
//! so an answer says what could be had without all that, and whether the figures are newer than the
//! question.

use std::collections::BTreeMap;

use channel::SpaceAnswer;
use policy::residency::ResidentJob;

use super::{JobView, Phase, ResidencyManager};

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Questions {
    /// By client.
    heard: BTreeMap<u64, Heard>,
    /// What the device has for jobs if nothing is on it but what they account for; 0: not known.
    ceiling_bytes: u64,
    /// When the figures were taken that say what else is on it.
    taken_ns: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Heard {
    /// Number of the last question, and when it was heard.
    number: u32,
    at_ns: u64,
    /// What is answered by figures that are newer.
    confirmed: u32,
    /// So many bytes were too few for a context.
    context_bytes: u64,
}

impl Questions {
    pub(super) fn forget(&mut self, client: u64) {
        self.heard.remove(&client);
    }
}

impl ResidencyManager {
    /// A client asks; the accounts are newer than this. `context_bytes`: so many were too few for a
    /// context of its user's; 0: that is not known.
    pub fn hear(&mut self, now_ns: u64, client: u64, number: u32, context_bytes: u64) {
        let heard = self.questions.heard.entry(client).or_default();
        (heard.number, heard.at_ns) = (number, now_ns);
        heard.context_bytes = context_bytes;
    }

    /// What the device has for jobs if nothing is on it but what they account for, and when the
    /// figures were taken that say what else is.
    pub fn set_ceiling(&mut self, ceiling_bytes: u64, taken_ns: u64) {
        self.questions.ceiling_bytes = ceiling_bytes;
        self.questions.taken_ns = self.questions.taken_ns.max(taken_ns);
    }

    /// How much of what a job's threads say they wait for counts: what it can come to have, of one
    /// process after the other.
    pub(super) fn claimed_bytes(&self, job: &JobView<'_>) -> u64 {
        let limit_bytes = job.terms.limit_bytes.unwrap_or(u64::MAX);
        let most_bytes = self.attainable_bytes(job).min(limit_bytes);
        let mut counted = 0u64;
        for (_, pages) in job.clients {
            let claimed = pages.client.space_bytes(self.device);
            counted = match counted.checked_add(claimed) {
                Some(sum) if sum <= most_bytes => sum,
                _ => counted,
            };
        }
        counted
    }

    fn attainable_bytes(&self, job: &JobView<'_>) -> u64 {
        // Where memory is divided, what such a job has itself shrinks for what has to be there.
        let gives_way = self.coordinator.is_some() && self.is_coordinated(job);
        self.residents(0).attainable_bytes(job.id, gives_way)
    }

    /// Answers what was asked, and says to all what they can come to have now.
    pub(super) fn answer_questions(&mut self, jobs: &[JobView<'_>]) {
        if self.questions.heard.is_empty() {
            return;
        }
        let settled = self
            .records
            .values()
            .all(|record| record.phase == Phase::Settled);
        let met = settled && self.residents(0).lacking_bytes(0) == 0;
        let waits = |one: &&ResidentJob| one.space_bytes > 0 && !one.out;
        let more_bytes = self
            .questions
            .ceiling_bytes
            .saturating_sub(self.capacity_bytes);
        for job in jobs {
            let most_bytes = self.attainable_bytes(job);
            let same = self.residents.iter().filter(|one| one.id == job.id);
            let met = met && same.clone().any(|one| waits(&one));
            for (client, pages) in job.clients {
                let Some(heard) = self.questions.heard.get_mut(client) else {
                    continue;
                };
                if more_bytes == 0 || self.questions.taken_ns >= heard.at_ns {
                    heard.confirmed = heard.number;
                }
                let answer = SpaceAnswer {
                    number: heard.number,
                    confirmed: heard.confirmed,
                    met: if met { heard.number } else { 0 },
                    most_bytes,
                    ceiling_bytes: most_bytes.saturating_add(more_bytes),
                    context_bytes: heard.context_bytes,
                };
                if pages.arbiter.answer_space(self.device, &answer) {
                    pages.arbiter.nudge();
                }
            }
        }
    }
}
