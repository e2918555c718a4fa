// Has work on the device, and does what must not leave it to nobody, as stdin says, one command per
// line; answers each with one line. Started again by itself it goes on with the next command.
//
//   init KERNELS          the first device and kernels of the folder of PTX files  -> STATUS
//   run                   a thread from here on submits and waits in turns         -> 0
//   rest  it ends  -> STATUS (its last one)
//   queue COUNT           kernels of 0.2 ms, not waited for                        -> STATUS
//   most COUNT            the same; how many were in flight at once, at most       -> STATUS MOST
//   memsets COUNT         of 4 KiB each, not waited for                            -> STATUS
//   sync                                                                           -> STATUS
//   capture               begins a capture, and captures a kernel                  -> STATUS
//   bad | trap            a kernel with an address of nobody's | that traps        -> STATUS
//   thread COUNT          a thread queues kernels and ends                         -> STATUS
//   child                 a forked child exits at once                             -> its exit code
//   parent  a forked child goes on with the commands, we exit  -> PID (of the child)
//   exec                  starts itself anew in its place                          -> (nothing)
//   replace FILE          closes all descriptors, and has the file under their numbers -> STATUS
//   pid                                                                            -> PID
#define _GNU_SOURCE
#include "driver.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 256 };
static W context, stream, capturing, busy, fill, all_reduce;
static atomic_int over, last;
static pthread_t thread;

static cu_status kernel(const char *folder, const char *file, const char *name, W *found) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, file);
    return load_kernel(path, name, found);
}

static cu_status init(const char *folder) {
    cu_status status = use_device(0);
    if (!status) status = CALL("cuCtxGetCurrent", &context);
    if (!status) status = CALL("cuStreamCreate", &stream, 1u);
    if (!status) status = CALL("cuStreamCreate", &capturing, 1u);
    if (!status) status = kernel(folder, "busy.ptx", "sublet_busy_us", &busy);
    if (!status) status = kernel(folder, "elementwise.ptx", "sublet_fill_f32", &fill);
    if (!status) status = kernel(folder, "collective.ptx", "sublet_all_reduce_f32", &all_reduce);
    return status;
}

static cu_status work(W on) {
    uint64_t us = 200;
    void *parameters[] = {&us};
    return launch(busy, 1, on, parameters);
}

static cu_status queue(int count) {
    cu_status status = 0;
    while (!status && count--) status = work(stream);
    return status;
}

static cu_status memsets(int count) {
    static W memory;
    cu_status status = memory ? 0 : CALL("cuMemAlloc_v2", &memory, (size_t)4096);
    while (!status && count--) status = CALL("cuMemsetD32Async", memory, 1u, (size_t)1024, stream);
    return status;
}

static void *run(void *unused) {
    W own = 0;
    cu_status status = CALL("cuCtxSetCurrent", context);
    if (!status) status = CALL("cuStreamCreate", &own, 1u);
    for (int round = 1; !status && !over; round++) {
        status = work(own);
        if (!status && round % 8 == 0) status = CALL("cuStreamSynchronize", own);
    }
    last = status;
    return unused;
}

static void *queue_and_end(void *count) {
    cu_status status = CALL("cuCtxSetCurrent", context);
    last = status ? status : queue((int)(intptr_t)count);
    return NULL;
}

static cu_status most(int count, int *found) {
    static W event[MOST];
    cu_status (*query)(W) = find("cuEventQuery");
    cu_status status = 0;
    int done = 0;
    *found = 0;
    if (count > MOST) count = MOST;
    for (int at = 0; !status && at < count; at++) {
        status = CALL("cuEventCreate", &event[at], 2u);
        if (!status) status = work(stream);
        if (!status) status = CALL("cuEventRecord", event[at], stream);
        while (!status && done <= at && !query(event[done])) done++;
        if (at + 1 - done > *found) *found = at + 1 - done;
    }
    return status;
}

static cu_status capture(void) {
    // Relaxed: other calls of this program are no violation.
    cu_status status = CALL("cuStreamBeginCapture_v2", capturing, 2u);
    return status ? status : work(capturing);
}

static cu_status wrong(int trap) {
    uint64_t nowhere = 0x10, n = 4;
    unsigned one = 1, round = 0;
    float value = 1;
    void *fills[] = {&nowhere, &value, &n}, *reduces[] = {&nowhere, &nowhere, &nowhere, &nowhere, &n, &one, &one, &round};
    return trap ? launch(all_reduce, 1, stream, reduces) : launch(fill, 1, stream, fills);
}

// As daemons and sandboxes do: whatever is open is closed, and the numbers are used for something
// else.
static int replace(const char *path) {
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (file < 0 || dup2(file, 3) != 3) return 1;
    for (int number = 4; number < 1024; number++)
        if (dup2(3, number) != number) return 2;
    return 0;
}

int main(int count, char **words) {
    if (open_driver()) return 3;
    char line[4096], text[4096];
    setvbuf(stdin, NULL, _IONBF, 0); // the next reader must not find that we have read ahead
    while (fgets(line, sizeof line, stdin)) {
        char verb[16] = "";
        int number = 0;
        *text = 0;
        sscanf(line, "%15s %d", verb, &number);
        sscanf(line, "%*s %4095s", text);
        if (!strcmp(verb, "init")) {
            printf("%d\n", init(text));
        } else if (!strcmp(verb, "run")) {
            over = 0;
            printf("%d\n", pthread_create(&thread, NULL, run, NULL));
        } else if (!strcmp(verb, "rest")) {
            over = 1;
            pthread_join(thread, NULL);
            printf("%d\n", last);
        } else if (!strcmp(verb, "queue")) {
            printf("%d\n", queue(number));
        } else if (!strcmp(verb, "memsets")) {
            printf("%d\n", memsets(number));
        } else if (!strcmp(verb, "most")) {
            int found = 0;
            cu_status status = most(number, &found);
            printf("%d %d\n", status, found);
        } else if (!strcmp(verb, "sync")) {
            printf("%d\n", CALL("cuStreamSynchronize", stream));
        } else if (!strcmp(verb, "capture")) {
            printf("%d\n", capture());
        } else if (!strcmp(verb, "bad") || !strcmp(verb, "trap")) {
            printf("%d\n", wrong(*verb == 't'));
        } else if (!strcmp(verb, "thread")) {
            pthread_create(&thread, NULL, queue_and_end, (void *)(intptr_t)number);
            pthread_join(thread, NULL);
            printf("%d\n", last);
        } else if (!strcmp(verb, "child")) {
            int how = 0;
            pid_t child = fork();
            if (!child) _exit(7);
            waitpid(child, &how, 0);
            printf("%d\n", WIFEXITED(how) ? WEXITSTATUS(how) : 99);
        } else if (!strcmp(verb, "parent")) {
            fflush(stdout);
            if (fork()) _exit(0);
            printf("%d\n", getpid());
        } else if (!strcmp(verb, "exec")) {
            execv("/proc/self/exe", words);
            return 5;
        } else if (!strcmp(verb, "replace")) {
            printf("%d\n", replace(text));
        } else if (!strcmp(verb, "pid")) {
            printf("%d\n", getpid());
        } else {
            printf("what? %s", line);
        }
        fflush(stdout);
    }
    return count > 1;
}
