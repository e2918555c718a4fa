"""Jobs that take turns at a GPU by themselves, see docs/how-to/take-turns.md.

The job asks for the turn of its group and gives it up again; what it asks is the command `sublet`, which asks the arbiter. Outside of a job
there is nobody to take turns with, and one warning says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import warnings
from collections.abc import Iterator
from typing import Any

from .jobs import SubletError, command

# What `sublet acquire` ends with where the turn has not come in time.
_NO_TURN = 124

_warned = False


class TurnTimeout(SubletError, TimeoutError):
    """The turn has not come in time; the job has none, and waits for none."""


def _ask(words):
    done = subprocess.run([command(), *words, "--json"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode not in (0, _NO_TURN):
        line = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SubletError(line.removeprefix("sublet: "))
    return done.returncode, json.loads(done.stdout)


def _is_job(required):
    global _warned
    if os.environ.get("SUBLET_JOB"):
        return True
    text = "this process is part of no job, so it has no turn to wait for: start it with `sublet run`"
    if required:
        raise SubletError(text)
    if not _warned:
        _warned = True
        warnings.warn(f"sublet: {text}", RuntimeWarning, stacklevel=4)
    return False


def _group(group):
    return [] if group is None else [f"--group={group}"]


def acquire(group: str | None = None, *, timeout: float | None = None, required: bool = False) -> dict[str, Any] | None:
    """Waits until this job has the turn of its group, and its memory is back on the device.

    group: the group; None is the one that the job is in, or `default`. timeout: seconds, an hour where nothing is said.

    Returns what the arbiter says: `waited_ms`, `restored` (the memory was away), `held_before`. Raises TurnTimeout where the turn does not
    come in time, SubletError where it is refused. Outside of a job it returns None at once, with one warning; `required` makes that an error.
    """
    if not _is_job(required):
        return None
    words = ["acquire", *_group(group)]
    if timeout is not None:
        # Less than a millisecond is a look.
        words.append(f"--timeout={max(1, round(timeout * 1000))}ms")
    code, said = _ask(words)
    if code == _NO_TURN:
        raise TurnTimeout(f"job `{said['job']}` has no turn of the group `{said['group']}` after {said['waited_ms'] / 1000:.1f} s")
    return said


def yield_(group: str | None = None, *, required: bool = False) -> dict[str, Any] | None:
    """Gives the turn up, and returns at once. What the job submits to the device from here on waits for its next turn.

    Returns what the arbiter says: `waiting` (jobs that wait), `stays` (nobody does, so the job's memory stays). Raises SubletError where the
    job has no turn. Outside of a job as acquire().
    """
    if not _is_job(required):
        return None
    return _ask(["yield", *_group(group)])[1]


@contextlib.contextmanager
def turn(group: str | None = None, *, timeout: float | None = None, required: bool = False) -> Iterator[dict[str, Any] | None]:
    """acquire() before the block, yield_() after it, however it ends.

    with sublet.turn("rl"):
        train_step()
        torch.cuda.synchronize()

    The block waits for what it has submitted: what is still running when the turn ends is waited for by the next job.
    """
    said = acquire(group, timeout=timeout, required=required)
    try:
        yield said
    finally:
        if said is not None:
            yield_(group)
