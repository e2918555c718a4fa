//! What is kept of an experiment: `runs.jsonl`, whose first line says what it is and each further
//! one is a finished run. A line is on the disk before the next run begins.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::plan::Mode;

/// Raised when a line changes its meaning.
const SCHEMA: u32 = 1;
pub const FILE: &str = "runs.jsonl";

/// A finished run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub key: String,
    pub mode: Mode,
    /// Names of the jobs in the order in which they were started.
    pub jobs: Vec<String>,
    pub shares: Option<Vec<f64>>,
    pub repetition: u32,
    pub started_unix_ms: u64,
    /// How long all of them were measured together.
    pub window_s: f64,
    /// From the start of the first job to the window.
    pub before_window_s: f64,
    /// Why there are no figures; `None`: there are.
    pub failed: Option<String>,
    /// The last lines that the job wrote which failed.
    pub last_lines: Option<String>,
    /// By job, as in `jobs`; empty where the run failed.
    pub figures: Vec<Figures>,
    /// Parts of the window in which the device computed, and in which its memory was used, by NVML.
    pub device_busy: Option<f64>,
    pub memory_busy: Option<f64>,
    /// What the device's clocks were at the end of the window, where that is known.
    pub clocks: Option<String>,
}

/// What is known of a job in a run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Figures {
    pub job: String,
    pub unit: String,
    /// Units in a second.
    pub speed: f64,
    /// The same in equal parts of the window.
    pub part_speeds: Vec<f64>,
    /// Seconds since the window began, and how far the job was.
    pub samples: Vec<(f64, f64)>,
    /// Part of the window that it was charged as device time: what it held.
    pub held: Option<f64>,
    pub device_time_ns: Option<u64>,
    pub wait_time_ns: Option<u64>,
    pub launches: Option<u64>,
    pub mem_peak_bytes: Option<u64>,
    pub copy_bytes_per_s: Option<f64>,
    pub iteration_ns: Option<u64>,
    pub iteration_p50_ns: Option<u64>,
    pub iteration_cov: Option<f64>,
}

/// The open file.
#[derive(Debug)]
pub struct Store {
    file: Flock<File>,
    path: PathBuf,
    end: u64,
}

/// What was in it.
#[derive(Debug, Default)]
pub struct Found {
    pub records: Vec<Record>,
    /// Bytes of a line that was not written to its end.
    pub dropped: usize,
}

impl Store {
    /// Opens the store of a directory, or begins one, for an experiment that `about` describes.
    ///
    /// # Errors
    /// A place that cannot be written, another `sublet interfere` at work there, another
    /// experiment, or a line that is none.
    pub fn open(dir: &Path, about: &Value) -> anyhow::Result<(Self, Found)> {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let path = dir.join(FILE);
        let cannot = || format!("cannot open {}", path.display());
        let mut options = OpenOptions::new();
        let file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .with_context(cannot)?;
        let mut file = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(file) => file,
            Err((_, Errno::EWOULDBLOCK)) => bail!(
                "another `sublet interfere` writes to {}: wait for it, or name another --out",
                dir.display()
            ),
            Err((_, errno)) => return Err(anyhow!(errno)).with_context(cannot),
        };
        let mut text = Vec::new();
        file.read_to_end(&mut text).with_context(cannot)?;
        let whole = text
            .iter()
            .rposition(|b| *b == b'\n')
            .map_or(0, |at| at + 1);
        let dropped = text.len() - whole;
        text.truncate(whole);
        let mut store = Self {
            file,
            path,
            end: whole as u64, // CAST: a length.
        };
        if dropped > 0 {
            store.cut().with_context(|| store.cannot_write())?;
        }
        let head = json!({ "schema": SCHEMA, "experiment": about });
        if whole == 0 {
            store.line(&head.to_string())?;
            // The name is in the directory, too, before anything is counted on.
            let synced = File::open(dir).and_then(|dir| dir.sync_all());
            synced.with_context(|| format!("cannot write to {}", dir.display()))?;
            return Ok((
                store,
                Found {
                    records: Vec::new(),
                    dropped,
                },
            ));
        }
        let records = store.read(&text, &head)?;
        Ok((store, Found { records, dropped }))
    }

    fn read(&self, text: &[u8], head: &Value) -> anyhow::Result<Vec<Record>> {
        let mut lines = text.split(|b| *b == b'\n').filter(|line| !line.is_empty());
        let first: Option<Value> = lines
            .next()
            .and_then(|line| serde_json::from_slice(line).ok());
        let Some(first) = first.filter(|first| first.get("experiment").is_some()) else {
            bail!(
                "{}:1:1: no experiment of `sublet interfere`: name another --out",
                self.path.display()
            );
        };
        if let Some((what, was, is)) = difference("", &first, head) {
            let dir = self.path.parent().unwrap_or(Path::new("."));
            bail!(
                "{} has runs of another experiment: {what} was {was} and is {is} (name another --out, or move it away)",
                dir.display()
            );
        }
        let mut records: Vec<Record> = Vec::new();
        for (number, line) in (2..).zip(lines) {
            let record: Record = serde_json::from_slice(line).map_err(|error| {
                anyhow!(
                    "{}:{number}:{}: no finished run: {error} (take the line out, and it is measured again)",
                    self.path.display(),
                    error.column().max(1)
                )
            })?;
            // A run that was tried again counts as it ended last.
            records.retain(|one| one.key != record.key);
            records.push(record);
        }
        Ok(records)
    }

    /// Appends a run, and returns it as it is read back once it is on the disk: figures made of it
    /// now and later are the same to the last bit.
    ///
    /// # Errors
    /// Where it is not; nothing of it is left in the file then.
    pub fn append(&mut self, record: &Record) -> anyhow::Result<Record> {
        let text = serde_json::to_string(record).context("a record")?;
        self.line(&text)?;
        serde_json::from_str(&text).context("a record")
    }

    fn line(&mut self, text: &str) -> anyhow::Result<()> {
        let line = format!("{text}\n");
        let from = SeekFrom::Start(self.end);
        let written = self
            .file
            .seek(from)
            .and_then(|_| self.file.write_all(line.as_bytes()))
            .and_then(|()| self.file.sync_data());
        if let Err(error) = written {
            // A line that is cut short would be dropped by the next one as well.
            let _ = self.cut();
            return Err(error).with_context(|| self.cannot_write());
        }
        self.end += line.len() as u64; // CAST: a length.
        Ok(())
    }

    fn cut(&mut self) -> io::Result<()> {
        self.file.set_len(self.end)?;
        self.file.sync_data()
    }

    fn cannot_write(&self) -> String {
        format!(
            "cannot write {}: the finished runs are in it, and the same command goes on from there",
            self.path.display()
        )
    }
}

/// The first thing in which two values differ, with both.
fn difference(path: &str, was: &Value, is: &Value) -> Option<(String, String, String)> {
    let below = |key: &str| match path {
        "" | "experiment" => key.to_owned(),
        path => format!("{path}.{key}"),
    };
    match (was, is) {
        (Value::Object(a), Value::Object(b)) => {
            let keys = a.keys().chain(b.keys().filter(|key| !a.contains_key(*key)));
            let null = Value::Null;
            keys.filter_map(|key| {
                let of = |map: &serde_json::Map<String, Value>| map.get(key).cloned();
                let (a, b) = (of(a), of(b));
                difference(
                    &below(key),
                    a.as_ref().unwrap_or(&null),
                    b.as_ref().unwrap_or(&null),
                )
            })
            .next()
        }
        (a, b) if a == b => None,
        (a, b) => Some((path.to_owned(), shown(a), shown(b))),
    }
}

/// A value in a message, cut to what fits.
fn shown(value: &Value) -> String {
    let text = match value {
        Value::Null => "none".to_owned(),
        value => value.to_string(),
    };
    match text.chars().count() > 100 {
        true => format!("{}...", text.chars().take(100).collect::<String>()),
        false => text,
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn record(key: &str, speeds: &[(&str, f64)]) -> Record {
        let figures = speeds.iter().map(|(job, speed)| Figures {
            job: (*job).into(),
            unit: "iterations".into(),
            speed: *speed,
            part_speeds: vec![*speed; 10],
            samples: vec![(0.0, 0.0), (1.0, *speed)],
            held: Some(0.5),
            ..Figures::default()
        });
        Record {
            key: key.into(),
            mode: Mode::Exclusive,
            jobs: speeds.iter().map(|(job, _)| (*job).into()).collect(),
            shares: None,
            repetition: 1,
            started_unix_ms: 1_795_466_100_000,
            window_s: 1.0,
            before_window_s: 0.5,
            failed: None,
            last_lines: None,
            figures: figures.collect(),
            device_busy: Some(0.5),
            memory_busy: None,
            clocks: None,
        }
    }

    fn about(seed: u32, driver: &str) -> Value {
        json!({ "plan": { "seed": seed, "jobs": { "a": { "command": ["x"] } } }, "driver": driver })
    }

    #[test]
    fn what_is_appended_is_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("a/b");
        let about = about(1, "13.2");
        let (mut store, found) = Store::open(&out, &about).unwrap();
        assert!(found.records.is_empty());
        let first = record("exclusive a #1", &[("a", 0.1 + 0.2)]);
        store.append(&first).unwrap();
        let failed = Record {
            failed: Some("job `b` ended".into()),
            figures: Vec::new(),
            ..record("exclusive a+b #1", &[("a", 1.0), ("b", 2.0)])
        };
        store.append(&failed).unwrap();
        let error = Store::open(&out, &about).unwrap_err();
        assert!(error.to_string().contains("another `sublet interfere`"));
        drop(store);
        let (mut store, found) = Store::open(&out, &about).unwrap();
        assert_eq!(found.records, [first.clone(), failed.clone()]);
        let again = record("exclusive a+b #1", &[("a", 1.0), ("b", 2.0)]);
        store.append(&again).unwrap();
        drop(store);
        let (_, found) = Store::open(&out, &about).unwrap();
        assert_eq!(found.records, [first, again], "as it ended last");
    }

    #[test]
    fn half_a_last_line_is_dropped_and_counted() {
        let dir = tempfile::tempdir().unwrap();
        let about = about(1, "13.2");
        let (mut store, _) = Store::open(dir.path(), &about).unwrap();
        let whole = record("exclusive a #1", &[("a", 1.0)]);
        store.append(&whole).unwrap();
        let good = store.end;
        store
            .append(&record("exclusive b #1", &[("b", 1.0)]))
            .unwrap();
        let end = store.end;
        drop(store);
        let path = dir.path().join(FILE);
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes.len() as u64, end);
        // Cut anywhere in the last line, its end included.
        for cut in [good + 1, (good + end) / 2, end - 1] {
            fs::write(&path, &bytes[..usize::try_from(cut).unwrap()]).unwrap();
            let (mut store, found) = Store::open(dir.path(), &about).unwrap();
            assert_eq!(found.records, std::slice::from_ref(&whole));
            assert_eq!(found.dropped as u64, cut - good);
            store
                .append(&record("exclusive b #1", &[("b", 1.0)]))
                .unwrap();
            drop(store);
            assert_eq!(
                fs::read(&path).unwrap(),
                bytes,
                "as if nothing had happened"
            );
        }
        // Cut in the first line: it begins anew.
        fs::write(&path, &bytes[..7]).unwrap();
        let (_, found) = Store::open(dir.path(), &about).unwrap();
        assert_eq!((found.records.len(), found.dropped), (0, 7));
    }

    #[test]
    fn another_experiment_is_refused_with_what_differs() {
        let dir = tempfile::tempdir().unwrap();
        drop(Store::open(dir.path(), &about(1, "13.2")).unwrap());
        let refused = |about: &Value| Store::open(dir.path(), about).unwrap_err().to_string();
        let error = refused(&about(2, "13.2"));
        assert!(error.contains("plan.seed was 1 and is 2"), "{error}");
        let error = refused(&about(1, "12.0"));
        assert!(
            error.contains("driver was \"13.2\" and is \"12.0\""),
            "{error}"
        );
        let mut more = about(1, "13.2");
        more["clocks"] = json!("1980 MHz");
        let error = refused(&more);
        assert!(error.contains("clocks was none and is"), "{error}");
        let mut other = about(1, "13.2");
        other["plan"]["jobs"]["a"]["command"] = json!(["y"]);
        let error = refused(&other);
        assert!(error.contains("plan.jobs.a.command was [\"x\"]"), "{error}");
        drop(Store::open(dir.path(), &about(1, "13.2")).unwrap());
    }

    #[test]
    fn what_is_no_store_is_left_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        let about = about(1, "13.2");
        for text in ["my notes\n", "{}\n", "[1]\nx\n"] {
            fs::write(&path, text).unwrap();
            let error = Store::open(dir.path(), &about).unwrap_err().to_string();
            assert!(error.contains("runs.jsonl:1:1: no experiment"), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        fs::remove_file(&path).unwrap();
        drop(Store::open(dir.path(), &about).unwrap());
        let mut text = fs::read_to_string(&path).unwrap();
        text += "{\"key\":1}\n";
        fs::write(&path, text).unwrap();
        let error = Store::open(dir.path(), &about).unwrap_err().to_string();
        assert!(error.contains("runs.jsonl:2:"), "{error}");
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let error = Store::open(&file.join("out"), &about).unwrap_err();
        assert!(error.to_string().contains("cannot make"), "{error}");
    }

    #[test]
    fn a_full_disk_is_reported_and_what_is_finished_stays() {
        let file = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut store = Store {
            file: Flock::lock(file, FlockArg::LockSharedNonblock).unwrap(),
            path: "out/runs.jsonl".into(),
            end: 0,
        };
        let error = store.append(&record("exclusive a #1", &[("a", 1.0)]));
        let error = format!("{:#}", error.unwrap_err());
        for words in ["out/runs.jsonl", "goes on", "No space left"] {
            assert!(error.contains(words), "{error}");
        }
        assert_eq!(store.end, 0);
    }
}
