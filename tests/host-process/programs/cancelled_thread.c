/* Threads that are cancelled in the middle of using the driver; their clean-up handlers run. */
#include <pthread.h>
#include "host.h"
static void *context;
static int cleaned;
static void clean(void *unused) {
    (void)unused;
    __atomic_fetch_add(&cleaned, 1, __ATOMIC_RELAXED);
}
static void *worker(void *unused) {
    pthread_cleanup_push(clean, unused);
    cu("cuCtxSetCurrent", (uintptr_t)context, 0, 0, 0);
    for (;;) {
        work();
        pthread_testcancel();
    }
    pthread_cleanup_pop(0);
    return 0;
}
int main(void) {
    printf("init %d\n", init_driver());
    cu("cuCtxGetCurrent", (uintptr_t)&context, 0, 0, 0);
    for (int i = 0; i < 10; i++) {
        pthread_t thread;
        pthread_create(&thread, 0, worker, 0);
        usleep(2000);
        pthread_cancel(thread);
        pthread_join(thread, 0);
    }
    printf("cleaned %d work %d\n", cleaned, work());
    return 0;
}
