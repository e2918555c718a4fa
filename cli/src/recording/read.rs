//! Reading a recording, which may be cut off anywhere, damaged, or something else entirely.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::Path;

use super::{
    BLOCK_BYTES, BLOCK_MAGIC, Device, End, HEADER_BYTES, MAGIC, NUMBER_MOST, PAYLOAD_MOST,
    Provenance, RECORD_BYTES, Record, VERSION, block, checksum,
};

/// A recording, as far as its file is whole.
#[derive(Debug, Default)]
pub struct Recording {
    pub provenance: Provenance,
    pub devices: Vec<Device>,
    /// By the number of the kernel; empty where it has none.
    pub names: Vec<String>,
    /// In the order of the file.
    pub records: Vec<Record>,
    pub end: Option<End>,
    /// Why the file was not read to its end.
    pub cut: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("cannot read it: {0}")]
    Io(#[from] io::Error),
    #[error("it is empty")]
    Empty,
    #[error("it is no recording of sublet's: it does not begin with its mark")]
    Foreign,
    #[error(
        "it has version {found}, and this sublet reads version {VERSION}: record the job again"
    )]
    Version { found: u32 },
    #[error("its header is cut off or damaged")]
    Header,
}

/// Longest provenance, in bytes.
const PROVENANCE_MOST: usize = 4096;
/// Most devices of a recording.
const DEVICES_MOST: usize = 1024;

impl Recording {
    /// Reads a file up to its last whole block.
    ///
    /// # Errors
    /// [`ReadError`]; a file that ends early is none.
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        let file = File::open(path)?;
        if file.metadata()?.is_dir() {
            return Err(io::Error::from(io::ErrorKind::IsADirectory).into());
        }
        Self::read(BufReader::new(file))
    }

    /// As [`Recording::open`].
    ///
    /// # Errors
    /// As there.
    pub fn read(mut from: impl Read) -> Result<Self, ReadError> {
        let mut header = [0; HEADER_BYTES];
        let got = fill(&mut from, &mut header)?;
        if got == 0 {
            return Err(ReadError::Empty);
        }
        if !header.starts_with(&MAGIC[..got.min(MAGIC.len())]) {
            return Err(ReadError::Foreign);
        }
        let found = number(&header, 8);
        if got >= 12 && found != VERSION {
            return Err(ReadError::Version { found });
        }
        // CAST: compared with what is allowed at once.
        let length = number(&header, 12) as usize;
        if got < HEADER_BYTES || length > PROVENANCE_MOST {
            return Err(ReadError::Header);
        }
        let mut about = vec![0; length];
        if fill(&mut from, &mut about)? < length || checksum(&[&about]) != number(&header, 16) {
            return Err(ReadError::Header);
        }
        let mut recording = Self {
            provenance: serde_json::from_slice(&about).map_err(|_| ReadError::Header)?,
            ..Self::default()
        };
        recording.blocks(from, (HEADER_BYTES + length) as u64)?;
        Ok(recording)
    }

    fn blocks(&mut self, mut from: impl Read, mut at: u64) -> io::Result<()> {
        let mut payload = Vec::with_capacity(PAYLOAD_MOST);
        for count in 1_u64.. {
            let mut head = [0; BLOCK_BYTES];
            let got = fill(&mut from, &mut head)?;
            if got == 0 {
                if self.end.is_none() {
                    self.cut = Some(format!("it has no end after byte {at}"));
                }
                return Ok(());
            }
            let wrong = |what: &str| Some(format!("block {count}, at byte {at}, {what}"));
            if self.end.is_some() {
                self.cut = wrong("comes after the end");
                return Ok(());
            }
            // CAST: compared with what is allowed at once.
            let length = number(&head, 8) as usize;
            if got < BLOCK_BYTES {
                self.cut = wrong("is cut off");
                return Ok(());
            }
            if !head.starts_with(&BLOCK_MAGIC) || length > PAYLOAD_MOST {
                self.cut = wrong("is damaged");
                return Ok(());
            }
            payload.resize(length, 0);
            if fill(&mut from, &mut payload)? < length {
                self.cut = wrong("is cut off");
                return Ok(());
            }
            if checksum(&[&head[4..8], &payload]) != number(&head, 12) {
                self.cut = wrong("is damaged: its checksum is another");
                return Ok(());
            }
            if !self.block(number(&head, 4), &payload) {
                self.cut = wrong("has what no recording has");
                return Ok(());
            }
            at += (BLOCK_BYTES + length) as u64;
        }
        Ok(())
    }

    /// Whether it could be understood; where not, nothing of it is taken.
    fn block(&mut self, kind: u32, payload: &[u8]) -> bool {
        match kind {
            block::RECORDS => {
                let before = self.records.len();
                let (records, rest) = payload.as_chunks::<RECORD_BYTES>();
                for record in records {
                    match Record::read(record).filter(is_possible) {
                        Some(record) => self.records.push(record),
                        None => {
                            self.records.truncate(before);
                            return false;
                        }
                    }
                }
                rest.is_empty()
            }
            block::NAMES => self.name_all(payload),
            block::DEVICE => match serde_json::from_slice(payload) {
                Ok(device) if self.devices.len() < DEVICES_MOST => {
                    self.devices.push(device);
                    true
                }
                _ => false,
            },
            block::END => match serde_json::from_slice(payload) {
                Ok(end) => {
                    self.end = Some(end);
                    true
                }
                Err(_) => false,
            },
            _ => false,
        }
    }

    fn name_all(&mut self, mut payload: &[u8]) -> bool {
        while !payload.is_empty() {
            let Some((head, rest)) = payload.split_first_chunk::<6>() else {
                return false;
            };
            let which = number(head, 0) as usize;
            let length = usize::from(u16::from_le_bytes([head[4], head[5]]));
            // Kernels are numbered as they come.
            if which > self.names.len() || rest.len() < length || which >= NUMBER_MOST as usize {
                return false;
            }
            let name = String::from_utf8_lossy(&rest[..length]).into_owned();
            match self.names.get_mut(which) {
                Some(known) => *known = name,
                None => self.names.push(name),
            }
            payload = &rest[length..];
        }
        true
    }
}

/// Whether its numbers are ones that a recording can have.
fn is_possible(record: &Record) -> bool {
    /// A year.
    const TIME_MOST: u64 = 365 * 86_400 * 1_000_000_000;
    let times = match record.kind {
        super::Kind::Shape => 0,
        _ => record.at_ns.max(record.gap_ns).max(record.took_ns),
    };
    record.object <= NUMBER_MOST && record.stream <= NUMBER_MOST && times <= TIME_MOST
}

fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Reads until the buffer is full or the file ends; how much that was.
fn fill(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match from.read(&mut buffer[got..]) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::{Kind, Reason, Writer};
    use super::*;

    /// A recording with a block of each type and two of records, as bytes, and where blocks begin.
    fn written() -> (Vec<u8>, Vec<usize>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.slr");
        let provenance = Provenance {
            command: "train".to_owned(),
            ..Provenance::default()
        };
        let mut writer =
            Writer::begin(fs::File::create(&path).unwrap(), 1 << 20, &provenance).unwrap();
        let mut ends = vec![writer.bytes() as usize];
        let device = Device {
            ordinal: 0,
            name: "a device".to_owned(),
            driver: 13020,
        };
        writer.device(&device).unwrap();
        ends.push(writer.bytes() as usize);
        writer.name(0, b"first").unwrap();
        writer.name(1, b"second").unwrap();
        for part in 0..2 {
            for order in 0..5 {
                let record = Record {
                    order: part * 5 + order,
                    ..Record::of(Kind::Step)
                };
                writer.record(&record).unwrap();
            }
            writer.flush().unwrap();
            ends.push(writer.bytes() as usize);
        }
        let end = End {
            reason: Reason::CommandEnded,
            lost: 0,
            records: writer.count,
            exit: Some(0),
        };
        writer.end(&end).unwrap();
        (fs::read(path).unwrap(), ends)
    }

    #[test]
    fn a_recording_comes_back_as_it_was_written() {
        let (bytes, _) = written();
        let recording = Recording::read(&bytes[..]).unwrap();
        assert_eq!(recording.cut, None);
        assert_eq!(recording.provenance.command, "train");
        assert_eq!(recording.devices[0].name, "a device");
        assert_eq!(recording.names, ["first", "second"]);
        assert_eq!(recording.records.len(), 10);
        assert_eq!(recording.end.unwrap().records, 10);
    }

    #[test]
    fn one_that_is_cut_anywhere_is_read_up_to_its_last_whole_block() {
        let (bytes, ends) = written();
        for length in 0..bytes.len() {
            let outcome = Recording::read(&bytes[..length]);
            if length < ends[0] {
                assert!(outcome.is_err(), "{length} bytes");
                continue;
            }
            let recording = outcome.unwrap();
            let whole = match length {
                _ if length >= ends[3] => 10,
                _ if length >= ends[2] => 5,
                _ => 0,
            };
            assert_eq!(recording.records.len(), whole, "{length} bytes");
            assert!(recording.cut.is_some(), "{length} bytes");
        }
    }

    #[test]
    fn a_byte_that_is_another_is_found_wherever_it_is() {
        let (bytes, ends) = written();
        for at in 0..bytes.len() {
            let mut bytes = bytes.clone();
            bytes[at] ^= 0x10;
            match Recording::read(&bytes[..]) {
                Err(_) => assert!(at < ends[0], "byte {at}"),
                // The word that is reserved.
                Ok(recording) if (20..24).contains(&at) => assert_eq!(recording.cut, None),
                Ok(recording) => {
                    assert!(at >= ends[0] && recording.cut.is_some(), "byte {at}");
                }
            }
        }
    }

    #[test]
    fn another_version_and_other_files_are_refused_by_what_they_are() {
        let (bytes, _) = written();
        let mut other = bytes.clone();
        other[8] = 7;
        let error = Recording::read(&other[..]).unwrap_err().to_string();
        assert!(
            error.contains("version 7") && error.contains("version 1"),
            "{error}"
        );
        assert!(matches!(Recording::read(&b""[..]), Err(ReadError::Empty)));
        assert!(matches!(
            Recording::read(&b"\x7fELF and so on"[..]),
            Err(ReadError::Foreign)
        ));
    }

    /// Blocks with right checksums and any numbers in them.
    #[test]
    fn nothing_that_a_block_says_is_believed() {
        let (bytes, ends) = written();
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for _ in 0..2000 {
            let mut forged = bytes[..ends[0]].to_vec();
            let kind = (random() % 6) as u32;
            let length = (random() % 300) as usize;
            let payload: Vec<u8> = (0..length)
                .map(|_| match random() % 3 {
                    0 => 0,
                    1 => 0xff,
                    _ => random() as u8,
                })
                .collect();
            forged.extend(BLOCK_MAGIC);
            forged.extend(kind.to_le_bytes());
            forged.extend((length as u32).to_le_bytes());
            forged.extend(checksum(&[&kind.to_le_bytes(), &payload]).to_le_bytes());
            forged.extend(payload);
            let recording = Recording::read(&forged[..]).unwrap();
            for record in &recording.records {
                assert!(record.object <= NUMBER_MOST && record.stream <= NUMBER_MOST);
            }
            assert!(recording.names.len() < 100);
        }
    }
}
