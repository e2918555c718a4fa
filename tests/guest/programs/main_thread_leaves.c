/* The first thread ends by pthread_exit; the process ends with its last thread. */
#include <pthread.h>
#include "guest.h"
static void *context;
static void *worker(void *unused) {
    (void)unused;
    usleep(20000);
    printf("after main: %d %d\n", cu("cuCtxSetCurrent", (uintptr_t)context, 0, 0, 0), work());
    return 0;
}
int main(void) {
    pthread_t thread;
    printf("init %d\n", init_driver());
    cu("cuCtxGetCurrent", (uintptr_t)&context, 0, 0, 0);
    pthread_create(&thread, 0, worker, 0);
    pthread_exit(0);
}
