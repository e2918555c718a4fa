"""The twelve jobs of the cluster demo under each packer, sizer and round allocator of a live hook, one after the other.

Three arbiters go on all the time, and hooks with other policies follow each other on one state, which so knows the pairs that the
`trial` packer has measured. Packers and round allocators have a GPU on each node, sizers two. What the hook refuses to run counts
as shown where it says why. Each of CLAIMS is checked for each policy.
"""

import json
import os
import random
import subprocess
import time

import cluster_demo
from cluster_demo import Cluster, Failure, HookEnded

CLAIMS = {
    "acted": "the policy had an effect, or the hook refused to start with it and said what it lacks",
    "finished": "every job ended well",
    "once": "each attempt of a job was started once, and jobs that cannot be moved had one attempt",
    "fits": "no GPU had more guaranteed time promised than it has",
    "same_result": "training ended with the same loss to the bit under every policy",
}
FLAGS = {"packer": "--packer", "sizer": "--sizer", "round-allocator": "--order"}
# Exit status of a command that was not carried out.
REFUSED = 125
# A sizer whose jobs have as many GPUs as they ask for, by design.
RIGID = "rigid-srtf"


def policies(target):
    """Slot and name of each, those first on whose measurements others go."""
    command = [target / "sublet", "simulate", "policies", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "SUBLET_CONFIG": os.devnull})
    found = [(one["slot"], one["name"]) for one in json.loads(done.stdout)["policies"] if one["slot"] in FLAGS]
    return sorted(found, key=lambda one: (list(FLAGS).index(one[0]), one != ("packer", "trial")))


def submissions(slot, jobs):
    """What each job says besides: half are opportunistic for packers; for sizers, those that can grow; users for all."""
    for at, (name, kind, restartable, command) in enumerate(jobs):
        more = ["--user", "ab"[at % 2]]
        if slot == "packer" and at % 2:
            more += ["--class", "opportunistic"]
        if slot == "sizer":
            # Far enough away that none is refused.
            more += ["--work", "15s", "--deadline", "10m", *(["--max-gpus", 2] if restartable else [])]
        yield (name, kind, restartable, command), more


def acted(slot, name, decisions, most):
    """What shows that the policy had an effect; empty: nothing."""
    packs = sum(bool(line["beside"]) for line in decisions if line["kind"] in ("place", "resume", "migrate"))
    if slot == "packer":
        return f"{packs} pairs" if packs else ""
    if slot == "sizer":
        grown, resizes = sum(count > 1 for count in most.values()), sum(line["kind"] == "resize" for line in decisions)
        if name == RIGID:
            return "" if grown or resizes else "all had as many GPUs as they asked for"
        return f"{grown} jobs grew, in {resizes} changes of size" if grown or resizes else ""
    stops = sum(line["kind"] in ("suspend", "migrate") for line in decisions)
    return f"{packs} pairs, {stops} stops for others" if packs or stops else ""


def play(cluster, slot, name, seed, scale, say, wrong):
    """One policy, with jobs of its own; its row."""
    row = {"slot": slot, "policy": name, "refused": "", "acted": "", "jct_mean_s": None}
    try:
        cluster.next_hook([FLAGS[slot], name])
    except HookEnded as ended:
        row["refused"] = str(ended).removeprefix("the hook ended: ")
        says = name in row["refused"] and len(row["refused"].split()) > 5
        wrong.unless(ended.status == REFUSED and says, "acted", f"{name}: the hook ended with {ended.status}: {row['refused']}")
        return row
    nodes = len(cluster_demo.NODES)
    cluster.wait_for("all nodes report", lambda: sum(node["up"] for node in cluster.status()["nodes"]) == nodes)
    directory = cluster.directory / name
    directory.mkdir()
    order = random.Random(seed)
    first, second = cluster_demo.example_jobs(cluster.target, directory, scale)
    begun, ids, most = time.time(), [], {}
    for at, (job, more) in enumerate(submissions(slot, first + second)):
        ids.append(cluster.submit(job, more, once=f"{slot}-{name}-{job[0]}"))
        time.sleep(cluster_demo.SECOND_BATCH_S if at + 1 == len(first) else order.uniform(0.1, 0.5))

    def look(jobs):
        promised = {}
        for job in jobs:
            if job["phase"] == "running":
                most[job["id"]] = max(most.get(job["id"], 0), len(job["devices"]))
                for device in job["devices"]:
                    promised[(job["node"], device)] = promised.get((job["node"], device), 0.0) + job["share"]
        for (node, device), share in promised.items():
            wrong.unless(share <= 1.001, "fits", f"{name}: {device} of {node} has {share:.3f} of its time promised")

    jobs = cluster_demo.watch(cluster, set(ids), len(ids), begun, say, look)
    decisions = [line for line in cluster.decisions() if line["job"] in ids]
    row["acted"] = acted(slot, name, decisions, most)
    wrong.unless(row["acted"], "acted", f"{name} had no effect that could be seen: {sorted({line['kind'] for line in decisions})}")
    losses = set()
    for job in jobs:
        attempts = cluster.attempts(job["id"])
        said = f"{name}: {job['name']}"
        wrong.unless(len(attempts) == job["attempts"], "once", f"{said} was started {len(attempts)} times for {job['attempts']} attempts")
        if job["phase"] != "done":
            wrong.add("finished", f"{said} ended as {job['phase']}: {job['reason']}")
            continue
        report = cluster.output(job["id"], job["attempts"])
        if "loss_bits" in report:
            losses.add(report["loss_bits"])
        else:
            wrong.unless(job["attempts"] == 1, "once", f"{said} cannot be moved and was started {job['attempts']} times")
    row["loss_bits"] = sorted(losses)
    completion = [(job["ended_unix_ms"] - job["submitted_unix_ms"]) / 1000 for job in jobs if job["ended_unix_ms"]]
    row["jct_mean_s"] = sum(completion) / len(completion)
    return row


def demo(target, seed, scale, only, want_json, commit, say):
    chosen = [one for one in policies(target) if not only or any(word in one[1] for word in only)]
    if not chosen:
        raise Failure(f"--only {' '.join(only)}: no policy is called so; there are {', '.join(name for _, name in policies(target))}")
    wrong, rows = cluster_demo.Wrong(CLAIMS), []
    for devices, slots in ((1, ("packer", "round-allocator")), (2, ("sizer",))):
        here = [one for one in chosen if one[0] in slots]
        if not here:
            continue
        say(f"three arbiters with {devices} simulated GPU{'s' * (devices > 1)} each ...")
        cluster, keep = Cluster(target, ["--packer", "none"], seed, say, devices), True
        try:
            for slot, name in here:
                say(f"{slot} {name}:")
                rows.append(play(cluster, slot, name, seed, scale, say, wrong))
                row = rows[-1]
                say(f"  refused: {row['refused']}" if row["refused"] else f"  {row['acted'] or 'nothing seen'}; mean completion {row['jct_mean_s']:.1f} s")
            keep = False
        finally:
            cluster.close(keep)
    losses = {bits for row in rows for bits in row.get("loss_bits", [])}
    ran = any(not row["refused"] for row in rows)
    wrong.unless(len(losses) == 1 or not ran, "same_result", f"training ended with the losses {', '.join(sorted(losses)) or 'of nobody'}")
    claims = wrong.claims()
    for claim in claims.values():
        say(f"  {'shown' if claim['held'] else 'NOT SHOWN'}: {claim['text']}")
    say("All figures are from simulated GPUs.")
    if not want_json:
        return wrong.texts(), None
    metrics = [{"name": f"jct_mean_{row['policy']}", "value": row["jct_mean_s"], "unit": "s", "baseline": None, "ratio": None, "budget": None} for row in rows]
    report = {"commit": commit, "device": "simgpu (simulated)", "simulated": True, "cpus": os.cpu_count(), "seed": seed, "claims": claims, "metrics": metrics, "rows": rows}
    return wrong.texts(), {**report, "failures": wrong.texts()}
