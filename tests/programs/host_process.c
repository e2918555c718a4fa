// What programs do around their driver calls. The argument says which; exit code 0 (or the one
// named) means that it went as it does without anybody in between.
#define _GNU_SOURCE
#include "driver.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static W context;

static int work(void) {
    W memory = 0;
    cu_status status = CALL("cuInit", 0u);
    if (!status) status = CALL("cuDevicePrimaryCtxRetain", &context, 0);
    if (!status) status = CALL("cuCtxSetCurrent", context);
    if (!status) status = CALL("cuMemAlloc_v2", &memory, (size_t)1 << 20);
    if (!status) status = CALL("cuMemsetD8_v2", memory, 1, (size_t)1 << 20);
    if (!status) status = CALL("cuCtxSynchronize");
    if (!status) status = CALL("cuMemFree_v2", memory);
    return status;
}

static void at_end(void) {
    // Exit has begun: calls must still come back, whatever they answer.
    W memory = 0;
    CALL("cuMemAlloc_v2", &memory, (size_t)4096);
    CALL("cuCtxSynchronize");
    printf("late\n");
    fflush(stdout);
}

static void *in_thread(void *how) {
    if (work()) _exit(9);
    if (how) exit(5);
    return NULL;
}

static int same_signals(struct sigaction *before) {
    sigset_t mask;
    sigemptyset(&mask);
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    for (int number = 1; number < 32; number++) {
        struct sigaction now;
        if (sigaction(number, NULL, &now)) continue;
        if (now.sa_handler != before[number].sa_handler || sigismember(&mask, number)) return number;
    }
    return 0;
}

int main(int count, char **words) {
    const char *way = count > 1 ? words[1] : "";
    struct sigaction before[32];
    for (int number = 1; number < 32; number++) sigaction(number, NULL, &before[number]);
    mode_t mask = umask(022);
    umask(mask);
    if (open_driver()) return 3;
    if (!strcmp(way, "errno")) {
        W memory = 0;
        if (work()) return 1;
        errno = 4711;
        if (CALL("cuMemAlloc_v2", &memory, (size_t)1 << 20) || errno != 4711) return 2;
        CALL("cuMemAlloc_v2", &memory, (size_t)1 << 60);
        if (errno != 4711) return 4;
        CALL("cuMemsetD8_v2", memory, 1, (size_t)64);
        return errno == 4711 ? 0 : 5;
    }
    if (!strcmp(way, "signals")) {
        if (work()) return 1;
        mode_t now = umask(022);
        return now == mask ? same_signals(before) : 2;
    }
    if (!strcmp(way, "atexit")) {
        atexit(at_end);
        return work() ? 1 : 0;
    }
    if (!strcmp(way, "thread") || !strcmp(way, "exit-in-thread") || !strcmp(way, "small-stack")) {
        pthread_t thread;
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        // Thread-local storage of all libraries comes out of it too.
        if (!strcmp(way, "small-stack")) pthread_attr_setstacksize(&attributes, 128 << 10);
        if (pthread_create(&thread, &attributes, in_thread, !strcmp(way, "exit-in-thread") ? words : NULL)) return 1;
        pthread_join(thread, NULL);
        return 0;
    }
    if (!strcmp(way, "underscore-exit")) {
        if (work()) return 1;
        _exit(6);
    }
    return 7;
}
