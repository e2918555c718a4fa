"""NVIDIA's cuda-bindings over the driver API: every noun of it, with answers that are known."""

import ctypes

import numpy as np
import pytest
from conftest import PTX, check, status
from cuda.bindings import driver

RESULT = driver.CUresult
MIB = 1 << 20


def location(kind, number=0):
    made = driver.CUmemLocation()
    made.type, made.id = kind, number
    return made


def pool_props(**more):
    made = driver.CUmemPoolProps()
    made.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location = location(driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
    for key, value in more.items():
        setattr(made, key, value)
    return made


def download(address, count, kind=np.uint8):
    data = np.zeros(count, kind)
    check(driver.cuMemcpyDtoH(data.ctypes.data, address, data.nbytes))
    return data


def upload(address, data):
    check(driver.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))


def test_a_device_has_a_name_memory_and_attributes(context):
    device = check(driver.cuCtxGetDevice())
    name = check(driver.cuDeviceGetName(100, device))
    assert name.strip(b"\0")
    assert check(driver.cuDeviceTotalMem(device)) >= check(driver.cuMemGetInfo())[0]
    attribute = driver.CUdevice_attribute
    assert check(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_WARP_SIZE, device)) == 32
    assert check(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)) > 0
    assert len(check(driver.cuDeviceGetUuid(device)).bytes) == 16
    assert status(driver.cuDeviceGet(99)) == RESULT.CUDA_ERROR_INVALID_DEVICE


def test_every_attribute_is_answered(context):
    device = check(driver.cuCtxGetDevice())
    for attribute in driver.CUdevice_attribute:
        if attribute != driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX:
            assert status(driver.cuDeviceGetAttribute(attribute, device)) == RESULT.CUDA_SUCCESS, attribute


@pytest.mark.parametrize("code", [1, 2, 3, 100, 101, 201, 400, 500, 600, 700, 719, 801, 999])
def test_errors_have_names_and_texts(code):
    assert check(driver.cuGetErrorName(RESULT(code))).startswith(b"CUDA_ERROR_")
    assert check(driver.cuGetErrorString(RESULT(code)))


def test_a_context_stack_is_a_stack(context):
    device = check(driver.cuCtxGetDevice())
    other = check(driver.cuCtxCreate(None, 0, device))
    assert check(driver.cuCtxGetCurrent()) == other
    assert check(driver.cuCtxPopCurrent()) == other
    assert check(driver.cuCtxGetCurrent()) == context
    check(driver.cuCtxPushCurrent(other))
    check(driver.cuCtxDestroy(other))
    assert check(driver.cuCtxGetCurrent()) == context


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_limits_are_kept(context, limit):
    which = driver.CUlimit(limit)
    before = check(driver.cuCtxGetLimit(which))
    check(driver.cuCtxSetLimit(which, 2 * before))
    assert check(driver.cuCtxGetLimit(which)) == 2 * before
    check(driver.cuCtxSetLimit(which, before))


@pytest.mark.parametrize("count", [1, 511, 4096, MIB + 3])
def test_bytes_survive_a_round_trip(context, count):
    address = check(driver.cuMemAlloc(count))
    data = np.random.default_rng(count).integers(0, 256, count, np.uint8)
    upload(address, data)
    assert (download(address, count) == data).all()
    base, size = check(driver.cuMemGetAddressRange(int(address) + count - 1))
    assert (int(base), size) == (int(address), count)
    check(driver.cuMemFree(address))
    assert status(driver.cuMemFree(address)) == RESULT.CUDA_ERROR_INVALID_VALUE


@pytest.mark.parametrize("name,kind,value", [("D8", np.uint8, 0x5A), ("D16", np.uint16, 0x1234), ("D32", np.uint32, 0xDEADBEEF)])
def test_fills(context, stream, name, kind, value):
    address = check(driver.cuMemAlloc(4096))
    for call, more in ((f"cuMemset{name}", ()), (f"cuMemset{name}Async", (stream,))):
        check(driver.cuMemsetD8(address, 0, 4096))
        check(getattr(driver, call)(address, value, 100, *more))
        check(driver.cuStreamSynchronize(stream))
        assert (download(address, 100, kind) == value).all()
        assert download(int(address) + 100 * np.dtype(kind).itemsize, 1)[0] == 0
    check(driver.cuMemFree(address))


@pytest.mark.parametrize("what", ["locked", "managed", "registered"])
def test_a_fill_that_the_host_sees_is_done_when_it_returns(context, what):
    own = np.zeros(MIB, np.uint8)
    if what == "locked":
        address = int(check(driver.cuMemHostAlloc(MIB, 0)))
    elif what == "managed":
        address = int(check(driver.cuMemAllocManaged(MIB, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)))
    else:
        address = own.ctypes.data
        check(driver.cuMemHostRegister(address, MIB, 0))
    for value in range(1, 100):
        check(driver.cuMemsetD8(address, value, MIB))
        assert ctypes.c_uint8.from_address(address + MIB - 1).value == value
    if what == "locked":
        check(driver.cuMemFreeHost(address))
    elif what == "managed":
        check(driver.cuMemFree(address))
    else:
        check(driver.cuMemHostUnregister(address))


def test_more_memory_than_there_is_is_refused(context):
    assert status(driver.cuMemAlloc(1 << 50)) == RESULT.CUDA_ERROR_OUT_OF_MEMORY
    assert status(driver.cuMemAlloc(0)) == RESULT.CUDA_ERROR_INVALID_VALUE
    free, total = check(driver.cuMemGetInfo())
    assert 0 < free <= total


def test_a_pitched_copy_moves_rows(context):
    address, pitch = check(driver.cuMemAllocPitch(100, 8, 4))
    assert pitch >= 100
    rows = np.arange(800, dtype=np.uint8).reshape(8, 100)
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType, copy.srcHost, copy.srcPitch = driver.CUmemorytype.CU_MEMORYTYPE_HOST, rows.ctypes.data, 100
    copy.dstMemoryType, copy.dstDevice, copy.dstPitch = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE, address, pitch
    copy.WidthInBytes, copy.Height = 100, 8
    check(driver.cuMemcpy2D(copy))
    assert (download(int(address) + 3 * pitch, 100) == rows[3]).all()
    check(driver.cuMemFree(address))


def test_pointers_say_what_they_are(context):
    attribute = driver.CUpointer_attribute
    plain = check(driver.cuMemAlloc(4096))
    locked = int(check(driver.cuMemHostAlloc(4096, 0)))
    kind = lambda address: check(driver.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address))
    assert int(kind(plain)) == int(driver.CUmemorytype.CU_MEMORYTYPE_DEVICE)
    assert int(kind(locked)) == int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)
    assert status(driver.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_CONTEXT, 4096)) == RESULT.CUDA_ERROR_INVALID_VALUE
    check(driver.cuMemFree(plain))
    check(driver.cuMemFreeHost(locked))


def test_advice_for_managed_memory_is_given_back(context):
    address = check(driver.cuMemAllocManaged(MIB, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL))
    advise = driver.CUmem_advise.CU_MEM_ADVISE_SET_READ_MOSTLY
    check(driver.cuMemAdvise(address, MIB, advise, location(driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)))
    which = driver.CUmem_range_attribute.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY
    assert check(driver.cuMemRangeGetAttribute(4, which, address, MIB)) == 1
    check(driver.cuMemFree(address))


def test_physical_memory_is_mapped_unmapped_and_mapped_again(context):
    props = driver.CUmemAllocationProp()
    props.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.location = location(driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
    granule = check(driver.cuMemGetAllocationGranularity(props, driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM))
    address = check(driver.cuMemAddressReserve(2 * granule, 0, 0, 0))
    handle = check(driver.cuMemCreate(granule, props, 0))
    access = driver.CUmemAccessDesc()
    access.location = props.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    for offset in (0, granule):
        at = int(address) + offset
        check(driver.cuMemMap(at, granule, 0, handle, 0))
        assert status(driver.cuMemsetD8(at, 1, 4)) != RESULT.CUDA_SUCCESS
        check(driver.cuMemSetAccess(at, granule, [access], 1))
        if offset == 0:
            check(driver.cuMemsetD32(at, 77, 16))
        assert (download(at, 16, np.uint32) == 77).all()
        check(driver.cuMemUnmap(at, granule))
    check(driver.cuMemRelease(handle))
    check(driver.cuMemAddressFree(address, 2 * granule))


@pytest.mark.parametrize("bound", [0, 2048, 64 * MIB])
def test_a_pool_gives_takes_back_and_counts(context, stream, bound):
    pool = check(driver.cuMemPoolCreate(pool_props(maxSize=bound)))
    first = check(driver.cuMemAllocFromPoolAsync(2048, pool, stream))
    check(driver.cuMemsetD8Async(first, 3, 2048, stream))
    used = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
    assert int(check(driver.cuMemPoolGetAttribute(pool, used))) >= 2048
    check(driver.cuMemFreeAsync(first, stream))
    check(driver.cuStreamSynchronize(stream))
    assert int(check(driver.cuMemPoolGetAttribute(pool, used))) == 0
    check(driver.cuMemPoolTrimTo(pool, 0))
    check(driver.cuMemPoolDestroy(pool))


def test_a_pool_is_handed_on_by_descriptor(context, stream):
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    pool = check(driver.cuMemPoolCreate(pool_props(handleTypes=kind)))
    address = check(driver.cuMemAllocFromPoolAsync(4096, pool, stream))
    check(driver.cuStreamSynchronize(stream))
    file = check(driver.cuMemPoolExportToShareableHandle(pool, kind, 0))
    received = check(driver.cuMemPoolImportFromShareableHandle(int(file), kind, 0))
    assert status(driver.cuMemAllocFromPoolAsync(4096, received, stream)) == RESULT.CUDA_ERROR_INVALID_VALUE
    check(driver.cuMemPoolExportPointer(address))
    check(driver.cuMemPoolDestroy(received))
    check(driver.cuMemFreeAsync(address, stream))
    check(driver.cuMemPoolDestroy(pool))


def test_events_are_reached_in_order_and_measure_time(context, stream, module):
    busy = check(driver.cuModuleGetFunction(module, b"sublet_busy_us"))
    first, last = check(driver.cuEventCreate(0)), check(driver.cuEventCreate(0))
    check(driver.cuEventRecord(first, stream))
    check(driver.cuLaunchKernel(busy, 1, 1, 1, 1, 1, 1, 0, stream, ((2000,), (ctypes.c_uint64,)), 0))
    check(driver.cuEventRecord(last, stream))
    check(driver.cuEventSynchronize(last))
    assert check(driver.cuEventQuery(first)) is None
    assert check(driver.cuEventElapsedTime(first, last)) >= 2
    check(driver.cuEventDestroy(first))
    check(driver.cuEventDestroy(last))


def test_streams_have_priorities_flags_and_wait_for_values(context, stream):
    least, greatest = check(driver.cuCtxGetStreamPriorityRange())
    urgent = check(driver.cuStreamCreateWithPriority(1, greatest))
    assert check(driver.cuStreamGetPriority(urgent)) == greatest <= least
    word = check(driver.cuMemAlloc(4))
    check(driver.cuMemsetD32(word, 0, 1))
    check(driver.cuStreamWaitValue32(stream, word, 5, driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ))
    assert status(driver.cuStreamQuery(stream)) == RESULT.CUDA_ERROR_NOT_READY
    check(driver.cuStreamWriteValue32(urgent, word, 5, 0))
    check(driver.cuStreamSynchronize(stream))
    check(driver.cuStreamDestroy(urgent))
    check(driver.cuMemFree(word))


@pytest.mark.parametrize("blocks", [1, 4])
def test_a_kernel_is_launched_with_its_arguments(context, stream, module, blocks):
    fill = check(driver.cuModuleGetFunction(module, b"sublet_fill_f32"))
    address = check(driver.cuMemAlloc(64))
    arguments = ((address, 2.5, 16), (None, ctypes.c_float, ctypes.c_uint64))
    check(driver.cuLaunchKernel(fill, blocks, 1, 1, 32, 1, 1, 0, stream, arguments, 0))
    check(driver.cuStreamSynchronize(stream))
    assert (download(address, 16, np.float32) == 2.5).all()
    check(driver.cuMemFree(address))


def test_kernels_have_parameters_attributes_and_occupancy(context, module):
    other = check(driver.cuModuleGetFunction(module, b"other"))
    assert check(driver.cuFuncGetParamInfo(other, 0)) == (0, 4)
    assert check(driver.cuFuncGetParamInfo(other, 1)) == (8, 8)
    assert status(driver.cuFuncGetParamInfo(other, 2)) == RESULT.CUDA_ERROR_INVALID_VALUE
    which = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
    assert check(driver.cuFuncGetAttribute(which, other)) == 128
    assert check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(other, 128, 0)) >= 1
    assert check(driver.cuFuncGetName(other)) == b"other"
    assert status(driver.cuFuncGetName(0)) == RESULT.CUDA_ERROR_INVALID_VALUE
    assert status(driver.cuModuleGetFunction(module, b"none")) == RESULT.CUDA_ERROR_NOT_FOUND
    assert status(driver.cuLaunchKernel(other, 1, 1, 1, 256, 1, 1, 0, 0, ((1, 2), (ctypes.c_int, ctypes.c_uint64)), 0)) != RESULT.CUDA_SUCCESS


def test_globals_of_a_module_have_their_first_value(context, module):
    address, size = check(driver.cuModuleGetGlobal(module, b"answer"))
    assert size == 4
    assert download(address, 1, np.uint32)[0] == 42


def test_a_library_has_kernels_in_every_context(context):
    library = check(driver.cuLibraryLoadData(PTX, None, None, 0, None, None, 0))
    kernel = check(driver.cuLibraryGetKernel(library, b"other"))
    assert check(driver.cuKernelGetParamInfo(kernel, 1)) == (8, 8)
    assert int(check(driver.cuKernelGetFunction(kernel))) != 0
    assert check(driver.cuLibraryGetKernelCount(library)) == 3
    check(driver.cuLibraryUnload(library))


@pytest.mark.parametrize("image,error", [(b"hello", "CUDA_ERROR_INVALID_IMAGE"), (b".version 7.8\n.target sm_80\n.entry x(", "CUDA_ERROR_INVALID_PTX"),
                                         (b".version 8.6\n.target sm_999\n.entry x() { ret; }", "CUDA_ERROR_NO_BINARY_FOR_GPU")])
def test_what_is_no_module_is_refused(context, image, error):
    assert status(driver.cuModuleLoadData(image)).name == error


def test_a_capture_becomes_a_graph_that_runs_again(context, stream):
    address = check(driver.cuMemAlloc(64))
    check(driver.cuMemsetD8(address, 0, 64))
    check(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    check(driver.cuMemsetD32Async(address, 9, 8, stream))
    assert status(driver.cuStreamSynchronize(stream)) == RESULT.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    assert status(driver.cuStreamEndCapture(stream)) == RESULT.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    check(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    check(driver.cuMemsetD32Async(address, 9, 8, stream))
    graph = check(driver.cuStreamEndCapture(stream))
    assert check(driver.cuGraphGetNodes(graph, 0))[1] == 1
    run = check(driver.cuGraphInstantiate(graph, 0))
    for _ in range(2):
        check(driver.cuMemsetD8(address, 0, 64))
        check(driver.cuGraphLaunch(run, stream))
        check(driver.cuStreamSynchronize(stream))
        assert (download(address, 8, np.uint32) == 9).all()
    check(driver.cuGraphExecDestroy(run))
    check(driver.cuGraphDestroy(graph))
    check(driver.cuMemFree(address))


def test_a_graph_is_built_node_by_node(context, stream):
    address = check(driver.cuMemAlloc(64))
    graph = check(driver.cuGraphCreate(0))
    fill = driver.CUDA_MEMSET_NODE_PARAMS()
    fill.dst, fill.value, fill.elementSize, fill.width, fill.height = address, 3, 4, 16, 1
    first = check(driver.cuGraphAddMemsetNode(graph, None, 0, fill, context))
    last = check(driver.cuGraphAddEmptyNode(graph, [first], 1))
    assert check(driver.cuGraphNodeGetType(last)) == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_EMPTY
    run = check(driver.cuGraphInstantiate(graph, 0))
    check(driver.cuGraphLaunch(run, stream))
    check(driver.cuStreamSynchronize(stream))
    assert (download(address, 16, np.uint32) == 3).all()
    fill.value = 4
    check(driver.cuGraphExecMemsetNodeSetParams(run, first, fill, context))
    check(driver.cuGraphLaunch(run, stream))
    check(driver.cuStreamSynchronize(stream))
    assert (download(address, 16, np.uint32) == 4).all()
    check(driver.cuGraphExecDestroy(run))
    check(driver.cuGraphDestroy(graph))
    check(driver.cuMemFree(address))


@pytest.mark.parametrize("default", [0, 1, 2])
def test_a_conditional_node_runs_the_body_of_its_value(context, stream, default):
    address = check(driver.cuMemAlloc(4))
    check(driver.cuMemsetD32(address, 99, 1))
    graph = check(driver.cuGraphCreate(0))
    assign = driver.CU_GRAPH_COND_ASSIGN_DEFAULT
    handle = check(driver.cuGraphConditionalHandleCreate(graph, context, default, assign))
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle, params.conditional.ctx = handle, context
    params.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_SWITCH
    params.conditional.size = 2
    check(driver.cuGraphAddNode(graph, None, None, 0, params))
    for number, body in enumerate(params.conditional.phGraph_out):
        fill = driver.CUDA_MEMSET_NODE_PARAMS()
        fill.dst, fill.value, fill.elementSize, fill.width, fill.height = address, number, 4, 1, 1
        check(driver.cuGraphAddMemsetNode(body, None, 0, fill, context))
    run = check(driver.cuGraphInstantiate(graph, 0))
    check(driver.cuGraphLaunch(run, stream))
    check(driver.cuStreamSynchronize(stream))
    assert download(address, 1, np.uint32)[0] == {0: 0, 1: 1, 2: 99}[default]
    check(driver.cuGraphExecDestroy(run))
    check(driver.cuGraphDestroy(graph))
    check(driver.cuMemFree(address))


def test_memory_handles_of_this_process_are_not_opened_in_it(context):
    address = check(driver.cuMemAlloc(MIB))
    handle = check(driver.cuIpcGetMemHandle(address))
    assert status(driver.cuIpcOpenMemHandle(handle, 1)) != RESULT.CUDA_SUCCESS
    check(driver.cuMemFree(address))


def test_core_dump_settings_are_given_back(context):
    which = driver.CUcoredumpSettings.CU_COREDUMP_FILE
    check(driver.cuCoredumpSetAttributeGlobal(which, b"corefile"))
    assert check(driver.cuCoredumpGetAttributeGlobal(which)) == b"corefile"


def test_a_green_context_has_its_part(context):
    sm = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    device = check(driver.cuCtxGetDevice())
    whole = check(driver.cuDeviceGetDevResource(device, sm))
    parts, count, rest = check(driver.cuDevSmResourceSplitByCount(2, whole, 0, 16))
    assert (count, parts[0].sm.smCount) == (2, 16)
    assert rest.sm.smCount == whole.sm.smCount - 32
    made = check(driver.cuDevResourceGenerateDesc([parts[0]], 1))
    green = check(driver.cuGreenCtxCreate(made, device, driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM))
    assert check(driver.cuGreenCtxGetDevResource(green, sm)).sm.smCount == 16
    assert int(check(driver.cuCtxFromGreenCtx(green))) != 0
    check(driver.cuGreenCtxDestroy(green))
    check(driver.cuCtxSetCurrent(context))


def test_symbols_are_found_by_version(context):
    found = check(driver.cuGetProcAddress(b"cuMemAlloc", 12000, 0))
    assert int(found[0]) != 0
    _, none, what = driver.cuGetProcAddress(b"cuNoSuchThing", 12000, 0)
    assert not none
    assert what == driver.CUdriverProcAddressQueryResult.CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
