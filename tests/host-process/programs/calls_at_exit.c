/* Exit handlers that call the driver: registered before it was first used, and after. */
#include "host.h"
static uint64_t memory;
static void handler(const char *when) {
    size_t free_bytes, total;
    int f = cu("cuMemFree_v2", memory, 0, 0, 0);
    int g = cu("cuMemGetInfo_v2", (uintptr_t)&free_bytes, (uintptr_t)&total, 0, 0);
    int s = cu("cuCtxSynchronize", 0, 0, 0, 0);
    printf("%s: free %d info %d sync %d init %d\n", when, f, g, s, cu("cuInit", 0, 0, 0, 0));
    fflush(stdout);
}
static void early(void) { handler("registered before"); }
static void at_end(void) { handler("registered after"); }
__attribute__((destructor)) static void last(void) { handler("destructor"); }
int main(void) {
    atexit(early);
    printf("init %d\n", init_driver());
    atexit(at_end);
    printf("alloc %d\n", cu("cuMemAlloc_v2", (uintptr_t)&memory, 4096, 0, 0));
    return 6;
}
