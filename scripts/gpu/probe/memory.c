/* Facts that moving a job's memory out and in depends on: what a physical handle costs, and what the link carries. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <sys/mman.h>

static const CUmemAllocationProp pinned_on_device = {.type = 1, .location = {1, 0}};
static const CUmemAccessDesc read_write = {{1, 0}, 3};

enum { STEPS = 5, MOST_HANDLES = 64 };
static const char *const step_names[STEPS] = {"create_ns", "map_ns", "access_ns", "unmap_ns", "release_ns"};
static double took[STEPS][MOST_HANDLES];

static double lap(uint64_t *since) {
  const uint64_t now = now_ns(), passed = now - *since;
  *since = now;
  return (double)passed;
}

/* `handles` handles of `bytes` each, one after the other, then again with one cuMemSetAccess and one cuMemUnmap each over all. */
static void sizes(size_t bytes, size_t handles) {
  uint64_t handle[MOST_HANDLES];
  CUdeviceptr base;
  check(cu.MemAddressReserve(&base, bytes * handles, 0, 0, 0), "cuMemAddressReserve");
  for (size_t i = 0; i < handles; i++) {
    const CUdeviceptr at = base + i * bytes;
    uint64_t clock = now_ns();
    check(cu.MemCreate(&handle[i], bytes, &pinned_on_device, 0), "cuMemCreate");
    took[0][i] = lap(&clock);
    check(cu.MemMap(at, bytes, 0, handle[i], 0), "cuMemMap");
    took[1][i] = lap(&clock);
    check(cu.MemSetAccess(at, bytes, &read_write, 1), "cuMemSetAccess");
    took[2][i] = lap(&clock);
  }
  for (size_t i = 0; i < handles; i++) {
    uint64_t clock = now_ns();
    check(cu.MemUnmap(base + i * bytes, bytes), "cuMemUnmap");
    took[3][i] = lap(&clock);
    check(cu.MemRelease(handle[i]), "cuMemRelease");
    took[4][i] = lap(&clock);
  }
  json_object(NULL);
  json_number("bytes", (double)bytes);
  json_number("handles", (double)handles);
  for (int s = 0; s < STEPS; s++) json_list(step_names[s], took[s], handles);

  uint64_t clock = now_ns();
  for (size_t i = 0; i < handles; i++) {
    check(cu.MemCreate(&handle[i], bytes, &pinned_on_device, 0), "cuMemCreate");
    check(cu.MemMap(base + i * bytes, bytes, 0, handle[i], 0), "cuMemMap");
  }
  check(cu.MemSetAccess(base, bytes * handles, &read_write, 1), "cuMemSetAccess of several handles");
  json_number("restore_all_ns", lap(&clock));
  check(cu.MemUnmap(base, bytes * handles), "cuMemUnmap of several handles");
  for (size_t i = 0; i < handles; i++) check(cu.MemRelease(handle[i]), "cuMemRelease");
  json_number("evict_all_ns", lap(&clock));
  check(cu.MemAddressFree(base, bytes * handles), "cuMemAddressFree");
  json_end();
}

/* vmm [MOST_BYTES]: handles of 2 MiB to 1 GiB, at most MOST_BYTES at once. */
int mode_vmm(int argc, char **argv) {
  const size_t most = argc > 0 ? strtoull(argv[0], NULL, 10) : 8ull << 30;
  size_t granularity = 0;
  driver_start();
  check(cu.MemGetAllocationGranularity(&granularity, &pinned_on_device, 0), "cuMemGetAllocationGranularity");
  json_open();
  json_number("granularity_bytes", (double)granularity);
  json_array("sizes");
  for (size_t bytes = granularity; bytes <= (1ull << 30) && 2 * bytes <= most; bytes *= bytes < (8 << 20) ? 4 : 2) {
    const size_t handles = most / bytes < MOST_HANDLES ? most / bytes : MOST_HANDLES;
    sizes(bytes, handles);
  }
  json_end();
  json_close();
  return 0;
}

enum { COPIES = 12 };

static void copies(const char *name, CUdeviceptr to, void *from, void *back, CUdeviceptr source, size_t bytes, CUstream in, CUstream out) {
  double ns[COPIES];
  for (int i = -2; i < COPIES; i++) {
    const uint64_t begun = now_ns();
    if (from) check(cu.MemcpyHtoDAsync(to, from, bytes, in), "cuMemcpyHtoDAsync");
    if (back) check(cu.MemcpyDtoHAsync(back, source, bytes, out), "cuMemcpyDtoHAsync");
    check(cu.StreamSynchronize(in), "cuStreamSynchronize");
    check(cu.StreamSynchronize(out), "cuStreamSynchronize");
    if (i >= 0) ns[i] = (double)(now_ns() - begun);
  }
  json_list(name, ns, COPIES);
}

/* pcie [BYTES]: ns of copies of BYTES, pinned both ways and at once, and pageable; ns of pinning. */
int mode_pcie(int argc, char **argv) {
  const size_t bytes = argc > 0 ? strtoull(argv[0], NULL, 10) : 256u << 20;
  CUdeviceptr first, second;
  CUstream in, out;
  void *up, *down;
  driver_start();
  check(cu.MemAlloc(&first, bytes), "cuMemAlloc");
  check(cu.MemAlloc(&second, bytes), "cuMemAlloc");
  check(cu.MemsetD8(second, 0x5a, bytes), "cuMemsetD8");
  check(cu.StreamCreate(&in, 1), "cuStreamCreate");
  check(cu.StreamCreate(&out, 1), "cuStreamCreate");
  uint64_t clock = now_ns();
  check(cu.MemHostAlloc(&up, bytes, 0), "cuMemHostAlloc");
  check(cu.MemHostAlloc(&down, bytes, 0), "cuMemHostAlloc");
  const double allocated = lap(&clock) / 2;
  /* Random bytes: a link or a memory that compresses must not flatter itself. */
  uint64_t x = 88172645463325252ull;
  for (size_t i = 0; i < bytes / 8; i++) ((uint64_t *)up)[i] = x ^= x << 13, x ^= x >> 7, x ^= x << 17;

  json_open();
  json_number("bytes", (double)bytes);
  json_number("host_alloc_ns", allocated);
  copies("h2d_ns", first, up, NULL, 0, bytes, in, out);
  copies("d2h_ns", 0, NULL, down, second, bytes, in, out);
  copies("duplex_ns", first, up, down, second, bytes, in, out);

  void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) fail("no %zu bytes of host memory", bytes);
  for (size_t i = 0; i < bytes; i += 4096) ((volatile char *)pages)[i] = 1;
  copies("pageable_h2d_ns", first, pages, NULL, 0, bytes, in, out);
  clock = now_ns();
  check(cu.MemHostRegister(pages, bytes, 0), "cuMemHostRegister");
  json_number("host_register_ns", lap(&clock));
  check(cu.MemHostUnregister(pages), "cuMemHostUnregister");
  json_number("host_unregister_ns", lap(&clock));

  /* What went up must come down. */
  int same = 1;
  check(cu.MemcpyHtoDAsync(first, up, bytes, in), "cuMemcpyHtoDAsync");
  check(cu.StreamSynchronize(in), "cuStreamSynchronize");
  check(cu.MemcpyDtoHAsync(down, first, bytes, out), "cuMemcpyDtoHAsync");
  check(cu.StreamSynchronize(out), "cuStreamSynchronize");
  for (size_t i = 0; i < bytes / 8; i++) same &= ((uint64_t *)up)[i] == ((uint64_t *)down)[i];
  json_flag("bytes_came_back", same);
  json_close();
  return 0;
}
