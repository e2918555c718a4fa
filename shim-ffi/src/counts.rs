//! How often each entry point was called: a page of counters by row of the table, for diagnosis.
//!
//! The page lies in a file, so that it outlives the process however that ends, and names its rows,
//! so that a reader needs no table. Two kinds are written where a diagnosis asks for them, and
//! never otherwise: what the preload library let through to the driver ([`SEEN`]), and what the
//! simulated driver received ([`RECEIVED`]). Where the second exceeds the first, calls went past
//! the preload library. A forked child counts in its parent's page until it executes a program.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::entry::{COUNT, SYMBOLS};

/// First word of every page; its last character is the version of the layout.
pub const MAGIC: u64 = u64::from_le_bytes(*b"calls  2");
/// End of the file name of a page of calls that the preload library let through.
pub const SEEN: &str = ".seen";
/// End of the file name of a page of calls that the simulated driver received.
pub const RECEIVED: &str = ".received";
/// Directory for pages of [`SEEN`] calls; unset: none are written.
pub const SEEN_VARIABLE: &str = "SUBLET_TRACE_COUNTS";
/// Directory for pages of [`RECEIVED`] calls; unset: none are written.
pub const RECEIVED_VARIABLE: &str = "SUBLET_SIM_CALLS";

const NAME_BYTES: usize = 56;

/// One page.
#[repr(C)]
pub struct Counts {
    magic: u64,
    rows: u32,
    pid: u32,
    /// What is noted besides. By [`Note`].
    notes: [AtomicU64; 14],
    row: [Row; COUNT],
}

#[repr(C)]
struct Row {
    calls: AtomicU64,
    name: [u8; NAME_BYTES],
}

const _: () = assert!(size_of::<Row>() == 64);
const _: () = assert!(size_of::<Counts>() == 64 * (COUNT + 2));

/// What the preload library, and the simulated driver, note besides calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Note {
    /// Answers of `dlsym` and `dlvsym` that were swapped for ours.
    LookUps = 0,
    /// Answers of `cuGetProcAddress` that were swapped for ours.
    Answers = 1,
    /// Answers of `cuGetProcAddress` that are none of the table's functions, and were left as they
    /// are.
    LeftAsIs = 2,
    /// Names of the driver's own symbol table that lead to us.
    Redirected = 3,
    /// Look-ups in a second copy of the driver.
    SecondDriver = 4,
    /// Times that we entered by the driver's injection, instead of by the dynamic linker.
    Injected = 5,
    /// Calls that went on as they were made because they were the library's own.
    PassedOwn = 6,
    /// Because they were recorded into a graph.
    PassedCaptured = 7,
    /// Because no arbiter governs the process.
    PassedUngoverned = 8,
    /// Because the device is not one of the job's.
    PassedOtherDevice = 9,
    /// Because the arbiter was gone, or hung, and the job may go on without it.
    PassedWithoutArbiter = 10,
    /// Because the hook failed.
    PassedFailed = 11,
    /// In the driver's page: launches of kernels that the simulated GPU cannot compute.
    NotComputed = 12,
}

impl Counts {
    /// Bytes of a page.
    pub const BYTES: usize = size_of::<Self>();

    /// Makes an all-zero page one of this process.
    ///
    /// # Safety
    /// `page` points to [`Counts::BYTES`] zero bytes, aligned to 8, that nobody else uses yet.
    pub unsafe fn begin(page: *mut Self, pid: u32) {
        // SAFETY: as the caller promises; all-zero is a valid page.
        let page = unsafe { &mut *page };
        page.pid = pid;
        page.rows = COUNT as u32;
        for (row, symbol) in page.row.iter_mut().zip(SYMBOLS) {
            let name = symbol.entry().symbol.to_bytes();
            // PANIC: a test holds every name of the table to fewer bytes.
            row.name[..name.len()].copy_from_slice(name);
        }
        page.magic = MAGIC;
    }

    /// Byte offset of a row's counter.
    pub const fn offset(row: usize) -> usize {
        64 * (row + 2)
    }

    /// Counts one call of a row.
    pub fn call(&self, row: usize) {
        if let Some(row) = self.row.get(row) {
            row.calls.fetch_add(1, Relaxed);
        }
    }

    /// Counts one of the other things.
    pub fn note(&self, note: Note, times: u64) {
        // PANIC: the enumeration has as many members as there are words.
        self.notes[note as usize].fetch_add(times, Relaxed);
    }
}

/// A page as it is read back from its file's bytes.
#[derive(Debug, Clone, Copy)]
pub struct Reading<'a>(&'a [u8]);

impl<'a> Reading<'a> {
    /// `None` where the bytes are no page, or not the whole of it.
    pub fn of(bytes: &'a [u8]) -> Option<Self> {
        let reading = Self(bytes);
        let whole = bytes.len() >= Counts::offset(0)
            && reading.word(0) == MAGIC
            && bytes.len() >= Counts::offset(reading.rows());
        whole.then_some(reading)
    }

    fn word(&self, at: usize) -> u64 {
        self.0
            .get(at..at + 8)
            .and_then(|word| word.try_into().ok())
            .map_or(0, u64::from_le_bytes)
    }

    fn rows(&self) -> usize {
        // CAST: the low half.
        self.word(8) as u32 as usize
    }

    /// The process that opened the page.
    pub fn pid(&self) -> u32 {
        // CAST: the high half.
        (self.word(8) >> 32) as u32
    }

    /// One of the other things.
    pub fn note(&self, note: Note) -> u64 {
        self.word(16 + 8 * note as usize)
    }

    /// Name and calls of every row, also of those that nobody called.
    pub fn calls(self) -> impl Iterator<Item = (&'a str, u64)> {
        (0..self.rows()).filter_map(move |row| {
            let at = Counts::offset(row);
            let name = self.0.get(at + 8..at + 64)?;
            let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
            Some((core::str::from_utf8(&name[..end]).ok()?, self.word(at)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Symbol;

    #[test]
    fn names_fit() {
        for symbol in SYMBOLS {
            assert!(symbol.entry().symbol.to_bytes().len() < NAME_BYTES);
        }
    }

    #[test]
    fn what_was_counted_is_read_back_by_name() {
        let mut page = [[0u64; 8]; Counts::BYTES / 64];
        // SAFETY: as many zero words as a page has, and aligned as `Counts` is.
        unsafe { Counts::begin(page.as_mut_ptr().cast(), 42) };
        // SAFETY: begun above; from here on it is only looked at through this reference.
        let counts = unsafe { &*page.as_ptr().cast::<Counts>() };
        counts.call(Symbol::cuInit as usize);
        counts.call(Symbol::cuLaunchKernel as usize);
        counts.call(Symbol::cuLaunchKernel as usize);
        counts.call(COUNT);
        counts.note(Note::Answers, 3);
        // SAFETY: the same bytes.
        let bytes = unsafe { core::slice::from_raw_parts(page.as_ptr().cast(), Counts::BYTES) };
        let reading = Reading::of(bytes).unwrap();
        assert_eq!(reading.pid(), 42);
        assert_eq!(reading.note(Note::Answers), 3);
        assert_eq!(reading.note(Note::LookUps), 0);
        assert_eq!(reading.calls().count(), COUNT);
        let mut called = reading.calls().filter(|(_, calls)| *calls > 0);
        assert_eq!(called.next(), Some(("cuInit", 1)));
        assert_eq!(called.next(), Some(("cuLaunchKernel", 2)));
        assert_eq!(called.next(), None);
        assert!(Reading::of(&bytes[..100]).is_none());
        assert!(Reading::of(&[0; 64]).is_none());
    }
}
