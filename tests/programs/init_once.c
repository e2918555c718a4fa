// Finds cuInit by the ordinary search, calls it once and says what it returned.
#define _GNU_SOURCE
#include "cuda_min.h"
#include <dlfcn.h>
#include <stdio.h>

int main(void) {
    cu_status (*init)(unsigned) = (cu_status(*)(unsigned))dlsym(RTLD_DEFAULT, "cuInit");
    if (!init) return 3;
    printf("%d\n", init(0));
    return 0;
}
