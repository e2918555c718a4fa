"""Stands in for validation/jobs/vllm_job.py where there is no vLLM: two processes use the device and are refused what the quota does not hold."""

import ctypes
import json
import multiprocessing
import sys


def work(bytes_):
    cuda, at = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
    context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
    codes = [
        cuda.cuInit(0),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
        cuda.cuCtxSetCurrent(context),
        cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)),
        cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(bytes_)),
    ]
    return codes, free.value, total.value


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as workers:
        done = workers.map(work, [1 << 28] * 2)
    assert all(codes == [0] * 5 for codes, _, _ in done), done
    print(json.dumps({"version": "stand-in", "devices": 1, "answers": 2, "free_bytes": done[0][1], "total_bytes": done[0][2], "result": "same"}))
