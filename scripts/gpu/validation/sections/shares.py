"""Who gets how much of the device, and what a guaranteed job loses to an opportunistic one: the short forms of scripts/bench/fairness and
scripts/bench/protect, which also run where no device keeps an account.

What a job really had is what its kernels did: they do a fixed number of steps (`load --steps-per-us`), measured on the device while
nobody else uses it, and get on only while they run. Kernels that look at the clock would end as fast beside others as alone.
"""

import time

from ..context import Skip, last_json
from ..processes import Failure

QUANTUM_MS = 5
FAIR_S = 3
# (weight, kernel in microseconds)
FAIR = {
    "equal": [(1, 500), (1, 500)],
    "3_to_1": [(3, 1000), (1, 1000)],
    "mixed_kernels": [(4, 100), (2, 1000), (1, 5000)],
}
PROTECT_S = 3
KERNEL_US = 500
# Training: 60 ms of work, 40 ms of host. A service: a request of 2 ms every 20 ms.
PROTECTED = {"training": {"burst": 120, "pause-us": 40_000}, "service": {"burst": 4, "every-us": 20_000}}
WINDOW_US = 2000


def load(ctx, name, kernel_us, seconds, **shape):
    """The command line of a load, its kernels as long as they would be on a device of their own."""
    program = ctx.place.program("load")
    if program is None:
        raise Skip("the program load is not in this build")
    if "steps_per_us" not in ctx.shared:
        ctx.shared["steps_per_us"] = ctx.json_of([program, "--calibrate"], "calibrate", 15)["steps_per_us"]
    words = [program, "--json", "--name", name, "--kernel-us", kernel_us, "--steps-per-us", f"{ctx.shared['steps_per_us']:.3f}"]
    words += ["--for-ms", int(seconds * 1000)]
    for key, value in shape.items():
        words += [f"--{key}", value]
    return list(map(str, words))


def ended(ctx, running):
    """The reports of all loads, once they have ended."""
    found = {}
    for name, process in running.items():
        code = process.wait(ctx.limit(20))
        if code:
            raise Failure(f"{name} ended with {code}: {process.last_lines()}")
        found[name] = last_json(process)
    return found


def fairness(ctx):
    """Tenants that always want the device, of several weights and kernel lengths, each case under an arbiter of its own."""
    seconds = 1 if ctx.shared.get("small") else FAIR_S
    for case, tenants in FAIR.items():
        arbiter = ctx.arbiter(quantum_ms=QUANTUM_MS)
        whole = sum(weight for weight, _ in tenants)
        running = {}
        for nth, (weight, kernel_us) in enumerate(tenants):
            name = f"{case}_{nth}"
            command = load(ctx, name, kernel_us, seconds + 3)
            running[name] = arbiter.start(command, name, share=int(1e6 * weight / whole) / 1e6)
        lengths_ns = {f"{case}_{nth}": 1000 * kernel_us for nth, (_, kernel_us) in enumerate(tenants)}
        begun_ns, first, end_ns, last = watched(ctx, arbiter, list(running), seconds)
        reports = ended(ctx, running)
        used = {name: (last[name]["launches"] - first[name]["launches"]) * lengths_ns[name] for name in running}
        charged = {name: last[name]["device_time_ns"] - first[name]["device_time_ns"] for name in running}
        if not all(used.values()) or not all(charged.values()):
            raise Failure(f"{case}: not all jobs came to run: {used}")
        due = {f"{case}_{nth}": weight / whole for nth, (weight, _) in enumerate(tenants)}

        def points(account):
            return max(abs(100 * account[name] / sum(account.values()) - 100 * due[name]) for name in due)

        # What is in flight at both ends of the time, and a kernel of each, nobody can tell apart.
        grain = 100 * (max(lengths_ns.values()) + WINDOW_US * 1000) / (end_ns - begun_ns)
        error = points(used)
        ctx.result.figure(f"{case}_share_error", error, "points", f"1 and what is in flight ({grain:.2f})", at_most=1 + grain)
        ctx.result.figure(f"{case}_charge_error", points(charged), "points", at_most=1)
        ctx.result.check(f"{case}: shares are within 5 points", error <= 5 + grain, {name: round(value / sum(used.values()), 3) for name, value in used.items()})
        turn_us = max(max(QUANTUM_MS * 1000, kernel_us) * whole / weight for weight, kernel_us in tenants)
        stalls = [us for report in reports.values() for us, until_ns in report["stalls_us_until_mono_ns"] if begun_ns <= until_ns - us * 1000 and until_ns <= end_ns]
        ctx.result.figure(f"{case}_stall", max(stalls, default=0) / turn_us, "turns", at_most=2)
        ctx.result.figure(f"{case}_idle_while_wanted", 100 * (1 - sum(used.values()) / (end_ns - begun_ns)), "%", "launch gaps in it", at_most=2 + grain)


def watched(ctx, arbiter, names, seconds):
    """Times and what the arbiter says of each job at both ends of a time in which all of them are at work."""
    deadline = time.monotonic() + ctx.limit(20)

    def look():
        jobs = {job["name"]: job for job in arbiter.status()["jobs"]}
        return time.monotonic_ns(), {name: jobs.get(name, {"launches": 0, "device_time_ns": 0}) for name in names}

    _, seen = look()
    while min(job["device_time_ns"] for job in seen.values()) < 50_000_000:
        if time.monotonic() > deadline:
            raise Failure(f"not all jobs came to run: {({name: job['device_time_ns'] for name, job in seen.items()})} ns of device time")
        time.sleep(0.05)
        _, seen = look()
    begun_ns, first = look()
    time.sleep(ctx.limit(seconds))
    end_ns, last = look()
    return begun_ns, first, end_ns, last


def protect(ctx):
    """A guaranteed load alone, with an opportunistic one beside it, and with the same one and nobody between them."""
    seconds = 1 if ctx.shared.get("small") else PROTECT_S
    for case, shape in PROTECTED.items():
        greedy = load(ctx, "opportunistic", KERNEL_US, seconds + 1)
        words = load(ctx, "guaranteed", KERNEL_US, seconds, **shape)
        arbiter = ctx.arbiter()
        flags = {"guaranteed": ("--share", "0.9"), "opportunistic": ("--class", "opportunistic")}

        def governed(command, name):
            return ctx.start(arbiter.command(command, name, flags=flags[name]), f"{case}_{name}", arbiter.env)

        solo_run = ended(ctx, {"guaranteed": governed(words, "guaranteed")})["guaranteed"]
        left = 1 - busy(solo_run)
        for how, start in (("", governed), ("_unmanaged", lambda command, name: ctx.start(command, f"{case}_{name}_unmanaged"))):
            # The opportunistic one is at work before the other begins, and ends after it.
            other = start(greedy, "opportunistic")
            time.sleep(ctx.limit(0.5))
            found = ended(ctx, {"guaranteed": start(words, "guaranteed"), "opportunistic": other})
            kept = found["guaranteed"]["bursts_per_s"] / solo_run["bursts_per_s"]
            # The opportunistic one was alone for what it ran longer.
            longer_s = max(found["opportunistic"]["seconds"] - found["guaranteed"]["seconds"], 0)
            did_s = busy(found["opportunistic"]) * found["opportunistic"]["seconds"] - longer_s
            got = did_s / found["guaranteed"]["seconds"] / left
            p99, own = found["guaranteed"]["latency_us"]["p99"], solo_run["latency_us"]["p99"]
            ours = how == ""
            ctx.result.figure(f"{case}{how}_vs_solo", kept, "x", at_least=0.98 if ours else None)
            ctx.result.figure(f"{case}{how}_of_leftover", got, "x", at_least=0.8 if ours else None)
            ctx.result.figure(f"{case}{how}_p99", p99 / 1000, "ms", at_most=(1.1 * own + WINDOW_US) / 1000 if ours and case == "service" else None)
            if ours:
                ctx.result.check(f"{case}: the guaranteed job's share of its own rate is nine tenths", kept >= 0.9, f"{kept:.3f}")
                ctx.result.check(f"{case}: the other one's share of what is left is half", got >= 0.5, f"{got:.3f} of {left:.3f}")
        ctx.result.figure(f"{case}_alone_p99", own / 1000, "ms")


def busy(report):
    """Device time that a load's kernels take, as a part of the time that it ran."""
    return report["kernels"] * KERNEL_US / 1e6 / report["seconds"]
