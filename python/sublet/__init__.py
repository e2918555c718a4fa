"""Tell sublet where an iteration ends, and let it change a job's size there.

    import sublet

    for batch in batches:
        train(batch)
        sublet.step()
        if sublet.resize_requested() is not None:
            save(model)
            sublet.resize_ready()

Pipeline(model) lets an evicted model compute as soon as its first layers are back.

Outside of a job of `sublet run` all of this does nothing. Nothing is imported but the standard library, and nothing is loaded: the
functions are looked up in the library that `sublet run` has put into the process already.
"""

import ctypes
import time

from .pipeline import Pipeline

__all__ = ["Pipeline", "active", "resize_ready", "resize_requested", "step"]

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


def active():
    """Whether the process runs under a sublet that takes steps."""
    return _step is not None


def step():
    """Says that an iteration has ended. Returns whether anybody took note of it."""
    return _step is not None and _step() == 1


def resize_requested():
    """With how many GPUs the job is to continue (0: with none for now); None where nobody asks for a change.

    To be looked at where an iteration ends, in one process of the job. Save then, and call resize_ready().
    """
    gpus = -1 if _requested is None else _requested()
    return None if gpus < 0 else gpus


def resize_ready(patience=60.0):
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
