"""A PyTorch program that follows commands: one JSON object per line in, one per line out.

It is run bare and governed, gets the same commands, and must answer the same. It knows nothing of sublet. With `--device cpu` all but
the commands about device memory and graphs work, which is how it is tested without a GPU.
"""

import argparse
import collections
import json
import os
import sys
import time
import traceback

import dialogue

# cuBLAS is deterministic only with a fixed workspace, and reads this when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class Jobs:
    def __init__(self, torch, device):
        self.torch = torch
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.models = {}
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False

    def sync(self):
        if self.cuda:
            self.torch.cuda.synchronize()

    # Training

    def setup(self, model, seed=1, compile=False, small=False):
        """A model with its optimizer and its batches, from the seed alone. A second one of the same name replaces the first."""
        torch = self.torch
        self.models.pop(model, None)
        torch.manual_seed(seed)
        build = {"cnn": cnn, "gpt": gpt}[model]
        net, batches, loss_of = build(torch, small)
        net = net.to(self.device)
        batches = [tuple(part.to(self.device) for part in batch) for batch in batches]
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
        forward = torch.compile(net) if compile else net
        self.models[model] = (forward, batches, loss_of, optimizer, [0])
        self.sync()
        return {"parameters": sum(p.numel() for p in net.parameters())}

    def step(self, model):
        forward, batches, loss_of, optimizer, done = self.models[model]
        batch = batches[done[0] % len(batches)]
        done[0] += 1
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(forward, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def train(self, model, steps):
        """`steps` steps without a wait between them, as training loops do."""
        self.sync()
        begun = time.perf_counter()
        losses = [self.step(model) for _ in range(steps)]
        self.sync()
        seconds = time.perf_counter() - begun
        stacked = self.torch.stack(losses).float().cpu()
        return {"steps": steps, "seconds": seconds, "losses": [f"{bits & 0xFFFFFFFF:08x}" for bits in stacked.view(self.torch.int32).tolist()],
                "last_loss": float(stacked[-1])}

    def train_for(self, model, seconds):
        """Trains for so long with work always queued: at most `ahead` steps, so that the end is near when the time is up."""
        torch = self.torch
        ahead, marks = 8, collections.deque()
        self.sync()
        begun = time.perf_counter()
        steps = 0
        while time.perf_counter() - begun < seconds:
            self.step(model)
            steps += 1
            if self.cuda:
                mark = torch.cuda.Event()
                mark.record()
                marks.append(mark)
                if len(marks) > ahead:
                    marks.popleft().synchronize()
        self.sync()
        passed = time.perf_counter() - begun
        return {"steps": steps, "seconds": passed, "steps_per_s": steps / passed}

    # Memory

    def memory(self):
        torch = self.torch
        free, total = torch.cuda.mem_get_info()
        backend = torch.cuda.get_allocator_backend()
        # The other allocator keeps no list of segments and says so with an error.
        segments = torch.cuda.memory_snapshot() if backend == "native" else []
        return {
            "free_bytes": free,
            "total_bytes": total,
            "properties_total_bytes": torch.cuda.get_device_properties(0).total_memory,
            "allocated_bytes": torch.cuda.memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "backend": backend,
            "expandable_segments": sum(1 for segment in segments if segment.get("is_expandable")),
            "segments": len(segments),
        }

    def hog(self, chunk_bytes, most_bytes):
        """Allocates until there is no more, or `most_bytes` are held; then gives all back and computes something."""
        torch = self.torch
        held, message, kind = [], None, None
        before = torch.cuda.memory_allocated()
        try:
            while len(held) * chunk_bytes < most_bytes:
                held.append(torch.empty(chunk_bytes, dtype=torch.uint8, device=self.device))
        except RuntimeError as error:
            kind, message = type(error).__name__, str(error)
        taken = torch.cuda.memory_allocated() - before
        reserved = torch.cuda.memory_reserved()
        held.clear()
        torch.cuda.empty_cache()
        x = torch.arange(1 << 20, device=self.device, dtype=torch.float64)
        return {"allocated_bytes": taken, "reserved_bytes": reserved, "oom": kind, "oom_message": message,
                "works_after": float(x.sum()) == float((1 << 20) * ((1 << 20) - 1) // 2)}

    # Graphs

    def graph(self, replays):
        """A training step captured once and replayed, against the same steps launched one by one."""
        torch = self.torch

        def fresh():
            torch.manual_seed(7)
            net = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 64)).to(self.device)
            x, y = torch.randn(128, 256, device=self.device), torch.randn(128, 64, device=self.device)
            return net, torch.optim.SGD(net.parameters(), lr=0.01), x, y

        def step(net, optimizer, x, y):
            optimizer.zero_grad(set_to_none=True)
            loss = torch.nn.functional.mse_loss(net(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        warm = 3
        eager = fresh()
        eager_losses = [step(*eager) for _ in range(warm + replays)]
        captured = fresh()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            losses = [step(*captured).clone() for _ in range(warm)]
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        captured[1].zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            static_loss = step(*captured)
        self.sync()
        begun = time.perf_counter()
        for _ in range(replays):
            graph.replay()
            losses.append(static_loss.clone())
        self.sync()
        seconds = time.perf_counter() - begun
        bits = [[int(loss.float().view(torch.int32)) & 0xFFFFFFFF for loss in some] for some in (eager_losses, losses)]
        return {"replays": replays, "seconds": seconds, "equals_eager": bits[0] == bits[1], "losses": [f"{b:08x}" for b in bits[1]],
                "largest_difference": max(abs(float(a) - float(b)) for a, b in zip(eager_losses, losses))}


def cnn(torch, small):
    """A small convolutional network on noise with a bar whose angle is the class."""
    import math

    nn = torch.nn
    side, batch = (16, 8) if small else (64, 128)

    def block(inputs, outputs):
        conv = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        return [*conv, nn.Conv2d(outputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    last = (side // 8) ** 2 * 128
    net = nn.Sequential(*block(3, 32), *block(32, 64), *block(64, 128), nn.Flatten(), nn.Linear(last, 10))
    grid = torch.arange(side, dtype=torch.float32) - (side - 1) / 2
    batches = []
    for _ in range(4):
        labels = torch.randint(10, (batch,))
        angles = math.pi * labels / 10
        far = (grid[None, :, None] * angles.cos()[:, None, None] - grid[None, None, :] * angles.sin()[:, None, None]).abs()
        images = (far < 3).float()[:, None] + 0.5 * torch.randn(batch, 3, side, side)
        batches.append((images, labels))
    return net, batches, lambda forward, batch: nn.functional.cross_entropy(forward(batch[0]), batch[1])


def gpt(torch, small):
    """A small GPT on random text of a small vocabulary."""
    nn = torch.nn
    functional = nn.functional
    layers, width, heads, context, batch, vocabulary = (2, 32, 2, 16, 4, 64) if small else (6, 384, 6, 256, 16, 256)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x):
            parts = self.qkv(self.before_attention(x)).split(width, dim=2)
            q, k, v = (part.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2) for part in parts)
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
            return x + self.mlp(self.before_mlp(x))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(vocabulary, width)
            self.places = nn.Parameter(0.02 * torch.randn(context, width))
            self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

        def forward(self, text):
            return self.head(self.norm(self.blocks(self.tokens(text) + self.places)))

    batches = []
    for _ in range(4):
        text = torch.randint(vocabulary, (batch, context + 1))
        batches.append((text[:, :-1].contiguous(), text[:, 1:].contiguous()))

    def loss_of(forward, batch):
        return functional.cross_entropy(forward(batch[0]).flatten(0, 1), batch[1].flatten())

    return Gpt(), batches, loss_of


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    # Answers have the real stdout for themselves; whatever prints to stdout goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(**members):
        answers.write(json.dumps(members) + "\n")
        answers.flush()

    begun = time.perf_counter()
    try:
        import torch

        imported = time.perf_counter()
        jobs = Jobs(torch, args.device)
        name = "cpu"
        if jobs.cuda:
            if not torch.cuda.is_available():
                raise RuntimeError(f"PyTorch {torch.__version__} finds no CUDA device")
            torch.zeros(1, device=jobs.device)
            name = torch.cuda.get_device_name()
    except Exception as error:
        traceback.print_exc()
        answer(error=type(error).__name__, message=str(error))
        return 1
    answer(ready=True, torch=torch.__version__, cuda=torch.version.cuda, device=name, import_s=imported - begun,
           device_s=time.perf_counter() - imported)
    dialogue.follow(jobs, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
