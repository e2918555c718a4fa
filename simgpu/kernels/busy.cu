// Part of the kernel library of sublet, version 1. Compiled to PTX for compute_75 and later by
// scripts/kernels. The native host_kernels, with the same names and parameters, are in
// simgpu/src/kernels/elementwise.rs.

typedef unsigned long long u64;

// Every thread spins until the device's clock has moved on by us microseconds. A grid that fits on
// the device at once takes that long; a larger one takes that long per wave of blocks.
extern "C" __global__ void sublet_busy_us(u64 us) {
    u64 start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < us * 1000);
}

// A number of dependent steps in each thread, x = x / 2 + 1 from 0 on; out[0] has what it comes to.
// How long that takes is the device's affair: unlike a kernel that looks at the clock this one gets
// on only while it runs, which tells what a tenant really had.
extern "C" __global__ void sublet_busy_steps(float *out, u64 steps) {
    float x = 0.0f;
    for (u64 step = 0; step < steps; step++) x = x * 0.5f + 1.0f;
    if (blockIdx.x == 0 && threadIdx.x == 0) out[0] = x;
}
