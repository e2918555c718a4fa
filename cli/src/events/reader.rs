//! The journal's files, line by line: the one that was put aside, then the one that is written, and
//! each that takes its place.
//!
//! Files are known by what they are, not by their names: the arbiter may put one aside between two
//! reads. No more than a block and one line of bounded length is in memory. Knows nothing of what
//! is in a line.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use control::paths::RuntimeDir;
use nix::libc;

const BLOCK: usize = 64 << 10;
/// A longer line is none of the arbiter's: a request to it is 1 MiB at most, and six times that as
/// JSON.
const LONGEST: usize = 8 << 20;
/// How often the two names are looked at until they are those of two files that stay.
const TRIES: u32 = 16;
/// There are never more than two names, so older ones cannot come back.
const REMEMBERED: usize = 2;

/// Device and inode.
type Id = (u64, u64);

/// A file of the journal. It is held open, so nothing else can get its [`Id`].
#[derive(Debug, Clone)]
struct Part {
    file: Rc<File>,
    id: Id,
    /// Counts the files that were read.
    number: u64,
}

/// Where a line begins.
#[derive(Debug, Clone)]
pub struct Position {
    part: Part,
    at: u64,
}

/// What was found.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// A line is in [`Reader::line`].
    Line,
    /// A line was too long, or has no end and will not get one.
    Broken,
    /// Nothing more, for now.
    End,
}

#[derive(Debug)]
pub struct Reader {
    path: PathBuf,
    older: PathBuf,
    part: Option<Part>,
    /// Read to their ends.
    done: VecDeque<Part>,
    /// It has a successor, so its end is its end.
    is_over: bool,
    block: Vec<u8>,
    /// What is left of the block, and where in the file that is.
    unread: Range<usize>,
    at: u64,
    line: Vec<u8>,
    line_at: u64,
    /// `line` has its end.
    is_whole: bool,
    is_too_long: bool,
}

impl Reader {
    pub fn new(dir: &RuntimeDir) -> Self {
        Self {
            path: dir.journal_file(),
            older: dir.older_journal_file(),
            part: None,
            done: VecDeque::new(),
            is_over: false,
            block: vec![0; BLOCK],
            unread: 0..0,
            at: 0,
            line: Vec::new(),
            line_at: 0,
            is_whole: false,
            is_too_long: false,
        }
    }

    /// Whether there is a file.
    pub fn is_there(&self) -> bool {
        let there = |path: &Path| match path.symlink_metadata() {
            Ok(_) => true,
            // What hinders is said by who reads.
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        };
        there(&self.path) || there(&self.older)
    }

    /// The file that is written.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The last line that was found, without its end.
    pub fn line(&self) -> &[u8] {
        &self.line
    }

    /// Where the last line that was found begins.
    pub fn position(&self) -> Option<Position> {
        let part = self.part.clone()?;
        let at = self.line_at;
        Some(Position { part, at })
    }

    /// Goes back to a line.
    pub fn rewind(&mut self, to: Position) {
        self.done.retain(|part| part.number < to.part.number);
        self.begin(to.part, to.at);
    }

    /// The next line. What there is of one at an [`End`](Found::End) is the beginning of the next.
    ///
    /// # Errors
    /// A file cannot be opened or read.
    pub fn advance(&mut self) -> io::Result<Found> {
        if std::mem::take(&mut self.is_whole) {
            self.line.clear();
        }
        loop {
            let Some(part) = self.part.clone() else {
                match self.later()? {
                    Some(first) => self.begin(first, 0),
                    None => return Ok(Found::End),
                }
                continue;
            };
            if self.read_line(&part)? {
                return Ok(match std::mem::take(&mut self.is_too_long) {
                    true => Found::Broken,
                    false => Found::Line,
                });
            }
            // Somebody has cut it short: what is in it now begins at its beginning.
            if part.file.metadata()?.len() < self.at {
                self.begin(part, 0);
                continue;
            }
            match self.later()? {
                None => return Ok(Found::End),
                // What was written before it was put aside may have come since.
                Some(_) if !self.is_over => self.is_over = true,
                Some(next) => {
                    let is_torn = !self.line.is_empty() || self.is_too_long;
                    self.done.push_back(part);
                    if self.done.len() > REMEMBERED {
                        self.done.pop_front();
                    }
                    self.begin(next, 0);
                    if is_torn {
                        return Ok(Found::Broken);
                    }
                }
            }
        }
    }

    fn begin(&mut self, part: Part, at: u64) {
        self.part = Some(part);
        self.is_over = false;
        self.unread = 0..0;
        self.at = at;
        self.line.clear();
        self.line_at = at;
        self.is_whole = false;
        self.is_too_long = false;
    }

    /// Whether a whole line is there; what there is of one stays where it is.
    fn read_line(&mut self, part: &Part) -> io::Result<bool> {
        loop {
            if self.unread.is_empty() {
                let read = match part.file.read_at(&mut self.block, self.at) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    read => read?,
                };
                if read == 0 {
                    return Ok(false);
                }
                self.unread = 0..read;
            }
            let unread = &self.block[self.unread.clone()];
            let end = unread.iter().position(|byte| *byte == b'\n');
            let text = &unread[..end.unwrap_or(unread.len())];
            if self.line.is_empty() && !self.is_too_long {
                self.line_at = self.at;
            }
            if self.line.len() + text.len() > LONGEST {
                self.is_too_long = true;
            }
            if self.is_too_long {
                self.line.clear();
            } else {
                self.line.extend_from_slice(text);
            }
            let taken = end.map_or(text.len(), |end| end + 1);
            self.unread.start += taken;
            self.at += taken as u64;
            if end.is_some() {
                self.is_whole = true;
                return Ok(true);
            }
        }
    }

    /// The file to be read after this one.
    fn later(&self) -> io::Result<Option<Part>> {
        let number = self.part.as_ref().map_or(0, |part| part.number + 1);
        let mine = self.part.as_ref().map(|part| part.id);
        // Nearly always nothing has changed.
        if mine.is_some() && id_of(&self.path)? == mine {
            return Ok(None);
        }
        for _ in 0..TRIES {
            let current = open(&self.path)?;
            let older = open(&self.older)?;
            let is_same =
                |one: &Option<(File, Id)>, id: Option<Id>| one.as_ref().map(|(_, id)| *id) == id;
            // It was put aside between the two looks.
            if !is_same(&current, id_of(&self.path)?)
                || (current.is_some() && is_same(&older, current.as_ref().map(|(_, id)| *id)))
            {
                continue;
            }
            let mut both: Vec<(File, Id)> = older.into_iter().chain(current).collect();
            if let Some(at) = both.iter().position(|(_, id)| Some(*id) == mine) {
                both.drain(..=at);
            }
            let is_done = |id: &Id| self.done.iter().any(|part| part.id == *id);
            let next = both.into_iter().find(|(_, id)| !is_done(id));
            return Ok(next.map(|(file, id)| Part {
                file: Rc::new(file),
                id,
                number,
            }));
        }
        Ok(None)
    }
}

fn id_of(path: &Path) -> io::Result<Option<Id>> {
    match path.metadata() {
        Ok(meta) => Ok(Some((meta.dev(), meta.ino()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// `None`: there is no such file.
fn open(path: &Path) -> io::Result<Option<(File, Id)>> {
    // Of a pipe in its place nobody waits for the other end.
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NONBLOCK);
    let file = match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    Ok(Some((file, (meta.dev(), meta.ino()))))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::*;

    struct Fixture {
        dir: tempfile::TempDir,
        reader: Reader,
    }

    impl Fixture {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let reader = Reader::new(&RuntimeDir::given(dir.path().to_owned()).unwrap());
            Self { dir, reader }
        }

        fn path(&self) -> PathBuf {
            self.dir.path().join("journal.jsonl")
        }

        fn append(&self, text: impl AsRef<[u8]>) {
            let mut options = OpenOptions::new();
            let mut file = options.create(true).append(true).open(self.path()).unwrap();
            file.write_all(text.as_ref()).unwrap();
        }

        fn rotate(&self) {
            fs::rename(self.path(), self.reader.older.clone()).unwrap();
        }

        /// All until the end; what is broken as `!`.
        fn rest(&mut self) -> String {
            let mut text = String::new();
            loop {
                match self.reader.advance().unwrap() {
                    Found::Line => text += &String::from_utf8_lossy(self.reader.line()),
                    Found::Broken => text += "!",
                    Found::End => return text,
                }
            }
        }
    }

    #[test]
    fn lines_come_in_order_over_both_files_and_the_blocks_of_each() {
        let mut fixture = Fixture::new();
        assert!(!fixture.reader.is_there());
        assert_eq!(fixture.rest(), "");
        fixture.append("a\nb\n");
        assert!(fixture.reader.is_there());
        fixture.rotate();
        assert!(
            fixture.reader.is_there(),
            "also where only the older one is"
        );
        let long = "x".repeat(3 * BLOCK);
        fixture.append(format!("{long}\n\nc\n"));
        assert_eq!(fixture.rest(), format!("ab{long}c"));
        fixture.append("d\n");
        assert_eq!(fixture.rest(), "d");
    }

    #[test]
    fn half_a_line_is_waited_for_and_broken_where_its_file_is_over() {
        let mut fixture = Fixture::new();
        fixture.append("a\nha");
        assert_eq!(fixture.rest(), "a");
        assert_eq!(fixture.rest(), "");
        fixture.append("lf\nb\nc");
        assert_eq!(fixture.rest(), "halfb");
        fixture.rotate();
        assert_eq!(fixture.rest(), "", "there is no other file yet");
        fixture.append("d\n");
        assert_eq!(fixture.rest(), "!d");
    }

    #[test]
    fn what_was_written_before_a_file_was_put_aside_is_read() {
        let mut fixture = Fixture::new();
        fixture.append("a\n");
        assert_eq!(fixture.rest(), "a");
        fixture.append("b\n");
        fixture.rotate();
        fixture.append("c\n");
        assert_eq!(fixture.rest(), "bc");
        // Twice since the last look: nothing that is still there is left out or comes twice.
        fixture.append("d\n");
        fixture.rotate();
        fixture.append("e\n");
        fixture.rotate();
        fixture.append("f\n");
        assert_eq!(fixture.rest(), "def");
    }

    #[test]
    fn a_file_that_is_put_aside_while_it_is_read_is_read_once() {
        let mut fixture = Fixture::new();
        fixture.append("a\nb\n");
        fixture.rotate();
        fixture.append("c\nd\n");
        assert_eq!(fixture.reader.advance().unwrap(), Found::Line);
        assert_eq!(fixture.reader.line(), b"a");
        fixture.rotate();
        fixture.append("e\n");
        assert_eq!(fixture.rest(), "bcde", "also what has lost its name");
    }

    #[test]
    fn a_journal_that_is_removed_cut_short_or_begun_anew_is_followed() {
        let mut fixture = Fixture::new();
        fixture.append("a\n");
        fixture.rotate();
        fixture.append("bcd\n");
        assert_eq!(fixture.rest(), "abcd");
        fs::write(fixture.path(), "e\n").unwrap();
        assert_eq!(fixture.rest(), "e", "cut short");
        let writer = fs::OpenOptions::new().append(true).open(fixture.path());
        fs::remove_file(fixture.path()).unwrap();
        assert_eq!(fixture.rest(), "", "the older one was read");
        writer.unwrap().write_all(b"f\n").unwrap();
        assert_eq!(fixture.rest(), "f");
        fixture.append("g\n");
        assert_eq!(fixture.rest(), "g");
    }

    #[test]
    fn a_line_without_end_is_not_kept() {
        let mut fixture = Fixture::new();
        fixture.append("a\n");
        let block = vec![b'x'; 1 << 20];
        for _ in 0..9 {
            fixture.append(&block);
        }
        assert_eq!(fixture.rest(), "a");
        assert!(fixture.reader.line.is_empty());
        assert!(fixture.reader.line.capacity() <= 2 * LONGEST);
        fixture.append("\nb\n");
        assert_eq!(fixture.rest(), "!b");
    }

    #[test]
    fn a_reader_goes_back_to_a_line_in_either_file() {
        let mut fixture = Fixture::new();
        fixture.append("a\nb\n");
        fixture.rotate();
        fixture.append("c\nd\n");
        let mut positions = Vec::new();
        while fixture.reader.advance().unwrap() == Found::Line {
            positions.push(fixture.reader.position().unwrap());
        }
        for (position, rest) in positions.iter().zip(["abcd", "bcd", "cd", "d"]) {
            fixture.reader.rewind(position.clone());
            assert_eq!(fixture.rest(), rest);
        }
        // Also where its file has another name by then, or none.
        fixture.rotate();
        fixture.append("e\n");
        for (position, rest) in positions.iter().zip(["abcde", "bcde", "cde", "de"]) {
            fixture.reader.rewind(position.clone());
            assert_eq!(fixture.rest(), rest);
        }
    }

    #[test]
    fn what_is_no_file_is_an_error_and_nothing_to_wait_for() {
        let mut fixture = Fixture::new();
        nix::unistd::mkfifo(&fixture.path(), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let error = fixture.reader.advance().unwrap_err().to_string();
        assert!(error.contains("no regular file"), "{error}");
    }
}
