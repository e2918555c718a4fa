/* vfork, then exec of a program that uses no CUDA, from a process that does. */
#include "host.h"
int main(void) {
    printf("parent %d\n", use_driver());
    fflush(stdout);
    for (int i = 0; i < 5; i++) {
        pid_t child = vfork();
        if (child == 0) {
            execl("/bin/true", "true", (char *)0);
            _exit(99);
        }
        if (wait_for(child))
            return 1;
    }
    pid_t child = vfork();
    if (child == 0)
        _exit(7);
    printf("child %d\nparent %d\n", wait_for(child), work());
    return 0;
}
