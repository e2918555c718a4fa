// Stands before the driver as profilers do: wraps one function and finds the next one by RTLD_NEXT.
#define _GNU_SOURCE
#include "cuda_min.h"
#include <dlfcn.h>

__attribute__((visibility("default"))) cu_status cuInit(unsigned flags) {
    cu_status (*next)(unsigned) = (cu_status(*)(unsigned))dlsym(RTLD_NEXT, "cuInit");
    if (!next) {
        // Nobody after us: the driver was opened at run time.
        void *driver = dlopen("libcuda.so.1", RTLD_NOW);
        next = driver ? (cu_status(*)(unsigned))dlsym(driver, "cuInit") : NULL;
    }
    return next && next != cuInit ? next(flags) : -1;
}
