"""Memory that leaves the device and comes back: link rates, contents, PyTorch in mid-training, more jobs than memory."""

import json
import os
import statistics
import sys
import time

from ..context import Skip, Worker, last_json, read_line
from ..processes import Failure
from .torch_jobs import command as torch_command
from .torch_jobs import first_difference, small

MIB, GIB = 1 << 20, 1 << 30
ROUNDS = 3
CONFIG = '[residency]\nhost_memory = "{}B"\n'


def program(ctx, name):
    path = ctx.place.program(name)
    if path is None:
        raise Skip(f"the program {name} is not in this build")
    return path


def host_bytes():
    """Memory that the host can give without a word to anybody."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 4 * GIB


def arbiter_with_space(ctx, bytes_):
    # The simulated device's copies take what was really written, a small part.
    return ctx.arbiter(config=CONFIG.format(bytes_ if not ctx.simulated else 64 * GIB))


class Tenant:
    """A job of a known content that obeys commands (`examples/src/bin/tenant.rs`)."""

    def __init__(self, ctx, arbiter, name, bytes_, seed, evictable=True):
        """One that is not evictable only holds its memory."""
        self.ctx, self.name = ctx, name
        words = [program(ctx, "tenant"), "--name", name, "--bytes", f"{bytes_}B", "--seed", str(seed)]
        # All of it is written: an eviction copies what has changed. The simulated device's memory
        # is the host's, so that it has to be little there.
        words += [] if ctx.simulated or not evictable else ["--stripe", "64MiB", "--span", "64MiB"]
        flags = ["--evictable", "--host-memory", f"{bytes_ + GIB}B"] if evictable else []
        mem = f"{bytes_ + GIB}B"
        self.process = ctx.start(arbiter.command(words, name, mem, flags=flags), name, arbiter.env, piped=True)
        self.answer(60)

    def answer(self, timeout_s=30):
        return json.loads(read_line(self.process, self.ctx.limit(timeout_s)))

    def ask(self, line):
        self.process.popen.stdin.write((line + "\n").encode())
        self.process.popen.stdin.flush()
        return self.answer()

    def wrong(self):
        said = self.ask("check")
        return said["wrong_by_kernel"] + said["wrong_by_copy"], said["stripes"]


def move(ctx, arbiter, verb, *names):
    """`sublet evict`, `restore` or `switch`; all must arrive."""
    said = ctx.json_text([ctx.place.sublet, verb, "--json", *names], verb, 60, arbiter.env, expect=(0, 1, 125))
    if "jobs" not in said:
        raise Failure(f"{verb} of {', '.join(names)} was refused: {said}")
    for job in said["jobs"]:
        if job["outcome"] != "done":
            raise Failure(f"{verb} of {job['job']}: {job['outcome']}: {job['reason']}")
    return {job["job"]: job for job in said["jobs"]}, said


def residency(ctx):
    size = 2 * GIB if ctx.simulated else max(GIB, min(4 * GIB, host_bytes() // 6)) // (2 * MIB) * 2 * MIB
    link = ctx.json_of([program(ctx, "tenant"), "--link", "--bytes", f"{size}B"], "link", 40)
    arbiter = arbiter_with_space(ctx, 3 * size)
    a = Tenant(ctx, arbiter, "a", size, 1)
    first, _ = move(ctx, arbiter, "evict", "a")
    ctx.result.figure("size", size / GIB, "GiB")
    ctx.result.figure("first_evict", first["a"]["moving_ns"] / 1e6, "ms", "locks the host's memory on the way")
    move(ctx, arbiter, "restore", "a")
    times = {"evict": [], "restore": []}
    for _ in range(ROUNDS):
        a.ask("change 0 1")
        for verb, taken in times.items():
            moved, _ = move(ctx, arbiter, verb, "a")
            taken.append(moved["a"])
    for verb, floor in (("evict", "out_s"), ("restore", "in_s")):
        took_ns = statistics.median(one["moving_ns"] for one in times[verb])
        part = times[verb][-1]["copied_bytes"] / size
        ctx.result.figure(verb, took_ns / 1e6, "ms")
        ctx.result.figure(f"{verb}_link_fraction", link[floor] * 1e9 * part / took_ns, "x", at_least=0.85)
    unchanged, _ = move(ctx, arbiter, "evict", "a")
    ctx.result.figure("evict_unchanged", unchanged["a"]["moving_ns"] / 1e6, "ms", "nothing was written since it was here last")
    move(ctx, arbiter, "restore", "a")
    solo_ms = max(statistics.median(one["elapsed_ns"] for one in taken) for taken in times.values()) / 1e6
    move(ctx, arbiter, "evict", "a")
    b = Tenant(ctx, arbiter, "b", size, 2)
    switches = []
    for n in range(2 * ROUNDS):
        names = ("b", "a") if n % 2 == 0 else ("a", "b")
        _, said = move(ctx, arbiter, "switch", *names)
        (a if n % 2 == 0 else b).ask("change 0 1")
        switches.append(said["elapsed_ns"] / 1e6)
    duplex_ms = statistics.median(switches[1:])
    ctx.result.figure("duplex", duplex_ms, "ms")
    ctx.result.figure("duplex_over_longer", duplex_ms / solo_ms, "x", at_most=1.2)
    ctx.result.figure("duplex_over_link", duplex_ms / (link["both_s"] * 1e3), "x", "the link with both directions at once")
    wrong, stripes = b.wrong()
    move(ctx, arbiter, "switch", "b", "a")
    more, other = a.wrong()
    ctx.result.check("every stripe holds what was written to it", wrong + more == 0, f"{wrong + more} of {stripes + other}")


def pytorch(ctx):
    """A training evicted and restored in its middle, against the same steps bare."""
    steps = 40 if small(ctx) else 300
    arbiter = arbiter_with_space(ctx, host_bytes() // 2)
    flags = ["--evictable"]
    bare = Worker(ctx, ctx.start(torch_command(ctx), "bare", piped=True))
    governed = Worker(ctx, ctx.start(arbiter.command(torch_command(ctx), "governed", "50%", flags=flags), "governed", arbiter.env, piped=True))
    for model in ("cnn", "gpt"):
        losses = {}
        for name, worker in (("bare", bare), ("governed", governed)):
            worker.ask("setup", model=model, small=small(ctx))
        losses["bare"] = bare.ask("train", model=model, steps=steps)["losses"]
        governed.tell("train", model=model, steps=steps)
        moves = 0
        for _ in range(3):
            time.sleep(0.2)
            out, _ = move(ctx, arbiter, "evict", "governed")
            back, _ = move(ctx, arbiter, "restore", "governed")
            moves += 1
            ctx.result.note(f"{model}: {out['governed']['copied_bytes'] / MIB:.0f} MiB out in {out['governed']['elapsed_ns'] / 1e6:.0f} ms, "
                            f"back in {back['governed']['elapsed_ns'] / 1e6:.0f} ms")
        losses["governed"] = governed.answer(60, "train")["losses"]
        again = bare.ask("setup", model=model, small=small(ctx)) and bare.ask("train", model=model, steps=steps)["losses"]
        if again != losses["bare"]:
            ctx.result.note(f"{model}: PyTorch alone does not repeat its own losses here, so they were not compared")
            continue
        same = losses["bare"] == losses["governed"]
        ctx.result.check(f"{model}: losses of {steps} steps with {moves} evictions are those of the bare run", same,
                         "" if same else first_difference(losses))
    residence = arbiter.job("governed")["residence"]
    ctx.result.note(f"where its memory is: {json.dumps(residence)}")
    for worker in (bare, governed):
        worker.close()


def oversubscribe(ctx):
    """Three trainings with 2.2 times the memory that they may use together; what they do not get of the device an idle job holds."""
    train = program(ctx, "train_mlp")
    total = ctx.probe("device")["devices"][0]["total_bytes"] if not ctx.simulated else None
    if ctx.simulated:
        # Contexts do not move: three of them have to lie beside one job's memory.
        space = 6 * GIB
        ctx.bare["SUBLET_SIM_CAPACITY"] = f"{space}B"
    else:
        # So small that locking as much of the host's memory is soon done, and that a turn in the
        # device's memory, ten times what a switch takes, is shorter than a training.
        space = int(min(total * 0.9, host_bytes() / 6, 2 * GIB))
    quota = int(space * 2.2 / 3) // (2 * MIB) * 2 * MIB
    history = quota - 160 * MIB
    steps = "3000" if ctx.simulated else "4500"
    words = [train, "--json", "--progress-every", "0", "--steps", steps, "--extra-us", "1000", "--history", f"{history}B", "--seed"]
    arbiter = arbiter_with_space(ctx, 4 * quota)
    if not ctx.simulated:
        Tenant(ctx, arbiter, "ballast", int(total * 0.97) - space, 9, evictable=False)
    solo, serial_s = {}, 0.0
    for seed in ("1", "2", "3"):
        begun = time.monotonic()
        solo[seed] = ctx.json_of([*words, seed], f"solo{seed}", 40)["loss_bits"]
        serial_s += time.monotonic() - begun
    plain = [ctx.start([*words, seed], f"plain{seed}") for seed in solo]
    codes = [process.wait(ctx.limit(60)) for process in plain]
    ctx.result.check("without sublet some are out of memory", codes.count(2) >= 1, codes)
    flags = ["--evictable", "--host-memory", f"{quota}B"]
    begun = time.monotonic()
    running = {seed: ctx.start(arbiter.command([*words, seed], f"job{seed}", f"{quota}B", 0.3, flags), f"job{seed}", arbiter.env) for seed in solo}
    switches = 0
    while not all(process.has_exited() for process in running.values()):
        ctx.limit(1)
        devices = arbiter.status()["devices"]
        switches = max([switches, *[device["pressure"]["switches"] for device in devices]])
        time.sleep(0.2)
    together_s = time.monotonic() - begun
    bits = {}
    for seed, process in running.items():
        code = process.wait(ctx.limit(10))
        if code:
            raise Failure(f"job{seed} ended with {code}: {process.last_lines()}")
        bits[seed] = last_json(process)["loss_bits"]
    differ = [seed for seed in solo if solo[seed] != bits[seed]]
    ctx.result.check("losses are those of the runs alone", not differ, {"alone": solo, "together": bits})
    ctx.result.figure("loss_differences", len(differ), "", at_most=0)
    ctx.result.figure("together_over_one_after_another", together_s / serial_s, "x", "switches are in it; scripts/demo --oversubscribe takes them out")
    ctx.result.figure("switches", switches, "")
