"""What single calls cost: on this machine's driver, and on a stub driver that costs next to nothing (our own part alone)."""

import statistics
import time

ROUNDS = 4
# A launch takes half as long again in one process as in the next, so that few processes say little.
LAUNCH_ROUNDS = 16


def overheads(ctx):
    arbiter = ctx.arbiter()
    governed = arbiter.environment("overheads", mem="50%")
    real_driver(ctx, governed)
    stub_driver(ctx)


def real_driver(ctx, governed):
    measures = {
        "launch": (["launch", 5, 30], "ns"),
        "alloc_free_4k": (["alloc", 5, 200, 4096], "ns"),
        "alloc_free_2m": (["alloc", 5, 100, 2 << 20], "ns"),
        "memgetinfo": (["info", 5, 300], "ns"),
    }
    sides = {"bare": ctx.bare, "governed": governed}
    wall = {name: {side: [] for side in sides} for name in measures}
    cpu = {name: {side: [] for side in sides} for name in measures}
    start = {side: [] for side in sides}
    for round_ in range(LAUNCH_ROUNDS if not ctx.simulated else ROUNDS):
        # The other side first every second time: what drifts hits both.
        order = list(sides.items())[:: 1 if round_ % 2 == 0 else -1]
        for name, (words, _) in measures.items():
            if round_ >= ROUNDS and name != "launch":
                continue
            for side, env in order:
                found = ctx.probe(*words, name=f"{side}-{name}", env=env, timeout_s=20)
                wall[name][side].append(statistics.median(found["wall_ns"]))
                cpu[name][side].append(statistics.median(found["cpu_ns"]))
        if round_ >= ROUNDS:
            continue
        for side, env in order * 2:
            begun = time.monotonic_ns()
            found = ctx.probe("first", name=f"{side}-first", env=env, timeout_s=20)
            start[side].append((found["launched_mono_ns"] - begun) / 1000)
    for name, (_, unit) in measures.items():
        middle = {side: statistics.median(wall[name][side]) for side in sides}
        busy = {side: statistics.median(cpu[name][side]) for side in sides}
        ctx.result.figure(f"{name}_bare", middle["bare"], unit)
        ctx.result.figure(f"{name}_governed", middle["governed"], unit)
        ctx.result.figure(f"{name}_added", middle["governed"] - middle["bare"], unit, EXPECTED.get(name))
        ctx.result.figure(f"{name}_added_cpu", busy["governed"] - busy["bare"], unit)
        low, _, high = statistics.quantiles(wall[name]["bare"], n=4)
        ctx.result.figure(f"{name}_bare_differs_by", high - low, unit, "from process to process: what half of them lie within")
    ctx.result.check("cuMemGetInfo needs no driver call under a quota", True if ctx.simulated else
                     statistics.median(wall["memgetinfo"]["governed"]) < statistics.median(wall["memgetinfo"]["bare"]),
                     f"{statistics.median(wall['memgetinfo']['governed']):.0f} ns governed, {statistics.median(wall['memgetinfo']['bare']):.0f} ns bare")
    middle = {side: statistics.median(start[side]) for side in sides}
    ctx.result.figure("first_launch_bare", middle["bare"], "us")
    ctx.result.figure("first_launch_added", middle["governed"] - middle["bare"], "us", "<= 200 plus the noise of the driver's own start")


EXPECTED = {"launch": "<= 5", "alloc_free_4k": "<= 60", "alloc_free_2m": "<= 60", "memgetinfo": "negative: no driver call"}


def stub_driver(ctx):
    """Our own part, free of the driver's noise, on this machine's processor."""
    host, stub = ctx.place.stub_bench()
    bare = {**ctx.bare, "LD_LIBRARY_PATH": str(stub.parent)}
    arbiter = ctx.arbiter(driver=stub)
    governed = arbiter.environment("stub", mem="8GiB")
    governed["LD_LIBRARY_PATH"] = str(stub.parent)

    def both(*words):
        found = {"bare": [], "governed": []}
        for round_ in range(3):
            for side in ("bare", "governed") if round_ % 2 == 0 else ("governed", "bare"):
                done = ctx.run([host, *map(str, words)], f"stub-{words[0]}-{side}", 20, bare if side == "bare" else governed)
                found[side] += [float(line) for line in done.stdout().split()]
        return {side: statistics.median(values) for side, values in found.items()}

    one, four = both("launch", 1), both("launch", 4)
    ctx.result.figure("stub_launch_added", one["governed"] - one["bare"], "ns", at_most=5)
    ctx.result.figure("stub_launch_4_threads", four["governed"] / one["governed"], "x", at_most=2)
    pair = both("alloc", 10)
    ctx.result.figure("stub_alloc_free_added", pair["governed"] - pair["bare"], "ns", at_most=60)
    ctx.result.figure("stub_memgetinfo", both("info")["governed"], "ns", at_most=10)
