#!/usr/bin/env python3
"""Tests of the validation's own machinery: time limits, ending what was started and nothing else, reports, the workers' dialogue.

    python3 scripts/gpu/test_validate.py

Needs no build, no GPU and no PyTorch (with PyTorch, its worker is tried on the processor). Programs are shell scripts and Python; `sublet` is a stand-in where one is needed.
"""

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import time
import unittest

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from validation import place, runner, sections  # noqa: E402
from validation.context import Context, Skip, Worker, last_json, read_line  # noqa: E402
from validation.processes import Failure, TimedOut, Processes  # noqa: E402
from validation.report import FAILED, PASSED, SKIPPED, Report, Result, cell, number  # noqa: E402
from validation.sections import turns  # noqa: E402

# Far longer than any test may wait: a test that hangs is a failure of the test suite's own limit.
LONG_S = 60


def alive(pid):
    """Whether the process runs; a zombie does not."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(what, condition, seconds=LONG_S):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen in {seconds} s")
        time.sleep(0.01)


class Directory(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.directory = pathlib.Path(self.temporary.name)
        self.addCleanup(self.temporary.cleanup)


class ProcessesTest(Directory):
    def setUp(self):
        super().setUp()
        self.processes = Processes(self.directory / "logs")
        self.addCleanup(self.processes.end_all)

    def shell(self, script, name="script", timeout_s=LONG_S, **kwargs):
        return self.processes.run(["sh", "-c", script], dict(os.environ), name, timeout_s, **kwargs)

    def test_output_and_code_are_kept(self):
        done = self.shell("echo out; echo err >&2; exit 3", expect=(3,))
        self.assertEqual((done.returncode, done.stdout(), done.stderr()), (3, "out\n", "err\n"))

    def test_another_exit_code_is_a_failure_with_the_end_of_stderr(self):
        with self.assertRaisesRegex(Failure, r"exit code 4.*the last words"):
            self.shell("echo the last words >&2; exit 4")

    def test_death_by_a_signal_is_named(self):
        with self.assertRaisesRegex(Failure, "SIGSEGV"):
            self.shell("kill -SEGV $$")

    def test_a_missing_program_is_a_failure(self):
        with self.assertRaisesRegex(Failure, "cannot be started"):
            self.processes.run([self.directory / "none"], {}, "none", 1)

    def test_a_time_limit_ends_the_program_and_its_children_also_stubborn_ones(self):
        pids = self.directory / "pids"
        script = f"trap '' TERM; (trap '' TERM; sleep 1000) & echo $$ $! > {pids}.new; mv {pids}.new {pids}; echo stuck here >&2; wait; sleep 1000"
        started = self.processes.start(["sh", "-c", script], dict(os.environ), "stuck")
        wait_until("the script's start", pids.exists)
        parent, child = map(int, pids.read_text().split())
        self.assertTrue(alive(parent) and alive(child))
        with self.assertRaisesRegex(TimedOut, "did not end within 0 s.*stuck here"):
            started.wait(0.05)
        wait_until("the end of both", lambda: not (alive(parent) or alive(child)))

    def test_children_left_behind_are_ended_with_the_program(self):
        done = self.shell("sleep 1000 & echo $!")
        child = int(done.stdout())
        wait_until("the end of the child", lambda: not alive(child))

    def test_only_what_was_started_is_ended(self):
        bystander = subprocess.Popen(["sleep", "1000"])
        self.addCleanup(bystander.wait)
        self.addCleanup(bystander.kill)
        started = [self.processes.start(["sleep", "1000"], dict(os.environ), "sleep") for _ in range(3)]
        self.processes.end_all()
        self.assertFalse(any(alive(process.pid) for process in started))
        self.assertIsNone(bystander.poll())

    def test_logs_of_the_same_name_do_not_overwrite_each_other(self):
        for word in ("one", "two"):
            self.shell(f"echo {word}", name="same/name")
        texts = sorted(path.read_text() for path in (self.directory / "logs").glob("same_name*.out"))
        self.assertEqual(texts, ["one\n", "two\n"])


class DialogueTest(Directory):
    """Workers by stand-ins that speak the same lines."""

    def context(self, seconds=LONG_S):
        context = Context(place.Place(), False, Result("test", seconds), time.monotonic() + seconds, self.directory / "logs", {})
        self.addCleanup(context.close)
        return context

    def worker(self, context, body, timeout_s=LONG_S):
        script = "import json, sys, time\nanswer = lambda **m: print(json.dumps(m), flush=True)\n" + textwrap.dedent(body)
        return Worker(context, context.start([sys.executable, "-c", script], "stand-in", piped=True), timeout_s)

    def test_it_answers_commands(self):
        worker = self.worker(self.context(), """
            answer(ready=True)
            for line in sys.stdin:
                words = json.loads(line)
                if words["do"] == "exit": break
                answer(twice=2 * words["x"])
        """)
        self.assertTrue(worker.ready["ready"])
        worker.tell("double", x=4)
        worker.tell("double", x=5)
        self.assertEqual([worker.answer(LONG_S, "double")["twice"] for _ in range(2)], [8, 10])
        self.assertEqual(worker.close(), 0)

    def test_an_error_is_a_failure_with_its_message(self):
        worker = self.worker(self.context(), """
            answer(ready=True); sys.stdin.readline(); answer(error="RuntimeError", message="CUDA error: an illegal memory access"); sys.stdin.read()
        """)
        with self.assertRaisesRegex(Failure, "train: RuntimeError: CUDA error: an illegal"):
            worker.ask("train")

    def test_an_end_instead_of_an_answer_is_a_failure_with_stderr(self):
        worker = self.worker(self.context(), "answer(ready=True); sys.stdin.readline(); print('what it said', file=sys.stderr); sys.exit(9)")
        with self.assertRaisesRegex(Failure, r"exit code 9 instead of answering.*what it said"):
            worker.ask("train")

    def test_silence_is_a_failure_and_the_program_is_ended(self):
        context = self.context()
        worker = self.worker(context, "answer(ready=True); print('deep in thought', file=sys.stderr, flush=True); time.sleep(1000)")
        wait_until("its words", lambda: "thought" in worker.process.stderr())
        with self.assertRaisesRegex(TimedOut, "did not answer within 0 s.*deep in thought"):
            worker.ask("train", 0.05)
        self.assertFalse(alive(worker.process.pid))

    def test_half_a_line_is_no_answer(self):
        context = self.context()
        process = context.start([sys.executable, "-c", "print('half', end='', flush=True); import time; time.sleep(1000)"], "half", piped=True)
        with self.assertRaises(TimedOut):
            read_line(process, 0.2)

    def test_no_json_is_a_failure(self):
        context = self.context()
        with self.assertRaisesRegex(Failure, "printed no JSON"):
            last_json(context.run(["sh", "-c", "echo hello"], "hello"))

    def test_the_section_limit_binds_every_wait(self):
        context = self.context(seconds=LONG_S)
        context.deadline = time.monotonic() + 0.3
        # On a machine that is very busy the time may be over before the program has been started.
        with self.assertRaisesRegex(TimedOut, "did not end within 0 s|time is over"):
            context.run(["sleep", "1000"], "sleep", timeout_s=LONG_S)
        wait_until("the end of the section's time", lambda: context.left() <= 0)
        with self.assertRaisesRegex(TimedOut, "time is over"):
            context.run(["true"], "true")

    def test_the_environment_has_nothing_of_the_caller_s_sublet(self):
        os.environ["SUBLET_TOKEN"] = "0" * 32
        os.environ["LD_PRELOAD"] = ""
        self.addCleanup(os.environ.pop, "SUBLET_TOKEN")
        self.addCleanup(os.environ.pop, "LD_PRELOAD")
        self.assertFalse({"SUBLET_TOKEN", "LD_PRELOAD"} & set(self.context().bare))

    @unittest.skipUnless(importlib.util.find_spec("torch"), "PyTorch is not installed")
    def test_the_torch_worker_repeats_itself_on_the_processor(self):
        context = self.context(300)
        words = [sys.executable, context.place.jobs / "torch_worker.py", "--device", "cpu"]
        worker = Worker(context, context.start(words, "torch", piped=True), 200)
        losses = []
        for _ in range(2):
            worker.ask("setup", model="gpt", small=True)
            losses.append(worker.ask("train", model="gpt", steps=4)["losses"])
        self.assertEqual(losses[0], losses[1])
        self.assertEqual(len(set(losses[0])), 4)
        with self.assertRaisesRegex(Failure, "no_such_thing"):
            worker.ask("no_such_thing")
        self.assertEqual(worker.close(), 0)


class RunnerTest(Directory):
    def run_sections(self, rows, budget_s=LONG_S, simulated=True):
        made = [sections.Section(name, run, limit_s, needs, "for a test") for name, run, limit_s, needs in rows]
        report = runner.Runner(made, simulated, self.directory / "out", budget_s, say=lambda _text: None).run()
        self.addCleanup(signal.alarm, 0)
        written = json.loads((self.directory / "out" / "report.json").read_text())
        self.assertEqual(written, json.loads(json.dumps(report.as_dict())))
        return {section["name"]: section for section in written["sections"]}, written

    def test_a_section_that_fails_does_not_stop_the_others(self):
        def failing(_ctx):
            raise Failure("the reason")

        def broken(_ctx):
            raise ZeroDivisionError("oops")

        def wrong(ctx):
            ctx.result.check("one is two", 1 == 2, "they differ")

        def good(ctx):
            ctx.result.check("one is one", True)

        def nothing(_ctx):
            pass

        found, written = self.run_sections([(f.__name__, f, 10, None) for f in (failing, broken, wrong, good, nothing)])
        statuses = {name: row["status"] for name, row in found.items()}
        self.assertEqual(statuses, {"failing": FAILED, "broken": FAILED, "wrong": FAILED, "good": PASSED, "nothing": FAILED})
        self.assertIn("the reason", found["failing"]["reason"])
        self.assertIn("ZeroDivisionError: oops", found["broken"]["reason"])
        self.assertEqual(found["wrong"]["reason"], "one is two (they differ)")
        self.assertEqual((written["passed"], written["failed"], written["skipped"]), (1, 4, 0))

    def test_evidence_is_kept_of_what_fails(self):
        def fails(context):
            context.start([sys.executable, "-c", "import time; time.sleep(60)"], "sleeper")
            (context.directory / "a1").mkdir()
            (context.directory / "a1" / "journal.jsonl").write_text('{"kind":"seen"}\n')
            context.arbiters = 1
            context.result.check("a check", False)

        found, _ = self.run_sections([("fails", fails, 10, None)])
        note = found["fails"]["notes"][-1]
        for name in ("threads.txt", "cgroup.txt", "dmesg.txt", "arbiter-1-journal.jsonl"):
            self.assertIn(name, note)
        with tarfile.open(self.directory / "out" / "logs.tar.gz") as archive:
            names = archive.getnames()
            kept = {name.rpartition("/")[2]: name for name in names if "/evidence/" in name}
            threads = archive.extractfile(kept["threads.txt"]).read().decode()
            journal = archive.extractfile(kept["arbiter-1-journal.jsonl"]).read().decode()
        self.assertIn("of sleeper", threads)
        self.assertIn("seen", journal)

    def test_skips_say_why(self):
        def skipping(_ctx):
            raise Skip("not here")

        found, _ = self.run_sections([("skipping", skipping, 10, None), ("frame", skipping, 10, "torch")])
        self.assertEqual((found["skipping"]["status"], found["skipping"]["reason"]), (SKIPPED, "not here"))
        self.assertIn("PyTorch, which the simulated GPU does not serve", found["frame"]["reason"])

    def test_programs_of_a_section_end_with_it(self):
        pids = []

        def leaving(ctx):
            pids.append(ctx.start(["sleep", "1000"], "sleep").pid)
            ctx.result.check("started", True)

        self.run_sections([("leaving", leaving, 10, None)])
        self.assertFalse(alive(pids[0]))

    def test_what_programs_printed_is_kept_in_one_archive(self):
        def talking(ctx):
            ctx.run(["sh", "-c", "echo a word"], "talker")
            ctx.result.check("ran", True)

        self.run_sections([("talking", talking, LONG_S, None)])
        out = self.directory / "out"
        self.assertEqual(sorted(path.name for path in out.iterdir()), ["logs.tar.gz", "report.json", "report.md"])
        with tarfile.open(out / "logs.tar.gz") as archive:
            self.assertEqual(archive.extractfile("logs/talking/talker.out").read(), b"a word\n")

    def test_a_section_that_hangs_in_itself_is_ended_by_the_alarm(self):
        grace, runner.GRACE_S = runner.GRACE_S, 0.1
        self.addCleanup(setattr, runner, "GRACE_S", grace)

        def hanging(ctx):
            ctx.result.check("got there", True)
            time.sleep(1000)

        def good(ctx):
            ctx.result.check("fine", True)

        found, _ = self.run_sections([("hanging", hanging, 0.2, None), ("good", good, 0.2, None)], budget_s=LONG_S)
        self.assertEqual((found["hanging"]["status"], found["good"]["status"]), (FAILED, PASSED))
        self.assertIn("past its limit", found["hanging"]["reason"])

    def test_what_has_no_time_left_is_skipped(self):
        def good(ctx):
            ctx.result.check("fine", True)

        found, _ = self.run_sections([("first", good, 30, None)], budget_s=5)
        self.assertEqual(found["first"]["status"], SKIPPED)
        self.assertIn("no time left", found["first"]["reason"])

    def test_an_ended_run_reports_what_it_found(self):
        def good(ctx):
            ctx.result.check("fine", True)

        def ended(ctx):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1000)

        found, _ = self.run_sections([("good", good, 10, None), ("ended", ended, 10, None), ("later", good, 10, None)])
        self.assertEqual([found[name]["status"] for name in ("good", "ended", "later")], [PASSED, FAILED, SKIPPED])
        self.assertIn("SIGTERM", found["later"]["reason"])


class ReportTest(Directory):
    def result(self):
        result = Result("pair", 10)
        result.check("share | within", False, "0.6 of 0.5")
        result.figure("ratio", 1.2, "x", at_most=1.005)
        result.figure("fine", 0.99, "x", at_least=0.98)
        result.figure("free", 12345.0, "us")
        result.figure("none", float("nan"), "us", at_most=1)
        result.finish(1.5)
        return result

    def head(self, simulated):
        return {"commit": "abc", "device": "Some GPU", "simulated": simulated, "date": "2026-01-01T00:00:00Z", "seconds": 3.0, "budget_s": 9.0}

    def test_figures_say_what_was_expected_and_a_missed_one_is_no_failed_check(self):
        figures = {row["name"]: row for row in self.result().figures}
        self.assertEqual([figures[name]["within"] for name in ("ratio", "fine", "free", "none")], [False, True, None, None])
        self.assertEqual(figures["ratio"]["expected"], "<= 1.005")
        self.assertIsNone(figures["none"]["value"])
        only_figures = Result("x", 1)
        only_figures.figure("ratio", 2.0, "x", at_most=1)
        only_figures.finish(0)
        self.assertEqual(only_figures.status, PASSED)

    def test_both_files_are_written_and_simulated_is_said(self):
        for simulated in (True, False):
            report = Report(self.head(simulated))
            report.results.append(self.result())
            report.write(self.directory)
            text = (self.directory / "report.md").read_text()
            self.assertEqual("**Simulated.**" in text, simulated)
            self.assertIn("| ratio | 1.2 | x | <= 1.005 | missed |", text)
            self.assertIn("| share \\| within | **wrong** | 0.6 of 0.5 |", text)
            data = json.loads((self.directory / "report.json").read_text())
            self.assertEqual(data["simulated"], simulated)
            row = {"name": "pair.ratio", "value": 1.2, "unit": "x", "expected": "<= 1.005", "within": False}
            self.assertEqual(data["metrics"][0], {**row, "baseline": None, "ratio": None, "budget": None})

    def test_cells_stay_in_their_row(self):
        self.assertEqual(cell("a\nb | c"), "a b \\| c")
        self.assertEqual(len(cell("x" * 500)), 200)
        self.assertEqual([number(v) for v in (None, 3, 1234.0, 0.12345, 123456.7)], ["-", "3", "1234", "0.1235", "123457"])


class ArithmeticTest(unittest.TestCase):
    def test_turns_are_paired_with_the_other_s_nearest_end(self):
        # Turns of 5 ms in ns; each of the two resumes 30 us after the other paused, and once 10 us
        # before it.
        one = [[5_000_000, 10_030_000], [15_000_000, 20_000_000 - 10_000]]
        other = [[10_000_000, 15_030_000], [20_000_000, 25_000_000]]
        hands = turns.paired([{"host_gaps": one}, {"host_gaps": other}], "host_gaps")
        self.assertEqual(sorted(hands), [-10.0, 30.0, 30.0])

    def test_every_section_has_a_name_of_its_own_and_fits_the_run(self):
        names = [section.name for section in sections.ALL]
        self.assertEqual(len(names), len(set(names)))
        expected = {"device", "transparency", "ways", "pytorch_solo", "pytorch_pair", "pytorch_quota", "expandable", "async_alloc", "graphs", "compile",
                    "workers", "amp", "cupy", "jax", "mps", "vllm", "mlp", "overheads", "context_memory", "handover", "vmm", "pcie", "write_value",
                    "fairness", "protect"}
        self.assertLessEqual(expected, set(names))

    def test_five_calls_are_everything_and_all_but_the_last_fit(self):
        called = [name for call in sections.CALLS.values() for name in call]
        self.assertEqual(set(called), {section.name for section in sections.ALL})
        self.assertEqual({name for name in called if called.count(name) > 1}, {"device"})
        limits = {section.name: section.limit_s for section in sections.ALL}
        for call in list(sections.CALLS)[:-1]:
            self.assertLessEqual(sum(limits[name] for name in sections.CALLS[call]), 500, call)


@unittest.skipIf(place.Place().missing(simulated=True), "there is no build to rehearse with")
class RehearsalTest(Directory):
    """The sections on the simulated GPU, PyTorch's with a stand-in for its worker (rehearsal/)."""

    def rehearse(self, *names, limit_s=200):
        made = [section._replace(needs=None, limit_s=limit_s) for section in sections.ALL if section.name in names]
        where = place.Place()
        where.jobs = HERE / "rehearsal"
        running = runner.Runner(made, True, self.directory / "out", limit_s * len(made), where, say=lambda _text: None)
        running.shared["small"] = True
        report = running.run()
        self.assertEqual([result.name for result in report.results], [section.name for section in made])
        for result in report.results:
            # Shares are figures of time, and this machine has other work: they are shown, not
            # judged here.
            wrong = [check for check in result.checks if not check["ok"] and "share" not in check["name"]]
            self.assertEqual(wrong, [], result.name)
            self.assertTrue(result.checks, f"{result.name}: {result.reason}")
            self.assertTrue(result.status == PASSED or "share" in result.reason, f"{result.name}: {result.reason}")
        return {result.name: result for result in report.results}

    def test_the_sections_of_the_driver_find_what_they_look_for(self):
        found = self.rehearse("device", "write_value", "ways", "vmm", "pcie", "context_memory")
        self.assertTrue(any("Simulated" in line for line in (self.directory / "out" / "report.md").read_text().splitlines()))
        self.assertGreater(len(found["vmm"].figures), 10)

    def test_the_sections_of_neighbours_and_streams_find_what_they_look_for(self):
        found = self.rehearse("marks_beside", "vmm_beside", "pin_beside", "streams")
        names = [figure["name"] for result in found.values() for figure in result.figures]
        for name in ("visible_beside_5000us_kernels_p99", "neighbour_access_p99", "alloc_free_beside_pins_p99", "six_streams_launch_added"):
            self.assertIn(name, names)

    def test_the_pytorch_sections_hold_their_dialogue_under_quotas_and_shares(self):
        found = self.rehearse("pytorch_solo", "pytorch_pair", "pytorch_quota", "expandable", "async_alloc", "graphs")
        self.assertIn("the arbiter counted the refusal", [check["name"] for check in found["pytorch_quota"].checks])

    def test_the_sections_of_mps_and_vllm_find_what_they_look_for(self):
        path = os.environ["PATH"]
        self.addCleanup(os.environ.__setitem__, "PATH", path)
        os.environ["PATH"] = f"{HERE / 'rehearsal'}:{path}"
        found = self.rehearse("mps", "vllm")
        names = [check["name"] for result in found.values() for check in result.checks]
        for name in ("losses are equal to the bit", "more than the limit is refused", "answers are equal", "every worker was inside"):
            self.assertIn(name, names)
        self.assertTrue(any("followed by writes" in note for note in found["mps"].notes), found["mps"].notes)

    def test_without_mps_its_section_is_skipped_with_the_reason(self):
        made = [section for section in sections.ALL if section.name == "mps"]
        running = runner.Runner(made, True, self.directory / "out", LONG_S, place.Place(), say=lambda _text: None)
        path = os.environ["PATH"]
        self.addCleanup(os.environ.__setitem__, "PATH", path)
        os.environ["PATH"] = str(self.directory)
        (result,) = running.run().results
        self.assertEqual((result.status, result.reason), (SKIPPED, "nvidia-cuda-mps-control is not on the path"))

    def test_the_sections_of_time_measure_what_kernels_did(self):
        found = self.rehearse("fairness", "protect")
        names = [figure["name"] for figure in found["fairness"].figures + found["protect"].figures]
        self.assertIn("mixed_kernels_share_error", names)
        self.assertIn("service_unmanaged_p99", names)

    def test_the_sections_of_jobs_side_by_side_compare_every_way_with_one_baseline(self):
        found = self.rehearse("corun_facts", "corun")
        names = [figure["name"] for result in found.values() for figure in result.figures]
        for name in ("lost_for_each_burst", "kept_beside_a_blocked_stream", "cnn_gpt_plain_sum_of_speeds", "two_gpts_lend_3_1_margin",
                     "two_gpts_lend_over_plain"):
            self.assertIn(name, names)

    def test_the_sections_of_residency_move_jobs_and_lose_nothing(self):
        found = self.rehearse("residency", "residency_pytorch")
        self.assertGreater(len(found["residency"].figures), 6)
        self.assertTrue(any("out in" in note for note in found["residency_pytorch"].notes))


class CommandLineTest(Directory):
    def validate(self, *words):
        return subprocess.run([sys.executable, HERE / "validate", *words], capture_output=True, text=True, timeout=LONG_S)

    def test_wrong_arguments_are_reported_and_nothing_is_written(self):
        done = self.validate("--section", "device,nonsense", "--out", str(self.directory / "out"))
        self.assertEqual(done.returncode, 2)
        self.assertIn("unknown section nonsense", done.stderr)
        self.assertFalse((self.directory / "out").exists())

    def test_sections_are_listed(self):
        done = self.validate("--list")
        self.assertEqual(done.returncode, 0, done.stderr)
        for section in sections.ALL:
            self.assertIn(section.name, done.stdout)


if __name__ == "__main__":
    unittest.main()
