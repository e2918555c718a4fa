//! What a thread holds, and how it gives it back.

use shim_ffi::*;

use crate::api::Api;

/// One thing that takes device memory.
#[derive(Debug)]
pub enum Held {
    /// `cuMemAlloc`, `cuMemAllocPitch`, `cuMemAllocManaged`.
    Plain { at: CUdeviceptr, bytes: u64 },
    /// From a pool.
    Pooled {
        at: CUdeviceptr,
        bytes: u64,
        /// Which of its thread's pools it is from; 0 is the device's.
        pool: u64,
    },
    /// A handle with references and mappings: each reservation is a range of its own.
    Physical {
        handle: CUmemGenericAllocationHandle,
        references: u32,
        mapped: Vec<CUdeviceptr>,
        bytes: u64,
    },
    /// Another process's allocation, charged to that one.
    Opened { at: CUdeviceptr },
    /// An array.
    Array { array: CUarray, bytes: u64 },
    /// A graph with an allocation node, instantiated or not.
    Graph {
        graph: CUgraph,
        exec: CUgraphExec,
        bytes: u64,
    },
    /// A context with allocations in it, which are not freed one by one.
    Context { context: CUcontext, bytes: u64 },
}

impl Held {
    /// Bytes that were asked for.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Plain { bytes, .. }
            | Self::Pooled { bytes, .. }
            | Self::Physical { bytes, .. }
            | Self::Array { bytes, .. }
            | Self::Graph { bytes, .. }
            | Self::Context { bytes, .. } => *bytes,
            Self::Opened { .. } => 0,
        }
    }

    /// Gives it back. `own` is the calling thread's context, `stream` the one that pools are used
    /// in.
    ///
    /// # Errors
    /// What the driver says.
    pub fn give_back(self, api: &Api, own: CUcontext, stream: CUstream) -> Result<(), CUresult> {
        // SAFETY: handles and addresses that the driver gave and that nobody else gives back; work
        // on them is over or ordered in `stream`.
        unsafe {
            match self {
                Self::Plain { at, .. } => api.cuMemFree_v2(at).ok(),
                Self::Pooled { at, .. } => api.cuMemFreeAsync(at, stream).ok(),
                Self::Physical {
                    handle,
                    references,
                    mapped,
                    bytes,
                } => {
                    for _ in 0..references {
                        api.cuMemRelease(handle).ok()?;
                    }
                    for at in mapped {
                        api.cuMemUnmap(at, bytes as usize).ok()?;
                        api.cuMemAddressFree(at, bytes as usize).ok()?;
                    }
                    Ok(())
                }
                Self::Opened { at } => api.cuIpcCloseMemHandle(at).ok(),
                Self::Array { array, .. } => api.cuArrayDestroy(array).ok(),
                Self::Graph { graph, exec, .. } => {
                    if !exec.is_null() {
                        api.cuGraphExecDestroy(exec).ok()?;
                    }
                    api.cuGraphDestroy(graph).ok()
                }
                Self::Context { context, .. } => {
                    api.cuCtxDestroy_v2(context).ok()?;
                    api.cuCtxSetCurrent(own).ok()
                }
            }
        }
    }
}
