"""sublet.Pipeline with a model that has the methods of a torch.nn.Module and nothing else; what the library hears is written down."""

import sublet
from sublet import pipeline

MIB = 1 << 20


class Storage:
    def __init__(self, address, size):
        self.address, self.size = address, size

    def data_ptr(self):
        return self.address

    def nbytes(self):
        return self.size


class Tensor:
    def __init__(self, address, count, storage=None):
        self.address, self.count = address, count
        if storage is not None:
            self.untyped_storage = lambda: storage

    def data_ptr(self):
        return self.address

    def numel(self):
        return self.count

    def element_size(self):
        return 4


class Handle:
    def __init__(self, hooks, hook):
        self.hooks, self.hook = hooks, hook

    def remove(self):
        self.hooks.remove(self.hook)


class Module:
    def __init__(self, *tensors, buffers=(), **children):
        self.tensors, self.own_buffers, self.children = tensors, buffers, children
        self.before, self.after = [], []

    def named_children(self):
        return self.children.items()

    def parameters(self):
        return [*self.tensors, *(one for child in self.children.values() for one in child.parameters())]

    def buffers(self):
        return [*self.own_buffers, *(one for child in self.children.values() for one in child.buffers())]

    def register_forward_pre_hook(self, hook):
        self.before.append(hook)
        return Handle(self.before, hook)

    def register_forward_hook(self, hook):
        self.after.append(hook)
        return Handle(self.after, hook)

    def __call__(self):
        for hook in self.before:
            hook(self, ())
        for child in self.children.values():
            child()
        for hook in self.after:
            hook(self, (), None)


class Sequential(Module):
    pass


calls = []


def library():
    pipeline._add = lambda *words: calls.append(("add", *words)) or 1
    pipeline._begin = lambda group: calls.append(("begin", group)) or 1
    pipeline._clear = lambda: calls.append(("clear",)) or 1


def taken():
    found = list(calls)
    calls.clear()
    return found


def refused(kind, *words, **more):
    try:
        sublet.Pipeline(*words, **more)
    except kind as error:
        assert "sublet.Pipeline" in str(error), error
        return str(error)
    raise AssertionError("not refused")


def layers(count, size):
    return {str(at): Module(Tensor(4096 + at * size, size // 4)) for at in range(count)}


def without_library():
    model = Module(blocks=Sequential(**layers(2, MIB)))
    with sublet.Pipeline(model) as pipe:
        pipe.begin()
        model()
    assert not calls and not model.before and not model.after


def groups_follow_sizes():
    model = Module(Tensor(1 << 40, 10), blocks=Sequential(**layers(8, 100 * MIB)))
    pipe = sublet.Pipeline(model, groups=4)
    assert [len(group) for group in pipe.groups] == [2, 2, 2, 2]
    pipe.close()
    # sqrt(800 MiB * 25 GB/s * 100 us) = 46 MB is below a handle; a layer is more than that.
    pipe = sublet.Pipeline(model)
    assert [len(group) for group in pipe.groups] == [1] * 8
    pipe.close()
    small = sublet.Pipeline(Module(blocks=Sequential(**layers(64, 4 * MIB))))
    assert 3 <= len(small.groups) <= 5 and sum(map(len, small.groups)) == 64
    small.close()
    taken()


def a_pass():
    shared = Tensor(1 << 30, 100)
    model = Module(
        Tensor(1 << 40, 10),
        embed=Module(shared),
        blocks=Sequential(a=Module(Tensor(1 << 31, 8), buffers=[Tensor(1 << 32, 1)]), b=Module(Tensor(1 << 33, 8))),
        head=Module(shared, Tensor(0, 0)),
    )
    pipe = sublet.Pipeline(model, groups=[[model.children["embed"]], list(model.children["blocks"].children.values()), [model.children["head"]]])
    expected = [("clear",), ("add", 0, 1 << 30, 400), ("add", 1, 1 << 31, 32), ("add", 1, 1 << 32, 4), ("add", 1, 1 << 33, 32), ("add", 2, 1 << 30, 400)]
    assert taken() == expected
    model()
    assert taken() == [("begin", group) for group in (0, 0, 1, 1, 2, 2)]
    # A module that is called again does not lower what the pass may use.
    pipe.begin()
    model.children["head"]()
    model.children["embed"]()
    assert taken() == [("begin", 0), ("begin", 2), ("begin", 2)]
    # It has moved: all is reported anew, before the pass begins.
    shared.address = 1 << 34
    pipe.begin()
    moved = taken()
    assert moved[0] == ("clear",) and ("add", 0, 1 << 34, 400) in moved and moved[-1] == ("begin", 0), moved
    pipe.close()
    assert taken() == [("begin", 2), ("clear",)]
    model()
    pipe.begin()
    pipe.close()
    assert not calls and not any(one.before or one.after for one in pipeline._all_of(model))


def storages():
    storage = Storage(1 << 35, 1000)
    model = Module(a=Module(Tensor((1 << 35) + 100, 10, storage), Tensor((1 << 35) + 500, 5, storage)))
    sublet.Pipeline(model).close()
    assert taken()[:2] == [("clear",), ("add", 0, 1 << 35, 1024)]


def nonsense():
    model = Module(a=Module(Tensor(4096, 1)))
    assert "named_children" in refused(TypeError, object())
    assert "groups=0" in refused(ValueError, model, groups=0)
    assert "no layers" in refused(ValueError, Module(Tensor(4096, 1)))
    assert "no part" in refused(ValueError, model, groups=[[Module()]])
    assert "twice" in refused(ValueError, model, groups=[[model], [model.children["a"]]])
    taken()


if __name__ == "__main__":
    if pipeline._begin is None:
        without_library()
    library()
    for test in (groups_follow_sizes, a_pass, storages, nonsense):
        test()
    print("well")
