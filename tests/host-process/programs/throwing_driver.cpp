// A driver that ends some of its calls by a C++ exception or by cancelling the thread, to see it
// pass through frames of ours.
#include <pthread.h>
#include <unistd.h>
#include <stdexcept>
extern "C" {
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuCtxSynchronize() { throw std::runtime_error("synchronize"); }
int cuStreamSynchronize(void *) { throw 17; }
int cuCtxSetCurrent(void *) { throw std::runtime_error("set current"); }
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **) { throw 23L; }
int cuEventElapsedTime(float *, void *, void *) { throw std::logic_error("elapsed"); }
int cuModuleLoadData(void **, const void *) { throw std::runtime_error("load"); }
int cuEventSynchronize(void *) {
    for (;;)
        pause();
}
}
