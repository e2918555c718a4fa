// How the host programs reach the driver: function by function, by name, in the libcuda.so.1 that
// the dynamic linker finds.
#pragma once
#include "cuda_min.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

typedef cu_word W;
static void *driver;

static inline void *find(const char *name) {
    void *at = dlsym(driver, name);
    if (!at) {
        fprintf(stderr, "the driver has no %s\n", name);
        exit(3);
    }
    return at;
}

// The status of the driver's function of that name. Arguments go by their own types: cast what is
// no int.
#define CALL(name, ...) ((cu_status(*)())find(name))(__VA_ARGS__)

// Opens the library; the program's exit code, where that fails.
static inline int open_driver(void) {
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) fprintf(stderr, "%s\n", dlerror());
    return driver ? 0 : 3;
}

// Initialises the driver and makes the device's primary context current.
static inline cu_status use_device(int ordinal) {
    cu_device device = 0;
    W context = 0;
    cu_status status = CALL("cuInit", 0u);
    if (!status) status = CALL("cuDeviceGet", &device, ordinal);
    if (!status) status = CALL("cuDevicePrimaryCtxRetain", &context, device);
    if (!status) status = CALL("cuCtxSetCurrent", context);
    return status;
}

// The kernel of that name from a file of PTX.
static inline cu_status load_kernel(const char *path, const char *name, W *kernel) {
    static char text[1 << 18];
    W module = 0;
    FILE *file = fopen(path, "r");
    size_t length = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file) fclose(file);
    text[length] = 0;
    if (!length) {
        fprintf(stderr, "%s cannot be read\n", path);
        exit(2);
    }
    cu_status status = CALL("cuModuleLoadData", &module, text);
    return status ? status : CALL("cuModuleGetFunction", kernel, module, name);
}

// One block of `threads` threads.
static inline cu_status launch(W kernel, unsigned threads, W stream, void **parameters) {
    cu_status (*real)(W, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, W, void **, void **) =
        find("cuLaunchKernel");
    return real(kernel, 1, 1, 1, threads, 1, 1, 0, stream, parameters, NULL);
}
