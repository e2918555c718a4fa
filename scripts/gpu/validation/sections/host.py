"""Sections about the driver as a whole."""

import sys

from ..context import Skip
from ..processes import Failure


def device(ctx):
    found = ctx.probe("device")
    result = ctx.result
    result.check("a device is there", found["device_count"] > 0)
    first = found["devices"][0]
    nvml = found["nvml"]
    result.note(f"{first['name']}, {first['uuid']}, PCI {first['pci']}, compute capability {first['compute_major']}.{first['compute_minor']}")
    result.note(f"CUDA {found['cuda_version']}, driver {nvml.get('driver', 'unknown')}, MIG {nvml.get('mig', 'unknown')}, "
                f"compute mode {nvml.get('compute_mode')}, MPS {'seen' if found['mps_pipe'] or nvml.get('mps_processes', 0) > 0 else 'not seen'}")
    result.check("NVML answers", nvml["there"], nvml.get("why", ""))
    if nvml["there"]:
        result.check("NVML and the driver name the same device", nvml.get("uuid", "").lower() == first["uuid"].lower(),
                     f"{nvml.get('uuid')} and {first['uuid']}")
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


def differences(one, other):
    return ", ".join(f"{key}: {one.get(key)} and {other.get(key)}" for key in one if one.get(key) != other.get(key))


def law(ctx):
    """The behaviour test of the project, on this driver."""
    program = ctx.place.program("law")
    if program is None:
        raise Skip("the program `law` is not in this build")
    raise Skip("the program `law` is here, and how to run it is not")


DOCTORED = "import torch; x = torch.ones(1024, 1024, device='cuda'); print(float((x @ x).sum()))"


def ways(ctx):
    """Asks `sublet doctor` whether anything gets past us."""
    from ..frameworks import importable

    usage = ctx.run([ctx.place.sublet, "--help"], "help", 10).stdout()
    if "doctor" not in usage:
        raise Skip("this build has no `sublet doctor`")
    commands = {}
    if ctx.simulated:
        commands["probe"] = [ctx.place.probe(), "context"]
        if program := ctx.place.program("train_mlp"):
            commands["train_mlp"] = [program, "--epochs", "2"]
    else:
        commands["probe"] = [ctx.place.probe(), "context"]
        if importable(ctx, "torch") is None:
            commands["python_torch"] = [sys.executable, "-c", DOCTORED]
    arbiter = ctx.arbiter()
    for name, command in commands.items():
        flags = ["--sim"] if ctx.simulated else []
        done = ctx.processes.run([ctx.place.sublet, "doctor", "--json", *flags, "--", *command], arbiter.env, f"doctor-{name}", ctx.limit(30), None)
        try:
            judge_doctor(ctx, name, done)
        except Failure as failure:
            ctx.result.check(f"{name}: doctor answers", False, failure)


def judge_doctor(ctx, name, done):
    from ..context import last_json

    said = last_json(done)
    ctx.result.check(f"{name}: doctor finds nothing that escapes", done.returncode == 0, f"exit code {done.returncode}: {done.stdout()[-600:]}")
    ctx.result.note(f"{name}: {', '.join(f'{key} {value}' for key, value in said.items() if isinstance(value, (int, float, str, bool)))}"[:600])
