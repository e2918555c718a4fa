//! Moving chunks: out of a device, back, and to host memory at the same address. The agent's thread
//! alone comes here, with the quiesce gate closed and nothing under way on the devices.
//!
//! Copies are pipelined (Bai et al., PipeSwitch, OSDI 2020): while the copy engine works on one
//! chunk, the one before is unmapped and released, or the next one created and mapped. A chunk that
//! has left is released at once, so that another tenant's chunk can be created where it was: that
//! is what makes evicting one tenant while restoring another as fast as the slower of both. The
//! restoring side asks again and again for memory that is not there yet.
//!
//! What was used last ([`last_use`]) comes back first and leaves last: a guess at what is used
//! next, and no more. In an eviction that copies only what has changed since the one before it
//! leaves first: a guess at what has changed.

mod back;
mod out;

use channel::Reason;
use shim_ffi::*;

use super::chunk::{self, Mapping, Place};
use super::copy_streams::{Step, Stopped};
use super::host_copy::HostCopy;
use super::last_use;
use crate::driver::real;

pub(super) use back::{
    all_is_back, anything_left, bring_on_host, nothing_left, restore, restore_early, retreat,
};
pub(super) use out::evict;

/// How a move ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    Done,
    /// Nothing has changed.
    Refused(Reason),
    /// Neither carried out nor undone: some of it is still out, its bytes are safe in host memory.
    Failed(Reason, CUresult),
}

/// Chunks of `device` in `place`, what was used least recently first.
pub(super) fn in_place(device: usize, place: Place) -> Vec<u64> {
    last_use::settle();
    let mut found: Vec<(u64, u64)> = chunk::with(|chunks| {
        chunks
            .all
            .iter()
            .filter(|(_, chunk)| chunk.device == device && chunk.place == place && chunk.moves())
            .map(|(id, chunk)| (chunk.used, *id))
            .collect()
    });
    found.sort_unstable();
    found.into_iter().map(|(_, id)| id).collect()
}

/// Bytes of `device` that are in their host copies alone.
pub(super) fn out_bytes(device: usize) -> u64 {
    chunk::with(|chunks| {
        let out = chunks
            .all
            .values()
            .filter(|chunk| chunk.device == device && chunk.place == Place::Out);
        out.map(|chunk| chunk.bytes).sum()
    })
}

/// Whether something is neither on a device nor usable in host memory.
pub(super) fn anything_out() -> bool {
    chunk::with(|chunks| chunks.all.values().any(|chunk| chunk.place == Place::Out))
}

/// Whether something of `device` lies in host memory, usable.
pub(super) fn anything_on_host(device: usize) -> bool {
    chunk::with(|chunks| {
        chunks
            .all
            .values()
            .any(|chunk| chunk.device == device && chunk.place == Place::Host)
    })
}

/// What a move of a chunk needs to know.
pub(super) struct Move {
    pub(super) bytes: u64,
    pub(super) ordinal: i32,
    pub(super) context: usize,
    pub(super) address: u64,
    pub(super) handle: u64,
    pub(super) mappings: Vec<Mapping>,
    pub(super) properties: CUmemAllocationProp,
    /// Copies of it are to wait for their end.
    pub(super) sync_memops: bool,
    /// Its host copy; null: it has none.
    host: *mut c_void,
}

impl Move {
    /// What the driver has forgotten of a mapping that was made anew.
    pub(super) fn tell_again(&self) {
        if self.sync_memops {
            let on: i32 = 1;
            // SAFETY: valid pointer to a local; an address that is mapped.
            let _ = unsafe {
                real::cuPointerSetAttribute(
                    (&raw const on).cast(),
                    CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
                    CUdeviceptr(self.address),
                )
            };
        }
    }
}

/// A chunk as it is now.
pub(super) fn look_at(id: u64) -> Step<Move> {
    let found = chunk::with(|chunks| {
        let chunk = chunks.all.get(&id)?;
        let host_copy = chunk.host_copy.as_ref();
        Some(Move {
            bytes: chunk.bytes,
            ordinal: chunk.ordinal,
            context: chunk.context,
            address: chunk.address(),
            handle: chunk.handle,
            mappings: chunk.mappings.clone(),
            properties: chunk.properties,
            sync_memops: chunk.sync_memops,
            host: host_copy.map_or(std::ptr::null_mut(), HostCopy::pointer),
        })
    });
    found.ok_or(Stopped::by(CUresult::CUDA_ERROR_INVALID_VALUE))
}

/// The same, with a host copy to copy to or from.
fn look(id: u64) -> Step<Move> {
    look_at(id).and_then(|of| {
        if of.host.is_null() {
            Err(Stopped::by(CUresult::CUDA_ERROR_INVALID_VALUE))
        } else {
            Ok(of)
        }
    })
}
