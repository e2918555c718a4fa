//! Memory that several processes hold, or one holds several times.

use shim_ffi::*;

use super::Thread;
use crate::accounting::held::Held;
use crate::accounting::post::Letter;

impl Thread<'_> {
    /// Exports a handle and imports it again: the same memory, charged once.
    pub(super) fn share(&mut self, handle: CUmemGenericAllocationHandle) {
        let (mut fd, mut again) = (-1i32, CUmemGenericAllocationHandle(0));
        let kind = CUmemAllocationHandleType(1);
        // SAFETY: a valid handle and outputs; the descriptor is ours to close.
        unsafe {
            let exported =
                self.api
                    .cuMemExportToShareableHandle((&raw mut fd).cast(), handle, kind, 0);
            if !self.heard("cuMemExportToShareableHandle", exported.ok()) {
                return;
            }
            let imported = self.api.cuMemImportFromShareableHandle(
                &raw mut again,
                fd as usize as *mut c_void,
                kind,
            );
            libc::close(fd);
            if self.heard("cuMemImportFromShareableHandle", imported.ok()) {
                self.heard("cuMemRelease (imported)", self.api.cuMemRelease(again).ok());
            }
        }
    }

    /// Hands something over to whichever process comes first, or takes what another has handed
    /// over.
    pub(super) fn shared(&mut self) {
        match self.rng.below(4) {
            0 => self.hand_over_physical(),
            1 => self.hand_over_address(),
            _ => self.take_over(),
        }
    }

    pub(super) fn hand_over_physical(&mut self) {
        let physical = |held: &Held| match held {
            Held::Physical {
                handle,
                references: 1..,
                bytes,
                ..
            } => Some((*handle, *bytes)),
            _ => None,
        };
        let Some((handle, bytes)) = self.held.iter().find_map(physical) else {
            return self.physical();
        };
        let mut fd = -1i32;
        // SAFETY: a handle of this thread's own and a valid output; the descriptor is ours to
        // close.
        unsafe {
            let kind = CUmemAllocationHandleType(1);
            let exported =
                self.api
                    .cuMemExportToShareableHandle((&raw mut fd).cast(), handle, kind, 0);
            if self.heard("cuMemExportToShareableHandle", exported.ok()) {
                self.post.put_physical(fd, bytes);
                libc::close(fd);
            }
        }
    }

    pub(super) fn hand_over_address(&mut self) {
        let plain = |held: &Held| match held {
            Held::Plain { at, .. } => Some(*at),
            _ => None,
        };
        let Some(at) = self.held.iter().find_map(plain) else {
            return self.plain();
        };
        let mut handle = CUipcMemHandle::default();
        // SAFETY: an allocation of this thread's own and a valid output.
        let got = unsafe { self.api.cuIpcGetMemHandle(&raw mut handle, at) };
        // Managed memory cannot be shared.
        if got.is_ok() {
            self.post.put_address(&handle);
        }
    }

    pub(super) fn take_over(&mut self) {
        match self.post.take() {
            None => {}
            Some(Letter::Physical { descriptor, bytes }) => {
                let mut handle = CUmemGenericAllocationHandle(0);
                let fd = std::os::fd::AsRawFd::as_raw_fd(&descriptor);
                // SAFETY: a valid output and a descriptor that stays ours.
                let imported = unsafe {
                    self.api.cuMemImportFromShareableHandle(
                        &raw mut handle,
                        fd as usize as *mut c_void,
                        CUmemAllocationHandleType(1),
                    )
                };
                drop(descriptor);
                if self.heard("cuMemImportFromShareableHandle", imported.ok()) {
                    self.keep_imported(handle, bytes);
                }
            }
            Some(Letter::Address(handle)) => {
                let mut at = CUdeviceptr(0);
                // SAFETY: a valid output. The allocation may be gone, its process may be dead or
                // this one.
                let opened = unsafe { self.api.cuIpcOpenMemHandle_v2(&raw mut at, handle, 1) };
                if opened.is_ok() {
                    self.keep(Held::Opened { at });
                }
            }
        }
    }

    /// Keeps an imported handle, mapped or not.
    pub(super) fn keep_imported(&mut self, handle: CUmemGenericAllocationHandle, bytes: u64) {
        let (mut at, mut mapped) = (CUdeviceptr(0), Vec::new());
        // SAFETY: a valid output and a handle of this thread's own.
        unsafe {
            if self.rng.one_in(2) {
                let length = bytes as usize;
                let taken = self
                    .api
                    .cuMemAddressReserve(&raw mut at, length, 0, CUdeviceptr(0), 0);
                if self.heard("cuMemAddressReserve", taken.ok())
                    && self.heard("cuMemMap", self.api.cuMemMap(at, length, 0, handle, 0).ok())
                {
                    mapped.push(at);
                }
            }
        }
        self.keep(Held::Physical {
            handle,
            references: 1,
            mapped,
            bytes,
        });
    }
}
