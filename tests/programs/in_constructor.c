// A library whose constructor uses the driver while another thread does so for the first time, and
// says what both got. IN_CONSTRUCTOR says how: "call" or "look-up".
#define _GNU_SOURCE
#include "cuda_min.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef cu_status (*initialise)(unsigned);
static initialise init;
static volatile int begun;

static void *other(void *unused) {
    (void)unused;
    begun = 1;
    printf("thread %d\n", init(0));
    fflush(stdout);
    return NULL;
}

__attribute__((constructor)) static void use(void) {
    const char *way = getenv("IN_CONSTRUCTOR");
    pthread_t thread;
    init = (initialise)dlsym(RTLD_DEFAULT, "cuInit");
    if (!way || !init || pthread_create(&thread, NULL, other, NULL)) _exit(3);
    pthread_detach(thread);
    while (!begun) usleep(1000);
    // By now the other thread waits for the dynamic linker, whose lock we hold.
    usleep(300000);
    if (!strcmp(way, "look-up")) {
        void *driver = dlopen("libcuda.so.1", RTLD_NOW);
        init = (initialise)dlsym(driver, "cuInit");
        if (!init) _exit(4);
    }
    printf("constructor %d\n", init(0));
    fflush(stdout);
}
