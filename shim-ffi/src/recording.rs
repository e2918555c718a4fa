//! The ring through which the preload library hands a recording of a job's driver calls to
//! `sublet record`.
//!
//! The ring is memory of a fixed size that `sublet record` makes and the job's processes map. Each
//! record is one slot. A writer claims the next slot, fills it, and stores its number last; the
//! one reader takes slots in the order in which they were claimed. No process
//! waits for a lock, so one that is killed at any instruction leaves at most one slot that is never
//! finished.
//!
//! What lies in the ring has handles and addresses of the job; the reader puts numbers in their
//! place before anything is written to a file (`docs/reference/recording.md`).

use core::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed, Release},
};

/// First word of a ring; its last character is the version of the layout.
pub const MAGIC: u64 = u64::from_le_bytes(*b"record 2");
/// Names the file of the ring; unset: nothing is recorded.
pub const VARIABLE: &core::ffi::CStr = c"SUBLET_RECORD";
/// Slots of a ring.
pub const SLOTS: usize = 1 << 18;
/// Words that a kind of record has for itself.
pub const WORDS: usize = 8;
/// Bytes of text in one record.
pub const TEXT_BYTES: usize = 48;
/// Longest name that is recorded, in bytes.
pub const NAME_MOST: usize = 1024;
/// Most nodes of a graph that are recorded.
pub const NODES_MOST: usize = 4096;

/// What a record is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct Kind(pub u16);

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $number:literal;)*) => {
        #[allow(non_upper_case_globals, reason = "named as variants are")]
        impl Kind {
            $($(#[$doc])* pub const $name: Self = Self($number);)*
        }
    };
}
kinds! {
    /// A process begins: its number on the host.
    Process = 1;
    /// A device: ordinal, version of the driver; its name is text of the same ordinal.
    Device = 2;
    /// Text: what it is of, position of its first byte, the bytes.
    Text = 3;
    /// A kernel: handle, bytes of its name.
    Function = 4;
    /// A function that is a kernel under another handle: function, kernel.
    FunctionOf = 5;
    /// A launch: function, blocks in x and y, blocks in z and shared memory, threads, stream.
    Launch = 6;
    /// A launch of a graph: executable graph, stream.
    GraphLaunch = 7;
    /// An executable graph: handle, nodes, of which the records come before.
    GraphMade = 8;
    /// A node: position and type, then as of a launch, a copy or a fill.
    Node = 9;
    /// Node at one position comes before the one at another.
    Edge = 10;
    /// An executable graph ends.
    GraphGone = 11;
    /// Memory was taken: address or handle, bytes, [`Taken`], stream.
    Take = 12;
    /// Memory was given back: address or handle, stream.
    Give = 13;
    /// Addresses mean physical memory: first address, bytes, handle.
    Map = 14;
    /// A copy: destination, source, bytes, [`Way`], stream.
    Copy = 15;
    /// A fill: address, bytes, stream.
    Fill = 16;
    /// A stream: handle, flags, priority.
    StreamMade = 17;
    /// A stream ends.
    StreamGone = 18;
    /// An event: handle, flags.
    EventMade = 19;
    /// An event ends.
    EventGone = 20;
    /// An event is recorded: event, stream.
    EventRecorded = 21;
    /// A stream waits for an event: event, stream.
    EventAwaited = 22;
    /// The host waited: [`Awaited`], handle.
    Wait = 23;
    /// An iteration has ended.
    Step = 24;
    /// How long the device was at the launch of that order: order, ns, [`Quality`].
    Measured = 25;
    /// A context ends.
    ContextGone = 26;
}

/// What kind of memory was taken.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Taken {
    /// Device memory.
    Device = 0,
    /// From a pool, in the order of a stream.
    Pool = 1,
    /// Managed memory.
    Managed = 2,
    /// Page-locked host memory.
    Host = 3,
    /// Host memory of the program, locked afterwards.
    Registered = 4,
    /// Physical memory by handle.
    Physical = 5,
}

/// Between which sides a copy goes, as far as its symbol says.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Way {
    /// Its addresses say it.
    Any = 0,
    /// From the host to a device.
    In = 1,
    /// From a device to the host.
    Out = 2,
    /// Within a device, or between two.
    Within = 3,
}

/// What the host waited for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Awaited {
    /// All work of the context.
    Context = 0,
    /// A stream.
    Stream = 1,
    /// An event.
    Event = 2,
}

/// How good a measured duration is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Quality {
    /// Work was queued before the launch: its beginning is the end of that work.
    Queued = 0,
    /// The stream was idle: the launch's way to the device was taken off by the host's clock.
    Idle = 1,
    /// Another stream had work at the same time, or the host stood still at the launch: it is at
    /// most so long.
    Bound = 2,
}

/// Flags of a record.
pub mod flags {
    /// The call returns only when its work is done, or takes no stream.
    pub const BLOCKS: u8 = 1;
    /// The call was recorded into a graph.
    pub const CAPTURED: u8 = 2;
}

/// Why nothing more is recorded.
pub mod stopped {
    /// It goes on.
    pub const NOT: u32 = 0;
    /// The reader has all that it wants.
    pub const BY_READER: u32 = 1;
    /// The reader did not keep up.
    pub const OVERRUN: u32 = 2;
}

/// One record, as it is written and read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Raw {
    /// See [`Kind`].
    pub kind: u16,
    /// See [`flags`].
    pub flags: u8,
    /// Ordinal of the current context's device plus one; 0: none.
    pub device_plus_one: u8,
    /// Number of the process, from 1 on.
    pub process: u16,
    /// Number of the thread in the whole ring, from 1 on. No number is used twice.
    pub thread: u32,
    /// Counts the calls of all processes when they begin; 0: of no call.
    pub order: u64,
    /// When the call began, `CLOCK_MONOTONIC`.
    pub at_ns: u64,
    /// Time since the thread's last recorded call ended; 0 for its first.
    pub gap_ns: u64,
    /// How long the call took.
    pub took_ns: u64,
    /// What the kind says.
    pub words: [u64; WORDS],
}

#[repr(C, align(128))]
struct Slot {
    /// Its number plus one, stored last.
    written: AtomicU64,
    head: AtomicU64,
    order: AtomicU64,
    at_ns: AtomicU64,
    gap_ns: AtomicU64,
    took_ns: AtomicU64,
    words: [AtomicU64; WORDS],
    thread: AtomicU64,
    padding: u64,
}

#[repr(C, align(128))]
struct Line {
    word: AtomicU64,
    padding: [u64; 15],
}

/// The ring.
#[repr(C)]
pub struct Ring {
    magic: AtomicU64,
    bytes: u64,
    stopped: AtomicU32,
    processes: AtomicU32,
    threads: AtomicU32,
    padding: [u32; 25],
    head: Line,
    consumed: Line,
    order: Line,
    lost: Line,
    slots: [Slot; SLOTS],
}

const _: () = assert!(size_of::<Slot>() == 128 && size_of::<Line>() == 128);
const _: () = assert!(size_of::<Ring>() == 128 * (5 + SLOTS));

impl Ring {
    /// Bytes of a ring.
    pub const BYTES: usize = size_of::<Self>();

    /// Makes zeroed memory a ring.
    ///
    /// # Safety
    /// `at` points to [`Ring::BYTES`] zero bytes, aligned to 128, that nobody else uses yet.
    pub unsafe fn begin(at: *mut Self) {
        // SAFETY: as the caller promises; all-zero is a valid ring.
        let ring = unsafe { &mut *at };
        ring.bytes = Self::BYTES as u64;
        // SYNC(ring): pairs with the load in `is_ready`.
        ring.magic.store(MAGIC, Release);
    }

    /// Whether this is a ring of this layout.
    pub fn is_ready(&self) -> bool {
        // SYNC(ring): pairs with the store in `begin`.
        self.magic.load(Acquire) == MAGIC && self.bytes == Self::BYTES as u64
    }

    /// See [`stopped`].
    pub fn stopped(&self) -> u32 {
        self.stopped.load(Relaxed)
    }

    /// From here on nothing more is recorded. The first reason stands.
    pub fn stop(&self, reason: u32) {
        let _ = self
            .stopped
            .compare_exchange(stopped::NOT, reason, AcqRel, Relaxed);
    }

    /// A number for one more process, from 1 on; `None`: there are too many.
    pub fn next_process(&self) -> Option<u16> {
        u16::try_from(self.processes.fetch_add(1, Relaxed) + 1).ok()
    }

    /// A number for one more thread, from 1 on; `None`: there are too many.
    pub fn next_thread(&self) -> Option<u32> {
        // A number is taken once for each thread that calls: four thousand million of them.
        let next = |threads: u32| threads.checked_add(1);
        let before = self.threads.fetch_update(Relaxed, Relaxed, next).ok()?;
        next(before)
    }

    /// The order of a call that begins, from 1 on.
    pub fn next_order(&self) -> u64 {
        self.order.word.fetch_add(1, Relaxed) + 1
    }

    /// Records that found no slot.
    pub fn lost(&self) -> u64 {
        self.lost.word.load(Relaxed)
    }

    /// One more record that found no slot.
    pub fn lose(&self) {
        self.lost.word.fetch_add(1, Relaxed);
    }

    /// Writes a record; false where there is no free slot.
    pub fn write(&self, raw: &Raw) -> bool {
        let mut head = self.head.word.load(Relaxed);
        loop {
            // SYNC(consumed): pairs with the store in `read`: the reader is done with the slot.
            let consumed = self.consumed.word.load(Acquire);
            if head.wrapping_sub(consumed) >= SLOTS as u64 {
                return false;
            }
            let next = head.wrapping_add(1);
            match self
                .head
                .word
                .compare_exchange_weak(head, next, Relaxed, Relaxed)
            {
                Ok(_) => break,
                Err(now) => head = now,
            }
        }
        let Some(slot) = self.slots.get(head as usize % SLOTS) else {
            return false;
        };
        let first = u64::from(raw.kind)
            | u64::from(raw.flags) << 16
            | u64::from(raw.device_plus_one) << 24
            | u64::from(raw.process) << 32;
        slot.head.store(first, Relaxed);
        slot.order.store(raw.order, Relaxed);
        slot.at_ns.store(raw.at_ns, Relaxed);
        slot.gap_ns.store(raw.gap_ns, Relaxed);
        slot.took_ns.store(raw.took_ns, Relaxed);
        slot.thread.store(u64::from(raw.thread), Relaxed);
        for (word, value) in slot.words.iter().zip(raw.words) {
            word.store(value, Relaxed);
        }
        // SYNC(slot): pairs with the load in `read`.
        slot.written.store(head.wrapping_add(1), Release);
        true
    }

    /// Takes the next record, for the one reader; `None` where it is not finished yet.
    pub fn read(&self) -> Option<Raw> {
        let consumed = self.consumed.word.load(Relaxed);
        let slot = self.slots.get(consumed as usize % SLOTS)?;
        // SYNC(slot): pairs with the store in `write`.
        if slot.written.load(Acquire) != consumed.wrapping_add(1) {
            return None;
        }
        let head = slot.head.load(Relaxed);
        let mut words = [0; WORDS];
        for (value, word) in words.iter_mut().zip(&slot.words) {
            *value = word.load(Relaxed);
        }
        let raw = Raw {
            // CAST: parts of the word.
            kind: head as u16,
            flags: (head >> 16) as u8,
            device_plus_one: (head >> 24) as u8,
            process: (head >> 32) as u16,
            thread: slot.thread.load(Relaxed) as u32,
            order: slot.order.load(Relaxed),
            at_ns: slot.at_ns.load(Relaxed),
            gap_ns: slot.gap_ns.load(Relaxed),
            took_ns: slot.took_ns.load(Relaxed),
            words,
        };
        self.pass();
        Some(raw)
    }

    /// Gives up the next slot, which nobody will finish; false where the ring is empty.
    pub fn skip(&self) -> bool {
        let is_there = self.is_behind();
        if is_there {
            self.pass();
        }
        is_there
    }

    /// Whether a slot is claimed that was not read.
    pub fn is_behind(&self) -> bool {
        self.head.word.load(Relaxed) != self.consumed.word.load(Relaxed)
    }

    fn pass(&self) {
        let consumed = self.consumed.word.load(Relaxed);
        // SYNC(consumed): pairs with the load in `write`.
        self.consumed.word.store(consumed.wrapping_add(1), Release);
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::alloc::{Layout, alloc_zeroed, dealloc};

    use super::*;

    struct Owned(*mut Ring);

    impl Owned {
        fn new() -> Self {
            // SAFETY: a layout of some size; the memory is zeroed and nobody else's.
            unsafe {
                let at = alloc_zeroed(Layout::new::<Ring>()).cast::<Ring>();
                assert!(!at.is_null());
                Ring::begin(at);
                Self(at)
            }
        }

        fn ring(&self) -> &Ring {
            // SAFETY: begun above, and freed when dropped.
            unsafe { &*self.0 }
        }
    }

    impl Drop for Owned {
        fn drop(&mut self) {
            // SAFETY: allocated with this layout.
            unsafe { dealloc(self.0.cast(), Layout::new::<Ring>()) }
        }
    }

    #[test]
    fn records_come_back_in_order_and_none_beyond_the_ring() {
        let owned = Owned::new();
        let ring = owned.ring();
        assert!(ring.is_ready());
        assert_eq!(ring.read(), None);
        let raw = |order: u64| Raw {
            kind: Kind::Launch.0,
            flags: flags::BLOCKS,
            device_plus_one: 3,
            process: 7,
            thread: 70_000,
            order,
            at_ns: 1,
            gap_ns: 2,
            took_ns: 3,
            words: [order; WORDS],
        };
        for round in 0..3 {
            for order in 0..SLOTS as u64 {
                assert!(ring.write(&raw(order + round)));
            }
            assert!(!ring.write(&raw(0)), "the ring is full");
            for order in 0..SLOTS as u64 {
                assert_eq!(ring.read(), Some(raw(order + round)));
            }
            assert_eq!(ring.read(), None);
            assert!(!ring.skip());
        }
    }

    #[test]
    fn the_first_reason_to_stop_stands() {
        let owned = Owned::new();
        let ring = owned.ring();
        assert_eq!(ring.stopped(), stopped::NOT);
        ring.stop(stopped::OVERRUN);
        ring.stop(stopped::BY_READER);
        assert_eq!(ring.stopped(), stopped::OVERRUN);
    }
}
