"""Runs sections one after the other inside a budget of time, and writes the report after each."""

import datetime
import pathlib
import shutil
import signal
import sys
import tarfile
import time
import traceback

from . import place as place_module
from .context import Context, Skip
from .frameworks import importable
from .processes import Failure, TimedOut
from .report import FAILED, SKIPPED, Report, Result

# Between the limit that a section knows and the alarm that ends it in whatever it does.
GRACE_S = 3


class Alarm(TimedOut):
    """Raised out of whatever the section was doing."""


def on_alarm(_number, _frame):
    raise Alarm("the section went on past its limit")


class Interrupted(BaseException):
    """The run is to end: what was found so far is reported."""


def on_end(number, _frame):
    raise Interrupted(f"ended by {signal.Signals(number).name}")


class Runner:
    def __init__(self, sections, simulated, out, budget_s, place=None, say=None):
        self.sections = sections
        self.simulated = simulated
        self.out = pathlib.Path(out)
        self.place = place or place_module.Place()
        self.begun = time.monotonic()
        self.end = self.begun + budget_s
        self.say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self.shared = {}
        self.report = Report({
            "commit": self.place.commit(),
            "device": "unknown",
            "driver": None,
            "cuda": None,
            "torch": None,
            "simulated": simulated,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "budget_s": budget_s,
            "seconds": 0.0,
            **place_module.host(),
        })

    def run(self):
        handlers = {number: on_end for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)} | {signal.SIGALRM: on_alarm}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            self.run_all()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        self.archive_logs()
        return self.report

    def archive_logs(self):
        """One file instead of hundreds: the report often has to travel."""
        logs = self.out / "logs"
        if not logs.is_dir():
            return
        new = self.out / ".logs.tar.gz.new"
        with tarfile.open(new, "w:gz") as archive:
            archive.add(logs, "logs")
        new.replace(self.out / "logs.tar.gz")
        shutil.rmtree(logs)

    def run_all(self):
        interrupted = None
        for section in self.sections:
            result = Result(section.name, section.limit_s)
            if interrupted:
                result.status, result.reason = SKIPPED, f"the run was {interrupted}"
            else:
                try:
                    self.one(section, result)
                except Interrupted as why:
                    interrupted = str(why)
                except Failure as failure:
                    # The alarm came while the section was being tidied up.
                    result.status, result.reason = FAILED, str(failure)
            self.report.results.append(result)
            self.publish()
            self.say(f"{result.name:16} {result.status:8} {result.seconds:6.1f} s  {' '.join(result.reason.split())[:160]}")

    def one(self, section, result):
        begun = time.monotonic()
        left = self.end - begun
        if self.simulated and section.needs:
            result.status, result.reason = SKIPPED, f"needs {NAMES[section.needs]}, which the simulated GPU does not serve"
            return
        if left < min(10, section.limit_s):
            result.status, result.reason = SKIPPED, f"no time left: {left:.0f} s of the run's budget"
            return
        limit = min(section.limit_s, left)
        result.limit_s = round(limit, 1)
        context = Context(self.place, self.simulated, result, begun + limit, self.out / "logs" / section.name, self.shared)
        try:
            signal.setitimer(signal.ITIMER_REAL, limit + GRACE_S)
            missing = section.needs and importable(context, section.needs)
            if missing:
                raise Skip(f"{NAMES[section.needs]} cannot be used here: {missing}")
            section.run(context)
        except Skip as why:
            result.status, result.reason = SKIPPED, str(why)
        except Failure as failure:
            result.status, result.reason = FAILED, str(failure)
        except Interrupted as why:
            result.status, result.reason = FAILED, f"the run was {why}"
            raise
        except Exception as error:
            result.status = FAILED
            result.reason = f"the section itself failed with {type(error).__name__}: {error}\n" + traceback.format_exc()[-1500:].replace(f"{place_module.ROOT}/", "")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if result.has_failed():
                kept = context.keep_evidence()
                result.note(f"evidence in the logs: {', '.join(kept)}" if kept else "no evidence could be written")
            context.close()
            result.finish(time.monotonic() - begun)

    def publish(self):
        head = self.report.head
        device = self.shared.get("device", {})
        head["device"] = device.get("name", head["device"])
        head["driver"], head["cuda"] = device.get("driver"), device.get("cuda")
        head["torch"] = self.shared.get("versions", {}).get("torch")
        head["seconds"] = round(time.monotonic() - self.begun, 1)
        self.report.write(self.out)


NAMES = {"torch": "PyTorch", "cupy": "CuPy", "jax": "JAX", "vllm": "vLLM"}
