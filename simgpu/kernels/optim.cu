// Part of the kernel library of sublet, version 1. Compiled to PTX for compute_75 and later by
// scripts/kernels. The native host_kernels, with the same names and parameters, are in
// simgpu/src/kernels/optim.rs.
//
// Parameter updates. Every kernel strides over its elements by the size of the grid.

typedef unsigned long long u64;

__device__ static u64 first() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ static u64 stride() { return (u64)gridDim.x * blockDim.x; }

// v = momentum * v + (g + weight_decay * w); w -= lr * v
extern "C" __global__ void sublet_sgd_f32(
    float *w, float *v, const float *g, float lr, float momentum, float weight_decay, u64 n) {
    for (u64 i = first(); i < n; i += stride()) {
        float velocity = momentum * v[i] + (g[i] + weight_decay * w[i]);
        v[i] = velocity;
        w[i] -= lr * velocity;
    }
}

// Adam with decoupled weight decay; correction1 = 1 - beta1^t and correction2 = 1 - beta2^t come
// from the caller.
extern "C" __global__ void sublet_adam_f32(
    float *w, float *m, float *v, const float *g, float lr, float beta1, float beta2, float eps, float weight_decay,
    float correction1, float correction2, u64 n) {
    for (u64 i = first(); i < n; i += stride()) {
        float grad = g[i];
        float first_moment = beta1 * m[i] + (1.0f - beta1) * grad;
        float second_moment = beta2 * v[i] + (1.0f - beta2) * grad * grad;
        m[i] = first_moment;
        v[i] = second_moment;
        float step = (first_moment / correction1) / (sqrtf(second_moment / correction2) + eps);
        w[i] -= lr * (step + weight_decay * w[i]);
    }
}
