//! Copies and fills that leave untouched memory untouched.
//!
//! Device memory, handles and page-locked memory take pages of the host when something is written
//! to them; until then they read as zeros. A copy of such a range would give every page of it, and
//! of its target, to zeros. It goes by extents instead: what was never written is made so in the
//! target as well. The result is the same to the byte. So 20 GB of which a program has written a
//! part need that part of the host's memory only, on the device and wherever they are copied to.
//! How long a copy takes is the engines' business, and goes with all of its bytes.

use std::ops::Range;

use super::backing::Backing;
use super::{Memory, PAGE};
use crate::kernels::{Reader, Written};

/// Shorter ranges are not worth asking for.
const WORTHWHILE: u64 = 256 << 10;

impl Memory {
    /// What of the range may have been written, up to the end of the range, or of the memory that
    /// it begins in. Words of it are read through the file that they lie in: a page that is looked
    /// at through its mapping is one that unmapping takes out of the process again, for which the
    /// kernel stops all of its threads.
    pub fn written(&self, address: u64, bytes: u64) -> Written<'_> {
        let end = address + bytes;
        let end = self
            .region(address)
            .map_or(end, |region| region.end().min(end));
        let backing = self.backing(address, end - address, false);
        let ranges = self
            .extents(&backing, address, end - address)
            .into_iter()
            .filter(|(_, _, written)| *written)
            .map(|(start, length, _)| address + start..address + start + length)
            .collect();
        let read: Option<Reader<'_>> = backing.file().is_some().then(|| {
            Box::new(move |at: u64, to: &mut [u64]| {
                // CAST: a length fits.
                let inside = at >= address && at + size_of_val(to) as u64 <= end;
                inside && backing.read(at - address, to)
            }) as Reader<'_>
        });
        Written { end, ranges, read }
    }

    /// Copies `bytes` from the host address `from` to the host address `to`, which are those of
    /// `from_address` and `to_address`. `private`: a side that is no memory of the device's, nor
    /// known to it, is private memory.
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
        let found = self.extents(&source, from_address, bytes);
        if found.iter().all(|(_, _, written)| *written) {
            // SAFETY: inside what the caller vouches for.
            unsafe {
                let is_there = self.mapped_at(to_address).is_none()
                    && matches!(source, Backing::Handle { .. })
                    && source.read_bytes(0, to, bytes);
                if !is_there {
                    self.write_all(from, (to_address, to), bytes);
                }
            }
            return;
        }
        // Looked up once for all holes: a page written here and there has as many holes as pages.
        let target = self.backing(to_address, bytes, private);
        let mut taken = self
            .extents(&target, to_address, bytes)
            .into_iter()
            .filter(|(_, _, written)| *written)
            .map(|(start, length, _)| start..start + length)
            .peekable();
        self.will_write_extents(&target, (to_address, bytes), &found);
        for (start, length, written) in found {
            let end = start + length;
            if written {
                // SAFETY: inside what the caller vouches for.
                unsafe {
                    let (from, to) = (from.add(start as usize), to.add(start as usize));
                    if !target.write(start, from, length) && !source.read_bytes(start, to, length) {
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

    /// Copies all of `bytes` from the host address `from` to the host address `to`, which is that
    /// of `to_address`.
    ///
    /// # Safety
    /// Both host ranges are accessible for all of the bytes; they may overlap.
    pub unsafe fn write_all(&self, from: *const u8, (to_address, to): (u64, *mut u8), bytes: u64) {
        // CAST: pointers have 64 bits here.
        let apart = (from as u64).abs_diff(to as u64) >= bytes;
        let target = self.backing(to_address, bytes, false);
        self.will_write_extents(&target, (to_address, bytes), &[(0, bytes, true)]);
        // A handle's pages are to be taken from the process one day.
        let through_file = apart && matches!(target, Backing::Handle { .. });
        // SAFETY: inside what the caller vouches for.
        let written = through_file && unsafe { target.write(0, from, bytes) };
        if !written {
            // SAFETY: as above.
            unsafe { std::ptr::copy(from, to, bytes as usize) };
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
                // SAFETY: whole pages of a private mapping that this library made; they read as
                // zeros afterwards.
                let done = unsafe {
                    libc::madvise(
                        to.add(skip).cast(),
                        (inner.end - inner.start) as usize,
                        libc::MADV_DONTNEED,
                    )
                };
                done == 0
            }
            _ => Self::punch(&backing, &((inner.start - address)..(inner.end - address))),
        };
        // SAFETY: inside what the caller vouches for.
        unsafe {
            if emptied {
                to.write_bytes(0, skip);
                let end = (inner.end - address) as usize;
                to.add(end).write_bytes(0, bytes as usize - end);
            } else {
                to.write_bytes(0, bytes as usize);
            }
        }
    }

    fn is_empty(&self, backing: &Backing, address: u64, inner: &Range<u64>) -> bool {
        let bytes = inner.end - inner.start;
        self.extents(&backing.from(inner.start - address), inner.start, bytes)
            .iter()
            .all(|(_, _, written)| !written)
    }
}

/// True when a range is private memory of the process with no file behind it, by the kernel's list:
/// a page of it that is not there reads as zeros. False for short ranges, which are not worth the
/// look.
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

/// Asks for pages of 4 KiB in private memory: one of 2 MiB around a few written bytes would make
/// copies of it as large.
pub(crate) fn small_pages(start: u64, bytes: u64) {
    let (first, end) = (start.next_multiple_of(PAGE), (start + bytes) & !(PAGE - 1));
    if first < end {
        let at = std::ptr::with_exposed_provenance_mut(first as usize);
        // SAFETY: whole pages of a mapping of this process; the advice changes nothing of what they
        // hold, and where the kernel does not take it nothing at all.
        unsafe { libc::madvise(at, (end - first) as usize, libc::MADV_NOHUGEPAGE) };
    }
}
