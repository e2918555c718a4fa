/* Forks from one thread while others use the driver; every child ends, and so does every thread. */
#include <pthread.h>
#include "host.h"
static volatile int stop;
static void *context;
static void *worker(void *unused) {
    (void)unused;
    cu("cuCtxSetCurrent", (uintptr_t)context, 0, 0, 0);
    long bad = 0;
    while (!stop)
        bad |= work();
    return (void *)bad;
}
int main(void) {
    pthread_t threads[3];
    int bad = init_driver();
    cu("cuCtxGetCurrent", (uintptr_t)&context, 0, 0, 0);
    for (int i = 0; i < 3; i++)
        pthread_create(&threads[i], 0, worker, 0);
    for (int i = 0; i < 40; i++) {
        pid_t child = fork();
        if (child == 0) {
            int version = 0;
            cu("cuDriverGetVersion", (uintptr_t)&version, 0, 0, 0);
            _exit(version > 0 ? 3 : 4);
        }
        if (wait_for(child) != 3)
            bad = 1;
    }
    stop = 1;
    for (int i = 0; i < 3; i++) {
        void *result = 0;
        pthread_join(threads[i], &result);
        bad |= result != 0;
    }
    printf("bad %d\n", bad);
    return bad;
}
