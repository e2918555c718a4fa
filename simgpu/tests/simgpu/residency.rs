//! What moving memory in and out costs, where it lies meanwhile, and that untouched memory stays
//! untouched on the way.

use std::ffi::c_void;
use std::time::{Duration, Instant};

use shim_ffi::{CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUresult};
use simgpu::api;
use simgpu::device_state::Usage;
use simgpu::entry::{In, Out};

use crate::random::Random;
use crate::support::*;

const MIB: usize = 1 << 20;

pub const DEVICE: u32 = 1;
const HOST: u32 = 2;
const HOST_NUMA: u32 = 3;

fn prop(location: u32) -> CUmemAllocationProp {
    let mut prop = CUmemAllocationProp::default();
    prop.r#type.0 = 1;
    prop.location.r#type.0 = location;
    prop
}

/// Memory of a location, mapped at `address` with access for the device.
pub fn map(address: CUdeviceptr, bytes: usize, location: u32) {
    let (prop, mut access) = (prop(location), CUmemAccessDesc::default());
    access.location.r#type.0 = DEVICE;
    access.flags.0 = 3;
    // SAFETY: pointers are to locals.
    unsafe {
        let handle = out(|to| api::cuMemCreate(to, bytes, In::new(&raw const prop), 0));
        ok(api::cuMemMap(address, bytes, 0, handle, 0));
        ok(api::cuMemSetAccess(
            address,
            bytes,
            In::new(&raw const access),
            1,
        ));
        ok(api::cuMemRelease(handle));
    }
}

pub fn unmap(address: CUdeviceptr, bytes: usize) {
    // SAFETY: no pointers of ours.
    ok(unsafe { api::cuMemUnmap(address, bytes) });
}

pub fn reserve(bytes: usize) -> CUdeviceptr {
    // SAFETY: the out-parameter is a local of `out`.
    out(|to| unsafe { api::cuMemAddressReserve(to, bytes, 0, CUdeviceptr(0), 0) })
}

pub fn pinned(bytes: usize) -> *mut u8 {
    let mut pointer = std::ptr::null_mut::<c_void>();
    // SAFETY: the out-parameter is a local.
    ok(unsafe { api::cuMemHostAlloc(Out::new(&raw mut pointer), bytes, 0) });
    pointer.cast()
}

fn own_usage() -> Usage {
    let pid = std::process::id();
    simgpu::observe::snapshot().expect("a device")[0]
        .processes
        .iter()
        .find(|usage| usage.pid == pid)
        .copied()
        .expect("this process is on the device")
}

/// Bytes of the host's memory that this process has pages of.
fn resident_bytes() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").expect("a process has sizes");
    let pages = text.split(' ').nth(1).expect("a second field");
    pages.parse::<usize>().expect("a number") * 4096
}

#[test]
fn handles_cost_what_the_profile_says() {
    driver();
    let range = reserve(64 * MIB);
    let begun = Instant::now();
    for _ in 0..20 {
        map(range, 2 * MIB, DEVICE);
        unmap(range, 2 * MIB);
    }
    // create 29, map 2, access 38, unmap 34, release 23 us.
    assert!(begun.elapsed() >= Duration::from_micros(20 * 126));
    let begun = Instant::now();
    let pointer = pinned(40 * MIB);
    // 4 GB/s.
    assert!(begun.elapsed() >= Duration::from_millis(10));
    // SAFETY: as allocated.
    ok(unsafe { api::cuMemFreeHost(pointer.cast()) });
    // SAFETY: no pointers of ours.
    ok(unsafe { api::cuMemAddressFree(range, 64 * MIB) });
}

#[test]
fn host_located_memory_is_the_host_s_and_keeps_its_bytes_when_it_moves() {
    if !in_own_process(
        "residency::host_located_memory_is_the_host_s_and_keeps_its_bytes_when_it_moves",
    ) {
        return;
    }
    driver();
    let bytes = 4 * MIB;
    let (range, other) = (reserve(bytes), reserve(bytes));
    let before = own_usage();
    map(range, bytes, HOST_NUMA);
    map(other, bytes, HOST);
    let usage = own_usage();
    assert_eq!(usage.used_bytes, before.used_bytes, "not the device's");
    assert_eq!(usage.host_located_bytes, 2 * bytes as u64);
    assert_eq!(usage.handles, before.handles + 2);

    let data: Vec<u32> = (0..bytes as u32 / 4).collect();
    upload(range, &data);
    // SAFETY: device addresses only.
    ok(unsafe { api::cuMemcpyDtoD_v2(other, range, bytes) });
    unmap(range, bytes);
    map(range, bytes, DEVICE);
    assert_eq!(own_usage().used_bytes, before.used_bytes + bytes as u64);
    // SAFETY: device addresses only.
    ok(unsafe { api::cuMemcpyDtoD_v2(range, other, bytes) });
    assert_eq!(download::<u32>(range, data.len()), data);

    // What lies there is the host's by the pointer's own account, and the host may follow it once
    // it is allowed to.
    let mut kind = 0_u32;
    let mut access = CUmemAccessDesc::default();
    access.location.r#type.0 = HOST;
    access.flags.0 = 3;
    // SAFETY: pointers are to locals; the address is the host's to read after the call that says
    // so.
    unsafe {
        ok(api::cuPointerGetAttribute(
            Out::new((&raw mut kind).cast()),
            2,
            other,
        ));
        assert_eq!(kind, 1);
        ok(api::cuMemSetAccess(
            other,
            bytes,
            In::new(&raw const access),
            1,
        ));
        assert_eq!((other.0 as *const u32).add(7).read(), 7);
    }
    unmap(range, bytes);
    unmap(other, bytes);
    let mut far = prop(HOST_NUMA);
    far.location.id = 1;
    // SAFETY: pointers are to locals.
    let status = try_out::<shim_ffi::CUmemGenericAllocationHandle>(|to| unsafe {
        api::cuMemCreate(to, bytes, In::new(&raw const far), 0)
    });
    assert_eq!(status, Err(CUresult::CUDA_ERROR_INVALID_DEVICE));
    let after = own_usage();
    assert_eq!(
        (after.handles, after.host_located_bytes, after.used_bytes),
        (before.handles, 0, before.used_bytes)
    );
}

#[test]
fn copies_of_untouched_memory_take_no_host_memory_and_read_as_zeros() {
    if !in_own_process(
        "residency::copies_of_untouched_memory_take_no_host_memory_and_read_as_zeros",
    ) {
        return;
    }
    driver();
    let bytes = 3 << 30;
    let (range, chunk) = (reserve(bytes), 64 * MIB);
    for at in (0..bytes).step_by(chunk) {
        map(CUdeviceptr(range.0 + at as u64), chunk, DEVICE);
    }
    // One page in every chunk, and in the host_copy something that has to go.
    let page = |at: usize| vec![(at / chunk) as u8 + 1; 4096];
    for at in (0..bytes).step_by(chunk) {
        upload(CUdeviceptr(range.0 + (at + 12_288) as u64), &page(at));
    }
    let host_copy = pinned(bytes);
    // SAFETY: as allocated.
    unsafe { host_copy.write_bytes(0xee, 2 * MIB) };
    let before = resident_bytes();
    // SAFETY: as allocated and mapped.
    unsafe {
        ok(api::cuMemcpyDtoH_v2(host_copy.cast(), range, bytes));
        unmap(range, bytes);
        for at in (0..bytes).step_by(chunk) {
            map(CUdeviceptr(range.0 + at as u64), chunk, DEVICE);
        }
        // Dirty where the host_copy has nothing.
        upload(CUdeviceptr(range.0 + (8 * MIB) as u64), &[0x55_u8; 4096]);
        ok(api::cuMemcpyHtoD_v2(range, host_copy.cast(), bytes));
    }
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 64 * MIB, "3 GiB of zeros took {grown} bytes");
    for at in (0..bytes).step_by(chunk) {
        let from = CUdeviceptr(range.0 + at as u64);
        let got = download::<u8>(from, 20_480);
        assert_eq!(got[12_288..16_384], page(at), "chunk at {at}");
        assert!(got[..12_288].iter().all(|byte| *byte == 0));
        assert!(got[16_384..].iter().all(|byte| *byte == 0));
    }
    let dirty = CUdeviceptr(range.0 + (8 * MIB) as u64);
    assert!(download::<u8>(dirty, 4096).iter().all(|byte| *byte == 0));
    assert_eq!(own_usage().pinned_bytes, bytes as u64);
    // SAFETY: as allocated.
    ok(unsafe { api::cuMemFreeHost(host_copy.cast()) });
    assert_eq!(own_usage().pinned_bytes, 0);
    unmap(range, bytes);
}

#[test]
fn registered_memory_stays_untouched_too_unless_it_is_a_file_s() {
    if !in_own_process("residency::registered_memory_stays_untouched_too_unless_it_is_a_file_s") {
        return;
    }
    driver();
    let bytes = 1 << 30;
    let device = alloc(bytes);
    upload(CUdeviceptr(device.0 + (5 * MIB) as u64), &[7_u8; 100]);
    let page = (5 * MIB) / 4096 * 4096;
    for shared in [false, true] {
        let kind = if shared {
            libc::MAP_SHARED
        } else {
            libc::MAP_PRIVATE
        };
        let flags = kind | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let bytes = if shared { 16 * MIB } else { bytes };
        // SAFETY: a fresh mapping, given back below after it is no longer registered.
        unsafe {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let host = libc::mmap(std::ptr::null_mut(), bytes, rights, flags, -1, 0);
            assert_ne!(host, libc::MAP_FAILED);
            host.cast::<u8>().add(MIB).write_bytes(0xee, 8192);
            ok(api::cuMemHostRegister_v2(host, bytes, 0));
            let before = resident_bytes();
            ok(api::cuMemcpyDtoH_v2(host, device, bytes));
            let grown = resident_bytes().saturating_sub(before);
            assert!(shared || grown < 32 * MIB, "1 GiB of zeros took {grown}");
            let found = std::slice::from_raw_parts(host.cast::<u8>(), bytes);
            assert!(found[MIB..MIB + 8192].iter().all(|byte| *byte == 0));
            assert_eq!(
                &found[5 * MIB..5 * MIB + 101],
                &[&[7; 100][..], &[0]].concat()
            );
            assert!(found[page - 4096..page].iter().all(|byte| *byte == 0));
            ok(api::cuMemHostUnregister(host));
            libc::munmap(host, bytes);
        }
    }
    free(device);
}

#[test]
fn large_copies_keep_every_byte_whatever_was_written_before() {
    driver();
    let bytes = 6 * MIB;
    let (range, host_copy) = (reserve(bytes), pinned(bytes));
    map(range, bytes, DEVICE);
    let mut expected = vec![0_u8; bytes];
    let mut numbers = Random::new(7);
    let mut random = |below: usize| numbers.below(below as u64) as usize;
    for round in 0..40_u8 {
        let (at, length) = (random(bytes - 100_000), 1 + random(99_999));
        let value = if round % 3 == 0 { 0 } else { round };
        expected[at..at + length].fill(value);
        // SAFETY: inside the mapping.
        ok(unsafe { api::cuMemsetD8_v2(CUdeviceptr(range.0 + at as u64), value, length) });
        // Unaligned copies out and back.
        let (from, count) = (random(5000), bytes - 5000 - random(100_000));
        let at_from = CUdeviceptr(range.0 + from as u64);
        // SAFETY: inside the mapping and the allocation.
        unsafe {
            ok(api::cuMemcpyDtoH_v2(
                host_copy.add(from).cast(),
                at_from,
                count,
            ));
            assert_eq!(
                std::slice::from_raw_parts(host_copy.add(from), count),
                &expected[from..from + count],
                "round {round}"
            );
            if round % 4 == 0 {
                unmap(range, bytes);
                map(range, bytes, DEVICE);
                expected[..from].fill(0);
                expected[from + count..].fill(0);
            }
            ok(api::cuMemcpyHtoD_v2(
                at_from,
                host_copy.add(from).cast(),
                count,
            ));
        }
        assert_eq!(download::<u8>(range, bytes), expected, "round {round}");
    }
    unmap(range, bytes);
    // SAFETY: as allocated.
    ok(unsafe { api::cuMemFreeHost(host_copy.cast()) });
}
