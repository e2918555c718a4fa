// Part of the kernel library of sublet, version 1. Compiled to PTX for compute_75 and later by
// scripts/kernels. The native host_kernel, with the same name and parameters, is in
// simgpu/src/kernels/chunks.rs.
//
// A 128-bit hash of the content of each of many ranges, equal to the bit to the host_kernel's: two
// states per thread absorb the same words by other multipliers and rotations. For finding unchanged
// memory, not for adversaries. How likely two contents are to have one hash is said in the
// host_kernel.

typedef unsigned int u32;
typedef unsigned long long u64;

#define THREADS 256
#define FIRST 0x9E3779B97F4A7C15ull
#define SECOND 0xC2B2AE3D27D4EB4Full

__device__ static u64 first(u64 state, u64 word) {
    u64 product = (state ^ word) * FIRST;
    return product << 29 | product >> 35;
}

__device__ static u64 second(u64 state, u64 word) {
    u64 product = (state ^ word) * SECOND;
    return product << 37 | product >> 27;
}

// The final mixer of SplitMix64 (Steele, Lea, Flood 2014).
__device__ static u64 mix(u64 word) {
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ word >> 27) * 0x94D049BB133111EBull;
    return word ^ word >> 31;
}

// hashes[2 i], hashes[2 i + 1] = the hash of the chunks[2 i + 1] bytes at address chunks[2 i]; both
// are multiples of 8, others trap. Blocks of 256 threads; another shape traps. The grid strides
// over the chunks: chunks of 1 MiB, a few times as many as the device has multiprocessors, keep all
// of them at it.
extern "C" __global__ void __launch_bounds__(THREADS) sublet_hash_chunks(u64 *hashes, const u64 *chunks, u64 count) {
    __shared__ u64 slots[2 * THREADS];
    if (blockDim.x != THREADS || blockDim.y != 1 || blockDim.z != 1) __trap();
    u32 thread = threadIdx.x;
    for (u64 chunk = blockIdx.x; chunk < count; chunk += gridDim.x) {
        const u64 *data = (const u64 *)chunks[2 * chunk];
        u64 bytes = chunks[2 * chunk + 1];
        if (((u64)data | bytes) % 8 != 0) __trap();
        u64 words = bytes / 8;
        u64 a = mix(thread + 1), b = mix(~(u64)thread);
#pragma unroll 4
        for (u64 i = thread; i < words; i += THREADS) {
            u64 word = data[i];
            a = first(a, word);
            b = second(b, word);
        }
        __syncthreads();
        slots[thread] = a;
        slots[THREADS + thread] = b;
        for (u32 half = THREADS / 2; half > 0; half /= 2) {
            __syncthreads();
            if (thread < half) {
                slots[thread] = first(mix(slots[thread]), slots[thread + half]);
                slots[THREADS + thread] = second(mix(slots[THREADS + thread]), slots[THREADS + thread + half]);
            }
        }
        if (thread == 0) {
            hashes[2 * chunk] = mix(slots[0] ^ bytes * FIRST);
            hashes[2 * chunk + 1] = mix(slots[THREADS] ^ bytes * SECOND);
        }
    }
}
