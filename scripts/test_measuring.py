#!/usr/bin/env python3
"""Tests of what scripts have in common: names that are bound; of those that measure help, the last line, the exit status.

    python3 scripts/test_measuring.py

A measuring script is an executable below scripts/ whose help names --json. Those that take no more than seconds are run.
"""

import ast
import builtins
import contextlib
import importlib.machinery
import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[1]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "scripts/bench"))
import recordings  # noqa: E402
import sharing  # noqa: E402

# Each with what makes it quick, or why it is not run here.
MEASURING = {
    "scripts/accounting": "starts jobs",
    "scripts/bench/corun": "takes minutes",
    "scripts/bench/elastic": "takes minutes",
    "scripts/bench/engines": "starts a Slurm, takes minutes",
    "scripts/bench/fairness": "takes minutes",
    "scripts/bench/interfere": "takes minutes",
    "scripts/bench/iterations": "takes minutes",
    "scripts/bench/overhead": "takes minutes",
    "scripts/bench/policies": "takes minutes",
    "scripts/bench/protect": "takes minutes",
    "scripts/bench/replay": "takes minutes",
    "scripts/bench/rows": "builds",
    "scripts/bench/scaling": "takes minutes",
    "scripts/bench/serving": "takes minutes",
    "scripts/bench/switch": "takes minutes",
    "scripts/containerd": "fetches packages, starts a containerd",
    "scripts/coverage": "builds",
    "scripts/demo": "takes minutes",
    "scripts/duplicates": ["channel", "--json"],
    "scripts/faults": "runs the tests of the workspace",
    "scripts/gpu/validate": "takes minutes",
    "scripts/k8s": "builds Kubernetes, starts one",
    "scripts/nvml-tools": "fetches packages, builds, starts jobs",
    "scripts/package": "fetches packages, boots a Debian",
    "scripts/ray": "fetches Ray, starts two nodes of it",
    "scripts/real-programs": "installs programs",
    "scripts/real-driver": "fetches NVIDIA's packages, takes minutes",
    "scripts/slurm": "installs packages, starts a Slurm",
    "scripts/sim/calibrate": "builds; its program is run",
    "scripts/sim/packers": "builds",
    "scripts/sim/systems": "builds",
    "scripts/sim/scale": "builds",
    "scripts/soak/programs": "builds, starts jobs",
    "scripts/soak/residency": "takes minutes",
    "scripts/soak/storms": "takes minutes",
    "scripts/transparency": "builds",
    "scripts/ways-in": "starts jobs",
    "scripts/wheel": "fetches build tools, builds",
    "scripts/words": ["channel", "--json"],
}
LINE = {"commit", "device", "simulated", "cpus", "metrics"}
ROW = {"name", "value", "unit", "baseline", "ratio", "budget"}


def run(*words):
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([str(word) for word in words], cwd=ROOT, env=env, text=True, capture_output=True, timeout=600)


def executables():
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", "scripts").stdout.splitlines()
    return [name for name in listed if os.access(ROOT / name, os.X_OK) and (ROOT / name).is_file()]


def undefined(text):
    """Names that a Python program uses and that nothing in it binds: what only fails when that line is run."""
    tree = ast.parse(text)
    bound = {*dir(builtins), "__file__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return sorted({f"line {node.lineno}: {node.id}" for node in used if node.id not in bound})


class Scripts(unittest.TestCase):
    def test_names_that_are_used_are_bound(self):
        listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard").stdout.splitlines()
        seen = 0
        for name in listed:
            path = ROOT / name
            if not path.is_file() or path.is_symlink():
                continue
            with open(path, "rb") as file:
                first = file.readline(80)
            if not (path.suffix == ".py" or first.startswith(b"#!") and b"python3" in first):
                continue
            seen += 1
            with self.subTest(name):
                self.assertEqual(undefined(path.read_text()), [])
        self.assertGreater(seen, 20)

    def test_a_name_that_nothing_binds_is_found(self):
        self.assertEqual(undefined("import json\ndef f(a):\n    return json.dumps(a, os)\n"), ["line 3: os"])


class Measuring(unittest.TestCase):
    def is_agreed(self, text):
        line = json.loads(text.splitlines()[-1])
        self.assertLessEqual(LINE, line.keys())
        self.assertTrue(line["metrics"])
        for row in line["metrics"]:
            self.assertLessEqual(ROW, row.keys(), row)

    def test_help_is_cheap_and_names_every_measuring_script(self):
        found = set()
        for name in executables():
            # Those that do not measure are not called at all: one without help would do its work.
            if "--json" not in (ROOT / name).read_text(errors="replace") or name == "scripts/" + pathlib.Path(__file__).name:
                continue
            with self.subTest(name):
                if name not in MEASURING:
                    text = (ROOT / name).read_text()
                    self.assertFalse('add_argument("--json"' in text or "[--json]" in text, "MEASURING is to have it")
                    continue
                found.add(name)
                shown = run(ROOT / name, "--help")
                self.assertEqual((shown.returncode, shown.stderr), (0, ""))
                self.assertIn("--json", shown.stdout)
        self.assertEqual(found, set(MEASURING))

    def test_the_last_line_is_the_agreed_one(self):
        for name, words in MEASURING.items():
            if isinstance(words, list):
                with self.subTest(name):
                    done = run(ROOT / name, *words)
                    self.is_agreed(done.stdout)
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_the_simulator_s_programs_end_with_it_too(self):
        # `cargo test` of the workspace has built them; built alone they would have other
        # features, and be built anew.
        if not os.environ.get("SUBLET_TEST_ARTEFACTS"):
            run("cargo", "build", "--locked", "--quiet", "-p", "cluster", "--example", "calibrate", "--example", "systems")
        for program in (["calibrate", "--quick"], ["systems", "--quick"]):
            done = run(TARGET / "debug/examples" / program[0], *program[1:], "--json")
            self.is_agreed(done.stdout)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_a_required_row_that_fails_is_named_and_is_the_exit_status(self):
        rows = [sharing.metric("kept", 1, "ms", budget=2), sharing.metric("none", 9, "ms")]
        slow = sharing.metric("slow", 3, "ms", budget=2)
        few = sharing.metric("link_fraction", 0.5, "x", budget=0.85)
        at_least = {**sharing.metric("cycles", 5, "", budget=9), "at_least": True}
        for more, status in (([], 0), ([slow], 1), ([few], 1), ([at_least], 1)):
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                self.assertEqual(sharing.verdict([*rows, *more]), status)
            self.assertEqual([row["name"] in said.getvalue() for row in more], [True] * len(more))

    def test_a_case_runs_until_it_was_calm_three_times_and_its_calmest_runs_count(self):
        calm_ms = int(sharing.CALM * 1000 * (os.cpu_count() or 1))
        steals = {
            "calm": [0, calm_ms, 0],
            "late": [900, 0, 0, 800, calm_ms],
            "never": [700, 300, 500, 600, 800, 900],
            # Two rows, each of which has a calm run three times.
            "halves": [(0, 90), (80, 0), (0, 0), (0, 70), (0, 0)],
        }
        runs = {name: iter(left) for name, left in steals.items()}

        def run(name):
            stolen = next(runs[name])
            # The figure is what was stolen, so that it shows which runs count.
            both = stolen if isinstance(stolen, tuple) else (stolen,)
            return [{"case": name, "steal_ms": ms, "figure": ms, "none": None, "tenants": [ms]} for ms in both]

        rows = sharing.undisturbed(list(steals), 6, 1, run)
        found = [(row["case"], row["figure"], row["none"], row["tenants"]) for row in rows]
        self.assertEqual(found, [("calm", 0, None, [0]), ("late", 0, None, [0]), ("never", 500, None, [300]),
                                 ("halves", 0, None, [0]), ("halves", 0, None, [0])])
        # None was run more often than needed, nor any more than six times.
        self.assertEqual([list(left) for left in runs.values()], [[], [], [], []])


def loaded(name, path):
    """A script as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


class RealPrograms(unittest.TestCase):
    """scripts/real-programs: what a quota changes because a device of its size would."""

    def of_the_size(self, governed, small):
        programs = loaded("real_programs", "scripts/real-programs")
        changed = [{"test": "t", "way": way, "governed": outcome} for way, outcome in governed]
        return programs.of_the_size(changed, {"t": {"outcome": small}} if small else {})

    def test_what_a_device_of_that_size_does_as_well_is_no_change(self):
        self.assertEqual(self.of_the_size([("quota", "skipped"), ("quota", "skipped")], "skipped"), {"t"})

    def test_what_only_the_quota_does_stays_a_change(self):
        self.assertEqual(self.of_the_size([("quota", "skipped")], "failed"), set())
        self.assertEqual(self.of_the_size([("quota", "skipped"), ("quota", "failed")], "skipped"), set())
        self.assertEqual(self.of_the_size([("quota", "skipped")], None), set())

    def test_what_hangs_bare_is_not_compared_and_what_hangs_governed_is_a_change(self):
        programs = loaded("real_programs", "scripts/real-programs")
        run = lambda outcome: [{"t": {"outcome": outcome}}]
        self.assertEqual(programs.compare({"bare": run("hung"), "quota": run("failed")}), ([], ["t"]))
        changed, unstable = programs.compare({"bare": run("failed"), "quota": run("hung")})
        self.assertEqual(([line["governed"] for line in changed], unstable), (["hung"], []))

    def test_a_race_explains_the_test_that_has_it_and_no_other(self):
        programs = loaded("real_programs", "scripts/real-programs")
        (program, racing), = programs.RACES
        line = lambda test, governed: {"test": test, "bare": "failed", "governed": governed}
        lines = [line(racing, "passed"), line(racing, "hung"), line("other", "passed")]
        self.assertEqual(programs.by_race(program, lines), (lines[1:], {racing}))
        self.assertEqual(programs.by_race("pycuda", lines), (lines, set()))

    def test_without_a_limit_no_size_explains_anything(self):
        self.assertEqual(self.of_the_size([("no limit", "skipped")], "skipped"), set())


class RealDriver(unittest.TestCase):
    """scripts/real-driver: which differences count."""

    def setUp(self):
        self.module = loaded("real_driver", "scripts/real-driver")

    def judged(self, bare, interposed):
        """The difference that is found where each side gives these answers to a question, one after another; the last for ever."""
        left = {"bare": list(bare), "preloaded": list(interposed)}

        def ask(way, questions):
            del questions
            return {"f": left[way].pop(0) if len(left[way]) > 1 else left[way][0]}

        found = self.module.Comparison()
        found.compare("calls", "550", "before zeros", ask, ["preloaded"], again=True)
        return [(row["bare"], row["interposed"]) for row in found.rows], found.unstable

    def test_what_always_differs_is_a_difference(self):
        self.assertEqual(self.judged(["0"], ["1"]), ([("0", "1")], []))
        self.assertEqual(self.judged(["signal 11"], ["1"]), ([("signal 11", "1")], []))

    def test_what_differs_bare_as_well_is_none(self):
        self.assertEqual(self.judged(["0", "0", "7"], ["1"]), ([], ["550 calls before zeros f"]))

    def test_a_driver_that_crashes_on_it_with_us_in_front_too_is_none(self):
        self.assertEqual(self.judged(["signal 11"], ["1", "1", "signal 11"]), ([], ["550 calls before zeros f"]))

    def test_an_answer_that_only_we_change_now_and_then_stays_a_difference(self):
        self.assertEqual(self.judged(["0"], ["1", "0"]), ([("0", "1")], []))


class Recordings(unittest.TestCase):
    """scripts/bench/recordings.py and scripts/steady: steady steps, from recordings and from figures."""

    FOLDER = ROOT / "examples/recordings/steady"

    def recorded(self):
        """Three steps of two launches, each begun by a copy of 64 bytes, with memory taken before and the recorder's time in all lengths."""
        out = recordings.Writer()
        start = recordings.synthetic(["k"])
        out.records.extend(start.records)
        out.order = len(out.records)
        out.call(recordings.blank(recordings.TAKE, thread=1)._replace(object=7, a=4096), 0)
        for _ in range(4):
            out.call(recordings.blank(recordings.COPY, thread=1)._replace(sub=1, a=64), 1000, 500)
            for _ in range(2):
                out.launch(recordings.blank(recordings.LAUNCH, thread=1)._replace(stream=1, object=1), 20_000, 30_000)
            out.call(recordings.blank(recordings.WAIT, thread=1), 0, 900_000)
        return start._replace(records=out.records)

    def cut(self):
        return recordings.steady(self.recorded(), input_bytes=64, every=1, first=1, last=3, threads=(1,), recorder_ns=4200, host_scale=0.5, call_ns=4100)

    def test_what_is_written_is_read_back(self):
        one = recordings.derived(self.recorded(), "nothing")
        self.assertEqual(recordings.parse(recordings.packed(one)), one)
        damaged = bytearray(recordings.packed(one))
        damaged[-3] ^= 1
        with self.assertRaises(ValueError):
            recordings.parse(bytes(damaged))

    def test_a_cut_has_whole_steps_without_the_recorders_time(self):
        figures = recordings.figures(self.cut())
        self.assertEqual((figures["steps"], figures["launches"]), (2, 4))
        self.assertAlmostEqual(figures["device_ms"], 4 * (30_000 - 4200) / 1e6)
        # (gap + call) x 0.5 less the launch's own 4.1 us; of waits no time of theirs.
        copy, launch = 1500 * 0.5, (20_000 + 1000) * 0.5 - 4100
        self.assertAlmostEqual(figures["host_ms"], 2 * (copy + 2 * launch) / 1e6, places=5)

    def test_steps_are_repeated_and_what_they_use_is_made_once(self):
        three = recordings.repeated(self.cut(), 3)
        figures = recordings.figures(three)
        self.assertEqual((figures["steps"], figures["launches"]), (6, 12))
        self.assertEqual(sum(one.kind == recordings.TAKE for one in three.records), 1)
        orders = [one.order for one in recordings.calls(three)]
        self.assertEqual(len(orders), len(set(orders)))
        lengths = recordings.measured(three)
        self.assertTrue(all(one.order in lengths for one in three.records if one.kind == recordings.LAUNCH))

    def test_what_is_shipped_says_that_it_was_made_and_is_what_is_made(self):
        done = run("scripts/steady", "--check")
        self.assertEqual(done.returncode, 0, done.stderr)
        files = sorted(self.FOLDER.glob("*.slr"))
        self.assertGreater(len(files), 8)
        for path in files:
            recording = recordings.read(path)
            self.assertIn("derived", recording.provenance, path.name)
            self.assertGreater(recordings.figures(recordings.repeated(recording, 2))["steps"], 1, path.name)


class Corun(unittest.TestCase):
    """scripts/bench/corun: what is made of samples."""

    @classmethod
    def setUpClass(cls):
        cls.script = loaded("corun", "scripts/bench/corun")

    def summed(self, *samples, solo=(0.5, 0.5), shares=(0.5, 0.5), error=None):
        return self.script.summary([{"samples": list(samples), "solo": list(solo), "shares": list(shares), "charge_error_pct": error}])

    def value(self, rows, name):
        return {row["name"]: row["value"] for row in rows}.get(name)

    def test_a_speed_is_what_ended_over_what_ended_alone(self):
        one = self.summed([0.4, 0.4], [0.5, 0.3])
        self.assertEqual([round(speed, 6) for speed in one["speeds"]], [0.8, 0.8])
        self.assertAlmostEqual(one["sum"], 1.6)

    def test_margin_and_shortfall_are_of_the_worst_second(self):
        samples, solo, shares = [[0.4, 0.2], [0.5, 0.5]], [0.5, 0.5], [0.5, 0.5]
        self.assertAlmostEqual(self.script.margin_points(samples, solo, shares)[0], 100 * (0.2 / 0.5 - 0.5))
        # Half of the 0.7 that both had in the second one, of which it had 0.2.
        self.assertAlmostEqual(self.script.shortfall_points(samples, solo, shares)[0], 15)
        # It has no more alone than that: nothing is short.
        self.assertAlmostEqual(self.script.shortfall_points([[0.2], [0.7]], [0.2, 0.9], shares)[0], 0)

    def test_the_spread_is_over_rounds(self):
        run_ = lambda rate: {"samples": [[rate], [rate]], "solo": [0.5, 0.5], "shares": [0.5, 0.5]}
        one = self.script.summary([run_(0.3), run_(0.4), run_(0.5)])
        self.assertAlmostEqual(one["sum"], 1.6)
        self.assertAlmostEqual(one["spread"], 0.8)

    def test_the_error_of_the_simulation_is_against_what_was_measured_in_the_same_mode(self):
        mixes = self.script.MIXES
        found = {("CNN + GPT", "plain"): self.summed([0.5], [0.45]), ("CNN + GPT", "exclusive"): self.summed([0.25], [0.25])}
        rows = self.script.metrics(mixes, found)
        self.assertAlmostEqual(self.value(rows, "twin_error_points"), 6)
        self.assertFalse([row for row in rows if sharing.met(row) is False])
        rows = self.script.metrics(mixes, {("CNN + GPT", "exclusive"): self.summed([0.3], [0.3])})
        self.assertAlmostEqual(self.value(rows, "twin_error_points"), 26)
        self.assertIs(sharing.met(rows[0]), False)

    def test_a_host_that_was_too_busy_to_play_a_job_is_seen(self):
        found = {("two GPTs", "plain"): self.summed([0.2], [0.2], solo=(0.389, 0.778))}
        self.assertAlmostEqual(self.value(self.script.metrics(self.script.MIXES, found), "solo_error_pct_max"), 50, places=0)

    def test_metrics_of_lend_come_with_it_and_fail_where_it_costs_too_much(self):
        mixes = self.script.MIXES
        found = {("CNN + GPT", mode): self.summed([rate], [rate], error=1.0) for mode, rate in (("plain", 0.5), ("exclusive", 0.25), ("lend", 0.48))}
        rows = self.script.metrics(mixes, {key: one for key, one in found.items() if key[1] != "lend"})
        self.assertIsNone(self.value(rows, "lend_over_plain_equal_min"))
        rows = self.script.metrics(mixes, found)
        self.assertAlmostEqual(self.value(rows, "lend_over_plain_equal_min"), 0.96)
        self.assertAlmostEqual(self.value(rows, "lend_over_slices_cnn_gpt"), 1.92)
        self.assertEqual(self.value(rows, "charge_error_pct_max"), 1.0)
        missed = [row["name"] for row in rows if sharing.met(row) is False]
        self.assertEqual(missed, ["twin_error_points", "lend_over_plain_equal_min"])

    def test_a_margin_below_the_promise_fails_and_one_that_waits_for_each_is_reported_apart(self):
        mixes = self.script.MIXES
        rows = self.script.metrics(mixes, {("waits + hog", "lend"): self.summed([0.5, 0.2], [0.5, 0.5])})
        self.assertAlmostEqual(self.value(rows, "margin_points_min"), -10)
        self.assertIn("margin_points_min", [row["name"] for row in rows if sharing.met(row) is False])
        rows = self.script.metrics(mixes, {("waits for each + hog", "lend"): self.summed([0.21], [0.5])})
        self.assertAlmostEqual(self.value(rows, "margin_waits_each_points_min"), -8)
        self.assertAlmostEqual(self.value(rows, "margin_points_min"), 50)

    def test_a_charge_is_judged_by_the_devices_own_account(self):
        self.assertAlmostEqual(self.script.charge_error_pct([51, 52], [50, 50]), 4)
        self.assertAlmostEqual(self.script.charge_error_pct([0, 50], [50, 50]), 100)
        self.assertIsNone(self.script.charge_error_pct([0, 0], [0, 0]))

    def test_every_mix_is_of_recordings_that_are_there(self):
        for one in self.script.MIXES:
            self.assertAlmostEqual(sum(one["shares"]), 1, msg=one["name"])
            for job in one["jobs"]:
                self.assertTrue((self.script.STEADY / f"{job}.slr").exists(), job)


class Programs(unittest.TestCase):
    """scripts/soak/programs: what its programs are, and how failures are shrunk and reports merged."""

    @classmethod
    def setUpClass(cls):
        cls.script = loaded("soak_programs", "scripts/soak/programs")
        cls.generate = cls.script.generate

    HEAD = ["devices 1", "mem 64", "evictable 0", "process 0", "thread 0", "stream 0 0", "stream 1 0"]

    def wrong(self, *lines):
        return self.generate.faults([*self.HEAD, *lines])

    def test_three_hundred_programs_are_legal_and_come_again_by_their_seed(self):
        words = set()
        for seed in range(300):
            lines = self.generate.program(seed)
            self.assertEqual(self.generate.faults(lines), [], seed)
            self.assertEqual(lines, self.generate.program(seed))
            words |= {line.split()[0] for line in lines}
        # All that there is to do is done.
        self.assertLessEqual({"take", "over", "never", "host", "callback", "await", "write", "raise", "wait", "lock", "follow", "graph", "play",
                              "watched", "context", "barrier", "spawn", "join", "exec", "exit", "send"}, words)

    def test_the_checker_refuses_what_would_wait_for_itself(self):
        for lines in (
            ("await 0 0", "sync 0", "raise 0"),
            ("await 0 0", "kernel 0 5 1"),
            ("await 0 0", "write 0 0", "sync 0"),
            ("await 0 0", "await 1 1", "write 0 1", "write 1 0", "sync 1"),
            ("host 0 wait 0", "host 1 lock 0", "sync 1", "raise 0"),
            ("lock 0", "host 0 lock 0", "sync 0", "unlock 0"),
            ("lock 0", "host 0 lock 0"),
            ("await 0 0", "take 0 0 alloc 2", "raise 0"),
            ("await 0 0", "syncall 0", "raise 0"),
            ("host 0 wait 0", "send 0 0 1", "raise 0"),
            ("wait 0", "thread 1", "wait 1", "raise 0", "process 0", "thread 0", "raise 1"),
            ("barrier", "thread 1", "kernel 0 5 1"),
            ("follow 0 0",),
        ):
            with self.subTest(lines):
                self.assertTrue(self.wrong(*lines))

    def test_the_checker_allows_what_ends(self):
        for lines in (
            ("await 0 0", "kernel 0 5 9", "raise 0", "sync 0"),
            ("await 0 0", "sync 1", "write 1 0", "sync 0"),
            ("lock 0", "host 0 lock 0", "kernel 0 5 9", "unlock 0", "sync 0"),
            ("host 0 wait 0", "sync 1", "raise 0", "sync 0"),
            ("wait 0", "thread 1", "raise 0"),
        ):
            with self.subTest(lines):
                self.assertEqual(self.wrong(*lines), [])

    def test_known_programs_are_legal(self):
        known = sorted((ROOT / "scripts/soak/programs.d/known").glob("*.prog"))
        self.assertGreater(len(known), 10)
        for path in known:
            self.assertEqual(self.generate.faults(path.read_text().splitlines()), [], path.name)

    def test_a_shrunk_program_still_fails_and_is_legal(self):
        for seed in range(40):
            lines = self.generate.program(seed)
            fails = lambda text: any(line.startswith("look") for line in text) and any(line.startswith("kernel") for line in text)
            if not fails(lines):
                continue
            small = self.script.shrink(lines, fails, 20)
            self.assertTrue(fails(small))
            self.assertEqual(self.generate.faults(small), [])
            self.assertLessEqual(len(small), len(lines))
            self.assertLessEqual(len(small), 25, small)

    def test_a_report_counts_each_seed_once_and_by_its_last_run(self):
        row = {"seed": 2, "mode": "alone", "kind": "hung", "why": "w"}
        first = self.script.merge({}, "a", [1, 2, 3], [row], [], [])
        self.assertEqual((first["programs"], first["seeds"], first["failures"]), (3, [[1, 3]], [row]))
        second = self.script.merge(first, "b", [2, 7], [], [], [])
        self.assertEqual((second["programs"], second["seeds"], second["failures"]), (4, [[1, 3], [7, 7]], []))
        self.assertEqual(second["commits"], {"a": 3, "b": 2})


if __name__ == "__main__":
    unittest.main()
