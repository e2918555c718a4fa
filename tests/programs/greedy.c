// Takes all memory of the device and writes to as much of it as it is let, as stdin says, one way
// per line, and answers each with one line. What was taken is given back after each.
//
//   init                  cuInit, the first device, its primary context           -> STATUS
//   fill                  cuMemsetD8 of allocations of 1 GiB                      -> STATUS MIB
//   pages                 a byte of every page of them, by cuMemsetD2D8           -> STATUS MIB
//   copy                  copies of host memory to all of them                    -> STATUS MIB
//   handles               as fill, of physical handles                            -> STATUS MIB
//   managed               as fill, of managed memory                              -> STATUS MIB
//   back                  as fill, and a copy of each back to private memory      -> STATUS MIB
//   locked                cuMemAllocHost of 1 GiB and of as much again            -> STATUS MIB
//   lend                  an IPC handle of 8 GiB                                  -> HEX
//   borrow HEX            fill of the memory of one                               -> STATUS MIB
//
// STATUS is that of the call that was refused, MIB what was written before.
#define _GNU_SOURCE
#include "driver.h"
#include <string.h>
#include <sys/mman.h>

enum { MOST = 4096 };
static const size_t GIB = 1ul << 30, PART = 64ul << 20;

struct properties {
    int type, handle_types, location_type, location;
    void *win32;
    unsigned char rest[8];
};
struct access {
    int location_type, location, flags;
};
struct ipc {
    unsigned char bytes[64];
};

static W held[MOST], handles[MOST];
static void *copies[MOST];
static int count;
static size_t written;
static char *host;

static cu_status take(const char *way, W *to) {
    if (!strcmp(way, "managed")) return CALL("cuMemAllocManaged", to, GIB, 1u);
    if (strcmp(way, "handles")) return CALL("cuMemAlloc_v2", to, GIB);
    struct properties properties = {.type = 1, .location_type = 1};
    struct access access = {1, 0, 3};
    cu_status status = CALL("cuMemCreate", &handles[count], GIB, &properties, (W)0);
    if (!status) status = CALL("cuMemAddressReserve", to, GIB, (size_t)0, (W)0, (W)0);
    if (!status) status = CALL("cuMemMap", *to, GIB, (size_t)0, handles[count], (W)0);
    if (!status) status = CALL("cuMemSetAccess", *to, GIB, &access, (size_t)1);
    return status;
}

static cu_status fill(W at, size_t bytes) {
    for (size_t done = 0; done < bytes; done += PART, written += PART) {
        cu_status status = CALL("cuMemsetD8_v2", at + done, 7, PART);
        if (!status) status = CALL("cuCtxSynchronize");
        if (status) return status;
    }
    return 0;
}

static cu_status use(const char *way, W at) {
    if (!strcmp(way, "pages")) {
        for (size_t done = 0; done < GIB; done += PART, written += PART) {
            cu_status status = CALL("cuMemsetD2D8_v2", at + done, (size_t)4096, 7, (size_t)1, PART / 4096);
            if (!status) status = CALL("cuCtxSynchronize");
            if (status) return status;
        }
        return 0;
    }
    if (!strcmp(way, "copy")) {
        for (size_t done = 0; done < GIB; done += PART, written += PART) {
            cu_status status = CALL("cuMemcpyHtoD_v2", at + done, host, PART);
            if (status) return status;
        }
        return 0;
    }
    cu_status status = fill(at, GIB);
    if (status || strcmp(way, "back")) return status;
    // Taken by the copies alone: the program itself writes nothing there.
    void *to = mmap(NULL, GIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    copies[count - 1] = to;
    for (size_t done = 0; !status && done < GIB; done += PART, written += PART)
        status = CALL("cuMemcpyDtoH_v2", (char *)to + done, at + done, PART);
    return status;
}

static void give_back(const char *way) {
    while (count--) {
        if (copies[count]) munmap(copies[count], GIB);
        copies[count] = NULL;
        if (strcmp(way, "handles")) {
            CALL("cuMemFree_v2", held[count]);
            continue;
        }
        CALL("cuMemUnmap", held[count], GIB);
        CALL("cuMemAddressFree", held[count], GIB);
        CALL("cuMemRelease", handles[count]);
    }
    count = 0;
}

static cu_status locked(void) {
    void *to[MOST];
    size_t bytes = GIB / 4;
    cu_status status = 0;
    for (count = 0; count < MOST && !status; count++, written += bytes)
        status = CALL("cuMemAllocHost_v2", &to[count], bytes);
    written -= bytes;
    for (count--; count--;) CALL("cuMemFreeHost", to[count]);
    count = 0;
    return status;
}

int main(void) {
    char way[16], line[256], hex[160];
    if (open_driver()) return 3;
    setvbuf(stdout, NULL, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        cu_status status = 0;
        written = 0;
        if (sscanf(line, "%15s %159s", way, hex) < 1) return 2;
        if (!strcmp(way, "init")) {
            status = use_device(0);
            host = malloc(PART);
            memset(host, 5, PART);
            printf("%d\n", status);
            continue;
        }
        if (!strcmp(way, "lend")) {
            struct ipc ipc;
            W at;
            status = CALL("cuMemAlloc_v2", &at, 8 * GIB);
            if (!status) status = CALL("cuIpcGetMemHandle", &ipc, at);
            for (size_t byte = 0; byte < sizeof ipc && !status; byte++) printf("%02x", ipc.bytes[byte]);
            printf("\n");
            continue;
        }
        if (!strcmp(way, "borrow")) {
            struct ipc ipc;
            W at = 0;
            for (size_t byte = 0; byte < sizeof ipc; byte++) {
                unsigned value = 0;
                sscanf(hex + 2 * byte, "%2x", &value);
                ipc.bytes[byte] = (unsigned char)value;
            }
            cu_status (*open)(W *, struct ipc, unsigned) = find("cuIpcOpenMemHandle_v2");
            status = open(&at, ipc, 1);
            if (!status) status = fill(at, 8 * GIB);
        } else if (!strcmp(way, "locked")) {
            status = locked();
        } else {
            while (!status && count < MOST && !(status = take(way, &held[count]))) status = use(way, held[count++]);
            give_back(way);
        }
        printf("%d %zu\n", status, written >> 20);
    }
    return 0;
}
