//! Which parts of a range were ever written, by what the kernel and the device know of its pages.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use super::PAGE;

/// A part of a range: its start in it, its length, and whether it may hold anything but zeros.
pub(super) type Extent = (u64, u64, bool);

/// The extents of `range`, of which `written` is written and the rest is not. Those are in order,
/// and may go beyond it.
pub(super) fn of_written(written: &[Range<u64>], range: &Range<u64>) -> Vec<Extent> {
    let mut extents = Vec::with_capacity(2 * written.len() + 1);
    let mut at = range.start;
    for one in written {
        let (start, end) = (one.start.max(at), one.end.min(range.end));
        if start >= end {
            continue;
        }
        if start > at {
            extents.push((at - range.start, start - at, false));
        }
        extents.push((start - range.start, end - start, true));
        at = end;
    }
    if at < range.end {
        extents.push((at - range.start, range.end - at, false));
    }
    extents
}

/// What the file system knows of a range of a file.
pub(super) fn of_file(fd: i32, offset: u64, bytes: u64) -> Option<Vec<Extent>> {
    let end = offset + bytes;
    let seek = |at: u64, whence: i32| {
        // SAFETY: a descriptor of ours; nothing reads or writes at its position.
        let found = unsafe { libc::lseek(fd, at as i64, whence) };
        u64::try_from(found).ok()
    };
    // No data behind it is an error of its own; any other differs by the file's end being far off.
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

/// What the kernel knows of private pages: those neither present nor swapped were never written, or
/// given back.
pub(super) fn of_private_memory(address: u64, bytes: u64) -> Option<Vec<Extent>> {
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
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::device_state::memfd;
    use crate::random::Random;

    #[test]
    fn extents_tell_the_pages_that_were_written_and_no_others() {
        const PAGES: u64 = 64;
        let mut random = Random::new(1);
        let mut below = |limit: u64| random.below(limit);
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
            let found = of_file(file.as_raw_fd(), offset, bytes).expect("extents");
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
