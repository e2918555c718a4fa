"""Finds the end of an iteration by itself: where an optimizer of PyTorch has stepped."""

import importlib.abc
import sys
import warnings
import weakref

MODULE = "torch.optim.optimizer"
# Steps of others after which the optimizer whose steps are counted is taken for one of an earlier
# phase of the program.
_OTHERS = 64


class Steps:
    """Calls `step` once an iteration, by the steps of one optimizer: a program with several lets each of them step."""

    def __init__(self, step):
        self._step = step
        self._counted = None
        self._others = 0

    def after(self, optimizer, _args=None, _kwargs=None):
        """What PyTorch calls after each step of any optimizer, on the thread that made it."""
        counted = self._counted and self._counted()
        if counted is not optimizer:
            self._others += 1
            if counted is not None and self._others < _OTHERS:
                return
            self._counted = weakref.ref(optimizer)
        self._others = 0
        self._step()


class _Finder(importlib.abc.MetaPathFinder):
    """Has the module of PyTorch's optimizers call `loaded` once it is there; found and loaded it is as ever."""

    def __init__(self, loaded):
        self._loaded = loaded

    def find_spec(self, fullname, path=None, target=None):
        if fullname != MODULE:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target) if finder is not self and hasattr(finder, "find_spec") else None
            if spec is not None:
                break
        else:
            return None
        if spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self)
        return spec

    def done(self, module):
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._loaded(module)


class _Loader(importlib.abc.Loader):
    def __init__(self, real, finder):
        self._real = real
        self._finder = finder

    def create_module(self, spec):
        return self._real.create_module(spec)

    def exec_module(self, module):
        # Programs that look at the module afterwards find its own loader.
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        self._real.exec_module(module)
        self._finder.done(module)


def _register(module, steps):
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is None:
        warnings.warn("sublet: this PyTorch is older than 2.0 and has no hook for steps; call sublet.step() where an iteration ends", stacklevel=2)
    else:
        register(steps.after)


def install(step):
    """Has `step` called where an iteration ends, now or once PyTorch is imported."""
    steps = Steps(step)
    module = sys.modules.get(MODULE)
    if module is not None and hasattr(module, "Optimizer"):
        _register(module, steps)
    else:
        sys.meta_path.insert(0, _Finder(lambda module: _register(module, steps)))
