/* A library opened with RTLD_DEEPBIND, which looks NVML up past everybody else's dlsym; compiled with -DLIBRARY it is that
 * library. The first argument is the library, the second 1: the driver is used before. Prints what NVML says of memory. */
#include "host.h"

struct memory { uint64_t total, free, used; };

#ifdef LIBRARY
int tell(void) {
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW), *device = 0;
    int (*start)(void) = (int (*)(void))dlsym(nvml, "nvmlInit_v2");
    int (*find)(unsigned, void **) = (int (*)(unsigned, void **))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
    int (*ask)(void *, struct memory *) = (int (*)(void *, struct memory *))dlsym(nvml, "nvmlDeviceGetMemoryInfo");
    struct memory memory;
    if (!start || !find || !ask || start() || find(0, &device) || ask(device, &memory))
        return 1;
    printf("total %lu used %lu\n", memory.total, memory.used);
    return 0;
}
#else
int main(int argc, char **argv) {
    if (argc < 3)
        return 2;
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_DEEPBIND);
    int (*tell)(void) = library ? (int (*)(void))dlsym(library, "tell") : 0;
    /* As a framework that links it. */
    if (!tell || !dlopen("libnvidia-ml.so.1", RTLD_NOW))
        return 3;
    if (atoi(argv[2]) && use_driver())
        return 4;
    return tell();
}
#endif
