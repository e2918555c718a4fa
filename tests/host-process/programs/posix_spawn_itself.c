/* Starts itself by posix_spawn, with pipes for both outputs; parent and children use the driver. */
#include <fcntl.h>
#include <spawn.h>
#include "host.h"
int main(int argc, char **argv) {
    if (argc > 1) {
        print_state("child");
        printf("child %d\n", use_driver());
        return 3;
    }
    printf("parent %d\n", use_driver());
    fflush(stdout);
    for (int i = 0; i < 3; i++) {
        pid_t child;
        char *args[] = {argv[0], (char *)"child", 0};
        if (posix_spawn(&child, "/proc/self/exe", 0, 0, args, environ))
            return 1;
        printf("ended %d\n", wait_for(child));
        fflush(stdout);
    }
    printf("parent %d\n", work());
    return 0;
}
