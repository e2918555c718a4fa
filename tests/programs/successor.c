// Programs of a job one after the other, each of which takes what the job may have: how many were
// refused it.
//
//   successor exec COUNT       executes itself so often, with the memory in its hands
//   successor children COUNT   starts so many, one after the other, and waits for each
//   successor parent COUNT     the same, and takes the memory itself after each
//   successor one HOW          is one of these: ends by exit, _exit, SIGKILL or SIGSEGV (0 to 3)
#define _GNU_SOURCE
#include "driver.h"
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static const size_t MIB = 1ul << 20;

static int takes(void) {
    W at = 0;
    cu_status status = use_device(0);
    if (!status) status = CALL("cuMemAlloc_v2", &at, 700 * MIB);
    return status != 0;
}

static void start(const char *how, int number, int refused) {
    char count[16], before[16];
    snprintf(count, sizeof count, "%d", number);
    snprintf(before, sizeof before, "%d", refused);
    execl("/proc/self/exe", "successor", how, count, before, (char *)NULL);
    _exit(9);
}

int main(int argc, char **argv) {
    if (argc < 3 || open_driver()) return 2;
    int count = atoi(argv[2]), refused = argc > 3 ? atoi(argv[3]) : 0;
    struct rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    if (!strcmp(argv[1], "one")) {
        if (takes()) return 7;
        if (count == 1) _exit(0);
        if (count == 2) raise(SIGKILL);
        if (count == 3) raise(SIGSEGV);
        return 0;
    }
    if (!strcmp(argv[1], "exec")) {
        refused += takes();
        if (count > 1) start("exec", count - 1, refused);
    } else {
        int parent = !strcmp(argv[1], "parent");
        if (parent && use_device(0)) return 3;
        for (int number = 0; number < count; number++) {
            pid_t child = fork();
            if (!child) start("one", number % 4, 0);
            int status = 0;
            waitpid(child, &status, 0);
            refused += WIFEXITED(status) && WEXITSTATUS(status) != 0;
            W at = 0;
            if (parent && CALL("cuMemAlloc_v2", &at, 700 * MIB)) refused++;
            if (at) CALL("cuMemFree_v2", at);
        }
    }
    printf("%d\n", refused);
    return 0;
}
