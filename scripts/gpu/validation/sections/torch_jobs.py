"""PyTorch, bare and governed. The workers (jobs/torch_worker.py) get the same commands and must answer the same."""

import statistics
import sys

from ..context import Worker, last_json
from ..processes import Failure
from .turns import judge_share, measured_shares

GIB = 1 << 30
MODELS = ("cnn", "gpt")


def command(ctx):
    return [sys.executable, ctx.place.jobs / "torch_worker.py", "--device", ctx.shared.get("torch_device", "cuda")]


def small(ctx):
    """Little work, for a rehearsal without a GPU."""
    return ctx.shared.get("small", False)


def both(ctx, arbiter, mem, env=None):
    """A bare worker and a governed one, started together."""
    bare = ctx.start(command(ctx), "bare", {**ctx.bare, **(env or {})}, piped=True)
    governed = arbiter.start(command(ctx), "governed", mem=mem, env=env, piped=True)
    return {"bare": Worker(ctx, bare), "governed": Worker(ctx, governed)}


def ask_all(workers, do, timeout_s, **arguments):
    """Tells all of them, then hears all of them: they work at once."""
    for worker in workers.values():
        worker.tell(do, **arguments)
    return {name: worker.answer(timeout_s, do) for name, worker in workers.items()}


def close_all(ctx, workers):
    for name, worker in workers.items():
        code = worker.close()
        ctx.result.check(f"{name} ends with exit code 0", code == 0, f"exit code {code}: {worker.process.last_lines()}" if code else "")


def solo(ctx):
    """Step times of the same steps, in turns: bare, governed, governed, bare. The other worker is idle meanwhile."""
    rounds, block_s, warm = (2, 0.1, 2) if small(ctx) else (8, 0.4, 20)
    workers = both(ctx, ctx.arbiter(), "50%")
    ctx.result.note(f"PyTorch {workers['bare'].ready['torch']}, CUDA {workers['bare'].ready['cuda']}; until the device was ready: "
                    f"bare {workers['bare'].ready['device_s']:.2f} s, governed {workers['governed'].ready['device_s']:.2f} s after the import")
    for model in MODELS:
        for name, worker in workers.items():
            worker.ask("setup", model=model, small=small(ctx))
        losses = {name: worker.ask("train", model=model, steps=warm)["losses"] for name, worker in workers.items()}
        again = workers["bare"].ask("train", model=model, steps=10)
        losses["bare"] += again["losses"]
        losses["governed"] += workers["governed"].ask("train", model=model, steps=10)["losses"]
        steps = max(5, min(400, round(block_s * 10 / again["seconds"])))
        ms = {name: [] for name in workers}
        for round_ in range(rounds):
            for name in ("bare", "governed") if round_ % 2 == 0 else ("governed", "bare"):
                done = workers[name].ask("train", model=model, steps=steps)
                ms[name].append(1000 * done["seconds"] / steps)
                losses[name] += done["losses"]
        middle = {name: statistics.median(values) for name, values in ms.items()}
        # Of each round its own ratio: what drifts from round to round is in both of its blocks.
        ratios = [governed / bare for governed, bare in zip(ms["governed"], ms["bare"])]
        ctx.result.figure(f"{model}_step_bare", middle["bare"], "ms")
        ctx.result.figure(f"{model}_step_governed", middle["governed"], "ms")
        ctx.result.figure(f"{model}_step_ratio", statistics.median(ratios), "x", at_most=1.005)
        ctx.result.figure(f"{model}_best_step_ratio", min(ms["governed"]) / min(ms["bare"]), "x", "the quickest block of each side")
        ctx.result.figure(f"{model}_bare_spread", (max(ms["bare"]) - min(ms["bare"])) / middle["bare"], "", "what a ratio below this is worth")
        # Only where PyTorch repeats itself can a difference be ours.
        workers["bare"].ask("setup", model=model, small=small(ctx))
        repeated = workers["bare"].ask("train", model=model, steps=warm)["losses"]
        if repeated != losses["bare"][:warm]:
            ctx.result.note(f"{model}: PyTorch alone does not repeat its own losses here, so they were not compared")
            continue
        same = losses["bare"] == losses["governed"]
        ctx.result.check(f"{model}: losses of all {len(losses['bare'])} steps are equal", same, "" if same else first_difference(losses))
    close_all(ctx, workers)


def first_difference(losses):
    pairs = list(zip(losses["bare"], losses["governed"]))
    at = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
    return f"first at step {at}: {pairs[at] if at < len(pairs) else 'different lengths'}"


def pair(ctx):
    seconds = 1 if small(ctx) else 6
    arbiter = ctx.arbiter()
    names = ("a", "b")
    started = {name: arbiter.start(command(ctx), name, mem="40%", share=0.5, piped=True) for name in names}
    workers = {name: Worker(ctx, process) for name, process in started.items()}
    ask_all(workers, "setup", 60, model="gpt", small=small(ctx))
    ask_all(workers, "train", 60, model="gpt", steps=20)
    solo_run = {name: worker.ask("train_for", model="gpt", seconds=seconds / 2)["steps_per_s"] for name, worker in workers.items()}
    for name in names:
        ctx.result.figure(f"alone_{name}", solo_run[name], "steps/s")
    beside = {}
    for shares in ({"a": 0.5, "b": 0.5}, {"a": 0.75, "b": 0.25}):
        if shares["b"] != 0.5:
            arbiter.set("b", shares["b"])
            arbiter.set("a", shares["a"])
        label = "/".join(f"{share:g}" for share in shares.values())
        for worker in workers.values():
            worker.tell("train_for", model="gpt", seconds=seconds + 3)
        got = measured_shares(ctx, arbiter, names, seconds)
        rates = {name: worker.answer(60, "train_for")["steps_per_s"] for name, worker in workers.items()}
        for name in names:
            judge_share(ctx, f"{label}_share_got_{name}", got[name], shares[name])
            ctx.result.figure(f"{label}_slowdown_{name}", solo_run[name] / rates[name], "x", f"about {1 / shares[name]:.2f} for a job that fills the device")
        beside[label] = rates
    close_all(ctx, workers)

    def sums(baseline, whose):
        for label, rates in beside.items():
            ctx.result.figure(f"{label}_sum_of_speeds", sum(rates[name] / baseline[name] for name in names), "x", whose)

    # TIMEOUT: two starts of PyTorch, warm now, and some seconds of training.
    if ctx.left() < 30:
        ctx.result.note("No time was left for the same pair without us.")
        sums(solo_run, "of one alone under sublet: no time was left for one alone without us")
        return
    started = {name: ctx.start(command(ctx), f"unmanaged_{name}", piped=True) for name in names}
    workers = {name: Worker(ctx, process) for name, process in started.items()}
    ask_all(workers, "setup", 60, model="gpt", small=small(ctx))
    ask_all(workers, "train", 60, model="gpt", steps=20)
    # The one baseline of all sums: each by itself without us.
    unmanaged = {name: worker.ask("train_for", model="gpt", seconds=seconds / 2)["steps_per_s"] for name, worker in workers.items()}
    beside["unmanaged"] = {name: row["steps_per_s"] for name, row in ask_all(workers, "train_for", 60, model="gpt", seconds=seconds * 0.6).items()}
    for name in names:
        ctx.result.figure(f"unmanaged_alone_{name}", unmanaged[name], "steps/s")
        ctx.result.figure(f"unmanaged_slowdown_{name}", unmanaged[name] / beside["unmanaged"][name], "x", "without us: the hardware's own slices")
    sums(unmanaged, "of one alone without us; above 1 where one alone leaves the device idle")
    close_all(ctx, workers)


def quota(ctx):
    """Two jobs train while a third takes all that it can get: it alone notices."""
    limit = 3 * GIB
    arbiter = ctx.arbiter()
    started = {
        "a": arbiter.start(command(ctx), "a", mem="4GiB", share=0.4, piped=True),
        "b": arbiter.start(command(ctx), "b", mem="4GiB", share=0.4, piped=True),
        "hog": arbiter.start(command(ctx), "hog", mem="3GiB", share=0.2, piped=True),
    }
    workers = {name: Worker(ctx, process) for name, process in started.items()}
    trainers = {"a": "gpt", "b": "cnn"}
    steps = 10 if small(ctx) else 150
    solo_run, beside = {}, {}
    for name, model in trainers.items():
        workers[name].ask("setup", model=model, small=small(ctx))
        solo_run[name] = workers[name].ask("train", model=model, steps=steps)["losses"]
    for name, model in trainers.items():
        workers[name].ask("setup", model=model, small=small(ctx))
    for name, model in trainers.items():
        workers[name].tell("train", model=model, steps=steps)
    taken = workers["hog"].ask("hog", chunk_bytes=128 << 20, most_bytes=20 * GIB)
    for name in trainers:
        beside[name] = workers[name].answer(60, "train")["losses"]
    for name in trainers:
        ctx.result.check(f"{name}: losses are those of a run alone", solo_run[name] == beside[name], first_difference({"bare": solo_run[name], "governed": beside[name]}) if solo_run[name] != beside[name] else "")
    judge_hog(ctx, taken, limit)
    refused = arbiter.refusals("hog")
    ctx.result.check("the arbiter counted the refusal", refused >= 1, f"{refused} refusals")
    job = arbiter.job("hog")
    ctx.result.check("its peak is within the quota", job["mem_peak_bytes"] <= limit, f"{job['mem_peak_bytes']} of {limit} bytes")
    memory = workers["hog"].ask("memory")
    ctx.result.check("PyTorch sees the quota as the device's memory", memory["total_bytes"] <= limit and memory["properties_total_bytes"] <= limit,
                     f"cuMemGetInfo {memory['total_bytes']}, properties {memory['properties_total_bytes']} bytes")
    for name in trainers:
        ctx.result.check(f"{name} was refused nothing", arbiter.job(name)["oom_count"] == 0)
        reserved, used = workers[name].ask("memory")["reserved_bytes"], arbiter.job(name)["mem_used_bytes"]
        # What PyTorch holds is metered, to the byte; libraries may hold more beside it.
        ctx.result.check(f"{name}: all that PyTorch reserved is metered", used >= reserved, f"{used} metered, {reserved} reserved")
        ctx.result.figure(f"{name}_metered_beyond_pytorch", (used - reserved) / (1 << 20), "MiB")
    close_all(ctx, workers)


def judge_hog(ctx, taken, limit):
    ctx.result.check("over the quota PyTorch raises its OutOfMemoryError", taken["oom"] == "OutOfMemoryError", f"{taken['oom']}: {taken['oom_message']}"[:400])
    ctx.result.check("no more than the quota was handed out", 0 < taken["allocated_bytes"] <= limit, f"{taken['allocated_bytes']} of {limit} bytes")
    ctx.result.figure("quota_used_before_refusal", taken["allocated_bytes"] / limit, "", "near 1")
    ctx.result.check("it works on after that", taken["works_after"])


def with_allocator(ctx, setting, seen):
    """The same training bare and governed with another allocator, then its limit."""
    limit = 3 * GIB
    # The older name is understood by all versions, the newer one is the documented one since 2.9.
    env = {"PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
    arbiter = ctx.arbiter()
    workers = both(ctx, arbiter, "3GiB", env)
    losses = {}
    for model in MODELS:
        ask_all(workers, "setup", 40, model=model, small=small(ctx))
        done = ask_all(workers, "train", 40, model=model, steps=40)
        losses[model] = {name: row["losses"] for name, row in done.items()}
        same = losses[model]["bare"] == losses[model]["governed"]
        ctx.result.check(f"{model}: losses are equal", same, "" if same else first_difference(losses[model]))
    memory = ask_all(workers, "memory", 20)
    for name, row in memory.items():
        ctx.result.check(f"{name}: the allocator is the one asked for", seen(row), f"backend {row['backend']}, {row['expandable_segments']} of {row['segments']} segments expandable")
    judge_hog(ctx, workers["governed"].ask("hog", chunk_bytes=128 << 20, most_bytes=20 * GIB), limit)
    refused = arbiter.refusals("governed")
    ctx.result.check("the arbiter counted the refusal", refused >= 1, f"{refused} refusals")
    job = arbiter.job("governed")
    ctx.result.check("its peak is within the quota", 0 < job["mem_peak_bytes"] <= limit, f"{job['mem_peak_bytes']} of {limit} bytes")
    close_all(ctx, workers)


def expandable(ctx):
    with_allocator(ctx, "expandable_segments:True", lambda row: row["expandable_segments"] > 0)


def async_alloc(ctx):
    with_allocator(ctx, "backend:cudaMallocAsync", lambda row: row["backend"] == "cudaMallocAsync")


def graphs(ctx):
    workers = both(ctx, ctx.arbiter(), "4GiB")
    done = ask_all(workers, "graph", 35, replays=300)
    for name, row in done.items():
        ctx.result.check(f"{name}: replays give what eager steps give", row["equals_eager"] or row["largest_difference"] < 1e-5,
                         f"largest difference {row['largest_difference']:.3g}")
    ctx.result.check("bare and governed replays are equal", done["bare"]["losses"] == done["governed"]["losses"])
    close_all(ctx, workers)


def example(ctx, script, *words):
    """An example script bare and governed at once; its losses must be the same."""
    full = [sys.executable, ctx.place.examples / script, "--json", "--progress-every", "0", *words]
    device = ctx.shared.get("torch_device", "cuda")
    full += ["--device", device]
    arbiter = ctx.arbiter()
    running = {"bare": ctx.start(full, "bare"), "governed": arbiter.start(full, "governed", mem="8GiB")}
    reports = {}
    for name, process in running.items():
        code = process.wait(ctx.limit(60))
        if code:
            raise Failure(f"{script} {' '.join(words)} {name} ended with exit code {code}: {process.last_lines()}")
        reports[name] = last_json(process)
        ctx.result.figure(f"{name}_steps_per_s", reports[name]["steps_per_s"], "steps/s", "both ran at once")
    bits = {name: row["loss_bits"] for name, row in reports.items()}
    ctx.result.check("losses are equal", len(set(bits.values())) == 1, bits)
    if device == "cuda":
        job = arbiter.job("governed")
        ctx.result.check("its memory was metered", job["mem_peak_bytes"] > 0, job["mem_peak_bytes"])
        ctx.result.check("its launches were seen", job["launches"] > 0, job["launches"])


def workers(ctx):
    example(ctx, "cnn.py", "--workers", "4", "--steps", "40", "--batch", "64")


def amp(ctx):
    example(ctx, "gpt_small.py", "--amp", "--steps", "60")


def compiled(ctx):
    """The governed one compiles (it forks compiler processes after the driver has started); the bare one finds what it compiled."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(ctx.directory / "inductor"), "TRITON_CACHE_DIR": str(ctx.directory / "triton")}
    arbiter = ctx.arbiter()
    sides = {
        "governed": lambda: arbiter.start(command(ctx), "governed", mem="8GiB", env=env, piped=True),
        "bare": lambda: ctx.start(command(ctx), "bare", {**ctx.bare, **env}, piped=True),
    }
    losses, failures = {}, []
    for name, begin in sides.items():
        # If one fails, whether the other does says whose fault it is.
        try:
            worker = Worker(ctx, begin())
            worker.ask("setup", model="gpt", compile=True, small=small(ctx))
            first = worker.ask("train", 70, model="gpt", steps=3)
            rest = worker.ask("train", model="gpt", steps=40)
        except Failure as failure:
            failures.append(str(failure))
            continue
        losses[name] = first["losses"] + rest["losses"]
        ctx.result.figure(f"{name}_first_steps", first["seconds"], "s", "the governed one compiles")
        ctx.result.figure(f"{name}_step", 1000 * rest["seconds"] / 40, "ms")
        close_all(ctx, {name: worker})
    if failures:
        raise Failure(("both fail, so it is not ours: " if len(failures) == 2 else "") + " // ".join(failures))
    same = losses["bare"] == losses["governed"]
    ctx.result.check("losses are equal", same, "" if same else first_difference(losses))


