/* Linked statically: no preload library gets in, and nothing breaks. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
int main(void) {
    printf("static\n");
    fflush(stdout);
    if (getenv("WAYS_LINGER"))
        usleep(300000); /* so that the watcher can look */
    return system("exit 4") == 4 << 8 ? 5 : 6;
}
