/* What a program sees of its terminal, and what the terminal's keys do to it. With an argument, SIGINT keeps its default. */
#include <sys/ioctl.h>
#include <termios.h>
#include "host.h"

static volatile sig_atomic_t interrupted, resized, continued, read_by_the_other_side;
static void note(int signal) {
    if (signal == SIGINT)
        interrupted = 1;
    else if (signal == SIGTERM)
        read_by_the_other_side = 1;
    else if (signal == SIGWINCH)
        resized = 1;
    else
        continued = 1;
}

static void size(const char *when) {
    struct winsize size = {0, 0, 0, 0};
    ioctl(0, TIOCGWINSZ, &size);
    printf("%s: %d rows, %d columns\n", when, size.ws_row, size.ws_col);
    fflush(stdout);
}

int main(int argc, char **argv) {
    struct termios modes;
    (void)argv;
    signal(SIGWINCH, note);
    signal(SIGCONT, note);
    signal(SIGTERM, note);
    if (argc < 2)
        signal(SIGINT, note);
    printf("terminals %d %d %d\n", isatty(0), isatty(1), isatty(2));
    printf("leader of its session %d, in the foreground %d\n", getsid(0) == getpid(), tcgetpgrp(0) == getpgrp());
    printf("controlling terminal %d\n", open("/dev/tty", O_RDWR) >= 0);
    tcgetattr(0, &modes);
    printf("modes %x %x %x %x\n", modes.c_iflag, modes.c_oflag, modes.c_cflag, modes.c_lflag);
    size("size");
    printf("driver %d\n", use_driver());
    printf("ready\n");
    fflush(stdout);
    while (!interrupted) {
        usleep(1000);
        if (resized) {
            resized = 0;
            size("new size");
        }
        if (continued) {
            continued = 0;
            printf("continued, driver %d\n", work());
            fflush(stdout);
        }
    }
    printf("interrupted, driver %d\n", work());
    fflush(stdout);
    /* The end of a session's leader hangs the terminal up, and what is not read by then is lost. */
    while (!read_by_the_other_side)
        usleep(1000);
    return 42;
}
