/* Many threads, one after the other and together, that use the driver and end; also from a destructor of their own data. */
#include <pthread.h>
#include "host.h"
static void *context;
static pthread_key_t key;
static int bad;
static void destructor(void *value) {
    (void)value;
    size_t free_bytes, total;
    if (cu("cuMemGetInfo_v2", (uintptr_t)&free_bytes, (uintptr_t)&total, 0, 0))
        __atomic_store_n(&bad, 1, __ATOMIC_RELAXED);
}
static void *worker(void *left) {
    pthread_setspecific(key, &bad);
    if (cu("cuCtxSetCurrent", (uintptr_t)context, 0, 0, 0) || work())
        __atomic_store_n(&bad, 1, __ATOMIC_RELAXED);
    if (left)
        pthread_exit(0);
    return 0;
}
int main(void) {
    pthread_t threads[40];
    pthread_key_create(&key, destructor);
    printf("init %d\n", init_driver());
    cu("cuCtxGetCurrent", (uintptr_t)&context, 0, 0, 0);
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < 40; i++)
            pthread_create(&threads[i], 0, worker, i & 1 ? (void *)1 : 0);
        for (int i = 0; i < 40; i++)
            pthread_join(threads[i], 0);
    }
    printf("bad %d work %d\n", bad, work());
    return bad;
}
