"""Three training jobs whose memories do not fit on the device together, and what they need to train there all the same.

Each has a quota of 0.73 of the device, together 2.2 of it, and uses nearly all of its own (`train_mlp --history`: every step reads and
writes a part of it, so that a lost byte changes the losses). They run one after another for the baseline, then together without
sublet, where there is memory for one, then together under sublet as evictable jobs.
"""

import json
import os
import subprocess
import time

GIB = 1 << 30
MIB = 1 << 20
JOBS = ("one", "two", "three")
# Sum of the quotas, in devices.
OVER = 2.2
# Of the simulated device: large enough that moving takes time, and nothing that a small host could
# not hold a part of.
SIM_DEVICE = 6 * GIB
# What a job leaves of its quota to its context's and network's small things.
SPARE = 160 * MIB
EXTRA_US = 1000
MAX_MAKESPAN = 1.1
OUT_OF_MEMORY_EXIT = 2


def device_bytes(stage, demo):
    """What the device has for programs."""
    probe = (
        "import ctypes\n"
        "cuda = ctypes.CDLL('libcuda.so.1')\n"
        "device, total = ctypes.c_int(), ctypes.c_size_t()\n"
        "assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0\n"
        "assert cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device) == 0\n"
        "print(total.value)\n"
    )
    environment = dict(stage.environment)
    if stage.simulated:
        environment["LD_LIBRARY_PATH"] = str(demo.TARGET / "sim")
    done = subprocess.run([demo.sys.executable, "-c", probe], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise demo.Failure(f"the device's memory cannot be asked for: {done.stderr.strip()}")
    return int(done.stdout)


def program(demo, name, history, steps):
    return [
        demo.TARGET / "train_mlp",
        "--name", name,
        "--seed", JOBS.index(name) + 1,
        "--history", f"{history}B",
        "--steps", steps,
        "--extra-us", EXTRA_US,
        "--progress-every", 0,
        "--json",
    ]  # fmt: skip


def wait_all(stage, names, deadline_s):
    """Until all of them have ended; what `ps` said last of the device while they ran."""
    deadline, last = time.monotonic() + deadline_s, {}
    while any(stage.jobs[name][0].poll() is None for name in names):
        if time.monotonic() > deadline:
            running = [name for name in names if stage.jobs[name][0].poll() is None]
            return last, running
        jobs, devices = stage.status()
        if devices:
            last["pressure"] = devices[0].get("pressure", last.get("pressure", {}))
        for name in names:
            if name in jobs and jobs[name].get("residence"):
                last[name] = jobs[name]["residence"]
        time.sleep(0.1)
    return last, []


def link_rates(stage, demo):
    """Bytes per second out and in, by copies of their own on the idle device."""
    process = stage.start("link", [], [demo.TARGET / "tenant", "--link", "--bytes", "1GiB"], solo_run=True)
    process.wait()
    out, err = stage.said("link")
    if process.returncode != 0:
        raise demo.Failure(f"the link cannot be measured: {err.strip()}")
    found = json.loads(out.strip().splitlines()[-1])
    return found["bytes"] / found["out_s"], found["bytes"] / found["in_s"]


def run(demo, arguments):
    simulated = arguments.sim or not demo.real_gpu()
    demo.say("no GPU here: everything below is on a simulated one" if simulated else "using the real GPU")
    demo.build(simulated)
    stage = demo.Stage(simulated, '[residency]\nhost_memory = "32GiB"\n' if simulated else "")
    if simulated:
        stage.environment["SUBLET_SIM_CAPACITY"] = f"{SIM_DEVICE}B"
    try:
        return oversubscribe(stage, demo, arguments)
    finally:
        stage.close()


def oversubscribe(stage, demo, arguments):
    total = device_bytes(stage, demo)
    quota = int(OVER * total / len(JOBS)) // (2 * MIB) * 2 * MIB
    history = (quota - SPARE) // (2 * MIB) * 2 * MIB
    steps = max(200, int(arguments.seconds * 1e6 / EXTRA_US))
    demo.say(f"device {total / GIB:.1f} GiB, quotas {quota / GIB:.1f} GiB each, {history / GIB:.1f} GiB of it in use, {steps} steps")

    solo, serial_s = {}, 0.0
    for name in JOBS:
        begun = time.monotonic()
        stage.start(f"solo-{name}", [], program(demo, name, history, steps), solo_run=True)
        solo[name] = stage.report(f"solo-{name}")
        serial_s += time.monotonic() - begun
        demo.say(f"  {name} alone: {solo[name]['steps_per_s']:.0f} steps/s, loss bits {solo[name]['loss_bits']}")
    out_rate, in_rate = link_rates(stage, demo)

    demo.say("all three without sublet ...")
    for name in JOBS:
        stage.start(f"plain-{name}", [], program(demo, name, history, steps), solo_run=True)
    plain = {name: stage.jobs[f"plain-{name}"][0].wait() for name in JOBS}
    refused = sum(code == OUT_OF_MEMORY_EXIT for code in plain.values())
    demo.say(f"  out of memory: {refused} of {len(JOBS)}")

    demo.say("all three under sublet ...")
    flags = ["--mem", f"{quota}B", "--share", f"{1 / len(JOBS):.3f}", "--evictable", "--host-memory", f"{quota}B"]
    begun = time.monotonic()
    for name in JOBS:
        stage.start(name, flags, program(demo, name, history, steps))
    last, timed_out = wait_all(stage, JOBS, 10 * serial_s + 60)
    makespan_s = time.monotonic() - begun
    if timed_out:
        raise demo.Failure(f"not at the end after {makespan_s:.0f} s: {', '.join(timed_out)}; ps said {json.dumps(last)}")
    together = {name: stage.report(name) for name in JOBS}

    differ = [name for name in JOBS if together[name]["loss_bits"] != solo[name]["loss_bits"]]
    pressure = last.get("pressure") or {}
    switches = pressure.get("switches", 0)
    # One leaves while the other comes: the longer direction.
    switch_s = switches * history / min(out_rate, in_rate)
    ratio = makespan_s / (serial_s + switch_s)
    for name in JOBS:
        demo.say(
            f"  {name}: {together[name]['steps_per_s']:.0f} steps/s, loss bits {together[name]['loss_bits']}, "
            f"{last.get(name, {}).get('evictions', 0)} times evicted"
        )
    demo.say(
        f"one after another {serial_s:.1f} s, together {makespan_s:.1f} s with {switches} switches of {history / GIB:.1f} GiB "
        f"({switch_s:.1f} s by the link's {out_rate / 1e9:.0f} and {in_rate / 1e9:.0f} GB/s): {ratio:.3f} of the sum"
    )
    wrong = []
    fits = int(total // history)
    if refused < len(JOBS) - fits:
        wrong.append(f"without sublet {len(JOBS) - fits} jobs were to be out of memory, exit codes were {plain}")
    if differ:
        wrong.append(f"losses differ from the baseline's: {', '.join(differ)}")
    if switches == 0:
        wrong.append("no switch was counted, and the jobs do not fit together")
    if ratio > MAX_MAKESPAN:
        wrong.append(f"together they took {ratio:.3f} of the time one after another with switches, more than {MAX_MAKESPAN}")
    if stage.simulated:
        demo.say("All figures are from a simulated GPU.")
    result = {
        "commit": demo.commit(),
        "device": solo["one"]["device"],
        "simulated": stage.simulated,
        "cpus": os.cpu_count(),
        "metrics": [
            demo.metric("loss_differences", len(differ), "", budget=0),
            demo.metric("makespan_over_serial", ratio, "x", budget=MAX_MAKESPAN),
            demo.metric("makespan_s", makespan_s, "s", baseline=serial_s),
            demo.metric("switches", switches, ""),
            demo.metric("switch_s_by_link", switch_s, "s"),
            demo.metric("plain_out_of_memory", refused, "", budget=len(JOBS) - fits),
        ],
        "quota_bytes": quota,
        "device_bytes": total,
        "history_bytes": history,
        "solo": solo,
        "together": together,
        "residence": last,
        "failures": wrong,
    }
    for line in wrong:
        print(f"scripts/demo: {line}", file=demo.sys.stderr)
    if arguments.json:
        print(json.dumps(result), flush=True)
    return 1 if wrong else 0
