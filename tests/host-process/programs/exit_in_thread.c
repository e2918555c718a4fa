/* One thread calls exit while others are inside the driver. */
#include <pthread.h>
#include "host.h"
static void *context;
static void *worker(void *unused) {
    (void)unused;
    cu("cuCtxSetCurrent", (uintptr_t)context, 0, 0, 0);
    for (;;)
        work();
}
static void *leaver(void *unused) {
    (void)unused;
    usleep(30000);
    exit(7);
}
int main(void) {
    pthread_t thread;
    printf("init %d\n", init_driver());
    fflush(stdout);
    cu("cuCtxGetCurrent", (uintptr_t)&context, 0, 0, 0);
    for (int i = 0; i < 3; i++)
        pthread_create(&thread, 0, worker, 0);
    pthread_create(&thread, 0, leaver, 0);
    for (;;)
        work();
}
