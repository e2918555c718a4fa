"""Programs that a part of the trial runs, each with a log of its own."""

import signal
import subprocess


class Programs:
    """Those of one part, by name; their logs are in one directory."""

    def __init__(self, logs, env):
        self.logs, self.env, self.started = logs, env, {}

    def start_one(self, name, *words, env=None):
        log = open(self.logs / f"{name}.log", "a")
        child = subprocess.Popen([str(word) for word in words], env=env or self.env, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.started[name] = child
        return child

    def said(self, name):
        log = self.logs / f"{name}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def end_one(self, name, how=signal.SIGTERM):
        child = self.started.pop(name, None)
        if child and child.poll() is None:
            child.send_signal(how)
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                # kube-apiserver waits a minute for those who still ask.
                child.kill()
                child.wait()
