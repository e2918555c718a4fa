//! Memory: bytes, bounds, accounting, VMM rules and pools.

use shim_ffi::{
    CUdeviceptr, CUmemAccessDesc, CUmemAllocationProp, CUmemGenericAllocationHandle, CUresult,
    CUstream,
};
use simgpu::api;
use simgpu::entry::{In, Out};

use crate::support::*;

const MIB: usize = 1 << 20;

#[test]
fn bytes_survive_copies_in_both_directions_and_within() {
    driver();
    let (a, b) = (alloc(MIB), alloc(MIB));
    let data: Vec<u32> = (0..MIB as u32 / 4).collect();
    upload(a, &data);
    // SAFETY: device addresses only.
    ok(unsafe { api::cuMemcpyDtoD_v2(b, a, MIB) });
    assert_eq!(download::<u32>(b, data.len()), data);
    // SAFETY: device addresses only.
    ok(unsafe { api::cuMemsetD16_v2(CUdeviceptr(b.0 + 2), 0x1234, 3) });
    assert_eq!(download::<u16>(b, 5), [0, 0x1234, 0x1234, 0x1234, 2]);
    free(a);
    free(b);
}

#[test]
fn addresses_are_aligned_and_invalid_frees_are_refused() {
    driver();
    let address = alloc(1000);
    assert_eq!(address.0 % 512, 0);
    let bad = |address: u64| {
        // SAFETY: no pointers of ours.
        let status = unsafe { api::cuMemFree_v2(CUdeviceptr(address)) };
        assert_eq!(status, CUresult::CUDA_ERROR_INVALID_VALUE);
    };
    bad(address.0 + 512);
    bad(0x1000);
    free(address);
    bad(address.0);
    assert_eq!(try_alloc(0), Err(CUresult::CUDA_ERROR_INVALID_VALUE));
    assert_eq!(try_alloc(9 << 30), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
}

#[test]
fn copies_beyond_an_allocation_are_refused() {
    driver();
    let address = alloc(1000);
    let data = [0_u8; 1001];
    // SAFETY: the array has that many bytes.
    let status = unsafe { api::cuMemcpyHtoD_v2(address, data.as_ptr().cast(), 1001) };
    assert_eq!(status, CUresult::CUDA_ERROR_INVALID_VALUE);
    free(address);
}

#[test]
fn a_pitched_copy_moves_rows_only() {
    driver();
    let source: Vec<u8> = (0..=255).collect();
    let target = alloc(4096);
    // SAFETY: device addresses only.
    ok(unsafe { api::cuMemsetD8_v2(target, 0xee, 4096) });
    let copy = shim_ffi::CUDA_MEMCPY2D {
        srcMemoryType: shim_ffi::CUmemorytype(1),
        srcHost: source.as_ptr().cast(),
        srcPitch: 16,
        dstMemoryType: shim_ffi::CUmemorytype(2),
        dstDevice: target,
        dstPitch: 1024,
        WidthInBytes: 8,
        Height: 3,
        ..Default::default()
    };
    // SAFETY: the structure and the host rows that it names are locals.
    ok(unsafe { api::cuMemcpy2D_v2(In::new(&raw const copy)) });
    let rows = download::<u8>(target, 4096);
    assert_eq!(rows[..9], [0, 1, 2, 3, 4, 5, 6, 7, 0xee]);
    assert_eq!(rows[2048..2057], [32, 33, 34, 35, 36, 37, 38, 39, 0xee]);
    free(target);
}

#[test]
fn managed_memory_is_one_place_for_host_and_device() {
    driver();
    // SAFETY: the out-parameter is a local.
    let address = out(|to| unsafe { api::cuMemAllocManaged(to, MIB, 1) });
    let host = address.0 as *mut u32;
    // SAFETY: managed memory may be touched by the host.
    unsafe { host.write(7) };
    assert_eq!(download::<u32>(address, 1), [7]);
    upload(address, &[8_u32]);
    // SAFETY: as above.
    assert_eq!(unsafe { host.read() }, 8);
    free(address);
}

#[test]
fn registered_memory_may_be_registered_once() {
    driver();
    let mut data = vec![1_u8; 8192];
    let pointer = data.as_mut_ptr().cast();
    // SAFETY: the vector outlives its registration.
    unsafe {
        ok(api::cuMemHostRegister_v2(pointer, 8192, 0));
        assert_eq!(
            api::cuMemHostRegister_v2(pointer, 4096, 0),
            CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
        );
        ok(api::cuMemHostUnregister(pointer));
        assert_eq!(
            api::cuMemHostUnregister(pointer),
            CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
        );
    }
}

fn prop() -> CUmemAllocationProp {
    let mut prop = CUmemAllocationProp::default();
    prop.r#type.0 = 1;
    prop.location.r#type.0 = 1;
    prop
}

fn handle(
    bytes: usize,
    prop: &CUmemAllocationProp,
) -> Result<CUmemGenericAllocationHandle, CUresult> {
    // SAFETY: both pointers are to locals.
    try_out(|to| unsafe { api::cuMemCreate(to, bytes, In::new(prop), 0) })
}

fn allow(address: CUdeviceptr, bytes: usize) -> CUresult {
    let mut access = CUmemAccessDesc::default();
    access.location.r#type.0 = 1;
    access.flags.0 = 3;
    // SAFETY: the pointer is to a local.
    unsafe { api::cuMemSetAccess(address, bytes, In::new(&raw const access), 1) }
}

#[test]
fn a_mapping_covers_its_handle_and_needs_access() {
    driver();
    let bytes = 4 * MIB;
    assert_eq!(
        handle(MIB, &prop()),
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    );
    let memory = handle(bytes, &prop()).unwrap();
    // SAFETY: no pointers of ours but the out-parameter.
    unsafe {
        let range = out(|to| api::cuMemAddressReserve(to, 2 * bytes, 0, CUdeviceptr(0), 0));
        assert_eq!(
            api::cuMemMap(range, 2 * MIB, 0, memory, 0),
            CUresult::CUDA_ERROR_INVALID_VALUE
        );
        assert_eq!(
            api::cuMemMap(range, bytes, 2 * MIB, memory, 0),
            CUresult::CUDA_ERROR_INVALID_VALUE
        );
        ok(api::cuMemMap(range, bytes, 0, memory, 0));
        assert_eq!(
            api::cuMemMap(range, bytes, 0, memory, 0),
            CUresult::CUDA_ERROR_INVALID_VALUE
        );
        assert_eq!(
            api::cuMemsetD8_v2(range, 1, 1),
            CUresult::CUDA_ERROR_INVALID_VALUE
        );
        ok(allow(range, bytes));
        upload(range, &[5_u8; 16]);

        // The same memory at another address, and after its handle is gone.
        let second = CUdeviceptr(range.0 + bytes as u64);
        ok(api::cuMemMap(second, bytes, 0, memory, 0));
        ok(allow(second, bytes));
        ok(api::cuMemRelease(memory));
        assert_eq!(download::<u8>(second, 16), [5; 16]);

        assert_eq!(
            api::cuMemUnmap(range, 2 * MIB),
            CUresult::CUDA_ERROR_INVALID_VALUE
        );
        assert_eq!(
            api::cuMemAddressFree(range, 2 * bytes),
            CUresult::CUDA_ERROR_INVALID_VALUE
        );
        ok(api::cuMemUnmap(range, 2 * bytes));
        ok(api::cuMemAddressFree(range, 2 * bytes));
        assert_eq!(
            api::cuMemRelease(memory),
            CUresult::CUDA_ERROR_INVALID_VALUE
        );
    }
}

#[test]
fn a_copy_may_span_neighbouring_mappings() {
    driver();
    let bytes = 2 * MIB;
    // SAFETY: no pointers of ours but the out-parameter.
    unsafe {
        let range = out(|to| api::cuMemAddressReserve(to, 2 * bytes, 0, CUdeviceptr(0), 0));
        for at in 0..2 {
            let memory = handle(bytes, &prop()).unwrap();
            ok(api::cuMemMap(
                CUdeviceptr(range.0 + (at * bytes) as u64),
                bytes,
                0,
                memory,
                0,
            ));
            ok(api::cuMemRelease(memory));
        }
        ok(allow(range, 2 * bytes));
        let middle = CUdeviceptr(range.0 + bytes as u64 - 8);
        upload(
            middle,
            &[1_u8, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16],
        );
        assert_eq!(
            download::<u8>(CUdeviceptr(range.0 + bytes as u64), 4),
            [9, 10, 11, 12]
        );
        ok(api::cuMemUnmap(range, 2 * bytes));
        ok(api::cuMemAddressFree(range, 2 * bytes));
    }
}

#[test]
fn exported_memory_comes_back_by_its_descriptor() {
    driver();
    let bytes = 2 * MIB;
    let mut prop = prop();
    prop.requestedHandleTypes.0 = 1;
    let memory = handle(bytes, &prop).unwrap();
    // SAFETY: no pointers of ours but out-parameters.
    unsafe {
        let mut fd = -1_i32;
        ok(api::cuMemExportToShareableHandle(
            Out::new((&raw mut fd).cast()),
            memory,
            1,
            0,
        ));
        let imported = out(|to| api::cuMemImportFromShareableHandle(to, fd as usize as *mut _, 1));
        let range = out(|to| api::cuMemAddressReserve(to, 2 * bytes, 0, CUdeviceptr(0), 0));
        let second = CUdeviceptr(range.0 + bytes as u64);
        ok(api::cuMemMap(range, bytes, 0, memory, 0));
        ok(api::cuMemMap(second, bytes, 0, imported, 0));
        ok(allow(range, 2 * bytes));
        upload(range, &[3_u8; 8]);
        assert_eq!(download::<u8>(second, 8), [3; 8]);
        let standard_input = std::ptr::without_provenance_mut(0);
        let garbage: Result<CUmemGenericAllocationHandle, _> =
            try_out(|to| api::cuMemImportFromShareableHandle(to, standard_input, 1));
        assert_eq!(garbage, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
        ok(api::cuMemUnmap(range, 2 * bytes));
        ok(api::cuMemRelease(memory));
        ok(api::cuMemRelease(imported));
        ok(api::cuMemAddressFree(range, 2 * bytes));
        libc::close(fd);
    }
}

#[test]
fn a_pool_keeps_memory_up_to_its_threshold() {
    driver();
    let stream = stream(1);
    let mut props = shim_ffi::CUmemPoolProps::default();
    props.allocType.0 = 1;
    props.location.r#type.0 = 1;
    // SAFETY: pointers are to locals.
    unsafe {
        let pool = out(|to| api::cuMemPoolCreate(to, In::new(&raw const props)));
        let usage = |attribute| {
            let mut value = 0_u64;
            ok(api::cuMemPoolGetAttribute(
                pool,
                attribute,
                Out::new((&raw mut value).cast()),
            ));
            value
        };
        let (reserved, reserved_high, used) = (5, 6, 7);
        let take = || out(|to| api::cuMemAllocFromPoolAsync(to, 8 * MIB, pool, stream));
        let block = take();
        assert_eq!((usage(reserved), usage(used)), (8 << 20, 8 << 20));
        ok(api::cuMemFreeAsync(block, stream));
        assert_eq!(
            api::cuMemFreeAsync(block, stream),
            CUresult::CUDA_ERROR_INVALID_VALUE
        );
        ok(api::cuStreamSynchronize(stream));
        assert_eq!(
            (usage(reserved), usage(used), usage(reserved_high)),
            (0, 0, 8 << 20)
        );

        let mut threshold = u64::MAX;
        ok(api::cuMemPoolSetAttribute(
            pool,
            4,
            Out::new((&raw mut threshold).cast()),
        ));
        let block = take();
        ok(api::cuMemFreeAsync(block, stream));
        ok(api::cuStreamSynchronize(stream));
        assert_eq!((usage(reserved), usage(used)), (8 << 20, 0));
        ok(api::cuMemPoolTrimTo(pool, 0));
        assert_eq!(usage(reserved), 0);
        ok(api::cuMemPoolDestroy(pool));
        ok(api::cuStreamDestroy_v2(stream));
    }
}

#[test]
fn handles_of_the_wrong_kind_are_garbage() {
    driver();
    let event = event(0);
    // SAFETY: handles are numbers.
    unsafe {
        assert_eq!(
            api::cuStreamSynchronize(CUstream(event.0)),
            CUresult::CUDA_ERROR_INVALID_HANDLE
        );
        assert_eq!(
            api::cuStreamSynchronize(CUstream(0x1234_5670 as *mut _)),
            CUresult::CUDA_ERROR_INVALID_HANDLE
        );
        ok(api::cuEventDestroy_v2(event));
        assert_eq!(
            api::cuEventDestroy_v2(event),
            CUresult::CUDA_ERROR_INVALID_HANDLE
        );
    }
}

#[test]
fn arrays_take_and_give_rows() {
    driver();
    let descriptor = shim_ffi::CUDA_ARRAY_DESCRIPTOR {
        Width: 10,
        Height: 3,
        Format: shim_ffi::CUarray_format(1),
        NumChannels: 1,
    };
    let source: Vec<u8> = (0..30).collect();
    let mut target = vec![0_u8; 30];
    // SAFETY: structures and buffers are locals of the sizes that the copies name.
    unsafe {
        let array = out(|to| api::cuArrayCreate_v2(to, In::new(&raw const descriptor)));
        let host = shim_ffi::CUmemorytype(1);
        let in_array = shim_ffi::CUmemorytype(3);
        let size = shim_ffi::CUDA_MEMCPY2D {
            WidthInBytes: 10,
            Height: 3,
            ..Default::default()
        };
        let into = shim_ffi::CUDA_MEMCPY2D {
            srcMemoryType: host,
            srcHost: source.as_ptr().cast(),
            srcPitch: 10,
            dstMemoryType: in_array,
            dstArray: array,
            ..size
        };
        ok(api::cuMemcpy2D_v2(In::new(&raw const into)));
        let back = shim_ffi::CUDA_MEMCPY2D {
            srcMemoryType: in_array,
            srcArray: array,
            dstMemoryType: host,
            dstHost: target.as_mut_ptr().cast(),
            dstPitch: 10,
            ..size
        };
        ok(api::cuMemcpy2D_v2(In::new(&raw const back)));
        assert_eq!(target, source);
        ok(api::cuMemcpyAtoH_v2(
            target.as_mut_ptr().cast(),
            array,
            12,
            5,
        ));
        assert_eq!(target[..5], [12, 13, 14, 15, 16]);
        let across = api::cuMemcpyAtoH_v2(target.as_mut_ptr().cast(), array, 8, 5);
        assert_eq!(across, CUresult::CUDA_ERROR_INVALID_VALUE);
        ok(api::cuArrayDestroy(array));
        assert_eq!(
            api::cuArrayDestroy(array),
            CUresult::CUDA_ERROR_INVALID_HANDLE
        );
    }
}

#[test]
fn pointers_say_what_they_are() {
    driver();
    let address = alloc(1000);
    let kind = |attribute: u32, address: u64| {
        let mut value = 0_u64;
        // SAFETY: 8 bytes hold any of these attributes.
        let status = unsafe {
            api::cuPointerGetAttribute(
                Out::new((&raw mut value).cast()),
                attribute,
                CUdeviceptr(address),
            )
        };
        status.ok().map(|()| value)
    };
    let (memory_type, start, size, ordinal) = (2, 11, 12, 9);
    assert_eq!(kind(memory_type, address.0 + 10), Ok(2));
    assert_eq!(kind(start, address.0 + 10), Ok(address.0));
    assert_eq!(kind(size, address.0), Ok(1000));
    assert_eq!(kind(ordinal, address.0), Ok(0));
    assert_eq!(
        kind(memory_type, 0x1000),
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    );
    free(address);
}
