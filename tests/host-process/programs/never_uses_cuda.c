/* Forks and threads, and no driver call at all. */
#include <pthread.h>
#include "host.h"
static void *nothing(void *p) { return p; }
int main(void) {
    pthread_t thread;
    print_state("start");
    for (int i = 0; i < 10; i++) {
        pid_t child = fork();
        if (child == 0)
            return i;
        if (wait_for(child) != i)
            return 99;
        pthread_create(&thread, 0, nothing, 0);
        pthread_join(thread, 0);
    }
    print_state("end");
    return 0;
}
