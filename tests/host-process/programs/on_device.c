/* Uses the device that the first argument names, and waits for the end of its input. Exit 3: the driver does not start. */
#include "host.h"

int main(int argc, char **argv) {
    int device = argc > 1 ? atoi(argv[1]) : 0;
    void *context = 0;
    int r = cu("cuInit", 0, 0, 0, 0);
    if (r) {
        printf("cuInit %d\n", r);
        return 3;
    }
    if (cu("cuDevicePrimaryCtxRetain", (uintptr_t)&context, (uintptr_t)device, 0, 0) || cu("cuCtxSetCurrent", (uintptr_t)context, 0, 0, 0) || work())
        return 4;
    printf("used %d\n", device);
    fflush(stdout);
    while (getchar() != EOF)
        ;
    return 0;
}
