//! What was prepared for whom, in a directory of this process's own: what a killed plugin knew.
//!
//! A record is written whole or not at all. It says what is to be undone, so it is written before
//! anything of it is done, and removed after all of it is undone.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

/// One claim, or one container's allocation.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    /// Names file and record: letters, digits and `-`.
    pub key: String,
    /// For people, and for the name of the job.
    pub title: String,
    /// Units of the device plugin; none of a claim.
    pub units: Vec<String>,
    pub shares: Vec<Share>,
    /// All of it is done, and its asker may have been answered.
    pub complete: bool,
}

/// A part of one device, and the job that has it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Share {
    /// Name of its CDI device.
    pub name: String,
    /// UUID of the device.
    pub device: String,
    pub memory_bytes: u64,
    /// Part of the device's time; 0: none is promised.
    pub share: f64,
    /// What the asker called it: request, pool, device and share of a claim.
    pub request: String,
    pub pool: String,
    pub pool_device: String,
    pub share_id: String,
    /// The job, once it is registered.
    pub job: Option<Job>,
}

/// A registered job, and the process that keeps it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Job {
    pub name: String,
    pub id: u64,
    pub token: String,
    pub channel_socket: PathBuf,
    pub holder_pid: u32,
    /// Start time of that process in clock ticks since boot.
    pub holder_ticks: u64,
}

/// The directory.
#[derive(Debug)]
pub struct Records {
    dir: PathBuf,
    /// Held as long as this process serves.
    _lock: Flock<fs::File>,
}

/// Why there are no records.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("another process serves with the state in {}: end it, or give another --state", .0.display())]
    InUse(PathBuf),
    #[error("{}: {error} (give a --state directory that this user can write)", .path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("{}: {error} (the record is damaged: remove it, and restart the pods that it is about)", .path.display())]
    Damaged {
        path: PathBuf,
        error: serde_json::Error,
    },
}

/// Longest record that is read.
const LONGEST: u64 = 1 << 20;

impl Records {
    /// The directory, made where it is missing.
    ///
    /// # Errors
    /// [`RecordError`]; one process at a time.
    pub fn open(dir: &Path) -> Result<Self, RecordError> {
        let io = |error| RecordError::Io {
            path: dir.to_owned(),
            error,
        };
        let made = fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir);
        made.map_err(io)?;
        let file = fs::File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(dir.join("lock"))
            .map_err(io)?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock)
            .map_err(|(_, _)| RecordError::InUse(dir.to_owned()))?;
        Ok(Self {
            dir: dir.to_owned(),
            _lock: lock,
        })
    }

    /// The file of a key. A holder ends where it is gone.
    pub fn file(&self, key: &str) -> PathBuf {
        self.dir.join(format!("{key}.json"))
    }

    /// All of them; damaged ones apart.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn all(&self) -> Result<(Vec<Record>, Vec<RecordError>), RecordError> {
        let io = |error| RecordError::Io {
            path: self.dir.clone(),
            error,
        };
        let (mut records, mut damaged) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(&self.dir).map_err(io)? {
            let path = entry.map_err(io)?.path();
            if path.extension().is_some_and(|ext| ext == "new") {
                let _ = fs::remove_file(&path);
            }
            if path.extension().is_none_or(|ext| ext != "json") {
                continue;
            }
            match read(&path) {
                Ok(record) => records.push(record),
                Err(error) => damaged.push(error),
            }
        }
        records.sort_by(|a, b| a.key.cmp(&b.key));
        Ok((records, damaged))
    }

    /// Writes one, over the one before.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn write(&self, record: &Record) -> Result<(), RecordError> {
        let path = self.file(&record.key);
        let written = || {
            let mut beside = tempfile::Builder::new()
                .prefix(".")
                .suffix(".new")
                .tempfile_in(&self.dir)?;
            beside.write_all(serde_json::to_string(record)?.as_bytes())?;
            beside.as_file().sync_all()?;
            beside.persist(&path).map_err(|error| error.error)?;
            Ok(())
        };
        written().map_err(|error| RecordError::Io {
            path: path.clone(),
            error,
        })
    }

    /// Removes one, if it is there.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn remove(&self, key: &str) -> Result<(), RecordError> {
        let path = self.file(key);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(RecordError::Io { path, error })
            }
            _ => Ok(()),
        }
    }
}

fn read(path: &Path) -> Result<Record, RecordError> {
    let io = |error| RecordError::Io {
        path: path.to_owned(),
        error,
    };
    let length = fs::metadata(path).map_err(io)?.len();
    if length > LONGEST {
        return Err(io(io::Error::other("longer than any record")));
    }
    let text = fs::read(path).map_err(io)?;
    serde_json::from_slice(&text).map_err(|error| RecordError::Damaged {
        path: path.to_owned(),
        error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_outlive_their_writer_and_damaged_ones_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("state");
        let records = Records::open(&dir).unwrap();
        assert!(matches!(Records::open(&dir), Err(RecordError::InUse(_))));
        let record = Record {
            key: "uid-1".into(),
            shares: vec![Share {
                memory_bytes: 5,
                ..Share::default()
            }],
            ..Record::default()
        };
        records.write(&record).unwrap();
        fs::write(dir.join("uid-2.json"), "{\"key\":").unwrap();
        fs::write(dir.join(".x.new"), "half").unwrap();
        drop(records);
        let records = Records::open(&dir).unwrap();
        let (all, damaged) = records.all().unwrap();
        assert_eq!(all, [record]);
        assert!(damaged[0].to_string().contains("uid-2.json"), "{damaged:?}");
        assert!(!dir.join(".x.new").exists());
        records.remove("uid-1").unwrap();
        records.remove("uid-1").unwrap();
        assert!(records.all().unwrap().0.is_empty());
    }
}
