//! What the recording driver has seen: a file that it maps and the test reads while the host
//! program runs.
//!
//! ```text
//!  0  u64  number of records
//!  8  u32  status that the subject returns
//! 12  u32  row of the subject in the table
//! 16  u32  1: every other function answers like a driver that works
//! 64  records of 136 bytes: u64 row of the table, u64[16] arguments as machine words
//! ```

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use shim_ffi::{SYMBOLS, Symbol};

/// Machine words that are recorded of every call.
pub const WORDS: usize = 16;
const HEADER: u64 = 64;
const RECORD: u64 = 8 + 8 * WORDS as u64;
const RECORDS: u64 = 8192;

/// One call that reached the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Which function.
    pub symbol: Symbol,
    /// Its first arguments.
    pub words: [u64; WORDS],
}

/// The file.
#[derive(Debug)]
pub struct Log {
    file: File,
    path: PathBuf,
}

impl Log {
    /// Makes an empty log.
    ///
    /// # Panics
    /// When the file cannot be made.
    pub fn create(path: &Path) -> Self {
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .expect("a log file");
        file.set_len(HEADER + RECORDS * RECORD).expect("its length");
        Self {
            file,
            path: path.to_owned(),
        }
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Empties the log and says which function is looked at and what it is to return.
    pub fn begin(&self, subject: Symbol, status: u32, works: bool) {
        self.put(8, status);
        self.put(12, subject as u32);
        self.put(16, u32::from(works));
        self.file
            .write_all_at(&0u64.to_ne_bytes(), 0)
            .expect("written");
    }

    fn put(&self, at: u64, value: u32) {
        self.file
            .write_all_at(&value.to_ne_bytes(), at)
            .expect("written");
    }

    fn word(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, at).expect("read");
        u64::from_ne_bytes(bytes)
    }

    /// All calls since [`Log::begin`].
    ///
    /// # Panics
    /// When more were made than the log holds.
    pub fn records(&self) -> Vec<Record> {
        let count = self.word(0);
        assert!(count <= RECORDS, "{count} calls do not fit the log");
        (0..count)
            .map(|at| {
                let at = HEADER + at * RECORD;
                Record {
                    symbol: SYMBOLS[usize::try_from(self.word(at)).expect("a row")],
                    words: std::array::from_fn(|word| self.word(at + 8 + 8 * word as u64)),
                }
            })
            .collect()
    }

    /// Calls of one function since [`Log::begin`].
    pub fn calls_of(&self, symbol: Symbol) -> Vec<Record> {
        self.records()
            .into_iter()
            .filter(|record| record.symbol == symbol)
            .collect()
    }
}
