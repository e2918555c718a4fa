// A block of known contents in one context, while threads make other contexts, use memory in them,
// and end them, until stdin closes. Answers each line of it with the number of contexts that have
// ended so far, and its end with one line: CONTEXTS WRONG_WORDS ERRORS LAST_ERROR.
//
//   contexts WAY [THREADS]     of ending: created, detached, released, reset, green
#define _GNU_SOURCE
#include "driver.h"
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

enum { MOST = 8, WORDS = 1 << 20, RESOURCE = 144 };

static atomic_int over;
static atomic_ullong ended, errors, last;
static const char *way;
static unsigned block[WORDS];

static int good(cu_status status) {
    if (status) {
        errors++;
        last = (unsigned)status;
    }
    return !status;
}

// Work of a thread in the context that is current to it.
static int use(void) {
    W at = 0;
    return good(CALL("cuMemAlloc_v2", &at, (size_t)4096)) && good(CALL("cuMemsetD32_v2", at, 7u, (size_t)1024)) &&
           good(CALL("cuMemFree_v2", at));
}

static int created(int detached) {
    W context = 0, same = 0, at = 0;
    if (!good(CALL("cuCtxCreate_v2", &context, 0u, 0))) return 0;
    // What it holds goes with it.
    if (!good(CALL("cuMemAlloc_v2", &at, (size_t)4096)) || !use()) return 0;
    if (!detached) return good(CALL("cuCtxDestroy_v2", context));
    return good(CALL("cuCtxAttach", &same, 0u)) && good(CALL("cuCtxDetach", same)) && use() &&
           good(CALL("cuCtxDetach", context));
}

static int primary(int reset) {
    W context = 0;
    if (!good(CALL("cuDevicePrimaryCtxRetain", &context, 0)) || !good(CALL("cuCtxSetCurrent", context)) || !use()) return 0;
    return good(reset ? CALL("cuDevicePrimaryCtxReset_v2", 0) : CALL("cuDevicePrimaryCtxRelease_v2", 0));
}

static int green(void) {
    unsigned char resource[RESOURCE];
    W description = 0, green = 0, context = 0;
    return good(CALL("cuDeviceGetDevResource", 0, resource, 1u)) &&
           good(CALL("cuDevResourceGenerateDesc", &description, resource, 1u)) &&
           good(CALL("cuGreenCtxCreate", &green, description, 0, 1u)) &&
           good(CALL("cuCtxFromGreenCtx", &context, green)) && good(CALL("cuCtxSetCurrent", context)) && use() &&
           good(CALL("cuGreenCtxDestroy", green));
}

static void *work(void *none) {
    int goes_on = 1;
    while (!over && goes_on) {
        if (!strcmp(way, "green")) goes_on = green();
        else if (!strcmp(way, "released") || !strcmp(way, "reset")) goes_on = primary(!strcmp(way, "reset"));
        else goes_on = created(!strcmp(way, "detached"));
        ended += goes_on;
    }
    return none;
}

int main(int count, char **words) {
    int threads = count > 2 ? atoi(words[2]) : 1;
    W context = 0, at = 0;
    pthread_t all[MOST];
    unsigned long long wrong = 0;
    if (count < 2 || open_driver()) return 3;
    way = words[1];
    if (threads < 1 || threads > MOST) threads = 1;
    for (int word = 0; word < WORDS; word++) block[word] = (unsigned)word * 2654435761u;
    if (!good(CALL("cuInit", 0u)) || !good(CALL("cuCtxCreate_v2", &context, 0u, 0)) ||
        !good(CALL("cuMemAlloc_v2", &at, sizeof block)) || !good(CALL("cuMemcpyHtoD_v2", at, block, sizeof block)))
        return 4;
    for (int thread = 0; thread < threads; thread++) pthread_create(&all[thread], NULL, work, NULL);
    printf("started\n");
    fflush(stdout);
    for (int byte; (byte = getchar()) != EOF;)
        if (byte == '\n') {
            printf("%llu\n", (unsigned long long)ended);
            fflush(stdout);
        }
    over = 1;
    for (int thread = 0; thread < threads; thread++) pthread_join(all[thread], NULL);
    memset(block, 0, sizeof block);
    good(CALL("cuMemcpyDtoH_v2", block, at, sizeof block));
    for (int word = 0; word < WORDS; word++) wrong += block[word] != (unsigned)word * 2654435761u;
    printf("%llu %llu %llu %llu\n", (unsigned long long)ended, wrong, (unsigned long long)errors, (unsigned long long)last);
    return 0;
}
