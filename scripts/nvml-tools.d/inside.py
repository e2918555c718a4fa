"""Two programs that hold device memory, and tools that look at them: what `scripts/nvml-tools` runs, bare and in a job.

    python3 inside.py TO PLAN       PLAN: a JSON list of [name, command]; what came of it is written to the file TO
    python3 inside.py --job MIB     holds so much and keeps the device busy, until its standard input ends
"""

import ctypes
import json
import os
import subprocess
import sys

MIB = 1 << 20
HELD_MIB = [1024, 512]


def ok(status):
    if status:
        sys.exit(f"the driver answers {status}")


def job(mib):
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    ok(cuda.cuInit(0))
    ok(cuda.cuDeviceGet(ctypes.byref(device), 0))
    ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    ok(cuda.cuCtxSetCurrent(context))
    ok(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(mib * MIB)))
    print("ready", flush=True)
    os.set_blocking(0, False)
    while sys.stdin.buffer.read(1) is None:
        # Fills take the device's time, and little of the host's: the same 16 MiB again and again.
        for _ in range(50):
            ok(cuda.cuMemsetD8Async(memory, 1, ctypes.c_size_t(16 * MIB), None))
        ok(cuda.cuCtxSynchronize())


def start(mib):
    child = subprocess.Popen(["python3", os.path.basename(__file__), "--job", str(mib)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if child.stdout.readline() != "ready\n":
        sys.exit(f"a job of {mib} MiB did not start")
    return child


def run(command):
    try:
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=90)
        return {"code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    except subprocess.TimeoutExpired as error:
        return {"code": None, "stdout": (error.stdout or b"").decode(errors="replace"), "stderr": "no end within 90 s"}


def main():
    if sys.argv[1] == "--job":
        return job(int(sys.argv[2]))
    jobs = [start(mib) for mib in HELD_MIB]
    try:
        results = {name: run(command) for name, command in json.loads(sys.argv[2])}
    finally:
        for child in jobs:
            child.stdin.close()
            child.wait()
    with open(sys.argv[1], "w") as file:
        json.dump({"held_mib": dict(zip([child.pid for child in jobs], HELD_MIB)), "results": results}, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
