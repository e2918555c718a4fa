/* Legal things that programs do with streams, at which marks have gone wrong: more than a few of them, streams destroyed while
 * other threads go on, and graphs captured while memory is moved. */
#define _GNU_SOURCE
#include "driver.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

static CUcontext context;

static void start(void) {
  driver_start();
  check(cu.DevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
}

static void launch(CUfunction function, CUstream stream, uint64_t us) {
  void *parameters[] = {&us};
  check(cu.LaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL), "cuLaunchKernel");
}

/* streams COUNT SECONDS KERNEL_US: kernels on COUNT streams in turns, one of each in flight; ns of every launch call. */
int mode_streams(int argc, char **argv) {
  enum { MOST = 1 << 16, MOST_STREAMS = 64 };
  static double took[MOST];
  if (argc < 3) fail("streams COUNT SECONDS KERNEL_US");
  const size_t count = strtoull(argv[0], NULL, 10);
  const uint64_t us = strtoull(argv[2], NULL, 10);
  if (count < 1 || count > MOST_STREAMS) fail("%zu streams: 1 to %d", count, MOST_STREAMS);
  CUstream stream[MOST_STREAMS];
  size_t launches = 0;
  start();
  CUfunction busy = kernel("sublet_busy_us");
  for (size_t i = 0; i < count; i++) check(cu.StreamCreate(&stream[i], 1), "cuStreamCreate");
  const uint64_t begun = now_ns(), end = begun + (uint64_t)(atof(argv[1]) * 1e9);
  while (now_ns() < end && launches + count <= MOST) {
    for (size_t i = 0; i < count; i++) {
      const uint64_t before = now_ns();
      launch(busy, stream[i], us);
      took[launches++] = (double)(now_ns() - before);
    }
    for (size_t i = 0; i < count; i++) check(cu.StreamSynchronize(stream[i]), "cuStreamSynchronize");
  }
  json_open();
  json_number("seconds", (double)(now_ns() - begun) / 1e9);
  json_list("launch_ns", took, launches);
  json_close();
  return 0;
}

static volatile sig_atomic_t done;

static void finish(int number) {
  (void)number;
  done = 1;
}
static size_t destroyed;
/* What each call of the destroyer took, ns: create, the first launch, the others, destroy, wait. */
enum { CREATE, FIRST, NEXT, DESTROY, WAIT, KINDS, MOST_TIMES = 1 << 15 };
static double times[KINDS][MOST_TIMES];
static size_t timed[KINDS];

static uint64_t took(int kind, uint64_t begun) {
  const uint64_t now = now_ns();
  if (timed[kind] < MOST_TIMES) times[kind][timed[kind]++] = (double)(now - begun);
  return now;
}

/* `argument`: a word that is written to in each stream before it goes, or NULL. */
static void *destroyer(void *argument) {
  CUdeviceptr word = (CUdeviceptr)(uintptr_t)argument;
  check(cu.CtxSetCurrent(context), "cuCtxSetCurrent");
  CUfunction busy = kernel("sublet_busy_us");
  while (!done) {
    CUstream stream;
    uint64_t then = now_ns();
    check(cu.StreamCreate(&stream, 1), "cuStreamCreate");
    then = took(CREATE, then);
    for (int i = 0; i < 3; i++) {
      launch(busy, stream, 20);
      then = took(i ? NEXT : FIRST, then);
    }
    if (word) check(cu.StreamWriteValue64(stream, word, destroyed, 0), "cuStreamWriteValue64");
    then = now_ns();
    /* The driver ends what is in flight; that is legal. */
    check(cu.StreamDestroy(stream), "cuStreamDestroy");
    then = took(DESTROY, then);
    /* What is in flight stays bounded. */
    if (++destroyed % 8) continue;
    check(cu.CtxSynchronize(), "cuCtxSynchronize");
    took(WAIT, then);
  }
  return NULL;
}

/* destroyed SECONDS [mark]: one thread creates streams, launches on them and destroys them; another launches on a stream of its
 * own. `mark`: a word of page-locked memory is written to in each stream before it goes, as a gate's marks are. */
int mode_destroyed(int argc, char **argv) {
  pthread_t thread;
  CUstream stream;
  size_t launches = 0;
  void *word = NULL;
  if (argc < 1) fail("destroyed SECONDS [mark]");
  start();
  if (argc > 1) check(cu.MemHostAlloc(&word, 4096, 1 | 2), "cuMemHostAlloc");
  CUfunction busy = kernel("sublet_busy_us");
  check(cu.StreamCreate(&stream, 1), "cuStreamCreate");
  if (pthread_create(&thread, NULL, destroyer, word)) fail("no thread");
  for (const uint64_t end = now_ns() + (uint64_t)(atof(argv[0]) * 1e9); now_ns() < end; launches += 4) {
    for (int i = 0; i < 4; i++) launch(busy, stream, 20);
    check(cu.StreamSynchronize(stream), "cuStreamSynchronize");
  }
  done = 1;
  pthread_join(thread, NULL);
  check(cu.CtxSynchronize(), "cuCtxSynchronize");
  json_open();
  json_number("launches", (double)launches);
  json_number("destroyed", (double)destroyed);
  static const char *const names[] = {"create_ns", "first_launch_ns", "next_launch_ns", "destroy_ns", "wait_ns"};
  for (int kind = 0; kind < KINDS; kind++) json_list(names[kind], times[kind], timed[kind]);
  json_close();
  return 0;
}

/* captures SECONDS: a graph of eight kernels captured, instantiated, launched and destroyed again and again, until SIGTERM or
 * for so long. */
int mode_captures(int argc, char **argv) {
  CUstream stream;
  size_t graphs = 0;
  if (argc < 1) fail("captures SECONDS");
  signal(SIGTERM, finish);
  start();
  CUdeviceptr memory;
  CUfunction busy = kernel("sublet_busy_us");
  check(cu.MemAlloc(&memory, 64 << 20), "cuMemAlloc");
  check(cu.MemsetD8(memory, 0x5a, 64 << 20), "cuMemsetD8");
  check(cu.StreamCreate(&stream, 1), "cuStreamCreate");
  for (const uint64_t end = now_ns() + (uint64_t)(atof(argv[0]) * 1e9); now_ns() < end && !done; graphs++) {
    void *graph, *exec;
    check(cu.StreamBeginCapture(stream, 0), "cuStreamBeginCapture");
    for (int i = 0; i < 8; i++) launch(busy, stream, 50);
    check(cu.StreamEndCapture(stream, &graph), "cuStreamEndCapture");
    check(cu.GraphInstantiate(&exec, graph, 0), "cuGraphInstantiateWithFlags");
    check(cu.GraphLaunch(exec, stream), "cuGraphLaunch");
    check(cu.StreamSynchronize(stream), "cuStreamSynchronize");
    check(cu.GraphExecDestroy(exec), "cuGraphExecDestroy");
    check(cu.GraphDestroy(graph), "cuGraphDestroy");
  }
  unsigned char *copy = malloc(64 << 20);
  if (!copy) fail("no memory");
  check(cu.MemcpyDtoH(copy, memory, 64 << 20), "cuMemcpyDtoH");
  size_t wrong = 0;
  for (size_t i = 0; i < 64 << 20; i++) wrong += copy[i] != 0x5a;
  json_open();
  json_number("graphs", (double)graphs);
  json_number("wrong_bytes", (double)wrong);
  json_close();
  return 0;
}
