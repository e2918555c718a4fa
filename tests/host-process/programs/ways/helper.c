/* A library that opens the driver itself; it is opened with RTLD_DEEPBIND, or calls from its constructor. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include "body.h"

static void *handle;
static void *by_dlsym(const char *name) { return dlsym(handle, name); }

int helper_uses_driver(const char *driver) {
    if (!(handle = dlopen(driver, RTLD_NOW))) {
        fprintf(stderr, "%s\n", dlerror());
        return 8;
    }
    return body(by_dlsym);
}
