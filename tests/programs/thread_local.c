/* A library with as much thread-local data of the static kind as an allocator has (jemalloc). */
__thread char space[2000] __attribute__((tls_model("initial-exec")));

char *where(void) { return space; }
