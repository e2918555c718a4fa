// Catches exceptions that the driver throws through every shape of entry, and cancels a thread that
// waits in one.
#include <pthread.h>
#include <stdexcept>
#include "host.h"
template <class F> static void expect(const char *name, F call) {
    try {
        call();
        printf("%s returned\n", name);
    } catch (const std::exception &error) {
        printf("%s threw %s\n", name, error.what());
    } catch (int value) {
        printf("%s threw int %d\n", name, value);
    } catch (long value) {
        printf("%s threw long %ld\n", name, value);
    }
    fflush(stdout);
}
static void *waiter(void *) {
    cu("cuEventSynchronize", 0, 0, 0, 0);
    return nullptr;
}
int main() {
    printf("init %d\n", cu("cuInit", 0, 0, 0, 0));
    expect("observed", [] { cu("cuCtxSynchronize", 0, 0, 0, 0); });
    expect("observed stream", [] { cu("cuStreamSynchronize", 0, 0, 0, 0); });
    expect("context", [] { cu("cuCtxSetCurrent", 0, 0, 0, 0); });
    expect("gated", [] {
        using Launch = int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
        auto launch = reinterpret_cast<Launch>(fn("cuLaunchKernel"));
        launch(nullptr, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr);
    });
    expect("forwarded", [] { cu("cuEventElapsedTime", 0, 0, 0, 0); });
    expect("tracked", [] { cu("cuModuleLoadData", 0, 0, 0, 0); });
    pthread_t thread;
    void *result = nullptr;
    pthread_create(&thread, nullptr, waiter, nullptr);
    usleep(50000);
    pthread_cancel(thread);
    pthread_join(thread, &result);
    printf("cancelled %d\n", result == PTHREAD_CANCELED);
    return 0;
}
