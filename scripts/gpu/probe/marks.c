/* Completion marks as the preload library uses them: cuStreamWriteValue64 to a sealed memfd that is registered as pinned
 * memory, seen through a second mapping of the same file, without a call into the driver. */
#define _GNU_SOURCE
#include "driver.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 1 << 16, IDLE = 1000, BEHIND = 12, BUSY_US = 2000, BATCHES = 60, LAUNCHES = 32 };
static const uint64_t PATIENCE_NS = 2000000000;

static _Atomic uint64_t *seen; /* second mapping: what another process would see */
static CUdeviceptr word;

static int write_mark(CUstream stream, uint64_t value) { return cu.StreamWriteValue64(stream, word, value, 0); }

/* Monotonic time when the mark is there; 0 where it does not come. */
static uint64_t wait_mark(uint64_t value) {
  const uint64_t begun = now_ns();
  while (atomic_load_explicit(seen, memory_order_acquire) != value)
    if (now_ns() - begun > PATIENCE_NS) return 0;
  return now_ns();
}

static uint64_t next_value(void) {
  static uint64_t value;
  return ++value;
}

static void busy(CUstream stream, uint64_t us) {
  static CUfunction function;
  void *parameters[] = {&us};
  if (!function) function = kernel("sublet_busy_us");
  check(cu.LaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL), "cuLaunchKernel");
}

static void try_stream(const char *name, CUstream stream) {
  static double call[IDLE], visible[IDLE], behind[BEHIND], between[BEHIND];
  int lost = 0, early = 0;
  json_object(name);
  const int status = write_mark(stream, next_value());
  json_number("status", status);
  if (status) return json_end();
  check(cu.StreamSynchronize(stream), "cuStreamSynchronize");

  for (int i = 0; i < IDLE; i++) {
    const uint64_t value = next_value(), begun = now_ns();
    check(write_mark(stream, value), "cuStreamWriteValue64");
    const uint64_t called = now_ns(), there = wait_mark(value);
    lost += !there;
    call[i] = (double)(called - begun);
    visible[i] = there ? (double)(there - begun) : -1;
    if (lost > 3) break;
  }
  json_list("call_ns", call, lost > 3 ? 0 : IDLE);
  json_list("visible_ns", visible, lost > 3 ? 0 : IDLE);

  /* After a kernel the mark comes, not before its end, and before the end of the next one. */
  for (int i = 0; i < BEHIND && lost <= 3; i++) {
    const uint64_t value = next_value(), begun = now_ns();
    busy(stream, BUSY_US);
    check(write_mark(stream, value), "cuStreamWriteValue64");
    busy(stream, BUSY_US);
    const uint64_t there = wait_mark(value);
    check(cu.StreamSynchronize(stream), "cuStreamSynchronize");
    const uint64_t end = now_ns();
    lost += !there;
    /* A tenth is left to the clocks of the two sides. */
    early += there && there - begun < (uint64_t)BUSY_US * 900;
    behind[i] = there ? (double)(there - begun) : -1;
    between[i] = there ? (double)(end - there) : -1;
  }
  json_list("behind_kernel_ns", behind, lost > 3 ? 0 : BEHIND);
  json_list("until_next_end_ns", between, lost > 3 ? 0 : BEHIND);
  json_number("lost", lost);
  json_number("early", early);
  json_end();
}

/* ns of a batch of launches on the NULL stream, with or without a mark behind it. */
static void batches(void) {
  static double plain[BATCHES], marked[BATCHES];
  CUfunction empty = kernel("probe_empty");
  for (int i = 0; i < 2 * BATCHES; i++) {
    const uint64_t begun = now_ns();
    for (int l = 0; l < LAUNCHES; l++) cu.LaunchKernel(empty, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    if (i % 2) check(write_mark(NULL, next_value()), "cuStreamWriteValue64");
    (i % 2 ? marked : plain)[i / 2] = (double)(now_ns() - begun);
    check(cu.CtxSynchronize(), "cuCtxSynchronize");
  }
  json_number("batch_launches", LAUNCHES);
  json_list("batch_plain_ns", plain, BATCHES);
  json_list("batch_marked_ns", marked, BATCHES);
}

/* The page of the marks, mapped twice and registered; the status of the registration, and the ns that it took. */
static int open_page(double *register_ns, int *same_address) {
  const int file = memfd_create("probe-marks", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file < 0 || ftruncate(file, PAGE)) fail("memfd: %s", strerror(errno));
  if (fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)) fail("seals: %s", strerror(errno));
  void *ours = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  void *theirs = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, file, 0);
  if (ours == MAP_FAILED || theirs == MAP_FAILED) fail("mmap: %s", strerror(errno));
  seen = theirs;
  const uint64_t begun = now_ns();
  const int status = cu.MemHostRegister(ours, PAGE, 1 | 2);
  *register_ns = (double)(now_ns() - begun);
  if (status) return status;
  check(cu.MemHostGetDevicePointer(&word, ours, 0), "cuMemHostGetDevicePointer");
  *same_address = word == (CUdeviceptr)(uintptr_t)ours;
  return 0;
}

int mode_marks(int argc, char **argv) {
  (void)argc, (void)argv;
  double register_ns;
  int same_address = 0;
  driver_start();
  const int status = open_page(&register_ns, &same_address);
  json_open();
  json_number("register_status", status);
  json_number("register_ns", register_ns);
  if (!status) {
    CUstream stream;
    json_flag("same_address", same_address);
    check(cu.StreamCreate(&stream, 1), "cuStreamCreate");
    try_stream("null", NULL);
    try_stream("legacy", CU_STREAM_LEGACY);
    try_stream("per_thread", CU_STREAM_PER_THREAD);
    try_stream("created", stream);
    batches();
  }
  json_close();
  return 0;
}

/* idle-marks SECONDS EVERY_US: a mark on an idle stream every so often, and ns until each is seen. Without MPS a mark of this
 * process needs its context on the device, for which others may have to go. */
int mode_idle_marks(int argc, char **argv) {
  enum { MOST = 1 << 14 };
  static double visible[MOST];
  if (argc < 2) fail("idle-marks SECONDS EVERY_US");
  const double seconds = atof(argv[0]);
  const useconds_t every_us = (useconds_t)strtoul(argv[1], NULL, 10);
  double register_ns;
  int same_address = 0, lost = 0, status;
  size_t marks = 0;
  CUstream stream;
  driver_start();
  if ((status = open_page(&register_ns, &same_address))) fail("the page of marks cannot be registered: %d", status);
  check(cu.StreamCreate(&stream, 1), "cuStreamCreate");
  const uint64_t end = now_ns() + (uint64_t)(seconds * 1e9);
  while (now_ns() < end && marks < MOST && lost <= 3) {
    usleep(every_us);
    const uint64_t value = next_value(), begun = now_ns();
    check(write_mark(stream, value), "cuStreamWriteValue64");
    const uint64_t there = wait_mark(value);
    lost += !there;
    if (there) visible[marks++] = (double)(there - begun);
  }
  json_open();
  json_number("lost", lost);
  json_list("visible_ns", visible, marks);
  json_close();
  return 0;
}
