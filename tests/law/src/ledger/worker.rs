//! A process of the job: threads that take and give back memory of every family.
//!
//! | letter | family |
//! |---|---|
//! | `p` | `cuMemAlloc`, `cuMemAllocPitch` |
//! | `m` | `cuMemAllocManaged` |
//! | `a` | the default pool, with thresholds and trims |
//! | `o` | pools of a thread's own, destroyed with and without memory in use |
//! | `v` | physical handles: several references, several mappings, either gone first; exported and imported |
//! | `s` | handles and addresses of other processes: handed over while their owner keeps them, gives them back, or is killed |
//! | `r` | arrays |
//! | `g` | graphs with allocation nodes: built or captured, launched, trimmed |
//! | `c` | contexts destroyed with memory in them |
//! | `x` | requests beyond the quota |
//!
//! The parent writes a number of operations; each thread does its part; when nothing moves any more, three figures come
//! back: operations, refusals for want of memory, and errors that should not have been.

use std::io::{BufRead, Write};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use shim_ffi::*;

use super::held::Held;
use super::post::{Letter, Post};
use crate::api::Api;
use crate::rng::{Rng, mix};

const GRANULE: usize = 2 << 20;
/// Things that a thread holds at most.
const MOST: usize = 40;
/// Every family.
const ALL: &[u8] = b"ppppppmaaaaoovvsssrrggcx";

#[derive(Default)]
struct Figures {
    ops: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
}

struct Thread<'a> {
    api: Api,
    rng: Rng,
    own: CUcontext,
    stream: CUstream,
    pool: CUmemoryPool,
    /// Counts this thread's pools.
    pools: u64,
    held: Vec<Held>,
    held_bytes: u64,
    cap_bytes: u64,
    families: &'a [u8],
    figures: &'a Figures,
    post: &'a Post,
}

/// Serves the parent until its pipe ends. `words`: seed, threads, MiB that a thread wants, families, the post's two ends.
///
/// # Errors
/// Wrong words, or no driver.
pub fn run(words: &[String]) -> std::io::Result<()> {
    let wrong = || std::io::Error::other(format!("wrong words for a worker: {words:?}"));
    let number = |at: usize| {
        words
            .get(at)
            .and_then(|word| word.parse::<u64>().ok())
            .ok_or_else(wrong)
    };
    let (seed, threads, cap_mib) = (number(0)?, number(1)? as usize, number(2)?);
    let families = words
        .get(3)
        .map(|word| word.as_bytes())
        .filter(|word| !word.is_empty());
    let families = families.unwrap_or(ALL);
    let [to, from] = [4, 5].map(|at| words.get(at).map_or("", String::as_str));
    let post = Post::from_words(to, from)?;
    let (begin, end) = (Barrier::new(threads + 1), Barrier::new(threads + 1));
    let (per_thread, figures) = (AtomicU64::new(0), Figures::default());
    let main = prepare().map_err(std::io::Error::other)?;
    std::thread::scope(|scope| -> std::io::Result<()> {
        for number in 0..threads as u64 {
            let (begin, end, per_thread, figures) = (&begin, &end, &per_thread, &figures);
            let post = &post;
            scope.spawn(move || {
                let Ok(mut thread) =
                    Thread::new(mix(seed ^ number), cap_mib << 20, families, figures, post)
                else {
                    eprintln!("ledger: a thread has no driver");
                    std::process::exit(1);
                };
                loop {
                    begin.wait();
                    let ops = per_thread.load(Relaxed);
                    if ops == 0 {
                        return;
                    }
                    for _ in 0..ops {
                        thread.step();
                    }
                    thread.rest();
                    end.wait();
                }
            });
        }
        let mut line = String::new();
        while std::io::stdin().lock().read_line(&mut line)? > 0 {
            let ops: u64 = line.trim().parse().map_err(|_| wrong())?;
            line.clear();
            per_thread.store(ops.div_ceil(threads as u64).max(1), Relaxed);
            begin.wait();
            end.wait();
            // Nothing is under way: what pools need not keep goes now, and is seen to have gone.
            // SAFETY: a plain call.
            let _ = unsafe { main.cuCtxSynchronize() };
            let take = |figure: &AtomicU64| figure.swap(0, Relaxed);
            let (ops, refused) = (take(&figures.ops), take(&figures.refused));
            writeln!(
                std::io::stdout(),
                "{ops} {refused} {}",
                take(&figures.failed)
            )?;
        }
        per_thread.store(0, Relaxed);
        begin.wait();
        Ok(())
    })
}

/// A driver with the primary context current on the calling thread.
fn prepare() -> Result<Api, String> {
    let api = Api::open()?;
    if !api.preloaded() {
        return Err("this is not a governed process: the preload library is not there".to_owned());
    }
    let mut context = CUcontext::NULL;
    // SAFETY: plain calls with a valid output.
    let ready = unsafe {
        api.cuInit(0)
            .ok()
            .and_then(|()| {
                api.cuDevicePrimaryCtxRetain(&raw mut context, CUdevice(0))
                    .ok()
            })
            .and_then(|()| api.cuCtxSetCurrent(context).ok())
    };
    ready.map_err(|status| format!("no device: {status:?}"))?;
    Ok(api)
}

impl<'a> Thread<'a> {
    fn new(
        seed: u64,
        cap_bytes: u64,
        families: &'a [u8],
        figures: &'a Figures,
        post: &'a Post,
    ) -> Result<Self, String> {
        let api = prepare()?;
        let (mut own, mut stream) = (CUcontext::NULL, CUstream::NULL);
        // SAFETY: valid outputs.
        unsafe {
            let _ = api.cuCtxGetCurrent(&raw mut own);
            let _ = api.cuStreamCreate(&raw mut stream, 1);
        }
        Ok(Self {
            api,
            rng: Rng::new(seed),
            own,
            stream,
            pool: CUmemoryPool::NULL,
            pools: 1,
            held: Vec::new(),
            held_bytes: 0,
            cap_bytes,
            families,
            figures,
            post,
        })
    }

    /// What every operation's result goes through.
    fn heard(&self, what: &str, result: Result<(), CUresult>) -> bool {
        match result {
            Ok(()) => true,
            Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                self.figures.refused.fetch_add(1, Relaxed);
                false
            }
            Err(status) => {
                if self.figures.failed.fetch_add(1, Relaxed) < 3 {
                    eprintln!("ledger: {what}: {status:?}");
                }
                false
            }
        }
    }

    fn keep(&mut self, held: Held) {
        self.held_bytes += held.bytes();
        self.held.push(held);
    }

    fn give_back_one(&mut self) {
        if !self.held.is_empty() {
            let which = self.rng.below(self.held.len());
            self.give_back(which);
        }
    }

    fn give_back(&mut self, which: usize) {
        let held = self.held.swap_remove(which);
        self.held_bytes -= held.bytes();
        let what = format!("giving back {held:?}");
        let result = held.give_back(&self.api, self.own, self.stream);
        self.heard(&what, result);
    }

    fn size(&mut self) -> usize {
        match self.rng.below(16) {
            0..=7 => self.rng.between(1, 64 << 10),
            8..=11 => self.rng.between(64 << 10, 1 << 20),
            12..=14 => self.rng.between(1 << 20, 5 << 20),
            _ => self.rng.between(4 << 20, 20 << 20),
        }
    }

    fn step(&mut self) {
        self.figures.ops.fetch_add(1, Relaxed);
        if self.held.len() >= MOST || self.held_bytes > self.cap_bytes || self.rng.one_in(3) {
            return self.give_back_one();
        }
        match self.rng.pick(self.families) {
            b'p' => self.plain(),
            b'm' => self.managed(),
            b'a' => self.pooled(),
            b'o' => self.own_pool(),
            b'v' => self.physical(),
            b's' => self.shared(),
            b'r' => self.array(),
            b'g' => self.graph(),
            b'c' => self.context(),
            b'x' => self.beyond(),
            _ => self.give_back_one(),
        }
    }

    fn plain(&mut self) {
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

    fn managed(&mut self) {
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

    fn pooled(&mut self) {
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

    fn own_pool(&mut self) {
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

    fn physical(&mut self) {
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

    /// Exports a handle and imports it again: the same memory, charged once.
    fn share(&mut self, handle: CUmemGenericAllocationHandle) {
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

    /// Hands something over to whichever process comes first, or takes what another has handed over.
    fn shared(&mut self) {
        match self.rng.below(4) {
            0 => self.hand_over_physical(),
            1 => self.hand_over_address(),
            _ => self.take_over(),
        }
    }

    fn hand_over_physical(&mut self) {
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
        // SAFETY: a handle of this thread's own and a valid output; the descriptor is ours to close.
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

    fn hand_over_address(&mut self) {
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

    fn take_over(&mut self) {
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
                // SAFETY: a valid output. The allocation may be gone, its process may be dead or this one.
                let opened = unsafe { self.api.cuIpcOpenMemHandle_v2(&raw mut at, handle, 1) };
                if opened.is_ok() {
                    self.keep(Held::Opened { at });
                }
            }
        }
    }

    /// Keeps an imported handle, mapped or not.
    fn keep_imported(&mut self, handle: CUmemGenericAllocationHandle, bytes: u64) {
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

    fn array(&mut self) {
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

    fn graph(&mut self) {
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

    fn built(&mut self, bytes: usize) -> Option<CUgraph> {
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

    fn captured(&mut self, bytes: usize) -> Option<CUgraph> {
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

    fn context(&mut self) {
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
    fn beyond(&mut self) {
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

    /// What is left of a destroyed pool is charged as a whole until it is all given back.
    fn give_back_orphans(&mut self) {
        let pools = self.pools;
        let orphan =
            |held: &Held| matches!(held, Held::Pooled { pool, .. } if (1..pools).contains(pool));
        while let Some(which) = self.held.iter().position(orphan) {
            self.give_back(which);
        }
        // SAFETY: a plain call.
        let waited = unsafe { self.api.cuStreamSynchronize(self.stream) };
        self.heard("cuStreamSynchronize", waited.ok());
    }

    /// The end of a round: some of it goes, and everything submitted is waited for.
    fn rest(&mut self) {
        if self.rng.one_in(4) {
            while !self.held.is_empty() {
                self.give_back_one();
            }
        }
        self.give_back_orphans();
        // SAFETY: a plain call.
        let waited = unsafe { self.api.cuStreamSynchronize(self.stream) };
        self.heard("cuStreamSynchronize", waited.ok());
    }
}
