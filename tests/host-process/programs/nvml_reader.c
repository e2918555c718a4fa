/* Reads NVML as monitors do, never the driver: memory and processes of every device, one line for each question. The first
 * argument says how NVML is reached; compiled with -DLINKED, by being linked against it. The second is its absolute path. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *device_t;
struct memory { uint64_t total, free, used; };
struct memory2 { uint32_t version, padding; uint64_t total, reserved, free, used; };
struct process1 { uint32_t pid, padding; uint64_t used; };
struct process2 { uint32_t pid, padding; uint64_t used; uint32_t gpu, compute; };
struct rates { uint32_t gpu, memory; };

#ifdef LINKED
int nvmlInit_v2(void), nvmlShutdown(void), nvmlDeviceGetCount_v2(uint32_t *), nvmlDeviceGetHandleByIndex_v2(uint32_t, device_t *);
int nvmlDeviceGetUUID(device_t, char *, uint32_t), nvmlDeviceGetMemoryInfo(device_t, struct memory *);
int nvmlDeviceGetMemoryInfo_v2(device_t, struct memory2 *), nvmlDeviceGetUtilizationRates(device_t, struct rates *);
int nvmlDeviceGetComputeRunningProcesses(device_t, uint32_t *, struct process1 *);
int nvmlDeviceGetComputeRunningProcesses_v2(device_t, uint32_t *, struct process2 *);
int nvmlDeviceGetComputeRunningProcesses_v3(device_t, uint32_t *, struct process2 *);
int nvmlDeviceGetGraphicsRunningProcesses_v3(device_t, uint32_t *, struct process2 *);
#define CALL(name) name
#else
static void *handle;
static void *look_up(const char *name) {
    void *at = dlsym(handle, name);
    if (!at) {
        fprintf(stderr, "no function %s\n", name);
        exit(91);
    }
    return at;
}
#define CALL(name) ((int (*)())look_up(#name))
#endif

int main(int argc, char **argv) {
    uint32_t devices = 0;
#ifdef LINKED
    (void)argc, (void)argv;
#else
    const char *way = argc > 1 ? argv[1] : "soname", *path = argc > 2 ? argv[2] : "";
    if (!strcmp(way, "absolute"))
        handle = dlopen(path, RTLD_NOW);
    else if (!strcmp(way, "default"))
        handle = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_GLOBAL) ? RTLD_DEFAULT : (void *)-1L;
    else if (!strcmp(way, "again")) {
        /* Closed and opened again, as some libraries do. */
        for (int i = 0; i < 2; i++) {
            handle = dlopen("libnvidia-ml.so.1", RTLD_NOW);
            look_up("nvmlDeviceGetMemoryInfo");
            dlclose(handle);
        }
        handle = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    } else
        handle = dlopen("libnvidia-ml.so.1", RTLD_LAZY);
    if (!handle && strcmp(way, "default")) {
        fprintf(stderr, "%s\n", dlerror());
        return 90;
    }
#endif
    if (CALL(nvmlInit_v2)() || CALL(nvmlDeviceGetCount_v2)(&devices))
        return 1;
    for (uint32_t i = 0; i < devices; i++) {
        device_t device = 0;
        char uuid[96] = "";
        struct memory one = {0};
        struct memory2 two = {0x02000028, 0, 0, 0, 0, 0};
        struct memory2 bad = {0x01000028, 0, 0, 0, 0, 0};
        struct rates rates = {0};
        if (CALL(nvmlDeviceGetHandleByIndex_v2)(i, &device) || CALL(nvmlDeviceGetUUID)(device, uuid, sizeof uuid))
            return 2;
        printf("device %u %s\n", i, uuid);
        if (CALL(nvmlDeviceGetMemoryInfo)(device, &one) || CALL(nvmlDeviceGetMemoryInfo_v2)(device, &two))
            return 3;
        printf("memory %lu %lu %lu\n", one.total, one.free, one.used);
        printf("memory2 %lu %lu %lu %lu\n", two.total, two.reserved, two.free, two.used);
        printf("mistakes %d %d %d\n", CALL(nvmlDeviceGetMemoryInfo)(device, (struct memory *)0), CALL(nvmlDeviceGetMemoryInfo_v2)(device, &bad),
               CALL(nvmlDeviceGetMemoryInfo)((device_t)0, &one));
        uint32_t none = 0, space = 32;
        printf("asked %d", CALL(nvmlDeviceGetComputeRunningProcesses_v3)(device, &none, (struct process2 *)0));
        printf(" for %u\n", none);
        struct process1 list1[32];
        struct process2 list2[32];
        memset(list1, 0, sizeof list1);
        if (CALL(nvmlDeviceGetComputeRunningProcesses)(device, &space, list1))
            return 4;
        for (uint32_t p = 0; p < space; p++)
            printf("process1 %u %lu\n", list1[p].pid, list1[p].used);
        space = 32;
        if (CALL(nvmlDeviceGetComputeRunningProcesses_v2)(device, &space, list2))
            return 5;
        for (uint32_t p = 0; p < space; p++)
            printf("process2 %u %lu %u\n", list2[p].pid, list2[p].used, list2[p].gpu);
        space = 32;
        if (CALL(nvmlDeviceGetComputeRunningProcesses_v3)(device, &space, list2))
            return 6;
        for (uint32_t p = 0; p < space; p++)
            printf("process3 %u %lu %u\n", list2[p].pid, list2[p].used, list2[p].compute);
        space = 32;
        printf("graphics %d", CALL(nvmlDeviceGetGraphicsRunningProcesses_v3)(device, &space, list2));
        printf(" of %u\n", space);
        printf("rates %d\n", CALL(nvmlDeviceGetUtilizationRates)(device, &rates));
    }
    printf("shut down %d\n", CALL(nvmlShutdown)());
    return 0;
}
