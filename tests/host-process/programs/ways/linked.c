/* Linked against libcuda.so.1; with -DIN_CONSTRUCTOR the calls are made before main, with -DSTATIC the driver is opened by a
 * program that has no dynamic loader. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>
#include "body.h"

#ifdef STATIC
static void *handle;
static void *get(const char *name) { return dlsym(handle, name); }
int main(int argc, char **argv) {
    if (argc < 2 || !(handle = dlopen(argv[1], RTLD_NOW))) {
        fprintf(stderr, "%s\n", argc < 2 ? "no driver named" : dlerror());
        return 8;
    }
    return body(get);
}
#else
#define NAMES(X) X(cuInit) X(cuDriverGetVersion) X(cuDeviceGetCount) X(cuDeviceGet) X(cuDevicePrimaryCtxRetain) \
    X(cuCtxSetCurrent) X(cuMemAlloc_v2) X(cuMemGetInfo_v2) X(cuStreamCreate) X(cuMemsetD8Async) X(cuEventCreate) \
    X(cuEventRecord) X(cuStreamSynchronize) X(cuMemsetD8_v2) X(cuEventDestroy_v2) X(cuStreamDestroy_v2) X(cuMemFree_v2) \
    X(cuDevicePrimaryCtxRelease_v2)
#define DECLARE(name) extern int name(void);
NAMES(DECLARE)
static void *get(const char *wanted) {
#define ANSWER(name) if (!strcmp(wanted, #name)) return (void *)name;
    NAMES(ANSWER)
    return 0;
}
int outcome = 4;
#ifdef IN_CONSTRUCTOR
__attribute__((constructor)) static void before_main(void) { outcome = body(get); }
#endif
int main(void) {
#ifndef IN_CONSTRUCTOR
    outcome = body(get);
#endif
    return outcome;
}
#endif
