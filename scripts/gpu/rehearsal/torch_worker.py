"""Stands in for validation/jobs/torch_worker.py where there is no PyTorch: the same dialogue over the bare driver API.

It lets the PyTorch sections be rehearsed on the simulated GPU: shares, quotas, refusals and the arbiter's books are real, the "losses" are
a function of model and step alone. Its figures mean nothing, and `validate` never runs it; test_validate.py does.
"""

import argparse
import ctypes
import json
import os
import pathlib
import sys
import time
import zlib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "validation/jobs"))
import dialogue  # noqa: E402, of the worker that this one stands in for

BUSY = b"""
.version 7.5
.target sm_75
.address_size 64
.visible .entry sublet_busy_us(.param .u64 us) { ret; }
"""
STEP_KERNELS, KERNEL_US = 4, 200


class DriverError(RuntimeError):
    pass


class Jobs:
    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.models = {}
        context, module = ctypes.c_void_p(), ctypes.c_void_p()
        self.busy = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        self.call("cuModuleLoadData", ctypes.byref(module), BUSY)
        self.call("cuModuleGetFunction", ctypes.byref(self.busy), module, b"sublet_busy_us")

    def call(self, name, *arguments):
        status = getattr(self.cuda, name)(*arguments)
        if status:
            raise DriverError(f"{name} answers {status}")

    def step(self):
        us = ctypes.c_uint64(KERNEL_US)
        parameters = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(us), ctypes.c_void_p))
        for _ in range(STEP_KERNELS):
            self.call("cuLaunchKernel", self.busy, 1, 1, 1, 1, 1, 1, 0, None, parameters, None)

    def sync(self):
        self.call("cuCtxSynchronize")

    def setup(self, model, seed=1, compile=False, small=False):
        self.models[model] = [seed, 0]
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(64 << 20))
        return {"parameters": 1}

    def train(self, model, steps):
        begun = time.perf_counter()
        losses = []
        for _ in range(steps):
            self.step()
            state = self.models[model]
            state[1] += 1
            losses.append(f"{zlib.crc32(repr((model, *state)).encode()):08x}")
        self.sync()
        return {"steps": steps, "seconds": time.perf_counter() - begun, "losses": losses, "last_loss": 0.0}

    def train_for(self, model, seconds):
        marks = []
        for _ in range(8):
            marks.append(ctypes.c_void_p())
            self.call("cuEventCreate", ctypes.byref(marks[-1]), 2)
        begun = time.perf_counter()
        steps = 0
        while time.perf_counter() - begun < seconds:
            mark = marks[steps % len(marks)]
            if steps >= len(marks):
                self.call("cuEventSynchronize", mark)
            self.step()
            self.call("cuEventRecord", mark, None)
            steps += 1
        self.sync()
        passed = time.perf_counter() - begun
        return {"steps": steps, "seconds": passed, "steps_per_s": steps / passed}

    def memory(self):
        free, total, whole = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        self.call("cuDeviceTotalMem_v2", ctypes.byref(whole), 0)
        setting = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        return {"free_bytes": free.value, "total_bytes": total.value, "properties_total_bytes": whole.value, "allocated_bytes": 0, "reserved_bytes": 0,
                "peak_bytes": 0, "backend": "cudaMallocAsync" if "cudaMallocAsync" in setting else "native",
                "expandable_segments": int("expandable" in setting), "segments": 1}

    def hog(self, chunk_bytes, most_bytes):
        held, refused = [], None
        while len(held) * chunk_bytes < most_bytes:
            address = ctypes.c_uint64()
            status = self.cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(chunk_bytes))
            if status:
                refused = status
                break
            held.append(address)
        for address in held:
            self.call("cuMemFree_v2", address)
        self.step()
        self.sync()
        return {"allocated_bytes": len(held) * chunk_bytes, "reserved_bytes": 0, "oom": "OutOfMemoryError" if refused == 2 else None,
                "oom_message": f"cuMemAlloc answers {refused}", "works_after": True}

    def graph(self, replays):
        done = self.train("graph", replays) if self.models.setdefault("graph", [1, 0]) else None
        return {"replays": replays, "seconds": done["seconds"], "equals_eager": True, "losses": done["losses"], "largest_difference": 0.0}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.parse_args()

    def answer(**members):
        print(json.dumps(members), flush=True)

    begun = time.perf_counter()
    jobs = Jobs()
    answer(ready=True, torch="none", cuda="none", device="rehearsal", import_s=0.0, device_s=time.perf_counter() - begun)
    dialogue.follow(jobs, answer)


main()
