// Threads that never rest: each fills buffers of its own by copies, memsets and a graph, reads them
// back, allocates and frees, until stdin closes. Answers each line of it with the number of
// iterations so far, and its end with one line: ITERATIONS WRONG_WORDS ERRORS LAST_ERROR.
//
//   restless [THREADS]
#define _GNU_SOURCE
#include "driver.h"
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

enum { MOST = 16, BUFFERS = 6, WORDS = 4096 };

static atomic_int over;
static atomic_ullong iterations, wrong, errors, last;
static W context;

static int good(cu_status status) {
    if (status) {
        errors++;
        last = (unsigned)status;
    }
    return !status;
}

static unsigned next(unsigned *state) { return *state = *state * 1664525u + 1013904223u; }

static void *work(void *which) {
    unsigned state = 17 + (unsigned)(uintptr_t)which * 7919;
    W buffers[BUFFERS] = {0}, stream = 0, capturing = 0, graph = 0, exec = 0, fixed = 0;
    size_t words[BUFFERS] = {0};
    unsigned values[BUFFERS] = {0};
    unsigned *host = malloc(WORDS * 64 * 4);
    if (!good(CALL("cuCtxSetCurrent", context)) || !good(CALL("cuStreamCreate", &stream, (unsigned)((uintptr_t)which & 1))) ||
        !good(CALL("cuStreamCreate", &capturing, 1u)) || !good(CALL("cuMemAlloc_v2", &fixed, (size_t)WORDS * 4)))
        return NULL;
    good(CALL("cuStreamBeginCapture_v2", capturing, 1u));
    good(CALL("cuMemsetD32Async", fixed, 0xabcd1234u, (size_t)WORDS, capturing));
    good(CALL("cuStreamEndCapture", capturing, &graph));
    if (!good(CALL("cuGraphInstantiateWithFlags", &exec, graph, (W)0))) return NULL;
    while (!over) {
        int at = next(&state) % BUFFERS;
        if (!buffers[at]) {
            words[at] = WORDS << (next(&state) % 7);
            if (!good(CALL("cuMemAlloc_v2", &buffers[at], words[at] * 4))) return NULL;
            values[at] = next(&state);
            good(CALL("cuMemsetD32Async", buffers[at], values[at], words[at], stream));
        } else {
            good(CALL("cuMemcpyDtoHAsync_v2", host, buffers[at], words[at] * 4, stream));
            good(CALL("cuStreamSynchronize", stream));
            for (size_t word = 0; word < words[at]; word++) wrong += host[word] != values[at];
            switch (next(&state) % 4) {
            case 0:
                good(CALL("cuMemFree_v2", buffers[at]));
                buffers[at] = 0;
                break;
            case 1:
                values[at] = next(&state);
                good(CALL("cuMemsetD32Async", buffers[at], values[at], words[at], stream));
                break;
            case 2:
                good(CALL("cuMemsetD32Async", fixed, 0u, (size_t)WORDS, stream));
                good(CALL("cuGraphLaunch", exec, stream));
                good(CALL("cuMemcpyDtoHAsync_v2", host, fixed, (size_t)WORDS * 4, stream));
                good(CALL("cuStreamSynchronize", stream));
                for (size_t word = 0; word < WORDS; word++) wrong += host[word] != 0xabcd1234u;
                break;
            default:
                values[at] = next(&state);
                for (size_t word = 0; word < words[at]; word++) host[word] = values[at];
                good(CALL("cuMemcpyHtoD_v2", buffers[at], host, words[at] * 4));
            }
        }
        iterations++;
    }
    good(CALL("cuStreamSynchronize", stream));
    for (int at = 0; at < BUFFERS; at++)
        if (buffers[at]) good(CALL("cuMemFree_v2", buffers[at]));
    good(CALL("cuMemFree_v2", fixed));
    return NULL;
}

int main(int count, char **words) {
    int threads = count > 1 ? atoi(words[1]) : 4;
    cu_device device = 0;
    pthread_t all[MOST];
    if (open_driver()) return 3;
    if (threads < 1 || threads > MOST) threads = 4;
    if (!good(CALL("cuInit", 0u)) || !good(CALL("cuDeviceGet", &device, 0)) ||
        !good(CALL("cuDevicePrimaryCtxRetain", &context, device)))
        return 4;
    for (int at = 0; at < threads; at++) pthread_create(&all[at], NULL, work, (void *)(uintptr_t)at);
    printf("started\n");
    fflush(stdout);
    for (int byte; (byte = getchar()) != EOF;)
        if (byte == '\n') {
            printf("%llu\n", (unsigned long long)iterations);
            fflush(stdout);
        }
    over = 1;
    for (int at = 0; at < threads; at++) pthread_join(all[at], NULL);
    printf("%llu %llu %llu %llu\n", (unsigned long long)iterations, (unsigned long long)wrong, (unsigned long long)errors,
           (unsigned long long)last);
    return 0;
}
