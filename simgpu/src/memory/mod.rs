//! Memory of this process on the simulated devices: which addresses mean what, and the bytes behind
//! them.
//!
//! One interval map knows every device allocation, mapping and pinned host range; kernels and
//! copies translate through it. Capacity is the device_state's business ([`crate::device_state`]):
//! memory is charged there in granules of 2 MiB, and small allocations share them, as on real
//! devices.

mod backing;
pub mod bound;
mod extents;
pub mod ipc;
mod known;
pub mod pool;
pub mod ranges;
pub mod sparse;
pub mod vmm;
pub mod window;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::lock::RwLock;
use shim_ffi::{CUmemoryPool, CUresult};

use crate::device_state::{DeviceState, Holding};
use ranges::Ranges;
use window::{GRANULE, Window};

/// Bytes of a page of the host's.
const PAGE: u64 = 4096;
/// Every allocation starts at a multiple of this.
pub const ALIGNMENT: u64 = 512;
/// Allocations up to this size share granules.
const SMALL_LIMIT: u64 = GRANULE / 2;

type Result<T> = std::result::Result<T, CUresult>;

/// What an address range is.
#[derive(Debug, Clone)]
pub enum Kind {
    /// `cuMemAlloc`, with its own granules.
    Large,
    /// `cuMemAlloc`, inside a shared granule.
    Small,
    /// `cuMemAllocManaged`.
    Managed,
    /// Memory of a stream-ordered pool.
    Pool(CUmemoryPool),
    /// The same, with its free in some stream.
    PoolFreeing(CUmemoryPool),
    /// Memory of a graph's allocation node, inside a pool.
    Graph(CUmemoryPool),
    /// A mapping of a VMM handle: handle id, devices with read (1) or read-write (3) access (-1 is
    /// the host), and whether the handle's memory is the host's.
    Mapping {
        handle: u64,
        access: Vec<(i32, u32)>,
        on_host: bool,
    },
    /// Opened from another process: of its file, from an offset on; memory of a pool is given back
    /// as such.
    Imported {
        handle: Vec<u8>,
        opens: u32,
        file: Arc<OwnedFd>,
        offset: u64,
        of_pool: bool,
    },
    /// Page-locked host memory of ours, with its flags.
    HostAlloc { flags: u32 },
    /// The program's own host memory, registered, with its flags; and whether it is private memory
    /// without a file behind it.
    HostRegistered { flags: u32, private: bool },
    /// A module's global variable.
    Global,
    /// An array's elements.
    Array,
}

/// A live range.
#[derive(Debug, Clone)]
pub struct Region {
    /// First address.
    pub start: u64,
    /// Bytes that the program asked for.
    pub bytes: u64,
    /// Bytes taken from the address space.
    pub span: u64,
    /// Ordinal of the device; for host memory the device of the context that made it.
    pub device: usize,
    /// Context that made it.
    pub context: u64,
    /// Unique in the process (`CU_POINTER_ATTRIBUTE_BUFFER_ID`).
    pub id: u64,
    /// What it is.
    pub kind: Kind,
    /// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`.
    pub sync_memops: bool,
}

impl Region {
    fn end(&self) -> u64 {
        self.start + self.bytes
    }

    /// True for memory that lies in host RAM for good.
    pub fn is_host(&self) -> bool {
        matches!(
            self.kind,
            Kind::HostAlloc { .. } | Kind::HostRegistered { .. }
        )
    }

    /// True for memory that the host follows at the device's addresses.
    pub fn is_seen_by_the_host(&self) -> bool {
        self.is_over_the_link() || matches!(self.kind, Kind::Managed)
    }

    /// True for memory that the device reaches over its link: page-locked host memory, and handles
    /// whose location is the host.
    pub fn is_over_the_link(&self) -> bool {
        self.is_host() || matches!(self.kind, Kind::Mapping { on_host: true, .. })
    }
}

#[derive(Default)]
struct Inner {
    regions: BTreeMap<u64, Region>,
    /// Free device addresses, in granules.
    space: Ranges,
    /// Free parts of shared granules, per device.
    small: Vec<Ranges>,
    /// Live allocations in each shared granule.
    small_live: BTreeMap<u64, u32>,
    /// Reserved address ranges (`cuMemAddressReserve`).
    reserved: BTreeMap<u64, u64>,
    /// Devices whose kernels may touch another device's plain memory: (toucher, owner).
    peers: BTreeSet<(usize, usize)>,
}

/// This process's memory.
pub struct Memory {
    window: Window,
    inner: RwLock<Inner>,
    next_id: AtomicU64,
    bound: bound::Bound,
    /// VMM handles.
    pub(crate) handles: crate::lock::Mutex<vmm::Handles>,
}

impl Memory {
    /// An empty address space. `headroom`: bytes of the host's memory that are left to it, `None`
    /// for a part of it.
    ///
    /// # Errors
    /// The kernel's, when no address space can be had.
    pub fn new(device_state: &Arc<DeviceState>, headroom: Option<u64>) -> std::io::Result<Self> {
        let devices = device_state.profile().devices;
        let window = Window::new()?;
        let mut space = Ranges::default();
        // Address 0 of the window stays unused: an off-by-one below the first allocation must not
        // be valid.
        space.insert(window.base() + GRANULE, window.bytes() - 2 * GRANULE);
        Ok(Self {
            window,
            inner: RwLock::new(Inner {
                space,
                small: (0..devices).map(|_| Ranges::default()).collect(),
                ..Inner::default()
            }),
            next_id: AtomicU64::new(1),
            bound: bound::Bound::new(device_state.clone(), headroom),
            handles: crate::lock::Mutex::new(vmm::Handles::default()),
        })
    }

    /// The address window.
    pub fn window(&self) -> &Window {
        &self.window
    }

    fn id(&self) -> u64 {
        self.next_id.fetch_add(1, Relaxed)
    }

    /// Allocates device memory.
    ///
    /// # Errors
    /// `INVALID_VALUE` for zero bytes, `OUT_OF_MEMORY` beyond the device or the address space.
    pub fn alloc(
        &self,
        device_state: &DeviceState,
        device: usize,
        context: u64,
        bytes: u64,
        kind: Kind,
    ) -> Result<u64> {
        if bytes == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        if bytes > device_state.profile().usable_bytes() {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let small =
            bytes <= SMALL_LIMIT && matches!(kind, Kind::Large | Kind::Small | Kind::Global);
        let span = bytes.next_multiple_of(if small { ALIGNMENT } else { GRANULE });
        if matches!(kind, Kind::Managed) {
            self.may_give(span)?;
        }
        let mut inner = self.inner.write();
        let start = if small {
            self.take_small(&mut inner, device_state, device, span)?
        } else {
            if !device_state.reserve(device, span) {
                return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
            }
            match inner.space.take(span, GRANULE) {
                Some(start) => start,
                None => {
                    device_state.release(device, span);
                    return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
                }
            }
        };
        let kind = match kind {
            Kind::Large if small => Kind::Small,
            kind => kind,
        };
        if matches!(kind, Kind::Managed) && self.window.share_with_host(start, span).is_err() {
            inner.space.insert(start, span);
            device_state.release(device, span);
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let region = Region {
            start,
            bytes,
            span,
            device,
            context,
            id: self.id(),
            kind,
            sync_memops: false,
        };
        inner.regions.insert(start, region);
        Ok(start)
    }

    fn take_small(
        &self,
        inner: &mut Inner,
        device_state: &DeviceState,
        device: usize,
        span: u64,
    ) -> Result<u64> {
        let start = match inner.small[device].take(span, ALIGNMENT) {
            Some(start) => start,
            None => {
                if !device_state.reserve(device, GRANULE) {
                    return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
                }
                let Some(granule) = inner.space.take(GRANULE, GRANULE) else {
                    device_state.release(device, GRANULE);
                    return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
                };
                inner.small[device].insert(granule, GRANULE);
                inner.small[device]
                    .take(span, ALIGNMENT)
                    .ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?
            }
        };
        for granule in self.granules_of(start, span) {
            *inner.small_live.entry(granule).or_default() += 1;
        }
        Ok(start)
    }

    /// Frees what [`Memory::alloc`] gave.
    ///
    /// # Errors
    /// `INVALID_VALUE` when no such allocation starts at `address`.
    pub fn free(&self, device_state: &DeviceState, address: u64) -> Result<Region> {
        let mut inner = self.inner.write();
        let freeable = inner.regions.get(&address).is_some_and(|region| {
            matches!(
                region.kind,
                Kind::Large
                    | Kind::Small
                    | Kind::Managed
                    | Kind::Global
                    | Kind::Array
                    | Kind::Pool(_)
                    | Kind::PoolFreeing(_)
                    | Kind::Graph(_)
            )
        });
        if !freeable {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let region = inner
            .regions
            .remove(&address)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        match region.kind {
            // The pool keeps the bytes.
            Kind::Pool(_) | Kind::PoolFreeing(_) | Kind::Graph(_) => {}
            Kind::Small | Kind::Global if region.bytes <= SMALL_LIMIT => {
                self.give_small(&mut inner, device_state, &region)
            }
            _ => {
                if matches!(region.kind, Kind::Managed) {
                    self.window
                        .hide_from_host(region.start, region.span)
                        .map_err(|_| CUresult::CUDA_ERROR_UNKNOWN)?;
                }
                self.window.punch(region.start, region.span);
                inner.space.insert(region.start, region.span);
                device_state.release(region.device, region.span);
            }
        }
        Ok(region)
    }

    fn give_small(&self, inner: &mut Inner, device_state: &DeviceState, region: &Region) {
        inner.small[region.device].insert(region.start, region.span);
        for granule in self.granules_of(region.start, region.span) {
            let live = inner.small_live.entry(granule).or_default();
            *live = live.saturating_sub(1);
            if *live == 0 {
                inner.small_live.remove(&granule);
                if inner.small[region.device].take_at(granule, GRANULE) {
                    self.window.punch(granule, GRANULE);
                    inner.space.insert(granule, GRANULE);
                    device_state.release(region.device, GRANULE);
                }
            }
        }
    }

    /// The granules that a range lies in: a small allocation may lie in two neighbours.
    fn granules_of(&self, start: u64, span: u64) -> impl Iterator<Item = u64> + use<> {
        let (first, last) = (
            granule_of(&self.window, start),
            granule_of(&self.window, start + span - 1),
        );
        (first..=last).step_by(GRANULE as usize)
    }

    /// Frees everything that a context made, mappings of VMM handles excepted, which survive it.
    pub fn free_context(&self, device_state: &DeviceState, context: u64) {
        let addresses: Vec<u64> = self
            .inner
            .read()
            .regions
            .values()
            .filter(|region| {
                region.context == context
                    && !matches!(
                        region.kind,
                        Kind::Mapping { .. }
                            | Kind::Pool(_)
                            | Kind::PoolFreeing(_)
                            | Kind::Graph(_)
                    )
            })
            .map(|region| region.start)
            .collect();
        for address in addresses {
            let kind = self.region(address).map(|region| region.kind);
            match kind {
                Some(Kind::HostAlloc { .. }) => drop(self.free_host(device_state, address)),
                Some(Kind::HostRegistered { .. }) => {
                    let _ = self.unregister_host(device_state, address);
                }
                Some(Kind::Imported { .. }) => drop(self.close_import(address)),
                Some(_) => drop(self.free(device_state, address)),
                None => {}
            }
        }
    }

    /// Takes page-locked host memory.
    ///
    /// # Errors
    /// `INVALID_VALUE` for zero bytes, `OUT_OF_MEMORY` when the host has not as much.
    pub fn alloc_host(
        &self,
        device_state: &DeviceState,
        device: usize,
        context: u64,
        bytes: u64,
        flags: u32,
    ) -> Result<u64> {
        if bytes == 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let span = bytes.next_multiple_of(PAGE);
        self.may_give(span)?;
        // SAFETY: a fresh anonymous mapping.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                span as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        }
        let kind = Kind::HostAlloc { flags };
        let start = address as u64;
        let region = Region {
            start,
            bytes,
            span,
            device,
            context,
            id: self.id(),
            kind,
            sync_memops: false,
        };
        self.inner.write().regions.insert(start, region);
        device_state.hold(Holding::Pinned, span, true);
        Ok(start)
    }

    /// Frees page-locked host memory.
    ///
    /// # Errors
    /// `INVALID_VALUE` for anything else.
    pub fn free_host(&self, device_state: &DeviceState, address: u64) -> Result<()> {
        let mut inner = self.inner.write();
        match inner.regions.get(&address) {
            Some(Region {
                kind: Kind::HostAlloc { .. },
                span,
                ..
            }) => {
                // SAFETY: the mapping that `alloc_host` made; its region goes with it.
                unsafe { libc::munmap(address as *mut libc::c_void, *span as usize) };
                device_state.hold(Holding::Pinned, *span, false);
                inner.regions.remove(&address);
                Ok(())
            }
            _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// Registers the program's own host memory.
    ///
    /// # Errors
    /// `INVALID_VALUE`, or `HOST_MEMORY_ALREADY_REGISTERED` where the range touches a known one.
    pub fn register_host(
        &self,
        device_state: &DeviceState,
        device: usize,
        context: u64,
        start: u64,
        bytes: u64,
        flags: u32,
    ) -> Result<()> {
        let end = start.checked_add(bytes).filter(|_| bytes > 0 && start != 0);
        let end = end.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        if self.window.contains(start) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        self.may_give(bytes)?;
        let private = sparse::is_private(start, bytes);
        if private {
            sparse::small_pages(start, bytes);
        }
        let mut inner = self.inner.write();
        if inner
            .regions
            .range(..end)
            .next_back()
            .is_some_and(|(_, region)| region.end() > start)
        {
            return Err(CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        }
        let kind = Kind::HostRegistered { flags, private };
        let region = Region {
            start,
            bytes,
            span: bytes,
            device,
            context,
            id: self.id(),
            kind,
            sync_memops: false,
        };
        inner.regions.insert(start, region);
        device_state.hold(Holding::Pinned, bytes, true);
        Ok(())
    }

    /// Forgets a registered range.
    ///
    /// # Errors
    /// `HOST_MEMORY_NOT_REGISTERED`.
    pub fn unregister_host(&self, device_state: &DeviceState, address: u64) -> Result<()> {
        let mut inner = self.inner.write();
        match inner.regions.get(&address) {
            Some(Region {
                kind: Kind::HostRegistered { .. },
                span,
                ..
            }) => {
                device_state.hold(Holding::Pinned, *span, false);
                inner.regions.remove(&address);
                Ok(())
            }
            _ => Err(CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED),
        }
    }

    /// Marks a pool's block as freed in some stream's order; false when it is already.
    pub fn begin_free(&self, address: u64) -> bool {
        let mut first = false;
        self.update(address, |region| {
            if let Kind::Pool(pool) = region.kind {
                region.kind = Kind::PoolFreeing(pool);
                first = true;
            }
        });
        first
    }

    /// Makes a pool's block a graph's: the program's frees no longer end it.
    pub fn own_by_graph(&self, address: u64) {
        self.update(address, |region| {
            if let Kind::Pool(pool) = region.kind {
                region.kind = Kind::Graph(pool);
            }
        });
    }

    /// Makes a graph's block the program's, which ends it by freeing it.
    pub fn own_by_program(&self, address: u64) {
        self.update(address, |region| {
            if let Kind::Graph(pool) = region.kind {
                region.kind = Kind::Pool(pool);
            }
        });
    }

    /// The region that contains `address`.
    pub fn region(&self, address: u64) -> Option<Region> {
        let inner = self.inner.read();
        let (_, region) = inner.regions.range(..=address).next_back()?;
        (address < region.end()).then(|| region.clone())
    }

    /// Changes the region that contains `address`.
    pub fn update(&self, address: u64, change: impl FnOnce(&mut Region)) -> bool {
        let mut inner = self.inner.write();
        match inner.regions.range_mut(..=address).next_back() {
            Some((_, region)) if address < region.end() => {
                change(region);
                true
            }
            _ => false,
        }
    }

    /// Live regions for which `wanted` holds.
    pub fn regions(&self, wanted: impl Fn(&Region) -> bool) -> Vec<Region> {
        self.inner
            .read()
            .regions
            .values()
            .filter(|region| wanted(region))
            .cloned()
            .collect()
    }

    /// Lets kernels of one device touch plain memory of another, or no longer.
    pub fn set_peer(&self, toucher: usize, owner: usize, on: bool) {
        let peers = &mut self.inner.write().peers;
        if on {
            peers.insert((toucher, owner));
        } else {
            peers.remove(&(toucher, owner));
        }
    }

    /// Host address of `bytes` at a device-accessible address, if all of them belong to live memory
    /// that `device` may touch.
    pub fn translate(&self, address: u64, bytes: u64, device: Option<usize>) -> Option<*mut u8> {
        let inner = self.inner.read();
        let end = address.checked_add(bytes.max(1))?;
        let mut at = address;
        for (_, region) in inner
            .regions
            .range(..=address)
            .next_back()
            .into_iter()
            .chain(inner.regions.range(address + 1..))
        {
            if !(region.start..region.end()).contains(&at) {
                return None;
            }
            if let Kind::Mapping { access, .. } = &region.kind
                && !access.iter().any(|(of, flags)| {
                    *flags != 0 && device.is_none_or(|device| *of == device as i32)
                })
            {
                return None;
            }
            let plain = matches!(
                region.kind,
                Kind::Large | Kind::Small | Kind::Global | Kind::Array
            );
            if let Some(device) = device
                && plain
                && device != region.device
                && !inner.peers.contains(&(device, region.device))
            {
                return None;
            }
            at = region.end();
            // Only mappings of handles can lie next to each other and be one range to the program.
            if at >= end {
                let host = if self.window.contains(address) {
                    self.window.host(address)
                } else {
                    address as *mut u8
                };
                return Some(host);
            }
            if !matches!(region.kind, Kind::Mapping { .. }) {
                return None;
            }
        }
        None
    }

    /// The handle that is mapped at an address, and from where to where.
    fn mapped_at(&self, address: u64) -> Option<(u64, Range<u64>)> {
        let inner = self.inner.read();
        let (_, region) = inner.regions.range(..=address).next_back()?;
        match region.kind {
            Kind::Mapping { handle, .. } if address < region.end() => {
                Some((handle, region.start..region.end()))
            }
            _ => None,
        }
    }

    /// True for an address that the device reaches over its link to the host.
    pub fn is_over_the_link(&self, address: u64) -> bool {
        let inner = self.inner.read();
        inner
            .regions
            .range(..=address)
            .next_back()
            .is_some_and(|(_, region)| address < region.end() && region.is_over_the_link())
    }

    /// True when the address belongs to the window, whether anything is there or not.
    pub fn is_device_address(&self, address: u64) -> bool {
        self.window.contains(address)
    }
}

fn granule_of(window: &Window, address: u64) -> u64 {
    address - window.offset(address) % GRANULE
}
