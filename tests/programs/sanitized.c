// A little of everything that a sanitizer looks at: memory, threads, and a driver in a library that
// was opened late.
#include "driver.h"
#include <pthread.h>
#include <string.h>

static cu_status statuses[2];

static void *work(void *at) {
    cu_status *status = at;
    W address = 0;
    char *host = malloc(4096);
    *status = use_device(0);
    if (!*status) *status = CALL("cuMemAlloc_v2", &address, (size_t)1 << 20);
    if (!*status) *status = CALL("cuMemsetD8_v2", address, 'a', (size_t)4096);
    if (!*status) *status = CALL("cuMemcpyDtoH_v2", host, address, (size_t)4096);
    if (!*status && host[4095] != 'a') *status = 4;
    if (!*status) *status = CALL("cuMemFree_v2", address);
    free(host);
    return NULL;
}

int main(void) {
    pthread_t threads[2];
    if (open_driver()) return 3;
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, work, &statuses[i]);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    printf("%d %d\n", statuses[0], statuses[1]);
    return statuses[0] || statuses[1];
}
