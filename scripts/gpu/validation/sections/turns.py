"""Time shared between tenants of the driver API."""

import statistics
import time

from ..context import Skip, last_json
from ..processes import Failure


def mlp(ctx):
    program = ctx.place.program("train_mlp")
    if program is None:
        raise Skip("the program train_mlp is not in this build")
    # Three seconds each, device-bound: half a millisecond is added to every step.
    words = [program, "--json", "--progress-every", "0", "--epochs", "10", "--extra-us", "500", "--min-seconds"]
    bare = ctx.json_of([*words, "3"], "bare", 30)
    arbiter = ctx.arbiter()
    solo = arbiter.json_of([*words, "3"], "solo", mem="2GiB", timeout_s=30)
    shares = {"a": 0.75, "b": 0.25}
    # The device is theirs alone from the start of the later one to the end of the earlier one.
    running = {name: arbiter.start([*words, "9"], name, mem="2GiB", share=share) for name, share in shares.items()}
    got = measured_shares(ctx, arbiter, list(shares), seconds=5)
    reports = {}
    for name, process in running.items():
        code = process.wait(ctx.limit(40))
        if code:
            raise Failure(f"train_mlp {name} ended with {code}: {process.last_lines()}")
        reports[name] = last_json(process)
    losses = {"bare": bare["loss_bits"], "solo": solo["loss_bits"], **{name: report["loss_bits"] for name, report in reports.items()}}
    ctx.result.check("losses are equal to the bit", len(set(losses.values())) == 1, losses)
    ctx.result.check("accuracy is at least 0.95", bare["accuracy"] >= 0.95, bare["accuracy"])
    ctx.result.figure("solo_step_ratio", bare["steps_per_s"] / solo["steps_per_s"], "x", "near 1")
    for name, share in shares.items():
        judge_share(ctx, f"share_got_{name}", got[name], share)
        ctx.result.figure(f"slowdown_{name}", solo["steps_per_s"] / reports[name]["steps_per_s"], "x")


def measured_shares(ctx, arbiter, names, seconds):
    """Each job's part of the device time that these jobs used together, once all of them are at work."""
    deadline = time.monotonic() + ctx.limit(20)

    def device_ns():
        known = {job["name"]: job for job in arbiter.status()["jobs"]}
        return {name: known[name]["device_time_ns"] if name in known else 0 for name in names}

    before = first = device_ns()
    while min(first[name] - before[name] for name in names) < 100_000_000:
        if time.monotonic() > deadline:
            raise Failure(f"not all jobs came to run: device time in ns went from {before} to {first}")
        time.sleep(0.1)
        first = device_ns()
    time.sleep(ctx.limit(seconds))
    last = device_ns()
    used = {name: last[name] - first[name] for name in names}
    total = sum(used.values())
    if not total:
        raise Failure("no job used the device while it was watched")
    return {name: used[name] / total for name in names}


def judge_share(ctx, name, got, asked):
    """Two points are what is promised; five points off is a share that is not kept."""
    ctx.result.figure(name, got, "", at_least=asked - 0.02, at_most=asked + 0.02)
    ctx.result.check(f"{name} is within 5 points", abs(got - asked) <= 0.05, f"{got:.3f} of {asked}")


QUANTUM_MS = 5
KERNEL_US = 500


def handover(ctx):
    """Two tenants that never rest, at equal shares: from the end of one's last kernel to the begin of the other's first."""
    arbiter = ctx.arbiter(quantum_ms=QUANTUM_MS)
    stamped = [] if not ctx.simulated else ["host"]
    words = [ctx.place.probe(), "turns", "4", str(KERNEL_US), "1500", *stamped]
    solo_run = arbiter.json_of([ctx.place.probe(), "turns", "2", str(KERNEL_US), "1500", *stamped], "alone")
    running = [arbiter.start(words, f"tenant{n}", mem="1GiB", share=0.5) for n in range(2)]
    got = measured_shares(ctx, arbiter, ["tenant0", "tenant1"], 2)
    found = []
    for process in running:
        code = process.wait(ctx.limit(20))
        if code:
            raise Failure(f"{process.name} ended with {code}: {process.last_lines()}")
        found.append(last_json(process))
    judge_share(ctx, "share_got", got["tenant0"], 0.5)
    hands = paired(found, "host_gaps")
    ctx.result.check("they took turns", len(hands) >= 20, f"{len(hands)} hand-overs seen")
    if hands:
        ctx.result.figure("handovers", len(hands), "")
        ctx.result.figure("handover_host", statistics.median(hands), "us", "from one's last launch to the other's first")
        ctx.result.figure("handover_host_p90", sorted(hands)[len(hands) * 9 // 10], "us")
    if not ctx.simulated:
        ctx.result.check("the kernels wrote their stamps", all(row.get("stamps_written") for row in found))
        idle = paired(found, "device_gaps")
        if idle:
            ctx.result.figure("handover_device_idle", statistics.median(idle), "us", "device idle from one's last kernel to the other's first; negative: they overlap")
            ctx.result.figure("handover_device_idle_p90", sorted(idle)[len(idle) * 9 // 10], "us")
    rate = [row["kernels"] / (row["end_mono_ns"] - row["begun_mono_ns"]) for row in (*found, solo_run)]
    ctx.result.figure("pair_against_alone", (rate[0] + rate[1]) / rate[2], "x", ">= 0.98 while both run; their start and end are in it")
    if not ctx.simulated:
        unmanaged(ctx)
    host, _ = ctx.place.stub_bench()
    # The units of scripts/bench/overhead: two sleepers that share a core, and one that is woken on
    # another core after a turn.
    units = {"futex": ("futex_wake", "handover_wakes_shared_core"), "futex-busy": ("futex_wake_busy", "handover_wakes")}
    for mode, (unit, name) in units.items():
        took = [float(line) / 1000 for line in ctx.run([host, mode, "300"], mode, 30).stdout().split()]
        ctx.result.figure(unit, statistics.median(took), "us")
        if hands:
            ctx.result.figure(name, statistics.median(hands) / statistics.median(took), "wakes", "2.5 on a stub driver")


def unmanaged(ctx):
    """The same two without us: how long the hardware's own slices are, and what changing them costs."""
    words = [ctx.place.probe(), "turns", "2", str(KERNEL_US), "200"]
    running = [ctx.start(words, f"unmanaged{n}") for n in range(2)]
    for process in running:
        if process.wait(ctx.limit(15)):
            raise Failure(f"{process.name} failed: {process.last_lines()}")
    found = [last_json(process) for process in running]
    away = [(after - before) / 1000 for row in found for before, after in row.get("device_gaps", [])]
    if away:
        ctx.result.figure("hardware_away", statistics.median(away), "us", "without us: the other's slice and two switches")
    idle = paired(found, "device_gaps")
    if idle:
        ctx.result.figure("hardware_switch", statistics.median(idle), "us", "without us; negative: kernels that were cut by the slice overlap")


def paired(found, name):
    """Microseconds from each end of a turn to the begin of the other's turn that follows it."""
    hands = []
    for mine, theirs in ((found[0], found[1]), (found[1], found[0])):
        ends = [begin for begin, _ in theirs.get(name, [])]
        for _, resumed in mine.get(name, []):
            # Theirs began to pause closest to our resuming: that turn ended for us. Its end may
            # overlap our begin.
            nearest = min(ends, key=lambda end: abs(resumed - end), default=None)
            if nearest is not None and abs(resumed - nearest) < 2_000_000:
                hands.append((resumed - nearest) / 1000)
    return hands


# Launches at once and as many slowly, what a kernel takes and what the host does before a slow one,
# in microseconds: 10.8 ms of the device's time for 8.4 of the host's.
AHEAD = (60, 90, 140)
AHEAD_S = 4


def ahead(ctx):
    """Two programs whose host is ahead of the device and behind in turns, in slices of 10 ms and without us."""
    words = [ctx.place.probe(), "ahead", str(AHEAD_S), *map(str, AHEAD)]
    arbiter = ctx.arbiter(quantum_ms=10)

    def rates(start):
        running = [start(n) for n in range(2)]
        return [ctx.last_json_of(process, 30)["steps_per_s"] for process in running]

    # One baseline for both ways: by itself without us.
    solo_run = ctx.json_of(words, "solo", 30)["steps_per_s"]
    both = rates(lambda n: arbiter.start(words, f"ahead{n}", share=0.5))
    ctx.result.check("both got on", min(both) > 0.2 * solo_run, f"{both[0]:.1f} and {both[1]:.1f} of {solo_run:.1f} steps per second")
    ctx.result.figure("solo_run", solo_run, "steps/s", f"{1e6 / (2 * AHEAD[0] * AHEAD[1]):.1f} where the device is never idle")
    ctx.result.figure("in_slices", sum(both) / solo_run, "x", "0.84 simulated with a turn of 140 us, 0.80 with a bound of 2 ms")
    ctx.result.figure("unmanaged", sum(rates(lambda n: ctx.start(words, f"unmanaged{n}"))) / solo_run, "x", "without us")
