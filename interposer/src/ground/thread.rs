//! Plain per-thread data, without destructors, reached in two instructions.
//!
//! `thread_local!` in a shared library goes through `__tls_get_addr`, which costs as much as
//! everything else on the launch path together. A preloaded library may use the initial-exec model;
//! stable Rust cannot ask for it, so the storage is declared in assembly. All-zero is the state of
//! a thread that we have not seen.

use std::cell::Cell;
use std::sync::atomic::AtomicU32;

use channel::{SignatureRing, ThreadSlot};

use crate::ground::stretch::{Counts, Inside, Passes, Stretch};

/// Words of a set of slots.
pub(crate) const SET: usize = channel::STREAM_SLOTS.div_ceil(u64::BITS as usize);

/// Last marks of a thread that are looked at for the youngest that has passed.
pub(crate) const RECENT: usize = 32;

/// Most credit, and what is beyond all credit. Their sum fits a word.
pub(crate) const MOST_CREDIT: i32 = 1_000_000_000;
pub(crate) const UNKNOWN_NS: i32 = 1_100_000_000;

/// What we keep per thread.
#[repr(C)]
pub(crate) struct Thread {
    /// Device time in nanoseconds whose submissions may pass by the fast path before the slow one
    /// is due. First, and 0 to start with: nothing else is looked at where a submission takes more.
    /// Below zero where memory may be moved, see `gate::open_quiesced`.
    pub(crate) credit: Cell<i32>,
    /// Whether `device` and `context` are those of the thread's current context.
    pub(crate) context_known: Cell<bool>,
    /// Whether the thread is one of ours: all that it does is.
    ours: Cell<bool>,
    /// Whether the thread is opening the driver: what its constructors look up is the driver's own
    /// business.
    pub(crate) opening: Cell<bool>,
    /// Stream that the credit is for.
    pub(crate) stream: Cell<usize>,
    /// Gate word of the device that the credit is for.
    pub(crate) gate: Cell<*const AtomicU32>,
    /// Submissions counter: in the client's half, or `unmanaged` below.
    pub(crate) launches: Cell<*const ThreadSlot>,
    /// Where signatures go; null: nowhere.
    pub(crate) ring: Cell<*const SignatureRing>,
    /// Signature at which the slow path is due; 0: none.
    pub(crate) anchor: Cell<u32>,
    /// What a submission of which nothing is known takes of the credit: all there can be, so that
    /// the slow path learns of it; or little, in a thread that nobody governs.
    pub(crate) unknown_ns: Cell<i32>,
    /// Generation of the attachment that all this belongs to.
    pub(crate) generation: Cell<u32>,
    /// Thread slot in the client's half, plus one.
    pub(crate) slot_plus_one: Cell<u32>,
    /// Device index of the pages of the current context, plus one; 0 for a device that is not
    /// governed.
    pub(crate) device_plus_one: Cell<u32>,
    /// Driver ordinal of the current context's device.
    pub(crate) ordinal: Cell<i32>,
    /// The current context.
    pub(crate) context: Cell<usize>,
    /// Completion marks since the last one that covers a single submission.
    pub(crate) marks_since_apart: Cell<u32>,
    /// Device time per completion mark, in nanoseconds.
    pub(crate) budget_ns: Cell<u64>,
    /// What [`Thread::spent_ns`] is when all credit is used.
    pub(crate) spent_with_credit_ns: Cell<u64>,
    /// Up to where `spent_ns` may grow by the fast path.
    pub(crate) limit_ns: Cell<u64>,
    /// What `spent_ns` was when the thread turned to its current stream.
    pub(crate) entered_ns: Cell<u64>,
    /// Submissions on the thread's line when all were marked last.
    pub(crate) marked: Cell<u64>,
    /// Place of the current stream's slot; 0 where completion cannot be followed.
    pub(crate) stream_place: Cell<u32>,
    /// The thread's number; 0: none yet.
    pub(crate) who: Cell<u32>,
    /// Number of the thread's batch.
    pub(crate) batch: Cell<u32>,
    /// Renewed with every batch, context and number: a slot that has the same is in the thread's
    /// batch and of its current context. No other thread's is the same, and it is not 0 where there
    /// is credit.
    pub(crate) turn: Cell<u64>,
    /// Streams that had been destroyed when the current one was turned to.
    pub(crate) destroyed: Cell<u32>,
    /// When the gate last let the thread in after a wait.
    pub(crate) let_in_ns: Cell<u64>,
    /// When the driver was last asked whether marks have been lost.
    pub(crate) asked_ns: Cell<u64>,
    /// Streams of the process that had work in flight when the thread looked last.
    pub(crate) crowd: Cell<u32>,
    /// Streams of the batch.
    pub(crate) streams: Cell<u32>,
    /// Streams of the batch before.
    pub(crate) last_streams: Cell<u32>,
    /// When the arbiter was last looked after, `CLOCK_MONOTONIC` nanoseconds.
    pub(crate) last_check_ns: Cell<u64>,
    /// Consecutive times that waiting for a slot has run out.
    pub(crate) impatience: Cell<u32>,
    /// The restore in which the thread may go on before its end; 0: none. See `residency::early`.
    pub(crate) permit: Cell<u32>,
    /// Row of the hook that the thread is in, plus one; 0: none. See [`Thread::begin_hook`].
    hook: Cell<u32>,
    /// What the driver has answered to that hook's call; 0: nothing yet.
    answer: Cell<u64>,
    /// When the thread's last recorded call ended; 0: none has. See `recording`.
    pub(crate) recorded_ns: Cell<u64>,
    /// The thread's number in the recording; 0: none yet.
    pub(crate) recorded_as: Cell<u32>,
    /// The thread is inside a call of ours into the driver: see [`Thread::own`].
    inside: Stretch,
    /// The thread is changing an answer of NVML, which may call its own functions for it.
    inside_nvml: Stretch,
    /// Its calls inside the quiesce gate.
    pub(crate) passes: Passes,
    /// What it is counted in while it waits.
    pub(crate) counts: Counts,
    /// Weight of what was marked or given up, ever, in nanoseconds; with what is unmarked, all that
    /// the thread has submitted.
    pub(crate) settled_ns: Cell<u64>,
    /// What that sum was at the youngest mark that was seen passed, and on which device.
    pub(crate) reached_ns: Cell<u64>,
    pub(crate) reached_on: Cell<u32>,
    /// When it was last looked for.
    pub(crate) looked_ns: Cell<u64>,
    /// The sum up to which the device's count of what was submitted knows of it.
    pub(crate) counted_ns: Cell<u64>,
    /// Slots of the last marks, plus one, and how many marks there were.
    pub(crate) recent: [Cell<u16>; RECENT],
    pub(crate) recent_marks: Cell<u32>,
    /// Where the stack was when it withdrew the registration of our page for the context that it is
    /// about to end; 0: it has not.
    pub(crate) withdrew: Cell<usize>,
    /// Where the stack was when it began to end a context; 0: it ends none.
    pub(crate) ends: Cell<usize>,
    /// Its places among the threads that end one, as bits.
    pub(crate) ending: Cell<u32>,
    /// Slots of the streams of the batch, as bits.
    pub(crate) touched: [Cell<u64>; SET],
    /// Counter of a thread that nobody governs.
    pub(crate) unmanaged: ThreadSlot,
}

const _: () = assert!(size_of::<Thread>() <= 640);

std::arch::global_asm!(
    ".section .tbss,\"awT\",@nobits",
    ".balign 64",
    ".globl sublet_thread",
    ".hidden sublet_thread",
    ".type sublet_thread, @object",
    ".size sublet_thread, 640",
    "sublet_thread:",
    ".zero 640",
    ".text",
);

/// The calling thread's data.
#[inline(always)]
pub(crate) fn thread<'a>() -> &'a Thread {
    let at: *const Thread;
    // SAFETY: computes the address of this thread's copy of `sublet_thread`: the thread pointer is
    // at fs:0 and the offset in the GOT by the x86-64 TLS ABI. Reads two words, writes nothing.
    unsafe {
        std::arch::asm!(
            "mov {at}, qword ptr [rip + sublet_thread@GOTTPOFF]",
            "add {at}, qword ptr fs:[0]",
            at = out(reg) at,
            options(pure, readonly, nostack),
        );
        // SAFETY: 640 zeroed, 64-aligned bytes that live as long as the thread; zero is a valid
        // `Thread`, and its cells are touched by this thread alone (the lifetime never leaves the
        // call that asked).
        &*at
    }
}

/// The hook that a thread was in before.
pub(crate) struct OuterHook {
    hook: u32,
    answer: u64,
}

const NO_ANSWER: u64 = 0;
const ANSWERED: u64 = 1 << 32;

impl Thread {
    /// The thread enters the hook of that row.
    #[inline(always)]
    pub(crate) fn begin_hook(&self, row: u32) -> OuterHook {
        OuterHook {
            hook: self.hook.replace(row + 1),
            answer: self.answer.replace(NO_ANSWER),
        }
    }

    /// And leaves it.
    #[inline(always)]
    pub(crate) fn end_hook(&self, outer: OuterHook) {
        self.hook.set(outer.hook);
        self.answer.set(outer.answer);
    }

    /// The driver has answered a call of the symbol of that row, which is the program's own where
    /// the thread is in the hook of that row.
    #[inline(always)]
    pub(crate) fn note_answer(&self, row: u32, status: u32) {
        if self.hook.get() == row + 1 {
            self.answer.set(ANSWERED | u64::from(status));
        }
    }

    /// What the driver has answered to the call of the hook that the thread is in.
    pub(crate) fn answer(&self) -> Option<u32> {
        match self.answer.get() {
            NO_ANSWER => None,
            // CAST: the lower half is the status.
            answer => Some(answer as u32),
        }
    }

    /// From here on, until that is dropped, the thread's calls of the driver are our own, and so is
    /// what the driver calls of what we export. To be held around the driver's code alone, and over
    /// no wait of ours: a signal handler of the program's counts as the driver while it lasts.
    #[inline(always)]
    pub(crate) fn enter(&self) -> Inside<'_> {
        self.inside.enter()
    }

    /// The same around `calls`.
    #[inline(always)]
    pub(crate) fn own<T>(&self, calls: impl FnOnce() -> T) -> T {
        let _inside = self.enter();
        calls()
    }

    /// From here on all that the thread does is ours.
    pub(crate) fn is_ours(&self) {
        self.ours.set(true);
    }

    /// Whether the thread's calls of the driver are our own.
    #[inline(always)]
    pub(crate) fn is_inside(&self) -> bool {
        self.ours.get() || self.inside.lasts()
    }

    /// From here on, until that is dropped, the thread's calls of NVML are our own.
    #[inline(always)]
    pub(crate) fn enter_nvml(&self) -> Inside<'_> {
        self.inside_nvml.enter()
    }

    /// Device time of the submissions that no mark covers yet, in nanoseconds; all streams.
    pub(crate) fn spent_ns(&self) -> u64 {
        self.spent_with_credit_ns
            .get()
            .wrapping_sub(u64::from(self.credit.get().unsigned_abs()))
    }

    /// The same, to be so much. The credit stays.
    pub(crate) fn set_spent_ns(&self, ns: u64) {
        let credit_ns = u64::from(self.credit.get().unsigned_abs());
        self.spent_with_credit_ns.set(ns.wrapping_add(credit_ns));
    }

    /// Weight of all that the thread has submitted, ever.
    pub(crate) fn submitted_ns(&self) -> u64 {
        self.settled_ns.get().wrapping_add(self.spent_ns())
    }

    /// What is left unmarked is so much; the rest is settled.
    pub(crate) fn settle_to(&self, ns: u64) {
        let settled_ns = self.spent_ns().saturating_sub(ns);
        self.settled_ns
            .set(self.settled_ns.get().wrapping_add(settled_ns));
        self.set_spent_ns(ns);
    }

    /// Lets submissions that take `ns` together pass by the fast path from here on, instead of what
    /// was left.
    pub(crate) fn give_credit(&self, ns: i32) {
        let spent_ns = self.spent_ns();
        self.credit.set(ns);
        self.set_spent_ns(spent_ns);
    }

    /// What the thread submits from here on is not followed.
    pub(crate) fn detach_all(&self) {
        self.stream_place.set(0);
        self.begin_batch();
        self.entered_ns.set(0);
    }

    /// The next batch, without streams yet.
    pub(crate) fn begin_batch(&self) {
        self.batch.set(self.batch.get().wrapping_add(1));
        self.streams.set(0);
        self.touched.iter().for_each(|bits| bits.set(0));
        self.renew_turn();
    }

    /// What the thread's slots say is to be looked at anew, one by one.
    pub(crate) fn renew_turn(&self) {
        // CAST: the lower half counts.
        let count = (self.turn.get() as u32).wrapping_add(1).max(1);
        self.turn
            .set(u64::from(self.who.get()) << 32 | u64::from(count));
    }

    /// Forgets everything that belongs to an attachment; the next submission takes the slow path.
    pub(crate) fn forget(&self) {
        self.give_credit(0);
        self.settle_to(0);
        self.reached_on.set(0);
        self.unknown_ns.set(UNKNOWN_NS);
        self.context_known.set(false);
        self.stream.set(0);
        self.gate.set(std::ptr::null());
        self.launches.set(std::ptr::null());
        self.ring.set(std::ptr::null());
        self.anchor.set(0);
        self.slot_plus_one.set(0);
        self.device_plus_one.set(0);
        self.detach_all();
        self.last_check_ns.set(0);
        self.impatience.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_spent_includes_the_credit_that_was_used() {
        let thread = thread();
        thread.set_spent_ns(7_000);
        thread.give_credit(5_000);
        assert_eq!(thread.spent_ns(), 7_000);
        thread.credit.set(thread.credit.get() - 2_000);
        assert_eq!(thread.spent_ns(), 9_000);
        // Below zero where memory may be moved: the same amounts.
        thread.give_credit(-4_000);
        assert_eq!(thread.spent_ns(), 9_000);
        thread.credit.set(-1_000);
        assert_eq!(thread.spent_ns(), 12_000);
        thread.set_spent_ns(500);
        assert_eq!((thread.spent_ns(), thread.credit.get()), (500, -1_000));
        thread.give_credit(0);
        assert_eq!(thread.spent_ns(), 500);
    }

    #[test]
    fn a_turn_is_renewed_with_a_batch_and_is_no_other_threads() {
        let turns = |who: u32| {
            let thread = thread();
            thread.who.set(who);
            thread.renew_turn();
            let first = thread.turn.get();
            thread.begin_batch();
            [first, thread.turn.get()]
        };
        let mut all = turns(1).to_vec();
        all.extend(turns(2));
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 4);
        assert!(!all.contains(&0));
        // Also where the count begins anew.
        thread().turn.set(u64::from(u32::MAX));
        thread().who.set(0);
        thread().renew_turn();
        assert_eq!(thread().turn.get(), 1);
    }
}
