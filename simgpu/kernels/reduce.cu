// Part of the kernel library of sublet, version 1. Compiled to PTX for compute_75 and later by
// scripts/kernels. The native host_kernels, with the same names and parameters, are in
// simgpu/src/kernels/reduce.rs.
//
// Sums in a fixed order, without atomics: the same arguments and grid give the same bits.

typedef unsigned int u32;
typedef unsigned long long u64;

#define THREADS 256

// sums[b] = the sum of the b-th of gridDim.x equal chunks of x. Blocks of 256 threads, a
// one-dimensional grid; another shape traps. A second launch over the sums with a grid of one gives
// the whole.
extern "C" __global__ void __launch_bounds__(THREADS) sublet_reduce_sum_f32(float *sums, const float *x, u64 n) {
    __shared__ float slots[THREADS];
    if (blockDim.x != THREADS || blockDim.y != 1 || blockDim.z != 1) __trap();
    if (gridDim.y != 1 || gridDim.z != 1) __trap();
    u64 chunk = n / gridDim.x + (n % gridDim.x != 0);
    u64 begin = min(n, chunk * blockIdx.x), end = min(n, begin + chunk);
    u32 thread = threadIdx.x;
    float sum = 0.0f;
    for (u64 i = begin + thread; i < end; i += THREADS) sum += x[i];
    slots[thread] = sum;
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (thread < half) slots[thread] += slots[thread + half];
    }
    if (thread == 0) sums[blockIdx.x] = slots[0];
}

// db[c] = sum over r of dy[r][c], rows in ascending order. One thread per column, columns strided
// over the grid.
extern "C" __global__ void sublet_bias_grad_f32(float *db, const float *dy, u32 rows, u32 cols) {
    for (u64 col = (u64)blockIdx.x * blockDim.x + threadIdx.x; col < cols; col += (u64)gridDim.x * blockDim.x) {
        float sum = 0.0f;
        for (u32 row = 0; row < rows; row++) sum += dy[(u64)row * cols + col];
        db[col] = sum;
    }
}
