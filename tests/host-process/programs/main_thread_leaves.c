/* The first thread ends by pthread_exit; another one goes on with the driver, and ends the process (which a
 * driver's own threads would keep alive). */
#include <pthread.h>
#include "host.h"
static void *context;
static void *worker(void *unused) {
    (void)unused;
    usleep(20000);
    int set = cu("cuCtxSetCurrent", (uintptr_t)context, 0, 0, 0);
    printf("after main: %d %d\n", set, work());
    exit(5);
}
int main(void) {
    pthread_t thread;
    printf("init %d\n", init_driver());
    cu("cuCtxGetCurrent", (uintptr_t)&context, 0, 0, 0);
    pthread_create(&thread, 0, worker, 0);
    pthread_exit(0);
}
