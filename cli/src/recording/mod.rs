//! The file of a recording: a header, and blocks that are whole or not there.
//!
//! `docs/reference/recording.md` says the same in words. The version is raised with every change
//! that an older reader would misread.

mod read;
mod write;

use serde::{Deserialize, Serialize};

pub use read::Recording;
pub use write::Writer;

/// The first bytes of a recording.
pub const MAGIC: [u8; 8] = *b"sublet\x1aR";
/// The version that is written, and the only one that is read.
pub const VERSION: u32 = 1;
/// Magic, version, length and checksum of the provenance, and a reserved word.
pub const HEADER_BYTES: usize = 24;
/// The first bytes of a block.
pub const BLOCK_MAGIC: [u8; 4] = *b"SLBK";
/// Magic, type, length of the payload, checksum of type and payload.
pub const BLOCK_BYTES: usize = 16;
/// Longest payload of a block.
pub const PAYLOAD_MOST: usize = 1 << 16;
/// Bytes of a record.
pub const RECORD_BYTES: usize = 64;
/// Largest number of a function, a shape, a stream and so on.
pub const NUMBER_MOST: u32 = 1 << 24;

/// What a block has.
pub mod block {
    /// Records.
    pub const RECORDS: u32 = 1;
    /// Names of kernels: number, length, bytes.
    pub const NAMES: u32 = 2;
    /// A device, as JSON.
    pub const DEVICE: u32 = 3;
    /// The end, as JSON.
    pub const END: u32 = 4;
}

/// The default streams by their numbers.
pub const LEGACY_STREAM: u32 = 1;
pub const PER_THREAD_STREAM: u32 = 2;
/// The first number of another stream.
pub const FIRST_STREAM: u32 = 3;

/// Flags of a record.
pub mod flags {
    /// The call returns only when its work is done, or takes no stream.
    pub const BLOCKS: u8 = 1;
    /// The host's side of a copy is page-locked.
    pub const LOCKED: u8 = 2;
}

/// What a record is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kind {
    Process = 1,
    Shape = 3,
    Launch = 4,
    GraphMade = 5,
    Node = 6,
    Edge = 7,
    GraphGone = 8,
    GraphLaunch = 9,
    Take = 10,
    Give = 11,
    Copy = 12,
    Fill = 13,
    StreamMade = 14,
    StreamGone = 15,
    EventMade = 16,
    EventGone = 17,
    EventRecorded = 18,
    EventAwaited = 19,
    Wait = 20,
    Step = 21,
    Measured = 22,
}

impl Kind {
    fn of(byte: u8) -> Option<Self> {
        const ALL: [Kind; 21] = [
            Kind::Process,
            Kind::Shape,
            Kind::Launch,
            Kind::GraphMade,
            Kind::Node,
            Kind::Edge,
            Kind::GraphGone,
            Kind::GraphLaunch,
            Kind::Take,
            Kind::Give,
            Kind::Copy,
            Kind::Fill,
            Kind::StreamMade,
            Kind::StreamGone,
            Kind::EventMade,
            Kind::EventGone,
            Kind::EventRecorded,
            Kind::EventAwaited,
            Kind::Wait,
            Kind::Step,
            Kind::Measured,
        ];
        ALL.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// One record. What `sub`, `stream`, `object`, `a` and `b` say goes by the kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    pub kind: Kind,
    pub flags: u8,
    pub device_plus_one: u8,
    pub sub: u8,
    pub process: u16,
    pub thread: u16,
    pub order: u64,
    pub at_ns: u64,
    pub gap_ns: u64,
    pub took_ns: u64,
    pub stream: u32,
    pub object: u32,
    pub a: u64,
    pub b: u64,
}

impl Record {
    /// One that is of no call.
    pub fn of(kind: Kind) -> Self {
        Self {
            kind,
            flags: 0,
            device_plus_one: 0,
            sub: 0,
            process: 0,
            thread: 0,
            order: 0,
            at_ns: 0,
            gap_ns: 0,
            took_ns: 0,
            stream: 0,
            object: 0,
            a: 0,
            b: 0,
        }
    }

    fn bytes(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[0] = self.kind as u8;
        bytes[1] = self.flags;
        bytes[2] = self.device_plus_one;
        bytes[3] = self.sub;
        bytes[4..6].copy_from_slice(&self.process.to_le_bytes());
        bytes[6..8].copy_from_slice(&self.thread.to_le_bytes());
        for (at, word) in [self.order, self.at_ns, self.gap_ns, self.took_ns]
            .into_iter()
            .enumerate()
        {
            bytes[8 + 8 * at..16 + 8 * at].copy_from_slice(&word.to_le_bytes());
        }
        bytes[40..44].copy_from_slice(&self.stream.to_le_bytes());
        bytes[44..48].copy_from_slice(&self.object.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.a.to_le_bytes());
        bytes[56..64].copy_from_slice(&self.b.to_le_bytes());
        bytes
    }

    /// `None` where the kind is unknown.
    fn read(bytes: &[u8; RECORD_BYTES]) -> Option<Self> {
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let word = |at: usize| {
            let mut eight = [0; 8];
            eight.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(eight)
        };
        let number = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        Some(Self {
            kind: Kind::of(bytes[0])?,
            flags: bytes[1],
            device_plus_one: bytes[2],
            sub: bytes[3],
            process: half(4),
            thread: half(6),
            order: word(8),
            at_ns: word(16),
            gap_ns: word(24),
            took_ns: word(32),
            stream: number(40),
            object: number(44),
            a: word(48),
            b: word(56),
        })
    }
}

/// Where a recording comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Provenance {
    /// Version of `sublet`.
    pub sublet: String,
    /// The command's file name, without its folder and its arguments.
    pub command: String,
    /// When it began, UTC.
    pub began: String,
    /// On the simulated GPU.
    pub simulated: bool,
    /// From what it was made, where it is none of a job that ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub derived: Option<String>,
}

/// A device that the job saw.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    pub ordinal: u32,
    pub name: String,
    /// As `cuDriverGetVersion` counts.
    pub driver: u64,
}

/// Why a recording ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// The command has ended.
    CommandEnded,
    /// The file has as many bytes as it may.
    Size,
    /// The job was faster than what the file is written to.
    Overrun,
    /// The file could not be written to.
    Unwritable,
}

/// The end of a recording.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    pub reason: Reason,
    /// Records that are not in the file.
    pub lost: u64,
    /// Records that are.
    pub records: u64,
    /// The command's exit code, 128 and its signal where that ended it; none where it went on.
    pub exit: Option<i32>,
}

/// CRC-32 as of IEEE 802.3.
pub fn checksum(parts: &[&[u8]]) -> u32 {
    static TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut byte = 0;
        while byte < 256 {
            // CAST: below 256.
            let (mut value, mut bit) = (byte as u32, 0);
            while bit < 8 {
                value = if value & 1 == 1 {
                    0xedb8_8320 ^ (value >> 1)
                } else {
                    value >> 1
                };
                bit += 1;
            }
            table[byte] = value;
            byte += 1;
        }
        table
    };
    let bytes = parts.iter().flat_map(|part| part.iter());
    !bytes.fold(!0, |sum: u32, byte| {
        // CAST: the low byte.
        TABLE[usize::from(sum as u8 ^ byte)] ^ (sum >> 8)
    })
}

#[cfg(test)]
pub mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_the_one_that_others_compute() {
        assert_eq!(checksum(&[b"1234", b"56789"]), 0xcbf4_3926);
        assert_eq!(checksum(&[]), 0);
    }

    #[test]
    fn a_record_comes_back_as_it_was() {
        let record = Record {
            kind: Kind::Copy,
            flags: flags::BLOCKS,
            device_plus_one: 1,
            sub: 2,
            process: 3,
            thread: 4,
            order: 5,
            at_ns: 6,
            gap_ns: 7,
            took_ns: 8,
            stream: 9,
            object: 10,
            a: 11,
            b: u64::MAX,
        };
        let bytes = record.bytes();
        assert_eq!(Record::read(&bytes), Some(record));
        assert_eq!(Record::read(&[0; RECORD_BYTES]), None);
        assert_eq!(Record::read(&[0xff; RECORD_BYTES]), None);
        for kind in 0..=255 {
            if let Some(known) = Kind::of(kind) {
                assert_eq!(known as u8, kind);
            }
        }
    }
}
