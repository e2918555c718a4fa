/* Calls NVIDIA's runtime library (its path is the argument) as far as a machine without a device answers; one line a call. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef int (*call)(uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t);
static void *runtime;
static uint64_t out[8];

static void try(const char *name, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, int values) {
    call function = (call)dlsym(runtime, name);
    if (!function) {
        printf("%s: absent\n", name);
        return;
    }
    memset(out, 0, sizeof out);
    printf("%s: %d", name, function(a, b, c, d, 0, 0));
    for (int n = 0; n < values; n++)
        printf(" %d", (int)out[n]);
    const char *(*text)(int) = (const char *(*)(int))dlsym(runtime, "cudaGetErrorString");
    int (*last)(void) = (int (*)(void))dlsym(runtime, "cudaGetLastError");
    if (text && last) {
        int error = last();
        printf(" (%d %s)", error, text(error));
    }
    printf("\n");
}

int main(int count, char **words) {
    if (count != 2 || !(runtime = dlopen(words[1], RTLD_NOW))) {
        fprintf(stderr, "runtime: %s\n", count == 2 ? dlerror() : "name the library");
        return 3;
    }
    uintptr_t to = (uintptr_t)out, more = (uintptr_t)(out + 1);
    try("cudaRuntimeGetVersion", to, 0, 0, 0, 1);
    try("cudaDriverGetVersion", to, 0, 0, 0, 1);
    try("cudaGetDeviceCount", to, 0, 0, 0, 1);
    try("cudaGetDevice", to, 0, 0, 0, 1);
    try("cudaSetDevice", 0, 0, 0, 0, 0);
    try("cudaInitDevice", 0, 0, 0, 0, 0);
    try("cudaDeviceGetAttribute", to, 1, 0, 0, 1);
    try("cudaDeviceSynchronize", 0, 0, 0, 0, 0);
    try("cudaMalloc", to, 1 << 20, 0, 0, 0);
    try("cudaMallocAsync", to, 1 << 20, 0, 0, 0);
    try("cudaMallocManaged", to, 1 << 20, 1, 0, 0);
    try("cudaMallocHost", to, 1 << 20, 0, 0, 0);
    try("cudaMemGetInfo", to, more, 0, 0, 0);
    try("cudaFree", 0, 0, 0, 0, 0);
    try("cudaStreamCreate", to, 0, 0, 0, 0);
    try("cudaStreamCreateWithFlags", to, 1, 0, 0, 0);
    try("cudaStreamSynchronize", 0, 0, 0, 0, 0);
    try("cudaEventCreate", to, 0, 0, 0, 0);
    try("cudaMemset", 0, 0, 16, 0, 0);
    try("cudaMemcpy", to, more, 8, 0, 0);
    try("cudaHostRegister", to, 8, 0, 0, 0);
    try("cudaGraphCreate", to, 0, 0, 0, 0);
    try("cudaGetDriverEntryPoint", (uintptr_t) "cuInit", to, 0, 0, 0);
    try("cudaGetDriverEntryPointByVersion", (uintptr_t) "cuInit", to, 12000, 0, 0);
    try("cudaPeekAtLastError", 0, 0, 0, 0, 0);
    try("cudaDeviceReset", 0, 0, 0, 0, 0);
    try("cudaDeviceCanAccessPeer", to, 0, 1, 0, 1);
    try("cudaIpcGetMemHandle", to, 0, 0, 0, 0);
    return 0;
}
