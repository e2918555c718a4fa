// Shares an event with another process, as stdin says, one command per line; answers each with one
// line. Streams are 0 and 1.
//
//   init KERNELS  the first device, two streams, a kernel of the folder of PTX files  -> STATUS
//   create  an event that others can open  -> STATUS HANDLE
//   open HANDLE  the event is the one of this handle  -> STATUS
//   destroy  -> STATUS
//   record STREAM | wait STREAM | query | synchronize  -> STATUS
//   block STREAM  what follows in the stream waits for "release"  -> STATUS
//   release  -> STATUS
//   idle STREAM | drain STREAM  cuStreamQuery | cuStreamSynchronize  -> STATUS
//   work STREAM COUNT US  so many kernels, not waited for  -> STATUS
//   rounds STREAM COUNT US  so often: block, three kernels, release, drain  -> STATUS
//   fill MIB VALUE  so much memory of the device, with this byte all over  -> STATUS
//   differs VALUE  how many bytes of it are another  -> STATUS COUNT
//   die  ends itself by SIGKILL
#define _GNU_SOURCE
#include "driver.h"
#include <signal.h>
#include <string.h>

static W event, streams[2], busy, gate, memory;
static volatile unsigned *word;
static unsigned gates;
static size_t bytes;

struct handle {
    unsigned char bytes[64];
};

static cu_status init(const char *folder) {
    char path[8192];
    void *host = NULL;
    cu_status status = use_device(0);
    snprintf(path, sizeof path, "%s/busy.ptx", folder);
    for (int at = 0; !status && at < 2; at++) status = CALL("cuStreamCreate", &streams[at], 1u);
    if (!status) status = CALL("cuMemHostAlloc", &host, (size_t)4096, 2u);
    if (!status) status = CALL("cuMemHostGetDevicePointer_v2", &gate, host, 0u);
    word = host;
    return status ? status : load_kernel(path, "sublet_busy_us", &busy);
}

static cu_status open_event(const char *hex) {
    cu_status (*real)(W *, struct handle) = find("cuIpcOpenEventHandle");
    struct handle handle = {{0}};
    for (int at = 0; at < 64; at++)
        if (sscanf(hex + 2 * at, "%2hhx", &handle.bytes[at]) != 1) return -1;
    return real(&event, handle);
}

static cu_status work(W on, int count, uint64_t us) {
    cu_status status = 0;
    void *parameters[] = {&us};
    while (!status && count-- > 0) status = launch(busy, 1, on, parameters);
    return status;
}

static cu_status block(W on) {
    return CALL("cuStreamWaitValue32_v2", on, gate, ++gates, 0u);
}

static cu_status rounds(W on, int count, uint64_t us) {
    cu_status status = 0;
    while (!status && count-- > 0) {
        status = block(on);
        if (!status) status = work(on, 3, us);
        *word = gates;
        if (!status) status = CALL("cuStreamSynchronize", on);
    }
    return status;
}

static cu_status fill(size_t mib, unsigned char value) {
    bytes = mib << 20;
    cu_status status = CALL("cuMemAlloc_v2", &memory, bytes);
    return status ? status : CALL("cuMemsetD8_v2", memory, value, bytes);
}

static cu_status differs(unsigned char value, size_t *count) {
    unsigned char *copy = malloc(bytes);
    cu_status status = copy ? CALL("cuMemcpyDtoH_v2", copy, memory, bytes) : -1;
    for (size_t at = 0; !status && at < bytes; at++) *count += copy[at] != value;
    free(copy);
    return status;
}

int main(void) {
    static char line[8192], text[8192];
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (open_driver()) return 3;
    while (fgets(line, sizeof line, stdin)) {
        char verb[32] = "";
        unsigned long long first = 0, count = 0, us = 0;
        if (sscanf(line, "%31s %llu %llu %llu", verb, &first, &count, &us) < 1) continue;
        W on = streams[first & 1];
        cu_status status = -1;
        if (!strcmp(verb, "init")) {
            if (sscanf(line, "%*s %8191s", text) == 1) status = init(text);
        } else if (!strcmp(verb, "create")) {
            struct handle handle = {{0}};
            status = CALL("cuEventCreate", &event, 6u);
            if (!status) status = CALL("cuIpcGetEventHandle", &handle, event);
            printf("%d ", status);
            for (int at = 0; at < 64; at++) printf("%02x", handle.bytes[at]);
            putchar('\n');
            continue;
        } else if (!strcmp(verb, "open")) {
            if (sscanf(line, "%*s %8191s", text) == 1) status = open_event(text);
        } else if (!strcmp(verb, "destroy")) {
            status = CALL("cuEventDestroy_v2", event);
        } else if (!strcmp(verb, "record")) {
            status = CALL("cuEventRecord", event, on);
        } else if (!strcmp(verb, "wait")) {
            status = CALL("cuStreamWaitEvent", on, event, 0u);
        } else if (!strcmp(verb, "query")) {
            status = CALL("cuEventQuery", event);
        } else if (!strcmp(verb, "synchronize")) {
            status = CALL("cuEventSynchronize", event);
        } else if (!strcmp(verb, "block")) {
            status = block(on);
        } else if (!strcmp(verb, "release")) {
            *word = gates;
            status = 0;
        } else if (!strcmp(verb, "idle")) {
            status = CALL("cuStreamQuery", on);
        } else if (!strcmp(verb, "drain")) {
            status = CALL("cuStreamSynchronize", on);
        } else if (!strcmp(verb, "work")) {
            status = work(on, (int)count, us);
        } else if (!strcmp(verb, "rounds")) {
            status = rounds(on, (int)count, us);
        } else if (!strcmp(verb, "fill")) {
            status = fill(first, (unsigned char)count);
        } else if (!strcmp(verb, "differs")) {
            size_t wrong = 0;
            status = differs((unsigned char)first, &wrong);
            printf("%d %zu\n", status, wrong);
            continue;
        } else if (!strcmp(verb, "die")) {
            raise(SIGKILL);
        }
        printf("%d\n", status);
    }
    return 0;
}
