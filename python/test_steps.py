"""sublet.auto() with a package that has the hooks of PyTorch's optimizers and nothing else."""

import gc
import importlib
import os
import pathlib
import subprocess
import sys
import tempfile
import warnings

import sublet
from sublet import steps

TORCH = '''
import itertools
HOOKS = []
def register_optimizer_step_post_hook(hook):
    HOOKS.append(hook)
class Optimizer:
    def step(self):
        for hook in HOOKS:
            hook(self, (), {})
'''


def package(folder, text=TORCH):
    optim = folder / "torch" / "optim"
    optim.mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("")
    (optim / "__init__.py").write_text("from .optimizer import Optimizer\n")
    (optim / "optimizer.py").write_text(text)


def forget():
    for name in [name for name in sys.modules if name.split(".")[0] == "torch"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def counted(install_first):
    """Steps that are counted of two optimizers in turns, of one after they are gone, and what the module looks like."""
    count = []
    if install_first:
        steps.install(lambda: count.append(1))
    import torch.optim

    if not install_first:
        steps.install(lambda: count.append(1))
    module = sys.modules[steps.MODULE]
    assert type(module.__loader__).__name__ == "SourceFileLoader", module.__loader__
    assert module.__spec__.loader is module.__loader__
    generator, discriminator = torch.optim.Optimizer(), torch.optim.Optimizer()
    for _ in range(10):
        generator.step()
        discriminator.step()
    assert len(count) == 10, count
    # The first has done its part and is not stepped any more.
    for _ in range(200):
        discriminator.step()
    assert 10 + 200 - steps._OTHERS <= len(count) <= 10 + 200, len(count)
    before = len(count)
    del generator, discriminator
    gc.collect()
    later = torch.optim.Optimizer()
    later.step()
    assert len(count) == before + 1
    assert not [finder for finder in sys.meta_path if isinstance(finder, steps._Finder)]


def bare(folder, environment):
    """Outside of a job nothing is hooked, and what was the first sitecustomize is run."""
    (folder / "sitecustomize.py").write_text("print('the other one')\n")
    here = pathlib.Path(__file__).resolve().parent
    script = "import torch.optim.optimizer as o, sublet, sys; print(len(o.HOOKS), sublet.auto(), 'json' in sys.modules)"
    path = os.pathsep.join(map(str, [here / "step-hook", folder, here]))
    done = subprocess.run([sys.executable, "-c", script], env={**environment, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the other one\n0 False False\n", ""), done


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        package(folder)
        sys.path.insert(0, str(folder))
        for install_first in (True, False):
            forget()
            counted(install_first)
        forget()
        bare(folder, dict(os.environ))
        assert sublet.auto() is False
        # A package of that name without optimizers; an older one.
        steps.install(lambda: None)
        (folder / "torch" / "optim" / "optimizer.py").write_text("class Optimizer: pass\n")
        forget()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            import torch.optim  # noqa: F401
        assert [str(one.message)[:36] for one in said] == ["sublet: this PyTorch is older than 2"], said
        sys.meta_path.insert(0, steps._Finder(print))
        assert importlib.util.find_spec("no_such_package_at_all") is None
    print("well")


main()
