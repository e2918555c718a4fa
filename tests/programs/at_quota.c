// A program at its memory limit: one thread computes, another tries an allocation that cannot fit,
// without a pause. Answers each line of stdin with how often it was refused so far, and whether
// anything else went wrong; ends with stdin.
//
//   at_quota PTX BYTES
#include "driver.h"
#include <pthread.h>
#include <stdatomic.h>

static atomic_int over;
static atomic_ullong refused, wrong;
static W context, kernel;
static size_t bytes;

static void *compute(void *none) {
    W stream = 0, microseconds = 200;
    void *parameters[] = {&microseconds};
    if (CALL("cuCtxSetCurrent", context) || CALL("cuStreamCreate", &stream, 1u)) wrong++;
    while (!over) {
        for (int at = 0; at < 50; at++)
            if (launch(kernel, 32, stream, parameters)) wrong++;
        if (CALL("cuStreamSynchronize", stream)) wrong++;
    }
    return none;
}

static void *allocate(void *none) {
    W memory = 0;
    if (CALL("cuCtxSetCurrent", context)) wrong++;
    while (!over) {
        if (CALL("cuMemAlloc_v2", &memory, bytes) == 2) refused++;
        else wrong++;
    }
    return none;
}

int main(int count, char **words) {
    if (count < 3 || open_driver()) return 3;
    bytes = strtoull(words[2], NULL, 10);
    if (use_device(0) || CALL("cuCtxGetCurrent", &context)) return 4;
    if (load_kernel(words[1], "sublet_busy_us", &kernel)) return 5;
    pthread_t threads[2];
    pthread_create(&threads[0], NULL, compute, NULL);
    pthread_create(&threads[1], NULL, allocate, NULL);
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        printf("%llu %llu\n", (unsigned long long)refused, (unsigned long long)wrong);
        fflush(stdout);
    }
    over = 1;
    for (int at = 0; at < 2; at++) pthread_join(threads[at], NULL);
    return 0;
}
