/* Calls the driver in a loop and says what a call costs. Run bare and under the preload library; the difference is ours.
 *
 *   host launch THREADS          ns of CPU time per cuLaunchKernel, one figure per repetition
 *   host threads COUNT           ns of CPU time per cuLaunchKernel of so many threads at once, each with a stream: the mean over them, one figure
 *                                per repetition
 *   host streams COUNT           the same of one thread that launches on so many streams in turn, one figure per repetition, each with
 *                                another behind it: see probe()
 *   host start COUNT             ns from the start of so many threads to the end of the last, each with a stream, 40 launches and two waits
 *   host alloc LIVE              ns of CPU time per cuMemAlloc + cuMemFree pair with LIVE allocations live
 *   host info                    ns per cuMemGetInfo
 *   host first                   CLOCK_MONOTONIC ns right after the first launch has returned
 *   host slices SECONDS          launches without pause; prints "begin end" of every gap longer than 50 us
 *   host futex ROUNDS            two processes wake each other by futex, each asleep until it is woken and asleep again at once; ns
 *                                from wake to the woken one running
 *   host futex-busy ROUNDS       the same where the waker has been busy for a turn of 5 ms, in which the woken one slept, and is
 *                                busy still
 *   host turns ROUNDS            two busy processes take turns of 5 ms, dealt by a third that sleeps in between, closes one's word,
 *                                opens the other's and wakes it, and does nothing else; ns from the last look of the one to the first of the
 *                                other: what any hand-over through a daemon takes at least
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int (*init)(unsigned), (*retain)(void **, int), (*set)(void *), (*free_)(uint64_t), (*alloc)(uint64_t *, size_t);
static int (*info)(size_t *, size_t *);
static int (*create)(void **, unsigned), (*destroy)(void *), (*synchronise)(void *);
static int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

enum { REPETITIONS = 15 };

static uint64_t clock_ns(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static void *need(void *library, const char *name) {
  void *function = dlsym(library, name);
  if (!function) {
    fprintf(stderr, "host: no %s: %s\n", name, dlerror());
    exit(1);
  }
  return function;
}

static void check(int status, const char *what) {
  if (status) {
    fprintf(stderr, "host: %s answers %d\n", what, status);
    exit(1);
  }
}

static void start(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) {
    fprintf(stderr, "host: %s\n", dlerror());
    exit(1);
  }
  init = need(library, "cuInit");
  retain = need(library, "cuDevicePrimaryCtxRetain");
  set = need(library, "cuCtxSetCurrent");
  alloc = need(library, "cuMemAlloc_v2");
  free_ = need(library, "cuMemFree_v2");
  info = need(library, "cuMemGetInfo_v2");
  launch = need(library, "cuLaunchKernel");
  create = need(library, "cuStreamCreate");
  destroy = need(library, "cuStreamDestroy_v2");
  synchronise = need(library, "cuStreamSynchronize");
  check(init(0), "cuInit");
  void *context;
  check(retain(&context, 0), "cuDevicePrimaryCtxRetain");
  check(set(context), "cuCtxSetCurrent");
}

static inline int launch_on(void *stream) { return launch((void *)8, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL); }
static inline int one_launch(void) { return launch_on(NULL); }

/* ns per instruction of a loop that does as many at once as the processor can. A launch is some hundred instructions that hardly
 * wait for each other, so both take longer where somebody else is at work on the same core (another virtual machine of the
 * host on its second hardware thread); a loop that waits for itself, as the bare launches do, does not. */
static double probe(void) {
  uint64_t a = 1, b = 2, c = 3, d = 4, e = 5;
  const long rounds = 500000;
  uint64_t begun = clock_ns(CLOCK_THREAD_CPUTIME_ID);
  for (long i = 0; i < rounds; i++)
    __asm__ volatile("add $1, %0\n add $1, %1\n add $1, %2\n add $1, %3\n add $1, %4\n"
                     "add $2, %0\n add $2, %1\n add $2, %2\n add $2, %3\n add $2, %4\n"
                     : "+r"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(e));
  return (double)(clock_ns(CLOCK_THREAD_CPUTIME_ID) - begun) / (double)rounds / 10;
}

static pthread_barrier_t barrier;
static double per_call[REPETITIONS][64], around[REPETITIONS];
static int single;

static void *launching(void *arg) {
  const long self = (long)arg, calls = 1000000;
  void *context;
  check(retain(&context, 0), "cuDevicePrimaryCtxRetain");
  check(set(context), "cuCtxSetCurrent");
  for (long i = 0; i < 50000; i++) one_launch();
  double before = single ? probe() : 0;
  for (int r = 0; r < REPETITIONS; r++) {
    pthread_barrier_wait(&barrier);
    uint64_t begun = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    for (long i = 0; i < calls; i++) one_launch();
    per_call[r][self] = (double)(clock_ns(CLOCK_THREAD_CPUTIME_ID) - begun) / (double)calls;
    if (!single) continue;
    double after = probe();
    around[r] = before > after ? before : after;
    before = after;
  }
  return NULL;
}

static void bench_launch(int threads) {
  pthread_t thread[64];
  pthread_barrier_init(&barrier, NULL, (unsigned)threads);
  single = threads == 1;
  for (long t = 0; t < threads; t++) pthread_create(&thread[t], NULL, launching, (void *)t);
  for (int t = 0; t < threads; t++) pthread_join(thread[t], NULL);
  for (int r = 0; r < REPETITIONS; r++) {
    double sum = 0;
    for (int t = 0; t < threads; t++) sum += per_call[r][t];
    printf(single ? "%.3f %.4f\n" : "%.3f\n", sum / threads, around[r]);
  }
}

enum { MANY = 16384 };
static pthread_t many[MANY];
static double of_thread[REPETITIONS][MANY];

static void start_threads(long count, void *(*body)(void *)) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, 64 << 10);
  for (long t = 0; t < count; t++)
    if (pthread_create(&many[t], &attributes, body, (void *)t)) {
      fprintf(stderr, "host: thread %ld of %ld cannot be started\n", t, count);
      exit(1);
    }
}

static void *launching_beside(void *arg) {
  const long self = (long)arg, calls = 20000;
  void *context, *stream;
  check(retain(&context, 0), "cuDevicePrimaryCtxRetain");
  check(set(context), "cuCtxSetCurrent");
  check(create(&stream, 1), "cuStreamCreate");
  for (long i = 0; i < 5000; i++) launch_on(stream);
  for (int r = 0; r < REPETITIONS; r++) {
    pthread_barrier_wait(&barrier);
    uint64_t begun = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    for (long i = 0; i < calls; i++) launch_on(stream);
    of_thread[r][self] = (double)(clock_ns(CLOCK_THREAD_CPUTIME_ID) - begun) / (double)calls;
  }
  check(destroy(stream), "cuStreamDestroy");
  return NULL;
}

static void bench_threads(long count) {
  if (count > MANY) count = MANY;
  pthread_barrier_init(&barrier, NULL, (unsigned)count);
  start_threads(count, launching_beside);
  for (long t = 0; t < count; t++) pthread_join(many[t], NULL);
  for (int r = 0; r < REPETITIONS; r++) {
    double sum = 0;
    for (long t = 0; t < count; t++) sum += of_thread[r][t];
    printf("%.3f\n", sum / (double)count);
  }
}

static void bench_streams(long count) {
  static void *stream[4096];
  const long calls = 1000000;
  if (count > 4096) count = 4096;
  for (long s = 0; s < count; s++) check(create(&stream[s], 1), "cuStreamCreate");
  double before = probe();
  for (int r = -1; r < REPETITIONS; r++) {
    uint64_t begun = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    for (long i = 0, s = 0; i < calls; i++) {
      launch_on(stream[s]);
      if (++s == count) s = 0;
    }
    double taken = (double)(clock_ns(CLOCK_THREAD_CPUTIME_ID) - begun) / (double)calls;
    double after = probe();
    if (r >= 0) printf("%.3f %.4f\n", taken, before > after ? before : after);
    before = after;
  }
}

static void *with_a_stream(void *unused) {
  void *context, *stream;
  check(retain(&context, 0), "cuDevicePrimaryCtxRetain");
  check(set(context), "cuCtxSetCurrent");
  check(create(&stream, 1), "cuStreamCreate");
  for (int round = 0; round < 2; round++) {
    for (int i = 0; i < 20; i++) launch_on(stream);
    check(synchronise(stream), "cuStreamSynchronize");
  }
  check(destroy(stream), "cuStreamDestroy");
  return unused;
}

static void bench_start(long count) {
  if (count > MANY) count = MANY;
  for (int r = -1; r < REPETITIONS; r++) {
    uint64_t begun = clock_ns(CLOCK_MONOTONIC);
    start_threads(count, with_a_stream);
    for (long t = 0; t < count; t++) pthread_join(many[t], NULL);
    if (r >= 0) printf("%llu\n", (unsigned long long)(clock_ns(CLOCK_MONOTONIC) - begun));
  }
}

static void bench_alloc(long live) {
  uint64_t *held = malloc(sizeof *held * (size_t)(live + 1)), address;
  for (long i = 0; i < live; i++) check(alloc(&held[i], 4096), "cuMemAlloc");
  const long pairs = 300000;
  for (int r = -1; r < REPETITIONS; r++) {
    uint64_t begun = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    for (long i = 0; i < pairs; i++) {
      check(alloc(&address, 4096), "cuMemAlloc");
      check(free_(address), "cuMemFree");
    }
    if (r >= 0) printf("%.3f\n", (double)(clock_ns(CLOCK_THREAD_CPUTIME_ID) - begun) / (double)pairs);
  }
}

static void bench_info(void) {
  size_t free_bytes, total;
  const long calls = 1000000;
  for (int r = -1; r < REPETITIONS; r++) {
    uint64_t begun = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    for (long i = 0; i < calls; i++) info(&free_bytes, &total);
    if (r >= 0) printf("%.3f\n", (double)(clock_ns(CLOCK_THREAD_CPUTIME_ID) - begun) / (double)calls);
  }
}

static void slices(double seconds) {
  static uint64_t gaps[1 << 16][2];
  size_t count = 0;
  uint64_t last = clock_ns(CLOCK_MONOTONIC), end = last + (uint64_t)(seconds * 1e9);
  while (last < end && count < sizeof gaps / sizeof *gaps) {
    one_launch();
    uint64_t now = clock_ns(CLOCK_MONOTONIC);
    if (now - last > 50000) {
      gaps[count][0] = last;
      gaps[count++][1] = now;
    }
    last = now;
  }
  for (size_t i = 0; i < count; i++) printf("%llu %llu\n", (unsigned long long)gaps[i][0], (unsigned long long)gaps[i][1]);
}

static void futex(_Atomic uint32_t *word, int op, uint32_t value) { syscall(SYS_futex, word, op, value, NULL, NULL, 0); }

static void busy_until(uint64_t end) {
  while (clock_ns(CLOCK_MONOTONIC) < end) {
  }
}

static void bench_futex(long rounds, int busy) {
  const uint64_t turn = 5000000, still = 200000;
  struct shared {
    _Atomic uint32_t ping, pong;
    _Atomic uint64_t woken_at;
  } *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pid_t child = fork();
  if (child == 0) {
    for (uint32_t round = 1; round <= (uint32_t)rounds; round++) {
      while (atomic_load(&shared->ping) != round) futex(&shared->ping, FUTEX_WAIT, round - 1);
      shared->woken_at = clock_ns(CLOCK_MONOTONIC);
      atomic_store(&shared->pong, round);
      futex(&shared->pong, FUTEX_WAKE, 1);
    }
    _exit(0);
  }
  for (uint32_t round = 1; round <= (uint32_t)rounds; round++) {
    if (busy) busy_until(clock_ns(CLOCK_MONOTONIC) + turn);
    else usleep(1000); /* let the other one fall asleep */
    uint64_t begun = clock_ns(CLOCK_MONOTONIC);
    atomic_store(&shared->ping, round);
    futex(&shared->ping, FUTEX_WAKE, 1);
    if (busy) busy_until(begun + still);
    while (atomic_load(&shared->pong) != round) futex(&shared->pong, FUTEX_WAIT, round - 1);
    printf("%llu\n", (unsigned long long)(shared->woken_at - begun));
  }
  waitpid(child, NULL, 0);
}

static void bench_turns(long rounds) {
  enum { MOST = 4096 };
  struct shared {
    _Atomic uint32_t open[2][32]; /* a line each */
    _Atomic uint32_t dealt[32];
    _Atomic uint64_t stopped[MOST], began[MOST];
  } *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  const uint32_t count = rounds < MOST ? (uint32_t)rounds : MOST;
  for (int self = 0; self < 2; self++) {
    if (fork()) continue;
    _Atomic uint32_t *open = &shared->open[self][0];
    /* Turn n + 1 is open as the number n + 1; its holder is 0 for an even n. */
    for (uint32_t turn = (uint32_t)self; turn < count; turn += 2) {
      /* A turn that is over before its holder was given a core is left out. */
      const struct timespec soon = {0, 20000000};
      uint32_t seen;
      while ((seen = atomic_load(open)) != turn + 1 && atomic_load(shared->dealt) <= turn)
        syscall(SYS_futex, open, FUTEX_WAIT, seen, &soon, NULL, 0);
      if (seen != turn + 1) continue;
      uint64_t last = shared->began[turn] = clock_ns(CLOCK_MONOTONIC);
      /* Looked at before the word: one that loses its core in between, to the other, was not at work after that. */
      for (uint64_t now = last; atomic_load(open) == turn + 1; now = clock_ns(CLOCK_MONOTONIC)) last = now;
      shared->stopped[turn] = last;
    }
    _exit(0);
  }
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  for (uint32_t turn = 0; turn <= count; turn++) {
    at.tv_nsec += 5000000;
    if (at.tv_nsec >= 1000000000) at.tv_nsec -= 1000000000, at.tv_sec++;
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
    if (turn > 0) atomic_store(&shared->open[(turn - 1) % 2][0], 0);
    atomic_store(shared->dealt, turn);
    if (turn == count) break;
    atomic_store(&shared->open[turn % 2][0], turn + 1);
    futex(&shared->open[turn % 2][0], FUTEX_WAKE, 1);
  }
  while (wait(NULL) > 0) {
  }
  for (uint32_t turn = 1; turn < count; turn++)
    if (shared->began[turn] && shared->stopped[turn - 1]) printf("%lld\n", (long long)(shared->began[turn] - shared->stopped[turn - 1]));
}

int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "";
  const char *arg = argc > 2 ? argv[2] : "";
  if (!strcmp(mode, "futex")) return bench_futex(atol(arg), 0), 0;
  if (!strcmp(mode, "futex-busy")) return bench_futex(atol(arg), 1), 0;
  if (!strcmp(mode, "turns")) return bench_turns(atol(arg)), 0;
  start();
  if (!strcmp(mode, "first")) {
    check(one_launch(), "cuLaunchKernel");
    printf("%llu\n", (unsigned long long)clock_ns(CLOCK_MONOTONIC));
  } else if (!strcmp(mode, "launch")) bench_launch(atoi(arg));
  else if (!strcmp(mode, "threads")) bench_threads(atol(arg));
  else if (!strcmp(mode, "streams")) bench_streams(atol(arg));
  else if (!strcmp(mode, "start")) bench_start(atol(arg));
  else if (!strcmp(mode, "alloc")) bench_alloc(atol(arg));
  else if (!strcmp(mode, "info")) bench_info();
  else if (!strcmp(mode, "slices")) slices(atof(arg));
  else return fprintf(stderr, "host: unknown mode %s\n", mode), 2;
  return 0;
}
