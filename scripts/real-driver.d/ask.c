/* Asks a driver library what can be asked without a device, one line an answer; scripts/real-driver compares the lines.
 *
 *   ask names LIBRARY WAY             names on stdin: which of them a look-up finds (handle, version, default, program, next)
 *   ask resolver EXPORTS VERSION,...  base names on stdin: what cuGetProcAddress and _v2 answer, by version and flags
 *   ask calls LIBRARY INIT WHEN WITH  functions on stdin, each called in a child of its own, before or after INIT (WHEN),
 *                                     with zeros or with buffers (WITH)
 *   ask tables FILE                   which 16 bytes of FILE the driver knows as the id of a table, and what is in it */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { NAME = 160, ARGUMENTS = 12, WORDS = 512, SECONDS = 5, SHOWN = 12 };
#define DRIVER "libcuda.so.1"
#define UNTOUCHED ((void *)0x1234)

static char line[NAME];

static int next_name(FILE *from) {
    if (!fgets(line, sizeof line, from))
        return 0;
    line[strcspn(line, "\n")] = 0;
    return 1;
}

static void *open_library(const char *name, int flags) {
    void *handle = dlopen(name, flags);
    if (!handle) {
        fprintf(stderr, "%s\n", dlerror());
        exit(3);
    }
    return handle;
}

/* ------------------------------------------------------------------------------------------------ */

static int names(const char *library, const char *way) {
    int wide = !strcmp(way, "default") || !strcmp(way, "program");
    void *handle = NULL;
    if (!strcmp(way, "next"))
        handle = RTLD_NEXT;
    else if (strcmp(library, "-"))
        handle = open_library(library, RTLD_NOW | (wide ? RTLD_GLOBAL : 0));
    /* The preload library sees no dlopen; from the first look-up on it knows that the driver is wanted. */
    if (wide && handle)
        dlsym(handle, "cuInit");
    if (!strcmp(way, "program"))
        handle = dlopen(NULL, RTLD_LAZY);
    if (!strcmp(way, "default"))
        handle = RTLD_DEFAULT;
    while (next_name(stdin)) {
        void *at = !strcmp(way, "version") ? dlvsym(handle, line, library) : dlsym(handle, line);
        printf("%s %s\n", line, at ? "found" : "null");
    }
    return 0;
}

/* ------------------------------------------------------------------------------------------------ */

struct export {
    void *at;
    char name[NAME];
};
static struct export exports[4096];
static size_t exported;

static const char *name_of(void *at) {
    if (at == UNTOUCHED)
        return "untouched";
    if (!at)
        return "null";
    for (size_t n = 0; n < exported; n++)
        if (exports[n].at == at)
            return exports[n].name;
    return "other";
}

static int resolver(const char *file, char *versions) {
    typedef int (*first)(const char *, void **, int, uint64_t);
    typedef int (*second)(const char *, void **, int, uint64_t, int *);
    void *handle = open_library(DRIVER, RTLD_NOW);
    FILE *list = fopen(file, "r");
    while (list && next_name(list) && exported < sizeof exports / sizeof *exports) {
        exports[exported].at = dlsym(handle, line);
        snprintf(exports[exported++].name, NAME, "%s", line);
    }
    if (list)
        fclose(list);
    first by_first = (first)dlsym(handle, "cuGetProcAddress");
    second by_second = (second)dlsym(handle, "cuGetProcAddress_v2");
    if (!by_first || !by_second)
        return 3;
    int wanted[64], count = 0;
    for (char *word = strtok(versions, ","); word && count < 64; word = strtok(NULL, ","))
        wanted[count++] = atoi(word);
    while (next_name(stdin))
        for (int n = 0; n < count; n++)
            for (uint64_t flags = 0; flags < 3; flags++) {
                void *a = UNTOUCHED, *b = UNTOUCHED;
                int status = -7;
                int v1 = by_first(line, &a, wanted[n], flags);
                int v2 = by_second(line, &b, wanted[n], flags, &status);
                printf("%s %d %d|%d %s|%d %d %s\n", line, wanted[n], (int)flags, v1, name_of(a), v2, status, name_of(b));
            }
    /* Flags that no version of the interface has. */
    for (uint64_t flags = 3; flags < 1u << 20; flags = flags * 3 + 1) {
        void *a = UNTOUCHED, *b = UNTOUCHED;
        int status = -7;
        int v1 = by_first("cuInit", &a, 12000, flags);
        int v2 = by_second("cuInit", &b, 12000, flags, &status);
        printf("cuInit 12000 %d|%d %s|%d %d %s\n", (int)flags, v1, name_of(a), v2, status, name_of(b));
    }
    void *a = UNTOUCHED;
    int v2 = by_second("cuInit", &a, 12000, 0, NULL);
    printf("cuInit 12000 without-status|%d %s\n", v2, name_of(a));
    return 0;
}

/* ------------------------------------------------------------------------------------------------ */

typedef long (*any)(uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t,
                    uintptr_t, uintptr_t, uintptr_t);
static uint64_t buffers[ARGUMENTS][WORDS];

/* What a call has left in its buffers: small words as they are; others are addresses, which differ from run to run. */
static void show_buffers(int to) {
    int shown = 0;
    for (int n = 0; n < ARGUMENTS; n++)
        for (int at = 0; at < WORDS; at++) {
            uint64_t word = buffers[n][at];
            if (!word || ++shown > SHOWN)
                continue;
            if (word < UINT32_MAX)
                dprintf(to, " %d+%d=%lx", n, at * 8, (unsigned long)word);
            else
                dprintf(to, " %d+%d=large", n, at * 8);
        }
}

static void child(const char *library, const char *init, int after, int with_buffers, int to) {
    int silent = open("/dev/null", O_RDWR);
    dup2(silent, 0);
    dup2(silent, 1);
    dup2(silent, 2);
    alarm(SECONDS);
    void *handle = open_library(library, RTLD_NOW);
    if (after) {
        int (*call)(unsigned) = (int (*)(unsigned))dlsym(handle, init);
        if (call)
            call(0);
    }
    any function = (any)dlsym(handle, line);
    if (!function) {
        dprintf(to, "absent");
        _exit(0);
    }
    uintptr_t a[ARGUMENTS] = {0};
    for (int n = 0; with_buffers && n < ARGUMENTS; n++)
        a[n] = (uintptr_t)buffers[n];
    long result = function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
    dprintf(to, "%d", (int)result);
    show_buffers(to);
    _exit(0);
}

static int calls(const char *library, const char *init, const char *when, const char *with) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    while (next_name(stdin)) {
        int ends[2];
        if (pipe2(ends, O_CLOEXEC))
            return 4;
        pid_t pid = fork();
        if (pid == 0)
            child(library, init, !strcmp(when, "after"), !strcmp(with, "buffers"), ends[1]);
        close(ends[1]);
        char said[2048];
        size_t got = 0;
        ssize_t n;
        /* Children of the child may keep the pipe: what counts is there when the child has ended. */
        int status = 0;
        waitpid(pid, &status, 0);
        fcntl(ends[0], F_SETFL, O_NONBLOCK);
        while (got < sizeof said - 1 && (n = read(ends[0], said + got, sizeof said - 1 - got)) > 0)
            got += (size_t)n;
        said[got] = 0;
        close(ends[0]);
        if (WIFSIGNALED(status))
            printf("%s signal %d\n", line, WTERMSIG(status));
        else if (!got)
            printf("%s exit %d\n", line, WEXITSTATUS(status));
        else
            printf("%s %s\n", line, said);
    }
    return 0;
}

/* ------------------------------------------------------------------------------------------------ */

static int tables(const char *path) {
    typedef int (*get)(const void **, const void *);
    get table_of = (get)dlsym(open_library(DRIVER, RTLD_NOW), "cuGetExportTable");
    int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat stat;
    if (!table_of || file < 0 || fstat(file, &stat))
        return 3;
    const unsigned char *bytes = mmap(NULL, (size_t)stat.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    if (bytes == MAP_FAILED)
        return 3;
    for (off_t at = 0; at + 16 <= stat.st_size; at++) {
        unsigned char id[16];
        const void *table = NULL;
        memcpy(id, bytes + at, sizeof id);
        int status = table_of(&table, id);
        if (status || !table)
            continue;
        for (int n = 0; n < 16; n++)
            printf("%02x", id[n]);
        /* Most begin with their size in bytes. An entry is shown by its place in the file that it lies in. */
        const uint64_t *words = table;
        uint64_t size = words[0] >= 16 && words[0] <= 8192 && words[0] % 8 == 0 ? words[0] : 8;
        printf(" %lu", (unsigned long)size);
        for (uint64_t n = 1; n < size / 8; n++) {
            Dl_info info;
            if (words[n] > 4096 && dladdr((void *)words[n], &info) && info.dli_fname) {
                /* The file, whatever link led to it. */
                char file[4096];
                const char *path = realpath(info.dli_fname, file) ? file : info.dli_fname, *name = strrchr(path, '/');
                printf(" %s+%lx", name ? name + 1 : path, (unsigned long)(words[n] - (uint64_t)info.dli_fbase));
            } else if (words[n] < UINT32_MAX) {
                printf(" %lx", (unsigned long)words[n]);
            } else {
                printf(" large");
            }
        }
        printf("\n");
    }
    return 0;
}

int main(int count, char **words) {
    if (count == 4 && !strcmp(words[1], "names"))
        return names(words[2], words[3]);
    if (count == 4 && !strcmp(words[1], "resolver"))
        return resolver(words[2], words[3]);
    if (count == 6 && !strcmp(words[1], "calls"))
        return calls(words[2], words[3], words[4], words[5]);
    if (count == 3 && !strcmp(words[1], "tables"))
        return tables(words[2]);
    fprintf(stderr, "ask: wrong use\n");
    return 125;
}
