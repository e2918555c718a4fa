/* What single calls cost. Bare and under the preload library; the difference is ours. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>

enum { MOST = 256 };
static double wall[MOST], cpu[MOST];

static size_t count_of(int argc, char **argv, int at, long otherwise, long most) {
  const long value = argc > at ? atol(argv[at]) : otherwise;
  if (value < 1 || value > most) fail("argument %d is %ld, not 1 to %ld", at, value, most);
  return (size_t)value;
}

static void report(size_t repetitions) {
  json_open();
  json_list("wall_ns", wall, repetitions);
  json_list("cpu_ns", cpu, repetitions);
  json_close();
}

/* launch [REPETITIONS] [BATCHES]: ns per cuLaunchKernel of an empty kernel on the NULL stream. A stream takes about 1000
 * launches before the call blocks: batches of 100, with the wait for them outside of the timing. */
int mode_launch(int argc, char **argv) {
  enum { BATCH = 100 };
  const size_t repetitions = count_of(argc, argv, 0, 15, MOST), batches = count_of(argc, argv, 1, 50, 100000);
  driver_start();
  CUfunction empty = kernel("probe_empty");
  for (size_t r = 0; r <= repetitions; r++) {
    uint64_t wall_sum = 0, cpu_sum = 0;
    for (size_t b = 0; b < batches; b++) {
      const uint64_t wall_begun = now_ns(), cpu_begun = cpu_ns();
      CUresult status = 0;
      for (int i = 0; i < BATCH; i++) status |= cu.LaunchKernel(empty, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
      cpu_sum += cpu_ns() - cpu_begun;
      wall_sum += now_ns() - wall_begun;
      check(status, "cuLaunchKernel");
      check(cu.CtxSynchronize(), "cuCtxSynchronize");
    }
    /* The first repetition warms up. */
    if (!r) continue;
    wall[r - 1] = (double)wall_sum / (double)(batches * BATCH);
    cpu[r - 1] = (double)cpu_sum / (double)(batches * BATCH);
  }
  report(repetitions);
  return 0;
}

/* alloc [REPETITIONS] [PAIRS] [BYTES] [LIVE]: ns per pair of cuMemAlloc and cuMemFree, with LIVE others live. */
int mode_alloc(int argc, char **argv) {
  const size_t repetitions = count_of(argc, argv, 0, 15, MOST), pairs = count_of(argc, argv, 1, 200, 10000000);
  const size_t bytes = count_of(argc, argv, 2, 4096, 1l << 40), live = count_of(argc, argv, 3, 10, 1000000);
  driver_start();
  CUdeviceptr address;
  for (size_t i = 0; i < live; i++) check(cu.MemAlloc(&address, bytes), "cuMemAlloc");
  for (size_t r = 0; r <= repetitions; r++) {
    const uint64_t wall_begun = now_ns(), cpu_begun = cpu_ns();
    for (size_t i = 0; i < pairs; i++) {
      check(cu.MemAlloc(&address, bytes), "cuMemAlloc");
      check(cu.MemFree(address), "cuMemFree");
    }
    if (!r) continue;
    cpu[r - 1] = (double)(cpu_ns() - cpu_begun) / (double)pairs;
    wall[r - 1] = (double)(now_ns() - wall_begun) / (double)pairs;
  }
  report(repetitions);
  return 0;
}

/* info [REPETITIONS] [CALLS]: ns per cuMemGetInfo. */
int mode_info(int argc, char **argv) {
  const size_t repetitions = count_of(argc, argv, 0, 15, MOST), calls = count_of(argc, argv, 1, 200, 10000000);
  driver_start();
  size_t free_bytes, total;
  for (size_t r = 0; r <= repetitions; r++) {
    const uint64_t wall_begun = now_ns(), cpu_begun = cpu_ns();
    for (size_t i = 0; i < calls; i++) check(cu.MemGetInfo(&free_bytes, &total), "cuMemGetInfo");
    if (!r) continue;
    cpu[r - 1] = (double)(cpu_ns() - cpu_begun) / (double)calls;
    wall[r - 1] = (double)(now_ns() - wall_begun) / (double)calls;
  }
  report(repetitions);
  return 0;
}

/* first: when main began, when the driver was ready and when the first launch had returned, on CLOCK_MONOTONIC. */
int mode_first(int argc, char **argv) {
  (void)argc, (void)argv;
  const uint64_t begun = now_ns();
  driver_start();
  const uint64_t ready = now_ns();
  check(cu.LaunchKernel(kernel("probe_empty"), 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
  const uint64_t launched = now_ns();
  json_open();
  json_number("main_mono_ns", (double)begun);
  json_number("ready_mono_ns", (double)ready);
  json_number("launched_mono_ns", (double)launched);
  json_close();
  return 0;
}
