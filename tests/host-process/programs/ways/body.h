/* What every way in does once it has a way to ask for functions: the same few calls of every kind (asked, metered,
 * gated, observed, forwarded), each counted by name. */
#ifndef BODY_H
#define BODY_H
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void *(*lookup_fn)(const char *symbol);

/* Calls made, by exported name; every way makes the same. */
static const char *const body_names[] = {
    "cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent",
    "cuMemAlloc_v2", "cuMemGetInfo_v2", "cuStreamCreate", "cuMemsetD8Async", "cuEventCreate", "cuEventRecord",
    "cuStreamSynchronize", "cuMemsetD8_v2", "cuEventDestroy_v2", "cuStreamDestroy_v2", "cuMemFree_v2",
    "cuDevicePrimaryCtxRelease_v2",
};
enum { BODY_CALLS = sizeof body_names / sizeof *body_names };

static int body_missing(const char *name) {
    fprintf(stderr, "no function %s\n", name);
    return 9;
}

/* Runs the calls, and prints how many; 0 when all succeeded. */
static int body(lookup_fn get) {
    typedef int (*f1)(uintptr_t);
    typedef int (*f2)(uintptr_t, uintptr_t);
    typedef int (*f3)(uintptr_t, uintptr_t, uintptr_t);
    typedef int (*f4)(uintptr_t, uintptr_t, uintptr_t, uintptr_t);
    for (int i = 0; i < BODY_CALLS; i++)
        if (!get(body_names[i]))
            return body_missing(body_names[i]);
    int version = 0, count = 0, device = 0, bad = 0, at = 0, made = 0;
    void *context = 0, *stream = 0, *event = 0;
    uint64_t memory = 0;
    size_t free_bytes = 0, total = 0;
#define DO(call) do { int r = (call); if (r) { fprintf(stderr, "%s: %d\n", body_names[at], r); bad = 1; } made++; at++; } while (0)
    DO(((f1)get(body_names[0]))(0));
    DO(((f1)get(body_names[1]))((uintptr_t)&version));
    DO(((f1)get(body_names[2]))((uintptr_t)&count));
    DO(((f2)get(body_names[3]))((uintptr_t)&device, 0));
    DO(((f2)get(body_names[4]))((uintptr_t)&context, (uintptr_t)device));
    DO(((f1)get(body_names[5]))((uintptr_t)context));
    DO(((f2)get(body_names[6]))((uintptr_t)&memory, 1 << 20));
    DO(((f2)get(body_names[7]))((uintptr_t)&free_bytes, (uintptr_t)&total));
    DO(((f2)get(body_names[8]))((uintptr_t)&stream, 0));
    DO(((f4)get(body_names[9]))(memory, 7, 1 << 20, (uintptr_t)stream));
    DO(((f2)get(body_names[10]))((uintptr_t)&event, 0));
    DO(((f2)get(body_names[11]))((uintptr_t)event, (uintptr_t)stream));
    DO(((f1)get(body_names[12]))((uintptr_t)stream));
    DO(((f3)get(body_names[13]))(memory, 1, 1 << 20));
    DO(((f1)get(body_names[14]))((uintptr_t)event));
    DO(((f1)get(body_names[15]))((uintptr_t)stream));
    DO(((f1)get(body_names[16]))(memory));
    DO(((f1)get(body_names[17]))((uintptr_t)device));
#undef DO
    printf("%d\n", made);
    fflush(stdout);
    if (getenv("WAYS_LINGER"))
        usleep(200000); /* so that the watcher can look */
    return bad;
}
#endif
