"""Sections about the driver as a whole."""

import os
import sys

from ..context import Skip, last_json
from ..frameworks import importable
from ..processes import Failure, describe


def device(ctx):
    found = ctx.probe("device")
    result = ctx.result
    result.check("a device is there", found["device_count"] > 0)
    first = found["devices"][0]
    nvml = found["nvml"]
    result.note(f"{first['name']}, compute capability {first['compute_major']}.{first['compute_minor']}")
    result.note(f"CUDA {found['cuda_version']}, driver {nvml.get('driver', 'unknown')}, MIG {nvml.get('mig', 'unknown')}, "
                f"compute mode {nvml.get('compute_mode')}, MPS {'seen' if found['mps_pipe'] or nvml.get('mps_processes', 0) > 0 else 'not seen'}")
    result.check("NVML answers", nvml["there"], nvml.get("why", ""))
    if nvml["there"]:
        result.check("NVML and the driver name the same device", nvml.get("uuid", "").lower() == first["uuid"].lower(),
                     f"{short(nvml.get('uuid'))} and {short(first['uuid'])}")
        result.figure("memory_used_at_start", nvml["used_bytes"], "bytes")
        result.figure("compute_processes", nvml["compute_processes"], "processes")
    result.figure("memory_total", first["total_bytes"], "bytes")
    for name in ("multiprocessors", "copy_engines", "virtual_memory", "memory_pools", "host_register", "stream_mem_ops", "multicast",
                 "compute_preemption"):
        result.figure(name, first.get(name), "")
    ctx.shared["device"] = {"name": first["name"], "driver": nvml.get("driver"), "cuda": found["cuda_version"]}

    # The same questions under us, without a limit, must have the same answers.
    arbiter = ctx.arbiter()
    governed = arbiter.json_of([ctx.place.probe(), "device"], "governed-device")
    for row in (first, governed["devices"][0]):
        row.pop("compute_mode", None)
    result.check("governed without a limit, the device answers the same", governed["devices"] == found["devices"],
                 differences(found["devices"][0], governed["devices"][0]))
    status = arbiter.status()
    names = [row["name"] for row in status["devices"]]
    result.check("the arbiter knows the device", first["name"] in names, ", ".join(names))


def short(uuid):
    """Enough to tell two apart: reports are kept, and name no machine."""
    return f"{str(uuid)[:12]}..."


def differences(one, other):
    return ", ".join(f"{key}: {one.get(key)} and {other.get(key)}" for key in one if one.get(key) != other.get(key))


FIND_DRIVER = """
import ctypes
ctypes.CDLL("libcuda.so.1")
print(next(line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if "/libcuda.so" in line))
"""
FIRST_CALLS, MOST_CALLS = 2000, 400_000


def transparency(ctx):
    """The behaviour test of the project on this driver: first a little, then as much as the time allows."""
    program = ctx.place.program("transparency")
    if program is None:
        raise Skip("the program `transparency` is not in this build")
    words = [program, "--json", "--seed", "1", "--commit", ctx.place.commit(), "--preload", ctx.place.library, "--sublet", ctx.place.sublet]
    if ctx.simulated:
        words += ["--driver", ctx.place.sim_dir / "libcuda.so.1"]
    else:
        # Without calls that vendors' drivers do not survive: they do not check handles that never
        # were.
        found = ctx.run([sys.executable, "-c", FIND_DRIVER], "find-driver", 20).stdout().strip()
        ctx.result.note(f"driver library {os.path.basename(found)}")
        words += ["--driver", found, "--gentle"]
    first = run_transparency(ctx, words, FIRST_CALLS, "transparency-first")
    rate = first["calls"] / first["seconds"]
    calls = int(min(MOST_CALLS, rate * (ctx.left() - 10) * 0.6))
    if calls > 2 * FIRST_CALLS:
        run_transparency(ctx, [*words, "--seed", "2"], calls, "transparency")


def run_transparency(ctx, words, calls, name):
    done = ctx.run([*words, "--calls", calls], name, 55, expect=None)
    if done.returncode not in (0, 1):
        raise Failure(f"transparency ended with {describe(done.returncode)}: {done.last_lines()}")
    said = last_json(done)
    metrics = {row["name"]: row["value"] for row in said["metrics"]}
    differing = [line.removeprefix("DIFFERENCE ") for line in done.stdout().splitlines() if line.startswith("DIFFERENCE ")]
    ctx.result.check(f"{name}: no difference in {said['calls']} calls", said["differences"] == 0, " // ".join(differing[:4])[:1200])
    for metric in ("calls", "sequences", "probes", "modes", "differences", "symbols_called", "categories_called", "fatal_probes", "seconds"):
        ctx.result.figure(f"{name}_{metric}", metrics.get(metric), "", "0" if metric == "differences" else None)
    for line in done.stdout().splitlines():
        if line.startswith(("categories ", "not survived")):
            ctx.result.note(f"{name}: {line}"[:600])
    return {"calls": max(1, said["calls"]), "seconds": max(0.1, metrics["seconds"])}


ALLOC_BYTES = 64 << 20
TORCH_LINE = (
    "import torch; x = torch.ones(4096, 4096, device='cuda'); print(float((x @ x).sum())); "
    "print(torch.cuda.memory_reserved())"
)


def ways(ctx):
    """Is every call seen: by what the arbiter metered, and by `sublet doctor` where the build has it."""
    # Name, command, and what the program took at least as it says itself.
    commands = {"probe": ([ctx.place.probe(), "context"], lambda done: ALLOC_BYTES)}
    if ctx.simulated:
        if program := ctx.place.program("train_mlp"):
            commands["train_mlp"] = ([program, "--epochs", "2", "--json"], lambda done: last_json(done)["mem_bytes"])
    elif importable(ctx, "torch") is None:
        commands["python_torch"] = ([sys.executable, "-c", TORCH_LINE], lambda done: int(done.stdout().split()[-1]))
    arbiter = ctx.arbiter()
    for name, (command, least_bytes) in commands.items():
        done = arbiter.run(command, name, mem="8GiB", timeout_s=30)
        job, least = arbiter.job(name), least_bytes(done)
        ctx.result.check(f"{name}: its launches were seen", job["launches"] > 0, f"{job['launches']} launches")
        ctx.result.check(f"{name}: its memory was seen", job["mem_peak_bytes"] >= least > 0, f"{job['mem_peak_bytes']} metered, {least} taken")
    usage = ctx.run([ctx.place.sublet, "--help"], "help", 10).stdout()
    if "doctor" not in usage:
        ctx.result.note("This build has no `sublet doctor`, so nothing was asked of it.")
        return
    for name, (command, _) in commands.items():
        flags = ["--sim"] if ctx.simulated else []
        done = ctx.processes.run([ctx.place.sublet, "doctor", "--json", *flags, "--", *command], arbiter.env, f"doctor-{name}", ctx.limit(30), None)
        try:
            judge_doctor(ctx, name, done)
        except Failure as failure:
            ctx.result.check(f"{name}: doctor answers", False, failure)


def judge_doctor(ctx, name, done):
    said = last_json(done)
    watched = said.get("command") or {}
    findings = [f"{row.get('level')}: {row.get('text')}" for row in said.get("findings", []) if row.get("level") != "note"]
    ended = watched.get("exit_code")
    ctx.result.check(f"{name}: doctor saw the command through", ended == 0, "" if ended == 0 else f"exit code {ended}; {done.last_lines()}")
    ctx.result.check(f"{name}: doctor finds nothing that escapes", watched.get("complete") is True, " // ".join(findings)[:1200])
    ctx.result.figure(f"{name}_calls_seen", watched.get("calls_seen"), "calls")
    ctx.result.figure(f"{name}_functions_seen", watched.get("functions_seen"), "functions")
    ways_in = ", ".join(f"{way} {count}" for way, count in (watched.get("ways_in") or {}).items())
    ctx.result.note(f"{name}: ways in: {ways_in}; doctor's exit code {done.returncode}; {'; '.join(findings) or 'nothing worse than notes'}"[:900])
