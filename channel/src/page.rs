//! Sealed shared memory: creating, sealing, checking and mapping a page.

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::layout::{
    ARBITER_MAGIC, ArbiterHalf, CLIENT_MAGIC, ClientHalf, Header, LAYOUT_MAJOR, LAYOUT_MINOR,
    SIGNATURE_MAGIC, SignaturePage, TENANT_MAGIC, TenantPage,
};
use crate::sync::{Acquire, Relaxed, Release};

/// A type that lives in shared memory.
///
/// # Safety
/// The type is `repr(C)`, starts with a [`Header`], consists of atomics and reserved integers only
/// (so that every byte pattern is valid and concurrent access by another process is no data race),
/// and holds no pointer.
pub unsafe trait Page {
    /// Name for `/proc/PID/maps`.
    const NAME: &'static str;
    /// Its magic number.
    const MAGIC: u64;
    /// Bytes from its start that are there from the beginning; its maker provides the rest before
    /// somebody touches it.
    const PREALLOCATED: usize;
    /// Bytes of the shortest page of this major version. What lies beyond is touched only where the
    /// page's own minor version has it.
    const LEAST_BYTES: usize;
    /// Its header.
    fn header(&self) -> &Header;
}

// SAFETY: `layout` defines it of atomics and reserved integers, `repr(C)`, header first.
unsafe impl Page for ArbiterHalf {
    const NAME: &'static str = "sublet-arbiter-half";
    const MAGIC: u64 = ARBITER_MAGIC;
    const PREALLOCATED: usize = size_of::<Self>();
    const LEAST_BYTES: usize = size_of::<Self>();
    fn header(&self) -> &Header {
        &self.header
    }
}

// SAFETY: as above.
unsafe impl Page for ClientHalf {
    const NAME: &'static str = "sublet-client-half";
    const MAGIC: u64 = CLIENT_MAGIC;
    const PREALLOCATED: usize = size_of::<Self>();
    const LEAST_BYTES: usize = std::mem::offset_of!(ClientHalf, weights);
    fn header(&self) -> &Header {
        &self.header
    }
}

// SAFETY: as above.
unsafe impl Page for TenantPage {
    const NAME: &'static str = "sublet-tenant";
    const MAGIC: u64 = TENANT_MAGIC;
    const PREALLOCATED: usize = std::mem::offset_of!(TenantPage, slots);
    const LEAST_BYTES: usize = size_of::<Self>();
    fn header(&self) -> &Header {
        &self.header
    }
}

// SAFETY: as above.
unsafe impl Page for SignaturePage {
    const NAME: &'static str = "sublet-signatures";
    const MAGIC: u64 = SIGNATURE_MAGIC;
    const PREALLOCATED: usize = size_of::<Self>();
    const LEAST_BYTES: usize = size_of::<Self>();
    fn header(&self) -> &Header {
        &self.header
    }
}

/// Why a page handed to us is not one.
#[derive(Debug)]
pub enum PageError {
    /// A system call failed.
    Io(&'static str, io::Error),
    /// The file is smaller than the page.
    Size {
        /// Bytes in the file.
        found: u64,
        /// Bytes that the page has.
        needed: u64,
    },
    /// The file could still shrink under us.
    NotSealed,
    /// The readiness word is not stored yet.
    NotReady,
    /// Not that kind of page.
    Magic(u64),
    /// Laid out by an incompatible version.
    Layout {
        /// Major version found.
        major: u32,
        /// Minor version found.
        minor: u32,
    },
}

impl fmt::Display for PageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(what, _) => write!(f, "cannot {what} a shared page"),
            Self::Size { found, needed } => {
                write!(f, "shared page has {found} bytes, {needed} needed")
            }
            Self::NotSealed => write!(f, "shared page is not sealed against shrinking"),
            Self::NotReady => write!(f, "shared page is not ready"),
            Self::Magic(magic) => write!(f, "shared page has magic {magic:#018x}"),
            Self::Layout { major, minor } => write!(
                f,
                "shared page has layout {major}.{minor}, this side speaks {LAYOUT_MAJOR}.{LAYOUT_MINOR}: \
                 run the same version of sublet on both sides"
            ),
        }
    }
}

impl std::error::Error for PageError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(_, source) => Some(source),
            _ => None,
        }
    }
}

fn io_error(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> PageError {
    move |errno| PageError::Io(what, errno.into())
}

/// Who may write to a page that we create.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Writers {
    /// Only the mapping made here, before the seal.
    OnlyUs,
    /// Everybody who holds the descriptor.
    Holders,
}

/// A mapped page. Unmapped when dropped.
pub struct Mapped<T: Page> {
    at: NonNull<T>,
    writable: bool,
    marker: PhantomData<T>,
}

// SAFETY: `Page` types are atomics, made to be used from everywhere.
unsafe impl<T: Page> Send for Mapped<T> {}
// SAFETY: as above.
unsafe impl<T: Page> Sync for Mapped<T> {}

impl<T: Page> fmt::Debug for Mapped<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(T::NAME)
            .field("at", &self.at)
            .field("writable", &self.writable)
            .finish()
    }
}

/// Backs a part of a page with memory; what is there already stays.
pub(crate) fn allocate(fd: &OwnedFd, from: usize, bytes: usize) -> Result<(), PageError> {
    let flags = rustix::fs::FallocateFlags::empty();
    // A signal may come while a page is made.
    rustix::io::retry_on_intr(|| rustix::fs::fallocate(fd, flags, from as u64, bytes as u64))
        .map_err(io_error("allocate"))
}

impl<T: Page> Mapped<T> {
    /// Creates, preallocates, maps and seals a page. Call [`Mapped::publish`] once its fields are
    /// set.
    pub fn create(writers: Writers) -> Result<(Self, OwnedFd), PageError> {
        let fd = rustix::fs::memfd_create(T::NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(io_error("create"))?;
        let bytes = size_of::<T>() as u64;
        rustix::fs::ftruncate(&fd, bytes).map_err(io_error("size"))?;
        // Preallocated: a full tmpfs must be an error here and not a SIGBUS in somebody's training
        // job.
        allocate(&fd, 0, T::PREALLOCATED)?;
        let mapped = Self::map(fd.as_fd(), size_of::<T>(), true)?;
        let mut seals = SealFlags::SHRINK | SealFlags::GROW;
        if writers == Writers::OnlyUs {
            seals |= SealFlags::FUTURE_WRITE;
        }
        rustix::fs::fcntl_add_seals(&fd, seals | SealFlags::SEAL).map_err(io_error("seal"))?;
        mapped.header().magic.store(T::MAGIC, Relaxed);
        Ok((mapped, fd))
    }

    /// Declares the page ready: stores the readiness word, last.
    pub fn publish(&self) {
        // SYNC(ready): pairs with the Acquire load in `check`.
        self.header().ready.store(
            (u64::from(LAYOUT_MAJOR) << 32) | u64::from(LAYOUT_MINOR),
            Release,
        );
    }

    /// Maps a page that the other side made, after checking that it cannot shrink and is what it
    /// says.
    pub fn open(fd: BorrowedFd<'_>, writable: bool) -> Result<Self, PageError> {
        let found = rustix::fs::fstat(fd).map_err(io_error("stat"))?.st_size;
        let (found, needed) = (u64::try_from(found).unwrap_or(0), T::LEAST_BYTES as u64);
        if found < needed {
            return Err(PageError::Size { found, needed });
        }
        let seals = rustix::fs::fcntl_get_seals(fd).map_err(io_error("read the seals of"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(PageError::NotSealed);
        }
        // CAST: an address space holds it.
        let there = found.min(size_of::<T>() as u64) as usize;
        let mapped = Self::map(fd, there, writable)?;
        mapped.check()?;
        Ok(mapped)
    }

    /// Maps the first `there` bytes of a file, and zeroes of our own behind them: the page's maker
    /// may be of an earlier minor version, or lie about it.
    fn map(fd: BorrowedFd<'_>, there: usize, writable: bool) -> Result<Self, PageError> {
        let protection = if writable {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        let (bytes, flags) = (size_of::<T>(), MapFlags::PRIVATE);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let at =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags) }
                .map_err(io_error("map"))?;
        // SAFETY: over the beginning of what was just mapped, which nobody knows yet; of a file
        // that has as many bytes and cannot shrink.
        let mapped = unsafe {
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            rustix::mm::mmap(at, there, protection, flags, fd, 0)
        };
        if let Err(errno) = mapped {
            // SAFETY: exactly what was just mapped.
            let _ = unsafe { rustix::mm::munmap(at, bytes) };
            return Err(io_error("map")(errno));
        }
        let at = NonNull::new(at.cast()).ok_or(PageError::NotReady)?;
        Ok(Self {
            at,
            writable,
            marker: PhantomData,
        })
    }

    fn check(&self) -> Result<(), PageError> {
        // SYNC(ready): pairs with the Release store in `publish`.
        let ready = self.header().ready.load(Acquire);
        if ready == 0 {
            return Err(PageError::NotReady);
        }
        let magic = self.header().magic.load(Relaxed);
        if magic != T::MAGIC {
            return Err(PageError::Magic(magic));
        }
        // CAST: the halves of the word.
        let (major, minor) = ((ready >> 32) as u32, ready as u32);
        if major != LAYOUT_MAJOR {
            return Err(PageError::Layout { major, minor });
        }
        Ok(())
    }

    /// Leaks the mapping: for pages that threads may be looking at until the process ends.
    pub fn leak(self) -> &'static T {
        let at = self.at;
        std::mem::forget(self);
        // SAFETY: the mapping is never taken down again, and `Page` allows concurrent access.
        unsafe { at.as_ref() }
    }
}

impl<T: Page> std::ops::Deref for Mapped<T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: mapped with `size_of::<T>()` bytes, of a file that cannot shrink and of our own,
        // page-aligned, until drop; `Page` makes every byte pattern valid. A read-only mapping is
        // only ever read: its writers are on the other side.
        unsafe { self.at.as_ref() }
    }
}

impl<T: Page> Drop for Mapped<T> {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `map`; nobody can hold a reference beyond the owner's
        // life.
        let _ = unsafe { rustix::mm::munmap(self.at.as_ptr().cast(), size_of::<T>()) };
    }
}
