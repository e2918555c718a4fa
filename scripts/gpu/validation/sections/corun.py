"""Jobs side by side in each mode: what they keep of their speed, and what the device does between them that decides it."""

import statistics

from ..context import Worker
from . import mps
from .torch_jobs import close_all, command, small

# --- what the hardware does, without us

# Kernels of the busy process and of the bursts, their pause, and long kernels, in microseconds.
BUSY_US, BURST_US, PAUSE_US, LONG_US = 500, 50, 5000, 50_000
SECONDS = 2


def facts(ctx):
    """How the device changes between processes, by the host's clock: after idleness, when a queue is empty, around blocked and long work."""
    seconds = 0.3 if ctx.simulated else SECONDS
    probe = ctx.place.probe()
    burst = [probe, "bursts", str(seconds), "1", str(BURST_US), str(PAUSE_US)]

    def busy(kernel_us, longer=0.0):
        return [probe, "turns", str(seconds + longer), str(kernel_us), str(2 * kernel_us + 200), "host"]

    def both(name, first, second):
        started = [ctx.start(words, f"{name}-{at}") for at, words in enumerate((first, second))]
        return [ctx.last_json_of(process, 20) for process in started]

    def median_us(found):
        return statistics.median(found["burst_ns"]) / 1000

    def rate(found):
        return found["kernels"] * 1e9 / (found["end_mono_ns"] - found["begun_mono_ns"])

    solo = ctx.json_of(burst, "burst-solo", 20)
    solo_rate = rate(ctx.json_of(busy(BUSY_US), "busy-solo", 20))
    ctx.result.check("bursts and kernels were measured", solo["bursts"] > 5 and solo_rate > 0, f"{solo['bursts']} bursts, {solo_rate:.0f} kernels a second")
    ctx.result.figure("burst_solo", median_us(solo), "us", f"a kernel of {BURST_US} us and the wait for it")

    # Each comes to a device that is idle and was the other one's last.
    pair = both("idle", burst, burst)
    ctx.result.figure("turn_after_idleness", statistics.median(map(median_us, pair)) - median_us(solo), "us",
                      "what two processes that both rest most of the time add to each other's bursts; about 140 where such a turn is paid")
    # The busy one lasts longer, so that every burst is beside it.
    found = both("empty", busy(BUSY_US, 0.5), burst)
    ctx.result.figure("burst_beside_busy", median_us(found[1]), "us", "a burst beside kernels without a pause")
    beside = rate(found[0])
    lost_s = (1 - beside / solo_rate) * (found[0]["end_mono_ns"] - found[0]["begun_mono_ns"]) / 1e9
    if found[1]["bursts"]:
        ctx.result.figure("lost_for_each_burst", 1e6 * lost_s / found[1]["bursts"], "us",
                          f"{BURST_US} and two turns where a process with an empty queue leaves at once; 2,000 more where it keeps its slice")
    found = both("blocked", busy(BUSY_US), [probe, "blocked", str(seconds)])
    ctx.result.check("a stream waited all the time", found[1]["waited"], found[1])
    ctx.result.figure("kept_beside_a_blocked_stream", rate(found[0]) / solo_rate, "x", "1 where a stream that waits takes no slices")
    found = both("long", busy(LONG_US, 0.5), burst)
    ctx.result.figure("burst_beside_long_kernels", median_us(found[1]), "us", f"some thousand where kernels of {LONG_US / 1000:g} ms are cut at the end of a slice, half of one or more where they are not")


# --- trainings

PAIRS = {"cnn_gpt": ("cnn", "gpt"), "two_gpts": ("gpt", "gpt_too")}
JOBS = ("cnn", "gpt", "gpt_too")
SHARES = ((0.5, 0.5), (0.75, 0.25))
# Of every job at first, and of the job outside the pair.
IDLE_SHARE = 0.2
MODES = ("exclusive", "lend")
ROUNDS = 3


def model_of(job):
    return job.split("_")[0]


def workers_of(ctx, env=None):
    """Each job's worker without us and its worker under an arbiter. The arbiter comes with them."""
    arbiter = ctx.arbiter()
    started = {("plain", job): ctx.start(command(ctx), f"plain-{job}", {**ctx.bare, **(env or {})}, piped=True) for job in JOBS}
    for job in JOBS:
        started["governed", job] = arbiter.start(command(ctx), job, mem="20%", share=IDLE_SHARE, env=env, piped=True)
    workers = {key: Worker(ctx, process) for key, process in started.items()}
    for (_, job), worker in workers.items():
        worker.ask("setup", model=model_of(job), small=small(ctx))
    for (_, job), worker in workers.items():
        worker.ask("train", model=model_of(job), steps=20)
    return arbiter, workers


def rates(workers, side, jobs, seconds):
    """Steps a second of jobs that run at once."""
    there = {job: workers[side, job] for job in jobs}
    for job, worker in there.items():
        worker.tell("train_for", model=model_of(job), seconds=seconds)
    return {job: worker.answer(60, "train_for")["steps_per_s"] for job, worker in there.items()}


def share(arbiter, pair, shares):
    """Divides what the idle job's promise leaves, which comes to the shares while that is idle. First all fall, so that they never sum to more than 1."""
    for job, of in [*((job, IDLE_SHARE) for job in JOBS), *((job, of * (1 - IDLE_SHARE)) for job, of in zip(pair, shares))]:
        arbiter.set(job, of)


def compare(ctx, arbiter, workers, prefix="", pairs=PAIRS, rounds=ROUNDS):
    """Every pair in every way, in turns, each round with its baseline: each job by itself without us."""
    seconds = 0.5 if small(ctx) else 2.5
    jobs = list(dict.fromkeys(job for pair in pairs.values() for job in pair))
    sums, below, why = {}, {}, set()

    def keep(key, solo, got, shares):
        speeds = [got[job] / solo[job] for job in got]
        sums.setdefault(key, []).append(sum(speeds))
        below.setdefault(key, []).append(min(speed - of for speed, of in zip(speeds, shares)))

    done = 0
    for at in range(rounds):
        # TIMEOUT: of a round's runs, with what it takes to change between them.
        if at and ctx.left() < (len(jobs) + 5 * len(pairs)) * (seconds + 0.6):
            break
        solo = {job: rates(workers, "plain", [job], seconds)[job] for job in jobs}
        for name, pair in pairs.items():
            keep((name, "plain", SHARES[0]), solo, rates(workers, "plain", pair, seconds), SHARES[0])
            for shares in SHARES:
                share(arbiter, pair, shares)
                for mode in MODES[:: 1 if at % 2 else -1]:
                    arbiter.set_mode(mode)
                    # Until weights are known, and gates have moved.
                    rates(workers, "governed", pair, seconds / 5)
                    keep((name, mode, shares), solo, rates(workers, "governed", pair, seconds), shares)
                    device = arbiter.status()["devices"][0]
                    why.add(f"{mode}: {device['running_reason'] or device['running']}")
        done += 1
    ctx.result.note(f"{done} of {rounds} rounds; how the device ran: {'; '.join(sorted(why))}")
    for (name, mode, shares), values in sums.items():
        label = f"{prefix}{name}_{mode}" + ("" if shares == SHARES[0] else "_3_1")
        ctx.result.figure(f"{label}_sum_of_speeds", statistics.median(values), "x", f"of each by itself without us; from {min(values):.3f} to {max(values):.3f}")
        if mode != "plain":
            ctx.result.figure(f"{label}_margin", 100 * min(below[name, mode, shares]), "points", "worst speed less share, of all rounds", at_least=-2)
    for name in pairs:
        ratio = [lend / plain for lend, plain in zip(sums[name, "lend", SHARES[0]], sums[name, "plain", SHARES[0]])]
        ctx.result.figure(f"{prefix}{name}_lend_over_plain", statistics.median(ratio), "x", at_least=0.97)
    ctx.result.check(f"{prefix}every way was measured", len(sums) == 5 * len(pairs) and done >= 1, f"{len(sums)} ways in {done} rounds")


def corun(ctx):
    """CNN and GPT, and two GPTs, at 1/2 and 3/4:1/4: without us, in slices and with lend."""
    arbiter, workers = workers_of(ctx)
    compare(ctx, arbiter, workers)
    close_all(ctx, {"-".join(key): worker for key, worker in workers.items()})


def under_mps(ctx):
    """The same pair of a CNN and a GPT as clients of MPS, in one round."""
    env = mps.daemon(ctx)
    arbiter, workers = workers_of(ctx, env)
    ways = {process["followed_by"] or "writes" for job in PAIRS["cnn_gpt"] for process in arbiter.job(job)["processes"]}
    ctx.result.note(f"completion is followed by {', '.join(sorted(ways))}")
    compare(ctx, arbiter, workers, "mps_", {"cnn_gpt": PAIRS["cnn_gpt"]}, rounds=1)
    close_all(ctx, {"-".join(key): worker for key, worker in workers.items()})
