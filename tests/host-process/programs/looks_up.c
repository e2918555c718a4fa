/* Looks up what the driver has and we do not know, what we know and the driver lacks, and what only we have; in the ways that
 * the first argument names. The second is a library that is linked against the driver. */
#include "host.h"

static const char *const NAMES[] = {"cuInit", "cuFutureCall", "cudbgFutureFlag", "futureWithoutPrefix", "cuMemAlloc_v2",
                                    "cuLaunchKernel", "cuNobodyHasIt", "nobody_has_it", "InitializeInjection", "la_version",
                                    "nvmlDeviceGetMemoryInfo", "malloc"};
enum { COUNT = sizeof NAMES / sizeof *NAMES };

static void *by_dlsym(void *handle, const char *name) { return dlsym(handle, name); }
static void *by_dlvsym(void *handle, const char *name) { return dlvsym(handle, name, "libcuda.so.1"); }

static void look(const char *way, void *handle, void *(*by)(void *, const char *), int first, int last) {
    for (int n = first; n < last; n++) {
        dlerror();
        void *at = by(handle, NAMES[n]);
        const char *error = dlerror(), *what = error ? strstr(error, "undefined symbol") : NULL;
        /* Whose name is missed may differ where it was not looked up in the driver alone. */
        if (what && strcmp(way, "handle") && strcmp(way, "version"))
            error = what;
        printf("%s %s: %s\n", way, NAMES[n], at ? "found" : error ? error : "null");
    }
}

static void use(void *handle) {
    int (*call)(int) = (int (*)(int))dlsym(handle, "cuFutureCall");
    int *flag = dlsym(handle, "cudbgFutureFlag");
    if (!call || !flag)
        return;
    printf("the call answers %d\n", call(1));
    *flag = 70;
    printf("the call answers %d\n", call(1));
}

static int drivers_mapped(void) {
    char line[4096];
    int found = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps))
        found |= strstr(line, "/libcuda.so") != NULL;
    if (maps)
        fclose(maps);
    return found;
}

#ifdef LINKED
int cuInit(unsigned flags);
int cuFutureCall(int by);

int main(void) {
    printf("cuInit: %d\n", cuInit(0));
    look("default", RTLD_DEFAULT, by_dlsym, 0, 5);
    look("next", RTLD_NEXT, by_dlsym, 0, 4);
    void *program = dlopen(NULL, RTLD_LAZY);
    look("program", program, by_dlsym, 0, 4);
    printf("absent: %d\n", dlsym(program, "cuMemAlloc_v2") == NULL);
    use(RTLD_DEFAULT);
    /* Bound when it is called. */
    printf("by link: %d\n", cuFutureCall(5));
    return 0;
}
#else
int main(int argc, char **argv) {
    if (argc > 1) {
        void *library = dlopen(argv[1], RTLD_NOW);
        if (!library) {
            fprintf(stderr, "%s\n", dlerror());
            return 90;
        }
        look("dependent", library, by_dlsym, 0, 3);
        printf("absent: %d\n", dlsym(library, "cuMemAlloc_v2") == NULL);
        use(library);
        return 0;
    }
    void *program = dlopen(NULL, RTLD_LAZY);
    printf("%d%d%d\n", dlsym(program, "cuNobodyHasIt") == NULL, dlsym(RTLD_DEFAULT, "cuNobodyHasIt") == NULL,
           dlsym(program, "nobody_has_it") == NULL);
    printf("driver mapped: %d\n", drivers_mapped());
    void *handle = dlopen("libcuda.so.1", RTLD_NOW);
    look("handle", handle, by_dlsym, 0, COUNT);
    look("version", handle, by_dlvsym, 0, COUNT);
    use(handle);
    return 0;
}
#endif
