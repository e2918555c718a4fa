// Part of the kernel library of sublet, version 1. Compiled to PTX for compute_75 and later by
// scripts/kernels. The native host_kernels, with the same names and parameters, are in
// simgpu/src/kernels/hash.rs.
//
// A 64-bit hash of the content of a buffer, equal to the bit to the host_kernel's. For finding
// unchanged memory, not for adversaries. Word i of a block (64 bits, little-endian, the last one
// padded with zeros) goes to thread i % 256, which absorbs its words in order; the slots are folded
// pairwise and the block's length is mixed in.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define THREADS 256
#define ABSORB 0x9E3779B97F4A7C15ull

__device__ static u64 absorb(u64 state, u64 word) {
    u64 product = (state ^ word) * ABSORB;
    return product << 29 | product >> 35;
}

// The final mixer of SplitMix64 (Steele, Lea, Flood 2014).
__device__ static u64 mix(u64 word) {
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ word >> 27) * 0x94D049BB133111EBull;
    return word ^ word >> 31;
}

// Folds the slots' states; thread 0 gets the result.
__device__ static u64 finish(u64 *slots, u64 state, u64 bytes) {
    u32 thread = threadIdx.x;
    __syncthreads();
    slots[thread] = state;
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (thread < half) slots[thread] = absorb(mix(slots[thread]), slots[thread + half]);
    }
    return thread == 0 ? mix(slots[0] ^ bytes * ABSORB) : 0;
}

// hashes[i] = the hash of the i-th block_bytes of data, the last one may be shorter. data is
// aligned to 8, block_bytes is a multiple of 8 (0 and others trap). Blocks of 256 threads; another
// shape traps. The grid strides over the blocks of data.
extern "C" __global__ void __launch_bounds__(THREADS)
    sublet_content_hash(u64 *hashes, const u8 *data, u64 bytes, u64 block_bytes) {
    __shared__ u64 slots[THREADS];
    if (blockDim.x != THREADS || blockDim.y != 1 || blockDim.z != 1) __trap();
    if (block_bytes == 0 || block_bytes % 8 != 0) __trap();
    u64 blocks = bytes / block_bytes + (bytes % block_bytes != 0);
    u32 thread = threadIdx.x;
    for (u64 block = blockIdx.x; block < blocks; block += gridDim.x) {
        const u8 *begin = data + block * block_bytes;
        u64 length = min(block_bytes, bytes - block * block_bytes);
        u64 words = length / 8;
        u64 state = mix(thread + 1);
#pragma unroll 4
        for (u64 i = thread; i < words; i += THREADS) state = absorb(state, ((const u64 *)begin)[i]);
        if (length % 8 != 0 && words % THREADS == thread) {
            u64 word = 0;
            for (u64 i = words * 8; i < length; i++) word |= (u64)begin[i] << 8 * (i - words * 8);
            state = absorb(state, word);
        }
        u64 hash = finish(slots, state, length);
        if (thread == 0) hashes[block] = hash;
    }
}

// One hash of count hashes. One block of 256 threads; another shape traps.
extern "C" __global__ void __launch_bounds__(THREADS) sublet_hash_fold(u64 *out, const u64 *hashes, u64 count) {
    __shared__ u64 slots[THREADS];
    if (blockDim.x != THREADS || blockDim.y != 1 || blockDim.z != 1) __trap();
    if (gridDim.x != 1 || gridDim.y != 1 || gridDim.z != 1) __trap();
    u64 state = mix(threadIdx.x + 1);
    for (u64 i = threadIdx.x; i < count; i += THREADS) state = absorb(state, hashes[i]);
    u64 hash = finish(slots, state, count * 8);
    if (threadIdx.x == 0) *out = hash;
}
