// Opens the library of the first argument, and gives its threads half a second to end.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

int main(int count, char **words) {
    void *library = count > 1 ? dlopen(words[1], RTLD_NOW) : NULL;
    if (!library) {
        fprintf(stderr, "%s\n", count > 1 ? dlerror() : "no library named");
        return 3;
    }
    usleep(500000);
    return 0;
}
