"""A driver of Ray's that does what it reads: one JSON object a line on standard input, one answer a line on standard output.

Run by the Python that has Ray, with sublet's module on its path.
"""

import ctypes
import json
import os
import subprocess
import sys
import time
import traceback
import warnings

import ray
import sublet.ray

PATIENCE_S = 90


class Worker:
    """An actor that uses the GPU."""

    def __init__(self):
        self.children = []

    def about(self):
        context = ray.get_runtime_context()
        return {
            "pid": os.getpid(),
            "job": os.environ.get("SUBLET_JOB"),
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "node": context.get_node_id(),
            "started_with": "CUDA_VISIBLE_DEVICES=" in open("/proc/self/environ").read(),
        }

    def take(self, size, keep=False):
        """The driver's answer to an allocation in this very process."""
        cuda = ctypes.CDLL("libcuda.so.1")
        context, address = ctypes.c_void_p(), ctypes.c_uint64()
        for status in (
            cuda.cuInit(0),
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
            cuda.cuCtxSetCurrent(context),
        ):
            if status:
                return status
        status = cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
        if status == 0 and not keep:
            cuda.cuMemFree_v2(address)
        return status

    def uuid(self):
        cuda = ctypes.CDLL("libcuda.so.1")
        raw = (ctypes.c_ubyte * 16)()
        statuses = [cuda.cuInit(0), cuda.cuDeviceGetUuid_v2(raw, 0)]
        digits = bytes(raw).hex()
        return statuses, f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"

    def load(self, milliseconds):
        words = ["load", "--kernel-us", "500", "--for-ms", str(milliseconds)]
        self.children.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
        return self.children[-1].pid


# As Ray has it where the decorator has `num_gpus`: the worker ends with the task.
@ray.remote(max_calls=1)
def job_of_task():
    return os.environ.get("SUBLET_JOB"), os.getpid()


class Driver:
    def __init__(self):
        self.actors = {}
        self.chosen = {}

    def environment(self, how, settings):
        """A runtime_env, as a user makes it."""
        return {"sublet": settings} if how == "plain" else sublet.ray.runtime_env(**settings)

    def on(self, node):
        """Options by which Ray puts something on a node."""
        return {"label_selector": {sublet.ray.NODE_LABEL: node}} if node else {}

    def do_check(self, settings, how="made"):
        """What is refused before anything is submitted."""
        from ray.runtime_env import RuntimeEnv

        return str(RuntimeEnv(**self.environment(how, settings)).serialize())

    def do_actor(self, name, settings=None, how="made", node=None, gpus=0.1, chosen=None, env_of=None, env=None):
        options = {"num_gpus": gpus, **self.on(node), **({"runtime_env": {"env_vars": env}} if env else {})}
        if chosen:
            options = self.chosen.pop(chosen)
        elif env_of:
            options["runtime_env"] = self.actors[env_of][1]
        elif settings is not None:
            options["runtime_env"] = self.environment(how, settings)
        begun = time.monotonic()
        actor = ray.remote(Worker).options(num_cpus=0.1, **options).remote()
        about = ray.get(actor.about.remote(), timeout=PATIENCE_S)
        self.actors[name] = (actor, options.get("runtime_env"))
        return {**about, "seconds": time.monotonic() - begun}

    def do_call(self, name, method, words=()):
        return ray.get(getattr(self.actors[name][0], method).remote(*words), timeout=PATIENCE_S)

    def do_end(self, name):
        ray.kill(self.actors.pop(name)[0])

    def do_forget(self, name):
        self.actors.pop(name, None)

    def do_task(self, settings=None, how="made", node=None, gpus=0.1, retries=0):
        options = {"num_gpus": gpus, **self.on(node)}
        if settings is not None:
            options["runtime_env"] = self.environment(how, settings)
        return ray.get(job_of_task.options(num_cpus=0.1, max_retries=retries, **options).remote(), timeout=PATIENCE_S)

    def do_options(self, name, settings, **more):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            options = sublet.ray.options(**settings, **more)
        self.chosen[name] = options
        pinned = options.get("scheduling_strategy")
        return {
            "decision": options.decision,
            "num_gpus": options["num_gpus"],
            "env": options["runtime_env"],
            "node": getattr(pinned, "node_id", None),
            "warnings": [str(one.message) for one in said],
        }

    def do_nodes(self):
        return [{"id": node["NodeID"], "labels": node["Labels"], "resources": node["Resources"], "alive": node["Alive"]} for node in ray.nodes()]


def main():
    answers = os.fdopen(os.dup(1), "w")
    # What Ray prints is no answer.
    os.dup2(2, 1)
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="WARNING")
    driver = Driver()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"is": getattr(driver, f"do_{asked.pop('do')}")(**asked)}
        except Exception as error:
            answer = {"error": type(error).__name__, "says": str(error), "trace": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


main()
