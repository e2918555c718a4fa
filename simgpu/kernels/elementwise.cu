// Part of the kernel library of sublet, version 1. Compiled to PTX for compute_75 and later by
// scripts/kernels. The native host_kernels, with the same names and parameters, are in
// simgpu/src/kernels/elementwise.rs.
//
// One output element from a few inputs. Every kernel strides over its elements by the size of the
// grid, so any one-dimensional launch computes the whole.

typedef unsigned int u32;
typedef unsigned long long u64;

#define ACT_NONE 0
#define ACT_RELU 1

__device__ static u64 first() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ static u64 stride() { return (u64)gridDim.x * blockDim.x; }

// out[i] = value
extern "C" __global__ void sublet_fill_f32(float *out, float value, u64 n) {
    for (u64 i = first(); i < n; i += stride()) out[i] = value;
}

// y[i] += alpha * x[i]
extern "C" __global__ void sublet_axpy_f32(float *y, const float *x, float alpha, u64 n) {
    for (u64 i = first(); i < n; i += stride()) y[i] += alpha * x[i];
}

// out[r][c] = act(x[r][c] + bias[c]); out may be x. An unknown act traps.
extern "C" __global__ void sublet_bias_act_f32(float *out, const float *x, const float *bias, u32 rows, u32 cols, u32 act) {
    if (act > ACT_RELU) __trap();
    u64 n = (u64)rows * cols;
    for (u64 i = first(); i < n; i += stride()) {
        float sum = x[i] + bias[i % cols];
        out[i] = act == ACT_RELU ? fmaxf(sum, 0.0f) : sum;
    }
}

// dx[i] = dy[i] * act'(y[i]) from the activation's output y; dx may be dy. An unknown act traps.
extern "C" __global__ void sublet_bias_act_grad_f32(float *dx, const float *dy, const float *y, u32 rows, u32 cols, u32 act) {
    if (act > ACT_RELU) __trap();
    u64 n = (u64)rows * cols;
    for (u64 i = first(); i < n; i += stride()) {
        dx[i] = act == ACT_NONE || y[i] > 0.0f ? dy[i] : 0.0f;
    }
}

// out[r][c] = x[index[r]][c] for elements of 32 bits; an index that is not below source_rows gives
// zeros.
extern "C" __global__ void sublet_gather_rows_b32(u32 *out, const u32 *x, const u32 *index, u32 rows, u32 cols, u32 source_rows) {
    u64 n = (u64)rows * cols;
    for (u64 i = first(); i < n; i += stride()) {
        u32 row = index[i / cols];
        out[i] = row < source_rows ? x[(u64)row * cols + i % cols] : 0;
    }
}
