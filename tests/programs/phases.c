// Phases of short kernels and of long ones, by the same program, the last of them as launches of a
// graph: how many long ones were in flight at once, at most, in each long phase, as far as the
// program can tell. Arguments: the PTX of sublet_busy_us, and microseconds of a long kernel.
#define _GNU_SOURCE
#include "cuda_min.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

enum { SHORT = 4000, LONG = 12, PHASES = 3 };
typedef cu_word W;
static void *driver;

static void *find(const char *name) {
    void *at = dlsym(driver, name);
    if (!at) {
        fprintf(stderr, "the driver has no %s\n", name);
        exit(3);
    }
    return at;
}

#define CALL(name, ...)                                                          \
    do {                                                                         \
        cu_status status = ((cu_status(*)())find(name))(__VA_ARGS__);            \
        if (status) {                                                            \
            fprintf(stderr, "%s answers %d\n", name, status);                    \
            exit(4);                                                             \
        }                                                                        \
    } while (0)

static char text[1 << 16];

struct node {
    W function;
    unsigned grid[3], block[3], shared;
    void **parameters, **extra;
    W kernel, context;
};

int main(int count, char **words) {
    if (count < 3) return 2;
    FILE *file = fopen(words[1], "r");
    if (!file || !fread(text, 1, sizeof text - 1, file)) return 2;
    fclose(file);
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) return 3;
    W context, module, kernel, stream, event[LONG];
    CALL("cuInit", 0u);
    CALL("cuDevicePrimaryCtxRetain", &context, 0);
    CALL("cuCtxSetCurrent", context);
    CALL("cuModuleLoadData", &module, text);
    CALL("cuModuleGetFunction", &kernel, module, "sublet_busy_us");
    CALL("cuStreamCreate", &stream, 1u);
    for (int at = 0; at < LONG; at++) CALL("cuEventCreate", &event[at], 2u);
    cu_status (*launch)(W, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, W, void **, void **) =
        find("cuLaunchKernel");
    cu_status (*query)(W) = find("cuEventQuery");
    for (int phase = 0; phase < PHASES; phase++) {
        uint64_t us = 10;
        void *parameters[] = {&us};
        for (int at = 0; at < SHORT; at++)
            if (launch(kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL)) return 5;
        us = strtoull(words[2], NULL, 10);
        int done = 0, most = 0;
        W graph, added, exec = 0;
        if (phase == PHASES - 1) {
            struct node node = {kernel, {64, 1, 1}, {1, 1, 1}, 0, parameters, NULL, 0, 0};
            CALL("cuGraphCreate", &graph, 0u);
            CALL("cuGraphAddKernelNode_v2", &added, graph, NULL, (size_t)0, &node);
            CALL("cuGraphInstantiateWithFlags", &exec, graph, (uint64_t)0);
        }
        for (int at = 0; at < LONG; at++) {
            if (exec)
                CALL("cuGraphLaunch", exec, stream);
            else if (launch(kernel, 64, 1, 1, 1, 1, 1, 0, stream, parameters, NULL))
                return 5;
            CALL("cuEventRecord", event[at], stream);
            while (done <= at && !query(event[done])) done++;
            if (at + 1 - done > most) most = at + 1 - done;
        }
        CALL("cuStreamSynchronize", stream);
        printf("%d\n", most);
        fflush(stdout);
    }
    return 0;
}
