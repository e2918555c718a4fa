// Uses the driver as a program does that looks at no status, and says each; arguments are done in
// their order.
//
//   look  functions are looked up before cuInit (by cuGetProcAddress), as the runtime does
//   deny NUMBER      that system call fails from here on with EPERM (a seccomp filter)
//   descriptors N    at most N of them from here on
//   stderr FILE      descriptor 2 is that file from here on
//   init             cuInit                                       -> "init STATUS"
//   use              every way to a device                        -> "WAY STATUS", one a line
//   fork             the child goes on with the rest, and is waited for
#define _GNU_SOURCE
#include "driver.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static cu_status (*early)(W *, size_t);

static int deny(int number) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return 1;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

static void say(const char *way, cu_status status) {
    printf("%s %d\n", way, status);
    fflush(stdout);
}

static void use(void) {
    W context = 0, memory = 0, more = 0;
    size_t bytes = (size_t)2 << 30;
    int number = 0;
    void *function = NULL, *table = NULL;
    unsigned char uuid[16] = {0};
    const char *text = NULL;
    say("count", CALL("cuDeviceGetCount", &number));
    say("context", CALL("cuCtxCreate_v2", &context, 0u, 0));
    say("alloc", CALL("cuMemAlloc_v2", &memory, bytes));
    if (early) say("early", early(&more, bytes));
    say("memset", CALL("cuMemsetD32_v2", memory, 7u, (size_t)1024));
    say("copy", CALL("cuMemcpyDtoH_v2", &number, memory, (size_t)4));
    say("sync", CALL("cuCtxSynchronize"));
    say("table", CALL("cuGetExportTable", &table, uuid));
    say("look-up", CALL("cuGetProcAddress", "cuMemAlloc", &function, 12000, (W)0));
    if (function) say("looked-up", ((cu_status(*)(W *, size_t))function)(&more, bytes));
    say("free", CALL("cuMemFree_v2", memory));
    say("again", CALL("cuInit", 0u));
    say("text", CALL("cuGetErrorName", 802, &text));
    say("version", CALL("cuDriverGetVersion", &number));
}

int main(int count, char **words) {
    if (open_driver()) return 3;
    for (int at = 1; at < count; at++) {
        const char *word = words[at];
        if (!strcmp(word, "look")) {
            void *found = NULL;
            CALL("cuGetProcAddress", "cuMemAlloc", &found, 12000, (W)0);
            early = (cu_status(*)(W *, size_t))found;
        } else if (!strcmp(word, "deny")) {
            if (deny(atoi(words[++at]))) return 4;
        } else if (!strcmp(word, "descriptors")) {
            struct rlimit limit = {strtoul(words[++at], NULL, 10), strtoul(words[at], NULL, 10)};
            if (setrlimit(RLIMIT_NOFILE, &limit)) return 5;
        } else if (!strcmp(word, "stderr")) {
            int file = open(words[++at], O_WRONLY | O_CREAT | O_TRUNC, 0600);
            if (file < 0 || dup2(file, 2) != 2 || close(file)) return 6;
        } else if (!strcmp(word, "init")) {
            say("init", CALL("cuInit", 0u));
        } else if (!strcmp(word, "use")) {
            use();
        } else if (!strcmp(word, "fork")) {
            pid_t child = fork();
            int status = 0;
            if (child) return waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : 7;
        } else {
            return 8;
        }
    }
    return 0;
}
