/* A child of a process that has used the driver: CUDA cannot be used there, and says so; the parent goes on. */
#include "host.h"
int main(void) {
    printf("parent %d\n", use_driver());
    fflush(stdout);
    for (int i = 0; i < 3; i++) {
        pid_t child = fork();
        if (child == 0) {
            uint64_t memory = 0;
            size_t free_bytes, total;
            printf("child init %d alloc %d info %d sync %d\n", cu("cuInit", 0, 0, 0, 0),
                   cu("cuMemAlloc_v2", (uintptr_t)&memory, 4096, 0, 0),
                   cu("cuMemGetInfo_v2", (uintptr_t)&free_bytes, (uintptr_t)&total, 0, 0),
                   cu("cuCtxSynchronize", 0, 0, 0, 0));
            if (i == 1) {
                fflush(stdout);
                _exit(5);
            }
            exit(4);
        }
        printf("ended %d\n", wait_for(child));
        fflush(stdout);
    }
    printf("parent %d\n", work());
    return 0;
}
