//! What was prepared for whom, in a directory of this process's own: what a killed plugin knew.
//!
//! A record is written whole or not at all. It says what is to be undone, so it is written before
//! anything of it is done, and removed after all of it is undone. One that is being undone has
//! another name: that takes no space, which a full disk does not have.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::container::Basis;
use crate::files;

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
    /// Which of those that had this key one after the other: a number that no other has.
    pub made: u64,
    /// Whose it is; of units only, since the kubelet has listed them.
    pub pod: Option<Pod>,
    /// What a resize is measured by; of the NRI plugin's containers only.
    pub basis: Option<Basis>,
}

impl Record {
    /// Whose it is for good: units are given to a container once. `None`: that is not known yet.
    pub fn settled(&self) -> Option<&Pod> {
        self.pod.as_ref().filter(|pod| !pod.uid.is_empty())
    }
}

/// A pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
    /// Empty as long as it is not known: the kubelet's list does not have it.
    pub uid: String,
}

impl Pod {
    /// For people.
    pub fn title(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Whether both are called the same; one may be the successor of the other.
    pub fn is_called_as(&self, other: &Self) -> bool {
        self.namespace == other.namespace && self.name == other.name
    }
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

    fn undone(&self, key: &str) -> PathBuf {
        self.dir.join(format!("{key}.undo"))
    }

    /// All of them, those first that are being undone; damaged ones apart.
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
            let extension = path.extension().and_then(|ext| ext.to_str());
            let is_undone = match extension {
                Some("json") => false,
                Some("undo") => true,
                Some("new") => {
                    let _ = fs::remove_file(&path);
                    continue;
                }
                _ => continue,
            };
            match read(&path) {
                Ok(mut record) => {
                    record.complete &= !is_undone;
                    records.push(record);
                }
                Err(error) => damaged.push(error),
            }
        }
        records.sort_by(|a, b| (a.complete, &a.key).cmp(&(b.complete, &b.key)));
        Ok((records, damaged))
    }

    /// Writes one, over the one before.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn write(&self, record: &Record) -> Result<(), RecordError> {
        let path = self.file(&record.key);
        let text = serde_json::to_vec(record).map_err(io::Error::from);
        text.and_then(|text| files::replace(&path, &text, 0o600))
            .map_err(|error| RecordError::Io { path, error })
    }

    /// Notes that one is being undone, if it is there: its holders end, and a process that comes
    /// after this one goes on.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn begin_undo(&self, key: &str) -> Result<(), RecordError> {
        let path = self.file(key);
        match files::rename(&path, &self.undone(key)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(RecordError::Io { path, error })
            }
            _ => Ok(()),
        }
    }

    /// Removes one that was undone, if it is there.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn remove(&self, key: &str) -> Result<(), RecordError> {
        for path in [self.undone(key), self.file(key)] {
            files::remove(&path).map_err(|error| RecordError::Io { path, error })?;
        }
        Ok(())
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
        records.begin_undo("uid-1").unwrap();
        records.begin_undo("uid-1").unwrap();
        assert!(!records.file("uid-1").exists(), "its holders end");
        records.remove("uid-1").unwrap();
        records.remove("uid-1").unwrap();
        assert!(records.all().unwrap().0.is_empty());
    }

    #[test]
    fn a_record_that_is_being_undone_is_incomplete_whatever_it_says() {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::open(dir.path()).unwrap();
        for key in ["a", "b"] {
            let record = Record {
                key: key.into(),
                complete: true,
                ..Record::default()
            };
            records.write(&record).unwrap();
        }
        records.begin_undo("b").unwrap();
        let (all, _) = records.all().unwrap();
        let all: Vec<_> = all.iter().map(|one| (&*one.key, one.complete)).collect();
        assert_eq!(all, [("b", false), ("a", true)], "it is undone first");
    }
}
