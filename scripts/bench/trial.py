"""What scripts share that try sublet inside other people's systems: how a trial ends, waits with a limit, and who is alive."""

import pathlib
import signal
import sys
import time


class Skipped(Exception):
    """What a test needs cannot be had here."""


class Failure(Exception):
    """Something did not happen."""


def ends_by_term():
    """From here on SIGTERM ends this process as Ctrl-C does, so that what it started is ended. One that comes while that goes on is not heard."""
    def end(*_):
        # Not SIG_IGN: what is started to end the rest would have it too.
        signal.signal(signal.SIGTERM, lambda *_: None)
        sys.exit(143)

    signal.signal(signal.SIGTERM, end)


def until(what, holds, patience=60.0, seen=None):
    """What `holds` answers once that is true; `seen` tells what there was in its place where it never is."""
    end = time.monotonic() + patience
    while True:
        found = holds()
        if found:
            return found
        if time.monotonic() > end:
            more = f"; {seen()}" if seen else ""
            raise Failure(f"{what}: not within {patience:.0f} s{more}")
        time.sleep(0.05)


def alive(pid):
    """Whether a process is there and no zombie."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"
