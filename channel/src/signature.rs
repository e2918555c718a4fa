//! What a client's threads submit, as numbers: the raw material of iteration detection.
//!
//! client --signatures, boundaries--> arbiter, in a page of its own that both sides may lack: an
//! older client does not ask for it ([`SIGNATURES`]), an older arbiter does not send it, and
//! nothing else depends on it.
//!
//! Each of the first few threads has a ring of 32-bit signatures, one per submission, indexed by
//! the thread's counter of submissions ([`ThreadSlot`](crate::ThreadSlot)). Equal numbers mean the
//! same kernel (or call) with the same shape; the upper [`KIND_BITS`] bits alone mean the same
//! kernel. Once the arbiter has found a period it names one signature of it, the *anchor*, and the
//! thread notes when it submits that one: a *boundary*. A program can note boundaries itself.
//!
//! The arbiter reads all of this as a stranger's claims: any value is a value.

use crate::layout::{
    ArbiterHalf, BOUNDARY_SLOTS, Boundary, BoundaryRing, SIGNATURE_SLOTS, SignaturePage,
    SignatureRing,
};
use crate::sync::{Acquire, Relaxed, Release};

/// Feature bit of the handshake: the client takes a fifth descriptor, its signature page.
pub const SIGNATURES: u64 = 1;

/// Upper bits of a signature that do not depend on the shape of a submission.
pub const KIND_BITS: u32 = 20;

/// A boundary that was noted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Noted {
    /// Number of the boundary since the page was made.
    pub number: u64,
    /// Submissions before it: of the thread for an anchor, of the whole process for a step.
    pub launches: u64,
    /// `CLOCK_MONOTONIC` time in nanoseconds.
    pub mono_ns: u64,
    /// Device memory that the process held then, in bytes.
    pub held_bytes: u64,
}

/// Client side.
impl SignaturePage {
    /// The ring of the thread with slot `slot`; threads beyond the first few have none.
    pub fn ring(&self, slot: usize) -> Option<&SignatureRing> {
        self.rings.get(slot)
    }

    /// Boundaries that the program itself notes.
    pub fn steps(&self) -> &BoundaryRing {
        &self.steps
    }
}

impl SignatureRing {
    /// Notes submission number `launches` of the owning thread. The count itself is published
    /// afterwards.
    #[inline(always)]
    pub fn record(&self, launches: u64, signature: u32) {
        // CAST: the modulus is the length. PANIC: likewise.
        self.words[launches as usize % SIGNATURE_SLOTS].store(signature, Relaxed);
    }

    /// Boundaries at the anchor.
    pub fn boundaries(&self) -> &BoundaryRing {
        &self.boundaries
    }
}

impl BoundaryRing {
    /// Notes a boundary.
    pub fn note(&self, launches: u64, mono_ns: u64, held_bytes: u64) {
        let number = self.head.fetch_add(1, Relaxed);
        // CAST, PANIC: the modulus is the length.
        let slot = &self.boundaries[number as usize % BOUNDARY_SLOTS];
        slot.sequence.store(0, Relaxed);
        slot.launches.store(launches, Relaxed);
        slot.mono_ns.store(mono_ns, Relaxed);
        slot.held_bytes.store(held_bytes, Relaxed);
        // SYNC(boundary): pairs with the Acquire loads in `get`, which reads the number before and
        // after.
        slot.sequence.store(number.wrapping_add(1), Release);
    }
}

/// Arbiter side.
impl SignatureRing {
    /// Copies signatures `from..upto` of the thread's submissions to the end of `into`, as far as
    /// they are still there: returns the first number copied. `upto` is a count that the caller has
    /// read before.
    pub fn copy(&self, from: u64, upto: u64, into: &mut Vec<u32>) -> u64 {
        // A few slots less than the ring has: the thread goes on while we read.
        let kept = (SIGNATURE_SLOTS - SIGNATURE_SLOTS / 8) as u64;
        let from = if upto.wrapping_sub(from) > kept {
            upto.wrapping_sub(kept)
        } else {
            from
        };
        let mut at = from;
        while at != upto {
            // CAST, PANIC: the modulus is the length.
            into.push(self.words[at as usize % SIGNATURE_SLOTS].load(Relaxed));
            at = at.wrapping_add(1);
        }
        from
    }
}

impl BoundaryRing {
    /// Boundaries ever noted.
    pub fn count(&self) -> u64 {
        self.head.load(Relaxed)
    }

    /// Boundary `number`, if it is whole and still there.
    pub fn get(&self, number: u64) -> Option<Noted> {
        // CAST, PANIC: the modulus is the length.
        let slot: &Boundary = &self.boundaries[number as usize % BOUNDARY_SLOTS];
        // SYNC(boundary): pairs with the Release store in `note`.
        if slot.sequence.load(Acquire) != number.wrapping_add(1) {
            return None;
        }
        let noted = Noted {
            number,
            launches: slot.launches.load(Acquire),
            mono_ns: slot.mono_ns.load(Acquire),
            held_bytes: slot.held_bytes.load(Acquire),
        };
        (slot.sequence.load(Relaxed) == number.wrapping_add(1)).then_some(noted)
    }

    /// Boundaries `from..`, oldest first, as far as they are whole and still there.
    pub fn since(&self, from: u64) -> impl Iterator<Item = Noted> + '_ {
        let head = self.count();
        let behind = head.wrapping_sub(from).min(BOUNDARY_SLOTS as u64);
        (0..behind).filter_map(move |ahead| self.get(head.wrapping_sub(behind).wrapping_add(ahead)))
    }
}

impl ArbiterHalf {
    /// Names the anchor: the thread with slot `slot` notes a boundary whenever it submits
    /// `signature`. `None`: none.
    pub fn set_anchor(&self, anchor: Option<(u32, u32)>) {
        let word = anchor.map_or(0, |(slot, signature)| {
            (u64::from(slot).wrapping_add(1) << 32) | u64::from(signature)
        });
        self.anchor.store(word, Relaxed);
    }

    /// The anchor for the thread with slot `slot`; 0: none.
    pub fn anchor(&self, slot: u32) -> u32 {
        let word = self.anchor.load(Relaxed);
        // CAST: the halves of the word.
        if word >> 32 == u64::from(slot) + 1 {
            word as u32
        } else {
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::{Mapped, Writers};

    fn page() -> Mapped<SignaturePage> {
        Mapped::<SignaturePage>::create(Writers::Holders)
            .expect("page")
            .0
    }

    #[test]
    fn signatures_come_out_in_order_and_old_ones_are_gone() {
        let page = page();
        let ring = page.ring(1).expect("ring");
        let mut copied = Vec::new();
        for launch in 0..5u32 {
            ring.record(u64::from(launch), 100 + launch);
        }
        assert_eq!(ring.copy(1, 5, &mut copied), 1);
        assert_eq!(copied, [101, 102, 103, 104]);
        let many = 3 * SIGNATURE_SLOTS as u64;
        for launch in 0..many {
            ring.record(launch, launch as u32);
        }
        copied.clear();
        let first = ring.copy(0, many, &mut copied);
        assert_eq!(copied.len() as u64, many - first);
        assert!(
            copied
                .iter()
                .zip(first..)
                .all(|(word, at)| u64::from(*word) == at)
        );
        assert!(
            copied.len() < SIGNATURE_SLOTS,
            "the thread may be overwriting the rest"
        );
        assert!(page.ring(1000).is_none());
    }

    #[test]
    fn boundaries_are_read_once_and_overwritten_ones_are_left_out() {
        let page = page();
        let steps = page.steps();
        assert_eq!(steps.since(0).count(), 0);
        for step in 0..3 {
            steps.note(10 * step, 1000 * step, step);
        }
        let read: Vec<Noted> = steps.since(1).collect();
        assert_eq!(read.len(), 2);
        assert_eq!(
            (read[0].number, read[0].launches, read[1].mono_ns),
            (1, 10, 2000)
        );
        for step in 3..200 {
            steps.note(10 * step, 1000 * step, step);
        }
        let numbers: Vec<u64> = steps.since(1).map(|noted| noted.number).collect();
        assert_eq!(
            numbers,
            (200 - BOUNDARY_SLOTS as u64..200).collect::<Vec<_>>()
        );
        assert_eq!(steps.get(3), None);
    }

    #[test]
    fn an_anchor_is_for_one_thread() {
        let half = Mapped::<ArbiterHalf>::create(Writers::OnlyUs)
            .expect("page")
            .0;
        assert_eq!(half.anchor(0), 0);
        half.set_anchor(Some((3, 77)));
        assert_eq!((half.anchor(3), half.anchor(0), half.anchor(2)), (77, 0, 0));
        half.set_anchor(None);
        assert_eq!(half.anchor(3), 0);
    }
}
