//! The device address window and its host alias.
//!
//! Device addresses lie in a reserved range without access: the host that dereferences one faults,
//! as on a real machine. The same bytes are mapped a second time, readable and writable, at a
//! constant distance. Fresh pages cost nothing until they are touched, so a 141 GB device_state
//! works on a small host, and freed ones are punched out.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use crate::device_state::memfd;

/// Page of the simulated device; also the unit in which memory is charged.
pub const GRANULE: u64 = 2 << 20;

/// Two views of the same pages: device addresses and host addresses.
pub struct Window {
    base: u64,
    alias: u64,
    bytes: u64,
    arena: OwnedFd,
}

fn map(
    at: u64,
    bytes: u64,
    protection: i32,
    flags: i32,
    fd: RawFd,
    offset: u64,
) -> io::Result<u64> {
    // SAFETY: callers pass either no address or (with MAP_FIXED) one inside a range that this
    // module reserved.
    let address = unsafe {
        libc::mmap(
            at as *mut libc::c_void,
            bytes as usize,
            protection,
            flags,
            fd,
            offset as libc::off_t,
        )
    };
    if address == libc::MAP_FAILED {
        Err(io::Error::last_os_error())
    } else {
        Ok(address as u64)
    }
}

impl Window {
    /// Reserves the largest window, up to 8 TiB, that the process's limits allow.
    ///
    /// # Errors
    /// The kernel's, when not even 64 GiB of address space can be had.
    pub fn new() -> io::Result<Self> {
        let mut bytes = 8_u64 << 40;
        loop {
            match Self::with_bytes(bytes) {
                Ok(window) => return Ok(window),
                Err(error) if bytes <= 64 << 30 => return Err(error),
                Err(_) => bytes /= 2,
            }
        }
    }

    fn with_bytes(bytes: u64) -> io::Result<Self> {
        let arena = memfd("sublet-simgpu-memory")?;
        // SAFETY: a descriptor of ours; the file is sparse.
        if unsafe { libc::ftruncate(arena.as_raw_fd(), bytes as libc::off_t) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let reserve = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let raw = map(0, bytes + GRANULE, libc::PROT_NONE, reserve, -1, 0)?;
        let base = raw.next_multiple_of(GRANULE);
        let alias = match map(
            0,
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_NORESERVE,
            arena.as_raw_fd(),
            0,
        ) {
            Ok(alias) => alias,
            Err(error) => {
                // SAFETY: the range reserved above, which nobody has seen yet.
                unsafe { libc::munmap(raw as *mut libc::c_void, (bytes + GRANULE) as usize) };
                return Err(error);
            }
        };
        for (address, bytes) in [(raw, bytes + GRANULE), (alias, bytes)] {
            for advice in [libc::MADV_DONTFORK, libc::MADV_DONTDUMP] {
                // SAFETY: our own mappings; a forked child has no device, and a core dump has no
                // use for its memory.
                unsafe { libc::madvise(address as *mut libc::c_void, bytes as usize, advice) };
            }
        }
        Ok(Self {
            base,
            alias,
            bytes,
            arena,
        })
    }

    /// First device address.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Size of the window.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Descriptor of the pages that are not mapped from elsewhere.
    pub fn arena(&self) -> RawFd {
        self.arena.as_raw_fd()
    }

    /// True for device addresses.
    pub fn contains(&self, address: u64) -> bool {
        (self.base..self.base + self.bytes).contains(&address)
    }

    /// Offset of a device address in the arena.
    pub fn offset(&self, address: u64) -> u64 {
        address - self.base
    }

    /// Host address of a device address.
    pub fn host(&self, address: u64) -> *mut u8 {
        (self.alias + self.offset(address)) as *mut u8
    }

    /// Gives the pages of a range back to the host; they read as zero afterwards.
    pub fn punch(&self, address: u64, bytes: u64) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: our own file; a failure only leaves pages in use that the next owner overwrites.
        unsafe {
            libc::fallocate(
                self.arena.as_raw_fd(),
                mode,
                self.offset(address) as i64,
                bytes as i64,
            );
        }
    }

    /// Shows `bytes` of another file at a device address, instead of the arena.
    ///
    /// # Errors
    /// The kernel's.
    pub fn map_foreign(&self, address: u64, bytes: u64, fd: RawFd, offset: u64) -> io::Result<()> {
        self.map_alias(address, bytes, fd, offset)
    }

    /// Shows the arena at a device address again.
    ///
    /// # Errors
    /// The kernel's.
    pub fn map_arena(&self, address: u64, bytes: u64) -> io::Result<()> {
        self.map_alias(address, bytes, self.arena.as_raw_fd(), self.offset(address))
    }

    fn map_alias(&self, address: u64, bytes: u64, fd: RawFd, offset: u64) -> io::Result<()> {
        let at = self.host(address) as u64;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
        map(
            at,
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            fd,
            offset,
        )?;
        // SAFETY: the mapping just made; see `with_bytes`.
        unsafe { libc::madvise(at as *mut libc::c_void, bytes as usize, libc::MADV_DONTFORK) };
        Ok(())
    }

    /// Makes a range of device addresses readable and writable by the host as well (managed
    /// memory).
    ///
    /// # Errors
    /// The kernel's.
    pub fn share_with_host(&self, address: u64, bytes: u64) -> io::Result<()> {
        self.show_file_to_host(address, bytes, self.arena.as_raw_fd(), self.offset(address))
    }

    /// Makes `bytes` of a file readable and writable by the host at device addresses that show it
    /// to the device.
    ///
    /// # Errors
    /// The kernel's.
    pub fn show_file_to_host(
        &self,
        address: u64,
        bytes: u64,
        fd: RawFd,
        offset: u64,
    ) -> io::Result<()> {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        map(address, bytes, rights, flags, fd, offset).map(|_| ())
    }

    /// Takes the host's access to a range of device addresses away again.
    ///
    /// # Errors
    /// The kernel's.
    pub fn hide_from_host(&self, address: u64, bytes: u64) -> io::Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        map(address, bytes, libc::PROT_NONE, flags, -1, 0).map(|_| ())
    }
}
