//! Writing a recording: block by block, so that what is in the file is whole whenever the writer
//! ends.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};

use super::{
    BLOCK_BYTES, BLOCK_MAGIC, Device, End, HEADER_BYTES, MAGIC, PAYLOAD_MOST, Provenance,
    RECORD_BYTES, Record, VERSION, block, checksum,
};

/// Bytes that are kept for the end.
const RESERVE: u64 = 1024;

pub struct Writer {
    file: File,
    /// Bytes of the file up to its last whole block.
    written: u64,
    most: u64,
    records: Vec<u8>,
    names: Vec<u8>,
    pub count: u64,
    is_full: bool,
}

impl Writer {
    /// Begins a file of `most` bytes at most.
    ///
    /// # Errors
    /// The header cannot be written.
    pub fn begin(file: File, most: u64, provenance: &Provenance) -> io::Result<Self> {
        let about = serde_json::to_vec(provenance)?;
        let mut header = Vec::with_capacity(HEADER_BYTES + about.len());
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend(length(&about)?.to_le_bytes());
        header.extend(checksum(&[&about]).to_le_bytes());
        header.extend(0_u32.to_le_bytes());
        header.extend(&about);
        let mut writer = Self {
            file,
            written: 0,
            most,
            records: Vec::new(),
            names: Vec::new(),
            count: 0,
            is_full: false,
        };
        writer.append(&[&header])?;
        Ok(writer)
    }

    /// Bytes that the file has.
    pub fn bytes(&self) -> u64 {
        self.written
    }

    /// Whether nothing more fits.
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// Adds the name of a kernel; it is in the file before the next record is.
    ///
    /// # Errors
    /// As [`Writer::flush`].
    pub fn name(&mut self, number: u32, name: &[u8]) -> io::Result<()> {
        if self.names.len() + name.len() + 6 > PAYLOAD_MOST {
            self.flush()?;
        }
        let Ok(bytes) = u16::try_from(name.len()) else {
            return Ok(());
        };
        self.names.extend(number.to_le_bytes());
        self.names.extend(bytes.to_le_bytes());
        self.names.extend(name);
        Ok(())
    }

    /// Adds a device.
    ///
    /// # Errors
    /// As [`Writer::flush`].
    pub fn device(&mut self, device: &Device) -> io::Result<()> {
        self.flush()?;
        let about = serde_json::to_vec(device)?;
        self.block(block::DEVICE, &about)
    }

    /// Adds a record.
    ///
    /// # Errors
    /// As [`Writer::flush`].
    pub fn record(&mut self, record: &Record) -> io::Result<()> {
        self.records.extend(record.bytes());
        if self.records.len() + RECORD_BYTES > PAYLOAD_MOST {
            self.flush()?;
        }
        Ok(())
    }

    /// Writes what is there as blocks. A full file takes nothing more.
    ///
    /// # Errors
    /// The file cannot be written; it ends with its last whole block.
    pub fn flush(&mut self) -> io::Result<()> {
        for kind in [block::NAMES, block::RECORDS] {
            let part = match kind {
                block::NAMES => &mut self.names,
                _ => &mut self.records,
            };
            let mut payload = std::mem::take(part);
            let left = self.most.saturating_sub(self.written + RESERVE);
            let whole = (left as usize).saturating_sub(BLOCK_BYTES) / RECORD_BYTES;
            let is_last = kind == block::RECORDS && payload.len() > whole * RECORD_BYTES;
            if is_last {
                payload.truncate(whole * RECORD_BYTES);
            }
            if !payload.is_empty() && !self.is_full {
                self.block(kind, &payload)?;
                if kind == block::RECORDS {
                    self.count += (payload.len() / RECORD_BYTES) as u64;
                }
            }
            self.is_full |= is_last;
        }
        Ok(())
    }

    /// Writes the end, for which there is always space.
    ///
    /// # Errors
    /// As [`Writer::flush`].
    pub fn end(&mut self, end: &End) -> io::Result<()> {
        let about = serde_json::to_vec(end)?;
        self.put(block::END, &about)
    }

    fn block(&mut self, kind: u32, payload: &[u8]) -> io::Result<()> {
        let bytes = (BLOCK_BYTES + payload.len()) as u64;
        if self.is_full || self.written + bytes + RESERVE > self.most {
            self.is_full = true;
            return Ok(());
        }
        self.put(kind, payload)
    }

    fn put(&mut self, kind: u32, payload: &[u8]) -> io::Result<()> {
        let kind = kind.to_le_bytes();
        let mut head = Vec::with_capacity(BLOCK_BYTES);
        head.extend(BLOCK_MAGIC);
        head.extend(kind);
        head.extend(length(payload)?.to_le_bytes());
        head.extend(checksum(&[&kind, payload]).to_le_bytes());
        self.append(&[&head, payload])
    }

    fn append(&mut self, parts: &[&[u8]]) -> io::Result<()> {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        let outcome = parts.iter().try_for_each(|part| self.file.write_all(part));
        match outcome {
            Ok(()) => self.written += bytes as u64,
            Err(error) => {
                // A part of a block is none.
                let _ = self.file.set_len(self.written);
                let _ = self.file.seek(SeekFrom::Start(self.written));
                return Err(error);
            }
        }
        Ok(())
    }
}

fn length(bytes: &[u8]) -> io::Result<u32> {
    u32::try_from(bytes.len()).map_err(io::Error::other)
}
