//! What a job writes to one of its outputs: through a pipe into a file that is bounded, so that no
//! job fills the disk that it shares with others.
//!
//! The file is made by the runner before it gives up any right, in a directory that the job cannot
//! change, and belongs to the job's user. Full, it becomes `NAME.1` and a new one begins: the last
//! [`FILE_BYTES`] are always there.

use std::fs::{self, File, OpenOptions};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::without_blocking;

/// Bytes of a file; each output has two.
pub const FILE_BYTES: u64 = 4 << 20;
/// Bytes of the end of an output that are kept in memory.
const LAST_BYTES: usize = 400;

#[derive(Debug)]
pub struct Output {
    source: Option<PipeReader>,
    path: PathBuf,
    owner: (u32, u32),
    file: Option<File>,
    /// In the file.
    bytes: u64,
    last: Vec<u8>,
    lost: u64,
    why: String,
}

impl Output {
    /// The file, and the end of the pipe that is for the job.
    ///
    /// # Errors
    /// Neither of them can be made.
    pub fn new(place: &Path, name: &str, owner: (u32, u32)) -> io::Result<(Self, PipeWriter)> {
        let (source, sink) = io::pipe()?;
        without_blocking(&source)?;
        // Programs open /dev/stdout anew, which asks for the pipe's owner.
        std::os::unix::fs::fchown(&sink, Some(owner.0), Some(owner.1))?;
        let mut output = Self {
            source: Some(source),
            path: place.join(name),
            owner,
            file: None,
            bytes: 0,
            last: Vec::new(),
            lost: 0,
            why: String::new(),
        };
        output.file = Some(output.open()?);
        Ok((output, sink))
    }

    fn open(&self) -> io::Result<File> {
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            // CAST: flags of open(2) are an int.
            .custom_flags(OFlags::NOFOLLOW.bits() as i32)
            .open(&self.path)?;
        let (uid, gid) = self.owner;
        std::os::unix::fs::fchown(&file, Some(uid), Some(gid))?;
        Ok(file)
    }

    /// Where the job's words come from, until it has closed it.
    pub fn source(&self) -> Option<BorrowedFd<'_>> {
        self.source.as_ref().map(AsFd::as_fd)
    }

    /// Takes what is there. It never waits for the job; what cannot be written is lost, so that the
    /// job does not wait for a disk for ever.
    pub fn pump(&mut self) {
        let mut chunk = [0; 64 << 10];
        // As much as a pipe holds, several times: then the runner looks around again.
        for _ in 0..16 {
            let Some(source) = &mut self.source else {
                return;
            };
            match source.read(&mut chunk) {
                Ok(0) => self.source = None,
                // PANIC: a read returns at most the buffer's length.
                Ok(count) => self.take(&chunk[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        self.last.extend_from_slice(bytes);
        let above = self.last.len().saturating_sub(LAST_BYTES);
        self.last.drain(..above);
        // CAST: at most 64 KiB.
        let count = bytes.len() as u64;
        if let Err(error) = self.write(bytes) {
            self.lost += count;
            self.why = error.to_string();
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.bytes + bytes.len() as u64 > FILE_BYTES {
            self.file = None;
        }
        if self.file.is_none() {
            let mut old = self.path.clone().into_os_string();
            old.push(".1");
            match fs::rename(&self.path, &old) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            self.bytes = 0;
            self.file = Some(self.open()?);
        }
        if let Some(file) = &mut self.file {
            file.write_all(bytes)?;
        }
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    /// The end of what was written, for people.
    pub fn last_words(&self) -> String {
        String::from_utf8_lossy(&self.last).trim().to_owned()
    }

    /// What is not in the files though it should be.
    pub fn loss(&self) -> Option<String> {
        (self.lost > 0).then(|| {
            let name = self.path.file_name().unwrap_or_default().to_string_lossy();
            format!(
                "{} bytes of its {name} could not be kept: {}",
                self.lost, self.why
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> (u32, u32) {
        let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
        (uid.as_raw(), gid.as_raw())
    }

    #[test]
    fn the_last_of_an_endless_output_is_kept_and_no_more() {
        let dir = tempfile::tempdir().unwrap();
        let (mut output, mut sink) = Output::new(dir.path(), "stdout", own()).unwrap();
        let line = [b'y'; 4096];
        for _ in 0..(3 * FILE_BYTES / 4096) {
            sink.write_all(&line).unwrap();
            output.pump();
        }
        sink.write_all(b"the end\n").unwrap();
        drop(sink);
        // A process that another test has forked holds the pipe until it runs its program.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while output.source().is_some() {
            assert!(std::time::Instant::now() < deadline, "closed");
            output.pump();
        }
        assert!(output.last_words().ends_with("the end"));
        assert_eq!(output.loss(), None);
        let size = |name: &str| fs::metadata(dir.path().join(name)).unwrap().len();
        assert!(size("stdout") <= FILE_BYTES && size("stdout.1") <= FILE_BYTES);
        assert!(size("stdout") + size("stdout.1") >= FILE_BYTES);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn an_output_is_never_written_through_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let victim = dir.path().join("victim");
        fs::write(&victim, "untouched").unwrap();
        std::os::unix::fs::symlink(&victim, dir.path().join("stdout")).unwrap();
        assert!(Output::new(dir.path(), "stdout", own()).is_err());
        assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
    }

    #[test]
    fn a_full_disk_is_reported_and_does_not_block_the_job() {
        let dir = tempfile::tempdir().unwrap();
        let (mut output, mut sink) = Output::new(dir.path(), "stderr", own()).unwrap();
        output.file = Some(OpenOptions::new().write(true).open("/dev/full").unwrap());
        sink.write_all(b"last words").unwrap();
        output.pump();
        assert_eq!(output.last_words(), "last words");
        let loss = output.loss().unwrap();
        assert!(loss.contains("10 bytes of its stderr"), "{loss}");
    }
}
