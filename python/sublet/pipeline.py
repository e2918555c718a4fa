"""Lets a model's computation start as soon as its first layers are back on the device, see docs/explanation/residency.md, "Hints".

What is in a group is known for certain, or is in none: a module is a unit where its parent does nothing but call it (the children of the
model, and the elements of Sequential, ModuleList and ModuleDict), or where the caller says so. What a unit holds belongs to its
group, everything else to none, and that comes back first.

How large a group is (PipeSwitch, OSDI 2020, 4.2): a group costs about c = 100 us (calls, and a handle that is not full), and the first one has to
arrive before anything runs. With B bytes in groups of b over a link of r that is c B / b + b / r, least at b = sqrt(B r c): 50 MB of
1 GB, 224 MB of 20 GB at 25 GB/s. Below the 64 MiB of a handle there is nothing to be gained.
"""

import ctypes
import math
import threading

__all__ = ["Pipeline"]

_HANDLE_BYTES = 64 << 20
_LINK_BYTES_PER_S = 25e9
_GROUP_S = 100e-6
# Modules that only call what they contain.
_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")
# What one allocation of a caching allocator is rounded up to: nothing else begins in there.
_UNIT_BYTES = 512


def _find(name, *arguments):
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
    function.argtypes = list(arguments)
    function.restype = ctypes.c_int
    return function


_add = _find("sublet_pipeline_add", ctypes.c_uint, ctypes.c_uint64, ctypes.c_uint64)
_begin = _find("sublet_pipeline_begin", ctypes.c_uint)
_clear = _find("sublet_pipeline_clear")


def _region(tensor):
    """Where a tensor lies: address and bytes. All of its storage, where it has one: views do not end where their numbers do."""
    storage = getattr(tensor, "untyped_storage", None)
    if storage is None:
        return tensor.data_ptr(), tensor.numel() * tensor.element_size()
    storage = storage()
    return storage.data_ptr(), -(-storage.nbytes() // _UNIT_BYTES) * _UNIT_BYTES


def _regions(module):
    """What a module and everything in it lies in; parameters and buffers of the host are reported as well, and mean nothing."""
    found = [_region(tensor) for tensor in [*module.parameters(), *module.buffers()]]
    return [region for region in found if region[0] and region[1]]


def _bytes(module):
    return sum(size for _, size in dict(_regions(module)).items())


def _units(module):
    for _, child in module.named_children():
        if any(one.__name__ in _CONTAINERS for one in type(child).__mro__):
            yield from _units(child)
        else:
            yield child


def _balanced(units, count):
    """Units in groups of about the same size, in their order; `count` of them, or as many as are worth it."""
    sizes = [_bytes(unit) for unit in units]
    total = sum(sizes)
    best = total / count if count else max(_HANDLE_BYTES, math.sqrt(total * _LINK_BYTES_PER_S * _GROUP_S))
    groups, filled = [[]], 0
    for unit, size in zip(units, sizes):
        # Where the unit would lie more outside of the group than in it the next one begins.
        if groups[-1] and filled + size / 2 > best * len(groups):
            groups.append([])
        groups[-1].append(unit)
        filled += size
    return groups


class Pipeline:
    """Lets the forward passes of a `torch.nn.Module` start before all of an evicted job's memory is back.

        with sublet.Pipeline(model) as pipeline:
            for batch in requests:
                # Before the input is copied; else the copy waits for everything.
                pipeline.begin()
                answer = model(batch.cuda())

    `groups`: how many there are to be, or lists of modules, in the order of a pass; without it the model's children and the elements of its
    Sequentials, ModuleLists and ModuleDicts are put together by their sizes. A module in a group has to be *called* by its parents, in each
    pass before anything else uses its parameters. Parameters of no listed module come back first.

    Outside of a job of `sublet run --evictable` it does nothing. What it costs is a call for each unit of a pass. Not for models that are
    compiled or captured into graphs: their layers are not called.
    """

    def __init__(self, model, groups=None):
        for name in ("named_children", "parameters", "buffers", "register_forward_pre_hook", "register_forward_hook"):
            if not callable(getattr(model, name, None)):
                raise TypeError(f"sublet.Pipeline: the model, a {type(model).__name__}, has no {name}(); it is to be a torch.nn.Module")
        if groups is None or isinstance(groups, int):
            if groups is not None and groups < 1:
                raise ValueError(f"sublet.Pipeline: groups={groups}: give 1 or more, or None for as many as are worth it")
            groups = _balanced(list(_units(model)), groups)
        groups = [list(group) for group in groups]
        if not any(groups):
            raise ValueError(f"sublet.Pipeline: {type(model).__name__} has no layers of its own: give `groups`, lists of modules that it calls")
        own = {id(one) for one in _all_of(model)}
        seen = set()
        for at, group in enumerate(groups):
            for unit in group:
                if id(unit) not in own:
                    raise ValueError(f"sublet.Pipeline: group {at}: a {type(unit).__name__} is no part of the model")
                inside = {id(one) for one in _all_of(unit)}
                if inside & seen:
                    raise ValueError(f"sublet.Pipeline: group {at}: (a part of) a {type(unit).__name__} is listed twice")
                seen |= inside
        self._model, self._groups, self._hooks = model, groups, []
        self._reported, self._open = None, _begin is not None
        # Promises are each thread's own.
        self._lock, self._pass = threading.Lock(), threading.local()
        if not self._open:
            return
        self._tell()
        self._hooks.append(model.register_forward_pre_hook(lambda *_: self.begin()))
        for number, group in enumerate(groups):
            for unit in group:
                self._hooks.append(unit.register_forward_pre_hook(lambda *_, number=number: self._enter(number)))
        try:
            # Whatever ends the pass, what follows may use anything.
            hook = model.register_forward_hook(lambda *_: self._all(), always_call=True)
        except TypeError:
            hook = model.register_forward_hook(lambda *_: self._all())
        self._hooks.append(hook)

    @property
    def groups(self):
        """The modules of each group."""
        return [list(group) for group in self._groups]

    def begin(self):
        """A pass begins: until its first layer is called nothing but the input and the first group is used. Waits until they are there."""
        if self._open:
            self._tell()
            self._pass.highest = 0
            _begin(0)

    def _enter(self, number):
        # What a pass has used it may use again: parents hold on to their children's parameters.
        self._pass.highest = max(getattr(self._pass, "highest", 0), number)
        _begin(self._pass.highest)

    def _all(self):
        if self._open:
            _begin(max(len(self._groups) - 1, 0))

    def _tell(self):
        """Says where everything lies, where that is not as it was."""
        regions = [[region for unit in group for region in _regions(unit)] for group in self._groups]
        with self._lock:
            if regions == self._reported:
                return
            _clear()
            for number, group in enumerate(regions):
                for address, size in dict.fromkeys(group):
                    _add(number, address, size)
            self._reported = regions

    def close(self):
        """The model is an ordinary one again."""
        if self._open:
            self._all()
            self._open = False
            for hook in self._hooks:
                hook.remove()
            _clear()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _all_of(module):
    yield module
    for _, child in module.named_children():
        yield from _all_of(child)
