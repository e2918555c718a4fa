//! What ends: an allocation that is freed, an arena whose context has gone.

use std::sync::atomic::Ordering;

use shim_ffi::*;

use super::{Arena, arenas, aside, at};
use crate::driver::real;
use crate::ground::process;
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
        aside::allowed()?;
        let before = self.inner().asides;
        // As the driver's own: nothing that was submitted before may still use it when somebody
        // else is given the place.
        let idle = self.synchronize()?;
        let _pass = quiesce::pass_to_end()?;
        let (gone, end) = {
            let mut inner = self.inner();
            let block = inner.blocks.get(&address);
            let end = block.map(|block| address.saturating_add(block.bytes));
            match idle {
                true => (inner.remove(address).flatten(), end),
                false => {
                    inner.put_aside(address);
                    (None, end)
                }
            }
        };
        // None: another thread was faster.
        let end = end.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        groups::forget(address, end);
        if let Some((start, bytes, chunks)) = gone {
            self.let_go(start, bytes, &chunks);
        }
        if idle {
            self.give_back(before);
        }
        Ok(())
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
        let aside = inner.aside.iter().map(|aside| &aside.block);
        let of_blocks = inner
            .blocks
            .values()
            .chain(aside)
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
