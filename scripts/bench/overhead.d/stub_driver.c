/* A driver that costs next to nothing: what is measured on top of it is ours.
 *
 * Only what the measuring host and the preload library need. Completion marks are "passed by the device" at once.
 * Prototypes follow the CUDA driver API; handles are numbers. */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int CUresult;
enum { OK = 0, NOT_FOUND = 500 };

CUresult cuInit(unsigned flags) { (void)flags; return OK; }
CUresult cuDriverGetVersion(int *version) { *version = 13020; return OK; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return OK; }
CUresult cuDeviceGet(int *device, int ordinal) { *device = ordinal; return OK; }
CUresult cuDeviceGetUuid(char *uuid, int device) { (void)device; memcpy(uuid, "sublet-stub-gpu", 16); return OK; }
CUresult cuDeviceGetUuid_v2(char *uuid, int device) { return cuDeviceGetUuid(uuid, device); }
CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = (size_t)80 << 30; return OK; }
CUresult cuDeviceGetName(char *name, int length, int device) { (void)device; strncpy(name, "stub", (size_t)length); return OK; }

static _Thread_local void *current = (void *)0x100;
CUresult cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = (void *)0x100; return OK; }
CUresult cuCtxSetCurrent(void *context) { current = context; return OK; }
CUresult cuCtxGetCurrent(void **context) { *context = current; return OK; }
CUresult cuCtxGetDevice(int *device) { *device = 0; return current ? OK : 201; }
CUresult cuCtxSynchronize(void) { return OK; }

CUresult cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, void *stream, void **params, void **extra) {
  (void)f, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)params, (void)extra;
  return OK;
}

/* Addresses are handed out in chunks per thread, so that the stub itself has no contended line. */
static _Atomic uint64_t next_chunk = 0x7000000000ull;
CUresult cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  static _Thread_local uint64_t at, end;
  (void)bytes;
  if (at == end) {
    at = atomic_fetch_add_explicit(&next_chunk, 1 << 20, memory_order_relaxed);
    end = at + (1 << 20);
  }
  *address = at;
  at += 512;
  return OK;
}
CUresult cuMemFree_v2(uint64_t address) { (void)address; return OK; }
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { *free_bytes = (size_t)79 << 30; *total = (size_t)80 << 30; return OK; }

CUresult cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags) { (void)p, (void)bytes, (void)flags; return OK; }
CUresult cuMemHostGetDevicePointer_v2(uint64_t *device, void *host, unsigned flags) { (void)flags; *device = (uint64_t)host; return OK; }
CUresult cuStreamWriteValue64_v2(void *stream, uint64_t address, uint64_t value, unsigned flags) {
  (void)stream, (void)flags;
  atomic_store_explicit((_Atomic uint64_t *)address, value, memory_order_release);
  return OK;
}
static _Atomic uint64_t next_stream = 0x5000000;
CUresult cuStreamCreate(void **stream, unsigned flags) {
  (void)flags;
  *stream = (void *)atomic_fetch_add_explicit(&next_stream, 64, memory_order_relaxed);
  return OK;
}
CUresult cuStreamDestroy_v2(void *stream) { (void)stream; return OK; }
CUresult cuStreamQuery(void *stream) { (void)stream; return OK; }
CUresult cuStreamSynchronize(void *stream) { (void)stream; return OK; }
CUresult cuStreamIsCapturing(void *stream, int *status) { (void)stream; *status = 0; return OK; }
CUresult cuThreadExchangeStreamCaptureMode(int *mode) { (void)mode; return OK; }
