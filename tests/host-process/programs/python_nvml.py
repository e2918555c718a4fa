"""Reads NVML through ctypes, as pynvml does, beside the driver: what both tell of memory agrees. The argument is the quota in
bytes, or 0 for none."""

import ctypes
import os
import sys
import time

quota = int(sys.argv[1])


class Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class MemoryV2(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint)] + [(name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")]


class Process(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu", ctypes.c_uint), ("compute", ctypes.c_uint)]


def ok(status):
    assert status == 0, status


nvml = ctypes.CDLL("libnvidia-ml.so.1")
device = ctypes.c_void_p()
ok(nvml.nvmlInit_v2())
ok(nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)))


def memory_info():
    one, two = Memory(), MemoryV2(version=ctypes.sizeof(MemoryV2) | 2 << 24)
    ok(nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(one)))
    ok(nvml.nvmlDeviceGetMemoryInfo_v2(device, ctypes.byref(two)))
    assert one.total == two.total == two.used + two.free + two.reserved, (one.total, two.total)
    assert one.free == two.free and one.used == one.total - one.free
    return two


def processes():
    get = nvml.nvmlDeviceGetComputeRunningProcesses_v3
    count, found = ctypes.c_uint(0), (Process * 64)()
    if get(device, ctypes.byref(count), None) == 0:
        assert count.value == 0
        return {}
    count.value = 64
    ok(get(device, ctypes.byref(count), found))
    return {process.pid: process.used for process in found[: count.value]}


# Before the process uses the driver.
assert memory_info().used == 0 and processes() == {}, (memory_info().used, processes())
assert quota in (0, memory_info().total), memory_info().total

cuda = ctypes.CDLL("libcuda.so.1")
context, at = ctypes.c_void_p(), ctypes.c_ulonglong()
ok(cuda.cuInit(0))
ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
ok(cuda.cuCtxSetCurrent(context))
ok(cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(40 << 20)))
free, total, whole = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
ok(cuda.cuDeviceTotalMem_v2(ctypes.byref(whole), 0))
# Where the device itself is nearly full, the driver's answer is as old as the arbiter's last look
# at it.
for _ in range(1000):
    ok(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    now = memory_info()
    if not quota or now.free == free.value:
        break
    time.sleep(0.02)
assert total.value == whole.value and quota in (0, total.value)
assert list(processes()) == [os.getpid()]
if quota:
    assert (now.total, now.free) == (total.value, free.value), (now.total, total.value, now.free, free.value)
    assert now.used == 40 << 20 and processes()[os.getpid()] == 40 << 20

# A child that is forked has no context, and reads what the job holds all the same.
child = os.fork()
if child == 0:
    assert memory_info().used == now.used and list(processes()) == [os.getppid()]
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
ok(cuda.cuMemFree_v2(at))
assert memory_info().free == memory_info().total - memory_info().used - memory_info().reserved
print("agreed")
