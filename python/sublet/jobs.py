"""Starts jobs, and changes the limits of the job that a notebook's kernel or a program is."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


# What `sublet` ends with where it started nothing.
FAILED = 125


class SubletError(RuntimeError):
    """What the command `sublet` said on its one line."""


def command() -> str:
    """Where `sublet` is: what SUBLET_COMMAND names, beside this Python, or on the path."""
    given = os.environ.get("SUBLET_COMMAND")
    beside = pathlib.Path(sys.executable).parent / "sublet"
    found = given or (str(beside) if os.access(beside, os.X_OK) else shutil.which("sublet"))
    if found is None:
        raise SubletError(f"the command `sublet` is neither beside {sys.executable} nor on the path: install it, or set SUBLET_COMMAND")
    return found


def _flags(settings):
    """Settings as flags: `share_max=0.5` is `--share-max=0.5`; True is the flag itself, None and False are nothing."""
    words = []
    for name, value in settings.items():
        flag = "--" + name.rstrip("_").replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words.append(f"{flag}={value}")
    return words


def run(args: Sequence[str | os.PathLike[str]], *, popen: Mapping[str, Any] | None = None, **settings: Any) -> subprocess.CompletedProcess[Any]:
    """Runs a command as a job and waits for its end.

    args: the command and its arguments, a list of words.
    settings: of `sublet run`, underscores for dashes: mem="8GiB", share=0.5, name="a", class_="opportunistic", sim=True.
    popen: arguments of subprocess.run, such as {"capture_output": True, "env": ...}.

    Returns subprocess.CompletedProcess. Raises SubletError where sublet did not start the command.
    """
    if isinstance(args, (str, bytes, os.PathLike)):
        raise TypeError(f"args is a list of words, such as ['python', 'train.py'], not {args!r}")
    words = [command(), "run", *_flags(settings), "--", *map(str, args)]
    done = subprocess.run(words, **{"check": False, **(popen or {})})
    if done.returncode == FAILED:
        # The one line is on stderr, or in what was captured of it.
        said = done.stderr if isinstance(done.stderr, str) else (done.stderr or b"").decode("utf-8", "replace")
        line = (said.strip().splitlines() or ["sublet: the command was not started (exit code 125)"])[-1]
        if line.startswith("sublet: "):
            raise SubletError(line[len("sublet: ") :])
    return done


def _ask(*words):
    done = subprocess.run([command(), *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        line = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SubletError(line.removeprefix("sublet: "))
    return json.loads(done.stdout)


def job() -> dict[str, Any] | None:
    """The job that this process is part of, as `sublet ps --json` has it; None outside of a job."""
    name = os.environ.get("SUBLET_JOB")
    if name is None:
        return None
    jobs = _ask("ps", "--json")["jobs"]
    return next((one for one in jobs if one["name"] == name), None)


@contextlib.contextmanager
def quota(*, mem: str | None = None, share: float | None = None) -> Iterator[None]:
    """Other limits for this process's job while the block runs: a memory limit ("4GiB") and a share (0.25).

    They are the whole job's, every process of it. What the job has more of than a new memory limit stays; what it asks for beyond is
    refused. At the end of the block the limits are those from before. Raises SubletError outside of a job.
    """
    before = job()
    if before is None:
        raise SubletError("this process is part of no job: start it with `sublet run`, or the notebook with a kernel of `sublet kernel install`")
    change, back = {}, {}
    if mem is not None:
        change["mem"] = mem
        limit = before["mem_limit_bytes"]
        back["mem"] = "100%" if limit is None else f"{limit}B"
    if share is not None:
        if before["share_asked"] is None:
            raise SubletError(f"the job `{before['name']}` has no share to go back to: start it with one")
        change["share"] = share
        back["share"] = before["share_asked"]
    if not change:
        raise TypeError("quota() takes mem, share or both")
    _ask("set", before["name"], *_flags(change), "--json")
    try:
        yield
    finally:
        _ask("set", before["name"], *_flags(back), "--json")
