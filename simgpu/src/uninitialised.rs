//! What a driver that is not initialised answers: that, but for functions that look at their first
//! argument before. Read off a real driver by `scripts/real-driver`.

use shim_ffi::{CUresult, Symbol};

/// What `symbol` answers before `cuInit` and after one that has failed.
pub fn answer(symbol: Symbol, first_is_zero: bool) -> CUresult {
    if UNSUPPORTED.contains(&symbol) {
        CUresult::CUDA_ERROR_NOT_SUPPORTED
    } else if first_is_zero && VALUES.contains(&symbol) {
        CUresult::CUDA_ERROR_INVALID_VALUE
    } else if first_is_zero && HANDLES.contains(&symbol) {
        CUresult::CUDA_ERROR_INVALID_HANDLE
    } else {
        CUresult::CUDA_ERROR_NOT_INITIALIZED
    }
}

/// They are nothing else, initialised or not.
const UNSUPPORTED: &[Symbol] = &[
    Symbol::cuMemGetAttribute,
    Symbol::cuMemGetAttribute_v2,
    Symbol::cuProfilerInitialize,
];

/// Their first argument must not be null.
const VALUES: &[Symbol] = &[
    Symbol::cuArrayGetMemoryRequirements,
    Symbol::cuArrayGetSparseProperties,
    Symbol::cuCoredumpGetAttribute,
    Symbol::cuCoredumpGetAttributeGlobal,
    Symbol::cuCoredumpSetAttribute,
    Symbol::cuCoredumpSetAttributeGlobal,
    Symbol::cuCtxDestroy,
    Symbol::cuCtxDestroy_v2,
    Symbol::cuCtxFromGreenCtx,
    Symbol::cuCtxGetDevResource,
    Symbol::cuCtxGetFlags,
    Symbol::cuCtxGetId,
    Symbol::cuDevResourceGenerateDesc,
    Symbol::cuDeviceGetAttribute,
    Symbol::cuDevicePrimaryCtxGetState,
    Symbol::cuFuncGetAttribute,
    Symbol::cuFuncGetName,
    Symbol::cuFuncGetParamInfo,
    Symbol::cuFuncIsLoaded,
    Symbol::cuGraphAddBatchMemOpNode,
    Symbol::cuGraphAddDependencies,
    Symbol::cuGraphAddDependencies_v2,
    Symbol::cuGraphAddEmptyNode,
    Symbol::cuGraphAddEventRecordNode,
    Symbol::cuGraphAddEventWaitNode,
    Symbol::cuGraphAddExternalSemaphoresSignalNode,
    Symbol::cuGraphAddExternalSemaphoresWaitNode,
    Symbol::cuGraphAddHostNode,
    Symbol::cuGraphAddNode,
    Symbol::cuGraphAddNode_v2,
    Symbol::cuGraphBatchMemOpNodeGetParams,
    Symbol::cuGraphBatchMemOpNodeSetParams,
    Symbol::cuGraphConditionalHandleCreate,
    Symbol::cuGraphDebugDotPrint,
    Symbol::cuGraphEventRecordNodeGetEvent,
    Symbol::cuGraphEventRecordNodeSetEvent,
    Symbol::cuGraphEventWaitNodeGetEvent,
    Symbol::cuGraphEventWaitNodeSetEvent,
    Symbol::cuGraphExecBatchMemOpNodeSetParams,
    Symbol::cuGraphExecChildGraphNodeSetParams,
    Symbol::cuGraphExecEventRecordNodeSetEvent,
    Symbol::cuGraphExecEventWaitNodeSetEvent,
    Symbol::cuGraphExecExternalSemaphoresSignalNodeSetParams,
    Symbol::cuGraphExecExternalSemaphoresWaitNodeSetParams,
    Symbol::cuGraphExecHostNodeSetParams,
    Symbol::cuGraphExecKernelNodeSetParams,
    Symbol::cuGraphExecKernelNodeSetParams_v2,
    Symbol::cuGraphExecMemcpyNodeSetParams,
    Symbol::cuGraphExecMemsetNodeSetParams,
    Symbol::cuGraphExecNodeSetParams,
    Symbol::cuGraphExternalSemaphoresSignalNodeGetParams,
    Symbol::cuGraphExternalSemaphoresSignalNodeSetParams,
    Symbol::cuGraphExternalSemaphoresWaitNodeGetParams,
    Symbol::cuGraphExternalSemaphoresWaitNodeSetParams,
    Symbol::cuGraphHostNodeGetParams,
    Symbol::cuGraphHostNodeSetParams,
    Symbol::cuGraphInstantiateWithParams,
    Symbol::cuGraphInstantiateWithParams_ptsz,
    Symbol::cuGraphKernelNodeGetParams,
    Symbol::cuGraphKernelNodeGetParams_v2,
    Symbol::cuGraphKernelNodeSetParams,
    Symbol::cuGraphKernelNodeSetParams_v2,
    Symbol::cuGraphMemAllocNodeGetParams,
    Symbol::cuGraphMemFreeNodeGetParams,
    Symbol::cuGraphMemcpyNodeSetParams,
    Symbol::cuGraphMemsetNodeSetParams,
    Symbol::cuGraphNodeGetEnabled,
    Symbol::cuGraphNodeSetEnabled,
    Symbol::cuGraphNodeSetParams,
    Symbol::cuGraphReleaseUserObject,
    Symbol::cuGraphRemoveDependencies,
    Symbol::cuGraphRemoveDependencies_v2,
    Symbol::cuGraphRetainUserObject,
    Symbol::cuGreenCtxGetDevResource,
    Symbol::cuIpcGetEventHandle,
    Symbol::cuIpcGetMemHandle,
    Symbol::cuIpcOpenEventHandle,
    Symbol::cuIpcOpenMemHandle,
    Symbol::cuIpcOpenMemHandle_v2,
    Symbol::cuKernelGetFunction,
    Symbol::cuKernelGetName,
    Symbol::cuKernelGetParamInfo,
    Symbol::cuLaunchKernelEx,
    Symbol::cuLaunchKernelEx_ptsz,
    Symbol::cuLibraryEnumerateKernels,
    Symbol::cuLibraryGetGlobal,
    Symbol::cuLibraryGetKernel,
    Symbol::cuLibraryGetKernelCount,
    Symbol::cuLibraryGetManaged,
    Symbol::cuLibraryGetModule,
    Symbol::cuLibraryLoadData,
    Symbol::cuLibraryLoadFromFile,
    Symbol::cuMemAdvise_v2,
    Symbol::cuMemAllocManaged,
    Symbol::cuMemGetHandleForAddressRange,
    Symbol::cuMemHostGetFlags,
    Symbol::cuMemMapArrayAsync,
    Symbol::cuMemMapArrayAsync_ptsz,
    Symbol::cuMemPrefetchAsync_v2,
    Symbol::cuMemPrefetchAsync_v2_ptsz,
    Symbol::cuMipmappedArrayGetMemoryRequirements,
    Symbol::cuMipmappedArrayGetSparseProperties,
    Symbol::cuModuleEnumerateFunctions,
    Symbol::cuModuleGetFunctionCount,
    Symbol::cuOccupancyMaxActiveClusters,
    Symbol::cuOccupancyMaxPotentialClusterSize,
    Symbol::cuStreamBeginCaptureToGraph,
    Symbol::cuStreamBeginCaptureToGraph_ptsz,
    Symbol::cuStreamCreate,
    Symbol::cuStreamCreateWithPriority,
    Symbol::cuStreamGetCaptureInfo,
    Symbol::cuStreamGetCaptureInfo_ptsz,
    Symbol::cuStreamGetCaptureInfo_v2,
    Symbol::cuStreamGetCaptureInfo_v2_ptsz,
    Symbol::cuStreamGetCaptureInfo_v3,
    Symbol::cuStreamGetCaptureInfo_v3_ptsz,
    Symbol::cuStreamGetCtx,
    Symbol::cuStreamGetCtx_ptsz,
    Symbol::cuStreamGetFlags,
    Symbol::cuStreamGetFlags_ptsz,
    Symbol::cuStreamGetGreenCtx,
    Symbol::cuStreamGetId,
    Symbol::cuStreamGetId_ptsz,
    Symbol::cuStreamGetPriority,
    Symbol::cuStreamGetPriority_ptsz,
    Symbol::cuStreamIsCapturing,
    Symbol::cuStreamIsCapturing_ptsz,
    Symbol::cuUserObjectCreate,
    Symbol::cuUserObjectRelease,
    Symbol::cuUserObjectRetain,
];

/// Their first argument is a handle, and null is none.
const HANDLES: &[Symbol] = &[
    Symbol::cuArray3DGetDescriptor,
    Symbol::cuArray3DGetDescriptor_v2,
    Symbol::cuArrayGetDescriptor,
    Symbol::cuArrayGetDescriptor_v2,
    Symbol::cuArrayGetPlane,
    Symbol::cuEGLStreamConsumerAcquireFrame,
    Symbol::cuEGLStreamConsumerConnect,
    Symbol::cuEGLStreamConsumerConnectWithFlags,
    Symbol::cuEGLStreamConsumerDisconnect,
    Symbol::cuEGLStreamConsumerReleaseFrame,
    Symbol::cuEGLStreamProducerConnect,
    Symbol::cuEGLStreamProducerDisconnect,
    Symbol::cuEGLStreamProducerPresentFrame,
    Symbol::cuEGLStreamProducerReturnFrame,
    Symbol::cuEventDestroy,
    Symbol::cuEventDestroy_v2,
    Symbol::cuEventElapsedTime,
    Symbol::cuEventQuery,
    Symbol::cuEventSynchronize,
    Symbol::cuFuncLoad,
    Symbol::cuLibraryUnload,
    Symbol::cuLinkAddData,
    Symbol::cuLinkAddData_v2,
    Symbol::cuLinkAddFile,
    Symbol::cuLinkAddFile_v2,
    Symbol::cuLinkComplete,
    Symbol::cuLinkDestroy,
    Symbol::cuMipmappedArrayGetLevel,
    Symbol::cuStreamDestroy,
    Symbol::cuStreamDestroy_v2,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_null_pointer_is_seen_before_the_driver_is_initialised_where_real_drivers_see_it() {
        for (symbol, zero, answered) in [
            (
                Symbol::cuMemAlloc_v2,
                true,
                CUresult::CUDA_ERROR_NOT_INITIALIZED,
            ),
            (
                Symbol::cuDeviceGetAttribute,
                true,
                CUresult::CUDA_ERROR_INVALID_VALUE,
            ),
            (
                Symbol::cuDeviceGetAttribute,
                false,
                CUresult::CUDA_ERROR_NOT_INITIALIZED,
            ),
            (
                Symbol::cuEventQuery,
                true,
                CUresult::CUDA_ERROR_INVALID_HANDLE,
            ),
        ] {
            assert_eq!(answer(symbol, zero), answered, "{symbol:?}");
        }
    }
}
