// Part of the kernel library of sublet, version 1. Compiled to PTX for compute_75 and later by
// scripts/kernels. The native host_kernels, with the same names and parameters, are in
// simgpu/src/kernels/collective.rs.
//
// A collective operation as the libraries for it do them: each rank launches the kernel, and every
// one of the kernels spins until all of them have begun. Ranks are threads or processes, on one
// device or on several.

typedef unsigned int u32;
typedef unsigned long long u64;

// out[i] = the sum over all ranks of in[i], in the order of ranks; may be in place. One block;
// another grid traps.
//
// arrived (one word per rank, 0 at first) and parts (2 x ranks x n floats) are memory that all
// ranks see. Each word has one writer: the rank puts its numbers into its row of parts, then says
// so by round + 1 in its word. Rounds count up from 0, one per launch; two of them have rows of
// their own, so that a rank that is ahead does not overwrite what another one reads: it is ahead by
// one at most.
extern "C" __global__ void sublet_all_reduce_f32(float *out, const float *in, u32 *arrived, float *parts, u64 n, u32 rank, u32 ranks, u32 round) {
    if (gridDim.x != 1 || gridDim.y != 1 || gridDim.z != 1 || blockDim.y != 1 || blockDim.z != 1 || rank >= ranks) __trap();
    volatile u32 *words = arrived;
    volatile float *rows = parts + (u64)(round & 1) * ranks * n;
    for (u64 i = threadIdx.x; i < n; i += blockDim.x) rows[rank * n + i] = in[i];
    // Every thread's numbers are out before the first thread says so.
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        words[rank] = round + 1;
        for (u32 other = 0; other < ranks; other++)
            while ((int)(words[other] - (round + 1)) < 0) {}
        __threadfence_system();
    }
    __syncthreads();
    for (u64 i = threadIdx.x; i < n; i += blockDim.x) {
        float sum = 0.0f;
        for (u32 other = 0; other < ranks; other++) sum += rows[other * n + i];
        out[i] = sum;
    }
}
