/* What a library in the process could change is the same before, between and after driver calls. */
#include "host.h"
int main(void) {
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR2);
    sigprocmask(SIG_BLOCK, &mask, 0);
    signal(SIGHUP, SIG_IGN);
    umask(027);
    errno = EDOM;
    print_state("start");
    errno = ERANGE;
    int r = init_driver();
    print_state("attached");
    printf("init %d\n", r);
    errno = EXDEV;
    r = work();
    print_state("worked");
    printf("work %d\n", r);
    return r;
}
