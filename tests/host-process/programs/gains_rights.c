/* For a set-user-id copy: who it runs as, and that it starts children. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(void) {
    printf("user %d\n", (int)geteuid());
    return 4;
}
