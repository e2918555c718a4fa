/* A context is destroyed while another one of the process has work on the device: each of twenty times the work goes on. */
#include "host.h"
enum { BYTES = 32 << 20, FILLS = 12, ROUNDS = 20 };
int main(void) {
    void *stays = 0, *goes = 0;
    uint64_t memory = 0;
    int device = 0, bad = 0;
    printf("init %d\n", init_driver());
    cu("cuDeviceGet", (uintptr_t)&device, 0, 0, 0);
    cu("cuCtxCreate_v2", (uintptr_t)&stays, 0, (uintptr_t)device, 0);
    cu("cuMemAlloc_v2", (uintptr_t)&memory, BYTES, 0, 0);
    for (int round = 0; round < ROUNDS && !bad; round++) {
        cu("cuCtxCreate_v2", (uintptr_t)&goes, 0, (uintptr_t)device, 0);
        bad |= work();
        cu("cuCtxSetCurrent", (uintptr_t)stays, 0, 0, 0);
        for (int fill = 0; fill < FILLS; fill++)
            bad |= cu("cuMemsetD8Async", memory, (uintptr_t)fill, BYTES, 0);
        bad |= cu("cuCtxDestroy_v2", (uintptr_t)goes, 0, 0, 0);
        int status = cu("cuCtxSynchronize", 0, 0, 0, 0);
        if (status)
            printf("round %d: %d\n", round, status);
        bad |= status;
    }
    printf("bad %d\n", bad);
    return bad != 0;
}
