//! What an address is.

use std::ffi::{c_int, c_void};

use shim_ffi::{CUcontext, CUdeviceptr, CUmemorytype, CUresult};

use super::Done;
use crate::context::current_any;
use crate::driver::{Driver, driver};
use crate::entry::{In, Out, api};
use crate::memory::pool::Sharing;
use crate::memory::{Kind, Region};

const CONTEXT: u32 = 1;
const MEMORY_TYPE: u32 = 2;
const DEVICE_POINTER: u32 = 3;
const HOST_POINTER: u32 = 4;
const P2P_TOKENS: u32 = 5;
const SYNC_MEMOPS: u32 = 6;
const BUFFER_ID: u32 = 7;
const IS_MANAGED: u32 = 8;
const DEVICE_ORDINAL: u32 = 9;
const IS_LEGACY_IPC_CAPABLE: u32 = 10;
const RANGE_START: u32 = 11;
const RANGE_SIZE: u32 = 12;
const MAPPED: u32 = 13;
const ALLOWED_HANDLE_TYPES: u32 = 14;
const IS_RDMA_CAPABLE: u32 = 15;
const ACCESS_FLAGS: u32 = 16;
const MEMPOOL_HANDLE: u32 = 17;
const MAPPING_SIZE: u32 = 18;
const MAPPING_BASE: u32 = 19;
const MEMORY_BLOCK_ID: u32 = 20;

/// An attribute's value with the type that the API gives it.
enum Value {
    Int(u32),
    Wide(u64),
    Bool(bool),
    /// A token for other devices' drivers, and one for the address space.
    Tokens(u64, u32),
}

impl Value {
    fn put(self, to: *mut c_void) -> Done {
        // SAFETY: the API says that the program points to a value of this type for this attribute.
        unsafe {
            match self {
                Self::Int(value) => Out::new(to.cast::<u32>()).put(value),
                Self::Wide(value) => Out::new(to.cast::<u64>()).put(value),
                Self::Tokens(token, space) => {
                    Out::new(to.cast::<u64>()).put(token)?;
                    Out::new(to.cast::<u32>().add(2)).put(space)
                }
                Self::Bool(value) => Out::new(to.cast::<c_int>()).put(c_int::from(value)),
            }
        }
    }

    /// What `cuPointerGetAttributes` gives for an address that is not the driver's.
    fn absent(attribute: u32) -> Self {
        match attribute {
            MEMORY_TYPE => Self::Int(0),
            DEVICE_ORDINAL => Self::Int(-2_i32 as u32),
            SYNC_MEMOPS | IS_MANAGED | IS_LEGACY_IPC_CAPABLE | MAPPED | IS_RDMA_CAPABLE => {
                Self::Bool(false)
            }
            ACCESS_FLAGS => Self::Int(0),
            _ => Self::Wide(0),
        }
    }
}

/// The handle behind a region that was made for other devices to reach.
fn rdma_handle(driver: &Driver, region: &Region) -> Option<u64> {
    let Kind::Mapping { handle, .. } = region.kind else {
        return None;
    };
    let handles = driver.memory.handles.lock();
    let capable = handles
        .get(handle)
        .ok()?
        .prop
        .allocFlags
        .gpuDirectRDMACapable
        != 0;
    capable.then_some(handle)
}

fn value(
    driver: &Driver,
    region: &Region,
    address: u64,
    attribute: u32,
) -> Result<Value, CUresult> {
    let managed = matches!(region.kind, Kind::Managed);
    let host = region.is_host();
    Ok(match attribute {
        CONTEXT => Value::Wide(
            if matches!(region.kind, Kind::Mapping { .. } | Kind::Pool(_)) {
                0
            } else {
                CUcontext(region.context as *mut c_void).0 as u64
            },
        ),
        MEMORY_TYPE => Value::Int(if region.is_over_the_link() {
            CUmemorytype(1).0
        } else {
            CUmemorytype(2).0
        }),
        DEVICE_POINTER => Value::Wide(address),
        HOST_POINTER if host || managed => Value::Wide(address),
        HOST_POINTER => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        // What stands for the pages: those of another handle at the same address have another
        // token.
        P2P_TOKENS => match rdma_handle(driver, region) {
            Some(handle) => Value::Tokens(handle, 1),
            None => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        },
        SYNC_MEMOPS => Value::Bool(region.sync_memops),
        BUFFER_ID => Value::Wide(region.id),
        IS_MANAGED => Value::Bool(managed),
        DEVICE_ORDINAL => Value::Int(driver.ordinal(region.device) as u32),
        IS_LEGACY_IPC_CAPABLE => Value::Bool(matches!(region.kind, Kind::Large | Kind::Small)),
        RANGE_START => Value::Wide(region.start),
        RANGE_SIZE => Value::Wide(region.bytes),
        MAPPED => Value::Bool(true),
        ALLOWED_HANDLE_TYPES => Value::Wide(match &region.kind {
            Kind::Mapping { handle, .. } => driver
                .memory
                .handles
                .lock()
                .get(*handle)
                .map_or(0, |handle| handle.prop.requestedHandleTypes.0.into()),
            Kind::Pool(pool) => {
                let pool = driver.pools.get(pool.0 as u64);
                u64::from(pool.is_some_and(|pool| pool.sharing == Sharing::Exportable))
            }
            _ => 0,
        }),
        IS_RDMA_CAPABLE => Value::Bool(rdma_handle(driver, region).is_some()),
        ACCESS_FLAGS => Value::Int(match &region.kind {
            Kind::Mapping { access, .. } => {
                access.iter().map(|(_, flags)| *flags).max().unwrap_or(0)
            }
            _ => 3,
        }),
        MEMPOOL_HANDLE => Value::Wide(super::pool_of(address)?.0 as u64),
        MAPPING_SIZE => Value::Wide(region.bytes),
        MAPPING_BASE => Value::Wide(region.start),
        MEMORY_BLOCK_ID => Value::Wide(region.id),
        _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
    })
}

api! {
    fn cuPointerGetAttribute(to: Out<c_void>, attribute: u32, address: CUdeviceptr) {
        to.check()?;
        let (driver, _) = current_any()?;
        let region = driver.memory.region(address.0).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        value(driver, &region, address.0, attribute)?.put(to.raw())
    }

    fn cuPointerGetAttributes(count: u32, attributes: In<u32>, values: In<*mut c_void>, address: CUdeviceptr) {
        let driver = driver()?;
        let region = driver.memory.region(address.0);
        for at in 0..count as usize {
            let attribute = attributes.at(at)?;
            let found = match &region {
                Some(region) => value(driver, region, address.0, attribute).unwrap_or_else(|_| Value::absent(attribute)),
                None => Value::absent(attribute),
            };
            found.put(values.at(at)?)?;
        }
        Ok(())
    }

    fn cuPointerSetAttribute(from: In<c_int>, attribute: u32, address: CUdeviceptr) {
        let (driver, _) = current_any()?;
        if attribute != SYNC_MEMOPS {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let on = from.get()? != 0;
        let found = driver.memory.update(address.0, |region| region.sync_memops = on);
        if found { Ok(()) } else { Err(CUresult::CUDA_ERROR_INVALID_VALUE) }
    }
}
