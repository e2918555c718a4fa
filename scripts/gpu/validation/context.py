"""What a section has at hand: programs bare and governed, an arbiter of its own, and its result to write to."""

import json
import os
import pathlib
import select
import sys
import tempfile
import time

from .evidence import collect
from .place import bare_env
from .processes import Failure, TimedOut, Processes, describe

ENV_PRINTER = "import json, os, sys; print(json.dumps(dict(os.environ)), flush=True); sys.stdin.read()"


class Skip(Exception):
    """The section does not apply here; the message says why."""


class Context:
    def __init__(self, place, simulated, result, deadline, logs, shared):
        self.place = place
        self.simulated = simulated
        self.result = result
        self.deadline = deadline
        self.logs = logs
        # Between sections: what was found out once (`torch`, `device`).
        self.shared = shared
        self.processes = Processes(logs)
        # Sockets live here: their paths must be short.
        self.scratch = tempfile.TemporaryDirectory(prefix="sublet-gpu-")
        self.directory = pathlib.Path(self.scratch.name)
        self.bare = bare_env(place, simulated, self.directory / "sim")
        self.arbiters = 0

    def close(self):
        self.processes.end_all()
        self.scratch.cleanup()

    def keep_evidence(self):
        """Of a section that failed, before its programs are ended: the names of what was written."""
        directories = [self.directory / f"a{number}" for number in range(1, self.arbiters + 1)]
        return collect(self.logs / "evidence", directories, self.processes.all, self.simulated)

    # Time

    def left(self):
        return self.deadline - time.monotonic()

    def limit(self, at_most):
        """`at_most` seconds, or what is left of the section."""
        left = self.left()
        if left <= 0:
            raise TimedOut("the section's time is over")
        return min(at_most, left)

    def pause(self, seconds):
        time.sleep(self.limit(seconds))

    # Programs

    def run(self, command, name, timeout_s=60, env=None, expect=(0,)):
        return self.processes.run(command, env or self.bare, name, self.limit(timeout_s), expect)

    def json_of(self, command, name, timeout_s=60, env=None, expect=(0,)):
        """The JSON object that a program prints as its last line."""
        return last_json(self.run(command, name, timeout_s, env, expect))

    def last_json_of(self, process, timeout_s):
        """The JSON object that a program that was started prints as its last line, once it has ended well."""
        code = process.wait(self.limit(timeout_s))
        if code:
            raise Failure(f"{process.name} ended with {describe(code)}: {process.last_lines()}")
        return last_json(process)

    def json_text(self, command, name, timeout_s=60, env=None, expect=(0,)):
        """The JSON that is all of what a program prints."""
        process = self.run(command, name, timeout_s, env, expect)
        try:
            return json.loads(process.stdout())
        except ValueError:
            raise Failure(f"{name} printed no JSON; {process.last_lines()}") from None

    def probe(self, *words, name=None, timeout_s=60, env=None):
        return self.json_of([self.place.probe(), *map(str, words)], name or f"probe-{words[0]}", timeout_s, env)

    def start(self, command, name, env=None, piped=False):
        return self.processes.start(command, env or self.bare, name, piped)

    # The governed side

    def arbiter(self, quantum_ms=None, driver=None, config="", mode="exclusive"):
        """An arbiter of this section alone, up and answering. Every device is in the mode."""
        self.arbiters += 1
        return Arbiter(self, self.directory / f"a{self.arbiters}", mode, quantum_ms, driver, config)


class Arbiter:
    def __init__(self, context, directory, mode, quantum_ms, driver, more=""):
        self.context = context
        self.driver = driver
        directory.mkdir(mode=0o700)
        self.env = dict(context.bare)
        # `sublet run --sim` adds the directory itself.
        if context.simulated:
            self.env["LD_LIBRARY_PATH"] = os.environ.get("LD_LIBRARY_PATH", "")
        self.env["SUBLET_RUNTIME_DIR"] = str(directory)
        # Its own file: none of the machine's is to have a say.
        config = directory / "sublet.toml"
        quantum = f'quantum = "{quantum_ms}ms"\n' if quantum_ms else ""
        config.write_text(f'{more}[[device]]\ndevice = "*"\nmode = "{mode}"\n{quantum}')
        self.env["SUBLET_CONFIG"] = str(config)
        self.process = context.start([context.place.sublet, "arbiter", "--runtime-dir", directory], "arbiter", self.env)
        deadline = time.monotonic() + context.limit(10)
        while self.status()["arbiter"] is None:
            if self.process.has_exited() or time.monotonic() > deadline:
                self.process.end()
                raise Failure(f"the arbiter does not answer: {self.process.last_lines()} {self.process.stdout()[-500:]}")
            time.sleep(0.05)

    def status(self):
        """What `sublet ps --json` says."""
        return self.context.json_of([self.context.place.sublet, "ps", "--json"], "ps", 10, self.env)

    def job(self, name):
        found = [job for job in self.status()["jobs"] if job["name"] == name]
        if not found:
            raise Failure(f"`sublet ps` does not know the job {name}")
        return found[0]

    def wait_for_job(self, name, timeout_s=20):
        """Until a job has memory."""
        deadline = time.monotonic() + self.context.limit(timeout_s)
        while not any(job["name"] == name and job["mem_used_bytes"] for job in self.status()["jobs"]):
            if time.monotonic() > deadline:
                raise Failure(f"the job {name} has not come to use the device")
            time.sleep(0.05)

    def refusals(self, name):
        """How often a job was refused memory, as the arbiter counts: it reads its clients' journals a little later."""
        deadline = time.monotonic() + self.context.limit(5)
        while True:
            count = self.job(name)["oom_count"]
            if count or time.monotonic() > deadline:
                return count
            time.sleep(0.1)

    def command(self, command, name, mem=None, share=None, flags=()):
        words = [self.context.place.sublet, "run", "--name", name]
        if self.driver:
            words += ["--driver", self.driver]
        elif self.context.simulated:
            words += ["--sim"]
        words += ["--mem", mem] if mem else []
        words += ["--share", f"{share:g}"] if share else []
        return [*words, *flags, "--", *command]

    def start(self, command, name, mem=None, share=None, env=None, piped=False):
        return self.context.start(self.command(command, name, mem, share), name, self._env(env), piped)

    def run(self, command, name, mem=None, share=None, timeout_s=60, env=None, expect=(0,)):
        return self.context.run(self.command(command, name, mem, share), name, timeout_s, self._env(env), expect)

    def json_of(self, command, name, mem=None, share=None, timeout_s=60, env=None):
        return last_json(self.run(command, name, mem, share, timeout_s, env))

    def set(self, name, share):
        self.context.run([self.context.place.sublet, "set", name, "--share", f"{share:g}"], f"set-{name}", 10, self.env)

    def set_mode(self, mode):
        """Changes how jobs share the first device."""
        self.context.run([self.context.place.sublet, "device", "set", "0", "--mode", mode], f"mode-{mode}", 10, self.env)

    def environment(self, name, mem=None, share=None):
        """The environment of a job's processes; the job lives until the section ends. Programs started with it are of the job."""
        printer = self.start([sys.executable, "-c", ENV_PRINTER], name, mem, share, piped=True)
        return json.loads(read_line(printer, self.context.limit(20)))

    def _env(self, more):
        return {**self.env, **more} if more else self.env


def last_json(process):
    lines = process.stdout().strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        raise Failure(f"{process.name} printed no JSON as its last line; {process.last_lines()}") from None


def read_line(process, timeout_s):
    """One line of a program that reads commands. TimedOut or closed is a failure with what it said last."""
    deadline = time.monotonic() + timeout_s
    buffer = process.__dict__.setdefault("unread", bytearray())
    pipe = process.popen.stdout
    while b"\n" not in buffer:
        left = deadline - time.monotonic()
        if left <= 0:
            process.end()
            raise TimedOut(f"{process.name} did not answer within {timeout_s:.0f} s: {process.last_lines()}")
        if not select.select([pipe], [], [], left)[0]:
            continue
        data = os.read(pipe.fileno(), 1 << 16)
        if not data:
            code = process.wait(5)
            raise Failure(f"{process.name} ended with {describe(code)} instead of answering: {process.last_lines()}")
        buffer += data
    line, _, rest = bytes(buffer).partition(b"\n")
    buffer[:] = rest
    return line.decode("utf-8", "replace")


class Worker:
    """A program that takes commands line by line (jobs/torch_worker.py)."""

    def __init__(self, context, process, timeout_s=90):
        self.context = context
        self.process = process
        self.ready = self.answer(timeout_s, "ready")

    def tell(self, do, **arguments):
        line = json.dumps({"do": do, **arguments}) + "\n"
        try:
            self.process.popen.stdin.write(line.encode())
            self.process.popen.stdin.flush()
        except OSError as error:
            raise Failure(f"{self.process.name} does not take the command {do} ({error}): {self.process.last_lines()}") from None

    def answer(self, timeout_s, what):
        line = read_line(self.process, self.context.limit(timeout_s))
        answer = json.loads(line)
        if "error" in answer:
            raise Failure(f"{self.process.name}: {what}: {answer['error']}: {answer.get('message', '')[:800]}")
        return answer

    def ask(self, do, timeout_s=60, **arguments):
        self.tell(do, **arguments)
        return self.answer(timeout_s, do)

    def close(self):
        try:
            self.tell("exit")
            return self.process.wait(self.context.limit(20))
        finally:
            self.process.end()
