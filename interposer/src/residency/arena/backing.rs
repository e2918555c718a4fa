//! Physical memory behind an arena's addresses: chunks that come and go.

use shim_ffi::*;

use super::Arena;
use crate::attachment::client;
use crate::metering::Meter;
use crate::residency::chunk::{self, Chunk, GRANULE, Mapping, Place};
use crate::residency::{cap, copy_streams, engine, host};

impl Arena {
    /// Takes addresses and puts physical memory behind them, a chunk for each of `parts`; all or
    /// nothing.
    pub(super) fn back(
        &self,
        meter: &Meter,
        parts: &[u64],
        on_device: bool,
    ) -> Result<(u64, Vec<u64>), CUresult> {
        let bytes: u64 = parts.iter().sum();
        if !on_device && !host_has_space(bytes) {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let start = self
            .inner()
            .space
            .take(bytes + GRANULE)
            .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let properties = chunk::on_device(self.ordinal);
        let access = copy_streams::readers_of(self.ordinal);
        let mut made: Vec<(u64, Chunk)> = Vec::new();
        let mut address = start;
        let outcome = chunk::quietly(|| {
            for bytes in parts {
                let mappings = vec![Mapping {
                    address,
                    access: access.clone(),
                    buffer_id: 0,
                }];
                let (handle, place) = if on_device {
                    (
                        chunk::bring(*bytes, &properties, &mappings)?,
                        Place::Resident,
                    )
                } else {
                    (
                        engine::bring_on_host(self.ordinal, *bytes, &mappings)?,
                        Place::Host,
                    )
                };
                let chunk = Chunk {
                    bytes: *bytes,
                    device: self.device,
                    ordinal: self.ordinal,
                    context: self.context,
                    properties,
                    handle,
                    place,
                    mappings,
                    host_copy: None,
                    used: 0,
                    stays: false,
                    retained: 0,
                    references: 0,
                    of_arena: true,
                    sync_memops: false,
                    block_id: 0,
                };
                made.push((address, chunk));
                address += bytes;
            }
            Ok(())
        });
        if let Err(status) = outcome {
            chunk::quietly(|| {
                for (_, chunk) in &made {
                    let _ = chunk::dismiss(chunk.handle, chunk.bytes, &chunk.mappings);
                }
            });
            self.inner().space.insert(start, bytes + GRANULE);
            return Err(status);
        }
        let device = meter.device();
        let ids = chunk::with(|chunks| {
            let ids = made
                .into_iter()
                .map(|(_, chunk)| chunks.add(chunk))
                .collect();
            chunks.publish(device);
            ids
        });
        Ok((start, ids))
    }

    /// As [`back`](Self::back); where the device's memory is divided, beyond this job's part of it
    /// and where the device is full in host memory, as long as that has space.
    pub(super) fn back_within_cap(
        &self,
        meter: &Meter,
        parts: &[u64],
        on_device: bool,
    ) -> Result<(u64, Vec<u64>), CUresult> {
        let device = meter.device();
        if !on_device || !cap::holds(device) {
            return self.back(meter, parts, on_device);
        }
        if cap::is_reached(device, parts.iter().sum())
            && let Ok(made) = self.back(meter, parts, false)
        {
            return Ok(made);
        }
        match self.back(meter, parts, true) {
            Err(full @ CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                self.back(meter, parts, false).map_err(|_| full)
            }
            made => made,
        }
    }

    /// Gives the kept empty chunk back; false where there is none.
    pub(super) fn drop_spare(&self, meter: &Meter) -> bool {
        let gone = {
            let mut inner = self.inner();
            let spare = inner.spare.take();
            spare.and_then(|start| inner.take_shared(start))
        };
        let Some((start, shared)) = gone else {
            return false;
        };
        let bytes = self.dispose(start, shared.bytes, &[shared.chunk]);
        meter.release(bytes);
        true
    }

    /// Unmaps and releases chunks that lie one after the other from `start` on; bytes that are
    /// charged no longer.
    pub(super) fn dispose(&self, start: u64, bytes: u64, ids: &[u64]) -> u64 {
        let gone: Vec<Chunk> =
            chunk::with(|chunks| ids.iter().filter_map(|id| chunks.all.remove(id)).collect());
        let mut clean = true;
        chunk::quietly(|| {
            for chunk in &gone {
                if chunk.place != Place::Out {
                    clean &= chunk::dismiss(chunk.handle, chunk.bytes, &chunk.mappings).is_ok();
                }
            }
        });
        let freed = gone.iter().map(|chunk| chunk.bytes).sum();
        drop(gone);
        chunk::with(|chunks| chunks.publish(self.device));
        // Addresses behind which something may still be mapped are given to nobody again.
        if clean {
            self.inner().space.insert(start, bytes + GRANULE);
        }
        freed
    }
}

/// Whether the host budget, and the host, have space for `bytes` more.
pub(in crate::residency) fn host_has_space(bytes: u64) -> bool {
    let _errno = crate::ground::errno::Preserve::new();
    host::check(bytes).is_ok()
        && client::current().is_some_and(|attached| {
            let held = chunk::with(|chunks| chunks.host_bytes());
            held.saturating_add(bytes) <= attached.end.arbiter.host_budget_bytes()
        })
}
