"""Twelve jobs on four GPUs, three ways in one run: whole GPUs by plain Slurm, shards by plain Slurm, and shards by the packer.

Both kinds of job take as long by themselves. `heavy` keeps its GPU busy, `light` for two fifths of the time. Plain Slurm knows no kinds
and fills one GPU after the other. The packer knows the pairs: `sublet interfere` measures them first, on a GPU of the same type, and
gives them to the hook. The hook itself measures no pairs of Slurm's jobs.
"""

import os
import shutil
import statistics
import subprocess
import time

import sharing
from slurm_cluster import GPUS, Cluster
from trial import Failure, until

# Every third one is heavy, and all are submitted at once.
JOBS = ["heavy", "light", "light"] * 4
# Two jobs have a place on a GPU of 14 shards.
SHARDS = 6
SHARE = 0.5
KERNEL_US, STEP_MS = 2000, 20
BURSTS = {"heavy": STEP_MS * 1000 // KERNEL_US, "light": 4}
# The nodes' devices are in it, and pairs are measured in it.
MODE = sharing.EXCLUSIVE
# Time of a job by itself.
ALONE_S = 10
PATIENCE = 300


def load(kind, bursts):
    burst = BURSTS[kind]
    pause = STEP_MS * 1000 - burst * KERNEL_US
    words = ["load", "--kernel-us", KERNEL_US, "--burst", burst, "--pause-us", pause, "--bursts", bursts, "--for-ms", 3_600_000]
    return [str(word) for word in words]


def plan():
    lines = ["[experiment]", "repeat = 1", f'modes = ["{MODE}"]', 'warm_up = "1s"', 'measured = "6s"', ""]
    for kind in BURSTS:
        command = ", ".join(f'"{word}"' for word in load(kind, 1_000_000))
        lines += ["[[job]]", f'name = "{kind}"', f'kind = "{kind}"', f"command = [{command}]", 'mem = "6GiB"', f"share = {SHARE}", 'progress = "launches"', ""]
    return "\n".join(lines)


def measure(site):
    """Has the hook know both kinds beside each other."""
    file = site.dir / "twelve.toml"
    file.write_text(plan())
    run, sim = site.dir / "run-measure", site.dir / "sim-measure"
    for path in (run, sim):
        path.mkdir(mode=0o700, exist_ok=True)
    env = {**site.env_of("measure"), "PATH": f"{site.bin}:{os.environ['PATH']}"}
    words = [site.bin / "sublet", "interfere", file, "--sim", "--out", site.dir / "twelve-pairs", "--feed", site.url, "--token-file", site.token]
    done = subprocess.run([str(w) for w in words], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE)
    said = done.stdout + done.stderr
    if done.returncode or "3 pairs taken" not in said:
        raise Failure(f"sublet interfere: {done.returncode}: {said[-2000:]}")


def completions(site, options, plain):
    """Seconds from the submission of each job to its end, when all are submitted at once."""
    marks = site.cluster.out / f"twelve-{time.monotonic_ns()}"
    marks.mkdir(mode=0o777)
    marks.chmod(0o1777)
    # Without the plugin nobody else names the simulated driver.
    driver = f"export LD_LIBRARY_PATH={site.bin}/sim; " if plain else ""
    submitted, kinds = {}, {}
    for kind in JOBS:
        run = " ".join(load(kind, ALONE_S * 1000 // STEP_MS))
        script = f"{driver}{run} > /dev/null && date +%s.%N > {marks}/$SLURM_JOB_ID.new && mv {marks}/$SLURM_JOB_ID.new {marks}/$SLURM_JOB_ID"
        before = time.time()
        job = site.submit(script, "-J", kind, *options)
        submitted[job], kinds[job] = before, kind

    def all_done():
        ended = [job for job in submitted if (marks / str(job)).exists()]
        if len(ended) == len(submitted):
            return True
        queue = site.cluster.queue()
        failed = [job for job in submitted if job not in ended and "".join(queue.get(job, {}).get("job_state", "gone")) in ("FAILED", "CANCELLED", "gone")]
        # The mark of a job may have come since.
        failed = [job for job in failed if not (marks / str(job)).exists()]
        if failed:
            raise Failure(f"job {failed[0]} has failed: {site.cluster.output(failed[0])[-2000:]}")
        return False

    until("all twelve jobs are done", all_done, PATIENCE)
    times = {job: float((marks / str(job)).read_text()) - begun for job, begun in submitted.items()}
    until("the queue is empty", lambda: not site.cluster.call("squeue", "-h", check=False).stdout.split())
    return {kind: [round(times[job], 2) for job in times if kinds[job] == kind] for kind in BURSTS}


def packed(site):
    """With the packer beside it, as an administrator runs it."""
    site.holds(True)
    env = {**site.env_of("hook"), "SUBLET_CLUSTER": site.url, "SUBLET_CLUSTER_TOKEN_FILE": str(site.token), "SLURM_CONF": str(site.cluster.conf)}
    log = open(site.dir / "packer.log", "w")
    words = [str(site.bin / "sublet"), "cluster", "slurm", "--every", "500ms"]
    packer = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        return completions(site, [f"--gres=shard:{SHARDS}", f"--gpu-share={SHARE}"], plain=False)
    finally:
        packer.terminate()
        packer.wait(timeout=30)
        site.holds(False)


def twelve(site, metrics):
    until("the hook knows both nodes", lambda: site.sublet("hook", "cluster", "status").stdout.count(": up") == len(Cluster.NODES))
    measure(site)
    site.use("")
    sides = {
        "exclusive": completions(site, ["--gres=gpu:1"], plain=True),
        "shards": completions(site, [f"--gres=shard:{SHARDS}"], plain=True),
    }
    site.use(site.plugstack())
    sides["packer"] = packed(site)
    means = {side: statistics.mean([one for all in kinds.values() for one in all]) for side, kinds in sides.items()}
    makespans = {side: max(one for all in kinds.values() for one in all) for side, kinds in sides.items()}
    for side, kinds in sides.items():
        each = "  ".join(f"{kind} {statistics.mean(all):.2f} s" for kind, all in kinds.items())
        print(f"  {side:10} mean {means[side]:.2f} s  last {makespans[side]:.2f} s  {each}", flush=True)
    shape = {"jobs": len(JOBS), "gpus": len(Cluster.NODES) * GPUS, "alone_s": ALONE_S, "completion_s": sides}
    metrics.append({**sharing.metric("slurm_packed_mean_vs_exclusive", means["packer"], "s", baseline=means["exclusive"]), **shape})
    metrics.append(sharing.metric("slurm_packed_mean_vs_shards", means["packer"], "s", baseline=means["shards"]))
    shutil.rmtree(site.dir / "twelve-pairs", ignore_errors=True)
