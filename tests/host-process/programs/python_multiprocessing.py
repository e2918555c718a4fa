"""Workers of multiprocessing, by the start method that is named: they use the driver, or never touch it.

The parent has used the driver before. A forked worker cannot use CUDA and gets an error; a spawned one can.
"""

import ctypes
import multiprocessing
import sys


def use():
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    status = cuda.cuInit(0)
    if status:
        return status
    for call in (
        lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
        lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        lambda: cuda.cuCtxSetCurrent(context),
        lambda: cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(4096)),
        lambda: cuda.cuMemFree_v2(memory),
    ):
        status = call()
        if status:
            return status
    return 0


def with_cuda(number):
    return number, use()


def without_cuda(number):
    return number * number


if __name__ == "__main__":
    method = multiprocessing.get_context(sys.argv[1])
    print("parent", use())
    with method.Pool(3) as pool:
        print("plain", pool.map(without_cuda, range(6)))
        print("cuda", pool.map(with_cuda, range(6)))
    print("parent", use())
