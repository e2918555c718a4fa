"""Three arbiters on simulated GPUs, twelve jobs, one hook: with packing by trial, then without, from the same seed.

The hook is killed (SIGKILL) and started again in the middle. Each of CLAIMS is checked and reported by name; one that does not hold
is a failure of the demo. Reported besides: completion times with and without packing.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

NODES = ("north", "east", "south")
WINDOW_S = 5.0
SOLO_S = 1.5
# Work of the jobs: steps of training; seconds of serving.
STEPS = 3500
SERVE_S = 12
SECOND_BATCH_S = 4.5

# What is shown; whatever is found wrong names the one that it breaks.
CLAIMS = {
    "nodes": "three arbiters, each with a simulated GPU of its own, and jobs ran on every one",
    "jobs": "twelve jobs, each known once, under the number that its submitter got",
    "packed": "the trial packer put jobs together",
    "measured": "pairs were measured against the speed of each alone, and a good one was found and kept",
    "split": "a bad pair was split within two windows",
    "remembered": "a pair that was split was not put together again",
    "killed": "the hook was killed in the middle, with jobs running and pairs made, and the next one on its state went on",
    "finished": "every job ended well, in both runs",
    "once": "no job was in two places: each attempt of a job was started once, and jobs that cannot be moved had one attempt",
    "same_result": "training ended with the same loss to the bit, packed or not, and however often it was stopped",
    "compared": "the same jobs in the same sequence, from the same seed, ran without packing as well",
}


class Wrong:
    """What was found wrong, by the claim that it breaks."""

    def __init__(self, texts):
        self.says, self.found = texts, {claim: [] for claim in texts}

    def add(self, claim, text):
        self.found[claim].append(text)

    def unless(self, holds, claim, text):
        if not holds:
            self.add(claim, text)

    def texts(self):
        return [text for texts in self.found.values() for text in texts]

    def claims(self):
        return {claim: {"held": not self.found[claim], "text": text, "failures": self.found[claim]} for claim, text in self.says.items()}


class Failure(Exception):
    """Something that this script promises did not happen."""


class HookEnded(Failure):
    """The hook did not stay: what it said, and its exit status."""

    def __init__(self, text, status):
        super().__init__(text)
        self.status = status


def example_jobs(target, directory, scale):
    """Name, kind, whether it may be moved, command. The first three come at once, the others one after the other."""

    def train(at):
        return (
            f"train-{at}",
            "train-mlp-32",
            True,
            [
                target / "train_mlp", "--hidden", 32, "--batch", 32, "--steps", int(STEPS * scale), "--extra-us", 4000,
                "--checkpoint", directory / f"train-{at}.ckpt", "--checkpoint-every", 50, "--resume", "--progress-every", 0, "--json",
            ],
        )  # fmt: skip

    def infer(at):
        command = [target / "infer_loop", "--rate", 5, "--burst", 2, "--batch", 8, "--hidden", 32, "--extra-us", 8000]
        return (f"infer-{at}", "infer-5x2", False, [*command, "--seconds", max(2, int(SERVE_S * scale)), "--json"])

    def load(at, kind, burst, pause_ms):
        command = [target / "load", "--kernel-us", 4000, "--burst", burst, "--pause-us", pause_ms * 1000]
        return (f"{kind}-{at}", kind, False, [*command, "--for-ms", int(SERVE_S * 1000 * scale), "--json"])

    first = [train(1), train(2), train(3)]
    second = [train(4)]
    second += [infer(1), load(1, "light", 2, 60), infer(2), load(2, "light", 2, 60), infer(3), load(1, "bursty", 6, 120)]
    second += [infer(4), load(2, "bursty", 6, 120)]
    return first, second


# The mode of the nodes' devices: what a job did beside another one was measured in it.
MODE = "exclusive"


class Cluster:
    """Hook and nodes in directories of their own, and everything that was started."""

    def __init__(self, target, policies, seed, say, devices=1):
        self.target, self.policies, self.seed, self.say = target, policies, seed, say
        self.directory = Path(tempfile.mkdtemp(prefix="sublet-cluster-"))
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SUBLET_")}
        self.hook, self.nodes, self.url = None, {}, None
        self.port = 0
        self.start_hook()
        for name in NODES:
            place = self.directory / name
            for part in ("run", "sim"):
                (place / part).mkdir(mode=0o700, parents=True)
            (place / "sublet.toml").write_text(f'[[device]]\ndevice = "*"\nmode = "{MODE}"\n')
            environment = {
                **self.environment,
                "SUBLET_RUNTIME_DIR": str(place / "run"),
                "SUBLET_CONFIG": str(place / "sublet.toml"),
                "SUBLET_SIM_STATE": str(place / "sim"),
                "SUBLET_SIM_CONTEXT": "0B",
                "SUBLET_SIM_DEVICES": str(devices),
            }
            command = [target / "sublet", "arbiter", "--cluster", self.url, "--cluster-token-file", self.token, "--cluster-node", name]
            command += ["--cluster-sim"] + (["--cluster-user", "root"] if os.geteuid() == 0 else [])
            log = open(place / "arbiter.log", "w")
            self.nodes[name] = (subprocess.Popen(list(map(str, command)), env=environment, stderr=log, start_new_session=True), log)
        self.wait_for("all nodes report", lambda: sum(node["up"] for node in self.status()["nodes"]) == len(NODES))

    @property
    def token(self):
        return self.directory / "hook" / "token"

    def start_hook(self):
        log = self.directory / "hook.log"
        offset = log.stat().st_size if log.exists() else 0
        command = [
            self.target / "sublet", "cluster", "serve", "--state", self.directory / "hook", "--listen", f"127.0.0.1:{self.port}",
            *self.policies, "--placer", "consolidate-relaxed", "--seed", self.seed, "--round", "1s",
            "--trial-window", f"{WINDOW_S:g}s", "--trial-solo", f"{SOLO_S:g}s", "--node-timeout", "5s", "--grace", "5s",
        ]  # fmt: skip
        with open(log, "a") as out:
            self.hook = subprocess.Popen(list(map(str, command)), env=self.environment, stderr=out, start_new_session=True)

        def hook_address():
            if self.hook.poll() is not None:
                raise HookEnded(f"the hook ended: {log.read_text()[offset:].strip()}", self.hook.returncode)
            return re.search(r"http://[\d.]+:(\d+)", log.read_text()[offset:])

        found = self.wait_for("the hook listens", hook_address)
        self.url, self.port = found.group(0), int(found.group(1))

    def ask(self, *words):
        command = [self.target / "sublet", "cluster", *words[:1], "--cluster", self.url, "--token-file", self.token, *words[1:]]
        deadline = time.monotonic() + 60
        while True:
            done = subprocess.run(list(map(str, command)), env=self.environment, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return done.stdout
            # A hook that lives and answers late is asked again: nothing is submitted twice, each
            # job has a word against that.
            starting = "is not reached" in done.stderr and self.hook.poll() is None and time.monotonic() < deadline
            if not starting:
                raise Failure(done.stderr.strip())
            time.sleep(0.5)

    def status(self):
        return json.loads(self.ask("status", "--json"))

    def jobs(self):
        return json.loads(self.ask("jobs", "--json"))["jobs"]

    def decisions(self):
        return json.loads(self.ask("log", "--json"))["decisions"]

    def submit(self, job, more=(), once=None):
        name, kind, restartable, command = job
        flags = ["--name", name, "--kind", kind, *(["--restartable"] if restartable else []), *more]
        return int(self.ask("submit", *flags, "--once", once or name, "--", *command))

    def wait_for(self, what, answer, seconds=60.0):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                value = answer()
            except Failure as failure:
                if self.hook.poll() is not None:
                    raise
                value, what = None, f"{what} ({failure})"
            if value:
                return value
            time.sleep(0.2)
        raise Failure(f"{what}: not within {seconds:.0f} s; see {self.directory}")

    def kill_hook(self):
        self.hook.send_signal(signal.SIGKILL)
        self.hook.wait()
        self.start_hook()

    def next_hook(self, policies):
        """A hook with other policies on the same state."""
        if self.hook.poll() is None:
            self.hook.terminate()
            self.hook.wait()
        self.policies = policies
        self.start_hook()

    def output(self, job, attempt):
        """The last line of an attempt's output, wherever it ran, as JSON."""
        for name in NODES:
            for file in (self.directory / name / "run/cluster/jobs").glob(f"*/{job}.{attempt}/stdout"):
                return json.loads(file.read_text().strip().splitlines()[-1])
        raise Failure(f"job {job} has no output")

    def attempts(self, job):
        """Directories of the job's attempts that were begun, on all nodes."""
        return [path for name in NODES for path in (self.directory / name / "run/cluster/runs").glob(f"*/{job}.*/started")]

    def close(self, keep=False):
        if self.hook.poll() is None:
            self.hook.terminate()
            self.hook.wait()
        for name, (process, log) in self.nodes.items():
            # Each attempt has a runner, which ends all of it when it is asked.
            for asked in (self.directory / name / "run/cluster/runs").glob("*/*/asked"):
                if not (asked.parent / "exit.json").exists():
                    try:
                        pipe = os.open(asked, os.O_WRONLY | os.O_NONBLOCK)
                    except OSError:
                        continue
                    os.write(pipe, b"k")
                    os.close(pipe)
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            log.close()
        if not keep:
            shutil.rmtree(self.directory, ignore_errors=True)


def play(target, packer, seed, scale, kill, say, wrong):
    """One run and its figures."""
    cluster = Cluster(target, ["--packer", packer], seed, say)
    keep = False
    try:
        order = random.Random(seed)
        first, second = example_jobs(target, cluster.directory, scale)
        begun = time.time()
        ids = [cluster.submit(job) for job in first]
        time.sleep(SECOND_BATCH_S)
        for job in second:
            ids.append(cluster.submit(job))
            time.sleep(order.uniform(0.1, 0.5))
        if kill:
            try:
                cluster.wait_for("a pair is split", lambda: any(line["kind"] == "unpack" for line in cluster.decisions()))
            except Failure as failure:
                measured = [line["text"] for line in cluster.decisions() if line["kind"] == "measured"]
                words = "; measured: " + ("; ".join(measured) or "nothing")
                raise Failure(f"{failure}{words} (on a busy host jobs wait for its processors, and hardly for each other)") from failure
            say(f"  {time.time() - begun:3.0f} s: a pair is split; the hook is killed now")
            before = cluster.jobs()
            cluster.kill_hook()
            epoch = cluster.status()["hook"]["epoch"]
            wrong.unless(epoch == 2, "killed", f"the hook that followed counts as number {epoch}")
            running = sum(job["phase"] == "running" for job in before)
            wrong.unless(running > 0, "killed", "nothing ran when the hook was killed")
            wrong.unless(any(job["beside"] for job in before), "killed", "no pair was there when the hook was killed")
            lost = {job["id"] for job in before} - {job["id"] for job in cluster.jobs()}
            wrong.unless(not lost, "killed", f"jobs {sorted(lost)} are unknown to the hook that followed")
        jobs = watch(cluster, None, len(ids), begun, say)
        status, log = cluster.status(), cluster.decisions()
        losses, places = set(), set()
        for job in jobs:
            attempts = cluster.attempts(job["id"])
            places |= {path.relative_to(cluster.directory).parts[0] for path in attempts}
            name = job["name"]
            wrong.unless(len(attempts) == job["attempts"], "once", f"{name} was started {len(attempts)} times for {job['attempts']} attempts")
            if job["phase"] != "done":
                wrong.add("finished", f"{name} ended as {job['phase']}: {job['reason']}")
                continue
            report = cluster.output(job["id"], job["attempts"])
            if "loss_bits" in report:
                losses.add(report["loss_bits"])
            elif job["attempts"] != 1:
                wrong.add("once", f"{name} cannot be moved and was started {job['attempts']} times")
        known = [job["id"] for job in jobs]
        wrong.unless(known == ids and len(ids) == 12, "jobs", f"jobs {ids} were submitted, {known} are known")
        up = [node["name"] for node in status["nodes"] if node["up"]]
        wrong.unless(len(up) == 3, "nodes", f"{len(up)} nodes report: {', '.join(up)}")
        wrong.unless(len(places) == 3, "nodes", f"jobs ran on {', '.join(sorted(places)) or 'no node'} only")
        wrong.unless(len(losses) == 1, "same_result", f"training ended with the losses {', '.join(sorted(losses)) or 'of nobody'}")
        completion = [(job["ended_unix_ms"] - job["submitted_unix_ms"]) / 1000 for job in jobs if job["ended_unix_ms"]]
        figures = {
            "packer": packer,
            "seed": seed,
            "nodes": len(up),
            "jobs": len(jobs),
            "done": sum(job["phase"] == "done" for job in jobs),
            "jct_mean_s": sum(completion) / len(completion),
            "jct_max_s": max(completion),
            "makespan_s": max(job["ended_unix_ms"] for job in jobs) / 1000 - begun,
            "packs": status["packs"],
            "unpacks": status["unpacks"],
            "hook_epoch": status["hook"]["epoch"],
            "pairs": [{key: pair[key] for key in ("kinds", "rates", "refused")} for pair in status["pairs"]],
            "loss_bits": sorted(losses),
            "per_job": [{key: job[key] for key in ("name", "kind", "phase", "attempts", "rate")} for job in jobs],
        }
        if packer != "none":
            check_pairs(log, figures, wrong)
        return figures
    except Failure:
        keep = True
        raise
    finally:
        cluster.close(keep)


def watch(cluster, ids, count, begun, say, look=lambda jobs: None):
    """Until every job is over, or each of `ids`; these jobs, in the order of their numbers. `look` is shown them each time."""
    shown = 0
    while True:
        jobs = [job for job in cluster.jobs() if ids is None or job["id"] in ids]
        look(jobs)
        over = [job for job in jobs if job["phase"] in ("done", "failed", "cancelled")]
        if len(over) == count:
            return sorted(jobs, key=lambda job: job["id"])
        if time.time() - begun > 240:
            raise Failure(f"{count - len(over)} jobs are not over after 240 s; see {cluster.directory}")
        if time.time() - begun - shown > 5:
            shown = time.time() - begun
            states = {phase: sum(job["phase"] == phase for job in jobs) for phase in ("waiting", "running", "done")}
            pairs = sorted((job["name"], next(o["name"] for o in jobs if o["id"] == job["beside"])) for job in jobs if job["beside"])
            text = ", ".join("+".join(pair) for pair in pairs if pair[0] < pair[1])
            say(f"  {shown:3.0f} s: {states['waiting']} wait, {states['running']} run, {states['done']} done; {text or 'no pairs'}")
        time.sleep(1.0)


def check_pairs(log, figures, wrong):
    """How long bad pairs lasted, and whether they came again."""
    since, lasted, split = {}, [], set()
    for line in log:
        if line["kind"] in ("place", "resume", "migrate") and line["beside"]:
            since[line["job"]] = line["unix_ms"]
            again = frozenset((line["job"], line["beside"])) in split
            wrong.unless(not again, "remembered", f"jobs {line['job']} and {line['beside']} were put together again after they were split")
        if line["kind"] == "measured" and "is split" in line["text"]:
            split.add(frozenset((line["job"], line["beside"])))
        if line["kind"] == "unpack" and line["job"] in since:
            lasted.append((line["unix_ms"] - since[line["job"]]) / 1000)
    figures["window_s"] = WINDOW_S
    figures["bad_pairs_lasted_s"] = lasted
    wrong.unless(figures["packs"] > 0, "packed", "no jobs were put together")
    wrong.unless(lasted, "split", "no pair was split, though two training jobs do not get along")
    for seconds in lasted:
        wrong.unless(seconds <= 2 * WINDOW_S, "split", f"a bad pair lasted {seconds:.1f} s, two windows are {2 * WINDOW_S:.0f} s")
    wrong.unless(figures["pairs"], "measured", "no pair was measured")
    wrong.unless(any(not pair["refused"] for pair in figures["pairs"]), "measured", "no pair was found good")
    rates = [rate for pair in figures["pairs"] for rate in pair["rates"]]
    wrong.unless(all(0.0 <= rate <= 1.0 for rate in rates), "measured", f"rates {rates} are not all between 0 and 1")


def check_comparison(packed, plain, wrong):
    """That the two runs can be held against each other."""
    named = [[(job["name"], job["kind"]) for job in run["per_job"]] for run in (packed, plain)]
    wrong.unless(named[0] == named[1], "compared", f"the runs had different jobs: {named[0]} and {named[1]}")
    wrong.unless(packed["seed"] == plain["seed"], "compared", f"the seeds are {packed['seed']} and {plain['seed']}")
    wrong.unless(plain["packs"] == 0, "compared", f"{plain['packs']} pairs were made in the run without packing")
    bits = (packed["loss_bits"], plain["loss_bits"])
    wrong.unless(bits[0] == bits[1], "same_result", f"training ended with loss bits {bits[0]} packed and {bits[1]} alone")


def demo(target, seed, scale, want_json, commit, say):
    say(f"twelve jobs on three arbiters with a simulated GPU each, packed by trial (windows of {WINDOW_S:g} s), seed {seed} ...")
    wrong = Wrong(CLAIMS)
    packed = play(target, "trial", seed, scale, True, say, wrong)
    say("the same jobs without packing ...")
    plain = play(target, "none", seed, scale, False, say, wrong)
    check_comparison(packed, plain, wrong)
    say()
    say(f"{'':14}{'packed by trial':>18}{'not packed':>14}")
    for key, name in (("jct_mean_s", "mean JCT"), ("jct_max_s", "longest JCT"), ("makespan_s", "makespan")):
        say(f"{name:14}{packed[key]:16.1f} s{plain[key]:12.1f} s")
    say(f"{'pairs':14}{packed['packs']:>18}{plain['packs']:>14}")
    say(f"{'of these split':14}{packed['unpacks']:>18}{plain['unpacks']:>14}")
    for pair in packed["pairs"]:
        (a, b), (x, y) = pair["kinds"], pair["rates"]
        say(f"  {a} {x:.2f} + {b} {y:.2f} = {x + y:.2f}: {'refused' if pair['refused'] else 'good'}")
    lasted = ", ".join(f"{seconds:.1f} s" for seconds in packed["bad_pairs_lasted_s"])
    say(f"bad pairs lasted {lasted or 'no time'}; the hook was killed once in between")
    claims = wrong.claims()
    for claim in claims.values():
        say(f"  {'shown' if claim['held'] else 'NOT SHOWN'}: {claim['text']}")
    say("All figures are from simulated GPUs.")
    if not want_json:
        return wrong.texts(), None

    def metric(name, value, baseline, budget=None):
        return {"name": name, "value": value, "unit": "s", "baseline": baseline, "ratio": value / baseline, "budget": budget}

    metrics = [
        metric("jct_mean_packed", packed["jct_mean_s"], plain["jct_mean_s"]),
        metric("makespan_packed", packed["makespan_s"], plain["makespan_s"]),
    ]
    metrics += [metric("bad_pair_lasted", max(packed["bad_pairs_lasted_s"]), WINDOW_S, 2 * WINDOW_S)] if lasted else []
    report = {"commit": commit, "device": "simgpu (simulated)", "simulated": True, "cpus": os.cpu_count(), "seed": seed, "claims": claims, "metrics": metrics, "packed": packed, "plain": plain}
    return wrong.texts(), {**report, "failures": wrong.texts()}
