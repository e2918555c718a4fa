// Runs one launch of a CUDA source of this folder on the CPU: every thread of a block is a thread
// here, blocks run one after the other. A test of the host_kernels builds it
// (simgpu/src/kernels/tests/source.rs) and compares; no GPU is needed.
//
// stdin: the request below, then the memory it is about. stdout: the memory afterwards. A __trap()
// aborts.

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <vector>

struct Dim {
    unsigned x, y, z;
};
static thread_local Dim threadIdx, blockIdx;
static Dim blockDim, gridDim;
static std::barrier<> *block_barrier;

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(threads)
#define __trap() abort()
#define __syncthreads() block_barrier->arrive_and_wait()
#define __threadfence_system() std::atomic_thread_fence(std::memory_order_seq_cst)

static float __int_as_float(int bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
using std::min;

namespace elementwise {
#include "elementwise.cu"
}
namespace matmul {
#include "matmul.cu"
}
namespace loss {
#include "loss.cu"
}
#undef THREADS
namespace reduce {
#include "reduce.cu"
}
namespace optim {
#include "optim.cu"
}
#undef THREADS
namespace hash {
#include "hash.cu"
}
namespace chunks {
#include "chunks.cu"
}
namespace collective {
#include "collective.cu"
}

struct Request {
    char name[64];
    uint32_t grid[3], block[3];
    uint64_t args[12];
    uint64_t base, bytes;
};

// A parameter is the first bytes of its 64 bits, as in the driver's kernelParams.
template <class T> static T parameter(const uint64_t *&args) {
    T value;
    memcpy(&value, args++, sizeof value);
    return value;
}

template <class... T> static std::function<void(const uint64_t *)> entry(void (*kernel)(T...)) {
    // Braces evaluate from left to right.
    struct Call {
        Call(void (*kernel)(T...), T... values) { kernel(values...); }
    };
    return [kernel](const uint64_t *args) { Call{kernel, parameter<T>(args)...}; };
}

static const std::map<std::string, std::function<void(const uint64_t *)>> entries = {
    {"sublet_fill_f32", entry(elementwise::sublet_fill_f32)},
    {"sublet_axpy_f32", entry(elementwise::sublet_axpy_f32)},
    {"sublet_bias_act_f32", entry(elementwise::sublet_bias_act_f32)},
    {"sublet_bias_act_grad_f32", entry(elementwise::sublet_bias_act_grad_f32)},
    {"sublet_gather_rows_b32", entry(elementwise::sublet_gather_rows_b32)},
    {"sublet_matmul_f32", entry(matmul::sublet_matmul_f32)},
    {"sublet_softmax_xent_f32", entry(loss::sublet_softmax_xent_f32)},
    {"sublet_xent_mean_f32", entry(loss::sublet_xent_mean_f32)},
    {"sublet_reduce_sum_f32", entry(reduce::sublet_reduce_sum_f32)},
    {"sublet_bias_grad_f32", entry(reduce::sublet_bias_grad_f32)},
    {"sublet_sgd_f32", entry(optim::sublet_sgd_f32)},
    {"sublet_adam_f32", entry(optim::sublet_adam_f32)},
    {"sublet_content_hash", entry(hash::sublet_content_hash)},
    {"sublet_hash_fold", entry(hash::sublet_hash_fold)},
    {"sublet_hash_chunks", entry(chunks::sublet_hash_chunks)},
    {"sublet_all_reduce_f32", entry(collective::sublet_all_reduce_f32)},
};

int main() {
    Request request;
    if (fread(&request, sizeof request, 1, stdin) != 1) return 3;
    void *base = reinterpret_cast<void *>(request.base);
    void *memory = mmap(base, request.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (memory != base || fread(memory, request.bytes, 1, stdin) != 1) return 4;
    auto found = entries.find(request.name);
    if (found == entries.end()) return 5;
    gridDim = {request.grid[0], request.grid[1], request.grid[2]};
    blockDim = {request.block[0], request.block[1], request.block[2]};
    for (unsigned z = 0; z < gridDim.z; z++)
        for (unsigned y = 0; y < gridDim.y; y++)
            for (unsigned x = 0; x < gridDim.x; x++) {
                unsigned count = blockDim.x * blockDim.y * blockDim.z;
                std::barrier<> barrier(count);
                block_barrier = &barrier;
                std::vector<std::thread> threads;
                for (unsigned thread = 0; thread < count; thread++)
                    threads.emplace_back([=, &request] {
                        blockIdx = {x, y, z};
                        threadIdx = {thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y};
                        found->second(request.args);
                    });
                for (auto &thread : threads) thread.join();
            }
    return fwrite(memory, request.bytes, 1, stdout) == 1 ? 0 : 6;
}
