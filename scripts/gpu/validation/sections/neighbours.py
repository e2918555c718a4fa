"""What two processes do to each other below the level of shares, and what programs may do with streams: facts that the gate's marks and
evictions stand on. Each figure has the same process alone beside it."""

import shutil
import signal
import statistics

from ..context import Skip
from ..processes import Failure, describe
from .memory import percentile
from .residency import arbiter_with_space, move
from .shares import ended, load

MIB, GIB = 1 << 20, 1 << 30
MARK_EVERY_US = 5000
# Longer than any section: who runs so long is ended.
LONG_S = 300
STEPS = ("create_ns", "map_ns", "access_ns", "unmap_ns", "release_ns")


def seconds_of(ctx, seconds):
    return 1 if ctx.shared.get("small") else seconds


def beside(ctx, words, other, seconds):
    """What the probe says of `words` while `other` runs in another process: started before it, and still there at its end."""
    neighbour = ctx.start([ctx.place.probe(), *map(str, other)], f"beside-{other[0]}")
    ctx.pause(0.5)
    found = ctx.probe(*words, name=f"{words[0]}-beside-{other[0]}", timeout_s=seconds + 15)
    if neighbour.has_exited():
        raise Failure(f"{neighbour.name} ended before the other: {neighbour.last_lines()}")
    neighbour.end()
    return found


def marks_beside(ctx):
    """An idle process marks every 5 ms while another saturates the device: how long a mark takes, and what the other loses."""
    seconds = seconds_of(ctx, 4)
    solo_run = ctx.probe("idle-marks", seconds, MARK_EVERY_US, name="idle-marks-solo", timeout_s=seconds + 15)
    for kernel_us in (200, 5000):
        command = load(ctx, f"busy_{kernel_us}", kernel_us, seconds)
        by_itself = ended(ctx, {"solo_run": ctx.start(command, f"busy-{kernel_us}-solo")})["solo_run"]
        longer = load(ctx, f"busy_{kernel_us}", kernel_us, seconds + 1)
        marker = ctx.start([ctx.place.probe(), "idle-marks", str(seconds + 3), str(MARK_EVERY_US)], f"idle-marks-{kernel_us}")
        ctx.pause(0.5)
        together = ended(ctx, {"beside": ctx.start(longer, f"busy-{kernel_us}-beside")})["beside"]
        marks = ctx.last_json_of(marker, seconds + 15)
        ctx.result.check(f"marks beside kernels of {kernel_us} us arrive", marks["lost"] == 0 and marks["visible_ns"], f"{marks['lost']} lost")
        if not marks["visible_ns"]:
            continue
        ctx.result.figure(f"visible_beside_{kernel_us}us_kernels", statistics.median(marks["visible_ns"]) / 1000, "us")
        ctx.result.figure(f"visible_beside_{kernel_us}us_kernels_p99", percentile(marks["visible_ns"], 99) / 1000, "us")
        rates = [report["kernels"] / report["seconds"] for report in (by_itself, together)]
        ctx.result.figure(f"lost_by_{kernel_us}us_kernels", 100 * (1 - rates[1] / rates[0]), "%", "below 1 where a mark takes no turn", at_most=1)
    ctx.result.check("marks of a process by itself arrive", solo_run["lost"] == 0 and solo_run["visible_ns"], f"{solo_run['lost']} lost")
    ctx.result.figure("visible_solo_run", statistics.median(solo_run["visible_ns"]) / 1000, "us")


def vmm_beside(ctx):
    """Physical handles while a copy is in flight, and while another process releases its own."""
    seconds, bytes_ = seconds_of(ctx, 2), 64 * MIB
    large = 256 * MIB if ctx.simulated else GIB
    words = ("handles", seconds, bytes_)
    cases = {
        "solo_run": ctx.probe(*words, name="handles-solo", timeout_s=seconds + 15),
        "copy": ctx.probe(*words, "copy", name="handles-copy", timeout_s=seconds + 15),
        "neighbour": beside(ctx, words, ("handles", LONG_S, large), seconds),
    }
    for case, found in cases.items():
        ctx.result.check(f"{case}: handles were made", found["rounds"] > 0, f"{found['rounds']:.0f} rounds")
        for step in STEPS:
            ctx.result.figure(f"{case}_{step[:-3]}", statistics.median(found[step]) / 1000, "us per handle")
            ctx.result.figure(f"{case}_{step[:-3]}_p99", percentile(found[step], 99) / 1000, "us per handle")
    share = cases["copy"]["copies_in_flight"] / max(1, cases["copy"]["rounds"])
    ctx.result.check("copies were in flight at the end of rounds", ctx.simulated or share > 0.5, f"{100 * share:.0f} % of the rounds")
    ctx.result.note("a step that waits for copies takes as long as a copy of 256 MiB in the case `copy`, and as `solo_run` if it does not")


def pin_beside(ctx):
    """Allocations of one process while another page-locks memory, which some drivers serialise on a lock of the whole machine."""
    seconds = seconds_of(ctx, 3)
    words = ("allocs", seconds, 2 * MIB)
    solo_run = ctx.probe(*words, name="allocs-solo", timeout_s=seconds + 15)["alloc_free_ns"]
    found = beside(ctx, words, ("pins", LONG_S, 64 * MIB), seconds)["alloc_free_ns"]
    pins = ctx.probe("pins", 1, 64 * MIB, name="pins-solo", timeout_s=20)
    ctx.result.check("both processes came to work", solo_run and found and pins["pin_ns"], f"{len(solo_run)} and {len(found)} allocations")
    for case, values in (("solo_run", solo_run), ("beside_pins", found)):
        ctx.result.figure(f"alloc_free_{case}", statistics.median(values) / 1000, "us")
        ctx.result.figure(f"alloc_free_{case}_p99", percentile(values, 99) / 1000, "us")
        ctx.result.figure(f"alloc_free_{case}_max", max(values) / 1000, "us")
    ctx.result.figure("pin_64MiB", statistics.median(pins["pin_ns"]) / 1000, "us")


def streams(ctx):
    """Six streams, streams that are destroyed while others are used, graphs that are captured while memory is moved: bare and governed."""
    seconds = seconds_of(ctx, 2)
    arbiter = arbiter_with_space(ctx, 4 * GIB)
    governed = arbiter.environment("streams")
    launches, rates = {}, {}
    for side, env in (("bare", ctx.bare), ("governed", governed)):
        # Short kernels for the calls themselves; with long ones the bound of what is in flight
        # makes calls wait, by design, and what counts is that the device loses nothing by it.
        found = ctx.probe("streams", 6, seconds, 20, name=f"{side}-streams-20us", env=env, timeout_s=seconds + 15)
        launches[side] = statistics.median(found["launch_ns"])
        ctx.result.figure(f"six_streams_launch_{side}", launches[side], "ns")
        ctx.result.figure(f"six_streams_launch_{side}_p99", percentile(found["launch_ns"], 99), "ns")
        found = ctx.probe("streams", 6, seconds, 1000, name=f"{side}-streams-1ms", env=env, timeout_s=seconds + 15)
        rates[side] = len(found["launch_ns"]) / found["seconds"]
        found = ctx.probe("destroyed", seconds, name=f"{side}-destroyed", env=env, timeout_s=seconds + 15)
        destroying(ctx, side, found)
        ctx.result.check(f"streams are destroyed beside others, {side}", found["destroyed"] > 0 and found["launches"] > 0,
                         f"{found['destroyed']:.0f} destroyed, {found['launches']:.0f} launches")
    # Whether what a gate's mark in such a stream costs is the driver's.
    destroying(ctx, "bare_marked", ctx.probe("destroyed", seconds, "mark", name="bare-destroyed-marked", timeout_s=seconds + 15))
    ctx.result.figure("six_streams_launch_added", launches["governed"] - launches["bare"], "ns", at_most=100)
    ctx.result.figure("six_streams_1ms_kernels_rate", rates["governed"] / rates["bare"], "x", at_least=0.98)

    words = [ctx.place.probe(), "captures", str(LONG_S)]
    capturing = ctx.start(arbiter.command(words, "captures", f"{GIB}B", flags=["--evictable", "--host-memory", f"{2 * GIB}B"]), "captures", arbiter.env)
    arbiter.wait_for_job("captures")
    moves, refused = 0, 0
    while moves < 3 and not capturing.has_exited():
        try:
            move(ctx, arbiter, "evict", "captures")
        except Failure as why:
            # In the middle of a capture an eviction is refused, which is right; the next one may
            # be between two.
            if "captured" not in str(why):
                raise
            refused += 1
            ctx.pause(0.1)
            continue
        move(ctx, arbiter, "restore", "captures")
        moves += 1
    ctx.result.figure("evictions_refused_for_a_capture", refused, "")
    capturing.popen.send_signal(signal.SIGTERM)
    found = ctx.last_json_of(capturing, 20)
    ctx.result.check("graphs are captured while memory is moved", moves == 3 and found["graphs"] > 0 and found["wrong_bytes"] == 0,
                     f"{moves} evictions, {found['graphs']:.0f} graphs, {found['wrong_bytes']:.0f} wrong bytes")


def destroying(ctx, side, found):
    """What each call takes that has to do with a stream that is destroyed with work in flight."""
    for what in ("create", "first_launch", "next_launch", "destroy", "wait"):
        ctx.result.figure(f"destroyed_{what}_{side}", statistics.median(found[f"{what}_ns"]) / 1000, "us")


TOOLS = {
    "ncu": ["ncu", "--target-processes", "all", "--launch-count", "1"],
    "nsys": ["nsys", "profile", "--force-overwrite=true", "--output=nsys-report"],
    "cuda-gdb": ["cuda-gdb", "--batch", "-ex", "run", "--args"],
    "compute-sanitizer": ["compute-sanitizer"],
}


def tools(ctx):
    """NVIDIA's profilers and debuggers on a bare and on a governed program: the same end."""
    if ctx.simulated:
        raise Skip("NVIDIA's tools do not know the simulated GPU")
    found = {name: words for name, words in TOOLS.items() if shutil.which(name)}
    if not found:
        raise Skip(f"none of {', '.join(TOOLS)} is on the path")
    governed = ctx.arbiter().environment("tools")
    for name, words in found.items():
        codes = {}
        for side, env in (("bare", ctx.bare), ("governed", governed)):
            done = ctx.run([*words, ctx.place.probe(), "launch", "1", "1"], f"{side}-{name}", 40, {**env, "TMPDIR": str(ctx.directory)}, expect=None)
            codes[side] = describe(done.returncode)
        if codes["bare"] != "exit code 0":
            ctx.result.note(f"{name} does not work here without us either: {codes['bare']}")
            continue
        ctx.result.check(f"{name} works on a governed program", codes["governed"] == codes["bare"], f"{codes['governed']}, bare {codes['bare']}")
    ctx.result.note(f"there are {', '.join(found)}")
