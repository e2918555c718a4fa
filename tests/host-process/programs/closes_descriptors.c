/* Numbers of descriptors that the program gets are the same with and without us. */
#include <fcntl.h>
#include "host.h"
int main(void) {
    int before = open("/dev/null", O_RDONLY);
    int r = init_driver();
    int after = open("/dev/null", O_RDONLY);
    printf("init %d work %d: %d %d\n", r, work(), before, after);
    return 0;
}
