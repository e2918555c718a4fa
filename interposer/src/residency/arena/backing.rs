//! Physical memory behind an arena's addresses: pieces that come and go.

use shim_ffi::*;

use super::Arena;
use crate::client;
use crate::memory::Meter;
use crate::residency::piece::{self, GRANULE, Mapping, Piece, Place};
use crate::residency::{engine, host, lanes};

impl Arena {
    /// Takes addresses and puts physical memory behind them, a piece for each of `parts`; all or nothing.
    pub(super) fn back(
        &self,
        meter: &Meter,
        parts: &[u64],
        on_device: bool,
    ) -> Result<(u64, Vec<u64>), CUresult> {
        let bytes: u64 = parts.iter().sum();
        if !on_device && !host_has_room(bytes) {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let start = self
            .inner()
            .space
            .take(bytes + GRANULE)
            .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?;
        let properties = piece::on_device(self.ordinal);
        let access = lanes::readers_of(self.ordinal);
        let mut made: Vec<(u64, Piece)> = Vec::new();
        let mut address = start;
        let outcome = piece::quietly(|| {
            for bytes in parts {
                let mappings = vec![Mapping {
                    address,
                    access: access.clone(),
                }];
                let (handle, place) = if on_device {
                    (
                        piece::bring(*bytes, &properties, &mappings)?,
                        Place::Resident,
                    )
                } else {
                    (
                        engine::bring_on_host(self.ordinal, *bytes, &mappings)?,
                        Place::Host,
                    )
                };
                let piece = Piece {
                    bytes: *bytes,
                    device: self.device,
                    ordinal: self.ordinal,
                    context: self.context,
                    properties,
                    handle,
                    place,
                    mappings,
                    shadow: None,
                    used: 0,
                    stays: false,
                    retained: 0,
                    references: 0,
                    of_arena: true,
                    sync_memops: false,
                };
                made.push((address, piece));
                address += bytes;
            }
            Ok(())
        });
        if let Err(status) = outcome {
            piece::quietly(|| {
                for (_, piece) in &made {
                    let _ = piece::dismiss(piece.handle, piece.bytes, &piece.mappings);
                }
            });
            self.inner().space.insert(start, bytes + GRANULE);
            return Err(status);
        }
        let device = meter.device();
        let ids = piece::with(|pieces| {
            let ids = made
                .into_iter()
                .map(|(_, piece)| pieces.add(piece))
                .collect();
            pieces.publish(device);
            ids
        });
        Ok((start, ids))
    }

    /// Gives the kept empty chunk back; false where there is none.
    pub(super) fn drop_spare(&self, meter: &Meter) -> bool {
        let gone = {
            let mut inner = self.inner();
            let spare = inner.spare.take();
            spare.and_then(|start| inner.take_chunk(start))
        };
        let Some((start, chunk)) = gone else {
            return false;
        };
        let bytes = self.dispose(start, chunk.bytes, &[chunk.piece]);
        meter.release(bytes);
        true
    }

    /// Unmaps and releases pieces that lie one after the other from `start` on; bytes that are charged no longer.
    pub(super) fn dispose(&self, start: u64, bytes: u64, ids: &[u64]) -> u64 {
        let gone: Vec<Piece> =
            piece::with(|pieces| ids.iter().filter_map(|id| pieces.all.remove(id)).collect());
        let mut clean = true;
        piece::quietly(|| {
            for piece in &gone {
                if piece.place != Place::Out {
                    clean &= piece::dismiss(piece.handle, piece.bytes, &piece.mappings).is_ok();
                }
            }
        });
        let freed = gone.iter().map(|piece| piece.bytes).sum();
        drop(gone);
        piece::with(|pieces| pieces.publish(self.device));
        // Addresses behind which something may still be mapped are given to nobody again.
        if clean {
            self.inner().space.insert(start, bytes + GRANULE);
        }
        freed
    }
}

/// Whether the host budget, and the host, have room for `bytes` more.
fn host_has_room(bytes: u64) -> bool {
    let _errno = crate::errno::Preserve::new();
    host::check(bytes).is_ok()
        && client::current().is_some_and(|attached| {
            let held = piece::with(|pieces| pieces.host_bytes());
            held.saturating_add(bytes) <= attached.end.arbiter.host_budget_bytes()
        })
}
