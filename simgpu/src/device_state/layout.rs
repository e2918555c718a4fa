//! Layout of the shared file. Everything that processes write is an atomic.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::profile::MAX_DEVICES;
use crate::settings::BadConfig;

/// Processes that one host can have on its devices.
pub const SLOTS: usize = 256;
/// Blocks of memory that a process can share with others.
pub const SHARED_BLOCKS: usize = 256;
/// Events that the processes of a host can share.
pub const SHARED_EVENTS: usize = 4096;
/// Records of a shared event that have a place of their own.
pub(super) const EVENT_RECORDS: usize = 32;
/// Layout of the file; another one is refused.
pub(super) const LAYOUT: u32 = 6;
const CONFIG_BYTES: usize = 8192;
pub(super) const WAITER_WORDS: usize = SLOTS / 64;

#[repr(C)]
pub(super) struct Header {
    /// Stored last; zero means "not ready".
    pub(super) layout: AtomicU32,
    pub(super) config_len: AtomicU32,
    pub(super) config: [AtomicU64; CONFIG_BYTES / 8],
    /// Until when the driver is busy with calls that manage memory, where those of all processes go
    /// one behind the other (CLOCK_MONOTONIC ns).
    pub(super) memory_until_ns: AtomicU64,
    /// Entries of `events` that were ever used.
    pub(super) events_used: AtomicU64,
    /// Events that were ever shared.
    pub(super) events_made: AtomicU64,
    padding: [u64; 12],
}

#[repr(C, align(128))]
pub(super) struct DeviceShared {
    /// 0: free; else the holder's slot + 1 and generation.
    pub(super) turn: AtomicU64,
    /// Until when the compute engine is taken by work already accounted (CLOCK_MONOTONIC ns).
    pub(super) compute_until_ns: AtomicU64,
    /// The same for the two copy engines.
    pub(super) copy_until_ns: [AtomicU64; 2],
    /// Times that the compute engine changed hands between processes.
    pub(super) switches: AtomicU64,
    /// Slot + generation of the process that ran last.
    pub(super) last: AtomicU64,
    /// One bit per slot that wants the compute engine.
    pub(super) waiters: [AtomicU64; WAITER_WORDS],
    /// Most bytes that live processes ever had together.
    pub(super) peak_bytes: AtomicU64,
    /// Time that the compute engine was given to anybody.
    pub(super) busy_ns: AtomicU64,
    /// The same for the two copy engines.
    pub(super) moved_ns: [AtomicU64; 2],
    padding: [u64; 2],
}

/// What a process had been given of the compute engine at a time.
#[repr(C)]
pub(super) struct UseSample {
    pub(super) time_ns: AtomicU64,
    pub(super) compute_ns: AtomicU64,
}

#[repr(C, align(128))]
pub(super) struct SlotDevice {
    pub(super) used_bytes: AtomicU64,
    pub(super) compute_ns: AtomicU64,
    pub(super) copy_ns: AtomicU64,
    pub(super) launches: AtomicU64,
    /// Engine time beyond earlier slices, to be made up for by skipped turns.
    pub(super) debt_ns: AtomicU64,
    /// Bumped at every hand-over to this slot; futex.
    pub(super) bell: AtomicU32,
    pub(super) contexts: AtomicU32,
    /// Start of the last interval in which it computed, for utilisation samples.
    pub(super) last_busy_ns: AtomicU64,
    /// Two samples of `compute_ns`, the newer one first, and when they were taken: for monitors
    /// that ask once.
    pub(super) samples: [UseSample; 2],
    /// Time that the compute engine took to turn to it.
    pub(super) turn_ns: AtomicU64,
    padding: [u64; 4],
}

#[repr(C, align(128))]
pub(super) struct Slot {
    pub(super) pid: AtomicU32,
    padding0: u32,
    /// The kernel's random number for the program's image: tells it from a later one with its pid,
    /// after exec as well.
    pub(super) image: AtomicU64,
    /// Bumped at every claim, never reset.
    pub(super) generation: AtomicU64,
    /// Entries of `shared` that were ever used since the slot was claimed.
    pub(super) shared_used: AtomicU64,
    /// Host memory that the process has page-locked.
    pub(super) pinned_bytes: AtomicU64,
    /// Physical memory handles that live, by references or mappings.
    pub(super) handles: AtomicU64,
    /// Bytes of those that lie in host memory.
    pub(super) host_located_bytes: AtomicU64,
    /// Bytes of the host's memory that the process is promised and has not written yet.
    pub(super) promised_bytes: AtomicU64,
    padding: [u64; 8],
    pub(super) devices: [SlotDevice; MAX_DEVICES],
    /// Memory that this process holds and others may hold as well, not in `used_bytes`.
    pub(super) shared: [SharedBlock; SHARED_BLOCKS],
}

/// A block of memory that processes share: it is there as long as any live process lists it, and
/// counts once.
#[repr(C, align(32))]
pub(super) struct SharedBlock {
    /// The same in all processes; 0: no block.
    pub(super) id: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) device: AtomicU64,
    padding: u64,
}

/// One record of a shared event.
#[repr(C)]
pub(super) struct RecordShared {
    /// Twice its number, and 1 once it was reached; 0: none.
    pub(super) word: AtomicU64,
    /// Who made it: a slot and its generation.
    pub(super) by: AtomicU64,
    /// When it was reached (CLOCK_MONOTONIC ns).
    pub(super) time_ns: AtomicU64,
    padding: u64,
}

/// An event that processes share: it is there as long as any live process holds it.
#[repr(C, align(128))]
pub(super) struct EventShared {
    /// What handles name it by, never used again.
    pub(super) key: AtomicU64,
    /// Who made it: a slot and its generation; 0 when it was destroyed there.
    pub(super) creator: AtomicU64,
    /// Number of the last record; 0: none.
    pub(super) last: AtomicU64,
    /// Bumped whenever a record is reached; futex.
    pub(super) bell: AtomicU32,
    padding0: u32,
    /// One bit per slot that holds it.
    pub(super) holders: [AtomicU64; WAITER_WORDS],
    padding: [u64; 8],
    /// The last records, by number.
    pub(super) records: [RecordShared; EVENT_RECORDS],
}

#[repr(C)]
pub(super) struct State {
    pub(super) header: Header,
    pub(super) devices: [DeviceShared; MAX_DEVICES],
    pub(super) slots: [Slot; SLOTS],
    pub(super) events: [EventShared; SHARED_EVENTS],
}

const _: () = assert!(size_of::<DeviceShared>() == 128 && size_of::<SlotDevice>() == 128);
const _: () = assert!(size_of::<Slot>() == 128 + 128 * MAX_DEVICES + 32 * SHARED_BLOCKS);
const _: () = assert!(size_of::<Header>().is_multiple_of(128));
const _: () = assert!(size_of::<EventShared>() == 128 + 32 * EVENT_RECORDS);

/// Who holds a compute engine: a slot and its generation, never 0.
pub(super) fn turn_word(slot: usize, generation: u64) -> u64 {
    (generation << 16) | (slot as u64 + 1)
}

impl Header {
    pub(super) fn config(&self) -> String {
        let len = (self.config_len.load(Relaxed) as usize).min(CONFIG_BYTES);
        let bytes: Vec<u8> = self
            .config
            .iter()
            .flat_map(|word| word.load(Relaxed).to_ne_bytes())
            .take(len)
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub(super) fn set_config(&self, text: &str) -> Result<(), BadConfig> {
        if text.len() > CONFIG_BYTES {
            return Err(BadConfig(format!(
                "the profile is {} bytes long, at most {CONFIG_BYTES} fit",
                text.len()
            )));
        }
        for (at, chunk) in text.as_bytes().chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.config[at].store(u64::from_ne_bytes(word), Relaxed);
        }
        self.config_len.store(text.len() as u32, Relaxed);
        Ok(())
    }
}
