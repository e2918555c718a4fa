//! Records that have to be written once a step cannot be taken back: their space is taken before
//! that step.
//!
//! The space is a file of blanks. The record is written over them in place, reaches the disk, and
//! is renamed: on a full disk that needs nothing that is not there. Blanks after a record are part
//! of its JSON. A file system that copies what is written over may refuse all the same, and so may
//! a disk that fails: the caller tries again.
//!
//! A record that is noted and not published yet can be read by the successor of a killed process.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// Bytes of a record's space: a page, which is what the shortest one takes as well.
pub const SPACE: usize = 4096;

/// Where a record lies until it is published.
pub fn space_of(record: &Path) -> PathBuf {
    record.with_extension("new")
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        // CAST: flags of open(2) are an int.
        .custom_flags(OFlags::NOFOLLOW.bits() as i32)
        .open(path)
}

fn blanks_after(bytes: &[u8]) -> Vec<u8> {
    let mut all = bytes.to_vec();
    all.resize(SPACE.max(bytes.len()), b' ');
    all
}

/// Takes the space of a record. A space that is there, or what is noted in it, stays as it is.
///
/// # Errors
/// There is no space.
pub fn reserve(record: &Path) -> io::Result<()> {
    // Linked into place as a whole: a process that has begun to note its record in it is never
    // written over.
    let own = record.with_extension(std::process::id().to_string());
    let taken = open(&own)
        .and_then(|mut file| {
            file.write_all(&blanks_after(b""))?;
            file.sync_all()
        })
        .and_then(|()| fs::hard_link(&own, space_of(record)));
    let _ = fs::remove_file(&own);
    match taken {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => Ok(()),
    }
}

/// Writes a record into its space, where [`space_of`] finds it.
///
/// # Errors
/// It is not known to be on the disk.
pub fn note(record: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut space = open(&space_of(record))?;
    space.write_all(&blanks_after(bytes))?;
    space.sync_all()
}

/// Writes a record and publishes it under its name.
///
/// # Errors
/// It is not known to be on the disk. It may be written again.
pub fn write(record: &Path, bytes: &[u8]) -> io::Result<()> {
    // Published the last time, and not known to be on the disk.
    let published = fs::read(record).is_ok_and(|there| there == blanks_after(bytes));
    if !published {
        note(record, bytes)?;
        fs::rename(space_of(record), record)?;
    }
    File::open(record.parent().unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_noted_in_a_space_is_never_blanked_and_can_be_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let record = dir.path().join("exit.json");
        reserve(&record).unwrap();
        let space = || fs::read(space_of(&record)).unwrap();
        assert_eq!(space(), [b' '; SPACE]);
        note(&record, br#"{"code":0}"#).unwrap();
        reserve(&record).unwrap();
        assert!(space().starts_with(br#"{"code":0} "#));
        for _ in 0..2 {
            write(&record, br#"{"code":7}"#).unwrap();
            let value: serde_json::Value =
                serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
            assert_eq!(value["code"], 7);
        }
        let names = fs::read_dir(dir.path()).unwrap().flatten();
        let names: Vec<_> = names.map(|entry| entry.file_name()).collect();
        assert_eq!(names, ["exit.json"], "nothing is left beside it");
    }
}
