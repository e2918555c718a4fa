// Part of the kernel library of sublet, version 1. Compiled to PTX for compute_75 and later by
// scripts/kernels. The native host_kernels, with the same names and parameters, are in
// simgpu/src/kernels/loss.rs.

typedef unsigned int u32;
typedef unsigned long long u64;

#define THREADS 256

// For every row of logits: the cross-entropy with its label, whether the largest logit (the first
// of equal ones) is the label's, and the gradient of the batch's mean loss. dlogits may be null
// (forward only) or be logits. A label that is not below cols makes its row's loss and gradient
// NaN; cols == 0 traps. One thread per row, rows strided over the grid.
extern "C" __global__ void sublet_softmax_xent_f32(
    float *dlogits, float *row_loss, u32 *row_correct, const float *logits, const u32 *labels, u32 rows, u32 cols) {
    const float nan = __int_as_float(0x7fc00000);
    if (rows > 0 && cols == 0) __trap();
    float scale = 1.0f / (float)rows;
    for (u64 row = (u64)blockIdx.x * blockDim.x + threadIdx.x; row < rows; row += (u64)gridDim.x * blockDim.x) {
        const float *in = logits + row * cols;
        u32 label = labels[row];
        float top = in[0];
        u32 top_at = 0;
        for (u32 i = 1; i < cols; i++) {
            if (in[i] > top) {
                top = in[i];
                top_at = i;
            }
        }
        float sum = 0.0f;
        for (u32 i = 0; i < cols; i++) sum += expf(in[i] - top);
        row_loss[row] = label < cols ? logf(sum) - (in[label] - top) : nan;
        row_correct[row] = label < cols && top_at == label;
        if (!dlogits) continue;
        float *out = dlogits + row * cols;
        for (u32 i = 0; i < cols; i++) {
            float hot = i == label ? 1.0f : 0.0f;
            out[i] = label < cols ? (expf(in[i] - top) / sum - hot) * scale : nan;
        }
    }
}

// The mean of the rows' losses and the number of correct rows. One block of 256 threads; another
// shape traps.
extern "C" __global__ void __launch_bounds__(THREADS)
    sublet_xent_mean_f32(float *mean_loss, u32 *correct, const float *row_loss, const u32 *row_correct, u32 rows) {
    __shared__ float losses[THREADS];
    __shared__ u32 hits[THREADS];
    if (blockDim.x != THREADS || blockDim.y != 1 || blockDim.z != 1) __trap();
    if (gridDim.x != 1 || gridDim.y != 1 || gridDim.z != 1) __trap();
    u32 thread = threadIdx.x;
    float loss = 0.0f;
    u32 hit = 0;
    for (u64 i = thread; i < rows; i += THREADS) {
        loss += row_loss[i];
        hit += row_correct[i];
    }
    losses[thread] = loss;
    hits[thread] = hit;
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (thread < half) {
            losses[thread] += losses[thread + half];
            hits[thread] += hits[thread + half];
        }
    }
    if (thread == 0) {
        *mean_loss = losses[0] / (float)rows;
        *correct = hits[0];
    }
}
