// Submits work whose thread a signal interrupts, as stdin says, one command per line, and answers
// each with one line.
//
//   init BYTES  the first device, and so much of its memory with known contents  -> STATUS
//   copy BYTES  submits until SIGTERM has come, whose handler copies the memory to the host and
//       allocates BYTES  -> STATUS COPIED WRONG ALLOCATED
//   launch  the same, and the handler submits work on the memory and waits for it -> STATUS STATUS
//   jump  the handler leaves by siglongjmp  -> 0
//   submit  once, and waits for it  -> STATUS
//   check  -> STATUS WRONG
#define _GNU_SOURCE
#include "driver.h"
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>

static W memory, stream;
static size_t bytes, wanted;
static unsigned char *copy;
static volatile sig_atomic_t done;
static cu_status copied, allocated, launched;
static long wrong;
static sigjmp_buf before;
static enum { COPY, LAUNCH, JUMP } way;

static cu_status submit(W on) {
    return CALL("cuMemsetD8Async", memory, (unsigned char)0x5a, bytes, on);
}

static void check(void) {
    memset(copy, 0, bytes);
    copied = CALL("cuMemcpyDtoH_v2", (void *)copy, memory, bytes);
    wrong = 0;
    for (size_t at = 0; at < bytes; at++) wrong += copy[at] != 0x5a;
}

static void handler(int signal) {
    (void)signal;
    done = 1;
    if (way == JUMP) siglongjmp(before, 1);
    if (way == LAUNCH) {
        launched = submit(stream);
        if (!launched) launched = CALL("cuStreamSynchronize", stream);
        return;
    }
    W more = 0;
    check();
    allocated = CALL("cuMemAlloc_v2", &more, wanted);
    if (!allocated) CALL("cuMemFree_v2", more);
}

static cu_status until_done(void) {
    cu_status status = 0;
    while (!status && !done) {
        status = submit(stream);
        if (!status) status = CALL("cuStreamSynchronize", stream);
    }
    return status;
}

int main(void) {
    static char line[256], word[64];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGTERM, handler);
    int opened = open_driver();
    if (opened) return opened;
    while (fgets(line, sizeof line, stdin)) {
        unsigned long number = 0;
        if (sscanf(line, "%63s %lu", word, &number) < 1) return 2;
        done = 0;
        if (!strcmp(word, "init")) {
            bytes = number;
            copy = malloc(bytes);
            cu_status status = use_device(0);
            if (!status) status = CALL("cuStreamCreate", &stream, 1u);
            if (!status) status = CALL("cuMemAlloc_v2", &memory, bytes);
            if (!status) status = submit(stream);
            if (!status) status = CALL("cuStreamSynchronize", stream);
            printf("%d\n", status);
        } else if (!strcmp(word, "copy")) {
            way = COPY;
            wanted = number;
            cu_status status = until_done();
            printf("%d %d %ld %d\n", status, copied, wrong, allocated);
        } else if (!strcmp(word, "launch")) {
            way = LAUNCH;
            cu_status status = until_done();
            printf("%d %d\n", status, launched);
        } else if (!strcmp(word, "jump")) {
            way = JUMP;
            if (!sigsetjmp(before, 1)) until_done();
            printf("%d\n", !done);
        } else if (!strcmp(word, "submit")) {
            cu_status status = submit(stream);
            if (!status) status = CALL("cuStreamSynchronize", stream);
            printf("%d\n", status);
        } else if (!strcmp(word, "check")) {
            check();
            printf("%d %ld\n", copied, wrong);
        } else {
            return 2;
        }
    }
    return 0;
}
