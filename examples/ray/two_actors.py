"""Two actors on one GPU, each inside a memory quota and a share of the GPU's time.

Run it in a Ray cluster whose nodes have sublet's plugin (RAY_ADDRESS says which). `train_mlp` stands for what an actor computes: an actor
with PyTorch has the same limits in its own process.
"""

import json
import subprocess
import sys

import ray
import sublet.ray

seconds = sys.argv[1] if len(sys.argv) > 1 else "15"
ray.init(log_to_driver=False, logging_level="WARNING")


@ray.remote(num_cpus=0.1, label_selector={"sublet.dev/node": "n1"})
class Trainer:
    def train(self):
        words = ["train_mlp", "--min-seconds", seconds, "--extra-us", "500", "--json"]
        done = subprocess.run(words, capture_output=True, text=True)
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr

    def take(self, size):
        words = ["train_mlp", "--steps", "5", "--ballast", size]
        return subprocess.run(words, capture_output=True, text=True).returncode


large = Trainer.options(
    num_gpus=0.75,
    runtime_env=sublet.ray.runtime_env(name="large", mem="3GiB", share=0.75),
).remote()
small = Trainer.options(
    num_gpus=0.25,
    runtime_env=sublet.ray.runtime_env(name="small", mem="2GiB", share=0.25),
).remote()

for name, trained in zip(("large", "small"), ray.get([large.train.remote(), small.train.remote()])):
    print(f"{name}: {trained['steps']} steps")
print("1 GiB in small: exit code", ray.get(small.take.remote("1GiB")))
print("3 GiB in small: exit code", ray.get(small.take.remote("3GiB")), "(2 is out of memory)")
