// Calls driver functions as stdin says, one line per call, and answers one line per call on stdout.
//
//   call SYMBOL KINDS  KINDS has a letter per argument: p pointer to a page, h 32-bit, w 64-bit, v
//       a value, 0 zero
//     -> returned STATUS a0 .. a15 (what was passed, hexadecimal)
//   value HEX                  what the letter v stands for
//     -> noted
//   peek ARGUMENT              the first word of that page
//     -> VALUE
//   resolve HOW BASE VERSION FLAGS SYMBOL     HOW is cuGetProcAddress or cuGetProcAddress_v2
//     -> ours | theirs | other NAME | status N
//   lookup HOW SYMBOL          HOW is soname, path, default, next, versioned
//     -> ours | theirs | other | null
#define _GNU_SOURCE
#include "cuda_min.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef cu_word W;
typedef int (*function)(W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W);
enum { PAGE = 8192, WORDS = 16 };

static W pages[WORDS][PAGE / sizeof(W)];
static W value;

static const char *owner(void *at, void *ours, void *theirs) {
    Dl_info info, mine, real;
    if (!at) return "null";
    if (!dladdr(at, &info) || !dladdr(ours, &mine) || !dladdr(theirs, &real)) return "other";
    if (info.dli_fbase == mine.dli_fbase) return "ours";
    if (info.dli_fbase == real.dli_fbase) return "theirs";
    return "other";
}

int main(void) {
    void *preload = dlopen("libcuda.so.1", RTLD_NOW);
    void *mark = preload ? dlsym(preload, "sublet_version") : NULL;
    if (!mark) {
        fprintf(stderr, "libcuda.so.1 is not the preload library: %s\n", dlerror());
        return 2;
    }
    const char *path = getenv("SUBLET_DRIVER");
    void *driver = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    // Not of the table: passes the filter of the preload library's dlsym.
    void *theirs = driver ? dlsym(driver, "recording_driver") : NULL;
    if (!theirs) {
        fprintf(stderr, "%s is not the recording driver\n", path);
        return 2;
    }
    static char line[512];
    while (fgets(line, sizeof line, stdin)) {
        char verb[16] = "", symbol[128] = "", kinds[64] = "", base[128] = "";
        sscanf(line, "%15s", verb);
        if (!strcmp(verb, "call")) {
            sscanf(line, "%*s %127s %63s", symbol, kinds);
            function called = (function)dlsym(preload, symbol);
            if (!called) {
                printf("missing %s\n", symbol);
                fflush(stdout);
                continue;
            }
            W a[WORDS];
            for (int at = 0; at < WORDS; at++) {
                W tag = 0x5ab1000000000000u + ((W)(at + 1) << 40) + 0x1357u * (at + 1);
                char kind = at < (int)strlen(kinds) ? kinds[at] : 'w';
                if (kind == 'p') {
                    // Ones: one element, one byte, the first device, where a hook looks into a
                    // structure.
                    for (size_t word = 0; word < PAGE / sizeof(W); word++) pages[at][word] = 1;
                    a[at] = (W)pages[at];
                } else if (kind == 'h') {
                    a[at] = 0x01570000u + 0x111u * (at + 1);
                } else if (kind == '0') {
                    a[at] = 0;
                } else if (kind == 'v') {
                    a[at] = value;
                } else {
                    a[at] = tag;
                }
            }
            int status = called(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15]);
            printf("returned %u", (unsigned)status);
            for (int at = 0; at < WORDS; at++) printf(" %llx", (unsigned long long)a[at]);
            printf("\n");
        } else if (!strcmp(verb, "value")) {
            unsigned long long hex = 0;
            sscanf(line, "%*s %llx", &hex);
            value = hex;
            printf("noted\n");
        } else if (!strcmp(verb, "peek")) {
            int at = 0;
            sscanf(line, "%*s %d", &at);
            printf("%llx\n", (unsigned long long)pages[at][0]);
        } else if (!strcmp(verb, "resolve")) {
            char how[64];
            int version;
            unsigned long long flags;
            sscanf(line, "%*s %63s %127s %d %llu %127s", how, base, &version, &flags, symbol);
            void *answer = NULL;
            int found = -1;
            void *ask = dlsym(preload, how);
            int status = !strcmp(how, "cuGetProcAddress")
                             ? ((int (*)(const char *, void **, int, W))ask)(base, &answer, version, flags)
                             : ((int (*)(const char *, void **, int, W, int *))ask)(base, &answer, version, flags, &found);
            if (status != 0)
                printf("status %d\n", status);
            else if (answer == dlsym(preload, symbol))
                printf("ours\n");
            else {
                Dl_info info;
                int known = dladdr(answer, &info) && info.dli_sname;
                printf("%s %s\n", owner(answer, mark, theirs), known ? info.dli_sname : "?");
            }
        } else if (!strcmp(verb, "lookup")) {
            char how[64];
            sscanf(line, "%*s %63s %127s", how, symbol);
            void *at = NULL;
            if (!strcmp(how, "soname")) at = dlsym(preload, symbol);
            if (!strcmp(how, "path")) at = dlsym(driver, symbol);
            if (!strcmp(how, "default")) at = dlsym(RTLD_DEFAULT, symbol);
            if (!strcmp(how, "next")) at = dlsym(RTLD_NEXT, symbol);
            if (!strcmp(how, "versioned")) at = dlvsym(driver, symbol, "NONE_SUCH");
            printf("%s\n", owner(at, mark, theirs));
        } else {
            printf("what? %s", line);
        }
        fflush(stdout);
    }
    return 0;
}
