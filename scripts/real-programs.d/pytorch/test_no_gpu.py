"""What PyTorch's wheel does on NVIDIA's driver library where there is no GPU.

Not whether that is right: what it says and computes is written down (`record_property`) and held
against the same of a bare run by scripts/real-programs. Errors name no addresses and no times.
"""

import hashlib
import os
import re
import subprocess
import sys
import warnings

import numpy
import pytest
import torch

# Each stands for a way into CUDA that a program tries to see whether there is any.
ATTEMPTS = {
    "current_device": lambda: torch.cuda.current_device(),
    "empty_cache": lambda: torch.cuda.empty_cache(),
    "event": lambda: torch.cuda.Event().record(),
    "get_device_capability": lambda: torch.cuda.get_device_capability(),
    "get_device_name": lambda: torch.cuda.get_device_name(0),
    "get_device_properties": lambda: torch.cuda.get_device_properties(0),
    "graph": lambda: torch.cuda.CUDAGraph(),
    "init": lambda: torch.cuda.init(),
    "manual_seed_all": lambda: torch.cuda.manual_seed_all(1),
    "mem_get_info": lambda: torch.cuda.mem_get_info(),
    "memory_allocated": lambda: torch.cuda.memory_allocated(),
    "model_to": lambda: torch.nn.Linear(2, 2).to("cuda"),
    "pin_memory": lambda: torch.zeros(4).pin_memory(),
    "rng_state": lambda: torch.cuda.get_rng_state(),
    "set_device": lambda: torch.cuda.set_device(0),
    "stream": lambda: torch.cuda.Stream(),
    "synchronize": lambda: torch.cuda.synchronize(),
    "tensor": lambda: torch.zeros(1, device="cuda"),
    "utilization": lambda: torch.cuda.utilization(0),
}


def digest(*arrays):
    found = hashlib.sha256()
    for array in arrays:
        found.update(array.detach().numpy().tobytes())
    return found.hexdigest()


def said(text):
    """Without what differs from process to process."""
    return re.sub(r"0x[0-9a-f]+|\[W\d+ [0-9:.]+|pid \d+|/tmp/\S+", "_", text)


def fresh(code, **env):
    """What another Python says of it, and how it ends."""
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=80, env={**os.environ, **env})
    return f"{done.returncode} {said(done.stdout)} {said(done.stderr)}"


def network():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 4))


def train(model, steps=30):
    numbers = torch.Generator().manual_seed(11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        inputs = torch.randn(48, 32, generator=numbers)
        targets = torch.randint(4, (48,), generator=numbers)
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((3,), float(index * index)), torch.cuda.is_available()


def test_versions(record_property):
    record_property("torch", torch.__version__)
    record_property("cuda", torch.version.cuda)
    record_property("built", torch.backends.cuda.is_built())


def test_is_available_and_how_many(record_property):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record_property("available", torch.cuda.is_available())
        record_property("count", torch.cuda.device_count())
    record_property("warnings", [said(str(one.message)) for one in caught])


@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_says(name, record_property):
    try:
        record_property("answer", said(repr(ATTEMPTS[name]())))
    except Exception as error:
        record_property("error", f"{type(error).__name__}: {said(str(error))}")


@pytest.mark.parametrize("env", [{}, {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "0"}],
                         ids=lambda env: ",".join(f"{key}={value}" for key, value in env.items()) or "plain")
def test_a_fresh_process_says(env, record_property):
    record_property("said", fresh("import torch; print(torch.cuda.is_available(), torch.cuda.device_count()); torch.zeros(1).cuda()", **env))


def test_a_fork_after_the_first_question(record_property):
    record_property("said", fresh(
        "import os, torch; print(torch.cuda.is_available(), flush=True)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    print(torch.cuda.is_available(), torch.cuda.device_count(), float(torch.ones(5).sum()), flush=True); os._exit(3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"))


def test_the_driver_by_ctypes_beside_it(record_property):
    record_property("said", fresh(
        "import ctypes, torch\n"
        "driver = ctypes.CDLL('libcuda.so.1'); version = ctypes.c_int(-1); count = ctypes.c_int(-1)\n"
        "print(driver.cuInit(0), driver.cuDriverGetVersion(ctypes.byref(version)), version.value, driver.cuDeviceGetCount(ctypes.byref(count)), count.value)"))


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_workers_of_a_data_loader(start, record_property):
    loader = torch.utils.data.DataLoader(Squares(), batch_size=8, num_workers=2, multiprocessing_context=start, timeout=60)
    batches = list(loader)
    record_property("digest", digest(*(values for values, _ in batches)))
    record_property("available", [bool(one) for _, there in batches for one in there][:1])
    assert sum(float(values[:, 0].sum()) for values, _ in batches) == sum(index * index for index in range(40))


@pytest.mark.parametrize("threads", [1, 2])
def test_training_on_the_processor_to_the_bit(threads, record_property):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = network()
        loss = train(model)
        record_property("loss", loss.item().hex())
        record_property("digest", digest(*model.parameters()))
    finally:
        torch.set_num_threads(before)
    assert torch.isfinite(loss)


def test_convolutions_and_half_precision_to_the_bit(record_property):
    torch.manual_seed(3)
    layer = torch.nn.Conv2d(3, 8, 3, padding=1)
    image = torch.randn(2, 3, 20, 20)
    record_property("float", digest(layer(image)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        record_property("bfloat16", digest(layer(image).float()))


def test_a_saved_model_is_the_same(tmp_path, record_property):
    model = network()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", map_location="cpu", weights_only=True)
    record_property("digest", digest(*found.values()))
    assert numpy.array_equal(found["0.weight"].numpy(), model[0].weight.detach().numpy())


def test_how_long_an_import_takes(record_property):
    # Compared by nobody test by test: times differ. The script says the median of each way. Of the
    # processor, for what else the machine does is nobody's matter here.
    code = (
        "import resource, torch; torch.cuda.is_available(); used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(used.ru_utime + used.ru_stime)"
    )
    taken = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=80, check=True)
        taken.append(float(done.stdout))
    record_property("seconds", sorted(taken)[2])
