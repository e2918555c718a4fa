// Part of the kernel library of sublet, version 1. Compiled to PTX for compute_75 and later by
// scripts/kernels. The native host_kernels, with the same names and parameters, are in
// simgpu/src/kernels/matmul.rs.

typedef unsigned int u32;
typedef unsigned long long u64;

#define TRANSPOSE_A 1u
#define TRANSPOSE_B 2u

// A block of 16 x 16 threads computes a tile of 64 x 64, every thread 4 x 4 of it, 16 steps of k at
// a time.
#define SIDE 16
#define TILE 64
#define DEPTH 16
#define PER_THREAD (TILE / SIDE)

// c = op(a) op(b) + beta c, row-major, op(a) is m x k and op(b) is k x n; beta == 0 does not read
// c. Blocks of 16 x 16 threads; another shape, or an unknown flag, traps. The grid strides over the
// tiles, so any grid computes the whole; ceil(n / 64) x ceil(m / 64) has one tile per block. Every
// sum runs over k in ascending order.
extern "C" __global__ void __launch_bounds__(SIDE *SIDE)
    sublet_matmul_f32(float *c, const float *a, const float *b, u32 m, u32 n, u32 k, u32 flags, float beta) {
    __shared__ float tile_a[DEPTH][TILE + 1];
    __shared__ float tile_b[DEPTH][TILE + 1];
    if (blockDim.x != SIDE || blockDim.y != SIDE || blockDim.z != 1) __trap();
    if (flags & ~(TRANSPOSE_A | TRANSPOSE_B)) __trap();

    u32 thread = threadIdx.y * SIDE + threadIdx.x;
    for (u64 row0 = (u64)blockIdx.y * TILE; row0 < m; row0 += (u64)gridDim.y * TILE) {
        for (u64 col0 = (u64)blockIdx.x * TILE; col0 < n; col0 += (u64)gridDim.x * TILE) {
            float sum[PER_THREAD][PER_THREAD] = {};
            for (u64 k0 = 0; k0 < k; k0 += DEPTH) {
                for (u32 i = thread; i < DEPTH * TILE; i += SIDE * SIDE) {
                    // Neighbouring threads read neighbouring addresses, whichever way the matrix
                    // lies.
                    u32 deep = flags & TRANSPOSE_A ? i / TILE : i % DEPTH;
                    u32 wide = flags & TRANSPOSE_A ? i % TILE : i / DEPTH;
                    u64 row = row0 + wide, step = k0 + deep;
                    float value = 0.0f;
                    if (row < m && step < k) value = flags & TRANSPOSE_A ? a[step * m + row] : a[row * k + step];
                    tile_a[deep][wide] = value;

                    deep = flags & TRANSPOSE_B ? i % DEPTH : i / TILE;
                    wide = flags & TRANSPOSE_B ? i / DEPTH : i % TILE;
                    u64 col = col0 + wide;
                    step = k0 + deep;
                    value = 0.0f;
                    if (col < n && step < k) value = flags & TRANSPOSE_B ? b[col * k + step] : b[step * n + col];
                    tile_b[deep][wide] = value;
                }
                __syncthreads();
#pragma unroll
                for (u32 step = 0; step < DEPTH; step++) {
#pragma unroll
                    for (u32 i = 0; i < PER_THREAD; i++) {
#pragma unroll
                        for (u32 j = 0; j < PER_THREAD; j++) {
                            sum[i][j] += tile_a[step][threadIdx.y + i * SIDE] * tile_b[step][threadIdx.x + j * SIDE];
                        }
                    }
                }
                __syncthreads();
            }
#pragma unroll
            for (u32 i = 0; i < PER_THREAD; i++) {
#pragma unroll
                for (u32 j = 0; j < PER_THREAD; j++) {
                    u64 row = row0 + threadIdx.y + i * SIDE, col = col0 + threadIdx.x + j * SIDE;
                    if (row < m && col < n) {
                        float *out = &c[row * n + col];
                        *out = beta == 0.0f ? sum[i][j] : sum[i][j] + beta * *out;
                    }
                }
            }
        }
    }
}
