"""Jobs as clients of MPS, by a control daemon of the section's own, which changes nothing of the device's settings."""

import shutil
import time

from ..context import Skip, last_json
from ..processes import Failure, describe
from .turns import judge_share, measured_shares

CONTROL = "nvidia-cuda-mps-control"
SHARES = {"a": 0.75, "b": 0.25}


def daemon(ctx):
    """The variables that make a program a client of a daemon that was started here."""
    control = shutil.which(CONTROL)
    if control is None:
        raise Skip(f"{CONTROL} is not on the path")
    env = {}
    for variable in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        directory = ctx.directory / variable.split("_")[2].lower()
        directory.mkdir(mode=0o700)
        env[variable] = str(directory)
    started = ctx.start([control, "-f"], "mps-control", {**ctx.bare, **env})
    deadline = time.monotonic() + ctx.limit(10)
    while not (ctx.directory / "pipe" / "control").exists():
        if started.has_exited():
            raise Skip(f"{CONTROL} does not run here: {describe(started.wait(5))}; {started.last_lines()}")
        if time.monotonic() > deadline:
            raise Failure(f"{CONTROL} made no pipe: {started.last_lines()}")
        time.sleep(0.05)
    return env


def mps(ctx):
    """Marks, shares, limits and results of two governed trainings under MPS, against a bare one under MPS."""
    program = ctx.place.program("train_mlp")
    if program is None:
        raise Skip("the program train_mlp is not in this build")
    env = daemon(ctx)
    found = ctx.probe("marks", name="marks-under-mps", timeout_s=30, env={**ctx.bare, **env})
    registered = found["register_status"] == 0
    lost = {stream: found[stream].get("lost", "all") for stream in ("null", "legacy", "per_thread", "created")} if registered else {}
    ctx.result.note(f"a sealed memfd can be registered: {registered}; marks lost by stream: {lost}")

    words = [program, "--json", "--progress-every", "0", "--epochs", "10", "--extra-us", "500"]
    bare = ctx.json_of([*words, "--min-seconds", "2"], "bare", 30, {**ctx.bare, **env})
    arbiter = ctx.arbiter()
    running = {name: arbiter.start([*words, "--min-seconds", "9"], name, mem="2GiB", share=share, env=env) for name, share in SHARES.items()}
    got = measured_shares(ctx, arbiter, list(SHARES), seconds=4)
    ways = {process["followed_by"] or "writes" for name in SHARES for process in arbiter.job(name)["processes"]}
    ctx.result.note(f"completion is followed by {', '.join(sorted(ways))}")
    losses = {"bare": bare["loss_bits"]}
    for name, process in running.items():
        code = process.wait(ctx.limit(40))
        if code:
            raise Failure(f"train_mlp {name} ended with {describe(code)}: {process.last_lines()}")
        losses[name] = last_json(process)["loss_bits"]
    ctx.result.check("losses are equal to the bit", len(set(losses.values())) == 1, losses)
    for name, share in SHARES.items():
        judge_share(ctx, f"share_got_{name}", got[name], share)
    refused = arbiter.run([program, "--epochs", "1", "--ballast", "4GiB"], "greedy", mem="2GiB", timeout_s=30, env=env, expect=None)
    ctx.result.check("more than the limit is refused", refused.returncode == 2, f"{describe(refused.returncode)}; {refused.last_lines()}")
