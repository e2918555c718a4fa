"""What researchers ask of this device: jobs recorded and replayed, and how much two jobs slow each other down."""

import json
import sys

from ..context import Skip
from ..frameworks import importable
from ..processes import Failure

# A recording is kept beside the logs, to be replayed elsewhere: of few steps, which are all alike.
STEPS = {"cnn": 40, "gpt": 24}
WINDOW = {"warm_up": "2500ms", "measured": "3500ms"}
# Replays are compared in the first one alone: they use no memory bandwidth.
MODES = ("exclusive", "auto", "concurrent", "plain")


def commands(ctx, steps):
    """Name and command of each job: two trainings that leave the device idle at times, or without PyTorch one of the driver's API."""
    if not ctx.simulated and importable(ctx, "torch") is None:
        shapes = {"cnn": ["cnn.py", "--workers", "4"], "gpt": ["gpt_small.py", "--amp", "--layers", "12", "--width", "1024", "--heads", "16"]}
        return {name: [sys.executable, ctx.place.examples / script, "--json", "--progress-every", "5", "--steps", steps.get(name, steps["any"]), *more]
                for name, (script, *more) in shapes.items()}
    program = ctx.place.program("train_mlp")
    if program is None:
        raise Skip("there is neither PyTorch nor the program train_mlp")
    return {"train_mlp": [program, "--json", "--progress-every", "1", "--extra-us", "500", "--steps", steps.get("train_mlp", steps["any"])]}


def record(ctx):
    """Each job recorded, its recording replayed, and the replay recorded: the same launches, as much device time, about as long."""
    ctx.logs.mkdir(parents=True, exist_ok=True)
    for name, command in commands(ctx, {"any": 400, **STEPS}).items():
        bare = ctx.json_of(command, f"{name}-bare", 40)
        first, shown, recorded = recording(ctx, name, command)
        ctx.result.check(f"{name}: its losses are those of the bare run", recorded["loss_bits"] == bare["loss_bits"],
                         f"{recorded['loss_bits']} and {bare['loss_bits']}")
        ctx.result.figure(f"{name}_recorded_step_ratio", bare["steps_per_s"] / recorded["steps_per_s"], "x", "what recording costs")
        ctx.result.figure(f"{name}_size", first.stat().st_size / 1e6, "MB")
        _, again, played = recording(ctx, f"{name}-again", sublet(ctx, "replay", "--json", first))
        once, twice = shown["recorded"], again["recorded"]
        for what in ("launches", "graph_launches", "copies", "copy_bytes"):
            ctx.result.check(f"{name}: the replay has as many {what}", once[what] == twice[what], f"{twice[what]} of {once[what]}")
        ctx.result.check(f"{name}: all launches were made", played["launches"] == once["launches"], f"{played['launches']} of {once['launches']}")
        ctx.result.figure(f"{name}_launches", once["launches"], "")
        ctx.result.figure(f"{name}_without_a_length", once["unmeasured"], "launches")
        ctx.result.figure(f"{name}_device_time", once["device_s"], "s")
        ctx.result.figure(f"{name}_device_time_error", 100 * (twice["device_s"] / once["device_s"] - 1), "%", at_least=-2, at_most=2)
        ctx.result.figure(f"{name}_host_time_error", 100 * (twice["host_s"] / once["host_s"] - 1), "%", "from the first call to the last, what a start loads in it, which is not replayed")
        ctx.shared.setdefault("recordings", {})[name] = first.read_bytes()


def sublet(ctx, *words):
    verb, *more = words
    return [ctx.place.sublet, verb, *(["--sim"] if ctx.simulated else []), *more]


def recording(ctx, name, command):
    """The file, what `sublet replay --show` says of it, and what the command said."""
    file = ctx.logs / f"{name}.slr"
    said = ctx.json_of([*sublet(ctx, "record", "-o", file), "--", *command], f"record-{name}", 60)
    shown = ctx.json_text([*sublet(ctx, "replay"), "--show", "--json", file], f"show-{name}", 30)
    end = shown["end"] or {}
    ctx.result.check(f"{name}: the recording is whole", not shown["cut"] and end.get("reason") == "command-ended" and not end.get("lost"),
                     f"{shown['cut']}; {end}")
    return file, shown, said


def interfere(ctx):
    """Two jobs alone and beside each other, in each mode and without us; and the replays of their recordings in slices."""
    jobs = commands(ctx, {"any": 1_000_000})
    lines = {name: ["command = " + json.dumps(list(map(str, command))), 'progress = { lines = "step ([0-9]+)", unit = "steps" }']
             for name, command in jobs.items()}
    found = experiment(ctx, "jobs", lines, MODES)
    recordings = ctx.shared.get("recordings", {})
    if not set(jobs) <= set(recordings):
        ctx.result.note("no replays: they are recorded by the section `record` of the same run")
        return
    for name in jobs:
        (ctx.directory / f"{name}.slr").write_bytes(recordings[name])
    replays = {name: ["recording = " + json.dumps(str(ctx.directory / f"{name}.slr"))] for name in jobs}
    replayed = experiment(ctx, "replays", replays, MODES[:1])
    for mode, name in replayed:
        if (mode, name) in found:
            error = 100 * (replayed[mode, name] - found[mode, name])
            ctx.result.figure(f"{mode}_{name}_replay_error", error, "points", "of a hundred, of one run each")


def experiment(ctx, name, jobs, modes):
    """`sublet interfere` with two jobs, or two of one; `jobs`: name -> lines of the plan. The slowdown of each by mode and name."""
    window = {key: "500ms" for key in WINDOW} if ctx.simulated else WINDOW
    lines = ["[experiment]", "repeat = 1", 'pairs = "none"', 'start_limit = "30s"', f"modes = {json.dumps(modes)}"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in window.items()]
    for job, what in jobs.items():
        lines += ["[[job]]", f"name = {json.dumps(job)}", *what]
    together = list(jobs) if len(jobs) > 1 else list(jobs) * 2
    lines += ["[[combination]]", f"jobs = {json.dumps(together)}"]
    plan, out = ctx.directory / f"{name}.toml", ctx.logs / f"{name}-report"
    plan.write_text("\n".join(lines) + "\n")
    # Its own arbiters, and none of the machine's settings.
    # The plan's modes are those of their devices.
    (ctx.directory / "sublet.toml").write_text("")
    env = {**ctx.bare, "SUBLET_RUNTIME_DIR": str(ctx.directory), "SUBLET_CONFIG": str(ctx.directory / "sublet.toml")}
    done = ctx.run([*sublet(ctx, "interfere"), plan, "--out", out], f"interfere-{name}", 600, env, expect=None)
    try:
        report = json.loads((out / "report.json").read_text())
    except (OSError, ValueError) as why:
        raise Failure(f"no report ({why}): {done.last_lines()}") from None
    ctx.result.check(f"{name}: every run was made", done.returncode == 0 and not report["failed"],
                     "" if done.returncode == 0 else f"exit code {done.returncode}; {report['failed']}; {done.last_lines()}"[:1200])
    found = {(row["mode"], row["job"]): row["slowdown"] for row in report["slowdowns"] if row["slowdown"] is not None}
    solo = {(row["mode"], row["job"]): row["speed"] for row in report["solo"] if row["speed"]}
    for mode in modes:
        slowdowns = {job: found[mode, job] for job in jobs if (mode, job) in found}
        for job, slowdown in slowdowns.items():
            ctx.result.figure(f"{name}_{mode}_{job}_slowdown", slowdown, "x")
        # Slowdowns are of runs of one mode. Sums of modes are compared, so all have one baseline:
        # each job by itself without us.
        if len(slowdowns) == 2 and all(("plain", job) in solo for job in slowdowns):
            speeds = [solo[mode, job] / slowdown / solo["plain", job] for job, slowdown in slowdowns.items()]
            ctx.result.figure(f"{name}_{mode}_sum_of_speeds", sum(speeds), "x", "of one alone without us")
    return found
