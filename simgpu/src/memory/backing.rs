//! Where bytes of device memory, and of the host's that it reaches, lie, and which of them were
//! written.

use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use super::extents::{self, Extent};
use super::known::Known;
use super::{Kind, Memory};

/// Where the bytes of a range lie on the host.
pub(super) enum Backing {
    /// In a sparse file, from an offset on: those of a handle, from an offset on.
    Handle {
        file: Arc<OwnedFd>,
        offset: u64,
        id: u64,
        within: u64,
    },
    /// In one that the window owns.
    Window(i32, u64),
    /// In another process's, from an offset on.
    Imported(Arc<OwnedFd>, u64),
    /// In private pages of this process.
    Private,
    /// Somewhere; all of it counts as written.
    Unknown,
}

impl Backing {
    pub(super) fn file(&self) -> Option<(i32, u64)> {
        match self {
            Self::Handle { file, offset, .. } => Some((file.as_raw_fd(), *offset)),
            Self::Window(fd, offset) => Some((*fd, *offset)),
            Self::Imported(file, offset) => Some((file.as_raw_fd(), *offset)),
            Self::Private | Self::Unknown => None,
        }
    }

    /// Reads words at `start` through the file, where there is one; false: some of them were not
    /// read.
    pub(super) fn read(&self, start: u64, to: &mut [u64]) -> bool {
        // SAFETY: as many bytes as there are, which may be anything.
        unsafe { self.read_bytes(start, to.as_mut_ptr().cast(), size_of_val(to) as u64) }
    }

    /// The same for `length` bytes.
    ///
    /// # Safety
    /// `to` is writable for `length` bytes.
    pub(super) unsafe fn read_bytes(&self, start: u64, to: *mut u8, length: u64) -> bool {
        self.file().is_some_and(|(fd, offset)| {
            let at = (offset + start) as i64;
            // SAFETY: the caller's promise.
            let read = unsafe { libc::pread(fd, to.cast(), length as usize, at) };
            u64::try_from(read) == Ok(length)
        })
    }

    /// Writes `length` bytes at `start` through the file, where there is one; false: some of it was
    /// not written.
    ///
    /// To take pages that were written through their mapping out of a process again, as unmapping
    /// does, the kernel stops all of its threads, once for every 2 MiB.
    ///
    /// # Safety
    /// `from` is readable for `length` bytes.
    pub(super) unsafe fn write(&self, start: u64, from: *const u8, length: u64) -> bool {
        self.file().is_some_and(|(fd, offset)| {
            let at = (offset + start) as i64;
            // SAFETY: the caller's promise; a range of a file of ours.
            let written = unsafe { libc::pwrite(fd, from.cast(), length as usize, at) };
            u64::try_from(written) == Ok(length)
        })
    }

    /// The same without its first bytes, whole pages.
    pub(super) fn from(&self, skipped: u64) -> Self {
        match self {
            Self::Handle {
                file,
                offset,
                id,
                within,
            } => Self::Handle {
                file: file.clone(),
                offset: offset + skipped,
                id: *id,
                within: within + skipped,
            },
            Self::Window(file, offset) => Self::Window(*file, offset + skipped),
            Self::Imported(file, offset) => Self::Imported(file.clone(), offset + skipped),
            Self::Private => Self::Private,
            Self::Unknown => Self::Unknown,
        }
    }
}

impl Memory {
    /// Where the range lies. `private`: what no region of the device's is private memory.
    pub(super) fn backing(&self, address: u64, bytes: u64, private: bool) -> Backing {
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
                Some((file, offset)) => {
                    let within = address - region.start;
                    Backing::Handle {
                        file,
                        offset: offset + within,
                        id: handle,
                        within,
                    }
                }
                None => Backing::Unknown,
            },
            Kind::HostAlloc { .. } | Kind::HostRegistered { private: true, .. } => Backing::Private,
            Kind::HostRegistered { .. } => Backing::Unknown,
            Kind::Imported { file, offset, .. } => {
                Backing::Imported(file, offset + (address - region.start))
            }
            _ => Backing::Window(self.window().arena(), self.window().offset(address)),
        }
    }

    /// The parts of a range, in order, that were written or not.
    pub(super) fn extents(&self, backing: &Backing, address: u64, bytes: u64) -> Vec<Extent> {
        let found = match backing {
            Backing::Private => extents::of_private_memory(address, bytes),
            Backing::Unknown => None,
            Backing::Window(file, offset) => extents::of_file(*file, *offset, bytes),
            Backing::Imported(file, offset) => extents::of_file(file.as_raw_fd(), *offset, bytes),
            Backing::Handle {
                file,
                offset,
                id,
                within,
            } => {
                let asked = *within..within + bytes;
                let known = self
                    .handles
                    .lock()
                    .known(*id)
                    .and_then(|of| of.within(&asked));
                known
                    .map(|written| extents::of_written(&written, &asked))
                    .or_else(|| extents::of_file(file.as_raw_fd(), *offset, bytes))
            }
        };
        found.unwrap_or_else(|| vec![(0, bytes, true)])
    }

    /// Bytes at an address are about to be written through a host address of it.
    pub fn will_write(&self, address: u64, bytes: u64) {
        self.each_handle(address, bytes, |known, part| known.add(&part));
    }

    /// Some of these bytes may be written, nobody knows which.
    pub fn may_write(&self, address: u64, bytes: u64) {
        self.each_handle(address, bytes, |known, _| known.lose());
    }

    /// These extents of a range, for which there is `backing`, are about to be written.
    pub(super) fn will_write_extents(
        &self,
        backing: &Backing,
        (address, bytes): (u64, u64),
        extents: &[Extent],
    ) {
        let Backing::Handle { id, within, .. } = backing else {
            self.will_write(address, bytes);
            return;
        };
        if let Some(known) = self.handles.lock().known(*id) {
            for (start, length, written) in extents {
                if *written {
                    known.add(&(within + start..within + start + length));
                }
            }
        }
    }

    /// What is known of each handle that lies in the range, and the part of it that does.
    fn each_handle(&self, address: u64, bytes: u64, mut body: impl FnMut(&mut Known, Range<u64>)) {
        let end = address.saturating_add(bytes);
        let mut at = address;
        while at < end
            && let Some((id, region)) = self.mapped_at(at)
        {
            let upto = region.end.min(end);
            if let Some(known) = self.handles.lock().known(id) {
                body(known, at - region.start..upto - region.start);
            }
            at = upto;
        }
    }

    /// Takes whole pages from the file, so that they read as zeros; false: that cannot be.
    pub(super) fn punch(backing: &Backing, pages: &Range<u64>) -> bool {
        backing.file().is_some_and(|(file, offset)| {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            let (at, bytes) = (offset + pages.start, pages.end - pages.start);
            // SAFETY: a range of a file of ours, which belongs to the target.
            unsafe { libc::fallocate(file, mode, at as i64, bytes as i64) == 0 }
        })
    }
}
