"""CuPy, JAX and vLLM, where they are installed."""

import sys

from ..processes import Failure

GIB = 1 << 30
QUOTA = 6 * GIB


def cupy(ctx):
    words = [sys.executable, ctx.place.jobs / "cupy_job.py"]
    arbiter = ctx.arbiter()
    bare = ctx.json_of([*words, str(GIB)], "bare", 35)
    governed = arbiter.json_of([*words, str(4 * QUOTA)], "governed", mem="6GiB", timeout_s=35)
    ctx.result.note(f"CuPy {bare['version']}")
    ctx.result.check("results are equal", bare["result"] == governed["result"], f"{bare['result'][:12]} {governed['result'][:12]}")
    quota_story(ctx, governed)
    ctx.result.check("over the quota CuPy raises its OutOfMemoryError", governed["oom"] is not None, governed["oom"] or "it got all it asked for")
    ctx.result.check("no more than the quota was handed out", governed["taken_bytes"] <= QUOTA, governed["taken_bytes"])
    ctx.result.check("it works on after that", governed["works_after"])
    job = arbiter.job("governed")
    ctx.result.check("the peak that the arbiter saw is within the quota", job["mem_peak_bytes"] <= QUOTA, job["mem_peak_bytes"])


def jax(ctx):
    words = [sys.executable, ctx.place.jobs / "jax_job.py"]
    arbiter = ctx.arbiter()
    # Autotuning by time may choose other algorithms in another run. XLA ends at a flag that it does
    # not know.
    flags = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"}
    try:
        bare = ctx.json_of(words, "bare", 40, {**ctx.bare, **flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    except Failure as failure:
        ctx.result.note(f"without {flags['XLA_FLAGS']}: {str(failure)[:300]}")
        flags = {}
        bare = ctx.json_of(words, "bare", 40, {**ctx.bare, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    # As users start it: JAX takes most of the memory that it sees.
    governed = arbiter.json_of(words, "governed", mem="6GiB", timeout_s=40, env=flags)
    ctx.result.note(f"JAX {bare['version']} on {bare['platform']}")
    ctx.result.check("results are equal", bare["result"] == governed["result"], f"last losses {bare['last_loss']!r} {governed['last_loss']!r}")
    limit = governed["limit_bytes"]
    ctx.result.check("JAX plans with the quota", limit is not None and limit <= QUOTA, f"its limit is {limit} bytes")
    job = arbiter.job("governed")
    ctx.result.check("its preallocation is charged and within the quota", GIB < job["mem_peak_bytes"] <= QUOTA, job["mem_peak_bytes"])


def vllm(ctx):
    words = [sys.executable, ctx.place.jobs / "vllm_job.py", ctx.directory / "model"]
    arbiter = ctx.arbiter()
    # Its own part of what it sees: of a whole device little, of a quota most.
    bare = ctx.json_of([*words, "0.2"], "bare", 85)
    governed = arbiter.json_of([*words, "0.9"], "governed", mem="6GiB", timeout_s=85)
    ctx.result.note(f"vLLM {bare['version']} on {bare['devices']} devices" + ("" if bare["devices"] > 1 else ": tensor parallelism needs two"))
    ctx.result.check("answers are equal", bare["result"] == governed["result"] and bare["answers"] > 0, f"{bare['result'][:12]} {governed['result'][:12]}")
    quota_story(ctx, governed)
    job = arbiter.job("governed")
    most = QUOTA * governed["devices"]
    ctx.result.check("the peak that the arbiter saw is within the quota", 0 < job["mem_peak_bytes"] <= most, job["mem_peak_bytes"])
    ctx.result.check("every worker was inside", not job["escaped_count"], f"{job['escaped_count']} processes were not")


def quota_story(ctx, seen):
    ctx.result.check("cuMemGetInfo tells the quota", seen["total_bytes"] <= QUOTA and seen["free_bytes"] <= seen["total_bytes"],
                     f"{seen['free_bytes']} of {seen['total_bytes']} bytes free")
