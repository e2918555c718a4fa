/* The driver API and NVML as this program needs them, loaded at run time: it builds without the CUDA toolkit, and whatever
 * libcuda.so.1 the dynamic linker finds (the driver, the preload library, the simulated driver) is the one that it asks.
 * Types and numbers are those of the public cuda.h and nvml.h. */
#ifndef PROBE_DRIVER_H
#define PROBE_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef void *CUcontext, *CUmodule, *CUfunction, *CUstream, *CUevent;
typedef struct {
  unsigned char bytes[16];
} CUuuid;
typedef struct {
  int type, id;
} CUmemLocation;
typedef struct {
  int type, requestedHandleTypes;
  CUmemLocation location;
  void *win32HandleMetaData;
  unsigned char allocFlags[8];
} CUmemAllocationProp;
typedef struct {
  CUmemLocation location;
  int flags;
} CUmemAccessDesc;
_Static_assert(sizeof(CUmemAllocationProp) == 32 && sizeof(CUmemAccessDesc) == 12, "layouts of cuda.h");

enum { CU_NOT_READY = 600, CU_NOT_SUPPORTED = 801 };
#define CU_STREAM_LEGACY ((CUstream)1)
#define CU_STREAM_PER_THREAD ((CUstream)2)

/* name here, exported symbol, parameters. */
#define DRIVER_FUNCTIONS(X)                                                                                                   \
  X(Init, "cuInit", (unsigned))                                                                                               \
  X(DriverGetVersion, "cuDriverGetVersion", (int *))                                                                          \
  X(GetErrorName, "cuGetErrorName", (CUresult, const char **))                                                                \
  X(DeviceGetCount, "cuDeviceGetCount", (int *))                                                                              \
  X(DeviceGet, "cuDeviceGet", (CUdevice *, int))                                                                              \
  X(DeviceGetName, "cuDeviceGetName", (char *, int, CUdevice))                                                                \
  X(DeviceGetUuid, "cuDeviceGetUuid_v2", (CUuuid *, CUdevice))                                                                \
  X(DeviceTotalMem, "cuDeviceTotalMem_v2", (size_t *, CUdevice))                                                              \
  X(DeviceGetAttribute, "cuDeviceGetAttribute", (int *, int, CUdevice))                                                       \
  X(DeviceGetPCIBusId, "cuDeviceGetPCIBusId", (char *, int, CUdevice))                                                        \
  X(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext *, CUdevice))                                              \
  X(CtxSetCurrent, "cuCtxSetCurrent", (CUcontext))                                                                            \
  X(CtxSynchronize, "cuCtxSynchronize", (void))                                                                               \
  X(ModuleLoadData, "cuModuleLoadData", (CUmodule *, const void *))                                                           \
  X(ModuleGetFunction, "cuModuleGetFunction", (CUfunction *, CUmodule, const char *))                                         \
  X(LaunchKernel, "cuLaunchKernel",                                                                                           \
    (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **))           \
  X(MemAlloc, "cuMemAlloc_v2", (CUdeviceptr *, size_t))                                                                       \
  X(MemFree, "cuMemFree_v2", (CUdeviceptr))                                                                                   \
  X(MemGetInfo, "cuMemGetInfo_v2", (size_t *, size_t *))                                                                      \
  X(MemHostAlloc, "cuMemHostAlloc", (void **, size_t, unsigned))                                                              \
  X(MemFreeHost, "cuMemFreeHost", (void *))                                                                                   \
  X(MemHostRegister, "cuMemHostRegister_v2", (void *, size_t, unsigned))                                                      \
  X(MemHostUnregister, "cuMemHostUnregister", (void *))                                                                       \
  X(MemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2", (CUdeviceptr *, void *, unsigned))                               \
  X(MemcpyDtoH, "cuMemcpyDtoH_v2", (void *, CUdeviceptr, size_t))                                                             \
  X(MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (CUdeviceptr, const void *, size_t, CUstream))                                   \
  X(MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void *, CUdeviceptr, size_t, CUstream))                                         \
  X(MemsetD8, "cuMemsetD8_v2", (CUdeviceptr, unsigned char, size_t))                                                          \
  X(StreamCreate, "cuStreamCreate", (CUstream *, unsigned))                                                                   \
  X(StreamDestroy, "cuStreamDestroy_v2", (CUstream))                                                                          \
  X(StreamSynchronize, "cuStreamSynchronize", (CUstream))                                                                     \
  X(StreamQuery, "cuStreamQuery", (CUstream))                                                                                 \
  X(StreamBeginCapture, "cuStreamBeginCapture_v2", (CUstream, int))                                                           \
  X(StreamEndCapture, "cuStreamEndCapture", (CUstream, void **))                                                              \
  X(GraphInstantiate, "cuGraphInstantiateWithFlags", (void **, void *, uint64_t))                                             \
  X(GraphLaunch, "cuGraphLaunch", (void *, CUstream))                                                                         \
  X(GraphExecDestroy, "cuGraphExecDestroy", (void *))                                                                         \
  X(GraphDestroy, "cuGraphDestroy", (void *))                                                                                 \
  X(StreamWaitValue64, "cuStreamWaitValue64_v2", (CUstream, CUdeviceptr, uint64_t, unsigned))                                 \
  X(StreamWriteValue64, "cuStreamWriteValue64_v2", (CUstream, CUdeviceptr, uint64_t, unsigned))                               \
  X(EventCreate, "cuEventCreate", (CUevent *, unsigned))                                                                      \
  X(EventRecord, "cuEventRecord", (CUevent, CUstream))                                                                        \
  X(EventSynchronize, "cuEventSynchronize", (CUevent))                                                                        \
  X(MemGetAllocationGranularity, "cuMemGetAllocationGranularity", (size_t *, const CUmemAllocationProp *, int))               \
  X(MemAddressReserve, "cuMemAddressReserve", (CUdeviceptr *, size_t, size_t, CUdeviceptr, uint64_t))                         \
  X(MemAddressFree, "cuMemAddressFree", (CUdeviceptr, size_t))                                                                \
  X(MemCreate, "cuMemCreate", (uint64_t *, size_t, const CUmemAllocationProp *, uint64_t))                                    \
  X(MemRelease, "cuMemRelease", (uint64_t))                                                                                   \
  X(MemMap, "cuMemMap", (CUdeviceptr, size_t, size_t, uint64_t, uint64_t))                                                    \
  X(MemUnmap, "cuMemUnmap", (CUdeviceptr, size_t))                                                                            \
  X(MemSetAccess, "cuMemSetAccess", (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))

struct driver {
#define X(name, symbol, parameters) CUresult(*name) parameters;
  DRIVER_FUNCTIONS(X)
#undef X
};
extern struct driver cu;

/* Loads libcuda.so.1 and finds its functions; ends the program with the reason where one is missing. */
void driver_load(void);
/* driver_load, cuInit, and the primary context of device 0 made current. */
void driver_start(void);
/* Loads the kernels of this program. */
CUfunction kernel(const char *name);
/* Ends the program, naming the call and the driver's error. */
void check(CUresult status, const char *what);
/* Ends the program with a message. */
void fail(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

/* NVML figures of device 0; -1 where NVML is missing or does not say. */
struct nvml_memory {
  double total_bytes, used_bytes, own_bytes;
};
struct nvml_memory nvml_memory(void);
/* Prints NVML's members of the device report. */
void nvml_report(void);

/* JSON on stdout: one object, members in order of the calls. */
void json_open(void);
void json_close(void);
void json_object(const char *name); /* ends with json_end */
void json_array(const char *name);  /* ends with json_end; its elements have no name */
void json_end(void);
void json_number(const char *name, double value); /* negative zero and below: as is; NaN: null */
void json_text(const char *name, const char *value);
void json_flag(const char *name, int value);
void json_list(const char *name, const double *values, size_t count);

uint64_t now_ns(void);
uint64_t cpu_ns(void);

int mode_device(int argc, char **argv);
int mode_context(int argc, char **argv);
int mode_launch(int argc, char **argv);
int mode_alloc(int argc, char **argv);
int mode_info(int argc, char **argv);
int mode_first(int argc, char **argv);
int mode_marks(int argc, char **argv);
int mode_idle_marks(int argc, char **argv);
int mode_vmm(int argc, char **argv);
int mode_pcie(int argc, char **argv);
int mode_turns(int argc, char **argv);
int mode_bursts(int argc, char **argv);
int mode_blocked(int argc, char **argv);
int mode_ahead(int argc, char **argv);
int mode_handles(int argc, char **argv);
int mode_pins(int argc, char **argv);
int mode_allocs(int argc, char **argv);
int mode_streams(int argc, char **argv);
int mode_destroyed(int argc, char **argv);
int mode_captures(int argc, char **argv);

#endif
