#!/usr/bin/env python3
"""Copies 8 MiB to the device again and again, by the driver alone, and counts."""

import ctypes

SIZE = 8 << 20


def main():
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name, *words):
        status = getattr(cuda, name)(*words)
        assert status == 0, (name, status)

    call("cuInit", 0)
    context, address = ctypes.c_void_p(), ctypes.c_uint64()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(SIZE))
    host = ctypes.create_string_buffer(SIZE)
    copies = 0
    while True:
        call("cuMemcpyHtoD_v2", address, host, ctypes.c_size_t(SIZE))
        copies += 1
        print("copies", copies, flush=True)


if __name__ == "__main__":
    main()
