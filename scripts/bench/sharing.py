"""What the benchmarks of sharing have in common: a place of its own for every run, loads, and the device's own account.

Everything runs on the simulated GPU, whose account of compute time (`simgpu/examples/usage.rs`) owes nothing to the arbiter.
"""

import bisect
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What was built; a test names the folder that it tests.
TESTED = os.environ.get("SUBLET_TEST_ARTEFACTS")
RELEASE = pathlib.Path(TESTED or pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release").resolve()
SUBLET = RELEASE / "sublet"
MS = 1_000_000


def build():
    packages = ["cli", "interposer", "simgpu-libcuda", "simgpu-libnvidia-ml", "examples"]
    words = ["cargo", "build", "--release", "--locked", "-q"]
    subprocess.run([*words, *[w for p in packages for w in ("-p", p)]], check=True, cwd=ROOT)
    subprocess.run([*words, "-p", "simgpu", "--example", "usage"], check=True, cwd=ROOT)
    subprocess.run([ROOT / "scripts/stage", "release"], check=True)


def commit():
    try:
        out = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short=12", "HEAD"], text=True, stdout=subprocess.PIPE)
    except FileNotFoundError:
        # In a root without git: as the run outside has found it.
        return os.environ.get("SUBLET_COMMIT") or "unknown"
    return out.stdout.strip() or "unknown"


class Account:
    """Compute time by process over time, read from the device every few milliseconds."""

    def __init__(self, env, every_ms):
        self.times, self.rows, self.turns = [], [], []
        self.child = subprocess.Popen([RELEASE / "examples/usage", str(every_ms)], env=env, stdout=subprocess.PIPE, text=True)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        seen, turns = {}, {}
        for line in self.child.stdout:
            row = json.loads(line)
            # The device forgets a process that has ended; what it used stays used.
            seen = {**seen, **{p["pid"]: p["compute_ns"] for device in row["devices"] for p in device["processes"]}}
            turns = {**turns, **{p["pid"]: p["turn_ns"] for device in row["devices"] for p in device["processes"]}}
            self.turns.append(turns)
            self.rows.append(seen)
            self.times.append(row["mono_ns"])

    def close(self):
        self.child.terminate()
        self.child.wait()
        self.reader.join()

    def at(self, mono_ns, pid, rows=None):
        """Compute nanoseconds of a process at a time, between two readings in proportion."""
        rows = self.rows if rows is None else rows
        after = min(max(bisect.bisect_left(self.times, mono_ns), 1), len(self.times) - 1)
        t0, t1 = self.times[after - 1], self.times[after]
        v0, v1 = (rows[n].get(pid, 0) for n in (after - 1, after))
        part = min(max((mono_ns - t0) / (t1 - t0), 0), 1) if t1 > t0 else 1
        return v0 + (v1 - v0) * part

    def longest_gap_ms(self, begin_ns, end_ns):
        """Longest time between two readings: how long a thread that belongs to nobody had no core, besides the interval of readings."""
        inside = [t for t in self.times if begin_ns <= t <= end_ns]
        return max((b - a for a, b in zip(inside, inside[1:])), default=0) / MS

    def used(self, begin_ns, end_ns, pid):
        return self.at(end_ns, pid) - self.at(begin_ns, pid)

    def turned(self, begin_ns, end_ns, pid):
        """What turns to a process took of the device."""
        return self.at(end_ns, pid, self.turns) - self.at(begin_ns, pid, self.turns)


def steal_ms():
    """Processor time, in ms since the start, that others took from this machine while it had work for it (proc(5), `steal`)."""
    with open("/proc/stat") as stat:
        ticks = int(stat.readline().split()[8])
    return ticks * 1000 / os.sysconf("SC_CLK_TCK")


# Drivers that cost more than the built-in profiles say, by name: what a real one may do
# (docs/reference/simgpu.md).
DRIVERS = {
    "marks": {"SUBLET_SIM_SET": "marks_need_turn=1"},
    "lock": {"SUBLET_SIM_SET": "driver_lock=1;alloc_us=10"},
    "first-launch": {"SUBLET_SIM_SET": "first_launch_us=10000"},
    "failures": {"SUBLET_SIM_SET": "failed_call_us=500"},
    "slow-memory": {"SUBLET_SIM_SET": "vmm_create_us=290;vmm_map_us=20;vmm_access_us=380;vmm_unmap_us=340;vmm_release_us=230;vmm_synchronise=1"},
    "load": {"SUBLET_SIM_LOAD_US": "200000"},
}
# What was chosen, for every place of this run.
chosen_driver = {}


def driver_option(parser):
    parser.add_argument("--driver", metavar="NAMES", default="", help=f"a simulated driver that costs more, by comma: {', '.join(DRIVERS)}")


def use_driver(parser, options):
    """Takes the choice; wrong names end the script."""
    names = [name for name in options.driver.split(",") if name]
    unknown = [name for name in names if name not in DRIVERS]
    if unknown:
        parser.error(f"--driver {','.join(unknown)}: there are {', '.join(DRIVERS)}")
    for name in names:
        for key, value in DRIVERS[name].items():
            chosen_driver[key] = ";".join(filter(None, [chosen_driver.get(key), value]))


# The modes of a device (docs/explanation/time.md). Each figure is of one: what runs an arbiter says
# which, so that another default changes no figure.
EXCLUSIVE, CONCURRENT, AUTO = "exclusive", "concurrent", "auto"


def device_rules(mode, more=""):
    """The section of a quota file on every device: its mode, and lines with other keys."""
    return f'[[device]]\ndevice = "*"\nmode = "{mode}"\n{more}'


class Place:
    """An arbiter and a simulated device of its own, in a mode, and the jobs in it. `device`: lines with other keys of the device;
    `settings`: other sections of the quota file."""

    def __init__(self, directory, settings="", sim=(), *, mode, device=""):
        if "[[device]]" in settings:
            raise ValueError("the first section on a device counts: give its keys as `device`")
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("SUBLET_") and k not in ("LD_PRELOAD", "LD_LIBRARY_PATH")}
        self.directory = pathlib.Path(directory)
        config = self.directory / "sublet.toml"
        config.write_text(settings + device_rules(mode, device))
        self.env.update(SUBLET_RUNTIME_DIR=str(directory), SUBLET_SIM_STATE=str(self.directory / "sim"), SUBLET_CONFIG=str(config))
        self.env.update(sim)
        self.env.update(chosen_driver)
        self.jobs = {}

    def start(self, name, program, flags=(), managed=True):
        """Starts a program, as a job or, unmanaged, next to everything."""
        env, words = dict(self.env), list(program)
        if managed:
            words = [SUBLET, "run", "--sim", "--name", name, *flags, "--", *words]
        else:
            env["LD_LIBRARY_PATH"] = str(RELEASE / "sim")
        out = open(self.directory / f"{name}.out", "w+")
        err = open(self.directory / f"{name}.err", "w+")
        job = subprocess.Popen(list(map(str, words)), env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        self.jobs[name] = (job, out, err)
        return job

    def started(self, name, deadline_s=30):
        """Waits until a load has its context and kernel."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if "ready" in (self.directory / f"{name}.out").read_text():
                return
            if self.jobs[name][0].poll() is not None:
                break
            time.sleep(0.01)
        raise SystemExit(f"{name} did not start: {(self.directory / f'{name}.err').read_text().strip() or 'no message'}")

    def report(self, name):
        """The JSON on a finished program's last line."""
        job, out, err = self.jobs[name]
        code = job.wait()
        out.seek(0)
        err.seek(0)
        if code != 0:
            raise SystemExit(f"{name} ended with exit code {code}: {err.read().strip()}")
        return json.loads(out.read().strip().splitlines()[-1])

    def sublet(self, *words):
        done = subprocess.run([SUBLET, *map(str, words)], env=self.env, text=True, capture_output=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"sublet {' '.join(map(str, words))}: {done.stderr.strip()}")
        return done.stdout

    def status(self):
        answer = json.loads(self.sublet("ps", "--json"))
        return {job["name"]: job for job in answer["jobs"]}

    def account(self, every_ms=5):
        return Account(self.env, every_ms)

    def close(self):
        for job, out, err in self.jobs.values():
            if job.poll() is None:
                job.terminate()
                try:
                    job.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    job.kill()
                    job.wait()
            out.close()
            err.close()
        subprocess.run([SUBLET, "arbiter", "--stop"], env=self.env, capture_output=True, check=False)


@contextlib.contextmanager
def place(settings="", sim=(), *, mode, device=""):
    with tempfile.TemporaryDirectory(prefix="sublet-bench-", ignore_cleanup_errors=True) as directory:
        here = Place(directory, settings, sim, mode=mode, device=device)
        try:
            yield here
        finally:
            here.close()


def load(name, **options):
    """The command line of a load (`examples/src/bin/load.rs`)."""
    words = [RELEASE / "load", "--name", name, "--json"]
    for key, value in options.items():
        words += [f"--{key.replace('_', '-')}", value]
    return words


def rounds_option(parser):
    parser.add_argument("--rounds", type=int, default=6, help="most runs of a case; see above (default 6)")


# Part of all processors' time that the host may steal from a run that counts as calm, and how
# many of those are enough.
CALM, ENOUGH = 0.005, 3


def undisturbed(cases, rounds, seconds, run):
    """For each case its rows, each figure the median of the three runs from which the host stole the least processor time.

    `run(case)` gives rows, each with `steal_ms`, that are always as many and in the same order. A case is run again, after all the
    others, until each of its rows had three calm runs, at most `rounds` times. What is stolen is not ours to change, so that
    choosing by it chooses no figure. What is no figure is of the calmest run."""
    calm_ms = CALM * seconds * 1000 * (os.cpu_count() or 1)
    runs = [[] for _ in cases]
    for _ in range(rounds):
        for case, done in zip(cases, runs):
            if all(sum(row["steal_ms"] <= calm_ms for row in rows) >= ENOUGH for rows in zip(*done)) and len(done) >= ENOUGH:
                continue
            done.append(run(case))
    return [median_row(sorted(rows, key=lambda row: row["steal_ms"])[:ENOUGH]) for done in runs for rows in zip(*done)]


def median_row(rows):
    def figure(key):
        values = [row[key] for row in rows if isinstance(row[key], (int, float))]
        return round(statistics.median(values), 3) if values else rows[0][key]

    return {key: figure(key) for key in rows[0]}


def metric(name, value, unit, budget=None, baseline=None):
    ratio = value / baseline if baseline else None
    return {"name": name, "value": round(value, 4), "unit": unit, "baseline": baseline, "ratio": ratio, "budget": budget}


def met(metric):
    """Whether a metric is within its budget: the most that it may be, but for fractions that are to be reached; `None` without one."""
    value, budget = metric["value"], metric["budget"]
    if budget is None:
        return None
    lower = metric.get("at_least", metric["name"].endswith(("_fraction", "_vs_solo", "_of_leftover", "_5ms", "_30ms", "_in_order")))
    return value is not None and (value >= budget if lower else value <= budget)


def verdict(metrics):
    """The exit status of a measuring script: 1 where a required row fails, which is named."""
    missed = [f"{row['name']} {row['value']} (budget {row['budget']})" for row in metrics if met(row) is False]
    if missed:
        sys.stdout.flush()
        print(f"{pathlib.Path(sys.argv[0]).name}: budgets are missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def table(metrics):
    """The lines of a table for people."""
    lines = [f"{'metric':32} {'value':>12} {'unit':8} {'baseline':>12} {'budget':>10}"]
    for row in metrics:
        baseline = "-" if row["baseline"] is None else f"{row['baseline']:.4f}"
        value = "-" if row["value"] is None else f"{row['value']:.4f}"
        lines.append(f"{row['name']:32} {value:>12} {row['unit']:8} {baseline:>12} {'-' if row['budget'] is None else row['budget']:>10}")
    return lines


def finish(metrics, rows, options):
    """Prints the table and, if asked, the JSON line; the exit status."""
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items() if not isinstance(value, list)))
    print("", *table(metrics), sep="\n")
    if options.json:
        real, slow = getattr(options, "real", False), getattr(options, "slow", 1)
        device = "the GPU of this machine" if real else "simgpu (simulated)"
        more = {"slow": slow} if slow != 1 else {}
        if getattr(options, "driver", ""):
            more["driver"] = options.driver
        print(json.dumps({"commit": commit(), "device": device, "simulated": not real, "cpus": os.cpu_count(), **more,
                          "metrics": metrics, "rows": rows}))
    sys.stdout.flush()
    return verdict(metrics)
