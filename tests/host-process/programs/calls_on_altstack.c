/* A handler on an alternative stack that calls the driver, and one that asks where its stack is. */
#include "host.h"
static char stack_bytes[65536];
static int version, where;
static void handler(int s) {
    char here;
    (void)s;
    size_t free_bytes, total;
    cu("cuDriverGetVersion", (uintptr_t)&version, 0, 0, 0);
    cu("cuMemGetInfo_v2", (uintptr_t)&free_bytes, (uintptr_t)&total, 0, 0);
    where = &here > stack_bytes && &here < stack_bytes + sizeof stack_bytes;
}
int main(void) {
    stack_t alternative = {.ss_sp = stack_bytes, .ss_size = sizeof stack_bytes};
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_ONSTACK};
    sigaltstack(&alternative, 0);
    sigaction(SIGUSR1, &action, 0);
    printf("init %d\n", init_driver());
    for (int i = 0; i < 50; i++) {
        raise(SIGUSR1);
        if (!where || version <= 0 || work())
            return 1;
    }
    print_state("end");
    return 0;
}
