//! client --journal records--> arbiter: fixed-size records in a ring that the arbiter drains.
//!
//! Nothing is ever printed inside a tenant; this ring reports what happened there. It overwrites
//! the oldest records, and the reader learns how many it missed.

use crate::activity::Following;
use crate::layout::{ClientHalf, JOURNAL_SLOTS, JournalSlot};
use crate::sync::{Acquire, Relaxed, Release, fence};

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// An allocation did not fit: values are limit, used, requested and charged bytes.
    OverLimit {
        /// Limit in bytes.
        limit_bytes: u64,
        /// Held by the tenant in bytes.
        used_bytes: u64,
        /// Asked for in bytes: the program's own figure.
        requested_bytes: u64,
        /// What it would have taken from the device, in bytes; 0 from a client that does not tell.
        charged_bytes: u64,
    },
    /// Submissions pass without a grant from now on; `reason` is one of [`Bypass`].
    Bypassing {
        /// Why.
        reason: Bypass,
    },
    /// A hook of the library failed, and a call went on without it. Reported once for each.
    HookFailed {
        /// Which, as a row of the table of entry points; one more than there are: a report of NVML.
        row: u32,
    },
    /// Completion is followed another way from here on.
    Following {
        /// How.
        way: Following,
        /// What the driver answered to the way before; 0: it accepted it, and did not do it.
        status: u32,
    },
    /// The client has attached again, after `gap_ns` without an arbiter.
    Reattached {
        /// Nanoseconds without an arbiter.
        gap_ns: u64,
    },
    /// What was to leave the device stays: the host has too little memory for it.
    HostShort {
        /// What it takes in bytes.
        needed_bytes: u64,
        /// What may be taken in bytes.
        available_bytes: u64,
        /// Limit in bytes of the control group that allows no more; 0: the host itself has no more.
        group_limit_bytes: u64,
    },
    /// What a call takes of a device cannot be had, even if all jobs left it that may.
    NoSpace {
        /// What it takes, in bytes.
        wanted_bytes: u64,
        /// What could be had, in bytes.
        most_bytes: u64,
        /// It was to become a context, whose size is known to the driver alone: so much was there
        /// for it.
        context: bool,
    },
    /// The kernel that recognises unchanged memory could not be had, so that an eviction copies all
    /// of it; said once.
    NoHashes {
        /// What the driver said.
        status: u32,
    },
}

/// Why a client lets submissions pass without a grant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bypass {
    /// The arbiter is gone and the job may go on without it.
    ArbiterLost,
    /// The gate stayed closed past every deadline although the arbiter lives.
    GateStuck,
    /// The driver gave no way to follow completion; marks are off.
    NoMarks,
    /// The device is not one of the job's: the record's device is the driver's ordinal.
    OtherDevice,
}

/// A record that makes no sense: the peer is broken or lying.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BadRecord {
    /// Its kind number.
    pub kind: u32,
}

impl std::fmt::Display for BadRecord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "journal record of unknown kind {}", self.kind)
    }
}

impl std::error::Error for BadRecord {}

impl Event {
    fn encode(self) -> (u32, [u64; 4]) {
        match self {
            Self::OverLimit {
                limit_bytes,
                used_bytes,
                requested_bytes,
                charged_bytes,
            } => (1, [limit_bytes, used_bytes, requested_bytes, charged_bytes]),
            Self::Bypassing { reason } => (2, [reason as u64, 0, 0, 0]),
            Self::HookFailed { row } => (9, [u64::from(row), 0, 0, 0]),
            Self::Following { way, status } => (8, [way as u64, u64::from(status), 0, 0]),
            Self::Reattached { gap_ns } => (3, [gap_ns, 0, 0, 0]),
            Self::HostShort {
                needed_bytes,
                available_bytes,
                group_limit_bytes,
            } => (4, [needed_bytes, available_bytes, group_limit_bytes, 0]),
            Self::NoSpace {
                wanted_bytes,
                most_bytes,
                context,
            } => (10, [wanted_bytes, most_bytes, u64::from(context), 0]),
            Self::NoHashes { status } => (5, [u64::from(status), 0, 0, 0]),
        }
    }

    fn decode(kind: u32, values: [u64; 4]) -> Result<Self, BadRecord> {
        Ok(match (kind, values) {
            (1, [limit_bytes, used_bytes, requested_bytes, charged_bytes]) => Self::OverLimit {
                limit_bytes,
                used_bytes,
                requested_bytes,
                charged_bytes,
            },
            (2, [0, ..]) => Self::Bypassing {
                reason: Bypass::ArbiterLost,
            },
            (2, [1, ..]) => Self::Bypassing {
                reason: Bypass::GateStuck,
            },
            (2, [2, ..]) => Self::Bypassing {
                reason: Bypass::NoMarks,
            },
            (2, [3, ..]) => Self::Bypassing {
                reason: Bypass::OtherDevice,
            },
            (9, [row, ..]) => Self::HookFailed {
                row: u32::try_from(row).unwrap_or(u32::MAX),
            },
            (3, [gap_ns, ..]) => Self::Reattached { gap_ns },
            // CAST: the lower halves hold the values.
            (8, [way @ 0..=2, status, ..]) => Self::Following {
                way: Following::from(way as u32),
                status: status as u32,
            },
            (4, [needed_bytes, available_bytes, group_limit_bytes, _]) => Self::HostShort {
                needed_bytes,
                available_bytes,
                group_limit_bytes,
            },
            (10, [wanted_bytes, most_bytes, context @ 0..=1, _]) => Self::NoSpace {
                wanted_bytes,
                most_bytes,
                context: context == 1,
            },
            (5, [status, ..]) => Self::NoHashes {
                status: u32::try_from(status).unwrap_or(u32::MAX),
            },
            (kind, _) => return Err(BadRecord { kind }),
        })
    }
}

/// A record as the arbiter reads it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// Device index of the event.
    pub device: u32,
    /// What happened.
    pub event: Event,
}

impl ClientHalf {
    /// Writes a record; the oldest is overwritten when the ring is full.
    pub fn write_record(&self, device: u32, event: Event) {
        let number = self.journal_head.fetch_add(1, Relaxed);
        // PANIC: the modulus is the length.
        let slot = &self.journal[number as usize % JOURNAL_SLOTS];
        let (kind, values) = event.encode();
        slot.sequence.store(0, Relaxed);
        // SYNC(journal): a reader that sees a later value than the sequence it checked sees the 0
        // or the new number too.
        fence(Release);
        slot.kind.store(kind, Relaxed);
        slot.device.store(device, Relaxed);
        for (to, value) in slot.values.iter().zip(values) {
            to.store(value, Relaxed);
        }
        // SYNC(journal): pairs with the Acquire load in `JournalSlot::read`.
        slot.sequence.store(number.wrapping_add(1), Release);
    }

    /// Reads the records from number `*next` on; returns how many were missed because the ring had
    /// moved on.
    pub fn read_records(
        &self,
        next: &mut u64,
        mut take: impl FnMut(Result<Record, BadRecord>),
    ) -> u64 {
        let head = self.journal_head.load(Acquire);
        let behind = head.wrapping_sub(*next);
        let mut missed = 0;
        if behind > JOURNAL_SLOTS as u64 {
            // Also where a lying peer has set the head back: go on from where it says it is.
            missed = behind - JOURNAL_SLOTS as u64;
            *next = head.wrapping_sub(JOURNAL_SLOTS as u64);
        }
        while *next != head {
            // PANIC: the modulus is the length.
            let slot = &self.journal[*next as usize % JOURNAL_SLOTS];
            match slot.read(next.wrapping_add(1)) {
                Some((kind, device, values)) => {
                    take(Event::decode(kind, values).map(|event| Record { device, event }));
                }
                // Still being written, or already overwritten.
                None if slot.sequence.load(Relaxed) == 0 => return missed,
                None => missed += 1,
            }
            *next = next.wrapping_add(1);
        }
        missed
    }
}

impl JournalSlot {
    fn read(&self, sequence: u64) -> Option<(u32, u32, [u64; 4])> {
        // SYNC(journal): pairs with the Release store in `write_record`.
        if self.sequence.load(Acquire) != sequence {
            return None;
        }
        let values = std::array::from_fn(|at| self.values[at].load(Relaxed));
        let (kind, device) = (self.kind.load(Relaxed), self.device.load(Relaxed));
        fence(Acquire);
        (self.sequence.load(Relaxed) == sequence).then_some((kind, device, values))
    }
}
