/* What calls cost that may take a lock of the whole driver: run one beside a copy, or beside another process that does
 * something else, and compare with the same alone. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <string.h>

/* Of more rounds the last ones are kept. */
enum { MOST = 1 << 14 };

static size_t kept(size_t rounds) { return rounds < MOST ? rounds : MOST; }

static double lap(uint64_t *since) {
  const uint64_t now = now_ns(), passed = now - *since;
  *since = now;
  return (double)passed;
}

static uint64_t end_of(const char *seconds) { return now_ns() + (uint64_t)(atof(seconds) * 1e9); }

/* handles SECONDS BYTES [copy]: handles of BYTES created, mapped, made accessible, unmapped and released again and again; ns of
 * each step. With `copy` a copy to the device is in flight at every step: `copies_in_flight` says at how many rounds it was at
 * the end of the round still. */
int mode_handles(int argc, char **argv) {
  static const CUmemAllocationProp pinned_on_device = {.type = 1, .location = {1, 0}};
  static const CUmemAccessDesc read_write = {{1, 0}, 3};
  static const char *const names[] = {"create_ns", "map_ns", "access_ns", "unmap_ns", "release_ns"};
  static double took[5][MOST];
  enum { COPY = 256 << 20 };
  if (argc < 2) fail("handles SECONDS BYTES [copy]");
  const size_t bytes = strtoull(argv[1], NULL, 10);
  const int with_copy = argc > 2 && !strcmp(argv[2], "copy");
  size_t rounds = 0, in_flight = 0;
  CUdeviceptr base, target = 0;
  CUstream stream = NULL;
  void *source = NULL;
  driver_start();
  check(cu.MemAddressReserve(&base, bytes, 0, 0, 0), "cuMemAddressReserve");
  if (with_copy) {
    check(cu.StreamCreate(&stream, 1), "cuStreamCreate");
    check(cu.MemAlloc(&target, COPY), "cuMemAlloc");
    check(cu.MemHostAlloc(&source, COPY, 0), "cuMemHostAlloc");
    memset(source, 1, COPY);
  }
  for (const uint64_t end = end_of(argv[0]); now_ns() < end; rounds++) {
    uint64_t handle;
    if (with_copy && cu.StreamQuery(stream) != CU_NOT_READY) {
      /* One is on the way, the next waits behind it. */
      for (int i = 0; i < 2; i++) check(cu.MemcpyHtoDAsync(target, source, COPY, stream), "cuMemcpyHtoDAsync");
    }
    uint64_t clock = now_ns();
    check(cu.MemCreate(&handle, bytes, &pinned_on_device, 0), "cuMemCreate");
    took[0][rounds % MOST] = lap(&clock);
    check(cu.MemMap(base, bytes, 0, handle, 0), "cuMemMap");
    took[1][rounds % MOST] = lap(&clock);
    check(cu.MemSetAccess(base, bytes, &read_write, 1), "cuMemSetAccess");
    took[2][rounds % MOST] = lap(&clock);
    check(cu.MemUnmap(base, bytes), "cuMemUnmap");
    took[3][rounds % MOST] = lap(&clock);
    check(cu.MemRelease(handle), "cuMemRelease");
    took[4][rounds % MOST] = lap(&clock);
    in_flight += with_copy && cu.StreamQuery(stream) == CU_NOT_READY;
  }
  check(cu.CtxSynchronize(), "cuCtxSynchronize");
  json_open();
  json_number("rounds", (double)rounds);
  json_number("copies_in_flight", (double)in_flight);
  for (int s = 0; s < 5; s++) json_list(names[s], took[s], kept(rounds));
  json_close();
  return 0;
}

/* pins SECONDS BYTES: page-locked memory allocated and freed again and again; ns of each. */
int mode_pins(int argc, char **argv) {
  static double pinned[MOST], freed[MOST];
  if (argc < 2) fail("pins SECONDS BYTES");
  const size_t bytes = strtoull(argv[1], NULL, 10);
  size_t rounds = 0;
  driver_start();
  for (const uint64_t end = end_of(argv[0]); now_ns() < end; rounds++) {
    void *memory;
    uint64_t clock = now_ns();
    check(cu.MemHostAlloc(&memory, bytes, 0), "cuMemHostAlloc");
    pinned[rounds % MOST] = lap(&clock);
    check(cu.MemFreeHost(memory), "cuMemFreeHost");
    freed[rounds % MOST] = lap(&clock);
  }
  json_open();
  json_list("pin_ns", pinned, kept(rounds));
  json_list("free_ns", freed, kept(rounds));
  json_close();
  return 0;
}

/* allocs SECONDS BYTES: ns of each pair of cuMemAlloc and cuMemFree, one every 200 us or so. */
int mode_allocs(int argc, char **argv) {
  static double took[MOST];
  if (argc < 2) fail("allocs SECONDS BYTES");
  const size_t bytes = strtoull(argv[1], NULL, 10);
  size_t rounds = 0;
  driver_start();
  for (const uint64_t end = end_of(argv[0]); now_ns() < end; rounds++) {
    CUdeviceptr memory;
    uint64_t clock = now_ns();
    check(cu.MemAlloc(&memory, bytes), "cuMemAlloc");
    check(cu.MemFree(memory), "cuMemFree");
    took[rounds % MOST] = lap(&clock);
    while (now_ns() - clock < 200000) {
    }
  }
  json_open();
  json_list("alloc_free_ns", took, kept(rounds));
  json_close();
  return 0;
}
