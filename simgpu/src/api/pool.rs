//! Stream-ordered allocation and memory pools.

use std::ffi::{c_int, c_void};
use std::os::fd::{FromRawFd as _, IntoRawFd as _};
use std::sync::Arc;

use shim_ffi::{
    CUdevice, CUdeviceptr, CUmemAccessDesc, CUmemLocation, CUmemPoolProps, CUmemPoolPtrExportData,
    CUmemoryPool, CUresult, CUstream,
};

use super::Done;
use crate::context::current;
use crate::driver::{Driver, driver};
use crate::entry::{In, Out, api};
use crate::exec::work::Work;
use crate::memory::Kind;
use crate::memory::pool::{Pool, Sharing};
use crate::stream::{Default, Stream};

const LOCATION_DEVICE: u32 = 1;
const POSIX_FD: u32 = 1;
const REUSE_FIRST: u32 = 1;
const REUSE_LAST: u32 = 3;
const RELEASE_THRESHOLD: u32 = 4;
const RESERVED_CURRENT: u32 = 5;
const RESERVED_HIGH: u32 = 6;
const USED_CURRENT: u32 = 7;
const USED_HIGH: u32 = 8;

fn handle(pool: &Pool) -> CUmemoryPool {
    CUmemoryPool(pool.id as *mut c_void)
}

fn find(pool: CUmemoryPool) -> Result<(&'static Driver, Arc<Pool>), CUresult> {
    let driver = driver()?;
    Ok((
        driver,
        driver
            .pools
            .get(pool.0 as u64)
            .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?,
    ))
}

fn alloc(
    to: Out<CUdeviceptr>,
    bytes: usize,
    pool: Option<CUmemoryPool>,
    stream: CUstream,
    default: Default,
) -> Done {
    let (driver, context, stream) = Stream::of(stream, default)?;
    to.check()?;
    let pool = match pool {
        Some(pool) => find(pool)?.1,
        None => driver.device_pools[context.device].1.lock().clone(),
    };
    if stream.is_capturing() {
        return stream
            .capture_alloc(driver, bytes as u64)
            .and_then(|address| to.put(CUdeviceptr(address)));
    }
    driver.faults.allocation()?;
    let allocate = || {
        pool.alloc(
            &driver.memory,
            &driver.device_state,
            context.id,
            bytes as u64,
        )
    };
    let address = match allocate() {
        Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY) if bytes > 0 => {
            // What streams are about to free may be enough.
            driver
                .engine
                .wait_streams(|other| other.device == pool.device);
            driver
                .pools
                .all(|_| true)
                .iter()
                .for_each(|other| other.synchronised(&driver.memory, &driver.device_state));
            allocate()?
        }
        other => other?,
    };
    to.put(CUdeviceptr(address))
}

fn free(address: CUdeviceptr, stream: CUstream, default: Default) -> Done {
    let (driver, _, stream) = Stream::of(stream, default)?;
    if address.0 == 0 {
        return Ok(());
    }
    let region = driver
        .memory
        .region(address.0)
        .filter(|region| region.start == address.0);
    let region = region.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    if stream.is_capturing() {
        return stream.submit(driver, Work::PoolFree { address: address.0 });
    }
    match region.kind {
        Kind::Imported { of_pool: true, .. } => {
            // Work on it may be under way in other streams.
            driver.engine.wait_streams(|_| true);
            driver.memory.close_import(address.0)
        }
        Kind::Pool(_) if driver.memory.begin_free(address.0) => {
            stream.submit(driver, Work::PoolFree { address: address.0 })
        }
        // Plain memory may be freed in a stream's order as well; waiting for that order is correct,
        // if slow.
        Kind::Large | Kind::Small | Kind::Managed => {
            driver.engine.wait_stream(stream.id);
            driver
                .memory
                .free(&driver.device_state, address.0)
                .map(|_| ())
        }
        // The graph keeps its node's memory for its next launch.
        Kind::Graph(_) => {
            driver.given_by_graphs.lock().remove(&address.0);
            Ok(())
        }
        _ => Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    }
}

fn default_pool(to: Out<CUmemoryPool>, device: i32) -> Done {
    let driver = driver()?;
    to.check()?;
    to.put(handle(&driver.device_pools[driver.device(device)?].0))
}

fn current_pool(to: Out<CUmemoryPool>, device: i32) -> Done {
    let driver = driver()?;
    to.check()?;
    to.put(handle(
        &driver.device_pools[driver.device(device)?].1.lock(),
    ))
}

fn set_pool(device: i32, pool: CUmemoryPool) -> Done {
    let (driver, pool) = find(pool)?;
    let device = driver.device(device)?;
    if pool.device != device {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    *driver.device_pools[device].1.lock() = pool;
    Ok(())
}

fn on_device(location: In<CUmemLocation>) -> Result<i32, CUresult> {
    let location = location.get()?;
    if location.r#type.0 == LOCATION_DEVICE {
        Ok(location.id)
    } else {
        Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
    }
}

/// Words of what `cuMemPoolExportPointer` gives: the exporting process, as in every handle of
/// memory, and the pool, where those have nothing.
const OWNER_WORD: usize = 1;
const POOL_WORD: usize = 7;
/// First word of the description of a pool.
const MAGIC: u64 = 0x5355_424c_504f_4f4c;

/// A descriptor of a file that says on which device a pool is. Memory of the pool is found by what
/// `cuMemPoolExportPointer` gives; the descriptor only proves that there is such a pool.
fn describe(pool: &Pool) -> Result<c_int, CUresult> {
    use std::os::unix::fs::FileExt as _;
    let failed = CUresult::CUDA_ERROR_OPERATING_SYSTEM;
    // SAFETY: a NUL-terminated name.
    let file = unsafe { libc::memfd_create(c"simgpu-pool".as_ptr(), libc::MFD_CLOEXEC) };
    if file < 0 {
        return Err(failed);
    }
    // SAFETY: the descriptor just made, which nobody else has.
    let file = unsafe { std::fs::File::from_raw_fd(file) };
    let owner = u64::from(std::process::id());
    let words = [MAGIC, pool.device as u64, owner, pool.id];
    for (at, word) in words.iter().enumerate() {
        file.write_all_at(&word.to_ne_bytes(), 8 * at as u64)
            .map_err(|_| failed)?;
    }
    Ok(file.into_raw_fd())
}

/// The device of the pool that a descriptor describes, and whose pool it is.
fn described(file: c_int, devices: usize) -> Result<(usize, Sharing), CUresult> {
    use std::os::unix::fs::FileExt as _;
    let bad = CUresult::CUDA_ERROR_INVALID_VALUE;
    // SAFETY: duplicating fails cleanly for a number that is no descriptor.
    let copy = unsafe { libc::fcntl(file, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(bad);
    }
    // SAFETY: the copy just made, which nobody else has.
    let file = unsafe { std::fs::File::from_raw_fd(copy) };
    let word = |at: u64| {
        let mut word = [0; 8];
        file.read_exact_at(&mut word, 8 * at).map_err(|_| bad)?;
        Ok(u64::from_ne_bytes(word))
    };
    if word(0)? != MAGIC {
        return Err(bad);
    }
    let device = usize::try_from(word(1)?).map_err(|_| bad)?;
    let (owner, pool) = (word(2)?, word(3)?);
    let sharing = Sharing::Received { owner, pool };
    (device < devices).then_some((device, sharing)).ok_or(bad)
}

api! {
    stream fn cuMemAllocAsync, cuMemAllocAsync_ptsz(default; to: Out<CUdeviceptr>, bytes: usize, stream: CUstream) {
        alloc(to, bytes, None, stream, default)
    }

    stream fn cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz(
        default; to: Out<CUdeviceptr>, bytes: usize, pool: CUmemoryPool, stream: CUstream,
    ) {
        alloc(to, bytes, Some(pool), stream, default)
    }

    stream fn cuMemFreeAsync, cuMemFreeAsync_ptsz(default; address: CUdeviceptr, stream: CUstream) {
        free(address, stream, default)
    }

    fn cuMemPoolCreate(to: Out<CUmemoryPool>, props: In<CUmemPoolProps>) {
        let driver = driver()?;
        to.check()?;
        let props = props.get()?;
        if props.location.r#type.0 != LOCATION_DEVICE || props.handleTypes.0 & !POSIX_FD != 0 {
            return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
        }
        let sharing = if props.handleTypes.0 == POSIX_FD { Sharing::Exportable } else { Sharing::None };
        let pool = Pool::shared(driver.device(props.location.id)?, false, props.maxSize as u64, sharing);
        driver.pools.insert(pool.id, pool.clone());
        to.put(handle(&pool))
    }

    fn cuMemPoolDestroy(pool: CUmemoryPool) {
        let (driver, pool) = find(pool)?;
        if pool.is_default {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let current = &driver.device_pools[pool.device];
        if current.1.lock().id == pool.id {
            *current.1.lock() = current.0.clone();
        }
        if pool.destroy(&driver.memory, &driver.device_state) {
            driver.pools.remove(pool.id);
        }
        Ok(())
    }

    fn cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize) {
        let (driver, pool) = find(pool)?;
        pool.trim(&driver.memory, &driver.device_state, keep as u64);
        Ok(())
    }

    fn cuMemPoolGetAttribute(pool: CUmemoryPool, attribute: u32, value: Out<c_void>) {
        let (_, pool) = find(pool)?;
        value.check()?;
        let usage = pool.usage();
        let wide = match attribute {
            REUSE_FIRST..=REUSE_LAST => {
                // SAFETY: the API says that these attributes are ints.
                return unsafe { Out::new(value.raw().cast::<i32>()) }.put(pool.reuse((attribute - REUSE_FIRST) as usize));
            }
            RELEASE_THRESHOLD => usage.release_threshold,
            RESERVED_CURRENT => usage.reserved,
            RESERVED_HIGH => usage.reserved_high,
            USED_CURRENT => usage.used,
            USED_HIGH => usage.used_high,
            _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        };
        // SAFETY: the API says that all others are 64-bit.
        unsafe { Out::new(value.raw().cast::<u64>()) }.put(wide)
    }

    fn cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: u32, value: Out<c_void>) {
        let (_, pool) = find(pool)?;
        value.check()?;
        if (REUSE_FIRST..=REUSE_LAST).contains(&attribute) {
            // SAFETY: the API says that these attributes are ints.
            let flag = unsafe { In::new(value.raw().cast::<i32>()) }.get()?;
            pool.set_reuse((attribute - REUSE_FIRST) as usize, flag);
            return Ok(());
        }
        // SAFETY: the API says that all others are 64-bit.
        let wide = unsafe { In::new(value.raw().cast::<u64>()) }.get()?;
        match (attribute, wide) {
            (RELEASE_THRESHOLD, bytes) => pool.set_release_threshold(bytes),
            (RESERVED_HIGH, 0) => pool.reset_high(true, false),
            (USED_HIGH, 0) => pool.reset_high(false, true),
            _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
        Ok(())
    }

    fn cuMemPoolSetAccess(pool: CUmemoryPool, list: In<CUmemAccessDesc>, count: usize) {
        let (driver, pool) = find(pool)?;
        for one in list.list(count)? {
            let device = driver.device(one.location.id)?;
            // The pool's own device cannot lose access. Other devices of the process reach all
            // pools here.
            if device == pool.device && one.flags.0 == 0 {
                return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
            }
        }
        Ok(())
    }

    fn cuMemPoolGetAccess(to: Out<u32>, pool: CUmemoryPool, location: In<CUmemLocation>) {
        const READ_WRITE: u32 = 3;
        let (driver, _) = find(pool)?;
        to.check()?;
        driver.device(on_device(location)?)?;
        to.put(READ_WRITE)
    }

    fn cuMemPoolExportToShareableHandle(to: Out<c_void>, pool: CUmemoryPool, kind: u32, flags: u64) {
        let (_, pool) = find(pool)?;
        to.check()?;
        if kind != POSIX_FD || flags != 0 || pool.sharing != Sharing::Exportable {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: for this kind of handle the program points to an int.
        unsafe { Out::new(to.raw().cast::<c_int>()) }.put(describe(&pool)?)
    }

    fn cuMemPoolImportFromShareableHandle(to: Out<CUmemoryPool>, handle: *mut c_void, kind: u32, flags: u64) {
        let driver = driver()?;
        to.check()?;
        if kind != POSIX_FD || flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // CAST: the API passes the descriptor itself in the pointer.
        let (device, sharing) = described(handle as usize as c_int, driver.all_devices())?;
        let pool = Pool::shared(device, false, 0, sharing);
        driver.pools.insert(pool.id, pool.clone());
        to.put(self::handle(&pool))
    }

    fn cuMemPoolExportPointer(to: Out<CUmemPoolPtrExportData>, address: CUdeviceptr) {
        let driver = driver()?;
        to.check()?;
        let pool = match driver.memory.region(address.0).map(|region| region.kind) {
            Some(Kind::Pool(pool)) => find(pool)?.1,
            _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        };
        if pool.sharing != Sharing::Exportable {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let handle = driver.memory.share_of_pool(address.0)?;
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| handle[at * 8 + byte]));
        let mut reserved: [u64; 8] = std::array::from_fn(word);
        reserved[POOL_WORD] = pool.id;
        to.put(CUmemPoolPtrExportData { reserved })
    }

    fn cuMemPoolImportPointer(to: Out<CUdeviceptr>, pool: CUmemoryPool, data: In<CUmemPoolPtrExportData>) {
        let (driver, pool) = find(pool)?;
        to.check()?;
        let words = data.get()?.reserved;
        let from = Sharing::Received { owner: words[OWNER_WORD], pool: words[POOL_WORD] };
        if pool.sharing != from {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let handle = std::array::from_fn(|byte| words[byte / 8].to_ne_bytes()[byte % 8]);
        let context = crate::context::current_id();
        to.put(CUdeviceptr(driver.memory.open_import(context, driver.all_devices(), &handle, true)?))
    }

    fn cuDeviceGetDefaultMemPool(to: Out<CUmemoryPool>, device: CUdevice) {
        default_pool(to, device.0)
    }

    fn cuDeviceGetMemPool(to: Out<CUmemoryPool>, device: CUdevice) {
        current_pool(to, device.0)
    }

    fn cuDeviceSetMemPool(device: CUdevice, pool: CUmemoryPool) {
        set_pool(device.0, pool)
    }

    fn cuMemGetDefaultMemPool(to: Out<CUmemoryPool>, location: In<CUmemLocation>, _kind: u32) {
        default_pool(to, on_device(location)?)
    }

    fn cuMemGetMemPool(to: Out<CUmemoryPool>, location: In<CUmemLocation>, _kind: u32) {
        current_pool(to, on_device(location)?)
    }

    fn cuMemSetMemPool(location: In<CUmemLocation>, _kind: u32, pool: CUmemoryPool) {
        set_pool(on_device(location)?, pool)
    }

    fn cuDeviceGetGraphMemAttribute(device: CUdevice, attribute: u32, value: Out<u64>) {
        let driver = driver()?;
        let usage = driver.graph_pools[driver.device(device.0)?].usage();
        value.put(match attribute {
            0 => usage.used,
            1 => usage.used_high,
            2 => usage.reserved,
            3 => usage.reserved_high,
            _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        })
    }

    fn cuDeviceSetGraphMemAttribute(device: CUdevice, attribute: u32, value: In<u64>) {
        let driver = driver()?;
        let pool = &driver.graph_pools[driver.device(device.0)?];
        match (attribute, value.get()?) {
            (1, 0) => pool.reset_high(false, true),
            (3, 0) => pool.reset_high(true, false),
            _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        }
        Ok(())
    }

    fn cuDeviceGraphMemTrim(device: CUdevice) {
        let driver = driver()?;
        driver.graph_pools[driver.device(device.0)?].trim(&driver.memory, &driver.device_state, 0);
        Ok(())
    }
}

/// The pool that pointer queries name for an address, if it is in one.
pub(super) fn pool_of(address: u64) -> Result<CUmemoryPool, CUresult> {
    let (driver, _) = current()?;
    Ok(
        match driver.memory.region(address).map(|region| region.kind) {
            Some(Kind::Pool(pool)) => pool,
            _ => CUmemoryPool::NULL,
        },
    )
}
