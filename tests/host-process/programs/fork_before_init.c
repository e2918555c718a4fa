/* Parent and child both use the driver, which neither had used before. */
#include "host.h"
int main(void) {
    pid_t child = fork();
    if (child == 0)
        return use_driver();
    int own = use_driver();
    printf("parent %d child %d\n", own, wait_for(child));
    return 0;
}
