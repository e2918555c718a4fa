// Has memory on several devices and works on all of them, as stdin says, one command per line.
//
//   init COUNT MIB  so much memory on each of so many devices, with contents  -> STATUS
//   round           a memset and a copy back on each, checked                 -> STATUS
//   run             rounds until the next line, or stdin's end  -> STATUS ROUNDS LONGEST_MS
//   stop            such a line
#define _GNU_SOURCE
#include "driver.h"
#include <poll.h>
#include <string.h>
#include <time.h>

enum { MOST = 8, PART = 4096, WRONG = -1 };

static int count;
static W contexts[MOST], memory[MOST];
static size_t bytes;
static unsigned rounds;

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec / 1e9;
}

static cu_status init(void) {
    cu_status status = count > MOST ? WRONG : 0;
    for (int at = 0; !status && at < count; at++) {
        status = use_device(at);
        if (!status) status = CALL("cuCtxGetCurrent", &contexts[at]);
        if (!status) status = CALL("cuMemAlloc_v2", &memory[at], bytes);
        if (!status) status = CALL("cuMemsetD8_v2", memory[at], 0xee, bytes);
        if (!status) status = CALL("cuCtxSynchronize");
    }
    return status;
}

static cu_status once(void) {
    static unsigned char seen[PART];
    cu_status status = 0;
    size_t place = bytes > 2 * PART ? rounds % (bytes / PART - 1) * PART : 0;
    unsigned char value = rounds++ & 0x7f;
    for (int at = 0; !status && at < count; at++) {
        status = CALL("cuCtxSetCurrent", contexts[at]);
        if (!status) status = CALL("cuMemsetD8_v2", memory[at] + place, (int)value, (size_t)PART);
        if (!status) status = CALL("cuMemcpyDtoH_v2", (void *)seen, memory[at] + place, (size_t)PART);
        for (int byte = 0; !status && byte < PART; byte++)
            if (seen[byte] != value) status = WRONG;
        // The last part is never written again, wherever it has been meanwhile.
        if (!status) status = CALL("cuMemcpyDtoH_v2", (void *)seen, memory[at] + bytes - PART, (size_t)PART);
        if (!status && seen[PART - 1] != 0xee) status = WRONG;
    }
    return status;
}

static void run(void) {
    struct pollfd line = {.fd = 0, .events = POLLIN};
    double longest = 0;
    unsigned before = rounds;
    cu_status status = 0;
    while (!status && poll(&line, 1, 1) == 0) {
        double began = now();
        status = once();
        if (now() - began > longest) longest = now() - began;
    }
    printf("%d %u %.0f\n", status, rounds - before, longest * 1e3);
}

int main(void) {
    char line[256], word[16];
    setvbuf(stdin, NULL, _IONBF, 0);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (open_driver()) return 3;
    while (fgets(line, sizeof line, stdin)) {
        unsigned mib = 0;
        if (sscanf(line, "init %d %u", &count, &mib) == 2) {
            bytes = (size_t)mib << 20;
            printf("%d\n", init());
        } else if (sscanf(line, "%15s", word) == 1 && !strcmp(word, "round")) {
            printf("%d\n", once());
        } else if (!strcmp(word, "run")) {
            run();
        }
    }
    return 0;
}
