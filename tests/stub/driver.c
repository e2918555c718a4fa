// The recording driver. Every function of the table writes its row and its first sixteen argument
// words into a file that the test reads, and returns what the test has asked for. Where the test
// says so, the few functions that the preload library itself needs answer like a driver that works:
// one device of 16 GiB, one context, marks that arrive at once.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef uint64_t W;
enum { WORDS = 16, RECORDS = 8192 };

struct record {
    uint64_t row;
    W words[WORDS];
};

static struct log {
    _Atomic uint64_t count;
    _Atomic uint32_t status;
    _Atomic uint32_t subject;
    _Atomic uint32_t works;
    char reserved[64 - 20];
    struct record records[RECORDS];
} *log_page;

__attribute__((constructor)) static void open_log(void) {
    const char *path = getenv("RECORDING_DRIVER_LOG");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof *log_page, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED) log_page = page;
}

// In the table's order.
#define ROWS(ROW) \
/* rows */

#define NUMBER(row, name, base, introduced, per_thread) ROW_##name = row,
enum { ROWS(NUMBER) ROW_COUNT };

// Tells this driver from another library of its name.
__attribute__((visibility("default"))) int recording_driver(void) { return 1; }

static int resolve(const char *base, void **answer, uint32_t version, uint64_t flags);

// A driver that works, as far as the preload library asks it.
static int work(uint32_t row, const W *a) {
    switch (row) {
    case ROW_cuInit:
    case ROW_cuMemHostRegister_v2:
    case ROW_cuThreadExchangeStreamCaptureMode:
        return 0;
    case ROW_cuDeviceGetCount:
        *(int *)a[0] = 1;
        return 0;
    case ROW_cuDeviceGet:
    case ROW_cuCtxGetDevice:
        *(int *)a[0] = 0;
        return 0;
    case ROW_cuCtxGetCurrent:
        *(W *)a[0] = 0xc0de;
        return 0;
    case ROW_cuDeviceGetUuid:
    case ROW_cuDeviceGetUuid_v2:
        memset((void *)a[0], 0x11, 16);
        return 0;
    case ROW_cuDeviceTotalMem_v2:
        *(W *)a[0] = (W)16 << 30;
        return 0;
    case ROW_cuDeviceGetMemPool:
        *(W *)a[0] = 0x9001;
        return 0;
    case ROW_cuMemHostGetDevicePointer_v2:
        *(W *)a[0] = a[1];
        return 0;
    case ROW_cuStreamWriteValue64:
    case ROW_cuStreamWriteValue64_v2:
        // A mark of the preload library lies in user space; a test's own argument does not.
        if (a[1] >> 47 == 0) atomic_store((_Atomic uint64_t *)a[1], a[2]);
        return 0;
    case ROW_cuStreamIsCapturing:
        *(int *)a[1] = 0;
        return 0;
    case ROW_cuGetProcAddress:
        return resolve((const char *)a[0], (void **)a[1], (uint32_t)a[2], a[3]);
    case ROW_cuGetProcAddress_v2:
        return resolve((const char *)a[0], (void **)a[1], (uint32_t)a[2], a[3]);
    default:
        return 801; // CUDA_ERROR_NOT_SUPPORTED
    }
}

static int record(uint32_t row, const W *words) {
    if (!log_page) return 999;
    uint64_t at = atomic_fetch_add(&log_page->count, 1);
    if (at < RECORDS) {
        log_page->records[at].row = row;
        memcpy(log_page->records[at].words, words, sizeof log_page->records[at].words);
    }
    if (row == atomic_load(&log_page->subject)) {
        // Marks of the preload library go through the subject too where the subject is the function
        // that it marks with.
        if ((row == ROW_cuStreamWriteValue64 || row == ROW_cuStreamWriteValue64_v2) && words[1] >> 47 == 0)
            return work(row, words);
        return (int)atomic_load(&log_page->status);
    }
    return atomic_load(&log_page->works) ? work(row, words) : (int)atomic_load(&log_page->status);
}

#define FUNCTION(row, name, base, introduced, per_thread)                                                              \
    __attribute__((visibility("default"))) int name(W a0, W a1, W a2, W a3, W a4, W a5, W a6, W a7, W a8, W a9, W a10, W a11, W a12, \
        W a13, W a14, W a15) { \
        W words[WORDS] = {a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15};                                              \
        return record(row, words);                                                                                     \
    }
ROWS(FUNCTION)

#define ENTRY(row, name, base, introduced, per_thread) {base, introduced, per_thread, (void *)name},
static const struct entry {
    const char *base;
    uint32_t introduced;
    int per_thread;
    void *function;
} entries[] = {ROWS(ENTRY)};

// The rule that real drivers were seen to follow, written down a second time: newest ABI of the
// base name that is not newer than the version asked for; per-thread variants where flag 2 asks for
// them and there is one.
static int resolve(const char *base, void **answer, uint32_t version, uint64_t flags) {
    const struct entry *best = NULL;
    for (unsigned at = 0; at < ROW_COUNT; at++) {
        const struct entry *entry = &entries[at];
        if (strcmp(entry->base, base) != 0 || entry->introduced > version) continue;
        if (entry->per_thread && !(flags & 2)) continue;
        if (!best || entry->per_thread > best->per_thread ||
            (entry->per_thread == best->per_thread && entry->introduced > best->introduced))
            best = entry;
    }
    *answer = best ? best->function : NULL;
    return best ? 0 : 500; // CUDA_ERROR_NOT_FOUND
}
