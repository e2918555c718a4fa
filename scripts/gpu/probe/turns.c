/* A tenant that is always busy, and when it was not on the device: gaps in the device's own clock (probe_stamp) and in what
 * the host sees. Two of these side by side tell what a hand-over costs. */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { DEPTH = 4, MOST_KERNELS = 1 << 18, MOST_GAPS = 1 << 14 };

static double gap[MOST_GAPS][2];

static void print_gaps(const char *name, size_t count) {
  json_array(name);
  for (size_t i = 0; i < count; i++) json_list(NULL, gap[i], 2);
  json_end();
}

/* ahead SECONDS LAUNCHES KERNEL_US SLOW_US: steps of LAUNCHES kernels without a pause and as many with SLOW_US of host work
 * before each, eight steps ahead at most: the host is ahead of the device for one half of a step and behind in the other, as
 * that of a training is. Steps per second after the first. */
int mode_ahead(int argc, char **argv) {
  enum { STEPS = 8 };
  if (argc < 4) fail("ahead SECONDS LAUNCHES KERNEL_US SLOW_US");
  const double seconds = atof(argv[0]);
  const size_t launches = strtoull(argv[1], NULL, 10);
  uint64_t us = strtoull(argv[2], NULL, 10);
  const uint64_t slow_ns = strtoull(argv[3], NULL, 10) * 1000;
  driver_start();
  CUfunction busy = kernel("sublet_busy_us");
  void *parameters[] = {&us};
  CUevent done[STEPS];
  for (int i = 0; i < STEPS; i++) check(cu.EventCreate(&done[i], 2), "cuEventCreate");
  const uint64_t warm = now_ns() + 1000000000, end = warm + (uint64_t)(seconds * 1e9);
  uint64_t from = 0;
  size_t steps = 0, before = 0;
  while (now_ns() < end) {
    if (steps >= STEPS) check(cu.EventSynchronize(done[steps % STEPS]), "cuEventSynchronize");
    for (size_t i = 0; i < 2 * launches; i++) {
      const uint64_t until = now_ns() + (i < launches ? 0 : slow_ns);
      while (now_ns() < until) {
      }
      check(cu.LaunchKernel(busy, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL), "cuLaunchKernel");
    }
    check(cu.EventRecord(done[steps++ % STEPS], NULL), "cuEventRecord");
    if (!from && now_ns() > warm) from = now_ns(), before = steps;
  }
  json_open();
  json_number("steps_per_s", from ? (double)(steps - before) * 1e9 / (double)(now_ns() - from) : 0);
  json_close();
  return 0;
}

/* turns SECONDS KERNEL_US GAP_US [host]: kernels without pause on the NULL stream, DEPTH in flight. Gaps longer than GAP_US
 * are printed as [end of the one before, begin of the one after]. With `host` the kernel writes no stamps. */
int mode_turns(int argc, char **argv) {
  if (argc < 3) fail("turns SECONDS KERNEL_US GAP_US [host]");
  const double seconds = atof(argv[0]);
  uint64_t us = strtoull(argv[1], NULL, 10);
  const double least_gap_ns = atof(argv[2]) * 1000;
  const int stamped = argc < 4 || strcmp(argv[3], "host");
  driver_start();
  CUfunction function = kernel(stamped ? "probe_stamp" : "sublet_busy_us");
  CUdeviceptr stamps;
  CUevent done[DEPTH];
  check(cu.MemAlloc(&stamps, MOST_KERNELS * 16), "cuMemAlloc");
  check(cu.MemsetD8(stamps, 0, MOST_KERNELS * 16), "cuMemsetD8");
  for (int i = 0; i < DEPTH; i++) check(cu.EventCreate(&done[i], 2), "cuEventCreate");

  size_t kernels = 0, gaps = 0;
  const uint64_t begun = now_ns(), end = begun + (uint64_t)(seconds * 1e9);
  uint64_t last = begun;
  while (last < end && kernels < MOST_KERNELS) {
    CUdeviceptr at = stamps + kernels * 16;
    void *parameters[] = {stamped ? (void *)&at : (void *)&us, &us};
    CUevent event = done[kernels % DEPTH];
    if (kernels >= DEPTH) check(cu.EventSynchronize(event), "cuEventSynchronize");
    check(cu.LaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL), "cuLaunchKernel");
    check(cu.EventRecord(event, NULL), "cuEventRecord");
    kernels++;
    const uint64_t now = now_ns();
    /* While it has its turn a launch comes once per kernel. */
    if ((double)(now - last) > least_gap_ns + (double)us * 1000 && gaps < MOST_GAPS) {
      gap[gaps][0] = (double)last;
      gap[gaps++][1] = (double)now;
    }
    last = now;
  }
  check(cu.CtxSynchronize(), "cuCtxSynchronize");
  json_open();
  json_number("kernels", (double)kernels);
  json_number("kernel_us", (double)us);
  json_number("begun_mono_ns", (double)begun);
  json_number("end_mono_ns", (double)now_ns());
  print_gaps("host_gaps", gaps);
  if (stamped) {
    uint64_t(*stamp)[2] = malloc(MOST_KERNELS * 16);
    if (!stamp) fail("no memory for %zu stamps", kernels);
    check(cu.MemcpyDtoH(stamp, stamps, kernels * 16), "cuMemcpyDtoH");
    double busy_ns = 0;
    gaps = 0;
    for (size_t i = 0; i < kernels; i++) {
      busy_ns += (double)(stamp[i][1] - stamp[i][0]);
      if (i && (double)stamp[i][0] - (double)stamp[i - 1][1] > least_gap_ns && gaps < MOST_GAPS) {
        gap[gaps][0] = (double)stamp[i - 1][1];
        gap[gaps++][1] = (double)stamp[i][0];
      }
    }
    json_flag("stamps_written", kernels && stamp[0][0] && stamp[kernels - 1][1]);
    json_number("busy_device_ns", busy_ns);
    if (kernels) json_number("first_device_ns", (double)stamp[0][0]), json_number("last_device_ns", (double)stamp[kernels - 1][1]);
    print_gaps("device_gaps", gaps);
  }
  json_close();
  return 0;
}

static void nap(uint64_t us) {
  const struct timespec time = {(time_t)(us / 1000000), (long)(us % 1000000 * 1000)};
  nanosleep(&time, NULL);
}

/* bursts SECONDS KERNELS KERNEL_US PAUSE_US: KERNELS at once, a wait for them, a pause of the host; ns of each burst, from the
 * first launch to the end of the wait. Beside another process that tells what the device takes to come to this one. */
int mode_bursts(int argc, char **argv) {
  enum { MOST = 1 << 14 };
  static double took[MOST];
  if (argc < 4) fail("bursts SECONDS KERNELS KERNEL_US PAUSE_US");
  const size_t kernels = strtoull(argv[1], NULL, 10);
  uint64_t us = strtoull(argv[2], NULL, 10);
  const uint64_t pause_us = strtoull(argv[3], NULL, 10);
  driver_start();
  CUfunction busy = kernel("sublet_busy_us");
  void *parameters[] = {&us};
  size_t bursts = 0;
  const uint64_t begun = now_ns(), end = begun + (uint64_t)(atof(argv[0]) * 1e9);
  while (now_ns() < end && bursts < MOST) {
    const uint64_t from = now_ns();
    for (size_t i = 0; i < kernels; i++)
      check(cu.LaunchKernel(busy, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL), "cuLaunchKernel");
    check(cu.CtxSynchronize(), "cuCtxSynchronize");
    took[bursts++] = (double)(now_ns() - from);
    nap(pause_us);
  }
  json_open();
  json_number("bursts", (double)bursts);
  json_number("seconds", (double)(now_ns() - begun) / 1e9);
  json_list("burst_ns", took, bursts);
  json_close();
  return 0;
}

/* blocked SECONDS: a stream that waits for a value of the host's all the time, with a kernel behind the wait. */
int mode_blocked(int argc, char **argv) {
  enum { GEQ = 0, MAPPED = 2 };
  if (argc < 1) fail("blocked SECONDS");
  uint64_t us = 10;
  void *parameters[] = {&us}, *memory;
  CUdeviceptr flag;
  CUstream stream;
  driver_start();
  CUfunction busy = kernel("sublet_busy_us");
  check(cu.StreamCreate(&stream, 1), "cuStreamCreate");
  check(cu.MemHostAlloc(&memory, sizeof(uint64_t), MAPPED), "cuMemHostAlloc");
  _Atomic uint64_t *value = memory;
  *value = 0;
  check(cu.MemHostGetDevicePointer(&flag, memory, 0), "cuMemHostGetDevicePointer");
  check(cu.StreamWaitValue64(stream, flag, 1, GEQ), "cuStreamWaitValue64");
  check(cu.LaunchKernel(busy, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL), "cuLaunchKernel");
  const uint64_t end = now_ns() + (uint64_t)(atof(argv[0]) * 1e9);
  int waited = 1;
  while (now_ns() < end) {
    nap(10000);
    waited &= cu.StreamQuery(stream) == CU_NOT_READY;
  }
  *value = 1;
  check(cu.StreamSynchronize(stream), "cuStreamSynchronize");
  json_open();
  json_flag("waited", waited);
  json_close();
  return 0;
}
