//! What happened, one JSON line per event, in a file of bounded size and in memory for `Request::Events`.
//!
//! The numbers of the lines go on over restarts. A tenant cannot flood it: [`Allowance`] lets a burst through and then a few
//! lines a second, and says how many were left out.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use control::Event;
use serde_json::{Map, Value};

/// Lines kept in memory.
const KEPT: usize = 1000;
/// Size at which the file is put aside as `journal.jsonl.1`.
const ROTATE_BYTES: u64 = 8 << 20;

/// The journal of one arbiter.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    bytes: u64,
    rotate_bytes: u64,
    seq: u64,
    kept: VecDeque<Event>,
}

impl Journal {
    /// Opens or begins the file, and finds the number of its last line.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::with_limit(path, ROTATE_BYTES)
    }

    fn with_limit(path: &Path, rotate_bytes: u64) -> io::Result<Self> {
        let mut file = append(path)?;
        let mut bytes = file.metadata()?.len();
        let (mut seq, whole) = last_seq(&mut file, bytes)?;
        if !whole {
            file.write_all(b"\n")?;
            bytes += 1;
        }
        if seq == 0
            && let Ok(mut older) = File::open(aside(path))
        {
            let bytes = older.metadata()?.len();
            (seq, _) = last_seq(&mut older, bytes)?;
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            bytes,
            rotate_bytes,
            seq,
            kept: VecDeque::new(),
        })
    }

    /// Writes a line. A journal that cannot be written is told to the log and keeps nothing from being served.
    pub fn write(&mut self, kind: &str, job: &str, message: String, fields: &[(&str, Value)]) {
        self.seq += 1;
        let fields: Map<String, Value> = fields
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone()))
            .collect();
        let event = Event {
            seq: self.seq,
            unix_ms: crate::clock::unix_ms(),
            kind: kind.to_owned(),
            job: job.to_owned(),
            message,
            fields,
        };
        tracing::info!(kind, job, "{}", event.message);
        if let Err(error) = self.put(&event) {
            tracing::error!("{} cannot be written: {error}", self.path.display());
        }
        if self.kept.len() == KEPT {
            self.kept.pop_front();
        }
        self.kept.push_back(event);
    }

    fn put(&mut self, event: &Event) -> io::Result<()> {
        let mut line = serde_json::to_vec(event)?;
        line.push(b'\n');
        if self.bytes + line.len() as u64 > self.rotate_bytes && self.bytes > 0 {
            std::fs::rename(&self.path, aside(&self.path))?;
            self.file = append(&self.path)?;
            self.bytes = 0;
        }
        self.file.write_all(&line)?;
        self.bytes += line.len() as u64;
        Ok(())
    }

    /// Lines of this arbiter above `since_seq`, oldest first, `limit` at most (0: all that are kept).
    pub fn since(&self, since_seq: u64, limit: usize) -> Vec<Event> {
        let limit = if limit == 0 { KEPT } else { limit };
        let above = self.kept.iter().filter(|event| event.seq > since_seq);
        above.take(limit).cloned().collect()
    }
}

fn append(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .create(true)
        .read(true)
        .append(true)
        .mode(0o600)
        .open(path)
}

fn aside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

/// Number of the last line, and whether the file ends with a whole one.
fn last_seq(file: &mut File, bytes: u64) -> io::Result<(u64, bool)> {
    let tail = bytes.min(64 << 10);
    file.seek(SeekFrom::Start(bytes - tail))?;
    let mut text = Vec::new();
    file.take(tail).read_to_end(&mut text)?;
    let seq = text
        .rsplit(|byte| *byte == b'\n')
        .find_map(|line| serde_json::from_slice::<Event>(line).ok())
        .map_or(0, |event| event.seq);
    Ok((seq, text.last().is_none_or(|byte| *byte == b'\n')))
}

/// How many lines a tenant may cause.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    left: f64,
    at_ns: u64,
    /// Lines left out since the last one that was let through.
    left_out: u64,
}

/// Lines at once, and lines per second afterwards.
const BURST: f64 = 20.0;
const PER_SECOND: f64 = 2.0;

impl Allowance {
    /// A full one.
    pub fn new(now_ns: u64) -> Self {
        Self {
            left: BURST,
            at_ns: now_ns,
            left_out: 0,
        }
    }

    /// `Some(n)`: write the line, `n` were left out before it. `None`: leave it out.
    pub fn spend(&mut self, now_ns: u64) -> Option<u64> {
        let passed_s = now_ns.saturating_sub(self.at_ns) as f64 / 1e9;
        self.left = (self.left + passed_s * PER_SECOND).min(BURST);
        self.at_ns = now_ns;
        if self.left < 1.0 {
            self.left_out += 1;
            return None;
        }
        self.left -= 1.0;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(journal: &mut Journal, lines: u64) {
        for line in 0..lines {
            let fields = [("limit_bytes", Value::from(line))];
            journal.write("oom", "train", format!("line {line}"), &fields);
        }
    }

    #[test]
    fn numbers_go_on_over_restarts_rotation_and_a_torn_line() {
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("journal.jsonl");
        let mut journal = Journal::with_limit(&path, 2000).expect("new");
        fill(&mut journal, 30);
        assert_eq!(journal.since(27, 0).len(), 3);
        assert_eq!(journal.since(0, 2).first().map(|event| event.seq), Some(1));
        assert!(path.metadata().expect("file").len() <= 2000);
        assert!(aside(&path).metadata().expect("older file").len() <= 2000);
        drop(journal);
        append(&path)
            .and_then(|mut file| file.write_all(b"{\"seq\":99"))
            .expect("tear");
        let mut journal = Journal::with_limit(&path, 2000).expect("again");
        fill(&mut journal, 1);
        let events = journal.since(0, 0);
        assert_eq!(events.len(), 1);
        assert_eq!(events[0].seq, 31);
        assert_eq!(events[0].fields["limit_bytes"], Value::from(0));
    }

    #[test]
    fn a_flood_is_cut_and_counted() {
        let mut allowance = Allowance::new(0);
        let through = (0..1000).filter(|_| allowance.spend(1).is_some()).count();
        assert_eq!(through, 20);
        assert_eq!(allowance.spend(1_000_000_001), Some(980));
        assert_eq!(allowance.spend(1_000_000_001), Some(0));
        assert_eq!(allowance.spend(1_000_000_001), None);
    }
}
