//! Physical memory handles and their mappings (`cuMemCreate`, `cuMemMap`, ...).
//!
//! Rules: sizes are multiples of 2 MiB, a mapping covers its whole handle from offset 0, fresh
//! mappings have no access, unmapping takes whole mappings, and the memory goes when handle
//! references, mappings and exported copies are gone.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use shim_ffi::{CUmemAllocationProp, CUresult};

use super::known::Known;
use super::window::GRANULE;
use super::{Kind, Memory, Region, Result};
use crate::device_state::{DeviceState, Holding, memfd};
use crate::memory::ranges::Ranges;
use crate::registry;

/// Marks the page that follows the memory in an exported file.
const MAGIC: u64 = 0x5355_424c_4554_564d;

/// What `cuMemCreate` made.
pub struct Handle {
    /// Bytes.
    pub bytes: u64,
    /// Device that it is on, none for host memory.
    pub device: Option<usize>,
    /// As asked for.
    pub prop: CUmemAllocationProp,
    references: u32,
    mappings: u32,
    /// Own file, so that it can be exported; else a range of the common one.
    own: Option<Arc<OwnedFd>>,
    offset: u64,
    /// Which of its bytes were written.
    known: Known,
    /// Number of the memory among those that processes share, once it has been exported or
    /// imported.
    shared: Option<u64>,
}

// SAFETY: the only pointer in it (`prop.win32HandleMetaData`) is never followed.
unsafe impl Send for Handle {}

/// All handles of the process.
#[derive(Default)]
pub struct Handles {
    live: BTreeMap<u64, Handle>,
    common: Option<Arc<OwnedFd>>,
    free: Ranges,
}

const COMMON_BYTES: u64 = 4 << 40;
/// The host among those that have access.
const HOST: i32 = -1;

impl Handles {
    fn common(&mut self) -> Result<RawFd> {
        if self.common.is_none() {
            let fd =
                memfd("sublet-simgpu-physical").map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
            // SAFETY: a sparse file of ours.
            if unsafe { libc::ftruncate(fd.as_raw_fd(), COMMON_BYTES as i64) } != 0 {
                return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
            }
            self.free.insert(0, COMMON_BYTES);
            self.common = Some(Arc::new(fd));
        }
        self.common
            .as_ref()
            .map(|fd| fd.as_raw_fd())
            .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
    }

    /// The file that a handle's bytes lie in, and where.
    pub(super) fn file(&self, id: u64) -> Option<(Arc<OwnedFd>, u64)> {
        let handle = self.live.get(&id)?;
        let fd = handle.own.as_ref().or(self.common.as_ref())?;
        Some((fd.clone(), handle.offset))
    }

    /// What is known of a handle's bytes, from its own start on.
    pub(super) fn known(&mut self, id: u64) -> Option<&mut Known> {
        self.live.get_mut(&id).map(|handle| &mut handle.known)
    }

    /// Looks at a live handle.
    ///
    /// # Errors
    /// `INVALID_VALUE` for an unknown one.
    pub fn get(&self, handle: u64) -> Result<&Handle> {
        self.live
            .get(&handle)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    /// Drops the memory when nothing refers to it any more. What is answered is to be emptied then,
    /// without the lock.
    #[must_use]
    fn settle(&mut self, device_state: &DeviceState, handle: u64) -> Option<Spent> {
        let gone = self
            .live
            .get(&handle)
            .is_some_and(|handle| handle.references == 0 && handle.mappings == 0);
        if !gone {
            return None;
        }
        let handle = self.live.remove(&handle)?;
        count(device_state, &handle, false);
        match (handle.device, handle.shared) {
            (Some(device), None) => device_state.release(device, handle.bytes),
            (Some(_), Some(id)) if !self.live.values().any(|one| one.shared == Some(id)) => {
                device_state.unshare(id);
            }
            _ => {}
        }
        let file = self.common.clone().filter(|_| handle.own.is_none())?;
        Some(Spent {
            file,
            offset: handle.offset,
            bytes: handle.bytes,
        })
    }
}

/// A range of the common file that was a handle's, which nobody else gets before it is empty.
struct Spent {
    file: Arc<OwnedFd>,
    offset: u64,
    bytes: u64,
}

impl Spent {
    /// Gives its pages back to the host.
    fn punch(&self) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: a range of our own file that no mapping shows any more.
        unsafe {
            libc::fallocate(
                self.file.as_raw_fd(),
                mode,
                self.offset as i64,
                self.bytes as i64,
            )
        };
    }
}

/// Accounts a handle that comes or goes.
fn count(device_state: &DeviceState, handle: &Handle, more: bool) {
    device_state.hold(Holding::Handles, 1, more);
    if handle.device.is_none() {
        device_state.hold(Holding::HostLocated, handle.bytes, more);
    }
}

impl Memory {
    /// Makes physical memory.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a bad size, `OUT_OF_MEMORY` beyond the device.
    pub fn create_handle(
        &self,
        device_state: &DeviceState,
        device: Option<usize>,
        bytes: u64,
        prop: CUmemAllocationProp,
        exportable: bool,
    ) -> Result<u64> {
        if bytes == 0 || !bytes.is_multiple_of(GRANULE) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        match device {
            Some(device) if !device_state.reserve(device, bytes) => {
                return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
            }
            Some(_) => {}
            None => self.may_give(bytes)?,
        }
        let mut handles = self.handles.lock();
        let made = Self::back(&mut handles, device, bytes, exportable);
        match made {
            Ok((own, offset)) => {
                let id = registry::fresh();
                // The host's own memory and what is exported are written to without our knowledge.
                let by_copies_only = device.is_some() && own.is_none();
                let handle = Handle {
                    bytes,
                    device,
                    prop,
                    references: 1,
                    mappings: 0,
                    known: if by_copies_only {
                        Known::nothing_written()
                    } else {
                        Known::not()
                    },
                    own,
                    offset,
                    shared: None,
                };
                count(device_state, &handle, true);
                handles.live.insert(id, handle);
                Ok(id)
            }
            Err(status) => {
                if let Some(device) = device {
                    device_state.release(device, bytes);
                }
                Err(status)
            }
        }
    }

    fn back(
        handles: &mut Handles,
        device: Option<usize>,
        bytes: u64,
        exportable: bool,
    ) -> Result<(Option<Arc<OwnedFd>>, u64)> {
        if !exportable {
            handles.common()?;
            return Ok((
                None,
                handles
                    .free
                    .take(bytes, GRANULE)
                    .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?,
            ));
        }
        let fd = memfd("sublet-simgpu-shared").map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let file = File::from(fd);
        let mut trailer = [0_u8; 24];
        trailer[..8].copy_from_slice(&MAGIC.to_ne_bytes());
        trailer[8..16].copy_from_slice(&bytes.to_ne_bytes());
        trailer[16..].copy_from_slice(&(device.map_or(-1, |device| device as i64)).to_ne_bytes());
        file.write_all_at(&trailer, bytes)
            .map_err(|_| CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        Ok((Some(Arc::new(OwnedFd::from(file))), 0))
    }

    /// Gives back one reference.
    ///
    /// # Errors
    /// `INVALID_VALUE` without one.
    pub fn release_handle(&self, device_state: &DeviceState, id: u64) -> Result<()> {
        let mut handles = self.handles.lock();
        let handle = handles
            .live
            .get_mut(&id)
            .filter(|handle| handle.references > 0);
        handle.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?.references -= 1;
        let spent = handles.settle(device_state, id);
        drop(handles);
        self.empty(spent);
        Ok(())
    }

    /// Makes a range ready for other handles. To take some hundred pages from the file takes the
    /// host as long as a device takes to unmap a handle; kernels and copies that look for theirs
    /// meanwhile do not wait for it.
    fn empty(&self, spent: Option<Spent>) {
        if let Some(spent) = spent {
            spent.punch();
            self.handles.lock().free.insert(spent.offset, spent.bytes);
        }
    }

    /// The handle mapped at an address, with one more reference.
    ///
    /// # Errors
    /// `INVALID_VALUE` where no handle is mapped.
    pub fn retain_handle(&self, address: u64) -> Result<u64> {
        match self.region(address).map(|region| region.kind) {
            Some(Kind::Mapping { handle, .. }) => {
                let mut handles = self.handles.lock();
                handles
                    .live
                    .get_mut(&handle)
                    .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?
                    .references += 1;
                Ok(handle)
            }
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// Reserves device addresses.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a bad size or alignment, `OUT_OF_MEMORY` when there is no space.
    pub fn reserve_addresses(&self, bytes: u64, align: u64, hint: u64) -> Result<u64> {
        if bytes == 0 || !bytes.is_multiple_of(GRANULE) || !(align == 0 || align.is_power_of_two())
        {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let mut inner = self.inner.write();
        let wanted = hint != 0
            && hint.is_multiple_of(align.max(GRANULE))
            && inner.space.take_at(hint, bytes);
        let start = if wanted {
            hint
        } else {
            inner
                .space
                .take(bytes, align.max(GRANULE))
                .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?
        };
        inner.reserved.insert(start, bytes);
        Ok(start)
    }

    /// Gives a reservation back.
    ///
    /// # Errors
    /// `INVALID_VALUE` unless it is exactly a reservation without mappings.
    pub fn free_addresses(&self, start: u64, bytes: u64) -> Result<()> {
        let mut inner = self.inner.write();
        let mapped = inner
            .regions
            .range(start..start.saturating_add(bytes))
            .next()
            .is_some();
        if inner.reserved.get(&start) != Some(&bytes) || mapped {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        inner.reserved.remove(&start);
        inner.space.insert(start, bytes);
        Ok(())
    }

    /// Maps a whole handle. The mapping has no access.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a bad range, offset or handle, or where something is mapped.
    pub fn map_handle(
        &self,
        context: u64,
        start: u64,
        bytes: u64,
        offset: u64,
        id: u64,
    ) -> Result<()> {
        let mut handles = self.handles.lock();
        let common = handles.common.as_ref().map(|fd| fd.as_raw_fd());
        let handle = handles
            .live
            .get_mut(&id)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let mut inner = self.inner.write();
        let reserved = inner
            .reserved
            .range(..=start)
            .next_back()
            .is_some_and(|(from, len)| {
                start
                    .checked_add(bytes)
                    .is_some_and(|end| end <= from + len)
            });
        let taken = inner
            .regions
            .range(..start.saturating_add(bytes))
            .next_back()
            .is_some_and(|(_, region)| region.start + region.span > start);
        if !reserved
            || taken
            || offset != 0
            || bytes != handle.bytes
            || !start.is_multiple_of(GRANULE)
        {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let fd = handle
            .own
            .as_ref()
            .map(|fd| fd.as_raw_fd())
            .or(common)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        self.window
            .map_foreign(start, bytes, fd, handle.offset)
            .map_err(|_| CUresult::CUDA_ERROR_MAP_FAILED)?;
        handle.mappings += 1;
        let kind = Kind::Mapping {
            handle: id,
            access: Vec::new(),
            on_host: handle.device.is_none(),
        };
        let device = handle.device.unwrap_or(0);
        let region = Region {
            start,
            bytes,
            span: bytes,
            device,
            context,
            id: self.id(),
            kind,
            sync_memops: false,
        };
        inner.regions.insert(start, region);
        Ok(())
    }

    /// Whole mappings that make up a range.
    fn whole_mappings(&self, start: u64, bytes: u64) -> Result<Vec<(u64, u64, u64)>> {
        let inner = self.inner.read();
        let end = start
            .checked_add(bytes)
            .filter(|_| bytes > 0)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let mut at = start;
        let mut found = Vec::new();
        while at < end {
            match inner.regions.get(&at) {
                Some(Region {
                    kind: Kind::Mapping { handle, .. },
                    span,
                    ..
                }) if at + span <= end => {
                    found.push((at, *span, *handle));
                    at += span;
                }
                _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
            }
        }
        Ok(found)
    }

    /// Unmaps a range made of whole mappings, and returns how many they were.
    ///
    /// # Errors
    /// `INVALID_VALUE` for anything else.
    pub fn unmap_handles(&self, device_state: &DeviceState, start: u64, bytes: u64) -> Result<u64> {
        let mappings = self.whole_mappings(start, bytes)?;
        let count = mappings.len() as u64;
        for (at, span, id) in mappings {
            let shown = self.region(at).is_some_and(|region| {
                matches!(&region.kind, Kind::Mapping { access, on_host: true, .. }
                    if access.iter().any(|(of, flags)| *of == HOST && *flags != 0))
            });
            // Before anything is locked: the kernel stops the threads of the process for it, and
            // those that go on then want the lock. Nobody can map anything else here before the
            // region is gone.
            let hidden = if shown {
                self.window.hide_from_host(at, span)
            } else {
                Ok(())
            };
            hidden
                .and_then(|()| self.window.map_arena(at, span))
                .map_err(|_| CUresult::CUDA_ERROR_UNMAP_FAILED)?;
            let mut handles = self.handles.lock();
            self.inner.write().regions.remove(&at);
            if let Some(handle) = handles.live.get_mut(&id) {
                handle.mappings = handle.mappings.saturating_sub(1);
            }
            let spent = handles.settle(device_state, id);
            drop(handles);
            self.empty(spent);
        }
        Ok(count)
    }

    /// Sets a device's access (0, 1: read, 3: read and write; device -1 is the host) to a range
    /// made of whole mappings, and returns how many they are.
    ///
    /// # Errors
    /// `INVALID_VALUE` for anything else.
    pub fn set_access(&self, start: u64, bytes: u64, device: i32, flags: u32) -> Result<u64> {
        let mappings = self.whole_mappings(start, bytes)?;
        for (at, span, id) in &mappings {
            if device == HOST {
                self.show_to_host(*at, *span, *id, flags != 0)?;
            }
            self.update(*at, |region| {
                if let Kind::Mapping { access, .. } = &mut region.kind {
                    access.retain(|(of, _)| *of != device);
                    access.push((device, flags));
                }
            });
        }
        Ok(mappings.len() as u64)
    }

    /// Lets the host follow the device addresses of memory that is the host's, or no longer. Other
    /// memory it cannot.
    fn show_to_host(&self, start: u64, bytes: u64, id: u64, on: bool) -> Result<()> {
        let file = {
            let handles = self.handles.lock();
            if handles.get(id)?.device.is_some() {
                return Ok(());
            }
            handles.file(id)
        };
        let (fd, offset) = file.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let done = if on {
            self.window
                .show_file_to_host(start, bytes, fd.as_raw_fd(), offset)
        } else {
            self.window.hide_from_host(start, bytes)
        };
        done.map_err(|_| CUresult::CUDA_ERROR_MAP_FAILED)
    }

    /// A device's access to a mapped address.
    ///
    /// # Errors
    /// `INVALID_VALUE` where no handle is mapped.
    pub fn access(&self, address: u64, device: i32) -> Result<u32> {
        match self.region(address).map(|region| region.kind) {
            Some(Kind::Mapping { access, .. }) => Ok(access
                .iter()
                .find(|(of, _)| *of == device)
                .map_or(0, |(_, flags)| *flags)),
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// A descriptor that stands for the memory, for another process to import.
    ///
    /// # Errors
    /// `INVALID_VALUE` unless it was made to be exported.
    pub fn export_handle(&self, device_state: &DeviceState, id: u64) -> Result<RawFd> {
        let mut handles = self.handles.lock();
        let handle = handles
            .live
            .get_mut(&id)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let own = handle
            .own
            .as_ref()
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: duplicates a live descriptor; the copy is the program's.
        let copy = unsafe { libc::fcntl(own.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 0) };
        if copy < 0 {
            return Err(CUresult::CUDA_ERROR_OPERATING_SYSTEM);
        }
        if let (Some(device), None) = (handle.device, handle.shared)
            && let Some(number) = shared_number(own.as_raw_fd())
            && device_state.share_own(device, number, handle.bytes)
        {
            handle.shared = Some(number);
        }
        Ok(copy)
    }

    /// A descriptor of the pages behind a range, as another device's driver takes it
    /// (`cuMemGetHandleForAddressRange`). The pages are meant and not the address: it goes on to
    /// stand for them when others are mapped there.
    ///
    /// # Errors
    /// `INVALID_VALUE` for anything but whole pages of one mapping, `NOT_SUPPORTED` for memory that
    /// was not made to be exported: a part of the common file has no descriptor of its own.
    pub fn range_descriptor(&self, address: u64, bytes: u64) -> Result<RawFd> {
        let (id, range) = self
            .mapped_at(address)
            .filter(|_| bytes > 0 && address.is_multiple_of(super::PAGE))
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        if !bytes.is_multiple_of(super::PAGE) || bytes > range.end - address {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let handles = self.handles.lock();
        let own = handles.get(id)?.own.as_ref();
        let own = own.ok_or(CUresult::CUDA_ERROR_NOT_SUPPORTED)?;
        // SAFETY: duplicates a live descriptor; the copy is the program's.
        match unsafe { libc::fcntl(own.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 0) } {
            copy if copy < 0 => Err(CUresult::CUDA_ERROR_OPERATING_SYSTEM),
            copy => Ok(copy),
        }
    }

    /// A handle for memory that another process exported. The descriptor stays the caller's.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a descriptor that stands for no such memory, `OUT_OF_MEMORY` where
    /// nobody has had it any more and something else has taken its place on the device.
    pub fn import_handle(
        &self,
        device_state: &DeviceState,
        fd: RawFd,
        devices: usize,
        ordinal: impl Fn(usize) -> i32,
    ) -> Result<u64> {
        use std::os::fd::FromRawFd;
        // SAFETY: duplicating fails cleanly for a number that is no descriptor.
        let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
        if copy < 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the copy just made, which nobody else has.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(copy) });
        let length = file
            .metadata()
            .map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?
            .len();
        let mut trailer = [0_u8; 24];
        let bytes = length
            .checked_sub(24)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        file.read_exact_at(&mut trailer, bytes)
            .map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| trailer[at + byte]));
        let device = usize::try_from(word(16) as i64).ok();
        if word(0) != MAGIC || word(8) != bytes || device.is_some_and(|device| device >= devices) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let id = registry::fresh();
        let mut prop = CUmemAllocationProp::default();
        prop.r#type.0 = 1;
        prop.requestedHandleTypes.0 = 1;
        prop.location.r#type.0 = if device.is_some() { 1 } else { 2 };
        prop.location.id = device.map_or(0, ordinal);
        let own = Arc::new(OwnedFd::from(file));
        let number = shared_number(own.as_raw_fd()).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let mut handles = self.handles.lock();
        if let Some(device) = device
            && !handles.live.values().any(|one| one.shared == Some(number))
            && !device_state.share(device, number, bytes)
        {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let handle = Handle {
            bytes,
            device,
            prop,
            references: 1,
            mappings: 0,
            own: Some(own),
            offset: 0,
            known: Known::not(),
            shared: Some(number),
        };
        count(device_state, &handle, true);
        handles.live.insert(id, handle);
        Ok(id)
    }
}

/// What a memory file is known by in all processes: its inode.
fn shared_number(fd: RawFd) -> Option<u64> {
    let mut status = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: a descriptor of ours and space for the answer.
    if unsafe { libc::fstat(fd, status.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: filled in by the call that has succeeded.
    let status = unsafe { status.assume_init() };
    // Inode numbers are small; the device keeps file systems apart.
    Some((status.st_ino ^ status.st_dev.rotate_left(40)).max(1))
}
