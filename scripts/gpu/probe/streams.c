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

static void *destroyer(void *argument) {
  (void)argument;
  check(cu.CtxSetCurrent(context), "cuCtxSetCurrent");
  CUfunction busy = kernel("sublet_busy_us");
  while (!done) {
    CUstream stream;
    check(cu.StreamCreate(&stream, 1), "cuStreamCreate");
    for (int i = 0; i < 3; i++) launch(busy, stream, 20);
    /* The driver ends what is in flight; that is legal. */
    check(cu.StreamDestroy(stream), "cuStreamDestroy");
    /* What is in flight stays bounded. */
    if (++destroyed % 8 == 0) check(cu.CtxSynchronize(), "cuCtxSynchronize");
  }
  return NULL;
}

/* destroyed SECONDS: one thread creates streams, launches on them and destroys them; another launches on a stream of its own. */
int mode_destroyed(int argc, char **argv) {
  pthread_t thread;
  CUstream stream;
  size_t launches = 0;
  if (argc < 1) fail("destroyed SECONDS");
  start();
  CUfunction busy = kernel("sublet_busy_us");
  check(cu.StreamCreate(&stream, 1), "cuStreamCreate");
  if (pthread_create(&thread, NULL, destroyer, NULL)) fail("no thread");
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
