//! Devices: what they are called and what they can do.

use std::ffi::{c_char, c_int};

use shim_ffi::{CUdevice, CUresult, CUuuid};

use crate::attributes;
use crate::driver::driver;
use crate::entry::{In, Out, api, put_text};

fn uuid(to: Out<CUuuid>, device: CUdevice) -> Result<(), CUresult> {
    let driver = driver()?;
    to.put(CUuuid {
        bytes: driver.device_state.profile().uuid(driver.device(device.0)?),
    })
}

fn total(to: Out<usize>, device: CUdevice) -> Result<(), CUresult> {
    let driver = driver()?;
    to.check()?;
    driver.device(device.0)?;
    to.put(driver.device_state.profile().usable_bytes() as usize)
}

fn attribute(driver: &crate::driver::Driver, device: usize, id: u32) -> i32 {
    attributes::value(driver.device_state.profile(), device, id).unwrap_or(0)
}

api! {
    fn cuDeviceGet(to: Out<CUdevice>, ordinal: c_int) {
        let driver = driver()?;
        to.check()?;
        driver.device(ordinal)?;
        to.put(CUdevice(ordinal))
    }

    fn cuDeviceGetCount(to: Out<c_int>) {
        let driver = driver()?;
        to.put(driver.devices() as c_int)
    }

    fn cuDeviceGetName(to: Out<c_char>, length: c_int, device: CUdevice) {
        let driver = driver()?;
        driver.device(device.0)?;
        put_text(to, &driver.device_state.profile().name, length)
    }

    fn cuDeviceGetUuid(to: Out<CUuuid>, device: CUdevice) {
        uuid(to, device)
    }

    fn cuDeviceGetUuid_v2(to: Out<CUuuid>, device: CUdevice) {
        uuid(to, device)
    }

    fn cuDeviceTotalMem(to: Out<u32>, device: CUdevice) {
        let driver = driver()?;
        to.check()?;
        driver.device(device.0)?;
        to.put(driver.device_state.profile().usable_bytes().min(u64::from(u32::MAX)) as u32)
    }

    fn cuDeviceTotalMem_v2(to: Out<usize>, device: CUdevice) {
        total(to, device)
    }

    fn cuDeviceGetAttribute(to: Out<c_int>, id: u32, device: CUdevice) {
        let driver = driver()?;
        to.check()?;
        let device = driver.device(device.0)?;
        to.put(attributes::value(driver.device_state.profile(), device, id).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?)
    }

    fn cuDeviceComputeCapability(major: Out<c_int>, minor: Out<c_int>, device: CUdevice) {
        let driver = driver()?;
        driver.device(device.0)?;
        major.put(driver.device_state.profile().major)?;
        minor.put(driver.device_state.profile().minor)
    }

    fn cuDeviceGetProperties(to: Out<shim_ffi::CUdevprop>, device: CUdevice) {
        let driver = driver()?;
        let device = driver.device(device.0)?;
        let value = |id| attribute(driver, device, id);
        to.put(shim_ffi::CUdevprop {
            maxThreadsPerBlock: value(1),
            maxThreadsDim: [value(2), value(3), value(4)],
            maxGridSize: [value(5), value(6), value(7)],
            sharedMemPerBlock: value(8),
            totalConstantMemory: value(9),
            SIMDWidth: value(10),
            memPitch: value(11),
            regsPerBlock: value(12),
            clockRate: value(13),
            textureAlign: value(14),
        })
    }

    fn cuDeviceGetPCIBusId(to: Out<c_char>, length: c_int, device: CUdevice) {
        let driver = driver()?;
        let device = driver.device(device.0)?;
        put_text(to, &format!("0000:{:02X}:00.0", driver.device_state.profile().pci_bus(device)), length)
    }

    fn cuDeviceGetByPCIBusId(to: Out<CUdevice>, id: In<c_char>) {
        let driver = driver()?;
        to.check()?;
        let text = id.text()?.to_ascii_uppercase();
        let wanted = text.rsplit_once(':').and_then(|(bus, _)| bus.rsplit(':').next());
        let wanted = wanted.and_then(|bus| u32::from_str_radix(bus, 16).ok());
        let mut ordinals = (0..).take(driver.devices());
        let found = ordinals.find(|ordinal| {
            driver.device(*ordinal).is_ok_and(|device| Some(driver.device_state.profile().pci_bus(device)) == wanted)
        });
        to.put(CUdevice(found.ok_or(CUresult::CUDA_ERROR_INVALID_DEVICE)?))
    }

    fn cuDeviceCanAccessPeer(to: Out<c_int>, device: CUdevice, peer: CUdevice) {
        let driver = driver()?;
        to.check()?;
        to.put(c_int::from(driver.device(device.0)? != driver.device(peer.0)?))
    }

    fn cuDeviceGetP2PAttribute(to: Out<c_int>, attribute: u32, from: CUdevice, device: CUdevice) {
        const PERFORMANCE_RANK: u32 = 1;
        const ACCESS: u32 = 2;
        const NATIVE_ATOMICS: u32 = 3;
        const ARRAYS: u32 = 4;
        let driver = driver()?;
        to.check()?;
        if driver.device(from.0)? == driver.device(device.0)? {
            return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
        }
        to.put(match attribute {
            PERFORMANCE_RANK | NATIVE_ATOMICS => 0,
            ACCESS | ARRAYS => 1,
            _ => return Err(CUresult::CUDA_ERROR_INVALID_VALUE),
        })
    }

    fn cuDeviceGetTexture1DLinearMaxWidth(to: Out<usize>, _format: u32, channels: u32, device: CUdevice) {
        let driver = driver()?;
        to.check()?;
        driver.device(device.0)?;
        if !matches!(channels, 1 | 2 | 4) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        to.put(1 << 27)
    }

    fn cuDeviceGetExecAffinitySupport(to: Out<c_int>, _kind: u32, device: CUdevice) {
        let driver = driver()?;
        to.check()?;
        driver.device(device.0)?;
        to.put(0)
    }
}
