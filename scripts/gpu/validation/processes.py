"""Starting programs with a time limit, and ending all that was started and nothing else.

Every program gets a process group of its own. It is waited for without being reaped, so that its process id, which names the
group, cannot be given to anybody else before the group has been ended.
"""

import os
import pathlib
import re
import signal
import subprocess
import time

LAST_BYTES = 2000
POLL_S = 0.01


class Failure(Exception):
    """Something did not do what it should. The message goes into the report."""


class TimedOut(Failure):
    """A time limit ran out."""


def last_of(path, most=LAST_BYTES):
    """The end of a text file, for a report."""
    try:
        data = pathlib.Path(path).read_bytes()
    except OSError as error:
        return f"({path} cannot be read: {error})"
    text = data[-most:].decode("utf-8", "replace")
    return ("... " + text) if len(data) > most else text


class Started:
    """A program that runs, or ran. Its output goes to files; `stdin` and `stdout` are pipes where `piped` was asked for."""

    def __init__(self, command, env, logs, name, piped=False):
        self.command = [str(word) for word in command]
        self.name = name
        self.out_path = logs / f"{name}.out"
        self.err_path = logs / f"{name}.err"
        self.ended = False
        self.returncode = None
        with open(self.err_path, "wb") as err, open(self.out_path, "wb") as out:
            try:
                self.popen = subprocess.Popen(
                    self.command,
                    env=env,
                    stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if piped else out,
                    stderr=err,
                    start_new_session=True,
                )
            except OSError as error:
                raise Failure(f"{name} cannot be started: {error}") from None
        self.pid = self.popen.pid

    def has_exited(self):
        """Whether the program itself has ended. It is not reaped, so its process group still bears its name."""
        if self.ended:
            return True
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, flags) is not None

    def wait(self, timeout_s):
        """Waits for the end, ends what is left of its group, and returns the exit code (negative: the signal)."""
        deadline = time.monotonic() + timeout_s
        while not self.has_exited():
            if time.monotonic() >= deadline:
                self.end()
                raise TimedOut(f"{self.name} did not end within {timeout_s:.0f} s: {self.last_lines()}")
            time.sleep(POLL_S)
        return self.end()

    def signal_group(self, number):
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass

    def end(self, grace_s=1.0):
        """Ends the program and its group: politely, then for certain. Returns the exit code."""
        if self.ended:
            return self.returncode
        if not self.has_exited():
            self.signal_group(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while not self.has_exited() and time.monotonic() < deadline:
                time.sleep(POLL_S)
        self.signal_group(signal.SIGKILL)
        # TIMEOUT: a killed process that does not go within seconds hangs in the kernel; leave it
        # rather than hang with it.
        try:
            self.returncode = self.popen.wait(5)
        except subprocess.TimeoutExpired:
            self.returncode = None
        self.ended = True
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe:
                try:
                    pipe.close()
                except OSError:
                    pass
        return self.returncode

    def stdout(self):
        return self.out_path.read_text("utf-8", "replace")

    def stderr(self):
        return self.err_path.read_text("utf-8", "replace")

    def last_lines(self):
        """What it said last, for a report."""
        said = last_of(self.err_path).strip()
        return f"stderr ends with: {said}" if said else "nothing on stderr"


class Processes:
    """All programs of one section."""

    def __init__(self, logs):
        self.logs = logs
        self.all = []
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, command, env, name, piped=False):
        safe = re.sub(r"[^\w.-]", "_", name)
        taken = sum(1 for process in self.all if process.name.split("~")[0] == safe)
        started = Started(command, env, self.logs, f"{safe}~{taken + 1}" if taken else safe, piped)
        self.all.append(started)
        return started

    def run(self, command, env, name, timeout_s, expect=(0,)):
        """Runs a program to its end; another exit code than those expected is a failure. Returns it."""
        started = self.start(command, env, name)
        code = started.wait(timeout_s)
        if expect is not None and code not in expect:
            raise Failure(f"{name} ended with {describe(code)}: {started.last_lines()}")
        return started

    def end_all(self):
        """The last started first: the arbiter, which others speak to, goes last."""
        for process in reversed(self.all):
            process.end()


def describe(code):
    if code is None:
        return "no exit code (it hangs in the kernel)"
    if code < 0:
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"
