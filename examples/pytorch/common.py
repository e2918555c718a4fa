"""What the two scripts share: arguments, seeds, the training loop and its report."""

import argparse
import json
import os
import sys
import time


class Parser(argparse.ArgumentParser):
    """Exits with 64 on wrong arguments: argparse's own 2 is what a job out of device memory ends with here."""

    def error(self, message):
        self.print_usage(sys.stderr)
        self.exit(64, f"{self.prog}: {message}\n")


def positive(text):
    """An argument that counts something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def parser(description, batch, lr):
    """The arguments of both scripts."""
    args = Parser(description=description)
    args.add_argument("--steps", type=positive, default=200, help="training steps (default %(default)s)")
    args.add_argument("--batch", type=positive, default=batch, help="examples per step (default %(default)s)")
    args.add_argument("--lr", type=float, default=lr, help="step size (default %(default)s)")
    args.add_argument("--seed", type=int, default=1, help="seed of weights and data (default %(default)s)")
    args.add_argument("--amp", action="store_true", help="compute in bfloat16 where PyTorch deems it safe")
    args.add_argument("--compile", action="store_true", help="compile the model with torch.compile")
    args.add_argument("--workers", type=int, default=0, help="processes that make the data (default: none)")
    args.add_argument("--progress-every", type=int, default=20, metavar="STEPS", help="steps between lines (default %(default)s)")
    args.add_argument("--name", default=None, help="name of the job in all lines")
    args.add_argument("--device", default="cuda", help="PyTorch device (default %(default)s)")
    args.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return args


def require_torch(args):
    """PyTorch, or exit 3 with the reason. To be called before any other import of it."""
    # cuBLAS is deterministic only with a fixed workspace, and reads this when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    program = os.path.basename(sys.argv[0])
    try:
        import torch
    except ImportError as error:
        print(f"{program}: PyTorch cannot be imported ({error}); install it with: pip install torch", file=sys.stderr)
        sys.exit(3)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print(
            f"{program}: PyTorch {torch.__version__} finds no CUDA device; it needs an NVIDIA GPU and a build with CUDA "
            "(the simulated GPU serves programs of the driver API, not PyTorch)",
            file=sys.stderr,
        )
        sys.exit(3)
    return torch


def deterministic(torch, seed):
    """Seeds everything and forbids algorithms that do not repeat."""
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def train(torch, args, name, model, dataset, loss_of):
    """Trains `model` on the examples of `dataset`, one pass, and prints how it goes. `loss_of(model, batch)` is the loss."""
    device = torch.device(args.device)
    cuda = device.type == "cuda"
    model = model.to(device)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    forward = torch.compile(model) if args.compile else model
    # Forked workers inherit the data set; they never touch the device.
    context = "fork" if args.workers > 0 else None
    loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch, num_workers=args.workers, pin_memory=cuda, multiprocessing_context=context)

    job = args.name or name
    print(f"{job}: {parameters} parameters on {torch.cuda.get_device_name(device) if cuda else device}", flush=True)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    loss = first = None
    # The first step compiles and fills caches: it counts as a step, its time does not.
    started = time.perf_counter()
    steps = 0
    for batch in loader:
        batch = [part.to(device, non_blocking=True) for part in batch]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.amp):
            loss = loss_of(forward, batch)
        loss.backward()
        optimizer.step()
        steps += 1
        if steps == 1:
            first = loss.item()
            started = time.perf_counter()
        if args.progress_every > 0 and steps % args.progress_every == 0 and steps > 1:
            rate = (steps - 1) / (time.perf_counter() - started)
            print(f"{job} step {steps}/{args.steps} loss {loss.item():.6f} {rate:.2f} steps/s", flush=True)
    last = loss.item()
    seconds = time.perf_counter() - started
    rate = (steps - 1) / seconds if steps > 1 else 0.0
    peak = torch.cuda.max_memory_allocated(device) if cuda else 0
    bits = f"{torch.tensor(last, dtype=torch.float32).view(torch.int32).item() & 0xFFFFFFFF:08x}"
    print(f"{job} done: {steps} steps, {rate:.2f} steps/s, loss {first:.6f} -> {last:.6f} (bits {bits}), peak {peak} bytes", flush=True)
    if args.json:
        report = {
            "job": job,
            "steps": steps,
            "seconds": seconds,
            "steps_per_s": rate,
            "loss": last,
            "loss_bits": bits,
            "first_loss": first,
            "mem_bytes": peak,
            "parameters": parameters,
        }
        print(json.dumps(report), flush=True)


def run(main):
    """Runs `main`; out of device memory is one line and exit 2, other errors stay tracebacks."""
    try:
        main()
    except RuntimeError as error:
        # torch.cuda.OutOfMemoryError (torch.OutOfMemoryError) is a RuntimeError of its own name.
        if type(error).__name__ != "OutOfMemoryError":
            raise
        print(f"{os.path.basename(sys.argv[0])}: out of device memory: {error}", file=sys.stderr)
        sys.exit(2)
