// One rank of a job that computes and then sums over all ranks, round after round. Ranks are
// processes; they meet in a file that all of them map and register, as the shared-memory transport
// of collective libraries has it. Prints one line at its end: ROUNDS WRONG.
//
//   collective KERNELS RANK RANKS DEVICE ROUNDS BUSY_US FILE  KERNELS: the folder of the PTX files
#define _GNU_SOURCE
#include "driver.h"
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { N = 256, MOST = 16 };
static const size_t BYTES = 4096 + 2 * MOST * N * sizeof(float);

static void good(cu_status status, const char *what) {
    if (!status) return;
    fprintf(stderr, "%s answers %d\n", what, status);
    exit(4);
}

static W kernel(const char *folder, const char *file, const char *name) {
    char path[4096];
    W found = 0;
    snprintf(path, sizeof path, "%s/%s", folder, file);
    good(load_kernel(path, name, &found), name);
    return found;
}

int main(int count, char **words) {
    if (count != 8) return 2;
    unsigned rank = atoi(words[2]), ranks = atoi(words[3]), rounds = atoi(words[5]);
    uint64_t busy_us = strtoull(words[6], NULL, 10), n = N;
    if (open_driver()) return 3;
    good(use_device(atoi(words[4])), "the device");
    W all_reduce = kernel(words[1], "collective.ptx", "sublet_all_reduce_f32"), busy = kernel(words[1], "busy.ptx", "sublet_busy_us");
    int file = open(words[7], O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, BYTES)) return 5;
    void *shared = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    W arrived = 0, own = 0, stream = 0;
    if (shared == MAP_FAILED) return 5;
    good(CALL("cuMemHostRegister_v2", shared, BYTES, 3u), "cuMemHostRegister");
    good(CALL("cuMemHostGetDevicePointer_v2", &arrived, shared, 0u), "cuMemHostGetDevicePointer");
    good(CALL("cuMemAlloc_v2", &own, n * sizeof(float)), "cuMemAlloc");
    good(CALL("cuStreamCreate", &stream, 1u), "cuStreamCreate");
    float mine[N], sum = 0;
    unsigned wrong = 0;
    for (unsigned round = 0; round < rounds; round++) {
        // Half of the last sum and its own number: what every rank has is known to all.
        float expected = 0;
        for (unsigned other = 0; other < ranks; other++) expected += sum / 2 + other;
        for (int at = 0; at < N; at++) mine[at] = sum / 2 + rank;
        uint64_t parts = arrived + 4096;
        void *work[] = {&busy_us}, *meet[] = {&own, &own, &arrived, &parts, &n, &rank, &ranks, &round};
        good(CALL("cuMemcpyHtoDAsync_v2", own, mine, sizeof mine, stream), "a copy");
        good(launch(busy, 1, stream, work), "the computation");
        good(launch(all_reduce, 64, stream, meet), "the collective");
        good(CALL("cuMemcpyDtoHAsync_v2", mine, own, sizeof mine, stream), "a copy");
        good(CALL("cuStreamSynchronize", stream), "the stream");
        for (int at = 0; at < N; at++) wrong += mine[at] != expected;
        sum = mine[0];
        // Sums of many ranks grow; small whole numbers and halves are exact.
        if (sum > 1000) sum = 1;
    }
    printf("%u %u\n", rounds, wrong);
    return 0;
}
