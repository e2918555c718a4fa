//! Structures that entry points take by pointer or by value. Field names are the API's own.
//!
//! Sizes are asserted against the x86-64 ABI of the CUDA 13.5 header. What nobody here looks into
//! is opaque.

#![allow(non_snake_case, reason = "the API's own field names")]

use core::ffi::{c_char, c_void};

use crate::*;

macro_rules! structs {
    ($($name:ident [$size:literal] { $($field:ident: $ty:ty,)* })*) => {$(
        #[doc = concat!("`", stringify!($name), "` of the driver API.")]
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub struct $name { $(#[doc = concat!("`", stringify!($field), "`.")] pub $field: $ty,)* }

        const _: () = assert!(size_of::<$name>() == $size);

        impl Default for $name {
            fn default() -> Self {
                // SAFETY: every field is an integer, a raw pointer, a handle or an array of those;
                // zero is valid for each.
                unsafe { core::mem::zeroed() }
            }
        }
    )*};
}

structs! {
    CUDA_MEMCPY2D [128] {
        srcXInBytes: usize, srcY: usize, srcMemoryType: CUmemorytype, srcHost: *const c_void, srcDevice: CUdeviceptr,
        srcArray: CUarray, srcPitch: usize, dstXInBytes: usize, dstY: usize, dstMemoryType: CUmemorytype,
        dstHost: *mut c_void, dstDevice: CUdeviceptr, dstArray: CUarray, dstPitch: usize, WidthInBytes: usize,
        Height: usize,
    }
    CUDA_MEMCPY3D [200] {
        srcXInBytes: usize, srcY: usize, srcZ: usize, srcLOD: usize, srcMemoryType: CUmemorytype,
        srcHost: *const c_void, srcDevice: CUdeviceptr, srcArray: CUarray, reserved0: *mut c_void, srcPitch: usize,
        srcHeight: usize, dstXInBytes: usize, dstY: usize, dstZ: usize, dstLOD: usize, dstMemoryType: CUmemorytype,
        dstHost: *mut c_void, dstDevice: CUdeviceptr, dstArray: CUarray, reserved1: *mut c_void, dstPitch: usize,
        dstHeight: usize, WidthInBytes: usize, Height: usize, Depth: usize,
    }
    CUDA_MEMCPY3D_PEER [200] {
        srcXInBytes: usize, srcY: usize, srcZ: usize, srcLOD: usize, srcMemoryType: CUmemorytype,
        srcHost: *const c_void, srcDevice: CUdeviceptr, srcArray: CUarray, srcContext: CUcontext, srcPitch: usize,
        srcHeight: usize, dstXInBytes: usize, dstY: usize, dstZ: usize, dstLOD: usize, dstMemoryType: CUmemorytype,
        dstHost: *mut c_void, dstDevice: CUdeviceptr, dstArray: CUarray, dstContext: CUcontext, dstPitch: usize,
        dstHeight: usize, WidthInBytes: usize, Height: usize, Depth: usize,
    }
    CUmemLocation [8] { r#type: CUmemLocationType, id: i32, }
    CUmemAllocFlags [8] {
        compressionType: u8, gpuDirectRDMACapable: u8, usage: u16, reserved: [u8; 4],
    }
    CUmemAllocationProp [32] {
        r#type: CUmemAllocationType, requestedHandleTypes: CUmemAllocationHandleType, location: CUmemLocation,
        win32HandleMetaData: *mut c_void, allocFlags: CUmemAllocFlags,
    }
    CUmemAccessDesc [12] { location: CUmemLocation, flags: CUmemAccess_flags, }
    CUmemPoolProps [88] {
        allocType: CUmemAllocationType, handleTypes: CUmemAllocationHandleType, location: CUmemLocation,
        win32SecurityAttributes: *mut c_void, maxSize: usize, usage: u16, gpuDirectRDMACapable: u8,
        reserved_a: [u8; 21], reserved_b: [u8; 32],
    }
    CUmemPoolPtrExportData [64] { reserved: [u64; 8], }
    CUDA_ARRAY_DESCRIPTOR [24] { Width: usize, Height: usize, Format: CUarray_format, NumChannels: u32, }
    CUDA_ARRAY_DESCRIPTOR_v1 [16] { Width: u32, Height: u32, Format: CUarray_format, NumChannels: u32, }
    CUDA_ARRAY3D_DESCRIPTOR [40] {
        Width: usize, Height: usize, Depth: usize, Format: CUarray_format, NumChannels: u32, Flags: u32,
        padding: u32,
    }
    CUDA_ARRAY3D_DESCRIPTOR_v1 [24] {
        Width: u32, Height: u32, Depth: u32, Format: CUarray_format, NumChannels: u32, Flags: u32,
    }
    CUDA_ARRAY_MEMORY_REQUIREMENTS [32] { size: usize, alignment: usize, reserved: [u32; 4], }
    CUDA_KERNEL_NODE_PARAMS_v1 [56] {
        func: CUfunction, gridDimX: u32, gridDimY: u32, gridDimZ: u32, blockDimX: u32, blockDimY: u32,
        blockDimZ: u32, sharedMemBytes: u32, kernelParams: *mut *mut c_void, extra: *mut *mut c_void,
    }
    CUDA_KERNEL_NODE_PARAMS [72] {
        func: CUfunction, gridDimX: u32, gridDimY: u32, gridDimZ: u32, blockDimX: u32, blockDimY: u32,
        blockDimZ: u32, sharedMemBytes: u32, kernelParams: *mut *mut c_void, extra: *mut *mut c_void,
        kern: CUkernel, ctx: CUcontext,
    }
    CUDA_MEMSET_NODE_PARAMS [40] {
        dst: CUdeviceptr, pitch: usize, value: u32, elementSize: u32, width: usize, height: usize,
    }
    CUDA_HOST_NODE_PARAMS [16] { func: CUhostFn, userData: *mut c_void, }
    CUDA_MEM_ALLOC_NODE_PARAMS [120] {
        poolProps: CUmemPoolProps, accessDescs: *const CUmemAccessDesc, accessDescCount: usize, bytesize: usize,
        dptr: CUdeviceptr,
    }
    CUlaunchAttribute [72] { id: CUlaunchAttributeID, padding: u32, value: [u64; 8], }
    CUlaunchConfig [56] {
        gridDimX: u32, gridDimY: u32, gridDimZ: u32, blockDimX: u32, blockDimY: u32, blockDimZ: u32,
        sharedMemBytes: u32, hStream: CUstream, attrs: *mut CUlaunchAttribute, numAttrs: u32,
    }
    CUDA_LAUNCH_PARAMS [56] {
        function: CUfunction, gridDimX: u32, gridDimY: u32, gridDimZ: u32, blockDimX: u32, blockDimY: u32,
        blockDimZ: u32, sharedMemBytes: u32, hStream: CUstream, kernelParams: *mut *mut c_void,
    }
    CUDA_GRAPH_INSTANTIATE_PARAMS [32] {
        flags: u64, hUploadStream: CUstream, hErrNode_out: CUgraphNode, result_out: CUgraphInstantiateResult,
    }
    CUgraphEdgeData [8] { from_port: u8, to_port: u8, r#type: u8, reserved: [u8; 5], }
    CUgraphExecUpdateResultInfo [24] {
        result: CUgraphExecUpdateResult, errorNode: CUgraphNode, errorFromNode: CUgraphNode,
    }
    CUgraphNodeParams [256] {
        r#type: CUgraphNodeType, reserved0: [i32; 3], payload: [u64; 29], reserved2: i64,
    }
    CUdevprop [56] {
        maxThreadsPerBlock: i32, maxThreadsDim: [i32; 3], maxGridSize: [i32; 3], sharedMemPerBlock: i32,
        totalConstantMemory: i32, SIMDWidth: i32, memPitch: i32, regsPerBlock: i32, clockRate: i32, textureAlign: i32,
    }
    CUmemcpyAttributes [24] {
        srcAccessOrder: CUmemcpySrcAccessOrder, srcLocHint: CUmemLocation, dstLocHint: CUmemLocation, flags: u32,
    }
    CUmulticastObjectProp [32] { numDevices: u32, size: usize, handleTypes: u64, flags: u64, }
    CUstreamBatchMemOpParams [48] { operation: CUstreamBatchMemOpType, payload: [u64; 5], }
    CUctxCreateParams [24] {
        execAffinityParams: *mut CUexecAffinityParam, numExecAffinityParams: i32, cigParams: *mut c_void,
    }
    CUexecAffinityParam [8] { r#type: CUexecAffinityType, smCount: u32, }
    CUipcMemHandle [64] { reserved: [c_char_64; 64], }
    CUipcEventHandle [64] { reserved: [c_char_64; 64], }
    CUuuid [16] { bytes: [u8; 16], }
    CUDA_RESOURCE_DESC [144] { resType: CUresourcetype, payload: [u64; 16], flags: u32, }
    CUDA_MEMCPY3D_BATCH_OP [112] { payload: [u64; 14], }
}

// CAST: `char` is signed on this ABI; the alias keeps the tables above readable.
#[allow(non_camel_case_types, reason = "rate alias of a C type")]
type c_char_64 = c_char;

macro_rules! opaque {
    ($($name:ident)*) => {$(
        #[doc = concat!("`", stringify!($name), "`: only ever passed on by pointer.")]
        #[repr(C)]
        #[derive(Debug)]
        pub struct $name { _opaque: [u8; 0] }
    )*};
}

opaque! {
    CUDA_ARRAY_SPARSE_PROPERTIES CUDA_BATCH_MEM_OP_NODE_PARAMS CUDA_EXTERNAL_MEMORY_BUFFER_DESC
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC CUDA_EXTERNAL_MEMORY_MIPMAPPED_ARRAY_DESC CUDA_EXTERNAL_SEMAPHORE_HANDLE_DESC
    CUDA_EXTERNAL_SEMAPHORE_SIGNAL_PARAMS CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS CUDA_EXT_SEM_SIGNAL_NODE_PARAMS
    CUDA_EXT_SEM_WAIT_NODE_PARAMS CUDA_FABRIC_COPY_BATCH_OP CUDA_MEMCPY2D_v1 CUDA_MEMCPY3D_v1 CUDA_RESOURCE_VIEW_DESC
    CUDA_TEXTURE_DESC CU_DEV_SM_RESOURCE_GROUP_PARAMS CUarrayMapInfo CUcheckpointCheckpointArgs CUcheckpointLockArgs
    CUcheckpointRestoreArgs CUcheckpointUnlockArgs CUcliqueInfo CUdevResource CUkernelNodeAttrValue
    CUlogicalEndpointProp CUmemDecompressParams CUstreamAttrValue CUstreamCigCaptureParams CUtensorMap
}
