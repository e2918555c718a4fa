"""Run at the start of every Python process of a job of `sublet run --step-hook torch`: iterations end where optimizers step.

Python runs the first `sitecustomize` on its path, so this one runs the next, which would have been the first.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _next():
    path = [place for place in sys.path if os.path.abspath(place or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _hook():
    try:
        import sublet
    except ImportError:
        # Not installed in this environment: the module beside this folder will do.
        sys.path.append(os.path.dirname(_HERE))
        try:
            import sublet
        finally:
            sys.path.remove(os.path.dirname(_HERE))
    sublet.auto()


try:
    _hook()
except Exception as error:  # The program is to start whatever happens here.
    print(f"sublet: --step-hook torch: {error!r}; iterations are found without it", file=sys.stderr)
_next()
