"""A short CuPy program: products, reductions, a kernel compiled at run time, streams, and more memory than there may be.

Prints one JSON object. Run bare and governed, `result` must be the same.
"""

import hashlib
import json
import sys

import cupy


def main():
    most_bytes = int(sys.argv[1])
    random = cupy.random.RandomState(3)
    a = random.rand(1024, 1024, dtype=cupy.float32)
    b = random.rand(1024, 1024, dtype=cupy.float32)
    product = a @ b
    twice = cupy.RawKernel(
        'extern "C" __global__ void twice(float *x, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) x[i] *= 2.0f; }',
        "twice",
    )
    with cupy.cuda.Stream() as stream:
        twice((product.size // 256,), (256,), (product, cupy.int32(product.size)))
        stream.synchronize()
    order = cupy.sort(product.ravel())
    digest = hashlib.sha256(cupy.asnumpy(order).tobytes()).hexdigest()
    free_bytes, total_bytes = cupy.cuda.Device().mem_info
    held, oom = [], None
    try:
        while len(held) * (256 << 20) < most_bytes:
            held.append(cupy.empty(256 << 20, dtype=cupy.uint8))
    except cupy.cuda.memory.OutOfMemoryError as error:
        oom = str(error)
    taken = len(held) * (256 << 20)
    held.clear()
    cupy.get_default_memory_pool().free_all_blocks()
    works = float(cupy.arange(1000, dtype=cupy.float64).sum()) == 499500.0
    print(json.dumps({"version": cupy.__version__, "result": digest, "free_bytes": free_bytes, "total_bytes": total_bytes,
                      "taken_bytes": taken, "oom": oom, "works_after": works}))


main()
