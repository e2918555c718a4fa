/* siglongjmp out of a handler that interrupts driver calls which are one jump, and longjmp between calls. */
#include <setjmp.h>
#include <sys/time.h>
#include "host.h"
static sigjmp_buf out;
static volatile sig_atomic_t armed;
static void handler(int s) {
    (void)s;
    if (armed) {
        armed = 0;
        siglongjmp(out, 1);
    }
}
int main(void) {
    int version = 0, jumps = 0;
    driver_call get = fn("cuDriverGetVersion");
    struct itimerval every = {{0, 500}, {0, 500}}, never = {{0, 0}, {0, 0}};
    printf("init %d\n", init_driver());
    signal(SIGALRM, handler);
    setitimer(ITIMER_REAL, &every, 0);
    while (jumps < 200) {
        if (sigsetjmp(out, 1)) {
            jumps++;
            continue;
        }
        armed = 1;
        for (;;)
            get((uintptr_t)&version, 0, 0, 0);
    }
    armed = 0;
    setitimer(ITIMER_REAL, &never, 0);
    jmp_buf plain;
    volatile int rounds = 0;
    setjmp(plain);
    if (rounds++ < 10) {
        if (work())
            return 1;
        longjmp(plain, 1);
    }
    printf("jumps %d version %d work %d\n", jumps, version > 0, work());
    return 0;
}
