// A driver in front of the real one (LOOKING_DRIVER_REAL), whose constructor looks up a driver's
// names: as wrappers and tools do.
#define _GNU_SOURCE
#include "cuda_min.h"
#include <dlfcn.h>
#include <stdlib.h>

#define OURS __attribute__((visibility("default")))

static cu_status (*real_init)(unsigned);
static cu_status (*real_version)(int *);

__attribute__((constructor)) static void look(void) {
    void *real = dlopen(getenv("LOOKING_DRIVER_REAL"), RTLD_NOW | RTLD_LOCAL);
    if (!real) abort();
    real_init = (cu_status(*)(unsigned))dlsym(real, "cuInit");
    real_version = (cu_status(*)(int *))dlvsym(real, "cuDriverGetVersion", "none");
    if (!real_version) real_version = (cu_status(*)(int *))dlsym(real, "cuDriverGetVersion");
}

OURS cu_status cuInit(unsigned flags) { return real_init(flags); }
OURS cu_status cuDriverGetVersion(int *version) { return real_version(version); }
