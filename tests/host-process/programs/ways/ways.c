/* Reaches the driver in the way that the first argument names. The second is the driver's absolute path, the third the
 * helper library's. Exit 0: every call succeeded. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include "body.h"

static void *handle;
static void *by_dlsym(const char *name) { return dlsym(handle, name); }
static void *by_dlvsym(const char *name) { return dlvsym(handle, name, "libcuda.so.1"); }
static void *by_default(const char *name) { return dlsym(RTLD_DEFAULT, name); }

/* cuGetProcAddress takes base names, and picks by version. */
static int (*resolve1)(const char *, void **, int, uint64_t);
static int (*resolve2)(const char *, void **, int, uint64_t, int *);
static int ask_version = 12000;
static uint64_t ask_flags;
static const char *base(const char *name, char *to) {
    size_t n = strlen(name);
    memcpy(to, name, n + 1);
    if (n > 3 && !strcmp(to + n - 3, "_v2"))
        to[n - 3] = 0;
    return to;
}
static void *by_resolver1(const char *name) {
    char to[80];
    void *f = 0;
    return resolve1(base(name, to), &f, ask_version, ask_flags) ? 0 : f;
}
static void *by_resolver2(const char *name) {
    char to[80];
    void *f = 0;
    return resolve2(base(name, to), &f, ask_version, ask_flags, 0) ? 0 : f;
}

static int open_and_go(const char *name, int flags) {
    if (!(handle = dlopen(name, flags))) {
        fprintf(stderr, "%s\n", dlerror());
        return 8;
    }
    return body(by_dlsym);
}

static int resolver(int which, int version, uint64_t flags) {
    if (!(handle = dlopen("libcuda.so.1", RTLD_NOW)))
        return 8;
    ask_version = version;
    ask_flags = flags;
    resolve1 = dlsym(handle, "cuGetProcAddress");
    resolve2 = dlsym(handle, "cuGetProcAddress_v2");
    if (which == 1)
        return body(by_resolver1);
    /* As the runtime does: ask for the resolver itself, and use that answer. */
    void *again = 0;
    if (resolve2("cuGetProcAddress", &again, 12000, 0, 0))
        return 7;
    resolve2 = (int (*)(const char *, void **, int, uint64_t, int *))again;
    return body(by_resolver2);
}

static void *in_thread(void *way) { return (void *)(intptr_t)open_and_go(way, RTLD_NOW); }

static int thread_with(size_t stack) {
    pthread_attr_t attributes;
    pthread_t thread;
    void *result = (void *)6;
    pthread_attr_init(&attributes);
    if (pthread_attr_setstacksize(&attributes, stack) ||
        pthread_create(&thread, &attributes, in_thread, "libcuda.so.1"))
        return 6;
    pthread_join(thread, &result);
    return (int)(intptr_t)result;
}

static int helper(const char *library, int flags, const char *driver) {
    void *lib = dlopen(library, flags);
    if (!lib) {
        fprintf(stderr, "%s\n", dlerror());
        return 8;
    }
    int (*use)(const char *) = (int (*)(const char *))dlsym(lib, "helper_uses_driver");
    return use ? use(driver) : 7;
}

static int without_preload(char **argv, const char *way) {
    pid_t child = fork();
    if (child == 0) {
        unsetenv("LD_PRELOAD");
        execl("/proc/self/exe", argv[0], way, argv[2], argv[3], (char *)0);
        _exit(5);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 5;
}

int main(int argc, char **argv) {
    if (argc < 4)
        return 2;
    const char *way = argv[1], *driver = argv[2], *library = argv[3];
#define WAY(name) if (!strcmp(way, name))
    WAY("soname") return open_and_go("libcuda.so.1", RTLD_NOW);
    WAY("soname-lazy") return open_and_go("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
    WAY("plain-name") return open_and_go("libcuda.so", RTLD_NOW);
    WAY("absolute") return open_and_go(driver, RTLD_NOW);
    WAY("dlvsym") {
        if (!(handle = dlopen(driver, RTLD_NOW)))
            return 8;
        return body(by_dlvsym);
    }
    WAY("rtld-default") {
        if (!(handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL)))
            return 8;
        return body(by_default);
    }
    WAY("noload") {
        if (!dlopen("libcuda.so.1", RTLD_NOW))
            return 8;
        return open_and_go("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    }
    WAY("resolver-v1") return resolver(1, 12000, 0);
    WAY("resolver-v2") return resolver(2, 12000, 0);
    WAY("resolver-v2-13") return resolver(2, 13020, 0);
    WAY("resolver-v2-old") return resolver(2, 7000, 0);
    WAY("resolver-per-thread") return resolver(2, 12000, 2);
    WAY("small-stack") return thread_with(PTHREAD_STACK_MIN + 16384);
    WAY("late") {
        usleep(20000);
        return thread_with(1 << 20);
    }
    WAY("deepbind-soname") return helper(library, RTLD_NOW | RTLD_DEEPBIND, "libcuda.so.1");
    WAY("deepbind-absolute") {
        /* Something else in the process has asked the driver before, as a framework's start does. */
        int version;
        void *known = dlopen("libcuda.so.1", RTLD_NOW);
        int (*get)(int *) = known ? (int (*)(int *))dlsym(known, "cuDriverGetVersion") : 0;
        if (!get || get(&version))
            return 8;
        return helper(library, RTLD_NOW | RTLD_DEEPBIND, driver);
    }
    WAY("deepbind-absolute-first") return helper(library, RTLD_NOW | RTLD_DEEPBIND, driver);
    WAY("dlmopen") {
        if (!(handle = dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW))) {
            fprintf(stderr, "%s\n", dlerror());
            return 8;
        }
        return body(by_dlsym);
    }
    WAY("fork-child") {
        pid_t child = fork();
        if (child == 0)
            _exit(open_and_go("libcuda.so.1", RTLD_NOW));
        int status = 0;
        waitpid(child, &status, 0);
        return WIFEXITED(status) ? WEXITSTATUS(status) : 5;
    }
    WAY("child-without-preload") return without_preload(argv, "soname");
    WAY("linked-child-without-preload") {
        /* Here the second argument is a program that is linked against the driver. */
        pid_t child = fork();
        if (child == 0) {
            unsetenv("LD_PRELOAD");
            execl(driver, driver, (char *)0);
            _exit(5);
        }
        int status = 0;
        waitpid(child, &status, 0);
        return WIFEXITED(status) ? WEXITSTATUS(status) : 5;
    }
    WAY("constructor-of-library") {
        /* Here the second argument is a library whose constructor makes the calls. */
        void *lib = dlopen(driver, RTLD_NOW);
        int *outcome = lib ? (int *)dlsym(lib, "outcome") : 0;
        return outcome ? *outcome : 8;
    }
    fprintf(stderr, "no way %s\n", way);
    return 2;
}
