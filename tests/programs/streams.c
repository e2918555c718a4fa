// Creates, uses and destroys streams in every way that is legal, as stdin says, one command per
// line; answers each with one line.
//
//   init KERNELS  the first device and kernels of the folder of PTX files  -> STATUS
//   drop ROUNDS  a stream with work in it is destroyed, another one goes on  -> STATUS
//   elsewhere ROUNDS  another thread waits for a stream and destroys it, this one goes on  ->
//       STATUS
//   shared ROUNDS  two threads submit to one stream; either goes on elsewhere when it is gone  ->
//       STATUS
//   context ROUNDS  a context with work in its default stream and one of its own is destroyed  ->
//       STATUS
//   turns STREAMS COUNT US kernels in turn to so many streams, not waited for  -> STATUS
//   threads COUNT  so many threads at once, each with a stream, some kernels, and a wait  -> STATUS
//   one-by-one COUNT  so many threads one after another, each with a stream and some kernels  ->
//       STATUS
//   ahead COUNT US  a fresh thread and stream: kernels in flight at once, at most  -> STATUS MOST
//   spread STREAMS COUNT US  the same over so many streams  -> STATUS MOST
//   alloc BYTES  of device memory, to stay  -> STATUS
//   sync  -> STATUS
//   lost  a stream that is being captured is destroyed  -> STATUS
//   forked  a stream that has joined a capture and been joined is destroyed, the capture ends, its
//       graph runs -> STATUS
//   freed  a stream is destroyed, and a kernel launched on it  -> STATUS
//   error  the capture of a stream that has joined it is ended, then that of the first -> STATUS
//       STATUS
#define _GNU_SOURCE
#include "driver.h"
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

enum { MOST = 1024, THREADS = 4096 };
static W context, other, busy;
static pthread_barrier_t barrier;
static W shared_stream;
static atomic_int failed;

static cu_status init(const char *folder) {
    char path[8192];
    cu_status status = use_device(0);
    snprintf(path, sizeof path, "%s/busy.ptx", folder);
    if (!status) status = CALL("cuCtxGetCurrent", &context);
    if (!status) status = CALL("cuStreamCreate", &other, 1u);
    return status ? status : load_kernel(path, "sublet_busy_us", &busy);
}

static cu_status work(W on, uint64_t us) {
    void *parameters[] = {&us};
    return launch(busy, 1, on, parameters);
}

static cu_status some(W on, int count, uint64_t us) {
    cu_status status = 0;
    while (!status && count-- > 0) status = work(on, us);
    return status;
}

static cu_status drop(int rounds) {
    cu_status status = 0;
    for (int round = 0; !status && round < rounds; round++) {
        W stream = 0;
        status = CALL("cuStreamCreate", &stream, 1u);
        if (!status) status = some(stream, 10, 20);
        if (!status) status = CALL("cuStreamDestroy_v2", stream);
        if (!status) status = work(other, 20);
    }
    return status;
}

static void *destroy_after_wait(void *rounds) {
    cu_status status = CALL("cuCtxSetCurrent", context);
    for (intptr_t round = 0; round < (intptr_t)rounds; round++) {
        pthread_barrier_wait(&barrier);
        if (!status) status = CALL("cuStreamSynchronize", shared_stream);
        if (!status) status = CALL("cuStreamDestroy_v2", shared_stream);
        pthread_barrier_wait(&barrier);
    }
    if (status) failed = status;
    return NULL;
}

static void *submit_beside(void *rounds) {
    W own = 0;
    cu_status status = CALL("cuCtxSetCurrent", context);
    if (!status) status = CALL("cuStreamCreate", &own, 1u);
    for (intptr_t round = 0; round < (intptr_t)rounds; round++) {
        pthread_barrier_wait(&barrier);
        if (!status) status = some(shared_stream, 5, 20);
        pthread_barrier_wait(&barrier);
        // The first thread destroys it now; what we do meanwhile has nothing to do with it.
        if (!status) status = work(own, 20);
        if (!status) status = CALL("cuStreamSynchronize", own);
    }
    if (status) failed = status;
    return NULL;
}

// `beside`: the other thread submits to the stream as well, and this one destroys it.
static cu_status with_another(intptr_t rounds, int beside) {
    pthread_t thread;
    cu_status status = 0;
    failed = 0;
    pthread_barrier_init(&barrier, NULL, 2);
    pthread_create(&thread, NULL, beside ? submit_beside : destroy_after_wait, (void *)rounds);
    for (intptr_t round = 0; round < rounds; round++) {
        if (!status) status = CALL("cuStreamCreate", &shared_stream, 1u);
        if (!beside && !status) status = some(shared_stream, 7, 20);
        pthread_barrier_wait(&barrier);
        if (beside && !status) status = some(shared_stream, 5, 20);
        pthread_barrier_wait(&barrier);
        if (beside && !status) status = CALL("cuStreamDestroy_v2", shared_stream);
        if (!status) status = work(other, 20);
    }
    pthread_join(thread, NULL);
    return status ? status : failed;
}

static cu_status contexts(int rounds) {
    cu_status status = 0;
    for (int round = 0; !status && round < rounds; round++) {
        W own = 0, stream = 0;
        status = CALL("cuCtxCreate_v2", &own, 0u, 0);
        // A fill is work as well, and needs no kernel of the new context.
        W memory = 0;
        if (!status) status = CALL("cuMemAlloc_v2", &memory, (size_t)65536);
        if (!status) status = CALL("cuStreamCreate", &stream, 1u);
        for (int at = 0; !status && at < 10; at++) {
            status = CALL("cuMemsetD8Async", memory, 1, (size_t)65536, (W)0);
            if (!status) status = CALL("cuMemsetD8Async", memory, 1, (size_t)65536, stream);
        }
        if (!status) status = CALL("cuCtxDestroy_v2", own);
        if (!status) status = CALL("cuCtxSetCurrent", context);
        if (!status) status = work(0, 20);
        if (!status) status = work(other, 20);
    }
    return status;
}

static cu_status turns(int streams, int count, uint64_t us) {
    static W stream[MOST];
    cu_status status = 0;
    if (streams > MOST) streams = MOST;
    for (int at = 0; !status && at < streams; at++) status = CALL("cuStreamCreate", &stream[at], 1u);
    for (int at = 0; !status && at < count; at++) status = work(stream[at % streams], us);
    return status;
}

static void *with_a_stream(void *unused) {
    W stream = 0;
    cu_status status = CALL("cuCtxSetCurrent", context);
    if (!status) status = CALL("cuStreamCreate", &stream, 1u);
    for (int round = 0; !status && round < 2; round++) {
        status = some(stream, 20, 5);
        if (!status) status = CALL("cuStreamSynchronize", stream);
    }
    if (status) failed = status;
    return unused;
}

static cu_status threads(int count, int at_once) {
    static pthread_t thread[THREADS];
    pthread_attr_t attributes;
    failed = 0;
    if (count > THREADS) count = THREADS;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 128 << 10);
    for (int at = 0; at < count; at++) {
        if (pthread_create(&thread[at], &attributes, with_a_stream, NULL)) return 997;
        if (!at_once) pthread_join(thread[at], NULL);
    }
    for (int at = 0; at_once && at < count; at++) pthread_join(thread[at], NULL);
    return failed;
}

struct ahead {
    int streams, count, most;
    uint64_t us;
    cu_status status;
};

static void *ahead(void *what) {
    struct ahead *ahead = what;
    static W stream[MOST], event[MOST];
    static char passed[MOST];
    cu_status (*query)(W) = find("cuEventQuery");
    cu_status status = CALL("cuCtxSetCurrent", context);
    int in_flight = 0;
    memset(passed, 0, sizeof passed);
    for (int at = 0; !status && at < ahead->streams; at++) status = CALL("cuStreamCreate", &stream[at], 1u);
    for (int at = 0; !status && at < ahead->count; at++) status = CALL("cuEventCreate", &event[at], 2u);
    for (int at = 0; !status && at < ahead->count; at++) {
        W on = stream[at % ahead->streams];
        status = work(on, ahead->us);
        if (!status) status = CALL("cuEventRecord", event[at], on);
        in_flight++;
        for (int before = 0; !status && before <= at; before++)
            if (!passed[before] && !query(event[before])) passed[before] = 1, in_flight--;
        if (in_flight > ahead->most) ahead->most = in_flight;
    }
    ahead->status = status;
    return NULL;
}

static struct ahead in_a_thread(int streams, int count, uint64_t us) {
    struct ahead what = {streams < MOST ? streams : MOST, count < MOST ? count : MOST, 0, us, 0};
    pthread_t thread;
    pthread_create(&thread, NULL, ahead, &what);
    pthread_join(thread, NULL);
    return what;
}

// Relaxed: other calls of this program are no violation.
static cu_status begin(W *stream) {
    cu_status status = CALL("cuStreamCreate", stream, 1u);
    if (!status) status = CALL("cuStreamBeginCapture_v2", *stream, 2u);
    return status ? status : work(*stream, 10);
}

static cu_status lost(void) {
    W stream = 0;
    cu_status status = begin(&stream);
    return status ? status : CALL("cuStreamDestroy_v2", stream);
}

static cu_status join(W from, W to) {
    W event = 0;
    cu_status status = CALL("cuEventCreate", &event, 2u);
    if (!status) status = CALL("cuEventRecord", event, from);
    return status ? status : CALL("cuStreamWaitEvent", to, event, 0u);
}

static cu_status forked(void) {
    W stream = 0, beside = 0, graph = 0, exec = 0;
    cu_status status = begin(&stream);
    if (!status) status = CALL("cuStreamCreate", &beside, 1u);
    if (!status) status = join(stream, beside);
    if (!status) status = work(beside, 10);
    if (!status) status = join(beside, stream);
    if (!status) status = CALL("cuStreamDestroy_v2", beside);
    if (!status) status = work(stream, 10);
    if (!status) status = CALL("cuStreamEndCapture", stream, &graph);
    if (!status) status = CALL("cuGraphInstantiateWithFlags", &exec, graph, (uint64_t)0);
    if (!status) status = CALL("cuGraphLaunch", exec, stream);
    if (!status) status = CALL("cuStreamSynchronize", stream);
    return status ? status : CALL("cuStreamDestroy_v2", stream);
}

static void error(cu_status *first, cu_status *second) {
    W stream = 0, beside = 0, graph = 0;
    *first = *second = begin(&stream);
    if (!*first) *first = CALL("cuStreamCreate", &beside, 1u);
    if (!*first) *first = join(stream, beside);
    if (!*first) *first = CALL("cuStreamEndCapture", beside, &graph);
    *second = CALL("cuStreamEndCapture", stream, &graph);
}

int main(void) {
    if (open_driver()) return 3;
    char line[4096], text[4096];
    while (fgets(line, sizeof line, stdin)) {
        char verb[16] = "";
        int a = 0, b = 0, c = 0;
        *text = 0;
        sscanf(line, "%15s %d %d %d", verb, &a, &b, &c);
        sscanf(line, "%*s %4095s", text);
        if (!strcmp(verb, "init")) {
            printf("%d\n", init(text));
        } else if (!strcmp(verb, "drop")) {
            printf("%d\n", drop(a));
        } else if (!strcmp(verb, "elsewhere") || !strcmp(verb, "shared")) {
            printf("%d\n", with_another(a, *verb == 's'));
        } else if (!strcmp(verb, "context")) {
            printf("%d\n", contexts(a));
        } else if (!strcmp(verb, "turns")) {
            printf("%d\n", turns(a, b, (uint64_t)c));
        } else if (!strcmp(verb, "threads") || !strcmp(verb, "one-by-one")) {
            printf("%d\n", threads(a, *verb == 't'));
        } else if (!strcmp(verb, "ahead")) {
            struct ahead found = in_a_thread(1, a, (uint64_t)b);
            printf("%d %d\n", found.status, found.most);
        } else if (!strcmp(verb, "spread")) {
            struct ahead found = in_a_thread(a, b, (uint64_t)c);
            printf("%d %d\n", found.status, found.most);
        } else if (!strcmp(verb, "alloc")) {
            W memory = 0;
            printf("%d\n", CALL("cuMemAlloc_v2", &memory, (size_t)a));
        } else if (!strcmp(verb, "sync")) {
            printf("%d\n", CALL("cuCtxSynchronize"));
        } else if (!strcmp(verb, "lost")) {
            printf("%d\n", lost());
        } else if (!strcmp(verb, "forked")) {
            printf("%d\n", forked());
        } else if (!strcmp(verb, "freed")) {
            W stream = 0;
            cu_status status = CALL("cuStreamCreate", &stream, 1u);
            if (!status) status = CALL("cuStreamDestroy_v2", stream);
            printf("%d\n", status ? status : work(stream, 10));
        } else if (!strcmp(verb, "error")) {
            cu_status first = 0, second = 0;
            error(&first, &second);
            printf("%d %d\n", first, second);
        } else {
            printf("what? %s", line);
        }
        fflush(stdout);
    }
    return 0;
}
