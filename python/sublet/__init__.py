"""Tell sublet where an iteration ends.

    import sublet

    for batch in batches:
        train(batch)
        sublet.step()

Outside of a job of `sublet run` all of this does nothing. Nothing is imported but the standard library, and nothing is loaded: the
function is looked up in the library that `sublet run` has put into the process already.
"""

import ctypes

__all__ = ["active", "step"]


def _find():
    try:
        function = ctypes.CDLL(None).sublet_step
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = []
    function.restype = ctypes.c_int
    return function


_step = _find()


def active():
    """Whether the process runs under a sublet that takes steps."""
    return _step is not None


def step():
    """Says that an iteration has ended. Returns whether anybody took note of it."""
    return _step is not None and _step() == 1
