"""Facts about memory and marks that residency and the gate stand on."""

import statistics
import sys

from ..context import Worker
from ..frameworks import importable
from ..processes import Failure

MIB = 1 << 20


def write_value(ctx):
    found = ctx.probe("marks", timeout_s=20)
    result = ctx.result
    registered = result.check("a sealed memfd can be registered as pinned memory", found["register_status"] == 0, f"status {found['register_status']}")
    if not registered:
        return
    result.figure("register", found["register_ns"] / 1000, "us")
    for stream in ("null", "legacy", "per_thread", "created"):
        row = found[stream]
        ok = row["status"] == 0 and row.get("lost") == 0
        result.check(f"marks on the {stream} stream arrive", ok, f"status {row['status']}, {row.get('lost', 'all')} lost")
        if not ok:
            continue
        result.check(f"marks on the {stream} stream wait for the kernel before them", row["early"] == 0, f"{row['early']} came early")
        result.figure(f"{stream}_call", statistics.median(row["call_ns"]), "ns")
        result.figure(f"{stream}_visible", statistics.median(row["visible_ns"]), "ns")
        result.figure(f"{stream}_visible_p90", percentile(row["visible_ns"], 90), "ns")
        result.figure(f"{stream}_behind_2ms_kernel", statistics.median(row["behind_kernel_ns"]) / 1000, "us", ">= 2000")
        result.figure(f"{stream}_before_next_2ms_kernel_ends", statistics.median(row["until_next_end_ns"]) / 1000, "us", "about 2000")
    added = statistics.median(found["batch_marked_ns"]) - statistics.median(found["batch_plain_ns"])
    result.figure("mark_added_to_a_batch", added, "ns")
    result.figure("mark_added_per_launch", added / found["batch_launches"], "ns")


def percentile(values, percent):
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def vmm(ctx):
    most = 512 * MIB if ctx.simulated else 16 << 30
    found = ctx.probe("vmm", most, timeout_s=20)
    ctx.result.figure("granularity", found["granularity_bytes"], "bytes")
    for row in found["sizes"]:
        size = f"{row['bytes'] // MIB}MiB"
        restore = sum(statistics.median(row[step]) for step in ("create_ns", "map_ns", "access_ns"))
        evict = sum(statistics.median(row[step]) for step in ("unmap_ns", "release_ns"))
        ctx.result.figure(f"create_map_access_{size}", restore / 1000, "us per handle")
        ctx.result.figure(f"unmap_release_{size}", evict / 1000, "us per handle")
        ctx.result.figure(f"one_access_for_all_{size}", row["restore_all_ns"] / row["handles"] / 1000, "us per handle")
        parts = ", ".join(f"{step[:-3]} {statistics.median(row[step]) / 1000:.1f}" for step in ("create_ns", "map_ns", "access_ns", "unmap_ns", "release_ns"))
        ctx.result.note(f"{size}, {row['handles']} handles, medians in us: {parts}")
    ctx.result.check("every size was measured", len(found["sizes"]) >= 6, f"{len(found['sizes'])} sizes")


def pcie(ctx):
    bytes_ = 64 * MIB if ctx.simulated else 512 * MIB
    found = ctx.probe("pcie", bytes_, timeout_s=20)
    ctx.result.check("bytes that went up came down", found["bytes_came_back"])

    def rate(name, times=1):
        return times * found["bytes"] / statistics.median(found[name])

    for name in ("h2d", "d2h"):
        ctx.result.figure(f"pinned_{name}", rate(f"{name}_ns"), "GB/s")
    ctx.result.figure("pinned_duplex_sum", rate("duplex_ns", 2), "GB/s")
    ctx.result.figure("duplex_gain", rate("duplex_ns", 2) / ((rate("h2d_ns") + rate("d2h_ns")) / 2), "x", "near 2 where both directions are free")
    ctx.result.figure("pageable_h2d", rate("pageable_h2d_ns"), "GB/s")
    gib = found["bytes"] / (1 << 30)
    ctx.result.figure("pin_by_alloc", found["host_alloc_ns"] / 1e6 / gib, "ms/GiB")
    ctx.result.figure("pin_by_register", found["host_register_ns"] / 1e6 / gib, "ms/GiB")
    ctx.result.figure("unpin", found["host_unregister_ns"] / 1e6 / gib, "ms/GiB")


def context_memory(ctx):
    sides = {"bare": ctx.probe("context", name="bare-context")}
    arbiter = ctx.arbiter()
    sides["governed"] = arbiter.json_of([ctx.place.probe(), "context"], "governed-context", mem="50%")
    for side, found in sides.items():
        stages = {row["stage"]: row for row in found["stages"]}
        used = {name: row["nvml_used_bytes"] for name, row in stages.items()}
        if used["start"] >= 0:
            ctx.result.figure(f"{side}_context", (used["context"] - used["start"]) / MIB, "MiB")
            ctx.result.figure(f"{side}_until_launch", (used["launch"] - used["start"]) / MIB, "MiB")
        own = stages["launch"]["nvml_own_bytes"]
        ctx.result.figure(f"{side}_own_process_by_nvml", own / MIB if own >= 0 else None, "MiB", "null where NVML does not tell processes apart")
        ctx.result.figure(f"{side}_cuinit", (stages["cuInit"]["at_ns"] - stages["start"]["at_ns"]) / 1e6, "ms")
        ctx.result.figure(f"{side}_create_context", (stages["context"]["at_ns"] - stages["cuInit"]["at_ns"]) / 1e6, "ms")
    total = {row["stage"]: row for row in sides["governed"]["stages"]}["launch"]["total_bytes"]
    bare_total = {row["stage"]: row for row in sides["bare"]["stages"]}["launch"]["total_bytes"]
    # The percentage is of the device as NVML knows it; the driver shows less, having kept some for
    # itself, which on a small device is more than a hundredth.
    whole = max(bare_total, ctx.probe("device", name="device-total")["nvml"].get("total_bytes", 0))
    ctx.result.check("under a quota of 50% the device is half as large", 0.49 <= total / whole <= 0.51, f"{total:.0f} of {whole:.0f} bytes")
    if ctx.simulated or importable(ctx, "torch"):
        return
    before = used_bytes(ctx)
    worker = Worker(ctx, ctx.start([sys.executable, ctx.place.jobs / "torch_worker.py"], "torch", piped=True))
    ready = used_bytes(ctx)
    worker.ask("setup", model="gpt")
    worker.ask("train", model="gpt", steps=5)
    memory = worker.ask("memory")
    trained = used_bytes(ctx)
    ctx.result.figure("torch_context", (ready - before) / MIB, "MiB")
    ctx.result.figure("torch_beyond_its_allocator", (trained - before - memory["reserved_bytes"]) / MIB, "MiB", "context, code, library workspaces")
    worker.close()


def used_bytes(ctx):
    used = ctx.probe("device")["nvml"].get("used_bytes", -1)
    if used < 0:
        raise Failure("NVML does not say how much memory is used")
    return used
