/* Closes its standard descriptors before it first uses the driver, and opens files in their place afterwards: nothing that
 * is written to them may reach anybody else, and what is opened gets the lowest numbers that the driver leaves. */
#include <fcntl.h>
#include "host.h"
int main(void) {
    int out = fcntl(1, F_DUPFD_CLOEXEC, 500);
    close(0);
    close(1);
    close(2);
    int r = init_driver();
    int first = open("/dev/null", O_RDWR), second = open("/dev/null", O_RDWR);
    /* Careless output to descriptor 1, whatever that is now. */
    (void)!write(1, "stray output\n", 13);
    int w = work();
    dprintf(out, "init %d work %d opened %d %d\n", r, w, first, second);
    return r || w;
}
