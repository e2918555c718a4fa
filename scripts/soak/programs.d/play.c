// Plays a program of scripts/soak/programs against the driver that the dynamic linker finds.
//
//     play FILE PAGE PROCESS   plays one process of a program; its processes share the file PAGE
//     play --busy DEVICES      keeps devices busy between the lines "go" and "rest" of its input
//     play --hold DEVICES MIB  holds memory on each device, and touches it between "go" and "rest"
//
// A process prints one line at its end: "P <process> <digest> <begin ns> <end ns> <ns without a
// processor> <notes>". A note is a call that was answered otherwise than the program's author
// expects. What each operation means: the table in docs/how-to/soak-programs.md.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t W;
typedef int S;

enum { DEVICES = 4, STREAMS = 32, BUFFERS = 64, FLAGS = 512, LOCKS = 8, EVENTS = 128, GRAPHS = 32, THREADS = 8, PROCESSES = 64, OPS = 4000 };
enum { LOOK = 16 << 10 }; // bytes of a buffer that are written and looked at
enum { OOM = 2 };

static void *driver;
static void *find(const char *name) {
    void *at = dlsym(driver, name);
    if (!at) {
        fprintf(stderr, "play: the driver has no %s\n", name);
        _exit(90);
    }
    return at;
}
static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

typedef struct {
    char word[6][24];
    long number[6];
} Op;
typedef struct {
    Op *ops;
    int count;
} Script;

typedef struct {
    int index;
    pid_t tid;
    Script *script;
    uint64_t digest;
    char notes[2000];
    int at;
    _Atomic uint64_t in_call; // since when the thread is inside a call of the driver; 0: it is not
    W ended_by;
} Thread;

typedef struct {
    int kind, device, live;
    W address, handle, pool;
    size_t bytes;
} Buffer;

static struct Page {
    // Words that the program's flags are, for hosts and streams of all its processes.
    _Atomic uint32_t flags[FLAGS];
    // Where each thread of each process is, for who looks at a hang.
    _Atomic int32_t at[PROCESSES][THREADS];
} *page;

static const char *file, *page_file, *self;
static int process, devices = 1;
static size_t quota;
static Script scripts[PROCESSES][THREADS];
static Thread threads[THREADS];
static W contexts[DEVICES], busy[DEVICES], filler[DEVICES], flags_at;
static W streams[STREAMS], events[EVENTS], graphs[GRAPHS], plans[GRAPHS];
static int stream_device[STREAMS], graph_device[GRAPHS];
static Buffer buffers[BUFFERS];
static pthread_mutex_t locks[LOCKS];
static pthread_barrier_t barrier;
static pid_t children[PROCESSES];
static uint64_t begun;
static volatile unsigned locked_count[LOCKS];
static __thread Thread *mine;

static void take(uint64_t value) {
    if (!mine) return;
    for (int i = 0; i < 8; i++) mine->digest = (mine->digest ^ ((value >> (8 * i)) & 255)) * 1099511628211u;
}
static void note(const char *what, long got) {
    size_t used = strlen(mine->notes);
    if (used < sizeof mine->notes - 100) snprintf(mine->notes + used, 99, "t%d:%d:%s=%ld ", mine->index, mine->at, what, got);
}
// A status that is to be `wanted`; true where it is.
static int expect(const char *what, S got, S wanted) {
    take((uint64_t)got);
    if (got != wanted) note(what, got);
    return got == wanted;
}
#define CALL(name, ...)                                                 \
    ({                                                                  \
        static S (*call)();                                             \
        if (!call) call = (S(*)())find(#name);                          \
        if (mine) mine->in_call = now();                                \
        S status = call(__VA_ARGS__);                                   \
        if (mine) mine->in_call = 0;                                    \
        status;                                                         \
    })
#define MUST(name, ...) expect(#name, CALL(name, __VA_ARGS__), 0)

static S launch(W kernel, unsigned grid, unsigned block, W stream, void **parameters) {
    return CALL(cuLaunchKernel, kernel, grid, 1u, 1u, block, 1u, 1u, 0u, stream, parameters, (void **)NULL);
}
static W load(const char *name, const char *symbol) {
    static char text[1 << 19];
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", getenv("PLAY_KERNELS"), name);
    FILE *in = fopen(path, "r");
    size_t length = in ? fread(text, 1, sizeof text - 1, in) : 0;
    if (in) fclose(in);
    text[length] = 0;
    W module = 0, kernel = 0;
    S status = CALL(cuModuleLoadData, &module, (void *)text);
    if (!status) status = CALL(cuModuleGetFunction, &kernel, module, symbol);
    if (mine) expect("load", status, 0);
    return kernel;
}
static void use(int device) { CALL(cuCtxSetCurrent, contexts[device]); }

// Host functions.
typedef struct {
    int kind; // 0 lock, 1 wait, 2 set
    long which;
} Hosted;
static void hold_until(long flag) {
    while (!page->flags[flag]) usleep(50);
}
static void hosted(void *data) {
    Hosted *what = data;
    if (what->kind == 0) {
        pthread_mutex_lock(&locks[what->which]);
        locked_count[what->which]++;
        pthread_mutex_unlock(&locks[what->which]);
    } else if (what->kind == 1) hold_until(what->which);
    else page->flags[what->which] = 1;
}
static void called_back(W stream, S status, void *data) {
    (void)stream, (void)status;
    hosted(data);
}
static Hosted *host_function(const char *kind, long which) {
    Hosted *made = malloc(sizeof *made);
    *made = (Hosted){!strcmp(kind, "lock") ? 0 : !strcmp(kind, "wait") ? 1 : 2, which};
    return made;
}

// Memory, by every kind of call.
typedef struct { int type, handles; struct { int type, id; } where; void *w; unsigned char c, r; unsigned short u; unsigned char rest[4]; } Physical;
typedef struct { struct { int type, id; } where; int flags; } Access;
typedef struct { size_t width, height; unsigned format, channels; } Shape;
typedef struct { int type, handles; struct { int type, id; } where; void *w; size_t most; unsigned short u; unsigned char rest[54]; } PoolKind;
static const char *kinds[] = {"alloc", "pitch", "async", "pool", "vmm", "managed", "array", "graph", NULL};
static S take_memory(Buffer *b, int device, const char *kind, size_t bytes) {
    memset(b, 0, sizeof *b);
    b->device = device, b->bytes = bytes;
    while (kinds[b->kind] && strcmp(kinds[b->kind], kind)) b->kind++;
    S s = 0;
    switch (b->kind) {
    case 0: return CALL(cuMemAlloc_v2, &b->address, bytes);
    case 1: { size_t pitch; return CALL(cuMemAllocPitch_v2, &b->address, &pitch, (size_t)1 << 20, bytes >> 20, 4u); }
    case 2:
        s = CALL(cuMemAllocAsync, &b->address, bytes, (W)0);
        return s ? s : CALL(cuStreamSynchronize, (W)0);
    case 3: {
        PoolKind what = {.type = 1, .where = {1, device}};
        s = CALL(cuMemPoolCreate, &b->pool, &what);
        if (!s) s = CALL(cuMemAllocFromPoolAsync, &b->address, bytes, b->pool, (W)0);
        if (!s) return CALL(cuStreamSynchronize, (W)0);
        if (b->pool) CALL(cuMemPoolDestroy, b->pool);
        return s;
    }
    case 4: {
        Physical what = {.type = 1, .where = {1, device}};
        Access access = {{1, device}, 3};
        s = CALL(cuMemAddressReserve, &b->address, bytes, (size_t)0, (W)0, (W)0);
        if (s) return s;
        s = CALL(cuMemCreate, &b->handle, bytes, &what, (W)0);
        if (s) {
            CALL(cuMemAddressFree, b->address, bytes);
            return s;
        }
        s = CALL(cuMemMap, b->address, bytes, (size_t)0, b->handle, (W)0);
        return s ? s : CALL(cuMemSetAccess, b->address, bytes, &access, (size_t)1);
    }
    case 5: return CALL(cuMemAllocManaged, &b->address, bytes, 1u);
    case 6: {
        Shape shape = {16384, bytes / 16384 / 4, 3, 1};
        return CALL(cuArrayCreate_v2, &b->handle, &shape);
    }
    default: {
        // A graph that takes the memory and gives it back, launched once.
        W graph = 0, plan = 0, at = 0, stream = 0;
        s = CALL(cuStreamCreate, &stream, 1u);
        if (!s) s = CALL(cuStreamBeginCapture_v2, stream, 2);
        if (s) return s;
        s = CALL(cuMemAllocAsync, &at, bytes, stream);
        if (!s) s = CALL(cuMemFreeAsync, at, stream);
        S ended = CALL(cuStreamEndCapture, stream, &graph);
        if (!s) s = ended;
        if (!s) s = CALL(cuGraphInstantiateWithFlags, &plan, graph, (W)0);
        if (!s) s = CALL(cuGraphLaunch, plan, stream);
        if (!s) s = CALL(cuStreamSynchronize, stream);
        if (plan) CALL(cuGraphExecDestroy, plan);
        if (graph) CALL(cuGraphDestroy, graph);
        CALL(cuStreamDestroy_v2, stream);
        CALL(cuDeviceGraphMemTrim, device);
        return s;
    }
    }
}
static void give_memory(Buffer *b) {
    if (!b->live) return;
    b->live = 0;
    switch (b->kind) {
    case 2: MUST(cuMemFreeAsync, b->address, (W)0); MUST(cuStreamSynchronize, (W)0); break;
    case 3:
        MUST(cuMemFreeAsync, b->address, (W)0);
        MUST(cuStreamSynchronize, (W)0);
        MUST(cuMemPoolDestroy, b->pool);
        break;
    case 4:
        MUST(cuMemUnmap, b->address, b->bytes);
        MUST(cuMemRelease, b->handle);
        MUST(cuMemAddressFree, b->address, b->bytes);
        break;
    case 6: MUST(cuArrayDestroy, b->handle); break;
    case 7: break;
    default: MUST(cuMemFree_v2, b->address);
    }
}
static int has_bytes(Buffer *b) { return b->live && b->address; }
static void look_at(Buffer *b) {
    static __thread unsigned char seen[LOOK];
    size_t bytes = b->bytes < LOOK ? b->bytes : LOOK;
    memset(seen, 0xEE, sizeof seen);
    if (!MUST(cuMemcpyDtoH_v2, (void *)seen, b->address, bytes)) return;
    uint64_t sum = 14695981039346656037u;
    for (size_t i = 0; i < bytes; i++) sum = (sum ^ seen[i]) * 1099511628211u;
    take(sum);
    note("bytes", (long)(sum & 0xffffff));
}

// A signal handler that makes driver calls, as a checkpoint on SIGTERM does. It runs once: where
// its thread is found inside one call for long, or at the end of the watch.
static struct {
    Thread *thread;
    Buffer *buffer;
    char what[24];
    _Atomic int armed, fired;
    W stream;
} watch;
static void on_signal(int number) {
    (void)number;
    int saved = errno;
    Thread *thread = watch.thread;
    if (thread && thread == mine && atomic_exchange(&watch.fired, 1) == 0) {
        uint64_t since = mine->in_call;
        Buffer *b = watch.buffer;
        static unsigned char seen[LOOK];
        if (!strcmp(watch.what, "copy")) {
            long wrong = 0;
            memset(seen, 0xEE, sizeof seen);
            if (MUST(cuMemcpyDtoH_v2, (void *)seen, b->address, (size_t)LOOK))
                for (int i = 0; i < LOOK; i++) wrong += seen[i] != 0x5a;
            expect("bytes-wrong-in-handler", (S)wrong, 0);
        } else if (!strcmp(watch.what, "launch")) {
            float value = 3;
            W count = 64, to = b->address + LOOK;
            void *words[] = {&to, &value, &count};
            expect("launch-in-handler", launch(filler[b->device], 1, 64, watch.stream, words), 0);
            expect("synchronise-in-handler", CALL(cuStreamSynchronize, watch.stream), 0);
        } else {
            W more = 0;
            S s = CALL(cuMemAlloc_v2, &more, quota + (2u << 20));
            expect("allocation-in-handler", s, OOM);
            if (!s) CALL(cuMemFree_v2, more);
        }
        mine->in_call = since;
    }
    errno = saved;
}
static void *watcher(void *data) {
    (void)data;
    while (watch.armed) {
        uint64_t since = watch.thread->in_call;
        if (since && now() > since + 30000000u && !watch.fired) {
            syscall(SYS_tgkill, getpid(), watch.thread->tid, SIGTERM);
            break;
        }
        usleep(3000);
    }
    return NULL;
}

static uint64_t waited_for_a_processor(const char *path) {
    FILE *in = fopen(path, "r");
    unsigned long long ran = 0, waited = 0;
    if (in && fscanf(in, "%llu %llu", &ran, &waited) != 2) waited = 0;
    if (in) fclose(in);
    return waited;
}
static _Atomic uint64_t delay;
static void say(int all) {
    char line[9000];
    uint64_t digest = 14695981039346656037u;
    int used = 0;
    for (int t = 0; t < (all ? THREADS : 1); t++)
        if (threads[t].script) digest = (digest ^ threads[t].digest) * 1099511628211u;
    uint64_t waited = delay + waited_for_a_processor("/proc/thread-self/schedstat");
    used = snprintf(line, sizeof line, "P %d %016llx %llu %llu %llu ", process, (unsigned long long)digest, (unsigned long long)begun,
                    (unsigned long long)now(), (unsigned long long)waited);
    for (int t = 0; t < (all ? THREADS : 1); t++)
        if (threads[t].script) used += snprintf(line + used, sizeof line - used - 2, "%s", threads[t].notes);
    line[used++] = '\n';
    ssize_t written = write(1, line, used);
    (void)written;
}

static void become(int which) {
    char number[16];
    snprintf(number, sizeof number, "%d", which);
    char *words[] = {(char *)self, (char *)file, (char *)page_file, number, NULL};
    execv("/proc/self/exe", words);
    _exit(91);
}
static int is(Op *op, const char *name) { return !strcmp(op->word[0], name); }

static void run(Op *op) {
    long *n = op->number;
    W flag = n[2] < FLAGS ? flags_at + 4 * (W)n[2] : 0;
    if (is(op, "stream")) {
        use(n[2]);
        stream_device[n[1]] = n[2];
        MUST(cuStreamCreate, &streams[n[1]], 1u);
    } else if (is(op, "nostream")) {
        MUST(cuStreamDestroy_v2, streams[n[1]]);
    } else if (is(op, "take")) {
        Buffer *b = &buffers[n[1]];
        use(n[2]);
        b->live = expect("take", take_memory(b, n[2], op->word[3], (size_t)n[4] << 20), 0);
        if (b->live) b->device = n[2];
        if (has_bytes(b)) {
            size_t bytes = 2 * LOOK;
            MUST(cuMemsetD8_v2, b->address, 0x5au, bytes);
            MUST(cuStreamSynchronize, (W)0);
        }
    } else if (is(op, "give")) {
        use(buffers[n[1]].device);
        give_memory(&buffers[n[1]]);
    } else if (is(op, "over") || is(op, "never")) {
        // More than the quota, or than any device here has, a number of times: refused, always.
        use(n[1]);
        for (long i = 0; i < n[2]; i++) {
            W at = 0;
            S s = CALL(cuMemAlloc_v2, &at, is(op, "over") ? quota + (2u << 20) : (size_t)600 << 20);
            if (s != OOM || i == 0) expect("over", s, OOM);
            if (!s) CALL(cuMemFree_v2, at);
        }
    } else if (is(op, "lock")) pthread_mutex_lock(&locks[n[1]]);
    else if (is(op, "unlock")) pthread_mutex_unlock(&locks[n[1]]);
    else if (is(op, "kernel")) {
        use(stream_device[n[1]]);
        for (long i = 0; i < n[3]; i++) {
            W us = n[2];
            void *words[] = {&us};
            S s = launch(busy[stream_device[n[1]]], 1, 32, streams[n[1]], words);
            if (s || i == 0) expect("kernel", s, 0);
        }
    } else if (is(op, "fill")) {
        Buffer *b = &buffers[n[2]];
        if (!has_bytes(b)) return;
        use(b->device);
        float value = n[3];
        W count = LOOK / 8, to = b->address + LOOK / 2;
        void *words[] = {&to, &value, &count};
        expect("fill", launch(filler[b->device], 8, 256, streams[n[1]], words), 0);
    } else if (is(op, "set")) {
        Buffer *b = &buffers[n[2]];
        if (!has_bytes(b)) return;
        use(b->device);
        for (long i = 0; i < n[4]; i++) {
            S s = CALL(cuMemsetD8Async, b->address, (unsigned)((n[3] + i) & 255), (size_t)LOOK, streams[n[1]]);
            if (s || i == 0) expect("set", s, 0);
        }
    } else if (is(op, "send")) {
        // From pageable memory: the call may wait for the stream.
        Buffer *b = &buffers[n[2]];
        if (!has_bytes(b)) return;
        use(b->device);
        unsigned char *bytes = malloc(LOOK);
        for (int i = 0; i < LOOK; i++) bytes[i] = (unsigned char)(i * 7 + n[3]);
        MUST(cuMemcpyHtoDAsync_v2, b->address, (void *)bytes, (size_t)LOOK, streams[n[1]]);
        memset(bytes, 0xEE, LOOK);
        free(bytes);
    } else if (is(op, "copy")) {
        Buffer *from = &buffers[n[2]], *to = &buffers[n[3]];
        if (!has_bytes(from) || !has_bytes(to)) return;
        use(to->device);
        if (from->device == to->device) MUST(cuMemcpyDtoDAsync_v2, to->address, from->address, (size_t)LOOK, streams[n[1]]);
        else MUST(cuMemcpyPeerAsync, to->address, contexts[to->device], from->address, contexts[from->device], (size_t)LOOK, streams[n[1]]);
    } else if (is(op, "look")) {
        if (!has_bytes(&buffers[n[2]])) return;
        use(buffers[n[2]].device);
        MUST(cuStreamSynchronize, streams[n[1]]);
        look_at(&buffers[n[2]]);
    } else if (is(op, "host")) {
        use(stream_device[n[1]]);
        MUST(cuLaunchHostFunc, streams[n[1]], (void *)hosted, (void *)host_function(op->word[2], n[3]));
    } else if (is(op, "callback")) {
        use(stream_device[n[1]]);
        MUST(cuStreamAddCallback, streams[n[1]], (void *)called_back, (void *)host_function(op->word[2], n[3]), 0u);
    } else if (is(op, "await")) {
        use(stream_device[n[1]]);
        MUST(cuStreamWaitValue32_v2, streams[n[1]], flag, 1u, 0u);
    } else if (is(op, "write")) {
        use(stream_device[n[1]]);
        MUST(cuStreamWriteValue32_v2, streams[n[1]], flag, 1u, 0u);
    } else if (is(op, "raise")) page->flags[n[1]] = 1;
    else if (is(op, "wait")) hold_until(n[1]);
    else if (is(op, "record")) {
        use(stream_device[n[1]]);
        MUST(cuEventCreate, &events[n[2]], 2u);
        MUST(cuEventRecord, events[n[2]], streams[n[1]]);
    } else if (is(op, "follow")) {
        use(stream_device[n[1]]);
        MUST(cuStreamWaitEvent, streams[n[1]], events[n[2]], 0u);
    } else if (is(op, "reach")) {
        MUST(cuEventSynchronize, events[n[1]]);
    } else if (is(op, "sync")) {
        use(stream_device[n[1]]);
        MUST(cuStreamSynchronize, streams[n[1]]);
    } else if (is(op, "syncall")) {
        use(n[1]);
        MUST(cuCtxSynchronize);
    } else if (is(op, "graph")) {
        // graph G S host-function flag kernels: kernels, a host function among them, captured
        int device = stream_device[n[2]];
        use(device);
        graph_device[n[1]] = device;
        MUST(cuStreamBeginCapture_v2, streams[n[2]], 1);
        W us = 30;
        void *words[] = {&us};
        for (long i = 0; i < n[5]; i++) expect("kernel", launch(busy[device], 1, 32, streams[n[2]], words), 0);
        MUST(cuLaunchHostFunc, streams[n[2]], (void *)hosted, (void *)host_function(op->word[3], n[4]));
        for (long i = 0; i < n[5]; i++) expect("kernel", launch(busy[device], 1, 32, streams[n[2]], words), 0);
        MUST(cuStreamEndCapture, streams[n[2]], &graphs[n[1]]);
        MUST(cuGraphInstantiateWithFlags, &plans[n[1]], graphs[n[1]], (W)0);
    } else if (is(op, "play")) {
        use(stream_device[n[2]]);
        MUST(cuGraphLaunch, plans[n[1]], streams[n[2]]);
    } else if (is(op, "barrier")) pthread_barrier_wait(&barrier);
    else if (is(op, "context")) {
        // A context of its own, with work in it, and its end.
        W other = 0, at = 0, stream = 0;
        int device;
        CALL(cuDeviceGet, &device, (int)n[1]);
        if (MUST(cuCtxCreate_v2, &other, 0u, device)) {
            if (MUST(cuMemAlloc_v2, &at, (size_t)(2 << 20))) {
                MUST(cuStreamCreate, &stream, 1u);
                MUST(cuMemsetD8Async, at, 1u, (size_t)4096, stream);
                MUST(cuStreamSynchronize, stream);
                MUST(cuMemFree_v2, at);
            }
            MUST(cuCtxDestroy_v2, other);
        }
        use(n[1]);
    } else if (is(op, "watch")) {
        memset((void *)&watch, 0, sizeof watch);
        watch.buffer = &buffers[n[1]];
        if (!has_bytes(watch.buffer)) return;
        snprintf(watch.what, sizeof watch.what, "%s", op->word[2]);
        use(watch.buffer->device);
        MUST(cuStreamCreate, &watch.stream, 1u);
        watch.thread = mine, watch.armed = 1;
    } else if (is(op, "watched")) {
        // watched S us count: launches while the watch is on
        if (!watch.armed) return;
        pthread_t helper;
        pthread_create(&helper, NULL, watcher, NULL);
        int device = stream_device[n[1]];
        use(device);
        W us = n[2];
        void *words[] = {&us};
        for (long i = 0; i < n[3]; i++) {
            S s = launch(busy[device], 1, 32, streams[n[1]], words);
            if (s) expect("watched-kernel", s, 0);
            if (i % 4 == 3) usleep(1000);
        }
        watch.armed = 0;
        pthread_join(helper, NULL);
        if (!watch.fired) raise(SIGTERM);
        watch.thread = NULL;
    } else if (is(op, "nap")) usleep(n[1] * 1000);
    else if (is(op, "spawn")) {
        fflush(NULL);
        pid_t child = fork();
        if (!child) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (n[2]) _exit(0); // a child that only forks
            become(n[1]);
        }
        children[n[1]] = child;
    } else if (is(op, "join")) {
        int status = 0;
        while (waitpid(children[n[1]], &status, 0) < 0 && errno == EINTR) {}
        expect("child", status, n[2]);
    } else if (is(op, "exec")) {
        say(0);
        become(n[1]);
    } else if (is(op, "exit")) {
        say(0);
        if (n[1] == 1) exit(0);
        if (n[1] == 2) _exit(0);
        kill(getpid(), SIGKILL);
    } else {
        fprintf(stderr, "play: %s is no operation\n", op->word[0]);
        _exit(92);
    }
}

static void *body(void *data) {
    mine = data;
    mine->tid = (pid_t)syscall(SYS_gettid);
    for (mine->at = 0; mine->at < mine->script->count; mine->at++) {
        page->at[process][mine->index] = mine->at + 1;
        run(&mine->script->ops[mine->at]);
    }
    page->at[process][mine->index] = -1;
    if (mine->index) delay += waited_for_a_processor("/proc/thread-self/schedstat");
    return NULL;
}

static void read_program(void) {
    FILE *in = fopen(file, "r");
    char line[256];
    int p = 0, t = 0;
    if (!in) exit(93);
    while (fgets(line, sizeof line, in)) {
        Op op = {0};
        int words = 0;
        line[strcspn(line, "#\n")] = 0;
        for (char *word = strtok(line, " "); word && words < 6; word = strtok(NULL, " "), words++) {
            snprintf(op.word[words], sizeof op.word[words], "%s", word);
            op.number[words] = atol(word);
        }
        if (!words) continue;
        if (is(&op, "devices")) devices = op.number[1];
        else if (is(&op, "mem")) quota = (size_t)op.number[1] << 20;
        else if (is(&op, "evictable")) continue;
        else if (is(&op, "process")) p = op.number[1], t = 0;
        else if (is(&op, "thread")) t = op.number[1];
        else {
            Script *script = &scripts[p][t];
            if (!script->ops) script->ops = calloc(OPS, sizeof op);
            if (script->count < OPS) script->ops[script->count++] = op;
        }
    }
    fclose(in);
}

// A process that only starts others, as a shell does, has no use for the driver.
static int uses_driver(void) {
    for (int t = 0; t < THREADS; t++)
        for (int i = 0; i < scripts[process][t].count; i++) {
            Op *op = &scripts[process][t].ops[i];
            if (!is(op, "spawn") && !is(op, "join") && !is(op, "nap")) return 1;
        }
    return 0;
}
static void open_driver(void) {
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) {
        fprintf(stderr, "play: %s\n", dlerror());
        _exit(94);
    }
}
static S open_devices(void) {
    S s = CALL(cuInit, 0u);
    for (int d = 0; d < devices && !s; d++) {
        int device;
        s = CALL(cuDeviceGet, &device, d);
        if (!s) s = CALL(cuDevicePrimaryCtxRetain, &contexts[d], device);
        if (!s) use(d);
        if (!s) busy[d] = load("busy.ptx", "sublet_busy_us");
        if (!s) filler[d] = load("elementwise.ptx", "sublet_fill_f32");
    }
    return s;
}

static int neighbour(int count, char **words) {
    int hold = !strcmp(words[1], "--hold");
    devices = atoi(words[2]);
    open_driver();
    S s = open_devices();
    W stream[DEVICES] = {0}, memory[DEVICES] = {0};
    for (int d = 0; d < devices && !s; d++) {
        use(d);
        s = CALL(cuStreamCreate, &stream[d], 1u);
        if (hold && count > 3) {
            s = CALL(cuMemAlloc_v2, &memory[d], (size_t)atol(words[3]) << 20);
            if (!s) s = CALL(cuMemsetD8_v2, memory[d], 7u, (size_t)1 << 20);
        }
    }
    printf("%s %d\n", s ? "failed" : "ready", s);
    fflush(stdout);
    fcntl(0, F_SETFL, O_NONBLOCK);
    for (int going = 0;;) {
        char said[64];
        ssize_t got = read(0, said, sizeof said - 1);
        if (got == 0) return 0;
        if (got > 0) going = said[got - 2] == 'o'; // "go"; "rest"
        if (!going) {
            usleep(1000);
            continue;
        }
        for (int d = 0; d < devices; d++) {
            use(d);
            W us = hold ? 200 : 1000;
            void *kernel[] = {&us};
            for (int i = 0; i < (hold ? 1 : 4); i++) launch(busy[d], 1, 32, stream[d], kernel);
            if (hold) CALL(cuMemsetD8Async, memory[d], 7u, (size_t)4096, stream[d]);
        }
        for (int d = 0; d < devices; d++) {
            use(d);
            CALL(cuStreamSynchronize, stream[d]);
        }
        if (hold) usleep(5000);
    }
}

int main(int count, char **words) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    begun = now();
    if (count >= 3 && words[1][0] == '-') return neighbour(count, words);
    if (count != 4) return 95;
    self = words[0], file = words[1], page_file = words[2], process = atoi(words[3]);
    read_program();
    int shared = open(page_file, O_RDWR | O_CLOEXEC);
    size_t bytes = (sizeof *page + 4095) & ~4095ul;
    page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, shared, 0);
    close(shared);
    if (page == MAP_FAILED) return 96;
    for (int i = 0; i < LOCKS; i++) pthread_mutex_init(&locks[i], NULL);
    signal(SIGTERM, on_signal);
    int used = 0;
    for (int t = 0; t < THREADS; t++)
        if (scripts[process][t].count) used++;
    pthread_barrier_init(&barrier, NULL, used ? used : 1);
    for (int t = 0; t < THREADS; t++) {
        threads[t].index = t;
        threads[t].digest = 14695981039346656037u;
        if (scripts[process][t].count) threads[t].script = &scripts[process][t];
    }
    mine = &threads[0];
    mine->at = -1;
    if (uses_driver()) {
        open_driver();
        expect("open", open_devices(), 0);
        // The words of the page, for streams.
        MUST(cuMemHostRegister_v2, (void *)page, bytes, 2u);
        MUST(cuMemHostGetDevicePointer_v2, &flags_at, (void *)page, 0u);
    }
    pthread_t others[THREADS];
    for (int t = 1; t < THREADS; t++)
        if (threads[t].script) pthread_create(&others[t], NULL, body, &threads[t]);
    if (threads[0].script) body(&threads[0]);
    for (int t = 1; t < THREADS; t++)
        if (threads[t].script) pthread_join(others[t], NULL);
    say(1);
    return 0;
}
