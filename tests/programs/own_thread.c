// Work in flight that waits for its own thread, as stdin says, one command per line; answers each
// with one line. Whatever it is, the thread submits behind it before it lets it go on.
//
//   init KERNELS  the first device, three streams, a kernel of the folder of PTX files  -> STATUS
//   KIND ROUNDS COUNT US  so often: something that waits, COUNT kernels of so many microseconds,
//       release, wait for all  -> STATUS CALLS
//     lock  a host function takes the lock that the thread holds while it launches
//     callback  the same by cuStreamAddCallback
//     value  a stream waits for a word that the thread writes afterwards
//     behind  the same, and another stream waits for its event
//     copy  a copy from pageable memory behind a host function
//     graph  a graph whose host function takes the lock
//     spin  a kernel spins on a word that the thread writes afterwards
#define _GNU_SOURCE
#include "driver.h"
#include <pthread.h>
#include <string.h>

static W streams[3], busy, meet, word_on_device, memory, event;
static volatile unsigned *word;
static unsigned words;
static long called;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void takes_lock(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    called++;
    pthread_mutex_unlock(&lock);
}

static void called_back(W stream, cu_status status, void *unused) {
    (void)stream, (void)status;
    takes_lock(unused);
}

static cu_status init(const char *folder) {
    char path[8192];
    void *host = NULL;
    cu_status status = use_device(0);
    for (int at = 0; !status && at < 3; at++) status = CALL("cuStreamCreate", &streams[at], 1u);
    if (!status) status = CALL("cuMemHostAlloc", &host, (size_t)65536, 3u);
    if (!status) status = CALL("cuMemHostGetDevicePointer_v2", &word_on_device, host, 0u);
    if (!status) status = CALL("cuMemAlloc_v2", &memory, (size_t)65536);
    if (!status) status = CALL("cuEventCreate", &event, 2u);
    if (!status) memset(host, 0, 65536);
    word = host;
    snprintf(path, sizeof path, "%s/collective.ptx", folder);
    if (!status) status = load_kernel(path, "sublet_all_reduce_f32", &meet);
    snprintf(path, sizeof path, "%s/busy.ptx", folder);
    return status ? status : load_kernel(path, "sublet_busy_us", &busy);
}

static cu_status work(W on, int count, uint64_t us) {
    cu_status status = 0;
    void *parameters[] = {&us};
    while (!status && count-- > 0) status = launch(busy, 1, on, parameters);
    return status;
}

static cu_status graph_of_host_function(W *exec, uint64_t us) {
    W graph = 0, stream = 0;
    cu_status status = CALL("cuStreamCreate", &stream, 1u);
    if (!status) status = CALL("cuStreamBeginCapture_v2", stream, 2u);
    if (!status) status = work(stream, 1, us);
    if (!status) status = CALL("cuLaunchHostFunc", stream, (void *)takes_lock, NULL);
    if (!status) status = work(stream, 1, us);
    if (!status) status = CALL("cuStreamEndCapture", stream, &graph);
    return status ? status : CALL("cuGraphInstantiateWithFlags", exec, graph, (uint64_t)0);
}

// A kernel that spins until all ranks have arrived: the other rank is the thread.
static cu_status spin(W on, unsigned round) {
    uint64_t arrived = word_on_device + 4096, parts = word_on_device + 8192, n = 16;
    unsigned rank = 0, ranks = 2;
    void *parameters[] = {&memory, &memory, &arrived, &parts, &n, &rank, &ranks, &round};
    return launch(meet, 16, on, parameters);
}

static cu_status round_of(const char *kind, int count, uint64_t us) {
    static char pageable[65536];
    static W exec;
    static unsigned spun;
    int locks = !strcmp(kind, "lock") || !strcmp(kind, "callback") || !strcmp(kind, "copy") || !strcmp(kind, "graph");
    W on = streams[0];
    cu_status status = 0;
    if (!strcmp(kind, "graph") && !exec) status = graph_of_host_function(&exec, us);
    if (status) return status;
    if (locks) pthread_mutex_lock(&lock);
    words++;
    if (!strcmp(kind, "lock") || !strcmp(kind, "copy")) status = CALL("cuLaunchHostFunc", on, (void *)takes_lock, NULL);
    if (!strcmp(kind, "copy") && !status) status = CALL("cuMemcpyHtoDAsync_v2", memory, pageable, sizeof pageable, on);
    if (!strcmp(kind, "callback")) status = CALL("cuStreamAddCallback", on, (void *)called_back, NULL, 0u);
    if (!strcmp(kind, "value") || !strcmp(kind, "behind")) status = CALL("cuStreamWaitValue32_v2", on, word_on_device, words, 0u);
    if (!strcmp(kind, "behind")) {
        if (!status) status = CALL("cuEventRecord", event, on);
        on = streams[1];
        if (!status) status = CALL("cuStreamWaitEvent", on, event, 0u);
    }
    if (!strcmp(kind, "graph")) status = CALL("cuGraphLaunch", exec, on);
    if (!strcmp(kind, "spin")) status = spin(on, spun);
    if (!status) status = work(on, count / 2, us);
    if (!status) status = work(streams[2], count - count / 2, us);
    if (!strcmp(kind, "spin")) __atomic_add_fetch(&word[1024 + 1], ++spun, __ATOMIC_SEQ_CST);
    *word = words;
    if (locks) pthread_mutex_unlock(&lock);
    for (int at = 0; !status && at < 3; at++) status = CALL("cuStreamSynchronize", streams[at]);
    return status;
}

int main(void) {
    static char line[8192], text[8192];
    if (open_driver()) return 3;
    while (fgets(line, sizeof line, stdin)) {
        char verb[32] = "";
        int rounds = 0, count = 0, us = 0;
        cu_status status = -1;
        sscanf(line, "%31s %d %d %d", verb, &rounds, &count, &us);
        if (!strcmp(verb, "init")) {
            if (sscanf(line, "%*s %8191s", text) == 1) status = init(text);
            printf("%d\n", status);
        } else {
            called = 0;
            for (status = 0; !status && rounds > 0; rounds--) status = round_of(verb, count, (uint64_t)us);
            printf("%d %ld\n", status, called);
        }
        fflush(stdout);
    }
    return 0;
}
