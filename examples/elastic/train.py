#!/usr/bin/env python3
"""Training with its state on a GPU, whose workers come and go without a restart: docs/how-to/cluster.md, "Without a restart".

    sublet run --name train -- python examples/elastic/train.py --steps 2000
    sublet set train --resize 2

It uses the CUDA driver alone, and stands for any program that can copy its state from a GPU and to it. Every step depends on all before
it, so that a step that is lost or done twice shows in the digest at the end. Each worker makes every step, as in data-parallel training
with its gradients exchanged.

Rows on stdout are JSON: `began` (a worker's first step), `change` (workers that came or went), `ended`.
"""

import argparse
import ctypes
import hashlib
import json
import os
import struct
import subprocess
import sys
import time

import sublet
from sublet import elastic

MIB = 1 << 20


class Gpu:
    """A state of some MiB on the first GPU."""

    def __init__(self, size):
        self.cuda, self.size = ctypes.CDLL("libcuda.so.1"), size
        context, self.address = ctypes.c_void_p(), ctypes.c_uint64()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        self.call("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(size))
        self.call("cuMemsetD8_v2", self.address, 0, ctypes.c_size_t(size))
        self.word = ctypes.create_string_buffer(32)

    def call(self, name, *words):
        status = getattr(self.cuda, name)(*words)
        if status != 0:
            raise SystemExit(f"train.py: {name} returned {status}")

    def at(self, offset):
        return ctypes.c_uint64(self.address.value + offset)

    def train(self, number):
        """What is at one place depends on what is at another, and on the step's number."""
        place, before = number * 4096 % self.size, (number * 4096 - 4096) % self.size
        self.call("cuMemcpyDtoH_v2", self.word, self.at(before), ctypes.c_size_t(32))
        word = hashlib.sha256(self.word.raw + struct.pack("<Q", number)).digest()
        self.call("cuMemcpyHtoD_v2", self.at(place), word, ctypes.c_size_t(32))

    def save(self, _name, view):
        """From the GPU straight into the memory that a newcomer maps."""
        self.call("cuMemcpyDtoH_v2", (ctypes.c_char * len(view)).from_buffer(view), self.address, ctypes.c_size_t(len(view)))

    def load(self, _name, view):
        self.call("cuMemcpyHtoD_v2", self.address, (ctypes.c_char * len(view)).from_buffer(view), ctypes.c_size_t(len(view)))

    def digest(self):
        data = bytearray(self.size)
        self.save("", memoryview(data))
        return hashlib.sha256(data).hexdigest()


def say(what, **fields):
    print(json.dumps({what: {"pid": os.getpid(), "mono_ns": time.monotonic_ns(), **fields}}), flush=True)


def report(number, change):
    say("change", step=number, members=change.members, rank=change.rank, joined=change.joined, left=change.left, pause_s=change.pause_s)


def follow(gpu, options):
    worker = elastic.join({"state": gpu.size}, gpu.load)
    say("began", step=worker.step_number + 1, members=worker.members, rank=worker.rank)
    number = worker.step_number
    for number in range(worker.step_number + 1, options.steps):
        work(gpu, number, options)
        try:
            change = worker.step(number)
        except elastic.Lost:
            break
        if change is not None:
            report(number, change)
            if change.members == 0:
                break
    say("ended", step=number, digest=gpu.digest())


def lead(gpu, options):
    others = []

    def start(_rank):
        others.append(subprocess.Popen([sys.executable, *sys.argv, "--join"]))

    first = 0
    if options.checkpoint and os.path.exists(options.checkpoint):
        with open(options.checkpoint, "rb") as file:
            (first,) = struct.unpack("<Q", file.read(8))
            gpu.load("", memoryview(bytearray(file.read())))
    worker = elastic.Lead({"state": gpu.size}, gpu.save, start=start) if options.elastic else None
    calls_ns = []
    say("began", step=first, members=1, rank=0)
    for number in range(first, options.steps):
        work(gpu, number, options)
        if worker is not None:
            begun_ns = time.perf_counter_ns()
            change = worker.step(number)
            if worker.members == 1 and change is None:
                calls_ns.append(time.perf_counter_ns() - begun_ns)
            if change is not None:
                report(number, change)
        elif options.checkpoint and not os.path.exists(options.checkpoint) and sublet.resize_requested() is not None:
            save(gpu, number, options)
    calls_ns.sort()
    say("ended", step=options.steps - 1, digest=gpu.digest(), call_ns=calls_ns[len(calls_ns) // 2] if calls_ns else None)
    for other in others:
        other.wait()


def save(gpu, number, options):
    """The way with a file: what is saved is taken up by a new start."""
    say("saves", step=number)
    data = bytearray(gpu.size)
    gpu.save("", memoryview(data))
    with open(options.checkpoint + ".new", "wb") as file:
        file.write(struct.pack("<Q", number + 1))
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(options.checkpoint + ".new", options.checkpoint)
    sublet.resize_ready()


def work(gpu, number, options):
    gpu.train(number)
    time.sleep(options.step_ms / 1000)
    sublet.step()
    if options.every_step:
        say("step", step=number)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--mib", type=int, default=64, help="size of the state (default 64)")
    parser.add_argument("--step-ms", type=float, default=2.0, help="how long a step takes beside its work on the GPU (default 2)")
    parser.add_argument("--join", action="store_true", help="join the worker that runs")
    parser.add_argument("--no-elastic", dest="elastic", action="store_false", help="nobody can join")
    parser.add_argument("--every-step", action="store_true", help="a row for each step")
    parser.add_argument("--checkpoint", metavar="FILE", help="with --no-elastic: where to save when another size is asked for, and to begin")
    options = parser.parse_args()
    gpu = Gpu(options.mib * MIB)
    (follow if options.join else lead)(gpu, options)


if __name__ == "__main__":
    main()
