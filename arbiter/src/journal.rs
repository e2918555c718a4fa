//! What happened, one JSON line per event, in a file of bounded size and in memory for
//! `Request::Events`.
//!
//! The file is written by a thread of its own ([`Writer`]); lines that a slow or full disk did not
//! take are counted and reported. The numbers of the lines continue over restarts. A tenant cannot
//! flood it: [`Allowance`] lets a burst through and then a few lines a second, and says how many
//! were left out.
//!
//! `sublet events` reads it, and `docs/reference/events.md` says what is in it.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use control::{Event, EventKind};
use serde_json::{Map, Value};

use crate::clock::Clock;
use crate::desk::News;
use crate::premises::Title;
use crate::writer::{Sink, Writer};

/// Lines kept in memory.
const KEPT: usize = 1000;
/// Jobs of which it is known whose they are: more than live at a time, and than the lines that are
/// kept are about.
const OWNERS: usize = 8192;
/// Size at which the file is put aside as `journal.jsonl.1`.
const ROTATE_BYTES: u64 = 8 << 20;

/// The journal of one arbiter.
#[derive(Debug)]
pub struct Journal {
    clock: Clock,
    path: PathBuf,
    lines: Writer,
    seq: u64,
    kept: VecDeque<Event>,
    /// Lines that were lost, as far as that was reported.
    lost: u64,
    /// A loss is reported no sooner than this.
    quiet_until_ns: u64,
    /// UUIDs of the devices, by index.
    devices: Vec<String>,
    /// Who hears of new lines.
    news: Option<Arc<News>>,
    /// Users of jobs, by number.
    owners: BTreeMap<u64, u32>,
}

/// The job that a line is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct About<'a> {
    /// Its name; empty where the line is about none.
    pub job: &'a str,
    /// Its number; 0 where the line is about none.
    pub id: u64,
}

impl<'a> About<'a> {
    /// The line is about no job.
    pub const NONE: About<'static> = About { job: "", id: 0 };

    /// The line is about this job.
    pub fn job(job: &'a str, id: u64) -> Self {
        Self { job, id }
    }
}

/// TIMEOUT: a disk that is full stays so for a while, and the same line over and over says no more
/// than one.
const QUIET_NS: u64 = 1_000_000_000;

/// The file, as its thread has it.
struct Lines {
    path: PathBuf,
    title: Title,
    /// How often that was another directory when the file was opened.
    moves: u64,
    file: File,
    bytes: u64,
    rotate_bytes: u64,
    /// The last line was written by halves.
    torn: bool,
}

impl Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<()> {
        if self.moves != self.title.moves() {
            self.file = append(&self.path)?;
            self.bytes = self.file.metadata()?.len();
            self.moves = self.title.moves();
        }
        let is_long = self.bytes + line.len() as u64 > self.rotate_bytes && self.bytes > 0;
        if is_long && self.title.check().is_err() {
            // The names are another arbiter's now, and nobody finds this file: it begins anew.
            self.file.set_len(0)?;
            self.bytes = 0;
        } else if is_long {
            match std::fs::rename(&self.path, aside(&self.path)) {
                // Somebody has removed it, or it could not be begun anew the last time.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                renamed => renamed?,
            }
            self.file = append(&self.path)?;
            self.bytes = 0;
        }
        if self.torn {
            self.file.write_all(b"\n")?;
            self.bytes += 1;
        }
        self.torn = true;
        self.file.write_all(line)?;
        self.torn = false;
        self.bytes += line.len() as u64;
        Ok(())
    }
}

impl Journal {
    /// Opens or begins the file, and finds the number of its last line.
    pub fn open(path: &Path, title: Title, clock: Clock) -> io::Result<Self> {
        Self::with_limit(path, ROTATE_BYTES, title, clock)
    }

    fn with_limit(path: &Path, rotate_bytes: u64, title: Title, clock: Clock) -> io::Result<Self> {
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
        let mut lines = Lines {
            path: path.to_owned(),
            moves: title.moves(),
            title,
            file,
            bytes,
            rotate_bytes,
            torn: false,
        };
        let sink = Box::new(move |line: &[u8]| lines.write(line));
        Self::with_sink(path, seq, sink, clock)
    }

    fn with_sink(path: &Path, seq: u64, sink: Sink, clock: Clock) -> io::Result<Self> {
        Ok(Self {
            clock,
            path: path.to_owned(),
            lines: Writer::start("journal", sink)?,
            seq,
            kept: VecDeque::new(),
            lost: 0,
            quiet_until_ns: 0,
            devices: Vec::new(),
            news: None,
            owners: BTreeMap::new(),
        })
    }

    /// Tells of new lines there from here on.
    pub fn tell_to(&mut self, news: Arc<News>) {
        news.tell(self.seq);
        self.news = Some(news);
    }

    /// Says whose a job is: lines about it are for that user.
    pub fn note_owner(&mut self, job: u64, uid: u32) {
        self.owners.insert(job, uid);
        // Of the oldest it is forgotten, and their lines are for nobody but who governs here.
        if self.owners.len() > OWNERS {
            self.owners.pop_first();
        }
    }

    /// Whose a job is, or was.
    pub fn owner(&self, job: u64) -> Option<u32> {
        self.owners.get(&job).copied()
    }

    /// Says which device an index is: lines that name the index name the UUID as well.
    pub fn name_device(&mut self, index: usize, uuid: String) {
        if index >= self.devices.len() {
            self.devices.resize(index + 1, String::new());
        }
        if let Some(device) = self.devices.get_mut(index) {
            *device = uuid;
        }
    }

    /// Takes note of a line, which is written beside the loop. A journal that cannot be written is
    /// reported where that is possible, and delays nothing.
    pub fn write(
        &mut self,
        kind: &str,
        about: About<'_>,
        message: String,
        fields: &[(&str, Value)],
    ) {
        self.tell_lost();
        self.put(kind, about, message, fields);
    }

    /// Tells how many lines could not be written, once in a while.
    pub fn tell_lost(&mut self) {
        let now_ns = self.clock.mono_ns();
        if now_ns < self.quiet_until_ns {
            return;
        }
        let Some(lost) = self.lines.take_lost() else {
            return;
        };
        self.quiet_until_ns = now_ns + QUIET_NS;
        self.lost += lost.lines;
        let path = self.path.display();
        let why = match &lost.why {
            Some(error) => format!("{error}: free some space there"),
            None => "its disk is slower than they came".into(),
        };
        let message = format!("{} lines could not be written to {path}: {why}", lost.lines);
        let fields = [("lines", Value::from(lost.lines))];
        tracing::error!("{message}");
        self.put("journal_lost", About::NONE, message, &fields);
    }

    fn put(
        &mut self,
        kind: &str,
        About { job, id }: About<'_>,
        message: String,
        fields: &[(&str, Value)],
    ) {
        debug_assert!(EventKind::of(kind).is_some(), "{kind} is in no list");
        self.seq += 1;
        let mut fields: Map<String, Value> = fields
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.clone()))
            .collect();
        self.name_devices(&mut fields);
        let event = Event {
            seq: self.seq,
            unix_ms: self.clock.unix_ms(),
            kind: kind.to_owned(),
            job: job.to_owned(),
            job_id: id,
            message,
            fields,
        };
        tracing::info!(kind, job, "{}", event.message);
        if let Ok(mut line) = serde_json::to_vec(&event) {
            line.push(b'\n');
            self.lines.push(line);
        }
        if self.kept.len() == KEPT {
            self.kept.pop_front();
        }
        self.kept.push_back(event);
        if let Some(news) = &self.news {
            news.tell(self.seq);
        }
    }

    /// Adds the UUID of `device`, and those of `devices`.
    fn name_devices(&self, fields: &mut Map<String, Value>) {
        let uuid_of = |index: &Value| -> Option<Value> {
            let index = usize::try_from(index.as_u64()?).ok()?;
            let uuid = self.devices.get(index).filter(|uuid| !uuid.is_empty())?;
            Some(Value::from(uuid.as_str()))
        };
        if let Some(uuid) = fields.get("device").and_then(uuid_of) {
            fields.insert("uuid".into(), uuid);
        }
        let all = fields.get("devices").and_then(Value::as_array);
        if let Some(uuids) = all.and_then(|all| all.iter().map(uuid_of).collect()) {
            fields.insert("uuids".into(), Value::Array(uuids));
        }
    }

    /// How many lines were lost, as far as that was reported.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Waits until all lines are written, `limit` at most. Not for the loop.
    pub fn settle(&self, limit: Duration) -> bool {
        self.lines.settle(limit)
    }

    /// Lines of this arbiter above `since_seq`, oldest first, `limit` at most (0: all that are
    /// kept).
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
    let drain = bytes.min(64 << 10);
    file.seek(SeekFrom::Start(bytes - drain))?;
    let mut text = Vec::new();
    file.take(drain).read_to_end(&mut text)?;
    let seq = text
        .rsplit(|byte| *byte == b'\n')
        .find_map(|line| serde_json::from_slice::<Event>(line).ok())
        .map_or(0, |event| event.seq);
    Ok((seq, text.last().is_none_or(|byte| *byte == b'\n')))
}

/// How many lines a tenant may cause.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    /// Lines at once, and lines per second afterwards.
    burst: f64,
    per_second: f64,
    left: f64,
    at_ns: u64,
    /// Lines left out since the last one that was let through.
    left_out: u64,
}

/// Of a job's own lines.
const BURST: f64 = 20.0;
const PER_SECOND: f64 = 2.0;
/// Of the jobs that a user starts.
const STARTS_BURST: f64 = 500.0;
const STARTS_PER_SECOND: f64 = 20.0;

impl Allowance {
    /// A full one.
    pub fn new(now_ns: u64) -> Self {
        Self::with(BURST, PER_SECOND, now_ns)
    }

    /// For lines about what a user does, not a job.
    pub fn of_many(now_ns: u64) -> Self {
        Self::with(STARTS_BURST, STARTS_PER_SECOND, now_ns)
    }

    fn with(burst: f64, per_second: f64, now_ns: u64) -> Self {
        Self {
            burst,
            per_second,
            left: burst,
            at_ns: now_ns,
            left_out: 0,
        }
    }

    /// Whether it is as good as a new one.
    pub fn is_full(&self, now_ns: u64) -> bool {
        let passed_s = now_ns.saturating_sub(self.at_ns) as f64 / 1e9;
        self.left_out == 0 && self.left + passed_s * self.per_second >= self.burst
    }

    /// `Some(n)`: write the line, `n` were left out before it. `None`: leave it out.
    pub fn spend(&mut self, now_ns: u64) -> Option<u64> {
        let passed_s = now_ns.saturating_sub(self.at_ns) as f64 / 1e9;
        self.left = (self.left + passed_s * self.per_second).min(self.burst);
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

    const PATIENCE: Duration = Duration::from_secs(60);

    fn fill(journal: &mut Journal, lines: u64) {
        for line in 0..lines {
            let fields = [("limit_bytes", Value::from(line))];
            let about = About::job("train", 7);
            journal.write("oom", about, format!("line {line}"), &fields);
        }
    }

    #[test]
    fn numbers_continue_over_restarts_rotation_and_a_torn_line() {
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("journal.jsonl");
        let mut journal = Journal::with_limit(
            &path,
            2000,
            Title::unquestioned(dir.path()),
            crate::clock::host(),
        )
        .expect("new");
        fill(&mut journal, 30);
        assert_eq!(journal.since(27, 0).len(), 3);
        assert_eq!(journal.since(0, 2).first().map(|event| event.seq), Some(1));
        assert!(journal.settle(PATIENCE));
        assert!(path.metadata().expect("file").len() <= 2000);
        assert!(aside(&path).metadata().expect("older file").len() <= 2000);
        drop(journal);
        append(&path)
            .and_then(|mut file| file.write_all(b"{\"seq\":99"))
            .expect("tear");
        let mut journal = Journal::with_limit(
            &path,
            2000,
            Title::unquestioned(dir.path()),
            crate::clock::host(),
        )
        .expect("again");
        fill(&mut journal, 1);
        let events = journal.since(0, 0);
        assert_eq!(events.len(), 1);
        assert_eq!(events[0].seq, 31);
        assert_eq!(events[0].fields["limit_bytes"], Value::from(0));
    }

    #[test]
    fn a_line_has_the_number_of_its_job_and_the_uuids_of_its_devices() {
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("journal.jsonl");
        let mut journal =
            Journal::open(&path, Title::unquestioned(dir.path()), crate::clock::host())
                .expect("new");
        journal.name_device(1, "GPU-1f".into());
        journal.name_device(0, "GPU-0a".into());
        let about = About::job("train", 7);
        let field = |name, value| [(name, value)];
        journal.write("oom", about, "of one".into(), &field("device", 1.into()));
        journal.write("oom", about, "unknown".into(), &field("device", 2.into()));
        let several = field("devices", vec![0, 1].into());
        journal.write("escaped", About::NONE, "of two".into(), &several);
        let names = field("devices", vec!["GPU-77"].into());
        journal.write("ungoverned", about, "named".into(), &names);
        let events = journal.since(0, 0);
        let ids: Vec<u64> = events.iter().map(|event| event.job_id).collect();
        assert_eq!(ids, [7, 7, 0, 7]);
        assert_eq!(events[0].fields["uuid"], "GPU-1f");
        assert_eq!(events[1].fields.get("uuid"), None);
        assert_eq!(
            events[2].fields["uuids"],
            Value::from(vec!["GPU-0a", "GPU-1f"])
        );
        assert_eq!(events[3].fields.get("uuids"), None);
        // What is in the file is what is kept.
        assert!(journal.settle(PATIENCE));
        let text = std::fs::read_to_string(&path).expect("the file");
        let written = text
            .lines()
            .map(|line| serde_json::from_str(line).expect("an event"));
        assert_eq!(written.collect::<Vec<Event>>(), events);
    }

    #[test]
    fn a_journal_that_somebody_removed_is_begun_anew_when_it_is_put_aside() {
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("journal.jsonl");
        let mut journal = Journal::with_limit(
            &path,
            2000,
            Title::unquestioned(dir.path()),
            crate::clock::host(),
        )
        .expect("new");
        fill(&mut journal, 1);
        assert!(journal.settle(PATIENCE));
        std::fs::remove_file(&path).expect("remove");
        fill(&mut journal, 30);
        assert!(journal.settle(PATIENCE));
        let text = std::fs::read_to_string(&path).expect("a new file");
        assert!(
            text.ends_with('\n') && text.contains("\"line 29\""),
            "{text}"
        );
        fill(&mut journal, 1);
        let kept = journal.since(0, 0);
        assert!(
            kept.iter().all(|event| event.kind == "oom"),
            "none was lost"
        );
    }

    #[test]
    fn a_stalled_disk_keeps_nobody_waiting_and_is_reported() {
        let (open, opened) = crossbeam_channel::bounded::<()>(0);
        let sink = Box::new(move |_: &[u8]| {
            // A disk that stands still until the other end is dropped, and is full then.
            let _ = opened.recv_timeout(PATIENCE);
            Err(io::ErrorKind::StorageFull.into())
        });
        let mut journal =
            Journal::with_sink(Path::new("/j"), 0, sink, crate::clock::host()).expect("a thread");
        fill(&mut journal, 10_000);
        assert_eq!(
            journal.since(0, 0).len(),
            KEPT,
            "they are there to be asked for"
        );
        drop(open);
        assert!(journal.settle(PATIENCE));
        fill(&mut journal, 1);
        let records = journal.since(0, 0);
        let records = records.iter().find(|event| event.kind == "journal_lost");
        let records = records.expect("reported");
        assert_eq!(records.fields["lines"], Value::from(10_000));
        assert!(
            records.message.contains("free some space there"),
            "{}",
            records.message
        );
        assert!(journal.settle(PATIENCE));
        fill(&mut journal, 3);
        let count = journal
            .since(0, 0)
            .iter()
            .filter(|event| event.kind == "journal_lost")
            .count();
        assert_eq!(count, 1, "not again and again");
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
