"""Which frameworks are there."""

import sys

from .processes import Failure

CHECKS = {
    "torch": "import torch; assert torch.cuda.is_available(), 'it finds no CUDA device'; print(torch.__version__)",
    "cupy": "import cupy; assert cupy.cuda.runtime.getDeviceCount() > 0, 'it finds no CUDA device'; print(cupy.__version__)",
    "vllm": "import torch, vllm; assert torch.cuda.is_available(), 'PyTorch finds no CUDA device'; print(vllm.__version__)",
    "jax": "import jax; assert jax.default_backend() == 'gpu', 'its backend is ' + jax.default_backend(); print(jax.__version__)",
}


def importable(ctx, name):
    """Why `name` cannot be used, or None where it can. Looked up once in a run."""
    known = ctx.shared.setdefault("frameworks", {})
    if name not in known:
        try:
            # TIMEOUT: a first import of PyTorch from a cold disk takes tens of seconds.
            done = ctx.run([sys.executable, "-c", CHECKS[name]], f"import-{name}", 60, {**ctx.bare, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
            ctx.shared.setdefault("versions", {})[name] = done.stdout().strip().splitlines()[-1]
            known[name] = None
        except Failure as failure:
            known[name] = str(failure)
    return known[name]
