// Holds device memory with known contents, as stdin says, one command per line, and answers each
// with one line.
//
//   init [CONTEXTS]       cuInit, the first device, its primary context              -> STATUS
//   alloc BYTES           cuMemAlloc                                                 -> STATUS ID
//   free ID               cuMemFree                                                  -> STATUS
//   fill ID SEED          words that depend on seed and place, by copies             -> STATUS
//   check ID SEED  how many words are different  -> STATUS COUNT
//   range ID OFFSET  cuMemGetAddressRange of an address inside  -> STATUS DISTANCE BYTES
//   attribute ID WHICH  cuPointerGetAttribute, as a word  -> STATUS VALUE
//   address ID                                                                       -> ADDRESS
//   info  cuMemGetInfo  -> STATUS FREE TOTAL
//   capture [MODE]        a capture begins on a stream of its own, relaxed (2) or so -> STATUS
//   captured              it ends                                                    -> STATUS
//   graph ID VALUE        a graph that sets all words of ID to VALUE                 -> STATUS
//   replay                launches it and waits                                      -> STATUS
//   words ID VALUE  how many words of ID are not VALUE  -> STATUS COUNT
//   write ID VALUE        cuStreamWriteValue32 to the first word, and waits          -> STATUS
//   await VALUE           a stream waits for VALUE in host memory                    -> STATUS
//   signal VALUE          that word gets VALUE                                       -> STATUS
//   push | destroy        a context of its own, made current | destroyed             -> STATUS
//   vmm BYTES             cuMemAddressReserve, Create, Map, SetAccess: ID as others  -> STATUS ID
//   release ID            the handle of a vmm allocation, its mapping stays          -> STATUS
//   unmap ID              its mapping                                                -> STATUS
//   map ID                again, at the same address                                 -> STATUS
//   export ID             its handle, as a descriptor                                -> STATUS
//   retain ID             cuMemRetainAllocationHandle of its address                 -> STATUS
//   ipc ID                cuIpcGetMemHandle                                          -> STATUS
//   launch ID HOW         a kernel that sets its first word to 0: by cuLaunchKernel  -> STATUS
//                         with pointers (0) or packed parameters (1), by
//                         cuLaunchKernelEx (2), of a library (3); and waits. The kernel
//                         is of the file of PTX that RESIDENT_KERNELS names
//   owned BYTES           as vmm, made for this process alone                        -> STATUS ID
//   create BYTES FLAGS    cuMemCreate as owned and with these flags, and its release -> STATUS
//   adapter BYTES  as vmm, made for network adapters to reach  -> STATUS ID
//   hold ID | let ID      cuMemRetainAllocationHandle of its address | its release   -> STATUS
//   tokens ID             its tokens for other devices' drivers                      -> STATUS
//   asked_with_tokens ID  BUFFER_ID, by cuPointerGetAttributes of both  -> STATUS BUFFER_ID
//   descriptor ID         cuMemGetHandleForAddressRange of all of it                 -> STATUS
//   alias ID              its handle exported, imported and mapped elsewhere         -> STATUS ID
//   remap ID              other pages with the same contents at the same address     -> STATUS
//   expect ID VALUE       a stream waits for VALUE in the first word                 -> STATUS
//   reached               cuStreamQuery of it                                        -> STATUS
//   poke ID VALUE         VALUE is copied to the first word                          -> STATUS
//   word ID  the first word  -> STATUS VALUE
//   where ID              the kind of location of a vmm allocation: 1 is the device  -> STATUS KIND
//   host BYTES            pinned host memory of the program's own                    -> STATUS
//   churn COUNT  so many pairs of cuMemAlloc and cuMemFree of 4 KiB  -> STATUS NANOSECONDS
#define _GNU_SOURCE
#include "driver.h"
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 4096 };

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
    W address, handle;
    size_t bytes;
} held[MOST];
static int count;
static W own, stream, exec, waiting;
static volatile unsigned *word;

static unsigned expected(unsigned seed, size_t at) {
    unsigned long long mixed = (at + 1) * 0x9e3779b97f4a7c15ull + seed * 0xbb67ae8584caa73bull;
    return (unsigned)(mixed >> 32);
}

// Contents go through one small buffer, so that a program of gigabytes needs no gigabytes of its
// own.
enum { PART = 1 << 20 };
static unsigned buffer[PART / 4];

static cu_status fill(struct held *what, unsigned seed) {
    cu_status status = 0;
    for (size_t at = 0; !status && at < what->bytes; at += PART) {
        size_t bytes = what->bytes - at < PART ? what->bytes - at : PART;
        for (size_t word_at = 0; word_at < bytes / 4; word_at++) buffer[word_at] = expected(seed, at / 4 + word_at);
        status = CALL("cuMemcpyHtoD_v2", what->address + at, buffer, bytes);
    }
    return status;
}

static cu_status check(struct held *what, unsigned seed, int same, unsigned value, size_t *wrong) {
    cu_status status = 0;
    *wrong = 0;
    for (size_t at = 0; !status && at < what->bytes; at += PART) {
        size_t bytes = what->bytes - at < PART ? what->bytes - at : PART;
        status = CALL("cuMemcpyDtoH_v2", buffer, what->address + at, bytes);
        for (size_t word_at = 0; !status && word_at < bytes / 4; word_at++)
            *wrong += buffer[word_at] != (same ? value : expected(seed, at / 4 + word_at));
    }
    return status;
}

static cu_status map(struct held *what) {
    struct access access = {{1, 0}, 3};
    cu_status status = CALL("cuMemMap", what->address, what->bytes, (size_t)0, what->handle, (W)0);
    if (!status) status = CALL("cuMemSetAccess", what->address, what->bytes, &access, (size_t)1);
    return status;
}

static cu_status vmm(struct held *what, int rdma, int shared) {
    struct properties properties = {.type = 1, .handle_types = shared, .location = {1, 0}, .rdma = rdma};
    cu_status status = CALL("cuMemAddressReserve", &what->address, what->bytes, (size_t)0, (W)0, (W)0);
    if (!status) status = CALL("cuMemCreate", &what->handle, what->bytes, &properties, (W)0);
    return status ? status : map(what);
}

static cu_status create(size_t bytes, W flags) {
    struct properties properties = {.type = 1, .location = {1, 0}};
    W handle = 0;
    cu_status status = CALL("cuMemCreate", &handle, bytes, &properties, flags);
    return status ? status : CALL("cuMemRelease", handle);
}

// What an eviction does, by hand: what knows the pages and not the address does not learn of it.
static cu_status remap(struct held *what) {
    struct properties properties = {.type = 1, .handle_types = 1, .location = {1, 0}};
    void *contents = malloc(what->bytes);
    cu_status status = CALL("cuMemcpyDtoH_v2", contents, what->address, what->bytes);
    if (!status) status = CALL("cuMemUnmap", what->address, what->bytes);
    if (!status) status = CALL("cuMemRelease", what->handle);
    if (!status) status = CALL("cuMemCreate", &what->handle, what->bytes, &properties, (W)0);
    if (!status) status = map(what);
    if (!status) status = CALL("cuMemcpyHtoD_v2", what->address, contents, what->bytes);
    free(contents);
    return status;
}

static cu_status alias(struct held *of, struct held *new) {
    int fd = -1;
    new->bytes = of->bytes;
    cu_status status = CALL("cuMemExportToShareableHandle", &fd, of->handle, 1u, (W)0);
    if (!status) status = CALL("cuMemImportFromShareableHandle", &new->handle, (void *)(intptr_t)fd, 1u);
    if (!status) status = CALL("cuMemAddressReserve", &new->address, new->bytes, (size_t)0, (W)0, (W)0);
    return status ? status : map(new);
}

static cu_status graph(struct held *what, unsigned value) {
    W built = 0, from = 0;
    cu_status status = CALL("cuStreamCreate", &from, 1u);
    if (!status) status = CALL("cuStreamBeginCapture_v2", from, 1u);
    if (!status) status = CALL("cuMemsetD32Async", what->address, value, what->bytes / 4, from);
    if (!status) status = CALL("cuStreamEndCapture", from, &built);
    if (!status) status = CALL("cuGraphInstantiateWithFlags", &exec, built, (W)0);
    return status;
}

// sublet_fill_f32 of one element.
static cu_status launch_how(W address, int how) {
    static W kernel, library, of_library;
    const char *path = getenv("RESIDENT_KERNELS");
    cu_status status = 0;
    if (!path) return -1;
    if (!kernel) status = load_kernel(path, "sublet_fill_f32", &kernel);
    if (!status && how == 3 && !library) {
        status = CALL("cuLibraryLoadFromFile", &library, path, (W)0, (W)0, 0u, (W)0, (W)0, 0u);
        if (!status) status = CALL("cuLibraryGetKernel", &of_library, library, "sublet_fill_f32");
    }
    if (status) return status;
    struct {
        W out;
        float value;
        uint64_t elements;
    } packed = {address, 0, 1};
    size_t bytes = sizeof packed;
    void *extra[] = {(void *)1, &packed, (void *)2, &bytes, NULL};
    void *parameters[] = {&packed.out, &packed.value, &packed.elements};
    if (how == 1) {
        cu_status (*real)(W, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, W, void **, void **) =
            find("cuLaunchKernel");
        status = real(kernel, 1, 1, 1, 1, 1, 1, 0, 0, NULL, extra);
    } else if (how == 2) {
        struct {
            unsigned sides[6], shared;
            W stream, attributes;
            unsigned count;
        } config = {{1, 1, 1, 1, 1, 1}, 0, 0, 0, 0};
        status = CALL("cuLaunchKernelEx", &config, kernel, parameters, (W)0);
    } else {
        status = launch(how == 3 ? of_library : kernel, 1, 0, parameters);
    }
    return status ? status : CALL("cuCtxSynchronize");
}

static cu_status where(struct held *what, int *kind) {
    W handle = 0;
    struct properties properties = {0};
    cu_status status = CALL("cuMemRetainAllocationHandle", &handle, what->address);
    if (status) return status;
    status = CALL("cuMemGetAllocationPropertiesFromHandle", &properties, handle);
    *kind = properties.location.type;
    cu_status released = CALL("cuMemRelease", handle);
    return status ? status : released;
}

static cu_status churn(int pairs, long long *ns) {
    struct timespec begun, ended;
    cu_status status = 0;
    cu_status (*alloc)(W *, size_t) = find("cuMemAlloc_v2");
    cu_status (*release)(W) = find("cuMemFree_v2");
    clock_gettime(CLOCK_MONOTONIC, &begun);
    for (int at = 0; !status && at < pairs; at++) {
        W address = 0;
        status = alloc(&address, 4096);
        if (!status) status = release(address);
    }
    clock_gettime(CLOCK_MONOTONIC, &ended);
    *ns = (ended.tv_sec - begun.tv_sec) * 1000000000ll + ended.tv_nsec - begun.tv_nsec;
    return status;
}

int main(void) {
    if (open_driver()) return 3;
    char line[256];
    while (fgets(line, sizeof line, stdin)) {
        char verb[24] = "";
        unsigned long long first = 0, second = 0;
        int given = sscanf(line, "%23s %llu %llu", verb, &first, &second);
        struct held *of = &held[first < MOST ? first : 0];
        size_t wrong = 0;
        if (!strcmp(verb, "init")) {
            printf("%d\n", use_device(0));
        } else if (!strcmp(verb, "alloc") || !strcmp(verb, "vmm") || !strcmp(verb, "owned") || !strcmp(verb, "adapter")) {
            struct held *new = &held[count];
            memset(new, 0, sizeof *new);
            new->bytes = first;
            cu_status status = !strcmp(verb, "alloc")
                                   ? CALL("cuMemAlloc_v2", &new->address, new->bytes)
                                   : vmm(new, !strcmp(verb, "adapter"), strcmp(verb, "owned") != 0);
            printf("%d %d\n", status, status ? -1 : count++);
        } else if (!strcmp(verb, "create")) {
            printf("%d\n", create(first, second));
        } else if (!strcmp(verb, "free")) {
            printf("%d\n", CALL("cuMemFree_v2", of->address));
        } else if (!strcmp(verb, "fill")) {
            printf("%d\n", fill(of, second));
        } else if (!strcmp(verb, "check")) {
            cu_status status = check(of, second, 0, 0, &wrong);
            printf("%d %zu\n", status, wrong);
        } else if (!strcmp(verb, "words")) {
            cu_status status = check(of, 0, 1, second, &wrong);
            printf("%d %zu\n", status, wrong);
        } else if (!strcmp(verb, "range")) {
            W base = 0;
            size_t bytes = 0;
            cu_status status = CALL("cuMemGetAddressRange_v2", &base, &bytes, of->address + second);
            printf("%d %lld %zu\n", status, (long long)(of->address - base), bytes);
        } else if (!strcmp(verb, "attribute")) {
            W value = 0;
            cu_status status = CALL("cuPointerGetAttribute", &value, (unsigned)second, of->address);
            printf("%d %llu\n", status, (unsigned long long)value);
        } else if (!strcmp(verb, "address")) {
            printf("%llu\n", (unsigned long long)of->address);
        } else if (!strcmp(verb, "info")) {
            size_t free_bytes = 0, total = 0;
            cu_status status = CALL("cuMemGetInfo_v2", &free_bytes, &total);
            printf("%d %zu %zu\n", status, free_bytes, total);
        } else if (!strcmp(verb, "capture")) {
            cu_status status = stream ? 0 : CALL("cuStreamCreate", &stream, 1u);
            printf("%d\n", status ? status : CALL("cuStreamBeginCapture_v2", stream, given > 1 ? (unsigned)first : 2u));
        } else if (!strcmp(verb, "captured")) {
            W built = 0;
            printf("%d\n", CALL("cuStreamEndCapture", stream, &built));
        } else if (!strcmp(verb, "graph")) {
            printf("%d\n", graph(of, second));
        } else if (!strcmp(verb, "replay")) {
            cu_status status = CALL("cuGraphLaunch", exec, (W)0);
            printf("%d\n", status ? status : CALL("cuCtxSynchronize"));
        } else if (!strcmp(verb, "write")) {
            cu_status status = CALL("cuStreamWriteValue32_v2", (W)0, of->address, (unsigned)second, 0u);
            printf("%d\n", status ? status : CALL("cuCtxSynchronize"));
        } else if (!strcmp(verb, "await")) {
            cu_status status = waiting ? 0 : CALL("cuStreamCreate", &waiting, 1u);
            if (!status && !word) status = CALL("cuMemAllocHost_v2", &word, (size_t)4096);
            if (!status) status = CALL("cuStreamWaitValue32_v2", waiting, (W)word, (unsigned)first, 1u);
            printf("%d\n", status);
        } else if (!strcmp(verb, "signal")) {
            *word = first;
            printf("0\n");
        } else if (!strcmp(verb, "push")) {
            printf("%d\n", CALL("cuCtxCreate_v2", &own, 0u, 0));
        } else if (!strcmp(verb, "destroy")) {
            printf("%d\n", CALL("cuCtxDestroy_v2", own));
        } else if (!strcmp(verb, "release")) {
            printf("%d\n", CALL("cuMemRelease", of->handle));
        } else if (!strcmp(verb, "unmap")) {
            printf("%d\n", CALL("cuMemUnmap", of->address, of->bytes));
        } else if (!strcmp(verb, "map")) {
            printf("%d\n", map(of));
        } else if (!strcmp(verb, "export")) {
            int fd = -1;
            printf("%d\n", CALL("cuMemExportToShareableHandle", &fd, of->handle, 1u, (W)0));
        } else if (!strcmp(verb, "retain")) {
            W handle = 0;
            cu_status status = CALL("cuMemRetainAllocationHandle", &handle, of->address);
            printf("%d\n", status ? status : CALL("cuMemRelease", handle));
        } else if (!strcmp(verb, "ipc")) {
            char handle[64];
            printf("%d\n", CALL("cuIpcGetMemHandle", handle, of->address));
        } else if (!strcmp(verb, "hold")) {
            W handle = 0;
            printf("%d\n", CALL("cuMemRetainAllocationHandle", &handle, of->address));
        } else if (!strcmp(verb, "let")) {
            printf("%d\n", CALL("cuMemRelease", of->handle));
        } else if (!strcmp(verb, "tokens")) {
            W tokens[2] = {0, 0};
            printf("%d\n", CALL("cuPointerGetAttribute", tokens, 5u, of->address));
        } else if (!strcmp(verb, "asked_with_tokens")) {
            unsigned which[2] = {5, 7};
            W tokens[2] = {0, 0}, number = 0;
            void *to[2] = {tokens, &number};
            cu_status status = CALL("cuPointerGetAttributes", 2u, which, to, of->address);
            printf("%d %llu\n", status, (unsigned long long)number);
        } else if (!strcmp(verb, "descriptor")) {
            int fd = -1;
            printf("%d\n", CALL("cuMemGetHandleForAddressRange", &fd, of->address, of->bytes, 1u, (W)0));
        } else if (!strcmp(verb, "alias")) {
            struct held *new = &held[count];
            memset(new, 0, sizeof *new);
            cu_status status = alias(of, new);
            printf("%d %d\n", status, status ? -1 : count++);
        } else if (!strcmp(verb, "remap")) {
            printf("%d\n", remap(of));
        } else if (!strcmp(verb, "expect")) {
            cu_status status = waiting ? 0 : CALL("cuStreamCreate", &waiting, 1u);
            if (!status) status = CALL("cuStreamWaitValue32_v2", waiting, of->address, (unsigned)second, 1u);
            printf("%d\n", status);
        } else if (!strcmp(verb, "reached")) {
            printf("%d\n", CALL("cuStreamQuery", waiting));
        } else if (!strcmp(verb, "poke")) {
            unsigned value = second;
            printf("%d\n", CALL("cuMemcpyHtoD_v2", of->address, &value, sizeof value));
        } else if (!strcmp(verb, "word")) {
            unsigned value = 0;
            cu_status status = CALL("cuMemcpyDtoH_v2", &value, of->address, sizeof value);
            printf("%d %u\n", status, value);
        } else if (!strcmp(verb, "host")) {
            W at = 0;
            printf("%d\n", CALL("cuMemAllocHost_v2", &at, (size_t)first));
        } else if (!strcmp(verb, "launch")) {
            printf("%d\n", launch_how(of->address, second));
        } else if (!strcmp(verb, "where")) {
            int kind = 0;
            cu_status status = where(of, &kind);
            printf("%d %d\n", status, kind);
        } else if (!strcmp(verb, "churn")) {
            long long ns = 0;
            cu_status status = churn(first, &ns);
            printf("%d %lld\n", status, ns);
        } else {
            printf("what? %s", line);
        }
        fflush(stdout);
    }
    return 0;
}
