/* Several processes of one job allocate; all that they learn of memory, by the driver and by NVML, must agree: with each
 * other, with what they hold, and with the quota, which is the first argument (bytes). A monitor, which never uses the driver,
 * looks on. Exit 0: it did. */
#include "host.h"

enum { WORKERS = 4, ROUNDS = 40 };
typedef void *device_t;
struct memory { uint64_t total, free, used; };
struct memory2 { uint32_t version, padding; uint64_t total, reserved, free, used; };
struct process1 { uint32_t pid, padding; uint64_t used; };
struct process2 { uint32_t pid, padding; uint64_t used; uint32_t gpu, compute; };
struct detail { uint32_t pid, padding; uint64_t used; uint32_t gpu, compute; uint64_t secret; };

/* What each process holds, and how far it is: in shared memory. */
struct board { volatile uint64_t held[WORKERS]; volatile int phase[WORKERS + 1]; volatile pid_t pid[WORKERS]; };
static struct board *board;
static uint64_t quota;
static device_t device;
static void *nvml;

static int ml(const char *name, uintptr_t a, uintptr_t b, uintptr_t c) {
    int (*call)(uintptr_t, uintptr_t, uintptr_t) = (int (*)(uintptr_t, uintptr_t, uintptr_t))dlsym(nvml, name);
    if (!call) {
        fprintf(stderr, "no function %s\n", name);
        exit(91);
    }
    return call(a, b, c);
}

#define CHECK(what) do { if (!(what)) { fprintf(stderr, "%d: not so: %s (line %d)\n", getpid(), #what, __LINE__); return 1; } } while (0)

/* NVML orders devices its own way: ours is found by the UUID that the driver tells. */
static int find_device(const unsigned char *uuid) {
    char text[64], own[96];
    uint32_t count = 0;
    if (!(nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW)))
        return 1;
    CHECK(!ml("nvmlInit_v2", 0, 0, 0) && !ml("nvmlDeviceGetCount_v2", (uintptr_t)&count, 0, 0) && count > 0);
    if (!uuid)
        return ml("nvmlDeviceGetHandleByIndex_v2", 0, (uintptr_t)&device, 0);
    int at = sprintf(text, "GPU-");
    for (int i = 0; i < 16; i++)
        at += sprintf(text + at, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
    for (uint32_t i = 0; i < count; i++)
        if (!ml("nvmlDeviceGetHandleByIndex_v2", i, (uintptr_t)&device, 0) && !ml("nvmlDeviceGetUUID", (uintptr_t)device, (uintptr_t)own, sizeof own) && !strcmp(own, text))
            return 0;
    return 1;
}

static uint64_t sum(void) {
    uint64_t all = 0;
    for (int i = 0; i < WORKERS; i++)
        all += board->held[i];
    return all;
}

/* NVML's readers at rest: `used` is what all hold, and the processes are ours, each with what it holds. */
static int nvml_at_rest(void) {
    struct memory one;
    struct memory2 two = {0x02000028, 0, 0, 0, 0, 0};
    CHECK(!ml("nvmlDeviceGetMemoryInfo", (uintptr_t)device, (uintptr_t)&one, 0));
    CHECK(!ml("nvmlDeviceGetMemoryInfo_v2", (uintptr_t)device, (uintptr_t)&two, 0));
    CHECK(one.total == quota && two.total == quota && two.version == 0x02000028);
    CHECK(two.used == sum() && two.free == quota - sum() && two.reserved == 0);
    CHECK(one.used == sum() && one.free == two.free);
    struct process1 list1[32];
    struct process2 list2[32], list3[32];
    struct detail list4[32];
    struct { uint32_t version, mode, count; struct detail *list; } details = {0x01000018, 0, 32, list4};
    uint32_t n1 = 32, n2 = 32, n3 = 32, none = 0, less = 1;
    CHECK(!ml("nvmlDeviceGetComputeRunningProcesses", (uintptr_t)device, (uintptr_t)&n1, (uintptr_t)list1));
    CHECK(!ml("nvmlDeviceGetComputeRunningProcesses_v2", (uintptr_t)device, (uintptr_t)&n2, (uintptr_t)list2));
    CHECK(!ml("nvmlDeviceGetComputeRunningProcesses_v3", (uintptr_t)device, (uintptr_t)&n3, (uintptr_t)list3));
    CHECK(n1 == WORKERS && n2 == WORKERS && n3 == WORKERS);
    CHECK(ml("nvmlDeviceGetComputeRunningProcesses_v3", (uintptr_t)device, (uintptr_t)&none, 0) == 7 && none == WORKERS);
    CHECK(ml("nvmlDeviceGetComputeRunningProcesses_v3", (uintptr_t)device, (uintptr_t)&less, (uintptr_t)list3) == 7 && less == WORKERS);
    int detailed = ml("nvmlDeviceGetRunningProcessDetailList", (uintptr_t)device, (uintptr_t)&details, 0) == 0;
    CHECK(!detailed || details.count == WORKERS);
    for (int i = 0; i < WORKERS; i++) {
        int seen = 0;
        for (int p = 0; p < WORKERS; p++)
            if (list1[p].pid == (uint32_t)board->pid[i]) {
                seen++;
                CHECK(list1[p].used == board->held[i]);
            }
        for (int p = 0; p < WORKERS; p++)
            if (list2[p].pid == (uint32_t)board->pid[i]) {
                seen++;
                CHECK(list2[p].used == board->held[i]);
            }
        for (int p = 0; p < WORKERS; p++)
            if (list3[p].pid == (uint32_t)board->pid[i]) {
                seen++;
                CHECK(list3[p].used == board->held[i]);
            }
        CHECK(seen == 3);
    }
    return 0;
}

static int driver_at_rest(void) {
    size_t free_bytes = 0, total = 0, of_device = 0;
    CHECK(!cu("cuMemGetInfo_v2", (uintptr_t)&free_bytes, (uintptr_t)&total, 0, 0));
    CHECK(!cu("cuDeviceTotalMem_v2", (uintptr_t)&of_device, 0, 0, 0));
    CHECK(total == quota && of_device == quota && free_bytes == quota - sum());
    return 0;
}

/* While others allocate and free: whatever the moment, the parts make the whole. */
static int in_motion(void) {
    struct memory one;
    struct memory2 two = {0x02000028, 0, 0, 0, 0, 0};
    CHECK(!ml("nvmlDeviceGetMemoryInfo", (uintptr_t)device, (uintptr_t)&one, 0));
    CHECK(!ml("nvmlDeviceGetMemoryInfo_v2", (uintptr_t)device, (uintptr_t)&two, 0));
    CHECK(one.total == quota && one.used + one.free == quota);
    CHECK(two.total == quota && two.used + two.free + two.reserved == quota);
    return 0;
}

/* Everybody has come as far. */
static void meet(int who, int phase) {
    board->phase[who] = phase;
    for (int i = 0; i <= WORKERS; i++)
        while (board->phase[i] < phase)
            usleep(200);
}

static int work_on(int who) {
    unsigned char uuid[16];
    uint64_t kept = 0, memory[8] = {0}, bytes = (uint64_t)(who + 1) << 22;
    board->pid[who] = getpid();
    CHECK(!init_driver());
    CHECK(!cu("cuDeviceGetUuid", (uintptr_t)uuid, 0, 0, 0) && !find_device(uuid));
    CHECK(!cu("cuMemAlloc_v2", (uintptr_t)&kept, bytes, 0, 0));
    board->held[who] = bytes;
    meet(who, 1);
    CHECK(!driver_at_rest() && !nvml_at_rest());
    meet(who, 2);
    for (int round = 0; round < ROUNDS; round++) {
        int at = round % 8;
        if (memory[at])
            CHECK(!cu("cuMemFree_v2", memory[at], 0, 0, 0));
        memory[at] = 0;
        /* Beyond the quota, now and then. */
        int r = cu("cuMemAlloc_v2", (uintptr_t)&memory[at], (uint64_t)(1 + (round * 7 + who) % 13) << 21, 0, 0);
        CHECK(r == 0 || r == 2);
        if (r)
            memory[at] = 0;
        CHECK(!in_motion());
    }
    for (int at = 0; at < 8; at++)
        if (memory[at])
            CHECK(!cu("cuMemFree_v2", memory[at], 0, 0, 0));
    meet(who, 3);
    CHECK(!driver_at_rest() && !nvml_at_rest());
    meet(who, 4);
    return 0;
}

int main(int argc, char **argv) {
    quota = argc > 1 ? strtoull(argv[1], 0, 10) : 0;
    char path[] = "one_story.XXXXXX";
    int file = mkstemp(path);
    if (file < 0 || ftruncate(file, sizeof *board))
        return 2;
    unlink(path);
    board = (struct board *)mmap(0, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (board == MAP_FAILED)
        return 2;
    pid_t child[WORKERS];
    for (int i = 0; i < WORKERS; i++)
        if ((child[i] = fork()) == 0) {
            int r = work_on(i);
            board->phase[i] = 100; /* a process that fails holds nobody up */
            _exit(r);
        }
    int bad = find_device(0);
    if (!bad) {
        meet(WORKERS, 1);
        bad |= nvml_at_rest();
        meet(WORKERS, 2);
        while (board->phase[0] < 3)
            bad |= in_motion(), usleep(500);
        meet(WORKERS, 3);
        bad |= nvml_at_rest();
    }
    board->phase[WORKERS] = 100;
    for (int i = 0; i < WORKERS; i++)
        bad |= wait_for(child[i]);
    printf("%s\n", bad ? "no" : "one story");
    return bad;
}
