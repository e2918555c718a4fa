// Objects with static storage that free device memory when they go, as frameworks' caches do.
#include "host.h"
struct Holder {
    uint64_t memory = 0;
    const char *name;
    explicit Holder(const char *name) : name(name) {}
    void fill() { printf("%s alloc %d\n", name, cu("cuMemAlloc_v2", (uintptr_t)&memory, 4096, 0, 0)); }
    ~Holder() {
        printf("%s free %d\n", name, cu("cuMemFree_v2", memory, 0, 0, 0));
        fflush(stdout);
    }
};
static Holder early("early");
static Holder &made_late_on() {
    static Holder holder("late");
    return holder;
}
int main() {
    printf("init %d\n", init_driver());
    early.fill();
    made_late_on().fill();
    return 3;
}
