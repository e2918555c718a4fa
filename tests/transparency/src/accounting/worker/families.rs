//! Taking memory of each family.

use shim_ffi::*;

use super::{GRANULE, Thread};
use crate::accounting::held::Held;

impl Thread<'_> {
    pub(super) fn plain(&mut self) {
        let (bytes, mut at, mut pitch) = (self.size(), CUdeviceptr(0), 0);
        // SAFETY: valid outputs.
        let (bytes, result) = unsafe {
            if self.rng.one_in(5) {
                let (width, height) = (bytes.min(100_000), self.rng.between(1, 60));
                let result =
                    self.api
                        .cuMemAllocPitch_v2(&raw mut at, &raw mut pitch, width, height, 4);
                (pitch * height, result)
            } else {
                (bytes, self.api.cuMemAlloc_v2(&raw mut at, bytes))
            }
        };
        if self.heard("cuMemAlloc", result.ok()) {
            self.keep(Held::Plain {
                at,
                bytes: bytes as u64,
            });
        }
    }

    pub(super) fn managed(&mut self) {
        let (bytes, mut at) = (self.size(), CUdeviceptr(0));
        // SAFETY: a valid output.
        let result = unsafe { self.api.cuMemAllocManaged(&raw mut at, bytes, 1) };
        if self.heard("cuMemAllocManaged", result.ok()) {
            self.keep(Held::Plain {
                at,
                bytes: bytes as u64,
            });
        }
    }

    pub(super) fn pooled(&mut self) {
        let (bytes, mut at) = (self.size(), CUdeviceptr(0));
        let mut pool = CUmemoryPool::NULL;
        // SAFETY: valid outputs and the default pool.
        unsafe {
            let _ = self
                .api
                .cuDeviceGetDefaultMemPool(&raw mut pool, CUdevice(0));
            if self.rng.one_in(20) {
                let mut keep = self.rng.pick(&[0u64, 8 << 20, u64::MAX]);
                let threshold = CUmemPool_attribute(4);
                let set = self
                    .api
                    .cuMemPoolSetAttribute(pool, threshold, (&raw mut keep).cast());
                self.heard("cuMemPoolSetAttribute", set.ok());
            }
            if self.rng.one_in(30) {
                let keep = self.rng.pick(&[0usize, 16 << 20]);
                let trimmed = self.api.cuMemPoolTrimTo(pool, keep);
                self.heard("cuMemPoolTrimTo", trimmed.ok());
            }
            let result = self.api.cuMemAllocAsync(&raw mut at, bytes, self.stream);
            if self.heard("cuMemAllocAsync", result.ok()) {
                self.keep(Held::Pooled {
                    at,
                    bytes: bytes as u64,
                    pool: 0,
                });
            }
            if self.rng.one_in(8) {
                let waited = self.api.cuStreamSynchronize(self.stream);
                self.heard("cuStreamSynchronize", waited.ok());
            }
        }
    }

    pub(super) fn own_pool(&mut self) {
        let properties = CUmemPoolProps {
            allocType: CUmemAllocationType(1),
            location: CUmemLocation {
                r#type: CUmemLocationType(1),
                id: 0,
            },
            ..CUmemPoolProps::default()
        };
        let (bytes, mut at) = (self.size(), CUdeviceptr(0));
        // SAFETY: valid outputs, and a pool of this thread's own.
        unsafe {
            if self.pool.is_null() {
                let made = self
                    .api
                    .cuMemPoolCreate(&raw mut self.pool, &raw const properties);
                if !self.heard("cuMemPoolCreate", made.ok()) {
                    return;
                }
            }
            let result =
                self.api
                    .cuMemAllocFromPoolAsync(&raw mut at, bytes, self.pool, self.stream);
            if self.heard("cuMemAllocFromPoolAsync", result.ok()) {
                self.keep(Held::Pooled {
                    at,
                    bytes: bytes as u64,
                    pool: self.pools,
                });
            }
            if self.rng.one_in(24) {
                // What is in use lives on.
                let destroyed = self.api.cuMemPoolDestroy(self.pool);
                self.heard("cuMemPoolDestroy", destroyed.ok());
                self.pool = CUmemoryPool::NULL;
                self.pools += 1;
                if !self.rng.one_in(3) {
                    self.give_back_orphans();
                }
            }
        }
    }

    pub(super) fn physical(&mut self) {
        let properties = CUmemAllocationProp {
            r#type: CUmemAllocationType(1),
            requestedHandleTypes: CUmemAllocationHandleType(1),
            location: CUmemLocation {
                r#type: CUmemLocationType(1),
                id: 0,
            },
            ..CUmemAllocationProp::default()
        };
        let bytes = GRANULE * self.rng.between(1, 4);
        let mut handle = CUmemGenericAllocationHandle(0);
        let (mut references, mut mapped) = (1, Vec::new());
        // SAFETY: valid outputs; each handle and range is this thread's own.
        unsafe {
            let made = self
                .api
                .cuMemCreate(&raw mut handle, bytes, &raw const properties, 0);
            if !self.heard("cuMemCreate", made.ok()) {
                return;
            }
            for _ in 0..self.rng.below(3) {
                let mut at = CUdeviceptr(0);
                let taken = self
                    .api
                    .cuMemAddressReserve(&raw mut at, bytes, 0, CUdeviceptr(0), 0);
                if self.heard("cuMemAddressReserve", taken.ok())
                    && self.heard("cuMemMap", self.api.cuMemMap(at, bytes, 0, handle, 0).ok())
                {
                    mapped.push(at);
                }
            }
            if let Some(at) = mapped.first() {
                for _ in 0..self.rng.below(3) {
                    let mut again = CUmemGenericAllocationHandle(0);
                    let retained = self
                        .api
                        .cuMemRetainAllocationHandle(&raw mut again, at.0 as *mut c_void);
                    if self.heard("cuMemRetainAllocationHandle", retained.ok()) {
                        references += 1;
                    }
                }
                if self.rng.one_in(2) {
                    // The mappings alone hold it.
                    for _ in 0..references {
                        self.heard("cuMemRelease", self.api.cuMemRelease(handle).ok());
                    }
                    references = 0;
                }
            } else if self.rng.one_in(3) {
                self.share(handle);
            }
        }
        self.keep(Held::Physical {
            handle,
            references,
            mapped,
            bytes: bytes as u64,
        });
    }

    pub(super) fn array(&mut self) {
        let descriptor = CUDA_ARRAY3D_DESCRIPTOR {
            Width: self.rng.between(1, 2000),
            Height: self.rng.pick(&[0, 1, 64, 700]),
            Depth: self.rng.pick(&[0, 0, 0, 3]),
            Format: CUarray_format(self.rng.pick(&[1, 2, 32])),
            NumChannels: self.rng.pick(&[1, 2, 4]),
            ..CUDA_ARRAY3D_DESCRIPTOR::default()
        };
        if descriptor.Height == 0 && descriptor.Depth != 0 {
            return;
        }
        let mut array = CUarray::NULL;
        // SAFETY: a valid output and descriptor.
        let result = unsafe {
            self.api
                .cuArray3DCreate_v2(&raw mut array, &raw const descriptor)
        };
        if self.heard("cuArray3DCreate", result.ok()) {
            let bytes = descriptor.Width * descriptor.Height.max(1) * descriptor.Depth.max(1);
            self.keep(Held::Array {
                array,
                bytes: bytes as u64,
            });
        }
    }

    pub(super) fn graph(&mut self) {
        let bytes = self.size();
        let Some(graph) = (if self.rng.one_in(2) {
            self.built(bytes)
        } else {
            self.captured(bytes)
        }) else {
            return;
        };
        let mut exec = CUgraphExec::NULL;
        // SAFETY: a graph of this thread's own and valid outputs.
        unsafe {
            if self.rng.one_in(2) {
                let made = self
                    .api
                    .cuGraphInstantiateWithFlags(&raw mut exec, graph, 0);
                if self.heard("cuGraphInstantiate", made.ok()) && self.rng.one_in(2) {
                    let launched = self.api.cuGraphLaunch(exec, self.stream);
                    self.heard("cuGraphLaunch", launched.ok());
                    let waited = self.api.cuStreamSynchronize(self.stream);
                    self.heard("cuStreamSynchronize", waited.ok());
                }
            }
            if self.rng.one_in(6) {
                self.heard(
                    "cuDeviceGraphMemTrim",
                    self.api.cuDeviceGraphMemTrim(CUdevice(0)).ok(),
                );
            }
        }
        self.keep(Held::Graph {
            graph,
            exec,
            bytes: bytes as u64,
        });
    }

    pub(super) fn built(&mut self, bytes: usize) -> Option<CUgraph> {
        let (mut graph, mut node) = (CUgraph::NULL, CUgraphNode::NULL);
        let mut parameters = CUDA_MEM_ALLOC_NODE_PARAMS {
            poolProps: CUmemPoolProps {
                allocType: CUmemAllocationType(1),
                location: CUmemLocation {
                    r#type: CUmemLocationType(1),
                    id: 0,
                },
                ..CUmemPoolProps::default()
            },
            bytesize: bytes,
            ..CUDA_MEM_ALLOC_NODE_PARAMS::default()
        };
        // SAFETY: valid outputs; no dependencies.
        unsafe {
            if !self.heard(
                "cuGraphCreate",
                self.api.cuGraphCreate(&raw mut graph, 0).ok(),
            ) {
                return None;
            }
            let added = self.api.cuGraphAddMemAllocNode(
                &raw mut node,
                graph,
                std::ptr::null(),
                0,
                &raw mut parameters,
            );
            if !self.heard("cuGraphAddMemAllocNode", added.ok()) {
                let _ = self.api.cuGraphDestroy(graph);
                return None;
            }
            let mut last = CUgraphNode::NULL;
            let freed = self.api.cuGraphAddMemFreeNode(
                &raw mut last,
                graph,
                &raw const node,
                1,
                parameters.dptr,
            );
            self.heard("cuGraphAddMemFreeNode", freed.ok());
        }
        Some(graph)
    }

    pub(super) fn captured(&mut self, bytes: usize) -> Option<CUgraph> {
        let (mut graph, mut at) = (CUgraph::NULL, CUdeviceptr(0));
        // SAFETY: this thread's own stream and valid outputs.
        unsafe {
            let relaxed = CUstreamCaptureMode(2);
            let begun = self.api.cuStreamBeginCapture_v2(self.stream, relaxed);
            if !self.heard("cuStreamBeginCapture", begun.ok()) {
                return None;
            }
            let taken = self.api.cuMemAllocAsync(&raw mut at, bytes, self.stream);
            let taken = self.heard("cuMemAllocAsync (captured)", taken.ok());
            if taken {
                let freed = self.api.cuMemFreeAsync(at, self.stream);
                self.heard("cuMemFreeAsync (captured)", freed.ok());
            }
            let ended = self.api.cuStreamEndCapture(self.stream, &raw mut graph);
            if !taken {
                // Refused, so the capture may be whole or not; either way nothing is kept of it.
                if ended.is_ok() && !graph.is_null() {
                    let _ = self.api.cuGraphDestroy(graph);
                }
                return None;
            }
            self.heard("cuStreamEndCapture", ended.ok())
                .then_some(graph)
        }
    }

    pub(super) fn context(&mut self) {
        let mut context = CUcontext::NULL;
        let mut total = 0;
        // SAFETY: valid outputs; the new context becomes current and is replaced again.
        unsafe {
            let made = self.api.cuCtxCreate_v2(&raw mut context, 0, CUdevice(0));
            if !self.heard("cuCtxCreate", made.ok()) {
                return;
            }
            for _ in 0..self.rng.between(1, 4) {
                let (bytes, mut at) = (self.size(), CUdeviceptr(0));
                let result = self.api.cuMemAlloc_v2(&raw mut at, bytes);
                if self.heard("cuMemAlloc (own context)", result.ok()) {
                    total += bytes as u64;
                }
            }
            self.heard("cuCtxSetCurrent", self.api.cuCtxSetCurrent(self.own).ok());
        }
        self.keep(Held::Context {
            context,
            bytes: total,
        });
    }

    /// More than there is: refused, and nothing stays charged.
    pub(super) fn beyond(&mut self) {
        let mut at = CUdeviceptr(0);
        let bytes = 3usize << 30;
        // SAFETY: a valid output.
        let result = unsafe {
            self.api
                .cuMemAlloc_v2(&raw mut at, bytes << self.rng.below(30))
        };
        if self.heard("cuMemAlloc (too much)", result.ok()) {
            self.keep(Held::Plain {
                at,
                bytes: bytes as u64,
            });
        }
    }
}
