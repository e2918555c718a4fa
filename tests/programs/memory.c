// Takes and gives back device memory as stdin says, one command per line, and answers each with one
// line.
//
//   init                  cuInit, the first device, its primary context           -> STATUS
//   alloc KIND BYTES      plain pitch managed async vmm host array graph         -> STATUS ID
//   free ID               the way that fits the kind                             -> STATUS
//   drop ID               the same for async, without waiting                    -> STATUS
//   keep                  the default pool keeps what is given back              -> STATUS
//   map ID | unmap ID     a vmm allocation at an address of its own              -> STATUS
//   release ID            the handle of a vmm allocation, its mapping stays      -> STATUS
//   info  cuMemGetInfo  -> STATUS FREE TOTAL
//   total                 cuDeviceTotalMem                                       -> STATUS TOTAL
//   push | destroy        a context of its own, made current | destroyed         -> STATUS
//   fork  a child goes on reading commands, the parent waits  -> PID (of the child)
//   pid                                                                          -> PID
#define _GNU_SOURCE
#include "driver.h"
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 4096, GRANULE = 2 << 20 };

struct location {
    int type, id;
};
struct properties {
    int type, handle_types;
    struct location location;
    void *win32;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
};
struct access {
    struct location location;
    int flags;
};

static struct held {
    char kind[8];
    W handle;
    size_t bytes;
    W address;
} held[MOST];
static int count;

struct elements {
    size_t width, height;
    unsigned format, channels;
};

// A graph that allocates, and its first launch. Without its memory it gives no graph.
static cu_status launch_graph(struct held *new) {
    W stream = 0, graph = 0, block = 0;
    cu_status status = CALL("cuStreamCreate", &stream, 1u);
    if (!status) status = CALL("cuStreamBeginCapture_v2", stream, 2);
    if (status) return status;
    status = CALL("cuMemAllocAsync", &block, new->bytes, stream);
    if (!status) status = CALL("cuMemFreeAsync", block, stream);
    cu_status ended = CALL("cuStreamEndCapture", stream, &graph);
    if (!status) status = ended;
    if (!status) status = CALL("cuGraphInstantiateWithFlags", &new->handle, graph, 0ull);
    if (!status) status = CALL("cuGraphLaunch", new->handle, stream);
    if (!status) status = CALL("cuStreamSynchronize", stream);
    return status;
}

static cu_status take(struct held *new) {
    W pitch;
    if (!strcmp(new->kind, "array")) {
        struct elements elements = {1024, new->bytes / 4096, 3, 1};
        return CALL("cuArrayCreate_v2", &new->handle, &elements);
    }
    if (!strcmp(new->kind, "graph")) return launch_graph(new);
    if (!strcmp(new->kind, "plain")) return CALL("cuMemAlloc_v2", &new->handle, new->bytes);
    if (!strcmp(new->kind, "pitch"))
        return CALL("cuMemAllocPitch_v2", &new->handle, &pitch, (size_t)1024, new->bytes / 1024, 4u);
    if (!strcmp(new->kind, "managed")) return CALL("cuMemAllocManaged", &new->handle, new->bytes, 1u);
    if (!strcmp(new->kind, "async")) return CALL("cuMemAllocAsync", &new->handle, new->bytes, (W)0);
    if (!strcmp(new->kind, "host")) return CALL("cuMemAllocHost_v2", &new->handle, new->bytes);
    if (!strcmp(new->kind, "vmm")) {
        struct properties properties = {.type = 1, .location = {1, 0}};
        return CALL("cuMemCreate", &new->handle, new->bytes, &properties, (W)0);
    }
    return -1;
}

static cu_status map(struct held *what) {
    struct access access = {{1, 0}, 3};
    cu_status status = CALL("cuMemAddressReserve", &what->address, what->bytes, (size_t)0, (W)0, (W)0);
    if (!status) status = CALL("cuMemMap", what->address, what->bytes, (size_t)0, what->handle, (W)0);
    if (!status) status = CALL("cuMemSetAccess", what->address, what->bytes, &access, (size_t)1);
    return status;
}

static cu_status give(struct held *what) {
    if (!strcmp(what->kind, "async")) {
        cu_status status = CALL("cuMemFreeAsync", what->handle, (W)0);
        return status ? status : CALL("cuCtxSynchronize");
    }
    if (!strcmp(what->kind, "host")) return CALL("cuMemFreeHost", what->handle);
    if (!strcmp(what->kind, "vmm")) return CALL("cuMemRelease", what->handle);
    return CALL("cuMemFree_v2", what->handle);
}

int main(void) {
    if (open_driver()) return 3;
    char line[256];
    W own = 0;
    setvbuf(stdin, NULL, _IONBF, 0); // a forked child must not have read ahead
    while (fgets(line, sizeof line, stdin)) {
        char verb[16] = "", kind[8] = "";
        unsigned long long bytes = 0;
        int id = 0;
        sscanf(line, "%15s", verb);
        sscanf(line, "%*s %d", &id);
        if (id < 0 || id >= MOST) id = 0;
        if (!strcmp(verb, "init")) {
            printf("%d\n", use_device(0));
        } else if (!strcmp(verb, "alloc")) {
            sscanf(line, "%*s %7s %llu", kind, &bytes);
            struct held *new = &held[count];
            memset(new, 0, sizeof *new);
            strcpy(new->kind, kind);
            new->bytes = bytes;
            cu_status status = take(new);
            printf("%d %d\n", status, status ? -1 : count++);
        } else if (!strcmp(verb, "free")) {
            printf("%d\n", give(&held[id]));
        } else if (!strcmp(verb, "drop")) {
            printf("%d\n", CALL("cuMemFreeAsync", held[id].handle, (W)0));
        } else if (!strcmp(verb, "keep")) {
            W pool = 0, all = ~(W)0;
            cu_status status = CALL("cuDeviceGetDefaultMemPool", &pool, 0);
            printf("%d\n", status ? status : CALL("cuMemPoolSetAttribute", pool, 4u, &all));
        } else if (!strcmp(verb, "map")) {
            printf("%d\n", map(&held[id]));
        } else if (!strcmp(verb, "unmap")) {
            printf("%d\n", CALL("cuMemUnmap", held[id].address, held[id].bytes));
        } else if (!strcmp(verb, "info")) {
            size_t free_bytes = 0, total = 0;
            cu_status status = CALL("cuMemGetInfo_v2", &free_bytes, &total);
            printf("%d %zu %zu\n", status, free_bytes, total);
        } else if (!strcmp(verb, "total")) {
            size_t total = 0;
            cu_status status = CALL("cuDeviceTotalMem_v2", &total, 0);
            printf("%d %zu\n", status, total);
        } else if (!strcmp(verb, "push")) {
            printf("%d\n", CALL("cuCtxCreate_v2", &own, 0u, 0));
        } else if (!strcmp(verb, "destroy")) {
            printf("%d\n", CALL("cuCtxDestroy_v2", own));
        } else if (!strcmp(verb, "fork")) {
            fflush(stdout);
            pid_t child = fork();
            if (child) {
                int how = 0;
                waitpid(child, &how, 0);
                _exit(WIFEXITED(how) ? WEXITSTATUS(how) : 99);
            }
            printf("%d\n", getpid());
        } else if (!strcmp(verb, "pid")) {
            printf("%d\n", getpid());
        } else {
            printf("what? %s", line);
        }
        fflush(stdout);
    }
    return 0;
}
