// Layers of known content that say which memory they are, as stdin says, one command per line;
// answers one line each.
//
//   init PTX  cuInit, the first device, its primary context, the kernel  -> STATUS
//   make COUNT BYTES  so many layers, memory of their own each, filled  -> STATUS
//   declare  layer g is group g  -> ANSWER (of the last one)
//   add GROUP LAYER  a layer is of that group as well  -> ANSWER
//   clear  no groups  -> ANSWER
//   begin GROUP  sublet_pipeline_begin  -> ANSWER
//   layer G  the hash of layer G's content goes to its place in memory of no group, in a stream ->
//       STATUS
//   spinner PTX  the kernel that only takes time  -> STATUS
//   spin MS  a kernel that takes so long, in a stream  -> STATUS
//   set G VALUE  all words of layer G, by cuMemsetD32Async  -> STATUS
//   wait  for the stream  -> STATUS
//   hashes  what lies there, read by copying  -> STATUS HASH...
//   first G  the first word of layer G, by copying  -> STATUS WORD
//   free G  a layer's memory  -> STATUS
//   address G  -> ADDRESS
//   thread COMMAND  the rest in another thread; its answer comes when it comes, after "thread " ->
//       0
#define _GNU_SOURCE
#include "driver.h"
#include <pthread.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 64 };
static W layers[MOST], hashes, table, kernel, spinner, stream, context;
static size_t bytes;
static int count;

static int (*add)(unsigned, unsigned long long, unsigned long long);
static int (*begin)(unsigned);
static int (*clear)(void);

static cu_status make(int of, size_t each) {
    static unsigned words[1 << 18];
    unsigned long long entries[2 * MOST];
    bytes = each, count = of;
    cu_status status = CALL("cuStreamCreate", &stream, 1u);
    if (!status) status = CALL("cuMemAlloc_v2", &table, (size_t)4096);
    if (!status) status = CALL("cuMemAlloc_v2", &hashes, (size_t)4096);
    for (int at = 0; !status && at < count; at++) {
        status = CALL("cuMemAlloc_v2", &layers[at], bytes);
        entries[2 * at] = layers[at], entries[2 * at + 1] = bytes;
        for (size_t word = 0; word < sizeof words / 4; word++) words[word] = (unsigned)(word * 2654435761u + at * 40503u);
        for (size_t from = 0; !status && from < bytes; from += sizeof words) {
            size_t part = bytes - from < sizeof words ? bytes - from : sizeof words;
            status = CALL("cuMemcpyHtoD_v2", layers[at] + from, words, part);
        }
    }
    if (!status) status = CALL("cuMemcpyHtoD_v2", table, entries, 16 * (size_t)count);
    return status ? status : CALL("cuMemsetD8_v2", hashes, 0, (size_t)4096);
}

static cu_status hash_layer(int at) {
    unsigned long long one = 1;
    W to = hashes + 16 * at, from = table + 16 * at;
    void *parameters[] = {&to, &from, &one};
    return launch(kernel, 256, stream, parameters);
}

// Writes the answer to one command.
static void obey(const char *line, char *out, size_t size) {
    char verb[16] = "";
    unsigned long long first = 0, second = 0;
    sscanf(line, "%15s %llu %llu", verb, &first, &second);
    W of = layers[first < MOST ? first : 0];
    if (!strcmp(verb, "init")) {
        char path[512] = "";
        sscanf(line, "%*s %511s", path);
        cu_status status = use_device(0);
        if (!status) status = CALL("cuCtxGetCurrent", &context);
        if (!status) status = load_kernel(path, "sublet_hash_chunks", &kernel);
        add = dlsym(RTLD_DEFAULT, "sublet_pipeline_add");
        begin = dlsym(RTLD_DEFAULT, "sublet_pipeline_begin");
        clear = dlsym(RTLD_DEFAULT, "sublet_pipeline_clear");
        snprintf(out, size, "%d %d", status, add && begin && clear);
    } else if (!strcmp(verb, "spinner")) {
        char path[512] = "";
        sscanf(line, "%*s %511s", path);
        snprintf(out, size, "%d", load_kernel(path, "sublet_busy_us", &spinner));
    } else if (!strcmp(verb, "make")) {
        snprintf(out, size, "%d", make((int)first, second));
    } else if (!strcmp(verb, "declare")) {
        int answer = 0;
        for (int at = 0; at < count; at++) answer = add(at, layers[at], bytes);
        snprintf(out, size, "%d", answer);
    } else if (!strcmp(verb, "add")) {
        snprintf(out, size, "%d", add(first, layers[second], bytes));
    } else if (!strcmp(verb, "clear")) {
        snprintf(out, size, "%d", clear());
    } else if (!strcmp(verb, "begin")) {
        snprintf(out, size, "%d", begin(first));
    } else if (!strcmp(verb, "layer")) {
        snprintf(out, size, "%d", hash_layer(first));
    } else if (!strcmp(verb, "spin")) {
        unsigned long long us = first * 1000;
        void *parameters[] = {&us};
        snprintf(out, size, "%d", launch(spinner, 1, stream, parameters));
    } else if (!strcmp(verb, "set")) {
        snprintf(out, size, "%d", CALL("cuMemsetD32Async", of, (unsigned)second, bytes / 4, stream));
    } else if (!strcmp(verb, "wait")) {
        snprintf(out, size, "%d", CALL("cuStreamSynchronize", stream));
    } else if (!strcmp(verb, "hashes")) {
        unsigned long long found[2 * MOST];
        cu_status status = CALL("cuMemcpyDtoH_v2", found, hashes, 16 * (size_t)count);
        int length = snprintf(out, size, "%d", status);
        for (int at = 0; at < count; at++) length += snprintf(out + length, size - length, " %llx", found[2 * at] ^ found[2 * at + 1]);
    } else if (!strcmp(verb, "first")) {
        unsigned word = 0;
        cu_status status = CALL("cuMemcpyDtoH_v2", &word, of, (size_t)4);
        snprintf(out, size, "%d %u", status, word);
    } else if (!strcmp(verb, "free")) {
        snprintf(out, size, "%d", CALL("cuMemFree_v2", of));
    } else if (!strcmp(verb, "address")) {
        snprintf(out, size, "%llu", (unsigned long long)of);
    } else {
        snprintf(out, size, "what? %s", line);
    }
}

static void *another(void *line) {
    static char out[4096], row[4200];
    CALL("cuCtxSetCurrent", context);
    obey(line, out, sizeof out);
    // Not by stdio: at exit its buffers are flushed without their locks, and a line may be written
    // twice.
    int length = snprintf(row, sizeof row, "thread %s\n", out);
    if (write(1, row, (size_t)length) != length) abort();
    free(line);
    return NULL;
}

int main(void) {
    if (open_driver()) return 3;
    char line[1024], out[4096];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (!strncmp(line, "thread ", 7)) {
            pthread_t thread;
            snprintf(out, sizeof out, "%d", pthread_create(&thread, NULL, another, strdup(line + 7)));
            pthread_detach(thread);
        } else {
            obey(line, out, sizeof out);
        }
        puts(out);
        fflush(stdout);
    }
    return 0;
}
