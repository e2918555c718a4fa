/* What host programs share: a driver opened as most programs open it, a little work on it, and the state of the process as
 * a library in the process could have changed it. */
#ifndef HOST_H
#define HOST_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef __cplusplus
#define HOST_CAST(type, value) (reinterpret_cast<type>(value))
extern "C" char **environ;
#else
#define HOST_CAST(type, value) ((type)(value))
extern char **environ;
#endif

typedef int (*driver_call)(uintptr_t, uintptr_t, uintptr_t, uintptr_t);

__attribute__((unused)) static driver_call fn(const char *name) {
    static void *handle;
    if (!handle && !(handle = dlopen("libcuda.so.1", RTLD_NOW))) {
        fprintf(stderr, "%s\n", dlerror());
        exit(90);
    }
    void *at = dlsym(handle, name);
    if (!at) {
        fprintf(stderr, "no function %s\n", name);
        exit(91);
    }
    return HOST_CAST(driver_call, at);
}

__attribute__((unused)) static int cu(const char *name, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d) {
    return fn(name)(a, b, c, d);
}

/* First status that is not success, or 0. */
__attribute__((unused)) static int init_driver(void) {
    int device = 0, r;
    void *context = 0;
    if ((r = cu("cuInit", 0, 0, 0, 0)))
        return r;
    if ((r = cu("cuDeviceGet", (uintptr_t)&device, 0, 0, 0)))
        return r;
    if ((r = cu("cuDevicePrimaryCtxRetain", (uintptr_t)&context, (uintptr_t)device, 0, 0)))
        return r;
    return cu("cuCtxSetCurrent", (uintptr_t)context, 0, 0, 0);
}

/* Allocates, fills, waits, reads back and frees, on the calling thread's context. */
__attribute__((unused)) static int work(void) {
    uint64_t memory = 0;
    unsigned char back[64];
    int r;
    memset(back, 0, sizeof back);
    if ((r = cu("cuMemAlloc_v2", (uintptr_t)&memory, 4096, 0, 0)))
        return r;
    if ((r = cu("cuMemsetD8Async", memory, 0x5a, 4096, 0)))
        return r;
    if ((r = cu("cuCtxSynchronize", 0, 0, 0, 0)))
        return r;
    if ((r = cu("cuMemcpyDtoH_v2", (uintptr_t)back, memory, sizeof back, 0)))
        return r;
    if ((r = cu("cuMemFree_v2", memory, 0, 0, 0)))
        return r;
    return back[0] == 0x5a && back[63] == 0x5a ? 0 : -1;
}

__attribute__((unused)) static int use_driver(void) {
    int r = init_driver();
    return r ? r : work();
}

/* Mask, handlers, alternative stack, umask, directory, environment, errno. */
__attribute__((unused)) static void print_state(const char *when) {
    int kept = errno;
    sigset_t mask;
    stack_t alternative;
    char directory[4096];
    mode_t mode = umask(0);
    unsigned long sum = 5381;
    int variables = 0;
    umask(mode);
    printf("%s: errno %d umask %o directory %s mask", when, kept, (unsigned)mode, getcwd(directory, sizeof directory) ? directory : "?");
    sigprocmask(SIG_BLOCK, 0, &mask);
    for (int s = 1; s < 65; s++)
        if (sigismember(&mask, s) == 1)
            printf(" %d", s);
    printf(" handlers");
    for (int s = 1; s < 65; s++) {
        struct sigaction action;
        if (sigaction(s, 0, &action) == 0 && action.sa_handler != SIG_DFL)
            printf(" %d%s", s, action.sa_handler == SIG_IGN ? "i" : "h");
    }
    sigaltstack(0, &alternative);
    printf(" altstack %d", alternative.ss_flags);
    for (char **v = environ; *v; v++) {
        /* The variables that make the difference between the runs. */
        if (!strncmp(*v, "LD_PRELOAD=", 11) || !strncmp(*v, "SUBLET_", 7) || !strncmp(*v, "LD_LIBRARY_PATH=", 16) || !strncmp(*v, "LD_AUDIT=", 9))
            continue;
        variables++;
        for (const char *c = *v; *c; c++)
            sum = sum * 33 + (unsigned char)*c;
    }
    printf(" environment %d %lx\n", variables, sum);
    fflush(stdout);
    errno = kept;
}

__attribute__((unused)) static int wait_for(pid_t child) {
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}
#endif
