/* Forks twice, starts a session, leaves its directory, and only then uses the driver. */
#include "host.h"
int main(void) {
    int ends[2], r = -1;
    if (pipe(ends))
        return 1;
    pid_t child = fork();
    if (child == 0) {
        setsid();
        if (fork() == 0) {
            if (chdir("/"))
                _exit(1);
            umask(0);
            int done = use_driver();
            (void)!write(ends[1], &done, sizeof done);
            _exit(0);
        }
        _exit(0);
    }
    wait_for(child);
    close(ends[1]);
    int got = (int)read(ends[0], &r, sizeof r);
    printf("daemon %d %d\n", got, r);
    return 0;
}
