//! What processes ask that find no space on a device, until it is answered.
//!
//! How large a context is the driver alone knows. A process for which there was not enough space,
//! with all others gone who may leave, says so. Its user's next processes do not make anybody leave
//! for as little; other users' processes do not go by a stranger's word.

use std::collections::BTreeMap;

use channel::MAX_DEVICES;

/// Least time between two readings of what jobs hold, for the sake of questions.
const READ_NS: u64 = 2_000_000;
/// So long it is remembered that a context had too little space.
const CONTEXT_NS: u64 = 600_000_000_000;
/// No context is larger than that by itself.
const CONTEXT_BYTES: u64 = 512 << 20;
/// Users and devices of whom that is remembered.
const CONTEXTS: usize = 256;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Space {
    /// Clients that have asked since what jobs hold was read, and the numbers of their questions.
    asked: BTreeMap<u64, u32>,
    read_ns: u64,
    /// Space that was too little for a context, and until when that counts, by user and device.
    contexts: BTreeMap<(u32, usize), (u64, u64)>,
}

impl Space {
    /// A client has asked.
    pub fn note_question(&mut self, client: u64, number: u32) {
        self.asked.insert(client, number);
    }

    /// The questions that are to be answered now, all of them.
    pub fn take_questions(&mut self, now_ns: u64) -> BTreeMap<u64, u32> {
        self.read_ns = now_ns;
        std::mem::take(&mut self.asked)
    }

    /// When the questions are due; `None`: there are none.
    pub fn due_ns(&self) -> Option<u64> {
        (!self.asked.is_empty()).then_some(self.read_ns.saturating_add(READ_NS))
    }

    /// So many bytes were too few for a context of this user's.
    pub fn note_context(&mut self, now_ns: u64, uid: u32, device: usize, bytes: u64) {
        self.contexts.retain(|_, (_, until_ns)| *until_ns > now_ns);
        let key = (uid, device);
        if device < MAX_DEVICES
            && (self.contexts.len() < CONTEXTS || self.contexts.contains_key(&key))
        {
            let entry = self.contexts.entry(key).or_default();
            *entry = (
                entry.0.max(bytes.min(CONTEXT_BYTES)),
                now_ns.saturating_add(CONTEXT_NS),
            );
        }
    }

    pub fn context_bytes(&self, now_ns: u64, uid: u32, device: usize) -> u64 {
        match self.contexts.get(&(uid, device)) {
            Some((bytes, until_ns)) if *until_ns > now_ns => *bytes,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn what_was_too_little_for_a_context_counts_for_its_user_and_for_a_while() {
        let mut space = Space::default();
        space.note_context(5, 1000, 0, 300 * MIB);
        space.note_context(5, 1000, 0, 200 * MIB);
        assert_eq!(space.context_bytes(6, 1000, 0), 300 * MIB);
        assert_eq!(space.context_bytes(6, 1001, 0), 0, "another user");
        assert_eq!(space.context_bytes(6, 1000, 1), 0, "another device");
        assert_eq!(space.context_bytes(5 + CONTEXT_NS, 1000, 0), 0, "over");
        space.note_context(5, 7, 0, u64::MAX);
        assert_eq!(space.context_bytes(6, 7, 0), CONTEXT_BYTES);
        for uid in 0..10_000 {
            space.note_context(6, uid, MAX_DEVICES, 1);
            space.note_context(6, uid, 3, 1);
        }
        assert_eq!(space.contexts.len(), CONTEXTS);
    }
}
