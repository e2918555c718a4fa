// A program in unusual places: `unusual WHAT..`, in this order.
//   clear        forgets its environment but what the simulated device is configured by
//   devices      a context and 2 GiB on each device
//   allocate N   N times 500 MiB on device 0
//   nvml         the processes that NVML names on device 0, and this one
#define _GNU_SOURCE
#include "driver.h"
#include <string.h>
#include <unistd.h>

extern char **environ;

struct process { unsigned pid; unsigned long long bytes; unsigned instance, compute; };

static void clear(void) {
    static char *kept[64];
    int count = 0;
    for (char **at = environ; *at && count < 63; at++)
        if (!strncmp(*at, "SUBLET_SIM_", 11)) kept[count++] = strdup(*at);
    clearenv();
    for (int at = 0; at < count; at++) putenv(kept[at]);
}

static void devices(void) {
    int count = 0;
    CALL("cuInit", 0u);
    CALL("cuDeviceGetCount", &count);
    for (int at = 0; at < count; at++) {
        W context = 0, address = 0, handle = 0, pool = 0;
        cu_status made = CALL("cuCtxCreate_v2", &context, 0u, at);
        cu_status kept = CALL("cuDevicePrimaryCtxRetain", &context, at);
        cu_status given = CALL("cuDeviceGetDefaultMemPool", &pool, at);
        struct { unsigned type, handles, where; int id; void *meta; unsigned char flags[8]; } wanted = {1, 0, 1, at, NULL, {0}};
        cu_status created = CALL("cuMemCreate", &handle, (size_t)2 << 20, &wanted, 0ull);
        cu_status taken = made ? -1 : CALL("cuMemAlloc_v2", &address, (size_t)2 << 30);
        printf("device %d: context %d primary %d pool %d handle %d memory %d\n", at, made, kept, given, created, taken);
    }
}

static void nvml(void) {
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW), *device = NULL;
    int (*init)(void) = (int (*)(void))dlsym(library, "nvmlInit_v2");
    int (*by_index)(unsigned, void **) = (int (*)(unsigned, void **))dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
    int (*list)(void *, unsigned *, struct process *) = (int (*)(void *, unsigned *, struct process *))dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v3");
    struct process found[64];
    unsigned count = 64, own = 0;
    init();
    by_index(0, &device);
    int status = list(device, &count, found);
    for (unsigned at = 0; at < count; at++) own += found[at].pid == (unsigned)getpid();
    printf("nvml %d: %u processes, %u of them this one with %llu MiB\n", status, count, own, own ? found[0].bytes >> 20 : 0);
}

int main(int count, char **words) {
    for (int at = 1; at < count; at++) {
        if (!strcmp(words[at], "clear")) { clear(); continue; }
        if (!driver && open_driver()) return 3;
        if (!strcmp(words[at], "devices")) devices();
        if (!strcmp(words[at], "nvml")) nvml();
        if (!strcmp(words[at], "allocate")) {
            int times = atoi(words[++at]), given = 0;
            cu_status status = use_device(0);
            for (; times > 0; times--) {
                W address = 0;
                given += !CALL("cuMemAlloc_v2", &address, (size_t)500 << 20);
            }
            printf("status %d, %d given\n", status, given);
        }
    }
    return 0;
}
