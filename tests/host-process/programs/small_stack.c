/* Threads with little more than the smallest stack, which make calls of every kind. */
#include <limits.h>
#include <pthread.h>
#include "host.h"
static void *context;
static void *worker(void *unused) {
    (void)unused;
    long r = cu("cuCtxSetCurrent", (uintptr_t)context, 0, 0, 0);
    return (void *)(r ? r : work());
}
int main(void) {
    pthread_attr_t attributes;
    printf("init %d\n", init_driver());
    cu("cuCtxGetCurrent", (uintptr_t)&context, 0, 0, 0);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, PTHREAD_STACK_MIN + 16384);
    for (int i = 0; i < 20; i++) {
        pthread_t thread;
        void *result = (void *)1;
        if (pthread_create(&thread, &attributes, worker, 0))
            return 2;
        pthread_join(thread, &result);
        if (result)
            return 3;
    }
    return 0;
}
