//! The file of a trace: written as it comes, and valid to the last event that fitted.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};

/// What is kept before it is written.
const BUFFER: usize = 64 << 10;

/// Something to write to that can be cut off.
pub trait Sink: Write {
    /// Forgets what lies from there on, and goes on there.
    ///
    /// # Errors
    /// It cannot.
    fn cut(&mut self, at: u64) -> io::Result<()>;
}

impl Sink for File {
    fn cut(&mut self, at: u64) -> io::Result<()> {
        self.set_len(at)?;
        self.seek(SeekFrom::Start(at)).map(|_| ())
    }
}

/// Events in an object of Chrome's trace event format.
#[derive(Debug)]
pub struct TraceFile<S> {
    sink: S,
    /// Whole events that are not written yet.
    buffer: Vec<u8>,
    /// Up to where whole events are written: before the last write, and after it.
    whole: [u64; 2],
    any: bool,
}

impl<S: Sink> TraceFile<S> {
    /// Begins. Times are from `base_ns`, in nanoseconds since 1970.
    ///
    /// # Errors
    /// The sink's.
    pub fn begin(mut sink: S, base_ns: u64) -> io::Result<Self> {
        let head = format!(
            "{{\"displayTimeUnit\":\"ms\",\"baseTimeNanoseconds\":{base_ns},\"traceEvents\":["
        );
        sink.write_all(head.as_bytes())?;
        Ok(Self {
            sink,
            buffer: Vec::with_capacity(2 * BUFFER),
            whole: [head.len() as u64; 2],
            any: false,
        })
    }

    /// Adds an event, which is a JSON object.
    ///
    /// # Errors
    /// The sink's; the file is as long as it fitted, and is to be [rescued](Self::rescue).
    pub fn event(&mut self, event: &str) -> io::Result<()> {
        let before = if std::mem::replace(&mut self.any, true) {
            ",\n"
        } else {
            "\n"
        };
        self.buffer.extend_from_slice(before.as_bytes());
        self.buffer.extend_from_slice(event.as_bytes());
        if self.buffer.len() >= BUFFER {
            self.flush()?;
        }
        Ok(())
    }

    /// Writes what there is.
    ///
    /// # Errors
    /// As [`event`](Self::event).
    pub fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        self.sink.write_all(&self.buffer)?;
        self.whole = [self.whole[1], self.whole[1] + self.buffer.len() as u64];
        self.buffer.clear();
        Ok(())
    }

    /// Ends it, with an object of what else is to be said.
    ///
    /// # Errors
    /// As [`event`](Self::event).
    pub fn finish(&mut self, other: &str) -> io::Result<()> {
        self.flush()?;
        self.end(other)
    }

    /// Ends it after it could not be written: what was written last gives way to the end.
    ///
    /// # Errors
    /// Not even that can be written.
    pub fn rescue(&mut self, other: &str) -> io::Result<()> {
        self.buffer.clear();
        self.sink.cut(self.whole[0])?;
        self.end(other)
    }

    fn end(&mut self, other: &str) -> io::Result<()> {
        let end = format!("\n],\"otherData\":{other}}}\n");
        self.sink.write_all(end.as_bytes())?;
        self.sink.flush()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// A disk with so much space.
    struct Disk {
        bytes: Vec<u8>,
        space: usize,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let fits = bytes.len().min(self.space - self.bytes.len());
            if fits == 0 && !bytes.is_empty() {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.bytes.extend_from_slice(&bytes[..fits]);
            Ok(fits)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Sink for Disk {
        fn cut(&mut self, at: u64) -> io::Result<()> {
            self.bytes.truncate(usize::try_from(at).unwrap());
            Ok(())
        }
    }

    fn disk(space: usize) -> TraceFile<Disk> {
        let bytes = Vec::new();
        TraceFile::begin(Disk { bytes, space }, 7).unwrap()
    }

    fn events(file: &TraceFile<Disk>) -> usize {
        let trace: Value = serde_json::from_slice(&file.sink.bytes).unwrap();
        assert_eq!(trace["baseTimeNanoseconds"], 7);
        assert_eq!(trace["otherData"]["a"], 1);
        trace["traceEvents"].as_array().unwrap().len()
    }

    #[test]
    fn it_is_one_object_with_all_events() {
        for count in [0, 1, 3, 20_000] {
            let mut file = disk(usize::MAX);
            for number in 0..count {
                file.event(&format!("{{\"ts\":{number}}}")).unwrap();
                assert!(file.buffer.len() < BUFFER);
            }
            file.finish("{\"a\":1}").unwrap();
            assert_eq!(events(&file), count);
        }
    }

    #[test]
    fn a_full_disk_leaves_a_valid_part() {
        let event = format!("{{\"name\":\"{}\"}}", "x".repeat(100));
        for space in [
            1 << 10,
            BUFFER + 5000,
            3 * BUFFER,
            3 * BUFFER + 1,
            5 * BUFFER + 77,
        ] {
            let mut file = disk(space);
            let mut written = 0;
            while file
                .event(&event)
                .and_then(|()| file.flush_sometimes(written))
                .is_ok()
            {
                written += 1;
            }
            file.rescue("{\"a\":1}").unwrap();
            let left = events(&file);
            assert!(left <= written, "{left} of {written}");
            // No more than the last two writes are missing.
            assert!(
                (written - left) * event.len() < 3 * BUFFER,
                "{left} of {written}"
            );
            assert!(space < 4 * BUFFER || left > 0);
        }
    }

    impl TraceFile<Disk> {
        fn flush_sometimes(&mut self, written: usize) -> io::Result<()> {
            if written % 100 == 99 {
                self.flush()
            } else {
                Ok(())
            }
        }
    }

    #[test]
    fn a_file_is_cut_and_goes_on_there() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"abcdef").unwrap();
        file.cut(3).unwrap();
        file.write_all(b"x").unwrap();
        let mut text = String::new();
        file.seek(SeekFrom::Start(0)).unwrap();
        io::Read::read_to_string(&mut file, &mut text).unwrap();
        assert_eq!(text, "abcx");
    }
}
