"""Tell sublet where an iteration ends, and let it change a job's size there.

    import sublet

    for batch in batches:
        train(batch)
        sublet.step()
        if sublet.resize_requested() is not None:
            save(model)
            sublet.resize_ready()

auto() does that by itself where an optimizer of PyTorch has stepped. run() starts a command as a job, quota() changes the limits of
the job that this process is, for a while.

Pipeline(model) lets an evicted model compute as soon as its first layers are back. acquire(), yield_() and turn() are for jobs that take
turns at a GPU by themselves.

Outside of a job of `sublet run` all but run() does nothing, and quota() is an error. Nothing is imported but the standard library, and
nothing is loaded: the functions are looked up in the library that `sublet run` has put into the process already.
"""

from __future__ import annotations

import ctypes
import time

from .pipeline import Pipeline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .jobs import SubletError, job, quota, run
    from .turns import TurnTimeout, acquire, turn, yield_

__all__ = [
    "Pipeline",
    "SubletError",
    "TurnTimeout",
    "acquire",
    "active",
    "auto",
    "job",
    "quota",
    "resize_ready",
    "resize_requested",
    "run",
    "step",
    "turn",
    "yield_",
]

# How often a job that is ready to be stopped looks whether it still is to be, in seconds.
_LOOK_S = 0.02


def _find(name):
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = []
    function.restype = ctypes.c_int
    return function


_step = _find("sublet_step")
_requested = _find("sublet_resize_requested")
_ready = _find("sublet_resize_ready")


def active() -> bool:
    """Whether the process runs under a sublet that takes steps."""
    return _step is not None


def step() -> bool:
    """Says that an iteration has ended. Returns whether anybody took note of it."""
    return _step is not None and _step() == 1


def auto() -> bool:
    """Has step() called where an optimizer of PyTorch has stepped, now or once PyTorch is imported.

    Of several optimizers the steps of one count. Calling it again changes nothing. Returns whether the process is part of a job; outside of
    one nothing is done. `sublet run --step-hook torch` calls it at the start of every Python process of the job.
    """
    global _auto
    if active() and not _auto:
        from . import steps

        _auto = True
        steps.install(step)
    return active()


_auto = False


def resize_requested() -> int | None:
    """With how many GPUs the job is to continue (0: with none for now); None where nobody asks for a change.

    To be looked at where an iteration ends, in one process of the job. Save then, and call resize_ready().
    """
    gpus = -1 if _requested is None else _requested()
    return None if gpus < 0 else gpus


def resize_ready(patience: float = 60.0) -> bool:
    """Says that all is saved, and waits to be stopped. The job is started again from what it has saved, in its new size.

    Returns where it is to continue after all: True, because nobody asks any more or nobody has stopped it for `patience` seconds; False, because
    nobody asked in the first place.
    """
    if _ready is None or _ready() != 1:
        return False
    deadline = time.monotonic() + patience
    while resize_requested() is not None and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return True


def __getattr__(name):
    # What starts programs imports more than a training loop needs.
    if name in ("SubletError", "job", "quota", "run"):
        from . import jobs

        return getattr(jobs, name)
    if name in ("TurnTimeout", "acquire", "turn", "yield_"):
        from . import turns

        return getattr(turns, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
