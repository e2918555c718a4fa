//! Copies and fills that leave untouched memory untouched.
//!
//! Device memory, handles and page-locked memory take pages of the host when something is written to them; until then they read
//! as zeros. A copy of such a range would give every page of it, and of its target, to zeros. It goes by extents instead:
//! what was never written is made so in the target as well. The result is the same to the byte. So 20 GB of which a program has
//! written a part need that part of the host's memory only, on the device and wherever they are copied to. How long a copy
//! takes is the engines' business, and goes with all of its bytes.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, OnceLock};

use super::{Kind, Memory};
use crate::kernels::{Reader, Written};

const PAGE: u64 = 4096;
/// Shorter ranges are not worth asking for.
const WORTHWHILE: u64 = 256 << 10;

/// Where the bytes of a range lie on the host.
enum Backing {
    /// In a sparse file, from an offset on.
    File(Arc<OwnedFd>, u64),
    /// In one that the window owns.
    Window(i32, u64),
    /// In private pages of this process.
    Private,
    /// Somewhere; all of it counts as written.
    Unknown,
}

impl Backing {
    fn file(&self) -> Option<(i32, u64)> {
        match self {
            Self::File(fd, offset) => Some((fd.as_raw_fd(), *offset)),
            Self::Window(fd, offset) => Some((*fd, *offset)),
            Self::Private | Self::Unknown => None,
        }
    }

    /// Reads words at `start` through the file, where there is one; false: some of them were not read.
    fn read(&self, start: u64, to: &mut [u64]) -> bool {
        self.file().is_some_and(|(fd, offset)| {
            let (bytes, at) = (size_of_val(to), (offset + start) as i64);
            // SAFETY: as many bytes as there are, which may be anything.
            let read = unsafe { libc::pread(fd, to.as_mut_ptr().cast(), bytes, at) };
            usize::try_from(read) == Ok(bytes)
        })
    }

    /// Writes `length` bytes at `start` through the file, where there is one; false: some of it was not written.
    ///
    /// To take pages that were written through their mapping out of a process again, as unmapping does, the kernel stops all of its
    /// threads, once for every 2 MiB.
    ///
    /// # Safety
    /// `from` is readable for `length` bytes.
    unsafe fn write(&self, start: u64, from: *const u8, length: u64) -> bool {
        self.file().is_some_and(|(fd, offset)| {
            let at = (offset + start) as i64;
            // SAFETY: the caller's promise; a range of a file of ours.
            let written = unsafe { libc::pwrite(fd, from.cast(), length as usize, at) };
            u64::try_from(written) == Ok(length)
        })
    }
}

/// A piece of a range: its start in it, its length, and whether it may hold anything but zeros.
type Extent = (u64, u64, bool);

impl Memory {
    /// `private`: what no region of the device's is private memory.
    fn backing(&self, address: u64, bytes: u64, private: bool) -> Backing {
        let Some(region) = self.region(address) else {
            return if private && !self.is_device_address(address) {
                Backing::Private
            } else {
                Backing::Unknown
            };
        };
        if address + bytes > region.end() {
            return Backing::Unknown;
        }
        match region.kind {
            Kind::Mapping { handle, .. } => match self.handles.lock().file(handle) {
                Some((fd, offset)) => Backing::File(fd, offset + (address - region.start)),
                None => Backing::Unknown,
            },
            Kind::HostAlloc { .. } | Kind::HostRegistered { private: true, .. } => Backing::Private,
            Kind::HostRegistered { .. } | Kind::Imported { .. } => Backing::Unknown,
            _ => Backing::Window(self.window().arena(), self.window().offset(address)),
        }
    }

    /// What of the range may have been written, up to the end of the range, or of the memory that it begins in. Words of it are read
    /// through the file that they lie in: a page that is looked at through its mapping is one that unmapping takes out of the process
    /// again, for which the kernel stops all of its threads.
    pub fn written(&self, address: u64, bytes: u64) -> Written<'_> {
        let end = address + bytes;
        let end = self
            .region(address)
            .map_or(end, |region| region.end().min(end));
        let backing = self.backing(address, end - address, false);
        let ranges = extents(&backing, address, end - address)
            .into_iter()
            .filter(|(_, _, written)| *written)
            .map(|(start, length, _)| address + start..address + start + length)
            .collect();
        let read: Option<Reader<'_>> = backing.file().is_some().then(|| {
            Box::new(move |at: u64, to: &mut [u64]| {
                let inside = at >= address && at + size_of_val(to) as u64 <= end; // CAST: a length fits.
                inside && backing.read(at - address, to)
            }) as Reader<'_>
        });
        Written { end, ranges, read }
    }

    /// Copies `bytes` from the host address `from` to the host address `to`, which are those of `from_address` and
    /// `to_address`. `private`: a side that is no memory of the device's, nor known to it, is private memory.
    ///
    /// # Safety
    /// Both host ranges are accessible for all of the bytes; they may overlap.
    pub unsafe fn copy_sparse(
        &self,
        (from_address, from): (u64, *const u8),
        (to_address, to): (u64, *mut u8),
        bytes: u64,
        private: bool,
    ) {
        // CAST: pointers have 64 bits here.
        let apart = (from as u64).abs_diff(to as u64) >= bytes;
        let source = if bytes >= WORTHWHILE && apart {
            self.backing(from_address, bytes, private)
        } else {
            Backing::Unknown
        };
        let found = extents(&source, from_address, bytes);
        if found.iter().all(|(_, _, written)| *written) {
            // SAFETY: inside what the caller vouches for.
            unsafe { std::ptr::copy(from, to, bytes as usize) };
            return;
        }
        // Looked up once for all holes: a page written here and there has as many holes as pages.
        let target = self.backing(to_address, bytes, private);
        let mut taken = extents(&target, to_address, bytes)
            .into_iter()
            .filter(|(_, _, written)| *written)
            .map(|(start, length, _)| start..start + length)
            .peekable();
        for (start, length, written) in found {
            let end = start + length;
            if written {
                // SAFETY: inside what the caller vouches for.
                unsafe {
                    let (from, to) = (from.add(start as usize), to.add(start as usize));
                    if !target.write(start, from, length) {
                        std::ptr::copy(from, to, length as usize);
                    }
                }
                continue;
            }
            while let Some(range) = taken.peek() {
                let (at, upto) = (range.start.max(start), range.end.min(end));
                if at < upto {
                    // SAFETY: as above.
                    unsafe {
                        self.zero(to_address + at, to.add(at as usize), upto - at, private);
                    }
                }
                if range.end > end {
                    break;
                }
                taken.next();
            }
        }
    }

    /// Makes `bytes` at the host address `to`, which is that of `address`, zeros.
    ///
    /// # Safety
    /// The host range is accessible for all of the bytes.
    pub unsafe fn zero(&self, address: u64, to: *mut u8, bytes: u64, private: bool) {
        let inner = address.next_multiple_of(PAGE)..(address + bytes) & !(PAGE - 1);
        let backing = if inner.start + WORTHWHILE <= inner.end {
            self.backing(address, bytes, private)
        } else {
            Backing::Unknown
        };
        let skip = (inner.start.saturating_sub(address)) as usize;
        let emptied = match &backing {
            Backing::Unknown => false,
            _ if self.is_empty(&backing, address, &inner) => true,
            Backing::Private => {
                // SAFETY: whole pages of a private mapping that this library made; they read as zeros afterwards.
                let done = unsafe {
                    libc::madvise(
                        to.add(skip).cast(),
                        (inner.end - inner.start) as usize,
                        libc::MADV_DONTNEED,
                    )
                };
                done == 0
            }
            _ => backing.file().is_some_and(|(fd, offset)| {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                let at = (offset + (inner.start - address)) as i64;
                // SAFETY: a range of a file of ours that belongs to the target.
                unsafe { libc::fallocate(fd, mode, at, (inner.end - inner.start) as i64) == 0 }
            }),
        };
        // SAFETY: inside what the caller vouches for.
        unsafe {
            if emptied {
                to.write_bytes(0, skip);
                let tail = (inner.end - address) as usize;
                to.add(tail).write_bytes(0, bytes as usize - tail);
            } else {
                to.write_bytes(0, bytes as usize);
            }
        }
    }

    fn is_empty(&self, backing: &Backing, address: u64, inner: &Range<u64>) -> bool {
        let part = match backing {
            Backing::File(fd, offset) => {
                Backing::File(fd.clone(), offset + (inner.start - address))
            }
            Backing::Window(fd, offset) => Backing::Window(*fd, offset + (inner.start - address)),
            Backing::Private => Backing::Private,
            Backing::Unknown => return false,
        };
        extents(&part, inner.start, inner.end - inner.start)
            .iter()
            .all(|(_, _, written)| !written)
    }
}

/// The pieces of a range, in order, that were written or not.
fn extents(backing: &Backing, address: u64, bytes: u64) -> Vec<Extent> {
    let found = match backing {
        Backing::Private => private_extents(address, bytes),
        Backing::Unknown => None,
        _ => backing
            .file()
            .and_then(|(fd, offset)| file_extents(fd, offset, bytes)),
    };
    found.unwrap_or_else(|| vec![(0, bytes, true)])
}

/// What the file system knows of a range of a file.
fn file_extents(fd: i32, offset: u64, bytes: u64) -> Option<Vec<Extent>> {
    let end = offset + bytes;
    let seek = |at: u64, whence: i32| {
        // SAFETY: a descriptor of ours; nothing reads or writes at its position.
        let found = unsafe { libc::lseek(fd, at as i64, whence) };
        u64::try_from(found).ok()
    };
    // No data behind it is an error of its own; any other is told apart by the file's end being far off.
    let data_from = |at: u64| match seek(at, libc::SEEK_DATA) {
        Some(data) => Some(data.min(end)),
        None if std::io::Error::last_os_error().raw_os_error() == Some(libc::ENXIO) => Some(end),
        None => None,
    };
    let mut extents = Vec::new();
    let mut at = offset;
    let mut data = data_from(at)?;
    loop {
        if data > at {
            extents.push((at - offset, data - at, false));
        }
        if data >= end {
            return Some(extents);
        }
        // Often a page stands alone; then one question is enough.
        let page_end = ((data / PAGE + 1) * PAGE).min(end);
        at = page_end;
        let mut next = end;
        if page_end < end {
            next = data_from(page_end)?;
            if next == page_end {
                at = seek(page_end, libc::SEEK_HOLE)?.min(end);
                if at <= page_end {
                    return None;
                }
                next = if at < end { data_from(at)? } else { end };
            }
        }
        extents.push((data - offset, at - data, true));
        data = next;
    }
}

/// True when a range is private memory of the process with no file behind it, by the kernel's list: a page of it that is not there
/// reads as zeros. False for short ranges, which are not worth the look.
pub(crate) fn is_private(start: u64, bytes: u64) -> bool {
    if bytes < WORTHWHILE {
        return false;
    }
    let Ok(text) = std::fs::read_to_string("/proc/self/maps") else {
        return false;
    };
    let mut at = start;
    for line in text.lines() {
        // ABI: `from-to rwxp offset device inode path`.
        let mut words = line.split_ascii_whitespace();
        let (Some(range), Some(rights), Some(inode)) = (words.next(), words.next(), words.nth(2))
        else {
            return false;
        };
        let ends = range.split_once('-').and_then(|(from, to)| {
            Some((
                u64::from_str_radix(from, 16).ok()?,
                u64::from_str_radix(to, 16).ok()?,
            ))
        });
        let Some((from, to)) = ends else {
            return false;
        };
        if !(from..to).contains(&at) {
            continue;
        }
        if !rights.ends_with('p') || inode != "0" {
            return false;
        }
        at = to;
        if at >= start + bytes {
            return true;
        }
    }
    false
}

/// Asks for pages of 4 KiB in private memory: one of 2 MiB around a few written bytes would make copies of it as large.
pub(crate) fn small_pages(start: u64, bytes: u64) {
    let (first, end) = (start.next_multiple_of(PAGE), (start + bytes) & !(PAGE - 1));
    if first < end {
        let at = std::ptr::with_exposed_provenance_mut(first as usize);
        // SAFETY: whole pages of a mapping of this process; the advice changes nothing of what they hold, and where the kernel does not
        // take it nothing at all.
        unsafe { libc::madvise(at, (end - first) as usize, libc::MADV_NOHUGEPAGE) };
    }
}

/// What the kernel knows of private pages: those neither present nor swapped were never written, or given back.
fn private_extents(address: u64, bytes: u64) -> Option<Vec<Extent>> {
    static PAGES: OnceLock<Option<File>> = OnceLock::new();
    let pages = PAGES
        .get_or_init(|| File::open("/proc/self/pagemap").ok())
        .as_ref()?;
    /// ABI: bits of an entry of `/proc/PID/pagemap`: the page is present, or swapped.
    const TAKEN: u64 = 1 << 63 | 1 << 62;
    let first = address / PAGE;
    let count = (address + bytes).div_ceil(PAGE) - first;
    let mut words = vec![0_u8; count as usize * 8];
    pages.read_exact_at(&mut words, first * 8).ok()?;
    let mut extents: Vec<Extent> = Vec::new();
    for (page, word) in words.chunks_exact(8).enumerate() {
        let written = u64::from_ne_bytes(word.try_into().ok()?) & TAKEN != 0;
        let start = ((first + page as u64) * PAGE).max(address) - address;
        let end = ((first + page as u64 + 1) * PAGE).min(address + bytes) - address;
        match extents.last_mut() {
            Some((_, length, before)) if *before == written => *length += end - start,
            _ => extents.push((start, end - start, written)),
        }
    }
    Some(extents)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::card::memfd;

    #[test]
    fn extents_tell_the_pages_that_were_written_and_no_others() {
        const PAGES: u64 = 64;
        let mut state = 1u64;
        let mut below = |limit: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % limit
        };
        for round in 0..200 {
            let file = File::from(memfd("extents").expect("a file"));
            file.set_len(PAGES * PAGE).expect("its length");
            let mut written = BTreeSet::new();
            for _ in 0..below(12) {
                let (first, count) = (below(PAGES), 1 + below(4));
                for page in first..(first + count).min(PAGES) {
                    file.write_all_at(&[7], page * PAGE + below(PAGE))
                        .expect("written");
                    written.insert(page);
                }
            }
            let offset = below(PAGES * PAGE);
            let bytes = 1 + below(PAGES * PAGE - offset);
            let found = file_extents(file.as_raw_fd(), offset, bytes).expect("extents");
            let mut at = 0;
            for (start, length, is_written) in found {
                assert!(
                    start == at && length > 0,
                    "round {round}: {start} {length} after {at}"
                );
                at += length;
                for page in (offset + start) / PAGE..(offset + at).div_ceil(PAGE) {
                    assert_eq!(
                        written.contains(&page),
                        is_written,
                        "round {round}: page {page}"
                    );
                }
            }
            assert_eq!(at, bytes, "round {round}");
        }
    }
}
