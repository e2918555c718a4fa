//! Sharing plain allocations between processes (`cuIpcGetMemHandle`).
//!
//! A handle names the exporting process and where in its memory file the bytes lie; the importer
//! opens that file through /proc, which needs the same user. The bytes stay charged to the
//! exporter.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use shim_ffi::CUresult;

use super::window::GRANULE;
use super::{Kind, Memory, PAGE, Region, Result};

const MAGIC: u64 = 0x5355_424c_4950_4331;

/// The 64 bytes that programs pass on.
pub type Handle = [u8; 64];

struct Parts {
    pid: u64,
    fd: u64,
    offset: u64,
    bytes: u64,
    device: u64,
    id: u64,
}

impl Parts {
    fn encode(&self) -> Handle {
        let mut handle = [0; 64];
        let words = [
            MAGIC,
            self.pid,
            self.fd,
            self.offset,
            self.bytes,
            self.device,
            self.id,
        ];
        for (at, word) in words.iter().enumerate() {
            handle[at * 8..at * 8 + 8].copy_from_slice(&word.to_ne_bytes());
        }
        handle
    }

    fn decode(handle: &Handle) -> Option<Self> {
        let word =
            |at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| handle[at * 8 + byte]));
        (word(0) == MAGIC).then(|| Self {
            pid: word(1),
            fd: word(2),
            offset: word(3),
            bytes: word(4),
            device: word(5),
            id: word(6),
        })
    }
}

impl Memory {
    /// A handle for the allocation that contains `address`.
    ///
    /// # Errors
    /// `INVALID_VALUE` for anything but plain device memory.
    pub fn share(&self, address: u64) -> Result<Handle> {
        let region = self
            .region(address)
            .filter(|region| matches!(region.kind, Kind::Large | Kind::Small));
        let region = region.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        Ok(self.parts(&region).encode())
    }

    /// The same for memory of a pool, which its caller knows may be shared.
    ///
    /// # Errors
    /// `INVALID_VALUE` for anything but memory of a pool.
    pub fn share_of_pool(&self, address: u64) -> Result<Handle> {
        let region = self
            .region(address)
            .filter(|region| region.start == address && matches!(region.kind, Kind::Pool(_)));
        let region = region.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        Ok(self.parts(&region).encode())
    }

    fn parts(&self, region: &Region) -> Parts {
        Parts {
            pid: u64::from(std::process::id()),
            fd: self.window.arena() as u64,
            offset: self.window.offset(region.start),
            bytes: region.bytes,
            device: region.device as u64,
            id: region.id,
        }
    }

    /// Maps the memory of another process; opening it again gives the same address.
    ///
    /// # Errors
    /// `INVALID_VALUE` for what is no handle, `INVALID_CONTEXT` for one of this process,
    /// `MAP_FAILED` when the other process cannot be reached.
    pub fn open_import(
        &self,
        context: u64,
        devices: usize,
        handle: &Handle,
        of_pool: bool,
    ) -> Result<u64> {
        let parts = Parts::decode(handle).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        if parts.pid == u64::from(std::process::id()) {
            return Err(CUresult::CUDA_ERROR_INVALID_CONTEXT);
        }
        let device = usize::try_from(parts.device)
            .ok()
            .filter(|device| *device < devices);
        let device = device.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let mut inner = self.inner.write();
        let known = inner
            .regions
            .values_mut()
            .find_map(|region| match &mut region.kind {
                Kind::Imported {
                    handle: known,
                    opens,
                    ..
                } if known[..] == handle[..] => {
                    *opens += 1;
                    Some(region.start)
                }
                _ => None,
            });
        if let Some(start) = known {
            return Ok(start);
        }
        let failed = |_| CUresult::CUDA_ERROR_MAP_FAILED;
        let path = format!("/proc/{}/fd/{}", parts.pid, parts.fd);
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(failed)?;
        let page_offset = parts.offset % PAGE;
        let span = (page_offset + parts.bytes).next_multiple_of(GRANULE);
        let base = inner
            .space
            .take(span, GRANULE)
            .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let shown = (page_offset + parts.bytes).next_multiple_of(PAGE);
        if self
            .window
            .map_foreign(base, shown, file.as_raw_fd(), parts.offset - page_offset)
            .is_err()
        {
            inner.space.insert(base, span);
            return Err(CUresult::CUDA_ERROR_MAP_FAILED);
        }
        let start = base + page_offset;
        let kind = Kind::Imported {
            handle: handle.to_vec(),
            opens: 1,
            file: Arc::new(file.into()),
            offset: parts.offset,
            of_pool,
        };
        let region = Region {
            start,
            bytes: parts.bytes,
            span: span - page_offset,
            device,
            context,
            id: parts.id,
            kind,
            sync_memops: false,
        };
        inner.regions.insert(start, region);
        Ok(start)
    }

    /// Gives one opening back; the last one unmaps.
    ///
    /// # Errors
    /// `INVALID_VALUE` for an address that was not opened.
    pub fn close_import(&self, address: u64) -> Result<()> {
        let mut inner = self.inner.write();
        let Some(Region {
            kind: Kind::Imported { opens, .. },
            ..
        }) = inner.regions.get_mut(&address)
        else {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        };
        *opens -= 1;
        if *opens > 0 {
            return Ok(());
        }
        if let Some(region) = inner.regions.remove(&address) {
            let page_offset = region.start % PAGE;
            let (base, span) = (region.start - page_offset, region.span + page_offset);
            self.window
                .map_arena(base, span)
                .map_err(|_| CUresult::CUDA_ERROR_UNMAP_FAILED)?;
            inner.space.insert(base, span);
        }
        Ok(())
    }
}
