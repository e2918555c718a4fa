/* A timer signal every 200 us, without SA_RESTART, from before the first driver call on. */
#include <sys/time.h>
#include "host.h"
static volatile sig_atomic_t count;
static void handler(int s) {
    (void)s;
    count++;
}
int main(void) {
    struct sigaction action;
    struct itimerval every = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
    memset(&action, 0, sizeof action);
    action.sa_handler = handler;
    sigaction(SIGALRM, &action, 0);
    setitimer(ITIMER_REAL, &every, 0);
    errno = EXDEV;
    int r = init_driver(), bad = 0;
    for (int i = 0; i < 300; i++)
        bad |= work();
    int kept = errno;
    setitimer(ITIMER_REAL, &never, 0);
    printf("init %d bad %d some %d\n", r, bad, count > 0);
    errno = kept;
    print_state("end");
    return bad;
}
