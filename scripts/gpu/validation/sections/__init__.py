"""The sections, in the order in which they run: what decides most comes first, since a run has one budget of time.

A new section is a function of a Context in one of these modules, and a row here.
"""

import collections

from . import calls, corun, experiments, frameworks, host, memory, mps, neighbours, residency, shares, torch_jobs, turns

# needs: "torch", "cupy", "jax" or "vllm": a module that must be importable and see a GPU; None:
# also on the simulated GPU.
Section = collections.namedtuple("Section", "name run limit_s needs what")

ALL = [
    Section("device", host.device, 30, None, "driver, NVML, MIG and MPS state"),
    Section("transparency", host.transparency, 60, None, "behaviour of the driver bare, interposed and governed: differences"),
    Section("mlp", turns.mlp, 75, None, "train_mlp alone and two at 0.75/0.25: shares, losses equal to the bit"),
    Section("write_value", memory.write_value, 20, None, "completion marks: cost, visibility, order"),
    Section("overheads", calls.overheads, 60, None, "what each call costs, bare and governed"),
    Section("pytorch_solo", torch_jobs.solo, 75, "torch", "CNN and GPT alone, bare and governed: step time, losses"),
    Section("pytorch_pair", torch_jobs.pair, 75, "torch", "two GPT jobs at 0.5/0.5 and 0.75/0.25"),
    Section("pytorch_quota", torch_jobs.quota, 60, "torch", "three jobs under quotas, one at its limit"),
    Section("residency", residency.residency, 90, None, "a job evicted, restored, and two switched, against the link; contents"),
    Section("residency_pytorch", residency.pytorch, 75, "torch", "PyTorch evicted and restored in mid-training: losses equal"),
    Section("oversubscribe", residency.oversubscribe, 90, None, "three trainings with 2.2 times the memory that there is"),
    Section("ways", host.ways, 40, None, "sublet doctor: is every call seen"),
    Section("fairness", shares.fairness, 45, None, "shares of several weights and kernel lengths, by what the kernels did"),
    Section("protect", shares.protect, 55, None, "a guaranteed job beside an opportunistic one, and without us"),
    Section("handover", turns.handover, 30, None, "hand-over between two busy tenants"),
    Section("ahead", turns.ahead, 45, None, "hosts that are ahead of the device and behind in turns, in slices"),
    Section("corun_facts", corun.facts, 40, None, "how the device changes between processes: after idleness, with an empty queue, blocked"),
    Section("corun", corun.corun, 190, "torch", "CNN and GPT, two GPTs: sums of speeds without us, in slices and with lend"),
    Section("corun_mps", corun.under_mps, 70, "torch", "a CNN and a GPT as clients of MPS, in each mode"),
    Section("vmm", memory.vmm, 20, None, "cost of physical handles"),
    Section("pcie", memory.pcie, 20, None, "pinned, duplex and pageable copies; cost of pinning"),
    Section("context_memory", memory.context_memory, 45, None, "device memory of a context and its libraries"),
    Section("marks_beside", neighbours.marks_beside, 45, None, "an idle process's marks beside a busy one: visibility, the other's loss"),
    Section("vmm_beside", neighbours.vmm_beside, 40, None, "physical handles beside a copy and beside another process's"),
    Section("pin_beside", neighbours.pin_beside, 30, None, "allocations beside another process that page-locks memory"),
    Section("streams", neighbours.streams, 60, None, "six streams, destroyed streams, captures during evictions"),
    Section("record", experiments.record, 110, None, "jobs recorded and replayed: launches, device time, what recording costs"),
    Section("interfere", experiments.interfere, 260, None, "two jobs and their replays beside each other, and without us"),
    Section("tools", neighbours.tools, 55, None, "NVIDIA's profilers and debuggers on a governed program"),
    Section("expandable", torch_jobs.expandable, 45, "torch", "PyTorch's expandable segments under a quota"),
    Section("async_alloc", torch_jobs.async_alloc, 45, "torch", "PyTorch on cudaMallocAsync under a quota"),
    Section("graphs", torch_jobs.graphs, 40, "torch", "CUDA graph capture and replay"),
    Section("workers", torch_jobs.workers, 45, "torch", "DataLoader with forked workers"),
    Section("amp", torch_jobs.amp, 45, "torch", "automatic mixed precision"),
    Section("cupy", frameworks.cupy, 40, "cupy", "CuPy bare and governed"),
    Section("jax", frameworks.jax, 50, "jax", "JAX bare and governed"),
    Section("mps", mps.mps, 75, None, "jobs as clients of MPS: marks, shares, limits, losses"),
    Section("vllm", frameworks.vllm, 180, "vllm", "vLLM bare and governed, on two devices where there are two"),
    Section("compile", torch_jobs.compiled, 80, "torch", "torch.compile, with its compiler processes"),
]

# A run of everything is longer than one command may last on many a borrowed machine. Five calls,
# the cheap facts first: what fails in the first changes what the second is for. All but the last
# fit whatever happens; of the last, what has no time left is skipped by name, the last first.
CALLS = {
    "facts": ["device", "write_value", "vmm", "pcie", "context_memory", "transparency", "marks_beside", "vmm_beside", "pin_beside", "streams",
              "ways", "handover", "ahead"],
    "corun": ["corun_facts", "corun", "corun_mps"],
    "experiments": ["record", "interfere"],
    "figures": ["device", "overheads", "mlp", "residency", "oversubscribe", "fairness", "protect", "tools"],
    "frameworks": ["pytorch_solo", "pytorch_pair", "pytorch_quota", "residency_pytorch", "expandable", "async_alloc", "graphs", "workers", "amp",
                   "cupy", "jax", "mps", "vllm", "compile"],
}
