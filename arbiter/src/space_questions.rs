//! Questions about space: heard, and answered by figures that are newer than the question.
//!
//! A client that asks rings. What all jobs hold is read for it, once in a while at most, however
//! often it asks; the devices' schedulers then answer
//! ([`hear`](crate::dispatch::DeviceScheduler::hear)).

use crate::serve::Arbiter;

impl Arbiter {
    /// Takes note of a client's question, where it has asked one.
    pub(crate) fn hear(&mut self, id: u64) {
        if let Some(number) = self.clients.take_question(id) {
            self.space.note_question(id, number);
        }
    }

    /// A client says that this was too little for a context.
    pub(crate) fn note_context(&mut self, now_ns: u64, uid: u32, device: u32, bytes: u64) {
        // CAST: widens.
        self.space.note_context(now_ns, uid, device as usize, bytes);
    }

    /// Has questions answered that are due. Returns when others are.
    pub(crate) fn answer_questions(&mut self, now_ns: u64) -> Option<u64> {
        let due_ns = self.space.due_ns()?;
        if due_ns > now_ns {
            return Some(due_ns);
        }
        let asked = self.space.take_questions(now_ns);
        // Newer than the questions.
        self.read_accounts();
        for (id, number) in asked {
            let Some(client) = self.clients.get(id) else {
                continue;
            };
            let uid = self
                .ledger
                .get(client.tenant)
                .map_or(u32::MAX, |tenant| tenant.uid);
            for index in client.device_indices() {
                let context_bytes = self.space.context_bytes(now_ns, uid, index);
                if let Some(scheduler) = self.schedulers.get_mut(index) {
                    scheduler.hear(now_ns, id, number, context_bytes);
                    self.schedulers.mark(1 << index);
                }
            }
        }
        None
    }
}
