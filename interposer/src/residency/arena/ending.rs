//! What ends: an allocation that is freed, an arena whose context has gone.

use std::sync::atomic::Ordering;

use shim_ffi::*;

use super::{Arena, arenas, at};
use crate::attachment::client;
use crate::driver::real;
use crate::gate;
use crate::gate::context;
use crate::ground::process;
use crate::ground::thread::thread;
use crate::metering::Meter;
use crate::residency::{copy_streams, groups, quiesce};

/// `cuMemFree` of an address of an arena; `None`: it is none.
pub(crate) fn free(address: u64) -> Option<CUresult> {
    if !crate::residency::active() {
        return None;
    }
    let arena = at(address)?;
    Some(arena.free(address).err().unwrap_or_default())
}

impl Arena {
    fn free(&self, address: u64) -> Result<(), CUresult> {
        if !self.inner().blocks.contains_key(&address) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if process::exiting() {
            return Ok(());
        }
        // As the driver's own: nothing that was submitted before may still use it when somebody
        // else is given the place.
        self.synchronize()?;
        let _pass = quiesce::pass_to_end()?;
        let (outcome, end) = {
            let mut inner = self.inner();
            let block = inner.blocks.get(&address);
            let end = block.map_or(address, |block| address.saturating_add(block.bytes));
            (inner.remove(address), end)
        };
        groups::forget(address, end);
        match outcome {
            None => Err(CUresult::CUDA_ERROR_INVALID_VALUE), // another thread was faster
            Some(None) => Ok(()),
            Some(Some((start, bytes, chunks))) => {
                let freed = self.dispose(start, bytes, &chunks);
                if let Some(meter) = Meter::on(self.device) {
                    meter.release(freed);
                }
                Ok(())
            }
        }
    }

    /// Waits for the context, as a free does.
    fn synchronize(&self) -> Result<(), CUresult> {
        let thread = thread();
        gate::before_sync();
        if let Some(attached) = client::current() {
            context::refresh(thread, attached);
        }
        let same = thread.context.get() == self.context || thread.context.get() == 0;
        // SAFETY: the context is alive: it has memory of which the program knows. Put back on the
        // same thread.
        let result = unsafe {
            if same {
                real::cuCtxSynchronize()
            } else {
                let context = CUcontext(std::ptr::with_exposed_provenance_mut(self.context));
                let pushed = real::cuCtxPushCurrent_v2(context);
                if !pushed.is_ok() {
                    return Err(pushed);
                }
                let result = real::cuCtxSynchronize();
                let mut popped = CUcontext::NULL;
                let _ = real::cuCtxPopCurrent_v2(&raw mut popped);
                result
            }
        };
        if result.is_ok() { Ok(()) } else { Err(result) }
    }
}

/// After a context has gone: everything in its arena is gone, as with plain memory. Inside the
/// quiesce gate.
pub(crate) fn context_died(context: usize) {
    if !crate::residency::active() {
        return;
    }
    // First, for what was pinned in it: what goes with the arena is not to be unpinned once more.
    copy_streams::context_died(context);
    for arena in arenas().filter(|arena| arena.context == context) {
        if arena.dead.swap(true, Ordering::AcqRel) {
            continue;
        }
        let inner = std::mem::take(&mut *arena.inner());
        groups::forget(arena.base, arena.base.saturating_add(arena.bytes));
        let of_shared = inner.shared.values().map(|shared| shared.chunk);
        let of_blocks = inner
            .blocks
            .values()
            .flat_map(|block| block.chunks.iter().copied());
        let ids: Vec<u64> = of_shared.chain(of_blocks).collect();
        let freed = arena.dispose(arena.base, 0, &ids);
        if let Some(meter) = Meter::on(arena.device) {
            meter.release(freed);
        }
        // SAFETY: the arena's own reservation, with nothing mapped in it any more; the driver
        // refuses otherwise.
        let _ = unsafe { real::cuMemAddressFree(CUdeviceptr(arena.base), arena.bytes as usize) };
    }
}
