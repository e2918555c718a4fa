//! Who has a stream slot, within one process: one word per slot, changed only by
//! compare-and-exchange.
//!
//! A slot belongs to one thread, which uses it for one stream. Using it means *holding* it: for a
//! moment, around a look or a mark. A thread that needs a slot may take any that nobody holds,
//! whatever its owner: the owner finds out when it tries to hold it the next time. A thread that is
//! about to destroy the stream waits until nobody holds the slot, and then nobody can any more.
//!
//! Only the thread that destroys waits for a holder, and that with a deadline: a thread that is
//! ended in the middle leaves its slot held, which costs that slot.

use crate::sync::{Acquire, AtomicU64, Relaxed, Release};

/// Somebody holds it.
const HELD: u64 = 1;
/// It was held since it was passed over last.
const USED: u64 = 2;
/// Its owner may have submitted what no mark covers.
const OPEN: u64 = 4;
/// Number of times that it was held, so that a look at it can be distinguished from a later one.
const USE: u64 = 1 << 8;
const USES: u64 = 0xff_ffff << 8;

const fn owner(word: u64) -> u32 {
    (word >> 32) as u32 // CAST: the upper half.
}

/// Who has a slot.
#[derive(Debug, Default)]
pub struct Owner(AtomicU64);

/// What a slot's word was.
#[derive(Clone, Copy, Debug)]
pub struct Look(u64);

/// What became of an attempt to hold a slot.
#[derive(Debug)]
pub enum Hold<'a> {
    /// Held.
    Held(Holding<'a>),
    /// Somebody else holds it, for a moment.
    Busy,
    /// It is another's, or nobody's.
    Gone,
}

/// A slot that is held, until this is dropped.
#[derive(Debug)]
pub struct Holding<'a> {
    of: &'a Owner,
    word: u64,
}

impl Look {
    /// Nobody holds it, and it was not held since it was passed over last.
    pub fn is_quiet(self) -> bool {
        self.0 & (HELD | USED) == 0
    }

    /// Somebody holds it.
    pub fn is_held(self) -> bool {
        self.0 & HELD != 0
    }

    /// Nobody owns it.
    pub fn is_nobodys(self) -> bool {
        owner(self.0) == 0
    }

    /// Somebody owns it and may have submitted what no mark covers.
    pub fn is_open(self) -> bool {
        owner(self.0) != 0 && self.0 & OPEN != 0
    }
}

impl Owner {
    /// Nobody's.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Nobody's again, whatever its owner: in a forked child, where nobody else is.
    pub fn forget(&self) {
        self.0.store(0, Relaxed);
    }

    /// Whether it is `who`'s. It may be another's by the time that the answer is used.
    #[inline(always)]
    pub fn is(&self, who: u32) -> bool {
        owner(self.0.load(Relaxed)) == who
    }

    /// A look. What is read of the slot afterwards is not older.
    pub fn look(&self) -> Look {
        Look(self.0.load(Acquire))
    }

    /// Holds it for `who`, if it is theirs.
    pub fn hold(&self, who: u32) -> Hold<'_> {
        self.hold_if(|word| owner(word) == who)
    }

    /// Holds it, whatever its owner.
    pub fn hold_any(&self) -> Hold<'_> {
        self.hold_if(|_| true)
    }

    fn hold_if(&self, may: impl Fn(u64) -> bool) -> Hold<'_> {
        let mut seen = self.0.load(Relaxed);
        loop {
            if !may(seen) {
                return Hold::Gone;
            }
            if seen & HELD != 0 {
                return Hold::Busy;
            }
            // SYNC(owner): Acquire pairs with the Release of the last holder.
            match self.0.compare_exchange(seen, seen | HELD, Acquire, Relaxed) {
                Ok(_) => {
                    return Hold::Held(Holding {
                        of: self,
                        word: seen | USED,
                    });
                }
                Err(now) => seen = now,
            }
        }
    }

    /// Takes it for `who` and holds it, if nothing has happened to it since that look.
    pub fn take(&self, look: Look, who: u32) -> Option<Holding<'_>> {
        if look.is_held() {
            return None;
        }
        let word = (u64::from(who) << 32) | (look.0 & USES) | USED;
        // SYNC(owner): as in `hold_if`.
        self.0
            .compare_exchange(look.0, word | HELD, Acquire, Relaxed)
            .ok()
            .map(|_| Holding { of: self, word })
    }

    /// Passes it over: it is quiet from here on, unless somebody holds it again.
    pub fn pass(&self, look: Look) {
        if !look.is_held() {
            let _ = self
                .0
                .compare_exchange(look.0, look.0 & !USED, Relaxed, Relaxed);
        }
    }
}

impl Holding<'_> {
    /// Whose it is; 0: nobody's.
    pub fn owner(&self) -> u32 {
        owner(self.word)
    }

    /// Says whether its owner may submit what no mark covers yet.
    pub fn set_open(&mut self, open: bool) {
        self.word = if open {
            self.word | OPEN
        } else {
            self.word & !OPEN
        };
    }

    /// Whether that was said.
    pub fn is_open(&self) -> bool {
        Look(self.word).is_open()
    }

    /// Takes it from its owner.
    pub fn retire(mut self) {
        // CAST: the lower half stays.
        self.word = (self.word & !USED & !OPEN) & u64::from(u32::MAX);
    }
}

impl Drop for Holding<'_> {
    fn drop(&mut self) {
        let uses = self.word.wrapping_add(USE) & USES;
        // SYNC(owner): pairs with the Acquire of the next holder.
        self.of.0.store((self.word & !USES & !HELD) | uses, Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn held(hold: Hold<'_>) -> Holding<'_> {
        match hold {
            Hold::Held(holding) => holding,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_slot_that_was_taken_over_is_gone_for_its_owner() {
        let owner = Owner::new();
        assert!(matches!(owner.hold(7), Hold::Gone));
        drop(owner.take(owner.look(), 7).expect("nobody's"));
        assert!(owner.is(7));
        let holding = held(owner.hold(7));
        assert!(matches!(owner.hold(7), Hold::Busy));
        assert!(owner.take(owner.look(), 8).is_none(), "held");
        drop(holding);
        drop(owner.take(owner.look(), 8).expect("nobody holds it"));
        assert!(matches!(owner.hold(7), Hold::Gone));
        held(owner.hold(8)).retire();
        assert!(matches!(owner.hold(8), Hold::Gone) && owner.is(0));
    }

    #[test]
    fn what_was_used_since_the_look_is_not_taken() {
        let owner = Owner::new();
        drop(owner.take(owner.look(), 7).expect("nobody's"));
        let look = owner.look();
        drop(held(owner.hold(7)));
        assert!(owner.take(look, 8).is_none());
        assert!(!owner.look().is_quiet(), "it was used");
        owner.pass(owner.look());
        assert!(owner.look().is_quiet());
    }

    #[test]
    fn open_blocks_are_reported_until_nobody_has_them() {
        let owner = Owner::new();
        let mut holding = owner.take(owner.look(), 7).expect("nobody's");
        assert!(!holding.is_open());
        holding.set_open(true);
        drop(holding);
        assert!(owner.look().is_open());
        held(owner.hold_any()).retire();
        assert!(!owner.look().is_open());
    }
}
