/* Asks in every way whether there is an NVML: before any is loaded, while one is for itself alone, and while one is for all. */
#include "host.h"

static const char *const names[] = {"nvmlInit_v2", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3"};

static void ask(const char *when, const char *how, void *handle) {
    printf("%s, %s:", when, how);
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
        dlerror();
        void *at = dlsym(handle, names[i]);
        printf(" %s%s", at ? "yes" : "no", !at == !dlerror() ? "!" : "");
    }
    printf("\n");
}

static void all(const char *when) {
    ask(when, "RTLD_DEFAULT", RTLD_DEFAULT);
    ask(when, "the program", dlopen(0, RTLD_NOW));
    ask(when, "the driver", dlopen("libcuda.so.1", RTLD_NOW));
    ask(when, "the C library", dlopen("libc.so.6", RTLD_NOW));
    void *loaded = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (loaded)
        ask(when, "NVML", loaded);
    else
        printf("%s, NVML is not loaded\n", when);
}

int main(void) {
    all("none");
    if (!dlopen("libnvidia-ml.so.1", RTLD_NOW))
        return 1;
    all("local");
    printf("driver %d\n", use_driver());
    all("local and the driver in use");
    if (!dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_GLOBAL))
        return 1;
    all("global");
    return 0;
}
